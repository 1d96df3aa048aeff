//! The list of failures of agents at this server, with what to do about each.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::name::NodeName;

use super::status::NodeSources;
use crate::failure_code::SHORT_SESSION_CODE;
use crate::session::failures::{FailedNode, Failure, network};
use tunnel_store::data_dir::rfc3339;

/// Equal failures of agents at this server: a handshake, an enrollment or an admission that failed, or a
/// session that ended early.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureStatus {
    /// Name of the failure, as in docs/reference/codes.md.
    pub code: String,
    /// Name of the node, if the agent gave one.
    pub node: Option<String>,
    /// Whether a verified certificate has the name. Otherwise anybody may have claimed it.
    pub is_verified: bool,
    /// The /24 or /64 of the last source.
    pub source: String,
    /// Address of the last failure, `HOST:PORT`.
    pub address: String,
    /// Number of failures.
    pub count: u64,
    /// Time of the first failure, RFC 3339.
    pub first: String,
    /// Time of the last failure, RFC 3339.
    pub last: String,
    /// Reason of the last failure for people, at most 200 characters. The other end may have chosen
    /// it.
    pub detail: String,
    /// What to do.
    pub remedy: String,
    /// Whether an agent of the node has connected since, and stayed.
    pub is_over: bool,
    /// Nodes without an agent whose last session was from the address of the failure, at most 3.
    /// Set where there is no name.
    pub nodes_from_address: Vec<String>,
    /// Whether every client of the port can cause it: scanners and health checks do.
    pub is_noise: bool,
}

impl FailureStatus {
    /// Returns whether the failure is not over and was in the last hour, for `doctor` and the console.
    pub(crate) fn is_current(&self, now: SystemTime) -> bool {
        let last = humantime::parse_rfc3339(&self.last).unwrap_or(now);
        !self.is_over && now.duration_since(last).unwrap_or_default() <= FAILURE_AGE_MAX
    }
}

impl NodeSources {
    /// Returns the failures that this process remembers, the last one first: at most 1,000. The cost is
    /// in proportion to the number of nodes that have been connected.
    pub fn failures(&self) -> Vec<FailureStatus> {
        let Some(sessions) = &self.sessions else {
            return Vec::new();
        };
        let failures = sessions.failures.all();
        let unnamed = failures
            .iter()
            .filter(|failure| failure.node == FailedNode::Unknown);
        let addresses = unnamed.map(|failure| failure.address.ip().to_canonical());
        let mut nodes = sessions.registry.closed_from(&addresses.collect());
        for names in nodes.values_mut() {
            names.retain(|name| !sessions.registry.has(name));
            names.truncate(FROM_ADDRESS_MAX);
        }
        let is_over = |failure: &Failure| self.is_over(failure);
        let statuses = failures.iter();
        statuses
            .map(|failure| status(failure, is_over(failure), &nodes))
            .collect()
    }

    /// Returns whether an agent of the node has connected since the failure, and stayed.
    fn is_over(&self, failure: &Failure) -> bool {
        let (FailedNode::Verified(node) | FailedNode::Claimed(node)) = &failure.node else {
            return false;
        };
        let Some(sessions) = &self.sessions else {
            return false;
        };
        let grace = if failure.code == SHORT_SESSION_CODE {
            STAYED
        } else {
            Duration::ZERO
        };
        let now = SystemTime::now();
        let mut of_node = sessions.registry.of_node(node).into_iter();
        of_node.any(|agent| agent.since >= failure.last && agent.since + grace <= now)
    }
}

fn status(
    failure: &Failure,
    is_over: bool,
    nodes: &HashMap<IpAddr, Vec<NodeName>>,
) -> FailureStatus {
    let (node, is_verified) = match &failure.node {
        FailedNode::Verified(node) => (Some(node), true),
        FailedNode::Claimed(node) => (Some(node), false),
        FailedNode::Unknown => (None, false),
    };
    let source = network(failure.address.ip());
    let bits = if source.is_ipv4() { 24 } else { 64 };
    let address = failure.address.ip().to_canonical();
    let from_address = nodes.get(&address).filter(|_| node.is_none());
    FailureStatus {
        code: failure.code.to_owned(),
        node: node.map(NodeName::to_string),
        is_verified,
        source: format!("{source}/{bits}"),
        address: failure.address.to_string(),
        count: failure.count,
        first: rfc3339(failure.first),
        last: rfc3339(failure.last),
        detail: failure.detail.clone(),
        remedy: remedy(failure.code, node),
        is_over,
        nodes_from_address: from_address
            .into_iter()
            .flatten()
            .map(NodeName::to_string)
            .collect(),
        is_noise: NOISE.contains(&failure.code),
    }
}

