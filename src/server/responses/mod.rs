//! OpenAI's newer wire form: `/v1/responses`, as Codex and the official clients use it.
//!
//! Nothing is kept here from one request to the next: a request brings its whole conversation, thoughts and calls included, and what asks
//! for something stored is refused by name. Tools that the service runs itself (search, files, a computer) and tools without a schema are
//! left out: agents send them along unasked, and a model that does not know of them does not call them.

mod input;
mod stream;

pub use stream::{ResponseStream, body};

use serde_json::{Value, json};

use super::chat::{AnswerOptions, ChatRequest, FORMAT_FIELD, SamplingOverrides, ToolChoice};
use super::error::ApiError;
use super::fields::{Fields, parse_body};
use crate::reply::AnswerRule;
use crate::tokenizer::Json;

/// Most tools of a request.
const TOOLS_MAX: usize = 512;

/// What a client wants of the form of its answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseOptions {
    /// Piece by piece.
    pub stream: bool,
    /// Fields of the request that the response repeats.
    pub repeated: Value,
}

/// Reads a request.
///
/// # Errors
/// 400, naming the field.
pub fn parse(body: &[u8]) -> Result<(ChatRequest, ResponseOptions), ApiError> {
    let json = parse_body(body)?;
    let fields = Fields::of_body(&json)?;
    refuse_what_is_stored(&fields)?;
    let messages = input::read(&fields)?;
    let tools = tools(&fields)?;
    let tool_choice = tool_choice(&fields, &tools)?;
    let (thinking, format) = (thinking(&fields)?, format(&fields)?);
    let parallel_tool_calls = fields.flag("parallel_tool_calls")?.unwrap_or(true);
    let client = match fields.text("prompt_cache_key")? {
        None => fields.text("user")?,
        key => key,
    };
    let answer = AnswerOptions {
        sampling: SamplingOverrides::read(&fields)?,
        tokens_max: fields.count("max_output_tokens", 1, usize::MAX)?,
        n: 1,
        client: client.map(str::to_owned),
        ..AnswerOptions::default()
    };
    let options = ResponseOptions { stream: fields.flag("stream")?.unwrap_or(false), repeated: repeated(body, parallel_tool_calls) };
    let chat = ChatRequest { messages, tools, tool_choice, parallel_tool_calls, thinking, format, answer, ..ChatRequest::default() };
    Ok((chat, options))
}

/// An error of a conversation's common form, by the names that this form has for the fields.
#[must_use]
pub fn in_own_fields(error: ApiError) -> ApiError {
    let param = error.param.map(|param| match param.as_str() {
        FORMAT_FIELD => "text.format.schema".to_owned(),
        "messages" => "input".to_owned(),
        _ => param,
    });
    ApiError { param, ..error }
}

fn refuse_what_is_stored(fields: &Fields<'_>) -> Result<(), ApiError> {
    for name in ["previous_response_id", "conversation", "prompt"] {
        if fields.get(name).is_some() {
            return Err(fields.refuse(name, "nothing is stored here: send the whole conversation as `input`"));
        }
    }
    if fields.flag("background")? == Some(true) {
        return Err(fields.refuse("background", "answers are not written in the background: leave it out"));
    }
    Ok(())
}

/// Tools in the chat form, which has the function inside.
fn tools(fields: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    let mut tools = Vec::new();
    for (index, tool) in fields.list("tools", TOOLS_MAX)?.iter().enumerate() {
        let path = format!("tools[{index}]");
        let tool = Fields::new(tool, &path)?;
        if tool.text("type")?.ok_or_else(|| tool.refuse("type", "missing"))? != "function" {
            continue;
        }
        let name = tool.text("name")?.filter(|name| !name.is_empty()).ok_or_else(|| tool.refuse("name", "missing"))?;
        let mut function = vec![("name".to_owned(), Json::from(name))];
        function.extend(tool.text("description")?.map(|text| ("description".to_owned(), Json::from(text))));
        tool.entries("parameters")?;
        function.extend(tool.get("parameters").map(|schema| ("parameters".to_owned(), schema.clone())));
        tools.push(Json::Object(vec![("type".to_owned(), Json::from("function")), ("function".to_owned(), Json::Object(function))]));
    }
    Ok(tools)
}

