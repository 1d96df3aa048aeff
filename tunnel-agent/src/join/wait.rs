//! The wait for the first session of a service that `join` has started.

use std::io;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, sleep};
use tunnel_process::meta::MetaAddress;

use super::service::ServiceState;
use crate::connector::status::SessionReport;
use crate::status;

/// What the agent's sessions and the state of its service mean for the wait.
#[derive(Debug, PartialEq, Eq)]
enum Progress {
    /// The sessions, a line each.
    Connected(String),
    Waiting(String),
    /// The service does not get a session by itself.
    Failed(String),
}

/// Waits until the agent has a session, and prints why it has none yet.
///
/// # Errors
/// Returns the reason if the service fails, or has no session after a minute.
pub(super) async fn session(
    address: &MetaAddress,
    started: SystemTime,
    print: &mut impl FnMut(&str) -> io::Result<()>,
) -> Result<String, String> {
    let began = Instant::now();
    let mut shown = String::new();
    let mut shown_at = began;
    loop {
        let sessions = status::sessions(address).await;
        let sessions = sessions.map(|(sessions, _json)| sessions);
        let reason = match progress(sessions, ServiceState::observe(started)) {
            Progress::Connected(lines) => return Ok(lines),
            Progress::Failed(reason) => return Err(reason),
            Progress::Waiting(reason) => reason,
        };
        let waited = began.elapsed();
        if waited >= SESSION_WITHIN {
            return Err(format!(
                "no session within {} s: {reason}",
                waited.as_secs()
            ));
        }
        if reason != shown || shown_at.elapsed() >= SHOW_EVERY {
            // A reader of the output that has gone does not end the wait.
            let _reader_gone = print(&format!(
                "waiting for a session, {} s: {reason}\n",
                waited.as_secs()
            ));
            (shown, shown_at) = (reason, Instant::now());
        }
        sleep(ASK_EVERY).await;
    }
}

fn progress(sessions: io::Result<Vec<SessionReport>>, service: ServiceState) -> Progress {
    if service.active == "failed" || service.restarts >= RESTARTS_MAX {
        let end = service
            .end
            .unwrap_or_else(|| format!("the service is {}", service.active));
        return Progress::Failed(end);
    }
    let sessions = match sessions {
        Ok(sessions) if service.active == "active" => sessions,
        // The port may be that of an agent that does not belong to the service.
        Ok(_) | Err(_) => {
            return Progress::Waiting(service.end.unwrap_or_else(|| STARTING.to_owned()));
        }
    };
    if sessions.iter().any(SessionReport::is_live) {
        return Progress::Connected(status::table(&sessions));
    }
    let reason = sessions.into_iter().find_map(|session| session.reason);
    Progress::Waiting(reason.unwrap_or_else(|| "the agent enrolls".to_owned()))
}

const STARTING: &str = "the service starts";
/// An agent enrolls and dials over QUIC, then over h2, within some seconds. Behind a slow proxy or
/// with a server that starts this takes longer.
const SESSION_WITHIN: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Time after which the same reason is printed again.
const SHOW_EVERY: Duration = Duration::from_secs(10);
/// An agent ends only if an operator must act. A file system may have been late once or twice.
const RESTARTS_MAX: u32 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(transport: Option<&str>, reason: Option<&str>) -> SessionReport {
        SessionReport {
            server: transport.map(|_| "server-1".to_owned()),
            zone: None,
            transport: transport.map(str::to_owned),
            age_seconds: transport.map(|_| 1.0),
            reason: reason.map(str::to_owned),
            retry_in_seconds: None,
        }
    }

    #[test]
    fn only_a_live_session_of_the_running_service_is_a_join() {
        let live = report(Some("quic"), None);
        let refused = report(None, Some("token used"));
        let connected = Progress::Connected(
            "connected to server-1 over quic for 1s\nnot connected to any server: token used; trying now\n".into(),
        );
        let waiting = |text: &str| Progress::Waiting(text.into());
        let failed = |text: &str| Progress::Failed(text.into());
        let no_answer = || Err(io::ErrorKind::ConnectionRefused.into());
        for (sessions, active, restarts, end, expected) in [
            (
                Ok(vec![live.clone(), refused.clone()]),
                "active",
                0,
                None,
                connected,
            ),
            (Ok(vec![refused]), "active", 0, None, waiting("token used")),
            (Ok(vec![]), "active", 1, None, waiting("the agent enrolls")),
            (
                no_answer(),
                "active",
                0,
                None,
                waiting("the service starts"),
            ),
            (no_answer(), "activating", 1, Some("disk"), waiting("disk")),
            // Another agent of this host answers at the port.
            (
                Ok(vec![live.clone()]),
                "activating",
                1,
                Some("port"),
                waiting("port"),
            ),
            (
                Ok(vec![live]),
                "failed",
                0,
                Some("other node"),
                failed("other node"),
            ),
            (
                no_answer(),
                "activating",
                3,
                Some("revoked"),
                failed("revoked"),
            ),
            (Ok(vec![]), "active", 3, Some("revoked"), failed("revoked")),
            (
                no_answer(),
                "failed",
                0,
                None,
                failed("the service is failed"),
            ),
        ] {
            let service = ServiceState {
                active: active.to_owned(),
                restarts,
                end: end.map(str::to_owned),
            };
            let shown = format!("{sessions:?} {service:?}");
            assert_eq!(progress(sessions, service), expected, "{shown}");
        }
    }
}
