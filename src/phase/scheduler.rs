//! The machine that moves VRAM between the phases. The only place that does.
//!
//! ```text
//!            lend              begin             restore
//! Decode ----------> Lending ----------> Prefill ----------> Restoring ----------> Decode
//!                                                                       (refilling: some slots
//!                                                                        are still on their way)
//! ```
//! A transition out of order is refused and changes nothing. The head can be reached only through [`Scheduler::decode`], whose
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

use std::rc::Rc;

use thiserror::Error;

use crate::backend::{Addr, AddrRange, Backend, BackendError, Copy, DeviceMemory, Direction};
use crate::experts::Experts;
use crate::phase::Plan;
use crate::phase::region::{Lease, Loan, LoanRequest, Owner, RegionError, Regions};
use crate::settings::Refill;
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

/// The output head, readable: proof that its bytes are, or in stream order will be, where it says.
#[derive(Debug)]
pub struct HeadRef<'a> {
    range: AddrRange,
    _borrowed: std::marker::PhantomData<&'a ()>,
}

impl HeadRef<'_> {
    /// Where the head lies.
    #[must_use]
    pub fn range(&self) -> AddrRange {
        self.range
    }
}

/// Proof that the slab belongs to decode. While it lives nothing can be lent.
pub struct Decode<'a, B: Backend> {
    scheduler: &'a Scheduler<B>,
}

impl<'a, B: Backend> Decode<'a, B> {
    /// The head for work on `stream`, which waits for a reload in flight.
    ///
    /// # Errors
    /// The backend's.
    pub fn head(&self, stream: &B::Stream) -> Result<HeadRef<'a>, PhaseError> {
        self.scheduler.backend.wait(stream, &self.scheduler.head_arrived)?;
        Ok(HeadRef { range: self.scheduler.regions.head(), _borrowed: std::marker::PhantomData })
    }

    /// Checks a graph's claims; replay needs this.
    ///
    /// # Errors
    /// [`PhaseError::StaleLease`] naming the first claim that does not hold.
    pub fn check_leases(&self, leases: &[Lease]) -> Result<(), PhaseError> {
        match leases.iter().find(|lease| !self.scheduler.regions.honours(lease)) {
            Some(lease) => Err(PhaseError::StaleLease(*lease)),
            None => Ok(()),
        }
    }
}

/// What the phases did, counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseCounters {
    /// Times the head was brought back.
    pub head_reloads: u64,
    /// Time of the last reload, in milliseconds, by the device's clock.
    pub head_reload_ms: f64,
    /// Prompt-buffer bytes in the head's range during the last loan.
    pub arena_bytes_in_head: Bytes,
    /// Slots lent during the last loan.
    pub slots_lent: u32,
    /// Loans made.
    pub loans: u64,
}

/// Owner of the slab.
pub struct Scheduler<B: Backend> {
    backend: Rc<B>,
    slab: B::Buffer,
    regions: Regions,
    phase: Phase,
    head_source: Addr,
    head_bytes: Bytes,
    copy_stream: B::Stream,
    prompt_done: B::Event,
    head_leaves: B::Event,
    head_arrived: B::Event,
    reload_in_flight: bool,
    counters: PhaseCounters,
}

