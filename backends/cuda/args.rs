//! What kernels are given: one struct each, as its source in `kernels-cuda/` declares it.
//!
//! Both sides state the size of each struct, and the look-alike driver refuses a launch that brings another. The order of fields is held by
//! the tests of operations.

use crate::backend::Addr;
use crate::backend::op::DeltaShape;

/// Arguments of a kernel.
///
/// # Safety
/// The struct is laid out as in C, without padding that is not a field, and is what the kernels it is used for take.
pub unsafe trait Args: Copy {}

/// Pieces that a launch of a prompt's experts takes: its arguments must fit the 4 KiB that every device takes.
pub const PIECES_MAX: usize = 64;
/// The same where the weights are unpacked, and matrices that a launch unpacks.
pub const HALVES_PIECES_MAX: usize = 64;
pub const UNPACKED_MAX: usize = 128;

/// Matrices that a launch of a window's products takes.
pub const WINDOW_MATRICES: usize = 4;

/// Forms that a normed row is stored in beside its floats.
pub const NORM_TARGETS: usize = 2;

/// Declares arguments with the size that the kernel's source states.
macro_rules! args {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal { $($field:ident: $type:ty),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name {
            $(pub $field: $type,)+
        }

        const _: () = assert!(size_of::<$name>() == $bytes && $bytes == 0 $(+ size_of::<$type>())+);

        // SAFETY: laid out as in C; the sizes of the fields sum to that of the struct, so that there is no padding.
        unsafe impl Args for $name {}
    )+};
}

