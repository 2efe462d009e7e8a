//! Goal: every backend keeps the contract of the trait `Backend`. Method: one suite of claims, generic over the backend, which
//! `conformance_suite!` turns into tests of one device; a new backend adds one line. `cuda` runs on the look-alike driver of
//! `tests/fake-gpu/`, or on a real card with EBBTIDE_REAL_GPU=1. What only the simulated device promises is tested in `host_only`.

#[path = "conformance/capture.rs"]
mod capture;
#[path = "common/device.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod device;
#[cfg(feature = "cuda")]
#[path = "common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;
#[path = "conformance/host_only.rs"]
mod host_only;

use std::sync::Arc;
use std::time::{Duration, Instant};

use capture::*;
use device::{Rig, bytes_of, part, start};
use ebbtide::backend::op::{KvFormat, Op};
use ebbtide::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction, HostRegion, PinnedMemory, Pool};
#[cfg(feature = "cuda")]
use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::gguf::{FileMap, GgufFile};
use ebbtide::units::Bytes;

/// Makes each claim a test of one device: `$run` opens it and hands it to the claim.
macro_rules! conformance_suite {
    ($name:ident, $run:path) => {
        conformance_suite!($name, $run, [
            a_capture_begun_twice_is_refused_and_the_first_goes_on,
            ending_a_capture_that_was_not_begun_is_refused_and_changes_nothing,
            memory_cannot_be_taken_while_a_capture_records,
            memory_dropped_while_a_capture_records_is_given_back_after_it,
            a_stream_that_is_captured_is_neither_waited_for_nor_given_a_graph,
            an_event_cannot_be_recorded_or_waited_for_in_a_capture,
            an_event_before_a_capture_is_asked_and_waited_for_while_it_records,
            recorded_work_runs_when_replayed_and_not_before,
            another_stream_works_on_while_one_is_captured,
            each_replay_reads_the_contents_of_its_own_time,
            a_graph_says_what_it_takes,
            copies_go_to_the_device_within_it_and_back,
            a_fill_writes_its_range_and_no_byte_beside,
            a_discard_leaves_what_lies_beside_its_range,
            work_of_a_stream_runs_in_order,
            a_stream_that_waits_for_an_event_sees_the_work_before_it,
            waiting_for_an_event_that_was_never_recorded_returns_at_once,
            an_event_recorded_again_still_holds_its_earlier_waiter,
            waiting_for_an_event_does_the_work_before_it,
            an_event_that_is_polled_happens,
            seconds_between_events_are_refused_until_both_have_happened,
            free_memory_follows_allocations,
            an_allocation_larger_than_the_device_is_refused_with_its_numbers,
            live_ranges_are_aligned_apart_and_stay_where_they_are,
            dropped_memory_is_refused_afterwards,
            memory_is_given_back_after_the_queued_work_that_uses_it,
            a_reserved_range_is_backed_taken_away_and_backed_again_at_its_addresses,
            memory_behind_reserved_addresses_goes_after_the_work_that_uses_it,
            a_range_is_backed_in_whole_units_inside_it_and_once,
            a_replay_reads_what_was_put_behind_its_addresses_anew,
            pinned_memory_starts_zeroed_and_keeps_what_is_written,
            pageable_memory_is_read_in_place_or_refused,
            a_registered_file_is_read_and_never_written,
            memory_that_is_no_file_map_is_read_all_the_same,
            a_shape_that_no_kernel_takes_is_refused_and_nothing_is_queued,
            a_replayed_operation_reads_the_positions_of_its_own_time,
            an_operation_reads_registered_memory,
        ]);
    };
    ($name:ident, $run:path, [$($claim:ident),+ $(,)?]) => {
        mod $name {
            $(#[test]
            fn $claim() {
                $run(concat!(stringify!($name), "::", stringify!($claim)), super::$claim);
            })+
        }
    };
}

fn open_host() -> HostBackend {
    HostBackend::open(&HostConfig::new(Bytes::mib(64), 2)).expect("the simulated device opens")
}

fn on_host(_name: &str, claim: fn(&Rig<HostBackend>)) {
    claim(&Rig::new(open_host()));
}

#[cfg(feature = "cuda")]
fn on_cuda(name: &str, claim: fn(&Rig<CudaBackend>)) {
    fake_gpu::on_either(name, || claim(&Rig::new(CudaBackend::open(&DeviceChoice::Best).expect("the device opens"))));
}

