//! Reads a prompt: blocks of chunks through the layers, each expert once a block.
//!
//! ```text
//! for block in prompt:
//!   for layer:
//!     1. for chunk in block: the mixer half; experts' input and routes are kept for the block
//!     2. for experts, ascending, a group at a time: from slot or ring, once; added to the residual
//! ```
//! A block is the unit of commit: the sequence grows by whole blocks. Experts without a slot come through a small ring on a copy
//! stream, so the next group is on its way while one is multiplied.

use std::ops::ControlFlow;
use std::rc::Rc;

use crate::backend::op::{Op, PromptExpert};
use crate::backend::{AddrRange, Backend, Copy, DeviceMemory, Direction, PinnedMemory};
use crate::engine::EngineError;
use crate::engine::decode::{read_f32, read_u32};
use crate::engine::embedding::Embedding;
use crate::experts::Experts;
use crate::model::forward::{ChunkRows, Forward};
use crate::model::layout::{Part, PromptBases, PromptLayout};
use crate::phase::{HeadRef, Scheduler};
use crate::units::{Bytes, ExpertId, TokenId};

/// What a block's reader tells while it works; it may ask to stop.
pub type OnRows<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// The prompt path over one stretch of memory.
pub struct PromptReader<'a, B: Backend> {
    backend: Rc<B>,
    forward: Forward<'a>,
    layout: PromptLayout,
    bases: PromptBases,
    compute: &'a B::Stream,
    copy_stream: B::Stream,
    ring: Ring<B>,
    staging: B::Pinned,
    routes: B::Pinned,
}

/// Places for experts on their way from host memory, used round and round.
struct Ring<B: Backend> {
    places: Vec<AddrRange>,
    arrived: Vec<B::Event>,
    consumed: Vec<B::Event>,
    next: usize,
}

/// The rows of a block sorted by expert.
#[derive(Default)]
struct RoutedRows {
    /// For each expert that has rows, ascending: its number, first entry and count.
    experts: Vec<(u32, u32, u32)>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl RoutedRows {
    /// Sorts `ids` and `weights` `[n_rows, n_used]` by expert, rows ascending within one.
    fn sort(ids: &[u32], weights: &[f32], n_used: usize, n_expert: usize) -> Self {
        let mut counts = vec![0u32; n_expert];
        for &id in ids {
            counts[id as usize] += 1;
        }
        let mut first = Vec::with_capacity(n_expert);
        let mut experts = Vec::new();
        let mut total = 0;
        for (expert, &count) in (0u32..).zip(&counts) {
            first.push(total as usize);
            if count > 0 {
                experts.push((expert, total, count));
            }
            total += count;
        }
        let (mut rows, mut sorted_weights) = (vec![0; ids.len()], vec![0.0; ids.len()]);
        for (row, (ids, weights)) in (0u32..).zip(ids.chunks(n_used).zip(weights.chunks(n_used))) {
            for (&id, &weight) in ids.iter().zip(weights) {
                let at = first[id as usize];
                rows[at] = row;
                sorted_weights[at] = weight;
                first[id as usize] = at + 1;
            }
        }
        Self { experts, rows, weights: sorted_weights }
    }
}

impl<'a, B: Backend> PromptReader<'a, B> {
    /// A reader whose buffers lie in `arena` and, where the layout needs it, in `spill`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(
        backend: Rc<B>,
        forward: Forward<'a>,
        layout: PromptLayout,
        arena: AddrRange,
        spill: Option<AddrRange>,
        compute: &'a B::Stream,
    ) -> Result<Self, EngineError> {
        assert!(layout.arena_bytes <= arena.bytes, "prompt buffers of {} do not fit {}", layout.arena_bytes, arena.bytes);
        let spill_bytes = spill.map_or(Bytes::ZERO, |range| range.bytes);
        assert!(layout.spill_bytes <= spill_bytes, "a spill of {} does not fit {spill_bytes}", layout.spill_bytes);
        let bases = PromptBases { arena: arena.start, spill: spill.map_or(arena.end(), |range| range.start) };
        let place_bytes = Bytes(layout.ring.bytes.0 / u64::from(layout.ring_slots));
        let place = |index| AddrRange { start: bases.addr(layout.ring).offset(place_bytes * index), bytes: place_bytes };
        let events = || (0..layout.ring_slots).map(|_| backend.create_event()).collect::<Result<Vec<_>, _>>();
        let ring =
            Ring { places: (0..u64::from(layout.ring_slots)).map(place).collect(), arrived: events()?, consumed: events()?, next: 0 };
        let staging = backend.alloc_pinned(layout.residual.bytes + layout.positions.bytes, "prompt input")?;
        let routes = backend.alloc_pinned(layout.ids.bytes + layout.weights.bytes + layout.logits.bytes, "prompt routes")?;
        let copy_stream = backend.create_stream()?;
        // The arena was handed over in the order of `compute`; nothing may land in it before that.
        let handed_over = backend.create_event()?;
        backend.record(compute, &handed_over)?;
        backend.wait(&copy_stream, &handed_over)?;
        Ok(Self { backend, forward, layout, bases, compute, copy_stream, ring, staging, routes })
    }

