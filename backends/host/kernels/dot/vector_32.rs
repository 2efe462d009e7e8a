//! The loops over blocks of 32 weights for AVX2 and AVX-512.

use std::arch::x86_64::*;

use super::vectors::{Signs, half_at, load_32, load_64, prefetch_behind, sum_8, sums_of_16, two_halves, u16_at};
use super::weights::{Rows, Weights};

/// A type with blocks of 32 weights, one unit for all of them and perhaps one number added to all.
pub(super) trait Block32: Weights {
    /// Where the signs are; `Signs::Apart` does not occur.
    const SIGNS: Signs;
    /// Offset of the half-precision number that the type adds to each weight.
    const ADDED: Option<usize> = None;

    /// The 32 codes.
    ///
    /// # Safety
    /// AVX2.
    unsafe fn codes(block: &[u8]) -> __m256i;

    /// The units of two blocks in the lowest lanes; both may be the same block.
    ///
    /// # Safety
    /// F16C.
    #[inline(always)]
    unsafe fn units(first: &[u8], second: &[u8]) -> __m128 {
        let halves = u32::from(u16_at(first, 0)) | (u32::from(u16_at(second, 0)) << 16);
        // SAFETY: the caller has F16C.
        unsafe { two_halves(halves) }
    }
}

/// The product by AVX2; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx2<W: Block32>(weights: &[u8], activation: &[u8]) -> f32 {
    let rows = Rows::new::<W>(weights, activation);
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX2, FMA and F16C.
    unsafe { avx2::<W>(rows.weights, rows.quants, rows.scales) }
}

/// The product by AVX-512; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx512<W: Block32>(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX-512 F, BW, VL and VNNI beside AVX2.
    let [sum] = unsafe { avx512::<W, 1>([weights], Rows::new::<W>(weights, activation)) };
    sum
}

/// [`dot_avx512`] of four weight rows of one length, which share the loads of the activations.
pub(super) fn four_avx512<W: Block32>(weights: [&[u8]; 4], activation: &[u8]) -> [f32; 4] {
    // SAFETY: as above.
    unsafe { avx512::<W, 4>(weights, Rows::new::<W>(weights[0], activation)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<W: Block32>(weights: &[u8], quants: &[u8], scales: &[[u8; 4]]) -> f32 {
    let mut total = _mm256_setzero_ps();
    let blocks = weights.chunks_exact(W::BYTES).zip(quants.chunks_exact(32));
    for ((block, quants), scale) in blocks.zip(scales) {
        let scale = f32::from_le_bytes(*scale);
        // SAFETY: this function has the instructions.
        let (codes, activations, unit) = unsafe { (W::codes(block), load_32(quants, 0), _mm_cvtss_f32(W::units(block, block))) };
        let (magnitudes, signed) = match W::SIGNS {
            Signs::InCodes => (_mm256_abs_epi8(codes), _mm256_sign_epi8(activations, codes)),
            Signs::None | Signs::Apart => (codes, activations),
        };
        total = _mm256_fmadd_ps(_mm256_set1_ps(unit * scale), _mm256_cvtepi32_ps(sums_of_four(magnitudes, signed)), total);
        if let Some(offset) = W::ADDED {
            // SAFETY: as above.
            let added = unsafe { half_at(block, offset) };
            let sums = sums_of_four(_mm256_set1_epi8(1), activations);
            total = _mm256_fmadd_ps(_mm256_set1_ps(added * scale), _mm256_cvtepi32_ps(sums), total);
        }
    }
    // SAFETY: as above.
    unsafe { sum_8(total) }
}

/// Sums of four neighbouring products. A pair is at most 2 * 128 * 127 = 32512, so the 16-bit step does not saturate.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_of_four(magnitudes: __m256i, signed: __m256i) -> __m256i {
    _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed), _mm256_set1_epi16(1))
}

/// Two blocks at a time, one in each half of a register; an odd last block goes the AVX2 way. One sum for each weight row.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn avx512<W: Block32, const WEIGHTS: usize>(weights: [&[u8]; WEIGHTS], rows: Rows<'_>) -> [f32; WEIGHTS] {
    let (zero, half_of_lane) = (_mm512_setzero_si512(), _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1));
    let per_lane = |pair: __m128| _mm512_permutexvar_ps(half_of_lane, _mm512_castps128_ps512(pair));
    let mut totals = [_mm512_setzero_ps(); WEIGHTS];
    let (scale_pairs, last_scale) = rows.scales.as_chunks::<2>();
    for (index, scales) in scale_pairs.iter().enumerate() {
        // SAFETY: this function has the instructions.
        let activations = unsafe { load_64(rows.quants, 64 * index) };
        let scales = _mm_castsi128_ps(_mm_cvtsi64_si128(i64::from_le_bytes(*scales.as_flattened().first_chunk().unwrap_or(&[0; 8]))));
        for (weights, total) in weights.iter().zip(&mut totals) {
            if WEIGHTS > 1 {
                prefetch_behind(&weights[2 * index * W::BYTES..], 64, WEIGHTS * rows.weights.len());
            }
            let (first, second) = weights[2 * index * W::BYTES..2 * (index + 1) * W::BYTES].split_at(W::BYTES);
            // SAFETY: this function has the instructions.
            let (codes, units) = unsafe { (join(W::codes(first), W::codes(second)), W::units(first, second)) };
            let (magnitudes, signed) = match W::SIGNS {
                Signs::InCodes => {
                    let negative = _mm512_movepi8_mask(codes);
                    (_mm512_abs_epi8(codes), _mm512_mask_sub_epi8(activations, negative, zero, activations))
                }
                Signs::None | Signs::Apart => (codes, activations),
            };
            let products = _mm512_dpbusd_epi32(zero, magnitudes, signed);
            *total = _mm512_fmadd_ps(per_lane(_mm_mul_ps(units, scales)), _mm512_cvtepi32_ps(products), *total);
            if let Some(offset) = W::ADDED {
                // SAFETY: this function has the instructions.
                let added = unsafe { _mm_setr_ps(half_at(first, offset), half_at(second, offset), 0.0, 0.0) };
                let sums = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(1), activations);
                *total = _mm512_fmadd_ps(per_lane(_mm_mul_ps(added, scales)), _mm512_cvtepi32_ps(sums), *total);
            }
        }
    }
    // SAFETY: as above.
    let mut sums = unsafe { sums_of_16(totals) };
    if !last_scale.is_empty() {
        let paired = 2 * scale_pairs.len();
        for (weights, sum) in weights.iter().zip(&mut sums) {
            *sum += avx2::<W>(&weights[paired * W::BYTES..], &rows.quants[32 * paired..], last_scale);
        }
    }
    sums
}

/// Two halves of one register.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(low: __m256i, high: __m256i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
}
