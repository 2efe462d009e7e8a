//! Weights of the IQ types with blocks of 256 as bytes of registers. `quant::iq` draws the layouts.
//!
//! Code book entries are fetched one by one, because gathers are many times slower on processors whose microcode guards them.

use std::arch::x86_64::*;

use super::codes_32::{nibbles, values_of};
use super::vector_256::{Block256, Head, halves_apart, same_for_both_halves};
use super::vectors::{Signs, half_at, load_16, load_32, two_halves, u16_at, u32_at, u64_at};
use super::weights::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_XS};
use crate::quant::tables::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, IQ4_VALUES, SIGNS};

impl Block256 for IQ2_XXS {
    const SIGNS: Signs = Signs::Apart;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            // The scale is the top nibble of each pair of u32.
            let first = _mm256_castsi256_ps(_mm256_srli_epi64::<60>(load_32(block, 2)));
            let second = _mm256_castsi256_ps(_mm256_srli_epi64::<60>(load_32(block, 34)));
            let mixed = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(first, second));
            head_of_32(half_at(block, 0) * 0.125, words_to_scales(_mm256_permute4x64_epi64::<0b11_01_10_00>(mixed)))
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let entry = |lane: usize| IQ2_XXS_GRID[usize::from(block[2 + 8 * GROUP + lane])];
        // SAFETY: the caller has AVX2.
        unsafe { four_entries(entry(0), entry(1), entry(2), entry(3)) }
    }

    #[inline(always)]
    fn signs<const GROUP: usize>(block: &[u8]) -> u32 {
        even_signs(u32_at(block, 6 + 8 * GROUP))
    }
}

impl Block256 for IQ2_XS {
    const SIGNS: Signs = Signs::Apart;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { nibble_head(half_at(block, 0) * 0.125, u64_at(block, 66)) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let entry = |lane: usize| IQ2_XS_GRID[usize::from(u16_at(block, 2 + 8 * GROUP + 2 * lane) & 511)];
        // SAFETY: the caller has AVX2.
        unsafe { four_entries(entry(0), entry(1), entry(2), entry(3)) }
    }

    #[inline(always)]
    fn signs<const GROUP: usize>(block: &[u8]) -> u32 {
        let of = |lane: usize| SIGNS[usize::from(block[3 + 8 * GROUP + 2 * lane] >> 1)];
        u32::from_le_bytes([of(0), of(1), of(2), of(3)])
    }
}

impl Block256 for IQ2_S {
    const SIGNS: Signs = Signs::Apart;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { nibble_head(half_at(block, 0) * 0.125, u64_at(block, 74)) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let high = usize::from(block[66 + GROUP]);
        let entry = |lane: usize| IQ2_S_GRID[usize::from(block[2 + 4 * GROUP + lane]) | (((high >> (2 * lane)) & 3) << 8)];
        // SAFETY: the caller has AVX2.
        unsafe { four_entries(entry(0), entry(1), entry(2), entry(3)) }
    }

    #[inline(always)]
    fn signs<const GROUP: usize>(block: &[u8]) -> u32 {
        u32_at(block, 34 + 4 * GROUP)
    }
}

impl Block256 for IQ3_XXS {
    const SIGNS: Signs = Signs::Apart;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { head_of_32(half_at(block, 0) * 0.25, words_to_scales(_mm256_srli_epi32::<28>(load_32(block, 66)))) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { eight_entries(|lane| IQ3_XXS_GRID[usize::from(block[2 + 8 * GROUP + lane])]) }
    }

    #[inline(always)]
    fn signs<const GROUP: usize>(block: &[u8]) -> u32 {
        even_signs(u32_at(block, 66 + 4 * GROUP))
    }
}

impl Block256 for IQ3_S {
    const SIGNS: Signs = Signs::Apart;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { head_of_32(half_at(block, 0), odd_scales(bytes_to_words(nibbles_to_bytes(u32_at(block, 106))))) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let ninth = usize::from(block[66 + GROUP]) << 8;
        // SAFETY: the caller has AVX2.
        unsafe { eight_entries(|lane| IQ3_S_GRID[usize::from(block[2 + 8 * GROUP + lane]) | ((ninth >> lane) & 256)]) }
    }

    #[inline(always)]
    fn signs<const GROUP: usize>(block: &[u8]) -> u32 {
        u32_at(block, 74 + 4 * GROUP)
    }
}

impl Block256 for IQ1_S {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let scales = _mm_and_si128(_mm_srli_epi16::<12>(load_16(block, 34)), _mm_set1_epi16(7));
            head_of_32(half_at(block, 0) * 0.125, odd_scales(scales))
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let high = usize::from(u16_at(block, 34 + 2 * GROUP));
        let entry = |lane: usize| IQ1_GRID[usize::from(block[2 + 4 * GROUP + lane]) | (((high >> (3 * lane)) & 7) << 8)];
        let shift = if high & 0x8000 == 0 { 1 } else { -1 };
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_add_epi8(four_entries(entry(0), entry(1), entry(2), entry(3)), _mm256_set1_epi8(shift)) }
    }
}

