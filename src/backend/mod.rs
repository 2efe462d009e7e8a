//! The hardware contract: memory, order, captured graphs and a table of operations.
//!
//! A [`Backend`] is about memory and time. It allocates and frees device memory, answers how much is free, copies, orders work on
//! streams, records and replays graphs, and launches operations from the table in [`op`]. It knows nothing of models, phases or
//! experts: what is common to all devices is written once above the trait.
//!
//! Addresses are unified: device memory, pinned host memory and registered host memory all have an [`Addr`] that operations and
//! copies of the same backend accept. Work is asynchronous: a launched operation or copy may run any time before its stream is
//! synchronised, so everything it reads must stay as it is until then.
//!
//! An ability that a device may lack is a field of [`Capabilities`]; using it all the same returns
//! [`BackendError::Unsupported`], never a silent no-op.

mod check;
mod error;
pub mod op;
mod parts;
pub mod survey;

use std::fmt;
use std::sync::Arc;

pub use check::WINDOW_ROWS_MAX;
pub use error::{BackendError, Pool};
pub use op::Op;

use crate::units::Bytes;

/// Result of a backend call.
pub type Result<T> = std::result::Result<T, BackendError>;

/// An address as the device sees it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Addr(pub u64);

impl Addr {
    /// The address `bytes` further on; the last one there is where that leaves the address space.
    #[must_use]
    pub const fn offset(self, bytes: Bytes) -> Self {
        Self(self.0.saturating_add(bytes.0))
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A half-open range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddrRange {
    /// First address.
    pub start: Addr,
    /// Length.
    pub bytes: Bytes,
}

impl AddrRange {
    /// No bytes, nowhere.
    pub const EMPTY: Self = Self { start: Addr(0), bytes: Bytes::ZERO };

    /// The first address after the range.
    #[must_use]
    pub const fn end(self) -> Addr {
        self.start.offset(self.bytes)
    }

    /// True where the two ranges share at least one byte.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start.max(other.start) < self.end().min(other.end())
    }
}

/// What a device can do. Fields are facts about the device, asked once when it is opened.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// Short name of the backend: `host`, `cuda`, `hip`, `sycl`.
    pub backend: &'static str,
    /// The device's own name.
    pub device: String,
    /// Address ranges can be reserved and backed separately.
    pub virtual_memory: bool,
    /// What reserved ranges and the parts of them that are backed begin and end at multiples of; 1 without virtual memory.
    pub backing_unit: Bytes,
    /// Prompt buffers may continue in allocations of their own.
    pub borrow_spill: bool,
    /// Windows can be captured and replayed.
    pub graph_capture: bool,
    /// The system tells this process how much device memory it may use.
    pub os_budget: bool,
    /// The device shares memory with the host processor.
    pub integrated: bool,
    /// Kernels may read host memory that is not page-locked.
    pub reads_pageable_memory: bool,
    /// Prompts are best read in 16-bit floats ([`ActivationFormat::F16`](crate::quant::ActivationFormat::F16)), for which at most so many
    /// bytes of weights are unpacked at a time; `None` where weights are multiplied as they are.
    pub halves_max: Option<Bytes>,
    /// Largest single allocation.
    pub max_allocation_bytes: Bytes,
    /// Engines that copy while kernels run.
    pub copy_engines: u32,
    /// Device memory that one node of a captured graph takes.
    pub graph_node_bytes: Bytes,
    /// Device memory that this process holds as soon as the device is open: the driver's context and the kernels. An upper bound where
    /// other programs use the device, too.
    pub context_bytes: Bytes,
    /// What the context takes beside that once kernels run.
    pub context_growth_bytes: Bytes,
}

/// A reading of a device's memory. `None` means that the driver does not say: it must not be taken for a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that can be allocated now, by the driver's word.
    pub free: Option<Bytes>,
    /// All bytes of the device.
    pub total: Bytes,
    /// What the system lets this process use.
    pub os_budget: Option<Bytes>,
}

/// Host memory to make readable by the device. It may begin and end anywhere: two regions may share a page, so a backend whose driver
/// locks whole pages locks each of them once.
#[derive(Clone)]
pub enum HostRegion {
    /// A read-only file map (`MAP_SHARED`, `PROT_READ`), registered in place and page-locked. Memory that is mapped otherwise, such
    /// as a file that is part of the program, may have to be read from a pinned copy, which the backend then keeps.
    ReadOnlyFile(Arc<dyn AsRef<[u8]> + Send + Sync>),
    /// The same memory without page-locking; needs [`Capabilities::reads_pageable_memory`].
    Pageable(Arc<dyn AsRef<[u8]> + Send + Sync>),
}

