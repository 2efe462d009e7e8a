//! Reads a prompt in blocks of chunks through the layers, each expert once a block.
//!
//! ```text
//! for block in prompt:
//!   for layer:
//!     1. for chunk in block: the mixer half; experts' input and routes are kept for the block
//!     2. for experts, ascending, a group at a time: from slot or ring, once; added to the residual
//! ```
//! A block is the unit of commit: the sequence grows by whole blocks. Experts without a slot come through a small ring on a copy
//! stream. Where nearly every expert of a layer is used, the ring is filled for the next layer while its mixer half runs.
//!
//! Of the last layer only keys and values are computed, unless logits are asked for: the first logits of an answer come from the
//! window of the last prompt token. Where the model has a draft layer, that is the last one.
//!
//! A recurrent state goes with the rows, layer by layer: it stands at the block's end afterwards, and may be copied out on the way, at a
//! chunk's border.

mod experts;
mod probe;
mod ring;
mod routes;

use std::ops::{ControlFlow, Range};
use std::rc::Rc;

use crate::backend::{Addr, AddrRange, Backend, Copy, DeviceMemory, Direction, PinnedMemory};
use crate::engine::EngineError;
use crate::engine::costs::BlockSample;
use crate::engine::decode::read_f32;
use crate::engine::embedding::Embedding;
use crate::experts::Experts;
use crate::model::ModelShape;
use crate::model::forward::{BlockRows, ChunkRows, Forward, HeadInput};
use crate::model::layout::{Part, PromptBases, PromptLayout, StateLayout};
use crate::model::shape::Mixer;
use crate::phase::{HeadRef, Scheduler};
use crate::units::{Bytes, TokenId};
use probe::Probe;
pub use probe::keys_seen;
use ring::Ring;

/// Rows of embeddings that are staged at once.
const STAGED_ROWS: usize = 256;
/// Share of a layer's experts from which on the next layer's are fetched before its routes are known.
const FETCH_AHEAD_SHARE: f64 = 0.9;

/// What a block's reader tells while it works, in rows x layers; it may ask to stop.
pub type OnRows<'a> = dyn FnMut(u64) -> ControlFlow<()> + 'a;

/// What the prompt path keeps from one prompt to the next: streams, events and pinned memory, but no device memory.
pub struct PromptPath<B: Backend> {
    backend: Rc<B>,
    ring: Ring<B>,
    probe: Probe<B>,
    staging: [Staging<B>; 2],
    chunk_done: [B::Event; 2],
    /// Rows of each expert of a layer.
    route_counts: B::Pinned,
    /// Logits of a tile of rows, made when they are first asked for.
    logits: Option<B::Pinned>,
}

/// Pinned memory for some rows of input and their positions.
struct Staging<B: Backend> {
    pinned: B::Pinned,
    uploaded: B::Event,
}

impl<B: Backend> PromptPath<B> {
    /// Makes what blocks of up to `block_max` tokens need.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, shape: &ModelShape, block_max: u32) -> Result<Self, EngineError> {
        let row_bytes = shape.n_embd as usize * 4 + 4;
        // The next position, and the first row of the caches.
        let first_row_bytes = 8;
        let staging = || -> Result<_, EngineError> {
            let rows = STAGED_ROWS.min(block_max.max(1) as usize);
            let pinned = backend.alloc_pinned(Bytes::from(rows * row_bytes + first_row_bytes), "prompt input")?;
            Ok(Staging { pinned, uploaded: backend.create_event()? })
        };
        Ok(Self {
            ring: Ring::new(Rc::clone(&backend))?,
            probe: Probe::new(Rc::clone(&backend))?,
            staging: [staging()?, staging()?],
            chunk_done: [backend.create_event()?, backend.create_event()?],
            route_counts: backend.alloc_pinned(Bytes(u64::from(shape.n_expert) * 4), "prompt routes")?,
            logits: None,
            backend,
        })
    }
}

/// One block to read.
#[derive(Clone, Copy)]
pub struct Block<'t> {
    /// Its tokens.
    pub tokens: &'t [TokenId],
    /// Position of the first.
    pub position: usize,
    /// Row of the caches that holds position 0.
    pub first_row: u32,
    /// The token behind them, which the draft layer reads beside the last row.
    pub next: TokenId,
    /// Whether another block follows in the same buffers.
    pub more_follow: bool,
    /// Where the recurrent state is to be copied out on the way, ascending.
    pub checkpoints: &'t [StateCheckpoint],
}

/// A copy of the recurrent state after some rows of a block.
#[derive(Clone, Copy)]
pub struct StateCheckpoint {
    /// Rows of the block that the state then holds; the border of a step.
    pub rows: u32,
    /// Where it goes, in pinned memory.
    pub target: Addr,
}

