//! A document in a file of the data directory. One thread accesses the file: it reads what commands
//! write while no server runs, or while one starts, and writes the changes of this process.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tracing::warn;
use tunnel_proto::process::telemetry::LogRateLimit;

use super::data_dir::{DataDir, FileStamp, SharedFile};
use super::document::{
    CasOutcome, CompareAndSwap, DocumentOwner, FileRequest, ObservedContent, SharedDocument,
};

/// Opens the document in a file of a data directory. The thread of the document ends with its last
/// clone.
///
/// # Errors
/// Returns an error with the path if the file cannot be read.
pub(crate) fn open(dir: &DataDir, path: PathBuf) -> io::Result<SharedDocument> {
    let name = path.display().to_string();
    let mut file = FollowedFile {
        file: SharedFile::new(dir, path),
        stamp: None,
        observed: watch::Sender::default(),
    };
    file.refresh()?;
    let (requests, queue) = sync_channel(CHANGES_MAX);
    let owner = DocumentOwner::File {
        requests,
        activity: dir.activity().clone(),
    };
    let document = SharedDocument::new(name, file.observed.subscribe(), owner);
    thread::Builder::new()
        .name("data-file".to_owned())
        .spawn(move || file.run(&queue))?;
    Ok(document)
}

/// A file, and its content when it was last read or written.
struct FollowedFile {
    file: SharedFile,
    stamp: Option<FileStamp>,
    observed: watch::Sender<ObservedContent>,
}

impl FollowedFile {
    fn run(mut self, queue: &Receiver<FileRequest>) {
        loop {
            match queue.recv_timeout(POLL_INTERVAL) {
                Ok(FileRequest::Swap(swap)) => {
                    let outcome = self.swap(&swap);
                    let outcome =
                        outcome.unwrap_or_else(|error| CasOutcome::Failed(error.to_string()));
                    let _nobody_waits_any_more = swap.done.try_send(outcome);
                }
                #[cfg(test)]
                Ok(FileRequest::Refresh(done)) => {
                    self.refresh_or_warn();
                    let _nobody_waits_any_more = done.try_send(());
                }
                Err(RecvTimeoutError::Timeout) => self.refresh_or_warn(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Replaces the content unless another process has changed it.
    fn swap(&mut self, swap: &CompareAndSwap) -> io::Result<CasOutcome> {
        let _changing = self.file.lock()?;
        self.refresh()?;
        let current = self.observed.borrow().content.clone();
        if current.as_deref() != swap.expected.as_deref() {
            return Ok(CasOutcome::Conflict(current));
        }
        self.file.write(&swap.content)?;
        self.stamp = self.file.stamp();
        Ok(CasOutcome::Written(self.observe(swap.content.clone())))
    }

    /// Reads the file if another process has written it. A file that is gone takes nothing back.
    fn refresh(&mut self) -> io::Result<()> {
        let stamp = self.file.stamp();
        if stamp.is_none() {
            self.stamp = None;
            self.observed.send_if_modified(|observed| {
                let is_new = observed.content.is_some() && !observed.is_lost;
                observed.is_lost |= is_new;
                is_new
            });
            return Ok(());
        }
        if stamp == self.stamp {
            return Ok(());
        }
        if let Some(content) = self.file.read()? {
            self.stamp = stamp;
            self.observe(content.into());
        }
        Ok(())
    }

    fn refresh_or_warn(&mut self) {
        if let Err(error) = self.refresh() {
            static UNREAD: LogRateLimit = LogRateLimit::new("files that cannot be read again");
            if UNREAD.admit() {
                warn!(%error, "cannot read a file of the data directory again; its last content stays in use");
            }
        }
    }

    /// Publishes the content. Returns its number.
    fn observe(&self, content: Arc<[u8]>) -> u64 {
        let mut sequence = 0;
        self.observed.send_modify(|observed| {
            observed.sequence += 1;
            observed.content = Some(content);
            observed.is_lost = false;
            sequence = observed.sequence;
        });
        sequence
    }
}

/// Maximum number of pending changes. Further changes are refused.
const CHANGES_MAX: usize = 64;
/// Interval at which the file is checked for changes of other processes.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Instant;

    use tunnel_proto::process::disk::ANSWER_TIMEOUT;

    use super::*;
    use crate::store::data_dir::testing::Scratch;

    type Content = BTreeMap<String, u32>;

    fn add(document: &SharedDocument, name: &str) -> io::Result<u64> {
        document.change(|content: Option<Content>| {
            let mut content = content.unwrap_or_default();
            content.insert(name.to_owned(), 1);
            Ok(content)
        })
    }

    fn names(document: &SharedDocument) -> Vec<String> {
        let content = document.read::<Content>().unwrap().unwrap_or_default();
        content.into_keys().collect()
    }

    #[test]
    fn changes_of_two_processes_are_merged_and_read_without_the_file() {
        let scratch = Scratch::new();
        let path = scratch.0.path().join("document.json");
        let [one, other] = [(), ()].map(|()| open(&scratch.0, path.clone()).unwrap());
        assert_eq!(one.version(), None);
        add(&one, "a").unwrap();
        add(&other, "b").unwrap();
        assert_eq!(names(&other), ["a", "b"]);
        one.refresh();
        assert_eq!(names(&one), ["a", "b"]);
        std::fs::remove_file(&path).unwrap();
        one.refresh();
        assert_eq!(names(&one), ["a", "b"]);
        add(&one, "c").unwrap();
        assert_eq!(names(&open(&scratch.0, path).unwrap()), ["a", "b", "c"]);
    }

    #[test]
    fn file_system_that_does_not_answer_stops_no_reader_and_fails_changes_in_time() {
        let scratch = Scratch::new();
        let path = scratch.0.path().join("document.json");
        let document = open(&scratch.0, path).unwrap();
        add(&document, "a").unwrap();
        // The thread of the file waits for this lock as for a file system.
        let held = scratch.0.lock_files().unwrap();
        let began = Instant::now();
        let error = add(&document, "b").unwrap_err().to_string();
        assert!(error.ends_with("does not answer"), "{error}");
        assert!(began.elapsed() >= ANSWER_TIMEOUT);
        assert_eq!(names(&document), ["a"]);
        assert!(scratch.0.activity().is_blocked());
        // Nobody waits behind the first one.
        let sent = Instant::now();
        add(&document, "c").unwrap_err();
        assert!(sent.elapsed() < ANSWER_TIMEOUT);
        drop(held);
        document.refresh();
        assert!(!scratch.0.activity().is_blocked());
        assert_eq!(names(&document), ["a", "b"], "the change was made later");
        add(&document, "c").unwrap();
    }
}
