//! The servers of the cluster: watches the EndpointSlices of the servers' headless Service, and
//! publishes the address and the zone of each server. The last list is persisted for a start without the API
//! server. A server that leaves the slices stays in the list while it is connected, since a connection is
//! evidence. An empty list is a mistake while this server runs, and removes none.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::Api;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::info;
use tunnel_process::name_list::NameList;
use tunnel_process::networks::{effective_ip, forbidden_kind};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{ReplicaId, ZoneName};

use super::client::{ClusterHandle, Connection};
use super::objects::{Object, PEER_PORT, PEER_PORT_NAME, SERVICE_NAME_LABEL};
use super::watches::{config, follow};
use crate::cluster::conditions::{Condition, Conditions};
use crate::config::KubernetesSettings;
use crate::routing::peers::PeerAddress;
use tunnel_store::state_store::{RowSet, StateStore, Table, follow as follow_value};

/// This server among the servers of the cluster.
#[derive(Debug)]
pub struct OwnMembership {
    pub replica: ReplicaId,
    /// This server, and the others that are connected or were a moment ago.
    pub members: watch::Receiver<Arc<[Member]>>,
}

/// Returns the reason why it is not known which servers there are, if so.
pub type UnknownMembership = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Follows the servers of the cluster, this one included. The receiver has the persisted list until
/// the API server has answered.
pub(crate) fn follow_peers(
    settings: &KubernetesSettings,
    cluster: &ClusterHandle,
    own: OwnMembership,
    store: &StateStore,
    shutdown: &Shutdown,
) -> (watch::Receiver<Arc<[PeerAddress]>>, UnknownMembership) {
    let Connection {
        client, namespace, ..
    } = &cluster.connection;
    let mut persisted = RowSet::load(store, Table::Cluster, PREFIX);
    let (published, peers) = watch::channel(Arc::<[PeerAddress]>::from(restore(&persisted)));
    shutdown.spawn_service(follow_value(peers.clone(), move |list| {
        let list = list.iter();
        let rows = list.map(|peer| (peer.id.to_string(), row(peer)));
        persisted.replace(rows.collect());
    }));
    let slices = Api::<EndpointSlice>::namespaced(client.clone(), namespace);
    let service = &settings.names.peer_service;
    let only = config().labels(&format!("{SERVICE_NAME_LABEL}={service}"));
    let context = cluster.watch_context(Object::Peers);
    let mut slice_store = SliceStore::default();
    let (observed, listed) = watch::channel(None);
    shutdown.spawn_service(follow(slices, only, context, move |events| {
        if slice_store.apply(events) {
            observed.send_replace(Some(Membership::of(&slice_store.observed)));
        }
    }));
    let publisher = ListPublisher {
        own,
        service: format!("{namespace}/{service}"),
        published,
        conditions: cluster.conditions.clone(),
    };
    shutdown.spawn_service(publisher.run(listed.clone()));
    let conditions = cluster.conditions.clone();
    let unknown = move || {
        let failure = conditions.of(Condition::Watching(Object::Peers)).pop();
        let is_listed = listed.borrow().is_some();
        failure.or_else(|| (!is_listed).then(|| NOT_LISTED.to_owned()))
    };
    (peers, Arc::new(unknown))
}

/// Publishes the list of servers, and reports what is wrong with the slices.
struct ListPublisher {
    own: OwnMembership,
    /// Namespace and name of the servers' headless Service.
    service: String,
    published: watch::Sender<Arc<[PeerAddress]>>,
    conditions: Conditions,
}

impl ListPublisher {
    /// Publishes the list again whenever the slices or the connections change.
    async fn run(mut self, mut listed: watch::Receiver<Option<Membership>>) {
        // Time since which this server is missing from the slices.
        let mut missing_since = None;
        loop {
            let now = Instant::now();
            let listed_now = listed.borrow_and_update().clone();
            if let Some(membership) = listed_now {
                let is_listed = membership.has(&self.own.replica);
                missing_since = (!is_listed).then(|| missing_since.unwrap_or(now));
                let is_overdue = missing_since.is_some_and(|since| now - since >= MISSING_AFTER);
                self.publish(membership, is_overdue);
            }
            let report_at = missing_since.map(|since| since + MISSING_AFTER);
            let report_at = report_at.filter(|at| *at > now);
            let is_gone = tokio::select! {
                changed = listed.changed() => changed.is_err(),
                changed = self.own.members.changed() => changed.is_err(),
                () = sleep_until(report_at.unwrap_or(now)), if report_at.is_some() => false,
            };
            if is_gone {
                return;
            }
        }
    }

