//! The delta rule over many rows, in steps of [`DELTA_STEP`] rows counted from position 0.
//!
//! With `g_i` the sum of a step's decays up to and including row i, and `S` the state at the step's beginning:
//!
//! ```text
//! r_i   = beta_i (v_i - e^g_i S k_i - sum over j < i of (k_i . k_j) e^(g_i - g_j) r_j)
//! out_i =              e^g_i S q_i + sum over j <= i of (q_i . k_j) e^(g_i - g_j) r_j
//! S     = e^g_last S + sum over j of e^(g_last - g_j) r_j k_j^T             at the end of the step
//! ```
//! Every sum is one chain of fused additions in ascending order, whether its row is computed beside three others or alone, and every
//! factor follows from its two rows. What a later row needs of an earlier one (`k`, `r` and `g`) is kept while the step is open.
//! So a row's bits depend on its step's rows up to it and on the state, not on the cut into calls, threads or the instruction set.
//!
//! A task is a key head with its value heads, which share the turned keys and the products of keys and queries with them.

use std::cell::RefCell;

use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::exponential;
use super::vector::{LANES, OUTER_ROWS, Portable, Vector16, outer_product};
use crate::backend::op::{DELTA_STEP, DeltaShape};
use crate::backends::host::pool::ThreadPool;

const STEP: usize = DELTA_STEP as usize;

/// Columns of a product that are computed together: the part of the turned state that they need, 32 KiB for heads of 128, stays in the
/// first-level cache for all rows of a step.
const STRIPE: usize = 64;

/// What the delta rule of one layer reads beside its state.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInputs<'a> {
    /// Sizes of the net.
    pub shape: DeltaShape,
    /// Queries, keys and values `[n_rows, n_channels]`.
    pub qkv: &'a [f32],
    /// `[n_rows, n_head_v]`.
    pub beta: &'a [f32],
    /// Logarithms of what is kept `[n_rows, n_head_v]`.
    pub decay: &'a [f32],
}

impl<'a> DeltaInputs<'a> {
    /// Rows of the call.
    #[must_use]
    pub fn n_rows(&self) -> usize {
        self.decay.len() / self.shape.n_head_v as usize
    }

    /// Asserts that the parts fit each other and a state of `state_len` numbers.
    pub(super) fn check(&self, state_len: usize) {
        let head_dim = self.shape.head_dim as usize;
        assert!(head_dim.is_multiple_of(LANES), "heads of {head_dim} are no whole number of vectors");
        assert_eq!(self.beta.len(), self.decay.len(), "gates of as many rows");
        assert_eq!(self.qkv.len(), self.n_rows() * self.shape.n_channels() as usize, "a row for each gate");
        assert_eq!(state_len, self.shape.value_width() as usize * head_dim, "a state for each value head");
    }

    /// Head `head` of a row, counted over queries, keys and values.
    fn head(&self, row: usize, head: usize) -> &'a [f32] {
        let head_dim = self.shape.head_dim as usize;
        &self.qkv[row * self.shape.n_channels() as usize + head * head_dim..][..head_dim]
    }

    pub(super) fn query(&self, row: usize, head_k: usize) -> &'a [f32] {
        self.head(row, head_k)
    }

    pub(super) fn key(&self, row: usize, head_k: usize) -> &'a [f32] {
        self.head(row, self.shape.n_head_k as usize + head_k)
    }

    pub(super) fn value(&self, row: usize, head_v: usize) -> &'a [f32] {
        self.head(row, 2 * self.shape.n_head_k as usize + head_v)
    }
}

/// Where the rows of a call lie in their block.
#[derive(Clone, Copy, Debug)]
pub struct BlockPart {
    /// Position of row 0.
    pub position: usize,
    /// Position of the block's first row, at most `position`.
    pub block_position: usize,
    /// True where the last row is the block's last.
    pub ends_block: bool,
}

/// The rows of one step that are in a call.
#[derive(Clone, Copy)]
struct StepPart {
    /// First row of the call.
    first: usize,
    /// Rows of the step that earlier calls have seen.
    n_before: usize,
    /// Rows of the step so far, those of this call included.
    n: usize,
    /// Whether the step ends here.
    ends: bool,
}

