//! Windows at the end of the live sequence: running one, and accepting what of it is kept.

use std::io::Write;
use std::ops::ControlFlow;

use super::decode::{Window, WindowParts, Windows};
use super::{Engine, EngineError, Event, OnEvent, check_tokens};
use crate::backend::Backend;
use crate::model::forward::Forward;
use crate::units::TokenId;

impl<B: Backend> Engine<B> {
    /// Tokens of the largest window.
    #[must_use]
    pub fn window_rows(&self) -> usize {
        self.windows.n_rows_max() as usize
    }

    /// Tokens that the live sequence holds.
    #[must_use]
    pub fn sequence_tokens(&self) -> &[TokenId] {
        self.timelines.active().tokens()
    }

    /// Runs a window of `tokens` behind the live sequence, which stays as it is: [`Engine::accept`] says how many of them belong to
    /// it. Fills `logits` `[tokens.len(), n_vocab]` where given; each row has the bits that windows of one token give it.
    ///
    /// # Errors
    /// [`EngineError::BadWindow`] and [`EngineError::BadToken`] before anything is run; the device's faults; a file of hashes that takes
    /// no more.
    pub fn window(&mut self, tokens: &[TokenId], logits: Option<&mut Vec<f32>>) -> Result<(), EngineError> {
        let sequence = self.timelines.active();
        let (rows, position, first_row) = (tokens.len(), sequence.len(), sequence.first_row());
        let (rows_max, ctx_tokens) = (self.windows.n_rows_max(), self.plan.ctx_tokens);
        if rows == 0 || rows > rows_max as usize || first_row as usize + position + rows > ctx_tokens as usize {
            return Err(EngineError::BadWindow { rows, rows_max, position, ctx_tokens });
        }
        check_tokens(tokens, self.model.shape.n_vocab)?;
        if self.recurrent.is_there() && self.recurrent.position() != Some(position) {
            assert_eq!(position, 0, "a recurrent state is at the end of its sequence");
            self.recurrent.clear(&self.compute)?;
        }
        let with_head = logits.is_some();
        // A window that fails leaves nothing to accept, not even of the one before.
        self.timelines.active_mut().offer(&[]);
        self.backend.record(&self.compute, &self.window_times[0])?;
        let (windows, mut parts) = self.windows_and_parts();
        windows.run(Window { tokens, position, first_row }, &mut parts, logits)?;
        let [began, ended] = &self.window_times;
        self.backend.record(&self.compute, ended)?;
        self.backend.synchronise_event(ended)?;
        self.costs.note_window(rows, with_head, self.backend.elapsed_s(began, ended)?);
        self.timelines.active_mut().offer(tokens);
        self.experts.note_window(self.windows.routes(), self.model.shape.n_layer, &self.compute, self.scheduler.slot_range())?;
        if with_head {
            self.note_free_memory();
        }
        Ok(())
    }

    /// Adds the first `n_rows` tokens of the last window to the live sequence, and takes a recurrent state over them. What the window
    /// left in the cache behind them is overwritten by the next one.
    ///
    /// # Errors
    /// The device's, of the recurrent state. The sequence is forgotten then.
    ///
    /// # Panics
    /// Where the last window had fewer tokens, or has been accepted already.
    pub fn accept(&mut self, n_rows: usize) -> Result<(), EngineError> {
        if n_rows > 0 && self.recurrent.is_there() {
            self.recurrent.set_position(None);
            let (windows, mut parts) = self.windows_and_parts();
            if let Err(error) = windows.commit(n_rows, &mut parts) {
                self.reset();
                return Err(error);
            }
            self.recurrent.set_position(Some(self.timelines.active().len() + n_rows));
        }
        self.timelines.active_mut().accept(n_rows);
        Ok(())
    }

    /// The windows, and what they touch of the rest.
    pub(super) fn windows_and_parts(&mut self) -> (&mut Windows<B>, WindowParts<'_, B>) {
        let parts = WindowParts {
            forward: Forward {
                shape: &self.model.shape,
                weights: &self.model.weights,
                resident: self.resident,
                arithmetic: self.plan.arithmetic,
            },
            embedding: &self.embedding,
            scheduler: &self.scheduler,
            experts: &mut self.experts,
            stream: &self.compute,
            notices: &mut self.notices,
        };
        (&mut self.windows, parts)
    }

    /// Writes a line for every window from here on to `out`; `docs/window-hashes.md` has the format. What is buffered is written out
    /// at the end of every request.
    ///
    /// # Errors
    /// [`EngineError::WindowHashes`], and the device's.
    pub fn hash_windows(&mut self, out: Box<dyn Write>) -> Result<(), EngineError> {
        self.windows.hash_to(out)?;
        self.windows.flush_hashes()
    }

    /// Reads all of `tokens`, behind which `last` follows, through the largest windows there are, without a head.
    pub(super) fn read_through_windows(
        &mut self,
        tokens: &[TokenId],
        last: TokenId,
        on_event: &mut OnEvent<'_>,
    ) -> Result<ControlFlow<()>, EngineError> {
        let mut done = 0;
        for window in tokens.chunks(self.window_rows()) {
            self.window(window, None)?;
            self.accept(window.len())?;
            let end = done + window.len();
            let next: Vec<TokenId> = tokens[done + 1..].iter().copied().chain([last]).take(window.len()).collect();
            self.let_rows_wait(window.len(), 0)?;
            self.feed_draft_layer(&next)?;
            done = end;
            if on_event(Event::Reading { done: done as u64, total: tokens.len() as u64 }).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
