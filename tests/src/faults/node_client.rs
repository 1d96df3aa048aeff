//! Callers of a node that is reached through the tunnel: requests at the HTTP listener, streams at
//! a TCP service.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, interval, sleep_until, timeout};

use super::pipe::{Loads, Pipe};
use super::runs::Run;
use super::watch::{Measured, ensure_soon};
use crate::client::{BodyEnd, HttpReply, KeepAliveClient, RawRequest, request};
use crate::eventually::scaled;
use crate::targets::Exporter;

/// The node's name in every run.
pub const NODE: &str = "worker-1";

/// The node's targets, before any listener is known.
#[derive(Debug)]
pub(super) struct Targets {
    pub(super) exporter: Exporter,
    /// Target of the TCP service.
    pub(super) raw: TcpListener,
}

impl Targets {
    pub(super) async fn start() -> Result<Self> {
        Ok(Self {
            exporter: Exporter::start(NODE).await?,
            raw: TcpListener::bind("127.0.0.1:0").await?,
        })
    }
}

/// The node as seen by callers.
#[derive(Debug)]
pub struct NodeClient {
    pub requester: Requester,
    service: SocketAddr,
    targets: Targets,
    seed: u64,
    pipes: AtomicU64,
}

impl NodeClient {
    pub(super) fn new(
        endpoint: SocketAddr,
        service: SocketAddr,
        targets: Targets,
        seed: u64,
    ) -> Self {
        let host = format!("{NODE}:{}", targets.exporter.addr().port());
        let requester = Requester::new(endpoint, host, seed);
        Self {
            requester,
            service,
            targets,
            seed,
            pipes: AtomicU64::new(0),
        }
    }

    /// Opens a stream to the node.
    pub async fn pipe(&self, loads: Loads) -> Result<Pipe> {
        let number = self.pipes.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.wrapping_mul(1000).wrapping_add(number);
        Pipe::open(self.service, &self.targets.raw, seed, loads).await
    }

    /// Opens a stream with traffic in both directions.
    pub async fn talk(&self) -> Result<Pipe> {
        let pipe = self.pipe(Loads::TALK).await?;
        pipe.settled().await?;
        Ok(pipe)
    }

    /// Opens a stream with traffic in both directions, for a run with an open stream.
    pub async fn talk_if(&self, busy: bool) -> Result<Option<Pipe>> {
        match busy {
            true => self.talk().await.map(Some),
            false => Ok(None),
        }
    }

    /// Checks that no answer of this run had false or missing bytes.
    ///
    /// # Errors
    /// Returns an error with the number of these answers.
    pub fn ensure_equal(&self, run: Run) -> Result<()> {
        let tally = &self.requester.tally;
        let hashed = tally.hashed.load(Ordering::Relaxed);
        run.report(format_args!("answers: {hashed} bytes hashed at both ends"));
        let unequal = tally.unequal.load(Ordering::Relaxed);
        ensure!(unequal == 0, "{unequal} answers with false bytes");
        Ok(())
    }
}

/// Requests pseudo-random bytes from the node and compares their hash.
#[derive(Debug, Clone)]
pub struct Requester {
    address: SocketAddr,
    host: String,
    /// Size of an answer.
    size: usize,
    seed: u64,
    number: Arc<AtomicU64>,
    tally: Arc<Tally>,
}

#[derive(Debug, Default)]
struct Tally {
    hashed: AtomicU64,
    unequal: AtomicU64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOutcome {
    /// All bytes arrived and are correct.
    Served,
    /// The server refused: status and code.
    Refused(u16, String),
    /// The connection was cut, or closed without an answer.
    Cut(String),
    /// No answer arrived in time.
    Silence,
    /// The connection ended in the middle of the answer, without a reset.
    Truncated(String),
    /// A clean answer with missing or wrong bytes.
    Unequal(String),
}

#[derive(Debug, Clone)]
pub struct TimedOutcome {
    pub outcome: RequestOutcome,
    pub took: Duration,
}

impl Requester {
    /// Creates a requester of `host` (`NODE:PORT`) at an HTTP listener.
    pub fn new(address: SocketAddr, host: String, seed: u64) -> Self {
        Self {
            address,
            host,
            size: ANSWER_BYTES,
            seed,
            number: Arc::default(),
            tally: Arc::default(),
        }
    }

