//! Constant tables of the quantised types: code books, sign patterns and the two non-linear 4-bit scales.
//!
//! Every code book entry holds its weights as bytes, first weight in the lowest byte, so that a kernel loads an entry
//! as it loads weights. The tables are expanded at compile time from `packed`; they own 36 KiB of read-only data.

mod packed;

/// The values of the 4-bit codes of `IQ4_NL` and `IQ4_XS`.
pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of the 4-bit codes of `MXFP4`, doubled so that they are integers.
pub const MXFP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Sign bits of eight weights by their 7-bit code: the eighth bit makes the number of minus signs even.
pub static SIGNS: [u8; 128] = even_signs();

/// `IQ2_XXS`: magnitudes of eight weights, one a byte.
pub static IQ2_XXS_GRID: [u64; 256] = eight_bytes(&packed::IQ2_XXS, IQ2_MAGNITUDES);
/// `IQ2_XS`: magnitudes of eight weights, one a byte.
pub static IQ2_XS_GRID: [u64; 512] = eight_bytes(&packed::IQ2_XS, IQ2_MAGNITUDES);
/// `IQ2_S`: magnitudes of eight weights, one a byte.
pub static IQ2_S_GRID: [u64; 1024] = eight_bytes(&packed::IQ2_S, IQ2_MAGNITUDES);
/// `IQ3_XXS`: magnitudes of four weights, one a byte.
pub static IQ3_XXS_GRID: [u32; 256] = four_bytes(&packed::IQ3_XXS, [4, 12, 20, 28, 36, 44, 52, 62]);
/// `IQ3_S`: magnitudes of four weights, one a byte.
pub static IQ3_S_GRID: [u32; 512] = four_bytes(&packed::IQ3_S, [1, 3, 5, 7, 9, 11, 13, 15]);
/// `IQ1_S` and `IQ1_M`: eight times the value (-8, 0 or 8) of eight weights, one a byte in two's complement.
///
/// The factor leaves room for the shift of an eighth that these types add to every weight of a group.
pub static IQ1_GRID: [u64; 2048] = eight_bytes(&packed::IQ1, [0xf8, 0, 8]);

const IQ2_MAGNITUDES: [u8; 3] = [8, 25, 43];

const fn even_signs() -> [u8; 128] {
    let mut signs = [0; 128];
    let mut code = 0_u8;
    while code < 128 {
        signs[code as usize] = code | (((code.count_ones() & 1) as u8) << 7);
        code += 1;
    }
    signs
}

const fn eight_bytes<const N: usize>(packed: &[u16; N], values: [u8; 3]) -> [u64; N] {
    let mut grid = [0; N];
    let mut entry = 0;
    while entry < N {
        let mut lane = 0;
        while lane < 8 {
            let code = (packed[entry] >> (2 * lane)) & 3;
            grid[entry] |= (values[code as usize] as u64) << (8 * lane);
            lane += 1;
        }
        entry += 1;
    }
    grid
}

const fn four_bytes<const N: usize>(packed: &[u16; N], values: [u8; 8]) -> [u32; N] {
    let mut grid = [0; N];
    let mut entry = 0;
    while entry < N {
        let mut lane = 0;
        while lane < 4 {
            let code = (packed[entry] >> (4 * lane)) & 7;
            grid[entry] |= (values[code as usize] as u32) << (8 * lane);
            lane += 1;
        }
        entry += 1;
    }
    grid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sign_pattern_has_an_even_number_of_minus_signs() {
        for (code, signs) in SIGNS.iter().enumerate() {
            assert_eq!(signs.count_ones() % 2, 0, "code {code}");
            assert_eq!(usize::from(signs & 0x7f), code);
        }
    }

    #[test]
    fn the_code_books_begin_and_end_with_the_entries_of_the_format() {
        assert_eq!((IQ2_XXS_GRID[0], IQ2_XXS_GRID[255]), (0x0808_0808_0808_0808, 0x2b2b_2b19_0808_1908));
        assert_eq!((IQ3_XXS_GRID[0], IQ3_XXS_GRID[255]), (0x0404_0404, 0x3e34_1c04));
        assert_eq!((IQ1_GRID[0], IQ1_GRID[2047]), (0xf8f8_f8f8_f8f8_f8f8, 0x0808_0808_0808_0808));
    }
}