impl BlockPart {
    /// The call's steps, in order.
    fn steps(self, n_rows: usize) -> Vec<StepPart> {
        let mut steps = Vec::new();
        let mut first = 0;
        while first < n_rows {
            let position = self.position + first;
            let next = (position / STEP + 1) * STEP;
            let n_new = (next - position).min(n_rows - first);
            let n_before = position - (next - STEP).max(self.block_position);
            let ends = position + n_new == next || (self.ends_block && first + n_new == n_rows);
            steps.push(StepPart { first, n_before, n: n_before + n_new, ends });
            first += n_new;
        }
        steps
    }
}

/// The rows of a step that is not complete; see [`DeltaShape::open_bytes`].
#[derive(Clone, Copy)]
struct OpenStep<'a> {
    /// `[STEP, n_head_k, head_dim]`.
    keys: SharedSlice<'a, f32>,
    /// `[STEP, n_head_v, head_dim]`.
    corrections: SharedSlice<'a, f32>,
    /// `[STEP, n_head_v]`.
    decays: SharedSlice<'a, f32>,
}

/// Computes `out` `[n_rows, n_head_v, head_dim]`, and takes `state` `[n_head_v, head_dim (value), head_dim (key)]` over the steps that
/// end; `open` holds the step that is open before and after.
///
/// # Panics
/// Where lengths do not match, or the head size is no multiple of 16.
pub fn delta_prompt(
    pool: &ThreadPool,
    level: SimdLevel,
    inputs: &DeltaInputs<'_>,
    part: BlockPart,
    state: &mut [f32],
    open: &mut [f32],
    out: &mut [f32],
) {
    let shape = inputs.shape;
    let (key_width, value_width) = ((shape.n_head_k * shape.head_dim) as usize, shape.value_width() as usize);
    inputs.check(state.len());
    assert_eq!(out.len(), inputs.n_rows() * value_width, "as many results as values");
    assert_eq!(open.len(), STEP * (key_width + value_width + shape.n_head_v as usize), "room for an open step");
    let level = level.min(SimdLevel::detect());
    let (keys, rest) = open.split_at_mut(STEP * key_width);
    let (corrections, decays) = rest.split_at_mut(STEP * value_width);
    let open = OpenStep { keys: SharedSlice::new(keys), corrections: SharedSlice::new(corrections), decays: SharedSlice::new(decays) };
    let steps = part.steps(inputs.n_rows());
    let (state, out) = (SharedSlice::new(state), SharedSlice::new(out));
    pool.run(shape.n_head_k as usize, &|head_k| {
        let task = Task { inputs, head_k, open, state, out };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.fit(shape.head_dim as usize);
            steps.iter().for_each(|step| task.compute(level, *step, scratch));
        });
    });
}

/// Buffers a thread keeps from task to task.
#[derive(Default)]
struct Scratch {
    /// `[head_dim][STEP]`: a step's keys, turned. Columns behind the step's last row mean nothing.
    keys: Vec<f32>,
    /// `[STEP][STEP]`: products of keys with keys, of new rows.
    key_products: Vec<f32>,
    /// `[STEP][STEP]`: products of queries with keys, of new rows.
    query_products: Vec<f32>,
    /// `[STEP][STEP]`: shares of earlier corrections in a correction, negative.
    correction_shares: Vec<f32>,
    /// `[STEP][STEP]`: shares of corrections in a result.
    result_shares: Vec<f32>,
    /// `[head_dim (key)][head_dim (value)]`: the state of a value head, turned.
    state: Vec<f32>,
    /// `[STEP][head_dim]`.
    corrections: Vec<f32>,
    /// `[STEP]`: summed decays.
    decays: Vec<f32>,
}

