//! The gated delta net: its convolution and gates, and the delta rule in steps, in windows and committed.

use ebbtide::backend::op::{DeltaShape, Op};
use ebbtide::backend::{Backend, DeviceMemory};
use ebbtide::backends::host::{DryRun, HostBackend, HostConfig};
use ebbtide::units::Bytes;

use crate::device::{Rig, start};
use crate::gates::{sigmoid, silu};
use crate::numbers::Numbers;
use crate::{F32_TOLERANCE, assert_close, dot, wide};

/// The delta rule in f32: a row's error stays in the state for as long as the row does.
const DELTA_TOLERANCE: f64 = 1e-11;
const EPS: f32 = 1e-6;

/// One and more value heads for each key head; the head sizes of test models and of real ones.
fn shapes() -> [DeltaShape; 4] {
    [(2, 4, 16, 4), (1, 3, 32, 2), (3, 3, 48, 5), (2, 4, 128, 4)].map(|(n_head_k, n_head_v, head_dim, n_taps)| DeltaShape {
        n_head_k,
        n_head_v,
        head_dim,
        n_taps,
    })
}

fn history_len(shape: DeltaShape) -> usize {
    Bytes(shape.history_bytes()).as_usize() / 4
}

fn convolved(shape: DeltaShape, x: &[f64], history: &[f64], taps: &[f64]) -> Vec<f64> {
    let (n_channels, n_taps) = (shape.n_channels() as usize, shape.n_taps as usize);
    let rows = [history, x].concat();
    let mut out = Vec::new();
    for row in 0..x.len() / n_channels {
        let tap = |channel: usize, tap: usize| taps[channel * n_taps + tap] * rows[(row + tap) * n_channels + channel];
        out.extend((0..n_channels).map(|channel| silu((0..n_taps).map(|at| tap(channel, at)).sum())));
    }
    let n_heads = n_channels / shape.head_dim as usize;
    for (at, head) in out.chunks_mut(shape.head_dim as usize).enumerate() {
        let head_dim = f64::from(shape.head_dim);
        let root = (dot(head, head) + f64::from(EPS)).sqrt();
        let divisor = match at % n_heads {
            query if query < shape.n_head_k as usize => root * head_dim.sqrt(),
            key if key < 2 * shape.n_head_k as usize => root,
            _ => 1.0,
        };
        head.iter_mut().for_each(|value| *value /= divisor);
    }
    out
}

pub fn channels_are_convolved_and_queries_and_keys_normed<B: Backend>(rig: &Rig<B>) {
    for shape in shapes() {
        for n_rows in [1, 2, 9] {
            let (n_channels, mut numbers) = (shape.n_channels() as usize, Numbers::seeded(31));
            let (x, taps) = (numbers.floats(n_rows as usize * n_channels, 2.0), numbers.floats(n_channels * shape.n_taps as usize, 1.0));
            let history = numbers.floats(history_len(shape), 2.0);
            let (x_at, history_at, taps_at) = (rig.upload_f32(&x), rig.upload_f32(&history), rig.upload_f32(&taps));
            let out = rig.buffer(4 * x.len());
            let (x_addr, history_addr, taps_addr) = (start(&x_at), start(&history_at), start(&taps_at));
            rig.run(&Op::DeltaConv { x: x_addr, history: history_addr, taps: taps_addr, out: start(&out), n_rows, shape, eps: EPS })
                .expect("runs");
            let expected = convolved(shape, &wide(&x), &wide(&history), &wide(&taps));
            assert_close(&format!("{shape:?} {n_rows} rows"), &rig.download_f32(&out), &expected, F32_TOLERANCE);
            assert_eq!(rig.download_f32(&history_at), history, "the convolution leaves the history alone");
            rig.run(&Op::DeltaHistory { x: x_addr, history: history_addr, n_rows, shape }).expect("runs");
            let rows = [&history[..], &x].concat();
            assert_eq!(rig.download_f32(&history_at), rows[rows.len() - history.len()..], "{shape:?} {n_rows} rows");
        }
    }
}

