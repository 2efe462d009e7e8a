//! `ebbtide logits`: the logits of every position, as a NumPy file.

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
