//! `--prefill-head-alias`: it changes no token, and it goes together with every other flag or says why not.

use std::time::Duration;

use serde_json::Value;

use crate::common::engine::{synthetic_file, tokens};
use crate::program::{BARD, ebbtide, list, token_numbers};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";
const FORCED: &str = "--prefill-head-alias --alias-min-tokens 0";
/// Routed experts of [`MICRO`], and so its most slots.
const MICRO_EXPERTS: u32 = 16;

fn assert_alias_happened(report: &Value, case: &str) {
    assert_eq!(report["way"], "alias", "{case}");
    assert!(report["head_reloads"].as_u64() >= Some(1), "{case}: {report}");
    assert!(report["arena_bytes_in_head"].as_u64() > Some(0), "{case}: {report}");
}

#[test]
fn the_alias_changes_no_token_at_any_chunk_and_cache() {
    let model = synthetic_file(MICRO);
    let prompt = list(&tokens(1, 300, 500));
    let line =
        format!("run -m {} --tokens {prompt} -n 16 --temp 0 --ignore-eos --deterministic --ctx 512 --vram-mib 64", model.0.display());
    let expected = token_numbers(&ebbtide(&line).json(), "tokens");
    assert_eq!(expected.len(), 16);
    assert!(expected.windows(2).any(|pair| pair[0] != pair[1]), "one token over and over proves little: {expected:?}");
    for chunk in [7, 32, 64, 256] {
        for slots in [1, 8, MICRO_EXPERTS] {
            let case = format!("--prefill {chunk} --expert-cache {slots}");
            let report = ebbtide(&format!("{line} {FORCED} {case}")).json();
            assert_alias_happened(&report, &case);
            assert_eq!(token_numbers(&report, "tokens"), expected, "{case}");
            assert!(report["chunk"].as_u64() <= Some(chunk), "{case}: {report}");
            assert_eq!(report["slots"], slots, "{case}");
        }
    }
}

#[test]
fn the_alias_changes_no_token_at_any_budget_from_the_smallest_that_starts() {
    let model = synthetic_file(MICRO);
    let prompt = list(&tokens(3, 200, 500));
    let line = format!("run -m {} --tokens {prompt} -n 12 --temp 0 --ignore-eos --deterministic --ctx 512", model.0.display());
    let expected = token_numbers(&ebbtide(&format!("{line} --vram-mib 64")).json(), "tokens");
    let starts = |mib: u32| ebbtide(&format!("{line} {FORCED} --vram-mib {mib} -n 0")).end().code == 0;
    let smallest = (1..64).find(|&mib| starts(mib)).expect("64 MiB are plenty");
    assert!(smallest > 1, "a budget too small is part of the test");
    ebbtide(&format!("{line} {FORCED} --vram-mib {}", smallest - 1)).refused(4, &["raise --vram-mib"]);
    let random = tokens(9, 5, 12).into_iter().map(|more| smallest + more);
    for mib in [smallest, smallest + 1].into_iter().chain(random) {
        let case = format!("--vram-mib {mib}");
        let report = ebbtide(&format!("{line} {FORCED} {case}")).json();
        assert_alias_happened(&report, &case);
        assert_eq!(token_numbers(&report, "tokens"), expected, "{case}");
        let reserve = u64::from(mib) * 1024 * 1024 / 16;
        assert!(report["lowest_free_bytes"].as_u64() >= Some(reserve), "{case}: {report}");
    }
}

/// What `run` does with another flag beside the alias.
enum Beside {
    Works,
    Refused,
}

