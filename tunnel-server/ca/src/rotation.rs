//! Rotation of the local CA, in stages that survive a restart. From `Announced` on both CAs are
//! trusted, and agents receive both with each certificate. Each CA signs the other's key, since agents
//! take no root that a CA which they trust has not signed.
//!
//! ```text
//!        begin             next               next
//! (none) ────▶ Announced ──────▶ Issuing ─────────────▶ (none), with the new CA
//!                  │                │ abort
//!                  │ abort          ▼           next
//!                  │            Returning ────────────▶ (none), with the old CA
//!                  └──────────────────────────────────▶
//! ```
//!
//! A standalone server persists the stage first, and the two files of the CA follow. A server that
//! starts repeats what an interrupted one left out. In a cluster one update of the Secret has both,
//! and every server follows the Secret.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tracing::info;
use tunnel_process::name_list::NameList;
use tunnel_proto::wire::enroll::hex;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::peer::CaDigest;
use tunnel_store::data_dir::{DataDir, whole_seconds};
use tunnel_store::known_nodes::KnownNodes;

pub use crate::persisted_rotation::Rotation;
pub use crate::stage::RotationStage;
use crate::stage::Signer;
use crate::{CaError, CaMaterial, LocalCa};

mod agents;
mod status;
mod store;

pub use agents::{OtherAgents, known_certificates};
use agents::{is_due, longest_remaining};
pub use status::{AgentCounts, RotationProgress, RotationStatus};
use store::CaFiles;
pub use store::{CaStore, SharedCa};

/// A request of an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RotationAction {
    /// Creates and announces a new CA.
    Begin,
    /// Enters the next stage if no agent would be left behind.
    Next,
    /// Enters the next stage in any case.
    ForceNext,
    /// Returns to the old CA.
    Abort,
}

/// The reason why a request is refused.
#[derive(Debug, thiserror::Error)]
pub enum RotationError {
    #[error(transparent)]
    Ca(#[from] CaError),
    #[error("the CA is not being replaced; 'tunnel-server ca rotate' begins")]
    NotInProgress,
    #[error(
        "the CA is being replaced already; 'tunnel-server ca rotate --status' shows the stage, --next enters the next one"
    )]
    InProgress,
    #[error("the server returns to the old CA already; --next ends this")]
    AlreadyReturning,
    /// The Secret has another version than the one that was read.
    #[error("the CA was changed meanwhile; run the command again")]
    Changed,
    /// Agents with a valid certificate would be refused.
    #[error(
        "agents without a certificate of this stage, which would be refused: {pending}; wait until --status shows none, forget \
         nodes that are gone at each server, or add --force"
    )]
    Pending { pending: usize },
    /// This server cannot say which certificates have expired.
    #[error("{0}; until then this server cannot say which agents have renewed; or add --force")]
    Clock(String),
    /// Other servers may exist that do not follow the stage.
    #[error("it is not known which servers there are: {0}; wait until it is, or add --force")]
    ServersUnknown(String),
    /// Other servers may not follow the stage.
    #[error(
        "the stage of other servers is not known, because they are not connected to this one: {0}; connect them, stop them, or \
         add --force, which leaves behind the agents of a server that does not follow"
    )]
    UnknownStages(String),
    /// Other servers do not follow the stage.
    #[error(
        "other servers do not follow this stage: {0}; in a cluster wait until they do, elsewhere import this server's CA there, \
         or add --force, which leaves their agents behind"
    )]
    OtherStages(String),
    /// Agents that only other servers know may not have renewed yet.
    #[error(
        "it is not known which agents of other servers have renewed, because these servers do not answer: {0}; run the command \
         again, let this server dial those that only dial it (--peer), upgrade or stop them, or add --force, which leaves \
         behind their agents"
    )]
    NotCounted(String),
    /// Other servers answered with too many agents.
    #[error(
        "these servers know more nodes than limits.directoryNodes of this one, so that it is not known which of their agents \
         have renewed: {0}; raise the limit here and restart this server, forget nodes that are gone there, or add --force, \
         which leaves behind their agents"
    )]
    TooManyNodes(String),
    /// Agents may be on their way from one server to another, so that none has seen their certificate.
    #[error(
        "a server was connected or lost a moment ago, and agents may be on their way to another one; run the command again in \
         {} s, or add --force",
        .0.as_secs() + 1
    )]
    AgentsMove(Duration),
}

