//! Decides when an end reports to its peer that data arrives. Pure.
//!
//! Over h2 a PING waits behind all data in flight, and an end that only sends receives nothing but the
//! answers. While much data arrives, the receiving end therefore reports it. The receiving end itself
//! needs no report, because the data shows that its peer is alive (`liveness.rs`).

use std::time::Duration;

use tokio::time::Instant;

use super::liveness::{DATA_BYTES_MIN, LivenessLimits};
use crate::transport::SessionStats;

/// The last report of a session.
#[derive(Debug)]
pub(super) struct ReceiveReports {
    interval: Duration,
    at: Instant,
    /// Received bytes at that time.
    received: u64,
}

impl ReceiveReports {
    /// Starts with a session. `stats` were taken at `now`.
    pub(super) fn new(limits: &LivenessLimits, stats: &SessionStats, now: Instant) -> Self {
        Self {
            interval: limits.probe_interval(),
            at: now,
            received: stats.received,
        }
    }

    /// Returns whether a report is due, which then counts as sent.
    pub(super) fn is_due(&mut self, stats: &SessionStats, now: Instant) -> bool {
        let is_due = stats.received.saturating_sub(self.received) >= DATA_BYTES_MIN
            && now.saturating_duration_since(self.at) >= self.interval;
        if is_due {
            (self.at, self.received) = (now, stats.received);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::session::liveness::tests::stats;
    use crate::session::{SessionMonitor, Transition};
    use crate::transport::TransportKind;

    const AGENT: usize = 0;
    const SERVER: usize = 1;
    const PAUSE: Duration = Duration::from_millis(50);
    /// Bytes that pass in each pause.
    const PIECE: u64 = 16 * 1024;
    const RTT: Duration = Duration::from_millis(50);
    /// Longer than a PING may stay unanswered.
    const QUEUE: Duration = Duration::from_secs(20);

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Message {
        Data,
        Ping,
        Pong,
        Report,
    }

    struct End {
        monitor: SessionMonitor,
        stats: SessionStats,
        /// Whether this end sends as much as the queue of the path takes.
        has_data: bool,
        /// h2 has one PING at a time.
        has_ping: bool,
        reports: u32,
        suspects_at: Option<Instant>,
    }

    /// The messages of one end, in order.
    struct Path {
        in_flight: VecDeque<(Instant, Message)>,
        /// When the last message leaves the queue.
        free_at: Instant,
        is_cut: bool,
    }

    /// A transfer over h2. The queue of a path takes more and more data, or all at once.
    struct Transfer {
        start: Instant,
        now: Instant,
        is_sudden: bool,
        ends: [End; 2],
        paths: [Path; 2],
    }

    impl Transfer {
        fn new(senders: &[usize], is_sudden: bool) -> Self {
            let now = Instant::now();
            let end = |number| {
                let limits = LivenessLimits {
                    probes_idle: number == SERVER,
                    ..LivenessLimits::default()
                };
                let stats = SessionStats {
                    received_at: now,
                    streams: 1,
                    ..stats()
                };
                End {
                    monitor: SessionMonitor::new(limits, TransportKind::H2, stats, now),
                    stats,
                    has_data: senders.contains(&number),
                    has_ping: false,
                    reports: 0,
                    suspects_at: None,
                }
            };
            let path = |_number| Path {
                in_flight: VecDeque::new(),
                free_at: now,
                is_cut: false,
            };
            Self {
                start: now,
                now,
                is_sudden,
                ends: [AGENT, SERVER].map(end),
                paths: [AGENT, SERVER].map(path),
            }
        }

        fn send(&mut self, from: usize, message: Message) {
            let path = &mut self.paths[from];
            path.free_at = path.free_at.max(self.now);
            if message == Message::Data {
                path.free_at += PAUSE;
            }
            path.in_flight.push_back((path.free_at + RTT, message));
        }

        fn send_data(&mut self, from: usize) {
            let queue = if self.is_sudden {
                QUEUE
            } else {
                QUEUE.min(self.now - self.start)
            };
            while self.ends[from].has_data && self.paths[from].free_at < self.now + queue {
                self.send(from, Message::Data);
            }
        }

        fn ping(&mut self, from: usize) {
            if !std::mem::replace(&mut self.ends[from].has_ping, true) {
                self.send(from, Message::Ping);
            }
        }

        fn deliver(&mut self, from: usize) {
            let to = 1 - from;
            while let Some((due, message)) = self.paths[from].in_flight.front().copied()
                && due <= self.now
                && !self.paths[from].is_cut
            {
                self.paths[from].in_flight.pop_front();
                let end = &mut self.ends[to];
                end.stats.received_at = self.now;
                end.stats.received += match message {
                    Message::Data => PIECE,
                    Message::Ping | Message::Pong | Message::Report => 17,
                };
                match message {
                    Message::Data => {}
                    Message::Ping => self.send(to, Message::Pong),
                    Message::Pong => {
                        end.has_ping = false;
                        end.stats.acknowledged += 1;
                    }
                    Message::Report => end.monitor.peer_receives(),
                }
            }
        }

        fn check(&mut self, number: usize) {
            let end = &mut self.ends[number];
            if end.monitor.next_check() > self.now {
                return;
            }
            let observation = end.monitor.check(end.stats, self.now);
            if observation.transition == Transition::Suspect {
                end.suspects_at.get_or_insert(self.now);
            }
            if observation.is_receive_report_due {
                end.reports += 1;
                self.send(number, Message::Report);
            }
            if observation.check.probe {
                self.ping(number);
            }
        }

        fn run(&mut self, length: Duration) {
            let end = self.now + length;
            while self.now < end {
                self.now += PAUSE;
                for number in [AGENT, SERVER] {
                    self.deliver(number);
                    self.send_data(number);
                }
                if (self.now - self.start).as_millis().is_multiple_of(5000) {
                    self.ping(AGENT);
                }
                for number in [AGENT, SERVER] {
                    self.check(number);
                }
            }
        }

        /// Loses what `from` sends. Returns the times after which the agent and the server suspect
        /// each other.
        fn cut(&mut self, from: usize) -> [Option<u64>; 2] {
            let began = self.now;
            self.paths[from].is_cut = true;
            self.run(Duration::from_secs(50));
            let ends = self.ends.each_ref();
            ends.map(|end| Some(end.suspects_at?.duration_since(began).as_secs()))
        }
    }

    #[test]
    fn transfer_with_answers_that_take_longer_than_a_probe_may_makes_no_end_suspect() {
        for senders in [&[AGENT][..], &[SERVER], &[AGENT, SERVER]] {
            for is_sudden in [false, true] {
                let mut transfer = Transfer::new(senders, is_sudden);
                transfer.run(Duration::from_secs(120));
                let ends = transfer.ends.each_ref();
                let suspects = ends.map(|end| end.suspects_at);
                assert_eq!(suspects, [None; 2], "{senders:?} {is_sudden}");
                for (number, end) in ends.into_iter().enumerate() {
                    let has_data = senders.contains(&(1 - number));
                    let expected = if has_data { 45..=60 } else { 0..=0 };
                    assert!(expected.contains(&end.reports), "{}", end.reports);
                }
            }
        }
    }

    #[test]
    fn silence_of_one_direction_is_noticed_at_the_end_that_receives_nothing() {
        for (from, to) in [(AGENT, SERVER), (SERVER, AGENT)] {
            for sender in [AGENT, SERVER] {
                let mut transfer = Transfer::new(&[sender], true);
                transfer.run(Duration::from_secs(60));
                let suspects = transfer.cut(from)[to].unwrap();
                // The last bytes may have arrived up to 2 s before.
                assert!((2..=5).contains(&suspects), "{suspects} s");
            }
        }
    }

    #[test]
    fn sender_whose_data_no_longer_arrives_notices_without_the_report_of_its_peer() {
        let mut transfer = Transfer::new(&[AGENT], true);
        transfer.run(Duration::from_secs(60));
        let suspects = transfer.cut(AGENT)[AGENT].unwrap();
        assert!(suspects <= 15, "{suspects} s");
    }

    #[test]
    fn report_is_due_every_two_seconds_while_much_data_arrives() {
        let now = Instant::now();
        let mut reports = ReceiveReports::new(&LivenessLimits::default(), &stats(), now);
        let mut due = |received, millis| {
            let stats = SessionStats {
                received,
                ..stats()
            };
            reports.is_due(&stats, now + Duration::from_millis(millis))
        };
        assert!(!due(DATA_BYTES_MIN, 1999), "too soon");
        assert!(due(DATA_BYTES_MIN, 2000));
        assert!(!due(DATA_BYTES_MIN, 9000), "nothing was received");
        assert!(!due(2 * DATA_BYTES_MIN - 1, 9000), "an idle session");
        assert!(due(2 * DATA_BYTES_MIN, 9000));
        assert!(!due(1 << 20, 10_999), "too soon");
    }
}
