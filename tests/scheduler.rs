//! Goal: the machine that moves VRAM refuses what is out of order without a trace, and experts are counted and found right whatever
//! their copies do. Method: a scheduler and its experts without an engine, then engines on schedules whose copies can be counted.

mod common;

use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use common::engine::{device, engine, greedy, run, settings, synthetic_model, tokens};
use ebbtide::backend::op::ExpertAddrs;
use ebbtide::backend::{Backend, Copy, DeviceMemory, Direction, PinnedMemory};
use ebbtide::backends::host::{HostBackend, HostConfig, HostMemory, HostStream};
use ebbtide::engine::way::Way;
use ebbtide::engine::{Engine, read_device_budget};
use ebbtide::experts::{ExpertStore, Experts};
use ebbtide::model::Model;
use ebbtide::phase::region::{LoanRequest, Owner};
use ebbtide::phase::{Loan, Phase, PhaseError, Plan, RegionError, Scheduler};
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache, HeadAliasMode, Refill, ShortRead};
use ebbtide::units::{Bytes, ExpertId, SlotId};

const ARGS: &str = "--shape micro --seed 4 --type Q8_0";
const SLOTS: u32 = 10;

/// A scheduler with experts, as an engine has them.
struct Rig {
    backend: Rc<HostBackend>,
    scheduler: Scheduler<HostBackend>,
    experts: Experts<HostBackend>,
    stream: HostStream,
    table: HostMemory,
}

impl Rig {
    fn new(model: &Model) -> Self {
        Self::with(model, settings(256))
    }

    fn with(model: &Model, settings: EngineSettings) -> Self {
        let settings = EngineSettings { vram: Bytes::mib(64), expert_cache: ExpertCache::Slots(SLOTS), ..settings };
        let backend = Rc::new(HostBackend::open(&HostConfig::new(settings.vram, 1)).expect("one thread"));
        let (budget, _) = read_device_budget(&*backend);
        let plan = Plan::new(&model.shape, &model.weights, budget, &settings).expect("fits");
        let store = ExpertStore::register(&*backend, &model.file, &model.shape, &model.weights, None).expect("registers");
        let head = &model.weights.head;
        let head_source = store.file_addr(head.file_index, Bytes(head.offset));
        let scheduler = Scheduler::new(Rc::clone(&backend), &plan, head_source, head.bytes).expect("room for the slab");
        let table_bytes = Bytes::from(model.shape.n_routed_experts() as usize * ExpertAddrs::BYTES);
        let table = backend.malloc(table_bytes, "table").expect("room");
        let mut experts = Experts::new(Rc::clone(&backend), store, &model.weights, plan.slots, table.range()).expect("events");
        let stream = backend.create_stream().expect("a stream");
        experts.fill(scheduler.slot_range()).expect("copies");
        experts.publish_arrivals(&stream, true, scheduler.slot_range()).expect("arrive");
        Self { backend, scheduler, experts, stream, table }
    }

    fn lend(&mut self, bytes: Bytes, with_head: bool) -> Result<Loan, PhaseError> {
        self.scheduler.lend(LoanRequest { bytes, with_head, keep_slots: 1 }, &mut self.experts, &self.stream)
    }

    fn restore(&mut self, loan: Loan, refill: Refill) -> Result<(), PhaseError> {
        self.scheduler.restore(loan, &mut self.experts, &self.stream, refill)
    }

    fn publish(&mut self, wait: bool) {
        self.experts.publish_arrivals(&self.stream, wait, self.scheduler.slot_range()).expect("copies arrive");
    }

    /// The expert table as the device has it.
    fn table(&self) -> Vec<u8> {
        let range = self.table.range();
        let landing = self.backend.alloc_pinned(range.bytes, "a test").expect("pinned memory");
        let copy = Copy { dst: landing.range().start, src: range.start, bytes: range.bytes, direction: Direction::ToHost };
        self.backend.copy(&self.stream, copy).expect("a copy");
        self.backend.synchronise(&self.stream).expect("the table arrives");
        let mut bytes = vec![0; range.bytes.as_usize()];
        landing.read(0, &mut bytes);
        bytes
    }

