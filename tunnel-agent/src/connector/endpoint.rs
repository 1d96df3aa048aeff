//! Selects the next server and address. Names are resolved again on each try.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tunnel_proto::dial::{Resolve as _, SystemResolver};
use tunnel_proto::tcp::ServerAddr;

use crate::config::ServerAddress;

/// A position in a list of servers, which may change, and in the addresses of a server. The
/// position stays after a success and advances after a failure.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndpointCursor {
    /// The server to try while it is in the list. Without one, the first that has not failed.
    current: Option<ServerAddress>,
    /// Number of addresses of the current server that failed.
    failed_addresses: usize,
    /// Whether the last dial was to the last address of the current server.
    is_last_address: bool,
    /// The address after that of the last dial, if it is of the other family.
    other_family: Option<SocketAddr>,
    /// Servers of which all addresses failed since the start of the list. A server that leaves the
    /// list and returns is not tried again before the end, so that it cannot keep the others from
    /// being tried.
    failed_servers: Vec<ServerAddress>,
    /// Whether the list was restarted before its end.
    is_restarted: bool,
}

impl EndpointCursor {
    /// Returns the server and the address to try. The address is `None` if `by_name` leaves
    /// resolution to a proxy, and else one that `is_dialable` admits.
    ///
    /// # Errors
    /// Returns the server's name and why it has no address. The next call tries the next server.
    pub(crate) async fn next(
        &mut self,
        servers: &[ServerAddress],
        within: Duration,
        by_name: impl Fn(&ServerAddress) -> bool,
        is_dialable: impl Fn(&ServerAddress, SocketAddr) -> bool,
    ) -> Result<ServerAddr, ResolveError> {
        loop {
            let server = self.server(servers)?;
            // A name that a proxy resolves counts as one address.
            let addresses = if by_name(server) {
                vec![None]
            } else {
                let resolved = resolve(server, within).await;
                let dialable = resolved.and_then(|mut addresses| {
                    addresses.retain(|address| is_dialable(server, *address));
                    let server = server.clone();
                    (!addresses.is_empty())
                        .then_some(addresses)
                        .ok_or(ResolveError::Forbidden { server })
                });
                match dialable {
                    Ok(addresses) => addresses.into_iter().map(Some).collect(),
                    Err(error) => {
                        self.next_server();
                        return Err(error);
                    }
                }
            };
            match addresses.get(self.failed_addresses) {
                Some(address) => {
                    self.is_last_address = self.failed_addresses + 1 == addresses.len();
                    self.other_family = other_family(&addresses, self.failed_addresses);
                    return Ok(ServerAddr {
                        name: server.to_string(),
                        address: *address,
                    });
                }
                // The name has fewer addresses than before, and all were tried.
                None => self.next_server(),
            }
        }
    }

    /// Returns the server at the current position. After the last server the list starts again.
    ///
    /// # Errors
    /// Returns an error if there is no server.
    fn server<'a>(
        &mut self,
        servers: &'a [ServerAddress],
    ) -> Result<&'a ServerAddress, ResolveError> {
        let current = self.current.as_ref();
        if let Some(server) = servers.iter().find(|server| current == Some(*server)) {
            return Ok(server);
        }
        if self.failed_addresses > 0 {
            self.next_server();
        }
        let untried = servers
            .iter()
            .find(|server| !self.failed_servers.contains(server));
        let server = match untried {
            Some(server) => server,
            None => {
                self.failed_servers.clear();
                self.is_restarted = false;
                servers.first().ok_or(ResolveError::NoServer)?
            }
        };
        self.current = Some(server.clone());
        self.failed_addresses = 0;
        self.is_last_address = false;
        Ok(server)
    }

    /// Advances after a failure of the last address.
    pub(crate) fn failed(&mut self) {
        self.failed_addresses += 1;
        if self.is_last_address {
            self.next_server();
        }
    }

    fn next_server(&mut self) {
        self.failed_servers.extend(self.current.take());
        self.failed_addresses = 0;
        self.is_last_address = false;
    }

    fn has_failures(&self) -> bool {
        self.failed_addresses > 0 || !self.failed_servers.is_empty()
    }
}

/// The servers that a connector dials, and its position in them.
#[derive(Debug, Clone)]
pub(super) struct Endpoints {
    servers: Arc<[ServerAddress]>,
    cursor: EndpointCursor,
    /// Number of restarts that discarded failures.
    restarts: u64,
}

