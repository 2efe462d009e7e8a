//! The `ebbtide` program: picks the build's backend, runs a command and sets the exit code.

use std::sync::Once;

use ebbtide::backend::BackendError;
use ebbtide::backends::GPU_FEATURE;
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::settings::EngineSettings;

/// Opens the embedded backend, the only one that this version has. A user who built for a card is told so, once, before any
/// figure can be taken for the card's.
fn open(settings: &EngineSettings) -> Result<HostBackend, BackendError> {
    static TOLD: Once = Once::new();
    if let Some(feature) = GPU_FEATURE {
        #[allow(clippy::print_stderr, reason = "the program speaks to its user here")]
        TOLD.call_once(|| eprintln!("note: {}", feature.notice()));
    }
    HostBackend::open(&HostConfig::new(settings.vram, settings.threads as usize))
}

fn main() -> std::process::ExitCode {
    ebbtide::cli::main(open)
}
