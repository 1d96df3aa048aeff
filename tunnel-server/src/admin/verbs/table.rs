//! Tables for lists that operators read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use tunnel_process::name_list::NAMES_SHOWN_MAX;
use tunnel_process::telemetry::is_hidden;

use crate::admin::RevocationInfo;
use crate::admin::failures::FailureStatus;
use crate::admin::pages::NodesPage;
use crate::admin::status::{ListedNode, NodeState, NodeStatus};
use tunnel_ca::tokens::{TokenInfo, TokenState};
use tunnel_store::data_dir::rfc3339;
use tunnel_store::known_nodes::EnrollmentKind;

/// How a table of nodes is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableStyle {
    /// All columns, as wide as their cells, instead of those that fit [`WIDTH`].
    pub(super) is_wide: bool,
    pub(super) has_header: bool,
    /// States are colored.
    pub(super) has_color: bool,
}

/// A table of nodes that is printed page by page. Columns of a wide table are as wide as the entries so
/// far need, so a page may be wider than the one before it. The columns of a usual one have the widths
/// of its first page, and cells that do not fit are cut. Nodes of several servers are shown with the
/// name of the server that carries requests to them.
#[derive(Debug)]
pub(super) struct NodeTable {
    style: TableStyle,
    widths: Vec<usize>,
    /// Addresses that several nodes have, with some of these.
    conflicts: BTreeMap<IpAddr, Vec<String>>,
    has_more_conflicts: bool,
}

impl NodeTable {
    pub(super) fn new(style: TableStyle) -> Self {
        Self {
            style,
            widths: Vec::new(),
            conflicts: BTreeMap::new(),
            has_more_conflicts: false,
        }
    }

