//! One owner of a node among all servers. A second agent process of the node is admitted only if the
//! first one does not answer, and then the first one's session ends; and of two admissions that crossed the later one is closed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::sleep;
use tracing::{info, warn};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::peer::HeldNode;

use super::link::Link;
use super::{PeerEndpoint, Peers};
use crate::routing::directory::Claim;
use crate::routing::registry::{AgentSession, Registry};

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
        self.ask_holders(self.others(node, instance), instance)
            .await
    }

    /// Closes a registered session if another server admitted another agent process of its node
    /// before, and that process answers. Its announcement may have arrived during the admission, and
    /// a server that did not answer then is asked until it answers or its connection is lost.
    pub fn check_owner(
        self: &Arc<Self>,
        registry: &Registry,
        agent: &Arc<AgentSession>,
        shutdown: &Shutdown,
    ) {
        let sessions = registry.of_node(&agent.node);
        let Some(since) = claimed_since(&sessions, |instance| instance == agent.instance) else {
            return;
        };
        if self.earlier_others(agent, since).is_empty() {
            return;
        }
        let (peers, agent, closing) = (self.clone(), agent.clone(), shutdown.clone());
        shutdown.spawn_service(async move {
            let owner = tokio::select! {
                owner = peers.earlier_owner(&agent, since) => owner,
                _ = agent.session.closed() => None,
            };
            if let Some(replica) = owner {
                yield_to(agent, &replica, &closing);
            }
        });
    }

    async fn earlier_owner(&self, agent: &AgentSession, since: SystemTime) -> Option<ReplicaId> {
        loop {
            let others = self.earlier_others(agent, since);
            if others.is_empty() {
                return None;
            }
            let owner = self.ask_holders(others, agent.instance).await;
            if owner.is_some() {
                return owner;
            }
            sleep(ASK_AGAIN).await;
        }
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

    /// Returns those of the others to which a session yields that was admitted at `since`.
    fn earlier_others(
        &self,
        agent: &AgentSession,
        since: SystemTime,
    ) -> Vec<(Arc<Link>, HeldNode)> {
        let mut others = self.others(&agent.node, agent.instance);
        others.retain(|(link, entry)| self.precedes(since, &link.replica, entry));
        others
    }

    /// Returns whether another server admitted its agent before `since`, and has not given it up.
    fn precedes(&self, since: SystemTime, replica: &ReplicaId, entry: &HeldNode) -> bool {
        let own = Claim::new(since, self.own());
        own.yields_to(&Claim::new(entry.since, replica)) && !self.is_yielded(replica, entry)
    }

    /// Asks servers for a session that answers, and returns the first one that has it.
    async fn ask_holders(
        &self,
        holders: Vec<(Arc<Link>, HeldNode)>,
        instance: InstanceId,
    ) -> Option<ReplicaId> {
        let mut answers: FuturesUnordered<_> = holders
            .into_iter()
            .map(|(link, entry)| async move {
                let is_alive = link.ask(&entry.node, instance).await?;
                if !is_alive {
                    self.record_yield(&link.replica, entry);
                }
                is_alive.then(|| link.replica.clone())
            })
            .collect();
        while let Some(holder) = answers.next().await {
            if holder.is_some() {
                return holder;
            }
        }
        None
    }
}

impl PeerEndpoint {
    /// Compares the sessions of a node with what another server has announced of it.
    pub(super) fn resolve_announced(&self, replica: &ReplicaId, node: &NodeName) {
        let own = self.registry.of_node(node);
        let instances: HashSet<InstanceId> = own.iter().map(|agent| agent.instance).collect();
        for instance in instances {
            let others = self.peers.state.lock().directory.others(node, instance);
            let announced = others.into_iter().filter(|(holder, _)| holder == replica);
            let announced: Vec<HeldNode> = announced.map(|(_, entry)| entry).collect();
            self.resolve_crossed(replica, &announced);
        }
    }

    /// Closes the sessions of nodes that another server holds with another agent process, if they
    /// permit the takeover, or if the agent was admitted there first. In the latter case the
    /// admissions crossed: neither server knew of the other. An entry from before that server gave
    /// up the node does not count.
    pub(super) fn resolve_crossed(&self, replica: &ReplicaId, held_nodes: &[HeldNode]) {
        for other in held_nodes {
            let all = self.registry.of_node(&other.node);
            let is_rival = |agent: &AgentSession| {
                agent.instance != other.instance && !agent.has_yielded() && !agent.is_withdrawn()
            };
            let rivals: Vec<_> = all.iter().filter(|agent| is_rival(agent)).collect();
            let (taken, rivals): (Vec<_>, Vec<_>) = rivals
                .into_iter()
                .partition(|agent| agent.permits_takeover(replica, other.instance));
            for agent in taken {
                yield_silent(agent.clone(), replica, &self.shutdown);
            }
            let is_of_rival = |instance| {
                rivals
                    .iter()
                    .any(|rival: &&Arc<_>| rival.instance == instance)
            };
            let Some(since) = claimed_since(&all, is_of_rival) else {
                continue;
            };
            if !self.peers.precedes(since, replica, other) {
                continue;
            }
            for agent in rivals {
                yield_to(agent.clone(), replica, &self.shutdown);
            }
        }
    }
}

/// Returns the admission that counts for these agent processes. As in
/// [`Registry::held_nodes`], a session that was replaced counts: both servers must compare the same
/// times.
fn claimed_since(
    sessions: &[Arc<AgentSession>],
    is_of_process: impl Fn(InstanceId) -> bool,
) -> Option<SystemTime> {
    sessions
        .iter()
        .filter(|agent| !agent.has_yielded() && is_of_process(agent.instance))
        .map(|agent| agent.since)
        .min()
}

/// Closes a session that did not answer, in favor of the agent process at another server.
fn yield_silent(agent: Arc<AgentSession>, replica: &ReplicaId, shutdown: &Shutdown) {
    warn!(
        node = %agent.node, session = agent.id.0, peer = %replica,
        "silent session is superseded by an agent process at another server"
    );
    agent.yield_node();
    shutdown.spawn_service(async move { agent.close_superseded().await });
}

/// Closes a session in favor of the agent process at another server that was admitted first.
fn yield_to(agent: Arc<AgentSession>, replica: &ReplicaId, shutdown: &Shutdown) {
    info!(
        node = %agent.node, session = agent.id.0, peer = %replica,
        "another server admitted an agent of this name first, closing the session"
    );
    agent.yield_node();
    let reason = format!("another agent of this name was admitted by server {replica} first");
    shutdown.spawn_service(async move {
        agent.close(CloseCode::NameInUse, &reason).await;
    });
}

/// Pause before a server that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(500);
