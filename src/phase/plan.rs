//! The memory plan: bytes per owner in both phases, made before anything is allocated.
//!
//! ```text
//! limit    = min(total - use by others, system budget, --vram-mib)
//! budget   = limit - reserve
//! resident = dense weights + KV cache + decode buffers + captured graphs (+ prompt buffers of their own)
//! decode   : resident + head + slots                                        <= budget
//! prefill  : resident + (head, unless lent) + kept slots + prompt buffers   <= budget
//! ```
//! The prompt buffers lie in lent slots, with the head's bytes beside them in alias mode, so both sums come to the same total and
//! the reserve is kept in either phase. See `docs/memory-plan.md` for the rules with examples.

use serde::Serialize;
use thiserror::Error;

use crate::backend::Addr;
use crate::backend::op::KvFormat;
use crate::model::forward::{Forward, ResidentAddrs};
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize, WindowLayout};
use crate::model::weights::DEVICE_ALIGN;
use crate::model::{ModelShape, ModelWeights};
use crate::settings::{Activations, ChunkSetting, ContextSetting, EngineSettings, ExpertCache, KvType};
use crate::units::{Bytes, MIB};

/// Rows of the largest window. Windows of several rows come with drafts.
pub const WINDOW_ROWS: u32 = 1;
/// Largest chunk that is chosen unasked.
const AUTO_CHUNK_MAX: u32 = 8192;
/// A loan that affords fewer tokens than this is not worth lending for: the prompt buffers are then owned.
const LOAN_CHUNK_MIN: u32 = 32;
/// Chunk that a context must leave room for to be chosen unasked.
const USEFUL_CHUNK: u32 = 512;
/// Slots that a loan keeps, unless a quarter of the model's experts is less.
const KEPT_SLOTS: u32 = 128;
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
    /// Device memory of one node of a captured graph.
    pub graph_node_bytes: Bytes,
    /// Prompt buffers may continue beside the slab.
    pub borrow_spill: bool,
}

/// Why no plan can be made. None of these passes by waiting: something must be set otherwise.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// The parts that every token needs do not fit.
    #[error(
        "the model needs {needed} of VRAM for its resident parts, head and one expert slot with a context of {ctx_tokens} tokens; {budget} are \
         there after a reserve of {reserve}: raise --vram-mib to {way_out_mib} or more, lower --ctx, or choose --kv q8_0"
    )]
    ResidentTooLarge {
        /// What is needed at least.
        needed: Bytes,
        /// What is there.
        budget: Bytes,
        /// What is kept free.
        reserve: Bytes,
        /// The context asked for or tried last.
        ctx_tokens: u32,
        /// The `--vram-mib` that would do.
        way_out_mib: u64,
    },
    /// More slots were asked for than fit.
    #[error("--expert-cache {asked} needs {needed}, {left} are left for slots: at most {fit} fit; lower it or leave it at auto")]
    SlotsTooMany {
        /// Slots asked for.
        asked: u32,
        /// Their bytes.
        needed: Bytes,
        /// Bytes left for slots.
        left: Bytes,
        /// Slots that fit.
        fit: u64,
    },
    /// Not even one token can be read at a time.
    #[error("no room to read a prompt: its buffers need {needed} for a chunk of one token, {left} can be had: raise --vram-mib or lower --ctx")]
    NoPromptRoom {
        /// Bytes for one token.
        needed: Bytes,
        /// Bytes that can be lent or owned.
        left: Bytes,
    },
    /// The reserve leaves nothing.
    #[error("a reserve of {reserve} leaves nothing of {limit}: lower --vram-reserve-mib")]
    ReserveTooLarge {
        /// The reserve asked for.
        reserve: Bytes,
        /// What it is taken from.
        limit: Bytes,
    },
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
    /// Shares, largest parts first as the formula writes them.
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
    /// What stays free.
    pub reserve_bytes: Bytes,
    /// What may be used.
    pub budget_bytes: Bytes,
    /// Tokens of context.
    pub ctx_tokens: u32,
    /// Type of the KV cache.
    pub kv_format: KvFormat,
    /// Activations stay floats.
    pub exact: bool,
    /// Dense weights.
    pub dense_bytes: Bytes,
    /// KV cache of all layers.
    pub kv_bytes: Bytes,
    /// Buffers of the decode path.
    pub window_bytes: Bytes,
    /// Captured windows.
    pub graph_bytes: Bytes,
    /// The output head, rounded up to the device's alignment.
    pub head_bytes: Bytes,
    /// VRAM slots.
    pub slots: u32,
    /// Bytes of a slot; the largest expert fits.
    pub slot_bytes: Bytes,
    /// Prompt buffers without the alias.
    pub prompt_memory: PromptMemory,
    /// Bytes beside the slab in which prompt buffers may continue while the head is lent.
    pub spill_room: Bytes,
    /// Largest chunk without the alias; 0 where there is none.
    pub kept_head_chunk: u32,
    /// Largest chunk with the head lent; 0 without `--prefill-head-alias`.
    pub alias_chunk: u32,
    /// The longest chunk of either way.
    pub chunk: u32,
    /// Tokens of a block; equals the chunk in this version.
    pub block: u32,
    /// Phase of writing.
    pub decode: PhaseBytes,
    /// Phase of reading, by the way that affords the longest chunk.
    pub prefill: PhaseBytes,
    /// Which term decided the number of slots.
    pub slots_decided_by: &'static str,
    /// Which rule decided where prompt buffers lie.
    pub prompt_decided_by: &'static str,
}

