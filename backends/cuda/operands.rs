//! Which ranges an operation reads and writes, in one list, and their check before anything is queued.
//!
//! The device checks addresses late, by a fault that loses it. What memory holds (positions, numbers of experts, the expert table) is known
//! to the device alone.

use super::live::{Access, LiveRanges};
use crate::backend::op::{ExpertAddrs, ExpertShape, Matrix, Op, expert_scratch_bytes};
use crate::backend::{Addr, AddrRange, BackendError, Result};
use crate::quant::{ActivationFormat, QuantType};
use crate::units::Bytes;

/// One operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where it lies.
    pub range: AddrRange,
    /// What is done with it.
    pub access: Access,
    /// What its address must be a multiple of.
    pub align: u64,
}

/// Bytes of a product of sizes; a product that overflows becomes a length that no allocation has.
fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

fn operand(addr: Addr, bytes: u64, access: Access, align: u64) -> Operand {
    Operand { range: AddrRange { start: addr, bytes: Bytes(bytes) }, access, align }
}

/// `n` numbers of 32 bits that are read, their count as factors.
fn read(addr: Addr, n: &[u64]) -> Operand {
    operand(addr, product(n).saturating_mul(4), Access::Read, 4)
}

/// As [`read`], for what is written or changed in place.
fn write(addr: Addr, n: &[u64]) -> Operand {
    operand(addr, product(n).saturating_mul(4), Access::Write, 4)
}

/// Weights of a type, in words of 32 bits as kernels read them: GGUF aligns tensors to more, and experts are whole numbers of words.
fn weights(addr: Addr, quant_type: QuantType, n: u64) -> Operand {
    operand(addr, quant_type.bytes_for(n).unwrap_or(u64::MAX), Access::Read, 4)
}

/// Rows of activations.
fn rows(addr: Addr, format: ActivationFormat, n_rows: u32, n_cols: u32, access: Access) -> Operand {
    // Halves are copied in sixteens of bytes.
    let align = if format == ActivationFormat::F16 { 16 } else { 4 };
    operand(addr, product(&[n_rows.into(), format.row_bytes(n_cols as usize) as u64]), access, align)
}

/// Room for unpacked weights, where there is any.
fn room(unpacked: AddrRange) -> Option<Operand> {
    (unpacked.bytes > Bytes::ZERO).then(|| operand(unpacked.start, unpacked.bytes.0, Access::Write, 16))
}

/// The three matrices of an expert.
fn expert(addrs: &ExpertAddrs, shape: &ExpertShape) -> [Operand; 3] {
    let n = u64::from(shape.n_embd) * u64::from(shape.n_ff);
    [(addrs.gate, shape.gate_type), (addrs.up, shape.up_type), (addrs.down, shape.down_type)]
        .map(|(addr, quant_type)| weights(addr, quant_type, n))
}

