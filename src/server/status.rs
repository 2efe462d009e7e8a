//! `/health` and `/v1/status`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::App;
use super::live::{Health, Running, Snapshot};
use crate::worker::protocol::OwnerShare;

/// Status and body of `/health`.
#[must_use]
pub fn health(app: &App) -> (StatusCode, Value) {
    let health = app.live.health();
    let status = if health.answers() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut body = json!({ "status": health.word() });
    match &health {
        Health::Loading { done, total } => body["progress"] = progress(*done, *total),
        Health::Degraded(reason) | Health::Dead(reason) => body["reason"] = reason.clone().into(),
        Health::Ready | Health::Stopping => {}
    }
    (status, body)
}

#[allow(clippy::cast_precision_loss, reason = "a share for people")]
fn progress(done: u64, total: u64) -> Value {
    let share = if total == 0 { 0.0 } else { done as f64 / total as f64 };
    json!({ "bytes_done": done, "bytes_total": total, "share": share })
}

#[allow(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(part: u64, other: u64) -> Option<f64> {
    (part + other > 0).then(|| part as f64 / (part + other) as f64)
}

/// The body of `/v1/status`; `docs/api.md` says what each field means.
#[must_use]
pub fn status(app: &App) -> Value {
    let snapshot = app.live.snapshot();
    let (waiting, clients, jobs_max) = app.queue.lengths();
    let (_, health) = health(app);
    let model = app.model.get();
    let totals = &snapshot.totals;
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_s": app.started.elapsed().as_secs_f64(),
        "health": health["status"],
        "reason": health["reason"],
        "progress": health["progress"],
        "model": model.map(|model| json!({
            "name": model.name,
            "architecture": model.architecture,
            "n_vocab": model.n_vocab,
            "ctx_tokens": snapshot.ready.as_ref().map(|ready| ready.ctx_tokens),
        })),
        "device": snapshot.ready.as_ref().map(|ready| ready.device.as_str()),
        "worker": { "pid": snapshot.worker_pid, "starts": totals.worker_starts, "deaths": totals.worker_deaths },
        "phase": snapshot.phase(),
        "running": snapshot.running.as_ref().map(running),
        "memory": memory(&snapshot),
        "slots": snapshot.ready.as_ref().map(|ready| json!({
            "in_use": snapshot.engine.slots,
            "planned": ready.plan.slots,
            "bytes_each": ready.plan.slot_bytes,
            "experts": ready.plan.experts,
        })),
        "experts": {
            "hits": totals.hits,
            "misses": totals.misses,
            "hit_rate": rate(totals.hits, totals.misses),
            "hit_rate_last": snapshot.last.front().and_then(|last| last.hit_rate),
        },
        "rates": {
            "read_tokens_per_s": snapshot.last.iter().find_map(|last| last.read_tokens_per_s),
            "write_tokens_per_s": snapshot.last.iter().find_map(|last| last.write_tokens_per_s),
        },
        "queue": { "waiting": waiting, "clients": clients, "max": jobs_max },
        "prefix_cache": {
            "bytes": snapshot.engine.prefix_bytes,
            "parked": snapshot.engine.parked,
            "resumed": snapshot.engine.resumed,
        },
        "totals": totals,
        "last_requests": snapshot.last,
    })
}

#[allow(clippy::cast_precision_loss, reason = "rates for people")]
fn running(running: &Running) -> Value {
    let (done, total) = running.read;
    let writing_s = running.first_token.map(|first| first.elapsed().as_secs_f64());
    let written_after_first = running.written.saturating_sub(1);
    json!({
        "id": running.id,
        "api": running.api,
        "prompt_tokens": running.prompt_tokens,
        "read_share": if total == 0 { None } else { Some(done as f64 / total as f64) },
        "written_tokens": running.written,
        "seconds": running.began.elapsed().as_secs_f64(),
        "write_tokens_per_s": writing_s.filter(|_| written_after_first > 0).map(|seconds| written_after_first as f64 / seconds.max(1e-9)),
    })
}

/// Who owns which bytes of the device in both phases, by the plan.
fn memory(snapshot: &Snapshot) -> Option<Value> {
    let plan = &snapshot.ready.as_ref()?.plan;
    let phase = |owners: &[OwnerShare]| {
        let total: u64 = owners.iter().map(|share| share.bytes).sum();
        json!({ "owners": owners, "total_bytes": total })
    };
    Some(json!({
        "budget_bytes": plan.budget_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "lowest_free_bytes": snapshot.engine.lowest_free_bytes,
        "head_bytes": plan.head_bytes,
        "head_alias": plan.head_alias,
        "chunk_max": plan.chunk,
        "block_max": plan.block,
        "decode": phase(&plan.decode),
        "prefill": phase(&plan.prefill),
    }))
}
