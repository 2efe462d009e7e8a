//! Copies of experts from host memory to the device, and the device's table of where each expert is.

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

/// The device's table of expert addresses, with its pinned original.
///
/// Changes are made in the original and reach the device with the next upload, in stream order.
pub struct ExpertTable<B: Backend> {
    backend: Rc<B>,
    original: B::Pinned,
    device: AddrRange,
    n_expert: u32,
    uploaded: B::Event,
}

impl<B: Backend> ExpertTable<B> {
    /// A table at `device`, zeroed and not yet uploaded.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, device: AddrRange, n_layer: u32, n_expert: u32) -> Result<Self> {
        let bytes = Bytes::from((n_layer * n_expert) as usize * ExpertAddrs::BYTES);
        assert_eq!(bytes, device.bytes, "the table has a record for each expert");
        let original = backend.alloc_pinned(bytes, "expert table")?;
        let uploaded = backend.create_event()?;
        Ok(Self { backend, original, device, n_expert, uploaded })
    }

    /// Changes one record of the original.
    pub fn set(&mut self, expert: ExpertId, addrs: ExpertAddrs) {
        let record = (expert.layer * self.n_expert + expert.expert) as usize;
        self.original.write(record * ExpertAddrs::BYTES, &addrs.to_bytes());
    }

    /// Uploads the table in stream order and waits for it: the original may change again at once.
    ///
    /// # Errors
    /// The backend's.
    pub fn upload(&mut self, stream: &B::Stream) -> Result<()> {
        let copy =
            Copy { dst: self.device.start, src: self.original.range().start, bytes: self.device.bytes, direction: Direction::ToDevice };
        self.backend.copy(stream, copy)?;
        self.backend.record(stream, &self.uploaded)?;
        self.backend.synchronise_event(&self.uploaded)
    }
}
