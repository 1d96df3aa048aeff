//! NodeLocal DNSCache for edge nodes: its objects, and what a node needs for them.

use std::net::IpAddr;

use tunnel_proto::wire::name::NodeName;

use super::OutputArgs;
use super::check::Format;
use super::values::{ResolverAddress, yaml};

/// The flags of `render node-local-dns`.
#[derive(Debug, Clone, clap::Args)]
pub struct NodeLocalDnsArgs {
    /// What to print
    #[arg(long, value_enum, value_name = "PART", default_value = "manifest")]
    pub part: NodeLocalDnsPart,
    /// Address of the cluster's DNS, the Service kube-dns
    #[arg(long, value_name = "IP")]
    pub cluster_dns: IpAddr,
    /// Mode of kube-proxy on the edge nodes
    #[arg(long, value_enum, value_name = "MODE", default_value = "ipvs")]
    pub proxy_mode: ProxyMode,
    /// Address of the cache on each node, which pods ask
    #[arg(long, value_name = "IP", default_value = "169.254.20.10")]
    pub local_ip: IpAddr,
    /// Address of the agent's listener for the cluster's DNS. An agent that is not root needs a port
    /// from 1024 on
    #[arg(long, value_name = "IP[:PORT]", default_value = "169.254.20.11:1053")]
    pub cloud_dns: ResolverAddress,
    /// Domain of the cluster
    #[arg(long, value_name = "DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: NodeName,
    /// Domain in which the cluster's DNS knows the nodes, the server's --dns-zone
    #[arg(long, value_name = "ZONE")]
    pub zone: Option<NodeName>,
    /// Image of node-cache
    #[arg(long, value_name = "IMAGE", default_value = IMAGE)]
    pub image: String,
    /// Where the text goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The parts of `render node-local-dns`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum NodeLocalDnsPart {
    /// Objects of the cluster.
    Manifest,
    /// Script for a node, by which the kubelet gives new pods the address of the cache: for ansible
    /// and cloud-init. Needed with IPVS only.
    Kubelet,
    /// systemd unit of a node, which adds the address of the agent's listener.
    Unit,
}

/// How kube-proxy leads connections to Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ProxyMode {
    /// The node has the addresses of all Services on kube-ipvs0, so that the cache cannot bind the
    /// one of kube-dns.
    Ipvs,
    /// The cache also binds the address of kube-dns, so that pods stay as they are.
    Iptables,
}

impl NodeLocalDnsArgs {
    pub(super) fn format(&self) -> Format {
        match self.part {
            NodeLocalDnsPart::Manifest => Format::Yaml,
            NodeLocalDnsPart::Kubelet | NodeLocalDnsPart::Unit => Format::Lines,
        }
    }

    /// Returns the text, or why the flags contradict each other.
    pub(super) fn text(&self) -> Result<String, &'static str> {
        match (self.part, self.proxy_mode) {
            (NodeLocalDnsPart::Manifest, _) => self.manifest(),
            (NodeLocalDnsPart::Kubelet, ProxyMode::Ipvs) => {
                Ok(KUBELET.replace("LOCAL_IP", &self.local_ip.to_string()))
            }
            (NodeLocalDnsPart::Kubelet, ProxyMode::Iptables) => Err(KUBELET_STAYS),
            (NodeLocalDnsPart::Unit, _) => {
                Ok(UNIT.replace("CLOUD_DNS", &self.cloud_dns.ip().to_string()))
            }
        }
    }

    fn manifest(&self) -> Result<String, &'static str> {
        let local = match self.proxy_mode {
            ProxyMode::Ipvs => vec![self.local_ip],
            ProxyMode::Iptables => vec![self.local_ip, self.cluster_dns],
        };
        if local.contains(&self.cloud_dns.ip()) {
            return Err(SAME_ADDRESS);
        }
        // node-cache refuses a mixture.
        let is_v4 = self.local_ip.is_ipv4();
        if local.iter().any(|ip| ip.is_ipv4() != is_v4) {
            return Err(FAMILIES);
        }
        let local: Vec<_> = local.iter().map(IpAddr::to_string).collect();
        let bind = local.join(" ");
        let block = |zone: &str, cache: &str, forward: &str| {
            format!(
                "{zone}:53 {{\n    errors\n{cache}    reload\n    loop\n    bind {bind}\n    \
                 forward . {forward}\n    prometheus :9253\n}}\n"
            )
        };
        let cloud = format!("{} {{\n        force_tcp\n{HEALTH}    }}", self.cloud_dns);
        let mut corefile = block(self.cluster_domain.as_str(), CLUSTER_CACHE, &cloud);
        // One block has the health check.
        corefile.truncate(corefile.len() - 2);
        corefile.push_str(&format!("    health {}:8080\n}}\n", host(self.local_ip)));
        for zone in ["in-addr.arpa", "ip6.arpa"] {
            corefile.push_str(&block(zone, CACHE, &cloud));
        }
        if let Some(zone) = &self.zone {
            corefile.push_str(&block(zone.as_str(), CACHE, &cloud));
        }
        corefile.push_str(&block(".", CACHE, "__PILLAR__UPSTREAM__SERVERS__"));
        let corefile: String = corefile
            .lines()
            .map(|line| format!("    {line}\n"))
            .collect();
        let head = HEAD
            .replace("CLUSTER_DNS", &host(self.cluster_dns))
            .replace("CLOUD_DNS", &self.cloud_dns.socket_address().to_string());
        let objects = OBJECTS
            .replace("COREFILE\n", &corefile)
            .replace("LOCAL_IPS", &yaml(&local.join(",")))
            .replace("LOCAL_IP", &yaml(&self.local_ip.to_string()))
            .replace("IMAGE", &yaml(&self.image));
        Ok(head + &objects)
    }
}

