//! Constrained output: what may come next, token by token, for answers that have to be JSON, match an expression or call a tool.
//!
//! [`Grammars`] belongs to a vocabulary and makes a [`Constraint`] of an [`AnswerRule`]; the grammars themselves are llguidance's. A request
//! is not trusted: the size of what it brings, how deep it is nested and the work that it may cause are bounded, and what cannot be met is a
//! [`GrammarError`] before anything is read.
//!
//! Where a model thinks first, the rule holds from the end of its thinking on, and thinking may have a budget of tokens (`thinking`).

mod calls;
mod matcher;
mod schema;
mod thinking;

pub use schema::{SCHEMA_BYTES_MAX, SCHEMA_DEPTH_MAX};
pub use thinking::Thinking;

use std::sync::{Arc, OnceLock};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use crate::engine::constraint::Constraint;
use crate::reply::{AnswerRule, ReasoningStart};
use crate::tokenizer::{ControlText, Tokenizer, TokenizerError};
use crate::units::TokenId;
use matcher::Grammar;

/// Longest regular expression and longest grammar of a request, in bytes.
pub const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// States of an expression's automaton; each takes a kilobyte or two.
const LEXER_STATES_MAX: usize = 50_000;

/// Why a rule cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The vocabulary names no token that ends a text, so no text could be complete.
    #[error("the model's vocabulary has no token that ends an answer: output cannot be constrained")]
    NoEnd,
    /// The schema is no JSON.
    #[error("the JSON schema is no JSON: {0}")]
    NotJson(serde_json::Error),
    /// The schema is no object, and `true` and `false` are not supported.
    #[error("the JSON schema has to be an object")]
    NotAnObject,
    /// More text than anybody needs.
    #[error("{what} has {bytes} bytes, at most {bytes_max} are accepted")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The bound.
        bytes_max: usize,
    },
    /// Nested too deep.
    #[error("the JSON schema is nested more than {SCHEMA_DEPTH_MAX} deep")]
    TooDeep,
    /// A reference that leads back to itself without a value between.
    #[error("the JSON schema's reference \"{0}\" leads back to itself: no value can meet it")]
    Circle(String),
    /// No tool to call.
    #[error("a tool has to be called, but there is none")]
    NoTools,
    /// The grammar is refused.
    #[error("{what} cannot be followed: {reason}")]
    Refused {
        /// Of what kind.
        what: &'static str,
        /// Why, in the grammar engine's words.
        reason: String,
    },
    /// A text that has to be written cannot be encoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// What a request demands of its text.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// What the answer has to be like; anything where `None`.
    pub rule: Option<&'a AnswerRule>,
    /// Where the model stands. [`ReasoningStart::Answer`] for models that do not think: the others are made to think before they follow
    /// a rule.
    pub reasoning: ReasoningStart,
    /// Most tokens of thinking.
    pub reasoning_tokens_max: Option<usize>,
}

/// Makes constraints for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
    n_vocab: usize,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("n_vocab", &self.n_vocab).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a vocabulary. Takes about a second for 150,000 tokens.
    ///
    /// # Errors
    /// [`GrammarError::NoEnd`]; [`GrammarError::Refused`] for a vocabulary that the grammar engine does not take.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Self, GrammarError> {
        let n_vocab = tokenizer.token_count();
        let (&end, _) = tokenizer.end_tokens().split_first().ok_or(GrammarError::NoEnd)?;
        let refused = |reason: String| GrammarError::Refused { what: "the vocabulary", reason };
        let count = u32::try_from(n_vocab).map_err(|error| refused(error.to_string()))?;
        let words: Vec<Vec<u8>> = (0..count).map(|token| trie_bytes(tokenizer, token)).collect();
        let trie = TokTrie::from(&TokRxInfo::new(count, end), &words).with_eos_tokens(tokenizer.end_tokens());
        let factory = factory(&(Arc::new(ApproximateTokEnv::new(trie)) as TokEnv)).map_err(refused)?;
        Ok(Self { factory, tokenizer: Arc::clone(tokenizer), n_vocab })
    }

    /// The constraint for a request; `None` where it demands nothing.
    ///
    /// # Errors
    /// [`GrammarError`] for a rule that is too large, makes no sense, or is not supported.
    pub fn constraint(&self, demand: Demand<'_>) -> Result<Option<Arc<dyn Constraint>>, GrammarError> {
        let grammar = demand.rule.map(|rule| self.grammar(rule)).transpose()?;
        let has_budget = demand.reasoning_tokens_max.is_some();
        Ok(match (demand.reasoning, grammar) {
            (ReasoningStart::Answer, Some(grammar)) => Some(Arc::new(grammar)),
            (ReasoningStart::Answer, None) => None,
            (_, None) if !has_budget => None,
            (start, grammar) => {
                let grammar = grammar.map(|grammar| Arc::new(grammar) as Arc<dyn Constraint>);
                let tokens_max = demand.reasoning_tokens_max;
                Some(Arc::new(Thinking::new(Arc::clone(&self.tokenizer), start, tokens_max, grammar)?))
            }
        })
    }

    fn grammar(&self, rule: &AnswerRule) -> Result<Grammar, GrammarError> {
        let matcher = compile(&self.factory, rule)?;
        Ok(Grammar::new(matcher, self.tokenizer.end_tokens().to_vec()))
    }
}

