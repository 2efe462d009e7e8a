//! Goal: the reserve is kept whatever other programs and the driver do, and what cannot be kept is told with its numbers; no token depends
//! on it. Method: a simulated device whose free memory is taken away between requests, falls when memory is written, is misread, or is
//! refused although it is there.

mod common;

use std::sync::Arc;

use common::engine::{alternating_model, bard, device, engine, greedy, run, settings, tokens};
use ebbtide::backends::host::{FreeReading, HostBackend};
use ebbtide::engine::{Engine, EngineError, Outcome};
use ebbtide::model::Model;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings, ExpertCache, HeadAliasMode};
use ebbtide::units::{Bytes, TokenId};

const TOKENS_WRITTEN: usize = 8;
const RESERVE: Bytes = Bytes::mib(1);

/// Deterministic, on a device with a reserve of 1 MiB that holds about half of the model's 64 experts.
fn tight() -> EngineSettings {
    EngineSettings {
        deterministic: true,
        chunk: ChunkSetting::Tokens(48),
        // Longer blocks would need so many slots that none is left for pieces.
        block: BlockSetting::Chunk,
        vram: Bytes(6900 << 10),
        vram_reserve: Some(RESERVE),
        ..settings(1024)
    }
}

fn aliased(mode: HeadAliasMode) -> EngineSettings {
    EngineSettings { head_alias: true, head_alias_mode: mode, alias_min_tokens: AliasThreshold::Tokens(0), ..tight() }
}

fn ways() -> [EngineSettings; 3] {
    [tight(), aliased(HeadAliasMode::Overlay), aliased(HeadAliasMode::Realloc)]
}

fn prompt() -> Vec<TokenId> {
    tokens(3, 90, 4000)
}

fn expected(model: &Arc<Model>) -> Vec<TokenId> {
    let roomy = EngineSettings { vram: Bytes::mib(64), ..tight() };
    run(&mut engine(model, &roomy), &greedy(&prompt(), TOKENS_WRITTEN)).tokens
}

/// An engine on a device that is watched from outside.
struct Watched {
    engine: Engine<HostBackend>,
    device: HostBackend,
}

fn start(model: &Arc<Model>, settings: &EngineSettings, prepare: impl FnOnce(&HostBackend)) -> Result<Watched, EngineError> {
    let backend = device(settings);
    let device = backend.share();
    prepare(&device);
    Ok(Watched { engine: Engine::start(backend, Arc::clone(model), settings, &mut |_, _| ())?, device })
}

impl Watched {
    fn run(&mut self) -> Outcome {
        run(&mut self.engine, &greedy(&prompt(), TOKENS_WRITTEN))
    }

    /// What is free by the simulated driver's true word.
    fn free(&self) -> Bytes {
        use ebbtide::backend::Backend;
        self.device.memory_info().expect("the device lives").free.expect("it says so")
    }

    fn others_hold(&self, bytes: Bytes) {
        self.device.faults().held_by_others = bytes;
    }
}

/// The MiB numbers of a notice, as written.
fn only(notices: &[String]) -> &str {
    let [notice] = notices else { panic!("one line is told: {notices:#?}") };
    notice
}

