//! Checks of the objects that the server uses. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::json;
use tunnel_doctor::{Fault, FaultGroups, FaultKind, Severity};
use tunnel_process::name_list::NameList;

use super::control_plane::dials_by_address;
use crate::admin::doctor::facts::{Facts, ServerAnswer};
use crate::admin::doctor::survey::shared_address;
use crate::admin::render::shell;
use crate::cluster::doctor::{ClusterFacts, DNS_SERVICE, Fact, NodesFacts, ServiceFacts};

/// D04: the Service of the listeners.
pub(super) fn service(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = match &facts.cluster {
        Ok(cluster) => cluster,
        Err(reason) => return conditions_or(facts, &["service"], reason),
    };
    let (namespace, name) = (&cluster.namespace, &cluster.names.internal_service);
    let fault = |what: String, fix: String| Fault {
        severity: Severity::Error,
        place: format!("Service {namespace}/{name}"),
        what,
        fix,
    };
    let service = match &cluster.service {
        Ok(service) => service,
        Err(reason) => return conditions_or(facts, &["service"], reason),
    };
    let Some(service) = service else {
        let fix = "kubectl apply -f install.yaml; or name the Service by --internal-service";
        return Ok(vec![fault("does not exist".to_owned(), fix.to_owned())]);
    };
    let mut faults = Vec::new();
    if service.addresses.is_empty() {
        let fix = format!("kubectl -n {namespace} delete service {name}, and apply install.yaml");
        faults.push(fault("has no cluster address".to_owned(), fix));
    }
    let of_ports = port_faults(service).into_iter();
    faults.extend(of_ports.map(|(what, port, target)| {
        // Ports are merged by their number. A new port needs a name.
        let mut entry = json!({"port": port, "targetPort": target});
        if !service.ports.contains_key(&port) {
            entry["name"] = format!("tcp-{port}").into();
        }
        let patch = json!({"spec": {"ports": [entry]}});
        let patch = shell(&patch.to_string());
        let fix = format!("kubectl -n {namespace} patch service {name} -p {patch}");
        fault(what, fix)
    }));
    match &cluster.ready_endpoints {
        Ok(0) => {
            let fix = format!("kubectl -n {namespace} get pods -l {SERVER_LABEL}");
            faults.push(fault("has no ready endpoint".to_owned(), fix));
        }
        Err(reason) if faults.is_empty() => return Err(reason.clone()),
        Ok(_) | Err(_) => {}
    }
    Ok(faults)
}

/// D04: the Service of the DNS.
pub(super) fn dns_service(facts: &Facts) -> Fact<Vec<Fault>> {
    let Ok(cluster) = &facts.cluster else {
        return Ok(Vec::new());
    };
    let ready = cluster.ready_dns_endpoints.as_ref();
    let ready = ready.map_err(Clone::clone)?;
    let namespace = &cluster.namespace;
    let faults = ready.filter(|ready| *ready == 0).map(|_none| Fault {
        severity: Severity::Error,
        place: format!("Service {namespace}/{DNS_SERVICE}"),
        what: "has no ready endpoint: a kube-apiserver that asks it resolves no node".to_owned(),
        fix: format!(
            "kubectl apply -f install.yaml; kubectl -n {namespace} get endpointslices -l \
             kubernetes.io/service-name={DNS_SERVICE}"
        ),
    });
    Ok(faults.into_iter().collect())
}

/// Compares the ports of the Service with those that it should have. A target with a name is not
/// checked. Returns what is wrong, the port and its target.
fn port_faults(service: &ServiceFacts) -> Vec<(String, u16, u16)> {
    let wrong = service.expected.iter().filter_map(|(port, target)| {
        let what = match service.ports.get(port) {
            None => format!("port {port} is missing; its target is {target}"),
            Some(Some(actual)) if actual != target => {
                format!("port {port} leads to {actual} and not to {target}")
            }
            Some(_) => return None,
        };
        Some((what, *port, *target))
    });
    wrong.collect()
}

/// D05: the ConfigMap of the records.
pub(super) fn records(facts: &Facts) -> Fact<Vec<Fault>> {
    let conditions = ["records size", "watching records", "writing records"];
    let mut faults = of_conditions(facts, &conditions);
    let compared = compare_records(facts);
    if faults.is_empty() {
        return compared;
    }
    faults.extend(compared.unwrap_or_default());
    Ok(faults)
}

