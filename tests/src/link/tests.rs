use std::time::Duration;

use super::*;
use crate::eventually::scaled;

mod decider;
mod tcp;
mod udp;

const SEED: u64 = 7;
/// Time limit for operations that take milliseconds on an idle machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to watch a socket on which nothing is expected.
const GLANCE: Duration = Duration::from_millis(60);

/// Awaits `future` within the time limit of this machine.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let Ok(found) = tokio::time::timeout(scaled(WAIT_TIMEOUT), future).await else {
        panic!("{what}: not in time");
    };
    found
}

/// Returns whether `future` is still pending after a short time.
async fn hangs<T>(future: impl Future<Output = T>) -> bool {
    tokio::time::timeout(GLANCE, future).await.is_err()
}

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}
