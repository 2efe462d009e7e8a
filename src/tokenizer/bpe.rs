//! Merges the bytes of a word into tokens.
//!
//! Each step joins the neighbours of the lowest rank, the leftmost of equals, as llama.cpp does. Short words scan for that pair, long
//! ones keep a heap: n log n for a word of n bytes. Which bytes are a word is left to `split`.
#![allow(clippy::cast_possible_truncation, reason = "positions are below the checked text length, ranks below the checked merge count")]

use super::TokenizerError;
use super::vocabulary::Vocabulary;
use crate::units::TokenId;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

/// Words up to this length are merged by scanning: below it, that is faster than a heap.
const SCAN_BYTES_MAX: usize = 48;
/// Words longer than this are not remembered: they rarely come twice.
const REMEMBERED_BYTES_MAX: usize = 48;
/// Bound of the words remembered in one call.
const REMEMBERED_WORDS_MAX: usize = 1 << 16;

/// Spreads a pair of token numbers by one multiplication; the keys come from the model file, not from a user.
#[derive(Default)]
struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, key: u64) {
        let product = (self.0 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}

/// What a pair becomes, and how early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Merge {
    rank: u32,
    result: TokenId,
}

impl Merge {
    /// Of a pair that does not merge; no real rank reaches it.
    const NEVER: Self = Self { rank: u32::MAX, result: 0 };
}

#[derive(Debug)]
pub(super) struct Merges {
    of_pair: HashMap<u64, Merge, BuildHasherDefault<PairHasher>>,
}

impl Merges {
    pub(super) fn new(merges: &[String], vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        let mut of_pair = HashMap::with_capacity_and_hasher(merges.len(), BuildHasherDefault::default());
        for (index, merge) in merges.iter().enumerate() {
            let malformed = || TokenizerError::MalformedMerge { index, merge: merge.clone() };
            let (left, right) = merge.split_once(' ').ok_or_else(malformed)?;
            if left.is_empty() || right.is_empty() || right.contains(' ') {
                return Err(malformed());
            }
            let id = |part: &str| {
                let unknown = || TokenizerError::UnknownMergePart { index, merge: merge.clone(), part: part.to_owned() };
                vocabulary.id_of(part).ok_or_else(unknown)
            };
            let rank = u32::try_from(index).ok().filter(|&rank| rank < Merge::NEVER.rank).ok_or_else(malformed)?;
            let merged = Merge { rank, result: id(&format!("{left}{right}"))? };
            // Of a merge written twice the first counts.
            of_pair.entry(pair_key(id(left)?, id(right)?)).or_insert(merged);
        }
        Ok(Self { of_pair })
    }

    fn get(&self, left: TokenId, right: TokenId) -> Merge {
        self.of_pair.get(&pair_key(left, right)).copied().unwrap_or(Merge::NEVER)
    }
}

fn pair_key(left: TokenId, right: TokenId) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// Collects the tokens of one text, word by word, and remembers the words it has seen.
pub(super) struct WordEncoder<'t> {
    merges: &'t Merges,
    vocabulary: &'t Vocabulary,
    tokens: Vec<TokenId>,
    /// Where in `tokens` a word was written before.
    seen: HashMap<&'t [u8], Range<usize>>,
    /// `[n_parts]` of the word at hand: its tokens so far, and the merge of each with its right neighbour.
    parts: Vec<TokenId>,
    joins: Vec<Merge>,
}

impl<'t> WordEncoder<'t> {
    pub(super) fn new(merges: &'t Merges, vocabulary: &'t Vocabulary, text_bytes: usize) -> Self {
        let tokens = Vec::with_capacity(text_bytes / 3);
        Self { merges, vocabulary, tokens, seen: HashMap::new(), parts: Vec::new(), joins: Vec::new() }
    }

    pub(super) fn push_token(&mut self, token: TokenId) {
        self.tokens.push(token);
    }

    pub(super) fn push_word(&mut self, word: &'t [u8]) {
        if let &[byte] = word {
            self.tokens.push(self.vocabulary.of_byte(byte));
            return;
        }
        if let Some(range) = self.seen.get(word) {
            self.tokens.extend_from_within(range.clone());
            return;
        }
        let start = self.tokens.len();
        if word.len() <= SCAN_BYTES_MAX {
            self.merge_by_scan(word);
        } else {
            self.merge_by_heap(word);
        }
        if word.len() <= REMEMBERED_BYTES_MAX && self.seen.len() < REMEMBERED_WORDS_MAX {
            self.seen.insert(word, start..self.tokens.len());
        }
    }

