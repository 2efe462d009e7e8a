//! What a build with a GPU feature owes its user while the program does not run models on that device: to say so.
//!
//! Owns the words, which are the same for all devices; the question to the driver is each device's own.

use std::error::Error;

/// Asks a driver for the names of its devices.
pub type DeviceNames = fn() -> Result<Vec<String>, Box<dyn Error>>;

/// A GPU feature that a build has.
#[derive(Clone, Copy, Debug)]
pub struct GpuFeature {
    /// The device interface's name.
    pub name: &'static str,
    /// Cargo's name for the feature.
    pub feature: &'static str,
    /// The question to the driver; `None` where this version asks nobody.
    pub device_names: Option<DeviceNames>,
}

impl GpuFeature {
    /// Says that models run on the host and what the driver answered. Loads and starts the driver, which can take a few tenths
    /// of a second.
    #[must_use]
    pub fn notice(&self) -> String {
        let Self { name, feature, .. } = self;
        let found = match self.device_names.map(|ask| ask()) {
            None => format!("Nothing was asked whether there is a {name} device."),
            Some(Err(error)) => format!("The {name} driver: {error}."),
            Some(Ok(names)) if names.is_empty() => format!("The {name} driver has no device."),
            Some(Ok(names)) => format!("The {name} driver has: {}.", names.join(", ")),
        };
        format!("built with the feature `{feature}`, but this version runs models on the host backend alone. {found}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(device_names: Option<DeviceNames>) -> String {
        GpuFeature { name: "CUDA", feature: "cuda", device_names }.notice()
    }

    const START: &str = "built with the feature `cuda`, but this version runs models on the host backend alone. ";

    #[test]
    fn the_notice_ends_with_the_driver_s_answer() {
        let two: DeviceNames = || Ok(vec!["NVIDIA H200".to_owned(), "NVIDIA L4".to_owned()]);
        assert_eq!(notice(Some(two)), format!("{START}The CUDA driver has: NVIDIA H200, NVIDIA L4."));
        assert_eq!(notice(Some(|| Ok(Vec::new()))), format!("{START}The CUDA driver has no device."));
        assert_eq!(notice(Some(|| Err("not there".into()))), format!("{START}The CUDA driver: not there."));
        assert_eq!(notice(None), format!("{START}Nothing was asked whether there is a CUDA device."));
    }
}
