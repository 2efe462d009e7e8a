//! Goal: a head that is freed for a prompt and made anew behind it changes no token, wherever it comes back to, and when it cannot come
//! back at once. Method: the same requests as with a head that stays, in deterministic mode on micro models, with addresses that move or
//! return, captures and allocations that fail, and cancellations at every event.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{bard, device, engine, greedy, run, settings, tokens};
use ebbtide::backends::host::HostBackend;
use ebbtide::engine::way::Way;
use ebbtide::engine::{Engine, EngineError, Event, Outcome};
use ebbtide::model::Model;
use ebbtide::phase::slab::HEAD_PURPOSE;
use ebbtide::phase::{Phase, Plan, PlanError};
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache, HeadAliasMode, Refill};
use ebbtide::units::{Bytes, TokenId};

const TOKENS_WRITTEN: usize = 8;

/// Deterministic, with the head lent in `mode`, on a device that has room for 40 of 64 slots and nothing else.
fn aliased(model: &Model, mode: HeadAliasMode) -> EngineSettings {
    let base = EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(1000),
        block: BlockSetting::Chunk,
        expert_cache: ExpertCache::Auto,
        vram_reserve: Some(Bytes::ZERO),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        vram: Bytes::mib(64),
        ..settings(1024)
    };
    let backend = device(&base);
    let (budget, _) = ebbtide::engine::read_device_budget(&backend);
    let roomy = Plan::new(&model.shape, &model.weights, budget, &base).expect("64 MiB are plenty");
    let other: Bytes =
        roomy.decode.owners.iter().filter(|part| !["expert slots", "prompt buffers"].contains(&part.owner)).map(|part| part.bytes).sum();
    EngineSettings { vram: other + roomy.slot_bytes * 40, head_alias_mode: mode, ..base }
}

/// As long as the longest chunk that is read with the head freed, so that its buffers need all there is.
fn prompt(model: &Model) -> Vec<TokenId> {
    let settings = aliased(model, HeadAliasMode::Realloc);
    let (budget, _) = ebbtide::engine::read_device_budget(&device(&settings));
    let plan = Plan::new(&model.shape, &model.weights, budget, &settings).expect("fits");
    tokens(4, plan.alias_chunk as usize + 1, 4000)
}

struct Watched {
    engine: Engine<HostBackend>,
    device: HostBackend,
    prompt: Vec<TokenId>,
}

