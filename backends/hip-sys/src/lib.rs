//! Bindings to AMD's HIP runtime, loaded at run time.
//!
//! Nothing of ROCm is needed to build this crate or to start a program that uses it: the runtime is looked for when
//! [`Hip::load`] is called, and a machine without it gets a [`LoadError`] that names what was looked for.
//!
//! Three layers, each usable without the one above:
//! - [`raw`]: types and constants of the C interface, and [`Functions`], a table of function addresses;
//! - the methods of [`Functions`]: the same functions, returning `Result<(), HipError>`; still unsafe, for pointers and handles pass
//!   through unchecked;
//! - [`Hip`]: a loaded runtime and the safe questions that need no handle: versions, devices, memory. Owned streams, events, graphs
//!   and allocations are left to the backend that uses them.
//!
//! Invariants: the table is complete or there is none, and the library stays loaded for the rest of the process. Signatures and
//! values are those of `hip/hip_runtime_api.h`; the headers of ROCm 5.2 and 6.4 agree on all of them. `hipDeviceProp_t`, which
//! changed its layout between 5 and 6, is not used: attributes are asked for one by one.
//!
//! ```no_run
//! let hip = hip_sys::Hip::load()?;
//! hip.initialise()?;
//! for device in 0..hip.device_count()? {
//!     eprintln!("{}: {}", device, hip.device_name(device)?);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod library;
pub mod raw;
mod result;
mod table;

pub use error::{Attempt, HipError, LoadError};
pub use library::{DeviceAttribute, Hip, LIBRARY_NAMES, MemoryInfo};
pub use table::Functions;
