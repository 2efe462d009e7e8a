//! What is known of a prompt already: the timeline that it continues, conversations parked and resumed, rows that are made room for.

use super::sequence::{Reuse, Sequence};
use super::timelines::{Place, Wanted};
use super::{Engine, EngineError, Request};
use crate::backend::Backend;
use crate::units::Bytes;

impl<B: Backend> Engine<B> {
    /// Finds what the caches and the parked conversations hold of a prompt, makes it the active timeline and says how many tokens
    /// that saves. What would be lost is parked first.
    pub(super) fn resume_prefix(&mut self, request: &Request) -> Result<usize, EngineError> {
        if self.settings.prefix_cache == Bytes::ZERO {
            self.timelines.clear();
            return Ok(0);
        }
        let n_ctx = self.plan.ctx_tokens as usize;
        let reuse = if self.settings.deterministic { Reuse::Deterministic } else { Reuse::Any };
        let prompt = &request.prompt;
        let parked = self.prefix_cache.best(prompt, reuse);
        let tokens_max = request.tokens_max.min(n_ctx - prompt.len());
        let wanted = Wanted { prompt, tokens_max, parked: parked.map_or(0, |found| found.tokens) };
        let decision = self.timelines.decide(wanted, n_ctx, reuse);
        if self.timelines.loses(decision) {
            self.park(decision.place)?;
        }
        // Parking may have replaced or dropped the entry that was found.
        let parked = self.prefix_cache.best(prompt, reuse).filter(|_| decision.resumes);
        match parked {
            Some(found) => {
                let sequence = self.prefix_cache.resume(found, decision.first_row, &self.compute)?;
                self.timelines.set(decision.place, sequence);
            }
            None if decision.kept > 0 => self.timelines.continue_at(decision.place, decision.kept),
            None => self.timelines.set(decision.place, Sequence::starting_at(decision.first_row)),
        }
        if self.timelines.runs_into_side(prompt.len()) {
            self.park(Place::Side)?;
            self.timelines.clear_side();
        }
        Ok(self.timelines.active().len())
    }

    pub(super) fn park(&mut self, place: Place) -> Result<(), EngineError> {
        if let Some(sequence) = self.timelines.at(place) {
            self.prefix_cache.park(sequence, &self.compute)?;
        }
        Ok(())
    }

    /// Sees to it that the active timeline may grow by a row: main grows over the side timeline, that one moves to main's place.
    pub(super) fn make_room_for_row(&mut self) -> Result<(), EngineError> {
        let rows = self.timelines.active().len() + 1;
        if self.timelines.runs_into_side(rows) {
            self.park(Place::Side)?;
            self.timelines.clear_side();
        }
        if self.timelines.active().first_row() as usize + rows > self.plan.ctx_tokens as usize {
            self.park(Place::Main)?;
            let side = self.timelines.active();
            self.prefix_cache.move_to_start(side, &self.compute)?;
            let moved = Sequence::resumed(side.tokens().to_vec(), side.prompt_rows(), 0);
            self.timelines.clear_side();
            self.timelines.set(Place::Main, moved);
        }
        Ok(())
    }
}
