//! Speed of reading and writing at the points of a sweep, every arm at each.
//!
//! A number of slots stands for a budget: the least VRAM on which the model and so many slots have room together. All arms get that
//! same budget and size their caches themselves, so that VRAM which one arm spends on slots is there for another's prompt buffers.
//!
//! At each point every arm starts an engine of its own for every repetition, runs once to warm it up, so that the planner chooses by
//! measured costs, and is then timed on every prompt.

use serde::Serialize;

use super::arm::{self, Arm};
use super::figures::{READ, WRITTEN, ratios};
use super::material::Material;
use super::stats::Spread;
use super::{Ended, Figures, Rig, Run, Told, fits_context};
use crate::backend::Backend;
use crate::engine::EngineError;
use crate::phase::plan::DeviceBudget;
use crate::settings::{BlockSetting, ChunkSetting, ContextSetting, EngineSettings, ExpertCache};
use crate::units::Bytes;

/// Prompt lengths where none are given, as far as the context holds them.
pub const PROMPTS: [u32; 3] = [512, 2048, 8192];
/// Most points times prompts of a sweep.
pub const PLACES_MAX: usize = 4096;
/// Steps in which a budget is sought.
const BUDGET_STEP: u64 = 4096;

/// What to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// Settings of all engines, as far as neither sweep nor arm sets them.
    pub base: EngineSettings,
    /// Numbers of slots, each standing for a budget; `Auto` is the budget of `base` with what it says of slots.
    pub slots: Vec<ExpertCache>,
    /// Contexts.
    pub contexts: Vec<ContextSetting>,
    /// Chunks.
    pub chunks: Vec<ChunkSetting>,
    /// Blocks of the arms that have blocks of more than a chunk.
    pub blocks: Vec<BlockSetting>,
    /// Tokens of prompts; empty: [`PROMPTS`].
    pub prompts: Vec<u32>,
    /// Tokens written after each.
    pub write_tokens: u32,
    /// Runs of each kind.
    pub repeat: u32,
    /// What prompts are made of.
    pub material: Material,
}

/// A point of the sweep, and one arm's figures at one prompt length there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Tokens of context.
    pub ctx_tokens: u32,
    /// Slots as asked for.
    pub slots_asked: String,
    /// The budget that this came to; 0 where none has room for them.
    pub vram_bytes: Bytes,
    /// The chunk as asked for.
    pub chunk_asked: String,
    /// The block as asked for.
    pub block_asked: String,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Which arm.
    pub arm: Arm,
    /// Why there are no figures.
    pub refused: Option<String>,
    /// What was measured.
    #[serde(flatten)]
    pub figures: Option<Figures>,
    /// Reading, times as fast as the default in the same repetition.
    pub read_ratio: Option<Spread>,
    /// Writing, likewise.
    pub written_ratio: Option<Spread>,
}

/// What a sweep came to.
#[derive(Debug)]
pub struct SweepResult {
    /// Rows in the order of the sweep; of one that ended early those that have figures or a refusal.
    pub rows: Vec<Row>,
    /// How it ended.
    pub ended: Ended,
}

/// Settings at a point; the budget may not be there.
struct Point {
    settings: EngineSettings,
    slots: ExpertCache,
    ctx_tokens: u32,
    no_budget: Option<String>,
}

/// One arm at one prompt length of a point.
#[derive(Clone, Default)]
struct Cell {
    runs: Vec<Run>,
    refused: Option<String>,
}

/// Why measuring cannot go on.
enum Stop {
    Interrupted,
    Failed(EngineError),
}

impl Sweep {
    /// Points times prompts.
    #[must_use]
    pub fn places(&self) -> usize {
        let prompts = if self.prompts.is_empty() { PROMPTS.len() } else { self.prompts.len() };
        [self.slots.len(), self.contexts.len(), self.chunks.len(), self.blocks.len(), prompts].into_iter().fold(1, usize::saturating_mul)
    }

    /// Lengths to measure in a context.
    fn prompts(&self, ctx_tokens: u32) -> Vec<u32> {
        if !self.prompts.is_empty() {
            return self.prompts.clone();
        }
        let fitting: Vec<u32> =
            PROMPTS.into_iter().filter(|&tokens| fits_context(tokens as usize, self.write_tokens, ctx_tokens).is_ok()).collect();
        // In a context that holds none of them, half of what is left beside the answer.
        if fitting.is_empty() { vec![(ctx_tokens.saturating_sub(self.write_tokens) / 2).max(1)] } else { fitting }
    }
}