/// The model's part of the sum, for one context length.
struct Resident {
    kv: Bytes,
    window: Bytes,
    graphs: Bytes,
    head: Bytes,
    total_without_head: Bytes,
}

/// All that goes into the sum, with the fixed questions answered.
struct Planner<'a> {
    shape: &'a ModelShape,
    weights: &'a ModelWeights,
    settings: &'a EngineSettings,
    device: DeviceBudget,
    kv_format: KvFormat,
    exact: bool,
    limit: Bytes,
    reserve: Bytes,
    budget: Bytes,
}

impl Plan {
    /// Plans both phases. Loads and allocates nothing.
    ///
    /// # Errors
    /// [`PlanError`] where no plan can keep the budget, naming what would.
    pub fn new(shape: &ModelShape, weights: &ModelWeights, device: DeviceBudget, settings: &EngineSettings) -> Result<Self, PlanError> {
        let mut limit = device.total.saturating_sub(device.used_by_others).min(settings.vram);
        if let Some(os_budget) = device.os_budget {
            limit = limit.min(os_budget);
        }
        let reserve = settings.vram_reserve.unwrap_or_else(|| Bytes::mib(256).min(Bytes(limit.0 / 16)));
        let budget = limit.checked_sub(reserve).filter(|budget| budget.0 > 0).ok_or(PlanError::ReserveTooLarge { reserve, limit })?;
        let kv_format = match settings.kv {
            KvType::F32 => KvFormat::F32,
            KvType::F16 => KvFormat::F16,
            KvType::Q8_0 => KvFormat::Q8_0,
        };
        let exact = settings.activations == Activations::F32;
        Planner { shape, weights, settings, device, kv_format, exact, limit, reserve, budget }.plan()
    }

    /// Memory for prompt buffers while the head is kept.
    #[must_use]
    pub fn kept_head_room(&self) -> PromptRoom {
        PromptRoom::single(match self.prompt_memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { slots_max } => self.slot_bytes * u64::from(slots_max),
            PromptMemory::None => Bytes::ZERO,
        })
    }

    /// Memory for prompt buffers while the head is lent: its own, all slots but one, and prompt buffers that are owned anyway.
    #[must_use]
    pub fn alias_room(&self) -> PromptRoom {
        let arena = self.head_bytes + self.slot_bytes * u64::from(self.slots - 1);
        PromptRoom { arena, spill: self.spill_room }
    }

    /// Bytes of the slab: all slots and the head.
    #[must_use]
    pub fn slab_bytes(&self) -> Bytes {
        self.slot_bytes * u64::from(self.slots) + self.head_bytes
    }
}

