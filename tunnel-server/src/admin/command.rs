//! The command that starts an agent with a new join token.

use std::fmt;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tunnel_proto::process::host::primary_address;
use tunnel_proto::wire::PORT_AGENTS;
use tunnel_proto::wire::name::NodeName;

/// A command line for the edge host.
#[derive(Clone, PartialEq, Eq)]
pub struct AgentCommand {
    /// Command with the token's secret.
    pub command: String,
    /// Advice to the operator about the command.
    pub hint: Option<String>,
}

impl fmt::Debug for AgentCommand {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("AgentCommand")
            .field("hint", &self.hint)
            .finish_non_exhaustive()
    }
}

/// Returns the command for a node and a token. Without advertised addresses the command contains
/// the address that this host uses for outgoing connections, and the hint says so.
#[must_use]
pub fn agent_command(advertised: &[String], node: &NodeName, token: &str) -> AgentCommand {
    let mut hint = None;
    let mut command = "tunnel-agent run".to_owned();
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
    let _infallible = write!(command, " --node-name {node} --token {token}");
    AgentCommand { command, hint }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_names_every_advertised_address_or_hints_at_the_flag() {
        let node = "worker-1".parse().unwrap();
        let advertised = ["a.example:443".to_owned(), "[2001:db8::1]:10262".to_owned()];
        let agent = agent_command(&advertised, &node, "TOKEN");
        assert_eq!(
            agent.command,
            "tunnel-agent run --server a.example:443 --server [2001:db8::1]:10262 --node-name worker-1 --token TOKEN"
        );
        assert_eq!(agent.hint, None);
        assert!(!format!("{agent:?}").contains("TOKEN"));
        let guess = agent_command(&[], &node, "TOKEN");
        assert!(guess.command.contains(":10262 --node-name worker-1"));
        assert!(guess.hint.unwrap().contains("--advertise"));
    }
}
