//! Panels: 16 weight rows decoded once and interleaved, so that one vector holds the same columns of all 16 rows.
//!
//! ```text
//! integer panel   codes  [n/4]      lines of 64 bytes: 16 rows x 4 consecutive columns
//!                 scales [n/group]  lines of 16 f32, one a row;  mins likewise
//! float panel     [n]               lines of 16 f32, one a row
//! token tails     [n/group] records: 8 x i32 correction | 8 x f32 scale | 8 x f32 sum, one a token
//! ```
//! Rows beyond the last are zero. At AVX-512 the codes are stored as code + 128, because its product wants an unsigned
//! operand; the correction, -128 times the sum of the group's quants, takes that off again, in integers.

use super::activations::{ActivationFormat, QuantisedRow};
use super::codes::{self, CHUNK, CodeChunk};
use super::floats;
use super::gemm::Weights;
use super::simd::SimdLevel;
use super::vector::{Portable, Vector16};

/// Weight rows in a panel.
pub(super) const PANEL_ROWS: usize = 16;
/// Most tokens in a tile.
pub(super) const TILE_TOKENS: usize = 8;

/// 64 bytes on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct ByteLine(pub [u8; 64]);

/// 16 f32 on a cache line of their own.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct FloatLine(pub [f32; PANEL_ROWS]);

/// 16 rows of quantised weights as codes.
#[derive(Default)]
pub(super) struct IntPanel {
    pub codes: Vec<ByteLine>,
    pub scales: Vec<FloatLine>,
    pub mins: Vec<FloatLine>,
    /// `[16][n, padded]`: codes on their way into `codes`.
    rows: Vec<i8>,
}

impl IntPanel {
    /// Decodes rows `first_row..first_row + 16` (as far as they exist).
    pub(super) fn pack(&mut self, level: SimdLevel, weights: &Weights<'_>, first_row: usize) {
        let n = weights.n_columns;
        let shape = codes::shape_of(weights.quant);
        let n_rows = PANEL_ROWS.min(weights.n_rows - first_row);
        self.codes.resize(n.div_ceil(CHUNK) * CHUNK / 4, ByteLine([0; 64]));
        self.scales.resize(n / shape.group, FloatLine([0.0; PANEL_ROWS]));
        self.mins.resize(n / shape.group, FloatLine([0.0; PANEL_ROWS]));
        let padded = self.codes.len() * 4;
        self.rows.clear();
        self.rows.resize(PANEL_ROWS * padded, 0);
        let mut chunk = CodeChunk::new();
        // One row after the other, as they lie in memory: that is what the processor fetches ahead.
        for (row, codes) in self.rows.chunks_exact_mut(padded).take(n_rows).enumerate() {
            for (index, codes) in codes.as_chunks_mut::<CHUNK>().0.iter_mut().enumerate() {
                let columns = CHUNK.min(n - index * CHUNK);
                codes::decode(level, weights.quant, weights.blocks(first_row + row, index * CHUNK, columns), &mut chunk);
                let flip = if level == SimdLevel::Avx512 { i8::MIN } else { 0 };
                codes.iter_mut().zip(&chunk.codes).for_each(|(code, decoded)| *code = decoded ^ flip);
                let groups = index * CHUNK / shape.group..(index * CHUNK + columns) / shape.group;
                for (line, scale) in self.scales[groups.clone()].iter_mut().zip(&chunk.scales) {
                    line.0[row] = *scale;
                }
                if shape.has_min {
                    self.mins[groups].iter_mut().zip(&chunk.mins).for_each(|(line, min)| line.0[row] = *min);
                }
            }
        }
        // Rows that only pad the panel keep whatever scales the buffer had; their results are not stored.
        let rows = std::array::from_fn(|row| self.rows[row * padded..(row + 1) * padded].as_ptr().cast());
        // SAFETY: a row has `padded` codes, a word for each line of 16 words.
        unsafe { transpose(level, rows, self.codes.as_mut_ptr().cast(), self.codes.len()) };
    }
}

/// Turns 16 rows of `n_columns` words (a multiple of 16) into lines of 16 words.
///
/// # Safety
/// The level is there; rows and lines have `n_columns` words and lines.
unsafe fn transpose(level: SimdLevel, rows: [*const u32; PANEL_ROWS], lines: *mut u32, n_columns: usize) {
    for first in (0..n_columns).step_by(PANEL_ROWS) {
        // SAFETY: passed on from the caller; `first` and the 15 words and lines after it are within `n_columns`.
        unsafe {
            let (rows, lines) = (rows.map(|row| row.add(first)), lines.add(PANEL_ROWS * first));
            match level {
                SimdLevel::Scalar => Portable::transpose(rows, lines, PANEL_ROWS),
                #[cfg(target_arch = "x86_64")]
                SimdLevel::Avx2 => transpose_avx2(rows, lines),
                #[cfg(target_arch = "x86_64")]
                SimdLevel::Avx512 => transpose_avx512(rows, lines),
                #[cfg(not(target_arch = "x86_64"))]
                _ => Portable::transpose(rows, lines, PANEL_ROWS),
            }
        }
    }
}

