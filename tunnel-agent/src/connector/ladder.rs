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
pub(crate) enum Rung {
    /// QUIC over UDP: the upper one.
    Quic,
    /// h2 over TCP.
    H2,
}

impl Rung {
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
pub(crate) enum Change {
    /// The transport is the one from before.
    None,
    /// h2 carries sessions because QUIC gave no answer.
    Fallback,
    /// QUIC carries sessions again.
    Promotion,
}

/// What worked, and when to look for better.
#[derive(Debug)]
pub(crate) struct Ladder {
    choice: TransportChoice,
    probe_every: Duration,
    steady_after: Duration,
    /// What last became ready.
    remembered: Rung,
    /// Earliest probe by the last dial of QUIC.
    probe_at: Option<Instant>,
    /// No probe before, since QUIC did not hold.
    hold_until: Option<Instant>,
    /// Since when QUIC carries sessions after h2 did.
    promoted: Option<Instant>,
    /// Since when the session over QUIC is silent or gone.
    missed: Option<Instant>,
    /// Promotions in a row that did not hold.
    setbacks: u32,
}

impl Ladder {
    /// Nothing was tried so far.
    pub(crate) fn new(choice: TransportChoice, limits: &Limits) -> Self {
        Self {
            choice,
            probe_every: limits.quic_probe_every,
            steady_after: limits.quic_steady_after,
            remembered: match choice {
                TransportChoice::Auto | TransportChoice::Quic => Rung::Quic,
                TransportChoice::H2 => Rung::H2,
            },
            probe_at: None,
            hold_until: None,
            promoted: None,
            missed: None,
            setbacks: 0,
        }
    }

    /// What to dial at once, and what beside it when that gives no answer.
    pub(crate) fn order(&self) -> (Rung, Option<Rung>) {
        let second = match (self.choice, self.remembered) {
            (TransportChoice::Quic | TransportChoice::H2, _) => None,
            (TransportChoice::Auto, Rung::Quic) => Some(Rung::H2),
            (TransportChoice::Auto, Rung::H2) => Some(Rung::Quic),
        };
        (self.remembered, second)
    }

    /// A dial has begun; `random` is from 0 to 1.
    pub(crate) fn tried(&mut self, rung: Rung, now: Instant, random: f64) {
        match rung {
            Rung::Quic => {
                let wait = self.probe_every.mul_f64(1.0 - random * PROBE_SPREAD);
                self.probe_at = Some(now + wait);
            }
            Rung::H2 => {}
        }
    }

    /// A session is ready and carries new streams from now on; `random` is from 0 to 1.
    pub(crate) fn ready(&mut self, rung: Rung, now: Instant, random: f64) -> Change {
        let missed = self.missed.take();
        match (self.remembered, rung) {
            (Rung::Quic, Rung::Quic) | (Rung::H2, Rung::H2) => Change::None,
            (Rung::H2, Rung::Quic) => {
                self.remembered = Rung::Quic;
                self.promoted = Some(now);
                Change::Promotion
            }
            (Rung::Quic, Rung::H2) => {
                self.remembered = Rung::H2;
                let held = self
                    .promoted
                    .take()
                    .map(|promoted| missed.unwrap_or(now).duration_since(promoted));
                self.setbacks = match held {
                    Some(held) if held < self.steady_after => self.setbacks.saturating_add(1),
                    Some(_) | None => 0,
                };
                self.hold_until =
                    hold(self.setbacks).map(|hold| now + hold.mul_f64(1.0 + random * HOLD_SPREAD));
                Change::Fallback
            }
        }
    }

    /// The session that carries new streams is silent or gone.
    pub(crate) fn missed(&mut self, now: Instant) {
        self.missed.get_or_insert(now);
    }

    /// It is heard again.
    pub(crate) fn heard(&mut self) {
        self.missed = None;
    }

    /// A retired session over QUIC is heard again: there is a way for a new one.
    pub(crate) fn quic_answers(&mut self, now: Instant) {
        self.probe_at = self.probe_at.min(Some(now));
    }

    /// When to dial QUIC beside a session over h2.
    pub(crate) fn probe_at(&self) -> Option<Instant> {
        match (self.choice, self.remembered) {
            (TransportChoice::Auto, Rung::H2) => self.probe_at.max(self.hold_until),
            (TransportChoice::Auto | TransportChoice::Quic | TransportChoice::H2, _) => None,
        }
    }
}

/// How long QUIC is left alone after so many setbacks.
fn hold(setbacks: u32) -> Option<Duration> {
    let doublings = setbacks.checked_sub(1)?;
    let factor = 2_u32.checked_pow(doublings).unwrap_or(u32::MAX);
    Some(HOLD_FIRST.saturating_mul(factor).min(HOLD_MOST))
}

/// Probes come earlier by up to this share: agents that lost UDP together must not come back in step.
const PROBE_SPREAD: f64 = 0.2;
/// First wait after QUIC did not hold. Doubles.
const HOLD_FIRST: Duration = Duration::from_secs(120);
/// Longest wait.
const HOLD_MOST: Duration = Duration::from_secs(1800);
/// These waits are stretched by up to this share.
const HOLD_SPREAD: f64 = 0.1;

#[cfg(test)]
mod tests;
