//! Tiles of the prompt path with AVX-512 and its four-way int8 products: one vector is the 16 rows of a panel.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use super::gemm::{FLOAT_PART, TileKind, TileResult};
use super::panel::{FloatPanel, IntPanel, TILE_TOKENS, TokenTile};

/// Multiplies a panel with a tile of 1, 2, 4 or 8 tokens.
///
/// # Safety
/// The lengths of panel and tile are those `kind` asks for, checked by the caller.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn int_tile(kind: TileKind, panel: &IntPanel, tile: TokenTile<'_>, out: &mut TileResult) {
    macro_rules! by_width {
        ($quads:literal, $nested:literal, $min:literal) => {
            // SAFETY: passed on from the caller; the constants are those of `kind`.
            unsafe {
                match tile.rows.len() {
                    1 => fixed_tile::<1, $quads, $nested, $min>(kind, panel, tile, out),
                    2 => fixed_tile::<2, $quads, $nested, $min>(kind, panel, tile, out),
                    4 => fixed_tile::<4, $quads, $nested, $min>(kind, panel, tile, out),
                    _ => fixed_tile::<8, $quads, $nested, $min>(kind, panel, tile, out),
                }
            }
        };
    }
    match (kind.group, kind.groups_per_scale > 1, kind.has_min) {
        (32, false, false) => by_width!(8, false, false),
        (32, false, true) => by_width!(8, false, true),
        (32, true, false) => by_width!(8, true, false),
        (32, true, true) => by_width!(8, true, true),
        (_, _, false) => by_width!(4, true, false),
        (_, _, true) => by_width!(4, true, true),
    }
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn fixed_tile<const TOKENS: usize, const QUADS: usize, const NESTED: bool, const MIN: bool>(
    kind: TileKind,
    panel: &IntPanel,
    tile: TokenTile<'_>,
    out: &mut TileResult,
) {
    let mut rows = [std::ptr::null::<i32>(); TOKENS];
    for (row, quants) in rows.iter_mut().zip(tile.rows) {
        *row = quants.as_ptr().cast();
    }
    let mut codes = panel.codes.as_ptr().cast::<__m512i>();
    let scales = panel.scales.as_ptr().cast::<f32>();
    let mins = panel.mins.as_ptr().cast::<f32>();
    let tails = tile.tails.as_ptr();
    let zero = _mm512_setzero_ps();
    let mut total = [zero; TOKENS];
    let mut part = [zero; TOKENS];
    let groups_per_scale = if NESTED { kind.groups_per_scale } else { kind.n_groups.max(1) };
    for first in (0..kind.n_groups).step_by(groups_per_scale) {
        for group in first..first + groups_per_scale {
            // SAFETY: `group` is below the number of groups, a multiple of those that share a scale; lines, quants and
            // records exist for each (checked by the caller).
            unsafe {
                let mut weights = [_mm512_setzero_si512(); QUADS];
                for (quad, weights) in weights.iter_mut().enumerate() {
                    *weights = _mm512_load_si512(codes.add(quad));
                }
                let weight_scale = _mm512_load_ps(scales.add(16 * group));
                let tail = tails.add(group).cast::<u32>();
                for token in 0..TOKENS {
                    let mut sum = _mm512_set1_epi32(tail.add(token).cast::<i32>().read());
                    for (quad, weights) in weights.iter().enumerate() {
                        let quants = _mm512_set1_epi32(rows[token].add(group * QUADS + quad).read_unaligned());
                        sum = _mm512_dpbusd_epi32(sum, *weights, quants);
                    }
                    let sum = _mm512_cvtepi32_ps(sum);
                    if NESTED {
                        part[token] = _mm512_fmadd_ps(sum, weight_scale, part[token]);
                    } else {
                        let scale = _mm512_set1_ps(tail.add(TILE_TOKENS + token).cast::<f32>().read());
                        total[token] = _mm512_fmadd_ps(sum, _mm512_mul_ps(weight_scale, scale), total[token]);
                    }
                    if MIN {
                        let min = _mm512_load_ps(mins.add(16 * group));
                        let activation_sum = _mm512_set1_ps(tail.add(2 * TILE_TOKENS + token).cast::<f32>().read());
                        let target = if NESTED { &mut part[token] } else { &mut total[token] };
                        *target = _mm512_fmadd_ps(min, activation_sum, *target);
                    }
                }
                codes = codes.add(QUADS);
            }
        }
        for token in 0..if NESTED { TOKENS } else { 0 } {
            // SAFETY: the last group of the superblock is one of the groups.
            let scale = unsafe { tails.add(first + groups_per_scale - 1).cast::<u32>().add(TILE_TOKENS + token).cast::<f32>().read() };
            total[token] = _mm512_fmadd_ps(part[token], _mm512_set1_ps(scale), total[token]);
            part[token] = zero;
        }
    }
    for (out, total) in out.iter_mut().zip(total) {
        // SAFETY: a result row has 16 elements.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), total) };
    }
}

