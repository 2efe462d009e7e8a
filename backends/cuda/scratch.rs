//! Memory of the backend's own that kernels put partial results in, for operations that bring none.
//!
//! Work of one stream is done in order, so a stream has one piece, which serves all its operations. A piece that turns out too small is
//! replaced and kept: captured graphs go on using it. No plan counts these bytes; they are the same for all windows of a model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use super::context::Context;
use super::graph::CudaStream;
use super::memory::CudaBuffer;
use crate::backend::{Addr, DeviceMemory, Result};
use crate::units::Bytes;

/// The pieces of all streams, the largest of each stream last.
pub struct Scratch {
    context: Rc<Context>,
    pieces: RefCell<HashMap<usize, Vec<CudaBuffer>>>,
}

impl Scratch {
    /// None yet.
    pub fn new(context: &Rc<Context>) -> Self {
        Self { context: Rc::clone(context), pieces: RefCell::default() }
    }

    /// `bytes` bytes for work on `stream`, whose contents are undefined. Taken in the middle of a capture, too: a first window is captured
    /// before it ever ran.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`](crate::backend::BackendError::OutOfMemory), or the driver's.
    pub fn get(&self, stream: &CudaStream, bytes: Bytes) -> Result<Addr> {
        let mut pieces = self.pieces.borrow_mut();
        let pieces = pieces.entry(stream.raw().addr()).or_default();
        if let Some(piece) = pieces.last().filter(|piece| piece.range().bytes >= bytes) {
            return Ok(piece.range().start);
        }
        let piece = CudaBuffer::beside_a_capture(&self.context, bytes, "partial results of attention")?;
        let start = piece.range().start;
        pieces.push(piece);
        Ok(start)
    }
}
