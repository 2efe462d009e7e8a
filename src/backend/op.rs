//! The table of operations that every backend offers under the same names.
//!
//! Operands are addresses; shapes stand beside them. All matrices are row-major with the last dimension contiguous. `n_rows` counts
//! tokens. What changes from one replay of a captured window to the next (positions, expert ids, the expert table) is read from
//! device memory, never from the operation itself.

use crate::backend::{Addr, AddrRange};
use crate::quant::{ActivationFormat, QuantType, halves_line_bytes};
use crate::units::Bytes;

/// A weight matrix on the device: `rows` rows of `cols` weights, in blocks of `quant_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// First block.
    pub addr: Addr,
    /// Element type.
    pub quant_type: QuantType,
    /// Output width.
    pub rows: u32,
    /// Input width.
    pub cols: u32,
}

impl Matrix {
    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.cols as usize / self.quant_type.block_len() * self.quant_type.block_bytes()
    }
}

/// The arithmetic of a product. The two may round differently from each other, but the result of one row never depends on how many
/// rows are in the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Many rows: weights are unpacked once for a tile of rows.
    Prompt,
    /// One to eight rows: weights are read once and multiplied as they are.
    Window,
}

/// Element type of a key/value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    /// 32-bit floats.
    F32,
    /// 16-bit floats.
    F16,
    /// Blocks of 32 with one 16-bit scale, as GGUF's Q8_0.
    Q8_0,
}

impl KvFormat {
    /// Bytes of one head's row of `head_dim` numbers; `head_dim` must be a multiple of 32 for Q8_0.
    #[must_use]
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F32 => head_dim * 4,
            Self::F16 => head_dim * 2,
            Self::Q8_0 => head_dim / 32 * 34,
        }
    }
}

/// Sizes and types of a layer's routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Width of the model.
    pub n_embd: u32,
    /// Inner width of an expert.
    pub n_ff: u32,
    /// Type of the gate and up matrices `[n_ff, n_embd]`.
    pub gate_type: QuantType,
    /// Type of the up matrix.
    pub up_type: QuantType,
    /// Type of the down matrix `[n_embd, n_ff]`.
    pub down_type: QuantType,
    /// Form of the rows that gate and up multiply.
    pub input_format: ActivationFormat,
    /// Form of the activated rows that down multiplies.
    pub down_format: ActivationFormat,
}

/// Where the three matrices of one expert lie; the expert table holds one such record, as three 64-bit addresses, for each expert
/// of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertAddrs {
    /// Gate matrix.
    pub gate: Addr,
    /// Up matrix.
    pub up: Addr,
    /// Down matrix.
    pub down: Addr,
}

impl ExpertAddrs {
    /// Bytes of a record in the expert table.
    pub const BYTES: usize = 24;

    /// The record as the table stores it, little-endian: gate, up, down.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        for (part, addr) in out.chunks_exact_mut(8).zip([self.gate, self.up, self.down]) {
            part.copy_from_slice(&addr.0.to_le_bytes());
        }
        out
    }
}

/// One expert's share of a prompt block; those of an operation follow one another in the row lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptExpert {
    /// Its weights.
    pub weights: ExpertAddrs,
    /// First entry in the row list.
    pub first: u32,
    /// Number of rows routed to it.
    pub count: u32,
}

/// Sizes of a gated delta net. A row of its projection holds `n_head_k` query heads, as many key heads and `n_head_v` value heads,
/// `head_dim` numbers each; value head `h` belongs to key head `h mod n_head_k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Query heads, and key heads.
    pub n_head_k: u32,
    /// Value heads.
    pub n_head_v: u32,
    /// Numbers of a head.
    pub head_dim: u32,
    /// Taps of the convolution.
    pub n_taps: u32,
}

/// Rows of one step of the chunked delta net. Steps begin at multiples of it, counted from position 0, so that no bit depends on how a
/// prompt is cut.
pub const DELTA_STEP: u32 = 64;

