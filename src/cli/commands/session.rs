//! What commands that run a model share: opening it, starting an engine, sampling defaults, errors with codes.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;

use super::Opener;
use crate::backend::Backend;
use crate::cli::command::PromptSource;
use crate::cli::config::Config;
use crate::cli::exit::{Classified, CommandError, ExitStatus};
use crate::cli::progress::Progress;
use crate::cli::{say, tokens};
use crate::engine::sampler::Sampling;
use crate::engine::{Engine, EngineError};
use crate::gguf::Metadata;
use crate::model::{Model, ModelError};
use crate::settings::{ContextSetting, DraftSetting, DraftSettings, EngineSettings, SamplingSettings, TokenSource};
use crate::tokenizer::{ChatError, ChatTemplate, Message, RenderOptions, Specials, Tokenizer, TokenizerError};
use crate::units::{Bytes, TokenId};

/// Largest prompt or corpus file that is read.
const TEXT_BYTES_MAX: u64 = 1 << 30;

impl Classified for ModelError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Input
    }
}

impl Classified for TokenizerError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Input
    }
}

impl Classified for ChatError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Input
    }
}

impl Classified for EngineError {
    fn exit_status(&self) -> ExitStatus {
        match self {
            Self::Plan(_) | Self::Phase(_) | Self::Backend(_) | Self::NotRestored { .. } | Self::Store(_) | Self::NoLogitsRoom { .. } => {
                ExitStatus::Device
            }
            Self::PromptTooLong { .. } | Self::EmptyPrompt | Self::BadToken { .. } | Self::Constraint(_) => ExitStatus::Usage,
            Self::Model(_) | Self::Quant(_) | Self::NotFinite { .. } => ExitStatus::Input,
            Self::BadWindow { .. } | Self::WindowHashes(_) => ExitStatus::Failed,
        }
    }
}

/// Opens a model.
///
/// # Errors
/// Exit code 3 for anything wrong with the file.
pub fn open_model(path: &Path) -> Result<Arc<Model>, CommandError> {
    Ok(Arc::new(Model::open(path)?))
}

/// As [`open_model`], without a draft layer where nobody drafts by it: its memory is better used for experts.
///
/// # Errors
/// As [`open_model`].
pub fn open_model_for(path: &Path, drafts: &DraftSettings) -> Result<Arc<Model>, CommandError> {
    let model = Model::open(path)?;
    if drafts.source == DraftSetting::Mtp && drafts.uses_mtp() && !model.shape.has_draft_layer {
        let name = model.name();
        say::line(format_args!(
            "warning: --draft mtp: {name} has no draft layer, so nothing is drafted; --draft lookup drafts from the text"
        ));
    }
    Ok(Arc::new(if drafts.uses_mtp() { model } else { model.without_draft_layer()? }))
}

/// Plans, loads and reports on stderr.
///
/// # Errors
/// Exit code 4 where the device or its memory is at fault.
pub fn start<B: Backend>(
    model: &Arc<Model>,
    settings: &EngineSettings,
    config: &Config,
    open: Opener<B>,
) -> Result<Engine<B>, CommandError> {
    let mut progress = None;
    let engine = start_telling(model, settings, config, open, &mut |done, total| {
        let bar = progress.get_or_insert_with(|| if config.verbose { Progress::new("loading", total.0) } else { Progress::quiet() });
        bar.set(done.0);
    })?;
    if let Some(progress) = progress {
        progress.finish();
    }
    Ok(engine)
}

/// As [`start`], with the bytes loaded, of all, told to `on_progress`.
///
/// # Errors
/// As [`start`].
pub fn start_telling<B: Backend>(
    model: &Arc<Model>,
    settings: &EngineSettings,
    config: &Config,
    open: Opener<B>,
    on_progress: &mut dyn FnMut(Bytes, Bytes),
) -> Result<Engine<B>, CommandError> {
    warn_of_long_context(model, settings.ctx);
    // Before the start, which may take minutes.
    let settings = &with_draft_vocab(settings, model)?;
    let hashes = settings.window_hashes.as_deref().map(|path| create_hashes(path, model)).transpose()?;
    let backend = open(settings).map_err(EngineError::from)?;
    let mut engine = Engine::start(backend, Arc::clone(model), settings, on_progress)?;
    if let Some(hashes) = hashes {
        engine.hash_windows(Box::new(hashes))?;
    }
    if config.verbose {
        say::line(engine.plan());
    }
    print_notices(&mut engine);
    Ok(engine)
}

/// The settings with the tokens of `--draft-vocab` in place of their file, ascending and each once; without either where the draft layer
/// does not draft.
///
/// # Errors
/// Exit code 3 where the file cannot be read, or holds anything but tokens of the model, or none.
pub fn with_draft_vocab(settings: &EngineSettings, model: &Model) -> Result<EngineSettings, CommandError> {
    let mut settings = settings.clone();
    let source = settings.drafts.vocab.take().filter(|_| settings.drafts.uses_mtp());
    if let Some(source) = source {
        let mut vocab = tokens::read(&source).map_err(|error| CommandError::from(error).context("--draft-vocab"))?;
        vocab.sort_unstable();
        vocab.dedup();
        let n_vocab = model.shape.n_vocab;
        if let Some(token) = vocab.last().filter(|&&token| token >= n_vocab) {
            let way_out = "Take the list of this very model";
            let refused = anyhow::anyhow!("--draft-vocab: token {token} is none of the model, which has {n_vocab}. {way_out}");
            return Err(CommandError::new(ExitStatus::Input, refused));
        }
        settings.drafts.vocab = Some(TokenSource::List(vocab));
    }
    Ok(settings)
}