#[test]
fn what_another_program_takes_is_made_up_for_with_slots_and_taken_again_when_it_ends() {
    let model = bard();
    let expected = expected(&model);
    for settings in ways() {
        let mut watched = start(&model, &settings, |_| ()).expect("starts");
        let plan = watched.engine.plan().clone();
        assert!(plan.slab.pieces >= 2, "{plan}");
        let piece = plan.slot_bytes * u64::from(plan.slab.piece_slots);
        let spare = watched.free() - RESERVE;
        let before = watched.run();
        assert_eq!((&before.tokens, before.slots), (&expected, plan.slots));

        let taken = spare + piece + Bytes(1);
        watched.others_hold(taken);
        let short = watched.run();
        assert_eq!((&short.tokens, short.slots), (&expected, plan.slots - 2 * plan.slab.piece_slots));
        assert!(watched.free() >= RESERVE && short.lowest_free.expect("told") >= RESERVE.min(watched.free()));
        let notices = watched.engine.take_notices();
        let wanted = format!(
            "free VRAM is {}, under the reserve of {RESERVE}: another program holds {taken} more than at start; gave {} slots back",
            spare + RESERVE - taken,
            2 * plan.slab.piece_slots
        );
        assert_eq!(only(&notices), wanted);
        assert_eq!((watched.run().tokens, watched.engine.take_notices().len()), (expected.clone(), 0), "nothing new to tell");

        // Room for all but a byte of a piece is not enough to take it again.
        watched.others_hold(spare + piece + Bytes(1));
        for _ in 0..4 {
            assert_eq!(watched.run().slots, short.slots, "no to and fro");
        }
        watched.others_hold(Bytes::ZERO);
        let slots: Vec<u32> =
            (0..9).map(|_| watched.run()).map(|outcome| (outcome.slots, assert_eq!(outcome.tokens, expected)).0).collect();
        assert_eq!(slots.last(), Some(&plan.slots), "{slots:?}");
        assert!(slots.is_sorted() && slots[0] == short.slots, "a look is waited for: {slots:?}");
        assert!(watched.free() >= RESERVE);
    }
}

#[test]
fn where_pieces_are_not_enough_the_slab_is_made_anew_and_where_nothing_is_that_is_told() {
    let model = bard();
    let expected = expected(&model);
    for settings in ways() {
        let mut watched = start(&model, &settings, |_| ()).expect("starts");
        let plan = watched.engine.plan().clone();
        watched.run();
        let third = plan.slot_bytes * u64::from(plan.slots / 3);
        assert!(third > plan.slot_table.total(plan.slab_sizes().main_first()) && third < RESERVE, "more than the pieces: {plan}");
        watched.others_hold(watched.free() - RESERVE + third);
        let outcome = watched.run();
        assert_eq!(outcome.tokens, expected);
        assert!((plan.slots - outcome.slots).abs_diff(plan.slots / 3) <= 2, "{} of {}", outcome.slots, plan.slots);
        assert!(watched.free() >= RESERVE, "{}", watched.free());
        let moves = settings.head_alias_mode == HeadAliasMode::Realloc;
        assert_eq!(outcome.recaptures >= 1, moves, "a head in the slab stays where it is");
        assert!(only(&watched.engine.take_notices()).ends_with(&format!("gave {} slots back", plan.slots - outcome.slots)));
        assert_eq!((watched.run().tokens, watched.engine.take_notices().len()), (expected.clone(), 0));

        // Again and again all that is left but for a few bytes, until no slots can be given for it.
        let mut slots = outcome.slots;
        let (mut short_for_good, mut told_short) = (0, false);
        for look in 0..12 {
            let held = watched.device.faults().held_by_others;
            watched.others_hold(held + watched.free() - Bytes(64));
            let outcome = watched.run();
            assert_eq!(outcome.tokens, expected, "look {look}");
            assert!(outcome.slots >= 1 && outcome.slots <= slots);
            let notices = watched.engine.take_notices();
            let gave = slots - outcome.slots;
            short_for_good += u32::from(gave == 0);
            match (gave, told_short) {
                (0, true) => assert_eq!(notices, Vec::<String>::new(), "told once"),
                (0, false) => assert!(only(&notices).ends_with("there are no slots to give back"), "{notices:?}"),
                _ => assert!(only(&notices).contains(&format!("gave {gave} slots back")), "{notices:?}"),
            }
            told_short = gave == 0 || only(&notices).ends_with("not enough");
            slots = outcome.slots;
        }
        assert!(short_for_good >= 2, "the end was reached");
    }
}

#[test]
fn a_driver_that_takes_memory_on_touch_leaves_the_reserve_all_the_same() {
    let model = bard();
    let expected = expected(&model);
    for settings in ways() {
        let planned = start(&model, &settings, |_| ()).expect("starts").engine.plan().slots;
        let mut watched = start(&model, &settings, |device| device.faults().touch_takes_percent = 6).expect("starts");
        assert!(watched.free() >= RESERVE, "{}", watched.free());
        let notices = watched.engine.take_notices();
        let slots = watched.engine.plan().slots;
        assert!(slots < planned && slots > planned / 2, "{slots} of {planned}");
        assert!(only(&notices).starts_with(&format!("{slots} slots instead of {planned}: once written")), "{notices:?}");
        let outcome = watched.run();
        assert_eq!((outcome.tokens, outcome.slots), (expected.clone(), slots));
        assert!(outcome.lowest_free.expect("told") + Bytes(64 << 10) >= RESERVE, "{:?}", outcome.lowest_free);
    }
}

