//! Goal: drafts change the time and never the text, whoever drafts, however tokens are chosen and wherever a text ends. Method: the trained
//! hybrid model with its draft block, and synthetic ones, beside engines without drafts, on the host backend in the virtual time of an
//! H200, where windows of many rows cost little and runs repeat exactly. Each test says which drafts it must have met.

#[path = "../common/mod.rs"]
mod common;
mod endings;
mod machinery;
mod time;

use std::ops::ControlFlow;
use std::sync::Arc;

use common::engine::{SharedFile, greedy, hybrid_bard, run, settings, synthetic_model, tokens};
use ebbtide::backends::host::{ClockProfile, HostBackend, HostConfig};
use ebbtide::engine::drafts::DraftCounters;
use ebbtide::engine::sampler::Sampling;
use ebbtide::engine::{Engine, Event, Outcome, Request};
use ebbtide::model::Model;
use ebbtide::settings::{DRAFTS_MAX, DraftSetting, DraftSettings, EngineSettings, ShortRead, SpecSetting, TokenSource};
use ebbtide::units::TokenId;

type Host = Engine<HostBackend>;

const DRAFTERS: [DraftSetting; 3] = [DraftSetting::Mtp, DraftSetting::Lookup, DraftSetting::Both];

fn open(settings: &EngineSettings) -> HostBackend {
    let config = HostConfig { clock: Some(ClockProfile::H200), ..HostConfig::new(settings.vram, settings.threads as usize) };
    HostBackend::open(&config).expect("threads can be started")
}

