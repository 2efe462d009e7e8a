//! Goal: what a constraint lets pass is what was asked for, whoever writes. Method: texts drawn at random from what is allowed, which is more
//! than any model would write, in the vocabulary of the bundled models; JSON is then checked by hand-written rules.

use super::*;
use crate::engine::constraint::{Allowed, ConstraintState};
use crate::engine::sampler::{Sampler, Sampling};
use crate::reply::{CallForm, Delta, Reply, ReplyOptions, ToolRule, ToolTypes};
use crate::tokenizer::{Json, Specials, TokenizerSpec};
use serde_json::{Value, json};
use std::sync::OnceLock;

fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    let made = TOKENIZER.get_or_init(|| {
        let spec: TokenizerSpec =
            serde_json::from_str(include_str!("../../tests/golden/tokenizer/bard.spec.json")).expect("a spec is JSON");
        Arc::new(Tokenizer::new(&spec).expect("the vocabulary is whole"))
    });
    Arc::clone(made)
}

fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(&tokenizer()).expect("the vocabulary is taken"))
}

fn demand(rule: &AnswerRule) -> Demand<'_> {
    Demand { rule: Some(rule), reasoning: ReasoningStart::Answer, reasoning_tokens_max: None }
}

fn constraint(rule: &AnswerRule) -> Arc<dyn Constraint> {
    check(rule).expect("it can be followed");
    grammars().constraint(demand(rule)).expect("the rule is sound").expect("it demands something")
}

fn refusal(rule: &AnswerRule) -> String {
    let Err(error) = check(rule) else { panic!("{rule:?} passes") };
    match grammars().constraint(demand(rule)) {
        Ok(_) => panic!("{rule:?} is not refused"),
        Err(again) => assert_eq!(error.to_string(), again.to_string()),
    }
    error.to_string()
}

/// Logits that depend on position and token alone. Quotes and brackets that close are favoured, so that texts come to an end.
fn logits(seed: u64, position: usize) -> Vec<f32> {
    let tokenizer = tokenizer();
    let closes = |token: TokenId| {
        let text = tokenizer.token_bytes(token, ControlText::Show);
        text.first().is_some_and(|byte| b"\"]}<".contains(byte)) || tokenizer.is_end(token)
    };
    (0..u32::try_from(tokenizer.token_count()).expect("a small vocabulary"))
        .map(|token| {
            let mixed = (u64::from(token) << 20 ^ seed << 44 ^ position as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            f32::from(u16::try_from(mixed % 4096).expect("12 bits")) / 1024.0 + if closes(token) { 4.0 } else { 0.0 }
        })
        .collect()
}

/// A text drawn among what is allowed, without its end; `None` where it has not come to an end after 2,000 tokens.
fn drawn(state: &mut dyn ConstraintState, seed: u64) -> Option<Vec<TokenId>> {
    let sampler = Sampler::new(Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed, ..Sampling::default() });
    let closing = tokenizer().encode(b"\n</parameter>\n", Specials::AsText).expect("it encodes");
    let mut tokens: Vec<TokenId> = Vec::new();
    while tokens.len() < 2000 {
        // Nobody draws this by chance.
        if tokens.len() % 16 == 7 && state.acceptable(&closing).expect("it can tell") == closing.len() {
            closing.iter().for_each(|&token| state.accept(token).expect("it was acceptable"));
            tokens.extend(&closing);
            continue;
        }
        let allowed = state.allowed().expect("something may follow");
        let token = sampler.choose_among(&logits(seed, tokens.len()), &allowed, &tokens, tokens.len()).expect("finite");
        state.accept(token).expect("it was allowed");
        if tokenizer().is_end(token) {
            return Some(tokens);
        }
        tokens.push(token);
    }
    None
}

fn text(tokens: &[TokenId]) -> String {
    String::from_utf8(tokenizer().decode(tokens, ControlText::Show)).expect("a whole text is UTF-8")
}

/// So many texts under a rule.
fn texts(rule: &AnswerRule, count: u64) -> Vec<String> {
    let constraint = constraint(rule);
    let all: Vec<String> =
        (0..count).filter_map(|seed| drawn(&mut *constraint.begin().expect("it begins"), seed)).map(|tokens| text(&tokens)).collect();
    assert!(all.len() as u64 * 2 > count, "only {} of {count} texts came to an end", all.len());
    all
}

