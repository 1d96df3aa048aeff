//! Which of the addresses that servers report may be dialed. Pure.

use std::net::IpAddr;

use tunnel_proto::wire::control::Member;

use crate::config::ServerAddress;

/// The reason why an address is not dialed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum AddressError {
    #[error("{0}")]
    Syntax(String),
    #[error("{host} is {kind}")]
    NoServer { host: String, kind: &'static str },
}

/// Removes the addresses that are not `HOST:PORT`, or that no server can have, unless they are
/// among the `configured` servers. Also returns one line for each removed address.
pub(super) fn dialable_members(
    members: Vec<Member>,
    configured: &[ServerAddress],
) -> (Vec<Member>, Vec<String>) {
    let mut refused = Vec::new();
    let members = members.into_iter().map(|member| {
        let Member {
            id,
            mut addresses,
            is_leaving,
        } = member;
        addresses.retain(|address| {
            let checked = check(address, configured);
            if let Err(error) = &checked {
                refused.push(format!("{id}: {error}"));
            }
            checked.is_ok()
        });
        Member {
            id,
            addresses,
            is_leaving,
        }
    });
    (members.collect(), refused)
}

fn check(address: &str, configured: &[ServerAddress]) -> Result<(), AddressError> {
    let server: ServerAddress = address.parse().map_err(AddressError::Syntax)?;
    if configured.contains(&server) {
        return Ok(());
    }
    // An IPv6 address may have a zone.
    let literal = server.host.split('%').next().unwrap_or_default();
    let kind = match literal.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_unspecified() => "an unspecified address",
        Ok(ip) if ip.is_multicast() => "a multicast address",
        Ok(IpAddr::V4(ip)) if ip.is_broadcast() => "a broadcast address",
        Ok(_) => return Ok(()),
        Err(_name) if is_number(&server.host) => "a number",
        Err(_name) => return Ok(()),
    };
    let host = server.host;
    Err(AddressError::NoServer { host, kind })
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

    #[test]
    fn addresses_of_no_server_are_refused_unless_they_are_configured() {
        let configured: [ServerAddress; 1] = ["0.0.0.0:10262".parse().unwrap()];
        let cases = [
            ("192.0.2.1:10262", None),
            ("[2001:db8::1]:1", None),
            ("[fe80::1%eth0]:1", None),
            ("127.0.0.1:10262", None),
            ("cloud.example.com:443", None),
            ("server-0x1:443", None),
            ("0.0.0.0:10262", None),
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
            let found = check(address, &configured).map_err(|error| error.to_string());
            match (refused, &found) {
                (None, Ok(())) => {}
                (Some(text), Err(error)) if error.contains(text) => {}
                _ => panic!("{address}: {found:?}"),
            }
        }
    }

    #[test]
    fn members_keep_their_other_addresses() {
        let member = |addresses: &[&str]| Member {
            id: "server-1".parse().unwrap(),
            addresses: addresses.iter().map(ToString::to_string).collect(),
            is_leaving: true,
        };
        let reported = vec![member(&["a:1", "0.0.0.0:1", "b:2"]), member(&[])];
        let (members, refused) = dialable_members(reported, &[]);
        assert_eq!(members, [member(&["a:1", "b:2"]), member(&[])]);
        assert_eq!(refused, ["server-1: 0.0.0.0 is an unspecified address"]);
    }
}
