//! `/v1/chat/completions`.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{WireOptions, answer_options, chat_logprobs, finish, messages, new_id, refuse_what_is_not_there, usage, wire_options};
use crate::reply::AnswerRule;
use crate::server::chat::{ChatRequest, LOGPROBS_MAX, ToolChoice};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, parse_body};
use crate::server::model::{ServedModel, unix_s};
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::tokenizer::Json;
use crate::worker::protocol::{Delta, Done, WrittenToken};

/// Fields that would change the answer.
const NOT_THERE: &[(&str, &str)] = &[
    ("logit_bias", "is not carried out: leave it out"),
    ("audio", "this model writes text only"),
    ("functions", "is the old form: send `tools`"),
    ("function_call", "is the old form: send `tool_choice`"),
    ("web_search_options", "nothing is fetched: leave it out"),
    ("prediction", "is not carried out: leave it out, the text itself is drafted from"),
];

/// Reads a request.
///
/// # Errors
/// 400, naming the field.
pub fn parse(body: &[u8]) -> Result<(ChatRequest, WireOptions), ApiError> {
    let body = parse_body(body)?;
    let fields = Fields::of_body(&body)?;
    refuse_what_is_not_there(&fields, NOT_THERE)?;
    let mut answer = answer_options(&fields)?;
    // The newer name goes first.
    answer.tokens_max = fields.count("max_completion_tokens", 1, usize::MAX)?.or(answer.tokens_max);
    let top = fields.count("top_logprobs", 0, LOGPROBS_MAX)?;
    answer.logprobs = match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, top) => Some(top.unwrap_or(0)),
        (false, Some(1..)) => return Err(fields.refuse("top_logprobs", "only with \"logprobs\": true")),
        (false, _) => None,
    };
    let template_args = fields.entries("chat_template_kwargs")?.to_vec();
    let thinking = match fields.text("reasoning_effort")? {
        None => None,
        Some("none") => Some(false),
        Some("minimal" | "low" | "medium" | "high" | "xhigh") => Some(true),
        Some(_) => return Err(fields.refuse("reasoning_effort", "none of none, minimal, low, medium, high, xhigh")),
    };
    let chat = ChatRequest {
        messages: messages::read(&fields)?,
        tools: tools(&fields)?,
        tool_choice: tool_choice(&fields)?,
        parallel_tool_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        thinking,
        reasoning_tokens_max: fields.count("thinking_budget", 0, usize::MAX)?,
        template_args,
        format: format(&fields)?,
        answer,
    };
    Ok((chat, wire_options(&fields)?))
}

/// Most tools.
const TOOLS_MAX: usize = 512;

/// Reads `tools` and what belongs to them.
fn tools(fields: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    let tools = fields.list("tools", TOOLS_MAX)?;
    for (index, tool) in tools.iter().enumerate() {
        let path = format!("tools[{index}]");
        let tool = Fields::new(tool, &path)?;
        match tool.text("type")? {
            Some("function") => {}
            _ => return Err(tool.refuse("type", "only `function` tools are called")),
        }
        let function = tool.get("function").ok_or_else(|| tool.refuse("function", "missing"))?;
        let function_path = tool.path("function");
        let function = Fields::new(function, &function_path)?;
        if function.text("name")?.is_none_or(str::is_empty) {
            return Err(function.refuse("name", "missing"));
        }
        function.entries("parameters")?;
    }
    Ok(tools.to_vec())
}

/// Reads `tool_choice`; whether a tool of that name is there shows later.
fn tool_choice(fields: &Fields<'_>) -> Result<ToolChoice, ApiError> {
    match fields.get("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Json::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(fields.refuse("tool_choice", "none of auto, none, required, or an object that names a function")),
        },
        Some(choice) => {
            let choice = Fields::new(choice, "tool_choice")?;
            if choice.text("type")? != Some("function") {
                return Err(choice.refuse("type", "only `function` can be demanded"));
            }
            let function = choice.get("function").ok_or_else(|| choice.refuse("function", "missing"))?;
            let function = Fields::new(function, "tool_choice.function")?;
            Ok(ToolChoice::Named(function.text("name")?.ok_or_else(|| function.refuse("name", "missing"))?.to_owned()))
        }
    }
}

/// Reads `response_format`. The last two kinds are ours.
fn format(fields: &Fields<'_>) -> Result<Option<AnswerRule>, ApiError> {
    let Some(format) = fields.get("response_format") else { return Ok(None) };
    let format = Fields::new(format, "response_format")?;
    let needed = |name: &str| format.text(name)?.map(str::to_owned).ok_or_else(|| format.refuse(name, "missing"));
    match format.text("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(AnswerRule::JsonObject)),
        Some("json_schema") => {
            let inner = format.get("json_schema").ok_or_else(|| format.refuse("json_schema", "missing"))?;
            let inner = Fields::new(inner, "response_format.json_schema")?;
            inner.text("name")?.ok_or_else(|| inner.refuse("name", "missing"))?;
            inner.entries("schema")?;
            let schema = inner.get("schema").ok_or_else(|| inner.refuse("schema", "missing"))?;
            Ok(Some(AnswerRule::JsonSchema(serde_json::to_string(schema).unwrap_or_default())))
        }
        Some("regex") => Ok(Some(AnswerRule::Regex(needed("pattern")?))),
        Some("lark") => Ok(Some(AnswerRule::Lark(needed("grammar")?))),
        _ => Err(format.refuse("type", "none of text, json_object, json_schema, regex, lark")),
    }
}

