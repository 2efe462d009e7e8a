//! How many bytes activation rows take in their largest form.

use crate::backend::op::Path;
use crate::model::weights::{FileTensor, LayerExperts, MixerDense};
use crate::model::{Arithmetic, ModelWeights};
use crate::quant::ActivationFormat;

/// Activation rows in their largest form, in bytes: what follows from the model and the activation setting alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// Of a normed row that a dense matrix or the head reads; 0 where they all read floats.
    pub normed: u64,
    /// Of a row of the mixer's output; 0 where that is read as floats.
    pub mixed: u64,
    /// Of an activated row of the shared expert; 0 where that is read as floats, or there is none.
    pub shared: u64,
    /// Of a row that the draft layer's projection reads; 0 where that is read as floats, or there is none.
    pub joined: u64,
    /// Of a row that experts read.
    pub expert_input: u64,
}

impl RowBytes {
    /// Finds the sizes.
    #[must_use]
    pub fn of(weights: &ModelWeights, arithmetic: Arithmetic, path: Path) -> Self {
        let row = |quant_type, cols: u32| match arithmetic.format(path, quant_type) {
            // Read where they are.
            ActivationFormat::F32 => 0,
            format => format.row_bytes(cols as usize) as u64,
        };
        let dense = |index: usize| &weights.dense[index].tensor;
        let largest =
            |tensors: &mut dyn Iterator<Item = &FileTensor>| tensors.map(|tensor| row(tensor.quant_type, tensor.cols)).max().unwrap_or(0);
        let inputs = weights.layers.iter().flat_map(|layer| {
            let mixer = match layer.mixer {
                MixerDense::Attention(dense) => [dense.attn_q, dense.attn_k, dense.attn_v, dense.attn_v],
                MixerDense::Delta(dense) => [dense.attn_qkv, dense.attn_gate, dense.ssm_beta, dense.ssm_alpha],
            };
            mixer.into_iter().chain(layer.shared.into_iter().flat_map(|shared| [shared.gate, shared.up]))
        });
        let outputs = weights.layers.iter().map(|layer| match layer.mixer {
            MixerDense::Attention(dense) => dense.attn_output,
            MixerDense::Delta(dense) => dense.ssm_out,
        });
        let shared = weights.layers.iter().filter_map(|layer| layer.shared.map(|shared| shared.down));
        let expert_row = |layer: &LayerExperts| layer.shape(arithmetic, path).input_format.row_bytes(layer.gate.cols as usize) as u64;
        Self {
            normed: largest(&mut inputs.map(dense).chain([&weights.head])),
            mixed: largest(&mut outputs.map(dense)),
            shared: largest(&mut shared.map(dense)),
            joined: largest(&mut weights.draft.iter().map(|draft| dense(draft.eh_proj))),
            expert_input: weights.experts.iter().map(expert_row).max().unwrap_or(0),
        }
    }
}
