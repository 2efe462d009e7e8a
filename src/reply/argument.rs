//! The value of one parameter in the form of tags: text between tags to JSON.

use super::json_scan::is_json;
use super::tool_types::Kinds;
use std::fmt::Write as _;

/// The JSON of a value that is no plain string, by the types that the schema allows. What fits none of them becomes a string, so that
/// nothing is lost and whoever checks the call sees what was written.
pub(super) fn typed(text: &str, kinds: Kinds) -> String {
    let trimmed = text.trim();
    let is_word = |words: [&str; 2]| words.iter().any(|word| trimmed.eq_ignore_ascii_case(word));
    if kinds.null && is_word(["null", "none"]) {
        return "null".to_owned();
    }
    if kinds.boolean && is_word(["true", "false"]) {
        return trimmed.to_ascii_lowercase();
    }
    let is_kind = match trimmed.as_bytes().first() {
        Some(b'{') => kinds.object,
        Some(b'[') => kinds.array,
        Some(b'-' | b'0'..=b'9') => kinds.number,
        _ => false,
    };
    if is_kind && is_json(trimmed) {
        return trimmed.to_owned();
    }
    let mut string = String::from("\"");
    text.chars().for_each(|character| escape(character, &mut string));
    string.push('"');
    string
}

/// Adds a character as it stands inside a JSON string.
pub(super) fn escape(character: char, out: &mut String) {
    match character {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        other if other < ' ' => write!(out, "\\u{:04x}", u32::from(other)).expect("a string takes all"),
        other => out.push(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_the_schemas_types() {
        let all = Kinds { string: true, number: true, boolean: true, null: true, object: true, array: true };
        for (text, kinds, expected) in [
            ("7", all, "7"),
            ("7", Kinds { number: false, ..all }, "\"7\""),
            (" True ", all, "true"),
            ("None", all, "null"),
            ("None", Kinds { null: false, ..all }, "\"None\""),
            ("{\"a\": [1]}", all, "{\"a\": [1]}"),
            ("{'a': 1}", all, "\"{'a': 1}\""),
            ("[1, 2", all, "\"[1, 2\""),
            ("1e5x", all, "\"1e5x\""),
            ("say \"é\\\"\n\u{1}", all, "\"say \\\"é\\\\\\\"\\n\\u0001\""),
        ] {
            let value = typed(text, kinds);
            assert_eq!(value, expected);
            assert!(is_json(&value));
        }
    }
}
