//! Documents that several processes read and change: a file of the data directory, or a key of a
//! Secret that all servers of a cluster share.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, watch};

use super::data_dir::{FileStamp, SharedFile};

/// A JSON document that is cached in memory and that other processes may change.
#[derive(Debug)]
pub(crate) enum SharedDocument {
    /// A file that commands change while no server runs.
    File(SharedFile),
    /// A key of a Secret that other servers change.
    Cluster(ClusterDocument),
}

/// A value that distinguishes one state of a document from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DocumentVersion {
    File(FileStamp),
    /// Sequence number of an observation in this process.
    Observed(u64),
}

impl SharedDocument {
    /// Returns the document's name for error messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::File(file) => file.path().display().to_string(),
            Self::Cluster(doc) => doc.name().to_owned(),
        }
    }

    /// Returns the current version, or `None` if there is no document.
    pub(crate) fn version(&self) -> Option<DocumentVersion> {
        match self {
            Self::File(file) => file.stamp().map(DocumentVersion::File),
            Self::Cluster(doc) => doc.version().map(DocumentVersion::Observed),
        }
    }

    /// Returns the parsed content, or `None` if there is no document.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        match self {
            Self::File(file) => file.read(),
            Self::Cluster(doc) => doc.read(),
        }
    }

    /// Replaces the content with the result of `merge`, which receives the current content. On a
    /// conflict `merge` is called again with the content of the other writer. Returns the new
    /// version. Blocks the thread: for a disk write, or for at most 10 s in a cluster.
    pub(crate) fn change<T: DeserializeOwned, U: Serialize>(
        &self,
        mut merge: impl FnMut(Option<T>) -> io::Result<U>,
    ) -> io::Result<Option<DocumentVersion>> {
        match self {
            Self::File(file) => {
                let _changing = file.lock()?;
                let theirs = file.read()?;
                file.write(&merge(theirs)?)?;
                Ok(file.stamp().map(DocumentVersion::File))
            }
            Self::Cluster(doc) => doc
                .change(merge)
                .map(|sequence| Some(DocumentVersion::Observed(sequence))),
        }
    }
}

/// Maximum duration of a change, including all retries after conflicts.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(crate) struct ClusterDocument {
    name: String,
    key: &'static str,
    observed: watch::Receiver<ObservedContent>,
    swaps: mpsc::Sender<CompareAndSwap>,
}

/// The last content received from the cluster.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObservedContent {
    /// Number of observations whose content differed from the previous one.
    pub(crate) sequence: u64,
    pub(crate) content: Option<Arc<[u8]>>,
}

/// A request to replace the content.
#[derive(Debug)]
pub(crate) struct CompareAndSwap {
    pub(crate) key: &'static str,
    /// The content is replaced only if it still equals this.
    pub(crate) expected: Option<Arc<[u8]>>,
    pub(crate) content: Arc<[u8]>,
    pub(crate) done: SyncSender<CasOutcome>,
}

/// The outcome of a [`CompareAndSwap`].
#[derive(Debug)]
pub(crate) enum CasOutcome {
    /// The content was written, and the observation with this number contains it.
    Written(u64),
    /// Another server changed the content to this.
    Conflict(Option<Arc<[u8]>>),
    /// The write failed, or its outcome is unknown.
    Failed(String),
}

impl ClusterDocument {
    /// Creates a document for this key. `name` is used in error messages.
    pub(crate) fn new(
        name: String,
        key: &'static str,
        observed: watch::Receiver<ObservedContent>,
        swaps: mpsc::Sender<CompareAndSwap>,
    ) -> Self {
        Self {
            name,
            key,
            observed,
            swaps,
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn version(&self) -> Option<u64> {
        let observed = self.observed.borrow();
        observed.content.as_ref().map(|_| observed.sequence)
    }

    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let content = self.observed.borrow().content.clone();
        self.parse(content.as_deref())
    }

    /// Changes the document; see [`crate::store::document::SharedDocument::change`].
    pub(crate) fn change<T: DeserializeOwned, U: Serialize>(
        &self,
        mut merge: impl FnMut(Option<T>) -> io::Result<U>,
    ) -> io::Result<u64> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        let mut theirs = self.observed.borrow().content.clone();
        loop {
            let merged = merge(self.parse(theirs.as_deref())?)?;
            let content = serde_json::to_vec(&merged).map_err(io::Error::other)?;
            match self.swap(theirs, content.into(), deadline)? {
                CasOutcome::Written(sequence) => return Ok(sequence),
                CasOutcome::Conflict(now) => theirs = now,
                CasOutcome::Failed(problem) => return Err(self.problem(&problem)),
            }
        }
    }

    fn swap(
        &self,
        expected: Option<Arc<[u8]>>,
        content: Arc<[u8]>,
        deadline: Instant,
    ) -> io::Result<CasOutcome> {
        let (done, answer) = sync_channel(1);
        let swap = CompareAndSwap {
            key: self.key,
            expected,
            content,
            done,
        };
        self.swaps.try_send(swap).map_err(|_full_or_over| {
            self.problem("too many changes are queued; try again later")
        })?;
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = block_current_thread(|| answer.recv_timeout(left));
        waited.map_err(|error| match error {
            RecvTimeoutError::Timeout => self.problem("the API server did not answer in time"),
            RecvTimeoutError::Disconnected => self.problem("the server is stopping"),
        })
    }

    fn parse<T: DeserializeOwned>(&self, content: Option<&[u8]>) -> io::Result<Option<T>> {
        let Some(content) = content else {
            return Ok(None);
        };
        serde_json::from_slice(content)
            .map(Some)
            .map_err(|error| self.problem(&format!("is damaged: {error}")))
    }

    fn problem(&self, problem: &str) -> io::Error {
        io::Error::other(format!("{}: {problem}", self.name))
    }
}

/// Blocks the current thread. A runtime thread first hands its other tasks to another thread,
/// because the writer may be among them.
fn block_current_thread<T>(wait: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    match flavor {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        Ok(_) | Err(_) => wait(),
    }
}
