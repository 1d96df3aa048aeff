//! The check of the node's names: which way they go, and what happens while the link is down.

use std::net::IpAddr;

use tunnel_doctor::{Fault, Severity};

use crate::doctor::facts::Facts;
use crate::doctor::names::ResolverFacts;

/// D21: the resolvers of pods and of the host. Without `--cloud-listen` there is nothing to check.
pub(super) fn names(facts: &Facts) -> Result<Vec<Fault>, String> {
    let listeners = facts.cloud.listeners.iter().map(|facts| &facts.listener);
    let is_wanted = listeners
        .clone()
        .any(|listener| listener.target.as_str() == DNS_TARGET);
    // Clients ask this port.
    let listeners: Vec<IpAddr> = listeners
        .filter(|listener| listener.address.port() == DNS_PORT)
        .map(|listener| listener.address.ip())
        .collect();
    let unknown = Vec::new();
    let pods = facts.names.pods.as_ref();
    let resolvers = pods.unwrap_or(&unknown);
    // The agent needs names before it has a session.
    let through_the_agent = facts.names.host.iter().filter(|address| {
        let mut caches = resolvers.iter().filter(|one| one.is_of_this_host());
        listeners.contains(address) || caches.any(|cache| cache.address == **address)
    });
    let mut faults: Vec<Fault> = through_the_agent
        .map(|address| Fault {
            severity: Severity::Error,
            place: "/etc/resolv.conf".to_owned(),
            what: format!(
                "this host asks {address}, which asks the cloud through the agent, and the agent asks \
                 this host for the address of its server: after a start it finds none"
            ),
            fix: "give this host a resolver of its network in /etc/resolv.conf, or --server an \
                  address"
                .to_owned(),
        })
        .collect();
    match pods {
        Ok(resolvers) => {
            let resolvers = resolvers.iter();
            faults.extend(resolvers.filter_map(|one| of_pods(one, &listeners, is_wanted)));
            Ok(faults)
        }
        Err(_reason) if !faults.is_empty() => Ok(faults),
        Err(reason) => Err(reason.clone()),
    }
}

/// D21: the cache that pods ask.
pub(super) fn cache(facts: &Facts) -> Option<String> {
    let resolvers = facts.names.pods.as_ref().ok()?;
    let addresses: Vec<_> = resolvers
        .iter()
        .map(|one| one.address.to_string())
        .collect();
    (!addresses.is_empty()).then(|| {
        format!(
            "pods ask {} on this node, which answers; while the link is down, it has the names that it \
             was asked before",
            addresses.join(" and ")
        )
    })
}

fn of_pods(resolver: &ResolverFacts, listeners: &[IpAddr], is_wanted: bool) -> Option<Fault> {
    let ResolverFacts {
        address, answer, ..
    } = resolver;
    let fault = |severity, what, fix: &str| {
        Some(Fault {
            severity,
            place: address.to_string(),
            what,
            fix: fix.to_owned(),
        })
    };
    match answer {
        _ if listeners.contains(address) => fault(
            Severity::Error,
            "pods ask the agent's listener, which takes TCP only, and most clients ask over UDP"
                .to_owned(),
            RENDER,
        ),
        _ if !resolver.is_of_this_host() => fault(
            if is_wanted {
                Severity::Warning
            } else {
                Severity::Info
            },
            "pods ask a resolver that is not on this node: while the link is down, no name resolves"
                .to_owned(),
            RENDER,
        ),
        Err(reason) => fault(
            Severity::Error,
            format!("pods ask a resolver on this node that does not answer: {reason}"),
            "kubectl -n kube-system get pods -l k8s-app=node-local-dns -o wide",
        ),
        Ok(()) => None,
    }
}

/// Name of the target in the guide.
pub(super) const DNS_TARGET: &str = "dns";
const DNS_PORT: u16 = 53;
const RENDER: &str = "tunnel-server render node-local-dns --cluster-dns IP; then the kubelet's \
                      cluster-dns: --part kubelet";
