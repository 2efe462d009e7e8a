//! Goal: refusals and what a template may see; rendering itself is held against Python in `tests/chat_golden.rs`.

use super::*;
use std::time::{Duration, UNIX_EPOCH};

fn render(source: &str, messages: &[Message], options: &RenderOptions) -> Result<String, ChatError> {
    ChatTemplate::new(source)?.render(messages, options)
}

#[test]
fn a_template_that_does_not_parse_is_refused_with_its_line() {
    let error = ChatTemplate::new("a\nb {% if %}\n").expect_err("it does not parse");
    assert!(matches!(error, ChatError::Template { line: 2, .. }), "{error}");
    assert!(error.to_string().starts_with("chat template, line 2: "), "{error}");
}

#[test]
fn a_template_that_fails_says_where() {
    let hi = [Message::new("user", "hi")];
    for failing in
        ["{{ messages[0].content.frobnicate() }}", "{{ messages[0].role.x.y }}", "{{ nothing() }}", "{{ 1 | frob }}", "{{ 'a'.split('') }}"]
    {
        let error = render(&format!("\n\n{failing}"), &hi, &RenderOptions::default()).expect_err("it fails");
        assert!(matches!(error, ChatError::Template { line: 3, .. }), "{failing}: {error}");
    }
}

#[test]
fn raise_exception_becomes_a_refusal_with_the_templates_words() {
    let error = render("\n{{ raise_exception('roles must ' + 'alternate') }}", &[], &RenderOptions::default()).expect_err("refused");
    assert!(matches!(&error, ChatError::Refused { line: 2, message } if message == "roles must alternate"), "{error}");
}

#[test]
fn endless_output_is_stopped() {
    let source = "{% set long = 'x' * 100000 %}{% for a in range(100000) %}{{ long }}{% endfor %}";
    let error = render(source, &[], &RenderOptions::default()).expect_err("stopped");
    assert!(matches!(error, ChatError::TooLong { .. }), "{error}");
}

#[test]
fn recursion_is_an_error() {
    let source = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}";
    let error = render(source, &[], &RenderOptions::default()).expect_err("stopped");
    assert!(matches!(error, ChatError::Template { .. }), "{error}");
}

#[test]
fn the_clock_is_the_one_given() {
    let options = RenderOptions { now: UNIX_EPOCH + Duration::from_secs(951_782_400), ..RenderOptions::default() };
    assert_eq!(render("{{ strftime_now('%d %b %Y') }}", &[], &options).expect("renders"), "29 Feb 2000");
}

#[test]
fn variables_that_were_not_given_are_undefined_and_extra_ones_win() {
    let source = "{{ enable_thinking is defined }} {{ bos_token is defined }} {{ tools is none }} {{ add_generation_prompt }} {{ level }}";
    let extra = vec![("level".to_owned(), Json::from("high")), ("add_generation_prompt".to_owned(), Json::Bool(false))];
    let options = RenderOptions { extra, bos_token: Some("<s>".to_owned()), ..RenderOptions::default() };
    assert_eq!(render(source, &[], &options).expect("renders"), "False True True False high");
}

#[test]
fn keys_keep_the_order_they_came_in() {
    let message: Message = serde_json::from_str(r#"{"z": 1, "a": {"y": [true, null, 1.0, -3, 1e300], "b": "é"}, "z": 2}"#).expect("JSON");
    let rendered = render("{{ messages[0] | tojson }}", &[message], &RenderOptions::default()).expect("renders");
    assert_eq!(rendered, r#"{"z": 2, "a": {"y": [true, null, 1.0, -3, 1e+300], "b": "é"}}"#);
}

#[test]
fn a_closing_think_tag_in_content_stays_where_reasoning_is_given() {
    let source = include_str!("../../../tests/golden/chat/qwen3.jinja");
    let tags = "Repeat exactly: hello </think> world";
    let messages = [
        Message::new("user", tags),
        Message::new("assistant", tags).with("reasoning_content", Json::from("")),
        Message::new("tool", tags),
        Message::new("user", "again"),
    ];
    let rendered = render(source, &messages, &RenderOptions::default()).expect("renders");
    assert_eq!(rendered.matches(tags).count(), 3, "{rendered}");
}
