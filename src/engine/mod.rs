//! The engine: one model on one device, one thread.
//!
//! [`Engine::start`] plans the memory and takes it once; nothing is allocated on the device afterwards. [`Engine::generate`] reads a
//! prompt by the way that [`way`] chooses and writes tokens through captured windows. The last prompt token is always the first
//! window, so the prompt path never needs the output head.

pub mod captured;
pub mod constraint;
pub mod costs;
pub mod decode;
pub mod drafts;
pub mod embedding;
mod error;
mod fit;
mod free_memory;
mod guard;
mod hashes;
mod learned;
pub mod prefill;
mod prefix;
pub mod prefix_cache;
mod reading;
pub mod recurrent;
mod request;
pub mod sampler;
pub mod sequence;
pub mod snapshots;
mod start;
pub mod timelines;
pub mod way;
mod window;
mod writing;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use error::EngineError;
pub use free_memory::{FreeMemory, read_device_budget};
pub use request::{Event, Finish, OnEvent, Outcome, Request};

use crate::backend::{AddrRange, Backend, Capabilities};
use crate::experts::Experts;
use crate::model::Model;
use crate::model::forward::ResidentAddrs;
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::model::shape::Mixer;
use crate::phase::plan::{DeviceBudget, Plan, PromptMemory};
use crate::phase::scheduler::PhaseCounters;
use crate::phase::{Phase, Scheduler};
use crate::settings::EngineSettings;
use crate::units::{Bytes, SlotId, TokenId};
use costs::Costs;
use decode::Windows;
use drafts::Drafter;
use embedding::Embedding;
use fit::Beside;
use guard::Guard;
use prefill::PromptPath;
use prefix::{Checkpoint, Known};
use prefix_cache::{PrefixCache, PrefixCounters};
use recurrent::Recurrent;
use timelines::Timelines;
use way::{Choice, ModelTraffic, Reading, Way};

/// Slots that stay in use while the head is lent: a window needs one.
const ALIAS_KEPT_SLOTS: u32 = 1;

/// A model on a device.
pub struct Engine<B: Backend> {
    backend: Rc<B>,
    model: Arc<Model>,
    settings: EngineSettings,
    plan: Plan,
    device: DeviceBudget,
    guard: Guard,
    resident: ResidentAddrs,
    scheduler: Scheduler<B>,
    experts: Experts<B>,
    learned: Option<learned::Learned>,
    windows: Windows<B>,
    /// `None` only where it could not be had again yet.
    beside: Option<Beside<B>>,
    prompt_path: PromptPath<B>,
    costs: Costs,
    window_times: [B::Event; 2],
    compute: B::Stream,
    embedding: Embedding,
    timelines: Timelines,
    recurrent: Recurrent<B>,
    drafter: Drafter,
    /// Tokens that the draft layer chooses among, where it has a head of its own.
    draft_vocab: Option<Vec<TokenId>>,
    /// Where the recurrent state is to be copied out while this request's prompt is read.
    checkpoints: Vec<Checkpoint>,
    prefix_cache: PrefixCache<B>,
    notices: Vec<String>,
    lowest_free: Option<Bytes>,
    spilled: Bytes,
    // Held for their memory alone; the addresses are in `resident`.
    _dense: B::Buffer,
    _kv: B::Buffer,
    _draft_head: Option<B::Buffer>,
}

impl<B: Backend> Engine<B> {
    /// The plan that the engine keeps to.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Where the output head lies; constant unless it is freed for prompts, or the slab had to be made smaller.
    #[must_use]
    pub fn head_range(&self) -> AddrRange {
        self.scheduler.regions().head()
    }

    /// Where a slot lies; `None` for one that was given back.
    #[must_use]
    pub fn slot_range(&self, slot: SlotId) -> Option<AddrRange> {
        self.scheduler.regions().slot_in_use(slot)
    }

