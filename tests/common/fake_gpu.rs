//! Runs a test on the look-alike of NVIDIA's driver (`tests/fake-gpu/`), or on a real device where `EBBTIDE_REAL_GPU=1` asks for it.
//!
//! The dynamic loader reads LD_LIBRARY_PATH when a process starts, and a lost device stays lost for its process. So each test runs in a
//! process of its own: the test program starts itself again, for that one test, with the look-alike first in the loader's path.
#![allow(clippy::print_stderr, reason = "a test that is not run says so")]

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Names the test that a process was started for.
const CHILD: &str = "FAKE_GPU_CHILD";
const SOURCES: [(&str, &str); 4] = [
    ("fake.h", include_str!("../fake-gpu/fake.h")),
    ("device.c", include_str!("../fake-gpu/device.c")),
    ("memory.c", include_str!("../fake-gpu/memory.c")),
    ("stream.c", include_str!("../fake-gpu/stream.c")),
];
const FLAGS: [&str; 11] =
    ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"];
/// A test of a few kilobytes takes milliseconds.
const LIMIT: Duration = Duration::from_secs(120);

/// True where tests are to run on a real device.
pub fn is_real() -> bool {
    std::env::var_os("EBBTIDE_REAL_GPU").is_some_and(|value| value == "1")
}

/// Runs `body` as the test `name` on the look-alike, whose faults `settings` are; see its README.
pub fn on_the_look_alike(name: &str, settings: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some_and(|test| test == name) {
        return body();
    }
    if is_real() {
        eprintln!("{name}: needs the look-alike driver, not run on a real device");
        return;
    }
    in_child(name, built(), settings);
}

/// Runs `body` as the test `name` on the look-alike, or on a real device, one test at a time, where that is asked for.
pub fn on_either(name: &str, body: impl FnOnce()) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    if is_real() {
        let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        return body();
    }
    on_the_look_alike(name, &[], body);
}

/// Runs `body` as the test `name` where no driver can be loaded: empty files of its names come first in the loader's path.
pub fn without_a_driver(name: &str, body: impl FnOnce()) {
    if std::env::var_os(CHILD).is_some_and(|test| test == name) {
        return body();
    }
    if is_real() {
        eprintln!("{name}: needs a machine without a driver, not run on a real device");
        return;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-gpu");
    fs::create_dir_all(&folder).expect("a folder for the test");
    for library in ["libcuda.so", "libcuda.so.1"] {
        File::create(folder.join(library)).expect("an empty file");
    }
    in_child(name, &folder, &[]);
}

fn in_child(name: &str, library_folder: &Path, settings: &[(&str, &str)]) {
    let said = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{}.log", name.replace("::", "-"), std::process::id()));
    let log = File::create(&said).expect("a log");
    let mut command = Command::new(std::env::current_exe().expect("a test program knows itself"));
    command.args([name, "--exact", "--nocapture", "--include-ignored"]).env(CHILD, name).env("LD_LIBRARY_PATH", library_folder);
    command.envs(settings.iter().copied()).stderr(log.try_clone().expect("the log again")).stdout(log);
    let status = waited(&mut command);
    let text = fs::read_to_string(&said).unwrap_or_default();
    let passed = status.is_some_and(|status| status.success()) && text.contains("1 passed");
    assert!(passed, "{name} in a process of its own ended with {status:?}:\n{text}");
    // A log of a test that passed is of no use; one that cannot be removed does no harm.
    let _ = fs::remove_file(said);
}

fn waited(command: &mut Command) -> Option<ExitStatus> {
    let mut child = command.spawn().expect("the test program starts");
    let began = Instant::now();
    while began.elapsed() < LIMIT {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().expect("a child can be ended");
    let _ = child.wait();
    None
}

/// The folder with the built look-alike. It is built once for each version of its sources, with the compiler that `CC` names, else `cc`,
/// which Rust's linker needs as well.
fn built() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let mut hasher = DefaultHasher::new();
        (SOURCES, FLAGS).hash(&mut hasher);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-gpu-{:016x}", hasher.finish()));
        if !folder.join("libcuda.so").exists() {
            build_into(&folder);
        }
        folder
    })
}

/// Several test programs may build at once: each builds beside the folder, and whoever is first moves its own there.
fn build_into(folder: &Path) {
    let own = folder.with_extension(std::process::id().to_string());
    fs::create_dir_all(&own).expect("a folder for the look-alike");
    for (name, text) in SOURCES {
        fs::write(own.join(name), text).expect("a source of the look-alike");
    }
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let parts = SOURCES.iter().map(|(name, _)| name).filter(|name| name.ends_with(".c"));
    let made =
        Command::new(&compiler).current_dir(&own).args(FLAGS).args(["-Wl,-soname,libcuda.so.1", "-o", "libcuda.so"]).args(parts).output();
    let made = made.unwrap_or_else(|error| panic!("the C compiler {compiler} does not start: {error}; CC names another"));
    assert!(made.status.success(), "{compiler}: {}", String::from_utf8_lossy(&made.stderr));
    if fs::rename(&own, folder).is_err() {
        assert!(folder.join("libcuda.so").exists(), "the look-alike cannot be moved to {}", folder.display());
        let _ = fs::remove_dir_all(own);
    }
}
