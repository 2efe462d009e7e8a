//! The books of the slab: which range belongs to whom, and loans as values.
//!
//! ```text
//! decode : | pieces: slot 0 … p-1 |   | slot p | … | slot k-1 | slot k | … | slot N-1 | head |
//! prefill: | still in use         |   | kept, still in use    | <------- arena -------------> |
//! ```
//! The main part never moves while anything is lent from it; only ownership changes. A [`Loan`] is a suffix of the main part, with or
//! without the head's range at its end. It cannot be copied and must be handed back to [`Regions::take_back`]. Slots before the main
//! part lie in pieces of their own, which are never lent and can be given up one by one. A head that lies outside the slab takes part
//! in a loan by being freed: it then comes back at whatever address it gets.

use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use crate::backend::{Addr, AddrRange};
use crate::units::{Bytes, SlotId};

/// Who may use a range of the slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The expert cache (a slot) or the output head (its range).
    Decode,
    /// The prompt path.
    Prompt,
}

/// A request that the books refuse. Nothing is changed.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum RegionError {
    /// More was asked for than can be lent.
    #[error("{needed} were asked of the slab, {lendable} can be lent")]
    TooLarge {
        /// Bytes asked for.
        needed: Bytes,
        /// Bytes that could be lent.
        lendable: Bytes,
    },
    /// A loan is out already.
    #[error("a part of the slab is lent already")]
    AlreadyLent,
    /// A loan was handed back that is not the one that is out.
    #[error("loan {found} was handed back, but {expected:?} is out")]
    ForeignLoan {
        /// Serial number handed back.
        found: u64,
        /// Serial number of the loan that is out.
        expected: Option<u64>,
    },
    /// Prompt buffers that continue in an allocation of their own cannot be laid out anew within the loan.
    #[error("the prompt buffers continue in {spill} beside the slab and cannot be laid out anew: give the loan back and lend again")]
    HybridLayout {
        /// Bytes beside the slab.
        spill: Bytes,
    },
}

/// What of the slab may be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoanRequest {
    /// Bytes of prompt buffers.
    pub bytes: Bytes,
    /// Whether the head takes part. A head in the slab lends its range, which is filled first.
    pub with_head: bool,
    /// Slots that stay in use at least.
    pub keep_slots: u32,
}

/// A part of the slab in the hands of the prompt path.
///
/// Life: made by [`Regions::lend`], used through [`Loan::arena`], ended by [`Regions::take_back`]. Dropping one instead is a fault of
/// ours and shows in the next `lend`.
#[derive(Debug)]
#[must_use = "a loan must be given back"]
pub struct Loan {
    slab: u64,
    serial: u64,
    first_slot: u32,
    n_slots: u32,
    with_head: bool,
    lent: AddrRange,
    arena: AddrRange,
    bytes_in_head: Bytes,
    spill: Option<AddrRange>,
}

impl Loan {
    /// Where the prompt buffers lie: exactly the bytes asked for, at the end of what is lent.
    #[must_use]
    pub fn arena(&self) -> AddrRange {
        self.arena
    }

    /// Whether the head is part of it.
    #[must_use]
    pub fn includes_head(&self) -> bool {
        self.with_head
    }

    /// Bytes of the arena that lie in the head's range.
    #[must_use]
    pub fn bytes_in_head(&self) -> Bytes {
        self.bytes_in_head
    }

    /// The slots that are lent, hottest first.
    pub fn slots(&self) -> impl DoubleEndedIterator<Item = SlotId> + ExactSizeIterator + use<> {
        (self.first_slot..self.n_slots).map(SlotId)
    }

    /// The allocation in which the prompt buffers continue, where there is one.
    #[must_use]
    pub fn spill(&self) -> Option<AddrRange> {
        self.spill
    }

    /// Notes that the prompt buffers continue at `spill`.
    pub(super) fn continue_in(&mut self, spill: AddrRange) {
        self.spill = Some(spill);
    }

    /// Carves the arena anew for buffers of `bytes`, within what is lent.
    ///
    /// # Errors
    /// [`RegionError::HybridLayout`] where the buffers continue beside the slab, [`RegionError::TooLarge`] where the loan is too small.
    /// Either changes nothing.
    pub fn relayout(&mut self, bytes: Bytes) -> Result<AddrRange, RegionError> {
        if let Some(spill) = self.spill {
            return Err(RegionError::HybridLayout { spill: spill.bytes });
        }
        if bytes > self.lent.bytes {
            return Err(RegionError::TooLarge { needed: bytes, lendable: self.lent.bytes });
        }
        self.arena = AddrRange { start: Addr(self.lent.end().0 - bytes.0), bytes };
        Ok(self.arena)
    }
}