/// Returns an address as it stands before a port.
fn host(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(v4) => v4.to_string(),
        IpAddr::V6(v6) => format!("[{v6}]"),
    }
}

/// The oldest image in which these options were tried: CoreDNS 1.13.1.
const IMAGE: &str = "registry.k8s.io/dns/k8s-dns-node-cache:1.26.7";
const KUBELET_STAYS: &str =
    "--part kubelet is for --proxy-mode ipvs; with iptables the kubelet stays as it is";
const SAME_ADDRESS: &str =
    "--cloud-dns is an address of the cache, which would ask itself; give another one";
const FAMILIES: &str = "--local-ip and --cluster-dns are of different families; give a --local-ip \
                        of the family of --cluster-dns";
/// A cache that starts while the link is down tries its first queries until two checks have failed,
/// the first of them at once: 0.25 s. With the defaults these are three, 0.5 s apart. A cluster's DNS
/// that fails gets four checks a second of each node.
const HEALTH: &str = "        health_check 250ms\n        max_fails 1\n";
/// `serve_stale` answers from entries that have expired, and asks for a new one meanwhile.
const CLUSTER_CACHE: &str = "    cache {\n        success 9984 30\n        denial 9984 5\n        \
                             serve_stale 24h\n    }\n";
const CACHE: &str = "    cache 30 {\n        serve_stale 24h\n    }\n";

const HEAD: &str = "\
# Server, in its configuration file:
#   cloud: [{ name: dns, target: 'CLUSTER_DNS:53', nodes: ['*'] }]
# Agent of each edge node, in its configuration file:
#   cloudListen: ['dns=CLOUD_DNS']
";

const OBJECTS: &str = r#"apiVersion: v1
kind: ServiceAccount
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { kubernetes.io/cluster-service: "true", addonmanager.kubernetes.io/mode: Reconcile }
---
apiVersion: v1
kind: Service
metadata:
  name: kube-dns-upstream
  namespace: kube-system
  labels:
    k8s-app: kube-dns
    kubernetes.io/cluster-service: "true"
    addonmanager.kubernetes.io/mode: Reconcile
    kubernetes.io/name: KubeDNSUpstream
spec:
  selector: { k8s-app: kube-dns }
  ports:
    - { name: dns, port: 53, protocol: UDP, targetPort: 53 }
    - { name: dns-tcp, port: 53, protocol: TCP, targetPort: 53 }
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { addonmanager.kubernetes.io/mode: Reconcile }
data:
  Corefile: |
COREFILE
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: node-local-dns
  namespace: kube-system
  labels:
    k8s-app: node-local-dns
    kubernetes.io/cluster-service: "true"
    addonmanager.kubernetes.io/mode: Reconcile
