//! Speed of attention on this machine: prompts in GFLOP/s, single rows in microseconds and GB/s of cache read.
//!
//! `cargo run --release --example attention_speed [THREADS]`
#![allow(clippy::print_stdout, reason = "an example's output is its purpose")]

use std::time::Instant;

use ebbtide::backends::host::kernels::attention::{AttentionInputs, attention};
use ebbtide::backends::host::kernels::kv::{KvShape, KvType};
use ebbtide::backends::host::kernels::simd::SimdLevel;
use ebbtide::backends::host::pool::ThreadPool;

/// Qwen3-30B-A3B.
const N_HEAD: usize = 32;
const N_HEAD_KV: usize = 4;
const HEAD_SIZE: usize = 128;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let n_threads = std::env::args().nth(1).map_or(Ok(1), |text| text.parse())?;
    let pool = ThreadPool::new(n_threads)?;
    for level in SimdLevel::available().into_iter().filter(|level| *level > SimdLevel::Scalar) {
        for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
            let shape = KvShape { kv_type, n_head_kv: N_HEAD_KV, head_size: HEAD_SIZE };
            let prompt = seconds(&pool, level, shape, &(0..512).collect::<Vec<_>>());
            let single = seconds(&pool, level, shape, &[4_095]);
            let flops = 4.0 * (512.0 * 513.0 / 2.0) * (N_HEAD * HEAD_SIZE) as f64;
            let bytes = 2.0 * 4_096.0 * shape.position_bytes() as f64;
            let (speed, micros, rate) = (flops / prompt / 1e9, single * 1e6, bytes / single / 1e9);
            println!("{level:?} {kv_type:?}: 512 rows {speed:.1} GFLOP/s; one row on 4,096 keys {micros:.0} us, {rate:.1} GB/s");
        }
    }
    Ok(())
}

/// The best of some runs: other programs only ever make it slower.
fn seconds(pool: &ThreadPool, level: SimdLevel, shape: KvShape, positions: &[i32]) -> f64 {
    // 0x2c2c is a small number both as f16 and in f32 pairs.
    let cache = vec![0x2c; 4_096 * shape.position_bytes()];
    let len = positions.len() * N_HEAD * HEAD_SIZE;
    let queries: Vec<f32> = (0..len).map(|index| (index * 29 % 113) as f32 / 56.0 - 1.0).collect();
    let mut out = vec![0.0; len];
    let scale = 1.0 / (HEAD_SIZE as f32).sqrt();
    let inputs = AttentionInputs { shape, n_head: N_HEAD, scale, queries: &queries, keys: &cache, values: &cache, positions };
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < 0.3 {
        let begin = Instant::now();
        attention(pool, level, &inputs, &mut out);
        best = best.min(begin.elapsed().as_secs_f64());
    }
    best
}
