//! `ebbtide replay`: recorded requests again.

use std::fs::File;
use std::io::BufReader;

use super::Opener;
use super::interrupt::Interrupt;
use super::measure::{PageFile, Teller, result_of};
use super::session;
use crate::backend::Backend;
use crate::bench::Rig;
use crate::bench::about::About;
use crate::bench::replay::file::{self, Encoder, FileError, RecordedPrompt};
use crate::bench::replay::{self as again, Replay, ReplayError, ReplayRequest};
use crate::bench::replay_report::{self, ReplayReport};
use crate::cli::command::ReplayConfig;
use crate::cli::config::Config;
use crate::cli::exit::{Classified, CommandError, ExitStatus};
use crate::cli::{say, write_stdout};
use crate::model::{Model, ModelError};

impl Classified for FileError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Input
    }
}

impl Classified for ReplayError {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Engine(error) => error.exit_status(),
            // As of a prompt of `run` that the context does not hold.
            Self::TooLong { .. } => ExitStatus::Usage,
        }
    }
}

/// Runs the command.
///
/// # Errors
/// As the contract's exit codes say: 3 for the file of requests, 4 where no arm can be started.
pub fn replay<B: Backend>(replay: &ReplayConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let name = say::harmless(&replay.requests.display().to_string());
    let model = session::open_model_for(&replay.model, &replay.replay.base.drafts)?;
    let requests = requests(replay, &name, &model)?;
    session::warn_of_long_context(&model, replay.replay.base.ctx);
    let base = session::with_draft_vocab(&replay.replay.base, &model)?;
    let asked = Replay { base, ..replay.replay.clone() };
    let page = PageFile::create(replay.html.as_deref(), &model)?;
    let about = About::new(&model, &asked.base);
    let mut teller = Teller::new(config.verbose);
    let mut rig = Rig {
        model: &model,
        open: &|settings| open(settings),
        is_interrupted: &|| interrupt.is_set(),
        tell: &mut |told| teller.tell(told),
    };
    let result = match again::replay(&asked, &requests, &mut rig) {
        Err(error @ ReplayError::TooLong { .. }) => return Err(CommandError::from(error).context(name)),
        result => result?,
    };
    teller.finish(&result.ended);
    if config.json {
        let report = ReplayReport::new(&about, &name, &asked, &result);
        write_stdout(&format!("{}\n", serde_json::to_string(&report).expect("numbers and text are JSON")))?;
    } else {
        write_stdout(&say::harmless(&replay_report::text(&about, &asked, &result)))?;
    }
    if let Some(page) = page {
        page.finish(&replay_report::page(&about, &name, &asked, &result))?;
    }
    let nothing = result.arms.iter().all(|arm| arm.refused.is_some());
    result_of(result.ended)?;
    if nothing {
        return Err(CommandError::new(ExitStatus::Device, anyhow::anyhow!("no arm could be started: the report says why")));
    }
    Ok(())
}

/// The file's requests as tokens. A model whose tokenizer cannot be had still replays token numbers.
fn requests(replay: &ReplayConfig, name: &str, model: &Model) -> Result<Vec<ReplayRequest>, CommandError> {
    let read_error = |source| FileError::Read { file: name.to_owned(), source };
    let recorded = file::parse(BufReader::new(File::open(&replay.requests).map_err(read_error)?), name)?;
    let needs_tokenizer = recorded.iter().any(|request| !matches!(request.prompt, RecordedPrompt::Tokens(_)));
    let needs_template = recorded.iter().any(|request| matches!(request.prompt, RecordedPrompt::Messages(_)));
    let tokenizer = if needs_tokenizer { Some(model.tokenizer()?) } else { None };
    let template = model.file.metadata().string_opt("tokenizer.chat_template").map_err(ModelError::from)?.filter(|_| needs_template);
    let encoder = tokenizer.as_ref().map(|tokenizer| Encoder::new(tokenizer, template)).transpose()?;
    let mut requests = Vec::with_capacity(recorded.len());
    for request in recorded {
        let prompt = file::tokens(&request, encoder.as_ref(), model.shape.n_vocab, name)?;
        let file::Recorded { line, id, tag, output_tokens, .. } = request;
        requests.push(ReplayRequest { line, id, tag, prompt, output_tokens });
    }
    Ok(requests)
}
