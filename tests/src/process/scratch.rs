//! Resources of a single test: a directory for its files, and addresses.

use std::fs::Permissions;
use std::io;
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a loopback address of this process, in 127.64.0.0/10. A server that must return to its
/// port listens here, so that connections from 127.0.0.1 in the meantime do not take the port.
pub fn own_loopback() -> Ipv4Addr {
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 | (high & 63), middle, low)
}

/// Returns another loopback address at each call, in 127.128.0.0/9. A server listens there on fixed
/// ports below those that the system assigns, so it can return to them after a restart.
pub fn next_loopback() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes that run at the same time seldom have IDs with the same low 11 bits. The benchmark
    // starts more than a hundred servers.
    let process = (std::process::id() & 0x7ff) << 12;
    let number = NEXT.fetch_add(1, Ordering::Relaxed) & 0xfff;
    Ipv4Addr::from(0x7f80_0000 | process | number)
}

/// Returns what the store of a server's data directory has, as text in which values are whole. The
/// server may use it meanwhile.
///
/// # Errors
/// Returns an error if there is no store.
pub fn stored_text(data_dir: &Path) -> io::Result<String> {
    let bytes = std::fs::read(data_dir.join("state.redb"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A new directory that is removed with all its content on drop.
///
/// The path is short, so that Unix sockets fit.
#[derive(Debug)]
pub struct ScratchDir {
    path: PathBuf,
}

impl ScratchDir {
    /// Creates the directory with access for this user only.
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
        let mut builder = std::fs::DirBuilder::new();
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path)?;
        Ok(Self { path })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a file into the directory and returns its path.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> io::Result<PathBuf> {
        let file = self.path.join(name);
        std::fs::write(&file, content)?;
        // Independent of the umask: the binaries refuse files that others may write.
        std::fs::set_permissions(&file, Permissions::from_mode(0o644))?;
        Ok(file)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // A directory that cannot be removed stays in the machine's temporary directory.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}