impl<B: Backend> Scheduler<B> {
    /// Allocates the slab of `plan` and starts loading the head, whose `head_bytes` lie at `head_source` in host memory.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: Rc<B>, plan: &Plan, head_source: Addr, head_bytes: Bytes) -> Result<Self, PhaseError> {
        let slab = backend.malloc(plan.slab_bytes(), "expert slots and output head")?;
        let regions = Regions::new(slab.range().start, plan.slot_bytes, plan.slots, plan.head_bytes);
        let scheduler = Self {
            copy_stream: backend.create_stream()?,
            prompt_done: backend.create_event()?,
            head_leaves: backend.create_event()?,
            head_arrived: backend.create_event()?,
            backend,
            slab,
            regions,
            phase: Phase::Decode,
            head_source,
            head_bytes,
            reload_in_flight: false,
            counters: PhaseCounters::default(),
        };
        scheduler.start_head_copy()?;
        Ok(scheduler)
    }

    /// The present phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The slab's range; constant.
    #[must_use]
    pub fn slab(&self) -> AddrRange {
        self.slab.range()
    }

    /// The books.
    #[must_use]
    pub fn regions(&self) -> &Regions {
        &self.regions
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
            Phase::Decode => Ok(Decode { scheduler: self }),
            phase => Err(PhaseError::OutOfOrder { call: "decode", phase }),
        }
    }

    /// The head beside a loan that left it with decode, for work on `stream`.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] while the head is lent, by this loan or by one that was not shown.
    pub fn kept_head<'a>(&'a self, loan: Option<&'a Loan>, stream: &B::Stream) -> Result<HeadRef<'a>, PhaseError> {
        let lent = self.regions.owner(self.regions.head()) == Owner::Prompt;
        if lent || loan.is_some_and(Loan::includes_head) {
            return Err(PhaseError::OutOfOrder { call: "kept_head", phase: self.phase });
        }
        self.backend.wait(stream, &self.head_arrived)?;
        Ok(HeadRef { range: self.regions.head(), _borrowed: std::marker::PhantomData })
    }

    /// Decode to Prefill: lends a part of the slab to the prompt path, whose work goes to `stream`.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Decode and [`RegionError`] for a request that cannot be met change nothing.
    pub fn lend(&mut self, request: LoanRequest, experts: &mut Experts<B>, stream: &B::Stream) -> Result<Loan, PhaseError> {
        if self.phase != Phase::Decode {
            return Err(PhaseError::OutOfOrder { call: "lend", phase: self.phase });
        }
        let loan = self.regions.lend(request)?;
        self.phase = Phase::Lending;
        // What follows fails only with the device; the loan is then lost with it.
        if loan.includes_head() {
            self.backend.wait(stream, &self.head_arrived)?;
        }
        experts.withdraw(loan.slots(), stream)?;
        for slot in loan.slots() {
            self.backend.discard(stream, self.regions.slot(slot))?;
        }
        if loan.includes_head() {
            self.backend.discard(stream, self.regions.head())?;
        }
        self.counters.loans += 1;
        self.counters.slots_lent = u32::try_from(loan.slots().len()).expect("fewer than 2^32 slots");
        self.counters.arena_bytes_in_head = loan.bytes_in_head();
        self.phase = Phase::Prefill;
        Ok(loan)
    }

    /// Prefill to Decode: takes the loan back, starts the head's way home and then the slots', hottest first. With
    /// [`Refill::Strict`] it waits for all of them.
    ///
    /// # Errors
    /// [`PhaseError::OutOfOrder`] outside Prefill and [`RegionError::ForeignLoan`] for the loan of another scheduler change nothing here;
    /// the backend's.
    pub fn restore(&mut self, loan: Loan, experts: &mut Experts<B>, stream: &B::Stream, refill: Refill) -> Result<(), PhaseError> {
        if self.phase != Phase::Prefill {
            return Err(PhaseError::OutOfOrder { call: "restore", phase: self.phase });
        }
        let (with_head, arena) = (loan.includes_head(), loan.arena());
        // The books refuse a loan that is not theirs; the phase stays as it was then.
        self.regions.take_back(loan)?;
        self.phase = Phase::Restoring;
        self.backend.discard(stream, arena)?;
        self.backend.record(stream, &self.prompt_done)?;
        if with_head {
            self.backend.wait(&self.copy_stream, &self.prompt_done)?;
            self.start_head_copy()?;
            self.counters.head_reloads += 1;
            self.reload_in_flight = true;
        }
        let regions = &self.regions;
        experts.refill(&self.prompt_done, |slot| regions.slot(slot))?;
        if refill == Refill::Strict {
            self.backend.synchronise_event(&self.head_arrived)?;
            experts.publish_arrivals(stream, true, |slot| regions.slot(slot))?;
        }
        self.phase = Phase::Decode;
        Ok(())
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
