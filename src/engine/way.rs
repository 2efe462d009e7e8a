//! Which way to read a prompt: windows, one wide window, a loan with the head kept, or the alias; each with its best chunk and block.
//!
//! For every way that the plan has room for, the time is predicted from what was measured so far ([`Costs`]); the least wins, and the
//! reason names all of them. What is counted: experts that cross the link, once a block; the two halves of a layer; lent slots on
//! their way back; the head's reload.

use std::fmt;

use serde::Serialize;

use crate::engine::costs::Costs;
use crate::engine::prefill::keys_seen;
use crate::model::layout::PromptSize;
use crate::phase::levelled::{levelled_len, stepped_len};
use crate::phase::plan::{Plan, PromptMemory};
use crate::phase::prompt_sizes::SizeLimits;
use crate::settings::{AliasThreshold, BlockSetting, EngineSettings, HeadAliasMode, ShortRead};
use crate::units::Bytes;

/// Longest block that is chosen unasked where a shorter one is allowed, in predicted seconds: a block is what a cancelled prompt loses.
const BLOCK_SECONDS_MAX: f64 = 10.0;

/// Time that the host takes for the routes of a layer, to bring them in and to send them sorted.
const ROUTES_S: f64 = 40e-6;
/// Time that lending and taking back take, beside the copies.
const LOAN_S: f64 = 200e-6;
/// Part by which a loan must be faster than nothing lent, and the alias faster than a loan.
const LOAN_MARGIN: f64 = 0.05;
const ALIAS_MARGIN: f64 = 0.06;
/// Longest prompt that is read with nothing lent, where the settings leave it open.
const SHORT_READ_TOKENS: usize = 128;

/// A way to read a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// A few tokens at a time through decode windows; nothing is lent.
    Windows,
    /// One window for all tokens, by the prompt path's arithmetic; experts are read where they are, nothing is lent.
    #[serde(rename = "windows")]
    Wide,
    /// In blocks, with the head kept.
    Loan,
    /// In blocks, with the head lent.
    Alias,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Windows => "windows",
            Self::Wide => "one wide window",
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
    /// Layers.
    pub n_layer: u32,
    /// Layers with attention.
    pub n_attention_layer: u32,
    /// Blocks that do not hold a whole prompt are multiples of this.
    pub block_step: u32,
    /// Routed experts of a layer.
    pub n_expert: u32,
    /// Experts that a token uses.
    pub n_expert_used: u32,
    /// Bytes that prompt buffers of a size take in the arena, with the head lent or kept; `None` where they do not fit.
    pub arena_bytes: &'a dyn Fn(PromptSize, Way) -> Option<Bytes>,
}

/// The chosen way.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// How.
    pub way: Way,
    /// Tokens of a chunk; those of a window for windows.
    pub chunk: u32,
    /// Tokens of a block; equal to the chunk for windows.
    pub block: u32,
    /// Experts in flight; 0 where they are read in place.
    pub ring_slots: u32,
    /// Predicted seconds, with the way home of what is lent.
    pub predicted_s: f64,
    /// Why, for the log.
    pub reason: String,
}

impl Choice {
    /// Sizes of the prompt buffers.
    #[must_use]
    pub fn size(&self) -> PromptSize {
        PromptSize { chunk: self.chunk, block: self.block, ring_slots: self.ring_slots, all_logits: false }
    }
}

/// A way that is possible, with its best sizes.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    way: Way,
    size: PromptSize,
    seconds: f64,
    longest_block_s: f64,
}

impl Candidate {
    fn keeps_blocks_short(&self) -> bool {
        self.longest_block_s <= BLOCK_SECONDS_MAX
    }

    /// Predicted seconds with what a way must gain to be worth it: estimates err, and what is lent is missing for a while.
    fn weighed_s(&self) -> f64 {
        let margin = match self.way {
            Way::Windows | Way::Wide => 0.0,
            Way::Loan => LOAN_MARGIN,
            Way::Alias => ALIAS_MARGIN,
        };
        self.seconds * (1.0 + margin)
    }

