//! All cards of NVIDIA's driver with what matters of each. A card's context is taken for a moment, to load the kernels: nothing else
//! tells as surely whether they run there.

use std::rc::Rc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::choice::{DeviceChoice, uuid_in_words};
use super::context::Context;
use super::driver::{self, ListedDevice};
use super::kernels::Kernels;
use super::memory;
use super::nvml::{Nvml, NvmlCard};
use crate::backend::survey::{CardFacts, Cards, DriverFacts};
use crate::units::Bytes;

const INTERFACE: &str = "CUDA";

/// The driver's cards, or why it has no answer.
#[must_use]
pub fn survey() -> Cards {
    let unavailable = |reason| Cards::Unavailable { interface: INTERFACE, reason };
    let (version, devices) = match driver::start().and_then(|version| Ok((version, driver::devices()?))) {
        Ok(found) => found,
        Err(error) => return unavailable(error.to_string()),
    };
    let nvml = Nvml::start();
    let release = nvml.as_ref().ok().and_then(Nvml::driver_release).or_else(loaded_module_release);
    let default = DeviceChoice::Best.among(&devices).ok().map(|device| device.ordinal);
    let card = |device: &ListedDevice| {
        let nvml = nvml.as_ref().ok().and_then(|nvml| nvml.card(&uuid_in_words(&device.uuid)));
        described(device, nvml.as_ref(), default == Some(device.ordinal))
    };
    let cards = devices.iter().map(card).collect();
    let driver = DriverFacts { interface: INTERFACE, interface_version: version.to_string(), release, users_unknown: nvml.err() };
    Cards::Listed { driver, cards }
}

/// The version of the kernel module, where Linux tells it.
fn loaded_module_release() -> Option<String> {
    std::fs::read_to_string("/sys/module/nvidia/version").ok().map(|version| version.trim().to_owned())
}

fn described(device: &ListedDevice, nvml: Option<&NvmlCard<'_>>, is_default: bool) -> CardFacts {
    let has = |attribute| driver::attribute(device.handle, attribute).is_ok_and(|value| value != 0);
    // Before a context of ours takes its share.
    let free_before = nvml.and_then(NvmlCard::free_bytes);
    let users = nvml.and_then(NvmlCard::users);
    let link = nvml.and_then(NvmlCard::link);
    let (free_with_us, kernels_refused) = tried(device);
    CardFacts {
        number: device.ordinal,
        name: device.name.clone(),
        uuid: uuid_in_words(&device.uuid),
        compute_capability: driver::compute_capability(device.handle).map_or_else(|_| "unknown".to_owned(), |version| version.to_string()),
        integrated: device.integrated,
        is_default,
        total_bytes: driver::total_memory(device.handle).map_or(Bytes::ZERO, Bytes::from),
        free_bytes: free_before.or(free_with_us),
        kernels_refused,
        virtual_memory: has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED),
        registers_host_memory: has(Attribute::CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
        registers_file_maps: has(Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED),
        reads_pageable_memory: has(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS),
        link,
        users,
    }
}

/// What is free beside a context, and why the kernels cannot be loaded.
fn tried(device: &ListedDevice) -> (Option<Bytes>, Option<String>) {
    let context = match Context::retain(device.handle) {
        Ok(context) => Rc::new(context),
        Err(error) => return (None, Some(format!("the card cannot be used now: {error}"))),
    };
    let free = memory::memory_info(&context).ok().and_then(|info| info.free.filter(|free| *free <= info.total));
    (free, Kernels::load(&context).err())
}
