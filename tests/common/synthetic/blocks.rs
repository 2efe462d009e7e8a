//! Contents of a synthetic tensor: random quantised blocks with a chosen spread, or float numbers.
//!
//! Quantised tensors are never quantised from floats. Their bytes are random and only the scale fields are set, so every block type
//! is made equally fast and dequantising the file gives the exact weights of the model.

use ebbtide::quant::QuantType;
use half::{bf16, f16};

use super::random::{bell, uniform, word};

/// Where a block type keeps its scale, and how wide its weights spread.
struct ScaleField {
    /// Byte offset of the f16 scale.
    scale_at: usize,
    /// Byte offset of the f16 minimum and its ratio to the scale.
    minimum: Option<(usize, f32)>,
    /// Spread of the weights at scale 1 when all other bytes are random (measured over many blocks).
    unit_spread: f64,
}

fn scale_field(quant: QuantType) -> Option<ScaleField> {
    let (scale_at, minimum, unit_spread) = match quant {
        QuantType::Q4_0 => (0, None, 4.611),
        QuantType::Q4_1 => (0, Some((2, -7.5)), 4.608),
        QuantType::Q5_0 => (0, None, 9.232),
        QuantType::Q5_1 => (0, Some((2, -15.5)), 9.233),
        QuantType::Q8_0 => (0, None, 73.96),
        QuantType::Q2_K => (80, Some((82, 1.5)), 13.87),
        QuantType::Q3_K => (108, None, 43.32),
        QuantType::Q4_K => (0, Some((2, 7.5)), 258.4),
        QuantType::Q5_K => (0, Some((2, 15.5)), 527.6),
        QuantType::Q6_K => (208, None, 1366.3),
        QuantType::IQ2_XXS => (0, None, 53.37),
        QuantType::IQ2_XS => (0, None, 55.83),
        QuantType::IQ3_XXS => (0, None, 141.9),
        QuantType::IQ1_S => (0, None, 7.218),
        QuantType::IQ4_NL => (0, None, 67.16),
        QuantType::IQ3_S => (0, None, 140.1),
        QuantType::IQ2_S => (0, None, 56.35),
        QuantType::IQ4_XS => (0, None, 1244.0),
        QuantType::F32 | QuantType::F16 | QuantType::BF16 | QuantType::IQ1_M | QuantType::MXFP4 => return None,
    };
    Some(ScaleField { scale_at, minimum, unit_spread })
}

/// True for the types that [`push_matrix`] can write.
pub fn is_supported(quant: QuantType) -> bool {
    quant.is_float() || scale_field(quant).is_some()
}

/// Appends `n_weights` weights of stream `key` that spread by `spread`.
///
/// `row_sizes` multiplies whole rows of a float tensor: (row length, one factor for each row).
pub fn push_matrix(out: &mut Vec<u8>, quant: QuantType, key: u64, n_weights: u64, spread: f64, row_sizes: Option<(u64, &[f32])>) {
    if let Some(field) = scale_field(quant) {
        push_blocks(out, quant, &field, key, n_weights / quant.block_len() as u64, spread);
        return;
    }
    for index in 0..n_weights {
        let mut weight = spread as f32 * bell(word(key, index));
        if let Some((row_length, sizes)) = row_sizes {
            weight *= sizes[(index / row_length) as usize];
        }
        match quant {
            QuantType::F16 => out.extend(f16::from_f32(weight).to_le_bytes()),
            QuantType::BF16 => out.extend(bf16::from_f32(weight).to_le_bytes()),
            _ => out.extend(weight.to_le_bytes()),
        }
    }
}

/// Blocks of random bytes; the word after a block's own bytes gives its scale, 0.75 to 1.25 of the wanted one.
fn push_blocks(out: &mut Vec<u8>, quant: QuantType, field: &ScaleField, key: u64, n_blocks: u64, spread: f64) {
    let bytes = quant.block_bytes();
    let words = bytes.div_ceil(8) as u64 + 1;
    let wanted_scale = (spread / field.unit_spread) as f32;
    for block in 0..n_blocks {
        let first = block * words;
        let start = out.len();
        for index in first..first + words - 1 {
            out.extend(word(key, index).to_le_bytes());
        }
        out.truncate(start + bytes);
        let scale = wanted_scale * (0.75 + 0.5 * uniform(word(key, first + words - 1)));
        put_f16(out, start + field.scale_at, scale);
        if let Some((minimum_at, ratio)) = field.minimum {
            put_f16(out, start + minimum_at, scale * ratio);
        }
    }
}

fn put_f16(out: &mut [u8], at: usize, value: f32) {
    out[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Appends a norm's weights: `centre` and a tenth of a [`bell`] value each.
pub fn push_norm(out: &mut Vec<u8>, key: u64, n_weights: u64, centre: f32) {
    for index in 0..n_weights {
        out.extend((centre + 0.1 * bell(word(key, index))).to_le_bytes());
    }
}

/// Appends weights that lie evenly between `first` and `first + width`.
pub fn push_even(out: &mut Vec<u8>, key: u64, n_weights: u64, first: f32, width: f32) {
    for index in 0..n_weights {
        out.extend((first + width * uniform(word(key, index))).to_le_bytes());
    }
}
