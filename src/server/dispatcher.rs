//! Between queue and worker: one request at a time, events on to whoever asked, and what becomes of both when a worker dies.
//!
//! A client that leaves closes its channel; the request is then cancelled at the worker's next step, and the next one is sent once the
//! worker says that it ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use super::call::Log;
use super::error::ApiError;
use super::live::{Health, Live, Running, record};
use super::queue::{AnswerEvent, Job, Queue};
use crate::worker::protocol::{Done, FailKind, FinishReason, FromWorker, ToWorker};
use crate::worker::supervisor::{WorkerEvent, WorkerSender};

/// The way to a worker.
pub trait WorkerLink: Send + 'static {
    /// Sends; false where there is none.
    fn send(&self, message: ToWorker) -> bool;
}

impl WorkerLink for WorkerSender {
    fn send(&self, message: ToWorker) -> bool {
        Self::send(self, message)
    }
}

/// How the dispatcher ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to.
    Stopped,
    /// The first worker could not start; the program would exit with this code.
    StartFailed {
        /// Exit code.
        exit_status: u8,
        /// Why.
        message: String,
    },
}

struct Current {
    job: Job,
    id: u64,
    waited: Duration,
    cancelled: bool,
}

/// The dispatcher's parts.
pub struct Dispatcher<L> {
    /// What waits.
    pub queue: Arc<Queue>,
    /// What is known.
    pub live: Arc<Live>,
    /// The worker.
    pub link: L,
    /// What happens to it.
    pub events: UnboundedReceiver<WorkerEvent>,
    /// Lines for people.
    pub log: Log,
}

