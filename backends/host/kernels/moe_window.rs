//! Experts of a window: at most eight rows, each with its chosen experts; every expert's weights are read once.

use super::activations::{quantise_row, row_bytes};
use super::gemm::Activations;
use super::matvec::{NO_RESULTS, TILE_ROWS, WINDOW_ROWS, WindowProduct};
use super::moe::{ExpertInputs, ExpertShape, ExpertWeights, Scratch, add_share};
use super::router::Route;
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::swiglu;
use crate::backends::host::pool::ThreadPool;

/// Numbers quantised in a task: some microseconds, enough to pay for waking a thread.
const TASK_NUMBERS: usize = 8192;

/// One row of a window.
#[derive(Clone, Copy, Debug)]
pub struct WindowRow<'a> {
    /// Its chosen experts, ascending by number.
    pub routes: &'a [Route],
}

/// An expert that some rows of the window chose.
struct Chosen<'a> {
    expert: u32,
    weights: ExpertWeights<'a>,
    /// Window rows, ascending, with their shares.
    rows: Vec<(usize, f32)>,
    /// Scratch row of the first of them; the others follow.
    first_pair: usize,
}

/// Adds the experts' results to `residual[n_rows, n_embd]`; the inputs have a row for each of `rows`.
///
/// `experts` gives the matrices of an expert by its number. `scratch` holds [`scratch_bytes`](super::moe::scratch_bytes) for
/// all routes of all rows. Three parallel loops: gate and up, quantising, down with the additions in ascending order.
///
/// # Panics
/// Where shapes do not match, routes do not ascend, rows are more than [`WINDOW_ROWS`] or the scratch is too small.
#[allow(clippy::too_many_arguments, reason = "inputs, result and the caller's memory are separate things")]
pub fn experts_window<'a>(
    pool: &ThreadPool,
    level: SimdLevel,
    shape: &ExpertShape,
    inputs: &ExpertInputs<'_>,
    rows: &[WindowRow<'_>],
    experts: &dyn Fn(u32) -> ExpertWeights<'a>,
    residual: &mut [f32],
    scratch: &mut [u8],
) {
    assert_eq!(residual.len(), rows.len() * shape.n_embd, "a residual row for each of the window");
    let chosen = gather(rows, experts);
    let n_pairs = rows.iter().map(|row| row.routes.len()).sum();
    let scratch = Scratch::cut(shape, n_pairs, scratch);
    let inner_bytes = row_bytes(shape.inner_format(), shape.n_ff);
    let activated = SharedSlice::new(&mut scratch.words[..n_pairs * shape.n_ff]);
    gate_and_up(pool, level, shape, inputs, &chosen, activated);
    let stored = SharedSlice::new(&mut *scratch.rows);
    let pairs_per_task = (TASK_NUMBERS / shape.n_ff.max(1)).max(1);
    pool.run(n_pairs.div_ceil(pairs_per_task), &|task| {
        for pair in task * pairs_per_task..((task + 1) * pairs_per_task).min(n_pairs) {
            // SAFETY: each pair has its own rows and one task; the loop before has ended.
            let (row, stored) = unsafe { (activated.part(pair * shape.n_ff, shape.n_ff), stored.part(pair * inner_bytes, inner_bytes)) };
            quantise_row(level, shape.inner_format(), row, stored);
        }
    });
    let inner = Activations { format: shape.inner_format(), n: shape.n_ff, bytes: scratch.rows };
    down(pool, level, shape, &inner, &chosen, residual);
}

