//! Text to token numbers and back, and chat templates.
//!
//! Owns the byte-level BPE vocabularies of the `qwen2` and `qwen35` families: [`Tokenizer`] encodes bytes and decodes tokens,
//! [`StreamDecoder`] turns tokens into text that never ends in half a character, [`ChatTemplate`] renders a conversation.
//!
//! Invariants: what [`Tokenizer::new`] accepts cannot fail later because of the file; ids are those of llama.cpp for valid UTF-8 (no
//! normalisation); decoding what was encoded gives the same bytes, valid UTF-8 or not; nothing is ever added to the text (no start
//! token), see [`Tokenizer::leading_bos`].
//!
//! Reading a model file is left to others: [`TokenizerSpec`] is plain data.

mod bpe;
pub mod chat;
mod spec;
mod special;
mod split;
mod stream;
mod vocabulary;

pub use chat::{ChatError, ChatTemplate, Json, Message, RenderOptions};
pub use spec::spec_from_metadata;
pub use special::unshield;
pub use stream::{StreamDecoder, Utf8Stream};

use crate::units::TokenId;
use bpe::{Merges, WordEncoder};
use special::{SpecialTokens, strip_marks};
use split::Splitter;
use vocabulary::{Kind, Vocabulary};

/// The values of `tokenizer.ggml.model` this module reads.
pub const SUPPORTED_MODELS: &[&str] = &["gpt2"];

/// The values of `tokenizer.ggml.pre` this module reads; those after the first two are other names of `qwen2`.
pub const SUPPORTED_PRE: &[&str] = &["qwen2", "qwen35", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"];

/// What a model file says about its tokenizer, as plain data.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct TokenizerSpec {
    /// `tokenizer.ggml.model`.
    pub model: String,
    /// `tokenizer.ggml.pre`; `None` where the file has none, which is refused: another splitting pattern would go unnoticed.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`: the text of each token, its bytes written as printable stand-ins.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; at least one for each token.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`: two tokens with one space between them, the strongest first.
    pub merges: Vec<String>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// Why a tokenizer cannot be made, or a text not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The kind of vocabulary is none of ours.
    #[error("tokenizer.ggml.model is \"{found}\", supported: {}", SUPPORTED_MODELS.join(", "))]
    UnknownModel {
        /// The value in the file.
        found: String,
    },
    /// The splitting pattern is none of ours; a wrong one would silently worsen answers.
    #[error("tokenizer.ggml.pre is \"{found}\", supported: {}", SUPPORTED_PRE.join(", "))]
    UnknownPre {
        /// The value in the file.
        found: String,
    },
    /// The file names no splitting pattern.
    #[error("tokenizer.ggml.pre is missing, supported: {}", SUPPORTED_PRE.join(", "))]
    PreMissing,
    /// No tokens at all.
    #[error("tokenizer.ggml.tokens is empty")]
    NoTokens,
    /// More tokens than a token number can count.
    #[error("tokenizer.ggml.tokens has {tokens} entries, at most {} can be numbered", u32::MAX)]
    TooManyTokens {
        /// Length of the list.
        tokens: usize,
    },
    /// Some tokens have no type.
    #[error("tokenizer.ggml.token_type has {types} entries for {tokens} tokens")]
    TypesShort {
        /// Length of `tokenizer.ggml.token_type`.
        types: usize,
        /// Length of `tokenizer.ggml.tokens`.
        tokens: usize,
    },
    /// Two tokens with one text: which of them the text means is not defined.
    #[error("tokenizer.ggml.tokens has \"{text}\" twice, as {first} and {second}")]
    DuplicateToken {
        /// The text.
        text: String,
        /// The lower number.
        first: TokenId,
        /// The higher number.
        second: TokenId,
    },
    /// A byte that no token stands for, so that some texts could not be encoded.
    #[error("tokenizer.ggml.tokens has no token for the byte {byte:#04x}")]
    ByteMissing {
        /// The byte.
        byte: u8,
    },
    /// A merge that is not two texts around one space.
    #[error("tokenizer.ggml.merges[{index}] is \"{merge}\": two tokens with one space between them are expected")]
    MalformedMerge {
        /// Position in `tokenizer.ggml.merges`.
        index: usize,
        /// The entry.
        merge: String,
    },
    /// A merge of, or into, something that is no token.
    #[error("tokenizer.ggml.merges[{index}] is \"{merge}\", but \"{part}\" is no token")]
    UnknownMergePart {
        /// Position in `tokenizer.ggml.merges`.
        index: usize,
        /// The entry.
        merge: String,
        /// The text that is missing from `tokenizer.ggml.tokens`.
        part: String,
    },
    /// A token number past the end of the list.
    #[error("{key} is {id}, but there are {tokens} tokens")]
    IdOutside {
        /// The key in the file.
        key: &'static str,
        /// Its value.
        id: u32,
        /// Length of `tokenizer.ggml.tokens`.
        tokens: usize,
    },
    /// The file asks for a start token and names none.
    #[error("tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing")]
    BosMissing,
    /// The pattern engine gave up.
    #[error("the splitting pattern failed: {0}")]
    Pattern(#[from] Box<fancy_regex::Error>),
}

/// What the texts of control tokens (`<|im_end|>` …) mean in a text to encode. User-defined tokens (`<think>` …) are always found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// They become the control tokens: for prompts that a template wrote.
    Parse,
    /// They are text like any other: for everything a user wrote.
    AsText,
}

