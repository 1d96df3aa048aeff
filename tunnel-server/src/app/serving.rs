//! Names and certificates of the HTTPS and CONNECT listeners.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use tunnel_proto::process::host::{host_name, primary_address};

use super::credential_watcher::{CredentialWatcher, watch_pair};
use crate::ca::{LocalCa, ServingNames};
use crate::config::Config;
use crate::routing::routes::Routes;

/// Returns the names of the HTTPS listener: those of this host and those of the configuration.
pub(super) fn serving_names(config: &Config) -> ServingNames {
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
    let listening = [config.listeners.https, connect]
        .into_iter()
        .flatten()
        .map(|address| address.ip());
    addresses
        .extend(listening.filter(|address| !address.is_unspecified() && !address.is_loopback()));
    for host in config
        .advertise
        .iter()
        .filter_map(|advertised| advertised.rsplit_once(':'))
        .map(|(host, _)| host)
    {
        match host.trim_matches(['[', ']']).parse() {
            Ok(address) => addresses.push(address),
            Err(_name) => names.push(host.to_owned()),
        }
    }
    names.extend(config.https_certificate.names.iter().cloned());
    addresses.extend(config.https_certificate.addresses.iter().copied());
    ServingNames::new(names, addresses)
}

/// Returns the resolver of the listeners' serving certificates.
pub(super) fn serving_certificates(
    config: &Config,
    (ca, names): (&Arc<LocalCa>, &ServingNames),
    routes: &Routes,
    watcher: &CredentialWatcher<'_>,
) -> anyhow::Result<Arc<dyn ResolvesServerCert>> {
    Ok(match &config.https_certificate.files {
        Some(pair) => watch_pair("https_certificate", pair, watcher, |_| {})
            .context("--https-cert-file, --https-key-file")?,
        None => {
            let routes = routes.clone();
            ca.serving_resolver(
                Arc::new(move |name| routes.load().knows(name)),
                names.clone(),
            )
        }
    })
}