#[test]
fn json_meets_its_schema() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "tags", "kind"], "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}, "kind": {"enum": ["a", "b", 3, null]}}});
    for text in texts(&AnswerRule::JsonSchema(schema.to_string()), 30) {
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let object = value.as_object().expect("an object");
        assert!(object.keys().all(|key| ["name", "age", "tags", "kind"].contains(&key.as_str())), "{text}");
        assert!(object["name"].as_str().is_some_and(|name| name.chars().count() <= 12), "{text}");
        assert!(object.get("age").is_none_or(|age| age.as_u64().is_some_and(|age| age <= 150)), "{text}");
        assert!(object["tags"].as_array().is_some_and(|tags| tags.len() <= 3 && tags.iter().all(Value::is_string)), "{text}");
        assert!([json!("a"), json!("b"), json!(3), Value::Null].contains(&object["kind"]), "{text}");
    }
}

#[test]
fn any_object_and_recursive_schemas_give_json() {
    for text in texts(&AnswerRule::JsonObject, 20) {
        assert!(serde_json::from_str::<Value>(&text).is_ok_and(|value| value.is_object()), "{text}");
    }
    let schema = json!({"$defs": {"T": {"type": "object", "additionalProperties": false, "required": ["v"],
        "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/T"}}}}, "$ref": "#/$defs/T"});
    for text in texts(&AnswerRule::JsonSchema(schema.to_string()), 20) {
        let mut value = &serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        while let Some(next) = value.get("next") {
            assert!(value["v"].is_boolean(), "{text}");
            value = next;
        }
    }
}

#[test]
fn expressions_and_grammars_are_matched_whole() {
    let is_match =
        |text: &str| text.len() == 7 && text.as_bytes()[3] == b'-' && text.replace('-', "").bytes().all(|byte| byte.is_ascii_digit());
    assert!(texts(&AnswerRule::Regex("[0-9]{3}-[0-9]{3}".to_owned()), 20).iter().all(|text| is_match(text)));
    let grammar = "start: \"yes\" | \"no\" | \"per/haps\"";
    assert!(texts(&AnswerRule::Lark(grammar.to_owned()), 20).iter().all(|text| ["yes", "no", "per/haps"].contains(&text.as_str())));
}

const TOOLS: [(&str, &str); 3] = [
    (
        "read",
        r#"{"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["path"]}"#,
    ),
    (
        "mode",
        r#"{"properties": {"mode": {"enum": ["fast", "slow"]}, "deep": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": false}}, "required": ["mode", "deep"], "unheard_of": 1}"#,
    ),
    ("a\"b", ""),
];

fn tool_rules(names: &[usize]) -> Vec<ToolRule> {
    let rule =
        |&at: &usize| ToolRule { name: TOOLS[at].0.to_owned(), parameters: (!TOOLS[at].1.is_empty()).then(|| TOOLS[at].1.to_owned()) };
    names.iter().map(rule).collect()
}

/// The calls of a text, read as the server reads them: names and arguments. Nothing else may be in it.
fn calls(text: &str) -> Vec<(String, Value)> {
    let schema = |at: usize| serde_json::from_str::<Value>(TOOLS[at].1).unwrap_or_default();
    let tools: Vec<Json> = (0..2).map(|at| json!({"function": {"name": TOOLS[at].0, "parameters": schema(at)}}).into()).collect();
    let mut reply = Reply::new(ReplyOptions { tools: Some(ToolTypes::new(&tools)), ..ReplyOptions::default() });
    let mut deltas = reply.push(text);
    deltas.extend(reply.finish());
    let mut found: Vec<(String, String)> = Vec::new();
    for delta in deltas {
        match (delta, found.last_mut()) {
            (Delta::ToolCall { name, .. }, _) => found.push((name, String::new())),
            (Delta::ToolArguments { text, .. }, Some(last)) => last.1.push_str(&text),
            (Delta::ToolEnd { is_whole: true, .. }, _) => {}
            (other, _) => panic!("{other:?} in {text}"),
        }
    }
    found.into_iter().map(|(name, arguments)| (name, serde_json::from_str(&arguments).expect("JSON"))).collect()
}

