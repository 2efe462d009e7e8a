//! Layouts of the types with blocks of 32 weights: one half-precision scale (and min) for 4, 5 or 8-bit quants.
//!
//! In all 4-bit parts byte `j` holds weight `j` in its low and weight `j + 16` in its high nibble.

use super::tables::{IQ4_VALUES, MXFP4_VALUES};
use super::unpacked::{UnpackedBlock, half_at, mxfp4_unit, u32_at};

const SCALES: [i16; 2] = [1, 1];

/// ```text
/// | d f16: 2 | nibbles: 16 |     quant = nibble - 8
/// ```
pub(super) fn unpack_q4_0(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), None);
    nibbles(&block[2..18], &mut out.quants, |code| code.cast_signed() - 8);
}

/// ```text
/// | d f16: 2 | m f16: 2 | nibbles: 16 |     quant = nibble, dmin = -m
/// ```
pub(super) fn unpack_q4_1(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), Some(half_at(block, 2)));
    nibbles(&block[4..20], &mut out.quants, u8::cast_signed);
}

/// ```text
/// | d f16: 2 | fifth bits: 4 | nibbles: 16 |     quant = nibble + 16 * (bit i of the fifth bits) - 16
/// ```
pub(super) fn unpack_q5_0(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), None);
    nibbles(&block[6..22], &mut out.quants, u8::cast_signed);
    add_fifth_bits(u32_at(block, 2), &mut out.quants);
    for quant in &mut out.quants[..32] {
        *quant -= 16;
    }
}

/// ```text
/// | d f16: 2 | m f16: 2 | fifth bits: 4 | nibbles: 16 |     quant = nibble + 16 * (bit i of the fifth bits), dmin = -m
/// ```
pub(super) fn unpack_q5_1(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), Some(half_at(block, 2)));
    nibbles(&block[8..24], &mut out.quants, u8::cast_signed);
    add_fifth_bits(u32_at(block, 4), &mut out.quants);
}

/// ```text
/// | d f16: 2 | i8 quants: 32 |
/// ```
pub(super) fn unpack_q8_0(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), None);
    for (quant, byte) in out.quants[..32].iter_mut().zip(&block[2..34]) {
        *quant = byte.cast_signed();
    }
}

/// ```text
/// | d f16: 2 | nibbles: 16 |     quant = IQ4_VALUES[nibble]
/// ```
pub(super) fn unpack_iq4_nl(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, half_at(block, 0), None);
    nibbles(&block[2..18], &mut out.quants, |code| IQ4_VALUES[usize::from(code)]);
}

/// ```text
/// | exponent: 1 | nibbles: 16 |     quant = MXFP4_VALUES[nibble]
/// ```
pub(super) fn unpack_mxfp4(block: &[u8], out: &mut UnpackedBlock) {
    set_units(out, mxfp4_unit(block[0]), None);
    nibbles(&block[1..17], &mut out.quants, |code| MXFP4_VALUES[usize::from(code)]);
}

/// The format adds `m`; an unpacked block subtracts its min, hence the minus sign.
fn set_units(out: &mut UnpackedBlock, d: f32, m: Option<f32>) {
    out.d = d;
    out.scales[..2].copy_from_slice(&SCALES);
    if let Some(m) = m {
        out.dmin = -m;
        out.mins[..2].copy_from_slice(&SCALES);
    }
}

/// Writes 32 quants from 16 bytes, low nibbles first.
pub(super) fn nibbles(bytes: &[u8], quants: &mut [i8], value: impl Fn(u8) -> i8) {
    let (low, high) = quants.split_at_mut(16);
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

#[allow(clippy::cast_possible_truncation, reason = "one bit at place 4")]
fn add_fifth_bits(bits: u32, quants: &mut [i8]) {
    for (index, quant) in quants[..32].iter_mut().enumerate() {
        *quant |= (((bits >> index) & 1) << 4) as i8;
    }
}
