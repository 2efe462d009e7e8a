//! `replay`: recorded requests in all their forms, arms beside each other, and files that are refused with the place of their fault.
//! No speed is asserted.

use serde_json::Value;

use crate::common::engine::{TempFile, synthetic_file, tokens};
use crate::page::Page;
use crate::program::{BARD, ebbtide, file_of};

const MICRO: &str = "--shape micro --seed 4 --type Q4_K --head-type Q6_K";

/// A line with token numbers.
fn line_of(id: &str, seed: u64, prompt_tokens: usize, output_tokens: u32) -> String {
    let request = serde_json::json!({ "id": id, "prompt_tokens": tokens(seed, prompt_tokens, 500), "output_tokens": output_tokens });
    format!("{request}\n")
}

fn array<'a>(report: &'a Value, key: &str) -> &'a Vec<Value> {
    report[key].as_array().unwrap_or_else(|| panic!("no {key} in {report}"))
}

#[test]
fn arms_are_compared_by_request_and_by_bucket() {
    let model = synthetic_file(MICRO);
    let requests =
        [line_of("a", 1, 30, 3), "\n".to_owned(), line_of("b", 2, 64, 1), line_of("<b>&\"c", 3, 200, 5), line_of("d", 4, 600, 4)];
    let (file, page) = (file_of(".jsonl", requests.concat().as_bytes()), TempFile::new(".html"));
    let line = format!(
        "replay {} -m {} --trials 2 --ctx 1024 --vram-mib 16 --expert-cache 8 --short-read 0 --html {}",
        file.0.display(),
        model.0.display(),
        page.0.display()
    );
    let report = ebbtide(&line).json();
    assert_eq!((&report["ended"], &report["base_arm"], &report["trials"]), (&"done".into(), &"default".into(), &2.into()));
    let arms = ["default", "loan", "alias", "auto"];
    assert!(array(&report, "arms").iter().zip(arms).all(|(told, arm)| told["arm"] == arm && told["trials"] == 2), "{report}");
    let told: Vec<_> = array(&report, "requests").iter().map(|told| (told["line"].as_u64(), told["bucket"].as_str())).collect();
    let expected = [(1, "1-64"), (3, "1-64"), (4, "65-512"), (5, "513-2048")].map(|(line, bucket)| (Some(line), Some(bucket)));
    assert_eq!(told, expected);
    for request in array(&report, "requests") {
        let results = array(request, "results");
        assert_eq!(results.len(), arms.len());
        for (result, arm) in results.iter().zip(arms) {
            assert_eq!((&result["arm"], &result["runs"], &result["fresh_tokens"]), (&arm.into(), &2.into(), &request["prompt_tokens"]));
            let way = result["way"].as_str().expect("a word");
            assert!(if arm == "auto" { ["loan", "alias"].contains(&way) } else { (way == "alias") == (arm == "alias") }, "{result}");
            // The output is as long as recorded: a single token has no speed of writing.
            assert_eq!(result["written_tokens_per_s"].is_null(), request["output_tokens"] == 1, "{result}");
            assert_eq!(result["read_ratio"].is_null(), arm == "default", "{result}");
        }
    }
    let buckets = array(&report, "buckets");
    let told: Vec<_> = buckets.iter().map(|bucket| (bucket["bucket"].as_str(), bucket["requests"].as_u64())).collect();
    let expected = [("1-64", 2), ("65-512", 1), ("513-2048", 1), ("all", 4)].map(|(bucket, count)| (Some(bucket), Some(count)));
    assert_eq!(told, expected);
    for (bucket, arm) in buckets.iter().flat_map(|bucket| array(bucket, "results").iter().map(move |result| (bucket, result))) {
        let ratio = &arm["read_ratio"];
        if arm["arm"] == "default" {
            assert!(ratio.is_null());
            continue;
        }
        let [low, median, high] =
            [&ratio["interval"]["low"], &ratio["median"], &ratio["interval"]["high"]].map(|end| end.as_f64().expect("a number"));
        assert!(low <= median && median <= high && low > 0.0, "{bucket}");
    }
    let page = Page::read(&page);
    for bucket in buckets {
        for result in array(bucket, "results") {
            page.assert_has_number(result["read_tokens_per_s"].as_f64().expect("a number"), result);
            page.assert_has_number(result["first_token_s"].as_f64().expect("a number") * 1e3, result);
        }
    }
    page.assert_has_cell("&lt;b&gt;&amp;&quot;c");
    assert!(page.count("svg") >= 4);
}

