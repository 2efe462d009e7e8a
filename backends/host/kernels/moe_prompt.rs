//! Experts of the prompt path: a group of experts, each with its list of tokens.
//!
//! Pairs of a token and an expert are taken in order, as many at once as the scratch holds; a tile may end inside an expert's
//! list. Within a tile each step is one parallel loop. Tokens of a list differ and lists ascend by expert, so adding a tile's
//! results in the order of its pairs gives every token its experts in ascending order, whatever the size of the tile.

use super::activations::{quantise_row, row_bytes};
use super::gemm::{Activations, Product, Tasks, TokenRows, Weights};
use super::moe::{ExpertInputs, ExpertShape, ExpertWeights, Scratch, add_share};
use super::shared_slice::SharedSlice;
use super::simd::SimdLevel;
use super::swiglu::swiglu;
use crate::backends::host::pool::ThreadPool;

/// One expert and the tokens it is applied to.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTokens<'a> {
    /// Its matrices.
    pub weights: ExpertWeights<'a>,
    /// Rows of the inputs and of the residual, all different.
    pub tokens: &'a [u32],
    /// Share of each token.
    pub shares: &'a [f32],
}

/// Pairs of a token and an expert that share their weights, at `first_pair` of a tile.
struct Piece<'a> {
    weights: ExpertWeights<'a>,
    tokens: &'a [u32],
    shares: &'a [f32],
    first_pair: usize,
}

/// Adds the experts' results to `residual[n_rows, n_embd]`, expert after expert in the order given (ascending numbers).
///
/// `scratch` holds [`scratch_bytes`](super::moe::scratch_bytes) for `tile_pairs` pairs; the tile changes no bit of the result.
///
/// # Panics
/// Where shapes do not match, a token is not a row, or the scratch is too small.
#[allow(clippy::too_many_arguments, reason = "inputs, result and the caller's memory are separate things")]
pub fn experts_prompt_group(
    pool: &ThreadPool,
    level: SimdLevel,
    shape: &ExpertShape,
    inputs: &ExpertInputs<'_>,
    experts: &[ExpertTokens<'_>],
    residual: &mut [f32],
    tile_pairs: usize,
    scratch: &mut [u8],
) {
    assert!(tile_pairs > 0, "a tile has at least one pair");
    let mut scratch = Scratch::cut(shape, tile_pairs, scratch);
    let mut tile = Vec::new();
    let mut n_pairs = 0;
    for expert in experts {
        assert_eq!(expert.tokens.len(), expert.shares.len(), "a share for each token");
        let (mut tokens, mut shares) = (expert.tokens, expert.shares);
        while !tokens.is_empty() {
            let count = tokens.len().min(tile_pairs - n_pairs);
            let (now, later) = tokens.split_at(count);
            let (shares_now, shares_later) = shares.split_at(count);
            tile.push(Piece { weights: expert.weights, tokens: now, shares: shares_now, first_pair: n_pairs });
            (tokens, shares) = (later, shares_later);
            n_pairs += count;
            if n_pairs == tile_pairs {
                compute_tile(pool, level, shape, inputs, &tile, residual, &mut scratch);
                tile.clear();
                n_pairs = 0;
            }
        }
    }
    if n_pairs > 0 {
        compute_tile(pool, level, shape, inputs, &tile, residual, &mut scratch);
    }
}

fn compute_tile(
    pool: &ThreadPool,
    level: SimdLevel,
    shape: &ExpertShape,
    inputs: &ExpertInputs<'_>,
    tile: &[Piece<'_>],
    residual: &mut [f32],
    scratch: &mut Scratch<'_>,
) {
    let n_pairs = tile.iter().map(|piece| piece.tokens.len()).sum::<usize>();
    let (n_ff, n_embd) = (shape.n_ff, shape.n_embd);
    let inner_bytes = row_bytes(shape.inner_format(), n_ff);
    let (gate, rest) = scratch.words.split_at_mut(n_pairs * n_ff);
    let up = &mut rest[..n_pairs * n_ff];
    let mut products = Vec::with_capacity(2 * tile.len());
    let (gate_out, up_out) = (SharedSlice::new(gate), SharedSlice::new(up));
    for piece in tile {
        let tokens = TokenRows::Indexed(piece.tokens);
        products.push(product(level, &shape.gate_weights(&piece.weights), &inputs.gate, tokens, gate_out, piece.first_pair));
        products.push(product(level, &shape.up_weights(&piece.weights), &inputs.up, tokens, up_out, piece.first_pair));
    }
    run_products(pool, &products);
    drop(products);

    let rows = SharedSlice::new(&mut *scratch.rows);
    pool.run(n_pairs, &|pair| {
        // SAFETY: each pair has its own rows and one task; the products have ended.
        let (gate, up) = unsafe { (gate_out.part(pair * n_ff, n_ff), up_out.part(pair * n_ff, n_ff)) };
        swiglu(level, gate, up);
        // SAFETY: as above.
        quantise_row(level, shape.inner_format(), gate, unsafe { rows.part(pair * inner_bytes, inner_bytes) });
    });

    let activated = &scratch.rows[..n_pairs * inner_bytes];
    let results = &mut scratch.words[..n_pairs * n_embd];
    let result_out = SharedSlice::new(&mut *results);
    let mut products = Vec::with_capacity(tile.len());
    for piece in tile {
        let count = piece.tokens.len();
        let bytes = &activated[piece.first_pair * inner_bytes..(piece.first_pair + count) * inner_bytes];
        let rows = Activations { format: shape.inner_format(), n: n_ff, bytes };
        let weights = shape.down_weights(&piece.weights);
        products.push(product(level, &weights, &rows, TokenRows::Contiguous(count), result_out, piece.first_pair));
    }
    run_products(pool, &products);
    drop(products);
    add_results(pool, n_embd, tile, results, residual);
}

/// A product whose result rows follow each other from row `first_pair` of `out` on.
fn product<'a>(
    level: SimdLevel,
    weights: &Weights<'a>,
    activations: &Activations<'a>,
    tokens: TokenRows<'a>,
    out: SharedSlice<'a, f32>,
    first_pair: usize,
) -> Product<'a> {
    let n_rows = weights.n_rows;
    // SAFETY: the rows of a piece belong to it alone, and `Product` hands them out to tasks of different elements.
    let own = unsafe { out.part(first_pair * n_rows, tokens.len() * n_rows) };
    Product::new(level, weights, activations, tokens, SharedSlice::new(own), n_rows)
}

