//! Waits for a condition, with a time limit scaled to the speed of the machine.

use std::fmt::Display;
use std::hint::black_box;
use std::panic::Location;
use std::sync::OnceLock;
use std::time::{Duration, Instant as Clock};

use tokio::time::{Instant, sleep, timeout_at};

/// Calls `check` every 20 ms until it succeeds and returns its value.
///
/// A check succeeds with `Ok` or `Some`. The panic message contains the text of the last `Err`.
/// `patience` is for the reference machine and is multiplied by [`calibration`]. At least one check
/// is made.
///
/// # Panics
/// Panics if no check has succeeded within the scaled patience. The message contains `what`, the
/// location of the call and the last failure.
#[track_caller]
pub fn eventually<F, Fut>(
    what: &str,
    patience: Duration,
    mut check: F,
) -> impl Future<Output = Value<Fut>>
where
    F: FnMut() -> Fut,
    Fut: Future,
    Fut::Output: CheckResult,
{
    let caller = Location::caller();
    async move {
        let limit = scaled(patience);
        let deadline = Instant::now() + limit;
        let mut last = "no check was made".to_owned();
        loop {
            last = match timeout_at(deadline, check()).await {
                Ok(verdict) => match verdict.into_result() {
                    Ok(found) => return found,
                    Err(failure) => failure,
                },
                Err(_elapsed) => format!("the check gave no answer; before that: {last}"),
            };
            if Instant::now() >= deadline {
                give_up(what, limit, &last, caller);
            }
            sleep(PAUSE).await;
        }
    }
}

/// The value of a successful check for [`eventually`].
pub type Value<Fut> = <<Fut as Future>::Output as CheckResult>::Value;

/// The result of one check: success, or not yet.
pub trait CheckResult {
    /// The value of a successful check.
    type Value;

    /// Splits the result into the value or the reason for the failure.
    ///
    /// # Errors
    /// Returns the reason for "not yet", as text.
    fn into_result(self) -> Result<Self::Value, String>;
}

impl<T, E: Display> CheckResult for Result<T, E> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        self.map_err(|failure| failure.to_string())
    }
}

impl<T> CheckResult for Option<T> {
    type Value = T;

    fn into_result(self) -> Result<T, String> {
        self.ok_or_else(|| "nothing yet".to_owned())
    }
}

/// Converts `patience` for the reference machine to this machine.
pub fn scaled(patience: Duration) -> Duration {
    patience.mul_f64(calibration())
}

/// Returns how much slower this machine is than the reference machine: 1 to 10.
///
/// The factor is measured once per process, in some 20 ms of one core, and printed to stderr. The
/// environment variable `CULVERT_TEST_PATIENCE` (a positive number) replaces the measurement.
pub fn calibration() -> f64 {
    static FACTOR: OnceLock<f64> = OnceLock::new();
    *FACTOR.get_or_init(|| {
        let wish = std::env::var(TIMEOUT_SCALE_VARIABLE).ok();
        let (factor, origin) = match wish.as_deref().and_then(parse_factor) {
            Some(factor) => (factor, TIMEOUT_SCALE_VARIABLE),
            None => (factor_for(measure()), "measured"),
        };
        announce(factor, origin);
        factor
    })
}

fn parse_factor(text: &str) -> Option<f64> {
    let factor = text.trim().parse::<f64>().ok()?;
    (factor > 0.0 && factor <= LARGEST_WISH).then_some(factor)
}

fn factor_for(measured: Duration) -> f64 {
    (measured.as_secs_f64() / REFERENCE.as_secs_f64()).clamp(1.0, 10.0)
}

/// Measures the wall-clock time of the loop, so that a busy machine counts as a slow one.
fn measure() -> Duration {
    let start = Clock::now();
    let mut state = 1_u64;
    for round in 0..ROUNDS {
        state = black_box(state.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ round);
    }
    black_box(state);
    start.elapsed()
}

#[expect(
    clippy::print_stderr,
    reason = "a test run prints its factor once, since it explains its durations"
)]
fn announce(factor: f64, origin: &str) {
    // Cargo sets the variable for tests. The demo also waits, but does not print the factor.
    if std::env::var_os("CARGO_MANIFEST_DIR").is_none() {
        return;
    }
    eprintln!("test patience factor {factor:.2} ({origin})");
}

#[expect(
    clippy::panic,
    reason = "a condition that never came true is a failed test"
)]
fn give_up(what: &str, limit: Duration, last: &str, caller: &Location<'_>) -> ! {
    panic!("{what}: not within {limit:?} ({caller}); last: {last}")
}

/// Short relative to every time limit in use, and long enough to leave the processor to the awaited
/// work.
const PAUSE: Duration = Duration::from_millis(20);

const TIMEOUT_SCALE_VARIABLE: &str = "CULVERT_TEST_PATIENCE";

/// A larger value is a mistake. The bound also prevents overflow in duration arithmetic.
const LARGEST_WISH: f64 = 1000.0;

/// Long enough for a good measurement on a fast machine, and short enough for the start of every
/// test process.
const ROUNDS: u64 = if cfg!(debug_assertions) {
    2_000_000
} else {
    13_000_000
};

/// Somewhat more than the loop takes on an idle server core of about 3 GHz (20 to 27 ms, with or
/// without optimization), so that only a machine that is really slower counts as slower.
const REFERENCE: Duration = Duration::from_millis(30);

#[cfg(test)]
mod tests {

    use super::*;

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "the impossible: not within")]
    async fn panics_with_the_name_of_what_was_awaited() {
        eventually("the impossible", Duration::from_secs(1), || async {
            None::<()>
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "the check gave no answer")]
    async fn a_check_that_hangs_counts_as_failure() {
        eventually(
            "an answer",
            Duration::from_secs(1),
            std::future::pending::<Option<()>>,
        )
        .await;
    }
}