conformance_suite!(host, super::on_host);
#[cfg(feature = "cuda")]
conformance_suite!(cuda, super::on_cuda);

/// A model file, mapped as the engine maps it.
fn file_map() -> FileMap {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
    let file = GgufFile::open(path).expect("the bundled model is whole");
    file.file_map(0).expect("a model has a file").clone()
}

fn out_of_order<T>(result: Result<T, BackendError>) -> bool {
    matches!(result, Err(BackendError::OutOfOrder { .. }))
}

/// A copy within the device.
fn on_device(dst: &impl DeviceMemory, src: &impl DeviceMemory) -> Copy {
    Copy { dst: start(dst), src: start(src), bytes: dst.range().bytes, direction: Direction::OnDevice }
}

fn copies_go_to_the_device_within_it_and_back<B: Backend>(rig: &Rig<B>) {
    let data: Vec<u8> = (0..=255).cycle().take(5000).collect();
    let (source, target) = (rig.upload(&data), rig.buffer(5000));
    assert_eq!(rig.download(source.range()), data);
    let middle = Copy {
        dst: start(&target).offset(Bytes(100)),
        src: start(&source).offset(Bytes(300)),
        bytes: Bytes(1000),
        direction: Direction::OnDevice,
    };
    rig.backend.fill(&rig.stream, target.range(), 9).expect("queued");
    rig.backend.copy(&rig.stream, middle).expect("queued");
    let seen = rig.download(target.range());
    assert_eq!(seen[100..1100], data[300..1300]);
    assert!(seen[..100].iter().chain(&seen[1100..]).all(|&byte| byte == 9), "bytes beside the copy stay");
}

fn a_fill_writes_its_range_and_no_byte_beside<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[1; 300]);
    rig.backend.fill(&rig.stream, part(&target, 37, 101), 0xAB).expect("queued");
    let expected: Vec<u8> = (0..300).map(|at| if (37..138).contains(&at) { 0xAB } else { 1 }).collect();
    assert_eq!(rig.download(target.range()), expected);
}

fn a_discard_leaves_what_lies_beside_its_range<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[1; 300]);
    rig.backend.discard(&rig.stream, part(&target, 100, 100)).expect("queued");
    let seen = rig.download(target.range());
    assert!(seen[..100].iter().chain(&seen[200..]).all(|&byte| byte == 1));
}

fn work_of_a_stream_runs_in_order<B: Backend>(rig: &Rig<B>) {
    let (first, second) = (rig.buffer(128), rig.buffer(128));
    rig.backend.fill(&rig.stream, first.range(), 1).expect("queued");
    rig.backend.copy(&rig.stream, on_device(&second, &first)).expect("queued");
    rig.backend.fill(&rig.stream, first.range(), 2).expect("queued");
    assert_eq!(rig.download(second.range()), [1; 128]);
    assert_eq!(rig.download(first.range()), [2; 128]);
}

fn a_stream_that_waits_for_an_event_sees_the_work_before_it<B: Backend>(rig: &Rig<B>) {
    let reader = rig.backend.create_stream().expect("a stream");
    let event = rig.backend.create_event().expect("an event");
    let (source, target) = (rig.upload(&[0; 4096]), rig.upload(&[0; 4096]));
    rig.backend.fill(&rig.stream, source.range(), 3).expect("queued");
    rig.backend.record(&rig.stream, &event).expect("queued");
    rig.backend.wait(&reader, &event).expect("queued");
    rig.backend.copy(&reader, on_device(&target, &source)).expect("queued");
    rig.backend.synchronise(&reader).expect("done");
    assert_eq!(rig.download(target.range()), [3; 4096]);
}

fn waiting_for_an_event_that_was_never_recorded_returns_at_once<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    assert!(rig.backend.is_done(&event).expect("no work can fail"));
    rig.backend.synchronise_event(&event).expect("nothing to wait for");
    let target = rig.upload(&[0; 16]);
    rig.backend.wait(&rig.stream, &event).expect("nothing to wait for");
    rig.backend.fill(&rig.stream, target.range(), 1).expect("queued");
    assert_eq!(rig.download(target.range()), [1; 16]);
}

