//! The `cuda` backend: the trait over one device of NVIDIA's driver.

use std::rc::Rc;

use cudarc::driver::sys::CUdevice_attribute;

use super::choice::DeviceChoice;
use super::context::Context;
use super::driver::{self, DriverError, DriverUnavailable, ListedDevice};
use super::graph::{CudaEvent, CudaGraph, CudaStream};
use super::kernels::Kernels;
use super::memory::{self, CudaBuffer, CudaPinned, CudaRegistered};
use super::os_budget::os_budget;
use super::scratch::Scratch;
use super::virtual_memory::{self, CudaReserved};
use super::{BACKEND, GRAPH_NODE_BYTES, launch};
use crate::backend::{AddrRange, Backend, BackendError, Capabilities, Copy, HostRegion, MemoryInfo, Op, Result};
use crate::units::Bytes;

/// One device of the driver's, used from the thread that opened it.
pub struct CudaBackend {
    // Unloaded before the context goes.
    kernels: Kernels,
    scratch: Scratch,
    context: Rc<Context>,
    capabilities: Capabilities,
}

/// Most that a context and its kernels are believed to take; what is used beyond it when a device is opened is others'. 520 MiB were
/// measured on an H200 with driver 580.
const CONTEXT_BYTES_MAX: Bytes = Bytes::mib(640);
/// Weights of a prompt that are unpacked at a time at most: they stay in the cache of a large card while they are multiplied.
const UNPACKED_MAX: Bytes = Bytes::mib(48);
/// Partial results of a window's attention, for 32 heads of 128 numbers and 131,072 tokens.
const SCRATCH_BYTES: Bytes = Bytes::mib(17);
/// What the driver takes to round allocations up and to keep graphs: on an H200 models of real shape came to stand 11 and 17 MiB above
/// their plans without it.
const ROUNDING_BYTES: Bytes = Bytes::mib(20);

/// Local memory of all threads that the device can hold at once: the driver takes it when a kernel that uses any first runs.
fn local_memory(device: &ListedDevice, kernels: &Kernels) -> std::result::Result<Bytes, DriverError> {
    let number = |attribute| driver::attribute(device.handle, attribute).map(|value| u64::try_from(value).unwrap_or(0));
    let processors = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let threads = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    Ok(Bytes(processors * threads * kernels.local_bytes_max()?))
}

