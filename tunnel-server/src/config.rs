//! Configuration: converts raw settings (`RawConfig`: flags, environment, YAML) to checked settings
//! (`Config`).

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use tunnel_process::config_file::LoadError;
use tunnel_process::config_file::{ConfigFile, RawSettings, config_path};
use tunnel_process::settings::{
    ConfigError, ConfigErrors, optional, parse_address, parse_duration,
};
use tunnel_process::telemetry::LogSettings;
use tunnel_proto::identity::sha256;
use tunnel_proto::transport::CongestionControl;
use tunnel_proto::wire::PORT_SERVER_META;
use tunnel_proto::wire::name::Port;

use tunnel_dns::DnsSettings;
use tunnel_routing::destination::Scheme;
use tunnel_routing::policy::{DefaultPorts, DelegationPolicy, Policy, PortPolicy, PortSettings};

mod capacity;
mod certificates;
mod cloud;
mod connect;
mod dns;
mod file;
mod kubernetes;
mod label_key;
mod limits;
mod listeners;
mod node_label;
mod peers;
mod per_node_metrics;
mod policy;
mod ports;
mod raw;
mod status_page;
mod targets;

pub use capacity::{CONNECTION_HEAD_BYTES, Capacity, DescriptorUses};
pub use certificates::{ClientAuth, CredentialFiles, HttpsCertificate};
pub use cloud::{APISERVER_TARGET, CloudNodes, CloudTargetSettings};
pub use connect::{ConnectSettings, UnixListenerSettings};
pub use file::{LIVE_KEYS, is_live, is_shared};
pub use kubernetes::{
    AgentTokens, EDGE_LABEL, Environment, KubeletClientCa, KubernetesSettings, ObjectNames,
};
pub use label_key::{LabelKey, is_label_value, underscored};
pub use limits::{LIMITS, Limit, Limits, RawLimits, SharedLimits};
pub use listeners::{EXTRA_PORTS_MAX, ListenerSettings, ProxyPortListen};
pub use node_label::NodeLabel;
pub use peers::{PORT_PEERS, PeerSettings};
pub use per_node_metrics::PerNodeMetrics;
pub use policy::{PolicySettings, RuleOrigin};
pub use ports::LOCALHOST_PORTS;
pub use raw::{
    RawCaller, RawCloudTarget, RawConfig, RawDryRun, RawPort, RawRecord, RawRule, RawTcpService,
};
pub use status_page::StatusPageSettings;
pub use targets::{APISERVER_NAME, TargetSettings};

/// Default directory of the server's state.
pub const DATA_DIR: &str = "/var/lib/tunnel-server";
/// Name of the default configuration file, in `/etc/culvert` or the current directory.
pub const FILE_NAME: &str = "tunnel-server.yaml";
/// Prefix of all environment variables.
pub const ENV_PREFIX: &str = "TUNNEL_SERVER_";
/// Default time for running requests to end after SIGTERM.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Default time for which the listeners accept on after SIGTERM, in a cluster. More than the 1 to 3
/// s in which kube-proxy and load balancers follow a change of the endpoints.
const DRAIN_DELAY: Duration = Duration::from_secs(5);
/// Longest time within which agents move to another server. Spreads their handshakes.
const MOVE_WITHIN_MAX: Duration = Duration::from_secs(10);

