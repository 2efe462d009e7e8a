//! Gates, number by number, and the moves of rows around them.
//!
//! Every number is a function of the numbers at its place (and, for a normed head, of its head), so cuts, threads and the instruction
//! set change no bit.

use super::norm::{out_in_tasks, rms_norm_row};
use super::simd::SimdLevel;
use super::swiglu::{sigmoid, swiglu};
use crate::backends::host::pool::ThreadPool;

/// A loop over numbers of `left` and their partners of `right`.
type Pairs = fn(left: &mut [f32], right: &[f32]);

/// The forms of one loop over pairs, for each level.
struct Forms {
    scalar: Pairs,
    #[cfg(target_arch = "x86_64")]
    avx2: unsafe fn(left: &mut [f32], right: &[f32]),
    #[cfg(target_arch = "x86_64")]
    avx512: unsafe fn(left: &mut [f32], right: &[f32]),
}

impl Forms {
    fn run(&self, level: SimdLevel, left: &mut [f32], right: &[f32]) {
        match level.min(SimdLevel::detect()) {
            SimdLevel::Scalar => (self.scalar)(left, right),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the level is capped at what this processor has.
            SimdLevel::Avx2 => unsafe { (self.avx2)(left, right) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { (self.avx512)(left, right) },
            #[cfg(not(target_arch = "x86_64"))]
            _ => (self.scalar)(left, right),
        }
    }
}

/// The [`Forms`] of an inlined loop, compiled for each level.
macro_rules! forms {
    ($pairs:path) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2(left: &mut [f32], right: &[f32]) {
            $pairs(left, right);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl")]
        fn avx512(left: &mut [f32], right: &[f32]) {
            $pairs(left, right);
        }
        Forms {
            scalar: $pairs,
            #[cfg(target_arch = "x86_64")]
            avx2,
            #[cfg(target_arch = "x86_64")]
            avx512,
        }
    }};
}

#[inline(always)]
fn times_sigmoid(x: &mut [f32], gates: &[f32]) {
    x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= sigmoid(*gate));
}

#[inline(always)]
fn times_silu(x: &mut [f32], gates: &[f32]) {
    x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= *gate * sigmoid(*gate));
}

/// `x *= sigmoid(gates)`, in rows of `n_cols`.
///
/// # Panics
/// Where lengths do not match.
pub fn sigmoid_gate(pool: &ThreadPool, level: SimdLevel, x: &mut [f32], gates: &[f32], n_cols: usize) {
    assert_eq!(x.len(), gates.len(), "a gate for each number");
    let forms = forms!(times_sigmoid);
    out_in_tasks(pool, n_cols, x, &|first, x| forms.run(level, x, &gates[first..first + x.len()]));
}

/// `gate = silu(gate) * up`, in rows of `n_cols`.
///
/// # Panics
/// Where lengths do not match.
pub fn swiglu_rows(pool: &ThreadPool, level: SimdLevel, gate: &mut [f32], up: &[f32], n_cols: usize) {
    assert_eq!(gate.len(), up.len(), "gate and up");
    out_in_tasks(pool, n_cols, gate, &|first, gate| swiglu(level, gate, &up[first..first + gate.len()]));
}

/// `sum[r] += sigmoid(gates[r]) * x[r]`; `sum` and `x` are `[gates.len(), n_cols]`.
///
/// # Panics
/// Where lengths do not match.
pub fn add_gated(pool: &ThreadPool, sum: &mut [f32], x: &[f32], gates: &[f32], n_cols: usize) {
    assert!(sum.len() == x.len() && sum.len() == gates.len() * n_cols, "a gate for each row");
    out_in_tasks(pool, n_cols, sum, &|first, sum| {
        let rows = sum.chunks_exact_mut(n_cols).zip(x[first..].chunks_exact(n_cols)).zip(&gates[first / n_cols..]);
        for ((sum, x), gate) in rows {
            let share = sigmoid(*gate);
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += share * x);
        }
    });
}

