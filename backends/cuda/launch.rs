//! Work on streams: copies, fills, and operations, each as one kernel or a few.

use super::BACKEND;
use super::args::{
    AddGatedArgs, Args, DeltaConvArgs, DeltaGatesArgs, DeltaHistoryArgs, DeltaRuleArgs, GatedHeadNormArgs, HeadNormRopeArgs, JoinRowsArgs,
    KvStoreArgs, MatMulArgs, QuantiseArgs, RmsNormArgs, RouterArgs, SigmoidGateArgs, SortRoutesArgs, SplitGatesArgs, SwiGluArgs,
};
use super::attention::HEAD_DIM_MAX;
use super::context::Context;
use super::driver::call;
use super::graph::CudaStream;
use super::halves::HalvesProduct;
use super::kernels::{Grid, Kernel, Kernels};
use super::live::Access;
use super::operands;
use super::scratch::Scratch;
use super::windows::is_quantised;
use crate::backend::op::{DeltaShape, KvFormat, Path};
use crate::backend::{Addr, AddrRange, BackendError, Copy, Op, Result};
use crate::quant::ActivationFormat;

/// Threads of a block wherever a kernel's source names no other number; so many columns has a block that stores activations, too.
pub const BLOCK: u32 = 256;
/// Outputs of a block that multiplies a window.
pub const WINDOW_OUTPUTS: u32 = 8;
/// Outputs, and rows, of a block that multiplies a prompt.
pub const TILE: u32 = 64;
/// Threads of a block that has one head to itself.
pub const HEAD_BLOCK: u32 = 64;
/// Blocks that are enough to fill any card: kernels that go over numbers one by one take them in strides.
pub const BLOCKS_MAX: u64 = 1 << 16;
/// Blocks that a grid can have in each direction.
const GRID_MAX: [u64; 3] = [(1 << 31) - 1, 65_535, 65_535];
/// Experts of a layer that the router's kernel keeps in shared memory.
const ROUTER_EXPERTS: u32 = 2048;
/// What the usual convolution's kernel takes, and the heads (a warp each) and rows that its blocks have.
const CONV_TAPS: u32 = 4;
const CONV_HEAD_MAX: u32 = 128;
const CONV_HEADS: u32 = 4;
const CONV_ROWS: u32 = 16;
/// The largest head of a delta net: four threads keep a row of the state in registers.
const DELTA_HEAD_MAX: u32 = 256;
/// Rows of the state that a block has, and its threads.
const DELTA_ROWS: u32 = 16;
const DELTA_BLOCK: u32 = 64;
/// The same for heads of the size that a kernel is made for.
const WIDE_HEAD: u32 = 128;
const WIDE_ROWS: u32 = 32;
const WIDE_BLOCK: u32 = 256;

/// Queues a copy. The driver finds the way by the addresses.
pub fn copy(context: &Context, stream: &CudaStream, copy: Copy) -> Result<()> {
    context.enter()?;
    context.live().check("copy source", AddrRange { start: copy.src, bytes: copy.bytes }, Access::Read)?;
    context.live().check("copy destination", AddrRange { start: copy.dst, bytes: copy.bytes }, Access::Write)?;
    if copy.bytes.0 == 0 {
        return Ok(());
    }
    // SAFETY: both ranges are live, and memory is freed only after the work that is queued before; the stream lives.
    context.told(unsafe { call!(cuMemcpyAsync(copy.dst.0, copy.src.0, copy.bytes.as_usize(), stream.raw())) })
}

/// Queues a fill.
pub fn fill(context: &Context, stream: &CudaStream, range: AddrRange, byte: u8) -> Result<()> {
    context.enter()?;
    context.live().check("fill", range, Access::Write)?;
    if range.bytes.0 == 0 {
        return Ok(());
    }
    // SAFETY: as in `copy`.
    context.told(unsafe { call!(cuMemsetD8Async(range.start.0, byte, range.bytes.as_usize(), stream.raw())) })
}

/// Checks that a range may be discarded. A real device leaves the bytes as they are.
pub fn discard(context: &Context, range: AddrRange) -> Result<()> {
    context.check_alive()?;
    context.live().check("discard", range, Access::Write)
}

