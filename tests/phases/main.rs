//! Goal: lending VRAM to the prompt path never changes a token, and everything lent comes home. Method: the same requests with and
//! without loans on micro models, in deterministic mode, with the device's peak and free memory watched.

#[path = "../common/mod.rs"]
mod common;

mod any_order;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{bard, device, engine, greedy, hybrid_bard, run, settings, synthetic_model, tokens};
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::engine::way::Way;
use ebbtide::engine::{Engine, Event, Finish, Outcome, read_device_budget};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache, Refill};
use ebbtide::units::{Bytes, TokenId};

const CTX_TOKENS: u32 = 512;
const TOKENS_WRITTEN: usize = 24;

/// Deterministic settings on a device on which the given slots, the chunk's buffers and everything resident fit.
fn deterministic(chunk: u32, slots: ExpertCache) -> EngineSettings {
    EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(chunk),
        block: BlockSetting::Chunk,
        expert_cache: slots,
        vram: Bytes::mib(64),
        ..settings(CTX_TOKENS)
    }
}

fn with_alias(settings: &EngineSettings) -> EngineSettings {
    EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..settings.clone() }
}

fn outcome(model: &Arc<Model>, settings: &EngineSettings, prompt: &[TokenId]) -> Outcome {
    run(&mut engine(model, settings), &greedy(prompt, TOKENS_WRITTEN))
}

fn assert_alias_happened(outcome: &Outcome) {
    assert_eq!(outcome.choice.way, Way::Alias);
    assert!(outcome.phases.head_reloads >= 1, "{:?}", outcome.phases);
    assert!(outcome.phases.arena_bytes_in_head > Bytes::ZERO, "{:?}", outcome.phases);
}

/// All combinations of the contract on one model; `slots` lists cache sizes.
fn tokens_do_not_depend_on_memory(model: &Arc<Model>, prompt: &[TokenId], slots: &[u32]) {
    let n_routed = model.shape.n_routed_experts();
    let expected = outcome(model, &deterministic(64, ExpertCache::Slots(n_routed)), prompt).tokens;
    assert_eq!(expected.len(), TOKENS_WRITTEN);
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]), "one token over and over proves little: {expected:?}");
    for &slots in slots {
        for chunk in [7, 32, 64, 256] {
            let kept = deterministic(chunk, ExpertCache::Slots(slots));
            let kept_outcome = outcome(model, &kept, prompt);
            assert_eq!(kept_outcome.tokens, expected, "head kept, chunk {chunk}, {slots} slots");
            assert_eq!(kept_outcome.choice.way, Way::Loan);
            let lent_outcome = outcome(model, &with_alias(&kept), prompt);
            assert_alias_happened(&lent_outcome);
            assert_eq!(lent_outcome.tokens, expected, "head lent, chunk {chunk}, {slots} slots");
        }
    }
}

#[test]
fn tokens_of_a_quantised_model_do_not_depend_on_loans_chunks_or_slots() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    tokens_do_not_depend_on_memory(&model, &tokens(1, 300, 500), &[1, 8, 16]);
}

#[test]
fn tokens_of_a_float_model_do_not_depend_on_loans_chunks_or_slots() {
    let model = synthetic_model("--shape micro --seed 5 --type F32");
    tokens_do_not_depend_on_memory(&model, &tokens(2, 130, 500), &[1, 8, 16]);
}

#[test]
fn tokens_of_the_trained_model_do_not_depend_on_loans_chunks_or_slots() {
    let model = bard();
    let prompt = tokens(3, 330, 4000);
    tokens_do_not_depend_on_memory(&model, &prompt, &[1, 8, 64]);
}

#[test]
fn tokens_of_hybrid_models_do_not_depend_on_loans_chunks_blocks_or_slots() {
    for (args, seed) in [("--type Q4_K --head-type Q6_K --seed 4", 1), ("--type F32 --seed 5", 2), ("--type IQ3_XXS --seed 6 --mtp 1", 3)] {
        let model = synthetic_model(&format!("--arch qwen35moe --shape micro {args}"));
        let prompt = tokens(seed, 300, 500);
        tokens_do_not_depend_on_memory(&model, &prompt, &[1, 8, 32]);
        let all = ExpertCache::Slots(model.shape.n_routed_experts());
        let expected = outcome(&model, &deterministic(64, all), &prompt);
        for (chunk, block) in [(7, 299), (32, 100), (64, 150), (5, 6), (64, 64), (100, 300)] {
            let settings = in_blocks(chunk, BlockSetting::Tokens(block), ExpertCache::Slots(8));
            for settings in [settings.clone(), with_alias(&settings)] {
                let found = outcome(&model, &settings, &prompt);
                assert_eq!(found.tokens, expected.tokens, "{args}: chunk {chunk}, block {block}");
                assert!(found.choice.block <= block.next_multiple_of(64) && found.choice.chunk <= chunk, "{:?}", found.choice);
            }
        }
    }
}

