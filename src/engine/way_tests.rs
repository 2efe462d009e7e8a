//! Goal: the choice follows from the times it prints. Method: plans and costs written by hand, on which each way in turn takes the
//! least.

use super::*;
use crate::backend::op::KvFormat;
use crate::engine::costs::{BlockSample, Prior};
use crate::phase::plan::PhaseBytes;
use crate::settings::BlockSetting;

const MIB_BYTES: u64 = 1 << 20;

/// Prompt buffers: 20 MiB, a quarter for each token of a chunk and a 32nd for each of a block.
fn buffer_bytes(size: PromptSize) -> Bytes {
    Bytes(20 * MIB_BYTES + u64::from(size.chunk) * MIB_BYTES / 4 + u64::from(size.block) * MIB_BYTES / 32)
}

/// 100 slots of 1 MiB and a head of 8; room for prompt buffers of `kept` and `lent` MiB.
fn plan(kept: u64, lent: u64) -> Plan {
    let nobody = PhaseBytes { owners: Vec::new(), total_bytes: Bytes::ZERO };
    let limits = SizeLimits::new(&EngineSettings::default(), 32_768, 1);
    let block = |room: u64| limits.largest_block(|size| buffer_bytes(size) <= Bytes::mib(room)).map_or(0, |size| size.block);
    let chunk = |room: u64| limits.largest_chunk(|size| buffer_bytes(size) <= Bytes::mib(room));
    Plan {
        limit_bytes: Bytes::mib(256),
        limit_decided_by: "",
        reserve_bytes: Bytes::mib(16),
        budget_bytes: Bytes::mib(240),
        ctx_tokens: 32_768,
        kv_format: KvFormat::F16,
        longer_context: None,
        arithmetic: crate::model::Arithmetic { exact: false, halves_max: None },
        dense_bytes: Bytes::mib(10),
        context_bytes: Bytes::ZERO,
        state_bytes: Bytes::ZERO,
        draft_head_bytes: Bytes::ZERO,
        kv_bytes: Bytes::mib(10),
        window_bytes: Bytes::mib(1),
        graph_bytes: Bytes::ZERO,
        wide_rows: 0,
        wide_bytes: Bytes::ZERO,
        window_rows: 8,
        head_bytes: Bytes::mib(8),
        slots: 100,
        slot_bytes: Bytes::mib(1),
        slot_table: std::sync::Arc::new(crate::experts::SlotTable::new(&[Bytes::mib(1)], 100)),
        prompt_memory: if kept > 0 { PromptMemory::Loan { slots_max: 90 } } else { PromptMemory::None },
        spill_room: Bytes::ZERO,
        kept_head_chunk: chunk(kept),
        kept_head_block: block(kept),
        alias_chunk: chunk(lent),
        alias_block: block(lent),
        chunk: chunk(kept.max(lent)),
        block: block(kept.max(lent)),
        decode: nobody.clone(),
        prefill: nobody,
        slots_decided_by: "",
        prompt_decided_by: "",
        slab: crate::phase::plan::SlabPlan::default(),
    }
}

/// A model of 1,000 MiB of experts in ten layers, 8 of 128 used by a token, on a link of 1,000 MiB a second.
fn choose_with(plan: &Plan, costs: &Costs, settings: &EngineSettings, tokens: usize) -> Choice {
    let rooms = [(Way::Loan, plan.kept_head_block), (Way::Alias, plan.alias_block)];
    let arena_bytes = |size: PromptSize, way| {
        let (_, block_max) = rooms.into_iter().find(|&(of, _)| of == way)?;
        let room = buffer_bytes(PromptSize { block: block_max, ..PromptSize::chunk(64) })
            .max(buffer_bytes(PromptSize::chunk(if way == Way::Alias { plan.alias_chunk } else { plan.kept_head_chunk })));
        Some(buffer_bytes(size)).filter(|&bytes| bytes <= room)
    };
    let model = ModelTraffic {
        expert_bytes: Bytes::mib(1000),
        n_layer: 10,
        n_attention_layer: 10,
        block_step: 1,
        n_expert: 128,
        n_expert_used: 8,
        arena_bytes: &arena_bytes,
    };
    choose(plan, model, costs, settings, Reading { past: 0, tokens })
}

fn link_only() -> Costs {
    // Next to nothing but the link, and rows alone where something is measured.
    let mut costs = Costs::new(true, Prior { row_s: 1e-12, routed_row_s: 1e-12, ..Prior::default() });
    costs.note_link(Bytes::mib(1000), 1.0);
    costs
}

fn choose_for(plan: &Plan, settings: &EngineSettings, tokens: usize) -> Choice {
    choose_with(plan, &link_only(), settings, tokens)
}

fn alias(threshold: AliasThreshold) -> EngineSettings {
    EngineSettings { head_alias: true, alias_min_tokens: threshold, ..EngineSettings::default() }
}

/// The founding document's order.
fn chunk_order(settings: EngineSettings) -> EngineSettings {
    EngineSettings { block: BlockSetting::Chunk, ..settings }
}

