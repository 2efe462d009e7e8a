//! Stop strings in streamed text.
//!
//! The string that is complete first ends the text, the longer one where two are complete at once: nothing behind it has to be written to
//! know. Held back is only what may still become a stop string.

/// Most stop strings of a request.
pub const STOPS_MAX: usize = 16;
/// Longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;

/// Why stop strings are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// It would end everything at once.
    #[error("stop string {index} is empty: leave it out")]
    Empty {
        /// Place in the list.
        index: usize,
    },
    /// Longer than anybody needs.
    #[error("stop string {index} has {bytes} bytes, at most {STOP_BYTES_MAX} are looked for")]
    TooLong {
        /// Place in the list.
        index: usize,
        /// Its length.
        bytes: usize,
    },
    /// More than anybody needs.
    #[error("{count} stop strings, at most {STOPS_MAX} are looked for")]
    TooMany {
        /// How many.
        count: usize,
    },
}

/// One string, and how much of it the text ends with.
#[derive(Clone, Debug)]
struct Stop {
    text: String,
    /// For each length but the whole: the longest shorter beginning that this beginning ends with.
    falls_back: Vec<usize>,
    /// Bytes of it that the text ends with.
    seen: usize,
}

impl Stop {
    fn new(text: String) -> Self {
        let bytes = text.as_bytes();
        let mut falls_back = vec![0; bytes.len()];
        let mut length = 0;
        for end in 1..bytes.len() {
            while length > 0 && bytes[end] != bytes[length] {
                length = falls_back[length - 1];
            }
            length += usize::from(bytes[end] == bytes[length]);
            falls_back[end] = length;
        }
        Self { text, falls_back, seen: 0 }
    }

    /// Takes a byte; true where the string is complete.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        while self.seen > 0 && bytes[self.seen] != byte {
            self.seen = self.falls_back[self.seen - 1];
        }
        self.seen += usize::from(bytes[self.seen] == byte);
        if self.seen < bytes.len() {
            return false;
        }
        self.seen = 0;
        true
    }
}

/// Looks for some strings in a text that comes in pieces.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<Stop>,
    held: String,
    matched: Option<usize>,
}

impl StopStrings {
    /// The strings to look for; none is fine.
    ///
    /// # Errors
    /// [`StopError`] for an empty or very long one, or too many.
    pub fn new(texts: Vec<String>) -> Result<Self, StopError> {
        if texts.len() > STOPS_MAX {
            return Err(StopError::TooMany { count: texts.len() });
        }
        for (index, text) in texts.iter().enumerate() {
            match text.len() {
                0 => return Err(StopError::Empty { index }),
                bytes if bytes > STOP_BYTES_MAX => return Err(StopError::TooLong { index, bytes }),
                _ => {}
            }
        }
        Ok(Self { stops: texts.into_iter().map(Stop::new).collect(), held: String::new(), matched: None })
    }

    /// Takes a piece and gives the text that is certain; empty for all pieces after a match.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        if self.stops.is_empty() {
            return text.to_owned();
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (offset, &byte) in self.held.as_bytes()[before..].iter().enumerate() {
            let complete = |(index, stop): (usize, &mut Stop)| stop.step(byte).then_some((stop.text.len(), index));
            // All of them take the byte, whichever is complete.
            if let Some((bytes, index)) = self.stops.iter_mut().enumerate().filter_map(complete).max_by_key(|&(bytes, _)| bytes) {
                let start = before + offset + 1 - bytes;
                self.matched = Some(index);
                let mut certain = std::mem::take(&mut self.held);
                certain.truncate(start);
                return certain;
            }
        }
        // Pieces are whole characters and so are the strings, so what was seen of a string begins with a character.
        let kept = self.stops.iter().map(|stop| stop.seen).max().unwrap_or(0);
        self.held.drain(..self.held.len() - kept).collect()
    }

    /// The text goes no further here: what was held back, which no stop string will use any more.
    pub fn release(&mut self) -> String {
        for stop in &mut self.stops {
            stop.seen = 0;
        }
        std::mem::take(&mut self.held)
    }

    /// The string that was met.
    #[must_use]
    pub fn matched(&self) -> Option<&str> {
        self.matched.map(|index| self.stops[index].text.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stops(texts: &[&str]) -> StopStrings {
        StopStrings::new(texts.iter().map(|&text| text.to_owned()).collect()).expect("sound stop strings")
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_cut_exactly_before_it() {
        let mut stops = stops(&["O P Q"]);
        let pieces = ["M N", " O", " ", "P", " Q R", " S"].map(|piece| stops.push(piece));
        assert_eq!(pieces.concat(), "M N ");
        assert_eq!(stops.matched(), Some("O P Q"));
        assert_eq!(stops.release(), "");
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut stops = stops(&["\n\nUser:", "END"]);
        assert_eq!(stops.push("one\n"), "one");
        assert_eq!(stops.push("two E"), "\ntwo ");
        assert_eq!(stops.push("EN"), "E");
        assert_eq!(stops.release(), "EN");
        assert_eq!(stops.push("D"), "D", "what was released is over");
    }

    #[test]
    fn the_first_to_be_complete_ends_the_text_and_the_longer_of_two() {
        for (texts, expected) in [(["abcd", "bc"], ("a", "bc")), (["c", "abc"], ("", "abc"))] {
            let mut stops = stops(&texts);
            assert_eq!((stops.push("abcd").as_str(), stops.matched()), (expected.0, Some(expected.1)));
        }
    }

    #[test]
    fn useless_stop_strings_are_refused_with_their_place() {
        assert_eq!(StopStrings::new(vec!["a".to_owned(), String::new()]).unwrap_err(), StopError::Empty { index: 1 });
        assert_eq!(StopStrings::new(vec!["a".to_owned(); 17]).unwrap_err(), StopError::TooMany { count: 17 });
        assert_eq!(StopStrings::new(vec!["ä".repeat(513)]).unwrap_err(), StopError::TooLong { index: 0, bytes: 1026 });
    }

    /// What the rule says, from the whole text.
    fn expected<'t>(text: &'t str, texts: &[String]) -> (&'t str, Option<String>) {
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        let found = ends.filter_map(|end| {
            let longest = texts.iter().filter(|stop| text[..end].ends_with(*stop)).max_by_key(|stop| stop.len())?;
            Some((&text[..end - longest.len()], Some(longest.clone())))
        });
        found.into_iter().next().unwrap_or((text, None))
    }

    proptest! {
        #[test]
        fn any_pieces_give_what_the_whole_text_gives(
            pieces in proptest::collection::vec("[abé]{0,4}", 0..12),
            texts in proptest::collection::btree_set("[abé]{1,5}", 1..4),
        ) {
            let texts: Vec<String> = texts.into_iter().collect();
            let mut stops = StopStrings::new(texts.clone()).expect("sound");
            let mut text: String = pieces.iter().map(|piece| stops.push(piece)).collect();
            text += &stops.release();
            let whole = pieces.concat();
            let (before, matched) = expected(&whole, &texts);
            prop_assert_eq!((text.as_str(), stops.matched()), (before, matched.as_deref()));
        }
    }
}
