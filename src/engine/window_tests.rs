//! Goal: windows survive a head that has moved, and prompts are read through the largest ones. Method: the bundled model on the host
//! backend; the engine's slab is exchanged for one at another address, and the old one is freed and so poisoned.

use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use super::*;
use crate::backends::host::{HostBackend, HostConfig};
use crate::engine::sampler::Sampling;
use crate::engine::{Outcome, Request};
use crate::model::Model;
use crate::phase::Scheduler;
use crate::settings::{ContextSetting, EngineSettings, ExpertCache};
use crate::units::{Bytes, SlotId};

struct Rig {
    device: HostBackend,
    engine: Engine<HostBackend>,
}

impl Rig {
    /// An engine on a device with room for a second slab.
    fn new() -> Self {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
        let model = Arc::new(Model::open(model).expect("the bundled model"));
        let settings = EngineSettings {
            vram: Bytes::mib(64),
            ctx: ContextSetting::Tokens(128),
            expert_cache: ExpertCache::Slots(20),
            deterministic: true,
            ..EngineSettings::default()
        };
        let device = HostBackend::open(&HostConfig::new(settings.vram, 1)).expect("one thread");
        let watched = device.share();
        Self { device: watched, engine: Engine::start(device, model, &settings, &mut |_, _| ()).expect("the engine starts") }
    }

    fn run(&mut self) -> Outcome {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request =
            Request { prompt: (300..340).collect(), tokens_max: 12, sampling, stop_tokens: Vec::new(), logprobs: None, constraint: None };
        self.engine.generate(&request, &mut |_| ControlFlow::Continue(())).expect("the request is answered")
    }

    /// Places the slab anew.
    fn move_slab(&mut self) {
        let Engine { backend, model, plan, scheduler, experts, compute, .. } = &mut self.engine;
        let head = &model.weights.head;
        let source = experts.store.file_addr(head.file_index, Bytes(head.offset));
        let moved = Scheduler::new(Rc::clone(backend), plan, source, head.bytes).expect("room for two");
        assert_ne!(moved.regions().head(), scheduler.regions().head());
        experts.withdraw((0..plan.slots).map(SlotId), compute).expect("no fault");
        backend.synchronise(compute).expect("no fault");
        *scheduler = moved;
        let event = backend.create_event().expect("an event");
        experts.refill(&event, scheduler.slot_range()).expect("no fault");
    }
}

#[test]
fn a_head_that_moved_is_captured_again_once_and_changes_no_token() {
    let mut rig = Rig::new();
    let first = rig.run();
    let graphs = rig.engine.windows.graph_bytes();
    assert_eq!((first.recaptures, rig.engine.window_rows(), graphs), (0, 8, rig.engine.plan.graph_bytes));
    let used = rig.device.used();
    for _ in 0..2 {
        rig.move_slab();
        let moved = rig.run();
        assert_eq!((moved.tokens, moved.recaptures), (first.tokens.clone(), 8));
        let again = rig.run();
        assert_eq!((again.tokens, again.recaptures), (first.tokens.clone(), 0));
        assert_eq!((rig.device.used(), rig.engine.windows.graph_bytes()), (used, graphs), "the old graphs were given back");
    }
    assert_eq!(rig.engine.take_notices().len(), 0);
}

#[test]
fn a_head_that_moved_and_cannot_be_captured_leaves_windows_that_are_right() {
    let mut rig = Rig::new();
    let first = rig.run();
    rig.move_slab();
    rig.device.faults().captures_fail = true;
    let moved = rig.run();
    assert_eq!((moved.tokens, moved.recaptures), (first.tokens.clone(), 0));
    let notices = rig.engine.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("in 8 of 8 graphs"), "{notices:?}");
    // It is not tried, and not told of, every time.
    rig.device.faults().captures_fail = false;
    rig.move_slab();
    let back = rig.run();
    assert_eq!((back.tokens, back.recaptures, rig.engine.take_notices().len()), (first.tokens, 0, 0));
}

#[test]
fn a_prompt_is_read_through_the_largest_windows_and_may_be_stopped_between_them() {
    let mut rig = Rig::new();
    let tokens: Vec<TokenId> = (100..121).collect();
    let mut logits = [Vec::new(), Vec::new()];
    let mut told = Vec::new();
    let mut all = |event: Event<'_>| {
        let Event::Reading { done, total } = event else { panic!("nothing is written: {event:?}") };
        told.push((done, total));
        ControlFlow::Continue(())
    };
    assert!(rig.engine.read_through_windows(&tokens, 1, &mut all).expect("reads").is_continue());
    assert_eq!(told, [8, 16, 21].map(|done| (done, 21)));
    rig.engine.window(&[7], Some(&mut logits[0])).expect("a window");
    rig.engine.reset();
    for token in &tokens {
        rig.engine.window(&[*token], None).expect("a window");
        rig.engine.accept(1).expect("there is no state to commit");
    }
    rig.engine.window(&[7], Some(&mut logits[1])).expect("a window");
    assert!(logits[0] == logits[1] && logits[0].iter().all(|logit| logit.is_finite()));

    rig.engine.reset();
    let stopped = rig.engine.read_through_windows(&tokens, 1, &mut |_| ControlFlow::Break(())).expect("reads");
    assert!(stopped.is_break() && rig.engine.sequence_tokens() == &tokens[..8]);
}

#[test]
fn an_expert_that_several_rows_use_is_one_use() {
    let mut rig = Rig::new();
    let before = rig.engine.experts().counters();
    // The same token twice has the same experts in the first layer, and a window counts every expert once.
    rig.engine.window(&[50; 8], None).expect("a window");
    let after = rig.engine.experts().counters();
    let n_layer = rig.engine.model.shape.n_layer as usize;
    let uses = after.hits + after.misses - before.hits - before.misses;
    let distinct: u64 = rig
        .engine
        .windows
        .routes()
        .chunks(rig.engine.windows.routes().len() / n_layer)
        .map(|layer| {
            let mut experts = layer.to_vec();
            experts.sort_unstable();
            experts.dedup();
            experts.len() as u64
        })
        .sum();
    assert_eq!(uses, distinct);
    assert!(distinct < rig.engine.windows.routes().len() as u64);
}

#[test]
fn the_experts_of_a_window_are_those_of_its_tokens_layer_by_layer() {
    let mut rig = Rig::new();
    let shape = rig.engine.model.shape.clone();
    let tokens: Vec<TokenId> = (200..208).collect();
    let n_used = shape.n_expert_used as usize;
    let mut by_layer = vec![Vec::new(); shape.n_layer as usize];
    for token in &tokens {
        rig.engine.window(&[*token], None).expect("a window");
        rig.engine.accept(1).expect("there is no state to commit");
        for (layer, experts) in by_layer.iter_mut().zip(rig.engine.windows.routes().chunks(n_used)) {
            layer.push(experts.to_vec());
        }
    }
    for n_rows in [8, 5, 2] {
        rig.engine.reset();
        rig.engine.window(&tokens[..n_rows], None).expect("a window");
        let expected: Vec<u32> = by_layer.iter().flat_map(|rows| rows[..n_rows].concat()).collect();
        assert_eq!(rig.engine.windows.routes(), expected, "{n_rows} rows");
    }
}
