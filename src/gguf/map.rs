//! Read-only memory maps of model files: the one unsafe step between a file and a byte slice.
#![allow(unsafe_code, reason = "a memory map of a file cannot be made in safe code")]

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

/// A whole file, mapped read-only, or embedded in the program. Clones share the map, which lives as long as any of them.
///
/// The address never changes, so the pages may be registered with a device for as long as a clone is held.
#[derive(Clone)]
pub struct FileMap {
    bytes: Source,
}

#[derive(Clone)]
enum Source {
    Mapped(Arc<Mmap>),
    /// Part of the program itself.
    Embedded(&'static [u8]),
}

impl FileMap {
    /// Maps the file at `path`, which must not be empty.
    ///
    /// # Errors
    /// What the operating system says to opening or mapping it.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is private to this type and only ever lent as `&[u8]`, so this process does not write to it. Another
        // process could change or cut the file under the map; Rust cannot rule that out. Model files are written once and then
        // read, the reader checks every length against the mapped size, which is fixed here, and weights are plain numbers for
        // which any bytes are valid. A file cut short while mapped ends the process with SIGBUS rather than with wrong memory.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { bytes: Source::Mapped(Arc::new(map)) })
    }

    /// A file that is part of the program.
    #[must_use]
    pub(super) const fn embedded(bytes: &'static [u8]) -> Self {
        Self { bytes: Source::Embedded(bytes) }
    }

    /// The bytes of the file.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        match &self.bytes {
            Source::Mapped(map) => map,
            Source::Embedded(bytes) => bytes,
        }
    }

    /// Bytes of the file that lie in RAM now, in whole pages; `None` where the system does not say. Linux says of a file that this user
    /// may not write that all of it does.
    #[must_use]
    pub fn bytes_in_ram(&self) -> Option<u64> {
        match &self.bytes {
            Source::Mapped(map) => bytes_in_ram(map),
            Source::Embedded(bytes) => Some(bytes.len() as u64),
        }
    }

    /// The size of the file in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.as_slice().len() as u64
    }
}

#[cfg(target_os = "linux")]
fn bytes_in_ram(map: &Mmap) -> Option<u64> {
    use std::ffi::{c_int, c_long, c_uchar, c_void};

    /// The number of the page size in the list of what `sysconf` knows.
    const PAGE_SIZE: c_int = 30;
    // SAFETY: the C library of every Linux program has both, with these types.
    unsafe extern "C" {
        fn mincore(start: *mut c_void, length: usize, pages: *mut c_uchar) -> c_int;
        fn sysconf(name: c_int) -> c_long;
    }
    // SAFETY: takes and gives a number.
    let page = usize::try_from(unsafe { sysconf(PAGE_SIZE) }).ok().filter(|page| page.is_power_of_two())?;
    let mut pages = vec![0_u8; map.len().div_ceil(page)];
    // SAFETY: a map begins at a page and is alive; the list has a byte for each of its pages. Nothing of the map is read.
    if unsafe { mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) } != 0 {
        return None;
    }
    let resident = pages.iter().filter(|&&page| page & 1 == 1).count();
    Some((resident * page).min(map.len()) as u64)
}

#[cfg(not(target_os = "linux"))]
fn bytes_in_ram(_map: &Mmap) -> Option<u64> {
    None
}

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for FileMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileMap").field("bytes", &self.bytes()).finish()
    }
}
