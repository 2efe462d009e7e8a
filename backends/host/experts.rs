//! Runs the two expert operations: finds the weights that the expert table or the operation names, wherever they lie.

use super::clock::Cost;
use super::kernels::gemm::Activations;
use super::kernels::halves;
use super::kernels::moe::{self, ExpertInputs, ExpertTokens, ExpertWeights, WindowRow};
use super::kernels::router::Route;
use super::launch::{Launcher, bytes_cost};
use super::memory::Place;
use super::operands::Operands;
use crate::backend::op::{self, ExpertAddrs, ExpertShape, Op};
use crate::backend::{Addr, AddrRange, Result};
use crate::quant::{ActivationFormat, QuantType};
use crate::units::Bytes;

/// Bytes of the three matrices of an expert.
struct PartBytes {
    inner: [usize; 2],
    down: usize,
}

impl PartBytes {
    fn of(shape: &ExpertShape) -> Self {
        let (n_embd, n_ff) = (shape.n_embd as usize, shape.n_ff as usize);
        let matrix = |quant: QuantType, rows: usize, cols: usize| rows * (cols / quant.block_len() * quant.block_bytes());
        let inner = [matrix(shape.gate_type, n_ff, n_embd), matrix(shape.up_type, n_ff, n_embd)];
        Self { inner, down: matrix(shape.down_type, n_embd, n_ff) }
    }

    fn read<'a>(&self, operands: &Operands<'a>, addrs: &ExpertAddrs) -> Result<ExpertWeights<'a>> {
        Ok(ExpertWeights {
            gate: operands.read(addrs.gate, self.inner[0])?,
            up: operands.read(addrs.up, self.inner[1])?,
            down: operands.read(addrs.down, self.down)?,
        })
    }

    /// Adds the time of reading an expert once: over the link what is read in place from host memory.
    fn charge(&self, operands: &Operands<'_>, addrs: &ExpertAddrs, cost: &mut Cost) -> Result<()> {
        for (start, part_bytes) in [(addrs.gate, self.inner[0]), (addrs.up, self.inner[1]), (addrs.down, self.down)] {
            let bytes = bytes_cost(part_bytes).device_bytes;
            match operands.place(AddrRange { start, bytes: Bytes::from(part_bytes) })? {
                Place::Device => cost.device_bytes += bytes,
                Place::Host => cost.link_bytes += bytes,
            }
        }
        Ok(())
    }
}

/// The shape as the kernels take it.
fn kernel_shape(shape: &ExpertShape) -> moe::ExpertShape {
    moe::ExpertShape {
        n_embd: shape.n_embd as usize,
        n_ff: shape.n_ff as usize,
        gate: shape.gate_type,
        up: shape.up_type,
        down: shape.down_type,
        exact: shape.down_format == ActivationFormat::F32,
    }
}

/// The experts' input, the same rows for gate and up.
fn inputs<'a>(operands: &Operands<'a>, shape: &ExpertShape, input: Addr, n_rows: usize) -> Result<ExpertInputs<'a>> {
    let n = shape.n_embd as usize;
    let bytes = operands.read(input, n_rows * shape.input_format.row_bytes(n))?;
    let activations = Activations { format: shape.input_format, n, bytes };
    Ok(ExpertInputs { gate: activations, up: activations })
}

/// The record of one expert in a layer's table.
fn record(table: &[u8], expert: u32) -> ExpertAddrs {
    let record = &table[expert as usize * ExpertAddrs::BYTES..][..ExpertAddrs::BYTES];
    let [gate, up, down] = [0, 8, 16].map(|at| {
        let eight: [u8; 8] = record[at..at + 8].try_into().expect("eight bytes");
        Addr(u64::from_le_bytes(eight))
    });
    ExpertAddrs { gate, up, down }
}

/// Weights of an expert.
fn n_weights(shape: &ExpertShape) -> f64 {
    3.0 * f64::from(shape.n_embd) * f64::from(shape.n_ff)
}

/// Floating-point operations of `pairs` rows through an expert.
#[allow(clippy::cast_precision_loss, reason = "a model of time")]
fn flop(shape: &ExpertShape, pairs: usize) -> f64 {
    2.0 * pairs as f64 * n_weights(shape)
}

