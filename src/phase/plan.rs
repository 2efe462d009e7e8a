//! The memory plan: bytes per owner in both phases, made before anything is allocated.
//!
//! ```text
//! limit    = min(total - use by others, system budget, --vram-mib)
//! budget   = limit - reserve
//! resident = context + dense weights + KV cache + decode buffers + captured graphs (+ prompt buffers of their own)
//! decode   : resident + head + slots                                        <= budget
//! prefill  : resident + (head, unless lent) + kept slots + prompt buffers   <= budget
//! ```
//! The prompt buffers lie in lent slots, with the head's bytes beside them in alias mode, so both sums come to the same total and
//! the reserve is kept in either phase. See `docs/memory-plan.md` for the rules with examples.

#[path = "plan_search.rs"]
mod plan_search;
#[path = "prompt_memory.rs"]
mod prompt_memory;
#[path = "resident_plan.rs"]
mod resident_plan;
#[path = "seed_sizing.rs"]
mod seed_sizing;
#[path = "slab_plan.rs"]
mod slab_plan;

use std::sync::Arc;

use serde::Serialize;

pub use super::plan_error::{PlanError, WayOut};
pub use prompt_memory::lendable_slots;
use prompt_memory::{PromptChoice, slots_lent_at_most};
pub use resident_plan::draft_vocab;
pub use slab_plan::SlabPlan;
pub(crate) use slab_plan::slot_terms;

use crate::backend::WINDOW_ROWS_MAX;
use crate::backend::op::KvFormat;
use crate::experts::SlotTable;
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::model::{Arithmetic, ModelShape, ModelWeights};
use crate::phase::prompt_sizes::SizeLimits;
use crate::settings::{CacheSizing, EngineSettings, ExpertCache, HeadAliasMode, KvType};
use crate::units::Bytes;

/// Rows of the largest window where the budget allows it.
pub const WINDOW_ROWS: u32 = WINDOW_ROWS_MAX;
/// A loan that affords fewer tokens than this is not worth lending for: the prompt buffers are then owned.
const LOAN_CHUNK_MIN: u32 = 32;
/// Chunk that a context must leave room for to be chosen unasked, or a sixteenth of the model's own context.
const USEFUL_CHUNK: u32 = 512;
/// Slots that a loan keeps, unless a quarter of the model's experts is less.
const KEPT_SLOTS: u32 = 128;
/// Largest reserve that is kept unasked.
const RESERVE_MAX: Bytes = Bytes::mib(256);
/// Shortest context that is chosen while any other can be had, for models that can do with more.
const CONTEXT_LADDER_END: u32 = 8192;
/// Contexts below this are no advice.
const CONTEXT_ADVISED_MIN: u32 = 128;
/// Share of the slots that a loan takes at most, in percent.
const LENT_SHARE_PERCENT: u64 = 90;

/// What a device has for us, before our own settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceBudget {
    /// All memory of the device.
    pub total: Bytes,
    /// What other programs hold.
    pub used_by_others: Bytes,
    /// What the system lets this process use, where it says.
    pub os_budget: Option<Bytes>,
    /// What this process itself holds of the device, or will, before it allocates anything: the driver's context and the kernels.
    pub context_bytes: Bytes,
    /// Device memory of one node of a captured graph.
    pub graph_node_bytes: Bytes,
    /// Prompt buffers may continue beside the slab.
    pub borrow_spill: bool,
    /// As [`Capabilities::halves_max`](crate::backend::Capabilities::halves_max).
    pub halves_max: Option<Bytes>,
}

/// What the next longer context of the ladder would leave, beside one that was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongerContext {
    /// Its tokens.
    pub ctx_tokens: u32,
    /// Slots that it would leave; `None` where it does not fit.
    pub slots: Option<u32>,
    /// The same with KV in q8_0, where that is not chosen already.
    pub slots_q8_0: Option<u32>,
}

/// Where the prompt buffers lie when the head is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptMemory {
    /// In lent slots, at most this many.
    Loan {
        /// Slots that may be lent.
        slots_max: u32,
    },
    /// In an allocation of their own, for the whole run.
    Owned {
        /// Its size.
        bytes: Bytes,
    },
    /// Nowhere: this start reads prompts with the head lent only.
    None,
}

