//! Goal: requests as Codex and the official clients send them reach the template whole, and the events of an answer build the body of it.
//! Method: recorded shapes, and a replay of the events as clients do it.

use super::*;
use crate::server::queue::AnswerEvent;
use crate::server::stream::{Answer, SseEvent, Wire};
use crate::worker::protocol::{Delta, Done, EngineState, FinishReason};

fn parsed(body: &Value) -> Result<(ChatRequest, ResponseOptions), ApiError> {
    parse(body.to_string().as_bytes())
}

fn done(finish: FinishReason) -> Box<Done> {
    let zero = (0, 0.0);
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
        read_s: zero.1,
        write_s: zero.1,
        hits: zero.0,
        misses: zero.0,
        drafts_offered: zero.0,
        drafts_accepted: zero.0,
        slots_lent: 0,
        head_reloads: zero.0,
        recaptures: zero.0,
        link_bytes: zero.0,
        engine: EngineState::default(),
    })
}

#[test]
fn a_turn_of_an_agent_becomes_messages_that_templates_take() {
    let body = json!({"model": "demo", "instructions": "You code.", "stream": true, "store": false, "prompt_cache_key": "thread",
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": false, "reasoning": {"effort": "medium", "summary": "auto"},
        "max_output_tokens": 50, "tool_choice": "auto",
        "tools": [{"type": "function", "name": "shell", "description": "runs", "strict": false, "parameters": {"type": "object", "properties": {}}},
            {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {}}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"role": "user", "content": "list"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I list."}], "encrypted_content": null},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "Listing.", "annotations": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": "{\"z\":1,\"a\":2}"},
            {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{\"a"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and?"}]}]});
    let (chat, options) = parsed(&body).expect("it is sound");
    let read: Json = serde_json::from_str(
        r#"[{"role": "system", "content": "You code.\n\nRules."}, {"role": "user", "content": "list"},
        {"role": "assistant", "content": "Listing.", "reasoning_content": "I list.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": {"z": 1, "a": 2}}},
            {"id": "c2", "type": "function", "function": {"name": "shell", "arguments": "{\"a"}}]},
        {"role": "tool", "content": "a.txt", "tool_call_id": "c1"}, {"role": "tool", "content": "none", "tool_call_id": "c2"},
        {"role": "user", "content": "and?"}]"#,
    )
    .expect("JSON");
    assert_eq!(Json::Array(chat.messages), read);
    assert_eq!(chat.tools.iter().filter_map(function_name).collect::<Vec<_>>(), ["shell"]);
    assert_eq!((chat.thinking, chat.parallel_tool_calls, chat.tool_choice), (Some(true), false, ToolChoice::Auto));
    assert_eq!((chat.answer.tokens_max, chat.answer.client.as_deref()), (Some(50), Some("thread")));
    assert!(options.stream && options.repeated["instructions"] == "You code.");
}

