//! Goal: injected faults, deferred execution and virtual time behave as documented. Method: small schedules through the trait, with
//! round profiles, so that times are compared exactly.

use std::sync::Arc;

use super::*;
use crate::backend::op::{ExpertAddrs, ExpertShape, KvFormat, PromptExpert, expert_scratch_bytes};
use crate::backend::{Addr, Direction};
use crate::backends::host::POISON;
use crate::quant::{ActivationFormat, QuantType};

const MIB: u64 = 1 << 20;

/// One second an instruction: a copy of 16 MiB takes 1 s over the link, a fill of 64 MiB 1 s, and latencies are powers of two.
const ROUND: ClockProfile = ClockProfile {
    name: "round",
    linear_flop_per_s: 1e30,
    attention_flop_per_s: 1e30,
    unpacked_weights_per_s: (16 << 20) as f64,
    device_bytes_per_s: (64 * MIB) as f64,
    link_bytes_per_s: (16 * MIB) as f64,
    copy_latency_s: 0.25,
    launch_latency_s: 0.125,
    shortest_operation_s: 0.0,
};

struct Device {
    backend: HostBackend,
    stream: HostStream,
}

fn device(clock: Option<ClockProfile>) -> Device {
    let backend = HostBackend::open(&HostConfig { clock, ..HostConfig::new(Bytes::mib(256), 1) }).expect("it opens");
    let stream = backend.create_stream().expect("a stream");
    Device { backend, stream }
}

impl Device {
    fn buffer(&self, bytes: u64) -> HostMemory {
        self.backend.malloc(Bytes(bytes), "a test").expect("device memory")
    }

    fn floats(&self, values: &[f32]) -> HostMemory {
        let buffer = self.buffer(4 * values.len() as u64);
        buffer.write(0, &values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
        buffer
    }

    fn norm(&self, x: &HostMemory, out: &HostMemory) -> Result<()> {
        let (x, out) = (x.range(), out.range());
        let half = Bytes(x.bytes.0 / 2);
        let n_cols = u32::try_from(half.0 / 4).expect("small");
        self.backend
            .launch(&self.stream, &Op::RmsNorm { x: x.start, weight: x.start.offset(half), out: out.start, n_rows: 1, n_cols, eps: 0.0 })
    }

    fn event_on(&self, stream: &HostStream) -> HostEvent {
        let event = self.backend.create_event().expect("an event");
        self.backend.record(stream, &event).expect("queued");
        event
    }
}

fn copy(dst: &HostMemory, src: &HostMemory, direction: Direction) -> Copy {
    let (dst, src) = (dst.range(), src.range());
    Copy { dst: dst.start, src: src.start, bytes: dst.bytes.min(src.bytes), direction }
}

fn contents(memory: &HostMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.range().bytes.as_usize()];
    memory.read(0, &mut bytes);
    bytes
}

#[test]
fn work_runs_only_when_somebody_waits_so_that_a_forgotten_wait_shows() {
    let device = device(None);
    let other = device.backend.create_stream().expect("a stream");
    let (source, early, late) = (device.buffer(64), device.buffer(64), device.buffer(64));
    device.backend.fill(&device.stream, source.range(), 5).expect("queued");
    assert_eq!(contents(&source), [POISON; 64], "nothing has run yet");
    device.backend.copy(&other, copy(&early, &source, Direction::OnDevice)).expect("queued");
    device.backend.synchronise(&other).expect("done");
    assert_eq!(contents(&early), [POISON; 64], "the stream that did not wait copied what was there");
    device.backend.wait(&other, &device.event_on(&device.stream)).expect("queued");
    device.backend.copy(&other, copy(&late, &source, Direction::OnDevice)).expect("queued");
    device.backend.synchronise(&other).expect("done");
    assert_eq!(contents(&late), [5; 64]);
}

#[test]
fn a_wait_runs_no_more_of_the_other_stream_than_it_needs() {
    let device = device(None);
    let other = device.backend.create_stream().expect("a stream");
    let target = device.buffer(64);
    device.backend.fill(&device.stream, target.range(), 1).expect("queued");
    let event = device.event_on(&device.stream);
    device.backend.fill(&device.stream, target.range(), 2).expect("queued");
    device.backend.wait(&other, &event).expect("queued");
    device.backend.synchronise(&other).expect("done");
    assert_eq!(contents(&target), [1; 64]);
}

