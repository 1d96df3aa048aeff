//! The making of documents whose size grows with the number of nodes: outside the runtime's own
//! threads, at most two at once, and rarely when it is expensive.

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tokio::time::Instant;

/// Documents that are made at once. A process has one set of processors, so it has one limit.
static MAKERS: Semaphore = Semaphore::const_new(2);

/// Age at which a document is always made again.
pub const DOCUMENT_MAX_AGE: Duration = Duration::from_secs(1);

/// Time of making that is spent without any reuse. Small installations never spend it, so that each
/// request there has a document of its own moment.
const FREE_COST: Duration = Duration::from_millis(250);
/// The cost is forgotten at this part of the passing time, so that making takes at most a quarter
/// of one processor while documents can be reused.
const FORGOTTEN_PART: u32 = 4;
/// Cost beyond which nothing is added, so that a burst is forgotten after a few seconds.
const COST_MAX: Duration = Duration::from_secs(1);

/// Makes a document outside the runtime's own threads. At most two are made at once; others wait in
/// order. Dropping the future does not end the work once it has begun.
///
/// # Errors
/// When the work panicked, or the runtime stops.
pub async fn make<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    // The semaphore is never closed.
    let permit = MAKERS.acquire().await.ok();
    tokio::task::spawn_blocking(move || {
        let made = work();
        drop(permit);
        made
    })
    .await
}

/// Decides whether a document is made again for a request. While the making of documents costs
/// little, each request has a new one. Otherwise requests share one for [`DOCUMENT_MAX_AGE`].
#[derive(Debug, Default)]
pub struct MakingCost {
    cost: Duration,
    at: Option<Instant>,
}

impl MakingCost {
    /// Returns whether a document that was made from `made_at` on is reused.
    pub fn is_reusable(&mut self, made_at: Instant, now: Instant) -> bool {
        self.forget(now);
        self.cost > FREE_COST && now.saturating_duration_since(made_at) < DOCUMENT_MAX_AGE
    }

    /// Records that a document was made from `began` to `now`.
    pub fn add(&mut self, began: Instant, now: Instant) {
        self.forget(now);
        let cost = self.cost + now.saturating_duration_since(began);
        self.cost = cost.min(COST_MAX);
    }

    fn forget(&mut self, now: Instant) {
        let passed = self.at.map(|at| now.saturating_duration_since(at));
        self.at = Some(now);
        let forgotten = passed.unwrap_or_default() / FORGOTTEN_PART;
        self.cost = self.cost.saturating_sub(forgotten);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::FutureExt;
    use parking_lot::Mutex;

    use super::*;

    /// Returns the time that is spent in a minute in which a document that takes `cost` is asked for
    /// every 10 ms, and the age of the oldest document that was handed out.
    fn minute(cost: Duration) -> (Duration, Duration) {
        let (mut making, start) = (MakingCost::default(), Instant::now());
        let (mut spent, mut oldest) = (Duration::ZERO, Duration::ZERO);
        let mut made_at: Option<Instant> = None;
        let mut now = start;
        while now < start + Duration::from_secs(60) {
            match made_at.filter(|at| making.is_reusable(*at, now)) {
                Some(at) => oldest = oldest.max(now - at),
                None => {
                    made_at = Some(now);
                    now += cost;
                    spent += cost;
                    making.add(now - cost, now);
                }
            }
            now += Duration::from_millis(10);
        }
        (spent, oldest)
    }

    #[test]
    fn expensive_documents_are_shared_for_a_second_and_cheap_ones_are_always_new() {
        let (_, oldest) = minute(Duration::from_millis(2));
        assert_eq!(oldest, Duration::ZERO);
        for millis in [10, 80, 200] {
            let (spent, oldest) = minute(Duration::from_millis(millis));
            assert!(spent < Duration::from_secs(18), "{millis}: {spent:?}");
            assert!(oldest < DOCUMENT_MAX_AGE, "{millis}: {oldest:?}");
        }
    }

    #[tokio::test]
    async fn two_documents_are_made_at_once_even_if_their_readers_are_gone() {
        let (began, mut begun) = tokio::sync::mpsc::channel(8);
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        let begin = || {
            let (began, ends) = (began.clone(), ends.clone());
            make(move || {
                began.blocking_send(()).unwrap();
                let _ended: Result<(), _> = ends.lock().recv();
            })
        };
        for _ in 0..2 {
            tokio::select! {
                biased;
                _ = begin() => panic!("it has not ended"),
                _ = begun.recv() => {}
            }
        }
        let third = begin();
        tokio::pin!(third);
        assert!(third.as_mut().now_or_never().is_none());
        assert!(begun.try_recv().is_err(), "a third one has begun");
        drop(end);
        third.await.unwrap();
    }
}
