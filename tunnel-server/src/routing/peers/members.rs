//! The list of servers that agents receive, bounded so that it fits into one control message. Pure.

use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::control::Member;

/// What the list for agents leaves out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeftOut {
    pub servers: usize,
    pub addresses: usize,
}

impl LeftOut {
    /// Returns the line for operators, or `None` if the list is complete.
    pub fn condition(self) -> Option<String> {
        let Self { servers, addresses } = self;
        (self != Self::default()).then(|| {
            format!(
                "the list for agents lacks {servers} servers and {addresses} addresses; it has at \
                 most {REPLICAS_MAX} servers with {ADDRESSES_MAX} addresses each, and fewer long \
                 addresses; advertise fewer"
            )
        })
    }
}

/// Returns the addresses of one server that agents and other servers receive.
pub(super) fn listed_addresses(addresses: &[String]) -> Vec<String> {
    addresses
        .iter()
        .filter(|address| address.len() <= ADDRESS_LENGTH_MAX)
        .take(ADDRESSES_MAX)
        .cloned()
        .collect()
}

/// Bounds a list of members whose addresses are those of [`listed_addresses`], and returns what it
/// leaves out. The order of members and addresses stays, and each listed member has its first
/// address.
pub(super) fn bound_members(mut members: Vec<Member>) -> (Vec<Member>, LeftOut) {
    let servers = members.len().saturating_sub(REPLICAS_MAX);
    members.truncate(REPLICAS_MAX);
    let addresses: Vec<_> = members
        .iter_mut()
        .map(|member| std::mem::take(&mut member.addresses))
        .collect();
    let mut budget = ADDRESSES_BYTES_MAX;
    // The first address of each member, then the second of each, and so on.
    'budget: for index in 0..ADDRESSES_MAX {
        for (member, addresses) in members.iter_mut().zip(&addresses) {
            let Some(address) = addresses.get(index) else {
                continue;
            };
            let Some(left) = budget.checked_sub(address.len()) else {
                break 'budget;
            };
            budget = left;
            member.addresses.push(address.clone());
        }
    }
    let listed: usize = members.iter().map(|member| member.addresses.len()).sum();
    let left_out = LeftOut {
        servers,
        addresses: addresses.iter().map(Vec::len).sum::<usize>() - listed,
    };
    (members, left_out)
}

/// Addresses of one server. Agents read no more.
const ADDRESSES_MAX: usize = 8;
/// Longest address: a DNS name of 255 bytes, a colon, and a port.
const ADDRESS_LENGTH_MAX: usize = 261;
/// Bytes of all addresses in the list. One address of each of [`REPLICAS_MAX`] servers fits (16.3
/// KiB), and with the names of the servers (15.8 KiB), their zones (4 KiB) and the rest of Welcome the message stays
/// below [`CONTROL_MESSAGE_MAX`](tunnel_proto::wire::frame::CONTROL_MESSAGE_MAX).
const ADDRESSES_BYTES_MAX: usize = 24 * 1024;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::BytesMut;
    use tunnel_proto::wire::control::{ControlMessage, Message as _, Welcome};
    use tunnel_proto::wire::name::SessionId;

    use super::*;

    /// Returns a member with a name of 253 bytes.
    fn member(number: usize, addresses: Vec<String>) -> Member {
        let (label, last) = ("x".repeat(63), "x".repeat(61));
        let first = format!("s{number:02}{}", "x".repeat(60));
        Member {
            id: [first, label.clone(), label, last]
                .join(".")
                .parse()
                .unwrap(),
            addresses,
            is_leaving: false,
            zone: Some("z".repeat(63).parse().unwrap()),
        }
    }

    fn long_addresses() -> Vec<String> {
        let host = "h".repeat(255);
        (10000..10020)
            .map(|port| format!("{host}:{port}"))
            .collect()
    }

    #[test]
    fn longest_list_fits_into_welcome_with_an_address_of_each_server() {
        let long = listed_addresses(&long_addresses());
        let all = (0..REPLICAS_MAX + 6).map(|number| member(number, long.clone()));
        let (members, left_out) = bound_members(all.collect());
        assert_eq!(members.len(), REPLICAS_MAX);
        let listed: usize = members.iter().map(|member| member.addresses.len()).sum();
        assert_eq!(listed, ADDRESSES_BYTES_MAX / ADDRESS_LENGTH_MAX);
        for (number, member) in members.iter().enumerate() {
            assert!(member.id.as_str().starts_with(&format!("s{number:02}")));
            let first = long_addresses().into_iter();
            let first: Vec<_> = first.take(member.addresses.len()).collect();
            assert!(!first.is_empty() && member.addresses == first);
        }
        let (servers, addresses) = (6, REPLICAS_MAX * ADDRESSES_MAX - listed);
        assert_eq!(left_out, LeftOut { servers, addresses });
        let condition = left_out.condition().unwrap();
        assert!(condition.contains("lacks 6 servers"), "{condition}");
        let welcome = Welcome {
            version: 1,
            session: SessionId(u64::MAX),
            capabilities: vec!["renew".into()],
            streams_per_agent: u32::MAX,
            target_dial_timeout: Duration::from_secs(5),
            replica_id: members[0].id.clone(),
            members,
        };
        let mut framed = BytesMut::new();
        ControlMessage::Welcome(welcome)
            .encode(&mut framed)
            .unwrap();
    }

    #[test]
    fn ordinary_list_stays_as_it_is() {
        let addresses = |number: usize| vec![format!("192.0.2.{number}:10262"), "b:1".to_owned()];
        let all: Vec<_> = (1..=REPLICAS_MAX)
            .map(|number| member(number, addresses(number)))
            .collect();
        let bounded = bound_members(all.clone());
        assert_eq!(bounded, (all, LeftOut::default()));
        assert_eq!(bounded.1.condition(), None);
    }

    #[test]
    fn address_that_is_too_long_for_a_name_is_left_out() {
        let addresses = vec![format!("{}:1", "h".repeat(300)), "b:1".to_owned()];
        assert_eq!(listed_addresses(&addresses), ["b:1"]);
    }
}