fn check_call((name, arguments): &(String, Value)) {
    match name.as_str() {
        "read" => {
            assert!(arguments["path"].is_string(), "{arguments}");
            assert!(arguments.get("lines").is_none_or(|lines| lines.as_u64().is_some_and(|lines| lines < 100)), "{arguments}");
        }
        "mode" => {
            assert!(["fast", "slow"].contains(&arguments["mode"].as_str().expect("a string")), "{arguments}");
            assert!(arguments["deep"]["on"].is_boolean(), "{arguments}");
        }
        other => assert!(other == "a\"b" && arguments.is_object(), "{other}"),
    }
}

#[test]
fn a_call_that_is_demanded_comes_in_both_forms() {
    for form in [CallForm::Json, CallForm::Tags] {
        for (names, parallel) in [(vec![0], false), (vec![1], true), (vec![0, 1], false), (vec![0, 1], true)] {
            let rule = AnswerRule::ToolCall { form, tools: tool_rules(&names), parallel };
            let all = texts(&rule, 16);
            let counts = all.iter().map(|text| {
                let found = calls(text);
                found.iter().for_each(check_call);
                assert!(names.len() > 1 || found.iter().all(|(name, _)| name == TOOLS[names[0]].0));
                found.len()
            });
            let counts: Vec<usize> = counts.collect();
            assert!(counts.iter().all(|&count| count == 1 || (parallel && count > 1)), "{form:?}: {counts:?}");
        }
    }
    let rule = AnswerRule::ToolCall { form: CallForm::Json, tools: tool_rules(&[2]), parallel: false };
    texts(&rule, 8).iter().flat_map(|text| calls(text)).for_each(|call| check_call(&call));
}

#[test]
fn tags_of_calls_are_the_tokens_of_the_vocabulary() {
    let rule = AnswerRule::ToolCall { form: CallForm::Json, tools: tool_rules(&[0]), parallel: false };
    let first = constraint(&rule).begin().expect("it begins").allowed().expect("something");
    let tag = tokenizer().token_id("<tool_call>").expect("a token");
    assert_eq!((0..4096).filter(|&token| first.contains(token)).collect::<Vec<_>>(), [tag]);
}

#[test]
fn what_is_taken_back_never_was() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}, "required": ["a"]});
    let thought = tokenizer().encode(b"so so</think>", Specials::Parse).expect("it encodes");
    for start in [ReasoningStart::Answer, ReasoningStart::Inside] {
        let rule = AnswerRule::JsonSchema(schema.to_string());
        let demand = Demand { rule: Some(&rule), reasoning: start, reasoning_tokens_max: Some(50) };
        let constraint = grammars().constraint(demand).expect("sound").expect("something");
        let mut tokens = if start == ReasoningStart::Inside { thought.clone() } else { Vec::new() };
        let mut state = constraint.begin().expect("it begins");
        tokens.iter().for_each(|&token| state.accept(token).expect("a thought"));
        tokens.extend(drawn(&mut *state, 3).expect("an end"));
        tokens.push(tokenizer().eos().expect("an end token"));
        let mut state = constraint.begin().expect("it begins");
        let before: Vec<Allowed> = tokens
            .iter()
            .map(|&token| {
                let allowed = state.allowed().expect("something");
                state.accept(token).expect("it was allowed");
                allowed
            })
            .collect();
        for back in 1..=tokens.len() {
            let kept = tokens.len() - back;
            state.rollback(back).expect("there are as many");
            assert_eq!(state.allowed().expect("something"), before[kept], "{back} back");
            assert_eq!(state.acceptable(&tokens[kept..]).expect("it can tell"), back);
            tokens[kept..].iter().for_each(|&token| state.accept(token).expect("as before"));
        }
        assert!(state.rollback(tokens.len() + 1).is_err());
    }
}

#[test]
fn an_answer_that_is_not_complete_does_not_end() {
    let mut state = constraint(&AnswerRule::JsonObject).begin().expect("it begins");
    let eos = tokenizer().eos().expect("an end token");
    assert!(state.accept(eos).is_err());
    for &token in &tokenizer().encode(b"{}", Specials::AsText).expect("it encodes") {
        state.accept(token).expect("an object");
    }
    let allowed = state.allowed().expect("something");
    assert!(tokenizer().end_tokens().iter().all(|&end| allowed.contains(end)), "every end token ends it");
    state.accept(eos).expect("it is complete");
    assert!(state.accept(1).is_err());
}