fn tool_choice(fields: &Fields<'_>, tools: &[Json]) -> Result<ToolChoice, ApiError> {
    let choice = match fields.get("tool_choice") {
        None => ToolChoice::Auto,
        Some(Json::String(word)) => match word.as_str() {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => return Err(fields.refuse("tool_choice", "none of auto, none, required, or an object")),
        },
        Some(object) => {
            let choice = Fields::new(object, "tool_choice")?;
            match choice.text("type")? {
                Some("function") => ToolChoice::Named(choice.text("name")?.ok_or_else(|| choice.refuse("name", "missing"))?.to_owned()),
                _ => return Err(choice.refuse("type", "only `function` can be demanded")),
            }
        }
    };
    match &choice {
        ToolChoice::Required if tools.is_empty() => Err(fields.refuse("tool_choice", "a tool has to be called, but there is none")),
        ToolChoice::Named(name) if !tools.iter().any(|tool| function_name(tool) == Some(name)) => {
            Err(fields.refuse("tool_choice", &format!("there is no tool `{name}`")))
        }
        _ => Ok(choice),
    }
}

fn function_name(tool: &Json) -> Option<&String> {
    match tool.get("function")?.get("name")? {
        Json::String(name) => Some(name),
        _ => None,
    }
}

/// Whether the model is to think; as its template does where the request does not say.
fn thinking(fields: &Fields<'_>) -> Result<Option<bool>, ApiError> {
    let Some(reasoning) = fields.get("reasoning") else { return Ok(None) };
    let reasoning = Fields::new(reasoning, "reasoning")?;
    match reasoning.text("effort")? {
        None => Ok(None),
        Some("none") => Ok(Some(false)),
        Some("minimal" | "low" | "medium" | "high" | "xhigh") => Ok(Some(true)),
        Some(_) => Err(reasoning.refuse("effort", "none of none, minimal, low, medium, high, xhigh")),
    }
}

/// What the text has to be like.
fn format(fields: &Fields<'_>) -> Result<Option<AnswerRule>, ApiError> {
    let Some(text) = fields.get("text") else { return Ok(None) };
    let text = Fields::new(text, "text")?;
    let Some(format) = text.get("format") else { return Ok(None) };
    let format = Fields::new(format, "text.format")?;
    match format.text("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(AnswerRule::JsonObject)),
        Some("json_schema") => {
            format.text("name")?.ok_or_else(|| format.refuse("name", "missing"))?;
            format.entries("schema")?;
            let schema = format.get("schema").ok_or_else(|| format.refuse("schema", "missing"))?;
            Ok(Some(AnswerRule::JsonSchema(serde_json::to_string(schema).unwrap_or_default())))
        }
        _ => Err(format.refuse("type", "none of text, json_object, json_schema")),
    }
}

/// Fields that a response repeats from its request; others have their defaults.
fn repeated(body: &[u8], parallel_tool_calls: bool) -> Value {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let or = |key: &str, default: Value| body.get(key).filter(|value| !value.is_null()).cloned().unwrap_or(default);
    json!({
        "instructions": or("instructions", Value::Null),
        "max_output_tokens": or("max_output_tokens", Value::Null),
        "metadata": or("metadata", json!({})),
        "parallel_tool_calls": parallel_tool_calls,
        "previous_response_id": null,
        "reasoning": or("reasoning", json!({ "effort": null, "summary": null })),
        "store": false,
        "temperature": or("temperature", Value::Null),
        "text": or("text", json!({ "format": { "type": "text" } })),
        "tool_choice": or("tool_choice", "auto".into()),
        "tools": or("tools", json!([])),
        "top_p": or("top_p", Value::Null),
        "truncation": "disabled",
        "user": or("user", Value::Null),
    })
}

#[cfg(test)]
mod tests;