    pub(super) fn finish(self) -> Vec<TokenId> {
        self.tokens
    }

    pub(super) fn merge_by_scan(&mut self, word: &[u8]) {
        let Self { merges, vocabulary, parts, joins, .. } = self;
        parts.clear();
        parts.extend(word.iter().map(|&byte| vocabulary.of_byte(byte)));
        joins.clear();
        joins.extend(parts.windows(2).map(|pair| merges.get(pair[0], pair[1])));
        while let Some((at, join)) = joins.iter().copied().enumerate().min_by_key(|(_, join)| join.rank) {
            if join == Merge::NEVER {
                break;
            }
            parts[at] = join.result;
            parts.remove(at + 1);
            joins.remove(at);
            if at > 0 {
                joins[at - 1] = merges.get(parts[at - 1], join.result);
            }
            if at < joins.len() {
                joins[at] = merges.get(join.result, parts[at + 1]);
            }
        }
        self.tokens.extend_from_slice(&self.parts);
    }

    pub(super) fn merge_by_heap(&mut self, word: &[u8]) {
        let mut chain = Chain::new(word.iter().map(|&byte| self.vocabulary.of_byte(byte)).collect());
        for left in 0..word.len() - 1 {
            chain.offer(self.merges, left);
        }
        while let Some(Reverse(candidate)) = chain.candidates.pop() {
            let left = candidate.left as usize;
            let Some(right) = chain.right_of(left) else { continue };
            // The neighbours changed since this candidate was offered; the new pair has its own.
            if chain.tokens[left] != candidate.tokens.0 || chain.tokens[right] != candidate.tokens.1 {
                continue;
            }
            chain.join(left, right, candidate.result);
            if let Some(before) = chain.left_of(left) {
                chain.offer(self.merges, before);
            }
            chain.offer(self.merges, left);
        }
        chain.write_to(&mut self.tokens);
    }
}

/// Ordered by rank, then place; the rest only tells whether it is still true.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    tokens: (TokenId, TokenId),
    result: TokenId,
}

/// The parts of a long word as a doubly linked list. A part joined into its left neighbour is [`GONE`].
struct Chain {
    tokens: Vec<TokenId>,
    next: Vec<u32>,
    previous: Vec<u32>,
    candidates: BinaryHeap<Reverse<Candidate>>,
}

/// No neighbour. A text long enough to have this position does not fit into a prompt, see [`Chain::new`].
const NONE: u32 = u32::MAX;
/// The token of a part that is no more; the vocabulary is shorter than that.
const GONE: TokenId = TokenId::MAX;

impl Chain {
    fn new(tokens: Vec<TokenId>) -> Self {
        let count = u32::try_from(tokens.len()).ok().filter(|&count| count < NONE).expect("a word is shorter than 4 GiB");
        let next = (1..count).chain([NONE]).collect();
        let previous = [NONE].into_iter().chain(0..count - 1).collect();
        Self { tokens, next, previous, candidates: BinaryHeap::new() }
    }

    fn right_of(&self, part: usize) -> Option<usize> {
        Some(self.next[part]).filter(|&right| right != NONE).map(|right| right as usize)
    }

    fn left_of(&self, part: usize) -> Option<usize> {
        Some(self.previous[part]).filter(|&left| left != NONE).map(|left| left as usize)
    }

    fn offer(&mut self, merges: &Merges, left: usize) {
        let Some(right) = self.right_of(left) else { return };
        let tokens = (self.tokens[left], self.tokens[right]);
        let merge = merges.get(tokens.0, tokens.1);
        if merge != Merge::NEVER {
            self.candidates.push(Reverse(Candidate { rank: merge.rank, left: left as u32, tokens, result: merge.result }));
        }
    }

    fn join(&mut self, left: usize, right: usize, result: TokenId) {
        self.tokens[left] = result;
        self.tokens[right] = GONE;
        self.next[left] = self.next[right];
        if let Some(after) = self.right_of(left) {
            self.previous[after] = left as u32;
        }
    }

    fn write_to(&self, tokens: &mut Vec<TokenId>) {
        tokens.extend(self.tokens.iter().filter(|&&token| token != GONE));
    }
}
