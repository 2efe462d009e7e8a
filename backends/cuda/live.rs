//! The books of live memory, by which a stale address is refused before the driver sees it.
//!
//! A driver checks some addresses late, as a fault that loses the device, and others not at all. The books hold a few entries, one an
//! allocation, and are asked once a copy.

use std::collections::BTreeMap;

use crate::backend::{AddrRange, BackendError, Result};

/// Whether the device may write a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading only.
    Read,
    /// Both ways.
    Write,
}

#[derive(Clone, Copy)]
struct Live {
    bytes: u64,
    access: Access,
    /// Values that hold the range: memory that needs no locking may be registered more than once.
    holders: u32,
}

/// All live ranges of a device, by their first address.
#[derive(Default)]
pub struct LiveRanges {
    ranges: BTreeMap<u64, Live>,
}

impl LiveRanges {
    /// Enters a range for one more holder.
    pub fn enter(&mut self, range: AddrRange, access: Access) {
        let live = self.ranges.entry(range.start.0).or_insert(Live { bytes: 0, access, holders: 0 });
        live.bytes = live.bytes.max(range.bytes.0);
        live.holders += 1;
    }

    /// Strikes out what one holder entered.
    pub fn strike(&mut self, range: AddrRange) {
        if let Some(live) = self.ranges.get_mut(&range.start.0) {
            live.holders -= 1;
            if live.holders == 0 {
                self.ranges.remove(&range.start.0);
            }
        }
    }

    /// Whether any live range has a byte of `range`.
    pub fn any_in(&self, range: AddrRange) -> bool {
        self.ranges.range(..range.end().0).next_back().is_some_and(|(start, live)| start + live.bytes > range.start.0)
    }

    /// Refuses a range that does not lie inside a live one, or may not be accessed so.
    ///
    /// # Errors
    /// [`BackendError::BadAddress`], [`BackendError::Overlap`] for writing what is read-only.
    pub fn check(&self, what: &'static str, range: AddrRange, access: Access) -> Result<()> {
        let bad = || BackendError::BadAddress { what, addr: range.start, bytes: range.bytes };
        let (start, live) = self.ranges.range(..=range.start.0).next_back().ok_or_else(bad)?;
        let room = live.bytes.checked_sub(range.start.0 - start).ok_or_else(bad)?;
        if range.bytes.0 > room {
            return Err(bad());
        }
        if access == Access::Write && live.access == Access::Read {
            return Err(BackendError::Overlap { what, addr: range.start });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Addr;
    use crate::units::Bytes;

    fn range(start: u64, bytes: u64) -> AddrRange {
        AddrRange { start: Addr(start), bytes: Bytes(bytes) }
    }

    #[test]
    fn only_ranges_inside_one_live_range_pass() {
        let mut live = LiveRanges::default();
        live.enter(range(1000, 100), Access::Write);
        live.enter(range(1100, 50), Access::Read);
        for inside in [range(1000, 100), range(1099, 1), range(1100, 50), range(1000, 0)] {
            assert_eq!(live.check("a test", inside, Access::Read), Ok(()));
        }
        for outside in [range(999, 1), range(1000, 101), range(1150, 1), range(0, 1), range(1050, u64::MAX), range(u64::MAX, u64::MAX)] {
            let bad = BackendError::BadAddress { what: "a test", addr: outside.start, bytes: outside.bytes };
            assert_eq!(live.check("a test", outside, Access::Read), Err(bad));
        }
        assert_eq!(live.check("a test", range(1000, 100), Access::Write), Ok(()));
        assert_eq!(live.check("a test", range(1110, 1), Access::Write), Err(BackendError::Overlap { what: "a test", addr: Addr(1110) }));
        live.strike(range(1000, 100));
        assert!(live.check("a test", range(1000, 1), Access::Read).is_err());
    }
}
