//! Writing: windows of the last token and drafts behind it, until the text ends.

use std::ops::ControlFlow;
use std::time::Instant;

use super::constraint::AnyConstraintState;
use super::decode::Window;
use super::drafts::{Candidates, DraftCosts, DraftSource, Drafting, verify};
use super::sampler::{Sampler, argmax, logprobs};
use super::{Engine, EngineError, Event, Finish, OnEvent, Outcome, Request};
use crate::backend::Backend;
use crate::model::forward::draft::DraftFrom;
use crate::units::TokenId;

/// The text at hand while it is written.
struct Text {
    /// All tokens, the last of which is to be run next.
    tokens: Vec<TokenId>,
    /// For each accepted row that the draft layer has not seen yet, the token that followed. No more than a window has rows.
    unseen: Vec<TokenId>,
}

impl Text {
    fn last(&self) -> TokenId {
        *self.tokens.last().expect("a text begins with a token")
    }
}

impl<B: Backend> Engine<B> {
    /// Writes on from `first`, the last token of the prompt.
    pub(super) fn write(
        &mut self,
        first: TokenId,
        request: &Request,
        mut constraint: Option<&mut AnyConstraintState>,
        started: Instant,
        outcome: &mut Outcome,
        on_event: &mut OnEvent<'_>,
    ) -> Result<(), EngineError> {
        let sampler = Sampler::new(request.sampling.clone());
        let room = self.plan.ctx_tokens as usize - self.timelines.active().len();
        let tokens_max = request.tokens_max.min(room);
        let n_vocab = self.model.shape.n_vocab as usize;
        outcome.finish = Finish::Length;
        let mut text = Text { tokens: self.timelines.active().tokens().to_vec(), unseen: Vec::new() };
        text.tokens.push(first);
        let mut logits = Vec::new();
        let mut first_token_at = None;
        while outcome.tokens.len() < tokens_max && outcome.finish == Finish::Length {
            let mut drafts = self.draft(&mut text, tokens_max - outcome.tokens.len())?;
            if let Some(constraint) = constraint.as_deref_mut() {
                // A draft that may not come would be a row in vain, and so would those behind it.
                drafts.truncate(constraint.acceptable(&drafts)?);
            }
            let window: Vec<TokenId> = std::iter::once(text.last()).chain(drafts.iter().copied()).collect();
            self.make_room_for_rows(window.len())?;
            self.window(&window, Some(&mut logits))?;
            let verified = verify(
                &sampler,
                Candidates {
                    logits: &logits,
                    n_vocab,
                    history: &text.tokens,
                    drafts: &drafts,
                    stop_tokens: &request.stop_tokens,
                    force_acceptance: self.settings.drafts.force_acceptance,
                },
                constraint.as_deref_mut(),
            )?;
            first_token_at.get_or_insert_with(Instant::now);
            self.drafter.note(&drafts, &verified);
            let mut rows = 0;
            for (&token, logits) in verified.tokens.iter().zip(logits.chunks_exact(n_vocab)) {
                rows += 1;
                if request.stop_tokens.contains(&token) {
                    outcome.finish = Finish::Stop;
                    break;
                }
                outcome.tokens.push(token);
                let chances = request.logprobs.and_then(|n_best| logprobs(logits, token, n_best));
                let told = chances.as_ref().map_or(ControlFlow::Continue(()), |chances| on_event(Event::Logprobs(chances)));
                outcome.logprobs.extend(chances);
                if told.is_break() || on_event(Event::Token(token)).is_break() {
                    outcome.finish = Finish::Cancelled;
                    break;
                }
            }
            // A row whose logits are no numbers belongs to the sequence; only nothing follows it.
            self.accept(rows + usize::from(!verified.is_finite))?;
            if !verified.is_finite {
                return Err(EngineError::NotFinite { position: self.timelines.active().len() - 1 });
            }
            self.save_now_and_then();
            text.tokens.extend_from_slice(&verified.tokens[..rows]);
            self.let_rows_wait(rows, text.unseen.len())?;
            text.unseen.extend_from_slice(&verified.tokens[..rows]);
        }
        let first_token_at = first_token_at.unwrap_or_else(Instant::now);
        outcome.prefill = first_token_at - started;
        outcome.decode = first_token_at.elapsed();
        // The next prompt may go on from here.
        self.feed_draft_layer(&text.unseen)
    }

