//! What the checks need of the nodes, gathered page by page: their names, and the faults of each kind.
//! No status is stored. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use tunnel_doctor::{Fault, FaultGroups, FaultKind, Severity};
use tunnel_process::name_list::NAMES_SHOWN_MAX;
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::name::NodeName;

use crate::admin::failures::FailureStatus;
use crate::admin::status::{GoneServer, NodeState, NodeStatus, VersionSkew};

/// What is looked for.
#[derive(Debug, Clone)]
pub(super) struct SurveySettings {
    /// Nodes to check; all if there is none.
    pub(super) only_nodes: Vec<NodeName>,
    /// Remaining validity of a certificate below which its renewal is overdue.
    pub(super) renewal_margin: Duration,
    pub(super) now: SystemTime,
}

/// The nodes of the running server.
#[derive(Debug, Clone)]
pub(super) struct NodeSurvey {
    settings: SurveySettings,
    /// All nodes, and whether their agents are connected.
    nodes: BTreeMap<String, bool>,
    /// The servers that carry requests to nodes, and their zones.
    servers: BTreeMap<String, Option<String>>,
    agents: FaultGroups,
    addresses: FaultGroups,
    failures: FaultGroups,
    /// Nodes that the failures name, with the time of the last one.
    failed: BTreeMap<String, String>,
    sessions: SessionNumbers,
}

/// Numbers of the nodes that need an agent, and of their sessions with this server.
#[derive(Debug, Clone, Default)]
struct SessionNumbers {
    edges: usize,
    connected: usize,
    /// Sessions by transport.
    transports: BTreeMap<String, usize>,
    slowest: Option<(u64, String)>,
    /// End of the certificate that ends first.
    certificate: Option<(SystemTime, String)>,
}

impl NodeSurvey {
    pub(super) fn new(settings: SurveySettings) -> Self {
        Self {
            settings,
            nodes: BTreeMap::new(),
            servers: BTreeMap::new(),
            agents: FaultGroups::default(),
            addresses: FaultGroups::default(),
            failures: FaultGroups::default(),
            failed: BTreeMap::new(),
            sessions: SessionNumbers::default(),
        }
    }

    /// Adds a node. Nodes are added in the order of their names.
    pub(super) fn add(&mut self, node: &NodeStatus) {
        self.nodes.insert(node.node.clone(), node.connected);
        if let Some(server) = &node.replica
            && self.servers.len() < REPLICAS_MAX
        {
            self.servers.insert(server.clone(), node.zone.clone());
        }
        let mut only = self.settings.only_nodes.iter();
        let is_named = only.any(|name| name.as_str() == node.node);
        if !is_named && !self.settings.only_nodes.is_empty() {
            return;
        }
        for (address, names) in &node.address_conflicts {
            // An address counts once, with its first node.
            if is_named || names.first() == Some(&node.node) {
                let others = if names.len() < NAMES_SHOWN_MAX {
                    ""
                } else {
                    ", ..."
                };
                let names = format!("{}{others}", names.join(", "));
                let address = address.to_string();
                let (kind, fault) = shared_address(&address, &names, Severity::Info);
                self.addresses.add(kind, &address, fault);
            }
        }
        if !node.is_edge {
            return;
        }
        self.sessions.add(node);
        if node.connected {
            self.add_session(node);
        } else {
            // Times in UTC are ordered as texts.
            let failed = self.failed.get(&node.node);
            let has_failed = failed.is_some_and(|last| node.last_seen.as_ref() <= Some(last));
            let (kind, fault) = away(node, has_failed);
            self.agents.add(kind, &node.node, fault);
        }
    }

    /// Adds failures of an agent at the server, unless they are over. Failures are added before nodes.
    pub(super) fn add_failure(&mut self, failure: &FailureStatus) {
        let only = &self.settings.only_nodes;
        let is_selected = only.is_empty()
            || only.iter().any(|name| {
                let mut named = failure.node.iter().chain(&failure.nodes_from_address);
                named.any(|node| node == name.as_str())
            });
        if !failure.is_current(self.settings.now) || !is_selected {
            return;
        }
        let named = failure.node.iter().chain(&failure.nodes_from_address);
        // Noise from the address of a node, as of a health check, explains no absence.
        for name in named.filter(|_| !failure.is_noise) {
            let last = self.failed.entry(name.clone()).or_default();
            *last = std::mem::take(last).max(failure.last.clone());
        }
        let severity = match (failure.is_verified, failure.is_noise) {
            (true, _) => Severity::Error,
            (false, false) => Severity::Warning,
            (false, true) => Severity::Info,
        };
        let place = match (&failure.node, &failure.nodes_from_address[..]) {
            (Some(node), _) if failure.is_verified => node.clone(),
            (Some(node), _) => format!("{node} (claimed)"),
            (None, []) => failure.source.clone(),
            (None, nodes) => format!("{} (perhaps {})", failure.source, nodes.join(", ")),
        };
        let kind = FaultKind {
            noun: "agents or sources",
            what: failure.code.clone(),
            fix: "tunnel-server nodes --failed",
        };
        let fault = Fault {
            severity,
            place: place.clone(),
            what: format!(
                "{}, count {}, from {} to {}, last from {}: {}",
                failure.code,
                failure.count,
                failure.first,
                failure.last,
                failure.address,
                failure.detail
            ),
            fix: failure.remedy.clone(),
        };
        self.failures.add(kind, &place, fault);
    }

