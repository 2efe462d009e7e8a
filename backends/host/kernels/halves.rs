//! Rows in 16-bit floats and their products: the reference of what devices with matrix units compute.
//!
//! Weights and rows are rounded to 16-bit floats and multiplied as f32, which holds such a product exactly; sums are those of the prompt
//! path's product of floats. This path is there to be compared with, so it is written plainly and takes memory of its own.

use half::f16;

use super::activations::{ActivationFormat, quantise_rows, row_bytes};
use super::gemm::{Activations, TokenRows, Weights, gemm};
use super::moe::{ExpertShape, ExpertTokens, add_share};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::swiglu;
use crate::backends::host::pool::ThreadPool;
use crate::quant::{QuantType, dequantise};

const FORMAT: ActivationFormat = ActivationFormat::F16;
/// Bytes before a row's halves: its scale and zeros.
const HEAD_BYTES: usize = 16;
/// Rows of weights that are unpacked at a time.
const STRIPE_ROWS: usize = 256;
/// What every number that is none becomes.
const NAN: u16 = 0x7fff;

/// The nearest 16-bit float, ties to even.
fn half_bits(value: f32) -> u16 {
    if value.is_nan() { NAN } else { f16::from_f32(value).to_bits() }
}

/// The reciprocal of a row's scale, by the largest magnitude's bits: of the power of two below it, as far as both are normal numbers;
/// 1 for zero and for what is no number, which the halves then show.
fn scale_to_unit(magnitude: u32) -> f32 {
    let exponent = magnitude >> 23;
    if magnitude == 0 || exponent == 255 {
        return 1.0;
    }
    f32::from_bits((254 - exponent.max(1)).max(1) << 23)
}

/// Stores one row as [`ActivationFormat::F16`].
pub(super) fn quantise_row(row: &[f32], out: &mut [u8]) {
    // The bits of magnitudes order as the magnitudes do, infinities and what is no number behind them.
    let to_unit = scale_to_unit(row.iter().map(|value| value.to_bits() & 0x7fff_ffff).fold(0, u32::max));
    out.fill(0);
    let (head, line) = out.split_at_mut(HEAD_BYTES);
    head[..4].copy_from_slice(&(1.0 / to_unit).to_le_bytes());
    for (value, half) in row.iter().zip(line.chunks_exact_mut(2)) {
        half.copy_from_slice(&half_bits(value * to_unit).to_le_bytes());
    }
}

/// The numbers that rows of [`ActivationFormat::F16`] stand for, `[n_rows, n]`.
///
/// # Panics
/// Where the rows have another format.
#[must_use]
pub fn decode_rows(rows: &Activations<'_>) -> Vec<f32> {
    assert_eq!(rows.format, FORMAT, "rows in 16-bit floats");
    let decode = |row: &[u8]| {
        let scale = f32::from_le_bytes([row[0], row[1], row[2], row[3]]);
        let halves = row[HEAD_BYTES..].as_chunks::<2>().0.iter().take(rows.n);
        halves.map(|half| scale * f16::from_le_bytes(*half).to_f32()).collect::<Vec<_>>()
    };
    rows.bytes.chunks_exact(row_bytes(FORMAT, rows.n)).flat_map(decode).collect()
}

/// Rows of weights as the f32 that their halves are.
fn unpack(pool: &ThreadPool, weights: &Weights<'_>, first: usize, count: usize) -> Vec<f32> {
    let n = weights.n_columns;
    let mut unpacked = vec![0.0; count * n];
    let rows = SharedSlice::new(&mut unpacked);
    pool.run(count, &|row| {
        // SAFETY: each row is written by the one task that has its number.
        let out = unsafe { rows.part(row * n, n) };
        dequantise(weights.quant, weights.blocks(first + row, 0, n), out).expect("whole blocks, as `Weights` checks");
        for value in out {
            *value = f16::from_bits(half_bits(*value)).to_f32();
        }
    });
    unpacked
}

