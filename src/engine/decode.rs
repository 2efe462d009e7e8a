//! Decode windows: a few tokens in, their logits out.

use std::io::Write;
use std::rc::Rc;

use crate::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction, PinnedMemory};
use crate::engine::EngineError;
use crate::engine::captured::{CapturedWindows, WindowPart};
use crate::engine::embedding::Embedding;
use crate::engine::hashes::WindowHashes;
use crate::experts::Experts;
use crate::model::ModelShape;
use crate::model::forward::Forward;
use crate::model::forward::draft::DraftFrom;
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
    /// Rows of embeddings `[rows, n_embd]` f32, then their positions and the next one i32, then the first row of the caches: what a
    /// window or the draft layer reads.
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
    /// Experts of a row in all layers of the trunk.
    routes: usize,
    /// Experts of a row in one layer.
    layer_routes: usize,
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
        let sizes = Sizes {
            n_vocab: n_vocab as usize,
            row_bytes: n_embd as usize * 4,
            routes: (n_layer * n_expert_used) as usize,
            layer_routes: n_expert_used as usize,
        };
        let input = backend.alloc_pinned(Bytes::from(layout.n_rows as usize * (sizes.row_bytes + 4) + 8), "window input")?;
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

    /// The experts of the last window that ended well, `[n_layer, rows, n_expert_used]`, or of the draft layer where that ran since.
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
            Err(EngineError::Backend(error)) if self.may_run_eagerly(&[WindowPart::Trunk(n_rows), WindowPart::Head(n_rows)], &error) => {
                // Everything a window writes, it writes anew from its input: a second attempt needs no undoing.
                if self.attempt(n_rows, with_head, true, parts).is_err() {
                    return Err(error.into());
                }
                self.give_up_graphs(parts.notices, &error);
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
        self.send_input(layout.residual.offset, n_rows, stream)?;
        let witness = parts.scheduler.decode()?;
        self.captured.run(WindowPart::Trunk(n_rows), &witness, stream, eager)?;
        let output = self.output.range().start;
        let ids = output.offset(layout.logits.bytes);
        self.copy(ids, self.at(layout.ids.offset), rows(sizes.routes * 4), Direction::ToHost, stream)?;
        if let Some(hashes) = &self.hashes {
            let residual = hashes.residual.range().start;
            self.copy(residual, self.at(layout.residual.offset), rows(sizes.row_bytes), Direction::ToHost, stream)?;
        }
        if with_head {
            let _head = witness.head(stream)?;
            self.captured.run(WindowPart::Head(n_rows), &witness, stream, eager)?;
            self.copy(output, self.at(layout.logits.offset), rows(sizes.n_vocab * 4), Direction::ToHost, stream)?;
        }
        Ok(self.backend.synchronise(stream)?)
    }

    /// Sends staged rows to `rows_at`, and their positions.
    fn send_input(&self, rows_at: Bytes, n_rows: usize, stream: &B::Stream) -> Result<(), EngineError> {
        let (input, layout) = (self.input.range().start, &self.layout);
        let rows_bytes = Bytes::from(n_rows * self.sizes.row_bytes);
        let positions = input.offset(rows_bytes);
        let positions_bytes = Bytes::from((n_rows + 1) * 4);
        self.copy(self.at(rows_at), input, rows_bytes, Direction::ToDevice, stream)?;
        self.copy(self.at(layout.positions.offset), positions, positions_bytes, Direction::ToDevice, stream)?;
        self.copy(self.at(layout.first_row.offset), positions.offset(positions_bytes), Bytes(4), Direction::ToDevice, stream)
    }

    /// Takes the recurrent state over the first `n_rows` rows of the last window, in the order of the stream. Nothing where the model has
    /// none. Where it fails, the state is of no sequence any more.
    ///
    /// # Errors
    /// The backend's, or a phase other than Decode.
    pub fn commit(&mut self, n_rows: usize, parts: &mut WindowParts<'_, B>) -> Result<(), EngineError> {
        let part = WindowPart::Commit(n_rows);
        let witness = parts.scheduler.decode()?;
        match self.captured.run(part, &witness, parts.stream, false) {
            // What did not launch has changed nothing.
            Err(EngineError::Backend(error)) if self.may_run_eagerly(&[part], &error) => {
                self.captured.run(part, &witness, parts.stream, true)?;
                self.give_up_graphs(parts.notices, &error);
                Ok(())
            }
            other => other,
        }
    }

    /// Lets the first `n_rows` hidden rows of the last window wait for the draft layer, behind `n_waiting` others.
    ///
    /// # Errors
    /// The backend's.
    pub fn let_wait(&self, n_rows: usize, n_waiting: usize, stream: &B::Stream) -> Result<(), EngineError> {
        let bytes = |rows: usize| Bytes::from(rows * self.sizes.row_bytes);
        debug_assert!(n_waiting + n_rows <= self.layout.n_rows as usize, "{n_rows} rows behind {n_waiting}");
        let target = self.at(self.layout.draft.waiting.offset + bytes(n_waiting));
        self.copy(target, self.at(self.layout.draft.hidden.offset), bytes(n_rows), Direction::OnDevice, stream)
    }

    /// Runs the draft layer: from the rows that wait for it and the tokens that follow each (`window`, whose position is that of the
    /// first row), or from its own last row and one token. Its keys and values are in its caches afterwards. Fills `logits`, where given,
    /// with those of the token after the last: `[n_vocab]`, or one for each token of the draft layer's own head.
    ///
    /// # Errors
    /// As [`Windows::run`].
    pub fn draft(
        &mut self,
        window: Window<'_>,
        from: DraftFrom,
        parts: &mut WindowParts<'_, B>,
        logits: Option<&mut Vec<f32>>,
    ) -> Result<(), EngineError> {
        let n_rows = window.tokens.len();
        parts.experts.publish_arrivals(parts.stream, false, parts.scheduler.slot_range())?;
        parts.scheduler.decode()?;
        self.recapture_head(&parts.forward, parts.scheduler, parts.stream, parts.notices)?;
        self.stage_input(window, parts.embedding)?;
        let with_logits = logits.is_some();
        match self.attempt_draft(n_rows, from, with_logits, false, parts) {
            Err(EngineError::Backend(error)) if self.may_run_eagerly(&[WindowPart::Draft(n_rows, from), WindowPart::DraftHead], &error) => {
                // From its own row it has replaced that row by now, and guesses worse; the text does not hang on guesses.
                if self.attempt_draft(n_rows, from, with_logits, true, parts).is_err() {
                    return Err(error.into());
                }
                self.give_up_graphs(parts.notices, &error);
            }
            other => other?,
        }
        if let Some(logits) = logits {
            logits.resize(self.n_draft_logits(parts), 0.0);
            read_f32(&self.output, 0, logits);
        }
        if with_logits {
            self.routes.resize(n_rows * self.sizes.layer_routes, 0);
            read_u32(&self.output, self.layout.logits.bytes.as_usize(), &mut self.routes);
        } else {
            self.routes.clear();
        }
        Ok(())
    }

    /// Tokens that the draft layer chooses among.
    fn n_draft_logits(&self, parts: &WindowParts<'_, B>) -> usize {
        parts.forward.resident.draft_head.map_or(self.sizes.n_vocab, |own| own.n_tokens as usize)
    }

    fn attempt_draft(
        &self,
        n_rows: usize,
        from: DraftFrom,
        with_logits: bool,
        eager: bool,
        parts: &WindowParts<'_, B>,
    ) -> Result<(), EngineError> {
        let (layout, stream) = (&self.layout, parts.stream);
        let witness = parts.scheduler.decode()?;
        self.send_input(layout.mixer.draft.embedded.offset, n_rows, stream)?;
        if !with_logits {
            let rows = u32::try_from(n_rows).expect("a window is short");
            for op in parts.forward.draft_keys_values(self.buffer.range().start, layout, rows) {
                self.backend.launch(stream, &op)?;
            }
            // The next rows are staged where these are read from.
            return Ok(self.backend.synchronise(stream)?);
        }
        self.captured.run(WindowPart::Draft(n_rows, from), &witness, stream, eager)?;
        let output = self.output.range().start;
        let ids = layout.layer_ids(parts.forward.shape, parts.forward.shape.n_layer, u32::try_from(n_rows).expect("a window is short"));
        self.copy(output.offset(layout.logits.bytes), self.at(ids.offset), ids.bytes, Direction::ToHost, stream)?;
        // Only a head that may be on its way is waited for.
        let _head = if parts.forward.resident.draft_head.is_none() { Some(witness.head(stream)?) } else { None };
        self.captured.run(WindowPart::DraftHead, &witness, stream, eager)?;
        self.copy(output, self.at(layout.logits.offset), Bytes::from(self.n_draft_logits(parts) * 4), Direction::ToHost, stream)?;
        Ok(self.backend.synchronise(stream)?)
    }

    /// True where a part that failed may be tried as a list of operations.
    fn may_run_eagerly(&self, parts: &[WindowPart], error: &BackendError) -> bool {
        self.captured.has_graph(parts) && !matches!(error, BackendError::DeviceLost { .. })
    }

    fn give_up_graphs(&mut self, notices: &mut Vec<String>, error: &BackendError) {
        self.captured.give_up_graphs();
        notices.push(format!("a captured window failed, windows run without graphs from here on: {error}"));
    }

    /// Writes a window's rows and positions to pinned memory.
    fn stage_input(&mut self, window: Window<'_>, embedding: &Embedding) -> Result<(), EngineError> {
        let rows_bytes = window.tokens.len() * self.sizes.row_bytes;
        let positions_bytes = (window.tokens.len() + 1) * 4;
        self.staged.resize(rows_bytes + positions_bytes + 4, 0);
        let (rows, positions) = self.staged.split_at_mut(rows_bytes);
        let (positions, first_row) = positions.split_at_mut(positions_bytes);
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
