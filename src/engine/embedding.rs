//! Rows of the token embedding, which stays in host memory: the host gathers and dequantises the few it needs.

use crate::engine::EngineError;
use crate::gguf::FileMap;
use crate::model::{Model, ModelError};
use crate::quant::{self, QuantType};
use crate::units::TokenId;

/// The mapped embedding.
pub struct Embedding {
    map: FileMap,
    offset: usize,
    quant_type: QuantType,
    n_embd: usize,
    row_bytes: usize,
}

impl Embedding {
    /// The embedding of `model`.
    ///
    /// # Errors
    /// Where the file that holds it is not open.
    pub fn new(model: &Model) -> Result<Self, ModelError> {
        let tensor = &model.weights.token_embd;
        let missing = || ModelError::MissingTensor { file: model.name(), tensor: tensor.name.clone() };
        let map = model.file.file_map(tensor.file_index).ok_or_else(missing)?.clone();
        let n_embd = tensor.cols as usize;
        let row_bytes = n_embd / tensor.quant_type.block_len() * tensor.quant_type.block_bytes();
        let offset = usize::try_from(tensor.offset).map_err(|_| missing())?;
        Ok(Self { map, offset, quant_type: tensor.quant_type, n_embd, row_bytes })
    }

    /// Numbers of a row.
    #[must_use]
    pub fn n_embd(&self) -> usize {
        self.n_embd
    }

    /// Writes the rows of `tokens`, which must lie inside the vocabulary, as little-endian f32 to `out`
    /// `[tokens.len(), n_embd]`.
    ///
    /// # Errors
    /// Where the element type cannot be read.
    pub fn rows(&self, tokens: &[TokenId], out: &mut [u8]) -> Result<(), EngineError> {
        self.rows_through(&mut Vec::new(), tokens, out)
    }

    /// As [`Embedding::rows`], with scratch that a caller keeps to spare an allocation.
    ///
    /// # Errors
    /// As [`Embedding::rows`].
    pub fn rows_through(&self, floats: &mut Vec<f32>, tokens: &[TokenId], out: &mut [u8]) -> Result<(), EngineError> {
        floats.resize(self.n_embd, 0.0);
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(self.n_embd * 4)) {
            let start = self.offset + token as usize * self.row_bytes;
            quant::dequantise(self.quant_type, &self.map.as_slice()[start..start + self.row_bytes], floats)?;
            for (bytes, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(&*floats) {
                *bytes = value.to_le_bytes();
            }
        }
        Ok(())
    }
}
