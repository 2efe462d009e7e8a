//! The embedded backend: a device simulated in RAM, with real CPU kernels.
//!
//! It is the backend of a build without a GPU feature and the reference for the others. [`memory`](self) keeps a byte budget and an
//! address table that refuses stale addresses, streams run only when waited for, faults can be injected, and a virtual clock can
//! charge what a modelled device would have taken. A [dry run](DryRun) charges time and computes nothing.
#![allow(unsafe_code, reason = "kernels and simulated device memory work on raw addresses; every block says why it may")]

mod clock;
mod delta;
mod device;
mod dry;
mod experts;
mod faults;
mod gates;
mod graph;
pub mod kernels;
mod launch;
mod link;
mod memory;
mod operands;
pub mod pool;

pub use clock::{BusySeconds, Clock, ClockProfile, Cost};
pub use device::{HostBackend, HostConfig, HostEvent, HostGraph, HostMemory, HostReserved, HostStream};
pub use dry::DryRun;
pub use faults::{Faults, FreeReading};
pub use memory::POISON;

use crate::units::Bytes;

/// Device memory that a node of a captured graph is charged with, a figure of the size that drivers take.
pub(crate) const GRAPH_NODE_BYTES: Bytes = Bytes(512);