fn an_event_recorded_again_still_holds_its_earlier_waiter<B: Backend>(rig: &Rig<B>) {
    let reader = rig.backend.create_stream().expect("a stream");
    let event = rig.backend.create_event().expect("an event");
    let (source, target) = (rig.upload(&[0; 4096]), rig.upload(&[0; 4096]));
    rig.backend.fill(&rig.stream, source.range(), 8).expect("queued");
    rig.backend.record(&rig.stream, &event).expect("queued");
    rig.backend.wait(&reader, &event).expect("queued");
    rig.backend.copy(&reader, on_device(&target, &source)).expect("queued");
    rig.backend.record(&reader, &event).expect("the same event, now on the stream that waits");
    rig.backend.synchronise_event(&event).expect("done");
    assert_eq!(rig.download(target.range()), [8; 4096]);
}

fn waiting_for_an_event_does_the_work_before_it<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    let landing = rig.pinned(&[0; 64]);
    let source = rig.upload(&[5; 64]);
    let copy = Copy { dst: start(&landing), src: start(&source), bytes: Bytes(64), direction: Direction::ToHost };
    rig.backend.copy(&rig.stream, copy).expect("queued");
    rig.backend.record(&rig.stream, &event).expect("queued");
    rig.backend.synchronise_event(&event).expect("done");
    assert!(rig.backend.is_done(&event).expect("no fault"));
    let mut seen = [0; 64];
    landing.read(0, &mut seen);
    assert_eq!(seen, [5; 64]);
}

fn an_event_that_is_polled_happens<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    let target = rig.buffer(4096);
    rig.backend.fill(&rig.stream, target.range(), 1).expect("queued");
    rig.backend.record(&rig.stream, &event).expect("queued");
    let began = Instant::now();
    while !rig.backend.is_done(&event).expect("no fault") {
        assert!(began.elapsed() < Duration::from_secs(60), "nobody waits, and the work goes on all the same");
    }
}

fn seconds_between_events_are_refused_until_both_have_happened<B: Backend>(rig: &Rig<B>) {
    let [before, after] = [0, 1].map(|_| rig.backend.create_event().expect("an event"));
    let target = rig.buffer(1 << 20);
    assert!(out_of_order(rig.backend.elapsed_s(&before, &after)));
    rig.backend.record(&rig.stream, &before).expect("queued");
    rig.backend.synchronise_event(&before).expect("done");
    assert!(out_of_order(rig.backend.elapsed_s(&before, &after)));
    assert!(out_of_order(rig.backend.elapsed_s(&after, &before)));
    rig.backend.fill(&rig.stream, target.range(), 1).expect("queued");
    rig.backend.record(&rig.stream, &after).expect("queued");
    rig.backend.synchronise_event(&after).expect("done");
    let seconds = rig.backend.elapsed_s(&before, &after).expect("both have happened");
    assert!((0.0..60.0).contains(&seconds), "{seconds} s for a fill of one MiB");
    assert_eq!(rig.backend.elapsed_s(&after, &after), Ok(0.0));
}

fn free_memory_follows_allocations<B: Backend>(rig: &Rig<B>) {
    let before = rig.backend.memory_info().expect("a reading");
    let buffer = rig.buffer(16 << 20);
    let during = rig.backend.memory_info().expect("a reading");
    drop(buffer);
    let after = rig.backend.memory_info().expect("a reading");
    assert_eq!((before.total, during.total), (during.total, after.total));
    // A driver that does not say is a fact of the device, which `None` tells apart from a number.
    if let (Some(before), Some(during), Some(after)) = (before.free, during.free, after.free) {
        assert!(during + Bytes::mib(16) <= before, "{during} free of {before} with 16 MiB taken");
        assert!(after >= during + Bytes::mib(16), "{after} free of {before} after giving 16 MiB back");
    }
}

fn an_allocation_larger_than_the_device_is_refused_with_its_numbers<B: Backend>(rig: &Rig<B>) {
    let total = rig.backend.memory_info().expect("a reading").total;
    let wanted = total + Bytes(1);
    let Err(BackendError::OutOfMemory { pool, purpose, requested, free }) = rig.backend.malloc(wanted, "a claim too far") else {
        panic!("{wanted} of {total} were not refused as out of memory");
    };
    assert_eq!((pool, purpose.as_str(), requested), (Pool::Device, "a claim too far", wanted));
    assert!(free <= total, "{free} free of {total}");
    assert!(rig.backend.malloc(Bytes::mib(1), "what fits").is_ok(), "the refusal took nothing");
}

