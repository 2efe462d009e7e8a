//! Rows of activations in the formats that products read: f32, int8 with scales, or 16-bit floats.
//!
//! A quantised row of `n` numbers, all little-endian, without gaps:
//! ```text
//! Q8_0:  n x i8 quants | n/32  x f32 scale | n/32 x i16 sum of the 32 quants  | zeros up to a multiple of 4 bytes
//! Q8_K:  n x i8 quants | n/256 x f32 scale | n/16 x i16 sum of the 16 quants
//! ```
//! Rows of 16-bit floats are described at [`ActivationFormat`] and written by [`halves`].
//!
//! Both are symmetric: scale = max|x| / 127 over the block, quant = x / scale rounded half away from zero, within -127..=127.
//! The sums serve weights with a minimum and the unsigned-by-signed products of AVX-512.

use super::halves;
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use crate::backends::host::pool::ThreadPool;
pub use crate::quant::ActivationFormat;

/// Bytes of one row of `n` numbers; always a multiple of 4.
///
/// # Panics
/// Where `n` is no multiple of the format's block.
#[must_use]
pub fn row_bytes(format: ActivationFormat, n: usize) -> usize {
    assert!(n.is_multiple_of(format.block_len()), "{n} numbers are no whole number of {format:?} blocks");
    format.row_bytes(n)
}

/// The parts of one quantised row.
#[derive(Clone, Copy)]
pub(super) struct QuantisedRow<'a> {
    /// `n` quants as bytes.
    pub quants: &'a [u8],
    /// f32 scales, one for `block_len` numbers.
    pub scales: &'a [u8],
    /// i16 sums, one for `sum_len` numbers.
    pub sums: &'a [u8],
}

impl<'a> QuantisedRow<'a> {
    /// Splits a stored row of `n` numbers.
    pub(super) fn split(format: ActivationFormat, n: usize, row: &'a [u8]) -> Self {
        let scale_bytes = n / format.block_len() * 4;
        let sum_bytes = n / format.sum_len() * 2;
        let (quants, rest) = row.split_at(n);
        let (scales, rest) = rest.split_at(scale_bytes);
        Self { quants, scales, sums: &rest[..sum_bytes] }
    }

    pub(super) fn scale(&self, block: usize) -> f32 {
        f32::from_le_bytes([self.scales[4 * block], self.scales[4 * block + 1], self.scales[4 * block + 2], self.scales[4 * block + 3]])
    }
}

/// Quantises (or copies, for f32) rows of `n` numbers that lie one after the other.
///
/// `rows` is `[n_rows, n]`, `out` is `[n_rows, row_bytes(format, n)]`.
///
/// # Panics
/// Where a length does not match.
pub fn quantise_rows(pool: &ThreadPool, level: SimdLevel, format: ActivationFormat, n: usize, rows: &[f32], out: &mut [u8]) {
    let bytes = row_bytes(format, n);
    let n_rows = rows.len().checked_div(n).unwrap_or(0);
    assert_eq!(rows.len(), n_rows * n, "whole rows of {n}");
    assert_eq!(out.len(), n_rows * bytes, "{n_rows} rows of {bytes} bytes");
    // A task of about 16k numbers takes some microseconds: enough to pay for its claim.
    let rows_per_task = (16_384 / n.max(1)).max(1);
    let out = SharedSlice::new(out);
    pool.run(n_rows.div_ceil(rows_per_task), &|task| {
        for row in task * rows_per_task..((task + 1) * rows_per_task).min(n_rows) {
            // SAFETY: each row is written by the one task that owns its number.
            let out = unsafe { out.part(row * bytes, bytes) };
            quantise_row(level, format, &rows[row * n..(row + 1) * n], out);
        }
    });
}

