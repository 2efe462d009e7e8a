//! What the device has been seen to take for the parts of reading a prompt, and from that, what a way of reading would take.
//!
//! All figures are running averages of measured times, by the device's clock. Until something is measured, the arithmetic of the model
//! at the speed of a middling card stands for it ([`Prior`]).

use crate::model::{ModelShape, ModelWeights};
use crate::units::Bytes;

/// Weight of the newest measurement once there are some.
const NEWEST: f64 = 0.25;
/// Part of the shorter of two kinds of work that is not hidden behind the longer one.
const IMPERFECT_OVERLAP: f64 = 0.05;
/// Link of which nothing is known yet, bytes a second: a PCIe 4.0 x8 slot.
const LINK_BYTES_PER_S: f64 = 12e9;

/// Speeds taken for granted until something is measured: those of a laptop's card, as its maker tells them, divided by two.
const FLOP_PER_S: f64 = 20e12;
const BYTES_PER_S: f64 = 400e9;
/// Time between two operations, and how many a mixer half has.
const LAUNCH_S: f64 = 5e-6;
const MIXER_LAUNCHES: f64 = 15.0;

/// What the parts of a layer would take on a middling card, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prior {
    /// The mixer half of a chunk, beside its rows.
    pub chunk_s: f64,
    /// A row of the mixer half, without attention.
    pub row_s: f64,
    /// A pair of a row and a key.
    pub key_s: f64,
    /// An expert, beside its rows.
    pub expert_s: f64,
    /// A row of an expert.
    pub routed_row_s: f64,
}

impl Prior {
    /// The arithmetic of one layer, and the bytes of its weights.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "estimates")]
    pub fn of(shape: &ModelShape, weights: &ModelWeights) -> Self {
        let n_layer = f64::from(shape.n_layer);
        let dense_weights: f64 = weights.dense.iter().map(|dense| f64::from(dense.tensor.rows) * f64::from(dense.tensor.cols)).sum();
        let expert_weights = 3.0 * f64::from(shape.n_embd) * f64::from(shape.n_ff);
        Self {
            chunk_s: MIXER_LAUNCHES * LAUNCH_S + weights.dense_bytes.0 as f64 / n_layer / BYTES_PER_S,
            row_s: 2.0 * dense_weights / n_layer / FLOP_PER_S,
            key_s: 4.0 * f64::from(shape.q_width()) / FLOP_PER_S,
            // Unpacked once: written and read as 16-bit floats.
            expert_s: 4.0 * expert_weights / BYTES_PER_S,
            routed_row_s: 2.0 * expert_weights / FLOP_PER_S,
        }
    }
}

/// Times of one layer's parts in one block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockSample {
    /// Rows of the timed chunk; 0 where none was.
    pub chunk_rows: u32,
    /// Pairs of a row of that chunk and a key it looks at.
    pub keys_seen: f64,
    /// Seconds of that chunk's mixer half without attention.
    pub linear_s: f64,
    /// Seconds of its attention.
    pub attention_s: f64,
    /// Experts of the timed group; 0 where none was.
    pub n_experts: u32,
    /// Rows routed to them.
    pub routed_rows: u32,
    /// Seconds of the group's products.
    pub experts_s: f64,
    /// Bytes of a group of experts that crossed the link, and seconds.
    pub link: Option<(Bytes, f64)>,
}

/// Seconds as `fixed x pieces + each x rows`, fitted to what was measured, newer measurements counting more.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    prior_fixed: f64,
    prior_each: f64,
    pieces2: f64,
    pieces_rows: f64,
    rows2: f64,
    pieces_s: f64,
    rows_s: f64,
}

impl Line {
    fn new(prior_fixed: f64, prior_each: f64) -> Self {
        Self { prior_fixed, prior_each, ..Self::default() }
    }

    fn note(&mut self, pieces: f64, rows: f64, seconds: f64) {
        if !(seconds > 0.0 && rows > 0.0) {
            return;
        }
        // Scaled so that a measurement counts by its relative error, not by its size.
        let (pieces, rows) = (pieces / seconds, rows / seconds);
        for (sum, term) in [
            (&mut self.pieces2, pieces * pieces),
            (&mut self.pieces_rows, pieces * rows),
            (&mut self.rows2, rows * rows),
            (&mut self.pieces_s, pieces),
            (&mut self.rows_s, rows),
        ] {
            *sum = *sum * (1.0 - NEWEST / 4.0) + term;
        }
    }

    /// The two factors. Measurements that are all alike cannot tell them apart: then both are the prior's, scaled to what was
    /// measured.
    fn factors(&self) -> (f64, f64) {
        let determinant = self.pieces2 * self.rows2 - self.pieces_rows * self.pieces_rows;
        if determinant <= 1e-2 * self.pieces2 * self.rows2 {
            return self.scaled_prior();
        }
        let fixed = (self.pieces_s * self.rows2 - self.rows_s * self.pieces_rows) / determinant;
        let each = (self.rows_s * self.pieces2 - self.pieces_s * self.pieces_rows) / determinant;
        match (fixed < 0.0, each < 0.0) {
            (false, false) => (fixed, each),
            (true, _) => (0.0, self.rows_s / self.rows2),
            (false, true) => (self.pieces_s / self.pieces2, 0.0),
        }
    }

