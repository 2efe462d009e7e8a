//! The loops over blocks of 256 weights for AVX2 and AVX-512.
//!
//! A block is eight groups of 32 weights, a group two halves of 16 with a scale each. The products of a pair of weights
//! fit 16 bits; the next instruction multiplies the pairs by their scale and adds them to 32 bits, so a scale costs
//! nothing but its way into the lanes.

use std::arch::x86_64::*;

use super::vectors::{Signs, bytes_of_bits, halve, load_32, load_64, prefetch_behind, sum_8, sums_of};
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

    /// The codes of two neighbouring groups.
    ///
    /// # Safety
    /// AVX2 and AVX-512 F, BW and VL.
    #[inline(always)]
    unsafe fn two_codes<const LOW: usize, const HIGH: usize>(block: &[u8]) -> __m512i {
        // SAFETY: the caller has the instructions.
        unsafe { join(Self::codes::<LOW>(block), Self::codes::<HIGH>(block)) }
    }

    /// The sign bits of a group where they are apart: bit set means minus.
    #[inline(always)]
    fn signs<const GROUP: usize>(_block: &[u8]) -> u32 {
        0
    }
}

/// The product by AVX2; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx2<W: Block256>(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX2, FMA and F16C.
    let [sum] = unsafe { avx2::<W, 1>([Rows::new::<W>(weights, activation)]) };
    sum
}

/// The product by AVX-512; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx512<W: Block256>(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX-512 F, BW, VL and VNNI beside AVX2.
    let [[sum]] = unsafe { avx512::<W, 1, 1>([weights], [Rows::new::<W>(weights, activation)]) };
    sum
}

/// [`dot_avx512`] of four weight rows of one length, which share the loads of the activations.
pub(super) fn four_avx512<W: Block256>(weights: [&[u8]; 4], activation: &[u8]) -> [f32; 4] {
    // SAFETY: as above.
    unsafe { avx512::<W, 4, 1>(weights, [Rows::new::<W>(weights[0], activation)]) }.map(|[sum]| sum)
}

/// The products of several rows of activations by AVX2: a block's codes are taken out once for four rows.
pub(super) fn dots_avx2<W: Block256>(weights: &[u8], activations: &[&[u8]], out: &mut [f32]) {
    let (fours, rest) = activations.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (rows, out) in fours.iter().zip(out_fours) {
        // SAFETY: `dots` gives this function out only where the processor has AVX2, FMA and F16C.
        *out = unsafe { avx2::<W, 4>(rows.map(|row| Rows::new::<W>(weights, row))) };
    }
    rest.iter().zip(out_rest).for_each(|(row, out)| *out = dot_avx2::<W>(weights, row));
}

/// The products of several rows of activations by AVX-512: a block's codes are taken out once for four rows.
pub(super) fn dots_avx512<W: Block256>(weights: &[u8], activations: &[&[u8]], out: &mut [f32]) {
    let (fours, rest) = activations.as_chunks::<4>();
    let (out_fours, out_rest) = out.as_chunks_mut::<4>();
    for (rows, out) in fours.iter().zip(out_fours) {
        // SAFETY: `dots` gives this function out only where the processor has AVX-512 F, BW, VL and VNNI beside AVX2.
        [*out] = unsafe { avx512::<W, 1, 4>([weights], rows.map(|row| Rows::new::<W>(weights, row))) };
    }
    let (twos, rest) = rest.as_chunks::<2>();
    let (out_twos, out_rest) = out_rest.as_chunks_mut::<2>();
    for (rows, out) in twos.iter().zip(out_twos) {
        // SAFETY: as above.
        [*out] = unsafe { avx512::<W, 1, 2>([weights], rows.map(|row| Rows::new::<W>(weights, row))) };
    }
    rest.iter().zip(out_rest).for_each(|(row, out)| *out = dot_avx512::<W>(weights, row));
}

