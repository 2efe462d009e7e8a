//! Where each tensor of a model lies in its file, what must stay on the device, and what is an expert.

use crate::backend::op::{DeltaShape, ExpertShape, KvFormat, Path};
use crate::gguf::{GgufFile, TensorInfo};
use crate::model::shape::Mixer;
use crate::model::{Arithmetic, ModelError, ModelShape};
use crate::quant::{ActivationFormat, QuantType};
use crate::units::Bytes;

/// Alignment of tensors and buffers on the device.
pub const DEVICE_ALIGN: u64 = 256;

/// A tensor in a model file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileTensor {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub quant_type: QuantType,
    /// Rows, i.e. output width (1 for a vector).
    pub rows: u32,
    /// Numbers in a row.
    pub cols: u32,
    /// Which file of a split set.
    pub file_index: usize,
    /// First byte in that file.
    pub offset: u64,
    /// Size.
    pub bytes: Bytes,
}

/// A dense tensor with its place in the device's one allocation of dense weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseTensor {
    /// Where it comes from.
    pub tensor: FileTensor,
    /// First byte within the allocation.
    pub device_offset: Bytes,
}

/// Indices into [`ModelWeights::dense`] of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the tensors")]
pub struct LayerDense {
    pub attn_norm: usize,
    pub mixer: MixerDense,
    /// The norm before the router and the experts.
    pub ffn_norm: usize,
    pub router: usize,
    /// The expert that every token uses, where there is one.
    pub shared: Option<SharedDense>,
}

/// Dense tensors of a layer's mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the mixers of the model's shape")]
pub enum MixerDense {
    Attention(AttentionDense),
    Delta(DeltaDense),
}

/// Dense tensors of an attention layer. With gates, `attn_q` has each head's gate behind its queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the tensors")]
pub struct AttentionDense {
    pub attn_q: usize,
    pub attn_k: usize,
    pub attn_v: usize,
    pub attn_q_norm: usize,
    pub attn_k_norm: usize,
    pub attn_output: usize,
}

/// Dense tensors of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the tensors")]
pub struct DeltaDense {
    pub attn_qkv: usize,
    pub attn_gate: usize,
    pub ssm_beta: usize,
    pub ssm_alpha: usize,
    pub ssm_dt: usize,
    pub ssm_a: usize,
    pub ssm_conv1d: usize,
    pub ssm_norm: usize,
    pub ssm_out: usize,
}

/// Dense tensors of a shared expert: `sigmoid(gate_inp x) * down(silu(gate x) * up x)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the tensors")]
pub struct SharedDense {
    pub gate_inp: usize,
    pub gate: usize,
    pub up: usize,
    pub down: usize,
}

/// Dense tensors of a draft layer beside those that every layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the tensors")]
pub struct DraftDense {
    pub eh_proj: usize,
    pub enorm: usize,
    pub hnorm: usize,
    /// The norm before the head; the model's own where the file has none.
    pub head_norm: usize,
}

/// One matrix of all experts of a layer: expert `e` begins at `offset + e * stride` of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertTensor {
    /// Name of the tensor that holds it.
    pub name: String,
    /// Element type.
    pub quant_type: QuantType,
    /// Rows of one expert's matrix.
    pub rows: u32,
    /// Numbers in a row.
    pub cols: u32,
    /// Which file of a split set.
    pub file_index: usize,
    /// First byte of expert 0 in that file.
    pub offset: u64,
    /// From one expert to the next.
    pub stride: Bytes,
    /// Bytes of one expert's matrix.
    pub expert_bytes: Bytes,
}

impl ExpertTensor {
    /// First byte of an expert's matrix in its file.
    #[must_use]
    pub fn expert_offset(&self, expert: u32) -> u64 {
        self.offset + self.stride.0 * u64::from(expert)
    }
}

/// The routed experts of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerExperts {
    /// Gate matrices `[n_ff, n_embd]`.
    pub gate: ExpertTensor,
    /// Up matrices `[n_ff, n_embd]`.
    pub up: ExpertTensor,
    /// Down matrices `[n_embd, n_ff]`.
    pub down: ExpertTensor,
}

