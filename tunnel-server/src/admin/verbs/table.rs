//! Tables for lists that operators read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use comfy_table::Table;
use comfy_table::presets::NOTHING;

use crate::admin::status::NodeStatus;
use crate::ca::tokens::{TokenInfo, TokenState};
use crate::store::data_dir::rfc3339;

/// Formats the nodes, with a line for each address that several of them have. Nodes of several
/// servers are shown with the name of the server that carries requests to them.
pub(super) fn nodes(nodes: &[NodeStatus], now: SystemTime) -> String {
    if nodes.is_empty() {
        return "no node is known; 'tunnel-server token create --node NAME' makes one\n".into();
    }
    let has_replicas = nodes.iter().any(|node| node.replica.is_some());
    let mut header = vec![
        "NODE",
        "CONNECTED",
        "TRANSPORT",
        "ADDRESS",
        "VERSION",
        "SINCE",
        "RTT",
        "STREAMS",
        "CERTIFICATE",
        "ADDRESSES",
    ];
    if has_replicas {
        header.insert(REPLICA_COLUMN, "REPLICA");
    }
    let mut table = new_table(&header);
    let mut conflicts: BTreeMap<IpAddr, &[String]> = BTreeMap::new();
    for node in nodes {
        for (address, names) in &node.address_conflicts {
            conflicts.insert(*address, names);
        }
        let mut row = vec![
            clean(&node.node),
            connected(node),
            optional(node.transport.as_deref()),
            optional(node.address.as_deref()),
            optional(node.version.as_deref()),
            since(node.connected_since.as_deref(), now),
            node.rtt_millis
                .map_or_else(absent, |millis| format!("{millis} ms")),
            // Only the server with the session knows the transport and the streams.
            if node.transport.is_some() {
                node.streams.to_string()
            } else {
                absent()
            },
            certificate(node.certificate_not_after.as_deref(), now),
            addresses(&node.addresses),
        ];
        if has_replicas {
            row.insert(REPLICA_COLUMN, optional(node.replica.as_deref()));
        }
        table.add_row(row);
    }
    let mut text = finish(&table);
    for (address, names) in conflicts {
        let names: Vec<String> = names.iter().map(|name| clean(name)).collect();
        let _infallible = writeln!(
            text,
            "{address} is the address of {}: reach them by name",
            names.join(", ")
        );
    }
    text
}

pub(super) fn tokens(tokens: &[TokenInfo]) -> String {
    if tokens.is_empty() {
        return "there are no join tokens\n".into();
    }
    let mut table = new_table(&["ID", "NODE", "STATE", "EXPIRES", "USED BY KEY", "ADDRESSES"]);
    for token in tokens {
        let state = match token.state {
            TokenState::Active => "active",
            TokenState::Used => "used",
            TokenState::Expired => "expired",
            TokenState::Revoked => "revoked",
        };
        let key = token
            .used_by
            .as_deref()
            .and_then(|key| key.get(..KEY_SHOWN));
        table.add_row([
            clean(&token.id),
            token.node.to_string(),
            state.to_owned(),
            rfc3339(token.expires),
            optional(key),
            addresses(&token.ips),
        ]);
    }
    finish(&table)
}

fn new_table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table
}

fn finish(table: &Table) -> String {
    let mut text = table.trim_fmt();
    text.push('\n');
    text
}

fn absent() -> String {
    "-".into()
}

fn optional(text: Option<&str>) -> String {
    text.map_or_else(absent, clean)
}

fn addresses(addresses: &[IpAddr]) -> String {
    if addresses.is_empty() {
        return absent();
    }
    let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    texts.join(", ")
}

/// Returns text of a peer without terminal control characters.
fn clean(text: &str) -> String {
    text.chars()
        .take(TEXT_MAX)
        .map(|character| {
            if character.is_control() {
                '?'
            } else {
                character
            }
        })
        .collect()
}

/// Returns whether the node is connected. Any other state than `live` is shown by its name,
/// including states that a newer server may add.
fn connected(node: &NodeStatus) -> String {
    match node.state.as_deref() {
        _ if !node.connected => "no".to_owned(),
        None | Some("live") => "yes".to_owned(),
        Some(state) => clean(state),
    }
}

fn since(text: Option<&str>, now: SystemTime) -> String {
    let age = text
        .and_then(|text| humantime::parse_rfc3339(text).ok())
        .map(|time| now.duration_since(time).unwrap_or(Duration::ZERO));
    age.map_or_else(|| optional(text), short)
}

fn certificate(text: Option<&str>, now: SystemTime) -> String {
    match text.and_then(|text| humantime::parse_rfc3339(text).ok()) {
        None => optional(text),
        Some(end) => match end.duration_since(now) {
            Ok(left) if !left.is_zero() => format!("{} left", short(left)),
            Ok(_) | Err(_) => "expired".into(),
        },
    }
}

