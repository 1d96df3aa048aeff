//! Detection of a dead peer: three timers, three states. All functions are pure.
//!
//! ```text
//! live --silent for suspectAfter, or suspected by peer--> suspect --silent for deadAfter--> dead
//!   ^----------- data and acknowledgements received again ---+
//! ```
//! Timer (a) runs while nothing authenticated is received. Timer (b) runs since the oldest probe
//! without an acknowledgement or a report of the peer that it receives. Over h2 the answer to a probe
//! is behind the data that the peer has sent before it, so (b) begins again while much data arrives. A
//! peer that sends and does not receive suspects this end. Timer (c) runs while data is
//! lost and sent again, and none is acknowledged: a path may pass small packets only, so that probes
//! are answered. The longest one decides. A one-way partition affects only one timer at only one end,
//! so each end reports its state on the control stream.

use std::time::Duration;

use tokio::time::Instant;

use crate::transport::{SessionStats, TransportKind, Undelivered};
use tunnel_process::settings::ConfigErrors;

/// The time limits. [`LivenessLimits::default`] returns the documented values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessLimits {
    /// Interval of the keep-alives that show an idle peer to be alive. Default 5 s.
    pub keep_alive: Duration,
    /// A busy session is suspect after this silence. Default 5 s.
    pub suspect_after_busy: Duration,
    /// An idle session is suspect after this silence. Default 15 s.
    pub suspect_after_idle: Duration,
    /// A session is dead after this silence. Default 60 s.
    pub dead_after: Duration,
    /// Whether this end probes a session before its silence is long: an idle one whose keep-alive
    /// is overdue, and a busy one every `keep_alive`. The server does; the agent's keep-alive does
    /// it for the agent. Default `false`.
    pub probes_idle: bool,
}

impl Default for LivenessLimits {
    fn default() -> Self {
        Self {
            keep_alive: Duration::from_secs(5),
            suspect_after_busy: Duration::from_secs(5),
            suspect_after_idle: Duration::from_secs(15),
            dead_after: Duration::from_secs(60),
            probes_idle: false,
        }
    }
}

impl LivenessLimits {
    /// Returns the interval between probes, and between reports of received data. 2 s by default.
    pub(super) fn probe_interval(&self) -> Duration {
        PROBE_INTERVAL.min(self.suspect_after_busy * 2 / 5)
    }

    /// Checks the limits of a configuration against each other. Keep-alives are up to
    /// `keep_alive_max` apart.
    pub fn check(&self, keep_alive_max: Duration, errors: &mut ConfigErrors) {
        let show = humantime::format_duration;
        if self.suspect_after_busy > self.suspect_after_idle {
            let (busy, idle) = (self.suspect_after_busy, self.suspect_after_idle);
            errors.add(
                "limits.suspectAfterBusy",
                format!(
                    "{} is more than suspectAfterIdle, {}",
                    show(busy),
                    show(idle)
                ),
            );
        }
        if self.suspect_after_idle > self.dead_after {
            let (idle, dead) = (self.suspect_after_idle, self.dead_after);
            errors.add(
                "limits.suspectAfterIdle",
                format!("{} is more than deadAfter, {}", show(idle), show(dead)),
            );
        }
        if keep_alive_max >= self.suspect_after_idle {
            let jitter = if keep_alive_max > self.keep_alive {
                format!(" (up to {} with jitter)", show(keep_alive_max))
            } else {
                String::new()
            };
            errors.add(
                "limits.keepAlive",
                format!(
                    "{}{jitter} is not less than suspectAfterIdle, {}: idle sessions would be suspect",
                    show(self.keep_alive),
                    show(self.suspect_after_idle)
                ),
            );
        }
    }
}

/// The state of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessState {
    /// The peer answers in time.
    Live,
    /// The peer is silent. The session takes no new streams, and the open ones continue.
    Suspect,
    /// The peer was silent for too long. The session must be closed.
    Dead,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessCheck {
    /// The state of the peer after the check.
    pub state: LivenessState,
    /// Whether this end's own timers, without the peer's report, make the session suspect. This end
    /// reports the value to the peer.
    pub is_suspect_locally: bool,
    /// Whether the silence is too long even for an idle session.
    pub is_suspect_idle: bool,
    /// Whether the caller must send a probe.
    pub probe: bool,
    /// The longest of the three silences.
    pub silence: Duration,
    /// What the silence is.
    pub cause: SilenceCause,
    /// Maximum time until the next check. Check at once when a stream opens.
    pub next_check: Duration,
}

