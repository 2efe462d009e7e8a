//! What is known of a prompt already: the timeline that it continues, conversations parked and resumed, rows that are made room for.

use super::sequence::{DETERMINISTIC_STEP, Reuse, Sequence, common_tokens};
use super::snapshots::SnapshotKind;
use super::timelines::{Place, WORTH_KEEPING, Wanted};
use super::{Engine, EngineError, Request};
use crate::backend::{Addr, Backend};
use crate::units::{Bytes, TokenId};

/// Tokens at the end of a prompt behind which no copy of a recurrent state is made: templates write another beginning of an answer once
/// it is a part of the history, so the next prompt parts from this one there.
const BRANCH_MARGIN: usize = 8;

/// A copy of the recurrent state to be made while a prompt is read.
#[derive(Clone, Copy, Debug)]
pub struct Checkpoint {
    /// Tokens that it holds; the border of a step.
    pub(super) position: usize,
    /// Where it goes, in pinned memory.
    pub(super) target: Addr,
}

/// What was known of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// Leading tokens that need not be read again.
    pub(super) reused: usize,
    /// Leading tokens that some known conversation shares.
    pub(super) common: usize,
}

impl<B: Backend> Engine<B> {
    /// Finds what the caches and the parked conversations hold of a prompt, makes it the active timeline and says how many tokens
    /// that saves. What would be lost is parked first.
    pub(super) fn resume_prefix(&mut self, request: &Request) -> Result<Known, EngineError> {
        self.checkpoints.clear();
        self.prefix_cache.drop_unmade_snapshots();
        if self.settings.prefix_cache == Bytes::ZERO {
            self.timelines.clear();
            self.recurrent.clear(&self.compute)?;
            return Ok(Known { reused: 0, common: 0 });
        }
        let n_ctx = self.plan.ctx_tokens as usize;
        let reuse = self.reuse();
        let prompt = &request.prompt;
        let parked = self.prefix_cache.best(prompt, reuse);
        let tokens_max = request.tokens_max.min(n_ctx - prompt.len());
        let wanted = Wanted { prompt_tokens: prompt.len(), tokens_max, parked: parked.map_or(0, |found| found.tokens) };
        let decision = self.timelines.decide(wanted, n_ctx, |place, sequence| self.reusable(place, sequence, prompt));
        let shared = self.longest_common(prompt);
        let left = self.timelines.place();
        let loses = self.timelines.loses(decision);
        if left != decision.place || loses {
            self.keep_left_state()?;
        }
        if loses {
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
        self.bring_state(left == decision.place && parked.is_none())?;
        if self.timelines.runs_into_side(prompt.len()) {
            self.park(Place::Side)?;
            self.timelines.clear_side();
        }
        let kept = self.timelines.active().len();
        self.plan_checkpoints(prompt, kept, shared)?;
        Ok(Known { reused: kept, common: shared.max(kept) })
    }

    fn reuse(&self) -> Reuse {
        if self.settings.deterministic { Reuse::Deterministic } else { Reuse::Any }
    }

    /// Leading tokens of `prompt` that need not be read again where the timeline at `place` is gone on with.
    fn reusable(&self, place: Place, sequence: &Sequence, prompt: &[TokenId]) -> usize {
        let common = sequence.reusable(prompt, self.reuse());
        let is_live = place == self.timelines.place() && self.recurrent.position() == Some(common) && sequence.len() == common;
        if is_live { common } else { self.prefix_cache.resumable(prompt, common, self.reuse()) }
    }

    /// Leading tokens that `prompt` shares with any conversation that is known.
    fn longest_common(&self, prompt: &[TokenId]) -> usize {
        let live = [Place::Main, Place::Side].into_iter().filter_map(|place| self.timelines.at(place));
        let in_live = live.map(|sequence| common_tokens(sequence.tokens(), prompt)).max().unwrap_or(0);
        in_live.max(self.prefix_cache.longest_common(prompt))
    }

    /// Copies the recurrent state of the active timeline out, before another takes its place on the device.
    fn keep_left_state(&mut self) -> Result<(), EngineError> {
        let sequence = self.timelines.active();
        if self.recurrent.position() != Some(sequence.len()) || sequence.len() < WORTH_KEEPING || self.reuse() != Reuse::Any {
            return Ok(());
        }
        if let Some(target) = self.prefix_cache.make_snapshot(sequence.tokens(), SnapshotKind::Left)? {
            self.recurrent.copy_out(target, &self.compute)?;
            self.prefix_cache.snapshot_is_made(target);
        }
        Ok(())
    }

    /// Makes the recurrent state that of the active timeline, where it is not; `same` says whether it was that timeline's before.
    fn bring_state(&mut self, same: bool) -> Result<(), EngineError> {
        let kept = self.timelines.active().len();
        if !self.recurrent.is_there() || (same && self.recurrent.position() == Some(kept)) {
            return Ok(());
        }
        let reuse = self.reuse();
        let source = if kept > 0 { self.prefix_cache.snapshot(self.timelines.active().tokens(), reuse) } else { None };
        match source {
            Some(source) => {
                self.recurrent.copy_in(source, kept, &self.compute)?;
                // The copy may be dropped by the next one that is made.
                Ok(self.backend.synchronise(&self.compute)?)
            }
            None => {
                // A copy that was found may have gone for a conversation that was parked since.
                self.timelines.continue_at(self.timelines.place(), 0);
                self.recurrent.clear(&self.compute)
            }
        }
    }

    /// Forgets the active timeline where a fault has left it without its recurrent state: nothing can be written behind it.
    pub(super) fn forget_without_state(&mut self) {
        if self.recurrent.is_there() && self.recurrent.position() != Some(self.timelines.active().len()) {
            self.timelines.continue_at(self.timelines.place(), 0);
        }
    }

    /// Speaks for copies of the recurrent state near the prompt's end, and where it parts from what is known.
    fn plan_checkpoints(&mut self, prompt: &[TokenId], kept: usize, shared: usize) -> Result<(), EngineError> {
        if !self.recurrent.is_there() {
            return Ok(());
        }
        let step = |tokens: usize| tokens / DETERMINISTIC_STEP * DETERMINISTIC_STEP;
        let end = step((prompt.len() - 1).saturating_sub(BRANCH_MARGIN));
        let root = step(shared.min(prompt.len() - 1));
        let wanted = [(root, SnapshotKind::Root), (end, SnapshotKind::PromptEnd)];
        for (position, kind) in wanted {
            if position < kept + WORTH_KEEPING || self.checkpoints.iter().any(|checkpoint| checkpoint.position == position) {
                continue;
            }
            if let Some(target) = self.prefix_cache.make_snapshot(&prompt[..position], kind)? {
                self.checkpoints.push(Checkpoint { position, target });
            }
        }
        self.checkpoints.sort_by_key(|checkpoint| checkpoint.position);
        Ok(())
    }

    pub(super) fn park(&mut self, place: Place) -> Result<(), EngineError> {
        if let Some(sequence) = self.timelines.at(place) {
            self.prefix_cache.park(sequence, &self.compute)?;
        }
        Ok(())
    }

    /// Sees to it that the active timeline may grow by `more` rows: main grows over the side timeline, that one moves to main's place.
    pub(super) fn make_room_for_rows(&mut self, more: usize) -> Result<(), EngineError> {
        let rows = self.timelines.active().len() + more;
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