fn watched(model: &Arc<Model>, settings: &EngineSettings, prepare: impl FnOnce(&HostBackend)) -> Watched {
    let backend = device(settings);
    let device = backend.share();
    prepare(&device);
    let engine = Engine::start(backend, Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts");
    Watched { engine, device, prompt: prompt(model) }
}

impl Watched {
    fn ask(&mut self) -> Result<Outcome, EngineError> {
        self.engine.generate(&greedy(&self.prompt, TOKENS_WRITTEN), &mut |_| ControlFlow::Continue(()))
    }

    fn run(&mut self) -> Outcome {
        self.ask().expect("the request runs")
    }
}

fn expected(model: &Arc<Model>) -> Vec<TokenId> {
    let never_lent = EngineSettings { head_alias: false, vram: Bytes::mib(64), ..aliased(model, HeadAliasMode::Overlay) };
    run(&mut engine(model, &never_lent), &greedy(&prompt(model), TOKENS_WRITTEN)).tokens
}

#[test]
fn a_freed_head_gives_the_tokens_of_an_overlaid_and_of_a_kept_one() {
    let model = bard();
    let expected = expected(&model);
    for refill in [Refill::Lazy, Refill::Strict] {
        for mode in [HeadAliasMode::Overlay, HeadAliasMode::Realloc] {
            let settings = EngineSettings { refill, ..aliased(&model, mode) };
            let mut watched = watched(&model, &settings, |_| ());
            let taken = watched.device.used();
            assert_eq!(taken, watched.engine.plan().decode.total_bytes, "planned and taken");
            let window_sizes = u64::from(watched.engine.plan().window_rows);
            for request in 1..=3 {
                let before = watched.engine.head_range();
                let outcome = watched.run();
                assert_eq!((outcome.choice.way, &outcome.tokens), (Way::Alias, &expected), "{mode}, {refill}, request {request}");
                assert_eq!(outcome.phases.head_reloads, 1);
                assert_eq!(watched.device.used(), taken, "everything is home");
                let realloc = mode == HeadAliasMode::Realloc;
                assert_eq!(outcome.spill_bytes > Bytes::ZERO, realloc, "prompt buffers continue where the head was");
                assert_eq!(outcome.phases.arena_bytes_in_head > Bytes::ZERO, !realloc);
                // This device gives no address twice. Each size of window has a graph of the head.
                let recaptures = if realloc { window_sizes } else { 0 };
                assert_eq!((watched.engine.head_range() != before, outcome.recaptures), (realloc, recaptures));
            }
            assert!(watched.device.peak() <= settings.vram);
            assert_eq!(watched.engine.take_notices(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_head_that_returns_to_its_address_is_not_captured_again_and_one_that_moves_is() {
    let model = bard();
    let expected = expected(&model);
    let settings = aliased(&model, HeadAliasMode::Realloc);
    let mut watched = watched(&model, &settings, |device| device.faults().reuse_addresses = true);
    let home = watched.engine.head_range();
    for _ in 0..3 {
        let outcome = watched.run();
        assert_eq!((outcome.tokens, outcome.recaptures, watched.engine.head_range()), (expected.clone(), 0, home));
    }
    // The buffers beside the slab, then the head.
    watched.device.faults().moved_mallocs = 2;
    let outcome = watched.run();
    let window_sizes = u64::from(watched.engine.plan().window_rows);
    assert_eq!((outcome.tokens, outcome.recaptures), (expected.clone(), window_sizes));
    assert_ne!(watched.engine.head_range(), home);
    assert_eq!((watched.run().tokens, watched.device.faults().moved_mallocs), (expected, 0));
}

#[test]
fn where_the_moved_head_cannot_be_captured_windows_run_without_a_graph_and_that_is_told_once() {
    let model = bard();
    let expected = expected(&model);
    let mut watched = watched(&model, &aliased(&model, HeadAliasMode::Realloc), |_| ());
    watched.device.faults().captures_fail = true;
    let outcome = watched.run();
    assert_eq!((outcome.tokens, outcome.recaptures), (expected.clone(), 0));
    let notices = watched.engine.take_notices();
    assert!(matches!(notices.as_slice(), [notice] if notice.contains("without a captured graph")), "{notices:?}");
    assert_eq!(watched.run().tokens, expected);
    assert_eq!(watched.engine.take_notices(), Vec::<String>::new(), "told once");
}

#[test]
fn a_head_that_finds_no_room_takes_it_from_slots() {
    let model = bard();
    let expected = expected(&model);
    for refill in [Refill::Lazy, Refill::Strict] {
        let settings = EngineSettings { refill, ..aliased(&model, HeadAliasMode::Realloc) };
        let mut watched = watched(&model, &settings, |_| ());
        let slots = watched.engine.plan().slots;
        let device = watched.device.share();
        let mut taken = false;
        let outcome = watched.engine.generate(&greedy(&prompt(&model), TOKENS_WRITTEN), &mut |event| {
            if matches!(event, Event::Reading { .. }) && !taken {
                // Another program takes what was free and what the head will need.
                device.faults().held_by_others = Bytes(settings.vram.0 - device.used().0);
                taken = true;
            }
            ControlFlow::Continue(())
        });
        let outcome = outcome.expect("slots make room");
        assert_eq!(outcome.tokens, expected);
        assert!(outcome.slots < slots && outcome.slots >= 1, "{} of {slots}", outcome.slots);
        let notices = watched.engine.take_notices();
        let told = format!("gave {} slots back", slots - outcome.slots);
        assert!(notices.iter().any(|notice| notice.contains("output head needs") && notice.contains(&told)), "{told}: {notices:?}");
        assert_eq!(watched.run().tokens, expected);
        assert_eq!(watched.run().tokens, expected);
    }
}

#[test]
fn a_head_that_is_refused_several_times_comes_back_and_one_that_never_does_is_an_error_until_it_does() {
    let model = bard();
    let expected = expected(&model);
    for times in 1..=4 {
        let mut watched = watched(&model, &aliased(&model, HeadAliasMode::Realloc), |_| ());
        watched.device.faults().refused_purpose = Some((HEAD_PURPOSE, times));
        assert_eq!(watched.run().tokens, expected, "refused {times} times");
        assert_eq!(watched.device.faults().refused_purpose, Some((HEAD_PURPOSE, 0)));
        assert_eq!(watched.run().tokens, expected);
    }
    let mut watched = watched(&model, &aliased(&model, HeadAliasMode::Realloc), |_| ());
    watched.device.faults().refused_purpose = Some((HEAD_PURPOSE, u32::MAX));
    for _ in 0..3 {
        let error = watched.ask().expect_err("the head cannot be had");
        assert!(error.to_string().contains("output head"), "{error}");
        assert_eq!(watched.engine.phase(), Phase::Restoring, "no window runs");
    }
    watched.device.faults().refused_purpose = None;
    assert_eq!(watched.run().tokens, expected, "right as soon as there is room");
}

#[test]
fn an_allocation_may_fail_at_any_point_of_a_request() {
    let model = bard();
    let expected = expected(&model);
    let mut met = 0;
    for n in 0.. {
        let mut watched = watched(&model, &aliased(&model, HeadAliasMode::Realloc), |_| ());
        watched.device.faults().mallocs_until_failure = Some(n);
        assert_eq!(watched.run().tokens, expected, "allocation {n} fails");
        if watched.device.faults().mallocs_until_failure.is_some() {
            break;
        }
        met += 1;
        watched.device.faults().mallocs_until_failure = None;
        assert_eq!(watched.run().tokens, expected, "after allocation {n} failed");
        assert!(n < 50, "the fault was never past");
    }
    assert!(met >= 2, "the buffers beside the slab and the head: {met}");
}

#[test]
fn a_request_cancelled_or_a_device_lost_at_any_point_leaves_no_wrong_token() {
    let model = bard();
    let expected = expected(&model);
    let settings = EngineSettings { chunk: ChunkSetting::Tokens(70), ..aliased(&model, HeadAliasMode::Realloc) };
    let mut watched_engine = watched(&model, &settings, |_| ());
    let mut n_events = 0;
    let request = greedy(&prompt(&model), TOKENS_WRITTEN);
    let whole = watched_engine.engine.generate(&request, &mut |_| {
        n_events += 1;
        ControlFlow::Continue(())
    });
    assert_eq!(whole.expect("runs").tokens, expected);
    for stop_at in 0..n_events {
        let mut event = 0;
        let stopped = watched_engine.engine.generate(&request, &mut |_| {
            event += 1;
            if event > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(expected.starts_with(&stopped.expect("cancelling is no error").tokens));
        assert_eq!(watched_engine.engine.phase(), Phase::Decode);
    }
    assert_eq!(watched_engine.run().tokens, expected);
    for launches in (0..400).step_by(23) {
        let mut watched = watched(&model, &settings, |_| ());
        watched.device.faults().launches_until_lost = Some(launches);
        let Err(error) = watched.ask() else { break };
        assert!(error.to_string().contains("device is lost"), "{error}");
        assert!(watched.ask().is_err(), "a lost device stays lost");
        let Watched { engine, device, .. } = watched;
        drop(engine);
        assert_eq!(device.used(), Bytes::ZERO);
    }
}

#[test]
fn a_transfer_refused_at_any_point_is_an_error_or_right_tokens_and_the_next_request_is_right() {
    let model = bard();
    let expected = expected(&model);
    for (mode, refill) in [(HeadAliasMode::Overlay, Refill::Lazy), (HeadAliasMode::Realloc, Refill::Strict)] {
        let settings = EngineSettings { refill, ..aliased(&model, mode) };
        let mut watched = watched(&model, &settings, |_| ());
        let taken = watched.device.used();
        let (mut n_failed, mut n_unrestored) = (0, 0);
        for n in 0.. {
            watched.device.faults().transfers_until_refused = Some(n * 17);
            match watched.ask() {
                Ok(outcome) => assert_eq!(outcome.tokens, expected, "{mode}, {refill}, transfer {}", n * 17),
                Err(error) => {
                    n_failed += 1;
                    n_unrestored += u32::from(matches!(error, EngineError::NotRestored { .. }));
                    assert!(error.to_string().contains("injected fault"), "{error}");
                }
            }
            let past = watched.device.faults().transfers_until_refused.take().is_some();
            assert_eq!(watched.run().tokens, expected, "{mode}, {refill}, after transfer {} was refused", n * 17);
            // A window whose graph failed runs without graphs from then on.
            let without_graphs = taken - watched.engine.plan().graph_bytes;
            assert_eq!(watched.engine.phase(), Phase::Decode);
            assert!([taken, without_graphs].contains(&watched.device.used()), "{mode}, {refill}, transfer {}", n * 17);
            if past {
                break;
            }
            assert!(n < 500, "the fault was never past");
        }
        assert!(n_failed > 10 && n_unrestored > 0, "{mode}, {refill}: {n_failed}, of these {n_unrestored} on the way home");
    }
}

#[test]
fn a_device_without_memory_beside_the_slab_is_refused_by_name() {
    let model = bard();
    let settings = aliased(&model, HeadAliasMode::Realloc);
    let (budget, _) = ebbtide::engine::read_device_budget(&device(&settings));
    let without = ebbtide::phase::DeviceBudget { borrow_spill: false, ..budget };
    let error = Plan::new(&model.shape, &model.weights, without, &settings).expect_err("no spill");
    assert_eq!(error, PlanError::NoSpill);
    assert!(error.to_string().contains("--head-alias-mode overlay"), "{error}");
    let overlay = EngineSettings { head_alias_mode: HeadAliasMode::Overlay, ..settings };
    assert!(Plan::new(&model.shape, &model.weights, without, &overlay).is_ok());
}
