//! The token list: texts, bytes and kinds by number, numbers by text.
//!
//! Invariants: no two tokens share a text; every byte has a token. How a text is cut into tokens is left to `special`, `split`, `bpe`.

use super::TokenizerError;
use crate::units::TokenId;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// What a token is, as far as encoding and decoding differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Made by merges; its text is written in stand-ins.
    Normal,
    /// Found in text only where asked for (types 2 and 3), hidden on request.
    Control,
    /// Always found in text; its text is literal.
    UserDefined,
    /// Without text.
    Silent,
}

impl Kind {
    fn from_type(token_type: i32) -> Self {
        match token_type {
            1 => Self::Normal,
            2 | 3 => Self::Control,
            4 => Self::UserDefined,
            _ => Self::Silent,
        }
    }
}

/// Control tokens by their text, whatever type the file gives: converters marked some of them user-defined, and then a user could
/// write them. llama.cpp overrides these too.
const CONTROL_TEXTS: &[&str] = &[
    "<|im_end|>",
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

#[derive(Debug)]
pub(super) struct Vocabulary {
    ids: HashMap<String, TokenId>,
    kinds: Vec<Kind>,
    /// The bytes of all tokens, one after the other.
    bytes: Vec<u8>,
    /// `[n_tokens + 1]`: where each token's bytes start.
    starts: Vec<usize>,
    by_byte: [TokenId; 256],
}

impl Vocabulary {
    pub(super) fn new(tokens: &[String], types: &[i32]) -> Result<Self, TokenizerError> {
        let count = u32::try_from(tokens.len()).map_err(|_| TokenizerError::TooManyTokens { tokens: tokens.len() })?;
        if count == 0 {
            return Err(TokenizerError::NoTokens);
        }
        if types.len() < tokens.len() {
            return Err(TokenizerError::TypesShort { types: types.len(), tokens: tokens.len() });
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        // A token without text can never be meant by a text, so several of them are no contradiction.
        for (id, text) in (0..count).zip(tokens).filter(|(_, text)| !text.is_empty()) {
            match ids.entry(text.clone()) {
                Entry::Vacant(place) => _ = place.insert(id),
                Entry::Occupied(other) => {
                    return Err(TokenizerError::DuplicateToken { text: text.clone(), first: *other.get(), second: id });
                }
            }
        }
        let mut kinds: Vec<Kind> = types[..tokens.len()].iter().map(|&token_type| Kind::from_type(token_type)).collect();
        for id in CONTROL_TEXTS.iter().filter_map(|&text| ids.get(text)) {
            kinds[*id as usize] = Kind::Control;
        }
        let (bytes, starts) = all_bytes(tokens, &kinds);
        let by_byte = byte_tokens(&ids)?;
        Ok(Self { ids, kinds, bytes, starts, by_byte })
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn id_of(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    pub(super) fn kind(&self, token: TokenId) -> Option<Kind> {
        self.kinds.get(token as usize).copied()
    }

    /// The token of a single byte.
    pub(super) fn of_byte(&self, byte: u8) -> TokenId {
        self.by_byte[usize::from(byte)]
    }

    /// The bytes of a token below [`Vocabulary::len`].
    pub(super) fn bytes(&self, token: TokenId) -> &[u8] {
        let index = token as usize;
        &self.bytes[self.starts[index]..self.starts[index + 1]]
    }
}

/// The character that stands for a byte: the byte itself where that is printable in Latin-1, else the next unused one from U+0100.
fn stand_ins() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|value| {
        let printable = matches!(value, 33..=126 | 161..=172 | 174..=255);
        let code = if printable {
            value
        } else {
            next += 1;
            next - 1
        };
        u32::try_from(code).ok().and_then(char::from_u32).expect("code points below U+0200 are characters")
    })
}

fn all_bytes(tokens: &[String], kinds: &[Kind]) -> (Vec<u8>, Vec<usize>) {
    let byte_of: HashMap<char, u8> = stand_ins().into_iter().zip(0..=u8::MAX).collect();
    let mut bytes = Vec::with_capacity(tokens.iter().map(String::len).sum());
    let mut starts = vec![0];
    for (text, kind) in tokens.iter().zip(kinds) {
        match kind {
            Kind::Silent => {}
            Kind::Control | Kind::UserDefined => bytes.extend_from_slice(text.as_bytes()),
            Kind::Normal => {
                for character in text.chars() {
                    match byte_of.get(&character) {
                        Some(&byte) => bytes.push(byte),
                        // No stand-in: some vocabularies hold literal characters.
                        None => bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
            }
        }
        starts.push(bytes.len());
    }
    (bytes, starts)
}

fn byte_tokens(ids: &HashMap<String, TokenId>) -> Result<[TokenId; 256], TokenizerError> {
    let mut table = [0; 256];
    for ((byte, character), place) in (0..=u8::MAX).zip(stand_ins()).zip(&mut table) {
        *place = *ids.get(character.encode_utf8(&mut [0; 4]) as &str).ok_or(TokenizerError::ByteMissing { byte })?;
    }
    Ok(table)
}
