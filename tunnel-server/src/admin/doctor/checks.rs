//! The checks: pure functions from facts to faults, one for each id.

use std::time::Duration;

use tunnel_doctor::{
    Check, Checks, Explanation, Fact, Fault, FaultGroups, FaultKind, GroupedCheck, Report, Severity,
};
use tunnel_proto::transport::quic::UDP_BUFFER_BYTES;

use super::facts::agents::AgentReport;
use super::facts::{Facts, Link, ServerAnswer};
use super::report;
use crate::admin::render::shell;
use crate::routing::clock::is_apart;

mod addons;
mod cluster;
mod control_plane;
mod dialed;

const CHECKS: Checks<Facts> = Checks {
    single: SINGLE,
    grouped: GROUPED,
    values: &[(&report::D09, nodes), (&report::D22, no_failures)],
};

const SINGLE: &[(&Explanation, Check<Facts>)] = &[
    (&report::D01, control_plane::kubelet_path),
    (&report::D02, control_plane::resolver),
    (&report::D03, control_plane::kubelet_ca),
    (&report::D03, dialed::kubelet_certificates),
    (&report::D04, cluster::service),
    (&report::D04, cluster::dns_service),
    (&report::D05, cluster::records),
    (&report::D06, control_plane::corefile),
    (&report::D06, addons::records_mounts),
    (&report::D07, cluster::port_lists),
    (&report::D09, dialed::kubelets),
    (&report::D09, server),
    (&report::D10, addons::dns_endpoints),
    (&report::D11, cluster::credentials),
    (&report::D11, cluster::rights),
    (&report::D12, addons::monitors),
    (&report::D13, dialed::agent_port),
    (&report::D14, dialed::pod_resolver),
    (&report::D14, dialed::upstreams),
    (&report::D15, addons::yurthub),
    (&report::D16, dialed::edge_apiserver),
    (&report::D17, servers),
    (&report::D18, host),
    (&report::D18, clock),
];

const GROUPED: &[(&Explanation, GroupedCheck<Facts>)] = &[
    (&report::D08, cluster::node_names),
    (&report::D09, agents),
    (&report::D22, failures),
];

/// Does all checks and returns their results, sorted.
pub(super) fn examine(facts: &Facts) -> Report {
    Report {
        capacity: facts.capacity.clone(),
        ..tunnel_doctor::examine(facts, &CHECKS)
    }
}

/// D09: the agents of the edge nodes.
fn agents(facts: &Facts) -> Fact<FaultGroups> {
    let data_dir = facts.data_dir.display();
    let mut groups = FaultGroups::default();
    let survey = match &facts.server {
        ServerAnswer::Nodes(survey) => survey,
        ServerAnswer::NotRunning if facts.is_remote() => return Err(facts.elsewhere()),
        ServerAnswer::NotRunning => {
            groups.add_alone(Fault {
                severity: Severity::Error,
                place: data_dir.to_string(),
                what: "no tunnel-server runs with this data directory".to_owned(),
                fix: "systemctl start tunnel-server; or use the command on its host, with its \
                      --data-dir"
                    .to_owned(),
            });
            return Ok(groups);
        }
        ServerAnswer::NoAnswer(reason) => {
            groups.add_alone(Fault {
                severity: Severity::Error,
                place: data_dir.to_string(),
                what: format!("the running server gives no answer: {reason}"),
                fix: "journalctl -u tunnel-server; systemctl restart tunnel-server".to_owned(),
            });
            return Ok(groups);
        }
        ServerAnswer::Unknown(reason) => return Err(reason.clone()),
    };
    let unknown = facts.only_nodes.iter().map(|name| name.as_str());
    for name in unknown.filter(|name| !survey.is_known(name)) {
        let kind = FaultKind {
            noun: "nodes",
            what: "the server knows no node of these names".to_owned(),
            fix: "tunnel-server nodes; tunnel-server token create --node NAME",
        };
        let fault = Fault {
            severity: Severity::Error,
            place: name.to_owned(),
            what: "the server knows no node of this name".to_owned(),
            fix: format!("tunnel-server nodes; tunnel-server token create --node {name}"),
        };
        groups.add(kind, name, fault);
    }
    groups.extend(survey.agents().clone());
    add_conditions(&mut groups, &facts.agents);
    Ok(groups)
}

