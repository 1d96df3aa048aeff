//! The data directory: the path of each file of the server, the locks for changing them, and the
//! QUIC keys that live as long as the directory.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::warn;
use tunnel_process::disk::FileActivity;
use tunnel_process::files;
use tunnel_proto::transport::quic::QuicKeys;

use crate::state_store::{OnDamage, StateStore, WeakStore};
#[cfg(any(test, feature = "test-util"))]
pub use crate::testing;
pub use crate::text::{name_text, rfc3339, time_text, time_text_option, whole_seconds};

/// The data directory of a server. Clones refer to the same directory.
#[derive(Debug, Clone)]
pub struct DataDir {
    path: Arc<Path>,
    activity: FileActivity,
    /// The store, while somebody uses it.
    store: Arc<Mutex<WeakStore>>,
}

/// A lock in a data directory, released on drop.
#[derive(Debug)]
pub struct DirLock {
    _file: Option<File>,
}

impl DirLock {
    /// Returns a lock without a file, if that cannot be created because nothing can be written: then
    /// there is nothing to lock, and the store has a lock of its own.
    fn needless_after(error: io::Error) -> io::Result<Self> {
        if files::is_unwritable(&error) {
            Ok(Self { _file: None })
        } else {
            Err(error)
        }
    }
}

impl DataDir {
    /// Opens the directory and creates it with mode 0700 if it does not exist. An existing
    /// directory keeps its mode, because each file is private by its own mode.
    ///
    /// # Errors
    /// Returns an error with the path if the directory cannot be created or is not a directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        files::make_private_dir(path).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!("data directory {}: {error}", path.display()),
            )
        })?;
        Self::open_existing(path)
    }

    /// Opens an existing directory, for commands that only read.
    ///
    /// # Errors
    /// Returns an error with the path if the directory does not exist.
    pub fn open_existing(path: &Path) -> io::Result<Self> {
        let problem = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Ok(Self {
                    path: path.into(),
                    activity: FileActivity::default(),
                    store: Arc::default(),
                });
            }
            Ok(_other) => io::Error::from(io::ErrorKind::NotADirectory),
            Err(error) => error,
        };
        Err(io::Error::new(
            problem.kind(),
            format!(
                "data directory {}: {problem}; give the server's own with --data-dir",
                path.display()
            ),
        ))
    }

    /// Checks that nobody else can give this server a key or a state: the directory and its files
    /// belong to this user or to root, and others cannot write the directory. A mounted volume, as
    /// that of a pod, may have other modes and another owner, since the host decides who sees it.
    ///
    /// # Errors
    /// Returns an error that says how to correct it.
    pub fn check_access(&self) -> io::Result<()> {
        files::check_private_dir(&self.path)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the accesses to shared files that have not ended.
    pub fn activity(&self) -> &FileActivity {
        &self.activity
    }

    /// Returns the store of this directory, which is opened by the first call and closed when nobody
    /// uses it. `on_damage` counts when it is opened. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be opened.
    pub fn store(&self, on_damage: OnDamage) -> io::Result<StateStore> {
        let mut opened = self.store.lock();
        if let Some(store) = opened.upgrade() {
            return Ok(store);
        }
        let store = StateStore::open(&self.state(), &self.activity, on_damage)?;
        *opened = store.downgrade();
        Ok(store)
    }

    /// Returns the path of the store.
    pub fn state(&self) -> PathBuf {
        self.path.join("state.redb")
    }

    /// Returns the path of the local CA's certificate, PEM.
    pub fn ca_certificate(&self) -> PathBuf {
        self.path.join("ca.crt")
    }

    /// Returns the path of the local CA's private key, PEM.
    pub fn ca_key(&self) -> PathBuf {
        self.path.join("ca.key")
    }

    /// Returns the path of the rotation of the local CA that is in progress, with the keys of both
    /// CAs.
    pub fn ca_rotation(&self) -> PathBuf {
        self.path.join("ca-rotation.json")
    }

    /// Returns the path of the certificate of the CA of callers, PEM.
    pub fn client_ca_certificate(&self) -> PathBuf {
        self.path.join("client-ca.crt")
    }

    /// Returns the path of the private key of the CA of callers, PEM.
    pub fn client_ca_key(&self) -> PathBuf {
        self.path.join("client-ca.key")
    }

    /// Returns the path of the last observed CA of kubelets' client certificates.
    pub fn kubelet_client_ca(&self) -> PathBuf {
        self.path.join("kubelet-client-ca.crt")
    }

    /// Returns the path of the last observed CA and documents of the cluster.
    pub fn authority(&self) -> PathBuf {
        self.path.join("authority.json")
    }

    /// Returns whether a server in a cluster uses this directory, so that the CA, tokens and
    /// revocations are in the cluster. A directory that contains a CA key belongs to a standalone
    /// server or was created by one.
    pub fn is_cluster_managed(&self) -> bool {
        self.authority().exists() && !self.ca_key().exists()
    }

    /// Returns the path of the private key of the client certificate for kubelets that the cluster
    /// signs, PEM.
    pub fn kubelet_client_key(&self) -> PathBuf {
        self.path.join("kubelet-client.key")
    }

    /// Returns the path of the client certificate for kubelets that the cluster signs, PEM.
    pub fn kubelet_client_certificate(&self) -> PathBuf {
        self.path.join("kubelet-client.crt")
    }

    /// Returns the path of QUIC's reset and connection-id keys.
    pub fn quic_keys_file(&self) -> PathBuf {
        self.path.join("quic.keys")
    }

    /// Returns the path of the running server's socket for the command-line verbs.
    pub fn admin_socket(&self) -> PathBuf {
        self.path.join("admin.sock")
    }

    /// Returns the path of the addresses that agents should dial.
    pub fn advertise(&self) -> PathBuf {
        self.path.join("advertise.json")
    }

    /// Takes the lock of the *running server*. Returns `None` if another server holds it.
    ///
    /// # Errors
    /// Returns an error if the lock file cannot be opened.
    pub fn lock(&self) -> io::Result<Option<DirLock>> {
        match files::try_lock(&self.path.join("lock")) {
            Ok(locked) => Ok(locked.map(|file| DirLock { _file: Some(file) })),
            Err(error) => DirLock::needless_after(error).map(Some),
        }
    }

    /// Waits for the lock on the files that the server and the commands share. Hold it for one
    /// change only. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error if the lock file cannot be opened.
    pub fn lock_files(&self) -> io::Result<DirLock> {
        let path = self.path.join("files.lock");
        let _waiting = self.activity.begin();
        match files::open_lock(&path) {
            Ok(file) => {
                let locked = file.lock().map(|()| DirLock { _file: Some(file) });
                locked.map_err(|error| {
                    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
                })
            }
            Err(error) => DirLock::needless_after(error),
        }
    }

    /// Returns the keys by which QUIC recognizes its own connections after a restart. They are
    /// generated once, or at each start where nothing can be written.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or created, or is damaged.
    pub fn quic_keys(&self) -> io::Result<QuicKeys> {
        let path = self.quic_keys_file();
        let _changing = self.lock_files()?;
        let stored = if let Some(stored) = files::read_secret(&path)? {
            stored
        } else {
            let fresh = random::<{ QuicKeys::LEN }>()?;
            replace_or_warn(&path, &fresh)?;
            fresh.to_vec().into()
        };
        let bytes = <[u8; QuicKeys::LEN]>::try_from(stored.as_slice())
            .map_err(|_wrong_length| damaged(&path, "has the wrong length; remove it"))?;
        Ok(QuicKeys::from_bytes(&bytes))
    }

    /// Returns the addresses that agents should dial, as saved by the last `run`. The list is empty
    /// if none were saved.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is damaged.
    pub fn advertised(&self) -> io::Result<Vec<String>> {
        let path = self.advertise();
        match files::read(&path)? {
            None => Ok(Vec::new()),
            Some(content) => serde_json::from_slice(&content)
                .map_err(|error| damaged(&path, format_args!("is damaged: {error}"))),
        }
    }

    /// Saves the addresses for `token create` without a running server.
    ///
    /// # Errors
    /// As `replace_or_warn`.
    pub fn set_advertised(&self, addresses: &[String]) -> io::Result<()> {
        if self.advertised().is_ok_and(|stored| stored == addresses) {
            return Ok(());
        }
        let content = serde_json::to_vec(addresses).map_err(io::Error::other)?;
        replace_or_warn(&self.advertise(), &content)
    }
}

