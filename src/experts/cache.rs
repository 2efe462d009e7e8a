//! Which experts deserve a slot: policy without device calls.
//!
//! Each use of an expert adds one to its count; counts decay at every round, so the cache follows the text. Slots are ordered: a loan
//! takes a suffix, so refills put the hottest experts into the lowest slots and the coldest end up where loans come first.

use crate::units::{ExpertId, SlotId};

/// Windows between two rounds of swaps.
const WINDOWS_PER_ROUND: u32 = 4;
/// Most swaps of a round.
const SWAPS_PER_ROUND: usize = 8;
/// What is left of a count after a round.
const DECAY: f32 = 0.9;
/// By how much an absentee's count must exceed a resident's to take its slot; keeps equals from changing places for ever.
const SWAP_MARGIN: f32 = 1.5;

/// One exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The slot that changes its expert.
    pub slot: SlotId,
    /// Who leaves.
    pub evicted: ExpertId,
    /// Who comes.
    pub admitted: ExpertId,
}

/// Residency and usage of all experts.
#[derive(Clone, Debug)]
pub struct ExpertCache {
    n_layer: u32,
    n_expert: u32,
    slots: Vec<Option<ExpertId>>,
    /// Slots without memory, which stay empty.
    retired: Vec<bool>,
    slot_of: Vec<Option<SlotId>>,
    counts: Vec<f32>,
    windows_in_round: u32,
}

impl ExpertCache {
    /// A cache with `n_slots` empty slots.
    #[must_use]
    pub fn new(n_slots: u32, n_layer: u32, n_expert: u32) -> Self {
        let n_routed = (n_layer * n_expert) as usize;
        Self {
            n_layer,
            n_expert,
            slots: vec![None; n_slots as usize],
            retired: vec![false; n_slots as usize],
            slot_of: vec![None; n_routed],
            counts: vec![0.0; n_routed],
            windows_in_round: 0,
        }
    }

    fn index(&self, expert: ExpertId) -> usize {
        debug_assert!(expert.layer < self.n_layer && expert.expert < self.n_expert, "{expert}");
        (expert.layer * self.n_expert + expert.expert) as usize
    }

    fn expert(&self, index: usize) -> ExpertId {
        let index = u32::try_from(index).expect("at most 2^32 experts");
        ExpertId { layer: index / self.n_expert, expert: index % self.n_expert }
    }

    /// The slot of an expert.
    #[must_use]
    pub fn slot_of(&self, expert: ExpertId) -> Option<SlotId> {
        self.slot_of[self.index(expert)]
    }

    /// The expert of a slot.
    #[must_use]
    pub fn expert_of(&self, slot: SlotId) -> Option<ExpertId> {
        self.slots[slot.0 as usize]
    }

