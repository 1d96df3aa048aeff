//! Which of the addresses that servers report may be dialed: what the operator configured, and else
//! no address and no port that this agent never dials for a caller. No I/O.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tunnel_process::followed::Followed;
use tunnel_process::networks::{effective_ip, forbidden_kind};
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::Port;

use crate::config::ServerAddress;
use crate::policy::DialPolicy;

/// The servers that the operator configured, and the rules for the addresses of others. One function
/// checks the addresses that servers report and those that their names resolve to.
#[derive(Debug)]
pub(crate) struct ServerPolicy {
    configured: Arc<[ServerAddress]>,
    /// The dial policy, whose denied ports hold for servers too.
    dial_policy: Followed<DialPolicy>,
    /// A configured server is on this host, so another one may be, too.
    has_loopback: AtomicBool,
}

/// The reason why an address is not dialed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AddressError {
    #[error("{0}")]
    Syntax(String),
    #[error("{host} is {kind}")]
    NoServer { host: String, kind: &'static str },
    #[error("{0} is {1}, which is dialed only if --server has it")]
    Forbidden(IpAddr, &'static str),
    #[error("port {0} is one of --deny-ports")]
    DeniedPort(u16),
}

impl ServerPolicy {
    pub(crate) fn new(configured: &[ServerAddress], dial_policy: Followed<DialPolicy>) -> Self {
        let is_loopback = |server: &ServerAddress| {
            let ip = server.host.parse::<IpAddr>();
            ip.map_or(server.host == "localhost", |ip| {
                effective_ip(ip).is_loopback()
            })
        };
        Self {
            has_loopback: AtomicBool::new(configured.iter().any(is_loopback)),
            configured: configured.into(),
            dial_policy,
        }
    }

    /// Returns the servers that the operator configured.
    pub(crate) fn configured(&self) -> &Arc<[ServerAddress]> {
        &self.configured
    }

    /// Returns whether the operator configured the server. A proxy resolves the names of such servers
    /// alone: what it makes of the name that another server reports cannot be checked here.
    pub(crate) fn is_configured(&self, server: &ServerAddress) -> bool {
        self.configured.contains(server)
    }

    /// Checks an address of a server: one that its name resolved to, or its own.
    ///
    /// # Errors
    /// Returns an [`AddressError`] unless the operator configured the server.
    pub(crate) fn check(
        &self,
        server: &ServerAddress,
        address: IpAddr,
    ) -> Result<(), AddressError> {
        let ip = effective_ip(address);
        if self.is_configured(server) {
            if ip.is_loopback() {
                self.has_loopback.store(true, Ordering::Relaxed);
            }
            return Ok(());
        }
        let kind = match forbidden_kind(ip) {
            None if ip.is_loopback() && !self.has_loopback.load(Ordering::Relaxed) => {
                Some("loopback")
            }
            kind => kind,
        };
        match kind {
            Some(kind) => Err(AddressError::Forbidden(address, kind)),
            None => self.check_port(server.port),
        }
    }

    fn check_port(&self, port: u16) -> Result<(), AddressError> {
        let dial_policy = self.dial_policy.load();
        let is_denied = Port::new(port).is_none_or(|port| dial_policy.deny_ports.contains(port));
        if is_denied {
            return Err(AddressError::DeniedPort(port));
        }
        Ok(())
    }

    /// Returns whether an address that a server's name resolved to may be dialed.
    pub(crate) fn is_dialable(&self, server: &ServerAddress, address: SocketAddr) -> bool {
        self.check(server, address.ip()).is_ok()
    }

    /// Removes the addresses that are not `HOST:PORT`, or that may not be dialed. Also returns one
    /// line for each removed address.
    pub(super) fn dialable_members(&self, members: Vec<Member>) -> (Vec<Member>, Vec<String>) {
        let mut refused = Vec::new();
        let members = members.into_iter().map(|mut member| {
            member.addresses.retain(|address| {
                let checked = self.check_reported(address);
                if let Err(error) = &checked {
                    refused.push(format!("{}: {error}", member.id));
                }
                checked.is_ok()
            });
            member
        });
        (members.collect(), refused)
    }

    fn check_reported(&self, address: &str) -> Result<(), AddressError> {
        let server: ServerAddress = address.parse().map_err(AddressError::Syntax)?;
        if self.is_configured(&server) {
            return Ok(());
        }
        // An IPv6 address may have a zone.
        let literal = server.host.split('%').next().unwrap_or_default();
        match literal.parse::<IpAddr>() {
            Ok(ip) => self.check(&server, ip),
            Err(_name) if is_number(&server.host) => {
                let (host, kind) = (server.host, "a number");
                Err(AddressError::NoServer { host, kind })
            }
            // The addresses are checked when the name is resolved.
            Err(_name) => self.check_port(server.port),
        }
    }
}

/// Returns whether the system's resolver may read a name as an IPv4 address in an unusual form,
/// such as `0` or `0x0`.
fn is_number(host: &str) -> bool {
    let last = host.trim_end_matches('.').rsplit('.').next();
    let last = last.unwrap_or_default();
    let is_hexadecimal = last.starts_with("0x") || last.starts_with("0X");
    is_hexadecimal || last.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(configured: &[&str]) -> ServerPolicy {
        let configured: Vec<_> = configured
            .iter()
            .map(|text| text.parse().unwrap())
            .collect();
        let dial_policy = DialPolicy {
            deny_ports: "2379-2381, 10248".parse().unwrap(),
            ..DialPolicy::default()
        };
        ServerPolicy::new(&configured, dial_policy.into())
    }

    #[test]
    fn addresses_that_are_never_dialed_are_refused_unless_they_are_configured() {
        let policy = policy(&["0.0.0.0:10262", "169.254.1.1:2379"]);
        let cases = [
            ("192.0.2.1:10262", None),
            ("[2001:db8::1]:1", None),
            ("cloud.example.com:443", None),
            ("server-0x1:443", None),
            ("0.0.0.0:10262", None),
            ("169.254.1.1:2379", None),
            ("169.254.1.1:2378", Some("link-local")),
            ("169.254.169.254:80", Some("metadata")),
            ("100.100.100.200:80", Some("metadata")),
            ("[fd00:ec2::254]:80", Some("metadata")),
            ("[::ffff:169.254.169.254]:80", Some("metadata")),
            ("[64:ff9b::a9fe:a9fe]:80", Some("metadata")),
            ("[fe80::1%eth0]:1", Some("link-local")),
            ("127.0.0.1:10262", Some("loopback")),
            ("127.8.8.8:1", Some("loopback")),
            ("[::1]:10262", Some("loopback")),
            ("[::ffff:127.0.0.1]:1", Some("loopback")),
            ("192.0.2.1:2379", Some("--deny-ports")),
            ("cloud.example.com:10248", Some("--deny-ports")),
            ("0.0.0.0:1", Some("unspecified")),
            ("[::]:10262", Some("unspecified")),
            ("[::ffff:0.0.0.0]:1", Some("unspecified")),
            ("224.0.0.1:1", Some("multicast")),
            ("[ff02::1%eth0]:1", Some("multicast")),
            ("255.255.255.255:1", Some("broadcast")),
            ("0:1", Some("a number")),
            ("0x7f.1:1", Some("a number")),
            ("0.0x0:1", Some("a number")),
            ("192.0.2.1:0", Some("192.0.2.1:0")),
            ("192.0.2.1", Some("has no port")),
            ("a b:1", Some("is not HOST:PORT")),
            ("", Some("has no port")),
        ];
        for (address, refused) in cases {
            let found = policy.check_reported(address);
            let found = found.map_err(|error| error.to_string());
            match (refused, &found) {
                (None, Ok(())) => {}
                (Some(text), Err(error)) if error.contains(text) => {}
                _ => panic!("{address}: {found:?}"),
            }
        }
    }

    #[test]
    fn addresses_of_a_name_are_checked_like_those_that_are_reported() {
        let policy = policy(&["cloud.example.com:10262"]);
        let server = |text: &str| text.parse::<ServerAddress>().unwrap();
        let is_dialable =
            |name: &str, address: &str| policy.is_dialable(&server(name), address.parse().unwrap());
        for address in ["169.254.169.254:80", "127.0.0.1:80", "[::1]:80"] {
            assert!(!is_dialable("other.example.com:80", address), "{address}");
        }
        assert!(is_dialable("other.example.com:80", "192.0.2.1:80"));
        // The operator's own name may lead anywhere. On this host, other servers may be, too.
        assert!(is_dialable("cloud.example.com:10262", "127.0.0.1:10262"));
        assert!(is_dialable("other.example.com:80", "127.0.0.1:80"));
        assert!(policy.check_reported("[::1]:10263").is_ok());
        assert!(!is_dialable("other.example.com:80", "169.254.169.254:80"));
    }

    #[test]
    fn only_names_that_the_operator_wrote_are_left_to_a_proxy() {
        let policy = policy(&["cloud.example.com:10262"]);
        for (server, expected) in [
            ("cloud.example.com:10262", true),
            ("cloud.example.com:443", false),
            ("server-a.example.com:10262", false),
            ("192.0.2.1:10262", false),
        ] {
            let is_configured = policy.is_configured(&server.parse().unwrap());
            assert_eq!(is_configured, expected, "{server}");
        }
    }

    #[test]
    fn other_servers_may_be_on_this_host_if_a_configured_one_is() {
        for configured in ["127.0.0.1:10262", "[::1]:10262", "localhost:10262"] {
            let checked = policy(&[configured]).check_reported("127.0.0.2:10262");
            assert_eq!(checked, Ok(()), "{configured}");
        }
    }

    #[test]
    fn members_keep_their_other_addresses() {
        let member = |addresses: &[&str]| Member {
            id: "server-1".parse().unwrap(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            is_leaving: true,
            zone: None,
        };
        let reported = vec![member(&["a:1", "0.0.0.0:1", "b:2"]), member(&[])];
        let (members, refused) = policy(&[]).dialable_members(reported);
        assert_eq!(members, [member(&["a:1", "b:2"]), member(&[])]);
        let line = "server-1: 0.0.0.0 is unspecified, which is dialed only if --server has it";
        assert_eq!(refused, [line]);
    }
}
