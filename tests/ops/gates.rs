//! Gates and moves of rows.

use ebbtide::backend::Backend;
use ebbtide::backend::op::Op;

use crate::device::{Rig, start};
use crate::numbers::Numbers;
use crate::{F32_TOLERANCE, assert_close, normed, wide};

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// Rows and columns: a single number, less than a vector, a width of no whole vectors, more than a task takes.
const SHAPES: [(u32, u32); 4] = [(1, 1), (3, 7), (5, 100), (40, 512)];

pub fn gates_of_heads_are_split_off_and_rows_joined<B: Backend>(rig: &Rig<B>) {
    let (n_rows, n_head, head_dim) = (3, 2, 5);
    let joined: Vec<f32> = (0..60_u8).map(f32::from).collect();
    let (joined_at, values, gates) = (rig.upload_f32(&joined), rig.buffer(4 * 30), rig.buffer(4 * 30));
    rig.run(&Op::SplitGates { joined: start(&joined_at), values: start(&values), gates: start(&gates), n_rows, n_head, head_dim })
        .expect("runs");
    let half = |which: usize| joined.chunks(5).skip(which).step_by(2).flatten().copied().collect::<Vec<f32>>();
    assert_eq!((rig.download_f32(&values), rig.download_f32(&gates)), (half(0), half(1)));
    let out = rig.buffer(4 * 60);
    rig.run(&Op::JoinRows { left: start(&values), right: start(&gates), out: start(&out), n_rows: 6, n_cols: 5 }).expect("runs");
    assert_eq!(rig.download_f32(&out), joined);
}

pub fn gates_multiply_number_by_number<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_cols) in SHAPES {
        let n = (n_rows * n_cols) as usize;
        let mut numbers = Numbers::seeded(21);
        let (x, gates) = (numbers.floats(n, 2.0), numbers.floats(n, 12.0));
        let (x_at, gates_at) = (rig.upload_f32(&x), rig.upload_f32(&gates));
        rig.run(&Op::SigmoidGate { x: start(&x_at), gates: start(&gates_at), n_rows, n_cols }).expect("runs");
        let expected: Vec<f64> = wide(&x).iter().zip(wide(&gates)).map(|(x, gate)| x * sigmoid(gate)).collect();
        assert_close("sigmoid gate", &rig.download_f32(&x_at), &expected, F32_TOLERANCE);
        let up = rig.upload_f32(&x);
        rig.run(&Op::SwiGlu { gate: start(&gates_at), up: start(&up), n_rows, n_cols }).expect("runs");
        let expected: Vec<f64> = wide(&x).iter().zip(wide(&gates)).map(|(x, gate)| x * silu(gate)).collect();
        assert_close("swiglu", &rig.download_f32(&gates_at), &expected, F32_TOLERANCE);
    }
}

pub fn a_gated_row_is_added<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_cols) in SHAPES {
        let n = (n_rows * n_cols) as usize;
        let mut numbers = Numbers::seeded(22);
        let (sum, x, gate) = (numbers.floats(n, 1.0), numbers.floats(n, 2.0), numbers.floats(n_rows as usize, 6.0));
        let (sum_at, x_at, gate_at) = (rig.upload_f32(&sum), rig.upload_f32(&x), rig.upload_f32(&gate));
        rig.run(&Op::AddGated { sum: start(&sum_at), x: start(&x_at), gate: start(&gate_at), n_rows, n_cols }).expect("runs");
        let share = |at: usize| sigmoid(f64::from(gate[at / n_cols as usize]));
        let expected: Vec<f64> = (0..n).map(|at| f64::from(sum[at]) + share(at) * f64::from(x[at])).collect();
        assert_close("gated sum", &rig.download_f32(&sum_at), &expected, F32_TOLERANCE);
    }
}

pub fn heads_are_normed_and_gated<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_head, head_dim) in [(1, 1, 16), (3, 2, 32), (5, 3, 100), (9, 32, 128)] {
        let n = (n_rows * n_head * head_dim) as usize;
        let mut numbers = Numbers::seeded(23);
        let (x, gates, weight) = (numbers.floats(n, 2.0), numbers.floats(n, 6.0), numbers.floats(head_dim as usize, 1.0));
        let (x_at, gates_at, weight_at) = (rig.upload_f32(&x), rig.upload_f32(&gates), rig.upload_f32(&weight));
        let (x_addr, weight_addr, gates_addr, eps) = (start(&x_at), start(&weight_at), start(&gates_at), 1e-3);
        rig.run(&Op::GatedHeadNorm { x: x_addr, weight: weight_addr, gates: gates_addr, n_rows, n_head, head_dim, eps }).expect("runs");
        let heads = wide(&x).chunks(head_dim as usize).flat_map(|head| normed(head, &wide(&weight), eps)).collect::<Vec<f64>>();
        let expected: Vec<f64> = heads.iter().zip(wide(&gates)).map(|(value, gate)| value * silu(gate)).collect();
        assert_close("gated norm", &rig.download_f32(&x_at), &expected, F32_TOLERANCE);
    }
}