/// One owner's share of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OwnerBytes {
    /// Who.
    pub owner: &'static str,
    /// How much.
    pub bytes: Bytes,
}

/// All owners of a phase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseBytes {
    /// Shares, in the order of the formula.
    pub owners: Vec<OwnerBytes>,
    /// Their sum.
    pub total_bytes: Bytes,
}

impl PhaseBytes {
    fn new(owners: Vec<(&'static str, Bytes)>) -> Self {
        let owners: Vec<_> = owners.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO).collect();
        let total_bytes = owners.iter().map(|(_, bytes)| *bytes).sum();
        Self { owners: owners.into_iter().map(|(owner, bytes)| OwnerBytes { owner, bytes }).collect(), total_bytes }
    }
}

/// A made plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What the device has for us at most.
    pub limit_bytes: Bytes,
    /// Which term decided that.
    pub limit_decided_by: &'static str,
    /// What stays free.
    pub reserve_bytes: Bytes,
    /// What may be used.
    pub budget_bytes: Bytes,
    /// Tokens of context.
    pub ctx_tokens: u32,
    /// Type of the KV cache.
    pub kv_format: KvFormat,
    /// What more context would cost, where the context was chosen and is not the model's own.
    pub longer_context: Option<LongerContext>,
    /// How activations are rounded.
    pub arithmetic: Arithmetic,
    /// The driver's context.
    pub context_bytes: Bytes,
    /// Dense weights.
    pub dense_bytes: Bytes,
    /// KV cache of all layers.
    pub kv_bytes: Bytes,
    /// Recurrent state of all delta nets.
    pub state_bytes: Bytes,
    /// The draft layer's own output head; none where it uses the model's.
    pub draft_head_bytes: Bytes,
    /// Buffers of the decode path.
    pub window_bytes: Bytes,
    /// Captured windows.
    pub graph_bytes: Bytes,
    /// Most rows of a wide window, by which short prompts are read with nothing lent; 0 where it has no room.
    pub wide_rows: u32,
    /// Buffers of the wide window.
    pub wide_bytes: Bytes,
    /// Rows of the largest window; one of each size up to it is captured.
    pub window_rows: u32,
    /// The output head, rounded up to the device's alignment.
    pub head_bytes: Bytes,
    /// VRAM slots.
    pub slots: u32,
    /// Bytes of a slot of the largest class.
    pub slot_bytes: Bytes,
    /// Sizes of all slots, of which the first so many are used.
    pub slot_table: Arc<SlotTable>,
    /// Prompt buffers without the alias.
    pub prompt_memory: PromptMemory,
    /// Bytes beside the slab in which prompt buffers may continue while the head is lent.
    pub spill_room: Bytes,
    /// Largest chunk without the alias where a block is one chunk; 0 where there is none.
    pub kept_head_chunk: u32,
    /// Largest block without the alias.
    pub kept_head_block: u32,
    /// Largest chunk with the head lent where a block is one chunk; 0 without `--prefill-head-alias`.
    pub alias_chunk: u32,
    /// Largest block with the head lent.
    pub alias_block: u32,
    /// The longest chunk of either way where a block is one chunk.
    pub chunk: u32,
    /// The longest block of either way.
    pub block: u32,
    /// Phase of writing.
    pub decode: PhaseBytes,
    /// Phase of reading, by the way that affords the longest chunk.
    pub prefill: PhaseBytes,
    /// Which term decided the number of slots.
    pub slots_decided_by: &'static str,
    /// Which rule decided where prompt buffers lie.
    pub prompt_decided_by: &'static str,
    /// How the slab is divided.
    pub slab: SlabPlan,
}

/// Names and shares of a phase while they are collected.
type PlanOwners = Vec<(&'static str, Bytes)>;

/// All that goes into the sum, with the fixed questions answered.
#[derive(Clone, Copy)]
struct Planner<'a> {
    shape: &'a ModelShape,
    weights: &'a ModelWeights,
    settings: &'a EngineSettings,
    device: DeviceBudget,
    kv_format: KvFormat,
    arithmetic: Arithmetic,
    limit: Bytes,
    limit_decided_by: &'static str,
    asked_reserve: Option<Bytes>,
    expert_cache: ExpertCache,
    table: &'a Arc<SlotTable>,
    /// Rows of the largest window, where they are settled already.
    window_rows: Option<u32>,
}

