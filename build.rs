//! Builds the kernels of the enabled GPU feature. This version has none, so what is left is to say no to a build that must have them.
//!
//! `EBBTIDE_REQUIRE_KERNELS=1` makes missing kernels an error; releases and continuous integration set it. Nothing else is read,
//! run or linked: every feature builds on a machine without its toolkit.
#![allow(clippy::print_stdout, reason = "Cargo reads a build script's stdout")]

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const REQUIRE: &str = "EBBTIDE_REQUIRE_KERNELS";

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

    /// The compiler that a later version's kernels would be built with, or how to name one.
    fn compiler_in_words(&self) -> String {
        let home = self.home.map_or(String::new(), |(home, _)| format!(" or {home}"));
        self.compiler().map_or_else(
            || format!("no compiler for them was found either; {}{home} would name it", self.variable),
            |compiler| format!("{} would be their compiler", compiler.display()),
        )
    }
}

/// Adds the system's suffix of programs.
fn executable(program: PathBuf) -> PathBuf {
    if env::consts::EXE_EXTENSION.is_empty() { program } else { program.with_extension(env::consts::EXE_EXTENSION) }
}

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={REQUIRE}");
    let required = env::var_os(REQUIRE).is_some_and(|value| value == "1");
    match enabled() {
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