#[test]
fn the_allocation_that_is_to_fail_fails_and_the_next_succeeds() {
    let device = device(None);
    device.backend.faults().mallocs_until_failure = Some(2);
    let outcomes: Vec<bool> = (0..4).map(|_| device.backend.malloc(Bytes(64), "a test").is_ok()).collect();
    assert_eq!(outcomes, [true, true, false, true]);
}

#[test]
fn a_wrong_reading_of_free_memory_lasts_as_long_as_asked_and_moves_no_allocation() {
    let device = device(None);
    let total = Bytes::mib(256);
    let readings =
        [(FreeReading::Zero, Some(Bytes::ZERO)), (FreeReading::AboveTotal, Some(total + Bytes(1))), (FreeReading::Unknown, None)];
    for (reading, expected) in readings {
        device.backend.faults().free_reading = Some((reading, 2));
        let seen: Vec<_> = (0..3).map(|_| device.backend.memory_info().map(|info| info.free)).collect();
        assert_eq!(seen, [Ok(expected), Ok(expected), Ok(Some(total))], "{reading:?}");
    }
    device.backend.faults().free_reading = Some((FreeReading::Fails, 1));
    assert!(matches!(device.backend.memory_info(), Err(BackendError::Unsupported { .. })));
    assert!(device.backend.memory_info().is_ok());
    device.backend.faults().free_reading = Some((FreeReading::Zero, 1));
    assert!(device.backend.malloc(total, "all there is").is_ok());
}

#[test]
fn memory_held_by_others_is_missing_from_readings_and_allocations() {
    let device = device(None);
    device.backend.faults().held_by_others = Bytes::mib(200);
    assert_eq!(device.backend.memory_info().map(|info| info.free), Ok(Some(Bytes::mib(56))));
    let refused = device.backend.malloc(Bytes::mib(57), "too much").err();
    let (pool, purpose) = (Pool::Device, "too much".to_owned());
    assert_eq!(refused, Some(BackendError::OutOfMemory { pool, purpose, requested: Bytes::mib(57), free: Bytes::mib(56) }));
    device.backend.faults().held_by_others = Bytes::mib(300);
    assert_eq!(device.backend.memory_info().map(|info| info.free), Ok(Some(Bytes::ZERO)));
}

#[test]
fn copies_into_a_broken_range_are_lost_without_a_word_and_others_are_not() {
    let device = device(None);
    let (source, broken, whole) = (device.floats(&[1.0; 16]), device.buffer(64), device.buffer(64));
    device.backend.faults().lose_copies_into = Some(AddrRange { start: broken.range().start.offset(Bytes(60)), bytes: Bytes(4) });
    for target in [&broken, &whole] {
        device.backend.copy(&device.stream, copy(target, &source, Direction::OnDevice)).expect("queued");
    }
    device.backend.synchronise(&device.stream).expect("no word");
    assert_eq!(contents(&broken), [POISON; 64]);
    assert_eq!(contents(&whole), contents(&source));
}

#[test]
fn a_stalled_event_is_not_done_for_as_many_polls_as_asked() {
    let device = device(None);
    let event = device.event_on(&device.stream);
    device.backend.faults().stalled_polls = 2;
    let polls: Vec<_> = (0..3).map(|_| device.backend.is_done(&event)).collect();
    assert_eq!(polls, [Ok(false), Ok(false), Ok(true)]);
    device.backend.faults().stalled_polls = 1;
    assert_eq!(device.backend.is_done(&event), Ok(true), "what is done cannot stall");
}

