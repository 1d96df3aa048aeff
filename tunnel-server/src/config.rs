//! Configuration: converts raw settings (`RawConfig`: flags, environment, YAML) to checked settings
//! (`Config`).

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::level_filters::LevelFilter;
use tunnel_proto::process::files;
use tunnel_proto::process::settings::{ConfigError, ConfigErrors};
use tunnel_proto::process::telemetry::LogFormat;
use tunnel_proto::tls::files::KeyPairFiles;
use tunnel_proto::transport::CongestionControl;
use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::{PORT_AGENTS, PORT_HTTP, PORT_HTTPS, PORT_SERVER_META};

use crate::dns::DnsSettings;
use crate::ingress::service::Service;
use crate::policy::PortPolicy;

mod capacity;
mod check;
mod connect;
mod dns;
mod kubernetes;
mod limits;
mod raw;
mod targets;

pub use capacity::Capacity;
use check::{
    address, advertised, agent_files, check_service, client_auth, duration, https_certificate,
    https_names, listener_address, loopback, parsed, port_list, proxy_port_listen,
};
pub use connect::{ConnectSettings, UnixListenerSettings};
pub use kubernetes::{
    AgentTokens, EDGE_LABEL, Environment, KubeletCa, KubernetesSettings, ObjectNames,
};
pub use limits::{LIMITS, Limit, Limits, RawLimits};
pub use raw::{RawConfig, RawRecord, RawService};
pub use targets::{APISERVER_NAME, TargetSettings};

/// Default directory of the server's state.
pub const DATA_DIR: &str = "/var/lib/tunnel-server";
/// Prefix of all environment variables.
pub const ENV_PREFIX: &str = "TUNNEL_SERVER_";
/// Default ports that agents dial on their loopback.
pub const LOCALHOST_PORTS: &str = "10266, 10267";
/// Maximum number of extra ports. A mistyped range must not open thousands of sockets.
const EXTRA_PORTS_MAX: usize = 64;

/// The checked settings of the server.
#[derive(Debug, Clone)]
pub struct Config {
    /// Directory of the server's state.
    pub data_dir: PathBuf,
    /// Addresses of port 10262, in order of preference.
    pub agent_listen: Vec<SocketAddr>,
    /// Congestion control of QUIC sessions.
    pub quic_congestion: CongestionControl,
    /// Address of the HTTPS listener, port 10263.
    pub https_listen: Option<SocketAddr>,
    /// Address of the HTTP listener, port 10264.
    pub http_listen: Option<SocketAddr>,
    /// Address of the meta port, 10265.
    pub meta_listen: SocketAddr,
    /// Addresses that agents dial; empty means this host's addresses.
    pub advertise: Vec<String>,
    /// Allowed ports of the nodes.
    pub ports: PortPolicy,
    /// Addresses on which the extra ports are bound.
    pub proxy_port_listen: ProxyPortListen,
    /// Certificate chain and key of the HTTPS listener.
    pub https_certificate: Option<KeyPairFiles>,
    /// Additional names of the HTTPS listener in the local CA's certificate.
    pub https_names: Vec<String>,
    /// Additional addresses of the HTTPS listener in the local CA's certificate.
    pub https_addresses: Vec<IpAddr>,
    /// Certificate files that the operator provides for port 10262 instead of the local CA.
    pub agent_files: Option<AgentFiles>,
    /// CA of kubelets' client certificates, which make kubelets agents of their nodes.
    pub kubelet_ca: KubeletCa,
    /// CA of callers, and whether a certificate is required.
    pub client_auth: Option<(PathBuf, bool)>,
    /// Settings of TLS to https targets.
    pub targets: TargetSettings,
    /// Settings of the embedded DNS, or `None` if it is off.
    pub dns: Option<DnsSettings>,
    /// Settings of the CONNECT listeners, or `None` if they are off.
    pub connect: Option<ConnectSettings>,
    /// Maximum time for running requests to end after SIGTERM.
    pub drain_timeout: Duration,
    /// Minimum level of log messages.
    pub log_level: LevelFilter,
    /// Format of log messages.
    pub log_format: LogFormat,
    /// Settings of the cluster to follow.
    pub kubernetes: Option<KubernetesSettings>,
    /// TCP services with their listeners.
    pub services: Vec<(SocketAddr, Service)>,
    /// Limits and timers.
    pub limits: Limits,
    /// Warnings that the server logs at start.
    pub warnings: Vec<String>,
}

/// Certificates for agents' sessions that the operator provides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentFiles {
    /// CA to which agents' certificates chain.
    pub ca: PathBuf,
    /// Certificate chain and key of the server.
    pub pair: KeyPairFiles,
}