impl Scratch {
    fn fit(&mut self, head_dim: usize) {
        self.keys.resize(head_dim * STEP, 0.0);
        for square in [&mut self.key_products, &mut self.query_products, &mut self.correction_shares, &mut self.result_shares] {
            square.resize(STEP * STEP, 0.0);
        }
        self.state.resize(head_dim * head_dim, 0.0);
        self.corrections.resize(STEP * head_dim, 0.0);
        self.decays.resize(STEP, 0.0);
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A key head and its value heads.
#[derive(Clone, Copy)]
struct Task<'a> {
    inputs: &'a DeltaInputs<'a>,
    head_k: usize,
    open: OpenStep<'a>,
    state: SharedSlice<'a, f32>,
    out: SharedSlice<'a, f32>,
}

impl<'a> Task<'a> {
    fn compute(self, level: SimdLevel, step: StepPart, scratch: &mut Scratch) {
        match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.compute_with::<Portable>(step, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `delta_prompt` capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.compute_avx2(step, scratch) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.compute_avx512(step, scratch) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.compute_with::<Portable>(step, scratch) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn compute_avx2(self, step: StepPart, scratch: &mut Scratch) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.compute_with::<super::vector::Avx2>(step, scratch) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn compute_avx512(self, step: StepPart, scratch: &mut Scratch) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.compute_with::<super::vector::Avx512>(step, scratch) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn compute_with<V: Vector16>(self, step: StepPart, scratch: &mut Scratch) {
        let shape = self.inputs.shape;
        // SAFETY: passed on from the caller; `fit` has made the buffers as large as they say.
        unsafe {
            self.turn_keys::<V>(step, scratch);
            self.multiply_keys::<V>(step, scratch);
            for head_v in (self.head_k..shape.n_head_v as usize).step_by(shape.n_head_k as usize) {
                let head = ValueHead { task: self, head_v, step };
                head.compute::<V>(scratch);
            }
        }
    }

    /// Place of key `row` of the open step.
    ///
    /// # Safety
    /// No other slice of the same place lives.
    unsafe fn open_key(self, row: usize) -> &'a mut [f32] {
        let (n_head_k, head_dim) = (self.inputs.shape.n_head_k as usize, self.inputs.shape.head_dim as usize);
        // SAFETY: the keys of a head belong to its one task, and the caller has no other slice of this one.
        unsafe { self.open.keys.part((row * n_head_k + self.head_k) * head_dim, head_dim) }
    }

    /// Lays the step's keys out for products, and keeps the new ones where the step stays open.
    #[inline(always)]
    unsafe fn turn_keys<V: Vector16>(self, step: StepPart, scratch: &mut Scratch) {
        let head_dim = self.inputs.shape.head_dim as usize;
        let key_of = |row: usize| -> *const f32 {
            // Columns behind the last row mean nothing: any key will do.
            let row = row.min(step.n - 1);
            match row.checked_sub(step.n_before) {
                Some(new) => self.inputs.key(step.first + new, self.head_k).as_ptr(),
                // SAFETY: the slice is a pointer at once.
                None => unsafe { self.open_key(row) }.as_ptr(),
            }
        };
        for begin in (0..step.n).step_by(LANES) {
            let rows: [*const f32; LANES] = std::array::from_fn(|lane| key_of(begin + lane));
            for number in (0..head_dim).step_by(LANES) {
                let to = scratch.keys[number * STEP + begin..].as_mut_ptr();
                // SAFETY: a key has `head_dim` numbers; 16 lines of the turned keys lie behind `number`, each with 16 columns
                // behind `begin`.
                unsafe { V::transpose(rows.map(|row| row.add(number).cast()), to.cast(), STEP) };
            }
        }
        if !step.ends {
            for row in step.n_before..step.n {
                let key = self.inputs.key(step.first + row - step.n_before, self.head_k);
                // SAFETY: the slice lives for this line.
                unsafe { self.open_key(row) }.copy_from_slice(key);
            }
        }
    }

    /// Products of the new rows' keys and queries with all keys of the step up to them.
    #[inline(always)]
    unsafe fn multiply_keys<V: Vector16>(self, step: StepPart, scratch: &mut Scratch) {
        let head_dim = self.inputs.shape.head_dim as usize;
        let n_cols = step.n.next_multiple_of(LANES);
        for (is_query, products) in [(false, &mut scratch.key_products), (true, &mut scratch.query_products)] {
            let (mut from, mut to) = ([std::ptr::null(); STEP], [std::ptr::null_mut(); STEP]);
            let n_new = step.n - step.n_before;
            for (new, out) in products[step.n_before * STEP..step.n * STEP].chunks_exact_mut(STEP).enumerate() {
                let row = step.first + new;
                from[new] = if is_query { self.inputs.query(row, self.head_k) } else { self.inputs.key(row, self.head_k) }.as_ptr();
                out.fill(0.0);
                to[new] = out.as_mut_ptr();
            }
            // SAFETY: heads have `head_dim` numbers, the turned keys as many lines of 64, a row of products 64.
            unsafe { add_products::<V>(head_dim, &from[..n_new], scratch.keys.as_ptr(), STEP, &to[..n_new], n_cols) };
        }
    }
}

/// One value head in one step.
#[derive(Clone, Copy)]
struct ValueHead<'a> {
    task: Task<'a>,
    head_v: usize,
    step: StepPart,
}

impl<'a> ValueHead<'a> {
    /// # Safety
    /// The instructions of `V` are there, and `scratch` is as `multiply_keys` left it.
    #[inline(always)]
    unsafe fn compute<V: Vector16>(self, scratch: &mut Scratch) {
        let head_dim = self.task.inputs.shape.head_dim as usize;
        // SAFETY: the state of a value head belongs to its one task.
        let state = unsafe { self.task.state.part(self.head_v * head_dim * head_dim, head_dim * head_dim) };
        self.sum_decays(scratch);
        // SAFETY: passed on from the caller; both states are `[head_dim, head_dim]`.
        unsafe {
            turn_state::<V>(state, &mut scratch.state, head_dim);
            self.recall::<V>(scratch);
            self.share_out(scratch);
            self.correct::<V>(scratch);
            self.add_corrections::<V>(scratch);
            if self.step.ends {
                self.fold::<V>(scratch);
                turn_state::<V>(&scratch.state, state, head_dim);
            } else {
                self.keep_open(scratch);
            }
        }
    }