impl Block256 for IQ1_M {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        let words = u64_at(block, 48);
        let d = (words >> 12) & 0xf | (words >> 24) & 0xf0 | (words >> 36) & 0xf00 | (words >> 48) & 0xf000;
        // Lane k of the result is three bits of word k, from each of four places: groups k, k + 4 ... of the four words.
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let words = _mm256_cvtepu16_epi64(_mm_cvtsi64_si128(words.cast_signed()));
            let spread = _mm256_or_si256(
                _mm256_or_si256(words, _mm256_slli_epi64::<13>(words)),
                _mm256_or_si256(_mm256_slli_epi64::<26>(words), _mm256_slli_epi64::<39>(words)),
            );
            let scales = _mm256_and_si256(spread, _mm256_set1_epi16(7));
            let scales = _mm256_add_epi16(_mm256_add_epi16(scales, scales), _mm256_set1_epi16(1));
            let d = _mm_cvtss_f32(two_halves(d as u32)) * 0.125;
            Head { d, scales: halves_apart(scales), dmin: 0.0, mins: _mm256_setzero_si256() }
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let high = usize::from(u16_at(block, 32 + 2 * GROUP));
        let entry = |lane: usize| IQ1_GRID[usize::from(block[4 * GROUP + lane]) | (((high >> (4 * lane)) & 7) << 8)];
        // SAFETY: the caller has AVX2.
        unsafe {
            // The top bit of each nibble, moved to the sign of 64 bits, becomes all ones (-1) or, where clear, ones (1).
            let signs = _mm256_sllv_epi64(_mm256_set1_epi64x(high as i64), _mm256_setr_epi64x(60, 56, 52, 48));
            let down = _mm256_cmpgt_epi64(_mm256_setzero_si256(), signs);
            let shifts = _mm256_or_si256(down, _mm256_set1_epi8(1));
            _mm256_add_epi8(four_entries(entry(0), entry(1), entry(2), entry(3)), shifts)
        }
    }
}

impl Block256 for IQ4_XS {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        let scales = nibbles_to_bytes(u32_at(block, 4)) | (pairs_to_bytes(u16_at(block, 2)) << 4);
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { head_of_32(half_at(block, 0), _mm_sub_epi16(bytes_to_words(scales), _mm_set1_epi16(32))) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { values_of(&IQ4_VALUES, nibbles(block, 8 + 16 * GROUP)) }
    }
}

/// Four sign codes of 7 bits as four bytes, the eighth bit making the number of set bits even.
#[inline(always)]
fn even_signs(codes: u32) -> u32 {
    let by_14 = (codes & 0x3fff) | ((codes & 0x0fff_c000) << 2);
    let by_7 = (by_14 & 0x007f_007f) | ((by_14 & 0x3f80_3f80) << 1);
    let by_4 = by_7 ^ (by_7 >> 4);
    let by_2 = by_4 ^ (by_4 >> 2);
    by_7 | (((by_2 ^ (by_2 >> 1)) & 0x0101_0101) << 7)
}

/// Eight nibbles as eight bytes.
#[inline(always)]
fn nibbles_to_bytes(nibbles: u32) -> u64 {
    let nibbles = u64::from(nibbles);
    let by_16 = (nibbles | (nibbles << 16)) & 0x0000_ffff_0000_ffff;
    let by_8 = (by_16 | (by_16 << 8)) & 0x00ff_00ff_00ff_00ff;
    (by_8 | (by_8 << 4)) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Eight pairs of bits as eight bytes.
#[inline(always)]
fn pairs_to_bytes(pairs: u16) -> u64 {
    let pairs = u64::from(pairs);
    let by_8 = (pairs | (pairs << 24)) & 0x0000_00ff_0000_00ff;
    let by_4 = (by_8 | (by_8 << 12)) & 0x000f_000f_000f_000f;
    (by_4 | (by_4 << 6)) & 0x0303_0303_0303_0303
}

/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn bytes_to_words(bytes: u64) -> __m128i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm_cvtepu8_epi16(_mm_cvtsi64_si128(bytes.cast_signed())) }
}

/// `2 s + 1` of eight i16.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn odd_scales(scales: __m128i) -> __m128i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm_add_epi16(_mm_add_epi16(scales, scales), _mm_set1_epi16(1)) }
}

/// `2 s + 1` of eight u32, as i16.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn words_to_scales(scales: __m256i) -> __m128i {
    // SAFETY: the caller has AVX2.
    unsafe { odd_scales(_mm_packus_epi32(_mm256_castsi256_si128(scales), _mm256_extracti128_si256::<1>(scales))) }
}

/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn head_of_32(d: f32, scales: __m128i) -> Head {
    // SAFETY: the caller has AVX2.
    unsafe { Head { d, scales: same_for_both_halves(scales), dmin: 0.0, mins: _mm256_setzero_si256() } }
}

/// Sixteen nibbles `s`, the low one of each byte for the first half of a group.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn nibble_head(d: f32, nibbles: u64) -> Head {
    let (first, second) = (nibbles & 0x0f0f_0f0f_0f0f_0f0f, (nibbles >> 4) & 0x0f0f_0f0f_0f0f_0f0f);
    // SAFETY: the caller has AVX2.
    unsafe {
        let scales = _mm256_set_m128i(odd_scales(bytes_to_words(second)), odd_scales(bytes_to_words(first)));
        Head { d, scales, dmin: 0.0, mins: _mm256_setzero_si256() }
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn four_entries(first: u64, second: u64, third: u64, fourth: u64) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_setr_epi64x(first.cast_signed(), second.cast_signed(), third.cast_signed(), fourth.cast_signed()) }
}

/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn eight_entries(entry: impl Fn(usize) -> u32) -> __m256i {
    let lane = |index: usize| entry(index).cast_signed();
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_setr_epi32(lane(0), lane(1), lane(2), lane(3), lane(4), lane(5), lane(6), lane(7)) }
}
