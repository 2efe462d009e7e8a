//! Where a model's thinking ends and its answer begins.
//!
//! The tags and the line feeds around them belong to neither. Only the first closing tag counts, and an opening tag only before anything
//! else: later ones are text that somebody quotes.

use super::tags::begun;

/// Opens the thinking.
pub const OPEN_TAG: &str = "<think>";
/// Closes the thinking.
pub const CLOSE_TAG: &str = "</think>";

/// Where the model stands when it begins to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningStart {
    /// The answer begins at once; tags are text.
    #[default]
    Answer,
    /// It may begin with the opening tag.
    MayOpen,
    /// The prompt ends with the opening tag.
    Inside,
}

impl ReasoningStart {
    /// From the prompt's end: inside where its last opening tag, with nothing but white space behind, is not closed; the answer where
    /// the prompt itself closed the thinking; else the model may open it.
    #[must_use]
    pub fn of_prompt(rendered: &str) -> Self {
        let end = rendered.trim_end();
        if end.ends_with(OPEN_TAG) {
            Self::Inside
        } else if end.ends_with(CLOSE_TAG) {
            Self::Answer
        } else {
            Self::MayOpen
        }
    }
}

/// A piece of one of the two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Thinking.
    Reasoning(String),
    /// Answer.
    Answer(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// White space so far, and perhaps the beginning of the opening tag.
    Undecided,
    /// Behind the opening tag, line feeds so far.
    Opened,
    Thinking,
    /// Behind the closing tag, line feeds so far.
    Closed,
    Answer,
}

/// Splits streamed text.
#[derive(Clone, Debug)]
pub(super) struct ReasoningSplit {
    state: State,
    held: String,
}

impl ReasoningSplit {
    pub(super) fn new(start: ReasoningStart) -> Self {
        let state = match start {
            ReasoningStart::Answer => State::Answer,
            ReasoningStart::MayOpen => State::Undecided,
            ReasoningStart::Inside => State::Opened,
        };
        Self { state, held: String::new() }
    }

    /// Whether thinking goes on, or may still begin.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Undecided | State::Opened | State::Thinking)
    }

    /// Takes a piece; adds what is certain to `out`.
    pub(super) fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.held.push_str(text);
        // Each state that is left is left for good, so this ends.
        while self.step(out) {}
    }

    /// The text is over.
    pub(super) fn finish(&mut self, out: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        if !held.is_empty() {
            out.push(if self.state == State::Thinking { Part::Reasoning(held) } else { Part::Answer(held) });
        }
    }

    /// Works on what is held; true where the state has changed.
    fn step(&mut self, out: &mut Vec<Part>) -> bool {
        match self.state {
            State::Undecided => {
                let white = self.held.len() - self.held.trim_start().len();
                let rest = &self.held[white..];
                if rest.starts_with(OPEN_TAG) {
                    self.held.drain(..white + OPEN_TAG.len());
                    self.state = State::Opened;
                    return true;
                }
                let is_undecided = OPEN_TAG.starts_with(rest);
                if !is_undecided {
                    self.state = State::Answer;
                }
                !is_undecided
            }
            State::Opened => self.skip_line_feeds(State::Thinking),
            State::Thinking => {
                if let Some(start) = self.held.find(CLOSE_TAG) {
                    let rest = self.held.split_off(start + CLOSE_TAG.len());
                    self.held.truncate(start);
                    let kept = self.held.trim_end_matches('\n').len();
                    self.held.truncate(kept);
                    let thought = std::mem::replace(&mut self.held, rest);
                    if !thought.is_empty() {
                        out.push(Part::Reasoning(thought));
                    }
                    self.state = State::Closed;
                    return true;
                }
                let before_tag = self.held.len() - begun(&self.held, CLOSE_TAG);
                let certain = self.held[..before_tag].trim_end_matches('\n').len();
                if certain > 0 {
                    out.push(Part::Reasoning(self.held.drain(..certain).collect()));
                }
                false
            }
            State::Closed => self.skip_line_feeds(State::Answer),
            State::Answer => {
                if !self.held.is_empty() {
                    out.push(Part::Answer(std::mem::take(&mut self.held)));
                }
                false
            }
        }
    }

    fn skip_line_feeds(&mut self, next: State) -> bool {
        let line_feeds = self.held.len() - self.held.trim_start_matches('\n').len();
        self.held.drain(..line_feeds);
        if self.held.is_empty() {
            return false;
        }
        self.state = next;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both texts, fed a character at a time and at once, which have to agree.
    fn split(start: ReasoningStart, text: &str) -> (String, String) {
        let of = |pieces: Vec<String>| {
            let mut split = ReasoningSplit::new(start);
            let mut parts = Vec::new();
            pieces.iter().for_each(|piece| split.push(piece, &mut parts));
            split.finish(&mut parts);
            let mut texts = (String::new(), String::new());
            for part in parts {
                match part {
                    Part::Reasoning(text) => {
                        assert!(texts.1.is_empty(), "no thinking behind the answer");
                        texts.0 += &text;
                    }
                    Part::Answer(text) => texts.1 += &text,
                }
            }
            texts
        };
        let whole = of(vec![text.to_owned()]);
        assert_eq!(of(text.chars().map(String::from).collect()), whole, "{text:?}");
        whole
    }

    #[test]
    fn tags_and_the_line_feeds_around_them_belong_to_neither() {
        let expected = ("a\n\nb".to_owned(), "c\n".to_owned());
        assert_eq!(split(ReasoningStart::MayOpen, "\n<think>\na\n\nb\n</think>\n\nc\n"), expected);
        assert_eq!(split(ReasoningStart::Inside, "\na\n\nb</think>c\n"), expected);
    }

    #[test]
    fn quoted_tags_stay_text() {
        let quoted = "say </think> and <think>x</think>";
        for start in [ReasoningStart::Answer, ReasoningStart::MayOpen] {
            assert_eq!(split(start, quoted), (String::new(), quoted.to_owned()));
        }
        let (thought, answer) = split(ReasoningStart::MayOpen, "<think>a <think> b</think>c </think> d");
        assert_eq!((thought.as_str(), answer.as_str()), ("a <think> b", "c </think> d"));
    }

    #[test]
    fn what_only_looks_like_a_tag_is_kept() {
        assert_eq!(split(ReasoningStart::MayOpen, "  <thin"), (String::new(), "  <thin".to_owned()));
        assert_eq!(split(ReasoningStart::Inside, "a\n</thin"), ("a\n</thin".to_owned(), String::new()));
        assert_eq!(split(ReasoningStart::MayOpen, " \n"), (String::new(), " \n".to_owned()));
    }

    #[test]
    fn thinking_that_is_not_closed_is_no_answer() {
        assert_eq!(split(ReasoningStart::Inside, "so\n\n"), ("so\n\n".to_owned(), String::new()));
    }

    #[test]
    fn an_empty_thought_is_none() {
        assert_eq!(split(ReasoningStart::MayOpen, "<think>\n\n</think>\n\nyes"), (String::new(), "yes".to_owned()));
    }

    #[test]
    fn the_prompts_end_says_where_the_model_stands() {
        let of = ReasoningStart::of_prompt;
        assert_eq!(of("<|im_start|>assistant\n<think>\n"), ReasoningStart::Inside);
        assert_eq!(of("<|im_start|>assistant\n<think>\n\n</think>\n\n"), ReasoningStart::Answer);
        assert_eq!(of("x <think> y<|im_end|>\n<|im_start|>assistant\n"), ReasoningStart::MayOpen);
    }
}
