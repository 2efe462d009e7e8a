//! Who is let in: addresses, keys, Host and Origin, and what nobody gets to see.

use std::process::Stdio;

use serde_json::json;

use crate::program::{MODEL, Server, command};

#[test]
fn only_loopback_without_a_key() {
    for flags in [&["--host", "0.0.0.0"][..], &["--host", "::"], &["--cors-origin", "*"], &["--api-key", "k", "--no-auth"]] {
        let refused = command(&[&["serve", "-m", MODEL, "--port", "0"], flags].concat()).stdin(Stdio::null()).output().expect("it ends");
        assert_eq!(refused.status.code(), Some(2), "{flags:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains("--api-key"), "{flags:?}");
    }
    let server = Server::start(&[]);
    assert!(server.address.ip().is_loopback());
    let taken = command(&["serve", "-m", MODEL, "--port", &server.address.port().to_string()]).output().expect("it ends");
    assert_eq!(taken.status.code(), Some(1));
    let told = String::from_utf8_lossy(&taken.stderr).into_owned();
    assert!(told.contains("--port") && !told.contains("loading"), "{told}");

    for (headers, status) in [
        (&[("Host", "evil.example")][..], 403),
        (&[("Host", "localhost.evil.example:80")], 403),
        (&[("Origin", "https://evil.example")], 403),
        (&[("Origin", "null")], 403),
        (&[("Host", "127.0.0.1:8080"), ("Origin", "http://127.0.0.1:8080")], 200),
        (&[("Host", "localhost")], 200),
    ] {
        let answer = server.send("GET", "/v1/models", headers, b"");
        assert_eq!(answer.status, status, "{headers:?}");
        assert_eq!(answer.header("access-control-allow-origin"), None, "{headers:?}");
        assert!(answer.json().is_object());
    }
    let preflight =
        server.send("OPTIONS", "/v1/models", &[("Origin", "https://evil.example"), ("Access-Control-Request-Method", "POST")], b"");
    assert_eq!((preflight.status, preflight.header("access-control-allow-origin")), (403, None));
}

#[test]
fn a_key_is_demanded_and_shown_nowhere() {
    let key = "kEy-7c1f";
    let mut server = Server::start(&["--api-key", key, "--cors-origin", "https://chat.example"]);
    for (headers, status) in [
        (&[][..], 401),
        (&[("Authorization", "Bearer kEy-7c1")][..], 401),
        (&[("Authorization", "Bearer kEy-7c1f2")], 401),
        (&[("Authorization", "Bearer key-7c1f")], 401),
        (&[("x-api-key", "")], 401),
        (&[("Authorization", "Bearer kEy-7c1f")], 200),
        (&[("x-api-key", key)], 200),
    ] {
        for path in ["/v1/models", "/v1/status", "/metrics"] {
            let answer = server.send("GET", path, headers, b"");
            assert_eq!(answer.status, status, "{path} {headers:?}");
            assert!(!answer.text().contains(key), "{path}");
        }
    }
    assert_eq!(server.get("/health").status, 200, "a load balancer has no key");
    let allowed = [("Origin", "https://chat.example"), ("x-api-key", key)];
    assert_eq!(server.send("GET", "/v1/models", &allowed, b"").header("access-control-allow-origin"), Some("https://chat.example"));
    let preflight = server.send("OPTIONS", "/v1/chat/completions", &[("Origin", "https://chat.example")], b"");
    assert_eq!((preflight.status, preflight.header("access-control-allow-origin")), (204, Some("https://chat.example")));
    assert_eq!(server.send("GET", "/v1/models", &[("Origin", "https://evil.example"), ("x-api-key", key)], b"").status, 403);

    let pid = server.send("GET", "/v1/status", &[("x-api-key", key)], b"").json()["worker"]["pid"].as_u64().expect("a worker");
    let arguments = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
    let environment = std::fs::read_to_string(format!("/proc/{pid}/environ"));
    for of_worker in [arguments, environment].into_iter().flatten() {
        assert!(!of_worker.contains(key), "{of_worker}");
    }
    crate::program::signal("TERM", server.pid());
    assert!(server.wait().success());
    assert!(!server.log().contains(key), "{}", server.log());
    let shown = command(&["config", "--api-key", key]).output().expect("it ends");
    assert!(!String::from_utf8_lossy(&shown.stdout).contains(key));
}

#[test]
fn nothing_is_fetched_for_a_request() {
    let server = Server::start(&[]);
    // Where a server went to look, it would connect here.
    let trap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    trap.set_nonblocking(true).expect("it can be asked");
    let inside = format!("http://{}/", trap.local_addr().expect("an address"));
    for url in ["file:///etc/passwd", "/etc/passwd", &inside, "http://169.254.169.254/", "data:image/png;base64,AAAA"] {
        let refused =
            server.chat(json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": url } }] }] }));
        assert_eq!(refused.status, 400, "{url}");
        let error = refused.json()["error"].clone();
        assert_eq!(error["param"], "messages[0].content[0]");
        assert!(error["message"].as_str().is_some_and(|message| message.contains("text only")), "{error}");
    }
    assert!(trap.accept().is_err(), "somebody connected");
}
