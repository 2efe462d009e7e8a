//! Goal: requests as the official clients and agents send them reach the template whole, and their answers are the events these clients
//! take. Method: recorded shapes, and a small state machine over the events.

use super::*;
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::worker::protocol::{Delta, Done, EngineState, FinishReason};
use serde_json::{Value, json};

fn parsed(body: &Value) -> Result<(ChatRequest, MessageOptions), ApiError> {
    parse(body.to_string().as_bytes())
}

/// A minimal request with one thing different.
fn with(key: &str, value: Value) -> Value {
    let mut body = json!({"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]});
    body[key] = value;
    body
}

fn done(finish: FinishReason) -> Box<Done> {
    Box::new(Done {
        finish,
        prompt_tokens: 30,
        reused_tokens: 20,
        common_tokens: 20,
        completion_tokens: 7,
        reasoning_tokens: 2,
        way: String::new(),
        way_reason: String::new(),
        chunk: 0,
        block: 0,
        read_s: 0.0,
        write_s: 0.0,
        hits: 0,
        misses: 0,
        drafts_offered: 0,
        drafts_accepted: 0,
        slots_lent: 0,
        head_reloads: 0,
        recaptures: 0,
        link_bytes: 0,
        engine: EngineState::default(),
    })
}

#[test]
fn a_turn_of_an_agent_becomes_messages_that_templates_take() {
    let body = json!({"model": "x", "max_tokens": 100, "stream": true, "metadata": {"user_id": "me"}, "temperature": 0.5,
        "stop_sequences": ["END"], "thinking": {"type": "enabled", "budget_tokens": 2048},
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."}],
        "tools": [{"name": "read", "description": "reads", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "read it"}, {"type": "text", "text": "now"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I read.", "signature": "s"}, {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"z": 1, "a": 2}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": true}, {"type": "text", "text": "and?"}]}]});
    let (chat, options) = parsed(&body).expect("it is sound");
    let read: Json = serde_json::from_str(
        r#"[{"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "read it\nnow"},
        {"role": "assistant", "content": "Reading.", "reasoning_content": "I read.",
         "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "read", "arguments": {"z": 1, "a": 2}}}]},
        {"role": "tool", "content": "A\nB", "tool_call_id": "t1"}, {"role": "tool", "content": "", "tool_call_id": "t2"},
        {"role": "user", "content": "and?"}]"#,
    )
    .expect("JSON");
    assert_eq!(Json::Array(chat.messages), read);
    assert_eq!(chat.tools[0].get("function").and_then(|function| function.get("name")), Some(&Json::from("read")));
    assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Required, false));
    assert_eq!((chat.thinking, chat.reasoning_tokens_max), (Some(true), Some(2048)));
    assert_eq!((chat.answer.tokens_max, chat.answer.client.as_deref(), chat.answer.n), (Some(100), Some("me"), 1));
    assert_eq!(options, MessageOptions { stream: true, marks_cache: true, stops: vec!["END".to_owned()] });
}

