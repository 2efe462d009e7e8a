//! Prints how many GB/s of weights one core multiplies, for every type and instruction level.
//!
//! Use: `cargo run --release --example kernel_speed [MILLISECONDS]`, the time for each number (default 40).
//!
//! Two numbers a form: rows that stay in the second-level cache (the speed of the kernel), and rows of 64 MiB, read once
//! each (with the speed of memory). The best of the passes counts, as others may use the machine.
#![allow(clippy::print_stdout, reason = "the table is the purpose")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use ebbtide::backends::host::kernels::{dot::dot_fn, simd::SimdLevel};
use ebbtide::quant::QuantType;

const ROW_LEN: usize = 4096;
const CACHED_BYTES: usize = 512 << 10;
const STREAMED_BYTES: usize = 64 << 20;

fn main() {
    let millis = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(40);
    let levels = [SimdLevel::Scalar, SimdLevel::Avx2, SimdLevel::Avx512].into_iter().filter(|level| *level <= SimdLevel::detect());
    let levels: Vec<_> = levels.collect();
    println!("GB/s of weights on one core, rows of {ROW_LEN}: in cache / streamed");
    print!("{:8}", "type");
    levels.iter().for_each(|level| print!("{:>18}", format!("{level:?}")));
    println!();
    let noise: Vec<u8> = (0..STREAMED_BYTES as u64).map(noise).collect();
    // Exponents of eight bits get a middle value, because arithmetic with subnormal numbers would be measured otherwise.
    let tame: Vec<u8> = noise.iter().map(|byte| byte | 0x20).collect();
    for quant_type in QuantType::ALL {
        print!("{:8}", quant_type.to_string());
        let bytes = if matches!(quant_type, QuantType::F32 | QuantType::BF16 | QuantType::MXFP4) { &tame } else { &noise };
        for level in &levels {
            let time = Duration::from_millis(millis);
            let (cached, streamed) = (speed(*level, quant_type, &bytes[..CACHED_BYTES], time), speed(*level, quant_type, bytes, time));
            print!("{:>18}", format!("{cached:6.2} /{streamed:6.2}"));
        }
        println!();
    }
}

/// A byte without pattern; bit 6 is clear so that no half-precision scale is an infinity.
fn noise(index: u64) -> u8 {
    (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 & 0xbf
}

/// The best pass over all rows, in bytes a nanosecond.
fn speed(level: SimdLevel, quant_type: QuantType, weights: &[u8], time: Duration) -> f64 {
    let dot = dot_fn(level, quant_type);
    let row_bytes = ROW_LEN / quant_type.block_len() * quant_type.block_bytes();
    // This byte is the quant 63, and four of them are the f32 0.75: one row serves every format.
    let activation = vec![0x3f_u8; 5 * ROW_LEN];
    let rows = weights.chunks_exact(row_bytes);
    let mut best = 0.0_f64;
    let begin = Instant::now();
    while begin.elapsed() < time {
        let pass = Instant::now();
        for row in rows.clone() {
            black_box(dot(black_box(row), black_box(&activation)));
        }
        best = best.max((rows.len() * row_bytes) as f64 / pass.elapsed().as_nanos() as f64);
    }
    best
}
