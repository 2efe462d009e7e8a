//! Products of a prompt's rows in 16-bit floats, on matrix units: weights are unpacked first, a stripe of a matrix or some experts at a time.

use super::args::{MatMulHalvesArgs, QuantiseHalvesArgs, UNPACKED_MAX, UnpackArgs};
use super::experts::row_bytes;
use super::kernels::Kernel;
use super::launch::{BLOCK, BLOCKS_MAX, Launch, count};
use crate::backend::op::{Matrix, unpacked_bytes};
use crate::backend::{Addr, AddrRange, Result};
use crate::quant::QuantType;
use crate::units::Bytes;

/// Outputs of a block, of whose lines of weights gate and up have half each.
pub const OUTPUTS: u32 = 128;
pub const GATED_OUTPUTS: u32 = OUTPUTS / 2;
/// Threads of a block that multiplies.
pub const PRODUCT_BLOCK: u32 = 128;
/// Numbers that a thread unpacks at a time.
const CHUNK: u32 = 8;
/// Blocks that keep a large card busy: with fewer, smaller tiles are faster.
const ENOUGH_BLOCKS: u32 = 128;

/// Rows of a block. Which it is changes no bit of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowTile {
    Rows32,
    Rows64,
    Rows128,
}

impl RowTile {
    /// Smallest first.
    const ALL: [Self; 3] = [Self::Rows32, Self::Rows64, Self::Rows128];

    pub const fn rows(self) -> u32 {
        match self {
            Self::Rows32 => 32,
            Self::Rows64 => 64,
            Self::Rows128 => 128,
        }
    }

    /// What a tile costs beside one of 128 rows, in rows: the weights that a block loads are the same for all.
    const fn cost(self) -> u32 {
        match self {
            Self::Rows32 => 56,
            Self::Rows64 => 76,
            Self::Rows128 => 128,
        }
    }

    /// For `n_rows` rows of one matrix with `n_out` outputs.
    fn for_matrix(n_rows: u32, n_out: u32) -> Self {
        let is_enough = |tile: &Self| n_rows.div_ceil(tile.rows()) * n_out.div_ceil(OUTPUTS) >= ENOUGH_BLOCKS;
        let largest = Self::ALL.into_iter().rev().find(is_enough).unwrap_or(Self::Rows32);
        Self::ALL.into_iter().find(|tile| tile.rows() >= n_rows.min(largest.rows())).unwrap_or(largest)
    }

    /// For experts with so many rows each: the tile that wastes least.
    pub fn for_experts(counts: impl Iterator<Item = u32> + Clone) -> Self {
        let cost = |tile: &Self| counts.clone().map(|count| u64::from(count.div_ceil(tile.rows())) * u64::from(tile.cost())).sum::<u64>();
        Self::ALL.into_iter().rev().min_by_key(cost).expect("there are three")
    }

    pub const fn gated_kernel(self) -> &'static str {
        match self {
            Self::Rows32 => "experts_gated_32",
            Self::Rows64 => "experts_gated_64",
            Self::Rows128 => "experts_gated_128",
        }
    }

    pub const fn experts_kernel(self) -> &'static str {
        match self {
            Self::Rows32 => "experts_halves_32",
            Self::Rows64 => "experts_halves_64",
            Self::Rows128 => "experts_halves_128",
        }
    }

    const fn matrix_kernel(self) -> &'static str {
        match self {
            Self::Rows32 => "mat_mul_halves_32",
            Self::Rows64 => "mat_mul_halves_64",
            Self::Rows128 => "mat_mul_halves_128",
        }
    }
}

/// A dense product in 16-bit floats.
#[derive(Clone, Copy)]
pub struct HalvesProduct {
    pub weights: Matrix,
    pub input: Addr,
    pub out: Addr,
    pub n_rows: u32,
    pub accumulate: bool,
    pub unpacked: AddrRange,
}

