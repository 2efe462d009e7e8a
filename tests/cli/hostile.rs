//! Model files that are damaged, forged or something else: exit code 3, the file's name, the number at fault, little memory.

use crate::common::engine::{TempFile, synthetic_file};
use crate::common::synthetic::Synthetic;
use crate::gguf_bytes::{architecture, bytes, entry, file, head, pair_array, string};
use crate::program::{BARD, BINARY, Call, ebbtide, file_of};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";
/// Address space of a child in KiB: the program, its threads and the file's map, and no gigabytes that a header claims.
const ADDRESS_SPACE_KIB: u32 = 2_000_000;

/// The call with a limit on memory.
fn bounded(line: &str) -> Call {
    Call::of("sh").arg("-c").arg(format!("ulimit -v {ADDRESS_SPACE_KIB}; exec {BINARY} {line}"))
}

fn name(file: &TempFile) -> String {
    file.0.file_name().expect("a file").to_string_lossy().into_owned()
}

/// The bytes are refused by every command that opens a model.
fn refused(case: &str, content: &[u8], parts: &[&str]) {
    let model = file_of(".gguf", content);
    let path = model.0.display();
    for line in [format!("plan -m {path}"), format!("run -m {path} -p x -n 1"), format!("tokenize -m {path} x")] {
        let ended = bounded(&line).refused(3, &[&name(&model)]);
        for part in parts {
            assert!(ended.stderr.contains(part), "{case}: {part:?} is not in: {}", ended.stderr);
        }
    }
}

#[test]
fn products_that_wrap_are_refused_with_the_tensor_s_name() {
    for dims in [[1 << 63, 2], [(1 << 42) + 1, 1 << 22], [1 << 32, 1 << 32], [u64::MAX, 2]] {
        refused("wrap", &file(bytes![head(1, 1), architecture(), entry("wrapping", &dims, 0, 0)]), &["wrapping"]);
    }
}

#[test]
fn lengths_that_no_file_has_take_no_memory() {
    refused("key length", &bytes![head(0, 1), (1u64 << 63).to_le_bytes(), [0; 64]], &["9223372036854775808"]);
    let long = bytes![string(b"k"), 8u32.to_le_bytes(), (1u64 << 40).to_le_bytes()];
    refused("string length", &bytes![head(0, 1), long], &["1099511627776"]);
    refused("array count", &bytes![head(0, 1), pair_array("k", 0, 1 << 62, &[])], &["4611686018427387904"]);
    refused("tensors", &bytes![head(1 << 60, 0)], &["1152921504606846976"]);
    refused("pairs", &bytes![head(0, 1 << 60)], &["1152921504606846976"]);
}

#[test]
fn nested_arrays_and_unknown_types_are_refused() {
    let nested: Vec<u8> = (0..100_000).flat_map(|_| bytes![9u32.to_le_bytes(), 1u64.to_le_bytes()]).collect();
    refused("nested", &bytes![head(0, 1), string(b"deep"), 9u32.to_le_bytes(), nested], &["deep"]);
    for id in [13, 255] {
        refused(
            "type",
            &bytes![head(0, 1), string(b"odd"), 9u32.to_le_bytes(), u32::to_le_bytes(id), 1u64.to_le_bytes()],
            &[&id.to_string()],
        );
    }
}

#[test]
fn tensors_outside_their_file_are_refused() {
    for offset in [u64::MAX - 31, 1 << 20, 128, 96 + 1, 1] {
        refused("offset", &file(bytes![head(1, 1), architecture(), entry("stray", &[32], 0, offset)]), &["stray", &offset.to_string()]);
    }
    let twice = bytes![entry("first", &[32], 0, 0), entry("second", &[32], 0, 0)];
    refused("overlap", &file(bytes![head(2, 1), architecture(), twice]), &["second"]);
}