#[test]
fn memory_that_is_refused_although_it_is_free_makes_a_smaller_cache_and_one_line() {
    let model = bard();
    let expected = expected(&model);
    for base in ways() {
        for expert_cache in [ExpertCache::Auto, ExpertCache::Slots(30)] {
            let settings = EngineSettings { expert_cache, ..base.clone() };
            let planned = start(&model, &settings, |_| ()).expect("starts").engine.plan().clone();
            // As much as the KV cache, which is no slots, but less than the slab.
            let most = planned.kv_bytes.max(Bytes(1300 << 10));
            let head = if settings.head_alias_mode == HeadAliasMode::Realloc { Bytes::ZERO } else { planned.head_bytes };
            let main = planned.slot_bytes * u64::from(planned.slab.main_slots(planned.slots)) + head;
            if main <= most {
                continue;
            }
            let mut watched = start(&model, &settings, |device| device.faults().mallocs_fail_above = Some(most)).expect("a smaller cache");
            let slots = watched.engine.plan().slots;
            assert!(slots < planned.slots, "{slots}");
            let notices = watched.engine.take_notices();
            let line = only(&notices);
            assert!(line.starts_with(&format!("{slots} slots instead of {}: VRAM: expert slots", planned.slots)), "{line}");
            assert!(line.contains(" free") && line.contains("page file"), "{line}");
            assert_eq!(watched.run().tokens, expected);
        }
    }
    // Where not even the smallest is given, that is an error which names the pool, and soon.
    let error = start(&model, &tight(), |device| device.faults().refused_purpose = Some(("expert slots and output head", u32::MAX)));
    let error = error.err().expect("nothing can be had").to_string();
    assert!(error.starts_with("VRAM: expert slots and output head needs"), "{error}");
}

#[test]
fn a_reading_that_cannot_be_changes_neither_cache_nor_tokens() {
    let model = bard();
    let expected = expected(&model);
    let normal = start(&model, &tight(), |_| ()).expect("starts").engine.plan().slots;
    for reading in [FreeReading::Zero, FreeReading::AboveTotal, FreeReading::Fails, FreeReading::Unknown] {
        let mut watched = start(&model, &tight(), |device| device.faults().free_reading = Some((reading, 1))).expect("starts");
        assert_eq!((watched.engine.plan().slots, watched.engine.take_notices().len()), (normal, 0), "{reading:?} once");
        watched.device.faults().free_reading = Some((reading, 1000));
        for request in 0..3 {
            let outcome = watched.run();
            assert_eq!((outcome.tokens, outcome.slots), (expected.clone(), normal), "{reading:?}, request {request}");
            assert_eq!(watched.engine.take_notices().len(), usize::from(request == 0), "{reading:?} is told once");
        }
    }
}

