//! A layer as a list of operations, the same for a prompt chunk and for a window.
//!
//! A layer has two halves. The **mixer half** reads the residual, runs attention or a delta net, writes the residual, leaves the
//! experts' input and the routes, and adds the shared expert where there is one. The **expert half** adds the routed experts' output. A
//! window runs both for its few rows; the prompt path runs the mixer half chunk by chunk over a block and then the expert half once for
//! the block, so an expert crosses the link once a block.
//!
//! The mathematics is that of `qwen3moe`: `x += Wo attention(rope(norm(Wq n)), ..)`, `x += experts(norm(x))`, `n = norm(x)`, and of
//! `qwen35moe`, which gates attention's output, has delta nets in most layers (`delta`) and a shared expert, and may draft
//! ([`draft`]).

mod attention;
mod delta;
pub mod draft;

use crate::backend::Addr;
use crate::backend::op::{KvFormat, Matrix, Op, Path};
use crate::model::layout::{DeltaKept, MixerParts, Part, PromptBases, PromptLayout, WindowLayout};
use crate::model::weights::{MixerDense, SharedDense};
use crate::model::{ModelShape, ModelWeights};
use crate::quant::{ActivationFormat, QuantType};
use crate::units::Bytes;

/// Where the model's resident parts lie on the device.
#[derive(Clone, Copy, Debug)]
pub struct ResidentAddrs {
    /// Start of the dense weights.
    pub dense: Addr,
    /// Start of the key/value caches: layer by layer, keys then values.
    pub kv: Addr,
    /// Start of the recurrent state, as [`StateLayout`](crate::model::layout::StateLayout) cuts it.
    pub state: Addr,
    /// The draft layer's own output head, where it has one.
    pub draft_head: Option<DraftHead>,
    /// Tokens the caches hold.
    pub n_ctx: u32,
    /// Element type of the caches.
    pub kv_format: KvFormat,
}

/// Rows at hand and the buffers that the mixer half uses for them.
#[derive(Clone, Copy)]
struct Rows<'a> {
    n_rows: u32,
    path: Path,
    residual: Addr,
    expert_input: Addr,
    ids: Addr,
    weights: Addr,
    /// Of the rows in the caches.
    positions: Addr,
    /// That queries and keys are rotated by.
    rope_positions: Addr,
    first_row: Addr,
    parts: &'a MixerParts,
    bases: PromptBases,
    delta: DeltaRows,
}

impl Rows<'_> {
    fn at(&self, part: Part) -> Addr {
        self.bases.addr(part)
    }

    /// Products of the normed rows.
    fn normed_products(&self, exact: bool) -> Projector {
        self.products(self.at(self.parts.normed), self.at(self.parts.quantised), exact)
    }

    /// Products of `input`.
    fn products(&self, input: Addr, quantised: Addr, exact: bool) -> Projector {
        Projector::new(input, quantised, self.n_rows, self.path, exact)
    }
}

/// How rows go through a delta net.
#[derive(Clone, Copy)]
enum DeltaRows {
    /// Rows of a prompt take the state with them.
    Prompt { block: BlockRows, chunk: ChunkRows, open: Addr },
    /// Rows of a window leave the state as it is, and what they would do to it in memory of their own.
    Window { raw: Addr, beta: Addr, decay: Addr },
    /// Rows of a layer without a delta net.
    None,
}

/// Rows of the output head for the tokens that the draft layer chooses among.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftHead {
    /// Where they lie.
    pub addr: Addr,
    /// How many.
    pub n_tokens: u32,
}

/// Describes the model's computation in terms of addresses.
#[derive(Clone, Copy)]
pub struct Forward<'a> {
    /// Sizes.
    pub shape: &'a ModelShape,
    /// Types and offsets.
    pub weights: &'a ModelWeights,
    /// Where the resident parts lie.
    pub resident: ResidentAddrs,
    /// Activations stay floats.
    pub exact: bool,
}

