//! The experts' activation: `silu(gate) * up`.

use super::simd::SimdLevel;

/// `gate[i] = gate[i] * sigmoid(gate[i]) * up[i]`.
///
/// The exponential is a polynomial of our own (relative error below 1e-6), the same at every level, so that the result does
/// not depend on a C library.
///
/// # Panics
/// Where the lengths differ.
pub fn swiglu(level: SimdLevel, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    match level.min(SimdLevel::detect()) {
        SimdLevel::Scalar => activate(gate, up),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is capped at what this processor has.
        SimdLevel::Avx2 => unsafe { activate_avx2(gate, up) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx512 => unsafe { activate_avx512(gate, up) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => activate(gate, up),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn activate_avx2(gate: &mut [f32], up: &[f32]) {
    activate(gate, up);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
fn activate_avx512(gate: &mut [f32], up: &[f32]) {
    activate(gate, up);
}

#[inline(always)]
fn activate(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exponential(-*gate)) * up;
    }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exponential(-x))
}

/// e^x within a relative error of 1e-6 for x in -87..=88; held at the ends outside, NaN stays NaN.
///
/// Written without branches and calls so that loops over it become vector code.
#[inline(always)]
pub(super) fn exponential(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the sum.
    const ROUNDER: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUNDER;
    let power = shifted - ROUNDER;
    let rest = x - power * LN2_HIGH - power * LN2_LOW;
    let polynomial =
        1.0 + rest * (1.0 + rest * (0.5 + rest * (1.0 / 6.0 + rest * (1.0 / 24.0 + rest * (1.0 / 120.0 + rest * (1.0 / 720.0))))));
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    polynomial * scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    #[test]
    fn the_exponential_is_close_over_its_whole_range_and_held_outside() {
        for step in 0..=17_500 {
            let x = -87.0 + step as f32 * 0.01;
            let exact = f64::from(x).exp();
            assert!((f64::from(exponential(x)) - exact).abs() <= 1e-6 * exact, "e^{x}");
        }
        assert_eq!(exponential(-1e9), exponential(-87.0));
        assert_eq!(exponential(f32::INFINITY), exponential(88.0));
        assert_eq!(exponential(0.0), 1.0);
        assert!(exponential(f32::NAN).is_nan());
    }

    #[test]
    fn silu_agrees_with_f64_and_is_equal_at_every_level() {
        let mut numbers = Numbers::seeded(41);
        let (mut gate, mut up) = (numbers.floats(1_003, 20.0), numbers.floats(1_003, 2.0));
        gate.extend([-200.0, 200.0, 0.0, -0.0]);
        up.extend([1.0; 4]);
        let mut expected = gate.clone();
        swiglu(SimdLevel::Scalar, &mut expected, &up);
        for ((gate, up), out) in gate.iter().zip(&up).zip(&expected) {
            let exact = f64::from(*gate) / (1.0 + (-f64::from(*gate)).exp()) * f64::from(*up);
            assert!((f64::from(*out) - exact).abs() <= 2e-6 * exact.abs() + 1e-30, "{out} for {exact}");
        }
        for level in SimdLevel::available() {
            let mut out = gate.clone();
            swiglu(level, &mut out, &up);
            assert_eq!(out, expected, "{level:?}");
        }
    }
}
