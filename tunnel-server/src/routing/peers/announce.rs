//! What this server announces to the others: the nodes that it holds.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::sleep;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::peer::{HeldNode, Holds, PEER_MESSAGE_MAX, PeerMessage};
use tunnel_tables::VersionedMap;

use crate::routing::registry::Registry;

/// The nodes that this server holds. A clone costs nothing, and says what has changed since another.
pub(super) type HeldNodes = VersionedMap<NodeName, HeldNode>;

/// Publishes the nodes of the registry whenever they change: the first change at once, those of the
/// next 100 ms together.
pub(super) async fn follow_registry(registry: Arc<Registry>, held_nodes: watch::Sender<HeldNodes>) {
    loop {
        held_nodes.send_if_modified(|published| update(published, &registry));
        sleep(BATCH).await;
        registry.nodes_changed().await;
    }
}

/// Makes the held nodes those of the registry. Returns whether that changes them.
fn update(held_nodes: &mut HeldNodes, registry: &Registry) -> bool {
    let mut is_changed = false;
    for name in registry.take_changed_nodes() {
        let current = registry.held_node(&name);
        if held_nodes.get(&name) == current.as_ref() {
            continue;
        }
        is_changed = true;
        match current {
            Some(held_node) => held_nodes.insert(name, held_node),
            None => drop(held_nodes.remove(&name)),
        }
    }
    is_changed
}

/// Sends the full list and then each change to the queue of a connection, and that this server
/// leaves: before it says which nodes have left it, since nobody knows where those are, but behind the
/// full list, with which a server begins to stay.
pub(super) async fn announce(
    mut held_nodes: watch::Receiver<HeldNodes>,
    mut is_leaving: watch::Receiver<bool>,
    outbox: mpsc::Sender<PeerMessage>,
) -> Infallible {
    let mut sent: Option<HeldNodes> = None;
    let mut has_left = false;
    loop {
        let current = held_nodes.borrow_and_update().clone();
        let leaves = *is_leaving.borrow_and_update();
        let changes = changes(sent.as_ref(), &current).into_iter();
        let mut messages: Vec<_> = changes.map(PeerMessage::Holds).collect();
        if leaves && !has_left {
            has_left = true;
            let place = if sent.is_some() { 0 } else { messages.len() };
            messages.insert(place, PeerMessage::Leaving);
        }
        for message in messages {
            if outbox.send(message).await.is_err() {
                return pending().await;
            }
        }
        sent = Some(current);
        let is_gone = tokio::select! {
            changed = held_nodes.changed() => changed.is_err(),
            changed = is_leaving.changed() => changed.is_err(),
        };
        if is_gone {
            return pending().await;
        }
    }
}

/// Returns the messages that lead from the nodes that were sent to the current ones. If none were sent,
/// the first message begins a list, which the last message ends.
fn changes(sent: Option<&HeldNodes>, current: &HeldNodes) -> Vec<Holds> {
    let mut messages = Messages {
        is_list: sent.is_none(),
        ..Messages::default()
    };
    let Some(sent) = sent else {
        current.iter().for_each(|(_, node)| messages.add(node));
        return messages.finish();
    };
    for name in current.changed_from(sent) {
        match (sent.get(name), current.get(name)) {
            (Some(_), None) => messages.remove(name),
            (before, Some(node)) if before != Some(node) => messages.add(node),
            (_, Some(_)) | (None, None) => {}
        }
    }
    messages.finish()
}

/// Messages of limited size.
#[derive(Debug, Default)]
struct Messages {
    done: Vec<Holds>,
    added: Vec<HeldNode>,
    removed: Vec<NodeName>,
    bytes: usize,
    /// Whether the messages are a new list.
    is_list: bool,
}

impl Messages {
    fn add(&mut self, held_node: &HeldNode) {
        self.reserve(held_node.node.as_str().len() + HELD_BYTES);
        self.added.push(held_node.clone());
    }

    fn remove(&mut self, node: &NodeName) {
        self.reserve(node.as_str().len() + NAME_BYTES);
        self.removed.push(node.clone());
    }

