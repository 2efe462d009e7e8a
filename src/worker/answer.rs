//! Tokens to the text of an answer: whole characters, cut before a stop text.

use super::protocol::{Delta, WrittenToken};
use crate::engine::sampler::Logprobs;
use crate::tokenizer::{ControlText, StreamDecoder, Tokenizer};
use crate::units::TokenId;

/// What may be handed out.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// Text.
    pub deltas: Vec<Delta>,
    /// The tokens that it is made of, and those without text.
    pub tokens: Vec<WrittenToken>,
}

/// One answer while it is written.
pub struct AnswerText<'a> {
    decoder: Option<StreamDecoder<&'a Tokenizer>>,
    stop_strings: Vec<String>,
    /// Text that may be the beginning of a stop text.
    held: String,
    /// Tokens not handed out yet, each with the length of `held` before it.
    waiting: Vec<(usize, WrittenToken)>,
    stopped: Option<usize>,
}

impl<'a> AnswerText<'a> {
    /// Before the first token. No stop text is empty.
    pub fn new(tokenizer: &'a Tokenizer, stop_strings: Vec<String>) -> Self {
        let decoder = Some(StreamDecoder::new(tokenizer, ControlText::Hide));
        Self { decoder, stop_strings, held: String::new(), waiting: Vec::new(), stopped: None }
    }

    /// The stop text that was met, by its number.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Takes a token.
    pub fn push(&mut self, token: TokenId, logprobs: Option<Logprobs>) -> Piece {
        let Some(decoder) = &mut self.decoder else { return Piece::default() };
        self.waiting.push((self.held.len(), WrittenToken { id: token, logprobs }));
        self.held.push_str(&decoder.push(token));
        self.release()
    }

    /// The end of the answer: what was held back comes out, unless a stop text was met.
    pub fn finish(&mut self) -> Piece {
        let Some(decoder) = self.decoder.take() else { return Piece::default() };
        if self.stopped.is_some() {
            return Piece::default();
        }
        self.held.push_str(&decoder.finish());
        let piece = self.release();
        if self.stopped.is_some() {
            return piece;
        }
        let Piece { mut deltas, mut tokens } = piece;
        let Piece { deltas: rest, tokens: rest_tokens } = self.hand_out(self.held.len());
        deltas.extend(rest);
        tokens.extend(rest_tokens);
        Piece { deltas, tokens }
    }

    fn release(&mut self) -> Piece {
        let met = self.stop_strings.iter().enumerate().filter_map(|(index, stop)| Some((self.held.find(stop.as_str())?, index))).min();
        if let Some((cut, index)) = met {
            self.stopped = Some(index);
            let piece = self.hand_out(cut);
            self.waiting.clear();
            return piece;
        }
        let kept = self.stop_strings.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        self.hand_out(self.held.len() - kept)
    }

    /// Hands out the first `bytes` of the held text, with the tokens that begin before its end.
    fn hand_out(&mut self, bytes: usize) -> Piece {
        let text: String = self.held.drain(..bytes).collect();
        let all = self.held.is_empty() && self.stopped.is_none();
        let n_tokens = if all { self.waiting.len() } else { self.waiting.partition_point(|&(begin, _)| begin < bytes) };
        let tokens = self.waiting.drain(..n_tokens).map(|(_, token)| token).collect();
        for (begin, _) in &mut self.waiting {
            *begin -= bytes;
        }
        let deltas = if text.is_empty() { Vec::new() } else { vec![Delta::Content(text)] };
        Piece { deltas, tokens }
    }
}

/// Length of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    (1..=longest).rev().find(|&bytes| stop.is_char_boundary(bytes) && text.as_bytes().ends_with(&stop.as_bytes()[..bytes])).unwrap_or(0)
}
