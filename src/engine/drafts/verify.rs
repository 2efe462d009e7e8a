//! Which drafts hold: those that are the tokens the model chooses anyway.
//!
//! Each row's token is chosen from the model's own logits, by the sampler, with the tokens before that row as its history and the row's
//! position for its draw. That is what a window of one token would have chosen there, so drafts change the time and never the text.

use crate::engine::constraint::{AnyConstraintState, ConstraintError};
use crate::engine::sampler::{Sampler, unit_random};
use crate::units::TokenId;

/// Keeps the draws of forced acceptance apart from those of sampling.
const FORCED_SALT: u64 = 0x00D5_AF75;

/// A window that was run: a chosen token, then drafts.
#[derive(Clone, Copy)]
pub struct Candidates<'a> {
    /// `[1 + drafts, n_vocab]`.
    pub logits: &'a [f32],
    /// Columns of `logits`.
    pub n_vocab: usize,
    /// The tokens up to the first row's, which is the last of them.
    pub history: &'a [TokenId],
    /// The tokens of the other rows.
    pub drafts: &'a [TokenId],
    /// Tokens that end the text: nothing is chosen behind one.
    pub stop_tokens: &'a [TokenId],
    /// As [`crate::settings::DraftSettings::force_acceptance`].
    pub force_acceptance: Option<f64>,
}

/// What a window came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Tokens chosen, one for each row that the text keeps; only a token that ends the text is no part of it. As many rows are to be
    /// accepted into the sequence.
    pub tokens: Vec<TokenId>,
    /// Drafts that are among them.
    pub accepted: usize,
    /// False where the logits of the row behind `tokens` are not finite: the tokens hold, and nothing can be chosen after them.
    pub is_finite: bool,
}

/// Chooses tokens row by row until one differs from its draft, or ends the text. Each row has its own answer of `constraint`, which has all
/// chosen tokens afterwards.
///
/// # Errors
/// The constraint's.
///
/// # Panics
/// Where there are no logits of all rows, or no history.
pub fn verify(
    sampler: &Sampler,
    candidates: Candidates<'_>,
    mut constraint: Option<&mut AnyConstraintState>,
) -> Result<Verified, ConstraintError> {
    let Candidates { logits, n_vocab, history, drafts, stop_tokens, force_acceptance } = candidates;
    assert_eq!(logits.len(), (1 + drafts.len()) * n_vocab, "one row for each token of the window");
    assert!(!history.is_empty(), "the first row has a token");
    // As much of the history as any row looks at, and room for the drafts behind it: the whole may be long.
    let recent = history.len() - sampler.history_tokens().min(history.len());
    let mut seen = history[recent..].to_vec();
    let mut verified = Verified { tokens: Vec::with_capacity(1 + drafts.len()), accepted: 0, is_finite: true };
    for (row, logits) in logits.chunks_exact(n_vocab).enumerate() {
        let (draft, position) = (drafts.get(row).copied(), history.len() + row);
        let forced = force_acceptance.zip(draft).filter(|&(acceptance, _)| is_forced(sampler.seed(), position, acceptance));
        let chosen = match forced {
            Some((_, draft)) => Some(draft),
            None => match constraint.as_deref_mut() {
                None => sampler.choose(logits, &seen, position),
                Some(constraint) => sampler.choose_among(logits, &constraint.allowed()?, &seen, position),
            },
        };
        let Some(chosen) = chosen else {
            verified.is_finite = false;
            break;
        };
        if let Some(constraint) = constraint.as_deref_mut() {
            constraint.accept(chosen)?;
        }
        verified.tokens.push(chosen);
        // Where acceptance is forced, it is so to both sides.
        let is_accepted = if force_acceptance.is_some() { forced.is_some() } else { draft == Some(chosen) };
        verified.accepted += usize::from(is_accepted);
        if !is_accepted || stop_tokens.contains(&chosen) {
            break;
        }
        seen.push(chosen);
    }
    Ok(verified)
}

fn is_forced(seed: u64, position: usize, acceptance: f64) -> bool {
    unit_random(seed ^ FORCED_SALT, position as u64) < acceptance
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
