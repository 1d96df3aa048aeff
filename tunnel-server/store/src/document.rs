//! Documents that several servers read and change: a key of a Secret that all servers of a cluster
//! share.
//!
//! A document is in memory. Its owner, the task of the Secret, follows what others write and makes the
//! changes, one after the other. So nobody who reads a document waits for an API server, and a change
//! takes a bounded time.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, watch};

/// A JSON document that other processes may change. Clones refer to the same document.
#[derive(Debug, Clone)]
pub struct SharedDocument {
    name: String,
    /// What an operator does about damaged content.
    repair: Option<String>,
    observed: watch::Receiver<ObservedContent>,
    owner: DocumentOwner,
}

/// The task of a Secret, with the document's key there. A change that finds a full queue is refused.
#[derive(Debug, Clone)]
pub struct DocumentOwner {
    pub swaps: mpsc::Sender<CompareAndSwap>,
    pub key: &'static str,
}

/// Maximum duration of a change, including all retries after conflicts.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(10);

/// The last content of a document that its owner has observed.
#[derive(Debug, Clone, Default)]
pub struct ObservedContent {
    /// Number of observations whose content differed from the previous one.
    pub sequence: u64,
    pub content: Option<Arc<[u8]>>,
    /// Whether the content is gone. What was observed before stays in use.
    pub is_lost: bool,
}

/// A request to replace the content.
#[derive(Debug)]
pub struct CompareAndSwap {
    pub key: &'static str,
    /// The content is replaced only if it still equals this.
    pub expected: Option<Arc<[u8]>>,
    pub content: Arc<[u8]>,
    pub done: SyncSender<CasOutcome>,
}

#[derive(Debug)]
pub enum CasOutcome {
    /// The content was written, and the observation with this number contains it.
    Written(u64),
    /// Another process changed the content to this.
    Conflict(Option<Arc<[u8]>>),
    /// The write failed, or its outcome is unknown.
    Failed(String),
}

impl SharedDocument {
    /// Creates a document with the content that `owner` observes. `name` is used in error messages.
    pub fn new(
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
    pub fn with_repair(self, command: String) -> Self {
        Self {
            repair: Some(command),
            ..self
        }
    }

    /// Returns whether somebody removed the content that was observed.
    pub fn is_lost(&self) -> bool {
        self.observed.borrow().is_lost
    }

    /// Returns the document's name for error messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the current content, or `None` if there is no document.
    pub fn version(&self) -> Option<u64> {
        let observed = self.observed.borrow();
        observed.content.as_ref().map(|_| observed.sequence)
    }

    /// Returns a receiver that is notified when the content has changed.
    pub fn changed(&self) -> watch::Receiver<ObservedContent> {
        self.observed.clone()
    }

    /// Returns the parsed content, or `None` if there is no document.
    pub fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let content = self.observed.borrow().content.clone();
        self.parse(content.as_deref())
    }

    /// Replaces the content with the result of `merge`, which receives the current content. On a
    /// conflict `merge` is called again with the content of the other writer. Returns the number of
    /// the new content. Blocks the thread for at most 10 s; the change may still be made later.
    pub fn change<T: DeserializeOwned, U: Serialize>(
        &self,
        mut merge: impl FnMut(Option<T>) -> io::Result<U>,
    ) -> io::Result<u64> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
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
            key: self.owner.key,
            expected,
            content,
            done,
        };
        let sent = self.owner.swaps.try_send(swap);
        sent.map_err(|_full_or_closed| {
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
        let parsed = serde_json::from_slice(content).map(Some);
        parsed.map_err(|error| self.damaged(&error.to_string()))
    }

    /// Returns the error of damaged content, with the command that repairs it.
    pub fn damaged(&self, problem: &str) -> io::Error {
        let repair = self.repair.iter().map(|command| format!("; {command}"));
        let repair: String = repair.collect();
        let text = format!("{} is damaged: {problem}{repair}", self.name);
        io::Error::new(io::ErrorKind::InvalidData, text)
    }

    fn problem(&self, problem: &str) -> io::Error {
        io::Error::other(format!("{}: {problem}", self.name))
    }
}

/// Blocks the current thread. A runtime thread first hands its other tasks to another thread,
/// because the writer may be among them.
pub fn block_current_thread<T>(wait: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    match flavor {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(wait),
        Ok(_) | Err(_) => wait(),
    }
}