/// Quantises (or copies, for f32) one row into `row_bytes` bytes.
///
/// # Panics
/// Where a length does not match.
pub fn quantise_row(level: SimdLevel, format: ActivationFormat, row: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), row_bytes(format, row.len()), "bytes of a row of {} as {format:?}", row.len());
    match (format, level.min(SimdLevel::detect())) {
        (ActivationFormat::F32, _) => {
            for (value, bytes) in row.iter().zip(out.chunks_exact_mut(4)) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
        }
        (ActivationFormat::F16, _) => halves::quantise_row(row, out),
        (ActivationFormat::Q8_0, SimdLevel::Scalar) => quantise_blocks::<32, 32>(row, out),
        (ActivationFormat::Q8_K, SimdLevel::Scalar) => quantise_blocks::<256, 16>(row, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is capped at what this processor has, and every level above Scalar has AVX2.
        (ActivationFormat::Q8_0, _) => unsafe { quantise_blocks_avx2::<32, 32>(row, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        (ActivationFormat::Q8_K, _) => unsafe { quantise_blocks_avx2::<256, 16>(row, out) },
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("vector levels are detected on x86-64 only"),
    }
}

/// The same code as the scalar form, compiled for AVX2: rounding and order are one text, so the bytes are equal.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantise_blocks_avx2<const BLOCK: usize, const GROUP: usize>(row: &[f32], out: &mut [u8]) {
    quantise_blocks::<BLOCK, GROUP>(row, out);
}

#[inline(always)]
fn quantise_blocks<const BLOCK: usize, const GROUP: usize>(row: &[f32], out: &mut [u8]) {
    let n = row.len();
    let (quants, rest) = out.split_at_mut(n);
    let (scales, sums) = rest.split_at_mut(n / BLOCK * 4);
    let (blocks, _) = row.as_chunks::<BLOCK>();
    let (quant_blocks, _) = quants.as_chunks_mut::<BLOCK>();
    for ((block, quants), scale) in blocks.iter().zip(quant_blocks).zip(scales.chunks_exact_mut(4)) {
        let d = largest_magnitude(block) / 127.0;
        scale.copy_from_slice(&d.to_le_bytes());
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        for (value, quant) in block.iter().zip(quants.iter_mut()) {
            *quant = round_half_away(value * inverse).cast_unsigned();
        }
    }
    let (quant_groups, _) = quants.as_chunks::<GROUP>();
    for (group, sum) in quant_groups.iter().zip(sums.chunks_exact_mut(2)) {
        let total: i16 = group.iter().map(|quant| i16::from(quant.cast_signed())).sum();
        sum.copy_from_slice(&total.to_le_bytes());
    }
    sums[n / GROUP * 2..].fill(0);
}

/// The largest |x|. The bits of non-negative floats order like integers, and an integer maximum can be vectorised.
#[inline(always)]
fn largest_magnitude<const BLOCK: usize>(block: &[f32; BLOCK]) -> f32 {
    let bits = block.iter().map(|value| value.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    f32::from_bits(bits)
}

/// Rounds as `f32::round` does, spelled so that it compiles to vector instructions.
#[inline(always)]
fn round_half_away(value: f32) -> i8 {
    // |value| <= 127.0001, so the cast truncates toward zero and the difference below is exact.
    let clamped = value.clamp(-127.0, 127.0);
    let whole = clamped as i32;
    let rest = clamped - whole as f32;
    let step = i32::from(rest >= 0.5) - i32::from(rest <= -0.5);
    (whole + step) as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    const FORMATS: [ActivationFormat; 4] = [ActivationFormat::F32, ActivationFormat::Q8_0, ActivationFormat::Q8_K, ActivationFormat::F16];

    #[test]
    fn a_quantised_row_is_within_half_a_step_and_knows_its_sums() {
        let row = Numbers::seeded(1).floats(512, 3.0);
        for format in [ActivationFormat::Q8_0, ActivationFormat::Q8_K] {
            let mut out = vec![0; row_bytes(format, row.len())];
            quantise_row(SimdLevel::Scalar, format, &row, &mut out);
            let parts = QuantisedRow::split(format, row.len(), &out);
            for (index, value) in row.iter().enumerate() {
                let scale = parts.scale(index / format.block_len());
                let back = f32::from(parts.quants[index].cast_signed()) * scale;
                assert!((back - value).abs() <= 0.5001 * scale, "{format:?} {index}: {value} became {back}");
            }
            for group in 0..row.len() / format.sum_len() {
                let quants = &parts.quants[group * format.sum_len()..(group + 1) * format.sum_len()];
                let sum: i16 = quants.iter().map(|quant| i16::from(quant.cast_signed())).sum();
                assert_eq!(parts.sums[2 * group..2 * group + 2], sum.to_le_bytes());
            }
        }
    }

    #[test]
    fn halves_round_away_from_zero_as_f32_round_does() {
        for value in [0.5_f32, -0.5, 1.5, -2.5, 0.499_999_97, -0.499_999_97, 126.5, 127.0, -126.500_01, 3.2] {
            assert_eq!(f32::from(round_half_away(value)), value.round(), "{value}");
        }
    }

    #[test]
    fn a_row_of_zeros_has_scale_zero() {
        let mut out = vec![7; row_bytes(ActivationFormat::Q8_0, 32)];
        quantise_row(SimdLevel::Scalar, ActivationFormat::Q8_0, &[0.0; 32], &mut out);
        assert_eq!(out, vec![0; 40]);
    }

    #[test]
    fn all_levels_and_thread_counts_write_the_same_bytes() {
        let (n, n_rows) = (768, 50);
        let rows = Numbers::seeded(2).floats(n * n_rows, 1.0);
        for format in FORMATS {
            let bytes = row_bytes(format, n);
            let mut expected = vec![0; bytes * n_rows];
            for (row, out) in rows.chunks_exact(n).zip(expected.chunks_exact_mut(bytes)) {
                quantise_row(SimdLevel::Scalar, format, row, out);
            }
            for level in SimdLevel::available() {
                for n_threads in [1, 2, 3] {
                    let pool = ThreadPool::new(n_threads).expect("threads");
                    let mut out = vec![1; bytes * n_rows];
                    quantise_rows(&pool, level, format, n, &rows, &mut out);
                    assert!(out == expected, "{format:?} {level:?} {n_threads} threads");
                }
            }
        }
    }
}
