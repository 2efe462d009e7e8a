//! Operations that join several steps have the results of the steps, which have tests of their own.

use ebbtide::backend::op::{KvFormat, Matrix, Op};
use ebbtide::backend::{Addr, Backend, DeviceMemory};
use ebbtide::quant::{ActivationFormat, QuantType};

use crate::device::{Rig, start};
use crate::numbers::Numbers;
use crate::{activations, assert_close, matrix, wide};

/// Runs what `op` makes of fresh memory, then its parts on other fresh memory; the first `n_results` of the memories that it returns are
/// compared.
fn assert_same<B: Backend>(rig: &Rig<B>, what: &str, n_results: usize, op: impl Fn() -> (Op, Vec<B::Buffer>)) {
    let results = [false, true].map(|in_parts| {
        let (op, written) = op();
        if in_parts {
            let parts = op.parts().expect("an operation of several steps");
            assert!(parts.len() > 1, "{what}");
            parts.iter().for_each(|part| rig.run(part).expect("runs"));
        } else {
            rig.run(&op).expect("runs");
        }
        written
    });
    let [joined, in_parts] = results;
    for (at, (joined, in_parts)) in joined.iter().zip(&in_parts).take(n_results).enumerate() {
        let [joined, in_parts] = [joined, in_parts].map(|memory| rig.download(memory.range()));
        assert!(joined.iter().any(|byte| *byte != 0xff && *byte != 0), "{what}: result {at} was not written");
        assert_eq!(joined, in_parts, "{what}: result {at}");
    }
}

pub fn a_norm_is_stored_in_several_forms_at_once<B: Backend>(rig: &Rig<B>) {
    for n_cols in [256_u32, 768, 2560] {
        let mut numbers = Numbers::seeded(31);
        let (x, weight) =
            (rig.upload_f32(&numbers.floats(3 * n_cols as usize, 2.0)), rig.upload_f32(&numbers.floats(n_cols as usize, 1.0)));
        assert_same(rig, &format!("norm of {n_cols}"), 3, || {
            let formats = [ActivationFormat::Q8_0, ActivationFormat::Q8_K];
            let [first, second] = formats.map(|format| rig.upload(&vec![0; 3 * format.row_bytes(n_cols as usize)]));
            let out = rig.upload_f32(&vec![0.0; 3 * n_cols as usize]);
            let quantised = vec![(start(&first), formats[0]), (start(&second), formats[1])];
            let op = Op::NormQuantise { x: start(&x), weight: start(&weight), out: start(&out), quantised, n_rows: 3, n_cols, eps: 1e-6 };
            (op, vec![out, first, second])
        });
    }
}

pub fn a_window_meets_several_matrices_at_once<B: Backend>(rig: &Rig<B>) {
    // More than a launch takes, of several types that read the same form, and the float form.
    let quantised = [QuantType::Q4_K, QuantType::Q4_K, QuantType::IQ3_XXS, QuantType::Q6_K, QuantType::Q6_K];
    for (types, format) in [(quantised, ActivationFormat::Q8_K), ([QuantType::F32; 5], ActivationFormat::F32)] {
        let matrices: Vec<_> =
            types.iter().zip([40, 3, 17, 1, 24]).zip(0..).map(|((&of, rows), seed)| matrix(rig, of, rows, 512, seed)).collect();
        let (input, _) = activations(rig, format, &Numbers::seeded(32).floats(2 * 512, 1.0), 512);
        assert_same(rig, &format!("{types:?}"), types.len(), || {
            let outs: Vec<_> = matrices.iter().map(|matrix| rig.buffer(4 * 2 * matrix.matrix.rows as usize)).collect();
            let products: Vec<(Matrix, Addr)> = matrices.iter().zip(&outs).map(|(matrix, out)| (matrix.matrix, start(out))).collect();
            (Op::WindowProducts { products, input: start(&input), format, n_rows: 2 }, outs)
        });
    }
}

