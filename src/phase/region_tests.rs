//! Goal: no byte has two owners and every loan comes home. Method: one slab of four slots and a head, asked for loans of all
//! kinds.
use proptest::prelude::*;

use super::*;

fn slab() -> Regions {
    Regions::new(Addr(0x1000), [Bytes(0x100); 4], Bytes(0x300))
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
fn slots_of_several_sizes_lie_one_behind_the_other_and_the_fewest_last_ones_are_lent() {
    let sizes = [0x300, 0x100, 0x300, 0x100].map(Bytes);
    let mut regions = Regions::new(Addr(0x1000), sizes, Bytes(0x80));
    let starts: Vec<u64> = (0..4).map(|slot| regions.slot(SlotId(slot)).start.0).collect();
    assert_eq!((starts, regions.head().start.0), (vec![0x1000, 0x1300, 0x1400, 0x1700], 0x1800));
    for (bytes, with_head, lent) in [(0x100, false, 1), (0x101, false, 2), (0x400, false, 2), (0x401, false, 3), (0x481, true, 3)] {
        let loan = regions.lend(request(bytes, with_head)).expect("three slots may be lent");
        assert_eq!((loan.slots().len(), loan.arena().bytes), (lent, Bytes(bytes)), "{bytes:#x}");
        assert_eq!(loan.arena().end(), if with_head { regions.head().end() } else { regions.head().start });
        regions.take_back(loan).expect("the loan that is out");
    }
    let error = regions.lend(request(0x501, false)).expect_err("one slot is kept");
    assert_eq!(error, RegionError::TooLarge { needed: Bytes(0x501), lendable: Bytes(0x500) });
}

#[test]
fn an_arena_is_carved_anew_within_its_loan_unless_it_continues_elsewhere() {
    let mut regions = slab();
    let mut loan = regions.lend(request(0x401, true)).expect("fits two slots and the head");
    let arena = loan.relayout(Bytes(0x500)).expect("two whole slots and the head");
    assert_eq!((arena, loan.arena()), (AddrRange { start: Addr(0x1200), bytes: Bytes(0x500) }, arena));
    let error = loan.relayout(Bytes(0x501)).expect_err("more than is lent");
    assert_eq!((error, loan.arena()), (RegionError::TooLarge { needed: Bytes(0x501), lendable: Bytes(0x500) }, arena));
    loan.continue_in(AddrRange { start: Addr(0x9000), bytes: Bytes(0x80) });
    let error = loan.relayout(Bytes(0x100)).expect_err("a hybrid layout");
    assert_eq!((error, loan.arena()), (RegionError::HybridLayout { spill: Bytes(0x80) }, arena));
    regions.take_back(loan).expect("the loan that is out");
}

#[test]
fn a_head_beside_the_slab_is_lent_without_its_bytes_and_leases_on_it_end_where_it_moves() {
    let mut places = Places::in_one(Addr(0x1000), [Bytes(0x100); 4], Bytes(0x300));
    places.head = AddrRange { start: Addr(0x8000), bytes: Bytes(0x300) };
    places.head_in_slab = false;
    let mut regions = Regions::placed(places);
    let lease = regions.lease(regions.head());
    let error = regions.lend(request(0x301, true)).expect_err("three slots are all there is");
    assert_eq!(error, RegionError::TooLarge { needed: Bytes(0x301), lendable: Bytes(0x300) });
    let loan = regions.lend(request(0x201, true)).expect("three slots");
    assert_eq!((loan.slots().len(), loan.bytes_in_head(), loan.arena().end()), (3, Bytes::ZERO, Addr(0x1400)));
    assert_eq!((regions.owner(regions.head()), regions.honours(&lease)), (Owner::Prompt, false));
    regions.take_back(loan).expect("the loan that is out");
    regions.place_head(regions.head());
    assert!(regions.honours(&lease), "at the same address again");
    regions.place_head(AddrRange { start: Addr(0x9000), bytes: Bytes(0x300) });
    assert!(!regions.honours(&lease), "a lease on an address that the head has left");
    assert!(regions.honours(&regions.lease(regions.head())));
}

#[test]
fn slots_in_pieces_are_given_up_and_never_lent() {
    let mut places = Places::in_one(Addr(0x1000), [Bytes(0x100); 4], Bytes(0x300));
    places.slots[..2].fill(Some(AddrRange { start: Addr(0x7000), bytes: Bytes(0x100) }));
    places.slots[1] = Some(AddrRange { start: Addr(0x7100), bytes: Bytes(0x100) });
    places.main_first = 2;
    let mut regions = Regions::placed(places);
    let error = regions.lend(request(0x501, true)).expect_err("two slots and the head");
    assert_eq!(error, RegionError::TooLarge { needed: Bytes(0x501), lendable: Bytes(0x500) });
    let piece = regions.slot(SlotId(1));
    regions.place_slot(SlotId(1), None);
    assert_eq!((regions.n_slots(), regions.n_slots_in_use(), regions.slot_in_use(SlotId(1))), (4, 3, None));
    let loan = regions.lend(request(0x500, true)).expect("two slots and the head");
    assert_eq!(regions.owner(regions.slot(SlotId(0))), Owner::Decode);
    regions.take_back(loan).expect("the loan that is out");
    regions.place_slot(SlotId(1), Some(piece));
    assert_eq!(regions.n_slots_in_use(), 4);
}

#[test]
fn a_slab_that_is_placed_anew_honours_no_lease_of_before() {
    let mut regions = slab();
    let leases = [regions.lease(regions.head()), regions.lease(regions.slot(SlotId(0)))];
    regions.replace(Places::in_one(Addr(0x1000), [Bytes(0x100); 3], Bytes(0x300)));
    assert!(leases.iter().all(|lease| !regions.honours(lease)));
    assert_eq!((regions.n_slots(), regions.head().start), (3, Addr(0x1300)));
}

#[test]
fn a_head_that_stays_where_it_is_keeps_its_leases_though_the_slots_move() {
    let mut regions = slab();
    let (head, slot) = (regions.head(), regions.slot(SlotId(0)));
    let (of_head, of_slot) = (regions.lease(head), regions.lease(slot));
    let mut fewer = Places::in_one(slot.start.offset(slot.bytes), [Bytes(0x100); 3], head.bytes);
    assert_eq!(fewer.head, head);
    regions.replace(fewer.clone());
    assert!(regions.honours(&of_head) && !regions.honours(&of_slot));
    fewer.head.start = head.start.offset(Bytes(0x100));
    regions.replace(fewer);
    assert!(!regions.honours(&of_head));
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
        let mut regions = Regions::new(Addr(0x1000), vec![Bytes(SLOT); n_slots as usize], Bytes(head_bytes));
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
