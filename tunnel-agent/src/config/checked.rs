//! The typed configuration. All settings are checked together, so that all mistakes are reported at
//! once.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustls_pki_types::{CertificateDer, ServerName};
use tracing::level_filters::LevelFilter;
use tunnel_proto::process::host::host_name;
use tunnel_proto::process::settings::{ConfigError, ConfigErrors, parse_duration};
use tunnel_proto::process::telemetry::LogFormat;
use tunnel_proto::tls::files::{KeyPairFiles, load_roots};
use tunnel_proto::transport::CongestionControl;
use tunnel_proto::wire::name::NodeName;

use super::limits::Limits;
use super::token::{NO_PIN, TokenSource, parse_token};
use super::{Secret, ServerAddress, Settings};
use crate::credentials::CredentialFiles;
use crate::policy::{self, DialPolicy};
use crate::proxy::ProxyChoice;

/// The agent's checked configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Warnings for the operator, logged once at start.
    pub warnings: Vec<String>,
    /// Server addresses in configured order; at least one.
    pub servers: Vec<ServerAddress>,
    /// Transport of sessions, after taking --proxy into account.
    pub transport: TransportChoice,
    /// Proxy for TCP connections to servers.
    pub proxy: ProxyChoice,
    /// Congestion control of QUIC sessions.
    pub quic_congestion: CongestionControl,
    /// Name of this node.
    pub node_name: NodeName,
    /// Address of this node; `None` uses the route towards the server.
    pub node_ip: Option<IpAddr>,
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
    /// Address of the meta port, or `None` if it is off.
    pub meta_listen: Option<SocketAddr>,
    /// Time that open streams may continue when the agent stops.
    pub drain_timeout: Duration,
    /// Minimum level of log lines.
    pub log_level: LevelFilter,
    /// Format of log lines.
    pub log_format: LogFormat,
    pub limits: Limits,
}

/// The transports that sessions may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportChoice {
    /// QUIC if it gets through, else h2.
    Auto,
    /// QUIC only; no proxy can carry QUIC.
    Quic,
    /// HTTP/2 over TCP only.
    H2,
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
    /// Checks every setting and fills in the defaults.
    ///
    /// # Errors
    /// Returns [`ConfigError`] with all mistakes.
    pub fn check(settings: Settings) -> Result<Self, ConfigError> {
        let mut mistakes = ConfigErrors::default();
        let note = &mut mistakes;
        let servers = servers(&settings.server, note);
        let transport: Option<TransportChoice> = parsed(
            note,
            "--transport",
            settings.transport.as_deref().unwrap_or("auto"),
        );
        let proxy = ProxyChoice::decide(
            settings.proxy.as_ref(),
            settings.environment_proxy.as_ref(),
            &servers,
        );
        let proxy = proxy.unwrap_or_else(|(setting, problem)| {
            note.add(setting, problem);
            ProxyChoice::default()
        });
        let quic_congestion = settings.quic_congestion.as_deref();
        let quic_congestion = quic_congestion
            .and_then(|text| parsed(note, "--quic-congestion", text))
            .unwrap_or_default();
        let node_name = node_name(settings.node_name, note);
        let node_ip = node_ip(settings.node_ip, note);
        let token = token(settings.token, settings.token_file, note);
        let credential_files = credential_files(
            &settings.cert_file,
            &settings.key_file,
            &settings.ca_file,
            note,
        );
        let credential_files = server_name(settings.server_name.as_deref(), credential_files, note);
        let ca_file = settings.ca_file;
        let ca = ca_file
            .as_ref()
            .and_then(|path| ca_certificates(path, note));
        if let Some(TokenSource::Inline(token)) = &token
            && token.ca_hash().is_none()
            && ca.is_none()
        {
            note.add("--token", NO_PIN);
        }
        let localhost_ports = settings
            .localhost_ports
            .as_deref()
            .unwrap_or(DEFAULT_LOCALHOST_PORTS);
        let deny_ports = settings.deny_ports.as_deref().unwrap_or(DEFAULT_DENY_PORTS);
        let allow_targets = settings.allow_targets.as_deref().unwrap_or_default();
        let dial_policy = DialPolicy {
            localhost_ports: parsed(note, "--localhost-ports", localhost_ports).unwrap_or_default(),
            deny_ports: parsed(note, "--deny-ports", deny_ports).unwrap_or_default(),
            allow_targets: parsed(note, "--allow-targets", allow_targets).unwrap_or_default(),
        };
        let meta_listen = note.unwrap_or_record(
            "--meta-listen",
            meta_address(settings.meta_listen.as_deref()),
            None,
        );
        let drain_timeout = settings
            .drain_timeout
            .as_deref()
            .unwrap_or(DEFAULT_DRAIN_TIMEOUT);
        let drain_timeout = note.unwrap_or_record(
            "--drain-timeout",
            parse_duration(drain_timeout),
            Duration::ZERO,
        );
        let log_level = settings.log_level.as_deref().unwrap_or("info");
        let log_level = note.unwrap_or_record("--log-level", level(log_level), LevelFilter::INFO);
        let log_format = settings.log_format.map_or_else(LogFormat::detect, |text| {
            note.unwrap_or_record("--log-format", text.parse(), LogFormat::Text)
        });
        let limits = Limits::check(&settings.limits.unwrap_or_default(), note);
        let (Some(transport), Some(node_name)) = (transport, node_name) else {
            return mistakes.finish(()).and(Err(ConfigError(Vec::new())));
        };
        mistakes.finish(Self {
            warnings: Vec::new(),
            servers,
            transport: transport.through(&proxy),
            proxy,
            quic_congestion,
            node_name,
            node_ip,
            token,
            ca_file,
            ca,
            credential_files,
            data_dir: settings.data_dir.unwrap_or_else(|| DEFAULT_DATA_DIR.into()),
            dial_policy,
            meta_listen,
            drain_timeout,
            log_level,
            log_format,
            limits,
        })
    }
}

