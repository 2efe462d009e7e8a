//! Order: streams, events and captured graphs of the simulated device.
//!
//! Work is queued and runs only when somebody waits for it, so a wait that the engine forgot shows as stale or poisoned data instead
//! of passing by luck. Each stream is a queue; draining one up to an event drains whatever that work waits for first.
//!
//! Virtual time is that of the order the host asked for, not of the order of draining: work starts no earlier than the work before it in
//! its stream, the events that it waits for, and the host's time when it was queued.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Instant;

use super::clock::{Clock, Cost};
use super::faults::Faults;
use super::launch::Launcher;
use super::memory::MemoryTable;
use crate::backend::{AddrRange, BackendError, Capabilities, Copy, Op, Result};
use crate::units::Bytes;

/// Virtual time that asking an event takes the host.
const POLL_S: f64 = 0.1e-6;

/// Number of a stream.
pub type StreamId = usize;

/// A point in a stream that an event marked. Recording an event again makes a new mark; waiters of the old one keep it.
pub struct Mark {
    stream: StreamId,
    state: Cell<MarkState>,
}

#[derive(Clone, Copy)]
enum MarkState {
    /// In the queue of its stream.
    Pending,
    /// Its stream has come this far.
    Reached { at_s: f64, at: Instant },
    /// A fault dropped it together with the work before it.
    Lost,
}

/// One queued piece of work.
#[derive(Clone)]
pub enum Command {
    /// A copy.
    Copy(Copy),
    /// Filling a range with a byte.
    Fill(AddrRange, u8),
    /// An operation.
    Launch(Op),
    /// A recorded graph's commands.
    Replay(Rc<Vec<Command>>),
    /// A mark is reached.
    Record(Rc<Mark>),
    /// Wait for a mark of any stream.
    Wait(Rc<Mark>),
}

/// A command with the host's virtual time when it was queued: the device cannot have begun it before.
struct Queued {
    command: Command,
    issued_s: f64,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Queued>,
    time_s: f64,
    /// A command of this stream is being run, and more of it may follow although the queue is empty.
    running: bool,
    /// The fault of work that ran while nobody waited for this stream, kept for who does.
    fault: Option<BackendError>,
}

impl Stream {
    /// Drops all that is queued: behind a fault it would compute on garbage.
    fn abandon(&mut self) {
        for queued in self.queue.drain(..) {
            if let Command::Record(mark) = queued.command {
                mark.state.set(MarkState::Lost);
            }
        }
    }
}

/// How far a stream is drained.
#[derive(Clone, Copy)]
enum Until<'a> {
    /// To its end.
    End,
    /// To a mark in its queue.
    Mark(&'a Mark),
    /// To a mark, or to the first work that ends after a time.
    MarkOrTime(&'a Mark, f64),
}

impl Until<'_> {
    fn is_reached(self, time_s: f64) -> bool {
        let reached = |mark: &Mark| matches!(mark.state.get(), MarkState::Reached { .. });
        match self {
            Self::End => false,
            Self::Mark(mark) => reached(mark),
            Self::MarkOrTime(mark, most_s) => reached(mark) || time_s > most_s,
        }
    }
}

/// Capture is a state machine idle, recording, idle; this is the recording state.
struct Recording {
    stream: StreamId,
    commands: Vec<Command>,
}

/// The whole state of the simulated device.
pub struct Machine {
    pub memory: MemoryTable,
    pub faults: Faults,
    pub clock: Option<Clock>,
    pub launcher: Launcher,
    /// Virtual time of the host: the latest end of what it has waited for.
    host_s: f64,
    streams: Vec<Stream>,
    recording: Option<Recording>,
    lost: Option<String>,
}

impl Machine {
    pub fn new(memory: MemoryTable, launcher: Launcher, clock: Option<Clock>) -> Self {
        Self { memory, faults: Faults::default(), clock, launcher, host_s: 0.0, streams: Vec::new(), recording: None, lost: None }
    }

