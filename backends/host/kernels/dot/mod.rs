//! Dot products of one weight row as a file stores it with one row of activations: the kernel of the window path.
//!
//! Activations come in the format that goes with the weights, `n` numbers a row, all little-endian, without gaps:
//! ```text
//! float weights:      n x f32
//! blocks of 32, Q8_0: n x i8 quants | n/32  x f32 scales | (anything)
//! blocks of 256, Q8_K: n x i8 quants | n/256 x f32 scales | n/16 x i16 sums of 16 quants
//! ```
//! Quants lie within -127..=127; -128 would not survive a change of sign.
//!
//! All products of a block are summed as integers, exactly, in every form. The forms differ only in the order in which the
//! blocks' f32 results are added. `scalar` is the reference; `vector_32` and `vector_256` hold the loops for AVX2 and
//! AVX-512 and ask `codes_32`, `codes_k` and `codes_iq` for the weights as bytes. `iq3_xxs` is a
//! form of its own for AVX-512 with VBMI, so at that level the sums of IQ3_XXS may round differently without VBMI.

#[cfg(target_arch = "x86_64")]
mod codes_32;
#[cfg(target_arch = "x86_64")]
mod codes_iq;
#[cfg(target_arch = "x86_64")]
mod codes_k;
#[cfg(target_arch = "x86_64")]
mod floats;
#[cfg(target_arch = "x86_64")]
mod iq3_xxs;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vector_256;
#[cfg(target_arch = "x86_64")]
mod vector_32;
#[cfg(target_arch = "x86_64")]
mod vectors;
mod weights;

use super::simd::SimdLevel;
use crate::quant::QuantType;

/// The product of a row of whole weight blocks with a row of as many activations.
///
/// # Panics
/// Where the weights are no whole number of blocks or the activation row is shorter than its format says.
pub type DotFn = fn(weights_row: &[u8], activation_row: &[u8]) -> f32;

/// The products of one weight row with several activation rows, each with the bits that [`DotFn`] gives it.
pub type DotsFn = fn(weights_row: &[u8], activation_rows: &[&[u8]], out: &mut [f32]);

/// The products of four weight rows of one length with one activation row, each with the bits that [`DotFn`] gives it.
pub type FourDotsFn = fn(weights_rows: [&[u8]; 4], activation_row: &[u8]) -> [f32; 4];

/// The kernels of one weight type.
#[derive(Clone, Copy)]
pub struct Dots {
    one: DotFn,
    /// None where taking out the weights costs little.
    several: Option<DotsFn>,
    /// None where a row alone is as fast.
    four: Option<FourDotsFn>,
}

impl Dots {
    /// The products of a weight row with as many activation rows as `out` is long.
    ///
    /// # Panics
    /// As [`DotFn`].
    #[inline]
    pub fn rows(&self, weights_row: &[u8], activation_rows: &[&[u8]], out: &mut [f32]) {
        match self.several {
            Some(several) if out.len() > 1 => several(weights_row, &activation_rows[..out.len()], out),
            _ => out.iter_mut().zip(activation_rows).for_each(|(out, row)| *out = (self.one)(weights_row, row)),
        }
    }

    /// The form for four weight rows, where it is the fastest for `n` activation rows.
    #[inline]
    pub(super) fn four_for(&self, n: usize) -> Option<FourDotsFn> {
        if n > 1 && self.several.is_some() { None } else { self.four }
    }
}

/// The kernel for weights of a type. A level that this processor lacks gives the highest one it has.
#[must_use]
pub fn dot_fn(level: SimdLevel, quant_type: QuantType) -> DotFn {
    dots(level, quant_type).one
}