fn live_ranges_are_aligned_apart_and_stay_where_they_are<B: Backend>(rig: &Rig<B>) {
    let file: Arc<Vec<u8>> = Arc::new(vec![1; 10_000]);
    let registered = rig.backend.register(HostRegion::Pageable(file)).ok();
    let pinned: Vec<B::Pinned> = [1, 64, 5000].map(|bytes| rig.pinned(&vec![0; bytes])).into();
    let mut buffers: Vec<B::Buffer> = [1, 255, 256, 257, 100_000, 1 << 20].map(|bytes| rig.buffer(bytes)).into();
    // Holes among live allocations are what later ones might be put into wrongly.
    buffers.swap_remove(1);
    buffers.swap_remove(3);
    let kept: Vec<_> = buffers.iter().map(DeviceMemory::range).collect();
    buffers.extend([300, 90_000, 7].map(|bytes| rig.buffer(bytes)));
    assert!(buffers.iter().map(DeviceMemory::range).zip(&kept).all(|(now, then)| now == *then), "an address is constant");
    assert!(buffers.iter().all(|buffer| start(buffer).0.is_multiple_of(256)));
    assert!(pinned.iter().all(|memory| start(memory).0.is_multiple_of(64)));
    let ranges: Vec<_> = buffers
        .iter()
        .map(DeviceMemory::range)
        .chain(pinned.iter().map(DeviceMemory::range))
        .chain(registered.iter().map(DeviceMemory::range))
        .collect();
    for (index, range) in ranges.iter().enumerate() {
        assert!(range.start > Addr(0) && range.bytes > Bytes::ZERO);
        assert!(ranges[index + 1..].iter().all(|other| !range.overlaps(*other)), "{range:?} among {ranges:?}");
    }
}

fn dropped_memory_is_refused_afterwards<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[0; 256]);
    let pinned = rig.pinned(&[0; 256]);
    let registered = rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(file_map()))).expect("a mapped file");
    let stale = [rig.buffer(256).range(), pinned.range(), part(&registered, 0, 256)];
    drop((pinned, registered));
    for range in stale {
        let from = Copy { dst: start(&target), src: range.start, bytes: Bytes(256), direction: Direction::OnDevice };
        let to = Copy { dst: range.start, src: start(&target), ..from };
        let refusals = [
            rig.backend.copy(&rig.stream, from),
            rig.backend.copy(&rig.stream, to),
            rig.backend.fill(&rig.stream, range, 0),
            rig.backend.discard(&rig.stream, range),
        ];
        for refused in refusals {
            assert!(matches!(refused, Err(BackendError::BadAddress { addr, .. }) if addr == range.start), "{refused:?}");
        }
    }
}

fn memory_is_given_back_after_the_queued_work_that_uses_it<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[0; 192]);
    let (device, pinned) = (rig.upload(&[6; 64]), rig.pinned(&[7; 64]));
    let file = file_map();
    let registered = rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(file.clone()))).expect("a mapped file");
    for (at, src) in [(0, start(&device)), (64, start(&pinned)), (128, start(&registered))] {
        let dst = start(&target).offset(Bytes(at));
        rig.backend.copy(&rig.stream, Copy { dst, src, bytes: Bytes(64), direction: Direction::ToDevice }).expect("queued");
    }
    drop(registered);
    drop(pinned);
    drop(device);
    let seen = rig.download(target.range());
    assert_eq!((&seen[..64], &seen[64..128], &seen[128..]), (&[6; 64][..], &[7; 64][..], &file.as_slice()[..64]));
}

/// A reserved range of four units, where the device has such.
fn reserved<B: Backend>(rig: &Rig<B>) -> Option<(B::Reserved, Bytes)> {
    let unit = rig.backend.capabilities().backing_unit;
    match rig.backend.reserve(unit * 4) {
        Ok(reserved) => {
            assert!(rig.backend.capabilities().virtual_memory && reserved.range().bytes == unit * 4);
            Some((reserved, unit))
        }
        Err(error) => {
            assert!(!rig.backend.capabilities().virtual_memory && matches!(error, BackendError::Unsupported { .. }), "{error}");
            None
        }
    }
}

/// The last `units` units of a range.
fn end_of(reserved: &impl DeviceMemory, unit: Bytes, units: u64) -> AddrRange {
    let bytes = unit * units;
    AddrRange { start: Addr(reserved.range().end().0 - bytes.0), bytes }
}

