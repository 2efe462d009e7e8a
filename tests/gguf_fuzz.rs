//! Goal: no sequence of bytes makes the header parser panic, or accept a tensor outside the file. Method: sound and almost sound files
//! are damaged at random (bits, numbers, cuts, splices of two files) and parsed; a panic fails the test, and what is accepted is checked.
//! Runs on stable Rust for `EBBTIDE_FUZZ_SECONDS` (default 2) from a fixed seed, or from `EBBTIDE_FUZZ_SEED`.

#[allow(unused_macros, unused_imports, reason = "shared with the tests of hostile files")]
mod gguf_bytes;

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::mem::discriminant;
use std::time::{Duration, Instant};

use ebbtide::gguf::{Header, parse};
use gguf_bytes::*;

/// Splitmix64: one multiplication chain a number, the same sequence on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("below a usize")
    }

    fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }
}

fn starts() -> Vec<Vec<u8>> {
    let mut version_2 = smallest();
    version_2[4] = 2;
    let tokens = bytes![
        head(2, 4),
        architecture(),
        pair_u32("general.alignment", 64),
        pair_strings("tokenizer.ggml.tokens", &["<s>", "a", "b", "ab"]),
        pair_array("tokenizer.ggml.token_type", I32, 4, &bytes![[3, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),
        entry("token_embd.weight", &[32, 4], 20, 0),
        entry("output_norm.weight", &[16], 0, 128),
    ];
    vec![
        smallest(),
        version_2,
        with_alignment(1),
        with_alignment(64),
        with_everything(),
        shard(1, 3, 3),
        file_aligned(tokens, 64, &[0; 192]),
    ]
}

/// Numbers at which arithmetic goes wrong.
const EDGES: [u64; 14] = [0, 1, 2, 5, 13, 31, 255, 0x7fff_ffff, 0xffff_ffff, 1 << 32, (1 << 42) + 1, 1 << 63, u64::MAX - 31, u64::MAX];

fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    if bytes.is_empty() {
        bytes.extend_from_slice(other);
        return;
    }
    let place = random.below(bytes.len());
    match random.below(9) {
        0 => bytes[place] ^= 1 << random.below(8),
        1 => bytes[place] = u8::try_from(random.next() & 0xff).expect("one byte"),
        2 => overwrite(bytes, place, &random.choose(&EDGES).to_le_bytes()),
        3 => overwrite(bytes, place, &random.choose(&EDGES).to_le_bytes()[..4]),
        4 => {
            // A small step up or down, so that lengths stay nearly right.
            let step = u8::try_from(random.below(17)).expect("below 17").wrapping_sub(8);
            bytes[place] = bytes[place].wrapping_add(step);
        }
        5 => bytes.truncate(place),
        6 => {
            let end = place + random.below(bytes.len() - place).min(64);
            bytes.drain(place..end);
        }
        7 => {
            let from = random.below(other.len());
            let piece = &other[from..from + random.below(other.len() - from).min(128)];
            bytes.splice(place..place, piece.iter().copied());
        }
        _ => {
            bytes.truncate(place);
            bytes.extend_from_slice(&other[random.below(other.len())..]);
        }
    }
}

fn overwrite(bytes: &mut [u8], place: usize, with: &[u8]) {
    for (to, from) in bytes[place..].iter_mut().zip(with) {
        *to = *from;
    }
}

/// What must hold of every header that is accepted.
fn check(header: &Header, file_bytes: usize) {
    assert!(header.alignment.is_power_of_two());
    assert!(header.data_offset.is_multiple_of(u64::from(header.alignment)));
    let mut ends = BTreeMap::new();
    for tensor in &header.tensors {
        assert!(tensor.offset >= header.data_offset && tensor.bytes > 0);
        let end = tensor.offset.checked_add(tensor.bytes).expect("the end of a tensor is a number");
        assert!(end <= file_bytes as u64, "{tensor:?} ends outside {file_bytes} bytes");
        assert!(tensor.offset.is_multiple_of(u64::from(header.alignment)));
        assert!((1..=4).contains(&tensor.shape.len()));
        assert_eq!(tensor.quant_type.bytes_for(tensor.n_elements()), Some(tensor.bytes));
        assert!(ends.insert(tensor.offset, end).is_none(), "two tensors at byte {}", tensor.offset);
    }
    let pairs: Vec<(u64, u64)> = ends.into_iter().collect();
    assert!(pairs.windows(2).all(|two| two[0].1 <= two[1].0), "tensors overlap: {pairs:?}");
}

fn number_from_environment(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name}={text:?} is no number")),
        Err(_) => default,
    }
}

#[test]
fn damaged_files_never_panic_and_what_is_accepted_lies_inside_the_file() {
    let seconds = number_from_environment("EBBTIDE_FUZZ_SECONDS", 2);
    let seed = number_from_environment("EBBTIDE_FUZZ_SEED", 0x0eb_b71de);
    let mut random = Random(seed);
    let starts = starts();
    for start in &starts {
        check(&parse(start, "start.gguf").expect("starts are sound"), start.len());
    }
    let (mut accepted, mut refused, mut variants) = (0u64, 0u64, HashSet::new());
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        for _ in 0..64 {
            let mut bytes = random.choose(&starts).clone();
            for _ in 0..=random.below(3) {
                let other = random.choose(&starts);
                mutate(&mut random, &mut bytes, other);
            }
            match parse(&bytes, "fuzz.gguf") {
                Ok(header) => {
                    check(&header, bytes.len());
                    accepted += 1;
                }
                Err(error) => {
                    let message = error.to_string();
                    assert!(message.starts_with("fuzz.gguf: ") && message.len() < 1000, "{message}");
                    variants.insert(discriminant(&error));
                    refused += 1;
                }
            }
        }
    }
    let report =
        format!("{} files from seed {seed:#x}: {accepted} accepted, {refused} refused in {} ways", accepted + refused, variants.len());
    writeln!(std::io::stdout(), "{report}").expect("standard output takes a line");
    assert!(accepted > 100 && refused > 100, "the damage reaches one outcome only: {report}");
    assert!(variants.len() >= 12, "the damage is too coarse to reach the checks: {report}");
}
