//! What needs an operator, with the command that helps. Pure.

use std::collections::BTreeSet;
use std::time::SystemTime;

use crate::admin::failures::FailureStatus;
use crate::admin::page::facts::{
    ConditionFacts, ConditionsDocument, FailingFacts, NeedingFacts, NeedingState, SERVER,
    SERVER_STATE,
};
use crate::admin::page::text::{RelativeTime, grouped};
use crate::admin::page::visible::{VisibleText, beginning_by_words};
use crate::admin::status::NodeState;
use crate::failure_code::SHORT_SESSION_CODE;
use crate::outcome::Outcome;

/// A condition or a failure as its row shows it.
#[derive(Debug, Default)]
pub(super) struct ConditionRow {
    /// A word in a color.
    pub(super) tag: &'static str,
    pub(super) color: &'static str,
    pub(super) subject: VisibleText,
    /// Whether the subject is the name of a node with a page.
    pub(super) is_node: bool,
    pub(super) text: VisibleText,
    /// How often, and from where, or empty.
    pub(super) detail: VisibleText,
    /// Time of its begin.
    pub(super) since: Option<RelativeTime>,
    /// What to do in words, or empty.
    pub(super) remedy: VisibleText,
    /// Where to run the command, or empty.
    pub(super) place: VisibleText,
    /// What to run, or empty.
    pub(super) command: String,
    /// Whether the remedy has something else that comes before the command.
    pub(super) has_choice: bool,
}

impl ConditionRow {
    /// Returns what needs somebody now.
    pub(super) fn current(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        Self::kinds(document, now).into_iter().flatten().collect()
    }

    /// Returns the same with the first entries of each kind.
    pub(super) fn glance(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let [blocking, servers, _nodes, failures, others] = Self::kinds(document, now);
        let states = document.needing.iter();
        let states = states.filter_map(|state| Self::of_state(state, now));
        let kinds = [blocking, servers, states.collect(), failures, others];
        let kinds = kinds.into_iter();
        kinds
            .flat_map(|kind| kind.into_iter().take(OF_A_KIND_SHOWN))
            .collect()
    }

    /// Returns what needs somebody by its kind, the worst kind first.
    fn kinds(document: &ConditionsDocument, now: SystemTime) -> [Vec<Self>; 5] {
        let blocking = document.blocking.iter().map(|component| Self {
            tag: "not ready",
            color: "away",
            subject: VisibleText::new(*component),
            text: VisibleText::new("blocks the readiness of this server"),
            place: VisibleText::new(HERE),
            command: "tunnel-server doctor".to_owned(),
            ..Self::default()
        });
        let conditions = document.other_conditions();
        let conditions = conditions.map(|facts| Self::of_condition(facts, now));
        let (servers, others) = conditions.partition(|row: &Self| row.tag == SERVER_GONE);
        let nodes = document.needing.iter().flat_map(|state| &state.nodes);
        let failures = document.current_failures(now);
        [
            blocking.collect(),
            servers,
            nodes.map(|facts| Self::of_node(facts, now)).collect(),
            failures
                .map(|failure| Self::of_failure(failure, now))
                .collect(),
            others,
        ]
    }

    /// Returns the failures that are over, and those that anybody who connects can cause.
    pub(super) fn past(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let failures = document.failures.iter();
        let past = failures.filter(|failure| !failure.is_current(now) || failure.is_noise);
        past.map(|failure| Self::of_failure(failure, now)).collect()
    }

    /// Returns the requests that fail, the last one first.
    pub(super) fn failing(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let failing = document.failing.iter();
        failing.map(|facts| Self::of_requests(facts, now)).collect()
    }

