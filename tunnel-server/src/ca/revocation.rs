//! Nodes whose certificates an operator revoked. Every handshake checks them, and they persist
//! across restarts.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};
use tunnel_proto::identity::{BACKDATED, PeerIdentity, TrustDomain};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::timers::sleep_coalesced;
use tunnel_proto::tls::{RevocationCheck, Revoked};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::peer::RevokedNode;

use crate::routing::registry::Registry;
use crate::store::data_dir::{DataDir, rfc3339, time_text, time_text_option, whole_seconds};
use crate::store::document::SharedDocument;
use crate::store::file_document;

/// The revocations of a data directory or of a cluster. A revocation covers every certificate of
/// its node that was issued up to that time. A later certificate, obtained with a new token, is
/// accepted. A revocation that is lifted stays recorded with the time at which it was lifted: other
/// processes merge what they know, and would otherwise bring it back.
#[derive(Debug)]
pub struct Revocations {
    doc: SharedDocument,
    state: Mutex<State>,
    /// Held while writing, so that an older state never replaces a newer one.
    writing: Mutex<()>,
    version: watch::Sender<u64>,
    /// Time between the start of a certificate's validity and its issue.
    backdated: Duration,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<NodeName, Revocation>,
    /// Number of changes of `nodes`.
    changes: u64,
    /// Issue time of the newest certificate of each node that this process saw or issued.
    issued: BTreeMap<NodeName, SystemTime>,
    /// Version of the document that was last read or written.
    last_version: Option<u64>,
    /// Whether this process has a revocation, or a later time of one, that is not persisted yet.
    has_unwritten: bool,
}

/// The last revocation of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Revocation {
    at: SystemTime,
    /// Time until which revocations of the node are lifted.
    lifted_at: Option<SystemTime>,
}

impl Revocation {
    fn is_in_force(self) -> bool {
        self.lifted_at.is_none_or(|lifted_at| lifted_at < self.at)
    }
}

/// A revocation that is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationInForce {
    pub node: NodeName,
    pub at: SystemTime,
    /// Whether this process saw or issued a certificate of the node that the revocation does not
    /// cover.
    pub has_later_certificate: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct RevocationsDocument {
    nodes: BTreeMap<String, RevocationEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RevocationEntry {
    #[serde(with = "time_text")]
    revoked_at: SystemTime,
    #[serde(
        default,
        with = "time_text_option",
        skip_serializing_if = "Option::is_none"
    )]
    lifted_at: Option<SystemTime>,
}

impl Revocations {
    /// Opens the revocations of a data directory. `is_local_ca` means that the local CA issues the
    /// agents' certificates, whose validity begins some minutes before the issue.
    ///
    /// # Errors
    /// Returns an error with the path if the file cannot be read or is damaged.
    pub fn open(dir: &DataDir, is_local_ca: bool) -> io::Result<Self> {
        Self::from_document(file_document::open(dir, dir.revoked())?, is_local_ca)
    }

    /// Opens the revocations of a document; `is_local_ca` as for [`Revocations::open`].
    ///
    /// # Errors
    /// Returns an error with the document's name if the document cannot be read or is damaged.
    pub(crate) fn from_document(doc: SharedDocument, is_local_ca: bool) -> io::Result<Self> {
        let mut state = State::default();
        state.refresh(&doc)?;
        Ok(Self {
            doc,
            state: Mutex::new(state),
            writing: Mutex::default(),
            version: watch::Sender::new(0),
            backdated: if is_local_ca {
                BACKDATED
            } else {
                Duration::ZERO
            },
        })
    }

    /// Revokes every certificate of a node that was issued until now, and every certificate of the
    /// node that this process has seen, whatever the clock says. A revocation is always later than
    /// the previous one and than the certificates that it covers. Blocks the thread until the
    /// revocation is on disk or in the cluster.
    ///
    /// # Errors
    /// Returns an error if the revocation cannot be persisted. The revocation is then in force, and
    /// is written again until that succeeds ([`Revocations::enforce`]) or the process ends.
    pub fn revoke(&self, node: &NodeName, now: SystemTime) -> io::Result<()> {
        let _writing = self.writing.lock();
        self.state.lock().revoke(node, now, &self.doc);
        self.version.send_modify(|version| *version += 1);
        self.write()
    }

