//! The GGUF header: magic, version, key-value pairs and the tensor directory, as a pure function over bytes. No tensor data is read.
//!
//! ```text
//! "GGUF" | version u32 | n_tensors u64 | n_kv u64 | n_kv x pair | n_tensors x directory entry | padding to the alignment | data
//! pair:             key string | value type u32 | value
//! directory entry:  name string | n_dims u32 | n_dims x u64, fastest first | element type u32 | offset u64 from the start of data
//! string:           length u64 | bytes
//! ```
//!
//! **Order of dimensions.** GGUF lists the dimension whose numbers lie side by side first. It is turned round here, once:
//! [`TensorInfo::shape`] is slowest first everywhere above this module, so a matrix is `[n_rows, row_len]`.

use std::collections::{BTreeMap, HashSet};

use super::cursor::Cursor;
use super::error::{GgufError, shown};
use super::foreign::ForeignFormat;
use super::metadata::{Array, Metadata, Value, ValueType};
use crate::quant::QuantType;

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u32 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// What the format allows for a key; tensor names get the same bound.
const MAX_NAME_BYTES: u64 = 65_535;
/// Empty key, value type, one byte of value.
const MIN_PAIR_BYTES: usize = 8 + 4 + 1;
/// Empty name, count of dimensions, one dimension, element type, offset.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 8 + 4 + 8;

/// Where a tensor is and what it holds. Its bytes lie inside its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, unique in the whole set of files.
    pub name: String,
    /// Dimensions, **slowest first**: the last one's numbers lie side by side. One to four, none of them 0.
    pub shape: Vec<u64>,
    /// Element type; the last dimension is a multiple of its block length.
    pub quant_type: QuantType,
    /// First byte, counted from the start of its file. A multiple of the file's alignment, which may be as small as 1.
    pub offset: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Which file of a split set, counted from 0.
    pub file_index: usize,
}

impl TensorInfo {
    /// Product of the dimensions.
    #[must_use]
    pub fn n_elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// First byte behind the tensor in its file.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// 2 or 3; they differ in nothing a little-endian reader sees.
    pub version: u32,
    /// What every tensor's offset from [`data_offset`](Self::data_offset) is a multiple of: a power of two.
    pub alignment: u32,
    /// Where tensor data begins, in bytes from the start of the file.
    pub data_offset: u64,
    /// The key-value pairs.
    pub metadata: Metadata,
    /// The tensors in the order of the directory, with file index 0.
    pub tensors: Vec<TensorInfo>,
}

/// Parses the header of a whole file's `bytes`; errors call the file `file_name`.
///
/// # Errors
/// [`GgufError`] for anything that is no sound GGUF file of version 2 or 3 with all tensors inside.
pub fn parse(bytes: &[u8], file_name: &str) -> Result<Header, GgufError> {
    check_magic(bytes, file_name)?;
    let mut cursor = Cursor::new(bytes, file_name);
    cursor.take(format_args!("magic"), 4)?;
    let version = read_version(&mut cursor, bytes.len() as u64)?;
    let n_tensors = cursor.u64(format_args!("tensor count"))?;
    let n_pairs = cursor.u64(format_args!("key count"))?;
    let metadata = read_metadata(&mut cursor, n_pairs)?;
    let alignment = alignment_of(&metadata)?;
    let entries = read_directory(&mut cursor, n_tensors, alignment)?;
    let data_offset = cursor.position().next_multiple_of(u64::from(alignment));
    let tensors = place_tensors(entries, data_offset, bytes.len() as u64, file_name)?;
    check_overlap(&tensors, file_name)?;
    Ok(Header { version, alignment, data_offset, metadata, tensors })
}

/// Refuses what is no GGUF by saying what it is. A cut magic passes, to be reported as truncated.
fn check_magic(bytes: &[u8], file_name: &str) -> Result<(), GgufError> {
    if bytes.is_empty() {
        return Err(GgufError::Empty { file: file_name.to_owned() });
    }
    if bytes.starts_with(MAGIC) || MAGIC.starts_with(bytes) {
        return Ok(());
    }
    Err(GgufError::NotGguf { file: file_name.to_owned(), format: ForeignFormat::recognise(bytes), file_bytes: bytes.len() as u64 })
}

