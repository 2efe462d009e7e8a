//! Element types of tensors: block layouts of every supported GGUF type and their exact dequantisation.
//!
//! This module sits at the bottom of the crate: the GGUF reader, the memory plan and the kernels of every backend share it,
//! because a block's layout is the contract between a file and a kernel. It owns no memory and calls nothing of ours.

mod activation;
mod dequantise;
mod iq;
mod k_quants;
mod legacy;
pub mod tables;
mod unpacked;

use std::fmt;

pub use activation::{ActivationFormat, halves_line_bytes};
pub use dequantise::{QuantError, dequantise};
pub use unpacked::{GROUP_LEN, MAX_BLOCK_LEN, Unpack, UnpackedBlock, f16_to_f32, mxfp4_unit, unpacker};

/// The element type of a tensor, as GGUF numbers them.
///
/// Quantised types store `block_len()` weights in `block_bytes()` bytes; float types are blocks of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[allow(non_camel_case_types, missing_docs, reason = "the names are those of the GGUF format")]
pub enum QuantType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    IQ1_M = 29,
    BF16 = 30,
    MXFP4 = 39,
}

impl QuantType {
    /// Every supported type, in the order of their GGUF numbers.
    pub const ALL: [Self; 23] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ2_XXS,
        Self::IQ2_XS,
        Self::IQ3_XXS,
        Self::IQ1_S,
        Self::IQ4_NL,
        Self::IQ3_S,
        Self::IQ2_S,
        Self::IQ4_XS,
        Self::IQ1_M,
        Self::BF16,
        Self::MXFP4,
    ];

    /// The type with this GGUF number, or `None` for one that is not supported.
    #[must_use]
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.ggml_id() == id)
    }

    /// The number GGUF writes for this type.
    #[must_use]
    pub const fn ggml_id(self) -> u32 {
        self as u32
    }

    /// Weights in one block.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL | Self::MXFP4 => 32,
            _ => 256,
        }
    }

    /// Bytes of one block.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K | Self::IQ3_S => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::IQ2_XXS => 66,
            Self::IQ2_XS => 74,
            Self::IQ3_XXS => 98,
            Self::IQ1_S => 50,
            Self::IQ2_S => 82,
            Self::IQ4_XS => 136,
            Self::IQ1_M => 56,
            Self::MXFP4 => 17,
        }
    }

    /// Bytes of `n` weights in whole blocks, or `None` where `n` is no multiple of the block or the product overflows.
    #[must_use]
    pub fn bytes_for(self, n: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !n.is_multiple_of(block_len) {
            return None;
        }
        (n / block_len).checked_mul(self.block_bytes() as u64)
    }

    /// True for types whose blocks are single floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        self.block_len() == 1
    }
}

impl fmt::Display for QuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