/// Queues an operation: checks its shapes and operands, then queues its kernels.
pub fn launch(context: &Context, kernels: &Kernels, scratch: &Scratch, stream: &CudaStream, op: &Op) -> Result<()> {
    op.check()?;
    context.enter()?;
    operands::check(op, &context.live())?;
    Launch { kernels, scratch, stream, op }.queue()
}

/// An operation on its way to a stream, its shapes and operands checked.
#[derive(Clone, Copy)]
pub struct Launch<'a> {
    kernels: &'a Kernels,
    pub scratch: &'a Scratch,
    pub stream: &'a CudaStream,
    pub op: &'a Op,
}

/// A product of sizes that the check of shapes has bounded.
pub fn count(sizes: &[u32]) -> u64 {
    sizes.iter().map(|&size| u64::from(size)).product()
}

/// The number that kernels have for a form of rows.
pub const fn rows_number(format: ActivationFormat) -> u32 {
    match format {
        ActivationFormat::F32 => 0,
        ActivationFormat::Q8_0 => 1,
        ActivationFormat::Q8_K => 2,
        ActivationFormat::F16 => panic!("rows in 16-bit floats have kernels of their own"),
    }
}

/// The number that kernels have for a cache's format, and the units of a head that threads store: numbers, or blocks of Q8_0.
pub const fn cache_units(format: KvFormat, head_dim: u32) -> (u32, u32) {
    match format {
        KvFormat::F32 => (0, head_dim),
        KvFormat::F16 => (1, head_dim),
        KvFormat::Q8_0 => (2, head_dim / 32),
    }
}

