//! Goal: every backend keeps the contract of the trait `Backend`. Method: one suite of claims, generic over the backend, which
//! `conformance_suite!` turns into tests of one device; a new backend adds one line. What only the simulated device promises (stale
//! addresses refused, worthless memory overwritten, injected faults) is tested at the end.

#[path = "common/device.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod device;

use std::sync::Arc;

use device::{Rig, bytes_of, part, start};
use ebbtide::backend::op::{KvFormat, Op};
use ebbtide::backend::{Addr, Backend, BackendError, Copy, DeviceMemory, Direction, HostRegion, PinnedMemory, Pool};
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::units::Bytes;

/// Makes each claim a test of the device that `$open` opens.
macro_rules! conformance_suite {
    ($name:ident, $open:path) => {
        conformance_suite!($name, $open, [
            a_capture_begun_twice_is_refused_and_the_first_goes_on,
            ending_a_capture_that_was_not_begun_is_refused_and_changes_nothing,
            memory_cannot_be_allocated_while_a_capture_records,
            an_event_cannot_be_recorded_or_waited_for_in_a_capture,
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
            seconds_between_events_are_refused_until_both_have_happened,
            free_memory_follows_allocations,
            an_allocation_larger_than_the_device_is_refused_with_its_numbers,
            live_ranges_are_aligned_apart_and_stay_where_they_are,
            pinned_memory_starts_zeroed_and_keeps_what_is_written,
            registered_memory_is_read_in_place,
            a_shape_that_no_kernel_takes_is_refused_and_nothing_is_queued,
        ]);
    };
    ($name:ident, $open:path, [$($claim:ident),+ $(,)?]) => {
        mod $name {
            $(#[test]
            fn $claim() {
                super::$claim(&super::Rig::new($open()));
            })+
        }
    };
}

fn open_host() -> HostBackend {
    HostBackend::open(&HostConfig::new(Bytes::mib(64), 2)).expect("the simulated device opens")
}

conformance_suite!(host, super::open_host);

fn out_of_order<T>(result: Result<T, BackendError>) -> bool {
    matches!(result, Err(BackendError::OutOfOrder { .. }))
}

/// A copy within the device.
fn on_device(dst: &impl DeviceMemory, src: &impl DeviceMemory) -> Copy {
    Copy { dst: start(dst), src: start(src), bytes: dst.range().bytes, direction: Direction::OnDevice }
}

fn a_capture_begun_twice_is_refused_and_the_first_goes_on<B: Backend>(rig: &Rig<B>) {
    let other = rig.backend.create_stream().expect("a stream");
    let target = rig.upload(&[1; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(out_of_order(rig.backend.begin_capture(&rig.stream)));
    assert!(out_of_order(rig.backend.begin_capture(&other)));
    rig.backend.fill(&rig.stream, target.range(), 7).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("the first capture is whole");
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(target.range()), [7; 64]);
}

fn ending_a_capture_that_was_not_begun_is_refused_and_changes_nothing<B: Backend>(rig: &Rig<B>) {
    let other = rig.backend.create_stream().expect("a stream");
    let target = rig.upload(&[1; 64]);
    assert!(out_of_order(rig.backend.end_capture(&rig.stream)));
    rig.backend.fill(&rig.stream, target.range(), 2).expect("runs, for nothing records");
    assert_eq!(rig.download(target.range()), [2; 64]);

    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(out_of_order(rig.backend.end_capture(&other)), "another stream's capture cannot be ended");
    rig.backend.fill(&rig.stream, target.range(), 3).expect("still recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("the capture is whole");
    assert_eq!(rig.download(target.range()), [2; 64]);
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(target.range()), [3; 64]);
}

fn memory_cannot_be_allocated_while_a_capture_records<B: Backend>(rig: &Rig<B>) {
    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(rig.backend.malloc(Bytes(4096), "a test").is_err());
    // Whether the capture survives is the device's affair; either way it is over.
    drop(rig.backend.end_capture(&rig.stream));
    assert!(out_of_order(rig.backend.end_capture(&rig.stream)));
    assert!(rig.backend.malloc(Bytes(4096), "a test").is_ok());
}

fn an_event_cannot_be_recorded_or_waited_for_in_a_capture<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    rig.backend.record(&rig.stream, &event).expect("no capture yet");
    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(out_of_order(rig.backend.record(&rig.stream, &event)));
    assert!(out_of_order(rig.backend.wait(&rig.stream, &event)));
    rig.backend.end_capture(&rig.stream).expect("the refused calls changed nothing");
    rig.backend.synchronise_event(&event).expect("the recording before the capture counts");
}

