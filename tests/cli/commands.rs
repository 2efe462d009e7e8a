//! What each command prints when all is well, and where.

use std::fs;

use serde_json::Value;

use crate::common::engine::{TempFile, all_logits, bard, engine, exact_settings, synthetic_file, synthetic_model, tokens};
use crate::program::{BARD, HELD, at, ebbtide, file_of, list, token_numbers};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";

/// Every key of the contract's `run --json`.
const RUN_KEYS: &str = "prompt_tokens tokens text way chunk block slots prefill_tokens_per_s decode_tokens_per_s lowest_free_bytes \
    head_reloads head_reload_ms head_wait_ms arena_bytes_in_head spill_bytes link_bytes hits misses drafts_offered drafts_accepted recaptures";

#[test]
fn run_streams_text_on_stdout_and_figures_on_stderr() {
    let call = || ebbtide(&format!("run -m {BARD} -n 12 --temp 0 --ignore-eos -p")).arg("In the beginning");
    let plain = call().ends_with(0);
    let report = call().json();
    assert_eq!(plain.text(), format!("{}\n", report["text"].as_str().expect("text")));
    assert!(plain.stderr.contains("read ") && plain.stderr.contains("wrote 12 tokens"), "{}", plain.stderr);
}

#[test]
fn run_reports_every_field_of_the_contract_with_its_meaning() {
    let model = synthetic_file(MICRO);
    let prompt = list(&tokens(1, 40, 500));
    let line = format!("run -m {} --tokens {prompt} -n 6 --temp 0 --ignore-eos --ctx 512 --vram-mib 64", model.0.display());
    let report = ebbtide(&line).json();
    for key in RUN_KEYS.split_whitespace() {
        assert!(!report[key].is_null(), "{key} is not in {report}");
    }
    assert_eq!(report["prompt_tokens"], 40);
    assert_eq!(token_numbers(&report, "tokens").len(), 6);
    assert!(["windows", "loan", "alias"].contains(&report["way"].as_str().expect("a word")));
    assert_eq!(report["chunk"], report["block"], "this version reads with both equal");
    assert_eq!(report["slots"], 16, "every expert has a slot");
    assert_eq!(report["misses"], 0);
    let uses = 6 * 2 * 2;
    assert!(report["hits"].as_u64().expect("a count") >= uses, "{report}");
    let reserve = 64 * 1024 * 1024 / 16;
    assert!(report["lowest_free_bytes"].as_u64().expect("a count") >= reserve, "{report}");
    for key in ["head_reloads", "arena_bytes_in_head", "drafts_offered", "drafts_accepted", "recaptures"] {
        assert_eq!(report[key], 0, "{key}");
    }
    for key in ["prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(report[key].as_f64().expect("a rate") > 0.0, "{key}");
    }
}