/// The body of complete answers.
#[must_use]
pub fn body(model: &ServedModel, answers: &[Answer], with_logprobs: bool) -> Value {
    let choice = |(index, answer): (usize, &Answer)| {
        let calls: Vec<Value> = answer.calls.iter().map(|(name, arguments)| call(&new_id("call_"), name, arguments)).collect();
        let content = if answer.content.is_empty() && !calls.is_empty() { Value::Null } else { answer.content.clone().into() };
        let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.clone().into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        let logprobs = if with_logprobs { chat_logprobs(model, &answer.tokens) } else { Value::Null };
        json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish(&answer.done) })
    };
    json!({
        "id": new_id("chatcmpl-"),
        "object": "chat.completion",
        "created": unix_s(),
        "model": model.name,
        "choices": answers.iter().enumerate().map(choice).collect::<Vec<_>>(),
        "usage": usage(answers.iter().map(|answer| &*answer.done)),
    })
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } })
}

/// A stream of chunks.
pub struct ChatStream {
    model: Arc<ServedModel>,
    id: String,
    created: u64,
    options: WireOptions,
    with_logprobs: bool,
    answers: usize,
    done: Vec<(usize, Box<Done>)>,
}

impl ChatStream {
    /// Before the first chunk.
    #[must_use]
    pub fn new(model: Arc<ServedModel>, options: WireOptions, answers: usize, with_logprobs: bool) -> Self {
        Self { model, id: new_id("chatcmpl-"), created: unix_s(), options, with_logprobs, answers, done: Vec::new() }
    }

    fn chunk(&self, choices: &Value) -> SseEvent {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model.name,
            "choices": choices,
        });
        if self.options.usage_chunk {
            chunk["usage"] = Value::Null;
        }
        SseEvent::data(chunk)
    }

    fn choice(&self, index: usize, delta: &Value, tokens: &[WrittenToken], finish: Option<&str>) -> SseEvent {
        let logprobs = if self.with_logprobs && !tokens.is_empty() { chat_logprobs(&self.model, tokens) } else { Value::Null };
        self.chunk(&json!([{ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish }]))
    }
}

fn delta_json(delta: Delta) -> Option<Value> {
    Some(match delta {
        Delta::Reasoning(text) => json!({ "reasoning_content": text }),
        Delta::Content(text) => json!({ "content": text }),
        Delta::ToolCall { index, name } => {
            let mut call = call(&new_id("call_"), &name, "");
            call["index"] = index.into();
            json!({ "tool_calls": [call] })
        }
        // Clients join pieces by the call's number and need no end.
        Delta::ToolEnd { .. } => return None,
        Delta::ToolArguments { index, text } => json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] }),
    })
}

impl Wire for ChatStream {
    fn begin(&mut self) -> Vec<SseEvent> {
        (0..self.answers).map(|index| self.choice(index, &json!({ "role": "assistant", "content": "" }), &[], None)).collect()
    }

    fn event(&mut self, choice: usize, event: AnswerEvent) -> Vec<SseEvent> {
        match event {
            AnswerEvent::Wrote { deltas, mut tokens } => {
                if deltas.is_empty() && self.with_logprobs && !tokens.is_empty() {
                    return vec![self.choice(choice, &json!({}), &tokens, None)];
                }
                let mut events = Vec::with_capacity(deltas.len());
                for delta in deltas.into_iter().filter_map(delta_json) {
                    events.push(self.choice(choice, &delta, &std::mem::take(&mut tokens), None));
                }
                events
            }
            AnswerEvent::Done(done) => {
                let event = self.choice(choice, &json!({}), &[], Some(finish(&done)));
                self.done.push((choice, done));
                vec![event]
            }
            AnswerEvent::Reading { .. } | AnswerEvent::Failed(_) => Vec::new(),
        }
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let mut events = Vec::new();
        if self.options.usage_chunk {
            self.done.sort_by_key(|(choice, _)| *choice);
            let mut chunk = json!({
                "id": self.id,
                "object": "chat.completion.chunk",
                "created": self.created,
                "model": self.model.name,
                "choices": [],
            });
            chunk["usage"] = usage(self.done.iter().map(|(_, done)| &**done));
            events.push(SseEvent::data(chunk));
        }
        events.push(SseEvent::data("[DONE]"));
        events
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SseEvent> {
        vec![SseEvent::data(error.openai_body()), SseEvent::data("[DONE]")]
    }
}
