//! A directory for the files of one test.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// A new directory that is removed with all its content on drop. The path is short, so that Unix
/// sockets fit.
#[derive(Debug)]
pub struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// Creates the directory with access for this user only.
    ///
    /// # Errors
    /// The system's error.
    pub fn new() -> io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let name = format!(
            "culvert-{:x}-{:x}-{number}",
            std::process::id(),
            since_epoch.subsec_nanos()
        );
        let path = std::env::temp_dir().join(name);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file into the directory and returns its path.
    ///
    /// # Errors
    /// The system's error.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> io::Result<PathBuf> {
        let file = self.path.join(name);
        fs::write(&file, content)?;
        // Independent of the umask: the binaries refuse files that others may write.
        fs::set_permissions(&file, Permissions::from_mode(0o644))?;
        Ok(file)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // A directory that cannot be removed stays in the machine's temporary directory.
        let _best_effort = fs::remove_dir_all(&self.path);
    }
}
