//! What each address does: from a request to its form of answer.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::anthropic::{self, MessageStream};
use super::chat::ChatRequest;
use super::error::{ApiError, json_response};
use super::listen::Peer;
use super::model::ServedModel;
use super::openai::chat::ChatStream;
use super::openai::completions::{self, CompletionStream};
use super::openai::{self, ok};
use super::responses::{self, ResponseStream};
use super::{App, body, metrics, status, stream};
use crate::reply::ReasoningStart;
use crate::units::TokenId;
use crate::worker::protocol::Generate;

/// Longest name of a client that is told apart.
const CLIENT_BYTES_MAX: usize = 128;

pub async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, body) = status::health(&app);
    json_response(status, &body)
}

pub async fn status(State(app): State<Arc<App>>) -> Response {
    ok(&status::status(&app))
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], metrics::page(&app)).into_response()
}

pub async fn models(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let model = app.model()?;
    Ok(ok(&json!({ "object": "list", "data": [openai::model_entry(&model, app.live.ctx_tokens())] })))
}

pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Response, ApiError> {
    let model = app.model()?;
    if name != model.name {
        let message = format!("the model here is {}", model.name);
        return Err(ApiError::refused(StatusCode::NOT_FOUND, "model_not_found", message));
    }
    Ok(ok(&openai::model_entry(&model, app.live.ctx_tokens())))
}

pub async fn chat(State(app): State<Arc<App>>, peer: Option<Extension<Peer>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let answered = answer_chat(&app, client_of(peer, &parts.headers), body).await;
    answered.inspect_err(|_| app.live.note_refused())
}

/// A conversation that is ready for the queue.
struct Prepared<O> {
    chat: ChatRequest,
    options: O,
    prompt_tokens: usize,
    generates: Vec<Generate>,
}

impl<O> Prepared<O> {
    fn new(model: &ServedModel, chat: ChatRequest, options: O) -> Result<Self, ApiError> {
        let (prompt, reasoning) = model.chat_tokens(&chat)?;
        let generates = chat.generates(model, &prompt, reasoning)?;
        Ok(Self { chat, options, prompt_tokens: prompt.len(), generates })
    }
}

async fn answer_chat(app: &Arc<App>, client: String, body: axum::body::Body) -> Result<Response, ApiError> {
    let body = body::read(body).await?;
    let model = app.model()?;
    let for_tokens = Arc::clone(&model);
    // Rendering and tokenising a long conversation takes a while, and others are waiting.
    let prepared = blocking(move || {
        let (chat, options) = openai::chat::parse(&body)?;
        Prepared::new(&for_tokens, chat, options)
    })
    .await?;
    let Prepared { chat, options, prompt_tokens, generates } = prepared;
    app.check_length(&model, prompt_tokens)?;
    let (n, with_logprobs) = (generates.len(), chat.answer.logprobs.is_some());
    let events = app.ask("chat", chat.answer.client.as_ref().unwrap_or(&client), generates)?;
    if options.stream {
        return Ok(stream::response(ChatStream::new(model, options, n, with_logprobs), events, n));
    }
    let answers = stream::collect(events, n).await?;
    Ok(ok(&openai::chat::body(&model, &answers, with_logprobs)))
}

pub async fn completions(State(app): State<Arc<App>>, peer: Option<Extension<Peer>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let answered = answer_completion(&app, client_of(peer, &parts.headers), body).await;
    answered.inspect_err(|_| app.live.note_refused())
}

async fn answer_completion(app: &Arc<App>, client: String, body: axum::body::Body) -> Result<Response, ApiError> {
    let body = body::read(body).await?;
    let model = app.model()?;
    let for_tokens = Arc::clone(&model);
    let (request, options, prompts) = blocking(move || {
        let (request, options) = completions::parse(&body)?;
        let prompts = request.prompts.iter().map(|prompt| completions::prompt_tokens(&for_tokens, prompt));
        let prompts = prompts.collect::<Result<Vec<Vec<TokenId>>, ApiError>>()?;
        Ok((request, options, prompts))
    })
    .await?;
    for prompt in &prompts {
        app.check_length(&model, prompt.len())?;
    }
    let generates: Vec<_> =
        prompts.iter().flat_map(|prompt| request.answer.generates(&model, prompt, ReasoningStart::Answer, &[])).collect();
    let (answers, n, with_logprobs) = (generates.len(), request.answer.n, request.answer.logprobs.is_some());
    let events = app.ask("completions", request.answer.client.as_ref().unwrap_or(&client), generates)?;
    if options.stream {
        return Ok(stream::response(CompletionStream::new(model, options, answers, n, with_logprobs), events, answers));
    }
    let answers = stream::collect(events, answers).await?;
    Ok(ok(&completions::body(&model, &answers, n, with_logprobs)))
}

