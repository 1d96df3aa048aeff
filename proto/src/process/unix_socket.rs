//! Unix sockets that accept connections. A socket is created under a temporary name and renamed
//! when it is ready, so that it never has another mode or owner. A socket left by a dead process is
//! replaced; one that answers is not.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

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
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    remove_stale_socket(path).map_err(named)?;
    bind_and_rename(path, access).map_err(named)
}

fn remove_stale_socket(path: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if !metadata.file_type().is_socket() {
        let problem = "is not a socket; remove it";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, problem));
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
    temp_path.push(format!(".{}.new", std::process::id()));
    let temp_path = PathBuf::from(temp_path);
    let _nothing_left_over = fs::remove_file(&temp_path);
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
    inode: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.path);
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.inode) {
            let _best_effort = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: SocketPermissions = SocketPermissions {
        mode: 0o600,
        owner: None,
    };

    fn scratch(name: &str) -> PathBuf {
        let folder =
            std::env::temp_dir().join(format!("culvert-unix-{}-{name}", std::process::id()));
        let _absent = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        folder
    }

    #[tokio::test]
    async fn only_a_socket_that_nobody_answers_gives_way() {
        let folder = scratch("stale");
        let path = folder.join("listener.sock");
        let (listener, file) = bind(&path, PRIVATE).unwrap();
        let mode = fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, 0o600);
        let taken = bind(&path, PRIVATE).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse, "{taken}");
        drop(listener);
        // After a crash the file exists and no process listens.
        let wide = SocketPermissions {
            mode: 0o660,
            ..PRIVATE
        };
        let (_listener, second) = bind(&path, wide).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        drop(file);
        assert!(path.exists(), "the newer socket stays");
        drop(second);
        assert!(!path.exists());
        fs::write(&path, "precious").unwrap();
        let refused = bind(&path, PRIVATE).unwrap_err().to_string();
        assert!(refused.contains("not a socket"), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing is left");
        fs::remove_dir_all(folder).unwrap();
    }
}
