//! Goal: synthetic models made by the tests are those that the Python script makes, so that results stored for the script's files
//! hold for them. Method: size and CRC-32 of whole files, recorded from the script in `golden/synthetic.tsv`.

mod common;

use common::synthetic::Synthetic;
use common::synthetic::random::crc32;

struct Recorded<'a> {
    args: &'a str,
    bytes: usize,
    crc: u32,
}

fn recorded() -> Vec<Recorded<'static>> {
    let lines = include_str!("golden/synthetic.tsv").lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let [args, bytes, crc] = fields[..] else { panic!("three fields in {line:?}") };
            Recorded { args, bytes: bytes.parse().unwrap(), crc: u32::from_str_radix(crc, 16).unwrap() }
        })
        .collect()
}

#[test]
fn files_are_byte_for_byte_those_of_the_python_script() {
    let all = recorded();
    assert!(all.len() >= 8, "only {} recorded files", all.len());
    for Recorded { args, bytes, crc } in all {
        let file = Synthetic::from_args(args).unwrap().file_bytes().unwrap();
        assert_eq!((file.len(), crc32(&file)), (bytes, crc), "size and CRC-32 of {args}");
    }
}

#[test]
fn the_order_of_arguments_does_not_matter() {
    let one = Synthetic::from_args("--type Q4_K --down-type Q6_K --expert-type IQ3_XXS --layers 1 --shape micro").unwrap();
    let other = Synthetic::from_args("--shape micro --layers 1 --expert-type IQ3_XXS --down-type Q6_K --type Q4_K").unwrap();
    assert_eq!(one, other);
    assert_eq!(one.types.down.to_string(), "Q6_K");
    assert_eq!(one.shape.n_layer, 1);
    // Shapes of one name differ by architecture, so it counts wherever it stands.
    let hybrid = Synthetic::from_args("--shape micro --mtp 1 --arch qwen35moe").unwrap();
    assert_eq!(hybrid, Synthetic::from_args("--arch qwen35moe --mtp 1 --shape micro").unwrap());
    assert_eq!((hybrid.shape.n_layer, hybrid.n_mtp, hybrid.shape.delta.n_head_value), (4, 1, 2));
}

#[test]
fn what_the_script_alone_can_write_is_refused_with_a_reason() {
    assert!(Synthetic::from_args("--arch qwen4exp").unwrap_err().contains("--arch qwen4exp"));
    assert!(Synthetic::from_args("--shape qwen3-30b-a3b").unwrap_err().contains("qwen3-30b-a3b"));
    let too_large = Synthetic::from_args("--shape small --type F32 --experts 256 --layers 1").unwrap().file_bytes();
    assert!(too_large.unwrap_err().contains("blk.0.ffn_gate_exps.weight takes 134217728 bytes"));
    let unknown_blocks = Synthetic::from_args("--shape micro --type MXFP4").unwrap().file_bytes();
    assert!(unknown_blocks.unwrap_err().contains("MXFP4"));
}
