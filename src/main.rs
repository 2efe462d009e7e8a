//! The `ebbtide` program: picks the build's backends, runs a command and sets the exit code.

use ebbtide::backend::BackendError;
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::settings::EngineSettings;

/// Opens the embedded backend. A user who built for a device whose kernels this version lacks is told so, once, before any figure can be
/// taken for the device's.
fn open_host(settings: &EngineSettings) -> Result<HostBackend, BackendError> {
    #[cfg(not(feature = "cuda"))]
    {
        static TOLD: std::sync::Once = std::sync::Once::new();
        if let Some(feature) = ebbtide::backends::GPU_FEATURE {
            #[allow(clippy::print_stderr, reason = "the program speaks to its user here")]
            TOLD.call_once(|| eprintln!("note: {}", feature.notice()));
        }
    }
    HostBackend::open(&HostConfig::new(settings.vram, settings.threads as usize))
}

#[cfg(feature = "cuda")]
fn main() -> std::process::ExitCode {
    use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
    use ebbtide::cli::commands::Opener;
    use ebbtide::settings::DeviceSetting;

    let open_card: Opener<CudaBackend> = |settings| {
        let choice = match &settings.device {
            DeviceSetting::Card(card) => card.parse().unwrap_or_else(|never| match never {}),
            DeviceSetting::Auto | DeviceSetting::Host => DeviceChoice::Best,
        };
        CudaBackend::open(&choice)
    };
    ebbtide::cli::main(open_host, Some(open_card), ebbtide::backends::survey)
}

#[cfg(not(feature = "cuda"))]
fn main() -> std::process::ExitCode {
    ebbtide::cli::main(open_host, None::<ebbtide::cli::commands::Opener<HostBackend>>, ebbtide::backends::survey)
}
