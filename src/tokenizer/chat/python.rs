//! What templates take from Python: how values are written, `tojson`, and the methods of strings and mappings.
//!
//! Published templates are run by Python's Jinja; what differs there by one blank gives a model other tokens than it was trained on.

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use std::fmt::Write as _;

/// A value as `str()` writes it.
pub(super) fn display(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().to_owned(),
        _ => representation(value),
    }
}

/// A value as `repr()` writes it.
fn representation(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<String> = value.try_iter().into_iter().flatten().map(|item| representation(&item)).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let entry = |key: Value| format!("{}: {}", representation(&key), representation(&value.get_item(&key).unwrap_or_default()));
            let entries: Vec<String> = value.try_iter().into_iter().flatten().map(entry).collect();
            format!("{{{}}}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

/// Python quotes with `'` unless only that would need escaping.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => out.extend(['\\', quote]),
            _ => out.push(character),
        }
    }
    out.push(quote);
    out
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    // Both languages change to exponents at the same sizes; Python gives the exponent a sign and two digits.
    let text = format!("{float:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => {
            let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
            format!("{digits}e{sign}{size:0>2}")
        }
        None => text,
    }
}

/// How `tojson` writes.
struct JsonStyle {
    indent: Option<usize>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
    ascii_only: bool,
}

