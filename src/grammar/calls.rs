//! Grammars of tool calls, in the forms that the model families write.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::GrammarError;
use super::schema::{Unknown, any_object, checked, with_options};
use crate::reply::{CallForm, ToolRule};

/// A grammar in Lark's notation of one call, or several where `parallel` is set. `is_special` says whether a tag is a token of its own.
///
/// # Errors
/// [`GrammarError`] for schemas over the bounds, or no tools at all.
pub(super) fn lark(form: CallForm, tools: &[ToolRule], parallel: bool, is_special: &dyn Fn(&str) -> bool) -> Result<String, GrammarError> {
    if tools.is_empty() {
        return Err(GrammarError::NoTools);
    }
    let tag = |tag: &str| if is_special(tag) { tag.to_owned() } else { literal(tag) };
    let (open, close) = (tag("<tool_call>"), tag("</tool_call>"));
    let more = if parallel { " (\"\\n\" call)*" } else { "" };
    let names: Vec<String> = (0..tools.len()).map(|index| format!("f{index}")).collect();
    let mut out = format!("start: call{more}\ncall: {open} \"\\n\" body \"\\n\" {close}\nbody: {}\n", names.join(" | "));
    for (index, tool) in tools.iter().enumerate() {
        let schema = match &tool.parameters {
            Some(text) => checked(text, Unknown::LeftOut)?,
            None => any_object(),
        };
        match form {
            CallForm::Json => json_call(index, &tool.name, &schema, &mut out),
            CallForm::Tags => tags_call(index, &tool.name, &schema, &mut out),
        }
    }
    Ok(out)
}

fn json_call(index: usize, name: &str, schema: &Value, out: &mut String) {
    let head = literal(&format!("{{\"name\": {}, \"arguments\": ", Value::from(name)));
    let schema = as_object(schema);
    line(out, &format!("f{index}: {head} a{index} \"}}\"\na{index}: %json {schema}"));
}

/// A schema that says nothing of the type still is an object's.
fn as_object(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(entries) = &mut schema
        && !["type", "$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| entries.contains_key(*key))
    {
        entries.insert("type".to_owned(), "object".into());
    }
    schema
}

fn tags_call(index: usize, name: &str, schema: &Value, out: &mut String) {
    let empty = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required: Vec<&str> = schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let mut parts = vec![literal(&format!("<function={name}>\n"))];
    let mut rules = String::new();
    for (place, (key, property)) in properties.iter().enumerate() {
        let rule = format!("p{index}x{place}");
        parts.push(format!("{rule}{}", if required.contains(&key.as_str()) { "" } else { "?" }));
        let head = literal(&format!("<parameter={key}>\n"));
        let tail = "\n</parameter>\n";
        match texts(property) {
            Texts::Any => {
                line(&mut rules, &format!("{rule}: {head} v{index}x{place}"));
                // Up to the first closing tag.
                line(&mut rules, &format!("v{index}x{place}[suffix={}]: /(?s:.*)/", literal(tail)));
            }
            Texts::Of(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                line(&mut rules, &format!("{rule}: {head} ({}) {}", texts.join(" | "), literal(tail)));
            }
            Texts::Json => {
                line(&mut rules, &format!("{rule}: {head} v{index}x{place} {}", literal(tail)));
                line(&mut rules, &format!("v{index}x{place}: %json {}", with_definitions(property, schema)));
            }
        }
    }
    parts.push(literal("</function>"));
    line(out, &format!("f{index}: {}", parts.join(" ")));
    out.push_str(&rules);
}

/// How a parameter's value is written.
enum Texts {
    /// A string, without quotes.
    Any,
    /// One of these strings, without quotes.
    Of(Vec<String>),
    /// JSON.
    Json,
}

fn texts(property: &Value) -> Texts {
    let strings = |values: &Value| -> Option<Vec<String>> {
        values.as_array()?.iter().map(|value| value.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>().filter(|all| !all.is_empty())
    };
    if let Some(texts) = property.get("enum").and_then(strings) {
        return Texts::Of(texts);
    }
    if let Some(text) = property.get("const").and_then(Value::as_str) {
        return Texts::Of(vec![text.to_owned()]);
    }
    match property.get("type") {
        Some(Value::String(name)) if name == "string" => Texts::Any,
        Some(Value::Array(names)) if names.iter().any(|name| name == "string") => Texts::Any,
        None if ["enum", "const", "$ref", "anyOf", "oneOf", "allOf", "properties", "items"]
            .iter()
            .all(|key| property.get(key).is_none()) =>
        {
            Texts::Any
        }
        _ => Texts::Json,
    }
}

/// A part of a schema with what the whole defines.
fn with_definitions(part: &Value, whole: &Value) -> Value {
    let mut part = part.clone();
    for key in ["$defs", "definitions"] {
        if let (Value::Object(entries), Some(definitions)) = (&mut part, whole.get(key)) {
            entries.entry(key).or_insert_with(|| definitions.clone());
        }
    }
    let part = if part.is_object() { part } else { json!({}) };
    with_options(part, Unknown::LeftOut)
}

/// A text in quotes, as Lark reads it: as JSON does.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn line(out: &mut String, text: &str) {
    writeln!(out, "{text}").expect("a string takes all");
}
