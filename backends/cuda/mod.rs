//! The `cuda` backend: memory, order, captured graphs and kernels of a device of NVIDIA's driver. An operation whose kernel the image
//! lacks is refused by name.
//!
//! The foreign interface has three layers: the bindings' raw functions, [`driver`]'s results, and owned types ([`memory`](self),
//! [`graph`](self)) that give back what they hold. The driver is loaded at run time.
#![allow(unsafe_code, reason = "the driver is a C library; every block says why it may be called")]

mod args;
mod attention;
mod choice;
mod context;
mod device;
pub mod driver;
mod experts;
mod experts_prompt;
mod graph;
mod halves;
mod kernels;
mod launch;
mod live;
mod mapping;
mod memory;
mod nvml;
mod operands;
mod os_budget;
mod scratch;
mod survey;
mod virtual_memory;
mod windows;

pub use choice::DeviceChoice;
pub use device::CudaBackend;
pub use graph::{CudaEvent, CudaGraph, CudaStream};
pub use kernels::IMAGE_VARIABLE;
pub use memory::{CudaBuffer, CudaPinned, CudaRegistered};
pub use survey::survey;
pub use virtual_memory::CudaReserved;

use crate::units::Bytes;

/// The backend's short name.
const BACKEND: &str = "cuda";

/// Device memory that a node of a captured graph is counted with. Measured on an H200 with driver 580 as the fall of free memory over 60
/// graphs that were launched once: 2,726 a kernel with 112 bytes of arguments in graphs of 1,000 nodes, 3,495 in graphs of 100; fills
/// take 105 to 699.
const GRAPH_NODE_BYTES: Bytes = Bytes(3584);