    /// Returns the failures of agents.
    pub(super) fn failures(&self) -> &FaultGroups {
        &self.failures
    }

    /// Returns what is good about the nodes.
    pub(super) fn good(&self) -> Option<String> {
        self.sessions.describe(self.settings.now)
    }

    pub(super) fn is_known(&self, name: &str) -> bool {
        self.nodes.contains_key(name)
    }

    pub(super) fn is_connected(&self, name: &str) -> bool {
        self.nodes.get(name).copied().unwrap_or(false)
    }

    /// Returns the nodes that are checked and have a connected agent.
    pub(super) fn connected(&self) -> impl Iterator<Item = NodeName> {
        let connected = self.nodes.iter().filter(|(_, is_connected)| **is_connected);
        let only = &self.settings.only_nodes;
        connected
            .filter_map(|(name, _)| name.parse().ok())
            .filter(|name| only.is_empty() || only.contains(name))
    }

    /// Returns the number and the zone of the servers that carry requests to nodes if there are
    /// several and their zone is one.
    pub(super) fn only_zone(&self) -> Option<(usize, &str)> {
        let zone = self.servers.values().next()?.as_deref()?;
        let mut zones = self.servers.values();
        let is_only = self.servers.len() > 1 && zones.all(|other| other.as_deref() == Some(zone));
        is_only.then_some((self.servers.len(), zone))
    }

    /// Returns the faults of agents and their sessions.
    pub(super) fn agents(&self) -> &FaultGroups {
        &self.agents
    }

    /// Returns the addresses that several nodes have.
    pub(super) fn addresses(&self) -> &FaultGroups {
        &self.addresses
    }

    /// Adds the faults of a node with a connected agent. Another server may hold it, which alone knows
    /// the session.
    fn add_session(&mut self, node: &NodeStatus) {
        let certificate = self.certificate_fault(node);
        let mut add = |severity, several: &str, what: String, fix: &'static str| {
            let kind = FaultKind {
                noun: "nodes",
                what: several.to_owned(),
                fix,
            };
            let fault = Fault {
                severity,
                place: node.node.clone(),
                what,
                fix: fix.to_owned(),
            };
            self.agents.add(kind, &node.node, fault);
        };
        if node.state.as_deref().is_some_and(|state| state != "live") {
            let what = "the agent does not answer, and requests are refused until it does";
            let fix = "check the network of the node";
            add(Severity::Error, what, what.to_owned(), fix);
        }
        if let Some(millis) = node.rtt_millis.filter(|millis| *millis > RTT_MAX_MILLIS) {
            let several = "the round trip takes more than 1 s";
            let what = format!("the round trip takes {millis} ms");
            let fix = "check the network of the node for loss and queues";
            add(Severity::Warning, several, what, fix);
        }
        if node.transport.as_deref() == Some("h2") {
            let what = "the agent is connected over h2 (TCP): UDP to this server is blocked, or a proxy \
                        or --transport h2 is set";
            let fix = "allow UDP 10262 (in the manifests: node port 31008) from the node to the server \
                       and back; the agent then returns to QUIC by itself";
            add(Severity::Info, what, what.to_owned(), fix);
        }
        if node.version_skew == Some(VersionSkew::Unsupported) {
            let several = "the agents have versions that this server does not support";
            let version = node.version.as_deref().unwrap_or("unknown");
            let what =
                format!("the agent has version {version}, which this server does not support");
            let fix = "upgrade the agent to the version of the server";
            add(Severity::Warning, several, what, fix);
        }
        if let Some((severity, several, what)) = certificate {
            let fix = "on the node: journalctl -u tunnel-agent; with an ended certificate, a new token, or \
                 the files of --cert-file and --key-file replaced";
            add(severity, several, what, fix);
        }
    }

    fn certificate_fault(&self, node: &NodeStatus) -> Option<(Severity, &'static str, String)> {
        let text = node.certificate_not_after.as_deref()?;
        let end: SystemTime = humantime::parse_rfc3339(text).ok()?;
        match end.duration_since(self.settings.now) {
            Err(_past) => {
                let what = format!("the certificate of the agent ended {text}");
                Some((
                    Severity::Error,
                    "the certificates of the agents ended",
                    what,
                ))
            }
            Ok(left) if left < self.settings.renewal_margin => {
                let several = "the certificates of the agents end soon and were not renewed";
                let what = format!("the certificate of the agent ends {text} and was not renewed");
                Some((Severity::Warning, several, what))
            }
            Ok(_enough) => None,
        }
    }
}

