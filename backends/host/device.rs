//! The `host` backend: the trait over the simulated device.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

use super::clock::{BusySeconds, Clock, ClockProfile};
use super::dry::DryRun;
use super::faults::{Faults, FreeReading};
use super::graph::{Command, Machine, Mark, StreamId, capabilities};
use super::launch::Launcher;
use super::memory::MemoryTable;
use super::{GRAPH_NODE_BYTES, kernels::simd::SimdLevel, pool::ThreadPool};
use crate::backend::{
    AddrRange, Backend, BackendError, Capabilities, Copy, DeviceMemory, HostRegion, MemoryInfo, Op, PinnedMemory, Pool, Result,
};
use crate::units::Bytes;

/// How to open a simulated device.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Device memory it pretends to have.
    pub total: Bytes,
    /// Threads that run kernels, the caller's included.
    pub threads: usize,
    /// Instruction set of the kernels, at most the best there is, which `None` takes.
    pub simd: Option<SimdLevel>,
    /// Model of a device's speed to keep virtual time by.
    pub clock: Option<ClockProfile>,
    /// Charge time and compute nothing.
    pub dry: Option<DryRun>,
    /// Address ranges can be reserved and backed separately.
    pub virtual_memory: bool,
}

impl HostConfig {
    /// A device of `total` bytes with `threads` threads that computes and keeps no virtual time.
    #[must_use]
    pub const fn new(total: Bytes, threads: usize) -> Self {
        Self { total, threads, simd: None, clock: None, dry: None, virtual_memory: true }
    }
}

/// The embedded backend: RAM with a budget, CPU kernels, and faults on demand.
pub struct HostBackend {
    machine: Rc<RefCell<Machine>>,
    capabilities: Capabilities,
}

impl HostBackend {
    /// Opens a simulated device.
    ///
    /// # Errors
    /// [`BackendError::Open`] where the system has no thread left.
    pub fn open(config: &HostConfig) -> Result<Self> {
        let pool = ThreadPool::new(config.threads).map_err(|error| BackendError::Open { backend: "host", reason: error.to_string() })?;
        let best = SimdLevel::detect();
        let level = config.simd.map_or(best, |level| level.min(best));
        let launcher = Launcher::new(pool, level, config.dry);
        let dry = if config.dry.is_some() { ", dry run" } else { "" };
        let device = format!("simulated device{dry}, {} threads, {level:?}", config.threads);
        let memory = if config.dry.is_some() { MemoryTable::dry(config.total) } else { MemoryTable::new(config.total) };
        let machine = Machine::new(memory, launcher, config.clock.map(Clock::new));
        // Copies run beside operations on a modelled device only: the processor itself does one after the other.
        let copy_engines = u32::from(config.clock.is_some());
        let mut capabilities = capabilities(config.total, device, copy_engines);
        if !config.virtual_memory {
            (capabilities.virtual_memory, capabilities.backing_unit) = (false, Bytes(1));
        }
        Ok(Self { machine: Rc::new(RefCell::new(machine)), capabilities })
    }

    /// The faults to inject, to be set by a test.
    #[must_use]
    pub fn faults(&self) -> RefMut<'_, Faults> {
        RefMut::map(self.machine.borrow_mut(), |machine| &mut machine.faults)
    }

    /// The same device again, so that a test can watch it while an engine uses it.
    #[must_use]
    pub fn share(&self) -> Self {
        Self { machine: Rc::clone(&self.machine), capabilities: self.capabilities.clone() }
    }

    /// Device memory allocated now.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.machine.borrow().memory.used()
    }

    /// Most device memory ever allocated at once.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.machine.borrow().memory.peak()
    }

    /// Virtual time of the host in seconds, the latest end of what it has waited for; 0 without a clock. What lies between two readings
    /// around a call is what a user of the modelled device would have waited.
    #[must_use]
    pub fn host_time_s(&self) -> f64 {
        self.machine.borrow().host_time_s()
    }

    /// Virtual time of a stream's finished work, in seconds; 0 without a clock.
    #[must_use]
    pub fn stream_time_s(&self, stream: &HostStream) -> f64 {
        self.machine.borrow().stream_time_s(stream.0)
    }

    /// Virtual seconds of work since the device was opened; zeros without a clock.
    #[must_use]
    pub fn busy(&self) -> BusySeconds {
        self.machine.borrow().clock.as_ref().map(Clock::busy).unwrap_or_default()
    }

    fn memory(&self, range: AddrRange) -> HostMemory {
        HostMemory { machine: Rc::clone(&self.machine), range }
    }
}

/// Memory of the simulated device or beside it; freed on drop, after the queued work that may use it.
pub struct HostMemory {
    machine: Rc<RefCell<Machine>>,
    range: AddrRange,
}

impl DeviceMemory for HostMemory {
    fn range(&self) -> AddrRange {
        self.range
    }
}

impl HostMemory {
    fn part(&self, offset: usize, bytes: usize) -> AddrRange {
        let inside = offset.checked_add(bytes).is_some_and(|end| Bytes::from(end) <= self.range.bytes);
        assert!(inside, "{bytes} bytes at {offset} leave a buffer of {}", self.range.bytes);
        AddrRange { start: self.range.start.offset(Bytes::from(offset)), bytes: Bytes::from(bytes) }
    }
}

