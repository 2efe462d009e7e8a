//! What is on the device in both phases whatever is lent: weights, caches, states, windows and their graphs.

use std::sync::Arc;

use super::{PhaseBytes, Plan, PlanOwners, Planner, PromptMemory, SlabPlan, WINDOW_ROWS};
use crate::backend::Addr;
use crate::backend::op::Op;
use crate::model::forward::draft::DraftFrom;
use crate::model::forward::{Forward, ResidentAddrs};
use crate::model::layout::{PromptSize, StateLayout, WindowLayout};
use crate::model::weights::DEVICE_ALIGN;
use crate::model::{ModelShape, ModelWeights};
use crate::phase::prompt_sizes::largest_fitting;
use crate::settings::{EngineSettings, SpecSetting, TokenSource};
use crate::units::{Bytes, TokenId};

/// Windows have as many rows as cost, beyond one row, at most this fraction of what is left for slots and prompt buffers.
const WINDOW_SHARE: u64 = 64;
/// Rows of a wide window, the first that costs no more than its share of what is there for slots.
const WIDE_ROWS: [u32; 4] = [128, 64, 32, 16];
/// One part in so many of the room for slots may go to the wide window.
const WIDE_SHARE: u64 = 64;

/// The model's part of the sum, for one context length.
#[derive(Clone, Copy)]
pub(super) struct Resident {
    pub(super) kv: Bytes,
    pub(super) state: Bytes,
    pub(super) draft_head: Bytes,
    pub(super) window: Bytes,
    pub(super) graphs: Bytes,
    pub(super) head: Bytes,
    pub(super) total_without_head: Bytes,
}

/// The tokens that the draft layer chooses among by a head of its own; `None` where it chooses among all, or there is none.
#[must_use]
pub fn draft_vocab<'s>(shape: &ModelShape, settings: &'s EngineSettings) -> Option<&'s [TokenId]> {
    match &settings.drafts.vocab {
        Some(TokenSource::List(tokens)) if shape.has_draft_layer && settings.drafts.uses_mtp() => Some(tokens),
        _ => None,
    }
}

