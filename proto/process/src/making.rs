//! The making of documents whose size grows with the number of nodes: outside the runtime's own
//! threads, at most two at once, and rarely when it is expensive.
//!
//! Callers that ask for the documents wait for them: a source has one of them in making at a time, and
//! at most a quarter of one processor when it asks without pause. So a source that asks for many
//! documents at once does not delay those of others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard, Semaphore};
use tokio::task::JoinError;
use tokio::time::{Instant, sleep};

/// Documents that are made at once. A process has one set of processors, so it has one limit.
static MAKERS: Semaphore = Semaphore::const_new(2);

/// The cost of each source that waits, or has not yet been idle for long enough. The lock of a
/// source is held while a document is made for it.
static SOURCES: Mutex<Option<HashMap<IpAddr, Arc<AsyncMutex<MakingCost>>>>> = Mutex::new(None);

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
/// Longest pause of a source between two documents.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The permit of a source to have one document made.
#[derive(Debug)]
pub struct SourcePermit(OwnedMutexGuard<MakingCost>);

/// Waits until no document is made for a source. Requests of one source wait in order. Cancel-safe.
pub async fn acquire(source: IpAddr) -> SourcePermit {
    let cost = {
        let mut sources = SOURCES.lock();
        let sources = sources.get_or_insert_default();
        let now = Instant::now();
        sources.retain(|_, cost| {
            let is_used = Arc::strong_count(cost) > 1;
            is_used
                || cost
                    .try_lock()
                    .is_ok_and(|mut cost| !cost.is_forgotten(now))
        });
        sources.entry(source).or_default().clone()
    };
    SourcePermit(cost.lock_owned().await)
}

impl SourcePermit {
    /// Waits as long as the documents that were made for the source require. Cancel-safe.
    pub async fn pause(&mut self) {
        let pause = self.0.pause(Instant::now());
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }

    /// Makes a document outside the runtime's own threads. At most two are made at once; others
    /// wait in order. Dropping the future does not end the work once it has begun.
    ///
    /// # Errors
    /// When the work panicked, or the runtime stops.
    pub async fn make<T: Send + 'static>(
        mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        // The semaphore is never closed.
        let maker = MAKERS.acquire().await.ok();
        tokio::task::spawn_blocking(move || {
            let began = Instant::now();
            let made = work();
            self.0.add(began, Instant::now());
            drop((maker, self));
            made
        })
        .await
    }
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

    /// Returns the time after which the cost permits another document.
    fn pause(&mut self, now: Instant) -> Duration {
        self.forget(now);
        let above = self.cost.saturating_sub(FREE_COST);
        (above * FORGOTTEN_PART).min(PAUSE_MAX)
    }

    fn is_forgotten(&mut self, now: Instant) -> bool {
        self.forget(now);
        self.cost.is_zero()
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

    fn source(number: u8) -> IpAddr {
        [192, 0, 2, number].into()
    }

    /// Documents that are made until `end` is dropped.
    struct Blocked {
        began: tokio::sync::mpsc::Sender<()>,
        ends: Arc<Mutex<std::sync::mpsc::Receiver<()>>>,
    }

    impl Blocked {
        fn make(&self, number: u8) -> impl Future<Output = Result<(), JoinError>> + use<> {
            let (began, ends) = (self.began.clone(), self.ends.clone());
            async move {
                let work = move || {
                    began.blocking_send(()).unwrap();
                    let _ended: Result<(), _> = ends.lock().recv();
                };
                acquire(source(number)).await.make(work).await
            }
        }
    }

    #[tokio::test]
    async fn two_documents_are_made_at_once_even_if_their_readers_are_gone() {
        let (began, mut begun) = tokio::sync::mpsc::channel(8);
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        let blocked = Blocked { began, ends };
        for number in [1, 2] {
            tokio::select! {
                biased;
                _ = blocked.make(number) => panic!("it has not ended"),
                _ = begun.recv() => {}
            }
        }
        let third = blocked.make(3);
        tokio::pin!(third);
        assert!(third.as_mut().now_or_never().is_none());
        assert!(begun.try_recv().is_err(), "a third one has begun");
        drop(end);
        third.await.unwrap();
    }

    #[tokio::test]
    async fn source_that_asks_for_many_documents_delays_no_other_source() {
        let (began, mut begun) = tokio::sync::mpsc::channel(64);
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        let blocked = Blocked { began, ends };
        let mut greedy = tokio::task::JoinSet::new();
        for _ in 0..24 {
            greedy.spawn(blocked.make(4));
        }
        begun.recv().await.unwrap();
        let mut other = tokio::task::JoinSet::new();
        other.spawn(blocked.make(5));
        begun.recv().await.unwrap();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(begun.try_recv().is_err(), "a second one of the same source");
        drop(end);
        while let Some(made) = greedy.join_next().await {
            made.unwrap().unwrap();
        }
        other.join_next().await.unwrap().unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn source_without_pause_has_a_quarter_of_one_processor_and_is_forgotten() {
        let begin = Instant::now();
        let mut spent = Duration::ZERO;
        while begin.elapsed() < Duration::from_secs(60) {
            let mut permit = acquire(source(6)).await;
            permit.pause().await;
            // The clock is paused, so the document takes its time by this.
            let began = Instant::now();
            tokio::time::advance(Duration::from_millis(80)).await;
            permit.0.add(began, Instant::now());
            spent += began.elapsed();
        }
        assert!(spent < Duration::from_secs(18), "{spent:?}");
        sleep(COST_MAX * FORGOTTEN_PART).await;
        drop(acquire(source(7)).await);
        let sources = SOURCES.lock().clone().unwrap_or_default();
        assert!(!sources.contains_key(&source(6)));
    }
}