fn read_version(cursor: &mut Cursor<'_>, file_bytes: u64) -> Result<u32, GgufError> {
    let version = cursor.u32(format_args!("version"))?;
    let file = cursor.file().to_owned();
    match version {
        2 | 3 => Ok(version),
        0 => Err(GgufError::UnknownVersion { file, version }),
        1 => Err(GgufError::OldVersion { file, version }),
        // The magic is four bytes, the same in both orders; the version is what shows the order.
        _ if version.trailing_zeros() >= 16 => {
            let format = ForeignFormat::BigEndianGguf(version.swap_bytes());
            Err(GgufError::NotGguf { file, format, file_bytes })
        }
        _ => Err(GgufError::UnknownVersion { file, version }),
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, n_pairs: u64) -> Result<Metadata, GgufError> {
    cursor.check_count(format_args!("{n_pairs} keys"), n_pairs, MIN_PAIR_BYTES)?;
    let mut values = BTreeMap::new();
    for index in 0..n_pairs {
        let key = cursor.string(format_args!("key {index}"), MAX_NAME_BYTES)?;
        let value = read_value(cursor, key)?;
        if values.insert(key.to_owned(), value).is_some() {
            return Err(GgufError::DuplicateKey { file: cursor.file().to_owned(), key: shown(key), index });
        }
    }
    Ok(Metadata::new(cursor.file(), values))
}

fn read_value(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, GgufError> {
    let name = shown(key);
    let value_type = read_value_type(cursor, format_args!("key {name:?}"))?;
    let field = format_args!("value of key {name:?}");
    Ok(match value_type {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(field)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(field)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(field)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(field)?)),
        ValueType::U32 => Value::U32(cursor.u32(field)?),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(field)?)),
        ValueType::U64 => Value::U64(cursor.u64(field)?),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(field)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(field)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(field)?)),
        ValueType::Bool => {
            let [byte] = cursor.array(field)?;
            Value::Bool(read_bool(cursor.file(), field, byte)?)
        }
        ValueType::String => Value::String(cursor.string(field, u64::MAX)?.to_owned()),
        ValueType::Array => Value::Array(read_array(cursor, &name)?),
    })
}

fn read_value_type(cursor: &mut Cursor<'_>, field: std::fmt::Arguments<'_>) -> Result<ValueType, GgufError> {
    let id = cursor.u32(format_args!("value type of {field}"))?;
    let unknown = || GgufError::UnknownValueType { file: cursor.file().to_owned(), field: field.to_string(), id };
    ValueType::from_id(id).ok_or_else(unknown)
}

fn read_bool(file: &str, field: std::fmt::Arguments<'_>, found: u8) -> Result<bool, GgufError> {
    match found {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(GgufError::BadBool { file: file.to_owned(), field: field.to_string(), found }),
    }
}

fn read_array(cursor: &mut Cursor<'_>, name: &str) -> Result<Array, GgufError> {
    let value_type = read_value_type(cursor, format_args!("the elements of key {name:?}"))?;
    let count = cursor.u64(format_args!("length of array {name:?}"))?;
    Ok(match value_type {
        ValueType::U8 => Array::U8(read_numbers(cursor, name, count, u8::from_le_bytes)?),
        ValueType::I8 => Array::I8(read_numbers(cursor, name, count, i8::from_le_bytes)?),
        ValueType::U16 => Array::U16(read_numbers(cursor, name, count, u16::from_le_bytes)?),
        ValueType::I16 => Array::I16(read_numbers(cursor, name, count, i16::from_le_bytes)?),
        ValueType::U32 => Array::U32(read_numbers(cursor, name, count, u32::from_le_bytes)?),
        ValueType::I32 => Array::I32(read_numbers(cursor, name, count, i32::from_le_bytes)?),
        ValueType::U64 => Array::U64(read_numbers(cursor, name, count, u64::from_le_bytes)?),
        ValueType::I64 => Array::I64(read_numbers(cursor, name, count, i64::from_le_bytes)?),
        ValueType::F32 => Array::F32(read_numbers(cursor, name, count, f32::from_le_bytes)?),
        ValueType::F64 => Array::F64(read_numbers(cursor, name, count, f64::from_le_bytes)?),
        ValueType::Bool => Array::Bool(read_bools(cursor, name, count)?),
        ValueType::String => Array::String(read_strings(cursor, name, count)?),
        ValueType::Array => return Err(GgufError::NestedArray { file: cursor.file().to_owned(), key: name.to_owned(), count }),
    })
}

