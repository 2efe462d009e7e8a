//! Goal: of a model with a recurrent state, too, what is reused of an earlier prompt never changes a token, and is reused where it should
//! be: from the live state, or from a copy of it. Method: conversations on one engine, compared with engines that read each prompt from
//! its first token: bit by bit in deterministic mode; without it, by the trained model's own text. Each test says what it must have met.

mod common;

use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use common::engine::{all_logits, device, engine, greedy, hybrid_bard, run, run_until, settings, synthetic_model, tokens};
use ebbtide::backends::host::{Faults, HostBackend};
use ebbtide::engine::timelines::Place;
use ebbtide::engine::{Engine, Event, Finish, Outcome, Request};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, EngineSettings, ExpertCache, ShortRead};
use ebbtide::units::{Bytes, TokenId};

const CTX_TOKENS: u32 = 2048;
const N_VOCAB: u32 = 500;
const ROOMY: Bytes = Bytes::mib(64);

static MODEL: LazyLock<Arc<Model>> =
    LazyLock::new(|| synthetic_model("--arch qwen35moe --shape micro --mtp 1 --seed 4 --type Q4_K --head-type Q6_K"));

type Host = Engine<HostBackend>;

fn base(budget: Bytes) -> EngineSettings {
    EngineSettings {
        prefix_cache: budget,
        expert_cache: ExpertCache::Slots(16),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        short_read: ShortRead::Tokens(0),
        ..settings(CTX_TOKENS)
    }
}

fn deterministic(budget: Bytes) -> EngineSettings {
    EngineSettings { deterministic: true, ..base(budget) }
}

/// An engine that reuses, and one that reads all, in deterministic mode.
struct Pair {
    reusing: Host,
    plain: Host,
    budget: Bytes,
}

impl Pair {
    fn new(budget: Bytes) -> Self {
        Self { reusing: engine(&MODEL, &deterministic(budget)), plain: engine(&MODEL, &deterministic(Bytes::ZERO)), budget }
    }

    /// Runs a prompt on both engines and demands the same tokens, of the same probability to the last bit: a state that is not quite the
    /// right one need not change a token.
    fn same(&mut self, prompt: &[TokenId], tokens_max: usize) -> Outcome {
        let request = Request { logprobs: Some(1), ..greedy(prompt, tokens_max) };
        let expected = run(&mut self.plain, &request);
        let budget = self.budget;
        let reusing = &mut self.reusing;
        let found = run(reusing, &request);
        let at = format!("{} of {} reused, {:?}", found.reused_tokens, prompt.len(), found.place);
        assert_eq!((&found.tokens, &found.logprobs), (&expected.tokens, &expected.logprobs), "{at}");
        assert!(found.reused_tokens < prompt.len() && found.reused_tokens.is_multiple_of(64));
        assert!(reusing.prefix_bytes() <= budget, "{} of {budget}", reusing.prefix_bytes());
        found
    }
}

fn state_bytes() -> Bytes {
    engine(&MODEL, &base(ROOMY)).plan().state_bytes
}

#[test]
fn a_second_turn_reads_what_is_new() {
    let mut pair = Pair::new(ROOMY);
    let mut conversation = tokens(1, 700, N_VOCAB);
    let mut reused = Vec::new();
    for turn in 0..4 {
        let outcome = pair.same(&conversation, 12);
        reused.push(outcome.reused_tokens);
        conversation.extend(outcome.tokens);
        conversation.extend(tokens(100 + turn, 90, N_VOCAB));
    }
    // Each turn goes on from the copy that was made near the end of the prompt before it, of 700, 802 and 904 tokens.
    assert_eq!(reused, [0, 640, 768, 832]);
    let counters = pair.reusing.prefix_counters();
    assert_eq!((counters.snapshots_used, counters.resumed), (3, 0), "{counters:?}");
}

#[test]
fn without_determinism_a_conversation_goes_on_from_the_live_state() {
    let mut engine = engine(&MODEL, &base(ROOMY));
    let mut prompt = tokens(1, 300, N_VOCAB);
    for (turn, n_new) in [30, 0, 1].into_iter().enumerate() {
        let before = engine.sequence_tokens().len();
        let outcome = run(&mut engine, &greedy(&prompt, 12));
        assert_eq!(outcome.reused_tokens, before, "turn {turn}: all that is known");
        prompt.extend(&outcome.tokens);
        // The last token written was chosen and never read.
        assert_eq!(engine.sequence_tokens(), &prompt[..prompt.len() - 1]);
        prompt.extend(tokens(7, n_new, N_VOCAB));
    }
    let counters = engine.prefix_counters();
    assert_eq!(counters.snapshots_used, 0, "{counters:?}");
    // The same prompt again: a state that is past it cannot be gone on from, a copy before it can.
    let again = run(&mut engine, &greedy(&prompt[..300], 12));
    assert_eq!((again.reused_tokens, engine.prefix_counters().snapshots_used), (256, 1));
}