/// Which way a copy goes. The device needs to know to choose an engine; the simulated clock charges the link by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Host to device.
    ToDevice,
    /// Device to host.
    ToHost,
    /// Within the device.
    OnDevice,
}

/// One asynchronous copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// Where to.
    pub dst: Addr,
    /// Where from.
    pub src: Addr,
    /// How many bytes.
    pub bytes: Bytes,
    /// Which way.
    pub direction: Direction,
}

/// Memory with an address on the device; given back when dropped, after the queued work that may use it. Dropping waits for that work
/// and belongs outside hot paths; while a capture records, the memory is given back when the capture has ended.
pub trait DeviceMemory {
    /// Where it lies, as the device sees it. Constant for the life of the value.
    fn range(&self) -> AddrRange;
}

/// Page-locked host memory that both sides use.
pub trait PinnedMemory: DeviceMemory {
    /// Copies `bytes` out, from `offset` on. Work that writes the memory must have been synchronised.
    ///
    /// # Panics
    /// Where the range leaves the allocation.
    fn read(&self, offset: usize, bytes: &mut [u8]);

    /// Copies `bytes` in, from `offset` on. Queued work that reads the memory must have been synchronised.
    ///
    /// # Panics
    /// Where the range leaves the allocation.
    fn write(&self, offset: usize, bytes: &[u8]);
}

