//! A layer as a list of operations, the same for a prompt chunk and for a window.
//!
//! A layer has two halves. The **mixer half** reads the residual, runs attention, writes the residual, and leaves the experts' input
//! and the routes. The **expert half** adds the experts' output. A window runs both for its few rows; the prompt path runs the mixer
//! half chunk by chunk over a block and then the expert half once for the block, so an expert crosses the link once a block.
//! The mathematics is that of `qwen3moe`: `x += Wo attention(rope(norm(Wq n)), ..)`, `x += experts(norm(x))`, `n = norm(x)`.

use crate::backend::Addr;
use crate::backend::op::{KvFormat, Matrix, Op, Path};
use crate::model::layout::{MixerParts, Part, PromptBases, PromptLayout, WindowLayout};
use crate::model::{ModelShape, ModelWeights};
use crate::quant::ActivationFormat;
use crate::units::Bytes;

/// Where the model's resident parts lie on the device.
#[derive(Clone, Copy, Debug)]
pub struct ResidentAddrs {
    /// Start of the dense weights.
    pub dense: Addr,
    /// Start of the key/value caches: layer by layer, keys then values.
    pub kv: Addr,
    /// Tokens the caches hold.
    pub n_ctx: u32,
    /// Element type of the caches.
    pub kv_format: KvFormat,
}

/// Addresses of the buffers that the mixer half uses, for the rows at hand.
#[derive(Clone, Copy, Debug)]
struct MixerAddrs {
    residual: Addr,
    expert_input: Addr,
    ids: Addr,
    weights: Addr,
    positions: Addr,
    first_row: Addr,
    normed: Addr,
    quantised: Addr,
    attended_quantised: Addr,
    q: Addr,
    k: Addr,
    v: Addr,
    attended: Addr,
    router_logits: Addr,
}

impl MixerAddrs {
    /// Addresses of the scratch; what is not scratch is nowhere yet.
    fn scratch(at: impl Fn(Part) -> Addr, parts: &MixerParts) -> Self {
        let nowhere = Addr(0);
        Self {
            residual: nowhere,
            expert_input: nowhere,
            ids: nowhere,
            weights: nowhere,
            positions: nowhere,
            first_row: nowhere,
            normed: at(parts.normed),
            quantised: at(parts.quantised),
            attended_quantised: at(parts.attended_quantised),
            q: at(parts.q),
            k: at(parts.k),
            v: at(parts.v),
            attended: at(parts.attended),
            router_logits: at(parts.router_logits),
        }
    }
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

/// A contiguous part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRows {
    /// First row within the block.
    pub first: u32,
    /// Rows.
    pub count: u32,
}

/// Appends products of one input, quantising it once for each activation format in a row.
struct Projector<'o> {
    ops: &'o mut Vec<Op>,
    input: Addr,
    quantised: Addr,
    n_rows: u32,
    path: Path,
    exact: bool,
    ready: ActivationFormat,
}

impl<'o> Projector<'o> {
    fn new(ops: &'o mut Vec<Op>, input: Addr, quantised: Addr, n_rows: u32, path: Path, exact: bool) -> Self {
        Self { ops, input, quantised, n_rows, path, exact, ready: ActivationFormat::F32 }
    }

