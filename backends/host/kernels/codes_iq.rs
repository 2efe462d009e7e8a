//! Codes of the IQ types with code books: an entry gives four or eight weights at once, signs are stored apart.
//!
//! Factors of the format that are powers of two go into the scale, where they are exact.

use super::codes::{CodeChunk, f16_at, f16_to_f32, u16_at, u32_at};
use super::codes_k::whole;
use crate::quant::tables::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, SIGNS};

/// `d | 8 x (four indices, u32 of four 7-bit sign codes and a 4-bit scale)`.
#[inline(always)]
pub(super) fn iq2_xxs<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<66>(blocks);
    let d = f16_at(block, 0) * 0.125;
    for group in 0..8 {
        let packed = u32_at(block, 2 + 8 * group + 4);
        let entries = std::array::from_fn(|lane| IQ2_XXS_GRID[usize::from(block[2 + 8 * group + lane])]);
        chunk.scales[group] = d * odd(packed >> 28);
        write_signed::<VECTOR>(chunk, group, eights(entries), sign_codes(packed));
    }
}

/// `d | 32 x u16 (9-bit index, 7-bit sign code) | scales[8]`: a 4-bit scale for each 16 weights.
#[inline(always)]
pub(super) fn iq2_xs<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<74>(blocks);
    let d = f16_at(block, 0) * 0.125;
    nibble_scales(d, &block[66..], chunk);
    for group in 0..8 {
        let words: [u16; 4] = std::array::from_fn(|lane| u16_at(block, 2 + 8 * group + 2 * lane));
        let signs = words.map(|word| SIGNS[usize::from(word >> 9)]);
        let entries = words.map(|word| IQ2_XS_GRID[usize::from(word & 511)]);
        write_signed::<VECTOR>(chunk, group, eights(entries), u32::from_le_bytes(signs));
    }
}

/// `d | low index bytes[32] | sign bytes[32] | high index bits[8] | scales[8]`.
#[inline(always)]
pub(super) fn iq2_s<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<82>(blocks);
    let d = f16_at(block, 0) * 0.125;
    nibble_scales(d, &block[74..], chunk);
    for group in 0..8 {
        let high = usize::from(block[66 + group]);
        let entries = std::array::from_fn(|lane| IQ2_S_GRID[usize::from(block[2 + 4 * group + lane]) | (high << (8 - 2 * lane) & 0x300)]);
        write_signed::<VECTOR>(chunk, group, eights(entries), u32_at(block, 34 + 4 * group));
    }
}

/// `d | indices[64] | 8 x u32 of four 7-bit sign codes and a 4-bit scale`.
#[inline(always)]
pub(super) fn iq3_xxs<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<98>(blocks);
    let d = f16_at(block, 0) * 0.25;
    for group in 0..8 {
        let packed = u32_at(block, 66 + 4 * group);
        let entries = std::array::from_fn(|lane| IQ3_XXS_GRID[usize::from(block[2 + 8 * group + lane])]);
        chunk.scales[group] = d * odd(packed >> 28);
        write_signed::<VECTOR>(chunk, group, fours(entries), sign_codes(packed));
    }
}

/// `d | low index bytes[64] | ninth index bits[8] | sign bytes[32] | scales[4]`.
#[inline(always)]
pub(super) fn iq3_s<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<110>(blocks);
    let d = f16_at(block, 0);
    for group in 0..8 {
        let high = usize::from(block[66 + group]);
        let entries = std::array::from_fn(|lane| IQ3_S_GRID[usize::from(block[2 + 8 * group + lane]) | (high << (8 - lane) & 0x100)]);
        chunk.scales[group] = d * odd(u32::from(block[106 + group / 2] >> (4 * (group % 2)) & 15));
        write_signed::<VECTOR>(chunk, group, fours(entries), u32_at(block, 74 + 4 * group));
    }
}

/// `d | low index bytes[32] | 8 x u16 (four 3-bit index tops, 3-bit scale, sign of the shift)`.
///
/// Every weight is shifted by an eighth: codes are eight times the entry plus or minus one.
#[inline(always)]
pub(super) fn iq1_s(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<50>(blocks);
    let d = f16_at(block, 0) * 0.125;
    for group in 0..8 {
        let word = u16_at(block, 34 + 2 * group);
        chunk.scales[group] = d * odd(u32::from(word >> 12 & 7));
        let shift = if word & 0x8000 != 0 { -1 } else { 1 };
        for lane in 0..4 {
            let top = usize::from(word >> (3 * lane) & 7) << 8;
            write_shifted(chunk, 4 * group + lane, usize::from(block[2 + 4 * group + lane]) | top, shift);
        }
    }
}

