//! Finds control and user-defined tokens in text, and keeps user text from being read as control tokens.
//!
//! A longer token wins over a shorter one wherever they overlap, even one that starts earlier: llama.cpp cuts the whole text at its
//! longest special tokens first, then at the next shorter ones.

use super::Specials;
use super::vocabulary::{Kind, Vocabulary};
use crate::units::TokenId;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// Stands inside the text of a control token that is to stay text. A noncharacter: it has no meaning in any text; where a user writes
/// it all the same, it is doubled.
pub(super) const MARK: char = '\u{fdd0}';

/// A piece of text on the way to tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// A special token.
    Token(TokenId),
    /// Text between special tokens, in bytes; never empty.
    Text(Range<usize>),
}

#[derive(Clone, Copy, Debug)]
struct Special {
    id: TokenId,
    is_control: bool,
}

#[derive(Debug)]
pub(super) struct SpecialTokens {
    by_text: HashMap<Vec<u8>, Special>,
    /// For each first byte: the lengths of the tokens that start so, longest first.
    lengths: Vec<Vec<usize>>,
}

impl SpecialTokens {
    pub(super) fn new(tokens: &[String], vocabulary: &Vocabulary) -> Self {
        let mut by_text = HashMap::new();
        let mut lengths = vec![Vec::new(); 256];
        for (text, id) in tokens.iter().zip(0..) {
            let is_control = match vocabulary.kind(id) {
                Some(Kind::Control) => true,
                Some(Kind::UserDefined) => false,
                _ => continue,
            };
            let Some(&first) = text.as_bytes().first() else { continue };
            lengths[usize::from(first)].push(text.len());
            by_text.insert(text.clone().into_bytes(), Special { id, is_control });
        }
        for of_byte in &mut lengths {
            of_byte.sort_unstable_by(|a, b| b.cmp(a));
            of_byte.dedup();
        }
        Self { by_text, lengths }
    }

    /// All special tokens that start at `position`, with their lengths, longest first.
    fn starting_at<'a>(&'a self, text: &'a [u8], position: usize) -> impl Iterator<Item = (usize, Special)> + 'a {
        self.lengths[usize::from(text[position])]
            .iter()
            .filter_map(move |&length| Some((length, *self.by_text.get(text.get(position..position + length)?)?)))
    }

    /// Cuts `text` at special tokens.
    pub(super) fn partition(&self, text: &[u8], specials: Specials) -> Vec<Part> {
        let wanted = |special: &Special| specials == Specials::Parse || !special.is_control;
        // (length, start, id), to be taken longest first, then from left to right.
        let mut found: Vec<(usize, usize, TokenId)> = (0..text.len())
            .flat_map(|start| self.starting_at(text, start).map(move |(length, special)| (length, start, special)))
            .filter(|(_, _, special)| wanted(special))
            .map(|(length, start, special)| (length, start, special.id))
            .collect();
        found.sort_unstable_by_key(|&(length, start, _)| (std::cmp::Reverse(length), start));
        let mut taken: BTreeMap<usize, (usize, TokenId)> = BTreeMap::new();
        for (length, start, id) in found {
            let end = start + length;
            // Those taken do not overlap, so the last that starts before `end` is the only one that can reach in.
            if taken.range(..end).next_back().is_none_or(|(_, &(other_end, _))| other_end <= start) {
                taken.insert(start, (end, id));
            }
        }
        let mut parts = Vec::with_capacity(2 * taken.len() + 1);
        let mut position = 0;
        for (start, (end, id)) in taken {
            if position < start {
                parts.push(Part::Text(position..start));
            }
            parts.push(Part::Token(id));
            position = end;
        }
        if position < text.len() {
            parts.push(Part::Text(position..text.len()));
        }
        parts
    }

    /// See [`super::Tokenizer::shield`].
    pub(super) fn shield<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let starts_control = |position: usize| self.starting_at(text.as_bytes(), position).any(|(_, special)| special.is_control);
        if !text.char_indices().any(|(position, character)| character == MARK || starts_control(position)) {
            return Cow::Borrowed(text);
        }
        let mut shielded = String::with_capacity(text.len() + 16);
        for (position, character) in text.char_indices() {
            shielded.push(character);
            if character == MARK || starts_control(position) {
                shielded.push(MARK);
            }
        }
        Cow::Owned(shielded)
    }
}

/// The text without the marks of [`super::Tokenizer::shield`].
#[must_use]
pub fn unshield(text: &str) -> Cow<'_, str> {
    if !text.contains(MARK) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        // A lone mark is ours, a double one was a single one of the user's.
        if character != MARK || characters.next_if_eq(&MARK).is_some() {
            plain.push(character);
        }
    }
    Cow::Owned(plain)
}

/// [`unshield`] for a part of a rendered text, which special tokens may have cut anywhere.
pub(super) fn strip_marks(text: &[u8]) -> Cow<'_, [u8]> {
    match std::str::from_utf8(text).map(unshield) {
        Ok(Cow::Owned(plain)) => Cow::Owned(plain.into_bytes()),
        _ => Cow::Borrowed(text),
    }
}