    /// Reads one block of `tokens` at `position`, all layers. Returns whether it was read to its end; where `on_rows` asked to stop,
    /// nothing counts. `on_rows` is called with rows x layers done.
    ///
    /// # Errors
    /// The backend's.
    pub fn read_block(
        &mut self,
        tokens: &[TokenId],
        position: usize,
        embedding: &Embedding,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
        on_rows: &mut OnRows<'_>,
    ) -> Result<ControlFlow<()>, EngineError> {
        self.upload_input(tokens, position, embedding)?;
        let n_rows = u32::try_from(tokens.len()).expect("a block is bounded");
        for layer in 0..self.forward.shape.n_layer {
            for chunk in chunks(n_rows, self.layout.size.chunk) {
                for op in self.forward.prompt_mixer(layer, self.bases, &self.layout, chunk) {
                    self.backend.launch(self.compute, &op)?;
                }
            }
            let routed = self.download_routes(n_rows)?;
            self.upload_routes(&routed)?;
            self.run_experts(layer, n_rows, &routed, scheduler, experts)?;
            if on_rows(u64::from(n_rows) * u64::from(layer + 1)).is_break() {
                self.backend.synchronise(self.compute)?;
                return Ok(ControlFlow::Break(()));
            }
        }
        self.backend.synchronise(self.compute)?;
        Ok(ControlFlow::Continue(()))
    }

    /// Waits for experts that are still on their way, after reading failed: nothing may land in the arena once it is handed back.
    pub fn abandon(&self) {
        // What made reading fail is told already; a device that fails here, too, has nothing on its way any more.
        let _ = self.backend.synchronise(&self.copy_stream);
    }

    /// Logits of all rows of the block just read, tile by tile, handed to `sink` row by row.
    ///
    /// # Errors
    /// The backend's and the sink's.
    pub fn block_logits(&self, n_rows: u32, head: &HeadRef<'_>, sink: &mut dyn FnMut(&[f32])) -> Result<(), EngineError> {
        let n_vocab = self.forward.shape.n_vocab as usize;
        let mut logits = vec![0f32; n_vocab];
        for tile in chunks(n_rows, self.layout.head_rows) {
            for op in self.forward.prompt_head(self.bases, &self.layout, tile, head.range().start) {
                self.backend.launch(self.compute, &op)?;
            }
            let part = Part { bytes: Bytes(u64::from(tile.count) * n_vocab as u64 * 4), ..self.layout.logits };
            let offset = self.layout.ids.bytes + self.layout.weights.bytes;
            self.download(part, &self.routes, offset)?;
            self.backend.synchronise(self.compute)?;
            for row in 0..tile.count as usize {
                read_f32(&self.routes, offset.as_usize() + row * n_vocab * 4, &mut logits);
                sink(&logits);
            }
        }
        Ok(())
    }

    fn upload_input(&self, tokens: &[TokenId], position: usize, embedding: &Embedding) -> Result<(), EngineError> {
        let row_bytes = embedding.n_embd() * 4;
        let mut rows = vec![0u8; tokens.len() * row_bytes];
        embedding.rows(tokens, &mut rows)?;
        self.staging.write(0, &rows);
        let first = i32::try_from(position).expect("positions are below the context length");
        let positions: Vec<u8> = (first..).take(tokens.len()).flat_map(i32::to_le_bytes).collect();
        self.staging.write(rows.len(), &positions);
        self.upload(self.layout.residual, &self.staging, 0, rows.len())?;
        self.upload(self.layout.positions, &self.staging, rows.len(), positions.len())
    }

    fn upload(&self, part: Part, source: &B::Pinned, offset: usize, bytes: usize) -> Result<(), EngineError> {
        let bytes = Bytes::from(bytes);
        debug_assert!(bytes <= part.bytes, "{bytes} for {} of {}", part.name, part.bytes);
        let src = source.range().start.offset(Bytes::from(offset));
        let dst = self.bases.addr(part);
        Ok(self.backend.copy(self.compute, Copy { dst, src, bytes, direction: Direction::ToDevice })?)
    }

    fn download(&self, part: Part, target: &B::Pinned, offset: Bytes) -> Result<(), EngineError> {
        let dst = target.range().start.offset(offset);
        let src = self.bases.addr(part);
        Ok(self.backend.copy(self.compute, Copy { dst, src, bytes: part.bytes, direction: Direction::ToHost })?)
    }

