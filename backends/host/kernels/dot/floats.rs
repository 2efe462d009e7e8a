//! Products of float weights with f32 activations, eight lanes wide.

use std::arch::x86_64::*;

use super::scalar;
use super::vectors::{load_16, load_32, sum_8};
use super::weights::{BF16, F16, F32, Weights};

/// Eight weights from the front of 8 * `BYTES` bytes.
pub(super) trait Floats: Weights {
    /// # Safety
    /// AVX2 and F16C.
    unsafe fn eight(bytes: &[u8]) -> __m256;
}

impl Floats for F32 {
    #[inline(always)]
    unsafe fn eight(bytes: &[u8]) -> __m256 {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_castsi256_ps(load_32(bytes, 0)) }
    }
}

impl Floats for F16 {
    #[inline(always)]
    unsafe fn eight(bytes: &[u8]) -> __m256 {
        // SAFETY: the caller has F16C.
        unsafe { _mm256_cvtph_ps(load_16(bytes, 0)) }
    }
}

impl Floats for BF16 {
    #[inline(always)]
    unsafe fn eight(bytes: &[u8]) -> __m256 {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_16(bytes, 0)))) }
    }
}

/// The product by AVX2; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_avx2<W: Floats>(weights: &[u8], activation: &[u8]) -> f32 {
    let activations = scalar::activations_of::<W>(weights, activation).as_flattened();
    // SAFETY: `dot_fn` gives this function out only where the processor has AVX2, FMA and F16C.
    unsafe { dot::<W>(weights, activations) }
}

/// Four chains of sums hide the latency of the multiply-add.
#[target_feature(enable = "avx2,fma,f16c")]
fn dot<W: Floats>(weights: &[u8], activations: &[u8]) -> f32 {
    let mut sums = [_mm256_setzero_ps(); 4];
    let mut weight_runs = weights.chunks_exact(32 * W::BYTES);
    let mut activation_runs = activations.chunks_exact(128);
    for (weights, activations) in weight_runs.by_ref().zip(activation_runs.by_ref()) {
        for (lane, sum) in sums.iter_mut().enumerate() {
            // SAFETY: this function has the instructions.
            *sum = unsafe { _mm256_fmadd_ps(W::eight(&weights[8 * W::BYTES * lane..]), F32::eight(&activations[32 * lane..]), *sum) };
        }
    }
    let [first, second, third, fourth] = sums;
    // SAFETY: as above.
    let body = unsafe { sum_8(_mm256_add_ps(_mm256_add_ps(first, second), _mm256_add_ps(third, fourth))) };
    body + scalar::dot_floats::<W>(weight_runs.remainder(), activation_runs.remainder())
}
