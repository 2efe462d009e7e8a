//! The two expert operations: gate and up, the activated rows, down, and the addition, one kernel after another over the operation's
//! scratch, whose layout `kernels-cuda/experts.cuh` draws.

use super::args::{
    ExpertPiece, ExpertsActivateArgs, ExpertsPromptAddArgs, ExpertsPromptArgs, ExpertsWindowAddArgs, ExpertsWindowArgs, PIECES_MAX,
};
use super::kernels::Kernel;
use super::launch::{BLOCK, Launch, TILE, WINDOW_OUTPUTS, count, rows_number};
use super::windows::is_quantised;
use crate::backend::op::{ExpertShape, Op, PromptExpert};
use crate::backend::{Addr, Result};
use crate::quant::QuantType;
use crate::units::Bytes;

/// Columns of a block that adds results to the residual.
const ADD_COLUMNS: u32 = 32;

/// Where the parts of an operation's scratch lie.
#[derive(Clone, Copy)]
pub struct Parts {
    /// Gate, then up, `[n_pairs, n_ff]` each; later the results `[n_pairs, n_embd]`.
    pub floats: Addr,
    /// Activated rows.
    pub activated: Addr,
}

impl Parts {
    /// In a scratch for `n_pairs` pairs; see [`expert_scratch_bytes`](crate::backend::op::expert_scratch_bytes).
    pub fn of(scratch: Addr, shape: &ExpertShape, n_pairs: u64) -> Self {
        let floats = (2 * u64::from(shape.n_ff)).max(shape.n_embd.into());
        Self { floats: scratch, activated: scratch.offset(Bytes(4 * floats * n_pairs)) }
    }

    /// Part `part` of gate and up, `part_floats` numbers each.
    pub fn part(self, part: u32, part_floats: u64) -> Addr {
        self.floats.offset(Bytes(4 * part_floats * u64::from(part)))
    }
}

/// Bytes of a row of weights.
pub fn row_bytes(quant_type: QuantType, n: u32) -> u64 {
    quant_type.bytes_for(n.into()).expect("the check of shapes demands whole blocks")
}

/// The launches of gate and up: which part, of which type, and how many parts of that type at once.
pub fn inner_launches(shape: &ExpertShape) -> impl Iterator<Item = (u32, QuantType, u64)> {
    let together = shape.gate_type == shape.up_type;
    let second = (!together).then_some((1, shape.up_type, 1));
    [(0, shape.gate_type, if together { 2 } else { 1 })].into_iter().chain(second)
}