impl DeltaShape {
    /// Numbers of a row of queries, keys and values.
    #[must_use]
    pub const fn n_channels(&self) -> u32 {
        (2 * self.n_head_k + self.n_head_v) * self.head_dim
    }

    /// Numbers of a row of values.
    #[must_use]
    pub const fn value_width(&self) -> u32 {
        self.n_head_v * self.head_dim
    }

    /// Bytes of the recurrent state, f32 `[n_head_v, head_dim (value), head_dim (key)]`.
    #[must_use]
    pub const fn state_bytes(&self) -> u64 {
        4 * self.value_width() as u64 * self.head_dim as u64
    }

    /// Bytes of the convolution's history, f32 `[n_taps - 1, n_channels]`, oldest row first.
    #[must_use]
    pub const fn history_bytes(&self) -> u64 {
        4 * (self.n_taps as u64 - 1) * self.n_channels() as u64
    }

    /// Bytes of the rows of a step that is not complete: f32 keys `[DELTA_STEP, n_head_k, head_dim]`, corrections
    /// `[DELTA_STEP, n_head_v, head_dim]` and summed decays `[DELTA_STEP, n_head_v]`.
    #[must_use]
    pub const fn open_bytes(&self) -> u64 {
        4 * DELTA_STEP as u64 * (self.n_head_k * self.head_dim + self.value_width() + self.n_head_v) as u64
    }
}