/// Parses the address of the meta port, or returns `None` for `off`.
///
/// # Errors
/// Returns a message for the operator.
pub fn meta_address(setting: Option<&str>) -> Result<Option<SocketAddr>, String> {
    match setting.unwrap_or(DEFAULT_META_LISTEN) {
        "off" => Ok(None),
        text => text
            .parse()
            .map(Some)
            .map_err(|_syntax| format!("{text:?} is neither IP:PORT nor \"off\"")),
    }
}

fn parsed<T: FromStr<Err = String>>(
    mistakes: &mut ConfigErrors,
    name: &str,
    text: &str,
) -> Option<T> {
    mistakes.unwrap_or_record(name, text.parse().map(Some), None)
}

fn servers(texts: &[String], mistakes: &mut ConfigErrors) -> Vec<ServerAddress> {
    if texts.is_empty() {
        mistakes.add(
            "--server",
            "is required, as in --server cloud.example.com:10262",
        );
    }
    let mut servers = Vec::new();
    for text in texts {
        match text.trim().parse() {
            Ok(server) => servers.push(server),
            Err(problem) => {
                let problem: String = problem;
                mistakes.add("--server", problem);
            }
        }
    }
    servers
}

fn node_name(setting: Option<String>, mistakes: &mut ConfigErrors) -> Option<NodeName> {
    let parsed = match setting {
        Some(text) => text.parse().map_err(|error| format!("{text:?}: {error}")),
        None => host_name()
            .map_err(|error| format!("is not given and the host name cannot be read: {error}"))
            .and_then(|name| {
                name.parse().map_err(|error| {
                    format!("is not given and the host name {name:?} does not do: {error}")
                })
            }),
    };
    mistakes.unwrap_or_record("--node-name", parsed.map(Some), None)
}

