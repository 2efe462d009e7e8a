//! The machine that moves VRAM between the phases. The only place that does.
//!
//! ```text
//!            lend              begin             restore
//! Decode ----------> Lending ----------> Prefill ----------> Restoring ----------> Decode
//!                                                                       (refilling: some slots
//!                                                                        are still on their way)
//! ```
//! A transition out of order is refused and changes nothing; one that a fault of the device stops stays in Restoring, from where
//! [`Scheduler::recover`] leads on: windows cannot run before. The head can be reached only through [`Scheduler::decode`], whose
//! witness exists only in Decode, or through [`Scheduler::kept_head`] with a loan that left it alone:
//!
//! ```compile_fail,E0502
//! # use ebbtide::{backend::Backend, phase::{Scheduler, HeadRef}, experts::Experts};
//! fn head_while_lending<B: Backend>(scheduler: &mut Scheduler<B>, experts: &mut Experts<B>, stream: &B::Stream) {
//!     let head = scheduler.decode().unwrap().head(stream).unwrap();
//!     let request = ebbtide::phase::region::LoanRequest { bytes: Default::default(), with_head: true, keep_slots: 1 };
//!     let loan = scheduler.lend(request, experts, stream).unwrap(); // the head is still borrowed
//!     println!("{:?}", head.range());
//! }
//! ```
//! The same lines compile once the head is let go before the loan is made:
//! ```
//! # use ebbtide::{backend::Backend, phase::{Scheduler, HeadRef}, experts::Experts};
//! fn head_while_lending<B: Backend>(scheduler: &mut Scheduler<B>, experts: &mut Experts<B>, stream: &B::Stream) {
//!     let head = scheduler.decode().unwrap().head(stream).unwrap();
//!     println!("{:?}", head.range());
//!     let request = ebbtide::phase::region::LoanRequest { bytes: Default::default(), with_head: true, keep_slots: 1 };
//!     let loan = scheduler.lend(request, experts, stream).unwrap();
//! }
//! ```

#[path = "witness.rs"]
mod witness;

use std::cell::Cell;
use std::rc::Rc;

use thiserror::Error;

pub use witness::{Decode, HeadRef};

use crate::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction};
use crate::experts::Experts;
use crate::phase::Plan;
use crate::phase::region::{Lease, Loan, LoanRequest, Owner, RegionError, Regions};
use crate::phase::slab::{HEAD_PURPOSE, PIECE_PURPOSE, SPILL_PURPOSE, Slab, SlabSizes};
use crate::settings::{HeadAliasMode, Refill};
use crate::units::{Bytes, SlotId};

/// What the slab is used for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Tokens are written; all ranges belong to slots and head.
    Decode,
    /// Ranges are being taken from decode.
    Lending,
    /// A prompt is read; a loan is out.
    Prefill,
    /// The loan is home, its contents are being brought back.
    Restoring,
}

/// A transition or a use of the slab that failed.
#[derive(Debug, Error)]
pub enum PhaseError {
    /// A call that the present phase does not allow. Nothing was changed.
    #[error("{call} is refused in phase {phase:?}")]
    OutOfOrder {
        /// The call.
        call: &'static str,
        /// The phase it met.
        phase: Phase,
    },
    /// The books refuse the loan.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A captured graph claims a range that decode does not own as it was captured.
    #[error("a captured graph claims {bytes} at {addr}, which is lent or was placed anew", bytes = .0.range.bytes, addr = .0.range.start)]
    StaleLease(Lease),
}

/// What the phases did, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseCounters {
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Time of the last reload, in milliseconds, by the device's clock.
    pub head_reload_ms: f64,
    /// How long the first head product behind it waited for that reload, in milliseconds: what of the copy is not hidden.
    pub head_wait_ms: f64,
    /// Prompt-buffer bytes in the head's range during the last loan.
    pub arena_bytes_in_head: Bytes,
    /// Slots lent during the last loan.
    pub slots_lent: u32,
    /// Loans made.
    pub loans: u64,
}

/// What is left to do before writing goes on.
#[derive(Clone, Copy, Debug)]
struct Homecoming {
    /// What the prompt buffers lay in.
    arena: Option<AddrRange>,
    /// The head's weights are to be brought back.
    with_head: bool,
    refill: Refill,
}

