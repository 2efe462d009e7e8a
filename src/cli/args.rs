//! Flags exactly as typed.
//!
//! Owns the names, the help and the form of each single value. It reads nothing but the argument list; the environment and the
//! configuration file join in [`super::sources`], and how values go together is for [`super::config`]. Every flag takes a value, a
//! switch an optional one (`--deterministic=false`), so that each has the same form in all three places.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};

use super::draft_args::DraftArgs;
use super::measure_args::{BenchArgs, ReplayArgs};
use super::serve_args::{ListenArgs, ServeArgs, WorkerArgs};
use super::text_args::{DetokenizeArgs, TokenizeArgs};
use crate::settings::{
    Activations, AliasThreshold, BlockSetting, CONTEXT_TOKENS_MAX, CacheSizing, ChunkSetting, ContextSetting, DeviceSetting, ExpertCache,
    HeadAliasMode, KvType, MEMORY_MIB_MAX, Refill, SettingError, ShortRead, THREADS_MAX, WholeNumber,
};

const MODEL: &str = "Model";
pub(super) const TEXT: &str = "Text";
const MEMORY: &str = "Memory";
const PROMPT: &str = "Reading prompts";
const SAMPLING: &str = "Sampling";
const GENERAL: &str = "General";

const AFTER_HELP: &str = "Every flag can also be set as EBBTIDE_<FLAG> in the environment (EBBTIDE_VRAM_MIB=6000) and by its name in a \
TOML file (vram-mib = 6000) named by --config, EBBTIDE_CONFIG or found at ~/.config/ebbtide/config.toml. Flags go before the \
environment, that before the file. `ebbtide config` prints what holds and why.";

/// The argument list.
#[derive(Debug, Parser)]
#[command(name = "ebbtide", version, about = "Runs mixture-of-experts language models that are larger than the graphics card")]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: CommandArgs,
}

/// The commands of this version.
#[derive(Debug, Subcommand)]
pub enum CommandArgs {
    /// Run the bundled model: no arguments, no network
    Demo(Box<DemoArgs>),
    /// Read a prompt and write on from it
    Run(Box<RunArgs>),
    /// Print the memory plan of both phases without loading weights
    Plan(Box<PlanArgs>),
    /// Write the logits of every token to a NumPy file
    Logits(Box<LogitsArgs>),
    /// Measure how well the model predicts a text
    Perplexity(Box<PerplexityArgs>),
    /// Measure speed at the points of a sweep, each way of reading beside the others
    Bench(Box<BenchArgs>),
    /// Run recorded requests again, each way of reading beside the others
    Replay(Box<ReplayArgs>),
    /// Serve the model over HTTP, with the APIs of OpenAI and Anthropic
    Serve(Box<ServeArgs>),
    /// The process behind `serve` that owns the device; started by it
    #[command(hide = true)]
    Worker(Box<WorkerArgs>),
    /// Turn text into token numbers
    Tokenize(TokenizeArgs),
    /// Turn token numbers into text
    Detokenize(DetokenizeArgs),
    /// Print every setting with its value and where it comes from
    Config(Box<ConfigArgs>),
}