/// [`dot_fn`] together with its form for several activation rows.
#[must_use]
pub fn dots(level: SimdLevel, quant_type: QuantType) -> Dots {
    use QuantType as Q;
    let level = level.min(SimdLevel::detect());
    match quant_type {
        Q::F32 => pick::float::<weights::F32>(level),
        Q::F16 => pick::float::<weights::F16>(level),
        Q::BF16 => pick::float::<weights::BF16>(level),
        Q::Q4_0 => pick::block_32::<weights::Q4_0>(level),
        Q::Q4_1 => pick::block_32::<weights::Q4_1>(level),
        Q::Q5_0 => pick::block_32::<weights::Q5_0>(level),
        Q::Q5_1 => pick::block_32::<weights::Q5_1>(level),
        Q::Q8_0 => pick::block_32::<weights::Q8_0>(level),
        Q::IQ4_NL => pick::block_32::<weights::IQ4_NL>(level),
        Q::MXFP4 => pick::block_32::<weights::MXFP4>(level),
        Q::Q2_K => pick::block_256::<weights::Q2_K>(level),
        Q::Q3_K => pick::block_256::<weights::Q3_K>(level),
        Q::Q4_K => pick::block_256::<weights::Q4_K>(level),
        Q::Q5_K => pick::block_256::<weights::Q5_K>(level),
        Q::Q6_K => pick::block_256::<weights::Q6_K>(level),
        Q::IQ2_XXS => pick::block_256::<weights::IQ2_XXS>(level),
        Q::IQ2_XS => pick::block_256::<weights::IQ2_XS>(level),
        Q::IQ2_S => pick::block_256::<weights::IQ2_S>(level),
        Q::IQ3_XXS => pick::iq3_xxs(level),
        Q::IQ3_S => pick::block_256::<weights::IQ3_S>(level),
        Q::IQ1_S => pick::block_256::<weights::IQ1_S>(level),
        Q::IQ1_M => pick::block_256::<weights::IQ1_M>(level),
        Q::IQ4_XS => pick::block_256::<weights::IQ4_XS>(level),
    }
}

#[cfg(target_arch = "x86_64")]
mod pick {
    use super::{Dots, SimdLevel, floats, iq3_xxs, scalar, vector_32, vector_256, weights};

    pub(super) fn float<W: floats::Floats>(level: SimdLevel) -> Dots {
        let one = match level {
            SimdLevel::Scalar => scalar::dot_floats::<W>,
            // One load feeds one multiplication: memory is the limit long before the width of the registers.
            SimdLevel::Avx2 | SimdLevel::Avx512 => floats::dot_avx2::<W>,
        };
        Dots { one, several: None, four: None }
    }

    pub(super) fn block_32<W: vector_32::Block32>(level: SimdLevel) -> Dots {
        match level {
            SimdLevel::Scalar => Dots { one: scalar::dot_32::<W>, several: None, four: None },
            SimdLevel::Avx2 => Dots { one: vector_32::dot_avx2::<W>, several: None, four: None },
            SimdLevel::Avx512 => Dots { one: vector_32::dot_avx512::<W>, several: None, four: Some(vector_32::four_avx512::<W>) },
        }
    }

    pub(super) fn block_256<W: vector_256::Block256>(level: SimdLevel) -> Dots {
        match level {
            SimdLevel::Scalar => Dots { one: scalar::dot_256::<W>, several: None, four: None },
            SimdLevel::Avx2 => Dots { one: vector_256::dot_avx2::<W>, several: Some(vector_256::dots_avx2::<W>), four: None },
            SimdLevel::Avx512 => Dots {
                one: vector_256::dot_avx512::<W>,
                several: Some(vector_256::dots_avx512::<W>),
                four: Some(vector_256::four_avx512::<W>),
            },
        }
    }

    pub(super) fn iq3_xxs(level: SimdLevel) -> Dots {
        if level == SimdLevel::Avx512 && is_x86_feature_detected!("avx512vbmi") {
            return Dots { one: iq3_xxs::dot_vbmi, several: None, four: Some(iq3_xxs::four_vbmi) };
        }
        block_256::<weights::IQ3_XXS>(level)
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod pick {
    use super::{Dots, SimdLevel, scalar, weights::Weights};

    pub(super) fn float<W: Weights>(_level: SimdLevel) -> Dots {
        Dots { one: scalar::dot_floats::<W>, several: None, four: None }
    }

    pub(super) fn block_32<W: Weights>(_level: SimdLevel) -> Dots {
        Dots { one: scalar::dot_32::<W>, several: None, four: None }
    }

    pub(super) fn iq3_xxs(level: SimdLevel) -> Dots {
        block_256::<super::weights::IQ3_XXS>(level)
    }

    pub(super) fn block_256<W: Weights>(_level: SimdLevel) -> Dots {
        Dots { one: scalar::dot_256::<W>, several: None, four: None }
    }
}
