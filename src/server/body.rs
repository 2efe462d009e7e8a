//! Bodies of requests: bounded in bytes and in time.

use std::future::poll_fn;
use std::pin::Pin;
use std::time::Duration;

use axum::body::Body;
use axum::http::StatusCode;
use http_body::Body as _;

use super::error::ApiError;

/// Most bytes of a body. A conversation of a quarter of a million tokens has about a million letters; this leaves room for every one of
/// them escaped, and for tools.
pub const BODY_BYTES_MAX: usize = 64 << 20;
/// Longest silence within a body.
const SILENCE_MAX: Duration = Duration::from_secs(10);
/// Longest time for a body as a whole.
const BODY_TIME_MAX: Duration = Duration::from_secs(120);

/// Reads a body.
///
/// # Errors
/// 413 with the bound where it is too long, 408 where it is too slow, 400 where it breaks off.
pub async fn read(body: Body) -> Result<Vec<u8>, ApiError> {
    let claimed = body.size_hint().lower();
    if claimed > BODY_BYTES_MAX as u64 {
        return Err(too_large(claimed));
    }
    match tokio::time::timeout(BODY_TIME_MAX, read_frames(body)).await {
        Ok(read) => read,
        Err(_) => Err(too_slow(BODY_TIME_MAX)),
    }
}

async fn read_frames(mut body: Body) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    loop {
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context));
        match tokio::time::timeout(SILENCE_MAX, frame).await {
            Err(_) => return Err(too_slow(SILENCE_MAX)),
            Ok(None) => return Ok(bytes),
            Ok(Some(Err(error))) => return Err(ApiError::bad("", format!("the body broke off: {error}"))),
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                if bytes.len() + data.len() > BODY_BYTES_MAX {
                    return Err(too_large((bytes.len() + data.len()) as u64));
                }
                bytes.extend_from_slice(&data);
            }
        }
    }
}

fn too_large(bytes: u64) -> ApiError {
    let message = format!("the body has {bytes} bytes or more, at most {BODY_BYTES_MAX} are taken");
    ApiError::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

fn too_slow(limit: Duration) -> ApiError {
    let message = format!("the body did not come within {} s", limit.as_secs());
    ApiError::refused(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
}
