//! The prompt path's product: `out[t][r] = sum over k of W[r][k] * X[t][k]` for many tokens.
//!
//! Weights are taken as a file stores them. A panel of 16 rows is decoded once (`panel`) and multiplied with
//! every token of a tile, so the cost of decoding is shared by the tile.
//!
//! A result element is a sum in one fixed order over its own weight row and activation row: rows in the batch, tiles, index
//! lists and threads change no bit, and neither does the instruction set.
//! - int8 activations: the products of a group of 16 or 32 are summed exactly as integers. Q8_0: `acc = fma(sum, w * a, acc)`
//!   group after group. Q8_K: `part = fma(sum, w, part)` within 256 columns, then `acc = fma(part, a, acc)`.
//! - f32 activations: `part = fma(w, x, part)` within 256 columns, then `acc += part`.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::activations::{ActivationFormat, QuantisedRow, row_bytes};
use super::codes::{self, CHUNK};
use super::panel::{FloatPanel, IntPanel, PANEL_ROWS, TILE_TOKENS, TokenTails, TokenTile};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use crate::backends::host::pool::ThreadPool;
use crate::quant::QuantType;

/// Panels that a task decodes before it walks over its tokens: 64 rows, whose codes stay in the second-level cache.
const TASK_PANELS: usize = 4;
/// Tokens of a task: decoding is then under 1 % of the work, and long prompts still split over many threads.
const TASK_TOKENS: usize = 512;

/// A weight matrix as a file stores it: `n_rows` rows of `n_columns` weights.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// Element type.
    pub quant: QuantType,
    /// The rows' blocks.
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub row_stride: usize,
    /// Rows, the length of a result row.
    pub n_rows: usize,
    /// Columns, the length of an activation row.
    pub n_columns: usize,
}

impl<'a> Weights<'a> {
    /// Rows that lie one after the other without gaps.
    ///
    /// # Panics
    /// Where the columns are no whole number of blocks or the bytes do not hold the rows.
    #[must_use]
    pub fn dense(quant: QuantType, bytes: &'a [u8], n_rows: usize, n_columns: usize) -> Self {
        assert!(n_columns.is_multiple_of(quant.block_len()), "{n_columns} columns are no whole number of {quant} blocks");
        let row_stride = n_columns / quant.block_len() * quant.block_bytes();
        let weights = Self { quant, bytes, row_stride, n_rows, n_columns };
        weights.check();
        weights
    }

    /// Asserts that these weights and `activations` make a product; returns the format that goes with the weights.
    pub(super) fn check_with(&self, activations: &Activations<'_>) -> ActivationFormat {
        self.check();
        assert_eq!(self.n_columns, activations.n, "columns and activations");
        let own_format = ActivationFormat::for_weights(self.quant, false);
        let fits = activations.format == ActivationFormat::F32 || activations.format == own_format;
        assert!(fits, "{:?} activations with {} weights", activations.format, self.quant);
        own_format
    }

    pub(super) fn check(&self) {
        let row = self.n_columns / self.quant.block_len() * self.quant.block_bytes();
        assert!(self.n_columns.is_multiple_of(self.quant.block_len()), "{} columns of {}", self.n_columns, self.quant);
        let needed = self.n_rows.checked_sub(1).map_or(0, |before| before * self.row_stride + row);
        assert!(self.bytes.len() >= needed, "{} rows of {row} bytes need {needed}, {} given", self.n_rows, self.bytes.len());
    }

    /// The blocks of `columns` columns of a row; both numbers are multiples of the block.
    #[inline]
    pub(super) fn blocks(&self, row: usize, first_column: usize, columns: usize) -> &'a [u8] {
        let (block_len, block_bytes) = (self.quant.block_len(), self.quant.block_bytes());
        let start = row * self.row_stride + first_column / block_len * block_bytes;
        &self.bytes[start..start + columns / block_len * block_bytes]
    }
}

/// Rows of activations, one after the other, each `row_bytes(format, n)` long.
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    /// How a row is stored.
    pub format: ActivationFormat,
    /// Numbers in a row.
    pub n: usize,
    /// The rows.
    pub bytes: &'a [u8],
}

