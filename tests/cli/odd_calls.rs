//! Calls that a tired or hurried user makes, and some that nobody should.

use std::time::Duration;

use crate::common::engine::{TempFile, synthetic_file, tokens};
use crate::program::{BARD, ebbtide, file_of, list};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";

#[test]
fn a_slip_in_a_flag_is_refused_with_the_nearest_name() {
    let cases =
        [("--prefil-head-alias", "--prefill-head-alias"), ("--vram-reserve 100", "--vram-reserve-mib"), ("--temperature 1", "--temp")];
    for (slip, nearest) in cases {
        ebbtide(&format!("run -m {BARD} -p x {slip}")).refused(2, &[slip.split_whitespace().next().expect("a flag"), nearest]);
    }
    ebbtide("rum -m x").refused(2, &["run"]);
    ebbtide("chat -m x").refused(2, &["`chat` is not in this version"]);
    ebbtide("").end();
}

#[test]
fn values_that_are_none_are_refused_with_what_would_do() {
    let cases = [
        ("--kv q4_0", "f32, f16, q8_0"),
        ("--kv k8v4", "f32, f16, q8_0"),
        ("--kv foo", "f32, f16, q8_0"),
        ("--kv q8_0:foo", "f32, f16, q8_0"),
        ("--kv", "--kv"),
        ("--prefill -1", "1 to 131072"),
        ("--prefill 0", "1 to 131072"),
        ("--prefill 99999999", "1 to 131072"),
        ("--vram-mib 0", "1 to"),
        ("--vram-mib -5", "1 to"),
        ("--vram-mib 99999999999999999999", "1 to"),
        ("--ctx 0", "1 to"),
        ("--threads 0", "1 to 1024"),
        ("--threads 100000", "1 to 1024"),
        ("--temp nan", "0 to 100"),
        ("--temp -0.1", "0 to 100"),
        ("--top-p 2", "0 to 1"),
        ("--seed -1", "0 to"),
        ("--device cuda", "host"),
        ("--device host,host", "host"),
        ("--json=maybe", "true, false"),
        ("-n -3", "0 to"),
        ("--short-read -1", "0 to"),
        ("--spec 8", "0 to 7 drafts"),
        ("--spec -1", "0 to 7 drafts"),
        ("--draft ngram", "mtp, lookup, both, off"),
        ("--spec-min-p 1.1", "0 to 1"),
        ("--alias-min-tokens many", "`auto` or a whole number"),
    ];
    for (value, part) in cases {
        let ended = ebbtide(&format!("run -m {BARD} -p x {value}")).refused(2, &[part]);
        let flag = value.split([' ', '=']).next().expect("a flag").trim_start_matches('-');
        let long = if flag == "n" { "max-tokens" } else { flag };
        assert!(ended.stderr.contains(long), "{value}: {}", ended.stderr);
    }
    let all = ebbtide(&format!("run -m {BARD} -p x --kv q4_0 --prefill 0")).env("EBBTIDE_THREADS", "many");
    all.refused(2, &["--kv q4_0", "--prefill 0", "--threads many (from EBBTIDE_THREADS)"]);
}

#[test]
fn bad_places_of_settings_are_named() {
    let config = file_of(".toml", b"vram_mib = 5\n\nkv = [1]\n");
    ebbtide("config --config").arg(&config.0).refused(2, &["line 1: `vram_mib` is no setting: did you mean `vram-mib`?", "line 3: `kv`"]);
    let config = file_of(".toml", b"ctx = \"long\"\n");
    ebbtide("config --config").arg(&config.0).refused(2, &["--ctx long (from ", "line 1)"]);
    for bytes in [&b"\xff\xfe\0"[..], b"ctx = = 3", b"[model]\nctx = 3\n", b"config = \"x\"\n"] {
        let config = file_of(".toml", bytes);
        ebbtide("config --config").arg(&config.0).refused(2, &["error: "]);
    }
    ebbtide("config --config /dev/zero").refused(2, &["/dev/zero"]);
    ebbtide("config --config").arg(env!("CARGO_MANIFEST_DIR")).refused(2, &["cannot read the configuration"]);
    ebbtide("config --config no/such/file.toml").refused(2, &["no/such/file.toml"]);
    ebbtide("config").env("EBBTIDE_CTX", "long").refused(2, &["EBBTIDE_CTX"]);
    let warned = ebbtide("config").env("EBBTIDE_VRAM", "1").ends_with(0);
    assert!(warned.stderr.contains("did you mean EBBTIDE_VRAM_MIB?"), "{}", warned.stderr);
    let unset = ebbtide("config").env("EBBTIDE_CTX", "").json();
    assert_eq!(unset["settings"]["ctx"]["source"], "default");
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let model = synthetic_file(MICRO);
    let prompt = list(&tokens(1, 90, 500));
    let line = format!("run -m {} --tokens {prompt} -n 4", model.0.display());
    let ended = ebbtide(&format!("{line} --ctx 64")).refused(2, &["90 tokens", "holds 64"]);
    assert!(ended.took < Duration::from_secs(2), "{:?}", ended.took);
    ebbtide(&format!("{line} --ctx 90")).refused(2, &["90 tokens", "holds 90"]);
    ebbtide(&format!("{line} --ctx 91")).ends_with(0);
    let own = list(&tokens(1, 3000, 4000));
    ebbtide(&format!("run -m {BARD} --tokens {own} -n 4")).refused(2, &["3000 tokens", "holds 2048"]);
    let output = TempFile::new(".npy");
    ebbtide(&format!("logits -m {} --tokens {prompt} --ctx 64 -o {}", model.0.display(), output.0.display())).refused(2, &["90", "64"]);
    assert!(!output.0.exists(), "no matrix, and no part of one");
}

