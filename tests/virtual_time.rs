//! Goal: plans and timings of real shapes run in virtual time, agree with arithmetic on the modelled device, and cost seconds.
//! Method: dry runs of the whole engine on files that are all hole; a run that computes stands beside one where routes are the same.
//! Nothing here looks at a wall clock.
//!
//! Expected times are those of `sum over passes max(absent bytes / link, a + tokens x (linear / P_lin + attention / P_att))` with
//! llama.cpp's a = 35 ms, P_lin = 85 and P_att = 297 TFLOP/s on an H200.

mod common;

use std::sync::{Arc, LazyLock};

use common::dry::{DryRig, Reading, card, document_card, real_shape, real_shape_without_drafts, without_drafts};
use common::engine::{settings, synthetic_model};
use common::real_shapes::{QWEN_35B_STAND_IN, QWEN3_30B_A3B, QWEN36_35B_A3B};
use ebbtide::backends::host::{ClockProfile, DryRun};
use ebbtide::engine::way::Way;
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache};
use ebbtide::units::Bytes;

static QWEN_30B: LazyLock<Arc<Model>> = LazyLock::new(|| real_shape(QWEN3_30B_A3B));

/// Bytes of all experts of the 30B model, and of one.
const EXPERTS: f64 = 11.10e9;
const EXPERT: f64 = 1.723 * 1_048_576.0;
/// The H200's time of a pass beside its tokens, in seconds.
const PASS_S: f64 = 35e-3;
/// Tokens of a long prompt.
const LONG: usize = 29_854;

/// Time of arithmetic that the 30B model's fit gives for a prompt whose tokens see 4 x 48 x 32 x 128 operations for each key.
fn fitted_s(tokens: usize, passes: usize) -> f64 {
    let keys = tokens as f64 / 2.0;
    let token_s = 5.44e9 / 85e12 + 4.0 * 48.0 * 32.0 * 128.0 * keys / 297e12;
    passes as f64 * PASS_S + tokens as f64 * token_s
}

fn near(found: f64, expected: f64, share: f64) -> bool {
    (found / expected - 1.0).abs() <= share
}

/// What holds whatever the order of work: neither part is faster than it is, nothing waits while both are idle.
fn check_bounds(reading: &Reading, at: &str) {
    let (link_s, operations_s) = (reading.busy.to_device_s, reading.busy.operations_s);
    assert!(reading.first_token_s >= link_s.max(operations_s), "{at}: faster than a part of it, {reading:?}");
    assert!(reading.first_token_s < 1.01 * (link_s + operations_s), "{at}: time is lost, {reading:?}");
}

#[test]
fn a_dry_run_takes_the_time_of_one_that_computes() {
    // Every row uses every expert, so routes are the same although nothing is computed.
    let model = synthetic_model("--shape micro --experts 4 --used 4 --seed 3 --type Q8_0");
    let expert_cache = ExpertCache::Slots(5);
    let drafts = without_drafts();
    let (vram, chunk) = (Bytes::mib(8), ChunkSetting::Tokens(16));
    let base = EngineSettings { vram, chunk, block: BlockSetting::Chunk, expert_cache, drafts, ..settings(128) };
    let alias = EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..base.clone() };
    for (settings, way) in [(base, Way::Loan), (alias, Way::Alias)] {
        for profile in [ClockProfile::H200, ClockProfile::LAPTOP_8GB] {
            let [dry, computed] = [Some(DryRun::uniform(1)), None].map(|dry| {
                let mut rig = DryRig::open(&model, profile, &settings, dry);
                let reading = rig.run(50, 12);
                assert_eq!(reading.outcome.choice.way, way);
                assert!(reading.outcome.experts.misses > 0, "some experts are read in place");
                (reading.first_token_s, reading.writing_s, reading.busy, reading.outcome.experts, rig.device.peak())
            });
            assert_eq!(dry, computed, "{way} on {}", profile.name);
            assert!(dry.0 > 0.0 && dry.1 > 0.0);
        }
    }
}