/// Replaces a file without which a server runs. Where nothing can be written, that is a line in the
/// log, and the next start makes the content again.
///
/// # Errors
/// Returns an error if the file cannot be replaced for another reason.
pub fn replace_or_warn(path: &Path, content: &[u8]) -> io::Result<()> {
    match files::replace(path, content) {
        Err(error) if files::is_unwritable(&error) => {
            warn!(%error, "cannot save a file; the next start makes its content again");
            Ok(())
        }
        replaced => replaced,
    }
}

/// Replaces a file unless it has this content.
///
/// # Errors
/// Returns an error if the file cannot be read or replaced.
pub fn replace_changed(path: &Path, content: &[u8]) -> io::Result<()> {
    if files::read(path)?.as_deref() == Some(content) {
        return Ok(());
    }
    files::replace(path, content)
}

/// Returns random bytes for keys, ids and secrets.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    aws_lc_rs::rand::fill(&mut bytes)
        .map_err(|_unspecified| io::Error::other("the system gives no random bytes"))?;
    Ok(bytes)
}

fn damaged(path: &Path, why: impl std::fmt::Display) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{} {why}", path.display()),
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn directory_and_keys_are_private_and_keys_stay() {
        let scratch = Scratch::new();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(scratch.0.path()), 0o700);
        scratch.0.quic_keys().unwrap();
        let first = fs::read(scratch.0.quic_keys_file()).unwrap();
        assert_eq!(first.len(), QuicKeys::LEN);
        assert_eq!(mode(&scratch.0.quic_keys_file()), 0o600);
        scratch.0.quic_keys().unwrap();
        assert_eq!(fs::read(scratch.0.quic_keys_file()).unwrap(), first);
        files::replace(&scratch.0.quic_keys_file(), b"short").unwrap();
        let error = scratch.0.quic_keys().unwrap_err().to_string();
        assert!(error.contains("quic.keys"), "{error}");
    }

    #[test]
    fn one_server_holds_the_directory() {
        let scratch = Scratch::new();
        let held = scratch.0.lock().unwrap();
        assert!(held.is_some());
        assert!(scratch.0.lock().unwrap().is_none());
        let _a_change_is_still_possible = scratch.0.lock_files().unwrap();
    }

    #[test]
    fn advertised_addresses_are_kept() {
        let scratch = Scratch::new();
        assert!(scratch.0.advertised().unwrap().is_empty());
        let addresses = ["tunnel.example:10262".to_owned()];
        scratch.0.set_advertised(&addresses).unwrap();
        assert_eq!(scratch.0.advertised().unwrap(), addresses);
    }

    #[test]
    fn missing_directory_is_named() {
        let error = DataDir::open_existing(Path::new("/nonexistent/culvert"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("/nonexistent/culvert"), "{error}");
        let scratch = Scratch::new();
        let file = scratch.0.path().join("file");
        fs::write(&file, "").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(DataDir::open(&file).is_err());
    }
}
