//! Reading a prompt, or all logits of one, by the way that was chosen.

use std::ops::ControlFlow;

use super::guard::PlacedPrompt;
use super::prefill::{Block, BlockReader, ReadWith, StateCheckpoint};
use super::sampler::argmax;
use super::way::{Choice, Way};
use super::{Engine, EngineError, Event, LogitsSink, OnEvent, check_tokens};
use crate::backend::{AddrRange, Backend};
use crate::model::forward::{Forward, HeadInput};
use crate::model::layout::{PromptLayout, PromptSize};
use crate::phase::levelled::{levelled_from, stepped_len};
use crate::phase::prompt_sizes::largest_stepped;
use crate::phase::region::Loan;
use crate::units::TokenId;

/// Where the prompt buffers of a request lie.
struct PromptPlace<'a> {
    layout: PromptLayout,
    arena: AddrRange,
    spill: Option<AddrRange>,
    loan: Option<&'a Loan>,
}

/// Where logits of a prompt go.
struct LogitsSinks<'s, 't, 'd> {
    trunk: &'s mut LogitsSink<'t>,
    /// Those of the draft layer, where they are wanted.
    draft: Option<&'s mut LogitsSink<'d>>,
}

impl<B: Backend> Engine<B> {
    /// Reads all prompt tokens but the last, which is `last`.
    pub(super) fn read(
        &mut self,
        tokens: &[TokenId],
        last: TokenId,
        choice: &Choice,
        on_event: &mut OnEvent<'_>,
    ) -> Result<ControlFlow<()>, EngineError> {
        match choice.way {
            Way::Windows => self.read_through_windows(tokens, last, on_event),
            Way::Wide | Way::Loan | Way::Alias => self.read_in_blocks(tokens, last, choice.size(), choice.way, on_event, None),
        }
    }

    /// Takes the memory for the prompt path, reads, and brings everything home, also where reading failed or was stopped.
    fn read_in_blocks(
        &mut self,
        tokens: &[TokenId],
        last: TokenId,
        size: PromptSize,
        way: Way,
        on_event: &mut OnEvent<'_>,
        logits: Option<LogitsSinks<'_, '_, '_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let PlacedPrompt { layout, arena, spill, loan } = self.place_prompt(size, way)?;
        self.spilled = layout.spill_bytes;
        let read = self.read_blocks(tokens, last, &PromptPlace { layout, arena, spill, loan: loan.as_ref() }, on_event, logits);
        self.note_free_memory();
        if let Some(loan) = loan {
            self.bring_home(Some(loan))?;
        }
        read
    }

