//! Recorded requests again, their output length forced.
//!
//! The requests of a trial run in order in one engine that is fresh at the trial's start, so what an engine learns and keeps from one
//! request to the next acts as it does in life. Arms take turns; each trial of an arm is compared with the same trial of the base.

pub mod file;
pub mod groups;

use serde::Serialize;
use thiserror::Error;

use super::arm::{self, Arm};
use super::figures::{READ, WRITTEN, ratios};
use super::{Ended, Figures, Rig, Run, Told, fits_context, stats};
use crate::backend::Backend;
use crate::engine::EngineError;
use crate::settings::{ContextSetting, EngineSettings};
use crate::units::TokenId;
use groups::{Bucket, Group, Sample};

/// What to replay, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// Settings of all engines, as far as no arm sets them.
    pub base: EngineSettings,
    /// Arms, at least one; the first is what the others are compared with, unless the default is among them.
    pub arms: Vec<Arm>,
    /// Trials of each arm.
    pub trials: u32,
    /// Start of the draws behind the intervals.
    pub seed: u64,
}

/// A request that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayRequest {
    /// Its line in the file.
    pub line: usize,
    /// What its recorder calls it.
    pub id: Option<String>,
    /// A word for its kind.
    pub tag: Option<String>,
    /// What is read.
    pub prompt: Vec<TokenId>,
    /// Tokens to write.
    pub output_tokens: u32,
}

/// Why nothing was replayed.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The device, or a plan for any engine at all.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A request that the context does not hold.
    #[error("line {line}: {excess}. Raise --ctx to {needed} or take the request out")]
    TooLong {
        /// Its line in the file.
        line: usize,
        /// The numbers.
        excess: String,
        /// The context that would do for all requests.
        needed: usize,
    },
}

/// What an arm's engines were, or why there was none.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ArmReport {
    /// Which.
    pub arm: Arm,
    /// What it sets.
    pub explanation: &'static str,
    /// Trials that ran to their end.
    pub trials: u32,
    /// Why there are no figures.
    pub refused: Option<String>,
}

/// One arm's figures for one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestFigures {
    /// Which arm.
    pub arm: Arm,
    /// Over the trials.
    #[serde(flatten)]
    pub figures: Figures,
    /// Reading, times as fast as the base: the median over trials; `None` of the base itself, and where that did not run.
    pub read_ratio: Option<f64>,
    /// Writing, likewise.
    pub written_ratio: Option<f64>,
}

/// A request with what became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestReport {
    /// Its line in the file.
    pub line: usize,
    /// What its recorder calls it.
    pub id: Option<String>,
    /// A word for its kind.
    pub tag: Option<String>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens written.
    pub output_tokens: u32,
    /// Which bucket it is in.
    pub bucket: &'static str,
    /// Each arm's figures.
    pub results: Vec<RequestFigures>,
}

/// What a replay came to.
#[derive(Debug)]
pub struct ReplayResult {
    /// Tokens of context of all engines.
    pub ctx_tokens: u32,
    /// The arm that the others are compared with.
    pub base_arm: Arm,
    /// All arms.
    pub arms: Vec<ArmReport>,
    /// Requests of the file.
    pub requests_recorded: usize,
    /// Those of them that ran.
    pub requests: Vec<RequestReport>,
    /// Requests by fresh tokens, those that are there, and all together.
    pub buckets: Vec<Group>,
    /// How it ended.
    pub ended: Ended,
}

/// What was measured of one arm.
struct Lane {
    arm: Arm,
    trials: u32,
    refused: Option<String>,
    /// By request.
    runs: Vec<Vec<Run>>,
}

/// Runs the trials.
///
/// # Errors
/// [`ReplayError`] before anything runs; what fails later ends the replay, and what was measured is kept.
pub fn replay<B: Backend>(replay: &Replay, requests: &[ReplayRequest], rig: &mut Rig<'_, B>) -> Result<ReplayResult, ReplayError> {
    let device = rig.device_budget(&replay.base)?;
    let ctx_tokens = rig.context_tokens(device, &replay.base).map_err(EngineError::from)?;
    check_lengths(requests, ctx_tokens)?;
    let base = EngineSettings { ctx: ContextSetting::Tokens(ctx_tokens), ..replay.base.clone() };
    let lane = |&arm| Lane { arm, trials: 0, refused: None, runs: vec![Vec::new(); requests.len()] };
    let mut lanes: Vec<Lane> = replay.arms.iter().map(lane).collect();
    let total = replay.arms.len() as u64 * u64::from(replay.trials) * requests.len() as u64;
    let mut done = 0;
    let mut ended = Ended::Done;
    'trials: for trial in 0..replay.trials {
        for arm in arm::turn(&replay.arms, trial) {
            let lane = lanes.iter_mut().find(|lane| lane.arm == arm).expect("every arm has a lane");
            match run_trial(requests, trial, &arm.settings(&base), lane, rig, &mut || {
                done += 1;
                Told::Step { done, total }
            }) {
                Ended::Done => {}
                stopped => {
                    ended = stopped;
                    break 'trials;
                }
            }
        }
    }
    Ok(report(replay, requests, ctx_tokens, &lanes, ended))
}

