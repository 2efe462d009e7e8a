//! One block of weights as plain integers: the form that dequantisation and the scalar kernels share.
//!
//! Every quantised type stores `weight = (d * scale) * quant - (dmin * min)`, with a scale and a min for each group of
//! 16 weights. The types differ only in where the bits lie, so one `unpack` function per type is the single description
//! of its layout, and one formula serves them all. No information is lost: each part is exact.
//!
//! In the drawings a box is a field with its size in bytes and fields follow each other without gaps; numbers of more
//! than one byte are little-endian. `group` counts groups of 16 weights unless another size is named.

use half::f16;

use super::{QuantType, iq, k_quants, legacy};

/// Weights in the largest block.
pub const MAX_BLOCK_LEN: usize = 256;
/// Weights that share a scale in an unpacked block.
pub const GROUP_LEN: usize = 16;

/// A block as integers. A block of 32 weights uses the first 32 quants and the first two groups.
#[derive(Clone, Debug, PartialEq)]
pub struct UnpackedBlock {
    /// The quants in the order of the weights.
    pub quants: [i8; MAX_BLOCK_LEN],
    /// One scale for each group of 16 weights.
    pub scales: [i16; MAX_BLOCK_LEN / GROUP_LEN],
    /// One min for each group of 16 weights; zero in types without mins.
    pub mins: [i16; MAX_BLOCK_LEN / GROUP_LEN],
    /// The unit of the scales.
    pub d: f32,
    /// The unit of the mins; zero in types without mins.
    pub dmin: f32,
}

impl Default for UnpackedBlock {
    fn default() -> Self {
        Self { quants: [0; 256], scales: [0; 16], mins: [0; 16], d: 0.0, dmin: 0.0 }
    }
}

impl UnpackedBlock {
    /// Writes the weights of the block; `out` is as long as the block.
    ///
    /// Both products are exact in f32 (11 + 8 + 6 bits at most), so only the subtraction rounds, once.
    pub fn weights(&self, out: &mut [f32]) {
        let groups = out.chunks_exact_mut(GROUP_LEN).zip(self.quants.chunks_exact(GROUP_LEN));
        for ((out, quants), (scale, min)) in groups.zip(self.scales.iter().zip(&self.mins)) {
            let (scale, min) = (self.d * f32::from(*scale), self.dmin * f32::from(*min));
            for (weight, quant) in out.iter_mut().zip(quants) {
                *weight = scale * f32::from(*quant) - min;
            }
        }
    }
}

/// Reads one block of exactly `block_bytes()` bytes, replacing every field of the result that the type has.
pub type Unpack = fn(block: &[u8], out: &mut UnpackedBlock);

/// The function that unpacks a block of this type, or `None` for the float types.
///
/// The result must begin as `UnpackedBlock::default()` and may then be used again for blocks of the same type: fields
/// that the type lacks are left alone.
#[must_use]
pub fn unpacker(quant_type: QuantType) -> Option<Unpack> {
    Some(match quant_type {
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => return None,
        QuantType::Q4_0 => legacy::unpack_q4_0,
        QuantType::Q4_1 => legacy::unpack_q4_1,
        QuantType::Q5_0 => legacy::unpack_q5_0,
        QuantType::Q5_1 => legacy::unpack_q5_1,
        QuantType::Q8_0 => legacy::unpack_q8_0,
        QuantType::IQ4_NL => legacy::unpack_iq4_nl,
        QuantType::MXFP4 => legacy::unpack_mxfp4,
        QuantType::Q2_K => k_quants::unpack_q2_k,
        QuantType::Q3_K => k_quants::unpack_q3_k,
        QuantType::Q4_K => k_quants::unpack_q4_k,
        QuantType::Q5_K => k_quants::unpack_q5_k,
        QuantType::Q6_K => k_quants::unpack_q6_k,
        QuantType::IQ2_XXS => iq::unpack_iq2_xxs,
        QuantType::IQ2_XS => iq::unpack_iq2_xs,
        QuantType::IQ2_S => iq::unpack_iq2_s,
        QuantType::IQ3_XXS => iq::unpack_iq3_xxs,
        QuantType::IQ3_S => iq::unpack_iq3_s,
        QuantType::IQ1_S => iq::unpack_iq1_s,
        QuantType::IQ1_M => iq::unpack_iq1_m,
        QuantType::IQ4_XS => iq::unpack_iq4_xs,
    })
}

/// The value of an IEEE half-precision number given by its bits; exact.
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Unit of the values of an `MXFP4` block: half of two to the power of `exponent` - 127, because the table of values is doubled.
#[must_use]
pub const fn mxfp4_unit(exponent: u8) -> f32 {
    // The two smallest exponents give f32 subnormals.
    f32::from_bits(if exponent < 2 { 0x0020_0000 << exponent } else { (exponent as u32 - 1) << 23 })
}

/// The little-endian `u16` at a byte offset.
pub(super) fn u16_at(block: &[u8], offset: usize) -> u16 {
    u16::from_le_bytes([block[offset], block[offset + 1]])
}

/// The little-endian `u32` at a byte offset.
pub(super) fn u32_at(block: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([block[offset], block[offset + 1], block[offset + 2], block[offset + 3]])
}

/// The half-precision number at a byte offset.
pub(super) fn half_at(block: &[u8], offset: usize) -> f32 {
    f16_to_f32(u16_at(block, offset))
}
