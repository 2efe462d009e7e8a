//! Official clients and agents against the server. `tools/setup_clients.sh` installs them; without it these tests cannot run, so they are
//! left out unless asked for: `cargo test --test api clients:: -- --ignored`.
//!
//! Most of them meet a worker that plays a model: it calls the tool for reading files where there is one, says what the tool found, and
//! greets otherwise. The agents meet the bundled model, too, which only has to write something.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ebbtide::reply::{Delta, ReasoningStart, Reply, ReplyOptions, StopStrings, ToolTypes};
use ebbtide::tokenizer::{ControlText, Json};
use ebbtide::worker::protocol::{FinishReason, FromWorker, Generate, ToWorker};
use serde_json::json;

use crate::program::{Server, merge};
use crate::scripted::{Script, model, ready};

const PATIENCE: Duration = Duration::from_secs(120);
const HELLO: &str = "Hello from the script.";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A folder that ends with the test, with a note in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ebbtide-clients-{}-{number}", std::process::id()));
        std::fs::create_dir_all(path.join("home")).expect("the temporary folder can be written");
        std::fs::write(path.join("note.txt"), "the tide turns at noon\n").expect("a note");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What the played model writes to a prompt.
fn text_for(prompt: &str, generate: &Generate, note: &Path) -> String {
    let turn = prompt.rsplit("<|im_start|>tool\n").next().filter(|_| prompt.contains("<|im_start|>tool\n"));
    if let Some(result) = turn {
        let result = result.split("<|im_end|>").next().unwrap_or_default();
        let found = ["tide tables", "the tide turns at noon"].into_iter().find(|found| result.contains(found));
        return format!("It says: {}", found.unwrap_or("nothing that I know"));
    }
    let name = |tool: &Json| match tool.get("function").and_then(|function| function.get("name")) {
        Some(Json::String(name)) => name.clone(),
        _ => String::new(),
    };
    let names: Vec<String> = generate.tools.iter().map(name).collect();
    let arguments = |tool: &str| match tool {
        "read" => Some(json!({ "filePath": note })),
        "exec_command" => Some(json!({ "cmd": format!("cat {}", note.display()) })),
        "shell_command" => Some(json!({ "command": format!("cat {}", note.display()) })),
        "shell" => Some(json!({ "command": ["cat", note] })),
        _ => None,
    };
    let call = names.iter().find_map(|name| Some((name, arguments(name)?))).filter(|_| prompt.contains("note.txt"));
    let thought = if generate.reasoning_tokens_max.is_some() { "<think>\nI have to read it.\n</think>\n\n" } else { "" };
    match call {
        Some((name, arguments)) => format!("{thought}<tool_call>\n{}\n</tool_call>", json!({ "name": name, "arguments": arguments })),
        None => HELLO.to_owned(),
    }
}

/// Plays a worker on a port until the test ends; returns where.
fn play(folder: &Folder) -> SocketAddr {
    let note = folder.0.join("note.txt");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("it can wait");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let mut script = Script::loading(16);
            let FromWorker::Ready(mut state) = ready() else { unreachable!("it is ready") };
            // Agents bring tens of thousands of tokens.
            state.ctx_tokens = 65_536;
            script.say(FromWorker::Ready(state));
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            let router = script.router.clone();
            tokio::spawn(async move { axum::serve(listener, router).await });
            let model = model();
            loop {
                let generate = match script.next_order().await {
                    Some(ToWorker::Generate(generate)) => generate,
                    Some(_) => continue,
                    None => return,
                };
                let prompt = String::from_utf8_lossy(&model.tokenizer.decode(&generate.prompt, ControlText::Show)).into_owned();
                answer(&mut script, &generate, &prompt, &note).await;
            }
        });
    });
    address
}

async fn answer(script: &mut Script, generate: &Generate, prompt: &str, note: &Path) {
    let id = generate.id;
    if prompt.contains("write without end") {
        loop {
            script.wrote(id, Delta::Content("on and ".to_owned()));
            if script.is_cancelled(id).await {
                return script.done(id, FinishReason::Cancelled);
            }
        }
    }
    let stops = StopStrings::new(generate.stop_strings.clone()).expect("checked before");
    let tools = Some(ToolTypes::new(&generate.tools)).filter(|_| !generate.tools.is_empty());
    let mut reply = Reply::new(ReplyOptions { reasoning: ReasoningStart::MayOpen, tools, stops });
    let text = text_for(prompt, generate, note);
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(5) {
        let piece: String = piece.iter().collect();
        reply.push(&piece).into_iter().for_each(|delta| script.wrote(id, delta));
    }
    reply.finish().into_iter().for_each(|delta| script.wrote(id, delta));
    let stopped = reply.stopped().and_then(|stop| generate.stop_strings.iter().position(|known| known == stop));
    let finish = match stopped {
        Some(index) => FinishReason::StopString(index),
        None if reply.call_count() > 0 => FinishReason::ToolCalls,
        None => FinishReason::Stop,
    };
    let mut done = crate::scripted::done(finish);
    done.prompt_tokens = generate.prompt.len();
    script.say(FromWorker::Done { id, done: Box::new(done) });
}

