//! Goal: a plan keeps the budget in both phases whatever is asked, its numbers are those of known models, and what a refusal
//! advises works. Method: thousands of random settings on small models and on the directory of a 30-billion-weight one; every advice
//! is followed.

mod common;

use std::sync::{Arc, LazyLock};

use common::engine::{TempFile, alternating_model, bard, synthetic_model};
use common::real_shapes::QWEN3_30B_A3B;
use ebbtide::backends::host::{FreeReading, HostBackend, HostConfig};
use ebbtide::engine::read_device_budget;
use ebbtide::model::Model;
use ebbtide::model::layout::{PromptLayout, PromptSize};
use ebbtide::phase::plan::{PhaseBytes, lendable_slots};
use ebbtide::phase::{DeviceBudget, Plan, PlanError, PromptMemory, WayOut};
use ebbtide::settings::{Activations, BlockSetting, ChunkSetting, ContextSetting, EngineSettings, ExpertCache, HeadAliasMode, KvType};
use ebbtide::units::Bytes;
use proptest::prelude::*;

static MICRO: LazyLock<Arc<Model>> = LazyLock::new(|| synthetic_model("--shape micro --seed 1 --type Q4_K --head-type Q6_K"));
static TINY: LazyLock<Arc<Model>> = LazyLock::new(|| synthetic_model("--shape tiny --seed 1 --type Q8_0 --down-type F16"));
/// Two classes of slots.
static MIXED: LazyLock<Arc<Model>> = LazyLock::new(|| alternating_model("--shape tiny --seed 1 --type Q4_K", "Q4_K", "Q8_0"));
static BARD: LazyLock<Arc<Model>> = LazyLock::new(bard);
/// A file of 12 GB that is all hole; its weights are never read.
static LARGE: LazyLock<Arc<Model>> = LazyLock::new(|| {
    let file = TempFile::new("-30b.gguf");
    QWEN3_30B_A3B.gguf().write(&file.0);
    Arc::new(Model::open(&file.0).expect("a sound directory"))
});

/// A device of `total` bytes that nobody else uses.
fn empty_device(total: Bytes) -> DeviceBudget {
    DeviceBudget {
        total,
        used_by_others: Bytes::ZERO,
        os_budget: None,
        context_bytes: Bytes::ZERO,
        graph_node_bytes: Bytes(512),
        borrow_spill: true,
        halves_max: None,
    }
}

fn plan(model: &Model, settings: &EngineSettings) -> Result<Plan, PlanError> {
    Plan::new(&model.shape, &model.weights, empty_device(settings.vram), settings)
}

fn vram(mib: u64) -> EngineSettings {
    EngineSettings { vram: Bytes::mib(mib), ..EngineSettings::default() }
}

fn owner(phase: &PhaseBytes, name: &str) -> Bytes {
    phase.owners.iter().filter(|part| part.owner == name).map(|part| part.bytes).sum()
}

