//! Which transport is dialled first, and when to look for a way back to QUIC: a pure state machine.
//!
//! ```text
//! QUIC --no answer, h2 Ready--> h2 --dialled every quicProbeEvery, Ready--> QUIC
//!                               ^-- lost within quicSteadyAfter: dialled again only after 2, 4, ... 30 min --+
//! ```

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::transport::TransportKind;

use crate::config::{Limits, TransportChoice};

/// A transport that sessions can be dialled over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum SessionTransport {
    /// QUIC over UDP: the upper one.
    Quic,
    /// h2 over TCP.
    H2,
}

impl SessionTransport {
    /// The transport, as in logs and labels.
    pub(crate) fn transport(self) -> TransportKind {
        match self {
            Self::Quic => TransportKind::Quic,
            Self::H2 => TransportKind::H2,
        }
    }
}

/// What a ready session changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransportChange {
    /// The transport is the one from before.
    None,
    /// h2 carries sessions because QUIC gave no answer.
    Fallback,
    /// QUIC carries sessions again.
    Upgrade,
}

/// What worked, and when to look for better.
#[derive(Debug)]
pub(crate) struct TransportPolicy {
    choice: TransportChoice,
    probe_every: Duration,
    steady_after: Duration,
    /// What last became ready.
    last_ready: SessionTransport,
    /// Earliest probe by the last dial of QUIC.
    probe_at: Option<Instant>,
    /// No probe before, since QUIC did not hold.
    backoff_until: Option<Instant>,
    /// Since when QUIC carries sessions after h2 did.
    upgraded_at: Option<Instant>,
    /// Since when the session over QUIC is silent or gone.
    missed: Option<Instant>,
    /// Promotions in a row that did not hold.
    failed_upgrades: u32,
}

impl TransportPolicy {
    /// Nothing was tried so far.
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
            missed: None,
            failed_upgrades: 0,
        }
    }

    /// What to dial at once, and what beside it when that gives no answer.
    pub(crate) fn dial_order(&self) -> (SessionTransport, Option<SessionTransport>) {
        let second = match (self.choice, self.last_ready) {
            (TransportChoice::Quic | TransportChoice::H2, _) => None,
            (TransportChoice::Auto, SessionTransport::Quic) => Some(SessionTransport::H2),
            (TransportChoice::Auto, SessionTransport::H2) => Some(SessionTransport::Quic),
        };
        (self.last_ready, second)
    }

    /// A dial has begun; `random` is from 0 to 1.
    pub(crate) fn record_dial(&mut self, transport: SessionTransport, now: Instant, random: f64) {
        match transport {
            SessionTransport::Quic => {
                let wait = self.probe_every.mul_f64(1.0 - random * PROBE_JITTER);
                self.probe_at = Some(now + wait);
            }
            SessionTransport::H2 => {}
        }
    }

    /// A session is ready and carries new streams from now on; `random` is from 0 to 1.
    pub(crate) fn ready(
        &mut self,
        transport: SessionTransport,
        now: Instant,
        random: f64,
    ) -> TransportChange {
        let missed = self.missed.take();
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
                    .map(|upgraded_at| missed.unwrap_or(now).duration_since(upgraded_at));
                self.failed_upgrades = match upgraded_for {
                    Some(upgraded_for) if upgraded_for < self.steady_after => {
                        self.failed_upgrades.saturating_add(1)
                    }
                    Some(_) | None => 0,
                };
                self.backoff_until = upgrade_backoff(self.failed_upgrades).map(|upgrade_backoff| {
                    now + upgrade_backoff.mul_f64(1.0 + random * UPGRADE_BACKOFF_JITTER)
                });
                TransportChange::Fallback
            }
        }
    }

    /// The session that carries new streams is silent or gone.
    pub(crate) fn missed(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
    }

    /// It is heard again.
    pub(crate) fn record_recovery(&mut self) {
        self.missed = None;
    }

    /// A retired session over QUIC is heard again: there is a way for a new one.
    pub(crate) fn probe_quic_now(&mut self, now: Instant) {
        self.probe_at = self.probe_at.min(Some(now));
    }

    /// When to dial QUIC beside a session over h2.
    pub(crate) fn probe_at(&self) -> Option<Instant> {
        match (self.choice, self.last_ready) {
            (TransportChoice::Auto, SessionTransport::H2) => self.probe_at.max(self.backoff_until),
            (TransportChoice::Auto | TransportChoice::Quic | TransportChoice::H2, _) => None,
        }
    }
}

/// How long QUIC is left alone after so many setbacks.
fn upgrade_backoff(failed_upgrades: u32) -> Option<Duration> {
    let doublings = failed_upgrades.checked_sub(1)?;
    let factor = 2_u32.checked_pow(doublings).unwrap_or(u32::MAX);
    Some(
        UPGRADE_BACKOFF_MIN
            .saturating_mul(factor)
            .min(UPGRADE_BACKOFF_MAX),
    )
}

/// Probes come earlier by up to this share: agents that lost UDP together must not come back in step.
const PROBE_JITTER: f64 = 0.2;
/// First wait after QUIC did not hold. Doubles.
const UPGRADE_BACKOFF_MIN: Duration = Duration::from_secs(120);
/// Longest wait.
const UPGRADE_BACKOFF_MAX: Duration = Duration::from_secs(1800);
/// These waits are stretched by up to this share.
const UPGRADE_BACKOFF_JITTER: f64 = 0.1;

#[cfg(test)]
mod tests;
