//! Proofs that the slab is as somebody needs it: the head where it says, and the slab with decode. Both borrow the scheduler, so that
//! nothing can be lent while they live.

use super::{PhaseError, Scheduler};
use crate::backend::{AddrRange, Backend};
use crate::phase::region::Lease;

/// The output head, readable: proof that its bytes are, or in stream order will be, where it says.
#[derive(Debug)]
pub struct HeadRef<'a> {
    range: AddrRange,
    _borrowed: std::marker::PhantomData<&'a ()>,
}

impl HeadRef<'_> {
    /// The head at `range`, which whoever calls this has seen to.
    pub(super) fn at(range: AddrRange) -> Self {
        Self { range, _borrowed: std::marker::PhantomData }
    }

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
    /// For a scheduler in phase Decode.
    pub(super) fn of(scheduler: &'a Scheduler<B>) -> Self {
        Self { scheduler }
    }

    /// The head for work on `stream`, which waits for a reload in flight.
    ///
    /// # Errors
    /// The backend's.
    pub fn head(&self, stream: &B::Stream) -> Result<HeadRef<'a>, PhaseError> {
        let scheduler = self.scheduler;
        if scheduler.reload_in_flight && !scheduler.head_is_wanted.replace(true) {
            scheduler.backend.record(stream, &scheduler.head_wanted)?;
        }
        scheduler.backend.wait(stream, &scheduler.head_arrived)?;
        Ok(HeadRef::at(scheduler.regions.head()))
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
