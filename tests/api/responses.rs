//! `/v1/responses`: against a worker that plays a script, and against the bundled model.

use ebbtide::reply::{AnswerRule, Delta};
use ebbtide::worker::protocol::FinishReason;
use serde_json::{Value, json};

use crate::http::events;
use crate::program::Server;
use crate::scripted::{Script, finished, json_of, text_of};

#[tokio::test]
async fn an_agents_turn_streams_events_up_to_completed() {
    let mut script = Script::ready(8).await;
    let tool = json!({ "type": "function", "name": "shell", "parameters": { "type": "object", "properties": {} } });
    let body = json!({ "model": "demo", "instructions": "Code.", "input": [{ "role": "user", "content": [{ "type": "input_text", "text": "ls" }] }],
        "tools": [tool, { "type": "web_search" }], "stream": true, "store": false });
    let response = script.post("/v1/responses", &body);
    let generate = script.generate().await;
    assert_eq!(generate.tools.len(), 1);
    script.wrote(generate.id, Delta::Content("Listing.".to_owned()));
    script.wrote(generate.id, Delta::ToolCall { index: 0, name: "shell".to_owned() });
    script.wrote(generate.id, Delta::ToolArguments { index: 0, text: "{}".to_owned() });
    script.done(generate.id, FinishReason::ToolCalls);
    let text = text_of(finished(response).await).await;
    let data: Vec<Value> = events(&text).iter().map(|data| serde_json::from_str(data).expect("JSON")).collect();
    let names: Vec<&str> = data.iter().filter_map(|data| data["type"].as_str()).collect();
    for needed in ["response.created", "response.output_item.added", "response.output_text.delta", "response.output_item.done"] {
        assert!(names.contains(&needed), "{names:?}");
    }
    assert_eq!((names.first(), names.last()), (Some(&"response.created"), Some(&"response.completed")));
    assert!(text.contains("event: response.output_text.delta\ndata: "), "each event has its name");
    let usage = &data.last().expect("events")["response"]["usage"];
    assert_eq!(
        (&usage["input_tokens_details"]["cached_tokens"], &usage["output_tokens_details"]["reasoning_tokens"]),
        (&json!(4), &json!(1))
    );
}

#[tokio::test]
async fn a_worker_that_fails_ends_the_stream_as_failed() {
    let mut script = Script::ready(8).await;
    let response = script.post("/v1/responses", &json!({ "input": "Hi", "stream": true }));
    let generate = script.generate().await;
    script.wrote(generate.id, Delta::Content("Hal".to_owned()));
    let kind = ebbtide::worker::protocol::FailKind::Engine;
    script.say(ebbtide::worker::protocol::FromWorker::Failed { id: generate.id, kind, message: "a fault".to_owned() });
    let text = text_of(finished(response).await).await;
    let last: Value = serde_json::from_str(events(&text).last().expect("events")).expect("JSON");
    assert_eq!((&last["type"], &last["response"]["error"]["message"]), (&json!("response.failed"), &json!("a fault")));
    assert!(!text.contains("response.completed"));
    let refused = json_of(finished(script.post("/v1/responses", &json!({ "input": "x", "previous_response_id": "resp_1" }))).await).await;
    assert_eq!(refused["error"]["param"], "previous_response_id");
    let format = json!({ "format": { "type": "json_schema", "name": "n", "schema": { "type": "frog" } } });
    let refused = json_of(finished(script.post("/v1/responses", &json!({ "input": "x", "text": format }))).await).await;
    assert_eq!(refused["error"]["param"], "text.format.schema");
}

