//! Weights as f32, for products with f32 activations: exactly the values of the reference dequantisation.

use super::codes::{self, CodeChunk, f16_to_f32, shape_of};
use super::simd::SimdLevel;
use crate::quant::QuantType;

/// Decodes `blocks` to as many values as `out` takes (at most 256). `level` must be there.
pub(super) fn decode(level: SimdLevel, weights: QuantType, blocks: &[u8], out: &mut [f32]) {
    if weights.is_float() {
        match level {
            SimdLevel::Scalar => decode_floats(weights, blocks, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the entry of each product caps the level at what this processor has.
            _ => unsafe { decode_floats_avx2(weights, blocks, out) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => decode_floats(weights, blocks, out),
        }
        return;
    }
    let mut chunk = CodeChunk::new();
    codes::decode(level, weights, blocks, &mut chunk);
    let shape = shape_of(weights);
    let groups = out.chunks_exact_mut(shape.group).zip(chunk.codes.chunks_exact(shape.group));
    for (index, (out, codes)) in groups.enumerate() {
        let scale = chunk.scales[index];
        let min = if shape.has_min { chunk.mins[index] } else { 0.0 };
        for (out, code) in out.iter_mut().zip(codes) {
            // Product and sum are rounded one after the other, as the reference does; adding 0 changes no value.
            *out = scale * f32::from(*code) + min;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn decode_floats_avx2(weights: QuantType, blocks: &[u8], out: &mut [f32]) {
    decode_floats(weights, blocks, out);
}

#[inline(always)]
fn decode_floats(weights: QuantType, blocks: &[u8], out: &mut [f32]) {
    let (words, _) = blocks.as_chunks::<4>();
    let (halves, _) = blocks.as_chunks::<2>();
    match weights {
        QuantType::F32 => out.iter_mut().zip(words).for_each(|(out, bytes)| *out = f32::from_le_bytes(*bytes)),
        QuantType::F16 => out.iter_mut().zip(halves).for_each(|(out, bytes)| *out = f16_to_f32(u16::from_le_bytes(*bytes))),
        _ => {
            for (out, bytes) in out.iter_mut().zip(halves) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::codes::CHUNK;
    use crate::backends::host::kernels::test_data::Numbers;

    #[test]
    fn values_are_those_of_the_reference_bit_for_bit() {
        for weights in QuantType::ALL {
            let blocks = Numbers::seeded(5).weights(weights, 1, CHUNK);
            let mut expected = vec![0.0; CHUNK];
            crate::quant::dequantise(weights, &blocks, &mut expected).expect("whole blocks");
            for level in SimdLevel::available() {
                let mut values = vec![0.0; CHUNK];
                decode(level, weights, &blocks, &mut values);
                assert_eq!(values, expected, "{weights} {level:?}");
            }
        }
    }
}
