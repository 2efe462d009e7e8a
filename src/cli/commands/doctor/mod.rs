//! `ebbtide doctor`: what stands between this machine and a good start, each finding with a verdict and a way out.

mod card;
mod link;
mod machine;

use std::fmt::Write as _;

use serde::Serialize;

use super::{Opener, devices, session};
use crate::backend::Backend;
use crate::backend::survey::{Cards, Surveyor};
use crate::cli::command::DoctorConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::{say, write_stdout};
use crate::engine::read_device_budget;
use crate::phase::Plan;
use crate::settings::DeviceSetting;

/// What a check came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Fine,
    /// Works, and could be better.
    Note,
    /// A start would fail.
    Problem,
    /// Not looked at, for the reason that is told.
    NotRun,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Fine => "fine",
            Self::Note => "note",
            Self::Problem => "problem",
            Self::NotRun => "not run",
        }
    }
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Its short name; scripts may rely on it.
    name: &'static str,
    verdict: Verdict,
    /// What was found, with numbers.
    found: String,
    /// What to do; `None` where nothing is to be done.
    way_out: Option<String>,
}

impl Check {
    fn new(name: &'static str, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { name, verdict, found: found.into(), way_out: None }
    }

    fn way_out(mut self, way_out: impl Into<String>) -> Self {
        self.way_out = Some(way_out.into());
        self
    }
}

/// What `doctor --json` prints; names and meaning are a contract.
#[derive(Serialize)]
struct Report<'a> {
    verdict: Verdict,
    checks: &'a [Check],
    link: Option<link::LinkSpeed>,
}

/// Runs the command.
///
/// # Errors
/// Exit code 4 where a check found what stops a start, 3 for a model that cannot be opened.
pub fn doctor<B: Backend>(doctor: &DoctorConfig, config: &Config, open: Opener<B>, survey: Surveyor) -> Result<(), CommandError> {
    let model = doctor.model.as_deref().map(|path| session::open_model_for(path, &doctor.engine.drafts)).transpose()?;
    let settings = match &model {
        Some(model) => session::with_draft_vocab(&doctor.engine, model)?,
        None => doctor.engine.clone(),
    };
    let survey = survey();
    let wants_card = settings.device != DeviceSetting::Host && crate::backends::RUNS_ON_CARDS;
    let mut checks = vec![Check::new("processor", Verdict::Fine, devices::processor(&survey.host))];
    checks.extend(card::checks(&survey.cards, wants_card));
    checks.extend(machine::checks(model.as_deref()));

    let mut speed = None;
    let has_driver = matches!(survey.cards, Cards::Listed { .. });
    if wants_card && !has_driver {
        checks.push(Check::new("device", Verdict::NotRun, "there is no driver to open a card with"));
    } else {
        match open(&settings) {
            Err(error) => checks.push(
                Check::new("device", Verdict::Problem, error.to_string())
                    .way_out("`ebbtide devices` lists what there is; --device names one of them, --device host stays on the processor"),
            ),
            Ok(backend) => {
                let abilities = backend.capabilities().clone();
                checks.push(Check::new("device", Verdict::Fine, format!("{} opens", abilities.device)));
                let (budget, notice) = read_device_budget(&backend);
                if wants_card {
                    checks.push(card::free_memory(&survey.cards, &abilities, &budget, notice));
                    let (found, measured) = link::check(&backend);
                    checks.extend(found);
                    speed = measured;
                }
                if let Some(model) = &model {
                    checks.push(machine::pinning_budget(&settings, model, abilities.reads_pageable_memory));
                    checks.push(match Plan::new(&model.shape, &model.weights, budget, &settings) {
                        Ok(plan) => Check::new("plan", Verdict::Fine, plan_in_words(&plan)),
                        Err(error) => Check::new("plan", Verdict::Problem, error.to_string()).way_out("the message names what would fit"),
                    });
                }
            }
        }
    }
    report(&checks, speed, config)
}

fn plan_in_words(plan: &Plan) -> String {
    let Plan { slots, ctx_tokens, chunk, block, reserve_bytes, limit_bytes, .. } = plan;
    format!(
        "{slots} slots, {ctx_tokens} tokens of context, chunks of {chunk}, blocks of {block} within {limit_bytes}, {reserve_bytes} of them free"
    )
}

fn report(checks: &[Check], link: Option<link::LinkSpeed>, config: &Config) -> Result<(), CommandError> {
    let stops: Vec<&str> = checks.iter().filter(|check| check.verdict == Verdict::Problem).map(|check| check.name).collect();
    let noted = checks.iter().any(|check| check.verdict == Verdict::Note);
    let verdict = match (stops.is_empty(), noted) {
        (false, _) => Verdict::Problem,
        (true, true) => Verdict::Note,
        (true, false) => Verdict::Fine,
    };
    if config.json {
        let report = Report { verdict, checks, link };
        write_stdout(&format!("{}\n", serde_json::to_string_pretty(&report).expect("numbers and text are JSON")))?;
    } else {
        write_stdout(&in_words(checks))?;
    }
    if stops.is_empty() {
        return Ok(());
    }
    Err(CommandError::new(ExitStatus::Device, anyhow::anyhow!("what stops a start: {}", stops.join(", "))))
}

fn in_words(checks: &[Check]) -> String {
    let mut text = String::new();
    for check in checks {
        let _ = writeln!(text, "{:8} {:12} {}", check.verdict.word(), check.name, say::harmless(&check.found));
        if let Some(way_out) = &check.way_out {
            let _ = writeln!(text, "{:21} {}", "", say::harmless(way_out));
        }
    }
    text
}
