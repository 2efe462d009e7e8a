//! What a server is started with and how it may end: plain data, there also in a build without the server.

use std::net::TcpListener;
use std::sync::Arc;

use thiserror::Error;

use crate::engine::sampler::Sampling;
use crate::tokenizer::{ChatTemplate, Tokenizer};
use crate::worker::supervisor::WorkerCommand;

/// Takes a line for the log.
pub type Log = Arc<dyn Fn(&str) + Send + Sync>;

/// Asks a running server to stop; may be called from any thread.
pub type Stop = Box<dyn Fn() + Send + Sync>;

/// A model to be served: no weights, no device.
#[derive(Debug)]
pub struct ServedModel {
    /// What `/v1/models` calls it.
    pub name: String,
    /// Its kind.
    pub architecture: String,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// How conversations are written; `None` where the file has no template.
    pub template: Option<ChatTemplate>,
    /// How tokens are chosen where a request does not say.
    pub sampling: Sampling,
    /// The seed that every request without one gets; `None`: a new one each time.
    pub seed: Option<u64>,
    /// Tokens that can be in context at most, before a worker says how many this start has.
    pub ctx_tokens_max: u32,
    /// Tokens there are.
    pub n_vocab: u32,
    /// When it was opened, in seconds since 1970.
    pub opened_unix_s: u64,
}

/// Who is let in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Keys, one of which is demanded; none demands none.
    pub keys: Vec<String>,
    /// Names beside addresses and localhost that `Host` may be.
    pub hosts: Vec<String>,
    /// Origins whose pages may ask; `*` is all of them.
    pub origins: Vec<String>,
}

/// What a server is started with.
pub struct ServeOptions {
    /// The bound port.
    pub listener: TcpListener,
    /// How a worker is started.
    pub worker: WorkerCommand,
    /// Who may ask.
    pub access: Access,
    /// Most answers that wait.
    pub queue_max: usize,
    /// Lines for people.
    pub log: Log,
    /// Called once with the way to ask the server to stop.
    pub on_stoppable: Box<dyn FnOnce(Stop) + Send>,
}

/// Why a server ended that nobody asked to.
#[derive(Debug, Error)]
pub enum ServeError<E> {
    /// This build has no server.
    #[error("this build has no server: build it with the feature `serve`, which is among the default ones")]
    NotBuilt,
    /// The model cannot be opened.
    #[error("{0}")]
    Open(E),
    /// The first worker could not start.
    #[error("{message}")]
    StartFailed {
        /// Exit code that the worker had.
        exit_status: u8,
        /// Why.
        message: String,
    },
    /// The system refused something.
    #[error("the server cannot run: {0}")]
    System(#[from] std::io::Error),
}