/// What a server observes before it enters a stage: the other servers that share the CA, as far as it
/// knows, the clocks, and its agents.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The reason why it is not known which servers there are, if so.
    pub unknown: Option<String>,
    /// The servers, each with the digest of its CA if that is known.
    pub cas: BTreeMap<ReplicaId, Option<CaDigest>>,
    /// Differences between the clock of this server and others. By a wrong clock the certificates of
    /// agents have expired, so that the rotation would not wait for them.
    pub clocks: Vec<String>,
    /// Nodes with a session at this server. Their certificates count whatever the clock says.
    pub connected: BTreeSet<NodeName>,
    /// Nodes that had a session at a server which is gone, and have none that is known.
    pub gone: BTreeSet<NodeName>,
    /// Time until agents that lost a server have a session with another one, if one was lost lately.
    pub moving: Option<Duration>,
}

impl Surroundings {
    /// Checks that every other server is known to have the CA with the digest `own`.
    fn check_cas(&self, own: CaDigest) -> Result<(), RotationError> {
        if let Some(reason) = &self.unknown {
            return Err(RotationError::ServersUnknown(reason.clone()));
        }
        let named = |is_meant: &dyn Fn(&Option<CaDigest>) -> bool| {
            let meant = self.cas.iter().filter(|(_, ca)| is_meant(ca));
            let names: NameList = meant.map(|(id, _)| id).collect();
            (!names.is_empty()).then(|| names.to_string())
        };
        if let Some(names) = named(&|ca| ca.is_none()) {
            return Err(RotationError::UnknownStages(names));
        }
        match named(&|ca| *ca != Some(own)) {
            Some(names) => Err(RotationError::OtherStages(names)),
            None => Ok(()),
        }
    }

    /// Returns the servers whose agents are not in `others`.
    fn not_counted(&self, others: &OtherAgents) -> impl Iterator<Item = &ReplicaId> {
        let servers = self.cas.keys();
        servers.filter(|server| !others.has(server))
    }
}

pub type Observe = Arc<dyn Fn() -> Surroundings + Send + Sync>;

/// Rotates the CA. Calls block the thread.
pub struct CaRotator {
    ca: Arc<LocalCa>,
    store: Arc<dyn CaStore>,
    /// Time within which a stage is persisted and followed.
    followed_within: Duration,
    nodes: Arc<KnownNodes>,
    observe: Observe,
    /// Held during a change, so that changes do not overlap.
    changing: Mutex<()>,
    followers: Mutex<Followers>,
}

/// What a server has observed of those that follow the stage, this one included.
#[derive(Debug, Default)]
struct Followers {
    /// Digest of this server's CA when it was last observed.
    own: Option<CaDigest>,
    /// When a server was last observed that does not follow, until the stage says so.
    lagged: Option<SystemTime>,
}

impl CaRotator {
    /// Creates the rotator of a standalone server.
    pub fn new(ca: Arc<LocalCa>, dir: DataDir, nodes: Arc<KnownNodes>) -> Self {
        let files = Arc::new(CaFiles {
            ca: ca.clone(),
            dir,
        });
        Self {
            followed_within: PERSISTED_WITHIN,
            ..Self::of_secret(ca, files, nodes)
        }
    }

    /// Creates a rotator of the CA that the servers of a cluster share.
    pub fn of_secret(ca: Arc<LocalCa>, secret: Arc<dyn CaStore>, nodes: Arc<KnownNodes>) -> Self {
        Self {
            ca,
            store: secret,
            followed_within: FOLLOWED_WITHIN,
            nodes,
            observe: Arc::new(Surroundings::default),
            changing: Mutex::default(),
            followers: Mutex::default(),
        }
    }

    /// Sets the function that observes the surroundings. Without it there are none.
    pub fn observing(self, observe: Observe) -> Self {
        Self { observe, ..self }
    }

