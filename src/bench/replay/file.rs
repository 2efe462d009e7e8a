//! Files of recorded requests: JSON lines, one request a line.
//!
//! A file is not trusted: lines, requests and the whole have bounds, every field is checked by hand so that a refusal names file,
//! line and field, and a field that is not known is refused rather than left out.

use std::io::{BufRead, Read};

use thiserror::Error;

use crate::settings::CONTEXT_TOKENS_MAX;
use crate::tokenizer::chat::Json;
use crate::tokenizer::{ChatError, ChatTemplate, Message, RenderOptions, Specials, Tokenizer, TokenizerError};
use crate::units::TokenId;

/// Longest line, in bytes.
pub const LINE_BYTES_MAX: u64 = 64 << 20;
/// Longest file, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Most requests.
pub const REQUESTS_MAX: usize = 10_000;
/// Longest `id` and `tag`, in characters.
pub const NAME_CHARS_MAX: usize = 256;

/// Fields of a request.
const FIELDS: [&str; 6] = ["id", "tag", "prompt_tokens", "prompt", "messages", "output_tokens"];
/// Fields that say what to read; a request has one of them.
const PROMPT_FIELDS: [&str; 3] = ["prompt_tokens", "prompt", "messages"];

/// What is wrong with a file of requests.
#[derive(Debug, Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("{file}: cannot read it")]
    Read {
        /// The file.
        file: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// A line is no request.
    #[error("{file}, line {line}: {fault}")]
    Line {
        /// The file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        fault: LineFault,
    },
    /// There is more than is taken.
    #[error("{file}: more than {FILE_BYTES_MAX} bytes: replay a part of it")]
    TooLong {
        /// The file.
        file: String,
    },
    /// There are more requests than are taken.
    #[error("{file}: more than {REQUESTS_MAX} requests: replay a part of it")]
    TooMany {
        /// The file.
        file: String,
    },
    /// There is no request.
    #[error("{file}: no requests; write one JSON object a line, as docs/replay.md says")]
    Empty {
        /// The file.
        file: String,
    },
}

/// What is wrong with a line.
#[derive(Debug, Error)]
pub enum LineFault {
    /// Too long.
    #[error("it has more than {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// No JSON.
    #[error("not JSON (column {column}): {reason}")]
    NotJson {
        /// Counted from 1.
        column: usize,
        /// What the parser says.
        reason: String,
    },
    /// JSON, but no object.
    #[error("not a JSON object with the fields {}", FIELDS.join(", "))]
    NotAnObject,
    /// A field that requests do not have.
    #[error("unknown field `{field}`; the fields are {}", FIELDS.join(", "))]
    UnknownField {
        /// Its name, cut.
        field: String,
    },
    /// No prompt.
    #[error("no prompt: give one of {}", PROMPT_FIELDS.join(", "))]
    NoPrompt,
    /// Several prompts.
    #[error("`{first}` with `{second}`: both say what to read. Leave one of them out")]
    TwoPrompts {
        /// One.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A field that must be there.
    #[error("the field `{field}` is missing")]
    Missing {
        /// Its name.
        field: &'static str,
    },
    /// A field of a wrong form.
    #[error("the field `{field}` is not {expected}")]
    Form {
        /// Its name.
        field: &'static str,
        /// What it should be.
        expected: String,
    },
    /// One of `prompt_tokens` is none.
    #[error("the field `prompt_tokens`: entry {position} is `{value}`, not a token number (0 to {most})")]
    Token {
        /// Counted from 1.
        position: usize,
        /// What stands there, cut.
        value: String,
        /// The largest.
        most: u64,
    },
    /// A field stands twice: one of them would be lost.
    #[error("the field `{field}` stands twice")]
    Twice {
        /// Its name, cut.
        field: String,
    },
    /// One of `messages` is none.
    #[error("the field `messages`: entry {position} has no `role` that is a text")]
    Message {
        /// Counted from 1.
        position: usize,
    },
    /// The model cannot take messages.
    #[error("the field `messages`: the model has no chat template. Give `prompt` or `prompt_tokens`")]
    NoTemplate,
    /// The template failed on the messages.
    #[error("the field `messages`: {0}")]
    Template(ChatError),
    /// The text cannot be turned into tokens.
    #[error("the field `{field}`: {error}")]
    Tokenizer {
        /// Its name.
        field: &'static str,
        /// Why.
        error: TokenizerError,
    },
    /// Nothing to read.
    #[error("the field `{field}` is empty: a prompt has at least one token")]
    Empty {
        /// Its name.
        field: &'static str,
    },
}

impl LineFault {
    fn form(field: &'static str, expected: impl Into<String>) -> Self {
        Self::Form { field, expected: expected.into() }
    }
}

/// A request as recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Its line, counted from 1.
    pub line: usize,
    /// What its recorder calls it.
    pub id: Option<String>,
    /// A word for its kind.
    pub tag: Option<String>,
    /// What is read.
    pub prompt: RecordedPrompt,
    /// Tokens to write, exactly.
    pub output_tokens: u32,
}

