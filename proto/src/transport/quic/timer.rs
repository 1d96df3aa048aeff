//! The timer of a connection. quinn's timers of seconds are keep-alives and timeouts, which may be
//! a little late.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use quinn::AsyncTimer;
use tokio::time::{Sleep, sleep_until};

use tunnel_process::timers::coalesced_late;

/// Time from which a deadline may be late. Those of loss detection are sooner on most paths.
const LATE_AFTER: Duration = Duration::from_secs(1);

/// A timer whose deadline moves with every packet: closer with one that must be acknowledged, and
/// away with its acknowledgment. An alarm of tokio that moves closer costs two system calls, so an
/// alarm that is early stays, and moves when it fires.
#[derive(Debug)]
pub(super) struct ConnTimer {
    /// Never later than `deadline`.
    alarm: Pin<Box<Sleep>>,
    deadline: tokio::time::Instant,
}

impl ConnTimer {
    pub(super) fn new(at: Instant) -> Self {
        let deadline = deadline(at);
        Self {
            alarm: Box::pin(sleep_until(deadline)),
            deadline,
        }
    }
}

impl AsyncTimer for ConnTimer {
    fn reset(self: Pin<&mut Self>, at: Instant) {
        let this = self.get_mut();
        this.deadline = deadline(at);
        if this.alarm.is_elapsed() || this.deadline < this.alarm.deadline() {
            this.alarm.as_mut().reset(this.deadline);
        }
    }

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        loop {
            ready!(Future::poll(this.alarm.as_mut(), cx));
            if this.deadline <= this.alarm.deadline() {
                return Poll::Ready(());
            }
            this.alarm.as_mut().reset(this.deadline);
        }
    }
}

fn deadline(at: Instant) -> tokio::time::Instant {
    let is_soon = at < Instant::now() + LATE_AFTER;
    let at = at.into();
    if is_soon { at } else { coalesced_late(at) }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::pin;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn timer_fires_at_its_last_deadline() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut timer = pin!(ConnTimer::new(at(100)));
        // Each row: the deadlines while the timer waits, of which the last one counts.
        for deadlines in [[300, 300], [350, 320], [400, 450], [500, 480], [550, 700]] {
            for deadline in deadlines {
                timer.as_mut().reset(at(deadline));
                // The alarm is set when the timer is polled.
                poll_fn(|cx| {
                    assert!(timer.as_mut().poll(cx).is_pending());
                    Poll::Ready(())
                })
                .await;
            }
            poll_fn(|cx| timer.as_mut().poll(cx)).await;
            let now = tokio::time::Instant::now();
            let late = now.duration_since(at(deadlines[1]).into());
            assert!(now >= at(deadlines[1]).into(), "{deadlines:?} is early");
            assert!(late < Duration::from_millis(5), "{deadlines:?}: {late:?}");
        }
    }
}