/// A captured graph's claim on a range: it may be replayed only while the range belongs to decode and has not been re-placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The claimed range.
    pub range: AddrRange,
    /// The placement of the slab that the graph was captured with.
    pub generation: u64,
}

/// Where everything lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The slots by number; `None` for one that was given up. Those from `main_first` on lie one behind the other.
    pub slots: Vec<Option<AddrRange>>,
    /// The first slot of the main part.
    pub main_first: u32,
    /// The output head.
    pub head: AddrRange,
    /// Whether the head lies behind the last slot, in the same allocation.
    pub head_in_slab: bool,
}

impl Places {
    /// Slots of the given sizes and the head, all in one allocation at `base`.
    #[must_use]
    pub fn in_one(base: Addr, slot_bytes: impl IntoIterator<Item = Bytes>, head_bytes: Bytes) -> Self {
        let mut end = base;
        let place = |bytes| {
            let start = end;
            end = start.offset(bytes);
            Some(AddrRange { start, bytes })
        };
        let slots = slot_bytes.into_iter().map(place).collect();
        Self { slots, main_first: 0, head: AddrRange { start: end, bytes: head_bytes }, head_in_slab: true }
    }
}

/// What is lent.
#[derive(Clone, Copy, Debug)]
struct Lent {
    serial: u64,
    range: AddrRange,
    with_head: bool,
}

/// Ownership of all ranges of one slab.
#[derive(Debug)]
pub struct Regions {
    /// Tells the slabs of a process apart: devices may use the same addresses.
    id: u64,
    places: Places,
    generation: u64,
    /// The generation since which the head lies where it does.
    head_generation: u64,
    loans_made: u64,
    out: Option<Lent>,
}

impl Regions {
    /// Books for a slab in one allocation at `base` with everything owned by decode: slots of the given sizes, then the head.
    #[must_use]
    pub fn new(base: Addr, slot_bytes: impl IntoIterator<Item = Bytes>, head_bytes: Bytes) -> Self {
        Self::placed(Places::in_one(base, slot_bytes, head_bytes))
    }

