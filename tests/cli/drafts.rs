//! Flags of drafts, as far as they can be seen without the model's draft layer: they are read everywhere, and change no token.

use crate::common::engine::{TempFile, synthetic_file, tokens};
use crate::program::{BARD, ebbtide, file_of, list, token_numbers};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";

fn beside(file: &TempFile, name: &str) -> String {
    file.0.with_file_name(name).display().to_string()
}

#[test]
fn settings_of_drafts_are_shown_with_their_places() {
    let config = ebbtide("config --spec 3").env("EBBTIDE_DRAFT", "lookup").json();
    let shown = |name: &str| (config["settings"][name]["value"].to_string(), config["settings"][name]["source"].to_string());
    assert_eq!(shown("spec"), ("3".to_owned(), "\"flag\"".to_owned()));
    assert_eq!(shown("draft"), ("\"lookup\"".to_owned(), "\"EBBTIDE_DRAFT\"".to_owned()));
    assert_eq!(shown("mtp").0, "false");
    assert_eq!(shown("spec-min-p").0, "0");
    assert_eq!(shown("draft-vocab").0, "null");
    let file = file_of(".toml", b"spec = 2\ndraft = \"mtp\"\nspec-min-p = 0.25\n");
    let config = ebbtide("config --config").arg(&file.0).json();
    assert_eq!((&config["settings"]["spec"]["value"], &config["settings"]["spec-min-p"]["value"]), (&2.into(), &0.25.into()));
}

#[test]
fn the_same_text_is_written_whoever_drafts() {
    let line = format!("run -m {BARD} -n 40 --temp 0.8 --seed 3 --repeat-penalty 1.1 --ignore-eos -p");
    let written = |rest: &str| {
        let report =
            ebbtide(&line).arg("And God said, Let there be light: and there was light. And God said,").args(rest.split_whitespace()).json();
        assert!(report["drafts_accepted"].as_u64() <= report["drafts_offered"].as_u64(), "{report}");
        (token_numbers(&report, "tokens"), report["drafts_offered"].as_u64())
    };
    let (expected, offered) = written("--spec 0");
    assert_eq!(offered, Some(0));
    for rest in ["", "--draft lookup", "--spec 1", "--draft off", "--deterministic --draft lookup --spec 7"] {
        if rest.contains("deterministic") {
            assert_eq!(written(rest).0, written("--deterministic --spec 0").0);
        } else {
            assert_eq!(written(rest).0, expected, "{rest}");
        }
    }
}

#[test]
fn a_list_of_tokens_to_draft_from_is_checked_against_the_model() {
    let model = synthetic_file(MICRO);
    let run = format!("run -m {} --tokens {} -n 2 --temp 0", model.0.display(), list(&tokens(1, 10, 500)));
    let plan = format!("plan -m {}", model.0.display());
    let good = file_of(".txt", b"5, 6 7\n7");
    let binary = file_of(".u16", &[5, 0, 6, 0]);
    for line in [&run, &plan] {
        for file in [&good, &binary] {
            ebbtide(line).arg("--draft-vocab").arg(&file.0).ends_with(0);
        }
        let bad = file_of(".txt", b"5 60000");
        ebbtide(line).arg("--draft-vocab").arg(&bad.0).refused(3, &["--draft-vocab", "60000", "none of the model"]);
        let words = file_of(".txt", b"5 six");
        ebbtide(line).arg("--draft-vocab").arg(&words.0).refused(3, &["--draft-vocab", "entry 2 is `six`"]);
        let none = file_of(".txt", b" ,");
        ebbtide(line).arg("--draft-vocab").arg(&none.0).refused(3, &["--draft-vocab", "no token numbers"]);
        ebbtide(&format!("{line} --draft-vocab no/such/list.txt")).refused(3, &["--draft-vocab", "no/such/list.txt"]);
    }
    // Where the draft layer does not draft, nobody reads the list.
    let idle = ebbtide(&format!("{run} --draft lookup --draft-vocab no/such/list.txt")).ends_with(0);
    assert!(idle.stderr.contains("--draft-vocab no/such/list.txt has no effect"), "{}", idle.stderr);
}

#[test]
fn logits_of_the_draft_layer_want_a_file_of_their_own_and_a_draft_layer() {
    let model = synthetic_file(MICRO);
    let line = format!("logits -m {} --tokens 1,2", model.0.display());
    let output = beside(&model, "drafts-out.npy");
    ebbtide(&format!("{line} -o {output} --mtp-out {output}")).refused(2, &["--mtp-out", "both would be one file"]);
    let roundabout = model.0.parent().expect("a folder").join(".").join("drafts-out.npy");
    ebbtide(&format!("{line} -o {output} --mtp-out")).arg(&roundabout).refused(2, &["--mtp-out", "one file"]);
    ebbtide(&format!("{line} -o {output} --mtp-out")).arg(&model.0).refused(2, &["--mtp-out", "the model itself"]);
    let other = beside(&model, "drafts-mtp.npy");
    ebbtide(&format!("{line} -o {output} --mtp-out {other}")).refused(2, &["--mtp-out", "no draft layer"]);
    assert!(!std::path::Path::new(&output).exists());
}

#[test]
fn two_flags_about_who_drafts_clash_in_one_place() {
    ebbtide(&format!("run -m {BARD} -p x --mtp --draft lookup")).refused(2, &["--mtp with --draft lookup"]);
    ebbtide(&format!("bench -m {BARD} --force-acceptance 2")).refused(2, &["--force-acceptance 2", "0 to 1"]);
    ebbtide(&format!("bench -m {BARD} --force-acceptance 0.5 --spec 0")).refused(2, &["--force-acceptance 0.5 with --spec 0"]);
}