impl Launch<'_> {
    /// Queues the rounding of `n_rows` rows of f32 `x`.
    pub fn quantise_halves(self, x: Addr, out: Addr, n_rows: u32, n_cols: u32) -> Result<()> {
        self.kernel(Kernel("quantise_halves", None), [n_rows.into(), 1, 1], BLOCK, &QuantiseHalvesArgs { x, out, n_cols, unused: 0 })
    }

    /// Queues the unpacking of matrices of `rows` rows and `cols` columns, one behind the other from `out` on.
    pub fn unpack(self, quant_type: QuantType, sources: &[Addr], (rows, cols): (u32, u32), out: Addr) -> Result<()> {
        let blocks = count(&[rows, cols.div_ceil(CHUNK)]).div_ceil(BLOCK.into()).min(BLOCKS_MAX);
        let each = unpacked_bytes(rows, cols);
        for (part, sources) in sources.chunks(UNPACKED_MAX).enumerate() {
            let out = out.offset(each * (part * UNPACKED_MAX) as u64);
            let mut args =
                UnpackArgs { out, row_bytes: row_bytes(quant_type, cols), n_rows: rows, n_cols: cols, sources: [Addr(0); UNPACKED_MAX] };
            args.sources[..sources.len()].copy_from_slice(sources);
            self.kernel(Kernel("unpack", Some(quant_type)), [blocks, sources.len() as u64, 1], BLOCK, &args)?;
        }
        Ok(())
    }

    /// Queues a product, stripe by stripe of as many rows of weights as there is room to unpack.
    pub fn mat_mul_halves(self, product: HalvesProduct) -> Result<()> {
        let HalvesProduct { weights, input, out, n_rows, accumulate, unpacked } = product;
        let room = u32::try_from(unpacked.bytes.0 / unpacked_bytes(1, weights.cols).0).unwrap_or(u32::MAX);
        // Whole tiles, where there is room for one.
        let stripe = if room >= OUTPUTS { room / OUTPUTS * OUTPUTS } else { room };
        let packed_row = row_bytes(weights.quant_type, weights.cols);
        let mut first = 0;
        while first < weights.rows {
            let n_out = stripe.min(weights.rows - first);
            let source = weights.addr.offset(Bytes(packed_row * u64::from(first)));
            self.unpack(weights.quant_type, &[source], (n_out, weights.cols), unpacked.start)?;
            let tile = RowTile::for_matrix(n_rows, n_out);
            let args = MatMulHalvesArgs {
                input,
                weights: unpacked.start,
                out: out.offset(Bytes(4 * u64::from(first))),
                n_rows,
                n_out,
                n_in: weights.cols,
                out_stride: weights.rows,
                accumulate: accumulate.into(),
                unused: 0,
            };
            let blocks = [n_out.div_ceil(OUTPUTS).into(), n_rows.div_ceil(tile.rows()).into(), 1];
            self.kernel(Kernel(tile.matrix_kernel(), None), blocks, PRODUCT_BLOCK, &args)?;
            first += n_out;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_no_larger_than_its_rows_and_small_where_blocks_are_few() {
        for (n_rows, n_out, tile) in [
            (1, 4096, RowTile::Rows32),
            (33, 40_000, RowTile::Rows64),
            (8192, 4096, RowTile::Rows128),
            (1024, 4096, RowTile::Rows128),
            (1024, 512, RowTile::Rows32),
            (4096, 512, RowTile::Rows128),
        ] {
            assert_eq!(RowTile::for_matrix(n_rows, n_out), tile, "{n_rows} rows, {n_out} outputs");
        }
        for (counts, tile) in [(&[3, 20, 7][..], RowTile::Rows32), (&[64, 60], RowTile::Rows64), (&[512, 700], RowTile::Rows128)] {
            assert_eq!(RowTile::for_experts(counts.iter().copied()), tile, "{counts:?}");
        }
    }
}
