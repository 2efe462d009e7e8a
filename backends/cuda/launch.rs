//! Work on streams: copies, fills, and operations, of which this version has none.

use super::BACKEND;
use super::context::Context;
use super::driver::call;
use super::graph::CudaStream;
use super::live::Access;
use crate::backend::{AddrRange, BackendError, Copy, Op, Result};

/// Queues a copy. The driver finds the way by the addresses.
pub fn copy(context: &Context, stream: &CudaStream, copy: Copy) -> Result<()> {
    context.enter()?;
    context.live().check("copy source", AddrRange { start: copy.src, bytes: copy.bytes }, Access::Read)?;
    context.live().check("copy destination", AddrRange { start: copy.dst, bytes: copy.bytes }, Access::Write)?;
    if copy.bytes.0 == 0 {
        return Ok(());
    }
    // SAFETY: both ranges are live, and memory is freed only after the work that is queued before; the stream lives.
    context.told(unsafe { call!(cuMemcpyAsync(copy.dst.0, copy.src.0, copy.bytes.as_usize(), stream.raw())) })
}

/// Queues a fill.
pub fn fill(context: &Context, stream: &CudaStream, range: AddrRange, byte: u8) -> Result<()> {
    context.enter()?;
    context.live().check("fill", range, Access::Write)?;
    if range.bytes.0 == 0 {
        return Ok(());
    }
    // SAFETY: as in `copy`.
    context.told(unsafe { call!(cuMemsetD8Async(range.start.0, byte, range.bytes.as_usize(), stream.raw())) })
}

/// Checks that a range may be discarded. A real device leaves the bytes as they are.
pub fn discard(context: &Context, range: AddrRange) -> Result<()> {
    context.check_alive()?;
    context.live().check("discard", range, Access::Write)
}

/// Refuses an operation by its name: the kernels come with a later version.
pub fn launch(context: &Context, op: &Op) -> Result<()> {
    op.check()?;
    context.check_alive()?;
    Err(BackendError::Unsupported { backend: BACKEND, what: format!("the operation {}, whose kernel comes in a later version", op.name()) })
}
