//! Buffers of the prompt path.

use super::{Carver, MixerParts, Part, RowBytes, Segment};
use crate::backend::{Addr, op};
use crate::model::weights::{DEVICE_ALIGN, LayerExperts};
use crate::model::{ModelShape, ModelWeights};
use crate::units::Bytes;

/// Rows of the wide tile in which experts read a prompt; fewer rows a chunk make a smaller tile.
const EXPERT_TILE_ROWS: u32 = 128;
/// Rows of the tile in which the head reads a prompt for `logits`.
const HEAD_TILE_ROWS: u32 = 32;
/// Experts in flight between host memory and the prompt path where a block is one chunk.
pub const CHUNK_RING_SLOTS: u32 = 16;
/// Rings larger than this may hold more than half of a layer's experts.
const LARGE_RING_SLOTS: u32 = 64;

/// Where the segments of the prompt buffers start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptBases {
    /// Start of the arena.
    pub arena: Addr,
    /// Start of the spill, where there is one.
    pub spill: Addr,
}

impl PromptBases {
    /// Where a part lies.
    #[must_use]
    pub fn addr(&self, part: Part) -> Addr {
        let base = match part.segment {
            Segment::Arena => self.arena,
            Segment::Spill => self.spill,
        };
        base.offset(part.offset)
    }
}

/// What the prompt path is asked to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptSize {
    /// Tokens in one kernel batch.
    pub chunk: u32,
    /// Tokens that go through the layers in one pass; at least `chunk`.
    pub block: u32,
    /// Experts in flight at most, lowered as [`PromptSize::ring_slots_of`] says; 0 where experts are read in place.
    pub ring_slots: u32,
    /// Whether every row also meets the output head.
    pub all_logits: bool,
}

impl PromptSize {
    /// Blocks of one chunk, no logits.
    #[must_use]
    pub const fn chunk(chunk: u32) -> Self {
        Self { chunk, block: chunk, ring_slots: CHUNK_RING_SLOTS, all_logits: false }
    }

    /// Experts in flight where a layer has `n_expert`: at most half of them, three quarters in the largest rings of large layers. More
    /// would only wait, and on small models take the room of the chunk.
    #[must_use]
    pub fn ring_slots_of(&self, n_expert: u32) -> u32 {
        let is_large = self.ring_slots.min(n_expert) > LARGE_RING_SLOTS;
        let most = if is_large { n_expert / 4 * 3 } else { n_expert / 2 };
        self.ring_slots.min(most.max(2))
    }
}

/// Memory for the prompt buffers: the arena is filled first, whole buffers that do not fit go to the spill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptRoom {
    /// Bytes of the arena.
    pub arena: Bytes,
    /// Bytes of the spill.
    pub spill: Bytes,
}

impl PromptRoom {
    /// One stretch of `bytes`.
    #[must_use]
    pub const fn single(bytes: Bytes) -> Self {
        Self { arena: bytes, spill: Bytes::ZERO }
    }

    /// One stretch as long as needed.
    pub const ENDLESS: Self = Self::single(Bytes(u64::MAX / 2));
}

/// Buffers of the prompt path.
///
/// ```text
/// | residual | expert input | routes | positions |  mixer scratch of one chunk              | ring |
///   one block                                    |  row lists and expert scratch (overlay)  |
///                                                |  head scratch, where logits are asked    |
/// ```
/// A block costs about the residual and the experts' input for each token (10 KiB for a width of 2,048), a chunk the mixer's
/// scratch (37 KiB), so a block can be many times as long as a chunk in the same memory.
#[derive(Clone, Copy, Debug)]
pub struct PromptLayout {
    /// What it was made for.
    pub size: PromptSize,
    /// f32 `[block, n_embd]`.
    pub residual: Part,
    /// Activation rows `[block]` that experts read.
    pub expert_input: Part,
    /// i32 `[block, n_expert_used]`, ascending.
    pub ids: Part,
    /// f32 `[block, n_expert_used]`.
    pub weights: Part,
    /// i32 `[block + 1]`: positions of the rows, and the next one.
    pub positions: Part,
    /// i32 `[1]`: row of the caches that holds position 0.
    pub first_row: Part,
    /// Rows of a delta net's step that is not complete, of the layer at hand; empty without one.
    pub delta_open: Part,
    /// Scratch of the mixer half.
    pub mixer: MixerParts,
    /// u32 `[block * n_expert_used]`: rows by expert.
    pub expert_rows: Part,
    /// f32 `[block * n_expert_used]`: their weights.
    pub expert_row_weights: Part,
    /// Scratch of the experts for `tile_rows` rows.
    pub expert_scratch: Part,
    /// Rows of an expert tile.
    pub tile_rows: u32,
    /// f32 `[head_rows, n_vocab]`, empty without `all_logits`.
    pub logits: Part,
    /// Rows that meet the head at once.
    pub head_rows: u32,
    /// Places for experts on their way from host memory.
    pub ring: Part,
    /// How many.
    pub ring_slots: u32,
    /// Bytes in the arena.
    pub arena_bytes: Bytes,
    /// Bytes in the spill.
    pub spill_bytes: Bytes,
}

/// Puts buffers into the arena while they fit, then into the spill.
struct Placer {
    room: PromptRoom,
    arena: Carver,
    spill: Carver,
}

