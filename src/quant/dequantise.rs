//! Exact dequantisation of whole blocks of any supported type to f32: the reference for every kernel.

use half::{bf16, f16};
use thiserror::Error;

use super::QuantType;
use super::unpacked::{UnpackedBlock, unpacker};

/// Why blocks could not be dequantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum QuantError {
    /// The input ends inside a block.
    #[error("{bytes} bytes of {quant_type} are no whole number of blocks of {block_bytes} bytes")]
    PartialBlock {
        /// Type of the blocks.
        quant_type: QuantType,
        /// Bytes given.
        bytes: usize,
        /// Bytes of one block.
        block_bytes: usize,
    },
    /// The output has another length than the weights of the input.
    #[error("{expected} weights of {quant_type} do not fit an output of {actual} values")]
    OutputLength {
        /// Type of the blocks.
        quant_type: QuantType,
        /// Weights in the input.
        expected: usize,
        /// Values the output holds.
        actual: usize,
    },
}

/// Writes the weights of `blocks` to `out`, in order.
///
/// Every value is the format's formula rounded once to f32, so any correct implementation agrees to the last bit.
///
/// # Errors
/// When `blocks` is no whole number of blocks, or `out` is not as long as their weights. Nothing is written then.
pub fn dequantise(quant_type: QuantType, blocks: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let (block_bytes, block_len) = (quant_type.block_bytes(), quant_type.block_len());
    if !blocks.len().is_multiple_of(block_bytes) {
        return Err(QuantError::PartialBlock { quant_type, bytes: blocks.len(), block_bytes });
    }
    let expected = blocks.len() / block_bytes * block_len;
    if out.len() != expected {
        return Err(QuantError::OutputLength { quant_type, expected, actual: out.len() });
    }
    match unpacker(quant_type) {
        Some(unpack) => {
            let mut unpacked = UnpackedBlock::default();
            for (block, weights) in blocks.chunks_exact(block_bytes).zip(out.chunks_exact_mut(block_len)) {
                unpack(block, &mut unpacked);
                unpacked.weights(weights);
            }
        }
        None => widen(quant_type, blocks, out),
    }
    Ok(())
}

/// The float types: a wider mantissa holds every value of a narrower one.
fn widen(quant_type: QuantType, bytes: &[u8], out: &mut [f32]) {
    let pairs = bytes.as_chunks::<2>().0;
    match quant_type {
        QuantType::F16 => pairs.iter().zip(out).for_each(|(pair, value)| *value = f16::from_le_bytes(*pair).to_f32()),
        QuantType::BF16 => pairs.iter().zip(out).for_each(|(pair, value)| *value = bf16::from_le_bytes(*pair).to_f32()),
        _ => bytes.as_chunks::<4>().0.iter().zip(out).for_each(|(bytes, value)| *value = f32::from_le_bytes(*bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partial_block_is_refused_and_nothing_is_written() {
        let mut out = [7.0; 32];
        let error = dequantise(QuantType::Q8_0, &[0; 33], &mut out);
        assert_eq!(error, Err(QuantError::PartialBlock { quant_type: QuantType::Q8_0, bytes: 33, block_bytes: 34 }));
        assert_eq!(out, [7.0; 32]);
    }

    #[test]
    fn an_output_of_another_length_is_refused_for_every_type() {
        for quant_type in QuantType::ALL {
            let blocks = vec![0; 2 * quant_type.block_bytes()];
            let expected = 2 * quant_type.block_len();
            for actual in [0, expected - 1, expected + 1] {
                let error = dequantise(quant_type, &blocks, &mut vec![0.0; actual]);
                assert_eq!(error, Err(QuantError::OutputLength { quant_type, expected, actual }));
            }
        }
    }

    #[test]
    fn no_blocks_are_no_weights() {
        for quant_type in QuantType::ALL {
            assert_eq!(dequantise(quant_type, &[], &mut []), Ok(()));
        }
    }
}
