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

/// The 64 bytes at an offset.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
pub(super) unsafe fn load_64(bytes: &[u8], offset: usize) -> __m512i {
    let bytes = &bytes[offset..offset + 64];
    // SAFETY: the slice has 64 bytes; the caller has AVX-512 F.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Fetches the `bytes` bytes that lie `ahead` bytes behind the beginning of `blocks`.
///
/// Short rows read side by side are a pattern that the processor does not foresee by itself.
#[inline(always)]
pub(super) fn prefetch_behind(blocks: &[u8], bytes: usize, ahead: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: a prefetch reads nothing and never faults, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(blocks.as_ptr().wrapping_add(ahead + line).cast()) };
    }
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

/// Sixteen lanes as eight, lane i joined with lane i + 8.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
pub(super) unsafe fn halve(lanes: __m512) -> __m256 {
    // SAFETY: the caller has AVX-512 F.
    unsafe {
        let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(lanes)));
        _mm256_add_ps(_mm512_castps512_ps256(lanes), upper)
    }
}

/// The sum of eight lanes of each of four registers, with the bits that [`sum_8`] gives.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn sums_of_four(registers: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the caller has AVX2; four f32 are written to an array of four.
    unsafe {
        let four = |lanes: __m256| _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
        let [first, second, third, fourth] = registers;
        let (first, second, third, fourth) = (four(first), four(second), four(third), four(fourth));
        let (low_12, low_34) = (_mm_unpacklo_ps(first, second), _mm_unpacklo_ps(third, fourth));
        let (high_12, high_34) = (_mm_unpackhi_ps(first, second), _mm_unpackhi_ps(third, fourth));
        let even = _mm_add_ps(_mm_movelh_ps(low_12, low_34), _mm_movelh_ps(high_12, high_34));
        let odd = _mm_add_ps(_mm_movehl_ps(low_34, low_12), _mm_movehl_ps(high_34, high_12));
        let mut sums = [0.0; 4];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(even, odd));
        sums
    }
}

/// The sum of the sixteen lanes of each register; a sum does not depend on how many there are.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
pub(super) unsafe fn sums_of_16<const N: usize>(registers: [__m512; N]) -> [f32; N] {
    // SAFETY: the caller has AVX-512 F and so AVX2.
    unsafe {
        let mut halves = [_mm256_setzero_ps(); N];
        for (half, register) in halves.iter_mut().zip(registers) {
            *half = halve(register);
        }
        sums_of(halves)
    }
}

/// The sum of the lanes of each register; a sum does not depend on how many there are.
///
/// # Safety
/// AVX2.
#[inline(always)]
pub(super) unsafe fn sums_of<const N: usize>(registers: [__m256; N]) -> [f32; N] {
    let mut sums = [0.0; N];
    let (fours, rest) = registers.as_chunks::<4>();
    let (sum_fours, sum_rest) = sums.as_chunks_mut::<4>();
    for (sums, registers) in sum_fours.iter_mut().zip(fours) {
        // SAFETY: the caller has AVX2.
        *sums = unsafe { sums_of_four(*registers) };
    }
    for (sum, register) in sum_rest.iter_mut().zip(rest) {
        // SAFETY: as above.
        *sum = unsafe { sum_8(*register) };
    }
    sums
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