    /// Returns the CA of the current stage and the rotation in progress, if any.
    fn load(&self) -> Result<SharedCa, CaError> {
        let stored = self.store.read()?;
        if !stored.material.continues(&self.ca.material.load()) {
            return Err(CaError::OtherCa);
        }
        Ok(stored)
    }

    /// Returns whether two CAs are trusted.
    pub fn is_in_progress(&self) -> bool {
        self.ca.roots().len() > 1
    }

    /// Returns the stage and what the next one waits for.
    ///
    /// # Errors
    /// Returns a [`CaError`] if the persisted rotation cannot be used.
    pub fn status(&self, others: &OtherAgents) -> Result<RotationStatus, CaError> {
        let stored = self.load()?;
        let mut status = self.status_of(stored.rotation.as_ref(), others, SystemTime::now())?;
        if status.in_progress.is_none() {
            // There is nothing to count, so no server was asked.
            status.not_counted.clear();
        }
        Ok(status)
    }

    /// Changes the stage. `others` is what the other servers answered a moment ago.
    ///
    /// # Errors
    /// Returns a [`RotationError`]. If a file cannot be written, the stage is unchanged, or the next
    /// start of the server completes the change. If the API server does not answer, the Secret may
    /// have the stage.
    pub fn act(
        &self,
        action: RotationAction,
        others: &OtherAgents,
    ) -> Result<RotationStatus, RotationError> {
        self.act_at(action, others, SystemTime::now())
    }

    fn act_at(
        &self,
        action: RotationAction,
        others: &OtherAgents,
        now: SystemTime,
    ) -> Result<RotationStatus, RotationError> {
        let _changing = self.changing.lock();
        let SharedCa {
            material,
            rotation: current,
            version,
        } = self.load()?;
        let step = decide(action, current.as_ref().map(|rotation| rotation.stage))?;
        if let (RotationAction::Next, Some(rotation)) = (action, &current) {
            self.check_followed(&material, others)?;
            self.check_renewed(rotation, others, now)?;
        }
        let ended = current.as_ref().map(|ended| self.count(ended, others, now));
        let rotation = match (step, current) {
            (StageChange::Begin, _) => {
                let new = CaMaterial::generate(now)?;
                let rotation = Rotation::new(&material, &new, now)?;
                Some(self.enter(rotation, version, now)?)
            }
            (StageChange::Enter(stage), Some(mut current)) => {
                current.stage = stage;
                Some(self.enter(current, version, now)?)
            }
            (StageChange::End(signer), Some(current)) => {
                self.end(&current, signer, version)?;
                None
            }
            (StageChange::Enter(_) | StageChange::End(_), None) => {
                return Err(RotationError::NotInProgress);
            }
        };
        let mut status = self.status_of(rotation.as_ref(), others, now)?;
        let is_last = status.in_progress.is_none();
        status.left_behind = ended.filter(|_| is_last || action == RotationAction::ForceNext);
        let stage = rotation.map_or("none", |rotation| rotation.stage.label());
        info!(ca = ?self.ca, stage, "the rotation of the CA has another stage");
        Ok(status)
    }

    /// Checks that every other server has the CA of the current stage and has said which agents it knows,
    /// and that the clock is right.
    fn check_followed(
        &self,
        current: &CaMaterial,
        others: &OtherAgents,
    ) -> Result<(), RotationError> {
        let surroundings = (self.observe)();
        if let Some(difference) = surroundings.clocks.first() {
            return Err(RotationError::Clock(difference.clone()));
        }
        surroundings.check_cas(current.digest())?;
        let named = |is_too_large: bool| {
            let servers = surroundings.not_counted(others);
            let meant = servers.filter(|server| others.is_too_large(server) == is_too_large);
            let names: NameList = meant.collect();
            (!names.is_empty()).then(|| names.to_string())
        };
        if let Some(names) = named(true) {
            return Err(RotationError::TooManyNodes(names));
        }
        match named(false) {
            Some(names) => Err(RotationError::NotCounted(names)),
            None => Ok(()),
        }
    }