/// What holds for every plan.
fn check(model: &Model, settings: &EngineSettings, device: DeviceBudget, plan: &Plan) {
    let n_routed = model.shape.n_routed_experts();
    assert_eq!(plan.limit_bytes - plan.reserve_bytes, plan.budget_bytes);
    assert!(plan.limit_bytes <= settings.vram && plan.limit_bytes <= device.total.saturating_sub(device.used_by_others));
    assert!(device.os_budget.is_none_or(|os_budget| plan.limit_bytes <= os_budget));
    for phase in [&plan.decode, &plan.prefill] {
        let sum: Bytes = phase.owners.iter().map(|part| part.bytes).sum();
        assert_eq!(sum, phase.total_bytes);
        assert!(sum <= plan.budget_bytes, "{plan}");
    }
    match settings.head_alias_mode {
        HeadAliasMode::Overlay => {
            assert_eq!(plan.decode.total_bytes, plan.prefill.total_bytes, "memory changes hands and nothing else\n{plan}")
        }
        // What the buffers do not need of a head that is freed is nobody's.
        HeadAliasMode::Realloc => assert!(plan.prefill.total_bytes <= plan.budget_bytes, "{plan}"),
    }
    assert!((1..=n_routed).contains(&plan.slots));
    assert!((1..=8).contains(&plan.window_rows));
    let by_class: Bytes = plan.slot_table.classes(plan.slots).map(|(bytes, slots)| bytes * u64::from(slots)).sum();
    assert_eq!(owner(&plan.decode, "expert slots"), by_class);
    assert_eq!(owner(&plan.decode, "output head"), plan.head_bytes);
    assert!((1..=plan.ctx_tokens).contains(&plan.chunk));
    assert_eq!(plan.chunk, plan.kept_head_chunk.max(plan.alias_chunk));
    assert!(settings.head_alias || (plan.alias_chunk, plan.alias_block) == (0, 0));
    assert_eq!(plan.block, plan.kept_head_block.max(plan.alias_block));
    assert!(plan.kept_head_block >= plan.kept_head_chunk && plan.alias_block >= plan.alias_chunk, "a chunk is a block\n{plan}");
    assert!(plan.block <= plan.ctx_tokens && plan.wide_rows <= plan.ctx_tokens);
    match settings.expert_cache {
        ExpertCache::Slots(asked) => assert_eq!(plan.slots, asked.min(n_routed), "slots that were asked for are kept"),
        ExpertCache::Auto => {
            if let PromptMemory::Loan { slots_max } = plan.prompt_memory {
                assert_eq!(slots_max, lendable_slots(plan.slots, n_routed));
                assert!(slots_max <= plan.slots * 9 / 10 && plan.slots - slots_max >= 128.min(n_routed.div_ceil(4)));
            }
        }
    }
    let fits = |chunk: u32, room| {
        let size = PromptSize::chunk(chunk);
        chunk == 0 || PromptLayout::new(&model.shape, &model.weights, plan.arithmetic, size, room).is_some()
    };
    assert!(fits(plan.kept_head_chunk, plan.kept_head_room()) && fits(plan.alias_chunk, plan.alias_room()), "beside the pieces\n{plan}");
    let in_pieces = plan.slots - plan.slab.main_slots(plan.slots);
    assert!(in_pieces <= plan.slots / 4 && in_pieces < plan.slots, "{plan}");
    match settings.chunk {
        ChunkSetting::Tokens(tokens) => assert!(plan.chunk <= tokens),
        ChunkSetting::Auto { max } => assert!(plan.chunk <= max.unwrap_or(8192)),
    }
    // Room that nobody uses: less than a slot, unless every expert has one or the number was asked for.
    if settings.expert_cache == ExpertCache::Auto && plan.slots < n_routed {
        assert!(plan.budget_bytes - plan.decode.total_bytes < plan.slot_bytes, "{plan}");
    }
}

/// Follows each advice of a refusal; it must lead to a plan, and where it names a bound, one step further must not.
fn follow(model: &Model, settings: &EngineSettings, error: &PlanError) {
    let way_out = match error {
        PlanError::ResidentTooLarge { way_out, .. }
        | PlanError::SlotsTooMany { way_out, .. }
        | PlanError::NoPromptRoom { way_out, .. }
        | PlanError::ReserveTooLarge { way_out, .. } => way_out,
        PlanError::DeviceFull { .. } | PlanError::NoSeedChunk { .. } | PlanError::NoSpill => return,
    };
    let WayOut { vram_mib, ctx_tokens, kv_q8_0, slots, reserve_mib } = way_out.clone();
    let works = |settings: &EngineSettings| plan(model, settings).is_ok();
    assert!(vram_mib.is_some(), "a simulated device can always be made larger: {error}");
    if let Some(mib) = vram_mib {
        assert!(works(&EngineSettings { vram: Bytes::mib(mib), ..settings.clone() }), "--vram-mib {mib}: {error}");
        assert!(!works(&EngineSettings { vram: Bytes::mib(mib - 1), ..settings.clone() }), "--vram-mib {mib} is not the least: {error}");
    }
    if let Some(tokens) = ctx_tokens {
        assert!(works(&EngineSettings { ctx: ContextSetting::Tokens(tokens), ..settings.clone() }), "--ctx {tokens}: {error}");
        assert!(!works(&EngineSettings { ctx: ContextSetting::Tokens(tokens + 1), ..settings.clone() }), "--ctx {tokens}: {error}");
    }
    if let Some(slots) = slots {
        assert!(works(&EngineSettings { expert_cache: ExpertCache::Slots(slots), ..settings.clone() }), "--expert-cache {slots}: {error}");
    }
    if let Some(mib) = reserve_mib {
        assert!(works(&EngineSettings { vram_reserve: Some(Bytes::mib(mib)), ..settings.clone() }), "--vram-reserve-mib {mib}: {error}");
    }
    assert!(!kv_q8_0 || works(&EngineSettings { kv: KvType::Q8_0, ..settings.clone() }), "--kv q8_0: {error}");
}

