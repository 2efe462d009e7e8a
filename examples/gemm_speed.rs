//! Speed of the prompt path's products on this machine, in GFLOP/s.
//!
//! `cargo run --release --example gemm_speed [THREADS [COLUMNS [ROWS]]]`
#![allow(clippy::print_stdout, reason = "an example's output is its purpose")]

use std::time::Instant;

use ebbtide::backends::host::kernels::activations::{ActivationFormat, quantise_rows, row_bytes};
use ebbtide::backends::host::kernels::gemm::{Activations, TokenRows, Weights, gemm};
use ebbtide::backends::host::kernels::simd::SimdLevel;
use ebbtide::backends::host::pool::ThreadPool;
use ebbtide::quant::QuantType;

/// Repeats are timed one by one and the best counts: other programs only ever make it slower.
const SECONDS_PER_CASE: f64 = 0.3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    let n_threads = numbers.first().copied().unwrap_or(1);
    let n_columns = numbers.get(1).copied().unwrap_or(2048);
    let n_rows = numbers.get(2).copied().unwrap_or(768);
    let pool = ThreadPool::new(n_threads)?;
    let types = {
        use QuantType as Q;
        [Q::Q8_0, Q::Q4_0, Q::IQ4_NL, Q::Q4_K, Q::Q6_K, Q::IQ3_XXS, Q::F32]
    };
    for level in SimdLevel::available().into_iter().filter(|level| *level > SimdLevel::Scalar) {
        println!("{level:?}, {n_threads} threads, {n_columns} columns, {n_rows} rows: GFLOP/s at T = 32, 128, 512");
        for quant in types {
            let speeds = [32, 128, 512].map(|n_tokens| gflops(&pool, level, quant, n_rows, n_columns, n_tokens));
            println!("{:>8} {:8.1} {:8.1} {:8.1}", quant.to_string(), speeds[0], speeds[1], speeds[2]);
        }
    }
    Ok(())
}

fn gflops(pool: &ThreadPool, level: SimdLevel, quant: QuantType, n_rows: usize, n_columns: usize, n_tokens: usize) -> f64 {
    let bytes = n_rows * n_columns / quant.block_len() * quant.block_bytes();
    // Any scale of these bytes is a normal number; beyond that speed does not depend on values.
    let weights: Vec<u8> = (0..bytes).map(|index| [40, 45, 51, 56, 62][index * 7 % 5]).collect();
    let format = ActivationFormat::for_weights(quant, false);
    let rows: Vec<f32> = (0..n_tokens * n_columns).map(|index| (index * 29 % 113) as f32 / 56.0 - 1.0).collect();
    let mut quantised = vec![0; n_tokens * row_bytes(format, n_columns)];
    quantise_rows(pool, level, format, n_columns, &rows, &mut quantised);
    let weights = Weights::dense(quant, &weights, n_rows, n_columns);
    let activations = Activations { format, n: n_columns, bytes: &quantised };
    let mut out = vec![0.0; n_tokens * n_rows];
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed().as_secs_f64() < SECONDS_PER_CASE {
        let begin = Instant::now();
        gemm(pool, level, &weights, &activations, TokenRows::Contiguous(n_tokens), &mut out, n_rows);
        best = best.min(begin.elapsed().as_secs_f64());
    }
    2.0 * (n_rows * n_columns * n_tokens) as f64 / best / 1e9
}
