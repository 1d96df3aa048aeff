//! The typed configuration. All settings are checked together, so that all errors are reported at
//! once.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::CertificateDer;
use tunnel_process::config_file::{ConfigFile, RawSettings};
use tunnel_process::host::Resources;
use tunnel_process::limits::count;
use tunnel_process::meta::{self, MetaAddress};
use tunnel_process::settings::{ConfigError, ConfigErrors, optional, parse_duration};
use tunnel_process::telemetry::LogSettings;
use tunnel_proto::transport::{BufferPool, CongestionControl, SessionSettings};
use tunnel_proto::wire::label::{LABELS_MAX, Labels, parse_label, unique_labels};
use tunnel_proto::wire::name::NodeName;

use super::limits::Limits;
use super::{
    CloudListener, CredentialFiles, NodeIpSetting, RawConfig, ServerAddress, TokenSource, cloud,
    identity,
};
use crate::policy::DialPolicy;
use crate::proxy::ProxyChoice;

/// The agent's checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Warnings for the operator, logged once at start.
    pub warnings: Vec<String>,
    /// Server addresses in configured order; at least one.
    pub servers: Vec<ServerAddress>,
    /// Largest number of servers to hold a session with at a time.
    pub replicas: usize,
    /// Transport of sessions, after taking --proxy into account.
    pub transport: TransportChoice,
    /// Proxy for TCP connections to servers.
    pub proxy: ProxyChoice,
    pub quic_congestion: CongestionControl,
    pub node_name: NodeName,
    pub node_ip: NodeIpSetting,
    /// Labels that servers show.
    pub labels: Labels,
    pub token: Option<TokenSource>,
    pub ca_file: Option<PathBuf>,
    /// CA certificates of `--ca-file`, as read at start.
    pub ca: Option<Vec<CertificateDer<'static>>>,
    /// Certificate files that the operator provides instead of enrollment.
    pub credential_files: Option<CredentialFiles>,
    /// Directory of the key and the certificate.
    pub data_dir: PathBuf,
    /// Upper bound for dialed targets.
    pub dial_policy: DialPolicy,
    /// Listeners whose connections go to targets of the cloud.
    pub cloud_listeners: Vec<CloudListener>,
    /// Address of the meta port, or `None` if it is off.
    pub meta_listen: Option<SocketAddr>,
    /// Unix socket with the content of the meta port.
    pub meta_socket: Option<PathBuf>,
    /// Whether servers may ask for facts about this agent.
    pub remote_diag: bool,
    /// Time that open streams may continue when the agent stops.
    pub drain_timeout: Duration,
    pub worker_threads: usize,
    /// Settings of the log, the access log and the audit log.
    pub log: LogSettings,
    pub limits: Limits,
    /// The file that the settings come from, if there is one.
    pub file: Option<Arc<ConfigFile<RawConfig>>>,
    /// The settings before the checks. `Debug` leaves them out.
    pub raw: RawSettings<RawConfig>,
}

tunnel_process::named! {
    /// The transports that sessions may use.
    pub enum TransportChoice: FromStr {
        /// QUIC if it gets through, else h2.
        Auto = "auto",
        /// QUIC only; no proxy can carry QUIC.
        Quic = "quic",
        /// HTTP/2 over TCP only.
        H2 = "h2",
    }
}

impl TransportChoice {
    /// Returns the transport choice after applying `proxy`: an explicit proxy is meant to carry
    /// sessions, so `Auto` becomes `H2`.
    fn through(self, proxy: &ProxyChoice) -> Self {
        match self {
            Self::Auto if proxy.is_explicit() => Self::H2,
            Self::Auto | Self::Quic | Self::H2 => self,
        }
    }
}

impl Config {
    /// Returns the memory for data that servers may send unread.
    pub(crate) fn buffer_pool(&self) -> Arc<BufferPool> {
        BufferPool::new(self.limits.buffer_pool_bytes(Resources::of_process()))
    }

    /// Returns the windows and timers of sessions.
    pub(crate) fn session_settings(&self, pool: Arc<BufferPool>) -> SessionSettings {
        let limits = &self.limits;
        SessionSettings {
            stream_window: limits.stream_window,
            // Twice the limit, since a stream may have ended at the server but not yet here. Two
            // more for the control stream and the stream that reports the end.
            streams: limits.streams_per_agent.saturating_mul(2).saturating_add(2),
            keep_alive: Some(limits.keep_alive),
            idle_timeout: limits.dead_after + IDLE_BEYOND_DEAD,
            congestion: self.quic_congestion,
            pool,
        }
    }

