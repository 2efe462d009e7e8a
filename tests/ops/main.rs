//! Goal: every operation of the table computes what its description says, on every backend. Method: a plain f64 reference written
//! here, compared by normalised squared error under a tolerance named by type; `ops_suite!` adds one device by one line. Weights count
//! as what `dequantise` makes of their blocks, stored activations as what their layout says, so that only arithmetic is compared. `cuda`
//! runs on the look-alike driver of `tests/fake-gpu/`, or on a real card with EBBTIDE_REAL_GPU=1.

mod attention;
mod delta;
#[path = "../common/device.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod device;
mod experts;
#[cfg(feature = "cuda")]
#[path = "../common/fake_gpu.rs"]
#[allow(dead_code, reason = "every test program uses another part")]
mod fake_gpu;
mod gates;
mod halves;
mod joined;
#[path = "../common/numbers.rs"]
mod numbers;
mod refusals;

use attention::{
    a_row_does_not_meet_values_behind_its_position, an_attended_row_does_not_depend_on_the_rows_beside_it,
    attention_sees_the_stored_rows_up_to_its_own_position,
};
use delta::{
    a_prompts_delta_rule_agrees_from_any_position_and_at_any_cut, a_windows_delta_rule_leaves_the_state_to_the_commit,
    channels_are_convolved_and_queries_and_keys_normed, gates_of_delta_heads_are_sigmoid_and_softplus, windows_go_on_from_a_prompt,
};
use device::{Rig, start};
use ebbtide::backend::op::{Matrix, Op, Path};
use ebbtide::backend::{Addr, AddrRange, Backend, DeviceMemory};
#[cfg(feature = "cuda")]
use ebbtide::backends::cuda::{CudaBackend, DeviceChoice};
use ebbtide::backends::host::{HostBackend, HostConfig};
use ebbtide::quant::{ActivationFormat, QuantType, dequantise};
use ebbtide::units::Bytes;
use experts::{a_prompts_experts_are_added_in_tiles_of_any_size, a_windows_experts_are_added_wherever_they_lie};
use gates::{
    a_gated_row_is_added, gates_multiply_number_by_number, gates_of_heads_are_split_off_and_rows_joined, heads_are_normed_and_gated,
};
use halves::{
    a_product_in_halves_is_the_same_in_any_stripe_and_beside_any_rows, experts_in_halves_are_added_in_tiles_of_any_size,
    products_of_every_type_agree_in_halves, routes_are_sorted_by_expert_and_rows_know_their_places,
    rows_in_halves_keep_eleven_bits_of_any_size,
};
use joined::{
    a_norm_is_stored_in_several_forms_at_once, a_window_meets_several_matrices_at_once, heads_are_turned_and_stored_at_once,
    rows_are_activated_and_stored_at_once, the_router_chooses_among_many,
};
use numbers::{Numbers, values_of_rows, weights_of};
use refusals::shapes_that_no_kernel_takes_are_refused;

macro_rules! ops_suite {
    ($name:ident, $run:path) => {
        ops_suite!($name, $run, [
            a_norm_divides_by_the_root_mean_square,
            quantised_rows_are_within_half_a_step,
            products_of_every_type_agree_on_both_paths_and_formats,
            a_product_is_added_where_asked,
            rows_in_halves_keep_eleven_bits_of_any_size,
            products_of_every_type_agree_in_halves,
            a_product_in_halves_is_the_same_in_any_stripe_and_beside_any_rows,
            experts_in_halves_are_added_in_tiles_of_any_size,
            the_result_of_a_row_does_not_depend_on_the_rows_beside_it,
            heads_are_normed_and_their_first_numbers_turned,
            attention_sees_the_stored_rows_up_to_its_own_position,
            a_row_does_not_meet_values_behind_its_position,
            an_attended_row_does_not_depend_on_the_rows_beside_it,
            the_router_takes_the_largest_with_ties_to_the_lower,
            routes_are_sorted_by_expert_and_rows_know_their_places,
            a_windows_experts_are_added_wherever_they_lie,
            a_prompts_experts_are_added_in_tiles_of_any_size,
            gates_of_heads_are_split_off_and_rows_joined,
            gates_multiply_number_by_number,
            a_gated_row_is_added,
            heads_are_normed_and_gated,
            channels_are_convolved_and_queries_and_keys_normed,
            gates_of_delta_heads_are_sigmoid_and_softplus,
            a_prompts_delta_rule_agrees_from_any_position_and_at_any_cut,
            a_windows_delta_rule_leaves_the_state_to_the_commit,
            windows_go_on_from_a_prompt,
            a_norm_is_stored_in_several_forms_at_once,
            a_window_meets_several_matrices_at_once,
            heads_are_turned_and_stored_at_once,
            rows_are_activated_and_stored_at_once,
            the_router_chooses_among_many,
            shapes_that_no_kernel_takes_are_refused,
        ]);
    };
    ($name:ident, $run:path, [$($claim:ident),+ $(,)?]) => {
        mod $name {
            $(#[test]
            fn $claim() {
                $run(concat!(stringify!($name), "::", stringify!($claim)), super::$claim);
            })+
        }
    };
}

