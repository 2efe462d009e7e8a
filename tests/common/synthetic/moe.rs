//! What the mixture-of-experts architectures share: common keys, embedding and head, attention's matrices, routed experts.

use ebbtide::quant::QuantType;

use super::writer::{Metadata, TensorInfo};
use super::{Content, Synthetic, Tensor};

/// Adds the keys that all architectures have, in the script's order.
pub fn put_metadata(metadata: &mut Metadata, model: &Synthetic, block_count: u32) {
    let (architecture, shape) = (model.architecture.name(), &model.shape);
    let mut put = |key: &str, value| metadata.put_u32(&format!("{architecture}.{key}"), value);
    put("block_count", block_count);
    put("context_length", 4096);
    put("embedding_length", shape.n_embd);
    put("feed_forward_length", shape.n_ff_expert * shape.n_expert_used);
    put("attention.head_count", shape.n_head);
    put("attention.head_count_kv", shape.n_head_kv);
    put("attention.key_length", shape.head_width);
    put("attention.value_length", shape.head_width);
    metadata.put_f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-6);
    metadata.put_f32(&format!("{architecture}.rope.freq_base"), 1e4);
    let mut put = |key: &str, value| metadata.put_u32(&format!("{architecture}.{key}"), value);
    put("expert_count", shape.n_expert);
    put("expert_used_count", shape.n_expert_used);
    put("expert_feed_forward_length", shape.n_ff_expert);
    put("vocab_size", shape.n_vocab);
}

/// Embedding, last norm and head, with which every file begins.
pub fn first_tensors(model: &Synthetic) -> Vec<Tensor> {
    let (n_embd, n_vocab) = (u64::from(model.shape.n_embd), u64::from(model.shape.n_vocab));
    let mut all = vec![Tensor {
        info: TensorInfo { name: "token_embd.weight".to_owned(), dims: vec![n_embd, n_vocab], quant: model.types.embedding },
        content: Content::Matrix { spread: 1.0 },
    }];
    all.push(norm("output_norm.weight".to_owned(), n_embd, 1.0));
    if !model.tied {
        all.push(matrix("output.weight".to_owned(), vec![n_embd, n_vocab], model.types.head, 3.0));
    }
    all
}

/// Adds attention; `query_rows` counts, for each number of a head, its rows of `attn_q`: 2 where each query head has an output gate.
pub fn push_attention(all: &mut Vec<Tensor>, model: &Synthetic, layer: u32, query_rows: u64) {
    let (shape, dense) = (&model.shape, model.types.dense);
    let (n_embd, head_width) = (u64::from(shape.n_embd), u64::from(shape.head_width));
    let (q_width, kv_width) = (u64::from(shape.n_head) * head_width, u64::from(shape.n_head_kv) * head_width);
    all.push(matrix(name(layer, "attn_q"), vec![n_embd, q_width * query_rows], dense, 1.0));
    all.push(matrix(name(layer, "attn_k"), vec![n_embd, kv_width], dense, 1.0));
    all.push(matrix(name(layer, "attn_v"), vec![n_embd, kv_width], dense, 1.0));
    all.push(matrix(name(layer, "attn_output"), vec![q_width, n_embd], dense, 0.4));
    all.push(norm(name(layer, "attn_q_norm"), head_width, 1.5));
    all.push(norm(name(layer, "attn_k_norm"), head_width, 1.5));
}

/// Adds the router and the routed experts.
pub fn push_experts(all: &mut Vec<Tensor>, model: &Synthetic, layer: u32) {
    let (shape, types) = (&model.shape, &model.types);
    let (n_embd, n_ff, n_expert) = (u64::from(shape.n_embd), u64::from(shape.n_ff_expert), u64::from(shape.n_expert));
    all.push(matrix(name(layer, "ffn_gate_inp"), vec![n_embd, n_expert], QuantType::F32, 2.0));
    all.push(matrix(name(layer, "ffn_gate_exps"), vec![n_embd, n_ff, n_expert], types.gate, 1.4));
    all.push(matrix(name(layer, "ffn_up_exps"), vec![n_embd, n_ff, n_expert], types.up, 1.4));
    all.push(matrix(name(layer, "ffn_down_exps"), vec![n_ff, n_embd, n_expert], types.down, 0.5));
}

/// A layer's tensor.
pub fn name(layer: u32, part: &str) -> String {
    format!("blk.{layer}.{part}.weight")
}

/// A matrix whose product with numbers of spread 1 spreads by `gain`.
pub fn matrix(name: String, dims: Vec<u64>, quant: QuantType, gain: f64) -> Tensor {
    let spread = gain / (dims[0] as f64).sqrt();
    Tensor { info: TensorInfo { name, dims, quant }, content: Content::Matrix { spread } }
}

/// A norm's factors.
pub fn norm(name: String, width: u64, centre: f32) -> Tensor {
    vector(name, width, Content::Norm { centre })
}

/// A row of float32 numbers.
pub fn vector(name: String, width: u64, content: Content) -> Tensor {
    Tensor { info: TensorInfo { name, dims: vec![width], quant: QuantType::F32 }, content }
}
