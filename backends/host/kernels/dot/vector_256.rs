//! The loops over blocks of 256 weights for AVX2 and AVX-512.
//!
//! A block is eight groups of 32 weights, a group two halves of 16 with a scale each. The products of a pair of weights
//! fit 16 bits; the next instruction multiplies the pairs by their scale and adds them to 32 bits, so a scale costs
//! nothing but its way into the lanes.

use std::arch::x86_64::*;

use super::vectors::{Signs, bytes_of_bits, load_32, sum_8};
use super::weights::{Rows, Weights};

/// The scales of a block.
pub(super) struct Head {
    /// Unit of the scales.
    pub d: f32,
    /// i16 scales: those of the first halves of the eight groups, then those of the second halves.
    pub scales: __m256i,
    /// Unit of the mins; 0 in types without.
    pub dmin: f32,
    /// i16 mins of 16 weights each, in order; unused in types without.
    pub mins: __m256i,
}

/// A type with blocks of 256 weights.
pub(super) trait Block256: Weights {
    /// Where the signs are.
    const SIGNS: Signs;
    /// True for types with mins.
    const MINS: bool = false;

    /// The scales of a block.
    ///
    /// # Safety
    /// AVX2 and F16C.
    unsafe fn head(block: &[u8]) -> Head;

    /// The 32 codes of a group.
    ///
    /// # Safety
    /// AVX2.
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i;

    /// The sign bits of a group where they are apart: bit set means minus.
    #[inline(always)]
    fn signs<const GROUP: usize>(_block: &[u8]) -> u32 {
        0
    }
}

/// The product by AVX2; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx2<W: Block256>(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX2, FMA and F16C.
    unsafe { avx2::<W>(Rows::new::<W>(weights, activation)) }
}

/// The product by AVX-512; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx512<W: Block256>(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX-512 F, BW, VL and VNNI beside AVX2.
    unsafe { avx512::<W>(Rows::new::<W>(weights, activation)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<W: Block256>(rows: Rows<'_>) -> f32 {
    let (mut total, mut total_mins) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    let blocks = rows.weights.chunks_exact(W::BYTES).zip(rows.quants.chunks_exact(256));
    for (((block, quants), scale), sums) in blocks.zip(rows.scales).zip(rows.sums.chunks_exact(32)) {
        let scale = f32::from_le_bytes(*scale);
        // SAFETY: this function has the instructions.
        let (head, products) = unsafe {
            let head = W::head(block);
            let first = _mm256_add_epi32(group::<W, 0>(block, quants, head.scales), group::<W, 1>(block, quants, head.scales));
            let second = _mm256_add_epi32(group::<W, 2>(block, quants, head.scales), group::<W, 3>(block, quants, head.scales));
            let third = _mm256_add_epi32(group::<W, 4>(block, quants, head.scales), group::<W, 5>(block, quants, head.scales));
            let fourth = _mm256_add_epi32(group::<W, 6>(block, quants, head.scales), group::<W, 7>(block, quants, head.scales));
            (head, _mm256_add_epi32(_mm256_add_epi32(first, second), _mm256_add_epi32(third, fourth)))
        };
        total = _mm256_fmadd_ps(_mm256_set1_ps(head.d * scale), _mm256_cvtepi32_ps(products), total);
        if W::MINS {
            total_mins = add_mins(&head, scale, sums, total_mins);
        }
    }
    // SAFETY: as above.
    unsafe { sum_8(_mm256_sub_ps(total, total_mins)) }
}

/// Adds the mins of a block times the sums of its activations.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_mins(head: &Head, scale: f32, sums: &[u8], total: __m256) -> __m256 {
    // SAFETY: this function has AVX2.
    let sums = unsafe { load_32(sums, 0) };
    _mm256_fmadd_ps(_mm256_set1_ps(head.dmin * scale), _mm256_cvtepi32_ps(_mm256_madd_epi16(head.mins, sums)), total)
}

/// The scaled products of one group, four weights a lane.
///
/// A pair of products is at most 2 * 128 * 127 = 32512 and does not saturate.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn group<W: Block256, const GROUP: usize>(block: &[u8], quants: &[u8], scales: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let (codes, activations) = (W::codes::<GROUP>(block), load_32(quants, 32 * GROUP));
        let (magnitudes, signed) = match W::SIGNS {
            Signs::None => (codes, activations),
            Signs::InCodes => (_mm256_abs_epi8(codes), _mm256_sign_epi8(activations, codes)),
            Signs::Apart => {
                let minus = bytes_of_bits(W::signs::<GROUP>(block));
                (codes, _mm256_sub_epi8(_mm256_xor_si256(activations, minus), minus))
            }
        };
        let scales = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(both_bytes_of(GROUP)));
        _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed), scales)
    }
}

