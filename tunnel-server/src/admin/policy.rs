//! The commands `policy show` and `policy test`: the rules of a configuration, what they decide, and what the
//! dry run of the running server has found.

use std::fmt::Write as _;
use std::net::IpAddr;

use http::{Method, Uri};
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::admin::AdminError;
use crate::config::{Config, NodeLabel, PolicySettings, RuleOrigin};
use crate::dry_run::DryRunStatus;
use tunnel_routing::destination::{
    Destination, RequestedDestination, RequestedNode, RequestedPort,
};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::rules::{DestinationKind, Facts, RuleTable};
use tunnel_routing::policy::{
    Access, AccessCaller, CallerIdentity, Denied, Granted, Listener, PortPolicy, UnreadToken,
    access_of_agent, authorize, locate,
};
use tunnel_routing::routes::RouteNode;
use tunnel_store::data_dir::rfc3339;

/// A request, as its listener sees it.
#[derive(Debug, Clone, clap::Args)]
pub struct PolicyRequest {
    /// Listener: http, https, connect, unix, service or agent
    #[arg(long, value_name = "LISTENER")]
    pub listener: Listener,
    /// Caller: anonymous, certificate:NAME, user:NAME, uid:NUMBER, serviceaccount:NAMESPACE/NAME or
    /// agent:NODE
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
    /// Kind of destination: node, service, direct, or target for a target of the cloud
    #[arg(long, value_name = "KIND", default_value = "node")]
    pub destination: DestinationKind,
    /// Node of the destination
    #[arg(long, value_name = "NAME", default_value = "worker-1")]
    pub node: NodeName,
    /// Label of the node, KEY=VALUE; repeatable. Without this flag and --edge nothing is known of the
    /// node but its name
    #[arg(long = "label", value_name = "LABEL")]
    pub labels: Vec<NodeLabel>,
    /// Whether the node is an edge node [default: true if there is a label]
    #[arg(long, value_name = "BOOL")]
    pub edge: Option<bool>,
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
    let PolicySettings {
        table,
        origin,
        dry_run,
    } = &config.policy;
    let head = match origin {
        RuleOrigin::Defaults => "# rules that hold without a file, in use",
        RuleOrigin::YurtTunnel => "# rules of --compat yurt-tunnel, in use",
        RuleOrigin::File => "# rules of the file, in use",
    };
    let mut text = format!("{head}\n{}", rules(table));
    if *origin != RuleOrigin::Defaults {
        let defaults = RuleTable::defaults(&config.default_ports());
        let _infallible = write!(
            text,
            "# rules that hold without a file, not in use\n{}",
            commented(&rules(&defaults))
        );
    }
    if let Some(table) = dry_run {
        let _infallible = write!(
            text,
            "# rules of dryRun, not in use\n{}",
            commented(&rules(table))
        );
    }
    text
}

/// Returns what the dry run of the running server has found as text.
pub fn show_dry_run(found: &Result<Option<DryRunStatus>, AdminError>) -> String {
    let status = match found {
        Ok(Some(status)) => status,
        Ok(None) => return String::new(),
        Err(error) => return format!("# what the dry run has found is not known: {error}\n"),
    };
    let since = rfc3339(status.since);
    let mut text = format!(
        "# {} decisions at this server since {since}; the dry run decides otherwise about\n",
        status.decisions
    );
    for found in &status.differences {
        let last = rfc3339(found.last);
        let _infallible = writeln!(
            text,
            "# {} x {}; last {last}: {}",
            found.count, found.what, found.example
        );
    }
    let _infallible = match (status.differences.is_empty(), status.others) {
        (true, _) => writeln!(text, "# nothing"),
        (false, 0) => Ok(()),
        (false, others) => writeln!(text, "# {others} more, of other kinds"),
    };
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
    /// Returns what the rules decide, as a line, and whether the request passes. A second line has what the
    /// rules of a dry run decide.
    pub fn decide(&self, config: &Config) -> (String, bool) {
        let mut facts = match self.facts(&PortPolicy::new(config.ports.clone(), Vec::new())) {
            Ok(facts) => facts,
            Err(denied) => return (refused(&denied), false),
        };
        let is_described = self.edge.is_some() || !self.labels.is_empty();
        let own = self.labels.iter();
        let own = own.map(|label| (label.key().into(), label.value().into()));
        facts.described = facts.node.clone().filter(|_| is_described).map(|node| {
            let described = RouteNode {
                is_edge: self.edge.unwrap_or(true),
                labels: own.collect(),
                ..RouteNode::edge(node, Vec::new())
            };
            described.into()
        });
        let (mut text, is_allowed) = decided(&config.policy.table, &facts);
        if let Some(dry_run) = &config.policy.dry_run {
            let _infallible = write!(text, "\ndry run: {}", decided(dry_run, &facts).0);
        }
        (text, is_allowed)
    }

    fn facts(&self, ports: &PortPolicy) -> Result<Facts, Denied> {
        let caller = AccessCaller {
            identity: &self.caller,
            listener: self.listener,
            source: self.source,
            must_authenticate: false,
            has_delegation: self.delegation,
            token: match self.token {
                true => UnreadToken::OfAny,
                false => UnreadToken::None,
            },
        };
        if self.destination == DestinationKind::Target {
            return Ok(Facts {
                identity: self.caller.clone(),
                listener: self.listener,
                source: self.source,
                ..access_of_agent(&self.node, &[self.port]).facts
            });
        }
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
        let access = locate(ports, access)?.access;
        ports.check(&access)?;
        Ok(access.facts)
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
            DestinationKind::Direct | DestinationKind::Target => {
                RequestedDestination::Direct((), self.port)
            }
        }
    }
}

