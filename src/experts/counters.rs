//! What the experts did, in numbers; `docs/expert-cache.md` defines each for people.

use crate::units::Bytes;

/// Bytes of experts that crossed the link, by why they did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct LinkBytes {
    /// Copies for a prompt block, into the ring.
    pub prompt: Bytes,
    /// Of these, copies that no row of the block asked for in the end: guesses, and what a stopped prompt left unread.
    pub dropped: Bytes,
    /// Copies into empty slots: at start, and after a loan.
    pub refill: Bytes,
    /// Copies into slots whose expert made room for a hotter one.
    pub swap: Bytes,
    /// Reads in place by windows, wide ones included.
    pub in_place: Bytes,
}

impl LinkBytes {
    /// All of them. Dropped bytes are part of the prompt's.
    #[must_use]
    pub fn total(&self) -> Bytes {
        self.prompt + self.refill + self.swap + self.in_place
    }
}

/// What the experts did, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCounters {
    /// Uses of an expert in a window whose weights lay in a slot.
    pub hits: u64,
    /// Uses of an expert in a window that was read from host memory.
    pub misses: u64,
    /// Experts that rows of a prompt block used, once for each layer and block, and that lay in a slot.
    pub prompt_hits: u64,
    /// The same for those that did not.
    pub prompt_misses: u64,
    /// Bytes over the link, all kinds together.
    pub link_bytes: Bytes,
    /// The same by kind.
    pub link: LinkBytes,
    /// Experts that took the slot of a colder one.
    pub swaps: u64,
}

impl ExpertCounters {
    /// What was counted since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let link = LinkBytes {
            prompt: self.link.prompt - before.link.prompt,
            dropped: self.link.dropped - before.link.dropped,
            refill: self.link.refill - before.link.refill,
            swap: self.link.swap - before.link.swap,
            in_place: self.link.in_place - before.link.in_place,
        };
        Self {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            prompt_hits: self.prompt_hits - before.prompt_hits,
            prompt_misses: self.prompt_misses - before.prompt_misses,
            link_bytes: link.total(),
            link,
            swaps: self.swaps - before.swaps,
        }
    }
}
