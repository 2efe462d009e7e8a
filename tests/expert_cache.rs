//! Goal: the cache finds out which experts a model uses, keeps them where they are of use, and knows them again at the next start.
//! Method: models whose routers prefer some experts, caches with few slots, and requests whose hits are counted.

mod common;

use std::fs;
use std::sync::Arc;

use common::engine::{TempFile, alternating_model, device, engine, greedy, run, settings, synthetic_model, tokens};
use ebbtide::backends::host::HostBackend;
use ebbtide::engine::{Engine, Outcome};
use ebbtide::model::Model;
use ebbtide::settings::{
    AliasThreshold, BlockSetting, ChunkSetting, DraftSetting, DraftSettings, EngineSettings, ExpertCache, Refill, ShortRead,
};
use ebbtide::units::{Bytes, ExpertId, SlotId};

/// 4 layers of 16 experts, 3 of them for each token, some of which are much in demand.
const SKEWED: &str = "--shape tiny --seed 21 --type Q4_0 --used 3 --skew 1.5";

/// Few slots, a prompt path that leaves most of them alone, and tokens that do not depend on what is resident.
fn few_slots(slots: u32) -> EngineSettings {
    EngineSettings {
        deterministic: true,
        expert_cache: ExpertCache::Slots(slots),
        chunk: ChunkSetting::Tokens(16),
        block: BlockSetting::Chunk,
        short_read: ShortRead::Tokens(0),
        refill: Refill::Strict,
        vram: Bytes::mib(64),
        // A window with drafts uses an expert once for all of its rows.
        drafts: DraftSettings { source: DraftSetting::Off, ..DraftSettings::default() },
        ..settings(256)
    }
}

fn with_profile(settings: &EngineSettings, file: &TempFile) -> EngineSettings {
    EngineSettings { expert_profile: Some(file.0.clone()), ..settings.clone() }
}

#[allow(clippy::cast_precision_loss, reason = "small counts")]
fn hit_rate(outcome: &Outcome) -> f64 {
    let counters = &outcome.experts;
    counters.hits as f64 / (counters.hits + counters.misses) as f64
}

fn text(seed: u64, engine: &mut Engine<HostBackend>) -> Outcome {
    run(engine, &greedy(&tokens(seed, 12, 500), 100))
}

#[test]
fn hits_rise_with_use_and_the_next_start_begins_where_the_last_one_ended() {
    let model = synthetic_model(SKEWED);
    let profile = TempFile::new(".heat");
    let settings = with_profile(&few_slots(12), &profile);
    let mut first = engine(&model, &settings);
    let outcomes: Vec<_> = (0..6).map(|seed| text(seed, &mut first)).collect();
    let rates: Vec<f64> = outcomes.iter().map(hit_rate).collect();
    let (start, end) = (rates[0], rates[5]);
    assert!(end > start + 0.1, "the cache learns nothing: {rates:?}");
    assert!(outcomes[0].experts.swaps > 0, "nothing was exchanged: {:?}", outcomes[0].experts);
    assert!(!profile.0.exists(), "a request of seconds needs no saving on the way");
    first.save_expert_profile();
    assert_eq!(first.take_notices(), Vec::<String>::new());

    // Another text, by a start that knows the model and by one that does not.
    let known = text(9, &mut engine(&model, &settings));
    assert!(hit_rate(&known) >= end - 0.05, "begins with {}, the last start ended with {end}", hit_rate(&known));
    assert_eq!(known.tokens, text(9, &mut engine(&model, &few_slots(12))).tokens);
    let short = greedy(&tokens(9, 12, 500), 16);
    let of_start = |settings| hit_rate(&run(&mut engine(&model, settings), &short));
    let (known, unknown) = (of_start(&settings), of_start(&few_slots(12)));
    assert!(known > unknown + 0.1, "16 tokens with a profile {known}, without {unknown}");
    // And what was known is in the lowest slots from the start.
    let known = engine(&model, &settings);
    assert!(heat_by_slot(&known).is_sorted_by(|hotter, colder| hotter >= colder));
}

/// Heat of the resident of each slot.
fn heat_by_slot(engine: &Engine<HostBackend>) -> Vec<f32> {
    let cache = engine.experts().cache();
    (0..engine.plan().slots).map(|slot| cache.heat(cache.expert_of(SlotId(slot)).expect("every slot is filled"))).collect()
}