#[test]
fn a_lost_device_refuses_everything_from_then_on() {
    let device = device(None);
    let (x, out) = (device.floats(&[1.0; 8]), device.buffer(16));
    device.backend.faults().launches_until_lost = Some(1);
    device.norm(&x, &out).expect("queued");
    device.norm(&x, &out).expect("queued: the fault strikes when it runs");
    let lost = BackendError::DeviceLost { reason: "injected fault at rms_norm".to_owned() };
    assert_eq!(device.backend.synchronise(&device.stream), Err(lost.clone()));
    let event = device.backend.create_event().expect("no device work");
    let refused = [
        device.backend.synchronise(&device.stream),
        device.norm(&x, &out),
        device.backend.fill(&device.stream, out.range(), 0),
        device.backend.copy(&device.stream, copy(&out, &x, Direction::OnDevice)),
        device.backend.record(&device.stream, &event),
        device.backend.begin_capture(&device.stream),
        device.backend.memory_info().map(drop),
        device.backend.malloc(Bytes(1), "a test").map(drop),
    ];
    assert!(refused.iter().all(|outcome| *outcome == Err(lost.clone())), "{refused:?}");
}

#[test]
fn page_locking_stops_at_its_limit_and_pageable_memory_does_not_count() {
    let device = device(None);
    let file = |bytes: usize| HostRegion::ReadOnlyFile(Arc::new(vec![0_u8; bytes]));
    device.backend.faults().register_limit = Some(Bytes(100));
    let _kept = device.backend.register(file(60)).expect("60 of 100");
    let refused = device.backend.register(file(41)).err();
    assert!(
        matches!(refused, Some(BackendError::OutOfMemory { pool: Pool::PinnedHost, requested: Bytes(41), free: Bytes(40), .. })),
        "{refused:?}"
    );
    assert!(device.backend.register(HostRegion::Pageable(Arc::new(vec![0_u8; 1000]))).is_ok());
    assert!(device.backend.register(file(40)).is_ok());
}

#[test]
fn a_chosen_instruction_set_is_capped_by_what_the_processor_has() {
    let config = HostConfig { simd: Some(SimdLevel::Avx512), ..HostConfig::new(Bytes::mib(1), 1) };
    let backend = HostBackend::open(&config).expect("it opens");
    assert!(backend.capabilities().device.ends_with(&format!("{:?}", SimdLevel::detect())), "{}", backend.capabilities().device);
}

#[test]
fn a_copy_on_one_stream_overlaps_work_on_another() {
    let device = device(Some(ROUND));
    let copies = device.backend.create_stream().expect("a stream");
    let (pinned, slot, work) =
        (device.backend.alloc_pinned(Bytes::mib(16), "a test").expect("pinned"), device.buffer(16 * MIB), device.buffer(64 * MIB));
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued");
    device.backend.synchronise(&device.stream).expect("done");
    device.backend.synchronise(&copies).expect("done");
    assert_eq!(device.backend.stream_time_s(&device.stream), 0.125 + 1.0);
    assert_eq!(device.backend.stream_time_s(&copies), 0.25 + 1.0, "not after the fill, beside it");
}

#[test]
fn waiting_for_an_event_adds_up_and_elapsed_time_is_virtual() {
    let device = device(Some(ROUND));
    let copies = device.backend.create_stream().expect("a stream");
    let (pinned, slot, work) =
        (device.backend.alloc_pinned(Bytes::mib(16), "a test").expect("pinned"), device.buffer(16 * MIB), device.buffer(64 * MIB));
    let begin = device.event_on(&device.stream);
    device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued");
    let arrived = device.event_on(&copies);
    device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued behind what is waited for");
    device.backend.wait(&device.stream, &arrived).expect("queued");
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    let end = device.event_on(&device.stream);
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.elapsed_s(&begin, &end), Ok(1.25 + 1.125));
    assert_eq!(device.backend.elapsed_s(&begin, &arrived), Ok(1.25));
    assert_eq!(device.backend.stream_time_s(&copies), 1.25, "the second copy was not waited for");
    device.backend.synchronise(&copies).expect("done");
    assert_eq!(device.backend.stream_time_s(&copies), 2.5);
    // A wait for what happened long ago costs nothing.
    device.backend.wait(&device.stream, &arrived).expect("queued");
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.stream_time_s(&device.stream), 2.375);
}

