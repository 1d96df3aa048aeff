//! Idle streams, which callers' connections keep for their next request. A new stream that finds no
//! permit closes one of them first.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tunnel_proto::wire::name::NodeName;

use super::limiter::CallerKey;
use crate::routing::via::Via;

/// The idle streams of all callers' connections.
#[derive(Debug, Default)]
pub(super) struct IdleStreams(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    /// The entries of each node, never empty, oldest first.
    nodes: HashMap<NodeName, BTreeMap<u64, Entry>>,
}

#[derive(Debug)]
struct Entry {
    via: Via,
    caller: CallerKey,
    evicted: CancellationToken,
}

/// Keeps the entry of an idle stream. Dropping the value removes the entry.
#[derive(Debug)]
pub struct IdleStream {
    streams: Arc<IdleStreams>,
    node: NodeName,
    id: u64,
    evicted: CancellationToken,
}

impl IdleStream {
    /// Returns the token that is canceled when a new stream needs the permit. The owner then drops
    /// the stream.
    pub fn evicted(&self) -> &CancellationToken {
        &self.evicted
    }
}

impl IdleStreams {
    /// Adds a stream of `caller` over `via`.
    pub(super) fn add(
        self: &Arc<Self>,
        node: &NodeName,
        via: &Via,
        caller: &CallerKey,
    ) -> IdleStream {
        let evicted = CancellationToken::new();
        let entry = Entry {
            via: via.clone(),
            caller: caller.clone(),
            evicted: evicted.clone(),
        };
        let mut state = self.0.lock();
        let id = state.next_id;
        state.next_id += 1;
        let of_node = state.nodes.entry(node.clone()).or_default();
        of_node.insert(id, entry);
        IdleStream {
            streams: self.clone(),
            node: node.clone(),
            id,
            evicted,
        }
    }

    /// Evicts the oldest idle stream of a node that matches. Returns whether there was one.
    pub(super) fn evict(
        &self,
        node: &NodeName,
        matches: impl Fn(&Via, &CallerKey) -> bool,
    ) -> bool {
        let mut state = self.0.lock();
        let Some(of_node) = state.nodes.get(node) else {
            return false;
        };
        let mut entries = of_node.iter();
        let oldest = entries.find(|(_, entry)| matches(&entry.via, &entry.caller));
        let Some(id) = oldest.map(|(id, _)| *id) else {
            return false;
        };
        let entry = state.remove(node, id);
        drop(state);
        if let Some(entry) = entry {
            entry.evicted.cancel();
        }
        true
    }

    /// Returns the number of idle streams of a node over `via`.
    pub(super) fn count(&self, node: &NodeName, via: &Via) -> usize {
        let state = self.0.lock();
        let of_node = state.nodes.get(node).into_iter().flat_map(BTreeMap::values);
        of_node.filter(|entry| entry.via == *via).count()
    }
}

impl State {
    fn remove(&mut self, node: &NodeName, id: u64) -> Option<Entry> {
        let of_node = self.nodes.get_mut(node)?;
        let entry = of_node.remove(&id);
        if of_node.is_empty() {
            self.nodes.remove(node);
        }
        entry
    }
}

impl Drop for IdleStream {
    fn drop(&mut self) {
        self.streams.0.lock().remove(&self.node, self.id);
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
        let evicted = || {
            let tokens = kept.iter().map(IdleStream::evicted);
            tokens
                .map(CancellationToken::is_cancelled)
                .collect::<Vec<_>>()
        };
        assert!(evict());
        assert_eq!(evicted(), [false, true, false]);
        assert_eq!(streams.count(&node(), &local), 1);
        assert!(evict() && !evict());
        assert_eq!(evicted(), [false, true, true]);
        assert_eq!(streams.count(&node(), &other), 1);
        drop(kept);
        assert!(streams.0.lock().nodes.is_empty());
    }
}
