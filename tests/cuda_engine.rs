//! Goal: the engine on the `cuda` backend computes what it computes on `host`. Method: teacher-forced logits of the same tokens on both,
//! compared position by position, and greedy texts, whose tokens may part only where the two best were close. On the look-alike driver of
//! `tests/fake-gpu/`; with EBBTIDE_REAL_GPU=1 on the card, with more of the held-out text.

mod common;
#[path = "common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;

use std::sync::Arc;

use common::engine::{all_logits, bard, engine, exact_settings, greedy, hybrid_bard, run, settings, synthetic_model, tokens};
use ebbtide::backend::{Backend, Capabilities};
use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
use ebbtide::engine::Engine;
use ebbtide::engine::sampler::argmax;
use ebbtide::model::Model;
use ebbtide::settings::{Activations, EngineSettings, KvType};
use ebbtide::units::{Bytes, TokenId};
use fake_gpu::{is_real, on_either};

/// Largest divergence at a position, in nats, of a prompt that both read in 16-bit floats: they differ by the order of sums in f32, which now
/// and then moves a number to the next 16-bit float.
const ROUNDED_NATS: f64 = 1e-3;
/// The same on a card, whose matrix units round sums otherwise, so that now and then an expert that was nearly tied is exchanged: one of 2,048
/// positions came to 0.009 on an H200.
const ROUNDED_NATS_ON_A_CARD: f64 = 0.02;
/// The same in exact arithmetic.
const EXACT_NATS: f64 = 1e-6;
/// What rounding to 16-bit floats itself may cost at a position, in nats, but for few of them: there a nearly tied expert is exchanged.
const ROUNDING_NATS: f64 = 0.02;
/// One position of so many may be such.
const FEW: usize = 50;
/// A gap of the two best logits above which no rounding may exchange them.
const CLEAR_GAP: f32 = 0.1;

fn rounded_nats() -> f64 {
    if is_real() { ROUNDED_NATS_ON_A_CARD } else { ROUNDED_NATS }
}