    /// Returns a row for each code of the requests that fail, the last one first.
    pub(super) fn failing_by_code(document: &ConditionsDocument, now: SystemTime) -> Vec<Self> {
        let mut rows: Vec<Self> = Vec::new();
        let mut codes: Vec<(&str, Vec<&FailingFacts>)> = Vec::new();
        for facts in &document.failing {
            let code = facts.code.as_str();
            match codes.iter_mut().find(|(other, _)| *other == code) {
                Some((_, of_code)) => of_code.push(facts),
                None => codes.push((code, vec![facts])),
            }
        }
        for (_, of_code) in codes {
            let Some((first, others)) = of_code.split_first() else {
                continue;
            };
            let others = others.iter().map(|facts| facts.node.as_str());
            let others: BTreeSet<_> = others.filter(|node| *node != first.node.as_str()).collect();
            let row = Self::of_requests(first, now);
            let also = also(others.iter().copied(), others.len());
            rows.push(Self {
                text: VisibleText::new(format!("{}{also}", row.text.as_str())),
                ..row
            });
        }
        rows
    }

    /// Returns the row of the nodes in one state.
    fn of_state(state: &NeedingState, now: SystemTime) -> Option<Self> {
        let (first, others) = state.nodes.split_first()?;
        let others = others.iter().map(|facts| facts.node.as_str());
        let row = Self::of_node(first, now);
        let also = also(others, state.count - 1);
        Some(Self {
            text: VisibleText::new(format!("{}{also}", row.text.as_str())),
            ..row
        })
    }

    fn of_condition(facts: &ConditionFacts, now: SystemTime) -> Self {
        let row = Self {
            since: (facts.since.as_deref()).map(|at| RelativeTime::lasting(at, now)),
            place: place(facts.host.as_ref(), facts.command),
            command: facts.command.to_owned(),
            ..Self::default()
        };
        let text = facts.text.as_str();
        match text.split_once(' ').filter(|_| facts.component == SERVER) {
            Some((server, text)) => Self {
                tag: SERVER_GONE,
                color: "away",
                subject: VisibleText::new(server),
                text: VisibleText::new(text),
                ..row
            },
            None => Self {
                tag: "condition",
                color: "suspect",
                subject: VisibleText::new(facts.component),
                text: facts.text.clone(),
                ..row
            },
        }
    }

    fn of_node(facts: &NeedingFacts, now: SystemTime) -> Self {
        let command = if facts.state == NodeState::Unknown.label() {
            SERVER_STATE
        } else {
            "tunnel-agent doctor"
        };
        Self {
            tag: facts.state,
            color: facts.state,
            subject: facts.node.clone(),
            is_node: true,
            text: facts.text.clone(),
            since: (facts.since.as_deref()).map(|at| RelativeTime::lasting(at, now)),
            place: place(facts.server.as_ref(), command),
            command: command.to_owned(),
            ..Self::default()
        }
    }

    fn of_requests(facts: &FailingFacts, now: SystemTime) -> Self {
        let code = facts.code.as_str();
        let reason = Reason::of(code);
        let at_port = match facts.port {
            0 => String::new(),
            port => format!(", port {port}"),
        };
        let count = times(facts.count);
        let last = RelativeTime::new(&facts.last, now).text;
        let mut detail = format!("{count} at {}, last {last}, {code}", facts.server.as_str());
        if !facts.detail.is_empty() {
            let reason = beginning_by_words(facts.detail.as_str(), REASON_SHOWN);
            detail = format!("{detail}: {reason}");
        }
        Self {
            tag: reason.tag,
            color: "away",
            subject: facts.node.clone(),
            is_node: true,
            text: VisibleText::new(format!("{}{at_port}", reason.text)),
            detail: VisibleText::new(detail),
            since: Some(RelativeTime::first(&facts.first, now)),
            remedy: VisibleText::default(),
            place: place(None, reason.command),
            command: reason.command.replace("NAME", facts.node.as_str()),
            has_choice: false,
        }
    }

