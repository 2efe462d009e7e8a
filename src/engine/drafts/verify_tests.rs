//! Goal: a window with drafts chooses what windows of one token choose. Method: logits that depend on the tokens before, compared row by row.

use super::*;
use crate::engine::constraint::{Allowed, ConstraintState};
use crate::engine::sampler::Sampling;

const N_VOCAB: usize = 6;

/// Logits behind `history`: a stand-in for a model, different after each token and flat enough for draws and penalties to matter.
fn logits_behind(history: &[TokenId]) -> Vec<f32> {
    let last = f32::from(u8::try_from(history[history.len() - 1]).expect("a small token"));
    let length = f32::from(u8::try_from(history.len() % 5).expect("a small number"));
    (0..6u8).map(|token| (f32::from(token) * 1.7 + last * 2.3 + length).sin() * 1.5).collect()
}

/// Windows of one token each.
fn without_drafts(sampler: &Sampler, prompt: &[TokenId], tokens: usize) -> Vec<TokenId> {
    let mut history = prompt.to_vec();
    for _ in 0..tokens {
        let chosen = sampler.choose(&logits_behind(&history), &history, history.len());
        history.push(chosen.expect("finite"));
    }
    history.split_off(prompt.len())
}

/// A window whose text ends with `stop`, and whose acceptance is forced to `forced`.
fn window(sampler: &Sampler, history: &[TokenId], drafts: &[TokenId], stop: &[TokenId], forced: Option<f64>) -> Verified {
    let mut logits = logits_behind(history);
    let mut rows = history.to_vec();
    for &draft in drafts {
        rows.push(draft);
        logits.extend(logits_behind(&rows));
    }
    let candidates = Candidates { logits: &logits, n_vocab: N_VOCAB, history, drafts, stop_tokens: stop, force_acceptance: forced };
    verify(sampler, candidates, None).expect("nothing is demanded")
}

fn samplers() -> Vec<Sampler> {
    let base = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 11, ..Sampling::default() };
    let greedy = Sampling { temperature: 0.0, ..base.clone() };
    let short = Sampling { penalty_last_n: 2, ..base.clone() };
    [
        base.clone(),
        greedy.clone(),
        Sampling { top_k: 3, top_p: 0.9, min_p: 0.05, ..base.clone() },
        Sampling { repeat_penalty: 1.6, ..greedy.clone() },
        Sampling { presence_penalty: 1.0, frequency_penalty: 0.7, ..base.clone() },
        Sampling { frequency_penalty: 1.2, penalty_last_n: 3, ..greedy },
        Sampling { repeat_penalty: 2.0, ..short },
    ]
    .map(Sampler::new)
    .into()
}

#[test]
fn any_drafts_give_the_text_of_none() {
    let prompt = [0, 3, 3];
    for sampler in samplers() {
        let expected = without_drafts(&sampler, &prompt, 60);
        for wrong_every in 1..6usize {
            let mut history = prompt.to_vec();
            let mut window_count = 0;
            while history.len() < prompt.len() + 50 {
                let written = history.len() - prompt.len();
                // The right tokens, but for every few of them.
                let drafts: Vec<TokenId> = (written..written + 4)
                    .map(|index| if index % wrong_every == 0 { (expected[index] + 1) % 6 } else { expected[index] })
                    .collect();
                let verified = window(&sampler, &history, &drafts, &[], None);
                assert_eq!(verified.tokens.len(), verified.accepted + 1);
                assert_eq!(verified.tokens[..verified.accepted], drafts[..verified.accepted]);
                history.extend(verified.tokens);
                window_count += 1;
            }
            let written = &history[prompt.len()..];
            assert_eq!(written, &expected[..written.len()], "{sampler:?}, every {wrong_every}");
            assert_eq!(window_count == written.len(), wrong_every == 1, "drafts that are right spare windows");
        }
    }
}

#[test]
fn an_accepted_draft_is_penalised_in_the_rows_behind_it() {
    let sampler = Sampler::new(Sampling { temperature: 0.0, presence_penalty: 1.5, ..Sampling::default() });
    let row = [3.0, 2.0, 1.0];
    let logits = row.repeat(3);
    let candidates = Candidates { logits: &logits, n_vocab: 3, history: &[2], drafts: &[0, 1], stop_tokens: &[], force_acceptance: None };
    assert_eq!(
        verify(&sampler, candidates, None).expect("nothing is demanded").tokens,
        [0, 1, 0],
        "each token is the best that was not written yet"
    );
    let repeated = Candidates { drafts: &[0, 0], ..candidates };
    assert_eq!(
        verify(&sampler, repeated, None).expect("nothing is demanded"),
        Verified { tokens: vec![0, 1], accepted: 1, is_finite: true }
    );
}

