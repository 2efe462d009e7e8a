//! Fields of a request's JSON, each checked where it is read: a refusal names the field, what it holds and what it may hold.
//!
//! `null` is as good as nothing. Fields that nobody asks for are ignored, which is the one rule for unknown fields.

use super::error::ApiError;
use crate::tokenizer::Json;

/// An object and where it stands.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    object: &'a Json,
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The body of a request.
    ///
    /// # Errors
    /// Where it is no object.
    pub fn of_body(body: &'a Json) -> Result<Self, ApiError> {
        Self::new(body, "")
    }

    /// An object at `path` in the body.
    ///
    /// # Errors
    /// Where it is no object.
    pub fn new(object: &'a Json, path: &'a str) -> Result<Self, ApiError> {
        match object {
            Json::Object(_) => Ok(Self { object, path }),
            other => {
                let what = if path.is_empty() { "the body" } else { path };
                Err(ApiError::bad(path, format!("{what} is {}, an object is needed", kind(other))))
            }
        }
    }

    /// The path of a field.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The value, `None` where there is none or null.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&'a Json> {
        self.object.get(name).filter(|value| **value != Json::Null)
    }

    /// A refusal of a field.
    #[must_use]
    pub fn refuse(&self, name: &str, why: &str) -> ApiError {
        let path = self.path(name);
        ApiError::bad(&path, format!("{path}: {why}"))
    }

    fn wrong_kind(&self, name: &str, value: &Json, needed: &str) -> ApiError {
        self.refuse(name, &format!("{} is given, {needed} is needed", kind(value)))
    }

    /// A number within bounds, both included.
    ///
    /// # Errors
    /// For anything else.
    pub fn number(&self, name: &str, least: f32, most: f32) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value {
            Json::Number(number) => number.as_f64(),
            _ => None,
        };
        let number = number.ok_or_else(|| self.wrong_kind(name, value, "a number"))?;
        // Bounds that no NaN passes.
        if number >= f64::from(least) && number <= f64::from(most) {
            #[allow(clippy::cast_possible_truncation, reason = "rounded to the sampler's precision")]
            return Ok(Some(number as f32));
        }
        Err(self.refuse(name, &format!("{number} is out of bounds: {least} to {most}")))
    }

    /// A whole number within bounds, both included; `1.0` is one.
    ///
    /// # Errors
    /// For anything else.
    pub fn whole(&self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let Json::Number(number) = value else { return Err(self.wrong_kind(name, value, "a whole number")) };
        let whole = number.as_u64().or_else(|| {
            let float = number.as_f64().filter(|float| float.fract() == 0.0 && (0.0..9e15).contains(float))?;
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole, and within 53 bits")]
            Some(float as u64)
        });
        match whole {
            Some(whole) if (least..=most).contains(&whole) => Ok(Some(whole)),
            _ => Err(self.refuse(name, &format!("{number} is no whole number from {least} to {most}"))),
        }
    }

    /// As [`Fields::whole`], as a count.
    ///
    /// # Errors
    /// As there.
    pub fn count(&self, name: &str, least: usize, most: usize) -> Result<Option<usize>, ApiError> {
        let whole = self.whole(name, least as u64, most as u64)?;
        Ok(whole.map(|whole| usize::try_from(whole).unwrap_or(usize::MAX)))
    }

    /// True or false.
    ///
    /// # Errors
    /// For anything else.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Json::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.wrong_kind(name, other, "true or false")),
        }
    }

    /// A text.
    ///
    /// # Errors
    /// For anything else.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_kind(name, other, "a string")),
        }
    }

    /// A list of at most `most` entries; empty where there is none.
    ///
    /// # Errors
    /// For anything else.
    pub fn list(&self, name: &str, most: usize) -> Result<&'a [Json], ApiError> {
        match self.get(name) {
            None => Ok(&[]),
            Some(Json::Array(items)) if items.len() > most => {
                Err(self.refuse(name, &format!("{} entries, at most {most} are taken", items.len())))
            }
            Some(Json::Array(items)) => Ok(items),
            Some(other) => Err(self.wrong_kind(name, other, "a list")),
        }
    }

    /// The entries of an object; empty where there is none.
    ///
    /// # Errors
    /// For anything else.
    pub fn entries(&self, name: &str) -> Result<&'a [(String, Json)], ApiError> {
        match self.get(name) {
            None => Ok(&[]),
            Some(Json::Object(entries)) => Ok(entries),
            Some(other) => Err(self.wrong_kind(name, other, "an object")),
        }
    }
}

/// What a value is, with its article.
#[must_use]
pub fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// Reads a body as JSON.
///
/// # Errors
/// 400 with line and column where it is none; nesting is bounded by the parser.
pub fn parse_body(body: &[u8]) -> Result<Json, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        let error = ApiError::bad("", format!("the body is not the JSON that is needed: {error}"));
        ApiError { code: Some("invalid_json"), ..error }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_bounds_and_of_another_kind_are_refused_by_name() {
        let body =
            parse_body(br#"{"t":0.5,"n":2.0,"s":"x","neg":-1,"half":0.5,"null":null,"flag":1,"big":18446744073709551616}"#).expect("JSON");
        let fields = Fields::of_body(&body).expect("an object");
        assert_eq!(fields.number("t", 0.0, 2.0), Ok(Some(0.5)));
        assert_eq!(fields.whole("n", 1, 8), Ok(Some(2)));
        assert_eq!(fields.number("null", 0.0, 1.0), Ok(None));
        for refused in [
            fields.number("s", 0.0, 1.0).map(drop),
            fields.number("neg", 0.0, 1.0).map(drop),
            fields.whole("half", 0, 9).map(drop),
            fields.whole("neg", 0, 9).map(drop),
            fields.whole("big", 0, u64::MAX).map(drop),
            fields.flag("flag").map(drop),
            fields.text("n").map(drop),
            fields.list("s", 3).map(drop),
            fields.entries("n").map(drop),
        ] {
            let error = refused.expect_err("refused");
            let param = error.param.expect("it names the field");
            assert!(error.status == 400 && error.message.starts_with(&param), "{}", error.message);
        }
    }

    #[test]
    fn what_is_no_json_is_told_with_its_place() {
        let nested = "[".repeat(100_000);
        for text in ["", "{", "{\"a\":NaN}", "{\"a\":1e999}", "\"\\ud800\"", nested.as_str()] {
            let error = parse_body(text.as_bytes()).expect_err(&text[..text.len().min(20)]);
            assert!(error.status == 400 && error.message.contains("line"), "{}", error.message);
        }
        assert!(parse_body(b"{\"a\":\"\xff\"}").is_err());
        assert!(Fields::of_body(&Json::Array(Vec::new())).is_err_and(|error| error.message.contains("a list")));
    }
}
