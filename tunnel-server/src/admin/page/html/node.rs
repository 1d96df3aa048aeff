//! The page of one node: its facts, outages, ports and last requests, and what to run next. Pure.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use tunnel_proto::wire::name::NodeName;

use crate::admin::page::facts::{NodeDocument, QuarterFacts, RequestFacts, SERVER_STATE};
use crate::admin::page::html::conditions::{Reason, place};
use crate::admin::page::text::{Figure, RelativeTime, duration};
use crate::admin::page::visible::VisibleText;
use crate::admin::status::{NodeState, NodeStatus};
use crate::outcome::Outcome;
use tunnel_store::data_dir::rfc3339;

/// A fact about a node with its name.
#[derive(Debug)]
pub(super) struct Fact {
    pub(super) name: &'static str,
    pub(super) value: VisibleText,
    pub(super) time: Option<RelativeTime>,
}

impl Fact {
    pub(super) fn all(status: &NodeStatus, now: SystemTime) -> Vec<Self> {
        let mut facts = Vec::new();
        let time = |at: &Option<String>| at.as_deref().map(|at| RelativeTime::new(at, now));
        let mut add = |name, value: Option<String>, time: Option<RelativeTime>| {
            if value.is_some() || time.is_some() {
                let value = VisibleText::new(value.unwrap_or_default());
                facts.push(Self { name, value, time });
            }
        };
        add("Seen", None, time(&status.last_seen));
        add("Server", status.replica.clone(), None);
        add("Zone", status.zone.clone(), None);
        if let Some(server) = &status.gone_server {
            let at = RelativeTime::new(&server.since, now);
            add(
                "Last server",
                Some(format!("{} is gone", server.name)),
                Some(at),
            );
        }
        add("Transport", status.transport.clone(), None);
        add("Connected", None, time(&status.connected_since));
        add("Session from", status.address.clone(), None);
        let skew = status
            .version_skew
            .map(|skew| format!(" ({} than the server)", skew.label()));
        let version = status.version.as_ref();
        add(
            "Agent",
            version.map(|version| format!("{version}{}", skew.unwrap_or_default())),
            None,
        );
        add(
            "Certificate ends",
            None,
            time(&status.certificate_not_after),
        );
        add(
            "Enrolled by",
            status.enrollment.map(|kind| kind.label().to_owned()),
            None,
        );
        let addresses: Vec<_> = status.addresses.iter().map(ToString::to_string).collect();
        add(
            "Addresses",
            (!addresses.is_empty()).then(|| addresses.join(", ")),
            None,
        );
        let conflicts: Vec<_> = status
            .address_conflicts
            .iter()
            .map(|(address, names)| format!("{address}: {}", names.join(", ")))
            .collect();
        add(
            "Shared addresses",
            (!conflicts.is_empty()).then(|| conflicts.join("; ")),
            None,
        );
        let labels: Vec<_> = status
            .labels
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        add(
            "Labels",
            (!labels.is_empty()).then(|| labels.join(", ")),
            None,
        );
        add("Revoked", None, time(&status.revoked_at));
        if let Some(history) = &status.history {
            let connected = duration(Duration::from_secs(history.connected_seconds));
            let ends = history.ends.iter();
            let ends: Vec<_> = ends
                .map(|(code, count)| format!("{code} {count}"))
                .collect();
            let ended = if ends.is_empty() {
                "none".to_owned()
            } else {
                ends.join(", ")
            };
            let text = format!(
                "{connected} connected, reconnects {}, ended: {ended}",
                history.reconnects
            );
            add("Since the start", Some(text), None);
        }
        if let Some(close) = &status.last_close {
            let text = format!("by {}: {}: {}", close.by, close.code, close.reason);
            add(
                "Last close",
                Some(text),
                Some(RelativeTime::new(&close.at, now)),
            );
        }
        facts
    }
}

/// A quarter of an hour in the strip of a node's availability.
#[derive(Debug)]
pub(super) struct QuarterCell {
    pub(super) x: usize,
    pub(super) class: &'static str,
}

impl QuarterCell {
    pub(super) fn all(document: &NodeDocument) -> Vec<Self> {
        let quarters = document.history.iter().enumerate();
        let cells = quarters.map(|(x, quarter)| Self {
            x,
            class: Self::class(quarter),
        });
        cells.collect()
    }

    fn class(quarter: &QuarterFacts) -> &'static str {
        match quarter.up_percent {
            None => "unknown",
            Some(100) => "live",
            Some(0) => "away",
            Some(_) => "suspect",
        }
    }

    /// Returns the classes of the strip with their meanings.
    pub(super) fn legend(document: &NodeDocument) -> Vec<(&'static str, &'static str)> {
        let classes = [
            ("live", "reachable"),
            ("suspect", "for a part of the time"),
            ("away", "not reachable"),
            ("unknown", "not known"),
        ];
        let has = |class| {
            document
                .history
                .iter()
                .any(|quarter| Self::class(quarter) == class)
        };
        classes
            .into_iter()
            .filter(|(class, _)| has(*class))
            .collect()
    }
}

