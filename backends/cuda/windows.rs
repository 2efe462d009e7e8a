//! Products of one to eight quantised rows, which `kernels-cuda/window_products.cuh` and `window_experts.cuh` compute as integers.

use super::args::{
    MatMulArgs, NORM_TARGETS, NormQuantiseArgs, StoreHeadsArgs, WINDOW_MATRICES, WindowActivateArgs, WindowDownArgs, WindowGateUpArgs,
    WindowMatrix, WindowProductsArgs,
};
use super::experts::{Parts, inner_launches, row_bytes};
use super::kernels::Kernel;
use super::launch::{BLOCK, HEAD_BLOCK, Launch, cache_units, count, rows_number};
use crate::backend::op::{Matrix, Op};
use crate::backend::{Addr, Result};
use crate::quant::{ActivationFormat, QuantType};

/// Weights of a warp's step, and those of a slice.
const STEP_WEIGHTS: u32 = 2048;
const SLICE: u32 = 32;
const WARP: u32 = 32;
/// Warps of a block that multiplies.
const PRODUCT_WARPS: u32 = 4;
/// Warps of a block that multiplies with down matrices, and its outputs: few, so that one row's experts are spread over the whole card.
const DOWN_WARPS: u32 = 8;
const DOWN_OUTPUTS: u32 = 8;
/// Pairs of a row and one of its experts that the kernel keeps a list of.
const PAIRS_MAX: u64 = 256;
/// Numbers that a warp stores as activations.
const WARP_COLUMNS: u32 = 256;
/// Threads of a block that multiplies float rows with one output's weights.
const FLOATS_BLOCK: u32 = 128;
/// Warps that fill the largest card once; with more work than that, a warp goes on to further groups of weight rows, up to some.
const WARPS: u64 = 4096;
const WARP_GROUPS_MAX: u64 = 16;

/// Groups of weight rows, each of which a warp takes at a time.
fn groups(n_out: u32, n_in: u32) -> u32 {
    let rows = if n_in <= STEP_WEIGHTS / 4 {
        4
    } else if n_in <= STEP_WEIGHTS / 2 {
        2
    } else {
        1
    };
    debug_assert!(n_in.is_multiple_of(SLICE), "the check of shapes demands whole blocks");
    n_out.div_ceil(rows)
}

/// Groups that a warp takes one after another where there are `n_groups`.
fn warp_groups(n_groups: u64) -> u32 {
    u32::try_from((n_groups / WARPS).clamp(1, WARP_GROUPS_MAX)).expect("clamped")
}

/// True where integer kernels multiply rows of `format`.
pub const fn is_quantised(format: ActivationFormat) -> bool {
    !matches!(format, ActivationFormat::F32)
}

