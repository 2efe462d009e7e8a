//! From an opened model and device to a running engine: plan first, then take the memory once, in a fixed order.

use std::rc::Rc;
use std::sync::Arc;

use super::costs::{Costs, Prior};
use super::decode::Windows;
use super::drafts::Drafter;
use super::embedding::Embedding;
use super::fit::{PlanInputs, Taken};
use super::free_memory::read_device_budget;
use super::guard::Guard;
use super::learned::Learned;
use super::prefill::PromptPath;
use super::prefix_cache::{KvRows, PrefixCache};
use super::recurrent::Recurrent;
use super::timelines::Timelines;
use super::{Engine, EngineError, check_tokens};
use crate::backend::{Backend, Copy, DeviceMemory, Direction};
use crate::experts::ram::HostRam;
use crate::experts::{ExpertStore, Experts};
use crate::model::forward::{DraftHead, Forward, ResidentAddrs};
use crate::model::layout::WindowLayout;
use crate::model::{Model, ModelWeights};
use crate::phase::plan::draft_vocab;
use crate::settings::EngineSettings;
use crate::units::{Bytes, TokenId};

/// Slots that the draft layer's experts have at least, for each that a token uses: guesses follow one another, and the text must not
/// drive them all out between two.
const DRAFT_SLOTS_PER_USED: u32 = 2;

impl<B: Backend> Engine<B> {
    /// Plans, allocates and loads. `on_progress` is told bytes loaded, of all.
    ///
    /// # Errors
    /// [`EngineError::Plan`] where the model cannot fit as asked, before anything is allocated; the device's faults.
    pub fn start(
        backend: B,
        model: Arc<Model>,
        settings: &EngineSettings,
        on_progress: &mut dyn FnMut(Bytes, Bytes),
    ) -> Result<Self, EngineError> {
        let backend = Rc::new(backend);
        let mut notices = Vec::new();
        let (device, notice) = read_device_budget(&*backend);
        let budget_is_known = notice.is_none();
        notices.extend(notice);
        let inputs = PlanInputs { model: &model, settings, device };
        let plan = inputs.plan()?;
        let planned_slots = plan.slots;
        let weights = &model.weights;
        let compute = backend.create_stream()?;
        let pin_budget = HostRam::of_this_system().pin_budget(settings.pin);
        let store = ExpertStore::register(&*backend, &model.file, &model.shape, weights, pin_budget.most)?;
        let (pinned, pageable) = store.pinned_and_pageable();
        if pageable > Bytes::ZERO {
            let within = pin_budget.allows(Bytes::ZERO, pinned + pageable);
            let reason = if within { "the system refused more".to_owned() } else { pin_budget.to_string() };
            notices.push(format!("pinned host memory: {pinned} of the model, {pageable} pageable ({reason})"));
        } else if pin_budget.is_clamped() {
            notices.push(format!("pinned host memory: {pin_budget}"));
        }
        let mut costs = Costs::new(backend.capabilities().copy_engines > 0, Prior::of(&model.shape, weights));
        let dense = load_dense(&*backend, &store, weights, &compute, &mut costs, on_progress)?;
        let kv = backend.malloc(plan.kv_bytes, "KV cache")?;
        let draft_head = match draft_vocab(&model.shape, settings) {
            Some(tokens) => check_tokens(tokens, model.shape.n_vocab).map(|()| Some(tokens))?,
            None => None,
        };
        let draft_head = match draft_head {
            Some(tokens) => Some((load_draft_head(&*backend, &store, weights, tokens, &compute)?, tokens.to_vec())),
            None => None,
        };
        let recurrent = Recurrent::new(Rc::clone(&backend), &model.shape)?;
        let resident = ResidentAddrs {
            dense: dense.range().start,
            kv: kv.range().start,
            state: recurrent.addr(),
            draft_head: draft_head.as_ref().map(|(buffer, tokens)| DraftHead {
                addr: buffer.range().start,
                n_tokens: u32::try_from(tokens.len()).expect("tokens are 32-bit numbers"),
            }),
            n_ctx: plan.ctx_tokens,
            kv_format: plan.kv_format,
        };
        let layout = WindowLayout::new(&model.shape, weights, plan.arithmetic, plan.window_rows);
        let window_buffer = backend.malloc(layout.bytes, "decode buffers")?;
        let window_times = [backend.create_event()?, backend.create_event()?];
        let head_source = store.file_addr(weights.head.file_index, Bytes(weights.head.offset));
        let head = (head_source, weights.head.bytes);
        let Taken { plan, beside, scheduler } = Taken::take_what_is_there(&backend, inputs, plan, head, &mut notices)?;
        let prompt_path = PromptPath::new(Rc::clone(&backend), &model.shape, plan.block.max(plan.wide_rows))?;
        let table = Windows::<B>::table_range(&window_buffer, &layout);
        let mut experts = Experts::new(Rc::clone(&backend), store, weights, plan.slots, table)?;
        if model.shape.has_draft_layer {
            experts.keep_at_least(model.shape.n_layer, DRAFT_SLOTS_PER_USED * model.shape.n_expert_used);
        }
        let learned = settings.expert_profile.as_deref().map(|path| Learned::load(path, &model, &mut experts, &mut notices));
        experts.fill(scheduler.slot_range())?;
        experts.publish_arrivals(&compute, true, scheduler.slot_range())?;
        let forward = Forward { shape: &model.shape, weights, resident, arithmetic: plan.arithmetic };
        let windows = Windows::new(Rc::clone(&backend), window_buffer, layout, &forward, &scheduler, &compute, &mut notices)?;
        let kv_rows = KvRows {
            base: resident.kv,
            layer_bytes: ModelWeights::kv_layer_bytes(&model.shape, plan.kv_format, plan.ctx_tokens),
            row_bytes: ModelWeights::kv_row_bytes(&model.shape, plan.kv_format),
            n_layer: model.shape.n_kv_layer(),
        };
        let prefix_cache = PrefixCache::new(Rc::clone(&backend), kv_rows, plan.state_bytes, settings.prefix_cache);
        let embedding = Embedding::new(&model).map_err(start_error)?;
        let mut engine = Self {
            backend,
            device,
            guard: Guard::default(),
            settings: settings.clone(),
            plan,
            resident,
            scheduler,
            experts,
            learned,
            windows,
            beside: Some(beside),
            prompt_path,
            costs,
            window_times,
            compute,
            embedding,
            timelines: Timelines::default(),
            recurrent,
            drafter: Drafter::new(&settings.drafts, model.shape.has_draft_layer),
            checkpoints: Vec::new(),
            prefix_cache,
            notices,
            lowest_free: None,
            spilled: Bytes::ZERO,
            _dense: dense,
            _kv: kv,
            draft_vocab: draft_head.as_ref().map(|(_, tokens)| tokens.clone()),
            _draft_head: draft_head.map(|(buffer, _)| buffer),
            model,
        };
        if engine.backend.capabilities().virtual_memory && !engine.scheduler.keeps_addresses() {
            engine
                .notices
                .push("the slab has a plain allocation, since the driver refused to reserve addresses for it or to back them".to_owned());
        }
        engine.remember_free_memory();
        if engine.plan.slots == planned_slots && budget_is_known {
            engine.compare_with_plan();
        }
        Ok(engine)
    }
}

