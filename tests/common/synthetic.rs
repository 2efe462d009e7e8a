//! Synthetic mixture-of-experts models for tests, written from a seed.
//!
//! The same arguments give the same bytes as `tools/oracle/make_tiny_model.py`, so a test can make the model for which another
//! program's results are stored under `tests/golden/`. Left to the Python script: `qwen4exp`, the shapes of published models, real
//! vocabularies, and tensors above its pool size of 64 MiB.
//!
//! A new architecture is a variant of [`Architecture`] with its shapes and its own list of metadata and tensors; `moe` has what all share.
#![allow(clippy::cast_possible_truncation, reason = "sizes of test models, and float arithmetic that rounds on purpose")]

use std::path::Path;

use ebbtide::quant::QuantType;

mod blocks;
mod moe;
mod qwen35moe;
mod qwen3moe;
pub mod random;
mod tokenizer;
mod writer;

use random::{bell, stream_key, word};
use tokenizer::{CHAT_TEMPLATE, TinyTokenizer};
use writer::{Metadata, TensorInfo};

/// A tensor larger than this is written by the Python script in a way that is not repeated here.
const TENSOR_BYTES_MAX: u64 = 64 << 20;

/// The architectures that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Attention and routed experts in every layer.
    Qwen3Moe,
    /// Gated delta nets with a layer of gated attention after every third, a shared expert beside the routed ones.
    Qwen35Moe,
}

impl Architecture {
    /// The name in `general.architecture`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qwen3Moe => "qwen3moe",
            Self::Qwen35Moe => "qwen35moe",
        }
    }

    /// Its shapes in the Python script: micro, tiny, small.
    const fn shapes(self) -> [Shape; 3] {
        match self {
            Self::Qwen3Moe => [Shape::MICRO, Shape::TINY, Shape::SMALL],
            Self::Qwen35Moe => [Shape::HYBRID_MICRO, Shape::HYBRID_TINY, Shape::HYBRID_SMALL],
        }
    }
}

/// Sizes of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The shape's name, part of the model's name in the file.
    pub name: &'static str,
    /// Layers, without a draft block.
    pub n_layer: u32,
    /// Width of the residual.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Width of one head.
    pub head_width: u32,
    /// Routed experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_expert_used: u32,
    /// Inner width of an expert.
    pub n_ff_expert: u32,
    /// Tokens of the vocabulary.
    pub n_vocab: u32,
    /// Inner width of the shared expert; 0 where the architecture has none.
    pub n_ff_shared: u32,
    /// Gated delta nets; all 0 where the architecture has none.
    pub delta: DeltaShape,
}

/// Sizes of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Key heads, which are the query heads too.
    pub n_head_key: u32,
    /// Value heads, each with a state.
    pub n_head_value: u32,
    /// Width of a head; a state is a square of it.
    pub head_width: u32,
}

impl Shape {
    /// 2 layers of 8 experts, 1.9 million weights of experts: tests of correctness.
    pub const MICRO: Self = Self {
        name: "micro",
        n_layer: 2,
        n_embd: 256,
        n_head: 4,
        n_head_kv: 2,
        head_width: 64,
        n_expert: 8,
        n_expert_used: 2,
        n_ff_expert: 256,
        n_vocab: 512,
        n_ff_shared: 0,
        delta: DeltaShape { n_head_key: 0, n_head_value: 0, head_width: 0 },
    };
    /// 4 layers of 16 experts.
    pub const TINY: Self = Self { name: "tiny", n_layer: 4, head_width: 128, n_expert: 16, n_expert_used: 4, ..Self::MICRO };
    /// 8 layers of 64 experts, 201 million weights: timing.
    pub const SMALL: Self = Self { name: "small", n_layer: 8, n_embd: 512, n_head: 8, n_expert: 64, n_expert_used: 8, ..Self::TINY };
    /// `qwen35moe`: 3 delta nets and 1 layer of attention, 8 experts each.
    pub const HYBRID_MICRO: Self = Self {
        n_layer: 4,
        n_head: 2,
        n_head_kv: 1,
        head_width: 256,
        n_ff_shared: 256,
        delta: DeltaShape { n_head_key: 1, n_head_value: 2, head_width: 128 },
        ..Self::MICRO
    };
    /// `qwen35moe`: 6 delta nets and 2 layers of attention, 16 experts each.
    pub const HYBRID_TINY: Self = Self {
        name: "tiny",
        n_layer: 8,
        n_expert: 16,
        n_expert_used: 4,
        delta: DeltaShape { n_head_key: 2, n_head_value: 4, head_width: 128 },
        ..Self::HYBRID_MICRO
    };
    /// `qwen35moe`: as many layers, 64 experts each: timing.
    pub const HYBRID_SMALL: Self =
        Self { name: "small", n_embd: 512, n_head: 4, n_head_kv: 2, n_expert: 64, n_expert_used: 8, ..Self::HYBRID_TINY };
}

