//! Goal: a window of several tokens is nothing but as many windows of one, whatever happens to its graphs and however many of its rows
//! are kept, and a file of hashes tells two runs apart exactly where they differ. Method: micro models on the host backend, compared bit
//! by bit with windows of one token; graph calls fail on demand.

#[path = "../common/mod.rs"]
mod common;
mod hybrid;
mod unreliable;

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{SharedFile, device, greedy, settings, synthetic_model, tokens};
use ebbtide::backend::{AddrRange, Backend, Copy, DeviceMemory, Direction, PinnedMemory};
use ebbtide::backends::host::{ClockProfile, HostBackend, HostConfig};
use ebbtide::engine::{Engine, EngineError, Event, Outcome, Request};
use ebbtide::model::Model;
use ebbtide::phase::plan::WINDOW_ROWS;
use ebbtide::settings::{AliasThreshold, ChunkSetting, EngineSettings, ExpertCache, KvType};
use ebbtide::units::{Bytes, TokenId};
use unreliable::{Call, Script, Unreliable};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";
const N_VOCAB: usize = 512;
/// Past the 64 positions that attention takes at a time.
const N_TOKENS: usize = 75;
const CTX_TOKENS: u32 = 96;

fn micro() -> Arc<Model> {
    synthetic_model(MICRO)
}

fn roomy(slots: u32) -> EngineSettings {
    EngineSettings { expert_cache: ExpertCache::Slots(slots), vram: Bytes::mib(64), ..settings(CTX_TOKENS) }
}

/// An engine whose device can be watched and made to fail.
struct Watched {
    engine: Engine<Unreliable>,
    device: Unreliable,
}

impl Watched {
    fn start(model: &Arc<Model>, settings: &EngineSettings, fails: &[Call]) -> Self {
        Self::start_on(device(settings), model, settings, fails)
    }

    /// As [`Watched::start`], in the time of an H200: windows of many rows cost little, so drafts pay, and runs repeat exactly.
    fn start_in_virtual_time(model: &Arc<Model>, settings: &EngineSettings, fails: &[Call]) -> Self {
        let config = HostConfig { clock: Some(ClockProfile::H200), ..HostConfig::new(settings.vram, settings.threads as usize) };
        Self::start_on(HostBackend::open(&config).expect("threads can be started"), model, settings, fails)
    }

