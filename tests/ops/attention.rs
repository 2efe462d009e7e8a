//! Attention over stored rows, in both forms and all cache formats.

use ebbtide::backend::Backend;
use ebbtide::backend::op::{KvFormat, Op, Path};

use crate::device::{Rig, start};
use crate::numbers::Numbers;
use crate::{F32_TOLERANCE, assert_close, dot, wide};

/// Error of rows kept in a cache of a format.
fn cache_tolerance(format: KvFormat) -> f64 {
    match format {
        KvFormat::F32 => F32_TOLERANCE,
        KvFormat::F16 => 1e-6,
        KvFormat::Q8_0 => 2e-4,
    }
}

/// Query heads, key heads and size of a head.
type Heads = (u32, u32, u32);

/// A cache of keys and values on the device, and the numbers that were stored.
struct Cache<B: Backend> {
    heads: Heads,
    format: KvFormat,
    n_ctx: u32,
    keys: Vec<f32>,
    values: Vec<f32>,
    caches: [B::Buffer; 2],
    first_row: B::Buffer,
}

impl<B: Backend> Cache<B> {
    /// Stores the rows of positions 0 and on; what lies behind the last is fresh memory: touching it would show.
    fn new(rig: &Rig<B>, heads: Heads, format: KvFormat, n_ctx: u32, first_row: i32, [keys, values]: [Vec<f32>; 2]) -> Self {
        let (_, n_head_kv, head_dim) = heads;
        let n_rows = u32::try_from(keys.len()).expect("few") / (n_head_kv * head_dim);
        let first_row = rig.upload_i32(&[first_row]);
        let all = rig.upload_i32(&(0..n_rows.cast_signed()).collect::<Vec<i32>>());
        let caches = [&keys, &values].map(|rows| {
            let (rows, cache) = (rig.upload_f32(rows), rig.buffer((n_ctx * n_head_kv) as usize * format.row_bytes(head_dim as usize)));
            let (rows_at, cache_at, positions, first_row) = (start(&rows), start(&cache), start(&all), start(&first_row));
            rig.run(&Op::KvStore { rows: rows_at, cache: cache_at, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx })
                .expect("runs");
            cache
        });
        Self { heads, format, n_ctx, keys, values, caches, first_row }
    }

    fn attend(&self, rig: &Rig<B>, queries: &[f32], positions: &[i32], scale: f32, path: Path) -> Vec<f32> {
        let (n_head, n_head_kv, head_dim) = self.heads;
        let (q, out, positions_at) = (rig.upload_f32(queries), rig.buffer(4 * queries.len()), rig.upload_i32(positions));
        let op = Op::Attention {
            q: start(&q),
            k_cache: start(&self.caches[0]),
            v_cache: start(&self.caches[1]),
            format: self.format,
            positions: start(&positions_at),
            first_row: start(&self.first_row),
            out: start(&out),
            n_rows: u32::try_from(positions.len()).expect("few"),
            n_head,
            n_head_kv,
            head_dim,
            n_ctx: self.n_ctx,
            scale,
            path,
        };
        rig.run(&op).expect("runs");
        rig.download_f32(&out)
    }

    /// The same by the rule as it is written, from what was stored.
    fn expected(&self, queries: &[f32], positions: &[i32], scale: f32) -> Vec<f64> {
        let (n_head, n_head_kv, head_dim) = self.heads;
        let (n_head, head_dim, kv_row) = (n_head as usize, head_dim as usize, (n_head_kv * head_dim) as usize);
        let mut expected = Vec::new();
        for (head, query) in wide(queries).chunks(head_dim).enumerate() {
            let n_seen = usize::try_from(positions[head / n_head]).expect("not negative") + 1;
            let kv_head = head % n_head / (n_head / n_head_kv as usize);
            let of = |rows: &[f32], row: usize| wide(&rows[row * kv_row + kv_head * head_dim..][..head_dim]);
            let scores: Vec<f64> = (0..n_seen).map(|row| (dot(query, &of(&self.keys, row)) * f64::from(scale)).exp()).collect();
            let total: f64 = scores.iter().sum();
            let mut sum = vec![0.0; head_dim];
            for (row, score) in scores.iter().enumerate() {
                sum.iter_mut().zip(of(&self.values, row)).for_each(|(sum, value)| *sum += score / total * value);
            }
            expected.extend(sum);
        }
        expected
    }
}

/// Keys and values of some rows.
fn rows(numbers: &mut Numbers, (_, n_head_kv, head_dim): Heads, n_rows: u32) -> [Vec<f32>; 2] {
    [0, 1].map(|_| numbers.floats((n_rows * n_head_kv * head_dim) as usize, 1.0))
}