    pub fn check_alive(&self) -> Result<()> {
        match &self.lost {
            Some(reason) => Err(BackendError::DeviceLost { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    pub fn create_stream(&mut self) -> StreamId {
        self.streams.push(Stream::default());
        self.streams.len() - 1
    }

    /// Device memory that an allocation could still take.
    pub fn free(&self) -> Bytes {
        let taken = self.memory.used() + self.memory.taken_by_touch() + self.faults.held_by_others;
        self.memory.total().saturating_sub(taken)
    }

    /// Refuses a copy or a fill where that is injected.
    pub fn take_transfer(&mut self) -> Result<()> {
        match Faults::strikes(&mut self.faults.transfers_until_refused) {
            true => Err(BackendError::OutOfOrder { call: "a transfer", state: "the driver is out of resources (injected fault)" }),
            false => Ok(()),
        }
    }

    /// Notes that device memory is about to be written.
    pub fn touch(&mut self, range: AddrRange) {
        self.memory.touch(range, self.faults.touch_takes_percent);
    }

    /// Queues a graph's commands.
    pub fn replay(&mut self, stream: StreamId, commands: &Rc<Vec<Command>>) -> Result<()> {
        self.refuse_in_capture("replay", stream)?;
        self.submit(stream, Command::Replay(Rc::clone(commands)))
    }

    /// Queues a command, or records it where its stream is being captured.
    pub fn submit(&mut self, stream: StreamId, command: Command) -> Result<()> {
        self.check_alive()?;
        match &mut self.recording {
            Some(recording) if recording.stream == stream => recording.commands.push(command),
            _ => self.streams[stream].queue.push_back(Queued { command, issued_s: self.host_s }),
        }
        Ok(())
    }

    /// Marks the present end of a stream.
    pub fn record(&mut self, stream: StreamId) -> Result<Rc<Mark>> {
        self.refuse_in_capture("record", stream)?;
        let mark = Rc::new(Mark { stream, state: Cell::new(MarkState::Pending) });
        self.submit(stream, Command::Record(Rc::clone(&mark)))?;
        Ok(mark)
    }

    pub fn wait(&mut self, stream: StreamId, mark: &Rc<Mark>) -> Result<()> {
        self.refuse_in_capture("wait", stream)?;
        self.submit(stream, Command::Wait(Rc::clone(mark)))
    }

    /// A mark in a graph would be reached once for each replay, which no event can say; graphs do not nest; and a stream that
    /// records has no end to wait for.
    fn refuse_in_capture(&self, call: &'static str, stream: StreamId) -> Result<()> {
        match &self.recording {
            Some(recording) if recording.stream == stream => Err(BackendError::OutOfOrder { call, state: "its stream is being captured" }),
            _ => Ok(()),
        }
    }

    /// Memory is neither taken nor registered while a capture records: a device's driver would give the capture up.
    pub fn refuse_while_recording(&self, call: &'static str) -> Result<()> {
        match self.recording {
            Some(_) => Err(BackendError::OutOfOrder { call, state: "a capture is recording" }),
            None => Ok(()),
        }
    }

    pub fn begin_capture(&mut self, stream: StreamId) -> Result<()> {
        self.check_alive()?;
        if self.recording.is_some() {
            return Err(BackendError::OutOfOrder { call: "begin_capture", state: "a capture is recording" });
        }
        self.recording = Some(Recording { stream, commands: Vec::new() });
        Ok(())
    }

    /// Ends the capture in any case; the commands are returned where it succeeded.
    pub fn end_capture(&mut self, stream: StreamId) -> Result<Vec<Command>> {
        self.check_alive()?;
        let Some(recording) = self.recording.take_if(|recording| recording.stream == stream) else {
            return Err(BackendError::OutOfOrder { call: "end_capture", state: "no capture records on this stream" });
        };
        if self.faults.captures_fail {
            return Err(BackendError::CaptureFailed { reason: "injected fault".to_owned() });
        }
        Ok(recording.commands)
    }

    /// Runs a stream's work to its end.
    pub fn synchronise(&mut self, stream: StreamId) -> Result<()> {
        self.refuse_in_capture("synchronise", stream)?;
        self.drain(stream, Until::End)?;
        self.host_s = self.host_s.max(self.streams[stream].time_s);
        Ok(())
    }

    /// Runs all queued work; a fault is kept for whoever synchronises its stream.
    pub fn settle(&mut self) {
        for stream in 0..self.streams.len() {
            if let Err(fault) = self.drain(stream, Until::End) {
                self.streams[stream].fault = Some(fault);
            }
        }
    }

    /// Polls an event. Without a clock the device works on meanwhile, so a poll finds the work done, unless a stall is injected. With
    /// one, a poll finds done what is over at the host's virtual time, and takes a little of it: waiting by polling ends.
    pub fn is_done(&mut self, mark: &Mark) -> Result<bool> {
        self.check_alive()?;
        if matches!(mark.state.get(), MarkState::Pending) && self.faults.stalled_polls > 0 {
            self.faults.stalled_polls -= 1;
            return Ok(false);
        }
        if self.clock.is_none() {
            return self.complete(mark).map(|()| true);
        }
        if matches!(mark.state.get(), MarkState::Pending) {
            // No further than the host's time: what is queued behind has not begun, and others may come before it on the link.
            self.drain(mark.stream, Until::MarkOrTime(mark, self.host_s))?;
        }
        match mark.state.get() {
            MarkState::Reached { at_s, .. } if at_s <= self.host_s => Ok(true),
            MarkState::Reached { .. } | MarkState::Pending => {
                self.host_s += POLL_S;
                Ok(false)
            }
            MarkState::Lost => self.complete(mark).map(|()| true),
        }
    }

    /// Seconds between two marks: virtual time where a clock runs, else wall time.
    pub fn elapsed_s(&self, start: Option<&Mark>, end: Option<&Mark>) -> Result<f64> {
        let states = (start.map(|mark| mark.state.get()), end.map(|mark| mark.state.get()));
        let (Some(MarkState::Reached { at_s: from_s, at: from }), Some(MarkState::Reached { at_s: to_s, at: to })) = states else {
            return Err(BackendError::OutOfOrder { call: "elapsed_s", state: "an event has not happened" });
        };
        Ok(if self.clock.is_some() { to_s - from_s } else { to.saturating_duration_since(from).as_secs_f64() })
    }

    /// Virtual time of the host, in seconds.
    pub fn host_time_s(&self) -> f64 {
        self.host_s
    }

    /// Virtual time at which a stream's finished work ended, in seconds.
    pub fn stream_time_s(&self, stream: StreamId) -> f64 {
        self.streams[stream].time_s
    }

    /// Waits for a mark as the host: runs what comes before it, and the host's time goes on to it.
    pub fn await_mark(&mut self, mark: &Mark) -> Result<()> {
        self.complete(mark)?;
        if let MarkState::Reached { at_s, .. } = mark.state.get() {
            self.host_s = self.host_s.max(at_s);
        }
        Ok(())
    }

    /// Runs what comes before a mark.
    fn complete(&mut self, mark: &Mark) -> Result<()> {
        self.check_alive()?;
        match mark.state.get() {
            MarkState::Reached { .. } => Ok(()),
            MarkState::Pending => self.drain(mark.stream, Until::Mark(mark)),
            MarkState::Lost => {
                Err(BackendError::OutOfOrder { call: "waiting for an event", state: "a fault has dropped the work before it" })
            }
        }
    }

    /// Runs a stream's work in order.
    fn drain(&mut self, stream: StreamId, until: Until<'_>) -> Result<()> {
        self.check_alive()?;
        if let Some(fault) = self.streams[stream].fault.take() {
            self.streams[stream].abandon();
            return Err(fault);
        }
        while !until.is_reached(self.streams[stream].time_s)
            && let Some(queued) = self.streams[stream].queue.pop_front()
        {
            self.streams[stream].running = true;
            let outcome = self.run(stream, queued.command, queued.issued_s);
            self.streams[stream].running = false;
            if let Err(fault) = outcome {
                self.streams[stream].abandon();
                return Err(fault);
            }
        }
        Ok(())
    }

    fn run(&mut self, stream: StreamId, command: Command, issued_s: f64) -> Result<()> {
        if !matches!(command, Command::Wait(_)) {
            let time_s = &mut self.streams[stream].time_s;
            *time_s = time_s.max(issued_s);
        }
        match command {
            Command::Copy(copy) => self.run_copy(stream, copy),
            Command::Fill(range, byte) => {
                let cost = Cost { device_bytes: range.bytes.0 as f64, ..Cost::default() };
                self.advance(stream, cost);
                self.memory.fill(range, byte)
            }
            Command::Launch(op) => self.run_op(stream, &op),
            Command::Replay(commands) => commands.iter().try_for_each(|command| self.run(stream, command.clone(), issued_s)),
            Command::Record(mark) => {
                mark.state.set(MarkState::Reached { at_s: self.streams[stream].time_s, at: Instant::now() });
                Ok(())
            }
            Command::Wait(mark) => {
                self.complete(&mark)?;
                if let MarkState::Reached { at_s, .. } = mark.state.get() {
                    let time_s = &mut self.streams[stream].time_s;
                    *time_s = time_s.max(at_s);
                }
                Ok(())
            }
        }
    }

    fn run_copy(&mut self, stream: StreamId, copy: Copy) -> Result<()> {
        self.forget_past();
        if let Some(clock) = &mut self.clock {
            self.streams[stream].time_s = clock.copy(self.streams[stream].time_s, copy.bytes.0 as f64, copy.direction);
        }
        let destination = AddrRange { start: copy.dst, bytes: copy.bytes };
        if self.faults.lose_copies_into.is_some_and(|lost| lost.overlaps(destination)) {
            return Ok(());
        }
        self.memory.copy(copy.dst, copy.src, copy.bytes)
    }

    fn run_op(&mut self, stream: StreamId, op: &Op) -> Result<()> {
        if Faults::strikes(&mut self.faults.launches_until_lost) {
            let reason = format!("injected fault at {}", op.name());
            self.lost = Some(reason.clone());
            return Err(BackendError::DeviceLost { reason });
        }
        let cost = self.launcher.run(op, &mut self.memory)?;
        self.advance(stream, cost);
        Ok(())
    }

    /// Tells the clock the earliest time that any work can still start at, now and then.
    fn forget_past(&mut self) {
        let Some(clock) = self.clock.as_mut().filter(|clock| clock.has_much_to_forget()) else { return };
        let earliest = |stream: &Stream| match stream.queue.front() {
            _ if stream.running => stream.time_s,
            Some(queued) => stream.time_s.max(queued.issued_s),
            // What is queued from now on starts at the host's time.
            None => self.host_s,
        };
        clock.forget(self.streams.iter().map(earliest).fold(f64::INFINITY, f64::min));
    }

    fn advance(&mut self, stream: StreamId, cost: Cost) {
        self.forget_past();
        if let Some(clock) = &mut self.clock {
            self.streams[stream].time_s = clock.operation(self.streams[stream].time_s, cost);
        }
    }
}

/// The facts of a simulated device with `total` bytes.
pub fn capabilities(total: Bytes, device: String, copy_engines: u32) -> Capabilities {
    Capabilities {
        backend: "host",
        device,
        virtual_memory: true,
        backing_unit: super::memory::BACKING_UNIT,
        borrow_spill: true,
        halves_max: None,
        context_bytes: Bytes::ZERO,
        context_growth_bytes: Bytes::ZERO,
        graph_capture: true,
        os_budget: false,
        integrated: false,
        reads_pageable_memory: true,
        max_allocation_bytes: total,
        copy_engines,
        graph_node_bytes: super::GRAPH_NODE_BYTES,
    }
}
