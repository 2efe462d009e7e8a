//! Goal: no GGUF file, however damaged or forged, does more than be refused with a message that helps. Method: files are built byte by
//! byte, each with one fault; the refusal must be the right variant, name the file, the place and the number, and must have taken
//! little memory. Sound files at the edges of the format must pass.

#[allow(unused_macros, unused_imports, reason = "shared with the fuzz test")]
mod gguf_bytes;

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use ebbtide::gguf::{ForeignFormat, GgufError, GgufFile, parse};
use ebbtide::quant::QuantType;
use gguf_bytes::*;

const MEMORY_LIMIT: usize = 64 << 20;

/// Counts the bytes that are allocated and the most there ever were.
struct CountingAllocator;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to `System` unchanged, so its guarantees hold; the counters touch no allocated memory.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract, which is also that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `pointer` came from `System` through `alloc` above, with the same layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Parses `bytes`, which must be refused with little memory and a message that has the file's name and all `wanted` parts.
fn refused(bytes: &[u8], wanted: &[&str]) -> GgufError {
    let before = ALLOCATED.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let error = parse(bytes, "hostile.gguf").expect_err("a hostile file must be refused");
    let taken = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    assert!(taken < MEMORY_LIMIT, "{taken} bytes taken for {error}");
    assert_says(&error, "hostile.gguf: ", wanted);
    error
}

fn assert_says(error: &GgufError, file: &str, wanted: &[&str]) {
    let message = error.to_string();
    for part in wanted.iter().chain([&file]) {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

macro_rules! assert_variant {
    ($error:expr, $pattern:pat) => {
        let error = $error;
        assert!(matches!(error, $pattern), "wrong variant: {error:?}");
    };
}

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gguf-hostile-{name}"));
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap();
    }
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn asset() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/bard-qwen3moe-9m-IQ4_NL.gguf")
}

// Sound files.

#[test]
fn the_smallest_file_and_both_versions_pass() {
    for version in [2, 3] {
        let mut bytes = smallest();
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(version));
        let header = parse(&bytes, "sound.gguf").unwrap();
        assert_eq!((header.version, header.alignment, header.data_offset), (version, 32, bytes.len() as u64 - 128));
        assert_eq!(header.metadata.string("general.architecture").unwrap(), "llama");
        let tensor = &header.tensors[0];
        assert_eq!((tensor.name.as_str(), tensor.shape.as_slice(), tensor.quant_type), ("t", &[32][..], QuantType::F32));
        assert_eq!((tensor.offset, tensor.bytes), (header.data_offset, 128));
    }
}

#[test]
fn alignments_from_one_to_a_mebibyte_pass() {
    for alignment in [1, 64, 1 << 20] {
        let bytes = with_alignment(alignment);
        let header = parse(&bytes, "sound.gguf").unwrap();
        assert_eq!(header.alignment, alignment);
        assert_eq!(header.tensors[0].end(), bytes.len() as u64);
    }
}

