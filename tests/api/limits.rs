//! Requests that are none, or are too much: each is answered with 4xx and a JSON error, and the server goes on.

use std::io::Write;
use std::net::Shutdown;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::{connect, exchange, request, response};
use crate::program::Server;
use crate::scripted::{Script, json_of};

const POSTS: [&str; 7] =
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize"];

/// A body with one field at fault, and the field.
fn at_fault() -> Vec<(Value, &'static str)> {
    let mut cases = Vec::new();
    for field in
        ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repeat_penalty", "top_k", "max_tokens", "n", "seed"]
    {
        for value in [json!("0.7"), json!(true), json!([1]), json!({}), json!(-1e30), json!(1e300)] {
            cases.push((json!({ field: value }), field));
        }
    }
    let more = [
        (json!({ "top_p": 0 }), "top_p"),
        (json!({ "top_p": 1.01 }), "top_p"),
        (json!({ "temperature": -0.1 }), "temperature"),
        (json!({ "max_tokens": 0 }), "max_tokens"),
        (json!({ "max_tokens": 1.5 }), "max_tokens"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 129 }), "n"),
        (json!({ "stop": "" }), "stop"),
        (json!({ "stop": [""] }), "stop"),
        (json!({ "stop": [null] }), "stop"),
        (json!({ "stop": 7 }), "stop"),
        (json!({ "stop": vec!["x"; 50] }), "stop"),
        (json!({ "stop": "x".repeat(10_000) }), "stop"),
        (json!({ "stream": "yes" }), "stream"),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options"),
        (json!({ "stream": true, "stream_options": { "include_usage": 1 } }), "stream_options.include_usage"),
        (json!({ "logit_bias": { "5": 1 } }), "logit_bias"),
        (json!({ "user": 7 }), "user"),
    ];
    cases.extend(more);
    cases
}

#[tokio::test]
async fn a_field_at_fault_is_named() {
    let mut script = Script::ready(8).await;
    let chat_only = [
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs"),
        (json!({ "logprobs": 3 }), "logprobs"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": null }), "messages"),
        (json!({ "messages": "hi" }), "messages"),
        (json!({ "messages": vec![json!({ "role": "user", "content": "x" }); 10_001] }), "messages"),
        (json!({ "tools": [{ "type": "retrieval" }] }), "tools[0].type"),
        (json!({ "tools": [{ "type": "function", "function": {} }] }), "tools[0].function.name"),
        (json!({ "response_format": { "type": "json_shema" } }), "response_format.type"),
        (json!({ "response_format": {} }), "response_format.type"),
        (json!({ "response_format": "json" }), "response_format"),
        (json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": {} } } }), "response_format.json_schema.name"),
        (
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": null } } }),
            "response_format.json_schema.schema",
        ),
        (json!({ "response_format": { "type": "regex", "pattern": "(" } }), "response_format"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "tool_choice": "perhaps" }), "tool_choice"),
        (json!({ "reasoning_effort": "huge" }), "reasoning_effort"),
        (json!({ "functions": [{ "name": "f" }] }), "functions"),
    ];
    let completion_only = [
        (json!({ "prompt": null }), "prompt"),
        (json!({ "prompt": "" }), "prompt"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [[]] }), "prompt"),
        (json!({ "prompt": [1, "x"] }), "prompt"),
        (json!({ "prompt": [4_000_000] }), "prompt"),
        (json!({ "prompt": vec!["x"; 17] }), "prompt"),
        (json!({ "logprobs": 21 }), "logprobs"),
        (json!({ "echo": true }), "echo"),
        (json!({ "suffix": "x" }), "suffix"),
        (json!({ "best_of": 2 }), "best_of"),
    ];
    let routes = [
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "Hi" }] }), &chat_only[..]),
        ("/v1/completions", json!({ "prompt": "Hi" }), &completion_only[..]),
    ];
    for (path, good, only) in routes {
        for (fields, param) in at_fault().iter().chain(only) {
            let mut body = good.clone();
            for (name, value) in fields.as_object().expect("fields") {
                body[name] = value.clone();
            }
            let refused = script.send("POST", path, body.to_string()).await;
            assert_eq!(refused.status(), 400, "{path} {fields}");
            let error = json_of(refused).await["error"].clone();
            assert_eq!(error["param"].as_str(), Some(*param), "{path}: {fields}: {error}");
            assert_eq!(error["type"], "invalid_request_error");
        }
    }
    assert!(script.is_idle(), "nothing of it reached the worker");
}

