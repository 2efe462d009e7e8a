//! The experts of a prompt: rows by expert, as many pairs of a row and an expert at once as the scratch holds.
//!
//! Rows in 16-bit floats go through matrix units: weights of some experts are unpacked, gate and up multiplied and activated, then down.
//! Other rows meet weights as they are. Either way the results are added row by row, in ascending order of experts.

use super::args::{ExpertPiece, ExpertsAddArgs, ExpertsHalvesArgs, ExpertsPromptArgs, HALVES_PIECES_MAX, HalvesPiece, PIECES_MAX};
use super::experts::{Parts, inner_launches, row_bytes};
use super::halves::{GATED_OUTPUTS, OUTPUTS, PRODUCT_BLOCK, RowTile};
use super::kernels::Kernel;
use super::launch::{BLOCK, Launch, TILE, rows_number};
use crate::backend::op::{ExpertAddrs, ExpertShape, Op, PromptExpert, unpacked_bytes, unpacked_expert_bytes};
use crate::backend::{Addr, AddrRange, Result};
use crate::quant::{ActivationFormat, QuantType};

/// Rows of a block that adds results to the residual.
const ADD_ROWS: u32 = 8;

/// The operands of [`Op::ExpertsPrompt`] beside its experts.
#[derive(Clone, Copy)]
struct Operands<'a> {
    input: Addr,
    rows: Addr,
    shape: &'a ExpertShape,
    parts: Parts,
    unpacked: AddrRange,
}

