//! How large each slot is: slots come in classes where the experts of layers differ in size.
//!
//! ```text
//! layers of large, small, small and small experts: | small | large | small | small | small | large | small | …
//! ```
//! A slot keeps its class. Along the slots the classes take turns by their share of the model's experts, so any first part has its share
//! of each, and so has any rest: a loan, which takes the last slots, bears on all layers alike. Sizes that differ by less than 2 % are one
//! class. The table has a slot for each routed expert; a plan uses the first so many.

use super::cache::ClassId;
use crate::model::ModelWeights;
use crate::units::{Bytes, SlotId};

/// Experts that waste no more than this of a slot, in percent, are of the slot's class.
const WASTE_PERCENT: u64 = 2;

/// Classes and sizes of all slots that a model can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotTable {
    /// Bytes of a slot of each class, largest class first.
    class_bytes: Vec<Bytes>,
    class_of_layer: Vec<ClassId>,
    class_of_slot: Vec<ClassId>,
    /// Bytes of the first so many slots; one entry more than there are slots.
    ends: Vec<Bytes>,
}

impl SlotTable {
    /// The table of a model.
    #[must_use]
    pub fn of(weights: &ModelWeights, n_expert: u32) -> Self {
        let sizes: Vec<Bytes> = weights.experts.iter().map(crate::model::weights::LayerExperts::slot_bytes).collect();
        Self::new(&sizes, n_expert)
    }

    /// The table of layers with `n_expert` experts of the given sizes each.
    ///
    /// # Panics
    /// Without any layer.
    #[must_use]
    pub fn new(layer_bytes: &[Bytes], n_expert: u32) -> Self {
        let class_bytes = class_sizes(layer_bytes);
        let class_of = |bytes: Bytes| class_bytes.iter().rposition(|&class| bytes <= class).expect("the first class is the largest");
        let class_of_layer: Vec<ClassId> = layer_bytes.iter().map(|&bytes| ClassId::try_from(class_of(bytes)).expect("bounded")).collect();
        let mut left = vec![0u64; class_bytes.len()];
        class_of_layer.iter().for_each(|&class| left[usize::from(class)] += u64::from(n_expert));
        let class_of_slot = turns(left);
        let sum = |so_far: &mut Bytes, class: &ClassId| {
            *so_far += class_bytes[usize::from(*class)];
            Some(*so_far)
        };
        let ends = std::iter::once(Bytes::ZERO).chain(class_of_slot.iter().scan(Bytes::ZERO, sum)).collect();
        Self { class_bytes, class_of_layer, class_of_slot, ends }
    }

    /// As many slots as there are routed experts.
    #[must_use]
    pub fn n_slots(&self) -> u32 {
        u32::try_from(self.class_of_slot.len()).expect("as many as routed experts")
    }

    /// Bytes of the largest class.
    #[must_use]
    pub fn largest(&self) -> Bytes {
        self.class_bytes[0]
    }

    /// Classes, each with the bytes of a slot and its number among the first `slots` slots, largest first.
    pub fn classes(&self, slots: u32) -> impl Iterator<Item = (Bytes, u32)> {
        let of_slots = &self.class_of_slot[..slots as usize];
        self.class_bytes.iter().enumerate().map(|(class, &bytes)| {
            let count = of_slots.iter().filter(|&&of_slot| usize::from(of_slot) == class).count();
            (bytes, u32::try_from(count).expect("at most all slots"))
        })
    }

    /// Class of each layer's experts.
    #[must_use]
    pub fn class_of_layer(&self) -> &[ClassId] {
        &self.class_of_layer
    }