#[test]
fn every_value_type_is_read_and_shapes_are_slowest_first() {
    let header = parse(&with_everything(), "sound.gguf").unwrap();
    let metadata = &header.metadata;
    assert_eq!(metadata.len(), 24);
    assert_eq!(metadata.u32("t.u8").unwrap(), 200);
    assert_eq!(metadata.i32("t.i8").unwrap(), -1);
    assert_eq!(metadata.u64("t.u16").unwrap(), 60_000);
    assert_eq!(metadata.i32("t.i16").unwrap(), -2);
    assert_eq!(metadata.u32("t.u32").unwrap(), 4_000_000_000);
    assert_eq!(metadata.i32("t.i32").unwrap(), -3);
    assert_eq!(metadata.u64("t.u64").unwrap(), 1 << 40);
    assert_eq!(metadata.i32("t.i64").unwrap(), -4);
    assert_eq!((metadata.f32("t.f32").unwrap(), metadata.f32("t.f64").unwrap()), (1.5, 2.5));
    assert!(metadata.bool("t.bool").unwrap());
    assert_eq!(metadata.string("t.string").unwrap(), "wörter");
    assert_eq!(metadata.string_array("t.strings").unwrap(), ["a", "", "ccc"]);
    assert_eq!(metadata.u32_array("t.array.0").unwrap(), [1, 1, 1]);
    assert_eq!(metadata.u64_array("t.array.11").unwrap(), [0x0101_0101_0101_0101; 3]);
    assert_eq!(metadata.f32_array("t.array.6").unwrap(), [f32::from_bits(0x0101_0101); 3]);

    let shapes: Vec<_> = header.tensors.iter().map(|tensor| (tensor.shape.as_slice(), tensor.bytes, tensor.n_elements())).collect();
    assert_eq!(shapes, [(&[8][..], 32, 8), (&[2, 4], 16, 8), (&[3, 32], 102, 96), (&[2, 1, 1, 256], 288, 512)]);
    assert_eq!(header.tensors[3].quant_type, QuantType::Q4_K);
}

#[test]
fn the_bundled_model_opens_and_its_sizes_add_up() {
    let model = GgufFile::open(asset()).unwrap();
    assert_eq!(model.metadata().u32("qwen3moe.block_count").unwrap(), 4);
    assert_eq!(model.tensors().len(), 51);
    let names: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert!(names.contains(&"token_embd.weight") && names.contains(&"blk.3.ffn_down_exps.weight"), "{names:?}");
    // Data begins at 129,824, as an independent reader has it; each tensor is padded to 32 bytes and the last one ends the file.
    let padded: u64 = model.tensors().iter().map(|tensor| tensor.bytes.next_multiple_of(32)).sum();
    assert_eq!(129_824 + padded, model.file_bytes());
    let last = model.tensor("blk.3.ffn_down_exps.weight").unwrap();
    assert_eq!((last.offset, last.bytes, last.end()), (6_123_296, 294_912, 6_418_208));
    for tensor in model.tensors() {
        assert_eq!(model.tensor_data(tensor).len() as u64, tensor.bytes);
    }
}

// Dimensions that wrap.

#[test]
fn a_dimension_product_beyond_64_bits_is_refused() {
    for dimensions in [[1 << 63, 2], [(1 << 42) + 1, 1 << 22], [1 << 32, 1 << 32], [u64::MAX, 2], [1 << 62, 1]] {
        let bytes = file(bytes![head(1, 1), architecture(), entry("wide", &dimensions, 0, 0)]);
        assert_variant!(refused(&bytes, &["\"wide\"", &dimensions[0].to_string()]), GgufError::DimensionOverflow { .. });
    }
}

#[test]
fn ranks_zero_lengths_and_partial_blocks_are_refused() {
    let with = |dimensions: &[u64], element_type| file(bytes![head(1, 1), architecture(), entry("odd", dimensions, element_type, 0)]);
    assert_variant!(refused(&with(&[], 0), &["\"odd\"", "0 dimensions"]), GgufError::DimensionCount { found: 0, .. });
    assert_variant!(refused(&with(&[1; 5], 0), &["\"odd\"", "5 dimensions"]), GgufError::DimensionCount { found: 5, .. });
    assert_variant!(refused(&with(&[4, 0], 0), &["\"odd\"", "dimension 1"]), GgufError::ZeroDimension { dimension: 1, .. });
    assert_variant!(refused(&with(&[33, 2], 20), &["\"odd\"", "33", "IQ4_NL", "32"]), GgufError::PartialBlock { row_len: 33, .. });
}

#[test]
fn an_element_type_that_is_not_supported_is_named() {
    for (id, name) in [(40, "NVFP4"), (24, "I8"), (34, "TQ1_0"), (4, "removed"), (99, "unknown"), (u32::MAX, "unknown")] {
        let bytes = file(bytes![head(1, 1), architecture(), entry("t", &[256], id, 0)]);
        assert_variant!(refused(&bytes, &["\"t\"", &id.to_string(), name]), GgufError::UnsupportedType { .. });
    }
}

