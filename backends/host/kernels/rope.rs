//! Rotary positions: number i of a head is paired with number i + R/2, numbers from R on pass through.

use super::norm::rms_norm_row;
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use crate::backends::host::pool::ThreadPool;

/// What a rotation depends on besides the position.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// Numbers of a head.
    pub head_size: usize,
    /// Numbers that rotate, even and at most the head size.
    pub n_rotated: usize,
    /// Base of the frequencies.
    pub freq_base: f64,
}

/// A norm over each head before its rotation.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm<'a> {
    /// `[head_size]`.
    pub weight: &'a [f32],
    /// Added to the mean of squares.
    pub epsilon: f32,
}

/// Norms each head (where `norm` is given) and rotates it to its row's position, in place.
///
/// `rows` is `[n_rows, n_head, head_size]`, a row for each of `positions`. The angle of pair i at position p is
/// `p * freq_base^(-2i/R)` in f64: an f32 angle would be off by more with every thousand tokens.
///
/// # Panics
/// Where lengths do not match or the rotated part is odd or larger than a head.
pub fn norm_and_rotate(pool: &ThreadPool, level: SimdLevel, rope: Rope, norm: Option<HeadNorm<'_>>, rows: &mut [f32], positions: &[i32]) {
    if positions.is_empty() {
        return;
    }
    let row_len = rows.len() / positions.len();
    assert!(row_len * positions.len() == rows.len() && row_len.is_multiple_of(rope.head_size), "whole heads for each position");
    assert!(rope.n_rotated <= rope.head_size && rope.n_rotated.is_multiple_of(2), "{} of {} rotate", rope.n_rotated, rope.head_size);
    let half = rope.n_rotated / 2;
    let frequencies: Vec<f64> = (0..half).map(|pair| rope.freq_base.powf(-2.0 * pair as f64 / rope.n_rotated as f64)).collect();
    let rows = SharedSlice::new(rows);
    pool.run(positions.len(), &|row| {
        let turns: Vec<(f32, f32)> = frequencies
            .iter()
            .map(|frequency| {
                let (sin, cos) = (f64::from(positions[row]) * frequency).sin_cos();
                (sin as f32, cos as f32)
            })
            .collect();
        // SAFETY: each row belongs to the one task with its number.
        let heads = unsafe { rows.part(row * row_len, row_len) };
        for head in heads.chunks_exact_mut(rope.head_size) {
            if let Some(norm) = norm {
                rms_norm_row(level, head, norm.weight, norm.epsilon);
            }
            rotate_head(head, &turns);
        }
    });
}

fn rotate_head(head: &mut [f32], turns: &[(f32, f32)]) {
    let (first, rest) = head.split_at_mut(turns.len());
    for ((a, b), (sin, cos)) in first.iter_mut().zip(rest).zip(turns) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;

    fn rotated(n_threads: usize, rope: Rope, norm: Option<HeadNorm<'_>>, rows: &[f32], positions: &[i32]) -> Vec<f32> {
        let mut out = rows.to_vec();
        norm_and_rotate(&ThreadPool::new(n_threads).expect("threads"), SimdLevel::detect(), rope, norm, &mut out, positions);
        out
    }

    #[test]
    fn pairs_lie_half_the_rotated_part_apart_and_the_rest_passes_through() {
        let rope = Rope { head_size: 6, n_rotated: 4, freq_base: 100.0 };
        let head = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let out = rotated(1, rope, None, &head, &[7]);
        let turn = |a: f64, b: f64, angle: f64| (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos());
        let ((a0, b0), (a1, b1)) = (turn(1.0, 3.0, 7.0), turn(2.0, 4.0, 0.7));
        for (value, exact) in out.iter().zip([a0, a1, b0, b1, 5.0, 6.0]) {
            assert!((f64::from(*value) - exact).abs() < 1e-6, "{value} for {exact}");
        }
    }

    #[test]
    fn far_positions_keep_their_precision() {
        let rope = Rope { head_size: 128, n_rotated: 128, freq_base: 1e6 };
        let head = Numbers::seeded(31).floats(128, 2.0);
        let out = rotated(1, rope, None, &head, &[200_003]);
        for pair in 0..64 {
            let angle = 200_003.0 * 1e6_f64.powf(-2.0 * pair as f64 / 128.0);
            let exact = f64::from(head[pair]) * angle.cos() - f64::from(head[pair + 64]) * angle.sin();
            assert!((f64::from(out[pair]) - exact).abs() < 1e-6, "pair {pair}");
        }
    }

    #[test]
    fn a_head_is_normed_before_it_turns_and_rows_do_not_touch_each_other() {
        let mut numbers = Numbers::seeded(32);
        let (rows, weight) = (numbers.floats(5 * 3 * 64, 2.0), numbers.floats(64, 1.0));
        let rope = Rope { head_size: 64, n_rotated: 32, freq_base: 1e4 };
        let norm = HeadNorm { weight: &weight, epsilon: 1e-6 };
        let positions = [4, 9, 0, 77, 5];
        let together = rotated(3, rope, Some(norm), &rows, &positions);
        for (row, position) in positions.iter().enumerate() {
            let part = row * 192..(row + 1) * 192;
            assert_eq!(rotated(1, rope, Some(norm), &rows[part.clone()], &[*position]), together[part]);
        }
        let mut plain = rows[384..448].to_vec();
        rms_norm_row(SimdLevel::Scalar, &mut plain, &weight, 1e-6);
        assert_eq!(together[384..448], plain, "position 0 turns nothing");
    }
}
