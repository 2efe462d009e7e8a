//! Order: streams, events and captured graphs of the simulated device.
//!
//! Work is queued and runs only when somebody waits for it, so a wait that the engine forgot shows as stale or poisoned data instead
//! of passing by luck. Each stream is a queue; draining one up to an event drains whatever that work waits for first.

use std::collections::VecDeque;
use std::time::Instant;

use super::clock::{Clock, Cost};
use super::faults::Faults;
use super::launch::Launcher;
use super::memory::MemoryTable;
use crate::backend::{AddrRange, BackendError, Capabilities, Copy, Op, Result};

/// Number of a stream.
pub type StreamId = usize;
/// Number of an event.
pub type EventId = usize;

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
    Replay(std::rc::Rc<Vec<Command>>),
    /// The given recording of an event is reached.
    Record(EventId, u64),
    /// Wait for the given recording of an event.
    Wait(EventId, u64),
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Command>,
    time_s: f64,
}

#[derive(Default)]
struct Event {
    stream: StreamId,
    recorded: u64,
    completed: u64,
    completed_at_s: f64,
    completed_at: Option<Instant>,
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
    streams: Vec<Stream>,
    events: Vec<Event>,
    recording: Option<Recording>,
    lost: Option<String>,
}

impl Machine {
    pub fn new(memory: MemoryTable, launcher: Launcher, clock: Option<Clock>) -> Self {
        Self {
            memory,
            faults: Faults::default(),
            clock,
            launcher,
            streams: Vec::new(),
            events: Vec::new(),
            recording: None,
            lost: None,
        }
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

    pub fn create_event(&mut self) -> EventId {
        self.events.push(Event::default());
        self.events.len() - 1
    }

    /// Queues a command, or records it where its stream is being captured.
    pub fn submit(&mut self, stream: StreamId, command: Command) -> Result<()> {
        self.check_alive()?;
        match &mut self.recording {
            Some(recording) if recording.stream == stream => recording.commands.push(command),
            _ => self.streams[stream].queue.push_back(command),
        }
        Ok(())
    }

    pub fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let state = &mut self.events[event];
        state.recorded += 1;
        state.stream = stream;
        let ticket = state.recorded;
        self.submit(stream, Command::Record(event, ticket))
    }

    pub fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let ticket = self.events[event].recorded;
        self.submit(stream, Command::Wait(event, ticket))
    }

    pub fn is_recording(&self) -> bool {
        self.recording.is_some()
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
        self.drain(stream, None)
    }

    /// Runs all queued work.
    pub fn synchronise_all(&mut self) -> Result<()> {
        (0..self.streams.len()).try_for_each(|stream| self.drain(stream, None))
    }

    pub fn synchronise_event(&mut self, event: EventId) -> Result<()> {
        let Event { stream, recorded, .. } = self.events[event];
        self.complete(stream, event, recorded)
    }

    /// Polls an event. The device works on meanwhile, so a poll finds the work done, unless a stall is injected.
    pub fn is_done(&mut self, event: EventId) -> Result<bool> {
        self.check_alive()?;
        let Event { recorded, completed, .. } = self.events[event];
        if completed >= recorded {
            return Ok(true);
        }
        if self.faults.stalled_polls > 0 {
            self.faults.stalled_polls -= 1;
            return Ok(false);
        }
        self.synchronise_event(event)?;
        Ok(true)
    }

    /// Seconds between two events: virtual time where a clock runs, else wall time.
    pub fn elapsed_s(&self, start: EventId, end: EventId) -> Result<f64> {
        let (start, end) = (&self.events[start], &self.events[end]);
        let (Some(from), Some(to)) = (start.completed_at, end.completed_at) else {
            return Err(BackendError::OutOfOrder { call: "elapsed_s", state: "an event has not happened" });
        };
        if self.clock.is_some() {
            return Ok(end.completed_at_s - start.completed_at_s);
        }
        Ok(to.saturating_duration_since(from).as_secs_f64())
    }

    /// Virtual time at which a stream's finished work ended, in seconds.
    pub fn stream_time_s(&self, stream: StreamId) -> f64 {
        self.streams[stream].time_s
    }

    fn complete(&mut self, stream: StreamId, event: EventId, ticket: u64) -> Result<()> {
        self.check_alive()?;
        if self.events[event].completed < ticket {
            self.drain(stream, Some((event, ticket)))?;
        }
        Ok(())
    }

    fn drain(&mut self, stream: StreamId, until: Option<(EventId, u64)>) -> Result<()> {
        self.check_alive()?;
        while let Some(command) = self.streams[stream].queue.pop_front() {
            if let Err(error) = self.run(stream, command) {
                // What was queued behind a fault would compute on garbage.
                self.streams[stream].queue.clear();
                return Err(error);
            }
            if until.is_some_and(|(event, ticket)| self.events[event].completed >= ticket) {
                break;
            }
        }
        Ok(())
    }

    fn run(&mut self, stream: StreamId, command: Command) -> Result<()> {
        match command {
            Command::Copy(copy) => self.run_copy(stream, copy),
            Command::Fill(range, byte) => {
                let cost = Cost { device_bytes: range.bytes.0 as f64, ..Cost::default() };
                self.advance(stream, cost);
                self.memory.fill(range, byte)
            }
            Command::Launch(op) => self.run_op(stream, &op),
            Command::Replay(commands) => commands.iter().try_for_each(|command| self.run(stream, command.clone())),
            Command::Record(event, ticket) => {
                self.events[event].completed = ticket;
                self.events[event].completed_at_s = self.streams[stream].time_s;
                self.events[event].completed_at = Some(Instant::now());
                Ok(())
            }
            Command::Wait(event, ticket) => {
                let source = self.events[event].stream;
                self.complete(source, event, ticket)?;
                let reached = self.events[event].completed_at_s;
                let time = &mut self.streams[stream].time_s;
                *time = time.max(reached);
                Ok(())
            }
        }
    }

    fn run_copy(&mut self, stream: StreamId, copy: Copy) -> Result<()> {
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
        let cost = self.launcher.run(op, &self.memory)?;
        self.advance(stream, cost);
        Ok(())
    }

    fn advance(&mut self, stream: StreamId, cost: Cost) {
        if let Some(clock) = &mut self.clock {
            self.streams[stream].time_s = clock.operation(self.streams[stream].time_s, cost);
        }
    }
}

/// The facts of a simulated device with `total` bytes.
pub fn capabilities(total: crate::units::Bytes, device: String) -> Capabilities {
    Capabilities {
        backend: "host",
        device,
        virtual_memory: false,
        borrow_spill: true,
        graph_capture: true,
        os_budget: false,
        integrated: false,
        reads_pageable_memory: true,
        max_allocation_bytes: total,
        copy_engines: 1,
        graph_node_bytes: super::GRAPH_NODE_BYTES,
    }
}