/// Element types by role; routers, norms and the small vectors and taps of delta nets are F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// Gate matrices of the experts.
    pub gate: QuantType,
    /// Up matrices of the experts.
    pub up: QuantType,
    /// Down matrices of the experts.
    pub down: QuantType,
    /// All matrices of the shared expert.
    pub shared: QuantType,
    /// Attention and delta nets, and what joins a draft block's two inputs.
    pub dense: QuantType,
    /// Output head.
    pub head: QuantType,
    /// Token embedding.
    pub embedding: QuantType,
}

impl Types {
    /// One type for all matrices.
    pub const fn all(quant: QuantType) -> Self {
        Self { gate: quant, up: quant, down: quant, shared: quant, dense: quant, head: quant, embedding: quant }
    }

    fn each(self) -> [QuantType; 7] {
        [self.gate, self.up, self.down, self.shared, self.dense, self.head, self.embedding]
    }
}

/// A model to write. Change fields of [`Synthetic::new`] or read it [from arguments](Synthetic::from_args).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// The architecture.
    pub architecture: Architecture,
    /// Sizes.
    pub shape: Shape,
    /// Every number follows from it; its low 32 bits count.
    pub seed: u64,
    /// Element types.
    pub types: Types,
    /// The head is the embedding: no `output.weight`.
    pub tied: bool,
    /// Draft blocks behind the layers, 0 or 1; `qwen3moe` has none whatever this says, as in the script.
    pub n_mtp: u32,
    /// Spread of the logarithm of the router rows' sizes; above 0 some experts become hot.
    pub skew: f64,
}

/// What a tensor holds.
#[derive(Clone, Copy)]
enum Content {
    /// Numbers of mean 0 that spread by this much.
    Matrix { spread: f64 },
    /// Numbers around `centre`.
    Norm { centre: f32 },
    /// Numbers that lie evenly between `first` and `first + width`; a negative width goes down.
    Even { first: f32, width: f32 },
}

struct Tensor {
    info: TensorInfo,
    content: Content,
}

impl Synthetic {
    /// A `qwen3moe` model of one element type.
    pub const fn new(shape: Shape, seed: u64, quant: QuantType) -> Self {
        Self { architecture: Architecture::Qwen3Moe, shape, seed, types: Types::all(quant), tied: false, n_mtp: 0, skew: 0.0 }
    }

    /// The model that `make_tiny_model.py` writes for these arguments, which are split at blanks.
    ///
    /// # Errors
    /// Names the argument that is unknown, has no value or a wrong one.
    pub fn from_args(args: &str) -> Result<Self, String> {
        let mut model = Self::new(Shape::TINY, 1, QuantType::Q8_0);
        let pairs = flag_values(args)?;
        // As in the script, the order of flags does not matter: the architecture before its shapes, the shape before its overrides,
        // general types before special ones.
        let passes: [&[&str]; 4] = [&["--arch"], &["--shape", "--type"], &["--expert-type"], &[]];
        for (pass, flags) in passes.into_iter().enumerate() {
            for (flag, value) in &pairs {
                let early = passes.iter().any(|flags| flags.contains(flag));
                if flags.contains(flag) || (pass == passes.len() - 1 && !early) {
                    model.apply(flag, value)?;
                }
            }
        }
        Ok(model)
    }

