//! GGUF bytes: metadata pairs in call order, the tensor directory, then tensor data at multiples of 32 bytes.

use ebbtide::quant::QuantType;

use super::Tensor;

const ALIGNMENT: usize = 32;
const TYPE_U32: u32 = 4;
const TYPE_I32: u32 = 5;
const TYPE_F32: u32 = 6;
const TYPE_BOOL: u32 = 7;
const TYPE_STRING: u32 = 8;
const TYPE_ARRAY: u32 = 9;

/// A tensor's entry in the directory.
pub struct TensorInfo {
    /// The tensor's name.
    pub name: String,
    /// Sizes in weights, the fastest first, as GGUF lists them.
    pub dims: Vec<u64>,
    /// Element type.
    pub quant: QuantType,
}

impl TensorInfo {
    /// Weights of the tensor.
    pub fn n_weights(&self) -> u64 {
        self.dims.iter().product()
    }
}

/// The metadata of a file being written.
#[derive(Default)]
pub struct Metadata {
    pairs: Vec<u8>,
    count: u64,
}

impl Metadata {
    fn put_key(&mut self, key: &str, kind: u32) {
        self.count += 1;
        push_string(&mut self.pairs, key);
        self.pairs.extend(kind.to_le_bytes());
    }

    fn put_array_key(&mut self, key: &str, element: u32, count: usize) {
        self.put_key(key, TYPE_ARRAY);
        self.pairs.extend(element.to_le_bytes());
        self.pairs.extend((count as u64).to_le_bytes());
    }

    /// Adds an unsigned number.
    pub fn put_u32(&mut self, key: &str, value: u32) {
        self.put_key(key, TYPE_U32);
        self.pairs.extend(value.to_le_bytes());
    }

    /// Adds a float32 number.
    pub fn put_f32(&mut self, key: &str, value: f32) {
        self.put_key(key, TYPE_F32);
        self.pairs.extend(value.to_le_bytes());
    }

    /// Adds a truth value.
    pub fn put_bool(&mut self, key: &str, value: bool) {
        self.put_key(key, TYPE_BOOL);
        self.pairs.push(u8::from(value));
    }

    /// Adds a text.
    pub fn put_string(&mut self, key: &str, value: &str) {
        self.put_key(key, TYPE_STRING);
        push_string(&mut self.pairs, value);
    }

    /// Adds a list of texts.
    pub fn put_strings(&mut self, key: &str, values: &[String]) {
        self.put_array_key(key, TYPE_STRING, values.len());
        for value in values {
            push_string(&mut self.pairs, value);
        }
    }

    /// Adds a list of signed numbers.
    pub fn put_i32s(&mut self, key: &str, values: &[i32]) {
        self.put_array_key(key, TYPE_I32, values.len());
        for value in values {
            self.pairs.extend(value.to_le_bytes());
        }
    }

    /// The file's bytes; `fill` appends the data of one tensor, whose size must be what its entry says.
    pub fn into_file(self, tensors: &[Tensor], fill: impl Fn(&mut Vec<u8>, &Tensor)) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend(self.count.to_le_bytes());
        out.extend(self.pairs);
        let mut data_offset = 0;
        for tensor in tensors {
            push_directory_entry(&mut out, &tensor.info, data_offset);
            let bytes = tensor.info.quant.bytes_for(tensor.info.n_weights()).expect("rows are whole blocks");
            data_offset += bytes.next_multiple_of(ALIGNMENT as u64);
        }
        pad(&mut out);
        out.reserve(usize::try_from(data_offset).expect("a model for tests fits memory"));
        for tensor in tensors {
            fill(&mut out, tensor);
            pad(&mut out);
        }
        out
    }
}

fn push_directory_entry(out: &mut Vec<u8>, info: &TensorInfo, data_offset: u64) {
    push_string(out, &info.name);
    out.extend((info.dims.len() as u32).to_le_bytes());
    for dim in &info.dims {
        out.extend(dim.to_le_bytes());
    }
    out.extend(info.quant.ggml_id().to_le_bytes());
    out.extend(data_offset.to_le_bytes());
}

fn push_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
}
