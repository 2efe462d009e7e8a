//! `--expert-profile`: what is kept from one start to the next, by which command, and that a bad file never stops a start.

use std::fs;

use crate::common::engine::{TempFile, synthetic_file, tokens};
use crate::program::{ebbtide, list};

const SKEWED: &str = "--shape tiny --seed 21 --type Q4_0 --used 3 --skew 1.5";

#[test]
fn a_second_run_knows_what_the_first_has_learned_and_only_run_writes() {
    let (model, profile) = (synthetic_file(SKEWED), TempFile::new(".heat"));
    let line = format!(
        "-m {} --tokens {} --ctx 256 --vram-mib 64 --expert-cache 12 --expert-profile {}",
        model.0.display(),
        list(&tokens(1, 12, 500)),
        profile.0.display()
    );
    let run = || ebbtide(&format!("run {line} -n 40 --temp 0 --ignore-eos --deterministic")).json();
    let (first, second) = (run(), run());
    assert_eq!(first["tokens"], second["tokens"]);
    let hits = |report: &serde_json::Value| report["hits"].as_u64().expect("a count");
    assert!(hits(&second) > hits(&first), "{first} and {second}");
    let kinds = ["prompt", "refill", "swap", "in_place"].map(|kind| second["link_bytes_by_kind"][kind].as_u64().expect("bytes"));
    assert_eq!(second["link_bytes"], kinds.iter().sum::<u64>(), "{second}");

    let learned = fs::read(&profile.0).expect("a profile was written");
    let output = TempFile::new(".npy");
    ebbtide(&format!("logits {line}")).arg("-o").arg(&output.0).ends_with(0);
    assert_eq!(fs::read(&profile.0).expect("still there"), learned, "logits leave a profile as it is");
    let other = TempFile::new(".heat");
    let demo = ebbtide(&format!("demo --expert-profile {}", other.0.display())).ends_with(0);
    assert!(demo.stderr.contains("--expert-profile changes nothing here"), "{}", demo.stderr);
    assert!(!other.0.exists(), "the demo writes no profile");
}

#[test]
fn a_profile_that_is_damaged_or_anothers_is_ignored_with_one_line() {
    let (model, other) = (synthetic_file(SKEWED), synthetic_file(&SKEWED.replace("--seed 21", "--seed 22")));
    let profile = TempFile::new(".heat");
    let run = |model: &TempFile| {
        ebbtide(&format!("run -m {} --tokens 1,2,3 -n 4 --ctx 256 --vram-mib 64 --temp 0 --ignore-eos", model.0.display()))
            .arg("--expert-profile")
            .arg(&profile.0)
            .ends_with(0)
    };
    assert!(!run(&other).stderr.contains("profile"), "a first profile is no news");
    let foreign = fs::read(&profile.0).expect("written");
    let mut flipped = foreign.clone();
    flipped[60] ^= 0x10;
    for (bytes, reason) in [
        (&foreign[..], "learned with another model"),
        (&flipped[..], "learned with another model"),
        (&foreign[..foreign.len() - 1], "learned with another model"),
        (&[], "it has 0 bytes"),
        (b"EBBHEAT", "bytes instead of"),
    ] {
        fs::write(&profile.0, bytes).expect("the temporary folder can be written");
        let told = run(&model).stderr;
        let lines: Vec<_> = told.lines().filter(|line| line.contains("expert profile")).collect();
        assert!(lines.len() == 1 && lines[0].contains("is not used") && lines[0].contains(reason), "{reason}: {told}");
        assert!(!run(&model).stderr.contains("profile"), "the next saving made it sound");
    }
}
