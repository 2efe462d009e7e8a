//! The number sequence that synthetic models are made of: splitmix64 words, one stream for each tensor name.
//!
//! Everything is integer arithmetic up to one float32 multiplication, so a stream is the same in every language.

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// Word number `index` of the stream `key`.
pub fn word(key: u64, index: u64) -> u64 {
    let mut z = (index.wrapping_add(1)).wrapping_mul(GAMMA).wrapping_add(key);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The key of a tensor's stream: its name's CRC-32 above the seed's low 32 bits, mixed once.
pub fn stream_key(seed: u64, name: &str) -> u64 {
    let joined = (u64::from(crc32(name.as_bytes())) << 32) | (seed & 0xFFFF_FFFF);
    word(joined, 0)
}

/// A value of mean 0 and spread 1: the sum of the word's four 16-bit parts, centred.
pub fn bell(word: u64) -> f32 {
    let sum: i32 = (0..4).map(|part| ((word >> (16 * part)) & 0xFFFF) as i32).sum();
    let centred = 2 * sum - 4 * 65_535; // below 2^24 in size, so exact in float32
    let unit = (1.0 / (2.0 * 65_536.0 * (4.0_f64 / 12.0).sqrt())) as f32;
    centred as f32 * unit
}

/// A value in [0, 1): the word's top 24 bits.
pub fn uniform(word: u64) -> f32 {
    (word >> 40) as f32 * 2.0_f32.powi(-24)
}

/// CRC-32 as in zip files (polynomial 0xEDB88320, reflected).
pub fn crc32(bytes: &[u8]) -> u32 {
    let table: [u32; 256] =
        std::array::from_fn(|byte| (0..8).fold(byte as u32, |crc, _| if crc & 1 == 1 { 0xEDB8_8320 ^ (crc >> 1) } else { crc >> 1 }));
    !bytes.iter().fold(!0, |crc, &byte| table[((crc ^ u32::from(byte)) & 0xFF) as usize] ^ (crc >> 8))
}