    /// Classes of the first `slots` slots.
    #[must_use]
    pub fn class_of_slot(&self, slots: u32) -> &[ClassId] {
        &self.class_of_slot[..slots as usize]
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn bytes(&self, slot: SlotId) -> Bytes {
        self.class_bytes[usize::from(self.class_of_slot[slot.0 as usize])]
    }

    /// Bytes of each of the first `slots` slots.
    pub fn sizes(&self, slots: u32) -> impl Iterator<Item = Bytes> {
        (0..slots).map(|slot| self.bytes(SlotId(slot)))
    }

    /// Bytes of the first `slots` slots, which is where the next one begins.
    #[must_use]
    pub fn total(&self, slots: u32) -> Bytes {
        self.ends[slots as usize]
    }

    /// Bytes from slot number `first` to before slot number `end`; nothing where that is no range.
    #[must_use]
    pub fn span(&self, first: u32, end: u32) -> Bytes {
        self.total(end).saturating_sub(self.total(first))
    }

    /// Bytes of the last `count` of `slots` slots.
    #[must_use]
    pub fn last(&self, count: u32, slots: u32) -> Bytes {
        self.span(slots.saturating_sub(count), slots)
    }

    /// The most slots, from the first on, that fit `room`.
    #[must_use]
    pub fn fitting(&self, room: Bytes) -> u32 {
        u32::try_from(self.ends.partition_point(|&end| end <= room) - 1).expect("at most all slots")
    }

    /// The fewest of the last of `slots` slots whose bytes cover `bytes`; `None` where all of them do not.
    #[must_use]
    pub fn covering(&self, slots: u32, bytes: Bytes) -> Option<u32> {
        let kept_bytes = self.total(slots).checked_sub(bytes)?;
        Some(slots - self.fitting(kept_bytes).min(slots))
    }
}

/// Sizes of the classes, largest first.
fn class_sizes(layer_bytes: &[Bytes]) -> Vec<Bytes> {
    let mut sizes = layer_bytes.to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    let mut classes: Vec<Bytes> = Vec::new();
    for &bytes in sizes.iter().rev() {
        let wastes_little = |class: &Bytes| (*class - bytes).0 * 100 < class.0 * WASTE_PERCENT;
        // Numbers of classes are a byte; a file that had more sizes would get slots that waste more.
        if !classes.last().is_some_and(wastes_little) && classes.len() <= usize::from(ClassId::MAX) {
            classes.push(bytes);
        }
    }
    assert!(!classes.is_empty(), "a model has layers");
    classes
}

/// Slots of classes in turns: each slot goes to the class that is furthest behind its share of all.
fn turns(n_slots: Vec<u64>) -> Vec<ClassId> {
    let all: u64 = n_slots.iter().sum();
    let mut given = vec![0u64; n_slots.len()];
    let mut order = Vec::new();
    for at in 1..=all {
        // In units of slots x all: below 2^64 for any model that a file of today can hold, and compared in 128 bits all the same.
        let behind = |class: usize| i128::from(at) * i128::from(n_slots[class]) - i128::from(given[class]) * i128::from(all);
        let open = (0..n_slots.len()).filter(|&class| given[class] < n_slots[class]);
        let next = open.max_by_key(|&class| (behind(class), std::cmp::Reverse(class))).expect("slots are left");
        given[next] += 1;
        order.push(ClassId::try_from(next).expect("bounded"));
    }
    order
}

#[cfg(test)]
mod tests {
    //! Goal: sums are exact and every stretch of slots has its share of each class. Method: small tables looked at slot by slot, then
    //! random ones.
    use proptest::prelude::*;

    use super::*;

    fn table(layer_bytes: &[u64], n_expert: u32) -> SlotTable {
        SlotTable::new(&layer_bytes.iter().map(|&bytes| Bytes(bytes)).collect::<Vec<_>>(), n_expert)
    }

    #[test]
    fn classes_take_turns_by_their_share() {
        let table = table(&[1024, 256, 256, 256], 2);
        assert_eq!(table.class_of_layer(), [0, 1, 1, 1]);
        assert_eq!(table.class_of_slot(8), [1, 0, 1, 1, 1, 0, 1, 1]);
        assert_eq!((table.total(3), table.span(2, 4), table.largest()), (Bytes(1536), Bytes(512), Bytes(1024)));
        assert_eq!(table.classes(4).collect::<Vec<_>>(), [(Bytes(1024), 1), (Bytes(256), 3)]);
    }

    #[test]
    fn sizes_that_hardly_differ_are_one_class() {
        assert_eq!(table(&[10_000, 9_900, 9_801, 5_000], 1).class_of_layer(), [0, 0, 0, 1]);
        assert_eq!(table(&[10_000, 9_800, 9_604], 1).class_of_layer(), [0, 1, 2], "two in a hundred are worth a class");
    }

    #[test]
    fn the_fewest_last_slots_cover_a_request() {
        let table = table(&[1024, 256], 2);
        assert_eq!(table.class_of_slot(4), [0, 1, 0, 1]);
        for (bytes, lent) in [(0, 0), (1, 1), (256, 1), (257, 2), (1280, 2), (1281, 3), (1536, 3), (2560, 4)] {
            assert_eq!(table.covering(4, Bytes(bytes)), Some(lent), "{bytes}");
        }
        assert_eq!(table.covering(4, Bytes(2561)), None);
        assert_eq!(table.covering(3, Bytes(1024)), Some(1));
    }

    proptest! {
        #[test]
        fn any_stretch_has_its_share_of_every_class(layers in prop::collection::vec(1u64..6, 1..12), n_expert in 1u32..20, thousandths in 0u32..=1000) {
            let sizes: Vec<u64> = layers.iter().map(|size| size * 256).collect();
            let table = table(&sizes, n_expert);
            let all = table.n_slots();
            prop_assert_eq!(all as usize, layers.len() * n_expert as usize);
            let at = all * thousandths / 1000;
            for (class, (bytes, of_all)) in table.classes(all).enumerate() {
                prop_assert_eq!(of_all as usize, sizes.iter().filter(|&&size| size == bytes.0).count() * n_expert as usize);
                let before = table.class_of_slot(at).iter().filter(|&&of_slot| usize::from(of_slot) == class).count() as f64;
                let share = f64::from(of_all) * f64::from(at) / f64::from(all);
                let n_classes = table.class_bytes.len() as f64;
                prop_assert!((before - share).abs() <= n_classes, "{} of class {} before slot {}, its share is {}", before, class, at, share);
            }
            let sum: Bytes = (0..at).map(|slot| table.bytes(SlotId(slot))).sum();
            prop_assert_eq!(table.total(at), sum);
            prop_assert_eq!(table.fitting(sum), at);
            prop_assert_eq!(table.fitting(sum + Bytes(255)), at);
            prop_assert_eq!(table.covering(all, table.span(at, all)), Some(all - at));
        }
    }
}
