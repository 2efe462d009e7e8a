//! Messages of OpenAI's form to those that templates take: contents as plain text, arguments of calls as objects.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, kind};
use crate::tokenizer::Json;

/// Most messages of a conversation.
pub const MESSAGES_MAX: usize = 10_000;

/// Reads `messages`.
///
/// # Errors
/// 400 that names the message and what is wrong with it; images and sounds are refused by name.
pub fn read(body: &Fields<'_>) -> Result<Vec<Json>, ApiError> {
    if let Some(Json::Array(messages)) = body.get("messages")
        && messages.is_empty()
    {
        return Err(body.refuse("messages", "the list is empty: give at least one message"));
    }
    let messages = match body.get("messages") {
        None => return Err(body.refuse("messages", "missing: give a list with at least one message")),
        Some(_) => body.list("messages", MESSAGES_MAX)?,
    };
    messages.iter().enumerate().map(|(index, message)| read_one(message, &format!("messages[{index}]"))).collect()
}

fn read_one(message: &Json, path: &str) -> Result<Json, ApiError> {
    let fields = Fields::new(message, path)?;
    let role = fields.text("role")?.ok_or_else(|| fields.refuse("role", "missing"))?;
    let role = match role {
        "developer" => "system",
        "function" => "tool",
        "system" | "user" | "assistant" | "tool" => role,
        other => return Err(fields.refuse("role", &format!("`{}` is none of system, developer, user, assistant, tool", cut(other)))),
    };
    let calls = tool_calls(&fields)?;
    let content = match fields.get("content") {
        Some(content) => Some(text_of(content, &fields.path("content"))?),
        // What a model only called tools with has no content.
        None if role == "assistant" && (calls.is_some() || fields.get("reasoning_content").is_some()) => Some(String::new()),
        None => None,
    };
    let content = content.ok_or_else(|| fields.refuse("content", "missing"))?;
    let mut entries = vec![("role".to_owned(), Json::from(role)), ("content".to_owned(), Json::String(content))];
    // Other servers' name for the same.
    let reasoning = fields.text("reasoning_content")?.or(fields.text("reasoning")?);
    entries.extend(reasoning.map(|text| ("reasoning_content".to_owned(), Json::from(text))));
    entries.extend(calls.map(|calls| ("tool_calls".to_owned(), calls)));
    for name in ["name", "tool_call_id"] {
        entries.extend(fields.text(name)?.map(|text| (name.to_owned(), Json::from(text))));
    }
    Ok(Json::Object(entries))
}

/// Contents as one text.
pub(in crate::server) fn text_of(content: &Json, path: &str) -> Result<String, ApiError> {
    let parts = match content {
        Json::String(text) => return Ok(text.clone()),
        Json::Array(parts) => parts,
        other => return Err(ApiError::bad(path, format!("{path} is {}, a string or a list of parts is needed", kind(other)))),
    };
    let mut text = String::new();
    for (index, part) in parts.iter().enumerate() {
        let path = format!("{path}[{index}]");
        let fields = Fields::new(part, &path)?;
        match fields.text("type")?.ok_or_else(|| fields.refuse("type", "missing"))? {
            "text" | "input_text" | "output_text" => {
                text.push_str(fields.text("text")?.ok_or_else(|| fields.refuse("text", "missing"))?);
            }
            "refusal" => text.push_str(fields.text("refusal")?.unwrap_or_default()),
            kind @ ("image_url" | "image" | "input_image" | "input_audio" | "audio" | "video_url" | "file" | "input_file") => {
                return Err(ApiError::bad(
                    &path,
                    format!("{path}: this model reads text only, `{kind}` cannot be sent to it; nothing was fetched"),
                ));
            }
            other => return Err(fields.refuse("type", &format!("`{}` is no kind of part that is known: send `text`", cut(other)))),
        }
    }
    Ok(text)
}

