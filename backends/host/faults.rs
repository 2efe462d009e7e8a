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
    /// Device allocations of more than this fail although more is free, as where the system limits what may be committed.
    pub mallocs_fail_above: Option<Bytes>,
    /// Addresses cannot be reserved.
    pub reserves_fail: bool,
    /// Memory cannot be put behind reserved addresses, for a reason that is no lack of it.
    pub backings_fail: bool,
    /// The next `.1` device allocations for this purpose fail.
    pub refused_purpose: Option<(&'static str, u32)>,
    /// A device allocation of the size of one that was freed gets its address again, as drivers often do. Where this is off, no address
    /// is given twice.
    pub reuse_addresses: bool,
    /// This many device allocations get a fresh address although addresses are reused.
    pub moved_mallocs: u32,
    /// What the first write to a device allocation takes besides its bytes, in percent of them: drivers that commit on touch.
    pub touch_takes_percent: u64,
    /// The answer of the next `.1` memory queries.
    pub free_reading: Option<(FreeReading, u32)>,
    /// Bytes that other programs hold; may grow at any time.
    pub held_by_others: Bytes,
    /// The next captures fail.
    pub captures_fail: bool,
    /// Copies and fills that are still taken before one is refused, as by a driver that is out of something for a moment.
    pub transfers_until_refused: Option<u64>,
    /// Copies into this range are lost without a word, as by a broken link.
    pub lose_copies_into: Option<AddrRange>,
    /// Times that an unfinished event is reported as not done although polled.
    pub stalled_polls: u32,
    /// Launches that still succeed before the device is lost.
    pub launches_until_lost: Option<u64>,
    /// Allocations of page-locked memory that still succeed before one fails.
    pub pinned_until_failure: Option<u64>,
    /// Page-locked bytes that may still be registered.
    pub register_limit: Option<Bytes>,
}

impl Faults {
    /// Whether a device allocation is refused although there is room.
    pub(super) fn refuses(&mut self, bytes: Bytes, purpose: &str) -> bool {
        if let Some((refused, times @ 1..)) = &mut self.refused_purpose
            && *refused == purpose
        {
            *times -= 1;
            return true;
        }
        self.mallocs_fail_above.is_some_and(|most| bytes > most) || Self::strikes(&mut self.mallocs_until_failure)
    }

    /// Whether the next device allocation may get an address that was in use before.
    pub(super) fn reuses_address(&mut self) -> bool {
        if self.reuse_addresses && self.moved_mallocs > 0 {
            self.moved_mallocs -= 1;
            return false;
        }
        self.reuse_addresses
    }

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