#[test]
fn a_context_above_the_model_s_own_warns() {
    let ended = ebbtide(&format!("run -m {BARD} --ctx 4096 -n 1 --temp 0 -p hello")).ends_with(0);
    assert!(ended.stderr.contains("warning: --ctx 4096 is above the model's own context of 2048"), "{}", ended.stderr);
}

#[test]
fn token_numbers_that_are_none_are_refused_with_their_place() {
    ebbtide(&format!("run -m {BARD} --tokens 1,4096,3")).refused(2, &["token 4096 at position 1", "4096"]);
    ebbtide(&format!("logits -m {BARD} --tokens 1,2,99999 -o never.npy")).refused(2, &["token 99999 at position 2"]);
    ebbtide(&format!("detokenize -m {BARD} 4294967295")).refused(2, &["token 4294967295 at position 0"]);
    ebbtide(&format!("run -m {BARD} --tokens 1,x")).refused(2, &["entry 2 is `x`"]);
    ebbtide(&format!("run -m {BARD} --tokens 1,-2")).refused(2, &["entry 2 is `-2`"]);
    ebbtide(&format!("run -m {BARD} --tokens ids.txt")).refused(2, &["@ids.txt"]);
    ebbtide(&format!("run -m {BARD} --tokens @")).refused(2, &["--tokens"]);
    let garbage = file_of(".txt", b"1 2 \xff\x00 3");
    ebbtide(&format!("run -m {BARD} --tokens @{}", garbage.0.display())).refused(3, &["entry 3"]);
    let odd = file_of(".u16", &[1, 0, 2]);
    ebbtide(&format!("run -m {BARD} --tokens @{}", odd.0.display())).refused(3, &["3 bytes"]);
    let empty = file_of(".u16", &[]);
    ebbtide(&format!("run -m {BARD} --tokens @{}", empty.0.display())).refused(3, &["no token numbers"]);
    let high = file_of(".u16", &[1, 0, 255, 255]);
    ebbtide(&format!("perplexity -m {BARD} --piece 2 --tokens {}", high.0.display())).refused(2, &["token 65535 at position 1"]);
}

#[test]
fn prompts_that_cannot_be_had_are_refused() {
    ebbtide(&format!("run -m {BARD} -p")).arg("").refused(2, &["empty"]);
    let empty = file_of(".txt", b"");
    ebbtide(&format!("run -m {BARD} --prompt-file {}", empty.0.display())).refused(2, &["empty"]);
    ebbtide(&format!("run -m {BARD} --prompt-file no/such.txt")).refused(3, &["no/such.txt"]);
    ebbtide(&format!("run -m {BARD} --prompt-file")).arg(env!("CARGO_MANIFEST_DIR")).refused(3, &["cannot read"]);
    ebbtide(&format!("run -m {BARD}")).refused(2, &["missing: one of --prompt"]);
    ebbtide("run -p x").refused(2, &["missing: the model"]);
    let binary = file_of(".bin", &(0..=255).collect::<Vec<u8>>());
    ebbtide(&format!("run -m {BARD} -n 2 --prompt-file {}", binary.0.display())).ends_with(0);
    let huge = TempFile::new(".txt");
    std::fs::File::create(&huge.0).and_then(|file| file.set_len((1 << 30) + 1)).expect("a sparse file");
    ebbtide(&format!("run -m {BARD} --prompt-file {}", huge.0.display())).refused(3, &["larger than 1073741824 bytes"]);
}

