//! Dequantisation of every type against recorded blocks, to the last bit (see `tests/golden/quant/README.md`).

use std::{error::Error, fs, path::PathBuf};

use ebbtide::quant::{QuantType, dequantise};

type TestResult = Result<(), Box<dyn Error>>;

fn golden(quant_type: QuantType) -> Result<(Vec<u8>, Vec<u32>), Box<dyn Error>> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quant").join(quant_type.to_string());
    let weights = fs::read(path.with_extension("weights"))?;
    let bits = weights.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    Ok((fs::read(path.with_extension("blocks"))?, bits))
}

fn weight_bits(quant_type: QuantType, blocks: &[u8]) -> Result<Vec<u32>, Box<dyn Error>> {
    let mut out = vec![0.0; blocks.len() / quant_type.block_bytes() * quant_type.block_len()];
    dequantise(quant_type, blocks, &mut out)?;
    Ok(out.into_iter().map(f32::to_bits).collect())
}

#[test]
fn every_type_equals_the_recorded_weights_to_the_last_bit() -> TestResult {
    for quant_type in QuantType::ALL {
        let (blocks, expected) = golden(quant_type)?;
        let actual = weight_bits(quant_type, &blocks)?;
        assert_eq!(actual.len(), expected.len(), "{quant_type}");
        let differs = actual.iter().zip(&expected).position(|(actual, expected)| actual != expected);
        if let Some(index) = differs {
            let (actual, expected) = (f32::from_bits(actual[index]), f32::from_bits(expected[index]));
            return Err(format!("{quant_type}: weight {index} is {actual:e}, recorded {expected:e}").into());
        }
    }
    Ok(())
}

/// The comparison above can fail: no bit of a block is without effect.
///
/// A quant whose own group has scale zero is mute, so a bit counts as heard when flipping it in all blocks changes any of them.
#[test]
fn flipping_any_bit_of_a_block_changes_its_weights() -> TestResult {
    for quant_type in QuantType::ALL {
        let (blocks, recorded) = golden(quant_type)?;
        for bit in 0..8 * quant_type.block_bytes() {
            let mut flipped = blocks.clone();
            for block in flipped.chunks_exact_mut(quant_type.block_bytes()) {
                block[bit / 8] ^= 1 << (bit % 8);
            }
            assert!(weight_bits(quant_type, &flipped)? != recorded, "{quant_type}: bit {bit} has no effect");
        }
    }
    Ok(())
}
