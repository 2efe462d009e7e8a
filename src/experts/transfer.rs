//! Copies of experts from host memory to the device, and the device's table of where each expert is.

use std::ops::Range;
use std::rc::Rc;

use crate::backend::op::ExpertAddrs;
use crate::backend::{Addr, AddrRange, Backend, Copy, DeviceMemory, Direction, PinnedMemory, Result};
use crate::model::weights::LayerExperts;
use crate::units::{Bytes, ExpertId};

/// How the three matrices of a layer's experts lie in a slot: gate, up, down, each aligned.
#[derive(Clone, Copy, Debug)]
pub struct SlotLayout {
    offsets: [Bytes; 3],
    bytes: [Bytes; 3],
}

impl SlotLayout {
    /// The layout of a layer's experts.
    #[must_use]
    pub fn of(layer: &LayerExperts) -> Self {
        Self { offsets: layer.slot_offsets(), bytes: layer.parts().map(|part| part.expert_bytes) }
    }

    /// Addresses of the matrices in a slot that starts at `start`.
    #[must_use]
    pub fn addrs(&self, start: Addr) -> ExpertAddrs {
        let [gate, up, down] = self.offsets.map(|offset| start.offset(offset));
        ExpertAddrs { gate, up, down }
    }

    /// Bytes of gate, up and down.
    #[must_use]
    pub fn matrix_bytes(&self) -> [Bytes; 3] {
        self.bytes
    }

    /// Queues the copies of an expert at `source` into `place`.
    ///
    /// # Errors
    /// The backend's.
    pub fn copy<B: Backend>(&self, backend: &B, stream: &B::Stream, source: ExpertAddrs, place: AddrRange) -> Result<ExpertAddrs> {
        let target = self.addrs(place.start);
        let pairs = [(target.gate, source.gate), (target.up, source.up), (target.down, source.down)];
        for ((dst, src), bytes) in pairs.into_iter().zip(self.bytes) {
            debug_assert!(dst.offset(bytes) <= place.end(), "an expert leaves its slot");
            backend.copy(stream, Copy { dst, src, bytes, direction: Direction::ToDevice })?;
        }
        Ok(target)
    }
}

/// One kind of matrix of neighbouring experts in host memory.
#[derive(Clone, Copy, Debug)]
pub struct MatrixRun {
    /// The first matrix.
    pub start: Addr,
    /// From one matrix to the next; at least `matrix_bytes`.
    pub stride: Bytes,
    /// Bytes of a matrix.
    pub matrix_bytes: Bytes,
    /// Matrices.
    pub count: u32,
}

/// Queues the copies of gates, ups and downs to `target`, without gaps; a run without gaps in host memory crosses in one piece.
///
/// # Errors
/// The backend's.
pub fn copy_run<B: Backend>(backend: &B, stream: &B::Stream, runs: &[MatrixRun; 3], target: ExpertAddrs) -> Result<()> {
    for (run, dst) in runs.iter().zip([target.gate, target.up, target.down]) {
        let (pieces, bytes) = match run.stride == run.matrix_bytes {
            true => (1, run.matrix_bytes * u64::from(run.count)),
            false => (u64::from(run.count), run.matrix_bytes),
        };
        for piece in 0..pieces {
            let (dst, src) = (dst.offset(bytes * piece), run.start.offset(run.stride * piece));
            backend.copy(stream, Copy { dst, src, bytes, direction: Direction::ToDevice })?;
        }
    }
    Ok(())
}

/// The device's table of expert addresses.
///
/// Changes are made in host memory. An upload takes the records from the first changed one to the last through one of two pinned copies,
/// in stream order, and waits for nothing but the upload before the last one.
pub struct ExpertTable<B: Backend> {
    backend: Rc<B>,
    /// `[n_layer, n_expert]` records as they should be on the device.
    records: Vec<u8>,
    device: AddrRange,
    n_expert: u32,
    /// Records that the device does not know.
    changed: Range<usize>,
    staging: [Staging<B>; 2],
    /// The copy that the next upload uses.
    next: usize,
}

/// A pinned copy of the table, a part of which may be on its way.
struct Staging<B: Backend> {
    pinned: B::Pinned,
    left: B::Event,
}

impl<B: Backend> ExpertTable<B> {
    /// A table at `device`, zeroed and not yet uploaded.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, device: AddrRange, n_layer: u32, n_expert: u32) -> Result<Self> {
        let n_records = (n_layer * n_expert) as usize;
        let bytes = Bytes::from(n_records * ExpertAddrs::BYTES);
        assert_eq!(bytes, device.bytes, "the table has a record for each expert");
        let staging = || -> Result<Staging<B>> {
            Ok(Staging { pinned: backend.alloc_pinned(bytes, "expert table")?, left: backend.create_event()? })
        };
        let staging = [staging()?, staging()?];
        let records = vec![0; n_records * ExpertAddrs::BYTES];
        Ok(Self { backend, records, device, n_expert, changed: 0..n_records, staging, next: 0 })
    }

    /// Changes one record; the next upload tells the device.
    pub fn set(&mut self, expert: ExpertId, addrs: ExpertAddrs) {
        let record = (expert.layer * self.n_expert + expert.expert) as usize;
        let at = record * ExpertAddrs::BYTES;
        self.records[at..at + ExpertAddrs::BYTES].copy_from_slice(&addrs.to_bytes());
        self.changed = match self.changed.is_empty() {
            true => record..record + 1,
            false => self.changed.start.min(record)..self.changed.end.max(record + 1),
        };
    }

    /// Queues the upload of what has changed. Work that is queued on `stream` before sees the old table, later work the new one.
    ///
    /// # Errors
    /// The backend's; the changes then still wait for an upload.
    pub fn upload(&mut self, stream: &B::Stream) -> Result<()> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let Staging { pinned, left } = &self.staging[self.next];
        self.backend.synchronise_event(left)?;
        let span = self.changed.start * ExpertAddrs::BYTES..self.changed.end * ExpertAddrs::BYTES;
        let (offset, bytes) = (Bytes::from(span.start), Bytes::from(span.len()));
        pinned.write(span.start, &self.records[span]);
        let (dst, src) = (self.device.start.offset(offset), pinned.range().start.offset(offset));
        self.backend.copy(stream, Copy { dst, src, bytes, direction: Direction::ToDevice })?;
        self.backend.record(stream, left)?;
        self.next = 1 - self.next;
        self.changed = 0..0;
        Ok(())
    }
}

impl<B: Backend> Drop for ExpertTable<B> {
    fn drop(&mut self) {
        // A copy on its way reads memory that goes with the table. A device that fails has none on its way.
        for Staging { left, .. } in &self.staging {
            let _ = self.backend.synchronise_event(left);
        }
    }
}
