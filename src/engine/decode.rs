//! One decode window: a token in, logits out.

use std::rc::Rc;

use crate::backend::{AddrRange, Backend, Copy, DeviceMemory, Direction, PinnedMemory};
use crate::engine::EngineError;
use crate::engine::captured::CapturedOps;
use crate::engine::embedding::Embedding;
use crate::experts::Experts;
use crate::model::ModelShape;
use crate::model::forward::Forward;
use crate::model::layout::{Part, WindowLayout};
use crate::phase::Scheduler;
use crate::units::{Bytes, TokenId};

/// The decode path's buffers and captured graphs.
pub struct Windows<B: Backend> {
    backend: Rc<B>,
    buffer: B::Buffer,
    layout: WindowLayout,
    trunk: CapturedOps<B>,
    head: CapturedOps<B>,
    input: PinnedRows<B>,
    output: B::Pinned,
    n_vocab: u32,
    n_used: u32,
    n_layer: u32,
}

/// Pinned staging for what a window reads: one residual row and its position.
struct PinnedRows<B: Backend> {
    pinned: B::Pinned,
    row_bytes: usize,
}

/// What a window did besides its logits.
pub struct WindowRoutes {
    /// Layer by layer, the experts that were used.
    pub experts: Vec<Vec<u32>>,
}

impl<B: Backend> Windows<B> {
    /// Takes over the decode buffers in `buffer` and captures the window.
    ///
    /// # Errors
    /// The backend's; a failed capture is not an error but a notice.
    pub fn new(
        backend: Rc<B>,
        buffer: B::Buffer,
        layout: WindowLayout,
        forward: &Forward<'_>,
        scheduler: &Scheduler<B>,
        stream: &B::Stream,
        notices: &mut Vec<String>,
    ) -> Result<Self, EngineError> {
        let base = buffer.range().start;
        let head_range = scheduler.regions().head();
        let lease = scheduler.regions().lease(head_range);
        let trunk_ops = forward.window_trunk(base, &layout, layout.n_rows);
        let head_ops = forward.window_head(base, &layout, layout.n_rows, head_range.start);
        let (trunk, trunk_notice) = CapturedOps::capture(Rc::clone(&backend), stream, trunk_ops, Vec::new())?;
        let (head, head_notice) = CapturedOps::capture(Rc::clone(&backend), stream, head_ops, vec![lease])?;
        notices.extend(trunk_notice.or(head_notice));
        let ModelShape { n_vocab, n_layer, n_expert_used: n_used, .. } = *forward.shape;
        let row_bytes = forward.shape.n_embd as usize * 4;
        let input = PinnedRows { pinned: backend.alloc_pinned(Bytes::from(row_bytes + 8), "window input")?, row_bytes };
        let output = backend.alloc_pinned(layout.logits.bytes + layout.ids.bytes, "window output")?;
        Ok(Self { backend, buffer, layout, trunk, head, input, output, n_vocab, n_used, n_layer })
    }

    /// Where the expert table lies.
    #[must_use]
    pub fn table_range(buffer: &B::Buffer, layout: &WindowLayout) -> AddrRange {
        layout.table.at(buffer.range().start)
    }

    /// Device memory of the captured graphs.
    #[must_use]
    pub fn graph_bytes(&self) -> Bytes {
        self.trunk.graph_bytes() + self.head.graph_bytes()
    }

    /// Runs the window of `token` at `position`. The trunk is queued first: only the head's product waits for a reload in flight.
    /// Fills `logits` where it is given; a window without it is the trunk alone.
    ///
    /// # Errors
    /// The backend's, a phase other than Decode, or a stale lease.
    #[allow(clippy::too_many_arguments, reason = "the parts of the engine that a window touches")]
    pub fn run(
        &self,
        token: TokenId,
        position: usize,
        first_row: u32,
        embedding: &Embedding,
        scheduler: &Scheduler<B>,
        experts: &mut Experts<B>,
        stream: &B::Stream,
        logits: Option<&mut Vec<f32>>,
    ) -> Result<WindowRoutes, EngineError> {
        experts.publish_arrivals(stream, false, scheduler.slot_range())?;
        self.upload_input(token, position, first_row, embedding, stream)?;
        let witness = scheduler.decode()?;
        self.trunk.run(&witness, stream)?;
        self.download(self.layout.ids, self.layout.logits.bytes, stream)?;
        if logits.is_some() {
            let _head = witness.head(stream)?;
            self.head.run(&witness, stream)?;
            self.download(self.layout.logits, Bytes::ZERO, stream)?;
        }
        self.backend.synchronise(stream)?;
        if let Some(logits) = logits {
            logits.resize(self.n_vocab as usize, 0.0);
            read_f32(&self.output, 0, logits);
        }
        Ok(self.read_routes())
    }

    fn upload_input(
        &self,
        token: TokenId,
        position: usize,
        first_row: u32,
        embedding: &Embedding,
        stream: &B::Stream,
    ) -> Result<(), EngineError> {
        let mut row = vec![0u8; self.input.row_bytes];
        embedding.rows(&[token], &mut row)?;
        self.input.pinned.write(0, &row);
        let position = i32::try_from(position).expect("positions are below the context length");
        self.input.pinned.write(self.input.row_bytes, &position.to_le_bytes());
        self.input.pinned.write(self.input.row_bytes + 4, &first_row.to_le_bytes());
        let source = self.input.pinned.range().start;
        let row_bytes = Bytes::from(self.input.row_bytes);
        self.upload(self.layout.residual, source, row_bytes, stream)?;
        self.upload(self.layout.positions, source.offset(row_bytes), Bytes(4), stream)?;
        self.upload(self.layout.first_row, source.offset(row_bytes + Bytes(4)), Bytes(4), stream)
    }

    fn upload(&self, part: Part, src: crate::backend::Addr, bytes: Bytes, stream: &B::Stream) -> Result<(), EngineError> {
        let dst = self.buffer.range().start.offset(part.offset);
        Ok(self.backend.copy(stream, Copy { dst, src, bytes, direction: Direction::ToDevice })?)
    }

    fn download(&self, part: Part, output_offset: Bytes, stream: &B::Stream) -> Result<(), EngineError> {
        let src = self.buffer.range().start.offset(part.offset);
        let dst = self.output.range().start.offset(output_offset);
        Ok(self.backend.copy(stream, Copy { dst, src, bytes: part.bytes, direction: Direction::ToHost })?)
    }

    fn read_routes(&self) -> WindowRoutes {
        let mut ids = vec![0u32; (self.n_layer * self.n_used) as usize];
        read_u32(&self.output, self.layout.logits.bytes.as_usize(), &mut ids);
        WindowRoutes { experts: ids.chunks(self.n_used as usize).map(<[u32]>::to_vec).collect() }
    }
}

/// Reads little-endian floats from pinned memory.
pub fn read_f32(memory: &impl PinnedMemory, offset: usize, out: &mut [f32]) {
    read_words(memory, offset, out, f32::from_le_bytes);
}

/// Reads little-endian numbers from pinned memory.
pub fn read_u32(memory: &impl PinnedMemory, offset: usize, out: &mut [u32]) {
    read_words(memory, offset, out, u32::from_le_bytes);
}

fn read_words<T>(memory: &impl PinnedMemory, offset: usize, out: &mut [T], word: fn([u8; 4]) -> T) {
    let mut bytes = vec![0u8; out.len() * 4];
    memory.read(offset, &mut bytes);
    for (value, four) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *value = word(*four);
    }
}