impl Launch<'_> {
    /// Queues the products of quantised rows with matrices of one input width, `out` f32 `[n_rows, rows of the matrix]` each: one launch
    /// for neighbours of one type.
    pub fn window_products(self, matrices: &[(Matrix, Addr)], input: Addr, n_rows: u32, accumulate: bool) -> Result<()> {
        let alike = |left: &(Matrix, Addr), right: &(Matrix, Addr)| left.0.quant_type == right.0.quant_type;
        for of_type in matrices.chunk_by(alike) {
            for together in of_type.chunks(WINDOW_MATRICES) {
                self.products_of_a_type(together, input, n_rows, accumulate)?;
            }
        }
        Ok(())
    }

    fn products_of_a_type(self, matrices: &[(Matrix, Addr)], input: Addr, n_rows: u32, accumulate: bool) -> Result<()> {
        let (first, _) = matrices[0];
        let n_groups = matrices.iter().map(|(matrix, _)| u64::from(groups(matrix.rows, matrix.cols))).sum();
        let warp_groups = warp_groups(n_groups);
        let none = WindowMatrix { weights: Addr(0), out: Addr(0), n_out: 0, first_block: 0 };
        let mut args = WindowProductsArgs {
            input,
            row_bytes: first.row_bytes() as u64,
            n_in: first.cols,
            n_rows,
            n_matrices: matrices.len() as u32,
            warp_groups,
            accumulate: accumulate.into(),
            unused: 0,
            matrices: [none; WINDOW_MATRICES],
        };
        let mut n_blocks = 0;
        for (place, &(matrix, out)) in args.matrices.iter_mut().zip(matrices) {
            *place = WindowMatrix { weights: matrix.addr, out, n_out: matrix.rows, first_block: n_blocks };
            n_blocks += groups(matrix.rows, matrix.cols).div_ceil(PRODUCT_WARPS * warp_groups);
        }
        self.kernel(Kernel("window_products", Some(first.quant_type)), [n_blocks.into(), 1, 1], PRODUCT_WARPS * WARP, &args)
    }

    /// Queues [`Op::ExpertsWindow`] where the rows are quantised.
    pub fn window_experts(self) -> Result<()> {
        let Op::ExpertsWindow { input, ids, weights, table, residual, n_rows, n_used, ref shape, scratch, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        let n_pairs = count(&[n_rows, n_used]);
        if n_pairs > PAIRS_MAX {
            return Err(self.unsupported(format!("with {n_pairs} pairs of a row and an expert, at most {PAIRS_MAX}")));
        }
        let parts = Parts::of(scratch, shape, n_pairs);
        for (first_part, quant_type, n_parts) in inner_launches(shape) {
            let n_groups = groups(shape.n_ff, shape.n_embd);
            let args = WindowGateUpArgs {
                input,
                ids,
                table,
                out: parts.part(first_part, n_pairs * u64::from(shape.n_ff)),
                row_bytes: row_bytes(quant_type, shape.n_embd),
                n_out: shape.n_ff,
                n_in: shape.n_embd,
                n_rows,
                n_used,
                first_part,
                warp_groups: warp_groups(u64::from(n_groups) * n_parts * n_pairs),
            };
            let blocks = [n_groups.div_ceil(PRODUCT_WARPS * args.warp_groups).into(), n_pairs, n_parts];
            self.kernel(Kernel("window_gate_up", Some(quant_type)), blocks, PRODUCT_WARPS * WARP, &args)?;
        }
        let up = parts.part(1, n_pairs * u64::from(shape.n_ff));
        self.window_activate(parts.floats, up, parts.activated, n_pairs, shape.n_ff, shape.down_format)?;
        let args = WindowDownArgs {
            activated: parts.activated,
            ids,
            weights,
            table,
            residual,
            row_bytes: row_bytes(shape.down_type, shape.n_ff),
            n_embd: shape.n_embd,
            n_ff: shape.n_ff,
            n_rows,
            n_used,
            n_outputs: DOWN_OUTPUTS,
            unused: 0,
        };
        let blocks = [shape.n_embd.div_ceil(DOWN_OUTPUTS).into(), 1, 1];
        self.kernel(Kernel("window_down", Some(shape.down_type)), blocks, DOWN_WARPS * WARP, &args)
    }

    /// Queues `silu(gate) * up` as activation rows.
    pub fn window_activate(self, gate: Addr, up: Addr, out: Addr, n_rows: u64, n_cols: u32, format: ActivationFormat) -> Result<()> {
        let args = WindowActivateArgs { gate, up, out, n_cols, format: rows_number(format) };
        self.kernel(Kernel("window_activate", None), [n_rows, n_cols.div_ceil(WARP_COLUMNS).into(), 1], WARP, &args)
    }

    /// Queues the products of float rows with a matrix of floats.
    pub fn window_floats(self, quant_type: QuantType, args: &MatMulArgs) -> Result<()> {
        let kernel = match quant_type {
            QuantType::F32 => "window_floats_f32",
            QuantType::F16 => "window_floats_f16",
            _ => "window_floats_bf16",
        };
        self.kernel(Kernel(kernel, None), [args.n_out.into(), 1, 1], FLOATS_BLOCK, args)
    }

    /// Queues [`Op::NormQuantise`].
    pub fn norm_quantise(self) -> Result<()> {
        let Op::NormQuantise { x, weight, out, ref quantised, n_rows, n_cols, eps } = *self.op else {
            unreachable!("called for this operation only");
        };
        if quantised.len() > NORM_TARGETS {
            return self.parts();
        }
        let mut args = NormQuantiseArgs {
            x,
            weight,
            out,
            quantised: [Addr(0); NORM_TARGETS],
            formats: [0; NORM_TARGETS],
            n_targets: quantised.len() as u32,
            n_cols,
            eps,
            unused: 0,
        };
        for (at, &(to, format)) in quantised.iter().enumerate() {
            (args.quantised[at], args.formats[at]) = (to, rows_number(format));
        }
        self.kernel(Kernel("norm_quantise", None), [n_rows.into(), 1, 1], BLOCK, &args)
    }

    /// Queues [`Op::StoreHeads`].
    pub fn store_heads(self) -> Result<()> {
        let Op::StoreHeads {
            q,
            k,
            v,
            q_weight,
            k_weight,
            rope_positions,
            k_cache,
            v_cache,
            format,
            positions,
            first_row,
            n_rows,
            n_head,
            n_head_kv,
            head_dim,
            n_rot,
            freq_base,
            eps,
            n_ctx,
        } = *self.op
        else {
            unreachable!("called for this operation only");
        };
        let (format, head_units) = cache_units(format, head_dim);
        let args = StoreHeadsArgs {
            q,
            k,
            v,
            q_weight,
            k_weight,
            rope_positions,
            k_cache,
            v_cache,
            positions,
            first_row,
            n_head,
            n_head_kv,
            head_dim,
            head_units,
            n_rot,
            n_ctx,
            format,
            freq_base,
            eps,
            unused: 0,
        };
        let n_heads = u64::from(n_head) + 2 * u64::from(n_head_kv);
        self.kernel(Kernel("store_heads", None), [n_heads, n_rows.into(), 1], HEAD_BLOCK, &args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_products_are_spread_and_large_ones_go_on() {
        assert_eq!([groups(2048, 2048), groups(2049, 768), groups(9, 512), groups(9, 32)], [2048, 1025, 3, 3]);
        assert_eq!([1, 4096, 8192, 1 << 40].map(warp_groups), [1, 1, 2, 16]);
    }
}