fn open_host() -> HostBackend {
    HostBackend::open(&HostConfig::new(Bytes::mib(64), 2)).expect("the simulated device opens")
}

fn on_host(_name: &str, claim: fn(&Rig<HostBackend>)) {
    claim(&Rig::new(open_host()));
}

#[cfg(feature = "cuda")]
fn on_cuda(name: &str, claim: fn(&Rig<CudaBackend>)) {
    fake_gpu::on_either(name, || claim(&Rig::new(CudaBackend::open(&DeviceChoice::Best).expect("the device opens"))));
}

ops_suite!(host, super::on_host);
#[cfg(feature = "cuda")]
ops_suite!(cuda, super::on_cuda);

/// Rounding of f32 sums of some hundred terms.
const F32_TOLERANCE: f64 = 1e-11;

/// Error of products with weights of a type, beyond that of their stored activations.
fn product_tolerance(quant_type: QuantType) -> f64 {
    match quant_type {
        // Scales and minima meet integer sums exactly; what is left is f32 rounding of a few terms a row.
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => F32_TOLERANCE,
        // Weights with a minimum subtract two large sums.
        QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q2_K | QuantType::Q4_K | QuantType::Q5_K => 1e-10,
        _ => F32_TOLERANCE,
    }
}

/// Sum of squared differences over the sum of squares.
fn error(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let wrong: f64 = actual.iter().zip(expected).map(|(actual, expected)| (f64::from(*actual) - expected).powi(2)).sum();
    wrong / expected.iter().map(|value| value * value).sum::<f64>().max(f64::MIN_POSITIVE)
}

#[track_caller]
fn assert_close(what: &str, actual: &[f32], expected: &[f64], tolerance: f64) {
    let error = error(actual, expected);
    // A NaN is not below any tolerance.
    assert!(error <= tolerance, "{what}: normalised squared error {error:e}, at most {tolerance:e}");
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

/// `rows` of `cols` weights, as a matrix on the device and as numbers.
struct Weights<M> {
    memory: M,
    matrix: Matrix,
    values: Vec<f64>,
}

fn matrix<B: Backend>(rig: &Rig<B>, quant_type: QuantType, rows: u32, cols: u32, seed: u64) -> Weights<B::Buffer> {
    let blocks = weights_of(&mut Numbers::seeded(seed), quant_type, (rows * cols) as usize);
    let mut values = vec![0.0; (rows * cols) as usize];
    dequantise(quant_type, &blocks, &mut values).expect("whole blocks");
    let memory = rig.upload(&blocks);
    let matrix = Matrix { addr: start(&memory), quant_type, rows, cols };
    Weights { memory, matrix, values: wide(&values) }
}

/// Rows in an activation format on the device, and the numbers they stand for.
fn activations<B: Backend>(rig: &Rig<B>, format: ActivationFormat, rows: &[f32], n_cols: u32) -> (B::Buffer, Vec<f64>) {
    let n_rows = u32::try_from(rows.len()).expect("few") / n_cols;
    let x = rig.upload_f32(rows);
    let out = rig.buffer(n_rows as usize * format.row_bytes(n_cols as usize));
    rig.run(&Op::Quantise { x: start(&x), out: start(&out), n_rows, n_cols, format }).expect("runs");
    let values = values_of_rows(format, &rig.download(out.range()), n_cols as usize);
    (out, values)
}

/// `[n_rows, weights.rows]` of products.
fn products(weights: &[f64], rows: &[f64], n_cols: usize) -> Vec<f64> {
    rows.chunks(n_cols).flat_map(|row| weights.chunks(n_cols).map(|weights| dot(weights, row))).collect()
}

fn formats_of(quant_type: QuantType) -> Vec<ActivationFormat> {
    let mut formats = vec![ActivationFormat::F32, ActivationFormat::for_weights(quant_type, false)];
    formats.dedup();
    formats
}

fn a_norm_divides_by_the_root_mean_square<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_cols) in [(1, 1), (3, 50), (5, 256)] {
        let mut numbers = Numbers::seeded(1);
        let (x, weight) = (numbers.floats(n_rows * n_cols, 2.0), numbers.floats(n_cols, 1.0));
        let (x_at, weight_at, out) = (rig.upload_f32(&x), rig.upload_f32(&weight), rig.buffer(4 * x.len()));
        let [rows, cols] = [n_rows, n_cols].map(|size| u32::try_from(size).expect("small"));
        let eps = 1e-3;
        rig.run(&Op::RmsNorm { x: start(&x_at), weight: start(&weight_at), out: start(&out), n_rows: rows, n_cols: cols, eps })
            .expect("runs");
        let expected: Vec<f64> = wide(&x).chunks(n_cols).flat_map(|row| normed(row, &wide(&weight), eps)).collect();
        assert_close("norm", &rig.download_f32(&out), &expected, F32_TOLERANCE);
    }
}

