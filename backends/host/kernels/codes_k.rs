//! Codes of the K types and of IQ4_XS: blocks of 256 weights whose groups have integer scales of their own.

use super::codes::{CodeChunk, f16_at, u16_at};
use super::codes_32::look_up;
use crate::quant::tables::IQ4_VALUES;

/// The only block of a chunk, as an array so that bounds are known.
#[inline(always)]
pub(super) fn whole<const BYTES: usize>(blocks: &[u8]) -> &[u8; BYTES] {
    blocks.first_chunk().expect("a chunk of a 256-weight type holds one block")
}

/// `scales[16] | qs[64] | d | dmin`: 2-bit codes; a scale byte holds a 4-bit scale and a 4-bit min.
#[inline(always)]
pub(super) fn q2_k(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<84>(blocks);
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for group in 0..16 {
        chunk.scales[group] = d * f32::from(block[group] & 15);
        chunk.mins[group] = -(dmin * f32::from(block[group] >> 4));
    }
    for half in 0..2 {
        for plane in 0..4 {
            for lane in 0..32 {
                chunk.codes[128 * half + 32 * plane + lane] = ((block[16 + 32 * half + lane] >> (2 * plane)) & 3).cast_signed();
            }
        }
    }
}

/// `hmask[32] | qs[64] | scales[12] | d`: 2 low bits, one high bit (set: nothing to take off, clear: 4), 6-bit scales - 32.
#[inline(always)]
pub(super) fn q3_k(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<110>(blocks);
    let d = f16_at(block, 108);
    for group in 0..16 {
        let low = block[96 + group % 8] >> (4 * (group / 8)) & 15;
        let high = block[104 + group % 4] >> (2 * (group / 4)) & 3;
        chunk.scales[group] = d * f32::from((low | high << 4).cast_signed() - 32);
    }
    for half in 0..2 {
        for plane in 0..4 {
            for lane in 0..32 {
                let low = (block[32 + 32 * half + lane] >> (2 * plane)) & 3;
                let high = (block[lane] >> (4 * half + plane)) & 1;
                chunk.codes[128 * half + 32 * plane + lane] = (low | high << 2).cast_signed() - 4;
            }
        }
    }
}

/// The 6-bit scale and min of group `group` in the twelve bytes that Q4_K and Q5_K share.
#[inline(always)]
fn scale_and_min(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        ((low & 15) | (packed[group - 4] >> 6) << 4, (low >> 4) | (packed[group] >> 6) << 4)
    }
}

#[inline(always)]
fn fill_scales_and_mins(block: &[u8], chunk: &mut CodeChunk) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for group in 0..8 {
        let (scale, min) = scale_and_min(&block[4..16], group);
        chunk.scales[group] = d * f32::from(scale);
        chunk.mins[group] = -(dmin * f32::from(min));
    }
}

/// `d | dmin | scales[12] | qs[128]`: 4-bit codes, two groups share 32 bytes.
#[inline(always)]
pub(super) fn q4_k(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<144>(blocks);
    fill_scales_and_mins(block, chunk);
    for pair in 0..4 {
        for lane in 0..32 {
            let byte = block[16 + 32 * pair + lane];
            chunk.codes[64 * pair + lane] = (byte & 15).cast_signed();
            chunk.codes[64 * pair + 32 + lane] = (byte >> 4).cast_signed();
        }
    }
}

/// `d | dmin | scales[12] | qh[32] | qs[128]`: as Q4_K with a fifth bit; bit g of `qh` belongs to group g.
#[inline(always)]
pub(super) fn q5_k(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<176>(blocks);
    fill_scales_and_mins(block, chunk);
    for pair in 0..4 {
        for lane in 0..32 {
            let (byte, high) = (block[48 + 32 * pair + lane], block[16 + lane]);
            chunk.codes[64 * pair + lane] = ((byte & 15) | ((high >> (2 * pair)) & 1) << 4).cast_signed();
            chunk.codes[64 * pair + 32 + lane] = ((byte >> 4) | ((high >> (2 * pair + 1)) & 1) << 4).cast_signed();
        }
    }
}

/// `ql[128] | qh[64] | scales[16] | d`: 6-bit codes - 32, signed 8-bit scales.
#[inline(always)]
pub(super) fn q6_k(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<210>(blocks);
    let d = f16_at(block, 208);
    for group in 0..16 {
        chunk.scales[group] = d * f32::from(block[192 + group].cast_signed());
    }
    for half in 0..2 {
        for lane in 0..32 {
            let (first, second) = (block[64 * half + lane], block[64 * half + 32 + lane]);
            let high = block[128 + 32 * half + lane];
            let codes = &mut chunk.codes[128 * half..128 * half + 128];
            codes[lane] = ((first & 15) | (high & 3) << 4).cast_signed() - 32;
            codes[lane + 32] = ((second & 15) | (high >> 2 & 3) << 4).cast_signed() - 32;
            codes[lane + 64] = ((first >> 4) | (high >> 4 & 3) << 4).cast_signed() - 32;
            codes[lane + 96] = ((second >> 4) | (high >> 6) << 4).cast_signed() - 32;
        }
    }
}

/// `d | scales_h (2 bits each) | scales_l[4] (4 bits each) | qs[128]`: the table of IQ4_NL, 6-bit scales - 32.
#[inline(always)]
pub(super) fn iq4_xs<const VECTOR: bool>(blocks: &[u8], chunk: &mut CodeChunk) {
    let block = whole::<136>(blocks);
    let d = f16_at(block, 0);
    let high_bits = u16_at(block, 2);
    let (code_groups, _) = chunk.codes.as_chunks_mut::<32>();
    for (group, codes) in code_groups.iter_mut().enumerate() {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let high = (high_bits >> (2 * group) & 3) as u8;
        chunk.scales[group] = d * f32::from((low | high << 4).cast_signed() - 32);
        look_up::<VECTOR>(&block[8 + 16 * group..], &IQ4_VALUES, codes);
    }
}