#[test]
fn counting_reads_the_same_conversation() {
    let mut body = with("tools", json!([{"name": "f", "input_schema": {"type": "object"}}]));
    body["system"] = "Be brief.".into();
    let (asked, _) = parsed(&body).expect("sound");
    body.as_object_mut().expect("an object").remove("max_tokens");
    let counted = parse_count(body.to_string().as_bytes()).expect("it needs no max_tokens");
    assert_eq!((counted.messages, counted.tools, counted.thinking), (asked.messages, asked.tools, asked.thinking));
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let message = |content: Value| with("messages", json!([{"role": "user", "content": content}]));
    let mut no_limit = with("model", json!("x"));
    no_limit.as_object_mut().expect("an object").remove("max_tokens");
    for (body, param) in [
        (no_limit, "max_tokens"),
        (with("max_tokens", json!(0)), "max_tokens"),
        (with("messages", json!([])), "messages"),
        (with("messages", json!("hi")), "messages"),
        (with("messages", json!([{"role": "king", "content": "x"}])), "messages[0].role"),
        (with("messages", json!([{"role": "user"}])), "messages[0].content"),
        (message(json!([])), "messages[0].content"),
        (message(json!([{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}])), "messages[0].content[0]"),
        (message(json!([{"type": "text"}])), "messages[0].content[0].text"),
        (message(json!([{"type": "tool_use", "id": "a", "name": "b", "input": {}}])), "messages[0].content[0]"),
        (message(json!([{"type": "tool_result", "content": "x"}])), "messages[0].content[0].tool_use_id"),
        (with("system", json!(7)), "system"),
        (with("tools", json!([{"type": "web_search_20250305", "name": "web_search"}])), "tools[0].type"),
        (with("tools", json!([{"name": "f"}])), "tools[0].input_schema"),
        (with("tool_choice", json!({"type": "any"})), "tool_choice"),
        (with("tool_choice", json!({"type": "tool", "name": "f"})), "tool_choice"),
        (with("thinking", json!({"type": "perhaps"})), "thinking.type"),
        (with("temperature", json!(-1)), "temperature"),
        (with("stop_sequences", json!([""])), "stop_sequences"),
    ] {
        let refused = parsed(&body).expect_err(&body.to_string());
        assert_eq!((refused.status.as_u16(), refused.param.as_deref()), (400, Some(param)), "{body}: {}", refused.message);
        assert_eq!(refused.anthropic_body()["error"]["type"], "invalid_request_error");
    }
}