impl PinnedMemory for HostMemory {
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let range = self.part(offset, bytes.len());
        let machine = self.machine.borrow();
        let data = machine.memory.readable("pinned read", range).expect("an owned buffer is live");
        // SAFETY: the table checked the range; `bytes` is a distinct, exclusive slice.
        unsafe { std::ptr::copy_nonoverlapping(data, bytes.as_mut_ptr(), bytes.len()) };
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let range = self.part(offset, bytes.len());
        let machine = self.machine.borrow();
        let data = machine.memory.writable("pinned write", range).expect("an owned pinned buffer can be written");
        // SAFETY: the table checked the range, which belongs to the table and not to `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len()) };
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // A device that is in use by this very thread cannot be waited for; that happens only while a panic unwinds.
        if let Ok(mut machine) = self.machine.try_borrow_mut() {
            machine.settle();
            machine.memory.release(self.range.start);
        }
    }
}

/// Kept addresses of the simulated device.
pub struct HostReserved {
    machine: Rc<RefCell<Machine>>,
    range: AddrRange,
}

impl DeviceMemory for HostReserved {
    fn range(&self) -> AddrRange {
        self.range
    }
}

impl Drop for HostReserved {
    fn drop(&mut self) {
        if let Ok(mut machine) = self.machine.try_borrow_mut() {
            machine.memory.unreserve(self.range.start);
        }
    }
}

/// A queue of work.
pub struct HostStream(pub(super) StreamId);

/// A point in a stream.
pub struct HostEvent(RefCell<Option<Rc<Mark>>>);

impl HostEvent {
    fn mark(&self) -> Option<Rc<Mark>> {
        self.0.borrow().clone()
    }
}

/// A recorded sequence; charges the device for its nodes while it lives.
pub struct HostGraph {
    machine: Rc<RefCell<Machine>>,
    commands: Rc<Vec<Command>>,
    bytes: Bytes,
}

impl Drop for HostGraph {
    fn drop(&mut self) {
        if let Ok(mut machine) = self.machine.try_borrow_mut() {
            machine.memory.discharge(self.bytes);
        }
    }
}

