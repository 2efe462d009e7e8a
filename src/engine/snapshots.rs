//! Copies of the recurrent state at places that a later prompt may go on from.
//!
//! A state is of the exact tokens before it, wherever their keys and values lie; so a copy is found by its tokens. Copies are made where
//! requests are known to branch off: near the end of a prompt, where two prompts have parted before, and at the end of a timeline that
//! is left.

use crate::backend::{Addr, Backend, DeviceMemory};
use crate::engine::sequence::Reuse;
use crate::units::{Bytes, TokenId};

/// Why a copy is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotKind {
    /// Near the end of a prompt.
    PromptEnd,
    /// Where prompts part: the beginning that they share. These go last when memory is short.
    Root,
    /// At the end of a timeline that is left. Windows have written a part of it, so deterministic runs do without.
    Left,
}

/// One copy.
struct Snapshot<B: Backend> {
    tokens: Vec<TokenId>,
    kind: SnapshotKind,
    memory: B::Pinned,
    /// Whether the copy was made; until then the memory is only spoken for.
    filled: bool,
    last_used: u64,
}

impl<B: Backend> Snapshot<B> {
    fn may_be_used(&self, reuse: Reuse) -> bool {
        self.filled && (reuse == Reuse::Any || self.kind != SnapshotKind::Left)
    }
}

/// All copies of one engine.
pub struct Snapshots<B: Backend> {
    entries: Vec<Snapshot<B>>,
}

impl<B: Backend> Default for Snapshots<B> {
    fn default() -> Self {
        Self { entries: Vec::new() }
    }
}

impl<B: Backend> Snapshots<B> {
    /// Bytes of host memory taken.
    #[must_use]
    pub fn used(&self) -> Bytes {
        self.entries.iter().map(|entry| entry.memory.range().bytes).sum()
    }

    /// Tokens of the longest copy that `prompt` begins with and that holds at most `most` tokens; 0 where there is none.
    #[must_use]
    pub fn longest(&self, prompt: &[TokenId], most: usize, reuse: Reuse) -> usize {
        let fits = |entry: &&Snapshot<B>| entry.may_be_used(reuse) && entry.tokens.len() <= most && prompt.starts_with(&entry.tokens);
        self.entries.iter().filter(fits).map(|entry| entry.tokens.len()).max().unwrap_or(0)
    }

    /// Whether there is, or will be, a copy after exactly `tokens` that serves as well as one of `kind`.
    #[must_use]
    pub fn holds(&self, tokens: &[TokenId], kind: SnapshotKind) -> bool {
        let serves = |entry: &Snapshot<B>| entry.kind == kind || (kind != SnapshotKind::Root && entry.kind != SnapshotKind::Left);
        self.entries.iter().any(|entry| entry.tokens == tokens && serves(entry))
    }

    /// The copy after exactly `tokens`, used at `now`.
    pub fn get(&mut self, tokens: &[TokenId], reuse: Reuse, now: u64) -> Option<Addr> {
        let entry = self.entries.iter_mut().filter(|entry| entry.may_be_used(reuse)).find(|entry| entry.tokens == tokens)?;
        entry.last_used = now;
        Some(entry.memory.range().start)
    }

    /// Speaks for `memory`, in which the copy after `tokens` is to be made.
    pub fn add(&mut self, tokens: Vec<TokenId>, kind: SnapshotKind, memory: B::Pinned) -> Addr {
        let target = memory.range().start;
        self.entries.push(Snapshot { tokens, kind, memory, filled: false, last_used: 0 });
        target
    }

    /// The copy at `target` has been made, at `now`; others of the same tokens go.
    pub fn set_filled(&mut self, target: Addr, now: u64) {
        let Some(at) = self.entries.iter().position(|entry| entry.memory.range().start == target) else { return };
        let mut entry = self.entries.swap_remove(at);
        self.entries.retain(|other| other.tokens != entry.tokens);
        (entry.filled, entry.last_used) = (true, now);
        self.entries.push(entry);
    }

    /// Gives back what was spoken for and not filled.
    pub fn drop_unfilled(&mut self) {
        self.entries.retain(|entry| entry.filled);
    }

    /// When the copy that goes first was used, with whether it is one of those that go last; `None` where there is none.
    #[must_use]
    pub fn oldest(&self) -> Option<(bool, u64)> {
        self.entries.iter().filter(|entry| entry.filled).map(age).min()
    }

    /// Drops the copy that [`Snapshots::oldest`] speaks of.
    pub fn drop_oldest(&mut self) {
        let filled = self.entries.iter().enumerate().filter(|(_, entry)| entry.filled);
        if let Some((oldest, _)) = filled.min_by_key(|(_, entry)| age(entry)) {
            self.entries.swap_remove(oldest);
        }
    }
}

/// Orders copies by how soon they go.
fn age<B: Backend>(entry: &Snapshot<B>) -> (bool, u64) {
    (entry.kind == SnapshotKind::Root, entry.last_used)
}