#[test]
fn a_profile_that_cannot_be_used_costs_a_line_and_is_replaced() {
    let model = synthetic_model(SKEWED);
    let settings = few_slots(12);
    let expected = text(1, &mut engine(&model, &settings)).tokens;
    let sound = TempFile::new(".heat");
    let mut writer = engine(&model, &with_profile(&settings, &sound));
    text(1, &mut writer);
    writer.save_expert_profile();
    let sound = fs::read(&sound.0).expect("a profile was written");

    let other = TempFile::new(".heat");
    let other_model = synthetic_model(&SKEWED.replace("--seed 21", "--seed 22"));
    let mut writer = engine(&other_model, &with_profile(&settings, &other));
    writer.save_expert_profile();
    let mut flipped = sound.clone();
    flipped[sound.len() / 2] ^= 1;
    let mut newer = sound.clone();
    newer[8] = 99;
    for (damage, bytes, reason) in [
        ("one byte is flipped", flipped, "its checksum does not fit"),
        ("the last byte is cut", sound[..sound.len() - 1].to_vec(), "bytes instead of"),
        ("it is empty", Vec::new(), "it has 0 bytes"),
        ("it is another model's", fs::read(&other.0).expect("written"), "learned with another model"),
        ("it is of another version", newer, "version 99"),
    ] {
        let file = TempFile::new(".heat");
        fs::write(&file.0, bytes).expect("the temporary folder can be written");
        let mut engine = engine(&model, &with_profile(&settings, &file));
        let notices = engine.take_notices();
        assert!(notices.len() == 1 && notices[0].contains(reason), "{damage}: {notices:?}");
        let outcome = text(1, &mut engine);
        assert_eq!(outcome.tokens, expected, "{damage}");
        engine.save_expert_profile();
        assert_eq!(fs::read(&file.0).expect("written").len(), sound.len(), "{damage}");
        assert_eq!(common::engine::engine(&model, &with_profile(&settings, &file)).take_notices(), Vec::<String>::new(), "{damage}");
    }
}

#[test]
fn a_profile_that_cannot_be_written_costs_a_line() {
    let model = synthetic_model("--shape micro --seed 4 --type Q8_0");
    let nowhere = std::env::temp_dir().join("ebbtide-no-such-folder").join("heat");
    let settings = EngineSettings { expert_profile: Some(nowhere), ..few_slots(8) };
    let mut engine = engine(&model, &settings);
    let notices = engine.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("its folder is not there"), "{notices:?}");
    run(&mut engine, &greedy(&tokens(1, 12, 500), 4));
    engine.save_expert_profile();
    let notices = engine.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("is not saved"), "{notices:?}");
}

#[test]
fn after_some_requests_the_hottest_experts_lie_where_loans_come_last() {
    let model = synthetic_model(SKEWED);
    let slots = 20;
    let settings = EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..few_slots(slots) };
    let mut engine = engine(&model, &settings);
    let lent: Vec<u32> = (0..8).map(|seed| text(seed, &mut engine).phases.slots_lent).collect();
    let lent = *lent.iter().min().expect("eight requests") as usize;
    assert!(lent >= 2, "nothing is shown by a loan of {lent} slots");
    // A last loan puts into order what the text has changed.
    run(&mut engine, &greedy(&tokens(9, 12, 500), 1));
    let heat = heat_by_slot(&engine);
    let (kept, lendable) = heat.split_at(heat.len() - lent);
    let mean = |heat: &[f32]| heat.iter().sum::<f32>() / f32::from(u16::try_from(heat.len()).expect("few"));
    assert!(mean(kept) > 2.0 * mean(lendable), "slots by heat: {heat:?}");
    let mut coldest = heat.clone();
    coldest.sort_by(f32::total_cmp);
    let misplaced = lendable.iter().filter(|&&heat| heat > coldest[2 * lent]).count();
    assert_eq!(misplaced, 0, "the {lent} slots that are lent first hold some of the hottest: {heat:?}");
}

/// A model whose odd layers have their experts in another type, almost twice as large.
fn alternating() -> Arc<Model> {
    alternating_model("--shape tiny --seed 9 --type Q4_K --used 3 --skew 1.0", "Q4_K", "Q8_0")
}

/// Experts of each layer that lie in slots.
fn residents_by_layer(engine: &Engine<HostBackend>) -> Vec<usize> {
    let shape = &engine.model().shape;
    let cache = engine.experts().cache();
    let resident = |layer| (0..shape.n_expert).filter(|&expert| cache.slot_of(ExpertId { layer, expert }).is_some()).count();
    (0..shape.n_layer).map(resident).collect()
}

