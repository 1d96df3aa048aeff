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
use tokio::sync::{Notify, watch};
use tracing::warn;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::name::NodeName;

use crate::routing::routes::{NodeLabels, RouteNode};
use crate::store::data_dir::{
    DataDir, FileStamp, SharedFile, time_text, time_text_option, whole_seconds,
};

/// The known nodes of a data directory. Changes apply in memory at once. [`KnownNodes::save`]
/// writes them to disk, and [`KnownNodes::start`] calls it soon after each relevant change.
#[derive(Debug)]
pub struct KnownNodes {
    file: SharedFile,
    state: Mutex<State>,
    /// Held while writing, so that an older state never replaces a newer one.
    writing: Mutex<()>,
    version: watch::Sender<u64>,
    dirty: Notify,
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
    /// Opens the known nodes of a data directory.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read or is damaged.
    pub fn open(dir: &DataDir) -> io::Result<Self> {
        let file = SharedFile::new(dir, dir.nodes());
        let mut state = State::default();
        if let Some(changed) = changed_file(&file, None)? {
            state.merge(changed);
        }
        Ok(Self {
            file,
            state: Mutex::new(state),
            writing: Mutex::default(),
            version: watch::Sender::new(0),
            dirty: Notify::new(),
        })
    }

    /// Starts a task that writes changes to disk soon after they occur, retries after a pause if a
    /// write failed, and writes once more when the drain begins.
    pub fn start(self: &Arc<Self>, shutdown: &Shutdown) {
        let nodes = self.clone();
        let drain = shutdown.drain().clone();
        shutdown.spawn_service(async move {
            let mut has_failed = false;
            loop {
                let is_draining = tokio::select! {
                    () = drain.cancelled() => true,
                    () = nodes.dirty.notified() => false,
                    () = tokio::time::sleep(SAVE_RETRY_DELAY), if has_failed => false,
                };
                if !is_draining {
                    // A site that reconnects causes many changes in a row.
                    tokio::select! {
                        () = drain.cancelled() => {}
                        () = tokio::time::sleep(SAVE_DEBOUNCE) => {}
                    }
                }
                let saving = nodes.clone();
                let saved = tokio::task::spawn_blocking(move || saving.save()).await;
                has_failed = !matches!(saved, Ok(Ok(())));
                match saved {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => warn!(%error, "cannot save the known nodes"),
                    Err(error) => warn!(%error, "task that saves the known nodes failed"),
                }
                if is_draining {
                    return;
                }
            }
        });
    }

