//! The commands `policy show` and `policy test`: the rules of a configuration, and what they decide. They
//! ask no server.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::{Method, Uri};
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::config::{Config, PolicySettings, RuleOrigin};
use tunnel_routing::destination::{
    Destination, RequestedDestination, RequestedNode, RequestedPort,
};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::rules::{DestinationKind, RuleTable};
use tunnel_routing::policy::{
    Access, AccessCaller, Authorized, CallerIdentity, Denied, Listener, PortPolicy, authorize,
};

/// A request, as its listener sees it.
#[derive(Debug, Clone, clap::Args)]
pub struct PolicyRequest {
    /// Listener: http, https, connect, unix or service
    #[arg(long, value_name = "LISTENER")]
    pub listener: Listener,
    /// Caller: anonymous, certificate:NAME, user:NAME, uid:NUMBER or serviceaccount:NAMESPACE/NAME
    #[arg(long, value_name = "CALLER", default_value = "anonymous")]
    pub caller: CallerIdentity,
    /// The server uses its client certificate for the caller (--delegation-allowed-callers)
    #[arg(long)]
    pub delegation: bool,
    /// The request has a bearer token that only the target reads
    #[arg(long)]
    pub token: bool,
    /// Source address of the caller
    #[arg(long, value_name = "IP")]
    pub source: Option<IpAddr>,
    /// Kind of destination: node, service or direct
    #[arg(long, value_name = "KIND", default_value = "node")]
    pub destination: DestinationKind,
    /// Node of the destination
    #[arg(long, value_name = "NAME", default_value = "worker-1")]
    pub node: NodeName,
    /// Port of the destination
    #[arg(long)]
    pub port: Port,
    /// The port is that of the node's kubelet, although it is not 10250
    #[arg(long)]
    pub kubelet: bool,
    /// Method of the request; CONNECT for bytes
    #[arg(long, value_name = "METHOD", default_value = "GET")]
    pub method: Method,
    /// Path of the request, without its host
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub path: Uri,
    /// The request asks for another protocol, as a WebSocket does
    #[arg(long)]
    pub upgrade: bool,
}

/// Returns the rules of a configuration as text.
pub fn show(config: &Config) -> String {
    let PolicySettings { table, origin } = &config.policy;
    let (head, note) = match origin {
        RuleOrigin::Defaults => ("# rules that hold without a file, in use", None),
        RuleOrigin::YurtTunnel => ("# rules of --compat yurt-tunnel, in use", Some(())),
        RuleOrigin::File => ("# rules of the file, in use", Some(())),
    };
    let mut text = format!("{head}\n{}", rules(table));
    if note.is_some() {
        let defaults = RuleTable::defaults(&config.default_ports());
        let _infallible = write!(
            text,
            "# rules that hold without a file, not in use\n{}",
            commented(&rules(&defaults))
        );
    }
    text
}

fn rules(table: &RuleTable) -> String {
    let mut text = "rules:\n".to_owned();
    for rule in &table.rules {
        let _infallible = writeln!(text, "- {}", rule.show(table));
    }
    text
}

fn commented(text: &str) -> String {
    text.lines().map(|line| format!("# {line}\n")).collect()
}

impl PolicyRequest {
    /// Returns what the rules decide, as a line, and whether the request passes.
    pub fn decide(&self, config: &Config) -> (String, bool) {
        let ports = PortPolicy::new(config.ports.clone(), Vec::new());
        let caller = AccessCaller {
            identity: &self.caller,
            listener: self.listener,
            source: self.source,
            must_authenticate: false,
            has_delegation: self.delegation,
            has_token: self.token,
        };
        let operation = if self.method == Method::CONNECT || self.listener == Listener::Service {
            RequestedOperation::Connect
        } else {
            RequestedOperation::Http {
                method: &self.method,
                path: self.path.path(),
                may_be_upgrade: self.upgrade,
            }
        };
        let access = Access {
            caller,
            destination: self.requested(),
            operation,
        };
        match authorize(&ports, &config.policy.table, access) {
            Ok(authorized) => (allowed(&authorized), true),
            Err(denied @ Denied::NoRule { .. }) => {
                let text = denied.to_string();
                let text = text.split(';').next().unwrap_or_default();
                (format!("refused: {text}"), false)
            }
            Err(denied) => (format!("refused: {denied}"), false),
        }
    }

