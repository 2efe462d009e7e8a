//! Layouts of the K types: blocks of 256 weights with integer scales (and mins) inside the block.
//!
//! The low bits of the quants lie in planes: a byte holds one weight of each plane, and the planes of one run of bytes
//! follow each other in the order of the weights.

use super::unpacked::{UnpackedBlock, half_at};

/// ```text
/// | scales: 16 | 2-bit quants: 64 | d f16: 2 | dmin f16: 2 |
/// scales: byte g is group g, low nibble scale, high nibble min
/// quants: two runs of 32 bytes, each of four planes of 32 weights (bits 0-1, 2-3, 4-5, 6-7)
/// ```
pub(super) fn unpack_q2_k(block: &[u8], out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (half_at(block, 80), half_at(block, 82));
    for (group, byte) in block[..16].iter().enumerate() {
        out.scales[group] = i16::from(byte & 15);
        out.mins[group] = i16::from(byte >> 4);
    }
    two_bit_planes(&block[16..80], &mut out.quants);
}

/// ```text
/// | third bits: 32 | 2-bit quants: 64 | scales: 12 | d f16: 2 |
/// quants: as Q2_K, minus 4 where the third bit is clear; bit p of byte l belongs to weight 32 p + l
/// scales: 6 bits minus 32; group g has its low four bits in nibble g / 8 of byte g % 8,
///         and its high two bits in byte 8 + g % 4 at bit 2 (g / 4)
/// ```
pub(super) fn unpack_q3_k(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 108);
    let scales = &block[96..108];
    for (group, scale) in out.scales.iter_mut().enumerate() {
        let low = (scales[group % 8] >> (4 * (group / 8))) & 15;
        let high = (scales[8 + group % 4] >> (2 * (group / 4))) & 3;
        *scale = i16::from(low | (high << 4)) - 32;
    }
    two_bit_planes(&block[32..96], &mut out.quants);
    for (plane, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        for (quant, bits) in quants.iter_mut().zip(&block[..32]) {
            *quant -= if (bits >> plane) & 1 == 0 { 4 } else { 0 };
        }
    }
}

/// ```text
/// | d f16: 2 | dmin f16: 2 | scales and mins: 12 | nibbles: 128 |
/// nibbles: four runs of 32 bytes, each of two planes of 32 weights (low nibbles, then high)
/// ```
pub(super) fn unpack_q4_k(block: &[u8], out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (half_at(block, 0), half_at(block, 2));
    scales_and_mins(&block[4..16], out);
    nibble_planes::<32>(&block[16..144], &mut out.quants);
}

/// ```text
/// | d f16: 2 | dmin f16: 2 | scales and mins: 12 | fifth bits: 32 | nibbles: 128 |
/// fifth bits: bit p of byte l belongs to weight 32 p + l; the rest as Q4_K
/// ```
pub(super) fn unpack_q5_k(block: &[u8], out: &mut UnpackedBlock) {
    (out.d, out.dmin) = (half_at(block, 0), half_at(block, 2));
    scales_and_mins(&block[4..16], out);
    nibble_planes::<32>(&block[48..176], &mut out.quants);
    for (plane, quants) in out.quants.chunks_exact_mut(32).enumerate() {
        for (quant, bits) in quants.iter_mut().zip(&block[16..48]) {
            *quant |= (((bits >> plane) & 1) << 4).cast_signed();
        }
    }
}

/// ```text
/// | nibbles: 128 | 2-bit high parts: 64 | i8 scales: 16 | d f16: 2 |
/// nibbles: two runs of 64 bytes, each of two planes of 64 weights
/// high parts: two runs of 32 bytes, each of four planes of 32 weights; quant = nibble + 16 * high - 32
/// ```
pub(super) fn unpack_q6_k(block: &[u8], out: &mut UnpackedBlock) {
    out.d = half_at(block, 208);
    for (scale, byte) in out.scales.iter_mut().zip(&block[192..208]) {
        *scale = i16::from(byte.cast_signed());
    }
    let mut high = [0; 256];
    two_bit_planes(&block[128..192], &mut high);
    nibble_planes::<64>(&block[..128], &mut out.quants);
    for (quant, high) in out.quants.iter_mut().zip(&high) {
        *quant = (*quant | (high << 4)) - 32;
    }
}

/// The 6-bit scales and mins that `Q4_K` and `Q5_K` share, for eight groups of 32 weights `s`:
/// ```text
/// bytes 0-3:  low 6 bits: scale of s = byte        high 2 bits: bits 4-5 of the scale of s = byte + 4
/// bytes 4-7:  low 6 bits: min of s = byte - 4      high 2 bits: bits 4-5 of the min of s = byte
/// bytes 8-11: low nibble: bits 0-3 of the scale of s = byte - 4; high nibble: the same of the min
/// ```
fn scales_and_mins(bytes: &[u8], out: &mut UnpackedBlock) {
    for half in 0..4 {
        let (scale, min, rest) = (bytes[half], bytes[half + 4], bytes[half + 8]);
        set_pair(out, half, scale & 63, min & 63);
        set_pair(out, half + 4, (rest & 15) | ((scale >> 6) << 4), (rest >> 4) | ((min >> 6) << 4));
    }
}

fn set_pair(out: &mut UnpackedBlock, group_of_32: usize, scale: u8, min: u8) {
    out.scales[2 * group_of_32..][..2].fill(i16::from(scale));
    out.mins[2 * group_of_32..][..2].fill(i16::from(min));
}

/// 256 two-bit numbers from two runs of 32 bytes.
fn two_bit_planes(bytes: &[u8], quants: &mut [i8; 256]) {
    for (plane, quants) in quants.chunks_exact_mut(32).enumerate() {
        let run = &bytes[32 * (plane / 4)..][..32];
        for (quant, byte) in quants.iter_mut().zip(run) {
            *quant = ((byte >> (2 * (plane % 4))) & 3).cast_signed();
        }
    }
}

/// 256 nibbles from runs of `RUN` bytes.
fn nibble_planes<const RUN: usize>(bytes: &[u8], quants: &mut [i8; 256]) {
    for (plane, quants) in quants.chunks_exact_mut(RUN).enumerate() {
        let run = &bytes[RUN * (plane / 2)..][..RUN];
        for (quant, byte) in quants.iter_mut().zip(run) {
            *quant = ((byte >> (4 * (plane % 2))) & 15).cast_signed();
        }
    }
}
