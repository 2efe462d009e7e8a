//! Requests that wait for the engine: bounded, and fair between clients.
//!
//! Each client has a line of its own, and lines take turns: an agent that sends forty requests at once waits behind its own, and
//! another's next one comes after at most one of them. A request whose client has left is dropped when its turn comes.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;

use super::error::ApiError;
use crate::worker::protocol::{Delta, Done, Generate, WrittenToken};

/// What a client learns of one answer. There are at most as many as the answer has tokens, and some words of progress, so nothing that
/// a slow client leaves unread grows without bound.
#[derive(Clone, Debug)]
pub enum AnswerEvent {
    /// The prompt is being read.
    Reading {
        /// Part that is done, in percent.
        percent: u8,
    },
    /// Something was written.
    Wrote {
        /// In order.
        deltas: Vec<Delta>,
        /// The tokens behind them.
        tokens: Vec<WrittenToken>,
    },
    /// The answer is complete.
    Done(Box<Done>),
    /// There will be no more.
    Failed(ApiError),
}

/// An event of the answer with this number.
pub type ChoiceEvent = (usize, AnswerEvent);

/// One answer to be written.
#[derive(Debug)]
pub struct Job {
    /// The worker's order; its id is set when it is sent.
    pub generate: Generate,
    /// Number of the answer within its request.
    pub choice: usize,
    /// Who asks.
    pub client: String,
    /// The API that was called.
    pub api: &'static str,
    /// Where events go; closed once the client has left.
    pub events: UnboundedSender<ChoiceEvent>,
    /// When it came.
    pub queued: Instant,
}

impl Job {
    /// Tells the client; whether it still listens shows at [`UnboundedSender::is_closed`].
    pub fn tell(&self, event: AnswerEvent) {
        let _ = self.events.send((self.choice, event));
    }
}

/// The waiting requests.
#[derive(Debug)]
pub struct Queue {
    lines: Mutex<Lines>,
    came: Notify,
    jobs_max: usize,
}

#[derive(Debug, Default)]
struct Lines {
    /// Clients by turn, none without a job.
    clients: VecDeque<(String, VecDeque<Job>)>,
    /// Why nothing is taken any more.
    closed: Option<ApiError>,
}

impl Lines {
    fn n_jobs(&self) -> usize {
        self.clients.iter().map(|(_, line)| line.len()).sum()
    }
}

