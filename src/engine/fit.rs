//! Taking the memory whose size the plan chose: smaller where the device does not give what it said.

use std::rc::Rc;

use crate::backend::{Addr, Backend, BackendError, Pool};
use crate::engine::EngineError;
use crate::engine::free_memory::FreeMemory;
use crate::model::Model;
use crate::phase::plan::{DeviceBudget, PlanError, PromptMemory};
use crate::phase::{PhaseError, Plan, Scheduler};
use crate::settings::{BlockSetting, ContextSetting, EngineSettings, ExpertCache};
use crate::units::Bytes;

/// Most times that a refused allocation is tried again with fewer slots, each time with three quarters.
pub const REFUSALS_MAX: u32 = 8;
/// Most times that the slab is made smaller because the driver took more than was asked for.
const SHORTFALLS_MAX: u32 = 6;

/// What a plan follows from.
#[derive(Clone, Copy)]
pub struct PlanInputs<'a> {
    /// The model.
    pub model: &'a Model,
    /// What was set.
    pub settings: &'a EngineSettings,
    /// What the device had at start.
    pub device: DeviceBudget,
}

impl PlanInputs<'_> {
    /// The plan at start.
    ///
    /// # Errors
    /// [`PlanError`] where none can be made.
    pub fn plan(&self) -> Result<Plan, PlanError> {
        Plan::new(&self.model.shape, &self.model.weights, self.device, self.settings)
    }

    /// As `plan`, on a device with `less` for us: all that is allocated already keeps its size, so context and reserve stay. Slots that
    /// were asked for give way where they have to.
    ///
    /// # Errors
    /// [`PlanError`] where none can be made.
    pub fn smaller(&self, plan: &Plan, less: Bytes) -> Result<Plan, PlanError> {
        // Room that the plan leaves unused is none that could make up for anything.
        let used = plan.decode.total_bytes.max(plan.prefill.total_bytes) + plan.reserve_bytes;
        let settings = EngineSettings {
            vram: plan.limit_bytes.min(used).saturating_sub(less),
            vram_reserve: Some(plan.reserve_bytes),
            ctx: ContextSetting::Tokens(plan.ctx_tokens),
            // What prompts need of pinned memory was taken for blocks of the first plan.
            block: match self.settings.block {
                BlockSetting::Chunk => BlockSetting::Chunk,
                BlockSetting::Auto | BlockSetting::Tokens(_) => BlockSetting::Tokens(plan.block.max(1)),
            },
            ..self.settings.clone()
        };
        let made = |settings: &EngineSettings| {
            Plan::with_windows(&self.model.shape, &self.model.weights, self.device, settings, Some(plan.window_rows))
        };
        let smaller = made(&settings).or_else(|error| match error {
            PlanError::SlotsTooMany { .. } => made(&EngineSettings { expert_cache: ExpertCache::Auto, ..settings.clone() }),
            other => Err(other),
        })?;
        Ok(Plan { limit_decided_by: "what the device really gives", ..smaller })
    }
}

/// Memory whose size the number of slots decides, with the plan that it was taken by.
pub struct Taken<B: Backend> {
    /// The plan, perhaps smaller than the one at first.
    pub plan: Plan,
    /// Prompt buffers beside the slab.
    pub beside: Beside<B>,
    /// Slab and head.
    pub scheduler: Scheduler<B>,
}

impl<B: Backend> Taken<B> {
    fn take(backend: &Rc<B>, plan: &Plan, head: (Addr, Bytes)) -> Result<Self, PhaseError> {
        let beside = Beside::allocate(&**backend, plan)?;
        let scheduler = Scheduler::new(Rc::clone(backend), plan, head.0, head.1)?;
        Ok(Self { plan: plan.clone(), beside, scheduler })
    }

    /// Takes the memory of `plan`, or of smaller plans while the device refuses what it said was free, or took more than was asked for once
    /// it was written. Each ends after a few steps.
    ///
    /// # Errors
    /// The backend's, [`PlanError`] where what is left cannot hold the model.
    pub fn take_what_is_there(
        backend: &Rc<B>,
        inputs: PlanInputs<'_>,
        plan: Plan,
        head: (Addr, Bytes),
        notices: &mut Vec<String>,
    ) -> Result<Self, EngineError> {
        let planned = plan.slots;
        let mut plan = plan;
        let (mut refusals, mut shortfalls) = (0, 0);
        let mut refused = None;
        let mut taken_beside = Bytes::ZERO;
        let taken = loop {
            match Self::take(backend, &plan, head) {
                Ok(taken) => {
                    let short = shortfall(&**backend, &plan);
                    if short == Bytes::ZERO || shortfalls == SHORTFALLS_MAX {
                        break taken;
                    }
                    shortfalls += 1;
                    taken_beside += short;
                    drop(taken);
                    plan = inputs.smaller(&plan, short)?;
                }
                Err(PhaseError::Backend(error)) if is_short(&error) && refusals < REFUSALS_MAX => {
                    refusals += 1;
                    let quarter = plan.slot_table.last((plan.slots / 4).max(1), plan.slots);
                    // Where no smaller plan can be made, what the device refused is the reason.
                    plan = inputs.smaller(&plan, quarter).map_err(|_| error.clone())?;
                    refused.get_or_insert(error);
                }
                Err(error) => return Err(error.into()),
            }
        };
        let slots = taken.plan.slots;
        if let Some(error) = refused {
            notices.push(format!(
                "{slots} slots instead of {planned}: {error}, as where the system limits what may be committed (on Windows: enlarge the \
                 page file)"
            ));
        }
        if taken_beside > Bytes::ZERO {
            notices.push(format!(
                "{slots} slots instead of {planned}: once written, memory takes up to {taken_beside} more than was asked for, and a reserve of \
                 {} is kept",
                taken.plan.reserve_bytes
            ));
        }
        Ok(taken)
    }
}

/// Prompt buffers that are there for the whole run.
pub struct Beside<B: Backend> {
    /// For reading in blocks, where nothing is lent for it.
    pub owned: Option<B::Buffer>,
    /// For prompts of a few tokens.
    pub wide: Option<B::Buffer>,
}

impl<B: Backend> Beside<B> {
    /// What `plan` has of them.
    ///
    /// # Errors
    /// The backend's.
    pub fn allocate(backend: &B, plan: &Plan) -> Result<Self, BackendError> {
        let owned = match plan.prompt_memory {
            PromptMemory::Owned { bytes } => Some(backend.malloc(bytes, "prompt buffers")?),
            PromptMemory::Loan { .. } | PromptMemory::None => None,
        };
        let wide = match plan.wide_bytes {
            Bytes::ZERO => None,
            bytes => Some(backend.malloc(bytes, "wide window")?),
        };
        Ok(Self { owned, wide })
    }
}

/// True for device memory that is not there now.
#[must_use]
pub fn is_short(error: &BackendError) -> bool {
    matches!(error, BackendError::OutOfMemory { pool: Pool::Device, .. })
}

/// What is missing for what is to stay free beside graphs that are still to be captured, as far as the driver can be believed.
fn shortfall<B: Backend>(backend: &B, plan: &Plan) -> Bytes {
    let wanted = plan.kept_free_bytes() + plan.graph_bytes;
    FreeMemory::read(backend).believed().map_or(Bytes::ZERO, |free| wanted.saturating_sub(free))
}
