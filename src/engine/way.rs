//! Which way to read a prompt: windows, a loan with the head kept, or the alias.
//!
//! The choice compares what each way moves over the link, the one cost that all devices share: experts that have no slot, once for
//! each pass; lent slots on their way back; the head's reload. Measured times refine it in a later version.

use std::fmt;

use serde::Serialize;

use crate::phase::plan::{Plan, PromptMemory};
use crate::settings::{AliasThreshold, EngineSettings};
use crate::units::Bytes;

/// Prompts of at most this many tokens may be read through windows.
const WINDOW_READ_MAX: usize = 8;

/// A way to read a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// One token after another through decode windows; nothing is lent.
    Windows,
    /// In chunks, with the head kept.
    Loan,
    /// In chunks, with the head lent.
    Alias,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Windows => "windows",
            Self::Loan => "loan",
            Self::Alias => "alias",
        })
    }
}

/// What the choice needs to know of the model.
#[derive(Clone, Copy)]
pub struct ModelTraffic<'a> {
    /// Bytes of all routed experts.
    pub expert_bytes: Bytes,
    /// Routed experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_expert_used: u32,
    /// Bytes of the prompt buffers for a chunk.
    pub prompt_bytes: &'a dyn Fn(u32) -> Bytes,
}

/// The chosen way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// How.
    pub way: Way,
    /// Tokens of a chunk; 1 for windows.
    pub chunk: u32,
    /// Why, for the log.
    pub reason: String,
}

/// Chunks of even size: as few as `chunk_max` allows, none of them a stub.
#[must_use]
pub fn levelled_chunk(tokens: usize, chunk_max: u32) -> u32 {
    let passes = tokens.div_ceil(chunk_max.max(1) as usize).max(1);
    u32::try_from(tokens.div_ceil(passes)).unwrap_or(chunk_max).max(1)
}

/// Bytes over the link for reading `tokens` in chunks of at most `chunk_max`.
struct Traffic<'a> {
    plan: &'a Plan,
    model: ModelTraffic<'a>,
}

impl Traffic<'_> {
    /// Bytes of experts without a slot while `lent_slots` are lent.
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    fn absent(&self, lent_slots: u64) -> f64 {
        let resident = self.plan.slot_bytes.0.saturating_mul(u64::from(self.plan.slots).saturating_sub(lent_slots));
        self.model.expert_bytes.0.saturating_sub(resident) as f64
    }

    /// Share of a layer's experts that `rows` tokens touch, were routing uniform.
    fn touched(&self, rows: u32) -> f64 {
        let untouched_by_one = 1.0 - f64::from(self.model.n_expert_used) / f64::from(self.model.n_expert);
        1.0 - untouched_by_one.powf(f64::from(rows))
    }

    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    fn chunked(&self, tokens: usize, chunk_max: u32, with_head: bool, lends: bool) -> f64 {
        let chunk = levelled_chunk(tokens, chunk_max);
        let passes = tokens.div_ceil(chunk as usize) as f64;
        let head = if with_head { self.plan.head_bytes } else { Bytes::ZERO };
        let buffers = (self.model.prompt_bytes)(chunk);
        let lent = if lends { buffers.saturating_sub(head).0.div_ceil(self.plan.slot_bytes.0) } else { 0 };
        passes * self.absent(lent) * self.touched(chunk) + (lent * self.plan.slot_bytes.0 + head.0) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    fn windows(&self, tokens: usize) -> f64 {
        tokens as f64 * self.absent(0) * self.touched(1)
    }
}

/// Chooses the way for a prompt of which `tokens` are to be read before the last one.
#[must_use]
pub fn choose(plan: &Plan, model: ModelTraffic<'_>, settings: &EngineSettings, tokens: usize) -> Choice {
    let windows = |reason: &str| Choice { way: Way::Windows, chunk: 1, reason: reason.to_owned() };
    if tokens == 0 {
        return windows("the last prompt token is always a window");
    }
    let alias_chunk = levelled_chunk(tokens, plan.alias_chunk);
    if let AliasThreshold::Tokens(least) = settings.alias_min_tokens
        && plan.alias_chunk > 0
        && tokens + 1 >= least as usize
    {
        return Choice { way: Way::Alias, chunk: alias_chunk, reason: format!("--alias-min-tokens {least}") };
    }
    let traffic = Traffic { plan, model };
    let lends = matches!(plan.prompt_memory, PromptMemory::Loan { .. });
    let alias_allowed = plan.alias_chunk > 0 && settings.alias_min_tokens == AliasThreshold::Auto;
    // Deterministic runs read all but the last token through the prompt path, whatever it costs.
    let windows_allowed = !settings.deterministic && tokens < WINDOW_READ_MAX;
    let candidates = [
        (plan.kept_head_chunk > 0).then(|| (Way::Loan, traffic.chunked(tokens, plan.kept_head_chunk, false, lends))),
        alias_allowed.then(|| (Way::Alias, traffic.chunked(tokens, plan.alias_chunk, true, true))),
        windows_allowed.then(|| (Way::Windows, traffic.windows(tokens))),
    ];
    // The first of equals wins, so the head stays where lending it gains nothing.
    let best = candidates.into_iter().flatten().reduce(|best, next| if next.1 < best.1 { next } else { best });
    match best {
        Some((Way::Windows, bytes)) => windows(&format!("{:.1} MiB over the link, the least of all ways", bytes / 1048576.0)),
        Some((way, bytes)) => {
            let chunk = if way == Way::Alias { alias_chunk } else { levelled_chunk(tokens, plan.kept_head_chunk) };
            Choice { way, chunk, reason: format!("{:.1} MiB over the link, the least of all ways", bytes / 1048576.0) }
        }
        // Only a start with too little memory to read while the head is kept comes here, below its alias threshold.
        None if plan.alias_chunk > 0 => {
            Choice { way: Way::Alias, chunk: alias_chunk, reason: "the head must be lent: nothing else has room".to_owned() }
        }
        None => windows("no room for prompt buffers"),
    }
}
