//! What the server asks of a model: tokens of conversations and texts.

use std::time::{SystemTime, UNIX_EPOCH};

pub use super::call::ServedModel;
use super::chat::ChatRequest;
use super::error::ApiError;
use crate::reply::ReasoningStart;
use crate::tokenizer::{ControlText, Json, Message, RenderOptions, Specials};
use crate::units::TokenId;

impl ServedModel {
    /// The tokens of a conversation, with the opening of the answer, and whether that is within a thought.
    ///
    /// # Errors
    /// 400 where the model has no template or the template does not take the conversation.
    pub fn chat_tokens(&self, chat: &ChatRequest) -> Result<(Vec<TokenId>, ReasoningStart), ApiError> {
        let template = self.template.as_ref().ok_or_else(|| {
            ApiError::bad("messages", format!("{} has no chat template: use /v1/completions with a prompt of its own form", self.name))
        })?;
        let messages: Vec<Message> = chat.messages.iter().map(|message| self.shielded(message)).collect();
        let special = |token: Option<TokenId>| {
            token.map(|token| String::from_utf8_lossy(self.tokenizer.token_bytes(token, ControlText::Show)).into_owned())
        };
        let options = RenderOptions {
            tools: chat.offered().to_vec(),
            enable_thinking: chat.thinking,
            bos_token: special(self.tokenizer.bos()),
            eos_token: special(self.tokenizer.eos()),
            extra: chat.template_args.clone(),
            ..RenderOptions::default()
        };
        let rendered = template.render(&messages, &options).map_err(|error| ApiError::bad("messages", error.to_string()))?;
        let tokens = self.tokenizer.encode_chat(&rendered).map_err(|error| ApiError::bad("messages", error.to_string()))?;
        Ok((tokens, ReasoningStart::of_prompt(&rendered)))
    }

    /// What users and tools wrote cannot end their turn. A thought within an answer of the model is cut off by templates, which look
    /// for its closing tag: that must stay what it is.
    fn shielded(&self, message: &Json) -> Message {
        let role = message.get("role");
        let is_answer = role == Some(&Json::from("assistant"));
        let message = Message(message.clone());
        let has_thoughts = matches!(message.0.get("content"), Some(Json::String(text)) if text.contains("</think>"));
        if is_answer && has_thoughts { message } else { message.shielded(&self.tokenizer) }
    }

    /// The tokens of plain text.
    ///
    /// # Errors
    /// 400 where the tokenizer gives up.
    pub fn text_tokens(&self, text: &str, specials: Specials) -> Result<Vec<TokenId>, ApiError> {
        let mut tokens: Vec<TokenId> = self.tokenizer.leading_bos().into_iter().collect();
        tokens.extend(self.tokenizer.encode(text.as_bytes(), specials).map_err(|error| ApiError::bad("prompt", error.to_string()))?);
        Ok(tokens)
    }

    /// The text of one token, and its bytes.
    #[must_use]
    pub fn token_text(&self, token: TokenId) -> (String, &[u8]) {
        let bytes = self.tokenizer.token_bytes(token, ControlText::Show);
        (String::from_utf8_lossy(bytes).into_owned(), bytes)
    }
}

/// Seconds since 1970.
#[must_use]
pub fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
