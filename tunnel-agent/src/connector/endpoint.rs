//! Selects the next server and address. Names are resolved again on each try.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::timeout;
use tunnel_proto::tcp::ServerAddr;

use crate::config::ServerAddress;

/// A position in the list of servers and their addresses. The position stays after a success and
/// advances after a failure.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndpointCursor {
    server: usize,
    address: usize,
}

impl EndpointCursor {
    /// Returns the server and the address to try. The address is `None` if `by_name` leaves
    /// resolution to a proxy.
    ///
    /// # Errors
    /// Returns the server's name and why it has no address. The next call tries the next server.
    pub(crate) async fn next(
        &mut self,
        servers: &[ServerAddress],
        within: Duration,
        by_name: impl Fn(&ServerAddress) -> bool,
    ) -> Result<ServerAddr, ResolveError> {
        loop {
            let server = self.server(servers)?;
            // A name that a proxy resolves counts as one address.
            let addresses = if by_name(server) {
                vec![None]
            } else {
                match resolve(server, within).await {
                    Ok(addresses) => addresses.into_iter().map(Some).collect(),
                    Err(error) => {
                        self.next_server();
                        return Err(error);
                    }
                }
            };
            match addresses.get(self.address) {
                Some(address) => {
                    return Ok(ServerAddr {
                        name: server.to_string(),
                        address: *address,
                    });
                }
                // All addresses of this server were tried. The next server has at least one.
                None => self.next_server(),
            }
        }
    }

    /// Returns the server at the current position.
    ///
    /// # Errors
    /// Returns an error if there is no server.
    fn server<'a>(&self, servers: &'a [ServerAddress]) -> Result<&'a ServerAddress, ResolveError> {
        servers
            .get(self.server % servers.len().max(1))
            .ok_or(ResolveError::NoServer)
    }

    /// Advances after a failure of the last address.
    pub(crate) fn failed(&mut self) {
        self.address += 1;
    }

    fn next_server(&mut self) {
        self.server += 1;
        self.address = 0;
    }
}

/// The servers that a connector dials, and its position in them.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    servers: Arc<[ServerAddress]>,
    cursor: EndpointCursor,
}

impl Endpoints {
    /// Creates a list at its first server.
    pub(super) fn new(servers: Arc<[ServerAddress]>) -> Self {
        Self {
            servers,
            cursor: EndpointCursor::default(),
        }
    }

    /// Returns the list at its first server.
    pub(super) fn restarted(&self) -> Self {
        Self::new(self.servers.clone())
    }

    /// Returns whether this is a position in `servers`.
    pub(super) fn is_of(&self, servers: &[ServerAddress]) -> bool {
        *self.servers == *servers
    }

    /// Replaces the servers. The position stays at its server if that is one of the new ones.
    pub(super) fn replace(&mut self, servers: Arc<[ServerAddress]>) {
        let current = self.cursor.server(&self.servers).ok();
        let server = current.and_then(|current| servers.iter().position(|one| one == current));
        self.cursor = server.map_or_else(EndpointCursor::default, |server| EndpointCursor {
            server,
            address: self.cursor.address,
        });
        self.servers = servers;
    }

    /// Adopts a later position, unless the servers were replaced in the meantime.
    pub(super) fn advance_to(&mut self, later: Self) {
        if self.is_of(&later.servers) {
            *self = later;
        }
    }

    /// Returns the server and the address to try, see [`EndpointCursor::next`].
    pub(super) async fn next(
        &mut self,
        within: Duration,
        by_name: impl Fn(&ServerAddress) -> bool,
    ) -> Result<ServerAddr, ResolveError> {
        self.cursor.next(&self.servers, within, by_name).await
    }

    /// Advances after a failure of the last address.
    pub(super) fn failed(&mut self) {
        self.cursor.failed();
    }
}

/// The reason why a server has no address.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ResolveError {
    #[error("no server is configured")]
    NoServer,
    /// The resolver did not answer.
    #[error("{server}: name resolution timed out")]
    Timeout { server: ServerAddress },
    /// The name exists but has no address.
    #[error("{server}: name has no address")]
    Empty { server: ServerAddress },
    #[error("{server}: cannot resolve the name")]
    Lookup {
        server: ServerAddress,
        #[source]
        source: std::io::Error,
    },
}

/// Resolves `server` to at least one address.
async fn resolve(
    server: &ServerAddress,
    within: Duration,
) -> Result<Vec<SocketAddr>, ResolveError> {
    let lookup = lookup_host((server.host.as_str(), server.port));
    let server = server.clone();
    match timeout(within, lookup).await {
        Ok(Ok(found)) => {
            let mut addresses: Vec<SocketAddr> = Vec::new();
            for address in found {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            if addresses.is_empty() {
                return Err(ResolveError::Empty { server });
            }
            Ok(addresses)
        }
        Ok(Err(source)) => Err(ResolveError::Lookup { server, source }),
        Err(_elapsed) => Err(ResolveError::Timeout { server }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn name_for_a_proxy_counts_as_one_address() {
        let servers = ["cloud.invalid:1", "127.0.0.1:2", "other.invalid:3"];
        let servers = servers.map(|text| text.parse().unwrap());
        let mut endpoints = EndpointCursor::default();
        let next = async |endpoints: &mut EndpointCursor| {
            let proxied = |server: &ServerAddress| server.host.ends_with(".invalid");
            let within = Duration::from_secs(5);
            endpoints.next(&servers, within, proxied).await.unwrap()
        };
        let by_name = |name: &str| ServerAddr {
            name: name.into(),
            address: None,
        };
        assert_eq!(next(&mut endpoints).await, by_name("cloud.invalid:1"));
        assert_eq!(next(&mut endpoints).await, by_name("cloud.invalid:1"));
        endpoints.failed();
        assert!(next(&mut endpoints).await.address.is_some());
        endpoints.failed();
        assert_eq!(next(&mut endpoints).await, by_name("other.invalid:3"));
        endpoints.failed();
        assert_eq!(next(&mut endpoints).await, by_name("cloud.invalid:1"));
        let mut nowhere = EndpointCursor::default();
        let none = nowhere.next(&[], Duration::ZERO, |_| true).await;
        assert!(matches!(none, Err(ResolveError::NoServer)));
    }

    #[tokio::test]
    async fn name_that_does_not_resolve_yields_to_the_next_server() {
        let servers = ["does-not-exist.invalid:1", "127.0.0.1:2"].map(|text| text.parse().unwrap());
        let within = Duration::from_secs(5);
        let mut endpoints = EndpointCursor::default();
        let error = endpoints.next(&servers, within, |_| false).await;
        let error = error.unwrap_err();
        assert!(error.to_string().starts_with("does-not-exist.invalid:1: "));
        let next = endpoints.next(&servers, within, |_| false).await;
        assert_eq!(next.unwrap().address.unwrap().port(), 2);
    }
}
