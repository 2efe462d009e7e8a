//! Causal attention of a window: one to eight rows over a long cache.
//!
//! The cache is cut into stretches of 64 positions, counted from position 0. Each stretch gives, for every query head on its
//! key/value head, a largest score, a sum and a weighted value; the stretches of a row are then joined in ascending order. So a
//! row's result does not depend on the other rows of the window, on threads or on how the stretches are spread over them.

use super::attention::AttentionInputs;
use super::kv::load_head;
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::exponential;
use super::vector::{LANES, Portable, Vector16};
use crate::backends::host::pool::ThreadPool;

/// Positions of a stretch.
const STRETCH: usize = 64;
/// Largest score and sum, stored behind a partial result.
const STATE: usize = 2;

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
                let part = |first| Stretch { row, head_kv, first, count: STRETCH.min(n_keys - first) };
                plan.stretches.extend((0..n_keys).step_by(STRETCH).map(part));
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
    let record = head_size + STATE;
    let mut partial = vec![0.0_f32; plan.stretches.len() * group * record];
    let shared = SharedSlice::new(&mut partial);
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
}

/// Joins the partial results of one query head in ascending order.
fn join<'a>(records: impl Iterator<Item = &'a [f32]> + Clone, out: &mut [f32]) {
    let head_size = out.len();
    let largest = records.clone().map(|record| record[head_size]).fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    out.fill(0.0);
    for record in records {
        let share = exponential(record[head_size] - largest);
        sum += share * record[head_size + 1];
        out.iter_mut().zip(&record[..head_size]).for_each(|(out, value)| *out += share * value);
    }
    out.iter_mut().for_each(|out| *out /= sum);
}

impl Stretch {
    fn compute(&self, level: SimdLevel, inputs: &AttentionInputs<'_>, records: &mut [f32]) {
        match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.compute_with::<Portable>(inputs, records) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.compute_avx2(inputs, records) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.compute_avx512(inputs, records) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.compute_with::<Portable>(inputs, records) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn compute_avx2(&self, inputs: &AttentionInputs<'_>, records: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.compute_with::<super::vector::Avx2>(inputs, records) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn compute_avx512(&self, inputs: &AttentionInputs<'_>, records: &mut [f32]) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.compute_with::<super::vector::Avx512>(inputs, records) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn compute_with<V: Vector16>(&self, inputs: &AttentionInputs<'_>, records: &mut [f32]) {
        let shape = &inputs.shape;
        let (head_size, group) = (shape.head_size, inputs.n_head / shape.n_head_kv);
        let first_query = (self.row * inputs.n_head + self.head_kv * group) * head_size;
        let queries = &inputs.queries[first_query..first_query + group * head_size];
        // A row of keys or values is widened once for all query heads that share it.
        let mut row = vec![0.0_f32; head_size];
        let mut scores = vec![[f32::NEG_INFINITY; STRETCH]; group];
        for offset in 0..self.count {
            let bytes = shape.head(inputs.keys, self.first + offset, self.head_kv);
            // SAFETY: passed on from the caller.
            unsafe { load_head::<V>(shape.kv_type, bytes, &mut row) };
            for (query, scores) in queries.chunks_exact(head_size).zip(&mut scores) {
                // SAFETY: passed on from the caller; both have `head_size` numbers.
                scores[offset] = unsafe { dot::<V>(query, &row) } * inputs.scale;
            }
        }
        for (record, scores) in records.chunks_exact_mut(head_size + STATE).zip(&mut scores) {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|score| *score = exponential(*score - largest));
            scores[self.count..].fill(0.0);
            record[..head_size].fill(0.0);
            record[head_size] = largest;
            record[head_size + 1] = lane_sum(scores);
        }
        for offset in 0..self.count {
            let bytes = shape.head(inputs.values, self.first + offset, self.head_kv);
            // SAFETY: passed on from the caller.
            unsafe { load_head::<V>(shape.kv_type, bytes, &mut row) };
            for (record, scores) in records.chunks_exact_mut(head_size + STATE).zip(&scores) {
                // SAFETY: passed on from the caller; both have `head_size` numbers.
                unsafe { add_scaled::<V>(&mut record[..head_size], scores[offset], &row) };
            }
        }
    }
}

/// Sixteen running sums, joined by halves.
#[inline(always)]
fn lane_sum(values: &[f32]) -> f32 {
    let (parts, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for part in parts {
        lanes.iter_mut().zip(part).for_each(|(lane, value)| *lane += value);
    }
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    rest.iter().fold(lanes[0], |sum, value| sum + value)
}

/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn dot<V: Vector16>(left: &[f32], right: &[f32]) -> f32 {
    let (left_parts, left_rest) = left.as_chunks::<LANES>();
    let (right_parts, right_rest) = right.as_chunks::<LANES>();
    // SAFETY: 16 numbers are read at a time; the caller promises the instructions.
    let mut sums = [unsafe { V::splat(0.0) }; 2];
    for (at, (left, right)) in left_parts.iter().zip(right_parts).enumerate() {
        // SAFETY: as above.
        sums[at % 2] = unsafe { V::load(left.as_ptr()).multiply_add(V::load(right.as_ptr()), sums[at % 2]) };
    }
    let mut lanes = [0.0_f32; 2 * LANES];
    // SAFETY: two vectors of 16 numbers are written to 32.
    unsafe {
        sums[0].store(lanes.as_mut_ptr());
        sums[1].store(lanes[LANES..].as_mut_ptr());
    }
    left_rest.iter().zip(right_rest).fold(lane_sum(&lanes), |sum, (left, right)| left.mul_add(*right, sum))
}

/// `sum += factor * row`.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn add_scaled<V: Vector16>(sum: &mut [f32], factor: f32, row: &[f32]) {
    let (sum_parts, sum_rest) = sum.as_chunks_mut::<LANES>();
    let (row_parts, row_rest) = row.as_chunks::<LANES>();
    for (sum, row) in sum_parts.iter_mut().zip(row_parts) {
        // SAFETY: 16 numbers are read and written at a time; the caller promises the instructions.
        unsafe { V::splat(factor).multiply_add(V::load(row.as_ptr()), V::load(sum.as_ptr())).store(sum.as_mut_ptr()) };
    }
    sum_rest.iter_mut().zip(row_rest).for_each(|(sum, row)| *sum = factor.mul_add(*row, *sum));
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
