//! Measuring an engine: sweeps ([`frontier`]) and recorded requests ([`replay`]), several ways of setting it ([`Arm`]) in one run.
//!
//! One engine lives at a time, as on a card that has room for one, and each has its device to itself. Arms take turns
//! ([`arm::turn`]); ratios are taken between runs of one repetition, so that a machine that slows down slows both. Times are those of
//! the engine's own [`Outcome`]. Nothing here prints: results are values with a JSON form, tables and pages are made from them.

pub mod about;
pub mod arm;
pub mod figures;
pub mod frontier;
pub mod frontier_report;
pub mod html;
pub mod material;
pub mod replay;
pub mod replay_report;
pub mod stats;
pub mod table;

pub use arm::Arm;
pub use figures::{Figures, Run};

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::backend::{Backend, BackendError};
use crate::engine::sampler::Sampling;
use crate::engine::{Engine, EngineError, Finish, Outcome, Request, read_device_budget};
use crate::model::Model;
use crate::phase::plan::DeviceBudget;
use crate::phase::{Plan, PlanError};
use crate::settings::{ContextSetting, EngineSettings};
use crate::units::TokenId;

/// What measuring has to say on its way.
#[derive(Debug)]
pub enum Told {
    /// Runs done, of all.
    Step {
        /// Done.
        done: u64,
        /// All.
        total: u64,
    },
    /// An engine was started: its plan, for those who want to know all.
    Started(String),
    /// A line for the log.
    Notice(String),
}

/// How measuring ended; what was measured until then is kept.
#[derive(Debug)]
pub enum Ended {
    /// All is there.
    Done,
    /// The user asked to stop.
    Interrupted,
    /// A run failed that had been started.
    Failed(EngineError),
}

/// Where engines come from and who is told.
pub struct Rig<'a, B: Backend> {
    /// The model of all engines.
    pub model: &'a Arc<Model>,
    /// Opens a device for settings.
    pub open: &'a dyn Fn(&EngineSettings) -> Result<B, BackendError>,
    /// Whether the user asked to stop.
    pub is_interrupted: &'a dyn Fn() -> bool,
    /// Is told what happens.
    pub tell: &'a mut dyn FnMut(Told),
}

impl<B: Backend> Rig<'_, B> {
    /// What the device that `settings` ask for has for us.
    fn device_budget(&mut self, settings: &EngineSettings) -> Result<DeviceBudget, EngineError> {
        let (budget, notice) = read_device_budget(&(self.open)(settings)?);
        if let Some(notice) = notice {
            (self.tell)(Told::Notice(notice));
        }
        Ok(budget)
    }

    fn plan(&self, device: DeviceBudget, settings: &EngineSettings) -> Result<Plan, PlanError> {
        Plan::new(&self.model.shape, &self.model.weights, device, settings)
    }

    /// The context that all arms get where `base` leaves it open: the default's, else, where the default cannot be had at all, that of
    /// the arm that asks for least.
    fn context_tokens(&self, device: DeviceBudget, base: &EngineSettings) -> Result<u32, PlanError> {
        if let ContextSetting::Tokens(tokens) = base.ctx {
            return Ok(tokens);
        }
        let planned = |arm: Arm| self.plan(device, &arm.settings(base)).map(|plan| plan.ctx_tokens);
        planned(Arm::Default).or_else(|_| planned(Arm::Auto))
    }

    fn start(&mut self, settings: &EngineSettings) -> Result<Engine<B>, EngineError> {
        let backend = (self.open)(settings)?;
        let mut engine = Engine::start(backend, Arc::clone(self.model), settings, &mut |_, _| ())?;
        (self.tell)(Told::Started(engine.plan().to_string()));
        self.pass_notices(&mut engine);
        Ok(engine)
    }

    fn pass_notices(&mut self, engine: &mut Engine<B>) {
        for notice in engine.take_notices() {
            (self.tell)(Told::Notice(notice));
        }
    }

    /// Reads `prompt` and writes `output_tokens` tokens greedily, whatever the model thinks of ending; `None` where the user stopped it.
    fn run(&mut self, engine: &mut Engine<B>, prompt: Vec<TokenId>, output_tokens: u32) -> Result<Option<Outcome>, EngineError> {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request =
            Request { prompt, tokens_max: output_tokens as usize, sampling, stop_tokens: Vec::new(), logprobs: None, constraint: None };
        let is_interrupted = self.is_interrupted;
        let outcome =
            engine.generate(&request, &mut |_| if is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })?;
        self.pass_notices(engine);
        Ok((outcome.finish != Finish::Cancelled).then_some(outcome))
    }
}

/// Whether a request fits a context, its last written token included; the words for one that does not.
fn fits_context(prompt_tokens: usize, output_tokens: u32, ctx_tokens: u32) -> Result<(), String> {
    let needed = prompt_tokens.saturating_add(output_tokens as usize);
    if needed <= ctx_tokens as usize {
        return Ok(());
    }
    Err(format!("{prompt_tokens} tokens to read and {output_tokens} to write are more than the context of {ctx_tokens} tokens"))
}
