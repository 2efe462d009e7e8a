//! Tiles of the prompt path in portable code: the reference whose bits the vector forms match.

use super::gemm::{FLOAT_PART, TileKind, TileResult};
use super::panel::{FloatPanel, IntPanel, PANEL_ROWS, TILE_TOKENS, TokenTile};

pub(super) fn int_tile(kind: TileKind, panel: &IntPanel, tile: TokenTile<'_>, out: &mut TileResult) {
    for (token, out) in out[..tile.rows.len()].iter_mut().enumerate() {
        for (row, out) in out.iter_mut().enumerate() {
            *out = int_element(kind, token, row, panel, tile);
        }
    }
}

fn int_element(kind: TileKind, token: usize, row: usize, panel: &IntPanel, tile: TokenTile<'_>) -> f32 {
    let (mut total, mut part) = (0.0_f32, 0.0_f32);
    for (group, quants) in tile.rows[token].chunks_exact(kind.group).enumerate() {
        let lines = &panel.codes[group * kind.group / 4..];
        let mut sum = 0_i32;
        for (line, quants) in lines.iter().zip(quants.as_chunks::<4>().0) {
            for (code, quant) in line.0[4 * row..4 * row + 4].iter().zip(quants) {
                sum += i32::from(code.cast_signed()) * i32::from(quant.cast_signed());
            }
        }
        let tail = &tile.tails[group];
        let (scale, activation_sum) = (f32::from_bits(tail[TILE_TOKENS + token]), f32::from_bits(tail[2 * TILE_TOKENS + token]));
        let (weight_scale, weight_min) = (panel.scales[group].0[row], panel.mins[group].0[row]);
        if kind.groups_per_scale == 1 {
            total = (sum as f32).mul_add(weight_scale * scale, total);
            if kind.has_min {
                total = weight_min.mul_add(activation_sum, total);
            }
            continue;
        }
        part = (sum as f32).mul_add(weight_scale, part);
        if kind.has_min {
            part = weight_min.mul_add(activation_sum, part);
        }
        if (group + 1).is_multiple_of(kind.groups_per_scale) {
            total = part.mul_add(scale, total);
            part = 0.0;
        }
    }
    total
}

pub(super) fn float_tile(panels: &[FloatPanel], rows: &[&[u8]], n: usize, out: &mut [TileResult; 2]) {
    for (panel, out) in panels.iter().zip(out) {
        for (bytes, out) in rows.iter().zip(out) {
            let (quads, _) = bytes.as_chunks::<4>();
            *out = [0.0; PANEL_ROWS];
            for first in (0..n).step_by(FLOAT_PART) {
                let mut part = [0.0_f32; PANEL_ROWS];
                for column in first..n.min(first + FLOAT_PART) {
                    let value = f32::from_le_bytes(quads[column]);
                    for (part, weight) in part.iter_mut().zip(&panel.lines[column].0) {
                        *part = weight.mul_add(value, *part);
                    }
                }
                for (total, part) in out.iter_mut().zip(part) {
                    *total += part;
                }
            }
        }
    }
}