    fn start_on(device: HostBackend, model: &Arc<Model>, settings: &EngineSettings, fails: &[Call]) -> Self {
        let device = Unreliable::new(device);
        device.script.fails.borrow_mut().extend(fails);
        let watched = device.share();
        Self { engine: Engine::start(device, Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts"), device: watched }
    }

    fn script(&self) -> &Script {
        &self.device.script
    }

    fn run(&mut self, request: &Request) -> Outcome {
        self.engine.generate(request, &mut |_| ControlFlow::Continue(())).expect("the request is answered")
    }

    /// Logits of one window, row by row.
    fn window(&mut self, tokens: &[TokenId]) -> Vec<Vec<f32>> {
        let mut logits = Vec::new();
        self.engine.window(tokens, Some(&mut logits)).expect("a window");
        assert_eq!(logits.len(), tokens.len() * N_VOCAB);
        logits.chunks(N_VOCAB).map(<[f32]>::to_vec).collect()
    }

    /// Overwrites the whole cache, so that rows which are not written show.
    fn spoil_cache(&self) {
        let stream = self.device.create_stream().expect("a stream");
        self.device.fill(&stream, self.cache(), 0xA5).expect("the cache is ours");
        self.device.synchronise(&stream).expect("filled");
    }

    fn cache(&self) -> AddrRange {
        self.script().range("KV cache")
    }

    fn cache_bytes(&self) -> Vec<u8> {
        self.device_bytes(self.cache())
    }

    /// The recurrent state of a hybrid model, once all that was accepted is in it. A window that nothing is accepted of waits for that.
    fn state_bytes(&mut self) -> Vec<u8> {
        self.engine.window(&[0], None).expect("a window");
        self.state_bytes_now()
    }

    /// As [`Watched::state_bytes`] where a window has just waited.
    fn state_bytes_now(&self) -> Vec<u8> {
        self.device_bytes(self.script().range("recurrent state"))
    }

    fn device_bytes(&self, range: AddrRange) -> Vec<u8> {
        let stream = self.device.create_stream().expect("a stream");
        let landing = self.device.alloc_pinned(range.bytes, "a test").expect("pinned memory");
        let copy = Copy { dst: landing.range().start, src: range.start, bytes: range.bytes, direction: Direction::ToHost };
        self.device.copy(&stream, copy).expect("a copy");
        self.device.synchronise(&stream).expect("copied");
        let mut bytes = vec![0; range.bytes.as_usize()];
        landing.read(0, &mut bytes);
        bytes
    }
}

fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}

fn best(logits: &[f32]) -> TokenId {
    let best = logits.iter().enumerate().max_by(|left, right| left.1.total_cmp(right.1).then(right.0.cmp(&left.0)));
    TokenId::try_from(best.expect("a vocabulary").0).expect("a token")
}

#[test]
fn every_row_of_a_window_has_the_logits_keys_and_values_of_a_window_of_one() {
    let text = tokens(1, N_TOKENS, 500);
    for quant in ["Q4_K --head-type Q6_K", "IQ3_XXS", "Q8_0", "F32"] {
        let model = synthetic_model(&format!("--shape micro --seed 4 --type {quant}"));
        for kv in [KvType::F16, KvType::Q8_0] {
            let mut alone = Watched::start(&model, &EngineSettings { kv, ..roomy(16) }, &[]);
            alone.spoil_cache();
            let mut expected = Vec::new();
            for token in &text {
                expected.extend(bits(&alone.window(&[*token])));
                alone.engine.accept(1).expect("accepted");
            }
            let expected_cache = alone.cache_bytes();
            for n_rows in 1..=WINDOW_ROWS as usize {
                let slots = [16, 1, 5][n_rows % 3];
                let case = format!("{quant}, {kv}, windows of {n_rows}, {slots} slots");
                let mut engine = Watched::start(&model, &EngineSettings { kv, ..roomy(slots) }, &[]);
                assert_eq!(engine.engine.window_rows(), WINDOW_ROWS as usize);
                engine.spoil_cache();
                let replays = engine.script().replays.get();
                let mut position = 0;
                for (number, window) in text.chunks(n_rows).enumerate() {
                    // Without a head a window must leave the same keys and values.
                    if number % 4 == 3 {
                        engine.engine.window(window, None).expect("a window");
                    } else {
                        let rows = bits(&engine.window(window));
                        assert!(rows == expected[position..position + window.len()], "{case}, from position {position} on");
                    }
                    engine.engine.accept(window.len()).expect("accepted");
                    position += window.len();
                }
                assert!(engine.cache_bytes() == expected_cache, "{case}: keys or values differ");
                assert!(engine.script().replays.get() >= replays + 2 * (N_TOKENS / n_rows * 3 / 4) as u64, "{case}: graphs are replayed");
            }
        }
    }
}

#[test]
fn rows_that_are_not_accepted_leave_no_trace() {
    let model = micro();
    let prompt = tokens(2, 20, 500);
    let mut plain = Watched::start(&model, &roomy(5), &[]);
    let expected = plain.run(&greedy(&prompt, 50)).tokens;
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]), "one token over and over proves little: {expected:?}");

    for seed in 0..6 {
        let mut engine = Watched::start(&model, &roomy(5), &[]);
        let choices = tokens(seed, 400, 1 << 20);
        let mut choices = choices.iter().map(|&choice| choice as usize);
        let mut choose = |below: usize| choices.next().expect("enough") % below;
        for part in prompt[..19].chunks(8) {
            engine.engine.window(part, None).expect("a window");
            engine.engine.accept(part.len()).expect("accepted");
        }
        // What is to be read next: the last prompt token, then the text itself, with drafts behind it that are mostly wrong.
        let all: Vec<TokenId> = prompt[19..].iter().chain(&expected).copied().collect();
        let (mut at, mut rejected) = (0, 0);
        while at + 1 < all.len() {
            let right = choose(WINDOW_ROWS as usize + 1).min(all.len() - 1 - at);
            let wrong = choose(WINDOW_ROWS as usize + 1 - right);
            if right + wrong == 0 {
                continue;
            }
            let window: Vec<TokenId> =
                all[at..at + right].iter().copied().chain((0..wrong).map(|_| TokenId::try_from(choose(500)).expect("a token"))).collect();
            let logits = engine.window(&window);
            for (row, logits) in logits[..right].iter().enumerate() {
                assert_eq!(best(logits), all[at + row + 1], "seed {seed}, token {}", at + row);
            }
            engine.engine.accept(right).expect("accepted");
            (at, rejected) = (at + right, rejected + wrong);
            assert_eq!(engine.engine.sequence_tokens()[19..], all[..at]);
        }
        assert!(rejected > 5, "seed {seed} rejected {rejected}");
    }
}

