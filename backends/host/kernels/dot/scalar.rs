//! The reference products: blocks unpacked to integers, summed as the formula says.

use half::{bf16, f16};

use super::weights::{Rows, Weights};
use crate::quant::{GROUP_LEN, QuantType, UnpackedBlock, unpacker};

/// Blocks of 32 weights.
pub(super) fn dot_32<W: Weights>(weights: &[u8], activation: &[u8]) -> f32 {
    dot_blocks::<W>(Rows::new::<W>(weights, activation))
}

/// Blocks of 256 weights.
pub(super) fn dot_256<W: Weights>(weights: &[u8], activation: &[u8]) -> f32 {
    dot_blocks::<W>(Rows::new::<W>(weights, activation))
}

/// Per block: `da * (d * sum(scale * quant * activation) - dmin * sum(min * activation))`, both sums integers.
fn dot_blocks<W: Weights>(rows: Rows<'_>) -> f32 {
    let Some(unpack) = unpacker(W::TYPE) else { return 0.0 };
    let mut block = UnpackedBlock::default();
    let mut total = 0.0;
    let blocks = rows.weights.chunks_exact(W::BYTES).zip(rows.quants.chunks_exact(W::TYPE.block_len()));
    for ((weights, activations), scale) in blocks.zip(rows.scales) {
        unpack(weights, &mut block);
        let (mut products, mut mins) = (0_i32, 0_i32);
        for (group, activations) in activations.chunks_exact(GROUP_LEN).enumerate() {
            let quants = &block.quants[GROUP_LEN * group..][..GROUP_LEN];
            let (mut product, mut sum) = (0_i32, 0_i32);
            for (quant, activation) in quants.iter().zip(activations) {
                let activation = i32::from(activation.cast_signed());
                product += i32::from(*quant) * activation;
                sum += activation;
            }
            products += i32::from(block.scales[group]) * product;
            mins += i32::from(block.mins[group]) * sum;
        }
        total += f32::from_le_bytes(*scale) * (block.d * products as f32 - block.dmin * mins as f32);
    }
    total
}

/// Float weights with f32 activations.
pub(super) fn dot_floats<W: Weights>(weights: &[u8], activation: &[u8]) -> f32 {
    let activations = activations_of::<W>(weights, activation);
    let values = weights.chunks_exact(W::BYTES).zip(activations);
    values.map(|(bytes, activation)| float_weight(W::TYPE, bytes) * f32::from_le_bytes(*activation)).sum()
}

/// The f32 activations of a row of float weights.
///
/// # Panics
/// Where a length does not match, see [`super::DotFn`].
pub(super) fn activations_of<'a, W: Weights>(weights: &[u8], activation: &'a [u8]) -> &'a [[u8; 4]] {
    let n = weights.len() / W::BYTES;
    assert_eq!(weights.len(), n * W::BYTES, "bytes of {n} weights of {}", W::TYPE);
    assert!(activation.len() >= 4 * n, "an activation row of {n} has {} bytes", activation.len());
    &activation.as_chunks().0[..n]
}

fn float_weight(quant_type: QuantType, bytes: &[u8]) -> f32 {
    match (quant_type, bytes) {
        (QuantType::F16, [low, high]) => f16::from_le_bytes([*low, *high]).to_f32(),
        (QuantType::BF16, [low, high]) => bf16::from_le_bytes([*low, *high]).to_f32(),
        (_, bytes) => bytes.first_chunk().map_or(0.0, |bytes| f32::from_le_bytes(*bytes)),
    }
}
