//! Routed experts: `residual += share * down(silu(gate x) * (up x))`, added in ascending expert number.
//!
//! This file owns what both forms share: shapes, the caller's scratch memory and the order of additions. `moe_prompt` reads
//! long lists of tokens with the prompt path's product, `moe_window` at most eight rows with the window's.

use super::activations::{ActivationFormat, row_bytes};
use super::gemm::{Activations, Weights};
use crate::quant::QuantType;

pub use super::moe_prompt::{ExpertTokens, experts_prompt_group};
pub use super::moe_window::{WindowRow, experts_window};

/// What all experts of a layer have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShape {
    /// Length of inputs and results.
    pub n_embd: usize,
    /// Width of an expert.
    pub n_ff: usize,
    /// Type of the gate matrix, `n_ff` rows of `n_embd`.
    pub gate: QuantType,
    /// Type of the up matrix, `n_ff` rows of `n_embd`.
    pub up: QuantType,
    /// Type of the down matrix, `n_embd` rows of `n_ff`.
    pub down: QuantType,
    /// True keeps activations as f32 between the matrices.
    pub exact: bool,
}

/// The three matrices of one expert, rows without gaps.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// `[n_ff][n_embd]`
    pub gate: &'a [u8],
    /// `[n_ff][n_embd]`
    pub up: &'a [u8],
    /// `[n_embd][n_ff]`
    pub down: &'a [u8],
}

/// The layer's normed input in the formats of gate and up; the same rows twice where the formats agree.
#[derive(Clone, Copy, Debug)]
pub struct ExpertInputs<'a> {
    /// For the gate matrix.
    pub gate: Activations<'a>,
    /// For the up matrix.
    pub up: Activations<'a>,
}

impl ExpertShape {
    /// How the activated rows are stored for the down matrix.
    #[must_use]
    pub const fn inner_format(&self) -> ActivationFormat {
        ActivationFormat::for_weights(self.down, self.exact)
    }

    pub(super) fn gate_weights<'a>(&self, expert: &ExpertWeights<'a>) -> Weights<'a> {
        Weights::dense(self.gate, expert.gate, self.n_ff, self.n_embd)
    }

    pub(super) fn up_weights<'a>(&self, expert: &ExpertWeights<'a>) -> Weights<'a> {
        Weights::dense(self.up, expert.up, self.n_ff, self.n_embd)
    }

    pub(super) fn down_weights<'a>(&self, expert: &ExpertWeights<'a>) -> Weights<'a> {
        Weights::dense(self.down, expert.down, self.n_embd, self.n_ff)
    }

    /// f32 of scratch for one pair of a token and an expert: gate and up, later overlaid by the result.
    const fn words_per_pair(&self) -> usize {
        if 2 * self.n_ff > self.n_embd { 2 * self.n_ff } else { self.n_embd }
    }
}

/// Bytes of scratch for `n_pairs` pairs of a token and an expert at once; they begin at a multiple of 4.
#[must_use]
pub fn scratch_bytes(shape: &ExpertShape, n_pairs: usize) -> usize {
    n_pairs * (4 * shape.words_per_pair() + row_bytes(shape.inner_format(), shape.n_ff))
}

/// Scratch memory, cut up.
pub(super) struct Scratch<'a> {
    /// `words_per_pair` f32 for each pair.
    pub words: &'a mut [f32],
    /// One stored activation row of `n_ff` numbers for each pair.
    pub rows: &'a mut [u8],
}

impl<'a> Scratch<'a> {
    /// Cuts the caller's bytes for `n_pairs` pairs.
    ///
    /// # Panics
    /// Where they are fewer than [`scratch_bytes`] or do not begin at an address of f32, as device memory always does.
    pub(super) fn cut(shape: &ExpertShape, n_pairs: usize, bytes: &'a mut [u8]) -> Self {
        let needed = scratch_bytes(shape, n_pairs);
        assert!(bytes.len() >= needed, "scratch of {} bytes, {needed} needed for {n_pairs} pairs", bytes.len());
        let n_words = n_pairs * shape.words_per_pair();
        assert!(bytes.as_ptr().cast::<f32>().is_aligned(), "scratch begins at {:p}, no address of f32", bytes.as_ptr());
        let (words, rows) = bytes.split_at_mut(4 * n_words);
        // SAFETY: the start is aligned, the length is a whole number of words, and any four bytes are an f32.
        let words = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<f32>(), n_words) };
        Self { words, rows: &mut rows[..n_pairs * row_bytes(shape.inner_format(), shape.n_ff)] }
    }
}

/// `residual += share * result`, product and sum rounded one after the other in both forms.
#[inline]
pub(super) fn add_share(residual: &mut [f32], share: f32, result: &[f32]) {
    for (residual, result) in residual.iter_mut().zip(result) {
        *residual += share * result;
    }
}
