//! `--window-hashes`: the file is there before anything is loaded, tells runs apart, and its faults end in words.

use std::fs;

use crate::common::engine::{TempFile, synthetic_file, tokens};
use crate::program::{BARD, ebbtide, list};

#[test]
fn files_of_two_runs_are_equal_at_any_loan_chunk_and_cache() {
    let model = synthetic_file("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let line = format!(
        "run -m {} --tokens {} -n 9 --temp 0 --ignore-eos --deterministic --ctx 256 --vram-mib 64",
        model.0.display(),
        list(&tokens(1, 90, 500))
    );
    let lines = |rest: &str| {
        let file = TempFile::new(".hashes");
        ebbtide(&format!("{line} {rest} --window-hashes {}", file.0.display())).json();
        fs::read_to_string(&file.0).expect("it was written")
    };
    let expected = lines("");
    assert!(expected.starts_with("# ebbtide window hashes 1: ") && expected.ends_with('\n'), "{expected}");
    assert_eq!(expected.lines().count(), 1 + 9, "{expected}");
    for rest in
        ["--prefill 16 --expert-cache 3", "--prefill-head-alias --alias-min-tokens 0", "--prefill 40 --refill strict --expert-cache 1"]
    {
        assert_eq!(lines(rest), expected, "{rest}");
    }
    assert_ne!(lines("--kv q8_0"), expected, "other arithmetic shows");
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_loaded() {
    // A budget that no plan fits: a start would end with exit code 4.
    let line = format!("run -m {BARD} --tokens 1,2,3 -n 2 --vram-mib 1 --window-hashes");
    ebbtide(&format!("{line} /dev/null")).refused(4, &["raise --vram-mib"]);
    ebbtide(&line).arg(env!("CARGO_TARGET_TMPDIR")).refused(2, &["--window-hashes: cannot write", env!("CARGO_TARGET_TMPDIR")]);
    ebbtide(&format!("{line} /no/such/folder/hashes")).refused(2, &["--window-hashes: cannot write /no/such/folder/hashes"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_ends_the_run_with_a_message() {
    ebbtide(&format!("run -m {BARD} --tokens 1,2,3 -n 2 --vram-mib 32 --window-hashes /dev/full"))
        .refused(1, &["window hashes cannot be written", "No space left"]);
}

#[test]
fn commands_without_windows_warn() {
    let file = TempFile::new(".hashes");
    let ended = ebbtide(&format!("plan -m {BARD} --window-hashes {}", file.0.display())).ends_with(0);
    assert!(ended.stderr.contains("has no effect with plan"), "{}", ended.stderr);
    assert!(!file.0.exists(), "and write none");
}
