//! `ebbtide plan`: what it promises holds at every budget.

use serde_json::Value;

use crate::common::engine::synthetic_file;
use crate::program::{BARD, ebbtide};

const MIB: u64 = 1 << 20;

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

/// Checks one plan against the contract; `None` where no plan fits, which must be said with exit code 4 and a way out.
fn plan(model: &str, mib: u64, rest: &str) -> Option<Value> {
    let line = format!("plan -m {model} --vram-mib {mib} {rest} --json");
    let ended = ebbtide(&line).end();
    if ended.code != 0 {
        assert_eq!(ended.code, 4, "{line}: {}", ended.stderr);
        assert!(ended.stdout.is_empty() && ended.stderr.contains("--"), "{line}: {}", ended.stderr);
        return None;
    }
    let plan: Value = serde_json::from_slice(&ended.stdout).expect("one object");
    let (budget, reserve) = (bytes(&plan["budget_bytes"]), bytes(&plan["reserve_bytes"]));
    assert!(budget + reserve <= mib * MIB, "{line}: {plan}");
    for phase in ["decode", "prefill"] {
        let total = bytes(&plan[phase]["total_bytes"]);
        let owners = plan[phase]["owners"].as_array().expect("a list");
        assert_eq!(owners.iter().map(|owner| bytes(&owner["bytes"])).sum::<u64>(), total, "{line}: {plan}");
        assert!(owners.iter().all(|owner| owner["owner"].is_string()), "{line}: {plan}");
        assert!(total + reserve <= mib * MIB, "{line}: {phase} takes {total} beside a reserve of {reserve}");
    }
    for key in ["slots", "slot_bytes", "chunk", "block"] {
        assert!(bytes(&plan[key]) >= 1, "{line}: {key} in {plan}");
    }
    assert!(bytes(&plan["block"]) >= bytes(&plan["chunk"]), "{line}: {plan}");
    Some(plan)
}

#[test]
fn both_phases_and_the_reserve_stay_within_the_limit_for_every_setting() {
    let model = synthetic_file("--shape micro --seed 4 --type Q4_K --head-type Q6_K");
    let mut planned = 0;
    for mib in [1, 2, 3, 4, 6, 9, 64] {
        for ctx in ["auto", "16", "512", "4096"] {
            for kv in ["f32", "f16", "q8_0"] {
                // Each combination with one cache and one way of reading, all of both over the sweep.
                let cache = ["auto", "1", "5"][planned % 3];
                let alias = planned % 2 == 0;
                let rest = format!("--ctx {ctx} --kv {kv} --expert-cache {cache} --prefill-head-alias={alias}");
                planned += 1;
                plan(model.0.to_str().expect("a plain name"), mib, &rest);
            }
        }
    }
    assert!(plan(model.0.to_str().expect("a plain name"), 1, "--ctx 512").is_none(), "a budget that nothing fits is part of the sweep");
}

#[test]
fn more_memory_never_gives_fewer_slots_or_a_shorter_context() {
    for alias in [false, true] {
        let rest = format!("--prefill-head-alias={alias}");
        let plans: Vec<Value> = [8, 10, 16, 64, 8192].into_iter().filter_map(|mib| plan(BARD, mib, &rest)).collect();
        assert!(plans.len() >= 4);
        for pair in plans.windows(2) {
            assert!(bytes(&pair[0]["ctx_tokens"]) <= bytes(&pair[1]["ctx_tokens"]), "{pair:?}");
        }
        assert_eq!(plans.last().expect("some")["slots"], 64, "all experts have a slot in the end");
    }
}

#[test]
fn an_own_reserve_is_kept_and_one_without_room_is_refused() {
    let plan = plan(BARD, 64, "--vram-reserve-mib 20").expect("it fits");
    assert_eq!(plan["reserve_bytes"], 20 * MIB);
    ebbtide(&format!("plan -m {BARD} --vram-mib 64 --vram-reserve-mib 64")).refused(2, &["--vram-reserve-mib 64", "--vram-mib 64"]);
    ebbtide(&format!("plan -m {BARD} --vram-mib 64 --vram-reserve-mib 63")).refused(4, &["--vram-mib"]);
}

