//! Goal: the founding document's sizing reproduces the state it describes, which is what the exact sizing is there to avoid. Method: plans
//! for its card, with its reserve, its head, its slots, and a model whose experts are as large; no device is needed.

mod common;

use std::sync::{Arc, LazyLock};

use common::engine::TempFile;
use common::real_shapes::QWEN3_30B_A3B;
use ebbtide::model::{Model, ModelWeights};
use ebbtide::phase::{DeviceBudget, Plan, PlanError, PromptMemory};
use ebbtide::settings::{BlockSetting, CacheSizing, ChunkSetting, ContextSetting, EngineSettings, ExpertCache, HeadAliasMode};
use ebbtide::units::Bytes;

/// The document's reserve and head: Q5_K, 2,560 wide, 248,320 tokens.
const RESERVE: Bytes = Bytes::mib(590);
const HEAD: Bytes = Bytes(437_043_200);
/// Slots of the document's default and of its sizing.
const DEFAULT_SLOTS: u32 = 508;
const SEED_SLOTS: u32 = 749;

static LARGE: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let file = TempFile::new("-30b-seed.gguf");
    QWEN3_30B_A3B.gguf().write(&file.0);
    Arc::new(Model::open(&file.0).expect("a sound directory"))
});

/// The model of 30 billion weights, whose slots have the document's 1.72 MiB, with the document's head.
fn weights() -> ModelWeights {
    let mut weights = LARGE.weights.clone();
    weights.head.bytes = HEAD;
    weights
}

fn settings(sizing: CacheSizing, mode: HeadAliasMode) -> EngineSettings {
    EngineSettings {
        vram: Bytes::mib(8151),
        vram_reserve: Some(RESERVE),
        ctx: ContextSetting::Tokens(16_384),
        head_alias: true,
        head_alias_mode: mode,
        cache_sizing: sizing,
        ..EngineSettings::default()
    }
}

fn plan(device: DeviceBudget, settings: &EngineSettings) -> Result<Plan, PlanError> {
    Plan::with_windows(&LARGE.shape, &weights(), device, settings, Some(1))
}

/// The document's card: what others, and the parts that this model does not have, leave of it is so much that a cache sized beside the head
/// has the document's 508 slots. `graphs` is what captured windows and all that a driver makes lazily take out of the reserve.
fn card(graphs: Bytes) -> DeviceBudget {
    let total = Bytes::mib(8151);
    let empty = DeviceBudget {
        total,
        used_by_others: Bytes::ZERO,
        os_budget: None,
        context_bytes: Bytes::ZERO,
        graph_node_bytes: Bytes::ZERO,
        borrow_spill: true,
        halves_max: None,
    };
    let roomy = plan(empty, &settings(CacheSizing::Exact, HeadAliasMode::Overlay)).expect("fits");
    let resident = roomy.dense_bytes + roomy.kv_bytes + roomy.window_bytes + roomy.head_bytes;
    let wanted = resident + roomy.slot_bytes * u64::from(DEFAULT_SLOTS) + roomy.slot_bytes.halved() + RESERVE;
    let node = plan(DeviceBudget { graph_node_bytes: Bytes(1 << 20), ..empty }, &settings(CacheSizing::Exact, HeadAliasMode::Overlay));
    let nodes = node.expect("fits").graph_bytes.0 >> 20;
    DeviceBudget { used_by_others: total - wanted, graph_node_bytes: Bytes(graphs.0 / nodes), ..empty }
}

trait Halved {
    fn halved(self) -> Self;
}

impl Halved for Bytes {
    fn halved(self) -> Self {
        Self(self.0 / 2)
    }
}

