//! Decode windows: a few tokens in, their logits out.

use std::io::Write;
use std::rc::Rc;

use crate::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction, PinnedMemory};
use crate::engine::EngineError;
use crate::engine::captured::{CapturedWindows, Half};
use crate::engine::embedding::Embedding;
use crate::engine::hashes::WindowHashes;
use crate::experts::Experts;
use crate::model::ModelShape;
use crate::model::forward::Forward;
use crate::model::layout::WindowLayout;
use crate::phase::Scheduler;
use crate::units::{Bytes, TokenId};

/// Bytes that are turned into numbers at a time.
const WORDS_AT_ONCE: usize = 4096;

/// The decode path's buffers and captured graphs.
pub struct Windows<B: Backend> {
    backend: Rc<B>,
    buffer: B::Buffer,
    layout: WindowLayout,
    captured: CapturedWindows<B>,
    /// Residual rows `[rows, n_embd]` f32, then their positions i32: what a window reads.
    input: B::Pinned,
    /// Logits of the largest window, then its expert numbers.
    output: B::Pinned,
    hashes: Option<Hashes<B>>,
    sizes: Sizes,
    // Kept to spare allocations: the input as bytes, a row of the embedding, and the experts of the last window.
    staged: Vec<u8>,
    embedding_row: Vec<f32>,
    routes: Vec<u32>,
}

/// Sizes of one row.
#[derive(Clone, Copy)]
struct Sizes {
    n_vocab: usize,
    row_bytes: usize,
    /// Experts of a row in all layers.
    routes: usize,
}

/// Where the windows' hashes go, and the residual rows on their way there.
struct Hashes<B: Backend> {
    residual: B::Pinned,
    file: WindowHashes,
}

/// Tokens and where they go.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    /// One for each row, at most as many as the largest window has.
    pub tokens: &'a [TokenId],
    /// Position of the first.
    pub position: usize,
    /// Row of the caches that holds position 0.
    pub first_row: u32,
}

/// The parts of the engine that a window touches.
pub struct WindowParts<'a, B: Backend> {
    /// The model.
    pub forward: Forward<'a>,
    /// Where rows of tokens come from.
    pub embedding: &'a Embedding,
    /// Who owns the slab.
    pub scheduler: &'a Scheduler<B>,
    /// The experts.
    pub experts: &'a mut Experts<B>,
    /// Where the work is queued.
    pub stream: &'a B::Stream,
    /// Lines for the log.
    pub notices: &'a mut Vec<String>,
}

