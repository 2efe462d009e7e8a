//! What is going on, for `/health`, `/v1/status`, `/metrics` and the checks before a request is queued.
//!
//! One writer, the dispatcher; readers get copies. Nothing here decides anything.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::model::unix_s;
use crate::worker::protocol::{Done, EngineState, FinishReason, Ready};

/// Requests that are remembered.
pub const LAST_REQUESTS_MAX: usize = 32;
/// Time for which a death of the worker is told as a degradation.
const DEGRADED_FOR: Duration = Duration::from_secs(60);

/// Whether requests are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Not yet: bytes loaded, of all; 0 of 0 before anything is.
    Loading {
        /// Done.
        done: u64,
        /// All.
        total: u64,
    },
    /// Yes.
    Ready,
    /// Yes, but something happened.
    Degraded(String),
    /// No, and without help never.
    Dead(String),
    /// No more.
    Stopping,
}

impl Health {
    /// Its word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Loading { .. } => "loading",
            Self::Ready => "ready",
            Self::Degraded(_) => "degraded",
            Self::Dead(_) => "dead",
            Self::Stopping => "stopping",
        }
    }

    /// Whether requests are answered now.
    #[must_use]
    pub fn answers(&self) -> bool {
        matches!(self, Self::Ready | Self::Degraded(_))
    }
}

/// What the engine does now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LivePhase {
    /// Nothing.
    #[default]
    Idle,
    /// A prompt is read.
    Reading,
    /// Tokens are written.
    Writing,
}

/// The request that runs.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its number.
    pub id: u64,
    /// The API that was called.
    pub api: &'static str,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Rows x layers read, of all.
    pub read: (u64, u64),
    /// Tokens written.
    pub written: usize,
    /// When it began.
    pub began: Instant,
    /// When its first token came.
    pub first_token: Option<Instant>,
}

/// A request that ended.
#[derive(Clone, Debug, Serialize)]
pub struct RequestRecord {
    /// Its number.
    pub id: u64,
    /// The API that was called.
    pub api: &'static str,
    /// When it ended.
    pub ended_unix_s: u64,
    /// Seconds that it waited.
    pub waited_s: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of them, those not read again.
    pub cached_tokens: usize,
    /// Position of the first token that differs from all that was known.
    pub first_difference: usize,
    /// Tokens written.
    pub completion_tokens: usize,
    /// How the prompt was read.
    pub way: String,
    /// Why so.
    pub way_reason: String,
    /// Tokens of a chunk.
    pub chunk: u32,
    /// Tokens of a block.
    pub block: u32,
    /// Seconds to the first token.
    pub read_s: f64,
    /// Seconds of writing the others.
    pub write_s: f64,
    /// Fresh prompt tokens a second; `None` where there is nothing to measure.
    pub read_tokens_per_s: Option<f64>,
    /// Written tokens a second.
    pub write_tokens_per_s: Option<f64>,
    /// Share of expert uses found in a slot.
    pub hit_rate: Option<f64>,
    /// Slots lent for the prompt.
    pub slots_lent: u32,
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Drafts offered.
    pub drafts_offered: u64,
    /// Drafts accepted.
    pub drafts_accepted: u64,
    /// stop, length, tool_calls, cancelled or error.
    pub finish: &'static str,
    /// Why it failed.
    pub error: Option<String>,
}

/// Counts since the start of the server.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Totals {
    /// Requests that ended well.
    pub completed: u64,
    /// Requests whose client left.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests refused before the queue, by us or because it was full.
    pub refused: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Prompt tokens not read again.
    pub cached_tokens: u64,
    /// Tokens written.
    pub completion_tokens: u64,
    /// Seconds of reading.
    pub read_s: f64,
    /// Seconds of writing.
    pub write_s: f64,
    /// Expert uses found in a slot.
    pub hits: u64,
    /// Expert uses that crossed the link.
    pub misses: u64,
    /// Drafts offered.
    pub drafts_offered: u64,
    /// Drafts accepted.
    pub drafts_accepted: u64,
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Windows captured again.
    pub recaptures: u64,
    /// Bytes of experts over the link.
    pub link_bytes: u64,
    /// Workers started.
    pub worker_starts: u64,
    /// Workers that died.
    pub worker_deaths: u64,
}

/// A copy of all that is known.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Whether requests are answered.
    pub health: Health,
    /// The worker's process.
    pub worker_pid: Option<u32>,
    /// What the worker said when it was ready.
    pub ready: Option<Ready>,
    /// What the engine held at last.
    pub engine: EngineState,
    /// What runs.
    pub running: Option<Running>,
    /// What ended, the last first.
    pub last: VecDeque<RequestRecord>,
    /// Counts.
    pub totals: Totals,
    last_death: Option<(Instant, String)>,
}

impl Snapshot {
    /// What the engine does now.
    #[must_use]
    pub fn phase(&self) -> LivePhase {
        match &self.running {
            None => LivePhase::Idle,
            Some(running) if running.first_token.is_some() => LivePhase::Writing,
            Some(_) => LivePhase::Reading,
        }
    }
}

/// The shared state.
#[derive(Debug)]
pub struct Live(Mutex<Snapshot>);