/// `out[t][r] = sum_i half(weights[r][i]) * rows[token t][i]`; `rows` as [`decode_rows`] returns them, `out` `[tokens, weights.n_rows]`.
///
/// # Panics
/// Where shapes do not match.
pub fn product(pool: &ThreadPool, level: SimdLevel, weights: &Weights<'_>, rows: &[f32], tokens: TokenRows<'_>, out: &mut [f32]) {
    let (n_out, n_in) = (weights.n_rows, weights.n_columns);
    assert_eq!(out.len(), tokens.len() * n_out, "a result for each token and row of weights");
    if out.is_empty() {
        return;
    }
    let activations = Activations::from_f32(n_in, rows);
    for first in (0..n_out).step_by(STRIPE_ROWS) {
        let count = STRIPE_ROWS.min(n_out - first);
        let unpacked = unpack(pool, weights, first, count);
        let bytes = Activations::from_f32(n_in, &unpacked).bytes;
        let stripe = Weights::dense(QuantType::F32, bytes, count, n_in);
        gemm(pool, level, &stripe, &activations, tokens, &mut out[first..], n_out);
    }
}

/// Adds the experts' results to `residual[n_rows, n_embd]`, expert after expert in the order given (ascending numbers). Activated rows are
/// stored as [`ActivationFormat::F16`] before the down matrix, as `input` is.
///
/// # Panics
/// Where shapes do not match or a token is not a row.
pub fn experts_prompt_group(
    pool: &ThreadPool,
    level: SimdLevel,
    shape: &ExpertShape,
    input: &Activations<'_>,
    experts: &[ExpertTokens<'_>],
    residual: &mut [f32],
) {
    let (n_ff, n_embd) = (shape.n_ff, shape.n_embd);
    let rows = decode_rows(input);
    for expert in experts.iter().filter(|expert| !expert.tokens.is_empty()) {
        assert_eq!(expert.tokens.len(), expert.shares.len(), "a share for each token");
        let n_tokens = expert.tokens.len();
        let tokens = TokenRows::Indexed(expert.tokens);
        let (mut gate, mut up) = (vec![0.0; n_tokens * n_ff], vec![0.0; n_tokens * n_ff]);
        product(pool, level, &shape.gate_weights(&expert.weights), &rows, tokens, &mut gate);
        product(pool, level, &shape.up_weights(&expert.weights), &rows, tokens, &mut up);
        swiglu(level, &mut gate, &up);
        let mut bytes = vec![0; n_tokens * row_bytes(FORMAT, n_ff)];
        quantise_rows(pool, level, FORMAT, n_ff, &gate, &mut bytes);
        let activated = decode_rows(&Activations { format: FORMAT, n: n_ff, bytes: &bytes });
        let mut results = vec![0.0; n_tokens * n_embd];
        product(pool, level, &shape.down_weights(&expert.weights), &activated, TokenRows::Contiguous(n_tokens), &mut results);
        for ((token, share), result) in expert.tokens.iter().zip(expert.shares).zip(results.chunks_exact(n_embd)) {
            add_share(&mut residual[*token as usize * n_embd..][..n_embd], *share, result);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(row: &[f32]) -> (f32, Vec<u16>) {
        let mut out = vec![7; row_bytes(FORMAT, row.len())];
        quantise_row(row, &mut out);
        assert!(out[4..HEAD_BYTES].iter().chain(&out[HEAD_BYTES + 2 * row.len()..]).all(|byte| *byte == 0), "zeros where nothing is said");
        let halves = out[HEAD_BYTES..].as_chunks::<2>().0.iter().take(row.len()).map(|half| u16::from_le_bytes(*half));
        (f32::from_le_bytes([out[0], out[1], out[2], out[3]]), halves.collect())
    }

    #[test]
    fn a_scale_is_the_power_of_two_below_the_largest_magnitude() {
        assert_eq!(stored(&[0.5, -3.0, 1.0]), (2.0, vec![0x3400, 0xbe00, 0x3800]));
        assert_eq!(stored(&[0.0; 9]), (1.0, vec![0; 9]));
        // Below the least normal number, and where the reciprocal would be no normal number.
        assert_eq!(stored(&[f32::from_bits(1 << 22)]), (f32::MIN_POSITIVE, vec![0x3800]));
        assert_eq!(stored(&[2.0_f32.powi(127)]), (2.0_f32.powi(126), vec![0x4000]));
        assert_eq!(stored(&[f32::NAN, 1.0, 1e9]), (1.0, vec![NAN, 0x3c00, 0x7c00]));
        assert_eq!(stored(&[f32::NEG_INFINITY, 1.0]), (1.0, vec![0xfc00, 0x3c00]));
    }
}
