//! OpenAI's wire form: `/v1/chat/completions`, `/v1/completions`, `/v1/models`.
//!
//! Fields that are not named here are ignored; those that would change the answer and cannot be carried out are refused by name.

pub mod chat;
pub mod completions;
pub mod messages;

use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::chat::{AnswerOptions, CHOICES_MAX, SamplingOverrides, fresh_seed, read_stops};
use super::error::{ApiError, json_response};
use super::fields::Fields;
use super::live::finish_word;
use super::model::ServedModel;
use crate::tokenizer::Json;
use crate::worker::protocol::{Done, WrittenToken};

/// What a client wants of the form of its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WireOptions {
    /// Piece by piece.
    pub stream: bool,
    /// With a last chunk that says how many tokens there were.
    pub usage_chunk: bool,
}

/// Reads the fields that chat and plain completions share, all but log-probabilities.
fn answer_options(fields: &Fields<'_>) -> Result<AnswerOptions, ApiError> {
    Ok(AnswerOptions {
        sampling: SamplingOverrides::read(fields)?,
        // More than any context holds is no fault: agents always send their largest number.
        tokens_max: fields.count("max_tokens", 1, usize::MAX)?,
        stop: read_stops(fields, "stop")?,
        n: fields.count("n", 1, CHOICES_MAX)?.unwrap_or(1),
        logprobs: None,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
        client: fields.text("user")?.map(str::to_owned),
    })
}

fn wire_options(fields: &Fields<'_>) -> Result<WireOptions, ApiError> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let usage_chunk = match fields.get("stream_options") {
        None => false,
        Some(_) if !stream => return Err(fields.refuse("stream_options", "only with \"stream\": true")),
        Some(options) => Fields::new(options, "stream_options")?.flag("include_usage")?.unwrap_or(false),
    };
    Ok(WireOptions { stream, usage_chunk })
}

/// Refuses fields that would change the answer and that nobody carries out.
fn refuse_what_is_not_there(fields: &Fields<'_>, names: &[(&str, &str)]) -> Result<(), ApiError> {
    for (name, why) in names {
        let asks = match fields.get(name) {
            None | Some(Json::Bool(false)) => false,
            Some(Json::Array(items)) => !items.is_empty(),
            Some(Json::Object(entries)) => !entries.is_empty(),
            Some(_) => true,
        };
        if asks {
            return Err(fields.refuse(name, why));
        }
    }
    Ok(())
}

/// `finish_reason`.
fn finish(done: &Done) -> &'static str {
    finish_word(done.finish)
}

/// `usage` of one or several answers to one prompt.
#[must_use]
pub fn usage<'a>(answers: impl IntoIterator<Item = &'a Done>) -> Value {
    let (mut prompt, mut cached, mut completion, mut reasoning) = (0, 0, 0, 0);
    for (index, done) in answers.into_iter().enumerate() {
        // The prompt is the client's once; what its first answer found of it counts.
        if index == 0 {
            (prompt, cached) = (done.prompt_tokens, done.reused_tokens);
        }
        completion += done.completion_tokens;
        reasoning += done.reasoning_tokens;
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached },
        "completion_tokens_details": { "reasoning_tokens": reasoning },
    })
}

/// Log-probabilities of tokens in the form of chat answers.
fn chat_logprobs(model: &ServedModel, tokens: &[WrittenToken]) -> Value {
    let entry = |token: u32, logprob: f32| {
        let (text, bytes) = model.token_text(token);
        json!({ "token": text, "logprob": logprob, "bytes": bytes })
    };
    let content: Vec<Value> = tokens
        .iter()
        .filter_map(|token| {
            let logprobs = token.logprobs.as_ref()?;
            let mut entry_of_token = entry(token.id, logprobs.chosen);
            entry_of_token["top_logprobs"] = logprobs.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
            Some(entry_of_token)
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// A name that no other answer has.
#[must_use]
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", fresh_seed(), fresh_seed() >> 32)
}

/// `/v1/models` and `/v1/models/{name}`.
#[must_use]
pub fn model_entry(model: &ServedModel, ctx_tokens: Option<u32>) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.opened_unix_s,
        "owned_by": "local",
        "context_length": ctx_tokens,
        "max_model_len": ctx_tokens,
    })
}

/// A good answer.
#[must_use]
pub fn ok(body: &Value) -> Response {
    json_response(StatusCode::OK, body)
}
