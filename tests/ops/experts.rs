//! The two expert operations against `down(silu(gate x) * up x)` in f64.

use std::sync::Arc;

use ebbtide::backend::op::{ExpertAddrs, ExpertShape, Op, PromptExpert, expert_scratch_bytes};
use ebbtide::backend::{AddrRange, Backend, DeviceMemory, HostRegion};
use ebbtide::quant::{ActivationFormat, QuantType, dequantise};
use ebbtide::units::Bytes;

use crate::device::{Rig, start};
use crate::halves::halved;
use crate::numbers::{Numbers, weights_of};
use crate::{activations, assert_close, products, wide};

/// The experts of a layer, their matrices in device memory but for those of odd number, which are read in place from the host.
pub struct Experts<B: Backend> {
    pub shape: ExpertShape,
    pub addrs: Vec<ExpertAddrs>,
    values: Vec<[Vec<f64>; 3]>,
    _buffers: Vec<B::Buffer>,
    _registered: Vec<B::Registered>,
}

pub const N_EMBD: u32 = 256;
const N_FF: u32 = 512;

/// `count` experts whose rows and activated rows have the two formats.
pub fn experts<B: Backend>(rig: &Rig<B>, count: u64, types: [QuantType; 3], formats: [ActivationFormat; 2]) -> Experts<B> {
    let [gate_type, up_type, down_type] = types;
    let [input_format, down_format] = formats;
    let shape = ExpertShape { n_embd: N_EMBD, n_ff: N_FF, gate_type, up_type, down_type, input_format, down_format };
    let mut made = Experts { shape, addrs: Vec::new(), values: Vec::new(), _buffers: Vec::new(), _registered: Vec::new() };
    let in_place = rig.backend.capabilities().reads_pageable_memory;
    for expert in 0..count {
        let mut numbers = Numbers::seeded(100 + expert);
        let parts = types.map(|quant_type| weights_of(&mut numbers, quant_type, (N_EMBD * N_FF) as usize));
        made.values.push(std::array::from_fn(|part| {
            let mut values = vec![0.0; (N_EMBD * N_FF) as usize];
            dequantise(types[part], &parts[part], &mut values).expect("whole blocks");
            if input_format == ActivationFormat::F16 { halved(&values) } else { wide(&values) }
        }));
        let [gate, up, down] = parts.map(|part| {
            if in_place && expert % 2 == 1 {
                made._registered.push(rig.backend.register(HostRegion::Pageable(Arc::new(part))).expect("host memory"));
                return start(&made._registered[made._registered.len() - 1]);
            }
            made._buffers.push(rig.upload(&part));
            start(&made._buffers[made._buffers.len() - 1])
        });
        made.addrs.push(ExpertAddrs { gate, up, down });
    }
    made
}

impl<B: Backend> Experts<B> {
    /// `down(silu(gate x) * up x)`, the activated row stored as the down matrix takes it.
    fn result(&self, expert: usize, row: &[f64]) -> Vec<f64> {
        let [gate, up, down] = &self.values[expert];
        let (gate, up) = (products(gate, row, N_EMBD as usize), products(up, row, N_EMBD as usize));
        let inner: Vec<f64> = gate.iter().zip(up).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up).collect();
        products(down, &stored(self.shape.down_format, &inner), N_FF as usize)
    }

    /// Rounding of f32; where activated rows are stored in 8 bits, a number that falls between two steps may take either.
    fn tolerance(&self) -> f64 {
        match self.shape.down_format {
            ActivationFormat::F32 => 1e-10,
            // Activated rows count as they are, not as halves.
            ActivationFormat::F16 => 1e-7,
            _ => 1e-5,
        }
    }
}

/// What a row becomes in a format: steps of the largest magnitude of each block over 127.
fn stored(format: ActivationFormat, row: &[f64]) -> Vec<f64> {
    if matches!(format, ActivationFormat::F32 | ActivationFormat::F16) {
        return row.to_vec();
    }
    let blocks = row.chunks(format.block_len());
    let steps = blocks.map(|block| block.iter().fold(0.0_f64, |largest, value| largest.max(value.abs())) / 127.0);
    row.chunks(format.block_len())
        .zip(steps)
        .flat_map(|(block, step)| block.iter().map(move |value| (value / step).round() * step))
        .collect()
}

const EXPERT_TYPES: [([QuantType; 3], bool); 4] = [
    ([QuantType::F32; 3], true),
    ([QuantType::Q4_K, QuantType::Q4_K, QuantType::Q6_K], true),
    ([QuantType::Q4_K, QuantType::Q4_K, QuantType::Q6_K], false),
    ([QuantType::MXFP4, QuantType::Q8_0, QuantType::IQ3_XXS], false),
];

