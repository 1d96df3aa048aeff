//! The checks: pure functions from facts to faults, one for each id.

use std::time::{Duration, SystemTime};

use tunnel_proto::process::doctor::{Explanation, Report, Severity};
use tunnel_proto::transport::quic::UDP_BUFFER_BYTES;

use super::facts::{Facts, Link, ServerAnswer};
use super::report::{self, Fault};
use crate::admin::render::shell;
use crate::admin::status::{NodeStatus, VersionSkew};
use crate::cluster::doctor::Fact;
use crate::routing::clock::is_apart;

mod addons;
mod cluster;
mod control_plane;
mod dialed;

/// A check: the faults, or the reason why it cannot be done.
type Check = fn(&Facts) -> Fact<Vec<Fault>>;

const CHECKS: &[(&Explanation, Check)] = &[
    (&report::D01, control_plane::kubelet_path),
    (&report::D02, control_plane::resolver),
    (&report::D03, control_plane::kubelet_ca),
    (&report::D03, dialed::kubelet_certificates),
    (&report::D04, cluster::service),
    (&report::D05, cluster::records),
    (&report::D06, control_plane::corefile),
    (&report::D06, addons::records_mounts),
    (&report::D07, cluster::port_lists),
    (&report::D08, cluster::node_names),
    (&report::D09, agents),
    (&report::D09, dialed::kubelets),
    (&report::D09, server),
    (&report::D10, addons::dns_endpoints),
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

/// Does all checks and returns their results.
pub(super) fn examine(facts: &Facts) -> Report {
    let mut report = Report {
        capacity: facts.host.capacity.clone(),
        ..Report::default()
    };
    for (explanation, check) in CHECKS {
        match check(facts) {
            Ok(faults) => {
                let findings = faults.into_iter().map(|fault| fault.of(explanation));
                report.findings.extend(findings);
            }
            Err(reason) => report.skip(explanation.id, reason),
        }
    }
    report
}

/// D09: the agents of the edge nodes.
fn agents(facts: &Facts) -> Fact<Vec<Fault>> {
    let data_dir = facts.data_dir.display();
    let nodes = match &facts.server {
        ServerAnswer::Nodes(nodes) => nodes,
        ServerAnswer::NotRunning => {
            return Ok(vec![Fault {
                severity: Severity::Error,
                place: data_dir.to_string(),
                what: "no tunnel-server runs with this data directory".to_owned(),
                fix: "systemctl start tunnel-server; or use the command on its host, with its \
                      --data-dir"
                    .to_owned(),
            }]);
        }
        ServerAnswer::NoAnswer(reason) => {
            return Ok(vec![Fault {
                severity: Severity::Error,
                place: data_dir.to_string(),
                what: format!("the running server gives no answer: {reason}"),
                fix: "journalctl -u tunnel-server; systemctl restart tunnel-server".to_owned(),
            }]);
        }
        ServerAnswer::Unknown(reason) => return Err(reason.clone()),
    };
    let is_known = |name: &str| nodes.iter().any(|node| node.node == name);
    let unknown = facts.only_nodes.iter().map(|name| name.as_str());
    let mut faults: Vec<Fault> = unknown
        .filter(|name| !is_known(name))
        .map(|name| Fault {
            severity: Severity::Error,
            place: name.to_owned(),
            what: "the server knows no node of this name".to_owned(),
            fix: format!("tunnel-server nodes; tunnel-server token create --node {name}"),
        })
        .collect();
    let selected = nodes
        .iter()
        .filter(|node| node.is_edge && facts.is_selected(&node.node));
    for node in selected {
        faults.extend(if node.connected {
            session_faults(node, facts)
        } else {
            vec![away_fault(node)]
        });
    }
    Ok(faults)
}

/// Returns the fault of a node without a connected agent.
fn away_fault(node: &NodeStatus) -> Fault {
    if let Some(at) = node.revoked_at.as_ref().filter(|_| node.is_revoked()) {
        return Fault {
            severity: Severity::Info,
            place: node.node.clone(),
            what: format!("the node was revoked at {at}"),
            fix: format!(
                "if that was a mistake: tunnel-server nodes unrevoke {}",
                node.node
            ),
        };
    }
    let seen = node.last_seen.as_ref();
    let seen = seen.map_or_else(|| "never seen".to_owned(), |at| format!("last seen {at}"));
    let close = node.last_close.as_ref().map(|close| {
        let reason = Some(&close.reason).filter(|reason| !reason.is_empty());
        let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
        format!("; last close: {} by {}{reason}", close.code, close.by)
    });
    Fault {
        severity: Severity::Error,
        place: node.node.clone(),
        what: format!("no agent is connected; {seen}{}", close.unwrap_or_default()),
        fix: "on the node: tunnel-agent status; journalctl -u tunnel-agent".to_owned(),
    }
}

/// Returns the faults of a node with a connected agent. Another server may hold it, which alone
/// knows the session.
fn session_faults(node: &NodeStatus, facts: &Facts) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut add = |severity, what: String, fix: &str| {
        faults.push(Fault {
            severity,
            place: node.node.clone(),
            what,
            fix: fix.to_owned(),
        });
    };
    if node.state.as_deref().is_some_and(|state| state != "live") {
        let what = "the agent does not answer, and requests are refused until it does";
        add(
            Severity::Error,
            what.to_owned(),
            "check the network of the node",
        );
    }
    if let Some(millis) = node.rtt_millis.filter(|millis| *millis > RTT_MAX_MILLIS) {
        let what = format!("the round trip takes {millis} ms");
        add(
            Severity::Warning,
            what,
            "check the network of the node for loss and queues",
        );
    }
    if node.version_skew == Some(VersionSkew::Unsupported) {
        let version = node.version.as_deref().unwrap_or("unknown");
        let what = format!("the agent has version {version}, which this server does not support");
        add(
            Severity::Warning,
            what,
            "upgrade the agent to the version of the server",
        );
    }
    if let Some((severity, what)) = certificate_fault(node, facts) {
        let fix = "on the node: journalctl -u tunnel-agent; with an ended certificate, a new token";
        add(severity, what, fix);
    }
    faults
}

