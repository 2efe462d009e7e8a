//! Goal: memory behind reserved addresses fails in the contract's words and leaves nothing behind, and an engine on a card gives slots to a
//! program beside it and takes them again. Method: the look-alike driver of `tests/fake-gpu/`; the other program is a second handle of the
//! device.

mod common;
#[path = "common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;

use common::engine::{bard, greedy, run, settings, tokens};
use ebbtide::backend::{Backend, BackendError, Capabilities, DeviceMemory, Pool};
use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
use ebbtide::engine::Engine;
use ebbtide::settings::{AliasThreshold, BlockSetting, ChunkSetting, EngineSettings};
use ebbtide::units::Bytes;
use fake_gpu::on_the_look_alike;

const UNIT: Bytes = Bytes::mib(2);

fn open() -> CudaBackend {
    CudaBackend::open(&DeviceChoice::Best).expect("the device opens")
}

fn free(backend: &CudaBackend) -> Bytes {
    backend.memory_info().expect("a reading").free.expect("the driver says")
}

/// What the first try to back a range answers; the second works, and nothing is left of the first.
fn refused_once(backend: &CudaBackend) -> BackendError {
    let reserved = backend.reserve(UNIT * 3).expect("addresses");
    let before = free(backend);
    let error = backend.back(&reserved, reserved.range(), "slots").err().expect("the first is refused");
    assert_eq!(free(backend), before, "{error}");
    let memory = backend.back(&reserved, reserved.range(), "slots").expect("the second is not");
    assert_eq!(free(backend), before - UNIT * 3);
    drop(memory);
    assert_eq!((free(backend), backend.failed_frees()), (before, 0));
    error
}

#[test]
fn a_handle_that_is_refused_is_out_of_memory() {
    on_the_look_alike("a_handle_that_is_refused_is_out_of_memory", &[("FAKE_GPU_CREATE_FAILS_AT", "1")], || {
        let (backend, purpose) = (open(), "slots".to_owned());
        let free = free(&backend);
        assert_eq!(refused_once(&backend), BackendError::OutOfMemory { pool: Pool::Device, purpose, requested: UNIT * 3, free });
        let reserved = backend.reserve(Bytes::mib(300)).expect("addresses cost nothing");
        let error = backend.back(&reserved, reserved.range(), "slots").err();
        assert!(matches!(error, Some(BackendError::OutOfMemory { requested, .. }) if requested == Bytes::mib(300)), "{error:?}");
    });
}

#[test]
fn a_mapping_that_is_refused_is_quoted_and_its_memory_given_back() {
    on_the_look_alike("a_mapping_that_is_refused_is_quoted_and_its_memory_given_back", &[("FAKE_GPU_MAP_FAILS_AT", "1")], || {
        let answer = "CUDA_ERROR_UNKNOWN (999): unknown error".to_owned();
        assert_eq!(refused_once(&open()), BackendError::Driver { call: "cuMemMap", answer });
    });
}

#[test]
fn a_device_without_virtual_memory_says_so() {
    on_the_look_alike("a_device_without_virtual_memory_says_so", &[("FAKE_GPU_VIRTUAL_MEMORY", "0")], || {
        let backend = open();
        assert_eq!((backend.capabilities().virtual_memory, backend.capabilities().backing_unit), (false, Bytes(1)));
        assert!(matches!(backend.reserve(UNIT).err(), Some(BackendError::Unsupported { backend: "cuda", .. })));
    });
}

const RESERVE: Bytes = Bytes::mib(16);

/// An engine that lends its head for every prompt, in a part of the device.
fn start(virtual_memory: bool) -> (Engine<CudaBackend>, CudaBackend) {
    let (device, beside) = (open(), open());
    assert_eq!(device.capabilities().virtual_memory, virtual_memory);
    let Capabilities { context_bytes, context_growth_bytes, .. } = *device.capabilities();
    // Memory behind reserved addresses comes and goes in units of 2 MiB, and what is left must hold a prompt all the same.
    let vram = Bytes::mib(if virtual_memory { 26 } else { 25 });
    let settings = EngineSettings {
        vram: vram + context_bytes + context_growth_bytes,
        vram_reserve: Some(RESERVE),
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        deterministic: true,
        chunk: ChunkSetting::Tokens(48),
        block: BlockSetting::Chunk,
        ..settings(1024)
    };
    let engine = Engine::start(device, bard(), &settings, &mut |_, _| ()).expect("the engine starts");
    (engine, beside)
}

/// Slots before a hog, with it and after it, of an engine that writes the same throughout, and graphs captured again.
fn beside_a_hog(virtual_memory: bool) -> ([u32; 3], u64) {
    let (mut engine, beside) = start(virtual_memory);
    engine.take_notices();
    // The look-alike takes a second for a prompt, however short.
    let request = greedy(&tokens(3, 4, 4000), 1);
    let first = run(&mut engine, &request);
    let taken = free(&beside) - RESERVE + Bytes(1500 << 10);
    let hog = beside.malloc(taken, "another program").expect("there is room");
    let short = run(&mut engine, &request);
    let notices = engine.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("under the reserve of 16.0 MiB"), "{notices:?}");
    assert!(free(&beside) >= RESERVE, "{}", free(&beside));
    drop(hog);
    // At the third look in a row with room slots are taken again.
    let after: Vec<_> = (0..3).map(|_| run(&mut engine, &request)).collect();
    let last = after.last().expect("there were some");
    assert!(after.iter().chain([&short]).all(|outcome| outcome.tokens == first.tokens), "no token depends on it");
    assert!(first.phases.head_reloads > 0, "the head was lent");
    let recaptures = after.iter().chain([&short]).map(|outcome| outcome.recaptures).sum();
    ([first.slots, short.slots, last.slots], recaptures)
}

#[test]
fn a_hog_costs_slots_which_come_back_with_the_head_in_place() {
    on_the_look_alike("a_hog_costs_slots_which_come_back_with_the_head_in_place", &[], || {
        let ([before, short, after], recaptures) = beside_a_hog(true);
        assert!(short < before && after == before, "{before}, {short}, {after}");
        assert_eq!(recaptures, 0);
    });
}

#[test]
fn without_virtual_memory_slots_of_the_slab_stay_away() {
    on_the_look_alike("without_virtual_memory_slots_of_the_slab_stay_away", &[("FAKE_GPU_VIRTUAL_MEMORY", "0")], || {
        let ([before, short, after], recaptures) = beside_a_hog(false);
        assert!(short < before && after < before && recaptures > 0, "{before}, {short}, {after}: {recaptures} captured again");
    });
}

#[test]
fn a_driver_that_reserves_nothing_gives_a_plain_slab() {
    on_the_look_alike("a_driver_that_reserves_nothing_gives_a_plain_slab", &[("FAKE_GPU_RESERVE_FAILS", "1")], || {
        let (mut engine, _) = start(true);
        let notices = engine.take_notices();
        assert!(notices.iter().any(|line| line.contains("plain allocation")), "{notices:?}");
        run(&mut engine, &greedy(&tokens(3, 4, 4000), 1));
    });
}