pub fn a_windows_experts_are_added_wherever_they_lie<B: Backend>(rig: &Rig<B>) {
    let (ids, shares) = ([0, 3, 1, 3, 0, 1], [0.75_f32, 0.25, 0.5, 0.5, 0.125, 0.875]);
    for (types, exact) in EXPERT_TYPES {
        let formats = [types[0], types[2]].map(|quant_type| ActivationFormat::for_weights(quant_type, exact));
        let experts = experts(rig, 4, types, formats);
        let mut numbers = Numbers::seeded(10);
        let (rows, before) = (numbers.floats(3 * N_EMBD as usize, 1.0), numbers.floats(3 * N_EMBD as usize, 1.0));
        let (input, values) = activations(rig, experts.shape.input_format, &rows, N_EMBD);
        let table = rig.upload(&experts.addrs.iter().flat_map(|addrs| addrs.to_bytes()).collect::<Vec<u8>>());
        let (ids_at, shares_at, residual) = (rig.upload_i32(&ids), rig.upload_f32(&shares), rig.upload_f32(&before));
        let scratch = rig.buffer(Bytes(expert_scratch_bytes(&experts.shape, 6)).as_usize());
        let op = Op::ExpertsWindow {
            input: start(&input),
            ids: start(&ids_at),
            weights: start(&shares_at),
            table: start(&table),
            residual: start(&residual),
            n_rows: 3,
            n_expert: 4,
            n_used: 2,
            shape: experts.shape,
            scratch: start(&scratch),
        };
        rig.run(&op).expect("runs");
        let mut expected = wide(&before);
        for (pair, (&expert, &share)) in ids.iter().zip(&shares).enumerate() {
            let columns = pair / 2 * N_EMBD as usize..(pair / 2 + 1) * N_EMBD as usize;
            let result = experts.result(usize::try_from(expert).expect("a number"), &values[columns.clone()]);
            expected[columns].iter_mut().zip(result).for_each(|(sum, result)| *sum += f64::from(share) * result);
        }
        assert_close(&format!("{types:?}, exact {exact}"), &rig.download_f32(&residual), &expected, experts.tolerance());
    }
}

pub fn a_prompts_experts_are_added_in_tiles_of_any_size<B: Backend>(rig: &Rig<B>) {
    for (types, exact) in EXPERT_TYPES {
        let formats = [types[0], types[2]].map(|quant_type| ActivationFormat::for_weights(quant_type, exact));
        prompts_agree(rig, &experts(rig, 3, types, formats), &format!("{types:?}, exact {exact}"), AddrRange::EMPTY);
    }
}

/// Experts of a prompt in tiles of several sizes, whose bits must be the same.
pub fn prompts_agree<B: Backend>(rig: &Rig<B>, experts: &Experts<B>, what: &str, unpacked: AddrRange) {
    let n_rows = 9_usize;
    // Rows of experts 0, 1 (none) and 2, and where each row stands in the list.
    let (rows, lists) = ([0_i32, 2, 3, 8, 0, 1, 2, 6, 7], [(0, 4), (4, 0), (4, 5)]);
    let entries: Vec<i32> = (0..9)
        .flat_map(|row| {
            let mut places = (0..).zip(&rows).filter(move |(_, listed)| **listed == row).map(|(place, _)| place);
            [places.next().unwrap_or(-1), places.next().unwrap_or(-1)]
        })
        .collect();
    let mut numbers = Numbers::seeded(11);
    let (inputs, before) = (numbers.floats(n_rows * N_EMBD as usize, 1.0), numbers.floats(n_rows * N_EMBD as usize, 1.0));
    let shares = numbers.floats(rows.len(), 1.0);
    let (input, values) = activations(rig, experts.shape.input_format, &inputs, N_EMBD);
    let (rows_at, shares_at, entries_at) = (rig.upload_i32(&rows), rig.upload_f32(&shares), rig.upload_i32(&entries));
    let mut expected = wide(&before);
    for (expert, &(first, count)) in lists.iter().enumerate() {
        for entry in first..first + count {
            let row = usize::try_from(rows[entry]).expect("a number");
            let columns = row * N_EMBD as usize..(row + 1) * N_EMBD as usize;
            let result = experts.result(expert, &values[columns.clone()]);
            expected[columns].iter_mut().zip(result).for_each(|(sum, result)| *sum += f64::from(shares[entry]) * result);
        }
    }
    let mut first_result: Option<Vec<u8>> = None;
    for tile_rows in [1, 3, 64] {
        let residual = rig.upload_f32(&before);
        let scratch = rig.buffer(Bytes(expert_scratch_bytes(&experts.shape, u64::from(tile_rows))).as_usize());
        let group = experts.addrs.iter().zip(lists).map(|(&weights, (first, count))| PromptExpert {
            weights,
            first: u32::try_from(first).expect("few"),
            count: u32::try_from(count).expect("few"),
        });
        let op = Op::ExpertsPrompt {
            experts: group.collect(),
            input: start(&input),
            n_input_rows: 9,
            rows: start(&rows_at),
            row_weights: start(&shares_at),
            entries: start(&entries_at),
            n_used: 2,
            residual: start(&residual),
            shape: experts.shape,
            scratch: start(&scratch),
            tile_rows,
            unpacked,
        };
        rig.run(&op).expect("runs");
        let what = format!("{what}, tiles of {tile_rows}");
        assert_close(&what, &rig.download_f32(&residual), &expected, experts.tolerance());
        let bits = rig.download(residual.range());
        assert_eq!(*first_result.get_or_insert_with(|| bits.clone()), bits, "{what}: a tile changes no bit");
    }
}
