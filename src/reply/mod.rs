//! What a model writes, taken apart while it is written: reasoning, the answer's text, tool calls, and where a stop string ends it.
//!
//! [`Reply`] takes text piece by piece and gives [`Delta`]s. It is pure: no clock, no device, no wire format. However a text is cut
//! into pieces, the events say the same (adjacent pieces of one kind joined), and every character of the model's text is in some event
//! but for the tags, the white space around them, and a stop string with all behind it.
//!
//! Stop strings are looked for in the answer's text alone, neither in reasoning nor in calls: a client that stops at a line feed would
//! otherwise never see an answer of a model that thinks.

mod argument;
mod calls;
mod coder;
mod hermes;
mod json_scan;
mod reasoning;
mod rule;
mod stops;
mod tags;
mod tool_types;

pub use reasoning::{CLOSE_TAG, OPEN_TAG, ReasoningStart};
pub use rule::{AnswerRule, CallForm, ToolRule};
pub use stops::{STOP_BYTES_MAX, STOPS_MAX, StopError, StopStrings};
pub use tool_types::ToolTypes;

use calls::CallParser;
use reasoning::{Part, ReasoningSplit};

/// A piece of a reply. Calls are numbered from 0 in the order they begin; nothing of another kind comes between a call's events.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Delta {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A call begins.
    ToolCall {
        /// Its number.
        index: u32,
        /// The tool; never empty, perhaps none of those that were offered.
        name: String,
    },
    /// More of a call's arguments: all pieces joined are a JSON object, unless the call was broken off.
    ToolArguments {
        /// The call's number.
        index: u32,
        /// JSON text.
        text: String,
    },
    /// A call ends.
    ToolEnd {
        /// Its number.
        index: u32,
        /// Whether the arguments are a whole JSON object. Where not, the text ended inside the call, or it was no JSON.
        is_whole: bool,
    },
}

/// How to read a reply.
#[derive(Clone, Debug, Default)]
pub struct ReplyOptions {
    /// Where the model stands when it begins to write.
    pub reasoning: ReasoningStart,
    /// The tools on offer; `None` where there are none, so that call mark-up is text like any other.
    pub tools: Option<ToolTypes>,
    /// What ends the answer.
    pub stops: StopStrings,
}

/// A reply while it is written. Life: [`Reply::push`] for each token's text until [`Reply::stopped`] or the model's end, then
/// [`Reply::finish`].
#[derive(Clone, Debug)]
pub struct Reply {
    reasoning: ReasoningSplit,
    calls: Option<CallParser>,
    stops: StopStrings,
    reasoning_tokens: usize,
}

impl Reply {
    /// Nothing written yet.
    #[must_use]
    pub fn new(options: ReplyOptions) -> Self {
        Self {
            reasoning: ReasoningSplit::new(options.reasoning),
            calls: options.tools.map(CallParser::new),
            stops: options.stops,
            reasoning_tokens: 0,
        }
    }

    /// Takes the text of one more token, which may be empty. Nothing is taken once a stop string was met.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        let mut out = Vec::new();
        if self.stopped().is_some() {
            return out;
        }
        let was_thinking = self.is_thinking();
        let mut parts = Vec::new();
        self.reasoning.push(text, &mut parts);
        self.reasoning_tokens += usize::from(was_thinking || self.is_thinking());
        self.take(parts, &mut out);
        out
    }

    /// The model's text is over: what was held back is given out. Changes nothing more after the first time.
    pub fn finish(&mut self) -> Vec<Delta> {
        let mut out = Vec::new();
        if self.stopped().is_some() {
            return out;
        }
        let mut parts = Vec::new();
        self.reasoning.finish(&mut parts);
        self.take(parts, &mut out);
        if let Some(calls) = &mut self.calls {
            let mut events = Vec::new();
            calls.finish(&mut events);
            self.stop_at(events, &mut out);
        }
        if self.stopped().is_none() {
            push_text(&mut out, &self.stops.release());
        }
        out
    }

    /// The stop string that ended the answer. Nothing needs to be written any more.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.stops.matched()
    }

    /// Whether the model is thinking, or may still begin to.
    #[must_use]
    pub fn is_thinking(&self) -> bool {
        self.reasoning.is_open()
    }

    /// Tokens, that is calls of [`Reply::push`], that were reasoning or its tags.
    #[must_use]
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Calls that have begun.
    #[must_use]
    pub fn call_count(&self) -> u32 {
        self.calls.as_ref().map_or(0, CallParser::count)
    }

    fn take(&mut self, parts: Vec<Part>, out: &mut Vec<Delta>) {
        for part in parts {
            match (part, &mut self.calls) {
                (Part::Reasoning(text), _) => out.push(Delta::Reasoning(text)),
                (Part::Answer(text), Some(calls)) => {
                    let mut events = Vec::new();
                    calls.push(&text, &mut events);
                    self.stop_at(events, out);
                }
                (Part::Answer(text), None) => self.stop_at(vec![Delta::Content(text)], out),
            }
        }
    }

    /// Passes events on up to the first stop string.
    fn stop_at(&mut self, events: Vec<Delta>, out: &mut Vec<Delta>) {
        for event in events {
            if self.stopped().is_some() {
                return;
            }
            if let Delta::Content(text) = event {
                push_text(out, &self.stops.push(&text));
            } else {
                // A stop string does not reach across a call.
                push_text(out, &self.stops.release());
                out.push(event);
            }
        }
    }
}

/// Adds text, to the last event where that is text.
fn push_text(out: &mut Vec<Delta>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(Delta::Content(last)) => last.push_str(text),
        _ => out.push(Delta::Content(text.to_owned())),
    }
}

#[cfg(test)]
mod tests;