/// D09: what agents say of themselves.
fn add_conditions(groups: &mut FaultGroups, agents: &[AgentReport]) {
    for agent in agents {
        for condition in &agent.conditions {
            let component = condition.split(':').next().unwrap_or_default();
            let fix = "the text says what to do; tunnel-server diag --node NAME has more facts of the agent";
            let kind = FaultKind {
                noun: "nodes",
                what: format!("the agents report the condition {component:?}"),
                fix,
            };
            let fault = Fault {
                severity: Severity::Warning,
                place: agent.node.clone(),
                what: format!("the agent reports {condition}"),
                fix: fix.replace("NAME", &agent.node),
            };
            groups.add(kind, &agent.node, fault);
        }
    }
}

/// D09: numbers of the nodes and their sessions.
fn nodes(facts: &Facts) -> Option<String> {
    match &facts.server {
        ServerAnswer::Nodes(survey) => survey.good(),
        ServerAnswer::NotRunning | ServerAnswer::NoAnswer(_) | ServerAnswer::Unknown(_) => None,
    }
}

/// D22: what failed at agents.
fn failures(facts: &Facts) -> Fact<FaultGroups> {
    match &facts.server {
        ServerAnswer::Nodes(survey) => Ok(survey.failures().clone()),
        ServerAnswer::NotRunning | ServerAnswer::NoAnswer(_) => {
            Err("the failures of agents are known to a running server, see D09".to_owned())
        }
        ServerAnswer::Unknown(reason) => Err(reason.clone()),
    }
}

fn no_failures(facts: &Facts) -> Option<String> {
    match &facts.server {
        ServerAnswer::Nodes(survey) if survey.failures().is_empty() => {
            Some("no agent failed to connect in the last hour".to_owned())
        }
        ServerAnswer::Nodes(_)
        | ServerAnswer::NotRunning
        | ServerAnswer::NoAnswer(_)
        | ServerAnswer::Unknown(_) => None,
    }
}

/// D09: readiness and conditions of the running server, except those of other checks.
fn server(facts: &Facts) -> Fact<Vec<Fault>> {
    if let (Err(reason), ServerAnswer::Nodes(_)) = (&facts.readiness, &facts.server) {
        return Err(format!("conditions: {reason}"));
    }
    let waiting = facts.waits_for().into_iter().map(|component| Fault {
        severity: Severity::Error,
        place: "server".to_owned(),
        what: format!("not ready: waiting for {component}"),
        fix: "see the log of the server: journalctl -u tunnel-server".to_owned(),
    });
    let others = facts.conditions().into_iter();
    let others = others.filter(|condition| !OF_OTHER_CHECKS.contains(&condition.component));
    let others = others.map(|condition| condition.fault(Severity::Warning));
    Ok(waiting.chain(others).collect())
}

/// D17: the other servers.
fn servers(facts: &Facts) -> Fact<Vec<Fault>> {
    facts.readiness.as_ref().map_err(Clone::clone)?;
    let faults = facts.conditions().into_iter().filter_map(|condition| {
        let severity = match condition.component {
            // The text begins with the number of connected servers.
            "peers" if condition.text.starts_with("0 of ") => Severity::Error,
            "peers" | "peer endpoints" | "watching peers" => Severity::Warning,
            _ => return None,
        };
        Some(Fault {
            fix: "allow TCP 10269 between the servers; see their logs".to_owned(),
            ..condition.fault(severity)
        })
    });
    Ok(faults.chain(one_zone(facts)).collect())
}

