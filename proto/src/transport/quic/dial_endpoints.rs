//! The endpoints of a dialer. Sessions with different servers share a socket, because an endpoint
//! has receive buffers of 2.9 MiB.
//!
//! A socket is used once for each server. If a firewall has started to drop a path, a new port is a
//! new path: a session that is dialed in parallel to a suspect one, and the dial after one that
//! failed, have another socket.

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use parking_lot::Mutex;
use quinn::{Endpoint, EndpointConfig};

use super::runtime::EndpointRuntime;
use super::socket::udp_socket;

#[derive(Debug, Default)]
pub(super) struct DialEndpoints(Mutex<Vec<DialEndpoint>>);

#[derive(Debug)]
struct DialEndpoint {
    endpoint: Endpoint,
    is_ipv4: bool,
    /// The servers that were dialed from this socket.
    dialed: HashSet<SocketAddr>,
    /// A reference for each dial that has not ended.
    dials: Arc<()>,
}

impl DialEndpoint {
    fn bind(is_ipv4: bool) -> io::Result<Self> {
        let any: SocketAddr = if is_ipv4 {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        };
        let endpoint = Endpoint::new(
            EndpointConfig::default(),
            None,
            udp_socket(any)?,
            Arc::new(EndpointRuntime::default()),
        )?;
        Ok(Self {
            endpoint,
            is_ipv4,
            dialed: HashSet::new(),
            dials: Arc::default(),
        })
    }

    fn is_in_use(&self) -> bool {
        self.endpoint.open_connections() > 0 || Arc::strong_count(&self.dials) > 1
    }
}

/// An endpoint for one dial. Held until the dial has ended.
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) endpoint: Endpoint,
    _dial: Arc<()>,
}

impl DialEndpoints {
    /// Returns an endpoint from which `server` was not dialed.
    pub(super) fn dial(&self, server: SocketAddr) -> io::Result<Dial> {
        let is_ipv4 = server.is_ipv4();
        let mut endpoints = self.0.lock();
        endpoints.retain(DialEndpoint::is_in_use);
        let found = endpoints
            .iter()
            .position(|shared| shared.is_ipv4 == is_ipv4 && !shared.dialed.contains(&server));
        let index = match found {
            Some(index) => index,
            None => {
                endpoints.push(DialEndpoint::bind(is_ipv4)?);
                endpoints.len() - 1
            }
        };
        let shared = &mut endpoints[index];
        shared.dialed.insert(server);
        Ok(Dial {
            endpoint: shared.endpoint.clone(),
            _dial: shared.dials.clone(),
        })
    }

    /// Returns the endpoints whose sessions may still have data to send.
    pub(super) fn all(&self) -> Vec<Endpoint> {
        let endpoints = self.0.lock();
        endpoints
            .iter()
            .map(|shared| shared.endpoint.clone())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn servers_share_a_socket_and_a_second_dial_of_one_has_another() {
        let endpoints = DialEndpoints::default();
        let server = |number: u8| SocketAddr::from(([127, 0, 0, number], 9));
        let port = |dial: &Dial| dial.endpoint.local_addr().unwrap().port();
        let first = endpoints.dial(server(1)).unwrap();
        let other = endpoints.dial(server(2)).unwrap();
        assert_eq!(port(&first), port(&other));
        let second = endpoints.dial(server(1)).unwrap();
        assert_ne!(port(&first), port(&second), "the path may be dropped");
        let v6 = endpoints.dial(SocketAddr::from((Ipv6Addr::LOCALHOST, 9)));
        assert_ne!(port(&first), port(&v6.unwrap()));
        // A retry after a failed dial, while another session uses the socket, and without one.
        drop((first, second));
        let again = endpoints.dial(server(1)).unwrap();
        assert_ne!(port(&again), port(&other));
        drop((again, other));
        let _alone = endpoints.dial(server(1)).unwrap();
        assert_eq!(endpoints.all().len(), 1, "unused sockets are closed");
    }
}
