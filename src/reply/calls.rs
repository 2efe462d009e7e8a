//! Tool calls in streamed text, in both forms that the model families write between `<tool_call>` and `</tool_call>`.
//!
//! Which form it is shows in its first character, so a model that mixes them is understood. What turns out to be no call before its name
//! is known is given back as text, tags and all.

use super::Delta;
use super::coder::Coder;
use super::hermes::Hermes;
use super::push_text;
use super::tool_types::ToolTypes;

/// Opens a call.
pub(super) const OPEN: &str = "<tool_call>";
/// Closes a call.
pub(super) const CLOSE: &str = "</tool_call>";

/// What a character was to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Part of it.
    More,
    /// Its last one; the closing tag follows.
    Done,
    /// The last one of the closing tag.
    Closed,
    /// The call ended before this text, whose last character it is.
    Left(String),
    /// There is no call.
    Refused,
}

#[derive(Clone, Debug)]
enum State {
    /// Text. Held: white space that a call would swallow, and the beginning of a tag.
    Text {
        held: String,
    },
    /// Behind the opening tag.
    Opened,
    Hermes(Hermes),
    Coder(Coder),
}

/// Finds calls.
#[derive(Clone, Debug)]
pub(super) struct CallParser {
    types: ToolTypes,
    state: State,
    /// Text of a call that has not begun yet, with the white space before it.
    raw: String,
    count: u32,
    /// A call has ended and its closing tag is still to come.
    owes_close: bool,
    /// White space at the text's place is dropped: behind a call.
    is_behind_call: bool,
}

impl CallParser {
    pub(super) fn new(types: ToolTypes) -> Self {
        let state = State::Text { held: String::new() };
        Self { types, state, raw: String::new(), count: 0, owes_close: false, is_behind_call: false }
    }

    /// Calls that have begun.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Takes a piece; adds what is certain to `out`.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Delta>) {
        let mut events = Vec::new();
        text.chars().for_each(|character| self.step(character, &mut events));
        events.into_iter().for_each(|event| push_joined(out, event));
    }

    /// The text is over.
    pub(super) fn finish(&mut self, out: &mut Vec<Delta>) {
        let raw = std::mem::take(&mut self.raw);
        match std::mem::replace(&mut self.state, State::Text { held: String::new() }) {
            State::Text { held } if self.is_behind_call && held.trim().is_empty() => {}
            State::Text { held } => push_text(out, &held),
            State::Hermes(call) if call.has_begun() => call.finish(out),
            State::Coder(call) if call.has_begun() => call.finish(out),
            State::Opened | State::Hermes(_) | State::Coder(_) => push_text(out, &raw),
        }
    }

    fn step(&mut self, character: char, out: &mut Vec<Delta>) {
        let events_before = out.len();
        let step = match &mut self.state {
            State::Text { .. } => return self.text(character, out),
            State::Opened => {
                self.raw.push(character);
                let index = self.count;
                self.state = match character {
                    white if white.is_whitespace() => return,
                    '{' => State::Hermes(Hermes::new(index)),
                    '<' => State::Coder(Coder::new(index)),
                    _ => return self.give_back(out),
                };
                match &mut self.state {
                    State::Hermes(call) => call.step(character, out),
                    State::Coder(call) => call.step(character, &self.types, out),
                    _ => return,
                }
            }
            State::Hermes(call) => {
                self.raw.push(character);
                call.step(character, out)
            }
            State::Coder(call) => {
                self.raw.push(character);
                call.step(character, &self.types, out)
            }
        };
        if matches!(out.get(events_before), Some(Delta::ToolCall { .. })) {
            self.count += 1;
        }
        let has_begun = match &self.state {
            State::Hermes(call) => call.has_begun(),
            State::Coder(call) => call.has_begun(),
            _ => false,
        };
        if has_begun {
            self.raw.clear();
        }
        match step {
            Step::More => {}
            Step::Refused => self.give_back(out),
            Step::Done => self.leave(true),
            Step::Closed => self.leave(false),
            Step::Left(text) => {
                self.leave(true);
                text.chars().for_each(|character| self.step(character, out));
            }
        }
    }

    fn leave(&mut self, owes_close: bool) {
        self.state = State::Text { held: String::new() };
        (self.owes_close, self.is_behind_call) = (owes_close, true);
    }

    /// No call after all: the tag is text, and what followed it is read again, for it may hold a tag of its own.
    fn give_back(&mut self, out: &mut Vec<Delta>) {
        let raw = std::mem::take(&mut self.raw);
        let behind_tag = raw.find(OPEN).map_or(raw.len(), |start| start + OPEN.len());
        push_text(out, &raw[..behind_tag]);
        self.state = State::Text { held: String::new() };
        self.is_behind_call = false;
        raw[behind_tag..].chars().for_each(|character| self.step(character, out));
    }

    fn text(&mut self, character: char, out: &mut Vec<Delta>) {
        let State::Text { held } = &mut self.state else { return };
        held.push(character);
        let tag_start = held.len() - held.trim_start().len();
        let tag = &held[tag_start..];
        if tag.is_empty() {
            return;
        }
        if tag == OPEN {
            // White space before a call is the template's; it is given back with a call that is none.
            self.raw = std::mem::take(held);
            if self.is_behind_call {
                self.raw.drain(..tag_start);
            }
            self.owes_close = false;
            self.state = State::Opened;
            return;
        }
        if self.owes_close && tag == CLOSE {
            held.clear();
            self.owes_close = false;
            return;
        }
        if OPEN.starts_with(tag) || (self.owes_close && CLOSE.starts_with(tag)) {
            return;
        }
        // Not a tag: all but what may begin one anew is text. A tag begins with a character that is nowhere else in it.
        let kept = if character == '<' || character.is_whitespace() { character.len_utf8() } else { 0 };
        let certain: String = held.drain(..held.len() - kept).collect();
        let certain = if self.is_behind_call { certain.trim_start() } else { &certain };
        if !certain.is_empty() {
            push_text(out, certain);
            self.is_behind_call = false;
        }
    }
}

/// Adds an event, to the last one where both are pieces of one thing.
fn push_joined(out: &mut Vec<Delta>, event: Delta) {
    match (out.last_mut(), event) {
        (Some(Delta::ToolArguments { index, text }), Delta::ToolArguments { index: other, text: more }) if *index == other => {
            text.push_str(&more);
        }
        (_, Delta::Content(text)) => push_text(out, &text),
        (_, event) => out.push(event),
    }
}