    /// Brings the routes of the block to the host: it decides which experts cross the link.
    fn download_routes(&self, n_rows: u32) -> Result<RoutedRows, EngineError> {
        let shape = self.forward.shape;
        let n_routes = n_rows as usize * shape.n_expert_used as usize;
        let route_bytes = Bytes::from(n_routes * 4);
        self.download(Part { bytes: route_bytes, ..self.layout.ids }, &self.routes, Bytes::ZERO)?;
        self.download(Part { bytes: route_bytes, ..self.layout.weights }, &self.routes, self.layout.ids.bytes)?;
        self.backend.synchronise(self.compute)?;
        let (mut ids, mut weights) = (vec![0u32; n_routes], vec![0f32; n_routes]);
        read_u32(&self.routes, 0, &mut ids);
        read_f32(&self.routes, self.layout.ids.bytes.as_usize(), &mut weights);
        Ok(RoutedRows::sort(&ids, &weights, shape.n_expert_used as usize, shape.n_expert as usize))
    }

    /// Sends the sorted row lists. The pinned memory is free again: the routes in it were read after a synchronisation.
    fn upload_routes(&self, routed: &RoutedRows) -> Result<(), EngineError> {
        let rows: Vec<u8> = routed.rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let weights: Vec<u8> = routed.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        let second = self.layout.ids.bytes.as_usize();
        self.routes.write(0, &rows);
        self.routes.write(second, &weights);
        self.upload(self.layout.expert_rows, &self.routes, 0, rows.len())?;
        self.upload(self.layout.expert_row_weights, &self.routes, second, weights.len())
    }

    /// The expert half of a layer: groups of experts in ascending order, so that the sums are the same whatever is resident.
    fn run_experts(
        &mut self,
        layer: u32,
        n_rows: u32,
        routed: &RoutedRows,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
    ) -> Result<(), EngineError> {
        // Half of the ring is multiplied while the other half is filled.
        let group_max = (self.ring.places.len() / 2).max(1);
        let mut group = Vec::new();
        let mut streamed = Vec::new();
        for &(expert, first, count) in &routed.experts {
            let id = ExpertId { layer, expert };
            experts.note_prompt(id);
            let weights = match experts.resident(id, scheduler.slot_range()) {
                Some(weights) => weights,
                None => {
                    if streamed.len() == group_max {
                        self.launch_group(layer, n_rows, std::mem::take(&mut group), &std::mem::take(&mut streamed))?;
                    }
                    let (place, weights) = self.stream_in(id, experts)?;
                    streamed.push(place);
                    weights
                }
            };
            group.push(PromptExpert { weights, first, count });
        }
        self.launch_group(layer, n_rows, group, &streamed)
    }

    /// Queues an expert's way into the next place of the ring, once the last use of that place is over.
    fn stream_in(&mut self, id: ExpertId, experts: &mut Experts<B>) -> Result<(usize, crate::backend::op::ExpertAddrs), EngineError> {
        let place = self.ring.next;
        self.ring.next = (place + 1) % self.ring.places.len();
        self.backend.wait(&self.copy_stream, &self.ring.consumed[place])?;
        let weights = experts.copy_to(id, self.ring.places[place], &self.copy_stream)?;
        self.backend.record(&self.copy_stream, &self.ring.arrived[place])?;
        Ok((place, weights))
    }

    fn launch_group(&self, layer: u32, n_rows: u32, group: Vec<PromptExpert>, streamed: &[usize]) -> Result<(), EngineError> {
        for &place in streamed {
            self.backend.wait(self.compute, &self.ring.arrived[place])?;
        }
        let at = |part: Part| self.bases.addr(part);
        let op = Op::ExpertsPrompt {
            experts: group,
            input: at(self.layout.expert_input),
            n_input_rows: n_rows,
            rows: at(self.layout.expert_rows),
            row_weights: at(self.layout.expert_row_weights),
            residual: at(self.layout.residual),
            shape: self.forward.weights.experts[layer as usize].shape(self.forward.exact),
            scratch: at(self.layout.expert_scratch),
            tile_rows: self.layout.tile_rows,
        };
        self.backend.launch(self.compute, &op)?;
        for &place in streamed {
            self.backend.record(self.compute, &self.ring.consumed[place])?;
        }
        Ok(())
    }
}

/// Cuts `n_rows` into stretches of at most `size`.
fn chunks(n_rows: u32, size: u32) -> impl Iterator<Item = ChunkRows> {
    (0..n_rows).step_by(size.max(1) as usize).map(move |first| ChunkRows { first, count: size.min(n_rows - first) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_sorted_by_expert_and_keep_their_order() {
        let ids = [1, 3, 0, 3, 1, 2];
        let weights = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7];
        let routed = RoutedRows::sort(&ids, &weights, 2, 4);
        assert_eq!(routed.experts, [(0, 0, 1), (1, 1, 2), (2, 3, 1), (3, 4, 2)]);
        assert_eq!(routed.rows, [1, 0, 2, 2, 0, 1]);
        assert_eq!(routed.weights, [0.2, 0.1, 0.3, 0.7, 0.9, 0.8]);
    }

    #[test]
    fn the_last_stretch_is_the_rest() {
        let cut: Vec<_> = chunks(10, 4).map(|chunk| (chunk.first, chunk.count)).collect();
        assert_eq!(cut, [(0, 4), (4, 4), (8, 2)]);
    }
}