fn normed(row: &[f64], weight: &[f64], eps: f32) -> Vec<f64> {
    let root = (dot(row, row) / row.len() as f64 + f64::from(eps)).sqrt();
    row.iter().zip(weight).map(|(value, weight)| value / root * weight).collect()
}

fn quantised_rows_are_within_half_a_step<B: Backend>(rig: &Rig<B>) {
    for format in [ActivationFormat::F32, ActivationFormat::Q8_0, ActivationFormat::Q8_K] {
        let rows = Numbers::seeded(2).floats(3 * 512, 3.0);
        let (_memory, values) = activations(rig, format, &rows, 512);
        let block_len = if format == ActivationFormat::F32 { 1 } else { format.block_len() };
        for (block, values) in rows.chunks(block_len).zip(values.chunks(block_len)) {
            let largest = block.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            let step = if format == ActivationFormat::F32 { 0.0 } else { f64::from(largest) / 127.0 };
            for (value, stored) in block.iter().zip(values) {
                assert!((f64::from(*value) - stored).abs() <= 0.5001 * step, "{format:?}: {value} became {stored}");
            }
        }
    }
}

fn products_of_every_type_agree_on_both_paths_and_formats<B: Backend>(rig: &Rig<B>) {
    let (n_out, n_in) = (37, 512);
    for quant_type in QuantType::ALL {
        let weights = matrix(rig, quant_type, n_out, n_in, 3);
        for format in formats_of(quant_type) {
            for (path, n_rows) in [(Path::Window, 1), (Path::Window, 8), (Path::Prompt, 1), (Path::Prompt, 21)] {
                let rows = Numbers::seeded(u64::from(n_rows)).floats((n_rows * n_in) as usize, 1.0);
                let (input, values) = activations(rig, format, &rows, n_in);
                let out = rig.buffer((4 * n_rows * n_out) as usize);
                let (input, out_at) = (start(&input), start(&out));
                rig.run(&Op::MatMul {
                    weights: weights.matrix,
                    input,
                    format,
                    out: out_at,
                    n_rows,
                    path,
                    accumulate: false,
                    unpacked: AddrRange::EMPTY,
                })
                .expect("runs");
                let expected = products(&weights.values, &values, n_in as usize);
                let what = format!("{quant_type} with {format:?}, {path:?} of {n_rows}");
                assert_close(&what, &rig.download_f32(&out), &expected, product_tolerance(quant_type));
            }
        }
        assert!(weights.memory.range().bytes > Bytes::ZERO);
    }
}

fn a_product_is_added_where_asked<B: Backend>(rig: &Rig<B>) {
    let (n_out, n_in) = (20, 256);
    let weights = matrix(rig, QuantType::Q4_K, n_out, n_in, 4);
    for (path, n_rows) in [(Path::Window, 2), (Path::Prompt, 9)] {
        let mut numbers = Numbers::seeded(5);
        let (rows, before) = (numbers.floats((n_rows * n_in) as usize, 1.0), numbers.floats((n_rows * n_out) as usize, 1.0));
        let format = ActivationFormat::Q8_K;
        let (input, values) = activations(rig, format, &rows, n_in);
        let out = rig.upload_f32(&before);
        let (input, out_at) = (start(&input), start(&out));
        rig.run(&Op::MatMul {
            weights: weights.matrix,
            input,
            format,
            out: out_at,
            n_rows,
            path,
            accumulate: true,
            unpacked: AddrRange::EMPTY,
        })
        .expect("runs");
        let product = products(&weights.values, &values, n_in as usize);
        let expected: Vec<f64> = product.iter().zip(&before).map(|(product, before)| product + f64::from(*before)).collect();
        assert_close("sum", &rig.download_f32(&out), &expected, product_tolerance(QuantType::Q4_K));
    }
}