/// Returns the lines of the condition for failures that concern an agent for certain: its certificate
/// was verified. `now` is the present time.
pub(crate) fn condition_lines(failures: &[Failure], now: SystemTime) -> Vec<String> {
    let of_agents = failures.iter().filter_map(|failure| match &failure.node {
        FailedNode::Verified(node) => Some((node, failure)),
        FailedNode::Claimed(_) | FailedNode::Unknown => None,
    });
    let current = of_agents.filter(|(_, failure)| is_current(failure, now));
    let names: BTreeSet<(&str, &NodeName)> = current
        .map(|(node, failure)| (failure.code, node))
        .collect();
    let mut lines = Vec::new();
    for code in CONDITION_CODES {
        let of_code = names.iter().filter(|(other, _)| other == code);
        let nodes: tunnel_process::name_list::NameList = of_code.map(|(_, node)| node).collect();
        if nodes.is_empty() {
            continue;
        }
        let remedy = remedy(code, None);
        lines.push(format!(
            "{code}: {nodes}; {remedy}; tunnel-server nodes --failed"
        ));
    }
    lines
}

/// Returns whether a failure is still going on. An agent whose name is in use tries again after 1 to 10
/// minutes, others within seconds.
fn is_current(failure: &Failure, now: SystemTime) -> bool {
    let age = now.duration_since(failure.last).unwrap_or_default();
    let repeats = failure.count >= REPEATED;
    match failure.code {
        "name_in_use" if failure.count > 1 => age < NAME_RETRY_MAX,
        SHORT_SESSION_CODE => repeats && age < CURRENT,
        _ => age < CURRENT,
    }
}

/// Returns what to do about a failure. `NAME` stands for the node where its name is not known.
pub fn remedy(code: &str, node: Option<&NodeName>) -> String {
    let name = node.map_or("NAME", NodeName::as_str);
    let text = match code {
        "timeout" | "handshake_timeout" => {
            "the connection was opened and no handshake followed: a health check of a load balancer, a scanner, or a path that drops large packets; on the node: tunnel-agent doctor"
        }
        "not_tls" => {
            "no agent: a health check, a scanner, or a proxy that speaks HTTP to this port; agents go through an HTTP proxy with --proxy"
        }
        "handshake_failed" => {
            "the other end closed the connection in the handshake; if it is an agent, on the node: tunnel-agent doctor"
        }
        "unknown_protocol" => {
            "no agent, or a proxy or firewall in front of the agent that opens TLS and speaks for it: exempt the address of this server from TLS inspection; on the node: tunnel-agent doctor"
        }
        "proxy_protocol" => {
            "disable PROXY protocol (send-proxy) for this port at the load balancer"
        }
        "no_certificate" => {
            "a proxy or firewall opens TLS in front of the agent and has no certificate of a node: exempt the address of this server from TLS inspection; on the node: tunnel-agent doctor"
        }
        "no_identity" => {
            "the certificate is none of an agent: start the agent with the certificate of its node, and callers use the listeners, not this port"
        }
        "server_untrusted" => {
            "the agent knows another CA than this server's: the data directory or CA of the server was replaced (restore it: docs/how-to/replace-ca.md), or the agent is for another server; else give it a new token: tunnel-server token create --node NAME"
        }
        "server_expired" => {
            "the clock of the node is wrong (date -u; timedatectl set-ntp true), or the server's certificate has ended: tunnel-server doctor"
        }
        "server_rejected" => {
            "the agent refuses the server's certificate: with --agent-cert-file compare its names with the agent's --server-name"
        }
        "credential_untrusted" => {
            "another CA issued the agent's certificate: it is of another server, or the CA was replaced; a new token admits it: tunnel-server token create --node NAME; with certificates of your own: --agent-ca"
        }
        "credential_expired" | "certificate_ended" => {
            "the agent's certificate has ended by this server's clock: compare both clocks (date -u); an agent renews it by itself for 90 days, later with a new token: tunnel-server token create --node NAME"
        }
        "credential_revoked" | "revoked" => {
            "the node, its certificate or its token is revoked; if that was a mistake: tunnel-server nodes unrevoke NAME, or a new token after reissue: tunnel-server token create --node NAME"
        }
        "name_in_use" => {
            "two running agents have this name: a cloned disk or a stolen certificate looks like this. Stop the wrong one and give it a name and token of its own; if the certificate is stolen: tunnel-server nodes reissue NAME, then a new token"
        }
        "name_not_in_credential" => {
            "--node-name of the agent is not the name in its certificate: correct it, or give the agent a token for the new name and an empty data directory"
        }
        "version" => "agent and server have no protocol version in common: upgrade the older one",
        "too_many_sessions" => {
            "the agent opens sessions too fast: is it restarted in a loop, or does a second agent use its certificate? On the node: journalctl -u tunnel-agent"
        }
        "overloaded" => {
            "this server has no room for more agents: docs/reference/limits.md; tunnel-server doctor"
        }
        SHORT_SESSION_CODE => {
            "the session is cut soon after it begins: a proxy, firewall or NAT with a short time limit, or an agent that is restarted in a loop; on the node: tunnel-agent doctor; journalctl -u tunnel-agent"
        }
        "bad_token" => {
            "the token is not one of this server, or was not copied completely: tunnel-server token list; tunnel-server token create --node NAME"
        }
        "pending" => {
            "the token admits a node when an operator approves it: tunnel-server nodes approve NAME"
        }
        "token_expired" => "create a new token: tunnel-server token create --node NAME",
        "token_used" => {
            "another machine used the token first: a token is for one machine; create one for each: tunnel-server token create --node NAME; if nobody should have used it: tunnel-server nodes reissue NAME"
        }
        "wrong_node" => {
            "the token is for another node: on the node, correct --node-name of the agent; or, if the name is right, create a token: tunnel-server token create --node NAME"
        }
        "rate_limited" => {
            "too many failures with this token: wait a minute, and look for their source"
        }
        "clock_wrong" => {
            "the clocks of the node and of this server are too far apart: date -u on both; timedatectl set-ntp true"
        }
        "unavailable" => {
            "this server cannot issue certificates at the moment: tunnel-server doctor"
        }
        "not_offered" => {
            "this server issues no certificates for such a request: with --agent-ca give the agent a certificate of that CA; a pod's token needs a server in the cluster"
        }
        "bad_proof" => {
            "key and certificate of the agent do not belong together: give it an empty data directory and a new token: tunnel-server token create --node NAME"
        }
        "cut" => {
            "the agent closed the connection before the end of the enrollment: it does not trust this server (token of another server?), or the network cut it; on the node: tunnel-agent doctor"
        }
        "bad_request" | "protocol" => {
            "the other end does not speak the protocol of this version: compare the versions of agent and server"
        }
        _ => "see docs/reference/codes.md",
    };
    text.replace("NAME", name)
}