#[test]
fn a_copy_drained_late_does_not_wait_behind_one_that_starts_later() {
    let device = device(Some(ROUND));
    let copies = device.backend.create_stream().expect("a stream");
    let (pinned, slot, other, work) = (
        device.backend.alloc_pinned(Bytes::mib(8), "a test").expect("pinned"),
        device.buffer(8 * MIB),
        device.buffer(8 * MIB),
        device.buffer(64 * MIB),
    );
    device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued first");
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    device.backend.copy(&device.stream, copy(&other, &pinned, Direction::ToDevice)).expect("queued behind the fill");
    device.backend.synchronise(&device.stream).expect("drained first");
    assert_eq!(device.backend.stream_time_s(&device.stream), 1.125 + 0.75);
    device.backend.synchronise(&copies).expect("drained second");
    assert_eq!(device.backend.stream_time_s(&copies), 0.75, "in the gap under the fill");
    assert_eq!(device.backend.busy(), BusySeconds { to_device_s: 1.5, to_host_s: 0.0, operations_s: 1.125 });
}

#[test]
fn work_starts_no_earlier_than_the_host_asked_for_it() {
    let device = device(Some(ROUND));
    let copies = device.backend.create_stream().expect("a stream");
    let (pinned, slot, work) =
        (device.backend.alloc_pinned(Bytes::mib(16), "a test").expect("pinned"), device.buffer(16 * MIB), device.buffer(64 * MIB));
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    assert_eq!(device.backend.host_time_s(), 0.0, "queueing takes no time");
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.host_time_s(), 1.125);
    let asked = device.event_on(&copies);
    device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued");
    let arrived = device.event_on(&copies);
    device.backend.wait(&device.stream, &arrived).expect("queued");
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.stream_time_s(&copies), 1.125 + 1.25, "the stream was idle, but the host knew no earlier");
    assert_eq!(device.backend.elapsed_s(&asked, &arrived), Ok(1.25));
    assert_eq!(device.backend.host_time_s(), 2.375, "it waited for a stream that waited for the copy");
}

#[test]
fn a_poll_finds_done_what_is_over_at_the_hosts_time_and_books_nothing_far_ahead() {
    let device = device(Some(ROUND));
    let copies = device.backend.create_stream().expect("a stream");
    let (pinned, slot, work) =
        (device.backend.alloc_pinned(Bytes::mib(16), "a test").expect("pinned"), device.buffer(16 * MIB), device.buffer(64 * MIB));
    let arrivals = [0, 1, 2].map(|_| {
        device.backend.copy(&copies, copy(&slot, &pinned, Direction::ToDevice)).expect("queued");
        device.event_on(&copies)
    });
    let poll = || arrivals.each_ref().map(|event| device.backend.is_done(event).expect("no fault"));
    assert_eq!(poll(), [false; 3]);
    assert_eq!(device.backend.stream_time_s(&copies), 1.25, "the second copy has not begun");
    // What the host needs now comes before the copies that have not begun: 0.375 s of the link from 1.25 on.
    let (small, place) = (device.backend.alloc_pinned(Bytes::mib(2), "a test").expect("pinned"), device.buffer(2 * MIB));
    device.backend.copy(&device.stream, copy(&place, &small, Direction::ToDevice)).expect("queued");
    device.backend.synchronise(&device.stream).expect("done");
    let waited = device.backend.stream_time_s(&device.stream);
    assert_eq!(waited, 1.25 + 0.375);
    assert_eq!(poll(), [true, false, false]);
    assert_eq!(device.backend.stream_time_s(&copies), waited + 1.25);
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    device.backend.fill(&device.stream, work.range(), 0).expect("queued");
    device.backend.synchronise(&device.stream).expect("time passes");
    assert_eq!(poll(), [true, true, false]);
    device.backend.synchronise_event(&arrivals[2]).expect("done");
    assert_eq!(poll(), [true; 3]);
}

#[test]
fn polling_alone_passes_time() {
    let device = device(Some(ROUND));
    let buffer = device.buffer(64);
    device.backend.fill(&device.stream, buffer.range(), 0).expect("queued");
    let event = device.event_on(&device.stream);
    let polls = (0..10_000_000).take_while(|_| !device.backend.is_done(&event).expect("no fault")).count();
    assert!((polls as f64 * 0.1e-6 / 0.125 - 1.0).abs() < 0.01, "{polls} polls of 0.1 microseconds for 0.125 s");
}