#[test]
fn an_edited_turn_goes_on_from_the_copy_near_the_prompts_end() {
    for settings in [base(ROOMY), deterministic(ROOMY)] {
        let mut engine = engine(&MODEL, &settings);
        let first = tokens(1, 700, N_VOCAB);
        run(&mut engine, &greedy(&first, 20));
        // Another beginning of the answer than the one that was prompted for.
        let mut edited = first[..693].to_vec();
        edited.extend(tokens(2, 100, N_VOCAB));
        assert_eq!(run(&mut engine, &greedy(&edited, 5)).reused_tokens, 640);
        // Where it parts earlier there is no copy. From now on there is.
        let mut early = first[..400].to_vec();
        early.extend(tokens(3, 200, N_VOCAB));
        assert_eq!(run(&mut engine, &greedy(&early, 5)).reused_tokens, 0);
        early.truncate(450);
        early.extend(tokens(4, 200, N_VOCAB));
        assert_eq!(run(&mut engine, &greedy(&early, 5)).reused_tokens, 384);
        let counters = engine.prefix_counters();
        assert_eq!(counters.snapshots_used, 2, "{counters:?}");
    }
}

#[test]
fn agents_with_a_common_beginning_share_it_and_keep_what_is_their_own() {
    let system = tokens(50, 300, N_VOCAB);
    let agent = |name: u64, n: usize| [&system[..], &tokens(name, n, N_VOCAB)].concat();
    let mut pair = Pair::new(ROOMY);
    let mut agents = [agent(1, 500), agent(2, 400)];
    assert_eq!(pair.same(&agents[0], 4).reused_tokens, 0);
    assert_eq!(pair.same(&agents[1], 4).reused_tokens, 0, "where they part is known only now");
    assert_eq!(pair.same(&agent(3, 350), 4).reused_tokens, 256, "the beginning that all share");
    for turn in 0..4u64 {
        for (name, prompt) in agents.iter_mut().enumerate() {
            let before = prompt.len();
            prompt.extend(tokens(10 * turn + name as u64 + 5, 70, N_VOCAB));
            let outcome = pair.same(prompt, 4);
            assert_eq!(outcome.reused_tokens, (before - 9) / 64 * 64, "turn {turn} of agent {name}");
        }
    }
    let counters = pair.reusing.prefix_counters();
    assert!(counters.parked >= 8 && counters.resumed >= 8 && counters.snapshots_used >= 9, "{counters:?}");

    // Without determinism, each goes on from where it was left.
    let mut engine = engine(&MODEL, &base(ROOMY));
    let mut agents = [agent(1, 500), agent(2, 400)];
    for turn in 0..4u64 {
        for (name, prompt) in agents.iter_mut().enumerate() {
            let known = if turn > 0 { prompt.len() - 1 } else { 0 };
            prompt.extend(tokens(10 * turn + name as u64 + 5, 40, N_VOCAB));
            let outcome = run(&mut engine, &greedy(prompt, 4));
            assert_eq!(outcome.reused_tokens, known, "turn {turn} of agent {name}");
            prompt.extend(outcome.tokens);
        }
    }
    let counters = engine.prefix_counters();
    assert!(counters.resumed >= 6 && counters.snapshots_used >= 6, "{counters:?}");
}