impl Block<'_> {
    fn n_rows(&self) -> u32 {
        u32::try_from(self.tokens.len()).expect("a block is bounded")
    }

    fn rows(&self) -> BlockRows {
        BlockRows { position: u32::try_from(self.position).expect("positions are below the context length"), count: self.n_rows() }
    }

    /// The tokens that follow those of a chunk.
    fn next_tokens(&self, chunk: ChunkRows) -> impl Iterator<Item = TokenId> {
        let behind = self.tokens.iter().copied().chain([self.next]);
        behind.skip(chunk.first as usize + 1).take(chunk.count as usize)
    }
}

/// What a block is read with.
pub struct ReadWith<'r, B: Backend> {
    /// Rows of tokens.
    pub embedding: &'r Embedding,
    /// Knows which slots are published.
    pub scheduler: &'r Scheduler<B>,
    /// Weights in slots and in host memory.
    pub experts: &'r mut Experts<B>,
    /// Told while the block is read.
    pub on_rows: &'r mut OnRows<'r>,
}

/// The prompt path over one stretch of memory.
pub struct BlockReader<'a, B: Backend> {
    path: &'a mut PromptPath<B>,
    forward: Forward<'a>,
    layout: PromptLayout,
    bases: PromptBases,
    compute: &'a B::Stream,
    /// The layers whose mixer half is timed: attention, and a delta net where there is one.
    probed: [Option<u32>; 2],
}