    fn row_of_call(self, row: usize) -> usize {
        self.step.first + row - self.step.n_before
    }

    /// The result of a row of the step.
    ///
    /// # Safety
    /// No other slice of the same result lives.
    unsafe fn result(self, row: usize) -> &'a mut [f32] {
        let (n_head_v, head_dim) = (self.task.inputs.shape.n_head_v as usize, self.task.inputs.shape.head_dim as usize);
        // SAFETY: the results of a value head belong to its one task, and the caller has no other slice of this one.
        unsafe { self.task.out.part((self.row_of_call(row) * n_head_v + self.head_v) * head_dim, head_dim) }
    }

    /// Place of the correction and the summed decay of a row of the open step.
    ///
    /// # Safety
    /// No other slice of the same places lives.
    unsafe fn open_row(self, row: usize) -> (&'a mut [f32], &'a mut f32) {
        let (n_head_v, head_dim) = (self.task.inputs.shape.n_head_v as usize, self.task.inputs.shape.head_dim as usize);
        let at = row * n_head_v + self.head_v;
        // SAFETY: as in `result`.
        unsafe { (self.task.open.corrections.part(at * head_dim, head_dim), &mut self.task.open.decays.part(at, 1)[0]) }
    }

    /// Fetches what is kept of earlier rows, and goes on with the sums of decays.
    fn sum_decays(self, scratch: &mut Scratch) {
        let head_dim = self.task.inputs.shape.head_dim as usize;
        let n_head_v = self.task.inputs.shape.n_head_v as usize;
        for row in 0..self.step.n_before {
            // SAFETY: both live for this turn of the loop.
            let (correction, decay) = unsafe { self.open_row(row) };
            scratch.corrections[row * head_dim..][..head_dim].copy_from_slice(correction);
            scratch.decays[row] = *decay;
        }
        for row in self.step.n_before..self.step.n {
            let before = if row == 0 { 0.0 } else { scratch.decays[row - 1] };
            scratch.decays[row] = before + self.task.inputs.decay[self.row_of_call(row) * n_head_v + self.head_v];
        }
    }

    /// What the state at the step's beginning says to new rows: `corrections` become `v - e^g S k`, results `e^g S q`.
    #[inline(always)]
    unsafe fn recall<V: Vector16>(self, scratch: &mut Scratch) {
        let inputs = self.task.inputs;
        let head_dim = inputs.shape.head_dim as usize;
        let n_new = self.step.n - self.step.n_before;
        let (mut keys, mut queries) = ([std::ptr::null(); STEP], [std::ptr::null(); STEP]);
        let (mut recalled, mut results) = ([std::ptr::null_mut(); STEP], [std::ptr::null_mut(); STEP]);
        let new_corrections = scratch.corrections[self.step.n_before * head_dim..self.step.n * head_dim].chunks_exact_mut(head_dim);
        for (new, correction) in new_corrections.enumerate() {
            let row = self.step.first + new;
            // SAFETY: each row's result is taken once, and used by pointer from here on.
            let result = unsafe { self.result(self.step.n_before + new) };
            correction.fill(0.0);
            result.fill(0.0);
            (keys[new], queries[new]) = (inputs.key(row, self.task.head_k).as_ptr(), inputs.query(row, self.task.head_k).as_ptr());
            (recalled[new], results[new]) = (correction.as_mut_ptr(), result.as_mut_ptr());
        }
        let state = scratch.state.as_ptr();
        // SAFETY: heads, results and the lines of the turned state have `head_dim` numbers, and there are as many lines.
        unsafe {
            add_products::<V>(head_dim, &keys[..n_new], state, head_dim, &recalled[..n_new], head_dim);
            add_products::<V>(head_dim, &queries[..n_new], state, head_dim, &results[..n_new], head_dim);
        }
        for row in self.step.n_before..self.step.n {
            let kept = exponential(scratch.decays[row]);
            let values = inputs.value(self.row_of_call(row), self.head_v);
            let corrections = &mut scratch.corrections[row * head_dim..][..head_dim];
            corrections.iter_mut().zip(values).for_each(|(correction, value)| *correction = value - kept * *correction);
            // SAFETY: the slice lives for this line.
            unsafe { self.result(row) }.iter_mut().for_each(|result| *result *= kept);
        }
    }

