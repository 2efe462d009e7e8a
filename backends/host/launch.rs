//! Runs operations: resolves their operands and calls the kernel.

use std::cell::RefCell;

use super::clock::Cost;
use super::dry::{self, DryRun, Positions};
use super::kernels::activations::quantise_rows;
use super::kernels::attention::{AttentionInputs, attention};
use super::kernels::attention_window::attention_window;
use super::kernels::gemm::{Activations, TokenRows, Weights, gemm};
use super::kernels::halves;
use super::kernels::kv::{KvShape, KvType, store_rows};
use super::kernels::matvec::{WINDOW_ROWS, matvec};
use super::kernels::norm::rms_norm;
use super::kernels::rope::{HeadNorm, Rope, norm_and_rotate};
use super::kernels::router::{Route, choose_experts};
use super::kernels::routes::{Routes, SortedRoutes, sort_routes};
use super::kernels::simd::SimdLevel;
use super::memory::MemoryTable;
use super::operands::Operands;
use super::pool::ThreadPool;
use crate::backend::op::{KvFormat, Matrix, Op, Path};
use crate::backend::{Addr, Result, WINDOW_ROWS_MAX};
use crate::quant::ActivationFormat;

// A window that passes the check of shapes is one that the kernels take.
const _: () = assert!(WINDOW_ROWS_MAX as usize == WINDOW_ROWS);

/// Threads, instruction set and scratch for running operations.
pub struct Launcher {
    pub(super) pool: ThreadPool,
    pub(super) level: SimdLevel,
    /// Products that are added to their output; kept to spare an allocation a product.
    product: RefCell<Vec<f32>>,
    /// Draws routes where this is a dry run: operands are looked up and time is charged, but no kernel runs.
    dry: Option<RefCell<dry::Router>>,
}

fn kv_type(format: KvFormat) -> KvType {
    match format {
        KvFormat::F32 => KvType::F32,
        KvFormat::F16 => KvType::F16,
        KvFormat::Q8_0 => KvType::Q8_0,
    }
}

impl Launcher {
    /// A launcher on `pool` with kernels of `level`.
    pub fn new(pool: ThreadPool, level: SimdLevel, dry: Option<DryRun>) -> Self {
        Self { pool, level, product: RefCell::new(Vec::new()), dry: dry.map(|run| RefCell::new(dry::Router::new(run))) }
    }

    /// True where kernels run.
    pub(super) fn computes(&self) -> bool {
        self.dry.is_none()
    }

