//! The resolvers of this host, from `/etc/resolv.conf`, without this server itself. The file is read
//! again while the server runs, because networks and operators change it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use tracing::{info, warn};
use tunnel_process::host::is_own_address;

/// The resolvers of a host, as they were last read.
#[derive(Debug)]
pub(super) struct HostResolvers {
    path: PathBuf,
    /// Address of this server's DNS.
    listen: SocketAddr,
    /// The resolvers in use. They stay in use while the file has no other one.
    used: Vec<SocketAddr>,
    /// Entries that are this server.
    own: Vec<SocketAddr>,
    /// The line for an operator, if the file does not lead to a resolver.
    condition: Option<String>,
}

impl HostResolvers {
    /// Reads the resolvers of this host for a DNS server at `listen`.
    pub(super) fn of_host(listen: SocketAddr) -> Self {
        Self::read(RESOLV_CONF.into(), listen)
    }

    fn read(path: PathBuf, listen: SocketAddr) -> Self {
        let mut resolvers = Self {
            path,
            listen,
            used: Vec::new(),
            own: Vec::new(),
            condition: None,
        };
        resolvers.update();
        resolvers
    }

    pub(super) fn used(&self) -> &[SocketAddr] {
        &self.used
    }

    pub(super) fn condition(&self) -> Option<&String> {
        self.condition.as_ref()
    }

    /// Reads the file again. Returns `true` if other resolvers are in use. A file without a resolver
    /// changes nothing.
    pub(super) fn update(&mut self) -> bool {
        let path = self.path.display();
        let (own, others) = match nameservers(&self.path) {
            Ok(all) => all
                .into_iter()
                .partition(|resolver| is_this_server(self.listen, *resolver)),
            Err(error) => {
                self.condition =
                    Some(self.without_resolver(&format!("cannot read {path}: {error}")));
                return false;
            }
        };
        let own: Vec<SocketAddr> = own;
        for resolver in own.iter().filter(|resolver| !self.own.contains(resolver)) {
            warn!(%resolver, "left out a resolver of {path}, because it is this server");
        }
        self.own = own;
        if others.is_empty() {
            let what = if self.own.is_empty() {
                format!("{path} names no resolver")
            } else {
                format!("{path} names only this server")
            };
            self.condition = Some(self.without_resolver(&what));
            return false;
        }
        self.condition = None;
        let is_other = others != self.used;
        if is_other {
            info!(resolvers = ?others, "the resolvers of {path} are in use");
            self.used = others;
        }
        is_other
    }

    fn without_resolver(&self, what: &str) -> String {
        if self.used.is_empty() {
            return format!(
                "{what}: DNS queries for other names are refused; add a resolver, or set one with --dns-upstream"
            );
        }
        let used: Vec<_> = self.used.iter().map(ToString::to_string).collect();
        format!(
            "{what}: DNS queries for other names go to {} until the server restarts; add a resolver, or set one with \
             --dns-upstream",
            used.join(", ")
        )
    }
}

/// Returns whether the DNS server at `listen` is the resolver. A server that listens on all addresses
/// is each address of this host.
pub fn is_this_server(listen: SocketAddr, resolver: SocketAddr) -> bool {
    let (own, other) = (listen.ip().to_canonical(), resolver.ip().to_canonical());
    let is_own = own == other || own.is_unspecified() && is_own_address(other);
    listen.port() == resolver.port() && is_own
}

/// Returns the resolvers of a file, on port 53.
fn nameservers(resolv_conf: &Path) -> io::Result<Vec<SocketAddr>> {
    let text = std::fs::read_to_string(resolv_conf)?;
    let resolvers = text.lines().filter_map(|line| {
        let address = line.strip_prefix("nameserver")?.split_whitespace().next()?;
        address.parse::<IpAddr>().ok()
    });
    Ok(resolvers.map(|address| (address, PORT).into()).collect())
}

const RESOLV_CONF: &str = "/etc/resolv.conf";
const PORT: u16 = 53;

#[cfg(test)]
mod tests {
    use tunnel_process::scratch::ScratchDir;

    use super::*;

