//! The roots of --ca-file, which are followed: a mounted ConfigMap changes with the servers' CA.

use std::future;

use tokio::sync::watch;

use super::TrustRoots;

/// The roots of --ca-file as the file has them now, or none without the flag. Clones follow the
/// same file.
#[derive(Debug, Clone)]
pub(crate) struct CaFile(watch::Receiver<Option<TrustRoots>>);

impl CaFile {
    /// Creates a file with these roots, and the sender of its changes. Without the sender the roots
    /// stay.
    pub(crate) fn channel(first: Option<TrustRoots>) -> (watch::Sender<Option<TrustRoots>>, Self) {
        let (sender, roots) = watch::channel(first);
        (sender, Self(roots))
    }

    pub(crate) fn roots(&self) -> Option<TrustRoots> {
        self.0.borrow().clone()
    }

    /// Returns a clone that waits for changes from now on.
    pub(crate) fn with_later_changes(&self) -> Self {
        let mut file = self.clone();
        file.0.mark_unchanged();
        file
    }

    /// Waits until the file has changed since the last call. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            future::pending().await
        }
    }
}