    /// Changes the size of the answers, which is that of a scrape.
    pub fn with_size(self, size: usize) -> Self {
        Self { size, ..self }
    }

    /// Returns the address of the HTTP listener.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sends one request on a connection of its own, and waits at most for `limit`.
    pub async fn ask(&self, limit: Duration) -> TimedOutcome {
        let began = Instant::now();
        let get = self.next_request().header("Connection", "close");
        let asked = timeout(limit, request(self.address, &get)).await;
        self.timed(began, asked)
    }

    /// Like [`Requester::ask`], on `connection` or on a new one, which is returned there unless the
    /// answer asked to close it.
    pub async fn ask_on(
        &self,
        connection: &mut Option<KeepAliveClient>,
        limit: Duration,
    ) -> TimedOutcome {
        let began = Instant::now();
        let get = self.next_request();
        let asked = async {
            let mut client = match connection.take() {
                Some(client) => client,
                None => KeepAliveClient::connect(self.address).await?,
            };
            let reply = client.request(&get).await?;
            let is_closing = (reply.header("connection"))
                .is_some_and(|value| value.eq_ignore_ascii_case("close"));
            if !is_closing && reply.ended.is_clean() {
                *connection = Some(client);
            }
            anyhow::Ok(reply)
        };
        let asked = timeout(limit, asked).await;
        self.timed(began, asked)
    }

    fn next_request(&self) -> RawRequest {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let seed = self.seed.wrapping_add(number);
        let path = format!("/size/{}?seed={seed}", self.size);
        RawRequest::new("GET", &path, &self.host)
    }

    fn timed(&self, began: Instant, asked: Result<Result<HttpReply>, Elapsed>) -> TimedOutcome {
        let outcome = match asked {
            Err(_elapsed) => RequestOutcome::Silence,
            Ok(Err(error)) => RequestOutcome::Cut(format!("{error:#}")),
            Ok(Ok(reply)) => self.outcome(&reply),
        };
        TimedOutcome {
            outcome,
            took: began.elapsed(),
        }
    }

    fn outcome(&self, reply: &HttpReply) -> RequestOutcome {
        match (reply.status, reply.header("x-tunnel-error"), &reply.ended) {
            (200, None, BodyEnd::Reset(kind)) => RequestOutcome::Cut(kind.to_string()),
            (200, None, ended) => {
                let (hash, bytes) = (reply.sha256(), reply.body.len());
                if ended.is_clean() && reply.header("x-sha256") == Some(&hash) {
                    self.tally.hashed.fetch_add(bytes as u64, Ordering::Relaxed);
                    return RequestOutcome::Served;
                }
                self.tally.unequal.fetch_add(1, Ordering::Relaxed);
                let what = format!("{bytes} bytes, {ended:?}");
                if *ended == BodyEnd::Truncated {
                    RequestOutcome::Truncated(what)
                } else {
                    RequestOutcome::Unequal(what)
                }
            }
            (status, code, _) => RequestOutcome::Refused(status, code.unwrap_or("?").to_owned()),
        }
    }

    /// Sends a request every 100 ms, independent of the previous ones, until one is served. Returns
    /// its time after `since`, or `Err` if none was served within `give_up`.
    pub async fn serving(&self, since: Instant, give_up: Duration) -> Measured {
        self.serves(since, give_up, Duration::ZERO).await
    }

    /// Like [`Requester::serving`], but permanently: all requests sent in the second after the
    /// first served one are served too.
    pub async fn serving_on(&self, since: Instant, give_up: Duration) -> Measured {
        self.serves(since, give_up, FOR_GOOD).await
    }