/// Measures a sweep.
///
/// # Errors
/// [`EngineError`] where the device cannot be opened, or no context can be had on it; what a single point lacks is said in its rows.
pub fn measure<B: Backend>(sweep: &Sweep, rig: &mut Rig<'_, B>) -> Result<SweepResult, EngineError> {
    let points = points(sweep, rig)?;
    let total = points.iter().map(|point| steps(sweep, point)).sum();
    let mut progress = Progress { done: 0, total };
    let mut rows = Vec::new();
    for point in &points {
        let prompts = sweep.prompts(point.ctx_tokens);
        let mut cells = vec![vec![Cell::default(); Arm::ALL.len()]; prompts.len()];
        let stopped = measure_point(sweep, point, &prompts, &mut cells, rig, &mut progress).err();
        for (&prompt_tokens, cells) in prompts.iter().zip(&cells) {
            rows.extend(Arm::ALL.into_iter().filter_map(|arm| row(point, prompt_tokens, arm, cells)));
        }
        match stopped {
            None => {}
            Some(Stop::Interrupted) => return Ok(SweepResult { rows, ended: Ended::Interrupted }),
            Some(Stop::Failed(error)) => return Ok(SweepResult { rows, ended: Ended::Failed(error) }),
        }
    }
    Ok(SweepResult { rows, ended: Ended::Done })
}

struct Progress {
    done: u64,
    total: u64,
}

impl Progress {
    fn step<B: Backend>(&mut self, steps: u64, rig: &mut Rig<'_, B>) {
        self.done += steps;
        (rig.tell)(Told::Step { done: self.done, total: self.total });
    }
}

/// Runs at a point, those that warm up included.
fn steps(sweep: &Sweep, point: &Point) -> u64 {
    let engines = u64::from(sweep.repeat) * Arm::ALL.len() as u64;
    engines * (1 + sweep.prompts(point.ctx_tokens).len() as u64)
}

fn points<B: Backend>(sweep: &Sweep, rig: &mut Rig<'_, B>) -> Result<Vec<Point>, EngineError> {
    let device = rig.device_budget(&sweep.base)?;
    let mut points = Vec::new();
    for &ctx in &sweep.contexts {
        let ctx_tokens = rig.context_tokens(device, &EngineSettings { ctx, ..sweep.base.clone() })?;
        let base = EngineSettings { ctx: ContextSetting::Tokens(ctx_tokens), ..sweep.base.clone() };
        for &slots in &sweep.slots {
            let (budget, expert_cache) = match slots {
                ExpertCache::Auto => (Ok(base.vram), base.expert_cache),
                ExpertCache::Slots(asked) => (budget_for(asked, &base, device, rig), ExpertCache::Auto),
            };
            let settings = EngineSettings { vram: *budget.as_ref().unwrap_or(&Bytes::ZERO), expert_cache, ..base.clone() };
            for &chunk in &sweep.chunks {
                for &block in &sweep.blocks {
                    let settings = EngineSettings { chunk, block, ..settings.clone() };
                    points.push(Point { settings, slots, ctx_tokens, no_budget: budget.as_ref().err().cloned() });
                }
            }
        }
    }
    Ok(points)
}

/// The least VRAM on which so many slots have room beside all that writing needs.
fn budget_for<B: Backend>(slots: u32, base: &EngineSettings, device: DeviceBudget, rig: &Rig<'_, B>) -> Result<Bytes, String> {
    let n_experts = rig.model.shape.n_routed_experts();
    if slots > n_experts {
        return Err(format!("the model has {n_experts} routed experts: {slots} slots would stay empty"));
    }
    let settings = Arm::Auto.settings(&EngineSettings { expert_cache: ExpertCache::Auto, ..base.clone() });
    let has_room = |vram: Bytes| {
        let plan = rig.plan(device, &EngineSettings { vram, ..settings.clone() });
        plan.map(|plan| plan.slots >= slots)
    };
    match has_room(base.vram) {
        Ok(true) => {}
        Ok(false) => return Err(format!("{slots} slots have no room in {}: raise --vram-mib", base.vram)),
        Err(error) => return Err(error.to_string()),
    }
    // Invariant: `most` steps have room for the slots; the least that has lies above `least`.
    let (mut least, mut most) = (0, base.vram.0.div_ceil(BUDGET_STEP));
    while most - least > 1 {
        let middle = least + (most - least) / 2;
        if has_room(Bytes(middle * BUDGET_STEP)) == Ok(true) { most = middle } else { least = middle }
    }
    Ok(Bytes(most * BUDGET_STEP).min(base.vram))
}

