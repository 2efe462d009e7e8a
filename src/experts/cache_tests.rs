//! Goal: the books always agree with each other and the policy follows use. Method: small caches with known counts, then random
//! sequences of everything that can happen to one.
use proptest::prelude::*;

use super::*;

fn expert(layer: u32, expert: u32) -> ExpertId {
    ExpertId { layer, expert }
}

#[test]
fn the_first_fill_gives_every_layer_its_share() {
    let mut cache = ExpertCache::new(4, 2, 8);
    let filled: Vec<_> = cache.refill().into_iter().map(|(_, expert)| expert).collect();
    assert_eq!(filled, [expert(0, 0), expert(1, 0), expert(0, 1), expert(1, 1)]);
}

#[test]
fn refills_put_the_hottest_into_the_lowest_slot() {
    let mut cache = ExpertCache::new(3, 1, 8);
    cache.refill();
    for _ in 0..3 {
        cache.note_use(expert(0, 6));
    }
    cache.note_use(expert(0, 2));
    for slot in [1, 2] {
        cache.withdraw(SlotId(slot));
    }
    assert_eq!(cache.refill(), [(SlotId(1), expert(0, 6)), (SlotId(2), expert(0, 2))]);
    assert_eq!(cache.n_resident(), 3);
}

#[test]
fn a_slot_without_memory_stays_empty_until_it_has_some_again() {
    let mut cache = ExpertCache::new(3, 1, 8);
    cache.refill();
    cache.note_use(expert(0, 1));
    cache.withdraw(SlotId(1));
    cache.set_retired(SlotId(1), true);
    assert_eq!((cache.refill(), cache.n_resident()), (Vec::new(), 2));
    cache.set_retired(SlotId(1), false);
    assert_eq!(cache.refill(), [(SlotId(1), expert(0, 1))]);
}

#[test]
fn a_hot_absentee_takes_the_coldest_slot_and_equals_stay() {
    let mut cache = ExpertCache::new(2, 1, 4);
    cache.refill();
    for _ in 0..8 {
        cache.note_use(expert(0, 0));
        cache.note_use(expert(0, 3));
    }
    let swaps: Vec<_> = (0..WINDOWS_PER_ROUND).flat_map(|_| cache.plan_swaps()).collect();
    assert_eq!(swaps, [Swap { slot: SlotId(1), evicted: expert(0, 1), admitted: expert(0, 3) }]);
    let later: Vec<_> = (0..WINDOWS_PER_ROUND).flat_map(|_| cache.plan_swaps()).collect();
    assert!(later.is_empty(), "{later:?}");
}

#[test]
fn counts_decay_so_that_the_cache_follows_the_text() {
    let mut cache = ExpertCache::new(1, 1, 3);
    cache.refill();
    for _ in 0..100 {
        cache.note_use(expert(0, 0));
    }
    // From now on the text uses another expert, once a window.
    let mut windows = 0;
    while cache.slot_of(expert(0, 2)).is_none() {
        cache.note_use(expert(0, 2));
        cache.plan_swaps();
        windows += 1;
        assert!(windows < 200, "the old favourite stays for ever");
    }
    assert!(windows > WINDOWS_PER_ROUND, "one window does not turn the cache over");
}

#[test]
fn what_was_learned_decides_where_the_text_says_nothing_and_the_text_decides_soon() {
    let mut cache = ExpertCache::new(2, 1, 6);
    cache.set_learned(&[0.0, 10.0, 0.0, 0.0, 400.0, 0.0]);
    assert_eq!(cache.refill(), [(SlotId(0), expert(0, 4)), (SlotId(1), expert(0, 1))]);
    assert!(cache.heat(expert(0, 4)) <= LEARNED_HEAT);
    for window in 0.. {
        if cache.slot_of(expert(0, 5)).is_some() {
            break;
        }
        assert!(window < 3 * WINDOWS_PER_ROUND, "a new favourite waits for ever");
        cache.note_use(expert(0, 5));
        cache.plan_swaps();
    }
    assert!(cache.slot_of(expert(0, 4)).is_some(), "the colder one of the old left");
}

#[test]
fn cold_residents_of_kept_slots_make_room_for_the_hottest_of_a_loan() {
    let mut cache = ExpertCache::new(8, 1, 10);
    cache.refill();
    for hot in [4, 5, 6, 0] {
        (0..hot).for_each(|_| cache.note_use(expert(0, hot)));
    }
    // Nothing is refilled, so nothing is moved.
    assert_eq!(cache.make_room(), []);
    for slot in 4..8 {
        cache.withdraw(SlotId(slot));
    }
    // Of experts 0 to 3, all unused, the last is the coldest; four slots to refill allow for one.
    assert_eq!(cache.make_room(), [(SlotId(3), expert(0, 3))]);
    assert_eq!(cache.refill()[..3], [(SlotId(3), expert(0, 6)), (SlotId(4), expert(0, 5)), (SlotId(5), expert(0, 4))]);
    assert_eq!(cache.n_resident(), 8);
}

#[test]
fn each_class_of_slots_serves_its_own_layers() {
    // Layers 0 and 2 have large experts, layer 1 small ones.
    let mut cache = ExpertCache::with_classes(vec![0, 1, 0, 1], vec![0, 1, 0], 4);
    let filled = cache.refill();
    assert_eq!(filled, [(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 1, 1)].map(|(slot, layer, number)| (SlotId(slot), expert(layer, number))));
    // The hottest absentee of layer 1 cannot take the coldest slot, which is a large one.
    (0..9).for_each(|_| cache.note_use(expert(1, 3)));
    (0..5).for_each(|_| cache.note_use(expert(1, 1)));
    let swaps: Vec<_> = (0..WINDOWS_PER_ROUND).flat_map(|_| cache.plan_swaps()).collect();
    assert_eq!(swaps, [Swap { slot: SlotId(1), evicted: expert(1, 0), admitted: expert(1, 3) }]);
}