    fn publish(&mut self, membership: Membership, is_missing: bool) {
        let Membership { peers, mut ignored } = membership;
        let members = self.own.members.borrow_and_update().clone();
        let is_empty = peers.is_empty();
        let (peers, unlisted) = with_unlisted(peers, &self.published.borrow(), &members);
        if is_missing {
            ignored.push(format!(
                "this server, {}, is not in the EndpointSlices of Service {}: servers that start do not find it; check the \
                 Service and the labels of this Pod, or set --replica-name to the name of the Pod",
                self.own.replica, self.service
            ));
        }
        if !unlisted.is_empty() {
            let shown = NameList::of(&unlisted);
            let service = &self.service;
            ignored.push(if is_empty {
                format!("no server is in the EndpointSlices of Service {service}, so the known ones stay: {shown}")
            } else {
                format!(
                    "{} connected servers are not in the EndpointSlices of Service {service}: {shown}; they stay until their \
                     connections are lost",
                    unlisted.len()
                )
            });
        }
        self.conditions.set(Condition::PeerEndpoints, ignored);
        self.published.send_if_modified(|list| {
            let is_other = **list != *peers;
            if is_other {
                info!(servers = peers.len(), "servers of the cluster changed");
                *list = peers.into();
            }
            is_other
        });
    }
}

/// Adds the servers of the `current` list that are no longer listed and are connected, or all of them if
/// none is listed, and returns their names. A server that announced that it stops is not missed.
fn with_unlisted(
    mut listed: Vec<PeerAddress>,
    current: &[PeerAddress],
    members: &[Member],
) -> (Vec<PeerAddress>, Vec<ReplicaId>) {
    // The first member is this server.
    let connected = members.get(1..).unwrap_or_default();
    let missing = |peer: &&PeerAddress| {
        let member = connected.iter().find(|member| member.id == peer.id);
        let stays = member.map_or(listed.is_empty(), |member| !member.is_leaving);
        stays && !listed.iter().any(|other| other.id == peer.id)
    };
    let unlisted: Vec<_> = current.iter().filter(missing).cloned().collect();
    let names = unlisted.iter().map(|peer| peer.id.clone()).collect();
    listed.extend(unlisted);
    listed.sort_unstable_by(|one, other| one.id.cmp(&other.id));
    (listed, names)
}

/// The EndpointSlices as last observed, reduced to the servers in them.
#[derive(Debug, Default)]
struct SliceStore {
    observed: BTreeMap<String, SliceServers>,
    /// Slices of a list that is not complete.
    listing: BTreeMap<String, SliceServers>,
}

impl SliceStore {
    /// Applies events. Returns whether the observed slices may have changed.
    fn apply(&mut self, events: Vec<Event<EndpointSlice>>) -> bool {
        let mut is_changed = false;
        for event in events {
            match event {
                // The list so far holds until the new one is complete.
                Event::Init => {
                    self.listing.clear();
                    continue;
                }
                Event::InitApply(slice) => {
                    insert(&mut self.listing, &slice);
                    continue;
                }
                Event::InitDone => self.observed = std::mem::take(&mut self.listing),
                Event::Apply(slice) => insert(&mut self.observed, &slice),
                Event::Delete(slice) => {
                    let name = slice.metadata.name.unwrap_or_default();
                    self.observed.remove(&name);
                }
            }
            is_changed = true;
        }
        is_changed
    }
}

/// Stores what a slice says, unless there are too many slices.
fn insert(slices: &mut BTreeMap<String, SliceServers>, slice: &EndpointSlice) {
    let name = slice.metadata.name.clone().unwrap_or_default();
    if slices.len() < SLICES_MAX || slices.contains_key(&name) {
        slices.insert(name, SliceServers::of(slice));
    }
}

/// A server in an EndpointSlice.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SliceServer {
    address: SocketAddr,
    /// The zone of its host. `None` if the host has no label for it, or none that is valid.
    zone: Option<ZoneName>,
}

/// The servers in one EndpointSlice.
#[derive(Debug, Default)]
struct SliceServers {
    servers: Vec<(ReplicaId, SliceServer)>,
    /// The reasons why endpoints are ignored.
    ignored: Vec<String>,
}

impl SliceServers {
    fn of(slice: &EndpointSlice) -> Self {
        let port = port(slice);
        let mut reduced = Self::default();
        let endpoints = slice.endpoints.iter().filter(|one| is_running(one));
        for endpoint in endpoints.take(ENDPOINTS_MAX) {
            match server(endpoint, port) {
                Some(Ok(server)) => reduced.servers.push(server),
                Some(Err(reason)) if reduced.ignored.len() < IGNORED_MAX => {
                    reduced.ignored.push(reason);
                }
                Some(Err(_)) | None => {}
            }
        }
        reduced
    }
}

/// Returns the port of the servers for peers in this slice.
fn port(slice: &EndpointSlice) -> u16 {
    let mut named = (slice.ports.iter().flatten())
        .filter(|port| port.name.as_deref() == Some(PEER_PORT_NAME))
        .filter_map(|port| u16::try_from(port.port?).ok());
    named.find(|port| *port != 0).unwrap_or(PEER_PORT)
}

/// Returns whether the pod of an endpoint runs. The Service publishes addresses that are not ready,
/// so its endpoints are `ready` from the start of the pod to its end. With a Service that does not,
/// a pod counts while it is ready, and one that terminates for as long as it serves.
fn is_running(endpoint: &Endpoint) -> bool {
    let conditions = endpoint.conditions.as_ref();
    conditions.is_none_or(|conditions| {
        conditions.ready.unwrap_or(true) || conditions.serving == Some(true)
    })
}