#[test]
fn results_that_cannot_be_written_fail_and_leave_nothing() {
    ebbtide(&format!("logits -m {BARD} --tokens 1 -o no/such/o.npy")).refused(1, &["no/such/o.npy"]);
    ebbtide(&format!("logits -m {BARD} --tokens 1 -o")).arg(env!("CARGO_TARGET_TMPDIR")).refused(1, &["cannot write the matrix"]);
    let output = TempFile::new("-unwritten.npy");
    ebbtide(&format!("logits -m {BARD} --tokens 1 --vram-mib 1 -o {}", output.0.display())).refused(4, &["--vram-mib"]);
    let left = std::fs::read_dir(std::env::temp_dir()).expect("a folder").flatten();
    assert!(left.into_iter().all(|entry| !entry.file_name().to_string_lossy().contains("-unwritten.npy")));
    ebbtide(&format!("perplexity -m {BARD} --tokens 1,2,3")).refused(3, &["3 tokens", "512"]);
    ebbtide(&format!("perplexity -m {BARD} --tokens 1,2,3 --piece 1")).refused(2, &["2 to"]);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_written_and_not_replaced() {
    use std::os::unix::fs::FileTypeExt;
    let (pipe, file) = (TempFile::new(".npy"), TempFile::new(".npy"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe.0).status().expect("mkfifo").success());
    let path = pipe.0.clone();
    let reader = std::thread::spawn(move || std::fs::read(path).expect("a pipe can be read"));
    for output in [&pipe.0, &file.0] {
        ebbtide(&format!("logits -m {BARD} --tokens 1,2 -o {}", output.display())).ends_with(0);
    }
    assert!(std::fs::metadata(&pipe.0).expect("it is there").file_type().is_fifo());
    assert_eq!(reader.join().expect("no panic"), std::fs::read(&file.0).expect("it was written"));
}

#[test]
fn a_budget_that_nothing_fits_is_the_device_s_fault() {
    ebbtide(&format!("run -m {BARD} -p x --vram-mib 1")).refused(4, &["raise --vram-mib to"]);
    ebbtide(&format!("run -m {BARD} -p x --vram-mib 7 --ctx 2048 --expert-cache 64"))
        .refused(4, &["--expert-cache 64", "lower --expert-cache to 18"]);
}

#[test]
fn strange_surroundings_change_nothing() {
    let line = format!("run -m {BARD} -n 4 --temp 0 --tokens 5,6,7");
    let expected = ebbtide(&line).ends_with(0).stdout;
    let surroundings: [&[(&str, &str)]; 5] = [
        &[("TERM", "dumb"), ("COLUMNS", "1")],
        &[("HOME", "/nonexistent"), ("XDG_CONFIG_HOME", "")],
        &[("HOME", "")],
        &[("LANG", "tr_TR.UTF-8"), ("LC_ALL", "C")],
        &[("NO_COLOR", "1"), ("RUST_BACKTRACE", "1"), ("EBBTIDE_REQUIRE_KERNELS", "1")],
    ];
    for variables in surroundings {
        let call = variables.iter().fold(ebbtide(&line), |call, (name, value)| call.env(name, value));
        assert_eq!(call.ends_with(0).stdout, expected, "{variables:?}");
    }
    let many = ebbtide(&format!("{line} --threads 64")).ends_with(0);
    assert_eq!(many.stdout, expected, "threads change no token");
}

#[cfg(unix)]
#[test]
fn arguments_that_are_no_utf8_are_refused_or_are_file_names() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    ebbtide(&format!("run -m {BARD} -p")).arg(bytes).refused(2, &["UTF-8"]);
    ebbtide(&format!("run -m {BARD} -n 1 -p x --kv")).arg(bytes).refused(2, &["error"]);
    ebbtide("plan -m").arg(bytes).refused(3, &["error"]);
    ebbtide("config").env("EBBTIDE_KV", bytes).refused(2, &["EBBTIDE_KV"]);
    let folder = std::env::temp_dir().join(std::ffi::OsStr::from_bytes(format!("ebbtide-\u{e9}-{}-", std::process::id()).as_bytes()));
    std::fs::copy(BARD, &folder).expect("the temporary folder can be written");
    ebbtide("plan -m").arg(&folder).ends_with(0);
    std::fs::remove_file(&folder).expect("a file of ours");
}

#[test]
fn help_fits_80_columns_and_explains_every_flag_that_works() {
    let programs = ["", "demo", "run", "plan", "logits", "perplexity", "bench", "replay", "tokenize", "detokenize", "config"];
    for command in programs {
        let help = ebbtide(&format!("{command} --help")).env("COLUMNS", "80").ends_with(0);
        assert!(help.stderr.is_empty());
        for line in help.text().lines() {
            assert!(line.chars().count() <= 80, "{command}: {line}");
        }
    }
    let run = ebbtide("run --help").ends_with(0).text();
    for flag in [
        "--prefill-head-alias",
        "--vram-mib",
        "--ctx",
        "--kv",
        "--short-read",
        "--spec",
        "--draft",
        "--mtp",
        "--temp",
        "--json",
        "--config",
    ] {
        assert!(run.contains(flag), "{flag} is not in: {run}");
    }
    for later in ["--hf", "--sim-link"] {
        assert!(!run.contains(later), "{later} is in: {run}");
    }
}
