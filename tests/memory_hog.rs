//! Goal: a program that takes VRAM step by step beside us costs slots and nothing else, and they come back when it ends, whether or not
//! the device can keep addresses. Method: a simulated device whose free memory falls and rises between requests and in the middle of them.

mod common;

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{bard, engine, greedy, run, settings, tokens};
use ebbtide::backend::Backend;
use ebbtide::backends::host::{Faults, HostBackend, HostConfig};
use ebbtide::engine::{Engine, Outcome};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, HeadAliasMode};
use ebbtide::units::{Bytes, TokenId};

const TOKENS_WRITTEN: usize = 6;
const RESERVE: Bytes = Bytes::mib(1);
const STEP: Bytes = Bytes(150 << 10);

fn tight() -> EngineSettings {
    EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(48),
        block: BlockSetting::Chunk,
        vram: Bytes(6900 << 10),
        vram_reserve: Some(RESERVE),
        ..settings(1024)
    }
}

fn aliased(mode: HeadAliasMode) -> EngineSettings {
    EngineSettings { head_alias: true, head_alias_mode: mode, alias_min_tokens: AliasThreshold::Tokens(0), ..tight() }
}

fn prompt() -> Vec<TokenId> {
    tokens(3, 90, 4000)
}

/// An engine on a device that is watched from outside, and the text that it is to write.
struct Watched {
    engine: Engine<HostBackend>,
    device: HostBackend,
    expected: Vec<TokenId>,
}