/// Multiplies one or two panels with up to 8 rows of `n` f32.
///
/// # Safety
/// Panels have `n` lines, rows `4 * n` bytes; there are 1, 2, 4 or 8 rows. Checked by the caller.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) unsafe fn float_tile(panels: &[FloatPanel], rows: &[&[u8]], n: usize, out: &mut [TileResult; 2]) {
    // SAFETY: passed on from the caller.
    unsafe {
        match (panels.len(), rows.len()) {
            (1, 1) => fixed_float_tile::<1, 1>(panels, rows, n, out),
            (1, 2) => fixed_float_tile::<1, 2>(panels, rows, n, out),
            (1, 4) => fixed_float_tile::<1, 4>(panels, rows, n, out),
            (1, _) => fixed_float_tile::<1, 8>(panels, rows, n, out),
            (_, 1) => fixed_float_tile::<2, 1>(panels, rows, n, out),
            (_, 2) => fixed_float_tile::<2, 2>(panels, rows, n, out),
            (_, 4) => fixed_float_tile::<2, 4>(panels, rows, n, out),
            (_, _) => fixed_float_tile::<2, 8>(panels, rows, n, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
#[inline]
unsafe fn fixed_float_tile<const PANELS: usize, const TOKENS: usize>(
    panels: &[FloatPanel],
    rows: &[&[u8]],
    n: usize,
    out: &mut [TileResult; 2],
) {
    let weights: [*const f32; PANELS] = std::array::from_fn(|panel| panels[panel].lines.as_ptr().cast());
    let rows: [*const f32; TOKENS] = std::array::from_fn(|token| rows[token].as_ptr().cast());
    for result in &mut out[..PANELS] {
        result[..TOKENS].fill([0.0; 16]);
    }
    for first in (0..n).step_by(FLOAT_PART) {
        let mut part = [[_mm512_setzero_ps(); TOKENS]; PANELS];
        for column in first..n.min(first + FLOAT_PART) {
            // SAFETY: `column` is below `n`, the length of panels and rows; rows of bytes may lie unaligned.
            unsafe {
                let mut lines = [_mm512_setzero_ps(); PANELS];
                for (line, weights) in lines.iter_mut().zip(&weights) {
                    *line = _mm512_load_ps(weights.add(16 * column));
                }
                for token in 0..TOKENS {
                    let value = _mm512_set1_ps(rows[token].add(column).read_unaligned());
                    for panel in 0..PANELS {
                        part[panel][token] = _mm512_fmadd_ps(lines[panel], value, part[panel][token]);
                    }
                }
            }
        }
        for (result, part) in out.iter_mut().zip(&part) {
            for (total, part) in result.iter_mut().zip(part) {
                // SAFETY: a result row has 16 elements.
                unsafe { _mm512_storeu_ps(total.as_mut_ptr(), _mm512_add_ps(_mm512_loadu_ps(total.as_ptr()), *part)) };
            }
        }
    }
}
