//! Sessions of agents: what all of them share, with the rate at which a node may open them.
//! `session/admission.rs` admits a session, and `session/session_loop.rs` runs it afterwards.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{NodeName, ReplicaId};

use self::failures::{Attempt, FailedNode, Failures};
use self::saved_connections::SavedConnections;
use crate::config::SharedLimits;
use crate::egress::CloudEgress;
use crate::metrics::Metrics;
use crate::node_rate::NodeRate;
use crate::routing::peers::Peers;
use crate::routing::registry::Registry;
use tunnel_ca::renewal::Renewals;
use tunnel_ca::revocation::Revocations;
use tunnel_store::known_nodes::KnownNodes;

mod admission;
pub mod agent_listener;
pub mod failures;
pub(crate) mod refused;
mod renewal;
pub(crate) mod saved_connections;
mod session_loop;

/// State of the server that all sessions share.
#[derive(Debug, Clone)]
pub struct Sessions {
    pub registry: Arc<Registry>,
    /// The other servers. Agents learn of them, and one of them may hold the same node.
    pub peers: Arc<Peers>,
    /// Known nodes. The connection of an admitted session is recorded here.
    pub nodes: Arc<KnownNodes>,
    pub metrics: Metrics,
    /// What failed at agents, for operators.
    pub failures: Arc<Failures>,
    /// Shutdown signals and the tasks that they cover.
    pub shutdown: Shutdown,
    pub limits: SharedLimits,
    /// Time for which open streams can continue after SIGTERM.
    pub drain: Duration,
    /// Time after SIGTERM within which agents move to another server, if there is one.
    pub move_within: Duration,
    /// Connections that the next process resets if this one is killed.
    pub(crate) saved_connections: Option<SavedConnections>,
    /// Rate limit for the sessions that a node opens.
    pub admission_rate: Arc<NodeRate>,
    /// A permit for each session that the process has memory for.
    pub permits: Arc<Semaphore>,
    /// Credentials that were revoked.
    pub revocations: Arc<Revocations>,
    /// CAs whose certificates are accepted.
    pub trust: Option<Arc<AgentTrust>>,
    /// Serves the streams of agents to targets of the cloud, if there are targets.
    pub cloud: Option<Arc<CloudEgress>>,
    /// Issues renewed certificates. With `None`, operators replace the certificates of agents.
    pub renewals: Option<Arc<Renewals>>,
}

impl Sessions {
    /// Returns the egress to targets of the cloud, if the node may reach one.
    fn cloud_of(&self, node: &NodeName) -> Option<&Arc<CloudEgress>> {
        self.cloud.as_ref().filter(|cloud| cloud.has_target(node))
    }

    /// Records a failure of an agent for operators.
    fn record_failure(
        &self,
        code: &'static str,
        node: FailedNode,
        address: SocketAddr,
        detail: impl Into<String>,
    ) {
        self.metrics.agent_failure(code);
        let attempt = Attempt {
            code,
            node,
            address,
            detail: detail.into(),
        };
        self.failures.record(attempt, SystemTime::now());
    }
}

/// Returns whether agents of the server `own` can move to another one.
pub fn can_agents_move(members: &[Member], own: &ReplicaId) -> bool {
    let mut others = members.iter().filter(|member| member.id != *own);
    others.any(|member| !member.is_leaving)
}

/// Returns the rate of the sessions that a node opens (`limits.admissionsPerNode`).
pub(crate) fn admission_rate(burst: u32) -> NodeRate {
    NodeRate::new(ADMISSIONS_PER_SECOND, burst)
}

/// Sessions per second that a node can open after its burst (`limits.admissionsPerNode`). An agent
/// whose sessions are lost right after admission opens about one per second, and one that looks for
/// another server behind the same address at most one.
const ADMISSIONS_PER_SECOND: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_move_only_to_another_server_that_stays() {
        let member = |name: &str, is_leaving| Member {
            id: name.parse().unwrap(),
            addresses: Vec::new(),
            is_leaving,
            zone: None,
        };
        let can_move = |others: &[Member]| {
            let own = member("server-1", true);
            let members: Vec<_> = others.iter().chain([&own]).cloned().collect();
            can_agents_move(&members, &own.id)
        };
        assert!(!can_move(&[]));
        assert!(!can_move(&[member("server-2", true)]));
        let others = [member("server-2", true), member("server-3", false)];
        assert!(can_move(&others));
    }

    #[test]
    fn node_that_opens_sessions_in_a_loop_is_refused_and_others_are_not() {
        let rate = admission_rate(20);
        let loops: NodeName = "worker-1".parse().unwrap();
        let allowed = (0..1500).filter(|_| rate.allows(&loops)).count();
        // Allows for two more sessions per second that the loop takes on a slow machine.
        assert!((20..40).contains(&allowed), "{allowed} of 1500 sessions");
        assert!(rate.allows(&"worker-2".parse().unwrap()));
    }
}
