//! Goal: a runtime is found or refused with the names that matter, and what callers pass arrives in C as HIP declares it.
//! Method: libraries compiled here from `fake_hip.c`; the fake writes down every call with its arguments as C reads them.
#![cfg(unix)]

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{from_mut, null_mut};

use hip_sys::raw::{
    hipErrorInvalidDevice, hipErrorNotReady, hipEventDisableTiming, hipHostMallocMapped, hipHostRegisterPortable, hipMemcpyHostToDevice,
    hipStreamCaptureModeThreadLocal, hipStreamNonBlocking,
};
use hip_sys::{Attempt, DeviceAttribute, Functions, Hip, HipError, LIBRARY_NAMES, LoadError, MemoryInfo};

/// The fake's path, or `None`, said aloud, on a machine without a C compiler; where `CI` is set that is a failure.
fn compiled(name: &str, flags: &[&str]) -> Option<&'static str> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_hip.c");
    let library: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let ran = Command::new(&compiler).args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args(flags).arg(&source).status();
    match ran {
        Ok(status) => assert!(status.success(), "{compiler} cannot compile {}", source.display()),
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "no C compiler `{compiler}`: {error}");
            #[allow(clippy::print_stderr, reason = "a test that cannot run says so")]
            {
                eprintln!("not run: no C compiler `{compiler}` ({error}); set CC");
            }
            return None;
        }
    }
    Some(Box::leak(library.into_os_string().into_string().expect("the target folder's name is UTF-8").into_boxed_str()))
}

fn load(path: &'static str) -> Result<Hip, LoadError> {
    // SAFETY: the fake's functions have HIP's signatures and it has no initialisers.
    unsafe { Hip::load_first_of(&[path]) }
}

/// The fake's calls since the last look.
fn calls(path: &str) -> Vec<String> {
    // SAFETY: the fake is loaded already.
    let library = unsafe { libloading::Library::new(path) }.expect("the fake is there");
    // SAFETY: `fake_calls` has this signature.
    let fake_calls = unsafe { library.get::<unsafe extern "C" fn() -> *const c_char>("fake_calls") }.expect("the fake has it");
    // SAFETY: it returns a string of its own that lives until the next call.
    let text = unsafe { CStr::from_ptr(fake_calls()) };
    text.to_string_lossy().lines().map(str::to_owned).collect()
}

#[test]
fn a_machine_without_the_runtime_is_told_every_name_that_was_looked_for() {
    let names = ["libamdhip64-absent.so.7", "libamdhip64-absent.so"];
    // SAFETY: nothing has these names.
    let error = unsafe { Hip::load_first_of(&names) }.expect_err("nothing has these names");
    let LoadError::NotFound { attempts } = &error else { panic!("{error}") };
    assert_eq!(attempts.iter().map(|attempt| attempt.name.as_str()).collect::<Vec<_>>(), names);
    let text = error.to_string();
    assert!(text.starts_with("no HIP runtime could be loaded: libamdhip64-absent.so.7: "), "{text}");
    for attempt in attempts {
        assert!(attempt.reason.contains(&attempt.name) && text.contains(&attempt.reason), "{text}");
    }
}

#[test]
fn a_runtime_that_lacks_a_library_of_its_own_is_told_with_both_names() {
    let attempts = vec![Attempt { name: "libamdhip64.so.5".to_owned(), reason: "libhsa-runtime64.so.1: no such file".to_owned() }];
    let text = LoadError::NotFound { attempts }.to_string();
    assert_eq!(text, "no HIP runtime could be loaded: libamdhip64.so.5 (libhsa-runtime64.so.1: no such file)");
}

