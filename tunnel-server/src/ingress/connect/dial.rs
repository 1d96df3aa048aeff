//! Connections that the server dials. The server resolves a name once, checks the addresses, and
//! dials only the addresses that passed the check.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::name::Port;

use crate::config::Limit;
use crate::ingress::error::ProxyError;
use crate::ingress::outcome::Outcome;
use crate::routing::destination::DialTarget;
use crate::routing::dial_policy::{AddressClaims, DialPolicy, DialRefusal};

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 64;
/// Longest time of a lookup and all of its dials. A scraper that gives up after 10 s receives the
/// reason before that.
const WHOLE_MAX: Duration = Duration::from_secs(8);
/// Addresses of one name that the server tries.
const ADDRESSES_MAX: usize = 4;

pub(in crate::ingress) type ResolveFuture<'a> =
    Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

pub(in crate::ingress) trait Resolve: fmt::Debug + Send + Sync {
    /// Returns the addresses of a name. `permit` is held until the lookup ends. The lookup can
    /// outlive the future that waits for it. Cancel-safe.
    fn resolve<'a>(
        &'a self,
        name: &'a str,
        port: u16,
        permit: OwnedSemaphorePermit,
    ) -> ResolveFuture<'a>;
}

#[derive(Debug)]
pub(in crate::ingress) struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve<'a>(
        &'a self,
        name: &'a str,
        port: u16,
        permit: OwnedSemaphorePermit,
    ) -> ResolveFuture<'a> {
        let name = name.to_owned();
        // A lookup by the system's resolver cannot be canceled. The thread of the lookup continues
        // and keeps the permit.
        let lookup = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            Ok((name.as_str(), port).to_socket_addrs()?.collect())
        });
        Box::pin(async move { lookup.await.map_err(io::Error::other)? })
    }
}

/// Dials targets that the dial policy allows.
#[derive(Debug)]
pub struct DirectDialer {
    dial_policy: DialPolicy,
    resolver: Box<dyn Resolve>,
    lookups: Arc<Semaphore>,
    limit: Duration,
    own_ports: Vec<Port>,
}

impl DirectDialer {
    /// Creates a dialer that allows the addresses in `dial_policy`, uses the system's resolver, and
    /// dials within `limit`.
    #[must_use]
    pub fn new(dial_policy: DialPolicy, limit: Duration) -> Self {
        Self::with_resolver(dial_policy, limit, Box::new(SystemResolver))
    }

    pub(in crate::ingress) fn with_resolver(
        dial_policy: DialPolicy,
        limit: Duration,
        resolver: Box<dyn Resolve>,
    ) -> Self {
        Self {
            dial_policy,
            resolver,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            limit,
            own_ports: Vec::new(),
        }
    }

    /// Sets the ports of this server. Objects of a cluster cannot lead to these ports.
    #[must_use]
    pub fn with_own_ports(self, own_ports: Vec<Port>) -> Self {
        Self { own_ports, ..self }
    }

    pub(in crate::ingress) fn own_ports(&self) -> &[Port] {
        &self.own_ports
    }

    pub(in crate::ingress) fn dial_policy(&self) -> &DialPolicy {
        &self.dial_policy
    }

    /// Connects to one of the addresses of a target, within the dial policy and the claims of
    /// nodes. `target_label` is the target as the caller wrote it. Cancel-safe.
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(in crate::ingress) async fn dial(
        &self,
        dial_target: &DialTarget,
        port: Port,
        target_label: &str,
        claims: &AddressClaims<'_>,
    ) -> Result<TargetSocket, ProxyError> {
        if self.dial_policy.is_deny_all() {
            let text = format!(
                "{target_label} is not a node with an agent, and --connect-direct does not allow any other target"
            );
            return Err(ProxyError::new(Outcome::RefusedByPolicy, text));
        }
        let dialing = async {
            let candidates = self
                .candidates(dial_target, port, target_label, claims)
                .await?;
            let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
            let mut failure = ProxyError::new(
                Outcome::TargetRefused,
                format!("{target_label}: no address"),
            );
            for address in candidates {
                match timeout(self.limit / count, TcpStream::connect(address)).await {
                    Ok(Ok(tcp)) => return Ok(TargetSocket::new(tcp, ByteCount::default())),
                    Ok(Err(error)) => {
                        let text = format!("{target_label} ({address}): {error}");
                        failure = ProxyError::new(Outcome::TargetRefused, text);
                    }
                    Err(_elapsed) => {
                        failure = dial_timeout_error(&format!("{target_label} ({address})"))
                    }
                }
            }
            Err(failure)
        };
        // The limit covers the lookup and all addresses together.
        match timeout((self.limit * 2).min(WHOLE_MAX), dialing).await {
            Ok(dialed) => dialed,
            Err(_elapsed) => Err(dial_timeout_error(target_label)),
        }
    }

    async fn candidates(
        &self,
        dial_target: &DialTarget,
        port: Port,
        target_label: &str,
        claims: &AddressClaims<'_>,
    ) -> Result<Vec<SocketAddr>, ProxyError> {
        let resolved = match dial_target {
            DialTarget::Addresses(addresses) => addresses
                .iter()
                .map(|ip| SocketAddr::new(*ip, port.get()))
                .collect(),
            DialTarget::Name(name) => {
                let lookup = async {
                    let permit = self.lookups.clone().acquire_owned().await;
                    let permit = permit.map_err(io::Error::other)?;
                    self.resolver
                        .resolve(name.as_str(), port.get(), permit)
                        .await
                };
                let unknown = |error: &dyn fmt::Display| {
                    let text = format!("{target_label}: the name cannot be resolved: {error}");
                    ProxyError::new(Outcome::TargetRefused, text)
                };
                match timeout(self.limit, lookup).await {
                    Ok(resolved) => resolved.map_err(|error| unknown(&error))?,
                    Err(_elapsed) => return Err(unknown(&"no answer in time")),
                }
            }
        };
        let mut addresses = filter_allowed(&self.dial_policy, resolved, claims)
            .map_err(|refused| refused.failure(target_label))?;
        addresses.truncate(ADDRESSES_MAX);
        Ok(addresses)
    }
}

/// Returns the addresses that the policy allows. If there are none, returns the reason. Conflicting
/// claims take precedence over other reasons.
pub(super) fn filter_allowed(
    dial_policy: &DialPolicy,
    addresses: Vec<SocketAddr>,
    claims: &AddressClaims<'_>,
) -> Result<Vec<SocketAddr>, DialRefusal> {
    let (mut accepted, mut refused) = (Vec::new(), None);
    for address in addresses {
        match (dial_policy.check(address, claims), &refused) {
            (Ok(address), _) => accepted.push(address),
            (Err(_), Some(DialRefusal::Conflicting(_))) => {}
            (Err(why), _) => refused = Some(why),
        }
    }
    match refused {
        Some(why) if accepted.is_empty() => Err(why),
        Some(_) | None => Ok(accepted),
    }
}

fn dial_timeout_error(what: &str) -> ProxyError {
    let text = format!("{what}: did not accept the connection in time");
    ProxyError::new(Outcome::TargetTimeout, text).with_limit(Limit::TargetDialTimeout)
}

#[cfg(test)]
mod tests;