impl LayerExperts {
    /// The three parts in the order a slot holds them.
    #[must_use]
    pub fn parts(&self) -> [&ExpertTensor; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Bytes of a slot for an expert of this layer: gate, up and down, each aligned.
    #[must_use]
    pub fn slot_bytes(&self) -> Bytes {
        self.parts().iter().map(|part| part.expert_bytes.align_up(DEVICE_ALIGN)).sum()
    }

    /// Offsets of gate, up and down within a slot.
    #[must_use]
    pub fn slot_offsets(&self) -> [Bytes; 3] {
        let gate = self.gate.expert_bytes.align_up(DEVICE_ALIGN);
        [Bytes::ZERO, gate, gate + self.up.expert_bytes.align_up(DEVICE_ALIGN)]
    }

    /// Sizes and types as kernels want them.
    #[must_use]
    pub fn shape(&self, arithmetic: Arithmetic, path: Path) -> ExpertShape {
        ExpertShape {
            n_embd: self.gate.cols,
            n_ff: self.gate.rows,
            gate_type: self.gate.quant_type,
            up_type: self.up.quant_type,
            down_type: self.down.quant_type,
            input_format: arithmetic.format(path, self.gate.quant_type),
            down_format: arithmetic.format(path, self.down.quant_type),
        }
    }
}

/// All tensors of a model.
#[derive(Clone, Debug)]
pub struct ModelWeights {
    /// Token embeddings; stay in host memory, rows are gathered by the host.
    pub token_embd: FileTensor,
    /// The output head; the embedding again where the model ties them.
    pub head: FileTensor,
    /// Index of the norm before the head.
    pub output_norm: usize,
    /// Everything else that every token needs, in the order of the device allocation.
    pub dense: Vec<DenseTensor>,
    /// Bytes of that allocation.
    pub dense_bytes: Bytes,
    /// Layer by layer, which dense tensor is which; a draft layer is the last.
    pub layers: Vec<LayerDense>,
    /// Layer by layer, the routed experts; a draft layer is the last.
    pub experts: Vec<LayerExperts>,
    /// What the draft layer has beside that, where there is one.
    pub draft: Option<DraftDense>,
}

struct Finder<'a> {
    file: &'a GgufFile,
    dense: Vec<DenseTensor>,
    dense_bytes: Bytes,
}

