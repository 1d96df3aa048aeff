//! Callers that send requests in a row to servers that come and go, on new connections and on
//! reused ones.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::node_client::{RequestOutcome, Requester, TimedOutcome};
use crate::client::KeepAliveClient;
use crate::eventually::eventually;

/// Callers in progress.
#[derive(Debug)]
pub struct Callers {
    stop: CancellationToken,
    /// Number of requests that were answered.
    answered: Arc<AtomicUsize>,
    running: JoinSet<Vec<Call>>,
}

/// A request of a caller.
#[derive(Debug, Clone)]
pub struct Call {
    pub host: String,
    pub endpoint: SocketAddr,
    /// Whether the request was sent on a connection of its own.
    pub is_new: bool,
    pub sent: Instant,
    pub answer: TimedOutcome,
}

/// All requests of the callers.
#[derive(Debug)]
pub struct Calls(pub Vec<Call>);

/// The callers of a run.
#[derive(Debug, Clone, Copy)]
pub struct CallerOptions {
    /// Number of callers. Half of them reuse their connections.
    pub callers: usize,
    /// Pause of a caller between two requests.
    pub pause: Duration,
    /// Time after which a request counts as failed.
    pub limit: Duration,
    /// Seed of the answers.
    pub seed: u64,
}

impl Callers {
    /// Starts callers of `hosts` (`NODE:PORT`), which use the current `endpoints` in turn.
    pub fn start(
        endpoints: &watch::Sender<Vec<SocketAddr>>,
        hosts: &[String],
        options: CallerOptions,
    ) -> Self {
        let (stop, mut running) = (CancellationToken::new(), JoinSet::new());
        let answered = Arc::new(AtomicUsize::new(0));
        for (number, host) in (0..options.callers).zip(hosts.iter().cycle()) {
            let caller = Caller {
                endpoints: endpoints.subscribe(),
                host: host.clone(),
                // Each host has callers of both kinds.
                is_new: (number / hosts.len() + number % hosts.len()).is_multiple_of(2),
                next: number,
                answered: Arc::clone(&answered),
                options: CallerOptions {
                    seed: options.seed.wrapping_add((number as u64) << 32),
                    ..options
                },
            };
            running.spawn(caller.run(stop.clone()));
        }
        Self {
            stop,
            answered,
            running,
        }
    }

    /// Waits until more than `least` requests were answered, and for the last answers.
    pub async fn end(mut self, least: usize) -> Result<Calls> {
        eventually("requests of the callers", ENOUGH, async || {
            let answered = self.answered.load(Ordering::Relaxed);
            ensure!(answered > least, "{answered} requests");
            anyhow::Ok(())
        })
        .await;
        self.stop.cancel();
        let mut all = Vec::new();
        while let Some(calls) = self.running.join_next().await {
            all.extend(calls.context("a caller panicked")?);
        }
        Ok(Calls(all))
    }
}

impl Calls {
    /// Checks that all requests were served.
    ///
    /// # Errors
    /// Returns the first failure.
    pub fn ensure_served(&self) -> Result<()> {
        let served = |call: &&Call| call.answer.outcome == RequestOutcome::Served;
        let answered = self.0.iter().filter(served).count();
        let failed = self.0.len() - answered;
        let first = self.0.iter().find(|call| !served(call));
        ensure!(
            failed == 0,
            "{failed} failed and {answered} succeeded; the first: {first:?}"
        );
        Ok(())
    }
}

struct Caller {
    endpoints: watch::Receiver<Vec<SocketAddr>>,
    host: String,
    is_new: bool,
    /// Number of requests so far, from a different start for each caller.
    next: usize,
    answered: Arc<AtomicUsize>,
    options: CallerOptions,
}

impl Caller {
    async fn run(mut self, stop: CancellationToken) -> Vec<Call> {
        let mut calls = Vec::new();
        let mut reused: Option<(Requester, KeepAliveClient)> = None;
        while !stop.is_cancelled() {
            let open = reused.take().filter(|(requester, _)| {
                let endpoints = self.endpoints.borrow();
                endpoints.contains(&requester.address())
            });
            let (requester, mut connection) = match open {
                Some((requester, client)) => (requester, Some(client)),
                None => match self.requester() {
                    Some(requester) => (requester, None),
                    None => {
                        sleep(self.options.pause).await;
                        continue;
                    }
                },
            };
            let sent = Instant::now();
            let limit = self.options.limit;
            let answer = if self.is_new {
                requester.ask(limit).await
            } else {
                requester.ask_on(&mut connection, limit).await
            };
            calls.push(Call {
                host: self.host.clone(),
                endpoint: requester.address(),
                is_new: self.is_new,
                sent,
                answer,
            });
            self.answered.fetch_add(1, Ordering::Relaxed);
            reused = connection.map(|client| (requester, client));
            sleep(self.options.pause).await;
        }
        calls
    }

    /// Returns a requester at the next endpoint, or `None` if there are no endpoints.
    fn requester(&mut self) -> Option<Requester> {
        self.next += 1;
        let endpoint = {
            let endpoints = self.endpoints.borrow();
            *endpoints.get(self.next % endpoints.len().max(1))?
        };
        let seed = self.options.seed.wrapping_add(self.next as u64);
        Some(Requester::new(endpoint, self.host.clone(), seed))
    }
}

/// Time limit for the requests that a check needs. A busy machine needs longer than the event that
/// the callers accompany.
const ENOUGH: Duration = Duration::from_secs(60);