/// One sum for each of `ROWS` activation rows with the same weights; the order of a sum does not depend on `ROWS`.
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<W: Block256, const ROWS: usize>(rows: [Rows<'_>; ROWS]) -> [f32; ROWS] {
    let (mut totals, mut total_mins) = ([_mm256_setzero_ps(); ROWS], [_mm256_setzero_ps(); ROWS]);
    for (index, block) in rows[0].weights.chunks_exact(W::BYTES).enumerate() {
        let mut products = [_mm256_setzero_si256(); ROWS];
        let quants = rows.each_ref().map(|row| &row.quants[256 * index..256 * index + 256]);
        // SAFETY: this function has the instructions.
        let head = unsafe {
            let head = W::head(block);
            add_group::<W, 0, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 1, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 2, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 3, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 4, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 5, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 6, ROWS>(block, quants, head.scales, &mut products);
            add_group::<W, 7, ROWS>(block, quants, head.scales, &mut products);
            head
        };
        for row in 0..ROWS {
            let scale = f32::from_le_bytes(rows[row].scales[index]);
            totals[row] = _mm256_fmadd_ps(_mm256_set1_ps(head.d * scale), _mm256_cvtepi32_ps(products[row]), totals[row]);
            if W::MINS {
                total_mins[row] = add_mins(&head, scale, &rows[row].sums[32 * index..32 * index + 32], total_mins[row]);
            }
        }
    }
    let mut sums = [0.0; ROWS];
    for row in 0..ROWS {
        // SAFETY: as above.
        sums[row] = unsafe { sum_8(_mm256_sub_ps(totals[row], total_mins[row])) };
    }
    sums
}

/// Adds the mins of a block times the sums of its activations.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_mins(head: &Head, scale: f32, sums: &[u8], total: __m256) -> __m256 {
    // SAFETY: this function has AVX2.
    let sums = unsafe { load_32(sums, 0) };
    _mm256_fmadd_ps(_mm256_set1_ps(head.dmin * scale), _mm256_cvtepi32_ps(_mm256_madd_epi16(head.mins, sums)), total)
}

/// Adds the scaled products of one group, four weights a lane, to each row's sums.
///
/// A pair of products is at most 2 * 128 * 127 = 32512 and does not saturate.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn add_group<W: Block256, const GROUP: usize, const ROWS: usize>(
    block: &[u8],
    quants: [&[u8]; ROWS],
    scales: __m256i,
    sums: &mut [__m256i; ROWS],
) {
    // SAFETY: the caller has AVX2.
    unsafe {
        let codes = W::codes::<GROUP>(block);
        let scales = _mm256_shuffle_epi8(scales, _mm256_set1_epi16(both_bytes_of(GROUP)));
        let minus = if W::SIGNS == Signs::Apart { bytes_of_bits(W::signs::<GROUP>(block)) } else { _mm256_setzero_si256() };
        let magnitudes = if W::SIGNS == Signs::InCodes { _mm256_abs_epi8(codes) } else { codes };
        for row in 0..ROWS {
            let activations = load_32(quants[row], 32 * GROUP);
            let signed = match W::SIGNS {
                Signs::None => activations,
                Signs::InCodes => _mm256_sign_epi8(activations, codes),
                Signs::Apart => _mm256_sub_epi8(_mm256_xor_si256(activations, minus), minus),
            };
            sums[row] = _mm256_add_epi32(sums[row], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, signed), scales));
        }
    }
}

/// The shuffle index that brings 16-bit element `element` to a lane.
const fn both_bytes_of(element: usize) -> i16 {
    (((2 * element + 1) << 8) | (2 * element)) as i16
}

