//! The simulated device's memory: an address table over RAM with a byte budget.
//!
//! Addresses are numbers of our own, not pointers: each allocation gets a fresh range with a guard gap behind it, and every access is
//! looked up and bounds-checked. A stale address is therefore an error here, where a real device would read garbage.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};

use crate::backend::{Addr, AddrRange, BackendError, Pool, Result};
use crate::units::Bytes;

/// What fresh, freed and lent memory holds: as f32 a NaN, as an index far out of any range.
pub const POISON: u8 = 0xFF;

/// Alignment of device allocations and of their addresses.
const ALIGN: usize = 256;
/// What reserved ranges are backed in multiples of.
pub const BACKING_UNIT: Bytes = Bytes(ALIGN as u64);
/// Addresses left unused behind an allocation, so that an overrun meets no neighbour.
const GUARD: u64 = 1 << 16;

/// Zeroed RAM aligned to [`ALIGN`], freed on drop.
struct Block {
    data: NonNull<u8>,
    source: Source,
}

/// Where a block's RAM comes from.
enum Source {
    /// The allocator.
    Heap(Layout),
    /// Pages that take no RAM before they are written. Held to be unmapped on drop; all access is by the block's pointer.
    Pages(#[allow(dead_code, reason = "held for its drop")] MmapMut),
}

impl Block {
    fn zeroed(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the layout has a size of at least one byte.
        let data = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { data, source: Source::Heap(layout) })
    }

    /// Zeroed memory that is an address range only, until somebody writes to it: a machine need not have as much.
    fn pages(bytes: usize) -> Option<Self> {
        let mut map = MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon().ok()?;
        let data = NonNull::new(map.as_mut_ptr())?;
        Some(Self { data, source: Source::Pages(map) })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Source::Heap(layout) = self.source {
            // SAFETY: `data` was allocated with this layout and is freed once.
            unsafe { dealloc(self.data.as_ptr(), layout) }
        }
    }
}

enum Storage {
    Device(Block),
    Pinned(Block),
    Registered(Registered),
}

/// Host memory of somebody else. Its address is asked once: `as_ref` might answer another slice the next time.
struct Registered {
    data: *const u8,
    /// Keeps `data` alive and, being shared, unchanged.
    _owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
}

struct Allocation {
    bytes: u64,
    storage: Storage,
    /// Lies in a reserved range, whose addresses nobody else gets.
    in_reserve: bool,
}

/// Where an operand lies. Registered host memory counts as `Host`, so do pinned buffers: reading them crosses the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Device memory.
    Device,
    /// Host memory.
    Host,
}

/// All live allocations of one device.
pub struct MemoryTable {
    allocations: BTreeMap<u64, Allocation>,
    /// Start and length of ranges whose addresses are kept.
    reserved: BTreeMap<u64, u64>,
    next_address: u64,
    /// Start and length of device allocations that are no more.
    freed: Vec<(u64, u64)>,
    /// What was taken beyond the bytes of an allocation when it was first written, by its start.
    touched: BTreeMap<u64, u64>,
    total: Bytes,
    used: Bytes,
    peak: Bytes,
    /// Memory is books alone: contents of the device are neither moved nor poisoned, apart from what the host writes and reads.
    dry: bool,
}

impl MemoryTable {
    /// A device of `total` bytes with nothing allocated.
    pub fn new(total: Bytes) -> Self {
        Self {
            allocations: BTreeMap::new(),
            reserved: BTreeMap::new(),
            next_address: 1 << 32,
            freed: Vec::new(),
            touched: BTreeMap::new(),
            total,
            used: Bytes::ZERO,
            peak: Bytes::ZERO,
            dry: false,
        }
    }

    /// The same for a dry run. Memory takes RAM only where the host or a router has written; the rest reads as zeros.
    pub fn dry(total: Bytes) -> Self {
        Self { dry: true, ..Self::new(total) }
    }

    fn block(&self, bytes: Bytes) -> Option<Block> {
        if self.dry { Block::pages(bytes.as_usize()) } else { Block::zeroed(bytes.as_usize()) }
    }

    pub fn total(&self) -> Bytes {
        self.total
    }

