//! Decides when an end reports to its peer that data arrives. Pure.
//!
//! Over h2 the answer to a PING waits behind all data in flight, and an end that only sends receives
//! nothing else. While much data arrives, the receiving end therefore reports it, and the sending end
//! answers. Reports and answers follow each other without waiting, so that they arrive in time
//! although each waits in a long queue. An end that receives nothing sends neither.

use std::time::Duration;

use tokio::time::Instant;

use super::liveness::LivenessLimits;
use crate::transport::SessionStats;

/// Received bytes since the last report, below which none is due. PINGs and answers alone are less
/// for minutes.
const BYTES_MIN: u64 = 4 * 1024;

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
        let is_due = stats.received.saturating_sub(self.received) >= BYTES_MIN
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
    /// Bytes that the agent sends in each step.
    const PIECE: u64 = 16 * 1024;
    const RTT: Duration = Duration::from_millis(50);
    /// Longer than a PING may stay unanswered.
    const QUEUE: Duration = Duration::from_secs(20);

    #[derive(Clone, Copy)]
    enum Message {
        Data,
        Ping,
        Pong,
        Report,
        Answer,
    }

    struct End {
        monitor: SessionMonitor,
        stats: SessionStats,
        /// h2 has one PING at a time.
        has_ping: bool,
        reports: u32,
        suspects_at: Option<Instant>,
    }

    /// The messages of one end, in order.
    #[derive(Default)]
    struct Path {
        in_flight: VecDeque<(Instant, Message)>,
        is_cut: bool,
    }

    /// An upload over h2: the queue of the way up grows as long as the sender fills it.
    struct Upload {
        start: Instant,
        now: Instant,
        ends: [End; 2],
        paths: [Path; 2],
    }

    impl Upload {
        fn new() -> Self {
            let now = Instant::now();
            let end = |probes_idle| {
                let limits = LivenessLimits {
                    probes_idle,
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
                    has_ping: false,
                    reports: 0,
                    suspects_at: None,
                }
            };
            Self {
                start: now,
                now,
                ends: [end(false), end(true)],
                paths: Default::default(),
            }
        }

        fn send(&mut self, from: usize, message: Message) {
            let queue = if from == AGENT {
                (self.now - self.start).min(QUEUE)
            } else {
                Duration::ZERO
            };
            let due = self.now + RTT + queue;
            self.paths[from].in_flight.push_back((due, message));
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
                    Message::Ping | Message::Pong | Message::Report | Message::Answer => 17,
                };
                match message {
                    Message::Data => {}
                    Message::Ping => self.send(to, Message::Pong),
                    Message::Pong => {
                        end.has_ping = false;
                        end.stats.acknowledged += 1;
                    }
                    Message::Report => {
                        end.monitor.peer_receives();
                        self.send(to, Message::Answer);
                    }
                    Message::Answer => end.monitor.peer_receives(),
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
                }
                self.send(AGENT, Message::Data);
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
    fn upload_with_answers_that_take_longer_than_a_probe_may_makes_no_end_suspect() {
        let mut upload = Upload::new();
        upload.run(Duration::from_secs(120));
        let ends = upload.ends.each_ref();
        assert_eq!(ends.map(|end| end.suspects_at), [None; 2]);
        assert_eq!(ends[AGENT].reports, 0, "it receives next to nothing");
        let reports = ends[SERVER].reports;
        assert!((45..=60).contains(&reports), "{reports}");
    }

    #[test]
    fn silence_of_one_direction_during_an_upload_is_noticed_at_the_end_that_receives_nothing() {
        for (from, to) in [(AGENT, SERVER), (SERVER, AGENT)] {
            let mut upload = Upload::new();
            upload.run(Duration::from_secs(60));
            let suspects = upload.cut(from)[to].unwrap();
            // The last bytes may have arrived up to 2 s before.
            assert!((2..=5).contains(&suspects), "{suspects} s");
        }
    }

    #[test]
    fn sender_whose_data_no_longer_arrives_notices_without_the_report_of_its_peer() {
        let mut upload = Upload::new();
        upload.run(Duration::from_secs(60));
        let suspects = upload.cut(AGENT)[AGENT].unwrap();
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
        assert!(!due(BYTES_MIN, 1999), "too soon");
        assert!(due(BYTES_MIN, 2000));
        assert!(!due(BYTES_MIN, 9000), "nothing was received");
        assert!(!due(2 * BYTES_MIN - 1, 9000), "an idle session");
        assert!(due(2 * BYTES_MIN, 9000));
        assert!(!due(1 << 20, 10_999), "too soon");
    }
}
