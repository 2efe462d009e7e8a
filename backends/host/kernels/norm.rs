//! RMS norms: of whole rows, and of each head.

use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use crate::backends::host::pool::ThreadPool;

/// Numbers a task norms: some microseconds of work.
const TASK_NUMBERS: usize = 16_384;
/// Partial sums of a sum of squares; the order of additions is part of the result, so it is the same at every level.
const LANES: usize = 16;

/// `out[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight`, rows of `weight.len()` numbers.
///
/// `rows` and `out` are `[n_rows, weight.len()]`. Norms of heads are the same call with rows of the head size.
///
/// # Panics
/// Where lengths do not match.
pub fn rms_norm(pool: &ThreadPool, level: SimdLevel, rows: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert_eq!(rows.len(), out.len(), "as many results as inputs");
    out_in_tasks(pool, weight.len(), out, &|first, out| {
        for (row, out) in rows[first..first + out.len()].chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            out.copy_from_slice(row);
            rms_norm_row(level, out, weight, epsilon);
        }
    });
}

/// [`rms_norm`] in place.
///
/// # Panics
/// Where the numbers are no whole number of rows.
pub fn rms_norm_in_place(pool: &ThreadPool, level: SimdLevel, rows: &mut [f32], weight: &[f32], epsilon: f32) {
    out_in_tasks(pool, weight.len(), rows, &|_, rows| {
        for row in rows.chunks_exact_mut(weight.len()) {
            rms_norm_row(level, row, weight, epsilon);
        }
    });
}

/// Calls `work` with parts of `out`, whole rows of `n`, and the number of each part's first element.
pub(super) fn out_in_tasks(pool: &ThreadPool, n: usize, out: &mut [f32], work: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    assert!(n > 0 && out.len().is_multiple_of(n), "{} numbers in rows of {n}", out.len());
    let (len, task_len) = (out.len(), (TASK_NUMBERS / n).max(1) * n);
    let out = SharedSlice::new(out);
    pool.run(len.div_ceil(task_len), &|task| {
        let first = task * task_len;
        // SAFETY: the tasks' ranges follow each other without overlap.
        work(first, unsafe { out.part(first, task_len.min(len - first)) });
    });
}

/// Norms one row in place.
///
/// # Panics
/// Where the lengths differ.
pub fn rms_norm_row(level: SimdLevel, row: &mut [f32], weight: &[f32], epsilon: f32) {
    assert_eq!(row.len(), weight.len(), "a row and its weights");
    match level.min(SimdLevel::detect()) {
        SimdLevel::Scalar => norm(row, weight, epsilon),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is capped at what this processor has.
        _ => unsafe { norm_avx2(row, weight, epsilon) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => norm(row, weight, epsilon),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn norm_avx2(row: &mut [f32], weight: &[f32], epsilon: f32) {
    norm(row, weight, epsilon);
}

#[inline(always)]
fn norm(row: &mut [f32], weight: &[f32], epsilon: f32) {
    // Squares are summed in f64: exact products, and no overflow of large rows.
    let mut lanes = [0.0_f64; LANES];
    let (whole, rest) = row.as_chunks::<LANES>();
    for chunk in whole {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    let mean = lanes.iter().sum::<f64>() / row.len() as f64;
    let factor = (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32;
    for (value, weight) in row.iter_mut().zip(weight) {
        *value = *value * factor * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    #[test]
    fn a_normed_row_agrees_with_f64_and_is_equal_at_every_level_and_thread_count() {
        let n = 200;
        let mut numbers = Numbers::seeded(21);
        let (rows, weight) = (numbers.floats(300 * n, 4.0), numbers.floats(n, 2.0));
        let mut expected = vec![0.0; rows.len()];
        rms_norm(&ThreadPool::new(1).expect("threads"), SimdLevel::Scalar, &rows, &weight, 1e-6, &mut expected);
        for (row, out) in rows.chunks_exact(n).zip(expected.chunks_exact(n)) {
            let mean = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
            for ((value, weight), out) in row.iter().zip(&weight).zip(out) {
                let exact = f64::from(*value) / (mean + 1e-6).sqrt() * f64::from(*weight);
                assert!((exact - f64::from(*out)).abs() <= 3e-7 * exact.abs(), "{out} for {exact}");
            }
        }
        for level in SimdLevel::available() {
            for n_threads in [1, 2, 3] {
                let pool = ThreadPool::new(n_threads).expect("threads");
                let mut in_place = rows.clone();
                rms_norm_in_place(&pool, level, &mut in_place, &weight, 1e-6);
                assert_eq!(in_place, expected, "{level:?} {n_threads}");
            }
        }
    }
}
