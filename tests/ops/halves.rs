//! Rows in 16-bit floats and their products, whether a device chooses them itself or not.

use ebbtide::backend::op::{Matrix, Op, Path, UNPACKED_ROWS_MIN, unpacked_bytes, unpacked_expert_bytes};
use ebbtide::backend::{Addr, AddrRange, Backend, DeviceMemory};
use ebbtide::quant::{ActivationFormat, QuantType};
use ebbtide::units::Bytes;
use half::f16;

use crate::device::{Rig, start};
use crate::experts::{N_EMBD, experts, prompts_agree};
use crate::numbers::Numbers;
use crate::{Weights, activations, assert_close, matrix, products, wide};

/// Sums of exact products of halves in f32, as matrix units make them.
const TOLERANCE: f64 = 1e-10;
const FORMAT: ActivationFormat = ActivationFormat::F16;

/// What unpacked weights are.
pub fn halved(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f16::from_f32(value).to_f64()).collect()
}

fn halved_matrix<B: Backend>(rig: &Rig<B>, quant_type: QuantType, rows: u32, cols: u32, seed: u64) -> Weights<B::Buffer> {
    let weights = matrix(rig, quant_type, rows, cols, seed);
    let values = weights.values.iter().map(|&value| f16::from_f64(value).to_f64()).collect();
    Weights { values, ..weights }
}

fn product(weights: Matrix, input: Addr, out: Addr, n_rows: u32, unpacked: AddrRange) -> Op {
    Op::MatMul { weights, input, format: FORMAT, out, n_rows, path: Path::Prompt, accumulate: false, unpacked }
}

/// A row of normal numbers as [`FORMAT`] has it.
fn stored(row: &[f32]) -> Vec<u8> {
    let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = f32::from_bits(largest.to_bits() & 0x7f80_0000);
    let mut bytes: Vec<u8> = scale.to_le_bytes().into_iter().chain([0; 12]).collect();
    bytes.extend(row.iter().flat_map(|value| f16::from_f32(value / scale).to_le_bytes()));
    bytes.resize(FORMAT.row_bytes(row.len()), 0);
    bytes
}

