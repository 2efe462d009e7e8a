//! Attention: one kernel for a prompt, on matrix units where cache and head allow it; for a window one over stretches of the keys and one
//! that joins their partial results.

use super::args::AttentionArgs;
use super::kernels::Kernel;
use super::launch::{BLOCK, Launch, count};
use crate::backend::op::{KvFormat, Op, Path};
use crate::backend::{Addr, Result, WINDOW_ROWS_MAX};
use crate::units::Bytes;

/// The largest head: so many threads join its stretches.
pub const HEAD_DIM_MAX: u32 = 256;
/// Keys of the first stretches.
const KEY_TILE: u64 = 64;
/// Query heads of rows that a block has: for a prompt in f32, for one on matrix units, and for a window.
const PROMPT_QUERIES: u64 = 64;
const TILES_QUERIES: u64 = 128;
const WINDOW_QUERIES: u64 = 16;

/// The first key of a stretch, as `stretch_begin` in `kernels-cuda/attention.cuh`: sixteen up to 1,024 keys, sixteen more to every doubling.
fn stretch_begin(stretch: u32) -> u64 {
    if stretch < 16 { u64::from(stretch) * KEY_TILE } else { (u64::from(16 + stretch % 16) * KEY_TILE) << (stretch / 16 - 1) }
}

/// Stretches that cover a context.
fn n_stretches(n_ctx: u32) -> u32 {
    (1..).find(|&stretch| stretch_begin(stretch) >= u64::from(n_ctx)).expect("stretches double")
}

/// A kernel with the query heads of rows and the threads that its blocks have.
struct Form {
    name: &'static str,
    queries: u64,
    threads: u32,
}

/// The kernel for a path. Those on matrix units are for halves and bytes, some sizes of heads, and caches that can be copied in units of
/// sixteen bytes.
fn form(path: Path, format: KvFormat, head_dim: u32, caches: [Addr; 2]) -> Form {
    let fits = caches.iter().all(|cache| cache.0.is_multiple_of(16));
    let prompt = |name, threads| Form { name, queries: TILES_QUERIES, threads };
    let window = |name, queries| Form { name, queries, threads: 128 };
    match (path, format, head_dim) {
        (Path::Prompt, KvFormat::F16, 64) if fits => prompt("attention_tiles_f16_64", 128),
        (Path::Prompt, KvFormat::F16, 128) if fits => prompt("attention_tiles_f16_128", 128),
        (Path::Prompt, KvFormat::F16, 256) if fits => prompt("attention_tiles_f16_256", 256),
        (Path::Prompt, KvFormat::Q8_0, 64) if fits => prompt("attention_tiles_q8_0_64", 128),
        (Path::Prompt, KvFormat::Q8_0, 128) if fits => prompt("attention_tiles_q8_0_128", 128),
        (Path::Prompt, KvFormat::Q8_0, 256) if fits => prompt("attention_tiles_q8_0_256", 256),
        (Path::Window, KvFormat::F16, 64) if fits => window("attention_window_f16_64", WINDOW_QUERIES),
        (Path::Window, KvFormat::F16, 128) if fits => window("attention_window_f16_128", WINDOW_QUERIES),
        (Path::Window, KvFormat::F16, 256) if fits => window("attention_window_f16_256", WINDOW_QUERIES),
        (Path::Window, KvFormat::Q8_0, 64) if fits => window("attention_window_q8_0_64", 2 * WINDOW_QUERIES),
        (Path::Window, KvFormat::Q8_0, 128) if fits => window("attention_window_q8_0_128", 2 * WINDOW_QUERIES),
        (Path::Window, KvFormat::Q8_0, 256) if fits => window("attention_window_q8_0_256", WINDOW_QUERIES),
        (Path::Prompt, KvFormat::F32, _) => Form { name: "attention_prompt_f32", queries: PROMPT_QUERIES, threads: BLOCK },
        (Path::Prompt, KvFormat::F16, _) => Form { name: "attention_prompt_f16", queries: PROMPT_QUERIES, threads: BLOCK },
        (Path::Prompt, KvFormat::Q8_0, _) => Form { name: "attention_prompt_q8_0", queries: PROMPT_QUERIES, threads: BLOCK },
        (Path::Window, KvFormat::F32, _) => Form { name: "attention_window_f32", queries: WINDOW_QUERIES, threads: BLOCK },
        (Path::Window, KvFormat::F16, _) => Form { name: "attention_window_f16", queries: WINDOW_QUERIES, threads: BLOCK },
        (Path::Window, KvFormat::Q8_0, _) => Form { name: "attention_window_q8_0", queries: WINDOW_QUERIES, threads: BLOCK },
    }
}

impl Launch<'_> {
    /// Queues [`Op::Attention`].
    pub fn attention(self) -> Result<()> {
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
        } = *self.op
        else {
            unreachable!("called for this operation only");
        };
        if head_dim > HEAD_DIM_MAX {
            return Err(self.unsupported(format!("with heads of {head_dim}, at most {HEAD_DIM_MAX}")));
        }
        let mut args = AttentionArgs {
            q,
            k_cache,
            v_cache,
            positions,
            first_row,
            out,
            partial: Addr(0),
            head_bytes: format.row_bytes(head_dim as usize) as u64,
            n_rows,
            n_head,
            n_head_kv,
            head_dim,
            n_ctx,
            n_stretches: n_stretches(n_ctx),
            scale,
            unused: 0,
        };
        let n_queries = count(&[n_rows, n_head / n_head_kv]);
        let form = form(path, format, head_dim, [k_cache, v_cache]);
        let (kernel, groups) = (Kernel(form.name, None), n_queries.div_ceil(form.queries));
        match path {
            Path::Prompt => self.kernel(kernel, [groups, n_head_kv.into(), 1], form.threads, &args),
            Path::Window => {
                // For a full window whatever this one's rows, so that one model takes one piece of memory.
                let records = count(&[WINDOW_ROWS_MAX, n_head, args.n_stretches]);
                args.partial = self.scratch.get(self.stream, Bytes(4 * records * u64::from(head_dim + 2)))?;
                self.kernel(kernel, [args.n_stretches.into(), n_head_kv.into(), groups], form.threads, &args)?;
                self.kernel(Kernel("attention_window_join", None), [count(&[n_rows, n_head]), 1, 1], HEAD_DIM_MAX, &args)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_cover_a_context_and_none_is_empty() {
        for (n_ctx, stretches) in [(1, 1), (64, 1), (65, 2), (1024, 16), (1025, 17), (2048, 32), (32_768, 96), (131_072, 128)] {
            assert_eq!(n_stretches(n_ctx), stretches, "{n_ctx} keys");
        }
        assert!((0..500).all(|stretch| stretch_begin(stretch) < stretch_begin(stretch + 1)));
    }
}