#[test]
fn the_reason_has_the_time_of_every_candidate() {
    let choice = choose_for(&plan(60, 80), &chunk_order(alias(AliasThreshold::Auto)), 3);
    // 9 layers. Loan: 21 slots lent, so 921 MiB x 9/10 x (1 - (15/16)^3) and 21 MiB back, and as much with 13 slots and the head of 8;
    // one window touches all ten layers, 900 MiB.
    assert_eq!(choice.reason, "predicted: loan 0.17 s (1 x 3), alias 0.17 s (1 x 3), windows 0.16 s");
    assert_eq!((choice.chunk, choice.block), (choice.size().chunk, choice.size().block));
    let long = choose_for(&plan(60, 80), &alias(AliasThreshold::Auto), 6400);
    assert_eq!(long.way, Way::Alias);
    assert!(long.reason.starts_with("predicted: loan ") && long.reason.contains(" in chunks of 64)"), "{}", long.reason);
    assert!(long.predicted_s > 0.0);
}

#[test]
fn a_longer_block_moves_less_and_is_taken_where_it_fits() {
    let roomy = plan(60, 0);
    let document = Plan { kept_head_block: roomy.kept_head_chunk, ..roomy };
    let document = choose_for(&document, &chunk_order(EngineSettings::default()), 4000);
    assert_eq!((document.block, document.chunk), (levelled_len(4000, 142), document.block), "40 MiB at 9/32 a token");
    let ours = choose_for(&plan(60, 0), &EngineSettings::default(), 4000);
    assert_eq!((ours.way, ours.block), (Way::Loan, 667), "24 MiB at 1/32 a token hold 768, six stretches are levelled");
    assert!(ours.predicted_s * 4.0 < document.predicted_s, "{} and {}", ours.reason, document.reason);
}

#[test]
fn computation_that_outweighs_the_link_decides_for_fewer_lent_slots() {
    let mut costs = link_only();
    // A second for 100 rows of a layer: the experts that an arena of fewer slots streams twice cross in its shadow.
    costs.note_block(&BlockSample {
        chunk_rows: 100,
        linear_s: 1.0,
        n_experts: 128,
        routed_rows: 800,
        experts_s: 9.0,
        ..BlockSample::default()
    });
    let settings = EngineSettings::default();
    let by_compute = choose_with(&plan(80, 0), &costs, &settings, 90);
    let by_link = choose_for(&plan(80, 0), &settings, 90);
    assert!(by_compute.size() != by_link.size(), "{} and {}", by_compute.reason, by_link.reason);
    assert!(buffer_bytes(by_compute.size()) < buffer_bytes(by_link.size()), "{} and {}", by_compute.reason, by_link.reason);
}

#[test]
fn a_block_that_would_take_long_is_cut() {
    let mut costs = link_only();
    costs.note_block(&BlockSample { chunk_rows: 100, linear_s: 1.0, ..BlockSample::default() });
    // 90 s for a thousand rows of nine layers: ten seconds are 111.
    let choice = choose_with(&plan(80, 0), &costs, &EngineSettings::default(), 1000);
    assert!((90..=111).contains(&choice.block), "{}", choice.reason);
}

#[test]
fn a_threshold_by_hand_decides_alone() {
    let plan = plan(60, 80);
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
    let without_head = Plan { head_bytes: Bytes::ZERO, ..plan(80, 80) };
    assert_eq!(choose_for(&without_head, &alias(AliasThreshold::Auto), 500).way, Way::Loan);
}

#[test]
fn a_wide_window_reads_a_short_prompt_with_nothing_lent() {
    let wide = Plan { wide_rows: 128, ..plan(60, 80) };
    let choice = choose_for(&wide, &alias(AliasThreshold::Auto), 100);
    assert_eq!((choice.way, choice.chunk, choice.ring_slots), (Way::Wide, 100, 0), "{}", choice.reason);
    assert_ne!(choose_for(&wide, &alias(AliasThreshold::Auto), 129).way, Way::Wide);
    let never = EngineSettings { short_read: ShortRead::Tokens(0), ..alias(AliasThreshold::Auto) };
    assert!(matches!(choose_for(&wide, &never, 100).way, Way::Loan | Way::Alias));
    let deterministic = EngineSettings { deterministic: true, ..alias(AliasThreshold::Auto) };
    assert_eq!(choose_for(&wide, &deterministic, 3).way, Way::Wide, "the same arithmetic as longer prompts");
}

#[test]
fn a_deterministic_run_never_reads_through_windows() {
    for (kept, lent) in [(60, 0), (60, 80), (0, 80), (25, 25)] {
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
    let plan = plan(0, 80);
    for threshold in [AliasThreshold::Auto, AliasThreshold::Tokens(5000)] {
        let choice = choose_for(&plan, &alias(threshold), 300);
        assert_eq!((choice.way, choice.block), (Way::Alias, 300), "{}", choice.reason);
    }
    assert_eq!(choose_for(&plan, &alias(AliasThreshold::Auto), 1).way, Way::Windows);
}

#[test]
fn times_are_shown_with_two_decimals_or_fewer() {
    let shown: Vec<String> = [0.000_04, 0.0321, 0.4, 7.046, 12.34].map(shown_s).into();
    assert_eq!(shown, ["0.04 ms", "32.10 ms", "0.40 s", "7.05 s", "12.3 s"]);
}
