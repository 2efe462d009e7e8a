//! Cuts text into words; merges never cross a word's border.
//!
//! The published patterns end in `\s+(?!\S)|\s+`. A look-ahead would hand the whole pattern to a backtracking engine, which gives up on
//! long runs of spaces; so the pattern here ends in `\s+` and the look-ahead is done by hand on its matches. What remains runs in time
//! linear in the text.

use super::TokenizerError;
use fancy_regex::Regex;

#[derive(Debug)]
pub(super) struct Splitter {
    pattern: Regex,
}

/// Upper and lower case are spelled out: a case-insensitive match would also take the long s (U+017F).
const CONTRACTIONS: &str = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]";

/// Characters assigned later than the reference's tables are to it unassigned, so symbols; a newer table here would cut them otherwise.
const UNICODE_VERSION: &str = "15.1";

impl Splitter {
    pub(super) fn new(pre: &str) -> Result<Self, TokenizerError> {
        let marks = match pre {
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" => "",
            "qwen35" => r"\p{M}",
            _ => return Err(TokenizerError::UnknownPre { found: pre.to_owned() }),
        };
        let of_age = |classes: &str| format!(r"[[{classes}]&&\p{{Age={UNICODE_VERSION}}}]");
        let (letter, number) = (of_age(r"\p{L}"), of_age(r"\p{N}"));
        let (word, any_word) = (of_age(&format!(r"\p{{L}}{marks}")), of_age(&format!(r"\p{{L}}\p{{N}}{marks}")));
        let pattern = format!(r"(?:{CONTRACTIONS})|[^\r\n{letter}{number}]?{word}+|{number}| ?[^\s{any_word}]+[\r\n]*|\s*[\r\n]+|\s+");
        Ok(Self { pattern: Regex::new(&pattern).map_err(Box::new)? })
    }

    /// Hands over the words of `text` in order; together they are the text. A byte that is no UTF-8 counts as a symbol.
    pub(super) fn split<'t>(&self, text: &'t [u8], mut word: impl FnMut(&'t [u8])) -> Result<(), TokenizerError> {
        if let Ok(valid) = std::str::from_utf8(text) {
            return self.split_str(valid, |start, end| word(&text[start..end]));
        }
        let (readable, invalid) = readable_copy(text);
        // Each invalid byte is three bytes long in the copy.
        let mut passed = 0;
        let mut original = |position: usize| {
            passed += invalid[passed..].iter().take_while(|&&at| at < position).count();
            position - 2 * passed
        };
        self.split_str(&readable, |start, end| {
            let start = original(start);
            word(&text[start..original(end)]);
        })
    }

    fn split_str(&self, text: &str, mut word: impl FnMut(usize, usize)) -> Result<(), TokenizerError> {
        let mut position = 0;
        while position < text.len() {
            // Every character is matched by some part; the rest is a last word if the engine should disagree.
            let end = self.pattern.find_from_pos(text, position).map_err(Box::new)?.map_or(text.len(), |found| found.end());
            let end = give_back_last_space(text, position, end);
            word(position, end);
            position = end;
        }
        Ok(())
    }
}

/// `\s+(?!\S)`: a run of spaces before a word leaves its last one to the word. Only a match of the last part ends in a space that is no
/// line break.
fn give_back_last_space(text: &str, start: usize, end: usize) -> usize {
    match text[start..end].chars().next_back() {
        Some(last) if last.is_whitespace() && last != '\r' && last != '\n' && end < text.len() => {
            let before = end - last.len_utf8();
            if before > start { before } else { end }
        }
        _ => end,
    }
}

/// The text with U+FFFD for each invalid byte, and where in the copy those are.
fn readable_copy(text: &[u8]) -> (String, Vec<usize>) {
    let mut copy = String::with_capacity(text.len() + 16);
    let mut invalid = Vec::new();
    for chunk in text.utf8_chunks() {
        copy.push_str(chunk.valid());
        for _ in chunk.invalid() {
            invalid.push(copy.len());
            copy.push(char::REPLACEMENT_CHARACTER);
        }
    }
    (copy, invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(pre: &str, text: &'t str) -> Vec<&'t str> {
        let mut found = Vec::new();
        let splitter = Splitter::new(pre).expect("the name is supported");
        splitter.split(text.as_bytes(), |word| found.push(std::str::from_utf8(word).expect("cut between characters"))).expect("it splits");
        found
    }

    #[test]
    fn a_run_of_spaces_leaves_its_last_one_to_the_word() {
        assert_eq!(words("qwen2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("qwen2", "a   "), ["a", "   "]);
        assert_eq!(words("qwen2", "1 2\t\t3"), ["1", " ", "2", "\t", "\t", "3"]);
        assert_eq!(words("qwen2", "a\u{a0}\u{3000}7"), ["a", "\u{a0}", "\u{3000}", "7"]);
    }

    #[test]
    fn line_breaks_take_the_spaces_before_them() {
        assert_eq!(words("qwen2", "a \r\n \n  b"), ["a", " \r\n \n", " ", " b"]);
        assert_eq!(words("qwen2", "x!\n\n y"), ["x", "!\n\n", " y"]);
    }

    #[test]
    fn contractions_are_cut_in_both_cases_but_not_at_the_long_s() {
        assert_eq!(words("qwen2", "I'll DON'T it'ſ"), ["I", "'ll", " DON", "'T", " it", "'ſ"]);
        assert_eq!(words("qwen2", "'san"), ["'s", "an"]);
    }

    #[test]
    fn marks_belong_to_words_in_qwen35_only() {
        assert_eq!(words("qwen2", "e\u{301}a"), ["e", "\u{301}a"]);
        assert_eq!(words("qwen35", "e\u{301}a"), ["e\u{301}a"]);
        assert_eq!(words("qwen35", "\u{301} \u{301}"), ["\u{301}", " \u{301}"]);
    }

    #[test]
    fn invalid_bytes_are_kept_and_count_as_symbols() {
        let text = b"a\xff\xfe b\xe2\x82 \xf0";
        let mut found: Vec<&[u8]> = Vec::new();
        Splitter::new("qwen2").expect("supported").split(text, |word| found.push(word)).expect("it splits");
        assert_eq!(found, [b"a".as_slice(), b"\xff\xfe", b" b", b"\xe2\x82", b" \xf0"]);
    }

    #[test]
    fn a_megabyte_of_spaces_is_two_words() {
        let text = " ".repeat(1 << 20) + "x";
        assert_eq!(words("qwen35", &text).iter().map(|word| word.len()).collect::<Vec<_>>(), [(1 << 20) - 1, 2]);
    }
}
