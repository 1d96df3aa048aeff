//! The messages of the admin socket, and the command in one of them that joins a node.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tunnel_process::host::primary_address;
use tunnel_process::metrics::COMMIT;
use tunnel_process::telemetry::recent_lines;
use tunnel_proto::wire::PORT_AGENTS;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::{NameError, NodeName};
use tunnel_proto::wire::name_pattern::{NamePattern, NamePatternError};
use tunnel_proto::wire::order::NodeOrder;

use tunnel_ca::revocation::{OrderAction, RevocationInForce, Revocations};
use tunnel_ca::tokens::{CreateTokenError, NewNodes, TokenStore};
use tunnel_store::data_dir::{name_text, time_text};
use tunnel_store::known_nodes::KnownNodes;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateToken {
    /// Who may use the token.
    pub node: TokenNodes,
    /// How many nodes may use a token for a pattern.
    #[serde(default)]
    pub uses: Option<u32>,
    /// Whether an operator has to approve each node that uses a token for a pattern.
    #[serde(default)]
    pub needs_approval: bool,
    /// Lifetime of the token in seconds.
    pub ttl_seconds: u64,
    /// Addresses of the node, if requests by address should select it.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
    /// Labels of the node, which replace earlier ones, or of each node that a token for a pattern enrolls.
    #[serde(default)]
    pub labels: BTreeMap<Box<str>, Box<str>>,
}

impl CreateToken {
    pub fn ttl(&self) -> Duration {
        Duration::from_secs(self.ttl_seconds)
    }

    /// Creates the token, and records its node as known. Blocks the thread.
    ///
    /// # Errors
    /// Returns a [`CreateTokenError`].
    pub(super) fn create(
        &self,
        tokens: &TokenStore,
        nodes: &KnownNodes,
        orders: &Revocations,
        ca_hash: [u8; 32],
        now: SystemTime,
    ) -> Result<JoinToken, CreateTokenError> {
        let pattern = match &self.node {
            TokenNodes::Pattern(_) if !self.ips.is_empty() => {
                return Err(CreateTokenError::Options(NO_ADDRESSES));
            }
            TokenNodes::Pattern(pattern) => pattern,
            TokenNodes::Node(_) if self.uses.is_some() || self.needs_approval => {
                return Err(CreateTokenError::Options(ONE_NODE));
            }
            TokenNodes::Node(node) => {
                let order = NodeOrder::new(node, orders.of_node(node));
                let token = tokens.create(&order, self.ttl(), self.ips.clone(), ca_hash, now)?;
                nodes.record_token(node, &self.ips, &self.labels);
                return Ok(token);
            }
        };
        let new_nodes = NewNodes {
            pattern: pattern.clone(),
            uses_max: self.uses.unwrap_or(1),
            needs_approval: self.needs_approval,
            labels: self.labels.clone(),
        };
        tokens.create_for_pattern(new_nodes, self.ttl(), ca_hash, now)
    }
}

/// The node that a token is for, or the pattern of the names of new nodes. A text with a `*` is a
/// pattern.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TokenNodes {
    Node(NodeName),
    Pattern(NamePattern),
}

/// The reason why no token is for a text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenNodesError {
    #[error(transparent)]
    Name(#[from] NameError),
    #[error(transparent)]
    Pattern(#[from] NamePatternError),
    #[error("a pattern never enrolls a node that is named by its address; create a token for each")]
    Addresses,
}

impl FromStr for TokenNodes {
    type Err = TokenNodesError;

    fn from_str(text: &str) -> Result<Self, TokenNodesError> {
        if !text.contains('*') {
            return Ok(Self::Node(text.parse()?));
        }
        // As 10.0.0.*, 10.0.0.1* or fd00::*.
        let is_address = ["0", ""].map(|star| text.replace('*', star).parse::<IpAddr>().is_ok());
        if is_address.contains(&true) && text.contains(|part: char| part.is_ascii_digit()) {
            return Err(TokenNodesError::Addresses);
        }
        Ok(Self::Pattern(text.parse()?))
    }
}

impl TryFrom<String> for TokenNodes {
    type Error = TokenNodesError;

    fn try_from(text: String) -> Result<Self, TokenNodesError> {
        text.parse()
    }
}

impl From<TokenNodes> for String {
    fn from(nodes: TokenNodes) -> Self {
        nodes.to_string()
    }
}

impl fmt::Display for TokenNodes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(formatter),
            Self::Pattern(pattern) => pattern.fmt(formatter),
        }
    }
}

/// What became of nodes that an operator approves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApproveOutcome {
    pub approved: Vec<String>,
    /// Nodes that do not wait for an approval.
    pub others: Vec<String>,
}

impl ApproveOutcome {
    pub(super) fn of(asked: &[NodeName], approved: &[NodeName]) -> Self {
        let others = asked.iter().filter(|node| !approved.contains(node));
        Self {
            approved: approved.iter().map(ToString::to_string).collect(),
            others: others.map(ToString::to_string).collect(),
        }
    }
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
    pub(super) fn of(settings: Vec<String>) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: COMMIT.to_owned(),
            settings,
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
        node: &TokenNodes,
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

tunnel_process::partial_debug!(CreatedToken { id, expires });

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
pub fn agent_command(advertised: &[String], node: &TokenNodes) -> AgentCommand {
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
    // The names of new nodes differ; each takes that of its host.
    if let TokenNodes::Node(node) = node {
        let _infallible = write!(command, " --node-name {node}");
    }
    command.push_str(" --token-file -");
    AgentCommand { command, hint }
}

/// The reason why a token for a pattern has no addresses.
const NO_ADDRESSES: &str = "--ip is for a token of one node";
/// The reason why a token for one node has no number of uses.
const ONE_NODE: &str = "--uses and --approve are for a pattern of names, as in --node 'cam-*'; a token for one node is bound to the first key";

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