#[test]
fn run_reads_a_prompt_from_text_file_list_and_token_files_alike() {
    let text = file_of(".txt", "And it came to pass".as_bytes());
    let numbers = ebbtide(&format!("tokenize -m {BARD} --prompt-file {}", text.0.display())).ends_with(0).text();
    let ids: Vec<u16> = numbers.trim().split(',').map(|number| number.parse().expect("a number")).collect();
    let spaced = file_of(".txt", numbers.replace(',', " \n\t").as_bytes());
    let binary = file_of(".u16", &ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    let run = || ebbtide(&format!("run -m {BARD} -n 8 --temp 0 --ignore-eos"));
    let expected = run().arg("-p").arg("And it came to pass").json();
    assert_eq!(expected["prompt_tokens"], ids.len());
    let others = [
        run().arg("--prompt-file").arg(&text.0),
        run().arg("--tokens").arg(numbers.trim()),
        run().arg("--tokens").arg(at(&spaced)),
        run().arg("--tokens").arg(at(&binary)),
        run().arg("--tokens").arg(&binary.0),
    ];
    for call in others {
        assert_eq!(token_numbers(&call.json(), "tokens"), token_numbers(&expected, "tokens"));
    }
}

#[test]
fn a_seed_repeats_a_text_and_a_chat_goes_through_the_template() {
    let run = |rest: &str| ebbtide(&format!("run -m {BARD} -n 16 --ignore-eos {rest} -p")).arg("Who art thou?").json();
    assert_eq!(run("--temp 1 --seed 7")["tokens"], run("--temp 1 --seed 7")["tokens"]);
    assert_ne!(run("--temp 1 --seed 7")["tokens"], run("--temp 1 --seed 8")["tokens"]);
    let model = synthetic_file(MICRO);
    let line = format!("run -m {} -n 1 --temp 0 -p hello", model.0.display());
    let plain = ebbtide(&line).json()["prompt_tokens"].as_u64();
    assert!(ebbtide(&format!("{line} --chat")).json()["prompt_tokens"].as_u64() > plain, "the template adds its marks");
}

#[test]
fn nothing_to_write_is_a_run_too() {
    let ended = ebbtide(&format!("run -m {BARD} -n 0 -p hello")).ends_with(0);
    assert_eq!(ended.text(), "\n");
    let report = ebbtide(&format!("run -m {BARD} -n 0 -p hello")).json();
    assert_eq!((&report["tokens"], &report["text"]), (&serde_json::json!([]), &Value::from("")));
}

#[test]
fn writing_ends_with_the_context_however_much_was_asked_for() {
    for asked in ["4294967295", "99999999", "30"] {
        let report =
            ebbtide(&format!("run -m {BARD} -n {asked} --ctx 32 --ignore-eos --temp 0 --tokens {}", list(&tokens(1, 22, 4000)))).json();
        assert_eq!((token_numbers(&report, "tokens").len(), &report["finish"]), (11, &Value::from("length")), "{asked}");
    }
}

#[test]
fn demo_needs_no_arguments_and_proves_that_lending_changes_no_token() {
    let demo = ebbtide("demo").json();
    assert_eq!(demo["identical"], true);
    assert_eq!(demo["head_lent"]["tokens"], demo["head_kept"]["tokens"]);
    assert_eq!((&demo["head_lent"]["way"], &demo["head_kept"]["head_reloads"]), (&Value::from("alias"), &Value::from(0)));
    assert!(demo["head_lent"]["arena_bytes_in_head"].as_u64() > Some(0), "{demo}");
    assert!(!demo["text"].as_str().expect("text").is_empty());
}

#[test]
fn logits_are_what_numpy_loads_and_what_the_library_computes() {
    let args = "--shape micro --seed 5 --type F32";
    let (file, output) = (synthetic_file(args), TempFile::new(".npy"));
    let ids = tokens(2, 70, 500);
    let line = format!("logits -m {} --tokens {} --ctx 512 --vram-mib 256 --threads 2", file.0.display(), list(&ids));
    let report = ebbtide(&line).arg("-o").arg(&output.0).json();
    assert_eq!((&report["rows"], &report["columns"]), (&Value::from(70), &Value::from(512)));
    let expected = all_logits(&mut engine(&synthetic_model(args), &exact_settings(512)), &ids);
    let bytes = fs::read(&output.0).expect("it was written");
    assert_eq!(npy(&bytes), (vec![70, 512], expected.concat()));
}

#[test]
fn plain_logits_leave_stdout_empty() {
    let output = TempFile::new(".npy");
    let ended = ebbtide(&format!("logits -m {BARD} --tokens 1,2,3")).arg("-o").arg(&output.0).ends_with(0);
    assert!(ended.stdout.is_empty() && ended.stderr.contains("3 x 4096"), "{}", ended.stderr);
    assert_eq!(npy(&fs::read(&output.0).expect("it was written")).0, [3, 4096]);
}

/// Shape and numbers of a file in NumPy's format, version 1.0, little-endian float32, C order.
fn npy(bytes: &[u8]) -> (Vec<usize>, Vec<f32>) {
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let data_at = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    assert_eq!(data_at % 64, 0);
    let header = std::str::from_utf8(&bytes[10..data_at]).expect("ASCII");
    assert!(header.starts_with('{') && header.ends_with('\n'), "{header}");
    assert!(header.contains("'descr': '<f4'") && header.contains("'fortran_order': False"), "{header}");
    let shape = header.split_once("'shape': (").expect("a shape").1.split_once(')').expect("its end").0;
    let shape: Vec<usize> =
        shape.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| part.parse().expect("a size")).collect();
    let (words, rest) = bytes[data_at..].as_chunks::<4>();
    assert!(rest.is_empty());
    assert_eq!(words.len(), shape.iter().product::<usize>());
    (shape, words.iter().map(|word| f32::from_le_bytes(*word)).collect())
}

