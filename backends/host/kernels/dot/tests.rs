//! Every type and form against the scalar reference, and the reference against dequantised weights in f64.

use half::{bf16, f16};

use super::dot_fn;
use crate::backends::host::kernels::simd::SimdLevel;
use crate::quant::{QuantType, dequantise};

/// Repeatable bits (xorshift).
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn byte(&mut self) -> u8 {
        (self.next() >> 32) as u8
    }

    /// Within -1..1.
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Random blocks with scales of an ordinary size.
fn weights(quant_type: QuantType, n: usize, bits: &mut Bits) -> Vec<u8> {
    match quant_type {
        QuantType::F32 => return (0..n).flat_map(|_| bits.float().to_le_bytes()).collect(),
        QuantType::F16 => return (0..n).flat_map(|_| f16::from_f32(bits.float()).to_le_bytes()).collect(),
        QuantType::BF16 => return (0..n).flat_map(|_| bf16::from_f32(bits.float()).to_le_bytes()).collect(),
        _ => {}
    }
    let halves: &[usize] = match quant_type {
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
        QuantType::IQ1_M | QuantType::MXFP4 => &[],
        _ => &[0],
    };
    let mut blocks: Vec<u8> = (0..n / quant_type.block_len() * quant_type.block_bytes()).map(|_| bits.byte()).collect();
    for block in blocks.chunks_exact_mut(quant_type.block_bytes()) {
        for offset in halves {
            block[*offset..offset + 2].copy_from_slice(&f16::from_f32(0.1 * bits.float()).to_le_bytes());
        }
        match quant_type {
            QuantType::MXFP4 => block[0] = 120 + block[0] % 8,
            // The top nibble of the scale holds the high exponent bits: 2 keeps the scale near 2^-7.
            QuantType::IQ1_M => block[55] = (block[55] & 0x0f) | 0x20,
            _ => {}
        }
    }
    blocks
}

/// An activation row in the format of the weights and its values; every quant is within -127..=127 and both ends occur.
fn activations(quant_type: QuantType, n: usize, bits: &mut Bits) -> (Vec<u8>, Vec<f32>) {
    let block_len = quant_type.block_len();
    if block_len == 1 {
        let values: Vec<f32> = (0..n).map(|_| bits.float()).collect();
        return (values.iter().flat_map(|value| value.to_le_bytes()).collect(), values);
    }
    let mut quants: Vec<i8> = (0..n).map(|_| (bits.byte() % 255).wrapping_sub(127).cast_signed()).collect();
    quants[..16].fill(-127);
    quants[16..32].fill(127);
    let scales: Vec<f32> = (0..n / block_len).map(|_| 0.01 + 0.01 * bits.float().abs()).collect();
    let sums = quants.chunks_exact(16).map(|group| group.iter().map(|quant| i16::from(*quant)).sum::<i16>());
    let values = quants.iter().enumerate().map(|(index, quant)| f32::from(*quant) * scales[index / block_len]).collect();
    let mut row: Vec<u8> = quants.iter().map(|quant| quant.cast_unsigned()).collect();
    row.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
    if block_len == 256 {
        row.extend(sums.flat_map(i16::to_le_bytes));
    }
    (row, values)
}

/// The product in f64 and the sum of its magnitudes, to which rounding errors are relative.
fn exact(quant_type: QuantType, blocks: &[u8], activations: &[f32]) -> (f64, f64) {
    let mut weights = vec![0.0; activations.len()];
    dequantise(quant_type, blocks, &mut weights).expect("whole blocks");
    let products = weights.iter().zip(activations).map(|(weight, activation)| f64::from(*weight) * f64::from(*activation));
    products.fold((0.0, 0.0), |(sum, magnitude), product| (sum + product, magnitude + product.abs()))
}

fn levels() -> impl Iterator<Item = SimdLevel> {
    [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512].into_iter().filter(|level| *level <= SimdLevel::detect())
}

/// Row lengths with odd and even numbers of blocks.
fn lengths(quant_type: QuantType) -> [usize; 4] {
    let unit = quant_type.block_len().max(13);
    [unit, 2 * unit, 7 * unit, 16 * unit]
}

#[test]
fn every_form_of_every_type_agrees_with_dequantised_weights_in_f64() {
    let mut bits = Bits(0x1234_5678_9abc_def1);
    for quant_type in QuantType::ALL {
        for n in lengths(quant_type) {
            let (blocks, (row, values)) = (weights(quant_type, n, &mut bits), activations(quant_type, n, &mut bits));
            let (expected, magnitude) = exact(quant_type, &blocks, &values);
            for level in levels() {
                let actual = f64::from(dot_fn(level, quant_type)(&blocks, &row));
                let error = (actual - expected).abs() / magnitude;
                assert!(error <= 1e-6, "{quant_type} {level:?} n {n}: {actual} for {expected}, off by {error:e} of {magnitude}");
            }
        }
    }
}

