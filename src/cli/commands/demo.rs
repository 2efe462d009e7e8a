//! `ebbtide demo`: the idea on a small real model, with no arguments and no network.
//!
//! The bundled model has 144 routed experts, those of its draft layer among them; the budget is so small that most of them stay in host
//! memory. The demo reads a real text with the head's memory lent to the prompt path, writes on, then does the same without lending the
//! head and compares.

use std::sync::Arc;

use super::Opener;
use super::interrupt::Interrupt;
use super::run::{StreamedText, generate};
use super::session;
use crate::backend::Backend;
use crate::cli::command::DemoConfig;
use crate::cli::config::Config;
use crate::cli::exit::{CommandError, ExitStatus};
use crate::cli::{say, write_stdout};
use crate::engine::{Engine, Finish, Outcome, Request};
use crate::gguf::GgufFile;
use crate::model::{Model, ModelError};
use crate::phase::Plan;
use crate::settings::{AliasThreshold, ContextSetting, DraftSettings, EngineSettings, SpecSetting};
use crate::tokenizer::Specials;
use crate::units::Bytes;

const MODEL_NAME: &str = "bard-qwen35moe-22m-mtp-IQ4_NL.gguf";
static MODEL: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/bard-qwen35moe-22m-mtp-IQ4_NL.gguf"));
static TEXT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo.txt"));

/// Tokens that the demo writes.
const TOKENS_WRITTEN: usize = 100;
/// A seed whose text stays in the voice of what was read.
const SEED: u64 = 2;
/// Simulated VRAM: dense weights, KV cache, recurrent state and head take most of it; a third of the experts gets a slot.
const VRAM: Bytes = Bytes::mib(17);
/// Drafts of every window, to show them. On a processor, where a window of a small model takes as long as it has rows, they do not pay.
const DRAFTS: SpecSetting = SpecSetting::Drafts(1);
/// Context: the text, what is written, and some room.
const CTX_TOKENS: u32 = 2048;

/// One of the two runs.
struct Run {
    name: &'static str,
    plan: Plan,
    outcome: Outcome,
}

/// Runs the command.
///
/// # Errors
/// As `run`; exit code 1 where the two runs disagree on a token, which would be a fault of ours.
pub fn demo<B: Backend>(demo: &DemoConfig, config: &Config, open: Opener<B>) -> Result<(), CommandError> {
    let interrupt = Interrupt::listen();
    let file = GgufFile::embedded(MODEL_NAME, MODEL).map_err(ModelError::from)?;
    let model = Arc::new(Model::from_file(file)?);
    let tokenizer = model.tokenizer()?;
    let prompt = tokenizer.encode(TEXT.as_bytes(), Specials::AsText)?;
    let mut sampling = session::sampling(&demo.sampling, model.file.metadata())?;
    sampling.seed = demo.sampling.seed.unwrap_or(SEED);
    let request = Request { prompt, tokens_max: TOKENS_WRITTEN, sampling, stop_tokens: Vec::new(), logprobs: None, constraint: None };
    let settings = demo_settings(&demo.engine, config);
    for forced in ["prefill-head-alias", "alias-min-tokens", "deterministic"] {
        if config.settings.said(forced).is_some() {
            say::line(format!("warning: --{forced} changes nothing here: the demo lends the head in one run and keeps it in the other"));
        }
    }

    if demo.engine.expert_profile.is_some() {
        say::line("warning: --expert-profile changes nothing here: neither run of the demo knows what the other has learned");
    }

    if demo.engine.drafts.vocab.is_some() {
        say::line("warning: --draft-vocab changes nothing here: it lists tokens of another model");
    }

    let mut engine = session::start(&model, &settings, config, open)?;
    let shape = &model.shape;
    let quoted: String = TEXT.lines().rev().take(3).collect::<Vec<_>>().into_iter().rev().collect::<Vec<_>>().join("\n  ");
    let intro = format!(
        "A model of {} layers, {} of them delta nets, and a draft layer, {} experts in each, {} of routed experts, on a device of {} simulated \
         in RAM.\n\nWith the head lent:\n{}\n\n\
         It reads {} tokens of the King James Bible, the last lines of which are\n\n  {quoted}\n\n\
         and writes on (a model of 22 million weights has learned the style of its texts, not their sense):\n\n",
        shape.n_layer,
        shape.n_delta_layer(),
        shape.n_expert,
        model.weights.expert_bytes(),
        settings.vram,
        engine.plan(),
        request.prompt.len(),
    );
    if !config.json {
        write_stdout(&intro)?;
    }
    let mut streamed = StreamedText::new(&tokenizer, !config.json);
    let outcome = generate(&mut engine, &request, &interrupt, &mut streamed)?;
    let text = streamed.finish()?;
    let lent = Run { name: "head lent", plan: engine.plan().clone(), outcome };
    drop(engine);

    // One file holds the windows of one run, that with the head lent.
    let kept_settings = EngineSettings { head_alias: false, window_hashes: None, ..settings };
    let mut engine: Engine<B> = session::start(&model, &kept_settings, config, open)?;
    if !config.json {
        write_stdout(&format!("\n\nThe same with the head kept, as a start without --prefill-head-alias has it:\n{}\n", engine.plan()))?;
    }
    let outcome = generate(&mut engine, &request, &interrupt, &mut StreamedText::new(&tokenizer, false))?;
    let kept = Run { name: "head kept", plan: engine.plan().clone(), outcome };

    let identical = lent.outcome.tokens == kept.outcome.tokens;
    if config.json {
        let report = serde_json::json!({ "text": text, "head_kept": as_json(&kept), "head_lent": as_json(&lent), "identical": identical });
        write_stdout(&format!("{report}\n"))?;
    } else {
        write_stdout(&format!("\n{}", table(&[&kept, &lent], identical)))?;
    }
    if [&lent, &kept].iter().any(|run| run.outcome.finish == Finish::Cancelled) {
        return Err(CommandError::new(ExitStatus::Interrupted, anyhow::anyhow!("interrupted")));
    }
    if !identical {
        return Err(CommandError::new(ExitStatus::Failed, anyhow::anyhow!("the two runs wrote different tokens: please report this")));
    }
    Ok(())
}

