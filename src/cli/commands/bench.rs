//! `ebbtide bench`: speed at the points of a sweep.

use super::Opener;
use super::interrupt::Interrupt;
use super::measure::{PageFile, Teller, result_of};
use super::session;
use crate::backend::Backend;
use crate::bench::about::About;
use crate::bench::frontier::{self, Sweep};
use crate::bench::material::Material;
use crate::bench::{Rig, frontier_report};
use crate::cli::command::BenchConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::{say, write_stdout};
use crate::engine::{self, EngineError};

/// Runs the command.
///
/// # Errors
/// As the contract's exit codes say. A point that cannot be had is a row that says why; 4 where that is so of every row.
pub fn bench<B: Backend>(bench: &BenchConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let model = session::open_model_for(&bench.model, &bench.sweep.base.drafts)?;
    let material = match &bench.text {
        None => bench.sweep.material.clone(),
        Some(source) => {
            let tokenizer = model.tokenizer()?;
            let tokens = session::prompt_tokens(source, false, &model, &tokenizer)?;
            if tokens.is_empty() {
                return Err(EngineError::EmptyPrompt.into());
            }
            engine::check_tokens(&tokens, model.shape.n_vocab)?;
            Material::Text(tokens)
        }
    };
    let base = session::with_draft_vocab(&bench.sweep.base, &model)?;
    let sweep = Sweep { material, base, ..bench.sweep.clone() };
    sweep.contexts.iter().for_each(|&ctx| session::warn_of_long_context(&model, ctx));
    let page = PageFile::create(bench.html.as_deref(), &model)?;
    let about = About::new(&model, &sweep.base);
    let mut teller = Teller::new(config.verbose);
    let mut rig = Rig {
        model: &model,
        open: &|settings| open(settings),
        is_interrupted: &|| interrupt.is_set(),
        tell: &mut |told| teller.tell(told),
    };
    let result = frontier::measure(&sweep, &mut rig)?;
    teller.finish(&result.ended);
    if config.json {
        let report = frontier_report::SweepReport::new(&about, &sweep, &result);
        write_stdout(&format!("{}\n", serde_json::to_string(&report).expect("numbers and text are JSON")))?;
    } else {
        write_stdout(&say::harmless(&frontier_report::text(&about, &sweep, &result)))?;
    }
    if let Some(page) = page {
        page.finish(&frontier_report::page(&about, &sweep, &result))?;
    }
    let nothing = !result.rows.is_empty() && result.rows.iter().all(|row| row.figures.is_none());
    result_of(result.ended)?;
    if nothing {
        return Err(CommandError::new(ExitStatus::Device, anyhow::anyhow!("nothing could be measured: every row says why")));
    }
    Ok(())
}
