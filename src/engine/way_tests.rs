//! Goal: the choice follows from the bytes it prints. Method: plans written by hand, on which each way in turn moves the least.

use proptest::prelude::*;

use super::*;
use crate::backend::op::KvFormat;
use crate::phase::plan::PhaseBytes;

const MIB_BYTES: u64 = 1 << 20;

/// 100 slots of 1 MiB and a head of 8; the prompt buffers take 20 MiB and a quarter for each token.
fn plan(kept_head_chunk: u32, alias_chunk: u32) -> Plan {
    let nobody = PhaseBytes { owners: Vec::new(), total_bytes: Bytes::ZERO };
    Plan {
        limit_bytes: Bytes::mib(256),
        limit_decided_by: "",
        reserve_bytes: Bytes::mib(16),
        budget_bytes: Bytes::mib(240),
        ctx_tokens: 32_768,
        kv_format: KvFormat::F16,
        exact: false,
        dense_bytes: Bytes::mib(10),
        kv_bytes: Bytes::mib(10),
        window_bytes: Bytes::mib(1),
        graph_bytes: Bytes::ZERO,
        head_bytes: Bytes::mib(8),
        slots: 100,
        slot_bytes: Bytes::mib(1),
        prompt_memory: if kept_head_chunk > 0 { PromptMemory::Loan { slots_max: 90 } } else { PromptMemory::None },
        spill_room: Bytes::ZERO,
        kept_head_chunk,
        alias_chunk,
        chunk: kept_head_chunk.max(alias_chunk),
        block: kept_head_chunk.max(alias_chunk),
        decode: nobody.clone(),
        prefill: nobody,
        slots_decided_by: "",
        prompt_decided_by: "",
    }
}

/// A model of 1,000 MiB of experts, 8 of 128 used by a token.
fn choose_for(plan: &Plan, settings: &EngineSettings, tokens: usize) -> Choice {
    let prompt_bytes = |chunk: u32| Bytes(20 * MIB_BYTES + u64::from(chunk) * MIB_BYTES / 4);
    let model = ModelTraffic { expert_bytes: Bytes::mib(1000), n_expert: 128, n_expert_used: 8, prompt_bytes: &prompt_bytes };
    choose(plan, model, settings, tokens)
}

fn alias(threshold: AliasThreshold) -> EngineSettings {
    EngineSettings { head_alias: true, alias_min_tokens: threshold, ..EngineSettings::default() }
}

#[test]
fn the_reason_has_the_bytes_of_every_candidate() {
    let choice = choose_for(&plan(64, 128), &alias(AliasThreshold::Auto), 3);
    // Windows: 3 x 900 MiB x 1/16. Loan: 21 slots lent, so 921 MiB x (1 - (15/16)^3) and 21 MiB back. Alias: 13 slots and the head.
    assert_eq!(choice.reason, "loan 183 MiB, alias 182 MiB, windows 169 MiB over the link");
    assert_eq!((choice.way, choice.chunk), (Way::Windows, 1));
    let long = choose_for(&plan(64, 128), &alias(AliasThreshold::Auto), 6400);
    assert!(long.reason.contains(',') && long.reason.starts_with("loan 9"), "{}", long.reason);
    assert_eq!((long.way, long.chunk), (Way::Alias, 128));
    assert!(!long.reason.contains("windows"), "too long for windows: {}", long.reason);
}

#[test]
fn a_threshold_by_hand_decides_alone() {
    let plan = plan(64, 128);
    for (least, tokens, way) in
        [(0, 1, Way::Alias), (4, 2, Way::Windows), (4, 3, Way::Alias), (1000, 998, Way::Loan), (1000, 999, Way::Alias)]
    {
        let choice = choose_for(&plan, &alias(AliasThreshold::Tokens(least)), tokens);
        assert_eq!(choice.way, way, "from {least} on, {tokens} tokens before the last: {}", choice.reason);
    }
    assert_eq!(choose_for(&plan, &alias(AliasThreshold::Tokens(0)), 0).way, Way::Windows, "one token is always a window");
}

#[test]
fn equal_costs_keep_the_head() {
    let without_head = Plan { head_bytes: Bytes::ZERO, ..plan(128, 128) };
    assert_eq!(choose_for(&without_head, &alias(AliasThreshold::Auto), 500).way, Way::Loan);
}

#[test]
fn a_deterministic_run_never_reads_through_windows() {
    for (kept, lent) in [(64, 0), (64, 128), (0, 128), (1, 1)] {
        for tokens in 1..40 {
            for threshold in [AliasThreshold::Auto, AliasThreshold::Tokens(20)] {
                let settings = EngineSettings { deterministic: true, ..alias(threshold) };
                assert_ne!(choose_for(&plan(kept, lent), &settings, tokens).way, Way::Windows, "{kept} {lent} {tokens}");
            }
        }
    }
}

#[test]
fn without_room_beside_the_head_long_prompts_are_read_with_it_lent() {
    let plan = plan(0, 128);
    for threshold in [AliasThreshold::Auto, AliasThreshold::Tokens(5000)] {
        let choice = choose_for(&plan, &alias(threshold), 300);
        assert_eq!((choice.way, choice.chunk), (Way::Alias, 100), "{}", choice.reason);
    }
    assert_eq!(choose_for(&plan, &alias(AliasThreshold::Auto), 1).way, Way::Windows);
}

#[test]
fn numbers_are_grouped_by_thousands() {
    let shown: Vec<String> = [0.4, 7.0, 812.0, 9210.0, 1_234_567.8].map(grouped).into();
    assert_eq!(shown, ["0.4", "7.0", "812", "9,210", "1,234,568"]);
}

proptest! {
    #[test]
    fn levelled_stretches_cover_everything_and_differ_by_at_most_one(n_items in 0usize..5000, most in 1u32..700) {
        let items: Vec<usize> = (0..n_items).collect();
        let lengths: Vec<usize> = levelled(&items, most).map(<[usize]>::len).collect();
        prop_assert_eq!(levelled(&items, most).flatten().copied().collect::<Vec<_>>(), &*items);
        prop_assert_eq!(lengths.len(), n_items.div_ceil(most as usize), "as few as can be");
        if let (Some(longest), Some(shortest)) = (lengths.iter().max(), lengths.iter().min()) {
            prop_assert!(longest - shortest <= 1 && *longest <= most as usize);
            prop_assert!(2 * lengths[lengths.len() - 1] >= *longest);
            prop_assert_eq!(*longest, levelled_chunk(n_items, most) as usize);
            // Cutting again by the longest changes nothing.
            let again: Vec<usize> = levelled(&items, levelled_chunk(n_items, most)).map(<[usize]>::len).collect();
            prop_assert_eq!(again, lengths);
        }
    }
}