#[test]
fn a_graph_call_that_fails_costs_one_line_and_no_token() {
    let model = micro();
    let request = greedy(&tokens(3, 30, 500), 24);
    let settings = roomy(3);
    let mut plain = Watched::start(&model, &settings, &[]);
    let expected = plain.run(&request);
    let (captures, replays) = (plain.script().captures.get(), plain.script().replays.get());
    assert_eq!((captures, plain.engine.take_notices().len()), (2 * u64::from(WINDOW_ROWS), 0));
    assert!(replays >= 48, "{replays} replays");

    let waits = (0..replays / 2).map(Call::WaitForReplay);
    let failures = (0..captures).map(Call::Capture).chain((0..replays).step_by(5).map(Call::Replay)).chain(waits);
    for failure in failures {
        let mut engine = Watched::start(&model, &settings, &[failure]);
        let outcome = engine.run(&request);
        assert_eq!(outcome.tokens, expected.tokens, "{failure:?}");
        let notices = engine.engine.take_notices();
        assert_eq!(notices.len(), 1, "{failure:?}: {notices:?}");
        assert!(notices[0].contains("without") && notices[0].contains("injected at"), "{notices:?}");
        let done = engine.script().replays.get();
        match failure {
            // Windows of one are the first graph of the trunks and of the heads.
            Call::Capture(0 | 8) => assert_eq!(done, replays / 2, "{failure:?}: the other half is replayed"),
            Call::Capture(_) => assert_eq!(done, replays, "{failure:?}: windows of other sizes are replayed"),
            Call::Replay(number) => assert_eq!(done, number + 1, "{failure:?}: no graph after that"),
            Call::WaitForReplay(number) => assert_eq!(done, 2 * (number + 1), "{failure:?}: no graph after that"),
            Call::Launch(_) => unreachable!("not in the list"),
        }
        assert_eq!(engine.run(&request).tokens, expected.tokens, "{failure:?}, the next request");
        assert_eq!(engine.engine.take_notices().len(), 0, "{failure:?}: said once");
    }
}

#[test]
fn all_captures_failing_are_one_line() {
    let fails: Vec<Call> = (0..16).map(Call::Capture).collect();
    let mut engine = Watched::start(&micro(), &roomy(3), &fails);
    let notices = engine.engine.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("in 16 of 16 graphs"), "{notices:?}");
    engine.run(&greedy(&tokens(3, 30, 500), 8));
    assert_eq!((engine.script().replays.get(), engine.engine.take_notices().len()), (0, 0));
}

#[test]
fn an_error_that_single_operations_meet_too_is_not_blamed_on_the_graph() {
    let model = micro();
    let mut engine = Watched::start(&model, &roomy(3), &[]);
    let request = greedy(&tokens(3, 30, 500), 8);
    let expected = engine.run(&request).tokens;
    let (replays, launches) = (engine.script().replays.get(), engine.script().launches.get());
    // The second attempt of the first window fails, too.
    engine.script().fails.borrow_mut().extend([Call::Replay(replays)]);
    engine.script().fails.borrow_mut().extend((launches..launches + 4000).map(Call::Launch));
    let error = engine.engine.window(&[1], None).expect_err("neither works").to_string();
    assert!(error.contains(&format!("Replay({replays})")), "{error}");
    assert_eq!(engine.engine.take_notices().len(), 0);
    engine.script().fails.borrow_mut().clear();
    assert_eq!(engine.run(&request).tokens, expected);
    assert!(engine.script().replays.get() > replays + 1, "the graphs are in use again");
}

#[test]
fn windows_that_are_none_are_refused_and_change_nothing() {
    let mut engine = Watched::start(&micro(), &roomy(3), &[]);
    let text = tokens(5, 100, 500);
    let mut fed = 0;
    let refused = |engine: &mut Watched, tokens: &[TokenId]| match engine.engine.window(tokens, None) {
        Err(error @ (EngineError::BadWindow { .. } | EngineError::BadToken { .. })) => error.to_string(),
        other => panic!("{} tokens: {other:?}", tokens.len()),
    };
    assert!(refused(&mut engine, &[]).contains("a window of 0 tokens"));
    assert!(refused(&mut engine, &text[..9]).contains("a window of 9 tokens at position 0: at least 1 and at most 8"));
    assert!(refused(&mut engine, &[1, 512]).contains("token 512"));
    while fed + 8 <= CTX_TOKENS as usize {
        engine.engine.window(&text[fed..fed + 8], None).expect("room for it");
        let keep = 7 + fed % 2;
        engine.engine.accept(keep).expect("accepted");
        fed += keep;
    }
    let left = CTX_TOKENS as usize - fed;
    assert!(refused(&mut engine, &text[..left + 1]).contains(&format!("at position {fed}")));
    engine.engine.window(&text[..left], None).expect("the context is filled to its last row");
    assert_eq!(engine.engine.sequence_tokens().len(), fed);
}