impl<L: WorkerLink> Dispatcher<L> {
    /// Runs until `stop` becomes true and the request at hand has ended, or there will be no worker.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) -> Ended {
        let mut current: Option<Current> = None;
        let mut next_id = 1;
        loop {
            if *stop.borrow() && current.is_none() {
                return Ended::Stopped;
            }
            let may_send = current.is_none() && self.live.health().answers() && !*stop.borrow();
            tokio::select! {
                event = self.events.recv() => match event {
                    Some(event) => {
                        if let Some(ended) = self.take(event, &mut current) {
                            return ended;
                        }
                    }
                    None => return Ended::Stopped,
                },
                job = self.queue.next(), if may_send => {
                    current = self.send(job, next_id);
                    next_id += 1;
                }
                () = client_left(current.as_ref()) => {
                    if let Some(current) = &mut current {
                        current.cancelled = true;
                        self.link.send(ToWorker::Cancel { id: current.id });
                    }
                }
                changed = stop.changed() => {
                    if changed.is_err() {
                        return Ended::Stopped;
                    }
                }
            }
        }
    }

    fn send(&self, mut job: Job, id: u64) -> Option<Current> {
        job.generate.id = id;
        let (waited, prompt_tokens) = (job.queued.elapsed(), job.generate.prompt.len());
        let prompt = std::mem::take(&mut job.generate.prompt);
        let generate = crate::worker::protocol::Generate { prompt, ..job.generate.clone() };
        if !self.link.send(ToWorker::Generate(Box::new(generate))) {
            // Its death is on the way to us.
            job.tell(AnswerEvent::Failed(ApiError::unavailable("engine_restarting", "the engine is being started anew, try again")));
            return None;
        }
        let running = Running { id, api: job.api, prompt_tokens, read: (0, 0), written: 0, began: Instant::now(), first_token: None };
        self.live.change(|state| state.running = Some(running));
        Some(Current { job, id, waited, cancelled: false })
    }

    fn take(&mut self, event: WorkerEvent, current: &mut Option<Current>) -> Option<Ended> {
        match event {
            WorkerEvent::Started { pid } => self.live.change(|state| {
                state.totals.worker_starts += 1;
                state.worker_pid = Some(pid);
                state.health = Health::Loading { done: 0, total: 0 };
            }),
            WorkerEvent::Message(message) => self.hear(message, current),
            WorkerEvent::Died { reason } => {
                (self.log)(&format!("warning: {reason}; another one is started"));
                self.live.note_death(&reason);
                self.fail(current, &ApiError::engine("engine_died", format!("{reason}; it is started anew, try again")));
            }
            WorkerEvent::GaveUp { reason, exit_status } => {
                (self.log)(&format!("error: {reason}"));
                self.live.note_death(&reason);
                self.live.change(|state| state.health = Health::Dead(reason.clone()));
                let error = ApiError::unavailable("engine_dead", format!("there is no engine: {reason}"));
                self.fail(current, &error);
                self.queue.close(&error);
                return exit_status.map(|exit_status| Ended::StartFailed { exit_status, message: reason });
            }
        }
        None
    }

    fn hear(&self, message: FromWorker, current: &mut Option<Current>) {
        match message {
            FromWorker::Hello(_) | FromWorker::StartFailed { .. } => {}
            FromWorker::Loading { done, total } => self.live.change(|state| state.health = Health::Loading { done, total }),
            FromWorker::Ready(ready) => {
                (self.log)(&format!(
                    "ready: {} tokens of context, {} expert slots on {}",
                    ready.ctx_tokens, ready.plan.slots, ready.device
                ));
                self.live.change(|state| {
                    state.health = Health::Ready;
                    state.engine = ready.engine.clone();
                    state.ready = Some(*ready);
                });
            }
            FromWorker::Notice(notice) => (self.log)(&format!("note: {notice}")),
            FromWorker::Reading { id, done, total } => {
                let Some(current) = current.as_ref().filter(|current| current.id == id) else { return };
                let percent = u8::try_from(u128::from(done) * 100 / u128::from(total.max(1))).unwrap_or(100);
                current.job.tell(AnswerEvent::Reading { percent });
                self.live.change(|state| state.running.as_mut().map_or((), |running| running.read = (done, total)));
            }
            FromWorker::Wrote { id, deltas, tokens } => {
                let Some(current) = current.as_ref().filter(|current| current.id == id) else { return };
                self.live.change(|state| {
                    if let Some(running) = &mut state.running {
                        running.first_token.get_or_insert_with(Instant::now);
                        running.written += tokens.len();
                    }
                });
                current.job.tell(AnswerEvent::Wrote { deltas, tokens });
            }
            FromWorker::Done { id, done } => {
                let Some(ended) = current.take_if(|current| current.id == id) else { return };
                self.end(&ended, done);
            }
            FromWorker::Failed { id, kind, message } => {
                if current.as_ref().is_some_and(|current| current.id == id) {
                    if kind == FailKind::Poisoned {
                        // At once, and not only when its process has ended.
                        self.live.change(|state| state.health = Health::Loading { done: 0, total: 0 });
                    }
                    self.fail(current, &ApiError::of_worker(kind, message));
                }
            }
        }
    }

    fn end(&self, ended: &Current, done: Box<Done>) {
        let record = record(ended.id, ended.job.api, ended.waited, &done);
        (self.log)(&line(ended, &done));
        self.live.change(|state| state.note_done(record, &done));
        if done.finish == FinishReason::Cancelled && !ended.cancelled {
            // Nobody of ours asked for it: the worker is being stopped.
            ended
                .job
                .tell(AnswerEvent::Failed(ApiError::unavailable("stopping", "the server is being stopped; the answer is not complete")));
        } else {
            ended.job.tell(AnswerEvent::Done(done));
        }
    }

    fn fail(&self, current: &mut Option<Current>, error: &ApiError) {
        let Some(failed) = current.take() else { return };
        (self.log)(&format!("request {} ({}) failed: {}", failed.id, failed.job.api, error.message));
        self.live.change(|state| state.note_failed(failed.id, failed.job.api, failed.waited, 0, &error.message));
        // One answer that is missing spoils the others of its request.
        self.queue.forget(&failed.job.events);
        failed.job.tell(AnswerEvent::Failed(error.clone()));
    }
}

/// Ends when the client of a request that is not cancelled yet has left.
async fn client_left(current: Option<&Current>) {
    match current {
        Some(current) if !current.cancelled => current.job.events.closed().await,
        _ => std::future::pending().await,
    }
}

/// What the log says of a request.
fn line(ended: &Current, done: &Done) -> String {
    let fresh = done.prompt_tokens - done.reused_tokens.min(done.prompt_tokens);
    #[allow(clippy::cast_precision_loss, reason = "rates for people")]
    let rate = |count: usize, seconds: f64| count as f64 / seconds.max(1e-9);
    let difference = if done.common_tokens == 0 {
        "nothing of it was known".to_owned()
    } else {
        format!("first difference at token {}", done.common_tokens)
    };
    format!(
        "request {} ({}): {} prompt tokens, {} reused, {difference}; {fresh} read at {:.0} tok/s by way of {} in chunks of {} ({}); wrote {} at {:.1} tok/s, {}; waited {:.1} s",
        ended.id,
        ended.job.api,
        done.prompt_tokens,
        done.reused_tokens,
        rate(fresh, done.read_s),
        done.way,
        done.chunk,
        done.way_reason,
        done.completion_tokens,
        rate(done.completion_tokens.saturating_sub(1), done.write_s),
        super::live::finish_word(done.finish),
        ended.waited.as_secs_f64(),
    )
}
