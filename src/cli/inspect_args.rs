//! Flags of the commands that look at the machine and at the settings: `devices`, `doctor` and `config`.

use clap::Args;

use super::args::{EngineArgs, ModelArgs, OutputArgs, SamplingArgs};
use super::serve_args::ListenArgs;

/// `ebbtide devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `ebbtide doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The model; without one what depends on it is left out.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `ebbtide config`: every flag that a file is likely to set.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Sampling settings.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Settings of the server.
    #[command(flatten)]
    pub listen: ListenArgs,
}
