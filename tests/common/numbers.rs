//! Repeatable random operands for the tests of operations, and what stored activations stand for.

use ebbtide::quant::{ActivationFormat, QuantType};
use half::{bf16, f16};

/// A small generator (SplitMix64) whose numbers depend on the seed alone.
pub struct Numbers(u64);

impl Numbers {
    pub fn seeded(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Numbers within `spread` of zero, evenly spread.
    pub fn floats(&mut self, count: usize, spread: f32) -> Vec<f32> {
        (0..count).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * spread).collect()
    }

    /// A scale of a block: around 1/64, never zero, infinite or NaN.
    fn scale(&mut self) -> f16 {
        f16::from_f32((0.5 + (self.next() & 0xff) as f32 / 256.0) / 64.0)
    }
}

/// Where the f16 scales and minima of a block lie, for types that keep them whole.
fn scale_offsets(quant_type: QuantType) -> &'static [usize] {
    match quant_type {
        QuantType::Q4_1 | QuantType::Q5_1 | QuantType::Q4_K | QuantType::Q5_K => &[0, 2],
        QuantType::Q2_K => &[80, 82],
        QuantType::Q3_K => &[108],
        QuantType::Q6_K => &[208],
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::MXFP4 | QuantType::IQ1_M => &[],
        _ => &[0],
    }
}

/// Blocks of `count` weights: random bits, so that every code occurs, with scales that keep them near one.
pub fn weights_of(numbers: &mut Numbers, quant_type: QuantType, count: usize) -> Vec<u8> {
    let floats = |numbers: &mut Numbers| numbers.floats(count, 0.1);
    match quant_type {
        QuantType::F32 => return floats(numbers).iter().flat_map(|value| value.to_le_bytes()).collect(),
        QuantType::F16 => return floats(numbers).iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        QuantType::BF16 => return floats(numbers).iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        _ => {}
    }
    let bytes = count / quant_type.block_len() * quant_type.block_bytes();
    let mut blocks: Vec<u8> = (0..bytes).map(|_| numbers.next().to_le_bytes()[7]).collect();
    for block in blocks.chunks_exact_mut(quant_type.block_bytes()) {
        for &offset in scale_offsets(quant_type) {
            block[offset..offset + 2].copy_from_slice(&numbers.scale().to_le_bytes());
        }
        match quant_type {
            // One byte is the exponent of the scale.
            QuantType::MXFP4 => block[0] = 118 + block[0] % 8,
            // The scale's four nibbles are the high nibbles of the last four 16-bit words.
            QuantType::IQ1_M => {
                let nibbles = numbers.scale().to_le_bytes();
                for (word, nibble) in [nibbles[0] & 15, nibbles[0] >> 4, nibbles[1] & 15, nibbles[1] >> 4].into_iter().enumerate() {
                    block[49 + 2 * word] = (block[49 + 2 * word] & 0x0f) | nibble << 4;
                }
            }
            _ => {}
        }
    }
    blocks
}

/// The numbers that rows of `n` in an activation format stand for.
pub fn values_of_rows(format: ActivationFormat, rows: &[u8], n: usize) -> Vec<f64> {
    let float = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes")));
    if format == ActivationFormat::F32 {
        return rows.chunks_exact(4).map(float).collect();
    }
    if format == ActivationFormat::F16 {
        let halves = |row: &[u8]| {
            let scale = float(&row[..4]);
            let halves = row[16..].chunks_exact(2).take(n).map(|half| f16::from_le_bytes([half[0], half[1]]));
            halves.map(|half| scale * half.to_f64()).collect::<Vec<_>>()
        };
        return rows.chunks_exact(format.row_bytes(n)).flat_map(halves).collect();
    }
    let mut values = Vec::new();
    for row in rows.chunks_exact(format.row_bytes(n)) {
        let scales: Vec<f64> = row[n..].chunks_exact(4).take(n / format.block_len()).map(float).collect();
        values.extend(row[..n].iter().enumerate().map(|(index, &code)| f64::from(code.cast_signed()) * scales[index / format.block_len()]));
    }
    values
}
