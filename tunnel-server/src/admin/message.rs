//! What travels over the admin socket.

use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;

use super::agent_command;
use crate::store::data_dir::{name_text, time_text};

/// Asks for a join token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateToken {
    /// The node that may use it.
    #[serde(with = "name_text")]
    pub node: NodeName,
    /// Its life.
    pub ttl_seconds: u64,
    /// The node's addresses, if requests by address should find it.
    #[serde(default)]
    pub ips: Vec<IpAddr>,
}

/// What became of a revoked node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RevokedNode {
    /// Its tokens that could still be used, and were taken back.
    pub tokens: usize,
}

/// A new join token.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreatedToken {
    /// The token with its secret.
    pub token: String,
    /// Its public part.
    pub id: String,
    /// When it ends.
    #[serde(with = "time_text")]
    pub expires: SystemTime,
    /// How to start the agent.
    pub command: String,
    /// What to check about the command.
    pub hint: Option<String>,
}

impl CreatedToken {
    /// A token with the command that uses it.
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

/// Why the server refuses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A line for people.
    pub error: String,
}
