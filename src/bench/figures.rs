//! The figures of one run, and of several runs of one kind.

use serde::Serialize;

use super::stats::Spread;
use crate::engine::Outcome;
use crate::engine::way::Way;
use crate::phase::Plan;
use crate::units::Bytes;

/// What is kept of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// The repetition or trial; runs of one are compared.
    pub repetition: u32,
    /// Prompt tokens that were read.
    pub fresh_tokens: usize,
    /// How the prompt was read.
    pub way: Way,
    /// Why.
    pub way_reason: String,
    /// What the planner expected of it, in seconds.
    pub predicted_s: f64,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of a block.
    pub block: u32,
    /// Expert slots.
    pub slots: u32,
    /// Of them in use while the prompt was read.
    pub slots_kept: u32,
    /// Bytes of experts over the link, reading and writing.
    pub link_bytes: Bytes,
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Lowest free device memory, where the device says.
    pub lowest_free_bytes: Option<Bytes>,
    /// From the request to its first token.
    pub first_token_s: f64,
    /// Tokens read a second, up to the first token written.
    pub read_tokens_per_s: f64,
    /// Tokens written a second after the first; `None` where there was only that one.
    pub written_tokens_per_s: Option<f64>,
}

impl Run {
    /// Of an engine's answer.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "counts of tokens")]
    pub fn new(repetition: u32, outcome: &Outcome, plan: &Plan) -> Self {
        let fresh_tokens = fresh_tokens(outcome);
        let first_token_s = outcome.prefill.as_secs_f64();
        Self {
            repetition,
            fresh_tokens,
            way: outcome.choice.way,
            way_reason: outcome.choice.reason.clone(),
            predicted_s: outcome.choice.predicted_s,
            chunk: outcome.choice.chunk,
            block: outcome.choice.block,
            slots: plan.slots,
            slots_kept: plan.slots.saturating_sub(outcome.phases.slots_lent),
            link_bytes: outcome.experts.link_bytes,
            head_reloads: outcome.phases.head_reloads,
            lowest_free_bytes: outcome.lowest_free,
            first_token_s,
            read_tokens_per_s: fresh_tokens as f64 / first_token_s.max(1e-9),
            written_tokens_per_s: (outcome.tokens.len() > 1).then(|| outcome.decode_tokens_per_s()),
        }
    }
}

/// Prompt tokens that had to be read, not reused from what earlier requests left. The last one always is.
fn fresh_tokens(outcome: &Outcome) -> usize {
    outcome.prompt_tokens.saturating_sub(outcome.reused_tokens)
}

/// Several runs of one kind. What is no speed is that of the run whose time to the first token is the median.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// Runs behind the figures.
    pub runs: usize,
    /// Prompt tokens that were read.
    pub fresh_tokens: usize,
    /// How the prompt was read.
    pub way: Way,
    /// Why.
    pub way_reason: String,
    /// Expert slots.
    pub slots: u32,
    /// Of them in use while the prompt was read.
    pub slots_kept: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of a block.
    pub block: u32,
    /// Bytes of experts over the link, reading and writing.
    pub link_bytes: Bytes,
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Lowest free device memory of all runs, where the device says.
    pub lowest_free_bytes: Option<Bytes>,
    /// What the planner expected of reading, in seconds.
    pub predicted_s: f64,
    /// From the request to its first token, in seconds.
    pub first_token_s: Spread,
    /// Tokens read a second.
    pub read_tokens_per_s: Spread,
    /// Tokens written a second after the first; `None` where there was only that one.
    pub written_tokens_per_s: Option<Spread>,
}

impl Figures {
    /// Of `runs`; `None` where there are none.
    #[must_use]
    pub fn of(runs: &[Run]) -> Option<Self> {
        let mut by_time: Vec<&Run> = runs.iter().collect();
        by_time.sort_by(|one, other| one.first_token_s.total_cmp(&other.first_token_s));
        let middle = *by_time.get(by_time.len().saturating_sub(1) / 2)?;
        Some(Self {
            runs: runs.len(),
            fresh_tokens: middle.fresh_tokens,
            way: middle.way,
            way_reason: middle.way_reason.clone(),
            slots: middle.slots,
            slots_kept: middle.slots_kept,
            chunk: middle.chunk,
            block: middle.block,
            link_bytes: middle.link_bytes,
            head_reloads: middle.head_reloads,
            lowest_free_bytes: runs.iter().filter_map(|run| run.lowest_free_bytes).min(),
            predicted_s: middle.predicted_s,
            first_token_s: Spread::of(runs.iter().map(|run| run.first_token_s))?,
            read_tokens_per_s: Spread::of(runs.iter().map(|run| run.read_tokens_per_s))?,
            written_tokens_per_s: Spread::of(runs.iter().filter_map(|run| run.written_tokens_per_s)),
        })
    }
}

/// A speed of a run.
pub type Speed = fn(&Run) -> Option<f64>;
/// Speed of reading.
pub const READ: Speed = |run| Some(run.read_tokens_per_s);
/// Speed of writing.
pub const WRITTEN: Speed = |run| run.written_tokens_per_s;

/// How many times as fast `runs` are as `base`, repetition by repetition.
#[must_use]
pub fn ratios(runs: &[Run], base: &[Run], speed: Speed) -> Vec<f64> {
    let of_base = |repetition| base.iter().find(|run| run.repetition == repetition).and_then(speed);
    let ratio = |run: &Run| Some(speed(run)? / of_base(run.repetition).filter(|&base| base > 0.0)?);
    runs.iter().filter_map(ratio).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A run of 100 tokens.
    pub fn run(repetition: u32, first_token_s: f64, chunk: u32) -> Run {
        Run {
            repetition,
            fresh_tokens: 100,
            way: Way::Loan,
            way_reason: "it is the only one".to_owned(),
            predicted_s: 1.5,
            chunk,
            block: 2 * chunk,
            slots: 10,
            slots_kept: 4,
            link_bytes: Bytes::mib(7),
            head_reloads: 0,
            lowest_free_bytes: Some(Bytes::mib(u64::from(chunk))),
            first_token_s,
            read_tokens_per_s: 100.0 / first_token_s,
            written_tokens_per_s: (chunk != 3).then(|| f64::from(chunk)),
        }
    }

    #[test]
    fn what_is_no_speed_is_that_of_the_run_in_the_middle() {
        let figures = Figures::of(&[run(0, 4.0, 1), run(1, 1.0, 2), run(2, 2.0, 3)]).expect("runs");
        assert_eq!((figures.runs, figures.chunk, figures.block), (3, 3, 6));
        assert_eq!(figures.lowest_free_bytes, Some(Bytes::mib(1)));
        assert_eq!(figures.read_tokens_per_s, Spread { median: 50.0, min: 25.0, max: 100.0 });
        assert_eq!(figures.written_tokens_per_s, Some(Spread { median: 1.5, min: 1.0, max: 2.0 }));
        assert_eq!(Figures::of(&[]), None);
    }

    #[test]
    fn ratios_are_taken_within_a_repetition() {
        let base = [run(0, 4.0, 2), run(2, 1.0, 3)];
        let runs = [run(2, 0.5, 4), run(1, 7.0, 4), run(0, 1.0, 4)];
        assert_eq!(ratios(&runs, &base, READ), [2.0, 4.0], "the base has no repetition 1");
        assert_eq!(ratios(&runs, &base, WRITTEN), [2.0], "it wrote a single token in repetition 2");
    }
}
