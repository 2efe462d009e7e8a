//! The delta rule row by row, for windows: on a copy of the state, or on the state itself.
//!
//! A row of the state (one value number, all key numbers) meets nothing of the other rows, so some rows are carried through the whole
//! window before the next ones are read. Whether they are then written back is all that tells [`delta_commit`] from [`delta_window`].

use std::cell::RefCell;

use super::delta_prompt::DeltaInputs;
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::exponential;
use super::vector::{LANES, Portable, Vector16};
use crate::backends::host::pool::ThreadPool;

/// Rows of the state that go through a window together: they stay in the first-level cache, and while one waits for its sums the
/// others go on. Heads are whole numbers of them.
const TOGETHER: usize = LANES;

thread_local! {
    /// Rows of the state on their way through a window.
    static ROWS: RefCell<Vec<f32>> = RefCell::default();
}

/// Computes `out` `[n_rows, n_head_v, head_dim]` from `state` `[n_head_v, head_dim (value), head_dim (key)]`.
///
/// # Panics
/// Where lengths do not match, or the head size is no multiple of 16.
pub fn delta_window(pool: &ThreadPool, level: SimdLevel, inputs: &DeltaInputs<'_>, state: &[f32], out: &mut [f32]) {
    inputs.check(state.len());
    assert_eq!(out.len(), inputs.n_rows() * inputs.shape.value_width() as usize, "as many results as values");
    let (level, head_dim) = (level.min(SimdLevel::detect()), inputs.shape.head_dim as usize);
    let out = SharedSlice::new(out);
    pool.run(inputs.shape.n_head_v as usize, &|head| {
        ROWS.with_borrow_mut(|copies| {
            copies.resize(TOGETHER * head_dim, 0.0);
            let state = &state[head * head_dim * head_dim..][..head_dim * head_dim];
            for (index, rows) in state.chunks_exact(TOGETHER * head_dim).enumerate() {
                copies.copy_from_slice(rows);
                StateRows { head, first: TOGETHER * index }.advance(level, inputs, copies, Some(out));
            }
        });
    });
}

/// Takes `state` over all rows.
///
/// # Panics
/// As [`delta_window`].
pub fn delta_commit(pool: &ThreadPool, level: SimdLevel, inputs: &DeltaInputs<'_>, state: &mut [f32]) {
    inputs.check(state.len());
    let (level, head_dim) = (level.min(SimdLevel::detect()), inputs.shape.head_dim as usize);
    let state = SharedSlice::new(state);
    pool.run(inputs.shape.n_head_v as usize, &|head| {
        // SAFETY: the state of a head belongs to its one task.
        let state = unsafe { state.part(head * head_dim * head_dim, head_dim * head_dim) };
        for (index, rows) in state.chunks_exact_mut(TOGETHER * head_dim).enumerate() {
            StateRows { head, first: TOGETHER * index }.advance(level, inputs, rows, None);
        }
    });
}

/// Which rows of the state: [`TOGETHER`] of a value head.
#[derive(Clone, Copy)]
struct StateRows {
    head: usize,
    first: usize,
}

impl StateRows {
    /// Carries `rows` through all rows of the inputs and leaves their results in `out`.
    fn advance(self, level: SimdLevel, inputs: &DeltaInputs<'_>, rows: &mut [f32], out: Option<SharedSlice<'_, f32>>) {
        match level {
            // SAFETY: portable code needs no instructions.
            SimdLevel::Scalar => unsafe { self.advance_with::<Portable>(inputs, rows, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller capped the level at what this processor has.
            SimdLevel::Avx2 => unsafe { self.advance_avx2(inputs, rows, out) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            SimdLevel::Avx512 => unsafe { self.advance_avx512(inputs, rows, out) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: portable code needs no instructions.
            _ => unsafe { self.advance_with::<Portable>(inputs, rows, out) },
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn advance_avx2(self, inputs: &DeltaInputs<'_>, rows: &mut [f32], out: Option<SharedSlice<'_, f32>>) {
        // SAFETY: this function is compiled for the instructions of `Avx2`.
        unsafe { self.advance_with::<super::vector::Avx2>(inputs, rows, out) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
    fn advance_avx512(self, inputs: &DeltaInputs<'_>, rows: &mut [f32], out: Option<SharedSlice<'_, f32>>) {
        // SAFETY: this function is compiled for the instructions of `Avx512`.
        unsafe { self.advance_with::<super::vector::Avx512>(inputs, rows, out) }
    }

    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    unsafe fn advance_with<V: Vector16>(self, inputs: &DeltaInputs<'_>, rows: &mut [f32], out: Option<SharedSlice<'_, f32>>) {
        let (n_head_v, head_dim) = (inputs.shape.n_head_v as usize, inputs.shape.head_dim as usize);
        let head_k = self.head % inputs.shape.n_head_k as usize;
        for index in 0..inputs.n_rows() {
            let gate = index * n_head_v + self.head;
            let (keep, beta) = (exponential(inputs.decay[gate]), inputs.beta[gate]);
            let (key, query) = (inputs.key(index, head_k), inputs.query(index, head_k));
            let values = &inputs.value(index, self.head)[self.first..][..TOGETHER];
            for (row, value) in rows.chunks_exact_mut(head_dim).zip(values) {
                // SAFETY: passed on from the caller.
                unsafe { step::<V>(row, key, keep, beta, *value) };
            }
            if let Some(out) = out {
                // SAFETY: passed on from the caller; the numbers of a head belong to the head's one task.
                let out = unsafe { out.part(gate * head_dim + self.first, TOGETHER) };
                for (row, out) in rows.chunks_exact(head_dim).zip(out) {
                    // SAFETY: as above.
                    *out = unsafe { dot::<V>(row, query) };
                }
            }
        }
    }
}

/// `row *= keep; row += beta (value - row . key) key`.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn step<V: Vector16>(row: &mut [f32], key: &[f32], keep: f32, beta: f32, value: f32) {
    let (rows, keys) = (row.as_chunks_mut::<LANES>().0, key.as_chunks::<LANES>().0);
    // SAFETY: a chunk has as many numbers as a vector; the instructions are there by the caller's promise.
    unsafe {
        let (zero, keep) = (V::splat(0.0), V::splat(keep));
        let mut recalled = zero;
        for (row, key) in rows.iter_mut().zip(keys) {
            let kept = V::load(row.as_ptr()).multiply_add(keep, zero);
            kept.store(row.as_mut_ptr());
            recalled = kept.multiply_add(V::load(key.as_ptr()), recalled);
        }
        let correction = V::splat(beta * (value - sum(recalled)));
        for (row, key) in rows.iter_mut().zip(keys) {
            correction.multiply_add(V::load(key.as_ptr()), V::load(row.as_ptr())).store(row.as_mut_ptr());
        }
    }
}

/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn dot<V: Vector16>(left: &[f32], right: &[f32]) -> f32 {
    // SAFETY: as in `step`.
    unsafe {
        let mut sums = V::splat(0.0);
        for (left, right) in left.as_chunks::<LANES>().0.iter().zip(right.as_chunks::<LANES>().0) {
            sums = V::load(left.as_ptr()).multiply_add(V::load(right.as_ptr()), sums);
        }
        sum(sums)
    }
}

/// The sum of all lanes, halves added to halves.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
unsafe fn sum<V: Vector16>(vector: V) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    // SAFETY: there is room for 16 numbers.
    unsafe { vector.store(lanes.as_mut_ptr()) };
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}
