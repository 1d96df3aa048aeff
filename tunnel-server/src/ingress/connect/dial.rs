//! Connections that the server dials. The server resolves a name once, checks the addresses, and
//! dials only the addresses that passed the check.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tunnel_process::followed::Followed;
use tunnel_process::host::is_own_address;
use tunnel_proto::dial::{Candidate, Resolve, SystemResolver, dial, in_order_of_attempts};
use tunnel_proto::egress::{SocketPeer, TargetSocket};
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::config::Limit;
use crate::ingress::error::ProxyError;
use crate::outcome::Outcome;
use crate::routing::routes::Routes;
use tunnel_routing::destination::DialTarget;
use tunnel_routing::dial_policy::{AddressClaims, DialPolicy, DialRefusal};

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 64;
/// Longest time of a lookup and all of its dials. A scraper that gives up after 10 s receives the
/// reason before that.
const WHOLE_MAX: Duration = Duration::from_secs(8);

/// Dials targets that the dial policy allows.
#[derive(Debug)]
pub struct DirectDialer {
    dial_policy: DialPolicy,
    resolver: Box<dyn Resolve>,
    limit: Duration,
    own_ports: Followed<Vec<Port>>,
}

impl DirectDialer {
    /// Creates a dialer that allows the addresses in `dial_policy`, uses the system's resolver, and
    /// dials within `limit`.
    pub fn new(dial_policy: DialPolicy, limit: Duration) -> Self {
        let resolver = Box::new(SystemResolver::new(LOOKUPS));
        Self::with_resolver(dial_policy, limit, resolver)
    }

    pub(in crate::ingress) fn with_resolver(
        dial_policy: DialPolicy,
        limit: Duration,
        resolver: Box<dyn Resolve>,
    ) -> Self {
        Self {
            dial_policy,
            resolver,
            limit,
            own_ports: Followed::default(),
        }
    }

    /// Sets the ports of this server. Objects of a cluster cannot lead to these ports.
    pub fn with_own_ports(self, own_ports: Followed<Vec<Port>>) -> Self {
        Self { own_ports, ..self }
    }

    pub(in crate::ingress) fn dial_policy(&self) -> &DialPolicy {
        &self.dial_policy
    }

    /// Connects to one of the addresses of a target, within the dial policy and the claims of
    /// nodes, which may change during the lookup of a name. `target_label` is the target as the
    /// caller wrote it, and `has_agent` returns whether a node has an agent. Cancel-safe.
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(in crate::ingress) async fn dial(
        &self,
        dial_target: &DialTarget,
        port: Port,
        target_label: &str,
        routes: &Routes,
        has_agent: &(dyn Fn(&NodeName) -> bool + Send + Sync),
    ) -> Result<TargetSocket, ProxyError> {
        if self.dial_policy.is_deny_all() {
            let text = format!(
                "{target_label} is not a node with an agent, and --connect-direct does not allow any other target"
            );
            return Err(ProxyError::new(Outcome::RefusedByPolicy, text));
        }
        // The lookup and all addresses together.
        let deadline = Instant::now() + (self.limit * 2).min(WHOLE_MAX);
        let resolved = self.resolve(dial_target, port, target_label).await?;
        let (routes, own_ports) = (routes.load(), self.own_ports.load());
        let claims = AddressClaims {
            routes: &routes,
            has_agent,
            is_own: &is_own_address,
            own_ports: &own_ports,
        };
        let allowed = filter_allowed(&self.dial_policy, resolved, &claims)
            .map_err(|refusal| ProxyError::from_dial(&refusal, target_label))?;
        let deadline = deadline.min(Instant::now() + self.limit);
        let candidates = allowed
            .into_iter()
            .map(|address| Ok::<_, DialRefusal>(Candidate::from(address)));
        match dial(candidates, deadline).await {
            Ok((tcp, _address)) => Ok(TargetSocket::new(
                tcp,
                ByteCount::default(),
                SocketPeer::Target,
            )),
            Err(error) => Err(match error.into_last() {
                Some((address, error)) if error.kind() == io::ErrorKind::TimedOut => {
                    dial_timeout_error(&format!("{target_label} ({address})"))
                }
                Some((address, error)) => {
                    let text = format!("{target_label} ({address}): {error}");
                    ProxyError::new(Outcome::TargetRefused, text)
                }
                None => {
                    let text = format!("{target_label}: no address");
                    ProxyError::new(Outcome::TargetRefused, text)
                }
            }),
        }
    }

    async fn resolve(
        &self,
        dial_target: &DialTarget,
        port: Port,
        target_label: &str,
    ) -> Result<Vec<SocketAddr>, ProxyError> {
        let name = match dial_target {
            DialTarget::Addresses(addresses) => {
                let addresses = addresses.iter();
                let addresses = addresses.map(|ip| SocketAddr::new(*ip, port.get()));
                return Ok(in_order_of_attempts(addresses));
            }
            DialTarget::Name(name) => name,
        };
        let lookup = self.resolver.resolve(name.as_str(), port.get());
        let problem = match timeout_at(Instant::now() + self.limit, lookup).await {
            Ok(Ok(resolved)) => return Ok(resolved),
            Ok(Err(error)) => error.to_string(),
            Err(_elapsed) => "no answer in time".to_owned(),
        };
        let text = format!("{target_label}: the name cannot be resolved: {problem}");
        Err(ProxyError::new(Outcome::TargetRefused, text))
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