fn a_reserved_range_is_backed_taken_away_and_backed_again_at_its_addresses<B: Backend>(rig: &Rig<B>) {
    let Some((reserved, unit)) = reserved(rig) else { return };
    let free = || rig.backend.memory_info().expect("a reading").free;
    let before = free();
    for units in [4, 1, 3] {
        let part = end_of(&reserved, unit, units);
        let refused = rig.backend.fill(&rig.stream, part, 1);
        assert!(matches!(refused, Err(BackendError::BadAddress { .. })), "nothing lies there: {refused:?}");
        let memory = rig.backend.back(&reserved, part, "a test").expect("memory");
        assert_eq!(memory.range(), part);
        let during = free();
        rig.put(part.start, &[7; 100]);
        assert_eq!(rig.download(AddrRange { bytes: Bytes(100), ..part }), [7; 100]);
        drop(memory);
        if let (Some(before), Some(during), Some(after)) = (before, during, free()) {
            assert!(during + part.bytes <= before, "{during} free of {before} with {} behind the range", part.bytes);
            assert!(after >= during + part.bytes, "{after} free of {before} once they are taken away");
        }
    }
    // A buffer goes on though the range itself is given up.
    let part = end_of(&reserved, unit, 2);
    let memory = rig.backend.back(&reserved, part, "a test").expect("memory");
    drop(reserved);
    rig.put(part.start, &[8; 100]);
    assert_eq!(rig.download(AddrRange { bytes: Bytes(100), ..memory.range() }), [8; 100]);
}

fn memory_behind_reserved_addresses_goes_after_the_work_that_uses_it<B: Backend>(rig: &Rig<B>) {
    let Some((reserved, unit)) = reserved(rig) else { return };
    let target = rig.upload(&[0; 64]);
    let memory = rig.backend.back(&reserved, end_of(&reserved, unit, 1), "a test").expect("memory");
    rig.put(start(&memory), &[6; 64]);
    let copy = Copy { dst: start(&target), src: start(&memory), bytes: Bytes(64), direction: Direction::OnDevice };
    rig.backend.copy(&rig.stream, copy).expect("queued");
    drop(memory);
    assert_eq!(rig.download(target.range()), [6; 64]);
}

fn a_range_is_backed_in_whole_units_inside_it_and_once<B: Backend>(rig: &Rig<B>) {
    let Some((reserved, unit)) = reserved(rig) else { return };
    let range = reserved.range();
    let part = |offset: u64, bytes: Bytes| AddrRange { start: Addr(range.start.0 + offset), bytes };
    let bad = [part(0, Bytes::ZERO), part(1, unit), part(0, Bytes(unit.0 - 1)), part(unit.0, unit * 4), part(unit.0 * 4, unit)];
    let before = AddrRange { start: Addr(range.start.0 - unit.0), bytes: unit * 2 };
    for part in bad.into_iter().chain([before]) {
        let refused = rig.backend.back(&reserved, part, "a test").err();
        assert!(matches!(refused, Some(BackendError::BadAddress { .. })), "{part:?}: {refused:?}");
    }
    let middle = rig.backend.back(&reserved, part(unit.0, unit * 2), "a test").expect("memory");
    for part in [middle.range(), range, part(0, unit * 2), part(unit.0 * 2, unit * 2)] {
        let refused = rig.backend.back(&reserved, part, "a test").err();
        assert!(matches!(refused, Some(BackendError::Overlap { .. })), "{part:?}: {refused:?}");
    }
    let beside = [part(0, unit), part(unit.0 * 3, unit)].map(|part| rig.backend.back(&reserved, part, "a test").expect("memory beside it"));
    rig.put(start(&middle), &[5; 64]);
    drop(beside);
    assert_eq!(rig.download(AddrRange { bytes: Bytes(64), ..middle.range() }), [5; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    let refused = rig.backend.back(&reserved, part(0, unit), "a test").err();
    assert!(matches!(refused, Some(BackendError::OutOfOrder { .. })), "{refused:?}");
    assert!(out_of_order(rig.backend.reserve(unit)));
    rig.backend.end_capture(&rig.stream).expect("neither call ruined the capture");
}

/// What the head of a slab that is made smaller rests on.
fn a_replay_reads_what_was_put_behind_its_addresses_anew<B: Backend>(rig: &Rig<B>) {
    let Some((reserved, unit)) = reserved(rig) else { return };
    if !rig.backend.capabilities().graph_capture {
        return;
    }
    let target = rig.upload(&[0; 64]);
    let memory = rig.backend.back(&reserved, reserved.range(), "a test").expect("memory");
    let source = AddrRange { start: end_of(&reserved, unit, 1).start, bytes: Bytes(64) };
    rig.put(source.start, &[1; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    let copy = Copy { dst: start(&target), src: source.start, bytes: Bytes(64), direction: Direction::OnDevice };
    rig.backend.copy(&rig.stream, copy).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    drop(memory);
    let _smaller = rig.backend.back(&reserved, end_of(&reserved, unit, 2), "a test").expect("memory");
    rig.put(source.start, &[2; 64]);
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(target.range()), [2; 64]);
}

fn pinned_memory_starts_zeroed_and_keeps_what_is_written<B: Backend>(rig: &Rig<B>) {
    let pinned = rig.backend.alloc_pinned(Bytes(1000), "a test").expect("pinned memory");
    let mut seen = [1; 1000];
    pinned.read(0, &mut seen);
    assert_eq!(seen, [0; 1000]);
    pinned.write(990, &[7; 10]);
    pinned.write(10, &[8; 5]);
    pinned.read(0, &mut seen);
    assert!(seen[990..].iter().all(|&byte| byte == 7) && seen[10..15].iter().all(|&byte| byte == 8));
    assert_eq!(seen.iter().map(|&byte| u32::from(byte)).sum::<u32>(), 7 * 10 + 8 * 5);
}

fn pageable_memory_is_read_in_place_or_refused<B: Backend>(rig: &Rig<B>) {
    let region: Arc<Vec<u8>> = Arc::new((0..=255).collect());
    let pageable = rig.backend.capabilities().reads_pageable_memory;
    match rig.backend.register(HostRegion::Pageable(Arc::clone(&region) as _)) {
        Ok(registered) => {
            assert!(pageable, "a device that reads pageable memory says so");
            assert_eq!(rig.read_registered(&registered, 0, 256), *region);
        }
        Err(error) => assert!(!pageable && matches!(error, BackendError::Unsupported { .. }), "{error}"),
    }
}

fn a_registered_file_is_read_and_never_written<B: Backend>(rig: &Rig<B>) {
    let map = file_map();
    let bytes = map.as_slice();
    let registered = rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(map.clone()))).expect("a mapped file");
    assert_eq!(registered.range().bytes, Bytes(map.bytes()));
    for (offset, length) in [(0, 100), (5001, 4099), (bytes.len() - 33, 33)] {
        assert_eq!(rig.read_registered(&registered, offset, length), bytes[offset..offset + length]);
    }
    let refused = rig.backend.fill(&rig.stream, part(&registered, 0, 16), 1);
    assert!(matches!(refused, Err(BackendError::Overlap { .. })), "{refused:?}");
    drop(registered);
    rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(map.clone()))).expect("given back, it can be registered again");
}

