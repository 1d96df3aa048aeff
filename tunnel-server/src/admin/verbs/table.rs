//! Tables for lists that operators read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use comfy_table::Table;
use comfy_table::presets::NOTHING;

use crate::admin::RevocationInfo;
use crate::admin::status::NodeStatus;
use crate::ca::tokens::{TokenInfo, TokenState};
use crate::routing::known_nodes::EnrollmentKind;
use crate::store::data_dir::rfc3339;

/// The columns of the table of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NodeColumns {
    Usual,
    All,
}

/// Formats the nodes, with a line for each address that several of them have. Nodes of several
/// servers are shown with the name of the server that carries requests to them.
pub(super) fn nodes(nodes: &[NodeStatus], columns: NodeColumns, now: SystemTime) -> String {
    let has_replicas = nodes.iter().any(|node| node.replica.is_some());
    let columns: Vec<&Column> = COLUMNS
        .iter()
        .filter(|column| match column.shown {
            Shown::Always => true,
            Shown::WithReplicas => has_replicas,
            Shown::Wide => columns == NodeColumns::All,
        })
        .collect();
    let header: Vec<&str> = columns.iter().map(|column| column.header).collect();
    let mut table = new_table(&header);
    let mut conflicts: BTreeMap<IpAddr, &[String]> = BTreeMap::new();
    for node in nodes {
        for (address, names) in &node.address_conflicts {
            conflicts.insert(*address, names);
        }
        table.add_row(columns.iter().map(|column| (column.cell)(node, now)));
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

/// A column of the table of nodes.
struct Column {
    header: &'static str,
    shown: Shown,
    /// Returns the cell of a node at a time.
    cell: fn(&NodeStatus, SystemTime) -> String,
}

/// The tables that have a column.
enum Shown {
    Always,
    /// Tables in which a node has the name of a server.
    WithReplicas,
    Wide,
}

impl Column {
    const fn new(
        header: &'static str,
        shown: Shown,
        cell: fn(&NodeStatus, SystemTime) -> String,
    ) -> Self {
        Self {
            header,
            shown,
            cell,
        }
    }
}

const COLUMNS: &[Column] = &[
    Column::new("NODE", Shown::Always, |node, _| clean(&node.node)),
    Column::new("CONNECTED", Shown::Always, |node, _| connected(node)),
    Column::new("REPLICA", Shown::WithReplicas, |node, _| {
        optional(node.replica.as_deref())
    }),
    Column::new("TRANSPORT", Shown::Always, |node, _| {
        optional(node.transport.as_deref())
    }),
    Column::new("ADDRESS", Shown::Always, |node, _| {
        optional(node.address.as_deref())
    }),
    Column::new("VERSION", Shown::Always, |node, _| version(node)),
    Column::new("SINCE", Shown::Always, |node, now| {
        since(node.connected_since.as_deref(), now)
    }),
    Column::new("LAST SEEN", Shown::Always, |node, now| {
        since(node.last_seen.as_deref(), now)
    }),
    Column::new("LAST CLOSE", Shown::Always, |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.code.as_str()))
    }),
    Column::new("RTT", Shown::Always, |node, _| {
        let millis = node.rtt_millis;
        millis.map_or_else(absent, |millis| format!("{millis} ms"))
    }),
    Column::new("STREAMS", Shown::Always, |node, _| {
        of_session(node, node.streams)
    }),
    Column::new("CERTIFICATE", Shown::Always, |node, now| {
        certificate(node.certificate_not_after.as_deref(), now)
    }),
    Column::new("ADDRESSES", Shown::Always, |node, _| {
        addresses(&node.addresses)
    }),
    Column::new("CLAIMED ADDRESS", Shown::Wide, |node, _| {
        optional(node.claimed_address.as_deref())
    }),
    Column::new("ENROLLMENT", Shown::Wide, |node, _| {
        optional(node.enrollment.map(EnrollmentKind::label))
    }),
    Column::new("BYTES IN", Shown::Wide, |node, _| {
        of_session(node, node.bytes_in)
    }),
    Column::new("BYTES OUT", Shown::Wide, |node, _| {
        of_session(node, node.bytes_out)
    }),
    Column::new("CLOSED", Shown::Wide, |node, now| {
        let close = node.last_close.as_ref();
        since(close.map(|close| close.at.as_str()), now)
    }),
    Column::new("CLOSED BY", Shown::Wide, |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.by.as_str()))
    }),
    Column::new("REASON", Shown::Wide, |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.reason.as_str()))
    }),
];