impl Placer {
    fn new(room: PromptRoom) -> Self {
        Self { room, arena: Carver::default(), spill: Carver { segment: Segment::Spill, ..Carver::default() } }
    }

    fn segment_for(&mut self, bytes: Bytes) -> &mut Carver {
        if self.arena.end + bytes.align_up(DEVICE_ALIGN) <= self.room.arena { &mut self.arena } else { &mut self.spill }
    }

    fn take(&mut self, name: &'static str, bytes: u64) -> Part {
        self.segment_for(Bytes(bytes)).take(name, bytes)
    }
}

/// Scratch that is used by one step at a time: the steps' buffers overlay each other.
struct Overlay {
    mixer: MixerParts,
    expert_rows: Part,
    expert_row_weights: Part,
    expert_scratch: Part,
    logits: Part,
    bytes: Bytes,
}

/// Numbers of rows that follow from the size.
struct RowCounts {
    tile_rows: u32,
    head_rows: u32,
}

impl RowCounts {
    fn of(size: PromptSize) -> Self {
        let head_rows = if size.all_logits { size.chunk.min(HEAD_TILE_ROWS) } else { 0 };
        Self { tile_rows: size.block.clamp(1, EXPERT_TILE_ROWS), head_rows }
    }
}

/// What the sizes of prompt buffers follow from.
#[derive(Clone, Copy)]
struct PromptSizes<'a> {
    shape: &'a ModelShape,
    weights: &'a ModelWeights,
    exact: bool,
    size: PromptSize,
}

impl PromptSizes<'_> {
    fn overlay(&self, mut carver: Carver) -> Overlay {
        let start = carver.end;
        let rows = RowBytes::of(self.weights, self.exact);
        let counts = RowCounts::of(self.size);
        let routes = u64::from(self.size.block) * u64::from(self.shape.n_expert_used);
        let mixer = MixerParts::take(&mut carver, self.shape, &rows, u64::from(self.size.chunk));
        carver.rewind(start);
        let expert_rows = carver.take("rows by expert", routes * 4);
        let expert_row_weights = carver.take("row weights", routes * 4);
        let scratch = |layer: &LayerExperts| op::expert_scratch_bytes(&layer.shape(self.exact), counts.tile_rows.into());
        let expert_scratch = carver.take("expert scratch", self.weights.experts.iter().map(scratch).max().unwrap_or(0));
        // The head reads normed and quantised rows of the mixer's scratch, so its own part lies behind those.
        carver.rewind(mixer.attention.q.offset);
        let logits = carver.take("logits", u64::from(counts.head_rows) * u64::from(self.shape.n_vocab) * 4);
        Overlay { mixer, expert_rows, expert_row_weights, expert_scratch, logits, bytes: Bytes(carver.highest.0 - start.0) }
    }
}

impl PromptLayout {
    /// Lays out the buffers for `size` in `room`; `None` where they do not fit.
    #[must_use]
    pub fn new(shape: &ModelShape, weights: &ModelWeights, exact: bool, size: PromptSize, room: PromptRoom) -> Option<Self> {
        let sizes = PromptSizes { shape, weights, exact, size };
        let rows = RowBytes::of(weights, exact);
        let block = u64::from(size.block);
        let routes = block * u64::from(shape.n_expert_used);
        let mut placer = Placer::new(room);
        let residual = placer.take("residual", block * u64::from(shape.n_embd) * 4);
        let expert_input = placer.take("expert input", block * rows.expert_input);
        let ids = placer.take("expert ids", routes * 4);
        let expert_weights = placer.take("expert weights", routes * 4);
        let positions = placer.take("positions", (block + 1) * 4);
        let first_row = placer.take("first row", 4);
        let delta_open = placer.take("open step of a delta net", shape.delta.map_or(0, |delta| delta.open_bytes()));
        let overlay_bytes = sizes.overlay(Carver::default()).bytes;
        let overlay = sizes.overlay(placer.segment_for(overlay_bytes).fork(overlay_bytes));
        let ring_slots = size.ring_slots_of(shape.n_expert);
        let ring = placer.take("expert ring", weights.slot_bytes().0 * u64::from(ring_slots));
        let Placer { arena, spill, .. } = placer;
        if arena.end > room.arena || spill.end > room.spill {
            return None;
        }
        let RowCounts { tile_rows, head_rows } = RowCounts::of(size);
        let Overlay { mixer, expert_rows, expert_row_weights, expert_scratch, logits, .. } = overlay;
        Some(Self {
            size,
            residual,
            expert_input,
            ids,
            weights: expert_weights,
            positions,
            first_row,
            delta_open,
            mixer,
            expert_rows,
            expert_row_weights,
            expert_scratch,
            tile_rows,
            logits,
            head_rows,
            ring,
            ring_slots,
            arena_bytes: arena.end,
            spill_bytes: spill.end,
        })
    }

    /// Bytes of the buffers for `size` in one stretch.
    #[must_use]
    pub fn bytes(shape: &ModelShape, weights: &ModelWeights, exact: bool, size: PromptSize) -> Bytes {
        Self::new(shape, weights, exact, size, PromptRoom::ENDLESS).expect("an endless room fits").arena_bytes
    }
}
