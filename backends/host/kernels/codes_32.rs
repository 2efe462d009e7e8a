//! Codes of the types with blocks of 32 weights. Each function writes a block's codes and returns its scale and min.

use super::codes::{f16_at, u32_at};
use crate::quant::tables::{IQ4_VALUES, MXFP4_VALUES};

/// `d | 32 x i8`.
#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], codes: &mut [i8; 32]) -> (f32, f32) {
    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
        *code = byte.cast_signed();
    }
    (f16_at(block, 0), 0.0)
}

/// `d | qs[16]`: 4-bit codes - 8.
#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], codes: &mut [i8; 32]) -> (f32, f32) {
    nibbles::<2, 18>(block, codes, 8);
    (f16_at(block, 0), 0.0)
}

/// `d | m | qs[16]`: 4-bit codes.
#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], codes: &mut [i8; 32]) -> (f32, f32) {
    nibbles::<4, 20>(block, codes, 0);
    (f16_at(block, 0), f16_at(block, 2))
}

/// `d | fifth bits[4] | qs[16]`: 5-bit codes - 16.
#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], codes: &mut [i8; 32]) -> (f32, f32) {
    nibbles::<6, 22>(block, codes, 16);
    add_fifth_bit(u32_at(block, 2), codes);
    (f16_at(block, 0), 0.0)
}

/// `d | m | fifth bits[4] | qs[16]`: 5-bit codes.
#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], codes: &mut [i8; 32]) -> (f32, f32) {
    nibbles::<8, 24>(block, codes, 0);
    add_fifth_bit(u32_at(block, 4), codes);
    (f16_at(block, 0), f16_at(block, 2))
}

/// `d | qs[16]`: 4-bit codes of a table.
#[inline(always)]
pub(super) fn iq4_nl<const VECTOR: bool>(block: &[u8; 18], codes: &mut [i8; 32]) -> (f32, f32) {
    look_up::<VECTOR>(&block[2..], &IQ4_VALUES, codes);
    (f16_at(block, 0), 0.0)
}

/// `exponent | qs[16]`: 4-bit floats, doubled by the table and halved by the scale.
#[inline(always)]
pub(super) fn mxfp4<const VECTOR: bool>(block: &[u8; 17], codes: &mut [i8; 32]) -> (f32, f32) {
    look_up::<VECTOR>(&block[1..], &MXFP4_VALUES, codes);
    (half_power_of_two(block[0]), 0.0)
}

/// 16 bytes from `FIRST` on: low nibbles are weights 0..16, high nibbles 16..32; `bias` is taken off.
#[inline(always)]
fn nibbles<const FIRST: usize, const BYTES: usize>(block: &[u8; BYTES], codes: &mut [i8; 32], bias: i8) {
    for index in 0..16 {
        let byte = block[FIRST + index];
        codes[index] = (byte & 15).cast_signed() - bias;
        codes[index + 16] = (byte >> 4).cast_signed() - bias;
    }
}

#[inline(always)]
fn add_fifth_bit(bits: u32, codes: &mut [i8; 32]) {
    for (index, code) in codes.iter_mut().enumerate() {
        *code += ((((bits >> index) & 1) as u8) << 4).cast_signed();
    }
}

/// 16 bytes of two 4-bit codes each (low: 0..16, high: 16..32), replaced by their table values.
#[inline(always)]
pub(super) fn look_up<const VECTOR: bool>(packed: &[u8], table: &[i8; 16], codes: &mut [i8; 32]) {
    #[cfg(target_arch = "x86_64")]
    if VECTOR {
        use std::arch::x86_64::{_mm_and_si128, _mm_loadu_si128, _mm_set1_epi8, _mm_shuffle_epi8, _mm_srli_epi16, _mm_storeu_si128};
        assert!(packed.len() >= 16);
        // SAFETY: VECTOR is set only inside functions compiled for AVX2; 16 bytes are read from `packed` and from the
        // table, and the two halves of the 32 codes are written.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            let packed = _mm_loadu_si128(packed.as_ptr().cast());
            let mask = _mm_set1_epi8(15);
            let low = _mm_shuffle_epi8(table, _mm_and_si128(packed, mask));
            let high = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
            _mm_storeu_si128(codes.as_mut_ptr().cast(), low);
            _mm_storeu_si128(codes.as_mut_ptr().add(16).cast(), high);
        }
        return;
    }
    for index in 0..16 {
        let byte = packed[index];
        codes[index] = table[usize::from(byte & 15)];
        codes[index + 16] = table[usize::from(byte >> 4)];
    }
}

/// 2^(exponent - 128): half the power of two that an E8M0 byte stands for, because the codes are doubled.
#[inline(always)]
fn half_power_of_two(exponent: u8) -> f32 {
    if exponent < 2 { f32::from_bits(0x0020_0000 << exponent) } else { f32::from_bits((u32::from(exponent) - 1) << 23) }
}