    fn of_failure(failure: &FailureStatus, now: SystemTime) -> Self {
        let perhaps = failure.nodes_from_address.join(", ");
        let subject = match &failure.node {
            Some(node) if failure.is_verified => node.clone(),
            Some(node) => format!("{node} (claimed)"),
            None if perhaps.is_empty() => failure.address.clone(),
            None => format!("perhaps {perhaps}"),
        };
        let count = times(failure.count);
        let last = RelativeTime::new(&failure.last, now).text;
        let source = format!(
            "{count}, last {last} from {}, {}",
            failure.address, failure.code
        );
        let command = command_in(&failure.remedy).unwrap_or_default();
        let text = match failure.code.as_str() {
            SHORT_SESSION_CODE if failure.count > 1 && failure.is_current(now) => {
                format!("connects and ends again and again: {}", failure.detail)
            }
            _ => failure.detail.clone(),
        };
        let (tag, color) = match failure {
            FailureStatus { is_noise: true, .. } => ("noise", "revoked"),
            failure if !failure.is_current(now) => ("over", "revoked"),
            FailureStatus { .. } => ("failing", "away"),
        };
        Self {
            tag,
            color,
            subject: VisibleText::new(subject),
            text: VisibleText::new(text),
            detail: VisibleText::new(source),
            since: Some(if failure.is_current(now) {
                RelativeTime::lasting(&failure.first, now)
            } else {
                RelativeTime::first(&failure.first, now)
            }),
            place: place(None, command),
            is_node: failure.is_verified && failure.node.is_some(),
            command: command.to_owned(),
            has_choice: failure.code == "wrong_node",
            remedy: VisibleText::new(failure.remedy.as_str()),
        }
    }
}

/// Why requests fail, in words.
pub(super) struct Reason {
    tag: &'static str,
    pub(super) text: &'static str,
    /// What to run, with `NAME` for the node.
    pub(super) command: &'static str,
}

impl Reason {
    /// Returns the reason for a code, which may be one that this version does not know.
    pub(super) fn of(code: &str) -> Self {
        let reason = |tag, text, command| Self { tag, text, command };
        match code.parse::<Outcome>().ok() {
            Some(Outcome::TargetRefused) => reason("refused", "nothing listens there", "ss -ltnp"),
            Some(Outcome::TargetTimeout) => {
                reason("no answer", "the target does not answer", "ss -ltnp")
            }
            Some(Outcome::TargetTls) => reason(
                "TLS",
                "TLS with the target fails",
                "tunnel-server doctor NAME",
            ),
            Some(Outcome::TargetBadResponse | Outcome::Cut) => reason(
                "cut",
                "the target's response is incomplete or no HTTP",
                "journalctl -u tunnel-agent -n 50",
            ),
            Some(Outcome::RefusedByPolicy) => reason(
                "policy",
                "the policy forbids it",
                "tunnel-server policy show",
            ),
            Some(Outcome::NoAgent) => reason(
                "no agent",
                "no agent is connected, or it does not answer",
                "tunnel-agent doctor",
            ),
            Some(Outcome::AgentLost | Outcome::AgentTimeout) => reason(
                "agent lost",
                "the session ended or the agent did not answer",
                "tunnel-server ping NAME",
            ),
            Some(Outcome::TooManyStreams | Outcome::Overloaded | Outcome::ReaderStalled) => reason(
                "limit",
                "a limit of streams or memory is reached",
                "tunnel-server doctor",
            ),
            Some(Outcome::Draining | Outcome::Starting) => reason(
                "restart",
                "a server stops or starts",
                "tunnel-server doctor",
            ),
            Some(
                Outcome::BadRequest
                | Outcome::UnknownNode
                | Outcome::AmbiguousAddress
                | Outcome::ProxyAuth
                | Outcome::UriTooLong
                | Outcome::HeadTooLarge,
            ) => reason(
                "caller",
                "the request itself is not valid",
                "tunnel-server doctor",
            ),
            Some(Outcome::Ok | Outcome::CallerGone) | None => {
                reason("failed", "see the code", "tunnel-server doctor")
            }
        }
    }
}

/// Returns the names of some other nodes and the number of those that are not named; empty without others.
fn also<'a>(names: impl Iterator<Item = &'a str>, count: usize) -> String {
    let named: Vec<_> = names.take(NAMES_SHOWN).collect();
    let left = count - named.len().min(count);
    match (named.is_empty(), left) {
        (true, _) => String::new(),
        (false, 0) => format!("; also {}", named.join(", ")),
        (false, left) => format!(
            "; also {} and {} more",
            named.join(", "),
            grouped(left as u64)
        ),
    }
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        count => format!("{} times", grouped(count)),
    }
}