    /// Checks that the next stage refuses no agent, and that none is on its way to a server.
    fn check_renewed(
        &self,
        rotation: &Rotation,
        others: &OtherAgents,
        now: SystemTime,
    ) -> Result<(), RotationError> {
        let pending = self.count(rotation, others, now).pending;
        if pending > 0 {
            return Err(RotationError::Pending { pending });
        }
        match (self.observe)().moving {
            Some(left) => Err(RotationError::AgentsMove(left)),
            None => Ok(()),
        }
    }

    /// Uses both CAs as the stage of `rotation` says, and persists the stage.
    fn enter(
        &self,
        mut rotation: Rotation,
        version: Option<String>,
        now: SystemTime,
    ) -> Result<Rotation, RotationError> {
        let material = Arc::new(rotation.material()?);
        // Until all servers follow the stage, the CA of the previous stage signs.
        let followed = whole_seconds(now) + self.followed_within;
        // Certificates of the previous stage are older, also when that was short.
        let since = followed.max(rotation.since + Duration::from_secs(1));
        self.begin_at(&mut rotation, since);
        // No certificate of a stage exists that a crash would undo.
        self.replace(material, Some(&rotation), version)?;
        Ok(rotation)
    }

    /// Sets the time since which certificates are those of the stage.
    fn begin_at(&self, rotation: &mut Rotation, since: SystemTime) {
        let longest = longest_remaining(&self.nodes.snapshot(), since);
        rotation.since = since;
        rotation.life = self.ca.life().max(longest);
    }

    /// Lets the stage of a rotation in progress begin again while a server does not follow it, because
    /// that one issues certificates of an earlier stage. Call it every [`FOLLOWERS_INTERVAL`]. What
    /// cannot be written is written at a later call. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`CaError`] if the rotation cannot be read or written.
    pub fn observe_followers(&self) -> Result<(), CaError> {
        self.observe_followers_at(SystemTime::now())
    }

    fn observe_followers_at(&self, now: SystemTime) -> Result<(), CaError> {
        let Some(lagged) = self.lagged(now) else {
            return Ok(());
        };
        let _changing = self.changing.lock();
        let SharedCa {
            material,
            rotation: Some(mut rotation),
            version,
        } = self.load()?
        else {
            self.followers.lock().lagged = None;
            return Ok(());
        };
        let since = whole_seconds(lagged) + FOLLOWERS_INTERVAL + FOLLOWED_WITHIN;
        if since > rotation.since + FOLLOWERS_INTERVAL {
            self.begin_at(&mut rotation, since);
            let is_written = self.store.replace(material, Some(&rotation), version)?;
            if !is_written {
                return Ok(());
            }
        }
        self.followers.lock().lagged = None;
        Ok(())
    }

    /// Observes the other servers and this one. Returns when a server was last observed that did not
    /// follow, if that is not written yet.
    fn lagged(&self, now: SystemTime) -> Option<SystemTime> {
        let (surroundings, own) = ((self.observe)(), self.ca.digest());
        let mut followers = self.followers.lock();
        // A server whose CA was replaced may have followed late.
        let has_changed = followers
            .own
            .replace(own)
            .is_some_and(|before| before != own);
        let is_followed = surroundings.check_cas(own).is_ok();
        let is_in_progress = self.is_in_progress();
        // A wrong clock says nothing about times.
        if is_in_progress && (has_changed || !is_followed) && surroundings.clocks.is_empty() {
            followers.lagged = Some(now);
        }
        followers.lagged
    }

    /// Trusts only the CA `signer` of the rotation, and removes the rotation.
    fn end(
        &self,
        rotation: &Rotation,
        signer: Signer,
        version: Option<String>,
    ) -> Result<(), RotationError> {
        let material = Arc::new(rotation.ca(signer)?);
        self.replace(material, None, version)
    }

    /// Writes the store, and uses its CA without waiting for a watch.
    fn replace(
        &self,
        material: Arc<CaMaterial>,
        rotation: Option<&Rotation>,
        version: Option<String>,
    ) -> Result<(), RotationError> {
        if !self.store.replace(material.clone(), rotation, version)? {
            return Err(RotationError::Changed);
        }
        self.ca.replace(material);
        Ok(())
    }