/// Checks the order of events as clients do, and returns the message that they make of them.
fn replayed(events: &[SseEvent]) -> Value {
    let mut message = Value::Null;
    let mut open = None;
    let mut partial = String::new();
    for event in events {
        let data: Value = serde_json::from_str(&event.data).expect("JSON");
        assert_eq!(data["type"].as_str(), event.name, "the type stands in both places");
        match event.name.expect("a name") {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().expect("after the start");
                assert_eq!((open, data["index"].as_u64()), (None, Some(blocks.len() as u64)));
                open = Some(blocks.len());
                blocks.push(data["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let index = open.expect("an open block");
                assert_eq!(data["index"].as_u64(), Some(index as u64));
                let (block, delta) = (&mut message["content"][index], &data["delta"]);
                let more = |block: &mut Value, key: &str| {
                    block[key] = (block[key].as_str().expect("text").to_owned() + delta[key].as_str().expect("text")).into();
                };
                match (delta["type"].as_str().expect("a type"), block["type"].as_str().expect("a type").to_owned().as_str()) {
                    ("text_delta", "text") => more(block, "text"),
                    ("thinking_delta", "thinking") => more(block, "thinking"),
                    ("signature_delta", "thinking") => more(block, "signature"),
                    ("input_json_delta", "tool_use") => partial += delta["partial_json"].as_str().expect("text"),
                    other => panic!("{other:?}"),
                }
            }
            "content_block_stop" => {
                let index = open.take().expect("an open block");
                assert_eq!(data["index"].as_u64(), Some(index as u64));
                let block = &mut message["content"][index];
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&partial).expect("JSON");
                }
            }
            "message_delta" => {
                assert_eq!(open, None);
                for key in ["stop_reason", "stop_sequence"] {
                    message[key] = data["delta"][key].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

fn deltas() -> Vec<Delta> {
    let call = |index, name: &str, pieces: &[&str]| {
        let mut deltas = vec![Delta::ToolCall { index, name: name.to_owned() }];
        deltas.extend(pieces.iter().map(|&piece| Delta::ToolArguments { index, text: piece.to_owned() }));
        deltas.push(Delta::ToolEnd { index, is_whole: true });
        deltas
    };
    let mut deltas: Vec<Delta> = ["so", " so"].map(|text| Delta::Reasoning(text.to_owned())).into();
    deltas.extend(["He", "llo"].map(|text| Delta::Content(text.to_owned())));
    deltas.extend(call(0, "read", &["{\"a\":", " 1}"]));
    deltas.extend(call(1, "list", &["{}"]));
    deltas
}

fn without_ids(mut message: Value) -> Value {
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().expect("blocks") {
        if block["type"] == "tool_use" {
            assert!(block["id"].as_str().is_some_and(|id| id.starts_with("toolu_")));
            block["id"] = Value::Null;
        }
    }
    message
}

#[test]
fn a_stream_makes_the_message_that_a_plain_answer_is() {
    let options = MessageOptions { stops: vec!["END".to_owned()], ..MessageOptions::default() };
    for (finish, reason) in
        [(FinishReason::ToolCalls, "tool_use"), (FinishReason::Length, "max_tokens"), (FinishReason::StopString(0), "stop_sequence")]
    {
        let mut stream = MessageStream::new("demo", options.clone(), 30);
        let mut events = stream.begin();
        for delta in deltas() {
            events.extend(stream.event(0, AnswerEvent::Wrote { deltas: vec![delta], tokens: Vec::new() }));
        }
        events.extend(stream.event(0, AnswerEvent::Done(done(finish))));
        events.extend(stream.end());
        assert_eq!(events.last().and_then(|event| event.name), Some("message_stop"));
        let streamed = replayed(&events);
        let calls = vec![("read".to_owned(), "{\"a\": 1}".to_owned()), ("list".to_owned(), "{}".to_owned())];
        let (reasoning, content) = ("so so".to_owned(), "Hello".to_owned());
        let answer = Answer { reasoning, content, calls, tokens: Vec::new(), done: done(finish) };
        let plain = body("demo", &options, &answer);
        assert_eq!(without_ids(streamed), without_ids(plain.clone()));
        assert_eq!(
            (&plain["stop_reason"], &plain["stop_sequence"]),
            (&json!(reason), &if reason == "stop_sequence" { json!("END") } else { Value::Null })
        );
        assert_eq!(plain["content"].as_array().map(Vec::len), Some(4));
    }
}

#[test]
fn tokens_that_were_known_are_told_as_the_client_counts_them() {
    let answer =
        Answer { reasoning: String::new(), content: "x".to_owned(), calls: Vec::new(), tokens: Vec::new(), done: done(FinishReason::Stop) };
    let usage = |marks_cache| body("demo", &MessageOptions { marks_cache, ..MessageOptions::default() }, &answer)["usage"].clone();
    assert_eq!((usage(false)["input_tokens"].as_u64(), usage(false)["cache_read_input_tokens"].as_u64()), (Some(30), Some(20)));
    assert_eq!((usage(true)["input_tokens"].as_u64(), usage(true)["cache_read_input_tokens"].as_u64()), (Some(10), Some(20)));
    assert_eq!(usage(true)["output_tokens"], 7);
}

#[test]
fn a_failure_in_the_stream_is_an_error_event_and_nothing_else() {
    let mut stream = MessageStream::new("demo", MessageOptions::default(), 30);
    let events = stream.failed(&ApiError::unavailable("engine_dead", "gone"));
    let [SseEvent { name: Some("error"), data }] = events.as_slice() else { panic!("{events:?}") };
    let data: Value = serde_json::from_str(data).expect("JSON");
    assert_eq!(data, json!({"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}));
}

#[test]
fn a_call_that_was_broken_off_is_not_lost() {
    let calls = vec![("read".to_owned(), "{\"a\": \"b".to_owned())];
    let answer =
        Answer { reasoning: String::new(), content: String::new(), calls, tokens: Vec::new(), done: done(FinishReason::ToolCalls) };
    let message = body("demo", &MessageOptions::default(), &answer);
    assert_eq!(message["content"], json!([{"type": "text", "text": "read({\"a\": \"b"}]));
    assert_eq!(message["stop_reason"], "end_turn");
}