#[test]
fn forms_differ_from_the_scalar_one_only_by_the_order_of_sums() {
    let mut bits = Bits(0x0fed_cba9_8765_4321);
    for quant_type in QuantType::ALL {
        let n = 16 * 256;
        let (blocks, (row, values)) = (weights(quant_type, n, &mut bits), activations(quant_type, n, &mut bits));
        let (_, magnitude) = exact(quant_type, &blocks, &values);
        let scalar = dot_fn(SimdLevel::Scalar, quant_type)(&blocks, &row);
        for level in levels() {
            let error = f64::from(dot_fn(level, quant_type)(&blocks, &row) - scalar).abs() / magnitude;
            assert!(error <= 1e-6, "{quant_type} {level:?}: off by {error:e} of {magnitude}");
        }
    }
}

#[test]
fn four_weight_rows_at_once_have_the_bits_they_have_alone() {
    let mut bits = Bits(0x0246_8ace_1357_9bdf);
    for quant_type in QuantType::ALL {
        for (n, level) in lengths(quant_type).into_iter().flat_map(|n| levels().map(move |level| (n, level))) {
            let rows = [(); 4].map(|()| weights(quant_type, n, &mut bits));
            let (row, _) = activations(quant_type, n, &mut bits);
            let Some(four) = super::dots(level, quant_type).four_for(1) else { continue };
            let alone = rows.each_ref().map(|blocks| dot_fn(level, quant_type)(blocks, &row));
            assert_eq!(four(rows.each_ref().map(Vec::as_slice), &row), alone, "{quant_type} {level:?} n {n}");
        }
    }
}

/// Processors without VBMI take the general form at the highest level; those with it would otherwise never run that form.
#[cfg(target_arch = "x86_64")]
#[test]
fn both_avx512_forms_of_iq3_xxs_agree() {
    if SimdLevel::detect() < SimdLevel::Avx512 {
        return;
    }
    let mut bits = Bits(0x1122_3344_5566_7788);
    for n in lengths(QuantType::IQ3_XXS) {
        let blocks = weights(QuantType::IQ3_XXS, n, &mut bits);
        let (row, values) = activations(QuantType::IQ3_XXS, n, &mut bits);
        let (_, magnitude) = exact(QuantType::IQ3_XXS, &blocks, &values);
        let general = super::vector_256::dot_avx512::<super::weights::IQ3_XXS>(&blocks, &row);
        let error = f64::from(dot_fn(SimdLevel::Avx512, QuantType::IQ3_XXS)(&blocks, &row) - general).abs() / magnitude;
        assert!(error <= 1e-6, "n {n}: off by {error:e} of {magnitude}");
    }
}

/// The bounds above can fail: one flipped bit of a weight moves the result by more than the forms may differ.
#[test]
fn a_corrupted_weight_is_noticed_by_every_form() {
    let mut bits = Bits(0x5555_aaaa_1234_4321);
    for quant_type in QuantType::ALL {
        let n = quant_type.block_len().max(32);
        let (blocks, (row, values)) = (weights(quant_type, n, &mut bits), activations(quant_type, n, &mut bits));
        let (expected, magnitude) = exact(quant_type, &blocks, &values);
        let mut corrupted = blocks.clone();
        // The middle byte of every layout is part of a quant, and bit 6 one of its higher bits.
        corrupted[blocks.len() / 2 + 1] ^= 0x40;
        let (moved, _) = exact(quant_type, &corrupted, &values);
        assert!((moved - expected).abs() > 4e-6 * magnitude, "{quant_type}: the flip is too small to see");
        for level in levels() {
            let actual = f64::from(dot_fn(level, quant_type)(&corrupted, &row));
            assert!((actual - expected).abs() > 1e-6 * magnitude, "{quant_type} {level:?} did not see the flip");
        }
    }
}

/// Products of the largest magnitudes do not saturate: -128 * 127 in every place.
#[test]
fn the_largest_q8_0_products_are_exact() {
    let block: Vec<u8> = f16::from_f32(1.0).to_le_bytes().into_iter().chain([0x80; 32]).collect();
    let row: Vec<u8> = [127_u8; 64].into_iter().chain([1.0_f32.to_le_bytes(); 2].into_iter().flatten()).collect();
    for level in levels() {
        let actual = dot_fn(level, QuantType::Q8_0)(&block.repeat(2), &row);
        assert_eq!(actual, -128.0 * 127.0 * 64.0, "{level:?}");
    }
}

#[test]
#[should_panic(expected = "bytes of 1 whole blocks of Q4_K")]
fn a_partial_block_is_refused() {
    let _ = dot_fn(SimdLevel::detect(), QuantType::Q4_K)(&[0; 145], &[0; 1000]);
}

#[test]
#[should_panic(expected = "has 291 bytes instead of 292")]
fn a_short_activation_row_is_refused() {
    let _ = dot_fn(SimdLevel::detect(), QuantType::Q4_K)(&[0; 144], &[0; 291]);
}
