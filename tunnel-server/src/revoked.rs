//! Nodes whose certificates an operator revoked: asked in every handshake, kept across restarts.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::{info, warn};
use tunnel_proto::identity::{BACKDATED, PeerIdentity};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::{Judge, Revoked};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

use crate::data::{DataDir, SharedFile, Stamp, rfc3339, time_text, whole_seconds};
use crate::registry::Registry;

/// The revocations of a data directory. One holds for every certificate of its node that was issued until then; a later
/// one, bought with a new token, is accepted.
#[derive(Debug)]
pub struct Revocations {
    file: SharedFile,
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
    stamp: Option<Stamp>,
}

/// The form of the file.
#[derive(Debug, Serialize, Deserialize)]
struct Content {
    nodes: BTreeMap<String, Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
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
        let file = SharedFile::new(dir, dir.revoked());
        let mut state = State::default();
        state.refresh(&file)?;
        Ok(Self {
            file,
            state: Mutex::new(state),
            writing: Mutex::default(),
            version: watch::Sender::new(0),
            backdated: if ours { BACKDATED } else { Duration::ZERO },
        })
    }

    /// Revokes every certificate of a node that was issued until now. Blocks the thread until that is on disk.
    ///
    /// # Errors
    /// When it cannot be kept; it holds until the process ends.
    pub fn revoke(&self, node: &NodeName, now: SystemTime) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        self.lock().nodes.insert(node.clone(), whole_seconds(now));
        self.version.send_modify(|version| *version += 1);
        let _changing = self.file.lock()?;
        let content = {
            let mut state = self.lock();
            state.refresh(&self.file)?;
            Content::of(&state.nodes)
        };
        self.file.write(&content)?;
        self.lock().stamp = self.file.stamp();
        Ok(())
    }

    /// When a node's certificates were revoked last.
    #[must_use]
    pub fn of_node(&self, node: &NodeName) -> Option<SystemTime> {
        let mut state = self.lock();
        if let Err(error) = state.refresh(&self.file) {
            warn!(%error, "cannot read the revocations again; those that are known hold");
        }
        state.nodes.get(node).copied()
    }

    /// Whether a certificate is revoked.
    #[must_use]
    pub fn holds_for(&self, peer: &PeerIdentity) -> bool {
        let revoked = peer.node().and_then(|node| self.of_node(node));
        revoked.is_some_and(|at| whole_seconds(peer.not_before + self.backdated) <= at)
    }

    /// The moment at which a certificate that is issued now has to be dated, so that no earlier revocation holds for it.
    #[must_use]
    pub fn issue_time(&self, node: &NodeName, now: SystemTime) -> SystemTime {
        let after = self.of_node(node).map(|at| at + Duration::from_secs(1));
        after.map_or(now, |after| after.max(now))
    }

    /// The judge of handshakes.
    #[must_use]
    pub fn judge(self: &Arc<Self>) -> Judge {
        let revocations = self.clone();
        Arc::new(move |peer| {
            if revocations.holds_for(peer) {
                Err(Revoked)
            } else {
                Ok(())
            }
        })
    }

    /// Ends live sessions whose certificate is revoked: at once when it is by this process, within 5 s when the file was
    /// changed.
    pub fn enforce(self: &Arc<Self>, registry: &Arc<Registry>, shutdown: &Shutdown) {
        let (revocations, registry, tasks) = (self.clone(), registry.clone(), shutdown.clone());
        let mut changed = self.version.subscribe();
        shutdown.spawn_service(async move {
            loop {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
                for agent in registry.all() {
                    if !revocations.holds_for(agent.session.peer()) || agent.is_closing() {
                        continue;
                    }
                    info!(agent = %agent.node, session = %agent.id, "certificate is revoked, ending the session");
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
    /// Takes in what a verb wrote meanwhile. A file that is gone takes nothing back.
    fn refresh(&mut self, file: &SharedFile) -> io::Result<()> {
        let stamp = file.stamp();
        if stamp.is_none() || stamp == self.stamp {
            return Ok(());
        }
        let Some(content) = file.read::<Content>()? else {
            return Ok(());
        };
        for (name, entry) in content.nodes {
            let node: NodeName = name.parse().map_err(|error| {
                let text = format!("{} is damaged: {name:?}: {error}", file.path().display());
                io::Error::new(io::ErrorKind::InvalidData, text)
            })?;
            let at = self.nodes.entry(node).or_insert(entry.revoked_at);
            *at = entry.revoked_at.max(*at);
        }
        self.stamp = stamp;
        Ok(())
    }
}

impl Content {
    fn of(nodes: &BTreeMap<NodeName, SystemTime>) -> Self {
        let entry = |(node, at): (&NodeName, &SystemTime)| {
            let entry = Entry { revoked_at: *at };
            (node.to_string(), entry)
        };
        Self {
            nodes: nodes.iter().map(entry).collect(),
        }
    }
}

/// What a revoked node is told.
#[must_use]
pub fn told(at: SystemTime) -> String {
    format!(
        "the node's certificates were revoked at {}; remove agent.key and agent.crt on the node and enrol with a new token",
        rfc3339(at)
    )
}

/// Reason of the close.
const REVOKED: &str = "the node's certificate was revoked";
/// How often the file is looked at for revocations that another process wrote.
const LOOK_EVERY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use tunnel_proto::identity::Role;

    use super::*;
    use crate::data::testing::Scratch;

    fn peer(node: &str, issued: SystemTime) -> PeerIdentity {
        PeerIdentity {
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
        assert!(!revocations.holds_for(&old));
        revocations.revoke(&node, now).unwrap();
        for revocations in [revocations, Revocations::open(&scratch.0, true).unwrap()] {
            assert!(revocations.holds_for(&old));
            assert!(revocations.holds_for(&peer("worker-1", now)));
            assert!(!revocations.holds_for(&peer("worker-2", now)));
            let issued = revocations.issue_time(&node, now);
            assert!(!revocations.holds_for(&peer("worker-1", issued)));
        }
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