/// What may happen to a cache.
#[derive(Clone, Debug)]
enum Step {
    Use(u32, u32),
    Window,
    Lend(u32),
    Home,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u32..3, 0u32..12).prop_map(|(layer, expert)| Step::Use(layer, expert)),
        3 => Just(Step::Window),
        1 => (0u32..20).prop_map(Step::Lend),
        1 => Just(Step::Home),
    ]
}

fn check_books(cache: &ExpertCache) {
    for slot in (0..u32::try_from(cache.slots.len()).unwrap()).map(SlotId) {
        if let Some(expert) = cache.expert_of(slot) {
            assert_eq!(cache.slot_of(expert), Some(slot), "{slot:?} and {expert} disagree");
        }
    }
    let with_slot =
        (0..3).flat_map(|layer| (0..12).map(move |number| expert(layer, number))).filter(|&expert| cache.slot_of(expert).is_some());
    assert_eq!(with_slot.count(), cache.n_resident(), "an expert has two slots or a slot two experts");
}

proptest! {
    #[test]
    fn a_slot_has_one_expert_and_an_expert_at_most_one_slot(n_slots in 1u32..40, steps in prop::collection::vec(step(), 1..200)) {
        let class_of_slot: Vec<ClassId> = (0..n_slots).map(|slot| ClassId::from(slot % 3 == 1)).collect();
        // Of the 36 experts 24 are of class 0.
        let resident_most = [(0, 24), (1, 12)].map(|(class, experts)| class_of_slot.iter().filter(|&&of_slot| of_slot == class).count().min(experts));
        let resident_most: usize = resident_most.iter().sum();
        let mut cache = ExpertCache::with_classes(class_of_slot, vec![0, 1, 0], 12);
        let filled = cache.refill();
        prop_assert_eq!(filled.len(), resident_most);
        for step in steps {
            match step {
                Step::Use(layer, number) => cache.note_use(expert(layer, number)),
                Step::Window => {
                    let before = cache.clone();
                    let swaps = cache.plan_swaps();
                    prop_assert!(swaps.len() <= SWAPS_PER_ROUND);
                    for swap in swaps {
                        prop_assert_eq!(before.slot_of(swap.evicted), Some(swap.slot));
                        prop_assert_eq!(before.slot_of(swap.admitted), None);
                        prop_assert_eq!(cache.expert_of(swap.slot), Some(swap.admitted));
                        let count = |expert| before.heat(expert);
                        prop_assert!(count(swap.admitted) >= count(swap.evicted) + SWAP_MARGIN, "a swap must pay");
                    }
                }
                Step::Lend(slots) => {
                    for slot in n_slots.saturating_sub(slots).max(1)..n_slots {
                        cache.withdraw(SlotId(slot));
                        prop_assert_eq!(cache.expert_of(SlotId(slot)), None);
                    }
                }
                Step::Home => {
                    let before = cache.clone();
                    let left = cache.make_room();
                    for &(slot, expert) in &left {
                        prop_assert_eq!(before.expert_of(slot), Some(expert));
                    }
                    let picks = cache.refill();
                    let came = |class: usize| picks.iter().filter(move |(_, expert)| [0usize, 1, 0][expert.layer as usize] == class);
                    prop_assert!(picks.iter().map(|&(_, expert)| cache.heat(expert)).is_sorted_by(|a, b| a >= b), "hottest first");
                    prop_assert_eq!(cache.n_resident(), resident_most, "nothing stays empty that could be filled");
                    for class in 0..2 {
                        prop_assert!(came(class).is_sorted_by(|a, b| a.0.0 < b.0.0), "lowest slot first");
                        let coldest = came(class).next_back().map_or(f32::MAX, |&(_, expert)| cache.heat(expert));
                        let left_out = (0..36).filter(|&index| cache.slot_of[index].is_none() && cache.class(index) == class);
                        prop_assert!(left_out.map(|index| cache.heats()(index)).fold(0.0, f32::max) <= coldest, "nobody hotter was left out");
                    }
                }
            }
            check_books(&cache);
        }
    }
}

#[test]
fn a_layer_with_a_floor_keeps_its_hottest_experts_whatever_the_heat_of_others() {
    let mut cache = ExpertCache::new(6, 3, 8);
    cache.keep_at_least(2, 2);
    let of_floor = |cache: &ExpertCache| (0..8).filter(|&expert| cache.slot_of(ExpertId { layer: 2, expert }).is_some()).count();
    // Others are hotter, and there are more of them than slots.
    let others: Vec<_> = (0..8).map(|expert| ExpertId { layer: 0, expert }).collect();
    others.iter().for_each(|&expert| (0..20).for_each(|_| cache.note_use(expert)));
    cache.refill();
    assert_eq!(of_floor(&cache), 2);
    let favourite = ExpertId { layer: 2, expert: 7 };
    for _ in 0..40 {
        others.iter().for_each(|&expert| (0..20).for_each(|_| cache.note_use(expert)));
        (0..5).for_each(|_| cache.note_use(favourite));
        cache.plan_swaps();
        assert!(of_floor(&cache) >= 2);
    }
    // A loan takes them like any other, and they come first again.
    for slot in (0..6).map(SlotId) {
        cache.withdraw(slot);
    }
    cache.refill();
    assert_eq!(of_floor(&cache), 2);
    assert!(cache.slot_of(favourite).is_some(), "the hottest of the layer are among them");
}
