//! Experts against f64, and their promises: tiles, windows and threads change no bit.

use super::activations::{ActivationFormat, quantise_rows, row_bytes};
use super::gemm::Activations;
use super::moe::{
    ExpertInputs, ExpertShape, ExpertTokens, ExpertWeights, Scratch, WindowRow, experts_prompt_group, experts_window, scratch_bytes,
};
use super::router::{Route, choose_experts};
use super::simd::SimdLevel;
use super::test_data::{AlignedBytes, Numbers};
use crate::backends::host::pool::ThreadPool;
use crate::quant::QuantType;

const N_EXPERT: usize = 12;
const N_USED: usize = 4;

struct Layer {
    shape: ExpertShape,
    gate: Vec<u8>,
    up: Vec<u8>,
    down: Vec<u8>,
    inputs: Vec<f32>,
    residual: Vec<f32>,
    routes: Vec<[Route; N_USED]>,
}

impl Layer {
    fn new(types: [QuantType; 3], exact: bool, n_tokens: usize) -> Self {
        let shape = ExpertShape { n_embd: 256, n_ff: 96, gate: types[0], up: types[1], down: types[2], exact };
        let mut numbers = Numbers::seeded(81);
        let gate = numbers.weights(shape.gate, N_EXPERT * shape.n_ff, shape.n_embd);
        let up = numbers.weights(shape.up, N_EXPERT * shape.n_ff, shape.n_embd);
        let down = numbers.weights(shape.down, N_EXPERT * shape.n_embd, shape.n_ff);
        let inputs = numbers.floats(n_tokens * shape.n_embd, 0.1);
        let residual = numbers.floats(n_tokens * shape.n_embd, 1.0);
        let routes = (0..n_tokens)
            .map(|_| {
                let mut routes = [Route { expert: 0, weight: 0.0 }; N_USED];
                choose_experts(&numbers.floats(N_EXPERT, 3.0), 1.0, &mut routes);
                routes
            })
            .collect();
        Self { shape, gate, up, down, inputs, residual, routes }
    }

    fn expert(&self, expert: u32) -> ExpertWeights<'_> {
        let part = |bytes: &'_ [u8]| {
            let len = bytes.len() / N_EXPERT;
            expert as usize * len..(expert as usize + 1) * len
        };
        ExpertWeights { gate: &self.gate[part(&self.gate)], up: &self.up[part(&self.up)], down: &self.down[part(&self.down)] }
    }

    fn stored_inputs(&self, format: ActivationFormat) -> Vec<u8> {
        let n = self.shape.n_embd;
        let mut bytes = vec![0; self.inputs.len() / n * row_bytes(format, n)];
        quantise_rows(&pool(1), SimdLevel::detect(), format, n, &self.inputs, &mut bytes);
        bytes
    }

    /// Runs `work` with the inputs in the formats of gate and up.
    fn with_inputs<T>(&self, work: impl FnOnce(&ExpertInputs<'_>) -> T) -> T {
        let formats = [self.shape.gate, self.shape.up].map(|quant| ActivationFormat::for_weights(quant, self.shape.exact));
        let stored = formats.map(|format| self.stored_inputs(format));
        let rows = |index: usize| Activations { format: formats[index], n: self.shape.n_embd, bytes: &stored[index] };
        work(&ExpertInputs { gate: rows(0), up: rows(1) })
    }

    fn prompt(&self, n_threads: usize, level: SimdLevel, tile_pairs: usize, group: usize) -> Vec<f32> {
        let lists: Vec<(Vec<u32>, Vec<f32>)> = (0..N_EXPERT as u32)
            .map(|expert| {
                let tokens = self.routes.iter().zip(0_u32..);
                tokens.filter_map(|(routes, token)| Some((token, routes.iter().find(|route| route.expert == expert)?.weight))).unzip()
            })
            .collect();
        let experts: Vec<ExpertTokens<'_>> =
            (0_u32..).zip(&lists).map(|(expert, (tokens, shares))| ExpertTokens { weights: self.expert(expert), tokens, shares }).collect();
        let mut residual = self.residual.clone();
        let mut scratch = AlignedBytes::new(scratch_bytes(&self.shape, tile_pairs));
        let pool = pool(n_threads);
        self.with_inputs(|inputs| {
            for experts in experts.chunks(group) {
                experts_prompt_group(&pool, level, &self.shape, inputs, experts, &mut residual, tile_pairs, scratch.bytes());
            }
        });
        residual
    }

    /// The layer through windows of `rows` rows each.
    fn windows(&self, n_threads: usize, rows: usize) -> Vec<f32> {
        let (n, pool) = (self.shape.n_embd, pool(n_threads));
        let mut residual = self.residual.clone();
        let mut scratch = AlignedBytes::new(scratch_bytes(&self.shape, rows * N_USED));
        self.with_inputs(|inputs| {
            for (window, (routes, residual)) in self.routes.chunks(rows).zip(residual.chunks_mut(rows * n)).enumerate() {
                let part = |all: &Activations<'_>, bytes: &mut Vec<u8>| {
                    let row = row_bytes(all.format, n);
                    bytes.extend(&all.bytes[window * rows * row..(window * rows + routes.len()) * row]);
                };
                let (mut gate, mut up) = (Vec::new(), Vec::new());
                part(&inputs.gate, &mut gate);
                part(&inputs.up, &mut up);
                let inputs =
                    ExpertInputs { gate: Activations { bytes: &gate, ..inputs.gate }, up: Activations { bytes: &up, ..inputs.up } };
                let rows: Vec<WindowRow<'_>> = routes.iter().map(|routes| WindowRow { routes }).collect();
                let experts = |expert| self.expert(expert);
                experts_window(&pool, SimdLevel::detect(), &self.shape, &inputs, &rows, &experts, residual, scratch.bytes());
            }
        });
        residual
    }

    /// The layer in f64 from the unquantised inputs.
    fn exact(&self) -> Vec<f64> {
        let (n_embd, n_ff) = (self.shape.n_embd, self.shape.n_ff);
        let values = |quant, bytes: &[u8]| {
            let mut values = vec![0.0_f32; bytes.len() / QuantType::block_bytes(quant) * QuantType::block_len(quant)];
            crate::quant::dequantise(quant, bytes, &mut values).expect("whole blocks");
            values
        };
        let dot = |row: &[f32], x: &[f64]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let mut out: Vec<f64> = self.residual.iter().map(|value| f64::from(*value)).collect();
        for (token, routes) in self.routes.iter().enumerate() {
            let x: Vec<f64> = self.inputs[token * n_embd..(token + 1) * n_embd].iter().map(|value| f64::from(*value)).collect();
            for route in routes {
                let expert = self.expert(route.expert);
                let (gate, up) = (values(self.shape.gate, expert.gate), values(self.shape.up, expert.up));
                let rows = gate.chunks_exact(n_embd).zip(up.chunks_exact(n_embd));
                let inner: Vec<f64> = rows
                    .map(|(gate, up)| {
                        let gate = dot(gate, &x);
                        gate / (1.0 + (-gate).exp()) * dot(up, &x)
                    })
                    .collect();
                let down = values(self.shape.down, expert.down);
                for (out, row) in out[token * n_embd..].iter_mut().zip(down.chunks_exact(n_ff)) {
                    *out += f64::from(route.weight) * dot(row, &inner);
                }
            }
        }
        out
    }

    /// Normalised squared error of what the experts added.
    fn error_of(&self, residual: &[f32]) -> f64 {
        let (mut error, mut size) = (0.0, 0.0);
        for ((value, exact), before) in residual.iter().zip(self.exact()).zip(&self.residual) {
            error += (f64::from(*value) - exact).powi(2);
            size += (exact - f64::from(*before)).powi(2);
        }
        error / size
    }
}

