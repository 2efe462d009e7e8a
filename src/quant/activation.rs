//! Activation rows as kernels take them: floats, or 8-bit numbers with scales beside them.

use super::QuantType;

/// Element type of the activations of a product.
///
/// Row layouts, for `n` values a row:
/// ```text
/// F32    n f32
/// Q8_0   n i8 | n/32  f32 scales | n/32 i16 sums of 32, then zeros up to 4 bytes   n a multiple of 32
/// Q8_K   n i8 | n/256 f32 scales | n/16 i16 sums of 16                             n a multiple of 256
/// F16    f32 scale | 12 zeros | n f16, then zeros up to 16 bytes
/// ```
/// A scale of 8-bit numbers is the largest magnitude of its block divided by 127; sums let types with a minimum add it once a group. That of
/// a row of 16-bit floats is the power of two that its largest magnitude, divided by it, is at least 1 and below 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names of the field")]
pub enum ActivationFormat {
    /// 32-bit floats, exact.
    F32,
    /// 8 bits with a scale for 32 values: beside weights in blocks of 32.
    Q8_0,
    /// 8 bits with a scale for 256 values: beside K and IQ types.
    Q8_K,
    /// 16-bit floats with a scale for the row: beside any type that is unpacked to 16-bit floats first.
    F16,
}

/// Bytes of `n` 16-bit floats, whole sixteens of bytes: of a row of [`ActivationFormat::F16`] without its scale, and of a row of unpacked
/// weights beside it.
#[must_use]
pub const fn halves_line_bytes(n: usize) -> usize {
    (n * 2).next_multiple_of(16)
}

impl ActivationFormat {
    /// The format that goes with weights of `quant_type`; always floats where `exact`.
    #[must_use]
    pub const fn for_weights(quant_type: QuantType, exact: bool) -> Self {
        if exact {
            return Self::F32;
        }
        match quant_type.block_len() {
            32 => Self::Q8_0,
            256 => Self::Q8_K,
            _ => Self::F32,
        }
    }

    /// Values that a row holds a whole number of; those that share a scale, where that is not the whole row.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 1,
            Self::Q8_0 => 32,
            Self::Q8_K => 256,
        }
    }

    /// Values that share a stored sum; 0 where none is stored.
    #[must_use]
    pub const fn sum_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 => 0,
            Self::Q8_0 => 32,
            Self::Q8_K => 16,
        }
    }

    /// Bytes of a row of `n` values.
    #[must_use]
    pub const fn row_bytes(self, n: usize) -> usize {
        match self {
            Self::F32 => n * 4,
            Self::Q8_0 => n + n / 32 * 4 + (n / 32 * 2).next_multiple_of(4),
            Self::Q8_K => n + n / 256 * 4 + n / 16 * 2,
            Self::F16 => 16 + halves_line_bytes(n),
        }
    }
}
