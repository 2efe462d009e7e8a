//! NVIDIA's driver, loaded at run time: whether it is there, and its calls as results.
//!
//! Invariant: the driver is called only after [`start`] found it, for the bindings panic where it is not. Errors keep the driver's own
//! name of the call; what they mean for the device is said in [`DriverError::loses_the_device`] alone.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};
use thiserror::Error;

/// The oldest driver interface whose calls are used, as the driver numbers it: 12.0, which driver 525 brought.
const OLDEST_VERSION: c_int = 12_000;

/// Why the driver has no answer.
#[derive(Debug, Error)]
pub enum DriverUnavailable {
    /// The library cannot be loaded.
    #[error(
        "neither libcuda.so (Linux) nor nvcuda.dll (Windows) can be loaded. It comes with NVIDIA's driver, not with the CUDA toolkit; \
         where it lies outside the system's library folders, name its folder in LD_LIBRARY_PATH or PATH"
    )]
    Absent,
    /// The library is older than the calls that are made.
    #[error("the driver speaks CUDA {}.{}, at least 12.0 is needed: update NVIDIA's driver to 525 or later", version / 1000, version % 1000 / 10)]
    TooOld {
        /// The driver's number: 1000 times the major version and 10 times the minor one.
        version: c_int,
    },
    /// The library is there and refuses to start, as it does on a machine without a card.
    #[error("the library is there but does not start: {0}")]
    NotStarted(#[from] DriverError),
}

/// A call that the driver refused, or that told of an earlier one's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The call, as the driver names it.
    pub call: &'static str,
    /// The answer.
    pub code: CUresult,
}

impl Error for DriverError {}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answers {}", self.call, self.answer())
    }
}

/// The text that the driver has for a code.
fn text_of(code: CUresult, ask: unsafe fn(CUresult, *mut *const c_char) -> CUresult) -> Option<String> {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, for it gave the code; `text` is a place for one pointer.
    let known = unsafe { ask(code, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: the driver answers with a zero-terminated text that lives as long as the driver.
    known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl DriverError {
    /// The driver's number of the error, its name and what it says about it.
    #[must_use]
    pub fn answer(&self) -> String {
        let number = self.code as u32;
        let name = text_of(self.code, sys::cuGetErrorName).unwrap_or_else(|| format!("{:?}", self.code));
        text_of(self.code, sys::cuGetErrorString).map_or_else(|| format!("{name} ({number})"), |text| format!("{name} ({number}): {text}"))
    }

    /// True for errors that a context never recovers from: every later call fails alike, and only a new process gets the device back.
    #[must_use]
    pub const fn loses_the_device(&self) -> bool {
        use CUresult as R;
        matches!(
            self.code,
            R::CUDA_ERROR_DEINITIALIZED
                | R::CUDA_ERROR_DEVICE_UNAVAILABLE
                | R::CUDA_ERROR_INVALID_CONTEXT
                | R::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | R::CUDA_ERROR_ECC_UNCORRECTABLE
                | R::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | R::CUDA_ERROR_ILLEGAL_ADDRESS
                | R::CUDA_ERROR_LAUNCH_TIMEOUT
                | R::CUDA_ERROR_ASSERT
                | R::CUDA_ERROR_HARDWARE_STACK_ERROR
                | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | R::CUDA_ERROR_MISALIGNED_ADDRESS
                | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | R::CUDA_ERROR_INVALID_PC
                | R::CUDA_ERROR_LAUNCH_FAILED
                | R::CUDA_ERROR_EXTERNAL_DEVICE
                | R::CUDA_ERROR_MPS_CLIENT_TERMINATED
        )
    }

    /// True for what goes wrong only while a stream is being captured; the capture is invalid, the device is well.
    #[must_use]
    pub const fn is_of_a_capture(&self) -> bool {
        use CUresult as R;
        matches!(
            self.code,
            R::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                | R::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                | R::CUDA_ERROR_STREAM_CAPTURE_MERGE
                | R::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                | R::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                | R::CUDA_ERROR_STREAM_CAPTURE_ISOLATION
                | R::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                | R::CUDA_ERROR_CAPTURED_EVENT
                | R::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
        )
    }
}

/// The driver's answer to a call as a result.
///
/// # Errors
/// The answer, unless it is success.
pub const fn answered(call: &'static str, code: CUresult) -> Result<(), DriverError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(DriverError { call, code }),
    }
}

/// Makes a call of the driver's, whose name the error gets. Unsafe as the call itself.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::backends::cuda::driver::answered(stringify!($function), cudarc::driver::sys::$function($($argument),*))
    };
}
pub(super) use call;