/// Norms each head with `weight` `[head_dim]`, then multiplies it by `silu(gates)`, in place on `x` `[.., head_dim]`.
///
/// # Panics
/// Where lengths do not match.
pub fn gated_head_norm(pool: &ThreadPool, level: SimdLevel, x: &mut [f32], weight: &[f32], gates: &[f32], eps: f32) {
    assert_eq!(x.len(), gates.len(), "a gate for each number");
    let forms = forms!(times_silu);
    out_in_tasks(pool, weight.len(), x, &|first, x| {
        x.chunks_exact_mut(weight.len()).for_each(|head| rms_norm_row(level, head, weight, eps));
        forms.run(level, x, &gates[first..first + x.len()]);
    });
}

/// Splits `joined` `[.., 2, n]` into its first and second halves, each `[.., n]`.
///
/// # Panics
/// Where lengths do not match.
pub fn split_pairs(joined: &[f32], first: &mut [f32], second: &mut [f32], n: usize) {
    assert!(first.len() == second.len() && joined.len() == 2 * first.len(), "two halves");
    let halves = first.chunks_exact_mut(n).zip(second.chunks_exact_mut(n));
    for (pair, (first, second)) in joined.chunks_exact(2 * n).zip(halves) {
        first.copy_from_slice(&pair[..n]);
        second.copy_from_slice(&pair[n..]);
    }
}

/// Joins rows of `left` and `right`, each `[n_rows, n]`, to `joined` `[n_rows, 2, n]`.
///
/// # Panics
/// Where lengths do not match.
pub fn join_pairs(left: &[f32], right: &[f32], joined: &mut [f32], n: usize) {
    assert!(left.len() == right.len() && joined.len() == 2 * left.len(), "two halves");
    let halves = left.chunks_exact(n).zip(right.chunks_exact(n));
    for (pair, (left, right)) in joined.chunks_exact_mut(2 * n).zip(halves) {
        pair[..n].copy_from_slice(left);
        pair[n..].copy_from_slice(right);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no bit depends on level, threads or the cut of rows. (Values are compared with f64 in `tests/ops`.)
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    #[test]
    fn levels_threads_and_cuts_change_no_bit() {
        // More numbers than one task takes.
        let (n_rows, n_cols) = (300, 160);
        let mut numbers = Numbers::seeded(81);
        let (x, gates) = (numbers.floats(n_rows * n_cols, 3.0), numbers.floats(n_rows * n_cols, 8.0));
        let weight = numbers.floats(32, 1.0);
        let all = |level, n_threads, rows: std::ops::Range<usize>| {
            let pool = ThreadPool::new(n_threads).expect("threads");
            let part = rows.start * n_cols..rows.end * n_cols;
            let mut results = [x[part.clone()].to_vec(), x[part.clone()].to_vec(), x[part.clone()].to_vec(), x[part.clone()].to_vec()];
            let gates_of_part = &gates[part];
            let [gated, swiglued, summed, normed] = &mut results;
            sigmoid_gate(&pool, level, gated, gates_of_part, n_cols);
            swiglu_rows(&pool, level, swiglued, gates_of_part, n_cols);
            add_gated(&pool, summed, gates_of_part, &gates[rows], n_cols);
            gated_head_norm(&pool, level, normed, &weight, gates_of_part, 1e-6);
            results
        };
        let expected = all(SimdLevel::Scalar, 1, 0..n_rows);
        for level in SimdLevel::available() {
            for n_threads in [1, 2] {
                assert!(all(level, n_threads, 0..n_rows) == expected, "{level:?}, {n_threads} threads");
            }
            // The gates of rows are the first of all gates, so only `add_gated` of rows from 0 on can be compared.
            let cut = all(level, 1, 0..7);
            assert!(cut.iter().zip(&expected).all(|(cut, whole)| *cut == whole[..7 * n_cols]), "{level:?}");
        }
    }

    #[test]
    fn what_was_joined_splits_again() {
        let mut numbers = Numbers::seeded(82);
        let (left, right) = (numbers.floats(3 * 5, 1.0), numbers.floats(3 * 5, 1.0));
        let mut joined = vec![0.0; 30];
        join_pairs(&left, &right, &mut joined, 5);
        assert_eq!((joined[4], joined[5], joined[10]), (left[4], right[0], left[5]));
        let (mut first, mut second) = (vec![0.0; 15], vec![0.0; 15]);
        split_pairs(&joined, &mut first, &mut second, 5);
        assert_eq!((first, second), (left, right));
    }
}
