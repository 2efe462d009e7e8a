//! `/v1/completions`: text to go on with, as it is.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{WireOptions, answer_options, finish, new_id, refuse_what_is_not_there, usage, wire_options};
use crate::server::chat::{AnswerOptions, LOGPROBS_MAX};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, kind, parse_body};
use crate::server::model::{ServedModel, unix_s};
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::tokenizer::{Json, Specials};
use crate::units::TokenId;
use crate::worker::protocol::{Delta, Done, WrittenToken};

/// Most prompts of one request.
const PROMPTS_MAX: usize = 16;

/// Fields that would change the answer.
const NOT_THERE: &[(&str, &str)] = &[
    ("logit_bias", "is not carried out: leave it out"),
    ("suffix", "this model does not fill gaps: leave it out"),
    ("echo", "is not carried out: put the prompt before the answer yourself"),
];

/// What is gone on with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text; control tokens in it are recognised.
    Text(String),
    /// Tokens.
    Tokens(Vec<TokenId>),
}

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// What the answers shall be.
    pub answer: AnswerOptions,
}

/// Reads a request.
///
/// # Errors
/// 400, naming the field.
pub fn parse(body: &[u8]) -> Result<(CompletionRequest, WireOptions), ApiError> {
    let body = parse_body(body)?;
    let fields = Fields::of_body(&body)?;
    refuse_what_is_not_there(&fields, NOT_THERE)?;
    let mut answer = answer_options(&fields)?;
    answer.logprobs = fields.count("logprobs", 0, LOGPROBS_MAX)?;
    if let Some(best_of) = fields.count("best_of", 1, usize::MAX)?
        && best_of != answer.n
    {
        return Err(fields.refuse("best_of", "only as many as `n`: answers are not ranked"));
    }
    Ok((CompletionRequest { prompts: prompts(&fields)?, answer }, wire_options(&fields)?))
}

fn prompts(fields: &Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    let refuse = || fields.refuse("prompt", "a string, a list of token numbers, or a list of either is needed, and none empty");
    let prompts = match fields.get("prompt") {
        None => return Err(fields.refuse("prompt", "missing")),
        Some(Json::String(text)) => vec![Prompt::Text(text.clone())],
        Some(Json::Array(items)) if matches!(items.first(), Some(Json::Number(_))) => vec![tokens(items).ok_or_else(refuse)?],
        Some(Json::Array(items)) => {
            if items.len() > PROMPTS_MAX {
                return Err(fields.refuse("prompt", &format!("{} prompts, at most {PROMPTS_MAX} are taken", items.len())));
            }
            let prompt = |item: &Json| match item {
                Json::String(text) => Some(Prompt::Text(text.clone())),
                Json::Array(items) => tokens(items),
                _ => None,
            };
            items.iter().map(prompt).collect::<Option<Vec<_>>>().ok_or_else(refuse)?
        }
        Some(other) => return Err(fields.refuse("prompt", &format!("{} is given, a string or a list is needed", kind(other)))),
    };
    let is_empty = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.is_empty(),
        Prompt::Tokens(tokens) => tokens.is_empty(),
    };
    if prompts.is_empty() || prompts.iter().any(is_empty) {
        return Err(refuse());
    }
    Ok(prompts)
}

fn tokens(items: &[Json]) -> Option<Prompt> {
    let token = |item: &Json| match item {
        Json::Number(number) => number.as_u64().and_then(|number| TokenId::try_from(number).ok()),
        _ => None,
    };
    items.iter().map(token).collect::<Option<Vec<_>>>().map(Prompt::Tokens)
}

/// The tokens of a prompt.
///
/// # Errors
/// 400 for numbers that are no tokens.
pub fn prompt_tokens(model: &ServedModel, prompt: &Prompt) -> Result<Vec<TokenId>, ApiError> {
    match prompt {
        Prompt::Text(text) => model.text_tokens(text, Specials::Parse),
        Prompt::Tokens(tokens) => match tokens.iter().position(|&token| token >= model.n_vocab) {
            Some(position) => Err(ApiError::bad(
                "prompt",
                format!("prompt[{position}]: {} is outside the vocabulary of {}", tokens[position], model.n_vocab),
            )),
            None => Ok(tokens.clone()),
        },
    }
}