#[test]
fn files_cut_short_are_refused_at_the_start() {
    let whole = std::fs::read(BARD).expect("bundled");
    for bytes_left in [3, 20, 4096, whole.len() - 1] {
        refused("cut", &whole[..bytes_left], &[]);
    }
    refused("empty", &[], &["empty"]);
}

#[test]
fn files_of_another_kind_are_called_by_their_name() {
    let kinds: [(&[u8], &str); 5] = [
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b"PK\x03\x04........................", "zip"),
        (b"GGUF\0\0\0\x03....................", "endian"),
        (b"GGUF\x01\0\0\0....................", "version 1"),
    ];
    for (content, kind) in kinds {
        refused(kind, content, &[kind]);
    }
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let missing = TempFile::new(".gguf");
    ebbtide(&format!("plan -m {}", missing.0.display())).refused(3, &[&name(&missing)]);
    ebbtide("plan -m /dev/null").refused(3, &["/dev/null"]);
    ebbtide("plan -m /dev/zero").refused(3, &["/dev/zero"]);
    ebbtide("plan -m").arg(std::env::temp_dir().join("no-such-folder/m.gguf")).refused(3, &["no-such-folder"]);
    ebbtide("plan -m").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).refused(3, &["src"]);
    #[cfg(unix)]
    {
        let pipe = TempFile::new(".gguf");
        assert!(std::process::Command::new("mkfifo").arg(&pipe.0).status().expect("mkfifo").success());
        ebbtide(&format!("plan -m {}", pipe.0.display())).refused(3, &[&name(&pipe)]);
    }
}

/// Where the value of `key` stands in a file, given the type that comes before it.
fn value_at(file: &[u8], key: &str, value_type: u32) -> usize {
    let wanted = bytes![string(key.as_bytes()), value_type.to_le_bytes()];
    let start = file.windows(wanted.len()).position(|window| window == wanted).unwrap_or_else(|| panic!("no {key}"));
    start + wanted.len()
}

/// Every key of the file with a 32-bit number of this type.
fn keys_of_type(file: &[u8], value_type: u32) -> Vec<String> {
    let prefixes = ["general.", "qwen3moe.", "tokenizer."];
    let mut keys = Vec::new();
    for start in 0..file.len().min(1 << 16) {
        let Some(length) = file[start..].first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)) else { break };
        let Some(text) =
            usize::try_from(length).ok().filter(|&length| length < 100).and_then(|length| file.get(start + 8..start + 8 + length))
        else {
            continue;
        };
        let Ok(text) = std::str::from_utf8(text) else { continue };
        let type_at = start + 8 + text.len();
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) && file[type_at..].starts_with(&value_type.to_le_bytes()) {
            keys.push(text.to_owned());
        }
    }
    keys
}

#[test]
fn wrong_numbers_in_metadata_are_refused_or_harmless() {
    let sound = Synthetic::from_args(MICRO).and_then(|model| model.file_bytes()).expect("sound arguments");
    let keys = keys_of_type(&sound, 4);
    assert!(keys.len() >= 10, "{keys:?}");
    for key in &keys {
        let place = value_at(&sound, key, 4);
        for value in [0u32, 1, 3, 1 << 31, u32::MAX] {
            let mut forged = sound.clone();
            forged[place..place + 4].copy_from_slice(&value.to_le_bytes());
            let model = file_of(".gguf", &forged);
            let ended = bounded(&format!("run -m {} --tokens 1,2,3 -n 1 --ctx 16 --vram-mib 64", model.0.display())).end();
            assert!([0, 3, 4].contains(&ended.code), "{key} = {value}: {} {}", ended.code, ended.stderr);
            if ended.code == 3 {
                assert!(ended.stderr.contains("error: "), "{key} = {value}: {}", ended.stderr);
            }
        }
    }
}

