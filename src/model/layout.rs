//! How the buffers of the two paths share a stretch of memory: names, offsets and exact sizes.
//!
//! The memory plan sums these layouts and the engine carves by them, so what was planned is what is taken, to the byte.

use crate::backend::op::{self, ExpertAddrs};
use crate::backend::{Addr, AddrRange};
use crate::model::weights::{DEVICE_ALIGN, FileTensor, LayerExperts};
use crate::model::{ModelShape, ModelWeights};
use crate::quant::ActivationFormat;
use crate::units::Bytes;

/// Rows of the wide tile in which experts read a prompt; fewer rows a chunk make a smaller tile.
const EXPERT_TILE_ROWS: u32 = 128;
/// Rows of the tile in which the head reads a prompt for `logits`.
const HEAD_TILE_ROWS: u32 = 32;
/// Experts in flight between host memory and the prompt path where a block is one chunk.
pub const CHUNK_RING_SLOTS: u32 = 16;
/// Rings larger than this may hold more than half of a layer's experts.
const LARGE_RING_SLOTS: u32 = 64;

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

/// Activation rows in their largest form, in bytes: what follows from the model and the activation setting alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// Of a normed row that a dense matrix or the head reads; 0 where they all read floats.
    pub normed: u64,
    /// Of a row of attention's output; 0 where that is read as floats.
    pub attended: u64,
    /// Of a row that experts read.
    pub expert_input: u64,
}

impl RowBytes {
    /// Finds the sizes; activations are floats where `exact`.
    #[must_use]
    pub fn of(weights: &ModelWeights, exact: bool) -> Self {
        let row = |quant_type, cols: u32| match ActivationFormat::for_weights(quant_type, exact) {
            // Read where they are.
            ActivationFormat::F32 => 0,
            format => format.row_bytes(cols as usize) as u64,
        };
        let dense = |index: usize| &weights.dense[index].tensor;
        let largest = |tensors: &mut dyn Iterator<Item = &FileTensor>| tensors.map(|tensor| row(tensor.quant_type, tensor.cols)).max();
        let inputs = weights.layers.iter().flat_map(|layer| [layer.attn_q, layer.attn_k, layer.attn_v]).map(dense);
        let outputs = weights.layers.iter().map(|layer| dense(layer.attn_output));
        let expert_row = |layer: &LayerExperts| layer.shape(exact).input_format.row_bytes(layer.gate.cols as usize) as u64;
        Self {
            normed: largest(&mut inputs.chain([&weights.head])).unwrap_or(0),
            attended: largest(&mut outputs.into_iter()).unwrap_or(0),
            expert_input: weights.experts.iter().map(expert_row).max().unwrap_or(0),
        }
    }
}

/// Buffers of the mixer half of a layer, shared by both paths; shapes for `n` rows.
///
/// ```text
/// | attention's output           | activation rows | queries                                 |
/// | normed rows | keys | values  |                 | activation rows of attention's output   |
/// |                              |                 | router logits                           |
/// ```
/// What shares memory is never alive together: keys and values are in the caches and the first normed rows used up before attention
/// writes, queries are used up then, and its output is used up before rows are normed for the router.
#[derive(Clone, Copy, Debug)]
pub struct MixerParts {
    /// f32 `[n, n_embd]`: normed rows.
    pub normed: Part,
    /// Activation rows of the normed rows.
    pub quantised: Part,
    /// Activation rows of attention's output.
    pub attended_quantised: Part,
    /// f32 `[n, n_head * head_dim]`.
    pub q: Part,
    /// f32 `[n, n_head_kv * head_dim]`.
    pub k: Part,
    /// f32 `[n, n_head_kv * head_dim]`.
    pub v: Part,
    /// f32 `[n, n_head * head_dim]`: attention's output.
    pub attended: Part,
    /// f32 `[n, n_expert]`.
    pub router_logits: Part,
}

