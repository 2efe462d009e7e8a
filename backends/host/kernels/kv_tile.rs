//! Some positions of one key/value head as f32, laid out for outer products.

use super::kv::{KvShape, load_head};
use super::vector::{LANES, Vector16};

/// Positions of a tile.
pub(super) const KEY_TILE: usize = 64;

/// Buffers that a thread keeps from tile to tile.
#[derive(Default)]
pub(super) struct KvTile {
    /// `[16][padded head]`: keys on their way into `keys`.
    heads: Vec<f32>,
    /// `[padded head][KEY_TILE]`: keys, turned so that a vector holds one number of 16 keys.
    keys: Vec<f32>,
    /// `[KEY_TILE][padded head]`.
    values: Vec<f32>,
}

/// Numbers of a head with what fills its last vector.
pub(super) fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(LANES)
}

impl KvTile {
    /// Makes room for heads of a size, with zeros behind each head's last number.
    pub(super) fn fit(&mut self, head_size: usize) {
        let padded = padded(head_size);
        for (buffer, rows) in [(&mut self.heads, LANES), (&mut self.keys, KEY_TILE), (&mut self.values, KEY_TILE)] {
            buffer.resize(rows * padded, 0.0);
            if padded > head_size {
                buffer.fill(0.0);
            }
        }
    }

    /// The turned keys: `head_size` rows of [`KEY_TILE`]. Columns from the count of the last [`load`](Self::load) on mean nothing.
    pub(super) fn keys(&self) -> *const f32 {
        self.keys.as_ptr()
    }

    /// The values: a row of [`padded`] numbers for each position loaded.
    pub(super) fn values(&self) -> *const f32 {
        self.values.as_ptr()
    }

    /// Turns the keys and values of at most [`KEY_TILE`] positions from `first` on to f32; [`fit`](Self::fit) was called before.
    ///
    /// # Safety
    /// The instructions of `V` are there.
    #[inline(always)]
    pub(super) unsafe fn load<V: Vector16>(
        &mut self,
        shape: &KvShape,
        (keys, values): (&[u8], &[u8]),
        head_kv: usize,
        first: usize,
        count: usize,
    ) {
        let (head_size, padded) = (shape.head_size, padded(shape.head_size));
        assert!(count <= KEY_TILE && self.keys.len() >= padded * KEY_TILE, "{count} positions of heads of {head_size} fit");
        for key in 0..count {
            let out = &mut self.values[key * padded..][..head_size];
            // SAFETY: passed on from the caller.
            unsafe { load_head::<V>(shape.kv_type, shape.head(values, first + key, head_kv), out) };
        }
        for begin in (0..count).step_by(LANES) {
            for key in begin..count.min(begin + LANES) {
                let out = &mut self.heads[(key - begin) * padded..][..head_size];
                // SAFETY: passed on from the caller.
                unsafe { load_head::<V>(shape.kv_type, shape.head(keys, first + key, head_kv), out) };
            }
            let heads = self.heads.as_ptr().cast::<u32>();
            let columns = self.keys[begin..].as_mut_ptr().cast::<u32>();
            for number in (0..padded).step_by(LANES) {
                // SAFETY: 16 heads of `padded` numbers and `padded` columns of 64 keys are there; `begin` is at most 48.
                unsafe {
                    let rows = std::array::from_fn(|key| heads.add(key * padded + number));
                    V::transpose(rows, columns.add(number * KEY_TILE), KEY_TILE);
                }
            }
        }
    }
}
