//! A watch from a revision: changes, bookmarks, 410, and the timeout.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::faults::{Cut, Presence};
use super::kinds::Address;
use super::request::Request;
use super::selector::Selector;
use super::status::Status;
use super::store::{Change, Store};

/// The state of one watch between two pieces of its body.
#[derive(Debug)]
pub(super) struct Watch {
    store: Store,
    address: Address,
    selector: Selector,
    /// Changes up to this revision have been sent.
    sent_revision: u64,
    ready: VecDeque<Value>,
    bookmarks: bool,
    next_bookmark: Instant,
    end: Instant,
    over: bool,
    changes: watch::Receiver<u64>,
    cuts: watch::Receiver<(u64, Cut)>,
    presence: watch::Receiver<Presence>,
}

/// Signals that a watch receives in addition to changes of the store.
#[derive(Debug)]
pub(super) struct Signals {
    pub(super) cuts: watch::Receiver<(u64, Cut)>,
    pub(super) presence: watch::Receiver<Presence>,
}

impl Watch {
    /// Begins the watch that `request` asks for.
    pub(super) fn begin(
        request: &Request,
        store: &Store,
        signals: Signals,
    ) -> Result<Self, Status> {
        let bookmarks = request.query.is_true("allowWatchBookmarks");
        let asked = request.query.revision()?;
        let seconds = request
            .query
            .get("timeoutSeconds")
            .and_then(|text| text.parse().ok())
            .unwrap_or(LONGEST);
        let now = Instant::now();
        let mut watch = Self {
            store: store.clone(),
            address: request.address.clone(),
            selector: request.selector()?,
            sent_revision: asked.unwrap_or(0),
            ready: VecDeque::new(),
            bookmarks,
            next_bookmark: now + BOOKMARK_INTERVAL,
            end: now + Duration::from_secs(seconds),
            over: false,
            changes: store.changes(),
            cuts: signals.cuts,
            presence: signals.presence,
        };
        watch.changes.mark_changed();
        watch.cuts.mark_unchanged();
        Ok(watch)
    }

    fn event(&self, kind: &str, object: &Value) -> Value {
        json!({ "type": kind, "object": super::shown(self.address.kind, object) })
    }

    fn bookmark(&self) -> Value {
        let kind = self.address.kind;
        let object = json!({ "kind": kind.kind, "apiVersion": kind.api_version(), "metadata": { "resourceVersion": self.sent_revision.to_string(), "creationTimestamp": null } });
        json!({ "type": "BOOKMARK", "object": object })
    }

    /// Returns the next piece of the body, `None` at its end, or an error where it breaks.
    pub(super) async fn next(mut self) -> Option<(Result<Frame<Bytes>, io::Error>, Self)> {
        loop {
            if *self.presence.borrow_and_update() == Presence::Silent {
                self.presence.changed().await.ok()?;
                continue;
            }
            if !self.ready.is_empty() {
                let mut lines = Vec::new();
                for event in self.ready.drain(..) {
                    lines.extend(event.to_string().into_bytes());
                    lines.push(b'\n');
                }
                return Some((Ok(Frame::data(lines.into())), self));
            }
            if self.over {
                return None;
            }
            tokio::select! {
                biased;
                Ok(()) = self.cuts.changed() => {
                    let (_, how) = *self.cuts.borrow_and_update();
                    return match how {
                        Cut::Ended => None,
                        Cut::Broken => Some((Err(io::ErrorKind::ConnectionAborted.into()), self)),
                    };
                }
                Ok(()) = self.presence.changed() => {}
                Ok(()) = self.changes.changed() => self.catch_up(),
                () = sleep_until(self.end) => return None,
                () = sleep_until(self.next_bookmark), if self.bookmarks => {
                    self.next_bookmark += BOOKMARK_INTERVAL;
                    self.sent_revision = self.sent_revision.max(self.store.read(super::store::Content::revision));
                    let bookmark = self.bookmark();
                    self.ready.push_back(bookmark);
                }
            }
        }
    }

    /// Queues the changes since the last call.
    fn catch_up(&mut self) {
        let store = self.store.clone();
        store.read(|content| {
            let Some(changes) = content.changes_after(self.sent_revision) else {
                let status = Status::expired(self.sent_revision, content.compacted());
                self.ready
                    .push_back(json!({ "type": "ERROR", "object": status.object() }));
                self.over = true;
                return;
            };
            let events: Vec<_> = changes
                .filter_map(|change| self.event_for(change))
                .collect();
            self.ready.extend(events);
            self.sent_revision = self.sent_revision.max(content.revision());
        });
    }

    /// Returns the event of a change, as seen through the watch's selector.
    fn event_for(&self, change: &Change) -> Option<Value> {
        let inside = change.key.storage == self.address.kind.storage()
            && self
                .address
                .namespace
                .as_ref()
                .is_none_or(|namespace| *namespace == change.key.namespace);
        if !inside {
            return None;
        }
        let fits = |object: &Option<Arc<Value>>| {
            object
                .as_ref()
                .filter(|object| self.selector.fits(object))
                .cloned()
        };
        match (fits(&change.before), fits(&change.after)) {
            (None, None) => None,
            (None, Some(after)) => Some(self.event("ADDED", &after)),
            (Some(_), Some(after)) => Some(self.event("MODIFIED", &after)),
            (Some(before), None) => {
                let mut last = Value::clone(&before);
                last["metadata"]["resourceVersion"] = change.revision.to_string().into();
                Some(self.event("DELETED", &last))
            }
        }
    }
}

/// Half an hour, the minimum that the real API server grants by default.
const LONGEST: u64 = 1800;

/// Bookmark interval of the real API server.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
