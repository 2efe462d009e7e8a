//! `ebbtide logits`: the logits of every position, as a NumPy file.

use std::path::Path;
use std::sync::Arc;

use super::Opener;
use super::interrupt::Interrupt;
use super::session;
use crate::backend::Backend;
use crate::cli::command::LogitsConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::npy::{NpyError, NpyWriter};
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
    let model = Model::open(&logits.model)?;
    let prompt = tokens::read(&logits.tokens)?;
    // Before the start, which may take minutes: a file that cannot be written should be told at once.
    session::refuse_to_overwrite("-o", &logits.output, &model)?;
    if let Some(mtp_output) = &logits.mtp_output {
        refuse_mtp_output(mtp_output, logits, &model)?;
    }
    let model = if logits.mtp_output.is_some() { model } else { model.without_draft_layer()? };
    let model = Arc::new(model);
    let shape = (prompt.len(), model.shape.n_vocab as usize);
    let mut trunk = Rows::new(NpyWriter::create(&logits.output, shape)?);
    let mut draft = logits.mtp_output.as_ref().map(|output| NpyWriter::create(output, shape).map(Rows::new)).transpose()?;
    let mut engine = session::start(&model, &logits.engine, config, open)?;
    let mut progress = None;
    let mut draft_sink = |row: &[f32]| draft.iter_mut().for_each(|rows| rows.take(row));
    let read = engine.logits_with_drafts(
        &prompt,
        &mut |event| {
            if let Event::Reading { done, total } = event {
                progress.get_or_insert_with(|| Progress::new("reading", total)).set(done);
            }
            interrupt.control()
        },
        &mut |row| trunk.take(row),
        Some(&mut draft_sink),
    )?;
    if read.is_break() {
        return Err(CommandError::new(
            ExitStatus::Interrupted,
            anyhow::anyhow!("interrupted; {} was not written", logits.output.display()),
        ));
    }
    trunk.finish()?;
    draft.map_or(Ok(()), Rows::finish)?;
    let (rows, columns) = (prompt.len(), model.shape.n_vocab);
    if config.json {
        let report = serde_json::json!({ "rows": rows, "columns": columns, "file": logits.output.display().to_string() });
        return write_stdout(&format!("{report}\n"));
    }
    say::line(format_args!("wrote {rows} x {columns} logits to {}", logits.output.display()));
    Ok(())
}

/// A file that takes rows until one cannot be written.
struct Rows {
    writer: NpyWriter,
    failed: Option<NpyError>,
}

impl Rows {
    fn new(writer: NpyWriter) -> Self {
        Self { writer, failed: None }
    }

    fn take(&mut self, row: &[f32]) {
        if self.failed.is_none() {
            self.failed = self.writer.write_row(row).err();
        }
    }

    fn finish(self) -> Result<(), CommandError> {
        match self.failed {
            Some(error) => Err(error.into()),
            None => Ok(self.writer.finish()?),
        }
    }
}

/// Refuses a file for the draft layer's logits that is another one of this call, or that no layer would fill.
fn refuse_mtp_output(mtp_output: &Path, logits: &LogitsConfig, model: &Model) -> Result<(), CommandError> {
    session::refuse_to_overwrite("--mtp-out", mtp_output, model)?;
    if session::is_same_file(mtp_output, &logits.output) {
        let refused =
            anyhow::anyhow!("--mtp-out {} with -o {}: both are one file. Name another one", mtp_output.display(), logits.output.display());
        return Err(CommandError::new(ExitStatus::Usage, refused));
    }
    if model.shape.has_draft_layer {
        return Ok(());
    }
    let refused = anyhow::anyhow!("--mtp-out: {} has no draft layer. Leave the flag out", model.name());
    Err(CommandError::new(ExitStatus::Usage, refused))
}
