//! The books of the slab: which range belongs to whom, and loans as values.
//!
//! ```text
//! decode : | slot 0 | slot 1 | … | slot k-1 | slot k | … | slot N-1 | head |
//! prefill: | kept slots, still in use       | <------- arena: prompt buffers ------> |
//! ```
//! The slab never moves and nothing in it is freed; only ownership changes. A [`Loan`] is a suffix of the slab, with or without the
//! head's range at its end. It cannot be copied and must be handed back to [`Regions::take_back`].

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
}

/// What of the slab may be lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoanRequest {
    /// Bytes of prompt buffers.
    pub bytes: Bytes,
    /// Whether the head's range takes part; it is then filled first.
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
    arena: AddrRange,
    bytes_in_head: Bytes,
}

impl Loan {
    /// Where the prompt buffers lie: exactly the bytes asked for, at the end of what is lent.
    #[must_use]
    pub fn arena(&self) -> AddrRange {
        self.arena
    }

    /// Whether the head's range is part of it.
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
}

/// A captured graph's claim on a range: it may be replayed only while the range belongs to decode and has not been re-placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The claimed range.
    pub range: AddrRange,
    /// The placement of the slab that the graph was captured with.
    pub generation: u64,
}

/// Ownership of all ranges of one slab.
#[derive(Debug)]
pub struct Regions {
    /// Tells the slabs of a process apart: devices may use the same addresses.
    id: u64,
    base: Addr,
    slot_bytes: Bytes,
    n_slots: u32,
    head_bytes: Bytes,
    generation: u64,
    loans_made: u64,
    out: Option<(u64, AddrRange)>,
}