#[test]
fn tokens_of_the_trained_hybrid_model_do_not_depend_on_loans_chunks_or_slots() {
    let model = hybrid_bard();
    tokens_do_not_depend_on_memory(&model, &tokens(3, 330, 4000), &[1, 16, 144]);
}

/// A device on which the prompt buffers are larger than the slots that may be lent, so that the head's bytes are needed.
fn tight(model: &Model) -> EngineSettings {
    let slot_bytes = model.weights.slot_bytes();
    let base = EngineSettings { vram_reserve: Some(Bytes::ZERO), ..deterministic(256, ExpertCache::Auto) };
    let roomy = ebbtide::phase::Plan::new(&model.shape, &model.weights, budget(Bytes::mib(64)), &base).expect("64 MiB are plenty");
    // The wide window is left out by a card as tight as this.
    EngineSettings { vram: roomy.resident_bytes() - roomy.wide_bytes + slot_bytes * 10, ..base }
}

fn budget(total: Bytes) -> ebbtide::phase::DeviceBudget {
    let (budget, notice) = read_device_budget(&HostBackend::open(&HostConfig::new(total, 1)).expect("one thread"));
    assert_eq!(notice, None);
    budget
}

#[test]
fn a_tight_device_lends_the_head_and_slots_and_reads_in_longer_chunks() {
    let model = synthetic_model("--shape micro --seed 6 --type Q8_0");
    let kept = tight(&model);
    let lent = with_alias(&kept);
    let prompt = tokens(4, 200, 500);
    let (kept_outcome, lent_outcome) = (outcome(&model, &kept, &prompt), outcome(&model, &lent, &prompt));
    assert_alias_happened(&lent_outcome);
    assert_eq!(lent_outcome.spill_bytes, Bytes::ZERO);
    assert!(lent_outcome.phases.slots_lent >= 1, "{:?}", lent_outcome.phases);
    assert!(lent_outcome.choice.chunk > kept_outcome.choice.chunk, "{} and {}", lent_outcome.choice.chunk, kept_outcome.choice.chunk);
    assert_eq!(lent_outcome.tokens, kept_outcome.tokens);
}

#[test]
fn a_head_that_is_not_brought_back_is_noticed() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 100, 500);
    let settings = with_alias(&deterministic(32, ExpertCache::Slots(8)));
    let expected = outcome(&model, &settings, &prompt).tokens;

    let backend = device(&settings);
    let watched = backend.share();
    let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
    // Used once undisturbed, so that the head has been in place before.
    assert_eq!(run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN)).tokens, expected);
    watched.faults().lose_copies_into = Some(engine.head_range());
    let disturbed = engine.generate(&greedy(&prompt, TOKENS_WRITTEN), &mut |_| ControlFlow::Continue(()));
    // Poisoned weights give logits that are no numbers, which is an error; other tokens would do as well. The same tokens would mean
    // that the test cannot see a lost reload.
    if let Ok(outcome) = disturbed {
        assert_ne!(outcome.tokens, expected);
    }
    watched.faults().lose_copies_into = None;
    assert_eq!(run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN)).tokens, expected, "the next request is right again");
}

#[test]
fn free_memory_never_falls_below_the_reserve_and_nothing_is_allocated_after_the_start() {
    let model = synthetic_model("--shape micro --seed 6 --type Q8_0");
    let settings = with_alias(&EngineSettings { vram: Bytes::mib(6), ..deterministic(64, ExpertCache::Auto) });
    let backend = device(&settings);
    let watched = backend.share();
    let mut engine = Engine::start(backend, model, &settings, &mut |_, _| ()).expect("starts");
    let after_start = watched.used();
    assert_eq!(after_start, engine.plan().decode.total_bytes, "planned and taken");
    let outcome = run(&mut engine, &greedy(&tokens(5, 150, 500), TOKENS_WRITTEN));
    assert_eq!(watched.peak(), after_start);
    let reserve = engine.plan().reserve_bytes;
    assert!(reserve > Bytes::ZERO);
    assert!(outcome.lowest_free.expect("host says what is free") >= reserve);
}

#[test]
fn both_refills_give_the_same_tokens_and_fill_every_slot() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 120, 500);
    let strict = with_alias(&EngineSettings { refill: Refill::Strict, ..tight(&model) });
    let lazy = EngineSettings { refill: Refill::Lazy, ..strict.clone() };
    assert_eq!(outcome(&model, &strict, &prompt).tokens, outcome(&model, &lazy, &prompt).tokens);
    let mut engine = engine(&model, &strict);
    run(&mut engine, &greedy(&prompt, 2));
    assert_eq!(engine.experts().n_refilling(), 0);
    assert_eq!(engine.experts().cache().n_resident(), engine.plan().slots as usize);
}

#[test]
fn stalled_copies_only_delay_the_slots() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 120, 500);
    let settings = with_alias(&tight(&model));
    let expected = outcome(&model, &settings, &prompt).tokens;
    let backend = device(&settings);
    let watched = backend.share();
    let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
    watched.faults().stalled_polls = 50;
    let outcome = run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN));
    assert_eq!(outcome.tokens, expected);
    assert!(watched.faults().stalled_polls < 50, "a stall was met");
}

