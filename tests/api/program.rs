//! `ebbtide serve` as a process.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::http::{self, Response};

pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
const PATIENCE: Duration = Duration::from_secs(60);

/// A server that ends with the test.
pub struct Server {
    pub address: SocketAddr,
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Server {
    /// Starts one with further flags and waits until it is ready.
    pub fn start(flags: &[&str]) -> Self {
        let server = Self::bound(&[&["--vram-mib", "64", "--threads", "2"], flags].concat());
        server.wait_for_health("ready");
        server
    }

    /// As [`Server::start`], with a context in which an answer can go on for long.
    pub fn with_long_context() -> Self {
        Self::start(&["--vram-mib", "512", "--ctx", "32768"])
    }

    /// Starts one and waits until its port is bound, no longer.
    pub fn bound(flags: &[&str]) -> Self {
        Self::bound_with(MODEL, flags)
    }

    /// As [`Server::start`], of another model and with these flags alone.
    pub fn start_model(model: &str, flags: &[&str]) -> Self {
        let server = Self::bound_with(model, flags);
        server.wait_for_health("ready");
        server
    }

    fn bound_with(model: &str, flags: &[&str]) -> Self {
        let mut child = command(&[&["serve", "-m", model, "--port", "0"], flags].concat())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut log = String::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("it ended early: {log}")).expect("UTF-8");
            log.push_str(&format!("{line}\n"));
            if let Some(rest) = line.split("http://").nth(1) {
                break rest.split(';').next().and_then(|address| address.parse().ok()).expect("an address");
            }
        };
        let log = Arc::new(Mutex::new(log));
        let written = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                written.lock().expect("no test fails here").push_str(&format!("{line}\n"));
            }
        });
        Self { address, child, log }
    }

    pub fn log(&self) -> String {
        self.log.lock().expect("no test fails here").clone()
    }

    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[("Content-Type", "application/json")], body.to_string().as_bytes())
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let answered = http::exchange(self.address, &http::request(method, path, headers, body));
        answered.unwrap_or_else(|| panic!("no response to {method} {path}: {}", self.log()))
    }

    pub fn chat(&self, fields: Value) -> Response {
        let mut body = json!({ "messages": [{ "role": "user", "content": "In the beginning" }], "max_tokens": 8, "temperature": 0,
            "ignore_eos": true });
        merge(&mut body, fields);
        self.post("/v1/chat/completions", &body)
    }

    pub fn status(&self) -> Value {
        self.get("/v1/status").json()
    }

    pub fn wait_for_health(&self, word: &str) {
        self.wait_for(word, |server| server.get("/health").json()["status"] == word);
    }

    /// Waits until something holds.
    pub fn wait_for(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let began = Instant::now();
        while !holds(self) {
            assert!(began.elapsed() < PATIENCE, "no {what} within {PATIENCE:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Process id of the worker.
    pub fn worker_pid(&self) -> u64 {
        self.status()["worker"]["pid"].as_u64().expect("a worker runs")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program without the settings of whoever runs the tests.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("EBBTIDE_")) {
        command.env_remove(name);
    }
    command.env("EBBTIDE_CONFIG", "/dev/null").args(arguments);
    command
}

/// Sends a signal by the system's own program.
pub fn signal(name: &str, pid: impl ToString) {
    let sent = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().expect("kill runs");
    assert!(sent.success(), "kill -{name}");
}

/// Puts the entries of `fields` into `body`; null takes one out.
pub fn merge(body: &mut Value, fields: Value) {
    let (Value::Object(body), Value::Object(fields)) = (body, fields) else { panic!("objects are merged") };
    for (name, value) in fields {
        if value.is_null() {
            body.remove(&name);
        } else {
            body.insert(name, value);
        }
    }
}