impl Finder<'_> {
    fn file_name(&self) -> String {
        self.file.metadata().file().to_owned()
    }

    fn info(&self, name: &str) -> Result<&TensorInfo, ModelError> {
        if self.file.tensor(&format!("{}.scale", name.trim_end_matches(".weight"))).is_some() {
            let rule = "tensors with factors of their own (NVFP4) are not supported";
            let found = self.file.tensor(name).map_or_else(|| "absent".to_owned(), |info| info.quant_type.to_string());
            return Err(ModelError::TensorType { file: self.file_name(), tensor: name.to_owned(), found, rule });
        }
        self.file.tensor(name).ok_or_else(|| ModelError::MissingTensor { file: self.file_name(), tensor: name.to_owned() })
    }

    fn tensor(&self, name: &str, wanted: &[u32]) -> Result<FileTensor, ModelError> {
        let info = self.info(name)?;
        let wanted: Vec<u64> = wanted.iter().map(|&n| u64::from(n)).collect();
        if info.shape != wanted {
            return Err(ModelError::TensorShape { file: self.file_name(), tensor: name.to_owned(), found: info.shape.clone(), wanted });
        }
        let size = |dimension: u64| u32::try_from(dimension).expect("checked against 32-bit sizes");
        let (rows, cols) = match info.shape.as_slice() {
            [cols] => (1, size(*cols)),
            [.., rows, cols] => (size(*rows), size(*cols)),
            [] => (1, 1),
        };
        Ok(FileTensor {
            name: name.to_owned(),
            quant_type: info.quant_type,
            rows,
            cols,
            file_index: info.file_index,
            offset: info.offset,
            bytes: Bytes(info.bytes),
        })
    }

    /// Adds a dense tensor to the device allocation and returns its index.
    fn dense(&mut self, name: &str, shape: &[u32]) -> Result<usize, ModelError> {
        let tensor = self.tensor(name, shape)?;
        let device_offset = self.dense_bytes;
        self.dense_bytes = (device_offset + tensor.bytes).align_up(DEVICE_ALIGN);
        self.dense.push(DenseTensor { tensor, device_offset });
        Ok(self.dense.len() - 1)
    }

    /// As [`Finder::dense`], for what kernels read as 32-bit floats.
    fn dense_f32(&mut self, name: &str, shape: &[u32]) -> Result<usize, ModelError> {
        let index = self.dense(name, shape)?;
        let found = self.dense[index].tensor.quant_type;
        if found == QuantType::F32 {
            return Ok(index);
        }
        let rule = "it must be F32";
        Err(ModelError::TensorType { file: self.file_name(), tensor: name.to_owned(), found: found.to_string(), rule })
    }

    fn experts(&self, name: &str, shape: &ModelShape, rows: u32, cols: u32) -> Result<ExpertTensor, ModelError> {
        let FileTensor { name, quant_type, file_index, offset, bytes, .. } = self.tensor(name, &[shape.n_expert, rows, cols])?;
        let stride = Bytes(bytes.0 / u64::from(shape.n_expert));
        Ok(ExpertTensor { name, quant_type, rows, cols, file_index, offset, stride, expert_bytes: stride })
    }

    /// Gate and up of a file that holds both in one tensor: an expert's first `n_ff` rows are its gate, the next its up.
    fn joined_gate_up(&self, name: &str, shape: &ModelShape) -> Result<(ExpertTensor, ExpertTensor), ModelError> {
        let joined = self.experts(name, shape, 2 * shape.n_ff, shape.n_embd)?;
        let half = Bytes(joined.stride.0 / 2);
        let gate = ExpertTensor { rows: shape.n_ff, expert_bytes: half, ..joined };
        let up = ExpertTensor { offset: gate.offset + half.0, ..gate.clone() };
        Ok((gate, up))
    }

    fn layer_experts(&self, layer: u32, shape: &ModelShape) -> Result<LayerExperts, ModelError> {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}_exps.weight");
        let joined = name("gate_up");
        let (gate, up) = if self.file.tensor(&joined).is_some() {
            self.joined_gate_up(&joined, shape)?
        } else {
            let gate = self.experts(&name("gate"), shape, shape.n_ff, shape.n_embd)?;
            (gate, self.experts(&name("up"), shape, shape.n_ff, shape.n_embd)?)
        };
        let down = self.experts(&name("down"), shape, shape.n_embd, shape.n_ff)?;
        let format = |part: &ExpertTensor| ActivationFormat::for_weights(part.quant_type, false);
        if format(&gate) != format(&up) {
            return Err(ModelError::TensorType {
                file: self.file_name(),
                tensor: up.name,
                found: up.quant_type.to_string(),
                rule: "gate and up of a layer must have blocks of one length",
            });
        }
        Ok(LayerExperts { gate, up, down })
    }

    fn attention(&mut self, name: impl Fn(&str) -> String, shape: &ModelShape) -> Result<AttentionDense, ModelError> {
        let (n_embd, head_dim) = (shape.n_embd, shape.head_dim);
        let query_width = if shape.gated_attention { 2 * shape.q_width() } else { shape.q_width() };
        Ok(AttentionDense {
            attn_q: self.dense(&name("attn_q"), &[query_width, n_embd])?,
            attn_k: self.dense(&name("attn_k"), &[shape.kv_width(), n_embd])?,
            attn_v: self.dense(&name("attn_v"), &[shape.kv_width(), n_embd])?,
            attn_q_norm: self.dense_f32(&name("attn_q_norm"), &[head_dim])?,
            attn_k_norm: self.dense_f32(&name("attn_k_norm"), &[head_dim])?,
            attn_output: self.dense(&name("attn_output"), &[n_embd, shape.q_width()])?,
        })
    }

    fn delta(&mut self, layer: u32, n_embd: u32, delta: DeltaShape) -> Result<DeltaDense, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (n_head, values) = (delta.n_head_v, delta.value_width());
        Ok(DeltaDense {
            attn_qkv: self.dense(&name("attn_qkv.weight"), &[delta.n_channels(), n_embd])?,
            attn_gate: self.dense(&name("attn_gate.weight"), &[values, n_embd])?,
            ssm_beta: self.dense(&name("ssm_beta.weight"), &[n_head, n_embd])?,
            ssm_alpha: self.dense(&name("ssm_alpha.weight"), &[n_head, n_embd])?,
            ssm_dt: self.dense_f32(&name("ssm_dt.bias"), &[n_head])?,
            ssm_a: self.dense_f32(&name("ssm_a"), &[n_head])?,
            ssm_conv1d: self.dense_f32(&name("ssm_conv1d.weight"), &[delta.n_channels(), delta.n_taps])?,
            ssm_norm: self.dense_f32(&name("ssm_norm.weight"), &[delta.head_dim])?,
            ssm_out: self.dense(&name("ssm_out.weight"), &[n_embd, values])?,
        })
    }

    fn shared(&mut self, name: impl Fn(&str) -> String, shape: &ModelShape) -> Result<SharedDense, ModelError> {
        let (n_embd, n_ff) = (shape.n_embd, shape.n_ff_shared);
        Ok(SharedDense {
            gate_inp: self.dense_f32(&name("ffn_gate_inp_shexp"), &[n_embd])?,
            gate: self.dense(&name("ffn_gate_shexp"), &[n_ff, n_embd])?,
            up: self.dense(&name("ffn_up_shexp"), &[n_ff, n_embd])?,
            down: self.dense(&name("ffn_down_shexp"), &[n_embd, n_ff])?,
        })
    }

    fn layer(&mut self, layer: u32, shape: &ModelShape) -> Result<LayerDense, ModelError> {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let n_embd = shape.n_embd;
        let attn_norm = self.dense_f32(&name("attn_norm"), &[n_embd])?;
        let mixer = match (shape.mixer(layer), shape.delta) {
            (Mixer::Delta, Some(delta)) => MixerDense::Delta(self.delta(layer, n_embd, delta)?),
            _ => MixerDense::Attention(self.attention(name, shape)?),
        };
        let ffn_norm = if shape.n_ff_shared > 0 { "post_attention_norm" } else { "ffn_norm" };
        Ok(LayerDense {
            attn_norm,
            mixer,
            ffn_norm: self.dense_f32(&name(ffn_norm), &[n_embd])?,
            router: self.dense_f32(&name("ffn_gate_inp"), &[shape.n_expert, n_embd])?,
            shared: if shape.n_ff_shared > 0 { Some(self.shared(name, shape)?) } else { None },
        })
    }

    /// What the draft layer has beside a layer's tensors; `output_norm` serves where it has no norm of its own.
    fn draft(&mut self, shape: &ModelShape, output_norm: usize) -> Result<DraftDense, ModelError> {
        let name = |part: &str| format!("blk.{}.nextn.{part}.weight", shape.n_layer);
        let n_embd = shape.n_embd;
        let head_norm = name("shared_head_norm");
        Ok(DraftDense {
            eh_proj: self.dense(&name("eh_proj"), &[n_embd, 2 * n_embd])?,
            enorm: self.dense_f32(&name("enorm"), &[n_embd])?,
            hnorm: self.dense_f32(&name("hnorm"), &[n_embd])?,
            head_norm: if self.file.tensor(&head_norm).is_some() { self.dense_f32(&head_norm, &[n_embd])? } else { output_norm },
        })
    }
}

