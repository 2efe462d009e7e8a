//! Goal: constrained text is what was asked for, whatever the model would have written, and drafts do not change it. Method: the bundled
//! models, which know no JSON at all, at a temperature of 1, with each source of drafts and without; the texts are parsed and checked.

#[path = "common/mod.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod common;

use std::sync::Arc;

use common::engine::{bard, engine, greedy, hybrid_bard, run, settings};
use ebbtide::engine::sampler::Sampling;
use ebbtide::engine::{Finish, Outcome, Request};
use ebbtide::grammar::{Demand, Grammars};
use ebbtide::model::Model;
use ebbtide::reply::{AnswerRule, CallForm, Delta, ReasoningStart, Reply, ReplyOptions, ToolRule, ToolTypes};
use ebbtide::settings::{DraftSetting, DraftSettings, EngineSettings};
use ebbtide::tokenizer::{ControlText, Specials, Tokenizer};
use serde_json::{Value, json};

struct Rig {
    model: Arc<Model>,
    tokenizer: Arc<Tokenizer>,
    grammars: Grammars,
}

impl Rig {
    fn new(model: Arc<Model>) -> Self {
        let tokenizer = Arc::new(model.tokenizer().expect("it has a vocabulary"));
        let grammars = Grammars::new(&tokenizer).expect("the vocabulary is taken");
        Self { model, tokenizer, grammars }
    }

    fn request(&self, demand: Option<Demand<'_>>, seed: u64) -> Request {
        let prompt = self.tokenizer.encode(b"And it came to pass, that he answered and said,", Specials::AsText).expect("it encodes");
        Request {
            sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed, ..Sampling::default() },
            stop_tokens: self.tokenizer.end_tokens().to_vec(),
            constraint: demand.and_then(|demand| self.grammars.constraint(demand).expect("a sound rule")),
            ..greedy(&prompt, 300)
        }
    }

    /// One answer for each seed. Always drafting, so that windows of several rows are met whatever they cost.
    fn answers(&self, demand: Option<Demand<'_>>, source: DraftSetting, seeds: u64) -> Vec<Outcome> {
        let drafts = DraftSettings { source, always: source != DraftSetting::Off, ..DraftSettings::default() };
        let mut engine = engine(&self.model, &EngineSettings { drafts, ..settings(1024) });
        (0..seeds).map(|seed| run(&mut engine, &self.request(demand, seed))).collect()
    }

    /// Texts of a rule, the same with all sources of drafts; those that came to an end.
    fn texts(&self, demand: Demand<'_>, seeds: u64) -> Vec<String> {
        let plain = self.answers(Some(demand), DraftSetting::Off, seeds);
        for source in [DraftSetting::Lookup, DraftSetting::Mtp] {
            if source == DraftSetting::Mtp && !self.model.shape.has_draft_layer {
                continue;
            }
            let drafted = self.answers(Some(demand), source, seeds);
            let offered: u64 = drafted.iter().map(|outcome| outcome.drafts.offered()).sum();
            assert!(offered > 0, "{source}: no drafts were met");
            for (seed, (drafted, plain)) in drafted.iter().zip(&plain).enumerate() {
                assert_eq!((&drafted.tokens, drafted.finish), (&plain.tokens, plain.finish), "{source}, seed {seed}");
            }
        }
        let ended = plain.iter().filter(|outcome| outcome.finish == Finish::Stop);
        let texts: Vec<String> = ended.map(|outcome| self.tokenizer.decode_lossy(&outcome.tokens, ControlText::Show)).collect();
        assert!(texts.len() as u64 * 2 > seeds, "only {} of {seeds} came to an end", texts.len());
        texts
    }
}

fn demand(rule: &AnswerRule) -> Demand<'_> {
    Demand { rule: Some(rule), reasoning: ReasoningStart::Answer, reasoning_tokens_max: None }
}

fn verse_schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["speaker", "verse", "words"], "properties": {
        "speaker": {"type": "string", "maxLength": 20}, "verse": {"type": "integer", "minimum": 1, "maximum": 176},
        "words": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "maxLength": 10}}}})
}

fn check_verse(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    assert!(value["speaker"].as_str().is_some_and(|speaker| speaker.chars().count() <= 20), "{text}");
    assert!(value["verse"].as_u64().is_some_and(|verse| (1..=176).contains(&verse)), "{text}");
    let words = value["words"].as_array().expect("a list");
    assert!(
        (1..=3).contains(&words.len()) && words.iter().all(|word| word.as_str().is_some_and(|word| word.chars().count() <= 10)),
        "{text}"
    );
    assert_eq!(value.as_object().map(serde_json::Map::len), Some(3), "{text}");
}

#[test]
fn both_models_write_json_of_a_schema_with_drafts_and_without() {
    let rule = AnswerRule::JsonSchema(verse_schema().to_string());
    for model in [bard(), hybrid_bard()] {
        Rig::new(model).texts(demand(&rule), 6).iter().for_each(|text| check_verse(text));
    }
}

#[test]
fn a_demanded_call_is_read_back_whole() {
    let rig = Rig::new(hybrid_bard());
    let tool = json!({"type": "function", "function": {"name": "speak", "parameters": verse_schema()}});
    let mut schema = verse_schema();
    for form in [CallForm::Json, CallForm::Tags] {
        if form == CallForm::Tags {
            // A text between tags ends where the model writes the tag; these two never do.
            schema["properties"]["speaker"] = json!({"enum": ["Moses", "Job"]});
        }
        let tools = vec![ToolRule { name: "speak".to_owned(), parameters: Some(schema.to_string()) }];
        let rule = AnswerRule::ToolCall { form, tools, parallel: false };
        for text in rig.texts(demand(&rule), 4) {
            let types = ToolTypes::new(&[tool.clone().into()]);
            let mut reply = Reply::new(ReplyOptions { tools: Some(types), ..ReplyOptions::default() });
            let mut deltas = reply.push(&text);
            deltas.extend(reply.finish());
            let [Delta::ToolCall { name, .. }, Delta::ToolArguments { text: arguments, .. }, Delta::ToolEnd { is_whole: true, .. }] =
                deltas.as_slice()
            else {
                panic!("{deltas:?}")
            };
            assert_eq!(name, "speak");
            check_verse(arguments);
        }
    }
}

#[test]
fn thinking_keeps_to_its_budget_and_the_rule_to_the_answer() {
    let rig = Rig::new(hybrid_bard());
    let rule = AnswerRule::Regex("(yes|no), (he|she) (did|did not)".to_owned());
    let demand = Demand { rule: Some(&rule), reasoning: ReasoningStart::MayOpen, reasoning_tokens_max: Some(12) };
    for text in rig.texts(demand, 4) {
        let (thought, answer) = text.split_once("</think>\n\n").expect("the thought is closed");
        assert!(thought.starts_with("<think>\n"), "{text}");
        assert!(
            ["yes", "no"].iter().any(|word| answer.starts_with(word)) && answer.ends_with("did") | answer.ends_with("did not"),
            "{text}"
        );
    }
}

#[test]
fn a_constraint_that_allows_everything_changes_nothing() {
    let rig = Rig::new(bard());
    let rule = AnswerRule::Regex("(?s:.*)".to_owned());
    let free = rig.answers(None, DraftSetting::Off, 3);
    let constrained = rig.answers(Some(demand(&rule)), DraftSetting::Off, 3);
    for (free, constrained) in free.iter().zip(&constrained) {
        assert_eq!(free.tokens, constrained.tokens);
    }
}
