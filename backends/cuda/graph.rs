//! Order: streams, events and captured graphs.
//!
//! A capture is the driver's, in the mode in which a call that it does not survive is an error on this thread; the state machine above
//! it (idle, recording, idle) refuses those calls before the driver sees them. So a capture that allocates all the same, as a library
//! might behind our back, ends in an error and not in a graph that holds memory nobody counts.

use std::cell::Cell;
use std::ptr;
use std::rc::Rc;

use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphExec, CUresult, CUstream};

use super::GRAPH_NODE_BYTES;
use super::context::{Context, Spent};
use super::driver::{DriverError, call};
use super::memory::out_of_memory;
use crate::backend::{BackendError, Pool, Result};
use crate::units::Bytes;

/// An in-order queue of work, independent of the driver's default stream.
pub struct CudaStream {
    context: Rc<Context>,
    raw: CUstream,
}

impl CudaStream {
    /// A new stream.
    pub fn new(context: &Rc<Context>) -> Result<Self> {
        context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current; `raw` is a place for one handle.
        context.told(unsafe { call!(cuStreamCreate(&raw mut raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32)) })?;
        Ok(Self { context: Rc::clone(context), raw })
    }

    /// The driver's handle.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits for all work.
    pub fn synchronise(&self) -> Result<()> {
        self.context.enter()?;
        self.context.refuse_in_capture("synchronise", self.raw)?;
        // SAFETY: the stream lives, in the context that is current.
        self.context.told(self.context.beside_a_capture(|| unsafe { call!(cuStreamSynchronize(self.raw)) }))
    }

    /// Starts recording.
    pub fn begin_capture(&self) -> Result<()> {
        self.context.enter()?;
        self.context.refuse_while_recording("begin_capture")?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives, in the context that is current, and is not being captured.
        let begun = unsafe { call!(cuStreamBeginCapture_v2(self.raw, mode)) };
        self.context.told(begun).map_err(of_capture)?;
        self.context.set_recording(self.raw);
        Ok(())
    }

    /// Ends recording in any case and makes the graph.
    pub fn end_capture(&self) -> Result<CudaGraph> {
        self.context.enter()?;
        if self.context.recording() != Some(self.raw) {
            return Err(BackendError::OutOfOrder { call: "end_capture", state: "no capture records on this stream" });
        }
        let recorded = self.recorded();
        self.context.set_idle();
        CudaGraph::new(&self.context, &self.context.told(recorded).map_err(of_capture)?)
    }

