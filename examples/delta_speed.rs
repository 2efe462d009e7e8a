//! Speed of the gated delta net on this machine: prompts in GFLOP/s, windows and commits in microseconds.
//!
//! `cargo run --release --example delta_speed [THREADS]`
#![allow(clippy::print_stdout, reason = "an example's output is its purpose")]

use std::time::Instant;

use ebbtide::backend::op::{DELTA_STEP, DeltaShape};
use ebbtide::backends::host::kernels::delta_conv::{ConvInputs, convolve};
use ebbtide::backends::host::kernels::delta_prompt::{BlockPart, DeltaInputs, delta_prompt};
use ebbtide::backends::host::kernels::delta_window::{delta_commit, delta_window};
use ebbtide::backends::host::kernels::simd::SimdLevel;
use ebbtide::backends::host::pool::ThreadPool;

/// Qwen3.6-35B-A3B.
const SHAPE: DeltaShape = DeltaShape { n_head_k: 16, n_head_v: 32, head_dim: 128, n_taps: 4 };
const N_ROWS: usize = 512;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n_threads = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    let pool = ThreadPool::new(n_threads)?;
    let (n_channels, n_head_v, width) = (SHAPE.n_channels() as usize, SHAPE.n_head_v as usize, SHAPE.value_width() as usize);
    let numbers = |n: usize| (0..n).map(|index| (index * 29 % 113) as f32 / 56.0 - 1.0).collect::<Vec<f32>>();
    let (x, taps, history) = (numbers(N_ROWS * n_channels), numbers(4 * n_channels), numbers(3 * n_channels));
    let (beta, decay) = (vec![0.5; N_ROWS * n_head_v], vec![-0.1; N_ROWS * n_head_v]);
    let (mut qkv, mut out) = (vec![0.0; x.len()], vec![0.0; N_ROWS * width]);
    let (mut state, mut open) = (vec![0.0; width * SHAPE.head_dim as usize], vec![0.0; usize::try_from(SHAPE.open_bytes() / 4)?]);
    for level in SimdLevel::available().into_iter().filter(|level| *level > SimdLevel::Scalar) {
        let conv = ConvInputs { shape: SHAPE, x: &x, history: &history, taps: &taps, eps: 1e-6 };
        let conv_s = seconds(|| convolve(&pool, level, &conv, &mut qkv));
        println!("{level:?}: convolution of {N_ROWS} rows {:.2} ms", 1e3 * conv_s);
        for n_rows in [1, 8, 64, N_ROWS] {
            let gates = n_rows * n_head_v;
            let inputs = DeltaInputs { shape: SHAPE, qkv: &qkv[..n_rows * n_channels], beta: &beta[..gates], decay: &decay[..gates] };
            let out = &mut out[..n_rows * width];
            let part = BlockPart { position: 0, block_position: 0, ends_block: true };
            let prompt_s = seconds(|| delta_prompt(&pool, level, &inputs, part, &mut state, &mut open, out));
            let window_s = seconds(|| delta_window(&pool, level, &inputs, &state, out));
            let commit_s = seconds(|| delta_commit(&pool, level, &inputs, &mut state));
            let (head_dim, step) = (f64::from(SHAPE.head_dim), f64::from(DELTA_STEP));
            // Pairs of a whole step that are masked are not computed; two value heads share the products of their key head.
            let multiply_adds = gates as f64 * (3.0 * head_dim * head_dim + 1.5 * step * head_dim);
            println!(
                "{level:?} {n_rows} rows: in steps {:.0} us ({:.1} GFLOP/s), row by row {:.0} us, committed {:.0} us",
                1e6 * prompt_s,
                2.0 * multiply_adds / prompt_s / 1e9,
                1e6 * window_s,
                1e6 * commit_s,
            );
        }
    }
    Ok(())
}

/// The best of some runs: other programs only ever make it slower.
fn seconds(mut work: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 0.5 {
        let begin = Instant::now();
        work();
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}
