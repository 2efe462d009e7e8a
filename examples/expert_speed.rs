//! Speed of one layer's routed experts on this machine: windows in GB/s of weights, prompts in GFLOP/s.
//!
//! `cargo run --release --example expert_speed [THREADS]`
#![allow(clippy::print_stdout, reason = "an example's output is its purpose")]

use std::time::Instant;

use ebbtide::backends::host::kernels::activations::{ActivationFormat, quantise_rows, row_bytes};
use ebbtide::backends::host::kernels::gemm::Activations;
use ebbtide::backends::host::kernels::moe::{
    ExpertInputs, ExpertShape, ExpertTokens, ExpertWeights, WindowRow, experts_prompt_group, experts_window, scratch_bytes,
};
use ebbtide::backends::host::kernels::router::Route;
use ebbtide::backends::host::kernels::simd::SimdLevel;
use ebbtide::backends::host::pool::ThreadPool;
use ebbtide::quant::QuantType;

/// Experts of Qwen3-30B-A3B, half as many.
const N_EMBD: usize = 2048;
const N_FF: usize = 768;
const N_EXPERT: u32 = 64;
const N_USED: u32 = 8;
const TILE_PAIRS: usize = 512;

struct Layer {
    shape: ExpertShape,
    matrices: Vec<u8>,
}

impl Layer {
    fn new(quant: QuantType, down: QuantType) -> Self {
        let shape = ExpertShape { n_embd: N_EMBD, n_ff: N_FF, gate: quant, up: quant, down, exact: false };
        let bytes = N_EXPERT as usize * (2 * Self::bytes(quant) + Self::bytes(down));
        Self { shape, matrices: (0..bytes).map(|index| [40, 45, 51, 56, 62][index * 7 % 5]).collect() }
    }

    fn bytes(quant: QuantType) -> usize {
        N_EMBD * N_FF / quant.block_len() * quant.block_bytes()
    }

    fn expert_bytes(&self) -> usize {
        2 * Self::bytes(self.shape.gate) + Self::bytes(self.shape.down)
    }

    fn expert(&self, expert: u32) -> ExpertWeights<'_> {
        let bytes = &self.matrices[expert as usize * self.expert_bytes()..][..self.expert_bytes()];
        let (gate, rest) = bytes.split_at(Self::bytes(self.shape.gate));
        let (up, down) = rest.split_at(Self::bytes(self.shape.up));
        ExpertWeights { gate, up, down }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n_threads = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    let pool = ThreadPool::new(n_threads)?;
    let level = SimdLevel::detect();
    println!("{level:?}, {n_threads} threads: GB/s of windows of 1, 4, 8 rows; GFLOP/s of prompts of 64, 256, 1024 tokens");
    for (quant, down) in [
        (QuantType::Q8_0, QuantType::Q8_0),
        (QuantType::Q4_0, QuantType::Q4_0),
        (QuantType::IQ4_NL, QuantType::IQ4_NL),
        (QuantType::Q4_K, QuantType::Q6_K),
        (QuantType::IQ3_XXS, QuantType::IQ3_XXS),
    ] {
        let layer = Layer::new(quant, down);
        let windows = [1, 4, 8].map(|rows| window_rate(&pool, level, &layer, rows));
        let prompts = [64, 256, 1024].map(|tokens| prompt_rate(&pool, level, &layer, tokens));
        println!("{quant:>8} {windows:6.1?} {prompts:6.1?}");
    }
    Ok(())
}

/// Runs `work` with stored inputs of `n_tokens` rows and says the seconds of the fastest run.
fn best_seconds(pool: &ThreadPool, level: SimdLevel, layer: &Layer, n_tokens: usize, mut work: impl FnMut(u32, &ExpertInputs<'_>)) -> f64 {
    let format = ActivationFormat::for_weights(layer.shape.gate, false);
    let rows: Vec<f32> = (0..n_tokens * N_EMBD).map(|index| (index * 29 % 113) as f32 / 56.0 - 1.0).collect();
    let mut bytes = vec![0; n_tokens * row_bytes(format, N_EMBD)];
    quantise_rows(pool, level, format, N_EMBD, &rows, &mut bytes);
    let activations = Activations { format, n: N_EMBD, bytes: &bytes };
    let inputs = ExpertInputs { gate: activations, up: activations };
    let (start, mut best, mut round) = (Instant::now(), f64::INFINITY, 0_u32);
    while start.elapsed().as_secs_f64() < 0.4 {
        let begin = Instant::now();
        work(round, &inputs);
        best = best.min(begin.elapsed().as_secs_f64());
        round += 1;
    }
    best
}

/// `n` bytes of `memory` from an address of f32 on, as kernels take their scratch.
fn aligned(memory: &mut Vec<u8>, n: usize) -> &mut [u8] {
    memory.resize(n + align_of::<f32>(), 0);
    let start = memory.as_ptr().align_offset(align_of::<f32>());
    &mut memory[start..start + n]
}

fn window_rate(pool: &ThreadPool, level: SimdLevel, layer: &Layer, n_rows: u32) -> f64 {
    let mut residual = vec![0.0; n_rows as usize * N_EMBD];
    let mut memory = Vec::new();
    let scratch = aligned(&mut memory, scratch_bytes(&layer.shape, (n_rows * N_USED) as usize));
    let share = 1e-6;
    let seconds = best_seconds(pool, level, layer, n_rows as usize, |round, inputs| {
        // Every row chooses the same experts, others in each round, so that they come from memory.
        let first = round * N_USED % N_EXPERT;
        let routes: Vec<Route> = (first..first + N_USED).map(|expert| Route { expert, weight: share }).collect();
        let rows = vec![WindowRow { routes: &routes }; n_rows as usize];
        experts_window(pool, level, &layer.shape, inputs, &rows, &|expert| layer.expert(expert), &mut residual, scratch);
    });
    N_USED as usize as f64 * layer.expert_bytes() as f64 / seconds / 1e9
}

fn prompt_rate(pool: &ThreadPool, level: SimdLevel, layer: &Layer, n_tokens: u32) -> f64 {
    let mut residual = vec![0.0; n_tokens as usize * N_EMBD];
    let mut memory = Vec::new();
    let scratch = aligned(&mut memory, scratch_bytes(&layer.shape, TILE_PAIRS));
    let tokens: Vec<Vec<u32>> =
        (0..N_EXPERT).map(|expert| (0..n_tokens).filter(|token| (token * 5 + expert) % (N_EXPERT / N_USED) == 0).collect()).collect();
    let shares = vec![1e-6; n_tokens as usize];
    let experts: Vec<ExpertTokens<'_>> = (0_u32..)
        .zip(&tokens)
        .map(|(expert, tokens)| ExpertTokens { weights: layer.expert(expert), tokens, shares: &shares[..tokens.len()] })
        .collect();
    let seconds = best_seconds(pool, level, layer, n_tokens as usize, |_, inputs| {
        experts_prompt_group(pool, level, &layer.shape, inputs, &experts, &mut residual, TILE_PAIRS, scratch);
    });
    6.0 * (N_EMBD * N_FF) as f64 * f64::from(n_tokens * N_USED) / seconds / 1e9
}
