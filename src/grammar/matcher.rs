//! One grammar, and texts under it: llguidance's matcher behind the engine's trait.

use std::sync::{Arc, Mutex, PoisonError};

use llguidance::Matcher;

use crate::engine::constraint::{Allowed, Constraint, ConstraintError, ConstraintState, TokenSet};
use crate::units::TokenId;

/// A grammar that compiled.
pub(super) struct Grammar {
    /// At the grammar's start; never moved on.
    start: Mutex<Matcher>,
    ends: Vec<TokenId>,
}

impl Grammar {
    pub(super) fn new(start: Matcher, ends: Vec<TokenId>) -> Self {
        Self { start: Mutex::new(start), ends }
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl Constraint for Grammar {
    fn begin(&self) -> Result<Box<dyn ConstraintState>, ConstraintError> {
        let matcher = self.start.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Box::new(Text { matcher, ends: self.ends.clone(), ended: 0 }))
    }
}

/// A text under a grammar.
struct Text {
    matcher: Matcher,
    ends: Vec<TokenId>,
    /// End tokens taken since the text was complete; the matcher does not see them.
    ended: usize,
}

fn failed(error: &impl ToString) -> ConstraintError {
    ConstraintError(error.to_string())
}

impl ConstraintState for Text {
    fn allowed(&mut self) -> Result<Allowed, ConstraintError> {
        let set = if self.ended > 0 || (self.matcher.is_stopped() && !self.matcher.is_error()) {
            self.ends.iter().copied().collect()
        } else {
            TokenSet::from_words(self.matcher.compute_mask().map_err(|error| failed(&error))?.as_slice().to_vec())
        };
        if set.is_empty() {
            return Err(ConstraintError("no token can follow".to_owned()));
        }
        Ok(Allowed::Only(Arc::new(set)))
    }

    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError> {
        if !self.ends.contains(&token) {
            if self.ended > 0 {
                return Err(ConstraintError(format!("token {token} follows the end of the text")));
            }
            return self.matcher.consume_token(token).map_err(|error| failed(&error));
        }
        let is_complete = self.ended > 0 || self.matcher.is_accepting().map_err(|error| failed(&error))?;
        if !is_complete {
            return Err(ConstraintError("the text ends before it is complete".to_owned()));
        }
        self.ended += 1;
        Ok(())
    }

    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError> {
        let of_ends = tokens.min(self.ended);
        self.ended -= of_ends;
        self.matcher.rollback(tokens - of_ends).map_err(|error| failed(&error))
    }
}
