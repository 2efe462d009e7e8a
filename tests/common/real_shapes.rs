//! Models of real shape that are all hole: tensors with sizes and nothing in them.

use ebbtide::quant::QuantType;

use super::rewrite::{Gguf, Tensor, Value};

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
    hybrid: Option<Hybrid>,
}

/// What a hybrid model has beside that.
#[derive(Clone, Copy, Debug)]
struct Hybrid {
    n_rot: u32,
    n_ff_shared: u32,
    n_head_k: u32,
    n_head_v: u32,
    delta_head_dim: u32,
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
    hybrid: None,
};

/// Qwen3.6-35B-A3B with its draft layer, dense weights in Q8_0.
pub const QWEN36_35B_A3B: Directory = Directory {
    n_layer: 40,
    n_embd: 2048,
    n_head: 16,
    n_head_kv: 2,
    head_dim: 256,
    n_expert: 256,
    n_ff: 512,
    n_vocab: 248_320,
    n_ctx: 262_144,
    dense: QuantType::Q8_0,
    hybrid: Some(Hybrid { n_rot: 64, n_ff_shared: 512, n_head_k: 16, n_head_v: 32, delta_head_dim: 128 }),
};

/// The layers, experts, vocabulary, head and KV cache of Qwen3.6-35B-A3B (333 MiB, 20 KiB a token in f16) with attention in all layers
/// and buffers as lean as those of Qwen3-30B-A3B: what the model of performance has rows for. Arithmetic of a token at a depth of 30k
/// takes about as long.
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

/// Layers from one with attention to the next.
const ATTENTION_INTERVAL: u32 = 4;
const EXPERTS: QuantType = QuantType::IQ3_XXS;

impl Directory {
    pub fn gguf(&self) -> Gguf {
        let mut file = Gguf::default();
        let architecture = if self.hybrid.is_some() { "qwen35moe" } else { "qwen3moe" };
        file.set("general.architecture", Value::string(architecture));
        let mut keys = vec![
            ("block_count", self.n_layer + u32::from(self.hybrid.is_some())),
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
        ];
        if let Some(Hybrid { n_rot, n_ff_shared, n_head_k, n_head_v, delta_head_dim }) = self.hybrid {
            keys.extend([
                ("rope.dimension_count", n_rot),
                ("expert_shared_feed_forward_length", n_ff_shared),
                ("ssm.conv_kernel", 4),
                ("ssm.state_size", delta_head_dim),
                ("ssm.group_count", n_head_k),
                ("ssm.time_step_rank", n_head_v),
                ("ssm.inner_size", n_head_v * delta_head_dim),
                ("full_attention_interval", ATTENTION_INTERVAL),
                ("nextn_predict_layers", 1),
            ]);
        }
        for (key, value) in keys {
            file.set(&format!("{architecture}.{key}"), Value::u32(value));
        }
        file.set(&format!("{architecture}.attention.layer_norm_rms_epsilon"), Value::f32(1e-6));
        file.set(&format!("{architecture}.rope.freq_base"), Value::f32(1e6));
        let [n_embd, n_vocab] = [self.n_embd, self.n_vocab].map(u64::from);
        put(&mut file, "token_embd.weight", &[n_embd, n_vocab], QuantType::Q5_K);
        put(&mut file, "output_norm.weight", &[n_embd], QuantType::F32);
        put(&mut file, "output.weight", &[n_embd, n_vocab], QuantType::Q5_K);
        for layer in 0..self.n_layer {
            self.layer(&mut file, layer);
        }
        if self.hybrid.is_some() {
            self.layer(&mut file, self.n_layer);
            let name = |part: &str| format!("blk.{}.nextn.{part}.weight", self.n_layer);
            put(&mut file, &name("eh_proj"), &[2 * n_embd, n_embd], self.dense);
            for norm in ["enorm", "hnorm", "shared_head_norm"] {
                put(&mut file, &name(norm), &[n_embd], QuantType::F32);
            }
        }
        file
    }