impl Launcher {
    /// Runs [`Op::ExpertsWindow`].
    pub(super) fn experts_window(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::ExpertsWindow { input, ids, weights, table, residual, n_rows, n_expert, n_used, ref shape, scratch } = *op else {
            unreachable!("called for this operation only");
        };
        let (n_rows, n_used) = (n_rows as usize, n_used as usize);
        let ids = operands.indices(ids, n_rows * n_used, n_expert)?;
        let shares = operands.read::<f32>(weights, ids.len())?;
        if !ids.chunks(n_used).all(|row| row.is_sorted_by(|left, right| left < right)) {
            return Err(operands.refuse("experts of a row do not ascend".to_owned()));
        }
        let table = operands.read::<u8>(table, n_expert as usize * ExpertAddrs::BYTES)?;
        let part_bytes = PartBytes::of(shape);
        let mut chosen: Vec<u32> = ids.to_vec();
        chosen.sort_unstable();
        chosen.dedup();
        let mut cost = Cost { linear_flop: flop(shape, ids.len()), ..Cost::default() };
        let mut resolved = Vec::with_capacity(chosen.len());
        for &expert in &chosen {
            let addrs = record(table, expert);
            resolved.push(part_bytes.read(operands, &addrs)?);
            part_bytes.charge(operands, &addrs, &mut cost)?;
        }
        let routes: Vec<Route> = ids.iter().zip(shares).map(|(&expert, &weight)| Route { expert, weight }).collect();
        let rows: Vec<WindowRow<'_>> = routes.chunks(n_used).map(|routes| WindowRow { routes }).collect();
        let weights_of = |expert: u32| resolved[chosen.binary_search(&expert).expect("every route was resolved")];
        let scratch_bytes = op::expert_scratch_bytes(shape, ids.len() as u64);
        let inputs = inputs(operands, shape, input, n_rows)?;
        let (residual, scratch) = (operands.write(residual, n_rows * shape.n_embd as usize)?, operands.scratch(scratch, scratch_bytes)?);
        if self.computes() {
            moe::experts_window(&self.pool, self.level, &kernel_shape(shape), &inputs, &rows, &weights_of, residual, scratch);
        }
        Ok(cost)
    }

    /// Runs [`Op::ExpertsPrompt`].
    pub(super) fn experts_prompt(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::ExpertsPrompt { experts, input, n_input_rows, rows, row_weights, residual, shape, scratch, tile_rows, unpacked, .. } = op
        else {
            unreachable!("called for this operation only");
        };
        // The stretch of the row lists that these experts' rows lie in.
        let first = experts.iter().map(|expert| expert.first as usize).min().unwrap_or(0);
        let end = experts.iter().map(|expert| expert.first as usize + expert.count as usize).max().unwrap_or(0);
        let entry = |list: Addr| list.offset(Bytes::from(4 * first));
        let rows = operands.indices(entry(*rows), end - first, *n_input_rows)?;
        let shares = operands.read::<f32>(entry(*row_weights), end - first)?;
        let part_bytes = PartBytes::of(shape);
        let mut group = Vec::with_capacity(experts.len());
        let mut pairs = 0;
        let mut cost = Cost::default();
        for expert in experts {
            let start = expert.first as usize - first;
            let listed = start..start + expert.count as usize;
            pairs += listed.len();
            let weights = part_bytes.read(operands, &expert.weights)?;
            part_bytes.charge(operands, &expert.weights, &mut cost)?;
            group.push(ExpertTokens { weights, tokens: &rows[listed.clone()], shares: &shares[listed] });
        }
        let n_rows = *n_input_rows as usize;
        let scratch_bytes = op::expert_scratch_bytes(shape, u64::from(*tile_rows));
        let inputs = inputs(operands, shape, *input, n_rows)?;
        let (residual, scratch) = (operands.write(*residual, n_rows * shape.n_embd as usize)?, operands.scratch(*scratch, scratch_bytes)?);
        operands.unpacked(shape.input_format, *unpacked)?;
        if self.computes() && shape.input_format == ActivationFormat::F16 {
            halves::experts_prompt_group(&self.pool, self.level, &kernel_shape(shape), &inputs.gate, &group, residual);
        } else if self.computes() {
            moe::experts_prompt_group(
                &self.pool,
                self.level,
                &kernel_shape(shape),
                &inputs,
                &group,
                residual,
                *tile_rows as usize,
                scratch,
            );
        }
        let unpacked_weights = n_weights(shape) * group.len() as f64;
        Ok(Cost { linear_flop: flop(shape, pairs), unpacked_weights, ..cost })
    }
}
