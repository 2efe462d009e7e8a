//! Where prompt buffers lie while the head is kept: in lent slots, in memory of their own, or nowhere.

use super::{KEPT_SLOTS, LENT_SHARE_PERCENT, LOAN_CHUNK_MIN, Planner, PromptMemory};
use crate::model::layout::PromptRoom;
use crate::settings::ExpertCache;
use crate::units::Bytes;

/// Where prompt buffers lie while the head is kept.
pub(super) struct PromptChoice {
    pub(super) memory: PromptMemory,
    pub(super) kept_head_chunk: u32,
    pub(super) slots: u32,
    pub(super) slots_before: u32,
    pub(super) decided_by: &'static str,
}

impl Planner<'_> {
    /// Decides where prompt buffers lie while the head is kept, taking slots back where nothing can be lent.
    pub(super) fn prompt(&self, room: Bytes, slots: u32, ctx_tokens: u32, alias_arena: Bytes) -> PromptChoice {
        let spare = room.saturating_sub(self.table.total(slots));
        let slots_max = lendable_slots(slots, self.shape.n_routed_experts());
        let loan_chunk = self.largest_chunk(PromptRoom::single(self.table.last(slots_max, slots)), ctx_tokens);
        let owned_chunk = self.largest_chunk(PromptRoom::single(spare), ctx_tokens);
        // What nobody else can use may hold the longest block, too.
        let owned_bytes = |chunk| {
            let longest = self.largest_block(PromptRoom::single(spare), ctx_tokens).map_or(Bytes::ZERO, |size| self.size_bytes(size));
            self.prompt_bytes(chunk).max(longest)
        };
        let wanted = LOAN_CHUNK_MIN.min(self.chunk_limit(ctx_tokens));
        let choice = |memory, kept_head_chunk, slots_now, decided_by| PromptChoice {
            memory,
            kept_head_chunk,
            slots: slots_now,
            slots_before: slots,
            decided_by,
        };
        if owned_chunk >= wanted.max(loan_chunk) {
            let memory = PromptMemory::Owned { bytes: owned_bytes(owned_chunk) };
            return choice(memory, owned_chunk, slots, "VRAM beyond the slots is free: prompt buffers are owned");
        }
        if loan_chunk >= wanted {
            return choice(PromptMemory::Loan { slots_max }, loan_chunk, slots, "the coldest slots are lent");
        }
        if self.largest_chunk(PromptRoom::single(alias_arena), ctx_tokens) >= wanted {
            return choice(PromptMemory::None, 0, slots, "too few slots to lend: prompts are read with the head lent");
        }
        if self.expert_cache != ExpertCache::Auto {
            // A number of slots that was asked for is kept, so prompts take of them what they must.
            let slots_max = slots_lent_at_most(slots);
            let chunk = self.largest_chunk(PromptRoom::single(self.table.last(slots_max, slots)), ctx_tokens);
            return if owned_chunk >= chunk.max(1) {
                let memory = PromptMemory::Owned { bytes: owned_bytes(owned_chunk) };
                choice(memory, owned_chunk, slots, "VRAM beyond the slots is free: prompt buffers are owned")
            } else if chunk > 0 {
                choice(PromptMemory::Loan { slots_max }, chunk, slots, "--expert-cache is small: up to nine slots in ten are lent")
            } else {
                choice(PromptMemory::None, 0, slots, "no room for prompt buffers while the head is kept")
            };
        }
        self.shared_with_owned(room, slots, ctx_tokens)
    }

    /// Owned prompt buffers in about half of what `slots` would take; what they leave goes to slots again.
    pub(super) fn shared_with_owned(&self, room: Bytes, slots: u32, ctx_tokens: u32) -> PromptChoice {
        let slots_in = |bytes: Bytes| self.table.fitting(bytes).min(slots);
        let wanted = LOAN_CHUNK_MIN.min(self.chunk_limit(ctx_tokens));
        let fewer = (slots / 2).min(slots_in(room.saturating_sub(self.prompt_bytes(wanted)))).max(1);
        let chunk = self.largest_chunk(PromptRoom::single(room.saturating_sub(self.table.total(fewer))), ctx_tokens);
        let choice = |memory, slots_now, decided_by| PromptChoice {
            memory,
            kept_head_chunk: chunk,
            slots: slots_now,
            slots_before: slots,
            decided_by,
        };
        if chunk == 0 {
            return choice(PromptMemory::None, slots, "no room for prompt buffers while the head is kept");
        }
        let bytes = self.prompt_bytes(chunk);
        let slots_now = slots_in(room.saturating_sub(bytes)).max(1);
        choice(PromptMemory::Owned { bytes }, slots_now, "too few slots to lend: prompt buffers are owned")
    }
}

/// Slots that a loan with the head kept may take: at most 90 %, keeping 128 or a quarter of the model's experts.
#[must_use]
pub fn lendable_slots(slots: u32, n_routed_experts: u32) -> u32 {
    let keep = KEPT_SLOTS.min(n_routed_experts.div_ceil(4));
    slots_lent_at_most(slots).min(slots.saturating_sub(keep))
}

/// 90 % of the slots, and never all of them.
pub(super) fn slots_lent_at_most(slots: u32) -> u32 {
    let share = u64::from(slots) * LENT_SHARE_PERCENT / 100;
    u32::try_from(share).unwrap_or(slots).min(slots.saturating_sub(1))
}
