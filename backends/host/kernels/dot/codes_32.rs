//! Weights of the types with blocks of 32 as 32 bytes of a register. `quant::legacy` draws the layouts.

use std::arch::x86_64::*;

use super::vector_32::Block32;
use super::vectors::{Signs, bytes_of_bits, load_16, load_32, u32_at};
use super::weights::{IQ4_NL, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use crate::quant::mxfp4_unit;
use crate::quant::tables::{IQ4_VALUES, MXFP4_VALUES};

impl Block32 for Q4_0 {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_sub_epi8(nibbles(block, 2), _mm256_set1_epi8(8)) }
    }
}

impl Block32 for Q4_1 {
    const SIGNS: Signs = Signs::None;
    const ADDED: Option<usize> = Some(2);

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { nibbles(block, 4) }
    }
}

impl Block32 for Q5_0 {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // A clear fifth bit means minus 16, which sets the four high bits of the nibble's byte.
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_or_si256(nibbles(block, 6), _mm256_andnot_si256(bytes_of_bits(u32_at(block, 2)), _mm256_set1_epi8(-16))) }
    }
}

impl Block32 for Q5_1 {
    const SIGNS: Signs = Signs::None;
    const ADDED: Option<usize> = Some(2);

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_or_si256(nibbles(block, 8), _mm256_and_si256(bytes_of_bits(u32_at(block, 4)), _mm256_set1_epi8(16))) }
    }
}

impl Block32 for Q8_0 {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { load_32(block, 2) }
    }
}

impl Block32 for IQ4_NL {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { values_of(&IQ4_VALUES, nibbles(block, 2)) }
    }
}

impl Block32 for MXFP4 {
    const SIGNS: Signs = Signs::InCodes;

    #[inline(always)]
    unsafe fn codes(block: &[u8]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { values_of(&MXFP4_VALUES, nibbles(block, 1)) }
    }

    #[inline(always)]
    unsafe fn units(first: &[u8], second: &[u8]) -> __m128 {
        // SAFETY: the caller has more than SSE.
        unsafe { _mm_setr_ps(mxfp4_unit(first[0]), mxfp4_unit(second[0]), 0.0, 0.0) }
    }
}

/// 32 nibbles of 16 bytes: the low ones, then the high ones.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn nibbles(block: &[u8], offset: usize) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let bytes = load_16(block, offset);
        _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes), _mm256_set1_epi8(15))
    }
}

/// The value of each 4-bit code.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn values_of(table: &[i8; 16], codes: __m256i) -> __m256i {
    // SAFETY: the caller has AVX2 and the table has 16 bytes.
    unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), codes) }
}