// Lengths and counts that ask for gigabytes.

#[test]
fn lengths_and_counts_beyond_the_file_are_refused_before_memory_is_taken() {
    let count_of = |element_type, count| bytes![head(0, 1), pair_array("list", element_type, count, &[])];
    let claims: [(&str, Vec<u8>, &[&str]); 9] = [
        ("key", bytes![head(0, 1), (1u64 << 63).to_le_bytes(), [0; 32]], &["key 0", "9223372036854775808"]),
        ("string", bytes![head(0, 1), pair("text", STRING, &(1u64 << 40).to_le_bytes())], &["\"text\"", "1099511627776", "byte 48"]),
        ("bytes", count_of(U8, 1 << 62), &["\"list\"", "4611686018427387904"]),
        ("numbers", count_of(U64, 1 << 62), &["\"list\"", "4611686018427387904"]),
        ("truth values", count_of(BOOL, 1 << 40), &["\"list\"", "1099511627776"]),
        ("strings", count_of(STRING, 1 << 40), &["\"list\"", "1099511627776", "8796093022208"]),
        ("pairs", bytes![head(0, 1 << 60), [0; 64]], &["1152921504606846976 keys"]),
        ("tensors", file(bytes![head(1 << 60, 1), architecture()]), &["1152921504606846976 tensors"]),
        ("name", file(bytes![head(1, 0), (1u64 << 50).to_le_bytes()]), &["name of tensor 0", "1125899906842624"]),
    ];
    for (what, bytes, wanted) in claims {
        let error = refused(&bytes, wanted);
        assert!(matches!(error, GgufError::Truncated { .. }), "{what}: {error:?}");
    }
}

#[test]
fn a_key_longer_than_the_format_allows_is_refused() {
    let bytes = file(bytes![head(0, 1), pair_u32(&"k".repeat(70_000), 1)]);
    assert_variant!(refused(&bytes, &["key 0", "70000", "65535"]), GgufError::NameTooLong { .. });
}

#[test]
fn a_hostile_name_reaches_neither_the_terminal_nor_fills_the_message() {
    let name = format!("\u{1b}[2J{}", "é".repeat(10_000));
    let bytes = file(bytes![head(1, 0), entry(&name, &[0], 0, 0)]);
    let message = refused(&bytes, &["\\u{1b}[2J"]).to_string();
    assert!(message.len() < 500 && !message.contains('\u{1b}'), "{message}");
}

// Value types.

#[test]
fn arrays_of_arrays_are_refused_however_deep() {
    let inner = bytes![ARRAY.to_le_bytes(), 1u64.to_le_bytes()].repeat(100_000);
    let bytes = bytes![head(0, 1), string(b"deep"), ARRAY.to_le_bytes(), inner];
    assert_variant!(refused(&bytes, &["\"deep\"", "array of 1 arrays"]), GgufError::NestedArray { count: 1, .. });
}

#[test]
fn unknown_value_types_are_refused() {
    for id in [13, 255, u32::MAX] {
        let scalar = bytes![head(0, 1), pair("odd", id, &[0; 16])];
        assert_variant!(refused(&scalar, &["\"odd\"", &id.to_string()]), GgufError::UnknownValueType { .. });
        let array = bytes![head(0, 1), pair_array("odd", id, 1, &[0; 16])];
        assert_variant!(refused(&array, &["elements of key \"odd\"", &id.to_string()]), GgufError::UnknownValueType { .. });
    }
}

