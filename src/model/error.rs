//! What can be wrong with a model file whose container is sound.

use thiserror::Error;

use crate::gguf::GgufError;
use crate::tokenizer::TokenizerError;

/// A model that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The container is damaged or not GGUF, or a key has the wrong type.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The tokenizer in the file is unusable.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// An architecture that is not supported.
    #[error("{file}: architecture '{found}' is not supported; this version runs: {supported}")]
    Architecture {
        /// The file.
        file: String,
        /// What the file says.
        found: String,
        /// What would do.
        supported: &'static str,
    },
    /// A number outside what makes sense.
    #[error("{file}: {key} is {value}, but {rule}")]
    Value {
        /// The file.
        file: String,
        /// The metadata key.
        key: String,
        /// Its value.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{file}: tensor '{tensor}' is missing; the file is incomplete or of another architecture: download it again")]
    MissingTensor {
        /// The file.
        file: String,
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor has another shape than the metadata implies.
    #[error("{file}: tensor '{tensor}' has shape {found:?} (slowest dimension first), the metadata asks for {wanted:?}")]
    TensorShape {
        /// The file.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// Shape in the file.
        found: Vec<u64>,
        /// Shape by the metadata.
        wanted: Vec<u64>,
    },
    /// A tensor has an element type that cannot be used in its place.
    #[error("{file}: tensor '{tensor}' is {found}, but {rule}")]
    TensorType {
        /// The file.
        file: String,
        /// Name of the tensor.
        tensor: String,
        /// Its type.
        found: String,
        /// The rule it breaks.
        rule: &'static str,
    },
}