    /// Turns products into shares, by what is kept from row to row.
    #[inline(always)]
    fn share_out(self, scratch: &mut Scratch) {
        for row in self.step.n_before..self.step.n {
            let own = scratch.decays[row];
            // Up to the end of a vector; what stands behind the row is never used.
            let columns = row * STEP..row * STEP + (row + 1).next_multiple_of(LANES);
            let products = scratch.key_products[columns.clone()].iter().zip(&scratch.query_products[columns.clone()]);
            let shares = scratch.correction_shares[columns.clone()].iter_mut().zip(&mut scratch.result_shares[columns]);
            for (((key, query), (in_correction, in_result)), earlier) in products.zip(shares).zip(&scratch.decays) {
                let kept = exponential(own - earlier);
                (*in_correction, *in_result) = (-(key * kept), query * kept);
            }
        }
    }

    /// Subtracts from each new row's correction the shares of those before it.
    #[inline(always)]
    unsafe fn correct<V: Vector16>(self, scratch: &mut Scratch) {
        let shape = self.task.inputs.shape;
        let (n_head_v, head_dim) = (shape.n_head_v as usize, shape.head_dim as usize);
        let (shares, corrections) = (scratch.correction_shares.as_ptr(), scratch.corrections.as_mut_ptr());
        for begin in (self.step.n_before..self.step.n).step_by(OUTER_ROWS) {
            let end = self.step.n.min(begin + OUTER_ROWS);
            // SAFETY: rows are below 64, a row of shares has 64 numbers, a correction `head_dim`; the corrections that are read
            // lie before those that are written.
            unsafe {
                let earlier = subtract_common::<V>(shares, corrections, begin, end, head_dim);
                for row in begin..end {
                    let (share, written) = (shares.add(row * STEP + earlier), corrections.add(row * head_dim));
                    let read = corrections.cast_const().add(earlier * head_dim);
                    outer_product::<V, 1>(row - earlier, [share], read, head_dim, [written], head_dim);
                    let beta = self.task.inputs.beta[self.row_of_call(row) * n_head_v + self.head_v];
                    std::slice::from_raw_parts_mut(written, head_dim).iter_mut().for_each(|value| *value *= beta);
                }
            }
        }
    }

    /// Adds to each new row's result the shares of the corrections up to its own.
    #[inline(always)]
    unsafe fn add_corrections<V: Vector16>(self, scratch: &Scratch) {
        let head_dim = self.task.inputs.shape.head_dim as usize;
        let (shares, corrections) = (scratch.result_shares.as_ptr(), scratch.corrections.as_ptr());
        for begin in (self.step.n_before..self.step.n).step_by(OUTER_ROWS) {
            let end = self.step.n.min(begin + OUTER_ROWS);
            let mut common = 0;
            // SAFETY: as in `correct`; results lie elsewhere.
            unsafe {
                if end - begin == OUTER_ROWS {
                    common = begin + 1;
                    let rows: [*const f32; OUTER_ROWS] = std::array::from_fn(|index| shares.add((begin + index) * STEP));
                    let results: [*mut f32; OUTER_ROWS] = std::array::from_fn(|index| self.result(begin + index).as_mut_ptr());
                    outer_product::<V, OUTER_ROWS>(common, rows, corrections, head_dim, results, head_dim);
                }
                for row in begin..end {
                    let (share, read) = (shares.add(row * STEP + common), corrections.add(common * head_dim));
                    let result = self.result(row).as_mut_ptr();
                    outer_product::<V, 1>(row + 1 - common, [share], read, head_dim, [result], head_dim);
                }
            }
        }
    }

