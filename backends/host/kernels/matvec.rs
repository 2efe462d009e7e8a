//! The window path's product: at most a few rows of activations, each weight row read once.
//!
//! Every element is one dot product of a weight row and an activation row, computed by the same function whatever the number
//! of rows in the window: a window of eight rows gives each the bits it has alone.

use super::codes::CHUNK;
use super::dot::{Dots, dots};
use super::floats;
use super::gemm::{Activations, Weights};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::vector::{LANES, Portable, Vector16};
use crate::backends::host::pool::ThreadPool;

/// Most rows of a window.
pub const WINDOW_ROWS: usize = 8;
/// Weights in a task: some ten microseconds of work.
const TASK_WEIGHTS: usize = 1 << 16;
/// Bytes fetched before a product begins: about what one core can have under way.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 2048;
/// Weight rows multiplied at a time.
pub(super) const TILE_ROWS: usize = 32;

/// Products of up to [`TILE_ROWS`] weight rows with each activation row of a window.
pub(super) type TileResults = [[f32; TILE_ROWS]; WINDOW_ROWS];
/// Results to be overwritten.
pub(super) const NO_RESULTS: TileResults = [[0.0; TILE_ROWS]; WINDOW_ROWS];

/// `out[t * weights.n_rows + r] = W[r] . X[t]` for the first `n_tokens` (at most [`WINDOW_ROWS`]) activation rows.
///
/// # Panics
/// Where shapes or formats do not match.
pub fn matvec(pool: &ThreadPool, level: SimdLevel, weights: &Weights<'_>, activations: &Activations<'_>, n_tokens: usize, out: &mut [f32]) {
    let n_rows = weights.n_rows;
    assert_eq!(out.len(), n_tokens * n_rows, "{n_tokens} result rows of {n_rows}");
    let tokens: Vec<usize> = (0..n_tokens).collect();
    let product = WindowProduct::new(level, weights, activations, &tokens);
    let rows_per_task = (TASK_WEIGHTS / weights.n_columns.max(1)).next_multiple_of(TILE_ROWS);
    let out = SharedSlice::new(out);
    pool.run(n_rows.div_ceil(rows_per_task), &|task| {
        let end = ((task + 1) * rows_per_task).min(n_rows);
        let mut tile = NO_RESULTS;
        for first in (task * rows_per_task..end).step_by(TILE_ROWS) {
            let count = TILE_ROWS.min(end - first);
            product.tile(first, count, &mut tile);
            for (token, results) in tile[..n_tokens].iter().enumerate() {
                // SAFETY: each weight row has one task, which alone writes its column of results.
                let out = unsafe { out.part(token * n_rows + first, count) };
                out.copy_from_slice(&results[..count]);
            }
        }
    });
}

/// A weight matrix with some rows of activations.
pub(super) struct WindowProduct<'a> {
    level: SimdLevel,
    weights: Weights<'a>,
    /// The activation rows of the window, in the order of the results.
    rows: [&'a [u8]; WINDOW_ROWS],
    n_rows: usize,
    /// Bytes of a weight row.
    row_bytes: usize,
    /// The fused product; none for f32 activations with quantised weights, which are dequantised first.
    fused: Option<Dots>,
}

impl<'a> WindowProduct<'a> {
    /// Checks shapes; `tokens` are the activation rows taken.
    pub(super) fn new(level: SimdLevel, weights: &Weights<'a>, activations: &Activations<'a>, tokens: &[usize]) -> Self {
        let own_format = weights.check_with(activations);
        assert!(tokens.len() <= WINDOW_ROWS, "a window of {} rows, at most {WINDOW_ROWS}", tokens.len());
        let level = level.min(SimdLevel::detect());
        let fused = (activations.format == own_format).then(|| dots(level, weights.quant));
        let mut rows: [&[u8]; WINDOW_ROWS] = [&[]; WINDOW_ROWS];
        rows.iter_mut().zip(tokens).for_each(|(row, token)| *row = activations.row(*token));
        let row_bytes = weights.n_columns / weights.quant.block_len() * weights.quant.block_bytes();
        Self { level, weights: *weights, rows, n_rows: tokens.len(), row_bytes, fused }
    }