/// All operands of an operation whose shapes [`Op::check`] has passed. Experts that a table names are not among them.
pub fn operands(op: &Op) -> Vec<Operand> {
    // Sizes are multiplied in 64 bits.
    macro_rules! wide {
        ($($size:ident),+) => { let ($($size,)+) = ($(u64::from($size),)+); };
    }
    match *op {
        Op::RmsNorm { x, weight, out, n_rows, n_cols, .. } => {
            wide!(n_rows, n_cols);
            vec![read(x, &[n_rows, n_cols]), read(weight, &[n_cols]), write(out, &[n_rows, n_cols])]
        }
        Op::Quantise { x, out, n_rows, n_cols, format } => {
            vec![read(x, &[n_rows.into(), n_cols.into()]), rows(out, format, n_rows, n_cols, Access::Write)]
        }
        Op::NormQuantise { x, weight, out, ref quantised, n_rows, n_cols, .. } => {
            let stored = quantised.iter().map(|&(to, format)| rows(to, format, n_rows, n_cols, Access::Write));
            wide!(n_rows, n_cols);
            let floats = [read(x, &[n_rows, n_cols]), read(weight, &[n_cols]), write(out, &[n_rows, n_cols])];
            floats.into_iter().chain(stored).collect()
        }
        Op::WindowProducts { ref products, input, format, n_rows } => {
            let of_product = |&(matrix, out): &(Matrix, Addr)| {
                let (n_out, n_in) = (u64::from(matrix.rows), u64::from(matrix.cols));
                [weights(matrix.addr, matrix.quant_type, n_out * n_in), write(out, &[n_rows.into(), n_out])]
            };
            let widest = products.iter().map(|(matrix, _)| matrix.cols).max().unwrap_or(0);
            let input = rows(input, format, n_rows, widest, Access::Read);
            [input].into_iter().chain(products.iter().flat_map(of_product)).collect()
        }
        Op::MatMul { weights: matrix, input, format, out, n_rows, unpacked, .. } => {
            let (n_out, n_in) = (u64::from(matrix.rows), u64::from(matrix.cols));
            vec![
                weights(matrix.addr, matrix.quant_type, n_out * n_in),
                rows(input, format, n_rows, matrix.cols, Access::Read),
                write(out, &[n_rows.into(), n_out]),
            ]
            .into_iter()
            .chain(room(unpacked))
            .collect()
        }
        Op::HeadNormRope { x, weight, positions, n_rows, n_head, head_dim, .. } => {
            wide!(n_rows, n_head, head_dim);
            vec![write(x, &[n_rows, n_head, head_dim]), read(weight, &[head_dim]), read(positions, &[n_rows])]
        }
        Op::KvStore { rows, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx } => {
            let cache_bytes = product(&[n_ctx.into(), n_head_kv.into(), format.row_bytes(head_dim as usize) as u64]);
            wide!(n_rows, n_head_kv, head_dim);
            vec![
                read(rows, &[n_rows, n_head_kv, head_dim]),
                operand(cache, cache_bytes, Access::Write, 4),
                read(positions, &[n_rows]),
                read(first_row, &[1]),
            ]
        }
        Op::StoreHeads {
            q,
            k,
            v,
            q_weight,
            k_weight,
            rope_positions,
            k_cache,
            v_cache,
            format,
            positions,
            first_row,
            n_rows,
            n_head,
            n_head_kv,
            head_dim,
            n_ctx,
            ..
        } => {
            let cache_bytes = product(&[n_ctx.into(), n_head_kv.into(), format.row_bytes(head_dim as usize) as u64]);
            wide!(n_rows, n_head, n_head_kv, head_dim);
            vec![
                write(q, &[n_rows, n_head, head_dim]),
                write(k, &[n_rows, n_head_kv, head_dim]),
                read(v, &[n_rows, n_head_kv, head_dim]),
                read(q_weight, &[head_dim]),
                read(k_weight, &[head_dim]),
                read(rope_positions, &[n_rows]),
                operand(k_cache, cache_bytes, Access::Write, 4),
                operand(v_cache, cache_bytes, Access::Write, 4),
                read(positions, &[n_rows]),
                read(first_row, &[1]),
            ]
        }
        Op::Attention { q, k_cache, v_cache, format, positions, first_row, out, n_rows, n_head, n_head_kv, head_dim, n_ctx, .. } => {
            let cache_bytes = product(&[n_ctx.into(), n_head_kv.into(), format.row_bytes(head_dim as usize) as u64]);
            wide!(n_rows, n_head, head_dim);
            vec![
                read(q, &[n_rows, n_head, head_dim]),
                operand(k_cache, cache_bytes, Access::Read, 4),
                operand(v_cache, cache_bytes, Access::Read, 4),
                read(positions, &[n_rows]),
                read(first_row, &[1]),
                write(out, &[n_rows, n_head, head_dim]),
            ]
        }
        Op::Router { logits, ids, weights, n_rows, n_expert, n_used, .. } => {
            wide!(n_rows, n_expert, n_used);
            vec![read(logits, &[n_rows, n_expert]), write(ids, &[n_rows, n_used]), write(weights, &[n_rows, n_used])]
        }
        Op::SortRoutes { ids, weights, counts, rows, row_weights, entries, n_rows, n_expert, n_used } => {
            wide!(n_rows, n_expert, n_used);
            let n = [n_rows, n_used];
            vec![read(ids, &n), read(weights, &n), write(counts, &[n_expert]), write(rows, &n), write(row_weights, &n), write(entries, &n)]
        }
        Op::ExpertsWindow { input, ids, weights, table, residual, n_rows, n_expert, n_used, ref shape, scratch } => {
            let pairs = u64::from(n_rows) * u64::from(n_used);
            vec![
                rows(input, shape.input_format, n_rows, shape.n_embd, Access::Read),
                read(ids, &[pairs]),
                read(weights, &[pairs]),
                operand(table, product(&[n_expert.into(), ExpertAddrs::BYTES as u64]), Access::Read, 8),
                write(residual, &[n_rows.into(), shape.n_embd.into()]),
                operand(scratch, expert_scratch_bytes(shape, pairs), Access::Write, 4),
            ]
        }
        Op::ExpertsPrompt {
            ref experts,
            input,
            n_input_rows,
            rows: list,
            row_weights,
            entries,
            n_used,
            residual,
            ref shape,
            scratch,
            tile_rows,
            unpacked,
        } => {
            // The stretch of the row lists that these experts' rows lie in.
            let first = experts.iter().map(|expert| u64::from(expert.first)).min().unwrap_or(0);
            let end = experts.iter().map(|expert| u64::from(expert.first) + u64::from(expert.count)).max().unwrap_or(0);
            let entry = |list: Addr| read(list.offset(Bytes(4 * first)), &[end - first]);
            let mut all = vec![
                rows(input, shape.input_format, n_input_rows, shape.n_embd, Access::Read),
                entry(list),
                entry(row_weights),
                read(entries, &[n_input_rows.into(), n_used.into()]),
                write(residual, &[n_input_rows.into(), shape.n_embd.into()]),
                operand(scratch, expert_scratch_bytes(shape, tile_rows.into()), Access::Write, 4),
            ];
            all.extend(room(unpacked));
            all.extend(experts.iter().flat_map(|part| expert(&part.weights, shape)));
            all
        }
        Op::SplitGates { joined, values, gates, n_rows, n_head, head_dim } => {
            wide!(n_rows, n_head, head_dim);
            let n = [n_rows, n_head, head_dim];
            vec![read(joined, &[2, n_rows, n_head, head_dim]), write(values, &n), write(gates, &n)]
        }
        Op::JoinRows { left, right, out, n_rows, n_cols } => {
            wide!(n_rows, n_cols);
            vec![read(left, &[n_rows, n_cols]), read(right, &[n_rows, n_cols]), write(out, &[2, n_rows, n_cols])]
        }
        Op::SigmoidGate { x: changed, gates: other, n_rows, n_cols } | Op::SwiGlu { gate: changed, up: other, n_rows, n_cols } => {
            wide!(n_rows, n_cols);
            vec![write(changed, &[n_rows, n_cols]), read(other, &[n_rows, n_cols])]
        }
        Op::SwiGluQuantise { gate, up, out, n_rows, n_cols, format } => {
            let stored = rows(out, format, n_rows, n_cols, Access::Write);
            wide!(n_rows, n_cols);
            vec![write(gate, &[n_rows, n_cols]), read(up, &[n_rows, n_cols]), stored]
        }
        Op::AddGated { sum, x, gate, n_rows, n_cols } => {
            wide!(n_rows, n_cols);
            vec![write(sum, &[n_rows, n_cols]), read(x, &[n_rows, n_cols]), read(gate, &[n_rows])]
        }
        Op::GatedHeadNorm { x, weight, gates, n_rows, n_head, head_dim, .. } => {
            wide!(n_rows, n_head, head_dim);
            vec![write(x, &[n_rows, n_head, head_dim]), read(weight, &[head_dim]), read(gates, &[n_rows, n_head, head_dim])]
        }
        Op::DeltaConv { x, history, taps, out, n_rows, shape, .. } => {
            let n = [n_rows.into(), shape.n_channels().into()];
            let taps = read(taps, &[shape.n_channels().into(), shape.n_taps.into()]);
            vec![read(x, &n), operand(history, shape.history_bytes(), Access::Read, 4), taps, write(out, &n)]
        }
        Op::DeltaHistory { x, history, n_rows, shape } => {
            let history = operand(history, shape.history_bytes(), Access::Write, 4);
            vec![read(x, &[n_rows.into(), shape.n_channels().into()]), history]
        }
        Op::DeltaGates { beta, decay, dt_bias, a, n_rows, n_head } => {
            wide!(n_rows, n_head);
            vec![write(beta, &[n_rows, n_head]), write(decay, &[n_rows, n_head]), read(dt_bias, &[n_head]), read(a, &[n_head])]
        }
        Op::DeltaPrompt { qkv, beta, decay, state, open, out, n_rows, shape, .. } => vec![
            read(qkv, &[n_rows.into(), shape.n_channels().into()]),
            read(beta, &[n_rows.into(), shape.n_head_v.into()]),
            read(decay, &[n_rows.into(), shape.n_head_v.into()]),
            operand(state, shape.state_bytes(), Access::Write, 4),
            operand(open, shape.open_bytes(), Access::Write, 4),
            write(out, &[n_rows.into(), shape.value_width().into()]),
        ],
        Op::DeltaWindow { qkv, beta, decay, state, out, n_rows, shape } => vec![
            read(qkv, &[n_rows.into(), shape.n_channels().into()]),
            read(beta, &[n_rows.into(), shape.n_head_v.into()]),
            read(decay, &[n_rows.into(), shape.n_head_v.into()]),
            operand(state, shape.state_bytes(), Access::Read, 4),
            write(out, &[n_rows.into(), shape.value_width().into()]),
        ],
        Op::DeltaCommit { qkv, beta, decay, state, n_rows, shape } => vec![
            read(qkv, &[n_rows.into(), shape.n_channels().into()]),
            read(beta, &[n_rows.into(), shape.n_head_v.into()]),
            read(decay, &[n_rows.into(), shape.n_head_v.into()]),
            operand(state, shape.state_bytes(), Access::Write, 4),
        ],
    }
}

