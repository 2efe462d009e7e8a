//! What the simulated device promises beyond the contract: stale operands refused, worthless memory overwritten, injected faults.

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
fn an_operation_on_dropped_memory_is_refused() {
    let rig = rig();
    let (target, weight) = (rig.upload(&[0; 256]), rig.upload_f32(&[1.0; 64]));
    let pinned = rig.pinned(&[0; 256]);
    let registered = rig.backend.register(HostRegion::Pageable(Arc::new(vec![0_u8; 256]))).expect("host memory");
    let stale = [rig.buffer(256).range(), pinned.range(), registered.range()];
    drop((pinned, registered));
    for range in stale {
        let refused =
            rig.run(&Op::RmsNorm { x: range.start, weight: start(&weight), out: start(&target), n_rows: 1, n_cols: 64, eps: 0.0 });
        assert!(matches!(refused, Err(BackendError::BadAddress { addr, .. }) if addr == range.start), "{refused:?}");
    }
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