/// Whether a rule can be followed, whatever the vocabulary: for a server that has no use for the constraint itself.
///
/// # Errors
/// As [`Grammars::constraint`].
pub fn check(rule: &AnswerRule) -> Result<(), GrammarError> {
    static FACTORY: OnceLock<Result<ParserFactory, String>> = OnceLock::new();
    // Every byte is a token here.
    let made = FACTORY.get_or_init(|| factory(&ApproximateTokEnv::single_byte_env()));
    match made {
        Ok(factory) => compile(factory, rule).map(drop),
        Err(reason) => Err(GrammarError::Refused { what: "a rule", reason: reason.clone() }),
    }
}

fn factory(environment: &TokEnv) -> Result<ParserFactory, String> {
    let slices = llguidance::earley::SlicedBiasComputer::general_slices();
    let made = ParserFactory::new(environment, InferenceCapabilities::default(), &slices);
    let mut factory = made.map_err(|error| error.to_string())?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits { max_lexer_states: LEXER_STATES_MAX, verbose_errors: false, ..ParserLimits::default() };
    Ok(factory)
}

fn compile(factory: &ParserFactory, rule: &AnswerRule) -> Result<Matcher, GrammarError> {
    let short = |what, text: &str| match text.len() {
        bytes if bytes > GRAMMAR_BYTES_MAX => Err(GrammarError::TooLong { what, bytes, bytes_max: GRAMMAR_BYTES_MAX }),
        _ => Ok(()),
    };
    let (what, grammar) = match rule {
        AnswerRule::JsonObject => ("a JSON object", TopLevelGrammar::from_json_schema(schema::any_object())),
        AnswerRule::JsonSchema(text) => {
            ("the JSON schema", TopLevelGrammar::from_json_schema(schema::checked(text, schema::Unknown::Refused)?))
        }
        AnswerRule::Regex(text) => {
            short("the regular expression", text)?;
            ("the regular expression", TopLevelGrammar::from_regex(text))
        }
        AnswerRule::Lark(text) => {
            short("the grammar", text)?;
            ("the grammar", TopLevelGrammar::from_lark(text.clone()))
        }
        AnswerRule::ToolCall { form, tools, parallel } => {
            let is_special = |tag: &str| factory.tok_env().tok_trie().get_special_token(tag).is_some();
            let lark = calls::lark(*form, tools, *parallel, &is_special)?;
            ("the tools' schemas", TopLevelGrammar::from_lark(lark))
        }
    };
    let refused = |reason: String| GrammarError::Refused { what, reason };
    let parser = factory.create_parser(grammar).map_err(|error| refused(error.to_string()))?;
    let mut matcher = Matcher::new(Ok(parser));
    if let Some(reason) = matcher.get_error() {
        return Err(refused(reason));
    }
    // What can never be written shows here and not in the middle of a request.
    let first = matcher.compute_mask_or_eos().map_err(|error| refused(error.to_string()))?;
    if first.is_zero() {
        return Err(refused("no token can begin it".to_owned()));
    }
    Ok(matcher)
}

/// A token as the trie wants it. Tokens that text is not made of carry a mark, so that a grammar's text never uses them.
fn trie_bytes(tokenizer: &Tokenizer, token: TokenId) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token, ControlText::Show);
    if tokenizer.is_special(token) && !bytes.is_empty() {
        return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
    }
    bytes.to_vec()
}

#[cfg(test)]
mod tests;
