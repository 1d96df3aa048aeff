//! Dials a target of the cloud. A name is resolved once, and only addresses that pass the checks are
//! dialed.

use std::io;
use std::net::SocketAddr;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tunnel_process::followed::Followed;
use tunnel_process::host::is_own_address;
use tunnel_proto::dial::{
    ATTEMPT_DELAY, Candidate, DialError, Resolve as _, SystemResolver, dial, split_host_port,
    staggered,
};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::Refusal;
use tunnel_proto::wire::name::Port;

use super::cloud::{self, AddressRefusal, Target};
use crate::config::SharedLimits;

/// Dials the addresses of targets.
#[derive(Debug)]
pub(super) struct CloudDialer {
    resolver: SystemResolver,
    own_ports: Followed<Vec<Port>>,
    limits: SharedLimits,
}

impl CloudDialer {
    /// Creates a dialer that dials no listener of this server, and each target within
    /// `targetDialTimeout`.
    pub(super) fn new(own_ports: Followed<Vec<Port>>, limits: SharedLimits) -> Self {
        Self {
            resolver: SystemResolver::new(LOOKUPS),
            own_ports,
            limits,
        }
    }

    /// Connects to a target, or returns the refusal for the agent. Cancel-safe.
    pub(super) async fn dial(&self, target: &Target) -> Result<(TcpStream, SocketAddr), Refusal> {
        let deadline = Instant::now() + self.limits.load().target_dial_timeout;
        let attempts = target.addresses().map(async |(index, address)| {
            let connected = self.connect(address, deadline).await?;
            target.prefer(index);
            Ok(connected)
        });
        let connected = staggered(attempts, ATTEMPT_DELAY).await;
        connected.map_err(|refusals| {
            let last = refusals.into_iter().next_back();
            last.unwrap_or_else(|| refusal(RefusalCode::TargetRefused, "no address".to_owned()))
        })
    }

    /// Resolves HOST:PORT and connects to one of its addresses.
    async fn connect(
        &self,
        text: &str,
        deadline: Instant,
    ) -> Result<(TcpStream, SocketAddr), Refusal> {
        let refused = |what: &str| refusal(RefusalCode::TargetRefused, format!("{text}: {what}"));
        let (host, port) = split_host_port(text).ok_or_else(|| refused("is not HOST:PORT"))?;
        let found = match timeout_at(deadline, self.resolver.resolve(host, port)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Err(refused(&error.to_string())),
            Err(_elapsed) => return Err(no_answer(text)),
        };
        let own_ports = self.own_ports.load();
        let candidates = found.into_iter().map(|address| {
            cloud::check(address, host, &own_ports, is_own_address).map(Candidate::from)
        });
        let dialed = dial(candidates, deadline).await;
        dialed.map_err(|error: DialError<AddressRefusal>| {
            let DialError { failures, refusals } = error;
            match (failures.into_iter().next_back(), refusals.first()) {
                (Some((address, error)), _) if error.kind() == io::ErrorKind::TimedOut => {
                    no_answer(&address.to_string())
                }
                (Some((address, error)), _) => {
                    refusal(RefusalCode::TargetRefused, format!("{address}: {error}"))
                }
                (None, Some(refused)) => refusal(RefusalCode::Policy, refused.to_string()),
                (None, None) => refused("no address"),
            }
        })
    }
}

fn no_answer(what: &str) -> Refusal {
    let detail = format!("{what}: no answer in time (server's limits.targetDialTimeout)");
    refusal(RefusalCode::TargetTimeout, detail)
}

fn refusal(code: RefusalCode, detail: String) -> Refusal {
    Refusal { code, detail }
}

/// Concurrent name lookups. Each occupies a thread while the system's resolver works.
const LOOKUPS: usize = 32;
