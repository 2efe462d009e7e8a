//! A model as the engine sees it: its sizes, where its tensors lie, and its layers as lists of operations.
//!
//! Nothing here touches a device. [`shape`] and [`weights`] read and check a GGUF file once; [`forward`] describes a layer for both
//! phases, given addresses.

mod arithmetic;
mod error;
pub mod forward;
pub mod layout;
pub mod shape;
pub mod weights;

use std::path::Path;

pub use arithmetic::Arithmetic;
pub use error::ModelError;
pub use shape::ModelShape;
pub use weights::ModelWeights;

use crate::gguf::GgufFile;
use crate::tokenizer::{self, Tokenizer};

/// An opened and checked model: file map, sizes, tensors, tokenizer.
pub struct Model {
    /// The mapped file or set of files.
    pub file: GgufFile,
    /// Sizes.
    pub shape: ModelShape,
    /// Where each tensor lies.
    pub weights: ModelWeights,
}

impl Model {
    /// Opens a GGUF file, any part of a split one, or the folder that holds it.
    ///
    /// # Errors
    /// Where the file is damaged, of another kind, or of an architecture that is not supported.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ModelError> {
        Self::from_file(GgufFile::open(path)?)
    }

    /// Checks an opened file.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn from_file(file: GgufFile) -> Result<Self, ModelError> {
        let shape = ModelShape::read(file.metadata(), &file)?;
        let weights = ModelWeights::read(&file, &shape)?;
        Ok(Self { file, shape, weights })
    }

    /// The model as if its file had no draft layer: nothing of it is loaded or planned for.
    ///
    /// # Errors
    /// As [`Model::open`].
    pub fn without_draft_layer(mut self) -> Result<Self, ModelError> {
        if self.shape.has_draft_layer {
            self.shape.has_draft_layer = false;
            self.weights = ModelWeights::read(&self.file, &self.shape)?;
        }
        Ok(self)
    }

    /// The tokenizer that the file describes.
    ///
    /// # Errors
    /// Where the file's tokenizer is incomplete or of a kind that is not supported.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        Ok(Tokenizer::new(&tokenizer::spec_from_metadata(self.file.metadata())?)?)
    }

    /// The file's name for people: `general.name`, else the file's own.
    #[must_use]
    pub fn name(&self) -> String {
        let own = || self.file.paths().first().map_or_else(String::new, |path| path.display().to_string());
        self.file.metadata().string_opt("general.name").ok().flatten().map_or_else(own, str::to_owned)
    }
}