impl Endpoints {
    /// Creates a list at its first server.
    pub(super) fn new(servers: Arc<[ServerAddress]>) -> Self {
        let cursor = EndpointCursor {
            current: servers.first().cloned(),
            ..EndpointCursor::default()
        };
        Self {
            servers,
            cursor,
            restarts: 0,
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

    /// Replaces the servers. The position stays at its server if that is one of the new ones, and
    /// otherwise goes to the first server that has not failed.
    pub(super) fn replace(&mut self, servers: Arc<[ServerAddress]>) {
        let failed = &mut self.cursor.failed_servers;
        if failed.len() > servers.len().saturating_add(REMOVED_MAX) {
            failed.retain(|server| servers.contains(server));
        }
        self.servers = servers;
    }

    /// Goes to the first server, so that it is dialed next. Failures are discarded at most once
    /// until the end of the list: a cause that repeats cannot keep the last servers from being
    /// tried.
    pub(super) fn restart_once(&mut self) {
        let has_failures = self.cursor.has_failures();
        if has_failures && self.cursor.is_restarted {
            return;
        }
        self.cursor = EndpointCursor {
            is_restarted: has_failures || self.cursor.is_restarted,
            ..EndpointCursor::default()
        };
        self.restarts += u64::from(has_failures);
    }

    /// Adopts the position after a failed dial, unless the list was restarted in the meantime. The
    /// servers may have been replaced.
    pub(super) fn advance_to(&mut self, later: Self) {
        if self.restarts == later.restarts {
            self.cursor = later.cursor;
        }
    }

    /// Stays at the position of a dial that gave a ready session.
    pub(super) fn record_ready(&mut self, mut dialed: Self) {
        if dialed.cursor.server(&dialed.servers).is_ok() {
            self.advance_to(dialed);
        }
        self.cursor.is_restarted = false;
    }

    /// Returns whether all servers have failed since the start of the list.
    pub(super) fn is_at_end(&self) -> bool {
        let failed = &self.cursor.failed_servers;
        self.servers.iter().all(|server| failed.contains(server))
    }

    /// Returns the server and the address to try, see [`EndpointCursor::next`].
    pub(super) async fn next(
        &mut self,
        within: Duration,
        by_name: impl Fn(&ServerAddress) -> bool,
        is_dialable: impl Fn(&ServerAddress, SocketAddr) -> bool,
    ) -> Result<ServerAddr, ResolveError> {
        self.cursor
            .next(&self.servers, within, by_name, is_dialable)
            .await
    }

    /// Returns the address that may be dialed in addition to `remote`, the last one of
    /// [`Self::next`], when that does not answer at once: the next one, if it is of the other family.
    pub(super) fn other_family(&self, remote: &ServerAddr) -> Option<ServerAddr> {
        self.cursor.other_family.map(|address| ServerAddr {
            name: remote.name.clone(),
            address: Some(address),
        })
    }

    /// Advances after a failure of the last address.
    pub(super) fn failed(&mut self) {
        if self.cursor.server(&self.servers).is_ok() {
            self.cursor.failed();
        }
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
    /// The name of a server that another one reported leads to addresses that are never dialed.
    #[error("{server}: the name has only addresses that are dialed if --server has them")]
    Forbidden { server: ServerAddress },
    #[error("{server}: cannot resolve the name")]
    Lookup {
        server: ServerAddress,
        #[source]
        source: std::io::Error,
    },
}

/// Resolves `server` to at least one address.
pub(crate) async fn resolve(
    server: &ServerAddress,
    within: Duration,
) -> Result<Vec<SocketAddr>, ResolveError> {
    // One lookup for each dial.
    let resolver = SystemResolver::new(1);
    let lookup = resolver.resolve(&server.host, server.port);
    let found = timeout(within, lookup).await;
    let server = server.clone();
    match found {
        Ok(Ok(found)) if found.is_empty() => Err(ResolveError::Empty { server }),
        Ok(Ok(found)) => Ok(found),
        Ok(Err(source)) => Err(ResolveError::Lookup { server, source }),
        Err(_elapsed) => Err(ResolveError::Timeout { server }),
    }
}

/// Returns the address after that at `index`, if it is of the other family. `None` in `addresses` is
/// a name that a proxy resolves.
fn other_family(addresses: &[Option<SocketAddr>], index: usize) -> Option<SocketAddr> {
    let address = (*addresses.get(index)?)?;
    let following = (*addresses.get(index + 1)?)?;
    (address.is_ipv6() != following.is_ipv6()).then_some(following)
}

/// Failed servers that are remembered after they left the list: those that the other connectors of
/// a set may hold and lose, with some addresses each.
const REMOVED_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = Duration::from_secs(5);

    fn any(_: &ServerAddress, _: SocketAddr) -> bool {
        true
    }

    fn servers(ports: &[u16]) -> Arc<[ServerAddress]> {
        let server = |port: &u16| format!("127.0.0.1:{port}").parse().unwrap();
        ports.iter().map(server).collect()
    }

    /// Dials the next address, changes the list in the meantime, and records that the dial failed.
    async fn dial(endpoints: &mut Endpoints, change: impl FnOnce(&mut Endpoints)) -> u16 {
        let mut dialed = endpoints.clone();
        let remote = dialed.next(WITHIN, |_| false, any).await.unwrap();
        change(endpoints);
        dialed.failed();
        endpoints.advance_to(dialed);
        remote.address.unwrap().port()
    }

    /// Another connector has a session with the third server and loses it, again and again.
    #[tokio::test]
    async fn server_that_comes_and_goes_keeps_no_other_from_being_tried() {
        let (all, others) = (servers(&[1, 2, 3, 4, 5]), servers(&[1, 2, 4, 5]));
        let mut endpoints = Endpoints::new(all.clone());
        let mut ports = Vec::new();
        for _ in 0..6 {
            let port = dial(&mut endpoints, |endpoints| {
                endpoints.replace(others.clone());
            });
            ports.push(port.await);
            endpoints.replace(all.clone());
        }
        assert_eq!(ports, [1, 2, 3, 4, 5, 1]);
        // The server is absent whenever another one has failed.
        ports.clear();
        for list in [&all, &others, &all, &others, &all, &others] {
            endpoints.replace(list.clone());
            ports.push(dial(&mut endpoints, |_| {}).await);
        }
        assert_eq!(ports, [2, 4, 3, 5, 1, 2]);
    }

    #[tokio::test]
    async fn list_that_is_restarted_again_and_again_is_dialed_to_its_end() {
        let mut endpoints = Endpoints::new(servers(&[1, 2, 3]));
        let mut ports = Vec::new();
        for _ in 0..8 {
            ports.push(dial(&mut endpoints, Endpoints::restart_once).await);
            endpoints.restart_once();
        }
        assert_eq!(ports, [1, 1, 2, 3, 1, 1, 2, 3]);
    }

    #[tokio::test]
    async fn new_first_server_of_a_restarted_list_is_dialed_next() {
        let mut endpoints = Endpoints::new(servers(&[1]));
        endpoints.replace(servers(&[2, 1]));
        endpoints.restart_once();
        assert_eq!(dial(&mut endpoints, |_| {}).await, 2);
        assert_eq!(dial(&mut endpoints, |_| {}).await, 1);
    }

    #[test]
    fn failed_servers_that_left_the_list_are_bounded() {
        let mut endpoints = Endpoints::new(servers(&[1]));
        for port in 1..1000 {
            endpoints.replace(servers(&[port]));
            endpoints.failed();
            endpoints.cursor.next_server();
            assert!(endpoints.cursor.failed_servers.len() <= REMOVED_MAX + 2);
        }
    }

    #[test]
    fn address_of_the_other_family_is_dialed_beside_a_silent_one() {
        let addresses = ["[::1]:1", "1.1.1.1:1", "1.1.1.2:1"];
        let addresses = addresses.map(|text| Some(text.parse().unwrap()));
        assert_eq!(other_family(&addresses, 0), addresses[1]);
        assert_eq!(other_family(&addresses, 1), None);
        assert_eq!(other_family(&addresses, 2), None);
        assert_eq!(other_family(&[None], 0), None);
    }

    #[tokio::test]
    async fn name_for_a_proxy_counts_as_one_address() {
        let servers = ["cloud.invalid:1", "127.0.0.1:2", "other.invalid:3"];
        let servers = servers.map(|text| text.parse().unwrap());
        let mut endpoints = EndpointCursor::default();
        let next = async |endpoints: &mut EndpointCursor| {
            let proxied = |server: &ServerAddress| server.host.ends_with(".invalid");
            let within = Duration::from_secs(5);
            endpoints
                .next(&servers, within, proxied, any)
                .await
                .unwrap()
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
        let none = nowhere.next(&[], Duration::ZERO, |_| true, any).await;
        assert!(matches!(none, Err(ResolveError::NoServer)));
    }

    #[tokio::test]
    async fn name_with_addresses_that_are_not_dialed_yields_to_the_next_server() {
        let servers = ["localhost:1", "127.0.0.1:2"].map(|text| text.parse().unwrap());
        let is_dialable = |server: &ServerAddress, _| server.host != "localhost";
        let mut endpoints = EndpointCursor::default();
        let error = endpoints.next(&servers, WITHIN, |_| false, is_dialable);
        let error = error.await.unwrap_err().to_string();
        assert!(
            error.starts_with("localhost:1: the name has only"),
            "{error}"
        );
        let next = endpoints.next(&servers, WITHIN, |_| false, is_dialable);
        assert_eq!(next.await.unwrap().address.unwrap().port(), 2);
    }

    #[tokio::test]
    async fn name_that_does_not_resolve_yields_to_the_next_server() {
        let servers = ["does-not-exist.invalid:1", "127.0.0.1:2"].map(|text| text.parse().unwrap());
        let within = Duration::from_secs(5);
        let mut endpoints = EndpointCursor::default();
        let error = endpoints.next(&servers, within, |_| false, any).await;
        let error = error.unwrap_err();
        assert!(error.to_string().starts_with("does-not-exist.invalid:1: "));
        let next = endpoints.next(&servers, within, |_| false, any).await;
        assert_eq!(next.unwrap().address.unwrap().port(), 2);
    }
}
