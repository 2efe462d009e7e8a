//! Server-sent events: an answer as it comes, with a heartbeat by the clock, and an end that says how it ended.
//!
//! The body is polled by the connection alone. Where the client leaves, the connection drops the body, with it the receiving end of the
//! answer's channel, and the dispatcher cancels the request.

use std::convert::Infallible;
use std::fmt::Write;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use http_body::Frame;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, Sleep};

use super::error::ApiError;
use super::queue::{AnswerEvent, ChoiceEvent};

/// Longest silence on the wire; proxies and clients give up after some tens of seconds.
pub const HEARTBEAT: Duration = Duration::from_secs(5);
/// Bytes after which what has come is handed on before more is looked at.
const PIECE_BYTES: usize = 16 << 10;

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SseEvent {
    /// Its name, where the API names events.
    pub name: Option<&'static str>,
    /// Its data, without line ends.
    pub data: String,
}

impl SseEvent {
    /// An event without a name.
    #[must_use]
    pub fn data(data: impl ToString) -> Self {
        Self { name: None, data: data.to_string() }
    }

    fn write(&self, out: &mut String) {
        if let Some(name) = self.name {
            let _ = writeln!(out, "event: {name}");
        }
        let _ = write!(out, "data: {}\n\n", self.data);
    }
}

/// An API's form of a stream.
pub trait Wire: Send + Unpin + 'static {
    /// Events before all others.
    fn begin(&mut self) -> Vec<SseEvent>;
    /// What an event of an answer becomes; never [`AnswerEvent::Failed`].
    fn event(&mut self, choice: usize, event: AnswerEvent) -> Vec<SseEvent>;
    /// Events once all answers are complete.
    fn end(&mut self) -> Vec<SseEvent>;
    /// Events where one failed; nothing follows them.
    fn failed(&mut self, error: &ApiError) -> Vec<SseEvent>;
}

/// The response that streams `answers` of one request.
pub fn response<W: Wire>(wire: W, events: UnboundedReceiver<ChoiceEvent>, answers: usize) -> Response {
    let body =
        SseBody { wire, events: Some(events), answers_left: answers, state: "waiting in the queue".to_owned(), began: false, beat: None };
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Some proxies collect a whole response unless told not to.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

struct SseBody<W> {
    wire: W,
    /// `None` once the stream has ended.
    events: Option<UnboundedReceiver<ChoiceEvent>>,
    answers_left: usize,
    /// What a heartbeat says.
    state: String,
    began: bool,
    beat: Option<Pin<Box<Sleep>>>,
}

impl<W: Wire> SseBody<W> {
    /// Turns an event into text; true where the stream ends with it.
    fn take(&mut self, choice: usize, event: AnswerEvent, out: &mut String) -> bool {
        let (events, ends) = match event {
            AnswerEvent::Failed(error) => (self.wire.failed(&error), true),
            event => {
                match &event {
                    AnswerEvent::Reading { percent } => self.state = format!("reading the prompt, {percent} %"),
                    AnswerEvent::Done(_) => self.answers_left -= 1,
                    AnswerEvent::Wrote { .. } => "writing".clone_into(&mut self.state),
                    AnswerEvent::Failed(_) => {}
                }
                let mut events = self.wire.event(choice, event);
                let ends = self.answers_left == 0;
                if ends {
                    events.extend(self.wire.end());
                }
                (events, ends)
            }
        };
        for event in events {
            event.write(out);
        }
        ends
    }
}

impl<W: Wire> http_body::Body for SseBody<W> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let body = self.get_mut();
        let mut out = String::new();
        if !body.began {
            body.began = true;
            for event in body.wire.begin() {
                event.write(&mut out);
            }
        }
        while out.len() < PIECE_BYTES {
            let Some(events) = &mut body.events else { break };
            match events.poll_recv(context) {
                Poll::Ready(Some((choice, event))) => {
                    if body.take(choice, event, &mut out) {
                        body.events = None;
                    }
                }
                Poll::Ready(None) => {
                    // Nobody will write any more, and nobody said how it ended.
                    for event in body.wire.failed(&ApiError::engine("lost", "the answer ended without a word; try again")) {
                        event.write(&mut out);
                    }
                    body.events = None;
                }
                Poll::Pending => break,
            }
        }
        let next_beat = Instant::now() + HEARTBEAT;
        let beat = body.beat.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(next_beat)));
        if out.is_empty() {
            if body.events.is_none() {
                return Poll::Ready(None);
            }
            if beat.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            let _ = write!(out, ": {}\n\n", body.state);
        }
        beat.as_mut().reset(next_beat);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(out)))))
    }

    fn is_end_stream(&self) -> bool {
        self.began && self.events.is_none()
    }
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Thoughts.
    pub reasoning: String,
    /// Text.
    pub content: String,
    /// Calls: tool and arguments.
    pub calls: Vec<(String, String)>,
    /// Its tokens.
    pub tokens: Vec<crate::worker::protocol::WrittenToken>,
    /// How it ended.
    pub done: Box<crate::worker::protocol::Done>,
}

/// Waits for all answers of a request.
///
/// # Errors
/// Where one failed.
pub async fn collect(mut events: UnboundedReceiver<ChoiceEvent>, answers: usize) -> Result<Vec<Answer>, ApiError> {
    use crate::worker::protocol::Delta;
    #[derive(Default)]
    struct Part {
        reasoning: String,
        content: String,
        calls: Vec<(String, String)>,
        tokens: Vec<crate::worker::protocol::WrittenToken>,
        done: Option<Box<crate::worker::protocol::Done>>,
    }
    let mut parts: Vec<Part> = (0..answers).map(|_| Part::default()).collect();
    while parts.iter().any(|part| part.done.is_none()) {
        let Some((choice, event)) = events.recv().await else {
            return Err(ApiError::engine("lost", "the answer ended without a word; try again"));
        };
        let Some(part) = parts.get_mut(choice) else { continue };
        match event {
            AnswerEvent::Reading { .. } => {}
            AnswerEvent::Wrote { deltas, tokens } => {
                part.tokens.extend(tokens);
                for delta in deltas {
                    match delta {
                        Delta::Reasoning(text) => part.reasoning.push_str(&text),
                        Delta::Content(text) => part.content.push_str(&text),
                        Delta::ToolCall { name, .. } => part.calls.push((name, String::new())),
                        Delta::ToolArguments { index, text } => {
                            if let Some((_, arguments)) = part.calls.get_mut(index as usize) {
                                arguments.push_str(&text);
                            }
                        }
                        Delta::ToolEnd { .. } => {}
                    }
                }
            }
            AnswerEvent::Done(done) => part.done = Some(done),
            AnswerEvent::Failed(error) => return Err(error),
        }
    }
    let whole = |part: Part| {
        let done = part.done?;
        Some(Answer { reasoning: part.reasoning, content: part.content, calls: part.calls, tokens: part.tokens, done })
    };
    Ok(parts.into_iter().filter_map(whole).collect())
}
