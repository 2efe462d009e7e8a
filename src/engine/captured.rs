//! Captured windows with the leases that make replaying them safe.
//!
//! A window is two graphs: the trunk, which reads experts through the table and bakes in no address of the slab, and the head, which
//! bakes in the head's. A capture that fails leaves the eager form of the same operations, with one line that says so.

use std::rc::Rc;

use crate::backend::{Backend, BackendError, Op};
use crate::engine::EngineError;
use crate::phase::region::Lease;
use crate::phase::scheduler::Decode;

/// A list of operations that is replayed as one graph where that is possible.
pub struct CapturedOps<B: Backend> {
    backend: Rc<B>,
    ops: Vec<Op>,
    graph: Option<B::Graph>,
    leases: Vec<Lease>,
}

impl<B: Backend> CapturedOps<B> {
    /// Captures `ops` on `stream`. The second value says why it is not a graph, where it is not.
    ///
    /// # Errors
    /// The backend's, other than those of capturing.
    pub fn capture(backend: Rc<B>, stream: &B::Stream, ops: Vec<Op>, leases: Vec<Lease>) -> Result<(Self, Option<String>), EngineError> {
        let (graph, notice) = if backend.capabilities().graph_capture {
            match Self::record(&*backend, stream, &ops) {
                Ok(graph) => (Some(graph), None),
                Err(error @ BackendError::DeviceLost { .. }) => return Err(error.into()),
                Err(error) => (None, Some(format!("windows run without a captured graph from here on: {error}"))),
            }
        } else {
            (None, None)
        };
        Ok((Self { backend, ops, graph, leases }, notice))
    }

    fn record(backend: &B, stream: &B::Stream, ops: &[Op]) -> Result<B::Graph, BackendError> {
        backend.begin_capture(stream)?;
        let launched = ops.iter().try_for_each(|op| backend.launch(stream, op));
        // The capture is ended whatever happened, so that the stream is usable again.
        let graph = backend.end_capture(stream);
        launched.and(graph)
    }

    /// Queues the operations. The witness proves that the slab belongs to decode; the leases are checked against it.
    ///
    /// # Errors
    /// [`PhaseError::StaleLease`](crate::phase::PhaseError::StaleLease), or the backend's.
    pub fn run(&self, witness: &Decode<'_, B>, stream: &B::Stream) -> Result<(), EngineError> {
        witness.check_leases(&self.leases)?;
        match &self.graph {
            Some(graph) => self.backend.replay(stream, graph)?,
            None => self.ops.iter().try_for_each(|op| self.backend.launch(stream, op))?,
        }
        Ok(())
    }

    /// Device memory that the graph takes.
    #[must_use]
    pub fn graph_bytes(&self) -> crate::units::Bytes {
        self.graph.as_ref().map_or(crate::units::Bytes::ZERO, |graph| self.backend.graph_bytes(graph))
    }
}
