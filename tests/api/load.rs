//! Many clients at once, of which some leave: every answer is valid, none is lost, and nothing is started anew.

use std::time::Duration;

use serde_json::{Value, json};

use crate::http::{connect, events, request, response};
use crate::program::Server;

const CLIENTS: u64 = 64;
const REQUESTS_EACH: u64 = 4;

#[test]
fn sixty_four_clients_with_random_disconnects_all_get_valid_answers() {
    let server = Server::start(&["--prefix-cache-mib", "64", "--queue", "128"]);
    let address = server.address;
    let ended: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                scope.spawn(move || {
                    let (mut answered, mut left) = (0, 0);
                    for round in 0..REQUESTS_EACH {
                        // Short and long prompts, streamed and whole; a quarter leaves early.
                        let mix = client.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(round.wrapping_mul(0xD1B5_4A32_D192_ED03)) >> 7;
                        let words = if mix % 3 == 0 { 300 } else { 3 };
                        let streamed = mix % 2 == 0;
                        let body = json!({
                            "messages": [{ "role": "user", "content": format!("{client} {}", "and the ".repeat(words)) }],
                            "max_tokens": 4 + mix % 20, "ignore_eos": true, "stream": streamed, "user": client.to_string(),
                        });
                        let request = request("POST", "/v1/chat/completions", &[], body.to_string().as_bytes());
                        let mut stream = connect(address);
                        std::io::Write::write_all(&mut stream, &request).expect("it listens");
                        if mix % 4 == 1 {
                            std::thread::sleep(Duration::from_millis(mix % 300));
                            left += 1;
                            continue;
                        }
                        let answer = response(stream).expect("an answer");
                        assert_eq!(answer.status, 200, "client {client}");
                        let text = answer.text();
                        if streamed {
                            let events = events(&text);
                            assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "client {client}: {text}");
                            let last: Value = serde_json::from_str(&events[events.len() - 2]).expect("JSON");
                            assert_eq!(last["choices"][0]["finish_reason"], "length", "client {client}: {text}");
                        } else {
                            let whole: Value = serde_json::from_str(&text).expect("JSON");
                            assert_eq!(whole["usage"]["completion_tokens"], 4 + mix % 20, "client {client}");
                        }
                        answered += 1;
                    }
                    (answered, left)
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("no client fails")).collect()
    });
    let answered: u64 = ended.iter().map(|(answered, _)| answered).sum();
    let left: u64 = ended.iter().map(|(_, left)| left).sum();
    assert!(left > 20 && answered + left == CLIENTS * REQUESTS_EACH, "{answered} answered, {left} left");
    server.wait_for("rest", |server| {
        let status = server.status();
        status["phase"] == "idle" && status["queue"]["waiting"] == 0
    });
    let status = server.status();
    assert_eq!((status["worker"]["starts"].as_u64(), status["totals"]["failed"].as_u64()), (Some(1), Some(0)), "{status}");
    assert!(status["totals"]["completed"].as_u64() >= Some(answered), "{status}");
}
