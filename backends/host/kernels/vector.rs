//! Sixteen f32 as one value: a loop written over it becomes AVX-512, AVX2 or portable code with the same bits.
//!
//! Every operation is one rounding per lane, so the levels cannot differ. Kernels that use it are `#[inline(always)]` and are
//! instantiated inside functions compiled for the level.

use super::codes::f16_to_f32;

/// Lanes of a value.
pub(super) const LANES: usize = 16;

/// Sixteen f32.
pub(super) trait Vector16: Copy {
    /// Vectors side by side in the inner loop of an outer product: with four rows they fill the registers.
    const SIDE_BY_SIDE: usize;

    /// # Safety
    /// The instructions of the implementing type are there.
    unsafe fn splat(value: f32) -> Self;
    /// # Safety
    /// As `splat`; 16 f32 are readable at `from`, on any address.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// As `splat`; 16 half floats are readable at `from`, on any address.
    unsafe fn load_halves(from: *const u8) -> Self;
    /// # Safety
    /// As `splat`; 16 signed bytes are readable at `from`.
    unsafe fn load_bytes(from: *const u8) -> Self;
    /// # Safety
    /// As `splat`; 16 f32 are writable at `to`, on any address.
    unsafe fn store(self, to: *mut f32);
    /// `self * factor + term`, rounded once.
    ///
    /// # Safety
    /// As `splat`.
    unsafe fn multiply_add(self, factor: Self, term: Self) -> Self;
    /// Turns 16 rows of 16 words (of any meaning, no bit changes) into columns: line c of `to` gets word c of every row.
    ///
    /// # Safety
    /// As `splat`; 16 words are readable at each row and writable at each of 16 lines `stride` words apart.
    unsafe fn transpose(rows: [*const u32; LANES], to: *mut u32, stride: usize);
}

/// Portable form.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; LANES]);

