//! `bench`: every arm at every point, figures that agree with each other and with the plan, and a page that holds what the JSON does.
//! No speed is asserted.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::common::engine::{TempFile, synthetic_file};
use crate::page::Page;
use crate::program::{HELD, ebbtide};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";
/// Routed experts of [`MICRO`].
const MICRO_EXPERTS: u64 = 16;
const ARMS: [&str; 5] = ["default", "loan", "alias", "alias-chunk", "auto"];

pub fn rows(report: &Value) -> &Vec<Value> {
    report["rows"].as_array().unwrap_or_else(|| panic!("no rows in {report}"))
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no number {key} in {value}"))
}

/// The median of a spread, which lies between its ends.
fn median(row: &Value, key: &str) -> f64 {
    let [low, middle, high] = ["min", "median", "max"].map(|end| row[key][end].as_f64().unwrap_or_else(|| panic!("{key}.{end} in {row}")));
    assert!(low <= middle && middle <= high && low > 0.0, "{key} in {row}");
    middle
}

#[test]
fn every_arm_is_measured_at_every_point_and_reads_as_its_name_says() {
    let model = synthetic_file(MICRO);
    let page = TempFile::new(".html");
    let line = format!(
        "bench -m {} --slots 6,{MICRO_EXPERTS} --prompts 200,300 --chunks auto,32 --contexts 512 --write 4 --repeat 2 --short-read 0 --html {}",
        model.0.display(),
        page.0.display()
    );
    let report = ebbtide(&line).json();
    assert_eq!((&report["ended"], &report["repeat"], &report["warm_up_runs"]), (&"done".into(), &2.into(), &1.into()));
    let rows = rows(&report);
    assert_eq!(rows.len(), 2 * 2 * 2 * ARMS.len());
    for (index, row) in rows.iter().enumerate() {
        let arm = row["arm"].as_str().expect("a word");
        assert_eq!(arm, ARMS[index % ARMS.len()]);
        assert_eq!(row["refused"], Value::Null, "{row}");
        assert_eq!((number(row, "ctx_tokens"), number(row, "runs")), (512, 2), "{row}");
        let (chunk, block) = (number(row, "chunk"), number(row, "block"));
        let one_chunk = ["default", "alias-chunk"].contains(&arm);
        assert!(if one_chunk { block == chunk } else { block >= chunk }, "{row}");
        assert!(row["chunk_asked"] != "32" || chunk <= 32, "{row}");
        let way = row["way"].as_str().expect("a word");
        let allowed: &[&str] = match arm {
            "default" | "loan" => &["loan"],
            "alias" | "alias-chunk" => &["alias"],
            _ => &["loan", "alias"],
        };
        assert!(allowed.contains(&way), "{row}");
        assert_eq!(number(row, "head_reloads"), u64::from(way == "alias"), "{row}");
        assert!(number(row, "slots_kept") <= number(row, "slots") && number(row, "slots") <= MICRO_EXPERTS, "{row}");
        assert!(number(row, "link_bytes") > 0 || number(row, "slots_kept") == MICRO_EXPERTS, "{row}");
        // Speeds and times are of the same runs.
        let read = number(row, "prompt_tokens") as f64 / median(row, "first_token_s");
        assert!((read / median(row, "read_tokens_per_s") - 1.0).abs() < 0.5, "{row}");
        assert!(median(row, "written_tokens_per_s") > 0.0 && median(row, "written_ratio") > 0.0);
        if arm == "default" {
            assert_eq!((median(row, "read_ratio"), row["read_ratio"]["max"].as_f64()), (1.0, Some(1.0)));
        }
    }
    // A number of slots is a budget, the same for all arms, in which so many have room.
    let budgets: BTreeSet<u64> = rows.iter().filter(|row| row["slots_asked"] == "6").map(|row| number(row, "vram_bytes")).collect();
    assert_eq!(budgets.len(), 1, "all arms have one budget");
    assert!(rows.iter().any(|row| row["slots_asked"] == "6" && row["arm"] == "auto" && number(row, "slots") == 6));
    page_holds(&Page::read(&page), &report);
}