#[test]
fn a_30b_model_reads_8192_tokens_in_8_gib_on_every_device_as_planned() {
    for profile in [ClockProfile::H200, ClockProfile::H200_12GBPS, ClockProfile::LAPTOP_8GB] {
        let mut rig = DryRig::new(&QWEN_30B, profile, &card(Bytes::mib(8192)));
        let planned = rig.engine.plan().decode.total_bytes;
        let reading = rig.run(8192, 16);
        assert_eq!(reading.outcome.tokens.len(), 16);
        assert_eq!(rig.device.peak(), planned, "what was planned is what is taken");
        check_bounds(&reading, profile.name);
        let one_after_another = reading.busy.to_device_s + reading.busy.operations_s;
        assert!(reading.first_token_s < 0.9 * one_after_another, "{}: copies run beside operations, {reading:?}", profile.name);
        // One pass; half of the experts have a slot. What else crosses is rows in and out.
        assert_eq!(reading.outcome.choice.block, 8191);
        let absent = EXPERTS - f64::from(rig.engine.plan().slots - reading.outcome.phases.slots_lent) * EXPERT;
        let copied_s = absent / profile.link_bytes_per_s;
        assert!((copied_s..1.35 * copied_s).contains(&reading.busy.to_device_s), "{}: {copied_s} s, {reading:?}", profile.name);
    }
}

#[test]
fn with_every_expert_on_the_card_an_h200_reads_and_writes_as_fast_as_the_program_that_its_figures_come_from() {
    let mut rig = DryRig::new(&QWEN_30B, ClockProfile::H200, &card(Bytes::mib(24_576)));
    let reading = rig.run(8192, 17);
    assert_eq!(reading.outcome.experts.misses, 0);
    let token_s = reading.writing_s / 16.0;
    assert!(near(token_s, 4.3e-3, 0.05), "{token_s} s a token at depth 8,192");
    let expected = fitted_s(8191, 1) + token_s;
    assert!(near(reading.first_token_s, expected, 0.05), "{} s to the first token, {expected} expected", reading.first_token_s);
}

/// The document's order, blocks of one chunk, with 128 slots kept: chunk, slots that afford it, and tokens a second on a full link and
/// at 12 GB/s.
const DOCUMENT_ORDER: [(u32, u32, u32, f64, f64); 4] =
    [(256, 16, 156, 1220.0, 280.0), (512, 16, 170, 2421.0, 559.0), (1024, 40, 190, 4762.0, 1099.0), (2048, 48, 210, 8260.0, 2198.0)];

#[test]
fn the_documents_order_takes_the_time_that_the_model_of_performance_gives() {
    for (chunk, ring, slots, full_link, slow_link) in DOCUMENT_ORDER {
        for (profile, expected) in [(ClockProfile::H200, full_link), (ClockProfile::H200_12GBPS, slow_link)] {
            let mut rig = DryRig::new(&QWEN_30B, profile, &document_card(&QWEN_30B, chunk, ring));
            let reading = rig.read(LONG);
            let at = format!("chunk {chunk} on {}: {:.0} tokens a second", profile.name, reading.tokens_per_s());
            check_bounds(&reading, &at);
            let plan = rig.engine.plan();
            assert!(near(f64::from(plan.slots), f64::from(slots), 0.10), "{at}: {} slots afford the chunk", plan.slots);
            let passes = LONG.div_ceil(chunk as usize);
            let kept = plan.slots - reading.outcome.phases.slots_lent;
            assert!((128..140).contains(&kept), "{at}: {kept} slots kept");
            // Of 48 layers, the last needs no experts.
            let copied_s = passes as f64 * (EXPERTS - f64::from(kept) * EXPERT) * 47.0 / 48.0 / profile.link_bytes_per_s;
            assert!(near(reading.busy.to_device_s, copied_s, 0.05), "{at}: {copied_s} s of copies, {reading:?}");
            let fitted_s = fitted_s(LONG, passes);
            assert!(near(reading.busy.operations_s, fitted_s, 0.06), "{at}: {fitted_s} s of operations, {reading:?}");
            // Where the mixer half takes longer than the ring holds experts for, the link waits; the table supposes that it never does.
            let share = if chunk == 2048 && profile.name == "h200" { 0.12 } else { 0.10 };
            assert!(near(reading.tokens_per_s(), expected, share), "{at}, {expected} expected");
        }
    }
}

