//! Idle streams, which callers' connections keep for their next request. A new stream that finds no
//! permit closes one of them first.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tunnel_proto::wire::name::NodeName;

use super::limiter::CallerKey;
use crate::routing::via::Via;

/// The idle streams of all callers' connections.
#[derive(Debug, Default)]
pub(super) struct IdleStreams(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    /// The entries by node, oldest first. One map for all nodes, since a kept-alive connection adds and
    /// removes an entry with each request.
    entries: BTreeMap<(NodeName, u64), Entry>,
}

#[derive(Debug)]
struct Entry {
    via: Via,
    caller_key: CallerKey,
    eviction: Arc<Eviction>,
}

/// Whether a new stream needs the permit of an idle one. Each request makes one.
#[derive(Debug, Default)]
struct Eviction {
    is_evicted: AtomicBool,
    owner: AtomicWaker,
}

/// Keeps the entry of an idle stream. Dropping the value removes the entry.
#[derive(Debug)]
pub struct IdleStream {
    streams: Arc<IdleStreams>,
    key: (NodeName, u64),
    eviction: Arc<Eviction>,
}

impl IdleStream {
    /// Returns whether a new stream needs the permit. The owner then drops the stream.
    pub fn is_evicted(&self) -> bool {
        self.eviction.is_evicted.load(Ordering::Acquire)
    }

    /// Waits until a new stream needs the permit. One task at a time can wait.
    pub fn poll_evicted(&self, cx: &Context<'_>) -> Poll<()> {
        self.eviction.owner.register(cx.waker());
        match self.is_evicted() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

impl IdleStreams {
    /// Adds a stream of a caller over `via`.
    pub(super) fn add(
        self: &Arc<Self>,
        node: &NodeName,
        via: &Via,
        caller_key: &CallerKey,
    ) -> IdleStream {
        let eviction = Arc::<Eviction>::default();
        let entry = Entry {
            via: via.clone(),
            caller_key: caller_key.clone(),
            eviction: eviction.clone(),
        };
        let mut state = self.0.lock();
        let key = (node.clone(), state.next_id);
        state.next_id += 1;
        state.entries.insert(key.clone(), entry);
        IdleStream {
            streams: self.clone(),
            key,
            eviction,
        }
    }

    /// Evicts the oldest idle stream of a node that matches. Returns whether there was one.
    pub(super) fn evict(
        &self,
        node: &NodeName,
        matches: impl Fn(&Via, &CallerKey) -> bool,
    ) -> bool {
        let mut state = self.0.lock();
        let mut entries = state.of_node(node);
        let oldest = entries.find(|(_, entry)| matches(&entry.via, &entry.caller_key));
        let Some(key) = oldest.map(|(key, _)| key.clone()) else {
            return false;
        };
        drop(entries);
        let entry = state.entries.remove(&key);
        drop(state);
        if let Some(entry) = entry {
            entry.eviction.is_evicted.store(true, Ordering::Release);
            entry.eviction.owner.wake();
        }
        true
    }

    /// Returns the number of idle streams of a node over `via`.
    pub(super) fn count(&self, node: &NodeName, via: &Via) -> usize {
        let state = self.0.lock();
        let of_node = state.of_node(node);
        of_node.filter(|(_, entry)| entry.via == *via).count()
    }
}

impl State {
    fn of_node(&self, node: &NodeName) -> impl Iterator<Item = (&(NodeName, u64), &Entry)> {
        self.entries
            .range((node.clone(), 0)..=(node.clone(), u64::MAX))
    }
}

impl Drop for IdleStream {
    fn drop(&mut self) {
        self.streams.0.lock().entries.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::name::SessionId;

    use super::*;
    use crate::testing::node;

    #[test]
    fn oldest_match_is_evicted_once_and_dropped_entries_are_gone() {
        let streams = Arc::<IdleStreams>::default();
        let local = Via::Local(SessionId(1));
        let other = Via::Replica("server-1".parse().unwrap());
        let caller = CallerKey::Local(None);
        let add = |via: &Via| streams.add(&node(), via, &caller);
        let kept = [add(&other), add(&local), add(&local)];
        let evict = || streams.evict(&node(), |via, _| *via == local);
        let evicted = || kept.iter().map(IdleStream::is_evicted).collect::<Vec<_>>();
        assert!(evict());
        assert_eq!(evicted(), [false, true, false]);
        assert_eq!(streams.count(&node(), &local), 1);
        assert!(evict() && !evict());
        assert_eq!(evicted(), [false, true, true]);
        assert_eq!(streams.count(&node(), &other), 1);
        drop(kept);
        assert!(streams.0.lock().entries.is_empty());
    }
}
