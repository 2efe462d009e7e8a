//! The arithmetic of one step of the delta rule, on rows that lie side by side.
//!
//! With `g_i` the sum of a step's decays up to and including row i, and `S` the state at the step's beginning:
//!
//! ```text
//! r_i   = beta_i (v_i - e^g_i S k_i - sum over j < i of (k_i . k_j) e^(g_i - g_j) r_j)
//! out_i =               e^g_i S q_i + sum over j <= i of (q_i . k_j) e^(g_i - g_j) r_j
//! S     = e^g_last S + sum over j of e^(g_last - g_j) r_j k_j^T             at the end of the step
//! ```
//! Every sum is one chain of fused additions in ascending order, whether its row is computed beside three others or alone, and every
//! factor follows from its two rows: so rows can be new in any groups.

use super::swiglu::exponential;
use super::vector::{LANES, OUTER_ROWS, Vector16, outer_product};
use crate::backend::op::DELTA_STEP;

/// Rows of a step at most.
pub(super) const STEP: usize = DELTA_STEP as usize;

/// Columns of a product that are computed together: the part of the turned state that they need, 32 KiB for heads of 128, stays in the
/// first-level cache for all rows of a step.
const STRIPE: usize = 64;

/// Rows of a step that are there, and which of them are new.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepRows {
    /// Numbers of a head, a multiple of 16.
    pub head_dim: usize,
    /// Rows that are done.
    pub n_before: usize,
    /// Rows of the step so far, the new ones included; at most [`STEP`].
    pub n: usize,
}

impl StepRows {
    /// Where the new rows lie in a buffer of rows of `width` numbers.
    fn new_ones(self, width: usize) -> std::ops::Range<usize> {
        self.n_before * width..self.n * width
    }
}

/// Buffers a thread keeps from step to step. Rows of the operands lie so far apart that those of a step would drive each other out of
/// the caches.
#[derive(Default)]
pub(super) struct StepBuffers {
    /// `[STEP][head_dim]`, of all rows. The fields down to `decays` are the caller's to fill.
    pub keys: Vec<f32>,
    /// `[STEP][head_dim]`, of new rows.
    pub queries: Vec<f32>,
    /// `[STEP][head_dim]`, of new rows.
    pub values: Vec<f32>,
    /// `[STEP]`, of new rows.
    pub betas: Vec<f32>,
    /// `[STEP]`, of all rows: decays, summed.
    pub decays: Vec<f32>,
    /// `[STEP][head_dim]`: the caller's for rows that are done, computed for new ones.
    pub corrections: Vec<f32>,
    /// `[STEP][head_dim]`, computed for new rows.
    pub results: Vec<f32>,
    /// `[head_dim][STEP]`: the keys, turned. Columns behind the last row mean nothing.
    turned_keys: Vec<f32>,
    /// `[STEP][STEP]`: products of new keys with keys.
    key_products: Vec<f32>,
    /// `[STEP][STEP]`: products of new queries with keys.
    query_products: Vec<f32>,
    /// `[STEP][STEP]`: shares of earlier corrections in a correction, negative.
    correction_shares: Vec<f32>,
    /// `[STEP][STEP]`: shares of corrections in a result.
    result_shares: Vec<f32>,
    /// `[head_dim (key)][head_dim (value)]`: the state of a value head, turned.
    turned_state: Vec<f32>,
}

impl StepBuffers {
    /// Makes room for heads of a size.
    pub(super) fn fit(&mut self, head_dim: usize) {
        let rows = [&mut self.keys, &mut self.queries, &mut self.values, &mut self.corrections, &mut self.results, &mut self.turned_keys];
        rows.into_iter().for_each(|rows| rows.resize(STEP * head_dim, 0.0));
        let squares = [&mut self.key_products, &mut self.query_products, &mut self.correction_shares, &mut self.result_shares];
        squares.into_iter().for_each(|square| square.resize(STEP * STEP, 0.0));
        [&mut self.betas, &mut self.decays].into_iter().for_each(|numbers| numbers.resize(STEP, 0.0));
        self.turned_state.resize(head_dim * head_dim, 0.0);
    }

    /// Multiplies the new rows' keys and queries by all keys of the step, once for all value heads of a key head.
    ///
    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    pub(super) unsafe fn multiply_keys<V: Vector16>(&mut self, rows: StepRows) {
        let head_dim = rows.head_dim;
        let n_cols = rows.n.next_multiple_of(LANES);
        // SAFETY: passed on from the caller.
        unsafe { turn::<V>(&self.keys[..n_cols * head_dim], head_dim, &mut self.turned_keys, STEP) };
        for (from, products) in [(&self.keys, &mut self.key_products), (&self.queries, &mut self.query_products)] {
            let products = &mut products[rows.new_ones(STEP)];
            products.fill(0.0);
            let new = &from[rows.new_ones(head_dim)];
            // SAFETY: passed on from the caller.
            unsafe { add_products::<V>(head_dim, new, (&self.turned_keys, STEP), (products, STEP), n_cols) };
        }
    }

