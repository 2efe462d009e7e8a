//! `IQ3_XXS` for processors with AVX-512 VBMI: the code book lives in registers, four planes at a time.
//!
//! An entry of the code book is four weights. *Plane* j holds weight j of each of the 64 entries of a block, so that a byte of
//! indices finds its weights by permutations alone; the activations are sorted the same way, once for four weight rows. In a
//! plane, dword 4 l + z holds the entries 16 z + 4 l .. + 4, all of one group of 32 weights, so a group's scale is applied to
//! whole lanes after all its products are summed.

use std::arch::x86_64::*;

use super::vectors::{half_at, load_32, load_64, prefetch_behind, sums_of_16};
use super::weights::{IQ3_XXS, Rows, Weights};
use crate::quant::tables::{IQ3_XXS_GRID, SIGNS};

/// Planes of a block: weights of a code book entry.
const PLANES: usize = 4;

/// Weights 0 and 1 of each entry as numbers of 3 bits: `first | second << 3`.
static LOW_CODES: [u8; 256] = pairs_of_codes(0);
/// Weights 2 and 3 likewise.
static HIGH_CODES: [u8; 256] = pairs_of_codes(16);
/// The magnitude that each code of 3 bits stands for, in every place of a pair of codes: by the lower code, by the upper one.
static MAGNITUDES: [[u8; 64]; 2] = [magnitudes(0), magnitudes(3)];

/// The magnitudes 4, 12 ... 52, 62 become 0..=7 by a shift.
const fn pairs_of_codes(shift: u32) -> [u8; 256] {
    let mut codes = [0; 256];
    let mut index = 0;
    while index < 256 {
        let [first, second, ..] = (IQ3_XXS_GRID[index] >> shift).to_le_bytes();
        codes[index] = (first >> 3) | (second >> 3 << 3);
        index += 1;
    }
    codes
}

const fn magnitudes(shift: u32) -> [u8; 64] {
    let of_code = [4, 12, 20, 28, 36, 44, 52, 62];
    let mut values = [0; 64];
    let mut pair = 0;
    while pair < 64 {
        values[pair] = of_code[(pair >> shift) & 7];
        pair += 1;
    }
    values
}

/// The product by AVX-512 VBMI; see [`super::dot_fn`] for who may have this function.
pub(super) fn dot_vbmi(weights: &[u8], activation: &[u8]) -> f32 {
    // SAFETY: `dot_fn` gives this function out only where the processor has VBMI beside the instructions of `Avx512`.
    let [sum] = unsafe { sums([weights], Rows::new::<IQ3_XXS>(weights, activation)) };
    sum
}

/// [`dot_vbmi`] of four weight rows of one length.
pub(super) fn four_vbmi(weights: [&[u8]; 4], activation: &[u8]) -> [f32; 4] {
    // SAFETY: as above.
    unsafe { sums(weights, Rows::new::<IQ3_XXS>(weights[0], activation)) }
}

/// One sum for each of `ROWS` weight rows; the order of a sum does not depend on `ROWS`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn sums<const ROWS: usize>(weights: [&[u8]; ROWS], activations: Rows<'_>) -> [f32; ROWS] {
    let book = CodeBook::load();
    let mut totals = [_mm512_setzero_ps(); ROWS];
    for (index, quants) in activations.quants.chunks_exact(256).enumerate() {
        let planes = planes(quants);
        let scale = f32::from_le_bytes(activations.scales[index]) * 0.25;
        for row in 0..ROWS {
            let block = &weights[row][index * IQ3_XXS::BYTES..(index + 1) * IQ3_XXS::BYTES];
            if ROWS > 1 {
                prefetch_behind(block, IQ3_XXS::BYTES, ROWS * weights[0].len());
            }
            let products = _mm512_cvtepi32_ps(book.products(block, &planes));
            // SAFETY: this function has the instructions.
            let d = unsafe { half_at(block, 0) };
            totals[row] = _mm512_fmadd_ps(_mm512_set1_ps(d * scale), products, totals[row]);
        }
    }
    // SAFETY: as above.
    unsafe { sums_of_16(totals) }
}