impl ModelWeights {
    /// Finds and checks all tensors.
    ///
    /// # Errors
    /// Where one is missing or has another shape or type than the architecture asks for.
    pub fn read(file: &GgufFile, shape: &ModelShape) -> Result<Self, ModelError> {
        let mut finder = Finder { file, dense: Vec::new(), dense_bytes: Bytes::ZERO };
        let matrix = [shape.n_vocab, shape.n_embd];
        let token_embd = finder.tensor("token_embd.weight", &matrix)?;
        let head = match file.tensor("output.weight") {
            Some(_) => finder.tensor("output.weight", &matrix)?,
            None => token_embd.clone(),
        };
        let mut layers = Vec::new();
        let mut experts = Vec::new();
        for layer in 0..shape.n_expert_layer() {
            layers.push(finder.layer(layer, shape)?);
            experts.push(finder.layer_experts(layer, shape)?);
        }
        let output_norm = finder.dense_f32("output_norm.weight", &[shape.n_embd])?;
        let draft = if shape.has_draft_layer { Some(finder.draft(shape, output_norm)?) } else { None };
        let Finder { dense, dense_bytes, .. } = finder;
        Ok(Self { token_embd, head, output_norm, dense, dense_bytes, layers, experts, draft })
    }

    /// Bytes of a slot that any expert of the model fits.
    #[must_use]
    pub fn slot_bytes(&self) -> Bytes {
        self.experts.iter().map(LayerExperts::slot_bytes).max().unwrap_or(Bytes::ZERO)
    }