/// A prompt as recorded.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordedPrompt {
    /// Token numbers.
    Tokens(Vec<TokenId>),
    /// Plain text; control tokens in it are text.
    Text(String),
    /// A conversation for the model's chat template.
    Messages(Vec<Message>),
}

impl RecordedPrompt {
    fn field(&self) -> &'static str {
        match self {
            Self::Tokens(_) => "prompt_tokens",
            Self::Text(_) => "prompt",
            Self::Messages(_) => "messages",
        }
    }
}

/// Reads the requests of a file, which messages call `file`. Empty lines are passed over.
///
/// # Errors
/// [`FileError`] at the first line that is no request, for more than is taken, and for nothing.
pub fn parse(mut lines: impl BufRead, file: &str) -> Result<Vec<Recorded>, FileError> {
    let at = |line| move |fault| FileError::Line { file: file.to_owned(), line, fault };
    let mut requests = Vec::new();
    let mut bytes_read = 0;
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let taken = lines.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut text);
        let taken = taken.map_err(|source| FileError::Read { file: file.to_owned(), source })? as u64;
        if taken == 0 {
            break;
        }
        bytes_read += taken;
        if bytes_read > FILE_BYTES_MAX {
            return Err(FileError::TooLong { file: file.to_owned() });
        }
        if taken > LINE_BYTES_MAX {
            return Err(at(line)(LineFault::TooLong));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        if requests.len() == REQUESTS_MAX {
            return Err(FileError::TooMany { file: file.to_owned() });
        }
        requests.push(request(&text, line).map_err(at(line))?);
    }
    if requests.is_empty() { Err(FileError::Empty { file: file.to_owned() }) } else { Ok(requests) }
}

fn request(text: &[u8], line: usize) -> Result<Recorded, LineFault> {
    let value: Json = serde_json::from_slice(text).map_err(|error| not_json(&error))?;
    let Json::Object(entries) = &value else { return Err(LineFault::NotAnObject) };
    if let Some((field, _)) = entries.iter().find(|(field, _)| !FIELDS.contains(&field.as_str())) {
        return Err(LineFault::UnknownField { field: cut(field) });
    }
    // The parser keeps the last of two.
    let Names(mut names) = serde_json::from_slice(text).map_err(|error| not_json(&error))?;
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(LineFault::Twice { field: cut(&pair[0]) });
    }
    let mut prompts = PROMPT_FIELDS.into_iter().filter_map(|field| Some((field, value.get(field)?)));
    let (field, prompt) = prompts.next().ok_or(LineFault::NoPrompt)?;
    if let Some((second, _)) = prompts.next() {
        return Err(LineFault::TwoPrompts { first: field, second });
    }
    let prompt = match field {
        "prompt_tokens" => RecordedPrompt::Tokens(token_numbers(prompt)?),
        "prompt" => match prompt {
            Json::String(text) => RecordedPrompt::Text(text.clone()),
            _ => return Err(LineFault::form("prompt", "a text")),
        },
        _ => RecordedPrompt::Messages(messages(prompt)?),
    };
    Ok(Recorded { line, id: name(&value, "id")?, tag: name(&value, "tag")?, prompt, output_tokens: output_tokens(&value)? })
}

