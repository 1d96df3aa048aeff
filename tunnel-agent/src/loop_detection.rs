//! Detects connections of this agent to itself. A rule of the host may redirect what the egress
//! dials to a listener for targets of the cloud: a caller in the cloud would then reach these
//! targets as this node does.
//!
//! The kernel shows a redirect at the accepting end alone. Each end registers its connection before
//! it relays, and the second one to do so finds the first one.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tunnel_proto::tcp::original_destination;

/// The connections between the egress or the ingress of this agent and others. The limits of both
/// bound their number.
#[derive(Debug, Default)]
pub(crate) struct LoopDetector(Mutex<HashMap<ConnAddrs, OpenEnds>>);

/// The addresses of a connection as its client knows them. One connection at a time has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ConnAddrs {
    source: SocketAddr,
    destination: SocketAddr,
}

/// The ends of a connection that this agent has open. A closed socket can be counted for a moment
/// after another one got its addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct OpenEnds {
    dialed: u32,
    accepted: u32,
}

#[derive(Debug, Clone, Copy)]
enum End {
    Dialed,
    Accepted,
}

/// A registered end of a connection, until it is dropped. Hold it for longer than the socket.
#[derive(Debug)]
#[must_use]
pub(crate) struct OpenEnd<'a> {
    detector: &'a LoopDetector,
    addresses: ConnAddrs,
    end: End,
}

impl LoopDetector {
    /// Registers a connection that the egress has dialed, or returns `None` if a listener of this
    /// agent has accepted the connection.
    ///
    /// # Errors
    /// When the system does not return the address of the socket.
    pub(crate) fn dialed(
        &self,
        socket: &TcpStream,
        destination: SocketAddr,
    ) -> io::Result<Option<OpenEnd<'_>>> {
        let source = socket.local_addr()?;
        Ok(self.register(ConnAddrs::new(source, destination), End::Dialed))
    }

    /// Registers a connection that a listener has accepted, or returns `None` if the egress of this
    /// agent has dialed the connection.
    ///
    /// # Errors
    /// When the system does not return the address of the socket.
    pub(crate) fn accepted(
        &self,
        socket: &TcpStream,
        peer: SocketAddr,
    ) -> io::Result<Option<OpenEnd<'_>>> {
        let destination = original_destination(socket)?;
        Ok(self.register(ConnAddrs::new(peer, destination), End::Accepted))
    }

    fn register(&self, addresses: ConnAddrs, end: End) -> Option<OpenEnd<'_>> {
        let mut open = self.0.lock();
        let ends = open.entry(addresses).or_default();
        let (own, other) = ends.own_and_other(end);
        if *other > 0 {
            return None;
        }
        *own += 1;
        Some(OpenEnd {
            detector: self,
            addresses,
            end,
        })
    }
}

impl ConnAddrs {
    /// Scopes of link-local addresses are left out: the two ends may differ in them.
    fn new(source: SocketAddr, destination: SocketAddr) -> Self {
        let canonical =
            |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
        Self {
            source: canonical(source),
            destination: canonical(destination),
        }
    }
}

impl OpenEnds {
    fn own_and_other(&mut self, end: End) -> (&mut u32, &mut u32) {
        match end {
            End::Dialed => (&mut self.dialed, &mut self.accepted),
            End::Accepted => (&mut self.accepted, &mut self.dialed),
        }
    }
}

impl Drop for OpenEnd<'_> {
    fn drop(&mut self) {
        let mut open = self.detector.0.lock();
        if let Some(ends) = open.get_mut(&self.addresses) {
            let (own, _other) = ends.own_and_other(self.end);
            *own = own.saturating_sub(1);
            if *ends == OpenEnds::default() {
                open.remove(&self.addresses);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Returns both ends of a connection, and the address of the listener.
    async fn connection() -> (TcpStream, TcpStream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (client.unwrap(), accepted.unwrap().0, address)
    }

    #[tokio::test]
    async fn second_end_of_a_connection_is_refused_until_the_first_is_closed() {
        let detector = LoopDetector::default();
        let (client, server, address) = connection().await;
        let peer = client.local_addr().unwrap();
        let dialed = detector.dialed(&client, address).unwrap();
        assert!(dialed.is_some());
        assert!(detector.accepted(&server, peer).unwrap().is_none());
        drop(dialed);
        let accepted = detector.accepted(&server, peer).unwrap();
        assert!(accepted.is_some());
        assert!(detector.dialed(&client, address).unwrap().is_none());
        drop(accepted);
        assert!(detector.0.lock().is_empty());
    }

    #[test]
    fn connection_is_known_by_both_of_its_addresses() {
        let detector = LoopDetector::default();
        let addresses = |source: &str, destination: &str| {
            ConnAddrs::new(source.parse().unwrap(), destination.parse().unwrap())
        };
        let service = addresses("10.0.0.5:40000", "10.96.0.1:443");
        let dialed = detector.register(service, End::Dialed);
        assert!(dialed.is_some());
        let mapped = addresses("[::ffff:10.0.0.5]:40000", "10.96.0.1:443");
        assert!(detector.register(mapped, End::Accepted).is_none());
        for (source, destination) in [
            // Linux gives one source port to connections with different destinations.
            ("10.0.0.5:40000", "169.254.2.1:10268"),
            ("10.0.0.5:40001", "10.96.0.1:443"),
            ("10.0.0.6:40000", "10.96.0.1:443"),
        ] {
            let other = detector.register(addresses(source, destination), End::Accepted);
            assert!(other.is_some(), "{source} {destination}");
        }
        // The new owner of the addresses registers before the closed socket is forgotten.
        let next = detector.register(service, End::Dialed);
        drop(dialed);
        assert!(detector.register(service, End::Accepted).is_none());
        drop(next);
        assert!(detector.register(service, End::Accepted).is_some());
    }
}
