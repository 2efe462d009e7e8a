//! Routed experts: all of them in host memory, the hottest in VRAM slots.
//!
//! [`store`] knows where each expert lies in host memory, [`cache`] decides which ones deserve a slot (no device calls), [`transfer`]
//! copies them. [`Experts`] ties the three together and keeps the device's expert table true: each record points to a slot whose
//! contents have arrived, or to host memory.

pub mod cache;
mod counters;
pub mod profile;
pub mod ram;
pub mod slot_table;
pub mod store;
pub mod transfer;

use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

pub use cache::ExpertCache;
pub use counters::{ExpertCounters, LinkBytes};
pub use profile::{ProfileError, ProfileFile};
pub use slot_table::SlotTable;
pub use store::{ExpertStore, StoreError};
use transfer::{ExpertTable, SlotLayout};

use crate::backend::op::ExpertAddrs;
use crate::backend::{AddrRange, Backend, Result};
use crate::model::ModelWeights;
use crate::units::{Bytes, ExpertId, SlotId};

/// A slot whose expert is on its way.
struct Refilling {
    slot: SlotId,
    expert: ExpertId,
}

/// Why an expert is copied into a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    /// The slot was empty.
    Refill,
    /// A colder expert made room.
    Swap,
}

/// What is known of an expert's copy for a prompt. A use is told before or after its copy is queued.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum PromptCopy {
    /// Every copy was used, every use has its copy.
    #[default]
    Even,
    /// Copied and not used yet.
    Unread,
    /// Used, the copy is still to be queued.
    Owed,
}

/// The experts of one engine.
pub struct Experts<B: Backend> {
    backend: Rc<B>,
    /// Where experts lie in host memory.
    pub store: ExpertStore<B>,
    cache: ExpertCache,
    table: ExpertTable<B>,
    slot_layouts: Vec<SlotLayout>,
    copy_stream: B::Stream,
    arrivals: Vec<B::Event>,
    refilling: Vec<Refilling>,
    /// For each slot, whether it is in `refilling`.
    on_the_way: Vec<bool>,
    /// The table without the experts that leave is on its way: copies into their slots wait for it.
    told: B::Event,
    /// For each expert.
    prompt_copies: Vec<PromptCopy>,
    /// Hits in windows by layer.
    layer_hits: Vec<u64>,
    counters: ExpertCounters,
}

