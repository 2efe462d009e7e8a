//! Builds the kernels of the enabled GPU feature into `OUT_DIR`, from where the program embeds them.
//!
//! A machine without the kernel compiler builds all the same, with a warning and an empty image: the backend then refuses to open and
//! says what was missing. `EBBTIDE_REQUIRE_KERNELS=1` makes missing kernels an error; releases and continuous integration set it.
//! `EBBTIDE_CUDA_ARCHS` lists the CUDA architectures, e.g. `80,90`; each of them adds a machine image, the lowest its PTX as well, from
//! which drivers compile for cards that are newer than the list.
#![allow(clippy::print_stdout, reason = "Cargo reads a build script's stdout")]

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const REQUIRE: &str = "EBBTIDE_REQUIRE_KERNELS";
const ARCHS: &str = "EBBTIDE_CUDA_ARCHS";
/// Turing to Blackwell's consumer cards: all that CUDA 13 compiles for and users have.
const DEFAULT_ARCHS: &str = "75,80,86,89,90,120";
/// Kernels of `cuda`, by their folder.
const CUDA_SOURCES: &str = "kernels-cuda";

/// Where the kernel compiler of a feature is looked for, in this order; the first that is a file is taken.
struct Toolchain {
    /// The feature.
    feature: &'static str,
    /// Names the compiler itself.
    variable: &'static str,
    /// Names a folder, and the compiler within it.
    home: Option<(&'static str, &'static str)>,
    /// Programs looked for on `PATH`.
    programs: &'static [&'static str],
}

/// The enabled feature's; two features are refused in `src/lib.rs`.
fn enabled() -> Option<Toolchain> {
    if cfg!(feature = "cuda") {
        Some(Toolchain { feature: "cuda", variable: "NVCC", home: Some(("CUDA_HOME", "bin/nvcc")), programs: &["nvcc"] })
    } else if cfg!(feature = "hip") {
        Some(Toolchain { feature: "hip", variable: "HIPCC", home: None, programs: &["clang++-22", "hipcc"] })
    } else if cfg!(feature = "sycl") {
        Some(Toolchain { feature: "sycl", variable: "ICPX", home: None, programs: &["icpx", "clang++-22"] })
    } else {
        None
    }
}

impl Toolchain {
    fn compiler(&self) -> Option<PathBuf> {
        let named = env::var_os(self.variable).map(PathBuf::from);
        let at_home = self.home.and_then(|(home, within)| Some(Path::new(&env::var_os(home)?).join(within)));
        let path = env::var_os("PATH").unwrap_or_default();
        let on_path = self.programs.iter().flat_map(|program| env::split_paths(&path).map(move |folder| folder.join(program)));
        named.into_iter().chain(at_home).chain(on_path).map(executable).find(|program| program.is_file())
    }

    /// How a compiler can be named.
    fn way_to_name_one(&self) -> String {
        self.home.map_or_else(|| self.variable.to_owned(), |(home, _)| format!("{} or {home}", self.variable))
    }

    /// The compiler that a later version's kernels would be built with, or how to name one.
    fn compiler_in_words(&self) -> String {
        self.compiler().map_or_else(
            || format!("no compiler for them was found either; {} would name it", self.way_to_name_one()),
            |compiler| format!("{} would be their compiler", compiler.display()),
        )
    }
}

/// Adds the system's suffix of programs.
fn executable(program: PathBuf) -> PathBuf {
    if env::consts::EXE_EXTENSION.is_empty() { program } else { program.with_extension(env::consts::EXE_EXTENSION) }
}

/// The `-gencode` arguments for a list of architectures, the lowest of which also gets its PTX.
fn architectures(list: &str) -> Result<Vec<String>, String> {
    let mut archs: Vec<u32> = Vec::new();
    for arch in list.split(',').map(str::trim).filter(|arch| !arch.is_empty()) {
        archs.push(arch.trim_start_matches("sm_").parse().map_err(|_| format!("{ARCHS}: \"{arch}\" is no architecture such as 86"))?);
    }
    archs.sort_unstable();
    archs.dedup();
    let Some(lowest) = archs.first().copied() else { return Err(format!("{ARCHS} lists no architecture; unset it for {DEFAULT_ARCHS}")) };
    Ok(archs
        .into_iter()
        .flat_map(|arch| {
            let images = if arch == lowest { format!("[sm_{arch},compute_{arch}]") } else { format!("sm_{arch}") };
            ["-gencode".to_owned(), format!("arch=compute_{arch},code={images}")]
        })
        .collect())
}

