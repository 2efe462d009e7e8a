//! The process that owns device, engine and everything that decides what an answer says: sampler, penalties, stop texts.
//!
//! `serve` starts the same program as a worker ([`supervisor`]) and speaks to it in frames ([`protocol`]) over its standard input and
//! output. A fault of a driver, or a kill, takes the worker alone along: requests in it end with an error, a new one is started, and the
//! model's pages are still in the system's cache.
//!
//! A worker never outlives its server: where its input ends, it stops what it does, and after [`GRACE`] it ends whatever that was. It
//! opens nothing but what it was told at the start; requests bring numbers and texts, never names of files.

mod answer;
pub mod protocol;
mod report;
pub mod supervisor;

use std::cell::OnceCell;
use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use crate::backend::{Backend, BackendError};
use crate::engine::constraint::Constraint;
use crate::engine::{Engine, EngineError, Event, Finish, Outcome, Request};
use crate::experts::StoreError;
use crate::grammar::{Demand, GrammarError, Grammars};
use crate::phase::PhaseError;
use crate::reply::{ReasoningStart, Reply, ReplyOptions, StopStrings, ToolTypes};
use crate::tokenizer::Tokenizer;
use answer::{AnswerText, Piece};
use protocol::{
    Delta, FailKind, FinishReason, FrameError, FromWorker, Generate, Hello, PROTOCOL_VERSION, ToWorker, read_frame, write_frame,
};

/// Time for a running request to stop by itself once the server is gone.
pub const GRACE: Duration = Duration::from_secs(2);
/// Shortest time between two words about progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Why a worker ended early.
#[derive(Debug, Error)]
pub enum WorkerError {
    /// The server cannot be reached.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The engine cannot go on.
    #[error("the engine cannot go on: {0}")]
    Poisoned(String),
}

/// What the server wants, as of now; set by the thread that listens.
#[derive(Debug, Default)]
struct Wishes {
    /// The request to be ended; ids begin at 1.
    cancelled: AtomicU64,
    stopping: AtomicBool,
}

impl Wishes {
    fn end(&self, id: u64) -> bool {
        self.stopping.load(Ordering::Relaxed) || self.cancelled.load(Ordering::Relaxed) == id
    }
}

/// The worker's end of the pipes.
pub struct Channel<W: Write> {
    out: W,
    requests: Receiver<Generate>,
    wishes: Arc<Wishes>,
}

impl<W: Write> Channel<W> {
    /// Says hello and listens from here on. Once `input` ends, or says what is no message, `on_end` is called after [`GRACE`], whatever
    /// the rest of the process does then.
    ///
    /// # Errors
    /// Where the server does not take the greeting.
    pub fn open(input: impl Read + Send + 'static, mut out: W, on_end: impl FnOnce() + Send + 'static) -> Result<Self, FrameError> {
        write_frame(&mut out, &FromWorker::Hello(Hello { version: PROTOCOL_VERSION, pid: std::process::id() }))?;
        let wishes = Arc::new(Wishes::default());
        let (sender, requests) = channel();
        let heard = Arc::clone(&wishes);
        std::thread::spawn(move || {
            let mut input = std::io::BufReader::new(input);
            // A frame that is none leaves nothing to be trusted behind it: as good as an end.
            while let Ok(Some(message)) = read_frame(&mut input) {
                match message {
                    ToWorker::Generate(generate) => {
                        if sender.send(*generate).is_err() {
                            break;
                        }
                    }
                    ToWorker::Cancel { id } => heard.cancelled.store(id, Ordering::Relaxed),
                    ToWorker::Stop => break,
                }
            }
            heard.stopping.store(true, Ordering::Relaxed);
            // The main thread may wait for a request.
            drop(sender);
            std::thread::sleep(GRACE);
            on_end();
        });
        Ok(Self { out, requests, wishes })
    }

    /// Tells the server.
    ///
    /// # Errors
    /// Where it does not listen any more.
    pub fn tell(&mut self, message: &FromWorker) -> Result<(), FrameError> {
        write_frame(&mut self.out, message)
    }
}