    /// Checks every setting and fills in the defaults.
    ///
    /// # Errors
    /// Returns [`ConfigError`] with all errors.
    pub fn check(settings: RawConfig) -> Result<Self, ConfigError> {
        let mut errors = ConfigErrors::default();
        let raw = RawSettings(Box::new(settings.clone()));
        let servers = servers(&settings.server, &mut errors);
        let replicas = errors.parse_with(
            "--replicas",
            settings.replicas.as_deref(),
            DEFAULT_REPLICAS,
            count(REPLICAS_MAX),
        );
        let transport = errors.parse(
            "--transport",
            settings.transport.as_deref(),
            TransportChoice::Auto,
        );
        let proxy = proxy(&settings, &servers, &mut errors);
        let quic_congestion = errors.parse(
            "--quic-congestion",
            settings.quic_congestion.as_deref(),
            CongestionControl::default(),
        );
        let node_name = identity::node_name(settings.node_name.as_deref(), &mut errors);
        let node_ip = identity::node_ip(&settings, &mut errors);
        let token = TokenSource::check(&settings, &mut errors);
        let credential_files = identity::credential_files(&settings, &mut errors);
        let ca = identity::ca(&settings, token.as_ref(), &mut errors);
        let meta_listen = meta_address(settings.meta_listen.as_deref());
        let meta_listen = errors.ok_or_record("--meta-listen", meta_listen).flatten();
        let cloud_listeners = cloud::listeners(&settings, meta_listen, &mut errors);
        let dial_policy = dial_policy(&settings, &cloud_listeners, &mut errors);
        let remote_diag = errors.one_of(
            "--remote-diag",
            settings.remote_diag.as_deref().unwrap_or("on"),
            &[("on", true), ("off", false)],
        );
        let drain_timeout = errors.parse_with(
            "--drain-timeout",
            settings.drain_timeout.as_deref(),
            DEFAULT_DRAIN_TIMEOUT,
            parse_duration,
        );
        let worker_threads = errors.parse_with(
            "--worker-threads",
            settings.worker_threads.as_deref(),
            DEFAULT_WORKER_THREADS,
            count(WORKER_THREADS_MAX),
        );
        let labels = labels(&settings.labels, &mut errors);
        let log = settings.check_logs(&mut errors);
        let limits = Limits::check(&settings.limits.unwrap_or_default(), &mut errors);
        let Some(node_name) = node_name else {
            return errors.finish(()).and(Err(ConfigError::default()));
        };
        errors.finish(Self {
            warnings: Vec::new(),
            servers,
            replicas,
            transport: transport.through(&proxy),
            proxy,
            quic_congestion,
            node_name,
            node_ip,
            labels,
            token,
            ca_file: settings.ca_file,
            ca,
            credential_files,
            data_dir: settings.data_dir.unwrap_or_else(|| DEFAULT_DATA_DIR.into()),
            dial_policy,
            cloud_listeners,
            meta_listen,
            meta_socket: named_socket(settings.meta_socket.as_ref()).cloned(),
            remote_diag: remote_diag.unwrap_or_default(),
            drain_timeout,
            worker_threads,
            log,
            limits,
            file: None,
            raw,
        })
    }
}

impl Config {
    /// Returns where a running agent is asked, as [`meta_endpoint`] does.
    pub(crate) fn meta_endpoint(&self) -> MetaAddress {
        let is_named = self.meta_socket.is_some();
        endpoint(self.socket(), is_named, self.meta_listen)
    }

    /// Returns the Unix socket of the agent.
    pub(crate) fn socket(&self) -> PathBuf {
        socket(self.meta_socket.as_ref(), &self.data_dir)
    }
}

fn labels(texts: &[String], errors: &mut ConfigErrors) -> Labels {
    let labels = errors.parse_list("--label", texts, parse_label);
    let labels = errors.ok_or_record("--label", unique_labels(labels));
    let labels = labels.unwrap_or_default();
    if labels.len() > LABELS_MAX {
        errors.add("--label", format!("more than {LABELS_MAX} labels"));
    }
    labels
}

/// Parses the address of the meta port, or returns `None` for `off`.
///
/// # Errors
/// Returns a message for the operator.
fn meta_address(setting: Option<&str>) -> Result<Option<SocketAddr>, String> {
    let text = setting.unwrap_or(DEFAULT_META_LISTEN);
    optional("off", str::parse::<SocketAddr>)(text)
        .map_err(|_syntax| format!("{text:?} is neither IP:PORT nor \"off\""))
}