/// The timer that has run longest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SilenceCause {
    /// The peer sends nothing, or acknowledges nothing.
    NoAnswer,
    /// The peer answers, but receives no data.
    Undelivered,
}

impl std::fmt::Display for SilenceCause {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::NoAnswer => "no sign of life",
            Self::Undelivered => "no data delivered",
        })
    }
}

/// The three timers of one session.
#[derive(Debug, Clone)]
pub(super) struct Liveness {
    limits: LivenessLimits,
    probe_timeout_busy: Duration,
    /// Time at which data was last received, later by the pauses of this process since then.
    received_at: Instant,
    acknowledged: u64,
    /// Received bytes at the time when much data had last arrived. `None` where no answer waits behind
    /// data.
    data_received: Option<u64>,
    /// The data that is not delivered. Its begin is later by the pauses of this process since then.
    undelivered: Option<Undelivered>,
    /// Time of the oldest probe without an acknowledgement.
    oldest_probe: Option<Instant>,
    last_probe: Instant,
    /// Time from which a probe is due although keep-alives arrive. h2 measures the round trip only
    /// by probes.
    refresh_at: Instant,
    busy_since: Option<Instant>,
    /// Latest time of the next check.
    planned_check: Instant,
    peer_suspects: bool,
    /// The value of `is_suspect_locally` from the last check.
    is_suspect: bool,
}

impl Liveness {
    /// Starts the timers of a session. `stats` were taken at `now`.
    pub(super) fn new(
        limits: LivenessLimits,
        transport: TransportKind,
        stats: SessionStats,
        now: Instant,
    ) -> Self {
        let (probe_timeout_busy, data_received) = match transport {
            // A PING queues behind bulk data.
            TransportKind::H2 => (limits.suspect_after_idle, Some(stats.received)),
            TransportKind::Quic | TransportKind::Memory => (limits.suspect_after_busy, None),
        };
        Self {
            limits,
            probe_timeout_busy,
            received_at: now,
            acknowledged: stats.acknowledged,
            data_received,
            undelivered: None,
            oldest_probe: None,
            last_probe: now,
            refresh_at: now + limits.keep_alive,
            busy_since: None,
            planned_check: now,
            peer_suspects: false,
            is_suspect: false,
        }
    }

    /// Records whether the peer suspects this end.
    pub(super) fn peer_suspects(&mut self, is_suspect: bool) {
        self.peer_suspects = is_suspect;
    }

    /// Records that the peer has received bytes of this end, which answers the probes so far.
    pub(super) fn peer_receives(&mut self) {
        self.oldest_probe = None;
    }

    /// Evaluates the statistics of the session. If the result has `probe` set, the caller must send
    /// a probe.
    pub(super) fn check(&mut self, stats: SessionStats, now: Instant) -> LivenessCheck {
        // At least one stream is open: requests are pending.
        let is_busy = stats.streams > 0;
        self.record(&stats, now);
        self.busy_since = is_busy.then_some(self.busy_since.unwrap_or(now));
        let receive_silence = now.saturating_duration_since(self.received_at);
        let probe_silence = self.oldest_probe.map_or(Duration::ZERO, |oldest_probe| {
            now.saturating_duration_since(oldest_probe)
        });
        let undelivered = self.undelivered_for(now);
        let unanswered = receive_silence.max(probe_silence);
        let silence = unanswered.max(undelivered);
        let limits = &self.limits;
        let is_suspect_idle = is_reached(silence, limits.suspect_after_idle);
        let too_long = is_suspect_idle
            || self.busy_since.is_some_and(|since| {
                let waited = now.saturating_duration_since(since);
                let waits_for_packets = receive_silence.max(undelivered).min(waited);
                is_reached(waits_for_packets, limits.suspect_after_busy)
                    || is_reached(probe_silence.min(waited), self.probe_timeout_busy)
            });
        // Only received data ends the suspicion. Requests that end without an answer do not.
        let is_suspect_locally =
            too_long || (self.is_suspect && is_reached(silence, limits.suspect_after_busy));
        self.is_suspect = is_suspect_locally;
        let state = if is_reached(silence, limits.dead_after) {
            LivenessState::Dead
        } else if is_suspect_locally || self.peer_suspects {
            LivenessState::Suspect
        } else {
            LivenessState::Live
        };
        let probe = self.probe_is_due(is_busy, silence, now);
        if probe {
            self.last_probe = now;
            self.refresh_at = now + self.limits.keep_alive * REFRESH_FACTOR;
            self.oldest_probe.get_or_insert(now);
        }
        let next_check = self.next_check(is_busy || state != LivenessState::Live, silence);
        self.planned_check = now + next_check;
        LivenessCheck {
            state,
            is_suspect_locally,
            is_suspect_idle,
            probe,
            silence,
            cause: if undelivered > unanswered {
                SilenceCause::Undelivered
            } else {
                SilenceCause::NoAnswer
            },
            next_check,
        }
    }

