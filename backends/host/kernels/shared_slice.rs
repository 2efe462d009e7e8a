//! One mutable slice written by several threads at disjoint places.

use std::marker::PhantomData;

/// A mutable slice that tasks of one parallel loop share, each writing elements that no other touches.
#[derive(Clone, Copy)]
pub struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: the value is a pointer with a length; every access goes through `part`, whose caller promises disjointness, and
// `T: Send` lets the elements be written from another thread.
unsafe impl<T: Send> Send for SharedSlice<'_, T> {}
// SAFETY: as for `Send`; sharing the value only shares the right to call the unsafe `part`.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    /// Takes the slice for the length of a parallel loop.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// Elements in the whole slice.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True where the slice has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The `count` elements from `offset` on.
    ///
    /// # Panics
    /// Where the range leaves the slice.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps it may be taken or used.
    #[must_use]
    #[allow(clippy::mut_from_ref, reason = "disjointness is the caller's promise, see Safety")]
    pub unsafe fn part(&self, offset: usize, count: usize) -> &'a mut [T] {
        assert!(offset <= self.len && count <= self.len - offset, "part {offset}+{count} of {} elements", self.len);
        // SAFETY: the range lies in the slice that `new` borrowed for 'a, and the caller keeps parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), count) }
    }
}
