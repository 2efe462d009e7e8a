//! Flags of `tokenize` and `detokenize`, exactly as typed: see [`super::args`] for the rest.

use std::path::PathBuf;

use clap::Args;

use super::args::{ModelArgs, OutputArgs, TEXT};

/// `ebbtide tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The text
    #[arg(value_name = "TEXT", allow_hyphen_values = true)]
    pub input: Option<String>,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The text, as a flag
    #[arg(help_heading = TEXT, short = 'p', long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// A file with the text
    #[arg(help_heading = TEXT, long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `ebbtide detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// Token numbers: a LIST split by commas or white space, or a file
    #[arg(value_name = "LIST|@FILE")]
    pub input: Option<String>,
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token numbers, as a flag
    #[arg(help_heading = TEXT, long, value_name = "LIST|@FILE", allow_hyphen_values = true)]
    pub tokens: Option<String>,
    /// Output settings.
    #[command(flatten)]
    pub output: OutputArgs,
}
