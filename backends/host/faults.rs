//! Faults that tests inject into the host backend, each named after what a real driver does.

use crate::backend::AddrRange;
use crate::units::Bytes;

/// A wrong answer to the question how much memory is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreeReading {
    /// 0 bytes, as some drivers answer just after a large free.
    Zero,
    /// More than the device has.
    AboveTotal,
    /// The driver does not say.
    Unknown,
    /// The call fails.
    Fails,
}

/// What goes wrong, and when. All off by default.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Device allocations that still succeed before one fails.
    pub mallocs_until_failure: Option<u64>,
    /// The answer of the next `.1` memory queries.
    pub free_reading: Option<(FreeReading, u32)>,
    /// Bytes that other programs hold; may grow at any time.
    pub held_by_others: Bytes,
    /// The next captures fail.
    pub captures_fail: bool,
    /// Copies into this range are lost without a word, as by a broken link.
    pub lose_copies_into: Option<AddrRange>,
    /// Times that an unfinished event is reported as not done although polled.
    pub stalled_polls: u32,
    /// Launches that still succeed before the device is lost.
    pub launches_until_lost: Option<u64>,
    /// Page-locked bytes that may still be registered.
    pub register_limit: Option<Bytes>,
}

impl Faults {
    /// Counts a call down; true when this one is to fail.
    pub(super) fn strikes(counter: &mut Option<u64>) -> bool {
        match counter {
            Some(0) => {
                *counter = None;
                true
            }
            Some(left) => {
                *left -= 1;
                false
            }
            None => false,
        }
    }
}