fn start(model: &Arc<Model>, settings: &EngineSettings) -> Host {
    Engine::start(open(settings), Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts")
}

fn drafting(source: DraftSetting, most: SpecSetting) -> DraftSettings {
    DraftSettings { source, most, ..DraftSettings::default() }
}

fn off() -> DraftSettings {
    drafting(DraftSetting::Off, SpecSetting::Auto)
}

/// Prompts are never read through windows: which way is the fastest depends on times, and windows round differently.
fn base(ctx_tokens: u32) -> EngineSettings {
    EngineSettings { short_read: ShortRead::Tokens(0), threads: 1, ..settings(ctx_tokens) }
}

/// `n` tokens of text that the trained models were not trained on.
fn held(from: usize, n: usize) -> Vec<TokenId> {
    let bytes = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/held.u16")).expect("bundled");
    let tokens = bytes.as_chunks::<2>().0.iter().map(|pair| TokenId::from(u16::from_le_bytes(*pair)));
    tokens.skip(from).take(n).collect()
}

/// Every kind of choice.
fn samplings() -> [(&'static str, Sampling); 8] {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let warm = |seed| Sampling { temperature: 0.8, top_k: 0, top_p: 1.0, seed, ..Sampling::default() };
    [
        ("greedy", greedy.clone()),
        ("warm", warm(1)),
        ("repeat penalty", Sampling { repeat_penalty: 1.2, ..greedy.clone() }),
        ("top-k and top-p", Sampling { top_k: 40, top_p: 0.9, ..warm(2) }),
        ("presence and frequency", Sampling { presence_penalty: 0.6, frequency_penalty: 0.3, ..greedy }),
        ("min-p", Sampling { min_p: 0.1, ..warm(3) }),
        ("all penalties, warm", Sampling { repeat_penalty: 1.1, presence_penalty: 0.2, frequency_penalty: 0.1, ..warm(4) }),
        ("other seed", warm(5)),
    ]
}

/// Drafts of several requests.
#[derive(Debug, Default)]
struct Met {
    offered: u64,
    accepted: u64,
    mtp: u64,
    lookup: u64,
}

impl Met {
    fn add(&mut self, drafts: &DraftCounters) {
        self.offered += drafts.offered();
        self.accepted += drafts.accepted();
        self.mtp += drafts.mtp.offered;
        self.lookup += drafts.lookup.offered;
    }

    /// Drafts were offered, and some held and some did not.
    fn check(&self, at: &str) {
        assert!(self.accepted > 0 && self.accepted < self.offered, "{at}: {self:?}");
    }
}

/// Runs requests on engines of all drafters and numbers of drafts, each request on a third of them, and compares with one that does not
/// draft. With `trained`, drafts of the draft layer have to be accepted, too.
fn same_text(model: &Arc<Model>, base: &EngineSettings, requests: &[(&str, Request)], drafters: &[DraftSetting], trained: bool) {
    let mut plain = start(model, &EngineSettings { drafts: off(), ..base.clone() });
    let expected: Vec<Outcome> = requests.iter().map(|(_, request)| run(&mut plain, request)).collect();
    for (number, &source) in drafters.iter().enumerate() {
        let mut met = Met::default();
        for most in 1..=DRAFTS_MAX {
            // Some draft whether or not it pays, some choose among a quarter of all tokens with a head of their own.
            let vocab = (most % 3 == 0).then(|| TokenSource::List((0..model.shape.n_vocab).step_by(4).collect()));
            let drafts = DraftSettings { always: most % 2 == 0, vocab, ..drafting(source, SpecSetting::Drafts(most)) };
            let mut engine = start(model, &EngineSettings { drafts, ..base.clone() });
            let some = requests.iter().zip(&expected).skip((most as usize + number) % 3).step_by(3);
            for ((name, request), expected) in some {
                let outcome = run(&mut engine, request);
                let at = format!("{name}, {source}, {most} drafts, deterministic {}", base.deterministic);
                assert_eq!(outcome.tokens, expected.tokens, "{at}");
                assert_eq!((outcome.logprobs.len(), &outcome.logprobs), (40, &expected.logprobs), "{at}");
                assert!(outcome.drafts.offered() <= outcome.drafts.windows * u64::from(most));
                met.add(&outcome.drafts);
            }
        }
        let uses = |used: DraftSetting| source == used || source == DraftSetting::Both;
        assert_eq!(met.mtp > 0, uses(DraftSetting::Mtp) && model.shape.has_draft_layer, "{source}: {met:?}");
        assert_eq!(met.lookup > 0, uses(DraftSetting::Lookup), "{source}: {met:?}");
        // A draft layer of random weights never guesses right.
        if trained || uses(DraftSetting::Lookup) {
            met.check(&source.to_string());
        }
    }
}

fn requests(prompt: impl Fn(usize) -> Vec<TokenId>) -> Vec<(&'static str, Request)> {
    let request = |(index, (name, sampling))| (name, Request { sampling, logprobs: Some(2), ..greedy(&prompt(index), 40) });
    samplings().into_iter().enumerate().map(request).collect()
}

#[test]
fn the_trained_model_writes_the_same_text_whoever_drafts() {
    let requests = requests(|index| held(1000 * index + 17, 60 + 7 * index));
    for deterministic in [true, false] {
        same_text(&hybrid_bard(), &EngineSettings { deterministic, ..base(256) }, &requests, &DRAFTERS, true);
    }
}

#[test]
fn synthetic_models_write_the_same_text_whoever_drafts() {
    // What random weights write repeats itself now and then, of these seeds most, which is all that a lookup can hold on to.
    let requests = requests(|index| tokens(index as u64, 20, 500).repeat(2));
    let hybrid = "--arch qwen35moe --shape micro --mtp 1 --seed 15 --type Q4_K --head-type Q6_K";
    let plain = "--shape micro --seed 17 --type Q4_K --head-type Q6_K";
    for (args, drafters) in [(hybrid, &DRAFTERS[..]), (plain, &DRAFTERS[1..])] {
        for deterministic in [true, false] {
            same_text(&synthetic_model(args), &EngineSettings { deterministic, ..base(256) }, &requests, drafters, false);
        }
    }
}

/// Runs a request to its end or until so many tokens are written.
fn run_until(engine: &mut Host, request: &Request, tokens_max: usize) -> Outcome {
    let mut written = 0;
    let outcome = engine.generate(request, &mut |event| {
        written += usize::from(matches!(event, Event::Token(_)));
        if written >= tokens_max { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    outcome.expect("cancelling is no error")
}

/// A file of window hashes in memory.
#[derive(Default)]
struct Hashes(SharedFile);

impl Hashes {
    /// Position and best tokens of each window that has logits.
    fn windows(&self) -> Vec<(usize, Vec<TokenId>)> {
        let text = self.0.text();
        let parse = |line: &str| {
            let columns: Vec<&str> = line.split(' ').collect();
            let best: Vec<TokenId> = columns[5].split(',').map(|token| token.parse().expect("a token")).collect();
            assert_eq!(columns[2], best.len().to_string(), "rows: {line}");
            (columns[1].parse().expect("a position"), best)
        };
        text.lines().filter(|line| !line.starts_with('#')).map(parse).collect()
    }
}
