//! The condition that the clock of this server differs from that of the API server, or of another
//! server, and what this server knows of the time because of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tunnel_process::timers::sleep_coalesced;

use super::authority::Authority;
use super::context::ServerContext;
use crate::cluster::ApiServerClock;
use crate::routing::clock::{self, ClockReading};
use crate::routing::peers::Peers;
use tunnel_ca::revocation::ends::KnownTime;

/// The clocks with which that of this server is compared.
#[derive(Debug)]
pub(super) struct OtherClocks {
    /// `None` for a standalone server.
    api_server: Option<ApiServerClock>,
    /// Whether there may be other servers. None is known at the start.
    may_have_peers: bool,
    peers: Arc<Peers>,
}

impl OtherClocks {
    pub(super) fn new(authority: &Authority, context: &ServerContext) -> Self {
        Self {
            api_server: authority.api_server_clock.clone(),
            may_have_peers: context.config.peers.listen.is_some(),
            peers: context.peers.clone(),
        }
    }

    /// Returns the differences, or the first of many.
    pub(super) fn differences(&self) -> Vec<String> {
        Reported::default().lines(&self.seconds_ahead())
    }

    /// Returns by how many seconds this server's clock is ahead of each of the others.
    fn seconds_ahead(&self) -> BTreeMap<String, i64> {
        let (own, now) = (SystemTime::now(), Instant::now());
        let readings = self.readings().into_iter();
        readings
            .map(|(whose, reading)| (whose, reading.seconds_ahead(own, now)))
            .collect()
    }

    fn readings(&self) -> BTreeMap<String, ClockReading> {
        let api_server = self.api_server.as_ref().and_then(ApiServerClock::reading);
        let api_server = api_server.map(|reading| ("the API server".to_owned(), reading));
        let servers = self.peers.clocks().into_iter();
        let servers = servers.map(|(replica, reading)| (format!("server {replica}"), reading));
        api_server.into_iter().chain(servers).collect()
    }

    /// Returns what this server knows of the time.
    fn known_time(&self) -> KnownTime {
        let is_alone = self.api_server.is_none() && !self.may_have_peers;
        let (own, now) = (SystemTime::now(), Instant::now());
        known_time(self.readings().into_values(), is_alone, own, now)
    }
}

/// Returns what a server whose clock shows `own` at `now` knows of the time. `is_alone`: there is no
/// clock that it could read.
fn known_time(
    readings: impl Iterator<Item = ClockReading>,
    is_alone: bool,
    own: SystemTime,
    now: Instant,
) -> KnownTime {
    let mut readings = readings.peekable();
    if readings.peek().is_none() && is_alone {
        return KnownTime::Alone(own);
    }
    let (mut is_read, mut is_apart) = (false, false);
    for reading in readings {
        is_read |= reading.age(now) < READING_VALID;
        is_apart |= clock::is_apart(reading.seconds_ahead(own, now));
    }
    if is_read && !is_apart {
        KnownTime::Confirmed(own)
    } else {
        KnownTime::Unknown
    }
}

/// Reports the differences until the server stops.
pub(super) fn report(authority: &Authority, context: &ServerContext) {
    let clocks = OtherClocks::new(authority, context);
    let readiness = context.readiness.clone();
    let revocations = authority.revocations.clone();
    context.shutdown.spawn_service(async move {
        let mut reported = Reported::default();
        let mut observed: Option<(KnownTime, Instant)> = None;
        loop {
            readiness.report_conditions(LABEL, reported.lines(&clocks.seconds_ahead()));
            let (time, now) = (clocks.known_time(), Instant::now());
            let is_due = observed.is_none_or(|(before, at)| {
                let is_same = std::mem::discriminant(&before) == std::mem::discriminant(&time);
                !is_same || now.saturating_duration_since(at) >= OBSERVATION_INTERVAL
            });
            if is_due {
                observed = Some((time, now));
                revocations.observe_time(time, now);
            }
            sleep_coalesced(POLL).await;
        }
    });
}

/// The differences as they were last reported.
#[derive(Debug, Default)]
struct Reported(BTreeMap<String, i64>);

impl Reported {
    /// Returns a line for each clock that is too far apart. A line stays the same while the
    /// difference does, since the time that an answer takes is in each reading.
    fn lines(&mut self, seconds_ahead: &BTreeMap<String, i64>) -> Vec<String> {
        let apart = seconds_ahead
            .iter()
            .filter(|(_, ahead)| clock::is_apart(**ahead));
        let apart = apart.map(|(whose, ahead)| {
            let before = self.0.get(whose).copied();
            let same = before.filter(|before| before.abs_diff(*ahead) <= SAME_WITHIN);
            (whose.clone(), same.unwrap_or(*ahead))
        });
        self.0 = apart.collect();
        let lines = self.0.iter();
        let lines = lines.filter_map(|(whose, ahead)| clock::difference(whose, *ahead));
        lines.take(LINES_MAX).collect()
    }
}

/// Component of the condition in `/readyz?verbose`.
const LABEL: &str = "clock";
const POLL: Duration = Duration::from_secs(5);
/// Interval at which all orders about nodes are compared with the time.
const OBSERVATION_INTERVAL: Duration = Duration::from_secs(60 * 60);
/// Age from which a reading says nothing about a connection to the other host.
const READING_VALID: Duration = Duration::from_secs(60 * 60);
/// Seconds by which two readings of the same difference are apart at most.
const SAME_WITHIN: u64 = 5;
/// Maximum number of clocks that the condition names.
const LINES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn difference_is_reported_once_until_it_changes_or_ends() {
        let mut reported = Reported::default();
        let mut lines = |ahead: i64| {
            let clocks = [("the API server", ahead), ("server b", 0)];
            let clocks = clocks.map(|(whose, ahead)| (whose.to_owned(), ahead));
            reported.lines(&clocks.into())
        };
        assert!(lines(30).is_empty());
        let first = lines(90);
        assert!(
            first[0].contains("1m 30s ahead of that of the API server"),
            "{first:?}"
        );
        assert_eq!(first.len(), 1);
        assert_eq!(lines(92), first);
        assert!(lines(-3600)[0].contains("1h behind"));
        assert!(lines(0).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn time_is_confirmed_by_a_clock_that_was_read_and_if_none_differs() {
        let (own, read) = (SystemTime::now(), Instant::now());
        let is_known = |ahead: &[i64], is_alone: bool, age: Duration| {
            let readings = ahead.iter().map(|ahead| {
                let apart = Duration::from_secs(ahead.unsigned_abs());
                ClockReading::new(if *ahead > 0 { own - apart } else { own + apart })
            });
            known_time(readings, is_alone, own + age, read + age)
        };
        let soon = Duration::from_secs(60);
        for (ahead, is_alone, age, expected) in [
            (&[0, -20][..], false, soon, KnownTime::Confirmed(own + soon)),
            (&[0, 3600][..], false, soon, KnownTime::Unknown),
            (&[0][..], false, READING_VALID, KnownTime::Unknown),
            (&[][..], false, soon, KnownTime::Unknown),
            (&[][..], true, soon, KnownTime::Alone(own + soon)),
            (&[3600][..], true, soon, KnownTime::Unknown),
        ] {
            assert_eq!(is_known(ahead, is_alone, age), expected, "{ahead:?}");
        }
    }

    #[test]
    fn condition_names_a_few_of_many_clocks() {
        let clocks = (0..60).map(|number| (format!("server {number}"), 100));
        let lines = Reported::default().lines(&clocks.collect());
        assert_eq!(lines.len(), LINES_MAX);
    }
}
