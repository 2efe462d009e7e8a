//! Flags of the commands that measure, exactly as typed: see [`super::args`] for the rest.

use std::path::PathBuf;

use clap::Args;

use super::args::{EngineArgs, ModelArgs, PROBABILITY, real};
use super::lists::{self, List, ListError};
use crate::bench::Arm;
use crate::settings::{BlockSetting, CONTEXT_TOKENS_MAX, ChunkSetting, ContextSetting, ExpertCache, SettingError, WholeNumber};

const SWEEP: &str = "Sweep";
const REPLAY: &str = "Replay";

/// `ebbtide bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// What is swept.
    #[command(flatten)]
    pub sweep: SweepArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What `bench` sweeps.
#[derive(Debug, Args)]
#[command(next_help_heading = SWEEP)]
pub struct SweepArgs {
    /// Budgets, each named by the slots that have room in it; auto is --vram-mib
    #[arg(long, value_name = "auto|N,...", value_parser = lists::parse::<ExpertCache>)]
    pub slots: Option<List<ExpertCache>>,
    /// Tokens of prompts [default: 512,2048,8192 as far as the context holds them]
    #[arg(long, value_name = "N,...", value_parser = prompts)]
    pub prompts: Option<List<u32>>,
    /// Most tokens of a chunk
    #[arg(long, value_name = "auto|N,...", value_parser = lists::parse::<ChunkSetting>)]
    pub chunks: Option<List<ChunkSetting>>,
    /// Most tokens of a block, where a block may be more than a chunk
    #[arg(long, value_name = "auto|N,...", value_parser = lists::parse::<BlockSetting>)]
    pub blocks: Option<List<BlockSetting>>,
    /// Tokens of context to have room for
    #[arg(long, value_name = "auto|N,...", value_parser = lists::parse::<ContextSetting>)]
    pub contexts: Option<List<ContextSetting>>,
    /// Tokens to write after each prompt
    #[arg(long, value_name = "N", default_value = "32", value_parser = number(WRITTEN))]
    pub write: u32,
    /// Runs of each kind; figures are their median
    #[arg(long, value_name = "R", default_value = "3", value_parser = number(REPETITIONS))]
    pub repeat: u32,
    /// A text to take prompts from, instead of random tokens
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// The same as token numbers: a LIST split by commas or white space, or a file
    #[arg(long, value_name = "LIST|@FILE", allow_hyphen_values = true)]
    pub tokens: Option<String>,
    /// Start of the random tokens
    #[arg(long, value_name = "S", default_value = "1", value_parser = seed)]
    pub seed: u64,
    /// Take each draft with probability P, whatever the model says: a figure for speed alone, the text means nothing
    #[arg(long, value_name = "P", value_parser = real(PROBABILITY))]
    pub force_acceptance: Option<f32>,
    /// Write the report as a page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// `ebbtide replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Recorded requests, one JSON object a line
    #[arg(value_name = "FILE")]
    pub requests: Option<PathBuf>,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// How it is replayed.
    #[command(flatten)]
    pub trials: TrialArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How `replay` replays.
#[derive(Debug, Args)]
#[command(next_help_heading = REPLAY)]
pub struct TrialArgs {
    /// Trials of each arm, each in a fresh engine
    #[arg(long, value_name = "N", default_value = "3", value_parser = number(REPETITIONS))]
    pub trials: u32,
    /// Ways of setting the engine to compare: default, loan, alias, alias-chunk, auto
    #[arg(long, value_name = "ARM,...", default_value = "default,loan,alias,auto", value_parser = lists::parse::<Arm>)]
    pub arms: List<Arm>,
    /// Start of the draws behind intervals
    #[arg(long, value_name = "S", default_value = "1", value_parser = seed)]
    pub seed: u64,
    /// Write the report as a page with plots
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

const FORM: &str = "a whole number";
const PROMPT: WholeNumber = WholeNumber { form: FORM, unit: "tokens", least: 1, most: CONTEXT_TOKENS_MAX as u64 };
const WRITTEN: WholeNumber = PROMPT;
const REPETITIONS: WholeNumber = WholeNumber { form: FORM, unit: "repetitions", least: 1, most: 100 };
const SEED: WholeNumber = WholeNumber { form: FORM, unit: "(64 bits)", least: 0, most: u64::MAX };

fn number(bounds: WholeNumber) -> impl Fn(&str) -> Result<u32, SettingError> + Clone + Send + Sync + 'static {
    move |text| bounds.parse_u32(text)
}

fn seed(text: &str) -> Result<u64, SettingError> {
    SEED.parse(text)
}

fn prompts(text: &str) -> Result<List<u32>, ListError> {
    lists::parse_numbers(text, PROMPT)
}