    /// Returns how long data was lost without an acknowledgement. Data that is not sent again is
    /// gone: its streams have ended.
    fn undelivered_for(&self, now: Instant) -> Duration {
        let is_sent_again = |undelivered: &Undelivered| {
            now.saturating_duration_since(undelivered.until) < self.limits.suspect_after_idle
        };
        self.undelivered
            .filter(is_sent_again)
            .map_or(Duration::ZERO, |undelivered| {
                undelivered
                    .until
                    .saturating_duration_since(undelivered.since)
            })
    }

    /// Records what the session has received since the last check.
    fn record(&mut self, stats: &SessionStats, now: Instant) {
        self.received_at = self.received_at.max(stats.received_at);
        let since = self.undelivered.map(|undelivered| undelivered.since);
        self.undelivered = stats.undelivered.map(|undelivered| Undelivered {
            since: since.map_or(undelivered.since, |since| since.max(undelivered.since)),
            ..undelivered
        });
        self.exclude_pause(now);
        if let Some(data_received) = &mut self.data_received
            && stats.received.saturating_sub(*data_received) >= DATA_BYTES_MIN
        {
            *data_received = stats.received;
            self.oldest_probe = self.oldest_probe.map(|probe| probe.max(self.received_at));
        }
        if stats.acknowledged != self.acknowledged {
            self.acknowledged = stats.acknowledged;
            self.oldest_probe = None;
        }
    }

    fn probe_is_due(&self, is_busy: bool, silence: Duration, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.last_probe);
        let (interval, keep_alive) = (self.limits.probe_interval(), self.limits.keep_alive);
        let is_needed = is_busy || silence >= self.overdue_after();
        (is_busy && silence >= interval && since >= interval)
            || (self.limits.probes_idle && is_needed && since >= keep_alive)
            || (self.limits.probes_idle && now >= self.refresh_at)
            || (silence > keep_alive * 2 && since >= interval)
    }

    /// Returns the silence after which a keep-alive is overdue: 1.5 x `keep_alive`, because agents
    /// spread theirs by 20 %, and less if the session would be suspect soon after that.
    fn overdue_after(&self) -> Duration {
        let limits = &self.limits;
        let answer_in_time = (limits.suspect_after_idle * 2 / 3).max(limits.keep_alive);
        (limits.keep_alive * 3 / 2).min(answer_in_time)
    }

    /// Returns the time until the next check. While keep-alives arrive in time, nothing changes
    /// before the next one is overdue.
    fn next_check(&self, is_frequent: bool, silence: Duration) -> Duration {
        let until_overdue = self.overdue_after().checked_sub(silence);
        let interval = match until_overdue.filter(|left| !left.is_zero()) {
            Some(left) if !is_frequent => left,
            Some(_) | None => self.check_interval(is_frequent),
        };
        interval
            .min(self.next_bound(is_frequent, silence))
            .max(CHECK_INTERVAL_MIN)
    }

    /// Returns the interval of checks while a request is pending or the session is suspect, and
    /// while only a keep-alive is overdue.
    fn check_interval(&self, is_frequent: bool) -> Duration {
        if is_frequent {
            self.limits.suspect_after_busy / 20
        } else {
            (self.limits.keep_alive / 5).min(self.limits.suspect_after_idle / 15)
        }
    }

    /// Returns the time until this silence reaches the next limit.
    fn next_bound(&self, is_frequent: bool, silence: Duration) -> Duration {
        let limits = &self.limits;
        [
            // An idle session that is live has no use for this limit.
            is_frequent.then_some(limits.suspect_after_busy),
            Some(limits.suspect_after_idle),
            Some(limits.dead_after),
        ]
        .into_iter()
        .flatten()
        .filter_map(|bound| (bound - margin(bound)).checked_sub(silence))
        .find(|left| !left.is_zero())
        .unwrap_or(limits.dead_after)
    }

    /// Excludes a pause of this process from all timers. A stopped process (SIGSTOP, a suspended
    /// machine) receives nothing, and its next check is late.
    fn exclude_pause(&mut self, now: Instant) {
        let planned = self.planned_check;
        let late = now.saturating_duration_since(planned);
        let interval = self.check_interval(false).max(self.check_interval(true));
        if late <= interval * PAUSE_FACTOR {
            return;
        }
        // What happened after the pause stays as it is.
        let shifted = |at: Instant| if at < planned { at + late } else { at };
        self.received_at = shifted(self.received_at);
        self.last_probe = shifted(self.last_probe);
        self.oldest_probe = self.oldest_probe.map(shifted);
        if let Some(undelivered) = &mut self.undelivered {
            undelivered.since = shifted(undelivered.since);
        }
        self.busy_since = self.busy_since.map(shifted);
    }
}

