//! Continuous load: callers that send requests without a pause, and streams that must not be cut.
//! Runs in parallel with a change that must not be noticeable.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::client::{Endpoint, Exchange, RawRequest, request};
use crate::eventually::scaled;

/// A request that takes longer has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Requests and streams in progress until [`Load::end`].
#[derive(Debug)]
pub struct Load {
    stop: CancellationToken,
    asking: JoinSet<Vec<String>>,
    holding: JoinSet<Result<u64>>,
    answered: Arc<AtomicU64>,
}

/// The result of the load.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Requests that were answered with 200.
    pub answered: u64,
    /// Results of all other requests.
    pub failures: Vec<String>,
    /// Streams that were open from the beginning to the end.
    pub open_streams: usize,
}

impl Load {
    /// Starts `callers` that request `/metrics` from each of `hosts` (`NODE:PORT`) in a row, and
    /// opens one stream to each host.
    pub async fn start(endpoint: Endpoint, hosts: &[String], callers: usize) -> Result<Self> {
        let mut load = Self {
            stop: CancellationToken::new(),
            asking: JoinSet::new(),
            holding: JoinSet::new(),
            answered: Arc::default(),
        };
        for host in hosts {
            load.hold(endpoint.clone(), host).await?;
            for _ in 0..callers {
                load.ask(endpoint.clone(), host);
            }
        }
        Ok(load)
    }

    /// Returns the number of requests answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }

    fn ask(&mut self, endpoint: Endpoint, host: &str) {
        let (stop, answered) = (self.stop.clone(), self.answered.clone());
        let wanted = RawRequest::get(host, "/metrics");
        self.asking.spawn(async move {
            let mut failures = Vec::new();
            while !stop.is_cancelled() {
                match timeout(scaled(REQUEST_TIMEOUT), request(endpoint.clone(), &wanted)).await {
                    Ok(Ok(reply)) if reply.status == 200 => {
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(Ok(reply)) => failures.push(format!("{}: {}", reply.status, reply.text())),
                    Ok(Err(error)) => failures.push(format!("{error:#}")),
                    Err(_elapsed) => failures.push("no answer".to_owned()),
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            failures
        });
    }

    async fn hold(&mut self, endpoint: Endpoint, host: &str) -> Result<()> {
        let wanted = RawRequest::get(host, "/follow?interval_ms=50");
        let mut stream = Exchange::start(endpoint, &wanted).await?;
        ensure!(stream.status() == 200, "{}", stream.status());
        let stop = self.stop.clone();
        self.holding.spawn(async move {
            let mut lines = 0;
            loop {
                tokio::select! {
                    () = stop.cancelled() => return Ok(lines),
                    line = timeout(scaled(REQUEST_TIMEOUT), stream.line()) => {
                        ensure!(matches!(line, Ok(Some(_))), "cut or stuck after {lines} lines: {:?}", stream.ended());
                        lines += 1;
                    }
                }
            }
        });
        Ok(())
    }

    /// Ends the load.
    ///
    /// # Errors
    /// Returns an error if a stream was cut.
    pub async fn end(mut self) -> Result<Outcome> {
        self.stop.cancel();
        let mut failures = Vec::new();
        while let Some(asked) = self.asking.join_next().await {
            failures.extend(asked?);
        }
        let mut open_streams = 0;
        while let Some(ended) = self.holding.join_next().await {
            ensure!(ended?? > 0, "a stream sent nothing");
            open_streams += 1;
        }
        Ok(Outcome {
            answered: self.answered.load(Ordering::Relaxed),
            failures,
            open_streams,
        })
    }
}

impl Outcome {
    /// Checks that all requests succeeded, and that there were some.
    ///
    /// # Errors
    /// Returns the first failure.
    pub fn check(&self) -> Result<()> {
        let (count, first) = (self.failures.len(), self.failures.first());
        ensure!(
            count == 0,
            "{count} failed and {} succeeded; the first: {first:?}",
            self.answered
        );
        ensure!(
            self.answered > 0 && self.open_streams > 0,
            "nothing happened: {self:?}"
        );
        Ok(())
    }
}
