//! The allocations behind the slab: the main part, from which loans are made, pieces that are never lent, and a head of its own.
//!
//! ```text
//! | piece 0: slots 0 … |   | piece 1 |   …   | main part: the other slots … | head, unless it has an allocation of its own |
//! ```
//! Pieces hold the lowest slot numbers. Loans take slots from the end, prompt after prompt; pieces are given up when another program
//! takes VRAM, which is rare, and the last piece goes first.

use std::sync::Arc;

use crate::backend::{Addr, AddrRange, Backend, DeviceMemory, Result};
use crate::experts::SlotTable;
use crate::phase::region::Places;
use crate::settings::HeadAliasMode;
use crate::units::{Bytes, SlotId};

/// What an allocation of the head is called in messages and by tests.
pub const HEAD_PURPOSE: &str = "output head";
/// What an allocation of prompt buffers beside the slab is called.
pub const SPILL_PURPOSE: &str = "prompt buffers beside the slab";
/// What a piece is called.
pub const PIECE_PURPOSE: &str = "expert slots";

/// Sizes of all parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabSizes {
    /// All slots.
    pub slots: u32,
    /// Size of each.
    pub table: Arc<SlotTable>,
    /// Bytes of the head.
    pub head_bytes: Bytes,
    /// Whether the head has an allocation of its own.
    pub mode: HeadAliasMode,
    /// Pieces that are never lent.
    pub pieces: u32,
    /// Slots of a piece.
    pub piece_slots: u32,
}

impl SlabSizes {
    /// The first slot of the main part.
    #[must_use]
    pub fn main_first(&self) -> u32 {
        self.pieces * self.piece_slots
    }

    /// Bytes of a piece. Pieces have as many slots each, but not the same of each class.
    #[must_use]
    pub fn piece_bytes(&self, piece: u32) -> Bytes {
        self.table.span(piece * self.piece_slots, (piece + 1) * self.piece_slots)
    }

    /// The slots of a piece.
    pub fn slots_of(&self, piece: u32) -> impl Iterator<Item = SlotId> + Clone + use<> {
        (piece * self.piece_slots..(piece + 1) * self.piece_slots).map(SlotId)
    }

    /// Where a slot lies when slot number `first` starts at `start` and the ones behind it follow.
    fn slot_behind(&self, start: Addr, first: u32, slot: SlotId) -> AddrRange {
        AddrRange { start: start.offset(self.table.span(first, slot.0)), bytes: self.table.bytes(slot) }
    }

    /// Where the slot of a piece lies when the piece starts at `start`.
    #[must_use]
    pub fn slot_in_piece(&self, start: Addr, slot: SlotId) -> AddrRange {
        self.slot_behind(start, slot.0 - slot.0 % self.piece_slots, slot)
    }
}

/// The allocations.
pub struct Slab<B: Backend> {
    /// Sizes they were made by.
    pub sizes: SlabSizes,
    main: B::Buffer,
    /// By number; `None` for one that was given up.
    pub pieces: Vec<Option<B::Buffer>>,
    /// The head's own allocation; `None` while it is lent, and where the head lies in the main part.
    pub head: Option<B::Buffer>,
}

impl<B: Backend> Slab<B> {
    /// Allocates all parts.
    ///
    /// # Errors
    /// The backend's; nothing is kept then.
    pub fn allocate(backend: &B, sizes: SlabSizes) -> Result<Self> {
        let main_slots = sizes.table.span(sizes.main_first(), sizes.slots);
        let (main, head) = match sizes.mode {
            HeadAliasMode::Overlay => (backend.malloc(main_slots + sizes.head_bytes, "expert slots and output head")?, None),
            HeadAliasMode::Realloc => {
                let main = backend.malloc(main_slots, PIECE_PURPOSE)?;
                (main, Some(backend.malloc(sizes.head_bytes, HEAD_PURPOSE)?))
            }
        };
        let pieces =
            (0..sizes.pieces).map(|piece| backend.malloc(sizes.piece_bytes(piece), PIECE_PURPOSE).map(Some)).collect::<Result<_>>()?;
        Ok(Self { sizes, main, pieces, head })
    }

    /// The main part.
    #[must_use]
    pub fn main(&self) -> AddrRange {
        self.main.range()
    }

    /// Every allocation's range.
    pub fn ranges(&self) -> impl Iterator<Item = AddrRange> {
        [Some(&self.main), self.head.as_ref()].into_iter().chain(self.pieces.iter().map(Option::as_ref)).flatten().map(DeviceMemory::range)
    }

    /// Where slots and head lie. A head that is freed lies where it did.
    #[must_use]
    pub fn places(&self, head_before: AddrRange) -> Places {
        let sizes = &self.sizes;
        let main_first = sizes.main_first();
        let main = self.main().start;
        let in_piece = |slot: SlotId| {
            let piece = self.pieces[(slot.0 / sizes.piece_slots) as usize].as_ref()?;
            Some(sizes.slot_in_piece(piece.range().start, slot))
        };
        let slot = |slot: SlotId| if slot.0 < main_first { in_piece(slot) } else { Some(sizes.slot_behind(main, main_first, slot)) };
        let head = match (sizes.mode, &self.head) {
            (HeadAliasMode::Overlay, _) => {
                let start = main.offset(sizes.table.span(main_first, sizes.slots));
                AddrRange { start, bytes: sizes.head_bytes }
            }
            (HeadAliasMode::Realloc, Some(head)) => head.range(),
            (HeadAliasMode::Realloc, None) => head_before,
        };
        Places {
            slots: (0..sizes.slots).map(|index| slot(SlotId(index))).collect(),
            main_first,
            head,
            head_in_slab: sizes.mode == HeadAliasMode::Overlay,
        }
    }
}
