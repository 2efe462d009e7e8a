//! Prompt lookup: drafts are what followed the last tokens where they stood before.
//!
//! Owns a copy of the sequence and an index of its pairs and triples of tokens, kept up as tokens come and cut back as they go. A search
//! visits the places of the last three tokens, latest first, and keeps the longest match; only where there is none does the latest place
//! of the last two count. Nothing here knows of acceptance: see [`super::depth`].

use std::collections::HashMap;

use crate::units::TokenId;

/// Least tokens of a match. One token alone is followed by anything; two are cheap to find and let a list or a name repeat.
pub const MATCH_TOKENS_MIN: usize = 2;
/// Most tokens of a match that are compared: longer ones say no more, and then the latest place is the better one.
pub const MATCH_TOKENS_MAX: usize = 64;
/// Most places that one search compares, the latest ones. It bounds a search at 0.15 ms (one core of a
/// shared server) where one triple is all of the text.
const PLACES_MAX: usize = 4096;

/// Where each run of `N` tokens stood, latest first. A place is the number of tokens up to the end of the run, so that 0 is none.
#[derive(Clone, Debug, Default)]
struct Chains<const N: usize> {
    latest: HashMap<[TokenId; N], u32>,
    /// For each token of the sequence: the place before, of the run that ends in it.
    before: Vec<u32>,
}

impl<const N: usize> Chains<N> {
    /// Takes in the last of `tokens`.
    fn push(&mut self, tokens: &[TokenId]) {
        let place = u32::try_from(tokens.len()).expect("a context has at most 2^22 tokens");
        let before = tokens.last_chunk::<N>().and_then(|run| self.latest.insert(*run, place));
        self.before.push(before.unwrap_or(0));
    }

    /// Takes the last of `tokens` out again.
    fn pop(&mut self, tokens: &[TokenId]) {
        let before = self.before.pop();
        let (Some(run), Some(before)) = (tokens.last_chunk::<N>(), before) else { return };
        if before == 0 {
            self.latest.remove(run);
        } else {
            self.latest.insert(*run, before);
        }
    }

    /// The place before `place` of the same run; 0 where there is none.
    fn before(&self, place: usize) -> usize {
        place.checked_sub(1).and_then(|index| self.before.get(index)).map_or(0, |&before| before as usize)
    }
}

/// A sequence and where its runs of tokens stood before. Life: [`Lookup::sync`] with the tokens of the moment, then
/// [`Lookup::propose`], again and again.
#[derive(Clone, Debug, Default)]
pub struct Lookup {
    tokens: Vec<TokenId>,
    pairs: Chains<MATCH_TOKENS_MIN>,
    triples: Chains<{ MATCH_TOKENS_MIN + 1 }>,
}

impl Lookup {
    /// Knows no tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the index that of `sequence` followed by `chosen`, the tokens that are no part of it yet. Costs a comparison of all tokens
    /// and an update of the index from the first that differs: 0.08 ms behind 131,072 tokens in the usual case of one or two new ones, and
    /// 0.4 us for each token where another sequence has taken its place.
    pub fn sync(&mut self, sequence: &[TokenId], chosen: &[TokenId]) {
        let of_sequence = common_prefix(&self.tokens, sequence);
        let of_chosen = if of_sequence == sequence.len() { common_prefix(&self.tokens[of_sequence..], chosen) } else { 0 };
        let kept = of_sequence + of_chosen;
        while self.tokens.len() > kept {
            self.pairs.pop(&self.tokens);
            self.triples.pop(&self.tokens);
            self.tokens.pop();
        }
        for &token in sequence[of_sequence..].iter().chain(&chosen[of_chosen..]) {
            self.tokens.push(token);
            self.pairs.push(&self.tokens);
            self.triples.push(&self.tokens);
        }
    }

    /// Fills `drafts` with the `most` tokens that followed the longest match of the last tokens, the latest of equally long ones, and
    /// returns how many tokens match; 0, and no drafts, where fewer than [`MATCH_TOKENS_MIN`] do. A match that reaches to the end is
    /// taken to go round, as text does that has begun to repeat itself.
    pub fn propose(&self, most: usize, drafts: &mut Vec<TokenId>) -> usize {
        drafts.clear();
        let (place, match_tokens) = self.longest_match();
        if match_tokens > 0 {
            for at in place..place + most {
                let followed = self.tokens.get(at).copied();
                drafts.push(followed.unwrap_or_else(|| drafts[at - self.tokens.len()]));
            }
        }
        match_tokens
    }

    /// The place and the tokens of the longest match, both 0 where there is none.
    fn longest_match(&self) -> (usize, usize) {
        let end = self.tokens.len();
        let mut longest = (0, 0);
        let mut place = self.triples.before(end);
        for _ in 0..PLACES_MAX {
            if place == 0 || longest.1 == MATCH_TOKENS_MAX {
                break;
            }
            let match_tokens = self.common_suffix(place);
            if match_tokens > longest.1 {
                longest = (place, match_tokens);
            }
            place = self.triples.before(place);
        }
        match (longest.1, self.pairs.before(end)) {
            (0, pair) if pair > 0 => (pair, MATCH_TOKENS_MIN),
            _ => longest,
        }
    }

    /// Tokens that are the same before `place` and before the end, at most [`MATCH_TOKENS_MAX`].
    fn common_suffix(&self, place: usize) -> usize {
        let pairs = self.tokens[..place].iter().rev().zip(self.tokens.iter().rev()).take(MATCH_TOKENS_MAX);
        pairs.take_while(|(there, here)| there == here).count()
    }
}