/// Log-probabilities in the form of plain completions. `offset` is the length of the text before, in characters.
fn logprobs(model: &ServedModel, tokens: &[WrittenToken], offset: &mut usize) -> Value {
    let mut json = json!({ "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [] });
    for token in tokens {
        let Some(logprobs) = &token.logprobs else { continue };
        let (text, _) = model.token_text(token.id);
        let top: serde_json::Map<String, Value> =
            logprobs.top.iter().map(|&(id, logprob)| (model.token_text(id).0, logprob.into())).collect();
        let columns: [(&str, Value); 4] = [
            ("token_logprobs", logprobs.chosen.into()),
            ("top_logprobs", top.into()),
            ("text_offset", (*offset).into()),
            ("tokens", text.clone().into()),
        ];
        *offset += text.chars().count();
        for (name, value) in columns {
            if let Value::Array(column) = &mut json[name] {
                column.push(value);
            }
        }
    }
    json
}

/// The body of complete answers, `n` to each prompt.
#[must_use]
pub fn body(model: &ServedModel, answers: &[Answer], n: usize, with_logprobs: bool) -> Value {
    let choice = |(index, answer): (usize, &Answer)| {
        let logprobs = if with_logprobs { logprobs(model, &answer.tokens, &mut 0) } else { Value::Null };
        json!({ "index": index, "text": answer.content, "logprobs": logprobs, "finish_reason": finish(&answer.done) })
    };
    json!({
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": unix_s(),
        "model": model.name,
        "choices": answers.iter().enumerate().map(choice).collect::<Vec<_>>(),
        "usage": usage_of_prompts(&answers.iter().map(|answer| &*answer.done).collect::<Vec<_>>(), n),
    })
}

/// `usage` over several prompts with `n` answers each.
fn usage_of_prompts(done: &[&Done], n: usize) -> Value {
    let mut sum = usage(std::iter::empty());
    for of_prompt in done.chunks(n.max(1)).map(|answers| usage(answers.iter().copied())) {
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            sum[name] = (sum[name].as_u64().unwrap_or(0) + of_prompt[name].as_u64().unwrap_or(0)).into();
        }
        let cached = |usage: &Value| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        sum["prompt_tokens_details"]["cached_tokens"] = (cached(&sum) + cached(&of_prompt)).into();
    }
    sum
}

/// A stream of chunks.
pub struct CompletionStream {
    model: Arc<ServedModel>,
    id: String,
    created: u64,
    options: WireOptions,
    with_logprobs: bool,
    n: usize,
    /// Characters written of each answer.
    offsets: Vec<usize>,
    done: Vec<(usize, Box<Done>)>,
}

impl CompletionStream {
    /// Before the first chunk of `answers`, `n` to each prompt.
    #[must_use]
    pub fn new(model: Arc<ServedModel>, options: WireOptions, answers: usize, n: usize, with_logprobs: bool) -> Self {
        let (id, created, offsets) = (new_id("cmpl-"), unix_s(), vec![0; answers]);
        Self { model, id, created, options, with_logprobs, n, offsets, done: Vec::new() }
    }

    fn chunk(&self, choices: &Value, usage: &Value) -> SseEvent {
        let mut chunk =
            json!({ "id": self.id, "object": "text_completion", "created": self.created, "model": self.model.name, "choices": choices });
        if self.options.usage_chunk {
            chunk["usage"] = usage.clone();
        }
        SseEvent::data(chunk)
    }
}

impl Wire for CompletionStream {
    fn begin(&mut self) -> Vec<SseEvent> {
        Vec::new()
    }

    fn event(&mut self, choice: usize, event: AnswerEvent) -> Vec<SseEvent> {
        match event {
            AnswerEvent::Wrote { deltas, tokens } => {
                let text: String =
                    deltas.into_iter().filter_map(|delta| if let Delta::Content(text) = delta { Some(text) } else { None }).collect();
                if text.is_empty() && !self.with_logprobs {
                    return Vec::new();
                }
                let logprobs = match self.offsets.get_mut(choice) {
                    Some(offset) if self.with_logprobs => logprobs(&self.model, &tokens, offset),
                    _ => Value::Null,
                };
                let choices = json!([{ "index": choice, "text": text, "logprobs": logprobs, "finish_reason": null }]);
                vec![self.chunk(&choices, &Value::Null)]
            }
            AnswerEvent::Done(done) => {
                let choices = json!([{ "index": choice, "text": "", "logprobs": null, "finish_reason": finish(&done) }]);
                self.done.push((choice, done));
                vec![self.chunk(&choices, &Value::Null)]
            }
            AnswerEvent::Reading { .. } | AnswerEvent::Failed(_) => Vec::new(),
        }
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.options.usage_chunk {
            self.done.sort_by_key(|(choice, _)| *choice);
            let done: Vec<&Done> = self.done.iter().map(|(_, done)| &**done).collect();
            events.push(self.chunk(&json!([]), &usage_of_prompts(&done, self.n)));
        }
        events.push(SseEvent::data("[DONE]"));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::data(error.openai_body()), SseEvent::data("[DONE]")]
    }
}
