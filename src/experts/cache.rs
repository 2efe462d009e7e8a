//! Which experts deserve a slot: policy without device calls.
//!
//! An expert's *heat* has two parts. Its recent uses decay within some tens of windows, so the cache follows the text. What was learned
//! of it decays within thousands, is kept in a [profile](super::profile) from one start to the next, and decides among experts that the
//! text has not touched lately.
//!
//! Slots come in classes, each for the experts of some layers: an expert only ever lies in a slot of its layer's class. Slots are ordered:
//! a loan takes a suffix, so refills put the hottest experts into the lowest slots of their class and the coldest end up where loans come
//! first.

use crate::units::{ExpertId, SlotId};

/// Windows between two rounds of swaps.
const WINDOWS_PER_ROUND: u32 = 4;
/// Most swaps of a round.
const SWAPS_PER_ROUND: usize = 8;
/// What is left of the recent uses after a round.
const DECAY: f32 = 0.9;
/// What is left of the learned uses after a round.
const LEARNED_DECAY: f32 = 0.999;
/// Heat of the expert that was learned to be the hottest, while the text does not use it: as many recent uses.
const LEARNED_HEAT: f32 = 8.0;
/// By how much an absentee's heat must exceed a resident's to take its slot; keeps equals from changing places for ever.
const SWAP_MARGIN: f32 = 1.5;
/// For so many slots to be refilled, one kept resident may make room for a hotter absentee.
const REFILLS_PER_PROMOTION: usize = 4;

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

/// Number of a class of slots.
pub type ClassId = u8;

/// Residency and usage of all experts.
#[derive(Clone, Debug)]
pub struct ExpertCache {
    n_expert: u32,
    slots: Vec<Option<ExpertId>>,
    /// Class of each slot.
    class_of_slot: Vec<ClassId>,
    /// Class of each layer's experts.
    class_of_layer: Vec<ClassId>,
    n_classes: usize,
    /// Slots without memory, which stay empty.
    retired: Vec<bool>,
    slot_of: Vec<Option<SlotId>>,
    recent: Vec<f32>,
    learned: Vec<f32>,
    windows_in_round: u32,
    /// A layer whose hottest experts, so many, keep their slots whatever the others' heat.
    floor: Option<(u32, usize)>,
}

impl ExpertCache {
    /// A cache with `n_slots` empty slots, each of which may hold any expert.
    #[must_use]
    pub fn new(n_slots: u32, n_layer: u32, n_expert: u32) -> Self {
        Self::with_classes(vec![0; n_slots as usize], vec![0; n_layer as usize], n_expert)
    }

    /// A cache with empty slots of the given classes, for layers of `n_expert` experts whose classes are `class_of_layer`.
    #[must_use]
    pub fn with_classes(class_of_slot: Vec<ClassId>, class_of_layer: Vec<ClassId>, n_expert: u32) -> Self {
        let n_routed = class_of_layer.len() * n_expert as usize;
        let n_classes = class_of_slot.iter().chain(&class_of_layer).max().map_or(0, |&last| usize::from(last) + 1);
        Self {
            n_expert,
            slots: vec![None; class_of_slot.len()],
            retired: vec![false; class_of_slot.len()],
            class_of_slot,
            class_of_layer,
            n_classes,
            slot_of: vec![None; n_routed],
            recent: vec![0.0; n_routed],
            learned: vec![0.0; n_routed],
            windows_in_round: 0,
            floor: None,
        }
    }

    /// From here on the hottest `count` experts of `layer` come first when slots are filled and never make room for others.
    pub fn keep_at_least(&mut self, layer: u32, count: u32) {
        self.floor = Some((layer, count as usize));
    }

    /// Experts below the floor among `by_heat`, which lists experts, hottest first.
    fn below_floor(&self, by_heat: &[usize]) -> Vec<usize> {
        let Some((layer, count)) = self.floor else { return Vec::new() };
        by_heat.iter().copied().filter(|&index| self.expert(index).layer == layer).take(count).collect()
    }