fn recorded_work_runs_when_replayed_and_not_before<B: Backend>(rig: &Rig<B>) {
    let (source, target) = (rig.upload(&[5; 256]), rig.upload(&[0; 256]));
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.copy(&rig.stream, on_device(&target, &source)).expect("recorded");
    rig.backend.fill(&rig.stream, part(&target, 0, 16), 6).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    assert_eq!(rig.download(target.range()), [0; 256], "recording runs nothing");
    for _ in 0..2 {
        rig.backend.fill(&rig.stream, target.range(), 0).expect("queued");
        rig.backend.replay(&rig.stream, &graph).expect("queued");
        let seen = rig.download(target.range());
        assert_eq!((&seen[..16], &seen[16..]), (&[6; 16][..], &[5; 240][..]), "both nodes ran, in order");
    }
}

fn another_stream_works_on_while_one_is_captured<B: Backend>(rig: &Rig<B>) {
    let other = rig.backend.create_stream().expect("a stream");
    let target = rig.upload(&[0; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.fill(&other, target.range(), 4).expect("queued");
    rig.backend.synchronise(&other).expect("done");
    drop(rig.backend.end_capture(&rig.stream).expect("an empty graph"));
    assert_eq!(rig.download(target.range()), [4; 64]);
}

fn each_replay_reads_the_contents_of_its_own_time<B: Backend>(rig: &Rig<B>) {
    let (n_ctx, head_dim) = (8_usize, 4_usize);
    let rows = rig.upload_f32(&[1.0, 2.0, 3.0, 4.0]);
    let cache = rig.upload_f32(&vec![0.0; n_ctx * head_dim]);
    let (positions, first_row) = (rig.upload_i32(&[0]), rig.upload_i32(&[1]));
    let store = Op::KvStore {
        rows: start(&rows),
        cache: start(&cache),
        format: KvFormat::F32,
        positions: start(&positions),
        first_row: start(&first_row),
        n_rows: 1,
        n_head_kv: 1,
        head_dim: 4,
        n_ctx: 8,
    };
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.launch(&rig.stream, &store).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    for (position, value) in [(5, 10.0_f32), (2, 20.0)] {
        rig.put(start(&positions), &i32::to_le_bytes(position));
        rig.put(start(&rows), &bytes_of(&[value; 4]));
        rig.backend.replay(&rig.stream, &graph).expect("queued");
        rig.backend.synchronise(&rig.stream).expect("done");
    }
    let mut expected = vec![0.0; n_ctx * head_dim];
    expected[24..28].fill(10.0);
    expected[12..16].fill(20.0);
    assert_eq!(rig.download_f32(&cache), expected);
}

fn a_graph_says_what_it_takes<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[0; 64]);
    let taken = [1, 40].map(|nodes| {
        rig.backend.begin_capture(&rig.stream).expect("idle");
        for _ in 0..nodes {
            rig.backend.fill(&rig.stream, target.range(), 1).expect("recorded");
        }
        let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
        rig.backend.graph_bytes(&graph)
    });
    let per_node = rig.backend.capabilities().graph_node_bytes;
    assert!(taken[0] <= taken[1] && taken[1] <= per_node * 40 + taken[0], "{taken:?} with {per_node} a node");
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

fn registered_memory_is_read_in_place<B: Backend>(rig: &Rig<B>) {
    let weight: Vec<f32> = (0..64_u8).map(f32::from).collect();
    let region: Arc<Vec<u8>> = Arc::new(bytes_of(&weight));
    let pageable = rig.backend.capabilities().reads_pageable_memory;
    let registered = match rig.backend.register(HostRegion::Pageable(Arc::clone(&region) as _)) {
        Ok(registered) => registered,
        Err(error) => {
            assert!(!pageable && matches!(error, BackendError::Unsupported { .. }), "{error}");
            return;
        }
    };
    assert!(pageable, "a device that reads pageable memory says so");
    assert_eq!(registered.range().bytes, Bytes(256));
    let target = rig.buffer(256);
    let copy = Copy { dst: start(&target), src: start(&registered), bytes: Bytes(256), direction: Direction::ToDevice };
    rig.backend.copy(&rig.stream, copy).expect("queued");
    assert_eq!(rig.download(target.range()), *region);

    // Rows of ones have a root mean square of one, so that the norm gives the weights themselves.
    let x = rig.upload_f32(&[1.0; 64]);
    let (n_rows, n_cols, eps) = (1, 64, 0.0);
    rig.run(&Op::RmsNorm { x: start(&x), weight: start(&registered), out: start(&target), n_rows, n_cols, eps }).expect("runs");
    assert_eq!(rig.download_f32(&target), weight);
}

fn a_shape_that_no_kernel_takes_is_refused_and_nothing_is_queued<B: Backend>(rig: &Rig<B>) {
    let x = rig.upload_f32(&[1.0; 64]);
    let op = Op::RmsNorm { x: start(&x), weight: start(&x), out: start(&x), n_rows: 1, n_cols: 0, eps: 0.0 };
    let refused = rig.backend.launch(&rig.stream, &op);
    assert!(matches!(refused, Err(BackendError::BadOperand { op: "rms_norm", .. })), "{refused:?}");
    rig.backend.synchronise(&rig.stream).expect("nothing was queued that could fail");
}

/// What the simulated device promises beyond the contract.
mod host_only {
    use super::*;

    fn rig() -> Rig<HostBackend> {
        Rig::new(open_host())
    }

    #[test]
    fn a_capture_that_fails_leaves_the_device_idle() {
        let rig = rig();
        rig.backend.begin_capture(&rig.stream).expect("idle");
        rig.backend.faults().captures_fail = true;
        assert!(matches!(rig.backend.end_capture(&rig.stream), Err(BackendError::CaptureFailed { .. })));
        rig.backend.faults().captures_fail = false;
        assert!(out_of_order(rig.backend.end_capture(&rig.stream)), "nothing records any more");
        rig.backend.begin_capture(&rig.stream).expect("idle again");
        rig.backend.end_capture(&rig.stream).expect("a graph");
    }

    #[test]
    fn a_graph_counts_as_used_memory_while_it_lives() {
        let rig = rig();
        let target = rig.upload(&[0; 64]);
        let used = rig.backend.used();
        rig.backend.begin_capture(&rig.stream).expect("idle");
        for _ in 0..3 {
            rig.backend.fill(&rig.stream, target.range(), 1).expect("recorded");
        }
        let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
        assert_eq!(rig.backend.graph_bytes(&graph), rig.backend.capabilities().graph_node_bytes * 3);
        assert_eq!(rig.backend.used(), used + rig.backend.graph_bytes(&graph));
        drop(graph);
        assert_eq!(rig.backend.used(), used);
    }

    #[test]
    fn a_graph_that_no_longer_fits_is_out_of_memory_and_leaves_the_device_idle() {
        let rig = rig();
        let target = rig.upload(&[0; 64]);
        rig.backend.begin_capture(&rig.stream).expect("idle");
        rig.backend.fill(&rig.stream, target.range(), 1).expect("recorded");
        rig.backend.faults().held_by_others = Bytes::mib(64);
        let error = rig.backend.end_capture(&rig.stream).err();
        assert!(matches!(error, Some(BackendError::OutOfMemory { free: Bytes::ZERO, .. })), "{error:?}");
        rig.backend.begin_capture(&rig.stream).expect("idle again");
    }

    #[test]
    fn discarded_memory_survives_no_computation() {
        let rig = rig();
        let x = rig.upload_f32(&[1.0; 64]);
        rig.backend.discard(&rig.stream, x.range()).expect("queued");
        assert!(rig.download_f32(&x).iter().all(|value| value.is_nan()));
        assert!(rig.download_i32(&x).iter().all(|index| *index < 0));
    }

    #[test]
    fn fresh_memory_is_as_worthless_as_discarded_memory() {
        let rig = rig();
        assert!(rig.download_f32(&rig.buffer(256)).iter().all(|value| value.is_nan()));
    }

    #[test]
    fn dropped_memory_is_refused_afterwards() {
        let rig = rig();
        let (target, weight) = (rig.upload(&[0; 256]), rig.upload_f32(&[1.0; 64]));
        let pinned = rig.pinned(&[0; 256]);
        let registered = rig.backend.register(HostRegion::Pageable(Arc::new(vec![0_u8; 256]))).expect("host memory");
        let stale = [rig.buffer(256).range(), pinned.range(), registered.range()];
        drop((pinned, registered));
        for range in stale {
            let from = Copy { dst: start(&target), src: range.start, bytes: Bytes(256), direction: Direction::OnDevice };
            let to = Copy { dst: range.start, src: start(&target), ..from };
            let refusals = [
                rig.backend.copy(&rig.stream, from),
                rig.backend.copy(&rig.stream, to),
                rig.backend.fill(&rig.stream, range, 0),
                rig.backend.discard(&rig.stream, range),
                rig.run(&Op::RmsNorm { x: range.start, weight: start(&weight), out: start(&target), n_rows: 1, n_cols: 64, eps: 0.0 }),
            ];
            for refused in refusals {
                assert!(matches!(refused, Err(BackendError::BadAddress { addr, .. }) if addr == range.start), "{refused:?}");
            }
        }
    }

    #[test]
    fn registered_memory_cannot_be_written() {
        let rig = rig();
        let registered = rig.backend.register(HostRegion::Pageable(Arc::new(vec![0_u8; 256]))).expect("host memory");
        let refused = rig.backend.fill(&rig.stream, registered.range(), 1);
        assert!(matches!(refused, Err(BackendError::Overlap { .. })), "{refused:?}");
    }

    #[test]
    fn memory_is_freed_after_the_queued_work_that_uses_it() {
        let rig = rig();
        let target = rig.upload(&[0; 64]);
        let source = rig.upload(&[6; 64]);
        rig.backend.copy(&rig.stream, on_device(&target, &source)).expect("queued");
        drop(source);
        assert_eq!(rig.download(target.range()), [6; 64]);
    }

    #[test]
    fn a_fault_met_while_memory_is_freed_is_reported_to_who_waits_for_the_work() {
        let rig = rig();
        let (x, poisoned) = (rig.upload_f32(&[1.0; 4]), rig.buffer(4));
        let event = rig.backend.create_event().expect("an event");
        let store = Op::KvStore {
            rows: start(&x),
            cache: start(&x),
            format: KvFormat::F32,
            positions: start(&poisoned),
            first_row: start(&poisoned),
            n_rows: 1,
            n_head_kv: 1,
            head_dim: 4,
            n_ctx: 1,
        };
        rig.backend.launch(&rig.stream, &store).expect("queued");
        rig.backend.record(&rig.stream, &event).expect("queued");
        drop(rig.buffer(64));
        let fault = rig.backend.synchronise(&rig.stream);
        assert!(matches!(fault, Err(BackendError::BadOperand { op: "kv_store", .. })), "{fault:?}");
        assert!(out_of_order(rig.backend.synchronise_event(&event)), "the event was lost with the work");
        assert!(out_of_order(rig.backend.is_done(&event)));
        rig.backend.synchronise(&rig.stream).expect("the fault was reported once");
    }

    #[test]
    #[should_panic(expected = "leave a buffer of 64 B")]
    fn a_pinned_read_beyond_its_buffer_panics_even_where_the_sum_overflows() {
        let rig = rig();
        rig.pinned(&[0; 64]).read(usize::MAX, &mut [0; 2]);
    }
}
