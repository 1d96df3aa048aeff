//! What the checks look at, what a fault means, and how it is fixed.

use tunnel_doctor::Explanation;

pub(super) const D01: Explanation = Explanation {
    id: "D01",
    checks: "the path from kube-apiserver to kubelets, by the flags in its mirror Pod",
    consequence: "kubectl logs, exec, attach and port-forward fail for edge nodes",
    fix: "With an egress selector: add --egress-selector-config-file to kube-apiserver.\n\
          Or by names: --kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP",
    link: "docs/how-to/egress-selector.md",
};
pub(super) const D02: Explanation = Explanation {
    id: "D02",
    checks: "the resolver of a kube-apiserver that dials nodes by name",
    consequence: "names of edge nodes do not resolve, or do not while the cluster starts",
    fix: "In the manifest of kube-apiserver: dnsPolicy: None, and dnsConfig.nameservers with the\n\
          address of the server's DNS and a second one",
    link: "docs/how-to/dns.md",
};
pub(super) const D03: Explanation = Explanation {
    id: "D03",
    checks: "the kubelet CA of a kube-apiserver that dials nodes by name; a TLS handshake with the \
             kubelets of up to 8 connected edge nodes, by --target-ca if it is set",
    consequence: "kube-apiserver or the server refuses the certificate",
    fix: "Add Culvert's CA to the file of --kubelet-certificate-authority:\n\
          kubectl -n kube-system get configmap tunnel-ca -o jsonpath='{.data.ca\\.crt}'\n\
          On the node: serverTLSBootstrap: true in the kubelet's configuration, a restart, and\n\
          kubectl certificate approve NAME",
    link: "docs/how-to/kube-apiserver.md",
};
pub(super) const D04: Explanation = Explanation {
    id: "D04",
    checks: "the Service of the listeners: it exists, has an address, its ports lead to the \
             listeners, and an endpoint is ready; an endpoint of the Service tunnel-dns is ready",
    consequence: "callers that resolve names of nodes reach no server, or resolve no name",
    fix: "kubectl apply -f install.yaml\n\
          kubectl -n kube-system get pods -l app.kubernetes.io/name=tunnel-server",
    link: "docs/reference/kubernetes.md",
};
pub(super) const D05: Explanation = Explanation {
    id: "D05",
    checks: "the ConfigMap of the records against the names of the nodes",
    consequence: "CoreDNS answers with a wrong address, or with none",
    fix: "See the log and the conditions of the server that holds the Lease:\n\
          kubectl -n kube-system get lease tunnel-dns-controller -o yaml",
    link: "docs/how-to/dns.md",
};
pub(super) const D06: Explanation = Explanation {
    id: "D06",
    checks: "the Corefile of CoreDNS in kube-system: its hosts block for the records, and the mount \
             of the ConfigMap of the records",
    consequence: "names that are not nodes fail, or those of nodes are resolved too late",
    fix: "kubectl -n kube-system edit configmap coredns\n\
          Put fallthrough into the hosts block. Mount the ConfigMap as a directory, without subPath.",
    link: "docs/how-to/dns.md",
};
pub(super) const D07: Explanation = Explanation {
    id: "D07",
    checks: "the ConfigMap of ports: entries that are no ports, ports in both lists",
    consequence: "requests for the port are refused, or sent with the other protocol",
    fix: "kubectl -n kube-system edit configmap yurt-tunnel-server-cfg",
    link: "docs/reference/kubernetes.md",
};
pub(super) const D08: Explanation = Explanation {
    id: "D08",
    checks: "names and addresses of Nodes: equal internal addresses, host names that differ from \
             the name, names that a Service has too",
    consequence: "requests by this address or name are refused, or reach something else",
    fix: "Reach the nodes by name. Allow other host names with --record-names.",
    link: "docs/reference/kubernetes.md",
};
pub(super) const D09: Explanation = Explanation {
    id: "D09",
    checks: "the running server and its conditions; each edge node: its agent is connected and \
             answers, round-trip time, version, expiry of the certificate; the conditions of up to 8 \
             agents, and their connections to the kubelet",
    consequence: "requests for the node fail, or soon will",
    fix: "On the node: tunnel-agent status; journalctl -u tunnel-agent\n\
          On the server: tunnel-server nodes NAME -o wide",
    link: "docs/how-to/troubleshooting.md",
};
pub(super) const D10: Explanation = Explanation {
    id: "D10",
    checks: "the endpoints of Service kube-system/kube-dns: those on edge nodes are reached from \
             other nodes unless the Service has a traffic policy",
    consequence: "Pods ask CoreDNS on nodes that they cannot reach, and some of their names fail",
    fix: "With CoreDNS on every node:\n\
          kubectl -n kube-system patch service kube-dns \
          -p '{\"spec\":{\"internalTrafficPolicy\":\"Local\"}}'\n\
          Otherwise keep CoreDNS off edge nodes by a nodeAffinity of its workload.",
    link: "docs/how-to/dns.md",
};
pub(super) const D11: Explanation = Explanation {
    id: "D11",
    checks: "whether the kubeconfig can be read; the rights that the server needs, for the credentials of this command: use it in the \
             server's Pod or with the server's kubeconfig",
    consequence: "the server cannot follow the cluster, or cannot write records",
    fix: "kubectl apply -f install.yaml",
    link: "docs/reference/kubernetes.md",
};
pub(super) const D12: Explanation = Explanation {
    id: "D12",
    checks: "monitors of kubelets and node exporters of the Prometheus operator: a proxyUrl, or a \
             rule that writes the name of the node, with a regex that leaves other targets alone",
    consequence: "edge nodes are scraped by address past the tunnel, and are down",
    fix: "tunnel-server render prometheus\n\
          Add the rule to each endpoint of the monitor, with (.+) for the name of the node.",
    link: "docs/how-to/prometheus.md",
};
pub(super) const D13: Explanation = Explanation {
    id: "D13",
    checks: "the port of agents: TCP connections to the own address and to those of --advertise; the \
             names in the certificate of --agent-cert-file",
    consequence: "agents cannot connect",
    fix: "Let TCP and UDP 10262 through to the server. Set --advertise to an address that leads to it,\n\
          and to a name in the certificate.",
    link: "docs/how-to/agents.md",
};
pub(super) const D14: Explanation = Explanation {
    id: "D14",
    checks: "the server's DNS: dnsPolicy of its workload, and the time in which its resolvers answer",
    consequence: "queries loop between CoreDNS and the server, or other names resolve late or never",
    fix: "kubectl -n kube-system patch deployment tunnel-server \
          -p '{\"spec\":{\"template\":{\"spec\":{\"dnsPolicy\":\"Default\"}}}}'\n\
          Set --dns-upstream to resolvers that answer.",
    link: "docs/reference/dns.md",
};
pub(super) const D15: Explanation = Explanation {
    id: "D15",
    checks: "YurtHub: the name of the server's Service, which YurtHub hides from edge nodes, and the \
             source of kube-proxy's endpoints",
    consequence: "kube-proxy on edge nodes leads callers to servers that they cannot reach",
    fix: "Keep the Service name x-tunnel-server-internal-svc, without --internal-service.",
    link: "docs/how-to/openyurt.md",
};
pub(super) const D16: Explanation = Explanation {
    id: "D16",
    checks: "the API server of --cloud-apiserver: it answers, and its certificate is for \
             kubernetes.default.svc",
    consequence: "kubelets and Pods on edge nodes cannot use the API server",
    fix: "Set --cloud-apiserver to an address that the server can dial. With kubeadm, add the name to\n\
          apiServer.certSANs, remove apiserver.crt and apiserver.key, and: \
          kubeadm init phase certs apiserver",
    link: "docs/how-to/edge-apiserver.md",
};
pub(super) const D17: Explanation = Explanation {
    id: "D17",
    checks: "the connections to the other servers of the installation, and their zones",
    consequence: "nodes whose agents are connected to the other server only cannot be reached here",
    fix: "Between all servers, allow TCP 10269. Outside a cluster, check --peer and the shared CA.",
    link: "docs/how-to/servers.md",
};
pub(super) const D18: Explanation = Explanation {
    id: "D18",
    checks: "this host: UDP buffers, packet sizes of the interfaces, open files of the server, the \
             disk of the data directory, the clock",
    consequence: "slow transfers, refused connections, lost state, or invalid certificates",
    fix: "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304\n\
          In the unit of the server, or of the container runtime: LimitNOFILE=1048576\n\
          timedatectl set-ntp true",
    link: "docs/reference/limits.md",
};

pub(super) const D22: Explanation = Explanation {
    id: "D22",
    checks: "what failed at agents in the last hour, as the running server remembers it: handshakes, \
             enrollments and admissions, sessions that ended within 30 s",
    consequence: "the node cannot be reached, or not for long; or it is not the node that it claims to be",
    fix: "tunnel-server nodes --failed",
    link: "docs/reference/codes.md",
};

/// The explanations of all checks, by id.
pub(super) const EXPLANATIONS: &[Explanation] = &[
    D01, D02, D03, D04, D05, D06, D07, D08, D09, D10, D11, D12, D13, D14, D15, D16, D17, D18, D22,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn ids_are_unique_and_pages_exist() {
        let ids: BTreeSet<&str> = EXPLANATIONS.iter().map(|check| check.id).collect();
        assert_eq!(ids.len(), EXPLANATIONS.len());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for check in EXPLANATIONS {
            assert!(root.join(check.link).exists(), "{}", check.id);
        }
    }

    #[test]
    fn guide_has_a_row_for_each_check() {
        let page = include_str!("../../../../docs/how-to/doctor.md");
        for check in EXPLANATIONS {
            assert!(page.contains(&format!("| {} |", check.id)), "{}", check.id);
        }
    }
}