/// The addresses on which extra proxy ports are bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyPortListen {
    /// Extra ports are not bound.
    Off,
    /// Each port is bound on the host of the listener with its scheme.
    WithListener,
    /// All ports are bound on this host.
    Host(IpAddr),
}

/// Loads the YAML file, if one is named, and applies flags and environment variables over it.
///
/// # Errors
/// Returns a [`ConfigError`] if the file cannot be read or parsed, or with all errors of the
/// settings.
pub fn load(flags: RawConfig, file: Option<&Path>) -> Result<Config, ConfigError> {
    // A list of who may do something is not ignored because its name has changed.
    if std::env::var_os(RENAMED_VARIABLE).is_some() {
        let text = format!("{RENAMED_VARIABLE}: use TUNNEL_SERVER_DELEGATION_ALLOWED_CALLERS");
        return Err(ConfigError(vec![text]));
    }
    let (lower, warning) = match file {
        Some(path) => {
            let mistake = |problem: String| {
                ConfigError(vec![format!("--config: {}: {problem}", path.display())])
            };
            let (bytes, warning) =
                files::read_config(path).map_err(|error| mistake(error.to_string()))?;
            let text = std::str::from_utf8(&bytes).map_err(|error| mistake(error.to_string()))?;
            let lower = serde_saphyr::from_str::<Option<RawConfig>>(text)
                .map_err(|error| mistake(error.to_string()))?;
            (lower, warning)
        }
        None => (None, None),
    };
    let mut config = Config::try_from(flags.or(lower.unwrap_or_default()))?;
    config.warnings.extend(warning);
    Ok(config)
}

/// The former name of a variable.
const RENAMED_VARIABLE: &str = "TUNNEL_SERVER_BORROW_ALLOWED_CALLERS";

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
        let mut mistakes = ConfigErrors::default();
        let errors = &mut mistakes;
        let kubernetes = kubernetes::kubernetes(errors, raw, environment);
        let in_cluster = environment.in_cluster && kubernetes.is_some();
        let client_auth = client_auth(errors, raw);
        let required = matches!(client_auth, Some((_, true)));
        let https_default: SocketAddr = if required || in_cluster {
            (Ipv6Addr::UNSPECIFIED, PORT_HTTPS).into()
        } else {
            loopback(PORT_HTTPS)
        };
        let agent_listen = match &raw.agent_listen {
            Some(text) => address(errors, "--agent-listen", text)
                .into_iter()
                .collect(),
            None => vec![
                (Ipv6Addr::UNSPECIFIED, PORT_AGENTS).into(),
                ([0, 0, 0, 0], PORT_AGENTS).into(),
            ],
        };
        let https_listen = listener_address(
            errors,
            "--https-listen",
            raw.https_listen.as_deref(),
            https_default,
        );
        let http_listen = listener_address(
            errors,
            "--http-listen",
            raw.http_listen.as_deref(),
            loopback(PORT_HTTP),
        );
        let meta_listen = raw
            .meta_listen
            .as_deref()
            .and_then(|text| address(errors, "--meta-listen", text));
        let meta_listen = meta_listen.unwrap_or_else(|| loopback(PORT_SERVER_META));
        let ports = PortPolicy {
            http: port_list(
                errors,
                "--http-proxy-ports",
                raw.http_proxy_ports.as_deref(),
                "",
            ),
            https: port_list(
                errors,
                "--https-proxy-ports",
                raw.https_proxy_ports.as_deref(),
                "",
            ),
            localhost: port_list(
                errors,
                "--localhost-proxy-ports",
                raw.localhost_proxy_ports.as_deref(),
                LOCALHOST_PORTS,
            ),
            // Filled in with the bound ports later.
            own: Vec::new(),
        };
        let services = raw
            .services
            .iter()
            .filter_map(|service| check_service(errors, service, &ports))
            .collect();
        let (https_names, https_addresses) = https_names(errors, raw);
        let config = Self {
            data_dir: raw.data_dir.as_deref().unwrap_or(DATA_DIR).into(),
            agent_listen,
            quic_congestion: parsed(
                errors,
                "--quic-congestion",
                raw.quic_congestion.as_deref(),
                CongestionControl::default(),
            ),
            https_listen,
            http_listen,
            meta_listen,
            advertise: raw
                .advertise
                .iter()
                .filter(|text| !text.trim().is_empty())
                .filter_map(|text| advertised(errors, text))
                .collect(),
            ports,
            proxy_port_listen: proxy_port_listen(
                errors,
                raw.proxy_port_listen.as_deref(),
                kubernetes.is_some(),
            ),
            https_certificate: https_certificate(errors, raw),
            https_names,
            https_addresses,
            agent_files: agent_files(errors, raw),
            targets: targets::targets(errors, raw, (client_auth.is_some(), kubernetes.is_some())),
            kubelet_ca: kubernetes::kubelet_ca(raw, kubernetes.is_some()),
            client_auth,
            dns: dns::check(errors, raw),
            connect: connect::check(errors, raw),
            drain_timeout: duration(
                errors,
                "--drain-timeout",
                raw.drain_timeout.as_deref(),
                Duration::from_secs(30),
            ),
            log_level: parsed(
                errors,
                "--log-level",
                raw.log_level.as_deref(),
                LevelFilter::INFO,
            ),
            log_format: raw
                .log_format
                .as_deref()
                .map_or_else(LogFormat::detect, |text| {
                    errors.unwrap_or_record("--log-format", text.parse(), LogFormat::Json)
                }),
            kubernetes,
            services,
            limits: Limits::check(&raw.limits.clone().unwrap_or_default(), errors),
            warnings: Vec::new(),
        };
        let allowed = parsed(
            errors,
            "--allow-unauthenticated",
            raw.allow_unauthenticated.as_deref(),
            false,
        );
        if !allowed && !in_cluster {
            config.refuse_unauthenticated_listeners(errors, required);
        }
        if config.extra_listeners().len() > EXTRA_PORTS_MAX {
            errors.add(
                "--proxy-port-listen",
                format!("would bind more than {EXTRA_PORTS_MAX} ports"),
            );
        }
        let has_records = !raw.dns_answer.is_empty() || !raw.dns_records.is_empty();
        let unused_records = (config.kubernetes.is_some() && has_records).then(|| {
            "--dns-answer and dnsRecords are not used in a cluster: its Nodes and the internal Service say the records"
                .to_owned()
        });
        let warnings = config
            .unauthenticated_listener_warning(in_cluster)
            .into_iter()
            .chain(config.limits.hard_bound_warning())
            .chain(config.connect.as_ref().and_then(ConnectSettings::warning))
            .chain(unused_records)
            .collect();
        mistakes.finish(Self { warnings, ..config })
    }
}

