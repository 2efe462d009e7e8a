//! Metadata and tensors of `qwen35moe`: every fourth layer has gated attention, the others a gated delta net; routed and shared
//! experts in every layer; with `--mtp 1` a draft block, which is one more layer of attention.

use ebbtide::quant::QuantType;

use super::moe::{self, matrix, name, norm, vector};
use super::writer::{Metadata, TensorInfo};
use super::{Content, Synthetic, Tensor};

/// A layer has attention if its number plus 1 is a multiple of this.
const ATTENTION_INTERVAL: u32 = 4;
/// Tokens that a channel's convolution sees.
const CONV_TAPS: u32 = 4;

/// Adds the architecture's own keys.
pub fn put_metadata(metadata: &mut Metadata, model: &Synthetic) {
    let (shape, delta) = (&model.shape, &model.shape.delta);
    moe::put_metadata(metadata, model, shape.n_layer + model.n_mtp);
    metadata.put_u32("qwen35moe.rope.dimension_count", shape.head_width / 4);
    metadata.put_i32s("qwen35moe.rope.dimension_sections", &[11, 11, 10, 0]);
    let mut put = |key: &str, value| metadata.put_u32(&format!("qwen35moe.{key}"), value);
    put("expert_shared_feed_forward_length", shape.n_ff_shared);
    put("ssm.conv_kernel", CONV_TAPS);
    put("ssm.state_size", delta.head_width);
    put("ssm.group_count", delta.n_head_key);
    put("ssm.time_step_rank", delta.n_head_value);
    put("ssm.inner_size", delta.n_head_value * delta.head_width);
    put("full_attention_interval", ATTENTION_INTERVAL);
    if model.n_mtp > 0 {
        put("nextn_predict_layers", model.n_mtp);
    }
}

/// All tensors in the order of the file.
pub fn tensors(model: &Synthetic) -> Vec<Tensor> {
    let (shape, n_embd) = (&model.shape, u64::from(model.shape.n_embd));
    let mut all = moe::first_tensors(model);
    for layer in 0..shape.n_layer + model.n_mtp {
        let is_draft = layer >= shape.n_layer;
        all.push(norm(name(layer, "attn_norm"), n_embd, 1.0));
        if is_draft || (layer + 1).is_multiple_of(ATTENTION_INTERVAL) {
            moe::push_attention(&mut all, model, layer, 2);
        } else {
            push_delta_net(&mut all, model, layer);
        }
        all.push(norm(name(layer, "post_attention_norm"), n_embd, 1.0));
        moe::push_experts(&mut all, model, layer);
        push_shared_expert(&mut all, model, layer);
        if is_draft {
            all.push(matrix(name(layer, "nextn.eh_proj"), vec![2 * n_embd, n_embd], model.types.dense, 1.0));
            all.push(norm(name(layer, "nextn.enorm"), n_embd, 1.0));
            all.push(norm(name(layer, "nextn.hnorm"), n_embd, 1.0));
            all.push(norm(name(layer, "nextn.shared_head_norm"), n_embd, 1.0));
        }
    }
    all
}

fn push_delta_net(all: &mut Vec<Tensor>, model: &Synthetic, layer: u32) {
    let (n_embd, delta, dense) = (u64::from(model.shape.n_embd), &model.shape.delta, model.types.dense);
    let (n_head_value, head_width) = (u64::from(delta.n_head_value), u64::from(delta.head_width));
    let value_width = n_head_value * head_width;
    let qkv_width = 2 * u64::from(delta.n_head_key) * head_width + value_width;
    all.push(matrix(name(layer, "attn_qkv"), vec![n_embd, qkv_width], dense, 1.0));
    all.push(matrix(name(layer, "attn_gate"), vec![n_embd, value_width], dense, 1.0));
    all.push(Tensor {
        info: TensorInfo { name: name(layer, "ssm_conv1d"), dims: vec![u64::from(CONV_TAPS), qkv_width], quant: QuantType::F32 },
        content: Content::Matrix { spread: 0.6 },
    });
    // Softplus of the bias spans 0.0025 to 0.31; the rate is negative, 0.05 to 8.05 in size. Neither name ends in `weight`.
    all.push(vector(format!("blk.{layer}.ssm_dt.bias"), n_head_value, Content::Even { first: -6.0, width: 5.0 }));
    all.push(vector(format!("blk.{layer}.ssm_a"), n_head_value, Content::Even { first: -0.05, width: -8.0 }));
    all.push(matrix(name(layer, "ssm_beta"), vec![n_embd, n_head_value], dense, 1.0));
    all.push(matrix(name(layer, "ssm_alpha"), vec![n_embd, n_head_value], dense, 0.5));
    all.push(norm(name(layer, "ssm_norm"), head_width, 1.0));
    all.push(matrix(name(layer, "ssm_out"), vec![value_width, n_embd], dense, 0.4));
}

fn push_shared_expert(all: &mut Vec<Tensor>, model: &Synthetic, layer: u32) {
    let (n_embd, n_ff, shared) = (u64::from(model.shape.n_embd), u64::from(model.shape.n_ff_shared), model.types.shared);
    let gate = Content::Matrix { spread: 1.0 / (n_embd as f64).sqrt() };
    all.push(vector(name(layer, "ffn_gate_inp_shexp"), n_embd, gate));
    all.push(matrix(name(layer, "ffn_gate_shexp"), vec![n_embd, n_ff], shared, 1.0));
    all.push(matrix(name(layer, "ffn_up_shexp"), vec![n_embd, n_ff], shared, 1.0));
    all.push(matrix(name(layer, "ffn_down_shexp"), vec![n_ff, n_embd], shared, 0.5));
}
