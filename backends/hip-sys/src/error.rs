//! Why the runtime could not be loaded, and what its functions complain about.

use thiserror::Error;

use crate::raw::hipError_t;

/// A file that was looked for, and why it was not loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The name that the system's loader was asked for.
    pub name: String,
    /// What the loader said.
    pub reason: String,
}

/// Why there is no runtime to call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LoadError {
    /// None of the names could be loaded. A library that lies there but lacks one of its own dependencies counts too: the
    /// loader's reason then names that.
    #[error("no HIP runtime could be loaded: {}", listed(.attempts))]
    NotFound {
        /// All names in the order of trying.
        attempts: Vec<Attempt>,
    },
    /// A library was loaded but is not the runtime that this crate knows. No other is tried: the loader's first choice is
    /// what the system's owner installed.
    #[error("{library} has no function `{symbol}`: this is not a HIP runtime of ROCm 5.2 or newer")]
    MissingSymbol {
        /// The name that was loaded.
        library: String,
        /// The first function that it lacks.
        symbol: &'static str,
    },
}

/// Loaders begin their reason with the name of the file that they mean, which need not be said twice; where it is a library that
/// the runtime itself needs, both names are told.
fn listed(attempts: &[Attempt]) -> String {
    let told = |Attempt { name, reason }: &Attempt| if reason.starts_with(name) { reason.clone() } else { format!("{name} ({reason})") };
    attempts.iter().map(told).collect::<Vec<_>>().join("; ")
}

/// A call that did not return `hipSuccess`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{call} failed: {name} ({}): {text}", .code.0)]
pub struct HipError {
    /// The C function.
    pub call: &'static str,
    /// What it returned.
    pub code: hipError_t,
    /// The code's symbol, as the runtime gives it.
    pub name: String,
    /// The runtime's words for it.
    pub text: String,
}