/// A time without a session that answered.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) begin: RelativeTime,
    /// How long it lasted, or that it lasts.
    pub(super) length: String,
    pub(super) percent: u64,
}

impl Outage {
    /// Returns that there was none, and for how long nothing is known.
    pub(super) fn none(document: &NodeDocument) -> String {
        let unknown = document.history.iter();
        let unknown = unknown.filter(|quarter| quarter.up_percent.is_none());
        match unknown.map(|quarter| u64::from(quarter.seconds)).sum() {
            0 => "No outage.".to_owned(),
            seconds => format!(
                "No outage is known; nothing is known of {} of the last 24 h.",
                duration(Duration::from_secs(seconds))
            ),
        }
    }

    /// Returns the outages of the last day, the last one first. Nothing is known of the time before the first
    /// observation.
    pub(super) fn all(document: &NodeDocument, now: SystemTime) -> Vec<Self> {
        let history = &document.history;
        let lasted = |index: usize| {
            let seconds = history.get(index).map_or(0, |quarter| quarter.seconds);
            Duration::from_secs(seconds.into())
        };
        let is_down = |quarter: &QuarterFacts| quarter.up_percent.is_some_and(|up| up < 100);
        let mut outages = Vec::new();
        let mut index = 0;
        for chunk in history.chunk_by(|one, other| is_down(one) == is_down(other)) {
            let first = index;
            index += chunk.len();
            if !chunk.first().is_some_and(is_down) {
                continue;
            }
            let (mut down, mut all) = (Duration::ZERO, Duration::ZERO);
            for (index, quarter) in (first..).zip(chunk) {
                let up = u32::from(quarter.up_percent.unwrap_or(100));
                down += lasted(index) * (100 - up) / 100;
                all += lasted(index);
            }
            let since: Duration = (first..history.len()).map(lasted).sum();
            let begin = now.checked_sub(since).unwrap_or(now);
            outages.push(Self {
                begin: RelativeTime::new(&rfc3339(begin), now),
                length: duration(down),
                percent: 100 - down.as_secs() * 100 / all.as_secs().max(1),
            });
        }
        outages.reverse();
        outages.truncate(OUTAGES_SHOWN);
        outages
    }
}

/// What to run next, and why.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) why: String,
    /// Where to run it.
    pub(super) place: VisibleText,
    pub(super) command: String,
}

impl Step {
    pub(super) fn all(status: &NodeStatus, ports: &[PortRow], now: SystemTime) -> Vec<Self> {
        // Commands have no text but the checked name.
        let Ok(name) = status.node.parse::<NodeName>() else {
            return Vec::new();
        };
        let server = status.gone_server.as_ref();
        let server = server.map(|server| VisibleText::new(server.name.as_str()));
        let step = |why: &str, command: String| Self {
            why: why.to_owned(),
            place: place(
                server.as_ref().filter(|_| command == SERVER_STATE),
                &command,
            ),
            command,
        };
        let failing = ports.iter().filter(|row| !row.is_ok).map(|row| {
            let reason = Reason::of(row.code);
            let why = format!("port {}: {}", row.port, reason.text);
            step(&why, reason.command.replace("NAME", name.as_str()))
        });
        let mut steps: Vec<_> = failing.take(FAILING_PORTS_SHOWN).collect();
        steps.extend(match NodeState::of(status) {
            NodeState::Revoked => vec![step(
                "admit the node again",
                format!("tunnel-server nodes unrevoke {name}"),
            )],
            NodeState::Pending => {
                vec![step(
                    "make a join token",
                    format!("tunnel-server token create --node {name}"),
                )]
            }
            NodeState::Away | NodeState::Enrolled | NodeState::Suspect => vec![
                step("find the cause", "tunnel-agent doctor".to_owned()),
                step(
                    "the agent's last lines",
                    "journalctl -u tunnel-agent -n 50".to_owned(),
                ),
            ],
            NodeState::Unknown => vec![step(
                "whether its last server runs",
                SERVER_STATE.to_owned(),
            )],
            NodeState::Live | NodeState::Connected => {
                let answering = ports.iter().find(|row| row.is_ok);
                vec![answering.map_or_else(
                    || step("whether it answers", format!("tunnel-server ping {name}")),
                    |row| {
                        let command = format!("tunnel-server connect {name} {}", row.port);
                        step("reach a port of the node", command)
                    },
                )]
            }
            NodeState::NotEdge => Vec::new(),
        });
        let mut commands = BTreeSet::new();
        steps.retain(|step| commands.insert(step.command.clone()));
        let end = status
            .certificate_not_after
            .as_deref()
            .and_then(|at| humantime::parse_rfc3339(at).ok());
        if end.is_some_and(|end| end < now + CERTIFICATE_SOON) && !status.is_revoked() {
            steps.push(step(
                "its certificate ends soon or has ended",
                format!("tunnel-server token create --node {name}"),
            ));
        }
        steps.push(step(
            "all facts as JSON",
            format!("tunnel-server nodes {name} -o json"),
        ));
        steps
    }
}