    fn recorded(&self) -> std::result::Result<Recorded, DriverError> {
        let mut graph = ptr::null_mut();
        // SAFETY: the stream lives; `graph` is a place for one handle.
        unsafe { call!(cuStreamEndCapture(self.raw, &raw mut graph)) }?;
        Ok(Recorded(graph))
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        if self.context.recording() == Some(self.raw) {
            // Nobody can end this capture any more, and none could be begun beside it.
            drop(self.recorded());
            self.context.set_idle();
        }
        // SAFETY: the stream lives and this is its last use; the driver finishes queued work by itself. An error leaves nothing to do: a
        // lost device shows at the next call.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// What a capture cannot say in other words.
fn of_capture(error: BackendError) -> BackendError {
    match error {
        BackendError::Driver { call, answer } => BackendError::CaptureFailed { reason: format!("{call} answers {answer}") },
        error => error,
    }
}

/// A point in a stream. Waiting for it sleeps.
pub struct CudaEvent {
    context: Rc<Context>,
    raw: CUevent,
    recorded: Cell<bool>,
}

impl CudaEvent {
    /// A new event, with a time.
    pub fn new(context: &Rc<Context>) -> Result<Self> {
        context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current; `raw` is a place for one handle.
        context.told(unsafe { call!(cuEventCreate(&raw mut raw, sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32)) })?;
        Ok(Self { context: Rc::clone(context), raw, recorded: Cell::new(false) })
    }

    /// Marks the end of `stream`.
    pub fn record(&self, stream: &CudaStream) -> Result<()> {
        self.context.enter()?;
        self.context.refuse_in_capture("record", stream.raw)?;
        // SAFETY: event and stream live, in the context that is current.
        self.context.told(unsafe { call!(cuEventRecord(self.raw, stream.raw)) })?;
        self.recorded.set(true);
        Ok(())
    }

    /// Lets `stream` wait. The driver remembers the mark of now, so that a later one changes nothing for this waiter.
    pub fn hold(&self, stream: &CudaStream) -> Result<()> {
        self.context.enter()?;
        self.context.refuse_in_capture("wait", stream.raw)?;
        // SAFETY: event and stream live; 0 is the only value that the flags take outside captures.
        self.context.told(unsafe { call!(cuStreamWaitEvent(stream.raw, self.raw, 0)) })
    }

    /// Whether the event has happened, or was never recorded.
    pub fn is_done(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: the event lives.
        match self.context.beside_a_capture(|| unsafe { call!(cuEventQuery(self.raw)) }) {
            Err(DriverError { code: CUresult::CUDA_ERROR_NOT_READY, .. }) => Ok(false),
            answer => self.context.told(answer).map(|()| true),
        }
    }

    /// Waits for the event.
    pub fn synchronise(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the event lives.
        self.context.told(self.context.beside_a_capture(|| unsafe { call!(cuEventSynchronize(self.raw)) }))
    }

    /// Seconds from this event to `end`, to about half a microsecond.
    pub fn seconds_until(&self, end: &Self) -> Result<f64> {
        self.context.enter()?;
        let early = BackendError::OutOfOrder { call: "elapsed_s", state: "an event has not happened" };
        if !self.recorded.get() || !end.recorded.get() {
            return Err(early);
        }
        let mut milliseconds = 0.0;
        // SAFETY: both events live and have times; `milliseconds` is a place for one number.
        match unsafe { call!(cuEventElapsedTime(&raw mut milliseconds, self.raw, end.raw)) } {
            Err(DriverError { code: CUresult::CUDA_ERROR_NOT_READY, .. }) => Err(early),
            answer => self.context.told(answer).map(|()| f64::from(milliseconds) / 1e3),
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the event lives and this is its last use; the driver keeps it while a stream waits for it.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// What a capture recorded, not yet executable.
struct Recorded(CUgraph);

impl Recorded {
    fn nodes(&self) -> std::result::Result<u64, DriverError> {
        let mut count = 0;
        // SAFETY: the graph lives; without a list to fill the call only counts.
        unsafe { call!(cuGraphGetNodes(self.0, ptr::null_mut(), &raw mut count)) }?;
        Ok(count as u64)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph lives and this is its last use; executable graphs made of it stand by themselves.
            let _ = unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}

/// An executable graph.
pub struct CudaGraph {
    context: Rc<Context>,
    raw: CUgraphExec,
    bytes: Bytes,
}

impl CudaGraph {
    fn new(context: &Rc<Context>, recorded: &Recorded) -> Result<Self> {
        let bytes = GRAPH_NODE_BYTES * context.told(recorded.nodes()).map_err(of_capture)?;
        let mut raw = ptr::null_mut();
        // SAFETY: the context is current, the graph lives, and `raw` is a place for one handle.
        match unsafe { call!(cuGraphInstantiateWithFlags(&raw mut raw, recorded.0, 0)) } {
            Err(DriverError { code: CUresult::CUDA_ERROR_OUT_OF_MEMORY, .. }) => {
                return Err(out_of_memory(context, Pool::Device, bytes, "captured graph"));
            }
            answer => context.told(answer).map_err(of_capture)?,
        }
        Ok(Self { context: Rc::clone(context), raw, bytes })
    }

    /// Queues the graph.
    pub fn replay(&self, stream: &CudaStream) -> Result<()> {
        self.context.enter()?;
        self.context.refuse_in_capture("replay", stream.raw)?;
        // SAFETY: graph and stream live, in the context that is current; the caller answers for the addresses in the graph.
        self.context.told(unsafe { call!(cuGraphLaunch(self.raw, stream.raw)) })
    }

    /// Device memory that it takes, by the stored figure for a node: the driver takes memory for graphs in pieces too large to measure
    /// one graph by.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.context.give_back(Spent::Graph(self.raw));
    }
}
