//! The messages of the admin socket, and the command in one of them that joins a node.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_process::host::primary_address;
use tunnel_process::metrics::COMMIT;
use tunnel_process::telemetry::recent_lines;
use tunnel_proto::wire::PORT_AGENTS;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;

use tunnel_ca::revocation::{OrderAction, RevocationInForce};
use tunnel_store::data_dir::{name_text, time_text};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateToken {
    /// Node that may use the token.
    #[serde(with = "name_text")]
    pub node: NodeName,
    /// Lifetime of the token in seconds.
    pub ttl_seconds: u64,
    /// Addresses of the node, if requests by address should select it.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
}

/// An order of an operator about nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodesOrder {
    pub action: OrderAction,
    pub nodes: Vec<String>,
}

/// What became of an order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OrderOutcome {
    /// Nodes that the order changed.
    pub changed: Vec<String>,
    /// Those of them that the server does not know. A name may be misspelled.
    pub unknown: Vec<String>,
    /// Servers at which the order is in force.
    pub in_force: Vec<String>,
    /// Servers that have not confirmed it, and stores that do not have it. Both follow by themselves.
    pub pending: Vec<String>,
}

/// What became of nodes that an operator wants to be forgotten.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForgetOutcome {
    pub forgotten: Vec<String>,
    /// Names that no known node has.
    pub unknown: Vec<String>,
    /// Nodes whose agents are connected. They would be known again at once.
    pub connected: Vec<String>,
}

/// A revocation in force, for lists.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevocationInfo {
    #[serde(with = "name_text")]
    pub node: NodeName,
    #[serde(with = "time_text")]
    pub revoked_at: SystemTime,
}

impl From<RevocationInForce> for RevocationInfo {
    fn from(revocation: RevocationInForce) -> Self {
        Self {
            node: revocation.node,
            revoked_at: revocation.at,
        }
    }
}

/// What only the running server knows of itself, for `diag`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RunningServer {
    pub version: String,
    pub commit: String,
    /// Lines of the effective settings, without secrets.
    pub settings: Vec<String>,
    /// Last lines of the log, without the access log.
    pub log: Vec<String>,
}

impl RunningServer {
    /// Returns the facts of this process.
    pub(super) fn of(settings: &[String]) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: COMMIT.to_owned(),
            settings: settings.to_vec(),
            log: recent_lines(),
        }
    }
}

/// A new join token with the command that uses it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedToken {
    /// Token with its secret.
    pub token: String,
    /// Public part of the token.
    pub id: String,
    #[serde(with = "time_text")]
    pub expires: SystemTime,
    /// Command that joins the node, without the token.
    pub command: String,
    /// Advice to the operator about the command.
    pub hint: Option<String>,
}

impl CreatedToken {
    /// Creates the response for a token, with the command that uses it.
    pub fn new(
        token: &JoinToken,
        node: &NodeName,
        expires: SystemTime,
        advertised: &[String],
    ) -> Self {
        let agent = agent_command(advertised, node);
        Self {
            token: token.reveal(),
            id: token.id().to_owned(),
            expires,
            command: agent.command,
            hint: agent.hint,
        }
    }
}

impl fmt::Debug for CreatedToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("CreatedToken")
            .field("id", &self.id)
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: String,
}

/// A command line for the edge host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentCommand {
    /// Command that reads the token from standard input.
    pub command: String,
    /// Advice to the operator about the command.
    pub hint: Option<String>,
}

/// Returns the command that joins a node. The token is not in it, because every user of a host can
/// read its command lines. Without advertised addresses the command contains
/// the address that this host uses for outgoing connections, and the hint says so.
pub fn agent_command(advertised: &[String], node: &NodeName) -> AgentCommand {
    let mut hint = None;
    let mut command = "tunnel-agent join".to_owned();
    if advertised.is_empty() {
        let host = primary_address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let address = SocketAddr::new(host, PORT_AGENTS);
        let _infallible = write!(command, " --server {address}");
        hint = Some(format!(
            "{address} is a guess; start tunnel-server with --advertise HOST:PORT to have the right address here"
        ));
    }
    for address in advertised {
        let _infallible = write!(command, " --server {address}");
    }
    let _infallible = write!(command, " --node-name {node} --token-file -");
    AgentCommand { command, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_names_every_advertised_address_or_hints_at_the_flag() {
        let node = "worker-1".parse().unwrap();
        let advertised = ["a.example:443".to_owned(), "[2001:db8::1]:10262".to_owned()];
        let agent = agent_command(&advertised, &node);
        assert_eq!(
            agent.command,
            "tunnel-agent join --server a.example:443 --server [2001:db8::1]:10262 --node-name worker-1 --token-file -"
        );
        assert_eq!(agent.hint, None);
        let guess = agent_command(&[], &node);
        assert!(guess.command.contains(":10262 --node-name worker-1"));
        assert!(guess.hint.unwrap().contains("--advertise"));
    }
}