    /// The same as it should be.
    fn table_by_the_books(&self) -> Vec<u8> {
        let resident = |expert| self.experts.resident(expert, self.scheduler.slot_range());
        self.experts.store.all().flat_map(|expert| resident(expert).unwrap_or(self.experts.store.addrs(expert)).to_bytes()).collect()
    }

    /// Experts that a window would find in slots.
    fn n_arrived(&self) -> usize {
        let found = |expert: &ExpertId| self.experts.resident(*expert, self.scheduler.slot_range()).is_some();
        self.experts.store.all().filter(found).count()
    }

    /// All that a refused call must leave as it was.
    fn state(&mut self) -> (Phase, Vec<Owner>, usize, usize, u64) {
        let regions = self.scheduler.regions();
        let owners = (0..SLOTS).map(|slot| regions.owner(regions.slot(SlotId(slot)))).chain([regions.owner(regions.head())]).collect();
        let loans = self.scheduler.counters().expect("the device lives").loans;
        (self.scheduler.phase(), owners, self.experts.cache().n_resident(), self.n_arrived(), loans)
    }
}

fn assert_out_of_order<T>(result: Result<T, PhaseError>, wanted: &str, phase: Phase) {
    match result {
        Err(PhaseError::OutOfOrder { call, phase: met }) => assert_eq!((call, met), (wanted, phase)),
        Err(other) => panic!("{wanted}: {other}"),
        Ok(_) => panic!("{wanted} must be refused in {phase:?}"),
    }
}

#[test]
fn transitions_out_of_order_are_refused_and_change_nothing() {
    let model = synthetic_model(ARGS);
    let (mut rig, mut other) = (Rig::new(&model), Rig::new(&model));
    let most = model.weights.slot_bytes() * u64::from(SLOTS - rig.scheduler.sizes().main_first());
    let before = rig.state();
    assert_eq!((before.0, before.3), (Phase::Decode, SLOTS as usize));

    let foreign = other.lend(most, true).expect("fits");
    assert_out_of_order(rig.restore(foreign, Refill::Strict), "restore", Phase::Decode);
    let too_large = rig.lend(most + most, true).expect_err("more than there is");
    assert!(matches!(too_large, PhaseError::Region(RegionError::TooLarge { .. })), "{too_large}");
    assert_eq!(rig.state(), before);

    let lent_bytes = model.weights.head.bytes + model.weights.slot_bytes();
    let loan = rig.lend(lent_bytes, true).expect("fits");
    let lending = rig.state();
    assert_eq!(lending.0, Phase::Prefill);
    assert_out_of_order(rig.lend(Bytes(1), false), "lend", Phase::Prefill);
    assert_out_of_order(rig.scheduler.decode(), "decode", Phase::Prefill);
    assert_out_of_order(rig.scheduler.kept_head(Some(&loan), &rig.stream), "kept_head", Phase::Prefill);
    assert_out_of_order(rig.scheduler.kept_head(None, &rig.stream), "kept_head", Phase::Prefill);
    let mut third = Rig::new(&model);
    let foreign = third.lend(lent_bytes, true).expect("fits");
    let refusal = rig.restore(foreign, Refill::Strict).expect_err("the loan of another slab");
    assert!(matches!(refusal, PhaseError::Region(RegionError::ForeignLoan { .. })), "{refusal}");
    assert_eq!(rig.state(), lending);

    rig.restore(loan, Refill::Strict).expect("its own loan");
    assert_eq!(rig.state().3, SLOTS as usize, "every slot has its expert again");
    assert!(rig.scheduler.decode().is_ok() && rig.scheduler.regions().all_home());
}