/// What the driver says of a device whose context is current and holds `used` bytes, with those of others.
fn capabilities(device: &ListedDevice, kernels: &Kernels, used: Bytes) -> std::result::Result<Capabilities, DriverError> {
    let engines = driver::attribute(device.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?;
    let pageable = driver::attribute(device.handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)?;
    let backing_unit = virtual_memory::backing_unit(device.handle);
    Ok(Capabilities {
        backend: BACKEND,
        device: device.name.clone(),
        virtual_memory: backing_unit.is_some(),
        backing_unit: backing_unit.unwrap_or(Bytes(1)),
        borrow_spill: true,
        halves_max: Some(UNPACKED_MAX),
        graph_capture: true,
        os_budget: os_budget(device.handle).is_some(),
        integrated: device.integrated,
        reads_pageable_memory: pageable != 0,
        max_allocation_bytes: Bytes::from(driver::total_memory(device.handle)?),
        copy_engines: u32::try_from(engines).unwrap_or(0),
        graph_node_bytes: GRAPH_NODE_BYTES,
        context_bytes: used.min(CONTEXT_BYTES_MAX),
        context_growth_bytes: local_memory(device, kernels)? + SCRATCH_BYTES + ROUNDING_BYTES,
    })
}

impl CudaBackend {
    /// Opens a device: loads and starts the driver and takes the device's primary context, which other users of the device in this
    /// process share.
    ///
    /// # Errors
    /// [`BackendError::Open`] where there is no driver, it is too old or does not start, no device or more than one is meant, or the
    /// program has no kernels for it.
    pub fn open(choice: &DeviceChoice) -> Result<Self> {
        let refused = |reason| BackendError::Open { backend: BACKEND, reason };
        driver::start().map_err(|error| refused(error.to_string()))?;
        let devices = driver::devices().map_err(|error| refused(DriverUnavailable::from(error).to_string()))?;
        let device = choice.among(&devices).map_err(refused)?;
        let of_device = |error: DriverError| refused(format!("{}: {error}", device.name));
        let context = Context::retain(device.handle).map_err(of_device)?;
        let context = Rc::new(context);
        let kernels = Kernels::load(&context).map_err(|reason| refused(format!("{}: {reason}", device.name)))?;
        let scratch = Scratch::new(&context);
        // A driver that does not say now may say later.
        let used = memory::memory_info(&context).ok().and_then(|info| Some(info.total.saturating_sub(info.free?)));
        let used = used.unwrap_or(CONTEXT_BYTES_MAX);
        let capabilities = capabilities(device, &kernels, used).map_err(of_device)?;
        Ok(Self { kernels, scratch, context, capabilities })
    }

    /// Things that the driver did not take back so far, which a healthy device never does.
    #[must_use]
    pub fn failed_frees(&self) -> u64 {
        self.context.failed_frees()
    }
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Reserved = CudaReserved;
    type Pinned = CudaPinned;
    type Registered = CudaRegistered;
    type Stream = CudaStream;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        memory::memory_info(&self.context)
    }

    fn malloc(&self, bytes: Bytes, purpose: &str) -> Result<CudaBuffer> {
        CudaBuffer::new(&self.context, bytes, purpose)
    }

    fn reserve(&self, bytes: Bytes) -> Result<CudaReserved> {
        CudaReserved::new(&self.context, bytes)
    }

    fn back(&self, reserved: &CudaReserved, part: AddrRange, purpose: &str) -> Result<CudaBuffer> {
        reserved.back(part, purpose)
    }

    fn alloc_pinned(&self, bytes: Bytes, purpose: &str) -> Result<CudaPinned> {
        CudaPinned::new(&self.context, bytes, purpose)
    }

    fn register(&self, region: HostRegion) -> Result<CudaRegistered> {
        CudaRegistered::new(&self.context, region, self.capabilities.reads_pageable_memory)
    }

    fn create_stream(&self) -> Result<CudaStream> {
        CudaStream::new(&self.context)
    }

    fn create_event(&self) -> Result<CudaEvent> {
        CudaEvent::new(&self.context)
    }

    fn record(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        event.record(stream)
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        event.hold(stream)
    }

    fn is_done(&self, event: &CudaEvent) -> Result<bool> {
        event.is_done()
    }

    fn synchronise_event(&self, event: &CudaEvent) -> Result<()> {
        event.synchronise()
    }

    fn elapsed_s(&self, start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
        start.seconds_until(end)
    }

    fn synchronise(&self, stream: &CudaStream) -> Result<()> {
        stream.synchronise()
    }

    fn copy(&self, stream: &CudaStream, copy: Copy) -> Result<()> {
        launch::copy(&self.context, stream, copy)
    }

    fn fill(&self, stream: &CudaStream, range: AddrRange, byte: u8) -> Result<()> {
        launch::fill(&self.context, stream, range, byte)
    }

    fn discard(&self, _stream: &CudaStream, range: AddrRange) -> Result<()> {
        launch::discard(&self.context, range)
    }

    fn launch(&self, stream: &CudaStream, op: &Op) -> Result<()> {
        launch::launch(&self.context, &self.kernels, &self.scratch, stream, op)
    }

    fn begin_capture(&self, stream: &CudaStream) -> Result<()> {
        stream.begin_capture()
    }

    fn end_capture(&self, stream: &CudaStream) -> Result<CudaGraph> {
        stream.end_capture()
    }

    fn replay(&self, stream: &CudaStream, graph: &CudaGraph) -> Result<()> {
        graph.replay(stream)
    }

    fn graph_bytes(&self, graph: &CudaGraph) -> Bytes {
        graph.bytes()
    }
}