/// Returns whether `bound` is reached. The result is true slightly early, so that the reaction is
/// in time.
fn is_reached(silence: Duration, bound: Duration) -> bool {
    silence >= bound - margin(bound)
}

/// Returns a fiftieth of `bound`, at most 250 ms.
fn margin(bound: Duration) -> Duration {
    (bound / 50).min(MARGIN_MAX)
}

/// A limit on the log lines about changes between live and suspect. The first change is logged at
/// once, then at most one in 30 s, and a state that lasts is always logged. A bad link may flap for
/// hours, and so may the reports of a peer.
#[derive(Debug, Default)]
pub(super) struct SuspectLogThrottle {
    suspect: bool,
    at: Option<Instant>,
}

impl SuspectLogThrottle {
    /// Returns the time at which a state that was not logged is due, if it lasts.
    pub(super) fn due_at(&self, suspect: bool) -> Option<Instant> {
        self.at
            .filter(|_| suspect != self.suspect)
            .map(|at| at + LOG_INTERVAL)
    }

    /// Returns whether the state should be logged. The state may be unchanged.
    pub(super) fn is_due(&mut self, suspect: bool, now: Instant) -> bool {
        let too_soon = self
            .at
            .is_some_and(|at| now.saturating_duration_since(at) < LOG_INTERVAL);
        let due = suspect != self.suspect && !too_soon;
        if due {
            *self = Self {
                suspect,
                at: Some(now),
            };
        }
        due
    }
}

/// Received bytes that count as much data. PINGs and answers alone are less for minutes.
pub(super) const DATA_BYTES_MIN: u64 = 4 * 1024;
/// Minimum time between two log lines about one session's state.
const LOG_INTERVAL: Duration = Duration::from_secs(30);
/// Upper bound of [`margin`].
const MARGIN_MAX: Duration = Duration::from_millis(250);
/// Interval of probes while a request is pending and one timer exceeds this value.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
/// Minimum time between two checks, however near a limit is.
const CHECK_INTERVAL_MIN: Duration = Duration::from_millis(10);
/// A check that is late by this many intervals indicates a stopped process.
const PAUSE_FACTOR: u32 = 3;
/// Keep-alives between two probes of a session that needs none.
const REFRESH_FACTOR: u32 = 12;

#[cfg(test)]
pub(super) mod tests {
    use std::net::SocketAddr;

    use super::*;

    /// Returns the statistics of a session that has just begun.
    pub(in crate::session) fn stats() -> SessionStats {
        SessionStats {
            received: 0,
            received_at: Instant::now(),
            acknowledged: 0,
            undelivered: None,
            rtt: Duration::from_millis(100),
            remote: SocketAddr::from(([192, 0, 2, 1], 1)),
            streams: 0,
            bytes_in: 0,
            bytes_out: 0,
        }
    }

    struct Clock {
        liveness: Liveness,
        start: Instant,
        now: Instant,
        stats: SessionStats,
        answers: bool,
        sends: bool,
        period: u64,
        probes: u32,
        checks: u32,
    }

    impl Clock {
        fn new(probes_idle: bool, transport: TransportKind) -> Self {
            let now = Instant::now();
            let limits = LivenessLimits {
                probes_idle,
                ..LivenessLimits::default()
            };
            Self {
                liveness: Liveness::new(limits, transport, stats(), now),
                start: now,
                now,
                stats: stats(),
                answers: true,
                sends: true,
                period: 5,
                probes: 0,
                checks: 0,
            }
        }

