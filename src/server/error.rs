//! Errors as clients get them: a status and one JSON body, in the form of the API that was called.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::worker::protocol::FailKind;

/// Seconds after which a client may try again where nothing better is known.
const RETRY_AFTER_S: u32 = 2;

/// Why a request is not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// The class, in OpenAI's words.
    pub kind: &'static str,
    /// A word for programs.
    pub code: Option<&'static str>,
    /// The field at fault.
    pub param: Option<String>,
    /// What is wrong, with numbers and a way out.
    pub message: String,
    /// Seconds after which it may go well.
    pub retry_after_s: Option<u32>,
    /// Tokens of a prompt that is too long, and of the context.
    pub overflow: Option<(usize, u32)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, code: None, param: None, message: message.into(), retry_after_s: None, overflow: None }
    }

    /// A request at fault in `param`: 400.
    #[must_use]
    pub fn bad(param: &str, message: impl Into<String>) -> Self {
        let param = Some(param.to_owned()).filter(|param| !param.is_empty());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message) }
    }

    /// A prompt that the context cannot take: 400, with both numbers.
    #[must_use]
    pub fn too_long(prompt_tokens: usize, ctx_tokens: u32) -> Self {
        let message = format!(
            "the prompt has {prompt_tokens} tokens, the context holds {ctx_tokens}, one of them for the answer: shorten the conversation, or start the server with a larger --ctx"
        );
        let overflow = Some((prompt_tokens, ctx_tokens));
        Self { code: Some("context_length_exceeded"), overflow, ..Self::bad("", message) }
    }

    /// Another status that is the client's matter.
    #[must_use]
    pub fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            _ => "invalid_request_error",
        };
        Self { code: Some(code), ..Self::new(status, kind, message) }
    }

    /// The queue is full: 429.
    #[must_use]
    pub fn queue_full(waiting: usize) -> Self {
        let message = format!("{waiting} requests are waiting already, as many as the queue takes: try again later, or raise --queue");
        Self { retry_after_s: Some(RETRY_AFTER_S), ..Self::refused(StatusCode::TOO_MANY_REQUESTS, "queue_full", message) }
    }

    /// There is no engine, now or for good: 503.
    #[must_use]
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { code: Some(code), retry_after_s: Some(RETRY_AFTER_S), ..error }
    }

    /// Something of ours failed: 500.
    #[must_use]
    pub fn engine(code: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some(code), ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message) }
    }

    /// What a worker says of a request that failed.
    #[must_use]
    pub fn of_worker(kind: FailKind, message: String) -> Self {
        match kind {
            FailKind::TooLong { prompt_tokens, ctx_tokens } => Self::too_long(prompt_tokens, ctx_tokens),
            FailKind::BadRequest => Self::bad("", message),
            FailKind::Engine => Self::engine("engine_error", message),
            FailKind::Poisoned => Self::engine("engine_lost", format!("{message}; the engine is started anew, try again")),
        }
    }

    /// The body in OpenAI's form.
    #[must_use]
    pub fn openai_body(&self) -> Value {
        let mut error = json!({ "message": self.message, "type": self.kind, "param": self.param, "code": self.code });
        if let Some((prompt_tokens, ctx_tokens)) = self.overflow {
            error["prompt_tokens"] = prompt_tokens.into();
            error["ctx_tokens"] = ctx_tokens.into();
        }
        json!({ "error": error })
    }

    /// The class in Anthropic's words.
    #[must_use]
    pub fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// The body in Anthropic's form.
    #[must_use]
    pub fn anthropic_body(&self) -> Value {
        json!({ "type": "error", "error": { "type": self.anthropic_kind(), "message": self.message } })
    }

    /// A response with `body`, which is this error in some form.
    #[must_use]
    pub fn response_with(&self, body: &Value) -> Response {
        let mut response = json_response(self.status, body);
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.response_with(&self.openai_body())
    }
}

/// A JSON body.
#[must_use]
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