    /// The products of `count` weight rows from `first` on with every activation row, a line of results each.
    pub(super) fn tile(&self, first: usize, count: usize, results: &mut TileResults) {
        let mut done = 0;
        if let Some(four) = self.fused.and_then(|dots| dots.four_for(self.n_rows)) {
            while done + 4 <= count {
                let place = first + done;
                let weights = [self.row(place), self.row(place + 1), self.row(place + 2), self.row(place + 3)];
                for (row, results) in self.rows[..self.n_rows].iter().zip(results.iter_mut()) {
                    results[done..done + 4].copy_from_slice(&four(weights, row));
                }
                done += 4;
            }
        }
        for row in done..count {
            let mut dots = [0.0; WINDOW_ROWS];
            self.dots(first + row, &mut dots[..self.n_rows]);
            results.iter_mut().zip(dots).for_each(|(results, dot)| results[row] = dot);
        }
    }

    /// One row's blocks.
    #[inline]
    fn row(&self, row: usize) -> &'a [u8] {
        &self.weights.bytes[row * self.weights.row_stride..][..self.row_bytes]
    }

    /// Fetches the beginning of the rows from `first` on, which [`tile`](Self::tile) then finds in the cache.
    #[inline]
    pub(super) fn prefetch(&self, first: usize) {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = first;
        #[cfg(target_arch = "x86_64")]
        for line in (0..(4 * self.row_bytes).min(PREFETCH_BYTES)).step_by(64) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and never faults, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.weights.bytes.as_ptr().wrapping_add(first * self.weights.row_stride + line).cast()) };
        }
    }

    /// The products of one weight row with every activation row.
    fn dots(&self, row: usize, out: &mut [f32]) {
        let weights = self.row(row);
        match self.fused {
            Some(dots) => dots.rows(weights, &self.rows[..self.n_rows], out),
            None => self.float_dots(weights, out),
        }
    }

    fn float_dots(&self, weights: &[u8], out: &mut [f32]) {
        match self.level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.float_dots_with::<Portable>(weights, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `new` capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.float_dots_avx2(weights, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.float_dots_avx512(weights, out) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.float_dots_with::<Portable>(weights, out) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn float_dots_avx2(&self, weights: &[u8], out: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.float_dots_with::<super::vector::Avx2>(weights, out) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn float_dots_avx512(&self, weights: &[u8], out: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.float_dots_with::<super::vector::Avx512>(weights, out) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn float_dots_with<V: Vector16>(&self, weights: &[u8], out: &mut [f32]) {
        let (quant, n) = (self.weights.quant, self.weights.n_columns);
        let mut sums = [[0.0_f32; CHAINS * LANES]; WINDOW_ROWS];
        // Zeros behind the last column add nothing.
        let mut values = [0.0_f32; CHUNK];
        let mut padded = [0.0_f32; CHUNK];
        for first in (0..n).step_by(CHUNK) {
            let columns = CHUNK.min(n - first);
            let blocks = &weights[first / quant.block_len() * quant.block_bytes()..][..columns / quant.block_len() * quant.block_bytes()];
            values[columns..].fill(0.0);
            floats::decode(self.level, quant, blocks, &mut values[..columns]);
            for (row, sums) in self.rows[..self.n_rows].iter().zip(&mut sums) {
                let mut activations = row[4 * first..4 * (first + columns)].as_ptr().cast::<f32>();
                if columns < CHUNK {
                    padded[columns..].fill(0.0);
                    let words = row[4 * first..].as_chunks::<4>().0;
                    padded.iter_mut().zip(words).for_each(|(padded, bytes)| *padded = f32::from_le_bytes(*bytes));
                    activations = padded.as_ptr();
                }
                // SAFETY: both sides have 256 readable f32; the caller promises the instructions.
                unsafe { add_products::<V>(values.as_ptr(), activations, sums) };
            }
        }
        for (out, sums) in out.iter_mut().zip(&sums[..self.n_rows]) {
            *out = sums.iter().sum();
        }
    }
}

/// Independent sums side by side, which hide the latency of an addition.
const CHAINS: usize = 4;

/// `sums[i % 64] = fma(left[i], right[i], sums[i % 64])` for 256 numbers.
#[inline(always)]
unsafe fn add_products<V: Vector16>(left: *const f32, right: *const f32, sums: &mut [f32; CHAINS * LANES]) {
    // SAFETY: offsets stay below 256 and 64; the caller promises the instructions.
    unsafe {
        let mut chains = [V::splat(0.0); CHAINS];
        for (chain, sum) in chains.iter_mut().enumerate() {
            *sum = V::load(sums.as_ptr().add(LANES * chain));
        }
        for first in (0..CHUNK).step_by(CHAINS * LANES) {
            for (chain, sum) in chains.iter_mut().enumerate() {
                let place = first + LANES * chain;
                *sum = V::load(left.add(place)).multiply_add(V::load(right.add(place)), *sum);
            }
        }
        for (chain, sum) in chains.iter().enumerate() {
            sum.store(sums.as_mut_ptr().add(LANES * chain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::activations::ActivationFormat;
    use crate::backends::host::kernels::activations::{quantise_rows, row_bytes};
    use crate::backends::host::kernels::gemm::{TokenRows, gemm};
    use crate::backends::host::kernels::test_data::Numbers;
    use crate::quant::QuantType;

    const N_ROWS: usize = 70;

    fn pool(n_threads: usize) -> ThreadPool {
        ThreadPool::new(n_threads).expect("threads")
    }

    /// Runs `work` with a matrix and 8 rows of activations, for every type with both kinds of activations.
    fn for_every_type(work: impl Fn(&Weights<'_>, &Activations<'_>)) {
        for (quant, exact) in QuantType::ALL.into_iter().flat_map(|quant| [(quant, false), (quant, true)]) {
            let mut numbers = Numbers::seeded(91);
            let n = if quant.block_len() == 256 { 768 } else { 352 };
            let weights = numbers.weights(quant, N_ROWS, n);
            let format = ActivationFormat::for_weights(quant, exact);
            let mut rows = vec![0; WINDOW_ROWS * row_bytes(format, n)];
            quantise_rows(&pool(1), SimdLevel::detect(), format, n, &numbers.floats(WINDOW_ROWS * n, 2.0), &mut rows);
            work(&Weights::dense(quant, &weights, N_ROWS, n), &Activations { format, n, bytes: &rows });
        }
    }

    fn product(n_threads: usize, level: SimdLevel, weights: &Weights<'_>, activations: &Activations<'_>, n_tokens: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; n_tokens * N_ROWS];
        matvec(&pool(n_threads), level, weights, activations, n_tokens, &mut out);
        out
    }

    #[test]
    fn a_window_agrees_with_the_prompt_path_at_every_level() {
        for_every_type(|weights, activations| {
            let mut expected = vec![0.0; WINDOW_ROWS * N_ROWS];
            gemm(&pool(1), SimdLevel::Scalar, weights, activations, TokenRows::Contiguous(WINDOW_ROWS), &mut expected, N_ROWS);
            let size = expected.iter().map(|value| value.abs()).sum::<f32>() / expected.len() as f32;
            for level in SimdLevel::available() {
                for (value, expected) in product(1, level, weights, activations, WINDOW_ROWS).iter().zip(&expected) {
                    assert!((value - expected).abs() <= 1e-5 * size, "{} {level:?}: {value} for {expected}", weights.quant);
                }
            }
        });
    }

    #[test]
    fn each_row_has_the_bits_it_has_alone_with_any_number_of_threads() {
        for_every_type(|weights, activations| {
            for level in SimdLevel::available() {
                let together = product(1, level, weights, activations, WINDOW_ROWS);
                for n_tokens in 1..WINDOW_ROWS {
                    let fewer = product(3, level, weights, activations, n_tokens);
                    assert!(fewer == together[..n_tokens * N_ROWS], "{} {level:?}: {n_tokens} rows", weights.quant);
                }
            }
            let level = SimdLevel::detect();
            let together = product(3, level, weights, activations, WINDOW_ROWS);
            let bytes = row_bytes(activations.format, activations.n);
            for row in 0..WINDOW_ROWS {
                let alone = Activations { bytes: &activations.bytes[row * bytes..(row + 1) * bytes], ..*activations };
                let expected = &together[row * N_ROWS..(row + 1) * N_ROWS];
                assert!(product(2, level, weights, &alone, 1) == expected, "{} row {row}", weights.quant);
            }
        });
    }
}
