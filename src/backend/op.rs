//! The table of operations that every backend offers under the same names.
//!
//! Operands are addresses; shapes stand beside them. All matrices are row-major with the last dimension contiguous. `n_rows` counts
//! tokens. What changes from one replay of a captured window to the next (positions, expert ids, the expert table) is read from
//! device memory, never from the operation itself.

use crate::backend::Addr;
use crate::quant::{ActivationFormat, QuantType};

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

/// One expert's share of a prompt block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptExpert {
    /// Its weights.
    pub weights: ExpertAddrs,
    /// First entry in the row list.
    pub first: u32,
    /// Number of rows routed to it.
    pub count: u32,
}

/// An operation with its operands.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "operands are described at their operation; shapes in brackets")]
pub enum Op {
    /// `out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight`; `x`, `out` f32 `[n_rows, n_cols]`, `weight` f32 `[n_cols]`.
    RmsNorm { x: Addr, weight: Addr, out: Addr, n_rows: u32, n_cols: u32, eps: f32 },
    /// Rows of f32 to activation rows of `format`; see [`ActivationFormat::row_bytes`].
    Quantise { x: Addr, out: Addr, n_rows: u32, n_cols: u32, format: ActivationFormat },
    /// `out[r][o] = sum_i weights[o][i] * input[r][i]`, or added to `out` where `accumulate`; `input` rows of `format`, `out` f32
    /// `[n_rows, weights.rows]`.
    MatMul { weights: Matrix, input: Addr, format: ActivationFormat, out: Addr, n_rows: u32, path: Path, accumulate: bool },
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
    /// `rows` u32 and `row_weights` f32 are the row lists that [`PromptExpert`] points into; `scratch` holds
    /// [`expert_scratch_bytes`] for `tile_rows` pairs.
    ExpertsPrompt {
        experts: Vec<PromptExpert>,
        input: Addr,
        n_input_rows: u32,
        rows: Addr,
        row_weights: Addr,
        residual: Addr,
        shape: ExpertShape,
        scratch: Addr,
        tile_rows: u32,
    },
}

impl Op {
    /// The operation's name, as backends list it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::RmsNorm { .. } => "rms_norm",
            Self::Quantise { .. } => "quantise",
            Self::MatMul { .. } => "mat_mul",
            Self::HeadNormRope { .. } => "head_norm_rope",
            Self::KvStore { .. } => "kv_store",
            Self::Attention { .. } => "attention",
            Self::Router { .. } => "router",
            Self::ExpertsWindow { .. } => "experts_window",
            Self::ExpertsPrompt { .. } => "experts_prompt",
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
