//! What is known of a process, its host and its peers.

use std::time::Duration;

use tokio::time::timeout;

/// A fact, or the reason why it could not be obtained.
pub type Fact<T> = Result<T, String>;

/// Returns the part of the time limit of a report in which facts are gathered.
pub fn time_for_facts(limit: Duration) -> Duration {
    limit.saturating_sub(RESERVE).max(limit / 2)
}

/// Waits for a fact, for at most `limit`.
///
/// # Errors
/// The reason why there is no fact.
pub async fn within<T>(limit: Duration, fact: impl Future<Output = Fact<T>>) -> Fact<T> {
    let fact = timeout(limit, fact).await;
    fact.unwrap_or_else(|_elapsed| Err(NO_ANSWER.to_owned()))
}

/// The reason why a fact is not known in time.
pub const NO_ANSWER: &str = "no answer in time";
/// Time that is left for the checks and the report.
const RESERVE: Duration = Duration::from_secs(1);