fn any_settings() -> impl Strategy<Value = EngineSettings> {
    let slots = prop_oneof![
        Just(ExpertCache::Auto),
        (1u32..400).prop_map(ExpertCache::Slots),
        (0u32..8000).prop_map(|n| ExpertCache::Slots(n.max(1)))
    ];
    let ctx = prop_oneof![
        Just(ContextSetting::Auto),
        (1u32..3000).prop_map(ContextSetting::Tokens),
        (1u32..200_000).prop_map(ContextSetting::Tokens)
    ];
    let chunk = prop_oneof![
        Just(ChunkSetting::Auto { max: None }),
        (1u32..4000).prop_map(|max| ChunkSetting::Auto { max: Some(max) }),
        (1u32..9000).prop_map(ChunkSetting::Tokens),
    ];
    let kv = prop_oneof![Just(KvType::F16), Just(KvType::F32), Just(KvType::Q8_0)];
    let block = prop_oneof![Just(BlockSetting::Auto), Just(BlockSetting::Chunk), (1u32..9000).prop_map(BlockSetting::Tokens),];
    let activations = prop_oneof![Just(Activations::Q8), Just(Activations::F16), Just(Activations::F32)];
    let reserve = proptest::option::of((0u64..600).prop_map(Bytes::mib));
    let alias =
        prop_oneof![Just((false, HeadAliasMode::Overlay)), Just((true, HeadAliasMode::Overlay)), Just((true, HeadAliasMode::Realloc))];
    (slots, ctx, chunk, block, kv, activations, reserve, alias).prop_map(
        |(expert_cache, ctx, chunk, block, kv, activations, vram_reserve, (head_alias, head_alias_mode))| EngineSettings {
            expert_cache,
            ctx,
            chunk,
            block,
            kv,
            activations,
            vram_reserve,
            head_alias,
            head_alias_mode,
            ..EngineSettings::default()
        },
    )
}

/// The models by name, so that a failing case can be printed.
#[derive(Clone, Copy, Debug)]
enum Named {
    Micro,
    Tiny,
    Mixed,
    Bard,
    Large,
}

impl Named {
    fn model(self) -> &'static Model {
        match self {
            Self::Micro => &MICRO,
            Self::Tiny => &TINY,
            Self::Mixed => &MIXED,
            Self::Bard => &BARD,
            Self::Large => &LARGE,
        }
    }
}

