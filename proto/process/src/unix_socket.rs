//! Unix sockets that accept connections. A socket is created under a temporary name and renamed
//! when it is ready, so that it never has another mode or owner, and that its path leads to a socket
//! at any time. [`bind`] replaces a socket left by a dead process, and [`replace`] also one that
//! answers.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tracing::debug;

use crate::files;
use crate::timers::sleep_coalesced;

/// The mode and owner of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketPermissions {
    /// Mode of the socket file.
    pub mode: u32,
    /// Owner and group, if they differ from the process's own.
    pub owner: Option<(u32, Option<u32>)>,
}

/// Binds a socket. Must be called within a runtime.
///
/// # Errors
/// Returns an error with the path if something other than a socket exists at the path, if another
/// process answers there, or if the operating system refuses.
pub fn bind(path: &Path, access: SocketPermissions) -> io::Result<(UnixListener, SocketFile)> {
    let named = |error: io::Error| files::with_path(path, &error);
    check_unused(path).map_err(named)?;
    bind_and_rename(path, access).map_err(named)
}

/// Binds a socket like [`bind`], as soon as that is possible: where nothing can be written, or another
/// process answers, it tries again every 5 s. Cancel-safe.
pub async fn bind_when_possible(
    path: &Path,
    access: SocketPermissions,
) -> (UnixListener, SocketFile) {
    loop {
        let path = path.to_owned();
        // A disk that hangs would block the runtime's threads.
        let bound = tokio::task::spawn_blocking(move || bind(&path, access)).await;
        match bound {
            Ok(Ok(bound)) => return bound,
            Ok(Err(error)) => debug!(%error, "cannot create a socket; trying again"),
            Err(panic) => debug!(error = %panic, "cannot create a socket; trying again"),
        }
        sleep_coalesced(BIND_PAUSE).await;
    }
}

/// Returns whether the process at the other end is of this user or of root. The mode of the socket alone
/// does not say so: a socket has that of the umask for a moment, and somebody may change it.
pub fn is_of_owner(socket: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    let peer = socket.peer_cred();
    peer.is_ok_and(|peer| is_trusted(peer.uid(), own))
}

fn is_trusted(peer: u32, own: u32) -> bool {
    [own, ROOT].contains(&peer)
}

/// Binds a socket like [`bind`], also in place of one that answers. The process that had bound that
/// one gets no further connections.
///
/// # Errors
/// Returns an error with the path if something other than a socket exists at the path, or if the
/// operating system refuses.
pub fn replace(path: &Path, access: SocketPermissions) -> io::Result<(UnixListener, SocketFile)> {
    socket_exists(path)
        .and_then(|_exists| bind_and_rename(path, access))
        .map_err(|error| files::with_path(path, &error))
}

/// Returns whether a socket exists at the path, or an error if something else does.
fn socket_exists(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
        Ok(metadata) if metadata.file_type().is_socket() => Ok(true),
        Ok(_other) => {
            let problem = "is not a socket; remove it";
            Err(io::Error::new(io::ErrorKind::AlreadyExists, problem))
        }
    }
}

fn check_unused(path: &Path) -> io::Result<()> {
    if !socket_exists(path)? {
        return Ok(());
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(error),
        Ok(_answered) => {
            let problem = "another process answers on this socket";
            Err(io::Error::new(io::ErrorKind::AddrInUse, problem))
        }
    }
}

fn bind_and_rename(
    path: &Path,
    access: SocketPermissions,
) -> io::Result<(UnixListener, SocketFile)> {
    let mut temp_path = path.as_os_str().to_owned();
    // Containers that share the folder have equal process ids.
    temp_path.push(format!(".{:08x}.new", rand::random::<u32>()));
    let temp_path = PathBuf::from(temp_path);
    let listener = UnixListener::bind(&temp_path)?;
    let prepared = (|| {
        if let Some((user, group)) = access.owner {
            chown(&temp_path, Some(user), group)?;
        }
        fs::set_permissions(&temp_path, Permissions::from_mode(access.mode))?;
        let metadata = fs::symlink_metadata(&temp_path)?;
        fs::rename(&temp_path, path)?;
        Ok((metadata.dev(), metadata.ino()))
    })();
    match prepared {
        Ok(inode) => Ok((
            listener,
            SocketFile {
                path: path.to_owned(),
                inode,
            },
        )),
        Err(error) => {
            let _best_effort = fs::remove_file(&temp_path);
            Err(error)
        }
    }
}

/// A guard that removes the socket file on drop, unless another socket has taken its name.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    inode: Inode,
}

impl SocketFile {
    /// Returns whether the path still leads to this socket. Cancel-safe.
    pub async fn is_current(&self) -> bool {
        let (path, inode) = (self.path.clone(), self.inode);
        let looked_up = tokio::task::spawn_blocking(move || leads_to(&path, inode));
        looked_up.await.unwrap_or(true)
    }
}

/// Device and number of a file.
type Inode = (u64, u64);

fn leads_to(path: &Path, inode: Inode) -> bool {
    let found = fs::symlink_metadata(path);
    found.is_ok_and(|found| (found.dev(), found.ino()) == inode)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if leads_to(&self.path, self.inode) {
            let _best_effort = fs::remove_file(&self.path);
        }
    }
}

const ROOT: u32 = 0;
/// Access for the own user only.
pub const OWNER_ONLY: SocketPermissions = SocketPermissions {
    mode: 0o600,
    owner: None,
};
/// Pause between two attempts to create a socket.
const BIND_PAUSE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::ScratchDir;

    #[tokio::test]
    async fn only_the_own_user_and_root_are_the_owner() {
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(is_of_owner(&one));
        for (peer, own, expected) in [(7, 7, true), (0, 7, true), (8, 7, false), (7, 0, false)] {
            assert_eq!(is_trusted(peer, own), expected, "{peer} at {own}");
        }
    }

    #[tokio::test]
    async fn path_leads_to_the_socket_that_replaced_another_one_until_that_ends() {
        let scratch = ScratchDir::new().unwrap();
        let folder = scratch.path();
        let path = folder.join("listener.sock");
        let (_first_listener, first) = bind(&path, OWNER_ONLY).unwrap();
        let (second_listener, second) = replace(&path, OWNER_ONLY).unwrap();
        assert!(!first.is_current().await && second.is_current().await);
        let _connected = std::os::unix::net::UnixStream::connect(&path).unwrap();
        let _accepted = second_listener.accept().await.unwrap();
        drop(first);
        assert!(path.exists(), "the newer socket stays");
        drop(second);
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "nothing is left");
        fs::write(&path, "precious").unwrap();
        let refused = replace(&path, OWNER_ONLY).unwrap_err().to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn only_a_socket_that_nobody_answers_gives_way() {
        let scratch = ScratchDir::new().unwrap();
        let folder = scratch.path();
        let path = folder.join("listener.sock");
        let (listener, file) = bind(&path, OWNER_ONLY).unwrap();
        let mode = fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        let taken = bind(&path, OWNER_ONLY).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "{taken}");
        drop(listener);
        // After a crash the file exists and no process listens.
        let wide = SocketPermissions {
            mode: 0o660,
            ..OWNER_ONLY
        };
        let (_listener, second) = bind(&path, wide).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        drop(file);
        assert!(path.exists(), "the newer socket stays");
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        let refused = bind(&path, OWNER_ONLY).unwrap_err().to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(fs::read_dir(folder).unwrap().count(), 1, "nothing is left");
    }
}