#[test]
fn a_replayed_graph_takes_the_time_of_its_nodes() {
    let device = device(Some(ROUND));
    let work = device.buffer(64 * MIB);
    device.backend.begin_capture(&device.stream).expect("idle");
    device.backend.fill(&device.stream, work.range(), 0).expect("recorded");
    device.backend.fill(&device.stream, work.range(), 1).expect("recorded");
    let graph = device.backend.end_capture(&device.stream).expect("a graph");
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.stream_time_s(&device.stream), 0.0, "recording takes no time");
    device.backend.replay(&device.stream, &graph).expect("queued");
    device.backend.synchronise(&device.stream).expect("done");
    assert_eq!(device.backend.stream_time_s(&device.stream), 2.0 * 1.125);
}

#[test]
fn an_expert_read_in_place_takes_the_link_once_a_call_and_one_in_a_slot_does_not() {
    let device = device(Some(ROUND));
    let shape = ExpertShape {
        n_embd: 256,
        n_ff: 256,
        gate_type: QuantType::F32,
        up_type: QuantType::F32,
        down_type: QuantType::F32,
        input_format: ActivationFormat::F32,
        down_format: ActivationFormat::F32,
    };
    let part_bytes = 256 * 256 * 4;
    let zeros = vec![0_u8; 3 * part_bytes];
    let host = device.backend.register(HostRegion::Pageable(Arc::new(zeros.clone()))).expect("host memory");
    let slot = device.buffer(zeros.len() as u64);
    slot.write(0, &zeros);
    let (input, residual) = (device.floats(&[0.0; 3 * 256]), device.floats(&[0.0; 3 * 256]));
    let (ids, share) = (device.buffer(4), device.floats(&[1.0]));
    ids.write(0, &[0; 4]);
    let (table, scratch) = (device.buffer(24), device.buffer(expert_scratch_bytes(&shape, 1)));
    // 768 KiB at 16 MiB/s, then at 64 MiB/s.
    let (over_link, in_slot) = (0.046_875, 0.011_718_75);
    let timed = |op: &Op| {
        let start = device.event_on(&device.stream);
        device.backend.launch(&device.stream, op).expect("queued");
        let end = device.event_on(&device.stream);
        device.backend.synchronise(&device.stream).expect("done");
        device.backend.elapsed_s(&start, &end).expect("both have happened")
    };
    let addrs = |expert: &HostMemory| {
        let at = |part: usize| expert.range().start.offset(Bytes::from(part * part_bytes));
        ExpertAddrs { gate: at(0), up: at(1), down: at(2) }
    };
    let seconds = [&host, &slot].map(|expert| {
        table.write(0, &addrs(expert).to_bytes());
        let op = Op::ExpertsWindow {
            input: input.range().start,
            ids: ids.range().start,
            weights: share.range().start,
            table: table.range().start,
            residual: residual.range().start,
            n_rows: 1,
            n_expert: 1,
            n_used: 1,
            shape,
            scratch: scratch.range().start,
        };
        timed(&op)
    });
    assert_eq!(seconds, [over_link + 0.125, in_slot + 0.125]);
    let lists = device.buffer(24);
    lists.write(0, &[0_u32, 1, 2, 0, 0, 0].map(u32::to_le_bytes).concat());
    // Three rows of one expert, then a row of each of three that share their weights: once an expert, whatever its rows.
    let one = |expert: &HostMemory, first, count| PromptExpert { weights: addrs(expert), first, count };
    let unpacking = |experts: f64| experts * 3.0 * 65_536.0 / (16 << 20) as f64;
    for (experts, expected) in [
        (vec![one(&host, 0, 3)], over_link),
        (vec![one(&slot, 0, 3)], in_slot + unpacking(1.0)),
        (vec![one(&host, 0, 1), one(&host, 1, 1), one(&host, 2, 1)], 3.0 * over_link),
    ] {
        let n_experts = experts.len() as f64;
        let n_host = experts.iter().filter(|expert| expert.weights == addrs(&host)).count() as f64;
        let before = device.backend.busy();
        let op = Op::ExpertsPrompt {
            experts,
            input: input.range().start,
            n_input_rows: 3,
            rows: lists.range().start,
            row_weights: lists.range().start.offset(Bytes(12)),
            entries: lists.range().start,
            n_used: 1,
            residual: residual.range().start,
            shape,
            scratch: scratch.range().start,
            tile_rows: 1,
            unpacked: AddrRange::EMPTY,
        };
        assert_eq!(timed(&op), expected + 0.125, "{n_experts} experts");
        assert_eq!(device.backend.busy().to_device_s - before.to_device_s, n_host * over_link);
    }
}