#[test]
fn buffers_beside_the_slab_need_a_freed_head_and_cannot_be_laid_out_anew() {
    let model = synthetic_model(ARGS);
    let freed = EngineSettings { head_alias: true, head_alias_mode: HeadAliasMode::Realloc, ..settings(256) };
    let mut rig = Rig::with(&model, freed);
    let head = rig.scheduler.regions().head();
    let lease = rig.scheduler.regions().lease(head);
    let taken = rig.backend.used();
    let slot_bytes = model.weights.slot_bytes();

    let mut kept = rig.lend(slot_bytes, false).expect("fits");
    assert_out_of_order(rig.scheduler.continue_beside(&mut kept, Bytes(256)), "continue_beside", Phase::Prefill);
    assert_eq!(kept.relayout(slot_bytes).expect("a loan in the slab alone").bytes, slot_bytes);
    rig.restore(kept, Refill::Strict).expect("its own loan");
    assert!(rig.scheduler.regions().honours(&lease), "a head that was kept has not moved");

    let mut loan = rig.lend(slot_bytes, true).expect("fits");
    assert_eq!(rig.backend.used() + rig.scheduler.sizes().head_bytes, taken, "the head is freed");
    let spill = rig.scheduler.continue_beside(&mut loan, Bytes(4096)).expect("where the head was");
    assert_eq!((loan.spill(), spill.bytes), (Some(spill), Bytes(4096)));
    assert_out_of_order(rig.scheduler.continue_beside(&mut loan, Bytes(256)), "continue_beside", Phase::Prefill);
    let refused = loan.relayout(Bytes(1)).expect_err("a hybrid layout");
    assert_eq!(refused, RegionError::HybridLayout { spill: Bytes(4096) });
    assert_out_of_order(rig.scheduler.give_up_piece(&mut rig.experts, &rig.stream), "give_up_piece", Phase::Prefill);
    assert_out_of_order(rig.scheduler.recover(&mut rig.experts, &rig.stream), "recover", Phase::Prefill);
    rig.restore(loan, Refill::Strict).expect("its own loan");
    assert_eq!((rig.backend.used(), rig.n_arrived()), (taken, SLOTS as usize), "all is home");
    assert!(rig.scheduler.regions().head() != head && !rig.scheduler.regions().honours(&lease), "the head has moved");
    let stale = rig.scheduler.decode().expect("home").check_leases(&[lease]);
    assert!(matches!(stale, Err(PhaseError::StaleLease(_))), "{stale:?}");
}

#[test]
fn a_head_beside_a_loan_that_left_it_alone_can_be_read() {
    let model = synthetic_model(ARGS);
    let mut rig = Rig::new(&model);
    let loan = rig.lend(model.weights.slot_bytes(), false).expect("fits");
    let head = rig.scheduler.kept_head(Some(&loan), &rig.stream).expect("kept").range();
    assert_eq!(head, rig.scheduler.regions().head());
    rig.restore(loan, Refill::Lazy).expect("its own loan");
}

#[test]
fn slots_that_are_lent_again_while_they_fill_are_waited_for() {
    let model = synthetic_model(ARGS);
    let mut rig = Rig::new(&model);
    let bytes = model.weights.slot_bytes() * 6;
    let loan = rig.lend(bytes, false).expect("fits");
    assert_eq!(rig.n_arrived(), 4);
    assert_eq!(rig.table(), rig.table_by_the_books());
    rig.backend.faults().stalled_polls = 1_000_000;
    rig.restore(loan, Refill::Lazy).expect("its own loan");
    assert_eq!((rig.experts.n_refilling(), rig.experts.cache().n_resident()), (6, SLOTS as usize));
    rig.publish(false);
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (6, 4), "what has not arrived is not found in its slot");

    let loan = rig.lend(model.weights.slot_bytes() * 3, false).expect("fits");
    assert_eq!((rig.experts.n_refilling(), rig.experts.cache().n_resident()), (3, 7), "three were waited for and taken out");
    rig.publish(false);
    assert_eq!(rig.n_arrived(), 7, "copies before those in the same stream are done as well");
    rig.restore(loan, Refill::Lazy).expect("its own loan");
    rig.publish(false);
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (3, 7));
    rig.publish(true);
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (0, SLOTS as usize));
    assert_eq!(rig.table(), rig.table_by_the_books());
}