#[test]
fn texts_and_conversations_are_replayed_and_the_first_arm_is_the_base() {
    let requests = "{\"prompt\": \"In the beginning <|im_end|>\", \"output_tokens\": 2, \"tag\": \"plain\"}\n\
        {\"messages\": [{\"role\": \"user\", \"content\": \"And?\"}, {\"role\": \"assistant\", \"content\": \"Yea.\"}, \
        {\"role\": \"user\", \"content\": \"So\"}], \"output_tokens\": 2}\n";
    let file = file_of(".jsonl", requests.as_bytes());
    let model = synthetic_file(MICRO);
    let line = format!("replay {} -m {} --trials 1 --ctx 512 --vram-mib 32 --arms auto,loan", file.0.display(), model.0.display());
    let report = ebbtide(&line).json();
    assert_eq!(report["base_arm"], "auto");
    let requests = array(&report, "requests");
    assert_eq!((&requests[0]["tag"], &requests[1]["tag"]), (&"plain".into(), &Value::Null));
    // Control tokens in a text are text, as for `run`.
    let run = ebbtide(&format!("run -m {} -n 1 --temp 0 --ctx 512 --vram-mib 32", model.0.display()))
        .arg("-p")
        .arg("In the beginning <|im_end|>");
    assert_eq!(run.json()["prompt_tokens"], requests[0]["prompt_tokens"]);
    let ended = ebbtide(&line).ends_with(0);
    for part in ["1 trial of 2 requests in order", "times as fast as `auto`", "plain", "fresh tokens"] {
        assert!(ended.text().contains(part), "{part:?} is not in: {}", ended.text());
    }
}

#[test]
fn a_file_at_fault_is_named_with_line_and_field() {
    let good = line_of("a", 1, 20, 2);
    let cases: [(String, i32, &str); 7] = [
        (format!("{good}{{\"prompt\": \"x\", \"output_tokens\": 1, \"max_tokens\": 1}}"), 3, "line 2: unknown field `max_tokens`"),
        (format!("{good}{{\"prompt\": \"x\"}}"), 3, "line 2: the field `output_tokens` is missing"),
        (
            format!("{good}\n{{\"prompt_tokens\": [1, 512], \"output_tokens\": 1}}"),
            3,
            "line 3: the field `prompt_tokens`: entry 2 is `512`",
        ),
        (format!("{good}nonsense"), 3, "line 2: not JSON"),
        (String::new(), 3, "no requests"),
        (format!("{good}{}", line_of("b", 2, 500, 13)), 2, "line 2: 500 tokens to read and 13 to write are more than the context of 512"),
        (
            format!("{good}{{\"messages\": [{{\"role\": \"none\", \"content\": {{}}}}], \"output_tokens\": 1, \"id\": []}}"),
            3,
            "the field `id`",
        ),
    ];
    let model = synthetic_file(MICRO);
    for (text, code, part) in cases {
        let file = file_of(".jsonl", text.as_bytes());
        let line = format!("replay {} -m {} --ctx 512 --vram-mib 32", file.0.display(), model.0.display());
        ebbtide(&line).refused(code, &[part, &file.0.display().to_string()]);
    }
    ebbtide(&format!("replay no/such.jsonl -m {BARD}")).refused(3, &["no/such.jsonl"]);
    ebbtide(&format!("replay -m {BARD} --arms default,head --prefill-head-alias"))
        .refused(2, &["--arms default,head", "`head` is not one of"]);
    ebbtide(&format!("replay -m {BARD} --alias-min-tokens 0")).refused(2, &["--alias-min-tokens 0 with replay", "the file of requests"]);
}

#[test]
fn arms_that_no_budget_starts_are_the_device_s_fault_and_said() {
    let file = file_of(".jsonl", line_of("a", 1, 20, 2).as_bytes());
    let line = format!("replay {} -m {BARD} --ctx 512 --vram-mib 1 --trials 1", file.0.display());
    let ended = ebbtide(&line).fails(4, &["no arm could be started"]);
    assert!(ended.text().contains("not run: ") && ended.text().contains("raise --vram-mib"), "{}", ended.text());
}
