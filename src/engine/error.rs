//! What can go wrong while a request runs.

use thiserror::Error;

use super::constraint::ConstraintError;
use crate::backend::BackendError;
use crate::experts::StoreError;
use crate::phase::{PhaseError, PlanError};
use crate::quant::QuantError;
use crate::units::{Bytes, TokenId};

/// A request or a start that failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The model does not fit as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A phase transition failed.
    #[error(transparent)]
    Phase(#[from] PhaseError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// What a prompt had borrowed is not home yet. The next request tries again before it does anything else.
    #[error(
        "VRAM that a prompt had borrowed could not be brought back ({cause}); nothing is written before it is, and the next request tries again"
    )]
    NotRestored {
        /// What stopped it.
        cause: BackendError,
    },
    /// The experts cannot be reached.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The model's file is not what it was checked to be.
    #[error(transparent)]
    Model(Box<crate::model::ModelError>),
    /// A row of the file's embedding cannot be read.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// What the request demands of its text cannot be met.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// More tokens than the context holds. Nothing was read.
    #[error(
        "the prompt has {prompt_tokens} tokens, the context holds {ctx_tokens}, one of them for the answer: raise --ctx or shorten the prompt"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Tokens of the context.
        ctx_tokens: u32,
    },
    /// A prompt without tokens.
    #[error("the prompt is empty: give at least one token")]
    EmptyPrompt,
    /// A number that is no token.
    #[error("token {token} at position {position} is outside the vocabulary of {n_vocab}")]
    BadToken {
        /// The number.
        token: TokenId,
        /// Where it stands in the prompt.
        position: usize,
        /// Tokens there are.
        n_vocab: u32,
    },
    /// The model computed something that is no number: a damaged file or a fault of ours.
    #[error(
        "the logits at position {position} are not finite: the model file may be damaged (try `ebbtide perplexity`), nothing was written for it"
    )]
    NotFinite {
        /// Position of the window.
        position: usize,
    },
    /// A window that is none: without tokens, with too many, or past the context. Nothing was run.
    #[error("a window of {rows} tokens at position {position}: at least 1 and at most {rows_max} fit, and {ctx_tokens} tokens of context")]
    BadWindow {
        /// Tokens of the window.
        rows: usize,
        /// Tokens of the largest window.
        rows_max: u32,
        /// Position of the first.
        position: usize,
        /// Tokens of the context.
        ctx_tokens: u32,
    },
    /// The file of `--window-hashes` took no more.
    #[error("window hashes cannot be written: {0}")]
    WindowHashes(#[source] std::io::Error),
    /// The prompt buffers do not fit where they must.
    #[error(
        "reading with all logits needs {needed} for blocks of {tokens} tokens, {left} are there for prompts while the head is kept: leave \
         --prefill and --prefill-block out, raise --vram-mib or lower --expert-cache"
    )]
    NoLogitsRoom {
        /// Tokens of the shortest block.
        tokens: u32,
        /// Bytes for it.
        needed: Bytes,
        /// Bytes that can be had.
        left: Bytes,
    },
}
