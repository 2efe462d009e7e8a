//! How the buffers of the two paths share a stretch of memory: names, offsets and exact sizes.
//!
//! The memory plan sums these layouts and the engine carves by them, so what was planned is what is taken, to the byte.

mod mixer;
mod prompt;
mod rows;
mod state;
mod window;

pub use mixer::{AttentionParts, DeltaParts, DraftParts, MixerParts, SharedParts};
pub use prompt::{CHUNK_RING_SLOTS, PromptBases, PromptLayout, PromptRoom, PromptSize};
pub use rows::RowBytes;
pub use state::StateLayout;
pub use window::{DeltaKept, DraftRows, WindowLayout};

use crate::backend::{Addr, AddrRange};
use crate::model::weights::DEVICE_ALIGN;
use crate::units::Bytes;

/// Which memory a part lies in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Segment {
    /// The first or only stretch: the arena of a loan, or an allocation of its own.
    #[default]
    Arena,
    /// The allocation in which prompt buffers continue that do not fit the arena.
    Spill,
}

/// A named stretch within a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it holds.
    pub name: &'static str,
    /// Which memory it lies in.
    pub segment: Segment,
    /// First byte from the start of that memory.
    pub offset: Bytes,
    /// Size.
    pub bytes: Bytes,
}

impl Part {
    /// The part's range in memory that starts at `base`.
    #[must_use]
    pub fn at(&self, base: Addr) -> AddrRange {
        AddrRange { start: base.offset(self.offset), bytes: self.bytes }
    }
}

/// Hands out aligned offsets, one after another.
#[derive(Default)]
struct Carver {
    segment: Segment,
    end: Bytes,
    highest: Bytes,
}

impl Carver {
    fn take(&mut self, name: &'static str, bytes: u64) -> Part {
        let part = Part { name, segment: self.segment, offset: self.end, bytes: Bytes(bytes) };
        self.end = (self.end + part.bytes).align_up(DEVICE_ALIGN);
        self.highest = self.highest.max(self.end);
        part
    }

    /// A carver for what follows at the end of this one, up to `bytes`.
    fn fork(&mut self, bytes: Bytes) -> Self {
        let fork = Self { segment: self.segment, end: self.end, highest: self.end };
        self.take("overlay", bytes.0);
        fork
    }

    /// Goes back to `offset`: what comes next overlays what was taken since.
    fn rewind(&mut self, offset: Bytes) {
        self.end = offset;
    }
}