pub(super) fn revocations(revocations: &[RevocationInfo]) -> String {
    if revocations.is_empty() {
        return "no node is revoked\n".into();
    }
    let mut table = new_table(&["NODE", "REVOKED"]);
    for revocation in revocations {
        table.add_row([revocation.node.to_string(), rfc3339(revocation.revoked_at)]);
    }
    finish(&table)
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

/// Returns whether the node is connected, or revoked. Any other state than `live` is shown by its name,
/// including states that a newer server may add.
fn connected(node: &NodeStatus) -> String {
    match node.state.as_deref() {
        _ if node.is_revoked() => "revoked".to_owned(),
        _ if !node.connected && node.last_seen.is_none() && node.enrollment.is_some() => {
            "enrolled".to_owned()
        }
        _ if !node.connected => "no".to_owned(),
        None | Some("live") => "yes".to_owned(),
        Some(state) => clean(state),
    }
}

/// Returns the version with a mark where it differs too much from the server's to be ignored.
fn version(node: &NodeStatus) -> String {
    let version = optional(node.version.as_deref());
    match node.version_skew {
        Some(skew) => format!("{version} ({})", skew.label()),
        None => version,
    }
}

/// Formats a number that only the server with the session knows, like the transport.
fn of_session(node: &NodeStatus, number: u64) -> String {
    if node.transport.is_some() {
        number.to_string()
    } else {
        absent()
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

/// Number of characters of a key's hash that are shown.
const KEY_SHOWN: usize = 16;
/// Maximum length of a peer's text that is shown.
const TEXT_MAX: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::{CloseStatus, VersionSkew};

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
            version_skew: Some(VersionSkew::Older),
            connected_since: Some(rfc3339(now - Duration::from_secs(7500))),
            last_seen: Some(rfc3339(now - Duration::from_secs(2))),
            rtt_millis: Some(12),
            streams: 3,
            certificate_not_after: Some(rfc3339(now + Duration::from_secs(30 * 86_400))),
            addresses: vec![shared],
            address_conflicts: conflicts.clone(),
            ..NodeStatus::default()
        };
        let absent = NodeStatus {
            node: "worker-2".into(),
            last_seen: Some(rfc3339(now - Duration::from_secs(90))),
            last_close: Some(close(now - Duration::from_secs(30))),
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
        let text = nodes(&[connected, absent, suspect], NodeColumns::Usual, now);
        let expected = "\
NODE      CONNECTED  TRANSPORT  ADDRESS            VERSION                 SINCE  LAST SEEN  LAST CLOSE  RTT    STREAMS  CERTIFICATE  ADDRESSES
worker-1  yes        quic       203.0.113.7:40000  culvert?[31m/1 (older)  2h 5m  2s         -           12 ms  3        30d 0h left  192.168.33.221
worker-2  no         -          -                  -                       -      1m 30s     dead        -      -        expired      192.168.33.221
worker-3  suspect    h2         -                  -                       -      -          -           -      0        -            -
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
        let now = SystemTime::UNIX_EPOCH;
        let text = nodes(&[own, of_other, absent], NodeColumns::Usual, now);
        let expected = "\
NODE      CONNECTED  REPLICA   TRANSPORT  ADDRESS  VERSION  SINCE  LAST SEEN  LAST CLOSE  RTT  STREAMS  CERTIFICATE  ADDRESSES
worker-1  yes        server-1  quic       -        -        -      -          -           -    2        -            -
worker-2  yes        server-2  -          -        -        -      -          -           -    -        -            -
worker-3  no         -         -          -        -        -      -          -           -    -        -            -
";
        assert_eq!(squeeze(&text), squeeze(expected), "{text}");
    }

    #[test]
    fn wide_table_has_the_reason_of_the_last_close_without_control_characters() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000);
        let absent = NodeStatus {
            node: "worker-2".into(),
            last_close: Some(close(now - Duration::from_secs(30))),
            revoked_at: Some(rfc3339(now)),
            ..NodeStatus::default()
        };
        let text = nodes(&[absent], NodeColumns::All, now);
        let row = squeeze(&text).pop().unwrap();
        assert!(row.starts_with("worker-2 revoked"), "{text}");
        assert!(row.ends_with("30s this end no sign?of life"), "{text}");
        assert!(text.lines().next().unwrap().ends_with("REASON"), "{text}");
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

    fn close(at: SystemTime) -> CloseStatus {
        CloseStatus {
            at: rfc3339(at),
            by: "this end".into(),
            code: "dead".into(),
            reason: "no sign\u{1b}of life".into(),
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