/// An operation with its operands.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "operands are described at their operation; shapes in brackets")]
pub enum Op {
    /// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight`; `x`, `out` f32 `[n_rows, n_cols]`, `weight` f32 `[n_cols]`.
    RmsNorm { x: Addr, weight: Addr, out: Addr, n_rows: u32, n_cols: u32, eps: f32 },
    /// Rows of f32 to activation rows of `format`; see [`ActivationFormat::row_bytes`].
    Quantise { x: Addr, out: Addr, n_rows: u32, n_cols: u32, format: ActivationFormat },
    /// [`Op::RmsNorm`], then [`Op::Quantise`] of `out` to each of `quantised`, in one step.
    NormQuantise { x: Addr, weight: Addr, out: Addr, quantised: Vec<(Addr, ActivationFormat)>, n_rows: u32, n_cols: u32, eps: f32 },
    /// `out[r][o] = sum_i weights[o][i] * input[r][i]`, or added to `out` where `accumulate`; `input` rows of `format`, `out` f32
    /// `[n_rows, weights.rows]`. Beside rows of [`ActivationFormat::F16`], weights are unpacked into `unpacked`, as many rows at a time as
    /// it holds and at least [`UNPACKED_ROWS_MIN`] or all of them; beside others it is empty.
    MatMul {
        weights: Matrix,
        input: Addr,
        format: ActivationFormat,
        out: Addr,
        n_rows: u32,
        path: Path,
        accumulate: bool,
        unpacked: AddrRange,
    },
    /// [`Op::MatMul`] of one window with several matrices, each with an output of its own, in one step.
    WindowProducts { products: Vec<(Matrix, Addr)>, input: Addr, format: ActivationFormat, n_rows: u32 },
    /// Root-mean-square norm of each head with `weight` f32 `[head_dim]`, then rotation of the first `n_rot` numbers, pairing
    /// number `i` with `i + n_rot/2`; in place on `x` f32 `[n_rows, n_head, head_dim]`; `positions` i32 `[n_rows]`, ascending.
    HeadNormRope { x: Addr, weight: Addr, positions: Addr, n_rows: u32, n_head: u32, head_dim: u32, n_rot: u32, freq_base: f32, eps: f32 },
    /// Stores `rows` f32 `[n_rows, n_head_kv, head_dim]` in `cache` `[n_ctx, n_head_kv, head_dim]` at `positions` i32 `[n_rows]`,
    /// ascending; position 0 lies in row `first_row` i32 `[1]`, and all rows are below `n_ctx`.
    KvStore {
        rows: Addr,
        cache: Addr,
        format: KvFormat,
        positions: Addr,
        first_row: Addr,
        n_rows: u32,
        n_head_kv: u32,
        head_dim: u32,
        n_ctx: u32,
    },
    /// [`Op::HeadNormRope`] of `q` and `k`, then [`Op::KvStore`] of `k` and `v`, in one step; operands are named as theirs.
    StoreHeads {
        q: Addr,
        k: Addr,
        v: Addr,
        q_weight: Addr,
        k_weight: Addr,
        rope_positions: Addr,
        k_cache: Addr,
        v_cache: Addr,
        format: KvFormat,
        positions: Addr,
        first_row: Addr,
        n_rows: u32,
        n_head: u32,
        n_head_kv: u32,
        head_dim: u32,
        n_rot: u32,
        freq_base: f32,
        eps: f32,
        n_ctx: u32,
    },
    /// Causal attention of `q` f32 `[n_rows, n_head, head_dim]` over both caches from row `first_row` i32 `[1]` up to and including
    /// each row's position; `out` as `q`. Query head `h` reads key head `h / (n_head / n_head_kv)`.
    Attention {
        q: Addr,
        k_cache: Addr,
        v_cache: Addr,
        format: KvFormat,
        positions: Addr,
        first_row: Addr,
        out: Addr,
        n_rows: u32,
        n_head: u32,
        n_head_kv: u32,
        head_dim: u32,
        n_ctx: u32,
        scale: f32,
        path: Path,
    },
    /// Softmax over `logits` f32 `[n_rows, n_expert]`, the `n_used` largest (ties to the lower number), renormalised and times
    /// `scale`; `ids` i32 and `weights` f32 `[n_rows, n_used]`, ascending by expert.
    Router { logits: Addr, ids: Addr, weights: Addr, n_rows: u32, n_expert: u32, n_used: u32, scale: f32 },
    /// Sorts routes by expert, rows ascending within one: `ids` i32 and `weights` f32 `[n_rows, n_used]` as [`Op::Router`] wrote them;
    /// `counts` u32 `[n_expert]` of rows, `rows` u32 and `row_weights` f32 `[n_rows * n_used]`, and of each row where in those it stands,
    /// `entries` u32 `[n_rows, n_used]`, ascending.
    SortRoutes {
        ids: Addr,
        weights: Addr,
        counts: Addr,
        rows: Addr,
        row_weights: Addr,
        entries: Addr,
        n_rows: u32,
        n_expert: u32,
        n_used: u32,
    },
    /// Runs each row's experts and adds them to `residual` f32 `[n_rows, n_embd]` in ascending order. `input` rows of
    /// `shape.input_format`; `ids`, `weights` as [`Op::Router`] wrote them; `table` holds [`ExpertAddrs`] of all experts of the
    /// layer; `scratch` holds [`expert_scratch_bytes`] for all `n_rows * n_used` pairs.
    ExpertsWindow {
        input: Addr,
        ids: Addr,
        weights: Addr,
        table: Addr,
        residual: Addr,
        n_rows: u32,
        n_expert: u32,
        n_used: u32,
        shape: ExpertShape,
        scratch: Addr,
    },
    /// Runs a group of experts over the rows routed to them and adds to `residual` f32 `[.., n_embd]`, expert after expert.
    /// `rows` u32 and `row_weights` f32 are the row lists that [`PromptExpert`] points into, `entries` u32 `[n_input_rows, n_used]` says of
    /// each input row where in the lists it stands, ascending, and `u32::MAX` where it stands in fewer places; `scratch` holds [`expert_scratch_bytes`] for `tile_rows` pairs. Beside rows
    /// of [`ActivationFormat::F16`], `unpacked` holds the unpacked weights of some experts, [`unpacked_expert_bytes`] each; beside others
    /// it is empty.
    ExpertsPrompt {
        experts: Vec<PromptExpert>,
        input: Addr,
        n_input_rows: u32,
        rows: Addr,
        row_weights: Addr,
        entries: Addr,
        n_used: u32,
        residual: Addr,
        shape: ExpertShape,
        scratch: Addr,
        tile_rows: u32,
        unpacked: AddrRange,
    },
    /// Splits `joined` f32 `[n_rows, n_head, 2, head_dim]` into `values` and `gates`, each f32 `[n_rows, n_head, head_dim]`.
    SplitGates { joined: Addr, values: Addr, gates: Addr, n_rows: u32, n_head: u32, head_dim: u32 },
    /// Puts rows side by side: `out` f32 `[n_rows, 2, n_cols]` gets a row of `left`, then one of `right`, each f32 `[n_rows, n_cols]`.
    JoinRows { left: Addr, right: Addr, out: Addr, n_rows: u32, n_cols: u32 },
    /// `x *= sigmoid(gates)`, number by number; both f32 `[n_rows, n_cols]`.
    SigmoidGate { x: Addr, gates: Addr, n_rows: u32, n_cols: u32 },
    /// `gate = silu(gate) * up`, number by number; both f32 `[n_rows, n_cols]`.
    SwiGlu { gate: Addr, up: Addr, n_rows: u32, n_cols: u32 },
    /// [`Op::SwiGlu`], then [`Op::Quantise`] of the result to `out`, in one step; what is left in `gate` is the backend's own.
    SwiGluQuantise { gate: Addr, up: Addr, out: Addr, n_rows: u32, n_cols: u32, format: ActivationFormat },
    /// `sum[r] += sigmoid(gate[r]) * x[r]`; `sum`, `x` f32 `[n_rows, n_cols]`, `gate` f32 `[n_rows]`.
    AddGated { sum: Addr, x: Addr, gate: Addr, n_rows: u32, n_cols: u32 },
    /// Root-mean-square norm of each head with `weight` f32 `[head_dim]`, times `silu(gates)`; in place on `x`, and `gates`, f32
    /// `[n_rows, n_head, head_dim]`.
    GatedHeadNorm { x: Addr, weight: Addr, gates: Addr, n_rows: u32, n_head: u32, head_dim: u32, eps: f32 },
    /// Causal convolution, channel by channel, then SiLU: `out[t][c] = silu(sum_j taps[c][j] * x[t - (n_taps - 1) + j][c])`, where rows
    /// before the first are those of `history` (see [`DeltaShape::history_bytes`]). Then each query and key head is divided by
    /// `sqrt(sum of squares + eps)`, queries by `sqrt(head_dim)`, too. `x`, `out` f32 `[n_rows, n_channels]`, `taps` f32
    /// `[n_channels, n_taps]`.
    DeltaConv { x: Addr, history: Addr, taps: Addr, out: Addr, n_rows: u32, shape: DeltaShape, eps: f32 },
    /// `history` becomes the last `n_taps - 1` rows of itself followed by `x` f32 `[n_rows, n_channels]`.
    DeltaHistory { x: Addr, history: Addr, n_rows: u32, shape: DeltaShape },
    /// `beta = sigmoid(beta)` and `decay = a * softplus(decay + dt_bias)`; in place on f32 `[n_rows, n_head]`; `a`, `dt_bias` f32
    /// `[n_head]`.
    DeltaGates { beta: Addr, decay: Addr, dt_bias: Addr, a: Addr, n_rows: u32, n_head: u32 },
    /// The delta rule over many rows, in steps of [`DELTA_STEP`] rows. For each value head with state `S` (value x key), row by row:
    /// `S *= e^decay; r = beta (v - S k); S += r k^T; out = S q`, computed from the state at the step's beginning and the step's rows.
    ///
    /// `qkv` f32 `[n_rows, n_channels]` as [`Op::DeltaConv`] writes it, `beta`, `decay` f32 `[n_rows, n_head_v]`, `out` f32
    /// `[n_rows, n_head_v, head_dim]`. `state` is that at the beginning of the step that row 0 (at `position`) belongs to, and
    /// `open` (see [`DeltaShape::open_bytes`]) holds that step's rows so far: those from `block_position`, the first of the block, or the
    /// last multiple of [`DELTA_STEP`], whichever is later. A step that is complete is folded into the state, one that is not when
    /// `ends_block`. The result does not depend on how a block is cut into calls. A backend that goes row by row may keep `state` behind the
    /// last row instead and leave `open` alone: between the calls of a block the two are the backend's own.
    DeltaPrompt {
        qkv: Addr,
        beta: Addr,
        decay: Addr,
        state: Addr,
        open: Addr,
        out: Addr,
        n_rows: u32,
        position: u32,
        block_position: u32,
        ends_block: bool,
        shape: DeltaShape,
    },
    /// The delta rule row by row, on a copy of `state`, which stays as it is. Operands as those of [`Op::DeltaPrompt`].
    DeltaWindow { qkv: Addr, beta: Addr, decay: Addr, state: Addr, out: Addr, n_rows: u32, shape: DeltaShape },
    /// Takes `state` over `n_rows` rows, with the bits that [`Op::DeltaWindow`] computed on its copy.
    DeltaCommit { qkv: Addr, beta: Addr, decay: Addr, state: Addr, n_rows: u32, shape: DeltaShape },
}

