//! What this server announces to the others: the nodes that it holds.

use std::cmp::Ordering;
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::peer::{HeldNode, Holds, PEER_MESSAGE_MAX, PeerMessage};

use crate::routing::registry::Registry;

/// The nodes that this server holds, ordered by name.
pub(super) type HeldNodes = Arc<[HeldNode]>;

/// Publishes the nodes of the registry whenever they change: the first change at once, those of the
/// next 100 ms together.
pub(super) async fn follow_registry(registry: Arc<Registry>, held_nodes: watch::Sender<HeldNodes>) {
    let mut changed = registry.changed();
    // A session that is suspect or withdrawn stays registered, and causes no notification.
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let nodes = registry.held_nodes();
        held_nodes.send_if_modified(|published| {
            let is_changed = **published != *nodes;
            if is_changed {
                *published = nodes.into();
            }
            is_changed
        });
        let next = Instant::now() + BATCH;
        tokio::select! {
            _ = changed.changed() => sleep_until(next).await,
            _ = ticks.tick() => {}
        }
    }
}

/// Sends the full list and then each change to the queue of a connection, and that this server
/// leaves.
pub(super) async fn announce(
    mut held_nodes: watch::Receiver<HeldNodes>,
    mut is_leaving: watch::Receiver<bool>,
    outbox: mpsc::Sender<PeerMessage>,
) -> Infallible {
    let mut sent: Option<HeldNodes> = None;
    let mut has_left = false;
    loop {
        let current = held_nodes.borrow_and_update().clone();
        for holds in changes(sent.as_deref(), &current) {
            if outbox.send(PeerMessage::Holds(holds)).await.is_err() {
                return pending().await;
            }
        }
        sent = Some(current);
        let leaves = *is_leaving.borrow_and_update();
        if leaves && !has_left {
            has_left = true;
            if outbox.send(PeerMessage::Leaving).await.is_err() {
                return pending().await;
            }
        }
        let is_gone = tokio::select! {
            changed = held_nodes.changed() => changed.is_err(),
            changed = is_leaving.changed() => changed.is_err(),
        };
        if is_gone {
            return pending().await;
        }
    }
}

/// Returns the messages that lead from the list that was sent to the current one. Both are ordered
/// by name. Without a sent list the first message begins a new one, which the last message ends.
fn changes(sent: Option<&[HeldNode]>, current: &[HeldNode]) -> Vec<Holds> {
    let mut messages = Messages {
        is_list: sent.is_none(),
        ..Messages::default()
    };
    let mut before = sent.unwrap_or_default().iter().peekable();
    let mut now = current.iter().peekable();
    loop {
        let order = match (before.peek(), now.peek()) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(old), Some(new)) => old.node.cmp(&new.node),
        };
        let old = before.next_if(|_| order.is_le());
        let new = now.next_if(|_| order.is_ge());
        match (old, new) {
            (Some(old), None) => messages.remove(&old.node),
            (None, Some(new)) => messages.add(new),
            (Some(old), Some(new)) if old != new => messages.add(new),
            (Some(_), Some(_)) | (None, None) => {}
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
/// Time until a session that is suspect or withdrawn is no longer announced.
const POLL: Duration = Duration::from_secs(1);
/// Upper bound for the bytes of the entries in one message.
const MESSAGE_BYTES: usize = PEER_MESSAGE_MAX - 256;
/// Upper bound for the encoded size of an entry without its name: instance, time, tags, lengths.
const HELD_BYTES: usize = 48;
/// Upper bound for the tag and the length of a name.
const NAME_BYTES: usize = 4;

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use bytes::BytesMut;
    use tunnel_proto::wire::name::InstanceId;

    use super::*;

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
        let before = [held_node(1, 1), held_node(2, 1), held_node(4, 1)];
        let after = [held_node(2, 2), held_node(3, 1), held_node(4, 1)];
        let messages = changes(Some(&before), &after);
        let [holds] = &messages[..] else {
            panic!("{messages:?}");
        };
        assert!(!holds.is_full);
        assert_eq!(holds.added, after[..2]);
        assert_eq!(holds.removed, [before[0].node.clone()]);
        assert!(changes(Some(&after), &after).is_empty());
        let empty = changes(None, &[]);
        assert!(empty.len() == 1 && empty[0].is_full && empty[0].added.is_empty());
        assert!(!empty[0].has_more);
    }

    #[test]
    fn long_lists_are_messages_that_fit() {
        let list: Vec<_> = (0..1000).map(|number| held_node(number, 255)).collect();
        let full = changes(None, &list);
        let gone = changes(Some(&list), &[]);
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
}
