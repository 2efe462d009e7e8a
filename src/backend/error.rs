//! What can go wrong on a device that a caller could not foresee.

use thiserror::Error;

use crate::backend::Addr;
use crate::units::Bytes;

/// The memory an allocation was asked of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pool {
    /// Memory of the device.
    Device,
    /// Page-locked host memory.
    PinnedHost,
}

impl std::fmt::Display for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Device => "VRAM",
            Self::PinnedHost => "pinned host memory",
        })
    }
}

/// A failed call of a [`Backend`](crate::backend::Backend).
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum BackendError {
    /// There is no room now; freeing something and trying again may help.
    #[error("{pool}: {purpose} needs {requested}, {free} free")]
    OutOfMemory {
        /// Which memory is short.
        pool: Pool,
        /// What the bytes were for.
        purpose: String,
        /// Bytes asked for.
        requested: Bytes,
        /// Bytes free when asked.
        free: Bytes,
    },
    /// An address range does not lie inside one live allocation. A fault of ours: the caller holds a stale address.
    #[error("{what} touches {bytes} at {addr}, which is no live memory of this device")]
    BadAddress {
        /// The operation and the operand.
        what: &'static str,
        /// First address.
        addr: Addr,
        /// Length of the range.
        bytes: Bytes,
    },
    /// An operation was asked to write memory that it also reads in another order, or memory that is read-only.
    #[error("{what}: output range at {addr} overlaps an input or is read-only")]
    Overlap {
        /// The operation.
        what: &'static str,
        /// First address of the output.
        addr: Addr,
    },
    /// The device cannot be opened.
    #[error("the {backend} device cannot be opened: {reason}")]
    Open {
        /// Name of the backend.
        backend: &'static str,
        /// What the driver or the system said.
        reason: String,
    },
    /// The backend cannot do this at all; see [`Capabilities`](crate::backend::Capabilities).
    #[error("the {backend} backend does not support {what}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// The operation or ability.
        what: String,
    },
    /// A call out of order, e.g. ending a capture that was not begun. Nothing was changed.
    #[error("{call} is refused while {state}")]
    OutOfOrder {
        /// The call.
        call: &'static str,
        /// The state it met.
        state: &'static str,
    },
    /// Graph capture failed; the work can still be launched one operation at a time.
    #[error("graph capture failed: {reason}")]
    CaptureFailed {
        /// What the driver said.
        reason: String,
    },
    /// Shapes or types an operation cannot take. A fault of ours.
    #[error("{op}: {reason}")]
    BadOperand {
        /// The operation.
        op: &'static str,
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The driver refused a call for a reason that none of the other errors says.
    #[error("{call}: the driver answers {answer}")]
    Driver {
        /// The driver's own name of the call.
        call: &'static str,
        /// Its answer: name and number, and what it says about them.
        answer: String,
    },
    /// The device is gone; nothing on it can be used any more.
    #[error("the device is lost: {reason}")]
    DeviceLost {
        /// What the driver said.
        reason: String,
    },
}
