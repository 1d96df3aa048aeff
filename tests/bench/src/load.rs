//! Load generators: closed loops, an open loop that measures from the intended send times, new
//! connections, bulk, and readers that stall.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::client::{Caller, Endpoint};

/// Time limit of a request. A request that takes longer counts as failed.
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Results of the requests of one measurement.
#[derive(Debug, Default, Clone)]
pub(crate) struct LoadResult {
    /// Durations of the successful requests, sorted.
    pub(crate) times: Vec<Duration>,
    pub(crate) failed: usize,
    /// Time from the start of the first request to the end of the last.
    pub(crate) wall: Duration,
}

impl LoadResult {
    /// Returns the successful requests per second.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub(crate) fn rate(&self) -> f64 {
        self.times.len() as f64 / self.wall.as_secs_f64()
    }

    fn take(&mut self, result: Result<Duration>) {
        match result {
            Ok(took) => self.times.push(took),
            Err(_counted) => self.failed += 1,
        }
    }

    fn end(mut self, began: Instant) -> Self {
        self.wall = began.elapsed();
        self.times.sort_unstable();
        self
    }
}

/// Requests one answer of `bytes` over a new connection. Returns the time from the request to the
/// end of the answer.
///
/// # Errors
/// The answer is not complete.
pub(crate) async fn down(endpoint: &Endpoint, bytes: u64) -> Result<Duration> {
    let mut caller = Caller::connect(endpoint).await?;
    let began = Instant::now();
    caller.get(bytes).await?;
    Ok(began.elapsed())
}

/// Sends one body of `bytes` over a new connection. Returns the time from the request to its
/// answer.
///
/// # Errors
/// The target does not read the whole body.
pub(crate) async fn up(endpoint: &Endpoint, bytes: u64) -> Result<Duration> {
    let mut caller = Caller::connect(endpoint).await?;
    let began = Instant::now();
    caller.post(bytes).await?;
    Ok(began.elapsed())
}

/// Requests `streams` answers of `each` bytes at once. Returns their durations, sorted.
///
/// # Errors
/// An answer is not complete.
pub(crate) async fn many(endpoint: &Endpoint, streams: usize, each: u64) -> Result<Vec<Duration>> {
    let mut reading = JoinSet::new();
    for _ in 0..streams {
        let endpoint = endpoint.clone();
        reading.spawn(async move { down(&endpoint, each).await });
    }
    let mut times = Vec::new();
    while let Some(read) = reading.join_next().await {
        times.push(read??);
    }
    times.sort_unstable();
    Ok(times)
}

/// Runs `callers` that request a page of `size` bytes again and again, each over one connection.
pub(crate) async fn closed(
    endpoint: &Endpoint,
    callers: usize,
    size: u64,
    length: Duration,
) -> LoadResult {
    closed_loop(endpoint, callers, size, length, true).await
}

/// Runs `callers` that request a page of `size` bytes again and again, each time over a new
/// connection.
pub(crate) async fn churn(
    endpoint: &Endpoint,
    callers: usize,
    size: u64,
    length: Duration,
) -> LoadResult {
    closed_loop(endpoint, callers, size, length, false).await
}

async fn closed_loop(
    endpoint: &Endpoint,
    callers: usize,
    size: u64,
    length: Duration,
    keep: bool,
) -> LoadResult {
    let began = Instant::now();
    let mut asking = JoinSet::new();
    for _ in 0..callers {
        let endpoint = endpoint.clone();
        asking.spawn(async move {
            let mut asked = LoadResult::default();
            let mut idle_caller = None;
            while began.elapsed() < length {
                let sent = Instant::now();
                let result = one(&endpoint, idle_caller.take(), size).await;
                asked.take(result.map(|caller| {
                    idle_caller = keep.then_some(caller);
                    sent.elapsed()
                }));
                if asked.failed > 100 {
                    break;
                }
            }
            asked
        });
    }
    let mut all = LoadResult::default();
    while let Some(asked) = asking.join_next().await {
        match asked {
            Ok(asked) => {
                all.times.extend(asked.times);
                all.failed += asked.failed;
            }
            Err(_panicked) => all.failed += 1,
        }
    }
    all.end(began)
}

async fn one(endpoint: &Endpoint, idle_caller: Option<Caller>, size: u64) -> Result<Caller> {
    let exchange = async {
        let mut caller = match idle_caller {
            Some(caller) => caller,
            None => Caller::connect(endpoint).await?,
        };
        caller.get(size).await?;
        anyhow::Ok(caller)
    };
    timeout(WAIT_TIMEOUT, exchange).await.context("no answer")?
}

