//! Known nodes, persisted across restarts: the nodes with a token or a certificate, and their
//! addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_proto::wire::name::NodeName;

use crate::routing::routes::{NodeLabels, RouteNode};
use crate::store::data_dir::{DataDir, time_text, time_text_option, whole_seconds};
use crate::store::state_store::{OnDamage, RowChange, StateStore, Table};

/// The known nodes of a data directory. Changes apply in memory at once, and are on the disk soon
/// afterwards, at the latest after [`KnownNodes::save`].
#[derive(Debug)]
pub struct KnownNodes {
    store: StateStore,
    state: Mutex<State>,
    version: watch::Sender<u64>,
}

/// The persisted state of one known node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KnownNode {
    /// Addresses that an operator assigned to the node, in order. Addresses that an agent claims
    /// are not included.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// Time at which the node became known.
    #[serde(with = "time_text")]
    pub first_seen: SystemTime,
    /// Time of the last connection or of its last sign of life, with a resolution of about ten
    /// minutes.
    #[serde(default, with = "time_text_option")]
    pub last_seen: Option<SystemTime>,
    /// End of the certificate that the node used for its last connection or was issued since.
    #[serde(default, with = "time_text_option")]
    pub certificate_not_after: Option<SystemTime>,
    /// Issue time of the certificate that the node used for its last connection, if the local CA
    /// issued it. A certificate that was issued since may not have arrived.
    #[serde(default, with = "time_text_option")]
    pub certificate_issued: Option<SystemTime>,
    /// How the node's agent enrolled last. `None` for a certificate of an operator, and for nodes
    /// that a version without this field recorded.
    #[serde(default)]
    pub enrollment: Option<EnrollmentKind>,
}

/// The credential by which an agent proved its node when it enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EnrollmentKind {
    /// Join token of this server or of another one.
    JoinToken,
    /// ServiceAccount token of a Pod on the node.
    ServiceAccount,
    /// Client certificate of the node's kubelet, which the agent uses instead of its own.
    Kubelet,
}

impl EnrollmentKind {
    /// Returns the name for tables.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::JoinToken => "join token",
            Self::ServiceAccount => "service account",
            Self::Kubelet => "kubelet",
        }
    }
}

pub type NodeMap = BTreeMap<NodeName, KnownNode>;

