//! Nodes whose certificates an operator revoked: asked in every handshake, kept across restarts.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};
use tunnel_proto::identity::{BACKDATED, PeerIdentity, TrustDomain};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::tls::{RevocationCheck, Revoked};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

use crate::routing::registry::Registry;
use crate::store::data_dir::{DataDir, SharedFile, rfc3339, time_text, whole_seconds};
use crate::store::document::{DocumentVersion, SharedDocument};

/// The revocations of a data directory or of a cluster. One holds for every certificate of its node that was issued until then; a later
/// one, bought with a new token, is accepted.
#[derive(Debug)]
pub struct Revocations {
    doc: SharedDocument,
    state: Mutex<State>,
    /// Held while writing, so that an older state never replaces a newer one.
    writing: Mutex<()>,
    version: watch::Sender<u64>,
    /// How long before its issue a certificate begins.
    backdated: Duration,
}

#[derive(Debug, Default)]
struct State {
    nodes: BTreeMap<NodeName, SystemTime>,
    /// When the newest certificate of each node that was shown or issued here was issued.
    issued: BTreeMap<NodeName, SystemTime>,
    /// The document as last read or written.
    last_version: Option<DocumentVersion>,
    /// A revocation was made later here than what others wrote, and is not written yet.
    has_unwritten: bool,
}

/// The form of the document.
#[derive(Debug, Serialize, Deserialize)]
struct RevocationsDocument {
    nodes: BTreeMap<String, RevocationEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RevocationEntry {
    #[serde(with = "time_text")]
    revoked_at: SystemTime,
}

impl Revocations {
    /// Opens the revocations of a data directory. `ours` says that agents' certificates are of the local CA, which
    /// begin some minutes before they are issued.
    ///
    /// # Errors
    /// When the file cannot be read or is damaged, with its path.
    pub fn open(dir: &DataDir, ours: bool) -> io::Result<Self> {
        Self::from_document(
            SharedDocument::File(SharedFile::new(dir, dir.revoked())),
            ours,
        )
    }

    /// The revocations of a document; `ours` as for [`Revocations::open`].
    ///
    /// # Errors
    /// When it cannot be read or is damaged, with its name.
    pub(crate) fn from_document(doc: SharedDocument, ours: bool) -> io::Result<Self> {
        let mut state = State::default();
        state.refresh(&doc)?;
        Ok(Self {
            doc,
            state: Mutex::new(state),
            writing: Mutex::default(),
            version: watch::Sender::new(0),
            backdated: if ours { BACKDATED } else { Duration::ZERO },
        })
    }

    /// Revokes every certificate of a node that was issued until now, and whichever is known here whatever the clock
    /// says: a revocation is later than the one before it and than what it is for. Blocks the thread until that is on
    /// disk or in the cluster.
    ///
    /// # Errors
    /// When it cannot be kept; it holds until the process ends.
    pub fn revoke(&self, node: &NodeName, now: SystemTime) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.lock().revoke(node, now, &self.doc);
        self.version.send_modify(|version| *version += 1);
        self.write()
    }

    /// Writes what was raised here since others wrote. Blocks the thread.
    fn flush(&self) -> io::Result<()> {
        if !self.lock().has_unwritten {
            return Ok(());
        }
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        let last_version = self.doc.change(|theirs: Option<RevocationsDocument>| {
            let mut state = self.lock();
            if let Some(theirs) = theirs {
                state.merge(theirs, &self.doc)?;
            }
            Ok(RevocationsDocument::of(&state.nodes))
        })?;
        let mut state = self.lock();
        state.last_version = last_version;
        state.has_unwritten = false;
        Ok(())
    }

    /// When a node's certificates were revoked last.
    #[must_use]
    pub fn of_node(&self, node: &NodeName) -> Option<SystemTime> {
        self.lock().of_node(node, &self.doc)
    }

    /// Whether a certificate is revoked.
    #[must_use]
    pub fn is_revoked(&self, peer: &PeerIdentity) -> bool {
        let Some(node) = peer.node() else {
            return false;
        };
        let mut state = self.lock();
        let revoked = state.of_node(node, &self.doc);
        state.record_issued(node, self.issued(peer));
        self.covers(revoked, peer)
    }

    /// Whether a revocation, as [`Revocations::of_node`] gave it, is for a certificate.
    #[must_use]
    pub fn covers(&self, revoked: Option<SystemTime>, peer: &PeerIdentity) -> bool {
        revoked.is_some_and(|at| self.issued(peer) <= at)
    }

    /// Whether a node's revocation is still `revoked`. Then the next one is also for its certificate that was issued
    /// at `dated`.
    #[must_use]
    pub fn confirm(&self, node: &NodeName, revoked: Option<SystemTime>, dated: SystemTime) -> bool {
        let mut state = self.lock();
        let is_same = state.of_node(node, &self.doc) == revoked;
        if is_same {
            state.record_issued(node, whole_seconds(dated));
        }
        is_same
    }