impl Planner<'_> {
    /// Rows of the largest window that costs, beyond a window of one row, at most its share of what that one leaves. Drafts that were asked
    /// for by number have their rows.
    pub(super) fn window_rows_worth(&self, ctx_tokens: u32) -> u32 {
        let asked = match (self.settings.drafts.drafts_max(), self.settings.drafts.most) {
            (0, _) => 1,
            // A draft layer that never drafts would be paid for in vain.
            (_, SpecSetting::Auto) => 1 + u32::from(self.shape.has_draft_layer && self.settings.drafts.uses_mtp()),
            (_, SpecSetting::Drafts(drafts)) => 1 + drafts.min(WINDOW_ROWS - 1),
        };
        let fixed = |n_rows| {
            let resident = self.resident(ctx_tokens, n_rows);
            resident.total_without_head + resident.head
        };
        let one = fixed(1);
        let share = Bytes(self.limit.saturating_sub(self.reserve()).saturating_sub(one).0 / WINDOW_SHARE);
        largest_fitting(WINDOW_ROWS, |n_rows| fixed(n_rows) <= one + share).max(asked)
    }

    /// Buffers of windows of up to `n_rows` rows, and the graphs of all of them.
    fn window_bytes(&self, n_rows: u32) -> (Bytes, Bytes) {
        let window = WindowLayout::new(self.shape, self.weights, self.arithmetic, n_rows);
        let nowhere = ResidentAddrs { dense: Addr(0), kv: Addr(0), state: Addr(0), draft_head: None, n_ctx: 1, kv_format: self.kv_format };
        let forward = Forward { shape: self.shape, weights: self.weights, resident: nowhere, arithmetic: self.arithmetic };
        let base = Addr(0);
        // A window has the same operations whatever its rows.
        let of_each_size = [
            forward.window_trunk(base, &window, 1),
            forward.window_head(base, &window, 1, Addr(0)),
            forward.window_commit(base, &window, 1),
            forward.draft_trunk(base, &window, 1, DraftFrom::Trunk),
        ];
        let once = [forward.draft_trunk(base, &window, 1, DraftFrom::Own), forward.draft_head(base, &window, Addr(0))];
        let nodes = |lists: &[Vec<Op>]| lists.iter().map(Vec::len).sum::<usize>() as u64;
        let nodes = nodes(&of_each_size) * u64::from(n_rows) + if self.shape.has_draft_layer { nodes(&once) } else { 0 };
        (window.bytes, self.device.graph_node_bytes * nodes)
    }

    /// Owners that are there in both phases.
    pub(super) fn resident_owners(&self, resident: &Resident) -> PlanOwners {
        vec![
            ("context", self.device.context_bytes),
            ("dense weights", self.weights.dense_bytes),
            ("KV cache", resident.kv),
            ("recurrent state", resident.state),
            ("draft head", resident.draft_head),
            ("decode buffers", resident.window),
            ("captured graphs", resident.graphs),
        ]
    }

    pub(super) fn resident(&self, ctx_tokens: u32, window_rows: u32) -> Resident {
        let (window, graphs) = self.window_bytes(window_rows);
        let kv = ModelWeights::kv_bytes(self.shape, self.kv_format, ctx_tokens);
        let head = self.weights.head.bytes.align_up(DEVICE_ALIGN);
        let state = StateLayout::new(self.shape).bytes();
        let draft_head = self.weights.draft_head_bytes(draft_vocab(self.shape, self.settings).map_or(0, <[_]>::len));
        let total_without_head = self.device.context_bytes + self.weights.dense_bytes + kv + state + draft_head + window + graphs;
        Resident { kv, state, draft_head, window, graphs, head, total_without_head }
    }

    /// Rows and bytes of the wide window that `room` for slots affords.
    pub(super) fn wide_window(&self, room: Bytes, ctx_tokens: u32) -> (u32, Bytes) {
        let bytes = |rows| self.size_bytes(PromptSize { ring_slots: 0, ..PromptSize::chunk(rows) });
        let affordable = Bytes(room.0 / WIDE_SHARE);
        WIDE_ROWS
            .into_iter()
            .filter(|&rows| rows <= ctx_tokens)
            .map(|rows| (rows, bytes(rows)))
            .find(|&(_, bytes)| bytes <= affordable)
            .unwrap_or((0, Bytes::ZERO))
    }

    /// A plan with what follows from `resident` and the settings alone; slots and prompt buffers are still to be filled in.
    pub(super) fn base(&self, resident: &Resident, ctx_tokens: u32, window_rows: u32, budget: Bytes) -> Plan {
        let undecided = "";
        Plan {
            limit_bytes: self.limit,
            limit_decided_by: self.limit_decided_by,
            reserve_bytes: self.reserve(),
            budget_bytes: budget,
            ctx_tokens,
            kv_format: self.kv_format,
            longer_context: None,
            arithmetic: self.arithmetic,
            context_bytes: self.device.context_bytes,
            dense_bytes: self.weights.dense_bytes,
            kv_bytes: resident.kv,
            state_bytes: resident.state,
            draft_head_bytes: resident.draft_head,
            window_bytes: resident.window,
            graph_bytes: resident.graphs,
            window_rows,
            head_bytes: resident.head,
            slot_bytes: self.table.largest(),
            slot_table: Arc::clone(self.table),
            wide_rows: 0,
            wide_bytes: Bytes::ZERO,
            slots: 0,
            prompt_memory: PromptMemory::None,
            spill_room: Bytes::ZERO,
            kept_head_chunk: 0,
            kept_head_block: 0,
            alias_chunk: 0,
            alias_block: 0,
            chunk: 0,
            block: 0,
            decode: PhaseBytes::new(Vec::new()),
            prefill: PhaseBytes::new(Vec::new()),
            slots_decided_by: undecided,
            prompt_decided_by: undecided,
            slab: SlabPlan::default(),
        }
    }
}
