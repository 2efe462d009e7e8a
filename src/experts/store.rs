//! Every routed expert in host memory, where the model file is mapped.
//!
//! The map is registered with the device in place, file by file, so nothing is copied at start. With `--pin-mib` files beyond the
//! budget stay pageable; a device that cannot read pageable memory refuses that.

use std::sync::Arc;

use thiserror::Error;

use super::transfer::MatrixRun;
use crate::backend::op::ExpertAddrs;
use crate::backend::{Addr, Backend, BackendError, DeviceMemory, HostRegion};
use crate::gguf::GgufFile;
use crate::model::{ModelShape, ModelWeights};
use crate::units::{Bytes, ExpertId};

/// Why the experts cannot be reached by the device.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The backend refused.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Memory beyond the pin budget cannot be read by this device.
    #[error(
        "{pageable} of the model are beyond the {pinned} that may be pinned, and the {backend} device reads pinned memory only: raise --pin-mib"
    )]
    Unpinned {
        /// Bytes that would stay pageable.
        pageable: Bytes,
        /// Bytes pinned.
        pinned: Bytes,
        /// Name of the backend.
        backend: &'static str,
    },
}

/// Host memory of one model, readable by the device.
pub struct ExpertStore<B: Backend> {
    files: Vec<B::Registered>,
    experts: Vec<[Origin; 3]>,
    n_expert: u32,
    pinned: Bytes,
    pageable: Bytes,
}

/// Where one matrix of expert 0 of a layer lies, and how far the next is.
#[derive(Clone, Copy)]
struct Origin {
    file_index: usize,
    offset: Bytes,
    stride: Bytes,
    expert_bytes: Bytes,
}

impl<B: Backend> ExpertStore<B> {
    /// Registers the files of a model, pinned up to `pin_budget`.
    ///
    /// # Errors
    /// [`StoreError`] where the device cannot read what is not pinned, or the backend fails otherwise.
    pub fn register(
        backend: &B,
        file: &GgufFile,
        shape: &ModelShape,
        weights: &ModelWeights,
        pin_budget: Option<Bytes>,
    ) -> Result<Self, StoreError> {
        let (mut pinned, mut pageable) = (Bytes::ZERO, Bytes::ZERO);
        let mut files = Vec::new();
        for map in (0..file.paths().len()).filter_map(|index| file.file_map(index)) {
            let bytes = Bytes(map.bytes());
            let memory: Arc<dyn AsRef<[u8]> + Send + Sync> = Arc::new(map.clone());
            let may_pin = pin_budget.is_none_or(|budget| pinned + bytes <= budget);
            let registered = if may_pin { backend.register(HostRegion::ReadOnlyFile(Arc::clone(&memory))) } else { Err(no_pin(bytes)) };
            match registered {
                Ok(region) => {
                    pinned += bytes;
                    files.push(region);
                }
                // A refusal to page-lock is no reason to stop where the device can read pageable memory.
                Err(BackendError::OutOfMemory { .. }) if backend.capabilities().reads_pageable_memory => {
                    pageable += bytes;
                    files.push(backend.register(HostRegion::Pageable(memory))?);
                }
                Err(BackendError::OutOfMemory { .. }) => {
                    return Err(StoreError::Unpinned { pageable: bytes, pinned, backend: backend.capabilities().backend });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let origin = |part: &crate::model::weights::ExpertTensor| Origin {
            file_index: part.file_index,
            offset: Bytes(part.offset),
            stride: part.stride,
            expert_bytes: part.expert_bytes,
        };
        let experts = weights.experts.iter().map(|layer| layer.parts().map(origin)).collect();
        Ok(Self { files, experts, n_expert: shape.n_expert, pinned, pageable })
    }

    /// Bytes page-locked and bytes left pageable.
    #[must_use]
    pub fn pinned_and_pageable(&self) -> (Bytes, Bytes) {
        (self.pinned, self.pageable)
    }

    /// Experts of a layer.
    #[must_use]
    pub fn n_expert(&self) -> u32 {
        self.n_expert
    }

    /// All experts, layer by layer.
    pub fn all(&self) -> impl Iterator<Item = ExpertId> + use<B> {
        let n_layer = u32::try_from(self.experts.len()).expect("checked by the model's shape");
        let n_expert = self.n_expert;
        (0..n_layer).flat_map(move |layer| (0..n_expert).map(move |expert| ExpertId { layer, expert }))
    }

    /// Where an expert's matrices lie in host memory, as the device sees it.
    #[must_use]
    pub fn addrs(&self, expert: ExpertId) -> ExpertAddrs {
        let [gate, up, down] = self.experts[expert.layer as usize]
            .map(|origin| self.file_addr(origin.file_index, origin.offset + origin.stride * u64::from(expert.expert)));
        ExpertAddrs { gate, up, down }
    }

    /// Gates, ups and downs of `count` experts from `first` on.
    #[must_use]
    pub fn runs(&self, first: ExpertId, count: u32) -> [MatrixRun; 3] {
        self.experts[first.layer as usize].map(|origin| MatrixRun {
            start: self.file_addr(origin.file_index, origin.offset + origin.stride * u64::from(first.expert)),
            stride: origin.stride,
            matrix_bytes: origin.expert_bytes,
            count,
        })
    }

    /// Bytes of an expert's three matrices.
    #[must_use]
    pub fn bytes(&self, expert: ExpertId) -> Bytes {
        self.experts[expert.layer as usize].iter().map(|origin| origin.expert_bytes).sum()
    }

    /// Where a byte of a model file lies, as the device sees it.
    #[must_use]
    pub fn file_addr(&self, file_index: usize, offset: Bytes) -> Addr {
        self.files[file_index].range().start.offset(offset)
    }
}

fn no_pin(requested: Bytes) -> BackendError {
    let purpose = "registering the model file".to_owned();
    BackendError::OutOfMemory { pool: crate::backend::Pool::PinnedHost, purpose, requested, free: Bytes::ZERO }
}
