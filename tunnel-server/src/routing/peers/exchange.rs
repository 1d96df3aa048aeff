//! Exchange of what all servers agree on, next to the API server. Each end of a connection announces
//! a digest of its revocations and of its CA, at the start and after each change. When the digests of
//! the revocations differ, each end fetches those of the other: a revocation that one server knows
//! reaches all that are connected to it. Nothing is forgotten by this way.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;

use tokio::sync::{Notify, mpsc, watch};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{
    PEER_MESSAGE_MAX, PeerMessage, RevokedNode, StateDigest, StatePart,
};

use super::Peers;
use super::agreed::{AgreedState, CaDigest, digest_of};
use super::link::LinkError;

impl Peers {
    /// Replaces the revocations that other servers learn, including those that connect later.
    pub fn set_revoked(&self, mut nodes: Vec<RevokedNode>) {
        nodes.sort_unstable_by(|one, other| one.node.cmp(&other.node));
        let revocations = digest_of(&nodes);
        self.agreed.send_if_modified(|agreed| {
            let is_changed = agreed.digest.revocations != revocations;
            if is_changed {
                agreed.digest.version += 1;
                agreed.digest.revocations = revocations;
                agreed.revoked = nodes.into();
            }
            is_changed
        });
    }

    /// Sets the digest of this server's CA.
    pub fn set_ca(&self, ca: CaDigest) {
        self.agreed.send_if_modified(|agreed| {
            let is_changed = agreed.digest.ca != ca;
            agreed.digest.ca = ca;
            is_changed
        });
    }

    /// Returns every other server that this server dials, or that is connected, with what it
    /// announced of its CA. `None` means that the server has announced nothing, so that its CA is
    /// unknown.
    #[must_use]
    pub fn announced_cas(&self) -> BTreeMap<ReplicaId, Option<CaDigest>> {
        let state = self.state.lock();
        let others: BTreeSet<_> = state.peers.keys().chain(state.cas.keys()).collect();
        let others = others.into_iter().map(|replica| {
            let digest = state
                .cas
                .get(replica)
                .and_then(|announced| announced.digest);
            (replica.clone(), digest)
        });
        others.collect()
    }
}

/// The exchange over one connection.
pub(super) struct Exchange {
    peers: Arc<Peers>,
    replica: ReplicaId,
    due: Arc<DueMessages>,
    fetch: Fetch,
}

/// Messages that [`send_state`] sends in addition to digests.
#[derive(Debug, Default)]
struct DueMessages {
    fetch: Notify,
    answer: Notify,
}

impl Exchange {
    /// Begins the exchange with another server, and returns the future that sends this end's
    /// messages to the queue of the connection.
    pub(super) fn begin(
        peers: &Arc<Peers>,
        replica: &ReplicaId,
        outbox: mpsc::Sender<PeerMessage>,
    ) -> (Self, impl Future<Output = Infallible> + use<>) {
        let cas = &mut peers.state.lock().cas;
        cas.entry(replica.clone()).or_default().connections += 1;
        let due = Arc::<DueMessages>::default();
        let sending = send_state(peers.agreed.subscribe(), due.clone(), outbox);
        let exchange = Self {
            peers: peers.clone(),
            replica: replica.clone(),
            due,
            fetch: Fetch::default(),
        };
        (exchange, sending)
    }

    /// Handles what the other server announced.
    pub(super) fn digest(&mut self, digest: &StateDigest) {
        let cas = &mut self.peers.state.lock().cas;
        if let Some(announced) = cas.get_mut(&self.replica) {
            announced.digest = Some(digest.ca);
        }
        let own = self.peers.agreed.borrow().digest.revocations;
        if self.fetch.is_due(digest.revocations, own) {
            self.due.fetch.notify_one();
        }
    }

    /// Handles a question for this server's revocations.
    pub(super) fn asked(&self) {
        self.due.answer.notify_one();
    }

    /// Handles a part of the answer to a question of this server. Returns the revocations in it.
    pub(super) fn receive(&mut self, part: StatePart) -> Result<Vec<RevokedNode>, LinkError> {
        if self.fetch.received(&part)? {
            self.due.fetch.notify_one();
        }
        Ok(part.revoked)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let cas = &mut self.peers.state.lock().cas;
        if let Some(announced) = cas.get_mut(&self.replica) {
            announced.connections -= 1;
            if announced.connections == 0 {
                cas.remove(&self.replica);
            }
        }
    }
}

/// When to fetch the revocations of the other server: once for each digest that it announces and
/// that is not this server's, one at a time.
#[derive(Debug, Default)]
struct Fetch {
    /// The digest that was last asked for.
    asked: Option<[u8; 32]>,
    /// Revocations that the answer may still have, while it is awaited.
    left: Option<usize>,
    /// The digest that was announced while an answer was awaited.
    next: Option<[u8; 32]>,
}

impl Fetch {
    /// Returns whether to ask now.
    fn is_due(&mut self, announced: [u8; 32], own: [u8; 32]) -> bool {
        if self.left.is_some() {
            self.next = Some(announced);
            return false;
        }
        let is_due = announced != own && self.asked != Some(announced);
        if is_due {
            self.asked = Some(announced);
            self.left = Some(FETCHED_MAX);
        }
        is_due
    }