/// Returns the information that one zone has all servers.
fn one_zone(facts: &Facts) -> Option<Fault> {
    let ServerAnswer::Nodes(survey) = &facts.server else {
        return None;
    };
    let (servers, zone) = survey.only_zone()?;
    Some(Fault {
        severity: Severity::Info,
        place: "servers".to_owned(),
        what: format!(
            "the {servers} servers with connected nodes are in one zone, {zone}: its loss takes all nodes away"
        ),
        fix: "run servers in several zones, where the cluster has them".to_owned(),
    })
}

/// D18: the host of the command, which is the server's if the command finds the server.
fn host(facts: &Facts) -> Fact<Vec<Fault>> {
    if let ServerAnswer::NotRunning = &facts.server
        && facts.is_remote()
    {
        return Err(facts.elsewhere());
    }
    let mut found = facts.host.small_buffers(UDP_BUFFER_BYTES);
    found.faults.extend(small_links(&facts.links));
    match &facts.descriptors {
        Ok(files) if *files < DESCRIPTORS_MIN => {
            // A Pod cannot say how many files it needs.
            let (severity, unit) = if facts.is_pod {
                (Severity::Info, "the container runtime")
            } else {
                (Severity::Warning, "the server")
            };
            found.faults.push(Fault {
                severity,
                place: "open files".to_owned(),
                what: format!("the server may open {files} files, less than {DESCRIPTORS_MIN}"),
                fix: format!("LimitNOFILE=1048576 in the unit of {unit}"),
            });
        }
        Ok(_enough) => {}
        Err(reason) => found.unknown.push(reason.clone()),
    }
    facts.host.add_storage(&facts.data_dir, &mut found);
    // The server may see another file system than this command.
    if let Ok(None) = &facts.host.disk {
        let conditions = facts.conditions().into_iter();
        let disk = conditions.filter(|condition| condition.component == "disk");
        let faults = disk.map(|condition| condition.fault(Severity::Error));
        found.faults.extend(faults);
    }
    found.result()
}

/// Returns the faults of interfaces over which QUIC does not connect.
fn small_links(links: &[Link]) -> impl Iterator<Item = Fault> {
    let small = links.iter().filter(|link| link.mtu < MTU_MIN_BYTES);
    small.map(|link| Fault {
        severity: Severity::Warning,
        place: format!("interface {}", link.name),
        what: format!(
            "packets of at most {} bytes; agents behind it use h2, and not QUIC",
            link.mtu
        ),
        fix: format!("ip link set dev {} mtu {MTU_MIN_BYTES}", shell(&link.name)),
    })
}

/// D18: the clock of this host against the API server's.
fn clock(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = facts
        .cluster
        .as_ref()
        .map_err(|reason| format!("clock: {reason}"))?;
    let ahead = cluster.clock_ahead.as_ref();
    let ahead = *ahead.map_err(|reason| format!("clock: {reason}"))?;
    let apart = Duration::from_secs(ahead.unsigned_abs());
    if !is_apart(ahead) {
        return Ok(Vec::new());
    }
    let (apart, direction) = (
        humantime::format_duration(apart),
        if ahead > 0 { "ahead of" } else { "behind" },
    );
    Ok(vec![Fault {
        severity: Severity::Warning,
        place: "clock".to_owned(),
        what: format!("the clock of this host is {apart} {direction} the API server's"),
        fix: "timedatectl set-ntp true".to_owned(),
    }])
}

/// Components of conditions that other checks report.
const OF_OTHER_CHECKS: &[&str] = &[
    "peers",
    "peer endpoints",
    "watching peers",
    "disk",
    "service",
    "port lists",
    "node names",
    "node claims",
    "records size",
    "watching records",
    "writing records",
    // D22 has the failures of which this condition has some.
    "agents",
];
/// Packet of IPv6 that every link passes (RFC 8200, section 5). QUIC's packets have at least 1,200
/// bytes of payload (RFC 9000, section 14).
const MTU_MIN_BYTES: u32 = 1280;
/// Open files for some ten thousand callers.
const DESCRIPTORS_MIN: u64 = 65_536;

#[cfg(test)]
mod tests;
