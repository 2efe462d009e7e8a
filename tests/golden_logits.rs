//! Goal: the engine computes what llama.cpp and plain mathematics compute. Method: synthetic models made here, results stored in
//! `tests/golden/logits` (its README says how they were made and how close is right).
#![allow(clippy::print_stdout, reason = "figures for whoever runs the test by hand")]

mod common;

use common::engine::{all_logits, engine, exact_settings, greedy, run, settings, synthetic_model};
use ebbtide::engine::sampler::argmax;
use serde::Deserialize;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/logits");
/// Largest difference of a logit from llama.cpp on F32 models.
const F32_TOLERANCE: f32 = 1e-4;
/// Largest difference of a logit from exact mathematics on quantised weights.
const EXACT_TOLERANCE: f32 = 1e-3;
/// Root mean square of the difference from llama.cpp where both round activations to 8 bits.
const ROUNDED_RMS: f64 = 0.4;

#[derive(Deserialize)]
struct Golden {
    name: String,
    args: String,
    tokens: Vec<u32>,
    first_row: usize,
    llama: String,
    numpy: Option<String>,
    greedy: Vec<u32>,
    greedy_gaps: Vec<f32>,
}

impl Golden {
    fn is_f32(&self) -> bool {
        self.numpy.is_none()
    }

    fn compare_rows<'a>(&self, rows: &'a [Vec<f32>], file: &str) -> impl Iterator<Item = (&'a [f32], Vec<f32>)> {
        let stored = read_npy(file);
        assert_eq!(rows.len() - self.first_row, stored.len(), "{}: rows", self.name);
        rows[self.first_row..].iter().map(Vec::as_slice).zip(stored)
    }
}

fn goldens() -> Vec<Golden> {
    let text = std::fs::read_to_string(format!("{FOLDER}/index.json")).expect("the list of models");
    serde_json::from_str(&text).expect("the list's form")
}

/// Rows of a NumPy 1.0 file of little-endian f32 with 512 columns.
fn read_npy(name: &str) -> Vec<Vec<f32>> {
    let bytes = std::fs::read(format!("{FOLDER}/{name}")).expect("a stored matrix");
    let header_len = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = std::str::from_utf8(&bytes[10..10 + header_len]).expect("a text header");
    assert!(header.contains("'<f4'") && header.contains("512)"), "{header}");
    let values: Vec<f32> = bytes[10 + header_len..].as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect();
    values.chunks(512).map(<[f32]>::to_vec).collect()
}

fn largest_difference(left: &[f32], right: &[f32]) -> f32 {
    left.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn f32_models_match_llama_cpp() {
    let mut compared = 0;
    for golden in goldens().iter().filter(|golden| golden.is_f32()) {
        let mut engine = engine(&synthetic_model(&golden.args), &exact_settings(128));
        let rows = all_logits(&mut engine, &golden.tokens);
        let worst = golden.compare_rows(&rows, &golden.llama).map(|(ours, theirs)| largest_difference(ours, &theirs)).fold(0.0, f32::max);
        println!("{}: largest difference {worst:.2e}", golden.name);
        assert!(worst <= F32_TOLERANCE, "{}: {worst}", golden.name);
        compared += 1;
    }
    assert!(compared >= 3, "{compared} models");
}

#[test]
fn f32_models_write_what_llama_cpp_writes() {
    for golden in goldens().iter().filter(|golden| golden.is_f32()) {
        let mut engine = engine(&synthetic_model(&golden.args), &exact_settings(128));
        let outcome = run(&mut engine, &greedy(&golden.tokens, golden.greedy.len()));
        let clear = golden.greedy_gaps.iter().take_while(|&&gap| gap > 2.0 * F32_TOLERANCE).count();
        assert_eq!(golden.greedy.len(), 48);
        assert_eq!(outcome.tokens[..clear], golden.greedy[..clear], "{}", golden.name);
        assert_eq!(clear, 48, "{}: a near-tie at {clear}: choose another seed", golden.name);
    }
}

#[test]
fn quantised_models_with_exact_activations_match_plain_mathematics() {
    let mut compared = 0;
    for golden in goldens() {
        let Some(numpy) = &golden.numpy else { continue };
        let mut engine = engine(&synthetic_model(&golden.args), &exact_settings(128));
        let rows = all_logits(&mut engine, &golden.tokens);
        let worst = golden.compare_rows(&rows, numpy).map(|(ours, theirs)| largest_difference(ours, &theirs)).fold(0.0, f32::max);
        println!("{}: largest difference {worst:.2e}", golden.name);
        assert!(worst <= EXACT_TOLERANCE, "{}: {worst}", golden.name);
        compared += 1;
    }
    assert!(compared >= 7, "{compared} models");
}

#[test]
fn quantised_models_with_rounded_activations_stay_near_llama_cpp() {
    // Eight rows a model are too few for a share of each, so the share is taken over all models.
    let (mut same, mut n_rows) = (0, 0);
    for golden in goldens().iter().filter(|golden| !golden.is_f32()) {
        let mut engine = engine(&synthetic_model(&golden.args), &settings(128));
        let rows = all_logits(&mut engine, &golden.tokens);
        let (mut squares, mut count) = (0.0, 0.0);
        for (ours, theirs) in golden.compare_rows(&rows, &golden.llama) {
            squares += ours.iter().zip(&theirs).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            count += 512.0;
            n_rows += 1;
            same += usize::from(argmax(ours) == argmax(&theirs));
        }
        let rms = (squares / count).sqrt();
        println!("{}: root mean square {rms:.3}", golden.name);
        assert!(rms < ROUNDED_RMS, "{}: {rms}", golden.name);
    }
    println!("best token the same at {same} of {n_rows}");
    assert!(n_rows >= 50 && same * 10 >= n_rows * 8, "{same} of {n_rows}");
}