/// Computes all products in one parallel loop, so that experts with few tokens keep every thread busy together.
fn run_products(pool: &ThreadPool, products: &[Product<'_>]) {
    let cuts: Vec<Tasks> = products.iter().map(|product| product.tasks(pool.n_threads())).collect();
    let places: Vec<(usize, usize)> =
        cuts.iter().enumerate().flat_map(|(product, cut)| (0..cut.count()).map(move |task| (product, task))).collect();
    pool.run(places.len(), &|place| {
        let (product, task) = places[place];
        let (rows, tokens) = cuts[product].part(task);
        // SAFETY: the results of different products, and the rectangles of one, do not overlap.
        unsafe { products[product].compute(rows, tokens) };
    });
}

/// Adds the tile's results pair after pair; a task owns some columns of all rows.
fn add_results(pool: &ThreadPool, n_embd: usize, tile: &[Piece<'_>], results: &[f32], residual: &mut [f32]) {
    let columns_per_task = n_embd.div_ceil(4 * pool.n_threads()).next_multiple_of(64);
    let residual = SharedSlice::new(residual);
    pool.run(n_embd.div_ceil(columns_per_task), &|task| {
        let first = task * columns_per_task;
        let count = columns_per_task.min(n_embd - first);
        for piece in tile {
            let rows = results[piece.first_pair * n_embd..].chunks_exact(n_embd);
            for ((token, share), row) in piece.tokens.iter().zip(piece.shares).zip(rows) {
                // SAFETY: the columns are this task's own, and one row is held at a time.
                let residual = unsafe { residual.part(*token as usize * n_embd + first, count) };
                add_share(residual, *share, &row[first..first + count]);
            }
        }
    });
}
