//! The sessions as operators see them: the list for the verb `status`, and the condition in
//! `/readyz?verbose` that says which of the wanted sessions are missing, and why.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tunnel_process::meta::Readiness;
use tunnel_proto::transport::TransportKind;
use tunnel_proto::wire::name::{ReplicaId, ZoneName};

/// The number of a connector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ConnectorId(pub(super) u64);

/// The session of one connector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SessionStatus {
    Live {
        replica: ReplicaId,
        /// The zone of the server, if it is known.
        zone: Option<ZoneName>,
        transport: TransportKind,
        since: Instant,
    },
    Missing {
        /// The server that the session should be with.
        replica: Option<ReplicaId>,
        reason: String,
        /// Time of the next dial, or `None` while a server is dialed.
        retry_at: Option<Instant>,
    },
}

/// A session in the list of the meta port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionReport {
    /// The server; `None` while any server will do.
    pub(crate) server: Option<String>,
    /// The zone of the server of a live session, if it is known.
    pub(crate) zone: Option<String>,
    /// The transport of a live session.
    pub(crate) transport: Option<String>,
    /// Age of a live session.
    pub(crate) age_seconds: Option<f64>,
    /// Why there is no live session.
    pub(crate) reason: Option<String>,
    /// Time until the next dial, unless a server is dialed now.
    pub(crate) retry_in_seconds: Option<f64>,
}

impl SessionReport {
    pub(crate) fn is_live(&self) -> bool {
        self.transport.is_some()
    }

    fn new(status: &SessionStatus, now: Instant) -> Self {
        match status {
            SessionStatus::Live {
                replica,
                zone,
                transport,
                since,
            } => Self {
                server: Some(replica.to_string()),
                zone: zone.as_ref().map(ToString::to_string),
                transport: Some(transport.to_string()),
                age_seconds: Some(now.duration_since(*since).as_secs_f64()),
                reason: None,
                retry_in_seconds: None,
            },
            SessionStatus::Missing {
                replica,
                reason,
                retry_at,
            } => Self {
                server: replica.as_ref().map(ToString::to_string),
                zone: None,
                transport: None,
                age_seconds: None,
                reason: Some(reason.clone()),
                retry_in_seconds: retry_at.map(|at| at.duration_since(now).as_secs_f64()),
            },
        }
    }
}

/// The sessions of all connectors, the enrollment before them, and the conditions about both.
#[derive(Debug)]
pub(crate) struct SessionStatuses {
    readiness: Readiness,
    connectors: Mutex<BTreeMap<ConnectorId, SessionStatus>>,
    /// The failed enrollment or renewal, as a session that is missing.
    enrollment: Mutex<Option<SessionStatus>>,
}

impl SessionStatuses {
    pub(crate) fn new(readiness: Readiness) -> Self {
        Self {
            readiness,
            connectors: Mutex::default(),
            enrollment: Mutex::default(),
        }
    }

    /// Returns the readiness that has the condition.
    pub(super) fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Returns the sessions for the meta port.
    pub(crate) fn report(&self, now: Instant) -> Vec<SessionReport> {
        let (connectors, enrollment) = (self.connectors.lock(), self.enrollment.lock());
        let statuses = connectors.values().chain(enrollment.as_ref());
        statuses
            .map(|status| SessionReport::new(status, now))
            .collect()
    }

    /// Sets why the agent has no valid certificate and when it tries again, or `None` if it has one.
    /// Without a time an operator must act.
    pub(crate) fn set_enrollment(&self, failure: Option<(String, Option<Instant>)>) {
        let condition = failure.iter().map(|(reason, _)| reason.clone()).collect();
        self.readiness.set_conditions(ENROLLMENT, condition);
        *self.enrollment.lock() = failure.map(|(reason, retry_at)| SessionStatus::Missing {
            replica: None,
            reason: format!("cannot enroll: {reason}"),
            retry_at,
        });
    }

    /// Replaces the sessions of the connectors.
    pub(super) fn set(&self, statuses: BTreeMap<ConnectorId, SessionStatus>) {
        let mut connectors = self.connectors.lock();
        if *connectors == statuses {
            return;
        }
        *connectors = statuses;
        let condition = condition(&connectors).into_iter().collect();
        self.readiness.set_conditions(SESSION, condition);
    }
}