pub async fn messages(State(app): State<Arc<App>>, peer: Option<Extension<Peer>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let answered = answer_messages(&app, client_of(peer, &parts.headers), body).await;
    answered.unwrap_or_else(|error| {
        app.live.note_refused();
        error.response_with(&error.anthropic_body())
    })
}

async fn answer_messages(app: &Arc<App>, client: String, body: axum::body::Body) -> Result<Response, ApiError> {
    let body = body::read(body).await?;
    let model = app.model()?;
    let for_tokens = Arc::clone(&model);
    let prepared = blocking(move || {
        let (chat, options) = anthropic::parse(&body)?;
        Prepared::new(&for_tokens, chat, options)
    })
    .await?;
    let Prepared { chat, options, prompt_tokens, generates } = prepared;
    app.check_length(&model, prompt_tokens)?;
    let events = app.ask("messages", chat.answer.client.as_ref().unwrap_or(&client), generates)?;
    if options.stream {
        return Ok(stream::response(MessageStream::new(&model.name, options, prompt_tokens), events, 1));
    }
    let answers = stream::collect(events, 1).await?;
    let answer = answers.first().ok_or_else(|| ApiError::engine("lost", "the answer ended without a word; try again"))?;
    Ok(ok(&anthropic::body(&model.name, &options, answer)))
}

/// Needs no engine and waits for none.
pub async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    let counted = async {
        let body = body::read(request.into_body()).await?;
        let model = app.model()?;
        let tokens = blocking(move || Ok(model.chat_tokens(&anthropic::parse_count(&body)?)?.0.len())).await?;
        Ok(ok(&json!({ "input_tokens": tokens })))
    };
    counted.await.unwrap_or_else(|error: ApiError| error.response_with(&error.anthropic_body()))
}

pub async fn responses(State(app): State<Arc<App>>, peer: Option<Extension<Peer>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let answered = answer_response(&app, client_of(peer, &parts.headers), body).await;
    answered.inspect_err(|_| app.live.note_refused())
}

async fn answer_response(app: &Arc<App>, client: String, body: axum::body::Body) -> Result<Response, ApiError> {
    let body = body::read(body).await?;
    let model = app.model()?;
    let for_tokens = Arc::clone(&model);
    let prepared = blocking(move || {
        let (chat, options) = responses::parse(&body)?;
        Prepared::new(&for_tokens, chat, options).map_err(responses::in_own_fields)
    })
    .await?;
    let Prepared { chat, options, prompt_tokens, generates } = prepared;
    app.check_length(&model, prompt_tokens)?;
    let events = app.ask("responses", chat.answer.client.as_ref().unwrap_or(&client), generates)?;
    if options.stream {
        return Ok(stream::response(ResponseStream::new(&model.name, &options), events, 1));
    }
    let answers = stream::collect(events, 1).await?;
    let answer = answers.first().ok_or_else(|| ApiError::engine("lost", "the answer ended without a word; try again"))?;
    Ok(ok(&responses::body(&model.name, &options, answer)))
}

/// Work that takes a processor for a while.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(ApiError::engine("request_failed", "this request made the server stumble; it goes on with others")),
    }
}

/// Who asks, for fairness: what the client calls itself, else where it is and what program it is.
pub fn client_of(peer: Option<Extension<Peer>>, headers: &HeaderMap) -> String {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let mut client = match text("x-ebbtide-client") {
        Some(client) => client.to_owned(),
        None => {
            let address = peer.map_or_else(String::new, |Extension(Peer(address))| address.ip().to_string());
            format!("{address} {}", text("user-agent").unwrap_or_default())
        }
    };
    // All of it is ASCII, so that it can be cut anywhere.
    client.truncate(CLIENT_BYTES_MAX);
    client
}