    /// The better of two: short blocks first, then time; the first of equals.
    fn better(self, other: Self) -> Self {
        let wins = match (self.keeps_blocks_short(), other.keeps_blocks_short()) {
            (true, false) => false,
            (false, true) => true,
            _ => other.weighed_s() < self.weighed_s(),
        };
        if wins { other } else { self }
    }
}

/// A prompt to be read, all tokens but the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Tokens in the caches already.
    pub past: usize,
    /// Tokens to read.
    pub tokens: usize,
}

/// Predicts what ways take.
struct Predictor<'a> {
    plan: &'a Plan,
    model: ModelTraffic<'a>,
    costs: &'a Costs,
    limits: SizeLimits,
    /// Whether the block is ours to choose.
    is_block_chosen: bool,
    reading: Reading,
}

#[allow(clippy::cast_precision_loss, reason = "estimates")]
impl Predictor<'_> {
    /// Bytes of one layer's experts without a slot while `lent_slots` are lent.
    fn absent_layer_bytes(&self, lent_slots: u32) -> f64 {
        let resident = self.plan.slot_table.total(self.plan.slots.saturating_sub(lent_slots));
        self.model.expert_bytes.saturating_sub(resident).0 as f64 / f64::from(self.model.n_layer)
    }

    /// Share of a layer's experts that `rows` tokens touch, were routing uniform.
    fn touched(&self, rows: f64) -> f64 {
        let untouched_by_one = 1.0 - f64::from(self.model.n_expert_used) / f64::from(self.model.n_expert);
        1.0 - untouched_by_one.powf(rows)
    }

    fn expert_bytes(&self) -> f64 {
        self.model.expert_bytes.0 as f64 / f64::from(self.model.n_layer) / f64::from(self.model.n_expert)
    }

    /// Seconds of one layer over `rows` tokens behind `past`, read in chunks of `chunk`.
    fn layer_s(&self, size: PromptSize, rows: f64, past: f64, lent_slots: u32) -> f64 {
        let chunks = (rows / f64::from(size.chunk)).ceil();
        // An average layer: attention is only in some.
        let attention_share = f64::from(self.model.n_attention_layer) / f64::from(self.model.n_layer);
        let attention_s = attention_share * self.costs.attention_s(chunks, keys_seen(past, rows));
        let mixer_s = self.costs.linear_s(chunks, rows) + attention_s + ROUTES_S;
        let touched = self.touched(rows);
        let routed_rows = rows * f64::from(self.model.n_expert_used);
        let experts_s = self.costs.experts_s(touched * f64::from(self.model.n_expert), routed_rows);
        let link_s = self.costs.link_s(touched * self.absent_layer_bytes(lent_slots));
        if size.ring_slots == 0 {
            return mixer_s + self.costs.beside(link_s, experts_s);
        }
        // The mixer half hides what the ring holds, the products hide the rest.
        let ahead_s = self.costs.link_s(f64::from(size.ring_slots) * self.expert_bytes()).min(link_s);
        let hidden_s = self.costs.hidden(ahead_s, mixer_s);
        mixer_s + self.costs.beside(link_s - hidden_s, experts_s)
    }

    /// Seconds of a prompt in blocks of `size`, and of its longest block.
    fn blocks_s(&self, size: PromptSize, lent_slots: u32) -> (f64, f64) {
        let n_blocks = self.reading.tokens.div_ceil(size.block as usize);
        let rows = self.reading.tokens as f64 / n_blocks as f64;
        // Of the last layer only keys and values are computed.
        let n_layer = f64::from(self.model.n_layer - 1).max(1.0);
        let block_s = |index: usize| n_layer * self.layer_s(size, rows, self.reading.past as f64 + index as f64 * rows, lent_slots);
        // Attention grows with the position, all else is alike: first and last stand for all.
        let (first, last) = (block_s(0), block_s(n_blocks - 1));
        ((first + last) / 2.0 * n_blocks as f64, last)
    }

    /// The best sizes for reading in blocks, with or without the head lent.
    fn in_blocks(&self, way: Way) -> Option<Candidate> {
        let block_max = if way == Way::Alias { self.plan.alias_block } else { self.plan.kept_head_block };
        if block_max == 0 {
            return None;
        }
        let tokens = self.reading.tokens;
        let fewest = tokens.div_ceil(block_max as usize);
        let mut best: Option<Candidate> = None;
        // A block set by hand is read in as few passes as it allows, in its first form that fits.
        let forms = if self.is_block_chosen { usize::MAX } else { 1 };
        let try_passes = |passes: usize, best: &mut Option<Candidate>| {
            let most = u32::try_from(tokens.div_ceil(passes.clamp(1, tokens))).unwrap_or(block_max);
            let block = stepped_len(tokens, most, block_max, self.model.block_step);
            let levelled = |size: PromptSize| PromptSize { chunk: levelled_len(block as usize, size.chunk), ..size };
            for candidate in self.limits.sizes(block).filter_map(|size| self.candidate(way, levelled(size))).take(forms) {
                *best = Some(best.map_or(candidate, |best| best.better(candidate)));
            }
        };
        if !self.is_block_chosen {
            try_passes(fewest, &mut best);
            return best;
        }
        for passes in [fewest, fewest + 1, 2 * fewest, 4 * fewest] {
            try_passes(passes, &mut best);
        }
        if let Some(too_long) = best.filter(|best| !best.keeps_blocks_short()) {
            let most = tokens.min(1 << 20) as f64;
            let passes = (too_long.seconds / BLOCK_SECONDS_MAX).ceil().min(most).max(1.0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and the number of tokens")]
            try_passes(passes as usize + 1, &mut best);
        }
        best
    }

    fn candidate(&self, way: Way, size: PromptSize) -> Option<Candidate> {
        let arena = (self.model.arena_bytes)(size, way)?;
        let head = if way == Way::Alias { self.plan.head_bytes } else { Bytes::ZERO };
        let lends = way == Way::Alias || matches!(self.plan.prompt_memory, PromptMemory::Loan { .. });
        // A head that is freed leaves no bytes to the arena.
        let in_head = if self.plan.slab.mode == HeadAliasMode::Overlay { head } else { Bytes::ZERO };
        let (table, slots) = (&self.plan.slot_table, self.plan.slots);
        let lent_slots = if lends { table.covering(slots, arena.saturating_sub(in_head)).unwrap_or(slots) } else { 0 };
        let (read_s, longest_block_s) = self.blocks_s(size, lent_slots);
        // What was never measured is too uncertain to cut a block for.
        let longest_block_s = if self.costs.is_measured() { longest_block_s } else { 0.0 };
        let home_s = self.costs.link_s((table.last(lent_slots, slots) + head).0 as f64);
        Some(Candidate { way, size, seconds: read_s + home_s + LOAN_S, longest_block_s })
    }

    fn wide(&self) -> Option<Candidate> {
        let rows = u32::try_from(self.reading.tokens).ok().filter(|&rows| rows <= self.plan.wide_rows)?;
        let size = PromptSize { ring_slots: 0, ..PromptSize::chunk(rows) };
        let (seconds, _) = self.blocks_s(size, 0);
        Some(Candidate { way: Way::Wide, size, seconds, longest_block_s: 0.0 })
    }

    fn windows(&self) -> Candidate {
        let tokens = self.reading.tokens;
        let most = self.plan.window_rows as usize;
        let missed = |rows: usize| self.touched(rows as f64) * self.absent_layer_bytes(0) * f64::from(self.model.n_layer);
        let n_layer = f64::from(self.model.n_layer);
        let window_s = |rows: usize| match self.costs.window_s(rows, |from, to| missed(to) - missed(from)) {
            Some(seconds) => seconds,
            // A few rows are at least as much work as they are in a chunk.
            None => {
                let n_experts = self.touched(rows as f64) * f64::from(self.model.n_expert);
                let experts_s = self.costs.experts_s(n_experts, rows as f64 * f64::from(self.model.n_expert_used));
                self.costs.link_s(missed(rows)) + n_layer * (self.costs.linear_s(1.0, rows as f64) + experts_s)
            }
        };
        let (full, rest) = (tokens / most, tokens % most);
        let seconds = full as f64 * window_s(most) + if rest > 0 { window_s(rest) } else { 0.0 };
        let rows = u32::try_from(tokens.min(most)).expect("a window is short");
        Candidate { way: Way::Windows, size: PromptSize { ring_slots: 0, ..PromptSize::chunk(rows) }, seconds, longest_block_s: 0.0 }
    }
}

