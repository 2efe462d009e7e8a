//! What one call of the program shall do, as plain data.
//!
//! [`super::config`] makes these values and keeps every promise of their fields; the code that carries a command out needs nothing
//! else of the command line.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::bench::frontier::Sweep;
use crate::bench::replay::Replay;
use crate::server::Access;
use crate::settings::{DeviceSetting, EngineSettings, SamplingSettings, TokenSource};

/// The commands, with all that each needs.
#[derive(Debug, PartialEq)]
pub enum Command {
    /// Run the bundled model.
    Demo(DemoConfig),
    /// Read a prompt, write on.
    Run(RunConfig),
    /// Print the memory plan.
    Plan(PlanConfig),
    /// Write logits to a file.
    Logits(LogitsConfig),
    /// Measure the loss on a text.
    Perplexity(PerplexityConfig),
    /// Measure a sweep.
    Bench(BenchConfig),
    /// Run recorded requests again.
    Replay(ReplayConfig),
    /// Serve over HTTP.
    Serve(ServeConfig),
    /// Own the device for a server.
    Worker(WorkerConfig),
    /// Text to tokens.
    Tokenize(TokenizeConfig),
    /// Tokens to text.
    Detokenize(DetokenizeConfig),
    /// List the devices.
    Devices,
    /// Check the machine.
    Doctor(DoctorConfig),
    /// Print the settings.
    ShowConfig,
}

impl Command {
    /// The device it was asked to run on; `None` where it needs none.
    #[must_use]
    pub fn device(&self) -> Option<&DeviceSetting> {
        let engine = match self {
            Self::Demo(demo) => &demo.engine,
            Self::Run(run) => &run.engine,
            Self::Plan(plan) => &plan.engine,
            Self::Logits(logits) => &logits.engine,
            Self::Perplexity(perplexity) => &perplexity.engine,
            Self::Bench(bench) => &bench.sweep.base,
            Self::Replay(replay) => &replay.replay.base,
            Self::Doctor(doctor) => &doctor.engine,
            Self::Serve(serve) => &serve.engine,
            Self::Worker(worker) => &worker.engine,
            Self::Tokenize(_) | Self::Detokenize(_) | Self::Devices | Self::ShowConfig => return None,
        };
        Some(&engine.device)
    }
}

/// What `demo` needs.
#[derive(Debug, PartialEq)]
pub struct DemoConfig {
    /// Of the engine.
    pub engine: EngineSettings,
    /// Of the sampler.
    pub sampling: SamplingSettings,
}

/// What `run` needs.
#[derive(Debug, PartialEq)]
pub struct RunConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// What is read.
    pub prompt: PromptSource,
    /// Tokens written at most; `None`: to the end of the text or of the context.
    pub tokens_max: Option<u32>,
    /// Write on when the model ends its text.
    pub ignore_eos: bool,
    /// The prompt goes through the chat template.
    pub chat: bool,
    /// Of the engine.
    pub engine: EngineSettings,
    /// Of the sampler.
    pub sampling: SamplingSettings,
}

/// What `plan` needs.
#[derive(Debug, PartialEq)]
pub struct PlanConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Of the engine.
    pub engine: EngineSettings,
}

/// What `logits` needs.
#[derive(Debug, PartialEq)]
pub struct LogitsConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Rows of the matrix.
    pub tokens: TokenSource,
    /// A NumPy file.
    pub output: PathBuf,
    /// Another one, for the logits of the draft layer.
    pub mtp_output: Option<PathBuf>,
    /// Of the engine.
    pub engine: EngineSettings,
}

/// What `perplexity` needs.
#[derive(Debug, PartialEq)]
pub struct PerplexityConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// What is predicted.
    pub corpus: PromptSource,
    /// Tokens of one piece, at least two.
    pub piece_tokens: u32,
    /// Pieces read at most.
    pub pieces_max: Option<u32>,
    /// Of the engine.
    pub engine: EngineSettings,
}

/// What `bench` needs.
#[derive(Debug, PartialEq)]
pub struct BenchConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// What is measured; of random tokens unless there is a text.
    pub sweep: Sweep,
    /// What prompts are taken from.
    pub text: Option<PromptSource>,
    /// Where the page goes.
    pub html: Option<PathBuf>,
}

/// What `replay` needs.
#[derive(Debug, PartialEq)]
pub struct ReplayConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Recorded requests.
    pub requests: PathBuf,
    /// How they are replayed.
    pub replay: Replay,
    /// Where the page goes.
    pub html: Option<PathBuf>,
}

/// What `doctor` needs.
#[derive(Debug, PartialEq)]
pub struct DoctorConfig {
    /// A GGUF file; `None` where only the machine is looked at.
    pub model: Option<PathBuf>,
    /// Of the engine.
    pub engine: EngineSettings,
}

/// What `serve` needs.
#[derive(Debug, PartialEq)]
pub struct ServeConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Where it listens.
    pub host: IpAddr,
    /// Its port; 0 is any that is free.
    pub port: u16,
    /// Who may ask.
    pub access: Access,
    /// Most answers that wait.
    pub queue_max: usize,
    /// Of the engine.
    pub engine: EngineSettings,
    /// Of requests that do not say.
    pub sampling: SamplingSettings,
}

/// What `worker` needs.
#[derive(Debug, PartialEq)]
pub struct WorkerConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Of the engine.
    pub engine: EngineSettings,
}

/// What `tokenize` needs.
#[derive(Debug, PartialEq)]
pub struct TokenizeConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// Text, never tokens.
    pub text: PromptSource,
}

/// What `detokenize` needs.
#[derive(Debug, PartialEq)]
pub struct DetokenizeConfig {
    /// A GGUF file.
    pub model: PathBuf,
    /// What is turned into text.
    pub tokens: TokenSource,
}

/// Where a prompt comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// Written out.
    Text(String),
    /// In a file of text.
    File(PathBuf),
    /// As token numbers.
    Tokens(TokenSource),
}