    /// Experts that have a slot.
    #[must_use]
    pub fn n_resident(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    fn admit(&mut self, slot: SlotId, expert: ExpertId) {
        let index = self.index(expert);
        debug_assert!(self.slots[slot.0 as usize].is_none() && self.slot_of[index].is_none(), "{slot:?} or {expert} is taken");
        self.slots[slot.0 as usize] = Some(expert);
        self.slot_of[index] = Some(slot);
    }

    /// Takes the expert out of a slot.
    pub fn withdraw(&mut self, slot: SlotId) -> Option<ExpertId> {
        let expert = self.slots[slot.0 as usize].take()?;
        let index = self.index(expert);
        self.slot_of[index] = None;
        Some(expert)
    }

    /// A slot has lost its memory, or has it again. It must be empty.
    pub fn set_retired(&mut self, slot: SlotId, retired: bool) {
        debug_assert!(self.slots[slot.0 as usize].is_none(), "{slot:?} holds an expert");
        self.retired[slot.0 as usize] = retired;
    }

    /// Without any knowledge of the text: experts spread evenly over the layers, so that every layer has hits from the start.
    pub fn initial_fill(&mut self) -> Vec<(SlotId, ExpertId)> {
        let order = (0..self.n_expert).flat_map(|expert| (0..self.n_layer).map(move |layer| ExpertId { layer, expert }));
        let picks: Vec<_> = (0..).map(SlotId).zip(order).take(self.slots.len()).collect();
        for &(slot, expert) in &picks {
            self.admit(slot, expert);
        }
        picks
    }

    /// Fills the empty slots with the most used absentees, hottest into the lowest slot.
    pub fn refill(&mut self) -> Vec<(SlotId, ExpertId)> {
        let fillable = |slot: &SlotId| self.slots[slot.0 as usize].is_none() && !self.retired[slot.0 as usize];
        let empty: Vec<SlotId> = (0..).map(SlotId).take(self.slots.len()).filter(fillable).collect();
        let mut absent: Vec<usize> = (0..self.counts.len()).filter(|&index| self.slot_of[index].is_none()).collect();
        self.sort_by_heat(&mut absent);
        let picks: Vec<_> = empty.into_iter().zip(absent.into_iter().map(|index| self.expert(index))).collect();
        for &(slot, expert) in &picks {
            self.admit(slot, expert);
        }
        picks
    }

    /// Hottest first; equals by number, spread over the layers.
    fn sort_by_heat(&self, indices: &mut [usize]) {
        indices.sort_by(|&a, &b| {
            let spread = |index| {
                let expert = self.expert(index);
                (expert.expert, expert.layer)
            };
            self.counts[b].total_cmp(&self.counts[a]).then_with(|| spread(a).cmp(&spread(b)))
        });
    }

    /// Counts one use of an expert.
    pub fn note_use(&mut self, expert: ExpertId) {
        let index = self.index(expert);
        self.counts[index] += 1.0;
    }

    /// To be called once a window: every few windows, a bounded set of exchanges that pay, already entered in the books.
    pub fn plan_swaps(&mut self) -> Vec<Swap> {
        self.windows_in_round += 1;
        if self.windows_in_round < WINDOWS_PER_ROUND {
            return Vec::new();
        }
        self.windows_in_round = 0;
        let mut absent: Vec<usize> =
            (0..self.counts.len()).filter(|&index| self.slot_of[index].is_none() && self.counts[index] > SWAP_MARGIN).collect();
        self.sort_by_heat(&mut absent);
        let mut residents: Vec<usize> = self.slots.iter().flatten().map(|&expert| self.index(expert)).collect();
        self.sort_by_heat(&mut residents);
        let mut swaps = Vec::new();
        for (&hot, &cold) in absent.iter().zip(residents.iter().rev()).take(SWAPS_PER_ROUND) {
            if self.counts[hot] < self.counts[cold] + SWAP_MARGIN {
                break;
            }
            let (admitted, evicted) = (self.expert(hot), self.expert(cold));
            let slot = self.slot_of[cold].expect("a resident has a slot");
            self.withdraw(slot);
            self.admit(slot, admitted);
            swaps.push(Swap { slot, evicted, admitted });
        }
        for count in &mut self.counts {
            *count *= DECAY;
        }
        swaps
    }
}

#[cfg(test)]
mod tests {
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
        let filled: Vec<_> = cache.initial_fill().into_iter().map(|(_, expert)| expert).collect();
        assert_eq!(filled, [expert(0, 0), expert(1, 0), expert(0, 1), expert(1, 1)]);
    }

    #[test]
    fn refills_put_the_hottest_into_the_lowest_slot() {
        let mut cache = ExpertCache::new(3, 1, 8);
        cache.initial_fill();
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
        cache.initial_fill();
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
        cache.initial_fill();
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
        cache.initial_fill();
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
            let mut cache = ExpertCache::new(n_slots, 3, 12);
            let filled = cache.initial_fill();
            prop_assert_eq!(filled.len(), n_slots.min(36) as usize);
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
                            let count = |expert| before.counts[before.index(expert)];
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
                        let picks = cache.refill();
                        let heat: Vec<f32> = picks.iter().map(|&(_, expert)| cache.counts[cache.index(expert)]).collect();
                        prop_assert!(heat.is_sorted_by(|a, b| a >= b), "hottest first");
                        prop_assert!(picks.is_sorted_by(|a, b| a.0.0 < b.0.0), "lowest slot first");
                        prop_assert_eq!(cache.n_resident(), n_slots.min(36) as usize, "nothing stays empty that could be filled");
                        let coldest = heat.last().copied().unwrap_or(f32::MAX);
                        let left_out = (0..36).filter(|&index| cache.slot_of[index].is_none()).map(|index| cache.counts[index]);
                        prop_assert!(left_out.fold(0.0, f32::max) <= coldest, "nobody hotter was left out");
                    }
                }
                check_books(&cache);
            }
        }
    }
}
