//! The `ebbtide` program: picks the build's backend, runs a command and sets the exit code.

use ebbtide::backend::BackendError;
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::settings::EngineSettings;

/// Opens the embedded backend; the only one that this version has.
fn open(settings: &EngineSettings) -> Result<HostBackend, BackendError> {
    HostBackend::open(&HostConfig::new(settings.vram, settings.threads as usize))
}

fn main() -> std::process::ExitCode {
    ebbtide::cli::main(open)
}
