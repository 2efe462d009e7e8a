//! Parked conversations: keys and values of earlier timelines in pinned host memory, within a budget, which copies of a recurrent state
//! share.
//!
//! A timeline that is about to lose rows is copied out; one that fits a new prompt better than what is live is copied back. The least
//! recently used goes first. An entry that a longer one continues is replaced by it. Memory that the system does not give is no error:
//! the conversation is read again then.

use std::rc::Rc;

use crate::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction};
use crate::engine::EngineError;
use crate::engine::sequence::{Reuse, Sequence, common_tokens, reusable};
use crate::engine::snapshots::{SnapshotKind, Snapshots};
use crate::units::{Bytes, TokenId};

/// Where rows of the KV caches lie: layer by layer, keys then values.
#[derive(Clone, Copy, Debug)]
pub struct KvRows {
    /// Start of the caches.
    pub base: Addr,
    /// Bytes of one layer's keys, or values.
    pub layer_bytes: Bytes,
    /// Bytes of one row of them.
    pub row_bytes: Bytes,
    /// Layers.
    pub n_layer: u32,
}

impl KvRows {
    /// Bytes of `n_rows` rows of all layers.
    #[must_use]
    pub fn bytes(&self, n_rows: usize) -> Bytes {
        self.row_bytes * (n_rows as u64 * 2 * u64::from(self.n_layer))
    }

    /// The stretches that rows from `first_row` on occupy.
    pub fn stretches(&self, first_row: u32, n_rows: usize) -> impl Iterator<Item = AddrRange> + '_ {
        let start = self.base.offset(self.row_bytes * u64::from(first_row));
        let bytes = self.row_bytes * n_rows as u64;
        (0..2 * u64::from(self.n_layer)).map(move |index| AddrRange { start: start.offset(self.layer_bytes * index), bytes })
    }
}

/// One parked conversation.
struct Parked<B: Backend> {
    tokens: Vec<TokenId>,
    prompt_rows: usize,
    memory: B::Pinned,
    last_used: u64,
}

/// What the cache did, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounters {
    /// Conversations copied out.
    pub parked: u64,
    /// Conversations copied back.
    pub resumed: u64,
    /// Conversations, and copies of a recurrent state, dropped to make room.
    pub dropped: u64,
    /// Copies of a recurrent state made.
    pub snapshots: u64,
    /// Copies of a recurrent state gone on from.
    pub snapshots_used: u64,
}

/// All parked conversations of one engine.
pub struct PrefixCache<B: Backend> {
    backend: Rc<B>,
    kv: KvRows,
    budget: Bytes,
    entries: Vec<Parked<B>>,
    /// Bytes of the recurrent state; none where the model has none.
    state_bytes: Bytes,
    snapshots: Snapshots<B>,
    clock: u64,
    counters: PrefixCounters,
}

/// A parked conversation that fits a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Which entry.
    pub index: usize,
    /// Tokens of the prompt that it holds.
    pub tokens: usize,
}

impl<B: Backend> PrefixCache<B> {
    /// An empty cache of at most `budget` bytes, for a model with a recurrent state of `state_bytes`.
    #[must_use]
    pub fn new(backend: Rc<B>, kv: KvRows, state_bytes: Bytes, budget: Bytes) -> Self {
        let (entries, snapshots, counters) = Default::default();
        Self { backend, kv, budget, entries, state_bytes, snapshots, clock: 0, counters }
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> PrefixCounters {
        self.counters
    }

    /// Bytes of host memory taken.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.entries.iter().map(|entry| entry.memory.range().bytes).sum::<Bytes>() + self.snapshots.used()
    }

    /// Of `common` leading tokens of `prompt` whose keys and values are there, those that need not be read again: all, or as many as a
    /// copy of the recurrent state holds.
    #[must_use]
    pub fn resumable(&self, prompt: &[TokenId], common: usize, reuse: Reuse) -> usize {
        if self.state_bytes == Bytes::ZERO { common } else { self.snapshots.longest(prompt, common, reuse) }
    }

    /// Speaks for memory for a copy of the recurrent state after `tokens`; `None` where there is one already or no room for it. The copy
    /// counts once it is [made](PrefixCache::snapshot_is_made).
    ///
    /// # Errors
    /// The backend's, other than a lack of pinned memory.
    pub fn make_snapshot(&mut self, tokens: &[TokenId], kind: SnapshotKind) -> Result<Option<Addr>, EngineError> {
        let bytes = self.state_bytes;
        if bytes == Bytes::ZERO || self.snapshots.holds(tokens, kind) {
            return Ok(None);
        }
        let memory = self.alloc(bytes, "a copy of the recurrent state")?;
        Ok(memory.map(|memory| self.snapshots.add(tokens.to_vec(), kind, memory)))
    }

    /// The copy at `target` is there.
    pub fn snapshot_is_made(&mut self, target: Addr) {
        self.clock += 1;
        self.counters.snapshots += 1;
        self.snapshots.set_filled(target, self.clock);
    }

    /// Forgets copies that were to be made and were not.
    pub fn drop_unmade_snapshots(&mut self) {
        self.snapshots.drop_unfilled();
    }

    /// The copy of the recurrent state after exactly `tokens`.
    pub fn snapshot(&mut self, tokens: &[TokenId], reuse: Reuse) -> Option<Addr> {
        self.clock += 1;
        let found = self.snapshots.get(tokens, reuse, self.clock);
        self.counters.snapshots_used += u64::from(found.is_some());
        found
    }

