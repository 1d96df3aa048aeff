//! Raw settings: flags, environment variables and the YAML file, before any check.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tunnel_process::yaml;

use super::RawLimits;

/// Value of `--cloud-apiserver` without a value.
pub(super) const IN_CLUSTER: &str = "in-cluster";

tunnel_process::layered_with_logs! {
    prefix "TUNNEL_SERVER_";
    /// The raw settings. Each field is a flag, an environment variable and a key of the YAML file.
    #[derive(Debug, Default, Clone, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
    pub struct RawConfig {
        /// Directory of the CA, tokens, known nodes and keys [default: /var/lib/tunnel-server]
        #[arg(long, value_name = "DIR", env = "TUNNEL_SERVER_DATA_DIR", help_heading = "Process")]
        pub data_dir: Option<String>,
        /// Address for agents, UDP and TCP on the same port: sessions over QUIC or HTTP/2,
        /// enrollment over TCP [default: [::]:10262, or 0.0.0.0:10262 without IPv6]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_AGENT_LISTEN", help_heading = "Agents")]
        pub agent_listen: Option<String>,
        /// Congestion control of data sent over QUIC: bbr, or cubic, which treats every lost packet
        /// as congestion. Sessions over TCP use the system's [default: bbr]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_QUIC_CONGESTION", help_heading = "Agents")]
        pub quic_congestion: Option<String>,
        /// HTTPS listener for callers: terminates TLS and forwards to https targets. "off" disables
        /// it [default: [::]:10263 in a container of a cluster and when every caller needs a
        /// certificate of --client-ca, else 127.0.0.1:10263]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_HTTPS_LISTEN", help_heading = "Listeners")]
        pub https_listen: Option<String>,
        /// HTTP listener for callers, for http targets. "off" disables it [default:
        /// 127.0.0.1:10264]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_HTTP_LISTEN", help_heading = "Listeners")]
        pub http_listen: Option<String>,
        /// /livez, /readyz, /metrics, /sd/prometheus, and /nodes for loopback callers. "off" disables
        /// it, and with it the probes of a pod, healthcheck, the scrapes of Prometheus, and the checks
        /// of doctor about conditions [default: 127.0.0.1:10265]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_META_LISTEN", help_heading = "Listeners")]
        pub meta_listen: Option<String>,
        /// Status page: nodes with their last requests, other servers and conditions, as HTML or
        /// JSON; read-only. On a loopback address over HTTP, on another one over HTTPS for callers
        /// with a certificate of --client-ca or a password of --status-auth. "off" disables it
        /// [default: off]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_STATUS_LISTEN", help_heading = "Listeners")]
        pub status_listen: Option<String>,
        /// File with a line NAME:PASSWORD for each caller of --status-listen that presents no
        /// certificate, in the form of --connect-auth; read again every few seconds and on SIGHUP. A
        /// page on a loopback address asks for passwords too, over HTTP [default: none]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_STATUS_AUTH", help_heading = "Listeners")]
        pub status_auth: Option<String>,
        /// Metrics with a series for each node: on, off, or auto, which is on up to 2,000 nodes
        /// [default: auto]
        #[arg(long, value_name = "MODE", env = "TUNNEL_SERVER_METRICS_PER_NODE", help_heading = "Process")]
        pub metrics_per_node: Option<String>,
        /// Allow listeners, proxy ports and services on non-loopback addresses without client
        /// authentication: any caller that can connect reaches the nodes' allowed ports. Not needed
        /// in a container of a cluster
        #[arg(
            long, env = "TUNNEL_SERVER_ALLOW_UNAUTHENTICATED", num_args = 0..=1, default_missing_value = "true",
            require_equals = true, value_name = "BOOL",
            help_heading = "Listeners"
        )]
        pub allow_unauthenticated: Option<String>,
        /// Addresses that agents should dial, HOST:PORT; repeatable [default: this host's addresses
        /// with the port of --agent-listen]
        #[arg(long, value_name = "HOST:PORT", env = "TUNNEL_SERVER_ADVERTISE", value_delimiter = ',', help_heading = "Agents")]
        pub advertise: Vec<String>,
        /// Ports of http targets on the nodes, in addition to 10250 and 10255, as in "9100, 9256"
        #[arg(long, value_name = "PORTS", env = "TUNNEL_SERVER_HTTP_PROXY_PORTS", help_heading = "Ports of nodes")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub http_proxy_ports: Option<String>,
        /// Ports of https targets on the nodes; takes precedence for a port that is in both lists
        #[arg(long, value_name = "PORTS", env = "TUNNEL_SERVER_HTTPS_PROXY_PORTS", help_heading = "Ports of nodes")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub https_proxy_ports: Option<String>,
        /// Ports that agents dial on the loopback of the node [default: "10266, 10267"]
        #[arg(long, value_name = "PORTS", env = "TUNNEL_SERVER_LOCALHOST_PROXY_PORTS", help_heading = "Ports of nodes")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub localhost_proxy_ports: Option<String>,
        /// Ports of the nodes that callers may reach through CONNECT listeners and tunnel-server
        /// connect only, whatever the lists say, as in "22, 5432". The server never listens on them
        /// [default: none]
        #[arg(long, value_name = "PORTS", env = "TUNNEL_SERVER_CONNECT_PORTS", help_heading = "Ports of nodes")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub connect_ports: Option<String>,
        /// Also listen on every port of the two lists, on this host: HTTP ports behave like the
        /// HTTP listener, HTTPS ports like the HTTPS listener, and the port is implied when Host
        /// has none. A port that another program uses is a condition, and is tried again. "off"
        /// disables this [default: the host of each listener; off in a cluster, where the Service
        /// has these ports]
        #[arg(long, value_name = "HOST|off", env = "TUNNEL_SERVER_PROXY_PORT_LISTEN", help_heading = "Ports of nodes")]
        pub proxy_port_listen: Option<String>,
        /// Serving certificate chain of the HTTPS listener, PEM [default: issued by the local CA,
        /// by the requested name]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_HTTPS_CERT_FILE", help_heading = "Listeners")]
        pub https_cert_file: Option<String>,
        /// Private key of --https-cert-file, PEM
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_HTTPS_KEY_FILE", help_heading = "Listeners")]
        pub https_key_file: Option<String>,
        /// Additional DNS name or IP for the HTTPS serving certificate that the local CA issues;
        /// repeatable
        #[arg(long, value_name = "NAME|IP", env = "TUNNEL_SERVER_HTTPS_NAME", value_delimiter = ',', help_heading = "Listeners")]
        pub https_name: Vec<String>,
        /// CA of agents' certificates, PEM, when the operator provides them; agents then need
        /// --cert-file and --key-file, and join tokens cannot be used. Certificates need the SAN
        /// URI culvert://agent/NAME. All certificate files are read again every few seconds and on
        /// SIGHUP [default: the local CA]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_AGENT_CA", help_heading = "Agents")]
        pub agent_ca: Option<String>,
        /// The server's certificate chain for agents, PEM; requires --agent-ca
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_AGENT_CERT_FILE", help_heading = "Agents")]
        pub agent_cert_file: Option<String>,
        /// Private key of --agent-cert-file, PEM [default: the file of --agent-cert-file]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_AGENT_KEY_FILE", help_heading = "Agents")]
        pub agent_key_file: Option<String>,
        /// CA of kubelets' client certificates, PEM: an agent that presents its kubelet's
        /// certificate (CN system:node:NAME, O system:nodes) is the agent of that node. "off"
        /// accepts none [default: in a cluster client-ca-file of the ConfigMap
        /// kube-system/extension-apiserver-authentication, else off]
        #[arg(long, value_name = "FILE|off", env = "TUNNEL_SERVER_KUBELET_CLIENT_CA", help_heading = "Agents")]
        pub kubelet_client_ca: Option<String>,
        /// In a cluster, the required audience of agents' ServiceAccount tokens [default:
        /// tunnel-server]
        #[arg(long, value_name = "AUDIENCE", env = "TUNNEL_SERVER_AGENT_TOKEN_AUDIENCE", help_heading = "Agents")]
        pub agent_token_audience: Option<String>,
        /// User name of the agents' ServiceAccount, whose Pods prove their nodes; repeatable
        /// [default: system:serviceaccount:kube-system:tunnel-agent]
        #[arg(long, value_name = "USER", env = "TUNNEL_SERVER_AGENT_SERVICE_ACCOUNT", value_delimiter = ',', help_heading = "Agents")]
        pub agent_service_account: Vec<String>,
        /// Client certificates on the HTTPS listener: none, request or require [default: request]
        #[arg(long, value_name = "MODE", env = "TUNNEL_SERVER_HTTPS_CLIENT_AUTH", help_heading = "Listeners")]
        pub https_client_auth: Option<String>,
        /// CA of callers' certificates, PEM; without it no certificate is requested
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_CLIENT_CA", help_heading = "Listeners")]
        pub client_ca: Option<String>,
        /// Verification of https targets: tunnel (their certificates are not verified; the agent's
        /// certificate authenticates the node) or verify (they must chain to --target-ca and be for
        /// the node's name; nothing is sent before that) [default: tunnel]
        #[arg(long, value_name = "MODE", env = "TUNNEL_SERVER_TARGET_TLS", help_heading = "Targets")]
        pub target_tls: Option<String>,
        /// CA of https targets' certificates, PEM; requires --target-tls verify
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_TARGET_CA", help_heading = "Targets")]
        pub target_ca: Option<String>,
        /// The server's own client certificate for https targets, PEM: presented to kubelets, and
        /// only on behalf of the callers of --delegation-allowed-callers; needs --client-ca [default:
        /// none]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_TARGET_CERT_FILE", help_heading = "Targets")]
        pub target_cert_file: Option<String>,
        /// Private key of --target-cert-file, PEM [default: the file of --target-cert-file]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_TARGET_KEY_FILE", help_heading = "Targets")]
        pub target_key_file: Option<String>,
        /// In a cluster, request the client certificate from this signer instead of reading files:
        /// by a CertificateSigningRequest that an operator approves (/readyz?verbose shows the
        /// command), for the user culvert-tunnel-server, as in kubernetes.io/kube-apiserver-client
        /// [default: none]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_TARGET_CERT_SIGNER", help_heading = "Targets")]
        pub target_cert_signer: Option<String>,
        /// Callers for which the server's own client certificate is used (client-certificate
        /// delegation), by the CN of their certificate of --client-ca; repeatable [default:
        /// kube-apiserver-kubelet-client]
        #[arg(
            long, alias = "borrow-allowed-callers", value_name = "CN",
            env = "TUNNEL_SERVER_DELEGATION_ALLOWED_CALLERS", value_delimiter = ',',
            help_heading = "Targets"
        )]
        #[serde(alias = "borrowAllowedCallers")]
        pub delegation_allowed_callers: Vec<String>,
        /// Follow a Kubernetes cluster: its Nodes are known, ports come from its ConfigMap, records
        /// are written to it. auto follows it in a container of a cluster, or with --kubeconfig
        /// [default: auto]
        #[arg(long, value_name = "MODE", env = "TUNNEL_SERVER_KUBERNETES", help_heading = "Kubernetes")]
        pub kubernetes: Option<String>,
        /// Kubeconfig file for access to the cluster from outside
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_KUBECONFIG", help_heading = "Kubernetes")]
        pub kubeconfig: Option<String>,
        /// Namespace of the ConfigMaps, the Service and the Lease [default: the container's own,
        /// else kube-system]
        #[arg(long, value_name = "NS", env = "TUNNEL_SERVER_NAMESPACE", help_heading = "Kubernetes")]
        pub namespace: Option<String>,
        /// Label of edge Nodes; its value must be "true". A kubelet can change this label on its
        /// own Node, but not a label whose name begins with node-restriction.kubernetes.io/
        /// [default: openyurt.io/is-edge-worker]
        #[arg(long, value_name = "LABEL", env = "TUNNEL_SERVER_EDGE_LABEL", help_heading = "Kubernetes")]
        pub edge_label: Option<String>,
        /// Nodes that are reached through the tunnel: label, or label-or-agent to include those
        /// with a connected agent [default: label]
        #[arg(long, value_name = "RULE", env = "TUNNEL_SERVER_EDGE_NODES", help_heading = "Kubernetes")]
        pub edge_nodes: Option<String>,
        /// Additional host names that a Node may have for records and routes, besides those made of
        /// its own name: a name in which "*" is a part of one label, as in *.edge.example.com;
        /// repeatable [default: none]
        #[arg(long, value_name = "PATTERN", env = "TUNNEL_SERVER_RECORD_NAMES", value_delimiter = ',', help_heading = "Kubernetes")]
        pub record_names: Vec<String>,
        /// Key of a label of the Nodes that /sd/prometheus shows and nodes --selector accepts, as in
        /// topology.kubernetes.io/zone; repeatable, at most 16, in the file a list "nodeLabels".
        /// Other labels are not stored [default: none]
        #[arg(
            long = "node-label", value_name = "KEY", env = "TUNNEL_SERVER_NODE_LABELS",
            value_delimiter = ',',
            help_heading = "Kubernetes"
        )]
        #[serde(alias = "nodeLabel")]
        pub node_labels: Vec<String>,
        /// ConfigMap to which the records are written, for CoreDNS [default: yurt-tunnel-nodes]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_NODES_CONFIG_MAP", help_heading = "Kubernetes")]
        pub nodes_config_map: Option<String>,
        /// ConfigMap that replaces the three lists of ports while it exists [default:
        /// yurt-tunnel-server-cfg]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_PORTS_CONFIG_MAP", help_heading = "Kubernetes")]
        pub ports_config_map: Option<String>,
        /// Service of the listeners: the records of edge nodes have its address, and the extra
        /// ports are added to it [default: x-tunnel-server-internal-svc]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_INTERNAL_SERVICE", help_heading = "Kubernetes")]
        pub internal_service: Option<String>,
        /// Lease for leader election; only the server that holds it writes to the cluster [default:
        /// tunnel-dns-controller]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_LEADER_LEASE", help_heading = "Kubernetes")]
        pub leader_lease: Option<String>,
        /// Secret with the CA, shared by all servers; it must exist and may be empty: the first
        /// server fills it [default: tunnel-server-ca]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_CA_SECRET", help_heading = "Kubernetes")]
        pub ca_secret: Option<String>,
        /// Secret with the revocations of nodes, which all servers share; it must exist and may be
        /// empty [default: tunnel-server-revocations]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_REVOCATIONS_SECRET", help_heading = "Kubernetes")]
        pub revocations_secret: Option<String>,
        /// ConfigMap to which the CA's certificates are written, for agents [default: tunnel-ca]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_CA_CONFIG_MAP", help_heading = "Kubernetes")]
        pub ca_config_map: Option<String>,
        /// Headless Service whose endpoints are the servers of the cluster, which connect to each
        /// other [default: tunnel-server-peers]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_PEER_SERVICE", help_heading = "Kubernetes")]
        pub peer_service: Option<String>,
        /// Two servers never run at the same time (one replica, strategy Recreate): the server looks
        /// for no other servers, and its QUIC keys come from the CA, so that a server that restarts
        /// without its data directory has the same ones [default: false]
        #[arg(
            long, env = "TUNNEL_SERVER_SINGLE_REPLICA", num_args = 0..=1, default_missing_value = "true",
            require_equals = true, value_name = "BOOL",
            help_heading = "Kubernetes"
        )]
        pub single_replica: Option<String>,
        /// Domain of the cluster's Services, for the serving certificate of the HTTPS listener
        /// [default: cluster.local]
        #[arg(long, value_name = "DOMAIN", env = "TUNNEL_SERVER_CLUSTER_DOMAIN", help_heading = "Kubernetes")]
        pub cluster_domain: Option<String>,
        /// Ask the cluster for a pod's node when a caller of --delegation-allowed-callers sends a
        /// kubelet path (exec, attach, logs, port-forward) without a node's name in TLS; needs the
        /// right "pods get" [default: true]
        #[arg(
            long, env = "TUNNEL_SERVER_POD_LOOKUP", num_args = 0..=1, default_missing_value = "true",
            require_equals = true, value_name = "BOOL",
            help_heading = "Kubernetes"
        )]
        pub pod_lookup: Option<String>,
        /// Address of the embedded DNS server, UDP and TCP on the same port: answers names of nodes
        /// from memory, and forwards all others to --dns-upstream. An unprivileged port is enough
        /// if a Service maps 53 to it [default: off]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_DNS_LISTEN", help_heading = "DNS")]
        pub dns_listen: Option<String>,
        /// Zone of the nodes' long names, NODE.ZONE, in addition to their own names [default: none]
        #[arg(long, value_name = "ZONE", env = "TUNNEL_SERVER_DNS_ZONE", help_heading = "DNS")]
        pub dns_zone: Option<String>,
        /// Resolver for names that are not names of nodes, IP or IP:PORT; repeatable, the first
        /// answer is used; "off" forwards no queries. DOMAIN=IP sets the resolver of a cluster's
        /// domain, DOMAIN=off declares a domain without one: then only names of nodes exist below
        /// it [default: the resolvers of /etc/resolv.conf, and cluster.local=off]
        #[arg(long, value_name = "[DOMAIN=]IP", env = "TUNNEL_SERVER_DNS_UPSTREAM", value_delimiter = ',', help_heading = "DNS")]
        pub dns_upstream: Vec<String>,
        /// Address to which names of edge nodes resolve, where callers reach the listeners;
        /// repeatable for one of each family [default: that of --dns-listen, or this host's where
        /// that is 0.0.0.0 or [::]]
        #[arg(long, value_name = "IP", env = "TUNNEL_SERVER_DNS_ANSWER", value_delimiter = ',', help_heading = "DNS")]
        pub dns_answer: Vec<String>,
        /// CONNECT listener over TCP, for kube-apiserver's egress selector, Prometheus' proxy_url
        /// and tunnel-server connect: callers name any node, or a target that --connect-direct
        /// allows. With --client-ca it uses TLS and requires a certificate of that CA, with
        /// --connect-auth a password; without either only loopback is allowed [default: off]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_CONNECT_LISTEN", help_heading = "CONNECT listeners")]
        pub connect_listen: Option<String>,
        /// CONNECT listener on a Unix socket, for a kube-apiserver on this host. Servers of one host
        /// may share the path, which the newest one that can serve has [default: off]
        #[arg(long, value_name = "PATH", env = "TUNNEL_SERVER_CONNECT_UDS", help_heading = "CONNECT listeners")]
        pub connect_uds: Option<String>,
        /// Mode of the --connect-uds socket, octal: users with write permission may connect
        /// [default: 600]
        #[arg(long, value_name = "MODE", env = "TUNNEL_SERVER_CONNECT_UDS_MODE", help_heading = "CONNECT listeners")]
        pub connect_uds_mode: Option<String>,
        /// Owner of the --connect-uds socket in numbers, UID or UID:GID [default: the server's own]
        #[arg(long, value_name = "UID[:GID]", env = "TUNNEL_SERVER_CONNECT_UDS_OWNER", help_heading = "CONNECT listeners")]
        pub connect_uds_owner: Option<String>,
        /// File with a line NAME:PASSWORD for each caller of --connect-listen that presents no
        /// certificate, for Prometheus; read again every few seconds and on SIGHUP. With
        /// --client-ca too, the port accepts certificates over TLS and passwords with and without
        /// TLS [default: none]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_CONNECT_AUTH", help_heading = "CONNECT listeners")]
        pub connect_auth: Option<String>,
        /// Dial policy of the CONNECT listeners for connections without an agent, CIDR or
        /// CIDR:PORTS, as in 10.96.0.0/12:443 or [fd00::/8]:443; repeatable. Link-local and
        /// metadata addresses are never dialed, loopback only when it is listed as such; "off"
        /// allows nothing [default: in a cluster its Services, and its cloud nodes with their Pods;
        /// else nothing]
        #[arg(long, value_name = "CIDR[:PORTS]", env = "TUNNEL_SERVER_CONNECT_DIRECT", value_delimiter = ',', help_heading = "CONNECT listeners")]
        pub connect_direct: Vec<String>,
        /// Name of this server among the servers of the installation: a DNS name in lower case,
        /// different on each server [default: the host's name, which in a cluster is that of the pod]
        #[arg(long, value_name = "NAME", env = "TUNNEL_SERVER_REPLICA_NAME", help_heading = "Other servers")]
        pub replica_name: Option<String>,
        /// Zone of this server: servers of one zone may fail together, and the sessions of an agent are
        /// with servers of different zones where there are several. A label value of Kubernetes
        /// [default: in a cluster the zone in the EndpointSlices of the servers' headless Service,
        /// else unknown]
        #[arg(long, value_name = "ZONE", env = "TUNNEL_SERVER_ZONE", help_heading = "Other servers")]
        pub zone: Option<String>,
        /// Address for the other servers of the installation, TCP: each dials every other, and
        /// forwards streams to nodes whose agents are connected there. Only servers with a
        /// certificate of the shared CA are admitted. "off" disables it [default: [::]:10269 in a
        /// container of a cluster unless --single-replica, and with --peer, else off]
        #[arg(long, value_name = "ADDR", env = "TUNNEL_SERVER_PEER_LISTEN", help_heading = "Other servers")]
        pub peer_listen: Option<String>,
        /// Another server of the installation, its --replica-name and the address of its
        /// --peer-listen; repeatable, in the file a list "peers". All servers share a CA. This
        /// server's own name is ignored [default: in a cluster the endpoints of the servers' headless
        /// Service, else none]
        #[arg(
            long = "peer", value_name = "NAME=HOST:PORT", env = "TUNNEL_SERVER_PEERS",
            value_delimiter = ',',
            help_heading = "Other servers"
        )]
        #[serde(alias = "peer")]
        pub peers: Vec<String>,
        /// CA of the other servers' certificates, PEM, when the operator provides them. Certificates
        /// need the SAN URI culvert://peer/NAME and both key usages, client and server [default: the
        /// local CA]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_PEER_CA", help_heading = "Other servers")]
        pub peer_ca: Option<String>,
        /// Certificate chain for the other servers, PEM; requires --peer-ca [default: issued by the
        /// local CA]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_PEER_CERT_FILE", help_heading = "Other servers")]
        pub peer_cert_file: Option<String>,
        /// Private key of --peer-cert-file, PEM [default: the file of --peer-cert-file]
        #[arg(long, value_name = "FILE", env = "TUNNEL_SERVER_PEER_KEY_FILE", help_heading = "Other servers")]
        pub peer_key_file: Option<String>,
        /// API server that agents reach by the name apiserver (--cloud-listen of the agent), HOST:PORT;
        /// repeatable: the others are tried when one does not answer. Without a value that of this
        /// server's own cluster. Other targets are in the file, under "cloud" [default: none]
        #[arg(
            long, value_name = "HOST:PORT", env = "TUNNEL_SERVER_CLOUD_APISERVER", value_delimiter = ',',
            num_args = 0..=1, default_missing_value = IN_CLUSTER,
            help_heading = "Agents"
        )]
        pub cloud_apiserver: Vec<String>,
        /// After SIGTERM, time for which the listeners accept on, so that load balancers can learn
        /// from /readyz that this server stops; agents are asked to move at once. Choose more than
        /// the time until the network has stopped sending new connections here [default: 5s in a
        /// cluster without --single-replica, else 0s]
        #[arg(long, value_name = "TIME", env = "TUNNEL_SERVER_DRAIN_DELAY", help_heading = "Process")]
        pub drain_delay: Option<String>,
        /// After SIGTERM and --drain-delay, maximum time for running requests to end [default: 30s]
        #[arg(long, value_name = "TIME", env = "TUNNEL_SERVER_DRAIN_TIMEOUT", help_heading = "Process")]
        pub drain_timeout: Option<String>,
        /// Defaults of another program: "yurt-tunnel" opens all that callers could do through
        /// yurt-tunnel-server at the listed ports, without regard to who calls. For a migration; the server
        /// warns at each start [default: none]
        #[arg(long, value_name = "PROGRAM", env = "TUNNEL_SERVER_COMPAT", help_heading = "Ports of nodes")]
        pub compat: Option<String>,
        /// Names for callers, YAML only.
        #[arg(skip)]
        pub callers: Option<BTreeMap<String, RawCaller>>,
        /// Rules that say who may do what, YAML only. They replace the rules that hold without a file.
        #[arg(skip)]
        pub rules: Option<Vec<RawRule>>,
        /// Rules that are tried: the server records what they would decide otherwise, YAML only.
        #[arg(skip)]
        pub dry_run: Option<RawDryRun>,
        /// Ports of the nodes that callers may reach, in addition to the lists, YAML only.
        #[arg(skip)]
        pub ports: Vec<RawPort>,
        /// TCP services, YAML only.
        #[arg(skip)]
        pub services: Vec<RawTcpService>,
        /// DNS names in addition to the known nodes, YAML only.
        #[arg(skip)]
        pub dns_records: Vec<RawRecord>,
        /// Targets of the cloud that agents may reach, YAML only.
        #[arg(skip)]
        pub cloud: Vec<RawCloudTarget>,
        /// Limits and timers, YAML only.
        #[arg(skip)]
        pub limits: Option<RawLimits>,
    }
}

