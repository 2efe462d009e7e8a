//! Answers in Anthropic's form: one body, or a stream of blocks that open once, grow and close.

use serde_json::{Value, json};

use super::MessageOptions;
use crate::server::error::ApiError;
use crate::server::openai::new_id;
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::worker::protocol::{Delta, Done, FinishReason};

/// Stands under a thought, which this API signs; clients give it back unread, and so do we.
const SIGNATURE: &str = "ebbtide";

/// `stop_reason` and `stop_sequence`.
fn stop(done: &Done, options: &MessageOptions) -> (&'static str, Option<String>) {
    match done.finish {
        FinishReason::Stop | FinishReason::Cancelled => ("end_turn", None),
        FinishReason::StopString(index) => ("stop_sequence", options.stops.get(index).cloned()),
        FinishReason::Length => ("max_tokens", None),
        FinishReason::ToolCalls => ("tool_use", None),
    }
}

fn usage(done: &Done, options: &MessageOptions) -> Value {
    let known = if options.marks_cache { done.reused_tokens } else { 0 };
    json!({
        "input_tokens": done.prompt_tokens - known.min(done.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.reused_tokens,
        "output_tokens": done.completion_tokens,
    })
}

/// The body of a complete answer.
#[must_use]
pub fn body(model: &str, options: &MessageOptions, answer: &Answer) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({ "type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE }));
    }
    if !answer.content.is_empty() {
        content.push(json!({ "type": "text", "text": answer.content }));
    }
    for (name, arguments) in &answer.calls {
        content.push(match serde_json::from_str::<Value>(arguments).ok().filter(Value::is_object) {
            Some(input) => json!({ "type": "tool_use", "id": new_id("toolu_"), "name": name, "input": input }),
            // A call that was broken off has no input that this form could hold; its text is not lost.
            None => json!({ "type": "text", "text": format!("{name}({arguments}") }),
        });
    }
    let (stop_reason, stop_sequence) = stop(&answer.done, options);
    let has_use = content.iter().any(|block| block["type"] == "tool_use");
    json!({
        "id": new_id("msg_"),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": if stop_reason == "tool_use" && !has_use { "end_turn" } else { stop_reason },
        "stop_sequence": stop_sequence,
        "usage": usage(&answer.done, options),
    })
}

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Thinking,
    Text,
    /// The call with this number.
    Use(u32),
}

/// A stream of blocks.
pub struct MessageStream {
    model: String,
    options: MessageOptions,
    prompt_tokens: usize,
    /// The open block.
    open: Option<Kind>,
    /// Blocks so far, the open one included.
    blocks: usize,
    done: Option<Box<Done>>,
}

impl MessageStream {
    /// Before the first event.
    #[must_use]
    pub fn new(model: &str, options: MessageOptions, prompt_tokens: usize) -> Self {
        Self { model: model.to_owned(), options, prompt_tokens, open: None, blocks: 0, done: None }
    }

    fn close(&mut self, events: &mut Vec<SseEvent>) {
        let Some(kind) = self.open.take() else { return };
        if kind == Kind::Thinking {
            self.delta(&json!({ "type": "signature_delta", "signature": SIGNATURE }), events);
        }
        events.push(event("content_block_stop", json!({ "index": self.blocks - 1 })));
    }

    fn open(&mut self, kind: Kind, block: &Value, events: &mut Vec<SseEvent>) {
        if self.open == Some(kind) {
            return;
        }
        self.close(events);
        events.push(event("content_block_start", json!({ "index": self.blocks, "content_block": block })));
        self.open = Some(kind);
        self.blocks += 1;
    }

    fn delta(&self, delta: &Value, events: &mut Vec<SseEvent>) {
        events.push(event("content_block_delta", json!({ "index": self.blocks - 1, "delta": delta })));
    }

    fn take(&mut self, delta: Delta, events: &mut Vec<SseEvent>) {
        match delta {
            Delta::Reasoning(text) => {
                self.open(Kind::Thinking, &json!({ "type": "thinking", "thinking": "", "signature": "" }), events);
                self.delta(&json!({ "type": "thinking_delta", "thinking": text }), events);
            }
            Delta::Content(text) => {
                self.open(Kind::Text, &json!({ "type": "text", "text": "" }), events);
                self.delta(&json!({ "type": "text_delta", "text": text }), events);
            }
            Delta::ToolCall { index, name } => {
                let block = json!({ "type": "tool_use", "id": new_id("toolu_"), "name": name, "input": {} });
                self.open(Kind::Use(index), &block, events);
            }
            Delta::ToolArguments { index, text } if self.open == Some(Kind::Use(index)) => {
                self.delta(&json!({ "type": "input_json_delta", "partial_json": text }), events);
            }
            Delta::ToolArguments { .. } => {}
            Delta::ToolEnd { index, .. } => {
                if self.open == Some(Kind::Use(index)) {
                    self.close(events);
                }
            }
        }
    }
}

/// An event; its type stands inside it once more.
fn event(name: &'static str, mut data: Value) -> SseEvent {
    data["type"] = name.into();
    SseEvent { name: Some(name), data: data.to_string() }
}

impl Wire for MessageStream {
    fn begin(&mut self) -> Vec<SseEvent> {
        let message = json!({
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {
                "input_tokens": self.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        });
        vec![event("message_start", json!({ "message": message }))]
    }

    fn event(&mut self, _: usize, event: AnswerEvent) -> Vec<SseEvent> {
        let mut events = Vec::new();
        match event {
            AnswerEvent::Wrote { deltas, .. } => deltas.into_iter().for_each(|delta| self.take(delta, &mut events)),
            AnswerEvent::Done(done) => {
                self.close(&mut events);
                self.done = Some(done);
            }
            AnswerEvent::Reading { .. } | AnswerEvent::Failed(_) => {}
        }
        events
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let Some(done) = self.done.take() else { return Vec::new() };
        let (stop_reason, stop_sequence) = stop(&done, &self.options);
        let delta = json!({ "stop_reason": stop_reason, "stop_sequence": stop_sequence });
        let last = json!({ "delta": delta, "usage": usage(&done, &self.options) });
        vec![event("message_delta", last), event("message_stop", json!({}))]
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SseEvent> {
        vec![event("error", error.anthropic_body())]
    }
}