/// What a port of a node answered last.
#[derive(Debug)]
pub(super) struct PortRow {
    pub(super) port: u16,
    pub(super) is_ok: bool,
    pub(super) code: &'static str,
    pub(super) at: RelativeTime,
}

impl PortRow {
    pub(super) fn all(requests: &[RequestFacts], now: SystemTime) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::new();
        for request in requests {
            let Some(port) = request.port else {
                continue;
            };
            if rows.iter().all(|row| row.port != port) {
                rows.push(Self {
                    port,
                    is_ok: [Outcome::Ok, Outcome::CallerGone]
                        .map(Outcome::label)
                        .contains(&request.code),
                    code: request.code,
                    at: RelativeTime::new(&request.at, now),
                });
            }
        }
        rows.sort_unstable_by_key(|row| row.port);
        rows
    }
}

/// A request as its row shows it.
#[derive(Debug)]
pub(super) struct RequestRow<'a> {
    pub(super) at: RelativeTime,
    pub(super) facts: &'a RequestFacts,
    pub(super) received: String,
    pub(super) sent: String,
    pub(super) elapsed: String,
}

impl<'a> RequestRow<'a> {
    pub(super) fn new(facts: &'a RequestFacts, now: SystemTime) -> Self {
        let bytes = |bytes: u64| Figure::rate(bytes).to_string().replace("/s", "");
        Self {
            at: RelativeTime::new(&facts.at, now),
            facts,
            received: bytes(facts.bytes_in),
            sent: bytes(facts.bytes_out),
            elapsed: format!("{:.3} s", facts.elapsed_seconds),
        }
    }
}

const OUTAGES_SHOWN: usize = 8;
/// Ports whose requests fail that have a command.
const FAILING_PORTS_SHOWN: usize = 2;
/// Time before the end of a certificate at which its renewal has failed for long.
const CERTIFICATE_SOON: Duration = Duration::from_secs(7 * 86_400);

#[cfg(test)]
mod tests {
    use super::*;
    use tunnel_process::schema::SCHEMA_VERSION;

    use crate::admin::page::facts::NodeFacts;

    #[test]
    fn steps_of_a_node_begin_with_its_failing_requests_and_offer_a_port_that_answers() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let port = |port, outcome: Outcome| PortRow {
            port,
            is_ok: outcome == Outcome::Ok,
            code: outcome.label(),
            at: RelativeTime::default(),
        };
        let status = NodeStatus {
            node: "worker-1".to_owned(),
            is_edge: true,
            connected: true,
            state: Some("live".to_owned()),
            ..NodeStatus::default()
        };
        let all = |ports: &[PortRow]| -> Vec<String> {
            let steps = Step::all(&status, ports, now).into_iter();
            let texts = steps.map(|step| format!("{}: {} {}", step.why, step.place, step.command));
            texts.collect()
        };
        let (refused, json) = (
            "port 8080: nothing listens there: on the node: ss -ltnp",
            "all facts as JSON: on this server: tunnel-server nodes worker-1 -o json",
        );
        let ports = [
            port(8080, Outcome::TargetRefused),
            port(8081, Outcome::TargetRefused),
            port(9100, Outcome::Ok),
        ];
        let connect =
            "reach a port of the node: on this server: tunnel-server connect worker-1 9100";
        assert_eq!(all(&ports), [refused, connect, json]);
        let ping = "whether it answers: on this server: tunnel-server ping worker-1";
        assert_eq!(all(&[]), [ping, json]);
    }

    #[test]
    fn outages_last_as_long_as_their_quarters_do() {
        let quarter = |(up_percent, seconds)| QuarterFacts {
            bytes: 0,
            requests: 0,
            errors: 0,
            up_percent,
            seconds,
        };
        // The server was started 8 minutes before the end of the third quarter, and the current one began
        // 2 minutes ago.
        let up = [
            (None, 900),
            (None, 900),
            (Some(25), 480),
            (Some(0), 900),
            (Some(100), 900),
            (Some(50), 120),
        ];
        let document = NodeDocument {
            schema_version: SCHEMA_VERSION,
            node: NodeFacts {
                status: NodeStatus::default(),
                traffic: None,
                errors: Default::default(),
            },
            history: up.map(quarter).into(),
            requests: Vec::new(),
        };
        assert_eq!(
            Outage::none(&document),
            "No outage is known; nothing is known of 30 min of the last 24 h."
        );
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(900_120);
        let outages = Outage::all(&document, now);
        let shown: Vec<_> = outages
            .iter()
            .map(|outage| {
                (
                    outage.begin.text.as_str(),
                    outage.length.as_str(),
                    outage.percent,
                )
            })
            .collect();
        assert_eq!(
            shown,
            [("2 min ago", "1 min", 50), ("40 min ago", "21 min", 9)],
            "nothing is known of the time before the start of the server"
        );
    }
}
