//! What the program's exit code means, and how an error gets one.
//!
//! Owns the codes that scripts rely on. An error type says its code once, in its [`Classified`] implementation; a command then
//! uses `?` and the code travels in [`CommandError`].

use std::error::Error;
use std::fmt;
use std::process::ExitCode;

/// Exit codes; the numbers are part of the command line's contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitStatus {
    /// All that was asked for is done.
    Done = 0,
    /// Something of ours or of the system failed, and none of the other codes fits.
    Failed = 1,
    /// Wrong usage, or settings that cannot be carried out; nothing was loaded.
    Usage = 2,
    /// The model or another input file is at fault.
    Input = 3,
    /// The device, or its memory or the machine's, is at fault.
    Device = 4,
    /// Interrupted by a signal; text so far is kept.
    Interrupted = 130,
}

impl From<ExitStatus> for ExitCode {
    fn from(status: ExitStatus) -> Self {
        Self::from(status as u8)
    }
}

/// An error that knows which exit code it leads to.
pub trait Classified: Error + Send + Sync + 'static {
    /// The code with which a command ends that meets this error and has no way round it.
    fn exit_status(&self) -> ExitStatus;
}

/// Why a command ended early: the error with its context, and the code.
#[derive(Debug)]
pub struct CommandError {
    status: ExitStatus,
    error: anyhow::Error,
}

impl CommandError {
    /// An error of a type that has no code of its own.
    pub fn new(status: ExitStatus, error: impl Into<anyhow::Error>) -> Self {
        Self { status, error: error.into() }
    }

    /// The code.
    #[must_use]
    pub fn status(&self) -> ExitStatus {
        self.status
    }

    /// Puts what was being done before the error's own words.
    #[must_use]
    pub fn context(self, doing: impl fmt::Display + Send + Sync + 'static) -> Self {
        Self { status: self.status, error: self.error.context(doing) }
    }
}

impl<E: Classified> From<E> for CommandError {
    fn from(error: E) -> Self {
        Self { status: error.exit_status(), error: error.into() }
    }
}

impl fmt::Display for CommandError {
    /// The chain of causes on one line, outermost first. Some errors quote their cause themselves; it is not said twice.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut told = self.error.to_string();
        for cause in self.error.chain().skip(1).map(ToString::to_string) {
            if !told.ends_with(&cause) {
                told = format!("{told}: {cause}");
            }
        }
        f.write_str(&told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("no magic number")]
    struct BadFile;

    impl Classified for BadFile {
        fn exit_status(&self) -> ExitStatus {
            ExitStatus::Input
        }
    }

    fn open() -> Result<(), CommandError> {
        Err(BadFile)?
    }

    #[test]
    fn an_error_keeps_its_code_and_gains_context() {
        let error = open().expect_err("it always fails").context("cannot read model.gguf");
        assert_eq!(error.status(), ExitStatus::Input);
        assert_eq!(error.to_string(), "cannot read model.gguf: no magic number");
    }

    #[test]
    fn a_cause_that_its_error_quotes_is_told_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot open it: {0}")]
        struct Quoting(#[source] BadFile);

        let error = CommandError::new(ExitStatus::Input, Quoting(BadFile)).context("model.gguf");
        assert_eq!(error.to_string(), "model.gguf: cannot open it: no magic number");
    }

    #[test]
    fn the_codes_are_the_contract_s() {
        use ExitStatus::{Device, Done, Failed, Input, Interrupted, Usage};
        assert_eq!([Done, Failed, Usage, Input, Device, Interrupted].map(|status| status as u8), [0, 1, 2, 3, 4, 130]);
    }
}