/// The calls of an assistant's message; `None` where there are none. Arguments that are an object, as text or as such, reach the
/// template as an object; a text that is none is kept as it is, since clients replay what was cut off.
fn tool_calls(fields: &Fields<'_>) -> Result<Option<Json>, ApiError> {
    let calls = fields.list("tool_calls", 256)?;
    if calls.is_empty() {
        return Ok(None);
    }
    let mut read = Vec::with_capacity(calls.len());
    for (index, call) in calls.iter().enumerate() {
        let path = fields.path(&format!("tool_calls[{index}]"));
        let call = Fields::new(call, &path)?;
        let function = call.get("function").ok_or_else(|| call.refuse("function", "missing"))?;
        let function_path = call.path("function");
        let function = Fields::new(function, &function_path)?;
        let name = function.text("name")?.ok_or_else(|| function.refuse("name", "missing"))?;
        let arguments = match function.get("arguments") {
            None => Json::Object(Vec::new()),
            Some(Json::String(text)) if text.trim().is_empty() => Json::Object(Vec::new()),
            Some(Json::String(text)) => match serde_json::from_str::<Json>(text) {
                Ok(object @ Json::Object(_)) => object,
                _ => Json::String(text.clone()),
            },
            Some(object @ Json::Object(_)) => object.clone(),
            Some(other) => {
                return Err(function.refuse("arguments", &format!("{} is given, a JSON object as a string is needed", kind(other))));
            }
        };
        let function = vec![("name".to_owned(), Json::from(name)), ("arguments".to_owned(), arguments)];
        let mut entries = vec![("type".to_owned(), Json::from("function")), ("function".to_owned(), Json::Object(function))];
        entries.extend(call.text("id")?.map(|id| ("id".to_owned(), Json::from(id))));
        read.push(Json::Object(entries));
    }
    Ok(Some(Json::Array(read)))
}

/// The beginning of a text that a client made up.
fn cut(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::fields::parse_body;

    fn read_text(messages: &str) -> Result<Vec<Json>, ApiError> {
        let body = parse_body(format!("{{\"messages\":{messages}}}").as_bytes()).expect("JSON");
        read(&Fields::of_body(&body).expect("an object"))
    }

    #[test]
    fn parts_become_one_text_and_roles_those_of_templates() {
        let read = read_text(
            r#"[{"role":"developer","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
                {"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"z\":1,\"a\":2}"}}]},
                {"role":"tool","tool_call_id":"c1","content":"7"}]"#,
        )
        .expect("all in order");
        assert_eq!((read[0].get("role"), read[0].get("content")), (Some(&Json::from("system")), Some(&Json::from("ab"))));
        let Some(Json::Array(calls)) = read[1].get("tool_calls") else { panic!("{:?}", read[1]) };
        let arguments = calls[0].get("function").and_then(|function| function.get("arguments"));
        let Some(Json::Object(entries)) = arguments else { panic!("{calls:?}") };
        assert_eq!(entries.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["z", "a"], "the order of keys is kept");
        assert_eq!(read[2].get("tool_call_id"), Some(&Json::from("c1")));
    }

    #[test]
    fn a_call_that_was_cut_off_is_taken_as_text() {
        for arguments in [r#""{""#, r#""[1]""#] {
            let message = format!(r#"[{{"role":"assistant","tool_calls":[{{"function":{{"name":"f","arguments":{arguments}}}}}]}}]"#);
            let read = read_text(&message).expect(arguments);
            let Some(Json::Array(calls)) = read[0].get("tool_calls") else { panic!("{read:?}") };
            assert!(matches!(calls[0].get("function").and_then(|function| function.get("arguments")), Some(Json::String(_))));
        }
        let refused = read_text(r#"[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":7}}]}]"#).expect_err("a number");
        assert_eq!(refused.param.as_deref(), Some("messages[0].tool_calls[0].function.arguments"));
    }

    #[test]
    fn what_is_no_conversation_is_refused_by_name() {
        for (messages, param) in [
            ("[]", "messages"),
            ("null", "messages"),
            ("{}", "messages"),
            ("\"x\"", "messages"),
            ("[1]", "messages[0]"),
            (r#"[{"role":"user"}]"#, "messages[0].content"),
            (r#"[{"role":"user","content":null}]"#, "messages[0].content"),
            (r#"[{"role":"king","content":"x"}]"#, "messages[0].role"),
            (r#"[{"content":"x"}]"#, "messages[0].role"),
            (r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]"#, "messages[0].content[0]"),
            (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0].text"),
            (r#"[{"role":"user","content":[7]}]"#, "messages[0].content[0]"),
        ] {
            let refused = read_text(messages).expect_err(messages);
            assert_eq!((refused.status.as_u16(), refused.param.as_deref()), (400, Some(param)), "{messages}: {}", refused.message);
        }
    }
}