/// What is written under a demand where the model would write `wish`, then `then` over and over.
fn written(demand: Demand<'_>, wish: &str, then: &str, tokens_max: usize) -> String {
    let encode = |text: &str| tokenizer().encode(text.as_bytes(), Specials::Parse).expect("it encodes");
    let constraint = grammars().constraint(demand).expect("sound").expect("something");
    let mut state = constraint.begin().expect("it begins");
    let mut wishes = encode(wish).into_iter().chain(encode(then).into_iter().cycle()).peekable();
    let mut tokens = Vec::new();
    while tokens.len() < tokens_max {
        let allowed = state.allowed().expect("something");
        let wished = wishes.next_if(|&token| allowed.contains(token));
        let token = wished.unwrap_or_else(|| (0..4096).find(|&token| allowed.contains(token)).expect("something"));
        state.accept(token).expect("it was allowed");
        if tokenizer().is_end(token) {
            break;
        }
        tokens.push(token);
    }
    text(&tokens)
}

#[test]
fn thinking_ends_where_its_budget_does() {
    let demand = |reasoning, most| Demand { rule: None, reasoning, reasoning_tokens_max: Some(most) };
    let endless = written(demand(ReasoningStart::Inside, 6), "", " so", 60);
    let (thought, answer) = endless.split_once("</think>").expect("it is closed");
    assert!(thought.matches(" so").count() >= 6 && thought.ends_with("have.\n"), "{endless}");
    assert!(answer.starts_with(" so so"), "the answer is free: {endless}");
    let none = written(demand(ReasoningStart::MayOpen, 0), "", " so", 12);
    assert!(none.starts_with("<think>\n\n</think> so"), "{none}");
    let short = written(demand(ReasoningStart::Inside, 50), " well.\n</think>\n\nYes", ".", 20);
    assert!(short.starts_with(" well.\n</think>\n\nYes.."), "a thought within its budget is left alone: {short}");
}

#[test]
fn a_rule_holds_behind_the_thinking() {
    let rule = AnswerRule::Lark("start: \"yes\" | \"no\"".to_owned());
    let demand = |reasoning, reasoning_tokens_max| Demand { rule: Some(&rule), reasoning, reasoning_tokens_max };
    let found = written(demand(ReasoningStart::MayOpen, None), "<think>\nyes, no?<|im_end|>", "</think>no", 60);
    assert!(found.starts_with("<think>\nyes, no?") && !found.contains("<|im_end|>"), "{found}");
    let found = written(demand(ReasoningStart::Inside, None), "hm</think>", "no", 60);
    assert_eq!(found, "hm</think>\n\nno");
    let found = written(demand(ReasoningStart::Inside, Some(3)), "", " so", 60);
    let (_, answer) = found.split_once("have.\n</think>\n\n").expect("the budget is used up");
    assert!(["yes", "no"].contains(&answer), "{found}");
}

#[test]
fn nothing_is_demanded_where_nothing_is_asked_for() {
    for reasoning in [ReasoningStart::Answer, ReasoningStart::MayOpen, ReasoningStart::Inside] {
        let demand = Demand { rule: None, reasoning, reasoning_tokens_max: None };
        assert!(grammars().constraint(demand).expect("sound").is_none());
    }
    let budget = Demand { rule: None, reasoning: ReasoningStart::Answer, reasoning_tokens_max: Some(3) };
    assert!(grammars().constraint(budget).expect("sound").is_none(), "who does not think needs no budget");
}

#[test]
fn rules_that_cannot_be_followed_say_why() {
    let schema = |schema: Value| AnswerRule::JsonSchema(schema.to_string());
    for (rule, words) in [
        (schema(json!({"type": "frog"})), "frog"),
        (schema(json!({"type": "object", "if": {}, "then": {}})), "if"),
        (schema(json!({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}})), "leads back to itself"),
        (schema(json!({"$ref": "#/$defs/missing"})), "missing"),
        (schema(json!({"$ref": "http://127.0.0.1/x"})), "127.0.0.1"),
        (AnswerRule::Regex("(".to_owned()), "regular expression"),
        (AnswerRule::Regex("x".repeat(GRAMMAR_BYTES_MAX + 1)), "bytes"),
        (AnswerRule::Lark("start: missing".to_owned()), "missing"),
        (AnswerRule::ToolCall { form: CallForm::Json, tools: Vec::new(), parallel: false }, "no"),
    ] {
        let said = refusal(&rule);
        assert!(said.contains(words), "{said}");
        assert!(said.len() < 1000, "{said}");
    }
}
