//! Exchange of what all servers agree on, next to the API server. Each end of a connection announces
//! a digest of its orders about nodes and of its CA, at the start and after each change, with its
//! clock, which it announces regularly. When the
//! digests of the orders differ, each end fetches those of the other: an order that one server knows
//! reaches all that are connected to it. Nothing is forgotten by this way.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, mpsc, watch};
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::order::NodeOrder;
use tunnel_proto::wire::peer::{CaDigest, PEER_MESSAGE_MAX, PeerMessage, StateDigest, StatePart};

use super::Peers;
use super::agreed::{AgreedState, digest_of};
use super::link::LinkError;
use crate::routing::clock::ClockReading;

impl Peers {
    /// Replaces the orders that other servers learn, including those that connect later. The orders
    /// are ordered by node.
    pub fn set_orders(&self, nodes: Vec<NodeOrder>) {
        let orders = digest_of(&nodes);
        self.agreed.send_if_modified(|agreed| {
            let is_changed = agreed.digest.orders != orders;
            if is_changed {
                agreed.digest.version += 1;
                agreed.digest.orders = orders;
                agreed.orders = nodes.into();
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

    /// Sets the hash of this server's configuration.
    pub fn set_configuration(&self, hash: [u8; 32]) {
        self.agreed.send_if_modified(|agreed| {
            let is_changed = agreed.digest.configuration != Some(hash);
            agreed.digest.configuration = Some(hash);
            is_changed
        });
    }

    /// Returns the hashes of the configurations of this server and of the others that announced one.
    pub fn configurations(&self) -> (Option<[u8; 32]>, BTreeMap<ReplicaId, [u8; 32]>) {
        let own = self.agreed.borrow().digest.configuration;
        let others = self.announced(|digest| digest.configuration).into_iter();
        let others = others.filter_map(|(replica, hash)| Some((replica, hash??)));
        (own, others.collect())
    }

    /// Returns every other server that this server dials, or that is connected, with what it
    /// announced of its CA. `None` means that the server has announced nothing, so that its CA is
    /// unknown.
    pub fn announced_cas(&self) -> BTreeMap<ReplicaId, Option<CaDigest>> {
        self.announced(|digest| digest.ca)
    }

    /// Returns every other server as [`Self::announced_cas`] does, with whether it has announced
    /// exactly these orders, which are ordered by node.
    pub fn holders_of(&self, orders: &[NodeOrder]) -> BTreeMap<ReplicaId, bool> {
        let own = digest_of(orders);
        let others = self.announced(|digest| digest.orders == own).into_iter();
        others
            .map(|(replica, is_same)| (replica, is_same == Some(true)))
            .collect()
    }

    /// Returns the digest of the orders that another server announced last, while it is connected.
    pub fn announced_orders(&self, replica: &ReplicaId) -> Option<[u8; 32]> {
        let state = self.state.lock();
        let digest = state.announced.get(replica)?.digest?;
        Some(digest.orders)
    }

    /// Returns the clocks of the connected servers, as they last announced them.
    pub(crate) fn clocks(&self) -> Vec<(ReplicaId, ClockReading)> {
        let state = self.state.lock();
        let clocks = state.announced.iter();
        clocks
            .filter_map(|(replica, announced)| Some((replica.clone(), announced.clock?)))
            .collect()
    }

    fn announced<T>(&self, select: impl Fn(StateDigest) -> T) -> BTreeMap<ReplicaId, Option<T>> {
        let state = self.state.lock();
        let others: BTreeSet<_> = state.peers.keys().chain(state.announced.keys()).collect();
        let others = others.into_iter().map(|replica| {
            let announced = state.announced.get(replica);
            let digest = announced.and_then(|announced| announced.digest);
            (replica.clone(), digest.map(&select))
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
        let announced = &mut peers.state.lock().announced;
        announced.entry(replica.clone()).or_default().connections += 1;
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
        let announced = &mut self.peers.state.lock().announced;
        if let Some(announced) = announced.get_mut(&self.replica) {
            announced.digest = Some(*digest);
            announced.clock = digest.clock.map(ClockReading::new);
        }
        let own = self.peers.agreed.borrow().digest.orders;
        if self.fetch.is_due(digest.orders, own) {
            self.due.fetch.notify_one();
        }
    }

    /// Handles a question for this server's orders.
    pub(super) fn asked(&self) {
        self.due.answer.notify_one();
    }

    /// Handles a part of the answer to a question of this server. Returns the orders in it.
    pub(super) fn receive(&mut self, part: StatePart) -> Result<Vec<NodeOrder>, LinkError> {
        if self.fetch.received(&part)? {
            self.due.fetch.notify_one();
        }
        Ok(part.orders)
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let servers = &mut self.peers.state.lock().announced;
        if let Some(announced) = servers.get_mut(&self.replica) {
            announced.connections -= 1;
            if announced.connections == 0 {
                servers.remove(&self.replica);
            }
        }
    }
}

/// When to fetch the orders of the other server: once for each digest that it announces and
/// that is not this server's, one at a time.
#[derive(Debug, Default)]
struct Fetch {
    /// The digest that was last asked for.
    asked: Option<[u8; 32]>,
    /// Orders that the answer may still have, while it is awaited.
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
            .and_then(|left| left.checked_sub(part.orders.len()));
        let Some(left) = left else {
            return Err(LinkError::protocol("orders that were not asked for"));
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
        if sent.replace(state.digest) != Some(state.digest) {
            let digest = StateDigest {
                clock: Some(SystemTime::now()),
                ..state.digest
            };
            if (outbox.send(PeerMessage::StateDigest(digest)).await).is_err() {
                return pending().await;
            }
        }
        let messages = tokio::select! {
            changed = agreed.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                continue;
            }
            () = sleep_coalesced(CLOCK_INTERVAL) => {
                sent = None;
                continue;
            }
            () = due.fetch.notified() => vec![PeerMessage::StateFetch],
            () = due.answer.notified() => answer_messages(&state.orders),
        };
        for message in messages {
            if outbox.send(message).await.is_err() {
                return pending().await;
            }
        }
    }
}

/// Returns the messages with all orders, at least one.
fn answer_messages(orders: &[NodeOrder]) -> Vec<PeerMessage> {
    let mut parts: Vec<_> = (orders.chunks(ORDERS_PER_MESSAGE))
        .take(FETCHED_MAX / ORDERS_PER_MESSAGE)
        .map(|orders| StatePart {
            orders: orders.to_vec(),
            has_more: true,
        })
        .collect();
    match parts.last_mut() {
        Some(last) => last.has_more = false,
        None => parts.push(StatePart::default()),
    }
    parts.into_iter().map(PeerMessage::StatePart).collect()
}

/// Interval at which a server announces its clock.
const CLOCK_INTERVAL: Duration = Duration::from_secs(15);
/// Orders in one message, with the longest names and 67 bytes for the numbers and lengths.
const ORDERS_PER_MESSAGE: usize = PEER_MESSAGE_MAX / (253 + 67);
/// Maximum number of orders of one answer. A server stores fewer of the others.
const FETCHED_MAX: usize = 20_000;

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use tunnel_proto::wire::control::Message as _;
    use tunnel_proto::wire::order::Order;

    use super::*;

    fn answer_with(count: usize, has_more: bool) -> StatePart {
        let order = NodeOrder {
            node: "x".parse().unwrap(),
            order: Order::default(),
        };
        StatePart {
            orders: vec![order; count],
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
        // What this server knows in addition keeps the digests apart.
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
    fn any_number_of_orders_is_messages_that_fit_and_end() {
        let orders = |count: usize| -> Vec<_> {
            let name =
                |number: usize| format!("n{number:06}{}", ".long-label-of-a-node".repeat(11));
            let orders = (0..count).map(|number| NodeOrder {
                node: name(number).parse().unwrap(),
                order: Order {
                    counter: u64::MAX,
                    is_revoked: true,
                    at: u64::MAX,
                    generation: u64::MAX,
                    reissued_at: u64::MAX,
                    ends_at: u64::MAX,
                },
            });
            orders.collect()
        };
        for count in [0, 1, ORDERS_PER_MESSAGE, ORDERS_PER_MESSAGE + 1, 1000] {
            let messages = answer_messages(&orders(count));
            let mut total = 0;
            for (number, message) in (1..).zip(&messages) {
                let PeerMessage::StatePart(part) = message else {
                    panic!("{message:?}");
                };
                total += part.orders.len();
                assert_eq!(part.has_more, number < messages.len(), "{count}");
                message.encode(&mut BytesMut::new()).unwrap();
            }
            assert_eq!(total, count);
        }
        let most = answer_messages(&vec![orders(1).remove(0); FETCHED_MAX + 5000]);
        assert!(most.len() * ORDERS_PER_MESSAGE <= FETCHED_MAX);
    }
}
