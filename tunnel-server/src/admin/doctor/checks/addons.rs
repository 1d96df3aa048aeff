//! Checks of CoreDNS, the Prometheus operator and YurtHub. Pure.

use std::path::Path;

use serde_json::{Value, json};
use tunnel_doctor::{Fault, Severity};
use tunnel_process::name_list::NameList;

use crate::admin::doctor::facts::Facts;
use crate::admin::render::shell;
use crate::cluster::doctor::{ClusterFacts, EndpointFacts, Fact, MonitorFacts};
use crate::config::ObjectNames;

fn cluster(facts: &Facts) -> Fact<&ClusterFacts> {
    facts.cluster.as_ref().map_err(Clone::clone)
}

/// Returns the command that changes an object by a JSON patch.
fn json_patch(namespace: &str, object: &str, operations: Value) -> String {
    format!(
        "kubectl -n {} patch {object} --type=json -p {}",
        shell(namespace),
        shell(&operations.to_string())
    )
}

/// D06: the mounts of the records in Pods of CoreDNS.
pub(super) fn records_mounts(facts: &Facts) -> Fact<Vec<Fault>> {
    let mounts = &cluster(facts)?.addons.records_mounts;
    let mounts = mounts.as_ref().map_err(Clone::clone)?.iter();
    let faults = mounts.filter(|mount| mount.has_sub_path).map(|mount| {
        let path = Path::new(&mount.path);
        let folder = path.parent().unwrap_or(path).to_string_lossy();
        let field = format!(
            "/spec/template/spec/containers/{}/volumeMounts/{}",
            mount.container, mount.mount
        );
        let operations = json!([
            {"op": "remove", "path": format!("{field}/subPath")},
            {"op": "replace", "path": format!("{field}/mountPath"), "value": folder},
        ]);
        let (kind, name) = mount.workload.split_once(' ').unwrap_or_default();
        Fault {
            severity: Severity::Error,
            place: format!("{} of kube-system", mount.workload),
            what: format!(
                "{} is mounted with subPath, which is never updated",
                mount.path
            ),
            fix: json_patch(
                "kube-system",
                &format!("{kind} {}", shell(name)),
                operations,
            ),
        }
    });
    Ok(faults.collect())
}

/// D10: endpoints of CoreDNS on edge nodes.
pub(super) fn dns_endpoints(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = cluster(facts)?;
    let dns = cluster.addons.cluster_dns.as_ref().map_err(Clone::clone)?;
    let dns = dns.as_ref().ok_or(NO_KUBE_DNS)?;
    let nodes = &cluster.nodes.as_ref().map_err(Clone::clone)?.nodes;
    let edges = nodes.iter().filter(|node| node.is_edge);
    let at_edge: NameList = edges
        .map(|node| node.name.as_str())
        .filter(|name| dns.nodes.contains(*name))
        .collect();
    if dns.has_traffic_policy || at_edge.is_empty() {
        return Ok(Vec::new());
    }
    let is_everywhere = nodes.iter().all(|node| dns.nodes.contains(&node.name));
    Ok(vec![Fault {
        severity: Severity::Error,
        place: "Service kube-system/kube-dns".to_owned(),
        what: format!(
            "{} endpoints are on edge nodes, for Pods of all nodes: {at_edge}",
            at_edge.count()
        ),
        fix: if is_everywhere {
            LOCAL_DNS
        } else {
            NO_EDGE_DNS
        }
        .to_owned(),
    }])
}

/// D12: monitors of the Prometheus operator.
pub(super) fn monitors(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = cluster(facts)?;
    let nodes = cluster.nodes.as_ref().map_err(Clone::clone)?;
    if !nodes.nodes.iter().any(|node| node.is_edge) {
        return Ok(Vec::new());
    }
    let monitors = cluster.addons.monitors.as_ref().map_err(Clone::clone)?;
    let faults = monitors.iter().flat_map(|monitor| {
        let endpoints = monitor.endpoints.iter().enumerate();
        endpoints.filter_map(|(number, endpoint)| endpoint_fault(monitor, number, endpoint))
    });
    Ok(faults.collect())
}

fn endpoint_fault(
    monitor: &MonitorFacts,
    number: usize,
    endpoint: &EndpointFacts,
) -> Option<Fault> {
    let field = format!("/spec/{}/{number}/relabelings", monitor.kind.endpoints());
    let greedy = endpoint.address_rules.iter().find(|rule| {
        // The first group may then be empty, and the target loses its host.
        rule.regex.starts_with("(.*);")
    });
    let (what, operation) = match greedy {
        Some(rule) => {
            let regex = rule.regex.replacen("(.*)", "(.+)", 1);
            let what = format!(
                "rule {} has regex {}: a target without a node loses its host",
                rule.number, rule.regex
            );
            let path = format!("{field}/{}/regex", rule.number);
            (what, json!({"op": "replace", "path": path, "value": regex}))
        }
        None if endpoint.has_proxy || !endpoint.address_rules.is_empty() => return None,
        None => {
            let rule = json!({
                "sourceLabels": [monitor.node_label, "__address__"],
                "regex": "(.+);.*:(.*)",
                "targetLabel": "__address__",
                "replacement": "$1:$2",
            });
            let what = format!("endpoint {number} has neither a proxyUrl nor a rule for the name");
            let (path, value) = if endpoint.has_rules {
                (format!("{field}/-"), rule)
            } else {
                (field, json!([rule]))
            };
            (what, json!({"op": "add", "path": path, "value": value}))
        }
    };
    let object = format!("{} {}", monitor.kind.resource(), shell(&monitor.name));
    Some(Fault {
        severity: Severity::Warning,
        place: format!(
            "{} {}/{}",
            monitor.kind.resource(),
            monitor.namespace,
            monitor.name
        ),
        what,
        fix: json_patch(&monitor.namespace, &object, json!([operation])),
    })
}

/// D15: YurtHub next to the server's Service.
pub(super) fn yurthub(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = cluster(facts)?;
    let nodes = cluster
        .addons
        .yurthub_nodes
        .as_ref()
        .map_err(Clone::clone)?;
    if nodes.is_empty() {
        return Ok(Vec::new());
    }
    let fault = |severity, what: String, fix: &str| Fault {
        severity,
        place: "YurtHub".to_owned(),
        what,
        fix: fix.to_owned(),
    };
    let mut faults = Vec::new();
    let known = ObjectNames::default().internal_service;
    let actual = &cluster.names.internal_service;
    if *actual != known {
        let what = format!("Service {actual} is not hidden from edge nodes, as {known} is");
        let fix = "remove --internal-service, and name the Service x-tunnel-server-internal-svc";
        faults.push(fault(Severity::Warning, what, fix));
    }
    if let Ok(Some(server)) = &cluster.addons.kube_proxy_server {
        let what = format!(
            "runs on {} nodes; kube-proxy has its endpoints from {server}",
            nodes.len()
        );
        let fix = "none is needed; YurtHub filters endpoints only for clients that use YurtHub";
        faults.push(fault(Severity::Info, what, fix));
    }
    Ok(faults)
}

const NO_KUBE_DNS: &str = "there is no Service kube-system/kube-dns";
const LOCAL_DNS: &str = "kubectl -n kube-system patch service kube-dns \
                         -p '{\"spec\":{\"internalTrafficPolicy\":\"Local\"}}'";
const NO_EDGE_DNS: &str = "keep CoreDNS off edge nodes by a nodeAffinity of its workload, or run it \
                           on every node and set internalTrafficPolicy: Local";