#[test]
fn bools_beyond_one_bad_text_and_duplicate_names_are_refused() {
    let bad_bool = bytes![head(0, 1), pair("flag", BOOL, &[2])];
    assert_variant!(refused(&bad_bool, &["\"flag\"", "2"]), GgufError::BadBool { found: 2, .. });
    let in_array = bytes![head(0, 1), pair_array("flags", BOOL, 3, &[0, 1, 7])];
    assert_variant!(refused(&in_array, &["value 2 of key \"flags\"", "7"]), GgufError::BadBool { found: 7, .. });
    let bad_text = bytes![head(0, 1), pair("text", STRING, &string(b"ab\xff"))];
    assert_variant!(refused(&bad_text, &["\"text\"", "byte 48", "number 2"]), GgufError::NotUtf8 { bad_byte: 2, .. });
    let twice = bytes![head(0, 2), pair_u32("k", 1), pair_u32("k", 2)];
    assert_variant!(refused(&twice, &["\"k\"", "number 1"]), GgufError::DuplicateKey { index: 1, .. });
    let tensors = file(bytes![head(2, 0), entry("t", &[8], 0, 0), entry("t", &[8], 0, 32)]);
    assert_variant!(refused(&tensors, &["\"t\"", "number 1"]), GgufError::DuplicateTensor { index: 1, .. });
}

#[test]
fn alignments_that_are_no_power_of_two_are_refused() {
    for alignment in [0, 3, 48] {
        let bytes = file(bytes![head(0, 1), pair_u32("general.alignment", alignment)]);
        assert_variant!(refused(&bytes, &["general.alignment", &alignment.to_string()]), GgufError::BadAlignment { .. });
    }
    let text = file(bytes![head(0, 1), pair_string("general.alignment", "32")]);
    assert_variant!(refused(&text, &["general.alignment", "the string \"32\""]), GgufError::WrongType { .. });
}

#[test]
fn a_right_key_with_a_wrong_type_is_an_error_that_names_both_types() {
    let pairs = [
        pair_string("llama.context_length", "4096"),
        pair("tokenizer.ggml.token_type", ARRAY, &bytes![U8.to_le_bytes(), 3u64.to_le_bytes(), [1, 3, 6]]),
        pair_array("types.i64", I64, 2, &bytes![1i64.to_le_bytes(), (1i64 << 40).to_le_bytes()]),
        pair("tokenizer.ggml.eos_token_id", U64, &(1u64 << 35).to_le_bytes()),
        pair("negative", I32, &(-1i32).to_le_bytes()),
        pair_array("per_layer", U32, 2, &bytes![7u32.to_le_bytes(), 9u32.to_le_bytes()]),
        pair_u32("number", u32::MAX),
    ];
    let metadata = parse(&file(bytes![head(0, 7), pairs.concat()]), "odd.gguf").unwrap().metadata;
    let check = |error: GgufError, wanted: &[&str]| {
        assert_says(&error, "odd.gguf: ", wanted);
        error
    };

    let error = check(metadata.u32("llama.context_length").unwrap_err(), &["llama.context_length", "the string \"4096\"", "an integer"]);
    assert_variant!(error, GgufError::WrongType { .. });
    assert!(metadata.u32_opt("llama.context_length").is_err(), "a wrong type is no absence");
    assert_eq!(metadata.i32_array("tokenizer.ggml.token_type").unwrap(), [1, 3, 6]);
    let error = check(metadata.i32_array("types.i64").unwrap_err(), &["types.i64", "value 1", "1099511627776"]);
    assert_variant!(error, GgufError::OutOfRange { index: Some(1), .. });
    let error = check(metadata.string_array("types.i64").unwrap_err(), &["types.i64", "an array of 2 i64", "strings"]);
    assert_variant!(error, GgufError::WrongType { .. });
    let error = check(metadata.u32("tokenizer.ggml.eos_token_id").unwrap_err(), &["eos_token_id", "34359738368"]);
    assert_variant!(error, GgufError::OutOfRange { index: None, .. });
    assert_variant!(check(metadata.u64("negative").unwrap_err(), &["negative", "-1"]), GgufError::OutOfRange { found: -1, .. });
    assert_variant!(check(metadata.f32("negative").unwrap_err(), &["negative", "-1", "floating"]), GgufError::WrongType { .. });
    let error = check(metadata.u32("llama.vocab_size").unwrap_err(), &["llama.vocab_size", "missing"]);
    assert_variant!(error, GgufError::MissingKey { .. });
    assert_eq!(metadata.u32_opt("llama.vocab_size").unwrap(), None);

    let layers = metadata.per_layer_u32("per_layer", 2).unwrap();
    assert_eq!((layers.get(0), layers.get(1), layers.get(2), layers.uniform(), layers.max()), (Some(7), Some(9), None, None, Some(9)));
    let error = check(metadata.per_layer_u32("per_layer", 3).unwrap_err(), &["per_layer", "2 values", "3 layers"]);
    assert_variant!(error, GgufError::LayerCount { found: 2, n_layer: 3, .. });
    let same = metadata.per_layer_u32("number", u32::MAX).unwrap();
    assert_eq!((same.get(u32::MAX - 1), same.get(u32::MAX), same.uniform()), (Some(u32::MAX), None, Some(u32::MAX)));
}

