//! The weight types as Rust types, so that each kernel is compiled for one of them, and the two rows taken apart.

use crate::quant::QuantType;

/// A weight type known at compile time.
pub(super) trait Weights {
    /// The type's name in the format.
    const TYPE: QuantType;
    /// Bytes of one block.
    const BYTES: usize = Self::TYPE.block_bytes();
}

macro_rules! weights {
    ($($name:ident)*) => {$(
        #[allow(non_camel_case_types, reason = "the names are those of the GGUF format")]
        pub(super) struct $name;

        impl Weights for $name {
            const TYPE: QuantType = QuantType::$name;
        }
    )*};
}

weights! {
    F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 Q2_K Q3_K Q4_K Q5_K Q6_K
    IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ1_S IQ1_M IQ4_XS
}

/// One row of activations beside the blocks of a row of weights, lengths checked.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Whole blocks.
    pub weights: &'a [u8],
    /// One i8 quant a weight.
    pub quants: &'a [u8],
    /// One f32 scale a block.
    pub scales: &'a [[u8; 4]],
    /// One i16 sum of 16 quants each, empty for blocks of 32.
    pub sums: &'a [u8],
}

impl<'a> Rows<'a> {
    /// # Panics
    /// Where a length does not match, see [`super::DotFn`].
    #[inline]
    pub(super) fn new<W: Weights>(weights: &'a [u8], activation: &'a [u8]) -> Self {
        let n_blocks = weights.len() / W::BYTES;
        assert_eq!(weights.len(), n_blocks * W::BYTES, "bytes of {n_blocks} whole blocks of {}", W::TYPE);
        let n = n_blocks * W::TYPE.block_len();
        let sum_bytes = if W::TYPE.block_len() == 256 { n / 8 } else { 0 };
        let needed = n + 4 * n_blocks + sum_bytes;
        assert!(activation.len() >= needed, "an activation row of {n} has {} bytes instead of {needed}", activation.len());
        let (quants, rest) = activation.split_at(n);
        let (scales, rest) = rest.split_at(4 * n_blocks);
        Self { weights, quants, scales: scales.as_chunks().0, sums: &rest[..sum_bytes] }
    }
}
