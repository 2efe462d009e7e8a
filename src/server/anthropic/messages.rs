//! Messages of Anthropic's form to those that templates take: blocks to text, thoughts, calls and results.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, kind};
use crate::server::openai::messages::MESSAGES_MAX;
use crate::tokenizer::Json;

/// Begins a block of some agents' system prompt that is another one in every request. It says nothing to a model, and would make every
/// prompt a new one from its first line on.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// Reads `system` and `messages`.
///
/// # Errors
/// 400 that names the message and what is wrong with it.
pub(super) fn read(body: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    let messages = body.list("messages", MESSAGES_MAX)?;
    if messages.is_empty() {
        return Err(body.refuse("messages", "give a list with at least one message"));
    }
    let mut out = Vec::with_capacity(messages.len() + 1);
    if let Some(system) = body.get("system") {
        let texts = texts_of(system, "system")?;
        let text = texts.into_iter().filter(|text| !text.starts_with(BILLING_HEADER)).collect::<Vec<_>>().join("\n\n");
        if !text.is_empty() {
            out.push(message("system", text, Vec::new()));
        }
    }
    for (index, message) in messages.iter().enumerate() {
        read_one(message, &format!("messages[{index}]"), &mut out)?;
    }
    Ok(out)
}

fn message(role: &str, content: String, more: Vec<(String, Json)>) -> Json {
    let mut entries = vec![("role".to_owned(), Json::from(role)), ("content".to_owned(), Json::String(content))];
    entries.extend(more);
    Json::Object(entries)
}

fn read_one(message_json: &Json, path: &str, out: &mut Vec<Json>) -> Result<(), ApiError> {
    let fields = Fields::new(message_json, path)?;
    let role = fields.text("role")?.ok_or_else(|| fields.refuse("role", "missing"))?;
    let content = fields.get("content").ok_or_else(|| fields.refuse("content", "missing"))?;
    let path = fields.path("content");
    match role {
        "user" => user(content, &path, out),
        "assistant" => assistant(content, &path, out),
        // Not in the service's form, but what is meant is clear.
        "system" => {
            out.push(message("system", texts_of(content, &path)?.join("\n\n"), Vec::new()));
            Ok(())
        }
        _ => Err(fields.refuse("role", "none of user, assistant")),
    }
}

/// The blocks of a content; text alone is one.
fn blocks(content: &Json, path: &str) -> Result<Vec<(String, Block)>, ApiError> {
    let items = match content {
        Json::String(text) => return Ok(vec![(path.to_owned(), Block::Text(text.clone()))]),
        Json::Array(items) => items,
        other => return Err(ApiError::bad(path, format!("{path}: {} is given, a string or a list of blocks is needed", kind(other)))),
    };
    items.iter().enumerate().map(|(index, item)| block(item, format!("{path}[{index}]"))).collect()
}

/// A block.
enum Block {
    Text(String),
    Thinking(String),
    /// Nothing that a model reads.
    Hidden,
    Use {
        id: String,
        name: String,
        input: Json,
    },
    Result {
        id: String,
        text: String,
    },
}

fn block(item: &Json, path: String) -> Result<(String, Block), ApiError> {
    let fields = Fields::new(item, &path)?;
    let needed = |name: &str| fields.text(name)?.map(str::to_owned).ok_or_else(|| fields.refuse(name, "missing"));
    let block = match needed("type")?.as_str() {
        "text" => Block::Text(needed("text")?),
        "thinking" => Block::Thinking(needed("thinking")?),
        "redacted_thinking" => Block::Hidden,
        "tool_use" => {
            fields.entries("input")?;
            let input = fields.get("input").cloned().unwrap_or_else(|| Json::Object(Vec::new()));
            Block::Use { id: needed("id")?, name: needed("name")?, input }
        }
        "tool_result" => {
            let text = match fields.get("content") {
                None => String::new(),
                Some(content) => texts_of(content, &fields.path("content"))?.join("\n"),
            };
            Block::Result { id: needed("tool_use_id")?, text }
        }
        other => return Err(unreadable(other, &path)),
    };
    Ok((path, block))
}

fn unreadable(kind: &str, path: &str) -> ApiError {
    let kind: String = kind.chars().take(40).collect();
    ApiError::bad(path, format!("{path}: this model reads text only, `{kind}` cannot be sent to it; nothing was fetched"))
}

/// The texts of blocks that can only be text.
fn texts_of(content: &Json, path: &str) -> Result<Vec<String>, ApiError> {
    let text = |(path, block): (String, Block)| match block {
        Block::Text(text) => Ok(text),
        _ => Err(ApiError::bad(&path, format!("{path}: only text can stand here"))),
    };
    blocks(content, path)?.into_iter().map(text).collect()
}

/// Results of tools become messages of their own, in their place among the text.
fn user(content: &Json, path: &str, out: &mut Vec<Json>) -> Result<(), ApiError> {
    let before = out.len();
    let mut texts: Vec<String> = Vec::new();
    let flush = |texts: &mut Vec<String>, out: &mut Vec<Json>| {
        if !texts.is_empty() {
            out.push(message("user", std::mem::take(texts).join("\n"), Vec::new()));
        }
    };
    for (path, block) in blocks(content, path)? {
        match block {
            Block::Text(text) => texts.push(text),
            Block::Result { id, text } => {
                flush(&mut texts, out);
                out.push(message("tool", text, vec![("tool_call_id".to_owned(), Json::String(id))]));
            }
            Block::Hidden | Block::Thinking(_) | Block::Use { .. } => {
                return Err(ApiError::bad(&path, format!("{path}: a user's message has text and results of tools")));
            }
        }
    }
    flush(&mut texts, out);
    if out.len() == before {
        return Err(ApiError::bad(path, format!("{path}: there is nothing in it")));
    }
    Ok(())
}

fn assistant(content: &Json, path: &str, out: &mut Vec<Json>) -> Result<(), ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (path, block) in blocks(content, path)? {
        match block {
            Block::Text(text) => texts.push(text),
            Block::Thinking(text) => thoughts.push(text),
            Block::Hidden => {}
            Block::Use { id, name, input } => {
                let function = Json::Object(vec![("name".to_owned(), Json::String(name)), ("arguments".to_owned(), input)]);
                let entries = [("id", Json::String(id)), ("type", Json::from("function")), ("function", function)];
                calls.push(Json::Object(entries.map(|(key, value)| (key.to_owned(), value)).into()));
            }
            Block::Result { .. } => return Err(ApiError::bad(&path, format!("{path}: results of tools belong into a user's message"))),
        }
    }
    let mut more = Vec::new();
    if !thoughts.is_empty() {
        more.push(("reasoning_content".to_owned(), Json::String(thoughts.join("\n"))));
    }
    if !calls.is_empty() {
        more.push(("tool_calls".to_owned(), Json::Array(calls)));
    }
    out.push(message("assistant", texts.concat(), more));
    Ok(())
}
