//! Buffers of the prompt path.

use super::{Carver, MixerParts, Part, RowBytes, Segment};
use crate::backend::op::{self, Path};
use crate::backend::{Addr, AddrRange};
use crate::model::weights::{DEVICE_ALIGN, LayerExperts};
use crate::model::{Arithmetic, ModelShape, ModelWeights};
use crate::quant::ActivationFormat;
use crate::units::Bytes;

/// Rows of the wide tile in which experts read a prompt; fewer rows a chunk make a smaller tile. With 16-bit floats, the tile is as large
/// as the mixer's scratch.
const EXPERT_TILE_ROWS: u32 = 128;
/// Room for unpacked weights beside each expert in flight, and how many are counted at least: a small ring belongs to a small arena.
const UNPACKED_BYTES_A_RING_SLOT: Bytes = Bytes(3 << 19);
const UNPACKED_RING_SLOTS_MIN: u32 = 4;
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

    /// The range of a part.
    #[must_use]
    pub fn range(&self, part: Part) -> AddrRange {
        AddrRange { start: self.addr(part), bytes: part.bytes }
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
/// | residual | expert input | routes | positions |  mixer scratch of one chunk              | ring | unpacked weights |
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
    /// u32 `[n_expert]`: how many rows each expert of a layer has.
    pub expert_counts: Part,
    /// u32 `[block * n_expert_used]`: rows by expert.
    pub expert_rows: Part,
    /// f32 `[block * n_expert_used]`: their weights.
    pub expert_row_weights: Part,
    /// u32 `[block, n_expert_used]`: where each row stands in them.
    pub expert_entries: Part,
    /// Scratch of the experts for `tile_rows` rows.
    pub expert_scratch: Part,
    /// Rows of an expert tile.
    pub tile_rows: u32,
    /// Weights unpacked to 16-bit floats; empty where products take them as they are.
    pub unpacked: Part,
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
    expert_counts: Part,
    expert_rows: Part,
    expert_row_weights: Part,
    expert_entries: Part,
    expert_scratch: Part,
    tile_rows: u32,
    head_rows: u32,
    logits: Part,
    bytes: Bytes,
}

/// What the sizes of prompt buffers follow from.
#[derive(Clone, Copy)]
struct PromptSizes<'a> {
    shape: &'a ModelShape,
    weights: &'a ModelWeights,
    arithmetic: Arithmetic,
    size: PromptSize,
}