/// `ebbtide demo`.
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Sampling settings.
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `ebbtide run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to read and how long to write.
    #[command(flatten)]
    pub text: TextArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Sampling settings.
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// `ebbtide plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `ebbtide logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token numbers: a LIST split by commas or white space, or a file
    #[arg(help_heading = TEXT, long, value_name = "LIST|@FILE", allow_hyphen_values = true)]
    pub tokens: Option<String>,
    /// The NumPy file to write, float32 [tokens, vocabulary]
    #[arg(help_heading = TEXT, short = 'o', long, value_name = "FILE.npy")]
    pub output: Option<PathBuf>,
    /// A second file, for the logits of the draft layer
    #[arg(help_heading = TEXT, long, value_name = "FILE.npy")]
    pub mtp_out: Option<PathBuf>,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `ebbtide perplexity`.
#[derive(Debug, Args)]
pub struct PerplexityArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token numbers of the text: a file in .u16 (16-bit, little-endian), @FILE or a LIST
    #[arg(help_heading = TEXT, long, value_name = "FILE.u16|@FILE|LIST", allow_hyphen_values = true)]
    pub tokens: Option<String>,
    /// The text
    #[arg(help_heading = TEXT, long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Tokens of one piece, each read from an empty context
    #[arg(help_heading = TEXT, long, value_name = "N", default_value = "512", value_parser = whole(PIECE))]
    pub piece: u64,
    /// Pieces to read at most
    #[arg(help_heading = TEXT, long, value_name = "N", value_parser = whole(PIECES))]
    pub pieces: Option<u64>,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// `ebbtide config`: every flag that a file is likely to set.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Engine settings.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Sampling settings.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Settings of the server.
    #[command(flatten)]
    pub listen: ListenArgs,
}

/// Which model.
#[derive(Debug, Args)]
#[command(next_help_heading = MODEL)]
pub struct ModelArgs {
    /// The model, a GGUF file; of a split one the first part
    #[arg(short = 'm', long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// A model to download; typed as `-hf`.
    #[arg(long, value_name = "REPOSITORY", hide = true)]
    pub hf: Option<String>,
}

/// What `run` reads and how long it writes.
#[derive(Debug, Args)]
#[command(next_help_heading = TEXT)]
pub struct TextArgs {
    /// The prompt
    #[arg(short = 'p', long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// A file with the prompt
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// The prompt as token numbers: a LIST split by commas or white space, or a file
    #[arg(long, value_name = "LIST|@FILE", allow_hyphen_values = true)]
    pub tokens: Option<String>,
    /// Tokens to write at most [default: to the end of the text or of the context]
    #[arg(short = 'n', long, value_name = "N", value_parser = whole(WRITTEN))]
    pub max_tokens: Option<u64>,
    /// Write on when the model ends its text
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub ignore_eos: bool,
    /// Put the prompt into the model's chat template, as a user's message
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub chat: bool,
}

/// All settings of an engine.
#[derive(Debug, Args)]
pub struct EngineArgs {
    /// Memory settings.
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Settings of the prompt path.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Settings of drafts.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// Threads, device and arithmetic.
    #[command(flatten)]
    pub general: GeneralArgs,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Who gets which memory.
#[derive(Debug, Args)]
#[command(next_help_heading = MEMORY)]
pub struct MemoryArgs {
    /// Tokens of context to have room for; auto leaves a useful expert cache
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub ctx: ContextSetting,
    /// Element type of the KV cache
    #[arg(long, value_name = "f32|f16|q8_0", default_value = "f16")]
    pub kv: KvType,
    /// VRAM to use at most, of a card all there is unless said; on the host the size of the simulated device
    #[arg(long, value_name = "MIB", default_value = "8192", value_parser = whole(MEMORY_AT_LEAST_ONE))]
    pub vram_mib: u64,
    /// VRAM to leave free [default: 256, on small devices a sixteenth]
    #[arg(long, value_name = "MIB", value_parser = whole(MEMORY_OR_NONE))]
    pub vram_reserve_mib: Option<u64>,
    /// RAM to pin for experts at most [default: what the system allows]
    #[arg(long, value_name = "MIB", value_parser = whole(MEMORY_OR_NONE))]
    pub pin_mib: Option<u64>,
    /// VRAM slots for routed experts; auto fills what is left
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub expert_cache: ExpertCache,
    /// Keep what the expert cache learns of the model in FILE, from one start to the next; off keeps nothing [default: off]
    #[arg(long, value_name = "FILE|off")]
    pub expert_profile: Option<PathBuf>,
    /// How the cache is sized: exact keeps the reserve in both phases; seed counts neither head nor graphs, for comparison
    #[arg(long, value_name = "exact|seed", default_value = "exact")]
    pub cache_sizing: CacheSizing,
    /// RAM for parked conversations; 0 reads every prompt from its first token
    #[arg(long, value_name = "MIB", value_parser = whole(MEMORY_OR_NONE), default_value = "512")]
    pub prefix_cache_mib: u64,
}

/// How prompts are read.
#[derive(Debug, Args)]
#[command(next_help_heading = PROMPT)]
pub struct PromptArgs {
    /// Tokens of one kernel batch; auto:MAX bounds what the planner chooses
    #[arg(long, value_name = "auto[:MAX]|N", default_value = "auto")]
    pub prefill: ChunkSetting,
    /// Tokens that go through all layers in one pass, each expert crossing the link once; chunk: no more than a chunk
    #[arg(long, value_name = "auto|chunk|N", default_value = "auto")]
    pub prefill_block: BlockSetting,
    /// Lend the output head's VRAM to the prompt path
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub prefill_head_alias: bool,
    /// How the head's VRAM is lent: overlay in place, realloc by freeing the head and making it anew, for comparison
    #[arg(long, value_name = "overlay|realloc", default_value = "overlay")]
    pub head_alias_mode: HeadAliasMode,
    /// Fresh tokens from which the head is lent; auto compares bytes over the link, 0 always lends
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub alias_min_tokens: AliasThreshold,
    /// Prompts of at most N tokens may be read one token after another, with nothing lent; 0 is never
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub short_read: ShortRead,
    /// When writing may start after a prompt: lazy fills lent slots behind it
    #[arg(long, value_name = "lazy|strict", default_value = "lazy")]
    pub refill: Refill,
}

/// How a token is chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = SAMPLING)]
pub struct SamplingArgs {
    /// Temperature; 0 takes the best token [default: the model file's, else 0.7]
    #[arg(long, value_name = "T", value_parser = real(TEMPERATURE))]
    pub temp: Option<f32>,
    /// Candidates to keep by rank; 0 keeps all [default: the model file's]
    #[arg(long, value_name = "K", value_parser = whole(TOP_K))]
    pub top_k: Option<u64>,
    /// Candidates to keep by summed probability; 1 keeps all [default: the model file's]
    #[arg(long, value_name = "P", value_parser = real(PROBABILITY))]
    pub top_p: Option<f32>,
    /// Candidates to keep by probability relative to the best; 0 keeps all [default: the model file's]
    #[arg(long, value_name = "P", value_parser = real(PROBABILITY))]
    pub min_p: Option<f32>,
    /// Start of the random sequence [default: a new one each time]
    #[arg(long, value_name = "S", value_parser = whole(SEED))]
    pub seed: Option<u64>,
    /// Divides logits of tokens seen before; 1 is off [default: the model file's]
    #[arg(long, value_name = "R", value_parser = real(REPEAT))]
    pub repeat_penalty: Option<f32>,
    /// Taken once from logits of tokens seen before [default: 0]
    #[arg(long, value_name = "R", value_parser = real(PENALTY))]
    pub presence_penalty: Option<f32>,
    /// Taken from logits for each time a token was seen [default: 0]
    #[arg(long, value_name = "R", value_parser = real(PENALTY))]
    pub frequency_penalty: Option<f32>,
    /// Last tokens that penalties look at; 0 is off [default: the model file's]
    #[arg(long, value_name = "N", value_parser = whole(TOKENS))]
    pub penalty_last_n: Option<u64>,
}

/// Threads, device and arithmetic.
#[derive(Debug, Args)]
#[command(next_help_heading = GENERAL)]
pub struct GeneralArgs {
    /// Threads of the host's kernels [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = whole(THREADS))]
    pub threads: Option<u64>,
    /// The device that holds the slab
    #[arg(long, value_name = "auto|host|CARD", default_value = "auto")]
    pub device: DeviceSetting,
    /// The same tokens at any chunk, slot count and loan
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub deterministic: bool,
    /// Input of products with quantised weights: 8 bits, or f32 (slower, closest to the model)
    #[arg(long, value_name = "q8|f32", default_value = "q8")]
    pub activations: Activations,
    /// Paces copies like a link of this speed.
    #[arg(long, value_name = "GB/s", value_parser = real(LINK), hide = true)]
    pub sim_link_gbps: Option<f32>,
    /// Paces copies like a link of this latency.
    #[arg(long, value_name = "US", value_parser = real(LINK), hide = true)]
    pub sim_link_us: Option<f32>,
    /// Write a line with hashes of what each window computed, to compare two runs
    #[arg(long, value_name = "FILE")]
    pub window_hashes: Option<PathBuf>,
}

/// What is printed, and where settings are read.
#[derive(Debug, Args)]
#[command(next_help_heading = GENERAL)]
pub struct OutputArgs {
    /// Print one JSON object on stdout
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub json: bool,
    /// Say more on stderr
    #[arg(short = 'v', long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub verbose: bool,
    /// The TOML file with settings
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// The program's commands and flags, with what the derive cannot say.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
        .after_help(AFTER_HELP)
        // Logits are there to be compared, so their defaults keep all that the model has.
        .mut_subcommand("logits", |logits| {
            logits.mut_arg("kv", |arg| arg.default_value("f32")).mut_arg("activations", |arg| arg.default_value("f32"))
        })
        .mut_subcommands(|subcommand| {
            // A later value wins, as sources.rs needs; a negative number is a value at fault and no unknown flag.
            subcommand.args_override_self(true).after_help(AFTER_HELP).mut_args(|arg| {
                let negative = !arg.is_positional() && !arg.is_require_equals_set() && !arg.is_allow_hyphen_values_set();
                arg.allow_negative_numbers(negative)
            })
        })
}

pub(super) const SWITCH: &str = "true|false";

pub(super) fn switch(text: &str) -> Result<bool, SettingError> {
    match text {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err(SettingError::Choice { value: text.to_owned(), choices: "true, false, 1, 0, yes, no, on, off".to_owned() }),
    }
}

const FORM: &str = "a whole number";
const MEMORY_OR_NONE: WholeNumber = WholeNumber { form: FORM, unit: "MiB", least: 0, most: MEMORY_MIB_MAX };
const MEMORY_AT_LEAST_ONE: WholeNumber = WholeNumber { least: 1, ..MEMORY_OR_NONE };
const TOKENS: WholeNumber = WholeNumber { form: FORM, unit: "tokens", least: 0, most: CONTEXT_TOKENS_MAX as u64 };
/// More than any context holds is no fault: scripts always send their largest number, and the text ends where the context does.
const WRITTEN: WholeNumber = WholeNumber { most: u32::MAX as u64, ..TOKENS };
/// A piece has a token to predict from and one to predict.
const PIECE: WholeNumber = WholeNumber { least: 2, ..TOKENS };
const PIECES: WholeNumber = WholeNumber { form: FORM, unit: "pieces", least: 1, most: u32::MAX as u64 };
const TOP_K: WholeNumber = WholeNumber { form: FORM, unit: "candidates", least: 0, most: u32::MAX as u64 };
const SEED: WholeNumber = WholeNumber { form: FORM, unit: "(64 bits)", least: 0, most: u64::MAX };
const THREADS: WholeNumber = WholeNumber { form: FORM, unit: "threads", least: 1, most: THREADS_MAX as u64 };

pub(super) fn whole(bounds: WholeNumber) -> impl Fn(&str) -> Result<u64, SettingError> + Clone + Send + Sync + 'static {
    move |text| bounds.parse(text)
}

/// Bounds of a real number, both included.
pub(super) type Bounds = (f32, f32);
pub(super) const PROBABILITY: Bounds = (0.0, 1.0);
const TEMPERATURE: Bounds = (0.0, 100.0);
const PENALTY: Bounds = (-100.0, 100.0);
/// The least keeps a division by it finite.
const REPEAT: Bounds = (0.01, 100.0);
const LINK: Bounds = (0.0, 1e6);

pub(super) fn real((least, most): Bounds) -> impl Fn(&str) -> Result<f32, SettingError> + Clone + Send + Sync + 'static {
    move |text| {
        let number: f32 = text.parse().map_err(|_| SettingError::NotANumber { value: text.to_owned(), form: "a number such as 0.7" })?;
        // NaN lies within no bounds.
        if number >= least && number <= most {
            return Ok(number);
        }
        Err(SettingError::OutOfBounds { value: text.to_owned(), least: least.to_string(), most: most.to_string(), unit: "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_sound() {
        command().debug_assert();
    }

    /// The names that scripts rely on, for every command that loads a model and for `plan`.
    #[test]
    fn every_flag_of_the_contract_is_there() {
        let flags = "model hf ctx vram-mib vram-reserve-mib pin-mib expert-cache expert-profile prefill prefill-block \
            prefill-head-alias head-alias-mode cache-sizing alias-min-tokens short-read refill spec spec-min-p draft-vocab draft mtp kv \
            activations prefix-cache-mib threads device deterministic window-hashes json verbose sim-link-gbps sim-link-us";
        let command = command();
        for name in ["run", "serve", "plan", "logits", "perplexity", "bench", "replay", "config"] {
            let subcommand = command.find_subcommand(name).expect(name);
            for flag in flags.split_whitespace() {
                assert!(subcommand.get_arguments().any(|arg| arg.get_long() == Some(flag)), "{name} --{flag}");
            }
        }
        let run = command.find_subcommand("run").expect("run");
        for flag in "prompt prompt-file tokens max-tokens ignore-eos chat temp top-k top-p min-p seed repeat-penalty presence-penalty \
            frequency-penalty penalty-last-n"
            .split_whitespace()
        {
            assert!(run.get_arguments().any(|arg| arg.get_long() == Some(flag)), "run --{flag}");
        }
        for flag in ["host", "port", "api-key", "no-auth"] {
            let serve = command.find_subcommand("serve").expect("serve");
            assert!(serve.get_arguments().any(|arg| arg.get_long() == Some(flag)), "serve --{flag}");
        }
        for (name, flag) in [("logits", "mtp-out"), ("bench", "force-acceptance")] {
            let subcommand = command.find_subcommand(name).expect(name);
            assert!(subcommand.get_arguments().any(|arg| arg.get_long() == Some(flag) && !arg.is_hide_set()), "{name} --{flag}");
        }
        for (name, short) in [("run", 'm'), ("run", 'p'), ("run", 'n'), ("run", 'v'), ("logits", 'o')] {
            let subcommand = command.find_subcommand(name).expect(name);
            assert!(subcommand.get_arguments().any(|arg| arg.get_short() == Some(short)), "{name} -{short}");
        }
    }

    #[test]
    fn numbers_that_are_none_or_out_of_bounds_are_refused() {
        for text in ["nan", "-0.1", "1.1", "inf", "x", ""] {
            assert!(real(PROBABILITY)(text).is_err(), "{text}");
        }
        assert_eq!(real(PROBABILITY)("0.05"), Ok(0.05));
        assert!(switch("maybe").is_err());
    }
}