impl MixerParts {
    fn take(carver: &mut Carver, shape: &ModelShape, rows: &RowBytes, n: u64) -> Self {
        let floats = |width: u32| n * u64::from(width) * 4;
        let start = carver.end;
        let normed = carver.take("normed rows", floats(shape.n_embd));
        let k = carver.take("keys", floats(shape.kv_width()));
        let v = carver.take("values", floats(shape.kv_width()));
        let used_up = carver.end;
        carver.rewind(start);
        let attended = carver.take("attention output", floats(shape.q_width()));
        carver.rewind(carver.end.max(used_up));
        let quantised = carver.take("activation rows", n * rows.normed);
        let start = carver.end;
        let q = carver.take("queries", floats(shape.q_width()));
        let queries_end = carver.end;
        carver.rewind(start);
        let attended_quantised = carver.take("activation rows of attention", n * rows.attended);
        let attended_end = carver.end;
        carver.rewind(start);
        let router_logits = carver.take("router logits", floats(shape.n_expert));
        carver.rewind(carver.end.max(queries_end).max(attended_end));
        Self { normed, quantised, attended_quantised, q, k, v, attended, router_logits }
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
    /// i32 `[block]`.
    pub positions: Part,
    /// i32 `[1]`: row of the caches that holds position 0.
    pub first_row: Part,
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
        carver.rewind(mixer.q.offset);
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
        let positions = placer.take("positions", block * 4);
        let first_row = placer.take("first row", 4);
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

/// Buffers of the decode path, owned for the life of the engine. A window of fewer rows than the largest uses the beginning of each
/// part, as if the part had been made for its rows.
#[derive(Clone, Copy, Debug)]
pub struct WindowLayout {
    /// Rows of the largest window.
    pub n_rows: u32,
    /// f32 `[n_rows, n_embd]`.
    pub residual: Part,
    /// Activation rows `[n_rows]` that experts read.
    pub expert_input: Part,
    /// i32 `[n_layer, rows, n_expert_used]`, dense for the rows of the window at hand: kept for all layers, so that the host can
    /// count hits afterwards.
    pub ids: Part,
    /// f32 `[n_rows, n_expert_used]`.
    pub weights: Part,
    /// i32 `[n_rows]`.
    pub positions: Part,
    /// i32 `[1]`: row of the caches that holds position 0.
    pub first_row: Part,
    /// Scratch of the mixer half.
    pub mixer: MixerParts,
    /// Scratch of the experts.
    pub expert_scratch: Part,
    /// f32 `[n_rows, n_vocab]`.
    pub logits: Part,
    /// [`ExpertAddrs`] `[n_layer, n_expert]`.
    pub table: Part,
    /// All of it.
    pub bytes: Bytes,
}

impl WindowLayout {
    /// Lays out the buffers for windows of up to `n_rows` rows.
    #[must_use]
    pub fn new(shape: &ModelShape, weights: &ModelWeights, exact: bool, n_rows: u32) -> Self {
        let rows = RowBytes::of(weights, exact);
        let n = u64::from(n_rows);
        let routes = n * u64::from(shape.n_expert_used);
        let mut carver = Carver::default();
        let scratch = weights.experts.iter().map(|layer| op::expert_scratch_bytes(&layer.shape(exact), routes)).max();
        Self {
            n_rows,
            residual: carver.take("residual", n * u64::from(shape.n_embd) * 4),
            expert_input: carver.take("expert input", n * rows.expert_input),
            ids: carver.take("expert ids", routes * 4 * u64::from(shape.n_layer)),
            weights: carver.take("expert weights", routes * 4),
            positions: carver.take("positions", n * 4),
            first_row: carver.take("first row", 4),
            mixer: MixerParts::take(&mut carver, shape, &rows, n),
            expert_scratch: carver.take("expert scratch", scratch.unwrap_or(0)),
            logits: carver.take("logits", n * u64::from(shape.n_vocab) * 4),
            table: carver.take("expert table", u64::from(shape.n_routed_experts()) * ExpertAddrs::BYTES as u64),
            bytes: carver.end,
        }
    }

    /// The ids of one layer of a window of `n_rows` rows within [`WindowLayout::ids`].
    #[must_use]
    pub fn layer_ids(&self, shape: &ModelShape, layer: u32, n_rows: u32) -> Part {
        debug_assert!(n_rows <= self.n_rows, "a window of {n_rows} rows, room for {}", self.n_rows);
        let bytes = u64::from(n_rows) * u64::from(shape.n_expert_used) * 4;
        Part { name: "expert ids", segment: Segment::Arena, offset: self.ids.offset + Bytes(bytes * u64::from(layer)), bytes: Bytes(bytes) }
    }

    /// The records of one layer within [`WindowLayout::table`].
    #[must_use]
    pub fn layer_table(&self, shape: &ModelShape, layer: u32) -> Part {
        let bytes = u64::from(shape.n_expert) * ExpertAddrs::BYTES as u64;
        Part {
            name: "expert table",
            segment: Segment::Arena,
            offset: self.table.offset + Bytes(bytes * u64::from(layer)),
            bytes: Bytes(bytes),
        }
    }
}
