//! Known nodes, persisted across restarts: the nodes with a token or a certificate, and their
//! addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::ops::Not;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_proto::wire::label::Labels;
use tunnel_proto::wire::name::NodeName;
use tunnel_tables::VersionedMap;

use crate::data_dir::{DataDir, time_text, time_text_option, whole_seconds};
use crate::state_store::{OnDamage, RowChange, StateStore, Table};

/// The known nodes of a data directory. Changes apply in memory at once, and are on the disk soon
/// afterwards, at the latest after [`KnownNodes::save`].
#[derive(Debug)]
pub struct KnownNodes {
    store: StateStore,
    nodes: Mutex<NodeMap>,
    /// Labels of nodes that were forgotten. Locked after `nodes`.
    forgotten: Mutex<BTreeMap<NodeName, Labels>>,
    version: watch::Sender<u64>,
}

/// The persisted state of one known node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KnownNode {
    /// Addresses that an operator assigned to the node, in order. Addresses that an agent claims
    /// are not included.
    pub addresses: Vec<IpAddr>,
    /// Time at which the node became known.
    #[serde(with = "time_text")]
    pub first_seen: SystemTime,
    /// Time of the last connection or of its last sign of life, with a resolution of about ten
    /// minutes.
    #[serde(with = "time_text_option")]
    pub last_seen: Option<SystemTime>,
    /// End of the certificate that the node used for its last connection or was issued since.
    #[serde(with = "time_text_option")]
    pub certificate_not_after: Option<SystemTime>,
    /// Issue time of the certificate that the node used for its last connection, if the local CA
    /// issued it. A certificate that was issued since may not have arrived.
    #[serde(with = "time_text_option")]
    pub certificate_issued: Option<SystemTime>,
    /// How the node's agent enrolled last, or that it connected last with the certificate of its kubelet.
    /// `None` for a certificate of an operator or from another server.
    pub enrollment: Option<EnrollmentKind>,
    /// Labels that an operator gave the node with its join token.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: Labels,
    /// The node was forgotten. Its labels stay, since rules may name them and its certificate may be
    /// valid.
    #[serde(default, skip_serializing_if = "Not::not")]
    is_forgotten: bool,
}

impl KnownNode {
    /// Returns whether the node has been named to this server, as by a token, and no agent of it has
    /// enrolled or connected so far.
    pub fn is_pending(&self) -> bool {
        self.last_seen.is_none()
            && self.enrollment.is_none()
            && self.certificate_not_after.is_none()
    }
}

tunnel_process::named! {
    /// The credential by which an agent proved its node when it enrolled, with its name for tables.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "camelCase")]
    pub enum EnrollmentKind: label {
        /// Join token of this server or of another one.
        JoinToken = "join token",
        /// ServiceAccount token of a Pod on the node.
        ServiceAccount = "service account",
        /// Client certificate of the node's kubelet, which the agent uses instead of its own.
        Kubelet = "kubelet",
    }
}

/// Known nodes by name. Clones share structure.
pub type NodeMap = VersionedMap<NodeName, KnownNode>;