/// The names of an object's fields, in order, each as often as it stands there.
struct Names(Vec<String>);

impl<'de> serde::Deserialize<'de> for Names {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> serde::de::Visitor<'de> for Fields {
            type Value = Names;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = Vec::new();
                while let Some((name, serde::de::IgnoredAny)) = map.next_entry()? {
                    names.push(name);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// The parser's words without the place, which it counts in a text of one line.
fn not_json(error: &serde_json::Error) -> LineFault {
    let told = error.to_string();
    let reason = told.split_once(" at line ").map_or(told.as_str(), |(reason, _)| reason).to_owned();
    LineFault::NotJson { column: error.column(), reason }
}

fn name(request: &Json, field: &'static str) -> Result<Option<String>, LineFault> {
    match request.get(field) {
        None => Ok(None),
        Some(Json::String(text)) if text.chars().count() <= NAME_CHARS_MAX => Ok(Some(text.clone())),
        Some(_) => Err(LineFault::form(field, format!("a text of at most {NAME_CHARS_MAX} characters"))),
    }
}

fn output_tokens(request: &Json) -> Result<u32, LineFault> {
    let value = request.get("output_tokens").ok_or(LineFault::Missing { field: "output_tokens" })?;
    let count = if let Json::Number(number) = value { number.as_u64().and_then(|count| u32::try_from(count).ok()) } else { None };
    count
        .filter(|count| (1..=CONTEXT_TOKENS_MAX).contains(count))
        .ok_or_else(|| LineFault::form("output_tokens", format!("a whole number from 1 to {CONTEXT_TOKENS_MAX}")))
}

fn token_numbers(value: &Json) -> Result<Vec<TokenId>, LineFault> {
    let Json::Array(entries) = value else { return Err(LineFault::form("prompt_tokens", "a list of token numbers")) };
    let number = |entry: &Json| if let Json::Number(number) = entry { TokenId::try_from(number.as_u64()?).ok() } else { None };
    let token = |(index, entry): (usize, &Json)| {
        let value = || match entry {
            Json::Number(number) => number.to_string(),
            Json::String(text) => cut(&format!("\"{text}\"")),
            Json::Null => "null".to_owned(),
            Json::Bool(value) => value.to_string(),
            Json::Array(_) => "[…]".to_owned(),
            Json::Object(_) => "{…}".to_owned(),
        };
        number(entry).ok_or_else(|| LineFault::Token { position: index + 1, value: value(), most: TokenId::MAX.into() })
    };
    entries.iter().enumerate().map(token).collect()
}

fn messages(value: &Json) -> Result<Vec<Message>, LineFault> {
    let Json::Array(entries) = value else { return Err(LineFault::form("messages", "a list of objects with `role` and `content`")) };
    if entries.is_empty() {
        return Err(LineFault::Empty { field: "messages" });
    }
    if let Some(index) = entries.iter().position(|entry| !matches!(entry.get("role"), Some(Json::String(_)))) {
        return Err(LineFault::Message { position: index + 1 });
    }
    Ok(entries.iter().cloned().map(Message).collect())
}

/// What stands in a message is cut: a file may hold anything.
fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

/// Turns recorded prompts into tokens as `run` does.
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    options: RenderOptions,
}

impl<'a> Encoder<'a> {
    /// With the model's template, where it has one.
    ///
    /// # Errors
    /// Where the template does not parse.
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&str>) -> Result<Self, ChatError> {
        Ok(Self { tokenizer, template: template.map(ChatTemplate::new).transpose()?, options: RenderOptions::default() })
    }

