//! Goal: nothing a model writes is lost or shown twice, however it comes. Method: replies as models write them, and random ones, each fed
//! whole, by character and in random pieces.

use super::*;
use crate::tokenizer::Json;
use proptest::prelude::*;

fn types() -> ToolTypes {
    let tools = r#"[{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {
        "path": {"type": "string"}, "lines": {"type": "integer"}, "append": {"type": "boolean"}, "tags": {"type": "array"},
        "options": {"type": "object"}, "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}]"#;
    ToolTypes::new(&serde_json::from_str::<Vec<Json>>(tools).expect("JSON"))
}

fn options() -> ReplyOptions {
    let stops = StopStrings::new(vec!["STOP".to_owned(), "\n\nUser:".to_owned()]).expect("sound");
    ReplyOptions { reasoning: ReasoningStart::MayOpen, tools: Some(types()), stops }
}

/// Events with adjacent pieces of one kind joined.
fn joined(events: impl IntoIterator<Item = Delta>) -> Vec<Delta> {
    let mut out: Vec<Delta> = Vec::new();
    for event in events {
        match (out.last_mut(), event) {
            (Some(Delta::Content(last)), Delta::Content(more)) | (Some(Delta::Reasoning(last)), Delta::Reasoning(more)) => {
                last.push_str(&more);
            }
            (Some(Delta::ToolArguments { text: last, .. }), Delta::ToolArguments { text: more, .. }) => last.push_str(&more),
            (_, event) => out.push(event),
        }
    }
    out
}

fn read<'p>(options: ReplyOptions, pieces: impl IntoIterator<Item = &'p str>) -> (Vec<Delta>, Option<String>) {
    let mut reply = Reply::new(options);
    let mut events: Vec<Delta> = pieces.into_iter().flat_map(|piece| reply.push(piece)).collect();
    assert!(events.iter().all(|event| !matches!(event, Delta::Content(text) | Delta::Reasoning(text) if text.is_empty())));
    events.extend(reply.finish());
    assert_eq!(reply.finish(), [], "the end comes once");
    (joined(events), reply.stopped().map(str::to_owned))
}

/// The events of a text fed whole, which are those of its characters.
fn events(text: &str) -> Vec<Delta> {
    let whole = read(options(), [text]);
    let characters: Vec<String> = text.chars().map(String::from).collect();
    assert_eq!(read(options(), characters.iter().map(String::as_str)), whole, "{text}");
    whole.0
}

fn text(text: &str) -> Delta {
    Delta::Content(text.to_owned())
}

/// The events of a whole call.
fn call(index: u32, name: &str, arguments: &str) -> [Delta; 3] {
    let text = arguments.to_owned();
    [Delta::ToolCall { index, name: name.to_owned() }, Delta::ToolArguments { index, text }, Delta::ToolEnd { index, is_whole: true }]
}

fn broken(index: u32, name: &str, arguments: &str) -> Vec<Delta> {
    let mut events = Vec::from(call(index, name, arguments));
    events[2] = Delta::ToolEnd { index, is_whole: false };
    events
}

#[test]
fn thinking_text_and_parallel_calls_come_apart() {
    let found = events(
        "<think>\nI must\nread.\n</think>\n\nReading.\n<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"a {b}\"}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"list\", \"arguments\": {}}\n</tool_call>\n",
    );
    let mut expected = vec![Delta::Reasoning("I must\nread.".to_owned()), text("Reading.")];
    expected.extend(call(0, "read", "{\"path\": \"a {b}\"}"));
    expected.extend(call(1, "list", "{}"));
    assert_eq!(found, expected);
}

#[test]
fn calls_in_tags_are_typed_by_the_tools_schema() {
    let found = events(
        "<tool_call>\n<function=write>\n<parameter=path>\n/tmp/7\n</parameter>\n<parameter=lines>\n7\n</parameter>\n<parameter=append>\nTrue\n\
         </parameter>\n<parameter=tags>\n[\"a\", 1]\n</parameter>\n<parameter=options>{\"x\": {}}</parameter><parameter=mode>\nnull\n</parameter>\n\
         <parameter=new>\n5\n</parameter>\n</function>\n</tool_call>",
    );
    let arguments = r#"{"path": "/tmp/7", "lines": 7, "append": true, "tags": ["a", 1], "options": {"x": {}}, "mode": null, "new": "5"}"#;
    assert_eq!(found, call(0, "write", arguments));
}