    /// Lifts the revocation of a node: its certificates are accepted again. Returns whether a
    /// revocation was in force. Blocks the thread until the change is on disk or in the cluster.
    ///
    /// # Errors
    /// Returns an error if the change cannot be persisted. The revocation then stays in force.
    pub fn lift(&self, node: &NodeName, now: SystemTime) -> io::Result<bool> {
        let _writing = self.writing.lock();
        if self.of_node(node).is_none() {
            return Ok(false);
        }
        // Until the change is persisted, no certificate of the node may be accepted or renewed.
        let mut lifted_at = None;
        self.write_with(|content| {
            if let Some(entry) = content.nodes.get_mut(node.as_str()) {
                lifted_at = Some(whole_seconds(now).max(entry.revoked_at));
                entry.lifted_at = lifted_at;
            }
        })?;
        self.state.lock().set_lifted_at(node, lifted_at);
        self.version.send_modify(|version| *version += 1);
        Ok(true)
    }

    /// Returns the revocations that are in force, ordered by node.
    #[must_use]
    pub fn in_force(&self) -> Vec<RevocationInForce> {
        let mut state = self.state.lock();
        state.reload(&self.doc);
        let in_force = (state.nodes.iter()).filter(|(_, revocation)| revocation.is_in_force());
        in_force
            .map(|(node, revocation)| RevocationInForce {
                node: node.clone(),
                at: revocation.at,
                has_later_certificate: (state.issued.get(node))
                    .is_some_and(|issued| *issued > revocation.at),
            })
            .collect()
    }

    /// Merges revocations of another server: of several revocations of a node, the latest counts.
    /// Times are taken as they are, so that servers that exchange revocations agree. New nodes
    /// beyond [`NODES_MAX`] are ignored. Returns whether anything changed. The changes are in force
    /// at once, and [`Revocations::enforce`] writes them.
    pub fn merge(&self, revoked: Vec<RevokedNode>) -> bool {
        let is_changed = self.state.lock().merge_announced(revoked, &self.doc);
        if is_changed {
            self.version.send_modify(|version| *version += 1);
        }
        is_changed
    }

    /// Returns a receiver that is notified when this process changes a revocation, and, once
    /// [`Revocations::enforce`] runs, when it observes that the document has changed.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Returns the revocations in force and the number of changes so far, or `None` if that number is
    /// still `changes`. The first call passes 0.
    #[must_use]
    pub fn changed_since(&self, changes: u64) -> Option<(u64, Vec<RevokedNode>)> {
        let mut state = self.state.lock();
        state.reload(&self.doc);
        if state.changes == changes {
            return None;
        }
        let in_force = (state.nodes.iter()).filter(|(_, revocation)| revocation.is_in_force());
        let nodes = in_force.map(|(node, revocation)| RevokedNode {
            node: node.clone(),
            at: revocation.at,
        });
        Some((state.changes, nodes.collect()))
    }

    /// Writes revocations that are not persisted yet. Blocks the thread.
    fn flush(&self) -> io::Result<()> {
        let _writing = self.writing.lock();
        if !self.has_unwritten() {
            return Ok(());
        }
        self.write()
    }

    fn has_unwritten(&self) -> bool {
        self.state.lock().has_unwritten
    }

    fn write(&self) -> io::Result<()> {
        self.write_with(|_| {})
    }

    /// Writes the revocations after `edit`, which may be called several times.
    fn write_with(&self, mut edit: impl FnMut(&mut RevocationsDocument)) -> io::Result<()> {
        let mut changes = 0;
        let last_version = self.doc.change(|theirs: Option<RevocationsDocument>| {
            let mut state = self.state.lock();
            if let Some(theirs) = theirs {
                state.merge(theirs, &self.doc)?;
            }
            changes = state.changes;
            let mut content = RevocationsDocument::of(&state.nodes);
            edit(&mut content);
            Ok(content)
        })?;
        let mut state = self.state.lock();
        state.last_version = Some(last_version);
        // What was merged during the write is written next.
        state.has_unwritten &= state.changes != changes;
        Ok(())
    }