#[test]
fn experts_are_exchanged_without_waiting_and_found_once_they_have_arrived() {
    let model = synthetic_model(ARGS);
    let mut rig = Rig::new(&model);
    // One expert of each layer that has no slot.
    let absent = |expert: &ExpertId| rig.experts.cache().slot_of(*expert).is_none();
    let hot = [0, 1].map(|layer| rig.experts.store.all().filter(absent).find(|expert| expert.layer == layer).expect("six have none"));
    let routes = hot.map(|expert| expert.expert);
    rig.backend.faults().stalled_polls = 1_000_000;
    for _ in 0..4 {
        rig.experts.note_window(&routes, model.shape.n_layer, &rig.stream, rig.scheduler.slot_range()).expect("copies are queued");
    }
    let counters = rig.experts.counters();
    assert_eq!((counters.swaps, counters.hits, counters.misses), (2, 0, 8));
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (2, SLOTS as usize - 2), "they are on their way, and nobody waited");
    // While they are, nothing else is exchanged.
    for _ in 0..8 {
        rig.experts.note_window(&routes, model.shape.n_layer, &rig.stream, rig.scheduler.slot_range()).expect("nothing to do");
    }
    assert_eq!(rig.experts.counters().swaps, 2);
    rig.publish(true);
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (0, SLOTS as usize));
    assert!(hot.iter().all(|&expert| rig.experts.resident(expert, rig.scheduler.slot_range()).is_some()), "{hot:?}");
    assert_eq!(rig.table(), rig.table_by_the_books(), "the device knows what the books know");
}

#[test]
fn experts_that_make_room_after_one_loan_are_not_taken_for_resident_after_the_next() {
    let model = synthetic_model(ARGS);
    let mut rig = Rig::new(&model);
    let bytes = model.weights.slot_bytes() * 6;
    for (layer, uses) in [(0, 3), (1, 9)] {
        let loan = rig.lend(bytes, false).expect("fits");
        let absent = |expert: &ExpertId| expert.layer == layer && rig.experts.cache().slot_of(*expert).is_none();
        let hot: Vec<ExpertId> = rig.experts.store.all().filter(absent).collect();
        hot.iter().for_each(|&expert| (0..uses).for_each(|_| rig.experts.note_prompt(expert)));
        rig.backend.faults().stalled_polls = 1_000_000;
        rig.restore(loan, Refill::Lazy).expect("its own loan");
        assert!(rig.experts.counters().swaps >= 1, "a cold expert of a kept slot made room");
    }
    rig.publish(true);
    assert_eq!((rig.experts.n_refilling(), rig.n_arrived()), (0, SLOTS as usize));
    assert_eq!(rig.table(), rig.table_by_the_books());
}

fn deterministic(slots: u32) -> EngineSettings {
    let base = settings(256);
    EngineSettings {
        deterministic: true,
        vram: Bytes::mib(64),
        expert_cache: ExpertCache::Slots(slots),
        chunk: ChunkSetting::Tokens(32),
        block: BlockSetting::Chunk,
        short_read: ShortRead::Tokens(0),
        ..base
    }
}

fn aliased(slots: u32) -> EngineSettings {
    EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..deterministic(slots) }
}

#[test]
fn prompts_one_after_another_while_copies_stall_give_the_same_tokens() {
    let model = synthetic_model(ARGS);
    let prompts: Vec<_> = (0..4).map(|seed| tokens(seed, 70, 500)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| run(&mut engine(&model, &deterministic(16)), &greedy(prompt, 6)).tokens).collect();
    let backend = device(&aliased(8));
    let watched = backend.share();
    let mut engine = Engine::start(backend, Arc::clone(&model), &aliased(8), &mut |_, _| ()).expect("starts");
    for (prompt, expected) in prompts.iter().zip(&expected) {
        watched.faults().stalled_polls = 1_000_000;
        let outcome = run(&mut engine, &greedy(prompt, 6));
        assert_eq!(&outcome.tokens, expected);
    }
    assert!(engine.experts().n_refilling() > 0, "copies were still stalled at the end");
}

