//! Scratch of the mixer half of a layer, of the shared expert and of the draft layer's input.

use super::{Carver, Part, RowBytes};
use crate::model::ModelShape;

/// Buffers of the mixer half of a layer, shared by both paths; shapes for `n` rows.
///
/// ```text
/// attention:
/// | attention's output           | activation rows | queries                  | gates
/// | normed rows | keys | values  |                 | activation rows of attention's output
///               | queries and gates, joined        |
/// delta net:
/// | normed rows | convolved      | activation rows | raw, later the result    | gates z | beta | decay
/// | activation rows of the result |
/// afterwards, all of them behind the activation rows: router logits; shared expert; the draft layer's input
/// ```
/// What shares memory is never alive together: keys and values are in the caches and the first normed rows used up before attention
/// writes, queries are used up then, and its output is used up before rows are normed for the router.
#[derive(Clone, Copy, Debug)]
pub struct MixerParts {
    /// f32 `[n, n_embd]`: normed rows.
    pub normed: Part,
    /// Activation rows of the normed rows.
    pub quantised: Part,
    /// f32 `[n, n_expert]`.
    pub router_logits: Part,
    /// Attention's part.
    pub attention: AttentionParts,
    /// The delta net's part; empty without one.
    pub delta: DeltaParts,
    /// The shared expert's part; empty without one.
    pub shared: SharedParts,
    /// The draft layer's input; empty without one.
    pub draft: DraftParts,
}

/// Scratch of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionParts {
    /// f32 `[n, n_head, 2, head_dim]`: queries and gates as they are projected; empty without gates.
    pub joined: Part,
    /// f32 `[n, n_head * head_dim]`.
    pub q: Part,
    /// f32 `[n, n_head * head_dim]`; empty without gates.
    pub gates: Part,
    /// f32 `[n, n_head_kv * head_dim]`.
    pub k: Part,
    /// f32 `[n, n_head_kv * head_dim]`.
    pub v: Part,
    /// f32 `[n, n_head * head_dim]`: attention's output.
    pub attended: Part,
    /// Activation rows of attention's output.
    pub quantised: Part,
}

/// Scratch of a delta net, as [`Op::DeltaPrompt`](crate::backend::Op::DeltaPrompt) names it.
#[derive(Clone, Copy, Debug)]
pub struct DeltaParts {
    /// f32 `[n, n_channels]`: the projection. Windows keep theirs elsewhere.
    pub raw: Part,
    /// f32 `[n, n_head_v]`; as above.
    pub beta: Part,
    /// f32 `[n, n_head_v]`; as above.
    pub decay: Part,
    /// f32 `[n, n_head_v * head_dim]`: the output's gates.
    pub gates: Part,
    /// f32 `[n, n_channels]`: queries, keys and values.
    pub convolved: Part,
    /// f32 `[n, n_head_v * head_dim]`.
    pub out: Part,
    /// Activation rows of `out`.
    pub quantised: Part,
}

/// Scratch of the shared expert.
#[derive(Clone, Copy, Debug)]
pub struct SharedParts {
    /// f32 `[n, n_ff_shared]`, activated in place.
    pub gate: Part,
    /// f32 `[n, n_ff_shared]`.
    pub up: Part,
    /// Activation rows of the activated rows.
    pub quantised: Part,
    /// f32 `[n, n_embd]`: its output.
    pub down: Part,
    /// f32 `[n]`: logits of its gate.
    pub gate_logit: Part,
}

/// Scratch of the draft layer's input.
#[derive(Clone, Copy, Debug)]
pub struct DraftParts {
    /// f32 `[n, n_embd]`: embeddings of the next tokens.
    pub embedded: Part,
    /// f32 `[n, n_embd]`: the same, normed.
    pub left: Part,
    /// f32 `[n, n_embd]`: hidden rows, normed.
    pub right: Part,
    /// f32 `[n, 2, n_embd]`: both, side by side.
    pub joined: Part,
    /// Activation rows of `joined`.
    pub quantised: Part,
}

