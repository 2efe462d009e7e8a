//! Goal: the way that is chosen for a prompt is about the best there was, and having the alias never costs a prompt anything. Method:
//! dry runs of real shapes in virtual time: the same prompt lengths read by an engine that chooses and by engines that may not.
//!
//! Slots come home before the first token here (`--refill strict`), so nothing that a way owes is left out of its time.

mod common;

use std::sync::{Arc, LazyLock};

use common::dry::{DryRig, card, card_with_slots, real_shape};
use common::engine::tokens;
use common::real_shapes::{QWEN3_30B_A3B, QWEN36_35B_A3B};
use ebbtide::backends::host::ClockProfile;
use ebbtide::engine::way::Way;
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, Refill, ShortRead};
use ebbtide::units::Bytes;

static QWEN_30B: LazyLock<Arc<Model>> = LazyLock::new(|| real_shape(QWEN3_30B_A3B));
static QWEN_35B: LazyLock<Arc<Model>> = LazyLock::new(|| real_shape(QWEN36_35B_A3B));

const PROFILES: [ClockProfile; 3] = [ClockProfile::H200, ClockProfile::H200_12GBPS, ClockProfile::LAPTOP_8GB];
/// Prompts of the comparison.
const N_PROMPTS: usize = 200;

/// Lengths from 2 to about 20,000 tokens, as many between 20 and 40 as between 2,000 and 4,000.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 2 and 20,000")]
fn mixed_lengths() -> Vec<usize> {
    let span = (20_000.0_f64 / 2.0).ln();
    let length = |random: u32| 2.0 * (f64::from(random) / f64::from(1 << 20) * span).exp();
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 2 and 20,000")]
    let lengths = tokens(7, N_PROMPTS, 1 << 20).into_iter().map(|random| length(random) as usize).collect();
    lengths
}

fn strict(settings: EngineSettings) -> EngineSettings {
    EngineSettings { refill: Refill::Strict, head_alias: true, ..settings }
}

/// Seconds of each prompt on an engine that has read a few before.
fn seconds(model: &Arc<Model>, profile: ClockProfile, settings: &EngineSettings, lengths: &[usize]) -> Vec<f64> {
    let mut rig = DryRig::new(model, profile, settings);
    for warm in [8000, 700, 64, 5] {
        rig.read(warm);
    }
    lengths.iter().map(|&length| rig.read(length).first_token_s).collect()
}

/// The ways that a prompt could be read otherwise.
fn alternatives(base: &EngineSettings) -> Vec<(&'static str, EngineSettings)> {
    let lent = EngineSettings { alias_min_tokens: AliasThreshold::Tokens(0), ..base.clone() };
    let kept = EngineSettings { head_alias: false, short_read: ShortRead::Tokens(0), ..base.clone() };
    let in_blocks = |settings: &EngineSettings, block: u32| EngineSettings {
        chunk: ChunkSetting::Auto { max: Some(1024) },
        block: BlockSetting::Tokens(block),
        ..settings.clone()
    };
    vec![
        ("lent", lent.clone()),
        ("lent, blocks of 20000", in_blocks(&lent, 20_000)),
        ("kept", kept.clone()),
        ("nothing lent", EngineSettings { head_alias: false, ..base.clone() }),
    ]
}

fn compare(model: &Arc<Model>, profile: ClockProfile, base: &EngineSettings, lengths: &[usize]) {
    let chosen = seconds(model, profile, base, lengths);
    let mut best = vec![f64::INFINITY; lengths.len()];
    let mut totals = Vec::new();
    for (name, settings) in alternatives(base) {
        let found = seconds(model, profile, &settings, lengths);
        totals.push(format!("{name} {:.2}", found.iter().sum::<f64>()));
        best.iter_mut().zip(found).for_each(|(best, found)| *best = best.min(found));
    }
    let (chosen, best): (f64, f64) = (chosen.iter().sum(), best.iter().sum());
    let told = format!("{}: {chosen:.3} s chosen, {best:.3} s the best of each; {}", profile.name, totals.join(", "));
    assert!(chosen <= 1.05 * best, "{told}");
}

#[test]
fn what_is_chosen_for_200_prompts_takes_what_the_best_of_each_would_take() {
    let lengths = mixed_lengths();
    assert!(lengths.iter().any(|&length| length < 10) && lengths.iter().any(|&length| length > 10_000));
    for profile in [ClockProfile::H200_12GBPS, ClockProfile::LAPTOP_8GB] {
        compare(&QWEN_30B, profile, &strict(card_with_slots(&QWEN_30B, 200)), &lengths);
    }
}

#[test]
fn so_it_does_on_a_roomy_card_and_for_another_model() {
    let lengths = &mixed_lengths()[..40];
    compare(&QWEN_30B, ClockProfile::LAPTOP_8GB, &strict(card(Bytes::mib(8192))), lengths);
    compare(&QWEN_30B, ClockProfile::H200, &strict(card_with_slots(&QWEN_30B, 200)), lengths);
    compare(&QWEN_35B, ClockProfile::H200_12GBPS, &strict(card_with_slots(&QWEN_35B, 240)), lengths);
}

#[test]
fn having_the_alias_costs_no_prompt_anything() {
    for (model, slots) in [(&*QWEN_30B, [156, 190, 320]), (&*QWEN_35B, [165, 240, 400])] {
        for slots in slots {
            for profile in PROFILES {
                let with = strict(card_with_slots(model, slots));
                let without = EngineSettings { head_alias: false, ..with.clone() };
                let document = EngineSettings { block: BlockSetting::Chunk, ..without.clone() };
                let lengths = [33, 257, 1025, 4097];
                let of = |settings| seconds(model, profile, settings, &lengths);
                let (with, without, document) = (of(&with), of(&without), of(&document));
                for (((length, with), without), document) in lengths.iter().zip(with).zip(without).zip(document) {
                    let at = format!("{length} tokens, {slots} slots, {}: {with:.4} s, {without:.4} without, {document:.4}", profile.name);
                    assert!(with <= 1.05 * without && with <= 1.05 * document, "{at}");
                }
            }
        }
    }
}

#[test]
fn a_short_prompt_is_read_with_nothing_lent() {
    for profile in PROFILES {
        let mut rig = DryRig::new(&QWEN_30B, profile, &strict(card(Bytes::mib(8192))));
        rig.read(4000);
        let short = rig.read(60);
        assert_eq!((short.outcome.choice.way, short.outcome.phases.loans), (Way::Wide, 0), "{}", short.outcome.choice.reason);
    }
}