#[test]
fn the_way_out_of_a_budget_too_small_is_one() {
    for rest in ["", "--kv f32", "--ctx 2048", "--vram-reserve-mib 1"] {
        let refused = ebbtide(&format!("plan -m {BARD} --vram-mib 2 {rest}")).refused(4, &["raise --vram-mib to "]);
        let advice = refused.stderr.split_once("raise --vram-mib to ").expect("just seen").1;
        let mib: u64 = advice.split_whitespace().next().expect("a number").parse().expect("a number");
        let ended = ebbtide(&format!("plan -m {BARD} --vram-mib {mib} {rest}")).end();
        // Enough for the model; the prompt's buffers may need more, and then that is said.
        assert!(ended.code == 0 || ended.stderr.contains("no room to read a prompt"), "{mib}: {}", ended.stderr);
    }
}

/// The founding document's sizing, on a device with so large a reserve that its 512 MiB to spare are there.
const SEED: &str = "--vram-mib 1024 --vram-reserve-mib 1018 --ctx 2048 --prefill-head-alias --head-alias-mode realloc --cache-sizing seed";

#[test]
fn the_document_s_sizing_says_that_the_reserve_is_not_kept_while_decoding() {
    let text = ebbtide(&format!("plan -m {BARD} {SEED}")).ends_with(0).text();
    assert!(text.contains("the reserve of 1018.0 MiB is not kept while tokens are written"), "{text}");
    let plan: Value = serde_json::from_slice(&ebbtide(&format!("plan -m {BARD} {SEED} --json")).ends_with(0).stdout).expect("one object");
    let (limit, reserve) = (bytes(&plan["limit_bytes"]), bytes(&plan["reserve_bytes"]));
    let (decode, free) = (bytes(&plan["decode"]["total_bytes"]), bytes(&plan["decode_free_bytes"]));
    assert_eq!((decode + free, plan["reserve_kept_while_decoding"].as_bool()), (limit, Some(false)), "{plan}");
    assert!(decode + reserve > limit && decode <= limit, "{plan}");
    assert_eq!((plan["cache_sizing"].as_str(), plan["head_alias_mode"].as_str()), (Some("seed"), Some("realloc")));
    let exact = ebbtide(&format!("plan -m {BARD} {} --json", SEED.replace("sizing seed", "sizing exact"))).ends_with(0);
    let exact: Value = serde_json::from_slice(&exact.stdout).expect("one object");
    assert_eq!(exact["reserve_kept_while_decoding"].as_bool(), Some(true), "{exact}");
    assert!(bytes(&exact["slots"]) < bytes(&plan["slots"]));
    ebbtide(&format!("plan -m {BARD} --vram-mib 64 --prefill-head-alias --cache-sizing seed"))
        .refused(4, &["--cache-sizing exact", "512 MiB"]);
}

#[test]
fn a_head_that_is_freed_and_the_document_s_sizing_give_the_tokens_of_the_default() {
    let prompt: Vec<String> = (0..200).map(|token| (token * 19 % 4000).to_string()).collect();
    let run = |rest: &str| ebbtide(&format!("run -m {BARD} -n 6 --temp 0 --deterministic --tokens {} {rest}", prompt.join(","))).json();
    let (plain, seed) = (run("--ctx 2048"), run(&format!("{SEED} --alias-min-tokens 0")));
    assert_eq!((&plain["tokens"], &seed["way"]), (&seed["tokens"], &Value::from("alias")));
    assert!(bytes(&seed["recaptures"]) >= 1 && bytes(&seed["head_reloads"]) == 1, "{seed}");
}

#[test]
fn the_text_names_both_phases() {
    let text = ebbtide(&format!("plan -m {BARD} --vram-mib 8 --prefill-head-alias")).ends_with(0).text();
    for part in ["decode", "prefill", "slots", "chunk", "reserve", "head lent"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
}
