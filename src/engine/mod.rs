//! The engine: one model on one device, one live sequence, one thread.
//!
//! [`Engine::start`] plans the memory and takes it once; nothing is allocated on the device afterwards. [`Engine::generate`] reads a
//! prompt by the way that [`way`] chooses and writes tokens through captured windows. The last prompt token is always the first
//! window, so the prompt path never needs the output head.

pub mod captured;
pub mod costs;
pub mod decode;
pub mod embedding;
mod error;
mod fit;
mod free_memory;
mod guard;
mod hashes;
mod learned;
pub mod prefill;
pub mod prefix_cache;
pub mod sampler;
pub mod sequence;
mod start;
pub mod timelines;
pub mod way;
mod window;

use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use error::EngineError;
pub use free_memory::{FreeMemory, read_device_budget};

use crate::backend::{AddrRange, Backend};
use crate::experts::ExpertCounters;
use crate::experts::Experts;
use crate::model::Model;
use crate::model::forward::{Forward, ResidentAddrs};
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::phase::levelled::{levelled, levelled_len};
use crate::phase::plan::{DeviceBudget, Plan, PromptMemory};
use crate::phase::prompt_sizes::largest_fitting;
use crate::phase::region::Loan;
use crate::phase::scheduler::PhaseCounters;
use crate::phase::{Phase, Scheduler};
use crate::settings::EngineSettings;
use crate::units::{Bytes, SlotId, TokenId};
use costs::Costs;
use decode::Windows;
use embedding::Embedding;
use fit::Beside;
use guard::{Guard, PlacedPrompt};
use prefill::{Block, BlockReader, PromptPath};
use prefix_cache::{PrefixCache, PrefixCounters};
use sampler::{Sampler, Sampling};
use sequence::{Reuse, Sequence};
use timelines::{Place, Timelines, Wanted};
use way::{Choice, ModelTraffic, Reading, Way};

/// Slots that stay in use while the head is lent: a window needs one.
const ALIAS_KEPT_SLOTS: u32 = 1;

/// What to read and how to go on.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Tokens to write at most; fewer where the context ends.
    pub tokens_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they are not part of it.
    pub stop_tokens: Vec<TokenId>,
}

/// What happens while a request runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The prompt is being read: rows x layers done, of all.
    Reading {
        /// Done.
        done: u64,
        /// All.
        total: u64,
    },
    /// A token was written.
    Token(TokenId),
}

/// Why writing ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop token.
    Stop,
    /// As many tokens as asked for, or the context is full.
    Length,
    /// The caller asked to stop.
    Cancelled,
}

/// What a request did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Tokens written.
    pub tokens: Vec<TokenId>,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them, those whose keys and values were there already.
    pub reused_tokens: usize,
    /// Which timeline the request was answered on.
    pub place: Place,
    /// How the prompt was read.
    pub choice: Choice,
    /// Time of reading, the way back of lent memory included, up to the first token.
    pub prefill: Duration,
    /// Time of writing the tokens after the first.
    pub decode: Duration,
    /// Lowest free bytes seen at any step, by the device's own word where it gives one.
    pub lowest_free: Option<Bytes>,
    /// Bytes of prompt buffers beside the arena.
    pub spill_bytes: Bytes,
    /// Slots in use at the end.
    pub slots: u32,
    /// What the phases did in this request.
    pub phases: PhaseCounters,
    /// What the experts did in this request.
    pub experts: ExpertCounters,
    /// Graphs that were captured again in this request, because the head had moved.
    pub recaptures: u64,
}

impl Outcome {
    /// Prompt tokens a second.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prompt_tokens as f64 / self.prefill.as_secs_f64().max(1e-9)
    }

    /// Written tokens a second, the first one not counted: it belongs to reading.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn decode_tokens_per_s(&self) -> f64 {
        self.tokens.len().saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

