//! Dials a target of the cloud. A name is resolved once, and only addresses that pass the checks are
//! dialed.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tunnel_proto::process::host::is_own_address;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::Refusal;
use tunnel_proto::wire::name::Port;

use super::cloud::{self, Target};

/// Dials the addresses of targets.
#[derive(Debug)]
pub(super) struct CloudDialer {
    lookups: Arc<Semaphore>,
    own_ports: Vec<Port>,
    limit: Duration,
}

impl CloudDialer {
    /// Creates a dialer that dials no listener of this server, and each target within `limit`.
    pub(super) fn new(own_ports: Vec<Port>, limit: Duration) -> Self {
        Self {
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            own_ports,
            limit,
        }
    }

    /// Connects to a target, or returns the refusal for the agent. Cancel-safe.
    pub(super) async fn dial(&self, target: &Target) -> Result<(TcpStream, SocketAddr), Refusal> {
        let deadline = Instant::now() + self.limit;
        let mut failure = refusal(RefusalCode::TargetRefused, "no address".to_owned());
        let addresses: Vec<_> = target.addresses().collect();
        let mut left = u32::try_from(addresses.len()).unwrap_or(u32::MAX);
        for (index, address) in addresses {
            // An address that does not answer leaves time for those after it.
            let now = Instant::now();
            let share = now + deadline.saturating_duration_since(now) / left.max(1);
            left = left.saturating_sub(1);
            match timeout_at(share, self.connect(address, share)).await {
                Ok(Ok(connected)) => {
                    target.prefer(index);
                    return Ok(connected);
                }
                Ok(Err(refused)) => failure = refused,
                Err(_elapsed) => {
                    let detail =
                        format!("{address}: no answer in time (server's limits.targetDialTimeout)");
                    failure = refusal(RefusalCode::TargetTimeout, detail);
                }
            }
        }
        Err(failure)
    }

    async fn connect(
        &self,
        address: &str,
        deadline: Instant,
    ) -> Result<(TcpStream, SocketAddr), Refusal> {
        let found = self
            .resolve(address)
            .await
            .map_err(|error| refusal(RefusalCode::TargetRefused, format!("{address}: {error}")))?;
        let host = cloud::split(address).map_or(address, |(host, _port)| host);
        let mut failure = refusal(RefusalCode::TargetRefused, format!("{address}: no address"));
        let mut left = u32::try_from(found.len()).unwrap_or(u32::MAX);
        for found in found {
            let now = Instant::now();
            let share = now + deadline.saturating_duration_since(now) / left.max(1);
            left = left.saturating_sub(1);
            let dialed = match cloud::check(found, host, &self.own_ports, is_own_address) {
                Ok(dialed) => dialed,
                Err(refused) => {
                    failure = refusal(RefusalCode::Policy, refused.to_string());
                    continue;
                }
            };
            match timeout_at(share, TcpStream::connect(dialed)).await {
                Ok(Ok(socket)) => return Ok((socket, dialed)),
                Ok(Err(error)) => {
                    failure = refusal(RefusalCode::TargetRefused, format!("{dialed}: {error}"));
                }
                Err(_elapsed) => {
                    let detail = format!("{dialed}: no answer in time");
                    failure = refusal(RefusalCode::TargetTimeout, detail);
                }
            }
        }
        Err(failure)
    }

    /// Resolves HOST:PORT by the system's resolver, whose thread keeps the permit when this future
    /// is dropped.
    async fn resolve(&self, address: &str) -> io::Result<Vec<SocketAddr>> {
        if let Ok(literal) = address.parse() {
            return Ok(vec![literal]);
        }
        let permit = self.lookups.clone().acquire_owned().await;
        let permit = permit.map_err(io::Error::other)?;
        let address = address.to_owned();
        let lookup = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            Ok(address.to_socket_addrs()?.take(ADDRESSES_MAX).collect())
        });
        lookup.await.map_err(io::Error::other)?
    }
}

fn refusal(code: RefusalCode, detail: String) -> Refusal {
    Refusal { code, detail }
}

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 32;
/// Addresses of one name that are dialed.
const ADDRESSES_MAX: usize = 4;
