//! Rendered chats, against Python's Jinja, and their token ids, against llama.cpp (`tests/golden/chat/README.md`).

use ebbtide::tokenizer::{ChatTemplate, Json, Message, RenderOptions, Tokenizer, TokenizerSpec, unshield};
use std::path::{Path, PathBuf};

#[derive(serde::Deserialize)]
struct Case {
    messages: Vec<Message>,
    options: Options,
    rendered: String,
    /// Ids of the rendered text in the vocabulary `bard`.
    bard_ids: Option<Vec<u32>>,
}

#[derive(serde::Deserialize)]
struct Options {
    add_generation_prompt: bool,
    enable_thinking: Option<bool>,
    #[serde(default)]
    tools: Vec<Json>,
}

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(golden(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn bard() -> TokenizerSpec {
    serde_json::from_str(&read("tokenizer/bard.spec.json")).expect("a spec is JSON")
}

fn is_assistant(message: &Message) -> bool {
    message.0.get("role") == Some(&Json::from("assistant"))
}

fn check(name: &str, source: &str) {
    let template = ChatTemplate::new(source).expect("the template parses");
    let tokenizer = Tokenizer::new(&bard()).expect("the vocabulary is whole");
    let cases = read(&format!("chat/{name}.jsonl"));
    for (index, line) in cases.lines().enumerate() {
        let case: Case = serde_json::from_str(line).expect("a case is JSON");
        let options = RenderOptions {
            tools: case.options.tools,
            add_generation_prompt: case.options.add_generation_prompt,
            enable_thinking: case.options.enable_thinking,
            ..RenderOptions::default()
        };
        let rendered = template.render(&case.messages, &options).unwrap_or_else(|error| panic!("{name}, case {index}: {error}"));
        assert_eq!(rendered, case.rendered, "{name}, case {index}");
        let ids = tokenizer.encode_chat(&rendered).expect("it encodes");
        assert_eq!(case.bard_ids.unwrap_or_else(|| ids.clone()), ids, "{name}, case {index}");
        if name != "python" {
            // These templates look for tags in assistant turns only, so marks elsewhere change nothing but the marks.
            let shield = |message: &Message| if is_assistant(message) { message.clone() } else { message.shielded(&tokenizer) };
            let shielded: Vec<Message> = case.messages.iter().map(shield).collect();
            assert_eq!(unshield(&template.render(&shielded, &options).expect("it renders")), rendered, "{name}, case {index}");
        }
    }
    assert!(cases.lines().count() >= 20, "{name} has too few cases");
}

#[test]
fn the_bundled_models_template_renders_as_in_python() {
    check("bard", &bard().chat_template.expect("the model has a template"));
}

#[test]
fn the_template_of_qwen3_renders_as_in_python_and_has_the_ids_of_the_reference() {
    check("qwen3", &read("chat/qwen3.jinja"));
}

#[test]
fn methods_filters_and_ways_of_writing_are_pythons() {
    check("python", &read("chat/python.jinja"));
}