pub fn gates_of_delta_heads_are_sigmoid_and_softplus<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_head) in [(1, 1), (5, 3), (64, 32)] {
        let (n, n_heads) = ((n_rows * n_head) as usize, n_head as usize);
        let mut numbers = Numbers::seeded(32);
        // From where the softplus is next to nothing to where it is its operand.
        let (beta, decay) = (numbers.floats(n, 9.0), numbers.floats(n, 40.0));
        let (dt_bias, a) = (numbers.floats(n_heads, 2.0), numbers.floats(n_heads, 3.0));
        let (beta_at, decay_at) = (rig.upload_f32(&beta), rig.upload_f32(&decay));
        let (dt_bias_at, a_at) = (rig.upload_f32(&dt_bias), rig.upload_f32(&a));
        let (dt_bias_addr, a_addr) = (start(&dt_bias_at), start(&a_at));
        rig.run(&Op::DeltaGates { beta: start(&beta_at), decay: start(&decay_at), dt_bias: dt_bias_addr, a: a_addr, n_rows, n_head })
            .expect("runs");
        let expected: Vec<f64> = wide(&beta).into_iter().map(sigmoid).collect();
        assert_close("beta", &rig.download_f32(&beta_at), &expected, F32_TOLERANCE);
        let softplus = |x: f64| if x > 700.0 { x } else { x.exp().ln_1p() };
        let decays = wide(&decay).into_iter().enumerate();
        let of_head = |at: usize, values: &[f32]| f64::from(values[at % n_heads]);
        let expected: Vec<f64> = decays.map(|(at, decay)| of_head(at, &a) * softplus(decay + of_head(at, &dt_bias))).collect();
        assert_close("decay", &rig.download_f32(&decay_at), &expected, F32_TOLERANCE);
    }
}

/// Rows of one layer behind convolution and gates, on the device and off.
struct Case<B: Backend> {
    shape: DeltaShape,
    /// Rows `[n_rows, n_channels]`, of which queries and keys are normed.
    qkv: Vec<f32>,
    beta: Vec<f32>,
    decay: Vec<f32>,
    state: Vec<f32>,
    qkv_at: B::Buffer,
    beta_at: B::Buffer,
    decay_at: B::Buffer,
}

impl<B: Backend> Case<B> {
    fn new(rig: &Rig<B>, shape: DeltaShape, n_rows: usize) -> Self {
        let (head_dim, n_gates) = (shape.head_dim as usize, n_rows * shape.n_head_v as usize);
        let mut numbers = Numbers::seeded(u64::from(shape.head_dim));
        let mut qkv = numbers.floats(n_rows * shape.n_channels() as usize, 1.0);
        let n_heads = (2 * shape.n_head_k + shape.n_head_v) as usize;
        for (at, head) in qkv.chunks_mut(head_dim).enumerate() {
            if at % n_heads < 2 * shape.n_head_k as usize {
                let root = head.iter().map(|value| value * value).sum::<f32>().sqrt();
                head.iter_mut().for_each(|value| *value /= root);
            }
        }
        // From what forgets a step at once to what keeps all of it.
        let beta: Vec<f32> = numbers.floats(n_gates, 1.0).iter().map(|beta| beta.abs()).collect();
        let decay: Vec<f32> = numbers.floats(n_gates, 1.0).iter().map(|decay| -2.0 * decay.powi(4)).collect();
        let state = numbers.floats(Bytes(shape.state_bytes()).as_usize() / 4, 0.3);
        let (qkv_at, beta_at, decay_at) = (rig.upload_f32(&qkv), rig.upload_f32(&beta), rig.upload_f32(&decay));
        Self { shape, qkv, beta, decay, state, qkv_at, beta_at, decay_at }
    }

    fn n_rows(&self) -> usize {
        self.decay.len() / self.shape.n_head_v as usize
    }

