//! Runs the operations that gate rows number by number, and those that move rows around them.

use super::clock::Cost;
use super::kernels::gates::{add_gated, gated_head_norm, join_pairs, sigmoid_gate, split_pairs, swiglu_rows};
use super::launch::{Launcher, bytes_cost};
use super::operands::Operands;
use crate::backend::Result;
use crate::backend::op::Op;

/// Bytes of a number.
const F32: usize = size_of::<f32>();

impl Launcher {
    /// Runs one of the operations named below.
    pub(super) fn gates(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        match *op {
            Op::SplitGates { joined, values, gates, n_rows, n_head, head_dim } => {
                let n = n_rows as usize * n_head as usize * head_dim as usize;
                let (joined, values, gates) = (operands.read(joined, 2 * n)?, operands.write(values, n)?, operands.write(gates, n)?);
                if self.computes() {
                    split_pairs(joined, values, gates, head_dim as usize);
                }
                Ok(bytes_cost(4 * n * F32))
            }
            Op::JoinRows { left, right, out, n_rows, n_cols } => {
                let n = n_rows as usize * n_cols as usize;
                let (left, right, out) = (operands.read(left, n)?, operands.read(right, n)?, operands.write(out, 2 * n)?);
                if self.computes() {
                    join_pairs(left, right, out, n_cols as usize);
                }
                Ok(bytes_cost(4 * n * F32))
            }
            Op::SigmoidGate { x, gates, n_rows, n_cols } => {
                let n = n_rows as usize * n_cols as usize;
                let (x, gates) = (operands.write(x, n)?, operands.read(gates, n)?);
                if self.computes() {
                    sigmoid_gate(&self.pool, self.level, x, gates, n_cols as usize);
                }
                Ok(bytes_cost(3 * n * F32))
            }
            Op::SwiGlu { gate, up, n_rows, n_cols } => {
                let n = n_rows as usize * n_cols as usize;
                let (gate, up) = (operands.write(gate, n)?, operands.read(up, n)?);
                if self.computes() {
                    swiglu_rows(&self.pool, self.level, gate, up, n_cols as usize);
                }
                Ok(bytes_cost(3 * n * F32))
            }
            Op::AddGated { sum, x, gate, n_rows, n_cols } => {
                let n = n_rows as usize * n_cols as usize;
                let (sum, x, gate) = (operands.write(sum, n)?, operands.read(x, n)?, operands.read(gate, n_rows as usize)?);
                if self.computes() {
                    add_gated(&self.pool, sum, x, gate, n_cols as usize);
                }
                Ok(bytes_cost((3 * n + gate.len()) * F32))
            }
            Op::GatedHeadNorm { x, weight, gates, n_rows, n_head, head_dim, eps } => {
                let n = n_rows as usize * n_head as usize * head_dim as usize;
                let (x, weight, gates) = (operands.write(x, n)?, operands.read(weight, head_dim as usize)?, operands.read(gates, n)?);
                if self.computes() {
                    gated_head_norm(&self.pool, self.level, x, weight, gates, eps);
                }
                Ok(bytes_cost(3 * n * F32))
            }
            _ => unreachable!("called for these operations only"),
        }
    }
}