    /// Sends requests until all that were sent within some time are served. Returns the time of the
    /// first of them after `since`.
    async fn serves(&self, since: Instant, give_up: Duration, steady: Duration) -> Measured {
        let deadline = since + give_up;
        let mut asking = JoinSet::new();
        let mut ticks = interval(ASK_EVERY);
        // The time of the last request that was not served, and the later requests that were: sent,
        // and answered.
        let mut last_failed = None;
        let mut served: BTreeMap<Instant, Instant> = BTreeMap::new();
        loop {
            tokio::select! {
                biased;
                Some(asked) = asking.join_next() => {
                    let Ok((sent, asked)): Result<(Instant, TimedOutcome), _> = asked else { continue };
                    if asked.outcome == RequestOutcome::Served {
                        served.insert(sent, sent + asked.took);
                    } else {
                        last_failed = last_failed.max(Some(sent));
                    }
                    served.retain(|sent, _| Some(*sent) > last_failed);
                    if let Some(((first, answered), (last, _))) = served.first_key_value().zip(served.last_key_value())
                        && *last >= *first + steady
                    {
                        return Ok(answered.saturating_duration_since(since));
                    }
                }
                () = sleep_until(deadline) => return Err(since.elapsed()),
                _ = ticks.tick() => {
                    let (requester, limit) = (self.clone(), scaled(ASK_LIMIT));
                    asking.spawn(async move { (Instant::now(), requester.ask(limit).await) });
                }
            }
        }
    }

    /// Sends requests at an interval until `end` completes, and waits at most `limit` for each of
    /// them. Returns the outcomes of all.
    pub async fn ask_during(
        &self,
        every: Duration,
        limit: Duration,
        end: impl Future<Output = ()>,
    ) -> Result<Vec<TimedOutcome>> {
        let mut asking = JoinSet::new();
        let mut ticks = interval(every);
        let mut end = std::pin::pin!(end);
        loop {
            tokio::select! {
                biased;
                () = &mut end => break,
                _ = ticks.tick() => {
                    let requester = self.clone();
                    asking.spawn(async move { requester.ask(limit).await });
                }
            }
        }
        let mut outcomes = Vec::new();
        while let Some(asked) = asking.join_next().await {
            outcomes.push(asked.context("a request panicked")?);
        }
        Ok(outcomes)
    }

    /// Waits until the node serves, with sequential requests.
    pub async fn ready(&self) -> Result<()> {
        let serves = async || self.ask(scaled(ASK_LIMIT)).await.outcome == RequestOutcome::Served;
        ensure_soon("the node does not serve", READY, serves).await
    }

    /// Sends requests to a suspect node until `end`, when the node recovers.
    ///
    /// # Errors
    /// Returns an error if a request was not refused with 503, or not at once.
    pub async fn ensure_refused(&self, run: Run, end: Instant, every: Duration) -> Result<()> {
        let mut slowest = Duration::ZERO;
        let (mut asked, mut others) = (0_u64, Vec::new());
        let mut ticks = interval(every);
        loop {
            ticks.tick().await;
            let left = end.saturating_duration_since(Instant::now());
            if left < every && asked > 0 {
                break;
            }
            let answer = self.ask(left).await;
            slowest = slowest.max(answer.took);
            asked += 1;
            if answer.outcome != RequestOutcome::Refused(503, "no_agent".into()) {
                others.push(answer.outcome.to_string());
            }
        }
        run.within("refused: the slowest request", AT_ONCE, Ok(slowest))?;
        let others = others.join(", ");
        ensure!(others.is_empty(), "not 503 no_agent: {others}");
        Ok(())
    }

    /// Sends a request that must be served.
    pub async fn served(&self) -> Result<()> {
        let asked = self.ask(scaled(ASK_LIMIT)).await;
        match asked.outcome {
            RequestOutcome::Served => Ok(()),
            other => bail!("a request was not served: {other}"),
        }
    }
}

impl fmt::Display for RequestOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served => f.write_str("served"),
            Self::Refused(status, code) => write!(f, "{status} {code}"),
            Self::Cut(error) => write!(f, "cut: {error}"),
            Self::Silence => f.write_str("no answer"),
            Self::Truncated(what) => write!(f, "truncated: {what}"),
            Self::Unequal(what) => write!(f, "false bytes: {what}"),
        }
    }
}

/// The size of a scrape.
const ANSWER_BYTES: usize = 4096;
const ASK_EVERY: Duration = Duration::from_millis(100);
/// A service that has recovered stays up for at least this time.
const FOR_GOOD: Duration = Duration::from_secs(1);
/// A refusal does not wait.
const AT_ONCE: Duration = Duration::from_secs(1);
/// The timeout of a caller that will try again.
const ASK_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the start of a tunnel on a clean path, with enrollment.
const READY: Duration = Duration::from_secs(20);