    /// Books with everything where `places` says and owned by decode.
    #[must_use]
    pub fn placed(places: Places) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, places, generation: 1, head_generation: 1, loans_made: 0, out: None }
    }

    /// Everything lies elsewhere from now on: every lease is stale, but those on a head that stays where it is.
    ///
    /// # Panics
    /// While a loan is out.
    pub fn replace(&mut self, places: Places) {
        assert!(self.all_home(), "a slab with a loan out cannot be placed anew");
        let stays = self.places.head == places.head;
        self.places = places;
        self.generation += 1;
        if !stays {
            self.head_generation = self.generation;
        }
    }

    /// The head lies at `range` from now on. At another address than before, every lease is stale.
    pub fn place_head(&mut self, range: AddrRange) {
        if self.places.head != range {
            self.generation += 1;
            self.head_generation = self.generation;
        }
        self.places.head = range;
    }

    /// A slot outside the main part is given up, or lies at `range` again.
    ///
    /// # Panics
    /// For a slot of the main part.
    pub fn place_slot(&mut self, slot: SlotId, range: Option<AddrRange>) {
        assert!(slot.0 < self.places.main_first, "{slot:?} lies in the main part");
        self.places.slots[slot.0 as usize] = range;
    }

    /// Where a slot lies.
    ///
    /// # Panics
    /// For a slot that was given up: it holds no expert, so nobody asks.
    #[must_use]
    pub fn slot(&self, slot: SlotId) -> AddrRange {
        self.slot_in_use(slot).unwrap_or_else(|| panic!("{slot:?} of {} was given up", self.n_slots()))
    }

    /// Where a slot lies; `None` where there is no such slot or it was given up.
    #[must_use]
    pub fn slot_in_use(&self, slot: SlotId) -> Option<AddrRange> {
        self.places.slots.get(slot.0 as usize).copied().flatten()
    }

    /// Where the head lies.
    #[must_use]
    pub fn head(&self) -> AddrRange {
        self.places.head
    }

    /// Number of slots, those that were given up included.
    #[must_use]
    pub fn n_slots(&self) -> u32 {
        u32::try_from(self.places.slots.len()).expect("fewer than 2^32 slots")
    }

    /// Slots that lie somewhere.
    #[must_use]
    pub fn n_slots_in_use(&self) -> u32 {
        u32::try_from(self.places.slots.iter().flatten().count()).expect("fewer than 2^32 slots")
    }

    /// Who owns `range` now. A range that a loan touches belongs to the prompt path; so does a head that was freed for it.
    #[must_use]
    pub fn owner(&self, range: AddrRange) -> Owner {
        match self.out {
            Some(lent) if lent.range.overlaps(range) || (lent.with_head && self.head().overlaps(range)) => Owner::Prompt,
            _ => Owner::Decode,
        }
    }

    /// A lease on `range` in its present placement.
    #[must_use]
    pub fn lease(&self, range: AddrRange) -> Lease {
        Lease { range, generation: self.generation_of(range) }
    }

    fn generation_of(&self, range: AddrRange) -> u64 {
        if range == self.head() { self.head_generation } else { self.generation }
    }

    /// True where a graph with this lease may be replayed.
    #[must_use]
    pub fn honours(&self, lease: &Lease) -> bool {
        lease.generation == self.generation_of(lease.range) && self.owner(lease.range) == Owner::Decode
    }

    /// Lends the fewest slots from the end whose bytes, with the head's where it lies in the slab and takes part, cover the request.
    ///
    /// # Errors
    /// [`RegionError::TooLarge`] where the request does not fit, [`RegionError::AlreadyLent`] while a loan is out.
    pub fn lend(&mut self, request: LoanRequest) -> Result<Loan, RegionError> {
        if self.out.is_some() {
            return Err(RegionError::AlreadyLent);
        }
        let head = self.head();
        let n_slots = self.n_slots();
        let head_joins = request.with_head && self.places.head_in_slab;
        let main = &self.places.slots[self.places.main_first as usize..];
        let main_end = main.last().copied().flatten().map_or(head.start, AddrRange::end);
        // Buffers end where the loan ends, so a range of the head that takes part is filled before any slot.
        let end = if head_joins { head.end() } else { main_end };
        let lowest = self.places.main_first.max(request.keep_slots).min(n_slots);
        let mut lent = AddrRange { start: if head_joins { head.start } else { main_end }, bytes: Bytes::ZERO };
        lent.bytes = Bytes(end.0 - lent.start.0);
        let mut first_slot = n_slots;
        while lent.bytes < request.bytes {
            if first_slot == lowest {
                return Err(RegionError::TooLarge { needed: request.bytes, lendable: lent.bytes });
            }
            first_slot -= 1;
            let slot = self.slot(SlotId(first_slot));
            assert!(slot.end() == lent.start, "slot {first_slot} at {slot:?} does not lie before {lent:?}");
            lent = AddrRange { start: slot.start, bytes: Bytes(end.0 - slot.start.0) };
        }
        let arena = AddrRange { start: Addr(end.0 - request.bytes.0), bytes: request.bytes };
        assert!(arena.start >= lent.start && arena.end() <= lent.end(), "arena {arena:?} leaves the loan {lent:?}");
        self.loans_made += 1;
        self.out = Some(Lent { serial: self.loans_made, range: lent, with_head: request.with_head });
        Ok(Loan {
            slab: self.id,
            serial: self.loans_made,
            first_slot,
            n_slots,
            with_head: request.with_head,
            lent,
            arena,
            bytes_in_head: if head_joins { request.bytes.min(head.bytes) } else { Bytes::ZERO },
            spill: None,
        })
    }

    /// Ends a loan: all its ranges belong to decode again, with worthless contents.
    ///
    /// # Errors
    /// [`RegionError::ForeignLoan`] where it is not the loan that is out.
    pub fn take_back(&mut self, loan: Loan) -> Result<(), RegionError> {
        let expected = self.out.map(|lent| lent.serial);
        if loan.slab != self.id || expected != Some(loan.serial) {
            return Err(RegionError::ForeignLoan { found: loan.serial, expected });
        }
        self.out = None;
        Ok(())
    }

    /// True while nothing is lent.
    #[must_use]
    pub fn all_home(&self) -> bool {
        self.out.is_none()
    }
}

#[cfg(test)]
#[path = "region_tests.rs"]
mod tests;
