//! Thinking before an answer: it may have a budget, and a rule for the answer holds only behind it.
//!
//! A model whose budget is used up is made to write the closing tag. Where there is a rule, the tags and the line feeds around them are
//! written for the model too, so that the answer begins where the rule does.

use std::sync::Arc;

use super::GrammarError;
use crate::engine::constraint::{Allowed, Constraint, ConstraintError, ConstraintState, TokenSet};
use crate::reply::{CLOSE_TAG, OPEN_TAG, ReasoningStart};
use crate::tokenizer::{ControlText, Specials, Tokenizer};
use crate::units::TokenId;

/// Written where the budget ends in the middle of a thought, so that the model does not lose its thread.
const OUT_OF_BUDGET: &str = "\n\nThere is no more time to think, so I answer with what I have.\n";

/// Thinking with a budget, an answer with a rule, or both.
pub struct Thinking(Arc<Script>);

/// What is written, in which order.
struct Script {
    tokenizer: Arc<Tokenizer>,
    /// Tokens that are written before the model thinks.
    opening: Vec<TokenId>,
    /// Tokens that close a thought whose budget is used up.
    closing: Vec<TokenId>,
    /// Tokens between the closing tag and the answer.
    gap: Vec<TokenId>,
    tokens_max: Option<usize>,
    answer: Option<Arc<dyn Constraint>>,
    /// All tokens but those that would end the text without an answer.
    not_ends: Allowed,
}

impl Thinking {
    /// For a model that stands at `start`, which is not [`ReasoningStart::Answer`].
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`].
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        start: ReasoningStart,
        tokens_max: Option<usize>,
        answer: Option<Arc<dyn Constraint>>,
    ) -> Result<Self, GrammarError> {
        let encode = |text: &str| tokenizer.encode(text.as_bytes(), Specials::Parse);
        let opening = if start == ReasoningStart::MayOpen { encode(&format!("{OPEN_TAG}\n"))? } else { Vec::new() };
        let last_words = if tokens_max == Some(0) { "\n" } else { OUT_OF_BUDGET };
        let closing = encode(&format!("{last_words}{CLOSE_TAG}"))?;
        let gap = encode("\n\n")?;
        let not_ends = if answer.is_some() {
            Allowed::Only(Arc::new(TokenSet::all_but(tokenizer.token_count(), tokenizer.end_tokens())))
        } else {
            Allowed::All
        };
        Ok(Self(Arc::new(Script { tokenizer, opening, closing, gap, tokens_max, answer, not_ends })))
    }
}

impl std::fmt::Debug for Thinking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Thinking").field("tokens_max", &self.0.tokens_max).field("answer", &self.0.answer).finish_non_exhaustive()
    }
}

/// What is being written.
#[derive(Clone, Debug)]
enum Part {
    /// The opening tag, so many tokens of it done.
    Opening(usize),
    /// Thoughts: how many tokens, and their last bytes, in which the closing tag may have begun.
    Thoughts { tokens: usize, tail: Vec<u8> },
    /// The closing tag, so many tokens of it done.
    Closing(usize),
    /// Between the tag and the answer.
    Gap(usize),
    /// The answer, so many tokens of it.
    Answer(usize),
}

impl Constraint for Thinking {
    fn begin(&self) -> Result<Box<dyn ConstraintState>, ConstraintError> {
        let answer = self.0.answer.as_ref().map(|answer| answer.begin()).transpose()?;
        Ok(Box::new(Text { script: Arc::clone(&self.0), answer, parts: vec![Part::Opening(0)] }))
    }
}

/// A text that begins with thoughts.
struct Text {
    script: Arc<Script>,
    answer: Option<Box<dyn ConstraintState>>,
    /// Where the text stood before each token, and where it stands now.
    parts: Vec<Part>,
}

impl Text {
    /// Where the text stands, past all that has nothing left to be written.
    fn part(&self) -> Part {
        let Script { opening, closing, gap, tokens_max, answer, .. } = &*self.script;
        let mut part = self.parts.last().expect("a text stands somewhere").clone();
        loop {
            part = match part {
                Part::Opening(done) if done == opening.len() => Part::Thoughts { tokens: 0, tail: Vec::new() },
                Part::Thoughts { tokens, .. } if tokens_max.is_some_and(|most| tokens >= most) => Part::Closing(0),
                Part::Closing(done) if done == closing.len() => Part::Gap(0),
                Part::Gap(done) if done == gap.len() || answer.is_none() => return Part::Answer(0),
                part => return part,
            }
        }
    }

    fn forced(&self, part: &Part) -> Option<TokenId> {
        match *part {
            Part::Opening(done) => self.script.opening.get(done).copied(),
            Part::Closing(done) => self.script.closing.get(done).copied(),
            Part::Gap(done) => self.script.gap.get(done).copied(),
            Part::Thoughts { .. } | Part::Answer(_) => None,
        }
    }
}

impl ConstraintState for Text {
    fn allowed(&mut self) -> Result<Allowed, ConstraintError> {
        let part = self.part();
        if let Some(token) = self.forced(&part) {
            return Ok(Allowed::Only(Arc::new([token].into_iter().collect())));
        }
        match (part, &mut self.answer) {
            (Part::Answer(_), Some(answer)) => answer.allowed(),
            (Part::Answer(_), None) => Ok(Allowed::All),
            _ => Ok(self.script.not_ends.clone()),
        }
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        let part = self.part();
        if let Some(forced) = self.forced(&part).filter(|&forced| forced != token) {
            return Err(ConstraintError(format!("token {token} stands in the place of {forced}")));
        }
        let next = match part {
            Part::Opening(done) => Part::Opening(done + 1),
            Part::Closing(done) => Part::Closing(done + 1),
            Part::Gap(done) => Part::Gap(done + 1),
            Part::Thoughts { tokens, mut tail } => {
                if !self.script.not_ends.contains(token) {
                    return Err(ConstraintError(format!("token {token} ends the text before its answer")));
                }
                tail.extend_from_slice(self.script.tokenizer.token_bytes(token, ControlText::Show));
                if tail.windows(CLOSE_TAG.len()).any(|bytes| bytes == CLOSE_TAG.as_bytes()) {
                    Part::Gap(0)
                } else {
                    tail.drain(..tail.len().saturating_sub(CLOSE_TAG.len() - 1));
                    Part::Thoughts { tokens: tokens + 1, tail }
                }
            }
            Part::Answer(tokens) => {
                if let Some(answer) = &mut self.answer {
                    answer.accept(token)?;
                }
                Part::Answer(tokens + 1)
            }
        };
        self.parts.push(next);
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        let kept = self.parts.len().checked_sub(tokens).filter(|&kept| kept > 0);
        let kept = kept.ok_or_else(|| ConstraintError(format!("{tokens} tokens cannot be taken back of {}", self.parts.len() - 1)))?;
        // Of the last tokens, those that belong to the answer are its last ones.
        let of_answer = self.parts[kept..].iter().filter(|part| matches!(part, Part::Answer(1..))).count();
        if let Some(answer) = &mut self.answer {
            answer.rollback(of_answer)?;
        }
        self.parts.truncate(kept);
        Ok(())
    }
}