/// The demo's own budget, unless the user set one, and its mode: deterministic, so that both runs must write the same tokens, with
/// the alias forced.
fn demo_settings(engine: &EngineSettings, config: &Config) -> EngineSettings {
    let said = |name| config.settings.said(name).is_some();
    EngineSettings {
        vram: if said("vram-mib") { engine.vram } else { VRAM },
        ctx: if said("ctx") { engine.ctx } else { ContextSetting::Tokens(CTX_TOKENS) },
        head_alias: true,
        alias_min_tokens: AliasThreshold::Tokens(0),
        deterministic: true,
        expert_profile: None,
        drafts: DraftSettings {
            vocab: None,
            most: if said("spec") { engine.drafts.most } else { DRAFTS },
            always: true,
            ..engine.drafts.clone()
        },
        ..engine.clone()
    }
}

fn as_json(run: &Run) -> serde_json::Value {
    serde_json::to_value(super::report::RunReport::new(&run.outcome, "")).expect("numbers are JSON")
}

/// The comparison, one column a run.
fn table(runs: &[&Run; 2], identical: bool) -> String {
    let mut text = format!("{:<28}{:>14}{:>14}\n", "", runs[0].name, runs[1].name);
    let mut row = |label: &str, value: &dyn Fn(&Run) -> String| {
        text.push_str(&format!("{label:<28}{:>14}{:>14}\n", value(runs[0]), value(runs[1])));
    };
    row("way of reading", &|run| run.outcome.choice.way.to_string());
    row("chunk, tokens", &|run| run.outcome.choice.chunk.to_string());
    row("block, tokens", &|run| run.outcome.choice.block.to_string());
    row("reading, tok/s", &|run| format!("{:.0}", run.outcome.prefill_tokens_per_s()));
    row("writing, tok/s", &|run| format!("{:.0}", run.outcome.decode_tokens_per_s()));
    row("tokens a window", &|run| {
        run.outcome.drafts.tokens_per_window().map_or_else(|| "none".to_owned(), |tokens| format!("{tokens:.2}"))
    });
    row("drafts accepted", &|run| format!("{} of {}", run.outcome.drafts.accepted(), run.outcome.drafts.offered()));
    row("accepted drafts per step", &|run| {
        run.outcome.drafts.accepted_per_drafted_window().map_or_else(|| "none".to_owned(), |accepted| format!("{accepted:.2}"))
    });
    row("expert slots", &|run| run.plan.slots.to_string());
    row("slots lent", &|run| run.outcome.phases.slots_lent.to_string());
    row("prompt buffers in the head", &|run| run.outcome.phases.arena_bytes_in_head.to_string());
    row("experts over the link", &|run| run.outcome.experts.link_bytes.to_string());
    row("lowest free memory", &|run| run.outcome.lowest_free.map_or_else(|| "unknown".to_owned(), |free| free.to_string()));
    row("head reload, ms", &|run| format!("{:.2}", run.outcome.phases.head_reload_ms));
    let verdict = if identical { "yes" } else { "NO" };
    text.push_str(&format!("{:<28}{verdict:>14}{verdict:>14}\n", "identical tokens"));
    text
}
