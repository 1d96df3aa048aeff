//! Detection of forwarding loops. The server asks each resolver for a random name. If a query for
//! that name returns to the server, the resolver forwards queries back, directly or through others.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::op::{Edns, Message, Query};
use hickory_proto::rr::{Name, RecordType};
use parking_lot::{Mutex, MutexGuard};
use tracing::info;
use tunnel_proto::wire::name::NodeName;

use super::Names;
use super::answer::Transport;
use super::upstream;

/// Probes in flight and their results.
#[derive(Debug, Default)]
pub(super) struct LoopDetector {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Names of the probes, with the resolver that received each one.
    probes: HashMap<String, SocketAddr>,
    /// Resolvers whose probes returned to this server.
    returned: BTreeSet<SocketAddr>,
    looping: BTreeSet<SocketAddr>,
}

impl LoopDetector {
    /// Returns `true` if this query is a returned probe. The server then stops using its resolver.
    pub(super) fn is_own_probe(&self, name: &Name) -> bool {
        let mut state = self.state();
        if state.probes.is_empty() {
            return false;
        }
        let Some(resolver) = state
            .probes
            .get(&name.to_ascii().to_ascii_lowercase())
            .copied()
        else {
            return false;
        };
        state.returned.insert(resolver);
        state.looping.insert(resolver);
        true
    }

    pub(super) fn without_loops(&self, resolvers: &[SocketAddr]) -> Vec<SocketAddr> {
        let state = self.state();
        let mut addresses = resolvers.to_vec();
        addresses.retain(|resolver| !state.looping.contains(resolver));
        addresses
    }

    /// Probes each resolver once. Returns when each resolver has answered, or after one second.
    pub(super) async fn probe(&self, names: &Names) {
        let probes = probe_names(names);
        let by_name = probes
            .iter()
            .map(|(resolver, name)| (name.to_ascii(), *resolver));
        self.state().probes = by_name.collect();
        let asking = probes.into_iter().map(async |(resolver, name)| {
            let question = question(name);
            upstream::resolve(&[resolver], &question, Transport::Udp, WINDOW).await
        });
        futures_util::future::join_all(asking).await;
        let mut state = self.state();
        state.probes.clear();
        let returned = std::mem::take(&mut state.returned);
        for resolver in state.looping.difference(&returned) {
            info!(%resolver, "resolver no longer forwards queries back to this server");
        }
        state.looping = returned;
    }

    /// Returns a line for an operator about each resolver that forwards queries back.
    pub(super) fn conditions(&self) -> Vec<String> {
        let state = self.state();
        let looping = state.looping.iter();
        looping
            .map(|resolver| {
                format!(
                    "resolver {resolver} forwards queries back to this server and is not asked; set another one with \
                     --dns-upstream, or turn forwarding off with --dns-upstream off (in a pod: dnsPolicy Default, so that \
                     the host's resolvers are used and not the cluster's)"
                )
            })
            .collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// Returns a probe name for each resolver. The resolver of a cluster is only probed with names of
/// its domain, because it may legitimately forward all other names to this server.
fn probe_names(names: &Names) -> Vec<(SocketAddr, Name)> {
    let default_resolvers = names
        .default_resolvers
        .iter()
        .map(|resolver| (*resolver, None));
    let clusters = names.clusters.iter().flat_map(|cluster| {
        let domain = Some(&cluster.domain);
        cluster
            .resolvers
            .iter()
            .map(move |resolver| (*resolver, domain))
    });
    let name = |domain: Option<&NodeName>| {
        let (first, second): (u64, u64) = rand::random();
        let end = domain.map_or_else(String::new, |domain| format!("svc.{domain}."));
        Name::from_ascii(format!("{first:016x}.{second:016x}.{end}")).ok()
    };
    default_resolvers
        .chain(clusters)
        .filter_map(|(resolver, domain)| Some((resolver, name(domain)?)))
        .collect()
}

pub(super) fn question(name: Name) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(name, RecordType::TXT));
    message.set_edns(Edns::new());
    message
}

/// A looped probe returns at once, because this server answers at once.
const WINDOW: Duration = Duration::from_secs(1);