/// Fills `cells`, by prompt and arm.
fn measure_point<B: Backend>(
    sweep: &Sweep,
    point: &Point,
    prompts: &[u32],
    cells: &mut [Vec<Cell>],
    rig: &mut Rig<'_, B>,
    progress: &mut Progress,
) -> Result<(), Stop> {
    let fits = |tokens: u32| fits_context(tokens as usize, sweep.write_tokens, point.ctx_tokens);
    for (&tokens, cells) in prompts.iter().zip(cells.iter_mut()) {
        let refusal = point.no_budget.clone().or(fits(tokens).err());
        cells.iter_mut().for_each(|cell| cell.refused.clone_from(&refusal));
    }
    let longest = prompts.iter().copied().filter(|&tokens| fits(tokens).is_ok()).max();
    let Some(longest) = longest.filter(|_| point.no_budget.is_none()) else {
        progress.step(steps(sweep, point), rig);
        return Ok(());
    };
    let steps_of_engine = 1 + prompts.len() as u64;
    for repetition in 0..sweep.repeat {
        for arm in arm::turn(&Arm::ALL, repetition) {
            if (rig.is_interrupted)() {
                return Err(Stop::Interrupted);
            }
            let column = arm.index();
            let mut engine = match rig.start(&arm.settings(&point.settings)) {
                Ok(engine) => engine,
                Err(error) => {
                    cells.iter_mut().for_each(|cells| refuse(&mut cells[column], &error));
                    progress.step(steps_of_engine, rig);
                    continue;
                }
            };
            let n_vocab = rig.model.shape.n_vocab;
            let mut run = |number: u64, tokens: u32, rig: &mut Rig<'_, B>| {
                let prompt = sweep.material.prompt(number, tokens as usize, n_vocab);
                let outcome = rig.run(&mut engine, prompt, sweep.write_tokens).map_err(Stop::Failed)?;
                let outcome = outcome.ok_or(Stop::Interrupted)?;
                progress.step(1, rig);
                Ok(Run::new(repetition, &outcome, engine.plan()))
            };
            run(0, longest, rig)?;
            // All arms read the same prompts in a repetition, and others in the next.
            let first_number = 1 + u64::from(repetition) * prompts.len() as u64;
            for ((number, &tokens), cells) in (first_number..).zip(prompts).zip(cells.iter_mut()) {
                if fits(tokens).is_ok() {
                    cells[column].runs.push(run(number, tokens, rig)?);
                }
            }
        }
    }
    Ok(())
}

/// Says why there is nothing, unless something better is known: that the prompt does not even fit the context.
fn refuse(cell: &mut Cell, error: &EngineError) {
    if cell.refused.is_none() && cell.runs.is_empty() {
        cell.refused = Some(error.to_string());
    }
}

/// `None` where the sweep ended before it came to this.
fn row(point: &Point, prompt_tokens: u32, arm: Arm, cells: &[Cell]) -> Option<Row> {
    let (cell, base) = (&cells[arm.index()], &cells[Arm::Default.index()]);
    let figures = Figures::of(&cell.runs);
    let refused = cell.refused.clone().filter(|_| figures.is_none());
    if figures.is_none() && refused.is_none() {
        return None;
    }
    let settings = &point.settings;
    Some(Row {
        ctx_tokens: point.ctx_tokens,
        slots_asked: point.slots.to_string(),
        vram_bytes: settings.vram,
        chunk_asked: settings.chunk.to_string(),
        block_asked: settings.block.to_string(),
        prompt_tokens,
        arm,
        refused,
        figures,
        read_ratio: Spread::of(ratios(&cell.runs, &base.runs, READ)),
        written_ratio: Spread::of(ratios(&cell.runs, &base.runs, WRITTEN)),
    })
}