    fn encode(&self, prompt: &RecordedPrompt) -> Result<Vec<TokenId>, LineFault> {
        let field = prompt.field();
        let failed = |error| LineFault::Tokenizer { field, error };
        match prompt {
            RecordedPrompt::Tokens(tokens) => Ok(tokens.clone()),
            RecordedPrompt::Text(text) => {
                let mut tokens: Vec<TokenId> = self.tokenizer.leading_bos().into_iter().collect();
                tokens.extend(self.tokenizer.encode(text.as_bytes(), Specials::AsText).map_err(failed)?);
                Ok(tokens)
            }
            RecordedPrompt::Messages(messages) => {
                let template = self.template.as_ref().ok_or(LineFault::NoTemplate)?;
                // What the model wrote may hold control tokens that the template looks for; what others wrote must not act as such.
                let is_answer = |message: &Message| message.0.get("role") == Some(&Json::from("assistant"));
                let shielded = |message: &Message| if is_answer(message) { message.clone() } else { message.shielded(self.tokenizer) };
                let messages: Vec<Message> = messages.iter().map(shielded).collect();
                let rendered = template.render(&messages, &self.options).map_err(LineFault::Template)?;
                self.tokenizer.encode_chat(&rendered).map_err(failed)
            }
        }
    }
}

