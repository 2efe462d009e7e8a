//! The cache sized as the founding document sizes it, to compare with: with the head out, so that head and graphs come out of the
//! reserve when they are there.
//!
//! ```text
//! slots : as many as fit limit - reserve - dense weights - KV cache - decode buffers, and the device with head and graphs beside them
//! chunk : the largest of 2,048, 1,536, 1,024 and 512 whose buffers fit all slots but one and what is free then, with 512 MiB to spare;
//!         where context or settings allow fewer than 512, as many as they allow
//! ```
//! Prompts are read with the head lent, whatever their length. Spare and ladder are the document's constants: a device on which no chunk
//! of the ladder fits is refused, and `--cache-sizing exact` does better there.

use super::slab_plan::SlabPlan;
use super::{PhaseBytes, Plan, Planner, Shortage};
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::settings::{CacheSizing, ChunkSetting, HeadAliasMode};
use crate::units::Bytes;

/// Chunks that are tried.
const LADDER: [u32; 4] = [2048, 1536, 1024, 512];
/// What the prompt buffers leave of borrowed slots and free memory.
const SPARE: Bytes = Bytes::mib(512);

impl Planner<'_> {
    /// As [`Planner::attempt`], by the document's rules.
    pub(super) fn seed_attempt(&self, ctx_tokens: u32, window_rows: u32, budget: Bytes) -> Result<Plan, Shortage> {
        let resident = self.resident(ctx_tokens, window_rows);
        let first_slot = self.table.total(1);
        let counted = resident.total_without_head - resident.graphs;
        let at_least_one = |room: Option<Bytes>, needed| room.filter(|room| *room >= first_slot).ok_or(Shortage::Resident { needed });
        let room = at_least_one(budget.checked_sub(counted), counted + first_slot)?;
        let all = resident.total_without_head + resident.head;
        // Where a driver pages out what does not fit, this one has to hold: there is nothing beyond the device.
        let holds = at_least_one(self.limit.checked_sub(all), all + first_slot)?;
        let fit = self.table.fitting(holds);
        let (slots, decided_by) = match self.slots(room)? {
            (slots, _) if slots > fit => (fit, "the device, with head and graphs back and nothing left"),
            (slots, "the budget") => (slots, "the budget with the head out"),
            decided => decided,
        };
        let slots_total = self.table.total(slots);
        let borrowed = self.table.span(1, slots);
        let free_head_out = self.limit.saturating_sub(resident.total_without_head + slots_total);
        let room = match self.settings.head_alias_mode {
            HeadAliasMode::Overlay => PromptRoom::single(borrowed + resident.head),
            HeadAliasMode::Realloc => PromptRoom { arena: borrowed, spill: free_head_out },
        };
        let most = (borrowed + free_head_out).saturating_sub(SPARE);
        let fits = |chunk: u32| {
            let size = PromptSize::chunk(chunk);
            self.prompt_bytes(chunk) <= most && PromptLayout::new(self.shape, self.weights, self.arithmetic, size, room).is_some()
        };
        let limit = self.chunk_limit(ctx_tokens);
        let smallest_step = LADDER[LADDER.len() - 1];
        let chunk = match self.settings.chunk {
            ChunkSetting::Tokens(_) => Some(limit).filter(|&chunk| fits(chunk)),
            ChunkSetting::Auto { .. } if limit < smallest_step => Some(limit).filter(|&chunk| fits(chunk)),
            ChunkSetting::Auto { .. } => LADDER.into_iter().find(|&chunk| chunk <= limit && fits(chunk)),
        };
        let smallest = if let ChunkSetting::Tokens(_) = self.settings.chunk { limit } else { limit.min(smallest_step) };
        // What is free beside the slab is of use only where the buffers may continue there.
        let left = most.min(room.arena + room.spill);
        let chunk = chunk.ok_or_else(|| Shortage::SeedChunk { chunk: smallest, needed: self.prompt_bytes(smallest), left })?;
        let size = PromptSize::chunk(chunk);
        let common = self.resident_owners(&resident);
        let mut decode = common.clone();
        decode.extend([("output head", resident.head), ("expert slots", slots_total)]);
        let mut prefill = common;
        prefill.extend(match self.settings.head_alias_mode {
            HeadAliasMode::Realloc => self.freed_head_owners(size, room, slots, Bytes::ZERO),
            HeadAliasMode::Overlay => {
                let needed = self.prompt_bytes(chunk);
                let lent = self.lent_bytes(slots, needed.saturating_sub(resident.head));
                let unused = resident.head + lent - needed;
                vec![("kept slots", slots_total - lent), ("prompt buffers", needed), ("lent, not needed", unused)]
            }
        });
        let plan = Plan {
            slots,
            spill_room: room.spill,
            alias_chunk: chunk,
            alias_block: chunk,
            chunk,
            block: chunk,
            decode: PhaseBytes::new(decode),
            prefill: PhaseBytes::new(prefill),
            slots_decided_by: decided_by,
            prompt_decided_by: "the founding document's sizing: prompts are read with the head lent",
            slab: SlabPlan { mode: self.settings.head_alias_mode, sizing: CacheSizing::Seed, ..SlabPlan::default() },
            ..self.base(&resident, ctx_tokens, window_rows, budget)
        };
        Ok(self.with_pieces(plan))
    }
}
