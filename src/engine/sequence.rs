//! A timeline: which tokens a stretch of the KV cache holds.

use crate::units::TokenId;

/// Deterministic runs reuse rows up to a multiple of this only, where tiles of attention and later of recurrences begin.
pub const DETERMINISTIC_STEP: usize = 64;

/// How rows of a timeline may be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reuse {
    /// Any row of an equal token.
    Any,
    /// Rows that the prompt path wrote, in whole steps of 64: windows round differently.
    Deterministic,
}

/// Tokens whose keys and values are in the caches, in order, from one row of the caches on.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    tokens: Vec<TokenId>,
    prompt_rows: usize,
    first_row: u32,
    /// Tokens of the last window, whose rows lie behind those of `tokens` until something else is written there.
    offered: Vec<TokenId>,
}

impl Sequence {
    /// An empty timeline whose position 0 is row `first_row` of the caches.
    #[must_use]
    pub fn starting_at(first_row: u32) -> Self {
        Self { first_row, ..Self::default() }
    }

    /// A timeline that was parked, at row `first_row`, of whose rows the first `prompt_rows` come from the prompt path.
    #[must_use]
    pub fn resumed(tokens: Vec<TokenId>, prompt_rows: usize, first_row: u32) -> Self {
        let prompt_rows = prompt_rows.min(tokens.len());
        Self { tokens, prompt_rows, first_row, offered: Vec::new() }
    }

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

    /// Row of the caches that holds position 0.
    #[must_use]
    pub fn first_row(&self) -> u32 {
        self.first_row
    }

    /// Leading rows that the prompt path wrote.
    #[must_use]
    pub fn prompt_rows(&self) -> usize {
        self.prompt_rows
    }

    /// Adds tokens that the prompt path read.
    pub fn extend_read(&mut self, tokens: &[TokenId]) {
        self.offered.clear();
        if self.prompt_rows == self.tokens.len() {
            self.prompt_rows += tokens.len();
        }
        self.tokens.extend_from_slice(tokens);
    }

    /// Adds tokens that went through windows.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        self.offered.clear();
        self.tokens.extend_from_slice(tokens);
    }

    /// Takes note of a window of `tokens` behind the last one. None of them belongs to the sequence before it is accepted.
    pub fn offer(&mut self, tokens: &[TokenId]) {
        self.offered.clear();
        self.offered.extend_from_slice(tokens);
    }

    /// Adds the first `n` tokens of the last window; the others are forgotten and their rows are overwritten by what comes next.
    ///
    /// # Panics
    /// Where the last window had fewer tokens, or has been accepted already.
    pub fn accept(&mut self, n: usize) {
        assert!(n <= self.offered.len(), "{n} tokens accepted, {} were in the window", self.offered.len());
        self.tokens.extend_from_slice(&self.offered[..n]);
        self.offered.clear();
    }

    /// Cuts back to the first `len` tokens. Rows behind are overwritten when they are needed.
    pub fn truncate(&mut self, len: usize) {
        self.offered.clear();
        self.tokens.truncate(len);
        self.prompt_rows = self.prompt_rows.min(len);
    }

    /// Leading tokens of `prompt` that need not be read again: all but the last at most, which is always a window.
    #[must_use]
    pub fn reusable(&self, prompt: &[TokenId], reuse: Reuse) -> usize {
        reusable(&self.tokens, self.prompt_rows, prompt, reuse)
    }
}

/// Leading tokens that are the same.
pub fn common_tokens(tokens: &[TokenId], prompt: &[TokenId]) -> usize {
    tokens.iter().zip(prompt).take_while(|(ours, theirs)| ours == theirs).count()
}

/// As [`Sequence::reusable`], for tokens that are parked.
pub fn reusable(tokens: &[TokenId], prompt_rows: usize, prompt: &[TokenId], reuse: Reuse) -> usize {
    let common = common_tokens(tokens, prompt).min(prompt.len().saturating_sub(1));
    match reuse {
        Reuse::Any => common,
        Reuse::Deterministic => common.min(prompt_rows) / DETERMINISTIC_STEP * DETERMINISTIC_STEP,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_prompt_token_is_never_reused() {
        let mut sequence = Sequence::default();
        sequence.extend_read(&[1, 2, 3, 4]);
        assert_eq!(sequence.reusable(&[1, 2, 3, 4], Reuse::Any), 3);
        assert_eq!(sequence.reusable(&[1, 2, 3, 4, 5], Reuse::Any), 4);
        assert_eq!(sequence.reusable(&[1, 2, 9, 4, 5], Reuse::Any), 2);
        assert_eq!(sequence.reusable(&[], Reuse::Any), 0);
    }

    #[test]
    fn a_deterministic_run_reuses_what_the_prompt_path_wrote_in_steps() {
        let tokens: Vec<TokenId> = (0..300).collect();
        let mut sequence = Sequence::default();
        sequence.extend_read(&tokens[..130]);
        sequence.extend(&tokens[130..200]);
        sequence.extend_read(&tokens[200..250]);
        assert_eq!(sequence.reusable(&tokens, Reuse::Any), 250);
        assert_eq!(sequence.reusable(&tokens, Reuse::Deterministic), 128, "130 rows of the prompt path are contiguous");
        sequence.truncate(127);
        assert_eq!((sequence.prompt_rows(), sequence.reusable(&tokens, Reuse::Deterministic)), (127, 64));
    }
}