impl MixerParts {
    pub(super) fn take(carver: &mut Carver, shape: &ModelShape, rows: &RowBytes, n: u64) -> Self {
        let floats = |width: u32| n * u64::from(width) * 4;
        let if_gated = |width: u32| if shape.gated_attention { floats(width) } else { 0 };
        let if_shared = |bytes: u64| if shape.n_ff_shared > 0 { bytes } else { 0 };
        let if_draft = |bytes: u64| if shape.has_draft_layer { bytes } else { 0 };
        let delta_width = |width: fn(&crate::backend::op::DeltaShape) -> u32| shape.delta.as_ref().map_or(0, |delta| floats(width(delta)));
        let delta_rows = if shape.delta.is_some() { n * rows.mixed } else { 0 };

        let front = carver.end;
        let attended = carver.take("attention output", floats(shape.q_width()));
        let mut front_end = carver.end;
        carver.rewind(front);
        let delta_quantised = carver.take("activation rows of the delta net", delta_rows);
        front_end = front_end.max(carver.end);
        carver.rewind(front);
        let normed = carver.take("normed rows", floats(shape.n_embd));
        let behind_normed = carver.end;
        let k = carver.take("keys", floats(shape.kv_width()));
        let v = carver.take("values", floats(shape.kv_width()));
        front_end = front_end.max(carver.end);
        carver.rewind(behind_normed);
        let joined = carver.take("queries and gates", if_gated(2 * shape.q_width()));
        front_end = front_end.max(carver.end);
        carver.rewind(behind_normed);
        let convolved = carver.take("convolved rows", delta_width(|delta| delta.n_channels()));
        carver.rewind(front_end.max(carver.end));

        let quantised = carver.take("activation rows", n * rows.normed);
        let back = carver.end;
        let q = carver.take("queries", floats(shape.q_width()));
        let gates = carver.take("gates of attention", if_gated(shape.q_width()));
        let mut back_end = carver.end;
        carver.rewind(back);
        let raw = carver.take("projected rows", delta_width(|delta| delta.n_channels()));
        let delta_gates = carver.take("gates of the delta net", delta_width(|delta| delta.value_width()));
        let beta = carver.take("beta", delta_width(|delta| delta.n_head_v));
        let decay = carver.take("decay", delta_width(|delta| delta.n_head_v));
        back_end = back_end.max(carver.end);
        carver.rewind(back);
        // The projected rows are used up once they are convolved.
        let out = carver.take("delta net output", delta_width(|delta| delta.value_width()));
        carver.rewind(back);
        let attended_quantised = carver.take("activation rows of attention", n * rows.mixed);
        back_end = back_end.max(carver.end);
        carver.rewind(back);
        let router_logits = carver.take("router logits", floats(shape.n_expert));
        back_end = back_end.max(carver.end);
        carver.rewind(back);
        let shared = SharedParts {
            gate: carver.take("shared expert gate", floats(shape.n_ff_shared)),
            up: carver.take("shared expert up", floats(shape.n_ff_shared)),
            quantised: carver.take("activation rows of the shared expert", n * rows.shared),
            down: carver.take("shared expert output", if_shared(floats(shape.n_embd))),
            gate_logit: carver.take("shared expert's gate", if_shared(floats(1))),
        };
        back_end = back_end.max(carver.end);
        carver.rewind(back);
        let draft = DraftParts {
            embedded: carver.take("next embeddings", if_draft(floats(shape.n_embd))),
            left: carver.take("normed embeddings", if_draft(floats(shape.n_embd))),
            right: carver.take("normed hidden rows", if_draft(floats(shape.n_embd))),
            joined: carver.take("draft input", if_draft(floats(2 * shape.n_embd))),
            quantised: carver.take("activation rows of the draft input", n * rows.joined),
        };
        carver.rewind(back_end.max(carver.end));
        Self {
            normed,
            quantised,
            router_logits,
            attention: AttentionParts { joined, q, gates, k, v, attended, quantised: attended_quantised },
            delta: DeltaParts { raw, beta, decay, gates: delta_gates, convolved, out, quantised: delta_quantised },
            shared,
            draft,
        }
    }
}
