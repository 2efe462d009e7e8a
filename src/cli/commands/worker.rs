//! `ebbtide worker`: the process behind `serve` that owns the device. Speaks frames on stdin and stdout, to nobody but its server.

use std::sync::Arc;

use super::Opener;
use super::session;
use crate::backend::Backend;
use crate::cli::command::WorkerConfig;
use crate::cli::config::Config;
use crate::cli::exit::{Classified, CommandError, ExitStatus};
use crate::cli::say;
use crate::worker::protocol::{FrameError, FromWorker};
use crate::worker::{Channel, LoadProgress, WorkerError, answer_requests};

impl Classified for WorkerError {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Frame(_) => ExitStatus::Failed,
            Self::Poisoned(_) => ExitStatus::Device,
        }
    }
}

impl Classified for FrameError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Failed
    }
}

/// Runs the command.
///
/// # Errors
/// As those of `run` for a start that fails, which the server is told, too; 4 where the device is lost.
pub fn worker<B: Backend>(worker: &WorkerConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    // A service manager signals all processes of a service; this one ends with its server, which lets it finish.
    if let Err(error) = ctrlc::set_handler(|| ()) {
        say::line(format_args!("warning: signals end the worker before its server does: {error}"));
    }
    let gone = || std::process::exit(ExitStatus::Failed as i32);
    let mut channel = Channel::open(std::io::stdin(), std::io::stdout(), gone)?;
    let mut progress = LoadProgress::new();
    let started = session::open_model_for(&worker.model, &worker.engine.drafts).and_then(|model| {
        let tokenizer = Arc::new(model.tokenizer()?);
        let engine = session::start_telling(&model, &worker.engine, config, open, &mut |done, total| {
            progress.step(&mut channel, done.0, total.0);
        })?;
        Ok((engine, tokenizer))
    });
    match started {
        Ok((mut engine, tokenizer)) => Ok(answer_requests(&mut engine, &tokenizer, &mut channel)?),
        Err(error) => {
            channel.tell(&FromWorker::StartFailed { exit_status: error.status() as u8, message: error.to_string() })?;
            // The server says it to the user.
            std::process::exit(error.status() as i32)
        }
    }
}
