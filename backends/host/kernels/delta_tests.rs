//! The delta net's promises on bits: they depend on a row and those before it alone, not on cuts, levels or threads. (Values are
//! compared with f64 in `tests/ops`.)

use super::delta_conv::{ConvInputs, advance_history, convolve, delta_gates};
use super::delta_prompt::{BlockPart, DeltaInputs, delta_prompt};
use super::delta_window::{delta_commit, delta_window};
use super::simd::SimdLevel;
use super::test_data::Numbers;
use crate::backend::op::DeltaShape;
use crate::backends::host::pool::ThreadPool;

const N_TAPS: usize = 4;
const EPS: f32 = 1e-6;

/// Projected rows of one layer and what their gates are made of.
struct Case {
    shape: DeltaShape,
    x: Vec<f32>,
    taps: Vec<f32>,
    history: Vec<f32>,
    beta: Vec<f32>,
    decay: Vec<f32>,
    state: Vec<f32>,
}

impl Case {
    fn new(n_rows: usize, n_head_k: u32, n_head_v: u32, head_dim: u32) -> Self {
        let shape = DeltaShape { n_head_k, n_head_v, head_dim, n_taps: N_TAPS as u32 };
        let (n_channels, n_heads) = (shape.n_channels() as usize, n_head_v as usize);
        let mut numbers = Numbers::seeded(u64::from(head_dim));
        let x = numbers.floats(n_rows * n_channels, 2.0);
        let (taps, history) = (numbers.floats(N_TAPS * n_channels, 1.0), numbers.floats((N_TAPS - 1) * n_channels, 2.0));
        let (mut beta, mut decay) = (numbers.floats(n_rows * n_heads, 2.0), numbers.floats(n_rows * n_heads, 2.0));
        let a: Vec<f32> = numbers.floats(n_heads, 0.3).iter().map(|a| -a.abs()).collect();
        delta_gates(&mut beta, &mut decay, &numbers.floats(n_heads, 1.0), &a);
        let state = numbers.floats(n_heads * (head_dim * head_dim) as usize, 0.2);
        Self { shape, x, taps, history, beta, decay, state }
    }

    fn n_rows(&self) -> usize {
        self.decay.len() / self.shape.n_head_v as usize
    }

    fn conv(&self, pool: &ThreadPool, level: SimdLevel) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.x.len()];
        let inputs = ConvInputs { shape: self.shape, x: &self.x, history: &self.history, taps: &self.taps, eps: EPS };
        convolve(pool, level, &inputs, &mut out);
        out
    }

    fn inputs<'a>(&'a self, qkv: &'a [f32], rows: std::ops::Range<usize>) -> DeltaInputs<'a> {
        let (n_channels, n_heads) = (self.shape.n_channels() as usize, self.shape.n_head_v as usize);
        let gates = rows.start * n_heads..rows.end * n_heads;
        DeltaInputs {
            shape: self.shape,
            qkv: &qkv[rows.start * n_channels..rows.end * n_channels],
            beta: &self.beta[gates.clone()],
            decay: &self.decay[gates],
        }
    }

    /// The results and the last state of a block that begins at `block_position` and is cut after each of `cuts` rows.
    fn prompt(&self, pool: &ThreadPool, level: SimdLevel, block_position: usize, cuts: &[usize]) -> (Vec<f32>, Vec<f32>) {
        let qkv = self.conv(pool, level);
        let (mut state, mut out) = (self.state.clone(), Vec::new());
        // What is left of another block must not matter.
        let mut open = vec![f32::NAN; (self.shape.open_bytes() / 4) as usize];
        let ends = cuts.iter().copied().chain([self.n_rows()]);
        let mut first = 0;
        for end in ends {
            let part = BlockPart { position: block_position + first, block_position, ends_block: end == self.n_rows() };
            let mut results = vec![f32::NAN; (end - first) * self.shape.value_width() as usize];
            delta_prompt(pool, level, &self.inputs(&qkv, first..end), part, &mut state, &mut open, &mut results);
            out.extend(results);
            first = end;
        }
        (out, state)
    }

    /// The same row by row.
    fn rows(&self, pool: &ThreadPool, level: SimdLevel) -> (Vec<f32>, Vec<f32>) {
        let qkv = self.conv(pool, level);
        let mut out = vec![f32::NAN; self.n_rows() * self.shape.value_width() as usize];
        let mut state = self.state.clone();
        let inputs = self.inputs(&qkv, 0..self.n_rows());
        delta_window(pool, level, &inputs, &state, &mut out);
        delta_commit(pool, level, &inputs, &mut state);
        (out, state)
    }
}

fn cases(n_rows: usize) -> [Case; 4] {
    [Case::new(n_rows, 2, 4, 16), Case::new(n_rows, 1, 3, 32), Case::new(n_rows, 2, 2, 80), Case::new(n_rows, 1, 2, 128)]
}

fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(n_threads).expect("threads")
}