    fn apply(&mut self, flag: &str, value: &str) -> Result<(), String> {
        match flag {
            "--arch" => {
                let known = [Architecture::Qwen3Moe, Architecture::Qwen35Moe].into_iter().find(|known| known.name() == value);
                self.architecture = known.ok_or_else(|| format!("no {flag} {value}"))?;
                self.shape = self.shape_named(self.shape.name)?;
            }
            "--shape" => self.shape = self.shape_named(value)?,
            "--seed" => self.seed = parse(flag, value)?,
            "--type" => self.types = Types::all(parse_type(flag, value)?),
            "--expert-type" => {
                let quant = parse_type(flag, value)?;
                self.types = Types { gate: quant, up: quant, down: quant, ..self.types };
            }
            "--gate-type" => self.types.gate = parse_type(flag, value)?,
            "--up-type" => self.types.up = parse_type(flag, value)?,
            "--down-type" => self.types.down = parse_type(flag, value)?,
            "--shared-type" => self.types.shared = parse_type(flag, value)?,
            "--dense-type" => self.types.dense = parse_type(flag, value)?,
            "--head-type" => self.types.head = parse_type(flag, value)?,
            "--embd-type" => self.types.embedding = parse_type(flag, value)?,
            "--layers" => self.shape.n_layer = parse(flag, value)?,
            "--experts" => self.shape.n_expert = parse(flag, value)?,
            "--used" => self.shape.n_expert_used = parse(flag, value)?,
            "--vocab" => self.shape.n_vocab = parse(flag, value)?,
            "--tied" => self.tied = true,
            "--mtp" if value == "0" || value == "1" => self.n_mtp = parse(flag, value)?,
            "--skew" => self.skew = parse(flag, value)?,
            _ => return Err(format!("unknown argument {flag} {value}")),
        }
        Ok(())
    }

    fn shape_named(&self, name: &str) -> Result<Shape, String> {
        let found = self.architecture.shapes().into_iter().find(|shape| shape.name == name);
        found.ok_or_else(|| format!("--shape: {} has no shape {name}", self.architecture.name()))
    }

    /// The bytes of the file.
    ///
    /// # Errors
    /// Names a type that cannot be made from random blocks, or a tensor above 64 MiB.
    pub fn file_bytes(&self) -> Result<Vec<u8>, String> {
        if let Some(quant) = self.types.each().into_iter().find(|quant| !blocks::is_supported(*quant)) {
            return Err(format!("synthetic models have no {quant}"));
        }
        let tokenizer = TinyTokenizer::new(self.shape.n_vocab.min(512) as usize);
        let mut model = *self;
        if tokenizer.tokens.len() > model.shape.n_vocab as usize {
            model.shape.n_vocab = (tokenizer.tokens.len() as u32).next_multiple_of(256);
        }
        let mut metadata = Metadata::default();
        model.put_general(&mut metadata);
        let tensors = match model.architecture {
            Architecture::Qwen3Moe => {
                qwen3moe::put_metadata(&mut metadata, &model);
                qwen3moe::tensors(&model)
            }
            Architecture::Qwen35Moe => {
                qwen35moe::put_metadata(&mut metadata, &model);
                qwen35moe::tensors(&model)
            }
        };
        put_tokenizer(&mut metadata, &tokenizer, model.shape.n_vocab as usize);
        for Tensor { info, .. } in &tensors {
            let bytes = info.quant.bytes_for(info.n_weights()).ok_or_else(|| format!("{}: rows are not whole blocks", info.name))?;
            if bytes > TENSOR_BYTES_MAX {
                return Err(format!("{} takes {bytes} bytes, more than {TENSOR_BYTES_MAX}: use make_tiny_model.py", info.name));
            }
        }
        Ok(metadata.into_file(&tensors, |out, tensor| model.fill(out, tensor)))
    }

