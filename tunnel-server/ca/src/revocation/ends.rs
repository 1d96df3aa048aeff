//! The ends of orders. An order that concerns no certificate and no token any more is *over*: it is not
//! announced, not compared and not in the document that servers share. A day later it is forgotten.
//!
//! A revocation in force has no such end, and is never forgotten here. Servers renew it while they are
//! connected to another one, or to the API server. So one that is over was taken back elsewhere, and
//! that was forgotten. The server that returns with it refuses the node, announces nothing, and reports a
//! condition.
//!
//! The clock of this server alone ends nothing. Another clock must agree with it, and for a day before
//! anything is forgotten.

use std::time::SystemTime;

use tokio::time::Instant;
use tunnel_proto::wire::order::Order;

use super::action::{OrderAction, seconds};

/// What a server knows of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownTime {
    /// No other clock can be read now, or one of them differs.
    Unknown,
    /// There is no other server, and no API server. The time may be wrong.
    Alone(SystemTime),
    /// All other clocks agree.
    Confirmed(SystemTime),
}

/// What a server knows of the ends of orders.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// Confirmed time in seconds since 1970; 0 while it is not known.
    pub(super) as_of: u64,
    /// First reading since which the clock is confirmed and has not jumped.
    steady_since: Option<(Instant, SystemTime)>,
}

/// Returns the end of an order that is made now. A clock that is certainly wrong gives it none. A
/// reissue is over with the longest certificate that may exist: `limits.certificateLife` may have been
/// longer before, or at another server.
pub(super) fn of(action: OrderAction, now: u64) -> u64 {
    if now < CLOCK_MIN_SECONDS {
        return u64::MAX;
    }
    now.saturating_add(match action {
        OrderAction::Revoke | OrderAction::Unrevoke => ORDER_SECONDS,
        OrderAction::Reissue => LIFE_MAX_SECONDS + GRACE_SECONDS,
    })
}

impl Ends {
    pub(super) fn is_over(&self, order: Order) -> bool {
        order.is_over(self.as_of)
    }

    /// Returns an order of the shared document, which has no revocation that was taken back.
    pub(super) fn in_document(&self, order: Order) -> Order {
        if order.is_revoked && self.is_over(order) {
            order.with_end(renewed(self.as_of))
        } else {
            order
        }
    }

    /// Records what is known of the time. Returns whether anything may be forgotten.
    pub(super) fn observe(&mut self, time: KnownTime, now: Instant) -> bool {
        let KnownTime::Confirmed(time) = time else {
            (self.as_of, self.steady_since) = (0, None);
            return false;
        };
        self.as_of = seconds(time);
        let (since, began) = self.steady_since.unwrap_or((now, time));
        let passed = now.saturating_duration_since(since);
        let expected = seconds(began) + passed.as_secs();
        let is_steady = self.as_of.abs_diff(expected) <= JUMP_SECONDS;
        self.steady_since = Some(if is_steady {
            (since, began)
        } else {
            (now, time)
        });
        is_steady && passed.as_secs() >= DAY_SECONDS
    }
}

/// Returns the end of what a certificate proves: it can be renewed for a while after its own end.
pub(super) fn of_certificate(not_after: SystemTime) -> u64 {
    seconds(not_after).saturating_add(GRACE_SECONDS)
}

/// Returns the end of a revocation that is renewed now. It is the same for servers that renew it at
/// about the same time.
pub(super) fn renewed(now: u64) -> u64 {
    now.saturating_add(ORDER_SECONDS)
        .checked_next_multiple_of(RENEWAL_SECONDS)
        .unwrap_or(u64::MAX)
}

pub(super) const DAY_SECONDS: u64 = 24 * 60 * 60;
/// Time for which an order is known. Tokens, which it can make void, end within 365 days.
pub(super) const ORDER_SECONDS: u64 = 500 * DAY_SECONDS;
/// The ends of renewed revocations are multiples of this.
const RENEWAL_SECONDS: u64 = 30 * DAY_SECONDS;
/// Largest life of a certificate: `limits.certificateLife`, and the usual one of other CAs.
const LIFE_MAX_SECONDS: u64 = 3653 * DAY_SECONDS;
/// Time for which an expired certificate can be renewed (90 days), and as much for clocks.
const GRACE_SECONDS: u64 = 180 * DAY_SECONDS;
/// Clocks that show an earlier time are wrong: 2025-01-01.
pub(super) const CLOCK_MIN_SECONDS: u64 = 1_735_689_600;
/// Difference to the monotonic clock that is a jump.
const JUMP_SECONDS: u64 = 30;