impl KnownNodes {
    /// Opens the known nodes of a data directory. Damaged rows are set aside.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be opened or read: addresses that an operator
    /// has assigned are nowhere else.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        let store = dir.store(OnDamage::Stop)?;
        let mut nodes = NodeMap::new();
        let loaded = store.load(Table::Nodes, "")?;
        store.skip_later(Table::Nodes, &loaded.later);
        store.set_aside(Table::Nodes, loaded.damaged);
        for (name, node) in loaded.values {
            // The names were names when they were written.
            if let Ok(name) = name.parse() {
                nodes.insert(name, node);
            }
        }
        Ok(Self {
            store,
            state: Mutex::new(State {
                nodes,
                shared: None,
            }),
            version: watch::Sender::new(0),
        })
    }

    /// Adds a node. `addresses` replace the previous addresses of the node. Without `addresses`,
    /// the previous addresses remain.
    pub fn record(&self, node: &NodeName, addresses: &[IpAddr]) {
        let canonical: BTreeSet<IpAddr> = addresses.iter().map(IpAddr::to_canonical).collect();
        self.change(node, |state| {
            let is_new = !state.nodes.contains_key(node);
            let known = entry(&mut state.nodes, node, SystemTime::now());
            let canonical: Vec<IpAddr> = canonical.into_iter().collect();
            if !canonical.is_empty() && known.addresses != canonical {
                known.addresses = canonical;
                return NodeChange::Routes;
            }
            if is_new {
                NodeChange::Routes
            } else {
                NodeChange::None
            }
        });
    }

    /// Adds a node, and records how its agent enrolled.
    pub fn record_enrollment(&self, node: &NodeName, enrollment: EnrollmentKind) {
        self.change(node, |state| {
            let is_new = !state.nodes.contains_key(node);
            let known = entry(&mut state.nodes, node, SystemTime::now());
            let previous = known.enrollment.replace(enrollment);
            if is_new {
                NodeChange::Routes
            } else if previous == Some(enrollment) {
                NodeChange::None
            } else {
                NodeChange::Details
            }
        });
    }

    /// Records that a node connected with a certificate that was issued at `issued` and ends at
    /// `not_after`.
    pub fn record_connection(&self, node: &NodeName, issued: SystemTime, not_after: SystemTime) {
        self.record_connection_at(node, [issued, not_after], SystemTime::now());
    }

    fn record_connection_at(
        &self,
        node: &NodeName,
        [issued, not_after]: [SystemTime; 2],
        now: SystemTime,
    ) {
        let [issued, not_after, now] = [issued, not_after, now].map(whole_seconds);
        self.change(node, |state| {
            let is_new = !state.nodes.contains_key(node);
            let known = entry(&mut state.nodes, node, now);
            let is_recent = known
                .last_seen
                .and_then(|last| now.duration_since(last).ok())
                .is_some_and(|age| age < LAST_SEEN_RESOLUTION);
            let is_known = known.certificate_not_after == Some(not_after)
                && known.certificate_issued == Some(issued);
            if is_recent && is_known {
                return NodeChange::None;
            }
            known.last_seen = Some(now);
            known.certificate_not_after = Some(not_after);
            known.certificate_issued = Some(issued);
            if is_new {
                NodeChange::Routes
            } else {
                NodeChange::Details
            }
        });
    }

    /// Records that a certificate which ends at `not_after` was issued to a known node.
    pub fn record_renewal(&self, node: &NodeName, not_after: SystemTime) {
        let not_after = whole_seconds(not_after);
        self.change(node, |state| match state.nodes.get_mut(node) {
            Some(known) if known.certificate_not_after != Some(not_after) => {
                known.certificate_not_after = Some(not_after);
                NodeChange::Details
            }
            Some(_) | None => NodeChange::None,
        });
    }

    /// Records the last sign of life of a known node, with the resolution of the persisted time.
    pub fn record_last_seen(&self, node: &NodeName, last_seen: SystemTime) {
        let last_seen = whole_seconds(last_seen);
        self.change(node, |state| {
            let Some(known) = state.nodes.get_mut(node) else {
                return NodeChange::None;
            };
            let is_recent = known
                .last_seen
                .is_some_and(|last| last_seen < last + LAST_SEEN_RESOLUTION);
            if is_recent {
                return NodeChange::None;
            }
            known.last_seen = Some(last_seen);
            NodeChange::Details
        });
    }

    /// Removes a node. Returns whether the node was known.
    pub fn forget(&self, node: &NodeName) -> bool {
        let mut was_known = false;
        self.change(node, |state| {
            was_known = state.nodes.remove(node).is_some();
            if was_known {
                NodeChange::Routes
            } else {
                NodeChange::None
            }
        });
        was_known
    }

    #[must_use]
    pub fn knows(&self, node: &NodeName) -> bool {
        self.state.lock().nodes.contains_key(node)
    }

    /// Returns what is known of a node.
    #[must_use]
    pub fn get(&self, node: &NodeName) -> Option<KnownNode> {
        self.state.lock().nodes.get(node).cloned()
    }

    /// Returns the first `limit` nodes whose names are after `after`, in order.
    #[must_use]
    pub fn names_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<NodeName> {
        let state = self.state.lock();
        let nodes = state.nodes.range((after, Bound::Unbounded));
        nodes.take(limit).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the nodes with their addresses, for routing.
    #[must_use]
    pub fn routes(&self) -> Vec<RouteNode> {
        let known = self.snapshot();
        let routes = known.iter().map(|(name, node)| RouteNode {
            name: name.clone(),
            hostname: None,
            addresses: node.addresses.clone(),
            kubelet_port: None,
            is_edge: true,
            labels: NodeLabels::new(),
        });
        routes.collect()
    }

    #[must_use]
    pub fn snapshot(&self) -> Arc<NodeMap> {
        let mut state = self.state.lock();
        if let Some(shared) = &state.shared {
            return shared.clone();
        }
        let shared = Arc::new(state.nodes.clone());
        state.shared = Some(shared.clone());
        shared
    }

    /// Returns a receiver that is notified whenever names or addresses change.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Waits until all changes are on the disk, for at most 5 s. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error with the path if they cannot be written. They are written when that is
    /// possible.
    pub fn save(&self) -> io::Result<()> {
        self.store.flush(Table::Nodes)
    }

    fn change(&self, node: &NodeName, change: impl FnOnce(&mut State) -> NodeChange) {
        let mut state = self.state.lock();
        let changed = change(&mut state);
        if changed == NodeChange::None {
            return;
        }
        state.shared = None;
        let row = match state.nodes.get(node) {
            Some(known) => RowChange::upsert(node.as_str(), known),
            None => RowChange::remove(node.as_str()),
        };
        // Under the lock, so that an older state never replaces a newer one.
        self.store.change(Table::Nodes, vec![row]);
        drop(state);
        if changed == NodeChange::Routes {
            self.version.send_modify(|version| *version += 1);
        }
    }
}

#[derive(Debug, Default)]
struct State {
    nodes: NodeMap,
    /// The last snapshot of `nodes` that was returned. `None` after a change.
    shared: Option<Arc<NodeMap>>,
}

/// The effect of a change on readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeChange {
    None,
    /// Only times or the kind of the enrollment have changed.
    Details,
    /// Names or addresses have changed.
    Routes,
}

fn entry<'a>(nodes: &'a mut NodeMap, node: &NodeName, now: SystemTime) -> &'a mut KnownNode {
    nodes.entry(node.clone()).or_insert_with(|| KnownNode {
        addresses: Vec::new(),
        first_seen: whole_seconds(now),
        last_seen: None,
        certificate_not_after: None,
        certificate_issued: None,
        enrollment: None,
    })
}

/// A reconnect within this time does not change the persisted state.
const LAST_SEEN_RESOLUTION: Duration = Duration::from_secs(10 * 60);

#[cfg(test)]
mod tests;
