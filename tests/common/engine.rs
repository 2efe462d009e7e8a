//! Models on disk and engines on the host backend, for tests.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use ebbtide::backend::Backend;
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::engine::sampler::Sampling;
use ebbtide::engine::{Engine, Outcome, Request};
use ebbtide::model::Model;
use ebbtide::settings::{Activations, ContextSetting, EngineSettings, KvType};
use ebbtide::units::{Bytes, TokenId};

use super::rewrite::Gguf;
use super::synthetic::Synthetic;

/// A file in the system's temporary folder, removed on drop.
pub struct TempFile(pub PathBuf);

impl TempFile {
    /// A name that no other test of any run uses.
    pub fn new(suffix: &str) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("ebbtide-test-{}-{number}{suffix}", std::process::id())))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // A file that was never written, or is gone already, needs no removal.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Writes the synthetic model that the arguments of `make_tiny_model.py` describe.
pub fn synthetic_file(args: &str) -> TempFile {
    let file = TempFile::new(".gguf");
    Synthetic::from_args(args).expect("valid arguments").write(&file.0).expect("the temporary folder can be written");
    file
}

/// Opens a synthetic model; the file may go once it is mapped.
pub fn synthetic_model(args: &str) -> Arc<Model> {
    Arc::new(Model::open(&synthetic_file(args).0).expect("a sound model"))
}

/// The synthetic model of `args`, whose odd layers have their experts in type `other` instead of `own`.
pub fn alternating_model(args: &str, own: &str, other: &str) -> Arc<Model> {
    let pieces = |args: &str| Gguf::parse(&Synthetic::from_args(args).expect("valid arguments").file_bytes().expect("a small model"));
    let (mut mixed, other) = (pieces(args), pieces(&args.replace(own, other)));
    for tensor in other.tensors {
        let layer = tensor.name.split('.').nth(1).and_then(|layer| layer.parse::<u32>().ok());
        if layer.is_some_and(|layer| layer % 2 == 1) && tensor.name.contains("_exps.") {
            let own = mixed.tensor_mut(&tensor.name);
            *own = tensor;
        }
    }
    let file = TempFile::new(".gguf");
    mixed.write(&file.0);
    Arc::new(Model::open(&file.0).expect("a sound model"))
}

/// The bundled trained model.
pub fn bard() -> Arc<Model> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen3moe-9m-IQ4_NL.gguf");
    Arc::new(Model::open(path).expect("the bundled model"))
}

/// The bundled trained model of delta nets and attention, with a draft block.
pub fn hybrid_bard() -> Arc<Model> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen35moe-22m-mtp-IQ4_NL.gguf");
    Arc::new(Model::open(path).expect("the bundled hybrid model"))
}

/// Settings of exact arithmetic: f32 activations and cache.
pub fn exact_settings(ctx_tokens: u32) -> EngineSettings {
    EngineSettings { kv: KvType::F32, activations: Activations::F32, ..settings(ctx_tokens) }
}

/// Default settings with a given context and two threads.
pub fn settings(ctx_tokens: u32) -> EngineSettings {
    EngineSettings { vram: Bytes::mib(256), ctx: ContextSetting::Tokens(ctx_tokens), threads: 2, ..EngineSettings::default() }
}

/// A simulated device as the settings ask for.
pub fn device(settings: &EngineSettings) -> HostBackend {
    HostBackend::open(&HostConfig::new(settings.vram, settings.threads as usize)).expect("threads can be started")
}

/// An engine on a fresh device.
pub fn engine(model: &Arc<Model>, settings: &EngineSettings) -> Engine<HostBackend> {
    Engine::start(device(settings), Arc::clone(model), settings, &mut |_, _| ()).expect("the engine starts")
}

/// A greedy request.
pub fn greedy(prompt: &[TokenId], tokens_max: usize) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Request { prompt: prompt.to_vec(), tokens_max, sampling, stop_tokens: Vec::new(), logprobs: None, constraint: None }
}

/// Runs a request to its end.
pub fn run<B: Backend>(engine: &mut Engine<B>, request: &Request) -> Outcome {
    engine.generate(request, &mut |_| ControlFlow::Continue(())).expect("the request runs")
}

/// Logits of every position.
pub fn all_logits<B: Backend>(engine: &mut Engine<B>, tokens: &[TokenId]) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let read = engine.logits(tokens, &mut |_| ControlFlow::Continue(()), &mut |row| rows.push(row.to_vec())).expect("logits");
    assert!(read.is_continue());
    rows
}

/// Logits of every position, and the draft block's: its row i guesses token i + 2 from the trunk's row i and token i + 1; the last row
/// takes the trunk's best token for the one that is missing.
pub fn all_logits_with_drafts<B: Backend>(engine: &mut Engine<B>, tokens: &[TokenId]) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
    let (mut rows, mut drafts) = (Vec::new(), Vec::new());
    let mut draft_sink = |row: &[f32]| drafts.push(row.to_vec());
    let read = engine
        .logits_with_drafts(tokens, &mut |_| ControlFlow::Continue(()), &mut |row| rows.push(row.to_vec()), Some(&mut draft_sink))
        .expect("logits");
    assert!(read.is_continue());
    (rows, drafts)
}

/// Pseudo-random tokens below `below`, the same for the same `seed`.
pub fn tokens(seed: u64, n: usize, below: u32) -> Vec<TokenId> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..n).map(|_| u32::try_from(next() % u64::from(below)).expect("below 2^32")).collect()
}
