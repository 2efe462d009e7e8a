//! The key/value cache of one layer: how a head's numbers are stored, written and read back.
//!
//! Keys and values are two byte arrays of the same layout, `[n_ctx][n_head_kv][head]`; a head is `head_size` numbers as f32,
//! f16 or GGUF Q8_0 blocks (f16 scale, 32 int8). The place of a number depends on its position alone, never on the batch.

use super::codes::{f16_at, f16_to_f32};
use super::shared_slice::SharedSlice;
use super::vector::{LANES, Vector16};
use crate::backends::host::pool::ThreadPool;

/// How cached numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names are those of the formats")]
pub enum KvType {
    /// Plain f32.
    F32,
    /// Half floats.
    F16,
    /// GGUF Q8_0 blocks of 32 numbers in 34 bytes.
    Q8_0,
}

/// Numbers and bytes of a Q8_0 block.
const BLOCK_LEN: usize = 32;
const BLOCK_BYTES: usize = 34;

/// Shape of one layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// How numbers are stored.
    pub kv_type: KvType,
    /// Key/value heads.
    pub n_head_kv: usize,
    /// Numbers of a head; a multiple of 32 for Q8_0.
    pub head_size: usize,
}

impl KvShape {
    /// Bytes of one head at one position.
    ///
    /// # Panics
    /// Where the head is no whole number of blocks.
    #[must_use]
    pub fn head_bytes(&self) -> usize {
        match self.kv_type {
            KvType::F32 => 4 * self.head_size,
            KvType::F16 => 2 * self.head_size,
            KvType::Q8_0 => {
                assert!(self.head_size.is_multiple_of(BLOCK_LEN), "heads of {} cannot be stored as Q8_0", self.head_size);
                self.head_size / BLOCK_LEN * BLOCK_BYTES
            }
        }
    }

    /// Bytes of all heads at one position; the keys of `n_ctx` positions take `n_ctx` times as many.
    #[must_use]
    pub fn position_bytes(&self) -> usize {
        self.n_head_kv * self.head_bytes()
    }

    /// The bytes of one head at one position.
    #[inline]
    pub(super) fn head<'a>(&self, cache: &'a [u8], position: usize, head: usize) -> &'a [u8] {
        let head_bytes = self.head_bytes();
        let start = (position * self.n_head_kv + head) * head_bytes;
        &cache[start..start + head_bytes]
    }
}

/// Writes rows `[n_rows, n_head_kv, head_size]` to the cache at their positions (all different).
///
/// # Panics
/// Where lengths do not match, a position is negative or occurs twice in a row, or lies beyond the cache.
pub fn store_rows(pool: &ThreadPool, shape: &KvShape, rows: &[f32], positions: &[i32], cache: &mut [u8]) {
    let (row_len, row_bytes) = (shape.n_head_kv * shape.head_size, shape.position_bytes());
    assert_eq!(rows.len(), positions.len() * row_len, "a row for each position");
    assert!(positions.is_sorted_by(|left, right| left < right), "positions ascend");
    let cache = SharedSlice::new(cache);
    pool.run(positions.len(), &|row| {
        let position = usize::try_from(positions[row]).expect("positions are not negative");
        // SAFETY: positions ascend, so each place in the cache has one task.
        let out = unsafe { cache.part(position * row_bytes, row_bytes) };
        let heads = rows[row * row_len..(row + 1) * row_len].chunks_exact(shape.head_size);
        for (head, out) in heads.zip(out.chunks_exact_mut(shape.head_bytes())) {
            store_head(shape.kv_type, head, out);
        }
    });
}

fn store_head(kv_type: KvType, head: &[f32], out: &mut [u8]) {
    match kv_type {
        KvType::F32 => head.iter().zip(out.chunks_exact_mut(4)).for_each(|(value, out)| out.copy_from_slice(&value.to_le_bytes())),
        KvType::F16 => {
            for (value, out) in head.iter().zip(out.chunks_exact_mut(2)) {
                out.copy_from_slice(&half::f16::from_f32(*value).to_le_bytes());
            }
        }
        KvType::Q8_0 => {
            for (values, out) in head.chunks_exact(BLOCK_LEN).zip(out.chunks_exact_mut(BLOCK_BYTES)) {
                let scale = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs())) / 127.0;
                let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
                out[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                for (value, out) in values.iter().zip(&mut out[2..]) {
                    *out = ((value * inverse).round() as i8).cast_unsigned();
                }
            }
        }
    }
}

/// Reads one head back as f32.
///
/// # Safety
/// The instructions of `V` are there.
#[inline(always)]
pub(super) unsafe fn load_head<V: Vector16>(kv_type: KvType, bytes: &[u8], out: &mut [f32]) {
    match kv_type {
        KvType::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            out.iter_mut().zip(words).for_each(|(out, bytes)| *out = f32::from_le_bytes(*bytes));
        }
        KvType::F16 => {
            let (out_vectors, out_rest) = out.as_chunks_mut::<LANES>();
            let (vectors, _) = bytes.as_chunks::<{ 2 * LANES }>();
            for (out, halves) in out_vectors.iter_mut().zip(vectors) {
                // SAFETY: 16 halves are read and 16 f32 written; the caller promises the instructions.
                unsafe { V::load_halves(halves.as_ptr()).store(out.as_mut_ptr()) };
            }
            let rest = bytes[2 * LANES * vectors.len().min(out_vectors.len())..].as_chunks::<2>().0;
            out_rest.iter_mut().zip(rest).for_each(|(out, bytes)| *out = f16_to_f32(u16::from_le_bytes(*bytes)));
        }
        KvType::Q8_0 => {
            let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
            for (block, out) in blocks.iter().zip(out.as_chunks_mut::<BLOCK_LEN>().0) {
                let scale = f16_at(block, 0);
                for half in [0, LANES] {
                    // SAFETY: 16 of 32 bytes are read and 16 of 32 f32 written; the caller promises the instructions.
                    unsafe {
                        let quants = V::load_bytes(block[2 + half..2 + half + LANES].as_ptr());
                        quants.multiply_add(V::splat(scale), V::splat(0.0)).store(out[half..half + LANES].as_mut_ptr());
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::host::kernels::test_data::Numbers;
    use crate::backends::host::kernels::vector::Portable;

    #[test]
    fn stored_heads_come_back_within_the_precision_of_their_type() {
        for (kv_type, tolerance) in [(KvType::F32, 0.0), (KvType::F16, 5e-4), (KvType::Q8_0, 5e-3)] {
            let shape = KvShape { kv_type, n_head_kv: 2, head_size: 96 };
            let rows = Numbers::seeded(61).floats(3 * 192, 1.0);
            let mut cache = vec![0xee; 10 * shape.position_bytes()];
            store_rows(&ThreadPool::new(2).expect("threads"), &shape, &rows, &[2, 3, 9], &mut cache);
            for (row, position) in [2, 3, 9].into_iter().enumerate() {
                for head in 0..2 {
                    let mut out = vec![0.0; 96];
                    let bytes = shape.head(&cache, position, head);
                    // SAFETY: portable code needs no instructions.
                    unsafe { load_head::<Portable>(kv_type, bytes, &mut out) };
                    for (value, expected) in out.iter().zip(&rows[row * 192 + head * 96..]) {
                        assert!((value - expected).abs() <= tolerance * 1.6, "{kv_type:?}: {value} for {expected}");
                    }
                }
            }
            assert!(cache[..2 * shape.position_bytes()].iter().all(|byte| *byte == 0xee), "other positions stay");
        }
    }
}
