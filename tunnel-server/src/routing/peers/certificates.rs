//! The certificates of agents that the other servers know, for the rotation of the CA: asked over the
//! connections that this server dialed, when an operator asks.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time::{Instant, timeout_at};
use tracing::debug;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_certificate::{CertificatesPart, NodeCertificate};
use tunnel_proto::wire::peer::{PEER_MESSAGE_MAX, PeerMessage};

use super::Peers;
use super::link::{FetchError, Link, PendingAsk};

impl Peers {
    /// Asks the servers that this server has dialed for the certificates of the agents that they know.
    /// Merges each answer, or what it lacks by `deadline`, into `merged` with `add`, outside the
    /// runtime's threads. If the future is dropped, what was merged is lost.
    ///
    /// # Errors
    /// When `add` panicked, or the runtime stops.
    pub async fn fetch_certificates<T: Send + 'static>(
        &self,
        deadline: Instant,
        mut merged: T,
        add: fn(&mut T, ReplicaId, Result<Vec<NodeCertificate>, FetchError>),
    ) -> Result<T, JoinError> {
        let links: Vec<Arc<Link>> = {
            let state = self.state.lock();
            let links = state.peers.values().filter_map(|peer| peer.link.clone());
            links.collect()
        };
        let answers = stream::iter(links).map(|link| async move {
            let answer = link.certificates(deadline).await;
            (link.replica.clone(), answer)
        });
        let mut answers = std::pin::pin!(answers.buffer_unordered(FETCHED_AT_ONCE));
        while let Some((replica, answer)) = answers.next().await {
            if let Err(error) = &answer {
                debug!(peer = %replica, %error, "cannot fetch the certificates of agents");
            }
            let merging = spawn_blocking(move || {
                add(&mut merged, replica, answer);
                merged
            });
            merged = merging.await?;
        }
        Ok(merged)
    }

    /// Returns the nodes that nobody holds and that a server held which is gone or no longer expected.
    /// `connected` are this server's own. Nodes that only now become such may be left out: for as long as
    /// that matters, [`Self::agents_move_for`] says that agents move.
    pub fn gone_nodes(&self, connected: &BTreeSet<NodeName>) -> BTreeSet<NodeName> {
        self.gone_nodes_in_parts(connected, GONE_AT_ONCE)
    }

    /// Looks at `at_once` nodes at a time, since the lock of the directory delays streams.
    pub(super) fn gone_nodes_in_parts(
        &self,
        connected: &BTreeSet<NodeName>,
        at_once: usize,
    ) -> BTreeSet<NodeName> {
        let mut gone = BTreeSet::new();
        let mut after: Option<NodeName> = None;
        loop {
            let mut state = self.state.lock();
            let directory = &mut state.directory;
            let bound = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let part = directory.unresolved_after(bound, at_once).into_iter();
            let part: Vec<NodeName> = part.cloned().collect();
            after = part.last().filter(|_| part.len() == at_once).cloned();
            for node in part {
                if connected.contains(&node) {
                    directory.resolve(&node);
                } else if !directory.holds(&node) {
                    gone.insert(node);
                }
            }
            drop(state);
            if after.is_none() {
                return gone;
            }
        }
    }

    /// Forgets that a server which is gone held the node.
    pub fn forget_gone(&self, node: &NodeName) {
        self.state.lock().directory.resolve(node);
    }

    /// Returns for how long agents may still be on their way from one server to another, if a server was
    /// connected or lost a moment ago.
    pub fn agents_move_for(&self) -> Option<Duration> {
        let changed_at = self.state.lock().links_changed_at?;
        let left = (changed_at + AGENTS_MOVE).checked_duration_since(Instant::now())?;
        (left > Duration::ZERO).then_some(left)
    }
}

impl Link {
    async fn certificates(&self, deadline: Instant) -> Result<Vec<NodeCertificate>, FetchError> {
        let (answer, answered) = oneshot::channel();
        let asked = self.asks.try_send(PendingAsk::Certificates(answer));
        if asked.is_err() {
            return Err(FetchError::NoAnswer);
        }
        let deadline = deadline.min(Instant::now() + FETCH_TIMEOUT);
        match timeout_at(deadline, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(FetchError::NoAnswer),
        }
    }
}

/// Questions for certificates whose answers are not complete.
#[derive(Debug)]
pub(super) struct CertificateFetches {
    nodes_max: usize,
    last_id: u64,
    pending: HashMap<u64, Fetch>,
}

#[derive(Debug)]
struct Fetch {
    nodes: Vec<NodeCertificate>,
    answer: oneshot::Sender<Result<Vec<NodeCertificate>, FetchError>>,
}

impl CertificateFetches {
    /// `nodes_max`: nodes of one answer that are stored (`limits.directoryNodes`).
    pub(super) fn new(nodes_max: usize) -> Self {
        Self {
            nodes_max,
            last_id: 0,
            pending: HashMap::new(),
        }
    }