    fn issued(&self, peer: &PeerIdentity) -> SystemTime {
        let backdated = match peer.domain {
            TrustDomain::Tunnel => self.backdated,
            // Signers of clusters backdate as they like: rather a certificate too many is covered.
            TrustDomain::Cluster => Duration::ZERO,
        };
        whole_seconds(peer.not_before + backdated)
    }

    /// The judge of handshakes.
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

    /// Ends live sessions whose certificate is revoked: at once when it is by this process, within 5 s when
    /// another one wrote it.
    pub fn enforce(self: &Arc<Self>, registry: &Arc<Registry>, shutdown: &Shutdown) {
        let (revocations, registry, tasks) = (self.clone(), registry.clone(), shutdown.clone());
        let mut changed = self.version.subscribe();
        shutdown.spawn_service(async move {
            loop {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                }
                let flushing = revocations.clone();
                let flushed = tokio::task::spawn_blocking(move || flushing.flush()).await;
                if let Ok(Err(error)) = flushed {
                    warn!(%error, "cannot publish a revocation to other servers, trying again");
                }
                for agent in registry.all() {
                    if !revocations.is_revoked(agent.session.peer()) || agent.is_closing() {
                        continue;
                    }
                    info!(agent = %agent.node, session = %agent.id, "certificate is revoked, closing the session");
                    agent.withdraw();
                    tasks.spawn_service(async move {
                        agent.close(CloseCode::CredentialRevoked, REVOKED).await;
                    });
                }
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Later than the node's last revocation, so that whoever read that one notices.
    fn revoke(&mut self, node: &NodeName, now: SystemTime, doc: &SharedDocument) {
        let last = self.of_node(node, doc);
        let newest = self.issued.get(node).copied();
        let at = issue_time(last, whole_seconds(now));
        let at = newest.map_or(at, |newest| newest.max(at));
        self.nodes.insert(node.clone(), at);
    }

    fn of_node(&mut self, node: &NodeName, doc: &SharedDocument) -> Option<SystemTime> {
        if let Err(error) = self.refresh(doc) {
            static UNREAD: LogRateLimit = LogRateLimit::new("revocations cannot be reloaded");
            if UNREAD.admit() {
                warn!(%error, "cannot reload the revocations; the known ones stay in force");
            }
        }
        self.nodes.get(node).copied()
    }

    /// Remembers the newest certificate of a node.
    fn record_issued(&mut self, node: &NodeName, issued: SystemTime) {
        match self.issued.get_mut(node) {
            Some(newest) => *newest = issued.max(*newest),
            None => {
                self.issued.insert(node.clone(), issued);
            }
        }
    }

    /// Takes in what others wrote meanwhile. A document that is gone takes nothing back.
    fn refresh(&mut self, doc: &SharedDocument) -> io::Result<()> {
        let version = doc.version();
        if version.is_none() || version == self.last_version {
            return Ok(());
        }
        let Some(content) = doc.read::<RevocationsDocument>()? else {
            return Ok(());
        };
        self.last_version = version;
        self.merge(content, doc)
    }

    /// Damaged names are told and hold up nothing else.
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
            if known.is_some_and(|known| known >= entry.revoked_at) {
                continue;
            }
            // Who revoked may not have known of what was issued or shown here before this was heard. One that is hardly
            // later than the known one is that one, raised by such a server: what was bought since then stays good.
            let is_new = known.is_none_or(|known| entry.revoked_at > known + RAISE_TOLERANCE);
            let newest = self.issued.get(&node).copied().filter(|_| is_new);
            let at = newest.map_or(entry.revoked_at, |newest| newest.max(entry.revoked_at));
            self.has_unwritten |= at > entry.revoked_at;
            self.nodes.insert(node, at);
        }
        match damaged {
            Some(text) => Err(io::Error::new(io::ErrorKind::InvalidData, text)),
            None => Ok(()),
        }
    }
}

impl RevocationsDocument {
    fn of(nodes: &BTreeMap<NodeName, SystemTime>) -> Self {
        let entry = |(node, at): (&NodeName, &SystemTime)| {
            let entry = RevocationEntry { revoked_at: *at };
            (node.to_string(), entry)
        };
        Self {
            nodes: nodes.iter().map(entry).collect(),
        }
    }
}

/// The moment at which a certificate that is issued now has to be dated, so that the last revocation of its node, as
/// [`Revocations::of_node`] gave it, does not hold for it.
#[must_use]
pub fn issue_time(revoked: Option<SystemTime>, now: SystemTime) -> SystemTime {
    let after = revoked.map(|at| at + Duration::from_secs(1));
    after.map_or(now, |after| after.max(now))
}

/// What a revoked node is told.
#[must_use]
pub fn revoked_message(at: SystemTime) -> String {
    format!(
        "the node's certificates were revoked at {}; remove agent.key and agent.crt on the node and enroll with a new token",
        rfc3339(at)
    )
}

/// Reason of the close.
const REVOKED: &str = "the node's certificate was revoked";
/// How often the document is looked at for revocations that another process wrote.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Clocks of servers differ by less, and a server hears of a revocation sooner.
const RAISE_TOLERANCE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tunnel_proto::identity::Role;

