//! Streams and queue, with a worker that plays a script.

use std::time::Duration;

use ebbtide::reply::Delta;
use ebbtide::worker::protocol::{FailKind, FinishReason, FromWorker, ToWorker};
use ebbtide::worker::supervisor::WorkerEvent;
use http_body::Body as _;
use serde_json::{Value, json};

use crate::http::events;
use crate::scripted::{Script, finished, json_of, ready, text_of};

fn chunks(text: &str) -> Vec<Value> {
    events(text).iter().filter(|event| *event != "[DONE]").map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

#[tokio::test]
async fn thoughts_text_and_calls_come_in_their_own_fields_streamed_or_not() {
    let tools = json!([{ "type": "function", "function": { "name": "read", "parameters": { "type": "object" } } }]);
    let play = |script: &Script, id| {
        script.wrote(id, Delta::Reasoning("Hm".to_owned()));
        script.wrote(id, Delta::Content("Let me ".to_owned()));
        script.wrote(id, Delta::Content("see".to_owned()));
        for index in 0..2 {
            script.wrote(id, Delta::ToolCall { index, name: "read".to_owned() });
            script.wrote(id, Delta::ToolArguments { index, text: "{\"path\":".to_owned() });
            script.wrote(id, Delta::ToolArguments { index, text: format!("\"{index}\"}}") });
            script.wrote(id, Delta::ToolEnd { index, is_whole: true });
        }
        script.done(id, FinishReason::ToolCalls);
    };
    let mut script = Script::ready(8).await;
    let whole = script.chat(json!({ "tools": tools }));
    let order = script.generate().await;
    assert_eq!(order.tools.len(), 1, "the parser must know of them");
    play(&script, order.id);
    let whole = json_of(finished(whole).await).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!((message["reasoning_content"].as_str(), message["content"].as_str()), (Some("Hm"), Some("Let me see")));
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 1);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 4);

    let stream = script.chat(json!({ "tools": tools, "stream": true }));
    let order = script.generate().await;
    play(&script, order.id);
    let text = text_of(finished(stream).await).await;
    let mut calls: Vec<(String, String, String)> = Vec::new();
    let (mut content, mut reasoning) = (String::new(), String::new());
    for chunk in chunks(&text) {
        let delta = &chunk["choices"][0]["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().expect("an index")).expect("small");
            if let (Some(id), Some(name)) = (call["id"].as_str(), call["function"]["name"].as_str()) {
                assert_eq!(calls.len(), index, "calls begin in order");
                calls.push((id.to_owned(), name.to_owned(), String::new()));
            }
            calls[index].2 += call["function"]["arguments"].as_str().unwrap_or_default();
        }
    }
    assert_eq!((content.as_str(), reasoning.as_str()), ("Let me see", "Hm"));
    assert_ne!(calls[0].0, calls[1].0, "ids differ");
    for (index, call) in message["tool_calls"].as_array().expect("calls").iter().enumerate() {
        assert_eq!(
            (call["function"]["name"].as_str(), call["function"]["arguments"].as_str()),
            (Some(&*calls[index].1), Some(&*calls[index].2))
        );
        assert_eq!(calls[index].2, format!("{{\"path\":\"{index}\"}}"));
    }
}