    /// Returns the time of the last revocation of a node's certificates.
    #[must_use]
    pub fn of_node(&self, node: &NodeName) -> Option<SystemTime> {
        self.state.lock().of_node(node, &self.doc)
    }

    /// Returns whether a certificate is revoked, and records the certificate as seen.
    #[must_use]
    pub fn is_revoked(&self, peer: &PeerIdentity) -> bool {
        let Some(node) = peer.node() else {
            return false;
        };
        let mut state = self.state.lock();
        let revoked = state.of_node(node, &self.doc);
        state.record_issued(node, self.issued(peer));
        self.covers(revoked, peer)
    }

    /// Returns whether a revocation, as returned by [`Revocations::of_node`], covers a certificate.
    #[must_use]
    pub fn covers(&self, revoked: Option<SystemTime>, peer: &PeerIdentity) -> bool {
        revoked.is_some_and(|at| self.issued(peer) <= at)
    }

    /// Returns whether the node's revocation is still `revoked`. If so, records a certificate
    /// issued at `issued_at`, so that the next revocation covers it.
    #[must_use]
    pub fn confirm(
        &self,
        node: &NodeName,
        revoked: Option<SystemTime>,
        issued_at: SystemTime,
    ) -> bool {
        let mut state = self.state.lock();
        let is_same = state.of_node(node, &self.doc) == revoked;
        if is_same {
            state.record_issued(node, whole_seconds(issued_at));
        }
        is_same
    }

    fn issued(&self, peer: &PeerIdentity) -> SystemTime {
        let backdated = match peer.domain {
            TrustDomain::Tunnel => self.backdated,
            // Cluster signers backdate by unknown amounts. Without a correction a revocation may
            // cover a certificate too many, but never one too few.
            TrustDomain::Cluster => Duration::ZERO,
        };
        whole_seconds(peer.not_before + backdated)
    }

    #[must_use]
    pub fn revocation_check(self: &Arc<Self>) -> RevocationCheck {
        let revocations = self.clone();
        Arc::new(move |peer| {
            if revocations.is_revoked(peer) {
                Err(Revoked)
            } else {
                Ok(())
            }
        })
    }

    /// Closes live sessions whose certificate is revoked, as soon as this process has made or
    /// observed the revocation, whether it is written or not. A file of another process is observed
    /// within 5 s. Writes what this process has not written yet.
    pub fn enforce(self: &Arc<Self>, registry: &Arc<Registry>, shutdown: &Shutdown) {
        self.follow_document(shutdown);
        self.write_pending(shutdown);
        let (revocations, registry, tasks) = (self.clone(), registry.clone(), shutdown.clone());
        let mut changed = self.version.subscribe();
        shutdown.spawn_service(async move {
            loop {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = sleep_coalesced(CHECK_INTERVAL) => {}
                }
                for agent in registry.all() {
                    if !revocations.is_revoked(agent.session.peer()) || agent.is_closing() {
                        continue;
                    }
                    info!(node = %agent.node, session = agent.id.0, "certificate is revoked, closing the session");
                    agent.withdraw();
                    tasks.spawn_service(async move {
                        agent.close(CloseCode::CredentialRevoked, REVOKED).await;
                    });
                }
            }
        });
    }
}

impl Revocations {
    /// Notifies of each observed change of the document.
    fn follow_document(self: &Arc<Self>, shutdown: &Shutdown) {
        let (revocations, mut observed) = (self.clone(), self.doc.changed());
        shutdown.spawn_service(async move {
            while observed.changed().await.is_ok() {
                revocations.version.send_modify(|version| *version += 1);
            }
        });
    }

