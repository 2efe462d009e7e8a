//! What the commands that measure share: progress, notices, the page, and the exit code of an early end.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::session;
use crate::bench::{Ended, Told};
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::part_file::{self, Part};
use crate::cli::progress::Progress;
use crate::cli::say;
use crate::model::Model;

/// A page on its way to its file.
pub struct PageFile {
    target: PathBuf,
    file: std::fs::File,
    part: Option<Part>,
}

impl PageFile {
    /// Opens the file before anything is measured: that it cannot be written should not be told hours later.
    ///
    /// # Errors
    /// Exit code 2, naming the file: one that cannot be written, or the model itself.
    pub fn create(target: Option<&Path>, model: &Model) -> Result<Option<Self>, CommandError> {
        let Some(target) = target else { return Ok(None) };
        session::refuse_to_overwrite("--html", target, model)?;
        let (file, part) = part_file::open(target).map_err(|error| {
            let refused = anyhow::anyhow!("--html: cannot write {}: {error}. Name a file that can be written", target.display());
            CommandError::new(ExitStatus::Usage, refused)
        })?;
        Ok(Some(Self { target: target.to_owned(), file, part }))
    }

    /// Writes the page and gives the file its name.
    ///
    /// # Errors
    /// Exit code 1, naming the file.
    pub fn finish(mut self, page: &str) -> Result<(), CommandError> {
        let written = self.file.write_all(page.as_bytes()).and_then(|()| self.part.as_ref().map_or(Ok(()), Part::take_name));
        written.map_err(|error| failed(&self.target, error))?;
        say::line(format_args!("wrote {}", self.target.display()));
        Ok(())
    }
}

fn failed(target: &Path, error: std::io::Error) -> CommandError {
    CommandError::new(ExitStatus::Failed, error).context(format!("{}: cannot write the page", target.display()))
}

/// Tells the user what measuring has to say; each text once, as many engines have the same.
pub struct Teller {
    is_verbose: bool,
    progress: Option<Progress>,
    told: HashSet<String>,
}

impl Teller {
    /// One that prints plans where the user wants to know more.
    pub fn new(is_verbose: bool) -> Self {
        Self { is_verbose, progress: None, told: HashSet::new() }
    }

    /// Takes what is told.
    pub fn tell(&mut self, told: Told) {
        match told {
            Told::Step { done, total } => self.progress.get_or_insert_with(|| Progress::new("measuring", total)).set(done),
            Told::Started(plan) if self.is_verbose => self.once(plan),
            Told::Started(_) => {}
            Told::Notice(notice) => self.once(format!("note: {notice}")),
        }
    }

    fn once(&mut self, text: String) {
        if !self.told.contains(&text) {
            say::line(&text);
            self.told.insert(text);
        }
    }

    /// The end; a bar goes away before the report is printed.
    pub fn finish(self, ended: &Ended) {
        if let (Some(progress), Ended::Done) = (self.progress, ended) {
            progress.finish();
        }
    }
}

/// The exit code of an end that came early, once what was measured is printed.
///
/// # Errors
/// 130 where the user stopped it, the error's own where a run failed.
pub fn result_of(ended: Ended) -> Result<(), CommandError> {
    match ended {
        Ended::Done => Ok(()),
        Ended::Interrupted => {
            Err(CommandError::new(ExitStatus::Interrupted, anyhow::anyhow!("interrupted; what was measured until then is reported")))
        }
        Ended::Failed(error) => Err(CommandError::from(error).context("a run failed; what was measured until then is reported")),
    }
}
