//! The engine's own values as the server is told them.

use super::protocol::{Done, EngineState, FinishReason, OwnerShare, PlanSummary, Ready};
use super::word;
use crate::backend::Backend;
use crate::engine::sampler::Logprobs;
use crate::engine::{Engine, Outcome};
use crate::phase::plan::PhaseBytes;

/// What a worker that is ready tells.
pub fn ready<B: Backend>(engine: &Engine<B>) -> Ready {
    let plan = engine.plan();
    let shape = &engine.model().shape;
    let device = engine.capabilities();
    Ready {
        ctx_tokens: plan.ctx_tokens,
        n_vocab: shape.n_vocab,
        device: format!("{} ({})", device.device, device.backend),
        plan: PlanSummary {
            budget_bytes: plan.budget_bytes.0,
            reserve_bytes: plan.reserve_bytes.0,
            slots: plan.slots,
            slot_bytes: plan.slot_bytes.0,
            experts: shape.n_routed_experts(),
            head_bytes: plan.head_bytes.0,
            chunk: plan.chunk,
            block: plan.block,
            head_alias: plan.alias_chunk > 0,
            decode: owners(&plan.decode),
            prefill: owners(&plan.prefill),
        },
        engine: state(engine, None),
    }
}

fn owners(phase: &PhaseBytes) -> Vec<OwnerShare> {
    phase.owners.iter().map(|share| OwnerShare { owner: share.owner.to_owned(), bytes: share.bytes.0 }).collect()
}

fn state<B: Backend>(engine: &Engine<B>, outcome: Option<&Outcome>) -> EngineState {
    let prefix = engine.prefix_counters();
    EngineState {
        slots: outcome.map_or(engine.plan().slots, |outcome| outcome.slots),
        lowest_free_bytes: outcome.and_then(|outcome| outcome.lowest_free).map(|free| free.0),
        prefix_bytes: engine.prefix_bytes().0,
        parked: prefix.parked,
        resumed: prefix.resumed,
    }
}

/// What a request did.
pub fn done<B: Backend>(engine: &Engine<B>, outcome: &Outcome, finish: FinishReason, reasoning_tokens: usize) -> Done {
    Done {
        finish,
        prompt_tokens: outcome.prompt_tokens,
        reused_tokens: outcome.reused_tokens,
        common_tokens: outcome.common_tokens,
        completion_tokens: outcome.tokens.len(),
        reasoning_tokens,
        way: word(outcome.choice.way),
        way_reason: outcome.choice.reason.clone(),
        chunk: outcome.choice.chunk,
        block: outcome.choice.block,
        read_s: outcome.prefill.as_secs_f64(),
        write_s: outcome.decode.as_secs_f64(),
        hits: outcome.experts.hits,
        misses: outcome.experts.misses,
        drafts_offered: outcome.drafts.offered(),
        drafts_accepted: outcome.drafts.accepted(),
        slots_lent: outcome.phases.slots_lent,
        head_reloads: outcome.phases.head_reloads,
        recaptures: outcome.recaptures,
        link_bytes: outcome.experts.link_bytes.0,
        engine: state(engine, Some(outcome)),
    }
}

/// Log-probabilities that JSON can carry: one below all floats is minus infinity, which it cannot.
pub fn finite(logprobs: &Logprobs) -> Logprobs {
    let finite = |logprob: f32| logprob.max(f32::MIN);
    Logprobs { chosen: finite(logprobs.chosen), top: logprobs.top.iter().map(|&(token, logprob)| (token, finite(logprob))).collect() }
}