/// Compiles the image, or says why there is none.
fn compile_cuda(toolchain: &Toolchain, image: &Path) -> Result<(), String> {
    let Some(nvcc) = toolchain.compiler() else {
        return Err(format!("nvcc was found nowhere; {} names it", toolchain.way_to_name_one()));
    };
    let archs = architectures(&env::var(ARCHS).unwrap_or_else(|_| DEFAULT_ARCHS.to_owned()))?;
    let mut command = Command::new(&nvcc);
    // What is fused is written so in the source: a result must not depend on what the compiler finds worth fusing in one kernel or another.
    command.args(["-fatbin", "-O3", "-std=c++17", "-fmad=false", "-t", "0"]).args(archs);
    command.arg(Path::new(CUDA_SOURCES).join("ebbtide.cu")).arg("-o").arg(image);
    // The compiler takes a minute and more; Cargo asks again whenever a variable changes that may name another one.
    let (made_of, stamp) = (fingerprint(&command)?, image.with_extension("stamp"));
    if image.is_file() && fs::read_to_string(&stamp).is_ok_and(|stamp| stamp == made_of) {
        return Ok(());
    }
    let made = command.output().map_err(|error| format!("{} does not start: {error}", nvcc.display()))?;
    if !made.status.success() {
        let errors =
            String::from_utf8_lossy(&made.stderr).lines().filter(|line| line.contains("error")).take(8).collect::<Vec<_>>().join("; ");
        return Err(format!("{} failed ({}): {errors}", nvcc.display(), made.status));
    }
    fs::write(&stamp, made_of).map_err(|error| format!("{}: {error}", stamp.display()))
}

/// What an image depends on: the command and the sources.
fn fingerprint(command: &Command) -> Result<String, String> {
    let of_folder = |error| format!("{CUDA_SOURCES}: {error}");
    let mut paths = Vec::new();
    for entry in fs::read_dir(CUDA_SOURCES).map_err(of_folder)? {
        paths.push(entry.map_err(of_folder)?.path());
    }
    paths.sort();
    let mut hasher = DefaultHasher::new();
    for path in paths {
        fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?.hash(&mut hasher);
    }
    Ok(format!("{command:?} {:016x}", hasher.finish()))
}

/// The image of the `cuda` kernels, empty where they cannot be compiled.
fn cuda_image(toolchain: &Toolchain, required: bool) -> ExitCode {
    println!("cargo::rerun-if-changed={CUDA_SOURCES}");
    for variable in [ARCHS, "NVCC", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let image = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo names it")).join("ebbtide.fatbin");
    let Err(reason) = compile_cuda(toolchain, &image) else {
        // What a refusal on another card names.
        println!("cargo::rustc-env=EBBTIDE_BUILT_ARCHS={}", env::var(ARCHS).unwrap_or_else(|_| DEFAULT_ARCHS.to_owned()));
        return ExitCode::SUCCESS;
    };
    if required {
        println!("cargo::error={REQUIRE}=1, but the CUDA kernels cannot be built: {reason}");
        return ExitCode::FAILURE;
    }
    // An image of earlier on is not left to be taken for this build's.
    let _ = fs::remove_file(image.with_extension("stamp"));
    println!("cargo::warning=built without CUDA kernels, so that the program opens no CUDA device: {reason}");
    if let Err(error) = fs::write(&image, []) {
        println!("cargo::error={}: {error}", image.display());
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={REQUIRE}");
    let required = env::var_os(REQUIRE).is_some_and(|value| value == "1");
    match enabled() {
        Some(toolchain) if toolchain.feature == "cuda" => cuda_image(&toolchain, required),
        Some(toolchain) if required => {
            let Toolchain { feature, .. } = toolchain;
            let compiler = toolchain.compiler_in_words();
            println!(
                "cargo::error={REQUIRE}=1, but this version has no kernels for the feature `{feature}` ({compiler}). Unset the variable: \
                 the build then runs models on the host backend"
            );
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