fn pool(n_threads: usize) -> ThreadPool {
    ThreadPool::new(n_threads).expect("threads")
}

fn layers() -> Vec<Layer> {
    use QuantType as Q;
    [
        ([Q::Q8_0, Q::Q8_0, Q::Q8_0], false),
        ([Q::IQ3_XXS, Q::Q4_K, Q::IQ4_NL], false),
        ([Q::Q4_0, Q::Q6_K, Q::F16], false),
        ([Q::Q4_K, Q::Q4_K, Q::Q5_1], true),
    ]
    .into_iter()
    .map(|(types, exact)| Layer::new(types, exact, 40))
    .collect()
}

#[test]
fn a_prompt_agrees_with_f64_within_the_precision_of_its_activations() {
    for layer in layers() {
        let error = layer.error_of(&layer.prompt(1, SimdLevel::detect(), 64, N_EXPERT));
        // int8 activations leave about 1/127/sqrt(12) of a block's largest number: 2e-5 squared, twice.
        let tolerance = if layer.shape.exact { 1e-10 } else { 3e-4 };
        assert!(error < tolerance, "{:?}: {error}", layer.shape);
    }
}

#[test]
fn tiles_groups_threads_and_levels_change_no_bit_of_a_prompt() {
    for layer in layers() {
        let expected = layer.prompt(1, SimdLevel::Scalar, 1_000, N_EXPERT);
        for (n_threads, tile_pairs, group) in [(1, 1, 12), (2, 7, 5), (3, 32, 1), (2, 64, 12), (3, 160, 7)] {
            for level in SimdLevel::available() {
                let residual = layer.prompt(n_threads, level, tile_pairs, group);
                assert!(residual == expected, "{:?}: {level:?}, tile {tile_pairs}, group {group}", layer.shape);
            }
        }
    }
}

#[test]
fn windows_agree_with_f64_and_every_row_has_the_bits_it_has_alone() {
    for layer in layers() {
        let alone = layer.windows(1, 1);
        let error = layer.error_of(&alone);
        assert!(error < if layer.shape.exact { 1e-10 } else { 3e-4 }, "{:?}: {error}", layer.shape);
        for (n_threads, rows) in [(1, 8), (2, 1), (2, 3), (3, 8)] {
            assert!(layer.windows(n_threads, rows) == alone, "{:?}: windows of {rows} on {n_threads} threads", layer.shape);
        }
    }
}

#[test]
#[should_panic(expected = "no address of f32")]
fn scratch_off_an_address_of_f32_is_refused() {
    let layer = &layers()[0];
    let mut scratch = AlignedBytes::new(scratch_bytes(&layer.shape, 1) + 4);
    let _ = Scratch::cut(&layer.shape, 1, &mut scratch.bytes()[1..]);
}
