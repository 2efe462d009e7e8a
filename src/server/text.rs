//! `/tokenize` and `/detokenize`: text to tokens and back. They wait behind no request.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};

use super::chat::ChatRequest;
use super::error::ApiError;
use super::fields::{Fields, parse_body};
use super::openai::{messages, ok};
use super::routes::blocking;
use super::{App, body};
use crate::tokenizer::{ControlText, Json, Specials};
use crate::units::TokenId;

/// Text (`content` or `prompt`) or a conversation (`messages`) to tokens.
pub async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = body::read(request.into_body()).await?;
    let model = app.model()?;
    let answer = blocking(move || {
        let body = parse_body(&body)?;
        let fields = Fields::of_body(&body)?;
        let text = match fields.text("content")? {
            Some(text) => Some(text),
            None => fields.text("prompt")?,
        };
        let tokens = match text {
            Some(text) => {
                let specials = if fields.flag("parse_special")?.unwrap_or(true) { Specials::Parse } else { Specials::AsText };
                model.tokenizer.encode(text.as_bytes(), specials).map_err(|error| ApiError::bad("content", error.to_string()))?
            }
            None if fields.get("messages").is_some() => {
                let tools = fields.list("tools", 512)?.to_vec();
                let template_args = fields.entries("chat_template_kwargs")?.to_vec();
                model.chat_tokens(&ChatRequest { messages: messages::read(&fields)?, tools, template_args, ..ChatRequest::default() })?.0
            }
            None => return Err(fields.refuse("content", "missing: give `content`, `prompt` or `messages`")),
        };
        let mut answer = json!({ "tokens": tokens, "count": tokens.len() });
        if fields.flag("with_pieces")?.unwrap_or(false) {
            let piece = |&token: &TokenId| {
                let (text, bytes) = model.token_text(token);
                let piece: Value = if std::str::from_utf8(bytes).is_ok() { text.into() } else { bytes.into() };
                json!({ "id": token, "piece": piece })
            };
            answer["tokens"] = tokens.iter().map(piece).collect();
        }
        Ok(answer)
    })
    .await?;
    Ok(ok(&answer))
}

/// Tokens to text.
pub async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let body = body::read(request.into_body()).await?;
    let model = app.model()?;
    let answer = blocking(move || {
        let body = parse_body(&body)?;
        let fields = Fields::of_body(&body)?;
        if fields.get("tokens").is_none() {
            return Err(fields.refuse("tokens", "missing: give a list of token numbers"));
        }
        let count = model.tokenizer.token_count();
        let tokens = fields.list("tokens", usize::MAX)?.iter().enumerate().map(|(position, token)| {
            let number = if let Json::Number(number) = token { number.as_u64() } else { None };
            let token = number.and_then(|number| TokenId::try_from(number).ok()).filter(|&token| (token as usize) < count);
            token.ok_or_else(|| fields.refuse(&format!("tokens[{position}]"), &format!("no token: a number below {count} is needed")))
        });
        let text = model.tokenizer.decode_lossy(&tokens.collect::<Result<Vec<_>, _>>()?, ControlText::Show);
        Ok(json!({ "content": text, "prompt": text }))
    })
    .await?;
    Ok(ok(&answer))
}