#[tokio::test]
async fn the_worker_is_told_what_the_answer_has_to_be_like() {
    let mut script = Script::ready(8).await;
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": schema } });
    let cases = [
        (json!({ "response_format": { "type": "json_object" } }), Some("object")),
        (json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }), Some("schema")),
        (json!({ "response_format": { "type": "regex", "pattern": "a+" } }), Some("regex")),
        (json!({ "response_format": { "type": "text" } }), None),
        (json!({ "tools": [tool("f"), tool("g")], "tool_choice": "required" }), Some("f,g")),
        (json!({ "tools": [tool("f"), tool("g")], "tool_choice": { "type": "function", "function": { "name": "g" } } }), Some("g")),
        (json!({ "tools": [tool("f")], "tool_choice": "none" }), None),
        (json!({ "tools": [tool("f")] }), None),
    ];
    for (fields, expected) in cases {
        let is_none = fields["tool_choice"] == "none";
        let response = script.chat(fields.clone());
        let generate = script.generate().await;
        let rule = match &generate.rule {
            None => None,
            Some(AnswerRule::JsonObject) => Some("object".to_owned()),
            Some(AnswerRule::JsonSchema(text)) => {
                assert_eq!(serde_json::from_str::<Value>(text).expect("JSON"), schema);
                Some("schema".to_owned())
            }
            Some(AnswerRule::Regex(_)) => Some("regex".to_owned()),
            Some(AnswerRule::Lark(_)) => Some("lark".to_owned()),
            Some(AnswerRule::ToolCall { tools, .. }) => Some(tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>().join(",")),
        };
        assert_eq!(rule.as_deref(), expected, "{fields}");
        assert_eq!(generate.tools.is_empty(), is_none || fields["tools"].is_null(), "{fields}");
        script.done(generate.id, FinishReason::Stop);
        finished(response).await;
    }
    for (fields, param) in [
        (json!({ "response_format": { "type": "json_shema" } }), "response_format.type"),
        (json!({ "response_format": {} }), "response_format.type"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": null } } }),
            "response_format.json_schema.schema",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": 7 } } }),
            "response_format.json_schema.schema",
        ),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": {
            "$defs": { "A": { "$ref": "#/$defs/A" } }, "$ref": "#/$defs/A" } } } }),
            "response_format",
        ),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tool_choice": "perhaps" }), "tool_choice"),
        (json!({ "tools": [tool("f")], "tool_choice": { "type": "function", "function": { "name": "h" } } }), "tool_choice"),
    ] {
        let refused = finished(script.chat(fields.clone())).await;
        assert_eq!(refused.status().as_u16(), 400, "{fields}");
        assert_eq!(json_of(refused).await["error"]["param"], param, "{fields}");
    }
}

#[test]
fn the_bundled_model_writes_what_it_is_asked_for() {
    let server = Server::start(&[]);
    let schema = json!({ "type": "object", "additionalProperties": false, "required": ["verse", "word"], "properties": {
        "verse": { "type": "integer", "minimum": 1, "maximum": 99 }, "word": { "type": "string", "maxLength": 9 } } });
    let check = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(value["verse"].as_u64().is_some_and(|verse| (1..100).contains(&verse)), "{text}");
        assert!(value["word"].as_str().is_some_and(|word| word.chars().count() <= 9), "{text}");
    };
    for seed in 0..3 {
        let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "strict": true, "schema": schema } });
        let sampling = json!({ "max_tokens": 200, "temperature": 1, "seed": seed });
        let mut fields = sampling.clone();
        fields["response_format"] = format;
        let answer = server.chat(fields).json();
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        check(answer["choices"][0]["message"]["content"].as_str().expect("text"));
        let mut fields = sampling;
        fields["tools"] = json!([{ "type": "function", "function": { "name": "note", "parameters": schema } }]);
        fields["tool_choice"] = "required".into();
        fields["parallel_tool_calls"] = false.into();
        let answer = server.chat(fields).json();
        let choice = &answer["choices"][0];
        assert_eq!(
            (&choice["finish_reason"], choice["message"]["tool_calls"].as_array().map(Vec::len)),
            (&json!("tool_calls"), Some(1)),
            "{answer}"
        );
        assert_eq!(
            (&choice["message"]["tool_calls"][0]["function"]["name"], &choice["message"]["content"]),
            (&json!("note"), &Value::Null)
        );
        check(choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().expect("text"));
    }
    let response = server.post("/v1/responses", &json!({ "input": "In the beginning", "max_output_tokens": 6, "temperature": 0 })).json();
    assert_eq!((&response["status"], &response["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
    let text = response["output"][0]["content"][0]["text"].as_str().expect("text");
    let chat = server.chat(json!({ "max_tokens": 6 })).json();
    assert_eq!(chat["choices"][0]["message"]["content"], text, "the same conversation has the same answer in both forms");
}