impl Watched {
    fn start(model: &Arc<Model>, settings: &EngineSettings, virtual_memory: bool, prepare: impl FnOnce(&mut Faults)) -> Self {
        let roomy = EngineSettings { vram: Bytes::mib(64), ..tight() };
        let expected = run(&mut engine(model, &roomy), &greedy(&prompt(), TOKENS_WRITTEN)).tokens;
        let config = HostConfig { virtual_memory, ..HostConfig::new(settings.vram, settings.threads as usize) };
        let backend = HostBackend::open(&config).expect("the device opens");
        let device = backend.share();
        prepare(&mut device.faults());
        let engine = Engine::start(backend, Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts");
        Self { engine, device, expected }
    }

    /// A request in whose middle, at event `at`, the others hold `then`.
    fn run_while(&mut self, at: usize, then: Bytes) -> Outcome {
        let (device, events) = (self.device.share(), Cell::new(0));
        let outcome = self.engine.generate(&greedy(&prompt(), TOKENS_WRITTEN), &mut |_| {
            events.set(events.get() + 1);
            if events.get() == at {
                device.faults().held_by_others = then;
            }
            ControlFlow::Continue(())
        });
        let outcome = outcome.expect("a hog is no error");
        assert_eq!(outcome.tokens, self.expected);
        outcome
    }

    fn run(&mut self) -> Outcome {
        self.run_while(usize::MAX, Bytes::ZERO)
    }

    fn held(&self) -> Bytes {
        self.device.faults().held_by_others
    }

    fn others_hold(&self, bytes: Bytes) {
        self.device.faults().held_by_others = bytes;
    }

    fn free(&self) -> Bytes {
        self.device.memory_info().expect("the device lives").free.expect("it says so")
    }
}

#[test]
fn a_hog_that_grows_between_and_during_requests_costs_slots_which_come_back_when_it_shrinks() {
    let model = bard();
    let settings = [tight(), aliased(HeadAliasMode::Overlay), aliased(HeadAliasMode::Realloc)];
    for (settings, virtual_memory) in settings.iter().flat_map(|settings| [(settings, true), (settings, false)]) {
        let mut watched = Watched::start(&model, settings, virtual_memory, |_| ());
        let plan = watched.engine.plan().clone();
        let what = format!("{:?}, alias {}, virtual memory {virtual_memory}", settings.head_alias_mode, settings.head_alias);
        let mut slots = watched.run().slots;
        assert_eq!((slots, watched.engine.take_notices().len()), (plan.slots, 0), "{what}");
        watched.others_hold(watched.free() - RESERVE);
        let (mut gave, mut recaptures) = (0, 0);
        for step in 0..5 {
            let (before, during) = (watched.held() + STEP, watched.held() + STEP + STEP);
            watched.others_hold(before);
            let outcome = watched.run_while(2 + step % 5, during);
            assert!(outcome.slots <= slots, "{what}, step {step}: {} slots after {slots}", outcome.slots);
            let notices = watched.engine.take_notices();
            let told = notices.iter().filter(|line| line.contains("under the reserve")).count();
            assert_eq!(told, usize::from(outcome.slots < slots), "{what}, step {step}: told once: {notices:?}");
            assert!(watched.free() + STEP >= RESERVE, "{what}, step {step}: {} free", watched.free());
            (gave, slots, recaptures) = (gave + u32::from(outcome.slots < slots), outcome.slots, recaptures + outcome.recaptures);
        }
        assert!(gave >= 4 && slots < plan.slots - plan.slab.pieces * plan.slab.piece_slots, "{what}: more than all pieces: {slots}");

        while watched.held() > Bytes::ZERO {
            watched.others_hold(watched.held().saturating_sub(STEP * 3));
            for _ in 0..4 {
                let outcome = watched.run();
                assert!(outcome.slots >= slots && watched.free() >= RESERVE, "{what}: {} slots after {slots}", outcome.slots);
                (slots, recaptures) = (outcome.slots, recaptures + outcome.recaptures);
            }
        }
        for _ in 0..8 {
            let outcome = watched.run();
            (slots, recaptures) = (outcome.slots, recaptures + outcome.recaptures);
        }
        let notices = watched.engine.take_notices();
        match virtual_memory {
            true => {
                assert_eq!(slots, plan.slots, "{what}: {notices:#?}");
                assert_eq!(watched.device.used(), plan.decode.total_bytes, "{what}");
                assert!(notices.iter().any(|line| line.contains("slots again")), "{what}: {notices:#?}");
            }
            false => assert!(slots < plan.slots, "{what}: a slab that was made smaller stays so"),
        }
        if virtual_memory && settings.head_alias_mode == HeadAliasMode::Overlay {
            assert_eq!(recaptures, 0, "{what}: the head never moved");
        }
        // Nothing more happens, and no line says that it did.
        assert_eq!((watched.run().slots, watched.engine.take_notices()), (slots, Vec::new()), "{what}");
    }
}

#[test]
fn a_little_room_is_no_reason_to_make_a_slab_anew() {
    let mut watched = Watched::start(&bard(), &tight(), true, |_| ());
    let full = watched.engine.plan().clone();
    let third = full.slot_bytes * u64::from(full.slots / 3);
    watched.others_hold(watched.free() - RESERVE + third);
    let slots = watched.run().slots;
    assert!(slots < full.slots - full.slab.pieces * full.slab.piece_slots, "{slots} of {}", full.slots);
    watched.others_hold(watched.held() - full.slot_bytes);
    for _ in 0..6 {
        assert_eq!(watched.run().slots, slots, "one slot is no growth");
    }
    watched.others_hold(watched.held() - full.slot_bytes * 8);
    let grown: Vec<u32> = (0..4).map(|_| watched.run().slots).collect();
    assert!(grown[1] == slots && (slots + 6..=slots + 9).contains(&grown[3]), "a few looks are waited for: {slots}, then {grown:?}");
}

#[test]
fn a_driver_that_refuses_to_reserve_or_to_back_gives_a_plain_slab_and_a_line() {
    let model = bard();
    for settings in [tight(), aliased(HeadAliasMode::Overlay), aliased(HeadAliasMode::Realloc)] {
        let refusals: [fn(&mut Faults); 2] = [|faults| faults.reserves_fail = true, |faults| faults.backings_fail = true];
        for refuse in refusals {
            let mut watched = Watched::start(&model, &settings, true, refuse);
            let plan = watched.engine.plan().clone();
            let notices = watched.engine.take_notices();
            assert!(notices.len() == 1 && notices[0].contains("plain allocation"), "{notices:?}");
            assert_eq!(watched.run().slots, plan.slots);
            assert_eq!(watched.device.used(), plan.decode.total_bytes);
        }
    }
}

#[test]
fn a_refusal_while_the_slab_is_made_anew_costs_slots_or_the_head_s_place_and_no_token() {
    let model = bard();
    for settings in [tight(), aliased(HeadAliasMode::Overlay)] {
        // No memory for the first try: a smaller slab in the same place.
        let mut watched = Watched::start(&model, &settings, true, |_| ());
        let full = watched.engine.plan().clone();
        let third = full.slot_bytes * u64::from(full.slots / 3);
        let short = watched.free() - RESERVE + third;
        watched.device.faults().refused_purpose = Some(("expert slots and output head", 1));
        watched.others_hold(short);
        let outcome = watched.run();
        assert!(outcome.slots < full.slots - full.slots / 3 - 2, "{} of {}", outcome.slots, full.slots);
        assert_eq!((outcome.recaptures, watched.device.faults().refused_purpose), (0, Some(("expert slots and output head", 0))));

        // Addresses that cannot be backed any more: another place, graphs captured again, and no growth from then on.
        let mut watched = Watched::start(&model, &settings, true, |_| ());
        watched.device.faults().backings_fail = true;
        watched.others_hold(short);
        let outcome = watched.run();
        assert!(outcome.recaptures > 0 && outcome.slots < full.slots);
        watched.others_hold(Bytes::ZERO);
        (0..5).for_each(|_| assert!(watched.run().slots < full.slots));
    }
}