impl Queue {
    /// A queue for at most so many answers.
    #[must_use]
    pub fn new(jobs_max: usize) -> Self {
        Self { lines: Mutex::default(), came: Notify::new(), jobs_max }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        // No code that can fail runs under the lock.
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers that wait, clients that do, and the bound.
    #[must_use]
    pub fn lengths(&self) -> (usize, usize, usize) {
        let lines = self.lock();
        (lines.n_jobs(), lines.clients.len(), self.jobs_max)
    }

    /// Takes all answers of one request, or none.
    ///
    /// # Errors
    /// 429 where they do not fit, or what [`Queue::close`] was told.
    pub fn push(&self, jobs: Vec<Job>) -> Result<(), ApiError> {
        let mut lines = self.lock();
        if let Some(closed) = &lines.closed {
            return Err(closed.clone());
        }
        for (_, line) in &mut lines.clients {
            line.retain(|job| !job.events.is_closed());
        }
        lines.clients.retain(|(_, line)| !line.is_empty());
        let waiting = lines.n_jobs();
        if waiting + jobs.len() > self.jobs_max {
            return Err(ApiError::queue_full(waiting));
        }
        for job in jobs {
            match lines.clients.iter_mut().find(|(client, _)| *client == job.client) {
                Some((_, line)) => line.push_back(job),
                None => lines.clients.push_back((job.client.clone(), VecDeque::from([job]))),
            }
        }
        drop(lines);
        self.came.notify_one();
        Ok(())
    }

    /// The next job whose client is still there, taken out.
    fn pop(&self) -> Option<Job> {
        let mut lines = self.lock();
        while let Some((client, mut line)) = lines.clients.pop_front() {
            let job = line.pop_front();
            if !line.is_empty() {
                lines.clients.push_back((client, line));
            }
            if let Some(job) = job.filter(|job| !job.events.is_closed()) {
                return Some(job);
            }
        }
        None
    }

    /// Waits for the next job. Nothing is lost where the wait is given up.
    pub async fn next(&self) -> Job {
        loop {
            if let Some(job) = self.pop() {
                return job;
            }
            self.came.notified().await;
        }
    }

    /// Drops what waits of a request that cannot be completed any more.
    pub fn forget(&self, request: &UnboundedSender<ChoiceEvent>) {
        let mut lines = self.lock();
        for (_, line) in &mut lines.clients {
            line.retain(|job| !job.events.same_channel(request));
        }
        lines.clients.retain(|(_, line)| !line.is_empty());
    }

    /// Takes nothing from now on, and answers all that wait.
    pub fn close(&self, why: &ApiError) {
        let mut lines = self.lock();
        lines.closed = Some(why.clone());
        for job in lines.clients.drain(..).flat_map(|(_, line)| line) {
            job.tell(AnswerEvent::Failed(why.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::engine::sampler::Sampling;

    fn job(client: &str, mark: u32) -> (Job, UnboundedReceiver<ChoiceEvent>) {
        let (events, receiver) = unbounded_channel();
        let generate = Generate {
            id: 0,
            prompt: vec![mark],
            tokens_max: 1,
            sampling: Sampling::default(),
            stop_strings: Vec::new(),
            reasoning: crate::reply::ReasoningStart::Answer,
            thinks: false,
            reasoning_tokens_max: None,
            rule: None,
            single_call: false,
            tools: Vec::new(),
            ignore_eos: false,
            logprobs: None,
        };
        (Job { generate, choice: 0, client: client.to_owned(), api: "test", events, queued: Instant::now() }, receiver)
    }

    fn marks(queue: &Queue) -> Vec<u32> {
        std::iter::from_fn(|| queue.pop()).map(|job| job.generate.prompt[0]).collect()
    }

    #[test]
    fn clients_take_turns() {
        let queue = Queue::new(16);
        let mut held = Vec::new();
        for (client, mark) in [("a", 1), ("a", 2), ("a", 3), ("b", 10), ("c", 20), ("b", 11)] {
            let (job, events) = job(client, mark);
            held.push(events);
            queue.push(vec![job]).expect("there is room");
        }
        assert_eq!(marks(&queue), [1, 10, 20, 2, 11, 3]);
    }

    #[test]
    fn a_full_queue_refuses_whole_requests_and_forgets_who_left() {
        let queue = Queue::new(3);
        let (one, one_events) = job("a", 1);
        let (two, _two_events) = job("a", 2);
        queue.push(vec![one, two]).expect("there is room");
        let (three, _three_events) = job("b", 3);
        let (four, _four_events) = job("b", 4);
        let refused = queue.push(vec![three, four]).expect_err("one too many");
        assert!(refused.status == 429 && refused.retry_after_s.is_some(), "{refused:?}");
        drop(one_events);
        let (five, _five_events) = job("b", 5);
        let (six, _six_events) = job("b", 6);
        queue.push(vec![five, six]).expect("one has left");
        assert_eq!(marks(&queue), [2, 5, 6]);
    }

    #[test]
    fn a_closed_queue_answers_everybody() {
        let queue = Queue::new(3);
        let (waiting, mut events) = job("a", 1);
        queue.push(vec![waiting]).expect("there is room");
        let why = ApiError::unavailable("dead", "gone");
        queue.close(&why);
        assert!(matches!(events.try_recv(), Ok((0, AnswerEvent::Failed(error))) if error == why));
        assert_eq!(queue.push(vec![job("a", 2).0]).expect_err("closed"), why);
    }
}
