//! `ebbtide logits`: the logits of every position, as a NumPy file.

use std::path::Path;

use super::Opener;
use super::interrupt::Interrupt;
use super::session;
use crate::backend::Backend;
use crate::cli::command::LogitsConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::npy::NpyWriter;
use crate::cli::progress::Progress;
use crate::cli::{say, tokens, write_stdout};
use crate::engine::Event;
use crate::model::Model;

/// Runs the command. The head is needed at every row, so it is kept and nothing of it is lent.
///
/// # Errors
/// As the contract's exit codes say; the file appears only once it is complete.
pub fn logits<B: Backend>(logits: &LogitsConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let model = session::open_model(&logits.model)?;
    let prompt = tokens::read(&logits.tokens)?;
    // Before the start, which may take minutes: a file that cannot be written should be told at once.
    session::refuse_to_overwrite("-o", &logits.output, &model)?;
    if let Some(mtp_output) = &logits.mtp_output {
        refuse_mtp_output(mtp_output, logits, &model)?;
    }
    let mut writer = NpyWriter::create(&logits.output, (prompt.len(), model.shape.n_vocab as usize))?;
    let mut engine = session::start(&model, &logits.engine, config, open)?;
    let mut progress = None;
    let mut failed = None;
    let read = engine.logits(
        &prompt,
        &mut |event| {
            if let Event::Reading { done, total } = event {
                progress.get_or_insert_with(|| Progress::new("reading", total)).set(done);
            }
            interrupt.control()
        },
        &mut |row| {
            if failed.is_none() {
                failed = writer.write_row(row).err();
            }
        },
    )?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    if read.is_break() {
        return Err(CommandError::new(
            ExitStatus::Interrupted,
            anyhow::anyhow!("interrupted; {} was not written", logits.output.display()),
        ));
    }
    writer.finish()?;
    let (rows, columns) = (prompt.len(), model.shape.n_vocab);
    if config.json {
        let report = serde_json::json!({ "rows": rows, "columns": columns, "file": logits.output.display().to_string() });
        return write_stdout(&format!("{report}\n"));
    }
    say::line(format_args!("wrote {rows} x {columns} logits to {}", logits.output.display()));
    Ok(())
}

/// Refuses a file for the draft layer's logits that is another one of this call, or that no layer would fill.
fn refuse_mtp_output(mtp_output: &Path, logits: &LogitsConfig, model: &Model) -> Result<(), CommandError> {
    session::refuse_to_overwrite("--mtp-out", mtp_output, model)?;
    if session::is_same_file(mtp_output, &logits.output) {
        let refused =
            anyhow::anyhow!("--mtp-out {} with -o {}: both are one file. Name another one", mtp_output.display(), logits.output.display());
        return Err(CommandError::new(ExitStatus::Usage, refused));
    }
    // No architecture of this version has one; a model that has comes past here.
    let refused = anyhow::anyhow!("--mtp-out: {} has no draft layer. Leave the flag out", model.name());
    Err(CommandError::new(ExitStatus::Usage, refused))
}
