//! Binding of addresses, with errors that name the setting.

use std::io;
use std::net::SocketAddr;

use anyhow::bail;
use tokio::net::TcpListener;

/// Maximum number of attempts to find a port that is free for TCP and UDP, if port 0 is configured.
const SAME_PORT_TRIES: usize = 16;

/// Binds a TCP listener. `setting` names the address in errors.
pub(super) async fn listen(
    address: SocketAddr,
    setting: &'static str,
) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| {
        let hint = in_use_hint(setting, &error);
        let context = format!("cannot listen on {address} ({setting}{hint})");
        anyhow::Error::new(error).context(context)
    })
}

/// Returns what to do about an extra port that another program uses. The two lists of ports name
/// targets on the nodes, so the setting that binds the ports here is not obvious.
fn in_use_hint(setting: &str, error: &io::Error) -> &'static str {
    if setting == PROXY_PORT_LISTEN && error.kind() == io::ErrorKind::AddrInUse {
        "; to list ports of nodes without listening on them here, set --proxy-port-listen off, and \
         send requests to the HTTP or HTTPS listener"
    } else {
        ""
    }
}

/// The setting of the extra ports.
pub(super) const PROXY_PORT_LISTEN: &str = "--proxy-port-listen";

/// Binds TCP and UDP to the same port number, on the first address that can be bound.
pub(super) async fn bind_both<U>(
    addresses: &[SocketAddr],
    setting: &str,
    bind_udp: impl Fn(SocketAddr) -> io::Result<U>,
) -> anyhow::Result<(TcpListener, U)> {
    let mut failures = Vec::new();
    for &address in addresses {
        for _ in 0..SAME_PORT_TRIES {
            let both = match TcpListener::bind(address).await {
                Ok(tcp) => tcp.local_addr().and_then(&bind_udp).map(|udp| (tcp, udp)),
                Err(error) => Err(error),
            };
            match both {
                Ok(both) => return Ok(both),
                // The port that the system chose for TCP may be in use for UDP. The next attempt
                // gets another one.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0 => {}
                Err(error) => {
                    failures.push(format!("{address}: {error}"));
                    break;
                }
            }
        }
    }
    bail!(
        "cannot listen on UDP and TCP ({setting}): {}",
        failures.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn extra_port_in_use_names_the_setting_that_does_without_it() {
        let used = listen(([127, 0, 0, 1], 0).into(), "--http-listen").await;
        let used = used.unwrap();
        let address = used.local_addr().unwrap();
        let text = async |setting| {
            let error = listen(address, setting).await.unwrap_err();
            format!("{error:#}")
        };
        let extra = text(PROXY_PORT_LISTEN).await;
        assert!(extra.contains("set --proxy-port-listen off"), "{extra}");
        assert!(extra.contains("in use"), "{extra}");
        let other = text("--http-listen").await;
        assert!(!other.contains("--proxy-port-listen"), "{other}");
    }
}
