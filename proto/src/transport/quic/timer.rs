//! The timer of a connection. quinn's timers of seconds are keep-alives and timeouts, which may be
//! a little late.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use quinn::AsyncTimer;
use tokio::time::{Sleep, sleep_until};

use tunnel_process::timers::coalesced_late;

/// Time from which a deadline may be late. Those of loss detection are sooner on most paths.
const LATE_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct ConnTimer(Pin<Box<Sleep>>);

impl ConnTimer {
    pub(super) fn new(at: Instant) -> Self {
        Self(Box::pin(sleep_until(deadline(at))))
    }
}

impl AsyncTimer for ConnTimer {
    fn reset(self: Pin<&mut Self>, at: Instant) {
        Sleep::reset(self.get_mut().0.as_mut(), deadline(at));
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Future::poll(self.get_mut().0.as_mut(), cx)
    }
}

fn deadline(at: Instant) -> tokio::time::Instant {
    let is_soon = at < Instant::now() + LATE_AFTER;
    let at = at.into();
    if is_soon { at } else { coalesced_late(at) }
}