#[test]
fn hits_misses_and_bytes_over_the_link_are_those_of_the_schedule() {
    // Every token uses all 8 experts, so routes are known: each pass over a layer touches them all.
    let model = synthetic_model("--shape micro --seed 4 --type Q8_0 --used 8");
    let n_routed = u64::from(model.shape.n_routed_experts());
    let expert_bytes: Bytes = model.weights.experts[0].parts().iter().map(|part| part.expert_bytes).sum();
    let n_prompt = 101;
    let n_written = 9;
    for (settings, way, slots) in
        [(aliased(8), Way::Alias, 8), (aliased(3), Way::Alias, 3), (deterministic(12), Way::Loan, 12), (deterministic(16), Way::Loan, 16)]
    {
        let settings = EngineSettings { refill: Refill::Strict, ..settings };
        let mut engine = engine(&model, &settings);
        let outcome = run(&mut engine, &greedy(&tokens(1, n_prompt, 500), n_written));
        assert_eq!((outcome.choice.way, outcome.choice.chunk), (way, 25));
        let counters = outcome.experts;
        let windows = n_written as u64;
        assert_eq!(counters.hits + counters.misses, windows * n_routed, "{counters:?}");
        assert_eq!(counters.hits, windows * slots, "what is resident is hit by every window");
        let lent = u64::from(outcome.phases.slots_lent);
        let passes = 4;
        // Of the second and last layer, prompts need no experts; the kept slots begin with one of the first and take turns.
        let streamed = passes * (n_routed / 2 - (slots - lent).div_ceil(2));
        let copies = streamed + lent + counters.misses + counters.swaps;
        assert_eq!(counters.link_bytes, expert_bytes * copies, "{lent} lent: {counters:?}");
    }
}

#[test]
fn windows_that_read_a_short_prompt_are_counted_like_any_other() {
    let model = synthetic_model(ARGS);
    let settings = EngineSettings {
        deterministic: false,
        expert_cache: ExpertCache::Auto,
        vram: Bytes::mib(4),
        short_read: ShortRead::Auto,
        ..deterministic(6)
    };
    let mut engine = engine(&model, &settings);
    let outcome = run(&mut engine, &greedy(&tokens(1, 2, 500), 10));
    assert_eq!(outcome.choice.way, Way::Windows, "{}", outcome.choice.reason);
    let counters = outcome.experts;
    assert_eq!(counters.hits + counters.misses, (1 + 10) * 2 * 2, "windows x layers x experts used");
    let expert_bytes: Bytes = model.weights.experts[0].parts().iter().map(|part| part.expert_bytes).sum();
    assert_eq!(counters.link_bytes, expert_bytes * (counters.misses + counters.swaps));
}

#[test]
fn what_may_not_be_pinned_stays_pageable_and_both_numbers_are_told() {
    let model = synthetic_model(ARGS);
    let request = greedy(&tokens(1, 60, 500), 12);
    let expected = run(&mut engine(&model, &deterministic(8)), &request).tokens;
    let told = |engine: &mut Engine<HostBackend>| {
        let notices = engine.take_notices();
        let [notice] = notices.as_slice() else { panic!("one line is told: {notices:?}") };
        let (pinned, pageable) = engine.experts().store.pinned_and_pageable();
        assert_eq!(pinned + pageable, Bytes(model.file.file_map(0).expect("one file").bytes()));
        assert!(pinned > Bytes::ZERO && pinned <= Bytes::mib(1), "a part is pinned: {pinned}");
        let wanted = format!("pinned host memory: {pinned} of the model, {pageable} pageable");
        assert!(notice.contains(&wanted), "{wanted} is not in: {notice}");
        notice.clone()
    };
    let limited = EngineSettings { pin: Some(Bytes::mib(1)), ..deterministic(8) };
    let mut by_budget = engine(&model, &limited);
    assert!(told(&mut by_budget).contains("--pin-mib"));
    assert_eq!(run(&mut by_budget, &request).tokens, expected);

    let backend = device(&deterministic(8));
    backend.faults().register_limit = Some(Bytes::mib(1));
    let mut by_system = Engine::start(backend, Arc::clone(&model), &deterministic(8), &mut |_, _| ()).expect("starts all the same");
    assert!(told(&mut by_system).contains("the system"));
    assert_eq!(run(&mut by_system, &request).tokens, expected);
}

#[test]
fn a_failed_allocation_names_its_pool() {
    let model = synthetic_model(ARGS);
    for successes in 0..3 {
        let backend = device(&deterministic(8));
        backend.faults().mallocs_until_failure = Some(successes);
        let error =
            Engine::start(backend, Arc::clone(&model), &deterministic(8), &mut |_, _| ()).err().expect("memory is short").to_string();
        assert!(error.contains("VRAM") && !error.contains("pinned"), "{error}");
    }
    let mut engine = engine(&model, &deterministic(8));
    assert!(engine.generate(&greedy(&[1, 2, 3], 1), &mut |_| ControlFlow::Continue(())).is_ok());
}