impl<B: Backend> Windows<B> {
    /// Takes over the decode buffers in `buffer` and captures the windows.
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
        let (captured, notice) = CapturedWindows::new(Rc::clone(&backend), base, layout, forward, scheduler.regions(), stream)?;
        notices.extend(notice);
        let ModelShape { n_vocab, n_layer, n_expert_used, n_embd, .. } = *forward.shape;
        let sizes = Sizes { n_vocab: n_vocab as usize, row_bytes: n_embd as usize * 4, routes: (n_layer * n_expert_used) as usize };
        let input = backend.alloc_pinned(Bytes::from(layout.n_rows as usize * (sizes.row_bytes + 4) + 4), "window input")?;
        let output = backend.alloc_pinned(layout.logits.bytes + layout.ids.bytes, "window output")?;
        let (staged, embedding_row, routes) = Default::default();
        Ok(Self { backend, buffer, layout, captured, input, output, hashes: None, sizes, staged, embedding_row, routes })
    }

    /// Where the expert table lies.
    #[must_use]
    pub fn table_range(buffer: &B::Buffer, layout: &WindowLayout) -> AddrRange {
        layout.table.at(buffer.range().start)
    }

    /// Device memory of the captured graphs.
    #[must_use]
    pub fn graph_bytes(&self) -> Bytes {
        self.captured.graph_bytes()
    }

    /// Rows of the largest window.
    #[must_use]
    pub fn n_rows_max(&self) -> u32 {
        self.layout.n_rows
    }

    /// Graphs that were captured again since the start.
    #[must_use]
    pub fn recaptures(&self) -> u64 {
        self.captured.recaptures()
    }

    /// The experts of the last window that ended well, `[n_layer, rows, n_expert_used]`.
    #[must_use]
    pub fn routes(&self) -> &[u32] {
        &self.routes
    }

    /// Writes a line for every window from here on to `out`; see `docs/window-hashes.md`.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`], and the backend's.
    pub fn hash_to(&mut self, out: Box<dyn Write>) -> Result<(), EngineError> {
        let residual = self.backend.alloc_pinned(self.layout.residual.bytes, "residual rows to be hashed")?;
        self.hashes = Some(Hashes { residual, file: WindowHashes::new(out)? });
        Ok(())
    }

    /// Writes out what is buffered of the hashes.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`].
    pub fn flush_hashes(&mut self) -> Result<(), EngineError> {
        self.hashes.as_mut().map_or(Ok(()), |hashes| hashes.file.flush())
    }

    /// Makes the head's graphs anew where the head has been placed anew since they were captured; otherwise does nothing. A capture that
    /// fails is a notice. [`Windows::run`] calls it by itself.
    ///
    /// # Errors
    /// The backend's.
    pub fn recapture_head(
        &mut self,
        forward: &Forward<'_>,
        scheduler: &Scheduler<B>,
        stream: &B::Stream,
        notices: &mut Vec<String>,
    ) -> Result<(), EngineError> {
        if !self.captured.head_is_current(scheduler.regions()) {
            notices.extend(self.captured.recapture_head(forward, scheduler.regions(), stream)?);
        }
        Ok(())
    }

    /// Runs a window. The trunk is queued first: only the head's product waits for a reload in flight. Fills `logits`
    /// `[rows, n_vocab]` where it is given; a window without it is the trunk alone. Keys and values of all rows are in the cache
    /// afterwards, whoever keeps them.
    ///
    /// A graph that does not launch is run as a list of operations; where that works, all graphs are given up, with one notice.
    ///
    /// # Errors
    /// The backend's, a phase other than Decode, or a stale lease.
    pub fn run(
        &mut self,
        window: Window<'_>,
        parts: &mut WindowParts<'_, B>,
        mut logits: Option<&mut Vec<f32>>,
    ) -> Result<(), EngineError> {
        let n_rows = window.tokens.len();
        assert!((1..=self.layout.n_rows as usize).contains(&n_rows), "a window of {n_rows} rows, at most {}", self.layout.n_rows);
        parts.experts.publish_arrivals(parts.stream, false, parts.scheduler.slot_range())?;
        // In any other phase the head's place says nothing.
        parts.scheduler.decode()?;
        self.recapture_head(&parts.forward, parts.scheduler, parts.stream, parts.notices)?;
        self.stage_input(window, parts.embedding)?;
        let with_head = logits.is_some();
        match self.attempt(n_rows, with_head, false, parts) {
            Err(EngineError::Backend(error)) if self.captured.has_graph(n_rows) && !matches!(error, BackendError::DeviceLost { .. }) => {
                // Everything a window writes, it writes anew from its input: a second attempt needs no undoing.
                if self.attempt(n_rows, with_head, true, parts).is_err() {
                    return Err(error.into());
                }
                self.captured.give_up_graphs();
                parts.notices.push(format!("a captured window failed, windows run without graphs from here on: {error}"));
            }
            other => other?,
        }
        if let Some(logits) = logits.as_deref_mut() {
            logits.resize(n_rows * self.sizes.n_vocab, 0.0);
            read_f32(&self.output, 0, logits);
        }
        self.routes.resize(n_rows * self.sizes.routes, 0);
        read_u32(&self.output, self.layout.logits.bytes.as_usize(), &mut self.routes);
        if let Some(Hashes { residual, file }) = &mut self.hashes {
            // The input has been read; its bytes serve as a buffer.
            self.staged.resize(n_rows * self.sizes.row_bytes, 0);
            residual.read(0, &mut self.staged);
            let rows = logits.map(|logits| logits.chunks_exact(self.sizes.n_vocab));
            file.write(window.position, n_rows, &self.staged, rows)?;
        }
        Ok(())
    }

    /// Queues a staged window and waits for it.
    fn attempt(&self, n_rows: usize, with_head: bool, eager: bool, parts: &WindowParts<'_, B>) -> Result<(), EngineError> {
        let (layout, sizes, stream) = (&self.layout, &self.sizes, parts.stream);
        let rows = |bytes_of_one: usize| Bytes::from(n_rows * bytes_of_one);
        let input = self.input.range().start;
        self.copy(self.at(layout.residual.offset), input, rows(sizes.row_bytes), Direction::ToDevice, stream)?;
        let positions = input.offset(rows(sizes.row_bytes));
        self.copy(self.at(layout.positions.offset), positions, rows(4), Direction::ToDevice, stream)?;
        self.copy(self.at(layout.first_row.offset), positions.offset(rows(4)), Bytes(4), Direction::ToDevice, stream)?;
        let witness = parts.scheduler.decode()?;
        self.captured.run(Half::Trunk, n_rows, &witness, stream, eager)?;
        let output = self.output.range().start;
        let ids = output.offset(layout.logits.bytes);
        self.copy(ids, self.at(layout.ids.offset), rows(sizes.routes * 4), Direction::ToHost, stream)?;
        if let Some(hashes) = &self.hashes {
            let residual = hashes.residual.range().start;
            self.copy(residual, self.at(layout.residual.offset), rows(sizes.row_bytes), Direction::ToHost, stream)?;
        }
        if with_head {
            let _head = witness.head(stream)?;
            self.captured.run(Half::Head, n_rows, &witness, stream, eager)?;
            self.copy(output, self.at(layout.logits.offset), rows(sizes.n_vocab * 4), Direction::ToHost, stream)?;
        }
        Ok(self.backend.synchronise(stream)?)
    }

    /// Writes a window's rows and positions to pinned memory.
    fn stage_input(&mut self, window: Window<'_>, embedding: &Embedding) -> Result<(), EngineError> {
        let rows_bytes = window.tokens.len() * self.sizes.row_bytes;
        self.staged.resize(rows_bytes + window.tokens.len() * 4 + 4, 0);
        let (rows, positions) = self.staged.split_at_mut(rows_bytes);
        let (positions, first_row) = positions.split_at_mut(window.tokens.len() * 4);
        first_row.copy_from_slice(&window.first_row.to_le_bytes());
        embedding.rows_through(&mut self.embedding_row, window.tokens, rows)?;
        for (bytes, position) in positions.as_chunks_mut::<4>().0.iter_mut().zip(window.position..) {
            *bytes = i32::try_from(position).expect("positions are below the context length").to_le_bytes();
        }
        self.input.write(0, &self.staged);
        Ok(())
    }

    fn at(&self, offset: Bytes) -> Addr {
        self.buffer.range().start.offset(offset)
    }

    fn copy(&self, dst: Addr, src: Addr, bytes: Bytes, direction: Direction, stream: &B::Stream) -> Result<(), EngineError> {
        Ok(self.backend.copy(stream, Copy { dst, src, bytes, direction })?)
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
    let mut bytes = [0; WORDS_AT_ONCE];
    for (values, offset) in out.chunks_mut(WORDS_AT_ONCE / 4).zip((offset..).step_by(WORDS_AT_ONCE)) {
        let bytes = &mut bytes[..4 * values.len()];
        memory.read(offset, bytes);
        for (value, four) in values.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *value = word(*four);
        }
    }
}