/// One sum for each weight row and each activation row; the order of a sum does not depend on how many there are.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn avx512<W: Block256, const WEIGHTS: usize, const ROWS: usize>(
    weights: [&[u8]; WEIGHTS],
    rows: [Rows<'_>; ROWS],
) -> [[f32; ROWS]; WEIGHTS] {
    let mut totals = [[_mm512_setzero_ps(); ROWS]; WEIGHTS];
    let mut total_mins = [[_mm256_setzero_ps(); ROWS]; WEIGHTS];
    for index in 0..rows[0].scales.len() {
        let quants = rows.each_ref().map(|row| &row.quants[256 * index..256 * index + 256]);
        for line in 0..WEIGHTS {
            let block = &weights[line][index * W::BYTES..(index + 1) * W::BYTES];
            if WEIGHTS > 1 {
                prefetch_behind(block, W::BYTES, WEIGHTS * weights[0].len());
            }
            // Two sums a row: integers add up to the same in any order, and the steps wait less for each other.
            let (mut even, mut odd) = ([_mm512_setzero_si512(); ROWS], [_mm512_setzero_si512(); ROWS]);
            // SAFETY: this function has the instructions.
            let head = unsafe {
                let head = W::head(block);
                let scales = _mm512_broadcast_i64x4(head.scales);
                add_two_groups::<W, 0, 1, ROWS>(block, quants, scales, &mut even);
                add_two_groups::<W, 2, 3, ROWS>(block, quants, scales, &mut odd);
                add_two_groups::<W, 4, 5, ROWS>(block, quants, scales, &mut even);
                add_two_groups::<W, 6, 7, ROWS>(block, quants, scales, &mut odd);
                head
            };
            for row in 0..ROWS {
                let scale = f32::from_le_bytes(rows[row].scales[index]);
                let products = _mm512_cvtepi32_ps(_mm512_add_epi32(even[row], odd[row]));
                totals[line][row] = _mm512_fmadd_ps(_mm512_set1_ps(head.d * scale), products, totals[line][row]);
                if W::MINS {
                    total_mins[line][row] = add_mins(&head, scale, &rows[row].sums[32 * index..32 * index + 32], total_mins[line][row]);
                }
            }
        }
    }
    let mut sums = [[0.0; ROWS]; WEIGHTS];
    for row in 0..ROWS {
        let mut lanes = [_mm256_setzero_ps(); WEIGHTS];
        for line in 0..WEIGHTS {
            // SAFETY: this function has the instructions.
            lanes[line] = _mm256_sub_ps(unsafe { halve(totals[line][row]) }, total_mins[line][row]);
        }
        // SAFETY: as above.
        let of_lines = unsafe { sums_of(lanes) };
        for line in 0..WEIGHTS {
            sums[line][row] = of_lines[line];
        }
    }
    sums
}

/// Adds the scaled products of two neighbouring groups to each row's sums; see [`add_group`].
///
/// # Safety
/// AVX2 and AVX-512 F, BW, VL and VNNI.
#[inline(always)]
unsafe fn add_two_groups<W: Block256, const LOW: usize, const HIGH: usize, const ROWS: usize>(
    block: &[u8],
    quants: [&[u8]; ROWS],
    scales: __m512i,
    sums: &mut [__m512i; ROWS],
) {
    // SAFETY: the caller has the instructions.
    unsafe {
        let codes = W::two_codes::<LOW, HIGH>(block);
        let minus = match W::SIGNS {
            Signs::None => 0,
            Signs::InCodes => _mm512_movepi8_mask(codes),
            Signs::Apart => u64::from(W::signs::<LOW>(block)) | (u64::from(W::signs::<HIGH>(block)) << 32),
        };
        let magnitudes = if W::SIGNS == Signs::InCodes { _mm512_abs_epi8(codes) } else { codes };
        let element_of_lane = join(_mm256_set1_epi16(both_bytes_of(LOW)), _mm256_set1_epi16(both_bytes_of(HIGH)));
        let scales = _mm512_shuffle_epi8(scales, element_of_lane);
        for row in 0..ROWS {
            let activations = load_64(quants[row], 32 * LOW);
            let signed = _mm512_mask_sub_epi8(activations, minus, _mm512_setzero_si512(), activations);
            sums[row] = _mm512_dpwssd_epi32(sums[row], _mm512_maddubs_epi16(magnitudes, signed), scales);
        }
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