/// Refuses operands that are not live, not aligned, or written and used twice.
///
/// # Errors
/// [`BackendError::BadAddress`], [`BackendError::Overlap`], [`BackendError::BadOperand`].
pub fn check(op: &Op, live: &LiveRanges) -> Result<()> {
    let all = operands(op);
    for (at, operand) in all.iter().enumerate() {
        live.check(op.name(), operand.range, operand.access)?;
        if !operand.range.start.0.is_multiple_of(operand.align) {
            let reason = format!("an operand at {} is not aligned to {} bytes", operand.range.start, operand.align);
            return Err(BackendError::BadOperand { op: op.name(), reason });
        }
        let written = |other: &&Operand| operand.access == Access::Write || other.access == Access::Write;
        if all[..at].iter().filter(written).any(|other| other.range.overlaps(operand.range)) {
            return Err(BackendError::Overlap { what: op.name(), addr: operand.range.start });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn norm(x: u64, weight: u64, out: u64) -> Op {
        Op::RmsNorm { x: Addr(x), weight: Addr(weight), out: Addr(out), n_rows: 2, n_cols: 8, eps: 0.0 }
    }

    #[test]
    fn operands_are_live_aligned_and_written_alone() {
        let mut live = LiveRanges::default();
        live.enter(AddrRange { start: Addr(1024), bytes: Bytes(256) }, Access::Write);
        live.enter(AddrRange { start: Addr(4096), bytes: Bytes(256) }, Access::Read);
        for right in [norm(1024, 1088, 1120), norm(4096, 4096, 1024), norm(1024, 1040, 1088)] {
            assert_eq!(check(&right, &live), Ok(()), "{right:?}");
        }
        for (wrong, addr) in [(norm(1024, 1088, 1100), 1100), (norm(1024, 1088, 1024), 1024), (norm(4096, 4096, 4160), 4160)] {
            assert_eq!(check(&wrong, &live), Err(BackendError::Overlap { what: "rms_norm", addr: Addr(addr) }), "{wrong:?}");
        }
        for dead in [norm(0, 1024, 1088), norm(1024, 1088, 1220), norm(u64::MAX, 1024, 1088)] {
            assert!(matches!(check(&dead, &live), Err(BackendError::BadAddress { what: "rms_norm", .. })), "{dead:?}");
        }
        assert!(matches!(check(&norm(1026, 1100, 1136), &live), Err(BackendError::BadOperand { .. })));
    }
}
