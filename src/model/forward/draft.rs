//! The draft (MTP) layer: from the trunk's row behind the last norm at position `p` and the token at `p + 1` to a guess of the token at
//! `p + 2`.
//!
//! Its caches hold what it knows of position `p + 1` in row `p`: no hidden row stands before position 0, so position 0 is left out, and
//! rows are counted as the trunk's are. Queries and keys are rotated by `p + 1`.

use super::{BlockRows, ChunkRows, Forward, Projector, Rows};
use crate::backend::Addr;
use crate::backend::op::{Matrix, Op};
use crate::model::layout::{Part, PromptBases, PromptLayout, WindowLayout};
use crate::model::weights::{DraftDense, MixerDense};
use crate::units::Bytes;

/// What the draft layer goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftFrom {
    /// The trunk's rows that wait for it.
    Trunk,
    /// Its own last row: a further guess.
    Own,
}

impl Forward<'_> {
    /// The layer's number.
    fn draft_layer(&self) -> u32 {
        self.shape.n_layer
    }

    /// `residual = eh_proj [norm(embedded); norm(hidden)]`, the embedded rows lying in the draft's scratch.
    fn draft_input(&self, ops: &mut Vec<Op>, draft: DraftDense, hidden: Addr, rows: &Rows<'_>) {
        let (n_rows, n_cols, parts) = (rows.n_rows, self.shape.n_embd, &rows.parts.draft);
        let [embedded, left, right, joined, quantised] =
            [parts.embedded, parts.left, parts.right, parts.joined, parts.quantised].map(|part| rows.at(part));
        ops.push(self.rms_norm(embedded, draft.enorm, left, n_rows));
        ops.push(self.rms_norm(hidden, draft.hnorm, right, n_rows));
        ops.push(Op::JoinRows { left, right, out: joined, n_rows, n_cols });
        rows.products(joined, quantised, self.arithmetic).project(ops, self.matrix(draft.eh_proj), rows.residual, false);
    }

    /// Turns a chunk of the block's residual, behind the last layer, into the draft layer's input; the embeddings of the tokens that
    /// follow lie in the draft's scratch. Nothing where the model has no draft layer.
    #[must_use]
    pub fn prompt_draft_input(&self, bases: PromptBases, layout: &PromptLayout, block: BlockRows, chunk: ChunkRows) -> Vec<Op> {
        let mut ops = Vec::new();
        let Some(draft) = self.weights.draft else { return ops };
        let rows = self.prompt_rows(self.draft_layer(), bases, layout, block, chunk);
        let hidden = rows.at(rows.parts.normed);
        ops.push(self.rms_norm(rows.residual, self.weights.output_norm, hidden, rows.n_rows));
        self.draft_input(&mut ops, draft, hidden, &rows);
        ops
    }

    /// The draft layer over `n_rows` rows of the trunk, or over one row of its own, up to its last row behind its norm.
    #[must_use]
    pub fn draft_trunk(&self, base: Addr, layout: &WindowLayout, n_rows: u32, from: DraftFrom) -> Vec<Op> {
        let mut ops = Vec::new();
        let Some(draft) = self.weights.draft else { return ops };
        let layer = self.draft_layer();
        let rows = self.window_rows(base, layout, layer, n_rows);
        let hidden = match from {
            DraftFrom::Trunk => layout.draft.waiting,
            DraftFrom::Own => layout.draft.own,
        };
        self.draft_input(&mut ops, draft, base.offset(hidden.offset), &rows);
        self.window_layer(&mut ops, base, layout, layer, n_rows);
        let last = rows.residual.offset(Bytes(u64::from(n_rows - 1) * u64::from(self.shape.n_embd) * 4));
        ops.push(self.rms_norm(last, draft.head_norm, base.offset(layout.draft.own.offset), 1));
        ops
    }

    /// Keys and values of the draft layer alone, for rows that nothing is guessed from.
    #[must_use]
    pub fn draft_keys_values(&self, base: Addr, layout: &WindowLayout, n_rows: u32) -> Vec<Op> {
        let mut ops = Vec::new();
        let Some(draft) = self.weights.draft else { return ops };
        let layer = self.draft_layer();
        let rows = self.window_rows(base, layout, layer, n_rows);
        self.draft_input(&mut ops, draft, base.offset(layout.draft.waiting.offset), &rows);
        let dense = &self.weights.layers[layer as usize];
        let MixerDense::Attention(attention) = dense.mixer else { return ops };
        ops.push(self.rms_norm(rows.residual, dense.attn_norm, rows.at(rows.parts.normed), n_rows));
        self.keys_values(&mut ops, layer, attention, &rows, &mut rows.normed_products(self.arithmetic));
        ops
    }

    /// Logits of the draft layer's last row: by its own head where it has one, else by the model's at `head`.
    #[must_use]
    pub fn draft_head(&self, base: Addr, layout: &WindowLayout, head: Addr) -> Vec<Op> {
        let mut ops = Vec::new();
        let at = |part: Part| base.offset(part.offset);
        let mut projector = Projector::of_window(at(layout.draft.own), at(layout.mixer.quantised), 1, self.arithmetic);
        let matrix = match self.resident.draft_head {
            Some(own) => Matrix { rows: own.n_tokens, ..self.head_matrix(own.addr) },
            None => self.head_matrix(head),
        };
        projector.project(&mut ops, matrix, at(layout.logits), false);
        ops
    }
}
