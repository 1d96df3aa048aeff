//! Documents that several processes read and change: a file of the data directory, or a key of a
//! Secret that all servers of a cluster share.
//!
//! A document is in memory. Its owner (`file_document.rs`, or the task of the Secret) follows what
//! others write and makes the changes, one after the other. So nobody who reads a document waits for
//! a file system or an API server, and who changes it waits for a bounded time.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, watch};
use tunnel_proto::process::disk::{ANSWER_TIMEOUT, FileActivity};

/// A JSON document that other processes may change. Clones refer to the same document.
#[derive(Debug, Clone)]
pub(crate) struct SharedDocument {
    name: String,
    /// What an operator does about damaged content.
    repair: Option<String>,
    observed: watch::Receiver<ObservedContent>,
    owner: DocumentOwner,
}

/// The queue of changes to the owner of a document. A change that finds a full queue is refused.
#[derive(Debug, Clone)]
pub(crate) enum DocumentOwner {
    /// The thread of a file that commands change while no server runs, or while one starts.
    File {
        requests: SyncSender<FileRequest>,
        /// Accesses to the data directory that have not ended.
        activity: FileActivity,
    },
    /// The task of a Secret, with the document's key there.
    Cluster {
        swaps: mpsc::Sender<CompareAndSwap>,
        key: &'static str,
    },
}

/// A request to the thread of a file.
#[derive(Debug)]
pub(crate) enum FileRequest {
    Swap(CompareAndSwap),
    /// Reads the file at once.
    #[cfg(test)]
    Refresh(SyncSender<()>),
}

/// Maximum duration of a change in a cluster, including all retries after conflicts.
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(10);

/// The last content of a document that its owner has observed.
#[derive(Debug, Clone, Default)]
pub(crate) struct ObservedContent {
    /// Number of observations whose content differed from the previous one.
    pub(crate) sequence: u64,
    pub(crate) content: Option<Arc<[u8]>>,
    /// Whether the content is gone. What was observed before stays in use.
    pub(crate) is_lost: bool,
}

/// A request to replace the content.
#[derive(Debug)]
pub(crate) struct CompareAndSwap {
    /// Key of a Secret; empty for a file.
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
    /// Another process changed the content to this.
    Conflict(Option<Arc<[u8]>>),
    /// The write failed, or its outcome is unknown.
    Failed(String),
}

impl SharedDocument {
    /// Creates a document with the content that `owner` observes. `name` is used in error messages.
    pub(crate) fn new(
        name: String,
        observed: watch::Receiver<ObservedContent>,
        owner: DocumentOwner,
    ) -> Self {
        Self {
            name,
            repair: None,
            observed,
            owner,
        }
    }

    /// Returns the document with the command that repairs it, for error messages.
    pub(crate) fn with_repair(self, command: String) -> Self {
        Self {
            repair: Some(command),
            ..self
        }
    }

    /// Returns whether all servers of a cluster share the document.
    pub(crate) fn is_shared(&self) -> bool {
        match self.owner {
            DocumentOwner::Cluster { .. } => true,
            DocumentOwner::File { .. } => false,
        }
    }

    /// Returns whether somebody removed the content that was observed.
    pub(crate) fn is_lost(&self) -> bool {
        self.observed.borrow().is_lost
    }

    /// Returns the document's name for error messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the current content, or `None` if there is no document.
    pub(crate) fn version(&self) -> Option<u64> {
        let observed = self.observed.borrow();
        observed.content.as_ref().map(|_| observed.sequence)
    }

    /// Returns a receiver that is notified when the content has changed.
    pub(crate) fn changed(&self) -> watch::Receiver<ObservedContent> {
        self.observed.clone()
    }