impl<'a> Activations<'a> {
    /// Rows of `n` plain f32.
    #[must_use]
    pub fn from_f32(n: usize, rows: &'a [f32]) -> Self {
        // SAFETY: any f32 is four valid bytes, and the byte view ends where the slice ends.
        let bytes = unsafe { std::slice::from_raw_parts(rows.as_ptr().cast::<u8>(), std::mem::size_of_val(rows)) };
        Self { format: ActivationFormat::F32, n, bytes }
    }

    #[inline]
    pub(super) fn row(&self, row: usize) -> &'a [u8] {
        let bytes = row_bytes(self.format, self.n);
        &self.bytes[row * bytes..(row + 1) * bytes]
    }
}

/// Which activation rows are multiplied, in the order of the result rows.
#[derive(Clone, Copy, Debug)]
pub enum TokenRows<'a> {
    /// The first rows, this many.
    Contiguous(usize),
    /// The rows with these numbers; a number may occur more than once.
    Indexed(&'a [u32]),
}

impl TokenRows<'_> {
    /// Result rows.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Contiguous(count) => *count,
            Self::Indexed(rows) => rows.len(),
        }
    }

    /// True where no row is multiplied.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[inline]
    pub(super) fn at(&self, token: usize) -> usize {
        match self {
            Self::Contiguous(_) => token,
            Self::Indexed(rows) => rows[token] as usize,
        }
    }
}

/// Multiplies; `out[t * out_stride + r]` is stored for every token t and weight row r, other elements stay.
///
/// # Panics
/// Where shapes do not match, or the activations are neither f32 nor in the format of the weights.
pub fn gemm(
    pool: &ThreadPool,
    level: SimdLevel,
    weights: &Weights<'_>,
    activations: &Activations<'_>,
    tokens: TokenRows<'_>,
    out: &mut [f32],
    out_stride: usize,
) {
    if weights.n_rows == 0 || tokens.is_empty() {
        return;
    }
    let product = Product::new(level, weights, activations, tokens, SharedSlice::new(out), out_stride);
    let tasks = product.tasks(pool.n_threads());
    pool.run(tasks.count(), &|task| {
        let (rows, tokens) = tasks.part(task);
        // SAFETY: the tasks' rectangles of rows and tokens do not overlap.
        unsafe { product.compute(rows, tokens) };
    });
}

/// How a product is cut into rectangles of weight rows and tokens.
pub(super) struct Tasks {
    n_rows: usize,
    n_tokens: usize,
    rows_per_task: usize,
    row_tasks: usize,
}

impl Tasks {
    /// Large pieces, as long as every thread still finds a few of them.
    fn split(n_rows: usize, n_tokens: usize, n_threads: usize) -> Self {
        let token_tasks = n_tokens.div_ceil(TASK_TOKENS);
        let panels = n_rows.div_ceil(PANEL_ROWS);
        let wanted = if n_threads == 1 { 1 } else { 4 * n_threads };
        let panels_per_task = (panels * token_tasks / wanted).clamp(1, TASK_PANELS);
        let rows_per_task = panels_per_task * PANEL_ROWS;
        Self { n_rows, n_tokens, rows_per_task, row_tasks: n_rows.div_ceil(rows_per_task) }
    }

    pub(super) fn count(&self) -> usize {
        self.row_tasks * self.n_tokens.div_ceil(TASK_TOKENS)
    }

    pub(super) fn part(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let (row, token) = (task % self.row_tasks * self.rows_per_task, task / self.row_tasks * TASK_TOKENS);
        (row..(row + self.rows_per_task).min(self.n_rows), token..(token + TASK_TOKENS).min(self.n_tokens))
    }
}

/// Buffers a thread keeps from task to task.
#[derive(Default)]
struct Scratch {
    int_panels: [IntPanel; TASK_PANELS],
    float_panels: [FloatPanel; TASK_PANELS],
    tails: TokenTails,
    /// Product and tokens that `tails` were made for.
    tails_of: Option<(u64, Range<usize>)>,
}