impl Default for Live {
    fn default() -> Self {
        Self(Mutex::new(Snapshot {
            health: Health::Loading { done: 0, total: 0 },
            worker_pid: None,
            ready: None,
            engine: EngineState::default(),
            running: None,
            last: VecDeque::new(),
            totals: Totals::default(),
            last_death: None,
        }))
    }
}

impl Live {
    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        // No code that can fail runs under the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that is known now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.lock().clone();
        if let (Health::Ready, Some((when, why))) = (&snapshot.health, &snapshot.last_death)
            && when.elapsed() < DEGRADED_FOR
        {
            snapshot.health = Health::Degraded(format!("the engine was started anew {} s ago: {why}", when.elapsed().as_secs()));
        }
        snapshot
    }

    /// Whether requests are answered.
    #[must_use]
    pub fn health(&self) -> Health {
        self.snapshot().health
    }

    /// Tokens of context, once a worker has said.
    #[must_use]
    pub fn ctx_tokens(&self) -> Option<u32> {
        self.lock().ready.as_ref().map(|ready| ready.ctx_tokens)
    }

    /// Changes what is known.
    pub(super) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        change(&mut self.lock());
    }

    /// A request was refused before it was queued.
    pub(super) fn note_refused(&self) {
        self.lock().totals.refused += 1;
    }

    /// A worker died.
    pub(super) fn note_death(&self, why: &str) {
        self.change(|state| {
            state.totals.worker_deaths += 1;
            state.worker_pid = None;
            state.running = None;
            state.health = Health::Loading { done: 0, total: 0 };
            state.last_death = Some((Instant::now(), why.to_owned()));
        });
    }
}

/// What is remembered of a request that came to its end.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "rates for people")]
pub fn record(id: u64, api: &'static str, waited: Duration, done: &Done) -> RequestRecord {
    let rate = |count: usize, seconds: f64| (count > 0 && seconds > 0.0).then(|| count as f64 / seconds);
    let uses = done.hits + done.misses;
    RequestRecord {
        id,
        api,
        ended_unix_s: unix_s(),
        waited_s: waited.as_secs_f64(),
        prompt_tokens: done.prompt_tokens,
        cached_tokens: done.reused_tokens,
        first_difference: done.common_tokens,
        completion_tokens: done.completion_tokens,
        way: done.way.clone(),
        way_reason: done.way_reason.clone(),
        chunk: done.chunk,
        block: done.block,
        read_s: done.read_s,
        write_s: done.write_s,
        read_tokens_per_s: rate(done.prompt_tokens - done.reused_tokens.min(done.prompt_tokens), done.read_s),
        write_tokens_per_s: rate(done.completion_tokens.saturating_sub(1), done.write_s),
        hit_rate: (uses > 0).then(|| done.hits as f64 / uses as f64),
        slots_lent: done.slots_lent,
        head_reloads: done.head_reloads,
        drafts_offered: done.drafts_offered,
        drafts_accepted: done.drafts_accepted,
        finish: finish_word(done.finish),
        error: None,
    }
}

/// Why an answer ended, in one word.
#[must_use]
pub fn finish_word(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop | FinishReason::StopString(_) => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Cancelled => "cancelled",
    }
}

impl Snapshot {
    /// Remembers a request and adds it to the counts.
    pub(super) fn note_done(&mut self, record: RequestRecord, done: &Done) {
        let totals = &mut self.totals;
        if done.finish == FinishReason::Cancelled {
            totals.cancelled += 1;
        } else {
            totals.completed += 1;
        }
        totals.prompt_tokens += done.prompt_tokens as u64;
        totals.cached_tokens += done.reused_tokens as u64;
        totals.completion_tokens += done.completion_tokens as u64;
        totals.read_s += done.read_s;
        totals.write_s += done.write_s;
        totals.hits += done.hits;
        totals.misses += done.misses;
        totals.drafts_offered += done.drafts_offered;
        totals.drafts_accepted += done.drafts_accepted;
        totals.head_reloads += done.head_reloads;
        totals.recaptures += done.recaptures;
        totals.link_bytes += done.link_bytes;
        self.engine = done.engine.clone();
        self.remember(record);
    }

    /// Remembers a request that failed.
    pub(super) fn note_failed(&mut self, id: u64, api: &'static str, waited: Duration, prompt_tokens: usize, why: &str) {
        self.totals.failed += 1;
        self.remember(RequestRecord {
            id,
            api,
            ended_unix_s: unix_s(),
            waited_s: waited.as_secs_f64(),
            prompt_tokens,
            cached_tokens: 0,
            first_difference: 0,
            completion_tokens: 0,
            way: String::new(),
            way_reason: String::new(),
            chunk: 0,
            block: 0,
            read_s: 0.0,
            write_s: 0.0,
            read_tokens_per_s: None,
            write_tokens_per_s: None,
            hit_rate: None,
            slots_lent: 0,
            head_reloads: 0,
            drafts_offered: 0,
            drafts_accepted: 0,
            finish: "error",
            error: Some(why.to_owned()),
        });
    }

    fn remember(&mut self, record: RequestRecord) {
        self.last.push_front(record);
        self.last.truncate(LAST_REQUESTS_MAX);
        self.running = None;
    }
}
