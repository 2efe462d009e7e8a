//! A request and what became of it.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use super::constraint::Constraint;
use super::drafts::DraftCounters;
use super::sampler::{Logprobs, Sampling};
use super::timelines::Place;
use super::way::Choice;
use crate::experts::ExpertCounters;
use crate::phase::scheduler::PhaseCounters;
use crate::units::{Bytes, TokenId};

/// What to read and how to go on.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Tokens to write at most; fewer where the context ends.
    pub tokens_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they are not part of it.
    pub stop_tokens: Vec<TokenId>,
    /// Log-probabilities wanted beside each token: of itself and so many best ones.
    pub logprobs: Option<usize>,
    /// What the text has to be like.
    pub constraint: Option<Arc<dyn Constraint>>,
}

/// What happens while a request runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// The prompt is being read: rows x layers done, of all.
    Reading {
        /// Done.
        done: u64,
        /// All.
        total: u64,
    },
    /// Log-probabilities of the token that comes next, where they were asked for.
    Logprobs(&'a Logprobs),
    /// A token was written.
    Token(TokenId),
}

/// Why writing ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// As many tokens as asked for, or the context is full.
    Length,
    /// The caller asked to stop.
    Cancelled,
}

/// What a request did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Tokens written.
    pub tokens: Vec<TokenId>,
    /// Log-probabilities of the tokens, where they were asked for.
    pub logprobs: Vec<Logprobs>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them, those whose keys and values were there already.
    pub reused_tokens: usize,
    /// Leading tokens of the prompt that some known conversation has, too: the first difference is there. At least those that were
    /// reused; 0 where nothing is kept.
    pub common_tokens: usize,
    /// Which timeline the request was answered on.
    pub place: Place,
    /// How the prompt was read.
    pub choice: Choice,
    /// Time of reading, the way back of lent memory included, up to the first token.
    pub prefill: Duration,
    /// Time of writing the tokens after the first.
    pub decode: Duration,
    /// Lowest free bytes seen at any step, by the device's own word where it gives one.
    pub lowest_free: Option<Bytes>,
    /// Bytes of prompt buffers beside the arena.
    pub spill_bytes: Bytes,
    /// Slots in use at the end.
    pub slots: u32,
    /// What the phases did in this request.
    pub phases: PhaseCounters,
    /// What the experts did in this request.
    pub experts: ExpertCounters,
    /// What became of drafts in this request.
    pub drafts: DraftCounters,
    /// Graphs that were captured again in this request, because the head had moved.
    pub recaptures: u64,
}

impl Outcome {
    /// Prompt tokens a second.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prompt_tokens as f64 / self.prefill.as_secs_f64().max(1e-9)
    }

    /// Written tokens a second, the first one not counted: it belongs to reading.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn decode_tokens_per_s(&self) -> f64 {
        self.tokens.len().saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// Called at every event; may ask to stop.
pub type OnEvent<'a> = dyn FnMut(Event<'_>) -> ControlFlow<()> + 'a;