    /// Returns the parsed content, or `None` if there is no document.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let content = self.observed.borrow().content.clone();
        self.parse(content.as_deref())
    }

    /// Replaces the content with the result of `merge`, which receives the current content. On a
    /// conflict `merge` is called again with the content of the other writer. Returns the number of
    /// the new content. Blocks the thread for at most 10 s in a cluster and 5 s for a file; the
    /// change may still be made later.
    pub(crate) fn change<T: DeserializeOwned, U: Serialize>(
        &self,
        mut merge: impl FnMut(Option<T>) -> io::Result<U>,
    ) -> io::Result<u64> {
        let deadline = Instant::now() + self.owner.time_limit();
        let (mut theirs, is_lost) = {
            let observed = self.observed.borrow();
            (observed.content.clone(), observed.is_lost)
        };
        loop {
            let merged = match self.parse(theirs.as_deref()).and_then(&mut merge) {
                // An operator removed damaged content.
                Err(_) if is_lost => merge(None)?,
                merged => merged?,
            };
            let content = self.owner.encode(&merged)?;
            match self.swap(theirs, content, deadline)? {
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
            key: self.owner.key(),
            expected,
            content,
            done,
        };
        self.owner
            .send(swap)
            .map_err(|problem| self.problem(problem))?;
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = block_current_thread(|| answer.recv_timeout(left));
        waited.map_err(|error| match error {
            RecvTimeoutError::Timeout => self.problem(self.owner.silence()),
            RecvTimeoutError::Disconnected => self.problem("the server is stopping"),
        })
    }

    /// Reads the file at once, and waits until that is done.
    #[cfg(test)]
    pub(crate) fn refresh(&self) {
        if let DocumentOwner::File { requests, .. } = &self.owner {
            let (done, answer) = sync_channel(1);
            requests.send(FileRequest::Refresh(done)).unwrap();
            answer.recv().unwrap();
        }
    }

    fn parse<T: DeserializeOwned>(&self, content: Option<&[u8]>) -> io::Result<Option<T>> {
        let Some(content) = content else {
            return Ok(None);
        };
        let parsed = serde_json::from_slice(content).map(Some);
        parsed.map_err(|error| self.damaged(&error.to_string()))
    }

    /// Returns the error of damaged content, with the command that repairs it.
    pub(crate) fn damaged(&self, problem: &str) -> io::Error {
        let repair = self.repair.iter().map(|command| format!("; {command}"));
        let repair: String = repair.collect();
        let text = format!("{} is damaged: {problem}{repair}", self.name);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }

    fn problem(&self, problem: &str) -> io::Error {
        io::Error::other(format!("{}: {problem}", self.name))
    }
}

impl DocumentOwner {
    fn time_limit(&self) -> Duration {
        match self {
            Self::File { .. } => ANSWER_TIMEOUT,
            Self::Cluster { .. } => CLUSTER_TIMEOUT,
        }
    }

    fn key(&self) -> &'static str {
        match self {
            Self::File { .. } => "",
            Self::Cluster { key, .. } => key,
        }
    }

    /// Returns the content of a document: one line in a Secret, whose size is limited, and text for
    /// readers in a file.
    fn encode(&self, content: &impl Serialize) -> io::Result<Arc<[u8]>> {
        let encoded = match self {
            Self::File { .. } => serde_json::to_vec_pretty(content).map(|mut text| {
                text.push(b'\n');
                text
            }),
            Self::Cluster { .. } => serde_json::to_vec(content),
        };
        encoded.map(Arc::from).map_err(io::Error::other)
    }

    /// Hands a change to the owner. Does not block.
    fn send(&self, swap: CompareAndSwap) -> Result<(), &'static str> {
        let is_sent = match self {
            Self::File { requests, activity } => {
                // Callers do not wait one after the other while the first one waits.
                if activity.is_blocked() {
                    return Err(self.silence());
                }
                requests.try_send(FileRequest::Swap(swap)).is_ok()
            }
            Self::Cluster { swaps, .. } => swaps.try_send(swap).is_ok(),
        };
        is_sent
            .then_some(())
            .ok_or("too many changes are queued; try again later")
    }

    /// Returns the error of a change without an answer in time.
    fn silence(&self) -> &'static str {
        match self {
            Self::File { .. } => "the file system does not answer",
            Self::Cluster { .. } => "the API server did not answer in time",
        }
    }
}

/// Blocks the current thread. A runtime thread first hands its other tasks to another thread,
/// because the writer may be among them.
pub(crate) fn block_current_thread<T>(wait: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    match flavor {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        Ok(_) | Err(_) => wait(),
    }
}
