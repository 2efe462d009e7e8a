//! Goal: whatever fails, and whenever, the engine answers with an error or with the right tokens, and memory comes home. Method: the
//! same requests with a fault, a cancellation or a lost copy at every place there is, on the host backend.

mod common;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{all_logits, device, engine, greedy, run, settings, synthetic_model, tokens};
use ebbtide::backend::AddrRange;
use ebbtide::backends::host::{FreeReading, HostBackend};
use ebbtide::engine::way::Way;
use ebbtide::engine::{Engine, Event};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache, Refill};
use ebbtide::units::{Bytes, SlotId};

const TOKENS_WRITTEN: usize = 6;

fn model() -> Arc<Model> {
    synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K")
}

/// Deterministic, with the head lent, on a device whose head and slots all matter.
fn alias(chunk: u32, slots: u32) -> EngineSettings {
    EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(chunk),
        block: BlockSetting::Chunk,
        expert_cache: ExpertCache::Slots(slots),
        vram: Bytes::mib(16),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        ..settings(128)
    }
}

#[test]
fn a_request_cancelled_at_any_event_leaves_the_engine_as_it_was() {
    let prompt = tokens(1, 40, 500);
    for base in
        [alias(9, 12), EngineSettings { head_alias: false, ..alias(9, 12) }, EngineSettings { refill: Refill::Strict, ..alias(64, 3) }]
    {
        let mut engine = engine(&model(), &base);
        let request = greedy(&prompt, TOKENS_WRITTEN);
        let mut n_events = 0;
        let expected = engine
            .generate(&request, &mut |_| {
                n_events += 1;
                ControlFlow::Continue(())
            })
            .expect("runs")
            .tokens;
        for stop_at in 0..n_events {
            let mut event = 0;
            let outcome = engine.generate(&request, &mut |_| {
                event += 1;
                if event > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            let outcome = outcome.expect("cancelling is no error");
            assert_eq!(event, stop_at + 1, "no event after the stop");
            assert!(expected.starts_with(&outcome.tokens));
            assert_eq!(run(&mut engine, &request).tokens, expected, "after a stop at event {stop_at}");
        }
        assert_eq!(all_logits(&mut engine, &prompt).len(), prompt.len());
        assert_eq!(run(&mut engine, &request).tokens, expected, "after logits");
    }
}

#[test]
fn every_allocation_may_fail_once_and_all_memory_is_given_back() {
    let owned = EngineSettings { head_alias: false, vram: Bytes::mib(64), expert_cache: ExpertCache::Auto, ..alias(32, 1) };
    for settings in [alias(32, 8), owned] {
        let mut failed = 0;
        for n in 0.. {
            let backend = device(&settings);
            let watched = backend.share();
            watched.faults().mallocs_until_failure = Some(n);
            let started = Engine::start(backend, model(), &settings, &mut |_, _| ());
            let met = watched.faults().mallocs_until_failure.is_none();
            match started {
                Err(error) => {
                    failed += 1;
                    let text = error.to_string();
                    assert!(text.contains("VRAM") && text.contains(|c: char| c.is_ascii_digit()), "{text}");
                }
                Ok(mut engine) => {
                    assert_eq!(run(&mut engine, &greedy(&tokens(1, 20, 500), 2)).tokens.len(), 2);
                    drop(engine);
                }
            }
            assert_eq!(watched.used(), Bytes::ZERO, "after a failure at allocation {n}");
            if !met {
                break;
            }
            assert!(n < 100, "the fault was never past");
        }
        // Dense weights, KV cache, decode buffers. What the number of slots decides is tried again with fewer.
        assert_eq!(failed, 3);
    }
}

#[test]
fn a_device_lost_at_any_launch_is_an_error_and_memory_comes_home() {
    let settings = alias(9, 4);
    let request = greedy(&tokens(1, 20, 500), 3);
    let model = model();
    let mut lost = 0;
    for n in 0.. {
        let backend = device(&settings);
        let watched = backend.share();
        let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
        watched.faults().launches_until_lost = Some(n);
        let first = engine.generate(&request, &mut |_| ControlFlow::Continue(()));
        let Err(error) = first else { break };
        lost += 1;
        assert!(error.to_string().contains("device is lost"), "{error}");
        let second = engine.generate(&request, &mut |_| ControlFlow::Continue(()));
        assert!(second.is_err(), "a lost device stays lost, launch {n}");
        drop(engine);
        assert_eq!(watched.used(), Bytes::ZERO, "launch {n}");
        assert!(n < 1000, "the fault was never past");
    }
    assert!(lost > 20, "{lost}");
}

fn slot_range(engine: &Engine<HostBackend>, slot: u32) -> AddrRange {
    engine.slot_range(SlotId(slot)).expect("no slot was given back")
}

#[test]
fn a_slot_that_is_not_refilled_is_noticed() {
    let prompt = tokens(1, 60, 500);
    let model = model();
    let settings = EngineSettings { refill: Refill::Strict, ..alias(60, 16) };
    let request = greedy(&prompt, 24);
    let mut n_noticed = 0;
    let mut n_lent = 0;
    for slot in 0..16 {
        let backend = device(&settings);
        let watched = backend.share();
        let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
        let expected = run(&mut engine, &request);
        assert_eq!(expected.choice.way, Way::Alias);
        n_lent = expected.phases.slots_lent;
        watched.faults().lose_copies_into = Some(slot_range(&engine, slot));
        let disturbed = engine.generate(&request, &mut |_| ControlFlow::Continue(()));
        let noticed = disturbed.is_err() || disturbed.is_ok_and(|outcome| outcome.tokens != expected.tokens);
        // A kept slot has a copy coming only where its expert made room for a hotter one.
        let exchanged = engine.experts().counters().swaps > expected.experts.swaps;
        assert!(!noticed || slot >= 16 - n_lent || exchanged, "slot {slot} was not lent and still its copy was missed");
        n_noticed += u32::from(noticed);
        watched.faults().lose_copies_into = None;
        // The next loan fills lent slots anew; a kept one goes on with what it was thought to hold.
        let kept_is_wrong = noticed && slot < 16 - n_lent;
        assert!(kept_is_wrong || run(&mut engine, &request).tokens == expected.tokens, "right again after slot {slot}");
    }
    assert!(n_lent > 0);
    assert!(n_noticed > 0, "of {n_lent} lent slots none was missed");
}

#[test]
fn copies_lost_while_a_prompt_is_read_are_noticed() {
    let model = model();
    let request = greedy(&tokens(1, 60, 500), 12);
    let base = EngineSettings { expert_cache: ExpertCache::Auto, vram_reserve: Some(Bytes::ZERO), ..alias(59, 1) };
    // No bytes but those of the slots and the head: buffers of their own would take the ring out of the slab.
    let plan = engine(&model, &base).plan().clone();
    let resident = plan.resident_bytes() - plan.wide_bytes;
    let settings = EngineSettings { vram: resident + plan.slot_bytes * 10, ..base };
    // The first lent slot begins with the prompt's rows; the ring of experts comes last, so it ends in the head.
    for in_head in [false, true] {
        // By another start: one that has read the prompt keeps its experts, and then nothing comes through the ring.
        let expected = run(&mut engine(&model, &settings), &request);
        assert_eq!((expected.choice.way, expected.spill_bytes), (Way::Alias, Bytes::ZERO));
        let backend = device(&settings);
        let watched = backend.share();
        let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
        let first_lent = slot_range(&engine, engine.plan().slots - expected.phases.slots_lent);
        watched.faults().lose_copies_into = Some(if in_head { engine.head_range() } else { first_lent });
        let disturbed = engine.generate(&request, &mut |event| {
            // Reading is over: what comes home afterwards is not lost.
            if !matches!(event, Event::Reading { done, total } if done < total) {
                watched.faults().lose_copies_into = None;
            }
            ControlFlow::Continue(())
        });
        let noticed = disturbed.is_err() || disturbed.is_ok_and(|outcome| outcome.tokens != expected.tokens);
        assert!(noticed, "in the head: {in_head}");
        watched.faults().lose_copies_into = None;
        assert_eq!(run(&mut engine, &request).tokens, expected.tokens);
    }
}

#[test]
fn a_driver_that_misreads_free_memory_in_mid_run_is_asked_again() {
    let model = model();
    let settings = alias(9, 8);
    let request = greedy(&tokens(1, 40, 500), 4);
    for reading in [FreeReading::Zero, FreeReading::AboveTotal, FreeReading::Unknown, FreeReading::Fails] {
        for times in [1, 1000] {
            let backend = device(&settings);
            let watched = backend.share();
            let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
            let expected = run(&mut engine, &request);
            watched.faults().free_reading = Some((reading, times));
            let outcome = run(&mut engine, &request);
            assert_eq!(outcome.tokens, expected.tokens);
            let told = match (times, reading) {
                (1, _) => expected.lowest_free,
                // A device that says so again and again is full.
                (_, FreeReading::Zero) => Some(Bytes::ZERO),
                _ => None,
            };
            assert_eq!(outcome.lowest_free, told, "{reading:?}, {times} times");
        }
    }
}
