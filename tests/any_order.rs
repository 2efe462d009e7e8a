//! Goal: whatever comes in whatever order, an answer is right or an error that was provoked, and everything lent comes home. Method: random
//! sequences of requests, cancellations and faults of the device on one engine, for both ways of lending the head and both refills; what
//! was reached is counted, and a run that did not reach all of it fails.

mod common;

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};

use common::engine::{device, engine, greedy, run, settings, synthetic_model, tokens};
use ebbtide::backends::host::{FreeReading, HostBackend};
use ebbtide::engine::{Engine, Outcome, Request, read_device_budget};
use ebbtide::model::Model;
use ebbtide::phase::{Phase, Plan};
use ebbtide::settings::{AliasThreshold, ChunkSetting, EngineSettings, HeadAliasMode, Refill};
use ebbtide::units::{Bytes, TokenId};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

const LENGTHS: [usize; 4] = [2, 30, 120, 300];
const RESERVE: Bytes = Bytes(600 << 10);
const CASES: u32 = 150;

/// A head as large as several slots, so that it matters where its bytes are.
static MODEL: LazyLock<Arc<Model>> =
    LazyLock::new(|| synthetic_model("--shape micro --seed 9 --experts 16 --vocab 4096 --type Q4_K --head-type Q6_K"));
static EXPECTED: LazyLock<Vec<Vec<TokenId>>> = LazyLock::new(|| {
    let roomy = EngineSettings { head_alias: false, vram: Bytes::mib(64), ..base() };
    LENGTHS.iter().map(|&length| run(&mut engine(&MODEL, &roomy), &request(length)).tokens).collect()
});

fn request(length: usize) -> Request {
    greedy(&tokens(length as u64, length, 4000), 4)
}

fn base() -> EngineSettings {
    EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(320),
        vram_reserve: Some(RESERVE),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(20),
        vram: Bytes::mib(64),
        threads: 1,
        ..settings(512)
    }
}

/// A device with room for 20 of 32 slots beside the reserve.
fn tight(mode: HeadAliasMode, refill: Refill) -> EngineSettings {
    let settings = EngineSettings { head_alias_mode: mode, refill, ..base() };
    let (budget, _) = read_device_budget(&device(&settings));
    let roomy = Plan::new(&MODEL.shape, &MODEL.weights, budget, &settings).expect("64 MiB are plenty");
    let others = |owner: &&str| !["expert slots", "prompt buffers"].contains(owner);
    let other: Bytes = roomy.decode.owners.iter().filter(|part| others(&part.owner)).map(|part| part.bytes).sum();
    EngineSettings { vram: other + roomy.slot_bytes * 20 + RESERVE, ..settings }
}

#[derive(Clone, Debug)]
enum Step {
    Ask(usize),
    Cancel(usize, usize),
    /// Others take this share of what is free, in percent.
    Take(u64),
    Release,
    FailMalloc(u64),
    RefuseTransfer(u64),
    FailCaptures(bool),
    Misread(FreeReading, u32),
    ReuseAddresses(bool),
    Stall(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let reading = prop_oneof![Just(FreeReading::Zero), Just(FreeReading::AboveTotal), Just(FreeReading::Unknown), Just(FreeReading::Fails)];
    prop_oneof![
        8 => (0..LENGTHS.len()).prop_map(Step::Ask),
        2 => (0..LENGTHS.len(), 0usize..8).prop_map(|(which, at)| Step::Cancel(which, at)),
        2 => (20u64..100).prop_map(Step::Take),
        2 => Just(Step::Release),
        2 => (0u64..4).prop_map(Step::FailMalloc),
        2 => (0u64..400).prop_map(Step::RefuseTransfer),
        1 => any::<bool>().prop_map(Step::FailCaptures),
        1 => (reading, 1u32..5).prop_map(|(reading, times)| Step::Misread(reading, times)),
        1 => any::<bool>().prop_map(Step::ReuseAddresses),
        1 => (1u32..200).prop_map(Step::Stall),
    ]
}

/// How often each thing happened.
#[derive(Default)]
struct Reached {
    reloads: Cell<u64>,
    recaptures: Cell<u64>,
    spills: Cell<u64>,
    in_head: Cell<u64>,
    slots_given_back: Cell<u64>,
    slots_taken_again: Cell<u64>,
    cancelled: Cell<u64>,
    errors: Cell<u64>,
    left_unrestored: Cell<u64>,
}

fn count(cell: &Cell<u64>, happened: bool) {
    cell.set(cell.get() + u64::from(happened));
}

struct Run<'a> {
    engine: Engine<HostBackend>,
    device: HostBackend,
    limit: Bytes,
    slots: u32,
    reached: &'a Reached,
}

