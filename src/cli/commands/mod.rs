//! What each command does, once its call is checked.
//!
//! Commands reach the device through an [`Opener`] alone, so this module knows the trait and no backend.

mod bench;
mod demo;
mod devices;
mod doctor;
mod interrupt;
mod logits;
mod measure;
mod perplexity;
mod plan;
mod replay;
mod report;
mod run;
mod serve;
mod session;
mod text;
mod worker;

use super::command::Command;
use super::config::Config;
use super::exit::CommandError;
use crate::backend::survey::Surveyor;
use crate::backend::{Backend, BackendError};
use crate::settings::EngineSettings;

/// Opens the build's device with the given settings.
pub type Opener<B> = fn(&EngineSettings) -> Result<B, BackendError>;

/// Carries out a command other than `config`.
///
/// # Errors
/// Whatever ended it early, with the exit code.
pub fn carry_out<B: Backend>(config: &Config, open: Opener<B>, survey: Surveyor) -> Result<(), CommandError> {
    match &config.command {
        Command::Demo(demo) => demo::demo(demo, config, open),
        Command::Run(run) => run::run(run, config, open),
        Command::Plan(plan) => plan::plan(plan, config, open),
        Command::Logits(logits) => logits::logits(logits, config, open),
        Command::Perplexity(perplexity) => perplexity::perplexity(perplexity, config, open),
        Command::Bench(bench) => bench::bench(bench, config, open),
        Command::Replay(replay) => replay::replay(replay, config, open),
        Command::Serve(serve) => serve::serve(serve, config),
        Command::Worker(worker) => worker::worker(worker, config, open),
        Command::Tokenize(tokenize) => text::tokenize(tokenize, config),
        Command::Detokenize(detokenize) => text::detokenize(detokenize, config),
        Command::Devices => devices::devices(config, survey),
        Command::Doctor(doctor) => doctor::doctor(doctor, config, open, survey),
        Command::ShowConfig => super::show_config(config),
    }
}
