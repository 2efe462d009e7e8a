//! Metadata and tensors of `qwen3moe`: grouped-query attention with normed queries and keys, routed experts in every layer.

use super::moe::{self, name, norm};
use super::writer::Metadata;
use super::{Synthetic, Tensor};

/// Adds the architecture's own keys.
pub fn put_metadata(metadata: &mut Metadata, model: &Synthetic) {
    moe::put_metadata(metadata, model, model.shape.n_layer);
    metadata.put_u32("qwen3moe.rope.dimension_count", model.shape.head_width);
}

/// All tensors in the order of the file.
pub fn tensors(model: &Synthetic) -> Vec<Tensor> {
    let n_embd = u64::from(model.shape.n_embd);
    let mut all = moe::first_tensors(model);
    for layer in 0..model.shape.n_layer {
        all.push(norm(name(layer, "attn_norm"), n_embd, 1.0));
        moe::push_attention(&mut all, model, layer, 1);
        all.push(norm(name(layer, "ffn_norm"), n_embd, 1.0));
        moe::push_experts(&mut all, model, layer);
    }
    all
}