    /// Runs one operation, whose shapes [`Op::check`] has passed, and says what it asked of the device.
    pub fn run(&self, op: &Op, memory: &mut MemoryTable) -> Result<Cost> {
        if let Some(parts) = op.parts() {
            // This device takes them one after another, and its clock charges each.
            let mut costs = parts.iter().map(|part| self.run(part, memory));
            let first = costs.next().expect("an operation that joins steps has some")?;
            return costs.try_fold(first, |sum, cost| Ok(sum + cost?));
        }
        let operands = Operands::new(op.name(), memory);
        match *op {
            Op::RmsNorm { x, weight, out, n_rows, n_cols, eps } => {
                let n = n_rows as usize * n_cols as usize;
                let (x, weight, out) = (operands.read(x, n)?, operands.read(weight, n_cols as usize)?, operands.write(out, n)?);
                if self.computes() {
                    rms_norm(&self.pool, self.level, x, weight, eps, out);
                }
                Ok(bytes_cost(8 * n))
            }
            Op::NormQuantise { .. } | Op::WindowProducts { .. } | Op::StoreHeads { .. } | Op::SwiGluQuantise { .. } => {
                unreachable!("run part by part")
            }
            Op::Quantise { x, out, n_rows, n_cols, format } => {
                let (n_rows, n_cols) = (n_rows as usize, n_cols as usize);
                let out = operands.write::<u8>(out, n_rows * format.row_bytes(n_cols))?;
                let cost = bytes_cost(4 * n_rows * n_cols + out.len());
                let x = operands.read(x, n_rows * n_cols)?;
                if self.computes() {
                    quantise_rows(&self.pool, self.level, format, n_cols, x, out);
                }
                Ok(cost)
            }
            Op::MatMul { weights, input, format, out, n_rows, path, accumulate, unpacked } => {
                operands.unpacked(format, unpacked)?;
                self.mat_mul(&operands, weights, (input, format), out, n_rows as usize, path, accumulate)
            }
            Op::HeadNormRope { x, weight, positions, n_rows, n_head, head_dim, n_rot, freq_base, eps } => {
                let (n_rows, head_size) = (n_rows as usize, head_dim as usize);
                let n = n_rows * n_head as usize * head_size;
                let rope = Rope { head_size, n_rotated: n_rot as usize, freq_base: f64::from(freq_base) };
                let norm = HeadNorm { weight: operands.read(weight, head_size)?, epsilon: eps };
                let positions = operands.ascending_positions(positions, n_rows)?;
                let x = operands.write(x, n)?;
                if self.computes() {
                    norm_and_rotate(&self.pool, self.level, rope, Some(norm), x, positions);
                }
                Ok(bytes_cost(8 * n))
            }
            Op::KvStore { rows, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx } => {
                let shape = KvShape { kv_type: kv_type(format), n_head_kv: n_head_kv as usize, head_size: head_dim as usize };
                let (positions, first_row) = operands.positions(positions, first_row, n_rows as usize, n_ctx)?;
                let rows = operands.read(rows, positions.len() * shape.n_head_kv * shape.head_size)?;
                let cache = operands.write::<u8>(cache, n_ctx as usize * shape.position_bytes())?;
                if self.computes() {
                    store_rows(&self.pool, &shape, rows, positions, &mut cache[first_row * shape.position_bytes()..]);
                }
                Ok(bytes_cost(4 * rows.len() + positions.len() * shape.position_bytes()))
            }
            Op::Attention { .. } => self.attention(&operands, op),
            Op::Router { .. } => self.router(&operands, op),
            Op::SortRoutes { ids, weights, counts, rows, row_weights, entries, n_rows, n_expert, n_used } => {
                let n = n_rows as usize * n_used as usize;
                let routes =
                    Routes { ids: operands.indices(ids, n, n_expert)?, weights: operands.read(weights, n)?, n_used: n_used as usize };
                let mut sorted = SortedRoutes {
                    counts: operands.write(counts, n_expert as usize)?,
                    rows: operands.write(rows, n)?,
                    weights: operands.write(row_weights, n)?,
                    entries: operands.write(entries, n)?,
                };
                sort_routes(&routes, &mut sorted);
                Ok(bytes_cost(20 * n + 4 * n_expert as usize))
            }
            Op::ExpertsWindow { .. } => self.experts_window(&operands, op),
            Op::ExpertsPrompt { .. } => self.experts_prompt(&operands, op),
            Op::SplitGates { .. }
            | Op::JoinRows { .. }
            | Op::SigmoidGate { .. }
            | Op::SwiGlu { .. }
            | Op::AddGated { .. }
            | Op::GatedHeadNorm { .. } => self.gates(&operands, op),
            Op::DeltaConv { .. }
            | Op::DeltaHistory { .. }
            | Op::DeltaGates { .. }
            | Op::DeltaPrompt { .. }
            | Op::DeltaWindow { .. }
            | Op::DeltaCommit { .. } => self.delta(&operands, op),
        }
    }

    /// Takes note, in a dry run, that the rows in work are those of a prompt from `position` on.
    pub(super) fn note_prompt(&self, position: u32, n_rows: u32) {
        if let Some(router) = &self.dry {
            router.borrow_mut().note_positions(Positions::From(position), n_rows);
        }
    }

    fn router(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::Router { logits: logits_addr, ids, weights, n_rows, n_expert, n_used, scale } = *op else {
            unreachable!("called for this operation only");
        };
        let (rows, experts, used) = (n_rows as usize, n_expert as usize, n_used as usize);
        let logits = operands.read::<f32>(logits_addr, rows * experts)?;
        let ids = operands.write::<u32>(ids, rows * used)?;
        let weights = operands.write::<f32>(weights, rows * used)?;
        if let Some(router) = &self.dry {
            let mut router = router.borrow_mut();
            let layer_key = router.layer_key(logits_addr);
            let (listed, first) = match router.positions(n_rows) {
                Some(Positions::Listed(at)) => (operands.read::<i32>(at, rows).ok(), 0),
                Some(Positions::From(first)) => (None, first),
                None => (None, 0),
            };
            // Where no position is known, or the list is gone, a row's number has to do.
            let in_a_row = u64::from(first)..u64::from(first) + u64::from(n_rows);
            match listed {
                Some(listed) => {
                    let positions = listed.iter().map(|position| u64::from(position.unsigned_abs()));
                    router.route(layer_key, positions, n_expert, n_used, ids);
                }
                None => router.route(layer_key, in_a_row, n_expert, n_used, ids),
            }
            weights.fill(scale / n_used as f32);
        } else {
            let mut routes = vec![Route { expert: 0, weight: 0.0 }; used];
            for (row, logits) in logits.chunks_exact(experts).enumerate() {
                choose_experts(logits, scale, &mut routes);
                for (at, route) in (row * used..).zip(&routes) {
                    (ids[at], weights[at]) = (route.expert, route.weight);
                }
            }
        }
        Ok(bytes_cost(4 * rows * (experts + 2 * used)))
    }

