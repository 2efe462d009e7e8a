//! The loaded runtime, and the safe questions to it.

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;

use libloading::Library;

use crate::error::{Attempt, HipError, LoadError};
use crate::raw::hipDeviceAttribute_t;
use crate::table::Functions;

/// Names under which the runtime is looked for, newest first. The unversioned name comes last: it belongs to a development
/// package and may be of any age.
pub const LIBRARY_NAMES: &[&str] = if cfg!(windows) {
    &["amdhip64_7.dll", "amdhip64_6.dll", "amdhip64.dll"]
} else {
    &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"]
};

/// Bytes of a device name, its closing zero included; names are at most as long in `hipDeviceProp_t`.
const NAME_BYTES: usize = 256;

/// HIP's runtime, loaded for the rest of the process.
///
/// The runtime starts threads of its own, so that unloading it would take code away that runs.
#[derive(Clone, Copy, Debug)]
pub struct Hip {
    functions: Functions,
    library: &'static str,
}

/// Memory of a device, as the runtime reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that nobody has taken.
    pub free_bytes: usize,
    /// Bytes in all.
    pub total_bytes: usize,
}

/// A number that the runtime can tell about a device. The values are those of `hipDeviceAttribute_t`, the same in ROCm 5 and 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum DeviceAttribute {
    /// Copies that can run beside kernels.
    AsyncEngineCount = 2,
    /// Whether host memory can be mapped into the device's addresses.
    CanMapHostMemory = 3,
    /// Whether the device shares the host's memory.
    Integrated = 16,
    /// Compute units.
    MultiprocessorCount = 63,
    /// Bus of the PCI address.
    PciBusId = 67,
    /// Device of the PCI address.
    PciDeviceId = 68,
    /// Domain of the PCI address.
    PciDomainId = 69,
    /// Shared memory that a block can have, in bytes.
    MaxSharedMemoryPerBlock = 74,
    /// Threads that run in step: 32 or 64.
    WarpSize = 87,
}

impl Hip {
    /// Loads the runtime by the first of [`LIBRARY_NAMES`] that the system's loader finds.
    ///
    /// # Errors
    /// `NotFound` where there is none, `MissingSymbol` where the library of that name is another one.
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: these are the names of AMD's runtime, whose initialisers may run in any process.
        unsafe { Self::load_first_of(LIBRARY_NAMES) }
    }

    /// As [`Hip::load`], by names or paths of the caller's.
    ///
    /// # Errors
    /// The same.
    ///
    /// # Safety
    /// What can be loaded by these names is HIP's runtime, or has functions of HIP's signatures under HIP's names, and its
    /// initialisers may run here.
    pub unsafe fn load_first_of(names: &[&'static str]) -> Result<Self, LoadError> {
        let mut attempts = Vec::with_capacity(names.len());
        for name in names {
            // SAFETY: the caller vouches for the initialisers. The library is never unloaded, so its finalisers do not run early.
            match unsafe { Library::new(*name) } {
                Ok(library) => {
                    let library = ManuallyDrop::new(library);
                    // SAFETY: the caller vouches for the signatures; `ManuallyDrop` keeps the library loaded.
                    let functions = unsafe { Functions::resolve(&library) };
                    return functions
                        .map(|functions| Self { functions, library: name })
                        .map_err(|symbol| LoadError::MissingSymbol { library: (*name).to_owned(), symbol });
                }
                Err(error) => attempts.push(Attempt { name: (*name).to_owned(), reason: loaders_words(&error) }),
            }
        }
        Err(LoadError::NotFound { attempts })
    }

    /// The functions, for what the safe methods do not offer.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The name by which the library was loaded.
    #[must_use]
    pub fn library(&self) -> &'static str {
        self.library
    }

    /// Starts the runtime; may be called again.
    ///
    /// # Errors
    /// `hipErrorInvalidDevice` or `hipErrorNoDevice` on a machine without a device.
    pub fn initialise(&self) -> Result<(), HipError> {
        // SAFETY: no pointers; 0 is the one value of the flags.
        unsafe { self.functions.init(0) }
    }

    /// Version of the driver below the runtime, in the runtime's own numbering.
    ///
    /// # Errors
    /// Where the runtime cannot tell.
    pub fn driver_version(&self) -> Result<c_int, HipError> {
        // SAFETY: the pointer is to an integer of this frame.
        written(|version| unsafe { self.functions.driver_get_version(version) })
    }

    /// Version of the runtime: 10,000,000 x major + 100,000 x minor + patch.
    ///
    /// # Errors
    /// Where the runtime cannot tell.
    pub fn runtime_version(&self) -> Result<c_int, HipError> {
        // SAFETY: the pointer is to an integer of this frame.
        written(|version| unsafe { self.functions.runtime_get_version(version) })
    }

    /// Devices that the runtime can use; they are numbered from 0.
    ///
    /// # Errors
    /// `hipErrorNoDevice` where there is none.
    pub fn device_count(&self) -> Result<c_int, HipError> {
        // SAFETY: the pointer is to an integer of this frame.
        written(|count| unsafe { self.functions.get_device_count(count) })
    }

    /// The device's name, at most 255 bytes of it.
    ///
    /// # Errors
    /// `hipErrorInvalidDevice` for a number that no device has.
    pub fn device_name(&self, device: c_int) -> Result<String, HipError> {
        let mut name: [c_char; NAME_BYTES] = [0; NAME_BYTES];
        let length = c_int::try_from(NAME_BYTES - 1).expect("256 fits an int");
        // SAFETY: `name` has a byte more than the function may write, and that one is zero.
        unsafe { self.functions.device_get_name(name.as_mut_ptr(), length, device) }?;
        // SAFETY: the last byte of `name` was never written, so the string ends within it.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// One number about a device.
    ///
    /// # Errors
    /// `hipErrorInvalidDevice` for a number that no device has, `hipErrorInvalidValue` for an attribute that this runtime lacks.
    pub fn device_attribute(&self, device: c_int, attribute: DeviceAttribute) -> Result<c_int, HipError> {
        // SAFETY: the pointer is to an integer of this frame; each `DeviceAttribute` is a number, for which one integer is written.
        written(|value| unsafe { self.functions.device_get_attribute(value, attribute as hipDeviceAttribute_t, device) })
    }

    /// Makes `device` the one that later calls of this thread mean.
    ///
    /// # Errors
    /// `hipErrorInvalidDevice` for a number that no device has.
    pub fn use_device(&self, device: c_int) -> Result<(), HipError> {
        // SAFETY: no pointers.
        unsafe { self.functions.set_device(device) }
    }

    /// Memory of the thread's device.
    ///
    /// # Errors
    /// Where there is no device, or an earlier call left it unusable.
    pub fn memory_info(&self) -> Result<MemoryInfo, HipError> {
        let (mut free_bytes, mut total_bytes) = (0, 0);
        // SAFETY: both pointers are to integers of this frame.
        unsafe { self.functions.mem_get_info(&raw mut free_bytes, &raw mut total_bytes) }?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }
}

/// The integer that `call` writes.
fn written(call: impl FnOnce(*mut c_int) -> Result<(), HipError>) -> Result<c_int, HipError> {
    let mut value = 0;
    call(&raw mut value).map(|()| value)
}

/// The cause where there is one: the error itself only names the system's function.
fn loaders_words(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}