    /// Results and last state, by the rule as it is written.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let DeltaShape { n_head_k, n_head_v, head_dim, .. } = self.shape;
        let (n_head_k, n_head_v, head_dim) = (n_head_k as usize, n_head_v as usize, head_dim as usize);
        let (mut state, mut out) = (wide(&self.state), Vec::new());
        for (row, qkv) in wide(&self.qkv).chunks(self.shape.n_channels() as usize).enumerate() {
            let head = |at: usize| &qkv[at * head_dim..][..head_dim];
            for head_v in 0..n_head_v {
                let (query, key) = (head(head_v % n_head_k), head(n_head_k + head_v % n_head_k));
                let (beta, decay) = (f64::from(self.beta[row * n_head_v + head_v]), f64::from(self.decay[row * n_head_v + head_v]));
                let state = state[head_v * head_dim * head_dim..][..head_dim * head_dim].chunks_mut(head_dim);
                for (state, value) in state.zip(head(2 * n_head_k + head_v)) {
                    state.iter_mut().for_each(|number| *number *= decay.exp());
                    let correction = beta * (value - dot(state, key));
                    state.iter_mut().zip(key).for_each(|(number, key)| *number += correction * key);
                    out.push(dot(state, query));
                }
            }
        }
        (out, state)
    }

    /// The `out`, `state` and `open` buffers of a run.
    fn buffers(&self, rig: &Rig<B>) -> (B::Buffer, B::Buffer, B::Buffer) {
        let out = rig.buffer(4 * self.n_rows() * self.shape.value_width() as usize);
        (out, rig.upload_f32(&self.state), rig.buffer(Bytes(self.shape.open_bytes()).as_usize()))
    }

    /// Results and last state of a block from `block_position` on, cut after each of `cuts` rows.
    fn prompt(&self, rig: &Rig<B>, block_position: u32, cuts: &[u32]) -> (Vec<f32>, Vec<f32>) {
        let (out, state, open) = self.buffers(rig);
        let n_rows = u32::try_from(self.n_rows()).expect("few");
        let mut first = 0;
        for end in cuts.iter().copied().chain([n_rows]) {
            let row = |memory: &B::Buffer, width: u32| start(memory).offset(Bytes(4 * u64::from(first) * u64::from(width)));
            rig.run(&Op::DeltaPrompt {
                qkv: row(&self.qkv_at, self.shape.n_channels()),
                beta: row(&self.beta_at, self.shape.n_head_v),
                decay: row(&self.decay_at, self.shape.n_head_v),
                state: start(&state),
                open: start(&open),
                out: row(&out, self.shape.value_width()),
                n_rows: end - first,
                position: block_position + first,
                block_position,
                ends_block: end == n_rows,
                shape: self.shape,
            })
            .expect("runs");
            first = end;
        }
        (rig.download_f32(&out), rig.download_f32(&state))
    }
}

pub fn a_prompts_delta_rule_agrees_from_any_position_and_at_any_cut<B: Backend>(rig: &Rig<B>) {
    for shape in shapes() {
        let case = Case::new(rig, shape, 200);
        let (out, state) = case.expected();
        for block_position in [0, 1, 50, 64, 1_000_001] {
            let whole = case.prompt(rig, block_position, &[]);
            assert_close(&format!("{shape:?} from {block_position}"), &whole.0, &out, DELTA_TOLERANCE);
            assert_close(&format!("{shape:?} from {block_position}: state"), &whole.1, &state, DELTA_TOLERANCE);
            for cuts in [&[1][..], &[63], &[64], &[13, 14, 15, 77, 128, 191], &[100, 199]] {
                let cut = case.prompt(rig, block_position, cuts);
                assert!(cut == whole, "{shape:?} from {block_position}, cut after {cuts:?}");
            }
        }
    }
}

