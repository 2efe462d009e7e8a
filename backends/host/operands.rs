//! Operands of an operation: addresses become slices, after checking that the ranges are live, aligned and disjoint.

use std::cell::RefCell;

use super::memory::MemoryTable;
use crate::backend::{Addr, AddrRange, BackendError, Result};
use crate::units::Bytes;

/// Element types that operands may have: any bytes are a value of them.
pub trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u8 {}

/// The operands of one operation on their way to slices.
///
/// A range that is written overlaps no other range of the same operation; that is what makes handing out slices sound.
pub struct Operands<'a> {
    op: &'static str,
    memory: &'a MemoryTable,
    taken: RefCell<Vec<(AddrRange, bool)>>,
}

impl<'a> Operands<'a> {
    /// For an operation named `op`.
    pub fn new(op: &'static str, memory: &'a MemoryTable) -> Self {
        Self { op, memory, taken: RefCell::new(Vec::new()) }
    }

    /// An error that names the operation.
    pub fn refuse(&self, reason: String) -> BackendError {
        BackendError::BadOperand { op: self.op, reason }
    }

    fn take(&self, addr: Addr, bytes: Bytes, written: bool) -> Result<AddrRange> {
        let range = AddrRange { start: addr, bytes };
        let mut taken = self.taken.borrow_mut();
        if taken.iter().any(|(other, other_written)| (written || *other_written) && other.overlaps(range)) {
            return Err(BackendError::Overlap { what: self.op, addr });
        }
        taken.push((range, written));
        Ok(range)
    }

    fn check_alignment<T: Plain>(&self, pointer: *const u8) -> Result<()> {
        if pointer.cast::<T>().is_aligned() {
            return Ok(());
        }
        Err(self.refuse(format!("an operand is not aligned to {} bytes", align_of::<T>())))
    }

    /// `n` elements to read.
    pub fn read<T: Plain>(&self, addr: Addr, n: usize) -> Result<&'a [T]> {
        let range = self.take(addr, Bytes::from(n * size_of::<T>()), false)?;
        let pointer = self.memory.readable(self.op, range)?;
        self.check_alignment::<T>(pointer)?;
        // SAFETY: the table checked that the range is live, and nothing is freed while an operation runs, which the borrow of the
        // table ensures; alignment was checked; any bytes are a `T`; no written range of this operation overlaps.
        Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), n) })
    }

    /// `n` elements to write, or to change in place.
    #[allow(clippy::mut_from_ref, reason = "ranges handed out are disjoint, as `take` checks")]
    pub fn write<T: Plain>(&self, addr: Addr, n: usize) -> Result<&'a mut [T]> {
        let range = self.take(addr, Bytes::from(n * size_of::<T>()), true)?;
        let pointer = self.memory.writable(self.op, range)?;
        self.check_alignment::<T>(pointer)?;
        // SAFETY: as in `read`, and no other range of this operation overlaps, so the slice is the only access.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), n) })
    }

    /// Positions of rows: ascending and inside a cache of `n_ctx` tokens. Poisoned memory fails here.
    pub fn positions(&self, addr: Addr, n_rows: usize, n_ctx: u32) -> Result<&'a [i32]> {
        let positions = self.read::<i32>(addr, n_rows)?;
        let inside = |&position: &i32| u32::try_from(position).is_ok_and(|position| position < n_ctx);
        if let Some(outside) = positions.iter().find(|position| !inside(position)) {
            return Err(self.refuse(format!("position {outside} is outside a context of {n_ctx} tokens")));
        }
        if !positions.is_sorted_by(|left, right| left < right) {
            return Err(self.refuse("positions do not ascend".to_owned()));
        }
        Ok(positions)
    }

    /// Numbers below `bound`, e.g. experts of a layer.
    pub fn indices(&self, addr: Addr, n: usize, bound: u32) -> Result<&'a [u32]> {
        let indices = self.read::<u32>(addr, n)?;
        match indices.iter().find(|&&index| index >= bound) {
            Some(index) => Err(self.refuse(format!("number {index} is not below {bound}"))),
            None => Ok(indices),
        }
    }

    /// The table, to ask where operands lie.
    pub fn memory(&self) -> &'a MemoryTable {
        self.memory
    }
}
