//! One owner of a node among all servers. A second agent process of the node is admitted only if the
//! first one's session does not answer, and then that session ends. Of two live processes whose
//! admissions crossed, or that two servers admitted while the connection between them was lost, one
//! is closed: [`Contender`] decides which. An announcement closes no session, and neither does a
//! question that comes before an admission.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::peer::{Ask, HeldNode};
use tunnel_routing::directory::{Contender, Tenure};

use super::link::{Link, Question, VIOLATIONS};
use super::metrics::YieldResult;
use super::yields::CONTESTS_MAX;
use super::{PeerEndpoint, Peers};
use crate::routing::registry::{AgentSession, answers_probe};

impl Peers {
    /// Returns a server that holds a node with another agent process than `instance`, whose session
    /// answers there. Waits for at most 1.5 s. A server without an answer by then does not count.
    ///
    /// Cancel-safe.
    pub async fn is_held_by_other(
        &self,
        node: &NodeName,
        instance: InstanceId,
    ) -> Option<ReplicaId> {
        let question = Question {
            node: node.clone(),
            instance,
            is_admitted: false,
        };
        let holders = self.others(node, instance).into_iter();
        let mut answers: FuturesUnordered<_> = holders
            .map(|(link, _entry)| {
                let question = question.clone();
                async move {
                    let is_alive = link.ask(question).await?;
                    is_alive.then(|| link.replica.clone())
                }
            })
            .collect();
        while let Some(holder) = answers.next().await {
            if holder.is_some() {
                return holder;
            }
        }
        None
    }

    /// Compares a registered session with what other servers announced. An announcement may have
    /// arrived during the admission, and a server may not have answered then.
    pub fn check_owner(self: &Arc<Self>, agent: &Arc<AgentSession>, shutdown: &Shutdown) {
        for (link, _entry) in self.others(&agent.node, agent.instance) {
            self.contest(agent, &link.replica, shutdown);
        }
    }

    /// Spawns the task that finds out whether a session or the agent process at another server keeps
    /// the name.
    fn contest(
        self: &Arc<Self>,
        agent: &Arc<AgentSession>,
        replica: &ReplicaId,
        shutdown: &Shutdown,
    ) {
        if !self.contender(agent, replica).asks() {
            return;
        }
        let Ok(permit) = self.contests.clone().try_acquire_owned() else {
            if VIOLATIONS.admit() {
                warn!(peer = %replica, limit = CONTESTS_MAX, "too many names are used twice at once; the rest is not compared");
            }
            return;
        };
        let (peers, agent, replica) = (self.clone(), agent.clone(), replica.clone());
        let closing = shutdown.clone();
        shutdown.spawn_service(async move {
            let is_lost = tokio::select! {
                is_lost = peers.loses(&agent, &replica) => is_lost,
                _ = agent.session.closed() => false,
            };
            if is_lost {
                yield_to(agent, &replica, &closing);
            }
            drop(permit);
        });
    }

    /// Asks another server until it is clear which process keeps the name. Returns whether the
    /// session must be closed.
    async fn loses(&self, agent: &AgentSession, replica: &ReplicaId) -> bool {
        loop {
            let contender = self.contender(agent, replica);
            let others = self.others(&agent.node, agent.instance);
            let other = others
                .into_iter()
                .find(|(link, _)| link.replica == *replica);
            let Some((link, entry)) = other else {
                return false;
            };
            if agent.is_withdrawn() || !contender.asks() {
                return false;
            }
            // The other server takes over from a session that is silent, when it asks.
            if answers_probe(&agent.session).await {
                let question = Question {
                    node: agent.node.clone(),
                    instance: agent.instance,
                    is_admitted: true,
                };
                let times_kept = agent.times_kept_name();
                match link.ask(question).await {
                    Some(true) => {
                        self.record_used_twice(&agent.node, replica);
                        if contender.yields_to(entry.instance)
                            && agent.times_kept_name() == times_kept
                            && self.may_yield(&agent.node, replica)
                        {
                            return true;
                        }
                    }
                    Some(false) => return false,
                    None => {}
                }
            }
            sleep(ASK_AGAIN).await;
        }
    }

    /// Returns the agent process of a session as it compares with one at another server.
    fn contender(&self, agent: &AgentSession, replica: &ReplicaId) -> Contender {
        let now = Instant::now();
        let is_recent = |at: Instant| now.saturating_duration_since(at) < CROSSING;
        let state = self.state.lock();
        let tenure = if state
            .connected_at
            .get(replica)
            .is_some_and(|at| is_recent(*at))
        {
            Tenure::Reconnected
        } else if is_recent(agent.admitted()) {
            Tenure::New
        } else {
            Tenure::Settled
        };
        Contender {
            instance: agent.instance,
            tenure,
        }
    }

    /// Records a new connection with another server, in either direction.
    pub(super) fn record_connection(&self, replica: &ReplicaId) {
        let now = Instant::now();
        let connected_at = &mut self.state.lock().connected_at;
        connected_at.retain(|_, at| now.saturating_duration_since(*at) < CROSSING);
        connected_at.insert(replica.clone(), now);
    }