fn certificate_fault(node: &NodeStatus, facts: &Facts) -> Option<(Severity, String)> {
    let text = node.certificate_not_after.as_deref()?;
    let end: SystemTime = humantime::parse_rfc3339(text).ok()?;
    match end.duration_since(facts.now) {
        Err(_past) => Some((
            Severity::Error,
            format!("the certificate of the agent ended {text}"),
        )),
        Ok(left) if left < facts.renewal_margin => {
            let what = format!("the certificate of the agent ends {text} and was not renewed");
            Some((Severity::Warning, what))
        }
        Ok(_enough) => None,
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
    Ok(faults.collect())
}

/// D18: the host of the command, which is the server's if the command finds the server.
fn host(facts: &Facts) -> Fact<Vec<Fault>> {
    let (mut faults, mut unknown) = (Vec::new(), Vec::new());
    for buffer in &facts.host.buffers {
        let setting = buffer.setting;
        match &buffer.bytes {
            Ok(bytes) if *bytes < UDP_BUFFER_BYTES as u64 => faults.push(Fault {
                severity: Severity::Warning,
                place: setting.to_owned(),
                what: format!(
                    "a UDP buffer has at most {bytes} bytes; QUIC asks for {UDP_BUFFER_BYTES}"
                ),
                fix: format!("sysctl -w {setting}={UDP_BUFFER_BYTES}; and in /etc/sysctl.d"),
            }),
            Ok(_enough) => {}
            Err(reason) => unknown.push(reason.clone()),
        }
    }
    faults.extend(small_links(&facts.host.links));
    match &facts.host.descriptors {
        Ok(files) if *files < DESCRIPTORS_MIN => faults.push(Fault {
            severity: Severity::Warning,
            place: "open files".to_owned(),
            what: format!("the server may open {files} files, less than {DESCRIPTORS_MIN}"),
            fix: "LimitNOFILE=1048576 in the unit of the server".to_owned(),
        }),
        Ok(_enough) => {}
        Err(reason) => unknown.push(reason.clone()),
    }
    faults.extend(facts.host.buffer_pool.iter().map(|what| Fault {
        severity: Severity::Warning,
        place: "limits.bufferPool".to_owned(),
        what: what.clone(),
        fix: "leave limits.bufferPool out, or raise the memory limit".to_owned(),
    }));
    match &facts.host.disk {
        Ok(Some(what)) => faults.push(Fault {
            severity: Severity::Error,
            place: facts.data_dir.display().to_string(),
            what: what.clone(),
            fix: "free some space, or mount the file system writable".to_owned(),
        }),
        // The server may see another file system than this command.
        Ok(None) => {
            let conditions = facts.conditions().into_iter();
            let disk = conditions.filter(|condition| condition.component == "disk");
            faults.extend(disk.map(|condition| condition.fault(Severity::Error)));
        }
        Err(reason) => unknown.push(reason.clone()),
    }
    if faults.is_empty() && !unknown.is_empty() {
        return Err(unknown.join("; "));
    }
    Ok(faults)
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
];
/// Round-trip time above which a transfer is slow over any transport.
const RTT_MAX_MILLIS: u64 = 1000;
/// Packet of IPv6 that every link passes (RFC 8200, section 5). QUIC's packets have at least 1,200
/// bytes of payload (RFC 9000, section 14).
const MTU_MIN_BYTES: u32 = 1280;
/// Open files for some ten thousand callers.
const DESCRIPTORS_MIN: u64 = 65_536;
/// Certificates are valid from some minutes before their issue; leases and records are compared in

#[cfg(test)]
mod tests;