/// Every figure that a reader looks for first is in the page as in the report.
fn page_holds(page: &Page, report: &Value) {
    for row in rows(report) {
        for key in ["first_token_s", "read_tokens_per_s", "written_tokens_per_s"] {
            let scale = if key == "first_token_s" { 1e3 } else { 1.0 };
            page.assert_has_number(row[key]["median"].as_f64().expect("a number") * scale, row);
        }
        for key in ["slots", "slots_kept", "chunk", "block", "prompt_tokens"] {
            page.assert_has_cell(&row[key].to_string());
        }
    }
    for arm in ARMS {
        page.assert_has_cell(arm);
    }
    assert!(page.count("svg") > 4 && page.count("polyline") > 0, "plots");
}

#[test]
fn a_start_that_cannot_be_had_and_a_prompt_too_long_are_rows_that_say_why() {
    let model = synthetic_file(MICRO);
    let line = format!("bench -m {} --slots 4,99 --prompts 100,600 --ctx 512 --write 2 --repeat 1", model.0.display());
    let report = ebbtide(&line).json();
    let refused = |slots: &str, prompt: u64| {
        let of_place = rows(&report).iter().filter(move |row| row["slots_asked"] == slots && row["prompt_tokens"] == prompt);
        of_place.map(|row| row["refused"].as_str().map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(refused("4", 100), vec![None; ARMS.len()]);
    let too_long = "600 tokens to read and 2 to write are more than the context of 512 tokens";
    assert_eq!(refused("4", 600), vec![Some(too_long.to_owned()); ARMS.len()]);
    let too_many = "the model has 16 routed experts: 99 slots would stay empty";
    assert_eq!(refused("99", 100), vec![Some(too_many.to_owned()); ARMS.len()]);
    // A row without figures has no key of theirs, and one with figures no reason.
    assert!(rows(&report).iter().all(|row| row["refused"].is_null() == row.get("read_tokens_per_s").is_some()));
    // Nothing at all is the device's fault, with the report all the same.
    let line = format!("bench -m {} --contexts 512 --prompts 64 --vram-mib 1 --repeat 1", model.0.display());
    let ended = ebbtide(&line).fails(4, &["nothing could be measured"]);
    assert!(ended.text().contains("not run: ") && ended.text().contains("raise --vram-mib"), "{}", ended.text());
}

#[test]
fn plain_output_names_the_arms_the_warm_up_and_the_lengths_that_fit() {
    let model = synthetic_file(MICRO);
    let line = format!("bench -m {} --ctx 600 --write 1 --repeat 1 --vram-mib 32", model.0.display());
    let ended = ebbtide(&line).ends_with(0);
    let text = ended.text();
    for part in ["head kept, block = chunk", "before it is timed", "prompt  arm", "512  alias-chunk", "first token ms"] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
    assert!(!text.contains("2048"), "more than the context: {text}");
    assert!(text.contains(" –"), "one written token has no speed of writing: {text}");
}

#[test]
fn prompts_can_be_of_a_text_and_tokens_that_are_none_are_refused() {
    let model = synthetic_file(MICRO);
    let line = format!("bench -m {} --prompts 64 --ctx 512 --write 1 --repeat 1 --vram-mib 32", model.0.display());
    let report = ebbtide(&format!("{line} --tokens 5,6,7")).json();
    assert_eq!(report["material"], "text");
    assert!(rows(&report).iter().all(|row| row["refused"].is_null()));
    // The held-out tokens are of a larger vocabulary.
    ebbtide(&format!("{line} --tokens {HELD}")).refused(2, &["outside the vocabulary of 512"]);
    ebbtide(&format!("{line} --text no/such.txt")).refused(3, &["no/such.txt"]);
    ebbtide(&format!("{line} --html no/such/folder/page.html"))
        .refused(2, &["--html: cannot write no/such/folder/page.html", "Name a file"]);
    ebbtide(&format!("{line} --slots 4,4")).refused(2, &["--slots 4,4", "`4` stands there twice"]);
    ebbtide(&format!("{line} --contexts 128")).refused(2, &["--contexts 128 with --ctx 512"]);
}