/// The distinct experts of the window, ascending.
fn gather<'a>(rows: &[WindowRow<'_>], experts: &dyn Fn(u32) -> ExpertWeights<'a>) -> Vec<Chosen<'a>> {
    assert!(rows.len() <= WINDOW_ROWS, "a window of {} rows, at most {WINDOW_ROWS}", rows.len());
    let mut pairs: Vec<(u32, usize, f32)> = Vec::new();
    for (row, window_row) in rows.iter().enumerate() {
        assert!(window_row.routes.is_sorted_by(|left, right| left.expert < right.expert), "experts of row {row} ascend");
        pairs.extend(window_row.routes.iter().map(|route| (route.expert, row, route.weight)));
    }
    pairs.sort_by_key(|(expert, row, _)| (*expert, *row));
    let mut chosen: Vec<Chosen<'a>> = Vec::new();
    for (pair, (expert, row, share)) in pairs.into_iter().enumerate() {
        match chosen.last_mut() {
            Some(last) if last.expert == expert => last.rows.push((row, share)),
            _ => chosen.push(Chosen { expert, weights: experts(expert), rows: vec![(row, share)], first_pair: pair }),
        }
    }
    chosen
}

/// `activated[pair] = silu(gate x) * (up x)`.
fn gate_and_up(
    pool: &ThreadPool,
    level: SimdLevel,
    shape: &ExpertShape,
    inputs: &ExpertInputs<'_>,
    chosen: &[Chosen<'_>],
    activated: SharedSlice<'_, f32>,
) {
    let products: Vec<(WindowProduct<'_>, WindowProduct<'_>)> = chosen
        .iter()
        .map(|chosen| {
            let rows: Vec<usize> = chosen.rows.iter().map(|(row, _)| *row).collect();
            let gate = WindowProduct::new(level, &shape.gate_weights(&chosen.weights), &inputs.gate, &rows);
            (gate, WindowProduct::new(level, &shape.up_weights(&chosen.weights), &inputs.up, &rows))
        })
        .collect();
    let tasks_per_expert = shape.n_ff.div_ceil(TILE_ROWS);
    pool.run(chosen.len() * tasks_per_expert, &|task| {
        let (index, first) = (task / tasks_per_expert, task % tasks_per_expert * TILE_ROWS);
        let (gate_product, up_product) = &products[index];
        let (count, n_rows) = (TILE_ROWS.min(shape.n_ff - first), chosen[index].rows.len());
        let (mut gate, mut up) = (NO_RESULTS, NO_RESULTS);
        up_product.prefetch(first);
        gate_product.tile(first, count, &mut gate);
        up_product.tile(first, count, &mut up);
        for (row, (gate, up)) in gate[..n_rows].iter_mut().zip(&up).enumerate() {
            swiglu(level, &mut gate[..count], &up[..count]);
            // SAFETY: this part of the pair's row belongs to this task.
            let out = unsafe { activated.part((chosen[index].first_pair + row) * shape.n_ff + first, count) };
            out.copy_from_slice(&gate[..count]);
        }
    });
}

/// `residual[row] += share * down(activated[pair])`, expert after expert; a task owns some columns of all rows.
fn down(pool: &ThreadPool, level: SimdLevel, shape: &ExpertShape, inner: &Activations<'_>, chosen: &[Chosen<'_>], residual: &mut [f32]) {
    let products: Vec<WindowProduct<'_>> = chosen
        .iter()
        .map(|chosen| {
            let pairs: Vec<usize> = (chosen.first_pair..chosen.first_pair + chosen.rows.len()).collect();
            WindowProduct::new(level, &shape.down_weights(&chosen.weights), inner, &pairs)
        })
        .collect();
    let residual = SharedSlice::new(residual);
    pool.run(shape.n_embd.div_ceil(TILE_ROWS), &|task| {
        let first = task * TILE_ROWS;
        let count = TILE_ROWS.min(shape.n_embd - first);
        let mut tile = NO_RESULTS;
        for (index, (product, chosen)) in products.iter().zip(chosen).enumerate() {
            if let Some(next) = products.get(index + 1) {
                next.prefetch(first);
            }
            product.tile(first, count, &mut tile);
            for ((row, share), results) in chosen.rows.iter().zip(&tile) {
                // SAFETY: these columns are this task's own.
                let residual = unsafe { residual.part(row * shape.n_embd + first, count) };
                add_share(residual, *share, &results[..count]);
            }
        }
    });
}