    pub fn used(&self) -> Bytes {
        self.used
    }

    pub fn peak(&self) -> Bytes {
        self.peak
    }

    /// Bytes taken beyond those of the allocations.
    pub fn taken_by_touch(&self) -> Bytes {
        Bytes(self.touched.values().sum())
    }

    /// Notes a write to device memory: the first one to an allocation takes `percent` of its bytes more.
    pub fn touch(&mut self, range: AddrRange, percent: u64) {
        if let Some((&start, allocation)) = self.allocations.range(..=range.start.0).next_back()
            && matches!(allocation.storage, Storage::Device(_))
        {
            self.touched.entry(start).or_insert(allocation.bytes / 100 * percent);
        }
    }

    /// The address of a freed device allocation of this size, where no live one has taken it.
    fn freed_address(&mut self, bytes: Bytes) -> Option<u64> {
        let at = self.freed.iter().rposition(|&(_, length)| length == bytes.0)?;
        Some(self.freed.swap_remove(at).0)
    }

    fn fresh_addresses(&mut self, bytes: Bytes) -> u64 {
        let start = self.next_address;
        self.next_address += bytes.align_up(ALIGN as u64).0 + GUARD;
        start
    }

    fn insert(&mut self, bytes: Bytes, storage: Storage) -> AddrRange {
        let start = self.fresh_addresses(bytes);
        self.allocations.insert(start, Allocation { bytes: bytes.0, storage, in_reserve: false });
        AddrRange { start: Addr(start), bytes }
    }

    /// Keeps addresses for [`MemoryTable::back`].
    pub fn reserve(&mut self, bytes: Bytes) -> AddrRange {
        let bytes = bytes.align_up(BACKING_UNIT.0);
        let start = self.fresh_addresses(bytes);
        self.reserved.insert(start, bytes.0);
        AddrRange { start: Addr(start), bytes }
    }

    /// Gives kept addresses up; no others get them.
    pub fn unreserve(&mut self, start: Addr) {
        self.reserved.remove(&start.0);
    }

    /// Allocates at addresses that are kept.
    pub fn back(&mut self, part: AddrRange, purpose: &str) -> Result<AddrRange> {
        let whole = part.bytes > Bytes::ZERO && [part.start.0, part.bytes.0].iter().all(|edge| edge.is_multiple_of(BACKING_UNIT.0));
        let kept =
            self.reserved.range(..=part.start.0).next_back().map(|(&start, &bytes)| AddrRange { start: Addr(start), bytes: Bytes(bytes) });
        if !whole || kept.is_none_or(|kept| part.end() > kept.end()) {
            return Err(BackendError::BadAddress { what: "back", addr: part.start, bytes: part.bytes });
        }
        let before = self.allocations.range(..part.end().0).next_back();
        if before.is_some_and(|(&start, allocation)| start + allocation.bytes > part.start.0) {
            return Err(BackendError::Overlap { what: "back", addr: part.start });
        }
        let block = self.charged_block(part.bytes, purpose)?;
        self.allocations.insert(part.start.0, Allocation { bytes: part.bytes.0, storage: Storage::Device(block), in_reserve: true });
        self.poison(part)?;
        Ok(part)
    }

    /// RAM for device memory, charged to the budget.
    fn charged_block(&mut self, bytes: Bytes, purpose: &str) -> Result<Block> {
        self.charge(bytes, purpose)?;
        self.block(bytes).ok_or_else(|| {
            self.discharge(bytes);
            BackendError::OutOfMemory { pool: Pool::Device, purpose: purpose.to_owned(), requested: bytes, free: Bytes::ZERO }
        })
    }

