//! Files that are taken for GGUF but are something else, told apart by their first bytes.
//!
//! Only for messages: a user with a web page on disk should read that it is a web page. A cut-off GGUF magic is not foreign.

use std::fmt;

/// What a file is that is no little-endian GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ForeignFormat {
    /// A web page, usually a login or error page of a download site.
    Html,
    /// An XML document, usually an error of a storage service.
    Xml,
    /// A JSON document, usually an error of a download interface, or a model's `config.json`.
    Json,
    /// The small text file that stands for a large file in a Git repository.
    GitLfsPointer,
    /// Hugging Face safetensors.
    Safetensors,
    /// A zip archive, which PyTorch checkpoints are too.
    Zip,
    /// A gzip, zstd, xz or 7z archive.
    Archive,
    /// Formats of 2023 before GGUF; the four bytes of the magic in reading order.
    OldGgml([u8; 4]),
    /// A GGUF file for machines of the other byte order, with its version.
    BigEndianGguf(u32),
    /// Anything else, with its first bytes (missing ones are 0).
    Unknown([u8; 4]),
}

impl ForeignFormat {
    /// What `bytes`, which do not start with the GGUF magic, are.
    pub(super) fn recognise(bytes: &[u8]) -> Self {
        let first = first_four(bytes);
        let text = start_of_text(bytes);
        match first {
            [b'P', b'K', 3 | 5, 4 | 6] => Self::Zip,
            [0x1f, 0x8b, ..] | [0x28, 0xb5, 0x2f, 0xfd] | [0xfd, b'7', b'z', b'X'] | [b'7', b'z', 0xbc, 0xaf] => Self::Archive,
            // The old magics are u32 constants, so files hold them backwards; both orders are met.
            [b'g', b'g', b'm', b'l' | b'f'] | [b'g', b'g', b'j', b't'] | [b'g', b'g', b'l', b'a'] => Self::OldGgml(first),
            [b'l' | b'f', b'm', b'g', b'g'] | [b't', b'j', b'g', b'g'] | [b'a', b'l', b'g', b'g'] => {
                Self::OldGgml([first[3], first[2], first[1], first[0]])
            }
            [b'F', b'U', b'G', b'G'] => Self::BigEndianGguf(u32::from_be_bytes(first_four(&bytes[4..]))),
            _ if text.starts_with("version https://git-lfs") => Self::GitLfsPointer,
            _ if text.starts_with("<?xml") => Self::Xml,
            _ if is_markup(&text) => Self::Html,
            _ if text.starts_with('{') || text.starts_with('[') => Self::Json,
            _ if is_safetensors(bytes) => Self::Safetensors,
            _ => Self::Unknown(first),
        }
    }

    /// What the user can do, as a sentence.
    pub(super) fn way_out(self) -> &'static str {
        match self {
            Self::Html => "Download it again with the link of the file itself; a login may be needed.",
            Self::Xml | Self::Json => "Look into it for the site's error, then download the model again.",
            Self::GitLfsPointer => "Run `git lfs pull` in the repository, or download the file itself.",
            Self::Safetensors => "Convert the model to GGUF, or download a GGUF version of it.",
            Self::Zip | Self::Archive => "Unpack it if a .gguf is inside; a PyTorch checkpoint must be converted to GGUF.",
            Self::OldGgml(_) => "Download a GGUF version of the model.",
            Self::BigEndianGguf(_) => "Download the little-endian version of the model.",
            Self::Unknown(_) => "Check the path, or download the file again.",
        }
    }
}

impl fmt::Display for ForeignFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Html => f.write_str("it is an HTML web page"),
            Self::Xml => f.write_str("it is an XML document, probably an error of a download site"),
            Self::Json => f.write_str("it is a JSON document"),
            Self::GitLfsPointer => f.write_str("it is a Git LFS pointer, which only names the real file"),
            Self::Safetensors => f.write_str("it is a safetensors file"),
            Self::Zip => f.write_str("it is a zip archive or a PyTorch checkpoint"),
            Self::Archive => f.write_str("it is a compressed archive"),
            Self::OldGgml(magic) => write!(f, "it has the old format {:?} of before GGUF", String::from_utf8_lossy(magic)),
            Self::BigEndianGguf(version) => write!(f, "it is a big-endian GGUF file (version {version})"),
            Self::Unknown(first) => write!(f, "its first bytes are {first:02x?}, \"GGUF\" would be [47, 47, 55, 46]"),
        }
    }
}

fn first_four(bytes: &[u8]) -> [u8; 4] {
    let mut first = [0; 4];
    first.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    first
}

/// The first characters without byte-order mark and white space, in lower case, up to the first byte that is no ASCII text.
fn start_of_text(bytes: &[u8]) -> String {
    let start = &bytes[..bytes.len().min(256)];
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
    start.iter().copied().take(32).take_while(is_text).map(|byte| char::from(byte.to_ascii_lowercase())).collect()
}

/// `<!DOCTYPE`, `<html`, `<head` and the like.
fn is_markup(text: &str) -> bool {
    text.strip_prefix('<').is_some_and(|rest| rest.starts_with(|next: char| next == '!' || next.is_ascii_alphabetic()))
}

/// A u64 length of a JSON header, then its opening brace.
fn is_safetensors(bytes: &[u8]) -> bool {
    bytes.len() > 9 && bytes[8] == b'{' && bytes[6..8] == [0, 0]
}
