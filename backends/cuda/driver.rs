//! Looks for NVIDIA's driver library, which is loaded at run time.
//!
//! Invariant: the driver is called only after it was found, for the bindings panic where it is not.

use std::error::Error;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use thiserror::Error;

/// Why the driver has no answer.
#[derive(Debug, Error)]
pub enum DriverUnavailable {
    /// The library cannot be loaded.
    #[error(
        "neither libcuda.so (Linux) nor nvcuda.dll (Windows) can be loaded. It comes with NVIDIA's driver, not with the CUDA toolkit; \
         where it lies outside the system's library folders, name its folder in LD_LIBRARY_PATH or PATH"
    )]
    Absent,
    /// The library is there and refuses to start, as it does on a machine without a card.
    #[error("the library is there but does not start: {0}")]
    NotStarted(#[from] DriverError),
}

/// Names of the devices, in the driver's order.
///
/// # Errors
/// [`DriverUnavailable`].
pub fn device_names() -> Result<Vec<String>, Box<dyn Error>> {
    // SAFETY: loads NVIDIA's driver by its own names and nothing else; its initialisers may run in any process.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverUnavailable::Absent.into());
    }
    Ok(started_device_names().map_err(DriverUnavailable::from)?)
}

fn started_device_names() -> Result<Vec<String>, DriverError> {
    result::init()?;
    (0..result::device::get_count()?).map(|ordinal| result::device::get_name(result::device::get(ordinal)?)).collect()
}
