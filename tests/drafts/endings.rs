//! Wherever a text ends, the sequence holds exactly that text, and what goes on from it is right.

use std::cell::Cell;

use ebbtide::engine::timelines::Place;
use ebbtide::engine::{Finish, Outcome, Request};
use ebbtide::settings::{DraftSettings, EngineSettings};
use ebbtide::units::{Bytes, TokenId};

use super::common::engine::{greedy, hybrid_bard, run, tokens};
use super::{Hashes, Host, Met, base, held, off, run_until, start};

/// The same model with all drafts and with none; what they are asked is the same, so they have to stand the same.
struct Pair {
    drafting: Host,
    plain: Host,
    met: Met,
}

impl Pair {
    fn new(settings: &EngineSettings) -> Self {
        let model = hybrid_bard();
        let engine = |drafts: DraftSettings| start(&model, &EngineSettings { drafts, prefix_cache: Bytes::mib(64), ..settings.clone() });
        Self { drafting: engine(DraftSettings::default()), plain: engine(off()), met: Met::default() }
    }

    fn ask(&mut self, request: &Request, stop_after: usize) -> Outcome {
        let request = Request { logprobs: Some(0), ..request.clone() };
        let [found, expected] = [&mut self.drafting, &mut self.plain].map(|engine| run_until(engine, &request, stop_after));
        assert_eq!((&found.tokens, found.finish), (&expected.tokens, expected.finish));
        assert_eq!((found.logprobs.len(), &found.logprobs), (found.tokens.len(), &expected.logprobs));
        assert_eq!((found.reused_tokens, found.place), (expected.reused_tokens, expected.place));
        assert_eq!(self.drafting.sequence_tokens(), self.plain.sequence_tokens());
        self.met.add(&found.drafts);
        found
    }
}

/// A prompt, and what the trained model writes behind it.
fn text(n_prompt: usize, n_written: usize) -> (Vec<TokenId>, Vec<TokenId>) {
    let prompt = held(4321, n_prompt);
    let written = run(&mut start(&hybrid_bard(), &EngineSettings { drafts: off(), ..base(512) }), &greedy(&prompt, n_written)).tokens;
    (prompt, written)
}

fn joined(parts: &[&[TokenId]]) -> Vec<TokenId> {
    parts.concat()
}

/// In both modes: ends a text in many places by `end`, which says how much of it is kept, and goes on from there each time. Returns how
/// often a window had chosen more tokens than were taken.
fn ended_everywhere(end: impl Fn(&mut Pair, &[TokenId], &[TokenId], usize) -> (Outcome, usize)) -> usize {
    let (prompt, written) = text(70, 48);
    let mut inside = 0;
    for deterministic in [false, true] {
        let settings = EngineSettings { deterministic, ..base(512) };
        let mut pair = Pair::new(&settings);
        for at in (1..written.len()).step_by(if deterministic { 9 } else { 4 }) {
            let (outcome, kept) = end(&mut pair, &prompt, &written, at);
            assert_eq!(outcome.tokens, written[..kept], "{:?} at {at}", outcome.finish);
            let chosen = outcome.drafts.windows + outcome.drafts.accepted();
            inside += usize::from(chosen > outcome.tokens.len() as u64 + u64::from(outcome.finish == Finish::Stop));
            let next = joined(&[&prompt, &written[..kept], &tokens(at as u64, 9, 4000)]);
            let went_on = pair.ask(&greedy(&next, 6), usize::MAX);
            if deterministic {
                let mut fresh = start(&hybrid_bard(), &EngineSettings { drafts: off(), ..settings.clone() });
                assert_eq!(went_on.tokens, run(&mut fresh, &greedy(&next, 6)).tokens);
                assert!(went_on.reused_tokens.is_multiple_of(64));
            } else {
                let sequence = prompt.len() + kept - usize::from(outcome.finish != Finish::Stop);
                assert_eq!(went_on.reused_tokens, sequence, "all that was kept is gone on from");
            }
        }
        pair.met.check("all of them");
    }
    inside
}

