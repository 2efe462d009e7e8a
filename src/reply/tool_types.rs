//! Which types the parameters of tools take, from their JSON schemas.
//!
//! A call in the form of tags writes values without quotes, so `7` is a number or a string by the tool's schema alone.

use crate::tokenizer::Json;
use std::collections::HashMap;

/// Schemas inside schemas that are looked into; deeper ones, and circles, say nothing.
const DEPTH_MAX: usize = 16;

/// Types of JSON values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kinds {
    pub(super) string: bool,
    pub(super) number: bool,
    pub(super) boolean: bool,
    pub(super) null: bool,
    pub(super) object: bool,
    pub(super) array: bool,
}

impl Kinds {
    const NONE: Self = Self { string: false, number: false, boolean: false, null: false, object: false, array: false };
    /// Of parameters of which the schema says nothing.
    pub(super) const STRING: Self = Self { string: true, ..Self::NONE };

    pub(super) fn is_only_string(self) -> bool {
        self == Self::STRING
    }

    fn or(self, other: Self) -> Self {
        Self {
            string: self.string || other.string,
            number: self.number || other.number,
            boolean: self.boolean || other.boolean,
            null: self.null || other.null,
            object: self.object || other.object,
            array: self.array || other.array,
        }
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" | "number" => Self { number: true, ..Self::NONE },
            "boolean" => Self { boolean: true, ..Self::NONE },
            "null" => Self { null: true, ..Self::NONE },
            "object" => Self { object: true, ..Self::NONE },
            "array" => Self { array: true, ..Self::NONE },
            _ => Self::NONE,
        }
    }

    fn of_value(value: &Json) -> Self {
        Self::named(match value {
            Json::Null => "null",
            Json::Bool(_) => "boolean",
            Json::Number(_) => "number",
            Json::String(_) => "string",
            Json::Array(_) => "array",
            Json::Object(_) => "object",
        })
    }

    fn of_schema(schema: &Json, root: &Json, depth: usize) -> Self {
        if depth == DEPTH_MAX {
            return Self::NONE;
        }
        let all = |list: &Json, of: &dyn Fn(&Json) -> Self| match list {
            Json::Array(items) => items.iter().map(of).fold(Self::NONE, Self::or),
            _ => Self::NONE,
        };
        if let Some(target) = schema.get("$ref").and_then(|reference| resolve(reference, root)) {
            return Self::of_schema(target, root, depth + 1);
        }
        match schema.get("type") {
            Some(Json::String(name)) => return Self::named(name),
            Some(names @ Json::Array(_)) => {
                return all(names, &|name| if let Json::String(name) = name { Self::named(name) } else { Self::NONE });
            }
            _ => {}
        }
        if let Some(values) = schema.get("enum") {
            return all(values, &Self::of_value);
        }
        if let Some(value) = schema.get("const") {
            return Self::of_value(value);
        }
        let unions = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|key| schema.get(key));
        let of_unions = unions.map(|list| all(list, &|one| Self::of_schema(one, root, depth + 1))).fold(Self::NONE, Self::or);
        let object = if schema.get("properties").is_some() { Self::named("object") } else { Self::NONE };
        let array = if schema.get("items").is_some() { Self::named("array") } else { Self::NONE };
        of_unions.or(object).or(array)
    }
}

/// What `#/a/b` points to.
fn resolve<'s>(reference: &Json, root: &'s Json) -> Option<&'s Json> {
    let Json::String(reference) = reference else { return None };
    let path = reference.strip_prefix('#')?;
    path.split('/').filter(|key| !key.is_empty()).try_fold(root, |at, key| at.get(&key.replace("~1", "/").replace("~0", "~")))
}

/// The parameters' types of some tools.
#[derive(Clone, Debug, Default)]
pub struct ToolTypes(HashMap<String, HashMap<String, Kinds>>);

impl ToolTypes {
    /// From tools as the chat API has them: `{"type": "function", "function": {"name": …, "parameters": {schema}}}`. What has another
    /// form is passed over: checking requests is left to others.
    #[must_use]
    pub fn new(tools: &[Json]) -> Self {
        let of_tool = |tool: &Json| {
            let function = tool.get("function").unwrap_or(tool);
            let Some(Json::String(name)) = function.get("name") else { return None };
            let root = function.get("parameters").cloned().unwrap_or_default();
            let parameters = match root.get("properties") {
                Some(Json::Object(entries)) => {
                    entries.iter().map(|(key, schema)| (key.clone(), Kinds::of_schema(schema, &root, 0))).collect()
                }
                _ => HashMap::new(),
            };
            Some((name.clone(), parameters))
        };
        Self(tools.iter().filter_map(of_tool).collect())
    }

    /// Types of a parameter; a string's where nothing is known.
    pub(super) fn kinds(&self, tool: &str, parameter: &str) -> Kinds {
        let known = self.0.get(tool).and_then(|parameters| parameters.get(parameter)).copied();
        known.filter(|&kinds| kinds != Kinds::NONE).unwrap_or(Kinds::STRING)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_read_from_all_usual_forms_of_schema() {
        let tool = r##"{"type": "function", "function": {"name": "f", "parameters": {"$defs": {"I": {"type": "integer"}, "C": {"$ref": "#/$defs/C"}},
            "properties": {"plain": {"type": "string"}, "maybe": {"type": ["integer", "null"]}, "pick": {"enum": ["a", 1]},
            "any": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/I"}]}, "circle": {"$ref": "#/$defs/C"}, "obj": {"properties": {}},
            "list": {"items": {}}, "empty": {}, "odd": 7}}}}"##;
        let types = ToolTypes::new(&[serde_json::from_str(tool).expect("JSON"), Json::Null]);
        let kinds = |parameter: &str| types.kinds("f", parameter);
        let number = Kinds::named("number");
        assert!(kinds("plain").is_only_string());
        assert_eq!(kinds("maybe"), number.or(Kinds::named("null")));
        assert_eq!(kinds("pick"), number.or(Kinds::STRING));
        assert_eq!(kinds("any"), number.or(Kinds::named("boolean")));
        assert_eq!((kinds("obj"), kinds("list")), (Kinds::named("object"), Kinds::named("array")));
        for unknown in ["circle", "empty", "odd", "missing"] {
            assert!(kinds(unknown).is_only_string(), "{unknown}");
        }
        assert!(types.kinds("g", "plain").is_only_string());
    }
}
