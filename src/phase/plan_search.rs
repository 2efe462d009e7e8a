//! Which context is planned for, and what would help where no plan can be made.

use super::{CONTEXT_ADVISED_MIN, CONTEXT_LADDER_END, KEPT_SLOTS, LongerContext, Plan, PlanError, Planner, Shortage, USEFUL_CHUNK, WayOut};
use crate::backend::op::KvFormat;
use crate::phase::prompt_sizes::largest_fitting;
use crate::settings::{ContextSetting, ExpertCache, MEMORY_MIB_MAX};
use crate::units::{Bytes, MIB};

impl Planner<'_> {
    pub(super) fn plan(&self) -> Result<Plan, PlanError> {
        match self.settings.ctx {
            ContextSetting::Tokens(ctx_tokens) => self.with_context(ctx_tokens.max(1)),
            ContextSetting::Auto => {
                let plan = self.with_auto_context()?;
                Ok(Plan { longer_context: self.longer_context(plan.ctx_tokens), ..plan })
            }
        }
    }

    /// The largest context that leaves a useful cache and chunk. Where none does, the largest with a useful cache; where none has
    /// that, the one with the most slots; where even that cannot be had, the largest below the ladder.
    pub(super) fn with_auto_context(&self) -> Result<Plan, PlanError> {
        let useful_slots = KEPT_SLOTS.min(self.shape.n_routed_experts().div_ceil(4));
        // A model of a short context gets by with a shorter chunk.
        let useful_chunk = USEFUL_CHUNK.min(self.shape.n_ctx_train.div_ceil(CONTEXT_LADDER_END / USEFUL_CHUNK));
        let mut fallback: Option<Plan> = None;
        for ctx_tokens in context_ladder(self.shape.n_ctx_train) {
            let Ok(plan) = self.attempt(ctx_tokens) else { continue };
            if plan.slots >= useful_slots && plan.chunk >= useful_chunk {
                return Ok(plan);
            }
            if fallback.as_ref().is_none_or(|longer| longer.slots < useful_slots) {
                fallback = Some(plan);
            }
        }
        if let Some(plan) = fallback {
            return Ok(plan);
        }
        let short = halved(self.shape.n_ctx_train.min(CONTEXT_LADDER_END));
        let last = short.last().copied().expect("halving yields at least its start");
        match short.into_iter().find_map(|ctx_tokens| self.attempt(ctx_tokens).ok()) {
            Some(plan) => Ok(plan),
            None => self.with_context(last),
        }
    }

    /// What the context after `ctx_tokens` on the ladder would leave.
    fn longer_context(&self, ctx_tokens: u32) -> Option<LongerContext> {
        let ctx_tokens = context_ladder(self.shape.n_ctx_train).into_iter().rev().find(|&longer| longer > ctx_tokens)?;
        let slots = |planner: Self| planner.attempt(ctx_tokens).ok().map(|plan| plan.slots);
        let q8_0 = Self { kv_format: KvFormat::Q8_0, ..*self };
        Some(LongerContext {
            ctx_tokens,
            slots: slots(*self),
            slots_q8_0: if self.kv_format == KvFormat::Q8_0 { None } else { slots(q8_0) },
        })
    }

    /// As [`Planner::attempt`], saying what would help where it fails.
    pub(super) fn with_context(&self, ctx_tokens: u32) -> Result<Plan, PlanError> {
        self.attempt(ctx_tokens).map_err(|shortage| {
            let slots_fit = if let Shortage::Slots { fit, .. } = shortage { Some(fit) } else { None };
            let way_out = self.way_out(ctx_tokens, slots_fit);
            let reserve = self.reserve();
            let budget = self.limit.saturating_sub(reserve);
            match shortage {
                Shortage::Reserve => PlanError::ReserveTooLarge { reserve, limit: self.limit, way_out },
                Shortage::Resident { needed } => PlanError::ResidentTooLarge { needed, budget, reserve, ctx_tokens, way_out },
                Shortage::Slots { asked, needed, left, .. } => PlanError::SlotsTooMany { asked, needed, left, way_out },
                Shortage::PromptRoom { needed, left } => PlanError::NoPromptRoom { needed, left, way_out },
                Shortage::SeedChunk { chunk, needed, left } => PlanError::NoSeedChunk { chunk, needed, left, way_out },
            }
        })
    }

    /// Tries one setting after another. More memory, less context and a smaller reserve never turn a plan into none.
    pub(super) fn way_out(&self, ctx_tokens: u32, slots_fit: Option<u32>) -> WayOut {
        let ok = |planner: Self, ctx_tokens: u32| planner.attempt(ctx_tokens).is_ok();
        // A device as large as the setting is a simulated one, whose size the setting is.
        let device_mib = if self.device.total == self.settings.vram {
            u32::try_from(MEMORY_MIB_MAX).unwrap_or(u32::MAX)
        } else {
            let device = self.device.total.saturating_sub(self.device.used_by_others);
            let most = self.device.os_budget.map_or(device, |os_budget| os_budget.min(device));
            u32::try_from(most.0 / MIB).unwrap_or(u32::MAX)
        };
        let vram_ok = |mib: u32| ok(Self { limit: Bytes::mib(mib.into()), ..*self }, ctx_tokens);
        let vram_mib = vram_ok(device_mib).then(|| u64::from(largest_fitting(device_mib, |mib| !vram_ok(mib))) + 1);
        let asked = if let ExpertCache::Slots(asked) = self.expert_cache { Some(asked) } else { None };
        let slots_ok = |slots| ok(Self { expert_cache: ExpertCache::Slots(slots), ..*self }, ctx_tokens);
        // As many as fit can be lent from, or own buffers must fit beside them: then fewer are better.
        let slots = asked.and_then(|asked| {
            let most = slots_fit.unwrap_or(asked.saturating_sub(1));
            if most > 0 && slots_ok(most) { Some(most) } else { Some(largest_fitting(most, slots_ok)).filter(|&slots| slots > 0) }
        });
        let reserve_ok = |mib: u32| ok(Self { asked_reserve: Some(Bytes::mib(mib.into())), ..*self }, ctx_tokens);
        let reserve_mib = self.asked_reserve.filter(|_| reserve_ok(0)).map(|reserve| {
            let limit = u32::try_from(reserve.0 / MIB).unwrap_or(u32::MAX);
            u64::from(largest_fitting(limit, reserve_ok))
        });
        let shorter = largest_fitting(ctx_tokens - 1, |shorter| ok(*self, shorter));
        WayOut {
            vram_mib,
            ctx_tokens: (shorter >= CONTEXT_ADVISED_MIN).then_some(shorter),
            kv_q8_0: self.kv_format != KvFormat::Q8_0 && ok(Self { kv_format: KvFormat::Q8_0, ..*self }, ctx_tokens),
            slots,
            reserve_mib,
        }
    }
}

/// Contexts to try, longest first: 131,072 down to 8,192 within the model's own; a model with less starts at its own and halves
/// down to 512.
fn context_ladder(n_ctx_train: u32) -> Vec<u32> {
    if n_ctx_train < CONTEXT_LADDER_END {
        return halved(n_ctx_train);
    }
    [131_072, 65_536, 32_768, 16_384, CONTEXT_LADDER_END].into_iter().filter(|&tokens| tokens <= n_ctx_train).collect()
}

/// `tokens`, half of it, and so on down to 512.
fn halved(tokens: u32) -> Vec<u32> {
    std::iter::successors(Some(tokens), |&tokens| (tokens / 2 >= 512).then_some(tokens / 2)).collect()
}