pub fn a_windows_delta_rule_leaves_the_state_to_the_commit<B: Backend>(rig: &Rig<B>) {
    for shape in shapes() {
        let case = Case::new(rig, shape, 8);
        let (expected, expected_state) = case.expected();
        let (together, state, _) = case.buffers(rig);
        let (width, n_channels) = (shape.value_width(), shape.n_channels());
        let window = |first: u32, n_rows: u32, out: &B::Buffer| {
            let row = |memory: &B::Buffer, width: u32| start(memory).offset(Bytes(4 * u64::from(first) * u64::from(width)));
            let (qkv, beta, decay) =
                (row(&case.qkv_at, n_channels), row(&case.beta_at, shape.n_head_v), row(&case.decay_at, shape.n_head_v));
            rig.run(&Op::DeltaWindow { qkv, beta, decay, state: start(&state), out: start(out), n_rows, shape }).expect("runs");
        };
        window(0, 8, &together);
        assert_close(&format!("{shape:?}"), &rig.download_f32(&together), &expected, DELTA_TOLERANCE);
        assert_eq!(rig.download_f32(&state), case.state, "a window leaves the state as it is");
        let commit = |n_rows: u32| {
            rig.put(start(&state), &crate::device::bytes_of(&case.state));
            let (qkv, beta, decay) = (start(&case.qkv_at), start(&case.beta_at), start(&case.decay_at));
            rig.run(&Op::DeltaCommit { qkv, beta, decay, state: start(&state), n_rows, shape }).expect("runs");
        };
        for n_accepted in 1..8 {
            commit(n_accepted);
            let alone = rig.buffer(4 * width as usize);
            window(n_accepted, 1, &alone);
            let row = rig.download_f32(&together)[(n_accepted * width) as usize..][..width as usize].to_vec();
            assert!(rig.download_f32(&alone) == row, "{shape:?}: row {n_accepted} behind as many committed rows");
        }
        commit(8);
        assert_close(&format!("{shape:?}: state"), &rig.download_f32(&state), &expected_state, DELTA_TOLERANCE);
        assert!(together.range().bytes > Bytes::ZERO);
    }
}

pub fn windows_go_on_from_a_prompt<B: Backend>(rig: &Rig<B>) {
    // Largest squared difference beside the squares: two ways of the same sums in f32.
    const TOLERANCE: f64 = 1e-11;
    for shape in shapes() {
        let case = Case::new(rig, shape, 71);
        let steps = case.prompt(rig, 30, &[]);
        let (out, state, _) = case.buffers(rig);
        for first in (0..71_u32).step_by(8) {
            let row = |memory: &B::Buffer, width: u32| start(memory).offset(Bytes(4 * u64::from(first) * u64::from(width)));
            let (qkv, beta, decay) =
                (row(&case.qkv_at, shape.n_channels()), row(&case.beta_at, shape.n_head_v), row(&case.decay_at, shape.n_head_v));
            let (state, out, n_rows) = (start(&state), row(&out, shape.value_width()), 8.min(71 - first));
            rig.run(&Op::DeltaWindow { qkv, beta, decay, state, out, n_rows, shape }).expect("runs");
            rig.run(&Op::DeltaCommit { qkv, beta, decay, state, n_rows, shape }).expect("runs");
        }
        assert_close(&format!("{shape:?}"), &steps.0, &wide(&rig.download_f32(&out)), TOLERANCE);
        assert_close(&format!("{shape:?}: state"), &steps.1, &wide(&rig.download_f32(&state)), TOLERANCE);
    }
}

#[test]
fn a_dry_run_draws_the_routes_of_a_prompts_positions() {
    let config = HostConfig { dry: Some(DryRun::uniform(5)), ..HostConfig::new(Bytes::mib(64), 1) };
    let rig = Rig::new(HostBackend::open(&config).expect("the simulated device opens"));
    let case = Case::new(&rig, shapes()[0], 8);
    let (out, state, open) = case.buffers(&rig);
    let (n_expert, n_used) = (128, 4);
    let (logits, ids, weights) = (rig.buffer(4 * 8 * 128), rig.buffer(4 * 8 * 4), rig.buffer(4 * 8 * 4));
    let routes = |position: u32, n_rows: u32| {
        let (qkv, beta, decay) = (start(&case.qkv_at), start(&case.beta_at), start(&case.decay_at));
        let (state, open, out, block_position, ends_block, shape) = (start(&state), start(&open), start(&out), 0, false, case.shape);
        rig.run(&Op::DeltaPrompt { qkv, beta, decay, state, open, out, n_rows, position, block_position, ends_block, shape })
            .expect("runs");
        let (logits, ids_at, weights) = (start(&logits), start(&ids), start(&weights));
        rig.run(&Op::Router { logits, ids: ids_at, weights, n_rows, n_expert, n_used, scale: 1.0 }).expect("runs");
        rig.download_i32(&ids)[..(n_rows * n_used) as usize].to_vec()
    };
    let whole = routes(40, 8);
    assert_eq!([routes(40, 3), routes(43, 5)].concat(), whole, "whatever the cut");
    assert_ne!(routes(41, 8), whole);
}