/// Products made so far.
static N_PRODUCTS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// A checked product, of which any rectangle may be computed by any thread.
pub(super) struct Product<'a> {
    /// Tells products apart, so that a thread knows what its buffers hold.
    number: u64,
    level: SimdLevel,
    weights: Weights<'a>,
    activations: Activations<'a>,
    tokens: TokenRows<'a>,
    out: SharedSlice<'a, f32>,
    out_stride: usize,
}

/// Results of a tile with one panel.
pub(super) type TileResult = [[f32; PANEL_ROWS]; TILE_TOKENS];

impl<'a> Product<'a> {
    pub(super) fn new(
        level: SimdLevel,
        weights: &Weights<'a>,
        activations: &Activations<'a>,
        tokens: TokenRows<'a>,
        out: SharedSlice<'a, f32>,
        out_stride: usize,
    ) -> Self {
        weights.check_with(activations);
        assert!(out_stride >= weights.n_rows, "a result row of {} needs a stride of as many, not {out_stride}", weights.n_rows);
        let needed = tokens.len().checked_sub(1).map_or(0, |before| before * out_stride + weights.n_rows);
        assert!(out.len() >= needed, "result of {needed} elements, {} given", out.len());
        let level = level.min(SimdLevel::detect());
        let number = N_PRODUCTS.fetch_add(1, Ordering::Relaxed);
        Self { number, level, weights: *weights, activations: *activations, tokens, out, out_stride }
    }

    /// The cut into tasks for [`compute`](Self::compute).
    pub(super) fn tasks(&self, n_threads: usize) -> Tasks {
        Tasks::split(self.weights.n_rows, self.tokens.len(), n_threads)
    }

    /// Computes the elements of `rows` x `tokens`; at most 64 rows, the first a multiple of 16.
    ///
    /// # Safety
    /// No other thread may use an element of that rectangle of the result meanwhile.
    pub(super) unsafe fn compute(&self, rows: Range<usize>, tokens: Range<usize>) {
        SCRATCH.with_borrow_mut(|scratch| {
            if self.activations.format == ActivationFormat::F32 {
                // SAFETY: passed on from the caller.
                unsafe { self.compute_floats(scratch, rows, tokens) };
            } else {
                // SAFETY: passed on from the caller.
                unsafe { self.compute_integers(scratch, rows, tokens) };
            }
        });
    }

    unsafe fn compute_integers(&self, scratch: &mut Scratch, rows: Range<usize>, tokens: Range<usize>) {
        let (n, first_row) = (self.weights.n_columns, rows.start);
        let shape = codes::shape_of(self.weights.quant);
        let panels = &mut scratch.int_panels[..rows.len().div_ceil(PANEL_ROWS)];
        for (index, panel) in panels.iter_mut().enumerate() {
            panel.pack(self.level, &self.weights, first_row + index * PANEL_ROWS);
        }
        let kind = TileKind {
            group: shape.group,
            groups_per_scale: self.activations.format.block_len() / shape.group,
            has_min: shape.has_min,
            n_groups: n / shape.group,
        };
        let wanted = Some((self.number, tokens.clone()));
        if scratch.tails_of != wanted {
            let rows = tokens.clone().map(|token| self.activations.row(self.tokens.at(token)));
            scratch.tails.fill(self.level, self.activations.format, n, shape.group, rows);
            scratch.tails_of = wanted;
        }
        let mut result: TileResult = [[0.0; PANEL_ROWS]; TILE_TOKENS];
        for (tile, first) in tokens.clone().step_by(TILE_TOKENS).enumerate() {
            let count = TILE_TOKENS.min(tokens.end - first);
            let rows = self.tile_rows(first, count).map(|row| QuantisedRow::split(self.activations.format, n, row).quants);
            let tile = TokenTile { rows: &rows[..count.next_power_of_two()], tails: scratch.tails.tile(tile) };
            for (index, panel) in panels.iter().enumerate() {
                multiply_int_tile(self.level, kind, panel, tile, &mut result);
                // SAFETY: passed on from the caller.
                unsafe { self.store(first, first_row + index * PANEL_ROWS, &result[..count]) };
            }
        }
    }

    /// The activation rows of a tile; behind the last of `count` it stands in again.
    fn tile_rows(&self, first: usize, count: usize) -> [&'a [u8]; TILE_TOKENS] {
        std::array::from_fn(|index| self.activations.row(self.tokens.at(first + index.min(count - 1))))
    }