    /// Returns the rows of some nodes, the first time below the header.
    pub(super) fn rows(&mut self, page: &NodesPage, now: SystemTime) -> String {
        let all = if self.style.is_wide { WIDE } else { USUAL };
        let shown = |column: &&Column| page.has_replicas || !column.needs_replicas;
        let columns: Vec<&Column> = all.iter().filter(shown).collect();
        let is_first = self.widths.is_empty();
        let header = columns
            .iter()
            .map(|column| column.header.to_owned())
            .collect();
        let header = Some(header).filter(|_| is_first && self.style.has_header);
        let rows = page.nodes.iter().map(|node| {
            let cells = columns.iter().map(|column| (column.cell)(node, now));
            cells.collect()
        });
        let mut rows: Vec<Vec<String>> = header.into_iter().chain(rows).collect();
        for (address, names) in page.nodes.iter().flat_map(|node| &node.address_conflicts) {
            if self.conflicts.len() < CONFLICTS_MAX || self.conflicts.contains_key(address) {
                self.conflicts.insert(*address, names.clone());
            } else {
                self.has_more_conflicts = true;
            }
        }
        if is_first || self.style.is_wide {
            widen(&rows, &mut self.widths);
        }
        if !self.style.is_wide {
            if is_first {
                fit(&columns, &mut self.widths, page.r#continue.is_some());
            }
            for (cell, width) in rows
                .iter_mut()
                .flat_map(|row| row.iter_mut().zip(&self.widths))
            {
                cut(cell, *width);
            }
        }
        let text = padded(&rows, &self.widths);
        if self.style.has_color {
            colored(&text)
        } else {
            text
        }
    }

    /// Returns a line for each address that several nodes have.
    pub(super) fn conflicts(&self) -> String {
        let mut text = String::new();
        for (address, names) in &self.conflicts {
            let names: Vec<String> = names.iter().map(|name| clean(name)).collect();
            let more = if names.len() < NAMES_SHOWN_MAX {
                ""
            } else {
                ", ..."
            };
            let names = names.join(", ");
            let mut line = format!("{address}: reach by name, since it is shared by {names}{more}");
            if !self.style.is_wide {
                cut(&mut line, WIDTH);
            }
            let _infallible = writeln!(text, "{line}");
        }
        if self.has_more_conflicts {
            text.push_str("more addresses are shared; -o json has them with each node\n");
        }
        text
    }
}

/// Returns rows whose cells begin below each other, two spaces apart. Raises `widths` to those of the
/// cells.
fn aligned(rows: &[Vec<String>], widths: &mut Vec<usize>) -> String {
    widen(rows, widths);
    padded(rows, widths)
}

/// Raises `widths` to those of the cells.
fn widen(rows: &[Vec<String>], widths: &mut Vec<usize>) {
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
}

/// Returns rows whose cells have these widths, two spaces apart.
fn padded(rows: &[Vec<String>], widths: &[usize]) -> String {
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (width, cell) in widths.iter().zip(row) {
            let _infallible = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Limits the widths of columns, so that a row has at most [`WIDTH`] characters. The first column has
/// what the others leave, and all of that if longer names may follow.
fn fit(columns: &[&Column], widths: &mut [usize], has_more: bool) {
    for (width, column) in widths.iter_mut().zip(columns) {
        *width = (*width).min(column.width_max);
    }
    let others: usize = widths.iter().skip(1).map(|width| width + 2).sum();
    if let Some(first) = widths.first_mut() {
        let left = WIDTH - others;
        *first = if has_more { left } else { (*first).min(left) };
    }
}

/// Cuts a text that is longer than `max` characters, and ends it with an ellipsis.
fn cut(text: &mut String, max: usize) {
    if text.chars().count() > max {
        let end = text.char_indices().nth(max.saturating_sub(1));
        text.truncate(end.map_or(0, |(index, _)| index));
        text.push('…');
    }
}

/// Colors the states of the rows, which are their second words.
fn colored(rows: &str) -> String {
    let mut text = String::with_capacity(rows.len() * 5 / 4);
    for row in rows.split_inclusive('\n') {
        let state = row.split_whitespace().nth(1).unwrap_or_default();
        let color = match state {
            "live" | "connected" => 32,
            "suspect" => 33,
            "away" => 31,
            "revoked" | "enrolled" | "pending" | "not-edge" => 90,
            _ => 0,
        };
        match row.split_once(&format!(" {state} ")).filter(|_| color > 0) {
            None => text.push_str(row),
            Some((before, after)) => {
                let _infallible = write!(text, "{before} \x1b[{color}m{state}\x1b[0m {after}");
            }
        }
    }
    text
}

/// A column of the table of nodes.
struct Column {
    header: &'static str,
    /// Largest width in a usual table.
    width_max: usize,
    /// The column is in tables in which a node has the name of a server.
    needs_replicas: bool,
    /// Returns the cell of a node at a time.
    cell: fn(&NodeStatus, SystemTime) -> String,
}

impl Column {
    const fn new(header: &'static str, cell: fn(&NodeStatus, SystemTime) -> String) -> Self {
        Self {
            header,
            width_max: usize::MAX,
            needs_replicas: false,
            cell,
        }
    }

    const fn narrow(self, width_max: usize) -> Self {
        Self { width_max, ..self }
    }

    const fn with_replicas(self) -> Self {
        Self {
            needs_replicas: true,
            ..self
        }
    }
}

const NODE: Column = Column::new("NODE", |node, _| clean(&node.node));
const STATE: Column =
    Column::new("STATE", |node, _| NodeState::of(node).label().to_owned()).narrow(9);
const SERVER: Column = Column::new("SERVER", |node, _| optional(node.replica.as_deref()))
    .narrow(12)
    .with_replicas();
const STREAMS: Column = Column::new("STREAMS", |node, _| of_session(node, node.streams)).narrow(7);
const RTT: Column = Column::new("RTT", |node, _| {
    let millis = node.rtt_millis;
    millis.map_or_else(absent, |millis| format!("{millis} ms"))
})
.narrow(8);

/// The columns that fit a terminal.
const USUAL: &[Column] = &[
    NODE,
    STATE,
    SERVER,
    Column::new("VIA", |node, _| optional(node.transport.as_deref())).narrow(4),
    RTT,
    STREAMS,
    Column::new("SEEN", |node, now| {
        let age = age(node.last_seen.as_deref(), now);
        age.map_or_else(absent, |age| unit(&age).to_owned())
    })
    .narrow(5),
    Column::new("CERT", |node, now| {
        let end = certificate(node.certificate_not_after.as_deref(), now);
        unit(&end).to_owned()
    })
    .narrow(7),
];

/// All columns.
const WIDE: &[Column] = &[
    NODE,
    STATE,
    SERVER,
    Column::new("TRANSPORT", |node, _| optional(node.transport.as_deref())),
    Column::new("ADDRESS", |node, _| optional(node.address.as_deref())),
    Column::new("VERSION", |node, _| version(node)),
    Column::new("SINCE", |node, now| {
        since(node.connected_since.as_deref(), now)
    }),
    Column::new("LAST SEEN", |node, now| {
        since(node.last_seen.as_deref(), now)
    }),
    Column::new("LAST CLOSE", |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.code.as_str()))
    }),
    RTT,
    STREAMS,
    Column::new("CERTIFICATE", |node, now| {
        certificate(node.certificate_not_after.as_deref(), now)
    }),
    Column::new("ADDRESSES", |node, _| addresses(&node.addresses)),
    Column::new("ZONE", |node, _| optional(node.zone.as_deref())),
    Column::new("CLAIMED ADDRESS", |node, _| {
        optional(node.claimed_address.as_deref())
    }),
    Column::new("LABELS", |node, _| {
        let labels = node.selectable_labels().into_owned().into_iter();
        let labels: Vec<String> = labels
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        optional(
            Some(labels.join(","))
                .as_deref()
                .filter(|text| !text.is_empty()),
        )
    }),
    Column::new("ENROLLMENT", |node, _| {
        optional(node.enrollment.map(EnrollmentKind::label))
    }),
    Column::new("BYTES IN", |node, _| of_session(node, node.bytes_in)),
    Column::new("BYTES OUT", |node, _| of_session(node, node.bytes_out)),
    Column::new("CLOSED", |node, now| {
        let close = node.last_close.as_ref();
        since(close.map(|close| close.at.as_str()), now)
    }),
    Column::new("CLOSED BY", |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.by.as_str()))
    }),
    Column::new("REASON", |node, _| {
        let close = node.last_close.as_ref();
        optional(close.map(|close| close.reason.as_str()))
    }),
];