        /// Checks as often as requested until `seconds` have passed. The simulated peer
        /// acknowledges probes while it answers, and sends data every `period` seconds while it
        /// sends.
        fn run(&mut self, seconds: u64) -> LivenessCheck {
            let end = self.now + Duration::from_secs(seconds);
            loop {
                let check = self.liveness.check(self.stats, self.now);
                self.checks += 1;
                if check.probe {
                    self.probes += 1;
                    if self.answers {
                        self.stats.acknowledged += 1;
                        self.stats.received_at = self.now;
                    }
                }
                if self.now >= end {
                    return check;
                }
                self.now = (self.now + check.next_check).min(end);
                if self.sends {
                    let periods = self.now.duration_since(self.start).as_secs() / self.period;
                    let sent_at = self.start + Duration::from_secs(periods * self.period);
                    self.stats.received_at = self.stats.received_at.max(sent_at);
                }
            }
        }

        /// Returns the seconds until `state`, at most a minute.
        fn first(&mut self, state: LivenessState) -> u64 {
            let found = (1..=60).find(|_| self.run(1).state == state);
            found.unwrap_or(u64::MAX)
        }

        /// Has the peer send and acknowledge nothing while this end waits for `streams` answers.
        fn silence(&mut self, streams: usize) {
            (self.sends, self.answers, self.stats.streams) = (false, false, streams);
        }
    }

