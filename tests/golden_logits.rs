//! Goal: the engine computes what llama.cpp and plain mathematics compute. Method: synthetic models made here and the trained hybrid
//! one, results stored in `tests/golden/logits` (its README says how they were made and how close is right).
#![allow(clippy::print_stdout, reason = "figures for whoever runs the test by hand")]

mod common;

use std::sync::Arc;

use common::engine::{all_logits, all_logits_with_drafts, engine, exact_settings, greedy, hybrid_bard, run, settings, synthetic_model};
use ebbtide::engine::sampler::argmax;
use ebbtide::model::Model;
use ebbtide::settings::EngineSettings;
use serde::Deserialize;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/logits");
/// Models of attention alone.
const PLAIN: &str = "index.json";
/// Models of delta nets and attention with a draft block.
const HYBRID: &str = "hybrid.json";
/// Holds the longest stored prompt, 150 tokens, and 48 more.
const CTX_TOKENS: u32 = 256;
/// Largest difference of a logit from llama.cpp on F32 models.
const F32_TOLERANCE: f32 = 1e-4;
/// Largest difference of a logit from exact mathematics on quantised weights.
const EXACT_TOLERANCE: f32 = 1e-3;
/// Root mean square of the difference from llama.cpp where both round activations to 8 bits.
const ROUNDED_RMS: f64 = 0.4;
/// Divergence of a trained model from llama.cpp at any position where both round activations to 8 bits.
const ROUNDED_NATS: f64 = 0.02;

#[derive(Deserialize)]
struct Golden {
    name: String,
    /// `None`: the bundled hybrid model.
    args: Option<String>,
    tokens: Vec<u32>,
    first_row: usize,
    #[serde(flatten)]
    trunk: Matrices,
    drafts: Option<Matrices>,
    greedy: Vec<u32>,
    greedy_gaps: Vec<f32>,
    exact_greedy: Option<Vec<u32>>,
    exact_greedy_gaps: Option<Vec<f32>>,
}

/// Files of stored rows.
#[derive(Deserialize)]
struct Matrices {
    llama: String,
    numpy: Option<String>,
}

/// Whose logits.
#[derive(Clone, Copy)]
enum Part {
    Trunk,
    DraftBlock,
}

impl Golden {
    fn is_f32(&self) -> bool {
        self.trunk.numpy.is_none()
    }

    fn model(&self) -> Arc<Model> {
        self.args.as_deref().map_or_else(hybrid_bard, synthetic_model)
    }

    fn matrices(&self, part: Part) -> &Matrices {
        match part {
            Part::Trunk => &self.trunk,
            Part::DraftBlock => self.drafts.as_ref().expect("a model with a draft block"),
        }
    }

    /// The engine's rows from the first stored one on.
    fn rows(&self, part: Part, settings: &EngineSettings) -> Vec<Vec<f32>> {
        let mut engine = engine(&self.model(), settings);
        let mut rows = match part {
            Part::Trunk => all_logits(&mut engine, &self.tokens),
            Part::DraftBlock => all_logits_with_drafts(&mut engine, &self.tokens).1,
        };
        rows.split_off(self.first_row)
    }
}

fn goldens(list: &str) -> Vec<Golden> {
    let text = std::fs::read_to_string(format!("{FOLDER}/{list}")).expect("the list of models");
    serde_json::from_str(&text).expect("the list's form")
}

/// Rows of a NumPy 1.0 file of little-endian f32.
fn read_npy(name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(format!("{FOLDER}/{name}")).expect("a stored matrix");
    let header_len = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..10 + header_len]).expect("a text header");
    assert!(header.contains("'<f4'") && header.contains("'fortran_order': False"), "{header}");
    let shape = header.split_once("'shape': (").and_then(|(_, rest)| rest.split_once(')')).expect("a shape").0;
    let (_, columns) = shape.split_once(", ").expect("two dimensions");
    let columns: usize = columns.parse().expect("a number of columns");
    let values: Vec<f32> = bytes[10 + header_len..].as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    values.chunks(columns).map(<[f32]>::to_vec).collect()
}

