//! Windows of models with a recurrent state: it moves by accepted rows alone, and with the bits of windows of one.

use std::sync::{Arc, LazyLock};

use ebbtide::model::Model;
use ebbtide::phase::plan::WINDOW_ROWS;
use ebbtide::settings::{DraftSetting, DraftSettings, EngineSettings};
use ebbtide::units::TokenId;
use proptest::prelude::*;

use super::common::engine::{greedy, hybrid_bard, synthetic_model, tokens};
use super::unreliable::Call;
use super::{N_TOKENS, Watched, bits, roomy};

static MODEL: LazyLock<Arc<Model>> =
    LazyLock::new(|| synthetic_model("--arch qwen35moe --shape micro --seed 4 --type Q4_K --head-type Q6_K"));

/// Logits of every token of `text` through windows of one, with the state after each.
struct Alone {
    logits: Vec<Vec<u32>>,
    /// Before the first token, then after each.
    states: Vec<Vec<u8>>,
}

impl Alone {
    fn read(model: &Arc<Model>, text: &[TokenId]) -> Self {
        let mut alone = Watched::start(model, &roomy(16), &[]);
        let (mut logits, mut states) = (Vec::new(), vec![Vec::new()]);
        for token in text {
            logits.extend(bits(&alone.window(&[*token])));
            alone.engine.accept(1).expect("accepted");
            states.push(alone.state_bytes());
        }
        Self { logits, states }
    }
}

#[test]
fn every_row_has_the_logits_of_a_window_of_one_and_the_state_moves_by_accepted_rows() {
    let text = tokens(1, N_TOKENS, 500);
    for args in ["--type Q4_K --head-type Q6_K", "--type F32", "--type IQ4_NL --mtp 1"] {
        let model = synthetic_model(&format!("--arch qwen35moe --shape micro --seed 4 {args}"));
        let alone = Alone::read(&model, &text);
        assert!(alone.states[1] != alone.states[2], "a token changes the state");
        for n_rows in 1..=WINDOW_ROWS as usize {
            let mut engine = Watched::start(&model, &roomy([32, 1, 5][n_rows % 3]), &[]);
            let mut position = 0;
            for window in text.chunks(n_rows) {
                let rows = bits(&engine.window(window));
                assert!(rows == alone.logits[position..position + window.len()], "{args}: windows of {n_rows}, from {position} on");
                if position > 0 {
                    assert!(engine.state_bytes_now() == alone.states[position], "{args}: a window wrote the state at {position}");
                }
                engine.engine.accept(window.len()).expect("accepted");
                position += window.len();
                assert!(engine.state_bytes() == alone.states[position], "{args}: windows of {n_rows}, after {position} tokens");
            }
        }
    }
}

#[test]
fn drafts_that_are_taken_back_leave_the_state_as_if_they_had_never_been() {
    let text = tokens(7, 40, 500);
    let alone = Alone::read(&MODEL, &text);
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(cuts in prop::collection::vec((1usize..=8, 0usize..=8, any::<u32>()), 60))| {
        let mut engine = Watched::start(&MODEL, &roomy(9), &[]);
        let (mut at, mut taken_back) = (0, 0);
        for (rows, right, seed) in cuts {
            // The first rows are the text, what follows is not.
            let right = right.min(rows).min(text.len() - at);
            let drafts = tokens(u64::from(seed), rows - right, 500);
            let window: Vec<TokenId> = text[at..at + right].iter().copied().chain(drafts).collect();
            let logits = bits(&engine.window(&window));
            prop_assert!(logits[..right] == alone.logits[at..at + right]);
            engine.engine.accept(right).expect("accepted");
            (at, taken_back) = (at + right, taken_back + rows - right);
            if at > 0 {
                prop_assert!(engine.state_bytes() == alone.states[at], "after {} tokens", at);
            }
            if at == text.len() {
                break;
            }
        }
        prop_assert!(taken_back > 0);
    });
}

#[test]
fn a_commit_whose_graph_does_not_launch_costs_one_line_and_no_token() {
    let request = greedy(&tokens(3, 30, 500), 12);
    let mut plain = Watched::start(&MODEL, &roomy(5), &[]);
    let expected = plain.run(&request).tokens;
    let (captures, replays) = (plain.script().captures.get(), plain.script().replays.get());
    assert_eq!(captures, 3 * u64::from(WINDOW_ROWS), "trunk, head and commit of each size");
    for failure in (0..replays).step_by(3).map(Call::Replay).chain((0..captures).step_by(5).map(Call::Capture)) {
        let mut engine = Watched::start(&MODEL, &roomy(5), &[failure]);
        assert_eq!(engine.run(&request).tokens, expected, "{failure:?}");
        let notices = engine.engine.take_notices();
        assert!(notices.len() == 1 && notices[0].contains("without"), "{failure:?}: {notices:?}");
    }
}

#[test]
fn a_draft_whose_graph_does_not_launch_costs_one_line_and_no_token() {
    let model = hybrid_bard();
    let request = greedy(&tokens(3, 30, 4000), 16);
    let ask = |engine: &mut Watched| {
        let outcome = engine.run(&request);
        (outcome.tokens, outcome.drafts.mtp)
    };
    let drafts = DraftSettings { source: DraftSetting::Mtp, ..DraftSettings::default() };
    let settings = EngineSettings { drafts, ..roomy(16) };
    let mut plain = Watched::start_in_virtual_time(
        &model,
        &EngineSettings { drafts: DraftSettings { source: DraftSetting::Off, ..settings.drafts.clone() }, ..settings.clone() },
        &[],
    );
    let expected = ask(&mut plain).0;
    let mut drafting = Watched::start_in_virtual_time(&model, &settings, &[]);
    let (tokens, met) = ask(&mut drafting);
    assert!(tokens == expected && met.accepted > 0 && met.accepted < met.offered, "{met:?}");
    let (captures, replays) = (drafting.script().captures.get(), drafting.script().replays.get());
    // Trunk, head, commit and draft of each size, then the draft layer's own row and its head.
    assert_eq!(captures, 4 * drafting.engine.window_rows() as u64 + 2);
    // One in three of each, so that every kind of graph is met.
    let replayed = (0..replays).step_by(3).flat_map(|number| [Call::Replay(number), Call::WaitForReplay(number / 3)]);
    let failures = replayed.chain((0..captures).step_by(3).map(Call::Capture));
    for failure in failures {
        let mut engine = Watched::start_in_virtual_time(&model, &settings, &[failure]);
        let (tokens, met) = ask(&mut engine);
        assert_eq!(tokens, expected, "{failure:?}");
        assert!(met.offered > 0, "{failure:?}");
        let notices = engine.engine.take_notices();
        assert!(notices.len() == 1 && notices[0].contains("without"), "{failure:?}: {notices:?}");
    }
}