impl Op {
    /// The operation's name, as backends list it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RmsNorm { .. } => "rms_norm",
            Self::Quantise { .. } => "quantise",
            Self::NormQuantise { .. } => "norm_quantise",
            Self::MatMul { .. } => "mat_mul",
            Self::WindowProducts { .. } => "window_products",
            Self::HeadNormRope { .. } => "head_norm_rope",
            Self::KvStore { .. } => "kv_store",
            Self::StoreHeads { .. } => "store_heads",
            Self::Attention { .. } => "attention",
            Self::Router { .. } => "router",
            Self::SortRoutes { .. } => "sort_routes",
            Self::ExpertsWindow { .. } => "experts_window",
            Self::ExpertsPrompt { .. } => "experts_prompt",
            Self::SplitGates { .. } => "split_gates",
            Self::JoinRows { .. } => "join_rows",
            Self::SigmoidGate { .. } => "sigmoid_gate",
            Self::SwiGlu { .. } => "swiglu",
            Self::SwiGluQuantise { .. } => "swiglu_quantise",
            Self::AddGated { .. } => "add_gated",
            Self::GatedHeadNorm { .. } => "gated_head_norm",
            Self::DeltaConv { .. } => "delta_conv",
            Self::DeltaHistory { .. } => "delta_history",
            Self::DeltaGates { .. } => "delta_gates",
            Self::DeltaPrompt { .. } => "delta_prompt",
            Self::DeltaWindow { .. } => "delta_window",
            Self::DeltaCommit { .. } => "delta_commit",
        }
    }
}

