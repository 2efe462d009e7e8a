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

/// Weights of a row that a warp takes at a time.
const STEP_WEIGHTS: u32 = 2048;
const WARP: u32 = 32;
/// Warps of a block that multiplies, and the bytes of shared memory that each has for a step.
const PRODUCT_WARPS: u32 = 4;
const PRODUCT_STAGE: u64 = 4544;
/// Warps of a block that multiplies with down matrices, their bytes, and its outputs: few, so that one row's experts are spread over the
/// whole card.
const DOWN_WARPS: u32 = 8;
const DOWN_STAGE: u64 = 3584;
const DOWN_OUTPUTS: u32 = 8;
/// Bytes of a stage that lie beside those of the rows: the rest of a line, and a word.
const STAGE_BESIDE: u64 = 67;
/// Pairs of a row and one of its experts that the kernel keeps a list of.
const PAIRS_MAX: u64 = 128;
/// Numbers that a warp stores as activations.
const WARP_COLUMNS: u32 = 256;
/// Threads of a block that multiplies float rows with one output's weights.
const FLOATS_BLOCK: u32 = 128;
/// Warps that fill the largest card half, and once. With more work than that, a warp takes more rows at a time, then some more such sets; not
/// many, so that the last blocks of a large product end together.
const SETS_AT_LEAST: u64 = 2048;
const WARPS: u64 = 4096;
const WARP_SETS_MAX: u64 = 3;

/// Weight rows of `n_in` columns and `row_bytes` bytes that a warp takes at a time where there are `n_out`.
fn set_rows(n_out: u64, n_in: u32, row_bytes: u64, stage: u64) -> u32 {
    let group: u32 = match n_in {
        ..=512 => 4,
        513..=1024 => 2,
        _ => 1,
    };
    let whole = if n_in > STEP_WEIGHTS { 1 } else { (stage - STAGE_BESIDE) / row_bytes / u64::from(group) };
    let spread = n_out / u64::from(group) / SETS_AT_LEAST;
    group * u32::try_from(whole.min(spread).max(1)).unwrap_or(1)
}

/// Sets that a warp takes one after another where there are `n_sets`.
fn warp_sets(n_sets: u64) -> u32 {
    u32::try_from((n_sets / WARPS).clamp(1, WARP_SETS_MAX)).expect("clamped")
}

/// The kernel for windows of one row, or of several.
fn for_rows(n_rows: u32, one: &'static str, several: &'static str) -> &'static str {
    if n_rows == 1 { one } else { several }
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
        let row_bytes = first.row_bytes() as u64;
        let n_out = matrices.iter().map(|(matrix, _)| u64::from(matrix.rows)).sum();
        let set_rows = set_rows(n_out, first.cols, row_bytes, PRODUCT_STAGE);
        let warp_sets = warp_sets(n_out / u64::from(set_rows));
        let none = WindowMatrix { weights: Addr(0), out: Addr(0), n_out: 0, first_block: 0 };
        let mut args = WindowProductsArgs {
            input,
            row_bytes,
            n_in: first.cols,
            n_rows,
            n_matrices: u32::try_from(matrices.len()).expect("bounded by the arguments"),
            set_rows,
            warp_sets,
            accumulate: accumulate.into(),
            matrices: [none; WINDOW_MATRICES],
        };
        let mut n_blocks = 0;
        for (place, &(matrix, out)) in args.matrices.iter_mut().zip(matrices) {
            *place = WindowMatrix { weights: matrix.addr, out, n_out: matrix.rows, first_block: n_blocks };
            n_blocks += matrix.rows.div_ceil(set_rows).div_ceil(PRODUCT_WARPS * warp_sets);
        }
        let name = for_rows(n_rows, "window_products_one", "window_products");
        self.kernel(Kernel(name, Some(first.quant_type)), [n_blocks.into(), 1, 1], PRODUCT_WARPS * WARP, &args)
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
            let row_bytes = row_bytes(quant_type, shape.n_embd);
            let set_rows = set_rows(u64::from(shape.n_ff) * n_parts * n_pairs, shape.n_embd, row_bytes, PRODUCT_STAGE);
            let args = WindowGateUpArgs {
                input,
                ids,
                table,
                out: parts.part(first_part, n_pairs * u64::from(shape.n_ff)),
                row_bytes,
                n_out: shape.n_ff,
                n_in: shape.n_embd,
                n_rows,
                n_used,
                first_part,
                set_rows,
                warp_sets: 1,
                unused: 0,
            };
            let blocks = [shape.n_ff.div_ceil(set_rows * PRODUCT_WARPS).into(), n_pairs, n_parts];
            let name = for_rows(n_rows, "window_gate_up_one", "window_gate_up");
            self.kernel(Kernel(name, Some(quant_type)), blocks, PRODUCT_WARPS * WARP, &args)?;
        }
        let up = parts.part(1, n_pairs * u64::from(shape.n_ff));
        self.window_activate(parts.floats, up, parts.activated, n_pairs, shape.n_ff, shape.down_format)?;
        let row_bytes = row_bytes(shape.down_type, shape.n_ff);
        let args = WindowDownArgs {
            activated: parts.activated,
            ids,
            weights,
            table,
            residual,
            row_bytes,
            n_embd: shape.n_embd,
            n_ff: shape.n_ff,
            n_rows,
            n_used,
            n_outputs: DOWN_OUTPUTS,
            set_rows: set_rows(u64::MAX, shape.n_ff, row_bytes, DOWN_STAGE).min(DOWN_OUTPUTS),
        };
        let blocks = [shape.n_embd.div_ceil(DOWN_OUTPUTS).into(), 1, 1];
        let name = for_rows(n_rows, "window_down_one", "window_down");
        self.kernel(Kernel(name, Some(shape.down_type)), blocks, DOWN_WARPS * WARP, &args)
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
            n_targets: u32::try_from(quantised.len()).expect("checked to be few"),
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
        // Q8_0: 2,048 columns are 2,176 bytes, 512 are 544.
        assert_eq!([2048, 4096, 151_936].map(|n_out| set_rows(n_out, 2048, 2176, PRODUCT_STAGE)), [1, 2, 2]);
        assert_eq!([1, 1 << 20].map(|n_out| set_rows(n_out, 512, 544, PRODUCT_STAGE)), [4, 8]);
        assert_eq!([1, 1 << 20].map(|n_out| set_rows(n_out, 4096, 4352, PRODUCT_STAGE)), [1, 1]);
        assert_eq!([1, 4096, 8192, 1 << 40].map(warp_sets), [1, 1, 2, 3]);
    }
}
