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

    /// The size of the file in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.as_slice().len() as u64
    }
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