    /// Stores a question and returns its message.
    pub(super) fn add(
        &mut self,
        answer: oneshot::Sender<Result<Vec<NodeCertificate>, FetchError>>,
    ) -> PeerMessage {
        self.pending.retain(|_, fetch| !fetch.answer.is_closed());
        self.last_id += 1;
        let nodes = Vec::new();
        self.pending.insert(self.last_id, Fetch { nodes, answer });
        PeerMessage::CertificatesFetch(self.last_id)
    }

    /// Stores a part of an answer, unless that is too large.
    pub(super) fn receive(&mut self, part: CertificatesPart) {
        let Some(mut fetch) = self.pending.remove(&part.id) else {
            return;
        };
        fetch.nodes.extend(part.nodes);
        if fetch.answer.is_closed() {
            return;
        }
        if fetch.nodes.len() > self.nodes_max {
            let _too_late = fetch.answer.send(Err(FetchError::TooManyNodes));
        } else if part.has_more {
            self.pending.insert(part.id, fetch);
        } else {
            let _too_late = fetch.answer.send(Ok(fetch.nodes));
        }
    }
}

/// Sends the answer to a question to the queue of a connection.
pub(super) async fn answer(
    id: u64,
    nodes: Vec<NodeCertificate>,
    outbox: &mpsc::Sender<PeerMessage>,
) {
    let mut part = CertificatesPart {
        id,
        ..CertificatesPart::default()
    };
    let mut bytes = 0;
    for node in nodes {
        bytes += node.size_max();
        if bytes > MESSAGE_BYTES {
            bytes = node.size_max();
            let full = CertificatesPart {
                id,
                nodes: std::mem::take(&mut part.nodes),
                has_more: true,
            };
            if (outbox.send(PeerMessage::CertificatesPart(full)).await).is_err() {
                return;
            }
        }
        part.nodes.push(node);
    }
    let _connection_is_gone = outbox.send(PeerMessage::CertificatesPart(part)).await;
}

/// Time for the whole answer of a server: 250,000 nodes are 10 MB.
const FETCH_TIMEOUT: Duration = Duration::from_secs(6);
/// Answers that are received at once, since each of them is stored before it is merged.
const FETCHED_AT_ONCE: usize = 8;
/// Time for which agents may be on their way after a server was lost or connected: twice that in which a
/// node comes back whose only session was with a killed server.
const AGENTS_MOVE: Duration = Duration::from_secs(30);
/// Nodes of each server that is gone that are looked at while streams wait.
const GONE_AT_ONCE: usize = 1024;
/// Upper bound for the bytes of the entries in one message.
const MESSAGE_BYTES: usize = PEER_MESSAGE_MAX - 256;

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use tunnel_proto::wire::control::Message as _;

    use super::*;

    fn nodes(count: usize) -> Vec<NodeCertificate> {
        let name = |number: usize| format!("n{number:06}{}", ".long-label-of-a-node".repeat(11));
        let names = (0..count).map(|number| name(number).parse().unwrap());
        names.map(NodeCertificate::unknown).collect()
    }

    async fn messages(id: u64, count: usize) -> Vec<PeerMessage> {
        let (outbox, mut sent) = mpsc::channel(1000);
        answer(id, nodes(count), &outbox).await;
        drop(outbox);
        let mut messages = Vec::new();
        while let Some(message) = sent.recv().await {
            messages.push(message);
        }
        messages
    }

    #[tokio::test]
    async fn answer_of_any_size_is_messages_that_fit_and_arrives_whole() {
        for count in [0, 1, 109, 110, 111, 2000] {
            let mut fetches = CertificateFetches::new(2000);
            let (answer, mut answered) = oneshot::channel();
            assert_eq!(fetches.add(answer), PeerMessage::CertificatesFetch(1));
            for message in messages(1, count).await {
                assert!(
                    answered.try_recv().is_err(),
                    "{count}: before the last part"
                );
                message.encode(&mut BytesMut::new()).unwrap();
                let PeerMessage::CertificatesPart(part) = message else {
                    panic!("{message:?}");
                };
                fetches.receive(part);
            }
            assert_eq!(answered.try_recv().unwrap(), Ok(nodes(count)));
        }
    }

    #[tokio::test]
    async fn answer_that_is_too_large_or_that_nobody_asked_for_is_not_stored() {
        let mut fetches = CertificateFetches::new(1999);
        let (answer, mut answered) = oneshot::channel();
        fetches.add(answer);
        for message in messages(7, 1)
            .await
            .into_iter()
            .chain(messages(1, 2000).await)
        {
            let PeerMessage::CertificatesPart(part) = message else {
                panic!("{message:?}");
            };
            fetches.receive(part);
        }
        assert_eq!(answered.try_recv(), Ok(Err(FetchError::TooManyNodes)));
        assert!(fetches.pending.is_empty());
    }
}
