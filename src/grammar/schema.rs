//! JSON schemas of requests: bounded before anything else looks at them.

use serde_json::{Map, Value, json};

use super::GrammarError;

/// Longest schema, in bytes.
pub const SCHEMA_BYTES_MAX: usize = 256 << 10;
/// Values inside one another at most. A user's schema is a dozen deep; what walks over one does so on the stack.
pub const SCHEMA_DEPTH_MAX: usize = 64;
/// White space between two tokens of JSON. Without a bound a small model may write it for ever.
const WHITE_SPACE: &str = r"[\x20]{1,2}|\x0A[\x20\x09]{0,40}";

/// What becomes of keywords that cannot be enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unknown {
    /// The schema is refused: what was asked for is what comes.
    Refused,
    /// They are left out: agents send schemas of tools that nobody wrote for this.
    LeftOut,
}

/// The schema of any object.
pub(super) fn any_object() -> Value {
    with_options(json!({"type": "object"}), Unknown::Refused)
}

/// A schema from a request, with our options in it.
///
/// # Errors
/// [`GrammarError`] for text that is no schema, or one over the bounds.
pub(super) fn checked(text: &str, unknown: Unknown) -> Result<Value, GrammarError> {
    if text.len() > SCHEMA_BYTES_MAX {
        return Err(GrammarError::TooLong { what: "the JSON schema", bytes: text.len(), bytes_max: SCHEMA_BYTES_MAX });
    }
    // The reader itself stops at a depth of 128.
    let schema: Value = serde_json::from_str(text).map_err(GrammarError::NotJson)?;
    if !schema.is_object() {
        return Err(GrammarError::NotAnObject);
    }
    if is_deeper(&schema, SCHEMA_DEPTH_MAX) {
        return Err(GrammarError::TooDeep);
    }
    check_references(&schema, &schema)?;
    Ok(with_options(schema, unknown))
}

/// Sets how JSON is written; a request's own options are not asked for.
pub(super) fn with_options(mut schema: Value, unknown: Unknown) -> Value {
    if let Value::Object(entries) = &mut schema {
        let lenient = unknown == Unknown::LeftOut;
        let options = json!({"whitespace_pattern": WHITE_SPACE, "coerce_one_of": true, "lenient": lenient});
        entries.insert("x-guidance".to_owned(), options);
    }
    schema
}

fn is_deeper(value: &Value, depth: usize) -> bool {
    let mut inner: Box<dyn Iterator<Item = &Value>> = match value {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(entries) => Box::new(entries.values()),
        _ => return false,
    };
    depth == 0 || inner.any(|value| is_deeper(value, depth - 1))
}

/// Refuses references that lead back to themselves with no value between, anywhere in the schema.
fn check_references(value: &Value, root: &Value) -> Result<(), GrammarError> {
    match value {
        Value::Array(items) => items.iter().try_for_each(|item| check_references(item, root)),
        Value::Object(entries) => {
            if let Some(reference) = reference(entries) {
                follow(reference, root, &mut Vec::new())?;
            }
            entries.values().try_for_each(|value| check_references(value, root))
        }
        _ => Ok(()),
    }
}

fn reference(entries: &Map<String, Value>) -> Option<&str> {
    entries.get("$ref").and_then(Value::as_str)
}

/// Follows a reference through everything that has to hold of the same value.
fn follow<'s>(to: &'s str, root: &'s Value, path: &mut Vec<&'s str>) -> Result<(), GrammarError> {
    if path.contains(&to) {
        return Err(GrammarError::Circle(to.to_owned()));
    }
    let Some(target) = to.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) else { return Ok(()) };
    path.push(to);
    follow_same_value(target, root, path)?;
    path.pop();
    Ok(())
}

fn follow_same_value<'s>(schema: &'s Value, root: &'s Value, path: &mut Vec<&'s str>) -> Result<(), GrammarError> {
    let Value::Object(entries) = schema else { return Ok(()) };
    if let Some(to) = reference(entries) {
        follow(to, root, path)?;
    }
    for key in ["allOf", "anyOf", "oneOf"] {
        let all = entries.get(key).and_then(Value::as_array);
        // Of alternatives one that ends is enough.
        let mut results = all.into_iter().flatten().map(|one| follow_same_value(one, root, &mut path.clone()));
        if key == "allOf" {
            results.try_for_each(|result| result)?;
        } else if let Some(mut best) = results.next() {
            best = results.fold(best, |best, next| if best.is_ok() { best } else { next });
            best?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(schema: &Value) -> GrammarError {
        checked(&schema.to_string(), Unknown::Refused).expect_err("it is refused")
    }

    #[test]
    fn references_in_circles_are_refused_and_recursive_values_are_not() {
        for circle in [
            json!({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}),
            json!({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}}, "type": "object"}),
            json!({"$defs": {"A": {"allOf": [{"type": "object"}, {"$ref": "#/$defs/A"}]}}, "properties": {"a": {"$ref": "#/$defs/A"}}}),
            json!({"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"}),
        ] {
            assert!(matches!(refusal(&circle), GrammarError::Circle(_)), "{circle}");
        }
        for sound in [
            json!({"$defs": {"T": {"type": "object", "properties": {"next": {"$ref": "#/$defs/T"}}}}, "$ref": "#/$defs/T"}),
            json!({"$defs": {"T": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/T"}]}}, "$ref": "#/$defs/T"}),
        ] {
            checked(&sound.to_string(), Unknown::Refused).expect("values can meet it");
        }
    }

    #[test]
    fn what_is_too_large_or_no_schema_is_refused() {
        let deep = (1..SCHEMA_DEPTH_MAX).fold(json!({}), |inner, _| json!({"items": inner}));
        checked(&deep.to_string(), Unknown::Refused).expect("as deep as allowed");
        assert!(matches!(refusal(&json!({"items": deep})), GrammarError::TooDeep));
        assert!(matches!(refusal(&json!({"title": "x".repeat(SCHEMA_BYTES_MAX)})), GrammarError::TooLong { .. }));
        assert!(matches!(refusal(&json!([])), GrammarError::NotAnObject));
        assert!(matches!(checked("{", Unknown::Refused), Err(GrammarError::NotJson(_))));
        let endless = "[".repeat(100_000);
        assert!(matches!(checked(&endless, Unknown::Refused), Err(GrammarError::NotJson(_))));
    }

    #[test]
    fn options_of_a_request_are_replaced() {
        let schema = json!({"type": "object", "x-guidance": {"whitespace_pattern": ".*", "lenient": true}});
        let checked = checked(&schema.to_string(), Unknown::Refused).expect("a schema");
        assert_eq!((&checked["x-guidance"]["lenient"], &checked["x-guidance"]["whitespace_pattern"]), (&json!(false), &json!(WHITE_SPACE)));
    }
}