pub fn rows_in_halves_keep_eleven_bits_of_any_size<B: Backend>(rig: &Rig<B>) {
    for n_cols in [8, 20, 512] {
        for size in [1e-30_f32, 1.0, 3e4, 1e30] {
            let rows = Numbers::seeded(2).floats(3 * n_cols, size);
            let (memory, values) = activations(rig, FORMAT, &rows, u32::try_from(n_cols).expect("small"));
            // The same bytes on every device, so that one can be held against another.
            assert_eq!(rig.download(memory.range()), rows.chunks(n_cols).flat_map(stored).collect::<Vec<u8>>(), "{n_cols} of {size}");
            for (row, values) in rows.chunks(n_cols).zip(values.chunks(n_cols)) {
                let largest = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
                for (value, stored) in row.iter().zip(values) {
                    let (value, error) = (f64::from(*value), (f64::from(*value) - stored).abs());
                    assert!(error <= value.abs() / 2048.0 + f64::from(largest) * 6e-8, "{value} became {stored}");
                }
            }
        }
    }
    let (_memory, zeros) = activations(rig, FORMAT, &[0.0; 16], 16);
    assert_eq!(zeros, [0.0; 16]);
    let (_memory, broken) = activations(rig, FORMAT, &[1.0, f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 8);
    assert!(broken[1].is_nan(), "what is no number shows");
}

pub fn products_of_every_type_agree_in_halves<B: Backend>(rig: &Rig<B>) {
    let (n_out, n_in) = (137, 512);
    let room = rig.buffer(unpacked_bytes(n_out, n_in).as_usize());
    for quant_type in QuantType::ALL {
        let weights = halved_matrix(rig, quant_type, n_out, n_in, 3);
        for n_rows in [1, 33, 140] {
            let rows = Numbers::seeded(u64::from(n_rows)).floats((n_rows * n_in) as usize, 1.0);
            let (input, values) = activations(rig, FORMAT, &rows, n_in);
            let out = rig.buffer((4 * n_rows * n_out) as usize);
            rig.run(&product(weights.matrix, start(&input), start(&out), n_rows, room.range())).expect("runs");
            let expected = products(&weights.values, &values, n_in as usize);
            assert_close(&format!("{quant_type} with {n_rows} rows"), &rig.download_f32(&out), &expected, TOLERANCE);
        }
    }
    // Lines that end inside of a chunk, and inside of what a step takes.
    for n_in in [20, 136] {
        let weights = halved_matrix(rig, QuantType::F16, 5, n_in, 4);
        let (input, values) = activations(rig, FORMAT, &Numbers::seeded(8).floats(3 * n_in as usize, 1.0), n_in);
        let out = rig.buffer(4 * 3 * 5);
        rig.run(&product(weights.matrix, start(&input), start(&out), 3, room.range())).expect("runs");
        assert_close("rest", &rig.download_f32(&out), &products(&weights.values, &values, n_in as usize), TOLERANCE);
    }
}

pub fn a_product_in_halves_is_the_same_in_any_stripe_and_beside_any_rows<B: Backend>(rig: &Rig<B>) {
    let (n_out, n_in, n_rows) = (300, 256, 70);
    let weights = matrix(rig, QuantType::Q4_K, n_out, n_in, 6);
    let mut numbers = Numbers::seeded(7);
    let (rows, before) = (numbers.floats((n_rows * n_in) as usize, 1.0), numbers.floats((n_rows * n_out) as usize, 1.0));
    let (input, _) = activations(rig, FORMAT, &rows, n_in);
    let room = rig.buffer(unpacked_bytes(n_out, n_in).as_usize());
    let together = rig.buffer((4 * n_rows * n_out) as usize);
    rig.run(&product(weights.matrix, start(&input), start(&together), n_rows, room.range())).expect("runs");
    for stripe in [UNPACKED_ROWS_MIN, 129, 299] {
        let (small, out) = (rig.buffer(unpacked_bytes(stripe, n_in).as_usize()), rig.buffer((4 * n_rows * n_out) as usize));
        rig.run(&product(weights.matrix, start(&input), start(&out), n_rows, small.range())).expect("runs");
        assert_eq!(rig.download(together.range()), rig.download(out.range()), "in stripes of {stripe}");
    }
    let alone = rig.buffer((4 * n_rows * n_out) as usize);
    for row in 0..n_rows {
        let row_bytes = FORMAT.row_bytes(n_in as usize) as u64;
        let (from, to) = (Bytes(u64::from(row) * row_bytes), Bytes(u64::from(row * 4 * n_out)));
        rig.run(&product(weights.matrix, start(&input).offset(from), start(&alone).offset(to), 1, room.range())).expect("runs");
    }
    assert_eq!(rig.download(together.range()), rig.download(alone.range()), "row by row");
    let sum = rig.upload_f32(&before);
    let (format, path, unpacked) = (FORMAT, Path::Prompt, room.range());
    let (input, out) = (start(&input), start(&sum));
    rig.run(&Op::MatMul { weights: weights.matrix, input, format, out, n_rows, path, accumulate: true, unpacked }).expect("runs");
    let expected: Vec<f64> =
        wide(&rig.download_f32(&together)).iter().zip(&before).map(|(product, before)| product + f64::from(*before)).collect();
    assert_close("sum", &rig.download_f32(&sum), &expected, 1e-12);
}

pub fn experts_in_halves_are_added_in_tiles_of_any_size<B: Backend>(rig: &Rig<B>) {
    for types in [[QuantType::Q4_K, QuantType::Q4_K, QuantType::Q6_K], [QuantType::MXFP4, QuantType::Q8_0, QuantType::IQ3_XXS]] {
        let experts = experts(rig, 3, types, [FORMAT; 2]);
        for n_experts in [1, 3] {
            let room = rig.buffer((unpacked_expert_bytes(&experts.shape) * n_experts).as_usize());
            prompts_agree(rig, &experts, &format!("{types:?}, {n_experts} of {N_EMBD} unpacked"), room.range());
        }
    }
}

pub fn routes_are_sorted_by_expert_and_rows_know_their_places<B: Backend>(rig: &Rig<B>) {
    for (n_rows, n_expert, n_used) in [(1, 1, 1), (7, 5, 2), (700, 9, 3)] {
        // Every expert equally far from the one before: distinct, ascending, and some without rows in the first.
        let ids: Vec<i32> =
            (0..n_rows).flat_map(|row| (0..n_used).map(move |used| (row * row % 3 + used * (n_expert - 3).max(1)) % n_expert)).collect();
        let mut ids = ids;
        ids.chunks_mut(usize::try_from(n_used).expect("few")).for_each(<[i32]>::sort_unstable);
        let weights = Numbers::seeded(12).floats(ids.len(), 1.0);
        let (ids_at, weights_at) = (rig.upload_i32(&ids), rig.upload_f32(&weights));
        let [rows, row_weights, entries] = [(); 3].map(|()| rig.buffer(4 * ids.len()));
        let counts = rig.buffer(4 * usize::try_from(n_expert).expect("few"));
        let [n_rows, n_expert, n_used] = [n_rows, n_expert, n_used].map(|n| u32::try_from(n).expect("few"));
        rig.run(&Op::SortRoutes {
            ids: start(&ids_at),
            weights: start(&weights_at),
            counts: start(&counts),
            rows: start(&rows),
            row_weights: start(&row_weights),
            entries: start(&entries),
            n_rows,
            n_expert,
            n_used,
        })
        .expect("runs");
        let words =
            |range| rig.download(range).chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four"))).collect::<Vec<_>>();
        let routes = || (0..).zip(&ids).map(|(at, &expert)| (u32::try_from(expert).expect("a number"), at / n_used as usize, at));
        let mut expected: Vec<_> = routes().collect();
        expected.sort_by_key(|&(expert, row, _)| (expert, row));
        let counted: Vec<u32> =
            (0..n_expert).map(|expert| u32::try_from(routes().filter(|route| route.0 == expert).count()).expect("few")).collect();
        assert_eq!(words(counts.range()), counted);
        assert_eq!(words(rows.range()), expected.iter().map(|&(_, row, _)| u32::try_from(row).expect("few")).collect::<Vec<_>>());
        assert_eq!(rig.download_f32(&row_weights), expected.iter().map(|&(.., at)| weights[at]).collect::<Vec<_>>());
        let mut places = vec![0; ids.len()];
        (0..).zip(&expected).for_each(|(place, &(.., at))| places[at] = place);
        assert_eq!(words(entries.range()), places);
    }
}
