//! The experts of windows, and what both expert operations share: gate and up, the activated rows, down, and the addition, one kernel after
//! another over the operation's scratch, whose layout `kernels-cuda/experts.cuh` draws.

use super::args::{ExpertsActivateArgs, ExpertsWindowAddArgs, ExpertsWindowArgs};
use super::kernels::Kernel;
use super::launch::{BLOCK, Launch, WINDOW_OUTPUTS, count, rows_number};
use super::windows::is_quantised;
use crate::backend::op::{ExpertShape, Op};
use crate::backend::{Addr, Result};
use crate::quant::QuantType;
use crate::units::Bytes;

/// Where the parts of an operation's scratch lie.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Gate, then up, `[n_pairs, n_ff]` each; later the results `[n_pairs, n_embd]`.
    pub floats: Addr,
    /// Activated rows.
    pub activated: Addr,
}

impl Parts {
    /// In a scratch for `n_pairs` pairs; see [`expert_scratch_bytes`](crate::backend::op::expert_scratch_bytes).
    pub fn of(scratch: Addr, shape: &ExpertShape, n_pairs: u64) -> Self {
        let floats = (2 * u64::from(shape.n_ff)).max(shape.n_embd.into());
        Self { floats: scratch, activated: scratch.offset(Bytes(4 * floats * n_pairs)) }
    }

    /// Part `part` of gate and up, `part_floats` numbers each.
    pub fn part(self, part: u32, part_floats: u64) -> Addr {
        self.floats.offset(Bytes(4 * part_floats * u64::from(part)))
    }
}

/// Bytes of a row of weights.
pub fn row_bytes(quant_type: QuantType, n: u32) -> u64 {
    quant_type.bytes_for(n.into()).expect("the check of shapes demands whole blocks")
}

/// The launches of gate and up: which part, of which type, and how many parts of that type at once.
pub fn inner_launches(shape: &ExpertShape) -> impl Iterator<Item = (u32, QuantType, u64)> {
    let together = shape.gate_type == shape.up_type;
    let second = (!together).then_some((1, shape.up_type, 1));
    [(0, shape.gate_type, if together { 2 } else { 1 })].into_iter().chain(second)
}

impl Launch<'_> {
    /// Queues the activation of gate and up.
    pub fn activate(self, shape: &ExpertShape, parts: Parts, n_pairs: u64) -> Result<()> {
        let args = ExpertsActivateArgs {
            gate: parts.floats,
            up: parts.part(1, n_pairs * u64::from(shape.n_ff)),
            out: parts.activated,
            n_ff: shape.n_ff,
            format: rows_number(shape.down_format),
        };
        self.kernel(Kernel("experts_activate", None), [n_pairs, shape.n_ff.div_ceil(BLOCK).into(), 1], BLOCK, &args)
    }

    /// Queues [`Op::ExpertsWindow`].
    pub fn experts_window(self) -> Result<()> {
        let Op::ExpertsWindow { input, ids, weights, table, residual, n_rows, n_used, ref shape, scratch, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        if is_quantised(shape.input_format) && is_quantised(shape.down_format) {
            return self.window_experts();
        }
        let n_pairs = count(&[n_rows, n_used]);
        let parts = Parts::of(scratch, shape, n_pairs);
        let product = |quant_type: QuantType, n_parts: u64, args: ExpertsWindowArgs| {
            let blocks = [args.n_out.div_ceil(WINDOW_OUTPUTS).into(), n_pairs, n_parts];
            self.kernel(Kernel("experts_window", Some(quant_type)), blocks, BLOCK, &args)
        };
        let inner = ExpertsWindowArgs {
            input,
            ids,
            table,
            out: parts.floats,
            row_bytes: 0,
            n_out: shape.n_ff,
            n_in: shape.n_embd,
            n_rows,
            n_used,
            format: rows_number(shape.input_format),
            first_part: 0,
            by_pair: 0,
            unused: 0,
        };
        for (first_part, quant_type, n_parts) in inner_launches(shape) {
            let out = parts.part(first_part, n_pairs * u64::from(shape.n_ff));
            product(quant_type, n_parts, ExpertsWindowArgs { out, first_part, row_bytes: row_bytes(quant_type, shape.n_embd), ..inner })?;
        }
        self.activate(shape, parts, n_pairs)?;
        let down = ExpertsWindowArgs {
            input: parts.activated,
            row_bytes: row_bytes(shape.down_type, shape.n_ff),
            n_out: shape.n_embd,
            n_in: shape.n_ff,
            format: rows_number(shape.down_format),
            first_part: 2,
            by_pair: 1,
            ..inner
        };
        product(shape.down_type, 1, down)?;
        let args = ExpertsWindowAddArgs { results: parts.floats, weights, residual, n_embd: shape.n_embd, n_used };
        self.kernel(Kernel("experts_window_add", None), [shape.n_embd.div_ceil(BLOCK).into(), n_rows.into(), 1], BLOCK, &args)
    }
}
