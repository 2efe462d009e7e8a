//! Tiles of the prompt path with AVX2: a panel is two vectors of 8 rows.
//!
//! The unsigned-by-signed byte product saturates at 16 bits, so codes go in as magnitudes (at most 128) and their signs move
//! to the activations (at most 127): a pair is then at most 2 * 128 * 127 = 32,512 and always exact.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use super::gemm::{FLOAT_PART, TileKind, TileResult};
use super::panel::{FloatPanel, IntPanel, TILE_TOKENS, TokenTile};

/// Tokens whose sums fit the 16 registers together with the rest.
const STEP: usize = 4;

/// Multiplies a panel with a tile of 1, 2, 4 or 8 tokens.
///
/// # Safety
/// The lengths of panel and tile are those `kind` asks for, checked by the caller.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn int_tile(kind: TileKind, panel: &IntPanel, tile: TokenTile<'_>, out: &mut TileResult) {
    for half in 0..2 {
        for first in (0..tile.rows.len()).step_by(STEP) {
            let place = Place { half, first };
            // SAFETY: passed on from the caller; `first` plus the tokens stay within the tile.
            unsafe {
                match tile.rows.len() - first {
                    1 => by_kind::<1>(kind, place, panel, tile, out),
                    2 => by_kind::<2>(kind, place, panel, tile, out),
                    _ => by_kind::<STEP>(kind, place, panel, tile, out),
                }
            }
        }
    }
}

/// Which part of a tile is computed: rows 8 * half on, tokens `first` on.
#[derive(Clone, Copy)]
struct Place {
    half: usize,
    first: usize,
}

