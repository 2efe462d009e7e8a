//! A gated delta net: projections, a short convolution, the delta rule over a recurrent state, a gated norm.
//!
//! Rows of a prompt take the state with them. Rows of a window do not write it: what they would do to it is kept, and the rows that are
//! accepted are replayed ([`Forward::window_commit`]).

use super::{DeltaRows, Forward, Projector, Rows};
use crate::backend::Addr;
use crate::backend::op::{DeltaShape, Op};
use crate::model::layout::{DeltaKept, StateLayout, WindowLayout};
use crate::model::shape::Mixer;
use crate::model::weights::{DeltaDense, MixerDense};

impl Forward<'_> {
    /// Where state and history of `layer`, which is a delta net, lie.
    fn state_addrs(&self, layer: u32) -> (Addr, Addr) {
        StateLayout::new(self.shape).addrs(self.resident.state, self.shape.index_among(Mixer::Delta, layer))
    }

    /// The delta net of rows that are normed, added to the residual.
    pub(super) fn delta_net(&self, ops: &mut Vec<Op>, layer: u32, dense: DeltaDense, rows: &Rows<'_>, mut from_normed: Projector) {
        let shape = self.shape.delta.expect("a layer that is a delta net has its sizes");
        let (eps, n_rows, parts) = (self.shape.rms_eps, rows.n_rows, &rows.parts.delta);
        let at = |part| rows.at(part);
        let (raw, beta, decay) = match rows.delta {
            DeltaRows::Window { raw, beta, decay } => (raw, beta, decay),
            DeltaRows::Prompt { .. } | DeltaRows::None => (at(parts.raw), at(parts.beta), at(parts.decay)),
        };
        let (gates, qkv, out) = (at(parts.gates), at(parts.convolved), at(parts.out));
        let products = [(dense.attn_qkv, raw), (dense.attn_gate, gates), (dense.ssm_beta, beta), (dense.ssm_alpha, decay)];
        from_normed.project_all(ops, &products.map(|(weights, out)| (self.matrix(weights), out)));
        let (dt_bias, a) = (self.vector(dense.ssm_dt), self.vector(dense.ssm_a));
        ops.push(Op::DeltaGates { beta, decay, dt_bias, a, n_rows, n_head: shape.n_head_v });
        let (state, history) = self.state_addrs(layer);
        ops.push(self.convolution(dense, raw, history, qkv, n_rows, shape));
        match rows.delta {
            DeltaRows::Prompt { block, chunk, open } => {
                ops.push(Op::DeltaHistory { x: raw, history, n_rows, shape });
                ops.push(Op::DeltaPrompt {
                    qkv,
                    beta,
                    decay,
                    state,
                    open,
                    out,
                    n_rows,
                    position: block.position + chunk.first,
                    block_position: block.position,
                    ends_block: chunk.first + chunk.count == block.count,
                    shape,
                });
            }
            DeltaRows::Window { .. } | DeltaRows::None => ops.push(Op::DeltaWindow { qkv, beta, decay, state, out, n_rows, shape }),
        }
        let weight = self.vector(dense.ssm_norm);
        ops.push(Op::GatedHeadNorm { x: out, weight, gates, n_rows, n_head: shape.n_head_v, head_dim: shape.head_dim, eps });
        let output = self.matrix(dense.ssm_out);
        rows.products(out, at(parts.quantised), self.arithmetic).project(ops, output, rows.residual, true);
    }

    fn convolution(&self, dense: DeltaDense, x: Addr, history: Addr, out: Addr, n_rows: u32, shape: DeltaShape) -> Op {
        Op::DeltaConv { x, history, taps: self.vector(dense.ssm_conv1d), out, n_rows, shape, eps: self.shape.rms_eps }
    }

    /// Takes the state of all delta nets over the first `n_rows` rows of the last window; nothing where the model has none.
    #[must_use]
    pub fn window_commit(&self, base: Addr, layout: &WindowLayout, n_rows: u32) -> Vec<Op> {
        let mut ops = Vec::new();
        let Some(shape) = self.shape.delta else { return ops };
        let qkv = base.offset(layout.mixer.delta.convolved.offset);
        for (layer, dense) in (0..).zip(&self.weights.layers) {
            let MixerDense::Delta(dense) = dense.mixer else { continue };
            let DeltaKept { raw, beta, decay, .. } = layout.layer_kept(self.shape, shape, layer);
            let [raw, beta, decay] = [raw, beta, decay].map(|offset| base.offset(offset));
            let (state, history) = self.state_addrs(layer);
            ops.push(self.convolution(dense, raw, history, qkv, n_rows, shape));
            ops.push(Op::DeltaCommit { qkv, beta, decay, state, n_rows, shape });
            ops.push(Op::DeltaHistory { x: raw, history, n_rows, shape });
        }
        ops
    }
}