    /// The phase; Decode between requests, unless a fault left something to bring home.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.scheduler.phase()
    }

    /// What the device is and can do.
    #[must_use]
    pub fn capabilities(&self) -> &Capabilities {
        self.backend.capabilities()
    }

    /// The experts, for reports.
    #[must_use]
    pub fn experts(&self) -> &Experts<B> {
        &self.experts
    }

    /// Lines for the log since the last call.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Forgets what is live; parked conversations stay.
    pub fn reset(&mut self) {
        self.timelines.clear();
        self.recurrent.set_position(None);
    }

    /// Conversations parked and resumed since the start.
    #[must_use]
    pub fn prefix_counters(&self) -> PrefixCounters {
        self.prefix_cache.counters()
    }

    /// Host memory of parked conversations and of copies of the recurrent state; never more than the settings allow.
    #[must_use]
    pub fn prefix_bytes(&self) -> Bytes {
        self.prefix_cache.used()
    }

    /// The way in which tokens would be read now.
    #[must_use]
    pub fn choose_way(&self, reading: Reading) -> Choice {
        let shape = &self.model.shape;
        let arena_bytes = |size, way| self.prompt_layout(size, self.prompt_room(way)).map(|layout| layout.arena_bytes);
        let traffic = ModelTraffic {
            expert_bytes: self.model.weights.trunk_expert_bytes(shape),
            n_layer: shape.n_layer,
            n_attention_layer: shape.index_among(Mixer::Attention, shape.n_layer),
            block_step: shape.block_step(),
            n_expert: shape.n_expert,
            n_expert_used: shape.n_expert_used,
            arena_bytes: &arena_bytes,
        };
        way::choose(&self.plan, traffic, &self.costs, &self.settings, reading)
    }

    /// Memory for prompt buffers by the way of reading.
    fn prompt_room(&self, way: Way) -> PromptRoom {
        match way {
            Way::Alias => self.plan.alias_room(),
            Way::Loan => self.plan.kept_head_room(),
            Way::Wide => PromptRoom::single(self.plan.wide_bytes),
            Way::Windows => PromptRoom::single(Bytes::ZERO),
        }
    }

    fn prompt_bytes(&self, size: PromptSize) -> Bytes {
        PromptLayout::bytes(&self.model.shape, &self.model.weights, self.plan.exact, size)
    }

    /// The buffers for `size` in `room`; `None` where they do not fit.
    fn prompt_layout(&self, size: PromptSize, room: PromptRoom) -> Option<PromptLayout> {
        PromptLayout::new(&self.model.shape, &self.model.weights, self.plan.exact, size, room)
    }

    /// Reads what is new of the prompt and writes on.
    ///
    /// # Errors
    /// [`EngineError`] for a prompt that is empty, too long or holds numbers that are no tokens, or a constraint that nothing meets, before
    /// anything is read; the device's faults; logits that are no numbers; a constraint that leaves no token.
    pub fn generate(&mut self, request: &Request, on_event: &mut OnEvent<'_>) -> Result<Outcome, EngineError> {
        let answer = self.answer(request, on_event);
        self.forget_without_state();
        answer
    }

    fn answer(&mut self, request: &Request, on_event: &mut OnEvent<'_>) -> Result<Outcome, EngineError> {
        self.check_prompt(&request.prompt)?;
        let mut constraint = request.constraint.as_ref().map(|constraint| constraint.begin()).transpose()?;
        let recaptures_before = self.windows.recaptures();
        self.look_at_memory()?;
        let phases_before = self.scheduler.counters()?;
        // An earlier request that failed may have left copies unread.
        self.experts.end_prompt();
        let experts_before = self.experts.counters();
        self.lowest_free = None;
        self.spilled = Bytes::ZERO;
        let started = Instant::now();
        let (&last, first) = request.prompt.split_last().ok_or(EngineError::EmptyPrompt)?;
        let Known { reused: reused_tokens, common: common_tokens } = self.resume_prefix(request)?;
        let fresh = &first[reused_tokens..];
        let choice = self.choose_way(Reading { past: reused_tokens, tokens: fresh.len() });
        let read = self.read(fresh, last, &choice, on_event)?;
        let mut outcome = Outcome {
            tokens: Vec::new(),
            logprobs: Vec::new(),
            finish: Finish::Cancelled,
            prompt_tokens: request.prompt.len(),
            reused_tokens,
            common_tokens,
            place: self.timelines.place(),
            choice,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            lowest_free: None,
            spill_bytes: Bytes::ZERO,
            slots: 0,
            phases: phases_before,
            experts: experts_before,
            drafts: self.drafter.counters(),
            recaptures: 0,
        };
        if read.is_continue() {
            self.write(last, request, constraint.as_deref_mut(), started, &mut outcome, on_event)?;
        }
        self.note_free_memory();
        outcome.lowest_free = self.lowest_free;
        outcome.spill_bytes = self.spilled;
        outcome.slots = self.scheduler.regions().n_slots_in_use();
        outcome.phases = phases_since(phases_before, self.scheduler.counters()?);
        if outcome.phases.head_reloads > 0 {
            self.costs.note_link(self.model.weights.head.bytes, outcome.phases.head_reload_ms / 1e3);
        }
        self.experts.end_prompt();
        outcome.experts = self.experts.counters().since(&experts_before);
        outcome.drafts = self.drafter.counters().since(&outcome.drafts);
        outcome.recaptures = self.windows.recaptures() - recaptures_before;
        self.windows.flush_hashes()?;
        Ok(outcome)
    }

    fn check_prompt(&self, prompt: &[TokenId]) -> Result<(), EngineError> {
        check_prompt(prompt, self.plan.ctx_tokens, self.model.shape.n_vocab)
    }

    /// Slots that may be lent while the head is kept.
    fn lendable_slots(&self) -> u32 {
        match self.plan.prompt_memory {
            PromptMemory::Loan { slots_max } => slots_max,
            PromptMemory::Owned { .. } | PromptMemory::None => 0,
        }
    }

    fn note_free_memory(&mut self) {
        let free = match FreeMemory::read(&*self.backend) {
            FreeMemory::Believed { free, .. } => Some(free),
            // A device that is full says 0 twice.
            FreeMemory::Impossible { free: Bytes::ZERO, .. } => Some(Bytes::ZERO),
            FreeMemory::Impossible { .. } | FreeMemory::NotSaid(_) | FreeMemory::Failed(_) => None,
        };
        if let Some(free) = free {
            self.lowest_free = Some(self.lowest_free.map_or(free, |lowest| lowest.min(free)));
        }
    }
}