    #[test]
    fn peer_that_answers_stays_live_busy_or_idle() {
        for transport in [TransportKind::Quic, TransportKind::H2] {
            for (probes_idle, streams) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
                let mut clock = Clock::new(probes_idle, transport);
                clock.stats.streams = streams;
                for _ in 0..200 {
                    assert_eq!(clock.run(1).state, LivenessState::Live);
                }
            }
        }
    }

    #[test]
    fn silent_peer_is_suspect_at_five_or_fifteen_seconds_and_dead_at_sixty() {
        for (is_busy, bound) in [(true, 5..=6), (false, 15..=16)] {
            let mut clock = Clock::new(true, TransportKind::Quic);
            clock.run(5);
            clock.silence(usize::from(is_busy));
            let suspect = clock.first(LivenessState::Suspect);
            assert!(bound.contains(&suspect), "{suspect}");
            let dead = suspect + clock.first(LivenessState::Dead);
            assert!((59..=61).contains(&dead), "{dead}");
        }
    }

    #[test]
    fn suspicion_is_slightly_early_and_names_the_limit_of_an_idle_session() {
        for (is_busy, limit) in [(true, 5), (false, 15)] {
            let mut clock = Clock::new(false, TransportKind::Quic);
            clock.stats.streams = usize::from(is_busy);
            let check = loop {
                let check = clock.liveness.check(clock.stats, clock.now);
                if check.state == LivenessState::Suspect {
                    break check;
                }
                clock.now += check.next_check;
            };
            assert!(check.silence < Duration::from_secs(limit), "{check:?}");
            assert_eq!(check.is_suspect_idle, !is_busy);
        }
    }

    #[test]
    fn request_on_a_quiet_session_has_five_seconds_from_its_own_start() {
        let mut clock = Clock::new(false, TransportKind::Quic);
        clock.silence(0);
        clock.run(4);
        clock.stats.streams = 1;
        assert_eq!(clock.run(4).state, LivenessState::Live);
        assert_eq!(clock.run(2).state, LivenessState::Suspect);
    }

    #[test]
    fn peer_that_sends_but_acknowledges_nothing_is_suspect() {
        for (transport, bound) in [(TransportKind::Quic, 5..=12), (TransportKind::H2, 15..=22)] {
            let mut clock = Clock::new(true, transport);
            (clock.answers, clock.period, clock.stats.streams) = (false, 4, 1);
            let suspect = clock.first(LivenessState::Suspect);
            assert!(bound.contains(&suspect), "{transport}: {suspect}");
        }
    }

    #[test]
    fn report_that_data_arrives_answers_only_the_probes_before_it() {
        let mut clock = Clock::new(true, TransportKind::H2);
        (clock.answers, clock.stats.streams) = (false, 1);
        for _ in 0..30 {
            assert_eq!(clock.run(2).state, LivenessState::Live);
            clock.liveness.peer_receives();
        }
        let suspect = clock.first(LivenessState::Suspect);
        assert!((15..=20).contains(&suspect), "{suspect}");
    }

    #[test]
    fn answer_over_h2_is_expected_when_the_data_before_it_has_arrived() {
        let mut clock = Clock::new(true, TransportKind::H2);
        (clock.answers, clock.period, clock.stats.streams) = (false, 1, 1);
        for _ in 0..100 {
            clock.stats.received += DATA_BYTES_MIN;
            assert_eq!(clock.run(2).state, LivenessState::Live);
        }
        clock.stats.received += DATA_BYTES_MIN - 1;
        let suspect = clock.first(LivenessState::Suspect);
        assert!((12..=15).contains(&suspect), "{suspect}");
    }

    #[test]
    fn data_is_no_answer_where_acknowledgements_overtake_it() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        (clock.answers, clock.stats.streams) = (false, 1);
        let suspect = (1..=60).find(|_| {
            clock.stats.received += DATA_BYTES_MIN;
            clock.run(1).state == LivenessState::Suspect
        });
        assert!(suspect.is_some_and(|second| second <= 12), "{suspect:?}");
    }

    #[test]
    fn peer_that_receives_no_data_is_suspect_and_dead_although_it_answers() {
        use LivenessState::{Dead, Live, Suspect};
        // Seconds from the first to the last loss, and from there to the check.
        for (what, streams, lost_for, ago, state) in [
            ("a loss", 1, 0, 0, Live),
            ("lost for less than the limit", 1, 4, 1, Live),
            ("busy", 1, 5, 1, Suspect),
            ("idle for less than its limit", 0, 14, 1, Live),
            ("idle", 0, 15, 1, Suspect),
            ("just before the end", 1, 58, 1, Suspect),
            ("for too long", 1, 60, 1, Dead),
            ("nothing is sent any more", 1, 20, 15, Live),
            ("nothing was sent for long enough", 1, 60, 15, Live),
        ] {
            let mut clock = Clock::new(true, TransportKind::Quic);
            (clock.stats.streams, clock.period) = (streams, 1);
            let undelivered = Undelivered {
                since: clock.start + Duration::from_secs(10),
                until: clock.start + Duration::from_secs(10 + lost_for),
            };
            clock.run(10 + lost_for);
            clock.stats.undelivered = Some(undelivered);
            let check = clock.run(ago);
            assert_eq!(check.state, state, "{what}: {check:?}");
            if state != Live {
                assert_eq!(check.cause, SilenceCause::Undelivered, "{what}");
            }
            clock.stats.undelivered = None;
            assert_eq!(clock.run(1).state, Live, "{what}: acknowledged");
        }
    }

    #[test]
    fn loss_that_began_before_a_pause_of_this_process_is_not_older_by_the_pause() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.stats.streams = 1;
        let lost = |since, until| Some(Undelivered { since, until });
        clock.stats.undelivered = lost(clock.now, clock.now);
        clock.run(1);
        let since = clock.start;
        clock.now += Duration::from_secs(100);
        clock.stats.received_at = clock.now;
        clock.stats.undelivered = lost(since, clock.now);
        let check = clock.liveness.check(clock.stats, clock.now);
        assert_eq!(check.state, LivenessState::Live, "{check:?}");
        clock.stats.undelivered = lost(since, clock.now + Duration::from_secs(6));
        assert_eq!(clock.run(6).state, LivenessState::Suspect);
    }

    #[test]
    fn requests_that_give_up_do_not_end_suspicion() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.silence(1);
        assert_eq!(clock.run(6).state, LivenessState::Suspect);
        clock.stats.streams = 0;
        for _ in 0..40 {
            assert_eq!(clock.run(1).state, LivenessState::Suspect);
        }
        (clock.sends, clock.answers) = (true, true);
        clock.run(5);
        assert_eq!(clock.run(1).state, LivenessState::Live);
    }

    #[test]
    fn suspicion_of_the_peer_counts_until_it_is_withdrawn() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.liveness.peer_suspects(true);
        let check = clock.run(1);
        assert_eq!(check.state, LivenessState::Suspect);
        assert!(!check.is_suspect_locally);
        clock.liveness.peer_suspects(false);
        assert_eq!(clock.run(1).state, LivenessState::Live);
    }

    #[test]
    fn probes_come_every_two_seconds_while_a_request_waits_in_silence_and_rarely_when_idle() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.silence(1);
        clock.run(20);
        assert!((8..=10).contains(&clock.probes), "{}", clock.probes);
        let mut busy = Clock::new(true, TransportKind::Quic);
        (busy.stats.streams, busy.period) = (1, 1);
        busy.run(50);
        assert!((9..=10).contains(&busy.probes), "{}", busy.probes);
        let mut idle = Clock::new(true, TransportKind::Quic);
        idle.run(600);
        assert!((9..=11).contains(&idle.probes), "one a minute");
        let mut agent = Clock::new(false, TransportKind::Quic);
        agent.run(50);
        assert_eq!(agent.probes, 0, "the agent's keep-alive does it");
    }

    #[test]
    fn idle_session_is_checked_when_a_keep_alive_is_overdue_and_a_busy_one_often() {
        for (probes_idle, streams, period, checks) in [
            (true, 0, 5, 190..=250),
            (false, 0, 5, 190..=250),
            (false, 0, 6, 160..=250),
            (true, 1, 5, 3900..=4100),
        ] {
            let mut clock = Clock::new(probes_idle, TransportKind::Quic);
            (clock.stats.streams, clock.period) = (streams, period);
            clock.run(1000);
            let (case, found) = ((probes_idle, streams, period), clock.checks);
            assert!(
                checks.contains(&found),
                "{case:?}: {found} checks in 1000 s"
            );
        }
    }

    #[test]
    fn next_check_is_the_earliest_time_of_a_change() {
        let millis = Duration::from_millis;
        let liveness = Clock::new(true, TransportKind::Quic).liveness;
        for (is_frequent, silence, next_check) in [
            (false, 0, 7500),
            (false, 2500, 5000),
            (false, 7000, 500),
            // A probe is due, and its answer is expected.
            (false, 7500, 1000),
            (false, 14_000, 750),
            (true, 0, 250),
            (true, 4800, 100),
            (true, 14_700, 50),
            (true, 59_745, 10),
        ] {
            let next = liveness.next_check(is_frequent, millis(silence));
            assert_eq!(next, millis(next_check), "{is_frequent} {silence}");
        }
    }

    #[test]
    fn overdue_keep_alive_leaves_time_for_a_probe() {
        for (keep_alive, overdue_after) in [(1, 1500), (5, 7500), (10, 10_000), (12, 12_000)] {
            let limits = LivenessLimits {
                keep_alive: Duration::from_secs(keep_alive),
                ..LivenessLimits::default()
            };
            let liveness = Liveness::new(limits, TransportKind::Quic, stats(), Instant::now());
            assert_eq!(liveness.overdue_after().as_millis(), overdue_after);
        }
    }

    #[test]
    fn answer_after_a_pause_is_not_moved() {
        let mut clock = Clock::new(false, TransportKind::Quic);
        clock.run(1);
        clock.now += Duration::from_secs(100);
        clock.stats.received_at = clock.now;
        clock.liveness.check(clock.stats, clock.now);
        clock.silence(0);
        let suspect = clock.first(LivenessState::Suspect);
        assert!((14..=15).contains(&suspect), "{suspect}");
    }

    #[test]
    fn time_in_which_this_process_was_stopped_does_not_count() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.stats.streams = 1;
        clock.run(4);
        clock.now += Duration::from_secs(100);
        let check = clock.liveness.check(clock.stats, clock.now);
        assert_eq!(check.state, LivenessState::Live);
    }

    #[test]
    fn change_that_was_too_soon_is_due_after_thirty_seconds() {
        let (mut log, start) = (SuspectLogThrottle::default(), Instant::now());
        assert_eq!(log.due_at(true), None, "at once");
        assert!(log.is_due(true, start));
        assert_eq!(log.due_at(true), None, "logged");
        assert!(!log.is_due(false, start + Duration::from_secs(1)));
        assert_eq!(log.due_at(false), Some(start + LOG_INTERVAL));
    }

    #[test]
    fn changes_are_logged_at_once_then_every_thirty_seconds_and_the_last_one_always() {
        let (mut log, start) = (SuspectLogThrottle::default(), Instant::now());
        let mut due = |suspect, second| log.is_due(suspect, start + Duration::from_secs(second));
        assert!(!due(false, 0));
        assert!(due(true, 1));
        for second in 2..31 {
            assert!(!due(second % 2 == 0, second), "{second}");
        }
        assert!(!due(true, 31), "that is what was logged last");
        assert!(due(false, 32));
        assert!(!due(true, 33));
        assert!(due(true, 62), "it stayed");
        assert!(!due(true, 100));
    }
}
