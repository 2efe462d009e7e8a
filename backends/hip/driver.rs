//! Looks for AMD's HIP runtime, which is loaded at run time.

use std::error::Error;

use hip_sys::Hip;

/// Names of the devices, in the runtime's order.
///
/// # Errors
/// [`hip_sys::LoadError`] where there is no runtime, [`hip_sys::HipError`] where it does not start, as on a machine without a card.
pub fn device_names() -> Result<Vec<String>, Box<dyn Error>> {
    let hip = Hip::load()?;
    hip.initialise()?;
    (0..hip.device_count()?).map(|device| Ok(hip.device_name(device)?)).collect()
}