fn check_lengths(requests: &[ReplayRequest], ctx_tokens: u32) -> Result<(), ReplayError> {
    for request in requests {
        if let Err(excess) = fits_context(request.prompt.len(), request.output_tokens, ctx_tokens) {
            let lengths = requests.iter().map(|request| request.prompt.len() + request.output_tokens as usize);
            return Err(ReplayError::TooLong { line: request.line, excess, needed: lengths.max().unwrap_or(0) });
        }
    }
    Ok(())
}

fn run_trial<B: Backend>(
    requests: &[ReplayRequest],
    trial: u32,
    settings: &EngineSettings,
    lane: &mut Lane,
    rig: &mut Rig<'_, B>,
    step: &mut dyn FnMut() -> Told,
) -> Ended {
    if (rig.is_interrupted)() {
        return Ended::Interrupted;
    }
    let mut engine = match rig.start(settings) {
        Ok(engine) => engine,
        Err(error) => {
            lane.refused.get_or_insert_with(|| error.to_string());
            requests.iter().for_each(|_| (rig.tell)(step()));
            return Ended::Done;
        }
    };
    for (request, runs) in requests.iter().zip(&mut lane.runs) {
        match rig.run(&mut engine, request.prompt.clone(), request.output_tokens) {
            Ok(Some(outcome)) => runs.push(Run::new(trial, &outcome, engine.plan())),
            Ok(None) => return Ended::Interrupted,
            Err(error) => return Ended::Failed(error),
        }
        (rig.tell)(step());
    }
    lane.trials += 1;
    Ended::Done
}

/// The arm that others are compared with.
fn base_arm(arms: &[Arm]) -> Arm {
    if arms.contains(&Arm::Default) { Arm::Default } else { arms.first().copied().unwrap_or(Arm::Default) }
}

fn report(replay: &Replay, requests: &[ReplayRequest], ctx_tokens: u32, lanes: &[Lane], ended: Ended) -> ReplayResult {
    let base_arm = base_arm(&replay.arms);
    let base = lanes.iter().find(|lane| lane.arm == base_arm);
    let arms = lanes.iter().map(|lane| ArmReport {
        arm: lane.arm,
        explanation: lane.arm.explanation(),
        trials: lane.trials,
        refused: lane.refused.clone().filter(|_| lane.trials == 0),
    });
    let mut reports = Vec::new();
    let mut samples: Vec<Sample<'_>> = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        let base_runs = base.map_or(&[][..], |lane| &lane.runs[index]);
        let ran = || lanes.iter().filter(|lane| !lane.runs[index].is_empty());
        // Arms may come to reuse different parts of a prompt; the bucket is that of the one they are compared with.
        let Some(first) = base_runs.first().or_else(|| ran().find_map(|lane| lane.runs[index].first())) else { continue };
        let bucket = Bucket::of(first.fresh_tokens);
        // The base against itself is 1 and says nothing.
        let compared = |lane: &Lane| (lane.arm != base_arm).then_some(base_runs);
        let results = ran().filter_map(|lane| {
            let runs = &lane.runs[index];
            let ratio = |speed| compared(lane).and_then(|base| stats::median(ratios(runs, base, speed)));
            Some(RequestFigures { arm: lane.arm, figures: Figures::of(runs)?, read_ratio: ratio(READ), written_ratio: ratio(WRITTEN) })
        });
        reports.push(RequestReport {
            line: request.line,
            id: request.id.clone(),
            tag: request.tag.clone(),
            prompt_tokens: request.prompt.len(),
            output_tokens: request.output_tokens,
            bucket: bucket.name(),
            results: results.collect(),
        });
        samples.extend(ran().map(|lane| Sample { arm: lane.arm, bucket, runs: &lane.runs[index], base: compared(lane) }));
    }
    let buckets = groups::all(&replay.arms, &samples, replay.seed);
    ReplayResult { ctx_tokens, base_arm, arms: arms.collect(), requests_recorded: requests.len(), requests: reports, buckets, ended }
}