/// The checked settings of the server.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory of the server's state.
    pub data_dir: PathBuf,
    /// Listeners for agents and callers.
    pub listeners: ListenerSettings,
    pub quic_congestion: CongestionControl,
    /// Address of the meta port, 10265, unless it is off.
    pub meta_listen: Option<SocketAddr>,
    /// Whether metrics have a series for each node.
    pub metrics_per_node: PerNodeMetrics,
    /// Addresses that agents dial; empty means this host's addresses.
    pub advertise: Vec<String>,
    /// Allowed ports of the nodes.
    pub ports: PortSettings,
    /// Who may do what.
    pub policy: PolicySettings,
    /// Serving certificate of the HTTPS listener.
    pub https_certificate: HttpsCertificate,
    /// Certificate files that the operator provides for port 10262 instead of the local CA.
    pub agent_files: Option<CredentialFiles>,
    /// CA of kubelets' client certificates, which make kubelets agents of their nodes.
    pub kubelet_client_ca: KubeletClientCa,
    /// Authentication of callers by client certificates, or `None` if none is requested.
    pub client_auth: Option<ClientAuth>,
    /// Settings of TLS to https targets.
    pub targets: TargetSettings,
    /// Settings of the embedded DNS, or `None` if it is off.
    pub dns: Option<DnsSettings>,
    /// Settings of the CONNECT listeners, or `None` if they are off.
    pub connect: Option<ConnectSettings>,
    /// Settings of the console, or `None` if it is off.
    pub status_page: Option<StatusPageSettings>,
    /// Settings of the connections to other servers.
    pub peers: PeerSettings,
    /// Targets of the cloud that agents may reach.
    pub cloud: Vec<CloudTargetSettings>,
    /// Time for which the listeners accept on after SIGTERM.
    pub drain_delay: Duration,
    /// Maximum time for running requests to end after that.
    pub drain_timeout: Duration,
    /// Settings of the log, the access log and the audit log.
    pub log: LogSettings,
    /// Settings of the cluster to follow.
    pub kubernetes: Option<KubernetesSettings>,
    /// Limits and timers of connections, streams and sessions.
    pub limits: Limits,
    /// Warnings that the server logs at start.
    pub warnings: Vec<String>,
    /// The file that the settings come from, if there is one.
    pub file: Option<Arc<ConfigFile<RawConfig>>>,
    /// The settings before the checks.
    pub raw: RawSettings<RawConfig>,
}

/// Loads the YAML file, if one is named or a default one exists, and applies flags and environment
/// variables over it.
///
/// # Errors
/// Returns a [`LoadError`] if the file cannot be read, or with all errors of the file and of the
/// settings.
pub fn load(flags: RawConfig, file: Option<&Path>) -> Result<Config, LoadError> {
    match config_path(file, FILE_NAME) {
        Some(path) => load_file(flags, &path),
        None => Ok(Config::try_from(flags)?),
    }
}

/// Loads a file, and applies flags and environment variables over it.
///
/// # Errors
/// As [`load`].
pub fn load_file(flags: RawConfig, path: &Path) -> Result<Config, LoadError> {
    let (file, raw) = ConfigFile::read(path, flags, sha256)?;
    let mut config = file.check(raw, Config::try_from)?;
    config.warnings.extend(file.warning.clone());
    config.file = Some(Arc::new(file));
    Ok(config)
}

impl TryFrom<RawConfig> for Config {
    type Error = ConfigError;

    fn try_from(raw: RawConfig) -> Result<Self, ConfigError> {
        Self::check(&raw, Environment::of_process())
    }
}

