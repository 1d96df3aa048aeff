//! The condition that the clock of this server differs from that of the API server, or of another
//! server.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use tunnel_proto::timers::sleep_coalesced;

use super::authority::Authority;
use super::context::ServerContext;
use super::reported::ReportedCondition;
use crate::cluster::ApiServerClock;
use crate::routing::clock;
use crate::routing::peers::Peers;

/// The clocks with which that of this server is compared.
#[derive(Debug)]
pub(super) struct OtherClocks {
    /// `None` for a standalone server.
    api_server: Option<ApiServerClock>,
    peers: Arc<Peers>,
}

impl OtherClocks {
    pub(super) fn new(authority: &Authority, context: &ServerContext) -> Self {
        Self {
            api_server: authority.api_server_clock.clone(),
            peers: context.peers.clone(),
        }
    }

    /// Returns the differences, or the first of many.
    pub(super) fn differences(&self) -> Vec<String> {
        Reported::default().lines(&self.seconds_ahead())
    }

    /// Returns by how many seconds this server's clock is ahead of each of the others.
    fn seconds_ahead(&self) -> BTreeMap<String, i64> {
        let api_server = self.api_server.as_ref().and_then(ApiServerClock::reading);
        let api_server = api_server.map(|reading| ("the API server".to_owned(), reading));
        let servers = self.peers.clocks().into_iter();
        let servers = servers.map(|(replica, reading)| (format!("server {replica}"), reading));
        let (own, now) = (SystemTime::now(), Instant::now());
        let clocks = api_server.into_iter().chain(servers);
        clocks
            .map(|(whose, reading)| (whose, reading.seconds_ahead(own, now)))
            .collect()
    }
}

/// Reports the differences until the server stops.
pub(super) fn report(authority: &Authority, context: &ServerContext) {
    let clocks = OtherClocks::new(authority, context);
    let mut condition = ReportedCondition::new(LABEL, &context.readiness);
    context.shutdown.spawn_service(async move {
        let mut reported = Reported::default();
        loop {
            condition.set(reported.lines(&clocks.seconds_ahead()));
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

    #[test]
    fn condition_names_a_few_of_many_clocks() {
        let clocks = (0..60).map(|number| (format!("server {number}"), 100));
        let lines = Reported::default().lines(&clocks.collect());
        assert_eq!(lines.len(), LINES_MAX);
    }
}
