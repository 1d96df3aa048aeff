//! The documents of the meta port. One is made for all requests of a moment, and the memory of those
//! that are still being read is limited.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use futures_util::FutureExt;
use http_body_util::{BodyExt, Collected, Full};
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::response::FullResponse;
use crate::making::{self, DOCUMENT_MAX_AGE, MakingCost};
use crate::shutdown::Shutdown;

/// Bytes of all documents that are being read, or that requests can share. Together with
/// [`DOCUMENTS_MIN`] it limits what readers that never read hold.
const BYTES_MAX: usize = 16 * 1024 * 1024;
/// Documents that may exist whatever their size, so that a large one is read to its end while
/// others are made.
pub(super) const DOCUMENTS_MIN: usize = 4;

/// A path, and the variant of the document there. Endpoints accept few variants.
pub(super) type DocumentKey = (&'static str, String);

/// A response that several connections send.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) response: FullResponse,
    /// Canceled when the memory is needed: the connections that still send the document end.
    pub(super) evicted: CancellationToken,
    began: Instant,
}

/// The documents of one meta port.
#[derive(Debug)]
pub(super) struct Documents {
    table: Mutex<DocumentTable>,
    tasks: Shutdown,
}

#[derive(Debug, Default)]
struct DocumentTable {
    cost: MakingCost,
    /// The lock of a key is held while its document is made.
    making: HashMap<DocumentKey, Arc<AsyncMutex<()>>>,
    /// In the order in which they were made.
    documents: VecDeque<Entry>,
}

#[derive(Debug)]
struct Entry {
    key: DocumentKey,
    /// `None` when no further request shares the document.
    shared: Option<Arc<Document>>,
    /// Exists while any connection sends the document, or it is shared.
    bytes: Weak<Bytes>,
    evicted: CancellationToken,
}

impl Documents {
    pub(super) fn new(tasks: Shutdown) -> Arc<Self> {
        Arc::new(Self {
            table: Mutex::default(),
            tasks,
        })
    }

    /// Returns the document with a key for a source, which `make` makes if no other request has done
    /// so. Blocks no thread of the runtime. Returns `None` after a panic of `make`. Cancel-safe: the
    /// making goes on, and the next request has the document.
    ///
    /// The permit of the source comes before the lock of the key, so that nobody waits for the lock
    /// while its holder waits behind other documents of its own source.
    pub(super) async fn get(
        self: &Arc<Self>,
        source: IpAddr,
        key: DocumentKey,
        make: impl FnOnce() -> FullResponse + Send + 'static,
    ) -> Option<Arc<Document>> {
        let asked = Instant::now();
        let mut permit = making::acquire(source).await;
        if let Some(document) = self.table.lock().shared(&key, asked) {
            return Some(document);
        }
        permit.pause().await;
        let making = self.table.lock().making(&key);
        let making = making.lock_owned().await;
        if let Some(document) = self.table.lock().shared(&key, asked) {
            return Some(document);
        }
        let documents = self.clone();
        let made = permit.make(move || {
            let began = Instant::now();
            let document = documents.add(key, make(), began);
            drop(making);
            document
        });
        made.await
            .inspect_err(|error| warn!(%error, "cannot make a page of the meta port"))
            .ok()
    }

    fn add(
        self: &Arc<Self>,
        key: DocumentKey,
        made: FullResponse,
        began: Instant,
    ) -> Arc<Document> {
        let (head, body) = made.into_parts();
        let bytes = Arc::new(collected(body));
        let entry_bytes = Arc::downgrade(&bytes);
        let body = Bytes::from_owner(SharedBytes(bytes));
        let document = Arc::new(Document {
            response: FullResponse::from_parts(head, Full::new(body)),
            evicted: CancellationToken::new(),
            began,
        });
        self.table.lock().add(Entry {
            key,
            shared: Some(document.clone()),
            bytes: entry_bytes,
            evicted: document.evicted.clone(),
        });
        let documents = self.clone();
        self.tasks.spawn_service(async move {
            sleep(DOCUMENT_MAX_AGE).await;
            documents.table.lock().expire();
        });
        document
    }
}

impl DocumentTable {
    fn making(&mut self, key: &DocumentKey) -> Arc<AsyncMutex<()>> {
        if let Some(making) = self.making.get(key) {
            return making.clone();
        }
        self.making
            .retain(|_, making| Arc::strong_count(making) > 1);
        self.making.entry(key.clone()).or_default().clone()
    }

    /// Returns a document for a request of the time `asked`, if it need not be made.
    fn shared(&mut self, key: &DocumentKey, asked: Instant) -> Option<Arc<Document>> {
        let mut newest_first = self.documents.iter().rev();
        let shared = newest_first.find_map(|entry| {
            let document = entry.shared.as_ref();
            document.filter(|_| entry.key == *key)
        })?;
        let is_current =
            shared.began >= asked || self.cost.is_reusable(shared.began, Instant::now());
        is_current.then(|| shared.clone())
    }

