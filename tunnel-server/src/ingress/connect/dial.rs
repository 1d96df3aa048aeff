//! Connections of the server's own: a name is resolved once, its addresses are judged, and exactly those are dialled.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::name::Port;

use crate::config::Limit;
use crate::ingress::caller_stream::{DoorSocket, Fate, Unfinished};
use crate::ingress::connect::request::Place;
use crate::ingress::error::{Failure, Outcome};
use crate::routing::dial_policy::{Allowed, Claims, Refused};

/// Lookups at once; each takes a thread while the system's resolver works.
const LOOKUPS: usize = 64;
/// A lookup and all of its dials take no longer: a scrape that gives up after 10 s is to have heard why.
const WHOLE_MAX: Duration = Duration::from_secs(8);
/// Addresses of one name that are tried.
const ADDRESSES_MAX: usize = 4;

/// A resolver's answer.
pub(in crate::ingress) type Resolved<'a> =
    Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// What turns names into addresses.
pub(in crate::ingress) trait Resolve: fmt::Debug + Send + Sync {
    /// The addresses of a name. `place` is kept as long as the work goes on, which may be longer than anybody waits for
    /// it. Cancel-safe.
    fn resolve<'a>(&'a self, name: &'a str, port: u16, place: OwnedSemaphorePermit)
    -> Resolved<'a>;
}

/// The system's resolver.
#[derive(Debug)]
pub(in crate::ingress) struct System;

impl Resolve for System {
    fn resolve<'a>(
        &'a self,
        name: &'a str,
        port: u16,
        place: OwnedSemaphorePermit,
    ) -> Resolved<'a> {
        let name = name.to_owned();
        // The system's resolver cannot be cancelled: its thread goes on, and so does its place.
        let lookup = tokio::task::spawn_blocking(move || {
            let _place = place;
            Ok((name.as_str(), port).to_socket_addrs()?.collect())
        });
        Box::pin(async move { lookup.await.map_err(io::Error::other)? })
    }
}

/// Dials what is allowed.
#[derive(Debug)]
pub struct Direct {
    allowed: Allowed,
    resolver: Box<dyn Resolve>,
    lookups: Arc<Semaphore>,
    limit: Duration,
    own_ports: Vec<Port>,
}

impl Direct {
    /// Dials what is `allowed`, by the system's resolver, each time within `limit`.
    #[must_use]
    pub fn new(allowed: Allowed, limit: Duration) -> Self {
        Self::resolving(allowed, limit, Box::new(System))
    }

    pub(in crate::ingress) fn resolving(
        allowed: Allowed,
        limit: Duration,
        resolver: Box<dyn Resolve>,
    ) -> Self {
        Self {
            allowed,
            resolver,
            lookups: Arc::new(Semaphore::new(LOOKUPS)),
            limit,
            own_ports: Vec::new(),
        }
    }

    /// With the ports of this server, to which no object of a cluster leads.
    #[must_use]
    pub fn with_own_ports(self, own_ports: Vec<Port>) -> Self {
        Self { own_ports, ..self }
    }

    /// The ports of this server.
    pub(in crate::ingress) fn own_ports(&self) -> &[Port] {
        &self.own_ports
    }

    /// What may be dialled.
    pub(in crate::ingress) fn allowed(&self) -> &Allowed {
        &self.allowed
    }

    /// Connects to one of a place's addresses, as far as the claims of nodes allow it; `goal` is what the caller wrote.
    /// Cancel-safe.
    ///
    /// # Errors
    /// A [`Failure`] with the answer for the caller.
    pub(in crate::ingress) async fn dial(
        &self,
        place: &Place,
        port: Port,
        goal: &str,
        claims: &Claims<'_>,
    ) -> Result<DirectSocket, Failure> {
        if self.allowed.is_nothing() {
            let text = format!(
                "{goal} is no node behind an agent, and --connect-direct allows nothing else"
            );
            return Err(Failure::new(Outcome::RefusedByPolicy, text));
        }
        let dialling = async {
            let candidates = self.candidates(place, port, goal, claims).await?;
            let count = u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
            let mut failure = Failure::new(Outcome::TargetRefused, format!("{goal}: no address"));
            for address in candidates {
                match timeout(self.limit / count, TcpStream::connect(address)).await {
                    Ok(Ok(tcp)) => return Ok(DirectSocket::new(tcp)),
                    Ok(Err(error)) => {
                        let text = format!("{goal} ({address}): {error}");
                        failure = Failure::new(Outcome::TargetRefused, text);
                    }
                    Err(_elapsed) => failure = late(&format!("{goal} ({address})")),
                }
            }
            Err(failure)
        };
        // The name and all of its addresses together.
        match timeout((self.limit * 2).min(WHOLE_MAX), dialling).await {
            Ok(dialled) => dialled,
            Err(_elapsed) => Err(late(goal)),
        }
    }

