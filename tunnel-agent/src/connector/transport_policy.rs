//! Decides which transport to dial first and when to probe QUIC again. A pure state machine.
//!
//! ```text
//! QUIC --no answer, h2 Ready--> h2 --dialed every quicProbeEvery, Ready--> QUIC
//!                               ^-- lost within quicSteadyAfter: dialed again only after 2, 4, ... 30 min --+
//! ```

use std::time::Duration;

use tokio::time::Instant;
use tunnel_process::backoff::Backoff;
use tunnel_proto::transport::TransportKind;

use crate::config::{Limits, TransportChoice};

/// A transport that sessions can be dialed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SessionTransport {
    /// QUIC over UDP, the preferred transport.
    Quic,
    H2,
}

impl SessionTransport {
    /// Returns the transport for logs and labels.
    pub(crate) fn transport(self) -> TransportKind {
        match self {
            Self::Quic => TransportKind::Quic,
            Self::H2 => TransportKind::H2,
        }
    }
}

/// The change of transport that a ready session brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransportChange {
    /// The transport is the same as before.
    None,
    /// h2 carries sessions because QUIC gave no answer.
    Fallback,
    /// QUIC carries sessions again.
    Upgrade,
}

/// The last working transport, and the time of the next probe.
#[derive(Debug)]
pub(crate) struct TransportPolicy {
    choice: TransportChoice,
    probe_every: Duration,
    steady_after: Duration,
    last_ready: SessionTransport,
    /// Earliest probe according to the last dial of QUIC.
    probe_at: Option<Instant>,
    /// No probe before this time, since QUIC was not stable.
    backoff_until: Option<Instant>,
    /// Time since which QUIC carries sessions after h2 did.
    upgraded_at: Option<Instant>,
    /// Time since which the session that takes new streams is silent or gone.
    lost_at: Option<Instant>,
    /// The waits after consecutive upgrades that were not stable.
    upgrade_waits: Backoff,
}

impl TransportPolicy {
    /// Creates a policy without any dials.
    pub(crate) fn new(choice: TransportChoice, limits: &Limits) -> Self {
        Self {
            choice,
            probe_every: limits.quic_probe_every,
            steady_after: limits.quic_steady_after,
            last_ready: match choice {
                TransportChoice::Auto | TransportChoice::Quic => SessionTransport::Quic,
                TransportChoice::H2 => SessionTransport::H2,
            },
            probe_at: None,
            backoff_until: None,
            upgraded_at: None,
            lost_at: None,
            upgrade_waits: Backoff::new(
                UPGRADE_BACKOFF_MIN,
                UPGRADE_BACKOFF_MAX,
                1.0..=1.0 + UPGRADE_BACKOFF_JITTER,
            ),
        }
    }

    /// Returns the transport to dial at once, and the one to dial in parallel if the first gives no
    /// answer.
    pub(crate) fn dial_order(&self) -> (SessionTransport, Option<SessionTransport>) {
        let second = match (self.choice, self.last_ready) {
            (TransportChoice::Quic | TransportChoice::H2, _) => None,
            (TransportChoice::Auto, SessionTransport::Quic) => Some(SessionTransport::H2),
            (TransportChoice::Auto, SessionTransport::H2) => Some(SessionTransport::Quic),
        };
        (self.last_ready, second)
    }

    /// Records the start of a dial; `random` is from 0 to 1.
    pub(crate) fn record_dial(&mut self, transport: SessionTransport, now: Instant, random: f64) {
        match transport {
            SessionTransport::Quic => {
                let wait = self.probe_every.mul_f64(1.0 - random * PROBE_JITTER);
                self.probe_at = Some(now + wait);
            }
            SessionTransport::H2 => {}
        }
    }

    /// Records that a session is ready and takes new streams; `random` is from 0 to 1.
    pub(crate) fn ready(
        &mut self,
        transport: SessionTransport,
        now: Instant,
        random: f64,
    ) -> TransportChange {
        let lost_at = self.lost_at.take();
        match (self.last_ready, transport) {
            (SessionTransport::Quic, SessionTransport::Quic)
            | (SessionTransport::H2, SessionTransport::H2) => TransportChange::None,
            (SessionTransport::H2, SessionTransport::Quic) => {
                self.last_ready = SessionTransport::Quic;
                self.upgraded_at = Some(now);
                TransportChange::Upgrade
            }
            (SessionTransport::Quic, SessionTransport::H2) => {
                self.last_ready = SessionTransport::H2;
                let upgraded_for = self
                    .upgraded_at
                    .take()
                    .map(|upgraded_at| lost_at.unwrap_or(now).duration_since(upgraded_at));
                self.backoff_until = match upgraded_for {
                    Some(upgraded_for) if upgraded_for < self.steady_after => {
                        Some(now + self.upgrade_waits.next(random))
                    }
                    Some(_) | None => {
                        self.upgrade_waits.restart();
                        None
                    }
                };
                TransportChange::Fallback
            }
        }
    }

    /// Records that the session that takes new streams is silent or gone.
    pub(crate) fn record_loss(&mut self, now: Instant) {
        self.lost_at.get_or_insert(now);
    }

    pub(crate) fn record_recovery(&mut self) {
        self.lost_at = None;
    }

    /// Starts the next dial with h2, since QUIC gave another connector no answer. Call it only
    /// without a session.
    pub(crate) fn adopt_fallback(&mut self, now: Instant) {
        match (self.choice, self.last_ready) {
            (TransportChoice::Auto, SessionTransport::Quic) => {
                self.last_ready = SessionTransport::H2;
                self.upgraded_at = None;
                self.probe_at.get_or_insert(now + self.probe_every);
            }
            (TransportChoice::Auto | TransportChoice::Quic | TransportChoice::H2, _) => {}
        }
    }

    /// Schedules an immediate probe, since the path works: a retired session over QUIC has
    /// recovered, or another connector has a new session over QUIC.
    pub(crate) fn probe_quic_now(&mut self, now: Instant) {
        self.probe_at = self.probe_at.min(Some(now));
    }

    /// Returns when to dial QUIC in addition to a session over h2.
    pub(crate) fn probe_at(&self) -> Option<Instant> {
        match (self.choice, self.last_ready) {
            (TransportChoice::Auto, SessionTransport::H2) => self.probe_at.max(self.backoff_until),
            (TransportChoice::Auto | TransportChoice::Quic | TransportChoice::H2, _) => None,
        }
    }
}

/// Largest fraction by which probes come earlier, so that agents that lost UDP together do not
/// synchronize.
const PROBE_JITTER: f64 = 0.2;
/// First wait after an unstable upgrade to QUIC. The wait doubles.
const UPGRADE_BACKOFF_MIN: Duration = Duration::from_secs(120);
/// Longest wait after an unstable upgrade to QUIC.
const UPGRADE_BACKOFF_MAX: Duration = Duration::from_secs(1800);
/// Largest fraction by which these waits are extended.
const UPGRADE_BACKOFF_JITTER: f64 = 0.1;

#[cfg(test)]
mod tests;
