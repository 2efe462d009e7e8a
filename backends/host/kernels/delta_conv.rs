//! What a delta net computes beside its state: the short convolution with its history, and the gates of each head.
//!
//! A row of queries, keys and values is cut into heads: no sum leaves one, and each has one order.

use std::ops::Range;

use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::sigmoid;
use crate::backend::op::DeltaShape;
use crate::backends::host::pool::ThreadPool;

/// Heads of a task: their channels of a row fill half a page.
const HEADS_PER_TASK: usize = 4;
/// Partial sums of a sum of squares; the order of additions is part of the result, so it is the same at every level.
const LANES: usize = 16;

/// What the convolution of one layer reads.
#[derive(Clone, Copy, Debug)]
pub struct ConvInputs<'a> {
    /// Sizes of the net.
    pub shape: DeltaShape,
    /// Projected rows `[n_rows, n_channels]`.
    pub x: &'a [f32],
    /// The rows before them `[n_taps - 1, n_channels]`, oldest first.
    pub history: &'a [f32],
    /// `[n_channels, n_taps]`, the present row's tap last.
    pub taps: &'a [f32],
    /// Added to the sum of squares of a query or key.
    pub eps: f32,
}

/// Convolves each channel, applies SiLU, and norms queries and keys: `out` `[n_rows, n_channels]`.
///
/// # Panics
/// Where lengths do not match.
pub fn convolve(pool: &ThreadPool, level: SimdLevel, inputs: &ConvInputs<'_>, out: &mut [f32]) {
    let ConvInputs { shape, x, history, taps, .. } = *inputs;
    let (n_channels, n_taps) = (shape.n_channels() as usize, shape.n_taps as usize);
    assert!(x.len() == out.len() && x.len().is_multiple_of(n_channels), "as many results as inputs, in whole rows");
    assert!(history.len() == (n_taps - 1) * n_channels && taps.len() == n_taps * n_channels, "history and taps of each channel");
    let level = level.min(SimdLevel::detect());
    let n_heads = (2 * shape.n_head_k + shape.n_head_v) as usize;
    let out = SharedSlice::new(out);
    pool.run(n_heads.div_ceil(HEADS_PER_TASK), &|task| {
        let heads = task * HEADS_PER_TASK..n_heads.min((task + 1) * HEADS_PER_TASK);
        match level {
            SimdLevel::Scalar => convolve_heads(inputs, heads, out),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level is capped at what this processor has.
            SimdLevel::Avx2 => unsafe { convolve_heads_avx2(inputs, heads, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { convolve_heads_avx512(inputs, heads, out) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => convolve_heads(inputs, heads, out),
        }
    });
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn convolve_heads_avx2(inputs: &ConvInputs<'_>, heads: Range<usize>, out: SharedSlice<'_, f32>) {
    convolve_heads(inputs, heads, out);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
fn convolve_heads_avx512(inputs: &ConvInputs<'_>, heads: Range<usize>, out: SharedSlice<'_, f32>) {
    convolve_heads(inputs, heads, out);
}

/// All rows of some heads: queries come first, then keys, then values.
#[inline(always)]
fn convolve_heads(inputs: &ConvInputs<'_>, heads: Range<usize>, out: SharedSlice<'_, f32>) {
    let ConvInputs { shape, x, history, taps, eps } = *inputs;
    let (n_channels, head_dim, n_taps) = (shape.n_channels() as usize, shape.head_dim as usize, shape.n_taps as usize);
    let channels = heads.start * head_dim..heads.end * head_dim;
    // Turned to [n_taps, channels], so that the loop over channels is vector code.
    let turned: Vec<f32> = (0..n_taps).flat_map(|tap| channels.clone().map(move |channel| taps[channel * n_taps + tap])).collect();
    let n_before = n_taps - 1;
    for row in 0..x.len() / n_channels {
        // SAFETY: the channels of a head belong to its one task.
        let out = unsafe { out.part(row * n_channels + channels.start, channels.len()) };
        out.fill(0.0);
        for (tap, factors) in turned.chunks_exact(channels.len()).enumerate() {
            let source = match (row + tap).checked_sub(n_before) {
                Some(row) => &x[row * n_channels..][channels.clone()],
                None => &history[(row + tap) * n_channels..][channels.clone()],
            };
            out.iter_mut().zip(source).zip(factors).for_each(|((sum, value), factor)| *sum += value * factor);
        }
        out.iter_mut().for_each(|value| *value *= sigmoid(*value));
        for (head, out) in heads.clone().zip(out.chunks_exact_mut(head_dim)) {
            norm_head(out, head, shape, eps);
        }
    }
}

/// Divides a query or key by its length, and a query by the root of the head size, too.
#[inline(always)]
fn norm_head(values: &mut [f32], head: usize, shape: DeltaShape, eps: f32) {
    let n_head_k = shape.n_head_k as usize;
    if head >= 2 * n_head_k {
        return;
    }
    let scale = if head < n_head_k { 1.0 / f64::from(shape.head_dim).sqrt() } else { 1.0 };
    let factor = (scale / (sum_of_squares(values) + f64::from(eps)).sqrt()) as f32;
    values.iter_mut().for_each(|value| *value *= factor);
}

/// In f64: exact products, and no overflow.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    for chunk in values.chunks(LANES) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    lanes.iter().sum()
}

/// `history` becomes the last `history.len() / n_channels` rows of itself followed by `x`.
///
/// # Panics
/// Where either is no whole number of rows.
pub fn advance_history(x: &[f32], history: &mut [f32], n_channels: usize) {
    assert!(x.len().is_multiple_of(n_channels) && history.len().is_multiple_of(n_channels), "whole rows");
    let n_new = x.len().min(history.len());
    history.copy_within(n_new.., 0);
    let n_kept = history.len() - n_new;
    history[n_kept..].copy_from_slice(&x[x.len() - n_new..]);
}

/// `beta = sigmoid(beta)` and `decay = a * softplus(decay + dt_bias)`, in place on rows of `a.len()` heads.
///
/// The softplus is computed in f64, whose last bits (which a C library may round its own way) do not show in f32; there are few of
/// these numbers.
///
/// # Panics
/// Where lengths do not match.
pub fn delta_gates(beta: &mut [f32], decay: &mut [f32], dt_bias: &[f32], a: &[f32]) {
    assert!(dt_bias.len() == a.len() && beta.len() == decay.len() && beta.len().is_multiple_of(a.len()), "rows of as many heads");
    beta.iter_mut().for_each(|beta| *beta = sigmoid(*beta));
    for row in decay.chunks_exact_mut(a.len()) {
        for ((decay, bias), a) in row.iter_mut().zip(dt_bias).zip(a) {
            *decay = a * softplus(*decay + bias);
        }
    }
}

/// ln(1 + e^x), without overflow.
fn softplus(x: f32) -> f32 {
    let x = f64::from(x);
    (x.max(0.0) + (-x.abs()).exp().ln_1p()) as f32
}
