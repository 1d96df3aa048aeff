//! Tasks of the cluster that start again after a panic. An object that nobody foresaw must not end
//! the work of the server for good, nor silently.

use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::time::{sleep, timeout};
use tracing::error;
use tunnel_process::backoff::Backoff;
use tunnel_process::panics;

use super::conditions::{Condition, Conditions};

/// Runs a task, and again after each panic, with a pause and a condition. `after_panic` runs before
/// the pause. Ends when the task ends without a panic.
pub(super) async fn run_restarting<T: Send>(
    task: &'static str,
    state: &mut T,
    conditions: &Conditions,
    mut run: impl for<'a> FnMut(&'a mut T) -> BoxFuture<'a, ()>,
    mut after_panic: impl FnMut(&mut T),
) {
    let mut pauses = Backoff::new(PAUSE_MIN, PAUSE_MAX, 1.0..=1.0);
    loop {
        let panic = {
            let mut running = pin!(AssertUnwindSafe(run(state)).catch_unwind());
            let ended = match timeout(STABLE_AFTER, &mut running).await {
                Ok(ended) => ended,
                Err(_still_runs) => {
                    conditions.set(Condition::Task(task), Vec::new());
                    pauses.restart();
                    running.await
                }
            };
            match ended {
                Ok(()) => return,
                Err(panic) => panic,
            }
        };
        after_panic(state);
        let reason = panics::message(panic.as_ref());
        error!(
            what = task,
            error = reason,
            "a task of the cluster panicked; starting it again"
        );
        conditions.set(
            Condition::Task(task),
            vec![format!(
                "panicked and starts again: {reason}; report this with the objects that it reads"
            )],
        );
        sleep(pauses.next(1.0)).await;
    }
}

const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Time after which a task that started again has recovered.
const STABLE_AFTER: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use tunnel_process::meta::Readiness;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn task_starts_again_after_a_panic_with_a_longer_pause_and_says_so() {
        let readiness = Readiness::default();
        let conditions = Conditions::new(readiness.clone());
        let mut starts: Vec<Instant> = Vec::new();
        let mut panics = 0;
        let shown = readiness.clone();
        run_restarting(
            "task records",
            &mut starts,
            &conditions,
            |starts| {
                let shown = shown.clone();
                Box::pin(async move {
                    starts.push(Instant::now());
                    match starts.len() {
                        1 | 2 => panic!("attempt {}", starts.len()),
                        _ => {
                            let line = shown.conditions().remove(0).1;
                            assert!(line.contains("attempt 2"), "{line}");
                            sleep(2 * STABLE_AFTER).await;
                            assert_eq!(shown.conditions(), []);
                        }
                    }
                })
            },
            |_starts| panics += 1,
        )
        .await;
        assert_eq!((starts.len(), panics), (3, 2));
        assert_eq!(starts[1] - starts[0], PAUSE_MIN);
        assert_eq!(starts[2] - starts[1], 2 * PAUSE_MIN);
    }
}