/// Codes of the condition, the worst one first.
pub(crate) const CONDITION_CODES: &[&str] = &[
    "name_in_use",
    SHORT_SESSION_CODE,
    "name_not_in_credential",
    "version",
    "too_many_sessions",
];
/// Failures that anybody who connects to the port can cause, and that scanners and health checks do.
const NOISE: &[&str] = &[
    "timeout",
    "not_tls",
    "handshake_failed",
    "unknown_protocol",
    "overloaded",
];
/// Age above which failures that do not go on are past.
const FAILURE_AGE_MAX: Duration = Duration::from_secs(3600);
/// Number of nodes that are named for an address.
const FROM_ADDRESS_MAX: usize = 3;
/// Life of a session after which earlier short ones are over.
const STAYED: Duration = Duration::from_secs(60);
/// Time after the last failure for which it is a condition.
const CURRENT: Duration = Duration::from_secs(120);
/// Longest time between two attempts of an agent whose name is in use, with some more.
pub(crate) const NAME_RETRY_MAX: Duration = Duration::from_secs(12 * 60);
/// Short sessions in a row that are a condition. One is cut when a network fails.
const REPEATED: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure_code::failure_codes;

    #[test]
    fn each_code_has_a_remedy_with_the_name_of_the_node() {
        let node: NodeName = "worker-1".parse().unwrap();
        for code in failure_codes() {
            let text = remedy(code, Some(&node));
            assert!(
                !text.contains("codes.md") && !text.contains("NAME"),
                "{code}: {text}"
            );
        }
    }

    #[test]
    fn condition_names_verified_agents_whose_failures_go_on() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000);
        let failure = |code, node: FailedNode, count, seconds| Failure {
            code,
            node,
            count,
            first: now - Duration::from_secs(3600),
            last: now - Duration::from_secs(seconds),
            address: "192.0.2.1:5".parse().unwrap(),
            detail: String::new(),
        };
        let verified = |name: &str| FailedNode::Verified(name.parse().unwrap());
        let claimed = FailedNode::Claimed("claimed".parse().unwrap());
        let lines = condition_lines(
            &[
                failure("name_in_use", verified("b"), 2, 600),
                failure("name_in_use", verified("a"), 1, 1),
                failure("name_in_use", verified("once"), 1, 600),
                failure("name_in_use", verified("past"), 9, 1000),
                failure("name_in_use", claimed, 9, 1),
                failure("name_in_use", FailedNode::Unknown, 9, 1),
                failure(SHORT_SESSION_CODE, verified("flaps"), 3, 60),
                failure(SHORT_SESSION_CODE, verified("twice"), 2, 60),
                failure("credential_revoked", verified("revoked"), 9, 1),
            ],
            now,
        );
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[0].starts_with("name_in_use: a, b; two running"),
            "{lines:?}"
        );
        assert!(lines[1].starts_with("short_session: flaps; "), "{lines:?}");
        assert_eq!(condition_lines(&[], now), Vec::<String>::new());
    }
}
