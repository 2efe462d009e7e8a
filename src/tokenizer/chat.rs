//! Chat templates: messages to the text a model was trained on.
//!
//! Owns the Jinja environment, set up as the Transformers library does it (blocks trimmed, `raise_exception`, `strftime_now`, Python's
//! methods and ways of writing values). A template comes from a model file, so it is not trusted: it reads nothing but the messages,
//! its output is bounded, and whatever goes wrong is a [`ChatError`].
//!
//! Turning the text into tokens is left to [`super::Tokenizer::encode_chat`], which adds nothing.

mod clock;
mod json;
mod python;

pub use json::Json;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use std::collections::BTreeMap;
use std::io;
use std::time::SystemTime;

/// No prompt is longer than this; a template that writes more is broken or means harm.
const OUTPUT_BYTES_MAX: usize = 256 << 20;
const TEMPLATE_NAME: &str = "chat_template";

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template does not parse, or failed on these messages.
    #[error("chat template, line {line}: {reason}")]
    Template {
        /// Line of the template, from 1; 0 where none is known.
        line: usize,
        /// What went wrong there.
        reason: String,
    },
    /// The template refused the conversation by `raise_exception`.
    #[error("the chat template refuses this conversation (line {line}): {message}")]
    Refused {
        /// Line of the template, from 1; 0 where none is known.
        line: usize,
        /// What the template says.
        message: String,
    },
    /// The template writes without end.
    #[error("the chat template wrote more than {limit_bytes} bytes")]
    TooLong {
        /// The bound.
        limit_bytes: usize,
    },
}

/// One message of a conversation: an object with `role`, `content` and whatever else the template looks at (`reasoning_content`,
/// `tool_calls`, `name` …). A key that is missing is undefined in the template, which is not the same as null.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(transparent)]
pub struct Message(pub Json);

impl Message {
    /// A message of plain text.
    #[must_use]
    pub fn new(role: &str, content: &str) -> Self {
        Self(Json::Object(vec![("role".to_owned(), role.into()), ("content".to_owned(), content.into())]))
    }

    /// The same message with one more key.
    #[must_use]
    pub fn with(mut self, key: &str, value: Json) -> Self {
        if let Json::Object(entries) = &mut self.0 {
            entries.retain(|(name, _)| name != key);
            entries.push((key.to_owned(), value));
        }
        self
    }

    /// The same message with the texts of control tokens shielded, see [`super::Tokenizer::shield`]. The template does not recognise
    /// them any more: right for what users and tools wrote, wrong for an assistant turn whose `</think>` the template is to cut at (in
    /// vocabularies where that is a control token).
    #[must_use]
    pub fn shielded(&self, tokenizer: &super::Tokenizer) -> Self {
        Self(self.0.map_strings(&|text| tokenizer.shield(text).into_owned()))
    }
}

/// What a template gets beside the messages.
#[derive(Clone, Debug)]
pub struct RenderOptions {
    /// The tools the model may call, each in the form the API gives them; empty is none.
    pub tools: Vec<Json>,
    /// Whether the answer's opening is written.
    pub add_generation_prompt: bool,
    /// Whether the model is to think; undefined in the template where `None`.
    pub enable_thinking: Option<bool>,
    /// Text of the start token.
    pub bos_token: Option<String>,
    /// Text of the end token.
    pub eos_token: Option<String>,
    /// Further variables (`chat_template_kwargs`); they win over the ones above.
    pub extra: Vec<(String, Json)>,
    /// What `strftime_now` takes for now.
    pub now: SystemTime,
}

impl Default for RenderOptions {
    fn default() -> Self {
        Self {
            tools: Vec::new(),
            add_generation_prompt: true,
            enable_thinking: None,
            bos_token: None,
            eos_token: None,
            extra: Vec::new(),
            now: SystemTime::now(),
        }
    }
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// A refusal on its way out of the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Parses a template.
    ///
    /// # Errors
    /// [`ChatError::Template`] with the line where it does not parse.
    pub fn new(source: &str) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        environment.set_debug(false);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(|error| explain(&error))?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(python::call_method);
        environment.set_formatter(|out, _, value| out.write_str(&python::display(value)).map_err(Error::from));
        environment.add_filter("tojson", |value: &Value, arguments| python::to_json(value, arguments));
        environment.add_filter("string", |value: &Value| python::display(value));
        environment.add_function("raise_exception", |message: &Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(python::display(message))))
        });
        environment.add_template_owned(TEMPLATE_NAME, source.to_owned()).map_err(|error| explain(&error))?;
        Ok(Self { environment, source: source.to_owned() })
    }

    /// The template itself.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Writes a conversation.
    ///
    /// # Errors
    /// [`ChatError::Refused`] where the template does not want these messages, [`ChatError::Template`] where it fails on them,
    /// [`ChatError::TooLong`] where it does not end.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
        let template = self.environment.get_template(TEMPLATE_NAME).map_err(|error| explain(&error))?;
        let mut out = Bounded(Vec::new());
        let rendered = template.render_captured_to(context(messages, options), &mut out).map(drop);
        if out.0.len() > OUTPUT_BYTES_MAX {
            return Err(ChatError::TooLong { limit_bytes: OUTPUT_BYTES_MAX });
        }
        rendered.map_err(|error| explain(&error))?;
        // The engine writes whole strings.
        Ok(String::from_utf8_lossy(&out.0).into_owned())
    }
}

fn context(messages: &[Message], options: &RenderOptions) -> Value {
    let list = |items: &mut dyn Iterator<Item = &Json>| Value::from(items.map(Json::to_value).collect::<Vec<_>>());
    let tools = if options.tools.is_empty() { Value::from(()) } else { list(&mut options.tools.iter()) };
    let now = options.now;
    let strftime_now = Value::from_function(move |format: &str| clock::strftime(format, now));
    let mut variables = vec![
        ("messages".to_owned(), list(&mut messages.iter().map(|message| &message.0))),
        ("tools".to_owned(), tools),
        ("documents".to_owned(), Value::from(())),
        ("add_generation_prompt".to_owned(), Value::from(options.add_generation_prompt)),
        ("strftime_now".to_owned(), strftime_now),
    ];
    let texts = [("bos_token", &options.bos_token), ("eos_token", &options.eos_token)];
    variables.extend(texts.into_iter().filter_map(|(name, text)| Some((name.to_owned(), Value::from(text.as_deref()?)))));
    variables.extend(options.enable_thinking.map(|think| ("enable_thinking".to_owned(), Value::from(think))));
    variables.extend(options.extra.iter().map(|(name, value)| (name.clone(), value.to_value())));
    // Of a name given twice the last counts.
    Value::from(variables.into_iter().collect::<BTreeMap<_, _>>())
}

/// The engine's error in our words; a cause deeper down says more than the outer one.
fn explain(error: &Error) -> ChatError {
    let line = error.line().unwrap_or(0);
    let mut reason = error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()));
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return ChatError::Refused { line, message: message.clone() };
        }
        reason = format!("{reason}: {inner}");
        cause = inner.source();
    }
    ChatError::Template { line, reason }
}

/// Takes what is written up to the bound, and a little more to tell that it was passed.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other("the output is too long"));
        }
        let taken = bytes.len().min(OUTPUT_BYTES_MAX + 1 - self.0.len());
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