/// Why an attempt failed, before it is known what would help.
enum Shortage {
    Reserve,
    Resident { needed: Bytes },
    Slots { asked: u32, needed: Bytes, left: Bytes, fit: u32 },
    PromptRoom { needed: Bytes, left: Bytes },
    SeedChunk { chunk: u32, needed: Bytes, left: Bytes },
}

impl Plan {
    /// Plans both phases. Loads and allocates nothing.
    ///
    /// # Errors
    /// [`PlanError`] where no plan can keep the budget, naming what would.
    pub fn new(shape: &ModelShape, weights: &ModelWeights, device: DeviceBudget, settings: &EngineSettings) -> Result<Self, PlanError> {
        Self::with_windows(shape, weights, device, settings, None)
    }

    /// As [`Plan::new`], with windows of up to `window_rows` rows where that is settled: their memory is taken already.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_windows(
        shape: &ModelShape,
        weights: &ModelWeights,
        device: DeviceBudget,
        settings: &EngineSettings,
        window_rows: Option<u32>,
    ) -> Result<Self, PlanError> {
        let device_limit = device.total.saturating_sub(device.used_by_others);
        let (limit, limit_decided_by) = [
            (settings.vram, "--vram-mib"),
            (device_limit, "what other programs leave of the device"),
            (device.os_budget.unwrap_or(device_limit), "the system's budget"),
        ]
        .into_iter()
        .min_by_key(|(bytes, _)| *bytes)
        .expect("three terms");
        if device.os_budget.map_or(device_limit, |os_budget| os_budget.min(device_limit)) == Bytes::ZERO {
            return Err(PlanError::DeviceFull { total: device.total, used_by_others: device.used_by_others });
        }
        if settings.head_alias && settings.head_alias_mode == HeadAliasMode::Realloc && !device.borrow_spill {
            return Err(PlanError::NoSpill);
        }
        let kv_format = match settings.kv {
            KvType::F32 => KvFormat::F32,
            KvType::F16 => KvFormat::F16,
            KvType::Q8_0 => KvFormat::Q8_0,
        };
        let arithmetic = Arithmetic::of(settings.activations, device.halves_max);
        let reserve = settings.vram_reserve;
        let expert_cache = settings.expert_cache;
        let table = &Arc::new(SlotTable::of(weights, shape.n_expert));
        Planner {
            shape,
            weights,
            settings,
            device,
            kv_format,
            arithmetic,
            limit,
            limit_decided_by,
            asked_reserve: reserve,
            expert_cache,
            table,
            window_rows,
        }
        .plan()
    }

    /// All that is neither slots nor prompt buffers, the head included.
    #[must_use]
    pub fn resident_bytes(&self) -> Bytes {
        self.context_bytes
            + self.dense_bytes
            + self.kv_bytes
            + self.state_bytes
            + self.draft_head_bytes
            + self.window_bytes
            + self.graph_bytes
            + self.wide_bytes
            + self.head_bytes
    }

    /// Memory for prompt buffers while the head is kept.
    #[must_use]
    pub fn kept_head_room(&self) -> PromptRoom {
        PromptRoom::single(match self.prompt_memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { slots_max } => self.slot_table.last(slots_max.min(self.slab.main_slots(self.slots)), self.slots),
            PromptMemory::None => Bytes::ZERO,
        })
    }

    /// Memory for prompt buffers while the head is lent: its own, all slots but one, and prompt buffers that are owned anyway.
    #[must_use]
    pub fn alias_room(&self) -> PromptRoom {
        PromptRoom { arena: self.alias_arena_bytes(), spill: self.spill_room }
    }
}