#[test]
fn an_operation_on_poisoned_positions_is_an_error_and_drops_what_is_behind_it() {
    let device = device(None);
    let (rows, cache, positions) = (device.floats(&[1.0; 4]), device.floats(&[0.0; 4]), device.buffer(4));
    let first_row_at = cache.range().start;
    let [rows, cache_at, positions]: [Addr; 3] = [&rows, &cache, &positions].map(|memory| memory.range().start);
    let format = KvFormat::F32;
    let store =
        Op::KvStore { rows, cache: cache_at, format, positions, first_row: first_row_at, n_rows: 1, n_head_kv: 1, head_dim: 4, n_ctx: 1 };
    device.backend.launch(&device.stream, &store).expect("queued");
    device.backend.fill(&device.stream, cache.range(), 9).expect("queued behind it");
    assert!(matches!(device.backend.synchronise(&device.stream), Err(BackendError::BadOperand { op: "kv_store", .. })));
    device.backend.synchronise(&device.stream).expect("nothing is left");
    assert_eq!(contents(&cache), [0; 16]);
}

#[test]
fn a_dry_run_refuses_what_a_run_that_computes_refuses() {
    let config = HostConfig { dry: Some(DryRun::uniform(1)), ..HostConfig::new(Bytes::mib(256), 1) };
    let backend = HostBackend::open(&config).expect("it opens");
    let device = Device { stream: backend.create_stream().expect("a stream"), backend };
    let (x, out) = (device.buffer(32), device.buffer(16));
    device.norm(&x, &out).expect("queued");
    device.backend.synchronise(&device.stream).expect("sound");
    device.norm(&x, &device.buffer(8)).expect("queued, with an output too short that is gone when it runs");
    assert!(matches!(device.backend.synchronise(&device.stream), Err(BackendError::BadAddress { what: "rms_norm", .. })));
    device.norm(&x, &x).expect("queued");
    assert!(matches!(device.backend.synchronise(&device.stream), Err(BackendError::Overlap { what: "rms_norm", .. })));
    let refused = device.backend.malloc(Bytes::mib(256), "too much").err();
    assert!(matches!(refused, Some(BackendError::OutOfMemory { pool: Pool::Device, .. })), "{refused:?}");
    // Two rows at one position: what the host uploads is read and checked.
    let (rows, cache, positions) = (device.buffer(32), device.buffer(32), device.buffer(8));
    let [rows, cache, positions_at]: [Addr; 3] = [&rows, &cache, &positions].map(|memory| memory.range().start);
    let store = |n_rows| Op::KvStore {
        rows,
        cache,
        format: KvFormat::F32,
        positions: positions_at,
        first_row: positions_at,
        n_rows,
        n_head_kv: 1,
        head_dim: 4,
        n_ctx: 2,
    };
    device.backend.launch(&device.stream, &store(2)).expect("queued");
    assert!(matches!(device.backend.synchronise(&device.stream), Err(BackendError::BadOperand { op: "kv_store", .. })));
    let pinned = device.backend.alloc_pinned(Bytes(8), "positions").expect("pinned");
    pinned.write(0, &[0_i32, 1].map(i32::to_le_bytes).concat());
    device.backend.copy(&device.stream, copy(&positions, &pinned, Direction::ToDevice)).expect("queued");
    device.backend.launch(&device.stream, &store(2)).expect("queued");
    device.backend.synchronise(&device.stream).expect("0, 1 ascend inside a context of 2");
}
