//! Checks of connections that the command opened: to kubelets, to the port of agents, to API
//! servers and to resolvers. Pure.

use std::time::Duration;

use tunnel_doctor::{Fault, Severity};

use crate::admin::doctor::facts::kubelets::{KubeletAnswer, KubeletProbe};
use crate::admin::doctor::facts::{Facts, ServerAnswer};
use crate::admin::render::shell;
use crate::cluster::doctor::Fact;

/// D09: the agent of a node connects to the kubelet.
pub(super) fn kubelets(facts: &Facts) -> Fact<Vec<Fault>> {
    let probes = probes(facts)?.iter();
    let faults = probes.filter_map(|probe| match &probe.answer {
        KubeletAnswer::Unreachable(reason) => Some(Fault {
            severity: Severity::Error,
            place: probe.node.clone(),
            what: format!(
                "no connection to the kubelet's port {}: {reason}",
                probe.port
            ),
            fix: format!("on the node: tunnel-agent doctor --port {}", probe.port),
        }),
        KubeletAnswer::NoHandshake(_) | KubeletAnswer::Certificate { .. } => None,
    });
    Ok(faults.collect())
}

/// D03: the certificates of kubelets.
pub(super) fn kubelet_certificates(facts: &Facts) -> Fact<Vec<Fault>> {
    let is_verified = is_verified(facts);
    let probes = probes(facts)?.iter();
    let faults = probes.filter_map(|probe| {
        let (what, fix) = match &probe.answer {
            KubeletAnswer::NoHandshake(reason) => {
                let what = format!("no TLS handshake with the kubelet: {reason}");
                (what, SIGNED_CERTIFICATE)
            }
            KubeletAnswer::Certificate { is_for_node: false } if is_verified => {
                let what = "the certificate of the kubelet names neither the node nor its address";
                (what.to_owned(), SIGNED_CERTIFICATE)
            }
            KubeletAnswer::Certificate { .. } | KubeletAnswer::Unreachable(_) => return None,
        };
        Some(Fault {
            severity: Severity::Error,
            place: probe.node.clone(),
            what,
            fix: fix.to_owned(),
        })
    });
    Ok(faults.collect())
}

fn probes(facts: &Facts) -> Fact<&[KubeletProbe]> {
    facts.kubelets.as_deref().map_err(Clone::clone)
}

/// Returns whether a kube-apiserver verifies kubelets itself: with an egress selector the tunnel
/// does not end TLS.
fn is_verified(facts: &Facts) -> bool {
    let apiservers = facts.cluster.iter().flat_map(|facts| &facts.apiservers);
    apiservers
        .flatten()
        .any(|apiserver| apiserver.egress_selector.is_some() && apiserver.kubelet_ca.is_some())
}

/// D13: the port of agents.
pub(super) fn agent_port(facts: &Facts) -> Fact<Vec<Fault>> {
    match &facts.server {
        ServerAnswer::Nodes(_) => {}
        ServerAnswer::Unknown(reason) => return Err(reason.clone()),
        // D09 reports it.
        ServerAnswer::NotRunning | ServerAnswer::NoAnswer(_) => return Ok(Vec::new()),
    }
    let fault = |severity, place: &str, what: String, fix: &str| Fault {
        severity,
        place: place.to_owned(),
        what,
        fix: fix.to_owned(),
    };
    let mut faults = Vec::new();
    for own in &facts.dialed.own {
        if let Some(error) = &own.error {
            let what = format!("the server does not listen for agents here: {error}");
            let fix = "use the command with the settings of the server: --config or --agent-listen";
            faults.push(fault(Severity::Error, &own.address, what, fix));
        }
    }
    for advertised in &facts.dialed.advertised {
        if let Some(error) = &advertised.error {
            let what = format!("no connection to this address of --advertise from here: {error}");
            let fix = "let TCP and UDP of that port through to 10262, or correct --advertise";
            faults.push(fault(Severity::Warning, &advertised.address, what, fix));
        }
    }
    let uncovered = facts.dialed.uncovered.as_ref();
    match uncovered {
        Ok(hosts) => faults.extend(hosts.iter().map(|host| {
            let what = "the certificate of --agent-cert-file is not for this host of --advertise";
            let fix = "issue the certificate for that host too, or advertise a name in it";
            fault(Severity::Error, host, what.to_owned(), fix)
        })),
        Err(reason) if faults.is_empty() => return Err(reason.clone()),
        Err(_unknown) => {}
    }
    Ok(faults)
}

