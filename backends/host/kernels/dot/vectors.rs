//! Small pieces the vector kernels share: checked loads, half-precision units, horizontal sums.
//!
//! Every function here and in the kernels beside it is inlined into a function compiled for AVX2, FMA and F16C at least;
//! called elsewhere, its instructions might not exist. That is the one condition of all these `unsafe fn`s: memory is
//! read through slices and arrays alone.

use std::arch::{asm, x86_64::*};

/// Where the signs of a type's weights are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Signs {
    /// No weight code is negative.
    None,
    /// In the codes, which lie within -128..=127.
    InCodes,
    /// In a bit apart; the codes are magnitudes.
    Apart,
}

/// The 32 bytes at an offset.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn load_32(bytes: &[u8], offset: usize) -> __m256i {
    let bytes = &bytes[offset..offset + 32];
    // SAFETY: the slice has 32 bytes; the caller has AVX2.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// The 16 bytes at an offset.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn load_16(bytes: &[u8], offset: usize) -> __m128i {
    let bytes = &bytes[offset..offset + 16];
    // SAFETY: the slice has 16 bytes; the caller has AVX2.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// `(byte >> shift) & mask` for each byte; the mask must cut what comes from the neighbour: `mask <= 255 >> shift`.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn bits_of_bytes(bytes: __m256i, shift: usize, mask: u8) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_and_si256(_mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32)), _mm256_set1_epi8(mask.cast_signed())) }
}

/// A byte of ones for each set bit, in the order of the bits.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn bytes_of_bits(bits: u32) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe {
        let byte_of_lane = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
        let bit_of_lane = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits.cast_signed()), byte_of_lane);
        _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of_lane), bit_of_lane)
    }
}

/// The half-precision number at an offset.
///
/// # Safety
/// F16C.
#[inline(always)]
pub(super) unsafe fn half_at(bytes: &[u8], offset: usize) -> f32 {
    // SAFETY: the caller has F16C.
    unsafe { _mm_cvtss_f32(two_halves(u32::from(u16_at(bytes, offset)))) }
}

/// Two half-precision numbers, the low one in lane 0; the other lanes are zero.
///
/// The move is spelled out because the compiler would insert the 16 bits into some register with free lanes instead. It takes
/// that of the running sum, which makes each block wait for the one before it: 3 GB/s instead of 10 for `Q4_0`.
///
/// # Safety
/// F16C.
#[inline(always)]
pub(super) unsafe fn two_halves(bits: u32) -> __m128 {
    let register: __m128i;
    // SAFETY: the instruction writes its output alone; the caller has F16C and so AVX.
    unsafe {
        asm!("vmovd {}, {:e}", lateout(xmm_reg) register, in(reg) bits, options(pure, nomem, nostack, preserves_flags));
        _mm_cvtph_ps(register)
    }
}

/// The sum of eight lanes.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn sum_8(lanes: __m256) -> f32 {
    // SAFETY: the caller has AVX2.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }
}

#[inline(always)]
pub(super) fn u16_at(bytes: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([bytes[offset], bytes[offset + 1]])
}

#[inline(always)]
pub(super) fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([bytes[offset], bytes[offset + 1], bytes[offset + 2], bytes[offset + 3]])
}

#[inline(always)]
pub(super) fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from(u32_at(bytes, offset)) | (u64::from(u32_at(bytes, offset + 4)) << 32)
}