/// What becomes of control tokens in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlText {
    /// They are written out, so that decoding is the inverse of encoding.
    Show,
    /// They leave no trace.
    Hide,
}

/// A vocabulary, ready to encode and decode. Cheap to share between threads behind an `Arc`.
#[derive(Debug)]
pub struct Tokenizer {
    vocabulary: Vocabulary,
    merges: Merges,
    splitter: Splitter,
    specials: SpecialTokens,
    named: NamedIds,
}

#[derive(Debug)]
struct NamedIds {
    bos: Option<TokenId>,
    eos: Option<TokenId>,
    pad: Option<TokenId>,
    add_bos: bool,
    ends: Vec<TokenId>,
}

/// Texts that end an answer wherever they are a token: a file that names only one of them as `eos` still stops at the others.
const END_TEXTS: &[&str] = &["<|im_end|>", "<|endoftext|>"];

impl NamedIds {
    fn new(spec: &TokenizerSpec, vocabulary: &Vocabulary) -> Result<Self, TokenizerError> {
        let tokens = spec.tokens.len();
        let ids = [
            ("tokenizer.ggml.bos_token_id", spec.bos),
            ("tokenizer.ggml.eos_token_id", spec.eos),
            ("tokenizer.ggml.eot_token_id", spec.eot),
            ("tokenizer.ggml.padding_token_id", spec.pad),
        ];
        for (key, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= tokens) {
                return Err(TokenizerError::IdOutside { key, id, tokens });
            }
        }
        let add_bos = spec.add_bos == Some(true);
        if add_bos && spec.bos.is_none() {
            return Err(TokenizerError::BosMissing);
        }
        let by_text = END_TEXTS.iter().filter_map(|text| vocabulary.id_of(text));
        let mut ends: Vec<TokenId> = [spec.eos, spec.eot].into_iter().flatten().chain(by_text).collect();
        ends.sort_unstable();
        ends.dedup();
        Ok(Self { bos: spec.bos, eos: spec.eos, pad: spec.pad, add_bos, ends })
    }
}

impl Tokenizer {
    /// Checks the data and builds the tables.
    ///
    /// # Errors
    /// Everything about the data that could make encoding wrong or undefined, see [`TokenizerError`].
    pub fn new(spec: &TokenizerSpec) -> Result<Self, TokenizerError> {
        if !SUPPORTED_MODELS.contains(&spec.model.as_str()) {
            return Err(TokenizerError::UnknownModel { found: spec.model.clone() });
        }
        let splitter = Splitter::new(spec.pre.as_deref().ok_or(TokenizerError::PreMissing)?)?;
        let vocabulary = Vocabulary::new(&spec.tokens, &spec.token_types)?;
        let merges = Merges::new(&spec.merges, &vocabulary)?;
        let named = NamedIds::new(spec, &vocabulary)?;
        let specials = SpecialTokens::new(&spec.tokens, &vocabulary);
        Ok(Self { vocabulary, merges, splitter, specials, named })
    }

