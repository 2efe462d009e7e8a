//! `ebbtide run`: reads a prompt and writes on.

use std::ops::ControlFlow;

use super::Opener;
use super::interrupt::Interrupt;
use super::report::{RunReport, summary};
use super::session;
use crate::backend::Backend;
use crate::cli::command::RunConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::progress::Progress;
use crate::cli::{say, write_stdout};
use crate::engine::{Engine, Event, Finish, Outcome, Request, check_prompt};
use crate::settings::ContextSetting;
use crate::tokenizer::{ControlText, StreamDecoder, Tokenizer};

/// Runs the command.
///
/// # Errors
/// As the contract's exit codes say; 130 where the user stopped it, with the text so far written.
pub fn run<B: Backend>(run: &RunConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let model = session::open_model_for(&run.model, &run.engine.drafts)?;
    let tokenizer = model.tokenizer()?;
    let prompt = session::prompt_tokens(&run.prompt, run.chat, &model, &tokenizer)?;
    // Before the start, which may take minutes. What `auto` comes to is known only after it; then the engine looks once more.
    let ctx_tokens_max = match run.engine.ctx {
        ContextSetting::Tokens(tokens) => tokens,
        ContextSetting::Auto => model.shape.n_ctx_train,
    };
    check_prompt(&prompt, ctx_tokens_max, model.shape.n_vocab)?;
    let mut engine = session::start(&model, &run.engine, config, open)?;
    let request = Request {
        prompt,
        tokens_max: run.tokens_max.map_or(usize::MAX, |tokens| tokens as usize),
        sampling: session::sampling(&run.sampling, model.file.metadata())?,
        stop_tokens: if run.ignore_eos { Vec::new() } else { tokenizer.end_tokens().to_vec() },
        logprobs: None,
        constraint: None,
    };
    let mut streamed = StreamedText::new(&tokenizer, !config.json);
    let outcome = generate(&mut engine, &request, &interrupt, &mut streamed);
    // Also where the request failed or was stopped: what was learned until then holds.
    engine.save_expert_profile();
    let outcome = outcome?;
    let text = streamed.finish()?;
    session::print_notices(&mut engine);
    if config.json {
        let report = serde_json::to_string(&RunReport::new(&outcome, &text)).expect("numbers and text are JSON");
        write_stdout(&format!("{report}\n"))?;
    } else {
        write_stdout("\n")?;
        say::line(summary(&outcome));
    }
    if outcome.finish == Finish::Cancelled {
        return Err(CommandError::new(ExitStatus::Interrupted, anyhow::anyhow!("interrupted; the text so far is complete")));
    }
    Ok(())
}

/// Text on its way to stdout and to the report; never half a character.
pub struct StreamedText<'a> {
    decoder: StreamDecoder<&'a Tokenizer>,
    text: String,
    to_stdout: bool,
    failed: Option<CommandError>,
}

impl<'a> StreamedText<'a> {
    /// Starts a text; `to_stdout` writes each piece at once.
    pub fn new(tokenizer: &'a Tokenizer, to_stdout: bool) -> Self {
        Self { decoder: StreamDecoder::new(tokenizer, ControlText::Hide), text: String::new(), to_stdout, failed: None }
    }

    /// Takes a token; asks to stop where nobody reads any more.
    fn push(&mut self, token: crate::units::TokenId) -> ControlFlow<()> {
        let piece = self.decoder.push(token);
        self.emit(&piece)
    }

    fn emit(&mut self, piece: &str) -> ControlFlow<()> {
        self.text.push_str(piece);
        if self.to_stdout
            && let Err(error) = write_stdout(piece)
        {
            self.failed = Some(error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }

    /// Ends the text and returns all of it.
    ///
    /// # Errors
    /// Where stdout failed on the way.
    pub fn finish(self) -> Result<String, CommandError> {
        let Self { decoder, mut text, to_stdout, failed } = self;
        if let Some(error) = failed {
            return Err(error);
        }
        let rest = decoder.finish();
        text.push_str(&rest);
        if to_stdout {
            write_stdout(&rest)?;
        }
        Ok(text)
    }
}

/// Generates with a progress bar for the prompt and streamed text.
///
/// # Errors
/// The engine's.
pub fn generate<B: Backend>(
    engine: &mut Engine<B>,
    request: &Request,
    interrupt: &Interrupt,
    streamed: &mut StreamedText<'_>,
) -> Result<Outcome, CommandError> {
    let mut reading = None;
    let outcome = engine.generate(request, &mut |event| {
        match event {
            Event::Reading { done, total } => {
                reading.get_or_insert_with(|| Progress::new("reading", total)).set(done);
            }
            Event::Logprobs(_) => {}
            Event::Token(token) => {
                if let Some(reading) = reading.take() {
                    reading.finish();
                }
                if streamed.push(token).is_break() {
                    return ControlFlow::Break(());
                }
            }
        }
        interrupt.control()
    });
    Ok(outcome?)
}
