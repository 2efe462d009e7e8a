//! Operands of an operation: addresses become slices, after checking that the ranges are live, aligned and disjoint.

use std::cell::RefCell;

use super::memory::{MemoryTable, Place};
use crate::backend::{Addr, AddrRange, BackendError, Result};
use crate::quant::ActivationFormat;
use crate::units::Bytes;

/// Element types that operands may have: any bytes are a value of them.
pub trait Plain: Copy {}
impl Plain for f32 {}
impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u8 {}

/// The range of `n` elements. A count that overflows becomes a length that no allocation has.
fn range_of<T: Plain>(addr: Addr, n: usize) -> AddrRange {
    AddrRange { start: addr, bytes: Bytes::from(n.saturating_mul(size_of::<T>())) }
}

/// The operands of one operation on their way to slices.
///
/// A range that is written overlaps no other range of the same operation; that is what makes handing out slices sound.
pub struct Operands<'a> {
    op: &'static str,
    memory: &'a MemoryTable,
    taken: RefCell<Vec<(AddrRange, bool)>>,
}

impl<'a> Operands<'a> {
    /// For an operation named `op`. The table is borrowed for as long as any slice lives, so nothing else can hand out, overwrite, or
    /// free its memory meanwhile.
    pub fn new(op: &'static str, memory: &'a mut MemoryTable) -> Self {
        Self { op, memory, taken: RefCell::new(Vec::new()) }
    }

    /// An error that names the operation.
    pub fn refuse(&self, reason: String) -> BackendError {
        BackendError::BadOperand { op: self.op, reason }
    }

    /// Notes a range as read or written. The caller has found it to be live.
    fn take(&self, range: AddrRange, written: bool) -> Result<()> {
        let mut taken = self.taken.borrow_mut();
        if taken.iter().any(|(other, other_written)| (written || *other_written) && other.overlaps(range)) {
            return Err(BackendError::Overlap { what: self.op, addr: range.start });
        }
        taken.push((range, written));
        Ok(())
    }

    fn check_alignment<T: Plain>(&self, pointer: *const u8) -> Result<()> {
        if pointer.cast::<T>().is_aligned() {
            return Ok(());
        }
        Err(self.refuse(format!("an operand is not aligned to {} bytes", align_of::<T>())))
    }

