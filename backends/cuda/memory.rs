//! Memory: the device's own, page-locked host memory, and host memory registered in place.
//!
//! Each owned type enters its range in the books of live memory when it is made, and strikes it out and gives the memory back when it
//! is dropped.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use super::BACKEND;
use super::context::{Context, Spent};
use super::driver::{DriverError, attribute, call};
use super::live::Access;
use super::mapping::{Mapping, mapping_of};
use super::os_budget::os_budget;
use super::virtual_memory::Mapped;
use crate::backend::{Addr, AddrRange, BackendError, DeviceMemory, HostRegion, MemoryInfo, PinnedMemory, Pool, Result};
use crate::units::Bytes;

/// Host memory that is lent to the device.
pub type HostOwner = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Free and total device memory, as the driver counts them. The driver's interface keeps no error of an earlier call that would have to
/// be cleared first: an error is either this call's own or has lost the device.
pub fn memory_info(context: &Context) -> Result<MemoryInfo> {
    context.enter()?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: the context is current; both are places for one number.
    context.told(unsafe { call!(cuMemGetInfo_v2(&raw mut free, &raw mut total)) })?;
    Ok(MemoryInfo { free: Some(Bytes::from(free)), total: Bytes::from(total), os_budget: os_budget(context.device()) })
}

/// The answer to a request for memory; where there is none, the error tells how much is free, or 0 where the driver does not say.
pub(super) fn allocated(
    context: &Context,
    pool: Pool,
    requested: Bytes,
    purpose: &str,
    answer: std::result::Result<(), DriverError>,
) -> Result<()> {
    match answer {
        Err(DriverError { code: CUresult::CUDA_ERROR_OUT_OF_MEMORY, .. }) => Err(out_of_memory(context, pool, requested, purpose)),
        answer => context.told(answer),
    }
}

/// The error for memory that is not there.
pub fn out_of_memory(context: &Context, pool: Pool, requested: Bytes, purpose: &str) -> BackendError {
    let free = match pool {
        Pool::Device => memory_info(context).ok().and_then(|info| info.free.map(|free| free.min(info.total))),
        Pool::PinnedHost => None,
    };
    BackendError::OutOfMemory { pool, purpose: purpose.to_owned(), requested, free: free.unwrap_or(Bytes::ZERO) }
}

/// Owned device memory.
pub struct CudaBuffer {
    context: Rc<Context>,
    range: AddrRange,
    /// What lies behind reserved addresses; `None` for an allocation with addresses of its own, and once it is given back.
    mapped: Option<Mapped>,
}

impl CudaBuffer {
    /// Allocates; see [`Backend::malloc`](crate::backend::Backend::malloc). The driver aligns to 256 bytes and more.
    pub fn new(context: &Rc<Context>, bytes: Bytes, purpose: &str) -> Result<Self> {
        context.enter()?;
        context.refuse_while_recording("malloc")?;
        Self::beside_a_capture(context, bytes, purpose)
    }

    /// As [`CudaBuffer::new`], and also while a capture records, which it is no part of.
    pub fn beside_a_capture(context: &Rc<Context>, bytes: Bytes, purpose: &str) -> Result<Self> {
        let mut address = 0;
        // No bytes at all would be refused; the range says none all the same.
        // SAFETY: the context is current; `address` is a place for one address.
        let answer = context.beside_a_capture(|| unsafe { call!(cuMemAlloc_v2(&raw mut address, bytes.as_usize().max(1))) });
        allocated(context, Pool::Device, bytes, purpose, answer)?;
        let range = AddrRange { start: Addr(address), bytes };
        context.live().enter(range, Access::Write);
        Ok(Self { context: Rc::clone(context), range, mapped: None })
    }

    /// Memory that was put behind reserved addresses.
    pub(super) fn behind(context: &Rc<Context>, range: AddrRange, mapped: Mapped) -> Self {
        context.live().enter(range, Access::Write);
        Self { context: Rc::clone(context), range, mapped: Some(mapped) }
    }
}

impl DeviceMemory for CudaBuffer {
    fn range(&self) -> AddrRange {
        self.range
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.context.live().strike(self.range);
        self.context.give_back(self.mapped.take().map_or(Spent::Device(self.range.start.0), Spent::Mapped));
    }
}

/// The address under which the device sees page-locked memory at `pointer`.
fn device_address(context: &Context, pointer: *mut c_void) -> Result<Addr> {
    let mut address = 0;
    // SAFETY: the context is current; `address` is a place for one address; a pointer that is not page-locked is an error.
    context.told(unsafe { call!(cuMemHostGetDevicePointer_v2(&raw mut address, pointer, 0)) })?;
    Ok(Addr(address))
}

/// Owned page-locked host memory.
pub struct CudaPinned {
    context: Rc<Context>,
    data: NonNull<u8>,
    range: AddrRange,
}

impl CudaPinned {
    /// Allocates and zeroes; see [`Backend::alloc_pinned`](crate::backend::Backend::alloc_pinned).
    pub fn new(context: &Rc<Context>, bytes: Bytes, purpose: &str) -> Result<Self> {
        context.enter()?;
        context.refuse_while_recording("alloc_pinned")?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut pointer = ptr::null_mut();
        // SAFETY: the context is current; `pointer` is a place for one pointer.
        let answer = unsafe { call!(cuMemHostAlloc(&raw mut pointer, bytes.as_usize().max(1), flags)) };
        allocated(context, Pool::PinnedHost, bytes, purpose, answer)?;
        let Some(data) = NonNull::new(pointer.cast::<u8>()) else {
            return Err(BackendError::Driver { call: "cuMemHostAlloc", answer: "success without an address".to_owned() });
        };
        // SAFETY: the driver gave this many writable bytes, which nothing else knows of yet.
        unsafe { data.write_bytes(0, bytes.as_usize()) };
        let start = device_address(context, pointer).inspect_err(|_| context.give_back(Spent::Pinned(pointer)))?;
        let range = AddrRange { start, bytes };
        context.live().enter(range, Access::Write);
        Ok(Self { context: Rc::clone(context), data, range })
    }

