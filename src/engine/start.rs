//! From an opened model and device to a running engine: plan first, then take the memory once, in a fixed order.

use std::rc::Rc;
use std::sync::Arc;

use super::costs::{Costs, Prior};
use super::decode::Windows;
use super::embedding::Embedding;
use super::prefill::PromptPath;
use super::prefix_cache::{KvRows, PrefixCache};
use super::timelines::Timelines;
use super::{Engine, EngineError};
use crate::backend::{Backend, Copy, DeviceMemory, Direction, MemoryInfo};
use crate::experts::{ExpertStore, Experts};
use crate::model::forward::{Forward, ResidentAddrs};
use crate::model::layout::WindowLayout;
use crate::model::{Model, ModelWeights};
use crate::phase::plan::{DeviceBudget, PromptMemory};
use crate::phase::{Plan, Scheduler};
use crate::settings::EngineSettings;
use crate::units::Bytes;

/// Share of a device that is taken to be ours where the driver does not say what is free, in percent.
const SAFE_SHARE_PERCENT: u64 = 80;

/// Asks a device what it has for us.
///
/// A free figure of 0, above the total, or none at all is not believed: it is asked for once more, then our own books decide (at
/// start nothing is ours, so the device counts as empty). Where the driver says plainly that it does not know, a safe share of the
/// total is used. Either is told in the second value.
#[must_use]
pub fn read_device_budget<B: Backend>(backend: &B) -> (DeviceBudget, Option<String>) {
    let capabilities = backend.capabilities();
    let sane = |info: &MemoryInfo| info.free.is_some_and(|free| free > Bytes::ZERO && free <= info.total);
    let first = backend.memory_info();
    let reading = match &first {
        Ok(info) if sane(info) => first.clone(),
        _ => backend.memory_info(),
    };
    let budget = |total, used_by_others, os_budget| DeviceBudget {
        total,
        used_by_others,
        os_budget,
        graph_node_bytes: capabilities.graph_node_bytes,
        borrow_spill: capabilities.borrow_spill,
    };
    match reading {
        Ok(info) if sane(&info) => (budget(info.total, info.total.saturating_sub(info.free.unwrap_or(info.total)), info.os_budget), None),
        Ok(MemoryInfo { free: None, total, os_budget }) => {
            let ours = Bytes(total.0 / 100 * SAFE_SHARE_PERCENT);
            let notice = format!(
                "the {} driver does not say how much memory is free: planning with {ours}, {SAFE_SHARE_PERCENT} % of {total}; set --vram-mib to decide otherwise",
                capabilities.backend
            );
            (budget(total, total - ours, os_budget), Some(notice))
        }
        Ok(info) => {
            let notice = format!(
                "the {} driver's reading of free memory ({:?}) is not believed: planning by our own books",
                capabilities.backend, info.free
            );
            (budget(info.total, Bytes::ZERO, info.os_budget), Some(notice))
        }
        Err(error) => {
            // Not even the total is known; the largest allocation says how large the device is at least.
            let total = capabilities.max_allocation_bytes;
            let ours = Bytes(total.0 / 100 * SAFE_SHARE_PERCENT);
            let notice = format!(
                "free memory cannot be read ({error}): planning with {ours}, {SAFE_SHARE_PERCENT} % of the largest allocation; set --vram-mib to decide otherwise"
            );
            (budget(total, total - ours, None), Some(notice))
        }
    }
}

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
        notices.extend(notice);
        let plan = Plan::new(&model.shape, &model.weights, device, settings)?;
        let weights = &model.weights;
        let compute = backend.create_stream()?;
        let store = ExpertStore::register(&*backend, &model.file, &model.shape, weights, settings.pin)?;
        let (pinned, pageable) = store.pinned_and_pageable();
        if pageable > Bytes::ZERO {
            let reason = match settings.pin {
                Some(most) => format!("--pin-mib allows {}, or the system refused more", most),
                None => "the system refused more".to_owned(),
            };
            notices.push(format!("pinned host memory: {pinned} of the model, {pageable} pageable ({reason})"));
        }
        let mut costs = Costs::new(backend.capabilities().copy_engines > 0, Prior::of(&model.shape, weights));
        let dense = load_dense(&*backend, &store, weights, &compute, &mut costs, on_progress)?;
        let kv = backend.malloc(plan.kv_bytes, "KV cache")?;
        let resident =
            ResidentAddrs { dense: dense.range().start, kv: kv.range().start, n_ctx: plan.ctx_tokens, kv_format: plan.kv_format };
        let layout = WindowLayout::new(&model.shape, weights, plan.exact, plan.window_rows);
        let window_buffer = backend.malloc(layout.bytes, "decode buffers")?;
        let owned_prompt = match plan.prompt_memory {
            PromptMemory::Owned { bytes } => Some(backend.malloc(bytes, "prompt buffers")?),
            PromptMemory::Loan { .. } | PromptMemory::None => None,
        };
        let wide_buffer = match plan.wide_bytes {
            Bytes::ZERO => None,
            bytes => Some(backend.malloc(bytes, "wide window")?),
        };
        let prompt_path = PromptPath::new(Rc::clone(&backend), &model.shape, plan.block.max(plan.wide_rows))?;
        let window_times = [backend.create_event()?, backend.create_event()?];
        let head_source = store.file_addr(weights.head.file_index, Bytes(weights.head.offset));
        let scheduler = Scheduler::new(Rc::clone(&backend), &plan, head_source, weights.head.bytes)?;
        let table = Windows::<B>::table_range(&window_buffer, &layout);
        let mut experts = Experts::new(Rc::clone(&backend), store, weights, plan.slots, table)?;
        experts.fill(scheduler.slot_range())?;
        experts.publish_arrivals(&compute, true, scheduler.slot_range())?;
        let forward = Forward { shape: &model.shape, weights, resident, exact: plan.exact };
        let windows = Windows::new(Rc::clone(&backend), window_buffer, layout, &forward, &scheduler, &compute, &mut notices)?;
        let kv_rows = KvRows {
            base: resident.kv,
            layer_bytes: ModelWeights::kv_layer_bytes(&model.shape, plan.kv_format, plan.ctx_tokens),
            row_bytes: ModelWeights::kv_row_bytes(&model.shape, plan.kv_format),
            n_layer: model.shape.n_layer,
        };
        let prefix_cache = PrefixCache::new(Rc::clone(&backend), kv_rows, settings.prefix_cache);
        let embedding = Embedding::new(&model).map_err(start_error)?;
        Ok(Self {
            backend,
            settings: settings.clone(),
            plan,
            resident,
            scheduler,
            experts,
            windows,
            owned_prompt,
            wide_buffer,
            prompt_path,
            costs,
            window_times,
            compute,
            embedding,
            timelines: Timelines::default(),
            prefix_cache,
            notices,
            lowest_free: None,
            spilled: Bytes::ZERO,
            _dense: dense,
            _kv: kv,
            model,
        })
    }
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