#[test]
fn page_locked_memory_that_is_refused_is_told_by_its_own_name_and_nothing_stays_taken() {
    let model = bard();
    let expected = expected(&model);
    for n in 0.. {
        let backend = device(&tight());
        let watching = backend.share();
        watching.faults().pinned_until_failure = Some(n);
        let started = Engine::start(backend, Arc::clone(&model), &tight(), &mut |_, _| ());
        if watching.faults().pinned_until_failure.is_some() {
            assert!(n >= 3 && started.is_ok());
            break;
        }
        let error = started.err().expect("a start needs all of it").to_string();
        assert!(error.contains("pinned host memory") && !error.contains("VRAM"), "{error}");
        assert_eq!(watching.used(), Bytes::ZERO);
    }
    for settings in ways() {
        let mut watched = start(&model, &settings, |_| ()).expect("starts");
        watched.device.faults().pinned_until_failure = Some(0);
        let request = greedy(&prompt(), TOKENS_WRITTEN);
        if let Err(error) = watched.engine.generate(&request, &mut |_| std::ops::ControlFlow::Continue(())) {
            assert!(error.to_string().contains("pinned host memory"), "{error}");
        }
        watched.device.faults().pinned_until_failure = None;
        assert_eq!(watched.run().tokens, expected, "what was lent is home");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn more_than_the_machine_has_is_not_pinned_and_the_clamp_is_told() {
    let model = bard();
    let settings = EngineSettings { pin: Some(Bytes::mib(ebbtide::settings::MEMORY_MIB_MAX)), ..tight() };
    let mut watched = start(&model, &settings, |_| ()).expect("starts");
    let notices = watched.engine.take_notices();
    let line = only(&notices);
    assert!(line.starts_with("pinned host memory: at most ") && line.contains("--pin-mib allows 16777216.0 MiB"), "{line}");
    assert!(line.contains("of RAM available less"), "{line}");
    assert_eq!(watched.run().tokens, expected(&model));
}

#[test]
fn pieces_of_slots_of_several_sizes_are_given_back_and_taken_again_to_the_byte() {
    let model = alternating_model("--shape tiny --seed 9 --vocab 4096 --type Q4_K --used 3 --skew 1.0", "Q4_K", "Q8_0");
    let expected = expected(&model);
    for settings in ways() {
        let roomy = EngineSettings { vram: Bytes::mib(64), ..settings.clone() };
        let resident = engine(&model, &roomy).plan().resident_bytes();
        let settings = EngineSettings { vram: resident + model.weights.slot_bytes() * 15 + RESERVE, ..settings };
        let mut watched = start(&model, &settings, |_| ()).expect("starts");
        let plan = watched.engine.plan().clone();
        let sizes = plan.slab_sizes();
        let pieces: Vec<Bytes> = (0..sizes.pieces).map(|piece| sizes.piece_bytes(piece)).collect();
        assert!(pieces.len() >= 2 && pieces.iter().any(|&bytes| bytes != pieces[0]), "{pieces:?} in {plan}");
        assert_eq!(watched.run().tokens, expected);
        assert_eq!(watched.device.used(), plan.decode.total_bytes, "{plan}");

        // A byte too much is taken at a time, and each time one piece goes for it, the last first.
        let mut used = plan.decode.total_bytes;
        for (at, &piece) in pieces.iter().enumerate().rev() {
            let held = watched.device.faults().held_by_others;
            watched.others_hold(held + watched.free() - RESERVE + Bytes(1));
            let outcome = watched.run();
            used = used - piece;
            assert_eq!((&outcome.tokens, watched.device.used()), (&expected, used), "without piece {at}");
            assert_eq!(watched.engine.experts().cache().n_resident(), outcome.slots as usize, "the other slots stay filled");
            assert!(only(&watched.engine.take_notices()).ends_with(&format!("gave {} slots back", sizes.piece_slots)));
        }
        // Room for the first piece, to the byte.
        let held = watched.device.faults().held_by_others;
        let room_for_first = held + watched.free() - RESERVE - pieces[0];
        for (held, wanted) in
            [(room_for_first + Bytes(1), used), (room_for_first, used + pieces[0]), (Bytes::ZERO, plan.decode.total_bytes)]
        {
            watched.others_hold(held);
            (0..3 * pieces.len()).for_each(|_| assert_eq!(watched.run().tokens, expected));
            assert_eq!(watched.device.used(), wanted, "with {held} held by others");
        }
        watched.engine.take_notices();

        // More than all pieces: the slab is made anew with fewer slots of each class.
        let gone = plan.slot_table.total(sizes.main_first()) + Bytes(1);
        watched.others_hold(watched.free() - RESERVE + gone);
        let outcome = watched.run();
        let smaller = watched.engine.plan();
        assert_eq!((&outcome.tokens, outcome.slots), (&expected, smaller.slots));
        assert!(smaller.decode.total_bytes + gone <= plan.decode.total_bytes && smaller.slots < plan.slots, "{smaller}");
        assert_eq!(watched.device.used(), smaller.decode.total_bytes, "{smaller}");
        assert!(watched.free() >= RESERVE);
        assert!(smaller.slot_table.classes(smaller.slots).all(|(_, slots)| slots > 0), "{smaller}");
    }
}