    /// The tokens of a text; nothing is added before or after. Invalid UTF-8 is kept byte by byte.
    ///
    /// # Errors
    /// [`TokenizerError::Pattern`] where the pattern engine gives up; the patterns in use leave it no reason to.
    pub fn encode(&self, text: &[u8], specials: Specials) -> Result<Vec<TokenId>, TokenizerError> {
        let mut words = WordEncoder::new(&self.merges, &self.vocabulary, text.len());
        for part in self.specials.partition(text, specials) {
            match part {
                special::Part::Token(id) => words.push_token(id),
                special::Part::Text(range) => self.splitter.split(&text[range], |word| words.push_word(word))?,
            }
        }
        Ok(words.finish())
    }

    /// The tokens of a rendered chat: control tokens are found, except those in text that went through [`Tokenizer::shield`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<TokenId>, TokenizerError> {
        if !rendered.contains(special::MARK) {
            return self.encode(rendered.as_bytes(), Specials::Parse);
        }
        let mut tokens = Vec::new();
        for part in self.specials.partition(rendered.as_bytes(), Specials::Parse) {
            match part {
                special::Part::Token(id) => tokens.push(id),
                special::Part::Text(range) => {
                    let plain = strip_marks(&rendered.as_bytes()[range]);
                    let mut words = WordEncoder::new(&self.merges, &self.vocabulary, plain.len());
                    self.splitter.split(&plain, |word| words.push_word(word))?;
                    tokens.extend(words.finish());
                }
            }
        }
        Ok(tokens)
    }

    /// The text with a mark inside each text of a control token, so that [`Tokenizer::encode_chat`] reads it as plain text: what a
    /// user writes cannot end their turn. [`unshield`] takes the marks away.
    #[must_use]
    pub fn shield<'t>(&self, text: &'t str) -> std::borrow::Cow<'t, str> {
        self.specials.shield(text)
    }

    /// The bytes of one token; none for tokens without text (unused ones, and rows of the embedding past the token list).
    #[must_use]
    pub fn token_bytes(&self, token: TokenId, control: ControlText) -> &[u8] {
        match self.vocabulary.kind(token) {
            Some(Kind::Control) if control == ControlText::Hide => &[],
            Some(_) => self.vocabulary.bytes(token),
            None => &[],
        }
    }

    /// The bytes of some tokens.
    #[must_use]
    pub fn decode(&self, tokens: &[TokenId], control: ControlText) -> Vec<u8> {
        tokens.iter().flat_map(|&token| self.token_bytes(token, control)).copied().collect()
    }

    /// The text of some tokens, bytes that are no UTF-8 as U+FFFD.
    #[must_use]
    pub fn decode_lossy(&self, tokens: &[TokenId], control: ControlText) -> String {
        String::from_utf8_lossy(&self.decode(tokens, control)).into_owned()
    }

    /// Whether this token ends an answer.
    #[must_use]
    pub fn is_end(&self, token: TokenId) -> bool {
        self.named.ends.contains(&token)
    }

    /// The tokens that end an answer, ascending.
    #[must_use]
    pub fn end_tokens(&self) -> &[TokenId] {
        &self.named.ends
    }

    /// Length of the token list; the embedding may have more rows.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.vocabulary.len()
    }

    /// Whether a token stands for itself rather than for text it was cut from: control tokens and user-defined ones.
    #[must_use]
    pub fn is_special(&self, token: TokenId) -> bool {
        matches!(self.vocabulary.kind(token), Some(Kind::Control | Kind::UserDefined))
    }

    /// The number of the token with exactly this text, as the file writes it.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.vocabulary.id_of(text)
    }

    /// The start token that raw text needs (never a rendered chat: its template writes one where it belongs).
    #[must_use]
    pub fn leading_bos(&self) -> Option<TokenId> {
        self.named.bos.filter(|_| self.named.add_bos)
    }

    /// `tokenizer.ggml.bos_token_id`.
    #[must_use]
    pub fn bos(&self) -> Option<TokenId> {
        self.named.bos
    }

    /// `tokenizer.ggml.eos_token_id`.
    #[must_use]
    pub fn eos(&self) -> Option<TokenId> {
        self.named.eos
    }

    /// `tokenizer.ggml.padding_token_id`.
    #[must_use]
    pub fn pad(&self) -> Option<TokenId> {
        self.named.pad
    }
}

#[cfg(test)]
mod tests;
