//! Device memory while the engine lives: what another program takes is made up for with slots, and what a prompt borrowed comes home
//! whatever happens.

use super::fit::{self, Beside, PlanInputs};
use super::free_memory::FreeMemory;
use super::way::Way;
use super::{ALIAS_KEPT_SLOTS, Engine, EngineError};
use crate::backend::{AddrRange, Backend, BackendError, DeviceMemory};
use crate::model::forward::Forward;
use crate::model::layout::{PromptLayout, PromptRoom, PromptSize};
use crate::phase::prompt_sizes::SizeLimits;
use crate::phase::region::{Loan, LoanRequest};
use crate::phase::{Phase, PhaseError, Plan};
use crate::settings::HeadAliasMode;
use crate::units::Bytes;

/// Looks in a row at which there must be room for more slots before they are taken again: another program may come and go.
const LOOKS_BEFORE_TAKING: u32 = 3;

/// A slab is made anew for one part in so many of the slots at start, or for the last of them.
const GROWTH_SHARE: u32 = 16;

/// Most by which planned and measured use may differ before that is told, and one part in so many of what was planned.
const DIFFERENCE_MAX: Bytes = Bytes::mib(64);
const DIFFERENCE_SHARE: u64 = 20;

/// What the guard remembers from request to request.
#[derive(Default)]
pub(super) struct Guard {
    /// What was free once the engine stood.
    free_at_start: Option<Bytes>,
    /// The slab grows up to it again after it was made smaller.
    plan_at_start: Option<Plan>,
    looks_with_room: u32,
    /// Memory is short, or its reading is not believed, and that was told.
    told: bool,
}

/// Prompt buffers where they were placed.
pub(super) struct PlacedPrompt {
    pub layout: PromptLayout,
    pub arena: AddrRange,
    pub spill: Option<AddrRange>,
    pub loan: Option<Loan>,
}

impl<B: Backend> Engine<B> {
    /// Remembers what is free now, to tell later what others took.
    pub(super) fn remember_free_memory(&mut self) {
        self.guard.free_at_start = FreeMemory::read(&*self.backend).believed();
        self.guard.plan_at_start = Some(self.plan.clone());
    }

    /// A line where much more, or less, was taken than planned.
    pub(super) fn compare_with_plan(&mut self) {
        let Some(free) = self.guard.free_at_start else { return };
        // Windows that could not be captured take no memory, and that was told.
        let planned = self.plan.decode.total_bytes - self.plan.graph_bytes + self.windows.graph_bytes();
        let taken = self.device.total.saturating_sub(self.device.used_by_others + free);
        let allowed = DIFFERENCE_MAX.min(Bytes(planned.0 / DIFFERENCE_SHARE));
        if planned.0.abs_diff(taken.0) > allowed.0 {
            self.notices.push(format!("{planned} of VRAM were planned, {taken} less are free than before the start"));
        }
    }