// Offsets.

#[test]
fn offsets_outside_misaligned_or_shared_are_refused() {
    let with = |offset| file(bytes![head(1, 1), architecture(), entry("t", &[32], 0, offset)]);
    let file_bytes = with(0).len() as u64;
    assert!(file_bytes.is_multiple_of(32));
    for offset in [u64::MAX - 31, file_bytes, 128, 32] {
        let missing = (u128::from(offset)).to_string();
        let sum = (u128::from(file_bytes) - 128 + u128::from(offset)).to_string();
        assert_variant!(refused(&with(offset), &["\"t\"", &sum, &missing, "download it again"]), GgufError::TensorOutside { .. });
    }
    for offset in [file_bytes - 1, 1] {
        assert_variant!(refused(&with(offset), &["\"t\"", &offset.to_string(), "32"]), GgufError::Misaligned { .. });
    }
    let both = file(bytes![head(2, 1), architecture(), entry("a", &[8], 0, 0), entry("b", &[8], 0, 0)]);
    assert_variant!(refused(&both, &["\"a\"", "\"b\""]), GgufError::Overlap { .. });
    let partly = file(bytes![head(2, 1), architecture(), entry("late", &[8], 0, 32), entry("early", &[16], 0, 0)]);
    assert_variant!(refused(&partly, &["\"late\" at byte", "\"early\", which ends at"]), GgufError::Overlap { .. });
}

// Damaged files.

#[test]
fn a_cut_file_says_how_much_is_missing() {
    let folder = folder("cut");
    let whole = fs::read(asset()).unwrap();
    let path = folder.join("cut.gguf");
    let file = path.display().to_string();
    let cases: [(usize, &[&str]); 5] = [
        (whole.len() - 1, &["\"blk.3.ffn_down_exps.weight\"", ": 1 bytes are missing", "download it again"]),
        (1_000_000, &["5418208 bytes are missing", "download it again"]),
        (4096, &["\"tokenizer.ggml.tokens\"", "at least", "bytes are missing", "download it again"]),
        (20, &["key count at byte 16 needs 8 bytes but 4 are left", "download it again"]),
        (3, &["magic at byte 0 needs 4 bytes but 3 are left", "download it again"]),
    ];
    for (length, wanted) in cases {
        fs::write(&path, &whole[..length]).unwrap();
        let error = GgufFile::open(&path).unwrap_err();
        assert_says(&error, &file, wanted);
        assert!(matches!(error, GgufError::Truncated { .. } | GgufError::TensorOutside { .. }), "{error:?}");
    }
    fs::write(&path, b"").unwrap();
    let error = GgufFile::open(&path).unwrap_err();
    assert_says(&error, &file, &["empty", "0 bytes", "download it again"]);
    assert_variant!(error, GgufError::Empty { .. });
}

