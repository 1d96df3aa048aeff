//! The servers of this installation: the source of their addresses, and the condition that reports
//! servers without a connection, and those that agents do not learn of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tunnel_process::name_list::NameList;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::ReplicaId;

use super::authority::Authority;
use super::context::ServerContext;
use crate::cluster::{OwnMembership, follow_peers};
use crate::routing::peers::{PeerAddress, PeerState, Peers};

/// Returns the servers of this installation: those of `--peer`, or in a cluster those of the
/// headless Service. The list may have this server, and a list of flags never changes, so that its
/// sender is gone. Sets how `authority` finds out whether it is known which servers there are.
pub(super) fn membership(
    authority: &mut Authority,
    context: &ServerContext,
) -> watch::Receiver<Arc<[PeerAddress]>> {
    let (settings, cluster_handle) = (&context.config.peers, &authority.cluster_handle);
    let kubernetes = context.config.kubernetes.as_ref();
    let is_static = settings.listen.is_none() || !settings.peers.is_empty();
    match (kubernetes, cluster_handle) {
        (Some(kubernetes), Some(cluster_handle)) if !is_static && !kubernetes.single_replica => {
            let own = OwnMembership {
                replica: context.peers.own().clone(),
                members: context.peers.members(),
            };
            let (servers, unknown) = follow_peers(
                kubernetes,
                cluster_handle,
                own,
                &context.store,
                &context.shutdown,
            );
            authority.unknown_servers = unknown;
            servers
        }
        _ => watch::channel(settings.peers.clone().into()).1,
    }
}

/// Reports a condition while this server has no connection to some of the others, or agents do not
/// receive all servers and addresses. Without `has_peers` nothing changes after the start.
pub(super) fn report_unconnected(peers: Arc<Peers>, has_peers: bool, context: &ServerContext) {
    let readiness = context.readiness.clone();
    context.shutdown.spawn_service(async move {
        let mut unconnected = Unconnected::default();
        loop {
            let condition = unconnected.condition(&links(&peers), Instant::now());
            let left_out = peers.left_out().condition();
            let lines = condition.into_iter().chain(left_out);
            readiness.report_conditions(LABEL, lines.chain(peers.used_twice()).collect());
            if !has_peers {
                return;
            }
            sleep_coalesced(POLL).await;
        }
    });
}

/// Returns each other server with whether it is connected.
fn links(peers: &Peers) -> BTreeMap<ReplicaId, bool> {
    let status = peers.status().into_iter();
    let links = status.map(|peer| {
        let is_connected = match peer.state {
            PeerState::Connected | PeerState::Leaving => true,
            PeerState::Connecting => false,
        };
        (peer.id, is_connected)
    });
    links.collect()
}

/// Servers without a connection, with the time of the first observation.
#[derive(Debug, Default)]
struct Unconnected(BTreeMap<ReplicaId, Instant>);

impl Unconnected {
    /// Returns the condition, or `None` while each of the `links` has been without a connection for
    /// less than [`REPORT_AFTER`].
    fn condition(&mut self, links: &BTreeMap<ReplicaId, bool>, now: Instant) -> Option<String> {
        self.0.retain(|id, _since| links.get(id) == Some(&false));
        for (id, is_connected) in links {
            if !is_connected {
                self.0.entry(id.clone()).or_insert(now);
            }
        }
        let overdue = (self.0.iter()).filter(|(_, since)| now - **since >= REPORT_AFTER);
        let names: NameList = overdue.map(|(id, _)| id).collect();
        let (connected, all) = (links.len() - self.0.len(), links.len());
        (!names.is_empty()).then(|| format!("{connected} of {all} connected, none to {names}"))
    }
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "peers";
const POLL: Duration = Duration::from_secs(2);
/// Longer than a pod takes from its address to its listeners, in most cases.
const REPORT_AFTER: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use tunnel_process::name_list::NAMES_SHOWN_MAX;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn server_without_a_connection_is_reported_after_a_while_until_it_is_back_or_gone() {
        let start = Instant::now();
        let links = |links: &[(&str, bool)]| -> BTreeMap<ReplicaId, bool> {
            let links = links.iter();
            links
                .map(|(id, is_connected)| (id.parse().unwrap(), *is_connected))
                .collect()
        };
        let mut unconnected = Unconnected::default();
        let line = "2 of 3 connected, none to b";
        for (seconds, b, condition) in [
            (0, Some(false), None),
            (29, Some(false), None),
            (30, Some(false), Some(line)),
            (90, Some(false), Some(line)),
            (91, Some(true), None),
            (92, Some(false), None),
            (121, Some(false), None),
            (122, Some(false), Some(line)),
            (123, None, None),
        ] {
            let mut all = vec![("a", true), ("c", true)];
            all.extend(b.map(|is_connected| ("b", is_connected)));
            let now = start + Duration::from_secs(seconds);
            let found = unconnected.condition(&links(&all), now);
            assert_eq!(found.as_deref(), condition, "{seconds}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn condition_names_a_few_of_many_servers() {
        let ids = (0..60).map(|number| format!("s-{number}").parse().unwrap());
        let links = ids.map(|id| (id, false)).collect();
        let mut unconnected = Unconnected::default();
        let start = Instant::now();
        assert_eq!(unconnected.condition(&links, start), None);
        let condition = unconnected.condition(&links, start + REPORT_AFTER).unwrap();
        assert!(condition.starts_with("0 of 60 connected"), "{condition}");
        assert_eq!(condition.matches("s-").count(), NAMES_SHOWN_MAX);
    }
}