    fn layer(&self, file: &mut Gguf, layer: u32) {
        let [n_embd, n_ff, n_expert] = [self.n_embd, self.n_ff, self.n_expert].map(u64::from);
        let mut tensor = |part: &str, dims: &[u64], quant| put(file, &format!("blk.{layer}.{part}"), dims, quant);
        tensor("attn_norm.weight", &[n_embd], QuantType::F32);
        match self.hybrid {
            Some(hybrid) if layer < self.n_layer && !(layer + 1).is_multiple_of(ATTENTION_INTERVAL) => {
                hybrid.delta_net(n_embd, self.dense, &mut tensor)
            }
            _ => self.attention(&mut tensor),
        }
        tensor(if self.hybrid.is_some() { "post_attention_norm.weight" } else { "ffn_norm.weight" }, &[n_embd], QuantType::F32);
        tensor("ffn_gate_inp.weight", &[n_embd, n_expert], QuantType::F32);
        tensor("ffn_gate_exps.weight", &[n_embd, n_ff, n_expert], EXPERTS);
        tensor("ffn_up_exps.weight", &[n_embd, n_ff, n_expert], EXPERTS);
        tensor("ffn_down_exps.weight", &[n_ff, n_embd, n_expert], EXPERTS);
        if let Some(Hybrid { n_ff_shared, .. }) = self.hybrid {
            let n_ff = u64::from(n_ff_shared);
            tensor("ffn_gate_inp_shexp.weight", &[n_embd], QuantType::F32);
            tensor("ffn_gate_shexp.weight", &[n_embd, n_ff], self.dense);
            tensor("ffn_up_shexp.weight", &[n_embd, n_ff], self.dense);
            tensor("ffn_down_shexp.weight", &[n_ff, n_embd], self.dense);
        }
    }

    fn attention(&self, tensor: &mut dyn FnMut(&str, &[u64], QuantType)) {
        let [n_embd, head_dim] = [self.n_embd, self.head_dim].map(u64::from);
        let (q_width, kv_width) = (u64::from(self.n_head) * head_dim, u64::from(self.n_head_kv) * head_dim);
        let projected = if self.hybrid.is_some() { 2 * q_width } else { q_width };
        tensor("attn_q.weight", &[n_embd, projected], self.dense);
        tensor("attn_k.weight", &[n_embd, kv_width], self.dense);
        tensor("attn_v.weight", &[n_embd, kv_width], self.dense);
        tensor("attn_output.weight", &[q_width, n_embd], self.dense);
        tensor("attn_q_norm.weight", &[head_dim], QuantType::F32);
        tensor("attn_k_norm.weight", &[head_dim], QuantType::F32);
    }
}

impl Hybrid {
    fn delta_net(&self, n_embd: u64, dense: QuantType, tensor: &mut dyn FnMut(&str, &[u64], QuantType)) {
        let [n_head_k, n_head_v, head_dim] = [self.n_head_k, self.n_head_v, self.delta_head_dim].map(u64::from);
        let (values, channels) = (n_head_v * head_dim, (2 * n_head_k + n_head_v) * head_dim);
        tensor("attn_qkv.weight", &[n_embd, channels], dense);
        tensor("attn_gate.weight", &[n_embd, values], dense);
        tensor("ssm_beta.weight", &[n_embd, n_head_v], dense);
        tensor("ssm_alpha.weight", &[n_embd, n_head_v], dense);
        tensor("ssm_dt.bias", &[n_head_v], QuantType::F32);
        tensor("ssm_a", &[n_head_v], QuantType::F32);
        tensor("ssm_conv1d.weight", &[4, channels], QuantType::F32);
        tensor("ssm_norm.weight", &[head_dim], QuantType::F32);
        tensor("ssm_out.weight", &[values, n_embd], dense);
    }
}

fn put(file: &mut Gguf, name: &str, dims: &[u64], quant: QuantType) {
    file.tensors.push(Tensor::empty(name.to_owned(), dims, quant));
}