    fn requested(&self) -> RequestedDestination<()> {
        let node = self.node.clone();
        match self.destination {
            DestinationKind::Node => {
                let port = if self.kubelet {
                    RequestedPort::Kubelet(self.port)
                } else {
                    RequestedPort::Named(self.port)
                };
                RequestedDestination::Node(RequestedNode { node, port })
            }
            DestinationKind::Service => RequestedDestination::Configured(Destination {
                node,
                target: Target::Node(self.port),
            }),
            DestinationKind::Direct => RequestedDestination::Direct((), self.port),
        }
    }
}

fn allowed(authorized: &Authorized<()>) -> String {
    let Authorized {
        operation,
        rule,
        asks_cluster,
        ..
    } = authorized;
    if *asks_cluster {
        format!("the cluster decides about {operation}: rule {rule}")
    } else {
        format!("allowed: rule {rule} allows {operation}")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tunnel_process::yaml;

    use super::*;
    use crate::config::RawConfig;

    fn config(file: &str) -> Config {
        let raw = yaml::parse::<RawConfig>(file).unwrap();
        Config::try_from(raw.unwrap_or_default()).unwrap()
    }

    #[derive(clap::Parser)]
    struct Parsed {
        #[command(flatten)]
        request: PolicyRequest,
    }

    fn test(file: &str, arguments: &str) -> (String, bool) {
        let words = std::iter::once("test").chain(arguments.split(' '));
        let parsed = Parsed::try_parse_from(words).unwrap();
        parsed.request.decide(&config(file))
    }

    #[test]
    fn a_request_is_decided_as_its_listener_would() {
        let file = "callers: { ops: { user: ops } }\nconnectPorts: 22\nrules:\n\
                    - { name: no-shell, effect: deny, operations: [shell], nodes: ['pay-*'] }\n\
                    - { name: ssh, callers: [ops], ports: [22], listeners: [connect] }\n\
                    - { name: logs, callers: [delegation], operations: [containerlogs, exec] }\n";
        for (arguments, expected, is_allowed) in [
            (
                "--listener connect --caller user:ops --method CONNECT --port 22",
                "allowed: rule ssh allows connect",
                true,
            ),
            (
                "--listener connect --caller user:prometheus --method CONNECT --port 22",
                "refused: no rule allows connect at worker-1 port 22 for this caller on the connect listener",
                false,
            ),
            (
                "--listener https --delegation --port 10250 --path /exec/ns/pod/c --upgrade",
                "allowed: rule logs allows exec",
                true,
            ),
            (
                "--listener https --delegation --port 10250 --path /exec/ns/pod/c --node pay-1",
                "refused: rule no-shell denies exec at pay-1 port 10250",
                false,
            ),
            (
                "--listener https --delegation --port 10250 --path /metrics/../exec",
                "refused: the path can be read in several ways",
                false,
            ),
            (
                "--listener http --port 22",
                "refused: worker-1 port 22: port 22 is not allowed on the http listener",
                false,
            ),
        ] {
            let (text, passes) = test(file, arguments);
            assert!(text.starts_with(expected), "{arguments}: {text}");
            assert_eq!(passes, is_allowed, "{arguments}");
        }
        let (text, _) = test(
            "{}",
            "--listener http --port 10250 --path /metrics/cadvisor",
        );
        assert_eq!(text, "allowed: rule default-read allows metrics");
    }

    #[test]
    fn rules_in_use_are_shown_with_the_defaults_that_they_replace() {
        let shown = |text: &str| show(&config(text));
        let defaults = shown("{}");
        assert!(
            defaults.starts_with(
                "# rules that hold without a file, in use\nrules:\n- { name: default-read,"
            ),
            "{defaults}"
        );
        let file = shown("rules: [{ name: all }]");
        assert!(
            file.starts_with("# rules of the file, in use\nrules:\n- { name: all }\n# rules that"),
            "{file}"
        );
        assert!(
            file.contains("\n# - { name: default-token, callers: [token]"),
            "{file}"
        );
    }
}