/// The tokens of a request's prompt, within a vocabulary of `n_vocab`. Without an encoder only token numbers can be read.
///
/// # Errors
/// [`FileError::Line`] where the prompt is empty or cannot be turned into tokens of the model.
pub fn tokens(recorded: &Recorded, encoder: Option<&Encoder<'_>>, n_vocab: u32, file: &str) -> Result<Vec<TokenId>, FileError> {
    let fault = |fault| FileError::Line { file: file.to_owned(), line: recorded.line, fault };
    let tokens = match (&recorded.prompt, encoder) {
        (RecordedPrompt::Tokens(tokens), _) => tokens.clone(),
        (prompt, Some(encoder)) => encoder.encode(prompt).map_err(fault)?,
        (prompt, None) => return Err(fault(LineFault::form(prompt.field(), "to be had without the model's tokenizer"))),
    };
    if tokens.is_empty() {
        return Err(fault(LineFault::Empty { field: recorded.prompt.field() }));
    }
    match tokens.iter().position(|&token| token >= n_vocab) {
        Some(index) => {
            let most = u64::from(n_vocab.saturating_sub(1));
            Err(fault(LineFault::Token { position: index + 1, value: tokens[index].to_string(), most }))
        }
        None => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Vec<Recorded>, String> {
        parse(text.as_bytes(), "f.jsonl").map_err(|error| error.to_string())
    }

    #[test]
    fn the_three_forms_of_a_prompt_are_read_and_empty_lines_passed_over() {
        let text = "{\"prompt_tokens\": [1, 2], \"output_tokens\": 3, \"id\": \"a\"}\n\n  \r\n{\"prompt\": \"x\", \"output_tokens\": 1}\n\
            {\"messages\": [{\"role\": \"user\", \"content\": \"y\"}], \"output_tokens\": 2, \"tag\": \"chat\"}";
        let requests = parsed(text).expect("three requests");
        assert_eq!(requests.iter().map(|request| request.line).collect::<Vec<_>>(), [1, 4, 5]);
        assert_eq!(requests[0].prompt, RecordedPrompt::Tokens(vec![1, 2]));
        assert_eq!((requests[0].id.as_deref(), requests[0].output_tokens), (Some("a"), 3));
        assert_eq!(requests[1].prompt, RecordedPrompt::Text("x".to_owned()));
        assert_eq!(requests[2].prompt, RecordedPrompt::Messages(vec![Message::new("user", "y")]));
        assert_eq!(requests[2].tag.as_deref(), Some("chat"));
    }

    #[test]
    fn a_line_at_fault_is_named_with_its_field() {
        let cases = [
            ("{\"prompt\": \"x\"", "not JSON (column "),
            ("[1]", "not a JSON object with the fields id, tag, "),
            ("{\"prompt\": \"x\", \"output_tokens\": 1, \"max_tokens\": 2}", "unknown field `max_tokens`; the fields are id"),
            ("{\"output_tokens\": 1}", "no prompt: give one of prompt_tokens, prompt, messages"),
            ("{\"prompt\": \"x\", \"messages\": [], \"output_tokens\": 1}", "`prompt` with `messages`: both say what to read"),
            ("{\"prompt\": \"x\", \"prompt\": \"y\", \"output_tokens\": 1}", "the field `prompt` stands twice"),
            ("{\"prompt\": \"x\"}", "the field `output_tokens` is missing"),
            ("{\"prompt\": \"x\", \"output_tokens\": 0}", "the field `output_tokens` is not a whole number from 1 to "),
            ("{\"prompt\": \"x\", \"output_tokens\": 1.5}", "the field `output_tokens` is not a whole number"),
            ("{\"prompt\": \"x\", \"output_tokens\": \"1\"}", "the field `output_tokens` is not a whole number"),
            ("{\"prompt\": 1, \"output_tokens\": 1}", "the field `prompt` is not a text"),
            ("{\"prompt\": \"x\", \"id\": 7, \"output_tokens\": 1}", "the field `id` is not a text of at most 256"),
            ("{\"prompt_tokens\": 5, \"output_tokens\": 1}", "the field `prompt_tokens` is not a list"),
            ("{\"prompt_tokens\": [5, -1], \"output_tokens\": 1}", "`prompt_tokens`: entry 2 is `-1`, not a token number"),
            ("{\"prompt_tokens\": [4294967296], \"output_tokens\": 1}", "entry 1 is `4294967296`"),
            ("{\"messages\": [{\"content\": \"y\"}], \"output_tokens\": 1}", "`messages`: entry 1 has no `role`"),
            ("{\"messages\": [], \"output_tokens\": 1}", "the field `messages` is empty"),
        ];
        for (line, fault) in cases {
            let told = parsed(&format!("{{\"prompt\": \"x\", \"output_tokens\": 1}}\n{line}\n")).expect_err(line);
            assert!(told.starts_with("f.jsonl, line 2: ") && told.contains(fault), "{line}: {told}");
        }
        assert!(parsed("\n \n").expect_err("nothing").contains("no requests"));
        assert!(parse(&b"{\"prompt\": \"\xff\"}"[..], "f").is_err());
    }

    #[test]
    fn more_requests_than_are_taken_are_refused() {
        let line = "{\"prompt_tokens\":[1],\"output_tokens\":1}\n";
        assert_eq!(parsed(&line.repeat(REQUESTS_MAX)).expect("as many").len(), REQUESTS_MAX);
        assert!(parsed(&line.repeat(REQUESTS_MAX + 1)).expect_err("one more").contains("more than 10000 requests"));
        assert!(parsed(&"[".repeat(100_000)).expect_err("deep").contains("not JSON"));
    }

    #[test]
    fn tokens_outside_the_vocabulary_and_empty_prompts_are_told() {
        let requests = parsed("{\"prompt_tokens\":[1,9],\"output_tokens\":1}\n{\"prompt_tokens\":[],\"output_tokens\":1}").expect("forms");
        assert_eq!(tokens(&requests[0], None, 10, "f").expect("within"), [1, 9]);
        let told = tokens(&requests[0], None, 9, "f").expect_err("outside").to_string();
        assert_eq!(told, "f, line 1: the field `prompt_tokens`: entry 2 is `9`, not a token number (0 to 8)");
        let told = tokens(&requests[1], None, 9, "f").expect_err("empty").to_string();
        assert!(told.starts_with("f, line 2: the field `prompt_tokens` is empty"), "{told}");
    }
}
