//! What a request may demand of its text: which tokens may come next.
//!
//! The engine asks before it chooses a token and tells what was chosen; how the answer is found is for others. Each row of a window has its
//! own answer, so a text with drafts is the text without them.

use std::sync::Arc;

use crate::units::TokenId;

/// A constraint that cannot go on, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the constraint on the text failed: {0}")]
pub struct ConstraintError(pub String);

/// Some tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenSet {
    /// One bit a token, the lowest first.
    words: Vec<u32>,
}

impl TokenSet {
    /// From bits, the lowest of the first word being token 0.
    #[must_use]
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// All tokens below `n_vocab` but some.
    #[must_use]
    pub fn all_but(n_vocab: usize, without: &[TokenId]) -> Self {
        let mut set = Self { words: vec![0; n_vocab.div_ceil(32)] };
        for (token, index) in (0..).zip(0..n_vocab) {
            set.words[index / 32] |= u32::from(!without.contains(&token)) << (index % 32);
        }
        set
    }

    /// Whether a token is among them.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }
}

impl FromIterator<TokenId> for TokenSet {
    fn from_iter<T: IntoIterator<Item = TokenId>>(tokens: T) -> Self {
        let mut set = Self::default();
        for token in tokens {
            let word = token as usize / 32;
            if set.words.len() <= word {
                set.words.resize(word + 1, 0);
            }
            set.words[word] |= 1 << (token % 32);
        }
        set
    }
}

/// Which tokens may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Any.
    All,
    /// One of these.
    Only(Arc<TokenSet>),
}

impl Allowed {
    /// Whether a token may come.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        match self {
            Self::All => true,
            Self::Only(set) => set.contains(token),
        }
    }
}

/// A demand that any number of texts may be held to.
pub trait Constraint: std::fmt::Debug + Send + Sync {
    /// A text that has no tokens yet.
    ///
    /// # Errors
    /// [`ConstraintError`] where not even the first token can be told.
    fn begin(&self) -> Result<Box<dyn ConstraintState>, ConstraintError>;
}

/// Any text under a constraint; owns all that it needs.
pub type AnyConstraintState = dyn ConstraintState;

/// One text under a constraint.
pub trait ConstraintState {
    /// Which tokens may follow; never none.
    ///
    /// # Errors
    /// [`ConstraintError`] where no token may follow, or that cannot be told.
    fn allowed(&mut self) -> Result<Allowed, ConstraintError>;

    /// The text goes on with a token that was allowed, be it one that ends the text.
    ///
    /// # Errors
    /// [`ConstraintError`] for a token that was not.
    fn accept(&mut self, token: TokenId) -> Result<(), ConstraintError>;

    /// Takes back the last `tokens` tokens.
    ///
    /// # Errors
    /// [`ConstraintError`] where there are fewer.
    fn rollback(&mut self, tokens: usize) -> Result<(), ConstraintError>;

    /// How many of some tokens could follow, from the first on. The text stays as it is.
    ///
    /// # Errors
    /// As the other functions.
    fn acceptable(&mut self, tokens: &[TokenId]) -> Result<usize, ConstraintError> {
        let mut taken = 0;
        while let Some(&token) = tokens.get(taken) {
            if !self.allowed()?.contains(token) {
                break;
            }
            self.accept(token)?;
            taken += 1;
        }
        self.rollback(taken)?;
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_hold_what_was_put_in() {
        let set: TokenSet = [0, 31, 32, 95].into_iter().collect();
        assert_eq!((0..200).filter(|&token| set.contains(token)).collect::<Vec<_>>(), [0, 31, 32, 95]);
        assert!(!set.is_empty() && TokenSet::default().is_empty());
        let set = TokenSet::all_but(40, &[3, 39]);
        assert_eq!((0..200).filter(|&token| !set.contains(token)).count(), 200 - 38);
        assert!(!set.contains(3) && set.contains(38));
    }
}
