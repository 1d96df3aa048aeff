//! Raw settings: flags, environment variables and the YAML file, before any check.

use std::path::PathBuf;

use serde::Deserialize;
use tunnel_process::yaml;

use super::RawLimits;
use super::Secret;
use crate::proxy::EnvironmentProxy;

tunnel_process::layered_with_logs! {
    prefix "TUNNEL_AGENT_";
    /// One layer of settings, as written. The doc comments of the fields are the help of `run`.
    #[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
    pub struct RawConfig {
        /// Address where tunnel-server accepts agents; repeat it for several addresses [required]
        ///
        /// Names are resolved again on each try, and all addresses are tried in turn. Sessions over
        /// QUIC need UDP; enrollment and sessions over h2 need TCP on the same port (10262 unless
        /// the server is configured otherwise).
        #[arg(long, env = "TUNNEL_AGENT_SERVER", value_name = "HOST:PORT", value_delimiter = ',', help_heading = "Connection")]
        pub server: Vec<String>,

        /// Servers of one installation to hold a session with at a time, 1 to 8 [default: 2]
        ///
        /// The servers report how many there are; the agent never holds more sessions than that. With
        /// two, requests reach this node while a server restarts. The agent dials the addresses that
        /// the servers advertise. Behind a load balancer it dials --server again until it reaches
        /// another server, and goes on with fewer sessions if it reaches none.
        #[arg(long, env = "TUNNEL_AGENT_REPLICAS", value_name = "COUNT", help_heading = "Connection")]
        pub replicas: Option<String>,

        /// Transport of sessions: auto, quic or h2 [default: auto]
        ///
        /// QUIC runs over UDP and suits most networks best. h2 is HTTP/2 in TLS over TCP, for
        /// networks that drop UDP or allow outgoing TCP only through a proxy. auto tries QUIC first
        /// and falls back to h2 if QUIC does not get through; with --proxy, auto means h2.
        #[arg(long, env = "TUNNEL_AGENT_TRANSPORT", value_name = "NAME", help_heading = "Connection")]
        pub transport: Option<String>,

        /// HTTP proxy for connections to the servers, as in
        /// http://user:password@proxy.example.com:3128, or off [default: as in HTTPS_PROXY]
        ///
        /// The agent sends CONNECT for each --server, and the proxy resolves the name; TLS stays
        /// between agent and server. Names that servers advertise and --server lacks are resolved
        /// by this host, and the proxy gets the address. Only http:// proxies are supported; http:// can be left out,
        /// and the default port is 80 (curl's is 1080). In user and password write @ : / % as %40
        /// %3A %2F %25. A command line can be read by every user of the host: prefer the variable
        /// or the file for a URL with a password.
        ///
        /// A proxy carries TCP only. A proxy set here is used for all connections: sessions use h2,
        /// unless --transport quic leaves only enrollment to the proxy. Without this flag,
        /// enrollment and sessions over h2 use the proxy of HTTPS_PROXY (or https_proxy), QUIC is
        /// still tried directly, and the servers in NO_PROXY (or no_proxy) are reached without it.
        /// NO_PROXY does not limit a proxy set here. off disables the proxy, whatever the variables
        /// contain.
        #[arg(long, env = "TUNNEL_AGENT_PROXY", value_name = "URL|off", hide_env_values = true, help_heading = "Connection")]
        pub proxy: Option<Secret>,

        /// Congestion control of QUIC sessions: cubic or bbr [default: bbr]
        ///
        /// This applies to data that this agent sends; the server has its own setting. bbr keeps
        /// its speed on paths that lose packets at random, such as mobile networks. cubic backs off
        /// at each loss, as most TCP does. Sessions over h2 use the system's congestion control.
        #[arg(long, env = "TUNNEL_AGENT_QUIC_CONGESTION", value_name = "NAME", help_heading = "Connection")]
        pub quic_congestion: Option<String>,

        /// Name of this node; must equal the name in its credential [default: the host name]
        ///
        /// The variable NODE_NAME, as set by Kubernetes' downward API, is read as well.
        #[arg(long, env = "TUNNEL_AGENT_NODE_NAME", value_name = "NAME", help_heading = "Identity")]
        pub node_name: Option<String>,

        /// Address of this node, where its own ports are dialed [default: address of the route to the
        /// server, looked up for each request]
        ///
        /// Without this setting, the variable NODE_IP is used while this host has the address. The
        /// address is never used for routing in the cloud, so any number of sites may use the same
        /// address. The agent dials this address even if the host does not have it, and says so in
        /// /readyz.
        #[arg(long, env = "TUNNEL_AGENT_NODE_IP", value_name = "IP", help_heading = "Identity")]
        pub node_ip: Option<String>,

        /// Label of this node, as in site=north, which servers show and nodes --selector accepts;
        /// repeatable, at most 16, in the file a list "labels". No rule depends on it [default: none]
        #[arg(long = "label", env = "TUNNEL_AGENT_LABELS", value_name = "KEY=VALUE", value_delimiter = ',', help_heading = "Identity")]
        pub labels: Vec<String>,

        /// Join token, as printed by `tunnel-server token create`
        ///
        /// The token is needed until the first certificate is in the data directory, then ignored.
        /// Prefer --token-file or the variable: a command line can be read by every user of the
        /// host.
        #[arg(long, env = "TUNNEL_AGENT_TOKEN", value_name = "TOKEN", hide_env_values = true, help_heading = "Identity")]
        pub token: Option<Secret>,

        /// File that contains the join token, or the ServiceAccount token of a projected volume
        ///
        /// A ServiceAccount token is for servers in a cluster: its audience is the server's
        /// --agent-token-audience, and it needs --ca-file. The file is read each time that the
        /// token is needed, since the kubelet replaces it.
        #[arg(long, env = "TUNNEL_AGENT_TOKEN_FILE", value_name = "FILE", help_heading = "Identity")]
        pub token_file: Option<PathBuf>,

        /// CA certificates (PEM) that the server must chain to [default: as pinned by the token,
        /// then stored in the data directory]
        #[arg(long, env = "TUNNEL_AGENT_CA_FILE", value_name = "FILE", help_heading = "Identity")]
        pub ca_file: Option<PathBuf>,

        /// Certificate chain of this agent (PEM, leaf first), instead of enrollment
        ///
        /// For certificates that the operator provides: either with the SAN URI
        /// culvert://agent/NAME, issued by the CA in the server's --agent-ca; or, for servers in a
        /// cluster, the kubelet's kubelet-client-current.pem. Needs --ca-file. All three files are
        /// read again every few seconds (limits.reloadEvery) and on SIGHUP; links are followed, and
        /// a file that others may write is refused. New sessions use the new files, and the old
        /// session ends with its last stream.
        #[arg(long, env = "TUNNEL_AGENT_CERT_FILE", value_name = "FILE", help_heading = "Identity")]
        pub cert_file: Option<PathBuf>,

        /// Private key (PEM) of the certificate [default: the file of --cert-file]
        #[arg(long, env = "TUNNEL_AGENT_KEY_FILE", value_name = "FILE", help_heading = "Identity")]
        pub key_file: Option<PathBuf>,

        /// With --cert-file: DNS name or address that the server's certificate must be valid for
        /// [default: none; it needs the role culvert://server]
        #[arg(long, env = "TUNNEL_AGENT_SERVER_NAME", value_name = "NAME", help_heading = "Identity")]
        pub server_name: Option<String>,

        /// Directory for the key and the certificate [default: /var/lib/tunnel-agent]
        #[arg(long, env = "TUNNEL_AGENT_DATA_DIR", value_name = "DIR", help_heading = "Identity")]
        pub data_dir: Option<PathBuf>,

        /// Loopback ports of this host that the cloud may reach [default: 10250, 10255, 10266,
        /// 10267]
        ///
        /// The agent enforces this list on every request of the server.
        #[arg(long, env = "TUNNEL_AGENT_LOCALHOST_PORTS", value_name = "PORTS", help_heading = "Dial policy")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub localhost_ports: Option<String>,

        /// Ports that are never dialed on any address [default: 2379-2381, 10248, 10249, 10257,
        /// 10259]
        #[arg(long, env = "TUNNEL_AGENT_DENY_PORTS", value_name = "PORTS", help_heading = "Dial policy")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub deny_ports: Option<String>,

        /// Other hosts that the cloud may reach through this agent [default: none]
        ///
        /// A list of CIDR:PORT or CIDR:LOW-HIGH, such as "10.0.0.0/8:5432, 192.168.1.5:80-90,
        /// [fd00::/8]:443". The agent checks each address that a name resolves to. Link-local,
        /// metadata and loopback addresses are never dialed.
        #[arg(long, env = "TUNNEL_AGENT_ALLOW_TARGETS", value_name = "LIST", help_heading = "Dial policy")]
        #[serde(deserialize_with = "yaml::text_or_list")]
        pub allow_targets: Option<String>,

        /// Local address whose connections go to a named target of the cloud, as in
        /// apiserver=127.0.0.1:10268; repeat it for several addresses. "off" is none, also for a
        /// list of the configuration file [default: off]
        ///
        /// The server's configuration has the targets by name. The bytes of a connection pass
        /// through unchanged; without a session that leads to a target, a connection is reset at
        /// once. Only loopback and link-local addresses are accepted. The address may be added to
        /// the host later. If another process has the address and port, /readyz?verbose says so,
        /// and the agent tries again every 10 s.
        #[arg(long, env = "TUNNEL_AGENT_CLOUD_LISTEN", value_name = "NAME=ADDR:PORT", value_delimiter = ',', help_heading = "Targets of the cloud")]
        pub cloud_listen: Vec<String>,

        /// Accept any address in --cloud-listen, so that other hosts reach the targets of the cloud
        /// through this one [default: false]
        #[arg(long, env = "TUNNEL_AGENT_CLOUD_LISTEN_WIDE", value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Targets of the cloud")]
        pub cloud_listen_wide: Option<String>,

        /// Address of /livez, /readyz and /metrics, or off [default: 127.0.0.1:10266]
        #[arg(long, env = "TUNNEL_AGENT_META_LISTEN", value_name = "ADDR|off", help_heading = "Process")]
        pub meta_listen: Option<String>,

        /// Unix socket for commands on this host, with the content of the meta port [default: admin.sock
        /// in the data directory]
        ///
        /// `reload` and the log lines of `diag` use it always, `healthcheck` and `status` with this
        /// setting or without a meta port. Two agents of a node run on one host while the next one waits
        /// for the end of the other, and the meta port belongs to one of them. A socket that is set here
        /// answers from the start to the end.
        #[arg(long, env = "TUNNEL_AGENT_META_SOCKET", value_name = "FILE", help_heading = "Process")]
        pub meta_socket: Option<PathBuf>,

        /// Whether a server may ask for facts about this agent, for `tunnel-server diag --node`: version,
        /// settings without secrets, sessions, conditions and last log lines [default: on]
        #[arg(long, env = "TUNNEL_AGENT_REMOTE_DIAG", value_name = "on|off", help_heading = "Process")]
        pub remote_diag: Option<String>,

        /// Time that open streams may continue after SIGTERM [default: 30s]
        ///
        /// Connections to --cloud-listen have 5 s of it, since watches never end and their clients dial
        /// again. The listeners accept meanwhile, unless another agent of the node waits on this host.
        #[arg(long, env = "TUNNEL_AGENT_DRAIN_TIMEOUT", value_name = "DURATION", help_heading = "Process")]
        pub drain_timeout: Option<String>,

        /// Threads that carry sessions and streams, 1 to 64 [default: 1]
        ///
        /// On one thread, requests take less time and CPU time, because no task wakes another one
        /// across threads. More threads are faster where transfers or new connections use all of one
        /// core.
        #[arg(long, env = "TUNNEL_AGENT_WORKER_THREADS", value_name = "COUNT", help_heading = "Process")]
        pub worker_threads: Option<String>,

        /// Limits and timers, set in the file only; see [`LIMITS`](super::LIMITS).
        #[arg(skip)]
        pub limits: Option<RawLimits>,

        /// Value of the variable NODE_IP.
        #[arg(skip)]
        #[serde(skip)]
        pub initial_node_ip: Option<String>,

        /// Values of HTTPS_PROXY and NO_PROXY; they have the lowest precedence.
        #[arg(skip)]
        #[serde(skip)]
        pub environment_proxy: Option<EnvironmentProxy>,
    }
}