    /// Bytes of all routed experts in the file.
    #[must_use]
    pub fn expert_bytes(&self) -> Bytes {
        let experts_of = |part: &ExpertTensor, n_expert: u64| part.expert_bytes * n_expert;
        let n_expert = self.layers.first().map_or(0, |layer| u64::from(self.dense[layer.router].tensor.rows));
        self.experts.iter().flat_map(LayerExperts::parts).map(|part| experts_of(part, n_expert)).sum()
    }

    /// Bytes of the output head's rows for `n_tokens` tokens, rounded up to the device's alignment.
    #[must_use]
    pub fn draft_head_bytes(&self, n_tokens: usize) -> Bytes {
        (self.head_row_bytes() * n_tokens as u64).align_up(DEVICE_ALIGN)
    }

    /// Bytes of one row of the output head.
    #[must_use]
    pub fn head_row_bytes(&self) -> Bytes {
        Bytes(self.head.bytes.0 / u64::from(self.head.rows.max(1)))
    }

    /// Bytes of the key/value caches of all layers for `n_ctx` tokens.
    #[must_use]
    pub fn kv_bytes(shape: &ModelShape, format: KvFormat, n_ctx: u32) -> Bytes {
        Self::kv_layer_bytes(shape, format, n_ctx) * u64::from(2 * shape.n_kv_layer())
    }

    /// Bytes of one layer's key cache (its value cache has as many), aligned.
    #[must_use]
    pub fn kv_layer_bytes(shape: &ModelShape, format: KvFormat, n_ctx: u32) -> Bytes {
        (Self::kv_row_bytes(shape, format) * u64::from(n_ctx)).align_up(DEVICE_ALIGN)
    }

    /// Bytes of all experts of the layers that a prompt is read through.
    #[must_use]
    pub fn trunk_expert_bytes(&self, shape: &ModelShape) -> Bytes {
        let of_layer = |layer: &LayerExperts| layer.parts().iter().map(|part| part.expert_bytes).sum::<Bytes>();
        self.experts.iter().take(shape.n_layer as usize).map(of_layer).sum::<Bytes>() * u64::from(shape.n_expert)
    }

    /// Bytes of one token's keys, or values, of one layer.
    #[must_use]
    pub fn kv_row_bytes(shape: &ModelShape, format: KvFormat) -> Bytes {
        Bytes::from(format.row_bytes(shape.head_dim as usize)) * u64::from(shape.n_head_kv)
    }
}