#[test]
fn formats_and_choices_are_read() {
    let format = json!({"format": {"type": "json_schema", "name": "n", "strict": true, "schema": {"type": "object", "properties": {"b": {}, "a": {}}}}});
    let body = json!({"input": "x", "text": format, "tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}});
    let (chat, _) = parsed(&body).expect("sound");
    let Some(AnswerRule::JsonSchema(schema)) = chat.format else { panic!("{:?}", chat.format) };
    assert_eq!(serde_json::from_str::<Value>(&schema).expect("JSON"), format["format"]["schema"]);
    assert_eq!(chat.tool_choice, ToolChoice::Named("f".to_owned()));
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let with = |key: &str, value: Value| {
        let mut body = json!({"model": "demo", "input": "Hi"});
        body[key] = value;
        body
    };
    let item = |item: Value| with("input", json!([item]));
    for (body, param) in [
        (json!({}), "input"),
        (with("input", json!([])), "input"),
        (with("input", json!(7)), "input"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"type": "frog"})), "input[0].type"),
        (item(json!({"role": "king", "content": "x"})), "input[0].role"),
        (item(json!({"role": "user"})), "input[0].content"),
        (item(json!({"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]})), "input[0].content[0]"),
        (item(json!({"type": "function_call", "name": "f"})), "input[0].call_id"),
        (item(json!({"type": "function_call_output", "call_id": "c"})), "input[0].output"),
        (with("previous_response_id", json!("resp_1")), "previous_response_id"),
        (with("background", json!(true)), "background"),
        (with("tools", json!([{"type": "function"}])), "tools[0].name"),
        (with("tool_choice", json!("perhaps")), "tool_choice"),
        (with("tool_choice", json!("required")), "tool_choice"),
        (with("text", json!({"format": {"type": "json_shema"}})), "text.format.type"),
        (with("text", json!({"format": {"type": "json_schema", "name": "n"}})), "text.format.schema"),
        (with("reasoning", json!({"effort": "vast"})), "reasoning.effort"),
        (with("max_output_tokens", json!(0)), "max_output_tokens"),
    ] {
        let refused = parsed(&body).expect_err(&body.to_string());
        assert_eq!((refused.status.as_u16(), refused.param.as_deref()), (400, Some(param)), "{body}: {}", refused.message);
    }
}

fn deltas() -> Vec<Delta> {
    let mut deltas: Vec<Delta> = ["so", " so"].map(|text| Delta::Reasoning(text.to_owned())).into();
    deltas.extend(["He", "llo"].map(|text| Delta::Content(text.to_owned())));
    for (index, name, pieces) in [(0, "read", vec!["{\"a\":", " 1}"]), (1, "list", vec!["{}"])] {
        deltas.push(Delta::ToolCall { index, name: name.to_owned() });
        deltas.extend(pieces.into_iter().map(|piece| Delta::ToolArguments { index, text: piece.to_owned() }));
        deltas.push(Delta::ToolEnd { index, is_whole: true });
    }
    deltas
}

fn streamed(deltas: Vec<Delta>, finish: FinishReason, options: &ResponseOptions) -> Vec<SseEvent> {
    let mut stream = ResponseStream::new("demo", options);
    let mut events = stream.begin();
    for delta in deltas {
        events.extend(Wire::event(&mut stream, 0, AnswerEvent::Wrote { deltas: vec![delta], tokens: Vec::new() }));
    }
    events.extend(Wire::event(&mut stream, 0, AnswerEvent::Done(done(finish))));
    events.extend(stream.end());
    events
}

/// Builds the output from the small events alone and holds it against what the items' ends and the last event say.
fn replayed(events: &[SseEvent]) -> Value {
    let (mut output, mut response): (Vec<Value>, Value) = (Vec::new(), Value::Null);
    for (number, event) in events.iter().enumerate() {
        let data: Value = serde_json::from_str(&event.data).expect("JSON");
        assert_eq!((data["type"].as_str(), data["sequence_number"].as_u64()), (event.name, Some(number as u64)));
        let name = event.name.expect("a name");
        if let Some(index) = data["output_index"].as_u64() {
            let last = output.len() as u64;
            assert_eq!(index, if name == "response.output_item.added" { last } else { last - 1 });
        }
        if let Some(id) = data["item_id"].as_str() {
            assert_eq!(output.last().map(|item| &item["id"]), Some(&json!(id)));
        }
        let item = output.last_mut();
        let text = |item: Option<&mut Value>| {
            let part = &mut item.expect("an item")["content"][0];
            part["text"] = (part["text"].as_str().expect("text").to_owned() + data["delta"].as_str().expect("text")).into();
        };
        match name {
            "response.created" | "response.in_progress" => assert_eq!(data["response"]["status"], "in_progress"),
            "response.output_item.added" => output.push(data["item"].clone()),
            "response.content_part.added" => item.expect("an item")["content"] = json!([data["part"]]),
            "response.output_text.delta" | "response.reasoning_text.delta" => text(item),
            "response.function_call_arguments.delta" => {
                let item = item.expect("an item");
                item["arguments"] = (item["arguments"].as_str().expect("text").to_owned() + data["delta"].as_str().expect("text")).into();
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(item.expect("an item")["content"][0]["text"], data["text"])
            }
            "response.content_part.done" => assert_eq!(item.expect("an item")["content"][0], data["part"]),
            "response.function_call_arguments.done" => assert_eq!(item.expect("an item")["arguments"], data["arguments"]),
            "response.output_item.done" => {
                let item = item.expect("an item");
                item["status"] = data["item"]["status"].clone();
                if item["content"][0]["text"] == "" {
                    item["content"] = json!([]);
                }
                assert_eq!(*item, data["item"]);
            }
            "response.completed" | "response.incomplete" => response = data["response"].clone(),
            other => panic!("{other}"),
        }
    }
    assert_eq!(Value::Array(output), response["output"]);
    response
}

fn without_ids(mut response: Value) -> Value {
    (response["id"], response["created_at"]) = (Value::Null, Value::Null);
    for item in response["output"].as_array_mut().expect("items") {
        item["id"] = Value::Null;
        if item["type"] == "function_call" {
            assert!(item["call_id"].as_str().is_some_and(|id| id.starts_with("call_")));
            item["call_id"] = Value::Null;
        }
    }
    response
}

#[test]
fn a_stream_builds_the_body_that_a_plain_answer_is() {
    let (_, options) = parsed(&json!({"input": "Hi", "temperature": 0.5, "metadata": {"a": "b"}})).expect("sound");
    let calls = || vec![("read".to_owned(), "{\"a\": 1}".to_owned()), ("list".to_owned(), "{}".to_owned())];
    for (deltas, finish, reasoning, content, calls) in [
        (deltas(), FinishReason::ToolCalls, "so so", "Hello", calls()),
        (vec![Delta::Content("Hello".to_owned())], FinishReason::Length, "", "Hello", Vec::new()),
        (Vec::new(), FinishReason::Stop, "", "", Vec::new()),
        (vec![Delta::Reasoning("so".to_owned())], FinishReason::Stop, "so", "", Vec::new()),
    ] {
        let (reasoning, content) = (reasoning.to_owned(), content.to_owned());
        let plain = body("demo", &options, &Answer { reasoning, content, calls, tokens: Vec::new(), done: done(finish) });
        let response = replayed(&streamed(deltas, finish, &options));
        assert_eq!(without_ids(response), without_ids(plain.clone()));
        let is_cut = finish == FinishReason::Length;
        assert_eq!(plain["status"], if is_cut { "incomplete" } else { "completed" });
        assert_eq!(plain["incomplete_details"]["reason"] == "max_output_tokens", is_cut);
        assert_eq!((&plain["temperature"], &plain["metadata"]["a"]), (&json!(0.5), &json!("b")));
        assert_eq!(plain["usage"]["input_tokens_details"]["cached_tokens"], 20);
        assert_eq!(
            (&plain["usage"]["output_tokens_details"]["reasoning_tokens"], &plain["usage"]["total_tokens"]),
            (&json!(2), &json!(37))
        );
    }
}

#[test]
fn a_failure_ends_the_stream_as_failed_with_what_was_written() {
    let mut stream = ResponseStream::new("demo", &ResponseOptions { stream: true, repeated: json!({}) });
    stream.begin();
    for delta in deltas() {
        let _ = Wire::event(&mut stream, 0, AnswerEvent::Wrote { deltas: vec![delta], tokens: Vec::new() });
    }
    let events = stream.failed(&ApiError::engine("engine_lost", "gone"));
    let [SseEvent { name: Some("response.failed"), data }] = events.as_slice() else { panic!("{events:?}") };
    let data: Value = serde_json::from_str(data).expect("JSON");
    assert_eq!((&data["response"]["status"], &data["response"]["error"]["code"]), (&json!("failed"), &json!("engine_lost")));
    assert_eq!(data["response"]["output"].as_array().map(Vec::len), Some(4));
}