impl Vector16 for Portable {
    const SIDE_BY_SIDE: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let halves = unsafe { from.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        Self(halves.map(|bytes| f16_to_f32(u16::from_le_bytes(bytes))))
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self {
        // SAFETY: the caller's promise.
        let bytes = unsafe { from.cast::<[i8; LANES]>().read_unaligned() };
        Self(bytes.map(f32::from))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    unsafe fn multiply_add(self, factor: Self, term: Self) -> Self {
        Self(std::array::from_fn(|lane| self.0[lane].mul_add(factor.0[lane], term.0[lane])))
    }

    #[inline(always)]
    unsafe fn transpose(rows: [*const u32; LANES], to: *mut u32, stride: usize) {
        for column in 0..LANES {
            for (lane, row) in rows.iter().enumerate() {
                // SAFETY: the caller's promise on rows and lines.
                unsafe { to.add(column * stride + lane).write_unaligned(row.add(column).read_unaligned()) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, Vector16};

    /// Two vectors of 8.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256, __m256);

    impl Vector16 for Avx2 {
        const SIDE_BY_SIDE: usize = 1;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: AVX2 is there by the caller's promise.
            unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above, and 16 f32 are readable.
            unsafe { Self(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
        }

        #[inline(always)]
        unsafe fn load_halves(from: *const u8) -> Self {
            // SAFETY: F16C is part of the level, and 32 bytes are readable.
            unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())), _mm256_cvtph_ps(_mm_loadu_si128(from.add(16).cast()))) }
        }

        #[inline(always)]
        unsafe fn load_bytes(from: *const u8) -> Self {
            // SAFETY: as above, and 16 bytes are readable.
            unsafe {
                let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
                let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
                Self(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
            }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above, and 16 f32 are writable.
            unsafe {
                _mm256_storeu_ps(to, self.0);
                _mm256_storeu_ps(to.add(8), self.1);
            }
        }

        #[inline(always)]
        unsafe fn multiply_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: FMA is part of the level.
            unsafe { Self(_mm256_fmadd_ps(self.0, factor.0, term.0), _mm256_fmadd_ps(self.1, factor.1, term.1)) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: [*const u32; LANES], to: *mut u32, stride: usize) {
            for row in [0, 8] {
                for column in [0, 8] {
                    // SAFETY: a quarter of the caller's rows and lines.
                    unsafe { transpose_8(&rows[row..row + 8], column, to.add(column * stride + row), stride) };
                }
            }
        }
    }

    /// Turns words `first..first + 8` of 8 rows into 8 lines.
    ///
    /// # Safety
    /// As [`Vector16::transpose`], for 8 rows, words and lines.
    #[inline(always)]
    unsafe fn transpose_8(rows: &[*const u32], first: usize, to: *mut u32, stride: usize) {
        // SAFETY: AVX2 is there and the places are readable and writable by the caller's promise.
        unsafe {
            let mut words = [_mm256_setzero_ps(); 8];
            for (words, row) in words.iter_mut().zip(rows) {
                *words = _mm256_loadu_ps(row.add(first).cast());
            }
            // Within each half, quads[4b + c] holds column c of rows 4b..4b+4.
            let mut quads = words;
            for base in [0, 4] {
                let (low01, high01) = (_mm256_unpacklo_ps(words[base], words[base + 1]), _mm256_unpackhi_ps(words[base], words[base + 1]));
                let (low23, high23) =
                    (_mm256_unpacklo_ps(words[base + 2], words[base + 3]), _mm256_unpackhi_ps(words[base + 2], words[base + 3]));
                quads[base] = _mm256_shuffle_ps::<0x44>(low01, low23);
                quads[base + 1] = _mm256_shuffle_ps::<0xee>(low01, low23);
                quads[base + 2] = _mm256_shuffle_ps::<0x44>(high01, high23);
                quads[base + 3] = _mm256_shuffle_ps::<0xee>(high01, high23);
            }
            for column in 0..4 {
                let (upper, lower) = (quads[column], quads[4 + column]);
                _mm256_storeu_ps(to.add(column * stride).cast(), _mm256_permute2f128_ps::<0x20>(upper, lower));
                _mm256_storeu_ps(to.add((column + 4) * stride).cast(), _mm256_permute2f128_ps::<0x31>(upper, lower));
            }
        }
    }

    /// One vector of 16.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(__m512);

    impl Vector16 for Avx512 {
        const SIDE_BY_SIDE: usize = 4;

        #[inline(always)]
        unsafe fn splat(value: f32) -> Self {
            // SAFETY: AVX-512 is there by the caller's promise.
            unsafe { Self(_mm512_set1_ps(value)) }
        }

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above, and 16 f32 are readable.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn load_halves(from: *const u8) -> Self {
            // SAFETY: as above, and 32 bytes are readable.
            unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
        }

        #[inline(always)]
        unsafe fn load_bytes(from: *const u8) -> Self {
            // SAFETY: as above, and 16 bytes are readable.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above, and 16 f32 are writable.
            unsafe { _mm512_storeu_ps(to, self.0) };
        }

        #[inline(always)]
        unsafe fn multiply_add(self, factor: Self, term: Self) -> Self {
            // SAFETY: as above.
            unsafe { Self(_mm512_fmadd_ps(self.0, factor.0, term.0)) }
        }

        #[inline(always)]
        unsafe fn transpose(rows: [*const u32; LANES], to: *mut u32, stride: usize) {
            // SAFETY: AVX-512 is there and the places are readable and writable by the caller's promise.
            unsafe {
                let mut words = [_mm512_setzero_si512(); LANES];
                for (words, row) in words.iter_mut().zip(rows) {
                    *words = _mm512_loadu_si512(row.cast());
                }
                // Within each 128-bit lane l, quads[4b + c] holds column 4l + c of rows 4b..4b+4.
                let mut quads = words;
                for base in [0, 4, 8, 12] {
                    let low01 = _mm512_unpacklo_epi32(words[base], words[base + 1]);
                    let high01 = _mm512_unpackhi_epi32(words[base], words[base + 1]);
                    let low23 = _mm512_unpacklo_epi32(words[base + 2], words[base + 3]);
                    let high23 = _mm512_unpackhi_epi32(words[base + 2], words[base + 3]);
                    quads[base] = _mm512_unpacklo_epi64(low01, low23);
                    quads[base + 1] = _mm512_unpackhi_epi64(low01, low23);
                    quads[base + 2] = _mm512_unpacklo_epi64(high01, high23);
                    quads[base + 3] = _mm512_unpackhi_epi64(high01, high23);
                }
                for column in 0..4 {
                    let [first, second, third, fourth] = [quads[column], quads[4 + column], quads[8 + column], quads[12 + column]];
                    // Lanes 0 and 2 of both, then lanes 1 and 3 of both.
                    let (even01, odd01) = (_mm512_shuffle_i32x4::<0x88>(first, second), _mm512_shuffle_i32x4::<0xdd>(first, second));
                    let (even23, odd23) = (_mm512_shuffle_i32x4::<0x88>(third, fourth), _mm512_shuffle_i32x4::<0xdd>(third, fourth));
                    let lines = [
                        _mm512_shuffle_i32x4::<0x88>(even01, even23),
                        _mm512_shuffle_i32x4::<0x88>(odd01, odd23),
                        _mm512_shuffle_i32x4::<0xdd>(even01, even23),
                        _mm512_shuffle_i32x4::<0xdd>(odd01, odd23),
                    ];
                    for (lane, line) in lines.into_iter().enumerate() {
                        _mm512_storeu_si512(to.add((4 * lane + column) * stride).cast(), line);
                    }
                }
            }
        }
    }
}

/// Rows that share the loads of an outer product.
pub(super) const OUTER_ROWS: usize = 4;

/// `c[row][lane] = fma(a[row][k], b[k][lane], c[row][lane])` for k ascending, over `lanes` (a multiple of 16) columns.
///
/// Each element is one chain over k, whatever the number of rows or columns in the call.
///
/// # Safety
/// The instructions of `V` are there. Each `a` row has `n_k` readable f32; `b` has `n_k` rows of `lanes` f32, `b_stride`
/// apart; each `c` row has `lanes` f32 that nothing else uses.
#[inline(always)]
pub(super) unsafe fn outer_product<V: Vector16, const ROWS: usize>(
    n_k: usize,
    a: [*const f32; ROWS],
    b: *const f32,
    b_stride: usize,
    c: [*mut f32; ROWS],
    lanes: usize,
) {
    let mut lane = 0;
    // SAFETY: passed on from the caller; `lane` plus the vectors of a step stay within `lanes`.
    unsafe {
        if V::SIDE_BY_SIDE == 4 {
            while lane + 4 * LANES <= lanes {
                outer_step::<V, ROWS, 4>(n_k, a, b.add(lane), b_stride, c.map(|row| row.add(lane)));
                lane += 4 * LANES;
            }
        }
        while lane < lanes {
            outer_step::<V, ROWS, 1>(n_k, a, b.add(lane), b_stride, c.map(|row| row.add(lane)));
            lane += LANES;
        }
    }
}

#[inline(always)]
unsafe fn outer_step<V: Vector16, const ROWS: usize, const VECTORS: usize>(
    n_k: usize,
    a: [*const f32; ROWS],
    b: *const f32,
    b_stride: usize,
    c: [*mut f32; ROWS],
) {
    // SAFETY: passed on from `outer_product`.
    unsafe {
        let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                sums[row][vector] = V::load(c[row].add(LANES * vector));
            }
        }
        for k in 0..n_k {
            let mut right = [V::splat(0.0); VECTORS];
            for (vector, right) in right.iter_mut().enumerate() {
                *right = V::load(b.add(k * b_stride + LANES * vector));
            }
            for row in 0..ROWS {
                let left = V::splat(a[row].add(k).read());
                for vector in 0..VECTORS {
                    sums[row][vector] = left.multiply_add(right[vector], sums[row][vector]);
                }
            }
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                sums[row][vector].store(c[row].add(LANES * vector));
            }
        }
    }
}
