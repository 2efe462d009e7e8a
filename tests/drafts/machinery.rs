//! The machinery around drafts: loans, moved heads, captures that fail, and what the file of hashes says.

use ebbtide::engine::{Engine, Request};
use ebbtide::settings::{AliasThreshold, DraftSettings, EngineSettings, ExpertCache, HeadAliasMode, SpecSetting};
use ebbtide::units::{Bytes, TokenId};

use super::common::engine::{greedy, hybrid_bard, run};
use super::{DRAFTERS, Hashes, Met, base, drafting, held, off, open, samplings, start};

/// A third of the experts has a slot, and the head is lent for every prompt.
fn lent(mode: HeadAliasMode) -> EngineSettings {
    EngineSettings {
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        head_alias_mode: mode,
        expert_cache: ExpertCache::Slots(48),
        vram: Bytes::mib(64),
        ..base(256)
    }
}

fn requests() -> Vec<Request> {
    let request = |(index, (_, sampling))| Request { sampling, ..greedy(&held(700 * index + 5, 90), 30) };
    samplings().into_iter().enumerate().step_by(3).map(request).collect()
}

/// What the trained model writes with nothing lent and nobody drafting.
fn expected() -> Vec<Vec<TokenId>> {
    let mut plain = start(&hybrid_bard(), &EngineSettings { drafts: off(), ..base(256) });
    requests().iter().map(|request| run(&mut plain, request).tokens).collect()
}

#[test]
fn a_head_that_is_lent_and_comes_back_or_moves_serves_the_draft_layer_too() {
    let expected = expected();
    for mode in [HeadAliasMode::Overlay, HeadAliasMode::Realloc] {
        for source in DRAFTERS {
            let drafts = drafting(source, SpecSetting::Auto);
            let mut engine = start(&hybrid_bard(), &EngineSettings { drafts, ..lent(mode) });
            let graphs_of_head = engine.window_rows() as u64 + 1;
            assert!(graphs_of_head > 4, "{graphs_of_head}");
            let mut met = Met::default();
            for (request, expected) in requests().iter().zip(&expected) {
                let outcome = run(&mut engine, request);
                assert_eq!(outcome.tokens, *expected, "{mode}, {source}");
                let moved = if mode == HeadAliasMode::Realloc { graphs_of_head } else { 0 };
                assert_eq!((outcome.phases.head_reloads, outcome.recaptures), (1, moved), "{mode}, {source}");
                met.add(&outcome.drafts);
            }
            met.check(&format!("{mode}, {source}"));
            assert_eq!(engine.take_notices(), Vec::<String>::new());
        }
    }
}

#[test]
fn where_captures_fail_drafts_go_on_as_lists_of_operations() {
    let expected = expected();
    for (from_the_start, mode) in [(true, HeadAliasMode::Overlay), (false, HeadAliasMode::Realloc)] {
        let settings = lent(mode);
        let device = open(&settings);
        let faults = device.share();
        faults.faults().captures_fail = from_the_start;
        let mut engine = Engine::start(device, hybrid_bard(), &settings, &mut |_, _| ()).expect("the engine starts");
        faults.faults().captures_fail = true;
        let mut met = Met::default();
        for (request, expected) in requests().iter().zip(&expected) {
            let outcome = run(&mut engine, request);
            assert_eq!((&outcome.tokens, outcome.recaptures), (expected, 0));
            met.add(&outcome.drafts);
        }
        met.check("without graphs");
        let notices = engine.take_notices();
        assert!(matches!(notices.as_slice(), [notice] if notice.contains("without a captured graph")), "{notices:?}");
    }
}

/// Position and best tokens of each window of a request.
fn windows(drafts: DraftSettings, request: &Request) -> Vec<(usize, Vec<TokenId>)> {
    let hashes = Hashes::default();
    let mut engine = start(&hybrid_bard(), &EngineSettings { drafts, ..base(256) });
    engine.hash_windows(Box::new(hashes.0.clone())).expect("memory takes it");
    run(&mut engine, request);
    hashes.windows()
}

#[test]
fn hashes_show_the_same_best_token_at_every_position_that_is_kept() {
    let request = greedy(&held(300, 60), 50);
    let alone: Vec<TokenId> = windows(off(), &request).into_iter().flat_map(|(_, best)| best).collect();
    assert_eq!(alone.len(), 50);
    for source in DRAFTERS {
        let drafted = windows(drafting(source, SpecSetting::Auto), &request);
        let ends = drafted[1..].iter().map(|(position, _)| *position).chain([59 + 50]);
        let mut kept = Vec::new();
        for ((position, best), end) in drafted.iter().zip(ends) {
            assert_eq!(*position, 59 + kept.len());
            kept.extend_from_slice(&best[..end - position]);
        }
        assert_eq!(kept, alone, "{source}");
        assert!(drafted.len() < alone.len(), "{source}: some drafts were accepted");
    }
}
