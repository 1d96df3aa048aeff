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
        let context = format!("cannot listen on {address} ({setting})");
        anyhow::Error::new(error).context(context)
    })
}

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