/// The bundled model is such memory: it is part of the program.
fn memory_that_is_no_file_map_is_read_all_the_same<B: Backend>(rig: &Rig<B>) {
    let region: Arc<Vec<u8>> = Arc::new((0..=255).cycle().take(9000).collect());
    let registered = rig.backend.register(HostRegion::ReadOnlyFile(Arc::clone(&region) as _)).expect("host memory");
    assert_eq!(registered.range().bytes, Bytes(9000));
    assert_eq!(rig.read_registered(&registered, 4000, 5000), region[4000..]);
}

fn an_operation_reads_registered_memory<B: Backend>(rig: &Rig<B>) {
    let map = file_map();
    let registered = rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(map.clone()))).expect("a mapped file");
    // Rows of ones have a root mean square of one, so that the norm gives the weights themselves, whatever they are.
    let (x, target) = (rig.upload_f32(&[1.0; 64]), rig.buffer(256));
    let (n_rows, n_cols, eps) = (1, 64, 0.0);
    rig.run(&Op::RmsNorm { x: start(&x), weight: start(&registered), out: start(&target), n_rows, n_cols, eps }).expect("runs");
    let weight: Vec<f32> = map.as_slice()[..256].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let same = rig.download_f32(&target).iter().zip(&weight).all(|(seen, weight)| seen.to_bits() == (1.0 * weight).to_bits());
    assert!(same, "the header of the file, taken for weights");
}

fn a_shape_that_no_kernel_takes_is_refused_and_nothing_is_queued<B: Backend>(rig: &Rig<B>) {
    let x = rig.upload_f32(&[1.0; 64]);
    let op = Op::RmsNorm { x: start(&x), weight: start(&x), out: start(&x), n_rows: 1, n_cols: 0, eps: 0.0 };
    let refused = rig.backend.launch(&rig.stream, &op);
    assert!(matches!(refused, Err(BackendError::BadOperand { op: "rms_norm", .. })), "{refused:?}");
    rig.backend.synchronise(&rig.stream).expect("nothing was queued that could fail");
}