#[test]
fn layers_of_alternating_types_all_have_hits_and_the_second_request_has_more() {
    let model = alternating();
    let mut engine = engine(&model, &few_slots(20));
    let first = text(3, &mut engine);
    let hits_of_first = engine.experts().layer_hits().to_vec();
    let second = text(3, &mut engine);
    let hits: Vec<u64> = engine.experts().layer_hits().iter().zip(hits_of_first).map(|(now, before)| now - before).collect();
    assert!(hits.iter().all(|&hits| hits > 0), "hits of the second request by layer: {hits:?}");
    assert_eq!(hits.iter().sum::<u64>(), second.experts.hits);
    assert_eq!(first.tokens, second.tokens);
    assert!(hit_rate(&second) > hit_rate(&first), "{} then {}", hit_rate(&first), hit_rate(&second));
    let residents = residents_by_layer(&engine);
    assert!(residents.iter().all(|&residents| residents > 0), "{residents:?}");
}

#[test]
fn slots_by_size_class_are_more_than_slots_of_the_largest_size_and_the_plan_is_what_is_taken() {
    let model = alternating();
    let largest = model.weights.slot_bytes();
    let never_lent = EngineSettings { expert_cache: ExpertCache::Slots(64), ..few_slots(64) };
    let expected = text(3, &mut engine(&model, &never_lent)).tokens;
    let base = EngineSettings { expert_cache: ExpertCache::Auto, vram_reserve: Some(Bytes::ZERO), ..few_slots(0) };
    for alias in [false, true] {
        let roomy = EngineSettings { head_alias: alias, alias_min_tokens: AliasThreshold::Tokens(0), ..base.clone() };
        let resident = engine(&model, &roomy).plan().resident_bytes();
        // Room for 24 slots of the largest size; a wide window takes less than one of them.
        let settings = EngineSettings { vram: resident + largest * 24, ..roomy };
        let backend = device(&settings);
        let watched = backend.share();
        let mut engine = Engine::start(backend, Arc::clone(&model), &settings, &mut |_, _| ()).expect("starts");
        let plan = engine.plan().clone();
        assert!(plan.slots >= 28, "{plan}");
        let by_class: Bytes = plan.slot_table.classes(plan.slots).map(|(bytes, slots)| bytes * u64::from(slots)).sum();
        let owner = |name| plan.decode.owners.iter().find(|part| part.owner == name).map(|part| part.bytes);
        assert_eq!(owner("expert slots"), Some(by_class), "{plan}");
        assert_eq!(plan.decode.total_bytes, plan.decode.owners.iter().map(|part| part.bytes).sum());
        assert_eq!(plan.prefill.total_bytes, plan.decode.total_bytes, "lending changes owners and no sum: {plan}");
        assert!(plan.budget_bytes - plan.decode.total_bytes < largest, "{plan}");

        let outcomes = [text(3, &mut engine), text(3, &mut engine)];
        assert_eq!(watched.peak(), plan.decode.total_bytes, "planned and taken");
        for outcome in &outcomes {
            assert_eq!(outcome.tokens, expected, "head lent: {alias}");
            assert!(outcome.phases.slots_lent > 0, "{:?}", outcome.phases);
        }
        assert!(hit_rate(&outcomes[1]) > hit_rate(&outcomes[0]));
        let residents = residents_by_layer(&engine);
        assert!(residents.iter().all(|&residents| residents > 0), "{residents:?}");
        let experts: usize = residents.iter().sum();
        assert_eq!(experts, plan.slots as usize, "every slot is filled");
    }
}

#[test]
fn bytes_over_the_link_are_counted_by_kind_and_add_up() {
    let model = synthetic_model(SKEWED);
    let settings = EngineSettings { head_alias: true, alias_min_tokens: AliasThreshold::Tokens(0), ..few_slots(12) };
    let mut engine = engine(&model, &settings);
    let expert: Bytes = model.weights.experts[0].parts().iter().map(|part| part.expert_bytes).sum();
    for seed in 0..3 {
        let outcome = run(&mut engine, &greedy(&tokens(seed, 60, 500), 40));
        let counters = outcome.experts;
        assert_eq!(counters.link_bytes, counters.link.total());
        assert_eq!(counters.link.in_place, expert * counters.misses, "{counters:?}");
        assert_eq!(counters.link.swap, expert * counters.swaps, "{counters:?}");
        assert_eq!(counters.link.refill, expert * u64::from(outcome.phases.slots_lent), "{counters:?}");
        assert!(counters.prompt_hits > 0 && counters.prompt_misses > 0, "{counters:?}");
        // What was copied for the prompt was either used there or dropped.
        assert_eq!(counters.link.prompt, expert * counters.prompt_misses + counters.link.dropped, "{counters:?}");
        // 40 windows of 4 layers with 3 experts each.
        assert_eq!(counters.hits + counters.misses, 40 * 4 * 3);
    }
}
