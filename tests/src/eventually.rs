//! Waits for a condition, with a time limit scaled to the speed of the machine.

use std::fmt::Display;
use std::panic::Location;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tunnel_proto::calibration::recalibrate;
pub use tunnel_proto::calibration::{calibration, scaled};

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
        let (began, mut limit) = (Instant::now(), scaled(patience));
        let mut last = "no check was made".to_owned();
        loop {
            last = match timeout_at(began + limit, check()).await {
                Ok(verdict) => match verdict.into_result() {
                    Ok(found) => return found,
                    Err(failure) => failure,
                },
                Err(_elapsed) => format!("the check gave no answer; before that: {last}"),
            };
            if began.elapsed() >= limit {
                // The machine may have become slower since the factor was measured.
                limit = patience.mul_f64(recalibrate());
                if began.elapsed() >= limit {
                    give_up(what, limit, &last, caller);
                }
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