impl PromptSizes<'_> {
    fn rows(&self) -> RowBytes {
        RowBytes::of(self.weights, self.arithmetic, Path::Prompt)
    }

    fn overlay(&self, mut carver: Carver) -> Overlay {
        let start = carver.end;
        let routes = u64::from(self.size.block) * u64::from(self.shape.n_expert_used);
        let mixer = MixerParts::take(&mut carver, self.shape, &self.rows(), u64::from(self.size.chunk));
        let mixer_bytes = Bytes(carver.highest.0 - start.0);
        carver.rewind(start);
        let expert_counts = carver.take("rows of each expert", u64::from(self.shape.n_expert) * 4);
        let expert_rows = carver.take("rows by expert", routes * 4);
        let expert_row_weights = carver.take("row weights", routes * 4);
        let expert_entries = carver.take("entries of rows", routes * 4);
        let left = mixer_bytes.saturating_sub(Bytes(carver.end.0 - start.0));
        let (tile_rows, scratch_bytes) = self.expert_tile(routes, left);
        let expert_scratch = carver.take("expert scratch", scratch_bytes);
        // The head reads normed and quantised rows of the mixer's scratch, so its own part lies behind those.
        carver.rewind(mixer.attention.q.offset);
        let head_rows = if self.size.all_logits { self.size.chunk.min(HEAD_TILE_ROWS) } else { 0 };
        let logits = carver.take("logits", u64::from(head_rows) * u64::from(self.shape.n_vocab) * 4);
        let bytes = Bytes(carver.highest.0 - start.0);
        Overlay {
            mixer,
            expert_counts,
            expert_rows,
            expert_row_weights,
            expert_entries,
            expert_scratch,
            tile_rows,
            head_rows,
            logits,
            bytes,
        }
    }

    /// Rows of an expert tile, and the bytes of its scratch. Matrix units want many rows at a time: as many as `left` bytes hold, which
    /// the mixer half takes anyway.
    fn expert_tile(&self, routes: u64, left: Bytes) -> (u32, u64) {
        let scratch_bytes = |rows: u32| {
            let of_layer = |layer: &LayerExperts| op::expert_scratch_bytes(&layer.shape(self.arithmetic, Path::Prompt), rows.into());
            self.weights.experts.iter().map(of_layer).max().unwrap_or(0)
        };
        let least = self.size.block.clamp(1, EXPERT_TILE_ROWS);
        let rows = match self.arithmetic.halves_max {
            Some(_) => u32::try_from((left.0 / scratch_bytes(1).max(1)).min(routes)).unwrap_or(u32::MAX).max(least),
            None => least,
        };
        (rows, scratch_bytes(rows))
    }

    /// Bytes for unpacked weights: stripes of the largest matrices, or some experts, at least one.
    fn unpacked_bytes(&self) -> Bytes {
        let in_halves = |quant_type| self.arithmetic.format(Path::Prompt, quant_type) == ActivationFormat::F16;
        let Some(halves_max) = self.arithmetic.halves_max else { return Bytes::ZERO };
        let room = (UNPACKED_BYTES_A_RING_SLOT * u64::from(self.size.ring_slots.max(UNPACKED_RING_SLOTS_MIN))).min(halves_max);
        let head = self.size.all_logits.then_some(&self.weights.head);
        let dense = self.weights.dense.iter().map(|dense| &dense.tensor).chain(head);
        let matrices = dense.filter(|tensor| in_halves(tensor.quant_type)).map(|tensor| {
            let least = op::unpacked_bytes(tensor.rows.min(op::UNPACKED_ROWS_MIN), tensor.cols);
            op::unpacked_bytes(tensor.rows, tensor.cols).min(room).max(least)
        });
        let experts = self.weights.experts.iter().map(|layer| {
            let shape = layer.shape(self.arithmetic, Path::Prompt);
            if shape.input_format != ActivationFormat::F16 {
                return Bytes::ZERO;
            }
            let expert = op::unpacked_expert_bytes(&shape);
            expert * (room.0 / expert.0).clamp(1, self.shape.n_expert.into())
        });
        matrices.chain(experts).max().unwrap_or(Bytes::ZERO)
    }
}

impl PromptLayout {
    /// Lays out the buffers for `size` in `room`; `None` where they do not fit.
    #[must_use]
    pub fn new(shape: &ModelShape, weights: &ModelWeights, arithmetic: Arithmetic, size: PromptSize, room: PromptRoom) -> Option<Self> {
        let sizes = PromptSizes { shape, weights, arithmetic, size };
        let rows = sizes.rows();
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
        let unpacked = placer.take("unpacked weights", sizes.unpacked_bytes().0);
        let Placer { arena, spill, .. } = placer;
        if arena.end > room.arena || spill.end > room.spill {
            return None;
        }
        let Overlay {
            mixer,
            expert_counts,
            expert_rows,
            expert_row_weights,
            expert_entries,
            expert_scratch,
            tile_rows,
            head_rows,
            logits,
            ..
        } = overlay;
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
            expert_counts,
            expert_rows,
            expert_row_weights,
            expert_entries,
            expert_scratch,
            tile_rows,
            unpacked,
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
    pub fn bytes(shape: &ModelShape, weights: &ModelWeights, arithmetic: Arithmetic, size: PromptSize) -> Bytes {
        Self::new(shape, weights, arithmetic, size, PromptRoom::ENDLESS).expect("an endless room fits").arena_bytes
    }
}
