//! Token numbers as a user gives them: `LIST` or `@FILE`.
//!
//! Owns the two written forms (numbers split by commas or white space; a file in `.u16` of little-endian 16-bit numbers) and the
//! bounds on how much is read. Whether a number lies within a vocabulary is for the one who knows the model.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::exit::{Classified, ExitStatus};
use crate::settings::TokenSource;
use crate::units::TokenId;

/// Most tokens taken from one source.
pub const TOKENS_MAX: usize = 1 << 24;
/// Most bytes read of a text file of tokens: each number has at most ten digits, and something to part it from the next.
const TEXT_BYTES_MAX: u64 = 11 * TOKENS_MAX as u64;
/// Most bytes read of a `.u16` file.
const BINARY_BYTES_MAX: u64 = 2 * TOKENS_MAX as u64;

/// Why token numbers could not be had. `origin` is the file, or what stands for it in a message.
#[derive(Debug, Error)]
pub enum TokensError {
    /// The file could not be read.
    #[error("{}: cannot read token numbers", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Something in between is not a token number.
    #[error("{origin}: entry {position} is `{value}`, not a token number (0 to {}, split by commas or white space)", TokenId::MAX)]
    NotANumber {
        /// File or flag.
        origin: String,
        /// Counted from 1.
        position: usize,
        /// What stands there, cut to 32 characters.
        value: String,
    },
    /// A list that would be a file if it had its sign.
    #[error("`{value}` is not a list of token numbers; to read them from a file write @{value}")]
    MissingSign {
        /// What was written.
        value: String,
    },
    /// A file of 16-bit numbers ends within one.
    #[error("{}: {bytes} bytes are not a whole count of 16-bit numbers", .path.display())]
    HalfNumber {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },
    /// There is more than is taken.
    #[error("{origin}: more than {TOKENS_MAX} tokens")]
    TooMany {
        /// File or flag.
        origin: String,
    },
    /// There is nothing.
    #[error("{origin}: no token numbers")]
    Empty {
        /// File or flag.
        origin: String,
    },
}

impl Classified for TokensError {
    fn exit_status(&self) -> ExitStatus {
        ExitStatus::Input
    }
}

/// Reads a flag's value, without opening the file it may name. A bare name in `.u16` is a file too, since no list ends so.
///
/// # Errors
/// Where a list holds anything but token numbers, or none.
pub fn parse_source(text: &str) -> Result<TokenSource, TokensError> {
    if let Some(name) = text.strip_prefix('@') {
        return if name.is_empty() {
            Err(TokensError::NotANumber { origin: "the list".to_owned(), position: 1, value: text.to_owned() })
        } else {
            Ok(TokenSource::File(PathBuf::from(name)))
        };
    }
    if is_binary(Path::new(text)) {
        return Ok(TokenSource::File(PathBuf::from(text)));
    }
    if !text.contains(|character: char| character == ',' || character.is_whitespace()) && text.contains(['.', '/', '\\']) {
        return Err(TokensError::MissingSign { value: shortened(text) });
    }
    parse_list(text, "the list").map(TokenSource::List)
}

/// The tokens of a source; a file is read now, at most [`TOKENS_MAX`] of them.
///
/// # Errors
/// Where the file cannot be read or holds anything but token numbers, or none, or too many.
pub fn read(source: &TokenSource) -> Result<Vec<TokenId>, TokensError> {
    let path = match source {
        TokenSource::List(tokens) => return Ok(tokens.clone()),
        TokenSource::File(path) => path,
    };
    let origin = path.display().to_string();
    if is_binary(path) {
        let bytes = read_bounded(path, BINARY_BYTES_MAX)?;
        return parse_binary(&bytes, path);
    }
    let bytes = read_bounded(path, TEXT_BYTES_MAX)?;
    // What is not UTF-8 is not a number either, and the replacement character shows up as the entry at fault.
    parse_list(&String::from_utf8_lossy(&bytes), &origin)
}

fn is_binary(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "u16")
}

fn read_bounded(path: &Path, bytes_max: u64) -> Result<Vec<u8>, TokensError> {
    let failed = |source| TokensError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    // One byte more than allowed tells a full file from one that is too long.
    let taken = File::open(path).map_err(failed)?.take(bytes_max + 1).read_to_end(&mut bytes).map_err(failed)?;
    if taken as u64 > bytes_max {
        return Err(TokensError::TooMany { origin: path.display().to_string() });
    }
    Ok(bytes)
}