#[test]
fn alias_and_automatic_read_a_long_prompt_as_fast_as_the_model_of_performance_says() {
    for (chunk, ring, ..) in DOCUMENT_ORDER {
        let lent = EngineSettings { head_alias: true, chunk: ChunkSetting::default(), ..document_card(&QWEN_30B, chunk, ring) };
        let forced = EngineSettings { alias_min_tokens: AliasThreshold::Tokens(0), ..lent.clone() };
        let automatic = EngineSettings { block: BlockSetting::Auto, ..lent };
        for (profile, alias_expected) in [(ClockProfile::H200, 9245.0), (ClockProfile::H200_12GBPS, 8071.0)] {
            let mut rig = DryRig::new(&QWEN_30B, profile, &forced);
            let alias = rig.read(LONG);
            let at = format!("alias at {} slots on {}: {:.0} tokens a second", rig.engine.plan().slots, profile.name, alias.tokens_per_s());
            check_bounds(&alias, &at);
            let passes = LONG.div_ceil(alias.outcome.choice.chunk as usize);
            assert!(alias.outcome.choice.way == Way::Alias && (4..=5).contains(&passes), "{at}: {passes} passes");
            assert!(near(alias.tokens_per_s(), alias_expected, 0.10), "{at}, {alias_expected} expected");

            let mut rig = DryRig::new(&QWEN_30B, profile, &automatic);
            // The planner has seen nothing yet.
            let first = rig.read(LONG);
            let at = format!(
                "automatic at {} slots on {}: {:.0} tokens a second, {}",
                rig.engine.plan().slots,
                profile.name,
                first.tokens_per_s(),
                first.outcome.choice.reason
            );
            check_bounds(&first, &at);
            assert!(near(first.tokens_per_s(), 9556.0, 0.10), "{at}");
            let learned = rig.read(LONG);
            assert!(learned.tokens_per_s() >= 0.98 * first.tokens_per_s(), "{at}; then {:.0}", learned.tokens_per_s());
        }
    }
}

#[test]
fn what_the_first_head_product_waits_for_is_the_rest_of_the_reload() {
    // All experts on the card, so that the first window's layers take no part of the link.
    let roomy = card(Bytes::mib(24_576));
    let forced = EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..roomy.clone() };
    let head = QWEN_30B.weights.head.bytes;
    for (link_bytes_per_s, is_hidden) in [(52e9, true), (2e9, false)] {
        let profile = ClockProfile { link_bytes_per_s, ..ClockProfile::H200 };
        let phases = DryRig::new(&QWEN_30B, profile, &forced).run(600, 3).outcome.phases;
        let copy_ms = head.as_mib() * 1_048_576.0 / link_bytes_per_s * 1e3;
        assert!(phases.head_reloads == 1 && near(phases.head_reload_ms, copy_ms, 0.02), "{phases:?}, {copy_ms} ms expected");
        if is_hidden {
            assert!(phases.head_wait_ms < 0.5 * phases.head_reload_ms, "{phases:?}");
        } else {
            // The layers of one token take about as long as writing one does, 4 ms.
            let hidden_ms = phases.head_reload_ms - phases.head_wait_ms;
            assert!((2.0..8.0).contains(&hidden_ms), "{phases:?}");
        }
    }
    let kept = DryRig::new(&QWEN_30B, ClockProfile::H200, &roomy).run(600, 3).outcome.phases;
    assert_eq!((kept.head_reload_ms, kept.head_wait_ms), (0.0, 0.0));
}

#[test]
fn skewed_routes_make_hits_and_a_seed_makes_the_same_run_again() {
    let run = |dry: DryRun| {
        let mut rig = DryRig::open(&QWEN_30B, ClockProfile::LAPTOP_8GB, &card(Bytes::mib(8192)), Some(dry));
        let reading = rig.run(512, 200);
        let experts = reading.outcome.experts;
        (experts.hits as f64 / (experts.hits + experts.misses) as f64, rig.device.host_time_s())
    };
    let skewed = DryRun { seed: 5, skew: 1.0 };
    let ((even_hits, even_s), (hits, seconds)) = (run(DryRun::uniform(5)), run(skewed));
    // Slots hold a third of the experts.
    assert!((0.25..0.45).contains(&even_hits), "{even_hits}");
    assert!(hits > 1.3 * even_hits, "{hits} with skew, {even_hits} without");
    assert!(seconds < even_s);
    assert_eq!(run(skewed), (hits, seconds));
    assert_ne!(run(DryRun { seed: 6, ..skewed }).1, seconds);
}