#[test]
fn every_flag_beside_the_alias_works_or_is_refused_at_once_with_both_names() {
    use Beside::{Refused, Works};
    let table: &[(&str, Beside)] = &[
        ("-hf some/repository", Refused),
        ("--ctx auto", Works),
        ("--ctx 256", Works),
        ("--vram-mib 64", Works),
        ("--vram-reserve-mib 0", Works),
        ("--pin-mib 0", Works),
        ("--pin-mib 64", Works),
        ("--expert-cache auto", Works),
        ("--expert-cache 1", Works),
        ("--expert-cache 4", Works),
        ("--expert-profile off", Works),
        ("--prefill auto", Works),
        ("--prefill auto:16", Works),
        ("--prefill 1", Works),
        ("--prefill 100", Works),
        ("--prefill 32 --prefill-block 32", Works),
        ("--prefill 32 --prefill-block 64", Works),
        ("--prefill-block chunk", Works),
        ("--prefill-block auto", Works),
        ("--head-alias-mode overlay", Works),
        ("--head-alias-mode realloc", Works),
        ("--cache-sizing exact", Works),
        ("--alias-min-tokens auto", Works),
        ("--alias-min-tokens 0", Works),
        ("--alias-min-tokens 4000", Works),
        ("--short-read auto", Works),
        ("--short-read 0", Works),
        ("--short-read 100", Works),
        ("--refill lazy", Works),
        ("--refill strict", Works),
        ("--spec auto", Works),
        ("--spec 0", Works),
        ("--spec 3", Works),
        ("--spec-min-p 0.5", Works),
        ("--draft off", Works),
        ("--draft mtp", Works),
        ("--draft lookup", Works),
        ("--draft both", Works),
        ("--mtp", Works),
        ("--mtp=false", Works),
        ("--kv f32", Works),
        ("--kv f16", Works),
        ("--kv q8_0", Works),
        ("--activations q8", Works),
        ("--activations f16", Works),
        ("--activations f32", Works),
        ("--prefix-cache-mib 0", Works),
        ("--prefix-cache-mib 64", Works),
        ("--threads 1", Works),
        ("--threads 3", Works),
        ("--device host", Works),
        ("--deterministic", Works),
        ("--window-hashes /dev/null", Works),
        ("--sim-link-gbps 12", Refused),
        ("--sim-link-us 5", Refused),
        ("--temp 0.5 --top-k 5 --top-p 0.9 --min-p 0.01 --seed 3", Works),
        ("--repeat-penalty 1.1 --presence-penalty 0.1 --frequency-penalty 0.1 --penalty-last-n 16", Works),
        ("--ignore-eos", Works),
        ("-v", Works),
    ];
    let model = synthetic_file(MICRO);
    let line = format!("run -m {} --tokens {} -n 2 --vram-mib 32 --prefill-head-alias", model.0.display(), list(&tokens(1, 40, 500)));
    for (flag, beside) in table {
        match beside {
            Works => {
                let report = ebbtide(&format!("{line} {flag}")).json();
                assert_eq!(report["prompt_tokens"], 40, "{flag}");
            }
            Refused => {
                let name = flag.split_whitespace().rfind(|word| word.starts_with('-')).expect("a flag");
                let call = || ebbtide(&format!("{line} {flag}")).refused(2, &[name]);
                // The alias goes without the flag, or its clash is with a third one that is named too.
                let first = call();
                assert!(first.stderr.contains("--prefill-head-alias") || first.stderr.contains("--prefill 32"), "{flag}: {}", first.stderr);
                // A busy machine may be slow once.
                assert!([first, call()].iter().any(|ended| ended.took < Duration::from_secs(1)), "{flag} is refused too late");
            }
        }
    }
}

#[test]
fn commands_that_need_the_head_at_every_row_refuse_the_alias_with_every_other_fault() {
    let logits = ebbtide(&format!("logits -m {BARD} --tokens 1 -o never.npy --prefill-head-alias --sim-link-us 3"));
    logits.refused(2, &["--prefill-head-alias with logits", "--sim-link-us 3", "2 settings"]);
    let perplexity = ebbtide(&format!("perplexity -m {BARD} --tokens 1,2,3 --piece 2")).env("EBBTIDE_PREFILL_HEAD_ALIAS", "1");
    perplexity.refused(2, &["--prefill-head-alias 1 (from EBBTIDE_PREFILL_HEAD_ALIAS) with perplexity"]);
}

#[test]
fn short_prompts_go_through_windows_as_far_as_short_read_allows() {
    // A budget so small that reading in chunks lends slots, which have to be filled again: a few windows move less.
    let line = format!("run -m {BARD} -n 1 --temp 0 --ctx 1024 --vram-mib 6");
    let way = |n_tokens: usize, rest: &str| {
        let report = ebbtide(&format!("{line} {rest} --tokens {}", list(&tokens(1, n_tokens, 4000)))).json();
        report["way"].as_str().expect("a word").to_owned()
    };
    assert_eq!(way(2, ""), "windows");
    assert_eq!(way(2, "--short-read 2"), "windows");
    assert_eq!(way(2, "--short-read 1"), "loan");
    assert_eq!(way(2, "--short-read 0"), "loan");
    assert_eq!(way(1, "--short-read 0"), "windows", "the last prompt token is always a window");
    assert_eq!(way(2, "--deterministic"), "loan");
}