impl<B: Backend> Experts<B> {
    /// Sets up an empty cache of `n_slots` slots; every record of the table points to host memory.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, store: ExpertStore<B>, weights: &ModelWeights, n_slots: u32, table: AddrRange) -> Result<Self> {
        let n_layer = u32::try_from(weights.experts.len()).expect("checked by the model's shape");
        let arrivals = (0..n_slots).map(|_| backend.create_event()).collect::<Result<_>>()?;
        let mut table = ExpertTable::new(Rc::clone(&backend), table, n_layer, store.n_expert())?;
        for expert in store.all() {
            table.set(expert, store.addrs(expert));
        }
        let slot_table = SlotTable::of(weights, store.n_expert());
        let n_routed = (n_layer * store.n_expert()) as usize;
        Ok(Self {
            copy_stream: backend.create_stream()?,
            told: backend.create_event()?,
            slot_layouts: weights.experts.iter().map(SlotLayout::of).collect(),
            cache: ExpertCache::with_classes(
                slot_table.class_of_slot(n_slots).to_vec(),
                slot_table.class_of_layer().to_vec(),
                store.n_expert(),
            ),
            backend,
            store,
            table,
            arrivals,
            refilling: Vec::new(),
            on_the_way: vec![false; n_slots as usize],
            prompt_copies: vec![PromptCopy::Even; n_routed],
            layer_hits: vec![0; n_layer as usize],
            counters: ExpertCounters::default(),
        })
    }

    /// To be called when a prompt is read or given up: what was copied for it and not used until now counts as dropped.
    pub fn end_prompt(&mut self) {
        for at in 0..self.prompt_copies.len() {
            self.settle(at, PromptCopy::Even);
        }
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> ExpertCounters {
        ExpertCounters { link_bytes: self.counters.link.total(), ..self.counters }
    }

    /// Uses in windows that found their expert in a slot, layer by layer, since the start.
    #[must_use]
    pub fn layer_hits(&self) -> &[u64] {
        &self.layer_hits
    }

    /// The policy's view, for tests and reports.
    #[must_use]
    pub fn cache(&self) -> &ExpertCache {
        &self.cache
    }

    /// As [`ExpertCache::keep_at_least`].
    pub fn keep_at_least(&mut self, layer: u32, count: u32) {
        self.cache.keep_at_least(layer, count);
    }

    /// Takes over what an earlier start has learned; see [`ExpertCache::set_learned`].
    pub fn set_learned(&mut self, uses: &[f32]) {
        self.cache.set_learned(uses);
    }

    /// Starts filling all slots, hottest experts first.
    ///
    /// # Errors
    /// The backend's.
    pub fn fill(&mut self, slot_range: impl Fn(SlotId) -> AddrRange) -> Result<()> {
        let picks = self.cache.refill();
        self.start_fills(&picks, |_| Reason::Refill, slot_range)
    }

    /// Where a resident expert's weights lie; `None` where it has no slot or has not arrived.
    #[must_use]
    pub fn resident(&self, expert: ExpertId, slot_range: impl Fn(SlotId) -> AddrRange) -> Option<ExpertAddrs> {
        let slot = self.cache.slot_of(expert)?;
        (!self.on_the_way[slot.0 as usize]).then(|| self.slot_layout(expert).addrs(slot_range(slot).start))
    }

    /// Takes the experts out of `slots`, which are about to be lent: their records point to host memory once `stream` gets there.
    ///
    /// # Errors
    /// The backend's.
    pub fn withdraw(&mut self, slots: impl Iterator<Item = SlotId>, stream: &B::Stream) -> Result<()> {
        for slot in slots {
            if self.on_the_way[slot.0 as usize] {
                // A copy on its way would land in the prompt buffers.
                self.backend.synchronise_event(&self.arrivals[slot.0 as usize])?;
                self.refilling.retain(|refilling| refilling.slot != slot);
                self.on_the_way[slot.0 as usize] = false;
            }
            if let Some(expert) = self.cache.withdraw(slot) {
                self.table.set(expert, self.store.addrs(expert));
            }
        }
        self.upload_table(stream)
    }

    /// Brings the device's table up to date once `stream` gets there, where it is not.
    ///
    /// # Errors
    /// The backend's; the table then still counts as old.
    pub fn upload_table(&mut self, stream: &B::Stream) -> Result<()> {
        self.table.upload(stream)
    }

    /// `slots` lose their memory: their experts leave, nothing is on its way to them afterwards, and they stay empty.
    ///
    /// # Errors
    /// The backend's; the slots must not lose their memory then.
    pub fn retire(&mut self, slots: impl Iterator<Item = SlotId> + Clone, stream: &B::Stream) -> Result<()> {
        self.withdraw(slots.clone(), stream)?;
        // Windows queued before may still read the slots.
        self.backend.synchronise(stream)?;
        for slot in slots {
            self.cache.set_retired(slot, true);
        }
        Ok(())
    }

    /// `slots` have memory again; the next refill fills them.
    pub fn revive(&mut self, slots: impl Iterator<Item = SlotId>) {
        for slot in slots {
            self.cache.set_retired(slot, false);
        }
    }

    /// Starts filling slots that came home with the experts that deserve them, hottest first. The copies wait for `free`. A few cold
    /// experts of kept slots make room for hotter ones; the next window hears of that before it looks for them.
    ///
    /// # Errors
    /// The backend's.
    pub fn refill(&mut self, free: &B::Event, slot_range: impl Fn(SlotId) -> AddrRange) -> Result<()> {
        self.backend.wait(&self.copy_stream, free)?;
        // An expert that is still on its way would arrive in a slot that holds another by then.
        let left = if self.refilling.is_empty() { self.cache.make_room() } else { Vec::new() };
        for &(_, expert) in &left {
            self.table.set(expert, self.store.addrs(expert));
        }
        let picks = self.cache.refill();
        let left_slots: HashSet<SlotId> = left.iter().map(|&(slot, _)| slot).collect();
        let reason = |slot| if left_slots.contains(&slot) { Reason::Swap } else { Reason::Refill };
        self.start_fills(&picks, reason, slot_range)
    }

    /// Starts copies into slots whose experts are in the cache's books already. Where one cannot be started, it and those behind it
    /// leave the books again: an expert without a copy must not be taken for resident.
    fn start_fills(
        &mut self,
        picks: &[(SlotId, ExpertId)],
        reason: impl Fn(SlotId) -> Reason,
        slot_range: impl Fn(SlotId) -> AddrRange,
    ) -> Result<()> {
        for (at, &(slot, expert)) in picks.iter().enumerate() {
            let started = self.start_fill(slot, expert, reason(slot), slot_range(slot));
            if let Err(error) = started {
                for &(slot, _) in &picks[at..] {
                    self.cache.withdraw(slot);
                }
                // A part of the copy may be on its way to a slot that now counts as empty.
                let _ = self.backend.synchronise(&self.copy_stream);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Publishes experts that have arrived: their records point to slots once `stream` gets there. With `wait`, all of them.
    ///
    /// # Errors
    /// The backend's, including faults of the copies.
    pub fn publish_arrivals(&mut self, stream: &B::Stream, wait: bool, slot_range: impl Fn(SlotId) -> AddrRange) -> Result<()> {
        let mut waiting = std::mem::take(&mut self.refilling).into_iter();
        let mut failed = None;
        for Refilling { slot, expert } in waiting.by_ref() {
            let event = &self.arrivals[slot.0 as usize];
            let arrived = if wait { self.backend.synchronise_event(event).map(|()| true) } else { self.backend.is_done(event) };
            if let Ok(true) = arrived {
                self.table.set(expert, self.slot_layout(expert).addrs(slot_range(slot).start));
                self.on_the_way[slot.0 as usize] = false;
            } else {
                self.refilling.push(Refilling { slot, expert });
            }
            if let Err(error) = arrived {
                failed = Some(error);
                break;
            }
        }
        self.refilling.extend(waiting);
        match failed {
            Some(error) => Err(error),
            None => self.upload_table(stream),
        }
    }

    /// Slots whose experts are still on their way.
    #[must_use]
    pub fn n_refilling(&self) -> usize {
        self.refilling.len()
    }

    /// Takes note of the experts that a window used and, now and then, exchanges a few cold residents for hot absentees.
    /// `routes` `[n_layer, rows, n_expert_used]` are the experts of all rows. An expert that several rows of a window use is one
    /// use: its weights are read once.
    ///
    /// # Errors
    /// The backend's.
    pub fn note_window(
        &mut self,
        routes: &[u32],
        n_layer: u32,
        stream: &B::Stream,
        slot_range: impl Fn(SlotId) -> AddrRange,
    ) -> Result<()> {
        self.note_routes(routes, 0..n_layer, &slot_range);
        if self.refilling.is_empty() {
            return self.swap(stream, slot_range);
        }
        self.cache.skip_swaps();
        Ok(())
    }

    /// Takes note of the experts `[rows, n_expert_used]` that the draft layer, which is `layer`, used.
    pub fn note_draft(&mut self, routes: &[u32], layer: u32, slot_range: impl Fn(SlotId) -> AddrRange) {
        self.note_routes(routes, layer..layer + 1, &slot_range);
    }

    fn note_routes(&mut self, routes: &[u32], layers: Range<u32>, slot_range: &impl Fn(SlotId) -> AddrRange) {
        let of_layer = (routes.len() / layers.len().max(1)).max(1);
        for (layer, experts) in layers.zip(routes.chunks(of_layer)) {
            for (at, &expert) in experts.iter().enumerate() {
                // At most eight rows of a few experts: looking back costs less than any set would.
                if experts[..at].contains(&expert) {
                    continue;
                }
                let expert = ExpertId { layer, expert };
                if self.resident(expert, slot_range).is_some() {
                    self.counters.hits += 1;
                    self.layer_hits[layer as usize] += 1;
                } else {
                    self.counters.misses += 1;
                    self.counters.link.in_place += self.store.bytes(expert);
                }
                self.cache.note_use(expert);
            }
        }
    }

    /// Counts the experts of a prompt block, one use for each expert with any row: a long prompt must not drown the text's own
    /// frequencies.
    pub fn note_prompt(&mut self, expert: ExpertId) {
        let at = self.index(expert);
        match self.cache.slot_of(expert) {
            Some(slot) if !self.on_the_way[slot.0 as usize] => self.counters.prompt_hits += 1,
            _ => {
                self.counters.prompt_misses += 1;
                let unread = self.prompt_copies[at] == PromptCopy::Unread;
                self.prompt_copies[at] = if unread { PromptCopy::Even } else { PromptCopy::Owed };
            }
        }
        self.cache.note_use(expert);
    }

    /// Bytes of the gate, up and down matrix of one expert of a layer.
    #[must_use]
    pub fn matrix_bytes(&self, layer: u32) -> [Bytes; 3] {
        self.slot_layouts[layer as usize].matrix_bytes()
    }

    /// Queues copies of `count` neighbouring experts from host memory on `stream`: matrix after matrix of each kind, from the
    /// addresses in `target` on, without gaps.
    ///
    /// # Errors
    /// The backend's.
    pub fn copy_run(&mut self, first: ExpertId, count: u32, target: ExpertAddrs, stream: &B::Stream) -> Result<()> {
        self.counters.link.prompt += self.store.bytes(first) * u64::from(count);
        for at in (self.index(first)..).take(count as usize) {
            let owed = self.prompt_copies[at] == PromptCopy::Owed;
            self.settle(at, if owed { PromptCopy::Even } else { PromptCopy::Unread });
        }
        transfer::copy_run(&*self.backend, stream, &self.store.runs(first, count), target)
    }

    /// Where an expert's weights lie: in its slot, or in host memory, to be read in place.
    pub fn in_place(&mut self, expert: ExpertId, slot_range: impl Fn(SlotId) -> AddrRange) -> ExpertAddrs {
        let at = self.index(expert);
        self.resident(expert, slot_range).unwrap_or_else(|| {
            self.prompt_copies[at] = PromptCopy::Even;
            self.counters.link.in_place += self.store.bytes(expert);
            self.store.addrs(expert)
        })
    }

    fn slot_layout(&self, expert: ExpertId) -> &SlotLayout {
        &self.slot_layouts[expert.layer as usize]
    }

    fn index(&self, expert: ExpertId) -> usize {
        (expert.layer * self.store.n_expert() + expert.expert) as usize
    }

    /// Begins a new account of an expert's copies for prompts. One that was not used until now was dropped.
    fn settle(&mut self, at: usize, new: PromptCopy) {
        if std::mem::replace(&mut self.prompt_copies[at], new) == PromptCopy::Unread {
            let layer = u32::try_from(at).expect("at most 2^32 experts") / self.store.n_expert();
            self.counters.link.dropped += self.store.bytes(ExpertId { layer, expert: 0 });
        }
    }

    fn swap(&mut self, stream: &B::Stream, slot_range: impl Fn(SlotId) -> AddrRange) -> Result<()> {
        let swaps = self.cache.plan_swaps();
        if swaps.is_empty() {
            return Ok(());
        }
        for swap in &swaps {
            self.table.set(swap.evicted, self.store.addrs(swap.evicted));
        }
        let picks: Vec<_> = swaps.iter().map(|swap| (swap.slot, swap.admitted)).collect();
        // Windows queued before must not read a slot while it is overwritten, later ones must see the table without it. The copies
        // wait for both, the host and the next window for neither.
        let told = self
            .upload_table(stream)
            .and_then(|()| self.backend.record(stream, &self.told))
            .and_then(|()| self.backend.wait(&self.copy_stream, &self.told));
        if let Err(error) = told {
            for (slot, _) in picks {
                self.cache.withdraw(slot);
            }
            return Err(error);
        }
        self.start_fills(&picks, |_| Reason::Swap, slot_range)
    }

    fn start_fill(&mut self, slot: SlotId, expert: ExpertId, reason: Reason, place: AddrRange) -> Result<()> {
        let bytes = self.store.bytes(expert);
        match reason {
            Reason::Refill => self.counters.link.refill += bytes,
            Reason::Swap => {
                self.counters.link.swap += bytes;
                self.counters.swaps += 1;
            }
        }
        self.slot_layouts[expert.layer as usize].copy(&*self.backend, &self.copy_stream, self.store.addrs(expert), place)?;
        self.backend.record(&self.copy_stream, &self.arrivals[slot.0 as usize])?;
        self.refilling.push(Refilling { slot, expert });
        self.on_the_way[slot.0 as usize] = true;
        Ok(())
    }
}
