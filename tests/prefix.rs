//! Goal: what is reused of an earlier prompt never changes a token, and is reused where it should be. Method: conversations with every
//! kind of change between two turns, on one engine, compared with an engine that reads each prompt from its first token;
//! deterministic, greedy. Each test says what it must have met.

mod common;

use std::sync::Arc;

use common::engine::{engine, greedy, run, run_until, settings, synthetic_model, tokens};
use ebbtide::engine::timelines::Place;
use ebbtide::engine::{Engine, Finish, Outcome};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, EngineSettings, ExpertCache, KvType};
use ebbtide::units::{Bytes, TokenId};

const CTX_TOKENS: u32 = 2048;
const N_VOCAB: u32 = 500;

fn model() -> Arc<Model> {
    synthetic_model("--shape micro --seed 4 --type Q4_K --head-type Q6_K")
}

/// Deterministic, with the head lent to every prompt.
fn reading_all() -> EngineSettings {
    EngineSettings {
        deterministic: true,
        expert_cache: ExpertCache::Slots(8),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        ..settings(CTX_TOKENS)
    }
}

fn reusing(budget: Bytes) -> EngineSettings {
    EngineSettings { prefix_cache: budget, ..reading_all() }
}

type Host = Engine<ebbtide::backends::host::HostBackend>;

/// Runs a prompt on both engines and demands the same tokens.
fn same(reusing: &mut Host, reading_all: &mut Host, prompt: &[TokenId], tokens_max: usize) -> Outcome {
    let request = greedy(prompt, tokens_max);
    let expected = run(reading_all, &request);
    assert_eq!(expected.reused_tokens, 0);
    let found = run(reusing, &request);
    assert_eq!(found.tokens, expected.tokens, "{} of {} reused, {:?}", found.reused_tokens, prompt.len(), found.place);
    assert!(found.reused_tokens < prompt.len() && found.reused_tokens.is_multiple_of(64));
    found
}

#[test]
fn a_second_turn_reads_what_is_new() {
    let model = model();
    for kv in [KvType::F16, KvType::Q8_0] {
        let mut reusing = engine(&model, &EngineSettings { kv, ..reusing(Bytes::mib(16)) });
        let mut plain = engine(&model, &EngineSettings { kv, ..reading_all() });
        let mut conversation = tokens(1, 700, N_VOCAB);
        let mut reused = Vec::new();
        for turn in 0..4 {
            let outcome = same(&mut reusing, &mut plain, &conversation, 12);
            reused.push(outcome.reused_tokens);
            conversation.extend(outcome.tokens);
            conversation.extend(tokens(100 + turn, 90, N_VOCAB));
        }
        // What windows wrote is read again, and whole steps of 64 are kept.
        assert_eq!(reused, [0, 640, 768, 896], "{kv:?}");
    }
}

#[test]
fn without_determinism_every_row_is_reused_and_one_token_is_left() {
    let model = model();
    let mut engine = engine(&model, &EngineSettings { deterministic: false, ..reusing(Bytes::mib(16)) });
    let mut prompt = tokens(1, 300, N_VOCAB);
    let first = run(&mut engine, &greedy(&prompt, 12));
    assert_eq!((first.reused_tokens, first.tokens.len()), (0, 12));
    prompt.extend(&first.tokens);
    let second = run(&mut engine, &greedy(&prompt, 5));
    // The last token written was chosen and never read.
    assert_eq!(second.reused_tokens, 311);
    assert_eq!(second.phases.loans, 0, "nothing is left to read");
    assert_eq!(run(&mut engine, &greedy(&prompt, 5)).tokens, second.tokens, "the same again");
}

#[test]
fn random_edits_of_a_long_prompt_change_no_token() {
    let model = model();
    let mut reusing = engine(&model, &reusing(Bytes::mib(4)));
    let mut plain = engine(&model, &reading_all());
    let mut prompt = tokens(1, 900, N_VOCAB);
    let (mut n_reused, mut n_cancelled, mut places) = (0, 0, Vec::new());
    for (round, random) in tokens(77, 60, 1 << 30).into_iter().enumerate() {
        let (kind, number) = (random % 6, (random / 6) as usize);
        let seed = u64::from(random);
        match kind {
            0 => prompt.truncate(prompt.len() - number % (prompt.len() / 4)),
            1 if prompt.len() < 1800 => prompt.extend(tokens(seed, 1 + number % 150, N_VOCAB)),
            2 => {
                let at = number % prompt.len();
                prompt[at] = (prompt[at] + 1) % N_VOCAB;
            }
            // A small request beside the long one.
            3 => {
                let outcome = same(&mut reusing, &mut plain, &tokens(seed, 20 + number % 600, N_VOCAB), 6);
                places.push(outcome.place);
            }
            4 => {
                let outcome = run_until(&mut reusing, &greedy(&prompt, 6), number % 4);
                n_cancelled += usize::from(outcome.finish == Finish::Cancelled);
            }
            _ => {}
        }
        if prompt.len() < 700 {
            prompt.extend(tokens(seed, 700, N_VOCAB));
        }
        let outcome = same(&mut reusing, &mut plain, &prompt, 8);
        n_reused += usize::from(outcome.reused_tokens > 0);
        assert!(round == 0 || outcome.prompt_tokens == prompt.len());
    }
    assert!(n_reused > 20 && n_cancelled > 2, "{n_reused} reused, {n_cancelled} cancelled");
    assert!(places.contains(&Place::Side) && places.contains(&Place::Main), "{places:?}");
    let counters = reusing.prefix_counters();
    assert!(counters.parked > 0 && counters.resumed > 0 && counters.dropped > 0, "{counters:?}");
}