/// A table of revocations that is printed page by page.
#[derive(Debug, Default)]
pub(super) struct RevocationTable {
    widths: Vec<usize>,
}

impl RevocationTable {
    /// Returns the rows of some revocations, the first time below the header.
    pub(super) fn rows(&mut self, revocations: &[RevocationInfo]) -> String {
        let is_first = self.widths.is_empty();
        let header = is_first.then(|| vec!["NODE".to_owned(), "REVOKED".to_owned()]);
        let rows = revocations.iter().map(|revocation| {
            let at = rfc3339(revocation.revoked_at);
            vec![revocation.node.to_string(), at]
        });
        let rows: Vec<_> = header.into_iter().chain(rows).collect();
        aligned(&rows, &mut self.widths)
    }
}

/// Returns a line about the sessions of a node since the start of the server. Empty if it has had none.
pub(super) fn history(node: &NodeStatus) -> String {
    let Some(history) = &node.history else {
        return String::new();
    };
    let ends: Vec<String> = history
        .ends
        .iter()
        .map(|(code, count)| format!("{} {count}", clean(code)))
        .collect();
    let ends = if ends.is_empty() {
        "none ended".to_owned()
    } else {
        format!("ended: {}", ends.join(", "))
    };
    let reason = node
        .last_close
        .as_ref()
        .filter(|close| !close.reason.is_empty());
    let reason = reason.map(|close| format!("; last reason: {}", clean(&close.reason)));
    format!(
        "{}: connected for {} since the start of this server, reconnects: {}, sessions {ends}{}\n",
        clean(&node.node),
        short(Duration::from_secs(history.connected_seconds)),
        history.reconnects,
        reason.unwrap_or_default()
    )
}

