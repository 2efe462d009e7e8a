//! Files that appear once they are complete.
//!
//! What is written goes to a temporary file beside the target, which takes the target's name at the end: a reader sees a whole file or
//! none. A pipe or a device is written in place, for it must not be replaced.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The temporary file, which goes away with this value, and the name that it is to have.
pub struct Part {
    temporary: PathBuf,
    name: PathBuf,
}

impl Part {
    /// Gives the file its name; all that was to be written must be.
    ///
    /// # Errors
    /// The system's.
    pub fn take_name(&self) -> io::Result<()> {
        fs::rename(&self.temporary, &self.name)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // Gone already where it has its name; else nobody is left to tell, and the name says that the file is a part.
        let _ = fs::remove_file(&self.temporary);
    }
}

/// Opens what is written: a part beside a file, or beside the one that a link leads to; anything else itself.
///
/// # Errors
/// Where the temporary file cannot be made, or the target is a folder.
pub fn open(target: &Path) -> io::Result<(File, Option<Part>)> {
    match fs::metadata(target) {
        Ok(status) if status.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
        Ok(status) if !status.is_file() => return Ok((File::options().write(true).open(target)?, None)),
        _ => {}
    }
    let name = fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
    let mut part_name = name.file_name().map_or_else(OsString::new, OsString::from);
    part_name.push(format!(".{}.part", std::process::id()));
    let part = Part { temporary: name.with_file_name(part_name), name };
    Ok((File::create(&part.temporary)?, Some(part)))
}
