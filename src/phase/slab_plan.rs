//! How the plan divides the slab: where the head lies, and which slots lie in pieces that can be given up.

use std::sync::Arc;

use super::{PhaseBytes, Plan, PlanOwners, Planner, PromptMemory};
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::phase::prompt_sizes::SizeLimits;
use crate::phase::slab::SlabSizes;
use crate::settings::{CacheSizing, HeadAliasMode};
use crate::units::Bytes;

/// One slot in this many may be in pieces.
const PIECES_SHARE: u32 = 4;
/// A piece has one slot in this many, and at least one.
const PIECE_SHARE: u32 = 16;

/// The division.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlabPlan {
    /// How the head is lent.
    pub mode: HeadAliasMode,
    /// What the number of slots leaves room for.
    pub sizing: CacheSizing,
    /// Pieces that are never lent.
    pub pieces: u32,
    /// Slots of a piece.
    pub piece_slots: u32,
}

impl SlabPlan {
    /// Slots outside the pieces: only these can be lent.
    #[must_use]
    pub fn main_slots(&self, slots: u32) -> u32 {
        slots - self.pieces * self.piece_slots
    }
}

impl Plan {
    /// Sizes of the slab's allocations.
    #[must_use]
    pub fn slab_sizes(&self) -> SlabSizes {
        let SlabPlan { mode, pieces, piece_slots, .. } = self.slab;
        SlabSizes { slots: self.slots, table: Arc::clone(&self.slot_table), head_bytes: self.head_bytes, mode, pieces, piece_slots }
    }

    /// What stays free while tokens are written, graphs and all.
    #[must_use]
    pub fn decode_free_bytes(&self) -> Bytes {
        self.limit_bytes.saturating_sub(self.decode.total_bytes)
    }

    /// What is kept free in either phase: the reserve, or nothing where the cache is sized without the head.
    #[must_use]
    pub fn kept_free_bytes(&self) -> Bytes {
        match self.slab.sizing {
            CacheSizing::Exact => self.reserve_bytes,
            CacheSizing::Seed => Bytes::ZERO,
        }
    }

    /// Bytes of the arena while the head is lent: all slots of the main part but one, and the head where it lies there.
    #[must_use]
    pub fn alias_arena_bytes(&self) -> Bytes {
        let head = if self.slab.mode == HeadAliasMode::Overlay { self.head_bytes } else { Bytes::ZERO };
        head + self.slot_table.last(self.slab.main_slots(self.slots) - 1, self.slots)
    }
}

impl Planner<'_> {
    /// Puts slots into pieces that no prompt could make use of: at most a quarter of all, none that a loan with the head kept may take, never
    /// the last kept one, and with the head lent only where the longest block fits in its best form beside them.
    pub(super) fn with_pieces(&self, mut plan: Plan) -> Plan {
        let kept_bytes: Bytes = plan.prefill.owners.iter().filter(|part| part.owner == "kept slots").map(|part| part.bytes).sum();
        let kept = plan.slot_table.fitting(kept_bytes);
        let beside_a_loan = match plan.prompt_memory {
            PromptMemory::Loan { slots_max } => plan.slots - slots_max,
            PromptMemory::Owned { .. } | PromptMemory::None => plan.slots,
        };
        let most = kept.saturating_sub(1).min(beside_a_loan).min(plan.slots / PIECES_SHARE);
        plan.slab.piece_slots = (plan.slots / PIECE_SHARE).max(1);
        plan.slab.pieces = most / plan.slab.piece_slots;
        let limits = SizeLimits::new(self.settings, plan.ctx_tokens, self.shape.block_step());
        let longest = || [limits.block_max, limits.chunk_max].into_iter().flat_map(|block| limits.sizes(block));
        while plan.slab.pieces > 0 && self.settings.head_alias && !longest().all(self.fits(plan.alias_room())) {
            plan.slab.pieces -= 1;
        }
        plan
    }

    /// Bytes that the head adds to the arena.
    pub(super) fn head_in_arena(&self, head: Bytes) -> Bytes {
        match self.settings.head_alias_mode {
            HeadAliasMode::Overlay => head,
            HeadAliasMode::Realloc => Bytes::ZERO,
        }
    }

    /// Bytes beside the slab in which prompt buffers may continue while the head is lent: those that are owned anyway, or, where the head
    /// is freed, its own and what nobody uses.
    pub(super) fn spill_room(&self, owned: Bytes, head: Bytes, unused: Bytes) -> Bytes {
        match (self.settings.head_alias_mode, self.device.borrow_spill) {
            (_, false) => Bytes::ZERO,
            (HeadAliasMode::Overlay, true) => owned,
            (HeadAliasMode::Realloc, true) => head + unused,
        }
    }

    /// Bytes of the fewest of the last of `slots` slots that cover `bytes`, which fit them.
    pub(super) fn lent_bytes(&self, slots: u32, bytes: Bytes) -> Bytes {
        self.table.last(self.table.covering(slots, bytes).expect("what was found to fit"), slots)
    }

    /// Owners while prompt buffers for `size` lie in lent slots and continue beside the slab, the head being freed.
    pub(super) fn freed_head_owners(&self, size: PromptSize, room: PromptRoom, slots: u32, owned: Bytes) -> PlanOwners {
        let slots_total = self.table.total(slots);
        let Some(layout) = PromptLayout::new(self.shape, self.weights, self.arithmetic, size, room) else {
            return vec![("kept slots", slots_total), ("prompt buffers", owned)];
        };
        let lent = self.lent_bytes(slots, layout.arena_bytes);
        vec![
            ("kept slots", slots_total - lent),
            ("prompt buffers", layout.arena_bytes + owned),
            ("prompt buffers beside the slab", layout.spill_bytes),
            ("lent, not needed", lent - layout.arena_bytes),
        ]
    }
}

/// The sum that gave the number of slots, in bytes, term by term, and what decided it.
pub(crate) fn slot_terms(plan: &Plan) -> String {
    let counted = |owner: &&super::OwnerBytes| match plan.slab.sizing {
        CacheSizing::Exact => owner.owner != "expert slots",
        CacheSizing::Seed => !["expert slots", "output head", "captured graphs"].contains(&owner.owner),
    };
    let PhaseBytes { owners, .. } = &plan.decode;
    let terms: Vec<String> = owners.iter().filter(counted).map(|part| format!(" - {} {}", part.bytes.0, part.owner)).collect();
    let taken: Bytes = owners.iter().filter(counted).map(|part| part.bytes).sum();
    let left = plan.budget_bytes.saturating_sub(taken);
    let over = left.saturating_sub(plan.slot_table.total(plan.slots));
    let classes = plan.slot_table.classes(plan.slots).filter(|&(_, count)| count > 0);
    let slots: Vec<String> = classes.map(|(bytes, count)| format!("{count} slots x {}", bytes.0)).collect();
    format!(
        "{} {} - {} reserve{} = {} = {} + {} over",
        plan.limit_bytes.0,
        plan.limit_decided_by,
        plan.reserve_bytes.0,
        terms.concat(),
        left.0,
        slots.join(" + "),
        over.0
    )
}
