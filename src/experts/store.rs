//! Every routed expert in host memory, where the model file is mapped.
//!
//! The map is registered with the device in place, so nothing is copied at start. A file that may be pinned as a whole is one region.
//! Where `--pin-mib`, the machine's RAM or the system's refusal forbids that, it is registered in slices cut between tensors: as many as
//! may be are pinned, those with experts first, and the rest stays pageable. A device that cannot read pageable memory refuses that.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

use super::transfer::MatrixRun;
use crate::backend::op::ExpertAddrs;
use crate::backend::{Addr, Backend, BackendError, DeviceMemory, HostRegion};
use crate::gguf::{FileMap, GgufFile};
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

/// Largest slice of a file, unless one tensor is larger, and its share of the file.
const SLICE_BYTES_MAX: u64 = 256 << 20;
const SLICE_SHARE: u64 = 16;

/// Host memory of one model, readable by the device.
pub struct ExpertStore<B: Backend> {
    files: Vec<Vec<Slice<B>>>,
    experts: Vec<[Origin; 3]>,
    n_expert: u32,
    pinned: Bytes,
    pageable: Bytes,
}

/// A registered part of a file.
struct Slice<B: Backend> {
    /// First byte in the file.
    offset: Bytes,
    memory: B::Registered,
}

/// A part of a file's map.
struct MapPart {
    map: FileMap,
    range: Range<usize>,
}

impl AsRef<[u8]> for MapPart {
    fn as_ref(&self) -> &[u8] {
        &self.map.as_slice()[self.range.clone()]
    }
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
    /// Registers the files of a model, pinned up to `pin_budget` as far as the system allows.
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
        let mut registrar = Registrar { backend, budget: pin_budget, pinned: Bytes::ZERO, pageable: Bytes::ZERO, refused: false };
        let maps = (0..file.paths().len()).filter_map(|index| file.file_map(index).map(|map| (index, map)));
        let files = maps.map(|(index, map)| registrar.file(index, map, weights)).collect::<Result<Vec<_>, _>>()?;
        let Registrar { pinned, pageable, .. } = registrar;
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
        let slices = &self.files[file_index];
        let slice = &slices[slices.partition_point(|slice| slice.offset <= offset) - 1];
        slice.memory.range().start.offset(offset - slice.offset)
    }
}

/// Registers files, pinned as far as that goes.
struct Registrar<'a, B: Backend> {
    backend: &'a B,
    budget: Option<Bytes>,
    pinned: Bytes,
    pageable: Bytes,
    /// The system pins no more.
    refused: bool,
}

impl<B: Backend> Registrar<'_, B> {
    fn file(&mut self, index: usize, map: &FileMap, weights: &ModelWeights) -> Result<Vec<Slice<B>>, StoreError> {
        let whole = 0..map.as_slice().len();
        if let Some(memory) = self.pin(map, &whole)? {
            return Ok(vec![Slice { offset: Bytes::ZERO, memory }]);
        }
        // What was refused as a whole may be had in part.
        self.refused = false;
        let mut ranges = slices_of(index, map.bytes(), weights);
        ranges.sort_by_key(|(range, crosses)| (!crosses, range.start));
        let mut slices = Vec::new();
        for (range, _) in ranges {
            let offset = Bytes::from(range.start);
            let memory = match self.pin(map, &range)? {
                Some(memory) => memory,
                None => self.leave_pageable(map, range)?,
            };
            slices.push(Slice { offset, memory });
        }
        slices.sort_by_key(|slice| slice.offset);
        Ok(slices)
    }

    /// Registers a part page-locked; `None` where the budget or the system does not allow it.
    fn pin(&mut self, map: &FileMap, range: &Range<usize>) -> Result<Option<B::Registered>, StoreError> {
        let bytes = Bytes::from(range.len());
        if self.refused || self.budget.is_some_and(|most| self.pinned + bytes > most) {
            return Ok(None);
        }
        match self.backend.register(HostRegion::ReadOnlyFile(part(map, range.clone()))) {
            Ok(memory) => {
                self.pinned += bytes;
                Ok(Some(memory))
            }
            Err(BackendError::OutOfMemory { .. }) => {
                self.refused = true;
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn leave_pageable(&mut self, map: &FileMap, range: Range<usize>) -> Result<B::Registered, StoreError> {
        let capabilities = self.backend.capabilities();
        self.pageable += Bytes::from(range.len());
        if !capabilities.reads_pageable_memory {
            return Err(StoreError::Unpinned { pageable: self.pageable, pinned: self.pinned, backend: capabilities.backend });
        }
        Ok(self.backend.register(HostRegion::Pageable(part(map, range)))?)
    }
}

fn part(map: &FileMap, range: Range<usize>) -> Arc<dyn AsRef<[u8]> + Send + Sync> {
    Arc::new(MapPart { map: map.clone(), range })
}

/// Cuts a file of `bytes` between tensors. The second value says whether a slice holds what crosses the link again and again: experts,
/// or the head.
fn slices_of(file_index: usize, bytes: u64, weights: &ModelWeights) -> Vec<(Range<usize>, bool)> {
    let dense = weights.dense.iter().map(|dense| &dense.tensor).chain([&weights.token_embd]);
    let dense = dense.filter(|tensor| tensor.file_index == file_index).map(|tensor| tensor.offset);
    let experts = weights.experts.iter().flat_map(|layer| layer.parts());
    let experts = experts.filter(|part| part.file_index == file_index).map(|part| part.offset);
    let head = Some(weights.head.offset).filter(|_| weights.head.file_index == file_index);
    let crossing: BTreeSet<u64> = experts.chain(head).collect();
    let borders: BTreeSet<u64> = dense.chain(crossing.iter().copied()).chain([bytes]).collect();
    let most = SLICE_BYTES_MAX.min(bytes / SLICE_SHARE);
    let mut slices = Vec::new();
    let (mut start, mut last) = (0, 0);
    for border in borders {
        // The tensor that ends at `border` joins the slice, or the slice ends before it.
        if border - start > most && last > start {
            slices.push(start..last);
            start = last;
        }
        last = border;
    }
    slices.push(start..last);
    let range = |slice: Range<u64>| Bytes(slice.start).as_usize()..Bytes(slice.end).as_usize();
    slices.into_iter().map(|slice| (range(slice.clone()), crossing.range(slice).next().is_some())).collect()
}