    async fn candidates(
        &self,
        place: &Place,
        port: Port,
        goal: &str,
        claims: &Claims<'_>,
    ) -> Result<Vec<SocketAddr>, Failure> {
        let found = match place {
            Place::Addresses(addresses) => addresses
                .iter()
                .map(|ip| SocketAddr::new(*ip, port.get()))
                .collect(),
            Place::Name(name) => {
                let lookup = async {
                    let place = self.lookups.clone().acquire_owned().await;
                    let place = place.map_err(io::Error::other)?;
                    self.resolver
                        .resolve(name.as_str(), port.get(), place)
                        .await
                };
                let unknown = |error: &dyn fmt::Display| {
                    let text = format!("{goal}: the name cannot be resolved: {error}");
                    Failure::new(Outcome::TargetRefused, text)
                };
                match timeout(self.limit, lookup).await {
                    Ok(found) => found.map_err(|error| unknown(&error))?,
                    Err(_elapsed) => return Err(unknown(&"no answer in time")),
                }
            }
        };
        let mut allowed =
            judge_all(&self.allowed, found, claims).map_err(|refused| refused.failure(goal))?;
        allowed.truncate(ADDRESSES_MAX);
        Ok(allowed)
    }
}

/// Those of the addresses that may be dialled, or why none may: that nodes contradict each other is said first.
pub(super) fn judge_all(
    allowed: &Allowed,
    addresses: Vec<SocketAddr>,
    claims: &Claims<'_>,
) -> Result<Vec<SocketAddr>, Refused> {
    let (mut accepted, mut refused) = (Vec::new(), None);
    for address in addresses {
        match (allowed.judge(address, claims), &refused) {
            (Ok(address), _) => accepted.push(address),
            (Err(_), Some(Refused::Contested(_))) => {}
            (Err(why), _) => refused = Some(why),
        }
    }
    match refused {
        Some(why) if accepted.is_empty() => Err(why),
        Some(_) | None => Ok(accepted),
    }
}

fn late(what: &str) -> Failure {
    let text = format!("{what}: did not accept the connection in time");
    Failure::new(Outcome::TargetTimeout, text).at(Limit::TargetDialTimeout)
}

/// A connection that the server dialled: it ends in a reset unless it was finished, and counts its bytes.
#[derive(Debug)]
pub(in crate::ingress) struct DirectSocket {
    // Dropped before the socket, so that an end without `finish` is a reset.
    unfinished: Option<Unfinished>,
    socket: DoorSocket,
    bytes: Arc<ByteCount>,
}

impl DirectSocket {
    fn new(tcp: TcpStream) -> Self {
        let fate = Arc::new(Fate::default());
        fate.upgrade();
        let unfinished = Some(fate.begin());
        Self {
            unfinished,
            socket: DoorSocket::new(tcp, fate),
            bytes: Arc::default(),
        }
    }

    /// What it has carried.
    pub(in crate::ingress) fn bytes(&self) -> Arc<ByteCount> {
        self.bytes.clone()
    }

    /// From here on a close is an end: everything was passed.
    pub(in crate::ingress) fn finish(&mut self) {
        if let Some(unfinished) = self.unfinished.take() {
            unfinished.finish();
        }
    }
}

impl AsyncRead for DirectSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(cx, out))?;
        self.bytes.add_received(out.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for DirectSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let count = ready!(Pin::new(&mut self.socket).poll_write(cx, data))?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