fn largest_difference(left: &[f32], right: &[f32]) -> f32 {
    left.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The largest difference of any row from the stored `file`.
fn worst_row(golden: &Golden, rows: &[Vec<f32>], file: &str) -> f32 {
    let stored = read_npy(file);
    assert_eq!(rows.len(), stored.len(), "{}: rows", golden.name);
    let worst = rows.iter().zip(&stored).map(|(ours, theirs)| largest_difference(ours, theirs)).fold(0.0, f32::max);
    println!("{}: largest difference {worst:.2e}", golden.name);
    worst
}

/// Nats that `ours` loses where `theirs` is right.
fn divergence(ours: &[f32], theirs: &[f32]) -> f64 {
    let log_sum = |row: &[f32]| row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
    let (our_sum, their_sum) = (log_sum(ours), log_sum(theirs));
    let term = |(&ours, &theirs): (&f32, &f32)| {
        let their_log = f64::from(theirs) - their_sum;
        their_log.exp() * (their_log - (f64::from(ours) - our_sum))
    };
    ours.iter().zip(theirs).map(term).sum()
}

fn f32_models_match(list: &str, part: Part) {
    let mut compared = 0;
    for golden in goldens(list).iter().filter(|golden| golden.is_f32()) {
        let rows = golden.rows(part, &exact_settings(CTX_TOKENS));
        let worst = worst_row(golden, &rows, &golden.matrices(part).llama);
        assert!(worst <= F32_TOLERANCE, "{}: {worst}", golden.name);
        compared += 1;
    }
    assert!(compared >= 3, "{compared} models");
}

fn f32_models_write_the_stored_tokens(list: &str) {
    for golden in goldens(list).iter().filter(|golden| golden.is_f32()) {
        let mut engine = engine(&golden.model(), &exact_settings(CTX_TOKENS));
        let outcome = run(&mut engine, &greedy(&golden.tokens, golden.greedy.len()));
        let clear = golden.greedy_gaps.iter().take_while(|&&gap| gap > 2.0 * F32_TOLERANCE).count();
        assert_eq!(golden.greedy.len(), 48);
        assert_eq!(outcome.tokens[..clear], golden.greedy[..clear], "{}", golden.name);
        assert_eq!(clear, 48, "{}: a near-tie at {clear}: choose another seed", golden.name);
    }
}

fn exact_activations_match_plain_mathematics(list: &str, part: Part, models_min: usize) {
    let mut compared = 0;
    for golden in goldens(list) {
        let Some(numpy) = &golden.matrices(part).numpy else { continue };
        let rows = golden.rows(part, &exact_settings(CTX_TOKENS));
        let worst = worst_row(&golden, &rows, numpy);
        assert!(worst <= EXACT_TOLERANCE, "{}: {worst}", golden.name);
        compared += 1;
    }
    assert!(compared >= models_min, "{compared} models");
}

/// Eight rows a model are too few for a share of each, so the share of equal best tokens is taken over all models.
fn rounded_activations_stay_near_llama_cpp(list: &str, part: Part, rows_min: usize) {
    let (mut same, mut n_rows) = (0, 0);
    for golden in goldens(list).iter().filter(|golden| !golden.is_f32() && golden.args.is_some()) {
        let (mut squares, mut count) = (0.0, 0);
        for (ours, theirs) in golden.rows(part, &settings(CTX_TOKENS)).iter().zip(read_npy(&golden.matrices(part).llama)) {
            squares += ours.iter().zip(&theirs).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            count += u32::try_from(ours.len()).expect("a vocabulary");
            n_rows += 1;
            same += usize::from(argmax(ours) == argmax(&theirs));
        }
        let rms = (squares / f64::from(count)).sqrt();
        println!("{}: root mean square {rms:.3}", golden.name);
        assert!(rms < ROUNDED_RMS, "{}: {rms}", golden.name);
    }
    println!("best token the same at {same} of {n_rows}");
    assert!(n_rows >= rows_min && same * 10 >= n_rows * 8, "{same} of {n_rows}");
}

/// The trained model, which random experts' near-ties do not trouble: every position counts.
fn the_trained_model_diverges_little(part: Part) {
    let list = goldens(HYBRID);
    let golden = list.iter().find(|golden| golden.args.is_none()).expect("the trained model");
    for (ours, theirs) in golden.rows(part, &settings(CTX_TOKENS)).iter().zip(read_npy(&golden.matrices(part).llama)) {
        let nats = divergence(ours, &theirs);
        println!("{}: divergence {nats:.5} nats", golden.name);
        assert!(nats < ROUNDED_NATS, "{}: {nats}", golden.name);
    }
}

#[test]
fn f32_models_match_llama_cpp() {
    f32_models_match(PLAIN, Part::Trunk);
}

#[test]
fn f32_models_write_what_llama_cpp_writes() {
    f32_models_write_the_stored_tokens(PLAIN);
}

#[test]
fn quantised_models_with_exact_activations_match_plain_mathematics() {
    exact_activations_match_plain_mathematics(PLAIN, Part::Trunk, 7);
}

#[test]
fn quantised_models_with_rounded_activations_stay_near_llama_cpp() {
    rounded_activations_stay_near_llama_cpp(PLAIN, Part::Trunk, 50);
}

#[test]
fn stored_matrices_have_the_rows_and_columns_that_their_lists_promise() {
    for list in [PLAIN, HYBRID] {
        for golden in goldens(list) {
            let n_vocab = if golden.args.is_some() { 512 } else { 4096 };
            for matrices in [Some(&golden.trunk), golden.drafts.as_ref()].into_iter().flatten() {
                for file in [Some(&matrices.llama), matrices.numpy.as_ref()].into_iter().flatten() {
                    let rows = read_npy(file);
                    assert_eq!(rows.len(), golden.tokens.len() - golden.first_row, "{file}");
                    assert!(rows.iter().all(|row| row.len() == n_vocab && row.iter().all(|logit| logit.is_finite())), "{file}");
                }
            }
            // The last row of the trunk chooses what is written first.
            let last = read_npy(&golden.trunk.llama).pop().expect("rows");
            assert_eq!(argmax(&last), Some(golden.greedy[0]), "{}", golden.name);
            assert_eq!(golden.drafts.is_some(), list == HYBRID, "{}", golden.name);
        }
    }
}

#[test]
fn hybrid_f32_models_match_llama_cpp() {
    f32_models_match(HYBRID, Part::Trunk);
}

#[test]
fn hybrid_f32_models_write_what_llama_cpp_writes() {
    f32_models_write_the_stored_tokens(HYBRID);
}

#[test]
fn hybrid_quantised_models_with_exact_activations_match_plain_mathematics() {
    exact_activations_match_plain_mathematics(HYBRID, Part::Trunk, 5);
}

#[test]
fn hybrid_quantised_models_with_rounded_activations_stay_near_llama_cpp() {
    rounded_activations_stay_near_llama_cpp(HYBRID, Part::Trunk, 32);
    the_trained_model_diverges_little(Part::Trunk);
}

#[test]
fn the_trained_hybrid_model_writes_what_plain_mathematics_writes() {
    let list = goldens(HYBRID);
    let golden = list.iter().find(|golden| golden.args.is_none()).expect("the trained model");
    let (expected, gaps) = (golden.exact_greedy.as_ref().expect("tokens"), golden.exact_greedy_gaps.as_ref().expect("gaps"));
    assert!(gaps.iter().all(|&gap| gap > 2.0 * EXACT_TOLERANCE), "a near-tie: choose another prompt");
    let mut engine = engine(&golden.model(), &exact_settings(CTX_TOKENS));
    assert_eq!(&run(&mut engine, &greedy(&golden.tokens, expected.len())).tokens, expected);
}

#[test]
fn drafts_of_f32_models_match_llama_cpp() {
    f32_models_match(HYBRID, Part::DraftBlock);
}

#[test]
fn drafts_with_exact_activations_match_plain_mathematics() {
    exact_activations_match_plain_mathematics(HYBRID, Part::DraftBlock, 5);
}

#[test]
fn drafts_with_rounded_activations_stay_near_llama_cpp() {
    rounded_activations_stay_near_llama_cpp(HYBRID, Part::DraftBlock, 32);
    the_trained_model_diverges_little(Part::DraftBlock);
}