    /// `n` elements to read.
    pub fn read<T: Plain>(&self, addr: Addr, n: usize) -> Result<&'a [T]> {
        let range = range_of::<T>(addr, n);
        let pointer = self.memory.readable(self.op, range)?;
        self.check_alignment::<T>(pointer)?;
        self.take(range, false)?;
        // SAFETY: the table checked that the range is live, and its exclusive borrow for 'a keeps it so and lets no one else write;
        // alignment was checked; all memory is initialised and any bytes are a `T`; no written range of this operation overlaps.
        Ok(unsafe { std::slice::from_raw_parts(pointer.cast(), n) })
    }

    /// `n` elements to write, or to change in place.
    #[allow(clippy::mut_from_ref, reason = "ranges handed out are disjoint, as `take` checks")]
    pub fn write<T: Plain>(&self, addr: Addr, n: usize) -> Result<&'a mut [T]> {
        let range = range_of::<T>(addr, n);
        let pointer = self.memory.writable(self.op, range)?;
        self.check_alignment::<T>(pointer)?;
        self.take(range, true)?;
        // SAFETY: as in `read`, and no other range of this operation overlaps, so the slice is the only access.
        Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast(), n) })
    }

    /// Positions of rows inside a cache of `n_ctx` rows, as [`Operands::ascending_positions`], with the row that holds position 0.
    pub fn positions(&self, addr: Addr, first_row: Addr, n_rows: usize, n_ctx: u32) -> Result<(&'a [i32], usize)> {
        let first_row = self.read::<i32>(first_row, 1)?[0];
        let Ok(first) = u32::try_from(first_row) else { return Err(self.refuse(format!("row {first_row} is no row"))) };
        let positions = self.ascending_positions(addr, n_rows)?;
        match positions.iter().find(|position| first.saturating_add(position.unsigned_abs()) >= n_ctx) {
            Some(outside) => Err(self.refuse(format!("position {outside} from row {first} on is outside a context of {n_ctx} tokens"))),
            None => Ok((positions, first as usize)),
        }
    }

    /// Positions of rows: ascending from 0 on at the earliest. Poisoned memory fails here.
    pub fn ascending_positions(&self, addr: Addr, n_rows: usize) -> Result<&'a [i32]> {
        let positions = self.read::<i32>(addr, n_rows)?;
        if let Some(negative) = positions.iter().find(|position| **position < 0) {
            return Err(self.refuse(format!("position {negative} is no position")));
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

    /// Bytes to write that kernels cut into f32 first: they start where an f32 may.
    pub fn scratch(&self, addr: Addr, bytes: u64) -> Result<&'a mut [u8]> {
        let range = AddrRange { start: addr, bytes: Bytes(bytes) };
        self.check_alignment::<f32>(self.memory.writable(self.op, range)?)?;
        self.write(addr, range.bytes.as_usize())
    }

    /// Room for unpacked weights beside rows of `format`. The kernels have memory of their own for them, but the room must be there, and
    /// nothing else in it.
    pub fn unpacked(&self, format: ActivationFormat, room: AddrRange) -> Result<()> {
        if format == ActivationFormat::F16 {
            self.write::<u8>(room.start, room.bytes.as_usize())?;
        }
        Ok(())
    }

    /// Which side of the link a range lies on.
    pub fn place(&self, range: AddrRange) -> Result<Place> {
        self.memory.place(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> (MemoryTable, Addr) {
        let mut table = MemoryTable::new(Bytes(4096));
        let range = table.allocate_device(Bytes(256), "a test", false).expect("room");
        (table, range.start)
    }

    #[test]
    fn inputs_may_overlap_and_outputs_may_not() {
        let (mut table, start) = table();
        let operands = Operands::new("a test", &mut table);
        let at = |bytes: u64| start.offset(Bytes(bytes));
        assert!(operands.read::<f32>(at(0), 8).is_ok());
        assert!(operands.read::<u8>(at(16), 32).is_ok());
        for (offset, n) in [(0, 1), (28, 1), (44, 4), (0, 64)] {
            let refused = operands.write::<f32>(at(offset), n).err();
            assert_eq!(refused, Some(BackendError::Overlap { what: "a test", addr: at(offset) }));
        }
        assert!(operands.write::<f32>(at(48), 4).is_ok(), "right behind the last input");
        assert!(operands.read::<f32>(at(60), 1).is_err(), "an output cannot be read");
        assert!(operands.write::<f32>(at(48), 4).is_err(), "nor handed out twice");
        assert!(operands.read::<f32>(at(64), 1).is_ok());
    }

    #[test]
    fn a_count_that_overflows_is_a_bad_address() {
        let (mut table, start) = table();
        let operands = Operands::new("a test", &mut table);
        for n in [65, usize::MAX / 4 + 2, usize::MAX] {
            assert!(matches!(operands.read::<f32>(start, n), Err(BackendError::BadAddress { .. })), "{n} numbers");
        }
    }

    #[test]
    fn numbers_and_scratch_start_at_multiples_of_four() {
        let (mut table, start) = table();
        let operands = Operands::new("a test", &mut table);
        let odd = start.offset(Bytes(2));
        assert!(matches!(operands.read::<f32>(odd, 1), Err(BackendError::BadOperand { .. })));
        assert!(matches!(operands.scratch(odd, 7), Err(BackendError::BadOperand { .. })));
        assert_eq!(operands.read::<u8>(odd, 3), Ok(&[super::super::POISON; 3][..]));
        assert_eq!(operands.scratch(start.offset(Bytes(8)), 7).map(|scratch| scratch.len()), Ok(7));
    }

    #[test]
    fn positions_ascend_inside_the_context() {
        let (mut table, start) = table();
        table.fill(AddrRange { start, bytes: Bytes(4) }, 0).expect("inside");
        table.fill(AddrRange { start: start.offset(Bytes(8)), bytes: Bytes(4) }, 0).expect("inside");
        let operands = Operands::new("a test", &mut table);
        let first_row = start.offset(Bytes(8));
        assert_eq!(operands.positions(start, first_row, 1, 1), Ok((&[0][..], 0)));
        assert!(matches!(operands.positions(start, first_row, 2, 8), Err(BackendError::BadOperand { .. })), "the second is poison");
        let poison = start.offset(Bytes(12));
        assert!(matches!(operands.positions(start, poison, 1, 8), Err(BackendError::BadOperand { .. })), "no row");
        assert!(matches!(operands.indices(start, 2, u32::MAX), Err(BackendError::BadOperand { .. })), "and no expert");
    }
}