pub fn attention_sees_the_stored_rows_up_to_its_own_position<B: Backend>(rig: &Rig<B>) {
    // A head size that no kernel is made for, and those of real models, with one and more query heads on a key head.
    for (heads, scale) in [((6, 2, 32), 0.3), ((4, 2, 64), 0.2), ((3, 1, 128), 0.15), ((2, 2, 256), 0.1), ((8, 1, 128), -0.15)] {
        let (n_head, _, head_dim) = heads;
        let mut numbers = Numbers::seeded(9);
        let stored = rows(&mut numbers, heads, 75);
        for (format, first_row) in [(KvFormat::F32, 0), (KvFormat::F16, 0), (KvFormat::Q8_0, 0), (KvFormat::F16, 25), (KvFormat::Q8_0, 13)]
        {
            let cache = Cache::new(rig, heads, format, 100, first_row, stored.clone());
            let cases = [vec![0], vec![74], vec![3, 4, 40, 64, 74]];
            for (positions, path) in cases.iter().flat_map(|positions| [Path::Prompt, Path::Window].map(|path| (positions, path))) {
                let queries = numbers.floats(positions.len() * (n_head * head_dim) as usize, 2.0);
                let actual = cache.attend(rig, &queries, positions, scale, path);
                let expected = cache.expected(&queries, positions, scale);
                let what = format!("{heads:?} {format:?} from row {first_row} at {positions:?}, {path:?}");
                assert_close(&what, &actual, &expected, cache_tolerance(format));
            }
        }
    }
}

pub fn a_row_does_not_meet_values_behind_its_position<B: Backend>(rig: &Rig<B>) {
    for (heads, format) in
        [(2, 2, 64), (4, 1, 128), (1, 1, 48)].into_iter().flat_map(|heads| [(heads, KvFormat::F32), (heads, KvFormat::F16)])
    {
        let (n_head, n_head_kv, head_dim) = heads;
        let mut numbers = Numbers::seeded(12);
        let [keys, mut values] = rows(&mut numbers, heads, 75);
        // The last row alone sees its own values, beside which a share of zero would not be nothing.
        let n_before = values.len() - (n_head_kv * head_dim) as usize;
        values[n_before..].fill(f32::NAN);
        let cache = Cache::new(rig, heads, format, 80, 0, [keys, values]);
        let row_len = (n_head * head_dim) as usize;
        let queries = numbers.floats(3 * row_len, 1.0);
        for path in [Path::Prompt, Path::Window] {
            let results = cache.attend(rig, &queries, &[5, 73, 74], 0.2, path);
            let (before, last) = results.split_at(2 * row_len);
            assert!(before.iter().all(|value| value.is_finite()), "{heads:?} {format:?} {path:?}: a value behind the row was met");
            assert!(last.iter().all(|value| value.is_nan()), "{heads:?} {format:?} {path:?}: the row itself was not seen");
            let alone = cache.attend(rig, &queries[row_len..2 * row_len], &[73], 0.2, path);
            assert!(alone == before[row_len..], "{heads:?} {format:?} {path:?}: the row depends on what it does not see");
        }
    }
}

pub fn an_attended_row_does_not_depend_on_the_rows_beside_it<B: Backend>(rig: &Rig<B>) {
    const N_ROWS: u32 = 100;
    for heads in [(2, 1, 32), (6, 2, 64), (8, 1, 128), (2, 1, 256)] {
        let row_len = (heads.0 * heads.2) as usize;
        for format in [KvFormat::F16, KvFormat::Q8_0] {
            let mut numbers = Numbers::seeded(14);
            let stored = rows(&mut numbers, heads, N_ROWS);
            let cache = Cache::new(rig, heads, format, N_ROWS, 0, stored);
            let positions: Vec<i32> = (N_ROWS.cast_signed() - 40..N_ROWS.cast_signed()).collect();
            let queries = numbers.floats(positions.len() * row_len, 2.0);
            let together = cache.attend(rig, &queries, &positions, 0.15, Path::Prompt);
            for size in [1, 7, 23] {
                for (rows, (queries, together)) in
                    positions.chunks(size).zip(queries.chunks(size * row_len).zip(together.chunks(size * row_len)))
                {
                    // A call of each kind is enough.
                    if size > 1 || rows[0] % 16 == 5 {
                        let cut = cache.attend(rig, queries, rows, 0.15, Path::Prompt);
                        assert!(cut == together, "{heads:?} {format:?}: rows {rows:?} in a call of their own");
                    }
                }
            }
            let (positions, queries) = (&positions[30..38], &queries[30 * row_len..38 * row_len]);
            let together = cache.attend(rig, queries, positions, 0.15, Path::Window);
            for (first, end) in [(0, 1), (1, 3), (0, 4), (3, 8), (5, 6), (7, 8)] {
                let part = first * row_len..end * row_len;
                let cut = cache.attend(rig, &queries[part.clone()], &positions[first..end], 0.15, Path::Window);
                assert!(cut == together[part], "{heads:?} {format:?}: rows {first} to {end} of a window in one of their own");
            }
        }
    }
}