/// The shuffle index that brings 16-bit element `element` to a lane.
const fn both_bytes_of(element: usize) -> i16 {
    (((2 * element + 1) << 8) | (2 * element)) as i16
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn avx512<W: Block256>(rows: Rows<'_>) -> f32 {
    let (mut total, mut total_mins) = (_mm512_setzero_ps(), _mm256_setzero_ps());
    let blocks = rows.weights.chunks_exact(W::BYTES).zip(rows.quants.chunks_exact(256));
    for (((block, quants), scale), sums) in blocks.zip(rows.scales).zip(rows.sums.chunks_exact(32)) {
        let scale = f32::from_le_bytes(*scale);
        // SAFETY: this function has the instructions.
        let (head, products) = unsafe {
            let head = W::head(block);
            let scales = _mm512_broadcast_i64x4(head.scales);
            let zero = _mm512_setzero_si512();
            let first = add_two_groups::<W, 0, 1>(block, quants, scales, zero);
            let second = add_two_groups::<W, 2, 3>(block, quants, scales, zero);
            let third = add_two_groups::<W, 4, 5>(block, quants, scales, first);
            let fourth = add_two_groups::<W, 6, 7>(block, quants, scales, second);
            (head, _mm512_add_epi32(third, fourth))
        };
        total = _mm512_fmadd_ps(_mm512_set1_ps(head.d * scale), _mm512_cvtepi32_ps(products), total);
        if W::MINS {
            total_mins = add_mins(&head, scale, sums, total_mins);
        }
    }
    // SAFETY: as above.
    _mm512_reduce_add_ps(total) - unsafe { sum_8(total_mins) }
}

/// Adds the scaled products of two groups to 32-bit sums; see [`group`].
///
/// # Safety
/// AVX2 and AVX-512 F, BW, VL and VNNI.
#[inline(always)]
unsafe fn add_two_groups<W: Block256, const LOW: usize, const HIGH: usize>(
    block: &[u8],
    quants: &[u8],
    scales: __m512i,
    total: __m512i,
) -> __m512i {
    // SAFETY: the caller has the instructions.
    unsafe {
        let codes = join(W::codes::<LOW>(block), W::codes::<HIGH>(block));
        let activations = join(load_32(quants, 32 * LOW), load_32(quants, 32 * HIGH));
        let minus = match W::SIGNS {
            Signs::None => 0,
            Signs::InCodes => _mm512_movepi8_mask(codes),
            Signs::Apart => u64::from(W::signs::<LOW>(block)) | (u64::from(W::signs::<HIGH>(block)) << 32),
        };
        let magnitudes = if W::SIGNS == Signs::InCodes { _mm512_abs_epi8(codes) } else { codes };
        let signed = _mm512_mask_sub_epi8(activations, minus, _mm512_setzero_si512(), activations);
        let element_of_lane = join(_mm256_set1_epi16(both_bytes_of(LOW)), _mm256_set1_epi16(both_bytes_of(HIGH)));
        _mm512_dpwssd_epi32(total, _mm512_maddubs_epi16(magnitudes, signed), _mm512_shuffle_epi8(scales, element_of_lane))
    }
}

/// Two halves of one register.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn join(low: __m256i, high: __m256i) -> __m512i {
    // SAFETY: the caller has AVX-512 F.
    unsafe { _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high) }
}

/// i16 scales of 16 weights each, in order, sorted into first and second halves of the groups.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn halves_apart(scales: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let even_then_odd =
            _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_shuffle_epi8(scales, even_then_odd))
    }
}

/// Eight i16 scales of 32 weights each, for both halves of the groups.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn same_for_both_halves(scales: __m128i) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_broadcastsi128_si256(scales) }
}