/// Refuses a prompt that a context of `ctx_tokens` cannot take, or that holds numbers outside a vocabulary of `n_vocab`. A caller
/// that knows both can ask before it loads a model.
///
/// # Errors
/// [`EngineError::EmptyPrompt`], [`EngineError::PromptTooLong`], [`EngineError::BadToken`].
pub fn check_prompt(prompt: &[TokenId], ctx_tokens: u32, n_vocab: u32) -> Result<(), EngineError> {
    if prompt.is_empty() {
        return Err(EngineError::EmptyPrompt);
    }
    if prompt.len() >= ctx_tokens as usize {
        return Err(EngineError::PromptTooLong { prompt_tokens: prompt.len(), ctx_tokens });
    }
    check_tokens(prompt, n_vocab)
}

/// Refuses tokens outside a vocabulary of `n_vocab`.
///
/// # Errors
/// [`EngineError::BadToken`], naming the first.
pub fn check_tokens(tokens: &[TokenId], n_vocab: u32) -> Result<(), EngineError> {
    match tokens.iter().position(|&token| token >= n_vocab) {
        Some(position) => Err(EngineError::BadToken { token: tokens[position], position, n_vocab }),
        None => Ok(()),
    }
}

/// Takes one row of logits.
pub type LogitsSink<'a> = dyn FnMut(&[f32]) + 'a;

fn phases_since(before: PhaseCounters, now: PhaseCounters) -> PhaseCounters {
    let loans = now.loans - before.loans;
    let head_reloads = now.head_reloads - before.head_reloads;
    // What the last loan did says nothing of a request that made none.
    let last = if loans > 0 { now } else { PhaseCounters::default() };
    PhaseCounters { loans, head_reloads, head_reload_ms: if head_reloads > 0 { now.head_reload_ms } else { 0.0 }, ..last }
}
