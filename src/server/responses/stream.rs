//! Responses: one body, or a stream of events by which a client builds the same. Each item of the output is added, grows and is done.

use serde_json::{Value, json};

use super::ResponseOptions;
use crate::server::error::ApiError;
use crate::server::model::unix_s;
use crate::server::openai::new_id;
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::worker::protocol::{Delta, Done, FinishReason};

/// Something that a model wrote.
#[derive(Clone, Debug)]
enum Item {
    Reasoning { text: String },
    Message { text: String },
    Call { number: u32, call_id: String, name: String, arguments: String, is_whole: bool },
}

impl Item {
    fn call(number: u32, name: String) -> Self {
        Self::Call { number, call_id: new_id("call_"), name, arguments: String::new(), is_whole: true }
    }

    fn new_id(&self) -> String {
        new_id(match self {
            Self::Reasoning { .. } => "rs_",
            Self::Message { .. } => "msg_",
            Self::Call { .. } => "fc_",
        })
    }

    /// As the output has it. An item that has only begun is empty.
    fn json(&self, id: &str, status: &str) -> Value {
        match self {
            Self::Reasoning { text } => {
                let content = if text.is_empty() { json!([]) } else { json!([{ "type": "reasoning_text", "text": text }]) };
                json!({ "id": id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": null, "status": status })
            }
            Self::Message { text } => {
                let content = if text.is_empty() { json!([]) } else { json!([text_part(text)]) };
                json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
            }
            Self::Call { call_id, name, arguments, .. } => json!({
                "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, "status": status,
            }),
        }
    }

    fn status(&self) -> &'static str {
        match self {
            Self::Call { is_whole: false, .. } => "incomplete",
            _ => "completed",
        }
    }
}

fn text_part(text: &str) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] })
}

fn usage(done: &Done) -> Value {
    json!({
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": { "cached_tokens": done.reused_tokens },
        "output_tokens": done.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": done.reasoning_tokens },
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    })
}

/// What all forms of one response share.
struct Frame {
    id: String,
    model: String,
    created: u64,
    repeated: Value,
}

impl Frame {
    fn new(model: &str, options: &ResponseOptions) -> Self {
        Self { id: new_id("resp_"), model: model.to_owned(), created: unix_s(), repeated: options.repeated.clone() }
    }

    fn json(&self, status: &str, output: Vec<Value>) -> Value {
        let mut response = self.repeated.clone();
        let own = json!({
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model, "status": status,
            "error": null, "incomplete_details": null, "output": output, "usage": null,
        });
        if let (Value::Object(response), Value::Object(own)) = (&mut response, own) {
            response.extend(own);
        }
        response
    }

    /// A response that ended well: the event's name, and the response.
    fn ended(&self, done: &Done, output: Vec<Value>) -> (&'static str, Value) {
        let is_cut = done.finish == FinishReason::Length;
        let mut response = self.json(if is_cut { "incomplete" } else { "completed" }, output);
        if is_cut {
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        response["usage"] = usage(done);
        (if is_cut { "response.incomplete" } else { "response.completed" }, response)
    }
}

/// The body of a complete answer.
#[must_use]
pub fn body(model: &str, options: &ResponseOptions, answer: &Answer) -> Value {
    let mut items = Vec::new();
    if !answer.reasoning.is_empty() {
        items.push(Item::Reasoning { text: answer.reasoning.clone() });
    }
    if !answer.content.is_empty() || answer.calls.is_empty() {
        items.push(Item::Message { text: answer.content.clone() });
    }
    for (number, (name, arguments)) in (0..).zip(&answer.calls) {
        let is_whole = serde_json::from_str::<serde::de::IgnoredAny>(arguments).is_ok();
        items.push(Item::Call { number, call_id: new_id("call_"), name: name.clone(), arguments: arguments.clone(), is_whole });
    }
    let output = items.iter().map(|item| item.json(&item.new_id(), item.status())).collect();
    Frame::new(model, options).ended(&answer.done, output).1
}

/// A stream of events.
pub struct ResponseStream {
    frame: Frame,
    /// The item that grows, with its id.
    open: Option<(String, Item)>,
    /// Items that are done.
    output: Vec<Value>,
    /// Events so far.
    events: u64,
    done: Option<Box<Done>>,
}

impl ResponseStream {
    /// Before the first event.
    #[must_use]
    pub fn new(model: &str, options: &ResponseOptions) -> Self {
        Self { frame: Frame::new(model, options), open: None, output: Vec::new(), events: 0, done: None }
    }

    fn event(&mut self, name: &'static str, mut data: Value, out: &mut Vec<SseEvent>) {
        data["type"] = name.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        out.push(SseEvent { name: Some(name), data: data.to_string() });
    }

    /// An event of the open item.
    fn item_event(&mut self, name: &'static str, mut data: Value, out: &mut Vec<SseEvent>) {
        let Some((id, item)) = &self.open else { return };
        data["item_id"] = id.as_str().into();
        data["output_index"] = self.output.len().into();
        if !matches!(item, Item::Call { .. }) {
            data["content_index"] = 0.into();
        }
        self.event(name, data, out);
    }