    /// Charges `bytes` to the budget without giving an address, e.g. for a captured graph.
    pub fn charge(&mut self, bytes: Bytes, purpose: &str) -> Result<()> {
        let free = self.total.saturating_sub(self.used);
        if bytes > free {
            return Err(BackendError::OutOfMemory { pool: Pool::Device, purpose: purpose.to_owned(), requested: bytes, free });
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }

    /// Takes back what [`MemoryTable::charge`] charged.
    pub fn discharge(&mut self, bytes: Bytes) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Allocates at a fresh address; with `reuse` at that of a freed allocation of the same size, where there is one.
    pub fn allocate_device(&mut self, bytes: Bytes, purpose: &str, reuse: bool) -> Result<AddrRange> {
        let block = self.charged_block(bytes, purpose)?;
        let range = match reuse.then(|| self.freed_address(bytes)).flatten() {
            Some(start) => {
                self.allocations.insert(start, Allocation { bytes: bytes.0, storage: Storage::Device(block), in_reserve: false });
                AddrRange { start: Addr(start), bytes }
            }
            None => self.insert(bytes, Storage::Device(block)),
        };
        self.poison(range)?;
        Ok(range)
    }

    pub fn allocate_pinned(&mut self, bytes: Bytes, purpose: &str) -> Result<AddrRange> {
        match self.block(bytes) {
            Some(block) => Ok(self.insert(bytes, Storage::Pinned(block))),
            None => {
                Err(BackendError::OutOfMemory { pool: Pool::PinnedHost, purpose: purpose.to_owned(), requested: bytes, free: Bytes::ZERO })
            }
        }
    }

    pub fn register(&mut self, memory: Arc<dyn AsRef<[u8]> + Send + Sync>) -> AddrRange {
        let slice = (*memory).as_ref();
        let (data, bytes) = (slice.as_ptr(), Bytes::from(slice.len()));
        self.insert(bytes, Storage::Registered(Registered { data, _owner: memory }))
    }

    /// Frees an allocation of any kind; device memory is poisoned first.
    pub fn release(&mut self, start: Addr) {
        let Some(allocation) = self.allocations.get(&start.0) else { return };
        let (bytes, in_reserve) = (Bytes(allocation.bytes), allocation.in_reserve);
        if matches!(allocation.storage, Storage::Device(_)) {
            let poisoned = self.poison(AddrRange { start, bytes });
            debug_assert!(poisoned.is_ok(), "a live device allocation can be written");
            self.discharge(bytes);
            if !in_reserve {
                self.freed.push((start.0, bytes.0));
            }
            self.touched.remove(&start.0);
        }
        self.allocations.remove(&start.0);
    }

    fn find(&self, what: &'static str, range: AddrRange) -> Result<(&Allocation, usize)> {
        let bad = BackendError::BadAddress { what, addr: range.start, bytes: range.bytes };
        let (&start, allocation) = self.allocations.range(..=range.start.0).next_back().ok_or(bad.clone())?;
        let offset = range.start.0 - start;
        let room = allocation.bytes.checked_sub(offset).ok_or(bad.clone())?;
        if range.bytes.0 > room {
            return Err(bad);
        }
        Ok((allocation, Bytes(offset).as_usize()))
    }

    /// Which side of the link a range lies on.
    pub fn place(&self, range: AddrRange) -> Result<Place> {
        let (allocation, _) = self.find("place", range)?;
        Ok(if matches!(allocation.storage, Storage::Device(_)) { Place::Device } else { Place::Host })
    }

    /// Start of a readable range.
    pub fn readable(&self, what: &'static str, range: AddrRange) -> Result<*const u8> {
        let (allocation, offset) = self.find(what, range)?;
        let base = match &allocation.storage {
            Storage::Device(block) | Storage::Pinned(block) => block.data.as_ptr().cast_const(),
            Storage::Registered(memory) => memory.data,
        };
        // SAFETY: `find` checked that the range lies inside the allocation.
        Ok(unsafe { base.add(offset) })
    }

    /// Start of a writable range; registered memory is read-only.
    pub fn writable(&self, what: &'static str, range: AddrRange) -> Result<*mut u8> {
        let (allocation, offset) = self.find(what, range)?;
        match &allocation.storage {
            // SAFETY: `find` checked that the range lies inside the allocation.
            Storage::Device(block) | Storage::Pinned(block) => Ok(unsafe { block.data.as_ptr().add(offset) }),
            Storage::Registered(_) => Err(BackendError::Overlap { what, addr: range.start }),
        }
    }

    /// True where the range is the host's own: what lies there is real in a dry run, too.
    fn is_pinned(&self, range: AddrRange) -> bool {
        self.find("kind", range).is_ok_and(|(allocation, _)| matches!(allocation.storage, Storage::Pinned(_)))
    }

    /// Overwrites a range with one byte.
    pub fn fill(&mut self, range: AddrRange, byte: u8) -> Result<()> {
        let data = self.writable("fill", range)?;
        if self.dry && !self.is_pinned(range) {
            return Ok(());
        }
        // SAFETY: `writable` checked the range; no slice of it is alive, as slices borrow the table.
        unsafe { data.write_bytes(byte, range.bytes.as_usize()) };
        Ok(())
    }

    /// Overwrites a range with [`POISON`].
    pub fn poison(&mut self, range: AddrRange) -> Result<()> {
        self.fill(range, POISON)
    }

    /// Copies between two ranges, which may overlap.
    pub fn copy(&mut self, dst: Addr, src: Addr, bytes: Bytes) -> Result<()> {
        let (source, destination) = (AddrRange { start: src, bytes }, AddrRange { start: dst, bytes });
        let from = self.readable("copy source", source)?;
        let to = self.writable("copy destination", destination)?;
        // In a dry run only what the host wrote or will read moves: tables, positions, routes, but no weights.
        if self.dry && !self.is_pinned(source) && !self.is_pinned(destination) {
            return Ok(());
        }
        // SAFETY: both ranges were checked; `copy` allows overlap; no slice of either is alive, as slices borrow the table.
        unsafe { std::ptr::copy(from, to, bytes.as_usize()) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: Addr, bytes: u64) -> AddrRange {
        AddrRange { start, bytes: Bytes(bytes) }
    }

    #[test]
    fn an_access_that_leaves_its_allocation_is_refused_even_where_the_next_one_follows() {
        let mut table = MemoryTable::new(Bytes(4096));
        let [first, second] = [0, 1].map(|_| table.allocate_device(Bytes(100), "a test", false).expect("room"));
        assert!(second.start.0 >= first.end().0 + GUARD, "a guard lies between allocations");
        assert!(table.readable("a test", range(first.start, 100)).is_ok());
        assert!(table.readable("a test", range(first.end(), 0)).is_ok(), "an empty range at the end touches nothing");
        let outside = [
            range(first.start, 101),
            range(first.end(), 1),
            range(first.start.offset(Bytes(50)), 51),
            range(Addr(second.start.0 - 1), 1),
            range(Addr(first.start.0 - 1), 2),
            range(second.start, u64::MAX),
            range(Addr(u64::MAX), u64::MAX),
            range(Addr(0), 1),
        ];
        for range in outside {
            let expected = BackendError::BadAddress { what: "a test", addr: range.start, bytes: range.bytes };
            assert_eq!(table.readable("a test", range), Err(expected.clone()));
            assert_eq!(table.writable("a test", range), Err(expected));
        }
    }

    #[test]
    fn an_address_is_never_given_twice() {
        let mut table = MemoryTable::new(Bytes(4096));
        let first = table.allocate_device(Bytes(100), "a test", false).expect("room");
        table.release(first.start);
        let second = table.allocate_device(Bytes(100), "a test", false).expect("room");
        assert!(!first.overlaps(second));
        assert!(table.readable("a test", first).is_err());
        table.release(first.start);
        assert_eq!(table.used(), Bytes(100), "releasing a stale address frees nothing");
    }

    #[test]
    fn the_budget_counts_device_memory_and_charges_alone() {
        let mut table = MemoryTable::new(Bytes(1000));
        let device = table.allocate_device(Bytes(600), "a test", false).expect("room");
        table.charge(Bytes(300), "a graph").expect("room");
        table.allocate_pinned(Bytes(5000), "a test").expect("host memory");
        table.register(Arc::new(vec![0_u8; 5000]));
        assert_eq!((table.used(), table.peak()), (Bytes(900), Bytes(900)));
        let refused = table.allocate_device(Bytes(101), "one too many", false);
        let purpose = "one too many".to_owned();
        assert_eq!(refused, Err(BackendError::OutOfMemory { pool: Pool::Device, purpose, requested: Bytes(101), free: Bytes(100) }));
        table.release(device.start);
        table.discharge(Bytes(300));
        assert_eq!((table.used(), table.peak()), (Bytes::ZERO, Bytes(900)));
    }

    #[test]
    fn host_memory_lies_across_the_link() {
        let mut table = MemoryTable::new(Bytes(1000));
        let device = table.allocate_device(Bytes(10), "a test", false).expect("room");
        let pinned = table.allocate_pinned(Bytes(10), "a test").expect("host memory");
        let registered = table.register(Arc::new(vec![0_u8; 10]));
        let places = [device, pinned, registered].map(|range| table.place(range));
        assert_eq!(places, [Ok(Place::Device), Ok(Place::Host), Ok(Place::Host)]);
    }

    #[test]
    fn a_dry_device_keeps_its_books_and_moves_only_what_is_the_hosts() {
        let mut table = MemoryTable::dry(Bytes(4096));
        let [device, other] = [0, 1].map(|_| table.allocate_device(Bytes(1024), "a test", false).expect("room"));
        let pinned = table.allocate_pinned(Bytes(1024), "a test").expect("host memory");
        let registered = table.register(Arc::new(vec![7_u8; 1024]));
        assert_eq!(table.used(), Bytes(2048));
        assert!(table.allocate_device(Bytes(2049), "one too many", false).is_err());
        let first = |table: &MemoryTable, memory: AddrRange| {
            let data = table.readable("a test", memory).expect("live");
            // SAFETY: the table answers for the byte, which nothing writes meanwhile.
            unsafe { *data }
        };
        assert_eq!(first(&table, device), 0, "no poison: it would need RAM");
        table.copy(device.start, registered.start, Bytes(1024)).expect("both are live");
        assert_eq!(first(&table, device), 0, "weights do not move");
        table.fill(pinned, 5).expect("inside");
        table.copy(device.start, pinned.start, Bytes(1024)).expect("both are live");
        table.fill(device, 9).expect("inside");
        assert_eq!(first(&table, device), 5, "what the host wrote moves, a fill does not");
        table.copy(other.start, device.start, Bytes(1024)).expect("both are live");
        table.fill(pinned, 0).expect("inside");
        table.copy(pinned.start, device.start, Bytes(1024)).expect("both are live");
        assert_eq!((first(&table, other), first(&table, pinned)), (0, 5));
        assert!(table.copy(device.end(), pinned.start, Bytes(1)).is_err(), "addresses are checked all the same");
        table.release(device.start);
        assert!(table.copy(device.start, pinned.start, Bytes(1)).is_err(), "a stale one, too");
    }

    #[test]
    fn a_dry_device_may_be_larger_than_the_machine() {
        let terabyte = Bytes::mib(1 << 20);
        let mut table = MemoryTable::dry(terabyte);
        let slab = table.allocate_device(terabyte, "a slab", false).expect("nothing but addresses");
        let last = AddrRange { start: slab.start.offset(terabyte - Bytes(1)), bytes: Bytes(1) };
        assert!(table.writable("a test", last).is_ok());
    }

    #[test]
    fn pinned_memory_that_no_system_has_is_out_of_memory() {
        let refused = MemoryTable::new(Bytes(10)).allocate_pinned(Bytes(u64::MAX), "a test");
        assert!(matches!(refused, Err(BackendError::OutOfMemory { pool: Pool::PinnedHost, .. })), "{refused:?}");
    }

    #[test]
    fn a_copy_between_overlapping_ranges_moves_the_old_contents() {
        let mut table = MemoryTable::new(Bytes(1000));
        let memory = table.allocate_device(Bytes(8), "a test", false).expect("room");
        for at in 0..8_u8 {
            table.fill(range(memory.start.offset(Bytes(u64::from(at))), 1), at).expect("inside");
        }
        table.copy(memory.start.offset(Bytes(2)), memory.start, Bytes(6)).expect("inside");
        let data = table.readable("a test", memory).expect("live");
        // SAFETY: the table answers for eight live bytes, which nothing writes while the slice is used.
        assert_eq!(unsafe { std::slice::from_raw_parts(data, 8) }, [0, 1, 0, 1, 2, 3, 4, 5]);
    }
}
