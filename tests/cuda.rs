//! Goal: what goes wrong with a card is said in the contract's words, and nothing panics. Method: the `cuda` backend on the look-alike
//! driver of `tests/fake-gpu/`, whose faults are set by variables; each test runs in a process of its own. What holds for every backend
//! is in `conformance.rs`.

#[path = "common/device.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod device;
#[path = "common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;

use std::sync::Arc;

use device::{Rig, bytes_of, part, start};
use ebbtide::backend::op::{DeltaShape, ExpertShape, KvFormat, Op, Path, expert_scratch_bytes};
use ebbtide::backend::{Backend, BackendError, Copy, DeviceMemory, Direction, HostRegion, MemoryInfo, PinnedMemory, Pool};
use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
use ebbtide::backends::gpu_feature::GpuFeature;
use ebbtide::experts::{ExpertStore, StoreError};
use ebbtide::gguf::GgufFile;
use ebbtide::model::{ModelShape, ModelWeights};
use ebbtide::quant::{ActivationFormat, QuantType};
use ebbtide::units::Bytes;
use fake_gpu::{on_the_look_alike, without_a_driver};

/// A test on the look-alike with the given settings.
macro_rules! on_the_look_alike {
    ($(#[$doc:meta])* $test:ident, [$($variable:literal = $value:literal),*], $body:expr) => {
        $(#[$doc])*
        #[test]
        fn $test() {
            on_the_look_alike(stringify!($test), &[$(($variable, $value)),*], $body);
        }
    };
}

fn open(choice: &str) -> Result<CudaBackend, BackendError> {
    CudaBackend::open(&choice.parse::<DeviceChoice>().expect("any text is a choice"))
}

fn rig() -> Rig<CudaBackend> {
    Rig::new(open("").expect("the device opens"))
}

/// The reason for which no device is opened.
fn refusal(choice: &str) -> String {
    match open(choice) {
        Err(BackendError::Open { backend: "cuda", reason }) => reason,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("a device was opened"),
    }
}

fn free(rig: &Rig<CudaBackend>) -> Bytes {
    rig.backend.memory_info().expect("a reading").free.expect("the driver says")
}

fn model() -> GgufFile {
    GgufFile::open(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf")).expect("the bundled model is whole")
}

fn file_region(file: &GgufFile) -> HostRegion {
    HostRegion::ReadOnlyFile(Arc::new(file.file_map(0).expect("a model has a file").clone()))
}

#[test]
fn a_machine_without_a_driver_is_told_what_is_missing() {
    without_a_driver("a_machine_without_a_driver_is_told_what_is_missing", || {
        let reason = refusal("");
        assert!(reason.contains("libcuda.so") && reason.contains("LD_LIBRARY_PATH"), "{reason}");
        let feature = GpuFeature { name: "CUDA", feature: "cuda", device_names: Some(ebbtide::backends::cuda::driver::device_names) };
        assert!(feature.notice().contains("on the host backend alone") && feature.notice().contains("libcuda.so"), "{}", feature.notice());
    });
}

on_the_look_alike!(a_machine_without_a_card_is_told_so, ["FAKE_GPU_DEVICES" = "0"], || {
    assert!(refusal("").contains("CUDA_ERROR_NO_DEVICE (100)"), "{}", refusal(""));
});

on_the_look_alike!(a_driver_that_does_not_start_is_quoted, ["FAKE_GPU_INIT" = "999"], || {
    assert_eq!(refusal(""), "the library is there but does not start: cuInit answers CUDA_ERROR_UNKNOWN (999): unknown error");
});

on_the_look_alike!(a_driver_that_is_too_old_is_named_with_the_way_out, ["FAKE_GPU_VERSION" = "11080"], || {
    assert_eq!(refusal(""), "the driver speaks CUDA 11.8, at least 12.0 is needed: update NVIDIA's driver to 525 or later");
});

on_the_look_alike!(a_device_is_opened_as_it_is_named, ["FAKE_GPU_DEVICES" = "3", "FAKE_GPU_INTEGRATED" = "1"], || {
    let opened = |choice| open(choice).map(|backend| backend.capabilities().device.clone()).expect("it opens");
    assert_eq!(opened(""), "Look-alike 1", "discrete before integrated");
    assert_eq!(opened("0"), "Look-alike 0");
    assert_eq!(opened("alike 2"), "Look-alike 2");
    assert_eq!(opened("GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae02"), "Look-alike 2");
    assert!(open("0").expect("it opens").capabilities().integrated && !open("1").expect("it opens").capabilities().integrated);
    let reason = refusal("3");
    assert!(reason.starts_with("there is no device 3; the driver has: 0: Look-alike 0 (GPU-a0a1a2a3-"), "{reason}");
    assert!(refusal("look").starts_with("3 devices are called \"look\""), "{}", refusal("look"));
});

on_the_look_alike!(two_devices_are_used_from_one_thread, ["FAKE_GPU_DEVICES" = "2"], || {
    let [first, second] = ["0", "1"].map(|choice| Rig::new(open(choice).expect("it opens")));
    let (here, there) = (first.upload(&[1; 64]), second.upload(&[2; 64]));
    assert_eq!((first.download(here.range()), second.download(there.range())), (vec![1; 64], vec![2; 64]));
    assert_eq!(free(&first), free(&second));
    drop(here);
    assert!(free(&first) > free(&second), "each device counts its own");
});

on_the_look_alike!(the_driver_s_facts_are_the_capabilities, ["FAKE_GPU_TOTAL_MIB" = "100", "FAKE_GPU_PAGEABLE" = "1"], || {
    let rig = rig();
    let facts = rig.backend.capabilities();
    assert_eq!((facts.backend, facts.device.as_str(), facts.max_allocation_bytes), ("cuda", "Look-alike 0", Bytes::mib(100)));
    assert_eq!((facts.copy_engines, facts.integrated, facts.reads_pageable_memory), (2, false, true));
});

on_the_look_alike!(
    out_of_memory_names_pool_purpose_bytes_and_what_is_free,
    ["FAKE_GPU_TOTAL_MIB" = "32", "FAKE_GPU_HELD_MIB" = "2"],
    || {
        let rig = rig();
        let held = rig.buffer(20 << 20);
        let error = rig.backend.malloc(Bytes::mib(11), "slots").err();
        let (purpose, requested) = ("slots".to_owned(), Bytes::mib(11));
        assert_eq!(error, Some(BackendError::OutOfMemory { pool: Pool::Device, purpose, requested, free: Bytes::mib(10) }));
        drop(held);
        rig.backend.malloc(requested, "slots").expect("freed, there is room");
        let error = rig.backend.alloc_pinned(Bytes(u64::MAX / 2 + 1), "staging").err();
        assert!(matches!(error, Some(BackendError::OutOfMemory { pool: Pool::PinnedHost, .. })), "{error:?}");
    }
);

on_the_look_alike!(one_failed_allocation_is_no_reason_to_give_up, ["FAKE_GPU_MALLOC_FAILS_AT" = "2"], || {
    let rig = rig();
    let first = rig.upload(&[3; 64]);
    let error = rig.backend.malloc(Bytes(64), "the second").err();
    let all = Bytes::mib(256).saturating_sub(Bytes(512));
    assert!(matches!(&error, Some(BackendError::OutOfMemory { free, .. }) if *free == all), "{error:?}");
    rig.buffer(64);
    assert_eq!(rig.download(first.range()), [3; 64]);
});

on_the_look_alike!(a_reading_of_zero_is_passed_on, ["FAKE_GPU_FREE" = "zero"], || {
    let reading = rig().backend.memory_info();
    assert_eq!(reading, Ok(MemoryInfo { free: Some(Bytes::ZERO), total: Bytes::mib(256), os_budget: None }));
});

on_the_look_alike!(a_reading_above_the_total_is_passed_on, ["FAKE_GPU_FREE" = "above"], || {
    let rig = rig();
    let reading = rig.backend.memory_info().expect("a reading");
    assert!(reading.free.is_some_and(|free| free > reading.total), "{reading:?}");
    // In an error for lack of memory it would mislead.
    let error = rig.backend.malloc(Bytes::mib(257), "too much").err();
    assert!(matches!(error, Some(BackendError::OutOfMemory { free, .. }) if free == reading.total), "{error:?}");
});

on_the_look_alike!(a_reading_that_fails_fails_alone, ["FAKE_GPU_FREE" = "fails", "FAKE_GPU_FREE_TIMES" = "2"], || {
    // The first reading is the one when the device is opened, which does not hang on it.
    let rig = rig();
    let answer = "CUDA_ERROR_UNKNOWN (999): unknown error".to_owned();
    assert_eq!(rig.backend.memory_info(), Err(BackendError::Driver { call: "cuMemGetInfo_v2", answer }));
    assert_eq!(free(&rig), Bytes::mib(256), "the next reading is right: nothing of the failure is left");
    let buffer = rig.upload(&[1; 64]);
    assert_eq!(rig.download(buffer.range()), [1; 64]);
});

on_the_look_alike!(a_refused_page_lock_is_out_of_pinned_memory, ["FAKE_GPU_REGISTER_BYTES" = "1000"], || {
    let (rig, file) = (rig(), model());
    let requested = file.file_bytes();
    let error = rig.backend.register(file_region(&file)).err();
    assert!(
        matches!(&error, Some(BackendError::OutOfMemory { pool: Pool::PinnedHost, requested: asked, .. }) if asked.0 == requested),
        "{error:?}"
    );
    let (shape, weights) = shape_and_weights(&file);
    let refused = ExpertStore::register(&rig.backend, &file, &shape, &weights, None).err().expect("nothing can be pinned");
    assert!(matches!(refused, StoreError::Unpinned { pageable, pinned: Bytes::ZERO, .. } if pageable > Bytes::ZERO), "{refused}");
});

on_the_look_alike!(
    a_refused_page_lock_leaves_the_experts_pageable_where_the_device_reads_such_memory,
    ["FAKE_GPU_REGISTER_BYTES" = "1000", "FAKE_GPU_PAGEABLE" = "1"],
    || {
        let (rig, file) = (rig(), model());
        let (shape, weights) = shape_and_weights(&file);
        let store = ExpertStore::register(&rig.backend, &file, &shape, &weights, None).expect("the device reads the map");
        assert_eq!(store.pinned_and_pageable(), (Bytes::ZERO, Bytes(file.file_bytes())));
        let target = rig.buffer(4096);
        let copy = Copy { dst: start(&target), src: store.file_addr(0, Bytes(5000)), bytes: Bytes(4096), direction: Direction::ToDevice };
        rig.backend.copy(&rig.stream, copy).expect("queued");
        assert_eq!(rig.download(target.range()), file.file_map(0).expect("a file").as_slice()[5000..9096]);
    }
);

fn shape_and_weights(file: &GgufFile) -> (ModelShape, ModelWeights) {
    let shape = ModelShape::read(file.metadata(), file).expect("the bundled model's shape");
    let weights = ModelWeights::read(file, &shape).expect("the bundled model's weights");
    (shape, weights)
}

on_the_look_alike!(a_file_map_is_refused_where_read_only_memory_cannot_be_locked, ["FAKE_GPU_READ_ONLY_REGISTER" = "0"], || {
    let error = rig().backend.register(file_region(&model())).err();
    assert!(matches!(error, Some(BackendError::Unsupported { backend: "cuda", .. })), "{error:?}");
});

on_the_look_alike!(a_file_is_locked_once_at_a_time, [], || {
    let (rig, file) = (rig(), model());
    let first = rig.backend.register(file_region(&file)).expect("a mapped file");
    let error = rig.backend.register(file_region(&file)).err();
    assert!(matches!(&error, Some(BackendError::Driver { answer, .. }) if answer.contains("ALREADY_REGISTERED (712)")), "{error:?}");
    drop(first);
    rig.backend.register(file_region(&file)).expect("given back");
});

/// A capture fails in the way of `fails`, and the device is idle afterwards.
fn idle_after(rig: &Rig<CudaBackend>, fails: impl Fn(&Rig<CudaBackend>) -> Option<BackendError>) -> BackendError {
    let error = fails(rig).expect("the capture fails");
    let late = rig.backend.end_capture(&rig.stream).err();
    assert!(matches!(late, Some(BackendError::OutOfOrder { .. })), "nothing records any more: {late:?}");
    let buffer = rig.upload(&[4; 64]);
    assert_eq!(rig.download(buffer.range()), [4; 64]);
    error
}

fn capture_of_a_fill(rig: &Rig<CudaBackend>) -> Option<BackendError> {
    let target = rig.upload(&[0; 64]);
    if let Err(error) = rig.backend.begin_capture(&rig.stream) {
        return Some(error);
    }
    rig.backend.fill(&rig.stream, target.range(), 1).expect("recorded");
    rig.backend.end_capture(&rig.stream).err()
}

on_the_look_alike!(a_capture_that_does_not_begin_leaves_the_device_idle, ["FAKE_GPU_CAPTURE_FAILS" = "begin"], || {
    let error = idle_after(&rig(), capture_of_a_fill);
    assert!(matches!(&error, BackendError::CaptureFailed { reason } if reason.contains("cuStreamBeginCapture_v2")), "{error}");
});

on_the_look_alike!(a_capture_that_ends_badly_leaves_the_device_idle, ["FAKE_GPU_CAPTURE_FAILS" = "end"], || {
    let error = idle_after(&rig(), capture_of_a_fill);
    assert!(matches!(&error, BackendError::CaptureFailed { reason } if reason.contains("STREAM_CAPTURE_INVALIDATED (901)")), "{error}");
});

on_the_look_alike!(a_graph_without_room_is_out_of_memory, ["FAKE_GPU_CAPTURE_FAILS" = "instantiate"], || {
    let rig = rig();
    let error = idle_after(&rig, capture_of_a_fill);
    let node = rig.backend.capabilities().graph_node_bytes;
    let names = matches!(&error, BackendError::OutOfMemory { pool: Pool::Device, purpose, requested, .. }
        if purpose == "captured graph" && *requested == node);
    assert!(names, "{error}");
});

on_the_look_alike!(a_capture_that_allocated_is_an_error, ["FAKE_GPU_CAPTURE_ALLOCATES_AT" = "2"], || {
    let error = idle_after(&rig(), |rig| {
        let target = rig.upload(&[0; 64]);
        rig.backend.begin_capture(&rig.stream).expect("idle");
        rig.backend.fill(&rig.stream, target.range(), 1).expect("recorded");
        let struck = rig.backend.fill(&rig.stream, target.range(), 2);
        assert!(matches!(struck, Err(BackendError::CaptureFailed { .. })), "{struck:?}");
        let after = rig.backend.fill(&rig.stream, target.range(), 3);
        assert!(matches!(after, Err(BackendError::CaptureFailed { .. })), "{after:?}");
        let ended = rig.backend.end_capture(&rig.stream).err();
        assert_eq!(rig.download(target.range()), [0; 64], "nothing of it ran");
        ended
    });
    assert!(matches!(error, BackendError::CaptureFailed { .. }), "{error}");
});

on_the_look_alike!(dropping_a_stream_ends_its_capture, [], || {
    let rig = rig();
    let (dropped, target) = (rig.backend.create_stream().expect("a stream"), rig.upload(&[0; 64]));
    rig.backend.begin_capture(&dropped).expect("idle");
    rig.backend.fill(&dropped, target.range(), 1).expect("recorded");
    drop(dropped);
    assert_eq!(capture_of_a_fill(&rig), None, "another capture can begin");
    assert_eq!(rig.download(target.range()), [0; 64]);
});

/// The first two calls that can meet a fault, and then every call there is.
fn everything_is_refused(code: &str) {
    let rig = rig();
    let (buffer, pinned, event) = (rig.buffer(64), rig.pinned(&[5; 64]), rig.backend.create_event().expect("an event"));
    let other = rig.backend.create_stream().expect("a stream");
    let file = model();
    let registered = rig.backend.register(file_region(&file)).expect("a mapped file");
    rig.backend.begin_capture(&rig.stream).expect("idle");
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");

    let copy = Copy { dst: start(&buffer), src: start(&pinned), bytes: Bytes(64), direction: Direction::ToDevice };
    rig.backend.copy(&rig.stream, copy).expect("queued: the fault comes when it runs");
    rig.backend.record(&rig.stream, &event).expect("queued");
    let Err(BackendError::DeviceLost { reason: first }) = rig.backend.synchronise(&rig.stream) else { panic!("the device is not lost") };
    assert!(first.starts_with("cuStreamSynchronize answers ") && first.contains(code), "{first}");

    let backend = &rig.backend;
    let op = Op::RmsNorm { x: start(&buffer), weight: start(&buffer), out: start(&buffer), n_rows: 1, n_cols: 4, eps: 0.0 };
    let answers = [
        backend.memory_info().err(),
        backend.malloc(Bytes(64), "a test").err(),
        backend.alloc_pinned(Bytes(64), "a test").err(),
        backend.register(HostRegion::Pageable(Arc::new(vec![0]))).err(),
        backend.register(file_region(&file)).err(),
        backend.create_stream().err(),
        backend.create_event().err(),
        backend.record(&rig.stream, &event).err(),
        backend.wait(&other, &event).err(),
        backend.is_done(&event).err(),
        backend.synchronise_event(&event).err(),
        backend.elapsed_s(&event, &event).err(),
        backend.synchronise(&other).err(),
        backend.copy(&rig.stream, copy).err(),
        backend.fill(&rig.stream, buffer.range(), 0).err(),
        backend.discard(&rig.stream, buffer.range()).err(),
        backend.launch(&rig.stream, &op).err(),
        backend.begin_capture(&rig.stream).err(),
        backend.end_capture(&rig.stream).err(),
        backend.replay(&rig.stream, &graph).err(),
    ];
    let lost = BackendError::DeviceLost { reason: first };
    for (index, answer) in answers.into_iter().enumerate() {
        assert_eq!(answer, Some(lost.clone()), "call {index} of the list");
    }
    drop((graph, registered, buffer, event, other, pinned));
    assert_eq!(backend.failed_frees(), 0, "a lost device is not asked to take anything back");
}

on_the_look_alike!(after_an_illegal_address_everything_is_refused_as_lost, ["FAKE_GPU_LOST_AT" = "1"], || {
    everything_is_refused("CUDA_ERROR_ILLEGAL_ADDRESS (700)");
});

on_the_look_alike!(after_a_failed_launch_everything_is_refused_as_lost, ["FAKE_GPU_LOST_AT" = "1", "FAKE_GPU_LOST_CODE" = "719"], || {
    everything_is_refused("CUDA_ERROR_LAUNCH_FAILED (719)")
});

on_the_look_alike!(a_device_that_is_lost_while_memory_is_dropped_is_told_by_the_next_call, ["FAKE_GPU_LOST_AT" = "2"], || {
    let rig = rig();
    let (target, dropped) = (rig.upload(&[1; 64]), rig.buffer(64));
    rig.backend.fill(&rig.stream, target.range(), 2).expect("queued");
    drop(dropped);
    let error = rig.backend.malloc(Bytes(64), "a test").err();
    assert!(matches!(&error, Some(BackendError::DeviceLost { reason }) if reason.contains("cuCtxSynchronize")), "{error:?}");
});

on_the_look_alike!(a_size_beyond_a_kernel_is_refused_by_the_operation_s_name, [], || {
    let rig = rig();
    let shape = DeltaShape { n_head_k: 1, n_head_v: 1, head_dim: 272, n_taps: 4 };
    let (qkv, gates, state) = (rig.buffer(4 * 3 * 272), rig.buffer(4), rig.buffer(4 * 272 * 272));
    let op = Op::DeltaCommit { qkv: start(&qkv), beta: start(&gates), decay: start(&gates), state: start(&state), n_rows: 1, shape };
    let refused = rig.backend.launch(&rig.stream, &op);
    assert!(matches!(&refused, Err(BackendError::Unsupported { backend: "cuda", what }) if what.contains("delta_commit")), "{refused:?}");
    assert_eq!(rig.download(gates.range()), [0xFF; 4], "nothing was queued");
});

on_the_look_alike!(operands_are_refused_before_anything_is_queued, [], || {
    let rig = rig();
    let (x, weight, out) = (rig.upload(&bytes_of(&[1.0; 16])), rig.upload(&bytes_of(&[1.0; 8])), rig.upload(&[7; 64]));
    let file = model();
    let registered = rig.backend.register(file_region(&file)).expect("a mapped file");
    let norm = |x, weight, out| Op::RmsNorm { x, weight, out, n_rows: 2, n_cols: 8, eps: 0.0 };
    let stale = rig.buffer(64).range().start;
    for (addr, refused) in [
        (stale, rig.run(&norm(stale, start(&weight), start(&out)))),
        (start(&weight), rig.run(&norm(start(&x), start(&weight), start(&weight)))),
        (start(&registered), rig.run(&norm(start(&x), start(&weight), start(&registered)))),
        (x.range().end(), rig.run(&norm(x.range().end(), start(&weight), start(&out)))),
    ] {
        let names = matches!(&refused, Err(BackendError::BadAddress { what: "rms_norm", addr: at, .. } | BackendError::Overlap { what: "rms_norm", addr: at })
            if *at == addr);
        assert!(names, "{addr}: {refused:?}");
    }
    let odd = part(&out, 2, 0).start;
    let refused = rig.run(&Op::RmsNorm { x: start(&x), weight: start(&weight), out: odd, n_rows: 1, n_cols: 8, eps: 0.0 });
    assert!(matches!(refused, Err(BackendError::BadOperand { op: "rms_norm", .. })), "{refused:?}");
    assert_eq!(rig.download(out.range()), [7; 64]);
    rig.run(&norm(start(&x), start(&weight), start(&out))).expect("the right operands run");
});

on_the_look_alike!(attention_takes_its_memory_in_the_middle_of_a_capture_and_keeps_it_for_the_graph, [], || {
    let rig = rig();
    let (n_ctx, n_head, head_dim) = (200, 2, 32);
    let row = (n_head * head_dim) as usize;
    let ones = rig.upload(&bytes_of(&vec![1.0; n_ctx as usize * row]));
    let (q, out, position, first_row) =
        (rig.upload(&bytes_of(&vec![0.5; row])), rig.buffer(4 * row), rig.upload(&[150, 0, 0, 0]), rig.upload(&[0; 4]));
    let attention = |n_ctx, path| Op::Attention {
        q: start(&q),
        k_cache: start(&ones),
        v_cache: start(&ones),
        format: KvFormat::F32,
        positions: start(&position),
        first_row: start(&first_row),
        out: start(&out),
        n_rows: 1,
        n_head,
        n_head_kv: n_head,
        head_dim,
        n_ctx,
        scale: 1.0,
        path,
    };
    let before = free(&rig);
    rig.backend.begin_capture(&rig.stream).expect("idle");
    rig.backend.launch(&rig.stream, &attention(160, Path::Window)).expect("recorded");
    let graph = rig.backend.end_capture(&rig.stream).expect("the allocation left the capture whole");
    let taken = before.saturating_sub(free(&rig));
    // Eight rows, two heads, three stretches of keys, 34 numbers a record.
    assert_eq!(taken, Bytes(8 * 2 * 3 * 34 * 4).max(Bytes(6656)), "a piece for a full window");
    rig.run(&attention(160, Path::Window)).expect("runs");
    assert_eq!(before.saturating_sub(free(&rig)), taken, "the same piece");
    rig.run(&attention(200, Path::Window)).expect("a longer cache takes a larger one");
    rig.backend.fill(&rig.stream, out.range(), 0xFF).expect("queued");
    rig.backend.replay(&rig.stream, &graph).expect("queued");
    assert_eq!(rig.download(out.range()), bytes_of(&vec![1.0; row]), "and the graph goes on with its own");
});

on_the_look_alike!(a_kernel_that_is_led_to_dead_memory_loses_the_device, [], || {
    let rig = rig();
    let (quant_type, format) = (QuantType::F32, ActivationFormat::F32);
    let shape = ExpertShape {
        n_embd: 8,
        n_ff: 8,
        gate_type: quant_type,
        up_type: quant_type,
        down_type: quant_type,
        input_format: format,
        down_format: format,
    };
    let numbers = rig.upload(&bytes_of(&[1.0; 8]));
    let (ids, table, residual) = (rig.upload(&[0; 4]), rig.buffer(24), rig.upload(&bytes_of(&[1.0; 8])));
    let scratch = rig.buffer(Bytes(expert_scratch_bytes(&shape, 1)).as_usize());
    let (input, weights) = (start(&numbers), start(&numbers));
    let (ids, table, residual, scratch) = (start(&ids), start(&table), start(&residual), start(&scratch));
    let op = Op::ExpertsWindow { input, ids, weights, table, residual, n_rows: 1, n_expert: 1, n_used: 1, shape, scratch };
    rig.backend.launch(&rig.stream, &op).expect("queued: only the device reads the table, which nobody filled");
    let fault = rig.backend.synchronise(&rig.stream);
    assert!(matches!(&fault, Err(BackendError::DeviceLost { reason }) if reason.contains("ILLEGAL_ADDRESS (700)")), "{fault:?}");
});

on_the_look_alike!(an_image_that_is_not_there_is_named, ["EBBTIDE_CUDA_IMAGE" = "/no/such/image"], || {
    let reason = refusal("");
    assert!(reason.starts_with("Look-alike 0: EBBTIDE_CUDA_IMAGE names /no/such/image: "), "{reason}");
});

on_the_look_alike!(a_file_that_is_no_image_is_refused_by_the_driver, ["EBBTIDE_CUDA_IMAGE" = "/proc/self/cmdline"], || {
    let reason = refusal("");
    assert!(reason.contains("the kernels cannot be loaded: cuModuleLoadData answers CUDA_ERROR_INVALID_IMAGE (200)"), "{reason}");
});

on_the_look_alike!(all_that_was_taken_is_given_back, [], || {
    let rig = rig();
    let before = free(&rig);
    let file = model();
    let registered = rig.backend.register(file_region(&file)).expect("a mapped file");
    let (first, second, empty) = (rig.upload(&[1; 5000]), rig.pinned(&[2; 5000]), rig.buffer(0));
    rig.backend.fill(&rig.stream, part(&first, 10, 10), 3).expect("queued");
    rig.backend.fill(&rig.stream, empty.range(), 3).expect("no bytes at all");
    rig.backend.begin_capture(&rig.stream).expect("idle");
    drop(empty);
    let graph = rig.backend.end_capture(&rig.stream).expect("a graph");
    assert!(free(&rig) < before);
    drop((registered, first, second, graph));
    assert_eq!((free(&rig), rig.backend.failed_frees()), (before, 0));
});

on_the_look_alike!(
    /// A test of the look-alike itself: the engine's missing waits would show on it.
    a_wait_that_is_left_out_shows_as_old_memory,
    [],
    || {
        let rig = rig();
        let reader = rig.backend.create_stream().expect("a stream");
        let (source, landing) = (rig.upload(&[1; 64]), rig.pinned(&[0; 64]));
        let copy = Copy { dst: start(&landing), src: start(&source), bytes: Bytes(64), direction: Direction::ToHost };
        rig.backend.fill(&rig.stream, source.range(), 2).expect("queued");
        rig.backend.copy(&reader, copy).expect("queued, and nothing says after what");
        rig.backend.synchronise(&reader).expect("done");
        let mut seen = [0; 64];
        landing.read(0, &mut seen);
        assert_eq!(seen, [1; 64]);
    }
);
