//! A call written as one JSON object: `{"name": …, "arguments": {…}}`.
//!
//! Arguments that follow the name, as templates have it, are passed on while they come. In the other order they wait for the name.

use super::Delta;
use super::calls::Step;
use super::json_scan::{JsonScan, Scanned};
use super::tags::TagSearch;

#[derive(Clone, Debug)]
enum State {
    /// Before the opening brace.
    Begin,
    /// Before a key; whether the object may end here.
    Key {
        may_end: bool,
    },
    /// Inside a key.
    InKey(JsonScan, String),
    Colon(String),
    /// Inside the value of a key.
    InValue {
        key: String,
        scan: JsonScan,
        text: String,
    },
    /// Inside arguments that are passed on.
    Streamed(JsonScan),
    CommaOrEnd,
    /// Arguments that were passed on turned out to be no JSON: the rest goes after them, up to the closing tag.
    Broken(TagSearch),
}

/// Reads one call.
#[derive(Clone, Debug)]
pub(super) struct Hermes {
    index: u32,
    state: State,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    /// Whether the call's start was given out.
    has_begun: bool,
    has_arguments: bool,
}

impl Hermes {
    pub(super) fn new(index: u32) -> Self {
        Self { index, state: State::Begin, name: None, early: None, has_begun: false, has_arguments: false }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    pub(super) fn step(&mut self, character: char, out: &mut Vec<Delta>) -> Step {
        let is_white = character.is_ascii_whitespace();
        match std::mem::replace(&mut self.state, State::CommaOrEnd) {
            State::Begin if character == '{' => self.go(State::Key { may_end: true }),
            State::Key { may_end } if is_white => self.go(State::Key { may_end }),
            State::Key { may_end: true } if character == '}' => self.end(out),
            State::Key { .. } if character == '"' => {
                let (mut scan, mut text) = (JsonScan::new(), String::new());
                scan.step(character, &mut text);
                self.go(State::InKey(scan, text))
            }
            State::InKey(mut scan, mut text) => match scan.step(character, &mut text) {
                Scanned::Inside => self.go(State::InKey(scan, text)),
                Scanned::Last => self.go(State::Colon(serde_json::from_str(&text).unwrap_or_default())),
                Scanned::Behind | Scanned::Invalid => self.refuse(text, character, out),
            },
            State::Colon(key) if is_white => self.go(State::Colon(key)),
            State::Colon(key) if character == ':' => self.go(State::InValue { key, scan: JsonScan::new(), text: String::new() }),
            State::InValue { key, mut scan, mut text } => {
                let is_arguments = matches!(key.as_str(), "arguments" | "parameters") && !self.has_arguments;
                if text.is_empty() && is_white {
                    return self.go(State::InValue { key, scan, text });
                }
                if text.is_empty() && is_arguments && character == '{' && self.name.is_some() {
                    self.begin(out);
                    return self.stream(scan, character, out);
                }
                match scan.step(character, &mut text) {
                    Scanned::Inside => self.go(State::InValue { key, scan, text }),
                    Scanned::Last if self.takes(&key, &text) => Step::More,
                    Scanned::Behind if self.takes(&key, &text) => self.step(character, out),
                    _ => self.refuse(text, character, out),
                }
            }
            State::Streamed(scan) => self.stream(scan, character, out),
            State::CommaOrEnd if is_white => Step::More,
            State::CommaOrEnd if character == ',' => self.go(State::Key { may_end: false }),
            State::CommaOrEnd if character == '}' => self.end(out),
            State::Broken(search) => self.broken(search, character, out),
            State::Begin | State::Key { .. } | State::Colon(_) | State::CommaOrEnd => self.refuse(String::new(), character, out),
        }
    }

    /// The text is over.
    pub(super) fn finish(self, out: &mut Vec<Delta>) {
        let index = self.index;
        let is_whole = match self.state {
            State::Streamed(_) => false,
            State::Broken(mut search) => {
                let text = search.release();
                if !text.is_empty() {
                    out.push(Delta::ToolArguments { index, text });
                }
                false
            }
            _ => true,
        };
        out.push(Delta::ToolEnd { index, is_whole });
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    /// Not a call; or, behind arguments that were passed on whole, one that stands whatever follows.
    fn refuse(&mut self, mut left: String, character: char, out: &mut Vec<Delta>) -> Step {
        if !self.has_begun {
            return Step::Refused;
        }
        out.push(Delta::ToolEnd { index: self.index, is_whole: true });
        if !left.ends_with(character) {
            left.push(character);
        }
        Step::Left(left)
    }

    fn begin(&mut self, out: &mut Vec<Delta>) {
        if let Some(name) = self.name.clone().filter(|_| !self.has_begun) {
            self.has_begun = true;
            out.push(Delta::ToolCall { index: self.index, name });
        }
    }

    fn stream(&mut self, mut scan: JsonScan, character: char, out: &mut Vec<Delta>) -> Step {
        let mut text = String::new();
        let scanned = scan.step(character, &mut text);
        if !text.is_empty() {
            out.push(Delta::ToolArguments { index: self.index, text });
        }
        match scanned {
            Scanned::Inside => self.go(State::Streamed(scan)),
            Scanned::Last => {
                self.has_arguments = true;
                self.go(State::CommaOrEnd)
            }
            Scanned::Behind | Scanned::Invalid => self.broken(TagSearch::new(super::calls::CLOSE), character, out),
        }
    }

    fn broken(&mut self, mut search: TagSearch, character: char, out: &mut Vec<Delta>) -> Step {
        let mut text = String::new();
        let is_closed = search.step(character, &mut text);
        if !text.is_empty() {
            out.push(Delta::ToolArguments { index: self.index, text });
        }
        if is_closed {
            out.push(Delta::ToolEnd { index: self.index, is_whole: false });
            return Step::Closed;
        }
        self.go(State::Broken(search))
    }

    /// Takes note of a key's value that was not passed on; false where it cannot be a call's.
    fn takes(&mut self, key: &str, text: &str) -> bool {
        match key {
            "name" if self.name.is_none() => {
                let name: String = serde_json::from_str(text).unwrap_or_default();
                if name.is_empty() {
                    return false;
                }
                self.name = Some(name);
            }
            "arguments" | "parameters" if !self.has_arguments => {
                // Some models write the object as a string; null is none.
                let inner = serde_json::from_str(text).unwrap_or_else(|_| text.to_owned());
                let inner = if matches!(inner.trim(), "null" | "") { "{}".to_owned() } else { inner };
                if !is_object(&inner) {
                    return false;
                }
                self.early = Some(inner);
                self.has_arguments = true;
            }
            _ => {}
        }
        true
    }

    fn end(&mut self, out: &mut Vec<Delta>) -> Step {
        if self.name.is_none() {
            return Step::Refused;
        }
        if !self.has_begun {
            self.begin(out);
            let text = self.early.take().unwrap_or_else(|| "{}".to_owned());
            out.push(Delta::ToolArguments { index: self.index, text });
        }
        out.push(Delta::ToolEnd { index: self.index, is_whole: true });
        Step::Done
    }
}

fn is_object(text: &str) -> bool {
    text.trim_start().starts_with('{') && super::json_scan::is_json(text)
}