/// Copies the output head's rows for `tokens`, ascending, neighbours in one piece.
fn load_draft_head<B: Backend>(
    backend: &B,
    store: &ExpertStore<B>,
    weights: &ModelWeights,
    tokens: &[TokenId],
    stream: &B::Stream,
) -> Result<B::Buffer, EngineError> {
    let row_bytes = weights.head_row_bytes();
    let buffer = backend.malloc(weights.draft_head_bytes(tokens.len()), "draft head")?;
    let mut row = 0;
    for run in tokens.chunk_by(|left, right| left + 1 == *right) {
        let offset = Bytes(weights.head.offset) + row_bytes * u64::from(run[0]);
        let src = store.file_addr(weights.head.file_index, offset);
        let dst = buffer.range().start.offset(row_bytes * row);
        backend.copy(stream, Copy { dst, src, bytes: row_bytes * run.len() as u64, direction: Direction::ToDevice })?;
        row += run.len() as u64;
    }
    backend.synchronise(stream)?;
    Ok(buffer)
}

fn start_error(error: crate::model::ModelError) -> EngineError {
    EngineError::Model(Box::new(error))
}

/// Copies all dense weights into one allocation, which shows how fast the link is.
fn load_dense<B: Backend>(
    backend: &B,
    store: &ExpertStore<B>,
    weights: &ModelWeights,
    stream: &B::Stream,
    costs: &mut Costs,
    on_progress: &mut dyn FnMut(Bytes, Bytes),
) -> Result<B::Buffer, EngineError> {
    let buffer = backend.malloc(weights.dense_bytes, "dense weights")?;
    let (began, ended) = (backend.create_event()?, backend.create_event()?);
    let mut loaded = Bytes::ZERO;
    backend.record(stream, &began)?;
    for dense in &weights.dense {
        let src = store.file_addr(dense.tensor.file_index, Bytes(dense.tensor.offset));
        let dst = buffer.range().start.offset(dense.device_offset);
        backend.copy(stream, Copy { dst, src, bytes: dense.tensor.bytes, direction: Direction::ToDevice })?;
        loaded += dense.tensor.bytes;
        on_progress(loaded, weights.dense_bytes);
    }
    backend.record(stream, &ended)?;
    backend.synchronise(stream)?;
    costs.note_link(loaded, backend.elapsed_s(&began, &ended)?);
    Ok(buffer)
}
