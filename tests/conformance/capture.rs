//! Claims about captured graphs, which `conformance.rs` makes tests of every backend.

use super::*;

pub fn a_capture_begun_twice_is_refused_and_the_first_goes_on<B: Backend>(rig: &Rig<B>) {
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

pub fn ending_a_capture_that_was_not_begun_is_refused_and_changes_nothing<B: Backend>(rig: &Rig<B>) {
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

pub fn memory_cannot_be_taken_while_a_capture_records<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[0; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(out_of_order(rig.backend.malloc(Bytes(4096), "a test")));
    assert!(out_of_order(rig.backend.alloc_pinned(Bytes(4096), "a test")));
    assert!(out_of_order(rig.backend.register(HostRegion::ReadOnlyFile(Arc::new(file_map())))));
    rig.backend.fill(&rig.stream, target.range(), 3).expect("the refusals left the capture whole");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(target.range()), [3; 64]);
}

pub fn memory_dropped_while_a_capture_records_is_given_back_after_it<B: Backend>(rig: &Rig<B>) {
    let (target, dropped) = (rig.upload(&[0; 64]), rig.buffer(16 << 20));
    let pinned = rig.pinned(&[0; 64]);
    let before = rig.backend.memory_info().expect("a reading").free;
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.fill(&rig.stream, target.range(), 5).expect("recorded");
    drop((dropped, pinned));
    rig.backend.fill(&rig.stream, part(&target, 0, 8), 6).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("dropping memory does not end a capture");
    if let (Some(before), Some(after)) = (before, rig.backend.memory_info().expect("a reading").free) {
        assert!(after >= before + Bytes::mib(8), "{after} free after dropping 16 MiB at {before}");
    }
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    let seen = rig.download(target.range());
    assert_eq!((&seen[..8], &seen[8..]), (&[6; 8][..], &[5; 56][..]));
}

pub fn a_stream_that_is_captured_is_neither_waited_for_nor_given_a_graph<B: Backend>(rig: &Rig<B>) {
    let target = rig.upload(&[0; 64]);
    let capture = |byte| {
        rig.backend.begin_capture(&rig.stream).expect("idle");
        rig.backend.fill(&rig.stream, target.range(), byte).expect("recorded");
    };
    capture(1);
    let first = rig.backend.end_capture(&rig.stream).expect("a graph");
    capture(2);
    assert!(out_of_order(rig.backend.synchronise(&rig.stream)));
    assert!(out_of_order(rig.backend.replay(&rig.stream, &first)));
    let second = rig.backend.end_capture(&rig.stream).expect("the refusals left the capture whole");
    rig.backend.replay(&rig.stream, &second).expect("queued");
    assert_eq!(rig.download(target.range()), [2; 64]);
}

pub fn an_event_cannot_be_recorded_or_waited_for_in_a_capture<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    rig.backend.record(&rig.stream, &event).expect("no capture yet");
    rig.backend.begin_capture(&rig.stream).expect("idle");
    assert!(out_of_order(rig.backend.record(&rig.stream, &event)));
    assert!(out_of_order(rig.backend.wait(&rig.stream, &event)));
    rig.backend.end_capture(&rig.stream).expect("the refused calls changed nothing");
    rig.backend.synchronise_event(&event).expect("the recording before the capture counts");
}

pub fn an_event_before_a_capture_is_asked_and_waited_for_while_it_records<B: Backend>(rig: &Rig<B>) {
    let event = rig.backend.create_event().expect("an event");
    let target = rig.upload(&[0; 64]);
    rig.backend.fill(&rig.stream, target.range(), 1).expect("queued");
    rig.backend.record(&rig.stream, &event).expect("queued");
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.fill(&rig.stream, target.range(), 2).expect("recorded");
    rig.backend.is_done(&event).expect("no fault");
    rig.backend.synchronise_event(&event).expect("done");
    let graph = rig.backend.end_capture(&rig.stream).expect("waiting left the capture whole");
    assert_eq!(rig.download(target.range()), [1; 64]);
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(target.range()), [2; 64]);
}

pub fn recorded_work_runs_when_replayed_and_not_before<B: Backend>(rig: &Rig<B>) {
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

pub fn another_stream_works_on_while_one_is_captured<B: Backend>(rig: &Rig<B>) {
    let other = rig.backend.create_stream().expect("a stream");
    let target = rig.upload(&[0; 64]);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.fill(&other, target.range(), 4).expect("queued");
    rig.backend.synchronise(&other).expect("done");
    drop(rig.backend.end_capture(&rig.stream).expect("an empty graph"));
    assert_eq!(rig.download(target.range()), [4; 64]);
}

pub fn each_replay_reads_the_contents_of_its_own_time<B: Backend>(rig: &Rig<B>) {
    let (source, target) = (rig.upload(&[0; 64]), rig.upload(&[0; 64]));
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.copy(&rig.stream, on_device(&target, &source)).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    for value in [10, 20] {
        rig.put(start(&source), &[value; 64]);
        rig.backend.replay(&rig.stream, &graph).expect("queued");
        assert_eq!(rig.download(target.range()), [value; 64]);
    }
}

pub fn a_replayed_operation_reads_the_positions_of_its_own_time<B: Backend>(rig: &Rig<B>) {
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

pub fn a_graph_says_what_it_takes<B: Backend>(rig: &Rig<B>) {
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
