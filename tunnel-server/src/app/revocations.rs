//! Orders about nodes that servers exchange over their connections. The servers of a cluster share a
//! Secret, too: either way is enough to revoke a node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::warn;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry::LogRateLimit;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::order::NodeOrder;

use super::context::ServerContext;
use crate::routing::peers::{OnOrders, Peers};
use tunnel_ca::revocation::Revocations;

/// Announces the orders that this server knows to the others. Returns the function that receives
/// theirs.
pub(super) fn exchange(revocations: &Arc<Revocations>, context: &ServerContext) -> OnOrders {
    announce(
        revocations.clone(),
        context.peers.clone(),
        &context.shutdown,
    );
    let announced = Arc::new(Announced::default());
    let (nodes, routes) = (context.nodes.clone(), context.routes.clone());
    // What another server says that it holds is no node here.
    let is_node =
        move |name: &NodeName| nodes.knows(name) || routes.load().known_by_name(name).is_ok();
    merge(
        revocations.clone(),
        announced.clone(),
        Arc::new(is_node),
        &context.shutdown,
    );
    Box::new(move |replica, orders| announced.add(replica, orders))
}

/// Announces all orders at the start and after each change. An order that another server announced is
/// announced too, because not every server is connected to every other one; it changes nothing where
/// it is known.
fn announce(revocations: Arc<Revocations>, peers: Arc<Peers>, shutdown: &Shutdown) {
    let others = peers.clone();
    revocations
        .confirm_with(move |orders| others.holders_of(orders).values().any(|is_same| *is_same));
    let others = peers.clone();
    revocations.announced_with(move |replica| others.announced_orders(replica));
    let mut changed = revocations.changed();
    shutdown.spawn_service(async move {
        let mut announced = 0;
        loop {
            if let Some((changes, orders)) = revocations.changed_since(announced) {
                announced = changes;
                peers.set_orders(orders);
            }
            let pause = if revocations.confirm_by_peers() {
                CONFIRMATION_POLL
            } else {
                POLL
            };
            tokio::select! {
                _ = changed.changed() => {}
                () = sleep_coalesced(pause) => {}
            }
        }
    });
}

/// Puts in force what other servers announced. It is written later, so that a disk or an API server
/// that does not answer delays nothing.
fn merge(
    revocations: Arc<Revocations>,
    announced: Arc<Announced>,
    is_node: Arc<dyn Fn(&NodeName) -> bool + Send + Sync>,
    shutdown: &Shutdown,
) {
    shutdown.spawn_service(async move {
        loop {
            announced.added.notified().await;
            let received = announced.take();
            let (merging, is_node) = (revocations.clone(), is_node.clone());
            // The document may have changed, and is parsed then.
            let merged = tokio::task::spawn_blocking(move || {
                for (replica, orders) in received {
                    merging.merge(&replica, orders, &*is_node);
                }
            });
            if let Err(error) = merged.await {
                warn!(%error, "task that merges orders about nodes failed");
            }
        }
    });
}

/// Orders that other servers announced and that are not merged yet.
#[derive(Debug, Default)]
struct Announced {
    by_server: Mutex<BTreeMap<ReplicaId, Vec<NodeOrder>>>,
    added: Notify,
}

impl Announced {
    fn add(&self, replica: &ReplicaId, mut orders: Vec<NodeOrder>) {
        let mut by_server = self.by_server.lock();
        let waiting = by_server.entry(replica.clone()).or_default();
        let room = WAITING_MAX.saturating_sub(waiting.len());
        let ignored = orders.len().saturating_sub(room);
        orders.truncate(room);
        waiting.append(&mut orders);
        drop(by_server);
        static IGNORED: LogRateLimit = LogRateLimit::new("orders of another server");
        if ignored > 0 && IGNORED.admit() {
            warn!(peer = %replica, ignored, "another server announces too many orders about nodes");
        }
        self.added.notify_one();
    }

    fn take(&self) -> BTreeMap<ReplicaId, Vec<NodeOrder>> {
        std::mem::take(&mut *self.by_server.lock())
    }
}

/// Maximum number of orders of another server that wait to be merged: more than a Secret has room for.
const WAITING_MAX: usize = 20_000;
/// Interval at which changes by other processes are found.
const POLL: Duration = Duration::from_secs(5);
/// Interval at which own orders are compared with those of other servers until one has them.
const CONFIRMATION_POLL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::order::Order;

    use super::*;

    #[test]
    fn orders_wait_by_server_and_are_bounded() {
        let announced = Announced::default();
        let order = NodeOrder {
            node: "a".parse().unwrap(),
            order: Order::default(),
        };
        let [a, b]: [ReplicaId; 2] = ["a", "b"].map(|name| name.parse().unwrap());
        announced.add(&a, vec![order.clone(); WAITING_MAX - 1]);
        announced.add(&b, vec![order.clone()]);
        announced.add(&a, vec![order; 5]);
        let waiting = announced.take();
        assert_eq!(waiting[&a].len(), WAITING_MAX);
        assert_eq!(waiting[&b].len(), 1);
        assert!(announced.take().is_empty());
    }
}
