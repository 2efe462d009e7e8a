//! The command line: from the argument list to a checked [`config::Config`], and from errors to exit codes.
//!
//! Two layers: flags exactly as typed (`args`, joined with environment and file by `sources`), then flags with meaning (`config`).
//! Results go to stdout, everything else to stderr. This module reaches the engine only through plain settings
//! ([`crate::settings`]); it knows no backend and no tensor.
#![allow(clippy::print_stderr, reason = "the program speaks to its user here; libraries below do not")]

pub mod args;
pub mod config;
pub mod exit;
pub mod file;
pub mod nearest;
pub mod not_yet;
pub mod npy;
pub mod progress;
#[cfg(test)]
pub mod scratch;
pub mod show;
pub mod sources;
pub mod tokens;

use std::io::Write;
use std::process::ExitCode;

use config::{Command, Config};
use exit::{Classified, CommandError, ExitStatus};
use sources::{Resolved, SourceError};

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    let environment = std::env::vars_os().collect();
    let status = match sources::resolve(&arguments, &environment) {
        Ok(resolved) => checked_and_run(resolved),
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
        SourceError::LaterCommand(_) | SourceError::File(_) | SourceError::Values(_) => report_lines(&error.to_string()),
    }
}

fn report_lines(text: &str) {
    match text.split_once('\n') {
        None => eprintln!("error: {text}"),
        Some(_) => eprintln!("error: {} settings cannot be carried out\n  {}", text.lines().count(), text.replace('\n', "\n  ")),
    }
}

fn checked_and_run(resolved: Resolved) -> ExitStatus {
    let config = match config::check(resolved) {
        Ok(config) => config,
        Err(refused) => {
            report_lines(&refused.to_string());
            return refused.exit_status();
        }
    };
    for warning in &config.warnings {
        eprintln!("warning: {warning}");
    }
    match run(&config) {
        Ok(()) => ExitStatus::Done,
        Err(error) => {
            eprintln!("error: {error}");
            error.status()
        }
    }
}

/// Carries out a command.
fn run(config: &Config) -> Result<(), CommandError> {
    match &config.command {
        Command::ShowConfig => show_config(config),
        _ => Err(CommandError::new(ExitStatus::Failed, anyhow::anyhow!("this command is not wired to the engine"))),
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