    /// Computes the new rows' corrections and results for a value head with `state` `[head_dim (value), head_dim (key)]`.
    ///
    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    pub(super) unsafe fn compute<V: Vector16>(&mut self, rows: StepRows, state: &[f32]) {
        // SAFETY: passed on from the caller.
        unsafe {
            turn::<V>(state, rows.head_dim, &mut self.turned_state, rows.head_dim);
            self.recall::<V>(rows);
            self.share_out(rows);
            self.correct::<V>(rows);
            self.add_corrections::<V>(rows);
        }
    }

    /// What the state at the step's beginning says to new rows: corrections become `v - e^g S k`, results `e^g S q`.
    #[inline(always)]
    unsafe fn recall<V: Vector16>(&mut self, rows: StepRows) {
        let (head_dim, new) = (rows.head_dim, rows.new_ones(rows.head_dim));
        let (corrections, results) = (&mut self.corrections[new.clone()], &mut self.results[new.clone()]);
        corrections.fill(0.0);
        results.fill(0.0);
        let state = (&self.turned_state[..], head_dim);
        // SAFETY: passed on from the caller.
        unsafe {
            add_products::<V>(head_dim, &self.keys[new.clone()], state, (corrections, head_dim), head_dim);
            add_products::<V>(head_dim, &self.queries[new.clone()], state, (results, head_dim), head_dim);
        }
        let recalled = corrections.chunks_exact_mut(head_dim).zip(results.chunks_exact_mut(head_dim));
        let given = self.values[new].chunks_exact(head_dim).zip(&self.decays[rows.n_before..]);
        for ((correction, result), (value, decay)) in recalled.zip(given) {
            let kept = exponential(*decay);
            correction.iter_mut().zip(value).for_each(|(correction, value)| *correction = value - kept * *correction);
            result.iter_mut().for_each(|result| *result *= kept);
        }
    }

    /// Turns products into shares, by what is kept from row to row.
    #[inline(always)]
    fn share_out(&mut self, rows: StepRows) {
        for row in rows.n_before..rows.n {
            let own = self.decays[row];
            // Up to the end of a vector; what stands behind the row is never used.
            let columns = row * STEP..row * STEP + (row + 1).next_multiple_of(LANES);
            let products = self.key_products[columns.clone()].iter().zip(&self.query_products[columns.clone()]);
            let shares = self.correction_shares[columns.clone()].iter_mut().zip(&mut self.result_shares[columns]);
            for (((key, query), (in_correction, in_result)), earlier) in products.zip(shares).zip(&self.decays) {
                let kept = exponential(own - earlier);
                (*in_correction, *in_result) = (-(key * kept), query * kept);
            }
        }
    }

    /// Subtracts from each new row's correction the shares of those before it, and multiplies it by beta.
    #[inline(always)]
    unsafe fn correct<V: Vector16>(&mut self, rows: StepRows) {
        let head_dim = rows.head_dim;
        for begin in (rows.n_before..rows.n).step_by(OUTER_ROWS) {
            let end = rows.n.min(begin + OUTER_ROWS);
            let (earlier, later) = self.corrections.split_at_mut(begin * head_dim);
            let mut n_done = 0;
            if end - begin == OUTER_ROWS {
                n_done = begin;
                // SAFETY: a row of shares has 64 numbers, `begin` corrections lie before the four that are written.
                unsafe {
                    let shares = std::array::from_fn(|index| self.correction_shares[(begin + index) * STEP..].as_ptr());
                    let four: [*mut f32; OUTER_ROWS] = row_pointers(&mut later[..OUTER_ROWS * head_dim]);
                    outer_product::<V, OUTER_ROWS>(begin, shares, earlier.as_ptr(), head_dim, four, head_dim);
                }
            }
            for row in begin..end {
                let (earlier, later) = self.corrections.split_at_mut(row * head_dim);
                let (share, own) = (&self.correction_shares[row * STEP + n_done..][..row - n_done], &mut later[..head_dim]);
                // SAFETY: as above, from correction `n_done` on.
                unsafe {
                    let earlier = earlier[n_done * head_dim..].as_ptr();
                    outer_product::<V, 1>(share.len(), [share.as_ptr()], earlier, head_dim, [own.as_mut_ptr()], head_dim);
                }
                own.iter_mut().for_each(|value| *value *= self.betas[row]);
            }
        }
    }

