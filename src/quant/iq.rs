//! Layouts of the IQ types with blocks of 256 weights: indices into code books of whole groups of weights.
//!
//! A code book entry gives eight (IQ1, IQ2) or four (IQ3) weights at once; IQ2 and IQ3 entries are magnitudes and their
//! signs are stored apart. Scales are odd numbers `2 s + 1`; the constant factors of the format are folded into `d`,
//! which stays exact because they are powers of two.

use super::legacy::nibbles;
use super::tables::{IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, IQ4_VALUES, SIGNS};
use super::unpacked::{UnpackedBlock, f16_to_f32, half_at, u16_at, u32_at};

/// ```text
/// | d f16: 2 | 8 x ( four indices: 4 | signs and scale u32: 4 ) |
/// one pair for 32 weights; u32: four 7-bit sign codes from bit 0, scale s in bits 28-31; weights are d / 8 * (2 s + 1)
/// ```
pub(super) fn unpack_iq2_xxs(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0) * 0.125;
    for (group, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        let pair = &block[2 + 8 * group..][..8];
        let signs_and_scale = u32_at(pair, 4);
        out.scales[2 * group..][..2].fill(odd_scale(signs_and_scale >> 28));
        for (lane, quants) in quants.chunks_exact_mut(8).enumerate() {
            let entry = IQ2_XXS_GRID[usize::from(pair[lane])];
            write_signed(quants, &entry.to_le_bytes(), signs_of(signs_and_scale >> (7 * lane)));
        }
    }
}

/// ```text
/// | d f16: 2 | 32 x u16: 64 | scales: 8 |
/// u16: index in bits 0-8, sign code in bits 9-15; scales: nibble g of the field is s of group g; weights as IQ2_XXS
/// ```
pub(super) fn unpack_iq2_xs(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0) * 0.125;
    nibble_scales(&block[66..74], out);
    for (lane, quants) in out.quants.chunks_exact_mut(8).enumerate() {
        let code = u16_at(block, 2 + 2 * lane);
        let entry = IQ2_XS_GRID[usize::from(code & 511)];
        write_signed(quants, &entry.to_le_bytes(), signs_of(u32::from(code >> 9)));
    }
}

/// ```text
/// | d f16: 2 | low bytes of 32 indices: 32 | signs: 32 | high bits of the indices: 8 | scales: 8 |
/// high bits: two for index i in byte i / 4 at bit 2 (i % 4); signs: bit set means minus; scales as IQ2_XS
/// ```
pub(super) fn unpack_iq2_s(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0) * 0.125;
    nibble_scales(&block[74..82], out);
    for (lane, quants) in out.quants.chunks_exact_mut(8).enumerate() {
        let high = (block[66 + lane / 4] >> (2 * (lane % 4))) & 3;
        let entry = IQ2_S_GRID[usize::from(block[2 + lane]) | (usize::from(high) << 8)];
        write_signed(quants, &entry.to_le_bytes(), block[34 + lane]);
    }
}

/// ```text
/// | d f16: 2 | 64 indices: 64 | 8 x signs and scale u32: 32 |
/// one u32 for 32 weights, as in IQ2_XXS; weights are d / 4 * (2 s + 1)
/// ```
pub(super) fn unpack_iq3_xxs(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0) * 0.25;
    for (group, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        let signs_and_scale = u32_at(block, 66 + 4 * group);
        out.scales[2 * group..][..2].fill(odd_scale(signs_and_scale >> 28));
        for (lane, quants) in quants.chunks_exact_mut(8).enumerate() {
            let indices = &block[2 + 8 * group + 2 * lane..][..2];
            let magnitudes = pair_of_entries(IQ3_XXS_GRID[usize::from(indices[0])], IQ3_XXS_GRID[usize::from(indices[1])]);
            write_signed(quants, &magnitudes, signs_of(signs_and_scale >> (7 * lane)));
        }
    }
}

/// ```text
/// | d f16: 2 | low bytes of 64 indices: 64 | ninth bits: 8 | signs: 32 | scales: 4 |
/// ninth bits: index i in byte i / 8 at bit i % 8; scales: nibble g of the field is s of 32 weights; weights are d * (2 s + 1)
/// ```
pub(super) fn unpack_iq3_s(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0);
    for (group, scales) in out.scales.chunks_exact_mut(2).enumerate() {
        scales.fill(odd_scale(u32::from(nibble_at(&block[106..110], group))));
    }
    let index = |at: usize| usize::from(block[2 + at]) | (usize::from((block[66 + at / 8] >> (at % 8)) & 1) << 8);
    for (lane, quants) in out.quants.chunks_exact_mut(8).enumerate() {
        let magnitudes = pair_of_entries(IQ3_S_GRID[index(2 * lane)], IQ3_S_GRID[index(2 * lane + 1)]);
        write_signed(quants, &magnitudes, block[74 + lane]);
    }
}