    fn status_of(
        &self,
        rotation: Option<&Rotation>,
        others: &OtherAgents,
        now: SystemTime,
    ) -> Result<RotationStatus, CaError> {
        let in_progress = rotation.map(|rotation| {
            let spki = |signer| {
                let material = rotation.ca(signer)?;
                Ok::<_, CaError>(hex(&material.spki_sha256))
            };
            Ok::<_, CaError>(RotationProgress {
                stage: rotation.stage,
                since: rotation.since,
                renewed_by: rotation.renewed_by(),
                old: spki(Signer::Old)?,
                new: spki(Signer::New)?,
                agents: self.count(rotation, others, now),
            })
        });
        let surroundings = (self.observe)();
        let not_counted = surroundings.not_counted(others);
        let not_counted = not_counted.map(ToString::to_string).collect();
        Ok(RotationStatus {
            signer: hex(&self.ca.spki_sha256()),
            in_progress: in_progress.transpose()?,
            other_servers: surroundings.cas.len(),
            not_counted,
            left_behind: None,
        })
    }

    /// Returns the connected agents whose certificates are of an earlier stage than the one in progress,
    /// and the begin of that. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`CaError`] if the rotation cannot be read.
    pub fn due_agents(&self) -> Result<Option<(SystemTime, Vec<NodeName>)>, CaError> {
        self.due_agents_at(SystemTime::now())
    }

    fn due_agents_at(
        &self,
        now: SystemTime,
    ) -> Result<Option<(SystemTime, Vec<NodeName>)>, CaError> {
        if !self.is_in_progress() {
            return Ok(None);
        }
        let rotation = self.load()?.rotation;
        // A certificate that is issued before is not one of the stage.
        let Some(rotation) = rotation.filter(|rotation| rotation.since <= now) else {
            return Ok(None);
        };
        let connected = (self.observe)().connected.into_iter();
        let due = connected.filter(|node| {
            let known = self.nodes.get(node);
            known.is_some_and(|known| is_due(&known, rotation.since))
        });
        Ok(Some((rotation.since, due.collect())))
    }

    fn count(&self, rotation: &Rotation, others: &OtherAgents, now: SystemTime) -> AgentCounts {
        let Surroundings {
            connected, gone, ..
        } = (self.observe)();
        let own = known_certificates(&self.nodes.snapshot(), &connected, &gone);
        others.count(own, rotation.since, now)
    }
}

tunnel_process::partial_debug!(CaRotator { ca, store });

/// What an action does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StageChange {
    Begin,
    Enter(RotationStage),
    /// Ends the rotation with this CA.
    End(Signer),
}

fn decide(
    action: RotationAction,
    stage: Option<RotationStage>,
) -> Result<StageChange, RotationError> {
    use RotationStage::{Announced, Issuing, Returning};
    match (action, stage) {
        (RotationAction::Begin, None) => Ok(StageChange::Begin),
        (RotationAction::Begin, Some(_)) => Err(RotationError::InProgress),
        (RotationAction::Next | RotationAction::ForceNext | RotationAction::Abort, None) => {
            Err(RotationError::NotInProgress)
        }
        (RotationAction::Next | RotationAction::ForceNext, Some(stage)) => Ok(match stage {
            Announced => StageChange::Enter(Issuing),
            Issuing => StageChange::End(Signer::New),
            Returning => StageChange::End(Signer::Old),
        }),
        (RotationAction::Abort, Some(Announced)) => Ok(StageChange::End(Signer::Old)),
        (RotationAction::Abort, Some(Issuing)) => Ok(StageChange::Enter(Returning)),
        (RotationAction::Abort, Some(Returning)) => Err(RotationError::AlreadyReturning),
    }
}

/// Interval at which a server observes whether the others follow a rotation.
pub const FOLLOWERS_INTERVAL: Duration = Duration::from_secs(30);
/// Time within which a stage is persisted, with a margin for slow disks. Certificates that are issued
/// in it do not count as those of the stage.
const PERSISTED_WITHIN: Duration = Duration::from_secs(3);
/// Like [`PERSISTED_WITHIN`], for the write of the Secret and the watches of the other servers, which
/// take at most two seconds while the API server answers.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests;
