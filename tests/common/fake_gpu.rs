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

use ebbtide::backends::cuda::IMAGE_VARIABLE;

/// Names the test that a process was started for.
const CHILD: &str = "FAKE_GPU_CHILD";
const SOURCES: [(&str, &str); 5] = [
    ("fake.h", include_str!("../fake-gpu/fake.h")),
    ("device.c", include_str!("../fake-gpu/device.c")),
    ("memory.c", include_str!("../fake-gpu/memory.c")),
    ("module.c", include_str!("../fake-gpu/module.c")),
    ("stream.c", include_str!("../fake-gpu/stream.c")),
];
const FLAGS: [&str; 11] =
    ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"];
/// The image of kernels: nothing is fused that the source does not fuse, and memory that was written as numbers of one type may be read
/// as those of another, as for a card.
const IMAGE_FLAGS: [&str; 10] =
    ["-x", "c++", "-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall"];
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
    in_child(name, driver(), &[&[(IMAGE_VARIABLE, &*image().to_string_lossy())], settings].concat());
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
fn driver() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let sources = SOURCES.map(|(name, text)| (name.to_owned(), text.to_owned()));
        let parts = SOURCES.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".c"));
        let arguments: Vec<&str> = FLAGS.into_iter().chain(["-Wl,-soname,libcuda.so.1"]).chain(parts).chain(["-ldl"]).collect();
        built("fake-gpu", "libcuda.so", &sources, &compiler("CC", "cc"), &arguments)
    })
}

/// The kernels as the look-alike takes them: a library of this machine, built with the compiler that `CXX` names, else `c++`.
fn image() -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let library = "kernels.so";
    let folder = FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels-cuda");
        let files = fs::read_dir(&folder).expect("the kernels' folder").map(|entry| entry.expect("a file").path());
        let mut sources: Vec<(String, String)> = files
            .filter(|path| path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh"))
            .map(|path| {
                let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
                (name, fs::read_to_string(path).expect("a source of the kernels"))
            })
            .collect();
        sources.sort();
        sources.push(("look_alike.h".to_owned(), include_str!("../fake-gpu/look_alike.h").to_owned()));
        let arguments: Vec<&str> = IMAGE_FLAGS.into_iter().chain(["ebbtide.cu"]).collect();
        built("kernels", library, &sources, &compiler("CXX", "c++"), &arguments)
    });
    folder.join(library)
}

fn compiler(variable: &str, otherwise: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| otherwise.to_owned())
}

/// The folder with a library, built from its sources unless it is there. Several test programs may build at once, and one builds while
/// the others wait: a second of a compiler is dear where a dozen programs start together.
fn built(what: &str, library: &str, sources: &[(String, String)], compiler: &str, arguments: &[&str]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (sources, compiler, arguments).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{what}-{:016x}", hasher.finish()));
    let lock = File::create(folder.with_extension("lock")).expect("a lock for the build");
    lock.lock().expect("the build is waited for");
    if folder.join(library).exists() {
        return folder;
    }
    let own = folder.with_extension("part");
    fs::create_dir_all(&own).expect("a folder for the library");
    for (name, text) in sources {
        fs::write(own.join(name), text).expect("a source of the library");
    }
    let made = Command::new(compiler).current_dir(&own).args(arguments).args(["-o", library]).output();
    let made = made.unwrap_or_else(|error| panic!("the compiler {compiler} does not start: {error}; CC and CXX name others"));
    assert!(made.status.success(), "{compiler}: {}", String::from_utf8_lossy(&made.stderr));
    let _ = fs::remove_dir_all(&folder);
    fs::rename(&own, &folder).expect("the library is moved to its place");
    folder
}