impl KnownNodes {
    /// Opens the known nodes of a data directory. Damaged rows are set aside.
    ///
    /// # Errors
    /// Returns an error with the path if the store cannot be opened or read: addresses that an operator
    /// has assigned are nowhere else.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        let store = dir.store(OnDamage::Stop)?;
        let (mut nodes, mut forgotten) = (NodeMap::default(), BTreeMap::new());
        for (name, node) in store.load_readable::<KnownNode>(Table::Nodes, "")? {
            // The names were names when they were written.
            let Ok(name) = name.parse() else {
                continue;
            };
            if node.is_forgotten {
                forgotten.insert(name, node.labels);
            } else {
                nodes.insert(name, node);
            }
        }
        Ok(Self {
            store,
            nodes: Mutex::new(nodes),
            forgotten: Mutex::new(forgotten),
            version: watch::Sender::new(0),
        })
    }

    /// Adds a node. `addresses` replace the previous addresses of the node. Without `addresses`,
    /// the previous addresses remain.
    pub fn record(&self, node: &NodeName, addresses: &[IpAddr]) {
        self.record_token(node, addresses, &Labels::new());
    }

    /// Adds a node with what its join token says. Addresses and labels replace the previous ones, unless
    /// they are empty.
    pub fn record_token(&self, node: &NodeName, addresses: &[IpAddr], labels: &Labels) {
        let canonical: BTreeSet<IpAddr> = addresses.iter().map(IpAddr::to_canonical).collect();
        self.change(node, |known| {
            let mut known = known.unwrap_or_else(|| self.new_node(node, SystemTime::now()));
            if !canonical.is_empty() {
                known.addresses = canonical.into_iter().collect();
            }
            if !labels.is_empty() {
                known.labels.clone_from(labels);
            }
            Some(known)
        });
    }

    /// Adds a node with labels, unless it is known or was forgotten with labels: an operator may have
    /// replaced them.
    pub fn add(&self, node: &NodeName, labels: &Labels) {
        self.change(node, |known| {
            Some(known.unwrap_or_else(|| {
                let mut new = self.new_node(node, SystemTime::now());
                if new.labels.is_empty() {
                    new.labels.clone_from(labels);
                }
                new
            }))
        });
    }

    /// Adds a node, and records how its agent enrolled.
    pub fn record_enrollment(&self, node: &NodeName, enrollment: EnrollmentKind) {
        self.change(node, |known| {
            let known = known.unwrap_or_else(|| self.new_node(node, SystemTime::now()));
            Some(KnownNode {
                enrollment: Some(enrollment),
                ..known
            })
        });
    }

    /// Records that a node connected with a certificate of its own, which was issued at `issued` and ends
    /// at `not_after`.
    pub fn record_connection(&self, node: &NodeName, issued: SystemTime, not_after: SystemTime) {
        self.record_connection_at(node, [issued, not_after], false, SystemTime::now());
    }

    /// Records that a node connected with the certificate of its kubelet.
    pub fn record_kubelet(&self, node: &NodeName, issued: SystemTime, not_after: SystemTime) {
        self.record_connection_at(node, [issued, not_after], true, SystemTime::now());
    }

    fn record_connection_at(
        &self,
        node: &NodeName,
        [issued, not_after]: [SystemTime; 2],
        is_kubelet: bool,
        now: SystemTime,
    ) {
        let [issued, not_after, now] = [issued, not_after, now].map(whole_seconds);
        self.change(node, |known| {
            let known = known.unwrap_or_else(|| self.new_node(node, now));
            let is_recent = known
                .last_seen
                .and_then(|last| now.duration_since(last).ok())
                .is_some_and(|age| age < LAST_SEEN_RESOLUTION);
            // The agent may have enrolled at another server since it used the kubelet's certificate.
            let enrollment = if is_kubelet {
                Some(EnrollmentKind::Kubelet)
            } else {
                (known.enrollment).filter(|kind| *kind != EnrollmentKind::Kubelet)
            };
            let is_known = known.certificate_not_after == Some(not_after)
                && known.certificate_issued == Some(issued)
                && known.enrollment == enrollment;
            if is_recent && is_known {
                return Some(known);
            }
            Some(KnownNode {
                last_seen: Some(now),
                certificate_not_after: Some(not_after),
                certificate_issued: Some(issued),
                enrollment,
                ..known
            })
        });
    }

    /// Records that a certificate which ends at `not_after` was issued to a known node.
    pub fn record_renewal(&self, node: &NodeName, not_after: SystemTime) {
        self.change(node, |known| {
            Some(KnownNode {
                certificate_not_after: Some(whole_seconds(not_after)),
                ..known?
            })
        });
    }

    /// Records the last sign of life of a known node, with the resolution of the persisted time.
    pub fn record_last_seen(&self, node: &NodeName, last_seen: SystemTime) {
        let last_seen = whole_seconds(last_seen);
        self.change(node, |known| {
            let mut known = known?;
            let is_recent = known
                .last_seen
                .is_some_and(|last| last_seen < last + LAST_SEEN_RESOLUTION);
            if !is_recent {
                known.last_seen = Some(last_seen);
            }
            Some(known)
        });
    }

    /// Removes a node but its labels. Returns whether the node was known.
    pub fn forget(&self, node: &NodeName) -> bool {
        let mut was_known = false;
        self.change(node, |known| {
            was_known = known.is_some();
            None
        });
        was_known
    }

    pub fn knows(&self, node: &NodeName) -> bool {
        self.nodes.lock().contains_key(node)
    }

    /// Returns what is known of a node.
    pub fn get(&self, node: &NodeName) -> Option<KnownNode> {
        self.nodes.lock().get(node).cloned()
    }

    pub fn snapshot(&self) -> NodeMap {
        self.nodes.lock().clone()
    }

    /// Returns a receiver that is notified whenever names, addresses or labels change.
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

    /// Replaces a node by what `change` makes of it, `None` for none. Costs the logarithm of the number
    /// of nodes.
    fn change(&self, node: &NodeName, change: impl FnOnce(Option<KnownNode>) -> Option<KnownNode>) {
        let mut nodes = self.nodes.lock();
        let before = nodes.get(node).cloned();
        let after = change(before.clone());
        if after == before {
            return;
        }
        let routed = |node: Option<KnownNode>| node.map(|node| (node.addresses, node.labels));
        let is_routed_otherwise = routed(before.clone()) != routed(after.clone());
        let row = match (&before, &after) {
            (Some(known), None) if !known.labels.is_empty() => {
                let labels = known.labels.clone();
                self.forgotten.lock().insert(node.clone(), labels.clone());
                let forgotten = KnownNode {
                    labels,
                    is_forgotten: true,
                    ..KnownNode::new(known.first_seen)
                };
                RowChange::of(node.as_str(), Some(&forgotten))
            }
            (_, after) => {
                self.forgotten.lock().remove(node);
                RowChange::of(node.as_str(), after.as_ref())
            }
        };
        match after {
            Some(known) => nodes.insert(node.clone(), known),
            None => drop(nodes.remove(node)),
        }
        // Under the lock, so that an older state never replaces a newer one.
        self.store.change(Table::Nodes, vec![row]);
        drop(nodes);
        if is_routed_otherwise {
            self.version.send_modify(|version| *version += 1);
        }
    }

    /// Returns a node that becomes known, with the labels that it had when it was forgotten.
    fn new_node(&self, node: &NodeName, now: SystemTime) -> KnownNode {
        let labels = self.forgotten.lock().get(node).cloned();
        KnownNode {
            labels: labels.unwrap_or_default(),
            ..KnownNode::new(now)
        }
    }
}

impl KnownNode {
    fn new(now: SystemTime) -> Self {
        Self {
            addresses: Vec::new(),
            first_seen: whole_seconds(now),
            last_seen: None,
            certificate_not_after: None,
            certificate_issued: None,
            enrollment: None,
            labels: Labels::new(),
            is_forgotten: false,
        }
    }
}

/// A reconnect within this time does not change the persisted state.
const LAST_SEEN_RESOLUTION: Duration = Duration::from_secs(10 * 60);

#[cfg(test)]
mod tests;