/// The version of the driver's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version(c_int);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Loads and starts the driver and tells its version; later calls are cheap.
///
/// # Errors
/// [`DriverUnavailable`].
pub fn start() -> Result<Version, DriverUnavailable> {
    // SAFETY: loads NVIDIA's driver by its own names and nothing else; its initialisers may run in any process.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverUnavailable::Absent);
    }
    let mut version = 0;
    // SAFETY: the library is there; `version` is a place for one number, and this call needs no started driver.
    unsafe { call!(cuDriverGetVersion(&raw mut version)) }?;
    if version < OLDEST_VERSION {
        return Err(DriverUnavailable::TooOld { version });
    }
    // SAFETY: the library is there; 0 is the only value that the call takes.
    unsafe { call!(cuInit(0)) }?;
    Ok(Version(version))
}

/// The version of a card's instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeCapability {
    /// Before the point.
    pub major: c_int,
    /// Behind it.
    pub minor: c_int,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The version of a device's instruction set.
///
/// # Errors
/// The driver's.
pub fn compute_capability(device: CUdevice) -> Result<ComputeCapability, DriverError> {
    Ok(ComputeCapability {
        major: attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    })
}

/// A device as the driver lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevice {
    /// The driver's handle.
    pub handle: CUdevice,
    /// The driver's number, from 0.
    pub ordinal: u32,
    /// What it is called.
    pub name: String,
    /// Its unique number, the same after every start of the machine.
    pub uuid: [u8; 16],
    /// Shares memory with the host processor.
    pub integrated: bool,
}

/// A number that the driver has for a device.
///
/// # Errors
/// The driver's, e.g. where it does not know the attribute.
pub fn attribute(device: CUdevice, attribute: CUdevice_attribute) -> Result<c_int, DriverError> {
    let mut value = 0;
    // SAFETY: a device handle only comes from a started driver; `value` is a place for one number.
    unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, device)) }?;
    Ok(value)
}

/// All device memory there is, in bytes.
///
/// # Errors
/// The driver's.
pub fn total_memory(device: CUdevice) -> Result<usize, DriverError> {
    let mut bytes = 0;
    // SAFETY: as in `attribute`.
    unsafe { call!(cuDeviceTotalMem_v2(&raw mut bytes, device)) }?;
    Ok(bytes)
}

fn listed(ordinal: c_int) -> Result<ListedDevice, DriverError> {
    let mut handle = 0;
    // SAFETY: called by `devices` after `start`; the handle is a number.
    unsafe { call!(cuDeviceGet(&raw mut handle, ordinal)) }?;
    let mut name = [0_u8; 256];
    // SAFETY: the buffer has the 256 bytes that the call is told of, its closing zero included.
    unsafe { call!(cuDeviceGetName(name.as_mut_ptr().cast(), 256, handle)) }?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: `uuid` is a place for one number of 16 bytes.
    unsafe { call!(cuDeviceGetUuid_v2(&raw mut uuid, handle)) }?;
    let name = CStr::from_bytes_until_nul(&name).map_or_else(|_| String::new(), |name| name.to_string_lossy().into_owned());
    let integrated = attribute(handle, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0;
    let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
    Ok(ListedDevice { handle, ordinal: ordinal.unsigned_abs(), name, uuid, integrated })
}

/// All devices, in the driver's order. The driver must have been started.
///
/// # Errors
/// The driver's.
pub fn devices() -> Result<Vec<ListedDevice>, DriverError> {
    let mut count = 0;
    // SAFETY: `count` is a place for one number.
    unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
    (0..count).map(listed).collect()
}

/// Names of the devices, in the driver's order.
///
/// # Errors
/// [`DriverUnavailable`].
pub fn device_names() -> Result<Vec<String>, Box<dyn Error>> {
    start()?;
    let devices = devices().map_err(DriverUnavailable::from)?;
    Ok(devices.into_iter().map(|device| device.name).collect())
}
