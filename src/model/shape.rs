//! Sizes of a model, read from the metadata and checked once.

use crate::backend::op::{DELTA_STEP, DeltaShape};
use crate::gguf::{GgufFile, Metadata};
use crate::model::ModelError;

/// Architectures of this version, as messages name them.
pub const SUPPORTED: &str = "qwen3moe, qwen35moe";

/// What mixes the tokens of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Attention over keys and values of all tokens so far.
    Attention,
    /// A gated delta net: a recurrent state and a short convolution.
    Delta,
}

/// Sizes of a model. All counts are at least 1.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// `general.architecture`.
    pub architecture: String,
    /// Layers, without a draft layer.
    pub n_layer: u32,
    /// What mixes the tokens, layer by layer.
    pub mixers: Vec<Mixer>,
    /// Sizes of the delta nets, where there are any.
    pub delta: Option<DeltaShape>,
    /// Whether attention's output is gated: `attn_q` then holds a gate behind each head's queries.
    pub gated_attention: bool,
    /// Whether a draft (MTP) layer follows the last one: attention, experts and a projection of its own, at `blk.{n_layer}`.
    pub has_draft_layer: bool,
    /// Width of the residual.
    pub n_embd: u32,
    /// Query heads.
    pub n_head: u32,
    /// Key and value heads.
    pub n_head_kv: u32,
    /// Numbers of one head.
    pub head_dim: u32,
    /// Numbers of a head that rotate.
    pub n_rot: u32,
    /// Routed experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_expert_used: u32,
    /// Inner width of an expert.
    pub n_ff: u32,
    /// Inner width of the expert that every token uses; 0 where there is none.
    pub n_ff_shared: u32,
    /// Tokens the head tells apart: rows of `token_embd`, which may exceed the token list.
    pub n_vocab: u32,
    /// Tokens the model was trained on at once.
    pub n_ctx_train: u32,
    /// Added to mean squares in norms.
    pub rms_eps: f32,
    /// Base of the rotary angles.
    pub rope_freq_base: f32,
    /// Factor on the attention scores.
    pub attention_scale: f32,
    /// Factor on the router's weights.
    pub expert_weights_scale: f32,
}

/// Largest value accepted for any size, far above any model: a sum of products of such numbers fits 64 bits.
const SIZE_MAX: u32 = 1 << 24;

/// Largest head of a delta net: its state is the square.
const STATE_SIZE_MAX: u32 = 512;
/// Most taps of a delta net's convolution.
const TAPS_MAX: u32 = 16;

struct Reader<'a> {
    metadata: &'a Metadata,
    architecture: String,
}