    fn scaled_prior(&self) -> (f64, f64) {
        let (fixed, each) = (self.prior_fixed, self.prior_each);
        let squares = fixed * fixed * self.pieces2 + 2.0 * fixed * each * self.pieces_rows + each * each * self.rows2;
        let scale = if squares > 0.0 { (fixed * self.pieces_s + each * self.rows_s) / squares } else { 1.0 };
        (scale * fixed, scale * each)
    }

    fn seconds(&self, pieces: f64, rows: f64) -> f64 {
        let (fixed, each) = self.factors();
        fixed * pieces + each * rows
    }
}

/// A running average.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    value: f64,
    measurements: u32,
}

impl Average {
    fn note(&mut self, value: f64) {
        if value.is_finite() && value > 0.0 {
            self.measurements = self.measurements.saturating_add(1);
            self.value += (value - self.value) * NEWEST.max(1.0 / f64::from(self.measurements));
        }
    }

    fn get(&self) -> Option<f64> {
        (self.measurements > 0).then_some(self.value)
    }
}

/// Measured speeds of one device with one model.
#[derive(Clone, Debug, Default)]
pub struct Costs {
    /// Whether copies run beside operations.
    overlap: bool,
    link_bytes_per_s: Average,
    linear: Line,
    attention: Line,
    experts: Line,
    /// By rows, from one to eight: windows are few enough to keep each apart.
    windows: [Average; 8],
    /// The same, of windows with a head: those that write.
    writing: [Average; 8],
    draft_step: Average,
}

impl Costs {
    /// Nothing measured yet. With `overlap`, copies run beside operations.
    #[must_use]
    pub fn new(overlap: bool, prior: Prior) -> Self {
        Self {
            overlap,
            linear: Line::new(prior.chunk_s, prior.row_s),
            attention: Line::new(LAUNCH_S, prior.key_s),
            experts: Line::new(prior.expert_s, prior.routed_row_s),
            ..Self::default()
        }
    }

    /// Takes note of `bytes` that crossed the link to the device in `seconds`.
    #[allow(clippy::cast_precision_loss, reason = "a rate")]
    pub fn note_link(&mut self, bytes: Bytes, seconds: f64) {
        self.link_bytes_per_s.note(bytes.0 as f64 / seconds);
    }

