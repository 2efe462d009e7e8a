//! `ebbtide serve`: binds the port, then opens the model and starts the worker behind it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::interrupt::Interrupt;
use super::session;
use crate::cli::args;
use crate::cli::command::ServeConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::say;
use crate::cli::sources::{Settings, Source, variable_of};
use crate::model::ModelError;
use crate::server::{ServeError, ServeOptions, ServedModel, Stop, serve as run_server};
use crate::settings::{ContextSetting, DraftSettings, SamplingSettings};
use crate::tokenizer::ChatTemplate;
use crate::worker::supervisor::WorkerCommand;

/// A file without settings: a worker is told all that it needs, and must not read what has changed since.
const NO_SETTINGS: &str = "/dev/null";

/// Runs the command until a signal.
///
/// # Errors
/// Exit code 1 where the port cannot be had; what opening the model or starting the engine says.
pub fn serve(serve: &ServeConfig, config: &Config) -> Result<(), CommandError> {
    let address = SocketAddr::new(serve.host, serve.port);
    let listener = TcpListener::bind(address).map_err(|error| cannot_listen(address, &error))?;
    let bound = listener.local_addr().unwrap_or(address);
    say::line(format_args!("listening at http://{bound}; loading {}", serve.model.display()));
    let stop: Arc<Mutex<Option<Stop>>> = Arc::default();
    let at_signal = Arc::clone(&stop);
    let interrupt = Interrupt::listen_and(move || {
        say::line("stopping");
        if let Some(stop) = &*at_signal.lock().unwrap_or_else(PoisonError::into_inner) {
            stop();
        }
    });
    let options = ServeOptions {
        listener,
        worker: worker_command(&config.settings)?,
        access: serve.access.clone(),
        queue_max: serve.queue_max,
        log: Arc::new(|line| say::line(line)),
        on_stoppable: Box::new(move |now| {
            let mut stop = stop.lock().unwrap_or_else(PoisonError::into_inner);
            let now = stop.insert(now);
            // A signal may have come before there was anything to stop.
            if interrupt.is_set() {
                now();
            }
        }),
    };
    let (model, drafts) = (serve.model.clone(), serve.engine.drafts.clone());
    let (sampling, ctx) = (serve.sampling.clone(), serve.engine.ctx);
    run_server(options, move || open(model, &drafts, &sampling, ctx)).map_err(|error| match error {
        ServeError::Open(error) => error,
        ServeError::StartFailed { exit_status, message } => CommandError::new(status_of(exit_status), anyhow::anyhow!(message)),
        error @ ServeError::NotBuilt => CommandError::new(ExitStatus::Usage, anyhow::anyhow!("{error}")),
        error @ ServeError::System(_) => CommandError::new(ExitStatus::Failed, anyhow::anyhow!("{error}")),
    })
}

fn cannot_listen(address: SocketAddr, error: &std::io::Error) -> CommandError {
    let way_out = match error.kind() {
        ErrorKind::AddrInUse => "another program listens there, maybe an Ebbtide of yours: stop it, or choose another --port",
        ErrorKind::AddrNotAvailable => "this machine does not have that address: choose another --host",
        ErrorKind::PermissionDenied => "the system keeps that port to itself: choose a --port of 1024 or more",
        _ => "choose another --host or --port",
    };
    CommandError::new(ExitStatus::Failed, anyhow::anyhow!("cannot listen at {address} ({error}): {way_out}"))
}

fn status_of(code: u8) -> ExitStatus {
    [ExitStatus::Usage, ExitStatus::Input, ExitStatus::Device]
        .into_iter()
        .find(|status| *status as u8 == code)
        .unwrap_or(ExitStatus::Failed)
}

/// Opens what the server needs of a model.
fn open(path: PathBuf, drafts: &DraftSettings, sampling: &SamplingSettings, ctx: ContextSetting) -> Result<ServedModel, CommandError> {
    let model = session::open_model_for(&path, drafts)?;
    let metadata = model.file.metadata();
    let template = metadata.string_opt("tokenizer.chat_template").map_err(ModelError::from)?;
    let template = match template.map(ChatTemplate::new).transpose() {
        Ok(template) => template,
        Err(error) => {
            say::line(format_args!("warning: the model's chat template cannot be used, so only /v1/completions works: {error}"));
            None
        }
    };
    Ok(ServedModel {
        name: model.name(),
        architecture: model.shape.architecture.to_string(),
        tokenizer: model.tokenizer()?,
        template,
        sampling: session::sampling(sampling, metadata)?,
        seed: sampling.seed,
        ctx_tokens_max: match ctx {
            ContextSetting::Tokens(tokens) => tokens,
            ContextSetting::Auto => model.shape.n_ctx_train,
        },
        n_vocab: model.shape.n_vocab,
        opened_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
    })
}

/// The same program as a worker, with all settings that were given to us and that it has.
fn worker_command(settings: &Settings) -> Result<WorkerCommand, CommandError> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| CommandError::new(ExitStatus::Failed, error).context("cannot find this very program"))?;
    let command = args::command();
    let worker = command.find_subcommand("worker").expect("it is defined");
    let mut arguments = vec![OsString::from("worker")];
    for setting in &settings.0 {
        let known = worker.get_arguments().any(|arg| arg.get_long() == Some(setting.name.as_str()));
        if !known || matches!(setting.name.as_str(), "config" | "json") || setting.source == Source::Default {
            continue;
        }
        if let Some(value) = &setting.value {
            let mut argument = OsString::from(format!("--{}=", setting.name));
            argument.push(value);
            arguments.push(argument);
        }
    }
    // Not a second time, and the key not at all.
    let mut environment: Vec<_> = settings.0.iter().map(|setting| (variable_of(&setting.name).into(), None)).collect();
    environment.push(("EBBTIDE_CONFIG".into(), Some(NO_SETTINGS.into())));
    Ok(WorkerCommand { program, arguments, environment })
}