impl<'a, B: Backend> BlockReader<'a, B> {
    /// A reader whose buffers lie in `arena` and, where the layout needs it, in `spill`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(
        path: &'a mut PromptPath<B>,
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
        let ring = AddrRange { start: bases.addr(layout.ring), bytes: layout.ring.bytes };
        // Marked anew: the marks of a prompt that failed are lost.
        let uploads = path.staging.iter().map(|staging| &staging.uploaded);
        path.chunk_done.iter().chain(uploads).try_for_each(|event| path.backend.record(compute, event))?;
        path.ring.begin(ring, layout.ring_slots, compute)?;
        // Not the first layer, which waits for its experts, where there are others.
        let from = u32::from(forward.shape.n_layer > 2);
        let probed =
            [Mixer::Attention, Mixer::Delta].map(|mixer| (from..forward.shape.n_layer).find(|&layer| forward.shape.mixer(layer) == mixer));
        Ok(Self { path, forward, layout, bases, compute, probed })
    }

    /// Reads one block, all layers. Returns whether it was read to its end; where `on_rows` asked to stop, nothing counts.
    ///
    /// # Errors
    /// The backend's.
    pub fn read_block(&mut self, block: Block<'_>, with: ReadWith<'_, B>) -> Result<ControlFlow<()>, EngineError> {
        let (tokens, most) = (block.tokens.len(), self.layout.size.block);
        assert!(tokens <= most as usize, "a block of {tokens} tokens in buffers for {most}");
        self.path.probe.begin();
        self.path.ring.begin_timing();
        self.upload_input(block, with.embedding)?;
        let shape = self.forward.shape;
        // With logits, the caller wants those of the trunk before the draft layer writes over its rows.
        let n_layer = if self.layout.size.all_logits { shape.n_layer } else { shape.n_expert_layer() };
        self.read_layers(0..n_layer, block, with)
    }

    /// Reads the block just read through the draft layer.
    ///
    /// # Errors
    /// The backend's.
    pub fn read_draft_layer(&mut self, block: Block<'_>, with: ReadWith<'_, B>) -> Result<ControlFlow<()>, EngineError> {
        let shape = self.forward.shape;
        self.read_layers(shape.n_layer..shape.n_expert_layer(), block, with)
    }

    fn read_layers(&mut self, layers: Range<u32>, block: Block<'_>, with: ReadWith<'_, B>) -> Result<ControlFlow<()>, EngineError> {
        let ReadWith { embedding, scheduler, experts, on_rows } = with;
        let n_rows = block.n_rows();
        for layer in layers.clone() {
            let layers_done = u64::from(n_rows) * u64::from(layer);
            let is_delta = self.forward.shape.mixer(layer) == Mixer::Delta;
            let checkpoints = if is_delta { block.checkpoints } else { &[] };
            let cuts = checkpoints.iter().map(|checkpoint| checkpoint.rows);
            for (index, chunk) in chunks(n_rows, self.layout.size.chunk, cuts).enumerate() {
                // Two chunks are queued at most, so a wish to stop is met within one.
                self.path.backend.synchronise_event(&self.path.chunk_done[index % 2])?;
                if layer >= self.forward.shape.n_layer {
                    self.prepare_draft_input(block, chunk, embedding)?;
                }
                self.launch_mixer(layer, block.rows(), chunk, index == 0)?;
                if let Some(checkpoint) = checkpoints.iter().find(|checkpoint| checkpoint.rows == chunk.first + chunk.count) {
                    self.copy_state_out(layer, checkpoint.target)?;
                }
                self.path.backend.record(self.compute, &self.path.chunk_done[index % 2])?;
                if on_rows(layers_done + u64::from(chunk.first) / 2).is_break() {
                    self.path.backend.synchronise(self.compute)?;
                    return Ok(ControlFlow::Break(()));
                }
            }
            if !self.is_keys_only(layer) {
                let routed = self.sort_routes(n_rows)?;
                self.run_experts(layer, n_rows, &routed, block.more_follow, scheduler, experts)?;
            }
            if layer + 1 == layers.end {
                // Done is what has been computed, not what is queued.
                self.path.backend.synchronise(self.compute)?;
            }
            if on_rows(layers_done + u64::from(n_rows)).is_break() {
                self.path.backend.synchronise(self.compute)?;
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Copies the state that a delta net has reached to its place in `target`.
    fn copy_state_out(&self, layer: u32, target: Addr) -> Result<(), EngineError> {
        let (layout, net) = (StateLayout::new(self.forward.shape), self.forward.shape.index_among(Mixer::Delta, layer));
        let source = layout.net(self.forward.resident.state, net);
        let copy = Copy { dst: layout.net(target, net).start, src: source.start, bytes: source.bytes, direction: Direction::ToHost };
        Ok(self.path.backend.copy(self.compute, copy)?)
    }

    /// Turns a chunk of the trunk's rows into the draft layer's.
    fn prepare_draft_input(&mut self, block: Block<'_>, chunk: ChunkRows, embedding: &Embedding) -> Result<(), EngineError> {
        let row_bytes = embedding.n_embd() * 4;
        let tokens: Vec<TokenId> = block.next_tokens(chunk).collect();
        let mut rows = Vec::new();
        for (index, tokens) in tokens.chunks(STAGED_ROWS).enumerate() {
            rows.resize(tokens.len() * row_bytes, 0);
            embedding.rows(tokens, &mut rows)?;
            self.send(index, &[(self.layout.mixer.draft.embedded, index * STAGED_ROWS * row_bytes, &rows)])?;
        }
        let ops = self.forward.prompt_draft_input(self.bases, &self.layout, block.rows(), chunk);
        Ok(ops.iter().try_for_each(|op| self.path.backend.launch(self.compute, op))?)
    }

    /// What was measured of the block just read.
    ///
    /// # Errors
    /// The backend's.
    pub fn sample(&mut self) -> Result<Option<BlockSample>, EngineError> {
        let sample = self.path.probe.finish()?;
        let link = self.path.ring.timed()?;
        Ok(sample.map(|sample| BlockSample { link, ..sample }))
    }

    /// Waits for experts that are still on their way, also after reading failed or was stopped: nothing may land in the arena once it
    /// is handed back.
    ///
    /// # Errors
    /// The backend's.
    pub fn finish(&mut self) -> Result<(), EngineError> {
        self.path.ring.finish()
    }

    fn is_keys_only(&self, layer: u32) -> bool {
        layer + 1 == self.forward.shape.n_expert_layer() && !self.layout.size.all_logits
    }

    fn launch_mixer(&mut self, layer: u32, block: BlockRows, chunk: ChunkRows, is_first_chunk: bool) -> Result<(), EngineError> {
        let ops = match self.is_keys_only(layer) {
            true => self.forward.prompt_keys_values(layer, self.bases, &self.layout, block, chunk),
            false => self.forward.prompt_mixer(layer, self.bases, &self.layout, block, chunk),
        };
        let [attention, delta_net] = self.probed.map(|probed| is_first_chunk && probed == Some(layer) && !self.is_keys_only(layer));
        if attention {
            let position = block.position as usize + chunk.first as usize;
            return self.path.probe.launch_mixer(&ops, chunk.count, position, self.compute);
        }
        if delta_net {
            return self.path.probe.launch_delta_net(&ops, self.compute);
        }
        Ok(ops.iter().try_for_each(|op| self.path.backend.launch(self.compute, op))?)
    }

    /// Logits of all rows of the block just read, tile by tile, handed to `sink` row by row.
    ///
    /// # Errors
    /// The backend's.
    pub fn block_logits(
        &mut self,
        n_rows: u32,
        of: HeadInput,
        head: &HeadRef<'_>,
        sink: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        let n_vocab = self.forward.shape.n_vocab as usize;
        let pinned = match self.path.logits.take() {
            Some(pinned) if pinned.range().bytes >= self.layout.logits.bytes => pinned,
            _ => self.path.backend.alloc_pinned(self.layout.logits.bytes, "prompt logits")?,
        };
        let mut logits = vec![0f32; n_vocab];
        for tile in chunks(n_rows, self.layout.head_rows, []) {
            for op in self.forward.prompt_head(self.bases, &self.layout, tile, head.range().start, of) {
                self.path.backend.launch(self.compute, &op)?;
            }
            let part = Part { bytes: Bytes(u64::from(tile.count) * n_vocab as u64 * 4), ..self.layout.logits };
            self.download(part, &pinned, Bytes::ZERO)?;
            self.path.backend.synchronise(self.compute)?;
            for row in 0..tile.count as usize {
                read_f32(&pinned, row * n_vocab * 4, &mut logits);
                sink(&logits);
            }
        }
        self.path.logits = Some(pinned);
        Ok(())
    }

    /// Sends embeddings and positions of a block, one stretch being gathered while the one before is on its way.
    fn upload_input(&mut self, block: Block<'_>, embedding: &Embedding) -> Result<(), EngineError> {
        let row_bytes = embedding.n_embd() * 4;
        let mut first_position = i32::try_from(block.position).expect("positions are below the context length");
        let mut rows = Vec::new();
        for (index, tokens) in block.tokens.chunks(STAGED_ROWS).enumerate() {
            rows.resize(tokens.len() * row_bytes, 0);
            embedding.rows(tokens, &mut rows)?;
            // One more than the rows: the next stretch writes the same number there.
            let positions: Vec<u8> = (first_position..).take(tokens.len() + 1).flat_map(i32::to_le_bytes).collect();
            first_position += i32::try_from(tokens.len()).expect("a stretch is short");
            let row = index * STAGED_ROWS;
            self.send(
                index,
                &[
                    (self.layout.residual, row * row_bytes, &rows),
                    (self.layout.positions, row * 4, &positions),
                    (self.layout.first_row, 0, &block.first_row.to_le_bytes()),
                ],
            )?;
        }
        Ok(())
    }

    /// Queues the copies of one stretch of input, each to an offset in a part, through the pinned memory that the stretch before last used.
    fn send(&self, stretch: usize, pieces: &[(Part, usize, &[u8])]) -> Result<(), EngineError> {
        let Staging { pinned, uploaded } = &self.path.staging[stretch % 2];
        self.path.backend.synchronise_event(uploaded)?;
        let mut staged = 0;
        for &(part, offset, bytes) in pieces {
            pinned.write(staged, bytes);
            let (src, dst) = (pinned.range().start.offset(Bytes::from(staged)), self.bases.addr(part).offset(Bytes::from(offset)));
            staged += bytes.len();
            let (bytes, offset) = (Bytes::from(bytes.len()), Bytes::from(offset));
            debug_assert!(offset + bytes <= part.bytes, "{bytes} at {offset} for {} of {}", part.name, part.bytes);
            self.path.backend.copy(self.compute, Copy { dst, src, bytes, direction: Direction::ToDevice })?;
        }
        Ok(self.path.backend.record(self.compute, uploaded)?)
    }

    fn download(&self, part: Part, target: &B::Pinned, offset: Bytes) -> Result<(), EngineError> {
        let dst = target.range().start.offset(offset);
        let src = self.bases.addr(part);
        Ok(self.path.backend.copy(self.compute, Copy { dst, src, bytes: part.bytes, direction: Direction::ToHost })?)
    }
}

/// Cuts `n_rows` into stretches of at most `size`; at each row of `cuts`, ascending, one ends.
fn chunks(n_rows: u32, size: u32, cuts: impl IntoIterator<Item = u32>) -> impl Iterator<Item = ChunkRows> {
    let mut from = 0;
    let stretches = cuts.into_iter().chain([n_rows]).map(move |to| (std::mem::replace(&mut from, to), to));
    stretches.flat_map(move |(from, to)| {
        (from..to).step_by(size.max(1) as usize).map(move |first| ChunkRows { first, count: size.min(to - first) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_stretch_is_the_rest() {
        let stretches = |cuts: &[u32]| chunks(10, 4, cuts.iter().copied()).map(|chunk| (chunk.first, chunk.count)).collect::<Vec<_>>();
        assert_eq!(stretches(&[]), [(0, 4), (4, 4), (8, 2)]);
        assert_eq!(stretches(&[6, 7]), [(0, 4), (4, 2), (6, 1), (7, 3)]);
        assert_eq!(stretches(&[10]), stretches(&[]));
    }
}