pub fn heads_are_turned_and_stored_at_once<B: Backend>(rig: &Rig<B>) {
    let (n_rows, n_head, n_head_kv, head_dim, n_ctx) = (3_u32, 4_u32, 2_u32, 64_u32, 9_u32);
    let mut numbers = Numbers::seeded(33);
    let [queries, keys, values] = [n_head, n_head_kv, n_head_kv].map(|heads| numbers.floats((n_rows * heads * head_dim) as usize, 1.0));
    let [q_weight, k_weight] = [(); 2].map(|()| rig.upload_f32(&numbers.floats(head_dim as usize, 1.0)));
    let (positions, rope_positions, first_row) = (rig.upload_i32(&[0, 1, 6]), rig.upload_i32(&[1, 2, 7]), rig.upload_i32(&[2]));
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0] {
        assert_same(rig, &format!("{format:?}"), 5, || {
            let [q, k, v] = [&queries, &keys, &values].map(|rows| rig.upload_f32(rows));
            let cache_bytes = (n_ctx * n_head_kv) as usize * format.row_bytes(head_dim as usize);
            let [k_cache, v_cache] = [(); 2].map(|()| rig.upload(&vec![0; cache_bytes]));
            let op = Op::StoreHeads {
                q: start(&q),
                k: start(&k),
                v: start(&v),
                q_weight: start(&q_weight),
                k_weight: start(&k_weight),
                rope_positions: start(&rope_positions),
                k_cache: start(&k_cache),
                v_cache: start(&v_cache),
                format,
                positions: start(&positions),
                first_row: start(&first_row),
                n_rows,
                n_head,
                n_head_kv,
                head_dim,
                n_rot: 32,
                freq_base: 10_000.0,
                eps: 1e-6,
                n_ctx,
            };
            (op, vec![q, k, v, k_cache, v_cache])
        });
    }
}

pub fn rows_are_activated_and_stored_at_once<B: Backend>(rig: &Rig<B>) {
    for (format, n_cols) in [(ActivationFormat::Q8_0, 544_u32), (ActivationFormat::Q8_K, 768), (ActivationFormat::F32, 20)] {
        let mut numbers = Numbers::seeded(34);
        let [gates, ups] = [(); 2].map(|()| numbers.floats(2 * n_cols as usize, 2.0));
        let up = rig.upload_f32(&ups);
        assert_same(rig, &format!("{format:?}"), 1, || {
            let (gate, out) = (rig.upload_f32(&gates), rig.buffer(2 * format.row_bytes(n_cols as usize)));
            let op = Op::SwiGluQuantise { gate: start(&gate), up: start(&up), out: start(&out), n_rows: 2, n_cols, format };
            (op, vec![out, gate])
        });
    }
}

pub fn the_router_chooses_among_many<B: Backend>(rig: &Rig<B>) {
    let (n_expert, n_used) = (515_u32, 9_u32);
    let mut logits = Numbers::seeded(35).floats(n_expert as usize, 3.0);
    logits[7] = f32::NAN;
    let (logits_at, ids, shares) = (rig.upload_f32(&logits), rig.buffer(4 * n_used as usize), rig.buffer(4 * n_used as usize));
    let (logits_addr, ids_addr, weights_addr) = (start(&logits_at), start(&ids), start(&shares));
    let op = Op::Router { logits: logits_addr, ids: ids_addr, weights: weights_addr, n_rows: 1, n_expert, n_used, scale: 1.0 };
    rig.run(&op).expect("runs");
    let mut order: Vec<usize> = (0..n_expert as usize).filter(|&expert| !logits[expert].is_nan()).collect();
    order.sort_by(|&left, &right| logits[right].total_cmp(&logits[left]));
    let mut chosen = order[..n_used as usize].to_vec();
    chosen.sort_unstable();
    let ids: Vec<usize> = rig.download_i32(&ids).iter().map(|&id| usize::try_from(id).expect("a number")).collect();
    assert_eq!(ids, chosen);
    let weights: Vec<f64> = chosen.iter().map(|&expert| wide(&logits)[expert].exp()).collect();
    let expected: Vec<f64> = weights.iter().map(|weight| weight / weights.iter().sum::<f64>()).collect();
    assert_close("shares", &rig.download_f32(&shares), &expected, 1e-11);
}