    const EVERY: &str = "0.0.0.0:53";

    /// Writes the file and reads it, as the DNS server at an address does.
    struct Fixture {
        path: PathBuf,
        resolvers: HostResolvers,
        _scratch: ScratchDir,
    }

    impl Fixture {
        fn new(listen: &str, text: &str) -> Self {
            let scratch = ScratchDir::new().unwrap();
            let path = scratch.file("resolv.conf", text).unwrap();
            Self {
                resolvers: HostResolvers::read(path.clone(), listen.parse().unwrap()),
                path,
                _scratch: scratch,
            }
        }

        fn rewritten(&mut self, text: &str) -> bool {
            std::fs::write(&self.path, text).unwrap();
            self.resolvers.update()
        }

        /// Returns the resolvers in use, and the start of the condition.
        fn state(&self) -> (String, String) {
            let used: Vec<_> = self
                .resolvers
                .used()
                .iter()
                .map(ToString::to_string)
                .collect();
            let condition = self.resolvers.condition().cloned().unwrap_or_default();
            let condition = condition.replace(&*self.path.to_string_lossy(), "FILE");
            let shown = condition.split(';').next().unwrap_or_default().to_owned();
            (used.join(" "), shown)
        }
    }

    #[test]
    fn resolvers_of_the_host_are_read_as_resolvers_do_and_without_this_server() {
        let text = "# nameserver 192.0.2.9\nsearch a b\nnameserver 192.0.2.1 \nnameserver\t2001:db8::1\nnameserver x\n\
                    nameserver\noptions ndots:5\n";
        for (listen, text, used, condition) in [
            (EVERY, text, "192.0.2.1:53 [2001:db8::1]:53", ""),
            (
                EVERY,
                "nameserver 127.0.0.1\nnameserver 192.0.2.1\n",
                "192.0.2.1:53",
                "",
            ),
            (
                "[::]:53",
                "nameserver 127.0.0.7\nnameserver 192.0.2.1\n",
                "192.0.2.1:53",
                "",
            ),
            (
                "10.77.0.1:53",
                "nameserver 10.77.0.1\nnameserver 127.0.0.1\n",
                "127.0.0.1:53",
                "",
            ),
            (
                "127.0.0.1:5353",
                "nameserver 127.0.0.1\n",
                "127.0.0.1:53",
                "",
            ),
            (
                "10.77.0.1:53",
                "nameserver 10.77.0.1\n",
                "",
                "FILE names only this server: DNS queries for other names are refused",
            ),
            (
                EVERY,
                "",
                "",
                "FILE names no resolver: DNS queries for other names are refused",
            ),
        ] {
            let fixture = Fixture::new(listen, text);
            let expected = (used.to_owned(), condition.to_owned());
            assert_eq!(fixture.state(), expected, "{listen} {text:?}");
        }
    }

    #[test]
    fn a_changed_file_is_followed_and_one_without_resolver_changes_nothing() {
        let mut fixture = Fixture::new("10.77.0.1:53", "nameserver 192.0.2.1\n");
        assert!(!fixture.rewritten("nameserver 192.0.2.1\n# the same\n"));
        assert!(fixture.rewritten("nameserver 10.77.0.1\nnameserver 192.0.2.2\n"));
        assert_eq!(fixture.state(), ("192.0.2.2:53".into(), String::new()));
        let stays = "DNS queries for other names go to 192.0.2.2:53 until the server restarts";
        for (text, what) in [
            ("nameserver 10.77.0.1\n", "FILE names only this server"),
            ("", "FILE names no resolver"),
        ] {
            assert!(!fixture.rewritten(text));
            let expected = ("192.0.2.2:53".into(), format!("{what}: {stays}"));
            assert_eq!(fixture.state(), expected);
        }
        std::fs::remove_file(&fixture.path).unwrap();
        assert!(!fixture.resolvers.update());
        assert!(fixture.state().1.starts_with("cannot read FILE"));
        assert!(fixture.rewritten("nameserver 192.0.2.3\n"));
        assert_eq!(fixture.state(), ("192.0.2.3:53".into(), String::new()));
    }
}
