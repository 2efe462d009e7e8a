//! Causal attention over the key/value cache.
//!
//! Keys and values are taken in tiles of 64 positions, counted from position 0, and the softmax is carried from tile to tile
//! (running maximum, running sum, running result). A tile is turned to f32 once for all query rows and all query heads of a
//! task. Every number of a result is one chain over ascending positions, so rows in the batch, tasks, threads and the
//! instruction set change no bit.

use std::cell::RefCell;

use super::kv::KvShape;
use super::kv_tile::{KEY_TILE, KvTile, padded};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::exponential;
use super::vector::{LANES, OUTER_ROWS, Portable, Vector16, outer_product};
use crate::backends::host::pool::ThreadPool;

/// Query rows times query heads of a task: their results stay in the second-level cache.
const TASK_QUERIES: usize = 128;

/// What the attention of one layer reads.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInputs<'a> {
    /// Shape of both caches.
    pub shape: KvShape,
    /// Query heads, a multiple of the key/value heads; consecutive ones share a key/value head.
    pub n_head: usize,
    /// Factor of the scores, usually `1 / sqrt(head_size)`.
    pub scale: f32,
    /// `[n_rows, n_head, head_size]`.
    pub queries: &'a [f32],
    /// Keys, laid out as [`KvShape`] says.
    pub keys: &'a [u8],
    /// Values, likewise.
    pub values: &'a [u8],
    /// Position of each row; row t attends to cache positions `0..=positions[t]`.
    pub positions: &'a [i32],
}

impl AttentionInputs<'_> {
    /// Asserts that the parts fit each other and a result of `out_len` numbers.
    pub(super) fn check(&self, out_len: usize) {
        let shape = &self.shape;
        let n_rows = self.positions.len();
        assert_eq!(self.queries.len(), n_rows * self.n_head * shape.head_size, "a query row for each position");
        assert_eq!(out_len, self.queries.len(), "as many results as queries");
        assert!(shape.n_head_kv > 0 && self.n_head.is_multiple_of(shape.n_head_kv), "{} heads on {}", self.n_head, shape.n_head_kv);
        for position in self.positions {
            let end = usize::try_from(*position).map(|position| (position + 1) * shape.position_bytes()).expect("position not negative");
            assert!(end <= self.keys.len() && end <= self.values.len(), "position {position} lies beyond the cache");
        }
    }
}

/// Computes `out[n_rows, n_head, head_size]`.
///
/// # Panics
/// Where lengths do not match, or a position is negative or beyond the cache.
pub fn attention(pool: &ThreadPool, level: SimdLevel, inputs: &AttentionInputs<'_>, out: &mut [f32]) {
    inputs.check(out.len());
    let level = level.min(SimdLevel::detect());
    let tasks = Tasks::split(inputs, pool.n_threads());
    let out = SharedSlice::new(out);
    // Later rows see more keys: the longest tasks are claimed first.
    pool.run(tasks.count(), &|task| tasks.part(tasks.count() - 1 - task).compute(level, inputs, out));
}

/// The cut of rows and query heads into tasks.
struct Tasks {
    n_rows: usize,
    n_head: usize,
    rows_per_task: usize,
    heads_per_task: usize,
}

impl Tasks {
    /// Tasks keep the query heads of a key/value head together, unless threads would have nothing to do.
    fn split(inputs: &AttentionInputs<'_>, n_threads: usize) -> Self {
        let n_rows = inputs.positions.len();
        let group = inputs.n_head / inputs.shape.n_head_kv;
        let rows_per_task = (TASK_QUERIES / group).max(1);
        let mut heads_per_task = group;
        while n_threads > 1 && heads_per_task.is_multiple_of(2) && heads_per_task > OUTER_ROWS {
            if n_rows.div_ceil(rows_per_task) * (inputs.n_head / heads_per_task) >= 2 * n_threads {
                break;
            }
            heads_per_task /= 2;
        }
        Self { n_rows, n_head: inputs.n_head, rows_per_task, heads_per_task }
    }

    fn count(&self) -> usize {
        self.n_rows.div_ceil(self.rows_per_task) * (self.n_head / self.heads_per_task)
    }