/// A caller in its raw form: exactly one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RawCaller {
    /// Common name of a client certificate of --client-ca.
    pub certificate: Option<String>,
    /// `NAMESPACE/NAME` of the ServiceAccount of a bearer token, which the cluster reviews.
    pub service_account: Option<String>,
    /// User of --connect-auth.
    pub user: Option<String>,
    /// Number of the user at the other end of --connect-uds.
    pub uid: Option<String>,
    /// Network of the source addresses of TCP connections. Behind kube-proxy the source can be a node.
    pub network: Option<String>,
    /// Name of the node of an agent, in which one `*` stands for any text.
    pub agent: Option<String>,
}

/// The rules of a dry run in their raw form.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawDryRun {
    /// Names for callers. Without them, those of the file hold.
    pub callers: Option<BTreeMap<String, RawCaller>>,
    pub rules: Vec<RawRule>,
}

/// A rule in its raw form. A list that is left out means all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawRule {
    /// Name in refusals and logs.
    pub name: String,
    /// `allow` (default) or `deny`. A deny wins over every allow.
    pub effect: Option<String>,
    /// Names of `callers`, or anonymous, authenticated, delegation, token, certificate, agent.
    pub callers: Option<Vec<String>>,
    /// Operations, or shell and observe. A rule with operations never allows bytes,
    /// except one with `connect` alone.
    pub operations: Option<Vec<String>>,
    /// Ports and ranges; `kubelet` is the port of the node's kubelet.
    pub ports: Option<Vec<String>>,
    /// Listeners, of http, https, connect, unix, service and agent.
    pub listeners: Option<Vec<String>>,
    /// Kinds of destinations, of node, service, direct and target.
    pub destinations: Option<Vec<String>>,
    /// Names of nodes, in which one `*` stands for any text.
    pub nodes: Option<Vec<String>>,
    /// `KEY=VALUE`: labels of nodes, from join tokens, or in a cluster those of `--node-label` that
    /// kubelets cannot set.
    pub labels: Option<Vec<String>>,
    /// Whether the Node has `--edge-label`, which must be one that kubelets cannot set.
    pub edge: Option<String>,
    /// `kubernetes`: the cluster's authorization decides, where no other rule does.
    pub authorize: Option<String>,
}