/// 256 activations sorted into planes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn planes(quants: &[u8]) -> [__m512i; PLANES] {
    let by_plane = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    // SAFETY: this function has AVX-512.
    let sorted = |z: usize| _mm512_shuffle_epi8(unsafe { load_64(quants, 64 * z) }, by_plane);
    let [first, second, third, fourth] = [sorted(0), sorted(1), sorted(2), sorted(3)];
    let (early_01, late_01) = (_mm512_unpacklo_epi32(first, second), _mm512_unpacklo_epi32(third, fourth));
    let (early_23, late_23) = (_mm512_unpackhi_epi32(first, second), _mm512_unpackhi_epi32(third, fourth));
    [
        _mm512_unpacklo_epi64(early_01, late_01),
        _mm512_unpackhi_epi64(early_01, late_01),
        _mm512_unpacklo_epi64(early_23, late_23),
        _mm512_unpackhi_epi64(early_23, late_23),
    ]
}

/// Tables and index patterns in registers.
struct CodeBook {
    low: [__m512i; 4],
    high: [__m512i; 4],
    magnitudes: [__m512i; 2],
    signs: [__m512i; 2],
    /// Brings the indices into the order of a plane.
    order: __m512i,
    /// The group of each dword.
    groups: __m512i,
    /// Where the sign code of each entry begins within two words of signs.
    sign_places: __m512i,
    /// The sign bit of each entry in its byte, for each plane.
    sign_bits: [__m512i; PLANES],
}

impl CodeBook {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn load() -> Self {
        // SAFETY: this function has AVX-512.
        let part = |table: &[u8], at: usize| unsafe { load_64(table, 64 * at) };
        let of_256 = |table: &[u8; 256]| [part(table, 0), part(table, 1), part(table, 2), part(table, 3)];
        // Entries 0 and 1 of a dword share a sign code, so do 2 and 3; the even lanes have codes 0 and 1 of a group, the odd 2 and 3.
        let places = |first: i8| {
            let second = first + 7;
            let (third, fourth) = (first + 32, second + 32);
            let eight = i64::from_le_bytes([first, first, second, second, third, third, fourth, fourth].map(i8::cast_unsigned));
            _mm_set1_epi64x(eight)
        };
        let two_lanes = _mm256_set_m128i(places(14), places(0));
        // An entry's four signs are the lower half of its code's byte or the upper one.
        let bit = |plane: usize| _mm512_set1_epi16((0x1001_u16 << plane).cast_signed());
        Self {
            low: of_256(&LOW_CODES),
            high: of_256(&HIGH_CODES),
            magnitudes: [part(&MAGNITUDES[0], 0), part(&MAGNITUDES[1], 0)],
            signs: [part(&SIGNS, 0), part(&SIGNS, 1)],
            order: _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
            groups: _mm512_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7),
            sign_places: _mm512_broadcast_i64x4(two_lanes),
            sign_bits: [bit(0), bit(1), bit(2), bit(3)],
        }
    }

    /// The products of a block, each group's times its scale, spread over 16 sums.
    ///
    /// A sum has 16 products of at most 62 * 127, times a scale of at most 31: it is exact as f32 too.
    #[inline]
    #[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    fn products(&self, block: &[u8], planes: &[__m512i; PLANES]) -> __m512i {
        // SAFETY: this function has AVX-512.
        let (indices, words) = unsafe { (load_64(block, 2), load_32(block, 66)) };
        let indices = _mm512_permutexvar_epi32(self.order, indices);
        let words = _mm512_permutexvar_epi32(self.groups, _mm512_castsi256_si512(words));
        // The permutation of bytes looks at the seven low bits of a place only: a whole sign code.
        let codes = _mm512_multishift_epi64_epi8(self.sign_places, words);
        let signs = _mm512_permutex2var_epi8(self.signs[0], codes, self.signs[1]);
        let upper = _mm512_movepi8_mask(indices);
        let find = |table: &[__m512i; 4]| {
            let first = _mm512_permutex2var_epi8(table[0], indices, table[1]);
            _mm512_mask_blend_epi8(upper, first, _mm512_permutex2var_epi8(table[2], indices, table[3]))
        };
        let (low, high) = (find(&self.low), find(&self.high));
        let mut sums = _mm512_setzero_si512();
        for (plane, activations) in planes.iter().enumerate() {
            let codes = if plane < 2 { low } else { high };
            let magnitudes = _mm512_permutexvar_epi8(codes, self.magnitudes[plane % 2]);
            let minus = _mm512_test_epi8_mask(signs, self.sign_bits[plane]);
            let signed = _mm512_mask_sub_epi8(*activations, minus, _mm512_setzero_si512(), *activations);
            sums = _mm512_dpbusd_epi32(sums, magnitudes, signed);
        }
        let scales = _mm512_srli_epi32::<28>(words);
        let scales = _mm512_add_epi32(_mm512_add_epi32(scales, scales), _mm512_set1_epi32(1));
        _mm512_mullo_epi32(sums, scales)
    }
}