/// Formats a duration in its two largest units.
fn short(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    if days > 0 {
        format!("{days}d {hours}h")
    } else if hours > 0 {
        format!("{hours}h {minutes}m")
    } else if minutes > 0 {
        format!("{minutes}m {}s", seconds % 60)
    } else {
        format!("{seconds}s")
    }
}

/// Position of the column with the name of a server, after `CONNECTED`.
const REPLICA_COLUMN: usize = 2;
/// Number of characters of a key's hash that are shown.
const KEY_SHOWN: usize = 16;
/// Maximum length of a peer's text that is shown.
const TEXT_MAX: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_shown_with_shared_addresses_below() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000);
        let shared = "192.168.33.221".parse().unwrap();
        let conflicts: BTreeMap<IpAddr, Vec<String>> =
            [(shared, vec!["worker-1".into(), "worker-2".into()])].into();
        let connected = NodeStatus {
            node: "worker-1".into(),
            connected: true,
            transport: Some("quic".into()),
            state: Some("live".into()),
            address: Some("203.0.113.7:40000".into()),
            version: Some("culvert\u{1b}[31m/1".into()),
            connected_since: Some(rfc3339(now - Duration::from_secs(7500))),
            rtt_millis: Some(12),
            streams: 3,
            certificate_not_after: Some(rfc3339(now + Duration::from_secs(30 * 86_400))),
            addresses: vec![shared],
            address_conflicts: conflicts.clone(),
            ..NodeStatus::default()
        };
        let absent = NodeStatus {
            node: "worker-2".into(),
            certificate_not_after: Some(rfc3339(now)),
            addresses: vec![shared],
            address_conflicts: conflicts,
            ..NodeStatus::default()
        };
        let suspect = NodeStatus {
            node: "worker-3".into(),
            connected: true,
            transport: Some("h2".into()),
            state: Some("suspect".into()),
            ..NodeStatus::default()
        };
        let text = nodes(&[connected, absent, suspect], now);
        let expected = "\
NODE      CONNECTED  TRANSPORT  ADDRESS            VERSION          SINCE  RTT    STREAMS  CERTIFICATE  ADDRESSES
worker-1  yes        quic       203.0.113.7:40000  culvert?[31m/1   2h 5m  12 ms  3        30d 0h left  192.168.33.221
worker-2  no         -          -                  -                -      -      -        expired      192.168.33.221
worker-3  suspect    h2         -                  -                -      -      0        -            -
192.168.33.221 is the address of worker-1, worker-2: reach them by name
";
        assert_eq!(squeeze(&text), squeeze(expected), "{text}");
        assert!(
            text.lines()
                .all(|line| !line.ends_with(' ') && !line.starts_with(' ')),
            "{text}"
        );
    }

    #[test]
    fn nodes_of_several_servers_have_a_column_for_the_server() {
        let own = NodeStatus {
            node: "worker-1".into(),
            connected: true,
            replica: Some("server-1".into()),
            transport: Some("quic".into()),
            streams: 2,
            ..NodeStatus::default()
        };
        let of_other = NodeStatus {
            node: "worker-2".into(),
            connected: true,
            replica: Some("server-2".into()),
            ..NodeStatus::default()
        };
        let absent = NodeStatus {
            node: "worker-3".into(),
            ..NodeStatus::default()
        };
        let text = nodes(&[own, of_other, absent], SystemTime::UNIX_EPOCH);
        let expected = "\
NODE      CONNECTED  REPLICA   TRANSPORT  ADDRESS  VERSION  SINCE  RTT  STREAMS  CERTIFICATE  ADDRESSES
worker-1  yes        server-1  quic       -        -        -      -    2        -            -
worker-2  yes        server-2  -          -        -        -      -    -        -            -
worker-3  no         -         -          -        -        -      -    -        -            -
";
        assert_eq!(squeeze(&text), squeeze(expected), "{text}");
    }

    #[test]
    fn tokens_are_shown_without_their_secret() {
        let token = TokenInfo {
            id: "abcdef012345".into(),
            node: "worker-1".parse().unwrap(),
            ips: vec![],
            created: SystemTime::UNIX_EPOCH,
            expires: SystemTime::UNIX_EPOCH + Duration::from_secs(60),
            used_by: Some("ab".repeat(32)),
            state: TokenState::Used,
        };
        let text = tokens(&[token]);
        let row = "abcdef012345  worker-1  used   1970-01-01T00:01:00Z  abababababababab  -";
        assert!(text.contains(row), "{text}");
        assert!(tokens(&[]).contains("no join tokens"));
    }

    #[test]
    fn durations_have_two_units_at_most() {
        for (seconds, text) in [
            (0, "0s"),
            (59, "59s"),
            (61, "1m 1s"),
            (3_700, "1h 1m"),
            (90_000, "1d 1h"),
        ] {
            assert_eq!(short(Duration::from_secs(seconds)), text);
        }
    }

    /// Returns the lines with one space between columns.
    fn squeeze(text: &str) -> Vec<String> {
        let lines = text.lines();
        lines
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    }
}