    /// Whether a block was measured yet.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.linear.rows2 > 0.0
    }

    /// Takes note of a block's times.
    pub fn note_block(&mut self, sample: &BlockSample) {
        self.linear.note(1.0, f64::from(sample.chunk_rows), sample.linear_s);
        self.attention.note(1.0, sample.keys_seen, sample.attention_s);
        self.experts.note(f64::from(sample.n_experts), f64::from(sample.routed_rows), sample.experts_s);
        if let Some((bytes, seconds)) = sample.link {
            self.note_link(bytes, seconds);
        }
    }

    /// Takes note of a window of `rows` rows, its misses included.
    pub fn note_window(&mut self, rows: usize, with_head: bool, seconds: f64) {
        let Some(index) = rows.checked_sub(1).filter(|&index| index < self.windows.len()) else { return };
        self.windows[index].note(seconds);
        if with_head {
            self.writing[index].note(seconds);
        }
    }

    /// Takes note of a step of the draft layer.
    pub fn note_draft_step(&mut self, seconds: f64) {
        self.draft_step.note(seconds);
    }

    /// Seconds of a step of the draft layer; 0 until one was measured.
    #[must_use]
    pub fn draft_step_s(&self) -> f64 {
        self.draft_step.get().unwrap_or(0.0)
    }

    /// Seconds of a window of `rows` rows with a head, where that was measured.
    #[must_use]
    pub fn writing_window_s(&self, rows: usize) -> Option<f64> {
        rows.checked_sub(1).and_then(|index| self.writing.get(index)).and_then(Average::get)
    }

    /// Bytes a second from host memory to the device.
    #[must_use]
    pub fn link_bytes_per_s(&self) -> f64 {
        self.link_bytes_per_s.get().unwrap_or(LINK_BYTES_PER_S)
    }

    /// Seconds that `bytes` need to cross the link.
    #[must_use]
    pub fn link_s(&self, bytes: f64) -> f64 {
        bytes / self.link_bytes_per_s()
    }

    /// Seconds of the mixer half of one layer without attention: `chunks` chunks with `rows` rows in all.
    #[must_use]
    pub fn linear_s(&self, chunks: f64, rows: f64) -> f64 {
        self.linear.seconds(chunks, rows)
    }

    /// Seconds of one layer's attention: `chunks` chunks with `keys_seen` pairs of a row and a key in all.
    #[must_use]
    pub fn attention_s(&self, chunks: f64, keys_seen: f64) -> f64 {
        self.attention.seconds(chunks, keys_seen)
    }

    /// Seconds of one layer's experts, `n_experts` of them with `routed_rows` rows in all.
    #[must_use]
    pub fn experts_s(&self, n_experts: f64, routed_rows: f64) -> f64 {
        self.experts.seconds(n_experts, routed_rows)
    }

    /// Seconds of a window of `rows` rows. Where that was not measured, the next smaller one that was, with the seconds that
    /// `more_bytes(from, to)` of misses take; `None` where none was.
    #[must_use]
    pub fn window_s(&self, rows: usize, more_bytes: impl Fn(usize, usize) -> f64) -> Option<f64> {
        let known_rows = (1..=rows.min(self.windows.len())).rev();
        let (known, seconds) = known_rows.into_iter().find_map(|known| Some((known, self.windows[known - 1].get()?)))?;
        Some(seconds + self.link_s(more_bytes(known, rows)))
    }

    /// Seconds of two kinds of work that may or may not run beside each other.
    #[must_use]
    pub fn beside(&self, link_s: f64, compute_s: f64) -> f64 {
        // Never perfectly beside each other; this also settles for fewer bytes where time is the same.
        if self.overlap { link_s.max(compute_s) + IMPERFECT_OVERLAP * link_s.min(compute_s) } else { link_s + compute_s }
    }

    /// Of `ready_s` seconds of copies that have a place ahead of their use, those that run beside `compute_s` of other work.
    #[must_use]
    pub fn hidden(&self, ready_s: f64, compute_s: f64) -> f64 {
        if self.overlap { ready_s.min(compute_s) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() <= 1e-6 * wanted.abs().max(1.0)
    }

    #[test]
    fn a_fixed_part_is_told_from_one_that_grows_with_the_rows() {
        let mut costs = Costs::new(true, Prior::default());
        for rows in [64u32, 512, 1024] {
            costs.note_block(&BlockSample { chunk_rows: rows, linear_s: 0.5 + 0.01 * f64::from(rows), ..BlockSample::default() });
        }
        assert!(close(costs.linear_s(1.0, 100.0), 1.5), "{}", costs.linear_s(1.0, 100.0));
        assert!(close(costs.linear_s(4.0, 1000.0), 12.0));
    }

    #[test]
    fn measurements_that_are_all_alike_scale_what_was_taken_for_granted() {
        let mut costs = Costs::new(true, Prior { expert_s: 1.0, routed_row_s: 0.01, ..Prior::default() });
        assert!(close(costs.experts_s(8.0, 200.0), 10.0));
        for _ in 0..3 {
            costs.note_block(&BlockSample { n_experts: 8, routed_rows: 200, experts_s: 2.0, ..BlockSample::default() });
        }
        assert!(close(costs.experts_s(8.0, 200.0), 2.0));
        assert!(close(costs.experts_s(16.0, 200.0), 3.6), "as many rows, more experts");
    }

    #[test]
    fn what_was_never_measured_takes_what_a_middling_card_takes() {
        let prior = Prior { chunk_s: 1.0, row_s: 0.1, key_s: 0.02, ..Prior::default() };
        let costs = Costs::new(true, prior);
        assert!(close(costs.linear_s(1.0, 10.0), 2.0) && close(costs.attention_s(0.0, 100.0), 2.0));
        assert!(close(costs.link_s(12e9), 1.0));
        assert_eq!(costs.window_s(4, |_, _| 0.0), None);
    }

    #[test]
    fn a_window_that_was_not_measured_costs_what_a_smaller_one_did_and_its_further_misses() {
        let mut costs = Costs::new(true, Prior::default());
        costs.note_link(Bytes(1_000), 1.0);
        costs.note_window(2, true, 5.0);
        let seconds = |rows| costs.window_s(rows, |from, to| (to - from) as f64 * 500.0);
        assert_eq!(seconds(1), None);
        assert!(seconds(2).is_some_and(|seconds| close(seconds, 5.0)) && seconds(4).is_some_and(|seconds| close(seconds, 6.0)));
        costs.note_window(9, true, 1.0);
        costs.note_window(0, true, 1.0);
        costs.note_window(4, false, 1.0);
        assert_eq!([2, 4, 9].map(|rows| costs.writing_window_s(rows)), [Some(5.0), None, None]);
    }

    #[test]
    fn newer_measurements_count_more_and_nonsense_does_not_count() {
        let mut costs = Costs::new(false, Prior::default());
        costs.note_link(Bytes(100), 1.0);
        costs.note_link(Bytes(200), 1.0);
        costs.note_link(Bytes(100), 0.0);
        costs.note_link(Bytes(0), 1.0);
        assert!(close(costs.link_bytes_per_s(), 150.0));
        for _ in 0..20 {
            costs.note_link(Bytes(400), 1.0);
        }
        assert!(costs.link_bytes_per_s() > 390.0);
        assert!(close(costs.beside(2.0, 3.0), 5.0) && close(Costs::new(true, Prior::default()).beside(2.0, 3.0), 3.1));
        assert!(close(costs.hidden(2.0, 3.0), 0.0) && close(Costs::new(true, Prior::default()).hidden(2.0, 3.0), 2.0));
    }
}