#[tokio::test]
async fn the_first_event_comes_before_the_prompt_is_read_and_a_heartbeat_in_silence() {
    let mut script = Script::ready(8).await;
    let mut response = finished(script.chat(json!({ "stream": true }))).await;
    let order = script.generate().await;
    let mut next = async || {
        let frame = std::future::poll_fn(|context| std::pin::Pin::new(response.body_mut()).poll_frame(context)).await;
        let frame = frame.expect("more comes").expect("it does not fail");
        String::from_utf8(frame.into_data().expect("data").to_vec()).expect("UTF-8")
    };
    assert!(next().await.contains("\"role\":\"assistant\""));
    script.say(FromWorker::Reading { id: order.id, done: 1, total: 4 });
    let began = std::time::Instant::now();
    assert_eq!(next().await, ": reading the prompt, 25 %\n\n");
    assert!((4..15).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
    script.wrote(order.id, Delta::Content("x".to_owned()));
    assert!(next().await.contains("\"content\":\"x\""));
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_and_the_next_one_runs() {
    let mut script = Script::ready(8).await;
    // A stream whose body is dropped.
    let response = finished(script.chat(json!({ "stream": true }))).await;
    let order = script.generate().await;
    let waiting = script.chat(json!({}));
    script.until(|status| status["queue"]["waiting"] == 1).await;
    drop(response);
    assert_eq!(script.order().await, ToWorker::Cancel { id: order.id });
    assert!(script.is_idle(), "nothing is sent before the worker says that it ended");
    script.done(order.id, FinishReason::Cancelled);
    // A whole answer whose handler is dropped.
    let order = script.generate().await;
    waiting.abort();
    assert_eq!(script.order().await, ToWorker::Cancel { id: order.id });
    script.done(order.id, FinishReason::Cancelled);
    // One that leaves while it waits is never sent.
    let (running, left) = (script.chat(json!({})), script.chat(json!({ "user": "other" })));
    let order = script.generate().await;
    left.abort();
    let last = script.chat(json!({ "user": "third" }));
    script.until(|status| status["queue"]["waiting"].as_u64() >= Some(1)).await;
    script.done(order.id, FinishReason::Stop);
    assert_eq!(finished(running).await.status(), 200);
    let order = script.generate().await;
    script.done(order.id, FinishReason::Stop);
    assert_eq!(finished(last).await.status(), 200);
    assert!(script.is_idle());
    assert_eq!(script.status().await["totals"]["cancelled"], 2);
}

#[tokio::test]
async fn clients_take_turns_and_a_full_queue_says_when_to_come_back() {
    let mut script = Script::ready(3).await;
    let mut asked = vec![script.chat(json!({ "user": "a" }))];
    let running = script.generate().await;
    for (client, mark) in [("a", 1), ("a", 2), ("b", 3)] {
        asked.push(script.chat(json!({ "user": client, "max_tokens": mark })));
        let waiting = asked.len() - 1;
        script.until(|status| status["queue"]["waiting"].as_u64() == Some(waiting as u64)).await;
    }
    let refused = finished(script.chat(json!({ "user": "c" }))).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(json_of(refused).await["error"]["code"], "queue_full");
    script.done(running.id, FinishReason::Stop);
    let mut order = Vec::new();
    for _ in 0..3 {
        let generate = script.generate().await;
        order.push(generate.tokens_max);
        script.done(generate.id, FinishReason::Stop);
    }
    assert_eq!(order, [1, 3, 2], "b comes before a's second one");
    for response in asked {
        assert_eq!(finished(response).await.status(), 200);
    }
}

#[tokio::test]
async fn an_answer_that_fails_on_its_way_ends_with_an_error_and_never_with_a_reason_to_stop() {
    let mut script = Script::ready(8).await;
    for n in [1, 2] {
        let stream = script.chat(json!({ "stream": true, "n": n }));
        let order = script.generate().await;
        script.wrote(order.id, Delta::Content("so far".to_owned()));
        script.say(FromWorker::Failed { id: order.id, kind: FailKind::Engine, message: "a copy failed".to_owned() });
        let text = text_of(finished(stream).await).await;
        let chunks = chunks(&text);
        assert!(text.contains("so far") && text.trim_end().ends_with("data: [DONE]"), "{text}");
        assert!(chunks.iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()), "{text}");
        let errors: Vec<&Value> = chunks.iter().filter(|chunk| chunk["error"].is_object()).collect();
        assert_eq!(errors.len(), 1);
        assert_eq!(errors[0]["error"]["message"], "a copy failed");
    }
    let whole = script.chat(json!({}));
    // The second answer of the stream that ended is dropped from the queue, not run.
    let order = script.generate().await;
    script.say(FromWorker::Failed {
        id: order.id,
        kind: FailKind::TooLong { prompt_tokens: 9000, ctx_tokens: 2048 },
        message: "too long".to_owned(),
    });
    let refused = finished(whole).await;
    assert_eq!(refused.status(), 400);
    assert_eq!(json_of(refused).await["error"]["prompt_tokens"], 9000);
}

#[tokio::test]
async fn health_tells_of_the_worker_what_is_true() {
    let mut script = Script::loading(8);
    let health = async |script: &Script| {
        let response = script.send("GET", "/health", "").await;
        let status = response.status().as_u16();
        (status, json_of(response).await)
    };
    assert_eq!(
        health(&script).await,
        (503, json!({ "status": "loading", "progress": { "bytes_done": 0, "bytes_total": 0, "share": 0.0 } }))
    );
    script.say(FromWorker::Loading { done: 25, total: 100 });
    script.until(|status| status["progress"]["share"] == 0.25).await;
    // A request that comes now waits for the engine.
    let early = script.chat(json!({}));
    script.until(|status| status["queue"]["waiting"] == 1).await;
    script.say(ready());
    let order = script.generate().await;
    script.done(order.id, FinishReason::Stop);
    assert_eq!(finished(early).await.status(), 200);
    assert_eq!(health(&script).await, (200, json!({ "status": "ready" })));

    let running = script.chat(json!({}));
    script.generate().await;
    let waiting = script.chat(json!({}));
    script.until(|status| status["queue"]["waiting"] == 1).await;
    script.events.send(WorkerEvent::Died { reason: "the worker ended with signal 9".to_owned() }).expect("it listens");
    let failed = finished(running).await;
    assert_eq!(failed.status(), 500);
    assert!(
        json_of(failed).await["error"]["message"]
            .as_str()
            .is_some_and(|message| message.contains("signal 9") && message.contains("try again"))
    );
    assert_eq!(health(&script).await.0, 503);
    // What only waited is answered by the next worker.
    script.say(ready());
    let order = script.generate().await;
    script.done(order.id, FinishReason::Stop);
    assert_eq!(finished(waiting).await.status(), 200);
    let (status, body) = health(&script).await;
    assert_eq!((status, &body["status"]), (200, &json!("degraded")));

    let running = script.chat(json!({}));
    script.generate().await;
    script.events.send(WorkerEvent::GaveUp { reason: "three ends".to_owned(), exit_status: None }).expect("it listens");
    assert_eq!(finished(running).await.status(), 503);
    let (status, body) = health(&script).await;
    assert_eq!((status, &body["status"], &body["reason"]), (503, &json!("dead"), &json!("three ends")));
    assert_eq!(finished(script.chat(json!({}))).await.status(), 503);
    assert_eq!(script.send("GET", "/v1/models", "").await.status(), 503);
}

#[tokio::test]
async fn what_a_request_says_reaches_the_worker() {
    let mut script = Script::ready(8).await;
    let asked = script.chat(json!({
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": -2, "repetition_penalty": 1.5, "presence_penalty": 0.75,
        "frequency_penalty": -0.5, "penalty_last_n": 9, "max_completion_tokens": 33, "max_tokens": 44, "stop": ["a", "bc"], "logprobs": true,
        "top_logprobs": 4, "ignore_eos": true, "reasoning_effort": "none",
    }));
    let order = script.generate().await;
    let sampling = &order.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.25, 0.5, 7, 0.125));
    assert_eq!(
        (sampling.repeat_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.penalty_last_n),
        (1.5, 0.75, -0.5, 9)
    );
    assert_eq!((sampling.seed, order.tokens_max, order.logprobs, order.ignore_eos), (u64::MAX - 1, 33, Some(4), true));
    assert_eq!(order.stop_strings, ["a", "bc"]);
    script.done(order.id, FinishReason::StopString(1));
    assert_eq!(json_of(finished(asked).await).await["choices"][0]["finish_reason"], "stop");
    // Without a seed each request has its own.
    let mut seeds = Vec::new();
    for _ in 0..2 {
        let asked = script.chat(json!({}));
        let order = script.generate().await;
        seeds.push(order.sampling.seed);
        assert_eq!(order.sampling.temperature, 0.7);
        script.done(order.id, FinishReason::Stop);
        tokio::time::timeout(Duration::from_secs(20), asked).await.expect("in time").expect("no panic");
    }
    assert_ne!(seeds[0], seeds[1]);
}