/// Tells the server how far a start is, at most every `PROGRESS_INTERVAL`.
pub struct LoadProgress {
    told: Option<Instant>,
}

impl LoadProgress {
    /// Before the first step.
    #[must_use]
    pub fn new() -> Self {
        Self { told: None }
    }

    /// Takes a step.
    pub fn step<W: Write>(&mut self, channel: &mut Channel<W>, done: u64, total: u64) {
        if self.told.is_none_or(|told| told.elapsed() >= PROGRESS_INTERVAL) {
            self.told = Some(Instant::now());
            // A server that is gone shows at the next request.
            let _ = channel.tell(&FromWorker::Loading { done, total });
        }
    }
}

impl Default for LoadProgress {
    fn default() -> Self {
        Self::new()
    }
}

/// Answers requests until the server wants no more.
///
/// # Errors
/// Where the server is gone in the middle of a request, or the engine cannot go on.
pub fn answer_requests<B: Backend, W: Write>(
    engine: &mut Engine<B>,
    tokenizer: &Arc<Tokenizer>,
    channel: &mut Channel<W>,
) -> Result<(), WorkerError> {
    let grammars = OnceCell::new();
    channel.tell(&FromWorker::Ready(Box::new(report::ready(engine))))?;
    while let Ok(generate) = channel.requests.recv() {
        let answered = answer(engine, tokenizer, &grammars, channel, generate);
        for notice in engine.take_notices() {
            channel.tell(&FromWorker::Notice(notice))?;
        }
        answered?;
    }
    engine.save_expert_profile();
    Ok(())
}