impl SessionNumbers {
    fn add(&mut self, node: &NodeStatus) {
        if node.is_pending {
            return;
        }
        self.edges += 1;
        self.connected += usize::from(node.connected);
        if let Some(transport) = &node.transport {
            *self.transports.entry(transport.clone()).or_default() += 1;
        }
        let rtt = node.rtt_millis.map(|millis| (millis, node.node.clone()));
        self.slowest = self.slowest.take().max(rtt);
        let end = node
            .certificate_not_after
            .as_deref()
            .filter(|_| node.connected);
        let end = end.and_then(|text| humantime::parse_rfc3339(text).ok());
        let end = end.map(|end| (end, node.node.clone()));
        self.certificate = match (self.certificate.take(), end) {
            (Some(known), Some(end)) => Some(known.min(end)),
            (known, end) => known.or(end),
        };
    }

    fn describe(&self, now: SystemTime) -> Option<String> {
        if self.edges == 0 {
            return None;
        }
        let transports = self.transports.iter();
        let transports: Vec<_> = transports
            .map(|(transport, count)| format!("{transport} {count}"))
            .collect();
        let mut text = format!("{} of {} nodes connected", self.connected, self.edges);
        if !transports.is_empty() {
            text.push_str(&format!(" ({})", transports.join(", ")));
        }
        if let Some((millis, node)) = &self.slowest {
            text.push_str(&format!("; slowest round trip {millis} ms ({node})"));
        }
        if let Some((end, node)) = &self.certificate {
            let days = end.duration_since(now).unwrap_or_default().as_secs() / 86_400;
            text.push_str(&format!(
                "; first certificate to end in {days} days ({node})"
            ));
        }
        Some(text)
    }
}

/// Returns the fault of a node without a connected agent.
/// `has_failed` means that connections of it, or from its last address, have failed since.
fn away(node: &NodeStatus, has_failed: bool) -> (FaultKind, Fault) {
    let name = &node.node;
    let severity = if NodeState::of(node).needs_operator() {
        Severity::Error
    } else {
        Severity::Info
    };
    // What several nodes have in common, and how all of them are fixed; then the same of this one.
    let fault = |several: String, fix_all: &'static str, what: String, fix: String| {
        let kind = FaultKind {
            noun: "nodes",
            what: several,
            fix: fix_all,
        };
        let fault = Fault {
            severity,
            place: name.clone(),
            what,
            fix,
        };
        (kind, fault)
    };
    if let Some(at) = node.revoked_at.as_ref().filter(|_| node.is_revoked()) {
        let several = "the nodes are revoked".to_owned();
        let fix_all = "if that was a mistake: tunnel-server nodes unrevoke NAME...";
        let fix = format!("if that was a mistake: tunnel-server nodes unrevoke {name}");
        return fault(
            several,
            fix_all,
            format!("the node was revoked at {at}"),
            fix,
        );
    }
    if node.is_pending {
        let what = "no agent has ever connected, and no token was used".to_owned();
        let fix_all = "join the nodes; or tunnel-server nodes forget NAME...";
        let fix = format!(
            "tunnel-server token create --node {name} prints the command for the node; if it will \
             not come: tunnel-server nodes forget {name}"
        );
        return fault(what.clone(), fix_all, what, fix);
    }
    if let Some(GoneServer { name, since }) = &node.gone_server {
        let several =
            "their server is gone, and no other one has seen their agents since".to_owned();
        let fix_all =
            "on the host of the server: systemctl status tunnel-server; tunnel-server nodes --away";
        let what = format!(
            "unknown: server {name} held it and is gone since {since}, and no other one has seen the agent since"
        );
        let fix = format!("on the host of {name}: systemctl status tunnel-server");
        return fault(several, fix_all, what, fix);
    }
    let close = node.last_close.as_ref();
    let seen = node.last_seen.as_ref();
    let seen_at = seen.map_or_else(|| "never seen".to_owned(), |at| format!("last seen {at}"));
    let ended = close.map(|close| format!("; last close: {} by {}", close.code, close.by));
    let ended = ended.unwrap_or_default();
    let reason = close.map(|close| &close.reason);
    let reason = reason.filter(|reason| !reason.is_empty());
    let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
    let when = if seen.is_some() {
        "seen before"
    } else {
        "never seen"
    };
    let (since, several_since) = if has_failed {
        (
            "; its connections fail, see D22",
            ", and connections fail, see D22",
        )
    } else {
        ("; no connection with its name has arrived since", "")
    };
    let several = format!("no agent is connected{several_since}; {when}{ended}");
    let fix_all = "tunnel-server nodes --away -o wide; tunnel-server nodes --failed; on a node: \
                   tunnel-agent doctor";
    let what = format!("no agent is connected; {seen_at}{ended}{reason}{since}");
    let fix = if has_failed {
        format!("tunnel-server nodes --failed {name}")
    } else if seen.is_none() && node.enrollment.is_some() {
        "the agent has enrolled and not connected, so perhaps it cannot store its certificate: on the \
         node, a disk that is full or read-only; tunnel-agent doctor; journalctl -u tunnel-agent"
            .to_owned()
    } else {
        "the node is off, or its DNS, a proxy or a firewall keeps the agent from this server; on the \
         node: tunnel-agent doctor; journalctl -u tunnel-agent"
            .to_owned()
    };
    fault(several, fix_all, what, fix)
}

