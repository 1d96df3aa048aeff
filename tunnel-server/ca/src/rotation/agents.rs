//! The certificates of agents as all servers know them. Pure.
//!
//! Every server knows what it has seen: an agent that has moved to another server has an older
//! certificate here than there. So what servers know is merged for each node, in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_store::known_nodes::{EnrollmentKind, KnownNode, NodeMap};

use super::status::AgentCounts;

/// What the other servers know of the certificates of agents.
#[derive(Debug, Clone, Default)]
pub struct OtherAgents {
    agents: BTreeMap<NodeName, Agent>,
    /// The servers whose answer is in `agents`.
    counted: BTreeSet<ReplicaId>,
    /// The servers whose answer was too large to be in `agents`.
    too_large: BTreeSet<ReplicaId>,
}

impl OtherAgents {
    /// Adds all that another server knows.
    pub fn add(&mut self, server: ReplicaId, nodes: Vec<NodeCertificate>) {
        self.counted.insert(server);
        for node in nodes {
            add(&mut self.agents, node);
        }
    }

    /// Adds that another server knows more nodes than `limits.directoryNodes`.
    pub fn add_too_large(&mut self, server: ReplicaId) {
        self.too_large.insert(server);
    }

    /// Returns whether a server answered, and knows too many nodes.
    pub(super) fn is_too_large(&self, server: &ReplicaId) -> bool {
        self.too_large.contains(server)
    }

    /// Returns whether the agents that a server knows are counted.
    pub(super) fn has(&self, server: &ReplicaId) -> bool {
        self.counted.contains(server)
    }

    /// Counts all nodes, each of them once, with those that this server knows. A certificate of the
    /// stage was issued at `since` or later.
    pub(super) fn count(
        &self,
        own: Vec<NodeCertificate>,
        since: SystemTime,
        now: SystemTime,
    ) -> AgentCounts {
        let mut agents = self.agents.clone();
        for node in own {
            add(&mut agents, node);
        }
        let mut counts = AgentCounts::default();
        for (name, agent) in agents {
            match agent.standing(since, now) {
                Standing::Kubelet => counts.kubelets += 1,
                Standing::Renewed => counts.renewed += 1,
                Standing::Expired => counts.expired += 1,
                Standing::Pending => {
                    counts.pending += 1;
                    if counts.pending_nodes.len() < PENDING_NODES_MAX {
                        counts.pending_nodes.push(name.as_str().to_owned());
                    }
                }
            }
        }
        counts
    }
}

/// Returns what a server knows: its known nodes, those with a session at it, and those of servers that
/// are gone.
pub fn known_certificates(
    nodes: &NodeMap,
    connected: &BTreeSet<NodeName>,
    gone: &BTreeSet<NodeName>,
) -> Vec<NodeCertificate> {
    let known = nodes.iter().map(|(name, node)| NodeCertificate {
        node: name.clone(),
        issued: node.certificate_issued,
        not_after: node.certificate_not_after,
        is_kubelet: is_kubelet(node),
        is_connected: connected.contains(name),
        is_gone: false,
    });
    let gone = gone.iter().map(|name| NodeCertificate {
        is_gone: true,
        ..NodeCertificate::unknown(name.clone())
    });
    known.chain(gone).collect()
}