fn read_numbers<T, const N: usize>(
    cursor: &mut Cursor<'_>,
    name: &str,
    count: u64,
    from_bytes: fn([u8; N]) -> T,
) -> Result<Vec<T>, GgufError> {
    let taken = cursor.take(format_args!("array {name:?} of {count} values"), count.saturating_mul(N as u64))?;
    let (values, _) = taken.as_chunks::<N>();
    Ok(values.iter().map(|&value| from_bytes(value)).collect())
}

fn read_bools(cursor: &mut Cursor<'_>, name: &str, count: u64) -> Result<Vec<bool>, GgufError> {
    let taken = cursor.take(format_args!("array {name:?} of {count} values"), count)?;
    let read = |(index, &byte)| read_bool(cursor.file(), format_args!("value {index} of key {name:?}"), byte);
    taken.iter().enumerate().map(read).collect()
}

fn read_strings(cursor: &mut Cursor<'_>, name: &str, count: u64) -> Result<Vec<String>, GgufError> {
    // The shortest string is its length alone; the claim is bounded by that before room is made for it.
    let capacity = cursor.check_count(format_args!("array {name:?} of {count} strings"), count, 8)?;
    let mut strings = Vec::with_capacity(capacity);
    for index in 0..count {
        strings.push(cursor.string(format_args!("string {index} of key {name:?}"), u64::MAX)?.to_owned());
    }
    Ok(strings)
}

fn alignment_of(metadata: &Metadata) -> Result<u32, GgufError> {
    let found = metadata.u32_opt(ALIGNMENT_KEY)?.unwrap_or(DEFAULT_ALIGNMENT);
    if found.is_power_of_two() { Ok(found) } else { Err(GgufError::BadAlignment { file: metadata.file().to_owned(), found }) }
}

/// Directory entries; their `offset` is still relative to the start of data.
fn read_directory(cursor: &mut Cursor<'_>, n_tensors: u64, alignment: u32) -> Result<Vec<TensorInfo>, GgufError> {
    let capacity = cursor.check_count(format_args!("directory of {n_tensors} tensors"), n_tensors, MIN_ENTRY_BYTES)?;
    let mut entries = Vec::with_capacity(capacity);
    let mut names = HashSet::with_capacity(capacity);
    for index in 0..n_tensors {
        let name = cursor.string(format_args!("name of tensor {index}"), MAX_NAME_BYTES)?;
        if !names.insert(name) {
            return Err(GgufError::DuplicateTensor { file: cursor.file().to_owned(), tensor: shown(name), index });
        }
        entries.push(read_entry(cursor, name, alignment)?);
    }
    Ok(entries)
}

fn read_entry(cursor: &mut Cursor<'_>, name: &str, alignment: u32) -> Result<TensorInfo, GgufError> {
    let (file, tensor) = (cursor.file(), shown(name));
    let mut shape = read_dimensions(cursor, &tensor)?;
    let id = cursor.u32(format_args!("element type of tensor {tensor:?}"))?;
    let offset = cursor.u64(format_args!("offset of tensor {tensor:?}"))?;
    let Some(quant_type) = QuantType::from_ggml_id(id) else {
        return Err(GgufError::UnsupportedType { file: file.to_owned(), tensor, id, type_name: unsupported_name(id) });
    };
    let bytes = size_of_tensor(file, &tensor, &shape, quant_type)?;
    if !offset.is_multiple_of(u64::from(alignment)) {
        return Err(GgufError::Misaligned { file: file.to_owned(), tensor, offset, alignment });
    }
    shape.reverse(); // the one place where GGUF's order is turned round
    Ok(TensorInfo { name: name.to_owned(), shape, quant_type, offset, bytes, file_index: 0 })
}