fn decided(table: &RuleTable, facts: &Facts) -> (String, bool) {
    let operation = facts.operation;
    match authorize(table, facts) {
        Ok(Granted {
            rule,
            asks_cluster: true,
        }) => {
            let text = format!("the cluster decides about {operation}: rule {rule}");
            (text, true)
        }
        Ok(Granted { rule, .. }) => (format!("allowed: rule {rule} allows {operation}"), true),
        Err(denied) => (refused(&denied), false),
    }
}

fn refused(denied: &Denied) -> String {
    let text = denied.to_string();
    let has_advice = matches!(denied, Denied::NoRule { .. });
    let what = text.split(';').next().filter(|_| has_advice);
    format!("refused: {}", what.unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use tunnel_process::yaml;

    use super::*;
    use crate::config::RawConfig;
    use crate::dry_run::DifferenceStatus;

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
                "--listener https --delegation --port 10250 --method POST --path /run/ns/pod/c --upgrade --node pay-1",
                "refused: rule no-shell denies upgrade at pay-1 port 10250",
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
    fn labels_and_agents_are_decided_and_a_dry_run_is_a_second_line() {
        let file = "callers: { gateways: { agent: 'gw-*' } }\nrules:\n\
                    - { name: pay, effect: deny, labels: [tier=pay] }\n\
                    - { name: agents, callers: [gateways], listeners: [agent], destinations: [target] }\n\
                    - { name: read, operations: [observe], listeners: [http] }\n\
                    dryRun: { rules: [{ name: all }] }\n";
        for (arguments, expected) in [
            (
                "--listener http --port 10250 --path /metrics --label tier=shop",
                "allowed: rule read allows metrics",
            ),
            (
                "--listener http --port 10250 --path /metrics --label tier=pay",
                "refused: rule pay denies metrics at worker-1 port 10250",
            ),
            (
                "--listener http --port 10250 --path /metrics",
                "refused: rule pay denies metrics at worker-1 port 10250",
            ),
            (
                "--listener agent --caller agent:gw-1 --destination target --port 6443",
                "refused: rule pay denies connect at a target of the cloud",
            ),
        ] {
            let (text, _) = test(file, arguments);
            let dry_run = text.split_once("\ndry run: allowed: rule all allows ");
            assert_eq!(dry_run.unwrap().0, expected, "{arguments}");
        }
        let file = file.replace(
            "labels: [tier=pay]",
            "destinations: [node], labels: [tier=pay]",
        );
        let agent = "--listener agent --destination target --port 6443 --caller agent:";
        let (text, is_allowed) = test(&file, &format!("{agent}gw-1"));
        assert!(is_allowed, "{text}");
        let (text, is_allowed) = test(&file, &format!("{agent}cam-1"));
        assert!(!is_allowed, "{text}");
    }

    #[test]
    fn what_a_dry_run_has_found_is_shown_as_comments() {
        let found = |differences, others| {
            let status = DryRunStatus {
                since: std::time::UNIX_EPOCH,
                decisions: 7,
                differences,
                others,
            };
            show_dry_run(&Ok(Some(status)))
        };
        let head = "# 7 decisions at this server since 1970-01-01T00:00:00Z; the dry run decides otherwise about\n";
        assert_eq!(found(Vec::new(), 0), format!("{head}# nothing\n"));
        let difference = DifferenceStatus {
            what: "exec over https: allow by rule a, dry run deny, no rule allows it".to_owned(),
            count: 2,
            last: std::time::UNIX_EPOCH,
            example: "user:ops at edge-1 port 22".to_owned(),
        };
        assert_eq!(
            found(vec![difference], 3),
            format!(
                "{head}# 2 x exec over https: allow by rule a, dry run deny, no rule allows it; last \
                 1970-01-01T00:00:00Z: user:ops at edge-1 port 22\n# 3 more, of other kinds\n"
            )
        );
        assert_eq!(show_dry_run(&Ok(None)), "");
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