/// Returns where a running agent with these settings is asked: the Unix socket of the settings, else the
/// address of its meta port, else the socket of the data directory.
///
/// # Errors
/// Returns a [`ConfigError`] about `--meta-listen`.
pub fn meta_endpoint(settings: &RawConfig) -> Result<MetaAddress, ConfigError> {
    let listen = meta_address(settings.meta_listen.as_deref())
        .map_err(|problem| ConfigError::mistake(format!("--meta-listen: {problem}")))?;
    let is_named = named_socket(settings.meta_socket.as_ref()).is_some();
    Ok(endpoint(meta_socket(settings), is_named, listen))
}

/// Returns the Unix socket of a running agent with these settings.
pub fn meta_socket(settings: &RawConfig) -> PathBuf {
    let data_dir = settings.data_dir.as_deref();
    let data_dir = data_dir.unwrap_or_else(|| Path::new(DEFAULT_DATA_DIR));
    socket(settings.meta_socket.as_ref(), data_dir)
}

fn endpoint(socket: PathBuf, is_named: bool, listen: Option<SocketAddr>) -> MetaAddress {
    match listen {
        Some(address) if !is_named => meta::dialable(address).into(),
        Some(_) | None => MetaAddress::Unix(socket),
    }
}

fn socket(setting: Option<&PathBuf>, data_dir: &Path) -> PathBuf {
    let socket = named_socket(setting).cloned();
    socket.unwrap_or_else(|| data_dir.join("admin.sock"))
}

/// Returns the socket that the setting names; an empty one names none.
fn named_socket(setting: Option<&PathBuf>) -> Option<&PathBuf> {
    setting.filter(|path| !path.as_os_str().is_empty())
}

fn servers(texts: &[String], errors: &mut ConfigErrors) -> Vec<ServerAddress> {
    if texts.is_empty() {
        errors.add(
            "--server",
            "is required, as in --server cloud.example.com:10262",
        );
    }
    errors.parse_list("--server", texts, |text| {
        text.trim().parse::<ServerAddress>()
    })
}

fn proxy(
    settings: &RawConfig,
    servers: &[ServerAddress],
    errors: &mut ConfigErrors,
) -> ProxyChoice {
    let (explicit, environment) = (&settings.proxy, &settings.environment_proxy);
    let proxy = ProxyChoice::decide(explicit.as_ref(), environment.as_ref(), servers);
    proxy.unwrap_or_else(|(setting, error)| {
        errors.add(setting, error);
        ProxyChoice::default()
    })
}

fn dial_policy(
    settings: &RawConfig,
    cloud_listeners: &[CloudListener],
    errors: &mut ConfigErrors,
) -> DialPolicy {
    let cloud_listeners = cloud_listeners.iter().map(|listener| listener.address);
    DialPolicy {
        localhost_ports: errors.parse_or(
            "--localhost-ports",
            settings.localhost_ports.as_deref(),
            DEFAULT_LOCALHOST_PORTS,
        ),
        deny_ports: errors.parse_or(
            "--deny-ports",
            settings.deny_ports.as_deref(),
            DEFAULT_DENY_PORTS,
        ),
        allow_targets: errors.parse_or("--allow-targets", settings.allow_targets.as_deref(), ""),
        cloud_listeners: cloud_listeners.collect(),
    }
}

pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/tunnel-agent";
const DEFAULT_LOCALHOST_PORTS: &str = "10250, 10255, 10266, 10267";
const DEFAULT_DENY_PORTS: &str = "2379-2381, 10248, 10249, 10257, 10259";
const DEFAULT_META_LISTEN: &str = "127.0.0.1:10266";
/// One session may be lost with its server while the other one serves.
const DEFAULT_REPLICAS: usize = 2;
/// Each session costs memory at both ends, and one hop reaches the other servers.
const REPLICAS_MAX: u64 = 8;
/// On one thread no task wakes another one across threads, and a thread carries more than the link of
/// an edge node. Lookups and files, which can block, have threads of their own.
const DEFAULT_WORKER_THREADS: usize = 1;
/// More threads than a machine has cores are never useful.
const WORKER_THREADS_MAX: u64 = 64;
const DEFAULT_DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Extra time of the transport's own idle timeout, which is only a backstop behind the session's
/// liveness limits.
const IDLE_BEYOND_DEAD: Duration = Duration::from_secs(15);