    #[allow(clippy::too_many_arguments, reason = "the operands of the operation, by name")]
    fn mat_mul(
        &self,
        operands: &Operands<'_>,
        matrix: Matrix,
        (input, format): (Addr, ActivationFormat),
        out: Addr,
        n_rows: usize,
        path: Path,
        accumulate: bool,
    ) -> Result<Cost> {
        let (n_out, n_in) = (matrix.rows as usize, matrix.cols as usize);
        let bytes = operands.read::<u8>(matrix.addr, n_out * matrix.row_bytes())?;
        let weights = Weights::dense(matrix.quant_type, bytes, n_out, n_in);
        let activations = Activations { format, n: n_in, bytes: operands.read(input, n_rows * format.row_bytes(n_in))? };
        let out_addr = out;
        let out = operands.write::<f32>(out, n_rows * n_out)?;
        if let Some(router) = &self.dry {
            router.borrow_mut().note_product(out_addr, matrix.addr);
        } else if accumulate {
            let mut product = self.product.borrow_mut();
            product.resize(out.len(), 0.0);
            self.product(&weights, &activations, n_rows, path, &mut product);
            for (sum, term) in out.iter_mut().zip(&*product) {
                *sum += term;
            }
        } else {
            self.product(&weights, &activations, n_rows, path, out);
        }
        let moved = bytes.len() + activations.bytes.len() + 4 * n_rows * n_out;
        Ok(Cost { linear_flop: 2.0 * n_rows as f64 * n_out as f64 * n_in as f64, ..bytes_cost(moved) })
    }

    fn product(&self, weights: &Weights<'_>, activations: &Activations<'_>, n_rows: usize, path: Path, out: &mut [f32]) {
        match path {
            Path::Prompt if activations.format == ActivationFormat::F16 => {
                let rows = halves::decode_rows(activations);
                halves::product(&self.pool, self.level, weights, &rows, TokenRows::Contiguous(n_rows), out);
            }
            Path::Prompt => gemm(&self.pool, self.level, weights, activations, TokenRows::Contiguous(n_rows), out, weights.n_rows),
            Path::Window => matvec(&self.pool, self.level, weights, activations, n_rows, out),
        }
    }

    fn attention(&self, operands: &Operands<'_>, op: &Op) -> Result<Cost> {
        let Op::Attention {
            q,
            k_cache,
            v_cache,
            format,
            positions,
            first_row,
            out,
            n_rows,
            n_head,
            n_head_kv,
            head_dim,
            n_ctx,
            scale,
            path,
        } = *op
        else {
            unreachable!("called for attention only");
        };
        let shape = KvShape { kv_type: kv_type(format), n_head_kv: n_head_kv as usize, head_size: head_dim as usize };
        if let Some(router) = &self.dry {
            router.borrow_mut().note_positions(Positions::Listed(positions), n_rows);
        }
        let (positions, first_row) = operands.positions(positions, first_row, n_rows as usize, n_ctx)?;
        let n = positions.len() * n_head as usize * head_dim as usize;
        let cache_bytes = n_ctx as usize * shape.position_bytes();
        let inputs = AttentionInputs {
            shape,
            n_head: n_head as usize,
            scale,
            queries: operands.read(q, n)?,
            keys: &operands.read(k_cache, cache_bytes)?[first_row * shape.position_bytes()..],
            values: &operands.read(v_cache, cache_bytes)?[first_row * shape.position_bytes()..],
            positions,
        };
        let run = match path {
            Path::Prompt => attention,
            Path::Window => attention_window,
        };
        let out = operands.write(out, n)?;
        if self.computes() {
            run(&self.pool, self.level, &inputs, out);
        }
        let keys_seen: f64 = positions.iter().map(|&position| f64::from(position) + 1.0).sum();
        let read = positions.last().map_or(0, |&last| 2 * (last as usize + 1) * shape.position_bytes());
        Ok(Cost { attention_flop: 4.0 * keys_seen * f64::from(n_head) * f64::from(head_dim), ..bytes_cost(read + 8 * n) })
    }
}

/// The cost of moving `bytes` of device memory.
#[allow(clippy::cast_precision_loss, reason = "a model of time")]
pub(super) fn bytes_cost(bytes: usize) -> Cost {
    Cost { device_bytes: bytes as f64, ..Cost::default() }
}
