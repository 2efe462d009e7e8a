//! From the metadata of a model file to a [`TokenizerSpec`].

use super::TokenizerSpec;
use crate::gguf::{GgufError, Metadata};

/// What `metadata` says about the tokenizer. Types of values are checked here, their meaning by
/// [`Tokenizer::new`](super::Tokenizer::new).
///
/// # Errors
/// Where a key has another type, or a list that must be there is not.
pub fn spec_from_metadata(metadata: &Metadata) -> Result<TokenizerSpec, GgufError> {
    let id = |name: &str| metadata.u32_opt(&format!("tokenizer.ggml.{name}_token_id"));
    Ok(TokenizerSpec {
        model: metadata.string("tokenizer.ggml.model")?.to_owned(),
        pre: metadata.string_opt("tokenizer.ggml.pre")?.map(str::to_owned),
        tokens: metadata.string_array("tokenizer.ggml.tokens")?.to_vec(),
        token_types: metadata.i32_array("tokenizer.ggml.token_type")?,
        merges: metadata.string_array("tokenizer.ggml.merges")?.to_vec(),
        bos: id("bos")?,
        eos: id("eos")?,
        eot: id("eot")?,
        pad: id("padding")?,
        add_bos: metadata.bool_opt("tokenizer.ggml.add_bos_token")?,
        chat_template: metadata.string_opt("tokenizer.chat_template")?.map(str::to_owned),
    })
}