    fn open(&mut self, item: Item, out: &mut Vec<SseEvent>) {
        self.close(out);
        let id = item.new_id();
        let added = json!({ "output_index": self.output.len(), "item": item.json(&id, "in_progress") });
        let part = match &item {
            Item::Message { .. } => Some(text_part("")),
            Item::Reasoning { .. } => Some(json!({ "type": "reasoning_text", "text": "" })),
            Item::Call { .. } => None,
        };
        self.open = Some((id, item));
        self.event("response.output_item.added", added, out);
        if let Some(part) = part {
            self.item_event("response.content_part.added", json!({ "part": part }), out);
        }
    }

    fn close(&mut self, out: &mut Vec<SseEvent>) {
        let Some((_, item)) = self.open.clone() else { return };
        match &item {
            Item::Message { text } => {
                self.item_event("response.output_text.done", json!({ "text": text, "logprobs": [] }), out);
                self.item_event("response.content_part.done", json!({ "part": text_part(text) }), out);
            }
            Item::Reasoning { text } => {
                self.item_event("response.reasoning_text.done", json!({ "text": text }), out);
                let part = json!({ "type": "reasoning_text", "text": text });
                self.item_event("response.content_part.done", json!({ "part": part }), out);
            }
            Item::Call { name, arguments, .. } => {
                let data = json!({ "name": name, "arguments": arguments });
                self.item_event("response.function_call_arguments.done", data, out);
            }
        }
        if let Some((id, item)) = self.open.take() {
            let json = item.json(&id, item.status());
            let data = json!({ "output_index": self.output.len(), "item": json });
            self.event("response.output_item.done", data, out);
            self.output.push(json);
        }
    }

    fn take(&mut self, delta: Delta, out: &mut Vec<SseEvent>) {
        match delta {
            Delta::Reasoning(more) => {
                if !matches!(self.open, Some((_, Item::Reasoning { .. }))) {
                    self.open(Item::Reasoning { text: String::new() }, out);
                }
                if let Some((_, Item::Reasoning { text })) = &mut self.open {
                    text.push_str(&more);
                }
                self.item_event("response.reasoning_text.delta", json!({ "delta": more }), out);
            }
            Delta::Content(more) => {
                if !matches!(self.open, Some((_, Item::Message { .. }))) {
                    self.open(Item::Message { text: String::new() }, out);
                }
                if let Some((_, Item::Message { text })) = &mut self.open {
                    text.push_str(&more);
                }
                self.item_event("response.output_text.delta", json!({ "delta": more, "logprobs": [] }), out);
            }
            Delta::ToolCall { index, name } => self.open(Item::call(index, name), out),
            Delta::ToolArguments { index, text } => {
                if let Some((_, Item::Call { number, arguments, .. })) = &mut self.open
                    && *number == index
                {
                    arguments.push_str(&text);
                    self.item_event("response.function_call_arguments.delta", json!({ "delta": text }), out);
                }
            }
            Delta::ToolEnd { index, is_whole: whole } => {
                if let Some((_, Item::Call { number, is_whole, .. })) = &mut self.open
                    && *number == index
                {
                    *is_whole = whole;
                    self.close(out);
                }
            }
        }
    }
}

impl Wire for ResponseStream {
    fn begin(&mut self) -> Vec<SseEvent> {
        let mut out = Vec::new();
        for name in ["response.created", "response.in_progress"] {
            let response = self.frame.json("in_progress", Vec::new());
            self.event(name, json!({ "response": response }), &mut out);
        }
        out
    }

    fn event(&mut self, _: usize, event: AnswerEvent) -> Vec<SseEvent> {
        let mut out = Vec::new();
        match event {
            AnswerEvent::Wrote { deltas, .. } => deltas.into_iter().for_each(|delta| self.take(delta, &mut out)),
            AnswerEvent::Done(done) => {
                self.close(&mut out);
                if !self.output.iter().any(|item| item["type"] != "reasoning") {
                    // An answer without a word is a message without text.
                    self.open(Item::Message { text: String::new() }, &mut out);
                    self.close(&mut out);
                }
                self.done = Some(done);
            }
            AnswerEvent::Reading { .. } | AnswerEvent::Failed(_) => {}
        }
        out
    }

    fn end(&mut self) -> Vec<SseEvent> {
        let Some(done) = self.done.take() else { return Vec::new() };
        let mut out = Vec::new();
        let (name, response) = self.frame.ended(&done, self.output.clone());
        self.event(name, json!({ "response": response }), &mut out);
        out
    }

    fn failed(&mut self, error: &ApiError) -> Vec<SseEvent> {
        let mut out = Vec::new();
        let mut response = self.frame.json("failed", self.output.clone());
        response["error"] = json!({ "code": error.code.unwrap_or("server_error"), "message": error.message });
        self.event("response.failed", json!({ "response": response }), &mut out);
        out
    }
}