impl JsonStyle {
    fn from_arguments(arguments: &Kwargs) -> Result<Self, Error> {
        let indent: Option<usize> = arguments.get("indent")?;
        let separators: Option<(String, String)> = match arguments.get::<Option<Value>>("separators")? {
            Some(pair) if !pair.is_none() => {
                let mut parts = pair.try_iter()?.map(|part| display(&part));
                parts.next().zip(parts.next())
            }
            _ => None,
        };
        let line_ending = if indent.is_some() { "," } else { ", " };
        let (between_items, after_key) = separators.unwrap_or_else(|| (line_ending.to_owned(), ": ".to_owned()));
        let sort_keys = arguments.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
        let ascii_only = arguments.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
        arguments.assert_all_used()?;
        Ok(Self { indent, between_items, after_key, sort_keys, ascii_only })
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.write_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], depth, &items, |out, item| self.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], depth, &keys, |out, key| {
                    self.write_string(out, &display(key));
                    out.push_str(&self.after_key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(Error::new(ErrorKind::BadSerialization, format!("{kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: &[Value],
        mut write_item: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (place, item) in items.iter().enumerate() {
            if place > 0 {
                out.push_str(&self.between_items);
            }
            self.write_line_start(out, depth + 1);
            write_item(out, item)?;
        }
        if !items.is_empty() {
            self.write_line_start(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn write_line_start(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        let plain = serde_json::Value::from(text).to_string();
        if !self.ascii_only {
            out.push_str(&plain);
            return;
        }
        for character in plain.chars() {
            if character.is_ascii() {
                out.push(character);
            } else {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    // Writing to a string cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
}

/// The `tojson` filter: `json.dumps` with `ensure_ascii=False`.
pub(super) fn to_json(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let mut out = String::new();
    JsonStyle::from_arguments(&arguments)?.write(&mut out, value, 0)?;
    Ok(Value::from(out))
}

/// Methods that the template engine lacks.
pub(super) fn call_method(_: &mut State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => string_method(text, method, arguments),
        (ValueKind::Map, _) => map_method(value, method, arguments),
        _ => Err(unknown(value.kind(), method)),
    }
}

fn unknown(kind: ValueKind, method: &str) -> Error {
    Error::new(ErrorKind::UnknownMethod, format!("{kind} has no method named {method}"))
}

fn map_method(map: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let keys = map.try_iter()?;
    match method {
        "get" => {
            let (key, otherwise): (&Value, Option<&Value>) = from_args(arguments)?;
            let found = map.get_item(key)?;
            Ok(if found.is_undefined() { otherwise.cloned().unwrap_or_else(|| Value::from(())) } else { found })
        }
        "items" | "keys" | "values" => {
            let () = from_args(arguments)?;
            keys.map(|key| match method {
                "keys" => Ok(key),
                "values" => map.get_item(&key),
                _ => map.get_item(&key).map(|value| Value::from(vec![key, value])),
            })
            .collect::<Result<Vec<Value>, Error>>()
            .map(Value::from)
        }
        _ => Err(unknown(ValueKind::Map, method)),
    }
}

fn string_method(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "startswith" | "endswith" => {
            let (affix,): (&Value,) = from_args(arguments)?;
            let matches = |affix: &str| if method == "startswith" { text.starts_with(affix) } else { text.ends_with(affix) };
            // Python takes one string, or several of which any may match.
            match affix.as_str() {
                Some(affix) => Ok(Value::from(matches(affix))),
                None => Ok(Value::from(affix.try_iter()?.any(|affix| affix.as_str().is_some_and(matches)))),
            }
        }
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            let stripped = |character: char| characters.map_or(character.is_whitespace(), |set| set.contains(character));
            let text = if method == "rstrip" { text } else { text.trim_start_matches(stripped) };
            Ok(Value::from(if method == "lstrip" { text } else { text.trim_end_matches(stripped) }))
        }
        "split" | "rsplit" => {
            let (separator, splits_max): (Option<&str>, Option<i64>) = from_args(arguments)?;
            // A negative bound is none.
            let splits_max = splits_max.and_then(|bound| usize::try_from(bound).ok()).unwrap_or(usize::MAX);
            split(text, separator, splits_max, method == "rsplit").map(Value::from)
        }
        "replace" => {
            let (from, to, count): (&str, &str, Option<i64>) = from_args(arguments)?;
            let count = count.and_then(|bound| usize::try_from(bound).ok()).unwrap_or(usize::MAX);
            Ok(Value::from(text.replacen(from, to, count)))
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            let items: Vec<String> = items.try_iter()?.map(|item| display(&item)).collect();
            Ok(Value::from(items.join(text)))
        }
        "count" => {
            let (part,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.matches(part).count()))
        }
        "find" => {
            let (part,): (&str,) = from_args(arguments)?;
            let characters_before = text.find(part).map(|at| text[..at].chars().count());
            Ok(characters_before.map_or(Value::from(-1), Value::from))
        }
        _ => {
            let () = from_args(arguments)?;
            without_arguments(text, method)
        }
    }
}

fn without_arguments(text: &str, method: &str) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
    Ok(match method {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "capitalize" => {
            let mut characters = text.chars();
            let first: String = characters.next().map(|first| first.to_uppercase().collect()).unwrap_or_default();
            Value::from(first + &characters.as_str().to_lowercase())
        }
        "title" => Value::from(title(text)),
        "splitlines" => Value::from(text.lines().map(Value::from).collect::<Vec<_>>()),
        "isdigit" => all(|character| character.is_ascii_digit()),
        "isspace" => all(char::is_whitespace),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        _ => return Err(unknown(ValueKind::String, method)),
    })
}

fn title(text: &str) -> String {
    let mut within_word = false;
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if within_word {
            out.extend(character.to_lowercase());
        } else {
            out.extend(character.to_uppercase());
        }
        within_word = character.is_alphabetic();
    }
    out
}

fn split(text: &str, separator: Option<&str>, splits_max: usize, from_right: bool) -> Result<Vec<Value>, Error> {
    let parts_max = splits_max.saturating_add(1);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "split by an empty separator")),
        Some(separator) if from_right => text.rsplitn(parts_max, separator).collect(),
        Some(separator) => text.splitn(parts_max, separator).collect(),
        None => split_at_spaces(text, splits_max, from_right),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Words between runs of white space; what is left after the last split keeps its inner spaces. From the right the words come in
/// reverse.
fn split_at_spaces(text: &str, splits_max: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        let Some(cut) = cut.filter(|_| parts.len() < splits_max) else {
            parts.push(rest);
            break;
        };
        let (before, after) = rest.split_at(cut);
        if from_right {
            parts.push(after.trim_start());
            rest = before.trim_end();
        } else {
            parts.push(before);
            rest = after.trim_start();
        }
    }
    parts
}
