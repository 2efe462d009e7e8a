//! A build without the server has no grammars: the same names, and every rule is refused.

use std::sync::Arc;

use crate::engine::constraint::Constraint;
use crate::reply::{AnswerRule, ReasoningStart};
use crate::tokenizer::Tokenizer;

/// Why a rule cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("this build cannot constrain output: build it with the feature `serve`, which is among the default ones")]
pub struct GrammarError;

/// What a request demands of its text.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// What the answer has to be like; anything where `None`.
    pub rule: Option<&'a AnswerRule>,
    /// Where the model stands.
    pub reasoning: ReasoningStart,
    /// Most tokens of thinking.
    pub reasoning_tokens_max: Option<usize>,
}

/// Makes no constraints.
#[derive(Debug)]
pub struct Grammars;

impl Grammars {
    /// For any vocabulary.
    ///
    /// # Errors
    /// None.
    pub fn new(_: &Arc<Tokenizer>) -> Result<Self, GrammarError> {
        Ok(Self)
    }

    /// `None` where nothing is demanded.
    ///
    /// # Errors
    /// [`GrammarError`] for everything else.
    pub fn constraint(&self, demand: Demand<'_>) -> Result<Option<Arc<dyn Constraint>>, GrammarError> {
        let has_budget = demand.reasoning != ReasoningStart::Answer && demand.reasoning_tokens_max.is_some();
        if demand.rule.is_some() || has_budget { Err(GrammarError) } else { Ok(None) }
    }
}
