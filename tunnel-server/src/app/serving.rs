//! Names and certificates of the HTTPS and CONNECT listeners, and the passwords of callers.

use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use tunnel_process::file_watch::Loaded;
use tunnel_process::host::{host_name, primary_address};
use tunnel_process::settings::ConfigError;
use tunnel_proto::dial::split_host_port;

use super::context::ServerContext;
use super::credential_watcher::{CredentialWatcher, watch_pair};
use crate::config::Config;
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::connect::basic_auth::{BasicAuth, BasicAuthFileError, BasicAuthUsers};
use tunnel_ca::{LocalCa, ServingNames};

/// The names, certificates and TLS configuration of the listeners.
pub(super) struct ServingCredentials {
    pub(super) names: ServingNames,
    pub(super) certificates: Arc<dyn ResolvesServerCert>,
    /// TLS configuration of the HTTPS listeners.
    pub(super) tls: Arc<ListenerTls>,
}

pub(super) struct CallerCa<'a> {
    /// Name under which the file is watched.
    pub(super) what: &'static str,
    pub(super) path: &'a Path,
    /// Whether callers need a certificate.
    pub(super) is_required: bool,
}

/// The password file of a setting.
pub(super) struct PasswordFile<'a> {
    /// Name under which the file is watched.
    pub(super) what: &'static str,
    pub(super) setting: &'static str,
    pub(super) path: &'a Path,
}

impl ServingCredentials {
    /// Builds the credentials and watches their files.
    pub(super) fn build(ca: &Arc<LocalCa>, context: &ServerContext) -> anyhow::Result<Self> {
        let names = serving_names(&context.config);
        let certificates = serving_certificates(ca, &names, context)?;
        let callers = context.config.client_auth.as_ref();
        let callers = callers.map(|callers| CallerCa {
            what: "client_ca",
            path: &callers.ca,
            is_required: callers.is_required,
        });
        let tls = listener_tls(certificates.clone(), callers, &context.watcher)?;
        Ok(Self {
            names,
            certificates,
            tls,
        })
    }
}

/// Returns the names of the HTTPS listener: those of this host and those of the configuration.
fn serving_names(config: &Config) -> ServingNames {
    let mut names = vec!["localhost".to_owned()];
    names.extend(
        host_name()
            .ok()
            .map(|name| name.to_ascii_lowercase())
            .filter(|name| !name.is_empty()),
    );
    let mut addresses: Vec<IpAddr> = vec![[127, 0, 0, 1].into(), Ipv6Addr::LOCALHOST.into()];
    addresses.extend(primary_address());
    let connect = config
        .connect
        .as_ref()
        .and_then(|http_listener| http_listener.listen);
    let status = config.status_page.as_ref().map(|page| page.listen);
    let listening = [config.listeners.https, connect, status]
        .into_iter()
        .flatten()
        .map(|address| address.ip());
    addresses
        .extend(listening.filter(|address| !address.is_unspecified() && !address.is_loopback()));
    let advertised = config.advertise.iter();
    for (host, _port) in advertised.filter_map(|advertised| split_host_port(advertised)) {
        match host.parse() {
            Ok(address) => addresses.push(address),
            Err(_name) => names.push(host.to_owned()),
        }
    }
    names.extend(config.https_certificate.names.iter().cloned());
    addresses.extend(config.https_certificate.addresses.iter().copied());
    ServingNames::new(names, addresses)
}

fn serving_certificates(
    ca: &Arc<LocalCa>,
    names: &ServingNames,
    context: &ServerContext,
) -> anyhow::Result<Arc<dyn ResolvesServerCert>> {
    Ok(match &context.config.https_certificate.files {
        Some(pair) => {
            let metrics = context.watcher.metrics.clone();
            let record_expiry = move |not_after| metrics.credential(CERTIFICATE, not_after);
            watch_pair(CERTIFICATE, pair, &context.watcher, record_expiry)
                .context("--https-cert-file, --https-key-file")?
        }
        None => ca.serving_resolver(context.is_known(), names.clone()),
    })
}

/// Builds the TLS configuration of listeners with the certificate `own`. If there is a CA of
/// callers, its file is watched.
pub(super) fn listener_tls(
    own: Arc<dyn ResolvesServerCert>,
    callers: Option<CallerCa<'_>>,
    watcher: &CredentialWatcher,
) -> anyhow::Result<Arc<ListenerTls>> {
    let Some(callers) = callers else {
        return Ok(ListenerTls::new(own, None, false)?);
    };
    let CallerCa { what, path, .. } = callers;
    let new = |roots| ListenerTls::new(own, Some(roots), callers.is_required);
    watcher.trust_file(what, "--client-ca", path, new, ListenerTls::trust)
}

/// Loads the passwords and watches their file.
pub(super) fn passwords(
    file: &PasswordFile<'_>,
    watcher: &CredentialWatcher,
) -> anyhow::Result<Arc<BasicAuth>> {
    let (setting, path) = (file.setting, file.path.to_owned());
    let (digest, first) =
        BasicAuthUsers::load(&path).map_err(|error| match error.is_in_content() {
            true => anyhow::Error::from(ConfigError::mistake(format!("{setting}: {error}"))),
            false => anyhow::Error::from(error).context(setting),
        })?;
    let live = Arc::new(BasicAuth::new(first));
    let swapped = live.clone();
    let load = move || {
        let (digest, value) = BasicAuthUsers::load(&path)?;
        Ok::<_, BasicAuthFileError>(Loaded { digest, value })
    };
    let apply = move |passwords| {
        swapped.replace(passwords);
        Ok(())
    };
    watcher.watch(file.what, digest, load, apply);
    Ok(live)
}

const CERTIFICATE: &str = "https_certificate";