#[tokio::test]
async fn what_is_no_json_is_refused_on_every_address() {
    let mut script = Script::ready(8).await;
    let deep = format!("{{\"messages\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    let bodies: Vec<Vec<u8>> = vec![
        b"".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"x\"".to_vec(),
        b"{".to_vec(),
        b"{\"temperature\":NaN}".to_vec(),
        b"{\"temperature\":Infinity}".to_vec(),
        b"{\"temperature\":1e999}".to_vec(),
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}".to_vec(),
        b"{\"prompt\":\"\\ud800\"}".to_vec(),
        b"\xef\xbb\xbf{}".to_vec(),
        deep.into_bytes(),
        vec![0; 1000],
    ];
    for path in POSTS {
        for body in &bodies {
            let refused = script.send("POST", path, body.clone()).await;
            assert_eq!(refused.status(), 400, "{path} {:?}", String::from_utf8_lossy(&body[..body.len().min(40)]));
            assert!(json_of(refused).await["error"]["message"].is_string());
        }
    }
    for (method, path, status) in
        [("GET", "/v1/chat/completions", 405), ("POST", "/health", 405), ("GET", "/nowhere", 404), ("POST", "/v1/../etc/passwd", 404)]
    {
        let refused = script.send(method, path, "").await;
        assert_eq!(refused.status(), status, "{method} {path}");
        assert!(json_of(refused).await["error"]["code"].is_string());
    }
    assert!(script.is_idle());
}

/// Several fields are wrong, so that no damage makes it a good one: nobody would answer that. A parser of requests is made to stumble by what a generator thinks of, and must not.
#[tokio::test]
async fn damaged_requests_never_break_the_server() {
    let script = Script::ready(8).await;
    let good = json!({
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }, { "role": "assistant", "content": "Yes",
        "tool_calls": [{ "id": "1", "function": { "name": "f", "arguments": "{}" } }] }, { "role": "tool", "content": "7" }],
        "temperature": 0.5, "stop": ["x"], "tools": [{ "type": "function", "function": { "name": "f", "parameters": {} } }], "n": "wrong",
        "seed": "wrong", "top_p": "wrong", "stream": "wrong", "max_tokens": "wrong",
    })
    .to_string()
    .into_bytes();
    let mut state = 88172645463325252u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state % below as u64).expect("small")
    };
    for _ in 0..3000 {
        let mut body = good.clone();
        for _ in 0..=random(3) {
            let place = random(body.len());
            match random(4) {
                0 => body.truncate(place),
                1 => body[place] = u8::try_from(random(256)).expect("a byte"),
                2 => body.insert(place, b"{}[]\",:0-e\\"[random(11)]),
                _ => drop(body.remove(place)),
            }
            if body.is_empty() {
                break;
            }
        }
        let refused = script.send("POST", "/v1/chat/completions", body.clone()).await;
        assert_eq!(refused.status(), 400, "{}", String::from_utf8_lossy(&body));
    }
}

#[test]
fn too_much_and_too_slow_is_refused_and_the_server_lives() {
    let server = Server::start(&[]);
    let address = server.address;
    // A body that says it is too long is not read.
    for path in POSTS {
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 104857600\r\n\r\n");
        let refused = exchange(address, head.as_bytes()).expect("an answer before the body");
        assert_eq!(refused.status, 413, "{path}");
        let error = refused.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|message| message.contains("67108864")), "{error}");
    }
    // One that does not say is read up to the bound.
    let mut stream = connect(address);
    stream
        .write_all(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        .expect("it listens");
    let chunk = [format!("{:x}\r\n", 1 << 20).as_bytes(), &vec![b' '; 1 << 20], b"\r\n"].concat();
    for _ in 0..65 {
        if stream.write_all(&chunk).is_err() {
            break;
        }
    }
    assert_eq!(response(stream).expect("an answer").status, 413);
    // A large body within the bound comes to where its tokens are counted.
    let large = json!({ "messages": [{ "role": "user", "content": "word ".repeat(600_000) }] }).to_string();
    let refused = server.send("POST", "/v1/chat/completions", &[], large.as_bytes());
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (400, Some("context_length_exceeded")));

    // Headers.
    let long = "x".repeat(40 << 10);
    assert_eq!(server.send("GET", "/v1/models", &[("x-long", &long)], b"").status, 431);
    let many: Vec<(String, String)> = (0..200).map(|index| (format!("x-{index}"), "y".to_owned())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let refused = server.send("GET", "/v1/models", &many, b"");
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (431, Some("headers_too_large")));
    // A flood past all bounds is cut off.
    let mut flood = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n".to_vec();
    for index in 0..20_000 {
        flood.extend(format!("x-{index}: {index}\r\n").bytes());
    }
    flood.extend(b"\r\n");
    if let Some(refused) = exchange(address, &flood) {
        assert!((400..500).contains(&refused.status), "{}", refused.status);
    }
    // No HTTP at all.
    if let Some(refused) = exchange(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n") {
        assert_eq!(refused.status, 400);
    }

    // A body that stops on its way.
    let whole = request("POST", "/v1/completions", &[], br#"{"prompt":"Hi","max_tokens":1}"#);
    let mut slow = connect(address);
    slow.write_all(&whole[..whole.len() - 5]).expect("it listens");
    let began = Instant::now();
    let refused = response(slow).expect("an answer");
    assert_eq!(refused.status, 408);
    assert_eq!(refused.json()["error"]["code"], "body_too_slow");
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    // A body that breaks off.
    let mut broken = connect(address);
    broken.write_all(&whole[..whole.len() - 5]).expect("it listens");
    broken.shutdown(Shutdown::Both).expect("it is open");

    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "Hi", "max_tokens": 1 })).status, 200);
    assert_eq!(server.status()["worker"]["starts"], 1);
}