    /// Pinned memory within the budget, for which the least recently used goes; `None` where the system does not give it.
    fn alloc(&mut self, bytes: Bytes, purpose: &str) -> Result<Option<B::Pinned>, EngineError> {
        while self.used() + bytes > self.budget {
            if !self.drop_oldest() {
                return Ok(None);
            }
        }
        match self.backend.alloc_pinned(bytes, purpose) {
            Ok(memory) => Ok(Some(memory)),
            Err(BackendError::OutOfMemory { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Drops the conversation or the copy of a state that was not used for longest; false where there is none.
    fn drop_oldest(&mut self) -> bool {
        let entry = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.last_used);
        let entry = entry.map(|(index, entry)| (index, (false, entry.last_used)));
        match (entry, self.snapshots.oldest()) {
            (None, None) => return false,
            (Some((index, used)), snapshot) if snapshot.is_none_or(|snapshot| used < snapshot) => {
                self.entries.swap_remove(index);
            }
            _ => self.snapshots.drop_oldest(),
        }
        self.counters.dropped += 1;
        true
    }

    /// The entry that holds most of `prompt`; `None` where none holds any of it.
    #[must_use]
    pub fn best(&self, prompt: &[TokenId], reuse: Reuse) -> Option<Match> {
        let matches = self
            .entries
            .iter()
            .enumerate()
            .map(|(index, entry)| (index, reusable(&entry.tokens, entry.prompt_rows, prompt, reuse)))
            .map(|(index, common)| Match { index, tokens: self.resumable(prompt, common, reuse) });
        matches.max_by_key(|found| found.tokens).filter(|found| found.tokens > 0)
    }

    /// Leading tokens that `prompt` shares with any parked conversation.
    #[must_use]
    pub fn longest_common(&self, prompt: &[TokenId]) -> usize {
        self.entries.iter().map(|entry| common_tokens(&entry.tokens, prompt)).max().unwrap_or(0)
    }

    /// Copies a timeline out, where there is room for it. Returns whether it is parked now.
    ///
    /// # Errors
    /// The backend's, other than a lack of pinned memory.
    pub fn park(&mut self, sequence: &Sequence, stream: &B::Stream) -> Result<bool, EngineError> {
        let bytes = self.kv.bytes(sequence.len());
        if sequence.is_empty() || bytes > self.budget {
            return Ok(false);
        }
        if self.entries.iter().any(|entry| entry.tokens.starts_with(sequence.tokens()) && entry.prompt_rows >= sequence.prompt_rows()) {
            return Ok(true);
        }
        self.entries.retain(|entry| !sequence.tokens().starts_with(&entry.tokens));
        let Some(memory) = self.alloc(bytes, "a parked conversation")? else { return Ok(false) };
        let mut dst = memory.range().start;
        for stretch in self.kv.stretches(sequence.first_row(), sequence.len()) {
            self.backend.copy(stream, Copy { dst, src: stretch.start, bytes: stretch.bytes, direction: Direction::ToHost })?;
            dst = dst.offset(stretch.bytes);
        }
        self.backend.synchronise(stream)?;
        self.clock += 1;
        let (tokens, prompt_rows, last_used) = (sequence.tokens().to_vec(), sequence.prompt_rows(), self.clock);
        self.entries.push(Parked { tokens, prompt_rows, memory, last_used });
        self.counters.parked += 1;
        Ok(true)
    }

    /// Moves a timeline's rows down to row 0, in the order of `stream`. What lies there is lost.
    ///
    /// # Errors
    /// The backend's.
    pub fn move_to_start(&self, sequence: &Sequence, stream: &B::Stream) -> Result<(), EngineError> {
        let first_row = sequence.first_row() as usize;
        // No piece is longer than the way it moves, so none overlaps its own source.
        let pieces = (0..sequence.len()).step_by(first_row.max(1)).filter(|_| first_row > 0);
        for row in pieces {
            let n_rows = first_row.min(sequence.len() - row);
            let at = |row: usize| u32::try_from(row).expect("rows are below 2^32");
            let from = self.kv.stretches(at(first_row + row), n_rows);
            for (src, dst) in from.zip(self.kv.stretches(at(row), n_rows)) {
                let copy = Copy { dst: dst.start, src: src.start, bytes: src.bytes, direction: Direction::OnDevice };
                self.backend.copy(stream, copy)?;
            }
        }
        Ok(())
    }

    /// Copies the first `tokens` rows of a parked conversation to the rows from `first_row` on, in the order of `stream`. The entry
    /// stays.
    ///
    /// # Errors
    /// The backend's.
    pub fn resume(&mut self, found: Match, first_row: u32, stream: &B::Stream) -> Result<Sequence, EngineError> {
        self.clock += 1;
        let entry = &mut self.entries[found.index];
        entry.last_used = self.clock;
        let parked_stretch = self.kv.row_bytes * entry.tokens.len() as u64;
        let mut src = entry.memory.range().start;
        for stretch in self.kv.stretches(first_row, found.tokens) {
            self.backend.copy(stream, Copy { dst: stretch.start, src, bytes: stretch.bytes, direction: Direction::ToDevice })?;
            src = src.offset(parked_stretch);
        }
        // The entry may be dropped by the next one that is parked.
        self.backend.synchronise(stream)?;
        self.counters.resumed += 1;
        Ok(Sequence::resumed(entry.tokens[..found.tokens].to_vec(), entry.prompt_rows, first_row))
    }
}