#[test]
fn windows_have_as_many_rows_as_the_budget_is_worth_and_take_what_was_planned() {
    let model = micro();
    let mut seen = Vec::new();
    for kib in (2200..40_000).step_by(400) {
        let settings = EngineSettings { vram: Bytes(kib * 1024), expert_cache: ExpertCache::Auto, ..settings(CTX_TOKENS) };
        let Ok(mut engine) = std::panic::catch_unwind(|| Watched::start(&model, &settings, &[])) else { continue };
        let plan = engine.engine.plan().clone();
        assert_eq!(engine.device.inner.used(), plan.decode.total_bytes, "{kib} KiB");
        assert_eq!(engine.engine.window_rows(), plan.window_rows as usize);
        engine.run(&greedy(&tokens(3, 30, 500), 2));
        assert_eq!(engine.device.inner.peak(), plan.decode.total_bytes, "{kib} KiB");
        assert!(plan.to_string().contains(&format!("  windows up to {} token", plan.window_rows)), "{plan}");
        seen.push(plan.window_rows);
    }
    assert!(seen.is_sorted(), "more memory, never smaller windows: {seen:?}");
    assert!(seen.first() < Some(&4) && seen.last() == Some(&8), "{seen:?}");
}

/// The lines of a request; with `lose_head`, the head's reload is lost.
fn hashes(model: &Arc<Model>, settings: &EngineSettings, request: &Request, lose_head: bool) -> Vec<String> {
    let (device, out) = (device(settings), SharedFile::default());
    let watched = device.share();
    let mut engine = Engine::start(device, Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts");
    engine.hash_windows(Box::new(out.clone())).expect("memory takes it");
    let head = engine.head_range();
    let outcome = engine.generate(request, &mut |event| {
        if lose_head && matches!(event, Event::Reading { done, total } if done == total) {
            watched.faults().lose_copies_into = Some(head);
        }
        ControlFlow::Continue(())
    });
    // Logits of a lost head may be no numbers at all.
    assert!(lose_head || outcome.is_ok(), "{outcome:?}");
    drop(engine);
    out.text().lines().map(str::to_owned).collect()
}

#[test]
fn hashes_are_equal_at_any_loan_chunk_and_cache_and_differ_where_the_head_is_lost() {
    let model = micro();
    let request = greedy(&tokens(6, 60, 500), 12);
    let deterministic = |chunk, slots, head_alias| EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(chunk),
        head_alias,
        alias_min_tokens: AliasThreshold::Tokens(0),
        ..roomy(slots)
    };
    let expected = hashes(&model, &deterministic(64, 16, false), &request, false);
    assert_eq!(expected.len(), 1 + 12, "{expected:?}");
    for (number, line) in expected[1..].iter().enumerate() {
        let columns: Vec<&str> = line.split(' ').collect();
        assert_eq!(columns[..3], [number.to_string(), (59 + number).to_string(), "1".to_owned()], "{line}");
        assert!(columns.len() == 6 && columns[3].len() == 16 && columns[4].len() == 16, "{line}");
    }
    for (chunk, slots, head_alias) in [(7, 16, false), (32, 1, true), (7, 5, true), (64, 8, true)] {
        assert_eq!(hashes(&model, &deterministic(chunk, slots, head_alias), &request, false), expected, "{chunk}, {slots}, {head_alias}");
    }
    let lost = hashes(&model, &deterministic(32, 8, true), &request, true);
    let (ours, theirs): (Vec<&str>, Vec<&str>) =
        (expected[1].split(' ').collect(), lost.get(1).map_or(Vec::new(), |line| line.split(' ').collect()));
    assert_eq!(ours[..4], theirs[..4], "the layers of the first window are right");
    assert_ne!(ours[4], theirs[4], "its logits are not");
}

#[test]
fn a_sink_that_fails_ends_the_request_with_a_message() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _bytes: &[u8]) -> std::io::Result<usize> {
            Err(std::io::Error::from(std::io::ErrorKind::StorageFull))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut engine = Watched::start(&micro(), &roomy(3), &[]);
    let error = engine.engine.hash_windows(Box::new(Full)).expect_err("it takes nothing").to_string();
    assert!(error.contains("window hashes cannot be written"), "{error}");
}