/// # Safety
/// As [`Vector16::transpose`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn transpose_avx2(rows: [*const u32; PANEL_ROWS], lines: *mut u32) {
    // SAFETY: passed on from the caller.
    unsafe { super::vector::Avx2::transpose(rows, lines, PANEL_ROWS) };
}

/// # Safety
/// As [`Vector16::transpose`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn transpose_avx512(rows: [*const u32; PANEL_ROWS], lines: *mut u32) {
    // SAFETY: passed on from the caller.
    unsafe { super::vector::Avx512::transpose(rows, lines, PANEL_ROWS) };
}

/// 16 rows of weights as f32.
#[derive(Default)]
pub(super) struct FloatPanel {
    pub lines: Vec<FloatLine>,
}

impl FloatPanel {
    /// Dequantises rows `first_row..first_row + 16` (as far as they exist).
    pub(super) fn pack(&mut self, level: SimdLevel, weights: &Weights<'_>, first_row: usize) {
        let n = weights.n_columns;
        let n_rows = PANEL_ROWS.min(weights.n_rows - first_row);
        self.lines.resize(n.next_multiple_of(PANEL_ROWS), FloatLine([0.0; PANEL_ROWS]));
        let mut rows = [[0.0_f32; CHUNK]; PANEL_ROWS];
        for first_column in (0..n).step_by(CHUNK) {
            let columns = CHUNK.min(n - first_column);
            for (row, values) in rows[..n_rows].iter_mut().enumerate() {
                let blocks = weights.blocks(first_row + row, first_column, columns);
                floats::decode(level, weights.quant, blocks, &mut values[..columns]);
            }
            let last = (first_column + columns).next_multiple_of(PANEL_ROWS);
            let lines = &mut self.lines[first_column..last];
            let sources = rows.each_ref().map(|row| row.as_ptr().cast());
            // SAFETY: a row has 256 words, at least as many as there are lines of 16 words.
            unsafe { transpose(level, sources, lines.as_mut_ptr().cast(), lines.len()) };
        }
    }
}

/// What the products need of activation rows besides their quants, interleaved for tiles of tokens.
///
/// The tails of all tiles of a token range are kept: every task of a product with the same tokens uses them again.
#[derive(Default)]
pub(super) struct TokenTails {
    words: Vec<u32>,
    n_groups: usize,
}

impl TokenTails {
    /// Writes the tails of `rows`, tile after tile, for weights whose groups have `group` columns.
    pub(super) fn fill<'r>(
        &mut self,
        level: SimdLevel,
        format: ActivationFormat,
        n: usize,
        group: usize,
        rows: impl ExactSizeIterator<Item = &'r [u8]>,
    ) {
        self.n_groups = n / group;
        self.words.clear();
        self.words.resize(rows.len().next_multiple_of(TILE_TOKENS) * self.n_groups * TAIL_WORDS, 0);
        let correction = if level == SimdLevel::Avx512 { -128 } else { 0 };
        let groups_per_scale = format.block_len() / group;
        for (token, row) in rows.enumerate() {
            let parts = QuantisedRow::split(format, n, row);
            let tile = token / TILE_TOKENS * TILE_TOKENS * self.n_groups * TAIL_WORDS;
            let records = self.words[tile..].chunks_exact_mut(TILE_TOKENS * TAIL_WORDS);
            let sums = parts.sums.chunks_exact(2 * group / format.sum_len());
            for (index, (record, sums)) in records.zip(sums).enumerate() {
                let sum: i32 = sums.as_chunks::<2>().0.iter().map(|sum| i32::from(i16::from_le_bytes(*sum))).sum();
                let scale = parts.scale(index / groups_per_scale);
                // With one scale a group the sum carries it; with one a superblock it is applied at the superblock's end.
                let sum_factor = if groups_per_scale == 1 { scale * sum as f32 } else { sum as f32 };
                let lane = token % TILE_TOKENS;
                record[lane] = (correction * sum).cast_unsigned();
                record[TILE_TOKENS + lane] = scale.to_bits();
                record[2 * TILE_TOKENS + lane] = sum_factor.to_bits();
            }
        }
    }

    /// The records of one tile, a group each.
    pub(super) fn tile(&self, tile: usize) -> &[TailRecord] {
        let (records, _) = self.words.as_chunks::<{ TAIL_WORDS * TILE_TOKENS }>();
        &records[tile * self.n_groups..(tile + 1) * self.n_groups]
    }
}

/// Words of a tail: correction, scale, sum.
const TAIL_WORDS: usize = 3;

/// Of one group: corrections (i32) of 8 tokens, then their scales, then their sums (f32 bits).
pub(super) type TailRecord = [u32; TAIL_WORDS * TILE_TOKENS];

/// A tile of activation rows: 1, 2, 4 or 8 rows of int8 quants and their tails.
#[derive(Clone, Copy)]
pub(super) struct TokenTile<'a> {
    /// Quants of each row.
    pub rows: &'a [&'a [u8]],
    /// A record for each group.
    pub tails: &'a [TailRecord],
}