impl Planner<'_> {
    fn plan(&self) -> Result<Plan, PlanError> {
        match self.settings.ctx {
            ContextSetting::Tokens(ctx_tokens) => self.with_context(ctx_tokens),
            ContextSetting::Auto => self.with_auto_context(),
        }
    }

    /// The largest context that leaves a useful cache and chunk; where none does, the largest that can be planned at all.
    fn with_auto_context(&self) -> Result<Plan, PlanError> {
        let ladder = context_ladder(self.shape.n_ctx_train);
        let useful_slots = KEPT_SLOTS.min(self.shape.n_routed_experts().div_ceil(4));
        let mut largest = None;
        let mut last_error = None;
        for ctx_tokens in ladder {
            match self.with_context(ctx_tokens) {
                Ok(plan) if plan.slots >= useful_slots && plan.chunk >= USEFUL_CHUNK.min(ctx_tokens) => return Ok(plan),
                Ok(plan) => {
                    largest.get_or_insert(plan);
                }
                Err(error) => last_error = Some(error),
            }
        }
        largest.ok_or_else(|| last_error.expect("the ladder has at least one step"))
    }

    fn with_context(&self, ctx_tokens: u32) -> Result<Plan, PlanError> {
        let resident = self.resident(ctx_tokens);
        let slot_bytes = self.weights.slot_bytes();
        let fixed = resident.total_without_head + resident.head;
        let room = self.budget.checked_sub(fixed + slot_bytes).map(|left| left + slot_bytes).ok_or_else(|| {
            let needed = fixed + slot_bytes;
            let way_out = if self.settings.vram_reserve.is_some() { needed + self.reserve } else { Bytes(needed.0 + needed.0 / 15 + 1) };
            let way_out_mib = way_out.0.div_ceil(MIB);
            PlanError::ResidentTooLarge { needed, budget: self.budget, reserve: self.reserve, ctx_tokens, way_out_mib }
        })?;
        let (slots, slots_decided_by) = self.slots(room, slot_bytes)?;
        let arena = |slots: u32| if self.settings.head_alias { resident.head + slot_bytes * u64::from(slots - 1) } else { Bytes::ZERO };
        let prompt = self.prompt(room, slot_bytes, slots, ctx_tokens, arena(slots));
        let slots = prompt.slots;
        let owned = match prompt.memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { .. } | PromptMemory::None => Bytes::ZERO,
        };
        let spill_room = if self.device.borrow_spill { owned } else { Bytes::ZERO };
        let alias_chunk = match self.settings.head_alias {
            true => self.largest_chunk(PromptRoom { arena: arena(slots), spill: spill_room }, ctx_tokens),
            false => 0,
        };
        let chunk = prompt.kept_head_chunk.max(alias_chunk);
        if chunk == 0 {
            let left = (slot_bytes * u64::from(slots - 1)).max(arena(slots));
            return Err(PlanError::NoPromptRoom { needed: self.prompt_bytes(1), left });
        }
        let slots_total = slot_bytes * u64::from(slots);
        let common = vec![
            ("dense weights", self.weights.dense_bytes),
            ("KV cache", resident.kv),
            ("decode buffers", resident.window),
            ("captured graphs", resident.graphs),
        ];
        let mut decode = common.clone();
        decode.extend([("output head", resident.head), ("expert slots", slots_total), ("prompt buffers", owned)]);
        let mut prefill = common;
        prefill.extend(self.prefill_owners(&prompt, alias_chunk, slot_bytes, resident.head));
        Ok(Plan {
            limit_bytes: self.limit,
            reserve_bytes: self.reserve,
            budget_bytes: self.budget,
            ctx_tokens,
            kv_format: self.kv_format,
            exact: self.exact,
            dense_bytes: self.weights.dense_bytes,
            kv_bytes: resident.kv,
            window_bytes: resident.window,
            graph_bytes: resident.graphs,
            head_bytes: resident.head,
            slots,
            slot_bytes,
            prompt_memory: prompt.memory,
            spill_room,
            kept_head_chunk: prompt.kept_head_chunk,
            alias_chunk,
            chunk,
            block: chunk,
            decode: PhaseBytes::new(decode),
            prefill: PhaseBytes::new(prefill),
            slots_decided_by: if slots == prompt.slots_before { slots_decided_by } else { "half of the room left, beside prompt buffers of their own" },
            prompt_decided_by: prompt.decided_by,
        })
    }

    /// Owners of what follows the common part while a prompt is read by the way with the longest chunk, the alias among equals.
    fn prefill_owners(&self, prompt: &PromptChoice, alias_chunk: u32, slot_bytes: Bytes, head: Bytes) -> Vec<(&'static str, Bytes)> {
        let slots_total = slot_bytes * u64::from(prompt.slots);
        let lent_slots = |bytes: Bytes| slot_bytes * bytes.0.div_ceil(slot_bytes.0);
        let owned = match prompt.memory {
            PromptMemory::Owned { bytes } => bytes,
            PromptMemory::Loan { .. } | PromptMemory::None => Bytes::ZERO,
        };
        if alias_chunk >= prompt.kept_head_chunk {
            let total = self.prompt_bytes(alias_chunk);
            let in_arena = total.min(head + slots_total.saturating_sub(slot_bytes));
            let lent = lent_slots(in_arena.saturating_sub(head));
            let unused = head + lent - in_arena;
            return vec![("kept slots", slots_total - lent), ("prompt buffers", in_arena + owned), ("lent, not needed", unused)];
        }
        if owned > Bytes::ZERO {
            return vec![("output head", head), ("kept slots", slots_total), ("prompt buffers", owned)];
        }
        let needed = self.prompt_bytes(prompt.kept_head_chunk);
        let lent = lent_slots(needed);
        vec![("output head", head), ("kept slots", slots_total - lent), ("prompt buffers", needed), ("lent, not needed", lent - needed)]
    }

    fn resident(&self, ctx_tokens: u32) -> Resident {
        let window = WindowLayout::new(self.shape, self.weights, self.exact, WINDOW_ROWS);
        let kv = ModelWeights::kv_bytes(self.shape, self.kv_format, ctx_tokens);
        let nowhere = ResidentAddrs { dense: Addr(0), kv: Addr(0), n_ctx: ctx_tokens, kv_format: self.kv_format };
        let forward = Forward { shape: self.shape, weights: self.weights, resident: nowhere, exact: self.exact };
        let nodes = forward.window_trunk(Addr(0), &window, WINDOW_ROWS).len() + forward.window_head(Addr(0), &window, WINDOW_ROWS, Addr(0)).len();
        let graphs = self.device.graph_node_bytes * nodes as u64;
        let head = self.weights.head.bytes.align_up(DEVICE_ALIGN);
        let total_without_head = self.weights.dense_bytes + kv + window.bytes + graphs;
        Resident { kv, window: window.bytes, graphs, head, total_without_head }
    }

    fn slots(&self, room: Bytes, slot_bytes: Bytes) -> Result<(u32, &'static str), PlanError> {
        let fit = room.0 / slot_bytes.0;
        let routed = self.shape.n_routed_experts();
        match self.settings.expert_cache {
            ExpertCache::Slots(asked) if u64::from(asked.min(routed)) > fit => {
                Err(PlanError::SlotsTooMany { asked, needed: slot_bytes * u64::from(asked), left: room, fit })
            }
            ExpertCache::Slots(asked) if asked >= routed => Ok((routed, "the model's experts: every one has a slot")),
            ExpertCache::Slots(asked) => Ok((asked, "--expert-cache")),
            ExpertCache::Auto if fit >= u64::from(routed) => Ok((routed, "the model's experts: every one has a slot")),
            ExpertCache::Auto => Ok((u32::try_from(fit).unwrap_or(routed), "the budget")),
        }
    }

    /// Decides where prompt buffers lie while the head is kept, taking slots back where nothing can be lent.
    fn prompt(&self, room: Bytes, slot_bytes: Bytes, slots: u32, ctx_tokens: u32, alias_arena: Bytes) -> PromptChoice {
        let spare = room.saturating_sub(slot_bytes * u64::from(slots));
        let slots_max = lendable_slots(slots, self.shape.n_routed_experts());
        let loan_chunk = self.largest_chunk(PromptRoom::single(slot_bytes * u64::from(slots_max)), ctx_tokens);
        let owned_chunk = self.largest_chunk(PromptRoom::single(spare), ctx_tokens);
        let wanted = LOAN_CHUNK_MIN.min(self.chunk_limit(ctx_tokens));
        let choice = |memory, kept_head_chunk, slots_now, decided_by| PromptChoice {
            memory,
            kept_head_chunk,
            slots: slots_now,
            slots_before: slots,
            decided_by,
        };
        if owned_chunk >= wanted.max(loan_chunk) {
            let memory = PromptMemory::Owned { bytes: self.prompt_bytes(owned_chunk) };
            return choice(memory, owned_chunk, slots, "VRAM beyond the slots is free: prompt buffers are owned");
        }
        if loan_chunk >= wanted {
            return choice(PromptMemory::Loan { slots_max }, loan_chunk, slots, "the coldest slots are lent");
        }
        if self.largest_chunk(PromptRoom::single(alias_arena), ctx_tokens) >= wanted {
            return choice(PromptMemory::None, 0, slots, "too few slots to lend: prompts are read with the head lent");
        }
        let fewer = if self.settings.expert_cache == ExpertCache::Auto { (slots / 2).max(1) } else { slots };
        for slots_now in [fewer, 1.min(fewer)] {
            let owned_room = room.saturating_sub(slot_bytes * u64::from(slots_now));
            let chunk = self.largest_chunk(PromptRoom::single(owned_room), ctx_tokens);
            if chunk > 0 {
                let memory = PromptMemory::Owned { bytes: self.prompt_bytes(chunk) };
                return choice(memory, chunk, slots_now, "too few slots to lend: prompt buffers are owned");
            }
        }
        choice(PromptMemory::None, 0, slots, "no room for prompt buffers while the head is kept")
    }

    fn chunk_limit(&self, ctx_tokens: u32) -> u32 {
        match self.settings.chunk {
            ChunkSetting::Tokens(tokens) => tokens,
            ChunkSetting::Auto { max } => max.unwrap_or(AUTO_CHUNK_MAX),
        }
        .min(ctx_tokens)
    }

    fn prompt_bytes(&self, chunk: u32) -> Bytes {
        PromptLayout::bytes(self.shape, self.weights, self.exact, PromptSize::chunk(chunk))
    }

    /// The largest chunk within the settings whose buffers fit `room`; 0 where none does.
    fn largest_chunk(&self, room: PromptRoom, ctx_tokens: u32) -> u32 {
        let fits = |chunk| PromptLayout::new(self.shape, self.weights, self.exact, PromptSize::chunk(chunk), room).is_some();
        largest_fitting(self.chunk_limit(ctx_tokens), fits)
    }
}

