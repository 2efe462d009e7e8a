//! The command line: from the argument list to a checked [`config::Config`], and from errors to exit codes.
//!
//! Two layers: flags exactly as typed (`args`, joined with environment and file by `sources`), then flags with meaning (`config`).
//! Results go to stdout, everything else to stderr. Only `commands` reaches the engine, and the device
//! through the trait alone; the layers above it know plain settings ([`crate::settings`]).

pub mod args;
pub mod command;
pub mod commands;
pub mod config;
pub mod draft_args;
mod draft_config;
pub mod exit;
pub mod file;
pub mod inspect_args;
pub mod lists;
pub mod measure_args;
mod measure_config;
pub mod nearest;
pub mod not_yet;
pub mod npy;
pub mod part_file;
pub mod progress;
pub mod refusals;
pub mod say;
#[cfg(test)]
pub mod scratch;
pub mod serve_args;
mod serve_config;
pub mod show;
pub mod sources;
pub mod text_args;
pub mod tokens;

use std::io::Write;
use std::process::ExitCode;

use commands::Opener;
use config::Config;
use exit::{Classified, CommandError, ExitStatus};
use file::FileError;
use sources::{Resolved, SourceError};

use crate::backend::Backend;
use crate::backend::survey::Surveyor;
use crate::settings::DeviceSetting;

/// Runs the program on a card, where the build has any and the user did not ask for the host, else on the host. `survey` says what the
/// build finds.
#[must_use]
pub fn main<Host: Backend, Card: Backend>(host: Opener<Host>, card: Option<Opener<Card>>, survey: Surveyor) -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let environment = std::env::vars_os().collect();
    let status = match sources::resolve(&arguments, &environment) {
        Ok(resolved) => checked_and_run(resolved, host, card, survey),
        Err(error) => {
            report(&error);
            error.exit_status()
        }
    };
    status.into()
}

/// Help and the parser's own faults print themselves, coloured and with usage; our messages are lines.
fn report(error: &SourceError) {
    match error {
        // Nobody is left to tell where stdout or stderr is closed.
        SourceError::Arguments(error) => drop(error.print()),
        SourceError::File(FileError::Entries(faults)) | SourceError::Values(faults) => report_faults(faults),
        SourceError::LaterCommand(_) | SourceError::File(_) => say::line(format_args!("error: {error}")),
    }
}

fn report_faults(faults: &[String]) {
    match faults {
        [fault] => say::line(format_args!("error: {fault}")),
        _ => say::line(format_args!("error: {} settings cannot be carried out\n  {}", faults.len(), faults.join("\n  "))),
    }
}

fn checked_and_run<Host: Backend, Card: Backend>(
    resolved: Resolved,
    host: Opener<Host>,
    card: Option<Opener<Card>>,
    survey: Surveyor,
) -> ExitStatus {
    let config = match config::check(resolved) {
        Ok(config) => config,
        Err(refused) => {
            report_faults(&refused.0);
            return refused.exit_status();
        }
    };
    // A worker's settings are those of its server, which has warned.
    let warnings = if matches!(config.command, command::Command::Worker(_)) { &[][..] } else { &config.warnings };
    for warning in warnings {
        say::line(format_args!("warning: {warning}"));
    }
    let done = match card.filter(|_| config.command.device() != Some(&DeviceSetting::Host)) {
        Some(card) => commands::carry_out(&config, card, survey),
        None => commands::carry_out(&config, host, survey),
    };
    match done {
        Ok(()) => ExitStatus::Done,
        Err(error) => {
            say::line(format_args!("error: {error}"));
            error.status()
        }
    }
}

fn show_config(config: &Config) -> Result<(), CommandError> {
    let file = config.file.as_deref();
    let text = if config.json { format!("{:#}\n", show::as_json(&config.settings, file)) } else { show::as_toml(&config.settings, file) };
    write_stdout(&text)
}

/// Writes a result, or a piece of one, and hands it on at once.
///
/// # Errors
/// Where stdout takes nothing more, a reader that left included: a command that writes for nobody should end.
pub fn write_stdout(text: &str) -> Result<(), CommandError> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| CommandError::new(ExitStatus::Failed, error).context("cannot write to stdout"))
}
