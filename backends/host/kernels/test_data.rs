//! Repeatable random inputs for the kernel tests.

use crate::quant::QuantType;

/// A small generator (SplitMix64) whose numbers depend on the seed alone.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn seeded(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Numbers around zero, mostly within `spread`.
    pub(super) fn floats(&mut self, count: usize, spread: f32) -> Vec<f32> {
        (0..count)
            .map(|_| {
                let bits = self.next();
                let sum = (bits & 0xffff) as f32 + ((bits >> 16) & 0xffff) as f32 + ((bits >> 32) & 0xffff) as f32;
                (sum / 65_536.0 - 1.5) * spread
            })
            .collect()
    }

    /// `n_rows` rows of `n` weights of a type: random bits with scales near 1/64, so that every code of the type occurs.
    pub(super) fn weights(&mut self, weights: QuantType, n_rows: usize, n: usize) -> Vec<u8> {
        let values = n_rows * n;
        match weights {
            QuantType::F32 => return self.floats(values, 0.1).iter().flat_map(|v| v.to_le_bytes()).collect(),
            QuantType::F16 => return self.floats(values, 0.1).iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect(),
            QuantType::BF16 => return self.floats(values, 0.1).iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect(),
            _ => {}
        }
        let bytes = weights.block_bytes();
        let mut blocks: Vec<u8> = (0..values / weights.block_len() * bytes).map(|_| self.next() as u8).collect();
        for block in blocks.chunks_exact_mut(bytes) {
            if weights == QuantType::MXFP4 {
                block[0] = 118 + block[0] % 8;
            }
            if weights == QuantType::IQ1_M {
                // The scale's four nibbles are the high nibbles of the four 16-bit scale words.
                let scale = half::f16::from_f32(self.scale()).to_bits();
                for word in 0..4 {
                    let high = &mut block[48 + 2 * word + 1];
                    *high = (*high & 0x0f) | (((scale >> (4 * word)) & 0xf) as u8) << 4;
                }
            }
            for &offset in scale_offsets(weights) {
                block[offset..offset + 2].copy_from_slice(&half::f16::from_f32(self.scale()).to_le_bytes());
            }
        }
        blocks
    }

    fn scale(&mut self) -> f32 {
        (0.5 + (self.next() & 0xff) as f32 / 256.0) / 64.0
    }
}

/// Where the f16 scales (and minima) of a block lie.
fn scale_offsets(weights: QuantType) -> &'static [usize] {
    match weights {
        QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::MXFP4 | QuantType::IQ1_M => &[],
        _ => &[0],
    }
}

/// Bytes that begin at an address of u32 and hold ones, as device memory does before its first use.
pub(super) struct AlignedBytes(Vec<u32>);

impl AlignedBytes {
    /// At least `n` bytes.
    pub(super) fn new(n: usize) -> Self {
        Self(vec![u32::MAX; n.div_ceil(4)])
    }

    /// The bytes.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: words are bytes without gaps, and any bytes are words.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), 4 * self.0.len()) }
    }
}