#[test]
fn nothing_is_chosen_behind_the_end_of_the_text() {
    let sampler = samplers().swap_remove(1);
    let two = |first: TokenId| (first, without_drafts(&sampler, &[first], 3));
    let (first, expected) = (0..6).map(two).find(|(_, tokens)| tokens[0] != tokens[1]).expect("some tokens change");
    let verified = window(&sampler, &[first], &expected, &[expected[1]], None);
    assert_eq!(verified, Verified { tokens: expected[..2].to_vec(), accepted: 2, is_finite: true });
}

#[test]
fn tokens_before_a_row_that_is_not_finite_hold() {
    let sampler = samplers().swap_remove(1);
    let expected = without_drafts(&sampler, &[1], 3);
    let mut logits = logits_behind(&[1]);
    logits.extend([f32::NAN; N_VOCAB]);
    let candidates =
        Candidates { logits: &logits, n_vocab: N_VOCAB, history: &[1], drafts: &expected[..1], stop_tokens: &[], force_acceptance: None };
    assert_eq!(
        verify(&sampler, candidates, None).expect("nothing is demanded"),
        Verified { tokens: expected[..1].to_vec(), accepted: 1, is_finite: false }
    );
    let wrong = [(expected[0] + 1) % 6];
    assert!(
        verify(&sampler, Candidates { drafts: &wrong, ..candidates }, None).expect("nothing is demanded").is_finite,
        "nobody asks the row behind a wrong draft"
    );
}

#[test]
fn forced_acceptance_follows_its_probability_and_the_seed() {
    let sampler = samplers().swap_remove(0);
    let accepted = |acceptance: f64| {
        let of = |length: usize| {
            let verified = window(&sampler, &vec![1; length], &[2; 4], &[], Some(acceptance));
            assert_eq!(verified.tokens.len(), verified.accepted + 1);
            verified.accepted
        };
        (1..2000).map(of).sum::<usize>() as f64 / 1999.0
    };
    assert_eq!((accepted(0.0), accepted(1.0)), (0.0, 4.0));
    let half = accepted(0.5);
    assert!((half - 0.9375).abs() < 0.08, "1/2 + 1/4 + 1/8 + 1/16, not {half}");
    assert_eq!(half, accepted(0.5));
}

/// Allows only even tokens first and behind odd ones, and only odd ones behind even ones.
#[derive(Default)]
struct Alternating(Vec<TokenId>);

impl ConstraintState for Alternating {
    fn allowed(&mut self) -> Result<Allowed, ConstraintError> {
        let parity = self.0.last().map_or(0, |last| (last + 1) % 2);
        Ok(Allowed::Only(std::sync::Arc::new((0..6).filter(|token| token % 2 == parity).collect())))
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        if !self.allowed()?.contains(token) {
            return Err(ConstraintError(format!("{token} may not come")));
        }
        self.0.push(token);
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        self.0.truncate(self.0.len() - tokens);
        Ok(())
    }
}

#[test]
fn a_constraint_holds_in_every_row_and_drafts_do_not_change_the_text() {
    for sampler in samplers() {
        let texts: Vec<Vec<TokenId>> = [0, 1, 3]
            .map(|depth| {
                let (mut state, mut history) = (Alternating::default(), vec![2]);
                while history.len() < 40 {
                    // Some right, some wrong, some not allowed.
                    let drafts: Vec<TokenId> =
                        (0..depth).map(|row| u32::try_from(history.len()).expect("short") * 5 % 6 + row % 2).collect();
                    let drafts = &drafts[..state.acceptable(&drafts).expect("it can tell")];
                    let mut logits = logits_behind(&history);
                    (1..=drafts.len()).for_each(|rows| logits.extend(logits_behind(&[&history, &drafts[..rows]].concat())));
                    let candidates = Candidates {
                        logits: &logits,
                        n_vocab: N_VOCAB,
                        history: &history,
                        drafts,
                        stop_tokens: &[],
                        force_acceptance: None,
                    };
                    let verified = verify(&sampler, candidates, Some(&mut state)).expect("something may always come");
                    history.extend(verified.tokens);
                    assert_eq!(state.0, history[1..], "the constraint has what was chosen");
                }
                history.truncate(40);
                history
            })
            .into();
        assert!(texts[0][1..].iter().enumerate().all(|(place, token)| token % 2 == u32::try_from(place % 2).expect("a bit")));
        assert_eq!((&texts[1], &texts[2]), (&texts[0], &texts[0]));
    }
}
