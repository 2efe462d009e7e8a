//! Workers that die, signals at any moment, starts that cannot go well.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::events;
use crate::program::{MODEL, Server, command, signal};

/// A request that writes until it is stopped.
fn endless() -> Value {
    json!({ "max_tokens": 100_000, "ignore_eos": true, "stream": true })
}

#[test]
fn a_killed_worker_fails_its_request_and_the_next_one_works() {
    let server = Server::with_long_context();
    let before = server.chat(json!({})).json()["choices"][0]["message"]["content"].clone();
    for round in 1..=2u64 {
        let mut stream = server.chat(endless());
        let mut text = String::new();
        while text.matches("\"content\"").count() < 4 {
            text += &String::from_utf8(stream.chunk().expect("it writes")).expect("UTF-8");
        }
        let worker = server.worker_pid();
        signal("KILL", worker);
        while let Some(chunk) = stream.chunk() {
            text += &String::from_utf8(chunk).expect("UTF-8");
        }
        let events = events(&text);
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
        let error: Value = serde_json::from_str(&events[events.len() - 2]).expect("JSON");
        assert_eq!(error["error"]["code"], "engine_died", "{text}");
        assert!(!text.contains("\"finish_reason\":\"stop\""), "{text}");
        // Not even a wait: it is queued until the next worker is ready.
        let after = server.chat(json!({}));
        assert_eq!(after.status, 200);
        assert_eq!(after.json()["choices"][0]["message"]["content"], before);
        let status = server.status();
        assert_eq!((status["worker"]["deaths"].as_u64(), status["worker"]["starts"].as_u64()), (Some(round), Some(round + 1)));
        assert_ne!(status["worker"]["pid"], worker);
        assert_eq!(status["health"], "degraded");
    }
    // The third death within a minute is the last.
    signal("KILL", server.worker_pid());
    server.wait_for_health("dead");
    assert_eq!(server.get("/health").status, 503);
    let refused = server.chat(json!({}));
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("engine_dead")));
}

#[test]
fn a_worker_ends_with_its_server() {
    let mut server = Server::with_long_context();
    let mut stream = server.chat(endless());
    assert!(stream.chunk().is_some());
    let worker = server.worker_pid();
    signal("KILL", server.pid());
    server.wait();
    let began = Instant::now();
    let is_there = || std::fs::read_to_string(format!("/proc/{worker}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    while is_there() {
        assert!(began.elapsed() < Duration::from_secs(10), "the worker outlives its server");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_client_that_leaves_frees_the_engine() {
    let server = Server::with_long_context();
    for streamed in [true, false] {
        let mut body = endless();
        body["stream"] = streamed.into();
        let request = {
            let mut chat = json!({ "messages": [{ "role": "user", "content": "In the beginning" }] });
            crate::program::merge(&mut chat, body);
            crate::http::request("POST", "/v1/chat/completions", &[], chat.to_string().as_bytes())
        };
        let mut stream = crate::http::connect(server.address);
        std::io::Write::write_all(&mut stream, &request).expect("it listens");
        server.wait_for("writing", |server| server.status()["phase"] == "writing");
        let left = Instant::now();
        drop(stream);
        server.wait_for("rest", |server| server.status()["phase"] == "idle");
        assert!(left.elapsed() < Duration::from_secs(5), "{:?}", left.elapsed());
        assert_eq!(server.status()["last_requests"][0]["finish"], "cancelled");
    }
    assert_eq!(server.status()["worker"]["starts"], 1);
}

#[test]
fn a_signal_ends_it_at_any_moment_within_five_seconds() {
    for (name, moment) in [("TERM", "ready"), ("INT", "writing"), ("INT", "starting")] {
        let mut server = if moment == "starting" { Server::bound(&["--vram-mib", "64"]) } else { Server::with_long_context() };
        let mut stream = None;
        if moment == "writing" {
            let mut running = server.chat(endless());
            assert!(running.chunk().is_some());
            stream = Some(running);
        }
        let asked = Instant::now();
        signal(name, server.pid());
        let status = server.wait();
        assert!(status.success(), "{name} {moment}: {status}: {}", server.log());
        assert!(asked.elapsed() < Duration::from_secs(5), "{name} {moment}: {:?}", asked.elapsed());
        if let Some(mut stream) = stream {
            let mut rest = String::new();
            while let Some(chunk) = stream.chunk() {
                rest += &String::from_utf8(chunk).expect("UTF-8");
            }
            assert!(rest.contains("being stopped") && !rest.contains("\"finish_reason\":\"stop\""), "{rest}");
        }
    }
}

#[test]
fn a_start_that_cannot_go_well_says_why_and_ends() {
    for (flags, code, why) in [
        (&["-m", "no/such.gguf"][..], 3, "no/such.gguf"),
        (&["-m", MODEL, "--vram-mib", "1"][..], 4, "--vram-mib"),
        (&["-m", MODEL, "--port", "99999"][..], 2, "--port"),
        (&[][..], 2, "the model"),
    ] {
        let refused = command(&[&["serve", "--port", "0"], flags].concat()).stdin(Stdio::null()).output().expect("it ends");
        let told = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!(refused.status.code(), Some(code), "{flags:?}: {told}");
        assert!(told.contains(why), "{flags:?}: {told}");
    }
}