/// `low index bytes[32] | 16 x u8 (two of: 3-bit index top, sign of the shift) | 4 x u16 (four 3-bit scales, a nibble of d)`.
#[inline(always)]
pub(super) fn iq1_m(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<56>(blocks);
    let words: [u16; 4] = std::array::from_fn(|word| u16_at(block, 48 + 2 * word));
    let bits = words.iter().enumerate().map(|(place, word)| (word >> 12) << (4 * place)).sum::<u16>();
    let d = f16_to_f32(bits) * 0.125;
    for half_group in 0..16 {
        chunk.scales[half_group] = d * odd(u32::from(words[half_group / 4] >> (3 * (half_group % 4)) & 7));
        let tops = block[32 + half_group];
        for lane in 0..2 {
            let nibble = tops >> (4 * lane);
            let index = usize::from(block[2 * half_group + lane]) | usize::from(nibble & 7) << 8;
            write_shifted(chunk, 2 * half_group + lane, index, if nibble & 8 != 0 { -1 } else { 1 });
        }
    }
}

/// Scales are odd numbers: 2 s + 1.
#[inline(always)]
fn odd(scale: u32) -> f32 {
    (2 * scale + 1) as f32
}

/// A 4-bit scale for each of 16 groups of 16 weights.
#[inline(always)]
fn nibble_scales(d: f32, packed: &[u8], chunk: &mut CodeChunk) {
    for (group, scale) in chunk.scales.iter_mut().enumerate() {
        *scale = d * odd(u32::from(packed[group / 2] >> (4 * (group % 2)) & 15));
    }
}

/// The sign bits of 32 weights from four 7-bit codes.
#[inline(always)]
fn sign_codes(packed: u32) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|lane| SIGNS[(packed >> (7 * lane) & 127) as usize]))
}

#[inline(always)]
fn eights(entries: [u64; 4]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.as_chunks_mut::<8>().0.iter_mut().zip(entries).for_each(|(bytes, entry)| *bytes = entry.to_le_bytes());
    bytes
}

#[inline(always)]
fn fours(entries: [u32; 8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.as_chunks_mut::<4>().0.iter_mut().zip(entries).for_each(|(bytes, entry)| *bytes = entry.to_le_bytes());
    bytes
}

#[inline(always)]
fn write_shifted(chunk: &mut CodeChunk, eight: usize, index: usize, shift: i8) {
    let entry = IQ1_GRID[index].to_le_bytes();
    for (code, value) in chunk.codes[8 * eight..8 * eight + 8].iter_mut().zip(entry) {
        *code = value.cast_signed() + shift;
    }
}

/// Writes 32 magnitudes as codes; a set bit of `signs` means minus.
#[inline(always)]
fn write_signed<const VECTOR: bool>(chunk: &mut CodeChunk, group: usize, magnitudes: [u8; 32], signs: u32) {
    let codes = &mut chunk.codes[32 * group..32 * group + 32];
    #[cfg(target_arch = "x86_64")]
    if VECTOR {
        use std::arch::x86_64::*;
        // SAFETY: VECTOR is set only inside functions compiled for AVX2; 32 bytes are read and written.
        unsafe {
            let magnitudes = _mm256_loadu_si256(magnitudes.as_ptr().cast());
            // Byte i of each 8-byte run selects bit i of the run's sign byte.
            let selected_bits = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let own_byte = _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
            let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(signs.cast_signed()), own_byte);
            let minus = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, selected_bits), selected_bits);
            let signed = _mm256_sub_epi8(_mm256_xor_si256(magnitudes, minus), minus);
            _mm256_storeu_si256(codes.as_mut_ptr().cast(), signed);
        }
        return;
    }
    for (lane, (code, magnitude)) in codes.iter_mut().zip(magnitudes).enumerate() {
        let magnitude = magnitude.cast_signed();
        *code = if (signs >> lane) & 1 != 0 { -magnitude } else { magnitude };
    }
}