#[test]
fn a_35b_hybrid_model_has_its_sizes_and_reads() {
    let model = real_shape_without_drafts(QWEN36_35B_A3B);
    let settings = card(Bytes::mib(8192));
    let mut rig = DryRig::new(&model, ClockProfile::H200, &settings);
    let plan = rig.engine.plan().clone();
    let mib = |bytes: Bytes| bytes.as_mib();
    assert!(near(mib(plan.slot_bytes), 1.148, 0.01), "{}", plan.slot_bytes);
    assert!(near(mib(model.weights.expert_bytes()), 12.33e9 / 1_048_576.0, 0.01));
    assert!(near(mib(plan.head_bytes), 333.0, 0.01) && near(mib(plan.dense_bytes), 1437.0, 0.06), "{plan}");
    assert_eq!(plan.kv_bytes, Bytes(20 << 10) * 32_768, "20 KiB a token");
    assert!(near(mib(plan.state_bytes), 30.0 * (2.0 + 3.0 * 8192.0 * 4.0 / 1_048_576.0), 0.01), "a state of 2 MiB a net and three rows");
    // 4,204 with 450 MiB of context, which a simulated device does not take.
    assert!(near(f64::from(plan.slots), 4204.0 + 450.0 / 1.148, 0.03), "{plan}");
    let reading = rig.read(LONG);
    check_bounds(&reading, "35B");
    assert_eq!(rig.device.peak(), plan.decode.total_bytes);
    let passes = LONG.div_ceil(reading.outcome.choice.block as usize) as f64;
    assert!(near(reading.busy.operations_s, passes * PASS_S + LONG as f64 * HYBRID_TOKEN_S, 0.15), "{reading:?}");

    let with_drafts = real_shape(QWEN36_35B_A3B);
    let mut rig = DryRig::new(&with_drafts, ClockProfile::H200, &settings);
    let layer = rig.engine.plan().clone();
    assert_eq!(layer.kv_bytes, Bytes(22 << 10) * 32_768, "the draft layer has a cache");
    assert!(layer.dense_bytes > plan.dense_bytes && plan.slots - layer.slots < 120, "{layer}");
    assert_eq!(with_drafts.shape.n_routed_experts(), 10_496);
    let drafting = rig.read(LONG);
    check_bounds(&drafting, "35B with its draft layer");
    // The last layer is read as a whole then, and of the draft layer keys and values.
    assert!((1.0..1.06).contains(&(drafting.first_token_s / reading.first_token_s)), "{drafting:?}, {reading:?}");
}

/// Time of arithmetic of a token of the 35B model in a long prompt, 4.8 + 2.4 GFLOP.
const HYBRID_TOKEN_S: f64 = 4.8e9 / 85e12 + 2.4e9 / 297e12;

#[test]
fn the_stand_in_of_a_35b_model_gains_by_the_alias_what_the_model_of_performance_says() {
    let model = real_shape(QWEN_35B_STAND_IN);
    for (profile, gain) in [(ClockProfile::H200, 6.4), (ClockProfile::H200_12GBPS, 14.0)] {
        let read = |settings: &EngineSettings| {
            let mut rig = DryRig::new(&model, profile, settings);
            let reading = rig.read(LONG);
            check_bounds(&reading, profile.name);
            (rig.engine.plan().slots - reading.outcome.phases.slots_lent, reading)
        };
        let mut at_chunk_512 = None;
        for (chunk, ring) in [(1024, 40), (512, 16)] {
            let settings = document_card(&model, chunk, ring);
            let (kept, reading) = read(&settings);
            let absent = 12.33e9 - f64::from(kept) * 1.148 * 1_048_576.0;
            let passes = LONG.div_ceil(chunk as usize) as f64;
            let pass_s = (absent / profile.link_bytes_per_s).max(PASS_S + LONG as f64 / passes * HYBRID_TOKEN_S);
            let expected = LONG as f64 / (passes * pass_s);
            let at = format!("chunk {chunk} on {}: {:.0} tokens a second", profile.name, reading.tokens_per_s());
            assert!((128..140).contains(&kept) && near(reading.tokens_per_s(), expected, 0.10), "{at}, {expected} expected, {kept} kept");
            at_chunk_512 = Some((settings, reading.tokens_per_s()));
        }
        let (document, default) = at_chunk_512.expect("the smallest chunk is the last");
        let alias_min_tokens = AliasThreshold::Tokens(0);
        let (_, alias) = read(&EngineSettings { head_alias: true, chunk: ChunkSetting::default(), alias_min_tokens, ..document });
        let found = alias.tokens_per_s() / default;
        assert!(near(found, gain, 0.10), "{}: {found} times as fast, {gain} expected", profile.name);
    }
}
