//! The allocations behind the slab: the main part, from which loans are made, pieces that are never lent, and a head of its own.
//!
//! ```text
//! | piece 0: slots 0 … |   | piece 1 |   …   | main part: the other slots … | head, unless it has an allocation of its own |
//! ```
//! Pieces hold the lowest slot numbers. Loans take slots from the end, prompt after prompt; pieces are given up when another program
//! takes VRAM, which is rare, and the last piece goes first.
//!
//! Where addresses can be reserved, the main part's are, for as many slots as there are at start, and memory lies behind their end. A slab
//! that is made anew with fewer slots, or with more again, has its head where it was, so that no graph is captured again for it.

use std::sync::Arc;

use crate::backend::{Addr, AddrRange, Backend, BackendError, DeviceMemory, Result};
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
    /// Bytes of the main part.
    #[must_use]
    pub fn main_bytes(&self) -> Bytes {
        let slots = self.table.span(self.main_first(), self.slots);
        match self.mode {
            HeadAliasMode::Overlay => slots + self.head_bytes,
            HeadAliasMode::Realloc => slots,
        }
    }

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
    /// The main part at its end, and before it what whole units of memory have too much.
    main: B::Buffer,
    /// By number; `None` for one that was given up.
    pub pieces: Vec<Option<B::Buffer>>,
    /// The head's own allocation; `None` while it is lent, and where the head lies in the main part.
    pub head: Option<B::Buffer>,
}

impl<B: Backend> Slab<B> {
    /// Addresses for the main part of a slab of `sizes`; `None` where the device has none to reserve, or refuses.
    #[must_use]
    pub fn reserve(backend: &B, sizes: &SlabSizes) -> Option<B::Reserved> {
        if !backend.capabilities().virtual_memory {
            return None;
        }
        backend.reserve(sizes.main_bytes()).ok()
    }

    /// Allocates all parts, the main part behind the end of `addresses`. Where a driver that has room cannot do that they are given up,
    /// and the main part gets addresses of its own.
    ///
    /// # Errors
    /// The backend's; nothing is kept then.
    pub fn allocate(backend: &B, sizes: SlabSizes, addresses: &mut Option<B::Reserved>) -> Result<Self> {
        let (main, head) = match sizes.mode {
            HeadAliasMode::Overlay => (Self::main_memory(backend, &sizes, "expert slots and output head", addresses)?, None),
            HeadAliasMode::Realloc => {
                let main = Self::main_memory(backend, &sizes, PIECE_PURPOSE, addresses)?;
                (main, Some(backend.malloc(sizes.head_bytes, HEAD_PURPOSE)?))
            }
        };
        let pieces =
            (0..sizes.pieces).map(|piece| backend.malloc(sizes.piece_bytes(piece), PIECE_PURPOSE).map(Some)).collect::<Result<_>>()?;
        Ok(Self { sizes, main, pieces, head })
    }

    fn main_memory(backend: &B, sizes: &SlabSizes, purpose: &str, addresses: &mut Option<B::Reserved>) -> Result<B::Buffer> {
        let bytes = sizes.main_bytes();
        if let Some(reserved) = addresses {
            let (range, whole) = (reserved.range(), bytes.align_up(backend.capabilities().backing_unit.0));
            assert!(whole <= range.bytes, "{whole} in a range of {}: a slab is never larger than at start", range.bytes);
            match backend.back(reserved, AddrRange { start: Addr(range.end().0 - whole.0), bytes: whole }, purpose) {
                Ok(main) => return Ok(main),
                Err(error @ (BackendError::OutOfMemory { .. } | BackendError::DeviceLost { .. })) => return Err(error),
                Err(_) => *addresses = None,
            }
        }
        backend.malloc(bytes, purpose)
    }

    /// The main part.
    #[must_use]
    pub fn main(&self) -> AddrRange {
        let bytes = self.sizes.main_bytes();
        AddrRange { start: Addr(self.main.range().end().0 - bytes.0), bytes }
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