impl Launch<'_> {
    /// Queues [`Op::ExpertsPrompt`].
    pub fn experts_prompt(self) -> Result<()> {
        let Op::ExpertsPrompt { ref experts, input, rows, ref shape, scratch, tile_rows, unpacked, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        let operands = Operands { input, rows, shape, parts: Parts::of(scratch, shape, tile_rows.into()), unpacked };
        if shape.input_format == ActivationFormat::F16 {
            let room = usize::try_from(unpacked.bytes.0 / unpacked_expert_bytes(shape).0).unwrap_or(usize::MAX);
            for batch in batches(experts, tile_rows, room.min(HALVES_PIECES_MAX)) {
                self.halves_batch(operands, &batch)?;
                self.add_results(operands, &batch)?;
            }
        } else {
            for batch in batches(experts, tile_rows, PIECES_MAX) {
                self.packed_batch(operands, &batch)?;
                self.add_results(operands, &batch)?;
            }
        }
        Ok(())
    }

    /// Gate, up, activation and down of a batch whose weights are unpacked first.
    fn halves_batch(self, operands: Operands<'_>, batch: &Batch) -> Result<()> {
        let Operands { input, rows, shape, parts, unpacked } = operands;
        let counts = || batch.pieces.iter().map(|piece| piece.count);
        let tile = RowTile::for_experts(counts());
        let (pieces, n_tiles) = batch.halves_pieces(tile);
        let n_pieces = u32::try_from(batch.pieces.len()).expect("bounded by the arguments");
        let weights = |part: fn(&ExpertAddrs) -> Addr| batch.pieces.iter().map(|piece| part(&piece.weights)).collect::<Vec<_>>();
        let (gates, ups) = (weights(|expert| expert.gate), weights(|expert| expert.up));
        let of_gates = unpacked_bytes(shape.n_ff, shape.n_embd) * batch.pieces.len() as u64;
        self.unpack(shape.gate_type, &gates, (shape.n_ff, shape.n_embd), unpacked.start)?;
        self.unpack(shape.up_type, &ups, (shape.n_ff, shape.n_embd), unpacked.start.offset(of_gates))?;
        let gated = ExpertsHalvesArgs {
            input,
            rows,
            weights: unpacked.start,
            out: parts.floats,
            n_out: shape.n_ff,
            n_in: shape.n_embd,
            n_pieces,
            unused: 0,
            pieces,
        };
        let blocks = |n_out: u32, of_tile: u32| [n_out.div_ceil(of_tile).into(), n_tiles.into(), 1];
        self.kernel(Kernel(tile.gated_kernel(), None), blocks(shape.n_ff, GATED_OUTPUTS), PRODUCT_BLOCK, &gated)?;
        self.quantise_halves(parts.floats, parts.activated, batch.n_pairs, shape.n_ff)?;
        let downs = weights(|expert| expert.down);
        self.unpack(shape.down_type, &downs, (shape.n_embd, shape.n_ff), unpacked.start)?;
        let down = ExpertsHalvesArgs { input: parts.activated, rows: Addr(0), n_out: shape.n_embd, n_in: shape.n_ff, ..gated };
        self.kernel(Kernel(tile.experts_kernel(), None), blocks(shape.n_embd, OUTPUTS), PRODUCT_BLOCK, &down)
    }

    /// Gate, up, activation and down of a batch whose weights are multiplied as they are.
    fn packed_batch(self, operands: Operands<'_>, batch: &Batch) -> Result<()> {
        let Operands { input, rows, shape, parts, .. } = operands;
        let n_pairs = u64::from(batch.n_pairs);
        let (pieces, n_tiles) = batch.packed_pieces();
        let product = |quant_type: QuantType, n_parts: u64, args: ExpertsPromptArgs| {
            let blocks = [args.n_out.div_ceil(TILE).into(), n_tiles.into(), n_parts];
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
            n_pieces: u32::try_from(batch.pieces.len()).expect("bounded by the arguments"),
            pieces,
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
        product(shape.down_type, 1, down)
    }

    /// Adds the results of a batch to the residual.
    fn add_results(self, operands: Operands<'_>, batch: &Batch) -> Result<()> {
        let Op::ExpertsPrompt { row_weights, entries, n_used, residual, n_input_rows, .. } = *self.op else {
            unreachable!("called for this operation only");
        };
        let args = ExpertsAddArgs {
            results: operands.parts.floats,
            entries,
            row_weights,
            residual,
            n_rows: n_input_rows,
            n_used,
            n_embd: operands.shape.n_embd,
            first_entry: batch.first_entry(),
            end_entry: batch.first_entry() + batch.n_pairs,
            unused: 0,
        };
        self.kernel(Kernel("experts_add", None), [n_input_rows.div_ceil(ADD_ROWS).into(), 1, 1], BLOCK, &args)
    }
}

/// Pairs of one expert.
struct Piece {
    weights: ExpertAddrs,
    /// Entry of the row lists.
    first: u32,
    count: u32,
    /// Row of activated rows and results.
    first_pair: u32,
}

/// Pairs that go through the kernels at once.
#[derive(Default)]
struct Batch {
    pieces: Vec<Piece>,
    n_pairs: u32,
}

impl Batch {
    fn add(&mut self, expert: &PromptExpert, first: u32, count: u32) {
        self.pieces.push(Piece { weights: expert.weights, first, count, first_pair: self.n_pairs });
        self.n_pairs += count;
    }

    /// The entry of its first pair; the others follow.
    fn first_entry(&self) -> u32 {
        self.pieces.first().map_or(0, |piece| piece.first)
    }

    /// The pieces as kernels take them, and the blocks of `rows` rows that they have in all: no two pieces share one.
    fn tiled<P: Copy, const MAX: usize>(&self, rows: u32, none: P, piece_of: impl Fn(&Piece, u32) -> P) -> ([P; MAX], u32) {
        let (mut pieces, mut n_tiles) = ([none; MAX], 0);
        for (slot, piece) in pieces.iter_mut().zip(&self.pieces) {
            *slot = piece_of(piece, n_tiles);
            n_tiles += piece.count.div_ceil(rows);
        }
        (pieces, n_tiles)
    }

    fn packed_pieces(&self) -> ([ExpertPiece; PIECES_MAX], u32) {
        let none = ExpertPiece { parts: [Addr(0); 3], first: 0, count: 0, first_pair: 0, first_tile: 0 };
        self.tiled(TILE, none, |piece, first_tile| {
            let &Piece { weights: ExpertAddrs { gate, up, down }, first, count, first_pair } = piece;
            ExpertPiece { parts: [gate, up, down], first, count, first_pair, first_tile }
        })
    }

    fn halves_pieces(&self, tile: RowTile) -> ([HalvesPiece; HALVES_PIECES_MAX], u32) {
        let none = HalvesPiece { first: 0, count: 0, first_pair: 0, first_tile: 0 };
        self.tiled(tile.rows(), none, |piece, first_tile| {
            let &Piece { first, count, first_pair, .. } = piece;
            HalvesPiece { first, count, first_pair, first_tile }
        })
    }
}

/// Cuts the experts' rows, in order, into batches of at most `tile_rows` pairs and `pieces_max` pieces.
fn batches(experts: &[PromptExpert], tile_rows: u32, pieces_max: usize) -> Vec<Batch> {
    let mut batches = Vec::new();
    let mut batch = Batch::default();
    for expert in experts {
        let mut done = 0;
        while done < expert.count {
            if batch.n_pairs == tile_rows || batch.pieces.len() == pieces_max {
                batches.push(std::mem::take(&mut batch));
            }
            let count = (expert.count - done).min(tile_rows - batch.n_pairs);
            batch.add(expert, expert.first + done, count);
            done += count;
        }
    }
    if !batch.pieces.is_empty() {
        batches.push(batch);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let batches = batches(&experts, tile_rows, 9);
            let mut pairs = Vec::new();
            for batch in &batches {
                assert!(batch.n_pairs <= tile_rows && (1..=9).contains(&batch.pieces.len()));
                assert_eq!(batch.first_entry(), 5 + u32::try_from(pairs.len()).expect("few"), "entries follow one another");
                let (mut n_pairs, mut n_tiles) = (0, 0);
                let (pieces, all_tiles) = batch.packed_pieces();
                for piece in &pieces[..batch.pieces.len()] {
                    assert_eq!((piece.first_pair, piece.first_tile), (n_pairs, n_tiles));
                    assert!(piece.count > 0);
                    n_pairs += piece.count;
                    n_tiles += piece.count.div_ceil(TILE);
                    pairs.extend((piece.first..piece.first + piece.count).map(|row| (piece.parts[0].0, row)));
                }
                assert_eq!((n_pairs, n_tiles), (batch.n_pairs, all_tiles));
            }
            assert!(pairs == expected, "{tile_rows} pairs at once");
        }
        assert!(batches(&[], 4, 4).is_empty());
    }
}