fn add(agents: &mut BTreeMap<NodeName, Agent>, node: NodeCertificate) {
    let agent = agents.entry(node.node).or_default();
    agent.is_gone |= node.is_gone;
    let Some(not_after) = node.not_after else {
        return;
    };
    let certificate = Certificate {
        issued: node.issued,
        not_after,
        is_kubelet: node.is_kubelet,
    };
    agent.newest = agent.newest.max(Some(certificate));
    if node.is_connected {
        let of_sessions = agent.connected.into_iter().chain([certificate]);
        // A session with the kubelet's certificate hides none with another one.
        agent.connected = of_sessions.min_by_key(|session| (session.is_kubelet, *session));
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Certificate {
    issued: Option<SystemTime>,
    not_after: SystemTime,
    is_kubelet: bool,
}

/// What servers know of a node, merged.
#[derive(Debug, Clone, Default)]
struct Agent {
    /// The last certificate that a server has seen.
    newest: Option<Certificate>,
    /// The oldest certificate of the sessions that servers have, that of a kubelet only if all have it.
    /// What a server sees in a session counts more than what another one remembers or claims.
    connected: Option<Certificate>,
    /// A server that is gone had a session of the node, so that its certificate is valid.
    is_gone: bool,
}

enum Standing {
    Renewed,
    Pending,
    Expired,
    Kubelet,
}

impl Agent {
    fn standing(&self, since: SystemTime, now: SystemTime) -> Standing {
        // That of a session is valid, also if this server's clock says otherwise.
        let is_in_use = self.connected.is_some() || self.is_gone;
        match self.connected.or(self.newest) {
            Some(certificate) if certificate.is_kubelet => Standing::Kubelet,
            Some(certificate) if !is_in_use && certificate.not_after <= now => Standing::Expired,
            Some(certificate) if certificate.issued >= Some(since) => Standing::Renewed,
            None if !is_in_use => Standing::Expired,
            Some(_) | None => Standing::Pending,
        }
    }
}

/// Returns whether a node with a session has a certificate that was issued before the stage.
pub(super) fn is_due(node: &KnownNode, since: SystemTime) -> bool {
    let has_certificate = node.certificate_not_after.is_some() && !is_kubelet(node);
    has_certificate && node.certificate_issued < Some(since)
}

/// Returns how long the certificates of the nodes are valid after `since`, and a second more. The
/// lifetime may have been longer when they were issued.
pub(super) fn longest_remaining(nodes: &NodeMap, since: SystemTime) -> Duration {
    let issued_here = nodes.iter().filter(|(_name, node)| !is_kubelet(node));
    let ends = issued_here.filter_map(|(_name, node)| node.certificate_not_after);
    let remaining = ends.filter_map(|end| end.duration_since(since).ok()).max();
    remaining.unwrap_or_default() + Duration::from_secs(1)
}

fn is_kubelet(node: &KnownNode) -> bool {
    node.enrollment == Some(EnrollmentKind::Kubelet)
}

/// Maximum number of pending agents in the status, so that an operator can look at them.
const PENDING_NODES_MAX: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds of the test's time. The stage begins at 100, and it is 1,000.
    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn seen(name: &str, issued: u64, not_after: u64) -> NodeCertificate {
        NodeCertificate {
            issued: Some(at(issued)),
            not_after: Some(at(not_after)),
            ..NodeCertificate::unknown(name.parse().unwrap())
        }
    }

    fn connected(name: &str, issued: u64, not_after: u64) -> NodeCertificate {
        NodeCertificate {
            is_connected: true,
            ..seen(name, issued, not_after)
        }
    }

    /// Counts what three servers know, of which the first one counts, in each order of the others.
    fn counts(servers: [Vec<NodeCertificate>; 3]) -> AgentCounts {
        let [own, one, other] = servers;
        let counted = [[&one, &other], [&other, &one]].map(|others| {
            let mut agents = OtherAgents::default();
            for (number, nodes) in others.into_iter().enumerate() {
                agents.add(format!("s{number}").parse().unwrap(), nodes.clone());
            }
            agents.count(own.clone(), at(100), at(1000))
        });
        assert_eq!(counted[0], counted[1]);
        let [counts, _] = counted;
        counts
    }

    fn numbers(counts: &AgentCounts) -> [usize; 4] {
        let AgentCounts {
            renewed,
            pending,
            expired,
            kubelets,
            ..
        } = *counts;
        [renewed, pending, expired, kubelets]
    }

    #[test]
    fn node_that_several_servers_know_counts_once_by_its_last_certificate() {
        let [old, new] = [seen("x", 50, 5000), seen("x", 150, 5100)];
        for servers in [
            [vec![old.clone()], vec![new.clone()], vec![]],
            [vec![new.clone()], vec![old.clone()], vec![old.clone()]],
            [vec![], vec![old.clone()], vec![new.clone()]],
        ] {
            assert_eq!(numbers(&counts(servers)), [1, 0, 0, 0]);
        }
        let both = counts([
            vec![connected("x", 50, 5000)],
            vec![connected("x", 50, 5000)],
            vec![],
        ]);
        assert_eq!(numbers(&both), [0, 1, 0, 0]);
        assert_eq!(both.pending_nodes, ["x"]);
        // An expired one is no agent in addition.
        let expired = seen("x", 1, 900);
        assert_eq!(
            numbers(&counts([vec![expired.clone()], vec![new], vec![]])),
            [1, 0, 0, 0]
        );
        assert_eq!(
            numbers(&counts([vec![expired], vec![old], vec![]])),
            [0, 1, 0, 0]
        );
    }

    #[test]
    fn pending_agents_of_every_server_count_and_are_named() {
        let all = counts([
            vec![seen("a", 150, 5000)],
            vec![seen("b", 50, 5000), seen("c", 150, 5000)],
            vec![connected("d", 99, 5000), seen("e", 50, 999)],
        ]);
        assert_eq!(numbers(&all), [2, 2, 1, 0]);
        assert_eq!(all.pending_nodes, ["b", "d"]);
    }

    #[test]
    fn certificate_of_a_session_counts_whatever_other_servers_and_clocks_say() {
        let claimed = seen("x", 500, 9000);
        let in_use = connected("x", 50, 900);
        let all = counts([vec![], vec![in_use.clone()], vec![claimed.clone()]]);
        assert_eq!(numbers(&all), [0, 1, 0, 0]);
        // Of two sessions the one with the older certificate waits.
        let all = counts([vec![connected("x", 500, 9000)], vec![in_use], vec![claimed]]);
        assert_eq!(numbers(&all), [0, 1, 0, 0]);
    }

    #[test]
    fn node_of_a_server_that_is_gone_is_pending_until_another_one_has_seen_its_certificate() {
        let gone = NodeCertificate {
            is_gone: true,
            ..NodeCertificate::unknown("x".parse().unwrap())
        };
        let counted =
            |seen: Vec<NodeCertificate>| numbers(&counts([vec![], vec![gone.clone()], seen]));
        assert_eq!(counted(vec![]), [0, 1, 0, 0]);
        assert_eq!(
            counted(vec![seen("x", 1, 900)]),
            [0, 1, 0, 0],
            "it had a session"
        );
        assert_eq!(counted(vec![seen("x", 150, 5000)]), [1, 0, 0, 0]);
    }

    #[test]
    fn nodes_with_another_certificate_or_none_are_not_pending() {
        let kubelet = NodeCertificate {
            is_kubelet: true,
            ..connected("k", 50, 5000)
        };
        let never = NodeCertificate::unknown("n".parse().unwrap());
        let all = counts([vec![kubelet.clone(), never.clone()], vec![never], vec![]]);
        assert_eq!(numbers(&all), [0, 0, 1, 1]);
        // The agent has another session, with a certificate of its own.
        let own = connected("k", 60, 5000);
        let both = counts([vec![], vec![own], vec![kubelet]]);
        assert_eq!(numbers(&both), [0, 1, 0, 0]);
    }
}