impl Config {
    /// Returns the extra proxy ports with their addresses, and whether each is https.
    #[must_use]
    pub fn extra_listeners(&self) -> Vec<(SocketAddr, Port, bool)> {
        let host = |https: bool| match self.proxy_port_listen {
            ProxyPortListen::Off => None,
            ProxyPortListen::Host(host) => Some(host),
            ProxyPortListen::WithListener => if https {
                self.https_listen
            } else {
                self.http_listen
            }
            .map(|listener| listener.ip()),
        };
        let ports = self.ports.extra_ports();
        ports
            .filter_map(|(port, https)| Some(((host(https)?, port.get()).into(), port, https)))
            .collect()
    }

    /// Returns a warning if the HTTPS listener is on the network and accepts callers without a
    /// certificate.
    fn unauthenticated_listener_warning(&self, in_cluster: bool) -> Option<String> {
        let asked = match &self.client_auth {
            None => false,
            // In a cluster, callers without a certificate have tokens that kubelets verify.
            Some((_, required)) => *required || in_cluster,
        };
        let wide = self
            .https_listen
            .filter(|address| !address.ip().to_canonical().is_loopback());
        wide.filter(|_| !asked).map(|address| {
            format!(
                "--https-listen {address} accepts callers without a certificate: any caller that can connect reaches the nodes' \
                 allowed ports; set --client-ca and --https-client-auth require"
            )
        })
    }

    /// Requires an explicit setting for listeners that anyone on the network could use.
    fn refuse_unauthenticated_listeners(
        &self,
        errors: &mut ConfigErrors,
        client_certificates: bool,
    ) {
        let mut refuse = |setting: &str, address: SocketAddr| {
            if !address.ip().to_canonical().is_loopback() {
                errors.add(
                    setting,
                    format!(
                        "{address} would let anyone on the network reach the nodes; listen on loopback, require \
                         client certificates (--client-ca and --https-client-auth require, HTTPS listener only), or set \
                         --allow-unauthenticated"
                    ),
                );
            }
        };
        if let Some(address) = self.http_listen {
            refuse("--http-listen", address);
        }
        if let Some(address) = self.https_listen.filter(|_| !client_certificates) {
            refuse("--https-listen", address);
        }
        for (address, _, https) in self.extra_listeners() {
            if !(https && client_certificates) {
                refuse("--proxy-port-listen", address);
            }
        }
        for (address, service) in &self.services {
            refuse(&format!("services: {}", service.name), *address);
        }
    }
}

/// Returns the names of all environment variables that the commands read.
#[must_use]
pub fn known_variables(command: &clap::Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(clap::Arg::get_env);
    let mut names: BTreeSet<String> = own
        .filter_map(|name| name.to_str())
        .map(str::to_owned)
        .collect();
    for verb in command.get_subcommands() {
        names.extend(known_variables(verb));
    }
    names
}

#[cfg(test)]
mod tests;