impl Run<'_> {
    fn note(&mut self, outcome: &Outcome) {
        let reached = self.reached;
        count(&reached.reloads, outcome.phases.head_reloads > 0);
        count(&reached.recaptures, outcome.recaptures > 0);
        count(&reached.spills, outcome.spill_bytes > Bytes::ZERO);
        count(&reached.in_head, outcome.phases.arena_bytes_in_head > Bytes::ZERO);
        count(&reached.slots_given_back, outcome.slots < self.slots);
        count(&reached.slots_taken_again, outcome.slots > self.slots);
        self.slots = outcome.slots;
    }

    fn take(&mut self, step: &Step) {
        let faults = || self.device.faults();
        match *step {
            Step::Ask(which) => self.ask(which, usize::MAX),
            Step::Cancel(which, at) => self.ask(which, at),
            Step::Take(percent) => {
                let held = faults().held_by_others;
                let free = self.limit.0 - (self.device.used().0 + held.0).min(self.limit.0);
                faults().held_by_others = held + Bytes(free / 100 * percent);
            }
            Step::Release => faults().held_by_others = Bytes::ZERO,
            Step::FailMalloc(n) => faults().mallocs_until_failure = Some(n),
            Step::RefuseTransfer(n) => faults().transfers_until_refused = Some(n),
            Step::FailCaptures(fail) => faults().captures_fail = fail,
            Step::Misread(reading, times) => faults().free_reading = Some((reading, times)),
            Step::ReuseAddresses(reuse) => faults().reuse_addresses = reuse,
            Step::Stall(times) => faults().stalled_polls = times,
        }
    }

    fn ask(&mut self, which: usize, stop_at: usize) {
        let mut events = 0;
        let answer = self.engine.generate(&request(LENGTHS[which]), &mut |_| {
            events += 1;
            if events > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        match answer {
            Ok(outcome) => {
                let whole = events <= stop_at;
                assert!(if whole { outcome.tokens == EXPECTED[which] } else { EXPECTED[which].starts_with(&outcome.tokens) });
                assert_eq!(self.engine.phase(), Phase::Decode, "everything is home");
                count(&self.reached.cancelled, !whole);
                self.note(&outcome);
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("injected fault") || text.contains("VRAM"), "nobody provoked: {text}");
                count(&self.reached.errors, true);
                count(&self.reached.left_unrestored, self.engine.phase() == Phase::Restoring);
            }
        }
        assert!(self.device.used() <= self.limit);
    }
}

#[test]
fn any_order_of_requests_and_faults_gives_right_tokens_or_a_provoked_error() {
    let reached = Reached::default();
    let modes = prop_oneof![Just(HeadAliasMode::Overlay), Just(HeadAliasMode::Realloc)];
    let refills = prop_oneof![Just(Refill::Lazy), Just(Refill::Strict)];
    let cases = (modes, refills, prop::collection::vec(step(), 4..14));
    let mut runner = TestRunner::new(ProptestConfig { cases: CASES, ..ProptestConfig::default() });
    let ran = runner.run(&cases, |(mode, refill, steps)| {
        let settings = tight(mode, refill);
        let backend = device(&settings);
        let device = backend.share();
        let engine = Engine::start(backend, Arc::clone(&MODEL), &settings, &mut |_, _| ()).expect("starts");
        let slots = engine.plan().slots;
        let mut run = Run { engine, device, limit: settings.vram, slots, reached: &reached };
        for step in &steps {
            run.take(step);
        }
        *run.device.faults() = ebbtide::backends::host::Faults::default();
        for (which, expected) in EXPECTED.iter().enumerate() {
            let last =
                run.engine.generate(&request(LENGTHS[which]), &mut |_| ControlFlow::Continue(())).expect("nothing is wrong any more");
            prop_assert_eq!(&last.tokens, expected);
            run.note(&last);
        }
        let reserve = run.engine.plan().reserve_bytes;
        prop_assert!(run.device.used() + reserve <= settings.vram, "the reserve is free again");
        let Run { engine, device, .. } = run;
        drop(engine);
        prop_assert_eq!(device.used(), Bytes::ZERO);
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
    let Reached { reloads, recaptures, spills, in_head, slots_given_back, slots_taken_again, cancelled, errors, left_unrestored } = reached;
    let counts = [
        ("reloads", reloads),
        ("re-captures", recaptures),
        ("spills", spills),
        ("arenas in the head", in_head),
        ("slots given back", slots_given_back),
        ("slots taken again", slots_taken_again),
        ("cancelled", cancelled),
        ("errors", errors),
        ("left unrestored", left_unrestored),
    ];
    for (what, times) in counts {
        assert!(times.get() > 0, "{what} was never reached");
    }
}