#[test]
fn text_values_keep_every_line() {
    let body = "\n  if a < b && c > \"d\" {\n\tx\\y\n  }\n</param>\n\n";
    let found = events(&format!("<tool_call><function=write><parameter=path>\n{body}\n</parameter></function></tool_call>"));
    let arguments = format!("{{\"path\": {}}}", serde_json::Value::from(body));
    assert_eq!(found, call(0, "write", &arguments));
}

#[test]
fn a_string_argument_is_passed_on_before_it_is_whole() {
    for opening in ["<tool_call><function=write><parameter=path>\n", "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \""] {
        let mut reply = Reply::new(options());
        reply.push(opening);
        let more = reply.push("line after line");
        assert_eq!(more, [Delta::ToolArguments { index: 0, text: "line after line".to_owned() }]);
        assert_eq!(reply.call_count(), 1);
    }
}

#[test]
fn odd_but_clear_calls_are_understood() {
    for (written, arguments) in [
        ("{\"arguments\": {\"a\": 1}, \"name\": \"f\"}", "{\"a\": 1}"),
        ("{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "{\"a\": 1}"),
        ("{\"name\": \"f\"}", "{}"),
        ("{\"name\": \"f\", \"arguments\": null}", "{}"),
        ("{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}", "{\"a\": 1}"),
        ("{\"id\": 3, \"name\": \"f\", \"arguments\": {\"a\": 1}, \"x\": [2]}", "{\"a\": 1}"),
        ("{\"name\": \"f\", \"arguments\": {\"a\": \"1\n2\"}}", "{\"a\": \"1\\n2\"}"),
        ("<function=f>\n</function>", "{}"),
        ("<function=f><parameter=a>\n1\n</parameter>", "{\"a\": \"1\"}"),
    ] {
        assert_eq!(events(&format!("<tool_call>\n{written}\n</tool_call>")), call(0, "f", arguments), "{written}");
    }
    // A tag may begin where another seemed to.
    for before in ["a <", "<tool<", "<tool_call\n"] {
        let mut expected = vec![text(before.trim_end())];
        expected.extend(call(0, "f", "{}"));
        assert_eq!(events(&format!("{before}<tool_call>{{\"name\": \"f\"}}</tool_call>")), expected);
    }
    // Neither a closing tag nor a brace too many shows.
    assert_eq!(events("<tool_call>{\"name\": \"f\", \"arguments\": {}}")[..], call(0, "f", "{}"));
    let mut expected = Vec::from(call(0, "f", "{}"));
    expected.push(text("}and on"));
    assert_eq!(events("<tool_call>{\"name\": \"f\", \"arguments\": {}}}</tool_call>and on"), expected);
}

#[test]
fn what_is_no_call_is_given_back_as_it_was_written() {
    for written in [
        "Look:\n<tool_call> is a tag",
        "<tool_call>\n{\"name\": 7, \"arguments\": {}}\n</tool_call>",
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "a \n <tool_call>\n{\"name\": \"f\", \"arguments\": 5}</tool_call>\n",
        "<tool_call>\n<function=>\n",
        "<tool_call><tool>x</tool></tool_call>",
        "<tool_call>\n{\"name\": \"f\"",
        "a < b <tool_cal",
        "</tool_call>",
        " \n ",
    ] {
        assert_eq!(events(written), [text(written)]);
    }
    let mut expected = vec![text("<tool_call>")];
    expected.extend(call(0, "f", "{}"));
    assert_eq!(events("<tool_call>\n<tool_call>{\"name\": \"f\"}</tool_call>"), expected, "a call behind a stray tag is found");
}

#[test]
fn a_call_broken_off_shows_how_far_it_came() {
    assert_eq!(
        events("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"he said"),
        broken(0, "f", "{\"a\": \"he said"),
        "the text ended"
    );
    assert_eq!(
        events("<tool_call>\n<function=write><parameter=path>\n/tmp/x\n"),
        broken(0, "write", "{\"path\": \"/tmp/x\\n"),
        "the text ended"
    );
    let mut expected = broken(0, "f", "{\"a\": \"he said \"no\"\"}}\n");
    expected.extend(call(1, "g", "{}"));
    let found = events(
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"he said \"no\"\"}}\n</tool_call><tool_call>{\"name\": \"g\"}</tool_call>",
    );
    assert_eq!(found, expected, "quotes without escapes are no JSON");
}

#[test]
fn without_tools_call_markup_is_text() {
    let written = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    assert_eq!(read(ReplyOptions { tools: None, ..options() }, [written]).0, [text(written)]);
}

#[test]
fn stop_strings_end_the_answer_but_neither_thinking_nor_calls() {
    let written = "<think>STOP</think>a<tool_call>{\"name\": \"STOP\", \"arguments\": {\"STOP\": 1}}</tool_call>bST";
    let mut expected = vec![Delta::Reasoning("STOP".to_owned()), text("a")];
    expected.extend(call(0, "STOP", "{\"STOP\": 1}"));
    expected.push(text("bST"));
    assert_eq!(events(written), expected);
    let (found, stopped) = read(options(), [written, "OP", " and on"]);
    *expected.last_mut().expect("text") = text("b");
    assert_eq!((found, stopped.as_deref()), (expected, Some("STOP")));
    let (found, stopped) = read(options(), ["one\n", "\nUs", "er: two", "<tool_call>"]);
    assert_eq!((found, stopped.as_deref()), (vec![text("one")], Some("\n\nUser:")));
}

#[test]
fn tokens_of_thinking_are_counted() {
    let mut reply = Reply::new(options());
    for token in ["<think>", "\n", "so", "\n", "</think>", "\n\n", "yes", "."] {
        reply.push(token);
    }
    assert!(!reply.is_thinking());
    assert_eq!(reply.reasoning_tokens(), 5);
}

/// Bits of replies in any order, so that every state meets every tag.
fn bits() -> impl Strategy<Value = Vec<String>> {
    let bit = prop_oneof![
        prop::sample::select(vec![
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "\n",
            "\n\n",
            "{\"name\": \"write\", \"arguments\": {\"path\": \"",
            "{\"name\": \"f\", \"arguments\": {}}",
            "{\"arguments\": {\"a\": [1, 2]}, \"name\": \"f\"}",
            "\"}}",
            "<function=write>",
            "<parameter=path>",
            "<parameter=lines>",
            "</parameter>",
            "</function>",
            "STOP",
            "User:",
            "7",
        ])
        .prop_map(str::to_owned),
        "[a<>/{}\":, é]{0,3}",
    ];
    proptest::collection::vec(bit, 0..16)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_pieces_give_the_same_events(bits in bits(), cuts in proptest::collection::vec(0..400_usize, 0..24), inside in any::<bool>()) {
        let whole = bits.concat();
        let reasoning = if inside { ReasoningStart::Inside } else { ReasoningStart::MayOpen };
        let options = || ReplyOptions { reasoning, ..options() };
        let mut at: Vec<usize> = cuts.into_iter().filter(|&cut| cut <= whole.len() && whole.is_char_boundary(cut)).collect();
        at.extend([0, whole.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|ends| &whole[ends[0]..ends[1]]).collect();
        prop_assert_eq!(read(options(), pieces), read(options(), [whole.as_str()]));
    }

    #[test]
    fn calls_are_whole_objects_and_well_ordered(bits in bits()) {
        let mut open = None;
        let mut begun = 0;
        let mut arguments = String::new();
        for event in read(options(), bits.iter().map(String::as_str)).0 {
            match event {
                Delta::ToolCall { index, name } => {
                    prop_assert!(open.is_none() && index == begun && !name.is_empty());
                    (open, begun) = (Some(index), begun + 1);
                    arguments.clear();
                }
                Delta::ToolArguments { index, text } => {
                    prop_assert_eq!(open, Some(index));
                    arguments += &text;
                }
                Delta::ToolEnd { index, is_whole } => {
                    prop_assert_eq!(open.take(), Some(index));
                    let parsed = serde_json::from_str::<serde_json::Value>(&arguments);
                    prop_assert!(!is_whole || parsed.is_ok_and(|value| value.is_object()), "{}", arguments);
                }
                Delta::Content(_) | Delta::Reasoning(_) => prop_assert!(open.is_none()),
            }
        }
        prop_assert!(open.is_none());
    }

    #[test]
    fn plain_text_is_given_back_to_the_letter(text in "[a-z<>{} \n]{0,40}") {
        let found: String = read(options(), text.split_inclusive(' ')).0.into_iter().map(|event| match event {
            Delta::Content(text) => text,
            other => panic!("{other:?}"),
        }).collect();
        prop_assert_eq!(found, text);
    }
}