fn common_prefix(one: &[TokenId], other: &[TokenId]) -> usize {
    let shorter = one.len().min(other.len());
    // Whole slices compare many times as fast as single tokens, and nearly always they are the same.
    if one[..shorter] == other[..shorter] {
        return shorter;
    }
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn proposed(tokens: &[TokenId], most: usize) -> (usize, Vec<TokenId>) {
        let mut lookup = Lookup::new();
        lookup.sync(tokens, &[]);
        let mut drafts = Vec::new();
        let match_tokens = lookup.propose(most, &mut drafts);
        (match_tokens, drafts)
    }

    /// The same by comparing with every place.
    fn sought(tokens: &[TokenId], most: usize) -> (usize, Vec<TokenId>) {
        let mut longest = (0, 0);
        for place in 1..tokens.len() {
            let same = |tokens_back: &usize| tokens[place - tokens_back] == tokens[tokens.len() - tokens_back];
            let match_tokens = (1..=place).take_while(same).count().min(MATCH_TOKENS_MAX);
            if match_tokens >= longest.1.max(MATCH_TOKENS_MIN) {
                longest = (place, match_tokens);
            }
        }
        let mut text = tokens.to_vec();
        let following = longest.0..longest.0 + if longest.1 > 0 { most } else { 0 };
        let drafts = following.map(|at| {
            text.push(text[at]);
            text[at]
        });
        (longest.1, drafts.collect())
    }

    #[test]
    fn the_longest_match_wins_and_the_latest_of_equals() {
        let tokens = [1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3, 71, 5, 1, 2, 3];
        assert_eq!(proposed(&tokens, 2), (3, vec![71, 5]));
        assert_eq!(proposed(&[4, 1, 2, 3, 70, 1, 2, 3, 80, 4, 1, 2, 3], 1), (4, vec![70]));
        assert_eq!(proposed(&[2, 3, 70, 2, 3, 80, 9, 2, 3], 3), (2, vec![80, 9, 2]));
    }

    #[test]
    fn a_single_token_is_no_match() {
        assert_eq!(proposed(&[3, 1, 3], 4), (0, vec![]));
        assert_eq!(proposed(&[], 4), (0, vec![]));
        assert_eq!(proposed(&[3, 1, 3, 1], 0), (2, vec![]));
    }

    #[test]
    fn text_that_repeats_itself_goes_round() {
        assert_eq!(proposed(&[7, 7, 7], 4), (2, vec![7, 7, 7, 7]));
        assert_eq!(proposed(&[1, 2, 3, 1, 2, 3, 1], 7).1, [2, 3, 1, 2, 3, 1, 2]);
    }

    #[test]
    fn tokens_that_are_chosen_but_not_in_the_sequence_count() {
        let mut lookup = Lookup::new();
        let mut drafts = Vec::new();
        lookup.sync(&[5, 6, 7, 8], &[5, 6]);
        assert_eq!((lookup.propose(2, &mut drafts), &drafts[..]), (2, &[7, 8][..]));
        lookup.sync(&[5, 6, 7, 8, 5], &[6]);
        assert_eq!((lookup.propose(1, &mut drafts), &drafts[..]), (2, &[7][..]));
        lookup.sync(&[5, 6, 7, 8, 5], &[9]);
        assert_eq!(lookup.propose(1, &mut drafts), 0);
    }

    #[test]
    fn a_long_context_of_one_token_is_searched_in_bounded_steps() {
        let mut lookup = Lookup::new();
        let mut tokens = vec![1; 131_072];
        // Every place of the triple matches but for the token before, so that none of them ends the search.
        tokens.extend([2, 1, 1, 1]);
        lookup.sync(&tokens, &[]);
        let mut drafts = Vec::new();
        assert_eq!((lookup.propose(1, &mut drafts), &drafts[..]), (3, &[2][..]));
    }

    proptest! {
        #[test]
        fn a_search_finds_what_comparing_every_place_finds(
            tokens in prop_oneof![
                prop::collection::vec(0u32..3, 0..200),
                prop::collection::vec(0u32..20, 0..200),
                (prop::collection::vec(0u32..9, 1..90), 1usize..5).prop_map(|(part, times)| part.repeat(times)),
            ],
            most in 0usize..8,
        ) {
            prop_assert_eq!(proposed(&tokens, most), sought(&tokens, most));
        }

        #[test]
        fn an_index_kept_up_is_that_of_the_tokens_alone(
            steps in prop::collection::vec((0usize..30, prop::collection::vec(0u32..4, 0..8), 0usize..3), 1..30),
        ) {
            let mut lookup = Lookup::new();
            let mut tokens: Vec<TokenId> = Vec::new();
            for (cut, new, chosen) in steps {
                tokens.truncate(tokens.len().saturating_sub(cut));
                tokens.extend(new);
                let (sequence, chosen) = tokens.split_at(tokens.len().saturating_sub(chosen));
                lookup.sync(sequence, chosen);
                let mut drafts = Vec::new();
                let match_tokens = lookup.propose(7, &mut drafts);
                prop_assert_eq!((match_tokens, drafts), sought(&tokens, 7));
                // Nothing is left of what was cut.
                let mut fresh = Lookup::new();
                fresh.sync(&tokens, &[]);
                prop_assert_eq!(&lookup.pairs.latest, &fresh.pairs.latest);
                prop_assert_eq!(&lookup.triples.before, &fresh.triples.before);
            }
        }
    }
}
