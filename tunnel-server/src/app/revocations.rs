//! Revocations that servers exchange over their connections. The servers of a cluster share a
//! document, too: either way is enough to revoke a node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::{info, warn};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::timers::sleep_coalesced;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::peer::RevokedNode;

use super::context::ServerContext;
use crate::ca::revocation::{NODES_MAX, Revocations};
use crate::routing::peers::{OnRevoked, Peers};

/// Announces the revocations of this server to the others. Returns the function that receives
/// theirs.
pub(super) fn exchange(revocations: &Arc<Revocations>, context: &ServerContext) -> OnRevoked {
    announce(
        revocations.clone(),
        context.peers.clone(),
        &context.shutdown,
    );
    let announced = Arc::new(Announced::default());
    merge(revocations.clone(), announced.clone(), &context.shutdown);
    Box::new(move |nodes| announced.add(nodes, SystemTime::now()))
}

/// Announces all revocations at the start and after each change. A revocation that another server
/// announced is announced too, because not every server is connected to every other one; it changes
/// nothing where it is known.
fn announce(revocations: Arc<Revocations>, peers: Arc<Peers>, shutdown: &Shutdown) {
    let mut changed = revocations.changed();
    shutdown.spawn_service(async move {
        let mut announced = 0;
        loop {
            if let Some((changes, nodes)) = revocations.changed_since(announced) {
                announced = changes;
                peers.set_revoked(nodes);
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = sleep_coalesced(POLL) => {}
            }
        }
    });
}

/// Puts in force what other servers announced. It is written later, so that a disk or an API server
/// that does not answer delays nothing.
fn merge(revocations: Arc<Revocations>, announced: Arc<Announced>, shutdown: &Shutdown) {
    shutdown.spawn_service(async move {
        loop {
            announced.added.notified().await;
            let nodes = announced.take();
            let merging = revocations.clone();
            // The document may have changed, and is parsed then.
            let merged = tokio::task::spawn_blocking(move || merging.merge(nodes)).await;
            match merged {
                Ok(true) => info!("revocations of another server are in force"),
                Ok(false) => {}
                Err(error) => warn!(%error, "task that merges revocations failed"),
            }
        }
    });
}

/// Revocations that other servers announced and that are not merged yet.
#[derive(Debug, Default)]
struct Announced {
    nodes: Mutex<BTreeMap<NodeName, SystemTime>>,
    added: Notify,
}

impl Announced {
    /// Adds revocations. A time in the far future is ignored, because no certificate that is issued
    /// until then would be valid.
    fn add(&self, revoked: Vec<RevokedNode>, now: SystemTime) {
        let mut ignored = 0;
        let mut nodes = self.nodes.lock();
        for RevokedNode { node, at } in revoked {
            let is_full = nodes.len() >= NODES_MAX && !nodes.contains_key(&node);
            if at > now + AHEAD_MAX || is_full {
                ignored += 1;
                continue;
            }
            let latest = nodes.entry(node).or_insert(at);
            *latest = at.max(*latest);
        }
        drop(nodes);
        static IGNORED: LogRateLimit = LogRateLimit::new("unusable revocations");
        if ignored > 0 && IGNORED.admit() {
            warn!(
                ignored,
                "revocations of another server are in the far future or too many, and are ignored; check its clock"
            );
        }
        self.added.notify_one();
    }

    fn take(&self) -> Vec<RevokedNode> {
        let nodes = std::mem::take(&mut *self.nodes.lock());
        let nodes = nodes.into_iter();
        nodes.map(|(node, at)| RevokedNode { node, at }).collect()
    }
}

/// Interval at which changes by other processes are found.
const POLL: Duration = Duration::from_secs(5);
/// Upper bound for the difference between the clocks of two servers.
const AHEAD_MAX: Duration = Duration::from_secs(24 * 60 * 60);

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn far_future_hides_no_revocation_and_the_latest_one_counts() {
        let announced = Announced::default();
        let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let revoked = |name: &str, at| RevokedNode {
            node: name.parse().unwrap(),
            at,
        };
        let earlier = now - Duration::from_secs(5);
        announced.add(vec![revoked("a", now), revoked("a", earlier)], now);
        let far = now + 2 * AHEAD_MAX;
        announced.add(vec![revoked("a", far), revoked("b", far)], now);
        announced.add(vec![revoked("c", earlier)], now);
        let expected = [revoked("a", now), revoked("c", earlier)];
        assert_eq!(announced.take(), expected);
        assert!(announced.take().is_empty());
    }
}