impl Reader<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn refuse(&self, name: &str, value: impl ToString, rule: impl Into<String>) -> ModelError {
        ModelError::Value { file: self.metadata.file().to_owned(), key: self.key(name), value: value.to_string(), rule: rule.into() }
    }

    fn size(&self, name: &str) -> Result<u32, ModelError> {
        self.checked(name, self.metadata.u32(&self.key(name))?)
    }

    fn size_or(&self, name: &str, default: u32) -> Result<u32, ModelError> {
        match self.metadata.u32_opt(&self.key(name))? {
            Some(value) => self.checked(name, value),
            None => Ok(default),
        }
    }

    fn checked(&self, name: &str, value: u32) -> Result<u32, ModelError> {
        if (1..=SIZE_MAX).contains(&value) { Ok(value) } else { Err(self.refuse(name, value, format!("it must be from 1 to {SIZE_MAX}"))) }
    }

    /// A key that may be one number or an array of one a layer; layers that differ are not supported.
    fn uniform(&self, name: &str, n_layer: u32) -> Result<Option<u32>, ModelError> {
        let Some(values) = self.metadata.per_layer_u32_opt(&self.key(name), n_layer)? else { return Ok(None) };
        let value = values.uniform().ok_or_else(|| self.refuse(name, "not the same for all layers", "this version needs one value"))?;
        self.checked(name, value).map(Some)
    }

    /// Draft layers at the end of the `n_block` layers.
    fn n_draft_layer(&self, n_block: u32) -> Result<u32, ModelError> {
        let name = "nextn_predict_layers";
        match self.metadata.u32_opt(&self.key(name))?.unwrap_or(0) {
            count @ 0..=1 if count < n_block => Ok(count),
            count => Err(self.refuse(name, count, "this version reads none or one, behind at least one other layer")),
        }
    }

    /// Which layers are delta nets: those that the file lists, else all but every so-many-th.
    fn mixers(&self, n_layer: u32) -> Result<Vec<Mixer>, ModelError> {
        let mixer = |is_recurrent: bool| if is_recurrent { Mixer::Delta } else { Mixer::Attention };
        let name = "attention.recurrent_layers";
        if let Some(listed) = self.metadata.optional::<&[bool]>(&self.key(name))? {
            // A draft layer may be listed, too.
            if listed.len() < n_layer as usize {
                let rule = format!("there are {n_layer} layers");
                return Err(self.refuse(name, format!("{} values", listed.len()), rule));
            }
            return Ok(listed[..n_layer as usize].iter().copied().map(mixer).collect());
        }
        let interval = self.size_or("full_attention_interval", 4)?;
        Ok((1..=n_layer).map(|number| mixer(number % interval != 0)).collect())
    }

    /// Sizes of the delta nets.
    fn delta(&self) -> Result<DeltaShape, ModelError> {
        let (n_head_v, head_dim) = (self.size("ssm.time_step_rank")?, self.size("ssm.state_size")?);
        let shape = DeltaShape { n_head_k: self.size("ssm.group_count")?, n_head_v, head_dim, n_taps: self.size("ssm.conv_kernel")? };
        let inner_size = self.size("ssm.inner_size")?;
        if u64::from(inner_size) != u64::from(n_head_v) * u64::from(head_dim) {
            return Err(self.refuse("ssm.inner_size", inner_size, format!("{n_head_v} heads have {head_dim} numbers each")));
        }
        if !n_head_v.is_multiple_of(shape.n_head_k) {
            let rule = format!("the {n_head_v} value heads must be a multiple of it");
            return Err(self.refuse("ssm.group_count", shape.n_head_k, rule));
        }
        if !head_dim.is_multiple_of(32) || head_dim > STATE_SIZE_MAX {
            let rule = format!("it must be a multiple of 32, and at most {STATE_SIZE_MAX}");
            return Err(self.refuse("ssm.state_size", head_dim, rule));
        }
        if !(2..=TAPS_MAX).contains(&shape.n_taps) {
            return Err(self.refuse("ssm.conv_kernel", shape.n_taps, format!("it must be from 2 to {TAPS_MAX}")));
        }
        Ok(shape)
    }

    fn float(&self, name: &str, default: Option<f32>) -> Result<f32, ModelError> {
        let value = match (self.metadata.f32_opt(&self.key(name))?, default) {
            (Some(value), _) | (None, Some(value)) => value,
            (None, None) => self.metadata.f32(&self.key(name))?,
        };
        if value.is_finite() { Ok(value) } else { Err(self.refuse(name, value, "it must be a finite number")) }
    }

    fn refuse_rope_scaling(&self) -> Result<(), ModelError> {
        let rule = "this version has no rope scaling: use a file without it";
        let kind = self.metadata.string_opt(&self.key("rope.scaling.type"))?;
        match kind {
            Some("none") => return Ok(()),
            Some(kind) => return Err(self.refuse("rope.scaling.type", kind, rule)),
            None => {}
        }
        // Older files say by how much and leave the kind, linear, unsaid. 0 and 1 mean not at all.
        for name in ["rope.scaling.factor", "rope.scale_linear"] {
            match self.metadata.f32_opt(&self.key(name))? {
                None | Some(0.0 | 1.0) => {}
                Some(factor) => return Err(self.refuse(name, factor, rule)),
            }
        }
        Ok(())
    }
}

