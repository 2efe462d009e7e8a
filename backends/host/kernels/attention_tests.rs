//! Attention against f64, and its promise that a row's bits depend on that row alone.

use super::super::kv::{KvShape, KvType, load_head, store_rows};
use super::super::simd::SimdLevel;
use super::super::test_data::Numbers;
use super::super::vector::Portable;
use super::{AttentionInputs, attention};
use crate::backends::host::pool::ThreadPool;

struct Case {
    shape: KvShape,
    n_head: usize,
    keys: Vec<u8>,
    values: Vec<u8>,
    queries: Vec<f32>,
}

const N_CTX: usize = 200;

impl Case {
    /// A full cache and a query row for each position.
    fn new(kv_type: KvType, n_head: usize, n_head_kv: usize, head_size: usize) -> Self {
        let shape = KvShape { kv_type, n_head_kv, head_size };
        let mut numbers = Numbers::seeded(71);
        let mut cache = |spread| {
            let mut bytes = vec![0; N_CTX * shape.position_bytes()];
            let rows = numbers.floats(N_CTX * n_head_kv * head_size, spread);
            store_rows(&pool(1), &shape, &rows, &(0..N_CTX as i32).collect::<Vec<_>>(), &mut bytes);
            bytes
        };
        let (keys, values) = (cache(2.0), cache(1.0));
        let queries = numbers.floats(N_CTX * n_head * head_size, 2.0);
        Self { shape, n_head, keys, values, queries }
    }

    fn run(&self, n_threads: usize, level: SimdLevel, positions: &[i32]) -> Vec<f32> {
        let row = self.n_head * self.shape.head_size;
        let queries: Vec<f32> = positions.iter().flat_map(|&p| &self.queries[p as usize * row..][..row]).copied().collect();
        let mut out = vec![f32::NAN; queries.len()];
        let (shape, n_head, keys, values) = (self.shape, self.n_head, &self.keys[..], &self.values[..]);
        let inputs = AttentionInputs { shape, n_head, scale: self.scale(), queries: &queries, keys, values, positions };
        attention(&pool(n_threads), level, &inputs, &mut out);
        out
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_size as f32).sqrt()
    }

    fn head(&self, cache: &[u8], position: usize, head_kv: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.head_size];
        // SAFETY: portable code needs no instructions.
        unsafe { load_head::<Portable>(self.shape.kv_type, self.shape.head(cache, position, head_kv), &mut out) };
        out
    }

    fn exact(&self, position: usize, head: usize) -> Vec<f64> {
        let head_kv = head / (self.n_head / self.shape.n_head_kv);
        let query = &self.queries[(position * self.n_head + head) * self.shape.head_size..][..self.shape.head_size];
        let weights: Vec<f64> = (0..=position)
            .map(|key| {
                let key = self.head(&self.keys, key, head_kv);
                let dot: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                (dot * f64::from(self.scale())).exp()
            })
            .collect();
        let total: f64 = weights.iter().sum();
        let mut out = vec![0.0; self.shape.head_size];
        for (key, weight) in weights.iter().enumerate() {
            let value = self.head(&self.values, key, head_kv);
            out.iter_mut().zip(&value).for_each(|(out, value)| *out += weight / total * f64::from(*value));
        }
        out
    }
}

fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(n_threads).expect("threads")
}

fn cases() -> [Case; 4] {
    [
        Case::new(KvType::F32, 4, 4, 20),
        Case::new(KvType::F16, 8, 2, 64),
        Case::new(KvType::Q8_0, 6, 2, 32),
        Case::new(KvType::F16, 16, 1, 128),
    ]
}

#[test]
fn results_agree_with_a_softmax_in_f64() {
    for case in cases() {
        let positions = [0, 1, 63, 64, 65, 127, 199];
        let out = case.run(1, SimdLevel::detect(), &positions);
        for (row, position) in positions.into_iter().enumerate() {
            for head in 0..case.n_head {
                let start = (row * case.n_head + head) * case.shape.head_size;
                for (value, exact) in out[start..].iter().zip(case.exact(position as usize, head)) {
                    assert!((f64::from(*value) - exact).abs() < 3e-6, "{:?} row {position} head {head}: {value} for {exact}", case.shape);
                }
            }
        }
    }
}

#[test]
fn levels_threads_and_batches_change_no_bit() {
    for case in cases() {
        let positions: Vec<i32> = (0..N_CTX as i32).collect();
        let expected = case.run(1, SimdLevel::Scalar, &positions);
        for level in SimdLevel::available() {
            for n_threads in [1, 2, 3] {
                assert!(case.run(n_threads, level, &positions) == expected, "{:?} {level:?} {n_threads} threads", case.shape);
            }
        }
        let row = case.n_head * case.shape.head_size;
        for batch in [1, 7, 32, 64] {
            for positions in positions.chunks(batch).step_by(3) {
                let first = positions[0] as usize * row;
                assert!(case.run(2, SimdLevel::detect(), positions) == expected[first..first + positions.len() * row], "batch {batch}");
            }
        }
    }
}

#[test]
fn what_lies_behind_a_row_is_never_read() {
    let mut case = Case::new(KvType::F32, 4, 2, 32);
    let positions = [3, 70, 71, 90];
    let expected = case.run(1, SimdLevel::detect(), &positions);
    let position_bytes = case.shape.position_bytes();
    for cache in [&mut case.keys, &mut case.values] {
        cache[91 * position_bytes..].fill(0xff);
    }
    assert!(case.run(1, SimdLevel::detect(), &positions) == expected);
    for cache in [&mut case.keys, &mut case.values] {
        cache[4 * position_bytes..70 * position_bytes].fill(0xff);
    }
    assert!(case.run(1, SimdLevel::detect(), &positions)[..128] == expected[..128], "row 3 shares its tile with NaN");
}
