//! What drafts are for: fewer windows for the same text, and never more time. All of it in virtual time.

use std::ops::ControlFlow;

use ebbtide::backends::host::ClockProfile;
use ebbtide::engine::sampler::Sampling;
use ebbtide::engine::{Event, Outcome, Request};
use ebbtide::settings::{DraftSetting, DraftSettings, EngineSettings, ExpertCache, SpecSetting};

use super::common::dry::DryRig;
use super::common::engine::{greedy, hybrid_bard, run};
use super::{base, drafting, held, off, start};

#[test]
fn the_draft_layer_writes_more_than_one_token_a_window() {
    let model = hybrid_bard();
    for most in [SpecSetting::Auto, SpecSetting::Drafts(3), SpecSetting::Drafts(1)] {
        let mut engine = start(&model, &EngineSettings { drafts: drafting(DraftSetting::Mtp, most), ..base(512) });
        let (mut windows, mut written) = (0, 0);
        for text in 0..4 {
            let outcome = run(&mut engine, &greedy(&held(20_000 * text + 50, 64), 96));
            (windows, written) = (windows + outcome.drafts.windows, written + outcome.tokens.len());
            assert_eq!(outcome.drafts.windows + outcome.drafts.accepted(), outcome.tokens.len() as u64);
        }
        let rate = written as f64 / windows as f64;
        assert!(rate > 1.3, "{most}: {rate} tokens a window");
    }
}

/// Seconds from the first token to the last.
fn writing_s(rig: &mut DryRig, request: &Request) -> (f64, Outcome) {
    let device = rig.device.share();
    let mut first_s = None;
    let outcome = rig.engine.generate(request, &mut |event| {
        if matches!(event, Event::Token(_)) {
            first_s.get_or_insert_with(|| device.host_time_s());
        }
        ControlFlow::Continue(())
    });
    let outcome = outcome.expect("the request runs");
    (device.host_time_s() - first_s.expect("a token was written"), outcome)
}

/// Writes ten texts with drafts and without, each on fresh engines, which have everything to learn. Whatever is guessed, what drafts cost
/// is at most `share_max` of the time of any text.
fn drafts_cost_no_text_much(profile: ClockProfile, slots: u32, sampling: &Sampling, share_max: f64) {
    let model = hybrid_bard();
    let (mut with_s, mut without_s, mut offered) = (0.0, 0.0, 0);
    for text in 0..10 {
        let request = Request { sampling: sampling.clone(), ..greedy(&held(12_000 * text + 100, 64), 96) };
        let [drafting, plain] = [DraftSettings::default(), off()].map(|drafts| {
            let settings = EngineSettings { drafts, expert_cache: ExpertCache::Slots(slots), ..base(512) };
            writing_s(&mut DryRig::open(&model, profile, &settings, None), &request)
        });
        assert_eq!(drafting.1.tokens, plain.1.tokens);
        assert_eq!(plain.1.experts.misses == 0, slots == 144, "some experts are read in place");
        let at = format!("text {text} on {}: {:.6} s, {:.6} without, {:?}", profile.name, drafting.0, plain.0, drafting.1.drafts);
        assert!(drafting.0 <= (1.0 + share_max) * plain.0, "{at}");
        (with_s, without_s, offered) = (with_s + drafting.0, without_s + plain.0, offered + drafting.1.drafts.offered());
    }
    assert!(offered > 0 && with_s < 0.9 * without_s, "{}: {with_s} s, {without_s} without", profile.name);
}

#[test]
fn drafts_cost_no_greedy_text_anything() {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    drafts_cost_no_text_much(ClockProfile::H200, 144, &sampling, 0.02);
    drafts_cost_no_text_much(ClockProfile::LAPTOP_8GB, 48, &sampling, 0.02);
}

/// Among these are texts of which next to nothing can be guessed. They pay for what a fresh engine tries, and for keys and values of the
/// draft layer: in this model it is a ninth of all layers, in real ones a fortieth.
#[test]
fn drafts_cost_a_text_drawn_by_chance_next_to_nothing() {
    let sampling = Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 1, ..Sampling::default() };
    drafts_cost_no_text_much(ClockProfile::H200, 144, &sampling, 0.07);
    drafts_cost_no_text_much(ClockProfile::LAPTOP_8GB, 48, &sampling, 0.07);
}