    fn record_used_twice(&self, node: &NodeName, replica: &ReplicaId) {
        let used_twice = &mut self.state.lock().used_twice;
        used_twice.insert(node, replica, Instant::now());
    }

    /// Returns the condition about names that two live agents use, if there are any.
    pub fn used_twice(&self) -> Option<String> {
        self.state.lock().used_twice.condition(Instant::now())
    }

    /// Returns whether the live sessions of a node may be closed in favor of an agent at `replica`,
    /// and counts that.
    fn may_yield(&self, node: &NodeName, replica: &ReplicaId) -> bool {
        let is_admitted = (self.state.lock().yields).admit(replica, node, Instant::now());
        let result = if is_admitted {
            YieldResult::Yielded
        } else {
            YieldResult::Limited
        };
        self.metrics.yielded(result);
        if !is_admitted && VIOLATIONS.admit() {
            warn!(peer = %replica, "server claims the names of too many live sessions; no more of them are closed for a minute");
        }
        is_admitted
    }

    /// Returns the connected servers that hold a node with another agent process, and what they
    /// announced.
    fn others(&self, node: &NodeName, instance: InstanceId) -> Vec<(Arc<Link>, HeldNode)> {
        let state = self.state.lock();
        let others = state.directory.others(node, instance).into_iter();
        others
            .filter_map(|(replica, entry)| Some((state.link(&replica)?.clone(), entry)))
            .collect()
    }
}

impl PeerEndpoint {
    /// Compares the sessions of this server with nodes that another server announced.
    pub(super) fn compare_announced(&self, replica: &ReplicaId, held_nodes: &[HeldNode]) {
        for other in held_nodes {
            let sessions = self.registry.of_node(&other.node).into_iter();
            let rivals =
                sessions.filter(|agent| agent.instance != other.instance && !agent.is_withdrawn());
            for agent in rivals {
                self.peers.contest(&agent, replica, &self.shutdown);
            }
        }
    }

    /// Returns whether another agent process than the asked one keeps the name of a node here, or
    /// `None` while that is not clear. A process whose session answers gives the name up only to one
    /// that the other server has admitted: a question before the admission closes no session. A session
    /// without an answer is closed when its own monitor suspects it, or after 10 s of silence.
    pub(super) async fn keeps_name(&self, replica: &ReplicaId, ask: &Ask) -> Option<bool> {
        let mut rivals = self.registry.of_node(&ask.node);
        rivals.retain(|agent| agent.instance != ask.instance && !agent.is_withdrawn());
        let answers = join_all(rivals.iter().map(|agent| answers_probe(&agent.session))).await;
        if !answers.contains(&true) {
            if !ask.is_admitted {
                return Some(false);
            }
            let now = Instant::now();
            let is_lost = |agent: &Arc<AgentSession>| {
                agent.suspect_reason().is_some()
                    || now.saturating_duration_since(agent.session.stats().received_at) >= SILENCE
            };
            let (lost, unclear): (Vec<_>, Vec<_>) = rivals.into_iter().partition(is_lost);
            for old in lost {
                warn!(node = %old.node, session = old.id.0, "silent session is superseded by an agent process at another server");
                old.withdraw();
                self.shutdown
                    .spawn_service(async move { old.close_superseded().await });
            }
            return unclear.is_empty().then_some(false);
        }
        if !ask.is_admitted {
            return Some(true);
        }
        self.peers.record_used_twice(&ask.node, replica);
        let keeps = |agent: &Arc<AgentSession>| {
            let contender = self.peers.contender(agent, replica);
            contender.keeps_name(ask.instance)
        };
        if rivals.iter().any(keeps) || !self.peers.may_yield(&ask.node, replica) {
            rivals.iter().for_each(|agent| agent.keep_name());
            return Some(true);
        }
        for agent in rivals {
            yield_to(agent, replica, &self.shutdown);
        }
        Some(false)
    }
}

/// Closes a session in favor of the agent process at another server.
fn yield_to(agent: Arc<AgentSession>, replica: &ReplicaId, shutdown: &Shutdown) {
    info!(
        node = %agent.node, session = agent.id.0, peer = %replica,
        "another server has a live agent of this name, closing the session"
    );
    agent.withdraw();
    let reason = format!("another live agent of this name is connected to server {replica}");
    shutdown.spawn_service(async move {
        agent.close(CloseCode::NameInUse, &reason).await;
    });
}

/// Silence after which a session that does not answer is given up: two keep-alives of the agent. An
/// idle session is silent for one of them, and a moment of a slow path is shorter than the other.
const SILENCE: Duration = Duration::from_secs(10);
/// Pause before a server that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(500);
/// Time within which two admissions can have crossed, and for which two servers compare their
/// sessions after they have connected. Longer than a connection between servers can be silent before
/// it is closed (12.5 s), so that an announcement that takes longer arrives over a new connection.
pub(super) const CROSSING: Duration = Duration::from_secs(15);