    unsafe fn compute_floats(&self, scratch: &mut Scratch, rows: Range<usize>, tokens: Range<usize>) {
        let panels = &mut scratch.float_panels[..rows.len().div_ceil(PANEL_ROWS)];
        for (index, panel) in panels.iter_mut().enumerate() {
            panel.pack(self.level, &self.weights, rows.start + index * PANEL_ROWS);
        }
        let mut results: [TileResult; 2] = [[[0.0; PANEL_ROWS]; TILE_TOKENS]; 2];
        for first in tokens.clone().step_by(TILE_TOKENS) {
            let count = TILE_TOKENS.min(tokens.end - first);
            let tile_rows = self.tile_rows(first, count);
            let width = count.next_power_of_two();
            for (index, pair) in panels.chunks(2).enumerate() {
                multiply_float_tile(self.level, pair, &tile_rows[..width], self.weights.n_columns, &mut results);
                for (within, result) in results[..pair.len()].iter().enumerate() {
                    // SAFETY: passed on from the caller.
                    unsafe { self.store(first, rows.start + (2 * index + within) * PANEL_ROWS, &result[..count]) };
                }
            }
        }
    }

    /// Stores the results of some tokens with one panel, without the rows that only pad it.
    unsafe fn store(&self, first_token: usize, first_row: usize, results: &[[f32; PANEL_ROWS]]) {
        let n_rows = PANEL_ROWS.min(self.weights.n_rows - first_row);
        for (index, result) in results.iter().enumerate() {
            // SAFETY: the caller of `compute` owns this rectangle of the result.
            let out = unsafe { self.out.part((first_token + index) * self.out_stride + first_row, n_rows) };
            out.copy_from_slice(&result[..n_rows]);
        }
    }
}

/// What the inner loop of an integer tile depends on.
#[derive(Clone, Copy)]
pub(super) struct TileKind {
    /// Columns that share a weight scale: 16 or 32.
    pub group: usize,
    /// Groups that share an activation scale; 1 means Q8_0.
    pub groups_per_scale: usize,
    /// True where groups have a min.
    pub has_min: bool,
    /// Groups in a row.
    pub n_groups: usize,
}

fn multiply_int_tile(level: SimdLevel, kind: TileKind, panel: &IntPanel, tile: TokenTile<'_>, out: &mut TileResult) {
    assert!(panel.codes.len() * 4 >= kind.n_groups * kind.group && panel.scales.len() >= kind.n_groups);
    assert!(panel.mins.len() >= kind.n_groups && kind.n_groups.is_multiple_of(kind.groups_per_scale));
    assert!(tile.rows.iter().all(|row| row.len() == kind.n_groups * kind.group) && tile.tails.len() == kind.n_groups);
    match level {
        SimdLevel::Scalar => super::gemm_scalar::int_tile(kind, panel, tile, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Product::new` capped the level at what this processor has; the lengths are asserted above.
        SimdLevel::Avx2 => unsafe { super::gemm_avx2::int_tile(kind, panel, tile, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx512 => unsafe { super::gemm_avx512::int_tile(kind, panel, tile, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => super::gemm_scalar::int_tile(kind, panel, tile, out),
    }
}

fn multiply_float_tile(level: SimdLevel, panels: &[FloatPanel], rows: &[&[u8]], n: usize, out: &mut [TileResult; 2]) {
    assert!(panels.iter().all(|panel| panel.lines.len() >= n) && rows.iter().all(|row| row.len() == 4 * n));
    match level {
        SimdLevel::Scalar => super::gemm_scalar::float_tile(panels, rows, n, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Product::new` capped the level at what this processor has; the lengths are asserted above.
        SimdLevel::Avx2 => unsafe { super::gemm_avx2::float_tile(panels, rows, n, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        SimdLevel::Avx512 => unsafe { super::gemm_avx512::float_tile(panels, rows, n, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => super::gemm_scalar::float_tile(panels, rows, n, out),
    }
}

/// Columns after which a sum of f32 products is added to the total.
pub(super) const FLOAT_PART: usize = CHUNK;
