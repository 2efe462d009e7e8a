//! Text from tokens as they come, whole characters only.
//!
//! A character's bytes may be spread over tokens; they are held until it is complete. All pieces joined are what decoding all bytes at
//! once gives, with U+FFFD where they are no UTF-8.

use super::{ControlText, Tokenizer};
use crate::units::TokenId;
use std::ops::Deref;

/// Bytes to text: holds back the start of a character until the rest comes.
#[derive(Clone, Debug, Default)]
pub struct Utf8Stream {
    /// At most the first three bytes of a character between calls.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Takes bytes, gives the text that is complete.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(std::str::from_utf8(valid).unwrap_or_default());
            rest = after;
            let Some(invalid_bytes) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[invalid_bytes..];
        }
        if let Ok(valid) = std::str::from_utf8(rest) {
            text.push_str(valid);
            rest = &[];
        }
        let held_bytes = rest.len();
        self.held.drain(..self.held.len() - held_bytes);
        text
    }

    /// The end of the text: what is still held is no character.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

/// Tokens to text, one at a time. `T` is `&Tokenizer` or `Arc<Tokenizer>`.
#[derive(Clone, Debug)]
pub struct StreamDecoder<T> {
    tokenizer: T,
    control: ControlText,
    bytes: Utf8Stream,
}

impl<T: Deref<Target = Tokenizer>> StreamDecoder<T> {
    /// Before the first token.
    pub fn new(tokenizer: T, control: ControlText) -> Self {
        Self { tokenizer, control, bytes: Utf8Stream::default() }
    }

    /// Takes a token, gives the text that is complete; often empty.
    #[must_use]
    pub fn push(&mut self, token: TokenId) -> String {
        self.bytes.push(self.tokenizer.token_bytes(token, self.control))
    }

    /// The end of the answer: U+FFFD where it stops within a character, else nothing.
    #[must_use]
    pub fn finish(self) -> String {
        self.bytes.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_character_comes_out_whole_and_at_once() {
        let mut stream = Utf8Stream::default();
        let pieces: Vec<String> = "a😸é".bytes().map(|byte| stream.push(&[byte])).collect();
        assert_eq!(pieces, ["a", "", "", "", "😸", "", "é"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn an_unfinished_character_becomes_one_replacement_mark() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"x\xf0\x9f\x98"), "x");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    /// Bytes that are often nearly UTF-8: characters of all lengths, some cut, some replaced by noise.
    fn nearly_text() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            any::<char>().prop_map(|character| character.to_string().into_bytes()),
            (any::<char>(), 1..4_usize).prop_map(|(character, count)| character.to_string().bytes().take(count).collect()),
            proptest::collection::vec(any::<u8>(), 0..3),
        ];
        proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn any_splits_give_the_text_of_all_bytes(bytes in nearly_text(), sizes in proptest::collection::vec(0..6_usize, 1..12)) {
            let mut stream = Utf8Stream::default();
            let mut text = String::new();
            let mut rest = bytes.as_slice();
            for size in sizes.into_iter().cycle() {
                let (now, later) = rest.split_at(size.min(rest.len()));
                text += &stream.push(now);
                prop_assert!(stream.held.len() < 4);
                rest = later;
                if rest.len() < 3 {
                    text += &stream.push(rest);
                    break;
                }
                if size == 0 {
                    text += &stream.push(&rest[..1]);
                    rest = &rest[1..];
                }
            }
            text += &stream.finish();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
