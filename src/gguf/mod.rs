//! GGUF files: header, metadata and tensor directory, read from read-only memory maps.
//!
//! Owned here: the byte format, split sets, and the proof that every tensor lies inside its file. Kept invariants:
//!
//! - No length, count, dimension or offset of a file is trusted. Each is compared with the bytes that are left before anything is
//!   allocated or indexed, sums and products are checked, and what is allocated is bounded by a small multiple of the bytes read.
//! - Once [`GgufFile::open`] returns, every [`TensorInfo`] lies inside its file, overlaps no other and is a whole number of blocks,
//!   in each file of a split set. Damage is found at the start, not at the first long prompt.
//! - Every refusal names the file, the field, key or tensor, the number found, and what the user can do about it.
//!
//! Left to others: what keys mean (`general.architecture` included), which tensors a model needs, and the bytes of tensors.
//!
//! Parsing proper is [`parse`], a pure function over bytes; it opens nothing, so it can be fuzzed and tested without files.

mod cursor;
mod error;
mod foreign;
mod map;
mod metadata;
mod open;
mod reader;
mod split;

pub use error::GgufError;
pub use foreign::ForeignFormat;
pub use map::FileMap;
pub use metadata::{Array, FromValue, Metadata, PerLayer, Unfit, Value, ValueType};
pub use open::GgufFile;
pub use reader::{Header, TensorInfo, parse};
