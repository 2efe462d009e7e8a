//! Flags of drafts, exactly as typed: see [`super::args`] for the rest.

use std::path::PathBuf;

use clap::Args;

use super::args::{PROBABILITY, SWITCH, real, switch};
use crate::settings::{DraftSetting, SpecSetting};

const DRAFTS: &str = "Drafts";

/// Drafts: tokens guessed ahead and verified together. They change the time and never the text.
#[derive(Debug, Args)]
#[command(next_help_heading = DRAFTS)]
pub struct DraftArgs {
    /// Drafts of a window at most, 0 to 7; as many of them are made as pay, 0 makes none
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub spec: SpecSetting,
    /// Who drafts: the model's draft layer (mtp), what followed the same tokens earlier (lookup), the better of both, or nobody
    #[arg(long, value_name = "mtp|lookup|both|off", default_value = "both")]
    pub draft: DraftSetting,
    /// The same as --draft mtp
    #[arg(long, value_name = SWITCH, value_parser = switch, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false")]
    pub mtp: bool,
    /// Drafts of the draft layer that it holds less probable than P are not offered
    #[arg(long, value_name = "P", value_parser = real(PROBABILITY), default_value = "0")]
    pub spec_min_p: f32,
    /// Token numbers among which the draft layer chooses, in a file: text, or 16-bit where the name ends in .u16 [default: all]
    #[arg(long, value_name = "FILE")]
    pub draft_vocab: Option<PathBuf>,
}