/// Sends `rate` requests a second for `length`. The time of a request begins when the request is
/// due, so a system that stalls delays all requests that are due during the stall. With `keep`,
/// requests reuse idle connections; otherwise each request opens a new one.
///
/// # Errors
/// The thread of the clock cannot be started.
pub(crate) async fn open(
    endpoint: &Endpoint,
    rate: u32,
    length: Duration,
    keep: bool,
) -> Result<LoadResult> {
    open_each(std::slice::from_ref(endpoint), rate, length, keep).await
}

/// Like [`open`], with requests to one endpoint after the other.
///
/// # Errors
/// The thread of the clock cannot be started.
pub(crate) async fn open_each(
    endpoints: &[Endpoint],
    rate: u32,
    length: Duration,
    keep: bool,
) -> Result<LoadResult> {
    let began = Instant::now();
    let mut due = clock(rate, length)?;
    let mut asking: JoinSet<Result<(Duration, usize, Caller)>> = JoinSet::new();
    let mut idle: Vec<_> = endpoints.iter().map(|_| Vec::new()).collect();
    let mut next = (0..endpoints.len()).cycle();
    let mut asked = LoadResult::default();
    loop {
        tokio::select! {
            biased;
            Some(done) = asking.join_next() => match done {
                Ok(Ok((took, at, caller))) => {
                    asked.take(Ok(took));
                    if keep {
                        idle[at].push(caller);
                    }
                }
                Ok(Err(_)) | Err(_) => asked.failed += 1,
            },
            moment = due.recv() => {
                let Some(moment): Option<Instant> = moment else { break };
                let at = next.next().context("no endpoint")?;
                let (endpoint, idle_caller) = (endpoints[at].clone(), idle[at].pop());
                asking.spawn(async move {
                    let caller = one(&endpoint, idle_caller, SMALL).await?;
                    anyhow::Ok((moment.elapsed(), at, caller))
                });
            }
        }
    }
    while let Some(done) = asking.join_next().await {
        match done {
            Ok(Ok((took, ..))) => asked.take(Ok(took)),
            Ok(Err(_)) | Err(_) => asked.failed += 1,
        }
    }
    Ok(asked.end(began))
}

/// Page size of a small request in bytes.
pub(crate) const SMALL: u64 = 1024;

/// Starts a thread that sends the moment at which each request is due, at that moment. The clock is
/// a thread because the timers of the runtime have a resolution of 1 ms. The thread ends after
/// `length`, or when the receiver is dropped.
fn clock(rate: u32, length: Duration) -> Result<mpsc::Receiver<Instant>> {
    let (ticks, due) = mpsc::channel(4096);
    let run = move || {
        let mut next = Instant::now() + Duration::from_millis(1);
        let end = next + length;
        while next < end {
            #[expect(clippy::disallowed_methods, reason = "a thread of its own")]
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            if ticks.blocking_send(next).is_err() {
                return;
            }
            next += Duration::from_secs(1) / rate;
        }
    };
    let clock = std::thread::Builder::new().name("clock".to_owned());
    clock.spawn(run).context("start the clock")?;
    Ok(due)
}

/// Opens connections that request an endless answer. The callers read its beginning and then
/// nothing, until they are dropped.
///
/// # Errors
/// A caller receives no answer.
pub(crate) async fn stall(endpoint: &Endpoint, readers: usize) -> Result<Vec<Caller>> {
    let mut connecting = JoinSet::new();
    for _ in 0..readers {
        let endpoint = endpoint.clone();
        connecting.spawn(async move {
            let mut caller = Caller::connect(&endpoint).await?;
            caller.ask(u64::MAX >> 1).await?;
            let first = timeout(WAIT_TIMEOUT, caller.read())
                .await
                .context("no answer")??;
            ensure!(first > 0, "the answer is empty");
            anyhow::Ok(caller)
        });
    }
    let mut all = Vec::new();
    while let Some(connected) = connecting.join_next().await {
        all.push(connected??);
    }
    Ok(all)
}

/// Opens connections, requests one page over each, and keeps them open.
///
/// # Errors
/// A caller receives no answer.
pub(crate) async fn hold(endpoint: &Endpoint, callers: usize) -> Result<Vec<Caller>> {
    let mut all = Vec::new();
    for _ in 0..callers {
        all.push(one(endpoint, None, SMALL).await?);
    }
    Ok(all)
}

/// Sends requests until one is answered. Returns the time from the first request to the answer.
/// Each request has a short time limit, because nothing may listen yet.
///
/// # Errors
/// No answer arrives within `patience`.
pub(crate) async fn probe(endpoint: &Endpoint, patience: Duration) -> Result<Duration> {
    let began = Instant::now();
    while began.elapsed() < patience {
        if let Ok(Ok(_answered)) = timeout(TRY, one(endpoint, None, SMALL)).await {
            return Ok(began.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    anyhow::bail!("no answer within {patience:?}")
}

const TRY: Duration = Duration::from_secs(2);