/// Warns where a context is asked for that the model was not made for.
pub fn warn_of_long_context(model: &Model, ctx: ContextSetting) {
    if let ContextSetting::Tokens(asked) = ctx
        && asked > model.shape.n_ctx_train
    {
        say::line(format_args!(
            "warning: --ctx {asked} is above the model's own context of {}: quality may suffer past it",
            model.shape.n_ctx_train
        ));
    }
}

fn create_hashes(path: &Path, model: &Model) -> Result<File, CommandError> {
    refuse_to_overwrite("--window-hashes", path, model)?;
    let refused = |error| anyhow::anyhow!("--window-hashes: cannot write {}: {error}. Name a file that can be written", path.display());
    File::create(path).map_err(|error| CommandError::new(ExitStatus::Usage, refused(error)))
}

/// Refuses to write to a file that the model is read from.
///
/// # Errors
/// Exit code 2.
pub fn refuse_to_overwrite(flag: &str, path: &Path, model: &Model) -> Result<(), CommandError> {
    let Ok(target) = path.canonicalize() else { return Ok(()) };
    if model.file.paths().iter().any(|source| source.canonicalize().is_ok_and(|source| source == target)) {
        let refused = anyhow::anyhow!("{flag}: {} is the model itself. Name another file", path.display());
        return Err(CommandError::new(ExitStatus::Usage, refused));
    }
    Ok(())
}

/// Whether two names lead to one file, also where it is not there yet.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        path.canonicalize().ok().or_else(|| {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            Some(folder.canonicalize().ok()?.join(path.file_name()?))
        })
    };
    one == other || place(one).is_some_and(|one| place(other) == Some(one))
}

/// Prints what the engine has to say.
pub fn print_notices<B: Backend>(engine: &mut Engine<B>) {
    for notice in engine.take_notices() {
        say::line(format_args!("note: {notice}"));
    }
}

/// Sampling as set, else as the file says, else the engine's own.
///
/// # Errors
/// Where the file's values have a wrong type.
pub fn sampling(settings: &SamplingSettings, metadata: &Metadata) -> Result<Sampling, CommandError> {
    let float = |key: &str| metadata.f32_opt(&format!("general.sampling.{key}")).map_err(ModelError::from);
    let count = |key: &str| metadata.u32_opt(&format!("general.sampling.{key}")).map_err(ModelError::from);
    let own = Sampling::default();
    Ok(Sampling {
        temperature: settings.temperature.or(float("temp")?).unwrap_or(own.temperature),
        top_k: settings.top_k.or(count("top_k")?).unwrap_or(own.top_k),
        top_p: settings.top_p.or(float("top_p")?).unwrap_or(own.top_p),
        min_p: settings.min_p.or(float("min_p")?).unwrap_or(own.min_p),
        seed: settings.seed.unwrap_or_else(fresh_seed),
        repeat_penalty: settings.repeat_penalty.or(float("penalty_repeat")?).unwrap_or(own.repeat_penalty),
        presence_penalty: settings.presence_penalty.unwrap_or(own.presence_penalty),
        frequency_penalty: settings.frequency_penalty.unwrap_or(own.frequency_penalty),
        penalty_last_n: settings.penalty_last_n.or(count("penalty_last_n")?).unwrap_or(own.penalty_last_n),
    })
}

/// A seed that differs from run to run.
fn fresh_seed() -> u64 {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::from(since.subsec_nanos()) ^ since.as_secs());
    nanos ^ (u64::from(std::process::id()) << 32)
}

/// Reads a text file, bounded.
///
/// # Errors
/// Exit code 3, naming the file.
pub fn read_text(path: &Path) -> Result<Vec<u8>, CommandError> {
    let read = || -> anyhow::Result<Vec<u8>> {
        let mut text = Vec::new();
        let file = std::fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        file.take(TEXT_BYTES_MAX + 1).read_to_end(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::ensure!(text.len() as u64 <= TEXT_BYTES_MAX, "{} is larger than {TEXT_BYTES_MAX} bytes: give a part of it", path.display());
        Ok(text)
    };
    read().map_err(|error| CommandError::new(ExitStatus::Input, error))
}

/// The bytes of a text source.
///
/// # Errors
/// As [`read_text`]. Token sources are no text.
pub fn text_bytes(source: &PromptSource) -> Result<Vec<u8>, CommandError> {
    match source {
        PromptSource::Text(text) => Ok(text.clone().into_bytes()),
        PromptSource::File(path) => read_text(path),
        PromptSource::Tokens(_) => Err(CommandError::new(ExitStatus::Usage, anyhow::anyhow!("text is needed, not token numbers"))),
    }
}

/// A prompt as tokens; text is plain unless `chat` sends it through the model's template as a user's message.
///
/// # Errors
/// Exit code 3 for files and templates at fault.
pub fn prompt_tokens(source: &PromptSource, chat: bool, model: &Model, tokenizer: &Tokenizer) -> Result<Vec<TokenId>, CommandError> {
    if let PromptSource::Tokens(source) = source {
        return Ok(tokens::read(source)?);
    }
    let text = text_bytes(source)?;
    if !chat {
        let mut tokens: Vec<TokenId> = tokenizer.leading_bos().into_iter().collect();
        tokens.extend(tokenizer.encode(&text, Specials::AsText)?);
        return Ok(tokens);
    }
    let template = model.file.metadata().string_opt("tokenizer.chat_template").map_err(ModelError::from)?;
    let source = template
        .ok_or_else(|| CommandError::new(ExitStatus::Usage, anyhow::anyhow!("{} has no chat template: leave out --chat", model.name())))?;
    let message = Message::new("user", &String::from_utf8_lossy(&text)).shielded(tokenizer);
    let rendered = ChatTemplate::new(source)?.render(&[message], &RenderOptions::default())?;
    Ok(tokenizer.encode_chat(&rendered)?)
}