    /// Drafts for the next window, of which there is use for `left` tokens.
    fn draft(&mut self, text: &mut Text, left: usize) -> Result<Vec<TokenId>, EngineError> {
        let sequence = self.timelines.active();
        let rows_left = self.plan.ctx_tokens as usize - sequence.len();
        let room = (left - 1).min(rows_left - 1).min(self.window_rows() - 1);
        let costs = &self.costs;
        let window_s = |rows| costs.writing_window_s(rows);
        let costs = DraftCosts { window_s: &window_s, mtp_step_s: costs.draft_step_s() };
        let drafting = self.drafter.plan(sequence.tokens(), &[text.last()], room, costs);
        let drafts = match drafting {
            Some(Drafting { source: DraftSource::Mtp, depth, .. }) if !text.unseen.is_empty() => return self.draft_by_layer(text, depth),
            Some(Drafting { source: DraftSource::Lookup, depth, .. }) => self.drafter.lookup_drafts(depth).to_vec(),
            _ => Vec::new(),
        };
        if text.unseen.len() + 1 + drafts.len() > self.window_rows() {
            // There is no place for the next window's rows beside those that wait.
            self.feed_draft_layer(&std::mem::take(&mut text.unseen))?;
        }
        Ok(drafts)
    }

    /// Up to `depth` guesses of the draft layer, fewer where it is not sure enough.
    fn draft_by_layer(&mut self, text: &mut Text, depth: usize) -> Result<Vec<TokenId>, EngineError> {
        self.make_room_for_rows(1 + depth)?;
        let min_p = self.settings.drafts.min_p;
        let mut position = self.timelines.active().len() - text.unseen.len();
        let (mut from, mut tokens) = (DraftFrom::Trunk, std::mem::take(&mut text.unseen));
        let (mut drafts, mut logits) = (Vec::with_capacity(depth), Vec::new());
        while drafts.len() < depth {
            self.draft_step(&tokens, position, from, &mut logits)?;
            // Whatever it computes, it can only guess worse.
            let Some(guess) = argmax(&logits) else { break };
            let token = self.draft_vocab.as_ref().map_or(guess, |vocab| vocab[guess as usize]);
            if min_p > 0.0 && logprobs(&logits, guess, 0).is_none_or(|logprobs| logprobs.chosen.exp() < min_p) {
                break;
            }
            drafts.push(token);
            position += tokens.len();
            (from, tokens) = (DraftFrom::Own, vec![token]);
        }
        Ok(drafts)
    }

    /// One step of the draft layer: `tokens` follow the rows from `position` on. Fills `logits` with those of the token after the last.
    fn draft_step(&mut self, tokens: &[TokenId], position: usize, from: DraftFrom, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        let first_row = self.timelines.active().first_row();
        self.backend.record(&self.compute, &self.window_times[0])?;
        let (windows, mut parts) = self.windows_and_parts();
        windows.draft(Window { tokens, position, first_row }, from, &mut parts, Some(logits))?;
        let [began, ended] = &self.window_times;
        self.backend.record(&self.compute, ended)?;
        self.backend.synchronise_event(ended)?;
        self.costs.note_draft_step(self.backend.elapsed_s(began, ended)?);
        self.experts.note_draft(self.windows.routes(), self.model.shape.n_layer, self.scheduler.slot_range());
        Ok(())
    }

    /// Keeps the first `n_rows` rows of the last window for the draft layer, behind `n_waiting` others. Nothing where nobody asks it.
    pub(super) fn let_rows_wait(&mut self, n_rows: usize, n_waiting: usize) -> Result<(), EngineError> {
        if !self.drafter.uses_mtp() {
            return Ok(());
        }
        self.windows.let_wait(n_rows, n_waiting, &self.compute)
    }

    /// Lets the draft layer know of the last `next.len()` rows, which are accepted, and of the tokens that follow each. Nothing where
    /// nobody asks it.
    pub(super) fn feed_draft_layer(&mut self, next: &[TokenId]) -> Result<(), EngineError> {
        if next.is_empty() || !self.drafter.uses_mtp() {
            return Ok(());
        }
        let sequence = self.timelines.active();
        let window = Window { tokens: next, position: sequence.len() - next.len(), first_row: sequence.first_row() };
        let (windows, mut parts) = self.windows_and_parts();
        windows.draft(window, DraftFrom::Trunk, &mut parts, None)
    }
}