/// Returns the fault of an address that several nodes have.
pub(super) fn shared_address(address: &str, names: &str, severity: Severity) -> (FaultKind, Fault) {
    let kind = FaultKind {
        noun: "addresses",
        what: "several nodes have each of them".to_owned(),
        fix: "reach the nodes by name; requests by these addresses are refused",
    };
    let fault = Fault {
        severity,
        place: format!("address {address}"),
        what: format!("several nodes have it: {names}"),
        fix: "reach them by name; requests by this address are refused".to_owned(),
    };
    (kind, fault)
}

/// Round-trip time above which a transfer is slow over any transport.
const RTT_MAX_MILLIS: u64 = 1000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::doctor::report::D09;

    #[test]
    fn servers_of_one_zone_are_found_while_all_zones_are_known() {
        let (a, b) = (Some("a"), Some("b"));
        for (zones, only) in [
            (&[][..], None),
            (&[a], None),
            (&[a, a], Some((2, "a"))),
            (&[a, b], None),
            (&[a, a, None], None),
            (&[None, None], None),
        ] {
            let mut survey = NodeSurvey::new(SurveySettings {
                only_nodes: Vec::new(),
                renewal_margin: Duration::from_secs(60),
                now: SystemTime::UNIX_EPOCH,
            });
            for (number, zone) in zones.iter().enumerate() {
                survey.add(&NodeStatus {
                    node: format!("edge-{number}"),
                    replica: Some(format!("server-{number}")),
                    zone: zone.map(str::to_owned),
                    ..NodeStatus::default()
                });
            }
            assert_eq!(survey.only_zone(), only, "{zones:?}");
        }
    }

    #[test]
    fn twenty_thousand_nodes_without_agents_are_a_few_findings() {
        let mut survey = NodeSurvey::new(SurveySettings {
            only_nodes: Vec::new(),
            renewal_margin: Duration::from_secs(60),
            now: SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000),
        });
        for number in 0..20_000 {
            let is_shared = number < 4000;
            let pair = u32::try_from(number / 2).unwrap();
            let address = std::net::IpAddr::from((0x0a00_0000 + pair).to_be_bytes());
            let twins = [number & !1, number | 1].map(|number| format!("edge-{number:05}"));
            survey.add(&NodeStatus {
                node: format!("edge-{number:05}"),
                is_edge: true,
                connected: number % 10 == 0,
                rtt_millis: Some(2000 + number),
                last_seen: (number % 2 == 0).then(|| "2025-01-01T00:00:00Z".to_owned()),
                revoked_at: (number % 50 == 1).then(|| "2025-01-01T00:00:00Z".to_owned()),
                address_conflicts: if is_shared {
                    [(address, twins.to_vec())].into()
                } else {
                    BTreeMap::new()
                },
                ..NodeStatus::default()
            });
        }
        let agents = survey.agents().findings(&D09);
        let counts: Vec<_> = agents
            .iter()
            .map(|finding| (finding.severity, finding.objects.count()))
            .collect();
        let expected = [
            (Severity::Error, 9600),
            (Severity::Error, 8000),
            (Severity::Warning, 2000),
            (Severity::Info, 400),
        ];
        assert_eq!(counts, expected, "{agents:#?}");
        assert!(
            agents[0]
                .what
                .contains("never seen: edge-00003, edge-00005"),
            "{agents:#?}"
        );
        let shared = survey.addresses().findings(&D09);
        assert_eq!(shared.len(), 1, "{shared:#?}");
        assert_eq!(shared[0].objects.count(), 2000);
        assert!(survey.is_connected("edge-00010") && !survey.is_connected("edge-00011"));
    }
}