/// Runs a client to its end and returns what it said.
fn run(command: &mut Command) -> String {
    let began = Instant::now();
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|error| panic!("{command:?}: {error}; tools/setup_clients.sh installs it"));
    let pid = child.id();
    let (sender, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let output: Output = match ended.recv_timeout(PATIENCE) {
        Ok(output) => output.expect("it can be waited for"),
        Err(_) => {
            crate::program::signal("KILL", pid);
            panic!("{command:?} did not end within {PATIENCE:?}");
        }
    };
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {} after {:?}\n{said}", output.status, began.elapsed());
    said
}

fn installed(path: &str) -> PathBuf {
    root().join(".clients").join(path)
}

fn python(script: &str) -> String {
    let folder = Folder::new();
    let address = play(&folder);
    run(Command::new(installed("venv/bin/python")).arg(root().join("tests/api/sdk").join(script)).arg(format!("http://{address}")))
}

#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn openai_for_python_is_content() {
    assert!(python("openai_sdk.py").contains("all well"));
}

#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn anthropic_for_python_is_content() {
    assert!(python("anthropic_sdk.py").contains("all well"));
}

#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn openai_for_node_is_content() {
    let folder = Folder::new();
    let address = play(&folder);
    let script = root().join("tests/api/sdk/openai_sdk.mjs");
    let mut command = Command::new("node");
    assert!(run(command.arg(script).arg(format!("http://{address}")).arg(root().join(".clients"))).contains("all well"));
}

/// OpenCode in a folder of its own, told of the server.
fn opencode(folder: &Folder, address: SocketAddr, ask: &str) -> String {
    let options = json!({ "baseURL": format!("http://{address}/v1"), "apiKey": "x" });
    let models = json!({ "demo": { "name": "demo", "limit": { "context": 32_768, "output": 256 } } });
    let provider = json!({ "npm": "@ai-sdk/openai-compatible", "name": "Ebbtide", "options": options, "models": models });
    let settings = json!({ "provider": { "ebbtide": provider }, "model": "ebbtide/demo", "small_model": "ebbtide/demo",
        "autoupdate": false, "share": "disabled" });
    std::fs::write(folder.0.join("opencode.json"), settings.to_string()).expect("settings");
    let mut command = Command::new(installed("node_modules/.bin/opencode"));
    command.args(["run", "--pure", "--format", "json", ask]).current_dir(&folder.0);
    run(command.env("HOME", folder.0.join("home")).env("OPENCODE_DISABLE_MODELS_FETCH", "1"))
}

/// Codex in a folder of its own, told of the server.
fn codex(folder: &Folder, address: SocketAddr, ask: &str) -> String {
    let home = folder.0.join("home");
    let settings = format!(
        "model = \"demo\"\nmodel_provider = \"ebbtide\"\n[model_providers.ebbtide]\nname = \"ebbtide\"\n\
         base_url = \"http://{address}/v1\"\nwire_api = \"responses\"\n"
    );
    std::fs::write(home.join("config.toml"), settings).expect("settings");
    let mut command = Command::new(installed("node_modules/.bin/codex"));
    // The folder is the sandbox.
    command.args(["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ask]).current_dir(&folder.0);
    run(command.env("CODEX_HOME", &home).env("HOME", &home))
}

#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn opencode_reads_a_file_and_says_what_is_in_it() {
    let folder = Folder::new();
    let said = opencode(&folder, play(&folder), "read note.txt and tell me what it says");
    assert!(said.contains("It says: the tide turns at noon"), "{said}");
}

#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn codex_reads_a_file_and_says_what_is_in_it() {
    let folder = Folder::new();
    let said = codex(&folder, play(&folder), "read note.txt and tell me what it says");
    assert!(said.contains("It says: the tide turns at noon"), "{said}");
}

/// A server of the model of the demo, which has to write at least one token for each agent.
#[test]
#[ignore = "needs tools/setup_clients.sh"]
fn agents_end_cleanly_with_the_bundled_model() {
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen35moe-22m-mtp-IQ4_NL.gguf");
    let server = Server::start_model(demo, &["--ctx", "32768", "--vram-mib", "512"]);
    let written = |server: &Server| server.status()["totals"]["completion_tokens"].as_u64().expect("a count");
    type Agent = fn(&Folder, SocketAddr, &str) -> String;
    for (name, agent) in [("opencode", opencode as Agent), ("codex", codex as Agent)] {
        let before = written(&server);
        let folder = Folder::new();
        agent(&folder, server.address, "say hello");
        assert!(written(&server) > before, "{name}: {}", server.log());
        let mut body = json!({ "max_tokens": 2 });
        merge(&mut body, json!({ "temperature": 0 }));
        assert_eq!(server.chat(body).status, 200, "{name}");
    }
}