impl ModelShape {
    /// Reads and checks the sizes of `file`.
    ///
    /// # Errors
    /// Where the architecture is not supported, a key is missing or of a wrong type, or a number makes no sense.
    pub fn read(metadata: &Metadata, file: &GgufFile) -> Result<Self, ModelError> {
        let architecture = metadata.string("general.architecture")?.to_owned();
        let is_hybrid = architecture == "qwen35moe";
        if !is_hybrid && architecture != "qwen3moe" {
            return Err(ModelError::Architecture { file: metadata.file().to_owned(), found: architecture, supported: SUPPORTED });
        }
        let reader = Reader { metadata, architecture: architecture.clone() };
        reader.refuse_rope_scaling()?;
        let n_block = reader.size("block_count")?;
        let n_draft_layer = if is_hybrid { reader.n_draft_layer(n_block)? } else { 0 };
        let n_layer = n_block - n_draft_layer;
        let n_embd = reader.size("embedding_length")?;
        let n_head = reader.uniform("attention.head_count", n_block)?.ok_or_else(|| missing(&reader, "attention.head_count"))?;
        let n_head_kv = reader.uniform("attention.head_count_kv", n_block)?.unwrap_or(n_head);
        let head_dim = reader.size_or("attention.key_length", n_embd / n_head)?;
        let n_expert_used = reader.size("expert_used_count")?;
        let n_ff = match reader.uniform("expert_feed_forward_length", n_block)? {
            Some(width) => width,
            // Files from before the key existed give the sum over the experts used.
            None => reader.size("feed_forward_length")? / n_expert_used,
        };
        let attention_scale = match reader.float("attention.scale", Some(0.0))? {
            0.0 => 1.0 / reader_f32(head_dim).sqrt(),
            scale => scale,
        };
        let expert_weights_scale = match reader.float("expert_weights_scale", Some(1.0))? {
            0.0 => 1.0,
            scale => scale,
        };
        let embedding = file
            .tensor("token_embd.weight")
            .ok_or_else(|| ModelError::MissingTensor { file: metadata.file().to_owned(), tensor: "token_embd.weight".to_owned() })?;
        let mixers = if is_hybrid { reader.mixers(n_layer)? } else { vec![Mixer::Attention; n_layer as usize] };
        let shape = Self {
            n_layer,
            delta: if mixers.contains(&Mixer::Delta) { Some(reader.delta()?) } else { None },
            mixers,
            gated_attention: is_hybrid,
            has_draft_layer: n_draft_layer > 0,
            n_embd,
            n_head,
            n_head_kv,
            head_dim,
            n_rot: reader.size_or("rope.dimension_count", head_dim)?,
            n_expert: reader.size("expert_count")?,
            n_expert_used,
            n_ff,
            n_ff_shared: if is_hybrid { reader.size("expert_shared_feed_forward_length")? } else { 0 },
            n_vocab: embedding.shape.first().map_or(0, |&rows| u32::try_from(rows).unwrap_or(u32::MAX)),
            n_ctx_train: reader.size("context_length")?,
            rms_eps: reader.float("attention.layer_norm_rms_epsilon", None)?,
            rope_freq_base: reader.float("rope.freq_base", Some(10_000.0))?,
            attention_scale,
            expert_weights_scale,
            architecture,
        };
        shape.check(&reader)?;
        Ok(shape)
    }