#[test]
fn a_request_cancelled_inside_a_window_stands_where_its_text_ends() {
    let inside = ended_everywhere(|pair, prompt, written, at| (pair.ask(&greedy(prompt, written.len()), at), at));
    assert!(inside > 3, "{inside} inside a window");
}

#[test]
fn a_stop_token_inside_a_window_ends_the_text_there() {
    let inside = Cell::new(0);
    ended_everywhere(|pair, prompt, written, at| {
        let kept = written.iter().position(|token| *token == written[at]).expect("it is there");
        let hashes = Hashes::default();
        pair.drafting.hash_windows(Box::new(hashes.0.clone())).expect("memory takes it");
        let outcome = pair.ask(&Request { stop_tokens: vec![written[at]], ..greedy(prompt, written.len()) }, usize::MAX);
        assert_eq!(outcome.finish, Finish::Stop);
        assert_eq!(pair.drafting.sequence_tokens(), joined(&[prompt, &written[..kept]]));
        let windows = hashes.windows();
        let (position, rows) = windows.last().map(|(position, best)| (*position, best.len())).expect("a window");
        inside.set(inside.get() + usize::from(position + rows > prompt.len() + kept));
        (outcome, kept)
    });
    assert!(inside.get() > 3, "{} inside a window", inside.get());
}

#[test]
fn the_number_of_tokens_asked_for_cuts_a_window_short() {
    let inside = ended_everywhere(|pair, prompt, _, at| (pair.ask(&greedy(prompt, at), usize::MAX), at));
    assert_eq!(inside, 0, "no window carries drafts that nobody wants");
}

#[test]
fn a_text_that_fills_the_context_ends_at_its_last_row() {
    let prompt = held(4321, 100);
    for deterministic in [false, true] {
        for ctx_tokens in 140..148 {
            let mut pair = Pair::new(&EngineSettings { deterministic, ..base(ctx_tokens) });
            let outcome = pair.ask(&greedy(&prompt, 1000), usize::MAX);
            assert_eq!((outcome.tokens.len(), outcome.finish), (ctx_tokens as usize - 99, Finish::Length));
            assert_eq!(pair.drafting.sequence_tokens().len(), ctx_tokens as usize);
            pair.ask(&greedy(&joined(&[&prompt, &outcome.tokens[..20]]), 1000), usize::MAX);
            pair.met.check("both");
        }
    }
}

#[test]
fn a_side_timeline_drafts_beside_a_long_conversation() {
    for deterministic in [false, true] {
        let mut pair = Pair::new(&EngineSettings { deterministic, ..base(1536) });
        let mut conversation = held(20_000, 800);
        let first = pair.ask(&greedy(&conversation, 12), usize::MAX);
        let title = held(9000, 40);
        let outcome = pair.ask(&greedy(&title, 60), usize::MAX);
        assert_eq!((outcome.place, outcome.reused_tokens), (Place::Side, 0));
        conversation.extend(&first.tokens);
        conversation.extend(held(50_000, 30));
        let second = pair.ask(&greedy(&conversation, 12), usize::MAX);
        assert_eq!(second.place, Place::Main);
        assert_eq!(second.reused_tokens, if deterministic { 768 } else { 811 }, "main is as it was left");
        pair.met.check("both places");
        // It outgrows the rows set aside for it, 40 and 512 of them, and moves to the start in the midst of its windows.
        let other = held(9500, 40);
        let outgrown = pair.ask(&greedy(&other, 530), usize::MAX);
        assert_eq!((outgrown.place, outgrown.tokens.len()), (Place::Side, 530));
        let after = pair.ask(&greedy(&joined(&[&other, &outgrown.tokens, &held(100, 5)]), 12), usize::MAX);
        assert_eq!((after.place, after.reused_tokens), (Place::Main, if deterministic { 0 } else { 569 }));
        pair.ask(&greedy(&conversation, 12), usize::MAX);
    }
}