/// ```text
/// | d f16: 2 | low bytes of 32 indices: 32 | 8 x u16: 16 |
/// u16 for 32 weights: high three bits of its four indices from bit 0, scale s in bits 12-14, bit 15: shift down, else up
/// weights are d * (2 s + 1) * (entry +- 1/8), the quants here eight times the bracket
/// ```
pub(super) fn unpack_iq1_s(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0) * 0.125;
    for (group, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        let high = u16_at(block, 34 + 2 * group);
        out.scales[2 * group..][..2].fill(odd_scale(u32::from((high >> 12) & 7)));
        for (lane, quants) in quants.chunks_exact_mut(8).enumerate() {
            let index = usize::from(block[2 + 4 * group + lane]) | (usize::from((high >> (3 * lane)) & 7) << 8);
            write_shifted(quants, index, high & 0x8000 != 0);
        }
    }
}

/// ```text
/// | low bytes of 32 indices: 32 | high nibbles of the indices: 16 | 4 x u16: 8 |
/// high nibble of index i: nibble i of the field, three bits of the index, then 1: shift down; weights as IQ1_S
/// u16 k: scales s of groups 4 k to 4 k + 3, three bits each; its top nibble is nibble k of d (f16)
/// ```
pub(super) fn unpack_iq1_m(block: &[u8], out: &mut UnpackedBlock) {
    let mut d = 0;
    for word in 0..4 {
        let scales = u16_at(block, 48 + 2 * word);
        d |= (scales >> 12) << (4 * word);
        for lane in 0..4 {
            out.scales[4 * word + lane] = odd_scale(u32::from((scales >> (3 * lane)) & 7));
        }
    }
    out.d = f16_to_f32(d) * 0.125;
    for (lane, quants) in out.quants.chunks_exact_mut(8).enumerate() {
        let high = nibble_at(&block[32..48], lane);
        write_shifted(quants, usize::from(block[lane]) | (usize::from(high & 7) << 8), high & 8 != 0);
    }
}

/// ```text
/// | d f16: 2 | high scale bits u16: 2 | low scale nibbles: 4 | nibbles: 128 |
/// scale of 32 weights g: nibble g of the low field + 16 * (bits 2 g of the high field) - 32
/// nibbles: 16 bytes for 32 weights as in IQ4_NL
/// ```
pub(super) fn unpack_iq4_xs(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 0);
    let high = u16_at(block, 2);
    for (group, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        let scale = i16::from(nibble_at(&block[4..8], group)) | (((high >> (2 * group)) & 3) << 4).cast_signed();
        out.scales[2 * group..][..2].fill(scale - 32);
        nibbles(&block[8 + 16 * group..][..16], quants, |code| IQ4_VALUES[usize::from(code)]);
    }
}

/// `2 s + 1` for a scale of at most four bits.
fn odd_scale(s: u32) -> i16 {
    ((2 * s + 1) & 31) as i16
}

/// Nibble `index` of a field, counted from the low nibble of its first byte.
fn nibble_at(bytes: &[u8], index: usize) -> u8 {
    (bytes[index / 2] >> (4 * (index % 2))) & 15
}

fn nibble_scales(bytes: &[u8], out: &mut UnpackedBlock) {
    for (group, scale) in out.scales.iter_mut().enumerate() {
        *scale = odd_scale(u32::from(nibble_at(bytes, group)));
    }
}

fn signs_of(code: u32) -> u8 {
    SIGNS[(code & 127) as usize]
}

fn pair_of_entries(first: u32, second: u32) -> [u8; 8] {
    (u64::from(first) | (u64::from(second) << 32)).to_le_bytes()
}

/// Eight magnitudes with their signs: bit `i` set makes weight `i` negative.
fn write_signed(quants: &mut [i8], magnitudes: &[u8; 8], signs: u8) {
    for (lane, (quant, magnitude)) in quants.iter_mut().zip(magnitudes).enumerate() {
        let magnitude = magnitude.cast_signed();
        *quant = if (signs >> lane) & 1 == 0 { magnitude } else { -magnitude };
    }
}

/// Eight IQ1 weights in eighths, shifted by one eighth.
fn write_shifted(quants: &mut [i8], index: usize, down: bool) {
    let shift = if down { -1 } else { 1 };
    for (quant, value) in quants.iter_mut().zip(IQ1_GRID[index].to_le_bytes()) {
        *quant = value.cast_signed() + shift;
    }
}