spec:
  updateStrategy: { rollingUpdate: { maxUnavailable: 10% } }
  selector: { matchLabels: { k8s-app: node-local-dns } }
  template:
    metadata:
      labels: { k8s-app: node-local-dns }
      annotations: { prometheus.io/port: "9253", prometheus.io/scrape: "true" }
    spec:
      priorityClassName: system-node-critical
      serviceAccountName: node-local-dns
      nodeSelector: { openyurt.io/is-edge-worker: "true" }
      hostNetwork: true
      dnsPolicy: Default
      tolerations:
        - { key: CriticalAddonsOnly, operator: Exists }
        - { effect: NoExecute, operator: Exists }
        - { effect: NoSchedule, operator: Exists }
      containers:
        - name: node-cache
          image: IMAGE
          resources: { requests: { cpu: 25m, memory: 5Mi } }
          args: [-localip, LOCAL_IPS, -conf, /etc/Corefile, -upstreamsvc, kube-dns-upstream]
          securityContext: { privileged: true }
          ports:
            - { containerPort: 53, name: dns, protocol: UDP }
            - { containerPort: 53, name: dns-tcp, protocol: TCP }
            - { containerPort: 9253, name: metrics, protocol: TCP }
          livenessProbe:
            httpGet: { host: LOCAL_IP, path: /health, port: 8080 }
            initialDelaySeconds: 60
            timeoutSeconds: 5
          volumeMounts:
            - { name: xtables-lock, mountPath: /run/xtables.lock, readOnly: false }
            - { name: config-volume, mountPath: /etc/coredns }
            - { name: kube-dns-config, mountPath: /etc/kube-dns }
      volumes:
        - { name: xtables-lock, hostPath: { path: /run/xtables.lock, type: FileOrCreate } }
        - { name: kube-dns-config, configMap: { name: kube-dns, optional: true } }
        - name: config-volume
          configMap: { name: node-local-dns, items: [{ key: Corefile, path: Corefile.base }] }
---
apiVersion: v1
kind: Service
metadata:
  name: node-local-dns
  namespace: kube-system
  labels: { k8s-app: node-local-dns }
  annotations: { prometheus.io/port: "9253", prometheus.io/scrape: "true" }
spec:
  clusterIP: None
  selector: { k8s-app: node-local-dns }
  ports: [{ name: metrics, port: 9253, targetPort: 9253 }]
"#;

/// Changes each place that can have the address. A flag of the kubelet overrides its file.
const KUBELET: &str = r#"#!/bin/sh
# Pods that are created from now on ask the cache on LOCAL_IP. Existing pods ask as before until
# they are created again.
set -eu
root=${ROOT:-}
changed=
# replace FILE PATTERN EDIT: edits a file with the pattern, and keeps the old one as FILE.culvert.
replace() {
    [ -f "$1" ] && grep -q "$2" "$1" || return 0
    if sed -e "$3" "$1" | cmp -s - "$1"; then return 0; fi
    cp -p "$1" "$1.culvert"
    sed -i -e "$3" "$1"
    changed=yes
}
# Flags, in files that a provider or kubeadm reads into the kubelet's command line.
for file in /etc/kubernetes/kubelet /etc/default/kubelet /etc/sysconfig/kubelet \
    /var/lib/kubelet/kubeadm-flags.env; do
    replace "$root$file" cluster-dns 's/--cluster-dns[= ][0-9a-fA-F.:,]*/--cluster-dns=LOCAL_IP/'
done
# The kubelet's configuration: the first entry of the list is replaced, others are removed.
config=$root/var/lib/kubelet/config.yaml
replace "$config" '^clusterDNS:' '
/^clusterDNS: *\[/ s/.*/clusterDNS: [LOCAL_IP]/
/^clusterDNS: *$/,/^[^ -]/ {
    /^clusterDNS: *$/ s/.*/clusterDNS: [LOCAL_IP]/
    /^ *- / d
}'
grep -qs LOCAL_IP "$config" "$root"/etc/kubernetes/kubelet "$root"/etc/default/kubelet \
    "$root"/etc/sysconfig/kubelet "$root"/var/lib/kubelet/kubeadm-flags.env || {
    echo "no file of this node has the kubelet's cluster-dns; set it to LOCAL_IP where the kubelet is started" >&2
    exit 1
}
if [ -n "$changed" ] && [ -z "$root" ]; then systemctl restart kubelet; fi
"#;

const UNIT: &str = "\
# /etc/systemd/system/culvert-node-dns.service
[Unit]
Description=Culvert: the address of the agent's listener for the cluster's DNS
Before=kubelet.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/env tunnel-agent address add CLOUD_DNS
ExecStop=/usr/bin/env tunnel-agent address remove CLOUD_DNS

[Install]
WantedBy=multi-user.target
";