/// A device: memory and time. See the module's documentation for the contract.
///
/// All methods take `&self`; a backend is used from one thread, the engine's.
pub trait Backend: 'static {
    /// Owned device memory; dropping it frees it.
    type Buffer: DeviceMemory;
    /// Addresses of the device that are kept for us, whether or not memory lies behind them; dropping it gives them up once none does.
    type Reserved: DeviceMemory;
    /// Owned page-locked host memory.
    type Pinned: PinnedMemory;
    /// Host memory made readable by the device; dropping it ends that.
    type Registered: DeviceMemory;
    /// An in-order queue of work.
    type Stream;
    /// A point in a stream that others can wait for.
    type Event;
    /// A recorded sequence of operations.
    type Graph;

    /// What this device can do.
    fn capabilities(&self) -> &Capabilities;

    /// Free and total memory now. A fault that an earlier call left behind is cleared before the driver is asked.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], or whatever the driver answers. A caller retries and falls back to its own books.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Allocates device memory, aligned to 256 bytes. Contents are undefined.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] where the bytes are not there; [`BackendError::OutOfOrder`] while a capture is recording, which
    /// the refusal leaves whole: drivers let an allocation ruin a capture.
    fn malloc(&self, bytes: Bytes, purpose: &str) -> Result<Self::Buffer>;

    /// Keeps `bytes` addresses, rounded up to [`Capabilities::backing_unit`]. Takes no memory. Nothing may touch them before they are backed.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] without [`Capabilities::virtual_memory`], [`BackendError::OutOfOrder`] as [`Backend::malloc`], else
    /// the driver's.
    fn reserve(&self, bytes: Bytes) -> Result<Self::Reserved>;

    /// Puts memory behind `part` of a reserved range, in one piece and with undefined contents. Dropping the buffer takes the memory away
    /// again, after the queued work that may use it, and the addresses can be backed anew. No operand lies in two buffers.
    ///
    /// # Errors
    /// As [`Backend::malloc`], after which the range is as it was; [`BackendError::BadAddress`] for a part that leaves the range or is no
    /// whole number of [`Capabilities::backing_unit`], [`BackendError::Overlap`] where some of it is backed already.
    fn back(&self, reserved: &Self::Reserved, part: AddrRange, purpose: &str) -> Result<Self::Buffer>;

    /// Allocates page-locked host memory, aligned to 64 bytes, zeroed.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] naming the pinned pool; [`BackendError::OutOfOrder`] as [`Backend::malloc`].
    fn alloc_pinned(&self, bytes: Bytes, purpose: &str) -> Result<Self::Pinned>;

    /// Makes host memory readable by the device, in place.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`] where the system refuses to page-lock more, [`BackendError::Unsupported`] for a kind the
    /// device cannot read, [`BackendError::OutOfOrder`] as [`Backend::malloc`].
    fn register(&self, region: HostRegion) -> Result<Self::Registered>;

    /// A new stream.
    ///
    /// # Errors
    /// The driver's.
    fn create_stream(&self) -> Result<Self::Stream>;

    /// A new event, not yet recorded; waiting for it returns at once.
    ///
    /// # Errors
    /// The driver's.
    fn create_event(&self) -> Result<Self::Event>;

    /// Marks the present end of `stream` with `event`. What waited for an earlier mark goes on waiting for that one.
    ///
    /// # Errors
    /// [`BackendError::OutOfOrder`] while `stream` is being captured: order within a graph is the order of recording.
    fn record(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;

    /// Lets later work on `stream` start only when `event` has happened; returns at once where it was never recorded.
    ///
    /// # Errors
    /// As [`Backend::record`].
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;

    /// True when the work before the event is done, or nothing was recorded. Does not block.
    ///
    /// # Errors
    /// The driver's, including faults of the work itself.
    fn is_done(&self, event: &Self::Event) -> Result<bool>;

    /// Blocks until the event has happened; returns at once where it was never recorded.
    ///
    /// # Errors
    /// As [`Backend::is_done`]; [`BackendError::OutOfOrder`] where a fault took the event with it.
    fn synchronise_event(&self, event: &Self::Event) -> Result<()>;

    /// Seconds between two events that have happened, by the device's clock.
    ///
    /// # Errors
    /// [`BackendError::OutOfOrder`] where one has not happened yet.
    fn elapsed_s(&self, start: &Self::Event, end: &Self::Event) -> Result<f64>;

    /// Blocks until all work on `stream` is done.
    ///
    /// # Errors
    /// The first fault of the work; [`BackendError::OutOfOrder`] while `stream` is being captured.
    fn synchronise(&self, stream: &Self::Stream) -> Result<()>;

    /// Queues a copy.
    ///
    /// # Errors
    /// [`BackendError::BadAddress`] where a range is not live.
    fn copy(&self, stream: &Self::Stream, copy: Copy) -> Result<()>;

    /// Queues filling a range with one byte.
    ///
    /// # Errors
    /// [`BackendError::BadAddress`] where the range is not live.
    fn fill(&self, stream: &Self::Stream, range: AddrRange, byte: u8) -> Result<()>;

    /// Says that a range changes hands, so that whatever it holds is worthless from here on in stream order. A backend for tests
    /// overwrites it with a pattern that no computation survives; a real device does nothing.
    ///
    /// # Errors
    /// As [`Backend::fill`].
    fn discard(&self, stream: &Self::Stream, range: AddrRange) -> Result<()>;

    /// Queues an operation.
    ///
    /// # Errors
    /// [`BackendError::BadOperand`] where [`Op::check`] refuses, with nothing queued; [`BackendError::Unsupported`] for an operation
    /// the backend lacks. Bad addresses and bad contents of memory surface when it runs.
    fn launch(&self, stream: &Self::Stream, op: &Op) -> Result<()>;

    /// Starts recording what is queued on `stream` instead of running it: idle to recording.
    ///
    /// # Errors
    /// [`BackendError::OutOfOrder`] while a capture is recording, [`BackendError::Unsupported`] without graphs,
    /// [`BackendError::CaptureFailed`] where the driver does not begin.
    fn begin_capture(&self, stream: &Self::Stream) -> Result<()>;

    /// Ends recording and makes the graph: recording to idle, also when it fails.
    ///
    /// # Errors
    /// [`BackendError::CaptureFailed`], [`BackendError::OutOfMemory`] for the graph itself.
    fn end_capture(&self, stream: &Self::Stream) -> Result<Self::Graph>;

    /// Queues a recorded graph. The caller answers for its addresses still being right.
    ///
    /// # Errors
    /// As [`Backend::launch`]; [`BackendError::OutOfOrder`] while `stream` is being captured, for graphs do not nest.
    fn replay(&self, stream: &Self::Stream, graph: &Self::Graph) -> Result<()>;

    /// Device memory that the graph takes.
    fn graph_bytes(&self, graph: &Self::Graph) -> Bytes;
}