    /// Counts a part of the answer. Returns whether to ask again now.
    fn received(&mut self, part: &StatePart) -> Result<bool, LinkError> {
        let left = self
            .left
            .and_then(|left| left.checked_sub(part.revoked.len()));
        let Some(left) = left else {
            return Err(LinkError::protocol("revocations that were not asked for"));
        };
        if part.has_more {
            self.left = Some(left);
            return Ok(false);
        }
        self.left = None;
        let next = self.next.take();
        let asked = self.asked;
        Ok(next.is_some_and(|next| self.is_due(next, asked.unwrap_or_default())))
    }
}

/// Sends the digests of this server, its questions and its answers to the queue of a connection.
async fn send_state(
    mut agreed: watch::Receiver<AgreedState>,
    due: Arc<DueMessages>,
    outbox: mpsc::Sender<PeerMessage>,
) -> Infallible {
    let mut sent = None;
    loop {
        let state = agreed.borrow_and_update().clone();
        if sent.replace(state.digest) != Some(state.digest)
            && (outbox.send(PeerMessage::StateDigest(state.digest)).await).is_err()
        {
            return pending().await;
        }
        let messages = tokio::select! {
            changed = agreed.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                continue;
            }
            () = due.fetch.notified() => vec![PeerMessage::StateFetch],
            () = due.answer.notified() => answer_messages(&state.revoked),
        };
        for message in messages {
            if outbox.send(message).await.is_err() {
                return pending().await;
            }
        }
    }
}

/// Returns the messages with all revocations, at least one.
fn answer_messages(revoked: &[RevokedNode]) -> Vec<PeerMessage> {
    let mut parts: Vec<_> = (revoked.chunks(REVOKED_PER_MESSAGE))
        .take(FETCHED_MAX / REVOKED_PER_MESSAGE)
        .map(|revoked| StatePart {
            revoked: revoked.to_vec(),
            has_more: true,
        })
        .collect();
    match parts.last_mut() {
        Some(last) => last.has_more = false,
        None => parts.push(StatePart::default()),
    }
    parts.into_iter().map(PeerMessage::StatePart).collect()
}

/// Revocations in one message, with the longest names and 32 bytes for the time and lengths.
const REVOKED_PER_MESSAGE: usize = PEER_MESSAGE_MAX / (253 + 32);
/// Maximum number of revocations of one answer. A server stores no more of another one.
const FETCHED_MAX: usize = 100_000;

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use bytes::BytesMut;

    use super::*;

    fn answer_with(count: usize, has_more: bool) -> StatePart {
        let revoked = RevokedNode {
            node: "x".parse().unwrap(),
            at: UNIX_EPOCH,
        };
        StatePart {
            revoked: vec![revoked; count],
            has_more,
        }
    }

    #[test]
    fn each_digest_that_differs_is_fetched_once_and_one_at_a_time() {
        let [own, first, second] = [[0; 32], [1; 32], [2; 32]];
        let mut fetch = Fetch::default();
        assert!(!fetch.is_due(own, own), "nothing differs");
        assert!(fetch.is_due(first, own));
        assert!(!fetch.is_due(second, own), "an answer is awaited");
        assert!(!fetch.received(&answer_with(2, true)).unwrap());
        assert!(
            fetch.received(&answer_with(1, false)).unwrap(),
            "the next one"
        );
        assert!(!fetch.received(&answer_with(0, false)).unwrap());
        // What this server knows in addition, or has lifted, keeps the digests apart.
        assert!(!fetch.is_due(second, own));
        assert!(fetch.is_due(first, own));
    }

    #[test]
    fn answers_that_nobody_asked_for_or_that_do_not_end_are_violations() {
        let mut fetch = Fetch::default();
        assert!(fetch.received(&answer_with(0, false)).is_err());
        assert!(fetch.is_due([1; 32], [0; 32]));
        let whole = FETCHED_MAX / 1000;
        for _ in 0..whole {
            assert!(!fetch.received(&answer_with(1000, true)).unwrap());
        }
        let error = fetch.received(&answer_with(1, true)).unwrap_err();
        assert!(error.is_violation(), "{error}");
    }

    #[test]
    fn any_number_of_revocations_is_messages_that_fit_and_end() {
        let revoked = |count: usize| -> Vec<_> {
            let name =
                |number: usize| format!("n{number:06}{}", ".long-label-of-a-node".repeat(11));
            let revoked = (0..count).map(|number| RevokedNode {
                node: name(number).parse().unwrap(),
                at: UNIX_EPOCH + Duration::from_secs(1 << 40),
            });
            revoked.collect()
        };
        for count in [0, 1, REVOKED_PER_MESSAGE, REVOKED_PER_MESSAGE + 1, 1000] {
            let messages = answer_messages(&revoked(count));
            let mut total = 0;
            for (number, message) in (1..).zip(&messages) {
                let PeerMessage::StatePart(part) = message else {
                    panic!("{message:?}");
                };
                total += part.revoked.len();
                assert_eq!(part.has_more, number < messages.len(), "{count}");
                message.encode(&mut BytesMut::new()).unwrap();
            }
            assert_eq!(total, count);
        }
        let most = answer_messages(&vec![revoked(1).remove(0); FETCHED_MAX + 5000]);
        assert!(most.len() * REVOKED_PER_MESSAGE <= FETCHED_MAX);
    }
}
