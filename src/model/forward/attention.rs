//! Attention over the caches, with or without a gate on its output.

use super::{Forward, Projector, Rows};
use crate::backend::Addr;
use crate::backend::op::{Op, Path};
use crate::model::shape::Mixer;
use crate::model::weights::AttentionDense;
use crate::model::{ModelShape, ModelWeights};

impl Forward<'_> {
    /// Where keys and values of `layer`, which has attention, lie.
    fn kv_addrs(&self, layer: u32) -> (Addr, Addr) {
        let one = ModelWeights::kv_layer_bytes(self.shape, self.resident.kv_format, self.resident.n_ctx);
        let keys = self.resident.kv.offset(one * u64::from(2 * self.shape.index_among(Mixer::Attention, layer)));
        (keys, keys.offset(one))
    }

    fn head_norm_rope(&self, x: Addr, weight: usize, rows: &Rows<'_>, n_head: u32) -> Op {
        let ModelShape { head_dim, n_rot, rope_freq_base: freq_base, rms_eps: eps, .. } = *self.shape;
        let (weight, positions, n_rows) = (self.vector(weight), rows.rope_positions, rows.n_rows);
        Op::HeadNormRope { x, weight, positions, n_rows, n_head, head_dim, n_rot, freq_base, eps }
    }

    fn kv_store(&self, values: Addr, cache: Addr, rows: &Rows<'_>) -> Op {
        let (n_ctx, format) = (self.resident.n_ctx, self.resident.kv_format);
        let ModelShape { n_head_kv, head_dim, .. } = *self.shape;
        let Rows { positions, first_row, n_rows, .. } = *rows;
        Op::KvStore { rows: values, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx }
    }

    /// Puts keys and values of rows that are normed into the caches.
    pub(super) fn keys_values(&self, ops: &mut Vec<Op>, layer: u32, dense: AttentionDense, rows: &Rows<'_>, from_normed: &mut Projector) {
        let [k, v] = [rows.parts.attention.k, rows.parts.attention.v].map(|part| rows.at(part));
        from_normed.project(ops, self.matrix(dense.attn_k), k, false);
        from_normed.project(ops, self.matrix(dense.attn_v), v, false);
        let (keys, values) = self.kv_addrs(layer);
        ops.push(self.head_norm_rope(k, dense.attn_k_norm, rows, self.shape.n_head_kv));
        ops.push(self.kv_store(k, keys, rows));
        ops.push(self.kv_store(v, values, rows));
    }

    /// Queries of a window's rows, keys and values in the caches; without gates.
    fn window_heads(&self, ops: &mut Vec<Op>, layer: u32, dense: AttentionDense, rows: &Rows<'_>, from_normed: &mut Projector) {
        let parts = &rows.parts.attention;
        let [q, k, v] = [parts.q, parts.k, parts.v].map(|part| rows.at(part));
        from_normed.project_all(ops, &[(self.matrix(dense.attn_q), q), (self.matrix(dense.attn_k), k), (self.matrix(dense.attn_v), v)]);
        let ModelShape { n_head, n_head_kv, head_dim, n_rot, rope_freq_base: freq_base, rms_eps: eps, .. } = *self.shape;
        let (k_cache, v_cache) = self.kv_addrs(layer);
        let &Rows { n_rows, positions, rope_positions, first_row, .. } = rows;
        ops.push(Op::StoreHeads {
            q,
            k,
            v,
            q_weight: self.vector(dense.attn_q_norm),
            k_weight: self.vector(dense.attn_k_norm),
            rope_positions,
            k_cache,
            v_cache,
            format: self.resident.kv_format,
            positions,
            first_row,
            n_rows,
            n_head,
            n_head_kv,
            head_dim,
            n_rot,
            freq_base,
            eps,
            n_ctx: self.resident.n_ctx,
        });
    }

    /// Attention of rows that are normed, added to the residual.
    pub(super) fn attention(&self, ops: &mut Vec<Op>, layer: u32, dense: AttentionDense, rows: &Rows<'_>, mut from_normed: Projector) {
        let (shape, parts) = (self.shape, &rows.parts.attention);
        let &Rows { n_rows, path, positions, first_row, residual, .. } = rows;
        let [joined, q, gates, attended] = [parts.joined, parts.q, parts.gates, parts.attended].map(|part| rows.at(part));
        if shape.gated_attention {
            // Queries and gates are projected over keys and values: these are in the caches by then.
            self.keys_values(ops, layer, dense, rows, &mut from_normed);
            from_normed.project(ops, self.matrix(dense.attn_q), joined, false);
            ops.push(Op::SplitGates { joined, values: q, gates, n_rows, n_head: shape.n_head, head_dim: shape.head_dim });
            ops.push(self.head_norm_rope(q, dense.attn_q_norm, rows, shape.n_head));
        } else if path == Path::Window {
            self.window_heads(ops, layer, dense, rows, &mut from_normed);
        } else {
            self.keys_values(ops, layer, dense, rows, &mut from_normed);
            from_normed.project(ops, self.matrix(dense.attn_q), q, false);
            ops.push(self.head_norm_rope(q, dense.attn_q_norm, rows, shape.n_head));
        }
        let (keys, values) = self.kv_addrs(layer);
        ops.push(Op::Attention {
            q,
            k_cache: keys,
            v_cache: values,
            format: self.resident.kv_format,
            positions,
            first_row,
            out: attended,
            n_rows,
            n_head: shape.n_head,
            n_head_kv: shape.n_head_kv,
            head_dim: shape.head_dim,
            n_ctx: self.resident.n_ctx,
            scale: shape.attention_scale,
            path,
        });
        if shape.gated_attention {
            ops.push(Op::SigmoidGate { x: attended, gates, n_rows, n_cols: shape.q_width() });
        }
        let output = self.matrix(dense.attn_output);
        rows.products(attended, rows.at(parts.quantised), self.exact).project(ops, output, residual, true);
    }
}