impl Regions {
    /// Books for a slab at `base` with everything owned by decode.
    #[must_use]
    pub fn new(base: Addr, slot_bytes: Bytes, n_slots: u32, head_bytes: Bytes) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, base, slot_bytes, n_slots, head_bytes, generation: 1, loans_made: 0, out: None }
    }

    /// Where a slot lies.
    #[must_use]
    pub fn slot(&self, slot: SlotId) -> AddrRange {
        debug_assert!(slot.0 < self.n_slots, "{slot:?} of {}", self.n_slots);
        AddrRange { start: self.base.offset(self.slot_bytes * u64::from(slot.0)), bytes: self.slot_bytes }
    }

    /// Where the head lies.
    #[must_use]
    pub fn head(&self) -> AddrRange {
        AddrRange { start: self.base.offset(self.slot_bytes * u64::from(self.n_slots)), bytes: self.head_bytes }
    }

    /// Number of slots.
    #[must_use]
    pub fn n_slots(&self) -> u32 {
        self.n_slots
    }

    /// Who owns `range` now. A range that a loan touches belongs to the prompt path.
    #[must_use]
    pub fn owner(&self, range: AddrRange) -> Owner {
        match self.out {
            Some((_, lent)) if lent.overlaps(range) => Owner::Prompt,
            _ => Owner::Decode,
        }
    }

    /// A lease on `range` in its present placement.
    #[must_use]
    pub fn lease(&self, range: AddrRange) -> Lease {
        Lease { range, generation: self.generation }
    }

    /// True where a graph with this lease may be replayed.
    #[must_use]
    pub fn honours(&self, lease: &Lease) -> bool {
        lease.generation == self.generation && self.owner(lease.range) == Owner::Decode
    }

    /// Lends the fewest slots from the end whose bytes, with the head's if it takes part, cover the request.
    ///
    /// # Errors
    /// [`RegionError::TooLarge`] where the request does not fit, [`RegionError::AlreadyLent`] while a loan is out.
    pub fn lend(&mut self, request: LoanRequest) -> Result<Loan, RegionError> {
        if self.out.is_some() {
            return Err(RegionError::AlreadyLent);
        }
        let from_head = if request.with_head { self.head_bytes } else { Bytes::ZERO };
        let slots_needed = request.bytes.saturating_sub(from_head).0.div_ceil(self.slot_bytes.0);
        let slots_max = self.n_slots.saturating_sub(request.keep_slots);
        if slots_needed > u64::from(slots_max) {
            let lendable = self.slot_bytes * u64::from(slots_max) + from_head;
            return Err(RegionError::TooLarge { needed: request.bytes, lendable });
        }
        let first_slot = self.n_slots - u32::try_from(slots_needed).expect("at most the number of slots");
        let head = self.head();
        // Buffers end where the loan ends, so a range of the head that takes part is filled before any slot.
        let end = if request.with_head { head.end() } else { head.start };
        let arena = AddrRange { start: Addr(end.0 - request.bytes.0), bytes: request.bytes };
        let lent_start = self.base.offset(self.slot_bytes * u64::from(first_slot));
        let lent = AddrRange { start: lent_start, bytes: Bytes(end.0 - lent_start.0) };
        assert!(arena.start >= lent.start && arena.end() <= lent.end(), "arena {arena:?} leaves the loan {lent:?}");
        self.loans_made += 1;
        self.out = Some((self.loans_made, lent));
        Ok(Loan {
            slab: self.id,
            serial: self.loans_made,
            first_slot,
            n_slots: self.n_slots,
            with_head: request.with_head,
            arena,
            bytes_in_head: if request.with_head { request.bytes.min(self.head_bytes) } else { Bytes::ZERO },
        })
    }

    /// Ends a loan: all its ranges belong to decode again, with worthless contents.
    ///
    /// # Errors
    /// [`RegionError::ForeignLoan`] where it is not the loan that is out.
    pub fn take_back(&mut self, loan: Loan) -> Result<(), RegionError> {
        let expected = self.out.map(|(serial, _)| serial);
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
mod tests {
    //! Goal: no byte has two owners and every loan comes home. Method: one slab of four slots and a head, asked for loans of all
    //! kinds.
    use proptest::prelude::*;

    use super::*;

    fn slab() -> Regions {
        Regions::new(Addr(0x1000), Bytes(0x100), 4, Bytes(0x300))
    }

    fn request(bytes: u64, with_head: bool) -> LoanRequest {
        LoanRequest { bytes: Bytes(bytes), with_head, keep_slots: 1 }
    }

    #[test]
    fn the_head_is_filled_before_any_slot_is_lent() {
        let mut regions = slab();
        let loan = regions.lend(request(0x200, true)).expect("fits the head");
        assert_eq!(loan.slots().len(), 0);
        assert_eq!(loan.bytes_in_head(), Bytes(0x200));
        assert_eq!(loan.arena().end(), regions.head().end());
        assert_eq!(regions.owner(regions.slot(SlotId(3))), Owner::Decode);
        assert_eq!(regions.owner(regions.head()), Owner::Prompt);
        regions.take_back(loan).expect("the loan that is out");
    }

    #[test]
    fn the_fewest_coldest_slots_cover_the_rest() {
        let mut regions = slab();
        let loan = regions.lend(request(0x401, true)).expect("fits two slots and the head");
        assert_eq!(loan.slots().collect::<Vec<_>>(), [SlotId(2), SlotId(3)]);
        assert_eq!(regions.owner(regions.slot(SlotId(1))), Owner::Decode);
        assert_eq!(regions.owner(regions.slot(SlotId(2))), Owner::Prompt);
        regions.take_back(loan).expect("the loan that is out");
        assert!(regions.all_home());
    }

    #[test]
    fn a_loan_without_the_head_leaves_it_to_decode() {
        let mut regions = slab();
        let loan = regions.lend(request(0x180, false)).expect("fits two slots");
        assert_eq!(regions.owner(regions.head()), Owner::Decode);
        assert_eq!(loan.arena().end(), regions.head().start);
        assert_eq!(loan.bytes_in_head(), Bytes::ZERO);
        regions.take_back(loan).expect("the loan that is out");
    }

    #[test]
    fn what_cannot_be_lent_is_refused_and_changes_nothing() {
        let mut regions = slab();
        let error = regions.lend(request(0x601, true)).expect_err("three slots and the head are all there is");
        assert_eq!(error, RegionError::TooLarge { needed: Bytes(0x601), lendable: Bytes(0x600) });
        assert!(regions.all_home());
    }

    #[test]
    fn a_second_loan_and_a_foreign_one_are_refused() {
        let (mut regions, mut other) = (slab(), slab());
        let loan = regions.lend(request(0x100, true)).expect("fits");
        assert_eq!(regions.lend(request(1, false)).expect_err("one is out"), RegionError::AlreadyLent);
        assert!(other.take_back(loan).is_err(), "a loan of another slab");
        assert!(!regions.all_home(), "a lost loan is never home");
    }

    #[test]
    fn a_lease_is_honoured_only_while_decode_owns_its_range() {
        let mut regions = slab();
        let (head, first) = (regions.lease(regions.head()), regions.lease(regions.slot(SlotId(0))));
        let loan = regions.lend(request(0x100, true)).expect("fits");
        assert!(!regions.honours(&head));
        assert!(regions.honours(&first));
        regions.take_back(loan).expect("the loan that is out");
        assert!(regions.honours(&head));
    }

    #[test]
    fn the_loan_of_another_slab_is_refused_though_its_number_is_right() {
        let (mut regions, mut other) = (slab(), slab());
        let own = regions.lend(request(0x100, true)).expect("fits");
        let foreign = other.lend(request(0x100, true)).expect("fits");
        assert!(matches!(regions.take_back(foreign), Err(RegionError::ForeignLoan { found: 1, expected: Some(1) })));
        assert!(!regions.all_home(), "its own loan is still out");
        regions.take_back(own).expect("the loan that is out");
    }

    /// A byte of the slab, as a range.
    fn byte(at: u64) -> AddrRange {
        AddrRange { start: Addr(0x1000 + at), bytes: Bytes(1) }
    }

    proptest! {
        #[test]
        fn no_byte_has_two_owners_and_every_loan_comes_home(
            n_slots in 1u32..9,
            head_bytes in 0u64..40,
            steps in prop::collection::vec((0u64..120, any::<bool>(), 0u32..4, any::<bool>()), 1..40),
        ) {
            const SLOT: u64 = 8;
            let mut regions = Regions::new(Addr(0x1000), Bytes(SLOT), n_slots, Bytes(head_bytes));
            let slab_bytes = SLOT * u64::from(n_slots) + head_bytes;
            let leases: Vec<Lease> = (0..n_slots).map(|slot| regions.lease(regions.slot(SlotId(slot)))).chain([regions.lease(regions.head())]).collect();
            let mut out: Option<Loan> = None;
            for (bytes, with_head, keep_slots, give_back) in steps {
                if give_back && let Some(loan) = out.take() {
                    regions.take_back(loan).expect("the loan that is out");
                    prop_assert!(regions.all_home() && leases.iter().all(|lease| regions.honours(lease)));
                }
                let lent_before = out.is_some();
                match regions.lend(LoanRequest { bytes: Bytes(bytes), with_head, keep_slots }) {
                    Ok(loan) => {
                        prop_assert!(!lent_before);
                        prop_assert_eq!(loan.arena().bytes, Bytes(bytes));
                        let room = if with_head { head_bytes } else { 0 };
                        let lent = loan.slots().len() as u64;
                        prop_assert!(lent * SLOT + room >= bytes && (lent == 0 || (lent - 1) * SLOT + room < bytes), "the fewest slots");
                        prop_assert!(lent <= u64::from(n_slots.saturating_sub(keep_slots)));
                        out = Some(loan);
                    }
                    Err(RegionError::AlreadyLent) => prop_assert!(lent_before),
                    Err(RegionError::TooLarge { needed, lendable }) => prop_assert!(!lent_before && needed > lendable),
                    Err(other) => prop_assert!(false, "{other}"),
                }
                // Byte by byte: what the loan holds is the prompt's, all else is decode's.
                let lent_slots = out.as_ref().map_or(0, |loan| loan.slots().len() as u64);
                let head_lent = out.as_ref().is_some_and(Loan::includes_head);
                for at in 0..slab_bytes {
                    let in_head = at >= SLOT * u64::from(n_slots);
                    let lent = if in_head { head_lent } else { at >= SLOT * (u64::from(n_slots) - lent_slots) };
                    prop_assert_eq!(regions.owner(byte(at)) == Owner::Prompt, lent, "byte {}", at);
                }
                if let Some(loan) = &out {
                    let arena = loan.arena();
                    let all_lent = (0..arena.bytes.0).all(|at| regions.owner(byte(arena.start.0 - 0x1000 + at)) == Owner::Prompt);
                    prop_assert!(all_lent, "the arena lies within what is lent");
                    let untouched = leases.iter().filter(|lease| !lease.range.overlaps(arena));
                    for lease in untouched {
                        prop_assert_eq!(regions.honours(lease), regions.owner(lease.range) == Owner::Decode);
                    }
                }
            }
        }
    }
}
