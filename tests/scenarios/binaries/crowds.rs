//! C1, C2: crowds of callers and of sessions of one agent, at a server with 128 MiB and at a server
//! with 1,024 open files. Others are served throughout.

use std::fs;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, bail, ensure};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tunnel_process::host::raise_descriptor_limit;
use tunnel_proto::tcp::{Direct, ServerAddr};
use tunnel_proto::tls::{self, Trust, files};
use tunnel_proto::transport::Dialer;
use tunnel_proto::transport::h2::H2Dialer;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::ControlMessage;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};
use tunnel_tests::client::{ClientTls, Endpoint, KeepAliveClient, RawRequest};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::{meta_page, value};
use tunnel_tests::process::{Listener, ScratchDir};
use tunnel_tests::tools::or_skip;

use super::memory::{CAP, MemoryCgroup, NODES, Site, SiteShape, resident};
use super::{CONNECT, enroll};
use crate::abuse::report_figure;
use crate::scripted::{exchange_hello, hello, remote, settings};

#[tokio::test(flavor = "multi_thread")]
async fn c1_c2_crowds_keep_nobody_out_of_a_server_with_128_mib() -> Result<()> {
    let Some(cgroup) = or_skip(MemoryCgroup::new(CAP)) else {
        return Ok(());
    };
    // The server derives its own limits from the memory limit at its start, so the shell enters the
    // cgroup before it executes the server.
    let enter = "echo $$ > \"$1\" && shift && exec \"$@\"";
    let procs = cgroup.procs().to_string_lossy().into_owned();
    // `callersTotal` is a quarter of the memory, at 20 KiB and 64 KiB for heads of requests for each caller.
    crowds("128 MiB", &["sh", "-c", enter, "sh", &procs], 390).await?;
    let (most, killed) = (cgroup.most()?, cgroup.killed()?);
    report_figure(&format!("C1, C2: {} MiB at most in the cgroup", most >> 20));
    ensure!(killed == 0, "{killed} processes were killed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn c1_c2_crowds_keep_nobody_out_of_a_server_with_1024_descriptors() -> Result<()> {
    let limited = "ulimit -n 1024 && exec \"$@\"";
    // `callersTotal` is a quarter of the 1,024 descriptors without the 160 that are reserved for
    // the process.
    crowds("1,024 descriptors", &["sh", "-c", limited, "sh"], 216).await
}

/// Opens the crowd of callers and then the crowd of sessions. The callers stay until the server
/// closes them. Meanwhile each node and the meta port answer within a second. `callers_total` is
/// the expected `callersTotal` of the server.
async fn crowds(host: &str, through: &[&str], callers_total: usize) -> Result<()> {
    raise_descriptor_limit()?;
    let count = crowd_size();
    let shape = SiteShape {
        through_server: through.iter().map(|&word| word.to_owned()).collect(),
        ..SiteShape::new(&NODES[..2], "{}")
    };
    let mut site = Site::build(&shape).await?;
    let id = site.server.process().id().context("server's id")?;
    let dialers = stolen_credential(&site).await?;
    let (callers, sessions) = (Arc::<Tally>::default(), Arc::<Tally>::default());
    let mut answers = Answers::default();
    let attack = async {
        let _open = call(&site, count, &callers).await?;
        // Both ends notice a closed connection after a short delay.
        eventually("callers above the limit are gone", CONNECT, async || {
            let open = callers.open();
            ensure!(open <= callers_total, "{open} of {callers_total}");
            anyhow::Ok(())
        })
        .await;
        let _open_sessions = connect(&site, dialers, count, &sessions).await?;
        eventually("few sessions are left", CONNECT, async || {
            let open = sessions.open();
            ensure!((1..=SESSIONS_PER_NODE).contains(&open), "{open} are open");
            // The other two sessions belong to the nodes that are served.
            let all = site.server.metric("tunnel_server_agents").await?;
            ensure!(all <= SESSIONS_PER_NODE as u64 + 2, "{all} at the server");
            anyhow::Ok(())
        })
        .await;
        check_figures(&site, count, (&callers, &sessions), callers_total).await
    };
    let limit = scaled(AT_MOST + PER_ATTEMPT * u32::try_from(2 * count)?);
    tokio::select! {
        failed = answers.watch(&site) => return Err(failed),
        done = timeout(limit, attack) => done.context("the crowds are not done in time")??,
    }
    report_figure(&format!(
        "C1, C2: {host}: {count} callers: {callers}; {count} sessions: {sessions}; {} answers for others after {:?} at most; \
         {} MiB resident",
        answers.count,
        answers.slowest,
        resident(id)? >> 20
    ));
    // The server still runs in its first process and serves requests after the crowd.
    for node in &NODES[..2] {
        site.scrape(node).await?;
    }
    ensure!(site.server.process().id() == Some(id), "the server ended");
    Ok(())
}

/// Compares the server's metrics with the results that the crowds observed.
async fn check_figures(
    site: &Site,
    count: usize,
    (callers, sessions): (&Tally, &Tally),
    callers_total: usize,
) -> Result<()> {
    let shown = meta_page(site.server.address(Listener::Meta), "/metrics").await?;
    let value = |series: &str| value(&shown, series).context(series.to_owned());
    let limit = |name| format!("tunnel_server_limits_reached_total{{limit=\"{name}\"}}");
    let evicted = value("tunnel_server_callers_evicted_total")?
        + value("tunnel_server_callers_refused_total")?;
    let total = value(&limit("callersTotal"))?;
    let per_source = value(&limit("callersPerSource"))?;
    let too_many = "tunnel_server_handshakes_total{result=\"too_many_sessions\"}";
    let too_many = value(too_many)?;
    report_figure(&format!(
        "C1: {evicted} evicted or refused, callersTotal {total} times, callersPerSource {per_source} times; C2: {too_many} \
         times too_many_sessions"
    ));
    ensure!(callers.admitted() >= callers_total, "few: {callers}");
    ensure!(total > 0, "callersTotal was not reached");
    ensure!(per_source > 0, "callersPerSource was not reached");
    // The server does not count a connection that it marks for eviction during a request and that
    // ends after the request.
    let gone = count - callers.open();
    ensure!(evicted >= u64::try_from(gone * 9 / 10)?, "{gone} are gone");
    // The other refused sessions ended at a listener without free permits.
    let refused = count - sessions.admitted();
    ensure!(too_many >= u64::try_from(refused / 2)?, "{sessions}");
    Ok(())
}

/// The number of answers for others during the attack, and the duration of the slowest one.
#[derive(Debug, Default)]
struct Answers {
    count: usize,
    slowest: Duration,
}

impl Answers {
    /// Requests each node, over a separate connection, and the meta port once a second. Returns the
    /// error of the first request that fails or times out.
    async fn watch(&mut self, site: &Site) -> Error {
        let mut second = interval(Duration::from_secs(1));
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            second.tick().await;
            if let Err(error) = self.round(site).await {
                return error.context(site.server.log().to_string());
            }
        }
    }

    async fn round(&mut self, site: &Site) -> Result<()> {
        for node in &NODES[..2] {
            self.measure(node, site.scrape(node)).await?;
        }
        let meta = site.server.address(Listener::Meta);
        self.measure("/livez", meta_page(meta, "/livez")).await
    }

    async fn measure<T>(
        &mut self,
        what: &str,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<()> {
        let (began, limit) = (Instant::now(), scaled(ANSWER));
        let answered = timeout(limit, answer).await;
        let answered = answered.with_context(|| format!("{what}: no answer in {limit:?}"))?;
        answered.with_context(|| what.to_owned())?;
        self.slowest = self.slowest.max(began.elapsed());
        self.count += 1;
        Ok(())
    }
}

/// The results of a crowd's attempts.
#[derive(Debug, Default)]
struct Tally {
    admitted: AtomicUsize,
    refused: AtomicUsize,
    /// Number of admitted connections or sessions that the server has not closed.
    open: AtomicUsize,
}

impl Tally {
    fn admitted(&self) -> usize {
        self.admitted.load(Ordering::Relaxed)
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let refused = self.refused.load(Ordering::Relaxed);
        let (admitted, open) = (self.admitted(), self.open());
        write!(f, "{admitted} served, {refused} refused, {open} open")
    }
}

/// A future that owns an admitted connection or session and resolves when the server closes it.
type UntilClosed = BoxFuture<'static, ()>;

/// Makes `count` attempts, [`AT_ONCE`] at a time. An attempt that returns `None` was refused.
/// Dropping the returned sets closes the admitted connections or sessions.
async fn crowd<A>(
    count: usize,
    tally: &Arc<Tally>,
    attempt: impl Fn(usize) -> A + Clone + Send + 'static,
) -> Result<Vec<JoinSet<()>>>
where
    A: Future<Output = Result<Option<UntilClosed>>> + Send + 'static,
{
    let mut workers = JoinSet::new();
    for worker in 0..AT_ONCE {
        let (attempt, tally) = (attempt.clone(), tally.clone());
        workers.spawn(async move {
            let mut open = JoinSet::new();
            for number in (worker..count).step_by(AT_ONCE) {
                let Some(until_closed) = attempt(number).await? else {
                    tally.refused.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                tally.admitted.fetch_add(1, Ordering::Relaxed);
                tally.open.fetch_add(1, Ordering::Relaxed);
                let tally = tally.clone();
                open.spawn(async move {
                    until_closed.await;
                    tally.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
            anyhow::Ok(open)
        });
    }
    let mut open = Vec::new();
    while let Some(worker) = workers.join_next().await {
        open.push(worker??);
    }
    Ok(open)
}

/// Opens callers that send one request and then keep their connection idle: from one address and
/// from many, plain and with TLS.
async fn call(site: &Site, count: usize, tally: &Arc<Tally>) -> Result<Vec<JoinSet<()>>> {
    let (http, https) = (Listener::Http, Listener::Https);
    let host = format!("{}:{}", NODES[0], site.exporter.addr().port());
    let plain = Caller {
        listener: Endpoint::plain(site.server.address(http)),
        ask: RawRequest::new("GET", "/metrics", &host),
        status: 200,
    };
    let tls = ClientTls::insecure(NODES[0], None)?;
    let secure = Caller {
        listener: Endpoint::tls(site.server.address(https), tls),
        // The server refuses this port without a stream to the agent, and keeps the connection
        // open.
        ask: RawRequest::new("GET", "/metrics", &format!("{}:81", NODES[0])),
        status: 403,
    };
    let mut open = Vec::new();
    for caller in [plain, secure] {
        // 127.0.0.1 belongs to the callers that must be served throughout.
        for sources in [2..=2, 3..=17] {
            let sources = sources.map(|last| Ipv4Addr::new(127, 0, 0, last));
            let (caller, sources) = (caller.clone(), sources.collect::<Vec<_>>());
            let attempt =
                move |number: usize| caller.clone().ask_once(sources[number % sources.len()]);
            open.extend(crowd(count / 4, tally, attempt).await?);
        }
    }
    Ok(open)
}

#[derive(Debug, Clone)]
struct Caller {
    listener: Endpoint,
    ask: RawRequest,
    status: u16,
}

impl Caller {
    async fn ask_once(self, source: Ipv4Addr) -> Result<Option<UntilClosed>> {
        let asked = async {
            let mut client = KeepAliveClient::connect(self.listener.from_source(source)).await?;
            let reply = client.request(&self.ask).await?;
            anyhow::Ok((client, reply))
        };
        let asked = timeout(scaled(ATTEMPT), asked).await;
        let Ok((mut client, reply)) = asked.context("a caller was neither served nor refused")?
        else {
            return Ok(None);
        };
        if reply.status != self.status {
            bail!("{}: {}", reply.status, reply.text());
        }
        let until_closed = async move {
            client.closed().await;
        };
        Ok(Some(until_closed.boxed()))
    }
}

/// Opens `count` sessions with the same credential, half of them over each transport.
async fn connect(
    site: &Site,
    dialers: [Arc<dyn Dialer>; 2],
    count: usize,
    tally: &Arc<Tally>,
) -> Result<Vec<JoinSet<()>>> {
    let to = remote(site.server.address(Listener::Agents));
    let mut open = Vec::new();
    for dialer in dialers {
        let to = to.clone();
        let attempt = move |_: usize| open_session(dialer.clone(), to.clone());
        open.extend(crowd(count / 2, tally, attempt).await?);
    }
    Ok(open)
}

async fn open_session(dialer: Arc<dyn Dialer>, to: ServerAddr) -> Result<Option<UntilClosed>> {
    let attempt = async {
        let Ok(session) = dialer.dial(&to).await else {
            return Ok(None);
        };
        let exchanged = exchange_hello(&*session, hello(HOSTILE, [7; 16])?).await;
        // The server closes sessions above `admissionsPerNode` before it reads their Hello.
        let Ok((control, answer)) = exchanged else {
            return Ok(None);
        };
        match answer {
            ControlMessage::Welcome(_) => {
                let until_closed = async move {
                    session.closed().await;
                    drop(control);
                };
                Ok(Some(until_closed.boxed()))
            }
            ControlMessage::NotAdmitted(CloseCode::TooManySessions, _) => Ok(None),
            other => bail!("unexpected {other:?}"),
        }
    };
    let attempt = timeout(scaled(ATTEMPT), attempt).await;
    attempt.context("a session was neither admitted nor refused")?
}

/// Enrolls an agent, stops it, and returns dialers with the credential from its data directory: one
/// over h2 and one over QUIC.
async fn stolen_credential(site: &Site) -> Result<[Arc<dyn Dialer>; 2]> {
    let scratch = ScratchDir::new()?;
    let folder = scratch.path().join("hostile");
    enroll(&site.server, HOSTILE, &folder, &NODES[..2]).await?;
    let read = |name: &str| fs::read(folder.join(name)).context(name.to_owned());
    let chain = files::chain(&read("agent.crt")?)?;
    let own = tls::certified_key(chain, files::private_key(&read("agent.key")?)?)?;
    let trust = Trust::Roots(tls::roots(files::chain(&read("ca.crt")?)?)?);
    let tls = |alpn| tls::session_client(own.clone(), trust.clone(), alpn);
    let h2 = H2Dialer::new(tls(ALPN_SESSION_TCP)?, settings(), Arc::new(Direct));
    let quic = QuicDialer::new(tls(ALPN_SESSION)?, settings())?;
    Ok([Arc::new(h2), Arc::new(quic)])
}

/// Returns the number of callers, and of sessions. Smaller crowds do not reach every limit.
fn crowd_size() -> usize {
    Gear::current().pick(5000, 10_000)
}

const AT_ONCE: usize = 16;
/// The node of the hostile sessions.
const HOSTILE: &str = "worker-9";
/// Equals the constant in `routing/registry.rs`.
const SESSIONS_PER_NODE: usize = 4;
/// Time limit for each answer to others.
const ANSWER: Duration = Duration::from_secs(1);
/// Time limit for one caller or session to be served or refused.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Time limit for the whole attack, without the time for each attempt.
const AT_MOST: Duration = Duration::from_secs(30);
const PER_ATTEMPT: Duration = Duration::from_millis(25);
