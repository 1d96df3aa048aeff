//! Timers that may fire early, so that an idle process wakes less often.
//!
//! tokio 1.54 sorts timers into slots of 1 ms, 64 ms and 4,096 ms since the start of the runtime. A
//! thread wakes at the start of each slot that has a timer, and moves the timer into a smaller slot.
//! A timer of 5 s therefore causes three wakeups. A timer that is due at the start of a slot is not
//! moved into a smaller one, and all that are due at the start of a large slot share one wakeup.

use std::sync::OnceLock;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// Time at which the runtime of this process started.
static RUNTIME_START: OnceLock<Instant> = OnceLock::new();

/// A slot of tokio's second level.
const SLOT: Duration = Duration::from_millis(64);
/// A slot of tokio's third level.
const LARGE_SLOT: Duration = Duration::from_millis(4096);

/// Records the start of the runtime. Call this function right before the runtime is built: tokio
/// rounds deadlines up to whole milliseconds, so up to 1 ms may pass in between. In a process that
/// does not call this function, no timer fires early.
pub fn record_runtime_start() {
    RUNTIME_START.get_or_init(Instant::now);
}

/// Returns a deadline at most 64 ms before `at` that causes fewer wakeups. Returns `at` if that
/// deadline has passed.
pub fn coalesced(at: Instant) -> Instant {
    let now = Instant::now();
    slot_start(at, SLOT)
        .filter(|start| *start > now)
        .unwrap_or(at)
}

/// Returns a deadline at most 64 ms after `at` that causes fewer wakeups.
pub fn coalesced_late(at: Instant) -> Instant {
    let late = at + SLOT - Duration::from_nanos(1);
    slot_start(late, SLOT).unwrap_or(at)
}

/// Returns the start of the current slot of 64 ms: the first deadline of a [`coalesced_period`].
pub fn current_slot() -> Instant {
    let now = Instant::now();
    slot_start(now, SLOT).unwrap_or(now)
}

/// Returns the greatest multiple of 64 ms up to `period`. Returns a shorter period as it is.
pub fn coalesced_period(period: Duration) -> Duration {
    if RUNTIME_START.get().is_none() {
        return period;
    }
    period
        .checked_sub(remainder(period, SLOT))
        .filter(|whole| !whole.is_zero())
        .unwrap_or(period)
}

/// Sleeps for at most `duration`. The sleeps of several tasks end together. A sleep of 8.2 s or more
/// may be 4.1 s shorter, another one 64 ms. Cancel-safe.
pub async fn sleep_coalesced(duration: Duration) {
    let now = Instant::now();
    let at = now + duration;
    let large = (duration >= 2 * LARGE_SLOT).then_some(LARGE_SLOT);
    let start = large
        .into_iter()
        .chain([SLOT])
        .filter_map(|slot| slot_start(at, slot))
        .find(|start| *start > now);
    sleep_until(start.unwrap_or(at)).await;
}

/// Returns the start of the slot that contains `at`, if the start of the runtime is recorded.
fn slot_start(at: Instant, slot: Duration) -> Option<Instant> {
    slot_start_since(*RUNTIME_START.get()?, at, slot)
}

fn slot_start_since(start: Instant, at: Instant, slot: Duration) -> Option<Instant> {
    let since = at.checked_duration_since(start)?;
    at.checked_sub(remainder(since, slot))
}

fn remainder(duration: Duration, slot: Duration) -> Duration {
    let nanos = duration.as_nanos() % slot.as_nanos();
    // Less than a slot.
    Duration::from_nanos(u64::try_from(nanos).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_at_the_start_of_slots() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        for (millis, slot, expected) in [
            (0, SLOT, 0),
            (63, SLOT, 0),
            (64, SLOT, 64),
            (5000, SLOT, 4992),
            (5000, LARGE_SLOT, 4096),
            (8192, LARGE_SLOT, 8192),
        ] {
            let found = slot_start_since(start, at(millis), slot);
            assert_eq!(found, Some(at(expected)), "{millis} {slot:?}");
        }
        assert_eq!(slot_start_since(at(1), start, SLOT), None);
    }

    #[tokio::test(start_paused = true)]
    async fn timers_of_a_process_without_a_recorded_start_are_exact() {
        let now = Instant::now();
        let at = now + Duration::from_millis(7500);
        assert_eq!((coalesced(at), coalesced_late(at)), (at, at));
        sleep_coalesced(Duration::from_secs(10)).await;
        assert_eq!(now.elapsed().as_secs(), 10);
    }
}
