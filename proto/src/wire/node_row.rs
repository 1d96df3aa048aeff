//! What one server shows another of its nodes and of itself, for people: nothing is decided by it.

use std::net::SocketAddr;
use std::time::SystemTime;

use super::fields::{decode_node, decode_time, since_epoch};
use super::frame::FrameError;
use super::header::one_line;
use super::name::{NodeName, ReplicaId};
use super::pb;

/// Rows of nodes, or the request for them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeRows {
    /// The sender shows the rows of the receiver, which sends them from then on.
    pub is_wanted: bool,
    /// Whether this message begins a new list.
    pub is_full: bool,
    /// Nodes with a session at the sender.
    pub rows: Vec<NodeRow>,
    /// Nodes without a session at the sender.
    pub removed: Vec<NodeName>,
    /// What the sender itself does, in the last message of a list or change.
    pub report: Option<ServerReport>,
}

/// A node with a session at the sender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRow {
    /// The node that the agent serves.
    pub node: NodeName,
    /// Whether the agent does not respond.
    pub is_suspect: bool,
    /// Label of the transport.
    pub transport: String,
    /// Smoothed round-trip time in milliseconds; 0 if it is not measured.
    pub rtt_millis: u32,
    /// Open streams.
    pub streams: u32,
    /// Payload bytes from and to the agent in this session.
    pub bytes: [u64; 2],
    /// The same in each second of the last minute.
    pub bytes_per_second: [u64; 2],
    /// Failed requests of the last hour.
    pub errors_last_hour: u64,
    /// Version of the agent's software, at most 64 bytes.
    pub version: String,
    /// Source address of the session.
    pub address: Option<SocketAddr>,
    /// Admission of the session.
    pub since: SystemTime,
    /// Expiry of the agent's certificate.
    pub certificate_not_after: SystemTime,
    /// Payload of each half hour of the last day, the last one last; 255 is the most of these.
    pub trend: Vec<u8>,
    /// Seconds since the last sign of life; 0 up to 30.
    pub silent_seconds: u32,
}

/// Totals of a server since it started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServerReport {
    /// Sessions of agents.
    pub sessions: u64,
    /// Requests and streams of callers that ended.
    pub requests: u64,
    /// Those of them that failed.
    pub errors: u64,
    /// Payload bytes from and to agents.
    pub bytes: [u64; 2],
    /// The servers that the sender has dialed.
    pub linked: Vec<ReplicaId>,
    /// Requests that fail, the last one first, at most [`FAILING_MAX`].
    pub failing: Vec<FailingRequests>,
}

/// Requests for a node that failed with one code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailingRequests {
    /// The node.
    pub node: NodeName,
    /// The code of the answers.
    pub code: String,
    /// Port of the last one; 0 if it has none.
    pub port: u16,
    /// Number of requests.
    pub count: u64,
    /// Time of the first one.
    pub first: SystemTime,
    /// Time of the last one.
    pub last: SystemTime,
    /// Reason of the last one, for people.
    pub detail: String,
}

impl NodeRow {
    /// Returns the number of bytes that the row adds to a message, at most.
    pub fn size_max(&self) -> usize {
        let texts = self.node.as_str().len() + self.transport.len() + self.version.len();
        texts + self.trend.len() + FIELDS_MAX
    }
}

pub(super) fn encode(rows: &NodeRows) -> pb::NodeRows {
    pb::NodeRows {
        wanted: rows.is_wanted,
        full: rows.is_full,
        rows: rows.rows.iter().map(encode_row).collect(),
        removed: rows.removed.iter().map(ToString::to_string).collect(),
        report: rows.report.as_ref().map(encode_report),
    }
}

pub(super) fn decode(rows: pb::NodeRows) -> Result<NodeRows, FrameError> {
    let removed = rows.removed.iter().map(|node| decode_node(node));
    Ok(NodeRows {
        is_wanted: rows.wanted,
        is_full: rows.full,
        rows: rows
            .rows
            .into_iter()
            .map(decode_row)
            .collect::<Result<_, _>>()?,
        removed: removed.collect::<Result<_, _>>()?,
        report: rows.report.map(decode_report),
    })
}

fn encode_row(row: &NodeRow) -> pb::NodeRow {
    pb::NodeRow {
        node: row.node.to_string(),
        suspect: row.is_suspect,
        transport: row.transport.clone(),
        rtt_millis: row.rtt_millis,
        streams: row.streams,
        bytes_in: row.bytes[0],
        bytes_out: row.bytes[1],
        bytes_in_per_second: row.bytes_per_second[0],
        bytes_out_per_second: row.bytes_per_second[1],
        errors_last_hour: row.errors_last_hour,
        version: row.version.clone(),
        address: row
            .address
            .map(|address| address.to_string())
            .unwrap_or_default(),
        since_millis: since_epoch(row.since),
        certificate_millis: since_epoch(row.certificate_not_after),
        trend: row.trend.clone(),
        silent_seconds: row.silent_seconds,
    }
}