    fn inputs(&self) -> PlanInputs<'_> {
        PlanInputs { model: &self.model, settings: &self.settings, device: self.device }
    }

    /// A look at free memory before a request: slots are given back where the reserve is not kept, and taken again where there is room.
    pub(super) fn look_at_memory(&mut self) -> Result<(), EngineError> {
        if self.scheduler.phase() == Phase::Restoring {
            self.bring_home(None)?;
        }
        self.keep_windows_right()?;
        let reserve = self.plan.kept_free_bytes();
        if reserve == Bytes::ZERO && self.scheduler.pieces_given_up() == 0 && self.plan_is_that_at_start() {
            // Nothing is to be kept free, so a device that is full is as it should be.
            return Ok(());
        }
        let reading = FreeMemory::read(&*self.backend);
        let Some(free) = reading.believed() else {
            if let Some(complaint) = reading.complaint()
                && !std::mem::replace(&mut self.guard.told, true)
            {
                self.notices.push(format!("{complaint}: going on by our own books, in which the reserve is kept"));
            }
            return Ok(());
        };
        if free >= reserve {
            self.guard.told = false;
            return self.take_again(free, reserve);
        }
        self.guard.looks_with_room = 0;
        self.give_back_until(free, reserve)
    }

    fn plan_is_that_at_start(&self) -> bool {
        self.guard.plan_at_start.as_ref().is_none_or(|full| full.slots == self.plan.slots)
    }

    fn give_back_until(&mut self, free_before: Bytes, reserve: Bytes) -> Result<(), EngineError> {
        let slots_before = self.scheduler.regions().n_slots_in_use();
        let others = self.guard.free_at_start.map(|free| (free + self.scheduler.given_up_bytes()).saturating_sub(free_before));
        let mut free = Some(free_before);
        while let Some(short) = free.map(|free| reserve.saturating_sub(free)).filter(|short| *short > Bytes::ZERO) {
            let piece = self.scheduler.give_up_piece(&mut self.experts, &self.compute)?;
            let makes_anew = piece.is_none() && self.inputs().smaller(&self.plan, short + self.scheduler.given_up_bytes()).is_ok();
            if makes_anew {
                self.shrink(short, None)?;
            }
            if piece.is_some() || makes_anew {
                free = FreeMemory::read(&*self.backend).believed();
            }
            // A slab that was made anew is as small as it has to be.
            if piece.is_none() {
                break;
            }
        }
        let slots = slots_before - self.scheduler.regions().n_slots_in_use();
        let still_short = free.is_none_or(|free| free < reserve);
        if slots > 0 || !self.guard.told {
            let others = others.map_or_else(|| "an unknown amount".to_owned(), |bytes| bytes.to_string());
            let gave = match slots {
                0 => "there are no slots to give back".to_owned(),
                slots if still_short => format!("gave {slots} slots back, and that is not enough"),
                slots => format!("gave {slots} slots back"),
            };
            self.notices.push(format!(
                "free VRAM is {free_before}, under the reserve of {reserve}: another program holds {others} more than at start; {gave}"
            ));
        }
        // What is still short was told now; once it is made up for, the next shortage is news.
        self.guard.told = still_short;
        Ok(())
    }

    /// Takes slots again where there has been room for some at several looks in a row: a piece that is missing, else those by which the slab
    /// was made smaller.
    fn take_again(&mut self, free: Bytes, reserve: Bytes) -> Result<(), EngineError> {
        let room_for_piece = self.scheduler.missing_piece_bytes().map(|piece| free >= reserve + piece);
        let larger = if room_for_piece.is_none() { self.larger_plan(free.saturating_sub(reserve)) } else { None };
        let room = room_for_piece == Some(true) || larger.is_some();
        self.guard.looks_with_room = if room { self.guard.looks_with_room + 1 } else { 0 };
        if self.guard.looks_with_room < LOOKS_BEFORE_TAKING {
            return Ok(());
        }
        let slots_before = self.scheduler.regions().n_slots_in_use();
        if let Some(plan) = larger {
            self.guard.looks_with_room = 0;
            self.remake(plan)?;
        } else {
            match self.scheduler.take_piece(&mut self.experts, &self.compute) {
                Ok(_) => {}
                // Somebody was faster; the next look decides again.
                Err(PhaseError::Backend(error)) if fit::is_short(&error) => self.guard.looks_with_room = 0,
                Err(error) => return Err(error.into()),
            }
        }
        let slots = self.scheduler.regions().n_slots_in_use().saturating_sub(slots_before);
        if slots > 0 {
            self.notices.push(format!("free VRAM is {free}: took {slots} slots again"));
        }
        Ok(())
    }

    /// A plan with more slots, up to those at start, that takes at most `room` more; `None` where there is none worth making the slab anew
    /// for, or the device cannot do that with the head in place.
    fn larger_plan(&self, room: Bytes) -> Option<Plan> {
        let full = self.guard.plan_at_start.as_ref().filter(|full| full.slots > self.plan.slots && self.scheduler.keeps_addresses())?;
        let most = |plan: &Plan| plan.decode.total_bytes.max(plan.prefill.total_bytes);
        let missing = most(full).saturating_sub(most(&self.plan));
        let plan = match room >= missing {
            true => full.clone(),
            // What memory takes beyond the plan, being backed in whole units, is not ours to take.
            false => self.inputs().smaller(full, missing + self.backend.capabilities().backing_unit - room).ok()?,
        };
        let worth = self.plan.slots + (full.slots / GROWTH_SHARE).max(1);
        (plan.slots >= worth.min(full.slots)).then_some(plan)
    }

    /// Makes the slab anew by a plan with `less` memory. `refused` is what the device refused before.
    fn shrink(&mut self, less: Bytes, refused: Option<BackendError>) -> Result<(), EngineError> {
        // Memory behind reserved addresses goes in whole units.
        let less = if self.scheduler.keeps_addresses() { less.align_up(self.backend.capabilities().backing_unit.0) } else { less };
        // The plan counts pieces that are there no more.
        let plan = match (self.inputs().smaller(&self.plan, less + self.scheduler.given_up_bytes()), refused) {
            (Ok(plan), _) => plan,
            (Err(_), Some(cause)) => return Err(EngineError::NotRestored { cause }),
            (Err(error), None) => return Err(error.into()),
        };
        self.remake(plan)
    }

    /// Makes the slab anew by `plan`, and by smaller ones while even that is not there.
    fn remake(&mut self, mut plan: Plan) -> Result<(), EngineError> {
        for attempt in 0.. {
            let before = self.plan.decode.total_bytes;
            self.beside = None;
            let made = self.scheduler.rebuild(&plan, &mut self.experts, &self.compute, self.settings.refill);
            let beside = made.and_then(|()| Ok(Beside::allocate(&*self.backend, &plan)?));
            self.plan = plan;
            let after = self.plan.decode.total_bytes;
            self.guard.free_at_start = self.guard.free_at_start.map(|free| (free + before).saturating_sub(after));
            match beside {
                Ok(beside) => {
                    self.beside = Some(beside);
                    return self.keep_windows_right();
                }
                Err(PhaseError::Backend(cause)) if fit::is_short(&cause) && attempt < fit::REFUSALS_MAX => {
                    let less = self.plan.slot_table.last((self.plan.slots / 4).max(1), self.plan.slots) + self.scheduler.given_up_bytes();
                    plan = self.inputs().smaller(&self.plan, less).map_err(|_| EngineError::NotRestored { cause })?;
                }
                Err(error) => return Err(self.not_home(error)),
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Everything that was lent comes back. Where the head finds no room, slots are given up until it does.
    pub(super) fn bring_home(&mut self, loan: Option<Loan>) -> Result<(), EngineError> {
        let mut home = match loan {
            Some(loan) => self.scheduler.restore(loan, &mut self.experts, &self.compute, self.settings.refill),
            None => self.scheduler.recover(&mut self.experts, &self.compute),
        };
        let slots_before = self.scheduler.regions().n_slots_in_use();
        let mut cause = None;
        while let Err(PhaseError::Backend(error)) = &home
            && fit::is_short(error)
        {
            cause.get_or_insert_with(|| error.clone());
            if self.scheduler.give_up_piece(&mut self.experts, &self.compute)?.is_some() {
                home = self.scheduler.recover(&mut self.experts, &self.compute);
            } else {
                let head_room = FreeMemory::read(&*self.backend).believed().unwrap_or(Bytes::ZERO);
                let less = self.plan.head_bytes.saturating_sub(head_room).max(self.plan.slot_bytes);
                self.shrink(less, cause.clone())?;
                home = Ok(());
            }
        }
        home.map_err(|error| self.not_home(error))?;
        if self.beside.is_none() {
            self.beside = Some(Beside::allocate(&*self.backend, &self.plan)?);
        }
        if let Some(error) = cause {
            let slots = slots_before - self.scheduler.regions().n_slots_in_use();
            self.notices.push(format!("{error} after a prompt: gave {slots} slots back for it"));
        }
        self.keep_windows_right()
    }

    fn not_home(&self, error: PhaseError) -> EngineError {
        match error {
            PhaseError::Backend(cause) if self.scheduler.phase() == Phase::Restoring => EngineError::NotRestored { cause },
            other => other.into(),
        }
    }

    /// Captures the head's window again where the head has moved.
    pub(super) fn keep_windows_right(&mut self) -> Result<(), EngineError> {
        if self.scheduler.phase() != Phase::Decode {
            return Ok(());
        }
        let forward =
            Forward { shape: &self.model.shape, weights: &self.model.weights, resident: self.resident, arithmetic: self.plan.arithmetic };
        self.windows.recapture_head(&forward, &self.scheduler, &self.compute, &mut self.notices)
    }

    /// Takes the memory for prompt buffers of `size`. Where an allocation beside the slab is refused, a smaller size that needs none.
    pub(super) fn place_prompt(&mut self, size: PromptSize, way: Way) -> Result<PlacedPrompt, EngineError> {
        let layout = self.prompt_layout(size, self.prompt_room(way)).expect("the chosen size fits the plan");
        let range = |buffer: fn(&Beside<B>) -> Option<&B::Buffer>| self.beside.as_ref().and_then(buffer).map(DeviceMemory::range);
        let owned = range(|beside| beside.owned.as_ref());
        let with_head = way == Way::Alias;
        let arena = if way == Way::Wide { range(|beside| beside.wide.as_ref()) } else { owned.filter(|_| !with_head) };
        if let Some(arena) = arena {
            return Ok(PlacedPrompt { layout, arena, spill: None, loan: None });
        }
        let frees_head = with_head && self.plan.slab.mode == HeadAliasMode::Realloc;
        let mut loan = self.lend(&layout, with_head)?;
        if !frees_head || layout.spill_bytes == Bytes::ZERO {
            return Ok(PlacedPrompt { layout, arena: loan.arena(), spill: owned.filter(|_| !frees_head), loan: Some(loan) });
        }
        match self.scheduler.continue_beside(&mut loan, layout.spill_bytes) {
            Ok(spill) => Ok(PlacedPrompt { layout, arena: loan.arena(), spill: Some(spill), loan: Some(loan) }),
            Err(PhaseError::Backend(error)) if fit::is_short(&error) => {
                self.bring_home(Some(loan))?;
                self.place_in_slots(size, error)
            }
            Err(error) => {
                self.bring_home(Some(loan))?;
                Err(error.into())
            }
        }
    }

    /// As [`Engine::place_prompt`] with the head lent, in slots alone.
    fn place_in_slots(&mut self, size: PromptSize, error: BackendError) -> Result<PlacedPrompt, EngineError> {
        let room = PromptRoom::single(self.plan.alias_arena_bytes());
        let limits = SizeLimits::new(&self.settings, size.block, self.model.shape.block_step());
        let smaller = limits.largest_block(|smaller| self.prompt_layout(smaller, room).is_some());
        let layout = smaller.and_then(|smaller| self.prompt_layout(smaller, room)).ok_or(EngineError::Backend(error.clone()))?;
        self.notices.push(format!("{error}: reading in blocks of {} instead of {}", layout.size.block, size.block));
        let loan = self.lend(&layout, true)?;
        Ok(PlacedPrompt { layout, arena: loan.arena(), spill: None, loan: Some(loan) })
    }

    fn lend(&mut self, layout: &PromptLayout, with_head: bool) -> Result<Loan, EngineError> {
        let keep_slots = if with_head { ALIAS_KEPT_SLOTS } else { self.plan.slots - self.lendable_slots() };
        let request = LoanRequest { bytes: layout.arena_bytes, with_head, keep_slots };
        Ok(self.scheduler.lend(request, &mut self.experts, &self.compute)?)
    }
}