#[test]
fn the_document_s_sizing_leaves_nothing_free_while_decoding() {
    // The document's default left 207 to 287 MiB of its 590 while decoding, so what is made lazily took 300 and more.
    for graphs in [Bytes::mib(172), Bytes::mib(303), Bytes::mib(383)] {
        let device = card(graphs);
        let seed = plan(device, &settings(CacheSizing::Seed, HeadAliasMode::Realloc)).expect("fits");
        assert!(seed.decode_free_bytes() < seed.slot_bytes + Bytes::mib(2), "0 MiB free while decoding: {seed}");
        assert!(seed.decode.total_bytes <= seed.limit_bytes, "the simulated device has no more than it has");
        assert_eq!((seed.alias_chunk, seed.kept_head_chunk, seed.prompt_memory), (2048, 0, PromptMemory::None), "{seed}");
        // While a prompt is read, what is free is what the buffers beside the slab leave of the reserve: hundreds of MiB.
        let free_reading = seed.limit_bytes - seed.prefill.total_bytes;
        assert!(free_reading > Bytes::mib(100) && free_reading < RESERVE, "{free_reading}");

        let exact = plan(device, &settings(CacheSizing::Exact, HeadAliasMode::Realloc)).expect("fits");
        for phase in [&exact.decode, &exact.prefill] {
            assert!(phase.total_bytes + RESERVE <= exact.limit_bytes, "the reserve is kept: {exact}");
        }
        assert!(exact.slots < seed.slots);
        let text = seed.to_string();
        assert!(text.contains("the reserve of 590.0 MiB is not kept while tokens are written"), "{text}");
    }
}

#[test]
fn the_document_s_slots_come_out_where_its_reserve_holds_the_head_and_its_graphs() {
    let device = card(Bytes::mib(172));
    let seed = plan(device, &settings(CacheSizing::Seed, HeadAliasMode::Realloc)).expect("fits");
    assert!(seed.slots.abs_diff(SEED_SLOTS) <= 2 && seed.slots_decided_by == "the budget with the head out", "{seed}");
    // The same card without graphs, sized beside the head.
    let exact = plan(DeviceBudget { graph_node_bytes: Bytes::ZERO, ..device }, &settings(CacheSizing::Exact, HeadAliasMode::Overlay));
    let exact = exact.expect("fits");
    let wide = u32::try_from(exact.wide_bytes.0.div_ceil(exact.slot_bytes.0)).expect("few");
    assert!((exact.slots + wide).abs_diff(DEFAULT_SLOTS) <= 1, "beside a wide window, which the document does not have: {exact}");
    let head_slots = u32::try_from(HEAD.0 / seed.slot_bytes.0).expect("few");
    assert!((seed.slots - DEFAULT_SLOTS).abs_diff(head_slots) <= 1, "the head's bytes in slots: {head_slots}");
}