/// The dimensions in the file's order, fastest first.
fn read_dimensions(cursor: &mut Cursor<'_>, tensor: &str) -> Result<Vec<u64>, GgufError> {
    let found = cursor.u32(format_args!("dimension count of tensor {tensor:?}"))?;
    if !(1..=MAX_DIMENSIONS).contains(&found) {
        return Err(GgufError::DimensionCount { file: cursor.file().to_owned(), tensor: tensor.to_owned(), found });
    }
    let mut dimensions = Vec::with_capacity(4);
    for dimension in 0..found {
        let length = cursor.u64(format_args!("dimension {dimension} of tensor {tensor:?}"))?;
        if length == 0 {
            return Err(GgufError::ZeroDimension { file: cursor.file().to_owned(), tensor: tensor.to_owned(), dimension });
        }
        dimensions.push(length);
    }
    Ok(dimensions)
}

/// Bytes of a tensor whose dimensions are fastest first.
fn size_of_tensor(file: &str, tensor: &str, dimensions: &[u64], quant_type: QuantType) -> Result<u64, GgufError> {
    let (file, tensor) = (file.to_owned(), tensor.to_owned());
    let (row_len, block_len) = (dimensions[0], quant_type.block_len());
    if !row_len.is_multiple_of(block_len as u64) {
        return Err(GgufError::PartialBlock { file, tensor, row_len, type_name: quant_type.to_string(), block_len });
    }
    let n_elements = dimensions.iter().try_fold(1u64, |product, &length| product.checked_mul(length));
    let overflow = || GgufError::DimensionOverflow { file, tensor, dimensions: dimensions.to_vec() };
    n_elements.and_then(|count| quant_type.bytes_for(count)).ok_or_else(overflow)
}

/// What a type number means that this engine does not read.
fn unsupported_name(id: u32) -> &'static str {
    match id {
        4 | 5 => "Q4_2 or Q4_3, removed from the format",
        9 => "Q8_1, only for intermediate results",
        15 => "Q8_K, only for intermediate results",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        31..=33 => "Q4_0 interleaved for ARM, removed from the format",
        34 => "TQ1_0, ternary",
        35 => "TQ2_0, ternary",
        36..=38 => "IQ4_NL interleaved for ARM, removed from the format",
        40 => "NVFP4, 4-bit floats with factors outside the tensor",
        41 => "Q1_0, one bit a weight",
        _ => "unknown to this program",
    }
}

/// Makes offsets absolute and checks that every tensor ends inside the file. The one that ends last is reported: its missing bytes
/// are those of the file.
fn place_tensors(mut entries: Vec<TensorInfo>, data_offset: u64, file_bytes: u64, file_name: &str) -> Result<Vec<TensorInfo>, GgufError> {
    let end_of = |entry: &TensorInfo| u128::from(data_offset) + u128::from(entry.offset) + u128::from(entry.bytes);
    if let Some(last) = entries.iter().max_by_key(|entry| end_of(entry))
        && let Some(missing) = end_of(last).checked_sub(u128::from(file_bytes) + 1)
    {
        return Err(GgufError::TensorOutside {
            file: file_name.to_owned(),
            tensor: shown(&last.name),
            offset: u128::from(data_offset) + u128::from(last.offset),
            bytes: last.bytes,
            file_bytes,
            missing: missing + 1,
        });
    }
    for entry in &mut entries {
        entry.offset += data_offset; // no overflow: the end lies inside the file
    }
    Ok(entries)
}

fn check_overlap(tensors: &[TensorInfo], file_name: &str) -> Result<(), GgufError> {
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_by_key(|tensor| tensor.offset);
    for pair in by_offset.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if second.offset < first.end() {
            return Err(GgufError::Overlap {
                file: file_name.to_owned(),
                first: shown(&first.name),
                first_end: first.end(),
                second: shown(&second.name),
                second_offset: second.offset,
            });
        }
    }
    Ok(())
}