#[test]
fn a_cancelled_prompt_brings_everything_home() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 200, 500);
    let settings = with_alias(&deterministic(32, ExpertCache::Slots(8)));
    let mut engine = engine(&model, &settings);
    let expected = run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN)).tokens;
    let mut calls = 0;
    let cancelled = engine
        .generate(&greedy(&prompt, TOKENS_WRITTEN), &mut |event| {
            assert!(matches!(event, Event::Reading { .. }));
            calls += 1;
            if calls == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
        .expect("a cancelled request is no error");
    assert_eq!((cancelled.finish, cancelled.tokens.len(), calls), (Finish::Cancelled, 0, 5));
    assert_eq!(cancelled.phases.head_reloads, 1, "the head came home");
    assert_eq!(run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN)).tokens, expected);
}

#[test]
fn a_failed_capture_leaves_eager_windows_with_the_same_tokens() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 60, 500);
    let settings = with_alias(&deterministic(32, ExpertCache::Slots(8)));
    let expected = outcome(&model, &settings, &prompt).tokens;
    let backend = device(&settings);
    backend.faults().captures_fail = true;
    let mut engine = Engine::start(backend, model, &settings, &mut |_, _| ()).expect("starts without graphs");
    assert_eq!(engine.take_notices().len(), 1, "one line says so");
    assert_eq!(run(&mut engine, &greedy(&prompt, TOKENS_WRITTEN)).tokens, expected);
}

#[test]
fn a_lost_device_is_an_error_and_no_panic() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let settings = with_alias(&deterministic(32, ExpertCache::Slots(8)));
    for launches in [0, 5, 40, 200] {
        let backend = device(&settings);
        let watched = backend.share();
        let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
        watched.faults().launches_until_lost = Some(launches);
        let error = engine.generate(&greedy(&tokens(1, 60, 500), 8), &mut |_| ControlFlow::Continue(())).expect_err("the device is lost");
        assert!(error.to_string().contains("device is lost"), "{error}");
    }
}

#[test]
fn prompts_that_cannot_be_read_are_refused_with_numbers() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let mut engine = engine(&model, &settings(64));
    let mut refusal =
        |prompt: &[TokenId]| engine.generate(&greedy(prompt, 4), &mut |_| ControlFlow::Continue(())).expect_err("refused").to_string();
    assert!(refusal(&[]).contains("empty"));
    let long = refusal(&tokens(1, 64, 500));
    assert!(long.contains("64 tokens") && long.contains("holds 64"), "{long}");
    let outside = refusal(&[1, 512, 3]);
    assert!(outside.contains("token 512 at position 1") && outside.contains("512"), "{outside}");
}

#[test]
fn text_up_to_the_end_of_the_context_is_written_and_no_further() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let mut engine = engine(&model, &settings(64));
    let outcome = run(&mut engine, &greedy(&tokens(1, 60, 500), 100));
    assert_eq!((outcome.tokens.len(), outcome.finish), (5, Finish::Length));
}

/// Blocks of several chunks, as long as they fit.
fn in_blocks(chunk: u32, block: BlockSetting, slots: ExpertCache) -> EngineSettings {
    EngineSettings { block, ..deterministic(chunk, slots) }
}

#[test]
fn tokens_do_not_depend_on_the_block() {
    let model = synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let prompt = tokens(1, 300, 500);
    let all = ExpertCache::Slots(model.shape.n_routed_experts());
    let expected = outcome(&model, &deterministic(64, all), &prompt);
    for slots in [2, 8, 16] {
        for (chunk, block) in [(7, 299), (32, 100), (64, 150), (5, 6), (64, 64)] {
            let settings = in_blocks(chunk, BlockSetting::Tokens(block), ExpertCache::Slots(slots));
            for settings in [settings.clone(), with_alias(&settings)] {
                let found = outcome(&model, &settings, &prompt);
                assert_eq!(found.tokens, expected.tokens, "chunk {chunk}, block {block}, {slots} slots");
                assert!(found.choice.block <= block && found.choice.chunk <= chunk, "{:?}", found.choice);
                assert!(found.choice.block > found.choice.chunk || block <= 64, "{:?}", found.choice);
            }
        }
    }
}

#[test]
fn experts_cross_the_link_once_a_block_and_not_once_a_chunk() {
    let model = synthetic_model("--shape micro --seed 4 --type Q8_0 --used 8");
    let prompt = tokens(1, 201, 500);
    let link_bytes = |block| {
        let settings = in_blocks(20, block, ExpertCache::Slots(4));
        outcome(&model, &EngineSettings { refill: Refill::Strict, ..settings }, &prompt[..]).experts.link_bytes
    };
    let (document, ours) = (link_bytes(BlockSetting::Chunk), link_bytes(BlockSetting::Tokens(200)));
    // Ten passes and one; what windows move is the same.
    let layer_bytes = Bytes(model.weights.expert_bytes().0 / u64::from(model.shape.n_layer));
    assert!(document - ours >= layer_bytes * 4, "{document} and {ours}");
}
