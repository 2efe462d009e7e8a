//! What all handles of one device share: its primary context, whether it is lost, whether a capture records, and what lives where.
//!
//! Invariants: every call is made with the context current on the calling thread. Once the device is lost no call reaches the driver
//! again. While a capture records nothing is given back to the driver, which would take that for a reason to give the capture up.

use std::cell::{Cell, OnceCell, RefCell, RefMut};
use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUgraphExec, CUstream};

use super::driver::{DriverError, call};
use super::live::LiveRanges;
use super::memory::HostOwner;
use super::virtual_memory::Mapped;
use crate::backend::{BackendError, Result};

/// Something of the driver's that nobody uses any more.
pub enum Spent {
    /// Device memory.
    Device(CUdeviceptr),
    /// Device memory behind reserved addresses.
    Mapped(Mapped),
    /// Page-locked memory of the driver's.
    Pinned(*mut c_void),
    /// Page-locked memory of somebody else, who must outlive the lock.
    Registered(*mut c_void, HostOwner),
    /// Memory of somebody else that was never locked, and must outlive the work that reads it.
    Pageable(HostOwner),
    /// An executable graph.
    Graph(CUgraphExec),
}

/// The retained primary context of a device; released on drop.
pub struct Context {
    device: CUdevice,
    raw: CUcontext,
    lost: OnceCell<String>,
    recording: Cell<Option<CUstream>>,
    /// Given back when the capture ends.
    spent: RefCell<Vec<Spent>>,
    failed_frees: Cell<u64>,
    live: RefCell<LiveRanges>,
}