    /// The first of `bytes` bytes from `offset` on, which must lie inside.
    fn part(&self, offset: usize, bytes: usize) -> *mut u8 {
        let inside = offset.checked_add(bytes).is_some_and(|end| Bytes::from(end) <= self.range.bytes);
        assert!(inside, "{bytes} bytes at {offset} leave a buffer of {}", self.range.bytes);
        // SAFETY: the offset lies inside the allocation, or at its end for no bytes.
        unsafe { self.data.as_ptr().add(offset) }
    }
}

impl DeviceMemory for CudaPinned {
    fn range(&self) -> AddrRange {
        self.range
    }
}

impl PinnedMemory for CudaPinned {
    fn read(&self, offset: usize, bytes: &mut [u8]) {
        let data = self.part(offset, bytes.len());
        // SAFETY: `part` checked the range, which is this value's own and no part of `bytes`; the device's writes are done, as the
        // caller has synchronised them.
        unsafe { ptr::copy_nonoverlapping(data, bytes.as_mut_ptr(), bytes.len()) };
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let data = self.part(offset, bytes.len());
        // SAFETY: as in `read`; the value is not `Sync`, so no other thread writes.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), data, bytes.len()) };
    }
}

impl Drop for CudaPinned {
    fn drop(&mut self) {
        self.context.live().strike(self.range);
        self.context.give_back(Spent::Pinned(self.data.as_ptr().cast()));
    }
}

/// How registered memory is reached.
enum Backing {
    /// Page-locked where it lies.
    Locked(*mut c_void, HostOwner),
    /// Read by the device as any processor would; the owner keeps it alive.
    Pageable { _owner: HostOwner },
    /// Could not be locked where it lies.
    Copied { _pinned: CudaPinned },
    /// Given back.
    Gone,
}

/// Host memory that the device reads.
pub struct CudaRegistered {
    context: Rc<Context>,
    range: AddrRange,
    backing: Backing,
}

impl CudaRegistered {
    /// Registers; see [`Backend::register`](crate::backend::Backend::register).
    pub fn new(context: &Rc<Context>, region: HostRegion, reads_pageable: bool) -> Result<Self> {
        context.enter()?;
        context.refuse_while_recording("register")?;
        match region {
            HostRegion::Pageable(_) if !reads_pageable => Err(unsupported("host memory that is not page-locked")),
            HostRegion::Pageable(owner) => {
                let (pointer, bytes) = place(&owner);
                let range = AddrRange { start: Addr(pointer.addr() as u64), bytes };
                Ok(Self::entered(context, range, Backing::Pageable { _owner: owner }))
            }
            HostRegion::ReadOnlyFile(owner) => Self::file(context, owner),
        }
    }

    fn file(context: &Rc<Context>, owner: HostOwner) -> Result<Self> {
        let (pointer, bytes) = place(&owner);
        // A private map must never reach the driver, see `mapping`; what is that is small: the model that is part of the program.
        if bytes == Bytes::ZERO || mapping_of(pointer.addr(), bytes.as_usize()) == Mapping::Private {
            let pinned = CudaPinned::new(context, bytes, "a copy of the model file")?;
            pinned.write(0, &(*owner).as_ref()[..bytes.as_usize()]);
            let range = pinned.range();
            return Ok(Self { context: Rc::clone(context), range, backing: Backing::Copied { _pinned: pinned } });
        }
        if !attribute(context.device(), CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED).is_ok_and(|yes| yes != 0)
        {
            return Err(unsupported("page-locking a read-only file map"));
        }
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the context is current; the owner keeps the range mapped until it is unregistered; the device only reads it.
        let answer = unsafe { call!(cuMemHostRegister_v2(pointer, bytes.as_usize(), flags)) };
        allocated(context, Pool::PinnedHost, bytes, "registering the model file", answer)?;
        let locked = Backing::Locked(pointer, owner);
        let start = device_address(context, pointer).inspect_err(|_| {
            // SAFETY: registered just now, and nothing was queued since.
            let _ = unsafe { sys::cuMemHostUnregister(pointer) };
        })?;
        Ok(Self::entered(context, AddrRange { start, bytes }, locked))
    }

    fn entered(context: &Rc<Context>, range: AddrRange, backing: Backing) -> Self {
        context.live().enter(range, Access::Read);
        Self { context: Rc::clone(context), range, backing }
    }
}

/// Where host memory lies, asked once: `as_ref` might answer another slice the next time.
fn place(owner: &HostOwner) -> (*mut c_void, Bytes) {
    let slice = (**owner).as_ref();
    (slice.as_ptr().cast_mut().cast(), Bytes::from(slice.len()))
}

fn unsupported(what: &str) -> BackendError {
    BackendError::Unsupported { backend: BACKEND, what: what.to_owned() }
}

impl DeviceMemory for CudaRegistered {
    fn range(&self) -> AddrRange {
        self.range
    }
}

impl Drop for CudaRegistered {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.backing, Backing::Gone) {
            Backing::Locked(pointer, owner) => {
                self.context.live().strike(self.range);
                self.context.give_back(Spent::Registered(pointer, owner));
            }
            Backing::Pageable { _owner } => {
                self.context.live().strike(self.range);
                self.context.give_back(Spent::Pageable(_owner));
            }
            // The copy gives itself back.
            Backing::Copied { .. } | Backing::Gone => {}
        }
    }
}