impl Launch<'_> {
    fn activate(self, shape: &ExpertShape, parts: Parts, n_pairs: u64) -> Result<()> {
        let args = ExpertsActivateArgs {
            gate: parts.floats,
            up: parts.part(1, n_pairs * u64::from(shape.n_ff)),
            out: parts.activated,
            n_ff: shape.n_ff,
            format: rows_number(shape.down_format),
        };
        self.kernel(Kernel("experts_activate", None), [n_pairs, shape.n_ff.div_ceil(BLOCK).into(), 1], BLOCK, &args)
    }

    /// Queues [`Op::ExpertsWindow`].
    pub fn experts_window(self) -> Result<()> {
        let Op::ExpertsWindow { input, ids, weights, table, residual, n_rows, n_used, ref shape, scratch, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        if is_quantised(shape.input_format) && is_quantised(shape.down_format) {
            return self.window_experts();
        }
        let n_pairs = count(&[n_rows, n_used]);
        let parts = Parts::of(scratch, shape, n_pairs);
        let product = |quant_type: QuantType, n_parts: u64, args: ExpertsWindowArgs| {
            let blocks = [args.n_out.div_ceil(WINDOW_OUTPUTS).into(), n_pairs, n_parts];
            self.kernel(Kernel("experts_window", Some(quant_type)), blocks, BLOCK, &args)
        };
        let inner = ExpertsWindowArgs {
            input,
            ids,
            table,
            out: parts.floats,
            row_bytes: 0,
            n_out: shape.n_ff,
            n_in: shape.n_embd,
            n_rows,
            n_used,
            format: rows_number(shape.input_format),
            first_part: 0,
            by_pair: 0,
            unused: 0,
        };
        for (first_part, quant_type, n_parts) in inner_launches(shape) {
            let out = parts.part(first_part, n_pairs * u64::from(shape.n_ff));
            product(quant_type, n_parts, ExpertsWindowArgs { out, first_part, row_bytes: row_bytes(quant_type, shape.n_embd), ..inner })?;
        }
        self.activate(shape, parts, n_pairs)?;
        let down = ExpertsWindowArgs {
            input: parts.activated,
            row_bytes: row_bytes(shape.down_type, shape.n_ff),
            n_out: shape.n_embd,
            n_in: shape.n_ff,
            format: rows_number(shape.down_format),
            first_part: 2,
            by_pair: 1,
            ..inner
        };
        product(shape.down_type, 1, down)?;
        let args = ExpertsWindowAddArgs { results: parts.floats, weights, residual, n_embd: shape.n_embd, n_used };
        self.kernel(Kernel("experts_window_add", None), [shape.n_embd.div_ceil(BLOCK).into(), n_rows.into(), 1], BLOCK, &args)
    }

    /// Queues [`Op::ExpertsPrompt`], as many pairs at once as the scratch holds.
    pub fn experts_prompt(self) -> Result<()> {
        let Op::ExpertsPrompt { experts, tile_rows, .. } = self.op else {
            unreachable!("called for this operation only");
        };
        for batch in batches(experts, *tile_rows) {
            self.experts_batch(&batch)?;
        }
        Ok(())
    }

    fn experts_batch(self, batch: &Batch) -> Result<()> {
        let Op::ExpertsPrompt { input, rows, row_weights, residual, ref shape, scratch, tile_rows, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        let n_pairs = u64::from(batch.n_pairs);
        let parts = Parts::of(scratch, shape, tile_rows.into());
        let product = |quant_type: QuantType, n_parts: u64, args: ExpertsPromptArgs| {
            let blocks = [args.n_out.div_ceil(TILE).into(), batch.n_tiles.into(), n_parts];
            self.kernel(Kernel("experts_prompt", Some(quant_type)), blocks, BLOCK, &args)
        };
        let part_floats = n_pairs * u64::from(shape.n_ff);
        let inner = ExpertsPromptArgs {
            input,
            rows,
            out: parts.floats,
            part_floats,
            row_bytes: 0,
            n_out: shape.n_ff,
            n_in: shape.n_embd,
            format: rows_number(shape.input_format),
            first_part: 0,
            by_pair: 0,
            n_pieces: batch.n_pieces,
            pieces: batch.pieces,
        };
        for (first_part, quant_type, n_parts) in inner_launches(shape) {
            let out = parts.part(first_part, part_floats);
            product(quant_type, n_parts, ExpertsPromptArgs { out, first_part, row_bytes: row_bytes(quant_type, shape.n_embd), ..inner })?;
        }
        self.activate(shape, parts, n_pairs)?;
        let down = ExpertsPromptArgs {
            input: parts.activated,
            row_bytes: row_bytes(shape.down_type, shape.n_ff),
            n_out: shape.n_embd,
            n_in: shape.n_ff,
            format: rows_number(shape.down_format),
            first_part: 2,
            by_pair: 1,
            ..inner
        };
        product(shape.down_type, 1, down)?;
        let (n_embd, n_pieces, pieces) = (shape.n_embd, batch.n_pieces, batch.pieces);
        let args = ExpertsPromptAddArgs { results: parts.floats, rows, row_weights, residual, n_embd, n_pieces, pieces };
        self.kernel(Kernel("experts_prompt_add", None), [n_embd.div_ceil(ADD_COLUMNS).into(), 1, 1], BLOCK, &args)
    }
}

/// Pairs that go through the kernels at once.
struct Batch {
    pieces: [ExpertPiece; PIECES_MAX],
    n_pieces: u32,
    n_pairs: u32,
    /// Blocks of rows, which no two pieces share.
    n_tiles: u32,
}

impl Batch {
    const EMPTY: Self = Self {
        pieces: [ExpertPiece { parts: [Addr(0); 3], first: 0, count: 0, first_pair: 0, first_tile: 0 }; PIECES_MAX],
        n_pieces: 0,
        n_pairs: 0,
        n_tiles: 0,
    };

    fn add(&mut self, expert: &PromptExpert, first: u32, count: u32) {
        let parts = [expert.weights.gate, expert.weights.up, expert.weights.down];
        self.pieces[self.n_pieces as usize] = ExpertPiece { parts, first, count, first_pair: self.n_pairs, first_tile: self.n_tiles };
        self.n_pieces += 1;
        self.n_pairs += count;
        self.n_tiles += count.div_ceil(TILE);
    }
}

/// Cuts the experts' rows, in order, into batches of at most `tile_rows` pairs.
fn batches(experts: &[PromptExpert], tile_rows: u32) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut batch = Batch::EMPTY;
    for expert in experts {
        let mut done = 0;
        while done < expert.count {
            if batch.n_pairs == tile_rows || batch.n_pieces as usize == PIECES_MAX {
                batches.push(std::mem::replace(&mut batch, Batch::EMPTY));
            }
            let count = (expert.count - done).min(tile_rows - batch.n_pairs);
            batch.add(expert, expert.first + done, count);
            done += count;
        }
    }
    if batch.n_pieces > 0 {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::op::ExpertAddrs;

    #[test]
    fn batches_hold_every_pair_once_in_order_and_no_more_than_the_scratch() {
        let weights = |number: u64| ExpertAddrs { gate: Addr(number), up: Addr(0), down: Addr(0) };
        let counts = (0..200_u32).map(|number| number % 7 * 40 % 150);
        let mut first = 5;
        let experts: Vec<PromptExpert> = counts
            .zip(0..)
            .map(|(count, number)| {
                let expert = PromptExpert { weights: weights(number), first, count };
                first += count;
                expert
            })
            .collect();
        let expected: Vec<(u64, u32)> =
            experts.iter().flat_map(|expert| (expert.first..expert.first + expert.count).map(|row| (expert.weights.gate.0, row))).collect();
        for tile_rows in [1, 3, 64, 100, 5000, u32::MAX] {
            let batches = batches(&experts, tile_rows);
            let mut pairs = Vec::new();
            for batch in &batches {
                assert!(batch.n_pairs <= tile_rows && batch.n_pieces > 0);
                let (mut n_pairs, mut n_tiles) = (0, 0);
                for piece in &batch.pieces[..batch.n_pieces as usize] {
                    assert_eq!((piece.first_pair, piece.first_tile), (n_pairs, n_tiles));
                    assert!(piece.count > 0);
                    n_pairs += piece.count;
                    n_tiles += piece.count.div_ceil(TILE);
                    pairs.extend((piece.first..piece.first + piece.count).map(|row| (piece.parts[0].0, row)));
                }
                assert_eq!((n_pairs, n_tiles), (batch.n_pairs, batch.n_tiles));
            }
            assert!(pairs == expected, "{tile_rows} pairs at once");
        }
        assert!(batches(&[], 4).is_empty());
    }
}
