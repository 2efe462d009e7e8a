//! Runs the operations of a gated delta net.

use super::clock::Cost;
use super::kernels::delta_conv::{ConvInputs, advance_history, convolve, delta_gates};
use super::kernels::delta_prompt::{BlockPart, DeltaInputs, delta_prompt};
use super::kernels::delta_window::{delta_commit, delta_window};
use super::launch::{Launcher, bytes_cost};
use super::operands::Operands;
use crate::backend::op::{DELTA_STEP, DeltaShape, Op};
use crate::backend::{Addr, Result};
use crate::units::Bytes;

/// Bytes of a number.
const F32: usize = size_of::<f32>();

/// Numbers in so many bytes.
fn floats(bytes: u64) -> usize {
    Bytes(bytes).as_usize() / F32
}

/// The rows and gates that the delta rule reads.
fn inputs<'a>(operands: &Operands<'a>, (qkv, beta, decay): (Addr, Addr, Addr), n_rows: u32, shape: DeltaShape) -> Result<DeltaInputs<'a>> {
    let n_rows = n_rows as usize;
    let (n_qkv, n_gates) = (n_rows * shape.n_channels() as usize, n_rows * shape.n_head_v as usize);
    Ok(DeltaInputs { shape, qkv: operands.read(qkv, n_qkv)?, beta: operands.read(beta, n_gates)?, decay: operands.read(decay, n_gates)? })
}

/// Numbers of the rows and gates.
fn n_read(inputs: &DeltaInputs<'_>) -> usize {
    inputs.qkv.len() + inputs.beta.len() + inputs.decay.len()
}

/// Floating-point operations of the delta rule, `a_row` multiply-adds for each row of each value head.
fn flop(n_rows: u32, shape: DeltaShape, a_row: f64) -> f64 {
    2.0 * f64::from(n_rows) * f64::from(shape.n_head_v) * a_row
}

/// Multiply-adds of a row on its own: two products with the state, its decay and its correction.
fn row_by_row(shape: DeltaShape) -> f64 {
    4.0 * f64::from(shape.head_dim).powi(2)
}

/// Multiply-adds of a row in a step: two products with the state and its share of the fold, and half a step's rows in four places.
fn in_steps(shape: DeltaShape) -> f64 {
    let head_dim = f64::from(shape.head_dim);
    3.0 * head_dim.powi(2) + 2.0 * f64::from(DELTA_STEP) * head_dim
}

impl Launcher {
    /// Runs one of the operations named below.
    pub(super) fn delta(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        match *op {
            Op::DeltaConv { .. } => self.delta_conv(operands, op),
            Op::DeltaHistory { x, history, n_rows, shape } => {
                let n = n_rows as usize * shape.n_channels() as usize;
                let (x, history) = (operands.read(x, n)?, operands.write(history, floats(shape.history_bytes()))?);
                if self.computes() {
                    advance_history(x, history, shape.n_channels() as usize);
                }
                Ok(bytes_cost(2 * history.len() * F32))
            }
            Op::DeltaGates { beta, decay, dt_bias, a, n_rows, n_head } => {
                let (n, n_head) = (n_rows as usize * n_head as usize, n_head as usize);
                let (beta, decay) = (operands.write(beta, n)?, operands.write(decay, n)?);
                let (dt_bias, a) = (operands.read(dt_bias, n_head)?, operands.read(a, n_head)?);
                if self.computes() {
                    delta_gates(beta, decay, dt_bias, a);
                }
                Ok(bytes_cost((4 * n + 2 * n_head) * F32))
            }
            Op::DeltaPrompt { .. } => self.delta_prompt(operands, op),
            Op::DeltaWindow { qkv, beta, decay, state, out, n_rows, shape } => {
                let inputs = inputs(operands, (qkv, beta, decay), n_rows, shape)?;
                let state = operands.read(state, floats(shape.state_bytes()))?;
                let out = operands.write(out, n_rows as usize * shape.value_width() as usize)?;
                let cost = bytes_cost((n_read(&inputs) + state.len() + out.len()) * F32);
                if self.computes() {
                    delta_window(&self.pool, self.level, &inputs, state, out);
                }
                Ok(Cost { linear_flop: flop(n_rows, shape, row_by_row(shape)), ..cost })
            }
            Op::DeltaCommit { qkv, beta, decay, state, n_rows, shape } => {
                let inputs = inputs(operands, (qkv, beta, decay), n_rows, shape)?;
                let state = operands.write(state, floats(shape.state_bytes()))?;
                let cost = bytes_cost((n_read(&inputs) + 2 * state.len()) * F32);
                if self.computes() {
                    delta_commit(&self.pool, self.level, &inputs, state);
                }
                Ok(Cost { linear_flop: flop(n_rows, shape, row_by_row(shape)), ..cost })
            }
            _ => unreachable!("called for these operations only"),
        }
    }

    fn delta_conv(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::DeltaConv { x, history, taps, out, n_rows, shape, eps } = *op else {
            unreachable!("called for this operation only");
        };
        let n = n_rows as usize * shape.n_channels() as usize;
        let inputs = ConvInputs {
            shape,
            x: operands.read(x, n)?,
            history: operands.read(history, floats(shape.history_bytes()))?,
            taps: operands.read(taps, shape.n_channels() as usize * shape.n_taps as usize)?,
            eps,
        };
        let out = operands.write(out, n)?;
        if self.computes() {
            convolve(&self.pool, self.level, &inputs, out);
        }
        Ok(bytes_cost((2 * n + inputs.history.len() + inputs.taps.len()) * F32))
    }

    fn delta_prompt(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::DeltaPrompt { qkv, beta, decay, state, open, out, n_rows, position, block_position, ends_block, shape } = *op else {
            unreachable!("called for this operation only");
        };
        self.note_prompt(position, n_rows);
        let inputs = inputs(operands, (qkv, beta, decay), n_rows, shape)?;
        let state = operands.write(state, floats(shape.state_bytes()))?;
        let open = operands.write(open, floats(shape.open_bytes()))?;
        let out = operands.write(out, n_rows as usize * shape.value_width() as usize)?;
        // The open step counts as moved once, which is more than most calls move of it.
        let cost = bytes_cost((n_read(&inputs) + 2 * state.len() + open.len() + out.len()) * F32);
        if self.computes() {
            let part = BlockPart { position: position as usize, block_position: block_position as usize, ends_block };
            delta_prompt(&self.pool, self.level, &inputs, part, state, open, out);
        }
        Ok(Cost { linear_flop: flop(n_rows, shape, in_steps(shape)), ..cost })
    }
}
