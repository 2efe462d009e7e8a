//! The figures of a request: the JSON object of the contract and a few lines for people.

use serde::Serialize;

use crate::engine::drafts::DraftCounters;
use crate::engine::way::Way;
use crate::engine::{Finish, Outcome};
use crate::experts::LinkBytes;
use crate::units::{Bytes, TokenId};

/// What `run --json` prints; names and meaning are a contract.
#[derive(Debug, Serialize)]
pub struct RunReport<'a> {
    prompt_tokens: usize,
    reused_tokens: usize,
    tokens: &'a [TokenId],
    text: &'a str,
    finish: Finish,
    way: Way,
    way_reason: &'a str,
    chunk: u32,
    block: u32,
    slots: u32,
    slots_lent: u32,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    lowest_free_bytes: Option<Bytes>,
    head_reloads: u64,
    head_reload_ms: f64,
    head_wait_ms: f64,
    arena_bytes_in_head: Bytes,
    spill_bytes: Bytes,
    link_bytes: Bytes,
    hits: u64,
    misses: u64,
    prompt_hits: u64,
    prompt_misses: u64,
    swaps: u64,
    link_bytes_by_kind: LinkBytes,
    drafts_offered: u64,
    drafts_accepted: u64,
    drafts: DraftCounters,
    recaptures: u64,
}

impl<'a> RunReport<'a> {
    /// The figures of `outcome`.
    pub fn new(outcome: &'a Outcome, text: &'a str) -> Self {
        Self {
            prompt_tokens: outcome.prompt_tokens,
            reused_tokens: outcome.reused_tokens,
            tokens: &outcome.tokens,
            text,
            finish: outcome.finish,
            way: outcome.choice.way,
            way_reason: &outcome.choice.reason,
            chunk: outcome.choice.chunk,
            block: outcome.choice.block,
            slots: outcome.slots,
            slots_lent: outcome.phases.slots_lent,
            prefill_tokens_per_s: outcome.prefill_tokens_per_s(),
            decode_tokens_per_s: outcome.decode_tokens_per_s(),
            lowest_free_bytes: outcome.lowest_free,
            head_reloads: outcome.phases.head_reloads,
            head_reload_ms: outcome.phases.head_reload_ms,
            head_wait_ms: outcome.phases.head_wait_ms,
            arena_bytes_in_head: outcome.phases.arena_bytes_in_head,
            spill_bytes: outcome.spill_bytes,
            link_bytes: outcome.experts.link_bytes,
            hits: outcome.experts.hits,
            misses: outcome.experts.misses,
            prompt_hits: outcome.experts.prompt_hits,
            prompt_misses: outcome.experts.prompt_misses,
            swaps: outcome.experts.swaps,
            link_bytes_by_kind: outcome.experts.link,
            drafts_offered: outcome.drafts.offered(),
            drafts_accepted: outcome.drafts.accepted(),
            drafts: outcome.drafts,
            recaptures: outcome.recaptures,
        }
    }
}

/// What became of drafts, for people; empty where none was offered.
fn drafts_told(drafts: &DraftCounters) -> String {
    let (Some(accepted), Some(tokens)) = (drafts.accepted_per_drafted_window(), drafts.tokens_per_window()) else { return String::new() };
    format!(
        "\n{} of {} drafts accepted, {accepted:.2} a window that had any; {tokens:.2} tokens a window",
        drafts.accepted(),
        drafts.offered()
    )
}

/// Two lines for stderr, and a third where there were drafts.
pub fn summary(outcome: &Outcome) -> String {
    let lent = match outcome.choice.way {
        Way::Windows | Way::Wide => "nothing lent".to_owned(),
        Way::Loan => format!("head kept, {} slots lent", outcome.phases.slots_lent),
        Way::Alias => format!(
            "{} of the prompt buffers in the head's range, {} slots lent, head back in {:.1} ms",
            outcome.phases.arena_bytes_in_head, outcome.phases.slots_lent, outcome.phases.head_reload_ms
        ),
    };
    let sizes = match (outcome.choice.block, outcome.choice.chunk) {
        (block, chunk) if block > chunk => format!("blocks of {block}, chunks of {chunk}"),
        (_, chunk) => format!("chunks of {chunk}"),
    };
    let uses = (outcome.experts.hits + outcome.experts.misses).max(1);
    let hit_percent = outcome.experts.hits * 100 / uses;
    let free = outcome.lowest_free.map_or_else(|| "unknown".to_owned(), |free| free.to_string());
    format!(
        "read {} tokens at {:.1} tok/s by way of {} in {sizes} ({lent})\nwrote {} tokens at {:.1} tok/s; {} slots, {hit_percent} % of expert uses from VRAM, lowest free {free}{}",
        outcome.prompt_tokens,
        outcome.prefill_tokens_per_s(),
        outcome.choice.way,
        outcome.tokens.len(),
        outcome.decode_tokens_per_s(),
        outcome.slots,
        drafts_told(&outcome.drafts),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::drafts::DraftSource;

    #[test]
    fn drafts_are_told_of_where_there_were_any() {
        let mut drafts = DraftCounters::default();
        drafts.note(None);
        assert_eq!(drafts_told(&drafts), "");
        drafts.note(Some((DraftSource::Mtp, 3, 2)));
        assert_eq!(drafts_told(&drafts), "\n2 of 3 drafts accepted, 2.00 a window that had any; 2.00 tokens a window");
    }
}