/// A block of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRows {
    /// Position of the first row.
    pub position: u32,
    /// Rows.
    pub count: u32,
}

/// A contiguous part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRows {
    /// First row within the block.
    pub first: u32,
    /// Rows.
    pub count: u32,
}

/// Appends products of one input, quantising it once for each activation format in a row.
struct Projector {
    input: Addr,
    quantised: Addr,
    n_rows: u32,
    path: Path,
    exact: bool,
    ready: ActivationFormat,
}

impl Projector {
    fn new(input: Addr, quantised: Addr, n_rows: u32, path: Path, exact: bool) -> Self {
        Self { input, quantised, n_rows, path, exact, ready: ActivationFormat::F32 }
    }

    /// The form in which weights of a type read the input.
    fn format(&self, quant_type: QuantType) -> ActivationFormat {
        ActivationFormat::for_weights(quant_type, self.exact)
    }

    /// Where weights of `n_cols` columns read the input in `format`, which it has behind the operations so far.
    fn ready_input(&mut self, ops: &mut Vec<Op>, format: ActivationFormat, n_cols: u32) -> Addr {
        if format == ActivationFormat::F32 {
            return self.input;
        }
        if format != self.ready {
            ops.push(Op::Quantise { x: self.input, out: self.quantised, n_rows: self.n_rows, n_cols, format });
            self.ready = format;
        }
        self.quantised
    }

    fn project(&mut self, ops: &mut Vec<Op>, weights: Matrix, out: Addr, accumulate: bool) {
        let format = self.format(weights.quant_type);
        let input = self.ready_input(ops, format, weights.cols);
        ops.push(Op::MatMul { weights, input, format, out, n_rows: self.n_rows, path: self.path, accumulate });
    }

    /// Products with several matrices; those of a window that read the same form are one operation.
    fn project_all(&mut self, ops: &mut Vec<Op>, products: &[(Matrix, Addr)]) {
        let exact = self.exact;
        let format_of = |product: &(Matrix, Addr)| ActivationFormat::for_weights(product.0.quant_type, exact);
        for alike in products.chunk_by(|left, right| format_of(left) == format_of(right)) {
            let format = format_of(&alike[0]);
            if self.path == Path::Window && alike.len() > 1 && format != ActivationFormat::F32 {
                let input = self.ready_input(ops, format, alike[0].0.cols);
                ops.push(Op::WindowProducts { products: alike.to_vec(), input, format, n_rows: self.n_rows });
            } else {
                for &(weights, out) in alike {
                    self.project(ops, weights, out, false);
                }
            }
        }
    }
}

