//! Causal attention of a window: one to eight rows over a long cache.
//!
//! The cache is cut into stretches of 64 positions, counted from position 0. Each stretch gives, for every query head on its
//! key/value head, a largest score, a sum and a weighted value; the stretches of a row are then joined in ascending order. So a
//! row's result does not depend on the other rows of the window, on threads or on how the stretches are spread over them.

use std::cell::RefCell;

use super::attention::{AttentionInputs, larger};
use super::kv_tile::{KEY_TILE, KvTile, padded};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::exponential;
use super::vector::{LANES, OUTER_ROWS, Portable, Vector16, outer_product};
use crate::backends::host::pool::ThreadPool;

/// Largest score and sum, stored behind a partial result.
const STATE: usize = 2;

thread_local! {
    static TILE: RefCell<KvTile> = RefCell::default();
    /// Partial results of the calling thread's last window, kept to spare an allocation a layer.
    static PARTIAL: RefCell<Vec<f32>> = RefCell::default();
}

/// One task: a stretch of the cache for a row and a key/value head.
struct Stretch {
    row: usize,
    head_kv: usize,
    first: usize,
    count: usize,
}

/// Where the partial results of a row and key/value head begin, in stretches.
struct Plan {
    stretches: Vec<Stretch>,
    /// First stretch of each pair of row and key/value head, and one past the last.
    first_of_pair: Vec<usize>,
}

impl Plan {
    fn new(inputs: &AttentionInputs<'_>) -> Self {
        let mut plan = Self { stretches: Vec::new(), first_of_pair: vec![0] };
        for (row, &position) in inputs.positions.iter().enumerate() {
            let n_keys = usize::try_from(position).map_or(0, |position| position + 1);
            for head_kv in 0..inputs.shape.n_head_kv {
                let part = |first| Stretch { row, head_kv, first, count: KEY_TILE.min(n_keys - first) };
                plan.stretches.extend((0..n_keys).step_by(KEY_TILE).map(part));
                plan.first_of_pair.push(plan.stretches.len());
            }
        }
        plan
    }
}

/// Computes `out[n_rows, n_head, head_size]`.
///
/// # Panics
/// Where lengths do not match, or a position is negative or beyond the cache.
pub fn attention_window(pool: &ThreadPool, level: SimdLevel, inputs: &AttentionInputs<'_>, out: &mut [f32]) {
    inputs.check(out.len());
    let level = level.min(SimdLevel::detect());
    let (head_size, group) = (inputs.shape.head_size, inputs.n_head / inputs.shape.n_head_kv);
    let plan = Plan::new(inputs);
    let record = padded(head_size) + STATE;
    PARTIAL.with_borrow_mut(|partial| {
        partial.resize(plan.stretches.len() * group * record, 0.0);
        let shared = SharedSlice::new(partial);
        pool.run(plan.stretches.len(), &|task| {
            // SAFETY: the records of a stretch are written by its one task.
            let records = unsafe { shared.part(task * group * record, group * record) };
            plan.stretches[task].compute(level, inputs, records);
        });
        for (pair, heads) in out.chunks_exact_mut(group * head_size).enumerate() {
            let records = &partial[plan.first_of_pair[pair] * group * record..plan.first_of_pair[pair + 1] * group * record];
            for (head, out) in heads.chunks_exact_mut(head_size).enumerate() {
                join(records.chunks_exact(record).skip(head).step_by(group), out);
            }
        }
    });
}

/// Joins the partial results of one query head in ascending order.
fn join<'a>(records: impl Iterator<Item = &'a [f32]> + Clone, out: &mut [f32]) {
    let (head_size, state) = (out.len(), padded(out.len()));
    let largest = records.clone().map(|record| record[state]).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    out.fill(0.0);
    for record in records {
        let share = exponential(record[state] - largest);
        sum += share * record[state + 1];
        out.iter_mut().zip(&record[..head_size]).for_each(|(out, value)| *out += share * value);
    }
    out.iter_mut().for_each(|out| *out /= sum);
}

