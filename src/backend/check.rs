//! Shapes that every backend refuses alike, checked once above the trait, before an operation is queued.
//!
//! After [`Op::check`] no kernel meets a width that is no whole number of blocks, an empty operand, or a count of elements that
//! overflows. What lies in memory (positions, expert numbers, tables) and where operands lie is left to the backend.

use super::op::{DeltaShape, ExpertShape, KvFormat, Matrix, Op, Path};
use super::{AddrRange, BackendError, Result, op};
use crate::quant::{ActivationFormat, QuantType};
use crate::units::Bytes;

/// Rows that [`Path::Window`] and [`Op::ExpertsWindow`] take at most.
pub const WINDOW_ROWS_MAX: u32 = 8;

/// Heads of a delta net are whole numbers of so many numbers: no kernel has a remainder to look after.
const DELTA_HEAD_UNIT: u32 = 16;

/// Elements that one operand may have: far beyond any device, far below what overflows when it is turned into bytes.
const ELEMENTS_MAX: u64 = 1 << 48;

/// The checks of one operation; errors name it.
#[derive(Clone, Copy)]
struct Checker(&'static str);

impl Checker {
    fn refuse(self, reason: String) -> Result<()> {
        Err(BackendError::BadOperand { op: self.0, reason })
    }

    fn demand(self, holds: bool, reason: impl FnOnce() -> String) -> Result<()> {
        if holds { Ok(()) } else { self.refuse(reason()) }
    }

    /// None of the sizes of an operand is zero, and their product is a count that a device could hold.
    fn shape(self, sizes: &[(&'static str, u32)]) -> Result<()> {
        let mut elements = 1_u64;
        for &(name, size) in sizes {
            self.demand(size > 0, || format!("{name} is zero"))?;
            elements = elements.saturating_mul(u64::from(size));
        }
        self.demand(elements <= ELEMENTS_MAX, || format!("an operand of {elements} elements, at most {ELEMENTS_MAX}"))
    }

    fn whole_blocks(self, n: u32, block_len: usize, of: impl std::fmt::Debug) -> Result<()> {
        self.demand((n as usize).is_multiple_of(block_len), || format!("{n} columns are no whole number of {of:?} blocks of {block_len}"))
    }

    /// `cols` activations of `format` beside weights of `quant_type`.
    fn product(self, quant_type: QuantType, format: ActivationFormat, cols: u32) -> Result<()> {
        self.whole_blocks(cols, quant_type.block_len(), quant_type)?;
        self.whole_blocks(cols, format.block_len(), format)?;
        let fits =
            matches!(format, ActivationFormat::F32 | ActivationFormat::F16) || format == ActivationFormat::for_weights(quant_type, false);
        self.demand(fits, || format!("{format:?} activations beside {quant_type} weights"))
    }

    /// Room for unpacked weights, which rows in 16-bit floats need.
    fn unpacked(self, format: ActivationFormat, unpacked: AddrRange, least: Bytes) -> Result<()> {
        let enough = format != ActivationFormat::F16 || unpacked.bytes >= least;
        self.demand(enough, || format!("{} for unpacked weights, at least {least}", unpacked.bytes))
    }

    fn mat_mul(self, weights: Matrix, format: ActivationFormat, n_rows: u32, path: Path) -> Result<()> {
        self.shape(&[("weights.rows", weights.rows), ("weights.cols", weights.cols)])?;
        self.shape(&[("n_rows", n_rows), ("weights.cols", weights.cols)])?;
        self.shape(&[("n_rows", n_rows), ("weights.rows", weights.rows)])?;
        if path == Path::Window {
            self.window(n_rows)?;
            self.demand(format != ActivationFormat::F16, || "a window of rows in 16-bit floats".to_owned())?;
        }
        self.product(weights.quant_type, format, weights.cols)
    }

    fn window(self, n_rows: u32) -> Result<()> {
        self.demand(n_rows <= WINDOW_ROWS_MAX, || format!("a window of {n_rows} rows, at most {WINDOW_ROWS_MAX}"))
    }

    fn cache(self, format: KvFormat, n_head_kv: u32, head_dim: u32, n_ctx: u32) -> Result<()> {
        self.shape(&[("n_ctx", n_ctx), ("n_head_kv", n_head_kv), ("head_dim", head_dim)])?;
        let whole = format != KvFormat::Q8_0 || head_dim.is_multiple_of(32);
        self.demand(whole, || format!("heads of {head_dim} cannot be stored as Q8_0, which has blocks of 32"))
    }

    fn delta(self, n_rows: u32, shape: DeltaShape) -> Result<()> {
        let DeltaShape { n_head_k, n_head_v, head_dim, n_taps } = shape;
        self.shape(&[("n_head_k", n_head_k), ("head_dim", head_dim)])?;
        self.shape(&[("n_head_v", n_head_v), ("head_dim", head_dim), ("head_dim", head_dim)])?;
        let n_channels = (2 * u64::from(n_head_k) + u64::from(n_head_v)).saturating_mul(u64::from(head_dim));
        let Ok(n_channels) = u32::try_from(n_channels) else {
            return self.refuse(format!("rows of {n_channels} channels, at most {}", u32::MAX));
        };
        self.shape(&[("n_rows", n_rows), ("n_channels", n_channels)])?;
        self.shape(&[("n_taps", n_taps), ("n_channels", n_channels)])?;
        self.demand(head_dim.is_multiple_of(DELTA_HEAD_UNIT), || format!("heads of {head_dim}, no multiple of {DELTA_HEAD_UNIT}"))?;
        self.demand(n_taps > 1, || "a convolution of one tap has no history".to_owned())?;
        self.demand(n_head_v.is_multiple_of(n_head_k), || format!("{n_head_v} value heads cannot share {n_head_k} key heads"))
    }

    fn experts(self, shape: &ExpertShape, n_rows: u32) -> Result<()> {
        let &ExpertShape { n_embd, n_ff, gate_type, up_type, down_type, input_format, down_format } = shape;
        self.shape(&[("n_embd", n_embd), ("n_ff", n_ff)])?;
        self.shape(&[("n_rows", n_rows), ("n_embd", n_embd)])?;
        self.product(gate_type, input_format, n_embd)?;
        self.product(up_type, input_format, n_embd)?;
        self.product(down_type, down_format, n_ff)
    }
}

impl Op {
    /// Refuses shapes and types that no backend can take.
    ///
    /// # Errors
    /// [`BackendError::BadOperand`] with the numbers.
    pub fn check(&self) -> Result<()> {
        let check = Checker(self.name());
        if let Some(parts) = self.parts() {
            check.demand(!parts.is_empty(), || "no product".to_owned())?;
            return parts.iter().try_for_each(Self::check);
        }
        match *self {
            Self::RmsNorm { n_rows, n_cols, .. } => check.shape(&[("n_rows", n_rows), ("n_cols", n_cols)]),
            Self::NormQuantise { .. } | Self::WindowProducts { .. } | Self::StoreHeads { .. } | Self::SwiGluQuantise { .. } => {
                unreachable!("checked by its parts")
            }
            Self::Quantise { n_rows, n_cols, format, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_cols", n_cols)])?;
                check.whole_blocks(n_cols, format.block_len(), format)
            }
            Self::MatMul { weights, format, n_rows, path, unpacked, .. } => {
                check.mat_mul(weights, format, n_rows, path)?;
                check.unpacked(format, unpacked, op::unpacked_bytes(weights.rows.min(op::UNPACKED_ROWS_MIN), weights.cols))
            }
            Self::HeadNormRope { n_rows, n_head, head_dim, n_rot, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_head", n_head), ("head_dim", head_dim)])?;
                let pairs = n_rot <= head_dim && n_rot.is_multiple_of(2);
                check.demand(pairs, || format!("{n_rot} of {head_dim} numbers cannot be rotated in pairs"))
            }
            Self::KvStore { format, n_rows, n_head_kv, head_dim, n_ctx, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_head_kv", n_head_kv), ("head_dim", head_dim)])?;
                check.cache(format, n_head_kv, head_dim, n_ctx)
            }
            Self::Attention { format, n_rows, n_head, n_head_kv, head_dim, n_ctx, path, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_head", n_head), ("head_dim", head_dim)])?;
                if path == Path::Window {
                    check.window(n_rows)?;
                }
                check.cache(format, n_head_kv, head_dim, n_ctx)?;
                check.demand(n_head.is_multiple_of(n_head_kv), || format!("{n_head} query heads cannot share {n_head_kv} key heads"))
            }
            Self::Router { n_rows, n_expert, n_used, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_expert", n_expert), ("n_used", n_used)])?;
                check.demand(n_used <= n_expert, || format!("{n_used} of {n_expert} experts cannot be chosen"))
            }
            Self::SortRoutes { n_rows, n_expert, n_used, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_used", n_used)])?;
                check.demand(n_used <= n_expert, || format!("{n_used} of {n_expert} experts cannot be chosen"))
            }
            Self::ExpertsWindow { n_rows, n_expert, n_used, ref shape, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_expert", n_expert), ("n_used", n_used)])?;
                check.window(n_rows)?;
                check.demand(n_used <= n_expert, || format!("{n_used} of {n_expert} experts cannot be chosen"))?;
                check.demand(shape.input_format != ActivationFormat::F16, || "a window of rows in 16-bit floats".to_owned())?;
                check.experts(shape, n_rows)
            }
            Self::ExpertsPrompt { ref experts, n_input_rows, n_used, ref shape, tile_rows, unpacked, .. } => {
                check.demand(tile_rows > 0, || "tile_rows is zero".to_owned())?;
                check.shape(&[("n_input_rows", n_input_rows), ("n_used", n_used)])?;
                check.experts(shape, n_input_rows)?;
                let follow = experts.windows(2).all(|pair| pair[0].first.checked_add(pair[0].count) == Some(pair[1].first));
                check.demand(follow, || "entries of its experts do not follow one another".to_owned())?;
                let both = (shape.input_format == ActivationFormat::F16) == (shape.down_format == ActivationFormat::F16);
                check.demand(both, || format!("{:?} rows and {:?} activated rows", shape.input_format, shape.down_format))?;
                check.unpacked(shape.input_format, unpacked, op::unpacked_expert_bytes(shape))
            }
            Self::SplitGates { n_rows, n_head, head_dim, .. } | Self::GatedHeadNorm { n_rows, n_head, head_dim, .. } => {
                check.shape(&[("n_rows", n_rows), ("n_head", n_head), ("head_dim", head_dim)])
            }
            Self::JoinRows { n_rows, n_cols, .. }
            | Self::SigmoidGate { n_rows, n_cols, .. }
            | Self::SwiGlu { n_rows, n_cols, .. }
            | Self::AddGated { n_rows, n_cols, .. } => check.shape(&[("n_rows", n_rows), ("n_cols", n_cols)]),
            Self::DeltaGates { n_rows, n_head, .. } => check.shape(&[("n_rows", n_rows), ("n_head", n_head)]),
            Self::DeltaConv { n_rows, shape, .. } | Self::DeltaHistory { n_rows, shape, .. } => check.delta(n_rows, shape),
            Self::DeltaPrompt { n_rows, position, block_position, shape, .. } => {
                check.delta(n_rows, shape)?;
                check.demand(position.checked_add(n_rows).is_some(), || format!("{n_rows} rows from position {position} on"))?;
                check.demand(block_position <= position, || {
                    format!("row {position} lies before its block, which begins at {block_position}")
                })
            }
            Self::DeltaWindow { n_rows, shape, .. } | Self::DeltaCommit { n_rows, shape, .. } => {
                check.window(n_rows)?;
                check.delta(n_rows, shape)
            }
        }
    }
}