/// Owner of the slab.
pub struct Scheduler<B: Backend> {
    backend: Rc<B>,
    /// `None` only where a slab that was to be smaller could not be had yet.
    slab: Option<Slab<B>>,
    /// The main part's, of a device that can reserve some.
    addresses: Option<B::Reserved>,
    sizes: SlabSizes,
    spill: Option<B::Buffer>,
    regions: Regions,
    phase: Phase,
    homecoming: Option<Homecoming>,
    head_source: Addr,
    head_bytes: Bytes,
    copy_stream: B::Stream,
    prompt_done: B::Event,
    head_leaves: B::Event,
    head_arrived: B::Event,
    /// The end of the work before the first use of the head since its reload began.
    head_wanted: B::Event,
    head_is_wanted: Cell<bool>,
    reload_in_flight: bool,
    counters: PhaseCounters,
}

impl<B: Backend> Scheduler<B> {
    /// Allocates the slab of `plan`, writes all of it once, as some drivers take memory only then, and starts loading the head, whose
    /// `head_bytes` lie at `head_source` in host memory.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, plan: &Plan, head_source: Addr, head_bytes: Bytes) -> Result<Self, PhaseError> {
        let sizes = plan.slab_sizes();
        let mut addresses = Slab::reserve(&*backend, &sizes);
        let slab = Slab::allocate(&*backend, sizes.clone(), &mut addresses)?;
        let regions = Regions::placed(slab.places(AddrRange { start: Addr(0), bytes: Bytes::ZERO }));
        let scheduler = Self {
            copy_stream: backend.create_stream()?,
            prompt_done: backend.create_event()?,
            head_leaves: backend.create_event()?,
            head_arrived: backend.create_event()?,
            head_wanted: backend.create_event()?,
            head_is_wanted: Cell::new(false),
            backend,
            slab: Some(slab),
            addresses,
            sizes,
            spill: None,
            regions,
            phase: Phase::Decode,
            homecoming: None,
            head_source,
            head_bytes,
            reload_in_flight: false,
            counters: PhaseCounters::default(),
        };
        scheduler.write_once()?;
        scheduler.start_head_copy()?;
        Ok(scheduler)
    }

    /// The present phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The books.
    #[must_use]
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Sizes of the slab's parts.
    #[must_use]
    pub fn sizes(&self) -> &SlabSizes {
        &self.sizes
    }

    /// A slab that was made smaller can have as many slots again as at start, with the head where it is.
    #[must_use]
    pub fn keeps_addresses(&self) -> bool {
        self.addresses.is_some()
    }

    /// Pieces that were given up.
    #[must_use]
    pub fn pieces_given_up(&self) -> u32 {
        u32::try_from(self.missing_pieces().count()).expect("few pieces")
    }

    /// Bytes of the pieces that were given up.
    #[must_use]
    pub fn given_up_bytes(&self) -> Bytes {
        self.missing_pieces().map(|piece| self.sizes.piece_bytes(piece)).sum()
    }

    /// Bytes of the piece that [`Scheduler::take_piece`] would take; `None` where none is missing.
    #[must_use]
    pub fn missing_piece_bytes(&self) -> Option<Bytes> {
        self.missing_pieces().next().map(|piece| self.sizes.piece_bytes(piece))
    }

    /// Pieces that were given up, first to last.
    fn missing_pieces(&self) -> impl Iterator<Item = u32> {
        let pieces = self.slab.iter().flat_map(|slab| (0..).zip(&slab.pieces));
        pieces.filter(|(_, piece)| piece.is_none()).map(|(number, _)| number)
    }

    /// Where a slot lies, as a function to hand on.
    pub fn slot_range(&self) -> impl Fn(SlotId) -> AddrRange + '_ {
        |slot| self.regions.slot(slot)
    }

    /// Counters since the start, the time of a finished reload included.
    ///
    /// # Errors
    /// The backend's.
    pub fn counters(&mut self) -> Result<PhaseCounters, PhaseError> {
        if self.reload_in_flight {
            self.backend.synchronise_event(&self.head_arrived)?;
            self.counters.head_reload_ms = self.backend.elapsed_s(&self.head_leaves, &self.head_arrived)? * 1e3;
            self.counters.head_wait_ms = 0.0;
            if self.head_is_wanted.get() {
                self.backend.synchronise_event(&self.head_wanted)?;
                self.counters.head_wait_ms = self.backend.elapsed_s(&self.head_wanted, &self.head_arrived)?.max(0.0) * 1e3;
            }
            self.reload_in_flight = false;
        }
        Ok(self.counters)
    }

    /// Proof that tokens may be written.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] in any other phase.
    pub fn decode(&self) -> Result<Decode<'_, B>, PhaseError> {
        match self.phase {
            Phase::Decode => Ok(Decode::of(self)),
            phase => Err(PhaseError::OutOfOrder { call: "decode", phase }),
        }
    }

    /// The head beside a loan that left it with decode, for work on `stream`.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] while the head is lent, by this loan or by one that was not shown.
    pub fn kept_head<'a>(&'a self, loan: Option<&'a Loan>, stream: &B::Stream) -> Result<HeadRef<'a>, PhaseError> {
        let lent = self.regions.owner(self.regions.head()) == Owner::Prompt || self.phase == Phase::Restoring;
        if lent || loan.is_some_and(Loan::includes_head) {
            return Err(PhaseError::OutOfOrder { call: "kept_head", phase: self.phase });
        }
        self.backend.wait(stream, &self.head_arrived)?;
        Ok(HeadRef::at(self.regions.head()))
    }

    /// Decode to Prefill: lends a part of the slab to the prompt path, whose work goes to `stream`. A head with an allocation of its own
    /// is freed.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Decode and [`RegionError`] for a request that cannot be met change nothing. After a fault of
    /// the backend the phase is Restoring: [`Scheduler::recover`] leads back to Decode.
    pub fn lend(&mut self, request: LoanRequest, experts: &mut Experts<B>, stream: &B::Stream) -> Result<Loan, PhaseError> {
        if self.phase != Phase::Decode {
            return Err(PhaseError::OutOfOrder { call: "lend", phase: self.phase });
        }
        let loan = self.regions.lend(request)?;
        self.phase = Phase::Lending;
        match self.hand_over(&loan, experts, stream) {
            Ok(()) => {
                self.counters.loans += 1;
                self.counters.slots_lent = u32::try_from(loan.slots().len()).expect("fewer than 2^32 slots");
                self.counters.arena_bytes_in_head = loan.bytes_in_head();
                self.phase = Phase::Prefill;
                Ok(loan)
            }
            Err(error) => {
                let homecoming = Homecoming { arena: None, with_head: loan.includes_head(), refill: Refill::Lazy };
                self.regions.take_back(loan).expect("the loan that was just made");
                (self.homecoming, self.phase) = (Some(homecoming), Phase::Restoring);
                Err(error)
            }
        }
    }

    fn hand_over(&mut self, loan: &Loan, experts: &mut Experts<B>, stream: &B::Stream) -> Result<(), PhaseError> {
        if loan.includes_head() {
            self.backend.wait(stream, &self.head_arrived)?;
        }
        experts.withdraw(loan.slots(), stream)?;
        for slot in loan.slots() {
            self.backend.discard(stream, self.regions.slot(slot))?;
        }
        if loan.includes_head() {
            self.backend.discard(stream, self.regions.head())?;
            if self.sizes.mode == HeadAliasMode::Realloc {
                // Windows that read the head, and a reload on its way, are over before its memory goes.
                self.backend.synchronise(stream)?;
                self.backend.synchronise_event(&self.head_arrived)?;
                if let Some(slab) = &mut self.slab {
                    slab.head = None;
                }
            }
        }
        Ok(())
    }

    /// Continues the prompt buffers of a loan in `bytes` of their own, for which the head's memory has made room.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] unless the loan freed the head and has no such memory yet; [`BackendError::Unsupported`] where the device
    /// does not allow it; [`BackendError::OutOfMemory`]. All leave the loan as it was.
    pub fn continue_beside(&mut self, loan: &mut Loan, bytes: Bytes) -> Result<AddrRange, PhaseError> {
        let freed = self.sizes.mode == HeadAliasMode::Realloc && loan.includes_head();
        if self.phase != Phase::Prefill || !freed || self.spill.is_some() {
            return Err(PhaseError::OutOfOrder { call: "continue_beside", phase: self.phase });
        }
        let capabilities = self.backend.capabilities();
        if !capabilities.borrow_spill {
            let what = "prompt buffers beside the slab (borrow_spill): use --head-alias-mode overlay".to_owned();
            return Err(BackendError::Unsupported { backend: capabilities.backend, what }.into());
        }
        let spill = self.backend.malloc(bytes, SPILL_PURPOSE)?;
        let range = spill.range();
        self.spill = Some(spill);
        loan.continue_in(range);
        Ok(range)
    }

    /// Prefill to Decode: takes the loan back, starts the head's way home and then the slots', hottest first. With
    /// [`Refill::Strict`] it waits for all of them.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Prefill and [`RegionError::ForeignLoan`] for the loan of another scheduler change nothing here.
    /// After a fault of the backend the loan is home and the phase is Restoring: [`Scheduler::recover`] goes on from there.
    pub fn restore(&mut self, loan: Loan, experts: &mut Experts<B>, stream: &B::Stream, refill: Refill) -> Result<(), PhaseError> {
        if self.phase != Phase::Prefill {
            return Err(PhaseError::OutOfOrder { call: "restore", phase: self.phase });
        }
        let homecoming = Homecoming { arena: Some(loan.arena()), with_head: loan.includes_head(), refill };
        // The books refuse a loan that is not theirs; the phase stays as it was then.
        self.regions.take_back(loan)?;
        (self.homecoming, self.phase) = (Some(homecoming), Phase::Restoring);
        self.recover(experts, stream)
    }

    /// Restoring to Decode, from wherever a fault left it. [`BackendError::OutOfMemory`] says that the head, or the slab, has no room:
    /// give slots up ([`Scheduler::give_up_piece`], [`Scheduler::rebuild`]) and call this again.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Restoring; the backend's, after which it can be called again.
    pub fn recover(&mut self, experts: &mut Experts<B>, stream: &B::Stream) -> Result<(), PhaseError> {
        let Some(mut homecoming) = self.homecoming.filter(|_| self.phase == Phase::Restoring) else {
            return Err(PhaseError::OutOfOrder { call: "recover", phase: self.phase });
        };
        if let Some(arena) = homecoming.arena.take() {
            self.backend.discard(stream, arena)?;
            self.homecoming = Some(homecoming);
        }
        if self.spill.is_some() {
            // A fault of the prompt's own work is told by whoever read the prompt; only one that stays ends this.
            self.backend.synchronise(stream).or_else(|_| self.backend.synchronise(stream))?;
            self.spill = None;
        }
        self.make_whole(experts)?;
        self.backend.record(stream, &self.prompt_done)?;
        if homecoming.with_head {
            self.backend.wait(&self.copy_stream, &self.prompt_done)?;
            self.start_head_copy()?;
            self.counters.head_reloads += 1;
            self.reload_in_flight = true;
            self.head_is_wanted.set(false);
            homecoming.with_head = false;
            self.homecoming = Some(homecoming);
        }
        let regions = &self.regions;
        experts.refill(&self.prompt_done, |slot| regions.slot(slot))?;
        if homecoming.refill == Refill::Strict {
            self.backend.synchronise_event(&self.head_arrived)?;
            experts.publish_arrivals(stream, true, |slot| regions.slot(slot))?;
        }
        (self.homecoming, self.phase) = (None, Phase::Decode);
        Ok(())
    }

    /// Allocates what is missing: a head that was freed, or a whole slab.
    fn make_whole(&mut self, experts: &mut Experts<B>) -> Result<(), PhaseError> {
        let Some(slab) = &mut self.slab else {
            let slab = Slab::allocate(&*self.backend, self.sizes.clone(), &mut self.addresses)?;
            self.regions.replace(slab.places(self.regions.head()));
            self.slab = Some(slab);
            self.write_once()?;
            experts.revive((0..self.sizes.slots).map(SlotId));
            return Ok(());
        };
        if self.sizes.mode == HeadAliasMode::Realloc && slab.head.is_none() {
            let head = self.backend.malloc(self.sizes.head_bytes, HEAD_PURPOSE)?;
            self.regions.place_head(head.range());
            slab.head = Some(head);
        }
        Ok(())
    }

    /// Gives the last piece that is there back to the driver and returns how many slots went with it; `None` where there is none.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] while something is lent; the backend's, and then the piece stays.
    pub fn give_up_piece(&mut self, experts: &mut Experts<B>, stream: &B::Stream) -> Result<Option<u32>, PhaseError> {
        self.refuse_while_lent("give_up_piece")?;
        let Some(slab) = &mut self.slab else { return Ok(None) };
        let Some(piece) = slab.pieces.iter().rposition(Option::is_some) else { return Ok(None) };
        let slots = self.sizes.slots_of(u32::try_from(piece).expect("few pieces"));
        experts.retire(slots.clone(), stream)?;
        slots.for_each(|slot| self.regions.place_slot(slot, None));
        slab.pieces[piece] = None;
        Ok(Some(self.sizes.piece_slots))
    }

    /// Takes the first missing piece again, to be filled with the experts that deserve it, and returns how many slots came with it.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Decode; the backend's.
    pub fn take_piece(&mut self, experts: &mut Experts<B>, stream: &B::Stream) -> Result<Option<u32>, PhaseError> {
        if self.phase != Phase::Decode {
            return Err(PhaseError::OutOfOrder { call: "take_piece", phase: self.phase });
        }
        let Some(slab) = &mut self.slab else { return Ok(None) };
        let Some(piece) = slab.pieces.iter().position(Option::is_none) else { return Ok(None) };
        let number = u32::try_from(piece).expect("few pieces");
        let buffer = self.backend.malloc(self.sizes.piece_bytes(number), PIECE_PURPOSE)?;
        let slots = self.sizes.slots_of(number);
        for slot in slots.clone() {
            self.regions.place_slot(slot, Some(self.sizes.slot_in_piece(buffer.range().start, slot)));
        }
        slab.pieces[piece] = Some(buffer);
        experts.revive(slots);
        self.backend.record(stream, &self.prompt_done)?;
        let regions = &self.regions;
        experts.refill(&self.prompt_done, |slot| regions.slot(slot))?;
        Ok(Some(self.sizes.piece_slots))
    }

    /// Gives the memory of the whole slab back and takes that of `plan`'s, which has no more slots than the first: where pieces are not
    /// enough, or there is room again. Everything in it is brought back. All leases are stale afterwards, but those on a head that stayed.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] while something is lent. The backend's: before anything is freed they change nothing; later the phase is
    /// Restoring, and [`Scheduler::recover`] or another call of this goes on.
    pub fn rebuild(&mut self, plan: &Plan, experts: &mut Experts<B>, stream: &B::Stream, refill: Refill) -> Result<(), PhaseError> {
        self.refuse_while_lent("rebuild")?;
        experts.retire((0..self.regions.n_slots()).map(SlotId), stream)?;
        self.backend.synchronise(&self.copy_stream)?;
        (self.slab, self.spill) = (None, None);
        self.sizes = plan.slab_sizes();
        self.homecoming = Some(Homecoming { arena: None, with_head: true, refill });
        self.phase = Phase::Restoring;
        self.recover(experts, stream)
    }

    fn refuse_while_lent(&self, call: &'static str) -> Result<(), PhaseError> {
        match self.phase {
            Phase::Decode | Phase::Restoring => Ok(()),
            phase => Err(PhaseError::OutOfOrder { call, phase }),
        }
    }

    /// Writes every byte of the slab, so that a driver that takes memory on touch has taken it.
    fn write_once(&self) -> Result<(), PhaseError> {
        for range in self.slab.iter().flat_map(Slab::ranges) {
            self.backend.fill(&self.copy_stream, range, 0)?;
        }
        // Copies of experts come by another stream.
        Ok(self.backend.synchronise(&self.copy_stream)?)
    }

    fn start_head_copy(&self) -> Result<(), PhaseError> {
        let dst = self.regions.head().start;
        self.backend.record(&self.copy_stream, &self.head_leaves)?;
        let copy = Copy { dst, src: self.head_source, bytes: self.head_bytes, direction: Direction::ToDevice };
        self.backend.copy(&self.copy_stream, copy)?;
        self.backend.record(&self.copy_stream, &self.head_arrived)?;
        Ok(())
    }
}
