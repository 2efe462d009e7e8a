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

/// A model whose tensors are a directory with nothing in them: experts in IQ3_XXS, embedding and head in Q5_K, no tokenizer.
#[derive(Clone, Copy, Debug)]
pub struct Directory {
    n_layer: u32,
    n_embd: u32,
    n_head: u32,
    n_head_kv: u32,
    head_dim: u32,
    n_expert: u32,
    n_ff: u32,
    n_vocab: u32,
    n_ctx: u32,
    dense: QuantType,
}

/// Qwen3-30B-A3B with attention in Q8_0: 966 MiB of dense weights, a head of 204 MiB, 6,144 experts of 1.72 MiB.
pub const QWEN3_30B_A3B: Directory = Directory {
    n_layer: 48,
    n_embd: 2048,
    n_head: 32,
    n_head_kv: 4,
    head_dim: 128,
    n_expert: 128,
    n_ff: 768,
    n_vocab: 151_936,
    n_ctx: 40_960,
    dense: QuantType::Q8_0,
};

/// Stands in for Qwen3.6-35B-A3B, whose architecture the engine lacks: its layers, experts, vocabulary, head (333 MiB) and KV cache
/// (20 KiB a token in f16), and 1,400 of its 1,437 MiB of dense weights. All layers have attention, none a delta net, and there is no
/// draft layer; arithmetic of a token at a depth of 30k takes about as long.
pub const QWEN_35B_STAND_IN: Directory = Directory {
    n_layer: 40,
    n_head_kv: 1,
    n_expert: 256,
    n_ff: 512,
    n_vocab: 248_320,
    n_ctx: 262_144,
    dense: QuantType::F16,
    ..QWEN3_30B_A3B
};

impl Directory {
    pub fn gguf(&self) -> Gguf {
        let mut file = Gguf::default();
        file.set("general.architecture", Value::string("qwen3moe"));
        for (key, value) in [
            ("block_count", self.n_layer),
            ("context_length", self.n_ctx),
            ("embedding_length", self.n_embd),
            ("feed_forward_length", 8 * self.n_ff),
            ("attention.head_count", self.n_head),
            ("attention.head_count_kv", self.n_head_kv),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
            ("expert_count", self.n_expert),
            ("expert_used_count", 8),
            ("expert_feed_forward_length", self.n_ff),
        ] {
            file.set(&format!("qwen3moe.{key}"), Value::u32(value));
        }
        file.set("qwen3moe.attention.layer_norm_rms_epsilon", Value::f32(1e-6));
        file.set("qwen3moe.rope.freq_base", Value::f32(1e6));
        let [n_embd, n_ff, n_expert, n_vocab, head_dim] =
            [self.n_embd, self.n_ff, self.n_expert, self.n_vocab, self.head_dim].map(u64::from);
        let (q_width, kv_width) = (u64::from(self.n_head) * head_dim, u64::from(self.n_head_kv) * head_dim);
        let mut put = |name: String, dims: &[u64], quant| file.tensors.push(Tensor::empty(name, dims, quant));
        put("token_embd.weight".to_owned(), &[n_embd, n_vocab], QuantType::Q5_K);
        put("output_norm.weight".to_owned(), &[n_embd], QuantType::F32);
        put("output.weight".to_owned(), &[n_embd, n_vocab], QuantType::Q5_K);
        for layer in 0..self.n_layer {
            let mut put = |part: &str, dims: &[u64], quant| put(format!("blk.{layer}.{part}.weight"), dims, quant);
            put("attn_norm", &[n_embd], QuantType::F32);
            put("attn_q", &[n_embd, q_width], self.dense);
            put("attn_k", &[n_embd, kv_width], self.dense);
            put("attn_v", &[n_embd, kv_width], self.dense);
            put("attn_output", &[q_width, n_embd], self.dense);
            put("attn_q_norm", &[head_dim], QuantType::F32);
            put("attn_k_norm", &[head_dim], QuantType::F32);
            put("ffn_norm", &[n_embd], QuantType::F32);
            put("ffn_gate_inp", &[n_embd, n_expert], QuantType::F32);
            put("ffn_gate_exps", &[n_embd, n_ff, n_expert], QuantType::IQ3_XXS);
            put("ffn_up_exps", &[n_embd, n_ff, n_expert], QuantType::IQ3_XXS);
            put("ffn_down_exps", &[n_ff, n_embd, n_expert], QuantType::IQ3_XXS);
        }
        file
    }
}