impl Context {
    /// Retains the primary context of `device`, a handle of the started driver, and makes it current. Threads that wait for the device
    /// sleep instead of spinning.
    ///
    /// # Errors
    /// The driver's.
    pub fn retain(device: CUdevice) -> std::result::Result<Self, DriverError> {
        // An old driver does not let flags be changed while somebody else uses the context. That costs processor time and nothing else.
        // SAFETY: the driver is started, for it gave the handle; the call takes numbers.
        let _ = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32) };
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for one handle.
        unsafe { call!(cuDevicePrimaryCtxRetain(&raw mut raw, device)) }?;
        let context = Self {
            device,
            raw,
            lost: OnceCell::new(),
            recording: Cell::new(None),
            spent: RefCell::default(),
            failed_frees: Cell::new(0),
            live: RefCell::default(),
        };
        context.make_current()?;
        Ok(context)
    }

    fn make_current(&self) -> std::result::Result<(), DriverError> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { call!(cuCtxSetCurrent(self.raw)) }
    }

    /// Opens every call of the backend: the device lives and its context is current.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], or the driver's.
    pub fn enter(&self) -> Result<()> {
        self.check_alive()?;
        self.told(self.make_current())
    }

    /// # Errors
    /// [`BackendError::DeviceLost`].
    pub fn check_alive(&self) -> Result<()> {
        match self.lost.get() {
            Some(reason) => Err(BackendError::DeviceLost { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// The driver's answer in the contract's words.
    ///
    /// # Errors
    /// [`BackendError::DeviceLost`], now and for all later calls, where the error is one that never goes away.
    pub fn told<T>(&self, answer: std::result::Result<T, DriverError>) -> Result<T> {
        answer.map_err(|error| self.in_words(error))
    }

    /// As [`Context::told`], for an error.
    pub fn in_words(&self, error: DriverError) -> BackendError {
        if error.loses_the_device() {
            let reason = self.lost.get_or_init(|| error.to_string()).clone();
            return BackendError::DeviceLost { reason };
        }
        if error.is_of_a_capture() {
            return BackendError::CaptureFailed { reason: error.to_string() };
        }
        BackendError::Driver { call: error.call, answer: error.answer() }
    }

    /// The device's handle.
    pub fn device(&self) -> CUdevice {
        self.device
    }

    /// What is live.
    pub fn live(&self) -> RefMut<'_, LiveRanges> {
        self.live.borrow_mut()
    }

    /// The stream whose capture records.
    pub fn recording(&self) -> Option<CUstream> {
        self.recording.get()
    }

    /// A capture begins on `stream`.
    pub fn set_recording(&self, stream: CUstream) {
        self.recording.set(Some(stream));
    }

    /// The capture has ended: gives back what waited for that.
    pub fn set_idle(&self) {
        self.recording.set(None);
        for spent in self.spent.take() {
            self.free(spent);
        }
    }

    /// Makes a call that has nothing to do with the capture that may be recording: waits for other work, or takes memory. The driver would take such a call for one that the
    /// capture depends on and give it up, unless the thread says that it is not, for just as long as the call takes.
    ///
    /// # Errors
    /// The call's.
    pub fn beside_a_capture(&self, call: impl FnOnce() -> std::result::Result<(), DriverError>) -> std::result::Result<(), DriverError> {
        if self.recording.get().is_none() {
            return call();
        }
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the context is current; `mode` is a place for one value, which the driver exchanges for the thread's own.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        let answer = call();
        // SAFETY: as above; `mode` is what the thread had.
        let restored = unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) };
        answer.and(restored)
    }

    /// # Errors
    /// [`BackendError::OutOfOrder`] while any capture records.
    pub fn refuse_while_recording(&self, call: &'static str) -> Result<()> {
        match self.recording.get() {
            Some(_) => Err(BackendError::OutOfOrder { call, state: "a capture is recording" }),
            None => Ok(()),
        }
    }

    /// # Errors
    /// [`BackendError::OutOfOrder`] while `stream` is being captured.
    pub fn refuse_in_capture(&self, call: &'static str, stream: CUstream) -> Result<()> {
        if self.recording.get() == Some(stream) {
            return Err(BackendError::OutOfOrder { call, state: "its stream is being captured" });
        }
        Ok(())
    }

    /// Things that the driver did not take back, which a healthy device never does; they are lost until the process ends.
    pub fn failed_frees(&self) -> u64 {
        self.failed_frees.get()
    }

    /// Gives something back to the driver, now or when the capture ends. Waits for the work that may use it.
    pub fn give_back(&self, spent: Spent) {
        if self.recording.get().is_some() {
            self.spent.borrow_mut().push(spent);
        } else {
            self.free(spent);
        }
    }

    fn free(&self, spent: Spent) {
        if let Err(BackendError::DeviceLost { .. }) = self.enter() {
            // The driver frees all of a lost context's memory when the process ends, and answers nothing until then.
            return;
        }
        // Freeing device memory waits for the device, freeing page-locked memory need not: queued copies could meet a dead page. A graph
        // in flight is freed by the driver when it is done.
        let waited = match spent {
            Spent::Graph(_) => Ok(()),
            // SAFETY: the context is current and no capture of this thread records.
            _ => unsafe { call!(cuCtxSynchronize()) },
        };
        let freed = waited.and_then(|()| {
            // SAFETY: each was made by the matching call, in this context, and is given back once, for a `Spent` is moved in here; after
            // the wait no queued work uses it. The owner of registered memory is dropped only after this.
            unsafe {
                match &spent {
                    Spent::Device(address) => call!(cuMemFree_v2(*address)),
                    Spent::Mapped(mapped) => mapped.take_away(),
                    Spent::Pinned(pointer) => call!(cuMemFreeHost(*pointer)),
                    Spent::Registered(pointer, _owner) => call!(cuMemHostUnregister(*pointer)),
                    Spent::Pageable(_owner) => Ok(()),
                    Spent::Graph(graph) => call!(cuGraphExecDestroy(*graph)),
                }
            }
        });
        if let Err(error) = freed {
            // Called while values are dropped: a lost device shows at the next call, anything else is counted.
            if !matches!(self.in_words(error), BackendError::DeviceLost { .. }) {
                self.failed_frees.set(self.failed_frees.get() + 1);
            }
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. Everything made in the context holds it and is gone by now. An error leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