impl Launch<'_> {
    /// The operation is refused, and why.
    pub fn unsupported(self, what: String) -> BackendError {
        BackendError::Unsupported { backend: BACKEND, what: format!("the operation {} {what}", self.op.name()) }
    }

    /// Queues a kernel of this operation on a grid of `blocks` in x, y and z.
    pub fn kernel<A: Args>(self, kernel: Kernel, blocks: [u64; 3], threads: u32, args: &A) -> Result<()> {
        let mut grid = Grid { blocks: [0; 3], threads };
        for (direction, (part, (blocks, most))) in grid.blocks.iter_mut().zip(blocks.into_iter().zip(GRID_MAX)).enumerate() {
            let fits = u32::try_from(blocks).ok().filter(|_| blocks <= most);
            *part = fits.ok_or_else(|| self.unsupported(format!("on {blocks} blocks in direction {direction}, at most {most}")))?;
        }
        // SAFETY: `operands::check` found every range that the operation's kernels go over to be live, with its access, and memory is
        // freed only after the work that is queued before. What lies in memory can lead a kernel elsewhere; the contract leaves that to
        // the caller.
        unsafe { self.kernels.queue(self.stream, kernel, grid, args) }
    }

    /// Queues the kernel of the operation's own name on a grid in one direction.
    fn own<A: Args>(self, blocks: u64, threads: u32, args: &A) -> Result<()> {
        self.kernel(Kernel(self.op.name(), None), [blocks, 1, 1], threads, args)
    }

    /// Queues the operation's own kernel, which goes over `n` numbers one by one.
    fn numbers<A: Args>(self, n: u64, args: &A) -> Result<()> {
        self.own(n.div_ceil(BLOCK.into()).min(BLOCKS_MAX), BLOCK, args)
    }

    fn queue(self) -> Result<()> {
        match *self.op {
            Op::RmsNorm { x, weight, out, n_rows, n_cols, eps } => {
                self.own(n_rows.into(), BLOCK, &RmsNormArgs { x, weight, out, n_cols, eps })
            }
            Op::Quantise { x, out, n_rows, n_cols, format: ActivationFormat::F16 } => self.quantise_halves(x, out, n_rows, n_cols),
            Op::Quantise { x, out, n_rows, n_cols, format } => {
                let args = QuantiseArgs { x, out, n_cols, format: rows_number(format) };
                self.kernel(Kernel("quantise", None), [n_rows.into(), n_cols.div_ceil(BLOCK).into(), 1], BLOCK, &args)
            }
            Op::NormQuantise { .. } => self.norm_quantise(),
            Op::MatMul { .. } => self.mat_mul(),
            Op::WindowProducts { ref products, input, format, n_rows } if is_quantised(format) => {
                self.window_products(products, input, n_rows, false)
            }
            Op::WindowProducts { .. } => self.parts(),
            Op::HeadNormRope { x, weight, positions, n_rows, n_head, head_dim, n_rot, freq_base, eps } => {
                if head_dim > HEAD_DIM_MAX {
                    return Err(self.unsupported(format!("with heads of {head_dim}, at most {HEAD_DIM_MAX}")));
                }
                let args = HeadNormRopeArgs { x, weight, positions, n_head, head_dim, n_rot, freq_base, eps, unused: 0 };
                self.own(n_rows.into(), BLOCK, &args)
            }
            Op::GatedHeadNorm { x, weight, gates, n_rows, n_head, head_dim, eps } => {
                self.own(count(&[n_rows, n_head]), HEAD_BLOCK, &GatedHeadNormArgs { x, weight, gates, head_dim, eps })
            }
            Op::KvStore { .. } => self.kv_store(),
            Op::StoreHeads { .. } => self.store_heads(),
            Op::Attention { .. } => self.attention(),
            Op::Router { n_expert, .. } if n_expert > ROUTER_EXPERTS => {
                Err(self.unsupported(format!("of {n_expert} experts, at most {ROUTER_EXPERTS}")))
            }
            Op::Router { logits, ids, weights, n_rows, n_expert, n_used, scale } => {
                self.own(n_rows.into(), BLOCK, &RouterArgs { logits, ids, weights, n_expert, n_used, scale, unused: 0 })
            }
            Op::SortRoutes { ids, weights, counts, rows, row_weights, entries, n_rows, n_expert, n_used } => {
                let args = SortRoutesArgs { ids, weights, counts, rows, row_weights, entries, n_rows, n_expert, n_used, unused: 0 };
                self.kernel(Kernel("count_routes", None), [n_expert.into(), 1, 1], BLOCK, &args)?;
                self.kernel(Kernel("place_routes", None), [n_expert.into(), 1, 1], BLOCK, &args)
            }
            Op::ExpertsWindow { .. } => self.experts_window(),
            Op::ExpertsPrompt { .. } => self.experts_prompt(),
            Op::SplitGates { joined, values, gates, n_rows, n_head, head_dim } => {
                let n = count(&[n_rows, n_head, head_dim]);
                self.numbers(n, &SplitGatesArgs { joined, values, gates, n, head_dim, unused: 0 })
            }
            Op::JoinRows { left, right, out, n_rows, n_cols } => {
                let n = count(&[n_rows, n_cols]);
                self.numbers(n, &JoinRowsArgs { left, right, out, n, n_cols, unused: 0 })
            }
            Op::SigmoidGate { x, gates, n_rows, n_cols } => {
                let n = count(&[n_rows, n_cols]);
                self.numbers(n, &SigmoidGateArgs { x, gates, n })
            }
            Op::SwiGlu { gate, up, n_rows, n_cols } => {
                let n = count(&[n_rows, n_cols]);
                self.numbers(n, &SwiGluArgs { gate, up, n })
            }
            Op::SwiGluQuantise { gate, up, out, n_rows, n_cols, format } => {
                self.window_activate(gate, up, out, n_rows.into(), n_cols, format)
            }
            Op::AddGated { sum, x, gate, n_rows, n_cols } => {
                let n = count(&[n_rows, n_cols]);
                self.numbers(n, &AddGatedArgs { sum, x, gate, n, n_cols, unused: 0 })
            }
            Op::DeltaConv { x, history, taps, out, n_rows, shape, eps } => {
                let n_heads = shape.n_channels() / shape.head_dim;
                let args = DeltaConvArgs { x, history, taps, out, shape: shape.into(), eps, n_rows };
                let row_groups = n_rows.div_ceil(CONV_ROWS).into();
                if shape.n_taps == CONV_TAPS && shape.head_dim <= CONV_HEAD_MAX && row_groups <= GRID_MAX[1] {
                    let blocks = [n_heads.div_ceil(CONV_HEADS).into(), row_groups, 1];
                    return self.kernel(Kernel("delta_conv_4", None), blocks, CONV_HEADS * 32, &args);
                }
                self.own(count(&[n_rows, n_heads]), HEAD_BLOCK, &args)
            }
            Op::DeltaHistory { x, history, n_rows, shape } => {
                let (n_channels, n_before) = (shape.n_channels(), shape.n_taps - 1);
                self.numbers(n_channels.into(), &DeltaHistoryArgs { x, history, n_rows, n_channels, n_before, unused: 0 })
            }
            Op::DeltaGates { beta, decay, dt_bias, a, n_rows, n_head } => {
                let n = count(&[n_rows, n_head]);
                self.numbers(n, &DeltaGatesArgs { beta, decay, dt_bias, a, n, n_head, unused: 0 })
            }
            Op::DeltaPrompt { qkv, beta, decay, state, out, n_rows, shape, .. } => {
                self.delta_rule(shape, DeltaRuleArgs { qkv, beta, decay, state, out, shape: shape.into(), n_rows, writes_state: 1 })
            }
            Op::DeltaWindow { qkv, beta, decay, state, out, n_rows, shape } => {
                self.delta_rule(shape, DeltaRuleArgs { qkv, beta, decay, state, out, shape: shape.into(), n_rows, writes_state: 0 })
            }
            Op::DeltaCommit { qkv, beta, decay, state, n_rows, shape } => {
                let args = DeltaRuleArgs { qkv, beta, decay, state, out: Addr(0), shape: shape.into(), n_rows, writes_state: 1 };
                self.delta_rule(shape, args)
            }
        }
    }

    fn mat_mul(self) -> Result<()> {
        let Op::MatMul { weights, input, format, out, n_rows, path, accumulate, unpacked } = *self.op else {
            unreachable!("called for this operation only");
        };
        if format == ActivationFormat::F16 {
            return self.mat_mul_halves(HalvesProduct { weights, input, out, n_rows, accumulate, unpacked });
        }
        let args = MatMulArgs {
            weights: weights.addr,
            input,
            out,
            row_bytes: weights.row_bytes() as u64,
            n_out: weights.rows,
            n_in: weights.cols,
            n_rows,
            format: rows_number(format),
            accumulate: accumulate.into(),
            unused: 0,
        };
        let quant_type = Some(weights.quant_type);
        match path {
            Path::Window if is_quantised(format) => self.window_products(&[(weights, out)], input, n_rows, accumulate),
            Path::Window if weights.quant_type.is_float() => self.window_floats(weights.quant_type, &args),
            Path::Window => {
                self.kernel(Kernel("mat_mul_window", quant_type), [weights.rows.div_ceil(WINDOW_OUTPUTS).into(), 1, 1], BLOCK, &args)
            }
            Path::Prompt => {
                let blocks = [weights.rows.div_ceil(TILE).into(), n_rows.div_ceil(TILE).into(), 1];
                self.kernel(Kernel("mat_mul_prompt", quant_type), blocks, BLOCK, &args)
            }
        }
    }

    /// Queues the parts of the operation instead, one after another.
    pub fn parts(self) -> Result<()> {
        let parts = self.op.parts().unwrap_or_default();
        parts.iter().try_for_each(|op| Launch { op, ..self }.queue())
    }

    fn kv_store(self) -> Result<()> {
        let Op::KvStore { rows, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx } = *self.op else {
            unreachable!("called for this operation only");
        };
        let (format, head_units) = cache_units(format, head_dim);
        let Some(row_units) = n_head_kv.checked_mul(head_units) else {
            return Err(self.unsupported(format!("with rows of {n_head_kv} heads of {head_dim}")));
        };
        let n = count(&[n_rows, row_units]);
        self.numbers(n, &KvStoreArgs { rows, cache, positions, first_row, n, row_units, n_ctx, format, unused: 0 })
    }

    /// Some rows of a value head's state for each block.
    fn delta_rule(self, shape: DeltaShape, args: DeltaRuleArgs) -> Result<()> {
        if shape.head_dim > DELTA_HEAD_MAX {
            return Err(self.unsupported(format!("with heads of {}, at most {DELTA_HEAD_MAX}", shape.head_dim)));
        }
        let (name, rows, threads) =
            if shape.head_dim == WIDE_HEAD { ("delta_rule_128", WIDE_ROWS, WIDE_BLOCK) } else { ("delta_rule", DELTA_ROWS, DELTA_BLOCK) };
        self.kernel(Kernel(name, None), [shape.n_head_v.into(), (shape.head_dim / rows).into(), 1], threads, &args)
    }
}