impl Stretch {
    fn compute(&self, level: SimdLevel, inputs: &AttentionInputs<'_>, records: &mut [f32]) {
        TILE.with_borrow_mut(|tile| match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.compute_with::<Portable>(inputs, tile, records) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.compute_avx2(inputs, tile, records) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.compute_avx512(inputs, tile, records) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.compute_with::<Portable>(inputs, tile, records) },
        })
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn compute_avx2(&self, inputs: &AttentionInputs<'_>, tile: &mut KvTile, records: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.compute_with::<super::vector::Avx2>(inputs, tile, records) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn compute_avx512(&self, inputs: &AttentionInputs<'_>, tile: &mut KvTile, records: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.compute_with::<super::vector::Avx512>(inputs, tile, records) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn compute_with<V: Vector16>(&self, inputs: &AttentionInputs<'_>, tile: &mut KvTile, records: &mut [f32]) {
        let shape = &inputs.shape;
        let (head_size, group) = (shape.head_size, inputs.n_head / shape.n_head_kv);
        let first_query = (self.row * inputs.n_head + self.head_kv * group) * head_size;
        let queries = &inputs.queries[first_query..first_query + group * head_size];
        let record = padded(head_size) + STATE;
        tile.fit(head_size);
        // SAFETY: passed on from the caller.
        unsafe { tile.load::<V>(shape, (inputs.keys, inputs.values), self.head_kv, self.first, self.count) };
        let (query_fours, record_fours) = (queries.chunks_exact(OUTER_ROWS * head_size), records.chunks_exact_mut(OUTER_ROWS * record));
        for (queries, records) in query_fours.zip(record_fours) {
            // SAFETY: passed on from the caller.
            unsafe { self.attend::<V, OUTER_ROWS>(inputs.scale, tile, queries, records) };
        }
        let done = group / OUTER_ROWS * OUTER_ROWS;
        let rest = queries[done * head_size..].chunks_exact(head_size);
        for (query, record) in rest.zip(records[done * record..].chunks_exact_mut(record)) {
            // SAFETY: passed on from the caller.
            unsafe { self.attend::<V, 1>(inputs.scale, tile, query, record) };
        }
    }

    /// The partial results of some query heads; every number is one chain over the head's numbers or the positions.
    ///
    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn attend<V: Vector16, const QUERIES: usize>(&self, scale: f32, tile: &KvTile, queries: &[f32], records: &mut [f32]) {
        let head_size = queries.len() / QUERIES;
        let padded = padded(head_size);
        let mut scores = [[0.0_f32; KEY_TILE]; QUERIES];
        let mut query_rows = [std::ptr::null(); QUERIES];
        query_rows.iter_mut().zip(queries.chunks_exact(head_size)).for_each(|(row, query)| *row = query.as_ptr());
        let score_rows = scores.each_mut().map(|row| row.as_mut_ptr());
        // SAFETY: query rows have `head_size` numbers, the turned keys as many rows of 64, a score row 64.
        unsafe {
            outer_product::<V, QUERIES>(head_size, query_rows, tile.keys(), KEY_TILE, score_rows, self.count.next_multiple_of(LANES))
        };
        let mut results = [std::ptr::null_mut::<f32>(); QUERIES];
        for ((scores, record), result) in scores.iter_mut().zip(records.chunks_exact_mut(padded + STATE)).zip(&mut results) {
            let (weighted, state) = record.split_at_mut(padded);
            weighted.fill(0.0);
            state.copy_from_slice(&shares_of(scores, self.count, scale));
            *result = weighted.as_mut_ptr();
        }
        let shares = scores.each_ref().map(|row| row.as_ptr());
        // SAFETY: share rows have 64 numbers, the values `count` rows of `padded`, a result row `padded`; rows are different.
        unsafe { outer_product::<V, QUERIES>(self.count, shares, tile.values(), padded, results, padded) };
    }
}