fn the_result_of_a_row_does_not_depend_on_the_rows_beside_it<B: Backend>(rig: &Rig<B>) {
    let (n_out, n_in) = (19, 256);
    for quant_type in [QuantType::F32, QuantType::Q8_0, QuantType::Q4_K, QuantType::IQ3_XXS] {
        let weights = matrix(rig, quant_type, n_out, n_in, 6);
        let format = ActivationFormat::for_weights(quant_type, false);
        let (input, _) = activations(rig, format, &Numbers::seeded(7).floats((8 * n_in) as usize, 1.0), n_in);
        for path in [Path::Window, Path::Prompt] {
            let together = rig.buffer((4 * 8 * n_out) as usize);
            let product = |first: u64, n_rows: u32, out: Addr| Op::MatMul {
                weights: weights.matrix,
                input: start(&input).offset(Bytes(first * format.row_bytes(n_in as usize) as u64)),
                format,
                out,
                n_rows,
                path,
                accumulate: false,
                unpacked: AddrRange::EMPTY,
            };
            rig.run(&product(0, 8, start(&together))).expect("runs");
            let alone = rig.buffer((4 * 8 * n_out) as usize);
            for row in 0..8 {
                rig.run(&product(row, 1, start(&alone).offset(Bytes(row * 4 * u64::from(n_out))))).expect("runs");
            }
            assert_eq!(rig.download(together.range()), rig.download(alone.range()), "{quant_type} {path:?}");
        }
    }
}

fn heads_are_normed_and_their_first_numbers_turned<B: Backend>(rig: &Rig<B>) {
    let (n_head, freq_base, eps) = (3, 10_000.0, 1e-6);
    for (head_dim, n_rot) in [(64, 64), (64, 16), (48, 0)] {
        let positions = [0, 1, 700, 40_000];
        let mut numbers = Numbers::seeded(8);
        let (x, weight) = (numbers.floats((4 * n_head * head_dim) as usize, 1.0), numbers.floats(head_dim as usize, 1.0));
        let (x_at, weight_at, positions_at) = (rig.upload_f32(&x), rig.upload_f32(&weight), rig.upload_i32(&positions));
        let (x_addr, weight_addr, positions_addr) = (start(&x_at), start(&weight_at), start(&positions_at));
        let op = Op::HeadNormRope {
            x: x_addr,
            weight: weight_addr,
            positions: positions_addr,
            n_rows: 4,
            n_head,
            head_dim,
            n_rot,
            freq_base,
            eps,
        };
        rig.run(&op).expect("runs");
        let mut expected = Vec::new();
        for (at, head) in wide(&x).chunks(head_dim as usize).enumerate() {
            let mut head = normed(head, &wide(&weight), eps);
            turn(&mut head[..n_rot as usize], f64::from(positions[at / n_head as usize]), f64::from(freq_base));
            expected.extend(head);
        }
        assert_close(&format!("{n_rot} of {head_dim} turned"), &rig.download_f32(&x_at), &expected, F32_TOLERANCE);
    }
}

fn turn(numbers: &mut [f64], position: f64, freq_base: f64) {
    let half = numbers.len() / 2;
    for pair in 0..half {
        let angle = position * freq_base.powf(-(pair as f64) / half as f64);
        let (a, b) = (numbers[pair], numbers[pair + half]);
        (numbers[pair], numbers[pair + half]) = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos());
    }
}

fn the_router_takes_the_largest_with_ties_to_the_lower<B: Backend>(rig: &Rig<B>) {
    let logits = [[0.5_f32, 2.0, -1.0, 2.0, 2.0, 0.0], [3.0, 1.0, 1.0, 1.0, -4.0, 3.5]];
    let (n_rows, n_expert, n_used, scale) = (2, 6, 2, 2.5_f32);
    let (logits_at, ids, weights) = (rig.upload_f32(logits.as_flattened()), rig.buffer(16), rig.buffer(16));
    let (logits_addr, ids_addr, weights_addr) = (start(&logits_at), start(&ids), start(&weights));
    rig.run(&Op::Router { logits: logits_addr, ids: ids_addr, weights: weights_addr, n_rows, n_expert, n_used, scale }).expect("runs");
    assert_eq!(rig.download_i32(&ids), [1, 3, 0, 5]);
    let (third, fifth) = (1.0 / (1.0 + 0.5_f64.exp()), 1.0 / (1.0 + (-0.5_f64).exp()));
    let expected = [0.5, 0.5, third, fifth].map(|share| share * f64::from(scale));
    assert_close("shares", &rig.download_f32(&weights), &expected, F32_TOLERANCE);
}
