//! What the checks look at, what a fault means, and how it is fixed.

use tunnel_doctor::Explanation;

pub(super) const HOST: Explanation = Explanation {
    id: "D18",
    checks: "this host: UDP buffers, open files of the agent, the disk of the data directory, and \
             the clock against the validity of certificates",
    consequence: "slow transfers, refused requests, lost state, or certificates that are refused",
    fix: "sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304\n\
          In the unit of the agent: LimitNOFILE=65536\n\
          timedatectl set-ntp true",
    link: "docs/reference/limits.md",
};
pub(super) const RESOLVE: Explanation = Explanation {
    id: "D19.resolve",
    checks: "the names of --server, except for those that a proxy resolves",
    consequence: "the agent does not reach the server",
    fix: "getent ahosts NAME\n\
          Give --server a name that resolves on this node, or an address.",
    link: "docs/how-to/troubleshooting.md",
};
pub(super) const TCP: Explanation = Explanation {
    id: "D19.tcp",
    checks: "a TCP connection to each address of each --server",
    consequence: "enrollment and sessions over h2 fail, so that nothing is left where UDP is \
                  blocked",
    fix: "Start the server, and allow TCP 10262 from this node to it.\n\
          In networks with an HTTP proxy: --proxy http://PROXY:PORT",
    link: "docs/reference/ports.md",
};
pub(super) const UDP: Explanation = Explanation {
    id: "D19.udp",
    checks: "a QUIC handshake over UDP with each address of each --server, with the agent's \
             certificate, unless --transport or --proxy rules QUIC out",
    consequence: "sessions use h2 over TCP, which recovers from loss more slowly; with --transport \
                  quic the node cannot be reached",
    fix: "Allow UDP 10262 from this node to the server, and the answers.\n\
          Where UDP stays blocked: --transport auto, or --transport h2",
    link: "docs/how-to/troubleshooting.md",
};
pub(super) const PROXY: Explanation = Explanation {
    id: "D19.proxy",
    checks: "a connection to each --server through the HTTP proxy of --proxy or HTTPS_PROXY",
    consequence: "enrollment and sessions over h2 fail",
    fix: "Allow CONNECT to the server's port at the proxy.\n\
          Without a proxy: --proxy off, or the server in NO_PROXY",
    link: "docs/how-to/agents.md",
};
pub(super) const TLS: Explanation = Explanation {
    id: "D19.tls",
    checks: "the agent's certificate or token, and a TLS handshake with them: the server's chain \
             by --ca-file, the token's pin or the stored CA, and the server's answer to the \
             agent's certificate; what is presented in place of the server's certificate",
    consequence: "the server cannot be authenticated, or does not admit this node",
    fix: "Behind TLS inspection: exempt the server's address at the proxy or firewall\n\
          For a revoked node: tunnel-server nodes unrevoke NAME\n\
          For a token of another CA: tunnel-server token create --node NAME, on this server\n\
          For a certificate of another CA: restore the server's data directory; only if that CA is \
          gone for good, a new token, and rm agent.key agent.crt in the data directory, which \
          destroys the node's identity",
    link: "docs/reference/certificates.md",
};
pub(super) const ALPN: Explanation = Explanation {
    id: "D19.alpn",
    checks: "the protocol of the server's port, which ALPN selects",
    consequence: "the agent reaches a port that does not accept agents",
    fix: "Give --server the port of --agent-listen, usually 10262. A balancer in between must pass \
          TLS on unopened.",
    link: "docs/reference/ports.md",
};
pub(super) const NAME: Explanation = Explanation {
    id: "D19.name",
    checks: "the name in the agent's certificate against --node-name",
    consequence: "the agent does not start",
    fix: "Give the --node-name of the certificate, or remove agent.crt and enroll with a token for \
          the other name.",
    link: "docs/reference/certificates.md",
};
pub(super) const PORTS: Explanation = Explanation {
    id: "D19.ports",
    checks: "each --port: the agent's dial policy, and whether a program listens there; other \
             programs on the address of --meta-listen",
    consequence: "requests for the port are refused, or the agent does not start",
    fix: "ss -ltnp\n\
          See --deny-ports, --localhost-ports and --node-ip.",
    link: "docs/how-to/agents.md",
};
pub(super) const AGENT: Explanation = Explanation {
    id: "D20",
    checks: "the running agent on the address of --meta-listen: its sessions and its conditions",
    consequence: "requests for this node fail, or soon will",
    fix: "tunnel-agent status\n\
          journalctl -u tunnel-agent\n\
          systemctl restart tunnel-agent",
    link: "docs/how-to/troubleshooting.md",
};