    use super::*;
    use crate::store::data_dir::testing::Scratch;

    fn peer(node: &str, issued: SystemTime) -> PeerIdentity {
        PeerIdentity {
            domain: TrustDomain::Tunnel,
            role: Role::Agent(node.parse().unwrap()),
            not_before: issued - BACKDATED,
            not_after: issued + Duration::from_secs(86400),
        }
    }

    #[test]
    fn revocation_holds_for_what_was_issued_until_then_also_after_a_restart() {
        let scratch = Scratch::new();
        let revocations = Revocations::open(&scratch.0, true).unwrap();
        let (node, now) = (
            "worker-1".parse().unwrap(),
            whole_seconds(SystemTime::now()),
        );
        let old = peer("worker-1", now - Duration::from_secs(60));
        assert!(!revocations.is_revoked(&old));
        revocations.revoke(&node, now).unwrap();
        for revocations in [revocations, Revocations::open(&scratch.0, true).unwrap()] {
            assert!(revocations.is_revoked(&old));
            assert!(revocations.is_revoked(&peer("worker-1", now)));
            assert!(!revocations.is_revoked(&peer("worker-2", now)));
            let issued = issue_time(revocations.of_node(&node), now);
            assert!(!revocations.is_revoked(&peer("worker-1", issued)));
        }
    }

    #[test]
    fn clock_that_went_back_makes_no_revocation_weaker() {
        let scratch = Scratch::new();
        let revocations = Revocations::open(&scratch.0, true).unwrap();
        let node: NodeName = "worker-1".parse().unwrap();
        let now = whole_seconds(SystemTime::now());
        let behind = now - Duration::from_secs(3600);
        // A session that is live when the clock goes back.
        let live = peer("worker-1", now);
        assert!(!revocations.is_revoked(&live));
        revocations.revoke(&node, behind).unwrap();
        assert!(revocations.is_revoked(&live));
        revocations.revoke(&node, behind).unwrap();
        for revocations in [revocations, Revocations::open(&scratch.0, true).unwrap()] {
            assert!(revocations.is_revoked(&live));
            revocations.revoke(&node, behind).unwrap();
            assert!(revocations.of_node(&node) > Some(now));
        }
    }

    #[test]
    fn revocation_of_another_server_covers_what_was_issued_here_before_it_arrived() {
        let scratch = Scratch::new();
        let open = || Revocations::open(&scratch.0, true).unwrap();
        let (here, there) = (open(), open());
        let node = "worker-1".parse().unwrap();
        let now = whole_seconds(SystemTime::now());
        // This server's clock is ahead, and it has not heard yet.
        let ahead = now + Duration::from_secs(2);
        there.revoke(&node, now).unwrap();
        here.lock().record_issued(&node, ahead);
        let stolen = peer("worker-1", ahead);
        assert!(here.is_revoked(&stolen));
        assert!(!there.is_revoked(&peer("worker-1", ahead + Duration::from_secs(1))));
        here.flush().unwrap();
        assert!(there.is_revoked(&stolen) && open().is_revoked(&stolen));
        // What is issued from then on is good, and nothing is raised again.
        let next = issue_time(here.of_node(&node), now);
        for revocations in [&here, &there] {
            assert!(!revocations.is_revoked(&peer("worker-1", next)));
        }
        here.flush().unwrap();
        assert!(!open().is_revoked(&peer("worker-1", next)));
    }

    #[test]
    fn revocation_by_another_process_is_seen_and_a_lost_file_takes_none_back() {
        let scratch = Scratch::new();
        let running = Revocations::open(&scratch.0, true).unwrap();
        let node = "worker-1".parse().unwrap();
        let verb = Revocations::open(&scratch.0, true).unwrap();
        verb.revoke(&node, SystemTime::now()).unwrap();
        assert!(running.of_node(&node).is_some());
        std::fs::remove_file(scratch.0.revoked()).unwrap();
        assert!(running.of_node(&node).is_some());
        running
            .revoke(&"worker-2".parse().unwrap(), SystemTime::now())
            .unwrap();
        let restarted = Revocations::open(&scratch.0, true).unwrap();
        assert!(restarted.of_node(&node).is_some());
    }
}
