//! What an answer has to be like, as plain data: `grammar` makes it a constraint.

use serde::{Deserialize, Serialize};

/// How a model family writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CallForm {
    /// `{"name": …, "arguments": {…}}` between the tags.
    Json,
    /// `<function=…>` and `<parameter=…>` between the tags.
    Tags,
}

impl CallForm {
    /// As the chat template writes calls; JSON where it says nothing of them.
    #[must_use]
    pub fn of_template(source: &str) -> Self {
        if source.contains(super::coder::FUNCTION) { Self::Tags } else { Self::Json }
    }
}

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct ToolRule {
    /// Its name.
    pub name: String,
    /// JSON schema of its arguments, as text; an object with anything in it where there is none.
    pub parameters: Option<String>,
}

/// What an answer has to be like.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerRule {
    /// A JSON object.
    JsonObject,
    /// JSON that meets a schema, given as text.
    JsonSchema(String),
    /// Text that a regular expression matches whole.
    Regex(String),
    /// Text of a grammar in Lark's notation, as llguidance reads it.
    Lark(String),
    /// Calls and nothing else.
    ToolCall {
        /// How they are written.
        form: CallForm,
        /// The tools to choose from.
        tools: Vec<ToolRule>,
        /// Whether there may be several.
        parallel: bool,
    },
}
