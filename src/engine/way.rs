//! Which way to read a prompt: windows, a loan with the head kept, or the alias.
//!
//! The choice compares what each way moves over the link, the one cost that all devices share: experts that have no slot, once for
//! each pass; lent slots on their way back; the head's reload. Measured times refine it in a later version.

use std::fmt;

use serde::Serialize;

use crate::phase::plan::{Plan, PromptMemory};
use crate::settings::{AliasThreshold, EngineSettings, ShortRead};
use crate::units::{Bytes, MIB};

/// Prompts of at most this many tokens may be read through windows where the settings leave it open.
const WINDOW_READ_TOKENS: u32 = 8;

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

/// The longest of the chunks that [`levelled`] cuts.
#[must_use]
pub fn levelled_chunk(tokens: usize, chunk_max: u32) -> u32 {
    let passes = tokens.div_ceil(chunk_max.max(1) as usize).max(1);
    u32::try_from(tokens.div_ceil(passes)).unwrap_or(chunk_max).max(1)
}

/// Cuts `items` into as few stretches as `most` allows. None differs from another by more than one item, so the longest has
/// [`levelled_chunk`] items and the last is no stub.
pub fn levelled<T>(items: &[T], most: u32) -> impl Iterator<Item = &[T]> {
    let n_stretches = items.len().div_ceil(most.max(1) as usize);
    let longer = items.len().checked_rem(n_stretches).unwrap_or(0);
    let base = items.len().checked_div(n_stretches).unwrap_or(0);
    (0..n_stretches).map(move |index| {
        let start = index * base + index.min(longer);
        &items[start..start + base + usize::from(index < longer)]
    })
}

/// Bytes over the link of each way of reading.
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
        // What goes to a spill is lent by no slot.
        let lent = lent.min(u64::from(self.plan.slots.saturating_sub(1)));
        passes * self.absent(lent) * self.touched(chunk) + (lent * self.plan.slot_bytes.0 + head.0) as f64
    }

    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    fn windows(&self, tokens: usize) -> f64 {
        tokens as f64 * self.absent(0) * self.touched(1)
    }
}

/// The candidates with what each moves, for the log.
fn compared(candidates: &[(Way, f64)]) -> String {
    let parts: Vec<String> = candidates.iter().map(|(way, bytes)| format!("{way} {} MiB", grouped(bytes / MIB as f64))).collect();
    format!("{} over the link", parts.join(", "))
}

/// A number with commas between thousands; small ones with a decimal.
fn grouped(number: f64) -> String {
    if number < 10.0 {
        return format!("{number:.1}");
    }
    let digits = format!("{number:.0}");
    let commas_before = |at: usize| at > 0 && (digits.len() - at).is_multiple_of(3);
    digits.chars().enumerate().flat_map(|(at, digit)| commas_before(at).then_some(',').into_iter().chain([digit])).collect()
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
    let short_read = match settings.short_read {
        ShortRead::Auto => WINDOW_READ_TOKENS,
        ShortRead::Tokens(tokens_max) => tokens_max,
    };
    // Deterministic runs read all but the last token through the prompt path, whatever it costs.
    let windows_allowed = !settings.deterministic && tokens < short_read as usize;
    let candidates: Vec<(Way, f64)> = [
        (plan.kept_head_chunk > 0).then(|| (Way::Loan, traffic.chunked(tokens, plan.kept_head_chunk, false, lends))),
        alias_allowed.then(|| (Way::Alias, traffic.chunked(tokens, plan.alias_chunk, true, true))),
        windows_allowed.then(|| (Way::Windows, traffic.windows(tokens))),
    ]
    .into_iter()
    .flatten()
    .collect();
    // The first of equals wins, so the head stays where lending it gains nothing.
    let best = candidates.iter().copied().reduce(|best, next| if next.1 < best.1 { next } else { best });
    match best {
        Some((way, _)) => {
            let chunk = match way {
                Way::Loan => levelled_chunk(tokens, plan.kept_head_chunk),
                Way::Alias => alias_chunk,
                Way::Windows => 1,
            };
            Choice { way, chunk, reason: compared(&candidates) }
        }
        // Only a start with too little memory to read while the head is kept comes here, below its alias threshold.
        None if plan.alias_chunk > 0 => {
            Choice { way: Way::Alias, chunk: alias_chunk, reason: "the head must be lent: nothing else has room".to_owned() }
        }
        None => windows("no room for prompt buffers"),
    }
}

#[cfg(test)]
#[path = "way_tests.rs"]
mod tests;