/// Answers one request.
fn answer<B: Backend, W: Write>(
    engine: &mut Engine<B>,
    tokenizer: &Arc<Tokenizer>,
    grammars: &OnceCell<Grammars>,
    channel: &mut Channel<W>,
    generate: Generate,
) -> Result<(), WorkerError> {
    let Generate { id, prompt, tokens_max, sampling, stop_strings, reasoning, thinks, reasoning_tokens_max, rule, tools, .. } = generate;
    let (ignore_eos, logprobs, single_call) = (generate.ignore_eos, generate.logprobs, generate.single_call);
    let stops = match StopStrings::new(stop_strings.clone()) {
        Ok(stops) => stops,
        Err(error) => return Ok(channel.tell(&FromWorker::Failed { id, kind: FailKind::BadRequest, message: error.to_string() })?),
    };
    let tools = Some(ToolTypes::new(&tools)).filter(|_| !tools.is_empty());
    let stop_tokens = if ignore_eos { Vec::new() } else { tokenizer.end_tokens().to_vec() };
    // Who does not think by itself is not made to.
    let thinking = if thinks || reasoning == ReasoningStart::Inside { reasoning } else { ReasoningStart::Answer };
    let constraint = match constraint(tokenizer, grammars, Demand { rule: rule.as_ref(), reasoning: thinking, reasoning_tokens_max }) {
        Ok(constraint) => constraint,
        Err(error) => return Ok(channel.tell(&FromWorker::Failed { id, kind: FailKind::BadRequest, message: error.to_string() })?),
    };
    let request = Request { prompt, tokens_max, sampling, stop_tokens, logprobs, constraint };
    let wishes = Arc::clone(&channel.wishes);
    let mut text = AnswerText::new(tokenizer, ReplyOptions { reasoning, tools, stops });
    let mut out = Teller { channel, id, failed: None, read_told: None };
    let (mut chances, mut has_called) = (None, false);
    let generated = engine.generate(&request, &mut |event| {
        match event {
            Event::Reading { done, total } => out.reading(done, total),
            Event::Logprobs(logprobs) => chances = Some(report::finite(logprobs)),
            Event::Token(token) => {
                let piece = text.push(token, chances.take());
                has_called |= piece.deltas.iter().any(|delta| matches!(delta, Delta::ToolEnd { .. }));
                out.wrote(piece);
            }
        }
        let is_over = text.reply().stopped().is_some() || (single_call && has_called);
        if out.failed.is_some() || is_over || wishes.end(id) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    // Also where the request failed: what was written is the client's.
    out.wrote(text.finish());
    if let Some(error) = out.failed {
        return Err(error.into());
    }
    match generated {
        Ok(outcome) => {
            let finish = match finish_reason(&outcome, text.reply(), &stop_strings) {
                // Ended by us behind its call, not by the server.
                FinishReason::Cancelled if single_call && has_called && !wishes.end(id) => FinishReason::ToolCalls,
                finish => finish,
            };
            let done = Box::new(report::done(engine, &outcome, finish, text.reply().reasoning_tokens()));
            Ok(channel.tell(&FromWorker::Done { id, done })?)
        }
        Err(error) => {
            let (kind, message) = (fail_kind(&error), error.to_string());
            channel.tell(&FromWorker::Failed { id, kind, message: message.clone() })?;
            if kind == FailKind::Poisoned { Err(WorkerError::Poisoned(message)) } else { Ok(()) }
        }
    }
}

/// What a request demands of its text.
fn constraint(
    tokenizer: &Arc<Tokenizer>,
    grammars: &OnceCell<Grammars>,
    demand: Demand<'_>,
) -> Result<Option<Arc<dyn Constraint>>, GrammarError> {
    if demand.rule.is_none() && demand.reasoning_tokens_max.is_none() {
        return Ok(None);
    }
    // Made at the first request that needs it: a large vocabulary takes a moment.
    let made = match grammars.get() {
        Some(made) => made,
        None => {
            let made = Grammars::new(tokenizer)?;
            grammars.get_or_init(|| made)
        }
    };
    made.constraint(demand)
}

fn finish_reason(outcome: &Outcome, reply: &Reply, stop_strings: &[String]) -> FinishReason {
    let stopped = reply.stopped().and_then(|stopped| stop_strings.iter().position(|stop| stop == stopped));
    match (stopped, outcome.finish) {
        (Some(index), _) => FinishReason::StopString(index),
        (None, Finish::Stop) if reply.call_count() > 0 => FinishReason::ToolCalls,
        (None, Finish::Stop) => FinishReason::Stop,
        (None, Finish::Length) => FinishReason::Length,
        (None, Finish::Cancelled) => FinishReason::Cancelled,
    }
}

/// Tells the server of one request; the first failure is kept, and nothing is told behind it.
struct Teller<'a, W: Write> {
    channel: &'a mut Channel<W>,
    id: u64,
    failed: Option<FrameError>,
    read_told: Option<Instant>,
}

impl<W: Write> Teller<'_, W> {
    fn tell(&mut self, message: &FromWorker) {
        if self.failed.is_none() {
            self.failed = self.channel.tell(message).err();
        }
    }

    fn reading(&mut self, done: u64, total: u64) {
        if done == total || self.read_told.is_none_or(|told| told.elapsed() >= PROGRESS_INTERVAL) {
            self.read_told = Some(Instant::now());
            self.tell(&FromWorker::Reading { id: self.id, done, total });
        }
    }

    fn wrote(&mut self, piece: Piece) {
        let Piece { deltas, tokens } = piece;
        if !deltas.is_empty() || !tokens.is_empty() {
            self.tell(&FromWorker::Wrote { id: self.id, deltas, tokens });
        }
    }
}

/// What a failed request means for the next one.
fn fail_kind(error: &EngineError) -> FailKind {
    let cause = match error {
        EngineError::PromptTooLong { prompt_tokens, ctx_tokens } => {
            return FailKind::TooLong { prompt_tokens: *prompt_tokens, ctx_tokens: *ctx_tokens };
        }
        EngineError::EmptyPrompt | EngineError::BadToken { .. } => return FailKind::BadRequest,
        EngineError::Backend(cause)
        | EngineError::Phase(PhaseError::Backend(cause))
        | EngineError::Store(StoreError::Backend(cause))
        | EngineError::NotRestored { cause } => cause,
        _ => return FailKind::Engine,
    };
    if matches!(cause, BackendError::DeviceLost { .. }) { FailKind::Poisoned } else { FailKind::Engine }
}

/// The name under which a value of a small enumeration is reported.
fn word(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}