#[test]
fn the_default_names_are_tried_newest_first() {
    match Hip::load() {
        Ok(hip) => assert!(LIBRARY_NAMES.contains(&hip.library())),
        Err(LoadError::NotFound { attempts }) => {
            let names: Vec<_> = attempts.iter().map(|attempt| attempt.name.as_str()).collect();
            assert_eq!(names, ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"]);
        }
        Err(error @ LoadError::MissingSymbol { .. }) => panic!("{error}"),
    }
}

#[test]
fn a_library_that_lacks_a_function_is_refused_by_the_function_s_name() {
    let Some(path) = compiled("libfake-without-launch.so", &["-DWITHOUT_GRAPH_LAUNCH"]) else { return };
    let error = load(path).expect_err("a function is missing");
    assert_eq!(error, LoadError::MissingSymbol { library: path.to_owned(), symbol: "hipGraphLaunch" });
    assert_eq!(error.to_string(), format!("{path} has no function `hipGraphLaunch`: this is not a HIP runtime of ROCm 5.2 or newer"));
}

#[test]
fn a_name_that_is_absent_gives_way_to_the_next() {
    let Some(path) = compiled("libfake-second.so", &[]) else { return };
    // SAFETY: nothing has the first name; the second is the fake.
    let hip = unsafe { Hip::load_first_of(&["libamdhip64-absent.so.7", path]) }.expect("the second is there");
    assert_eq!(hip.library(), path);
}

#[test]
fn the_safe_questions_bring_back_what_the_runtime_says() {
    let Some(path) = compiled("libfake-questions.so", &[]) else { return };
    let hip = load(path).expect("the fake is whole");
    hip.initialise().expect("the fake starts");
    assert_eq!((hip.runtime_version(), hip.driver_version(), hip.device_count()), (Ok(60_443_484), Ok(60_342_134), Ok(2)));
    assert_eq!(hip.device_name(0).as_deref(), Ok("Fake card"));
    assert_eq!(hip.device_name(1), Ok("x".repeat(255)), "a name that is not closed ends at the buffer's last byte");
    assert_eq!(hip.device_attribute(1, DeviceAttribute::WarpSize), Ok(1087));
    assert_eq!(hip.memory_info(), Ok(MemoryInfo { free_bytes: 5 << 30, total_bytes: 8 << 30 }));
    hip.use_device(1).expect("it is there");
    assert_eq!(calls(path), ["hipInit 0", "hipSetDevice 1"]);
}

#[test]
fn a_failed_call_names_the_function_the_code_and_the_runtime_s_words() {
    let Some(path) = compiled("libfake-errors.so", &[]) else { return };
    let hip = load(path).expect("the fake is whole");
    let error = hip.device_name(2).expect_err("there are two devices");
    assert_eq!(error.code, hipErrorInvalidDevice);
    assert_eq!(error.to_string(), "hipDeviceGetName failed: hipErrorInvalidDevice (101): invalid device ordinal");
    // SAFETY: the fake looks at no event.
    let error = unsafe { hip.functions().event_query(null_mut()) }.expect_err("the fake's events are never ready");
    assert_eq!(error.code, hipErrorNotReady);
    assert_eq!(error.to_string(), "hipEventQuery failed: hipErrorNotReady (600): unknown", "a code without words");
}

#[test]
fn every_argument_arrives_in_c_in_its_place() -> Result<(), HipError> {
    let Some(path) = compiled("libfake-arguments.so", &[]) else { return Ok(()) };
    let hip = load(path).expect("the fake is whole");
    let at = |address: usize| std::ptr::without_provenance_mut::<c_void>(address);
    let (memory, stream, event) = (at(0x11), at(0x22), at(0x33));
    let mut handle: *mut c_void = null_mut();
    let mut expected = Vec::new();
    macro_rules! call {
        ($method:ident($($argument:expr),*), $line:literal $(, $handle:literal)?) => {
            // SAFETY: the fake follows no pointer but those that it writes to or reads a string or an argument from, and these
            // are valid.
            unsafe { hip.functions().$method($($argument),*) }?;
            expected.push($line);
            $(assert_eq!(handle, at($handle), stringify!($method));)?
        };
    }
    call!(get_last_error(), "hipGetLastError");
    call!(device_synchronize(), "hipDeviceSynchronize");

    call!(malloc(&raw mut handle, 5 << 32), "hipMalloc 21474836480", 0x100);
    call!(free(memory), "hipFree 0x11");
    call!(host_malloc(&raw mut handle, 7, hipHostMallocMapped), "hipHostMalloc 7 2", 0x200);
    call!(host_free(memory), "hipHostFree 0x11");
    call!(host_register(memory, 8, hipHostRegisterPortable), "hipHostRegister 0x11 8 1");
    call!(host_unregister(memory), "hipHostUnregister 0x11");
    call!(host_get_device_pointer(&raw mut handle, memory, 0), "hipHostGetDevicePointer 0x11 0", 0x300);
    call!(memcpy_async(memory, at(0x44), 9, hipMemcpyHostToDevice, stream), "hipMemcpyAsync 0x11 0x44 9 1 0x22");
    call!(memset_async(memory, -1, 10, stream), "hipMemsetAsync 0x11 -1 10 0x22");

    call!(stream_create_with_flags(&raw mut handle, hipStreamNonBlocking), "hipStreamCreateWithFlags 1", 0x400);
    call!(stream_destroy(stream), "hipStreamDestroy 0x22");
    call!(stream_synchronize(stream), "hipStreamSynchronize 0x22");
    call!(stream_wait_event(stream, event, 0), "hipStreamWaitEvent 0x22 0x33 0");
    call!(event_create_with_flags(&raw mut handle, hipEventDisableTiming), "hipEventCreateWithFlags 2", 0x500);
    call!(event_destroy(event), "hipEventDestroy 0x33");
    call!(event_record(event, stream), "hipEventRecord 0x33 0x22");
    call!(event_synchronize(event), "hipEventSynchronize 0x33");
    let mut milliseconds = 0.0;
    call!(event_elapsed_time(&raw mut milliseconds, event, at(0x55)), "hipEventElapsedTime 0x33 0x55");
    assert_eq!(milliseconds.to_bits(), 1.5f32.to_bits());

    call!(stream_begin_capture(stream, hipStreamCaptureModeThreadLocal), "hipStreamBeginCapture 0x22 1");
    call!(stream_end_capture(stream, &raw mut handle), "hipStreamEndCapture 0x22", 0x600);
    let (mut node, mut log): (_, [c_char; 16]) = (null_mut(), [0; 16]);
    let line = (&raw mut node, log.as_mut_ptr(), log.len());
    call!(graph_instantiate(&raw mut handle, memory, line.0, line.1, line.2), "hipGraphInstantiate 0x11 16", 0x700);
    // SAFETY: the fake closed the string.
    assert_eq!((node, unsafe { CStr::from_ptr(log.as_ptr()) }), (at(0x710), c"fine"));
    call!(graph_launch(memory, stream), "hipGraphLaunch 0x11 0x22");
    call!(graph_destroy(memory), "hipGraphDestroy 0x11");
    call!(graph_exec_destroy(memory), "hipGraphExecDestroy 0x11");

    call!(module_load_data(&raw mut handle, c"image".as_ptr().cast()), "hipModuleLoadData image", 0x800);
    call!(module_unload(memory), "hipModuleUnload 0x11");
    call!(module_get_function(&raw mut handle, memory, c"axpy".as_ptr()), "hipModuleGetFunction 0x11 axpy", 0x900);
    let mut argument = 77;
    let mut arguments = [from_mut(&mut argument).cast::<c_void>()];
    let (list, extra) = (arguments.as_mut_ptr(), at(0x66).cast());
    call!(module_launch_kernel(memory, 1, 2, 3, 4, 5, 6, 7, stream, list, extra), "hipModuleLaunchKernel 0x11 1 2 3 4 5 6 7 0x22 77 0x66");
    assert_eq!(calls(path), expected);
    // Asked elsewhere: the eight questions of `Hip`, `hipEventQuery`, and the two that give errors their words.
    assert_eq!(expected.len() + 11, Functions::NAMES.len(), "a function of the table that no test calls");
    Ok(())
}
