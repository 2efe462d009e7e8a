//! Weights as small integers: every quantised type seen as `scale * code + min` over groups of 16 or 32.
//!
//! The prompt path multiplies integers, so it needs no weight as f32: a code fits i8, a group shares one f32 scale and, in
//! some types, one f32 min. This file owns the view; `codes_32`, `codes_k` and `codes_iq` hold the types.
//! The decoders are one text compiled for each level, so codes and scales are equal on all of them.

use super::simd::SimdLevel;
use super::{codes_32, codes_iq, codes_k};
use crate::quant::QuantType;

/// Most weights that are decoded at once.
pub(super) const CHUNK: usize = 256;

/// How the codes of a type are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CodeShape {
    /// Weights that share a scale: 16 or 32.
    pub group: usize,
    /// True where a group adds a min.
    pub has_min: bool,
}

/// The grouping of a quantised type.
pub(super) fn shape_of(weights: QuantType) -> CodeShape {
    use QuantType as Q;
    let group = match weights {
        Q::Q2_K | Q::Q3_K | Q::Q6_K | Q::IQ2_XS | Q::IQ2_S | Q::IQ1_M => 16,
        _ => 32,
    };
    CodeShape { group, has_min: matches!(weights, Q::Q4_1 | Q::Q5_1 | Q::Q2_K | Q::Q4_K | Q::Q5_K) }
}

/// At most [`CHUNK`] weights of one row.
pub(super) struct CodeChunk {
    /// Integer codes in the order of the row.
    pub codes: [i8; CHUNK],
    /// Scale of each group.
    pub scales: [f32; 16],
    /// Min of each group; meaningless for types without.
    pub mins: [f32; 16],
}

impl CodeChunk {
    pub(super) fn new() -> Self {
        Self { codes: [0; CHUNK], scales: [0.0; 16], mins: [0.0; 16] }
    }
}