    /// Adds to each new row's result the shares of the corrections up to its own.
    #[inline(always)]
    unsafe fn add_corrections<V: Vector16>(&mut self, rows: StepRows) {
        let head_dim = rows.head_dim;
        for begin in (rows.n_before..rows.n).step_by(OUTER_ROWS) {
            let end = rows.n.min(begin + OUTER_ROWS);
            let mut n_done = 0;
            if end - begin == OUTER_ROWS {
                n_done = begin + 1;
                // SAFETY: a row of shares has 64 numbers, a correction and a result `head_dim`.
                unsafe {
                    let shares = std::array::from_fn(|index| self.result_shares[(begin + index) * STEP..].as_ptr());
                    let four: [*mut f32; OUTER_ROWS] = row_pointers(&mut self.results[begin * head_dim..end * head_dim]);
                    outer_product::<V, OUTER_ROWS>(n_done, shares, self.corrections.as_ptr(), head_dim, four, head_dim);
                }
            }
            for row in begin..end {
                let share = &self.result_shares[row * STEP + n_done..][..row + 1 - n_done];
                let corrections = &self.corrections[n_done * head_dim..(row + 1) * head_dim];
                let result = &mut self.results[row * head_dim..][..head_dim];
                // SAFETY: as above, from correction `n_done` on.
                unsafe {
                    let result = [result.as_mut_ptr()];
                    outer_product::<V, 1>(share.len(), [share.as_ptr()], corrections.as_ptr(), head_dim, result, head_dim);
                }
            }
        }
    }

    /// Takes the state that `compute` has read to the end of the step; corrections become what is left of them there.
    ///
    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    pub(super) unsafe fn fold<V: Vector16>(&mut self, rows: StepRows, state: &mut [f32]) {
        let StepRows { head_dim, n, .. } = rows;
        let last = self.decays[n - 1];
        for (correction, decay) in self.corrections.chunks_exact_mut(head_dim).zip(&self.decays[..n]) {
            let kept = exponential(last - decay);
            correction.iter_mut().for_each(|value| *value *= kept);
        }
        let kept = exponential(last);
        self.turned_state.iter_mut().for_each(|value| *value *= kept);
        let keys = self.turned_keys.chunks_exact(OUTER_ROWS * STEP);
        for (keys, lines) in keys.zip(self.turned_state.chunks_exact_mut(OUTER_ROWS * head_dim)) {
            // SAFETY: four lines of 64 turned keys, of which `n` are read, four lines of the state, and `n` corrections.
            unsafe {
                let keys = std::array::from_fn(|line| keys[line * STEP..].as_ptr());
                outer_product::<V, OUTER_ROWS>(n, keys, self.corrections.as_ptr(), head_dim, row_pointers(lines), head_dim);
            }
        }
        // SAFETY: passed on from the caller.
        unsafe { turn::<V>(&self.turned_state, head_dim, state, head_dim) };
    }
}

/// Where each of `ROWS` rows of equal length begins.
#[inline(always)]
fn row_pointers<const ROWS: usize>(rows: &mut [f32]) -> [*mut f32; ROWS] {
    let (start, width) = (rows.as_mut_ptr(), rows.len() / ROWS);
    // SAFETY: a row begins within the slice.
    std::array::from_fn(|row| unsafe { start.add(row * width) })
}

/// `c[row][lane] += sum over k of a[row][k] * b[k][lane]`, each element one chain over k, for rows of `n_k` numbers in `a`.
/// `b` and `c` come with the distance of their rows.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn add_products<V: Vector16>(
    n_k: usize,
    a: &[f32],
    (b, b_stride): (&[f32], usize),
    (c, c_stride): (&mut [f32], usize),
    lanes: usize,
) {
    let n_rows = a.len() / n_k;
    assert!(c.len() == n_rows * c_stride && b.len() >= n_k * b_stride, "{n_rows} rows of {n_k}");
    assert!(lanes <= b_stride.min(c_stride) && lanes.is_multiple_of(LANES), "{lanes} columns");
    let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
    for lane in (0..lanes).step_by(STRIPE) {
        let width = STRIPE.min(lanes - lane);
        let whole = n_rows / OUTER_ROWS * OUTER_ROWS;
        // SAFETY: rows and columns lie within the slices, as asserted.
        unsafe {
            for row in (0..whole).step_by(OUTER_ROWS) {
                let (from, to) = (
                    std::array::from_fn(|index| a.add((row + index) * n_k)),
                    std::array::from_fn(|index| c.add((row + index) * c_stride + lane)),
                );
                outer_product::<V, OUTER_ROWS>(n_k, from, b.add(lane), b_stride, to, width);
            }
            for row in whole..n_rows {
                outer_product::<V, 1>(n_k, [a.add(row * n_k)], b.add(lane), b_stride, [c.add(row * c_stride + lane)], width);
            }
        }
    }
}

/// Turns rows of `n_cols` numbers into as many lines of `to`, which are `stride` apart.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn turn<V: Vector16>(from: &[f32], n_cols: usize, to: &mut [f32], stride: usize) {
    let n_rows = from.len() / n_cols;
    assert!(n_rows.is_multiple_of(LANES) && n_cols.is_multiple_of(LANES), "{n_rows} rows of {n_cols} in squares of {LANES}");
    assert!(n_rows <= stride && to.len() == n_cols * stride, "{n_cols} lines of {n_rows}");
    for row in (0..n_rows).step_by(LANES) {
        for column in (0..n_cols).step_by(LANES) {
            // SAFETY: a square of 16 rows and columns lies within both, as asserted.
            unsafe {
                let rows = std::array::from_fn(|lane| from.as_ptr().add((row + lane) * n_cols + column).cast());
                V::transpose(rows, to.as_mut_ptr().add(column * stride + row).cast(), stride);
            }
        }
    }
}
