//! The tiny byte-level BPE vocabulary of synthetic models: 256 bytes, merges that spell some words, seven special tokens.

use std::collections::HashSet;

const SPECIAL: [&str; 7] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"];
const WORDS: &str = "the of and to in is that for it with as was on be by this are at from or an have not you he \
     system user assistant model prompt token expert cache layer memory head text read answer \
     hello world one two three four";

/// The chat template written into synthetic models.
pub const CHAT_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A vocabulary as the file lists it.
pub struct TinyTokenizer {
    /// Token texts in order of their numbers, bytes written as their printable stand-ins.
    pub tokens: Vec<String>,
    /// GGUF token types: 1 normal, 3 control, 4 user-defined.
    pub types: Vec<i32>,
    /// Merges in order of rank, the two halves split by a blank.
    pub merges: Vec<String>,
    /// Number of `<|endoftext|>`.
    pub end_of_text: u32,
    /// Number of `<|im_end|>`.
    pub end_of_turn: u32,
}

impl TinyTokenizer {
    /// The vocabulary of at most `n_vocab` tokens; never less than the bytes and the special tokens.
    pub fn new(n_vocab: usize) -> Self {
        let stand_ins = byte_stand_ins();
        let printable = |byte: &u8| is_printable(*byte);
        let mut tokens: Vec<String> = (0..=255).filter(printable).map(|byte| stand_ins[usize::from(byte)].to_string()).collect();
        tokens.extend((0..=255).filter(|byte| !is_printable(*byte)).map(|byte| stand_ins[usize::from(byte)].to_string()));
        let merge_room = n_vocab.saturating_sub(tokens.len() + SPECIAL.len());
        let merges = push_words(&mut tokens, &stand_ins, merge_room);
        let mut types = vec![1; tokens.len()];
        let first_special = u32::try_from(tokens.len()).expect("a tiny vocabulary");
        for text in SPECIAL {
            tokens.push(text.to_owned());
            types.push(if text.starts_with("<|") { 3 } else { 4 });
        }
        Self { tokens, types, merges, end_of_text: first_special, end_of_turn: first_special + 2 }
    }
}

/// Adds the merges that spell [`WORDS`], first with a leading blank, then without.
fn push_words(tokens: &mut Vec<String>, stand_ins: &[char; 256], merge_room: usize) -> Vec<String> {
    let mut known: HashSet<String> = tokens.iter().cloned().collect();
    let mut merges = Vec::new();
    let with_blank = WORDS.split_whitespace().map(|word| format!(" {word}"));
    for word in with_blank.chain(WORDS.split_whitespace().map(str::to_owned)) {
        let mut left = String::new();
        for byte in word.bytes() {
            let character = stand_ins[usize::from(byte)];
            let joined = format!("{left}{character}");
            if !known.contains(&joined) {
                if merges.len() >= merge_room {
                    break;
                }
                merges.push(format!("{left} {character}"));
                known.insert(joined.clone());
                tokens.push(joined.clone());
            }
            left = joined;
        }
    }
    merges
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// The printable character that stands for each byte in a byte-level vocabulary.
fn byte_stand_ins() -> [char; 256] {
    let mut next_extra = 256;
    std::array::from_fn(|index| {
        let byte = u8::try_from(index).expect("256 bytes");
        if is_printable(byte) {
            return char::from(byte);
        }
        next_extra += 1;
        char::from_u32(next_extra - 1).expect("a character below 512")
    })
}