args! {
    /// `rms_norm`.
    RmsNormArgs: 32 { x: Addr, weight: Addr, out: Addr, n_cols: u32, eps: f32 }
    /// `head_norm_rope`.
    HeadNormRopeArgs: 48 {
        x: Addr, weight: Addr, positions: Addr, n_head: u32, head_dim: u32, n_rot: u32, freq_base: f32, eps: f32, unused: u32,
    }
    /// `gated_head_norm`.
    GatedHeadNormArgs: 32 { x: Addr, weight: Addr, gates: Addr, head_dim: u32, eps: f32 }
    /// `kv_store`.
    KvStoreArgs: 56 {
        rows: Addr, cache: Addr, positions: Addr, first_row: Addr, n: u64, row_units: u32, n_ctx: u32, format: u32, unused: u32,
    }
    /// `quantise`.
    QuantiseArgs: 24 { x: Addr, out: Addr, n_cols: u32, format: u32 }
    /// `mat_mul_window_*`, `mat_mul_prompt_*`.
    MatMulArgs: 56 {
        weights: Addr, input: Addr, out: Addr, row_bytes: u64, n_out: u32, n_in: u32, n_rows: u32, format: u32, accumulate: u32, unused: u32,
    }
    /// `attention_*`.
    AttentionArgs: 96 {
        q: Addr, k_cache: Addr, v_cache: Addr, positions: Addr, first_row: Addr, out: Addr, partial: Addr, head_bytes: u64,
        n_rows: u32, n_head: u32, n_head_kv: u32, head_dim: u32, n_ctx: u32, n_stretches: u32, scale: f32, unused: u32,
    }
    /// `experts_activate`.
    ExpertsActivateArgs: 32 { gate: Addr, up: Addr, out: Addr, n_ff: u32, format: u32 }
    /// `experts_window_*`.
    ExpertsWindowArgs: 72 {
        input: Addr, ids: Addr, table: Addr, out: Addr, row_bytes: u64,
        n_out: u32, n_in: u32, n_rows: u32, n_used: u32, format: u32, first_part: u32, by_pair: u32, unused: u32,
    }
    /// `experts_window_add`.
    ExpertsWindowAddArgs: 32 { results: Addr, weights: Addr, residual: Addr, n_embd: u32, n_used: u32 }
    /// Pairs of one expert that a launch multiplies.
    ExpertPiece: 40 { parts: [Addr; 3], first: u32, count: u32, first_pair: u32, first_tile: u32 }
    /// `experts_prompt_*`.
    ExpertsPromptArgs: 2624 {
        input: Addr, rows: Addr, out: Addr, part_floats: u64, row_bytes: u64,
        n_out: u32, n_in: u32, format: u32, first_part: u32, by_pair: u32, n_pieces: u32, pieces: [ExpertPiece; PIECES_MAX],
    }
    /// `quantise_halves`.
    QuantiseHalvesArgs: 24 { x: Addr, out: Addr, n_cols: u32, unused: u32 }
    /// `unpack_*`.
    UnpackArgs: 1048 { out: Addr, row_bytes: u64, n_rows: u32, n_cols: u32, sources: [Addr; UNPACKED_MAX] }
    /// `mat_mul_halves_*`.
    MatMulHalvesArgs: 48 {
        input: Addr, weights: Addr, out: Addr, n_rows: u32, n_out: u32, n_in: u32, out_stride: u32, accumulate: u32, unused: u32,
    }
    /// Pairs of one expert whose weights are unpacked.
    HalvesPiece: 16 { first: u32, count: u32, first_pair: u32, first_tile: u32 }
    /// `experts_gated_*`, `experts_halves_*`.
    ExpertsHalvesArgs: 1072 {
        input: Addr, rows: Addr, weights: Addr, out: Addr, n_out: u32, n_in: u32, n_pieces: u32, unused: u32,
        pieces: [HalvesPiece; HALVES_PIECES_MAX],
    }
    /// `experts_add`.
    ExpertsAddArgs: 56 {
        results: Addr, entries: Addr, row_weights: Addr, residual: Addr,
        n_rows: u32, n_used: u32, n_embd: u32, first_entry: u32, end_entry: u32, unused: u32,
    }
    /// One of the matrices that a window is multiplied with.
    WindowMatrix: 24 { weights: Addr, out: Addr, n_out: u32, first_block: u32 }
    /// `window_products_*`.
    WindowProductsArgs: 136 {
        input: Addr, row_bytes: u64, n_in: u32, n_rows: u32, n_matrices: u32, set_rows: u32, warp_sets: u32, accumulate: u32,
        matrices: [WindowMatrix; WINDOW_MATRICES],
    }
    /// `window_gate_up_*`.
    WindowGateUpArgs: 72 {
        input: Addr, ids: Addr, table: Addr, out: Addr, row_bytes: u64,
        n_out: u32, n_in: u32, n_rows: u32, n_used: u32, first_part: u32, set_rows: u32, warp_sets: u32, unused: u32,
    }
    /// `window_activate`.
    WindowActivateArgs: 32 { gate: Addr, up: Addr, out: Addr, n_cols: u32, format: u32 }
    /// `window_down_*`.
    WindowDownArgs: 72 {
        activated: Addr, ids: Addr, weights: Addr, table: Addr, residual: Addr, row_bytes: u64,
        n_embd: u32, n_ff: u32, n_rows: u32, n_used: u32, n_outputs: u32, set_rows: u32,
    }
    /// `norm_quantise`.
    NormQuantiseArgs: 64 {
        x: Addr, weight: Addr, out: Addr, quantised: [Addr; NORM_TARGETS], formats: [u32; NORM_TARGETS],
        n_targets: u32, n_cols: u32, eps: f32, unused: u32,
    }
    /// `store_heads`.
    StoreHeadsArgs: 120 {
        q: Addr, k: Addr, v: Addr, q_weight: Addr, k_weight: Addr, rope_positions: Addr, k_cache: Addr, v_cache: Addr,
        positions: Addr, first_row: Addr, n_head: u32, n_head_kv: u32, head_dim: u32, head_units: u32, n_rot: u32, n_ctx: u32,
        format: u32, freq_base: f32, eps: f32, unused: u32,
    }
    /// `router`.
    RouterArgs: 40 { logits: Addr, ids: Addr, weights: Addr, n_expert: u32, n_used: u32, scale: f32, unused: u32 }
    /// `count_routes`, `place_routes`.
    SortRoutesArgs: 64 {
        ids: Addr, weights: Addr, counts: Addr, rows: Addr, row_weights: Addr, entries: Addr, n_rows: u32, n_expert: u32, n_used: u32, unused: u32,
    }
    /// `split_gates`.
    SplitGatesArgs: 40 { joined: Addr, values: Addr, gates: Addr, n: u64, head_dim: u32, unused: u32 }
    /// `join_rows`.
    JoinRowsArgs: 40 { left: Addr, right: Addr, out: Addr, n: u64, n_cols: u32, unused: u32 }
    /// `sigmoid_gate`.
    SigmoidGateArgs: 24 { x: Addr, gates: Addr, n: u64 }
    /// `swiglu`.
    SwiGluArgs: 24 { gate: Addr, up: Addr, n: u64 }
    /// `add_gated`.
    AddGatedArgs: 40 { sum: Addr, x: Addr, gate: Addr, n: u64, n_cols: u32, unused: u32 }
    /// A [`DeltaShape`] as kernels take it.
    DeltaShapeArgs: 16 { n_head_k: u32, n_head_v: u32, head_dim: u32, n_taps: u32 }
    /// `delta_conv`, `delta_conv_4`.
    DeltaConvArgs: 56 { x: Addr, history: Addr, taps: Addr, out: Addr, shape: DeltaShapeArgs, eps: f32, n_rows: u32 }
    /// `delta_history`.
    DeltaHistoryArgs: 32 { x: Addr, history: Addr, n_rows: u32, n_channels: u32, n_before: u32, unused: u32 }
    /// `delta_gates`.
    DeltaGatesArgs: 48 { beta: Addr, decay: Addr, dt_bias: Addr, a: Addr, n: u64, n_head: u32, unused: u32 }
    /// `delta_rule`, `delta_rule_128`.
    DeltaRuleArgs: 64 { qkv: Addr, beta: Addr, decay: Addr, state: Addr, out: Addr, shape: DeltaShapeArgs, n_rows: u32, writes_state: u32 }
}

impl From<DeltaShape> for DeltaShapeArgs {
    fn from(shape: DeltaShape) -> Self {
        let DeltaShape { n_head_k, n_head_v, head_dim, n_taps } = shape;
        Self { n_head_k, n_head_v, head_dim, n_taps }
    }
}