#[tokio::test]
async fn every_api_says_in_its_own_form_that_an_answer_failed() {
    let mut script = Script::ready(8).await;
    let requests = [
        ("/v1/messages", json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 9 }), "event: error", "message_stop"),
        ("/v1/responses", json!({ "input": "Hi" }), "response.failed", "response.completed"),
        ("/v1/completions", json!({ "prompt": "Hi" }), "\"error\"", "\"finish_reason\":\"stop\""),
    ];
    for (path, body, failed, ended_well) in requests {
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let stream = script.post(path, &streamed);
        let order = script.generate().await;
        script.wrote(order.id, Delta::Content("so far".to_owned()));
        script.say(FromWorker::Failed { id: order.id, kind: FailKind::Engine, message: "a copy failed".to_owned() });
        let text = text_of(finished(stream).await).await;
        assert!(text.contains("so far") && text.contains(failed) && text.contains("a copy failed"), "{path}: {text}");
        assert!(!text.contains(ended_well), "{path}: {text}");
        let whole = script.post(path, &body);
        let order = script.generate().await;
        script.say(FromWorker::Failed { id: order.id, kind: FailKind::Engine, message: "a copy failed".to_owned() });
        let refused = finished(whole).await;
        assert_eq!(refused.status(), 500, "{path}");
        assert_eq!(json_of(refused).await["error"]["message"], "a copy failed", "{path}");
    }
}
