//! Which of several devices is meant.

use std::convert::Infallible;
use std::str::FromStr;

use super::driver::ListedDevice;

/// How a device is named.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first that has memory of its own, else the first.
    #[default]
    Best,
    /// The driver's number.
    Index(u32),
    /// The unique number, as `nvidia-smi -L` prints it: `GPU-` and 32 hexadecimal digits with dashes.
    Uuid([u8; 16]),
    /// The name, or a part of it that no other device has; capitals do not matter.
    Name(String),
}

impl FromStr for DeviceChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let text = text.trim();
        Ok(match (text.parse(), uuid(text)) {
            _ if text.is_empty() => Self::Best,
            (Ok(index), _) => Self::Index(index),
            (_, Some(uuid)) => Self::Uuid(uuid),
            _ => Self::Name(text.to_owned()),
        })
    }
}

fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<char> = text.strip_prefix("GPU-")?.chars().filter(|letter| *letter != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    let mut uuid = [0; 16];
    for (byte, pair) in uuid.iter_mut().zip(digits.as_chunks::<2>().0) {
        *byte = u8::try_from(pair[0].to_digit(16)? * 16 + pair[1].to_digit(16)?).ok()?;
    }
    Some(uuid)
}

/// A unique number as `nvidia-smi -L` prints it.
pub(super) fn uuid_in_words(uuid: &[u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("GPU-{}-{}-{}-{}-{}", hex(&uuid[..4]), hex(&uuid[4..6]), hex(&uuid[6..8]), hex(&uuid[8..10]), hex(&uuid[10..]))
}

impl DeviceChoice {
    /// The device that is meant.
    ///
    /// # Errors
    /// Why none or more than one is, and which there are.
    pub fn among<'a>(&self, devices: &'a [ListedDevice]) -> Result<&'a ListedDevice, String> {
        let fits: Vec<&ListedDevice> = match self {
            Self::Best => devices.iter().find(|device| !device.integrated).or(devices.first()).into_iter().collect(),
            Self::Index(index) => devices.iter().filter(|device| device.ordinal == *index).collect(),
            Self::Uuid(uuid) => devices.iter().filter(|device| device.uuid == *uuid).collect(),
            Self::Name(name) => {
                let name = name.to_lowercase();
                let exact: Vec<_> = devices.iter().filter(|device| device.name.to_lowercase() == name).collect();
                if exact.is_empty() { devices.iter().filter(|device| device.name.to_lowercase().contains(&name)).collect() } else { exact }
            }
        };
        let [device] = fits[..] else {
            let listed: Vec<String> =
                devices.iter().map(|device| format!("{}: {} ({})", device.ordinal, device.name, uuid_in_words(&device.uuid))).collect();
            let listed = if listed.is_empty() { "none".to_owned() } else { listed.join(", ") };
            let why = match self {
                Self::Best => "there is no device".to_owned(),
                Self::Index(index) => format!("there is no device {index}"),
                Self::Uuid(uuid) => format!("there is no device {}", uuid_in_words(uuid)),
                Self::Name(name) if fits.is_empty() => format!("no device is called \"{name}\""),
                Self::Name(name) => format!("{} devices are called \"{name}\"", fits.len()),
            };
            return Err(format!("{why}; the driver has: {listed}"));
        };
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: u32, name: &str, integrated: bool) -> ListedDevice {
        let mut uuid = [0xAB; 16];
        uuid[15] = u8::try_from(ordinal).expect("few");
        ListedDevice { handle: 0, ordinal, name: name.to_owned(), uuid, integrated }
    }

    fn chosen(choice: &str, devices: &[ListedDevice]) -> Result<u32, String> {
        choice.parse::<DeviceChoice>().expect("any text is a choice").among(devices).map(|device| device.ordinal)
    }

    #[test]
    fn a_device_is_found_by_number_unique_number_and_name() {
        let devices = [device(0, "NVIDIA GB10", true), device(1, "NVIDIA L4", false), device(2, "NVIDIA L40S", false)];
        assert_eq!(chosen("", &devices), Ok(1), "discrete before integrated");
        assert_eq!(chosen("0", &devices), Ok(0));
        assert_eq!(chosen("GPU-abababab-abab-abab-abab-ababababab02", &devices), Ok(2));
        assert_eq!(chosen("nvidia l4", &devices), Ok(1), "a whole name before a part");
        assert_eq!(chosen("40s", &devices), Ok(2));
        assert_eq!(chosen("", &devices[..1]), Ok(0), "an integrated device is better than none");
    }

    #[test]
    fn a_refusal_lists_the_devices() {
        let devices = [device(0, "NVIDIA L4", false), device(1, "NVIDIA L4", false)];
        let listed = "the driver has: 0: NVIDIA L4 (GPU-abababab-abab-abab-abab-ababababab00), \
                      1: NVIDIA L4 (GPU-abababab-abab-abab-abab-ababababab01)";
        assert_eq!(chosen("7", &devices), Err(format!("there is no device 7; {listed}")));
        assert_eq!(chosen("l4", &devices), Err(format!("2 devices are called \"l4\"; {listed}")));
        assert_eq!(chosen("H200", &devices), Err(format!("no device is called \"H200\"; {listed}")));
        assert_eq!(chosen("GPU-00", &devices), Err(format!("no device is called \"GPU-00\"; {listed}")), "not a whole number");
        assert_eq!(chosen("", &[]), Err("there is no device; the driver has: none".to_owned()));
    }
}
