//! GGUF files taken apart, changed and put together again, and files that are a directory of tensors with nothing in them.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use ebbtide::quant::QuantType;

const ALIGNMENT: usize = 32;
const TYPE_U32: u32 = 4;
const TYPE_F32: u32 = 6;
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;
const TYPE_U64: u32 = 10;

/// A metadata value: its type and its bytes.
#[derive(Clone, Debug)]
pub struct Value {
    kind: u32,
    bytes: Vec<u8>,
}

impl Value {
    pub fn u32(value: u32) -> Self {
        Self { kind: TYPE_U32, bytes: value.to_le_bytes().to_vec() }
    }

    pub fn u64(value: u64) -> Self {
        Self { kind: TYPE_U64, bytes: value.to_le_bytes().to_vec() }
    }

    pub fn f32(value: f32) -> Self {
        Self { kind: TYPE_F32, bytes: value.to_le_bytes().to_vec() }
    }

    pub fn string(value: &str) -> Self {
        Self { kind: TYPE_STRING, bytes: string(value) }
    }

    pub fn u32s(values: &[u32]) -> Self {
        let mut bytes = TYPE_U32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        Self { kind: TYPE_ARRAY, bytes }
    }
}

/// A tensor; `data` is empty in a file that is a directory alone.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// Fastest first, as GGUF lists them.
    pub dims: Vec<u64>,
    pub quant: QuantType,
    pub data: Vec<u8>,
}

impl Tensor {
    /// An entry without data.
    pub fn empty(name: impl Into<String>, dims: &[u64], quant: QuantType) -> Self {
        Self { name: name.into(), dims: dims.to_vec(), quant, data: Vec::new() }
    }

    pub fn bytes(&self) -> u64 {
        self.quant.bytes_for(self.dims.iter().product()).expect("rows are whole blocks")
    }
}

/// A GGUF file in pieces.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    pub pairs: Vec<(String, Value)>,
    pub tensors: Vec<Tensor>,
}

impl Gguf {
    /// Takes a sound file apart.
    pub fn parse(file: &[u8]) -> Self {
        let mut cursor = Cursor { file, at: 8 };
        let (n_tensors, n_pairs) = (cursor.u64(), cursor.u64());
        let pairs = (0..n_pairs).map(|_| (cursor.text(), cursor.value())).collect();
        let entries: Vec<(Tensor, usize)> = (0..n_tensors).map(|_| cursor.entry()).collect();
        let data = cursor.at.next_multiple_of(ALIGNMENT);
        let with_data = |(mut tensor, offset): (Tensor, usize)| {
            let bytes = usize::try_from(tensor.bytes()).expect("small");
            tensor.data = file[data + offset..][..bytes].to_vec();
            tensor
        };
        Self { pairs, tensors: entries.into_iter().map(with_data).collect() }
    }

    /// Sets a key, in place where it exists.
    pub fn set(&mut self, key: &str, value: Value) {
        match self.pairs.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.pairs.push((key.to_owned(), value)),
        }
    }

    /// Removes a key, which must be there.
    pub fn remove(&mut self, key: &str) {
        let before = self.pairs.len();
        self.pairs.retain(|(name, _)| name != key);
        assert_eq!(self.pairs.len() + 1, before, "{key}");
    }

    pub fn tensor_mut(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// Takes a tensor out.
    pub fn take_tensor(&mut self, name: &str) -> Tensor {
        let at = self.tensors.iter().position(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no tensor {name}"));
        self.tensors.remove(at)
    }

    fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, value) in &self.pairs {
            out.extend(string(key));
            out.extend(value.kind.to_le_bytes());
            out.extend(&value.bytes);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend(u32::try_from(tensor.dims.len()).expect("few").to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.quant.ggml_id().to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT as u64);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out
    }

    /// Writes the file. Tensors without data become a hole.
    pub fn write(&self, path: &Path) {
        let mut file = File::create(path).expect("the temporary folder can be written");
        let header = self.header();
        file.write_all(&header).expect("room for a header");
        let mut end = header.len() as u64;
        for tensor in &self.tensors {
            if !tensor.data.is_empty() {
                file.seek(SeekFrom::Start(end)).expect("a file can be sought");
                file.write_all(&tensor.data).expect("room for a small model");
            }
            end += tensor.bytes().next_multiple_of(ALIGNMENT as u64);
        }
        file.set_len(end).expect("a file can be lengthened");
    }
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, bytes: usize) -> &[u8] {
        self.at += bytes;
        &self.file[self.at - bytes..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().expect("4 bytes"))
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().expect("8 bytes"))
    }

    fn text(&mut self) -> String {
        let length = usize::try_from(self.u64()).expect("small");
        String::from_utf8(self.take(length).to_vec()).expect("keys are text")
    }

    fn value(&mut self) -> Value {
        let kind = self.u32();
        let start = self.at;
        self.skip(kind);
        Value { kind, bytes: self.file[start..self.at].to_vec() }
    }

    fn skip(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => self.at += 1,
            2 | 3 => self.at += 2,
            4..=6 => self.at += 4,
            10..=12 => self.at += 8,
            TYPE_STRING => self.at += usize::try_from(self.u64()).expect("small"),
            TYPE_ARRAY => {
                let element = self.u32();
                for _ in 0..self.u64() {
                    self.skip(element);
                }
            }
            _ => panic!("value type {kind}"),
        }
    }

    fn entry(&mut self) -> (Tensor, usize) {
        let name = self.text();
        let n_dims = self.u32();
        let dims: Vec<u64> = (0..n_dims).map(|_| self.u64()).collect();
        let quant = QuantType::from_ggml_id(self.u32()).expect("a known type");
        let offset = usize::try_from(self.u64()).expect("small");
        (Tensor { name, dims, quant, data: Vec::new() }, offset)
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}