    fn index(&self, expert: ExpertId) -> usize {
        debug_assert!((expert.layer as usize) < self.class_of_layer.len() && expert.expert < self.n_expert, "{expert}");
        (expert.layer * self.n_expert + expert.expert) as usize
    }

    fn expert(&self, index: usize) -> ExpertId {
        let index = u32::try_from(index).expect("at most 2^32 experts");
        ExpertId { layer: index / self.n_expert, expert: index % self.n_expert }
    }

    /// Class of an expert, by its index.
    fn class(&self, index: usize) -> usize {
        usize::from(self.class_of_layer[index / self.n_expert as usize])
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

    /// How much an expert deserves a slot.
    #[must_use]
    pub fn heat(&self, expert: ExpertId) -> f32 {
        self.heats()(self.index(expert))
    }

    /// Heat by index; equal for all while nothing is known.
    fn heats(&self) -> impl Fn(usize) -> f32 {
        let hottest = self.learned.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        move |index| self.recent[index] + LEARNED_HEAT * (self.learned[index] / hottest)
    }

    /// Uses learned of each expert, layer by layer: what a profile keeps.
    #[must_use]
    pub fn learned(&self) -> &[f32] {
        &self.learned
    }

    /// Takes over what an earlier start has learned.
    ///
    /// # Panics
    /// Where `uses` is not of this cache's experts.
    pub fn set_learned(&mut self, uses: &[f32]) {
        self.learned.copy_from_slice(uses);
    }

    fn admit(&mut self, slot: SlotId, expert: ExpertId) {
        let index = self.index(expert);
        debug_assert!(self.slots[slot.0 as usize].is_none() && self.slot_of[index].is_none(), "{slot:?} or {expert} is taken");
        debug_assert_eq!(usize::from(self.class_of_slot[slot.0 as usize]), self.class(index), "{slot:?} is not of the class of {expert}");
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

    /// Empty slots that can be filled, by class, lowest first.
    fn empty_slots(&self) -> Vec<Vec<SlotId>> {
        let mut empty = vec![Vec::new(); self.n_classes];
        for slot in (0..).map(SlotId).take(self.slots.len()) {
            let at = slot.0 as usize;
            if self.slots[at].is_none() && !self.retired[at] {
                empty[usize::from(self.class_of_slot[at])].push(slot);
            }
        }
        empty
    }

    /// Fills the empty slots with the hottest absentees, hottest first and into the lowest slot of their class. Where nothing is known,
    /// experts are spread evenly over the layers, so that every layer has hits from the start.
    pub fn refill(&mut self) -> Vec<(SlotId, ExpertId)> {
        let mut empty: Vec<_> = self.empty_slots().into_iter().map(Vec::into_iter).collect();
        let mut n_empty: usize = empty.iter().map(ExactSizeIterator::len).sum();
        let mut picks = Vec::with_capacity(n_empty);
        let absent = self.by_heat((0..self.recent.len()).filter(|&index| self.slot_of[index].is_none()).collect());
        let n_kept = self.below_floor(&self.residents()).len();
        let first: Vec<usize> = self.below_floor(&absent).into_iter().take(self.floor.map_or(0, |(_, count)| count - n_kept)).collect();
        for &index in first.iter().chain(absent.iter().filter(|index| !first.contains(index))) {
            if n_empty == 0 {
                break;
            }
            if let Some(slot) = empty[self.class(index)].next() {
                picks.push((slot, self.expert(index)));
                n_empty -= 1;
            }
        }
        for &(slot, expert) in &picks {
            self.admit(slot, expert);
        }
        picks
    }

    /// To be called before a refill: cold residents leave kept slots that lie before the ones to be refilled, so that hotter absentees
    /// come to lie there. Otherwise slots that are never lent would keep what was hot long ago, and each loan would take the hottest.
    pub fn make_room(&mut self) -> Vec<(SlotId, ExpertId)> {
        let empty = self.empty_slots();
        let absent = self.by_heat((0..self.recent.len()).filter(|&index| self.slot_of[index].is_none()).collect());
        let residents = self.may_leave();
        let mut leaving = Vec::new();
        let heat = self.heats();
        for (class, empty) in empty.iter().enumerate() {
            let Some(&last_empty) = empty.last() else { continue };
            let slot = |index: usize| self.slot_of[index].expect("a resident has a slot");
            let hottest = absent.iter().filter(|&&index| self.class(index) == class);
            let coldest = residents.iter().rev().filter(|&&index| self.class(index) == class && slot(index) < last_empty);
            let pairs = hottest.zip(coldest).take(empty.len().div_ceil(REFILLS_PER_PROMOTION));
            let paying = pairs.take_while(|&(&hot, &cold)| heat(hot) >= heat(cold) + SWAP_MARGIN);
            leaving.extend(paying.map(|(_, &cold)| (slot(cold), self.expert(cold))));
        }
        drop(heat);
        for &(slot, _) in &leaving {
            self.withdraw(slot);
        }
        leaving
    }

    /// Residents, hottest first.
    fn residents(&self) -> Vec<usize> {
        self.by_heat(self.slots.iter().flatten().map(|&expert| self.index(expert)).collect())
    }

    /// Residents that may make room for others, hottest first.
    fn may_leave(&self) -> Vec<usize> {
        let mut residents = self.residents();
        let kept = self.below_floor(&residents);
        residents.retain(|index| !kept.contains(index));
        residents
    }

    /// Hottest first; equals by number, spread over the layers.
    fn by_heat(&self, mut indices: Vec<usize>) -> Vec<usize> {
        let heat = self.heats();
        indices.sort_by(|&a, &b| {
            let spread = |index| {
                let expert = self.expert(index);
                (expert.expert, expert.layer)
            };
            heat(b).total_cmp(&heat(a)).then_with(|| spread(a).cmp(&spread(b)))
        });
        indices
    }

    /// Counts one use of an expert.
    pub fn note_use(&mut self, expert: ExpertId) {
        let index = self.index(expert);
        self.recent[index] += 1.0;
        self.learned[index] += 1.0;
    }

    /// To be called once a window: every few windows, a bounded set of exchanges that pay, already entered in the books.
    pub fn plan_swaps(&mut self) -> Vec<Swap> {
        if !self.round_is_over() {
            return Vec::new();
        }
        let swaps = self.paying_swaps();
        for swap in &swaps {
            self.withdraw(swap.slot);
            self.admit(swap.slot, swap.admitted);
        }
        self.decay();
        swaps
    }

    /// As [`ExpertCache::plan_swaps`], for a window after which nothing can be exchanged: uses decay all the same.
    pub fn skip_swaps(&mut self) {
        if self.round_is_over() {
            self.decay();
        }
    }

    fn round_is_over(&mut self) -> bool {
        self.windows_in_round = (self.windows_in_round + 1) % WINDOWS_PER_ROUND;
        self.windows_in_round == 0
    }

    /// The hottest absentees with the coldest residents of their classes.
    fn paying_swaps(&self) -> Vec<Swap> {
        let heat = self.heats();
        // Most absentees were not used lately; they need not be sorted.
        let is_candidate = |&index: &usize| self.slot_of[index].is_none() && heat(index) >= SWAP_MARGIN;
        let absent = self.by_heat((0..self.recent.len()).filter(is_candidate).collect());
        let residents = self.may_leave();
        let mut coldest: Vec<_> =
            (0..self.n_classes).map(|class| residents.iter().rev().filter(move |&&index| self.class(index) == class)).collect();
        let mut swaps = Vec::new();
        for hot in absent {
            if swaps.len() == SWAPS_PER_ROUND {
                break;
            }
            // A class whose coldest resident stays has no other that would go for a colder absentee either: the heat only falls from here.
            let Some(&cold) = coldest[self.class(hot)].next() else { continue };
            if heat(hot) >= heat(cold) + SWAP_MARGIN {
                let slot = self.slot_of[cold].expect("a resident has a slot");
                swaps.push(Swap { slot, evicted: self.expert(cold), admitted: self.expert(hot) });
            }
        }
        swaps
    }

    fn decay(&mut self) {
        self.recent.iter_mut().for_each(|uses| *uses *= DECAY);
        self.learned.iter_mut().for_each(|uses| *uses *= LEARNED_DECAY);
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