/// Turns the first `count` products into shares relative to the largest; gives the largest score and the sum of the shares.
#[inline(always)]
fn shares_of(scores: &mut [f32; KEY_TILE], count: usize, scale: f32) -> [f32; STATE] {
    scores[..count].iter_mut().for_each(|score| *score *= scale);
    scores[count..].fill(f32::NEG_INFINITY);
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for part in scores.as_chunks::<LANES>().0 {
        maxima.iter_mut().zip(part).for_each(|(largest, score)| *largest = larger(*largest, *score));
    }
    let largest = maxima.iter().copied().fold(f32::NEG_INFINITY, larger);
    scores.iter_mut().for_each(|score| *score = exponential(*score - largest));
    scores[count..].fill(0.0);
    [largest, lane_sum(scores)]
}

/// Sixteen running sums, joined by halves.
#[inline(always)]
fn lane_sum(values: &[f32; KEY_TILE]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    for part in values.as_chunks::<LANES>().0 {
        lanes.iter_mut().zip(part).for_each(|(lane, value)| *lane += value);
    }
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::attention::attention;
    use crate::backends::host::kernels::kv::{KvShape, KvType, store_rows};
    use crate::backends::host::kernels::test_data::Numbers;

    struct Case {
        shape: KvShape,
        queries: Vec<f32>,
        keys: Vec<u8>,
        values: Vec<u8>,
        positions: Vec<i32>,
    }

    impl Case {
        fn new(kv_type: KvType, positions: &[i32]) -> Self {
            let shape = KvShape { kv_type, n_head_kv: 2, head_size: 96 };
            let n_ctx = 300;
            let pool = ThreadPool::new(1).expect("one thread");
            let all: Vec<i32> = (0..n_ctx).collect();
            let mut numbers = Numbers::seeded(7);
            let mut cache = || {
                let mut bytes = vec![0; n_ctx as usize * shape.position_bytes()];
                store_rows(&pool, &shape, &numbers.floats(n_ctx as usize * 192, 1.0), &all, &mut bytes);
                bytes
            };
            let (keys, values) = (cache(), cache());
            let queries = numbers.floats(positions.len() * 6 * 96, 1.0);
            Self { shape, queries, keys, values, positions: positions.to_vec() }
        }

        fn run(&self, level: SimdLevel, threads: usize, rows: std::ops::Range<usize>) -> Vec<f32> {
            let inputs = self.inputs(rows);
            let mut out = vec![f32::NAN; inputs.queries.len()];
            attention_window(&ThreadPool::new(threads).expect("threads"), level, &inputs, &mut out);
            out
        }

        fn inputs(&self, rows: std::ops::Range<usize>) -> AttentionInputs<'_> {
            AttentionInputs {
                shape: self.shape,
                n_head: 6,
                scale: 0.1,
                queries: &self.queries[rows.start * 576..rows.end * 576],
                keys: &self.keys,
                values: &self.values,
                positions: &self.positions[rows],
            }
        }
    }

    #[test]
    fn a_window_agrees_with_the_prompt_form_in_every_cache_type_and_level() {
        for kv_type in [KvType::F32, KvType::F16, KvType::Q8_0] {
            let case = Case::new(kv_type, &[0, 62, 63, 64, 130, 299]);
            let mut expected = vec![0.0; case.queries.len()];
            attention(&ThreadPool::new(2).expect("threads"), SimdLevel::Scalar, &case.inputs(0..6), &mut expected);
            for level in SimdLevel::available() {
                for (ours, theirs) in case.run(level, 2, 0..6).iter().zip(&expected) {
                    assert!((ours - theirs).abs() <= 2e-6 * (1.0 + theirs.abs()), "{kv_type:?} {level:?}: {ours} for {theirs}");
                }
            }
        }
    }

    #[test]
    fn a_row_is_the_same_alone_and_beside_others_on_any_number_of_threads() {
        let case = Case::new(KvType::F16, &[120, 121, 122, 250]);
        for level in SimdLevel::available() {
            let together = case.run(level, 1, 0..4);
            for threads in [2, 3] {
                assert_eq!(case.run(level, threads, 0..4), together);
            }
            for row in 0..4 {
                assert_eq!(case.run(level, 2, row..row + 1), together[row * 576..(row + 1) * 576]);
            }
        }
    }
}
