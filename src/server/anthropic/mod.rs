//! Anthropic's wire form: `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! Fields that are not named here are ignored. Nothing is fetched and no tool is run here, so images, documents and tools of the service
//! itself are refused by name.
//!
//! **Usage.** A request that marks something with `cache_control` is told tokens as the service tells them: `input_tokens` are those that
//! had to be read, `cache_read_input_tokens` the others. To one that does not, `input_tokens` are all of them, the number of
//! `count_tokens`, and `cache_read_input_tokens` says how many of these were known.

mod messages;
mod stream;

pub use stream::{MessageStream, body};

use super::chat::{AnswerOptions, ChatRequest, SamplingOverrides, ToolChoice, read_stops};
use super::error::ApiError;
use super::fields::{Fields, parse_body};
use crate::tokenizer::Json;

/// Most tools of a request.
const TOOLS_MAX: usize = 512;

/// What a client wants of the form of its answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MessageOptions {
    /// Piece by piece.
    pub stream: bool,
    /// Something is marked with `cache_control`.
    pub marks_cache: bool,
    /// The stop texts, to name the one that was met.
    pub stops: Vec<String>,
}

/// Reads a request.
///
/// # Errors
/// 400, naming the field.
pub fn parse(body: &[u8]) -> Result<(ChatRequest, MessageOptions), ApiError> {
    let body = parse_body(body)?;
    let fields = Fields::of_body(&body)?;
    let tokens_max = fields.count("max_tokens", 1, usize::MAX)?.ok_or_else(|| fields.refuse("max_tokens", "missing"))?;
    let chat = conversation(&fields)?;
    let stop = read_stops(&fields, "stop_sequences")?;
    let client = match fields.get("metadata") {
        None => None,
        Some(metadata) => Fields::new(metadata, "metadata")?.text("user_id")?.map(str::to_owned),
    };
    let options = MessageOptions {
        stream: fields.flag("stream")?.unwrap_or(false),
        marks_cache: has_key(&body, "cache_control"),
        stops: stop.clone(),
    };
    let sampling = SamplingOverrides::read(&fields)?;
    let answer = AnswerOptions { sampling, tokens_max: Some(tokens_max), stop, n: 1, client, ..AnswerOptions::default() };
    Ok((ChatRequest { answer, ..chat }, options))
}

/// Reads a request to count the tokens of a conversation.
///
/// # Errors
/// 400, naming the field.
pub fn parse_count(body: &[u8]) -> Result<ChatRequest, ApiError> {
    let body = parse_body(body)?;
    conversation(&Fields::of_body(&body)?)
}

/// All that the prompt is made of.
fn conversation(fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
    let (tool_choice, parallel_tool_calls) = tool_choice(fields)?;
    let (thinking, reasoning_tokens_max) = thinking(fields)?;
    let tools = tools(fields)?;
    if tools.is_empty() && matches!(tool_choice, ToolChoice::Required | ToolChoice::Named(_)) {
        return Err(fields.refuse("tool_choice", "a tool has to be called, but `tools` is empty"));
    }
    if let ToolChoice::Named(name) = &tool_choice {
        let is_it = |tool: &Json| tool.get("function").and_then(|function| function.get("name")) == Some(&Json::String(name.clone()));
        if !tools.iter().any(is_it) {
            return Err(fields.refuse("tool_choice", &format!("there is no tool `{name}`")));
        }
    }
    let messages = messages::read(fields)?;
    Ok(ChatRequest {
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        thinking: Some(thinking),
        reasoning_tokens_max,
        ..ChatRequest::default()
    })
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    let tools = fields.list("tools", TOOLS_MAX)?;
    let one = |(index, tool): (usize, &Json)| {
        let path = format!("tools[{index}]");
        let tool = Fields::new(tool, &path)?;
        if let Some(kind) = tool.text("type")?.filter(|&kind| kind != "custom") {
            return Err(tool.refuse("type", &format!("`{kind}` is a tool of the service itself, none is run here: leave it out")));
        }
        let name = tool.text("name")?.filter(|name| !name.is_empty()).ok_or_else(|| tool.refuse("name", "missing"))?;
        let mut function = vec![("name".to_owned(), Json::from(name))];
        function.extend(tool.text("description")?.map(|text| ("description".to_owned(), Json::from(text))));
        tool.entries("input_schema")?;
        let schema = tool.get("input_schema").ok_or_else(|| tool.refuse("input_schema", "missing"))?;
        function.push(("parameters".to_owned(), schema.clone()));
        Ok(Json::Object(vec![("type".to_owned(), Json::from("function")), ("function".to_owned(), Json::Object(function))]))
    };
    tools.iter().enumerate().map(one).collect()
}

/// Whether tools are called, and several at once.
fn tool_choice(fields: &Fields<'_>) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.get("tool_choice") else { return Ok((ToolChoice::Auto, true)) };
    let choice = Fields::new(choice, "tool_choice")?;
    let parallel = !choice.flag("disable_parallel_tool_use")?.unwrap_or(false);
    let which = match choice.text("type")? {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => ToolChoice::Named(choice.text("name")?.ok_or_else(|| choice.refuse("name", "missing"))?.to_owned()),
        _ => return Err(choice.refuse("type", "none of auto, any, tool, none")),
    };
    Ok((which, parallel))
}

/// Whether the model is to think, which clients of this API ask for, and its budget.
fn thinking(fields: &Fields<'_>) -> Result<(bool, Option<usize>), ApiError> {
    let Some(thinking) = fields.get("thinking") else { return Ok((false, None)) };
    let thinking = Fields::new(thinking, "thinking")?;
    match thinking.text("type")? {
        Some("disabled") => Ok((false, None)),
        Some("enabled" | "adaptive") => Ok((true, thinking.count("budget_tokens", 0, usize::MAX)?)),
        _ => Err(thinking.refuse("type", "none of enabled, adaptive, disabled")),
    }
}

/// Whether a key is anywhere in a value.
fn has_key(value: &Json, key: &str) -> bool {
    match value {
        Json::Array(items) => items.iter().any(|item| has_key(item, key)),
        Json::Object(entries) => entries.iter().any(|(name, value)| (name == key && *value != Json::Null) || has_key(value, key)),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