/// Where the prompt buffers of a request lie.
struct PromptPlace<'a> {
    layout: PromptLayout,
    arena: AddrRange,
    spill: Option<AddrRange>,
    loan: Option<&'a Loan>,
}

/// Called at every event; may ask to stop.
pub type OnEvent<'a> = dyn FnMut(Event) -> ControlFlow<()> + 'a;

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
    prefix_cache: PrefixCache<B>,
    notices: Vec<String>,
    lowest_free: Option<Bytes>,
    spilled: Bytes,
    // Held for their memory alone; the addresses are in `resident`.
    _dense: B::Buffer,
    _kv: B::Buffer,
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
    }

    /// Conversations parked and resumed since the start.
    #[must_use]
    pub fn prefix_counters(&self) -> PrefixCounters {
        self.prefix_cache.counters()
    }

    /// The way in which tokens would be read now.
    #[must_use]
    pub fn choose_way(&self, reading: Reading) -> Choice {
        let shape = &self.model.shape;
        let arena_bytes = |size, way| self.prompt_layout(size, self.prompt_room(way)).map(|layout| layout.arena_bytes);
        let traffic = ModelTraffic {
            expert_bytes: self.model.weights.expert_bytes(),
            n_layer: shape.n_layer,
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
    /// [`EngineError`] for a prompt that is empty, too long or holds numbers that are no tokens, before anything is read; the
    /// device's faults; logits that are no numbers.
    pub fn generate(&mut self, request: &Request, on_event: &mut OnEvent<'_>) -> Result<Outcome, EngineError> {
        self.check_prompt(&request.prompt)?;
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
        let reused_tokens = self.resume_prefix(request)?;
        let fresh = &first[reused_tokens..];
        let choice = self.choose_way(Reading { past: reused_tokens, tokens: fresh.len() });
        let read = self.read(fresh, &choice, on_event)?;
        let mut outcome = Outcome {
            tokens: Vec::new(),
            finish: Finish::Cancelled,
            prompt_tokens: request.prompt.len(),
            reused_tokens,
            place: self.timelines.place(),
            choice,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            lowest_free: None,
            spill_bytes: Bytes::ZERO,
            slots: 0,
            phases: phases_before,
            experts: experts_before,
            recaptures: 0,
        };
        if read.is_continue() {
            self.write(last, request, started, &mut outcome, on_event)?;
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
        outcome.recaptures = self.windows.recaptures() - recaptures_before;
        self.windows.flush_hashes()?;
        Ok(outcome)
    }

    /// Finds what the caches and the parked conversations hold of a prompt, makes it the active timeline and says how many tokens
    /// that saves. What would be lost is parked first.
    fn resume_prefix(&mut self, request: &Request) -> Result<usize, EngineError> {
        if self.settings.prefix_cache == Bytes::ZERO {
            self.timelines.clear();
            return Ok(0);
        }
        let n_ctx = self.plan.ctx_tokens as usize;
        let reuse = if self.settings.deterministic { Reuse::Deterministic } else { Reuse::Any };
        let prompt = &request.prompt;
        let parked = self.prefix_cache.best(prompt, reuse);
        let tokens_max = request.tokens_max.min(n_ctx - prompt.len());
        let wanted = Wanted { prompt, tokens_max, parked: parked.map_or(0, |found| found.tokens) };
        let decision = self.timelines.decide(wanted, n_ctx, reuse);
        if self.timelines.loses(decision) {
            self.park(decision.place)?;
        }
        // Parking may have replaced or dropped the entry that was found.
        let parked = self.prefix_cache.best(prompt, reuse).filter(|_| decision.resumes);
        match parked {
            Some(found) => {
                let sequence = self.prefix_cache.resume(found, decision.first_row, &self.compute)?;
                self.timelines.set(decision.place, sequence);
            }
            None if decision.kept > 0 => self.timelines.continue_at(decision.place, decision.kept),
            None => self.timelines.set(decision.place, Sequence::starting_at(decision.first_row)),
        }
        if self.timelines.runs_into_side(prompt.len()) {
            self.park(Place::Side)?;
            self.timelines.clear_side();
        }
        Ok(self.timelines.active().len())
    }

    fn park(&mut self, place: Place) -> Result<(), EngineError> {
        if let Some(sequence) = self.timelines.at(place) {
            self.prefix_cache.park(sequence, &self.compute)?;
        }
        Ok(())
    }

    /// Sees to it that the active timeline may grow by a row: main grows over the side timeline, that one moves to main's place.
    fn make_room_for_row(&mut self) -> Result<(), EngineError> {
        let rows = self.timelines.active().len() + 1;
        if self.timelines.runs_into_side(rows) {
            self.park(Place::Side)?;
            self.timelines.clear_side();
        }
        if self.timelines.active().first_row() as usize + rows > self.plan.ctx_tokens as usize {
            self.park(Place::Main)?;
            let side = self.timelines.active();
            self.prefix_cache.move_to_start(side, &self.compute)?;
            let moved = Sequence::resumed(side.tokens().to_vec(), side.prompt_rows(), 0);
            self.timelines.clear_side();
            self.timelines.set(Place::Main, moved);
        }
        Ok(())
    }

    fn check_prompt(&self, prompt: &[TokenId]) -> Result<(), EngineError> {
        check_prompt(prompt, self.plan.ctx_tokens, self.model.shape.n_vocab)
    }

    /// Reads all prompt tokens but the last.
    fn read(&mut self, tokens: &[TokenId], choice: &Choice, on_event: &mut OnEvent<'_>) -> Result<ControlFlow<()>, EngineError> {
        match choice.way {
            Way::Windows => self.read_through_windows(tokens, on_event),
            Way::Wide | Way::Loan | Way::Alias => self.read_in_blocks(tokens, choice.size(), choice.way, on_event, None),
        }
    }

    /// Takes the memory for the prompt path, reads, and brings everything home, also where reading failed or was stopped.
    fn read_in_blocks(
        &mut self,
        tokens: &[TokenId],
        size: PromptSize,
        way: Way,
        on_event: &mut OnEvent<'_>,
        logits: Option<&mut LogitsSink<'_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let PlacedPrompt { layout, arena, spill, loan } = self.place_prompt(size, way)?;
        self.spilled = layout.spill_bytes;
        let read = self.read_blocks(tokens, &PromptPlace { layout, arena, spill, loan: loan.as_ref() }, on_event, logits);
        self.note_free_memory();
        if let Some(loan) = loan {
            self.bring_home(Some(loan))?;
        }
        read
    }

    fn read_blocks(
        &mut self,
        tokens: &[TokenId],
        place: &PromptPlace<'_>,
        on_event: &mut OnEvent<'_>,
        mut logits: Option<&mut LogitsSink<'_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let forward = Forward { shape: &self.model.shape, weights: &self.model.weights, resident: self.resident, exact: self.plan.exact };
        let mut reader = BlockReader::new(&mut self.prompt_path, forward, place.layout, place.arena, place.spill, &self.compute)?;
        let n_layer = u64::from(self.model.shape.n_layer);
        let total = tokens.len() as u64 * n_layer;
        let mut rows_done = 0;
        let blocks = levelled(tokens, place.layout.size.block);
        let n_blocks = blocks.len();
        for (index, tokens) in blocks.enumerate() {
            let mut on_rows = |rows| on_event(Event::Reading { done: rows_done + rows, total });
            let (position, first_row) = (self.timelines.active().len(), self.timelines.active().first_row());
            let block = Block { tokens, position, first_row, more_follow: index + 1 < n_blocks };
            let read = reader.read_block(block, &self.embedding, &self.scheduler, &mut self.experts, &mut on_rows);
            // What made reading fail is told; a device that fails here, too, has nothing on its way any more.
            let read = read.inspect_err(|_| drop(reader.finish()))?;
            if read.is_break() {
                reader.finish()?;
                return Ok(ControlFlow::Break(()));
            }
            if let Some(sample) = reader.sample()? {
                self.costs.note_block(&sample);
            }
            if let Some(sink) = logits.as_deref_mut() {
                let head = self.scheduler.kept_head(place.loan, &self.compute)?;
                let n_rows = u32::try_from(tokens.len()).expect("a block is bounded");
                reader.block_logits(n_rows, &head, sink)?;
            }
            self.timelines.active_mut().extend_read(tokens);
            rows_done += tokens.len() as u64 * n_layer;
        }
        reader.finish()?;
        Ok(ControlFlow::Continue(()))
    }

    fn write(
        &mut self,
        first: TokenId,
        request: &Request,
        started: Instant,
        outcome: &mut Outcome,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), EngineError> {
        let sampler = Sampler::new(request.sampling.clone());
        let room = self.plan.ctx_tokens as usize - self.timelines.active().len();
        let tokens_max = request.tokens_max.min(room);
        outcome.finish = Finish::Length;
        let mut logits = Vec::new();
        let mut next = first;
        let mut first_token_at = None;
        while outcome.tokens.len() < tokens_max {
            self.make_room_for_row()?;
            self.window(&[next], Some(&mut logits))?;
            self.accept(1);
            self.save_now_and_then();
            let position = self.timelines.active().len();
            let chosen = sampler.choose(&logits, self.timelines.active().tokens(), position);
            next = chosen.ok_or(EngineError::NotFinite { position: position - 1 })?;
            first_token_at.get_or_insert_with(Instant::now);
            if request.stop_tokens.contains(&next) {
                outcome.finish = Finish::Stop;
                break;
            }
            outcome.tokens.push(next);
            if on_event(Event::Token(next)).is_break() {
                outcome.finish = Finish::Cancelled;
                break;
            }
        }
        let first_token_at = first_token_at.unwrap_or_else(Instant::now);
        outcome.prefill = first_token_at - started;
        outcome.decode = first_token_at.elapsed();
        Ok(())
    }

    /// Logits of every one of `tokens`, read into a fresh sequence, handed to `sink` row by row. The head is kept for this.
    ///
    /// # Errors
    /// As [`Engine::generate`]; [`EngineError::NoLogitsRoom`] where even one token at a time does not fit.
    pub fn logits(
        &mut self,
        tokens: &[TokenId],
        on_event: &mut OnEvent<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let ctx_tokens = self.plan.ctx_tokens;
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > ctx_tokens as usize {
            return Err(EngineError::PromptTooLong { prompt_tokens: tokens.len(), ctx_tokens });
        }
        check_tokens(tokens, self.model.shape.n_vocab)?;
        self.reset();
        self.look_at_memory()?;
        let chunk = self.logits_chunk(tokens.len())?;
        let size = PromptSize { all_logits: true, ..PromptSize::chunk(chunk) };
        self.read_in_blocks(tokens, size, Way::Loan, on_event, Some(sink))
    }

    /// The largest chunk that leaves room for logits while the head is kept.
    fn logits_chunk(&self, n_tokens: usize) -> Result<u32, EngineError> {
        let room = self.plan.kept_head_room();
        let size = |chunk| PromptSize { all_logits: true, ..PromptSize::chunk(chunk) };
        let limit = levelled_len(n_tokens, self.plan.kept_head_chunk.max(1));
        match largest_fitting(limit, |chunk| self.prompt_layout(size(chunk), room).is_some()) {
            0 => Err(EngineError::NoLogitsRoom { needed: self.prompt_bytes(size(1)), left: room.arena }),
            chunk => Ok(chunk),
        }
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

fn check_tokens(tokens: &[TokenId], n_vocab: u32) -> Result<(), EngineError> {
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