    fn read_blocks(
        &mut self,
        tokens: &[TokenId],
        last: TokenId,
        place: &PromptPlace<'_>,
        on_event: &mut OnEvent<'_>,
        mut logits: Option<LogitsSinks<'_, '_, '_>>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let shape = &self.model.shape;
        let forward = Forward { shape, weights: &self.model.weights, resident: self.resident, arithmetic: self.plan.arithmetic };
        let mut reader = BlockReader::new(&mut self.prompt_path, forward, place.layout, place.arena, place.spill, &self.compute)?;
        let n_layer = u64::from(shape.n_expert_layer());
        let total = tokens.len() as u64 * n_layer;
        let mut rows_done = 0;
        let start = self.timelines.active().len();
        let blocks: Vec<&[TokenId]> = levelled_from(start, tokens, place.layout.size.block, shape.block_step()).collect();
        for (index, &block_tokens) in blocks.iter().enumerate() {
            let mut on_rows = |rows| on_event(Event::Reading { done: rows_done + rows, total });
            let (position, first_row) = (self.timelines.active().len(), self.timelines.active().first_row());
            let end = position + block_tokens.len();
            let checkpoints = self.checkpoints.iter().filter(|checkpoint| (position + 1..=end).contains(&checkpoint.position));
            let checkpoints: Vec<_> = checkpoints
                .map(|checkpoint| StateCheckpoint {
                    rows: u32::try_from(checkpoint.position - position).expect("a block is bounded"),
                    target: checkpoint.target,
                })
                .collect();
            let mut block = Block {
                tokens: block_tokens,
                position,
                first_row,
                next: tokens.get(end - start).copied().unwrap_or(last),
                more_follow: index + 1 < blocks.len(),
                checkpoints: &checkpoints,
            };
            let undo = self.recurrent.begin_block(&self.compute)?;
            let mut read = reader.read_block(
                block,
                ReadWith { embedding: &self.embedding, scheduler: &self.scheduler, experts: &mut self.experts, on_rows: &mut on_rows },
            );
            if let (Ok(ControlFlow::Continue(())), Some(sinks)) = (&read, logits.as_mut()) {
                let n_rows = u32::try_from(block_tokens.len()).expect("a block is bounded");
                let head = self.scheduler.kept_head(place.loan, &self.compute)?;
                let mut best = block.next;
                reader.block_logits(n_rows, HeadInput::Trunk, &head, &mut |row| {
                    best = argmax(row).unwrap_or(best);
                    (sinks.trunk)(row);
                })?;
                if let Some(sink) = sinks.draft.as_deref_mut().filter(|_| shape.has_draft_layer) {
                    // Behind the last token stands what the trunk would write there.
                    block.next = if block.more_follow { block.next } else { best };
                    read = reader.read_draft_layer(
                        block,
                        ReadWith {
                            embedding: &self.embedding,
                            scheduler: &self.scheduler,
                            experts: &mut self.experts,
                            on_rows: &mut on_rows,
                        },
                    );
                    reader.block_logits(n_rows, HeadInput::Draft, &head, sink)?;
                }
            }
            if !matches!(read, Ok(ControlFlow::Continue(()))) {
                // What made reading fail is told; a device that fails here, too, has nothing on its way any more.
                let finished = reader.finish();
                if self.recurrent.undo_block(undo, &self.compute).is_err() {
                    self.reset();
                }
                return read.and_then(|stopped| finished.map(|()| stopped));
            }
            if let Some(sample) = reader.sample()? {
                self.costs.note_block(&sample);
            }
            self.recurrent.set_position(Some(end));
            for checkpoint in &checkpoints {
                self.prefix_cache.snapshot_is_made(checkpoint.target);
            }
            self.timelines.active_mut().extend_read(block_tokens);
            rows_done += block_tokens.len() as u64 * n_layer;
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
        self.logits_with_drafts(tokens, on_event, sink, None)
    }

    /// As [`Engine::logits`]. Where the model has a draft layer, `draft` takes its logits, too: row `i` is its guess of token `i + 2` from
    /// the trunk's row `i` and token `i + 1`; behind the last token stands the trunk's best.
    ///
    /// # Errors
    /// As [`Engine::logits`].
    pub fn logits_with_drafts(
        &mut self,
        tokens: &[TokenId],
        on_event: &mut OnEvent<'_>,
        trunk: &mut LogitsSink<'_>,
        draft: Option<&mut LogitsSink<'_>>,
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
        self.checkpoints.clear();
        self.recurrent.clear(&self.compute)?;
        self.look_at_memory()?;
        let size = self.logits_size(tokens.len())?;
        let last = *tokens.last().expect("there is a token");
        let read = self.read_in_blocks(tokens, last, size, Way::Loan, on_event, Some(LogitsSinks { trunk, draft }));
        self.forget_without_state();
        read
    }

    /// The largest block that leaves room for logits while the head is kept, in one chunk or in as few as fit beside them.
    fn logits_size(&self, n_tokens: usize) -> Result<PromptSize, EngineError> {
        let (room, step) = (self.plan.kept_head_room(), self.model.shape.block_step());
        let chunk_max = self.plan.kept_head_chunk.max(1);
        let size = |block: u32, chunk: u32| PromptSize { chunk, all_logits: true, ..PromptSize::chunk(block) };
        let fitting = |block: u32| {
            let chunks = std::iter::successors(Some(block.min(chunk_max)), |&chunk| (chunk > 1).then_some(chunk / 2));
            chunks.map(|chunk| size(block, chunk)).find(|&size| self.prompt_layout(size, room).is_some())
        };
        let limit = stepped_len(n_tokens, chunk_max, chunk_max.next_multiple_of(step), step);
        let shortest = step.min(limit);
        let block = largest_stepped(limit, step, |block| fitting(block).is_some());
        let needed = || self.prompt_bytes(size(shortest, 1));
        fitting(block.max(shortest)).ok_or_else(|| EngineError::NoLogitsRoom { tokens: shortest, needed: needed(), left: room.arena })
    }
}