/// Decodes the blocks in `blocks` (at most [`CHUNK`] weights) to the front of `chunk`. `level` must be there.
pub(super) fn decode(level: SimdLevel, weights: QuantType, blocks: &[u8], chunk: &mut CodeChunk) {
    match level {
        SimdLevel::Scalar => decode_blocks::<false>(weights, blocks, chunk),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the entry of each product caps the level at what this processor has.
        SimdLevel::Avx2 => unsafe { decode_avx2(weights, blocks, chunk) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx512 => unsafe { decode_avx512(weights, blocks, chunk) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => decode_blocks::<false>(weights, blocks, chunk),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_avx2(weights: QuantType, blocks: &[u8], chunk: &mut CodeChunk) {
    decode_blocks::<true>(weights, blocks, chunk);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_avx512(weights: QuantType, blocks: &[u8], chunk: &mut CodeChunk) {
    decode_blocks::<true>(weights, blocks, chunk);
}

#[inline(always)]
fn decode_blocks<const VECTOR: bool>(weights: QuantType, blocks: &[u8], chunk: &mut CodeChunk) {
    use QuantType as Q;
    match weights {
        Q::Q8_0 => each_32(blocks, chunk, codes_32::q8_0),
        Q::Q4_0 => each_32(blocks, chunk, codes_32::q4_0),
        Q::Q4_1 => each_32(blocks, chunk, codes_32::q4_1),
        Q::Q5_0 => each_32(blocks, chunk, codes_32::q5_0),
        Q::Q5_1 => each_32(blocks, chunk, codes_32::q5_1),
        Q::IQ4_NL => each_32(blocks, chunk, codes_32::iq4_nl::<VECTOR>),
        Q::MXFP4 => each_32(blocks, chunk, codes_32::mxfp4::<VECTOR>),
        Q::Q2_K => codes_k::q2_k(blocks, chunk),
        Q::Q3_K => codes_k::q3_k(blocks, chunk),
        Q::Q4_K => codes_k::q4_k(blocks, chunk),
        Q::Q5_K => codes_k::q5_k(blocks, chunk),
        Q::Q6_K => codes_k::q6_k(blocks, chunk),
        Q::IQ4_XS => codes_k::iq4_xs::<VECTOR>(blocks, chunk),
        Q::IQ2_XXS => codes_iq::iq2_xxs::<VECTOR>(blocks, chunk),
        Q::IQ2_XS => codes_iq::iq2_xs::<VECTOR>(blocks, chunk),
        Q::IQ2_S => codes_iq::iq2_s::<VECTOR>(blocks, chunk),
        Q::IQ3_XXS => codes_iq::iq3_xxs::<VECTOR>(blocks, chunk),
        Q::IQ3_S => codes_iq::iq3_s::<VECTOR>(blocks, chunk),
        Q::IQ1_S => codes_iq::iq1_s(blocks, chunk),
        Q::IQ1_M => codes_iq::iq1_m(blocks, chunk),
        Q::F32 | Q::F16 | Q::BF16 => unreachable!("float weights have no codes"),
    }
}

/// Runs `decode` over blocks of 32 weights in `BYTES` bytes; it returns a block's scale and min.
#[inline(always)]
fn each_32<const BYTES: usize>(blocks: &[u8], chunk: &mut CodeChunk, decode: impl Fn(&[u8; BYTES], &mut [i8; 32]) -> (f32, f32)) {
    let (blocks, _) = blocks.as_chunks::<BYTES>();
    let (codes, _) = chunk.codes.as_chunks_mut::<32>();
    for (index, (block, codes)) in blocks.iter().zip(codes).enumerate() {
        (chunk.scales[index], chunk.mins[index]) = decode(block, codes);
    }
}

#[inline(always)]
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

#[inline(always)]
pub(super) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

/// The half float at `offset`, without the run-time feature test of a library call.
#[inline(always)]
pub(super) fn f16_at(bytes: &[u8], offset: usize) -> f32 {
    f16_to_f32(u16_at(bytes, offset))
}

/// Exact for every bit pattern (a NaN keeps its payload).
#[inline(always)]
pub(super) fn f16_to_f32(half: u16) -> f32 {
    let magnitude = u32::from(half & 0x7fff);
    let sign = u32::from(half & 0x8000) << 16;
    // Shifted into place the exponent is 112 too small; the product repairs it and makes subnormal halves normal.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
    let bits = if magnitude >= 0x7c00 { (magnitude << 13) | 0x7f80_0000 } else { scaled.to_bits() };
    f32::from_bits(bits | sign)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    #[test]
    fn every_half_float_converts_exactly() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            let value = f16_to_f32(bits);
            assert!(value.to_bits() == expected.to_bits() || (value.is_nan() && expected.is_nan()), "{bits:#06x}");
        }
    }

    #[test]
    fn codes_are_equal_at_every_level() {
        for weights in QuantType::ALL.into_iter().filter(|weights| !weights.is_float()) {
            let blocks = Numbers::seeded(3).weights(weights, 1, CHUNK);
            let mut expected = CodeChunk::new();
            decode(SimdLevel::Scalar, weights, &blocks, &mut expected);
            for level in SimdLevel::available() {
                let mut chunk = CodeChunk::new();
                decode(level, weights, &blocks, &mut chunk);
                assert_eq!((chunk.codes, chunk.scales, chunk.mins), (expected.codes, expected.scales, expected.mins), "{weights}");
            }
        }
    }

    #[test]
    fn codes_stand_for_the_weights_of_the_reference() {
        for weights in QuantType::ALL.into_iter().filter(|weights| !weights.is_float()) {
            let blocks = Numbers::seeded(4).weights(weights, 1, CHUNK);
            let mut expected = vec![0.0; CHUNK];
            crate::quant::dequantise(weights, &blocks, &mut expected).expect("whole blocks");
            let mut chunk = CodeChunk::new();
            decode(SimdLevel::Scalar, weights, &blocks, &mut chunk);
            let shape = shape_of(weights);
            for (index, value) in expected.iter().enumerate() {
                let group = index / shape.group;
                let min = if shape.has_min { f64::from(chunk.mins[group]) } else { 0.0 };
                let decoded = f64::from(chunk.scales[group]) * f64::from(chunk.codes[index]) + min;
                assert!((decoded - f64::from(*value)).abs() <= 1e-6 * (min.abs() + decoded.abs()), "{weights} {index}: {decoded} {value}");
            }
        }
    }
}