#[test]
fn every_cut_of_a_small_file_is_refused() {
    let whole = with_everything();
    for length in 0..whole.len() {
        assert!(parse(&whole[..length], "cut.gguf").is_err(), "cut to {length} of {}", whole.len());
    }
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = folder("no-file");
    let error = GgufFile::open(&folder).unwrap_err();
    assert_says(&error, &folder.display().to_string(), &["0 files", ".gguf"]);
    assert_variant!(error, GgufError::EmptyFolder { .. });
    let error = GgufFile::open(folder.join("absent.gguf")).unwrap_err();
    assert_says(&error, "absent.gguf", &["cannot open it"]);
    assert_variant!(error, GgufError::Io { .. });
    #[cfg(unix)]
    assert_variant!(GgufFile::open("/dev/null").unwrap_err(), GgufError::NotAFile { .. });
}

// Files of other kinds.

#[test]
fn other_formats_are_recognised() {
    let safetensors = bytes![64u64.to_le_bytes(), b"{\"a\":{}}", [b' '; 56]];
    let cases: [(&[u8], ForeignFormat, &str); 13] = [
        (b"<!DOCTYPE html><html>", ForeignFormat::Html, "HTML web page"),
        (b"\xef\xbb\xbf \r\n<HTML lang=\"\xc3\xa9\">", ForeignFormat::Html, "HTML web page"),
        (b"<?xml version=\"1.0\"?><Error>", ForeignFormat::Xml, "XML"),
        (b"{\"error\":\"Repository not found\"}", ForeignFormat::Json, "JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", ForeignFormat::GitLfsPointer, "Git LFS pointer"),
        (&safetensors, ForeignFormat::Safetensors, "safetensors"),
        (b"PK\x03\x04\x14\0", ForeignFormat::Zip, "zip"),
        (b"\x1f\x8b\x08\0", ForeignFormat::Archive, "archive"),
        (b"ggjt\x03\0\0\0", ForeignFormat::OldGgml(*b"ggjt"), "\"ggjt\""),
        (b"tjgg\x03\0\0\0", ForeignFormat::OldGgml(*b"ggjt"), "\"ggjt\""),
        (b"lmgg\0\0\0\0", ForeignFormat::OldGgml(*b"ggml"), "\"ggml\""),
        (b"GGUF\0\0\0\x03\0\0\0\0", ForeignFormat::BigEndianGguf(3), "big-endian GGUF file (version 3)"),
        (b"\x7fELF", ForeignFormat::Unknown(*b"\x7fELF"), "[7f, 45, 4c, 46]"),
    ];
    for (bytes, wanted, part) in cases {
        let error = refused(bytes, &[part, &format!("({} bytes)", bytes.len())]);
        let GgufError::NotGguf { format, .. } = error else { panic!("wrong variant: {error:?}") };
        assert_eq!(format, wanted);
    }
}

#[test]
fn other_versions_are_named() {
    let old = head_of_version(1, 0, 0);
    assert_variant!(refused(&old, &["version 1 is too old", "newer conversion"]), GgufError::OldVersion { version: 1, .. });
    let new = head_of_version(4, 0, 0);
    assert_variant!(refused(&new, &["version 4"]), GgufError::UnknownVersion { version: 4, .. });
}

// Split sets.

fn write_set(name: &str) -> PathBuf {
    let folder = folder(name);
    for number in 1..=3 {
        fs::write(shard_path(&folder, number), shard(number, 3, 3)).unwrap();
    }
    folder
}

fn shard_path(folder: &Path, number: u16) -> PathBuf {
    folder.join(format!("m-{number:05}-of-00003.gguf"))
}