/// Returns the failures of agents, with what to do about each code below.
pub(super) fn failures(failures: &[&FailureStatus], now: SystemTime) -> String {
    if failures.is_empty() {
        return "no failures of agents since the start of this server\n".into();
    }
    let header = [
        "CODE", "NODE", "COUNT", "FIRST", "LAST", "ADDRESS", "REASON",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    let mut remedies: BTreeMap<&str, &str> = BTreeMap::new();
    for failure in failures {
        let over = if failure.is_over { " (over)" } else { "" };
        rows.push(vec![
            format!("{}{over}", clean(&failure.code)),
            failed_node(failure),
            failure.count.to_string(),
            since(Some(&failure.first), now),
            since(Some(&failure.last), now),
            clean(&failure.address),
            optional(Some(failure.detail.as_str()).filter(|text| !text.is_empty())),
        ]);
        remedies.entry(&failure.code).or_insert(&failure.remedy);
    }
    let mut text = aligned(&rows, &mut Vec::new());
    text.push('\n');
    for (code, remedy) in remedies {
        let _infallible = writeln!(text, "{}: {}", clean(code), visible_text(remedy));
    }
    text
}

/// Returns the name of a failure's node, and whether the name is certain.
fn failed_node(failure: &FailureStatus) -> String {
    match &failure.node {
        Some(node) if failure.is_verified => clean(node),
        Some(node) => format!("{} (claimed)", clean(node)),
        None if failure.nodes_from_address.is_empty() => absent(),
        None => {
            let nodes = failure.nodes_from_address.iter();
            let nodes: Vec<String> = nodes.map(|node| clean(node)).collect();
            format!("perhaps {}", nodes.join(", "))
        }
    }
}

pub(super) fn tokens(tokens: &[TokenInfo]) -> String {
    if tokens.is_empty() {
        return "there are no join tokens\n".into();
    }
    let header = ["ID", "NODE", "STATE", "EXPIRES", "USED BY KEY", "ADDRESSES"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for token in tokens {
        let state = match token.state {
            TokenState::Active => "active",
            TokenState::Used => "used",
            TokenState::Expired => "expired",
            TokenState::Revoked => "revoked",
            TokenState::Pending => "pending",
        };
        let uses = token.uses.zip(token.uses_max);
        let node = match uses {
            Some((uses, most)) => format!("{} ({uses} of {most})", clean(&token.node)),
            None => clean(&token.node),
        };
        let key = token
            .used_by
            .as_deref()
            .and_then(|key| key.get(..KEY_SHOWN));
        rows.push(vec![
            clean(&token.id),
            node,
            state.to_owned(),
            rfc3339(token.expires),
            optional(key),
            addresses(&token.ips),
        ]);
    }
    aligned(&rows, &mut Vec::new())
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

/// Returns text of a peer with visible characters only.
pub(super) fn clean(text: &str) -> String {
    visible_text(text).chars().take(TEXT_MAX).collect()
}

fn visible_text(text: &str) -> String {
    let visible = |character| {
        if is_hidden(character) { '?' } else { character }
    };
    text.chars().map(visible).collect()
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
    age(text, now).unwrap_or_else(|| optional(text))
}

fn age(text: Option<&str>, now: SystemTime) -> Option<String> {
    let time = humantime::parse_rfc3339(text?).ok()?;
    Some(short(now.duration_since(time).unwrap_or(Duration::ZERO)))
}

/// Returns the largest unit of a duration in [`short`] form.
fn unit(duration: &str) -> &str {
    duration.split(' ').next().unwrap_or_default()
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

/// Width of a usual table.
const WIDTH: usize = 80;
/// Number of shared addresses that a table shows.
const CONFLICTS_MAX: usize = 100;
/// Number of characters of a key's hash that are shown.
const KEY_SHOWN: usize = 16;
/// Maximum length of a peer's text that is shown.
const TEXT_MAX: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::status::{CloseStatus, HistoryStatus, VersionSkew};

    const PLAIN: TableStyle = TableStyle {
        is_wide: false,
        has_header: true,
        has_color: false,
    };
    const ALL: TableStyle = TableStyle {
        is_wide: true,
        ..PLAIN
    };

    fn nodes(nodes: Vec<NodeStatus>, style: TableStyle, now: SystemTime) -> String {
        let mut table = NodeTable::new(style);
        let page = NodesPage {
            has_replicas: nodes.iter().any(|node| node.replica.is_some()),
            nodes,
            r#continue: None,
        };
        let rows = table.rows(&page, now);
        format!("{rows}{}", table.conflicts())
    }

    #[test]
    fn pages_have_one_header_and_columns_that_become_wider() {
        let mut table = NodeTable::new(ALL);
        let page = |node: &str| NodesPage {
            nodes: vec![NodeStatus {
                node: node.to_owned(),
                ..NodeStatus::default()
            }],
            ..NodesPage::default()
        };
        let now = SystemTime::UNIX_EPOCH;
        let first = table.rows(&page("a"), now);
        assert!(first.starts_with("NODE  STATE") && first.lines().count() == 2);
        assert_eq!(
            table.rows(&page("worker-1"), now).find("not-edge"),
            Some(10)
        );
        assert_eq!(table.rows(&page("b"), now).find("not-edge"), Some(10));
        assert_eq!(table.conflicts(), "");
    }

    #[test]
    fn history_is_a_line_and_failures_have_their_remedies_once() {
        let history = HistoryStatus {
            connected_seconds: 11_000,
            reconnects: 4,
            ends: [("dead".to_owned(), 3), ("draining".to_owned(), 1)].into(),
        };
        let node = NodeStatus {
            node: "worker-1".to_owned(),
            history: Some(history),
            last_close: Some(CloseStatus {
                reason: "silent\u{202e}".to_owned(),
                ..close(SystemTime::UNIX_EPOCH)
            }),
            ..NodeStatus::default()
        };
        let expected = "worker-1: connected for 3h 3m since the start of this server, reconnects: 4, \
                        sessions ended: dead 3, draining 1; last reason: silent?\n";
        assert_eq!(super::history(&node), expected);
        assert_eq!(super::history(&NodeStatus::default()), "");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000);
        let failure = |node: Option<&str>, is_verified| FailureStatus {
            code: "name_in_use".to_owned(),
            node: node.map(str::to_owned),
            is_verified,
            first: rfc3339(now - Duration::from_secs(60)),
            last: rfc3339(now),
            address: "192.0.2.1:5".to_owned(),
            count: 3,
            detail: "hostile\n\u{202e}".to_owned(),
            remedy: "stop one".to_owned(),
            ..FailureStatus::default()
        };
        let mut unnamed = failure(None, false);
        unnamed.nodes_from_address = vec!["a".to_owned(), "b".to_owned()];
        let all = [failure(Some("w"), true), failure(Some("w"), false), unnamed];
        let text = failures(&all.iter().collect::<Vec<_>>(), now);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].starts_with("CODE         NODE"), "{text}");
        assert!(
            lines[1].contains(" w ") && lines[1].ends_with("hostile??"),
            "{text}"
        );
        assert!(lines[2].contains("w (claimed)"), "{text}");
        assert!(lines[3].contains("perhaps a, b"), "{text}");
        assert_eq!(lines[4..], ["", "name_in_use: stop one"], "{text}");
        assert!(failures(&[], now).starts_with("no failures"));
    }

    #[test]
    fn shared_addresses_are_a_bounded_number_of_lines() {
        let mut table = NodeTable::new(PLAIN);
        for number in 0..150_u32 {
            let names: Vec<String> = (0..10).map(|other| format!("n{other}")).collect();
            let node = NodeStatus {
                address_conflicts: [(IpAddr::from(number.to_be_bytes()), names)].into(),
                ..NodeStatus::default()
            };
            let page = NodesPage {
                nodes: vec![node],
                ..NodesPage::default()
            };
            table.rows(&page, SystemTime::UNIX_EPOCH);
        }
        let text = table.conflicts();
        assert_eq!(text.lines().count(), CONFLICTS_MAX + 1);
        assert!(text.contains("since it is shared by n0, n1"), "{text}");
        assert!(
            text.lines().all(|line| line.chars().count() <= WIDTH),
            "{text}"
        );
        assert!(
            text.ends_with("-o json has them with each node\n"),
            "{text}"
        );
    }

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
            is_edge: true,
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
        let all = vec![connected, absent, suspect];
        let usual = nodes(all.clone(), PLAIN, now);
        let expected = "\
NODE      STATE    VIA   RTT    STREAMS  SEEN  CERT
worker-1  live     quic  12 ms  3        2s    30d
worker-2  away     -     -      -        1m    expired
worker-3  suspect  h2    -      0        -     -
192.168.33.221: reach by name, since it is shared by worker-1, worker-2
";
        assert_eq!(usual, expected);
        let text = nodes(all, ALL, now);
        let expected = "\
NODE      STATE    TRANSPORT  ADDRESS            VERSION                 SINCE  LAST SEEN  LAST CLOSE  RTT    STREAMS  CERTIFICATE  ADDRESSES       ZONE  CLAIMED ADDRESS  LABELS  ENROLLMENT  BYTES IN  BYTES OUT  CLOSED  CLOSED BY  REASON
worker-1  live     quic       203.0.113.7:40000  culvert?[31m/1 (older)  2h 5m  2s         -           12 ms  3        30d 0h left  192.168.33.221  -     -                -       -           0         0          -       -          -
worker-2  away     -          -                  -                       -      1m 30s     dead        -      -        expired      192.168.33.221  -     -                -       -           -         -          30s     this end   no sign?of life
worker-3  suspect  h2         -                  -                       -      -          -           -      0        -            -               -     -                -       -           0         0          -       -          -
192.168.33.221: reach by name, since it is shared by worker-1, worker-2
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
        let text = nodes(vec![own, of_other, absent], PLAIN, now);
        let expected = "\
NODE      STATE      SERVER    VIA   RTT  STREAMS  SEEN  CERT
worker-1  connected  server-1  quic  -    2        -     -
worker-2  connected  server-2  -     -    -        -     -
worker-3  not-edge   -         -     -    -        -     -
";
        assert_eq!(text, expected);
    }

    #[test]
    fn usual_table_fits_80_columns_and_its_states_are_colored() {
        let node = |number: usize, name: &str| NodeStatus {
            node: format!("{name}{number}"),
            connected: number.is_multiple_of(2),
            is_edge: true,
            state: number.is_multiple_of(2).then(|| "live".to_owned()),
            transport: Some("quic".into()),
            replica: Some("tunnel-server-with-a-long-name-0".into()),
            rtt_millis: Some(12_345_678_901),
            streams: 123_456_789,
            ..NodeStatus::default()
        };
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_750_000_000);
        let mut table = NodeTable::new(TableStyle {
            has_color: true,
            has_header: false,
            ..PLAIN
        });
        let long = "edge-oslo-depot-gateway-with-a-live-name.".repeat(6);
        for names in ["a", &long] {
            let page = NodesPage {
                nodes: (0..4).map(|number| node(number, names)).collect(),
                has_replicas: true,
                r#continue: Some("a".into()),
            };
            let text = table.rows(&page, now);
            assert_eq!(text.lines().count(), 4);
            assert_eq!(text.matches("\x1b[32mlive\x1b[0m ").count(), 2, "{text}");
            assert_eq!(text.matches("\x1b[31maway\x1b[0m ").count(), 2, "{text}");
            let plain = text
                .replace("\x1b[32m", "")
                .replace("\x1b[31m", "")
                .replace("\x1b[0m", "");
            assert!(
                plain.lines().all(|line| line.chars().count() <= WIDTH),
                "{plain}"
            );
            assert!(plain.contains('…'), "{plain}");
        }
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
        let text = nodes(vec![absent], ALL, now);
        let row = squeeze(&text).pop().unwrap();
        assert!(row.starts_with("worker-2 revoked"), "{text}");
        assert!(row.ends_with("30s this end no sign?of life"), "{text}");
        assert!(text.lines().next().unwrap().ends_with("REASON"), "{text}");
    }

    #[test]
    fn tokens_are_shown_without_their_secret() {
        let token = TokenInfo {
            id: "abcdef012345".into(),
            node: "worker-1".to_owned(),
            uses: None,
            uses_max: None,
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
