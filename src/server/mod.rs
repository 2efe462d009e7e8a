//! The HTTP server: APIs, queue, supervision of the worker. Knows no backend and no tensor.
//!
//! ```text
//! connection -> auth::guard -> route -> wire form to ChatRequest -> tokens -> Queue -> Dispatcher -> worker process
//!                                                      SSE or one body <- AnswerEvent <-
//! ```
//! The port is bound before anything is read, and `/health` tells how far the start is. [`app`] needs no socket and no process: tests
//! hand it a worker that plays a script.

pub mod anthropic;
pub mod auth;
pub mod body;
mod call;
pub mod chat;
pub mod dispatcher;
pub mod error;
pub mod fields;
pub mod listen;
pub mod live;
pub mod metrics;
pub mod model;
pub mod openai;
pub mod page;
pub mod queue;
pub mod responses;
mod routes;
mod run;
pub mod status;
pub mod stream;
mod text;

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::Router;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub use call::{Access, Log, ServeError, ServeOptions, ServedModel, Stop};
pub use run::serve;

use crate::worker::protocol::Generate;
use error::ApiError;
use live::{Health, Live};
use queue::{ChoiceEvent, Job, Queue};

/// What all routes share.
pub struct App {
    /// The model, once it is open.
    pub model: OnceLock<Arc<ServedModel>>,
    /// What waits.
    pub queue: Arc<Queue>,
    /// What is known.
    pub live: Arc<Live>,
    /// Who may ask.
    pub access: Access,
    /// When the server started.
    pub started: Instant,
}

impl App {
    /// A server without a model yet.
    #[must_use]
    pub fn new(queue: Arc<Queue>, live: Arc<Live>, access: Access) -> Self {
        Self { model: OnceLock::new(), queue, live, access, started: Instant::now() }
    }

    /// The model.
    ///
    /// # Errors
    /// 503 while it is being opened, and where there is no engine.
    pub fn model(&self) -> Result<Arc<ServedModel>, ApiError> {
        match self.live.health() {
            Health::Dead(reason) => return Err(ApiError::unavailable("engine_dead", format!("there is no engine: {reason}"))),
            Health::Stopping => return Err(ApiError::unavailable("stopping", "the server is being stopped")),
            Health::Loading { .. } | Health::Ready | Health::Degraded(_) => {}
        }
        let model = self.model.get().cloned();
        model.ok_or_else(|| ApiError::unavailable("loading", "the model is being opened: try again in a moment, /health tells when"))
    }

    /// Refuses a prompt that the context cannot take, as far as that is known: while a worker starts, the model's own limit counts.
    ///
    /// # Errors
    /// 400 with both numbers.
    pub fn check_length(&self, model: &ServedModel, prompt_tokens: usize) -> Result<(), ApiError> {
        let ctx_tokens = self.live.ctx_tokens().unwrap_or(model.ctx_tokens_max);
        if prompt_tokens >= ctx_tokens as usize { Err(ApiError::too_long(prompt_tokens, ctx_tokens)) } else { Ok(()) }
    }

    /// Queues all answers to a request.
    ///
    /// # Errors
    /// 429 where the queue is full, 503 where there is no engine.
    pub fn ask(&self, api: &'static str, client: &str, generates: Vec<Generate>) -> Result<UnboundedReceiver<ChoiceEvent>, ApiError> {
        let (events, receiver) = unbounded_channel();
        let job =
            |(choice, generate)| Job { generate, choice, client: client.to_owned(), api, events: events.clone(), queued: Instant::now() };
        self.queue.push(generates.into_iter().enumerate().map(job).collect())?;
        Ok(receiver)
    }
}

/// All routes.
pub fn app(app: Arc<App>) -> Router {
    Router::new()
        .merge(page::routes())
        .route("/health", get(routes::health))
        .route("/metrics", get(routes::metrics))
        .route("/v1/status", get(routes::status))
        .route("/v1/models", get(routes::models))
        .route("/v1/models/{*name}", get(routes::model))
        .route("/v1/chat/completions", post(routes::chat))
        .route("/v1/completions", post(routes::completions))
        .route("/v1/messages", post(routes::messages))
        .route("/v1/messages/count_tokens", post(routes::count_tokens))
        .route("/v1/responses", post(routes::responses))
        .route("/tokenize", post(text::tokenize))
        .route("/detokenize", post(text::detokenize))
        .fallback(|| async { ApiError::refused(StatusCode::NOT_FOUND, "not_found", "no such address; docs/api.md lists them") })
        .method_not_allowed_fallback(|| async {
            ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", "this address does not take this method")
        })
        .layer(from_fn_with_state(Arc::clone(&app), auth::guard))
        .with_state(app)
}