/// Returns where a command runs: on the host of another server, or where its program is. `kubectl` runs
/// anywhere.
pub(super) fn place(host: Option<&VisibleText>, command: &str) -> VisibleText {
    let program = command.split(' ').next().unwrap_or_default();
    VisibleText::new(match (host, program) {
        (Some(server), _) => format!("on the host of {}:", server.as_str()),
        (None, "tunnel-server" | "timedatectl") => HERE.to_owned(),
        (None, "tunnel-agent" | "ss" | "journalctl") => "on the node:".to_owned(),
        (None, _) => String::new(),
    })
}

/// Returns the first command of a remedy. A remedy has no text of a peer but checked names.
fn command_in(remedy: &str) -> Option<&str> {
    let programs = ["tunnel-server ", "tunnel-agent "];
    let begins = programs.iter().filter_map(|program| remedy.find(program));
    let (_, command) = remedy.split_at_checked(begins.min()?)?;
    let end = command
        .find([';', ',', ':', '(', ')'])
        .unwrap_or(command.len());
    Some(command.get(..end)?.trim_end())
}

/// The place of the commands of this server.
const HERE: &str = "on this server:";
/// Tag of the conditions of other servers.
const SERVER_GONE: &str = "server";
/// Characters of the reason of a failed request. Other servers send at most 160 bytes.
const REASON_SHOWN: usize = 140;
/// Other nodes that a row names.
const NAMES_SHOWN: usize = 2;
/// Entries of a kind on the overview.
const OF_A_KIND_SHOWN: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_whose_sessions_end_soon_has_a_link_and_words_for_it_until_it_is_over() {
        let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let failure = FailureStatus {
            code: SHORT_SESSION_CODE.to_owned(),
            node: Some("worker-15".to_owned()),
            is_verified: true,
            count: 4,
            address: "192.0.2.1:40000".to_owned(),
            first: "1970-01-12T13:46:00Z".to_owned(),
            last: "1970-01-12T13:46:30Z".to_owned(),
            detail: "session over quic ended after 0 s by the peer (dead): gone".to_owned(),
            remedy: "on the node: tunnel-agent doctor".to_owned(),
            ..FailureStatus::default()
        };
        let row = ConditionRow::of_failure(&failure, now);
        assert!(row.is_node);
        assert_eq!(
            row.text.as_str(),
            "connects and ends again and again: session over quic ended after 0 s by the peer (dead): gone"
        );
        assert_eq!(
            row.detail.as_str(),
            "4 times, last 10 s ago from 192.0.2.1:40000, short_session"
        );
        assert_eq!(row.since.unwrap().text, "for 40 s");
        let over = FailureStatus {
            is_over: true,
            ..failure
        };
        let row = ConditionRow::of_failure(&over, now);
        assert_eq!((row.tag, row.text.as_str()), ("over", over.detail.as_str()));
        assert_eq!(row.since.unwrap().text, "first 40 s ago");
    }

    #[test]
    fn each_command_has_the_place_where_it_runs() {
        let server = VisibleText::new("s2");
        for (host, command, expected) in [
            (None, "tunnel-server doctor", HERE),
            (None, "tunnel-agent doctor", "on the node:"),
            (None, "ss -ltnp", "on the node:"),
            (None, "kubectl get nodes -o wide", ""),
            (Some(&server), SERVER_STATE, "on the host of s2:"),
        ] {
            assert_eq!(place(host, command).as_str(), expected, "{command}");
        }
        for outcome in Outcome::ALL {
            let reason = Reason::of(outcome.label());
            assert!(!place(None, reason.command).is_empty(), "{outcome:?}");
        }
    }

    #[test]
    fn first_command_of_a_remedy_is_found() {
        for (remedy, command) in [
            ("stop one", None),
            (
                "on the node: tunnel-agent doctor",
                Some("tunnel-agent doctor"),
            ),
            (
                "a new token: tunnel-server token create --node a; else tunnel-agent doctor",
                Some("tunnel-server token create --node a"),
            ),
            ("(run tunnel-server doctor)", Some("tunnel-server doctor")),
        ] {
            assert_eq!(command_in(remedy), command, "{remedy}");
        }
    }
}