/// A port of the nodes in its raw form. It replaces what the lists and `connectPorts` say about the
/// port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawPort {
    /// Number of the port.
    pub number: String,
    /// Scheme of the target, `http` or `https`: the server may listen on the port too
    /// (`proxyPortListen`). Without a scheme it never does.
    pub scheme: Option<String>,
    /// Address of the node that agents dial: `node` (default) or `loopback`.
    pub class: Option<String>,
    /// Listeners that accept the port, of `http`, `https` and `connect`. All by default.
    pub listeners: Option<Vec<String>>,
    /// What callers may do at the port without a rule, in addition to reading: `read`, `write` and
    /// `upgrade`, or operations of a kubelet.
    pub operations: Option<Vec<String>>,
}

/// A TCP service in its raw form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawTcpService {
    /// Name of the service in logs.
    pub name: String,
    /// Listen address of the service.
    pub listen: String,
    /// Node that the service reaches.
    pub node: String,
    /// `PORT` of the node, or `HOST:PORT` that the agent's --allow-targets permits.
    pub target: String,
    /// Protocol; only `tcp` is supported.
    pub protocol: Option<String>,
}

/// A DNS name in its raw form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawRecord {
    /// The name, which is answered like that of a cloud node.
    pub name: String,
    /// Addresses of the answer. The first address of each family is used.
    pub addresses: Vec<String>,
}

/// A target of the cloud in its raw form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RawCloudTarget {
    /// Name by which agents open streams to the target.
    pub name: String,
    /// `HOST:PORT` of the target, in the order in which they are tried.
    #[serde(default)]
    pub target: Vec<String>,
    /// `NAMESPACE/NAME:PORT` of a Service of the server's cluster.
    pub service: Option<String>,
    /// Nodes whose agents may reach the target; `*` is all nodes.
    #[serde(default)]
    pub nodes: Vec<String>,
    /// `KEY=VALUE`: label of the Nodes whose agents may reach the target, instead of `nodes`.
    pub label: Option<String>,
}
