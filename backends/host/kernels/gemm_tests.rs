//! The prompt path's product against a plain f64 sum, and its promise that a row's bits depend on that row alone.

use super::activations::{ActivationFormat, QuantisedRow, quantise_rows, row_bytes};
use super::gemm::{Activations, TokenRows, Weights, gemm};
use super::simd::SimdLevel;
use super::test_data::Numbers;
use crate::backends::host::pool::ThreadPool;
use crate::quant::QuantType;

/// A product's inputs: columns that are no multiple of 256 where the type allows it, rows that are no multiple of 16.
struct Case {
    quant: QuantType,
    format: ActivationFormat,
    n_rows: usize,
    n: usize,
    weights: Vec<u8>,
    rows: Vec<u8>,
}

impl Case {
    fn new(quant: QuantType, exact: bool, n_tokens: usize) -> Self {
        let mut numbers = Numbers::seeded(11 + u64::from(quant.ggml_id()));
        let (n_rows, n) = (37, if quant.block_len() == 256 { 512 } else { 352 });
        let format = ActivationFormat::for_weights(quant, exact);
        let values = numbers.floats(n_tokens * n, 2.0);
        let mut rows = vec![0; n_tokens * row_bytes(format, n)];
        quantise_rows(&pool(1), SimdLevel::Scalar, format, n, &values, &mut rows);
        Self { quant, format, n_rows, n, weights: numbers.weights(quant, n_rows, n), rows }
    }

    fn product(&self, n_threads: usize, level: SimdLevel, tokens: TokenRows<'_>) -> Vec<f32> {
        let mut out = vec![f32::NAN; tokens.len() * self.n_rows];
        let weights = Weights::dense(self.quant, &self.weights, self.n_rows, self.n);
        let activations = Activations { format: self.format, n: self.n, bytes: &self.rows };
        gemm(&pool(n_threads), level, &weights, &activations, tokens, &mut out, self.n_rows);
        out
    }

    /// The value a stored activation row stands for.
    fn activation(&self, token: usize) -> Vec<f64> {
        let bytes = row_bytes(self.format, self.n);
        let row = &self.rows[token * bytes..(token + 1) * bytes];
        if self.format == ActivationFormat::F32 {
            return row.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
        }
        let parts = QuantisedRow::split(self.format, self.n, row);
        let value = |(index, quant): (usize, &u8)| f64::from(quant.cast_signed()) * f64::from(parts.scale(index / self.format.block_len()));
        parts.quants.iter().enumerate().map(value).collect()
    }

    fn weight_rows(&self) -> Vec<Vec<f64>> {
        let mut values = vec![0.0; self.n_rows * self.n];
        crate::quant::dequantise(self.quant, &self.weights, &mut values).expect("whole blocks");
        values.chunks_exact(self.n).map(|row| row.iter().map(|value| f64::from(*value)).collect()).collect()
    }
}

fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(n_threads).expect("threads")
}

fn assert_same_bits(left: &[f32], right: &[f32], what: &str) {
    assert_eq!(left.len(), right.len(), "{what}");
    for (index, (left, right)) in left.iter().zip(right).enumerate() {
        assert_eq!(left.to_bits(), right.to_bits(), "{what}, element {index}: {left} and {right}");
    }
}

/// Both ways to store activations; float weights have only one.
fn cases() -> impl Iterator<Item = (QuantType, bool)> {
    QuantType::ALL.into_iter().flat_map(|quant| [(quant, false), (quant, true)]).filter(|(quant, exact)| *exact || !quant.is_float())
}

#[test]
fn every_type_agrees_with_a_sum_in_f64() {
    for (quant, exact) in cases() {
        let case = Case::new(quant, exact, 5);
        let weights = case.weight_rows();
        for level in SimdLevel::available() {
            let out = case.product(1, level, TokenRows::Contiguous(5));
            for token in 0..5 {
                let activation = case.activation(token);
                for (row, weights) in weights.iter().enumerate() {
                    let terms = weights.iter().zip(&activation).map(|(w, x)| w * x);
                    let (sum, size) = terms.fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()));
                    let value = f64::from(out[token * case.n_rows + row]);
                    assert!((value - sum).abs() <= 1e-6 * size, "{quant} {level:?} exact {exact}: {value} for {sum} of size {size}");
                }
            }
        }
    }
}

#[test]
fn all_levels_give_the_same_bits() {
    for (quant, exact) in cases() {
        let case = Case::new(quant, exact, 11);
        let expected = case.product(1, SimdLevel::Scalar, TokenRows::Contiguous(11));
        for level in SimdLevel::available() {
            assert_same_bits(&case.product(1, level, TokenRows::Contiguous(11)), &expected, &format!("{quant} {level:?} exact {exact}"));
        }
    }
}

#[test]
fn threads_batch_sizes_and_index_lists_change_no_bit() {
    let level = SimdLevel::detect();
    for (quant, exact) in cases() {
        let case = Case::new(quant, exact, 64);
        let expected = case.product(1, level, TokenRows::Contiguous(64));
        let what = format!("{quant} exact {exact}");
        for n_threads in [2, 3] {
            assert_same_bits(&case.product(n_threads, level, TokenRows::Contiguous(64)), &expected, &what);
        }
        for count in [1, 7, 32] {
            assert_same_bits(&case.product(1, level, TokenRows::Contiguous(count)), &expected[..count * case.n_rows], &what);
        }
        let indices: Vec<u32> = vec![63, 0, 17, 17, 40, 2, 31, 9, 55];
        let picked: Vec<f32> = indices.iter().flat_map(|&i| &expected[i as usize * case.n_rows..][..case.n_rows]).copied().collect();
        assert_same_bits(&case.product(2, level, TokenRows::Indexed(&indices)), &picked, &what);
    }
}

#[test]
fn token_tiles_of_a_long_prompt_change_no_bit() {
    let (quant, n_tokens) = (QuantType::Q4_0, 1_100);
    let case = Case::new(quant, false, n_tokens);
    let long = case.product(3, SimdLevel::detect(), TokenRows::Contiguous(n_tokens));
    for first in [0, 505, 1_024] {
        let indices: Vec<u32> = (first..first + 16).collect();
        let short = case.product(1, SimdLevel::detect(), TokenRows::Indexed(&indices));
        assert_same_bits(&short, &long[first as usize * case.n_rows..][..short.len()], "a piece of the prompt");
    }
}

#[test]
fn result_and_weight_strides_are_kept_to() {
    let case = Case::new(QuantType::Q8_0, false, 3);
    let expected = case.product(1, SimdLevel::detect(), TokenRows::Contiguous(3));
    let dense = Weights::dense(case.quant, &case.weights, case.n_rows, case.n);
    let stride = dense.row_stride + 6;
    let mut spaced = vec![0xff; stride * case.n_rows];
    for row in 0..case.n_rows {
        spaced[row * stride..][..dense.row_stride].copy_from_slice(&case.weights[row * dense.row_stride..][..dense.row_stride]);
    }
    let weights = Weights { bytes: &spaced, row_stride: stride, ..dense };
    let activations = Activations { format: case.format, n: case.n, bytes: &case.rows };
    let mut out = vec![-1.0; 3 * 50];
    gemm(&pool(1), SimdLevel::detect(), &weights, &activations, TokenRows::Contiguous(3), &mut out, 50);
    for (out, expected) in out.chunks_exact(50).zip(expected.chunks_exact(case.n_rows)) {
        assert_same_bits(&out[..case.n_rows], expected, "strided");
        assert_eq!(out[case.n_rows..], [-1.0; 13], "nothing between result rows is written");
    }
}