fn node_ip(setting: Option<String>, mistakes: &mut ConfigErrors) -> Option<IpAddr> {
    let text = setting?;
    match text.trim().parse::<IpAddr>() {
        Ok(ip) if policy::is_never_dialed(ip) => {
            mistakes.add(
                "--node-ip",
                format_args!(
                    "{ip} is never dialed: unspecified, link-local, multicast or metadata"
                ),
            );
            None
        }
        Ok(ip) => Some(ip.to_canonical()),
        Err(_syntax) => {
            mistakes.add("--node-ip", format_args!("{text:?} is not an IP address"));
            None
        }
    }
}

/// Requires the three files together. One file may contain both the chain and the key.
fn credential_files(
    certificate: &Option<PathBuf>,
    key: &Option<PathBuf>,
    ca: &Option<PathBuf>,
    mistakes: &mut ConfigErrors,
) -> Option<CredentialFiles> {
    let Some(certificate) = certificate else {
        if key.is_some() {
            mistakes.add("--key-file", "needs --cert-file too");
        }
        return None;
    };
    let Some(ca) = ca else {
        mistakes.add(
            "--cert-file",
            "needs --ca-file too: the CA that the server's certificate chains to",
        );
        return None;
    };
    Some(CredentialFiles {
        pair: KeyPairFiles {
            certificate: certificate.clone(),
            key: key.as_ref().unwrap_or(certificate).clone(),
        },
        ca: ca.clone(),
        server_name: None,
    })
}

fn server_name(
    name: Option<&str>,
    credential_files: Option<CredentialFiles>,
    mistakes: &mut ConfigErrors,
) -> Option<CredentialFiles> {
    let Some(name) = name else {
        return credential_files;
    };
    let mut credential_files = credential_files;
    match (ServerName::try_from(name.to_owned()), &mut credential_files) {
        (Err(_syntax), _) => mistakes.add(
            "--server-name",
            format_args!("{name:?} is neither a DNS name nor an address"),
        ),
        (Ok(_), None) => mistakes.add(
            "--server-name",
            "is for certificates that you bring (--cert-file); with our CA the role of the server is verified",
        ),
        (Ok(name), Some(credential_files)) => credential_files.server_name = Some(name),
    }
    credential_files
}

fn token(
    inline: Option<Secret>,
    file: Option<PathBuf>,
    mistakes: &mut ConfigErrors,
) -> Option<TokenSource> {
    let inline = inline.filter(|token| !token.0.trim().is_empty());
    match (inline, file) {
        (Some(_), Some(_)) => {
            mistakes.add("--token", "and --token-file exclude each other");
            None
        }
        (Some(text), None) => match parse_token(&text.0) {
            Ok(token) => Some(TokenSource::Inline(token)),
            Err(problem) => {
                mistakes.add("--token", problem);
                None
            }
        },
        (None, file) => file.map(TokenSource::File),
    }
}

fn ca_certificates(
    path: &Path,
    mistakes: &mut ConfigErrors,
) -> Option<Vec<CertificateDer<'static>>> {
    match load_roots(path) {
        Ok(certificates) => Some(certificates),
        Err(problem) => {
            mistakes.add("--ca-file", problem);
            None
        }
    }
}

fn level(text: &str) -> Result<LevelFilter, String> {
    match text {
        "error" => Ok(LevelFilter::ERROR),
        "warn" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        "trace" => Ok(LevelFilter::TRACE),
        other => Err(format!(
            "{other:?} is none of error, warn, info, debug, trace"
        )),
    }
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "quic" => Ok(Self::Quic),
            "h2" => Ok(Self::H2),
            other => Err(format!("{other:?} is none of auto, quic, h2")),
        }
    }
}

const DEFAULT_DATA_DIR: &str = "/var/lib/tunnel-agent";
const DEFAULT_LOCALHOST_PORTS: &str = "10250, 10255, 10266, 10267";
const DEFAULT_DENY_PORTS: &str = "2379-2381, 10248, 10249, 10257, 10259";
const DEFAULT_META_LISTEN: &str = "127.0.0.1:10266";
const DEFAULT_DRAIN_TIMEOUT: &str = "30s";
