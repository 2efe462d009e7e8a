//! Everything that can be wrong with a GGUF file, each with the file, the place, the number and the way out.
//!
//! Names that come from a file are printed quoted and escaped, and cut to [`SHOWN_NAME_BYTES`]: a hostile name must reach neither the
//! terminal's control codes nor fill a log.

use std::io;

use super::foreign::ForeignFormat;

/// Longest part of a name from a file that a message repeats.
const SHOWN_NAME_BYTES: usize = 96;

/// `name`, cut at a character boundary to what a message may show.
pub(super) fn shown(name: &str) -> String {
    if name.len() <= SHOWN_NAME_BYTES {
        return name.to_owned();
    }
    let end = (0..=SHOWN_NAME_BYTES).rev().find(|&at| name.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &name[..end])
}

/// Why a GGUF file, or a set of them, was refused. `file` is the path as the user gave it, or the name given to [`parse`](super::parse).
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message of each variant says what its fields are")]
#[non_exhaustive]
pub enum GgufError {
    /// The operating system refused.
    #[error("{file}: cannot {action}: {source}")]
    Io { file: String, action: &'static str, source: io::Error },
    /// A pipe, device or socket.
    #[error("{file}: is neither a file nor a folder; a model must be a regular file, because it is mapped into memory")]
    NotAFile { file: String },
    /// No bytes at all.
    #[error("{file}: the file is empty (0 bytes): the download did not start; download it again")]
    Empty { file: String },
    /// Some other format, recognised where possible.
    #[error("{file}: not a GGUF file: {format} ({file_bytes} bytes). {}", .format.way_out())]
    NotGguf { file: String, format: ForeignFormat, file_bytes: u64 },
    /// GGUF version 1, whose lengths have another width.
    #[error("{file}: GGUF version {version} is too old (versions 2 and 3 are read): download a newer conversion of the model")]
    OldVersion { file: String, version: u32 },
    /// A version that did not exist when this was written.
    #[error("{file}: GGUF version {version} is not known (versions 2 and 3 are read): a damaged file, or one newer than this program")]
    UnknownVersion { file: String, version: u32 },

    /// A field, or as many of it as the file claims, needs more bytes than are left.
    #[error(
        "{file}: {field} at byte {offset} needs {needed} bytes but {left} are left: at least {} bytes are missing; \
         the file is cut short or damaged, download it again",
        .needed - .left
    )]
    Truncated { file: String, field: String, offset: u64, needed: u64, left: u64 },
    /// A tensor ends behind the end of the file.
    #[error(
        "{file}: tensor {tensor:?} at byte {offset} with {bytes} bytes ends outside the file of {file_bytes} bytes: \
         {missing} bytes are missing; the file is cut short or damaged, download it again"
    )]
    TensorOutside { file: String, tensor: String, offset: u128, bytes: u64, file_bytes: u64, missing: u128 },
    /// A string that is no UTF-8.
    #[error("{file}: {field} at byte {offset} is not UTF-8 (first bad byte is number {bad_byte}): the file is damaged, download it again")]
    NotUtf8 { file: String, field: String, offset: u64, bad_byte: usize },
    /// A key or tensor name longer than the format allows.
    #[error("{file}: {field} is {bytes} bytes long, at most {max} are allowed: the file is damaged, download it again")]
    NameTooLong { file: String, field: String, bytes: u64, max: u64 },

    /// One key twice.
    #[error("{file}: key {key:?} occurs twice (again as number {index}): the file is damaged or forged, download it again")]
    DuplicateKey { file: String, key: String, index: u64 },
    /// A value type number outside 0 to 12.
    #[error("{file}: {field} has value type {id}, known are 0 to 12: the file is damaged or newer than this program, download it again")]
    UnknownValueType { file: String, field: String, id: u32 },
    /// An array of arrays, which no known model uses.
    #[error("{file}: key {key:?} is an array of {count} arrays; nested arrays are refused: convert the model again")]
    NestedArray { file: String, key: String, count: u64 },
    /// A truth value that is neither 0 nor 1.
    #[error("{file}: {field} is a bool with the value {found}, 0 or 1 is wanted: the file is damaged, download it again")]
    BadBool { file: String, field: String, found: u8 },
    /// `general.alignment` is no power of two.
    #[error("{file}: key \"general.alignment\" is {found}, a power of two is wanted: convert the model again")]
    BadAlignment { file: String, found: u32 },

    /// A key that the caller needs is absent.
    #[error("{file}: key {key:?} ({wanted}) is missing: the converter did not write it; convert the model again or take another file")]
    MissingKey { file: String, key: String, wanted: &'static str },
    /// A key's value has another type.
    #[error("{file}: key {key:?} is {found}, {wanted} is wanted: convert the model again or take another file")]
    WrongType { file: String, key: String, found: String, wanted: &'static str },
    /// A number does not fit the type that its use needs. `index` is the place in an array.
    #[error(
        "{file}: key {key:?}{}: {found} does not fit, {wanted} is wanted: \
         convert the model again or take another file",
        at_index(*.index)
    )]
    OutOfRange { file: String, key: String, index: Option<usize>, found: i128, wanted: &'static str },
    /// An array that should have one value a layer has another length.
    #[error(
        "{file}: key {key:?} has {found} values for {n_layer} layers, one a layer is wanted: convert the model again or take another file"
    )]
    LayerCount { file: String, key: String, found: usize, n_layer: u32 },

    /// A tensor with no dimension, or more than four.
    #[error("{file}: tensor {tensor:?} has {found} dimensions, 1 to 4 are allowed: the file is damaged, download it again")]
    DimensionCount { file: String, tensor: String, found: u32 },
    /// A dimension of zero.
    #[error("{file}: dimension {dimension} of tensor {tensor:?} is 0, at least 1 is wanted: the file is damaged, download it again")]
    ZeroDimension { file: String, tensor: String, dimension: u32 },
    /// The product of the dimensions, or the bytes it needs, exceeds 64 bits.
    #[error(
        "{file}: tensor {tensor:?} with dimensions {dimensions:?} is larger than 2^64 bytes: \
         the file is damaged or forged, download it again"
    )]
    DimensionOverflow { file: String, tensor: String, dimensions: Vec<u64> },
    /// A type number that this engine does not read.
    #[error(
        "{file}: tensor {tensor:?} has element type {id} ({type_name}), which is not supported: \
         take a file in another quantisation, e.g. Q4_K_M"
    )]
    UnsupportedType { file: String, tensor: String, id: u32, type_name: &'static str },
    /// Rows that are not whole blocks.
    #[error(
        "{file}: tensor {tensor:?} has rows of {row_len} numbers, which are not whole {type_name} blocks of {block_len}: \
         the file is damaged, download it again"
    )]
    PartialBlock { file: String, tensor: String, row_len: u64, type_name: String, block_len: usize },
    /// A data offset that the file's alignment does not divide.
    #[error(
        "{file}: tensor {tensor:?} has offset {offset}, which is no multiple of the alignment {alignment}: \
         the file is damaged, download it again"
    )]
    Misaligned { file: String, tensor: String, offset: u64, alignment: u32 },
    /// Two tensors that share bytes.
    #[error(
        "{file}: tensor {second:?} at byte {second_offset} overlaps tensor {first:?}, which ends at byte {first_end}: \
         the file is damaged or forged, download it again"
    )]
    Overlap { file: String, first: String, first_end: u64, second: String, second_offset: u64 },
    /// One tensor name twice, in one file or in two shards.
    #[error(
        "{file}: tensor {tensor:?} occurs twice (again as number {index}): \
         shards of two models are mixed or the file is damaged; download it again"
    )]
    DuplicateTensor { file: String, tensor: String, index: u64 },

    /// A folder with no `.gguf` file.
    #[error("{file}: 0 files in this folder end in .gguf: give the path of a model")]
    EmptyFolder { file: String },
    /// A folder with more than one model.
    #[error("{file}: holds {count} models, among them {first:?} and {second:?}: give the path of one, for a split model that of any shard")]
    SeveralModels { file: String, count: usize, first: String, second: String },
    /// A shard name like `-00004-of-00003` or `-00000-of-00003`.
    #[error("{file}: shard number {number} is not within 1 to {count}: a wrong or renamed shard; remove it or download the set again")]
    ShardNumber { file: String, number: u32, count: u32 },
    /// A shard of the set is not there. `file` is its path.
    #[error("{file}: shard {number} of {count} is missing: put it beside the others or download it again")]
    MissingShard { file: String, number: u32, count: u32 },
    /// A shard says something else than its name or its siblings. `split.no` counts from 0, names from 1.
    #[error("{file}: key {key:?} is {found}, {wanted} is wanted here: shards are mixed up or renamed; download the set again")]
    ShardMismatch { file: String, key: &'static str, found: u64, wanted: u64 },
    /// A shard of several under a name that does not say so.
    #[error(
        "{file}: is shard {number} of {count}, but its name does not end in -{number:05}-of-{count:05}.gguf: \
         restore the name so that the others are found"
    )]
    RenamedShard { file: String, number: u64, count: u64 },
}

fn at_index(index: Option<usize>) -> String {
    index.map_or_else(String::new, |index| format!(", value {index}"))
}