#[test]
fn perplexity_of_the_bundled_model_is_the_stored_one() {
    let report = ebbtide(&format!("perplexity -m {BARD} --tokens {HELD} --pieces 4")).json();
    let loss = report["loss"].as_f64().expect("a number");
    assert!((loss - LOSS_OF_FOUR_PIECES).abs() < 0.01, "{report}");
    assert!((report["perplexity"].as_f64().expect("a number") - loss.exp()).abs() < 1e-6, "{report}");
    assert_eq!((&report["pieces"], &report["piece_tokens"]), (&Value::from(4), &Value::from(512)));
    for key in ["draft_loss", "draft_agreement"] {
        assert!(report.as_object().expect("an object").contains_key(key), "{key}");
    }
}

/// Computed from the library's logits in [`the_stored_loss_is_that_of_exact_logits`].
const LOSS_OF_FOUR_PIECES: f64 = 3.654;

#[test]
fn the_stored_loss_is_that_of_exact_logits() {
    let corpus: Vec<u32> =
        fs::read(HELD).expect("bundled").as_chunks::<2>().0.iter().map(|pair| u32::from(u16::from_le_bytes(*pair))).collect();
    let model = bard();
    let mut engine = engine(&model, &exact_settings(512));
    let (mut sum, mut count) = (0.0, 0.0);
    for piece in 0..4 {
        let rows = all_logits(&mut engine, &corpus[piece * 512..][..512]);
        for (position, row) in rows.iter().enumerate() {
            let target = corpus[piece * 512 + position + 1] as usize;
            let most = row.iter().copied().fold(f32::MIN, f32::max);
            let log_sum = row.iter().map(|&logit| f64::from(logit - most).exp()).sum::<f64>().ln();
            sum += log_sum - f64::from(row[target] - most);
            count += 1.0;
        }
    }
    assert!((sum / count - LOSS_OF_FOUR_PIECES).abs() < 0.005, "{}", sum / count);
}

#[test]
fn tokens_and_text_are_inverse_for_any_bytes() {
    let texts: [&[u8]; 8] = [
        b"plain",
        "e\u{301} \u{1F468}\u{200D}\u{1F469}\u{200D}\u{1F467} \u{6b6a} naïve".as_bytes(),
        b"\r\n\t  \n\n   trailing   ",
        b"\xff\xfe not UTF-8 \xc3",
        b"\0 zero \0",
        b"<|endoftext|><|im_start|> as text",
        b"-1 --flag @file 12345678901234567890",
        b"\xf0\x9f\x98",
    ];
    for text in texts {
        let file = file_of(".txt", text);
        let numbers = ebbtide(&format!("tokenize -m {BARD} --prompt-file {}", file.0.display())).ends_with(0);
        let numbers = file_of(".txt", &numbers.stdout);
        let back = ebbtide(&format!("detokenize -m {BARD}")).arg(at(&numbers)).ends_with(0);
        assert_eq!(back.stdout, text, "{:?}", String::from_utf8_lossy(text));
    }
    let report = ebbtide(&format!("tokenize -m {BARD}")).arg("-x y").json();
    assert_eq!(report["count"], token_numbers(&report, "tokens").len());
    let text = ebbtide(&format!("detokenize -m {BARD} --tokens {}", list(&token_numbers(&report, "tokens")))).json();
    assert_eq!(text["text"], "-x y");
}

#[test]
fn config_prints_effective_values_with_their_places() {
    let file = file_of(".toml", b"kv = \"q8_0\"\nctx = 1024\n");
    let call = || ebbtide("config --ctx 2048").arg("--config").arg(&file.0).env("EBBTIDE_VRAM_MIB", "6000");
    let report = call().json();
    let setting = |name: &str| (report["settings"][name]["value"].clone(), report["settings"][name]["source"].as_str().map(str::to_owned));
    assert_eq!(setting("ctx"), (2048.into(), Some("flag".to_owned())));
    assert_eq!(setting("vram-mib"), (6000.into(), Some("EBBTIDE_VRAM_MIB".to_owned())));
    assert_eq!(setting("kv").0, "q8_0");
    assert!(setting("kv").1.expect("a source").ends_with(", line 1"));
    assert!(setting("threads").0.as_u64() >= Some(1), "{report}");
    assert_eq!(setting("short-read"), ("auto".into(), Some("default".to_owned())));
    let again = file_of(".toml", &call().ends_with(0).stdout);
    let repeated = ebbtide("config").arg("--config").arg(&again.0).json();
    for (name, entry) in report["settings"].as_object().expect("an object") {
        assert_eq!(repeated["settings"][name]["value"], entry["value"], "{name}");
    }
}
