//! The delta rule over many rows, in steps of 64 rows counted from position 0.
//!
//! What a later row needs of an earlier one (its key, correction and summed decay) is kept while the step is open. So a row's bits depend
//! on the state and on its step's rows up to it, not on the cut into calls, threads or the instruction set;
//! `delta_step` has the arithmetic.
//!
//! A task is a key head with its value heads, which share the products of keys and queries with keys.

use std::cell::RefCell;

use super::delta_step::{STEP, StepBuffers, StepRows};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::vector::{LANES, Portable, Vector16};
use crate::backend::op::DeltaShape;
use crate::backends::host::pool::ThreadPool;

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

impl StepPart {
    /// The rows of the step that this call brings.
    fn new_rows(self) -> std::ops::Range<usize> {
        self.n_before..self.n
    }

    /// The row of the call that a new row of the step is.
    fn row_of_call(self, row: usize) -> usize {
        self.first + row - self.n_before
    }
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
        BUFFERS.with_borrow_mut(|buffers| {
            buffers.fit(shape.head_dim as usize);
            steps.iter().for_each(|step| task.compute(level, *step, buffers));
        });
    });
}

thread_local! {
    static BUFFERS: RefCell<StepBuffers> = RefCell::default();
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
    fn compute(self, level: SimdLevel, step: StepPart, buffers: &mut StepBuffers) {
        match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.compute_with::<Portable>(step, buffers) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `delta_prompt` capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.compute_avx2(step, buffers) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.compute_avx512(step, buffers) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.compute_with::<Portable>(step, buffers) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn compute_avx2(self, step: StepPart, buffers: &mut StepBuffers) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.compute_with::<super::vector::Avx2>(step, buffers) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn compute_avx512(self, step: StepPart, buffers: &mut StepBuffers) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.compute_with::<super::vector::Avx512>(step, buffers) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn compute_with<V: Vector16>(self, step: StepPart, buffers: &mut StepBuffers) {
        let (n_head_k, n_head_v) = (self.inputs.shape.n_head_k as usize, self.inputs.shape.n_head_v as usize);
        let head_dim = self.inputs.shape.head_dim as usize;
        let rows = StepRows { head_dim, n_before: step.n_before, n: step.n };
        self.fetch_keys(step, buffers);
        // SAFETY: passed on from the caller.
        unsafe { buffers.multiply_keys::<V>(rows) };
        for head_v in (self.head_k..n_head_v).step_by(n_head_k) {
            // SAFETY: the state of a value head belongs to its one task; the instructions are there by the caller's promise.
            unsafe {
                let state = self.state.part(head_v * head_dim * head_dim, head_dim * head_dim);
                self.fetch_values(head_v, step, buffers);
                buffers.compute::<V>(rows, state);
                self.store(head_v, step, buffers);
                if step.ends {
                    buffers.fold::<V>(rows, state);
                }
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

    /// Place of the correction and the summed decay of row `row` of the open step.
    ///
    /// # Safety
    /// No other slice of the same places lives.
    unsafe fn open_row(self, head_v: usize, row: usize) -> (&'a mut [f32], &'a mut f32) {
        let (n_head_v, head_dim) = (self.inputs.shape.n_head_v as usize, self.inputs.shape.head_dim as usize);
        let at = row * n_head_v + head_v;
        // SAFETY: a value head belongs to its one task, and the caller has no other slice of these places.
        unsafe { (self.open.corrections.part(at * head_dim, head_dim), &mut self.open.decays.part(at, 1)[0]) }
    }

    /// Fetches the step's keys and the new queries, and keeps the new keys where the step stays open.
    fn fetch_keys(self, step: StepPart, buffers: &mut StepBuffers) {
        let head_dim = self.inputs.shape.head_dim as usize;
        let keys = buffers.keys.chunks_exact_mut(head_dim);
        for (row, (key, query)) in keys.zip(buffers.queries.chunks_exact_mut(head_dim)).enumerate().take(step.n) {
            if row < step.n_before {
                // SAFETY: the slice lives for this line.
                key.copy_from_slice(unsafe { self.open_key(row) });
                continue;
            }
            key.copy_from_slice(self.inputs.key(step.row_of_call(row), self.head_k));
            query.copy_from_slice(self.inputs.query(step.row_of_call(row), self.head_k));
            if !step.ends {
                // SAFETY: the slice lives for this line.
                unsafe { self.open_key(row) }.copy_from_slice(key);
            }
        }
    }

    /// Fetches what is kept of earlier rows and what a value head is given for new ones, and goes on with the sums of decays.
    fn fetch_values(self, head_v: usize, step: StepPart, buffers: &mut StepBuffers) {
        let (n_head_v, head_dim) = (self.inputs.shape.n_head_v as usize, self.inputs.shape.head_dim as usize);
        for row in 0..step.n_before {
            // SAFETY: both live for this turn of the loop.
            let (correction, decay) = unsafe { self.open_row(head_v, row) };
            buffers.corrections[row * head_dim..][..head_dim].copy_from_slice(correction);
            buffers.decays[row] = *decay;
        }
        for row in step.new_rows() {
            let row_of_call = step.row_of_call(row);
            let gate = row_of_call * n_head_v + head_v;
            let before = if row == 0 { 0.0 } else { buffers.decays[row - 1] };
            buffers.decays[row] = before + self.inputs.decay[gate];
            buffers.betas[row] = self.inputs.beta[gate];
            buffers.values[row * head_dim..][..head_dim].copy_from_slice(self.inputs.value(row_of_call, head_v));
        }
    }

    /// Stores the new rows' results, and what later rows of the step need of them.
    fn store(self, head_v: usize, step: StepPart, buffers: &StepBuffers) {
        let (n_head_v, head_dim) = (self.inputs.shape.n_head_v as usize, self.inputs.shape.head_dim as usize);
        for row in step.new_rows() {
            let numbers = row * head_dim..(row + 1) * head_dim;
            // SAFETY: a value head belongs to its one task; the slices live for this turn of the loop.
            unsafe {
                let out = self.out.part((step.row_of_call(row) * n_head_v + head_v) * head_dim, head_dim);
                out.copy_from_slice(&buffers.results[numbers.clone()]);
                if !step.ends {
                    let (correction, decay) = self.open_row(head_v, row);
                    correction.copy_from_slice(&buffers.corrections[numbers]);
                    *decay = buffers.decays[row];
                }
            }
        }
    }
}