/// Bytes of scratch that experts need for `n_pairs` pairs of a row and an expert at once: gate and up f32, later overlaid by the
/// result, and the activated row. [`Op::ExpertsPrompt`] has `tile_rows` pairs at once, [`Op::ExpertsWindow`] all of its own.
#[must_use]
pub fn expert_scratch_bytes(shape: &ExpertShape, n_pairs: u64) -> u64 {
    let floats = (2 * u64::from(shape.n_ff)).max(u64::from(shape.n_embd));
    n_pairs.saturating_mul(4 * floats + shape.down_format.row_bytes(shape.n_ff as usize) as u64)
}

/// Rows of weights that are unpacked at a time at least, where the matrix has so many.
pub const UNPACKED_ROWS_MIN: u32 = 64;

/// Bytes of `rows` unpacked rows of `cols` weights.
#[must_use]
pub const fn unpacked_bytes(rows: u32, cols: u32) -> Bytes {
    Bytes(rows as u64 * halves_line_bytes(cols as usize) as u64)
}

/// Bytes that the unpacked weights of one expert take: gate and up, which make room for down.
#[must_use]
pub fn unpacked_expert_bytes(shape: &ExpertShape) -> Bytes {
    (unpacked_bytes(shape.n_ff, shape.n_embd) * 2).max(unpacked_bytes(shape.n_embd, shape.n_ff))
}
