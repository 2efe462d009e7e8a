//! `/v1/messages`: against a worker that plays a script, and against the bundled model.

use axum::body::Body;
use axum::http::StatusCode;
use ebbtide::reply::Delta;
use ebbtide::worker::protocol::FinishReason;
use serde_json::{Value, json};

use crate::program::{Server, merge};
use crate::scripted::{Script, finished, json_of, text_of};

fn request(fields: Value) -> Value {
    let mut body = json!({ "model": "any", "max_tokens": 64, "messages": [{ "role": "user", "content": "Hi" }] });
    merge(&mut body, fields);
    body
}

/// Names and data of a stream's events.
fn named_events(text: &str) -> Vec<(String, Value)> {
    let event = |block: &str| {
        let name = block.lines().find_map(|line| line.strip_prefix("event: "))?;
        let data = block.lines().find_map(|line| line.strip_prefix("data: "))?;
        Some((name.to_owned(), serde_json::from_str(data).expect("JSON")))
    };
    text.split("\n\n").filter_map(event).collect()
}

fn reply() -> Vec<Delta> {
    vec![
        Delta::Reasoning("Let me".to_owned()),
        Delta::Reasoning(" read.".to_owned()),
        Delta::Content("Reading.".to_owned()),
        Delta::ToolCall { index: 0, name: "read".to_owned() },
        Delta::ToolArguments { index: 0, text: "{\"path\":".to_owned() },
        Delta::ToolArguments { index: 0, text: " \"a\"}".to_owned() },
        Delta::ToolEnd { index: 0, is_whole: true },
    ]
}

#[tokio::test]
async fn thinking_text_and_calls_are_blocks_in_both_modes() {
    let mut script = Script::ready(8).await;
    let tool = json!({ "name": "read", "input_schema": { "type": "object", "properties": { "path": { "type": "string" } } } });
    let fields = json!({ "tools": [tool], "thinking": { "type": "enabled", "budget_tokens": 1024 } });
    for streamed in [false, true] {
        let mut body = request(fields.clone());
        body["stream"] = streamed.into();
        let response = script.post("/v1/messages", &body);
        let generate = script.generate().await;
        assert_eq!((generate.tools.len(), generate.reasoning_tokens_max, generate.tokens_max), (1, Some(1024), 64));
        reply().into_iter().for_each(|delta| script.wrote(generate.id, delta));
        script.done(generate.id, FinishReason::ToolCalls);
        let response = finished(response).await;
        assert_eq!(response.status(), StatusCode::OK);
        if !streamed {
            let message = json_of(response).await;
            let kinds: Vec<&str> =
                message["content"].as_array().expect("blocks").iter().filter_map(|block| block["type"].as_str()).collect();
            assert_eq!(kinds, ["thinking", "text", "tool_use"]);
            assert_eq!((&message["content"][2]["input"]["path"], &message["stop_reason"]), (&json!("a"), &json!("tool_use")));
            continue;
        }
        let events = named_events(&text_of(response).await);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        let block = |deltas: usize| [vec!["content_block_start"], vec!["content_block_delta"; deltas], vec!["content_block_stop"]].concat();
        let expected = [vec!["message_start"], block(3), block(1), block(2), vec!["message_delta", "message_stop"]].concat();
        assert_eq!(names, expected, "a thought ends with its signature, and no block is opened twice");
        let last = &events[events.len() - 2].1;
        assert_eq!((&last["delta"]["stop_reason"], &last["usage"]["output_tokens"]), (&json!("tool_use"), &json!(3)));
    }
}

#[tokio::test]
async fn a_stop_sequence_is_named_and_a_failure_is_an_error_of_this_form() {
    let mut script = Script::ready(8).await;
    let response = script.post("/v1/messages", &request(json!({ "stop_sequences": ["ONE", "TWO"] })));
    let generate = script.generate().await;
    assert_eq!(generate.stop_strings, ["ONE", "TWO"]);
    script.wrote(generate.id, Delta::Content("x".to_owned()));
    script.done(generate.id, FinishReason::StopString(1));
    let message = json_of(finished(response).await).await;
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!("TWO")));
    for (body, status) in [("{", 400), ("{\"messages\": []}", 400), ("[]", 400), ("\u{1}", 400)] {
        let refused = script.send("POST", "/v1/messages", Body::from(body)).await;
        assert_eq!(refused.status().as_u16(), status);
        let error = json_of(refused).await;
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")), "{body}");
    }
    let long = request(json!({ "system": "word ".repeat(5000) }));
    let refused = json_of(finished(script.post("/v1/messages", &long)).await).await;
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(message.contains("2048"), "{message}");
}

#[tokio::test]
async fn counting_waits_for_nobody() {
    let mut script = Script::ready(8).await;
    let running = script.post("/v1/messages", &request(json!({})));
    let generate = script.generate().await;
    // The worker is busy, and says nothing.
    let counted = json_of(finished(script.post("/v1/messages/count_tokens", &request(json!({})))).await).await;
    assert_eq!(counted["input_tokens"], generate.prompt.len());
    script.done(generate.id, FinishReason::Stop);
    finished(running).await;
}

#[test]
fn the_count_is_what_an_answer_says_it_was() {
    let server = Server::start(&[]);
    for index in 0..4 {
        let body = request(json!({
            "max_tokens": 3,
            "system": "You are a prophet.",
            "tools": [{ "name": "f", "input_schema": { "type": "object" } }],
            "messages": [{ "role": "user", "content": "verily ".repeat(index * 9 + 1) }, { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "hm", "signature": "x" }, { "type": "tool_use", "id": "t", "name": "f", "input": {} }] },
                { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t", "content": "done" }] }],
        }));
        let counted = server.post("/v1/messages/count_tokens", &body).json()["input_tokens"].clone();
        let answer = server.post("/v1/messages", &body).json();
        assert!(counted.as_u64().is_some_and(|count| count > 10), "{counted}");
        assert_eq!(answer["usage"]["input_tokens"], counted, "{answer}");
        assert_eq!((&answer["stop_reason"], &answer["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(3)));
        // The same again is known, but for its last token.
        let again = server.post("/v1/messages", &body).json();
        assert_eq!(again["usage"]["cache_read_input_tokens"].as_u64(), counted.as_u64().map(|count| count - 1));
        assert_eq!(again["content"][0]["type"], "text");
    }
}
