//! `ebbtide plan`: both phases, without loading weights.

use serde::Serialize;

use super::Opener;
use super::session;
use crate::backend::Backend;
use crate::cli::command::PlanConfig;
use crate::cli::config::Config;
use crate::cli::exit::CommandError;
use crate::cli::{say, write_stdout};
use crate::engine::{EngineError, read_device_budget};
use crate::phase::Plan;
use crate::phase::plan::PhaseBytes;
use crate::units::Bytes;

/// What `plan --json` prints; names and meaning are a contract.
#[derive(Serialize)]
struct PlanReport<'a> {
    limit_bytes: Bytes,
    limit_decided_by: &'static str,
    budget_bytes: Bytes,
    reserve_bytes: Bytes,
    ctx_tokens: u32,
    slots: u32,
    slot_bytes: Bytes,
    slot_classes: Vec<SlotClass>,
    slots_decided_by: &'static str,
    window_rows: u32,
    chunk: u32,
    block: u32,
    chunk_head_kept: u32,
    chunk_head_lent: u32,
    prompt_decided_by: &'static str,
    head_bytes: Bytes,
    head_alias_mode: String,
    cache_sizing: String,
    reserve_kept_while_decoding: bool,
    decode_free_bytes: Bytes,
    slots_in_pieces: u32,
    decode: &'a PhaseBytes,
    prefill: &'a PhaseBytes,
}

/// Slots of one size.
#[derive(Serialize)]
struct SlotClass {
    bytes: Bytes,
    slots: u32,
}

/// Runs the command.
///
/// # Errors
/// Exit code 3 for the file, 4 where no plan fits.
pub fn plan<B: Backend>(plan: &PlanConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let model = session::open_model_for(&plan.model, &plan.engine.drafts)?;
    let settings = session::with_draft_vocab(&plan.engine, &model)?;
    let backend = open(&settings).map_err(EngineError::from)?;
    let (device, notice) = read_device_budget(&backend);
    if let Some(notice) = notice {
        say::line(format_args!("note: {notice}"));
    }
    let plan = Plan::new(&model.shape, &model.weights, device, &settings).map_err(EngineError::from)?;
    if !config.json {
        return write_stdout(&format!("{}: {}\n{plan}\n", say::harmless(&model.name()), model.shape.architecture));
    }
    let report = PlanReport {
        limit_bytes: plan.limit_bytes,
        limit_decided_by: plan.limit_decided_by,
        budget_bytes: plan.budget_bytes,
        reserve_bytes: plan.reserve_bytes,
        ctx_tokens: plan.ctx_tokens,
        slots: plan.slots,
        slot_bytes: plan.slot_bytes,
        slot_classes: plan.slot_table.classes(plan.slots).map(|(bytes, slots)| SlotClass { bytes, slots }).collect(),
        slots_decided_by: plan.slots_decided_by,
        window_rows: plan.window_rows,
        chunk: plan.chunk,
        block: plan.block,
        chunk_head_kept: plan.kept_head_chunk,
        chunk_head_lent: plan.alias_chunk,
        prompt_decided_by: plan.prompt_decided_by,
        head_bytes: plan.head_bytes,
        head_alias_mode: plan.slab.mode.to_string(),
        cache_sizing: plan.slab.sizing.to_string(),
        reserve_kept_while_decoding: plan.decode_free_bytes() >= plan.reserve_bytes,
        decode_free_bytes: plan.decode_free_bytes(),
        slots_in_pieces: plan.slots - plan.slab.main_slots(plan.slots),
        decode: &plan.decode,
        prefill: &plan.prefill,
    };
    write_stdout(&format!("{}\n", serde_json::to_string_pretty(&report).expect("numbers and text are JSON")))
}