    /// Ends the message if it has no room for an entry of this size.
    fn reserve(&mut self, bytes: usize) {
        if self.bytes + bytes > MESSAGE_BYTES {
            self.end_message();
        }
        self.bytes += bytes;
    }

    fn end_message(&mut self) {
        self.bytes = 0;
        self.done.push(Holds {
            is_full: self.is_list && self.done.is_empty(),
            added: std::mem::take(&mut self.added),
            removed: std::mem::take(&mut self.removed),
            has_more: self.is_list,
        });
    }

    fn finish(mut self) -> Vec<Holds> {
        if self.bytes > 0 || (self.is_list && self.done.is_empty()) {
            self.end_message();
        }
        if let Some(last) = self.done.last_mut() {
            last.has_more = false;
        }
        self.done
    }
}

/// Least time between two announcements, so that a burst of sessions is a few messages. A change
/// after a longer time is announced at once.
const BATCH: Duration = Duration::from_millis(100);
/// Upper bound for the bytes of the entries in one message.
const MESSAGE_BYTES: usize = PEER_MESSAGE_MAX - 256;
/// Upper bound for the encoded size of an entry without its name: instance, time, tags, lengths.
const HELD_BYTES: usize = 48;
/// Upper bound for the tag and the length of a name.
const NAME_BYTES: usize = 4;

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::time::{SystemTime, UNIX_EPOCH};

    use bytes::BytesMut;
    use futures_util::FutureExt as _;
    use tunnel_proto::transport::memory;
    use tunnel_proto::wire::control::Message as _;
    use tunnel_proto::wire::name::InstanceId;
    use tunnel_tables::visits;

    use super::*;
    use crate::routing::registry::{AgentSession, RegistryLimits};
    use crate::testing::{POOL, STREAMS};

    fn held_nodes(nodes: &[HeldNode]) -> HeldNodes {
        let mut held_nodes = HeldNodes::default();
        for held_node in nodes {
            held_nodes.insert(held_node.node.clone(), held_node.clone());
        }
        held_nodes
    }

    fn held_node(number: usize, instance: u8) -> HeldNode {
        let since: SystemTime = UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        HeldNode {
            // As long as a name can be.
            node: format!("n{number:05}{}", ".long-label-of-a-node".repeat(11))
                .parse()
                .unwrap(),
            instance: InstanceId::new([instance; 16]),
            since,
        }
    }

    #[test]
    fn changes_lead_from_one_list_to_the_other() {
        let nodes = [held_node(1, 1), held_node(2, 1), held_node(4, 1)];
        let before = held_nodes(&nodes);
        let mut after = before.clone();
        let added = [held_node(2, 2), held_node(3, 1)];
        for held_node in &added {
            after.insert(held_node.node.clone(), held_node.clone());
        }
        after.remove(&nodes[0].node);
        // It is the same again.
        after.remove(&nodes[2].node);
        after.insert(nodes[2].node.clone(), nodes[2].clone());
        let messages = changes(Some(&before), &after);
        let [holds] = &messages[..] else {
            panic!("{messages:?}");
        };
        assert!(!holds.is_full);
        assert_eq!(holds.added, added);
        assert_eq!(holds.removed, [nodes[0].node.clone()]);
        assert!(changes(Some(&after), &after).is_empty());
        let empty = changes(None, &HeldNodes::default());
        assert!(empty.len() == 1 && empty[0].is_full && empty[0].added.is_empty());
        assert!(!empty[0].has_more);
    }

    #[tokio::test]
    async fn that_a_server_leaves_is_known_before_the_nodes_that_have_left_it() {
        let node = held_node(1, 1);
        let held = watch::Sender::new(held_nodes(std::slice::from_ref(&node)));
        let leaving = watch::Sender::new(false);
        let (outbox, mut sent) = mpsc::channel(8);
        let mut announcing = pin!(announce(
            held.subscribe(),
            leaving.subscribe(),
            outbox.clone()
        ));
        assert!(announcing.as_mut().now_or_never().is_none());
        let list = sent.try_recv().unwrap();
        assert!(matches!(list, PeerMessage::Holds(holds) if holds.is_full));
        held.send_replace(HeldNodes::default());
        leaving.send_replace(true);
        assert!(announcing.as_mut().now_or_never().is_none());
        assert!(matches!(sent.try_recv(), Ok(PeerMessage::Leaving)));
        let PeerMessage::Holds(holds) = sent.try_recv().unwrap() else {
            panic!("no change");
        };
        assert_eq!(holds.removed, [node.node]);

        let mut again = pin!(announce(held.subscribe(), leaving.subscribe(), outbox));
        assert!(again.as_mut().now_or_never().is_none());
        let list = sent.try_recv().unwrap();
        assert!(matches!(list, PeerMessage::Holds(holds) if holds.is_full));
        assert!(matches!(sent.try_recv(), Ok(PeerMessage::Leaving)));
    }

    #[test]
    fn long_lists_are_messages_that_fit() {
        let list: Vec<_> = (0..1000).map(|number| held_node(number, 255)).collect();
        let list = held_nodes(&list);
        let mut none = list.clone();
        list.iter().for_each(|(name, _)| drop(none.remove(name)));
        let full = changes(None, &list);
        let gone = changes(Some(&list), &none);
        assert!(full.len() > 1 && gone.len() > 1);
        assert!(full[0].is_full && !full[1].is_full);
        let (last, others) = full.split_last().unwrap();
        assert!(!last.has_more && others.iter().all(|holds| holds.has_more));
        assert!(gone.iter().all(|holds| !holds.has_more));
        assert_eq!(
            full.iter().map(|holds| holds.added.len()).sum::<usize>(),
            1000
        );
        assert_eq!(
            gone.iter().map(|holds| holds.removed.len()).sum::<usize>(),
            1000
        );
        for holds in full.into_iter().chain(gone) {
            let mut buffer = BytesMut::new();
            PeerMessage::Holds(holds).encode(&mut buffer).unwrap();
            assert!(buffer.len() <= PEER_MESSAGE_MAX, "{} bytes", buffer.len());
        }
    }

    /// What one change of a session costs.
    #[derive(Debug, PartialEq, Eq)]
    struct Cost {
        /// Entries that are visited, up to the messages.
        visits: u64,
        /// Nodes that are looked up in the registry.
        lookups: usize,
        messages: Vec<Holds>,
    }

    #[tokio::test]
    async fn change_among_20000_sessions_visits_as_many_entries_as_among_1000() {
        let costs = [1000, 20_000].map(|count| {
            let registry = Arc::new(Registry::new(RegistryLimits {
                streams_per_agent: STREAMS,
                buffer_pool: POOL,
            }));
            let since: SystemTime = UNIX_EPOCH;
            let register = |number: usize, instance: u8| {
                let instance = InstanceId::new([instance; 16]);
                let node = format!("n{number:05}").parse().unwrap();
                let (session, _agent) = memory::pair();
                let mut entry = AgentSession::new(registry.next_id(), node, instance, session);
                entry.since = since;
                registry.register(entry, &[]).unwrap()
            };
            let mut sessions: Vec<_> = (0..count).map(|number| register(number, 1)).collect();
            let mut published = HeldNodes::default();
            assert!(update(&mut published, &registry));
            let mut cost = || {
                let (sent, before) = (published.clone(), visits::count());
                let lookups = registry.changed_nodes();
                assert!(update(&mut published, &registry));
                let messages = changes(Some(&sent), &published);
                Cost {
                    visits: visits::count() - before,
                    lookups,
                    messages,
                }
            };
            sessions[7].session().withdraw();
            let withdrawn = cost();
            sessions.push(register(7, 2));
            let replaced = cost();
            drop(sessions.remove(9));
            let removed = cost();
            // A pass over all nodes is counted.
            let before = visits::count();
            let list = changes(None, &published);
            let listed: usize = list.iter().map(|holds| holds.added.len()).sum();
            assert_eq!(listed, count - 1);
            assert!(visits::count() - before >= listed as u64);
            [withdrawn, replaced, removed]
        });
        assert_eq!(costs[0], costs[1]);
        let names = |held: &Cost| (held.messages[0].added.len(), held.messages[0].removed.len());
        assert_eq!(costs[0].each_ref().map(names), [(0, 1), (1, 0), (0, 1)]);
    }
}