    /// Writes what this process has not written yet, until that succeeds.
    fn write_pending(self: &Arc<Self>, shutdown: &Shutdown) {
        let (revocations, mut changed) = (self.clone(), self.version.subscribe());
        shutdown.spawn_service(async move {
            loop {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = sleep_coalesced(CHECK_INTERVAL) => {}
                }
                if !revocations.has_unwritten() {
                    continue;
                }
                // A write blocks.
                let flushing = revocations.clone();
                let flushed = tokio::task::spawn_blocking(move || flushing.flush()).await;
                if let Ok(Err(error)) = flushed {
                    warn!(%error, "cannot save revocations; they are in force, trying again");
                }
            }
        });
    }
}

impl State {
    /// Records a revocation that is later than the node's last one, so that a reader of the last
    /// one notices the change.
    fn revoke(&mut self, node: &NodeName, now: SystemTime, doc: &SharedDocument) {
        self.reload(doc);
        let last = self.nodes.get(node);
        // A lifted revocation covers later times than its own.
        let last = last.map(|last| last.lifted_at.map_or(last.at, |at| at.max(last.at)));
        let newest = self.issued.get(node).copied();
        let at = issue_time(last, whole_seconds(now));
        let at = newest.map_or(at, |newest| newest.max(at));
        self.insert(node.clone(), at);
        self.has_unwritten = true;
    }

    fn insert(&mut self, node: NodeName, at: SystemTime) {
        let first = Revocation {
            at,
            lifted_at: None,
        };
        self.nodes.entry(node).or_insert(first).at = at;
        self.changes += 1;
    }

    fn set_lifted_at(&mut self, node: &NodeName, lifted_at: Option<SystemTime>) {
        if let Some(revocation) = self.nodes.get_mut(node)
            && revocation.lifted_at != lifted_at
        {
            revocation.lifted_at = lifted_at;
            self.changes += 1;
        }
    }

    fn of_node(&mut self, node: &NodeName, doc: &SharedDocument) -> Option<SystemTime> {
        self.reload(doc);
        let revocation = self.nodes.get(node).copied();
        let in_force = revocation.filter(|revocation| revocation.is_in_force());
        in_force.map(|revocation| revocation.at)
    }

    /// Loads revocations that other processes wrote, and logs an error.
    fn reload(&mut self, doc: &SharedDocument) {
        if let Err(error) = self.refresh(doc) {
            static UNREAD: LogRateLimit = LogRateLimit::new("revocations cannot be reloaded");
            if UNREAD.admit() {
                warn!(%error, "cannot reload the revocations; the known ones stay in force");
            }
        }
    }

    /// Merges revocations that another server announced. Returns whether anything changed.
    fn merge_announced(&mut self, revoked: Vec<RevokedNode>, doc: &SharedDocument) -> bool {
        self.reload(doc);
        let changes = self.changes;
        let mut ignored = 0;
        for RevokedNode { node, at } in revoked {
            // The document has whole seconds.
            let at = whole_seconds(at);
            match self.nodes.get(&node).copied() {
                Some(known) if known.at >= at => {}
                // The clock of the other server may be behind the one that lifted.
                Some(known) => self.insert(node, issue_time(known.lifted_at, at)),
                None if self.nodes.len() >= NODES_MAX => ignored += 1,
                None => self.insert(node, at),
            }
        }
        if ignored > 0 {
            static IGNORED: LogRateLimit = LogRateLimit::new("revocations beyond the limit");
            if IGNORED.admit() {
                warn!(
                    ignored,
                    limit = NODES_MAX,
                    "another server announces more revoked nodes than this one stores; the rest is ignored"
                );
            }
        }
        let is_changed = self.changes != changes;
        self.has_unwritten |= is_changed;
        is_changed
    }

    fn record_issued(&mut self, node: &NodeName, issued: SystemTime) {
        match self.issued.get_mut(node) {
            Some(newest) => *newest = issued.max(*newest),
            None => {
                self.issued.insert(node.clone(), issued);
            }
        }
    }