    /// Adds a document. The oldest ones end if all together are too large.
    fn add(&mut self, entry: Entry) {
        if let Some(document) = &entry.shared {
            self.cost.add(document.began, Instant::now());
        }
        for older in &mut self.documents {
            if older.key == entry.key {
                older.shared = None;
            }
        }
        self.documents.push_back(entry);
        self.remove_unread();
        let mut bytes: usize = self.documents.iter().map(Entry::size).sum();
        while bytes > BYTES_MAX
            && self.documents.len() > DOCUMENTS_MIN
            && let Some(oldest) = self.documents.pop_front()
        {
            bytes = bytes.saturating_sub(oldest.size());
            debug!("readers of an older page are disconnected: too many pages are being read");
            oldest.evicted.cancel();
        }
    }

    /// Forgets the documents that nobody reads when they are too old to be shared.
    fn expire(&mut self) {
        for entry in &mut self.documents {
            entry
                .shared
                .take_if(|document| document.began.elapsed() >= DOCUMENT_MAX_AGE);
        }
        self.remove_unread();
    }

    fn remove_unread(&mut self) {
        self.documents
            .retain(|entry| entry.bytes.strong_count() > 0);
    }
}

impl Entry {
    fn size(&self) -> usize {
        self.bytes.upgrade().map_or(0, |bytes| bytes.len())
    }
}

/// The owner of the bytes of a document, which are freed when the last connection has sent them.
struct SharedBytes(Arc<Bytes>);

impl AsRef<[u8]> for SharedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Returns the bytes of a body that is complete.
fn collected(body: Full<Bytes>) -> Bytes {
    let collected = body.collect().now_or_never().and_then(Result::ok);
    collected.map(Collected::to_bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::StatusCode;

    use super::*;
    use crate::meta::response::text;

    const SOURCE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn key(variant: &str) -> DocumentKey {
        ("/documents", variant.to_owned())
    }

    #[tokio::test]
    async fn requests_that_wait_share_the_document_that_is_made_after_them() {
        let documents = Documents::new(Shutdown::new());
        let made = Arc::new(AtomicUsize::new(0));
        // No document is made before all have asked.
        let (asking, all_asked) = std::sync::mpsc::channel::<()>();
        let all_asked = Arc::new(Mutex::new(all_asked));
        let ask = async || {
            let (made, all_asked) = (made.clone(), all_asked.clone());
            let make = move || {
                let _disconnected = all_asked.lock().recv();
                let number = made.fetch_add(1, Ordering::Relaxed);
                text(StatusCode::OK, number.to_string())
            };
            documents.get(SOURCE, key("a"), make).await.unwrap()
        };
        let mut all = std::pin::pin!(futures_util::future::join_all((0..100).map(|_| ask())));
        assert!(all.as_mut().now_or_never().is_none());
        drop(asking);
        all.await;
        assert!(made.load(Ordering::Relaxed) <= 2);
        let before = made.load(Ordering::Relaxed);
        ask().await;
        let after = made.load(Ordering::Relaxed);
        assert_eq!(
            after,
            before + 1,
            "a cheap document is made for each moment"
        );
    }

    #[tokio::test]
    async fn oldest_documents_that_are_still_read_end_when_all_are_too_large() {
        let documents = Documents::new(Shutdown::new());
        let mut read = Vec::new();
        for number in 0..10 {
            let make = || text(StatusCode::OK, vec![b'x'; BYTES_MAX / 3]);
            let document = documents.get(SOURCE, key(&number.to_string()), make).await;
            read.push(document.unwrap());
        }
        let evicted = |document: &Arc<Document>| document.evicted.is_cancelled();
        let ended = read.iter().filter(|document| evicted(document)).count();
        assert_eq!(ended, 10 - DOCUMENTS_MIN, "they hold more than allowed");
        assert!(read[..ended].iter().all(evicted), "the oldest first");
        read.clear();
        let make = || text(StatusCode::OK, "small");
        let small = documents.get(SOURCE, key("small"), make).await.unwrap();
        assert!(!evicted(&small));
    }

    #[tokio::test(start_paused = true)]
    async fn document_is_freed_when_it_is_too_old_and_nobody_reads_it() {
        let documents = Documents::new(Shutdown::new());
        let read = documents.get(SOURCE, key("read"), || text(StatusCode::OK, "read"));
        let read = read.await.unwrap();
        documents
            .get(SOURCE, key("unread"), || text(StatusCode::OK, "unread"))
            .await
            .unwrap();
        sleep(2 * DOCUMENT_MAX_AGE).await;
        assert_eq!(documents.table.lock().documents.len(), 1);
        drop(read);
        documents.table.lock().expire();
        assert!(documents.table.lock().documents.is_empty());
    }

    #[tokio::test]
    async fn panic_while_a_document_is_made_ends_one_request() {
        let documents = Documents::new(Shutdown::new());
        let failed = documents.get(SOURCE, key("a"), || panic!("a test"));
        assert!(failed.await.is_none());
        let made = documents.get(SOURCE, key("a"), || text(StatusCode::OK, "made"));
        assert!(made.await.is_some());
    }
}
