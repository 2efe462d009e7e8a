//! Weights of the K types as bytes of registers. `quant::k_quants` draws the layouts.

use std::arch::x86_64::*;

use super::vector_256::{Block256, Head, halves_apart, same_for_both_halves};
use super::vectors::{Signs, bits_of_bytes, half_at, load_16, load_32, u32_at, u64_at};
use super::weights::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};

impl Block256 for Q2_K {
    const SIGNS: Signs = Signs::None;
    const MINS: bool = true;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let (bytes, low) = (load_16(block, 0), _mm_set1_epi8(15));
            let scales = _mm256_cvtepu8_epi16(_mm_and_si128(bytes, low));
            let mins = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(bytes), low));
            Head { d: half_at(block, 80), scales: halves_apart(scales), dmin: half_at(block, 82), mins }
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { bits_of_bytes(load_32(block, 16 + 32 * (GROUP / 4)), 2 * (GROUP % 4), 3) }
    }
}

impl Block256 for Q3_K {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        let (low, high) = (u64_at(block, 96), u64::from(u32_at(block, 104)));
        let high_bits = |shift: u32| ((high >> shift) & 0x0303_0303) | (((high >> (shift + 2)) & 0x0303_0303) << 32);
        let first = (low & 0x0f0f_0f0f_0f0f_0f0f) | (high_bits(0) << 4);
        let second = ((low >> 4) & 0x0f0f_0f0f_0f0f_0f0f) | (high_bits(4) << 4);
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let scales = _mm256_cvtepu8_epi16(_mm_set_epi64x(second.cast_signed(), first.cast_signed()));
            let scales = _mm256_sub_epi16(scales, _mm256_set1_epi16(32));
            Head { d: half_at(block, 108), scales: halves_apart(scales), dmin: 0.0, mins: _mm256_setzero_si256() }
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe {
            let low = bits_of_bytes(load_32(block, 32 + 32 * (GROUP / 4)), 2 * (GROUP % 4), 3);
            let third = _mm256_slli_epi16::<2>(bits_of_bytes(load_32(block, 0), GROUP, 1));
            _mm256_sub_epi8(_mm256_or_si256(low, third), _mm256_set1_epi8(4))
        }
    }
}

impl Block256 for Q4_K {
    const SIGNS: Signs = Signs::None;
    const MINS: bool = true;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { six_bit_head(block) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { bits_of_bytes(load_32(block, 16 + 32 * (GROUP / 2)), 4 * (GROUP % 2), 15) }
    }

    #[inline(always)]
    unsafe fn two_codes<const LOW: usize, const HIGH: usize>(block: &[u8]) -> __m512i {
        // SAFETY: the caller has AVX-512 F, BW and VL.
        unsafe { low_and_high_nibbles(load_32(block, 16 + 16 * LOW)) }
    }
}

impl Block256 for Q5_K {
    const SIGNS: Signs = Signs::None;
    const MINS: bool = true;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe { six_bit_head(block) }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe {
            let low = bits_of_bytes(load_32(block, 48 + 32 * (GROUP / 2)), 4 * (GROUP % 2), 15);
            let fifth = _mm256_slli_epi16::<4>(bits_of_bytes(load_32(block, 16), GROUP, 1));
            _mm256_or_si256(low, fifth)
        }
    }
}

impl Block256 for Q6_K {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn head(block: &[u8]) -> Head {
        // SAFETY: the caller has AVX2 and F16C.
        unsafe {
            let scales = _mm256_cvtepi8_epi16(load_16(block, 192));
            Head { d: half_at(block, 208), scales: halves_apart(scales), dmin: 0.0, mins: _mm256_setzero_si256() }
        }
    }

    #[inline(always)]
    unsafe fn codes<const GROUP: usize>(block: &[u8]) -> __m256i {
        let (run, plane) = (GROUP / 4, GROUP % 4);
        // SAFETY: the caller has AVX2.
        unsafe {
            let low = bits_of_bytes(load_32(block, 64 * run + 32 * (plane % 2)), 4 * (plane / 2), 15);
            let high = _mm256_slli_epi16::<4>(bits_of_bytes(load_32(block, 128 + 32 * run), 2 * plane, 3));
            _mm256_sub_epi8(_mm256_or_si256(low, high), _mm256_set1_epi8(32))
        }
    }
}

/// The low nibbles of 32 bytes, then the high ones.
///
/// # Safety
/// AVX-512 F and BW.
#[inline(always)]
unsafe fn low_and_high_nibbles(bytes: __m256i) -> __m512i {
    // SAFETY: the caller has the instructions.
    unsafe {
        let shifts = _mm512_inserti64x4::<1>(_mm512_setzero_si512(), _mm256_set1_epi16(4));
        _mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i64x4(bytes), shifts), _mm512_set1_epi8(15))
    }
}

/// The head that `Q4_K` and `Q5_K` share: eight scales and mins of 6 bits in 12 bytes, four of a kind in one word.
///
/// # Safety
/// AVX2 and F16C.
#[inline(always)]
unsafe fn six_bit_head(block: &[u8]) -> Head {
    let (scales, mins, rest) = (u32_at(block, 4), u32_at(block, 8), u32_at(block, 12));
    let high_scales = (rest & 0x0f0f_0f0f) | ((scales >> 2) & 0x3030_3030);
    let high_mins = ((rest >> 4) & 0x0f0f_0f0f) | ((mins >> 2) & 0x3030_3030);
    let scales = u64::from(scales & 0x3f3f_3f3f) | (u64::from(high_scales) << 32);
    let mins = u64::from(mins & 0x3f3f_3f3f) | (u64::from(high_mins) << 32);
    // SAFETY: the caller has AVX2 and F16C.
    unsafe {
        let scales = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(scales.cast_signed()));
        let mins = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(mins.cast_signed()));
        let mins = _mm256_set_m128i(_mm_unpackhi_epi16(mins, mins), _mm_unpacklo_epi16(mins, mins));
        Head { d: half_at(block, 0), scales: same_for_both_halves(scales), dmin: half_at(block, 2), mins }
    }
}