#[test]
fn two_agents_with_prefixes_of_their_own_both_keep_them() {
    let model = model();
    let mut reusing = engine(&model, &reusing(Bytes::mib(64)));
    let mut plain = engine(&model, &reading_all());
    let mut agents = [tokens(1, 900, N_VOCAB), tokens(2, 800, N_VOCAB)];
    for turn in 0..6u64 {
        for (name, prompt) in agents.iter_mut().enumerate() {
            let before = prompt.len();
            if turn > 0 {
                prompt.extend(tokens(10 * turn + name as u64, 70, N_VOCAB));
            }
            let outcome = same(&mut reusing, &mut plain, prompt, 4);
            if turn > 0 {
                assert!(outcome.reused_tokens + 64 >= before - 1, "turn {turn} of agent {name}: {} of {before}", outcome.reused_tokens);
            }
        }
    }
    let counters = reusing.prefix_counters();
    assert!(counters.parked >= 5 && counters.resumed >= 5, "{counters:?}");
}

#[test]
fn a_title_between_two_turns_costs_the_long_conversation_nothing() {
    let model = model();
    // No byte for parking: the second timeline alone keeps the prefix.
    let mut reusing = engine(&model, &reusing(Bytes(1)));
    let mut plain = engine(&model, &reading_all());
    let mut conversation = tokens(1, 1000, N_VOCAB);
    same(&mut reusing, &mut plain, &conversation, 4);
    let title = same(&mut reusing, &mut plain, &tokens(5, 120, N_VOCAB), 30);
    assert_eq!((title.place, title.reused_tokens), (Place::Side, 0));
    conversation.extend(tokens(6, 100, N_VOCAB));
    let second = same(&mut reusing, &mut plain, &conversation, 4);
    assert_eq!((second.place, second.reused_tokens), (Place::Main, 960));
    assert_eq!(reusing.prefix_counters().parked, 0);
}

#[test]
fn a_side_request_that_outgrows_its_room_moves_to_the_start_and_goes_on() {
    let model = model();
    for parked in [Bytes(1), Bytes::mib(64)] {
        let mut reusing = engine(&model, &reusing(parked));
        let mut plain = engine(&model, &reading_all());
        let conversation = tokens(1, 800, N_VOCAB);
        same(&mut reusing, &mut plain, &conversation, 2);
        // 150 and 512 rows are set aside for it.
        let small = tokens(5, 150, N_VOCAB);
        let outcome = same(&mut reusing, &mut plain, &small, 900);
        assert_eq!((outcome.place, outcome.tokens.len()), (Place::Side, 900));
        let mut longer = small.clone();
        longer.extend(tokens(7, 50, N_VOCAB));
        let after = same(&mut reusing, &mut plain, &longer, 4);
        assert_eq!((after.place, after.reused_tokens), (Place::Main, 128));
        let back = same(&mut reusing, &mut plain, &conversation, 2);
        assert_eq!(back.reused_tokens, if parked > Bytes(1) { 768 } else { 0 });
    }
}

#[test]
fn main_grows_over_a_side_timeline_that_is_then_read_again() {
    let model = model();
    let mut reusing = engine(&model, &reusing(Bytes(1)));
    let mut plain = engine(&model, &reading_all());
    let mut conversation = tokens(1, 1200, N_VOCAB);
    same(&mut reusing, &mut plain, &conversation, 2);
    let small = tokens(5, 200, N_VOCAB);
    assert_eq!(same(&mut reusing, &mut plain, &small, 10).place, Place::Side);
    // It begins at row 2048 - 210; reading and writing both cross it.
    conversation.extend(tokens(6, 600, N_VOCAB));
    same(&mut reusing, &mut plain, &conversation, 100);
    assert_eq!(same(&mut reusing, &mut plain, &small, 10).reused_tokens, 0);
}