    /// Loads revocations that other processes wrote. A missing document does not undo any
    /// revocation.
    fn refresh(&mut self, doc: &SharedDocument) -> io::Result<()> {
        let version = doc.version();
        if version.is_none() || version == self.last_version {
            return Ok(());
        }
        // Damaged content is parsed once.
        self.last_version = version;
        match doc.read::<RevocationsDocument>()? {
            Some(content) => self.merge(content, doc),
            None => Ok(()),
        }
    }

    /// Merges persisted revocations. An invalid name is reported as an error after all other
    /// entries are merged.
    fn merge(&mut self, content: RevocationsDocument, doc: &SharedDocument) -> io::Result<()> {
        let mut damaged = None;
        for (name, entry) in content.nodes {
            let node: NodeName = match name.parse() {
                Ok(node) => node,
                Err(error) => {
                    damaged = Some(format!("{} is damaged: {name:?}: {error}", doc.name()));
                    continue;
                }
            };
            let known = self.nodes.get(&node).copied();
            let lifted_at = known.and_then(|known| known.lifted_at);
            let lifted_at = lifted_at.max(entry.lifted_at);
            let known = known.map(|known| known.at);
            if known.is_some_and(|known| known >= entry.revoked_at) {
                self.set_lifted_at(&node, lifted_at);
                continue;
            }
            // The revoking server may not have known certificates that this process issued or saw
            // before it received the revocation. A time that is hardly later than the known one is
            // the same revocation, raised by another server; certificates issued since then stay
            // valid. After a lift every later time is another revocation.
            let is_again =
                lifted_at.is_some_and(|lifted_at| known.is_some_and(|at| at <= lifted_at));
            // A lifted revocation is not raised: a later time would put it in force again.
            let is_lifted = lifted_at.is_some_and(|at| at >= entry.revoked_at);
            let is_later = known.is_none_or(|known| entry.revoked_at > known + RAISE_TOLERANCE);
            let is_new = !is_lifted && (is_later || is_again);
            let newest = self.issued.get(&node).copied().filter(|_| is_new);
            let at = newest.map_or(entry.revoked_at, |newest| newest.max(entry.revoked_at));
            self.has_unwritten |= at > entry.revoked_at;
            self.insert(node.clone(), at);
            self.set_lifted_at(&node, lifted_at);
        }
        match damaged {
            Some(text) => Err(io::Error::new(io::ErrorKind::InvalidData, text)),
            None => Ok(()),
        }
    }
}

impl RevocationsDocument {
    fn of(nodes: &BTreeMap<NodeName, Revocation>) -> Self {
        let entry = |(node, revocation): (&NodeName, &Revocation)| {
            let entry = RevocationEntry {
                revoked_at: revocation.at,
                lifted_at: revocation.lifted_at,
            };
            (node.to_string(), entry)
        };
        Self {
            nodes: nodes.iter().map(entry).collect(),
        }
    }
}

/// Returns the issue time for a certificate that is issued now. The time is late enough that the
/// node's last revocation, as returned by [`Revocations::of_node`], does not cover the certificate.
#[must_use]
pub fn issue_time(revoked: Option<SystemTime>, now: SystemTime) -> SystemTime {
    let after = revoked.map(|at| at + Duration::from_secs(1));
    after.map_or(now, |after| after.max(now))
}

/// Returns the message for the agent of a revoked node.
#[must_use]
pub fn revoked_message(at: SystemTime) -> String {
    format!(
        "the node's certificates were revoked at {}; remove agent.key and agent.crt on the node and enroll with a new token",
        rfc3339(at)
    )
}

/// Maximum number of revoked nodes that this server stores because another server announced them.
/// With the longest names they are half of the largest file that is read.
pub const NODES_MAX: usize = 100_000;
/// Reason of the session close.
const REVOKED: &str = "the node's certificate was revoked";
/// Interval at which a failed write is tried again, and sessions are checked that were registered
/// while their certificate was revoked.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Upper bound for the clock difference between servers and for the delay until a server receives a
/// revocation.
const RAISE_TOLERANCE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