impl Planner<'_> {
    /// What stays free.
    fn reserve(&self) -> Bytes {
        self.asked_reserve.unwrap_or_else(|| RESERVE_MAX.min(Bytes(self.limit.0 / 16)))
    }

    /// Plans with the largest windows that are worth their memory. Where only smaller ones fit beside what was asked for, those are
    /// taken: windows of several rows never turn a plan into none.
    fn attempt(&self, ctx_tokens: u32) -> Result<Plan, Shortage> {
        if let Some(window_rows) = self.window_rows {
            return self.attempt_with(ctx_tokens, window_rows);
        }
        let mut window_rows = self.window_rows_worth(ctx_tokens);
        loop {
            match self.attempt_with(ctx_tokens, window_rows) {
                Err(_) if window_rows > 1 => window_rows /= 2,
                result => return result,
            }
        }
    }

    fn attempt_with(&self, ctx_tokens: u32, window_rows: u32) -> Result<Plan, Shortage> {
        let budget = self.limit.checked_sub(self.reserve()).filter(|budget| *budget > Bytes::ZERO).ok_or(Shortage::Reserve)?;
        if self.settings.head_alias && self.settings.cache_sizing == CacheSizing::Seed {
            return self.seed_attempt(ctx_tokens, window_rows, budget);
        }
        let resident = self.resident(ctx_tokens, window_rows);
        let table = self.table;
        let first_slot = table.total(1);
        let fixed = resident.total_without_head + resident.head;
        let room = budget.checked_sub(fixed).filter(|room| *room >= first_slot).ok_or(Shortage::Resident { needed: fixed + first_slot })?;
        let (wide_rows, wide_bytes) = self.wide_window(room, ctx_tokens);
        let room = room - wide_bytes;
        let (slots, slots_decided_by) = self.slots(room)?;
        let head_in_arena = self.head_in_arena(resident.head);
        let arena = |slots: u32| if self.settings.head_alias { head_in_arena + table.span(1, slots) } else { Bytes::ZERO };
        let prompt = self.prompt(room, slots, ctx_tokens, arena(slots));
        let slots = prompt.slots;
        let owned = match prompt.memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { .. } | PromptMemory::None => Bytes::ZERO,
        };
        let spill_room = self.spill_room(owned, resident.head, room.saturating_sub(table.total(slots) + owned));
        let alias_room = PromptRoom { arena: arena(slots), spill: spill_room };
        let (alias_chunk, alias_size) = match self.settings.head_alias {
            true => (self.largest_chunk(alias_room, ctx_tokens), self.largest_block(alias_room, ctx_tokens)),
            false => (0, None),
        };
        let kept_room = PromptRoom::single(match prompt.memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { slots_max } => table.last(slots_max, slots),
            PromptMemory::None => Bytes::ZERO,
        });
        let kept_size = self.largest_block(kept_room, ctx_tokens);
        let block_of = |size: Option<PromptSize>| size.map_or(0, |size| size.block);
        let chunk = prompt.kept_head_chunk.max(alias_chunk);
        if chunk == 0 {
            let spare = room.saturating_sub(table.total(slots));
            let lendable = table.last(slots_lent_at_most(slots), slots);
            let left = spare.max(lendable).max(arena(slots));
            return Err(Shortage::PromptRoom { needed: self.prompt_bytes(1), left });
        }
        let slots_total = table.total(slots);
        let mut common = self.resident_owners(&resident);
        common.push(("wide window", wide_bytes));
        let mut decode = common.clone();
        decode.extend([("output head", resident.head), ("expert slots", slots_total), ("prompt buffers", owned)]);
        let mut prefill = common;
        prefill.extend(self.prefill_owners(&prompt, kept_size, alias_size, resident.head, alias_room));
        let plan = Plan {
            wide_rows,
            wide_bytes,
            slots,
            prompt_memory: prompt.memory,
            spill_room,
            kept_head_chunk: prompt.kept_head_chunk,
            kept_head_block: block_of(kept_size),
            alias_chunk,
            alias_block: block_of(alias_size),
            chunk,
            block: block_of(kept_size).max(block_of(alias_size)),
            decode: PhaseBytes::new(decode),
            prefill: PhaseBytes::new(prefill),
            slots_decided_by: if slots == prompt.slots_before {
                slots_decided_by
            } else {
                "the budget, beside prompt buffers of their own"
            },
            prompt_decided_by: prompt.decided_by,
            slab: SlabPlan { mode: self.settings.head_alias_mode, ..SlabPlan::default() },
            ..self.base(&resident, ctx_tokens, window_rows, budget)
        };
        Ok(self.with_pieces(plan))
    }

    /// Owners of what follows the common part while a prompt is read by the way with the longest block, the alias among equals.
    fn prefill_owners(
        &self,
        prompt: &PromptChoice,
        kept_size: Option<PromptSize>,
        alias_size: Option<PromptSize>,
        head: Bytes,
        alias_room: PromptRoom,
    ) -> PlanOwners {
        let slots_total = self.table.total(prompt.slots);
        let lent_slots = |bytes: Bytes| self.lent_bytes(prompt.slots, bytes);
        let owned = match prompt.memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { .. } | PromptMemory::None => Bytes::ZERO,
        };
        let kept_block = kept_size.map_or(0, |size| size.block);
        if let Some(size) = alias_size.filter(|size| size.block >= kept_block) {
            if self.settings.head_alias_mode == HeadAliasMode::Realloc {
                return self.freed_head_owners(size, alias_room, prompt.slots, owned);
            }
            let total = self.size_bytes(size);
            let in_arena = total.min(head + self.table.span(1, prompt.slots));
            let lent = lent_slots(in_arena.saturating_sub(head));
            let unused = head + lent - in_arena;
            return vec![("kept slots", slots_total - lent), ("prompt buffers", in_arena + owned), ("lent, not needed", unused)];
        }
        if owned > Bytes::ZERO {
            return vec![("output head", head), ("kept slots", slots_total), ("prompt buffers", owned)];
        }
        let needed = kept_size.map_or(Bytes::ZERO, |size| self.size_bytes(size));
        let lent = lent_slots(needed);
        vec![("output head", head), ("kept slots", slots_total - lent), ("prompt buffers", needed), ("lent, not needed", lent - needed)]
    }

    fn slots(&self, room: Bytes) -> Result<(u32, &'static str), Shortage> {
        let routed = self.shape.n_routed_experts();
        let fit = self.table.fitting(room);
        match self.expert_cache {
            ExpertCache::Slots(asked) if asked.min(routed) > fit => {
                Err(Shortage::Slots { asked, needed: self.table.total(asked.min(routed)), left: room, fit })
            }
            ExpertCache::Slots(asked) if asked >= routed => Ok((routed, "the model's experts: every one has a slot")),
            ExpertCache::Slots(asked) => Ok((asked.max(1), "--expert-cache")),
            ExpertCache::Auto if fit >= routed => Ok((routed, "the model's experts: every one has a slot")),
            ExpertCache::Auto => Ok((fit, "the budget")),
        }
    }

    fn chunk_limit(&self, ctx_tokens: u32) -> u32 {
        SizeLimits::new(self.settings, ctx_tokens, self.shape.block_step()).chunk_max
    }

    fn prompt_bytes(&self, chunk: u32) -> Bytes {
        self.size_bytes(PromptSize::chunk(chunk))
    }

    fn size_bytes(&self, size: PromptSize) -> Bytes {
        PromptLayout::bytes(self.shape, self.weights, self.arithmetic, size)
    }

    fn fits(&self, room: PromptRoom) -> impl Fn(PromptSize) -> bool {
        move |size| PromptLayout::new(self.shape, self.weights, self.arithmetic, size, room).is_some()
    }

    /// The largest chunk within the settings whose buffers fit `room` where a block is one chunk; 0 where none does.
    fn largest_chunk(&self, room: PromptRoom, ctx_tokens: u32) -> u32 {
        SizeLimits::new(self.settings, ctx_tokens, self.shape.block_step()).largest_chunk(self.fits(room))
    }

    /// The size with the largest block that fits `room`.
    fn largest_block(&self, room: PromptRoom, ctx_tokens: u32) -> Option<PromptSize> {
        SizeLimits::new(self.settings, ctx_tokens, self.shape.block_step()).largest_block(self.fits(room))
    }
}