/// Where prompt buffers lie while the head is kept.
struct PromptChoice {
    memory: PromptMemory,
    kept_head_chunk: u32,
    slots: u32,
    slots_before: u32,
    decided_by: &'static str,
}

/// Slots that a loan with the head kept may take: at most 90 %, keeping 128 or a quarter of the model's experts.
#[must_use]
pub fn lendable_slots(slots: u32, n_routed_experts: u32) -> u32 {
    let keep = KEPT_SLOTS.min(n_routed_experts.div_ceil(4));
    let share = u64::from(slots) * LENT_SHARE_PERCENT / 100;
    u32::try_from(share).unwrap_or(slots).min(slots.saturating_sub(keep))
}

/// Contexts to try, longest first: 131,072 down to 8,192 within the model's own; a model with less starts at its own and halves
/// down to 512.
fn context_ladder(n_ctx_train: u32) -> Vec<u32> {
    if n_ctx_train < 8192 {
        return std::iter::successors(Some(n_ctx_train), |&tokens| (tokens / 2 >= 512).then_some(tokens / 2)).collect();
    }
    [131_072, 65_536, 32_768, 16_384, 8192].into_iter().filter(|&tokens| tokens <= n_ctx_train).collect()
}

/// The largest number from 1 to `limit` that fits, where everything below a fitting number fits; 0 where none does.
pub fn largest_fitting(limit: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fitting, mut limit) = (0, limit);
    // Invariant: `fitting` fits (or is 0), everything above `limit` does not or is not wanted.
    while fitting < limit {
        let middle = limit - (limit - fitting) / 2;
        if fits(middle) {
            fitting = middle;
        } else {
            limit = middle - 1;
        }
    }
    fitting
}