fn on_cuda(model: &Arc<Model>, settings: &EngineSettings) -> Engine<CudaBackend> {
    let device = CudaBackend::open(&DeviceChoice::Best).expect("the device opens");
    // A card's context is a part of the limit; what is left is as much as the host has.
    let Capabilities { context_bytes, context_growth_bytes, .. } = *device.capabilities();
    let settings = &EngineSettings { vram: settings.vram + context_bytes + context_growth_bytes, ..settings.clone() };
    Engine::start(device, Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts")
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    logits.iter().map(|logit| f64::from(*logit) - largest - total.ln()).collect()
}

/// Kullback-Leibler divergence of the second from the first.
fn divergence(expected: &[f32], actual: &[f32]) -> f64 {
    log_probabilities(expected).iter().zip(log_probabilities(actual)).map(|(expected, actual)| expected.exp() * (expected - actual)).sum()
}

fn gap_of_best(logits: &[f32]) -> f32 {
    let best = argmax(logits).expect("logits") as usize;
    let second = logits.iter().enumerate().filter(|(token, _)| *token != best).map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    logits[best] - second
}

/// Settings under which the host rounds as the card does: it reads prompts in 16-bit floats only where it is asked to.
fn as_on_cuda(settings: &EngineSettings) -> EngineSettings {
    let activations = if settings.activations == Activations::Q8 { Activations::F16 } else { settings.activations };
    EngineSettings { activations, ..settings.clone() }
}

#[track_caller]
fn assert_same_logits(what: &str, model: &Arc<Model>, settings: &EngineSettings, text: &[TokenId], nats: f64) {
    let expected = all_logits(&mut engine(model, &as_on_cuda(settings)), text);
    let actual = all_logits(&mut on_cuda(model, settings), text);
    assert_eq!(expected.len(), actual.len());
    let mut largest = 0.0_f64;
    for (position, (expected, actual)) in expected.iter().zip(&actual).enumerate() {
        let apart = divergence(expected, actual);
        // A NaN is below no bound.
        assert!(apart <= nats, "{what}: {apart:e} nats at position {position}, at most {nats:e}");
        largest = largest.max(apart);
        let clear = gap_of_best(expected) > CLEAR_GAP;
        assert!(!clear || argmax(expected) == argmax(actual), "{what}: another best token at position {position}");
    }
    println(&format!("{what}: at most {largest:.2e} nats over {} positions", expected.len()));
}

#[allow(clippy::print_stdout, reason = "figures for whoever runs the test by hand")]
fn println(line: &str) {
    println!("{line}");
}

/// The host in 16-bit floats against the host without rounding.
#[track_caller]
fn assert_rounding_costs_little(what: &str, model: &Arc<Model>, settings: &EngineSettings, text: &[TokenId]) {
    let exact = all_logits(&mut engine(model, &EngineSettings { activations: Activations::F32, ..settings.clone() }), text);
    let rounded = all_logits(&mut engine(model, &as_on_cuda(settings)), text);
    let apart: Vec<f64> = exact.iter().zip(&rounded).map(|(exact, rounded)| divergence(exact, rounded)).collect();
    let (largest, above) =
        (apart.iter().copied().fold(0.0, f64::max), apart.iter().filter(|nats| nats.is_nan() || **nats > ROUNDING_NATS).count());
    println(&format!("{what}: rounding costs at most {largest:.2e} nats, {above} of {} above {ROUNDING_NATS}", apart.len()));
    assert!(largest > 0.0, "{what}: nothing was rounded");
    assert!(above <= apart.len() / FEW, "{what}: {above} of {} positions above {ROUNDING_NATS} nats, the worst {largest}", apart.len());
}

/// Prompt and greedy text on both; the texts part at most where the two best were close on the host.
#[track_caller]
fn assert_same_text(what: &str, model: &Arc<Model>, settings: &EngineSettings, prompt: &[TokenId], n_tokens: usize) {
    let request = greedy(prompt, n_tokens);
    let on_host = &as_on_cuda(settings);
    let expected = run(&mut engine(model, on_host), &request).tokens;
    let actual = run(&mut on_cuda(model, settings), &request).tokens;
    let Some(parted) = expected.iter().zip(&actual).position(|(expected, actual)| expected != actual) else {
        assert_eq!(expected.len(), actual.len(), "{what}");
        return println(&format!("{what}: {} tokens, all the same", expected.len()));
    };
    let text: Vec<TokenId> = prompt.iter().chain(&expected[..parted]).copied().collect();
    let rows = all_logits(&mut engine(model, on_host), &text);
    let gap = gap_of_best(&rows[text.len() - 1]);
    assert!(gap <= CLEAR_GAP, "{what}: token {parted} differs where the two best were {gap} apart");
    println(&format!("{what}: parted at token {parted}, where the two best were {gap} apart"));
}

#[test]
fn synthetic_models_have_the_logits_of_the_host() {
    on_either("synthetic_models_have_the_logits_of_the_host", || {
        for args in ["--shape micro --seed 2 --type Q4_K", "--arch qwen35moe --shape micro --seed 2 --type IQ4_NL --mtp 1"] {
            let model = synthetic_model(args);
            let text = tokens(3, 40, model.shape.n_vocab);
            assert_same_logits(args, &model, &settings(64), &text, rounded_nats());
            assert_same_logits(&format!("{args}, exact"), &model, &exact_settings(64), &text, EXACT_NATS);
        }
    });
}

/// Logits of every token of `text`, as bits, through captured windows of `n_rows` of which all are accepted.
fn bits_through_windows(model: &Arc<Model>, text: &[TokenId], n_rows: usize) -> Vec<u32> {
    let mut engine = on_cuda(model, &settings(64));
    let mut all = Vec::new();
    for window in text.chunks(n_rows) {
        let mut logits = Vec::new();
        engine.window(window, Some(&mut logits)).expect("a window");
        engine.accept(window.len()).expect("accepted");
        all.extend(logits.iter().map(|logit| logit.to_bits()));
    }
    all
}

#[test]
fn every_row_of_a_window_has_the_bits_of_a_window_of_one() {
    on_either("every_row_of_a_window_has_the_bits_of_a_window_of_one", || {
        for args in ["--shape micro --seed 2 --type Q4_K", "--arch qwen35moe --shape micro --seed 2 --type IQ4_NL"] {
            let model = synthetic_model(args);
            let text = tokens(9, 15, model.shape.n_vocab);
            let alone = bits_through_windows(&model, &text, 1);
            for n_rows in [2, 5, 8] {
                assert!(bits_through_windows(&model, &text, n_rows) == alone, "{args}: windows of {n_rows}");
            }
        }
    });
}

#[test]
fn a_synthetic_model_writes_the_text_of_the_host() {
    on_either("a_synthetic_model_writes_the_text_of_the_host", || {
        for args in
            ["--shape micro --seed 3 --type IQ3_XXS --head-type Q5_K", "--arch qwen35moe --shape micro --seed 4 --type Q4_K --mtp 1"]
        {
            let model = synthetic_model(args);
            let prompt = tokens(5, 70, model.shape.n_vocab);
            assert_same_text(args, &model, &EngineSettings { kv: KvType::Q8_0, ..settings(128) }, &prompt, 12);
        }
    });
}

/// The beginning of the text that the bundled models were not trained on.
fn held_out(n_tokens: usize) -> Vec<TokenId> {
    let numbers = include_bytes!("../assets/held.u16").as_chunks::<2>().0;
    numbers[..n_tokens].iter().map(|bytes| u16::from_le_bytes(*bytes).into()).collect()
}

#[test]
fn bundled_models_have_logits_and_text_of_the_host() {
    on_either("bundled_models_have_logits_and_text_of_the_host", || {
        // The look-alike computes some hundred positions in a second.
        let (n_read, n_prompt, n_written) = if is_real() { (1024, 600, 200) } else { (66, 60, 6) };
        let roomy = |settings: EngineSettings| EngineSettings { vram: Bytes::mib(128), ..settings };
        for (name, model) in [("bard", bard()), ("hybrid bard", hybrid_bard())] {
            let text = held_out(n_read);
            assert_same_logits(name, &model, &roomy(settings(1024)), &text, rounded_nats());
            assert_rounding_costs_little(name, &model, &roomy(settings(1024)), &text);
            assert_same_logits(&format!("{name}, exact"), &model, &roomy(exact_settings(1024)), &text, EXACT_NATS);
            assert_same_text(name, &model, &roomy(settings(1024)), &text[..n_prompt], n_written);
        }
    });
}