fn compare_records(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = facts.cluster.as_ref().map_err(Clone::clone)?;
    let records = cluster.records.as_ref().map_err(Clone::clone)?;
    let (namespace, name) = (&cluster.namespace, &cluster.names.nodes_config_map);
    let fault = |what: String| Fault {
        severity: Severity::Error,
        place: format!("ConfigMap {namespace}/{name}"),
        what,
        fix: format!(
            "see the log of the holder of the Lease: kubectl -n {namespace} get lease {} -o yaml",
            cluster.names.leader_lease
        ),
    };
    let Some(written) = &records.written else {
        return Ok(vec![fault("has no records".to_owned())]);
    };
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().map(|line| line.trim().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    };
    let (expected, written) = (lines(&records.expected), lines(written));
    let expected: BTreeSet<&str> = expected.iter().map(String::as_str).collect();
    let unique: BTreeSet<&str> = written.iter().map(String::as_str).collect();
    let sample = |lines: Vec<&str>| {
        let shown: Vec<&str> = lines.iter().take(SHOWN_MAX).copied().collect();
        format!("{} ({})", lines.len(), shown.join(", ").replace('\t', " "))
    };
    let mut faults = Vec::new();
    let missing: Vec<&str> = expected.difference(&unique).copied().collect();
    if !missing.is_empty() {
        faults.push(fault(format!("lines are missing: {}", sample(missing))));
    }
    let stale: Vec<&str> = unique.difference(&expected).copied().collect();
    if !stale.is_empty() {
        faults.push(fault(format!("lines are stale: {}", sample(stale))));
    }
    if unique.len() < written.len() {
        let repeated = written.len() - unique.len();
        faults.push(fault(format!("lines are there twice: {repeated}")));
    }
    Ok(faults)
}

/// D07: the ConfigMap of ports.
pub(super) fn port_lists(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = match &facts.cluster {
        Ok(cluster) => cluster,
        Err(reason) => return conditions_or(facts, &["port lists"], reason),
    };
    let lists = match &cluster.port_lists {
        Ok(Some(lists)) => lists,
        Ok(None) => return Ok(Vec::new()),
        Err(reason) => return conditions_or(facts, &["port lists"], reason),
    };
    let (namespace, name) = (&cluster.namespace, &cluster.names.ports_config_map);
    let patch = shell(&json!({"data": lists.corrected}).to_string());
    let fault = |what: String| Fault {
        severity: Severity::Warning,
        place: format!("ConfigMap {namespace}/{name}"),
        what,
        fix: format!("kubectl -n {namespace} patch configmap {name} --type merge -p {patch}"),
    };
    let in_both = lists
        .in_both
        .iter()
        .map(|port| format!("port {port} is in the lists of http and https, and https counts"));
    let mistakes = lists
        .mistakes
        .iter()
        .map(|mistake| format!("{mistake}, and is ignored"));
    Ok(mistakes.chain(in_both).map(fault).collect())
}

/// D08: names and addresses of the nodes.
pub(super) fn node_names(facts: &Facts) -> Fact<FaultGroups> {
    let mut groups = FaultGroups::default();
    for fault in of_conditions(facts, &["node claims"]) {
        groups.add_alone(fault);
    }
    let cluster = match &facts.cluster {
        Ok(cluster) => cluster,
        Err(reason) => {
            for fault in of_conditions(facts, &["node names"]) {
                groups.add_alone(fault);
            }
            if let ServerAnswer::Nodes(survey) = &facts.server {
                groups.extend(survey.addresses().clone());
            }
            return if groups.is_empty() {
                Err(reason.clone())
            } else {
                Ok(groups)
            };
        }
    };
    let nodes = cluster.nodes.as_ref().map_err(Clone::clone)?;
    for what in &nodes.refused {
        let fix = "rename the Node, or allow its host name with --record-names";
        let fault = Fault {
            severity: Severity::Warning,
            place: what.clone(),
            what: "the name or the host name is refused".to_owned(),
            fix: fix.to_owned(),
        };
        let kind = FaultKind {
            noun: "Nodes",
            what: "the names or the host names are refused".to_owned(),
            fix,
        };
        groups.add(kind, what, fault);
    }
    add_shared_addresses(facts, cluster, nodes, &mut groups);
    for node in nodes
        .nodes
        .iter()
        .filter(|node| facts.is_selected(&node.name))
    {
        let hostname = node.hostname.as_ref();
        if let Some(hostname) = hostname.filter(|hostname| **hostname != node.name) {
            let fault = Fault {
                severity: Severity::Info,
                place: format!("Node {}", node.name),
                what: format!("the host name {hostname} differs from the name of the Node"),
                fix: "use the name of the Node; the host name is an alias".to_owned(),
            };
            let kind = FaultKind {
                noun: "Nodes",
                what: "the host names differ from the names of the Nodes".to_owned(),
                fix: "use the names of the Nodes; the host names are aliases",
            };
            groups.add(kind, &node.name, fault);
        }
    }
    add_service_names(facts, cluster, &mut groups);
    Ok(groups)
}