#[test]
fn numbers_that_cannot_be_name_their_key() {
    let sound = Synthetic::from_args(MICRO).and_then(|model| model.file_bytes()).expect("sound arguments");
    let cases = [
        ("tokenizer.ggml.eos_token_id", 1 << 31),
        ("qwen3moe.expert_used_count", 0),
        ("qwen3moe.expert_used_count", 9),
        ("qwen3moe.attention.head_count", 0),
        ("qwen3moe.block_count", 0),
        ("qwen3moe.context_length", 0),
    ];
    for (key, value) in cases {
        let place = value_at(&sound, key, 4);
        let mut forged = sound.clone();
        forged[place..place + 4].copy_from_slice(&u32::to_le_bytes(value));
        let model = file_of(".gguf", &forged);
        let ended = bounded(&format!("run -m {} --tokens 1,2 -n 1", model.0.display())).refused(3, &[]);
        let last = key.rsplit('.').next().expect("a name");
        assert!(ended.stderr.contains(last), "{key} = {value}: {}", ended.stderr);
    }
}

#[test]
fn floats_that_are_no_numbers_are_refused_or_end_as_damage() {
    let sound = Synthetic::from_args(MICRO).and_then(|model| model.file_bytes()).expect("sound arguments");
    let keys = keys_of_type(&sound, 6);
    assert!(!keys.is_empty());
    for key in &keys {
        let place = value_at(&sound, key, 6);
        for value in [f32::NAN, f32::INFINITY, -1.0, 0.0] {
            let mut forged = sound.clone();
            forged[place..place + 4].copy_from_slice(&value.to_le_bytes());
            let model = file_of(".gguf", &forged);
            let ended = bounded(&format!("run -m {} --tokens 1,2,3 -n 2 --ctx 16 --vram-mib 64", model.0.display())).end();
            assert!([0, 3].contains(&ended.code), "{key} = {value}: {} {}", ended.code, ended.stderr);
        }
    }
}

#[test]
fn weights_that_are_no_numbers_end_as_damage_of_the_file() {
    let mut bytes =
        Synthetic::from_args("--shape micro --seed 4 --type F32").and_then(|model| model.file_bytes()).expect("sound arguments");
    let from = bytes.len() / 2;
    bytes[from..].fill(0xff);
    let model = file_of(".gguf", &bytes);
    ebbtide(&format!("run -m {} --tokens 1,2,3 -n 2 --ctx 16", model.0.display())).fails(3, &["not finite"]);
}

#[test]
fn names_in_a_file_cannot_steer_the_terminal() {
    let hostile = file(bytes![head(1, 1), architecture(), entry("\u{1b}[2Jname", &[32], 0, 1)]);
    let model = file_of(".gguf", &hostile);
    let ended = ebbtide(&format!("plan -m {}", model.0.display())).refused(3, &["[2Jname"]);
    assert!(!ended.stderr.contains('\u{1b}'), "{:?}", ended.stderr);
}

#[test]
fn a_sound_file_passes_within_the_same_memory() {
    let model = synthetic_file(MICRO);
    bounded(&format!("run -m {} --tokens 1,2,3 -n 2 --ctx 64 --vram-mib 64", model.0.display())).ends_with(0);
}

#[test]
fn a_model_is_never_overwritten_by_what_is_written_about_it() {
    let model = synthetic_file("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let before = std::fs::read(&model.0).expect("the model is there");
    let path = model.0.display();
    ebbtide(&format!("run -m {path} --tokens 1,2,3 -n 1 --window-hashes {path}")).refused(2, &["--window-hashes", "is the model itself"]);
    ebbtide(&format!("logits -m {path} --tokens 1,2,3 -o {path}")).refused(2, &["-o", "is the model itself"]);
    ebbtide(&format!("bench -m {path} --prompts 16 --html {path}")).refused(2, &["--html", "is the model itself"]);
    let learned = ebbtide(&format!("run -m {path} --tokens 1,2,3 -n 1 --expert-profile {path}")).ends_with(0);
    assert!(learned.stderr.contains("neither read nor overwritten"), "{}", learned.stderr);
    assert_eq!(std::fs::read(&model.0).expect("it is still there"), before);
}
