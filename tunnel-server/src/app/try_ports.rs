//! Tries the addresses of the listeners for `check-config`, as the start of the server binds them.

use std::net::{SocketAddr, TcpListener, UdpSocket};

use tunnel_process::settings::{ConfigError, ConfigErrors};

use super::proxy_ports::cannot_listen;
use crate::config::Config;

/// Binds each address for a moment. Must not be called while the server runs on this host, whose
/// listeners have the addresses.
///
/// # Errors
/// [`ConfigError`] with a fact for each address that cannot be bound.
pub fn check_ports(config: &Config) -> Result<(), ConfigError> {
    let mut errors = ConfigErrors::default();
    let listeners = &config.listeners;
    let agents = listeners.agents.iter().map(|address| {
        TcpListener::bind(address).and_then(|_bound| UdpSocket::bind(address).map(drop))
    });
    // The first address that can be bound is used.
    let failures: Vec<_> = agents.map_while(Result::err).collect();
    if failures.len() == listeners.agents.len()
        && let (Some(error), Some(address)) = (failures.first(), listeners.agents.first())
    {
        errors.add_fact(
            "--agent-listen",
            format!("cannot listen on {address}: {error}"),
        );
    }
    let connect = config.connect.as_ref().and_then(|connect| connect.listen);
    let status = config.status_page.as_ref().map(|page| page.listen);
    let dns = config.dns.as_ref().map(|dns| dns.listen);
    let single = [
        ("--https-listen", listeners.https),
        ("--http-listen", listeners.http),
        ("--meta-listen", config.meta_listen),
        ("--status-listen", status),
        ("--connect-listen", connect),
        ("--dns-listen", dns),
        ("--peer-listen", config.peers.listen),
    ];
    for (setting, address) in single {
        if let Some(address) = address {
            try_address(setting, address, &mut errors);
        }
    }
    for (address, service) in &listeners.services {
        let setting = format!("services: {}", service.name);
        try_address(&setting, *address, &mut errors);
    }
    errors.finish(())
}

/// Returns the proxy ports that cannot be bound, which the running server reports and tries again.
pub fn busy_proxy_ports(config: &Config) -> Vec<String> {
    let extra = config.extra_listeners().into_iter();
    let busy = extra.filter_map(|(address, port, _)| {
        let error = TcpListener::bind(address).err()?;
        Some(cannot_listen(address, port, &error))
    });
    busy.collect()
}

fn try_address(setting: &str, address: SocketAddr, errors: &mut ConfigErrors) {
    if let Err(error) = TcpListener::bind(address) {
        errors.add_fact(setting, format!("cannot listen on {address}: {error}"));
    }
}