/// Adds a fault for each address that several nodes have. That harms nobody who calls by name.
fn add_shared_addresses(
    facts: &Facts,
    cluster: &ClusterFacts,
    nodes: &NodesFacts,
    groups: &mut FaultGroups,
) {
    let severity = if dials_by_address(cluster) {
        Severity::Warning
    } else {
        Severity::Info
    };
    let mut owners: BTreeMap<IpAddr, Vec<&str>> = BTreeMap::new();
    for node in &nodes.nodes {
        for address in &node.internal {
            owners.entry(*address).or_default().push(&node.name);
        }
    }
    let shared = owners
        .iter()
        .filter(|(_, names)| names.len() > 1 && names.iter().any(|name| facts.is_selected(name)));
    for (address, names) in shared {
        let names = NameList::of(names).to_string();
        let address = address.to_string();
        let (kind, fault) = shared_address(&address, &names, severity);
        groups.add(kind, &address, fault);
    }
}

/// Adds a fault for each edge node that has the name of a Service. In the Service's namespace, or with
/// it as a second label, the name resolves to the Service.
fn add_service_names(facts: &Facts, cluster: &ClusterFacts, groups: &mut FaultGroups) {
    let (Ok(nodes), Ok(services)) = (&cluster.nodes, &cluster.service_names) else {
        return;
    };
    let mut by_name: BTreeMap<&str, &str> = BTreeMap::new();
    for full in services {
        by_name.insert(full, full);
        if let Some((short, _namespace)) = full.split_once('.') {
            by_name.insert(short, full);
        }
    }
    let edges = nodes
        .nodes
        .iter()
        .filter(|node| node.is_edge && facts.is_selected(&node.name));
    for node in edges {
        let Some(service) = by_name.get(node.name.as_str()) else {
            continue;
        };
        let fix = "rename the Service, or use the long name of the node (--dns-zone)";
        let fault = Fault {
            severity: Severity::Warning,
            place: format!("Node {}", node.name),
            what: format!("Service {service} has the same short name, and Pods may resolve it"),
            fix: fix.to_owned(),
        };
        let kind = FaultKind {
            noun: "Nodes",
            what: "Services have the same short names, and Pods may resolve them".to_owned(),
            fix,
        };
        groups.add(kind, &node.name, fault);
    }
}

/// D11: the credentials for the API server. Without them no check of the cluster is done.
pub(super) fn credentials(facts: &Facts) -> Fact<Vec<Fault>> {
    let unreadable = facts.credentials.as_ref().err().map(|reason| Fault {
        severity: Severity::Error,
        place: "--kubeconfig".to_owned(),
        what: format!("the credentials for the API server cannot be used: {reason}"),
        fix: "kubectl --kubeconfig FILE version; or --kubernetes off outside a cluster".to_owned(),
    });
    Ok(unreadable.into_iter().collect())
}

/// D11: the rights of the credentials of this command.
pub(super) fn rights(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = facts.cluster.as_ref().map_err(Clone::clone)?;
    let denied = cluster.denied.as_ref().map_err(Clone::clone)?;
    let faults = denied.iter().map(|right| Fault {
        severity: Severity::Error,
        place: "rights".to_owned(),
        what: format!("the credentials of this command may not {right}"),
        fix: "kubectl apply -f install.yaml; use this command with the server's credentials"
            .to_owned(),
    });
    Ok(faults.collect())
}

/// Returns the faults that conditions of these components describe.
fn of_conditions(facts: &Facts, components: &[&str]) -> Vec<Fault> {
    let conditions = facts.conditions().into_iter();
    let selected = conditions.filter(|condition| components.contains(&condition.component));
    selected
        .map(|condition| condition.fault(Severity::Warning))
        .collect()
}

/// Returns the faults that conditions describe, or the reason why the objects are not known.
fn conditions_or(facts: &Facts, components: &[&str], reason: &str) -> Fact<Vec<Fault>> {
    let faults = of_conditions(facts, components);
    if faults.is_empty() {
        return Err(reason.to_owned());
    }
    Ok(faults)
}

/// Label of the server's Pods in the manifests.
const SERVER_LABEL: &str = "app.kubernetes.io/name=tunnel-server";
/// Number of names or lines that a finding shows.
const SHOWN_MAX: usize = 8;
