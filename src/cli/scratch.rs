//! Folders for tests that need files; each goes away with its value.

use std::path::{Path, PathBuf};

/// A folder of one test.
pub struct Scratch(PathBuf);

impl Scratch {
    /// `name` must be a test's own: tests run side by side.
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("ebbtide-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the test");
        Self(folder)
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("a file of the test");
        path
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder left behind in the system's temporary place does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