    fn check(&self, reader: &Reader<'_>) -> Result<(), ModelError> {
        if !self.n_head.is_multiple_of(self.n_head_kv) {
            let rule = format!("the {} query heads must be a multiple of it", self.n_head);
            return Err(reader.refuse("attention.head_count_kv", self.n_head_kv, rule));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(32) {
            return Err(reader.refuse("attention.key_length", self.head_dim, "it must be a multiple of 32, and at least 32"));
        }
        let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
        if product(self.n_head, self.head_dim) > u64::from(SIZE_MAX) {
            let rule = format!("{} heads of that size make rows of more than {SIZE_MAX} numbers", self.n_head);
            return Err(reader.refuse("attention.key_length", self.head_dim, rule));
        }
        if product(self.n_expert_layer(), self.n_expert) > u64::from(SIZE_MAX) {
            let rule = format!("{} layers of as many make more than {SIZE_MAX}", self.n_expert_layer());
            return Err(reader.refuse("expert_count", self.n_expert, rule));
        }
        if self.n_expert_used > self.n_expert {
            return Err(reader.refuse("expert_used_count", self.n_expert_used, format!("there are {} experts", self.n_expert)));
        }
        if self.n_rot > self.head_dim || !self.n_rot.is_multiple_of(2) {
            let rule = format!("it must be even and at most the head size {}", self.head_dim);
            return Err(reader.refuse("rope.dimension_count", self.n_rot, rule));
        }
        let value_length = reader.size_or("attention.value_length", self.head_dim)?;
        if value_length != self.head_dim {
            return Err(reader.refuse("attention.value_length", value_length, format!("keys have {} numbers", self.head_dim)));
        }
        if self.n_ff == 0 {
            return Err(reader.refuse("feed_forward_length", 0, "it must be at least expert_used_count"));
        }
        if !(1..=SIZE_MAX).contains(&self.n_vocab) {
            return Err(reader.refuse("vocab_size", self.n_vocab, format!("it must be from 1 to {SIZE_MAX}")));
        }
        if self.rms_eps < 0.0 {
            return Err(reader.refuse("attention.layer_norm_rms_epsilon", self.rms_eps, "it must not be negative"));
        }
        if self.rope_freq_base <= 0.0 {
            return Err(reader.refuse("rope.freq_base", self.rope_freq_base, "it must be positive"));
        }
        Ok(())
    }

    /// Layers that have routed experts: all, the draft layer with them.
    #[must_use]
    pub fn n_expert_layer(&self) -> u32 {
        self.n_layer + u32::from(self.has_draft_layer)
    }

    /// Routed experts of the whole model.
    #[must_use]
    pub fn n_routed_experts(&self) -> u32 {
        self.n_expert_layer() * self.n_expert
    }

    /// What mixes the tokens of `layer`, which may be the draft layer.
    #[must_use]
    pub fn mixer(&self, layer: u32) -> Mixer {
        self.mixers.get(layer as usize).copied().unwrap_or(Mixer::Attention)
    }

    /// Layers before `layer` whose mixer is `mixer`: the number of `layer` among them.
    #[must_use]
    pub fn index_among(&self, mixer: Mixer, layer: u32) -> u32 {
        let before = self.mixers.iter().take(layer as usize).filter(|&&other| other == mixer).count();
        u32::try_from(before).expect("layers are 32-bit numbers")
    }

    /// Layers with keys and values, a draft layer with them.
    #[must_use]
    pub fn n_kv_layer(&self) -> u32 {
        self.index_among(Mixer::Attention, self.n_layer) + u32::from(self.has_draft_layer)
    }

    /// Blocks of a prompt end at multiples of this, counted from position 0: where no step of a delta net is left open.
    #[must_use]
    pub fn block_step(&self) -> u32 {
        if self.delta.is_some() { DELTA_STEP } else { 1 }
    }

    /// Layers with a recurrent state.
    #[must_use]
    pub fn n_delta_layer(&self) -> u32 {
        self.index_among(Mixer::Delta, self.n_layer)
    }

    /// Width of all query heads together.
    #[must_use]
    pub fn q_width(&self) -> u32 {
        self.n_head * self.head_dim
    }

    /// Width of all key heads together.
    #[must_use]
    pub fn kv_width(&self) -> u32 {
        self.n_head_kv * self.head_dim
    }
}

#[allow(clippy::cast_precision_loss, reason = "head sizes are small")]
fn reader_f32(n: u32) -> f32 {
    n as f32
}

fn missing(reader: &Reader<'_>, name: &str) -> ModelError {
    reader.refuse(name, "absent", "the architecture needs it")
}
