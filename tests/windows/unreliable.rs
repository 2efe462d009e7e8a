//! The host backend with graph calls that fail when a test says so, and with its allocations listed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ebbtide::backend::{AddrRange, Backend, BackendError, Capabilities, Copy, DeviceMemory, HostRegion, MemoryInfo, Op, Result};
use ebbtide::backends::host::HostBackend;
use ebbtide::units::Bytes;

/// A call that may fail; the number counts the calls of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// A capture ends.
    Capture(u64),
    /// A graph is to be queued.
    Replay(u64),
    /// Work with a graph in it is waited for.
    WaitForReplay(u64),
    /// An operation is queued outside a capture.
    Launch(u64),
}

/// What happened, and what is to fail.
#[derive(Default)]
pub struct Script {
    pub captures: Cell<u64>,
    pub replays: Cell<u64>,
    pub launches: Cell<u64>,
    waits: Cell<u64>,
    recording: Cell<bool>,
    replay_queued: Cell<bool>,
    pub fails: RefCell<Vec<Call>>,
    allocations: RefCell<Vec<(String, AddrRange)>>,
}

impl Script {
    fn count(&self, counter: &Cell<u64>, call: fn(u64) -> Call) -> Result<()> {
        let number = counter.replace(counter.get() + 1);
        match self.fails.borrow().contains(&call(number)) {
            true => Err(BackendError::CaptureFailed { reason: format!("injected at {:?}", call(number)) }),
            false => Ok(()),
        }
    }

    /// The allocation of a purpose.
    pub fn range(&self, purpose: &str) -> AddrRange {
        self.allocations.borrow().iter().find(|(of, _)| of == purpose).unwrap_or_else(|| panic!("no {purpose}")).1
    }
}

/// See the module.
pub struct Unreliable {
    pub inner: HostBackend,
    pub script: Rc<Script>,
}

impl Unreliable {
    pub fn new(inner: HostBackend) -> Self {
        Self { inner, script: Rc::default() }
    }

    /// The same device again, to watch it while an engine uses it.
    pub fn share(&self) -> Self {
        Self { inner: self.inner.share(), script: Rc::clone(&self.script) }
    }
}

impl Backend for Unreliable {
    type Buffer = <HostBackend as Backend>::Buffer;
    type Reserved = <HostBackend as Backend>::Reserved;
    type Pinned = <HostBackend as Backend>::Pinned;
    type Registered = <HostBackend as Backend>::Registered;
    type Stream = <HostBackend as Backend>::Stream;
    type Event = <HostBackend as Backend>::Event;
    type Graph = <HostBackend as Backend>::Graph;

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.inner.memory_info()
    }

    fn malloc(&self, bytes: Bytes, purpose: &str) -> Result<Self::Buffer> {
        let buffer = self.inner.malloc(bytes, purpose)?;
        self.script.allocations.borrow_mut().push((purpose.to_owned(), buffer.range()));
        Ok(buffer)
    }

    fn reserve(&self, bytes: Bytes) -> Result<Self::Reserved> {
        self.inner.reserve(bytes)
    }

    fn back(&self, reserved: &Self::Reserved, part: AddrRange, purpose: &str) -> Result<Self::Buffer> {
        let buffer = self.inner.back(reserved, part, purpose)?;
        self.script.allocations.borrow_mut().push((purpose.to_owned(), buffer.range()));
        Ok(buffer)
    }

    fn alloc_pinned(&self, bytes: Bytes, purpose: &str) -> Result<Self::Pinned> {
        self.inner.alloc_pinned(bytes, purpose)
    }

    fn register(&self, region: HostRegion) -> Result<Self::Registered> {
        self.inner.register(region)
    }

    fn create_stream(&self) -> Result<Self::Stream> {
        self.inner.create_stream()
    }

    fn create_event(&self) -> Result<Self::Event> {
        self.inner.create_event()
    }

    fn record(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()> {
        self.inner.record(stream, event)
    }

    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()> {
        self.inner.wait(stream, event)
    }

    fn is_done(&self, event: &Self::Event) -> Result<bool> {
        self.inner.is_done(event)
    }

    fn synchronise_event(&self, event: &Self::Event) -> Result<()> {
        self.inner.synchronise_event(event)
    }

    fn elapsed_s(&self, start: &Self::Event, end: &Self::Event) -> Result<f64> {
        self.inner.elapsed_s(start, end)
    }

    fn synchronise(&self, stream: &Self::Stream) -> Result<()> {
        self.inner.synchronise(stream)?;
        if self.script.replay_queued.replace(false) { self.script.count(&self.script.waits, Call::WaitForReplay) } else { Ok(()) }
    }

    fn copy(&self, stream: &Self::Stream, copy: Copy) -> Result<()> {
        self.inner.copy(stream, copy)
    }

    fn fill(&self, stream: &Self::Stream, range: AddrRange, byte: u8) -> Result<()> {
        self.inner.fill(stream, range, byte)
    }

    fn discard(&self, stream: &Self::Stream, range: AddrRange) -> Result<()> {
        self.inner.discard(stream, range)
    }

    fn launch(&self, stream: &Self::Stream, op: &Op) -> Result<()> {
        if !self.script.recording.get() {
            self.script.count(&self.script.launches, Call::Launch)?;
        }
        self.inner.launch(stream, op)
    }

    fn begin_capture(&self, stream: &Self::Stream) -> Result<()> {
        self.inner.begin_capture(stream)?;
        self.script.recording.set(true);
        Ok(())
    }

    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph> {
        self.script.recording.set(false);
        let graph = self.inner.end_capture(stream);
        self.script.count(&self.script.captures, Call::Capture)?;
        graph
    }

    fn replay(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<()> {
        self.script.count(&self.script.replays, Call::Replay)?;
        self.script.replay_queued.set(true);
        self.inner.replay(stream, graph)
    }

    fn graph_bytes(&self, graph: &Self::Graph) -> Bytes {
        self.inner.graph_bytes(graph)
    }
}