fn parse_binary(bytes: &[u8], path: &Path) -> Result<Vec<TokenId>, TokensError> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(TokensError::HalfNumber { path: path.to_owned(), bytes: bytes.len() });
    }
    if pairs.is_empty() {
        return Err(TokensError::Empty { origin: path.display().to_string() });
    }
    Ok(pairs.iter().map(|pair| TokenId::from(u16::from_le_bytes(*pair))).collect())
}

fn parse_list(text: &str, origin: &str) -> Result<Vec<TokenId>, TokensError> {
    let mut tokens = Vec::new();
    let entries = text.split(|character: char| character == ',' || character.is_whitespace()).filter(|entry| !entry.is_empty());
    for (index, entry) in entries.enumerate() {
        if index == TOKENS_MAX {
            return Err(TokensError::TooMany { origin: origin.to_owned() });
        }
        let token = entry.parse().map_err(|_| TokensError::NotANumber {
            origin: origin.to_owned(),
            position: index + 1,
            value: shortened(entry),
        })?;
        tokens.push(token);
    }
    if tokens.is_empty() {
        return Err(TokensError::Empty { origin: origin.to_owned() });
    }
    Ok(tokens)
}

fn shortened(text: &str) -> String {
    text.chars().take(32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::scratch::Scratch;

    fn list(text: &str) -> Vec<TokenId> {
        read(&parse_source(text).expect(text)).expect(text)
    }

    #[test]
    fn numbers_are_split_by_commas_and_white_space_alike() {
        assert_eq!(list("1,2, 3\n4\t 4294967295,"), [1, 2, 3, 4, u32::MAX]);
    }

    #[test]
    fn an_entry_at_fault_is_named_with_its_position() {
        let error = parse_source("1, 2, x3").expect_err("x3");
        assert_eq!(error.to_string(), "the list: entry 3 is `x3`, not a token number (0 to 4294967295, split by commas or white space)");
        assert!(parse_source("-1").expect_err("negative").to_string().contains("entry 1 is `-1`"));
        assert!(parse_source("4294967296").expect_err("33 bits").to_string().contains("entry 1 is `4294967296`"));
        assert_eq!(parse_source(" ,").expect_err("nothing").to_string(), "the list: no token numbers");
    }

    #[test]
    fn a_file_name_without_its_sign_is_told_how_to_be_one() {
        let error = parse_source("corpus.txt").expect_err("no sign");
        assert!(error.to_string().ends_with("write @corpus.txt"), "{error}");
        assert!(matches!(parse_source("corpus.u16"), Ok(TokenSource::File(_))), "no list ends in .u16");
        assert!(parse_source("@").is_err());
    }

    #[test]
    fn a_text_file_names_itself_and_the_entry() {
        let scratch = Scratch::new("tokens-text");
        let path = scratch.write("ids.txt", b"5 6\n7,oops 8");
        let source = TokenSource::File(path.clone());
        let error = read(&source).expect_err("oops").to_string();
        assert!(error.starts_with(&format!("{}: entry 4 is `oops`", path.display())), "{error}");
        scratch.write("ids.txt", b"5 6\n7");
        assert_eq!(read(&source).expect("good now"), [5, 6, 7]);
    }

    #[test]
    fn a_u16_file_is_little_endian_and_whole() {
        let scratch = Scratch::new("tokens-u16");
        let path = scratch.write("ids.u16", &[1, 0, 0x34, 0x12, 0xff, 0xff]);
        let source = TokenSource::File(path.clone());
        assert_eq!(read(&source).expect("six bytes"), [1, 0x1234, 0xffff]);
        scratch.write("ids.u16", &[1, 0, 2]);
        assert_eq!(
            read(&source).expect_err("three bytes").to_string(),
            format!("{}: 3 bytes are not a whole count of 16-bit numbers", path.display())
        );
        scratch.write("ids.u16", &[]);
        assert!(matches!(read(&source), Err(TokensError::Empty { .. })));
    }

    #[test]
    fn a_missing_file_is_an_input_error_that_names_it() {
        let error = read(&TokenSource::File(PathBuf::from("no/such/ids.txt"))).expect_err("not there");
        assert_eq!(error.exit_status(), ExitStatus::Input);
        assert!(error.to_string().starts_with("no/such/ids.txt"));
    }

    #[test]
    fn a_file_above_the_bound_is_refused_without_being_read_to_its_end() {
        let scratch = Scratch::new("tokens-bound");
        let path = scratch.path("zeros.u16");
        File::create(&path).and_then(|file| file.set_len(BINARY_BYTES_MAX + 2)).expect("a sparse file");
        assert!(matches!(read(&TokenSource::File(path)), Err(TokensError::TooMany { .. })));
    }
}
