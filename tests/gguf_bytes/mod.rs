//! Bytes of small GGUF files, sound and hostile, for the reader's tests. All numbers little-endian.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;
pub const I64: u32 = 11;

/// Joins pieces of bytes.
macro_rules! bytes {
    ($($piece:expr),* $(,)?) => {{
        let mut joined: Vec<u8> = Vec::new();
        $(joined.extend_from_slice(AsRef::<[u8]>::as_ref(&$piece));)*
        joined
    }};
}
pub(crate) use bytes;

pub fn string(text: &[u8]) -> Vec<u8> {
    bytes![(text.len() as u64).to_le_bytes(), text]
}

pub fn pair(key: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
    bytes![string(key.as_bytes()), value_type.to_le_bytes(), value]
}

pub fn pair_u32(key: &str, value: u32) -> Vec<u8> {
    pair(key, U32, &value.to_le_bytes())
}

pub fn pair_string(key: &str, value: &str) -> Vec<u8> {
    pair(key, STRING, &string(value.as_bytes()))
}

pub fn pair_array(key: &str, element_type: u32, count: u64, body: &[u8]) -> Vec<u8> {
    pair(key, ARRAY, &bytes![element_type.to_le_bytes(), count.to_le_bytes(), body])
}

pub fn pair_strings(key: &str, items: &[&str]) -> Vec<u8> {
    let body: Vec<u8> = items.iter().flat_map(|item| string(item.as_bytes())).collect();
    pair_array(key, STRING, items.len() as u64, &body)
}

pub fn head_of_version(version: u32, n_tensors: u64, n_pairs: u64) -> Vec<u8> {
    bytes![b"GGUF", version.to_le_bytes(), n_tensors.to_le_bytes(), n_pairs.to_le_bytes()]
}

pub fn head(n_tensors: u64, n_pairs: u64) -> Vec<u8> {
    head_of_version(3, n_tensors, n_pairs)
}

/// A directory entry; `dimensions` fastest first, as files have them.
pub fn entry(name: &str, dimensions: &[u64], element_type: u32, offset: u64) -> Vec<u8> {
    let lengths: Vec<u8> = dimensions.iter().flat_map(|length| length.to_le_bytes()).collect();
    let n_dims = u32::try_from(dimensions.len()).expect("few dimensions");
    bytes![string(name.as_bytes()), n_dims.to_le_bytes(), lengths, element_type.to_le_bytes(), offset.to_le_bytes()]
}

pub fn architecture() -> Vec<u8> {
    pair_string("general.architecture", "llama")
}

/// A header, padded to `alignment`, and its data.
pub fn file_aligned(header: Vec<u8>, alignment: usize, data: &[u8]) -> Vec<u8> {
    let mut file = header;
    file.resize(file.len().next_multiple_of(alignment), 0);
    file.extend_from_slice(data);
    file
}

/// A header, padded to 32, and 128 bytes of data.
pub fn file(header: Vec<u8>) -> Vec<u8> {
    file_aligned(header, 32, &[0; 128])
}

/// The smallest sound file with a tensor: 32 numbers in F32.
pub fn smallest() -> Vec<u8> {
    file(bytes![head(1, 1), architecture(), entry("t", &[32], 0, 0)])
}

/// A sound file whose one tensor and padding have this alignment.
pub fn with_alignment(alignment: u32) -> Vec<u8> {
    let header = bytes![head(1, 2), architecture(), pair_u32("general.alignment", alignment), entry("t", &[32], 0, 0)];
    file_aligned(header, alignment as usize, &[0; 128])
}

/// A sound file with every value type, every array type, and tensors of several ranks and element types.
pub fn with_everything() -> Vec<u8> {
    let scalars = [
        pair("t.u8", 0, &[200]),
        pair("t.i8", 1, &[0xff]),
        pair("t.u16", 2, &60_000u16.to_le_bytes()),
        pair("t.i16", 3, &(-2i16).to_le_bytes()),
        pair_u32("t.u32", 4_000_000_000),
        pair("t.i32", I32, &(-3i32).to_le_bytes()),
        pair("t.f32", 6, &1.5f32.to_le_bytes()),
        pair("t.bool", BOOL, &[1]),
        pair_string("t.string", "wörter"),
        pair("t.u64", U64, &(1u64 << 40).to_le_bytes()),
        pair("t.i64", I64, &(-4i64).to_le_bytes()),
        pair("t.f64", 12, &2.5f64.to_le_bytes()),
    ];
    let widths = [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8)];
    let arrays = widths.map(|(id, width)| pair_array(&format!("t.array.{id}"), id, 3, &vec![1; 3 * width]));
    let pairs = bytes![scalars.concat(), arrays.concat(), pair_strings("t.strings", &["a", "", "ccc"])];
    let entries = [
        entry("vector", &[8], 0, 0),             // 32 bytes
        entry("matrix", &[4, 2], 1, 32),         // F16, 16 bytes
        entry("blocks", &[32, 3], 8, 64),        // Q8_0, 102 bytes
        entry("four", &[256, 1, 1, 2], 12, 192), // Q4_K, 288 bytes
    ];
    file_aligned(bytes![head(4, 24), pairs, entries.concat()], 32, &[7; 480])
}

/// Shard `number` (from 1) of `count`, with one tensor of 32 numbers named after it.
pub fn shard(number: u16, count: u16, n_tensors: i32) -> Vec<u8> {
    let split = bytes![
        pair("split.no", 2, &(number - 1).to_le_bytes()),
        pair("split.count", 2, &count.to_le_bytes()),
        pair("split.tensors.count", I32, &n_tensors.to_le_bytes()),
    ];
    let first = if number == 1 { architecture() } else { Vec::new() };
    let n_pairs = 3 + u64::from(number == 1);
    let header = bytes![head(1, n_pairs), first, split, entry(&format!("t{number}"), &[32], 0, 0)];
    file_aligned(header, 32, &[u8::try_from(number).expect("few shards"); 128])
}