    fn project(&mut self, weights: Matrix, out: Addr, accumulate: bool) {
        let format = ActivationFormat::for_weights(weights.quant_type, self.exact);
        if format != ActivationFormat::F32 && format != self.ready {
            let (x, out, n_rows, n_cols) = (self.input, self.quantised, self.n_rows, weights.cols);
            self.ops.push(Op::Quantise { x, out, n_rows, n_cols, format });
            self.ready = format;
        }
        let input = if format == ActivationFormat::F32 { self.input } else { self.quantised };
        self.ops.push(Op::MatMul { weights, input, format, out, n_rows: self.n_rows, path: self.path, accumulate });
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

    fn kv_addrs(&self, layer: u32) -> (Addr, Addr) {
        let one = ModelWeights::kv_layer_bytes(self.shape, self.resident.kv_format, self.resident.n_ctx);
        let keys = self.resident.kv.offset(one * u64::from(2 * layer));
        (keys, keys.offset(one))
    }

    fn rms_norm(&self, x: Addr, weight: usize, out: Addr, n_rows: u32) -> Op {
        Op::RmsNorm { x, weight: self.vector(weight), out, n_rows, n_cols: self.shape.n_embd, eps: self.shape.rms_eps }
    }

    fn head_norm_rope(&self, x: Addr, weight: usize, positions: Addr, n_rows: u32, n_head: u32) -> Op {
        let ModelShape { head_dim, n_rot, rope_freq_base: freq_base, rms_eps: eps, .. } = *self.shape;
        Op::HeadNormRope { x, weight: self.vector(weight), positions, n_rows, n_head, head_dim, n_rot, freq_base, eps }
    }

    fn kv_store(&self, rows: Addr, cache: Addr, at: &MixerAddrs, n_rows: u32) -> Op {
        let ResidentAddrs { n_ctx, kv_format: format, .. } = self.resident;
        let ModelShape { n_head_kv, head_dim, .. } = *self.shape;
        let MixerAddrs { positions, first_row, .. } = *at;
        Op::KvStore { rows, cache, format, positions, first_row, n_rows, n_head_kv, head_dim, n_ctx }
    }

    /// What a layer leaves in the caches for `n_rows` rows, and their queries where `with_queries`.
    fn keys_values(&self, layer: u32, at: &MixerAddrs, n_rows: u32, path: Path, with_queries: bool) -> Vec<Op> {
        let (shape, dense) = (self.shape, &self.weights.layers[layer as usize]);
        let (keys, values) = self.kv_addrs(layer);
        let mut ops = vec![self.rms_norm(at.residual, dense.attn_norm, at.normed, n_rows)];
        let mut from_normed = Projector::new(&mut ops, at.normed, at.quantised, n_rows, path, self.exact);
        if with_queries {
            from_normed.project(self.matrix(dense.attn_q), at.q, false);
        }
        from_normed.project(self.matrix(dense.attn_k), at.k, false);
        from_normed.project(self.matrix(dense.attn_v), at.v, false);
        if with_queries {
            ops.push(self.head_norm_rope(at.q, dense.attn_q_norm, at.positions, n_rows, shape.n_head));
        }
        ops.push(self.head_norm_rope(at.k, dense.attn_k_norm, at.positions, n_rows, shape.n_head_kv));
        ops.push(self.kv_store(at.k, keys, at, n_rows));
        ops.push(self.kv_store(at.v, values, at, n_rows));
        ops
    }

    /// The mixer half of `layer` over `n_rows` rows.
    fn mixer(&self, layer: u32, at: &MixerAddrs, n_rows: u32, path: Path) -> Vec<Op> {
        let (shape, dense) = (self.shape, &self.weights.layers[layer as usize]);
        let (keys, values) = self.kv_addrs(layer);
        let mut ops = self.keys_values(layer, at, n_rows, path, true);
        ops.push(Op::Attention {
            q: at.q,
            k_cache: keys,
            v_cache: values,
            format: self.resident.kv_format,
            positions: at.positions,
            first_row: at.first_row,
            out: at.attended,
            n_rows,
            n_head: shape.n_head,
            n_head_kv: shape.n_head_kv,
            head_dim: shape.head_dim,
            n_ctx: self.resident.n_ctx,
            scale: shape.attention_scale,
            path,
        });
        let output = self.matrix(dense.attn_output);
        Projector::new(&mut ops, at.attended, at.attended_quantised, n_rows, path, self.exact).project(output, at.residual, true);

        ops.push(self.rms_norm(at.residual, dense.ffn_norm, at.normed, n_rows));
        // The router is F32 in every file and sees unrounded rows, so its choice does not hang on the activation setting.
        Projector::new(&mut ops, at.normed, at.quantised, n_rows, path, true).project(self.matrix(dense.router), at.router_logits, false);
        ops.push(Op::Router {
            logits: at.router_logits,
            ids: at.ids,
            weights: at.weights,
            n_rows,
            n_expert: shape.n_expert,
            n_used: shape.n_expert_used,
            scale: shape.expert_weights_scale,
        });
        let format = self.weights.experts[layer as usize].shape(self.exact).input_format;
        ops.push(Op::Quantise { x: at.normed, out: at.expert_input, n_rows, n_cols: shape.n_embd, format });
        ops
    }

    /// The mixer half of `layer` over one chunk of a block whose buffers lie at `bases`.
    #[must_use]
    pub fn prompt_mixer(&self, layer: u32, bases: PromptBases, layout: &PromptLayout, chunk: ChunkRows) -> Vec<Op> {
        self.mixer(layer, &self.prompt_addrs(layer, bases, layout, chunk), chunk.count, Path::Prompt)
    }

    /// All that later tokens need of `layer` for one chunk: of the last layer of a prompt that nobody asks logits of, nothing else is
    /// read.
    #[must_use]
    pub fn prompt_keys_values(&self, layer: u32, bases: PromptBases, layout: &PromptLayout, chunk: ChunkRows) -> Vec<Op> {
        self.keys_values(layer, &self.prompt_addrs(layer, bases, layout, chunk), chunk.count, Path::Prompt, false)
    }

    fn prompt_addrs(&self, layer: u32, bases: PromptBases, layout: &PromptLayout, chunk: ChunkRows) -> MixerAddrs {
        let first = u64::from(chunk.first);
        let row = |part: Part, bytes: u64| bases.addr(part).offset(Bytes(first * bytes));
        let route_bytes = u64::from(self.shape.n_expert_used) * 4;
        let format = self.weights.experts[layer as usize].shape(self.exact).input_format;
        MixerAddrs {
            residual: row(layout.residual, u64::from(self.shape.n_embd) * 4),
            expert_input: row(layout.expert_input, format.row_bytes(self.shape.n_embd as usize) as u64),
            ids: row(layout.ids, route_bytes),
            weights: row(layout.weights, route_bytes),
            positions: row(layout.positions, 4),
            first_row: bases.addr(layout.first_row),
            ..MixerAddrs::scratch(|part| bases.addr(part), &layout.mixer)
        }
    }

    /// Logits of `rows` of the block's residual, with the head at `head`.
    #[must_use]
    pub fn prompt_head(&self, bases: PromptBases, layout: &PromptLayout, rows: ChunkRows, head: Addr) -> Vec<Op> {
        let residual = bases.addr(layout.residual).offset(Bytes(u64::from(rows.first) * u64::from(self.shape.n_embd) * 4));
        let at = MixerAddrs { residual, ..MixerAddrs::scratch(|part| bases.addr(part), &layout.mixer) };
        self.head(&at, rows.count, head, bases.addr(layout.logits), Path::Prompt)
    }

    /// All layers of a window of `n_rows` rows: the trunk graph.
    #[must_use]
    pub fn window_trunk(&self, base: Addr, layout: &WindowLayout, n_rows: u32) -> Vec<Op> {
        let mut ops = Vec::new();
        for layer in 0..self.shape.n_layer {
            let at = self.window_addrs(base, layout, layer, n_rows);
            ops.extend(self.mixer(layer, &at, n_rows, Path::Window));
            ops.push(Op::ExpertsWindow {
                input: at.expert_input,
                ids: at.ids,
                weights: at.weights,
                table: base.offset(layout.layer_table(self.shape, layer).offset),
                residual: at.residual,
                n_rows,
                n_expert: self.shape.n_expert,
                n_used: self.shape.n_expert_used,
                shape: self.weights.experts[layer as usize].shape(self.exact),
                scratch: base.offset(layout.expert_scratch.offset),
            });
        }
        ops
    }

    /// The norm and product after the last layer of a window: the head graph.
    #[must_use]
    pub fn window_head(&self, base: Addr, layout: &WindowLayout, n_rows: u32, head: Addr) -> Vec<Op> {
        let at = self.window_addrs(base, layout, 0, n_rows);
        self.head(&at, n_rows, head, base.offset(layout.logits.offset), Path::Window)
    }

    fn window_addrs(&self, base: Addr, layout: &WindowLayout, layer: u32, n_rows: u32) -> MixerAddrs {
        MixerAddrs {
            residual: base.offset(layout.residual.offset),
            expert_input: base.offset(layout.expert_input.offset),
            ids: base.offset(layout.layer_ids(self.shape, layer, n_rows).offset),
            weights: base.offset(layout.weights.offset),
            positions: base.offset(layout.positions.offset),
            first_row: base.offset(layout.first_row.offset),
            ..MixerAddrs::scratch(|part| base.offset(part.offset), &layout.mixer)
        }
    }

    fn head(&self, at: &MixerAddrs, n_rows: u32, head: Addr, logits: Addr, path: Path) -> Vec<Op> {
        let mut ops = vec![self.rms_norm(at.residual, self.weights.output_norm, at.normed, n_rows)];
        let mut projector = Projector::new(&mut ops, at.normed, at.quantised, n_rows, path, self.exact);
        projector.project(self.head_matrix(head), logits, false);
        ops
    }
}
