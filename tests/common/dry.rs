//! Engines of real shapes on a simulated device that charges time and computes nothing: a prompt of 30,000 tokens takes seconds.
//!
//! Seconds here are virtual, those of the modelled device. The engine above the backend does not know.

use std::ops::ControlFlow;
use std::sync::Arc;

use ebbtide::backends::host::{BusySeconds, ClockProfile, DryRun, HostBackend, HostConfig};
use ebbtide::engine::{Engine, Event, Outcome};
use ebbtide::model::layout::{PromptLayout, PromptSize};
use ebbtide::model::{Arithmetic, Model};
use ebbtide::phase::{DeviceBudget, Plan};
use ebbtide::settings::{BlockSetting, ChunkSetting, ContextSetting, DraftSetting, DraftSettings, EngineSettings, ExpertCache};
use ebbtide::units::Bytes;

use super::engine::{TempFile, greedy, tokens};
use super::real_shapes::Directory;

/// Opens a model that is all hole; its file may go once it is mapped.
pub fn real_shape(directory: Directory) -> Arc<Model> {
    let file = TempFile::new("-hole.gguf");
    directory.gguf().write(&file.0);
    Arc::new(Model::open(&file.0).expect("a sound directory"))
}

/// As [`real_shape`], without a draft layer.
pub fn real_shape_without_drafts(directory: Directory) -> Arc<Model> {
    let model = Arc::into_inner(real_shape(directory)).expect("nobody else has it yet");
    Arc::new(model.without_draft_layer().expect("it is sound without"))
}

/// No drafts: where nothing is computed all tokens are the same, and every guess would be right.
pub fn without_drafts() -> DraftSettings {
    DraftSettings { source: DraftSetting::Off, ..DraftSettings::default() }
}

/// Settings for figures of one token a window on a device of `vram` with a context of 32,768 tokens.
pub fn card(vram: Bytes) -> EngineSettings {
    EngineSettings { vram, ctx: ContextSetting::Tokens(32_768), threads: 1, drafts: without_drafts(), ..EngineSettings::default() }
}

/// Settings of a card on which exactly `slots` fit beside a context of 32,768 tokens, with no reserve.
pub fn card_with_slots(model: &Model, slots: u32) -> EngineSettings {
    let roomy = EngineSettings { vram_reserve: Some(Bytes::ZERO), ..card(Bytes::mib(1 << 20)) };
    let device = DeviceBudget {
        total: roomy.vram,
        used_by_others: Bytes::ZERO,
        os_budget: None,
        context_bytes: Bytes::ZERO,
        graph_node_bytes: Bytes(512),
        borrow_spill: true,
        halves_max: None,
    };
    let plan = |settings: &EngineSettings| Plan::new(&model.shape, &model.weights, device, settings).ok();
    let sum = |plan: &Plan| plan.resident_bytes() + plan.slot_bytes * u64::from(slots);
    let mut vram = sum(&plan(&roomy).expect("a terabyte is plenty"));
    // The wide window follows the room for slots, so the sum is made anew until it holds.
    for _ in 0..8 {
        let asked = EngineSettings { vram, expert_cache: ExpertCache::Slots(slots), ..roomy.clone() };
        let Some(plan) = plan(&asked) else { break };
        vram = sum(&plan);
    }
    EngineSettings { vram, ..roomy }
}

/// The fewest slots with which the default keeps 128 while a prompt is read in chunks of `chunk`, with settings that ask for it:
/// the document's rule.
pub fn document_card(model: &Model, chunk: u32, ring_slots: u32) -> EngineSettings {
    let size = PromptSize { ring_slots, ..PromptSize::chunk(chunk) };
    let bytes = PromptLayout::bytes(&model.shape, &model.weights, Arithmetic { exact: false, halves_max: None }, size);
    let lent = u32::try_from(bytes.0.div_ceil(model.weights.slot_bytes().0)).expect("a prompt takes fewer than 2^32 slots");
    EngineSettings { chunk: ChunkSetting::Tokens(chunk), block: BlockSetting::Chunk, ..card_with_slots(model, 128 + lent) }
}

/// An engine in a dry run.
pub struct DryRig {
    /// The device, to look at budget, peak and clock.
    pub device: HostBackend,
    pub engine: Engine<HostBackend>,
}

/// What reading a prompt took.
#[derive(Debug)]
pub struct Reading {
    /// From the request to the first token, the lent memory's way back included.
    pub first_token_s: f64,
    /// From the first token to the last.
    pub writing_s: f64,
    /// What link and device did until the first token, each on its own.
    pub busy: BusySeconds,
    /// Way, chunk, bytes over the link and the rest.
    pub outcome: Outcome,
}

impl Reading {
    /// Prompt tokens a second.
    pub fn tokens_per_s(&self) -> f64 {
        self.outcome.prompt_tokens as f64 / self.first_token_s
    }
}

impl DryRig {
    /// Starts an engine as `settings` ask for on a device of `profile`; with `None` it computes.
    pub fn open(model: &Arc<Model>, profile: ClockProfile, settings: &EngineSettings, dry: Option<DryRun>) -> Self {
        let config = HostConfig { clock: Some(profile), dry, ..HostConfig::new(settings.vram, settings.threads as usize) };
        let device = HostBackend::open(&config).expect("a thread can be started");
        let engine = Engine::start(device.share(), Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts");
        Self { device, engine }
    }

    /// A dry run with uniform routing.
    pub fn new(model: &Arc<Model>, profile: ClockProfile, settings: &EngineSettings) -> Self {
        Self::open(model, profile, settings, Some(DryRun::uniform(1)))
    }

    /// Reads a prompt and writes `tokens_max` tokens, at least one.
    pub fn run(&mut self, prompt_tokens: usize, tokens_max: usize) -> Reading {
        let prompt = tokens(prompt_tokens as u64, prompt_tokens, self.engine.model().shape.n_vocab);
        let (started_s, busy_before) = (self.device.host_time_s(), self.device.busy());
        let device = self.device.share();
        let mut first = None;
        let mut on_event = |event: Event<'_>| {
            if matches!(event, Event::Token(_)) {
                first.get_or_insert_with(|| (device.host_time_s(), device.busy()));
            }
            ControlFlow::Continue(())
        };
        let outcome = self.engine.generate(&greedy(&prompt, tokens_max.max(1)), &mut on_event).expect("the request runs");
        let (first_s, busy) = first.expect("a token was written");
        let busy = BusySeconds {
            to_device_s: busy.to_device_s - busy_before.to_device_s,
            to_host_s: busy.to_host_s - busy_before.to_host_s,
            operations_s: busy.operations_s - busy_before.operations_s,
        };
        Reading { first_token_s: first_s - started_s, writing_s: self.device.host_time_s() - first_s, busy, outcome }
    }

    /// Reads a prompt.
    pub fn read(&mut self, prompt_tokens: usize) -> Reading {
        self.run(prompt_tokens, 1)
    }
}