impl Config {
    /// Checks the settings for this environment.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] with all errors.
    pub fn check(raw: &RawConfig, environment: Environment) -> Result<Self, ConfigError> {
        let mut errors = ConfigErrors::default();
        let kubernetes = KubernetesSettings::check(raw, environment, &mut errors);
        let client_auth = ClientAuth::check(raw, &mut errors);
        let ports = ports::check(raw, &mut errors);
        let policy = PortPolicy::new(ports.clone(), Vec::new());
        let mut config = Self {
            data_dir: raw.data_dir.as_deref().unwrap_or(DATA_DIR).into(),
            listeners: ListenerSettings::check(
                raw,
                &policy,
                client_auth.as_ref(),
                kubernetes.as_ref(),
                &mut errors,
            ),
            quic_congestion: errors.parse(
                "--quic-congestion",
                raw.quic_congestion.as_deref(),
                CongestionControl::default(),
            ),
            meta_listen: errors.parse_with(
                "--meta-listen",
                raw.meta_listen.as_deref(),
                Some((Ipv4Addr::LOCALHOST, PORT_SERVER_META).into()),
                optional("off", parse_address),
            ),
            metrics_per_node: errors.parse(
                "--metrics-per-node",
                raw.metrics_per_node.as_deref(),
                PerNodeMetrics::default(),
            ),
            advertise: listeners::advertised(raw, &mut errors),
            policy: PolicySettings::check(
                raw,
                &ports.default_ports(!raw.connect_direct.is_empty()),
                kubernetes.as_ref(),
                &mut errors,
            ),
            ports,
            https_certificate: HttpsCertificate::check(raw, &mut errors),
            agent_files: CredentialFiles::for_agents(raw, &mut errors),
            kubelet_client_ca: KubeletClientCa::new(raw, kubernetes.is_some()),
            targets: TargetSettings::check(
                raw,
                client_auth.is_some(),
                kubernetes.is_some(),
                &mut errors,
            ),
            client_auth,
            dns: dns::check(raw, &mut errors),
            connect: ConnectSettings::check(raw, &mut errors),
            status_page: StatusPageSettings::check(raw, &mut errors),
            peers: PeerSettings::check(raw, kubernetes.as_ref(), &mut errors),
            cloud: cloud::check(raw, kubernetes.is_some(), &mut errors),
            drain_delay: errors.parse_with(
                "--drain-delay",
                raw.drain_delay.as_deref(),
                default_drain_delay(kubernetes.as_ref()),
                parse_duration,
            ),
            drain_timeout: errors.parse_with(
                "--drain-timeout",
                raw.drain_timeout.as_deref(),
                DRAIN_TIMEOUT,
                parse_duration,
            ),
            log: raw.check_logs(&mut errors),
            kubernetes,
            limits: Limits::check(&raw.limits.clone().unwrap_or_default(), &mut errors),
            warnings: Vec::new(),
            file: None,
            raw: RawSettings(Box::new(raw.clone())),
        };
        config.warnings = config.warnings(raw);
        errors.finish(config)
    }

    /// Returns the extra ports on which the server listens, with their addresses and schemes.
    pub fn extra_listeners(&self) -> Vec<(SocketAddr, Port, Scheme)> {
        let policy = PortPolicy::new(self.ports.clone(), Vec::new());
        self.listeners.extra(&policy)
    }

    /// Returns what decides about accesses. `own` are the ports of the tunnel itself.
    pub fn access_policy(&self, own: Vec<Port>) -> Policy {
        let services = self.listeners.services.iter();
        Policy {
            rules: self.policy.rules(),
            services: services
                .map(|(_, service)| service.destination.clone())
                .collect(),
            delegation: DelegationPolicy::named(self.targets.delegation_callers.clone()),
            ..PortPolicy::new(self.ports.clone(), own).into()
        }
    }

    /// Returns what the settings add to the rules that hold without a file.
    pub fn default_ports(&self) -> DefaultPorts {
        let direct = self
            .connect
            .as_ref()
            .map(|connect| connect.direct.is_some());
        self.ports.default_ports(direct.unwrap_or_default())
    }

    /// Returns the time after SIGTERM within which agents move to another server, each at a random
    /// moment. Half of the drain remains for those that have to try again.
    pub fn move_within(&self) -> Duration {
        MOVE_WITHIN_MAX.min(self.drain_timeout / 2)
    }

    /// Returns warnings about settings that work but are likely not intended.
    fn warnings(&self, raw: &RawConfig) -> Vec<String> {
        let has_records = !raw.dns_answer.is_empty() || !raw.dns_records.is_empty();
        let unused_records = (self.kubernetes.is_some() && has_records).then(|| {
            "--dns-answer and dnsRecords are not used in a cluster: its Nodes and the internal Service say the records"
                .to_owned()
        });
        self.listeners
            .warning(self.client_auth.as_ref(), self.kubernetes.as_ref())
            .into_iter()
            .chain(self.connect.as_ref().and_then(ConnectSettings::warning))
            .chain(unused_records)
            .chain(self.policy.warnings(!self.cloud.is_empty()))
            .collect()
    }
}

/// Returns the default of `--drain-delay`. A server that alone serves its callers stops sooner
/// without a delay, and its successor starts sooner.
fn default_drain_delay(kubernetes: Option<&KubernetesSettings>) -> Duration {
    match kubernetes {
        Some(settings) if !settings.single_replica => DRAIN_DELAY,
        Some(_) | None => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests;
