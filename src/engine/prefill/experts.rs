//! The expert half of a layer: routes to the host, experts from slot or ring, groups in ascending order.

use std::collections::VecDeque;

use super::ring::Group;
use super::routes::RoutedRows;
use super::{BlockReader, FETCH_AHEAD_SHARE};
use crate::backend::op::{Op, Path, PromptExpert};
use crate::backend::{AddrRange, Backend};
use crate::engine::EngineError;
use crate::engine::decode::read_u32;
use crate::experts::Experts;
use crate::model::layout::Part;
use crate::phase::Scheduler;
use crate::quant::ActivationFormat;
use crate::units::{Bytes, ExpertId};

impl<B: Backend> BlockReader<'_, B> {
    /// Sorts the routes of the block by expert and brings the count of each to the host, which decides what crosses the link.
    pub(super) fn sort_routes(&self, n_rows: u32) -> Result<RoutedRows, EngineError> {
        let (shape, layout) = (self.forward.shape, &self.layout);
        let at = |part: Part| self.bases.addr(part);
        let op = Op::SortRoutes {
            ids: at(layout.ids),
            weights: at(layout.weights),
            counts: at(layout.expert_counts),
            rows: at(layout.expert_rows),
            row_weights: at(layout.expert_row_weights),
            entries: at(layout.expert_entries),
            n_rows,
            n_expert: shape.n_expert,
            n_used: shape.n_expert_used,
        };
        self.path.backend.launch(self.compute, &op)?;
        self.download(layout.expert_counts, &self.path.route_counts, Bytes::ZERO)?;
        self.path.backend.synchronise(self.compute)?;
        let mut counts = vec![0; shape.n_expert as usize];
        read_u32(&self.path.route_counts, 0, &mut counts);
        Ok(RoutedRows::of_counts(&counts))
    }

    /// The expert half of a layer: groups of experts in ascending order, so that the sums are the same whatever is resident.
    pub(super) fn run_experts(
        &mut self,
        layer: u32,
        n_rows: u32,
        routed: &RoutedRows,
        more_follow: bool,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
    ) -> Result<(), EngineError> {
        if self.layout.ring_slots == 0 {
            return self.run_experts_in_place(layer, n_rows, routed, scheduler, experts);
        }
        let last_ahead = self.path.ring.last_ahead();
        let is_absent = |expert: u32| experts.resident(ExpertId { layer, expert }, scheduler.slot_range()).is_none();
        let mut wanted: VecDeque<u32> = routed.experts.iter().map(|&(expert, ..)| expert).filter(|&expert| is_absent(expert)).collect();
        wanted.retain(|&expert| last_ahead.is_none_or(|last| expert > last));
        self.path.ring.fill_ahead(layer, &mut wanted, experts)?;
        let mut group = Vec::new();
        let mut open: Option<Group> = None;
        for &(expert, first, count) in &routed.experts {
            let id = ExpertId { layer, expert };
            experts.note_prompt(id);
            let weights = match experts.resident(id, scheduler.slot_range()) {
                Some(weights) => weights,
                None => loop {
                    let arriving = match open.as_mut() {
                        Some(arriving) => arriving,
                        None => open.insert(self.path.ring.next_group(self.compute)?.expect("every absent expert was sent for")),
                    };
                    match arriving.experts.pop_front() {
                        Some((arrived, weights)) if arrived == expert => break weights,
                        // A guess that no row went to.
                        Some((arrived, _)) => debug_assert!(arrived < expert, "{arrived} arrives before {expert}"),
                        None => {
                            self.launch_group(layer, n_rows, std::mem::take(&mut group))?;
                            self.path.ring.consumed(open.take().expect("it is open"), self.compute)?;
                            self.path.ring.fill_ahead(layer, &mut wanted, experts)?;
                        }
                    }
                },
            };
            group.push(PromptExpert { weights, first, count });
        }
        self.launch_group(layer, n_rows, group)?;
        if let Some(open) = open {
            self.path.ring.consumed(open, self.compute)?;
        }
        self.path.ring.drop_ahead();
        self.fetch_ahead(layer, routed, more_follow, scheduler, experts)
    }

    /// Experts that have no slot are read where they are, each once: for few rows the link is not crossed twice anyway.
    fn run_experts_in_place(
        &mut self,
        layer: u32,
        n_rows: u32,
        routed: &RoutedRows,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
    ) -> Result<(), EngineError> {
        let mut group = Vec::with_capacity(routed.experts.len());
        for &(expert, first, count) in &routed.experts {
            let id = ExpertId { layer, expert };
            experts.note_prompt(id);
            group.push(PromptExpert { weights: experts.in_place(id, scheduler.slot_range()), first, count });
        }
        self.launch_group(layer, n_rows, group)
    }

    /// Sends for the first experts of the next layer, where a block like this one uses nearly all of them.
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    fn fetch_ahead(
        &mut self,
        layer: u32,
        routed: &RoutedRows,
        more_follow: bool,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
    ) -> Result<(), EngineError> {
        let n_expert = self.forward.shape.n_expert;
        let n_layer = self.forward.shape.n_expert_layer();
        let next = if layer + 1 < n_layer && !self.is_keys_only(layer + 1) { Some(layer + 1) } else { more_follow.then_some(0) };
        let Some(layer) = next.filter(|_| routed.experts.len() as f64 >= FETCH_AHEAD_SHARE * f64::from(n_expert)) else { return Ok(()) };
        let is_absent = |expert: &u32| experts.resident(ExpertId { layer, expert: *expert }, scheduler.slot_range()).is_none();
        let mut wanted: VecDeque<u32> = (0..n_expert).filter(is_absent).collect();
        self.path.ring.fill_ahead(layer, &mut wanted, experts)
    }

    fn launch_group(&mut self, layer: u32, n_rows: u32, group: Vec<PromptExpert>) -> Result<(), EngineError> {
        if group.is_empty() {
            return Ok(());
        }
        let at = |part: Part| self.bases.addr(part);
        let (n_experts, routed_rows) = (group.len(), group.iter().map(|expert| expert.count).sum());
        let shape = self.forward.weights.experts[layer as usize].shape(self.forward.arithmetic, Path::Prompt);
        let unpacked = if shape.input_format == ActivationFormat::F16 { self.bases.range(self.layout.unpacked) } else { AddrRange::EMPTY };
        let op = Op::ExpertsPrompt {
            experts: group,
            input: at(self.layout.expert_input),
            n_input_rows: n_rows,
            rows: at(self.layout.expert_rows),
            row_weights: at(self.layout.expert_row_weights),
            entries: at(self.layout.expert_entries),
            n_used: self.forward.shape.n_expert_used,
            residual: at(self.layout.residual),
            shape,
            scratch: at(self.layout.expert_scratch),
            tile_rows: self.layout.tile_rows,
            unpacked,
        };
        if self.path.probe.wants_experts() && self.layout.ring_slots > 0 {
            return self.path.probe.launch_experts(&op, n_experts, routed_rows, self.compute);
        }
        Ok(self.path.backend.launch(self.compute, &op)?)
    }
}