    /// Adds a node. `addresses` replace the previous addresses of the node. Without `addresses`,
    /// the previous addresses remain.
    pub fn record(&self, node: &NodeName, addresses: &[IpAddr]) {
        let canonical: BTreeSet<IpAddr> = addresses.iter().map(IpAddr::to_canonical).collect();
        self.change(|state| {
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
        self.change(|state| {
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
        self.change(|state| {
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
        self.change(|state| match state.nodes.get_mut(node) {
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
        self.change(|state| {
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
        self.change(|state| {
            was_known = state.nodes.remove(node).is_some();
            if !was_known {
                return NodeChange::None;
            }
            state.forgotten.insert(node.clone());
            NodeChange::Routes
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

    /// Writes all changes to disk. Blocks the thread.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read or replaced.
    pub fn save(&self) -> io::Result<()> {
        let _writing = self.writing.lock();
        if !self.state.lock().is_dirty {
            return Ok(());
        }
        let _changing = self.file.lock()?;
        // Everybody needs the lock of the state, so the file is accessed without it.
        let stamp = self.state.lock().stamp;
        let changed = changed_file(&self.file, stamp)?;
        let (content, forgotten, has_more) = {
            let mut state = self.state.lock();
            let has_more = match changed {
                Some(changed) => state.merge(changed),
                None => false,
            };
            state.is_dirty = false;
            let forgotten = state.forgotten.clone();
            (KnownNodesFile::of(&state.nodes), forgotten, has_more)
        };
        let written = content.write(&self.file);
        let stamp = self.file.stamp();
        {
            let mut state = self.state.lock();
            match written {
                Ok(()) => {
                    state.stamp = stamp;
                    state.forgotten.retain(|node| !forgotten.contains(node));
                }
                Err(_) => state.is_dirty = true,
            }
        }
        if has_more {
            self.version.send_modify(|version| *version += 1);
        }
        written
    }

    fn change(&self, change: impl FnOnce(&mut State) -> NodeChange) {
        let changed = {
            let mut state = self.state.lock();
            let changed = change(&mut state);
            if changed != NodeChange::None {
                state.is_dirty = true;
                state.shared = None;
            }
            changed
        };
        match changed {
            NodeChange::None => return,
            NodeChange::Details => {}
            NodeChange::Routes => self.version.send_modify(|version| *version += 1),
        }
        self.dirty.notify_one();
    }
}

#[derive(Debug, Default)]
struct State {
    nodes: NodeMap,
    /// The last snapshot of `nodes` that was returned. `None` after a change.
    shared: Option<Arc<NodeMap>>,
    is_dirty: bool,
    /// Nodes that were removed since the last write. A read of the file skips them.
    forgotten: BTreeSet<NodeName>,
    /// Stamp of the file at the last read or write.
    stamp: Option<FileStamp>,
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

#[derive(Debug, Serialize, Deserialize)]
struct KnownNodesFile {
    nodes: BTreeMap<String, KnownNode>,
}

impl KnownNodesFile {
    fn of(nodes: &NodeMap) -> Self {
        Self {
            nodes: nodes
                .iter()
                .map(|(name, node)| (name.to_string(), node.clone()))
                .collect(),
        }
    }

    fn write(&self, file: &SharedFile) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        text.push(b'\n');
        file.write(&text)
    }
}

impl State {
    /// Adds nodes that another process has written to the file. Returns whether there were any.
    fn merge(&mut self, changed: ChangedFile) -> bool {
        let mut has_more = false;
        for (name, node) in changed.nodes {
            if !self.nodes.contains_key(&name) && !self.forgotten.contains(&name) {
                self.nodes.insert(name, node);
                has_more = true;
            }
        }
        self.stamp = Some(changed.stamp);
        if has_more {
            self.shared = None;
        }
        has_more
    }
}

/// The content of a file that another process has written.
struct ChangedFile {
    stamp: FileStamp,
    nodes: NodeMap,
}

/// Reads the file if its stamp is not `stamp`. Blocks the thread.
fn changed_file(file: &SharedFile, stamp: Option<FileStamp>) -> io::Result<Option<ChangedFile>> {
    let Some(current) = file.stamp().filter(|current| stamp != Some(*current)) else {
        return Ok(None);
    };
    let Some(content) = file.read()? else {
        return Ok(None);
    };
    let content: KnownNodesFile =
        serde_json::from_slice(&content).map_err(|error| file.damaged(error))?;
    let parsed = content.nodes.into_iter().map(|(name, node)| {
        let parsed = name.parse::<NodeName>();
        let parsed = parsed.map_err(|error| file.damaged(format_args!("{name:?}: {error}")))?;
        Ok((parsed, node))
    });
    Ok(Some(ChangedFile {
        stamp: current,
        nodes: parsed.collect::<io::Result<NodeMap>>()?,
    }))
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

/// Changes within this time are written together.
const SAVE_DEBOUNCE: Duration = Duration::from_secs(1);
/// Pause before the next attempt after a failed write.
const SAVE_RETRY_DELAY: Duration = Duration::from_secs(10);
/// A reconnect within this time does not change the persisted state.
const LAST_SEEN_RESOLUTION: Duration = Duration::from_secs(10 * 60);

#[cfg(test)]
mod tests;