/// Returns the condition, or `None` if all sessions are live.
fn condition(connectors: &BTreeMap<ConnectorId, SessionStatus>) -> Option<String> {
    let (mut live, mut missing) = (Vec::new(), Vec::new());
    for status in connectors.values() {
        match status {
            SessionStatus::Live { replica, .. } => live.push(replica.as_str()),
            SessionStatus::Missing {
                replica, reason, ..
            } => missing.push((replica, reason)),
        }
    }
    let mut text = format!("{} of {} sessions", live.len(), connectors.len());
    if !live.is_empty() {
        let _infallible = write!(text, ", with {}", live.join(", "));
    }
    let other = if live.is_empty() {
        "any server"
    } else {
        "another server"
    };
    for (replica, reason) in &missing {
        let replica = replica.as_ref().map_or(other, ReplicaId::as_str);
        let _infallible = write!(text, "; none with {replica}: {reason}");
    }
    (!missing.is_empty()).then_some(text)
}

/// Name of the condition that says why there is no valid certificate.
const ENROLLMENT: &str = "enrollment";
/// Name of the condition that says which sessions are missing, and of the readiness block that a ready
/// session removes.
pub(crate) const SESSION: &str = "session";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn missing(replica: Option<&str>, reason: &str) -> SessionStatus {
        SessionStatus::Missing {
            replica: replica.map(|name| name.parse().unwrap()),
            reason: reason.to_owned(),
            retry_at: None,
        }
    }

    fn live(replica: &str) -> SessionStatus {
        SessionStatus::Live {
            replica: replica.parse().unwrap(),
            zone: format!("zone-of-{replica}").parse().ok(),
            transport: TransportKind::Quic,
            since: Instant::now(),
        }
    }

    #[test]
    fn report_has_the_age_of_live_sessions_and_the_next_dial_of_missing_ones() {
        let statuses = SessionStatuses::new(Readiness::default());
        let now = Instant::now();
        let retry_at = Some(now + Duration::from_secs(3));
        let waiting = SessionStatus::Missing {
            replica: None,
            reason: "refused".to_owned(),
            retry_at,
        };
        statuses.set([(ConnectorId(0), live("a")), (ConnectorId(1), waiting)].into());
        let later = now + Duration::from_secs(2);
        let [one, other] = statuses.report(later).try_into().unwrap();
        assert_eq!(one.server.as_deref(), Some("a"));
        assert_eq!(one.zone.as_deref(), Some("zone-of-a"));
        assert_eq!(one.transport.as_deref(), Some("quic"));
        assert!(one.age_seconds.is_some_and(|age| age <= 2.0) && one.reason.is_none());
        assert_eq!(other.retry_in_seconds, Some(1.0));
        assert_eq!(other.reason.as_deref(), Some("refused"));
    }

    #[test]
    fn condition_names_the_live_sessions_and_why_others_are_missing() {
        let cases = [
            (vec![], None),
            (vec![live("a")], None),
            (vec![live("a"), live("b")], None),
            (
                vec![missing(None, "refused")],
                Some("0 of 1 sessions; none with any server: refused"),
            ),
            (
                vec![live("a"), missing(None, "refused")],
                Some("1 of 2 sessions, with a; none with another server: refused"),
            ),
            (
                vec![live("a"), missing(Some("b"), "refused")],
                Some("1 of 2 sessions, with a; none with b: refused"),
            ),
            (
                vec![live("a"), missing(Some("b"), "x"), live("c")],
                Some("2 of 3 sessions, with a, c; none with b: x"),
            ),
        ];
        for (statuses, expected) in cases {
            let connectors: BTreeMap<_, _> = (0..).map(ConnectorId).zip(statuses).collect();
            assert_eq!(condition(&connectors).as_deref(), expected);
        }
    }

    #[test]
    fn failed_enrollment_is_a_condition_and_a_missing_session_until_there_is_a_certificate() {
        let readiness = Readiness::default();
        let statuses = SessionStatuses::new(readiness.clone());
        let now = Instant::now();
        let retry_at = now + Duration::from_secs(2);
        statuses.set_enrollment(Some(("token is used".to_owned(), Some(retry_at))));
        let condition = (ENROLLMENT, "token is used".to_owned());
        assert_eq!(readiness.conditions(), [condition]);
        let [missing] = statuses.report(now).try_into().unwrap();
        assert_eq!(
            missing.reason.as_deref(),
            Some("cannot enroll: token is used")
        );
        assert_eq!(missing.retry_in_seconds, Some(2.0));
        statuses.set_enrollment(None);
        assert!(readiness.conditions().is_empty() && statuses.report(now).is_empty());
    }

    #[test]
    fn condition_ends_with_the_connector() {
        let readiness = Readiness::default();
        let statuses = SessionStatuses::new(readiness.clone());
        statuses.set([(ConnectorId(0), missing(Some("a"), "refused"))].into());
        let text = "0 of 1 sessions; none with a: refused".to_owned();
        assert_eq!(readiness.conditions(), [(SESSION, text)]);
        statuses.set(BTreeMap::new());
        assert!(readiness.conditions().is_empty());
    }
}