fn decode_row(row: pb::NodeRow) -> Result<NodeRow, FrameError> {
    if row.trend.len() > TREND_MAX {
        return Err(FrameError::Invalid("trend"));
    }
    Ok(NodeRow {
        node: decode_node(&row.node)?,
        is_suspect: row.suspect,
        transport: short_line(&row.transport),
        rtt_millis: row.rtt_millis,
        streams: row.streams,
        bytes: [row.bytes_in, row.bytes_out].map(bounded),
        bytes_per_second: [row.bytes_in_per_second, row.bytes_out_per_second].map(bounded),
        errors_last_hour: bounded(row.errors_last_hour),
        version: short_line(&row.version),
        address: row.address.parse().ok(),
        since: decode_time(row.since_millis.min(MILLIS_MAX))?,
        certificate_not_after: decode_time(row.certificate_millis.min(MILLIS_MAX))?,
        trend: row.trend,
        silent_seconds: row.silent_seconds,
    })
}

fn encode_report(report: &ServerReport) -> pb::ServerReport {
    pb::ServerReport {
        sessions: report.sessions,
        requests: report.requests,
        errors: report.errors,
        bytes_in: report.bytes[0],
        bytes_out: report.bytes[1],
        linked: report.linked.iter().map(ToString::to_string).collect(),
        failing: report
            .failing
            .iter()
            .take(FAILING_MAX)
            .map(encode_failing)
            .collect(),
    }
}

fn encode_failing(failing: &FailingRequests) -> pb::FailingRequests {
    pb::FailingRequests {
        node: failing.node.to_string(),
        code: failing.code.clone(),
        port: failing.port.into(),
        count: failing.count,
        first_millis: since_epoch(failing.first),
        last_millis: since_epoch(failing.last),
        detail: line(&failing.detail, DETAIL_MAX_BYTES),
    }
}

/// Returns `None` for what has no name or time.
fn decode_failing(failing: pb::FailingRequests) -> Option<FailingRequests> {
    Some(FailingRequests {
        node: decode_node(&failing.node).ok()?,
        code: short_line(&failing.code),
        port: u16::try_from(failing.port).ok()?,
        count: bounded(failing.count),
        first: decode_time(failing.first_millis.min(MILLIS_MAX)).ok()?,
        last: decode_time(failing.last_millis.min(MILLIS_MAX)).ok()?,
        detail: line(&failing.detail, DETAIL_MAX_BYTES),
    })
}

fn decode_report(report: pb::ServerReport) -> ServerReport {
    let linked = report.linked.iter().take(LINKED_MAX);
    let failing = report.failing.into_iter().take(FAILING_MAX);
    ServerReport {
        sessions: bounded(report.sessions),
        requests: bounded(report.requests),
        errors: bounded(report.errors),
        bytes: [report.bytes_in, report.bytes_out].map(bounded),
        linked: linked.filter_map(|replica| replica.parse().ok()).collect(),
        failing: failing.filter_map(decode_failing).collect(),
    }
}

/// Returns a number that can be added to those of many nodes.
fn bounded(number: u64) -> u64 {
    number.min(NUMBER_MAX)
}

/// Returns a text with visible characters only, cut to [`TEXT_MAX_BYTES`].
fn short_line(text: &str) -> String {
    line(text, TEXT_MAX_BYTES)
}

/// Returns a text with visible characters only, cut to `max` bytes.
fn line(text: &str, max: usize) -> String {
    let mut line = one_line(text);
    let mut end = max.min(line.len());
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    line.truncate(end);
    line
}

/// Maximum length of a version or transport.
const TEXT_MAX_BYTES: usize = 64;
/// Entries of failing requests in a report.
pub const FAILING_MAX: usize = 8;
/// Maximum length of the reason of a failing request.
const DETAIL_MAX_BYTES: usize = 160;
/// Upper bound for the encoded size of the failing requests of a report: the texts, five numbers of at most 10
/// bytes, and the heads of all fields.
pub const FAILING_BYTES: usize =
    FAILING_MAX * (super::name::NAME_MAX + TEXT_MAX_BYTES + DETAIL_MAX_BYTES + 5 * 10 + 32);