/// Equal bits; NaN is no result.
fn same(left: &(Vec<f32>, Vec<f32>), right: &(Vec<f32>, Vec<f32>)) -> bool {
    left == right
}

#[test]
fn cuts_of_a_block_change_no_bit() {
    let (one, level) = (pool(1), SimdLevel::detect());
    for case in cases(200) {
        for block_position in [0, 1, 37, 64, 127, 4_095] {
            let whole = case.prompt(&one, level, block_position, &[]);
            assert!(whole.0.iter().chain(&whole.1).all(|value| value.is_finite()));
            let every_row: Vec<usize> = (1..200).collect();
            assert!(same(&case.prompt(&one, level, block_position, &every_row), &whole), "{:?} from {block_position}", case.shape);
            let mut numbers = Numbers::seeded(block_position as u64);
            for _ in 0..4 {
                let mut cuts: Vec<usize> = (0..6).map(|_| 1 + (numbers.next() % 199) as usize).collect();
                cuts.sort_unstable();
                cuts.dedup();
                assert!(same(&case.prompt(&one, level, block_position, &cuts), &whole), "{:?} from {block_position}: {cuts:?}", case.shape);
            }
        }
    }
}

#[test]
fn levels_and_threads_change_no_bit() {
    for case in cases(70) {
        let all = |pool: &ThreadPool, level| {
            let (prompt, rows) = (case.prompt(pool, level, 13, &[30, 35]), case.rows(pool, level));
            [case.conv(pool, level), prompt.0, prompt.1, rows.0, rows.1]
        };
        let expected = all(&pool(1), SimdLevel::Scalar);
        for level in SimdLevel::available() {
            for n_threads in [1, 2, 3] {
                assert!(all(&pool(n_threads), level) == expected, "{:?} {level:?} {n_threads} threads", case.shape);
            }
        }
    }
}

#[test]
fn a_committed_window_goes_on_where_the_window_was() {
    let (one, level) = (pool(1), SimdLevel::detect());
    for case in cases(8) {
        let (qkv, width) = (case.conv(&one, level), case.shape.value_width() as usize);
        let (together, last_state) = case.rows(&one, level);
        for n in 0..8 {
            let (mut state, mut out) = (case.state.clone(), vec![f32::NAN; width]);
            delta_commit(&one, level, &case.inputs(&qkv, 0..n), &mut state);
            delta_window(&one, level, &case.inputs(&qkv, n..n + 1), &state, &mut out);
            assert!(out == together[n * width..(n + 1) * width], "{:?}: row {n}", case.shape);
            delta_commit(&one, level, &case.inputs(&qkv, n..8), &mut state);
            assert!(state == last_state, "{:?}: committed as {n} and {}", case.shape, 8 - n);
        }
    }
}

#[test]
fn a_history_goes_on_from_any_cut() {
    let (one, level) = (pool(1), SimdLevel::detect());
    for case in cases(12) {
        let (whole, n_channels) = (case.conv(&one, level), case.shape.n_channels() as usize);
        for first_len in 0..12 {
            let (first, rest) = case.x.split_at(first_len * n_channels);
            let (mut history, mut out) = (case.history.clone(), vec![f32::NAN; rest.len()]);
            advance_history(first, &mut history, n_channels);
            let inputs = ConvInputs { shape: case.shape, x: rest, history: &history, taps: &case.taps, eps: EPS };
            convolve(&one, level, &inputs, &mut out);
            assert!(out == whole[first.len()..], "{:?}: cut after {first_len}", case.shape);
        }
    }
}

#[test]
fn steps_agree_with_rows_on_their_own() {
    // Largest difference over the largest number; both are f32 sums of the same terms in different order.
    const TOLERANCE: f32 = 2e-6;
    let (one, level) = (pool(1), SimdLevel::detect());
    for case in cases(200) {
        let (rows, steps) = (case.rows(&one, level), case.prompt(&one, level, 37, &[]));
        for (rows, steps) in [(&rows.0, &steps.0), (&rows.1, &steps.1)] {
            let largest = rows.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let difference = rows.iter().zip(steps).fold(0.0_f32, |most, (row, step)| most.max((row - step).abs()));
            assert!(difference <= TOLERANCE * largest, "{:?}: {difference} of {largest}", case.shape);
        }
    }
}

#[test]
fn a_head_that_forgets_everything_stays_finite() {
    let (one, level) = (pool(1), SimdLevel::detect());
    let mut case = Case::new(130, 1, 2, 16);
    case.decay.iter_mut().step_by(3).for_each(|decay| *decay = -90.0);
    let (out, state) = case.prompt(&one, level, 0, &[65]);
    assert!(out.iter().chain(&state).all(|value| value.is_finite()));
    let (rows, _) = case.rows(&one, level);
    let largest = rows.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    assert!(rows.iter().zip(&out).all(|(row, step)| (row - step).abs() <= 1e-3 * largest), "sums of large decays lose digits, not more");
}