#[test]
fn the_chunk_steps_down_the_ladder_and_a_card_for_none_of_it_is_refused() {
    let device = card(Bytes::mib(172));
    let mut seen = Vec::new();
    for less in (0..1600).step_by(20) {
        let others = device.used_by_others + Bytes::mib(less);
        let made = plan(DeviceBudget { used_by_others: others, ..device }, &settings(CacheSizing::Seed, HeadAliasMode::Realloc));
        match made {
            Ok(made) => {
                seen.push(made.alias_chunk);
                let buffers: Bytes =
                    made.prefill.owners.iter().filter(|part| part.owner.starts_with("prompt buffers")).map(|part| part.bytes).sum();
                let borrowed = made.slot_bytes * u64::from(made.slots - 1);
                let free = made.limit_bytes - (made.decode.total_bytes - made.head_bytes);
                assert!(buffers + Bytes::mib(512) <= borrowed + free, "512 MiB to spare: {made}");
            }
            Err(PlanError::NoSeedChunk { chunk, needed, left, .. }) => {
                assert!(chunk == 512 && needed > left);
                seen.push(0);
            }
            Err(PlanError::ResidentTooLarge { .. }) => seen.push(0),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(seen.is_sorted_by(|longer, shorter| longer >= shorter), "{seen:?}");
    seen.dedup();
    assert_eq!(seen, [2048, 1536, 1024, 512, 0]);
    let asked = EngineSettings { chunk: ChunkSetting::Tokens(700), ..settings(CacheSizing::Seed, HeadAliasMode::Realloc) };
    assert_eq!(plan(device, &asked).expect("fits").alias_chunk, 700, "a chunk that was asked for is no matter of the ladder");
}

#[test]
fn an_overlaid_head_is_sized_alike() {
    let device = card(Bytes::mib(172));
    let [realloc, overlay] =
        [HeadAliasMode::Realloc, HeadAliasMode::Overlay].map(|mode| plan(device, &settings(CacheSizing::Seed, mode)).expect("fits"));
    assert_eq!((realloc.slots, realloc.alias_chunk), (overlay.slots, overlay.alias_chunk));
    assert_eq!(overlay.decode.total_bytes, overlay.prefill.total_bytes, "memory changes hands and nothing else");
    assert_eq!(overlay.spill_room, Bytes::ZERO);
}

/// The numbers of the line that shows the sum: limit, terms taken from it, what is left, slots, bytes of a slot, what is over.
fn sum_of(plan: &Plan) -> (u64, Vec<u64>, u64, u64, u64, u64) {
    let text = plan.to_string();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("sum")).expect("a line with the sum").trim().to_owned();
    let number =
        |text: &str| text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{text} in {line}"));
    let mut sides = line.split(" = ");
    let mut terms = sides.next().expect("the terms").split(" - ");
    let limit = number(terms.next().expect("the limit"));
    let left = number(sides.next().expect("what is left"));
    let slots = sides.next().expect("slots");
    let (slots_part, over) = slots.split_once(" + ").expect("what is over");
    let (count, size) = slots_part.split_once(" slots x ").expect("slots and size");
    (limit, terms.map(number).collect(), left, number(count), number(size), number(over))
}

#[test]
fn the_terms_that_are_printed_add_up_to_the_byte() {
    let device = card(Bytes::mib(172));
    for sizing in [CacheSizing::Exact, CacheSizing::Seed] {
        for mode in [HeadAliasMode::Overlay, HeadAliasMode::Realloc] {
            for used_by_others in [device.used_by_others, device.used_by_others.halved(), Bytes::ZERO] {
                let made = plan(DeviceBudget { used_by_others, ..device }, &settings(sizing, mode)).expect("fits");
                let (limit, terms, left, slots, slot, over) = sum_of(&made);
                assert_eq!(limit - terms.iter().sum::<u64>(), left, "{made}");
                assert_eq!(slots * slot + over, left, "{made}");
                assert_eq!((limit, slots, slot), (made.limit_bytes.0, u64::from(made.slots), made.slot_bytes.0));
                assert!(made.slots_decided_by != "the budget" || over < slot, "another slot would fit: {made}");
            }
        }
    }
}

#[test]
fn a_chunk_is_as_long_as_context_and_settings_allow_where_that_is_less_than_the_ladder() {
    let device = card(Bytes::mib(172));
    let seed = settings(CacheSizing::Seed, HeadAliasMode::Realloc);
    let block = |tokens| EngineSettings { block: BlockSetting::Tokens(tokens), ..seed.clone() };
    assert_eq!(plan(device, &block(8)).expect("fits").alias_chunk, 8);
    let short = EngineSettings { ctx: ContextSetting::Tokens(300), ..seed.clone() };
    assert_eq!(plan(device, &short).expect("fits").alias_chunk, 300);
    // Overlaid, buffers lie in slots and head alone, so what else is free does not count.
    let few = EngineSettings { expert_cache: ExpertCache::Slots(3), ..settings(CacheSizing::Seed, HeadAliasMode::Overlay) };
    if let Err(error) = plan(device, &few) {
        let told = error.to_string();
        assert!(told.contains("--head-alias-mode realloc") && !told.contains("no setting helps"), "{told}");
        assert!(matches!(error, PlanError::NoSeedChunk { needed, left, .. } if left < needed), "{told}");
    }
}