    /// Takes the turned state to the end of the step; corrections become what is left of them there.
    #[inline(always)]
    unsafe fn fold<V: Vector16>(self, scratch: &mut Scratch) {
        let (head_dim, n) = (self.task.inputs.shape.head_dim as usize, self.step.n);
        let last = scratch.decays[n - 1];
        for (correction, decay) in scratch.corrections.chunks_exact_mut(head_dim).zip(&scratch.decays[..n]) {
            let kept = exponential(last - decay);
            correction.iter_mut().for_each(|value| *value *= kept);
        }
        let kept = exponential(last);
        scratch.state.iter_mut().for_each(|value| *value *= kept);
        for number in (0..head_dim).step_by(OUTER_ROWS) {
            // SAFETY: a line of the turned keys has 64 numbers, a correction and a line of the state `head_dim`, a multiple of
            // `OUTER_ROWS`.
            unsafe {
                let keys: [*const f32; OUTER_ROWS] = std::array::from_fn(|index| scratch.keys.as_ptr().add((number + index) * STEP));
                let state = scratch.state.as_mut_ptr();
                let lines: [*mut f32; OUTER_ROWS] = std::array::from_fn(|index| state.add((number + index) * head_dim));
                outer_product::<V, OUTER_ROWS>(n, keys, scratch.corrections.as_ptr(), head_dim, lines, head_dim);
            }
        }
    }

    /// Keeps what later rows of the step need of the new ones.
    fn keep_open(self, scratch: &Scratch) {
        let head_dim = self.task.inputs.shape.head_dim as usize;
        for row in self.step.n_before..self.step.n {
            // SAFETY: both live for this turn of the loop.
            let (correction, decay) = unsafe { self.open_row(row) };
            correction.copy_from_slice(&scratch.corrections[row * head_dim..][..head_dim]);
            *decay = scratch.decays[row];
        }
    }
}

/// Adds to four corrections the shares of all before the four, and says how many those were; fewer rows are left to go one by one.
///
/// # Safety
/// The instructions of `V` are there; rows of `shares` have [`STEP`] numbers, `corrections` of `head_dim`, up to row `end`.
#[inline(always)]
unsafe fn subtract_common<V: Vector16>(shares: *const f32, corrections: *mut f32, begin: usize, end: usize, head_dim: usize) -> usize {
    if end - begin < OUTER_ROWS {
        return 0;
    }
    // SAFETY: passed on from the caller; rows before `begin` are read, rows from `begin` on are written.
    unsafe {
        let rows: [*const f32; OUTER_ROWS] = std::array::from_fn(|index| shares.add((begin + index) * STEP));
        let written: [*mut f32; OUTER_ROWS] = std::array::from_fn(|index| corrections.add((begin + index) * head_dim));
        outer_product::<V, OUTER_ROWS>(begin, rows, corrections, head_dim, written, head_dim);
    }
    begin
}

/// `c[row][lane] += sum over k of a[row][k] * b[k][lane]`, each element one chain over k.
///
/// # Safety
/// As [`outer_product`], for each of the rows.
#[inline(always)]
unsafe fn add_products<V: Vector16>(n_k: usize, a: &[*const f32], b: *const f32, b_stride: usize, c: &[*mut f32], lanes: usize) {
    for lane in (0..lanes).step_by(STRIPE) {
        let width = STRIPE.min(lanes - lane);
        let (a_fours, a_rest) = a.as_chunks::<OUTER_ROWS>();
        let (c_fours, c_rest) = c.as_chunks::<OUTER_ROWS>();
        // SAFETY: passed on from the caller; a stripe lies within the lanes.
        unsafe {
            for (a, c) in a_fours.iter().zip(c_fours) {
                outer_product::<V, OUTER_ROWS>(n_k, *a, b.add(lane), b_stride, c.map(|row| row.add(lane)), width);
            }
            for (a, c) in a_rest.iter().zip(c_rest) {
                outer_product::<V, 1>(n_k, [*a], b.add(lane), b_stride, [c.add(lane)], width);
            }
        }
    }
}

/// Turns a square of `head_dim` (a multiple of 16) rows.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn turn_state<V: Vector16>(from: &[f32], to: &mut [f32], head_dim: usize) {
    assert!(from.len() == head_dim * head_dim && to.len() == from.len(), "two squares of {head_dim}");
    for row in (0..head_dim).step_by(LANES) {
        for column in (0..head_dim).step_by(LANES) {
            // SAFETY: both squares hold 16 by 16 numbers from there on; the instructions are there by the caller's promise.
            unsafe {
                let rows = std::array::from_fn(|lane| from.as_ptr().add((row + lane) * head_dim + column).cast());
                V::transpose(rows, to.as_mut_ptr().add(column * head_dim + row).cast(), head_dim);
            }
        }
    }
}
