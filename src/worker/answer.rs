//! Tokens to an answer: whole characters, taken apart by [`crate::reply`], each piece with the tokens that it is made of.

use super::protocol::{Delta, WrittenToken};
use crate::engine::sampler::Logprobs;
use crate::reply::{Reply, ReplyOptions};
use crate::tokenizer::{ControlText, Tokenizer, Utf8Stream};
use crate::units::TokenId;

/// What may be handed out.
#[derive(Debug, Default, PartialEq)]
pub struct Piece {
    /// Text.
    pub deltas: Vec<Delta>,
    /// The tokens behind it since the last piece, those without text among them.
    pub tokens: Vec<WrittenToken>,
}

/// Tags that a reply is taken apart at; in some vocabularies they are control tokens, of which all others leave no trace.
const TAGS: [&[u8]; 4] = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"];

/// One answer while it is written.
pub struct AnswerText<'a> {
    tokenizer: &'a Tokenizer,
    /// `None` once the answer has ended.
    characters: Option<Utf8Stream>,
    reply: Reply,
    /// Tokens not handed out yet, each with where its text begins in `waiting_text`.
    waiting: Vec<(usize, WrittenToken)>,
    waiting_text: String,
}

impl<'a> AnswerText<'a> {
    /// Before the first token.
    pub fn new(tokenizer: &'a Tokenizer, options: ReplyOptions) -> Self {
        Self {
            tokenizer,
            characters: Some(Utf8Stream::default()),
            reply: Reply::new(options),
            waiting: Vec::new(),
            waiting_text: String::new(),
        }
    }

    /// What was written, as far as it is known.
    pub fn reply(&self) -> &Reply {
        &self.reply
    }

    /// Takes a token.
    pub fn push(&mut self, token: TokenId, logprobs: Option<Logprobs>) -> Piece {
        let Some(characters) = &mut self.characters else { return Piece::default() };
        let shown = self.tokenizer.token_bytes(token, ControlText::Show);
        let bytes = if TAGS.contains(&shown) { shown } else { self.tokenizer.token_bytes(token, ControlText::Hide) };
        let text = characters.push(bytes);
        self.waiting.push((self.waiting_text.len(), WrittenToken { id: token, logprobs }));
        self.waiting_text.push_str(&text);
        let deltas = self.reply.push(&text);
        self.piece(deltas, false)
    }

    /// The end of the answer: what was held back comes out, unless a stop text was met.
    pub fn finish(&mut self) -> Piece {
        let Some(characters) = self.characters.take() else { return Piece::default() };
        let rest = characters.finish();
        self.waiting_text.push_str(&rest);
        let mut deltas = if rest.is_empty() { Vec::new() } else { self.reply.push(&rest) };
        deltas.extend(self.reply.finish());
        self.piece(deltas, true)
    }

    fn piece(&mut self, deltas: Vec<Delta>, is_last: bool) -> Piece {
        if let Some(stop) = self.reply.stopped() {
            // Tokens that begin behind the cut are none of the answer's.
            let cut = self.waiting_text.rfind(stop).unwrap_or(0);
            self.waiting.retain(|&(begin, _)| begin < cut);
        } else if deltas.is_empty() && !is_last {
            return Piece::default();
        }
        self.waiting_text.clear();
        Piece { deltas, tokens: self.waiting.drain(..).map(|(_, token)| token).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::StopStrings;
    use crate::tokenizer::Specials;

    fn tokenizer() -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
        crate::model::Model::open(path).and_then(|model| model.tokenizer()).expect("the bundled model")
    }

    /// Text and tokens of an answer that consists of `text`, with stop texts, and whether it was stopped.
    fn answered(tokenizer: &Tokenizer, text: &str, stops: &[&str]) -> (String, Vec<TokenId>, Option<String>) {
        let stops = StopStrings::new(stops.iter().map(|stop| (*stop).to_owned()).collect()).expect("good ones");
        let mut answer = AnswerText::new(tokenizer, ReplyOptions { stops, ..ReplyOptions::default() });
        let (mut content, mut ids) = (String::new(), Vec::new());
        let mut take = |piece: Piece| {
            ids.extend(piece.tokens.into_iter().map(|token| token.id));
            for delta in piece.deltas {
                let Delta::Content(text) = delta else { panic!("{delta:?}") };
                content.push_str(&text);
            }
        };
        for token in tokenizer.encode(text.as_bytes(), Specials::AsText).expect("a text") {
            take(answer.push(token, None));
            if answer.reply().stopped().is_some() {
                break;
            }
        }
        take(answer.finish());
        let stopped = answer.reply().stopped().map(str::to_owned);
        (content, ids, stopped)
    }

    #[test]
    fn every_token_is_handed_out_once_with_its_text() {
        let tokenizer = tokenizer();
        let text = "In the beginning \u{1f638} was é, and a word: \u{6b6a}.";
        let (content, ids, stopped) = answered(&tokenizer, text, &["never"]);
        assert_eq!((content.as_str(), stopped), (text, None));
        assert_eq!(ids, tokenizer.encode(text.as_bytes(), Specials::AsText).expect("a text"));
    }

    #[test]
    fn a_stop_text_over_several_tokens_cuts_text_and_tokens() {
        let tokenizer = tokenizer();
        let (content, ids, stopped) = answered(&tokenizer, "count K L M N O P Q R S", &["O P Q"]);
        assert_eq!((content.as_str(), stopped.as_deref()), ("count K L M N ", Some("O P Q")));
        let all = tokenizer.encode(b"count K L M N O P Q R S", Specials::AsText).expect("a text");
        assert!(all.starts_with(&ids) && ids.len() < all.len(), "{ids:?} of {all:?}");
        let told = tokenizer.decode_lossy(&ids, ControlText::Show);
        assert!(told.trim_end() == "count K L M N" || told == "count K L M N O", "{told:?}");
    }

    #[test]
    fn control_tokens_leave_no_trace_but_for_the_tags() {
        let tokenizer = tokenizer();
        let mut answer = AnswerText::new(&tokenizer, ReplyOptions::default());
        let mut content = String::new();
        for token in tokenizer.encode(b"a<|im_start|>b<think>c", Specials::Parse).expect("a text") {
            let piece = answer.push(token, None);
            assert_eq!(piece.deltas.iter().filter(|delta| !matches!(delta, Delta::Content(_))).count(), 0);
            content.extend(piece.deltas.into_iter().filter_map(|delta| if let Delta::Content(text) = delta { Some(text) } else { None }));
        }
        assert_eq!(content, "ab<think>c", "where no thought is expected, its tag is text");
    }
}