#[target_feature(enable = "avx2,fma")]
unsafe fn by_kind<const TOKENS: usize>(kind: TileKind, place: Place, panel: &IntPanel, tile: TokenTile<'_>, out: &mut TileResult) {
    // SAFETY: passed on from the caller; the constants are those of `kind`.
    unsafe {
        match (kind.group, kind.groups_per_scale > 1, kind.has_min) {
            (32, false, false) => fixed_tile::<TOKENS, 8, false, false>(kind, place, panel, tile, out),
            (32, false, true) => fixed_tile::<TOKENS, 8, false, true>(kind, place, panel, tile, out),
            (32, true, false) => fixed_tile::<TOKENS, 8, true, false>(kind, place, panel, tile, out),
            (32, true, true) => fixed_tile::<TOKENS, 8, true, true>(kind, place, panel, tile, out),
            (_, _, false) => fixed_tile::<TOKENS, 4, true, false>(kind, place, panel, tile, out),
            (_, _, true) => fixed_tile::<TOKENS, 4, true, true>(kind, place, panel, tile, out),
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn fixed_tile<const TOKENS: usize, const QUADS: usize, const NESTED: bool, const MIN: bool>(
    kind: TileKind,
    place: Place,
    panel: &IntPanel,
    tile: TokenTile<'_>,
    out: &mut TileResult,
) {
    let mut rows = [std::ptr::null::<i32>(); TOKENS];
    for (row, quants) in rows.iter_mut().zip(&tile.rows[place.first..]) {
        *row = quants.as_ptr().cast();
    }
    let codes = panel.codes.as_ptr().cast::<__m256i>();
    let (scales, mins) = (panel.scales.as_ptr().cast::<f32>(), panel.mins.as_ptr().cast::<f32>());
    let zero = _mm256_setzero_ps();
    let ones = _mm256_set1_epi16(1);
    let (mut total, mut part) = ([zero; TOKENS], [zero; TOKENS]);
    for group in 0..kind.n_groups {
        // SAFETY: `group` is below the number of groups, for which lines, quants and records exist (checked by the caller).
        unsafe {
            let tail = tile.tails.as_ptr().add(group).cast::<u32>().add(place.first);
            let mut sums = [_mm256_setzero_si256(); TOKENS];
            for quad in 0..QUADS {
                let weights = _mm256_load_si256(codes.add(2 * (group * QUADS + quad) + place.half));
                let magnitude = _mm256_abs_epi8(weights);
                for (token, sum) in sums.iter_mut().enumerate() {
                    let quants = _mm256_set1_epi32(rows[token].add(group * QUADS + quad).read_unaligned());
                    let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(quants, weights));
                    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
                }
            }
            let weight_scale = _mm256_load_ps(scales.add(16 * group + 8 * place.half));
            for token in 0..TOKENS {
                let sum = _mm256_cvtepi32_ps(sums[token]);
                let scale = _mm256_set1_ps(tail.add(TILE_TOKENS + token).cast::<f32>().read());
                let target = if NESTED { &mut part[token] } else { &mut total[token] };
                let factor = if NESTED { weight_scale } else { _mm256_mul_ps(weight_scale, scale) };
                *target = _mm256_fmadd_ps(sum, factor, *target);
                if MIN {
                    let min = _mm256_load_ps(mins.add(16 * group + 8 * place.half));
                    let activation_sum = _mm256_set1_ps(tail.add(2 * TILE_TOKENS + token).cast::<f32>().read());
                    *target = _mm256_fmadd_ps(min, activation_sum, *target);
                }
                if NESTED && (group + 1).is_multiple_of(kind.groups_per_scale) {
                    total[token] = _mm256_fmadd_ps(part[token], scale, total[token]);
                    part[token] = zero;
                }
            }
        }
    }
    for (out, total) in out[place.first..].iter_mut().zip(total) {
        // SAFETY: a result row has 16 elements, 8 from `8 * half` on.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(8 * place.half), total) };
    }
}

/// Multiplies one or two panels with up to 8 rows of `n` f32.
///
/// # Safety
/// Panels have `n` lines, rows `4 * n` bytes; there are 1, 2, 4 or 8 rows. Checked by the caller.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn float_tile(panels: &[FloatPanel], rows: &[&[u8]], n: usize, out: &mut [TileResult; 2]) {
    for (panel, out) in panels.iter().zip(out) {
        for (rows, out) in rows.chunks(STEP).zip(out.chunks_mut(STEP)) {
            // SAFETY: passed on from the caller.
            unsafe {
                match rows.len() {
                    1 => fixed_float_tile::<1>(panel, rows, n, out),
                    2 => fixed_float_tile::<2>(panel, rows, n, out),
                    _ => fixed_float_tile::<STEP>(panel, rows, n, out),
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn fixed_float_tile<const TOKENS: usize>(panel: &FloatPanel, rows: &[&[u8]], n: usize, out: &mut [[f32; 16]]) {
    let weights = panel.lines.as_ptr().cast::<f32>();
    let rows: [*const f32; TOKENS] = std::array::from_fn(|token| rows[token].as_ptr().cast());
    out[..TOKENS].fill([0.0; 16]);
    for first in (0..n).step_by(FLOAT_PART) {
        let mut part = [[_mm256_setzero_ps(); 2]; TOKENS];
        for column in first..n.min(first + FLOAT_PART) {
            // SAFETY: `column` is below `n`, the length of panel and rows; rows of bytes may lie unaligned.
            unsafe {
                let low = _mm256_load_ps(weights.add(16 * column));
                let high = _mm256_load_ps(weights.add(16 * column + 8));
                for (token, part) in part.iter_mut().enumerate() {
                    let value = _mm256_set1_ps(rows[token].add(column).read_unaligned());
                    part[0] = _mm256_fmadd_ps(low, value, part[0]);
                    part[1] = _mm256_fmadd_ps(high, value, part[1]);
                }
            }
        }
        for (total, part) in out.iter_mut().zip(&part) {
            for (half, part) in part.iter().enumerate() {
                // SAFETY: a result row has 16 elements, 8 from `8 * half` on.
                unsafe {
                    let place = total.as_mut_ptr().add(8 * half);
                    _mm256_storeu_ps(place, _mm256_add_ps(_mm256_loadu_ps(place), *part));
                }
            }
        }
    }
}
