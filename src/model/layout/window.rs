//! Buffers of the decode path.

use super::{Carver, MixerParts, Part, RowBytes, Segment};
use crate::backend::op::{self, DeltaShape, ExpertAddrs, Path};
use crate::model::shape::Mixer;
use crate::model::{Arithmetic, ModelShape, ModelWeights};
use crate::units::Bytes;

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
    /// i32 `[n_expert_layer, rows, n_expert_used]`, dense for the rows of the window at hand: kept for all layers, so that the host can
    /// count hits afterwards.
    pub ids: Part,
    /// f32 `[n_rows, n_expert_used]`.
    pub weights: Part,
    /// i32 `[n_rows + 1]`: positions of the rows, and the next one.
    pub positions: Part,
    /// i32 `[1]`: row of the caches that holds position 0.
    pub first_row: Part,
    /// Scratch of the mixer half.
    pub mixer: MixerParts,
    /// Scratch of the experts.
    pub expert_scratch: Part,
    /// f32 `[n_rows, n_vocab]`.
    pub logits: Part,
    /// [`ExpertAddrs`] `[n_expert_layer, n_expert]`.
    pub table: Part,
    /// What each delta net keeps of the last window, layer by layer, until rows of it are accepted; empty without one.
    pub kept: Part,
    /// The draft layer's rows; empty without one.
    pub draft: DraftRows,
    /// All of it.
    pub bytes: Bytes,
}

/// Rows that go into and come out of a draft layer.
#[derive(Clone, Copy, Debug)]
pub struct DraftRows {
    /// f32 `[n_rows, n_embd]`: rows of the last window behind the last norm.
    pub hidden: Part,
    /// f32 `[n_rows, n_embd]`: accepted rows of one or more windows that the draft layer has not seen yet.
    pub waiting: Part,
    /// f32 `[1, n_embd]`: the draft layer's own last row behind its norm, which it may go on from.
    pub own: Part,
}

/// What a delta net keeps of a window's rows, from which accepted ones are replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaKept {
    /// f32 `[n_rows, n_channels]`: the projection.
    pub raw: Bytes,
    /// f32 `[n_rows, n_head_v]`.
    pub beta: Bytes,
    /// f32 `[n_rows, n_head_v]`.
    pub decay: Bytes,
    /// All of it.
    bytes: Bytes,
}

impl DeltaKept {
    /// Offsets within the part of one layer.
    fn new(delta: DeltaShape, n_rows: u32) -> Self {
        let mut carver = Carver::default();
        let floats = |width: u32| u64::from(n_rows) * u64::from(width) * 4;
        let raw = carver.take("projected rows", floats(delta.n_channels())).offset;
        let beta = carver.take("beta", floats(delta.n_head_v)).offset;
        let decay = carver.take("decay", floats(delta.n_head_v)).offset;
        Self { raw, beta, decay, bytes: carver.end }
    }
}

impl WindowLayout {
    /// Lays out the buffers for windows of up to `n_rows` rows.
    #[must_use]
    pub fn new(shape: &ModelShape, weights: &ModelWeights, arithmetic: Arithmetic, n_rows: u32) -> Self {
        let rows = RowBytes::of(weights, arithmetic, Path::Window);
        let n = u64::from(n_rows);
        let routes = n * u64::from(shape.n_expert_used);
        let mut carver = Carver::default();
        let kept = shape.delta.map_or(Bytes::ZERO, |delta| DeltaKept::new(delta, n_rows).bytes * u64::from(shape.n_delta_layer()));
        let if_draft = |bytes: u64| if shape.has_draft_layer { bytes } else { 0 };
        let scratch = weights.experts.iter().map(|layer| op::expert_scratch_bytes(&layer.shape(arithmetic, Path::Window), routes)).max();
        Self {
            n_rows,
            residual: carver.take("residual", n * u64::from(shape.n_embd) * 4),
            expert_input: carver.take("expert input", n * rows.expert_input),
            ids: carver.take("expert ids", routes * 4 * u64::from(shape.n_expert_layer())),
            weights: carver.take("expert weights", routes * 4),
            positions: carver.take("positions", (n + 1) * 4),
            first_row: carver.take("first row", 4),
            mixer: MixerParts::take(&mut carver, shape, &rows, n),
            expert_scratch: carver.take("expert scratch", scratch.unwrap_or(0)),
            logits: carver.take("logits", n * u64::from(shape.n_vocab) * 4),
            table: carver.take("expert table", u64::from(shape.n_routed_experts()) * ExpertAddrs::BYTES as u64),
            kept: carver.take("rows kept of delta nets", kept.0),
            draft: DraftRows {
                hidden: carver.take("hidden rows", if_draft(n * u64::from(shape.n_embd) * 4)),
                waiting: carver.take("hidden rows that wait", if_draft(n * u64::from(shape.n_embd) * 4)),
                own: carver.take("the draft layer's hidden row", if_draft(u64::from(shape.n_embd) * 4)),
            },
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

    /// What the delta net of `layer` keeps, from the start of the buffers.
    #[must_use]
    pub fn layer_kept(&self, shape: &ModelShape, delta: DeltaShape, layer: u32) -> DeltaKept {
        let DeltaKept { raw, beta, decay, bytes } = DeltaKept::new(delta, self.n_rows);
        let start = self.kept.offset + bytes * u64::from(shape.index_among(Mixer::Delta, layer));
        DeltaKept { raw: start + raw, beta: start + beta, decay: start + decay, bytes }
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
