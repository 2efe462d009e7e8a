//! The one live timeline: which tokens the KV cache holds.

use crate::units::TokenId;

/// Tokens whose keys and values are in the cache, in order.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    tokens: Vec<TokenId>,
}

impl Sequence {
    /// Number of tokens, which is the position of the next one.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// True before the first token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Adds tokens that were read or written.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Cuts back to the first `len` tokens. Rows behind are overwritten when they are needed.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
    }
}