/// Largest number of a row or report: 9 PB.
const NUMBER_MAX: u64 = 1 << 53;
/// End of the year 9999, the last time that RFC 3339 has, in milliseconds.
const MILLIS_MAX: u64 = 253_402_300_799_000;
/// Half hours of a day.
const TREND_MAX: usize = 48;
/// Servers of an installation.
const LINKED_MAX: usize = super::REPLICAS_MAX;
/// Upper bound for the encoded size of a row without its texts: ten numbers of at most 10 bytes, an address
/// of at most 60, and the heads of all fields.
const FIELDS_MAX: usize = 10 * 10 + 60 + 4 * 16;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use prost::Message as _;

    use super::*;

    fn row() -> NodeRow {
        NodeRow {
            node: [
                "a".repeat(63),
                "b".repeat(63),
                "c".repeat(63),
                "d".repeat(61),
            ]
            .join(".")
            .parse()
            .unwrap(),
            is_suspect: true,
            transport: "quic".into(),
            rtt_millis: u32::MAX,
            streams: u32::MAX,
            bytes: [NUMBER_MAX; 2],
            bytes_per_second: [NUMBER_MAX; 2],
            errors_last_hour: NUMBER_MAX,
            version: "v".repeat(64),
            address: Some(
                "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535"
                    .parse()
                    .unwrap(),
            ),
            since: SystemTime::UNIX_EPOCH + Duration::from_millis(MILLIS_MAX),
            certificate_not_after: SystemTime::UNIX_EPOCH + Duration::from_millis(MILLIS_MAX),
            trend: vec![255; 48],
            silent_seconds: u32::MAX,
        }
    }

    #[test]
    fn row_is_no_larger_than_announced_and_survives_the_wire() {
        let rows = NodeRows {
            rows: vec![row()],
            ..NodeRows::default()
        };
        let encoded = encode(&rows);
        let bytes = encoded.encoded_len();
        assert!(bytes <= row().size_max(), "{bytes}");
        assert_eq!(decode(encoded).unwrap(), rows);
    }

    #[test]
    fn texts_of_another_server_are_bounded_and_visible() {
        let decoded = |change: fn(&mut pb::NodeRow)| {
            let mut encoded = encode_row(&row());
            change(&mut encoded);
            decode_row(pb::NodeRow::decode(&encoded.encode_to_vec()[..]).unwrap())
        };
        let hostile = decoded(|row| {
            row.version = format!("a\u{1b}[31m{}", "\u{e9}".repeat(1000));
            row.address = "<b>".into();
        });
        let hostile = hostile.unwrap();
        assert!(hostile.version.len() <= TEXT_MAX_BYTES && !hostile.version.contains('\u{1b}'));
        assert_eq!(hostile.address, None);
        let largest = decoded(|row| {
            (row.bytes_in, row.errors_last_hour) = (u64::MAX, u64::MAX);
            (row.since_millis, row.certificate_millis) = (u64::MAX, u64::MAX);
        });
        assert_eq!(largest.unwrap(), row(), "sums and texts of it are possible");
        assert!(decoded(|row| row.trend = vec![0; 49]).is_err());
        assert!(decoded(|row| row.node = "a b".into()).is_err());
        let many = pb::ServerReport {
            linked: (0..1000).map(|number| format!("server-{number}")).collect(),
            ..pb::ServerReport::default()
        };
        assert_eq!(decode_report(many).linked.len(), LINKED_MAX);
    }

    #[test]
    fn failing_requests_are_few_and_no_larger_than_announced() {
        let failing = FailingRequests {
            node: row().node,
            code: "c".repeat(64),
            port: u16::MAX,
            count: NUMBER_MAX,
            first: row().since,
            last: row().since,
            detail: "d".repeat(1000),
        };
        let report = ServerReport {
            failing: vec![failing; 100],
            ..ServerReport::default()
        };
        let encoded = encode_report(&report);
        let bytes = encoded.encoded_len();
        assert!(bytes <= FAILING_BYTES, "{bytes}");
        let mut hostile = encoded.clone();
        hostile.failing[0].node = "a b".into();
        hostile.failing[1].detail = "\u{1b}[31m".repeat(1000);
        hostile.failing.extend(encoded.failing.clone());
        let decoded = decode_report(hostile).failing;
        assert_eq!(decoded.len(), FAILING_MAX - 1);
        let details = decoded.iter().map(|failing| &failing.detail);
        assert!(details.clone().all(|text| text.len() <= DETAIL_MAX_BYTES));
        assert!(details.clone().all(|text| !text.contains('\u{1b}')));
        assert_eq!(
            (&decoded[6].code, decoded[6].count),
            (&"c".repeat(64), NUMBER_MAX)
        );
    }
}