/// A model and the megabytes of cards on which it is tight.
fn any_model() -> impl Strategy<Value = (Named, u64)> {
    prop_oneof![
        (1u64..24).prop_map(|mib| (Named::Micro, mib)),
        (1u64..40).prop_map(|mib| (Named::Tiny, mib)),
        (1u64..40).prop_map(|mib| (Named::Mixed, mib)),
        (1u64..64).prop_map(|mib| (Named::Bard, mib)),
        (900u64..26_000).prop_map(|mib| (Named::Large, mib)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn both_sums_add_up_and_keep_the_budget(
        (model, mib) in any_model(), settings in any_settings(), others in 0u64..4, os in proptest::option::of(0u64..24_000), spill: bool,
    ) {
        let settings = EngineSettings { vram: Bytes::mib(mib) + Bytes(17), ..settings };
        let total = Bytes::mib(mib + 1);
        let device = DeviceBudget {
            used_by_others: Bytes::mib(others),
            os_budget: os.map(Bytes::mib),
            context_bytes: Bytes::ZERO,
            borrow_spill: spill,
            halves_max: None,
            ..empty_device(total)
        };
        let model = model.model();
        if let Ok(plan) = Plan::new(&model.shape, &model.weights, device, &settings) {
            check(model, &settings, device, &plan);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn every_advice_of_a_refusal_leads_to_a_plan((model, mib) in any_model(), settings in any_settings()) {
        let settings = EngineSettings { vram: Bytes::mib(mib), ..settings };
        let model = model.model();
        if let Err(error) = plan(model, &settings) {
            follow(model, &settings, &error);
        }
    }
}

#[test]
fn each_refusal_can_be_had_and_its_advice_followed() {
    let large = &*LARGE;
    let fixed = |settings: EngineSettings| EngineSettings { ctx: ContextSetting::Tokens(32_768), ..settings };
    let cases = [
        (fixed(vram(4096)), "resident parts"),
        (EngineSettings { expert_cache: ExpertCache::Slots(5000), ..fixed(vram(8192)) }, "--expert-cache 5000 needs"),
        (
            EngineSettings { vram_reserve: Some(Bytes::mib(9000)), ..fixed(vram(8192)) },
            "a reserve of 9000.0 MiB leaves nothing of 8192.0 MiB",
        ),
        (EngineSettings { vram_reserve: Some(Bytes::ZERO), ..fixed(vram(4250)) }, "no room to read a prompt"),
    ];
    for (settings, wanted) in cases {
        let error = plan(large, &settings).expect_err(wanted);
        assert!(error.to_string().contains(wanted), "{error}");
        follow(large, &settings, &error);
    }
}

#[test]
fn a_device_that_others_hold_gives_no_advice_that_cannot_be_followed() {
    let large = &*LARGE;
    let device = |used_by_others| DeviceBudget { used_by_others, ..empty_device(Bytes::mib(8192)) };
    let settings = EngineSettings { vram: Bytes::mib(1 << 20), ctx: ContextSetting::Tokens(32_768), ..EngineSettings::default() };
    let refusal = |used| Plan::new(&large.shape, &large.weights, device(used), &settings).expect_err("too little is left");
    let error = refusal(Bytes::mib(4096)).to_string();
    assert!(!error.contains("--vram-mib") && error.contains("--ctx"), "{error}");
    let error = refusal(Bytes::mib(8000)).to_string();
    assert!(error.contains("free memory on the device"), "{error}");
    let error = refusal(Bytes::mib(8192));
    assert!(matches!(error, PlanError::DeviceFull { .. }), "{error}");
}

/// True within one in a hundred.
fn near(found: Bytes, wanted_mib: f64) -> bool {
    (found.as_mib() / wanted_mib - 1.0).abs() < 0.01
}

#[test]
fn a_30b_model_on_8_gib_has_the_sizes_that_its_shape_says() {
    let large = &*LARGE;
    let plan = plan(large, &vram(8192)).expect("fits");
    assert!(near(plan.slot_bytes, 1.723), "{}", plan.slot_bytes);
    assert!(near(large.weights.expert_bytes(), 11.10e9 / 1048576.0), "{}", large.weights.expert_bytes());
    assert!(near(plan.head_bytes, 204.0), "{}", plan.head_bytes);
    assert!(near(plan.dense_bytes, 966.0), "{}", plan.dense_bytes);
    assert_eq!(plan.kv_bytes, Bytes(96 << 10) * u64::from(plan.ctx_tokens), "96 KiB a token");
    assert_eq!(plan.reserve_bytes, Bytes::mib(256));
    assert_eq!((plan.ctx_tokens, plan.chunk), (32_768, 8192), "{plan}");
    // 8,192 less reserve, dense weights, head, and 3,072 of KV; decode buffers and graphs take about one.
    let expected = (8192.0 - 256.0 - 966.0 - 204.0 - 3072.0 - 1.3) / 1.723;
    assert!((f64::from(plan.slots) / expected - 1.0).abs() < 0.01, "{} and {expected}", plan.slots);
    assert_eq!(plan.longer_context, None, "the model's own context is not much longer");
    // The step after 16,384 tokens takes 1,536 MiB from the slots.
    let small = self::plan(large, &vram(4700)).expect("fits");
    let longer = small.longer_context.expect("the ladder goes on");
    assert_eq!((small.ctx_tokens, longer.ctx_tokens), (16_384, 32_768), "{small}");
    assert_eq!(longer.slots.is_some(), self::plan(large, &EngineSettings { ctx: ContextSetting::Tokens(32_768), ..vram(4700) }).is_ok());
    let slots_q8_0 = longer.slots_q8_0.expect("half as much fits");
    assert!(slots_q8_0 < small.slots && longer.slots.is_none_or(|slots| slots < slots_q8_0), "{longer:?}");
    assert!(small.to_string().contains("  context 32768 tokens ") && small.to_string().contains("with --kv q8_0 "), "{small}");
    let q8_0 = self::plan(large, &EngineSettings { kv: KvType::Q8_0, ..vram(8192) }).expect("fits");
    assert!(near(q8_0.kv_bytes, 3072.0 * 34.0 / 64.0), "{}", q8_0.kv_bytes);
}

/// Default settings on a card on which exactly `slots` fit beside a context of 32,768 tokens.
fn card_for(slots: u32) -> EngineSettings {
    let base = EngineSettings { ctx: ContextSetting::Tokens(32_768), vram_reserve: Some(Bytes::ZERO), ..vram(65_536) };
    let roomy = plan(&LARGE, &base).expect("64 GiB are plenty");
    // The wide window follows the room for slots, so the sum is made anew until it holds.
    let mut vram = roomy.resident_bytes() + roomy.slot_bytes * u64::from(slots);
    for _ in 0..8 {
        // Asked for, so that none of them becomes prompt buffers.
        let card = EngineSettings { vram, expert_cache: ExpertCache::Slots(slots), ..base.clone() };
        let Ok(plan) = plan(&LARGE, &card) else { break };
        vram = plan.resident_bytes() + plan.slot_bytes * u64::from(slots);
    }
    EngineSettings { vram, ..base }
}

#[test]
fn the_alias_affords_the_chunk_that_the_default_lacks() {
    let mut last = 0;
    for slots in [156, 170, 190, 210, 256, 320, 400] {
        let kept = plan(&LARGE, &card_for(slots)).expect("156 slots can lend");
        let lent = plan(&LARGE, &EngineSettings { head_alias: true, ..card_for(slots) }).expect("so can they with the head");
        assert_eq!((kept.slots, lent.slots), (slots, slots), "the head is counted in either case");
        assert_eq!(kept.prompt_memory, PromptMemory::Loan { slots_max: slots - 128 });
        assert!(kept.chunk > last, "{slots} slots: {}", kept.chunk);
        assert!(slots > 156 || kept.chunk <= 640, "28 slots hold little: {}", kept.chunk);
        assert_eq!(lent.alias_chunk, 8192, "{slots} slots");
        assert!(lent.block >= 29_853 && lent.block >= kept.block, "{slots} slots: {} and {}", lent.block, kept.block);
        last = kept.chunk;
    }
}

#[test]
fn a_number_of_slots_that_was_asked_for_is_kept_and_can_be_read_with() {
    for slots in [32, 64, 128, 140] {
        let settings = EngineSettings { expert_cache: ExpertCache::Slots(slots), ..card_for(slots) };
        let plan = plan(&LARGE, &settings).expect("nine slots in ten hold a chunk");
        assert_eq!((plan.slots, plan.prompt_memory), (slots, PromptMemory::Loan { slots_max: slots * 9 / 10 }));
        assert!(plan.slots_decided_by == "--expert-cache" && plan.prompt_decided_by.contains("--expert-cache"), "{plan}");
    }
}

#[test]
fn a_tiny_budget_without_the_alias_shares_what_is_left() {
    let plan = plan(&LARGE, &card_for(100)).expect("fits");
    assert!(matches!(plan.prompt_memory, PromptMemory::Owned { .. }));
    assert!((45..=55).contains(&plan.slots), "{plan}");
    assert!(plan.chunk >= 512, "{plan}");
}

#[test]
fn a_model_that_fits_at_all_starts_and_more_memory_never_makes_a_start_worse() {
    for (model, sizes) in [(&*BARD, (3..=64).collect::<Vec<u64>>()), (&*LARGE, (1500..=24_576).step_by(250).collect())] {
        for head_alias in [false, true] {
            let mut before: Option<Plan> = None;
            for mib in sizes.iter().copied() {
                let settings = EngineSettings { head_alias, ..vram(mib) };
                let plan = match plan(model, &settings) {
                    Ok(plan) => plan,
                    Err(error) => {
                        assert!(before.is_none(), "{mib} MiB are refused, less was enough: {error}");
                        continue;
                    }
                };
                if let Some(before) = before {
                    assert!(plan.ctx_tokens >= before.ctx_tokens, "{mib} MiB: {plan}\n{before}");
                    let better = plan.ctx_tokens > before.ctx_tokens || plan.slots >= before.slots;
                    assert!(better, "{mib} MiB: {plan}\n{before}");
                }
                before = Some(plan);
            }
            assert!(before.is_some());
        }
    }
}

#[test]
fn the_deciding_term_changes_with_its_input() {
    let large = &*LARGE;
    let settings = vram(8192);
    let decided = |device: DeviceBudget, settings: &EngineSettings| {
        Plan::new(&large.shape, &large.weights, device, settings).expect("fits").limit_decided_by
    };
    let device = empty_device(Bytes::mib(12_288));
    assert_eq!(decided(device, &settings), "--vram-mib");
    assert_eq!(decided(DeviceBudget { used_by_others: Bytes::mib(5000), ..device }, &settings), "what other programs leave of the device");
    assert_eq!(decided(DeviceBudget { os_budget: Some(Bytes::mib(7000)), ..device }, &settings), "the system's budget");
    let slots = |settings: &EngineSettings| plan(large, settings).expect("fits").slots_decided_by;
    assert_eq!(slots(&settings), "the budget");
    assert_eq!(slots(&vram(24_576)), "the model's experts: every one has a slot");
    assert_eq!(slots(&EngineSettings { expert_cache: ExpertCache::Slots(700), ..vram(8192) }), "--expert-cache");
    assert_eq!(slots(&card_for(100)), "the budget, beside prompt buffers of their own");
    let text = plan(large, &settings).expect("fits").to_string();
    for part in ["8192.0 MiB (--vram-mib)", "reserve of 256.0 MiB", "KV cache 3072.0 MiB", "output head 204.0 MiB", "decided by the budget"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn a_reading_of_free_memory_that_cannot_be_is_asked_for_again() {
    let total = Bytes::mib(6);
    let read = |fault: Option<(FreeReading, u32)>| {
        let backend = HostBackend::open(&HostConfig::new(total, 1)).expect("one thread");
        backend.faults().held_by_others = Bytes::mib(1);
        backend.faults().free_reading = fault;
        read_device_budget(&backend)
    };
    let slots = |device| Plan::new(&MICRO.shape, &MICRO.weights, device, &EngineSettings { vram: total, ..vram(6) }).expect("fits").slots;
    let (normal, notice) = read(None);
    assert_eq!((normal.used_by_others, notice), (Bytes::mib(1), None));
    for reading in [FreeReading::Zero, FreeReading::AboveTotal, FreeReading::Fails, FreeReading::Unknown] {
        let (device, notice) = read(Some((reading, 1)));
        assert_eq!((device, notice), (normal, None), "{reading:?} once");
        assert_eq!(slots(device), slots(normal));
        let (device, notice) = read(Some((reading, 2)));
        let notice = notice.unwrap_or_else(|| panic!("{reading:?} twice is told"));
        let planned = device.total - device.used_by_others;
        match reading {
            FreeReading::Zero | FreeReading::AboveTotal => assert!(planned == total && notice.contains("our own books"), "{notice}"),
            FreeReading::Unknown | FreeReading::Fails => {
                assert!(planned <= Bytes(total.0 / 10 * 8), "{planned}: no more than the safe share");
                assert!(notice.contains("80 %") && notice.contains("--vram-mib"), "{notice}");
            }
        }
    }
}

#[test]
fn windows_have_rows_for_a_64th_of_what_is_left_and_never_cost_a_start() {
    let cost = |plan: &Plan| plan.window_bytes + plan.graph_bytes;
    for (model, mib) in [(&*LARGE, 2048), (&*LARGE, 8192), (&*TINY, 64), (&*MICRO, 32)] {
        let roomy = plan(model, &vram(mib)).expect("fits");
        // The same budget in kibibytes less and less: the first that is refused has windows of one row just before.
        let settings = |kib: u64| EngineSettings { vram: Bytes(kib << 10), ctx: ContextSetting::Tokens(64), ..EngineSettings::default() };
        let starts = |kib: u64| plan(model, &settings(kib)).ok();
        let (mut refused, mut fits) = (0, mib << 10);
        while fits - refused > 1 {
            let middle = u64::midpoint(refused, fits);
            if starts(middle).is_some() { fits = middle } else { refused = middle }
        }
        let tightest = starts(fits).expect("it fits");
        assert_eq!(tightest.window_rows, 1, "{tightest}");
        let (one, several) = (cost(&tightest), cost(&roomy));
        assert!(roomy.window_rows > 1 && several > one, "{roomy}");
        let left = roomy.budget_bytes - roomy.dense_bytes - roomy.kv_bytes - roomy.head_bytes - one;
        assert!(several - one <= Bytes(left.0 / 64), "{roomy}");
        if roomy.window_rows < 8 {
            let of_row = Bytes((several - one).0 / u64::from(roomy.window_rows - 1));
            assert!(several - one + of_row * 2 > Bytes(left.0 / 64), "one row more would have been too much\n{roomy}");
        }
    }
}