#[test]
fn any_shard_or_the_folder_opens_the_set() {
    let folder = write_set("set");
    for path in [folder.clone(), shard_path(&folder, 1), shard_path(&folder, 2), shard_path(&folder, 3)] {
        let model = GgufFile::open(&path).unwrap();
        assert_eq!(model.metadata().string("general.architecture").unwrap(), "llama");
        assert_eq!(model.paths(), [1, 2, 3].map(|number| shard_path(&folder, number)));
        for (index, tensor) in model.tensors().iter().enumerate() {
            assert_eq!((tensor.name.clone(), tensor.file_index), (format!("t{}", index + 1), index));
            let wanted = u8::try_from(index + 1).unwrap();
            assert!(model.tensor_data(tensor).iter().all(|&byte| byte == wanted));
            assert_eq!(model.file_map(index).unwrap().bytes(), tensor.end());
        }
        assert!(model.file_map(3).is_none());
    }
}

#[test]
fn a_missing_shard_is_named() {
    let folder = write_set("missing");
    fs::remove_file(shard_path(&folder, 2)).unwrap();
    for path in [folder.clone(), shard_path(&folder, 3)] {
        let error = GgufFile::open(path).unwrap_err();
        assert_says(&error, "m-00002-of-00003.gguf", &["shard 2 of 3 is missing"]);
        assert_variant!(error, GgufError::MissingShard { number: 2, count: 3, .. });
    }
}

#[test]
fn a_shard_under_anothers_name_is_refused() {
    let folder = write_set("renamed");
    fs::copy(shard_path(&folder, 1), shard_path(&folder, 2)).unwrap();
    let error = GgufFile::open(&folder).unwrap_err();
    assert_says(&error, "m-00002-of-00003.gguf", &["split.no", "0", "1"]);
    assert_variant!(error, GgufError::ShardMismatch { key: "split.no", found: 0, wanted: 1, .. });

    let lone = folder.join("lone.gguf");
    fs::copy(shard_path(&folder, 3), &lone).unwrap();
    let error = GgufFile::open(&lone).unwrap_err();
    assert_says(&error, "lone.gguf", &["shard 3 of 3", "-00003-of-00003.gguf"]);
    assert_variant!(error, GgufError::RenamedShard { number: 3, count: 3, .. });
}

#[test]
fn mixed_and_extra_shards_are_refused() {
    let folder = write_set("mixed");
    fs::write(shard_path(&folder, 2), shard(2, 4, 3)).unwrap();
    let error = GgufFile::open(&folder).unwrap_err();
    assert_variant!(error, GgufError::ShardMismatch { key: "split.count", found: 4, wanted: 3, .. });
    fs::write(shard_path(&folder, 2), shard(2, 3, 9)).unwrap();
    let error = GgufFile::open(&folder).unwrap_err();
    assert_variant!(error, GgufError::ShardMismatch { key: "split.tensors.count", found: 9, wanted: 3, .. });
    let mut same_name = shard(2, 3, 3);
    let place = same_name.windows(2).position(|two| two == b"t2").unwrap();
    same_name[place + 1] = b'1';
    fs::write(shard_path(&folder, 2), same_name).unwrap();
    assert_variant!(GgufFile::open(&folder).unwrap_err(), GgufError::DuplicateTensor { .. });

    fs::write(shard_path(&folder, 4), shard(1, 3, 3)).unwrap();
    let error = GgufFile::open(&folder).unwrap_err();
    assert_says(&error, "m-00004-of-00003.gguf", &["number 4", "1 to 3"]);
    assert_variant!(error, GgufError::ShardNumber { number: 4, count: 3, .. });
    fs::remove_file(shard_path(&folder, 4)).unwrap();

    fs::write(folder.join("other.gguf"), smallest()).unwrap();
    let error = GgufFile::open(&folder).unwrap_err();
    assert_says(&error, &folder.display().to_string(), &["2 models", "m-00001-of-00003.gguf", "other.gguf"]);
    assert_variant!(error, GgufError::SeveralModels { count: 2, .. });
}