    /// Writes the file to `path`.
    ///
    /// # Errors
    /// As [`Synthetic::file_bytes`], or says why the file could not be written.
    pub fn write(&self, path: &Path) -> Result<(), String> {
        std::fs::write(path, self.file_bytes()?).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn put_general(&self, metadata: &mut Metadata) {
        let architecture = self.architecture.name();
        metadata.put_string("general.architecture", architecture);
        metadata.put_string("general.type", "model");
        metadata.put_string("general.name", &format!("synthetic {architecture} {} seed {}", self.shape.name, self.seed));
        metadata.put_u32("general.quantization_version", 2);
        metadata.put_u32("general.file_type", file_type(self.types.gate));
    }

    fn fill(&self, out: &mut Vec<u8>, tensor: &Tensor) {
        let info = &tensor.info;
        let key = stream_key(self.seed, &info.name);
        let n_weights = info.n_weights();
        match tensor.content {
            Content::Norm { centre } => blocks::push_norm(out, key, n_weights, centre),
            Content::Even { first, width } => blocks::push_even(out, key, n_weights, first, width),
            Content::Matrix { spread } => {
                let row_sizes = self.router_row_sizes(info);
                let row_sizes = row_sizes.as_deref().map(|sizes| (info.dims[0], sizes));
                blocks::push_matrix(out, info.quant, key, n_weights, spread, row_sizes);
            }
        }
    }

    /// Factors of a router's rows where routing is skewed; rounded to 1/1024 so that every platform's `exp` gives the same.
    fn router_row_sizes(&self, info: &TensorInfo) -> Option<Vec<f32>> {
        if self.skew == 0.0 || !info.name.ends_with("ffn_gate_inp.weight") {
            return None;
        }
        let key = stream_key(self.seed, &format!("{}/skew", info.name));
        let size = |row| {
            let size = (self.skew * f64::from(bell(word(key, row)))).exp();
            ((size * 1024.0).round_ties_even() / 1024.0) as f32
        };
        Some((0..info.dims[1]).map(size).collect())
    }
}

fn put_tokenizer(metadata: &mut Metadata, tokenizer: &TinyTokenizer, n_vocab: usize) {
    let n_padding = n_vocab - tokenizer.tokens.len();
    let tokens: Vec<String> = tokenizer.tokens.iter().cloned().chain((0..n_padding).map(|index| format!("[PAD{index}]"))).collect();
    let types: Vec<i32> = tokenizer.types.iter().copied().chain(std::iter::repeat_n(5, n_padding)).collect();
    metadata.put_string("tokenizer.ggml.model", "gpt2");
    metadata.put_string("tokenizer.ggml.pre", "qwen2");
    metadata.put_strings("tokenizer.ggml.tokens", &tokens);
    metadata.put_i32s("tokenizer.ggml.token_type", &types);
    metadata.put_strings("tokenizer.ggml.merges", &tokenizer.merges);
    metadata.put_u32("tokenizer.ggml.eos_token_id", tokenizer.end_of_turn);
    metadata.put_u32("tokenizer.ggml.padding_token_id", tokenizer.end_of_text);
    metadata.put_u32("tokenizer.ggml.bos_token_id", tokenizer.end_of_text);
    metadata.put_bool("tokenizer.ggml.add_bos_token", false);
    metadata.put_string("tokenizer.chat_template", CHAT_TEMPLATE);
}

/// The number in `general.file_type`, which viewers show as a name.
fn file_type(quant: QuantType) -> u32 {
    match quant {
        QuantType::F16 => 1,
        QuantType::Q4_0 => 2,
        QuantType::Q4_1 => 3,
        QuantType::Q8_0 => 7,
        QuantType::Q5_0 => 8,
        QuantType::Q5_1 => 9,
        QuantType::Q2_K => 10,
        QuantType::Q3_K => 12,
        QuantType::Q4_K => 15,
        QuantType::Q5_K => 17,
        QuantType::Q6_K => 18,
        QuantType::IQ2_XXS => 19,
        QuantType::IQ2_XS => 20,
        QuantType::IQ3_XXS => 23,
        QuantType::IQ1_S => 24,
        QuantType::IQ4_NL => 25,
        QuantType::IQ3_S => 26,
        QuantType::IQ2_S => 28,
        QuantType::IQ4_XS => 30,
        QuantType::BF16 => 32,
        QuantType::F32 | QuantType::IQ1_M | QuantType::MXFP4 => 0,
    }
}

/// Flags with their values; `--tied` stands alone.
fn flag_values(args: &str) -> Result<Vec<(&str, &str)>, String> {
    let mut words = args.split_whitespace();
    let mut pairs = Vec::new();
    while let Some(flag) = words.next() {
        let value = if flag == "--tied" { "" } else { words.next().ok_or_else(|| format!("{flag} has no value"))? };
        pairs.push((flag, value));
    }
    Ok(pairs)
}

fn parse<T: std::str::FromStr>(flag: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{flag}: {value} is not a number that fits"))
}

fn parse_type(flag: &str, value: &str) -> Result<QuantType, String> {
    QuantType::ALL.into_iter().find(|quant| quant.to_string() == value).ok_or_else(|| format!("{flag}: no type {value}"))
}
