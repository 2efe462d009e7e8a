//! Metadata and tensors of `qwen3moe`: grouped-query attention with normed queries and keys, routed experts in every layer.

use ebbtide::quant::QuantType;

use super::writer::{Metadata, TensorInfo};
use super::{Content, Shape, Synthetic, Tensor};

/// Adds the architecture's own keys.
pub fn put_metadata(metadata: &mut Metadata, shape: &Shape) {
    let mut put = |key: &str, value| metadata.put_u32(&format!("qwen3moe.{key}"), value);
    put("block_count", shape.n_layer);
    put("context_length", 4096);
    put("embedding_length", shape.n_embd);
    put("feed_forward_length", shape.n_ff_expert * shape.n_expert_used);
    put("attention.head_count", shape.n_head);
    put("attention.head_count_kv", shape.n_head_kv);
    put("attention.key_length", shape.head_width);
    put("attention.value_length", shape.head_width);
    metadata.put_f32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6);
    metadata.put_f32("qwen3moe.rope.freq_base", 1e4);
    let mut put = |key: &str, value| metadata.put_u32(&format!("qwen3moe.{key}"), value);
    put("expert_count", shape.n_expert);
    put("expert_used_count", shape.n_expert_used);
    put("expert_feed_forward_length", shape.n_ff_expert);
    put("vocab_size", shape.n_vocab);
    put("rope.dimension_count", shape.head_width);
}

/// All tensors in the order of the file.
pub fn tensors(model: &Synthetic) -> Vec<Tensor> {
    let (shape, types) = (&model.shape, &model.types);
    let (n_embd, n_ff) = (u64::from(shape.n_embd), u64::from(shape.n_ff_expert));
    let (n_expert, n_vocab) = (u64::from(shape.n_expert), u64::from(shape.n_vocab));
    let head_width = u64::from(shape.head_width);
    let (q_width, kv_width) = (u64::from(shape.n_head) * head_width, u64::from(shape.n_head_kv) * head_width);

    let mut all = vec![Tensor {
        info: TensorInfo { name: "token_embd.weight".to_owned(), dims: vec![n_embd, n_vocab], quant: types.embedding },
        content: Content::Matrix { spread: 1.0 },
    }];
    all.push(norm("output_norm.weight".to_owned(), n_embd, 1.0));
    if !model.tied {
        all.push(matrix("output.weight".to_owned(), vec![n_embd, n_vocab], types.head, 3.0));
    }
    for layer in 0..shape.n_layer {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        all.push(norm(name("attn_norm"), n_embd, 1.0));
        all.push(matrix(name("attn_q"), vec![n_embd, q_width], types.dense, 1.0));
        all.push(matrix(name("attn_k"), vec![n_embd, kv_width], types.dense, 1.0));
        all.push(matrix(name("attn_v"), vec![n_embd, kv_width], types.dense, 1.0));
        all.push(matrix(name("attn_output"), vec![q_width, n_embd], types.dense, 0.4));
        all.push(norm(name("attn_q_norm"), head_width, 1.5));
        all.push(norm(name("attn_k_norm"), head_width, 1.5));
        all.push(norm(name("ffn_norm"), n_embd, 1.0));
        all.push(matrix(name("ffn_gate_inp"), vec![n_embd, n_expert], QuantType::F32, 2.0));
        all.push(matrix(name("ffn_gate_exps"), vec![n_embd, n_ff, n_expert], types.gate, 1.4));
        all.push(matrix(name("ffn_up_exps"), vec![n_embd, n_ff, n_expert], types.up, 1.4));
        all.push(matrix(name("ffn_down_exps"), vec![n_ff, n_embd, n_expert], types.down, 0.5));
    }
    all
}

/// A matrix whose product with numbers of spread 1 spreads by `gain`.
fn matrix(name: String, dims: Vec<u64>, quant: QuantType, gain: f64) -> Tensor {
    let spread = gain / (dims[0] as f64).sqrt();
    Tensor { info: TensorInfo { name, dims, quant }, content: Content::Matrix { spread } }
}

fn norm(name: String, width: u64, centre: f32) -> Tensor {
    Tensor { info: TensorInfo { name, dims: vec![width], quant: QuantType::F32 }, content: Content::Norm { centre } }
}