pub(super) const NAMES: Explanation = Explanation {
    id: "D21",
    checks: "with --cloud-listen: the resolvers that the kubelet gives to pods, by its flag or file, \
             and those of this host: on this node or elsewhere, and whether they answer",
    consequence: "pods resolve no name while the link is down; or the agent does not find its server \
                  after a start",
    fix: "tunnel-server render node-local-dns --cluster-dns IP | kubectl apply -f -\n\
          tunnel-agent address add 169.254.20.11, and --cloud-listen dns=169.254.20.11:1053\n\
          Pods that run ask the old resolver until they are created again.",
    link: "docs/how-to/node-local-dns.md",
};
pub(super) const CLOUD_LISTEN: Explanation = Explanation {
    id: "D16.listen",
    checks: "each address of --cloud-listen: whether the agent listens there, or another program, \
             such as Yurthub on 10261, 10267 and 10268",
    consequence: "clients on this node do not reach the target of the cloud, or reach another \
                  program",
    fix: "ss -ltnp\n\
          Next to Yurthub: other ports in --cloud-listen, as in apiserver=127.0.0.1:10270\n\
          systemctl restart tunnel-agent",
    link: EDGE_APISERVER,
};
pub(super) const CLOUD_ADDRESS: Explanation = Explanation {
    id: "D16.address",
    checks: "whether an interface of this host has the link-local addresses of --cloud-listen",
    consequence: "pods do not reach the target of the cloud",
    fix: "systemctl enable --now culvert-edge-apiserver\n\
          By hand: tunnel-agent address add 169.254.2.1",
    link: EDGE_APISERVER,
};
pub(super) const CLOUD_NFT: Explanation = Explanation {
    id: "D16.nft",
    checks: "the nft table that redirects the Service kubernetes: there if its file is, in \
             prerouting and output, before kube-proxy's rules, and to an address of --cloud-listen",
    consequence: "pods reach the API server by the Service's address as without the tunnel, or not \
                  at all",
    fix: "tunnel-agent render edge-apiserver --way nft --service-ip IP > \
          /etc/culvert/edge-apiserver.nft\n\
          systemctl restart culvert-edge-apiserver",
    link: EDGE_APISERVER,
};
pub(super) const CLOUD_DATA_PATH: Explanation = Explanation {
    id: "D16.datapath",
    checks: "with the nft table: whether an eBPF data path runs on this node that can translate \
             the Service's address before the table sees it",
    consequence: "pods reach the API server by the Service's address as without the tunnel",
    fix: "For Cilium: cilium-dbg status | grep KubeProxyReplacement\n\
          Where it is on, set the two variables: tunnel-agent render edge-apiserver --way env",
    link: EDGE_APISERVER,
};
pub(super) const CLOUD_SAN: Explanation = Explanation {
    id: "D16.san",
    checks: "without the nft table: whether the API server's certificate has the link-local \
             addresses of --cloud-listen, by a TLS handshake through the listener",
    consequence: "pods that dial the address by the two variables refuse the certificate",
    fix: "Add 169.254.2.1 to apiServer.certSANs of kubeadm and renew the certificate, or use the \
          nft table: tunnel-agent render edge-apiserver --way nft --service-ip IP",
    link: EDGE_APISERVER,
};
const EDGE_APISERVER: &str = "docs/how-to/edge-apiserver.md";

/// The explanations of all checks, by id.
pub(super) const EXPLANATIONS: &[Explanation] = &[
    CLOUD_LISTEN,
    CLOUD_ADDRESS,
    CLOUD_NFT,
    CLOUD_DATA_PATH,
    CLOUD_SAN,
    HOST,
    RESOLVE,
    TCP,
    UDP,
    PROXY,
    TLS,
    ALPN,
    NAME,
    PORTS,
    AGENT,
    NAMES,
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
}