    fn part(&self, task: usize) -> Part {
        let head_tasks = self.n_head / self.heads_per_task;
        let first_row = task / head_tasks * self.rows_per_task;
        Part {
            first_row,
            n_rows: self.rows_per_task.min(self.n_rows - first_row),
            first_head: task % head_tasks * self.heads_per_task,
            n_heads: self.heads_per_task,
        }
    }
}

/// Query rows and heads of a task; the heads share one key/value head.
#[derive(Clone, Copy)]
struct Part {
    first_row: usize,
    n_rows: usize,
    first_head: usize,
    n_heads: usize,
}

/// Buffers a thread keeps from task to task.
#[derive(Default)]
struct Scratch {
    tile: KvTile,
    /// Softmax state of each query.
    running: Vec<Running>,
    /// `[queries][padded head]`.
    results: Vec<f32>,
}

/// Softmax of the tiles so far.
#[derive(Clone, Copy)]
struct Running {
    largest: f32,
    sum: f32,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Part {
    fn compute(self, level: SimdLevel, inputs: &AttentionInputs<'_>, out: SharedSlice<'_, f32>) {
        SCRATCH.with_borrow_mut(|scratch| match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.compute_with::<Portable>(inputs, out, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `attention` capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.compute_avx2(inputs, out, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.compute_avx512(inputs, out, scratch) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.compute_with::<Portable>(inputs, out, scratch) },
        });
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn compute_avx2(self, inputs: &AttentionInputs<'_>, out: SharedSlice<'_, f32>, scratch: &mut Scratch) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.compute_with::<super::vector::Avx2>(inputs, out, scratch) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn compute_avx512(self, inputs: &AttentionInputs<'_>, out: SharedSlice<'_, f32>, scratch: &mut Scratch) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.compute_with::<super::vector::Avx512>(inputs, out, scratch) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn compute_with<V: Vector16>(self, inputs: &AttentionInputs<'_>, out: SharedSlice<'_, f32>, scratch: &mut Scratch) {
        let head_size = inputs.shape.head_size;
        let padded = padded(head_size);
        let n_queries = self.n_rows * self.n_heads;
        let head_kv = self.first_head / (inputs.n_head / inputs.shape.n_head_kv);
        scratch.tile.fit(head_size);
        scratch.running.clear();
        scratch.running.resize(n_queries, Running { largest: f32::NEG_INFINITY, sum: 0.0 });
        scratch.results.clear();
        scratch.results.resize(n_queries * padded, 0.0);
        let positions = &inputs.positions[self.first_row..self.first_row + self.n_rows];
        let n_keys = positions.iter().copied().max().map_or(0, |position| position as usize + 1);
        for first_key in (0..n_keys).step_by(KEY_TILE) {
            // SAFETY: passed on from the caller.
            unsafe {
                scratch.tile.load::<V>(&inputs.shape, (inputs.keys, inputs.values), head_kv, first_key, KEY_TILE.min(n_keys - first_key));
                self.attend_to_tile::<V>(inputs, first_key, scratch);
            }
        }
        for query in 0..n_queries {
            let (row, head) = (self.first_row + query / self.n_heads, self.first_head + query % self.n_heads);
            // SAFETY: rows and heads of a task are its own.
            let out = unsafe { out.part((row * inputs.n_head + head) * head_size, head_size) };
            let sum = scratch.running[query].sum;
            out.iter_mut().zip(&scratch.results[query * padded..]).for_each(|(out, result)| *out = result / sum);
        }
    }

    /// Carries every query over one tile, four at a time.
    #[inline(always)]
    unsafe fn attend_to_tile<V: Vector16>(self, inputs: &AttentionInputs<'_>, first_key: usize, scratch: &mut Scratch) {
        let n_queries = self.n_rows * self.n_heads;
        for first in (0..n_queries).step_by(OUTER_ROWS) {
            // SAFETY: passed on from the caller.
            unsafe {
                if first + OUTER_ROWS <= n_queries {
                    self.attend::<V, OUTER_ROWS>(inputs, first_key, first, scratch);
                } else {
                    for query in first..n_queries {
                        self.attend::<V, 1>(inputs, first_key, query, scratch);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn attend<V: Vector16, const QUERIES: usize>(
        self,
        inputs: &AttentionInputs<'_>,
        first_key: usize,
        first_query: usize,
        scratch: &mut Scratch,
    ) {
        let head_size = inputs.shape.head_size;
        let padded = padded(head_size);
        let (mut n_valid, mut queries) = ([0; QUERIES], [std::ptr::null(); QUERIES]);
        for index in 0..QUERIES {
            let query = first_query + index;
            let (row, head) = (self.first_row + query / self.n_heads, self.first_head + query % self.n_heads);
            n_valid[index] = (inputs.positions[row] as usize + 1).saturating_sub(first_key).min(KEY_TILE);
            queries[index] = inputs.queries[(row * inputs.n_head + head) * head_size..][..head_size].as_ptr();
        }
        let most = n_valid.iter().copied().max().unwrap_or(0);
        if most == 0 {
            return;
        }
        let mut scores = [[0.0_f32; KEY_TILE]; QUERIES];
        let score_rows = scores.each_mut().map(|row| row.as_mut_ptr());
        // SAFETY: query rows have `head_size` numbers, the turned keys as many rows of 64, a score row 64.
        unsafe { outer_product::<V, QUERIES>(head_size, queries, scratch.tile.keys(), KEY_TILE, score_rows, most.next_multiple_of(LANES)) };
        let mut results = [std::ptr::null_mut::<f32>(); QUERIES];
        for index in 0..QUERIES {
            let query = first_query + index;
            let result = &mut scratch.results[query * padded..(query + 1) * padded];
            if n_valid[index] > 0 {
                scratch.running[query].take_in(&mut scores[index], n_valid[index], inputs.scale, result);
            }
            results[index] = result.as_mut_ptr();
        }
        let shares = scores.each_ref().map(|row| row.as_ptr());
        let values = scratch.tile.values();
        let common = n_valid.iter().copied().min().unwrap_or(0);
        // SAFETY: share rows have 64 numbers, `values` 64 rows of `padded`, a result row `padded`; rows are different.
        unsafe {
            outer_product::<V, QUERIES>(common, shares, values, padded, results, padded);
            // A query must not even meet a key behind its position, whose value may be anything: the rest goes one by one.
            for index in 0..QUERIES {
                let rest = n_valid[index] - common;
                let (share, values) = (shares[index].add(common), values.add(common * padded));
                outer_product::<V, 1>(rest, [share], values, padded, [results[index]], padded);
            }
        }
    }
}

impl Running {
    /// Turns the first `count` scores of a tile into shares and rescales the result so far to the new maximum.
    #[inline(always)]
    fn take_in(&mut self, scores: &mut [f32; KEY_TILE], count: usize, scale: f32, result: &mut [f32]) {
        scores[..count].iter_mut().for_each(|score| *score *= scale);
        scores[count..].fill(f32::NEG_INFINITY);
        let mut maxima = [self.largest; LANES];
        for part in scores.as_chunks::<LANES>().0 {
            maxima.iter_mut().zip(part).for_each(|(largest, score)| *largest = larger(*largest, *score));
        }
        for half in [8, 4, 2, 1] {
            (0..half).for_each(|lane| maxima[lane] = larger(maxima[lane], maxima[lane + half]));
        }
        let largest = maxima[0];
        scores.iter_mut().for_each(|score| *score = exponential(*score - largest));
        scores[count..].fill(0.0);
        let mut lanes = [0.0_f32; LANES];
        for part in scores.as_chunks::<LANES>().0 {
            lanes.iter_mut().zip(part).for_each(|(lane, share)| *lane += share);
        }
        for half in [8, 4, 2, 1] {
            (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
        }
        let keep = if self.largest == largest { 1.0 } else { exponential(self.largest - largest) };
        self.sum = self.sum * keep + lanes[0];
        self.largest = largest;
        result.iter_mut().for_each(|value| *value *= keep);
    }
}

/// The larger number, spelled so that loops over it become vector code.
#[inline(always)]
pub(super) fn larger(left: f32, right: f32) -> f32 {
    if right > left { right } else { left }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