/// Returns the name, the address and the zone of an endpoint's pod, or the reason why the endpoint is
/// ignored. Returns `None` for an endpoint that is not a pod.
fn server(endpoint: &Endpoint, port: u16) -> Option<Result<(ReplicaId, SliceServer), String>> {
    let target = endpoint.target_ref.as_ref()?;
    if target.kind.as_deref() != Some("Pod") {
        return None;
    }
    let name = target.name.as_deref().unwrap_or_default();
    let address = endpoint.addresses.first().map_or("", String::as_str);
    let zone = endpoint.zone.as_deref().and_then(|zone| zone.parse().ok());
    let checked = check(name, address, port);
    let checked = checked.map(|(id, address)| (id, SliceServer { address, zone }));
    Some(checked.map_err(|reason| {
        let shown: String = name.chars().take(SHOWN_MAX).collect();
        format!("{shown:?} is ignored: {reason}")
    }))
}

fn check(name: &str, address: &str, port: u16) -> Result<(ReplicaId, SocketAddr), String> {
    let id = (name.parse::<ReplicaId>()).map_err(|error| error.to_string())?;
    let ip = (address.parse::<IpAddr>()).map_err(|_syntax| "it has no IP address".to_owned())?;
    // Loopback is allowed. The name in the certificate of a server decides who it is.
    match forbidden_kind(effective_ip(ip)) {
        Some(kind) => Err(format!("{ip} is a {kind} address")),
        None => Ok((id, SocketAddr::new(ip.to_canonical(), port))),
    }
}

/// What follows from the observed slices.
#[derive(Debug, Clone)]
struct Membership {
    /// The servers in the order of their names.
    peers: Vec<PeerAddress>,
    /// The reasons why endpoints are ignored.
    ignored: Vec<String>,
}

impl Membership {
    fn has(&self, replica: &ReplicaId) -> bool {
        self.peers.iter().any(|peer| peer.id == *replica)
    }

    /// Derives the servers from the slices. A server may be in several of them: one for each family
    /// of addresses, and two while its endpoint moves. Its IPv4 address is preferred.
    fn of(slices: &BTreeMap<String, SliceServers>) -> Self {
        let mut ignored = Vec::new();
        let mut servers = BTreeMap::<&ReplicaId, SliceServer>::new();
        for (name, slice) in slices {
            let shown: String = name.chars().take(SHOWN_MAX).collect();
            let reasons = slice.ignored.iter();
            ignored.extend(reasons.map(|reason| format!("EndpointSlice {shown}: {reason}")));
            for (id, server) in &slice.servers {
                let lowest = servers.entry(id).or_insert_with(|| server.clone());
                if *server < *lowest {
                    *lowest = server.clone();
                }
            }
        }
        if slices.len() == SLICES_MAX {
            ignored.push(format!(
                "only {SLICES_MAX} EndpointSlices of the servers' Service are used"
            ));
        }
        let more = servers.len().saturating_sub(REPLICAS_MAX);
        if more > 0 {
            ignored.push(format!(
                "{more} servers are ignored, because an installation has at most {REPLICAS_MAX}; run fewer servers"
            ));
        }
        let peers = servers.into_iter().take(REPLICAS_MAX);
        let peers = peers.map(|(id, SliceServer { address, zone })| PeerAddress {
            id: id.clone(),
            address: address.to_string(),
            zone,
        });
        Self {
            peers: peers.collect(),
            ignored,
        }
    }
}

/// Returns the row of a server: its address, and behind a space its zone.
fn row(peer: &PeerAddress) -> String {
    match &peer.zone {
        Some(zone) => format!("{} {zone}", peer.address),
        None => peer.address.clone(),
    }
}

/// Returns the persisted servers whose rows are valid.
fn restore(persisted: &RowSet<String, String>) -> Vec<PeerAddress> {
    let rows = persisted.values().iter().take(REPLICAS_MAX);
    let peers = rows.filter_map(|(name, row)| {
        let mut parts = row.split(' ');
        Some(PeerAddress {
            id: name.parse().ok()?,
            address: parts.next()?.parse::<SocketAddr>().ok()?.to_string(),
            zone: parts.next().and_then(|zone| zone.parse().ok()),
        })
    });
    peers.collect()
}

const NOT_LISTED: &str = "the API server has not listed their EndpointSlices yet";
/// Time for which this server may be missing from the slices, as a Pod is that starts.
const MISSING_AFTER: Duration = Duration::from_secs(30);
/// Prefix of the rows with the address and the zone of each server, by its name.
const PREFIX: &str = "peer/";
/// Maximum number of slices that are used. The controller puts 100 endpoints into a slice, and
/// makes separate slices for each family, so that two are enough.
const SLICES_MAX: usize = 16;
/// Maximum number of endpoints of a slice that are used.
const ENDPOINTS_MAX: usize = 4 * REPLICAS_MAX;
/// Maximum number of ignored endpoints of a slice that are reported.
const IGNORED_MAX: usize = 8;
/// Maximum number of characters shown of a name.
const SHOWN_MAX: usize = 63;

#[cfg(test)]
mod tests;
