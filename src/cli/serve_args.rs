//! Flags of `serve` and of the worker behind it, exactly as typed: see [`super::args`] for the rest.

use clap::Args;

use super::args::{EngineArgs, ModelArgs, SWITCH, SamplingArgs, switch, whole};
use crate::settings::WholeNumber;

const SERVER: &str = "Server";

/// `ebbtide serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where and to whom.
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Sampling settings of requests that have none.
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Where a server listens and who may ask.
#[derive(Debug, Args)]
#[command(next_help_heading = SERVER)]
pub struct ListenArgs {
    /// The address to listen at; one that others can reach needs --api-key or --no-auth
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: String,
    /// The port; 0 takes any that is free
    #[arg(long, value_name = "N", default_value = "8080", value_parser = whole(PORT))]
    pub port: u64,
    /// Demand one of these keys, split by commas; better set as EBBTIDE_API_KEY, which other users do not see
    #[arg(long, value_name = "KEY,...")]
    pub api_key: Option<String>,
    /// Let everybody in who can reach the address
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub no_auth: bool,
    /// Names in the Host header to answer to, beside addresses and localhost
    #[arg(long, value_name = "NAME,...")]
    pub allow_host: Option<String>,
    /// Origins of web pages that may ask, such as `https://chat.example`; * is all of them and needs a key
    #[arg(long, value_name = "ORIGIN,...")]
    pub cors_origin: Option<String>,
    /// Answers that may wait for the engine; more are refused
    #[arg(long, value_name = "N", default_value = "128", value_parser = whole(QUEUE))]
    pub queue: u64,
}

/// `ebbtide worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

const PORT: WholeNumber = WholeNumber { form: "a whole number", unit: "(a port)", least: 0, most: u16::MAX as u64 };
const QUEUE: WholeNumber = WholeNumber { form: "a whole number", unit: "answers", least: 1, most: 65536 };
