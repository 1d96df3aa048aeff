//! The messages of the admin socket.

use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;

use super::agent_command;
use crate::store::data_dir::{name_text, time_text};

/// A request for a join token.
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

/// The result of revoking a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevokedNode {
    /// Number of revoked tokens that had not expired.
    pub tokens: usize,
}

/// A new join token with the command that uses it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedToken {
    /// Token with its secret.
    pub token: String,
    /// Public part of the token.
    pub id: String,
    /// Time at which the token expires.
    #[serde(with = "time_text")]
    pub expires: SystemTime,
    /// Command that starts the agent.
    pub command: String,
    /// Advice to the operator about the command.
    pub hint: Option<String>,
}

impl CreatedToken {
    /// Creates the response for a token, with the command that uses it.
    #[must_use]
    pub fn new(
        token: &JoinToken,
        node: &NodeName,
        expires: SystemTime,
        advertised: &[String],
    ) -> Self {
        let text = token.reveal();
        let agent = agent_command(advertised, node, &text);
        Self {
            token: text,
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

/// The body of a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Message for the operator.
    pub error: String,
}