/// D14: the resolver of the server's Pods.
pub(super) fn pod_resolver(facts: &Facts) -> Fact<Vec<Fault>> {
    let Ok(cluster) = &facts.cluster else {
        return Ok(Vec::new());
    };
    if !facts.dialed.has_dns {
        return Ok(Vec::new());
    }
    let workloads = cluster.addons.server_workloads.as_ref();
    let workloads = workloads.map_err(Clone::clone)?.iter();
    let of_cluster = workloads.filter(|one| one.dns_policy.starts_with("ClusterFirst"));
    let faults = of_cluster.map(|one| {
        let (namespace, (kind, name)) = (
            shell(&cluster.namespace),
            one.workload.split_once(' ').unwrap_or_default(),
        );
        Fault {
            severity: Severity::Error,
            place: format!("{} of {}", one.workload, cluster.namespace),
            what: format!(
                "dnsPolicy {}: the server asks CoreDNS, which asks the server",
                one.dns_policy
            ),
            fix: format!(
                "kubectl -n {namespace} patch {kind} {} \
                 -p '{{\"spec\":{{\"template\":{{\"spec\":{{\"dnsPolicy\":\"Default\"}}}}}}}}'",
                shell(name)
            ),
        }
    });
    Ok(faults.collect())
}

/// D14: the resolvers to which the server forwards.
pub(super) fn upstreams(facts: &Facts) -> Fact<Vec<Fault>> {
    let resolvers = facts.dialed.resolvers.as_ref().map_err(Clone::clone)?;
    let faults = resolvers.iter().filter_map(|(resolver, time)| {
        let what = match time {
            None => "the resolver gives no answer in 2 s".to_owned(),
            Some(time) if *time > RESOLVER_MAX => {
                format!("the resolver takes {} ms", time.as_millis())
            }
            Some(_quick) => return None,
        };
        Some(Fault {
            severity: Severity::Warning,
            place: resolver.to_string(),
            what,
            fix: "set --dns-upstream to resolvers that answer".to_owned(),
        })
    });
    Ok(faults.collect())
}

/// D16: the API server that edge nodes reach.
pub(super) fn edge_apiserver(facts: &Facts) -> Fact<Vec<Fault>> {
    let apiservers = facts.dialed.apiservers.iter();
    let faults = apiservers.filter_map(|apiserver| {
        let (what, fix) = match &apiserver.is_for_service {
            Ok(true) => return None,
            Ok(false) => (
                "the certificate is not for kubernetes.default.svc".to_owned(),
                "with kubeadm: add the name to apiServer.certSANs, remove apiserver.crt and \
                 apiserver.key, and: kubeadm init phase certs apiserver",
            ),
            Err(reason) => (
                format!("no TLS handshake with the API server: {reason}"),
                "set --cloud-apiserver to an address that this host can dial",
            ),
        };
        Some(Fault {
            severity: Severity::Error,
            place: apiserver.address.clone(),
            what,
            fix: fix.to_owned(),
        })
    });
    Ok(faults.collect())
}

const SIGNED_CERTIFICATE: &str = "on the node: serverTLSBootstrap: true in the kubelet's \
                                  configuration, a restart, and: kubectl certificate approve NAME";
/// Clients ask again after some seconds, and a page needs several names.
const RESOLVER_MAX: Duration = Duration::from_millis(500);
