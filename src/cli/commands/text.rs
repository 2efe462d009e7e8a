//! `ebbtide tokenize` and `ebbtide detokenize`.

use super::session;
use crate::cli::command::{DetokenizeConfig, TokenizeConfig};
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::{tokens, write_stdout};
use crate::tokenizer::{ControlText, Specials};

/// Text to token numbers: one line, or a JSON object. Control tokens in the text are recognised,
/// so that `detokenize` gives the same bytes back.
///
/// # Errors
/// Exit code 3 for the model or the text file.
pub fn tokenize(tokenize: &TokenizeConfig, config: &Config) -> Result<(), CommandError> {
    let tokenizer = session::open_model(&tokenize.model)?.tokenizer()?;
    let tokens = tokenizer.encode(&session::text_bytes(&tokenize.text)?, Specials::Parse)?;
    if config.json {
        let report = serde_json::json!({ "tokens": tokens, "count": tokens.len() });
        return write_stdout(&format!("{report}\n"));
    }
    let numbers: Vec<String> = tokens.iter().map(ToString::to_string).collect();
    write_stdout(&format!("{}\n", numbers.join(",")))
}

/// Token numbers to text: its very bytes, without a line end of our own.
///
/// # Errors
/// Exit code 3 for the model, 2 for numbers outside the vocabulary.
pub fn detokenize(detokenize: &DetokenizeConfig, config: &Config) -> Result<(), CommandError> {
    let tokenizer = session::open_model(&detokenize.model)?.tokenizer()?;
    let tokens = tokens::read(&detokenize.tokens)?;
    if let Some((position, token)) = tokens.iter().enumerate().find(|&(_, &token)| token as usize >= tokenizer.token_count()) {
        let count = tokenizer.token_count();
        let error = anyhow::anyhow!("token {token} at position {position} is outside the list of {count} tokens");
        return Err(CommandError::new(ExitStatus::Usage, error));
    }
    let bytes = tokenizer.decode(&tokens, ControlText::Show);
    if config.json {
        let report = serde_json::json!({ "text": String::from_utf8_lossy(&bytes) });
        return write_stdout(&format!("{report}\n"));
    }
    use std::io::Write;
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(&bytes).and_then(|()| stdout.flush());
    written.map_err(|error| CommandError::new(ExitStatus::Failed, error).context("cannot write to stdout"))
}