/// The candidates with their times, for the log.
fn compared(candidates: &[Candidate], tokens: usize) -> String {
    let described = |candidate: &Candidate| {
        let Candidate { way, size, seconds, .. } = *candidate;
        let blocks = tokens.div_ceil(size.block as usize);
        match way {
            Way::Windows | Way::Wide => format!("{way} {}", shown_s(seconds)),
            Way::Loan | Way::Alias if size.chunk == size.block => format!("{way} {} ({blocks} x {})", shown_s(seconds), size.block),
            Way::Loan | Way::Alias => format!("{way} {} ({blocks} x {} in chunks of {})", shown_s(seconds), size.block, size.chunk),
        }
    };
    format!("predicted: {}", candidates.iter().map(described).collect::<Vec<_>>().join(", "))
}

/// Seconds with three digits.
fn shown_s(seconds: f64) -> String {
    match seconds {
        small if small < 0.1 => format!("{:.2} ms", small * 1e3),
        medium if medium < 10.0 => format!("{medium:.2} s"),
        large => format!("{large:.1} s"),
    }
}

/// Chooses the way for `reading`, the tokens before the last one.
#[must_use]
pub fn choose(plan: &Plan, model: ModelTraffic<'_>, costs: &Costs, settings: &EngineSettings, reading: Reading) -> Choice {
    let chosen = |candidate: Candidate, reason: String| {
        let Candidate { way, size: PromptSize { chunk, block, ring_slots, .. }, seconds, .. } = candidate;
        Choice { way, chunk, block, ring_slots, predicted_s: seconds, reason }
    };
    let Reading { tokens, .. } = reading;
    let limits = SizeLimits::new(settings, plan.ctx_tokens, model.block_step);
    let is_block_chosen = settings.block == BlockSetting::Auto;
    let predictor = Predictor { plan, model, costs, limits, is_block_chosen, reading };
    if tokens == 0 {
        let nothing =
            Candidate { way: Way::Windows, size: PromptSize { ring_slots: 0, ..PromptSize::chunk(1) }, seconds: 0.0, longest_block_s: 0.0 };
        return chosen(nothing, "the last prompt token is always a window".to_owned());
    }
    let alias = predictor.in_blocks(Way::Alias);
    if let (AliasThreshold::Tokens(least), Some(alias)) = (settings.alias_min_tokens, alias)
        && tokens + 1 >= least as usize
    {
        return chosen(alias, format!("--alias-min-tokens {least}; {}", compared(&[alias], tokens)));
    }
    let may_be_short = match settings.short_read {
        ShortRead::Auto => tokens <= SHORT_READ_TOKENS,
        ShortRead::Tokens(tokens_max) => tokens < tokens_max as usize,
    };
    let candidates: Vec<Candidate> = [
        predictor.in_blocks(Way::Loan),
        alias.filter(|_| settings.alias_min_tokens == AliasThreshold::Auto),
        predictor.wide().filter(|_| may_be_short),
        // Deterministic runs read all but the last token by the prompt path's arithmetic, whatever it costs.
        (may_be_short && !settings.deterministic).then(|| predictor.windows()),
    ]
    .into_iter()
    .flatten()
    .collect();
    match candidates.iter().copied().reduce(Candidate::better) {
        Some(best) => chosen(best, compared(&candidates, tokens)),
        // Only a start with too little memory to read while the head is kept comes here, below its alias threshold.
        None => match alias {
            Some(alias) => chosen(alias, "the head must be lent: nothing else has room".to_owned()),
            None => chosen(predictor.windows(), "no room for prompt buffers".to_owned()),
        },
    }
}

#[cfg(test)]
#[path = "way_tests.rs"]
mod tests;