impl Backend for HostBackend {
    type Buffer = HostMemory;
    type Reserved = HostReserved;
    type Pinned = HostMemory;
    type Registered = HostMemory;
    type Stream = HostStream;
    type Event = HostEvent;
    type Graph = HostGraph;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        let total = machine.memory.total();
        let true_free = machine.free();
        let free = match &mut machine.faults.free_reading {
            Some((reading, times)) if *times > 0 => {
                *times -= 1;
                match reading {
                    FreeReading::Zero => Some(Bytes::ZERO),
                    FreeReading::AboveTotal => Some(total + Bytes(1)),
                    FreeReading::Unknown => None,
                    FreeReading::Fails => {
                        return Err(BackendError::Unsupported { backend: "host", what: "the memory query (injected fault)".to_owned() });
                    }
                }
            }
            _ => Some(true_free),
        };
        Ok(MemoryInfo { free, total, os_budget: None })
    }

    fn malloc(&self, bytes: Bytes, purpose: &str) -> Result<HostMemory> {
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        machine.refuse_while_recording("malloc")?;
        let free = machine.free();
        if machine.faults.refuses(bytes, purpose) || bytes > free {
            return Err(BackendError::OutOfMemory { pool: Pool::Device, purpose: purpose.to_owned(), requested: bytes, free });
        }
        let reuse = machine.faults.reuses_address();
        machine.memory.allocate_device(bytes, purpose, reuse).map(|range| self.memory(range))
    }

    fn reserve(&self, bytes: Bytes) -> Result<HostReserved> {
        if !self.capabilities.virtual_memory {
            return Err(BackendError::Unsupported { backend: "host", what: "virtual memory (switched off)".to_owned() });
        }
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        machine.refuse_while_recording("reserve")?;
        if machine.faults.reserves_fail {
            return Err(BackendError::Driver { call: "reserve", answer: "an injected fault".to_owned() });
        }
        let range = machine.memory.reserve(bytes);
        Ok(HostReserved { machine: Rc::clone(&self.machine), range })
    }

    fn back(&self, reserved: &HostReserved, part: AddrRange, purpose: &str) -> Result<HostMemory> {
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        machine.refuse_while_recording("back")?;
        if part.start < reserved.range.start || part.end() > reserved.range.end() {
            return Err(BackendError::BadAddress { what: "back", addr: part.start, bytes: part.bytes });
        }
        if machine.faults.backings_fail {
            return Err(BackendError::Driver { call: "back", answer: "an injected fault".to_owned() });
        }
        let free = machine.free();
        if machine.faults.refuses(part.bytes, purpose) || part.bytes > free {
            return Err(BackendError::OutOfMemory { pool: Pool::Device, purpose: purpose.to_owned(), requested: part.bytes, free });
        }
        machine.memory.back(part, purpose).map(|range| self.memory(range))
    }

    fn alloc_pinned(&self, bytes: Bytes, purpose: &str) -> Result<HostMemory> {
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        machine.refuse_while_recording("alloc_pinned")?;
        if Faults::strikes(&mut machine.faults.pinned_until_failure) {
            let (purpose, free) = (purpose.to_owned(), Bytes::ZERO);
            return Err(BackendError::OutOfMemory { pool: Pool::PinnedHost, purpose, requested: bytes, free });
        }
        machine.memory.allocate_pinned(bytes, purpose).map(|range| self.memory(range))
    }

    fn register(&self, region: HostRegion) -> Result<HostMemory> {
        let mut machine = self.machine.borrow_mut();
        machine.check_alive()?;
        machine.refuse_while_recording("register")?;
        let memory = match region {
            HostRegion::Pageable(memory) => memory,
            HostRegion::ReadOnlyFile(memory) => {
                let requested = Bytes::from((*memory).as_ref().len());
                if let Some(limit) = &mut machine.faults.register_limit {
                    let Some(left) = limit.checked_sub(requested) else {
                        let purpose = "registering the model file".to_owned();
                        return Err(BackendError::OutOfMemory { pool: Pool::PinnedHost, purpose, requested, free: *limit });
                    };
                    *limit = left;
                }
                memory
            }
        };
        let range = machine.memory.register(memory);
        Ok(self.memory(range))
    }

    fn create_stream(&self) -> Result<HostStream> {
        Ok(HostStream(self.machine.borrow_mut().create_stream()))
    }

    fn create_event(&self) -> Result<HostEvent> {
        Ok(HostEvent(RefCell::new(None)))
    }

    fn record(&self, stream: &HostStream, event: &HostEvent) -> Result<()> {
        *event.0.borrow_mut() = Some(self.machine.borrow_mut().record(stream.0)?);
        Ok(())
    }

    fn wait(&self, stream: &HostStream, event: &HostEvent) -> Result<()> {
        event.mark().map_or(Ok(()), |mark| self.machine.borrow_mut().wait(stream.0, &mark))
    }

    fn is_done(&self, event: &HostEvent) -> Result<bool> {
        event.mark().map_or(Ok(true), |mark| self.machine.borrow_mut().is_done(&mark))
    }

    fn synchronise_event(&self, event: &HostEvent) -> Result<()> {
        event.mark().map_or(Ok(()), |mark| self.machine.borrow_mut().await_mark(&mark))
    }

    fn elapsed_s(&self, start: &HostEvent, end: &HostEvent) -> Result<f64> {
        self.machine.borrow().elapsed_s(start.mark().as_deref(), end.mark().as_deref())
    }

    fn synchronise(&self, stream: &HostStream) -> Result<()> {
        self.machine.borrow_mut().synchronise(stream.0)
    }

    fn copy(&self, stream: &HostStream, copy: Copy) -> Result<()> {
        let mut machine = self.machine.borrow_mut();
        machine.memory.readable("copy source", AddrRange { start: copy.src, bytes: copy.bytes })?;
        machine.memory.writable("copy destination", AddrRange { start: copy.dst, bytes: copy.bytes })?;
        machine.take_transfer()?;
        machine.touch(AddrRange { start: copy.dst, bytes: copy.bytes });
        machine.submit(stream.0, Command::Copy(copy))
    }

    fn fill(&self, stream: &HostStream, range: AddrRange, byte: u8) -> Result<()> {
        let mut machine = self.machine.borrow_mut();
        machine.memory.writable("fill", range)?;
        machine.take_transfer()?;
        machine.touch(range);
        machine.submit(stream.0, Command::Fill(range, byte))
    }

    fn discard(&self, stream: &HostStream, range: AddrRange) -> Result<()> {
        self.fill(stream, range, super::memory::POISON)
    }

    fn launch(&self, stream: &HostStream, op: &Op) -> Result<()> {
        op.check()?;
        self.machine.borrow_mut().submit(stream.0, Command::Launch(op.clone()))
    }

    fn begin_capture(&self, stream: &HostStream) -> Result<()> {
        self.machine.borrow_mut().begin_capture(stream.0)
    }

    fn end_capture(&self, stream: &HostStream) -> Result<HostGraph> {
        let mut machine = self.machine.borrow_mut();
        let commands = machine.end_capture(stream.0)?;
        let bytes = GRAPH_NODE_BYTES * commands.len() as u64;
        let free = machine.free();
        if bytes > free {
            let purpose = "captured graph".to_owned();
            return Err(BackendError::OutOfMemory { pool: Pool::Device, purpose, requested: bytes, free });
        }
        machine.memory.charge(bytes, "captured graph")?;
        Ok(HostGraph { machine: Rc::clone(&self.machine), commands: Rc::new(commands), bytes })
    }

    fn replay(&self, stream: &HostStream, graph: &HostGraph) -> Result<()> {
        self.machine.borrow_mut().replay(stream.0, &graph.commands)
    }

    fn graph_bytes(&self, graph: &HostGraph) -> Bytes {
        graph.bytes
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
