//! Reading a prompt, or all logits of one, by the way that was chosen.

use std::ops::ControlFlow;

use super::guard::PlacedPrompt;
use super::prefill::{Block, BlockReader};
use super::way::{Choice, Way};
use super::{Engine, EngineError, Event, LogitsSink, OnEvent, check_tokens};
use crate::backend::{AddrRange, Backend};
use crate::model::forward::Forward;
use crate::model::layout::{PromptLayout, PromptSize};
use crate::phase::levelled::{levelled, levelled_len};
use crate::phase::prompt_sizes::largest_fitting;
use crate::phase::region::Loan;
use crate::units::TokenId;

/// Where the prompt buffers of a request lie.
struct PromptPlace<'a> {
    layout: PromptLayout,
    arena: AddrRange,
    spill: Option<AddrRange>,
    loan: Option<&'a Loan>,
}

impl<B: Backend> Engine<B> {
    /// Reads all prompt tokens but the last.
    pub(super) fn read(&mut self, tokens: &[TokenId], choice: &Choice, on_event: &mut OnEvent<'_>) -> Result<ControlFlow<()>, EngineError> {
        match choice.way {
            Way::Windows => self.read_through_windows(tokens, on_event),
            Way::Wide | Way::Loan | Way::Alias => self.read_in_blocks(tokens, choice.size(), choice.way, on_event, None),
        }
    }

    /// Takes the memory for the prompt path, reads, and brings everything home, also where reading failed or was stopped.
    fn read_in_blocks(
        &mut self,
        tokens: &[TokenId],
        size: PromptSize,
        way: Way,
        on_event: &mut OnEvent<'_>,
        logits: Option<&mut LogitsSink<'_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let PlacedPrompt { layout, arena, spill, loan } = self.place_prompt(size, way)?;
        self.spilled = layout.spill_bytes;
        let read = self.read_blocks(tokens, &PromptPlace { layout, arena, spill, loan: loan.as_ref() }, on_event, logits);
        self.note_free_memory();
        if let Some(loan) = loan {
            self.bring_home(Some(loan))?;
        }
        read
    }

    fn read_blocks(
        &mut self,
        tokens: &[TokenId],
        place: &PromptPlace<'_>,
        on_event: &mut OnEvent<'_>,
        mut logits: Option<&mut LogitsSink<'_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let forward = Forward { shape: &self.model.shape, weights: &self.model.weights, resident: self.resident, exact: self.plan.exact };
        let mut reader = BlockReader::new(&mut self.prompt_path, forward, place.layout, place.arena, place.spill, &self.compute)?;
        let n_layer = u64::from(self.model.shape.n_layer);
        let total = tokens.len() as u64 * n_layer;
        let mut rows_done = 0;
        let blocks = levelled(tokens, place.layout.size.block);
        let n_blocks = blocks.len();
        for (index, tokens) in blocks.enumerate() {
            let mut on_rows = |rows| on_event(Event::Reading { done: rows_done + rows, total });
            let (position, first_row) = (self.timelines.active().len(), self.timelines.active().first_row());
            let block = Block { tokens, position, first_row, more_follow: index + 1 < n_blocks };
            let read = reader.read_block(block, &self.embedding, &self.scheduler, &mut self.experts, &mut on_rows);
            // What made reading fail is told; a device that fails here, too, has nothing on its way any more.
            let read = read.inspect_err(|_| drop(reader.finish()))?;
            if read.is_break() {
                reader.finish()?;
                return Ok(ControlFlow::Break(()));
            }
            if let Some(sample) = reader.sample()? {
                self.costs.note_block(&sample);
            }
            if let Some(sink) = logits.as_deref_mut() {
                let head = self.scheduler.kept_head(place.loan, &self.compute)?;
                let n_rows = u32::try_from(tokens.len()).expect("a block is bounded");
                reader.block_logits(n_rows, &head, sink)?;
            }
            self.timelines.active_mut().extend_read(tokens);
            rows_done += tokens.len() as u64 * n_layer;
        }
        reader.finish()?;
        Ok(ControlFlow::Continue(()))
    }

    /// Logits of every one of `tokens`, read into a fresh sequence, handed to `sink` row by row. The head is kept for this.
    ///
    /// # Errors
    /// As [`Engine::generate`]; [`EngineError::NoLogitsRoom`] where even one token at a time does not fit.
    pub fn logits(
        &mut self,
        tokens: &[TokenId],
        on_event: &mut OnEvent<'_>,
        sink: &mut LogitsSink<'_>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let ctx_tokens = self.plan.ctx_tokens;
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > ctx_tokens as usize {
            return Err(EngineError::PromptTooLong { prompt_tokens: tokens.len(), ctx_tokens });
        }
        check_tokens(tokens, self.model.shape.n_vocab)?;
        self.reset();
        self.look_at_memory()?;
        let chunk = self.logits_chunk(tokens.len())?;
        let size = PromptSize { all_logits: true, ..PromptSize::chunk(chunk) };
        self.read_in_blocks(tokens, size, Way::Loan, on_event, Some(sink))
    }

    /// The largest chunk that leaves room for logits while the head is kept.
    fn logits_chunk(&self, n_tokens: usize) -> Result<u32, EngineError> {
        let room = self.plan.kept_head_room();
        let size = |chunk| PromptSize { all_logits: true, ..PromptSize::chunk(chunk) };
        let limit = levelled_len(n_tokens, self.plan.kept_head_chunk.max(1));
        match largest_fitting(limit, |chunk| self.prompt_layout(size(chunk), room).is_some()) {
            0 => Err(EngineError::NoLogitsRoom { needed: self.prompt_bytes(size(1)), left: room.arena }),
            chunk => Ok(chunk),
        }
    }
}