impl Forward<'_> {
    fn vector(&self, index: usize) -> Addr {
        self.resident.dense.offset(self.weights.dense[index].device_offset)
    }

    fn matrix(&self, index: usize) -> Matrix {
        let tensor = &self.weights.dense[index].tensor;
        Matrix { addr: self.vector(index), quant_type: tensor.quant_type, rows: tensor.rows, cols: tensor.cols }
    }

    /// The output head, wherever it lies now.
    #[must_use]
    pub fn head_matrix(&self, addr: Addr) -> Matrix {
        let head = &self.weights.head;
        Matrix { addr, quant_type: head.quant_type, rows: head.rows, cols: head.cols }
    }

    fn rms_norm(&self, x: Addr, weight: usize, out: Addr, n_rows: u32) -> Op {
        Op::RmsNorm { x, weight: self.vector(weight), out, n_rows, n_cols: self.shape.n_embd, eps: self.shape.rms_eps }
    }

    fn norm_quantise(&self, x: Addr, weight: usize, out: Addr, n_rows: u32, quantised: Vec<(Addr, ActivationFormat)>) -> Op {
        let (weight, n_cols, eps) = (self.vector(weight), self.shape.n_embd, self.shape.rms_eps);
        Op::NormQuantise { x, weight, out, quantised, n_rows, n_cols, eps }
    }

    /// The mixer half of `layer`. What a window does in one step, [`Op::parts`] tells.
    fn mixer(&self, layer: u32, rows: &Rows<'_>) -> Vec<Op> {
        let (shape, dense) = (self.shape, &self.weights.layers[layer as usize]);
        let &Rows { n_rows, residual, .. } = rows;
        let normed = rows.at(rows.parts.normed);
        let mut ops = Vec::new();
        let reader = match dense.mixer {
            MixerDense::Attention(dense) => dense.attn_k,
            MixerDense::Delta(dense) => dense.attn_qkv,
        };
        let mut from_normed = rows.normed_products(self.exact);
        let wanted = from_normed.format(self.matrix(reader).quant_type);
        if rows.path == Path::Window && wanted != ActivationFormat::F32 {
            ops.push(self.norm_quantise(residual, dense.attn_norm, normed, n_rows, vec![(from_normed.quantised, wanted)]));
            from_normed.ready = wanted;
        } else {
            ops.push(self.rms_norm(residual, dense.attn_norm, normed, n_rows));
        }
        match dense.mixer {
            MixerDense::Attention(dense) => self.attention(&mut ops, layer, dense, rows, from_normed),
            MixerDense::Delta(dense) => self.delta_net(&mut ops, layer, dense, rows, from_normed),
        }
        let format = self.weights.experts[layer as usize].shape(self.exact).input_format;
        let mut from_normed = rows.normed_products(self.exact);
        if rows.path == Path::Window {
            let mut wanted = vec![(rows.expert_input, format)];
            if let Some(shared) = dense.shared {
                // One form serves both where they agree.
                from_normed.ready = from_normed.format(self.matrix(shared.gate).quant_type);
                if from_normed.ready == format {
                    from_normed.quantised = rows.expert_input;
                } else if from_normed.ready != ActivationFormat::F32 {
                    wanted.push((from_normed.quantised, from_normed.ready));
                }
            }
            ops.push(self.norm_quantise(residual, dense.ffn_norm, normed, n_rows, wanted));
        } else {
            ops.push(self.rms_norm(residual, dense.ffn_norm, normed, n_rows));
        }
        // The router is F32 in every file and sees unrounded rows, so its choice does not hang on the activation setting.
        let logits = rows.at(rows.parts.router_logits);
        rows.normed_products(true).project(&mut ops, self.matrix(dense.router), logits, false);
        ops.push(Op::Router {
            logits,
            ids: rows.ids,
            weights: rows.weights,
            n_rows,
            n_expert: shape.n_expert,
            n_used: shape.n_expert_used,
            scale: shape.expert_weights_scale,
        });
        if rows.path == Path::Prompt {
            ops.push(Op::Quantise { x: normed, out: rows.expert_input, n_rows, n_cols: shape.n_embd, format });
        }
        if let Some(shared) = dense.shared {
            self.shared_expert(&mut ops, shared, rows, from_normed);
        }
        ops
    }

    /// Adds the expert that every token uses; reads the rows that were normed for the router.
    fn shared_expert(&self, ops: &mut Vec<Op>, dense: SharedDense, rows: &Rows<'_>, mut from_normed: Projector) {
        let &Rows { n_rows, residual, parts, .. } = rows;
        let [gate, up, activated, down, gate_logit] =
            [parts.shared.gate, parts.shared.up, parts.shared.quantised, parts.shared.down, parts.shared.gate_logit]
                .map(|part| rows.at(part));
        from_normed.project_all(ops, &[(self.matrix(dense.gate), gate), (self.matrix(dense.up), up)]);
        rows.normed_products(true).project(ops, self.matrix(dense.gate_inp), gate_logit, false);
        let (n_cols, down_matrix) = (self.shape.n_ff_shared, self.matrix(dense.down));
        let mut from_activated = rows.products(gate, activated, self.exact);
        let format = from_activated.format(down_matrix.quant_type);
        if rows.path == Path::Window && format != ActivationFormat::F32 {
            ops.push(Op::SwiGluQuantise { gate, up, out: activated, n_rows, n_cols, format });
            from_activated.ready = format;
        } else {
            ops.push(Op::SwiGlu { gate, up, n_rows, n_cols });
        }
        from_activated.project(ops, down_matrix, down, false);
        ops.push(Op::AddGated { sum: residual, x: down, gate: gate_logit, n_rows, n_cols: self.shape.n_embd });
    }

    /// The mixer half of `layer` over one chunk of a block whose buffers lie at `bases`.
    #[must_use]
    pub fn prompt_mixer(&self, layer: u32, bases: PromptBases, layout: &PromptLayout, block: BlockRows, chunk: ChunkRows) -> Vec<Op> {
        self.mixer(layer, &self.prompt_rows(layer, bases, layout, block, chunk))
    }

    /// All that later tokens need of `layer` for one chunk: of the last layer of a prompt that nobody asks logits of, nothing else is
    /// read. Every last layer is attention, or is run as a whole.
    #[must_use]
    pub fn prompt_keys_values(&self, layer: u32, bases: PromptBases, layout: &PromptLayout, block: BlockRows, chunk: ChunkRows) -> Vec<Op> {
        let rows = self.prompt_rows(layer, bases, layout, block, chunk);
        let dense = &self.weights.layers[layer as usize];
        let MixerDense::Attention(attention) = dense.mixer else { return self.mixer(layer, &rows) };
        let mut ops = vec![self.rms_norm(rows.residual, dense.attn_norm, rows.at(rows.parts.normed), rows.n_rows)];
        let mut from_normed = rows.normed_products(self.exact);
        self.keys_values(&mut ops, layer, attention, &rows, &mut from_normed);
        ops
    }

    fn prompt_rows<'l>(&self, layer: u32, bases: PromptBases, layout: &'l PromptLayout, block: BlockRows, chunk: ChunkRows) -> Rows<'l> {
        let first = u64::from(chunk.first);
        let row = |part: Part, bytes: u64| bases.addr(part).offset(Bytes(first * bytes));
        let route_bytes = u64::from(self.shape.n_expert_used) * 4;
        let format = self.weights.experts[layer as usize].shape(self.exact).input_format;
        let positions = row(layout.positions, 4);
        let is_draft = layer >= self.shape.n_layer;
        Rows {
            n_rows: chunk.count,
            path: Path::Prompt,
            residual: row(layout.residual, u64::from(self.shape.n_embd) * 4),
            expert_input: row(layout.expert_input, format.row_bytes(self.shape.n_embd as usize) as u64),
            ids: row(layout.ids, route_bytes),
            weights: row(layout.weights, route_bytes),
            positions,
            rope_positions: if is_draft { next_position(positions) } else { positions },
            first_row: bases.addr(layout.first_row),
            parts: &layout.mixer,
            bases,
            delta: DeltaRows::Prompt { block, chunk, open: bases.addr(layout.delta_open) },
        }
    }

    /// Logits of `rows` of the block's residual, with the head at `head`. Behind the draft layer the residual is the draft's.
    #[must_use]
    pub fn prompt_head(&self, bases: PromptBases, layout: &PromptLayout, rows: ChunkRows, head: Addr, of: HeadInput) -> Vec<Op> {
        let residual = bases.addr(layout.residual).offset(Bytes(u64::from(rows.first) * u64::from(self.shape.n_embd) * 4));
        let [normed, quantised, logits] = [layout.mixer.normed, layout.mixer.quantised, layout.logits].map(|part| bases.addr(part));
        let norm = match (of, &self.weights.draft) {
            (HeadInput::Draft, Some(draft)) => draft.head_norm,
            _ => self.weights.output_norm,
        };
        let mut ops = vec![self.rms_norm(residual, norm, normed, rows.count)];
        let mut projector = Projector::new(normed, quantised, rows.count, Path::Prompt, self.exact);
        projector.project(&mut ops, self.head_matrix(head), logits, false);
        ops
    }

    /// All layers of a window of `n_rows` rows and the last norm: the trunk graph.
    #[must_use]
    pub fn window_trunk(&self, base: Addr, layout: &WindowLayout, n_rows: u32) -> Vec<Op> {
        let mut ops = Vec::new();
        for layer in 0..self.shape.n_layer {
            self.window_layer(&mut ops, base, layout, layer, n_rows);
        }
        if self.shape.has_draft_layer {
            let (residual, hidden) = (base.offset(layout.residual.offset), base.offset(layout.draft.hidden.offset));
            ops.push(self.rms_norm(residual, self.weights.output_norm, hidden, n_rows));
        }
        ops
    }

    /// Both halves of one layer of a window.
    fn window_layer(&self, ops: &mut Vec<Op>, base: Addr, layout: &WindowLayout, layer: u32, n_rows: u32) {
        let rows = self.window_rows(base, layout, layer, n_rows);
        ops.extend(self.mixer(layer, &rows));
        ops.push(Op::ExpertsWindow {
            input: rows.expert_input,
            ids: rows.ids,
            weights: rows.weights,
            table: base.offset(layout.layer_table(self.shape, layer).offset),
            residual: rows.residual,
            n_rows,
            n_expert: self.shape.n_expert,
            n_used: self.shape.n_expert_used,
            shape: self.weights.experts[layer as usize].shape(self.exact),
            scratch: base.offset(layout.expert_scratch.offset),
        });
    }

    /// What follows the last layer of a window: the head graph. Where there is a draft layer, the trunk has normed the rows for it.
    #[must_use]
    pub fn window_head(&self, base: Addr, layout: &WindowLayout, n_rows: u32, head: Addr) -> Vec<Op> {
        let mut ops = Vec::new();
        let at = |part: Part| base.offset(part.offset);
        let (normed, head) = (at(layout.mixer.normed), self.head_matrix(head));
        let input = if self.shape.has_draft_layer { at(layout.draft.hidden) } else { normed };
        let mut projector = Projector::new(input, at(layout.mixer.quantised), n_rows, Path::Window, self.exact);
        if !self.shape.has_draft_layer {
            let wanted =
                Some((projector.quantised, projector.format(head.quant_type))).filter(|(_, format)| *format != ActivationFormat::F32);
            projector.ready = wanted.map_or(ActivationFormat::F32, |(_, format)| format);
            ops.push(self.norm_quantise(at(layout.residual), self.weights.output_norm, normed, n_rows, wanted.into_iter().collect()));
        }
        projector.project(&mut ops, head, at(layout.logits), false);
        ops
    }

    fn window_rows<'l>(&self, base: Addr, layout: &'l WindowLayout, layer: u32, n_rows: u32) -> Rows<'l> {
        let at = |part: Part| base.offset(part.offset);
        let positions = at(layout.positions);
        let is_draft = layer >= self.shape.n_layer;
        let delta = self.shape.delta.filter(|_| !is_draft).map_or(DeltaRows::None, |delta| {
            let DeltaKept { raw, beta, decay, .. } = layout.layer_kept(self.shape, delta, layer);
            DeltaRows::Window { raw: base.offset(raw), beta: base.offset(beta), decay: base.offset(decay) }
        });
        Rows {
            n_rows,
            path: Path::Window,
            residual: at(layout.residual),
            expert_input: at(layout.expert_input),
            ids: at(layout.layer_ids(self.shape, layer, n_rows)),
            weights: at(layout.weights),
            positions,
            rope_positions: if is_draft { next_position(positions) } else { positions },
            first_row: at(layout.first_row),
            parts: &layout.mixer,
            bases: PromptBases { arena: base, spill: base },
            delta,
        }
    }
}

/// What the head reads after a prompt's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadInput {
    /// Rows behind the last layer.
    Trunk,
    /// Rows behind the draft layer.
    Draft,
}

/// Positions one further: they ascend by one, and one more than the rows is there.
fn next_position(positions: Addr) -> Addr {
    positions.offset(Bytes(4))
}
