//! A call written in tags: `<function=NAME><parameter=KEY>value</parameter>…</function>`.
//!
//! The arguments are given out as a JSON object, piece by piece where a value is a string. The line feed behind a value's opening tag and
//! the one before its closing tag belong to the tags.

use super::Delta;
use super::argument::{escape, typed};
use super::calls::{CLOSE, Step};
use super::tags::TagSearch;
use super::tool_types::{Kinds, ToolTypes};

pub(super) const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";
/// No name is longer; a model that never writes the closing bracket wrote no call.
const NAME_BYTES_MAX: usize = 256;

#[derive(Clone, Debug)]
enum State {
    /// Inside the tag that names the function.
    Function(String),
    /// Between parameters: white space, or the beginning of a tag.
    Between(String),
    /// Inside the tag that names a parameter.
    Parameter(String),
    Value(Value),
}

/// A value while it comes.
#[derive(Clone, Debug)]
struct Value {
    search: TagSearch,
    kinds: Kinds,
    is_first: bool,
    /// All of it where it is no plain string; else a line feed that may be the closing tag's.
    held: String,
}

/// Reads one call.
#[derive(Clone, Debug)]
pub(super) struct Coder {
    index: u32,
    state: State,
    name: String,
    parameters: usize,
}

impl Coder {
    pub(super) fn new(index: u32) -> Self {
        Self { index, state: State::Function(String::new()), name: String::new(), parameters: 0 }
    }

    pub(super) fn has_begun(&self) -> bool {
        !self.name.is_empty()
    }

    pub(super) fn step(&mut self, character: char, types: &ToolTypes, out: &mut Vec<Delta>) -> Step {
        match &mut self.state {
            State::Function(tag) => match name_of(tag, character, FUNCTION) {
                Name::More => Step::More,
                Name::Wrong => Step::Refused,
                Name::Is(name) => {
                    out.push(Delta::ToolCall { index: self.index, name: name.clone() });
                    self.name = name;
                    self.go(State::Between(String::new()))
                }
            },
            State::Between(tag) => {
                if tag.is_empty() && character.is_whitespace() {
                    return Step::More;
                }
                tag.push(character);
                match tag.as_str() {
                    PARAMETER => {
                        let tag = std::mem::take(tag);
                        self.go(State::Parameter(tag))
                    }
                    END_FUNCTION => self.end(Step::Done, out),
                    // The function's end was forgotten.
                    CLOSE => self.end(Step::Closed, out),
                    begun if [PARAMETER, END_FUNCTION, CLOSE].iter().any(|tag| tag.starts_with(begun)) => Step::More,
                    _ => {
                        let left = std::mem::take(tag);
                        self.end(Step::Left(left), out)
                    }
                }
            }
            State::Parameter(tag) => match name_of(tag, character, PARAMETER) {
                Name::More => Step::More,
                Name::Wrong => {
                    let left = std::mem::take(tag);
                    self.end(Step::Left(left), out)
                }
                Name::Is(name) => {
                    let kinds = types.kinds(&self.name, &name);
                    let mut text = String::from(if self.parameters == 0 { "{" } else { ", " });
                    text.push_str(&serde_json::Value::from(name).to_string());
                    text.push_str(if kinds.is_only_string() { ": \"" } else { ": " });
                    self.parameters += 1;
                    self.arguments(text, out);
                    self.go(State::Value(Value { search: TagSearch::new(END_PARAMETER), kinds, is_first: true, held: String::new() }))
                }
            },
            State::Value(value) => {
                let (text, is_over) = value.step(character);
                self.arguments(text, out);
                if is_over { self.go(State::Between(String::new())) } else { Step::More }
            }
        }
    }

    /// The text is over inside the call.
    pub(super) fn finish(self, out: &mut Vec<Delta>) {
        let (index, mut text) = (self.index, String::new());
        match self.state {
            State::Value(mut value) => {
                let rest = value.search.release();
                // A value that did not end is given out as far as it goes.
                let all = std::mem::take(&mut value.held) + &rest;
                if value.kinds.is_only_string() { all.chars().for_each(|character| escape(character, &mut text)) } else { text = all }
            }
            State::Between(tag) | State::Parameter(tag) => text = tag,
            State::Function(_) => {}
        }
        if !text.is_empty() {
            out.push(Delta::ToolArguments { index, text });
        }
        out.push(Delta::ToolEnd { index, is_whole: false });
    }

    fn go(&mut self, state: State) -> Step {
        self.state = state;
        Step::More
    }

    fn end(&mut self, step: Step, out: &mut Vec<Delta>) -> Step {
        self.arguments((if self.parameters == 0 { "{}" } else { "}" }).to_owned(), out);
        out.push(Delta::ToolEnd { index: self.index, is_whole: true });
        step
    }

    fn arguments(&self, text: String, out: &mut Vec<Delta>) {
        if !text.is_empty() {
            out.push(Delta::ToolArguments { index: self.index, text });
        }
    }
}

impl Value {
    /// JSON text that is certain, and whether the value is over.
    fn step(&mut self, character: char) -> (String, bool) {
        let mut raw = String::new();
        let is_over = self.search.step(character, &mut raw);
        let mut out = String::new();
        for character in raw.chars() {
            if std::mem::take(&mut self.is_first) && character == '\n' {
                continue;
            }
            if !self.kinds.is_only_string() {
                self.held.push(character);
                continue;
            }
            // The last line feed is the closing tag's.
            std::mem::take(&mut self.held).chars().for_each(|held| escape(held, &mut out));
            if character == '\n' {
                self.held.push(character);
            } else {
                escape(character, &mut out);
            }
        }
        if is_over && self.kinds.is_only_string() {
            out.push('"');
        } else if is_over {
            let text = self.held.strip_suffix('\n').unwrap_or(&self.held);
            out = typed(text, self.kinds);
        }
        (out, is_over)
    }
}

enum Name {
    More,
    Wrong,
    Is(String),
}

/// Takes a character of a tag that begins with `opening`, holds a name and ends with `>`. `tag` holds what came so far, and all of it where
/// it is wrong.
fn name_of(tag: &mut String, character: char, opening: &str) -> Name {
    tag.push(character);
    let Some(name) = tag.strip_prefix(opening) else {
        return if opening.starts_with(tag.as_str()) { Name::More } else { Name::Wrong };
    };
    match character {
        '>' => {
            let name = name[..name.len() - 1].trim();
            if name.is_empty() { Name::Wrong } else { Name::Is(name.to_owned()) }
        }
        '\n' | '<' => Name::Wrong,
        _ if name.len() > NAME_BYTES_MAX => Name::Wrong,
        _ => Name::More,
    }
}