#[test]
fn a_title_between_two_turns_costs_the_long_conversation_nothing() {
    let (conversation, title) = (tokens(1, 1000, N_VOCAB), tokens(5, 120, N_VOCAB));
    let longer = [&conversation[..], &tokens(6, 100, N_VOCAB)].concat();
    let mut pair = Pair::new(ROOMY);
    pair.same(&conversation, 4);
    let side = pair.same(&title, 30);
    assert_eq!((side.place, side.reused_tokens), (Place::Side, 0));
    let second = pair.same(&longer, 4);
    assert_eq!((second.place, second.reused_tokens), (Place::Main, 960));

    let mut engine = engine(&MODEL, &base(ROOMY));
    run(&mut engine, &greedy(&conversation, 1));
    let mut n_tokens = 0;
    let side = engine.generate(&greedy(&title, 100), &mut |event| {
        n_tokens += usize::from(matches!(event, Event::Token(_)));
        if n_tokens == 30 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let side = side.expect("stopping is no error");
    assert_eq!((side.place, side.reused_tokens), (Place::Side, 0));
    let second = run(&mut engine, &greedy(&longer, 4));
    assert_eq!((second.place, second.reused_tokens), (Place::Main, 1000));
    // And back to the title, which was left behind as well.
    let more = [&title[..], &side.tokens, &[7, 8, 9]].concat();
    let third = run(&mut engine, &greedy(&more, 4));
    assert_eq!((third.place, third.reused_tokens), (Place::Side, 149));
    for engine in [&pair.reusing, &engine] {
        assert_eq!(engine.prefix_counters().parked, 0, "keys and values stayed where they were");
    }
}

#[test]
fn a_side_request_that_outgrows_its_room_takes_its_state_along() {
    for parked in [Bytes(1), ROOMY] {
        let mut pair = Pair::new(parked);
        let conversation = tokens(1, 800, N_VOCAB);
        pair.same(&conversation, 2);
        // 150 and 512 rows are set aside for it.
        let small = tokens(5, 150, N_VOCAB);
        let outcome = pair.same(&small, 600);
        assert_eq!((outcome.place, outcome.tokens.len()), (Place::Side, 600));
        let longer = [&small[..], &tokens(7, 50, N_VOCAB)].concat();
        let has_room = parked > Bytes(1);
        let after = pair.same(&longer, 4);
        assert_eq!((after.place, after.reused_tokens), if has_room { (Place::Main, 128) } else { (Place::Side, 0) });
        assert_eq!(pair.same(&conversation, 2).reused_tokens, if has_room { 768 } else { 0 });
    }
}

#[test]
fn random_edits_of_a_long_prompt_change_no_token_whatever_the_budget() {
    let state = state_bytes();
    let (mut n_cancelled, mut places) = (0, Vec::new());
    // From less than one copy of the state to plenty.
    for (budget, rounds) in [(state - Bytes(1), 6), (state * 2, 16), (state * 6, 18), (ROOMY, 12)] {
        let mut pair = Pair::new(budget);
        let mut prompt = tokens(1, 900, N_VOCAB);
        let mut n_reused = 0;
        for random in tokens(77 + rounds as u64, rounds, 1 << 30) {
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
                3 => places.push(pair.same(&tokens(seed, 20 + number % 600, N_VOCAB), 6).place),
                4 => {
                    let outcome = run_until(&mut pair.reusing, &greedy(&prompt, 6), number % 30);
                    n_cancelled += usize::from(outcome.finish == Finish::Cancelled);
                }
                _ => {}
            }
            if prompt.len() < 700 {
                prompt.extend(tokens(seed, 700, N_VOCAB));
            }
            n_reused += usize::from(pair.same(&prompt, 8).reused_tokens > 0);
        }
        let counters = pair.reusing.prefix_counters();
        if budget < state {
            assert_eq!((n_reused, counters.snapshots), (0, 0), "{counters:?}");
        } else {
            assert!(n_reused > 3 && counters.snapshots_used > 3, "{n_reused}, {counters:?}");
            assert!(counters.dropped > 0 || budget == ROOMY, "{counters:?}");
        }
    }
    assert!(n_cancelled > 3, "{n_cancelled}");
    assert!(places.contains(&Place::Side) && places.contains(&Place::Main), "{places:?}");
}

#[test]
fn a_block_that_is_stopped_leaves_the_state_that_it_began_with() {
    let mut pair = Pair::new(ROOMY);
    let first = tokens(1, 700, N_VOCAB);
    pair.same(&first, 4);
    let mut blocks = 0;
    for stop_at in 0..20_u8 {
        // Another short turn behind the same copy of the state, stopped while it is read.
        let turn = [&first[..650], &tokens(stop_at.into(), 9, N_VOCAB)].concat();
        let stopped = run_until(&mut pair.reusing, &greedy(&turn, 4), stop_at.into());
        assert_eq!(stopped.reused_tokens, 640);
        if !stopped.tokens.is_empty() {
            break;
        }
        blocks += 1;
        assert_eq!(pair.reusing.sequence_tokens().len(), 640, "one block");
        let used = pair.reusing.prefix_counters().snapshots_used;
        assert_eq!(pair.same(&turn, 4).reused_tokens, 640);
        assert_eq!(pair.reusing.prefix_counters().snapshots_used, used, "the live state was gone on from");
    }
    assert!(blocks > 5, "{blocks} were stopped inside");
}

#[test]
fn with_less_room_than_one_state_only_the_live_one_is_gone_on_from() {
    let mut engine = engine(&MODEL, &base(state_bytes() - Bytes(1)));
    let mut prompt = tokens(1, 300, N_VOCAB);
    prompt.extend(run(&mut engine, &greedy(&prompt, 12)).tokens);
    assert_eq!(run(&mut engine, &greedy(&prompt, 12)).reused_tokens, 311);
    prompt[299] += 1;
    assert_eq!(run(&mut engine, &greedy(&prompt, 12)).reused_tokens, 0);
    assert_eq!(engine.prefix_counters().snapshots, 0);
}

#[test]
fn a_transfer_refused_while_a_state_is_brought_back_is_an_error_or_right_tokens() {
    let (conversation, other) = (tokens(1, 700, N_VOCAB), tokens(2, 650, N_VOCAB));
    // Soon behind the copy at 640 tokens: what a wrong state does fades.
    let longer = [&conversation[..660], &tokens(3, 8, N_VOCAB)].concat();
    let settings = deterministic(ROOMY);
    let request = Request { logprobs: Some(0), ..greedy(&longer, 6) };
    let expected = run(&mut engine(&MODEL, &deterministic(Bytes::ZERO)), &request);
    let is_right = |found: &Outcome| found.tokens == expected.tokens && found.logprobs == expected.logprobs;
    let (mut n_failed, mut n_resumed) = (0, 0);
    for refused in (0..24).chain((24..400).step_by(29)) {
        let device = device(&settings);
        let faults = device.share();
        let mut engine = Engine::start(device, Arc::clone(&MODEL), &settings, &mut |_, _| ()).expect("the engine starts");
        run(&mut engine, &greedy(&conversation, 2));
        run(&mut engine, &greedy(&other, 2));
        faults.faults().transfers_until_refused = Some(refused);
        match engine.generate(&request, &mut |_| ControlFlow::Continue(())) {
            Ok(outcome) => assert!(is_right(&outcome), "transfer {refused}"),
            Err(error) => {
                assert!(error.to_string().contains("injected fault"), "{error}");
                n_failed += 1;
            }
        }
        *faults.faults() = Faults::default();
        // Whatever is live, it has its state.
        if engine.phase() == ebbtide::phase::Phase::Decode {
            engine.window(&[1, 2], None).expect("a window");
            engine.accept(1).expect("accepted");
        }
        let outcome = run(&mut engine, &request);
        assert!(is_right(&outcome), "after transfer {refused} was refused");
        n_resumed += usize::from(outcome.reused_tokens > 0);
        assert!(engine.prefix_bytes() <= ROOMY);
    }
    assert!(n_failed > 12 && n_resumed > 12, "{n_failed} failed, {n_resumed} went on from a copy");
}

/// What the trained model writes after a part was reused is what it thinks best where it reads all of it anew. Windows round differently,
/// so the best token may be another one where two are nearly equal.
#[test]
fn without_determinism_the_trained_model_writes_what_it_would_have_written_anew() {
    let model = hybrid_bard();
    let settings = EngineSettings { expert_cache: ExpertCache::Slots(64), ..base(ROOMY) };
    let held = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/held.u16")).expect("bundled");
    let held: Vec<TokenId> = held.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair).into()).collect();
    let mut reusing = engine(&model, &settings);
    let mut fresh = engine(&model, &EngineSettings { prefix_cache: Bytes::ZERO, ..settings });
    let (mut best, mut written, mut reused) = (0, 0, 0);
    let mut conversations = [held[500..800].to_vec(), held[500..650].iter().chain(&held[9000..9200]).copied().collect()];
    for turn in 0..3 {
        for (name, prompt) in conversations.iter_mut().enumerate() {
            let outcome = run(&mut reusing, &greedy(prompt, 20));
            reused += outcome.reused_tokens;
            let text = [&prompt[..], &outcome.tokens].concat();
            let logits = all_logits(&mut fresh, &text[..text.len() - 1]);
            for (row, &token) in logits[prompt.len() - 1..].iter().zip(&outcome.tokens) {
                let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let short = most - row[token as usize];
                assert!(short < 0.1, "turn {turn} of {name}: {token} is {short} below the best");
                (best, written) = (best + usize::from(short == 0.0), written + 1);
            }
            *prompt = text;
            // The first goes on, the other parts from what it wrote.
            if name == 1 {
                let len = prompt.len() - 15;
                prompt.truncate(len);
            }
            prompt.extend(&held[20_000 + 300 * turn..20_050 + 300 * turn]);
        }
    }
    assert!(best * 100 >= written * 95, "{best} of {written} are the best");
    assert!(reused > 1000, "{reused}");
}
