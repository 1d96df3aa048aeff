//! Mixed faults on three servers for a long time: `make soak`.
//!
//! One fault at a time, chosen by the seed, with random gaps. A request or a stream may fail only
//! while a fault that cuts is active, or within [`RECOVERY`] after its end; a fault of one agent
//! excuses only requests to its node, and a stop by SIGTERM only streams that outlive the drain. Loss
//! and delay excuse nothing. Wrong bytes, and a body that ends early like a complete one, are never
//! excused.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_tests::client::{BodyEnd, Exchange, RawRequest, request};
use tunnel_tests::faults::{
    CallerOptions, Callers, Clocks, Layout, ProcessUsage, Replicas, RequestOutcome, Requester, Run,
    Runs, TransportMode,
};
use tunnel_tests::link::{Impairment, TrafficClass};
use tunnel_tests::process::{AgentSetup, Listener, Process, Signal};
use tunnel_tests::targets::{Exporter, deterministic_bytes, sha256_hex};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half an hour: make soak"]
async fn mixed_faults_on_three_servers_lose_no_byte_silently() -> Result<()> {
    let mut runs = Runs::processes(Clocks::Full)?;
    runs.start(TransportMode::Auto, "mixed faults", soak);
    runs.finish().await
}

async fn soak(run: Run) -> Result<()> {
    let minutes = std::env::var(MINUTES).unwrap_or_else(|_unset| "30".to_owned());
    let end_in = Duration::from_secs(60 * minutes.parse::<u64>().context(MINUTES)?);
    let mut site = Site::start(run).await?;
    let before = site.usages().await?;
    let traffic = Traffic::start(&site);
    let end = Instant::now() + end_in;
    let mut random = SmallRng::seed_from_u64(run.seed);
    let mut episodes = Vec::new();
    while Instant::now() < end {
        sleep(GAP.mul_f64(random.random_range(0.2..1.0))).await;
        episodes.push(site.inject(&mut random).await?);
    }
    let events = traffic.end().await?;
    sleep(SETTLE).await;
    let after = site.usages().await?;
    report(run, &events, &episodes, &before, &after)
}

/// Three servers, and agents with two sessions each.
struct Site {
    run: Run,
    agents: Vec<SoakAgent>,
    replicas: Replicas,
    exporter: Exporter,
    /// HTTP listeners to which callers are sent.
    endpoints: watch::Sender<Vec<SocketAddr>>,
}

struct SoakAgent {
    node: String,
    setup: AgentSetup,
    process: Process,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    ServerKilled,
    ServerTerminated,
    ServerFrozen,
    LinkCut,
    LinkLossy,
    LinkSlow,
    UdpBlocked,
    AgentKilled,
}

impl Fault {
    const ALL: [Self; 8] = [
        Self::ServerKilled,
        Self::ServerTerminated,
        Self::ServerFrozen,
        Self::LinkCut,
        Self::LinkLossy,
        Self::LinkSlow,
        Self::UdpBlocked,
        Self::AgentKilled,
    ];

    /// Returns whether this fault excuses the failure of an event.
    fn excuses(self, kind: EventKind) -> bool {
        match self {
            Self::ServerKilled
            | Self::ServerFrozen
            | Self::LinkCut
            | Self::UdpBlocked
            | Self::AgentKilled => true,
            Self::ServerTerminated => kind == EventKind::Follow,
            Self::LinkLossy | Self::LinkSlow => false,
        }
    }
}

/// A fault that is over.
#[derive(Debug)]
struct Episode {
    fault: Fault,
    /// HTTP listener of the server of a fault.
    listener: SocketAddr,
    began: Instant,
    /// End of the time in which failures are excused.
    until: Instant,
    /// The node of a killed agent.
    node: Option<String>,
    /// Time from the end of the fault until each server served each node, unless one did not.
    recovered: Option<Duration>,
}

impl Episode {
    /// Returns whether this fault excuses the failure of an event.
    fn excuses(&self, event: &Event) -> bool {
        let is_concerned = (self.node.as_ref())
            .is_none_or(|node| event.host.split(':').next() == Some(node.as_str()));
        event.began <= self.until
            && event.ended >= self.began
            && is_concerned
            && self.fault.excuses(event.kind)
    }
}

impl Site {
    async fn start(run: Run) -> Result<Self> {
        let exporter = Exporter::start("soak").await?;
        let targets = [exporter.addr().port(); 3];
        let replicas = Replicas::start(run, Layout::three(2), &node(0), &targets).await?;
        let mut agents = Vec::new();
        for number in 0..AGENTS {
            let node = node(number);
            let transport = TRANSPORTS[number % TRANSPORTS.len()];
            let first = number % replicas.servers.len();
            let setup = (replicas.agent_setup(&node, first).await?).args(&[
                "--transport",
                transport,
                "--replicas",
                "2",
            ]);
            let process = setup.start()?;
            agents.push(SoakAgent {
                node,
                setup,
                process,
            });
        }
        replicas.wait_for_sessions(2 * AGENTS as u64).await?;
        let site = Self {
            run,
            agents,
            replicas,
            exporter,
            endpoints: watch::Sender::new(Vec::new()),
        };
        site.publish_endpoints(None);
        let recovered = site.recovered(Instant::now() + RECOVERY).await;
        recovered.context("a node is not served at the start")?;
        Ok(site)
    }

    /// Sends callers to all servers, or to all but one.
    fn publish_endpoints(&self, without: Option<usize>) {
        let servers = self.replicas.servers.iter().enumerate();
        let others = servers.filter(|(number, _)| Some(*number) != without);
        let listeners = others.map(|(_, server)| server.address(Listener::Http));
        self.endpoints.send_replace(listeners.collect());
    }

    fn host(&self, agent: &SoakAgent) -> String {
        format!("{}:{}", agent.node, self.exporter.addr().port())
    }

    /// Injects a fault and ends it, then waits until it excuses nothing more.
    async fn inject(&mut self, random: &mut SmallRng) -> Result<Episode> {
        let fault = Fault::ALL[random.random_range(0..Fault::ALL.len())];
        let server = random.random_range(0..self.replicas.servers.len());
        let agent = random.random_range(0..self.agents.len());
        let length = LENGTH.mul_f64(random.random_range(0.2..1.0));
        self.run.report(format_args!(
            "{fault:?}, server {server} or agent {agent}, {length:.1?}"
        ));
        let began = Instant::now();
        let mut node = None;
        match fault {
            Fault::ServerKilled => {
                self.replicas.kill(server).await?;
                sleep(length).await;
                self.replicas.restart(server).await?;
            }
            Fault::ServerTerminated => self.terminate(server).await?,
            Fault::ServerFrozen => {
                let process = self.replicas.servers[server].process();
                process.signal(Signal::Stop)?;
                sleep(length).await;
                process.signal(Signal::Cont)?;
            }
            Fault::LinkCut => {
                self.impair(server, TrafficClass::ALL, Impairment::black_hole(), length)
                    .await?;
            }
            Fault::LinkLossy => {
                self.impair(server, TrafficClass::ALL, Impairment::lossy(0.01), length)
                    .await?;
            }
            Fault::LinkSlow => {
                let slow = Impairment::delayed(Duration::from_millis(50));
                self.impair(server, TrafficClass::ALL, slow, length).await?;
            }
            Fault::UdpBlocked => {
                self.impair(server, TrafficClass::UDP, Impairment::black_hole(), length)
                    .await?;
            }
            Fault::AgentKilled => {
                let killed = &mut self.agents[agent];
                killed.process.signal(Signal::Kill)?;
                killed.process.end(END).await?;
                sleep(length).await;
                killed.process = killed.setup.start()?;
                node = Some(killed.node.clone());
            }
        }
        let until = Instant::now() + RECOVERY;
        let recovered = self.recovered(until).await;
        sleep_until(until).await;
        Ok(Episode {
            fault,
            listener: self.replicas.servers[server].address(Listener::Http),
            began,
            until,
            node,
            recovered,
        })
    }

    async fn impair(
        &self,
        server: usize,
        class: TrafficClass,
        impairment: Impairment,
        length: Duration,
    ) -> Result<()> {
        let link = self.replicas.link(server)?;
        link.set(class, impairment);
        sleep(length).await;
        link.heal();
        Ok(())
    }

    /// Stops a server by SIGTERM, and starts it again. Callers leave it during the drain delay.
    async fn terminate(&mut self, server: usize) -> Result<()> {
        self.replicas.servers[server]
            .process()
            .signal(Signal::Term)?;
        self.publish_endpoints(Some(server));
        self.replicas.servers[server].process().end(STOP).await?;
        self.replicas.restart(server).await?;
        for agent in &self.agents {
            let requester = self.requester(server, agent);
            // A node that is not served is reported with the others.
            let _served = requester.serving(Instant::now(), RECOVERY).await;
        }
        self.publish_endpoints(None);
        Ok(())
    }

    fn requester(&self, server: usize, agent: &SoakAgent) -> Requester {
        let http = self.replicas.servers[server].address(Listener::Http);
        Requester::new(http, self.host(agent), self.run.seed)
    }

    /// Returns the time until each server has served each node, or `None` if one has not by `until`.
    async fn recovered(&self, until: Instant) -> Option<Duration> {
        let began = Instant::now();
        for server in 0..self.replicas.servers.len() {
            for agent in &self.agents {
                let left = until.saturating_duration_since(Instant::now());
                let requester = self.requester(server, agent);
                requester.serving(Instant::now(), left).await.ok()?;
            }
        }
        Some(began.elapsed())
    }

    /// Returns the usage of the servers, then of the agents.
    async fn usages(&mut self) -> Result<Vec<ProcessUsage>> {
        let servers = self.replicas.servers.iter_mut();
        let mut ids: Vec<_> = servers.map(|server| server.process().id()).collect();
        ids.extend(self.agents.iter().map(|agent| agent.process.id()));
        let mut usages = Vec::new();
        for id in ids {
            let id = id.context("a process has ended")?;
            usages.push(ProcessUsage::sample_min(id).await?);
        }
        Ok(usages)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum EventKind {
    NewConnection,
    ReusedConnection,
    Download,
    Upload,
    Follow,
}

/// A request or a stream that has ended.
#[derive(Debug)]
struct Event {
    kind: EventKind,
    host: String,
    endpoint: SocketAddr,
    began: Instant,
    ended: Instant,
    outcome: RequestOutcome,
}

/// Callers of all kinds in progress.
struct Traffic {
    callers: Callers,
    stop: CancellationToken,
    running: JoinSet<Vec<Event>>,
}

impl Traffic {
    fn start(site: &Site) -> Self {
        let hosts: Vec<_> = site.agents.iter().map(|agent| site.host(agent)).collect();
        let options = CallerOptions {
            callers: 2 * hosts.len(),
            pause: Duration::from_millis(150),
            limit: LIMIT,
            seed: site.run.seed,
        };
        let callers = Callers::start(&site.endpoints, &hosts, options);
        let (stop, mut running) = (CancellationToken::new(), JoinSet::new());
        let kinds = [EventKind::Download, EventKind::Upload, EventKind::Follow];
        for (number, host) in hosts.iter().enumerate() {
            for kind in kinds {
                let endpoints = site.endpoints.subscribe();
                let repeated = repeat(kind, host.clone(), endpoints, number, stop.clone());
                running.spawn(repeated);
            }
        }
        Self {
            callers,
            stop,
            running,
        }
    }

    async fn end(mut self) -> Result<Vec<Event>> {
        self.stop.cancel();
        let mut events = Vec::new();
        for call in self.callers.end(0).await?.0 {
            events.push(Event {
                kind: match call.is_new {
                    true => EventKind::NewConnection,
                    false => EventKind::ReusedConnection,
                },
                host: call.host,
                endpoint: call.endpoint,
                began: call.sent,
                ended: call.sent + call.answer.took,
                outcome: call.answer.outcome,
            });
        }
        while let Some(ended) = self.running.join_next().await {
            events.extend(ended.context("a caller panicked")?);
        }
        Ok(events)
    }
}

/// Repeats transfers of one kind at the current endpoints in turn.
async fn repeat(
    kind: EventKind,
    host: String,
    endpoints: watch::Receiver<Vec<SocketAddr>>,
    first: usize,
    stop: CancellationToken,
) -> Vec<Event> {
    let mut events = Vec::new();
    for number in first.. {
        if stop.is_cancelled() {
            break;
        }
        let endpoint = {
            let endpoints = endpoints.borrow();
            endpoints.get(number % endpoints.len().max(1)).copied()
        };
        if let Some(endpoint) = endpoint {
            let began = Instant::now();
            let outcome = match kind {
                EventKind::Upload => upload(endpoint, &host, number as u64).await,
                EventKind::Follow => follow(endpoint, &host, &stop).await,
                EventKind::NewConnection | EventKind::ReusedConnection | EventKind::Download => {
                    let requester = Requester::new(endpoint, host.clone(), number as u64);
                    requester.with_size(BULK).ask(BULK_LIMIT).await.outcome
                }
            };
            events.push(Event {
                kind,
                host: host.clone(),
                endpoint,
                began,
                ended: Instant::now(),
                outcome,
            });
        }
        sleep(PAUSE).await;
    }
    events
}

async fn upload(endpoint: SocketAddr, host: &str, seed: u64) -> RequestOutcome {
    let body = deterministic_bytes(seed, BULK);
    let expected = format!("{BULK} {}\n", sha256_hex(&body));
    let post = RawRequest::new("POST", "/upload", host);
    let post = post.header("Connection", "close").body(body);
    match timeout(BULK_LIMIT, request(endpoint, &post)).await {
        Err(_elapsed) => RequestOutcome::Silence,
        Ok(Err(error)) => RequestOutcome::Cut(format!("{error:#}")),
        Ok(Ok(reply)) => match (reply.status, reply.header("x-tunnel-error"), &reply.ended) {
            (200, None, BodyEnd::Reset(kind)) => RequestOutcome::Cut(kind.to_string()),
            (200, None, BodyEnd::Truncated) => RequestOutcome::Truncated(reply.text()),
            (200, None, _) if reply.text() == expected => RequestOutcome::Served,
            (200, None, _) => RequestOutcome::Unequal(reply.text()),
            (status, code, _) => RequestOutcome::Refused(status, code.unwrap_or("?").to_owned()),
        },
    }
}

/// Follows an endless answer for a while, whose lines are numbered.
async fn follow(endpoint: SocketAddr, host: &str, stop: &CancellationToken) -> RequestOutcome {
    let get = RawRequest::get(host, "/follow?interval_ms=100");
    let mut followed = match timeout(LIMIT, Exchange::start(endpoint, &get)).await {
        Err(_elapsed) => return RequestOutcome::Silence,
        Ok(Err(error)) => return RequestOutcome::Cut(format!("{error:#}")),
        Ok(Ok(followed)) => followed,
    };
    if followed.status() != 200 {
        let code = followed.header("x-tunnel-error").unwrap_or("?").to_owned();
        return RequestOutcome::Refused(followed.status(), code);
    }
    let until = Instant::now() + FOLLOWED;
    for number in 1_u64.. {
        let line = tokio::select! {
            () = sleep_until(until) => return RequestOutcome::Served,
            () = stop.cancelled() => return RequestOutcome::Served,
            line = timeout(BULK_LIMIT, followed.line()) => line,
        };
        match (line, followed.ended()) {
            (Err(_elapsed), _) => return RequestOutcome::Silence,
            (Ok(Some(line)), _) if line == format!("soak line {number}") => {}
            (Ok(Some(line)), _) => return RequestOutcome::Unequal(line),
            (Ok(None), Some(BodyEnd::Reset(kind))) => return RequestOutcome::Cut(kind.to_string()),
            // The target never ends the answer.
            (Ok(None), ended) => return RequestOutcome::Truncated(format!("{ended:?}")),
        }
    }
    RequestOutcome::Served
}

/// The counts of one kind of event.
#[derive(Debug, Default)]
struct Counts {
    all: u64,
    excused: u64,
    unexcused: u64,
    wrong: u64,
    silent: u64,
}

/// Prints one table and checks it.
fn report(
    run: Run,
    events: &[Event],
    episodes: &[Episode],
    before: &[ProcessUsage],
    after: &[ProcessUsage],
) -> Result<()> {
    let (mut kinds, mut codes) = (BTreeMap::new(), BTreeMap::new());
    for event in events {
        let counts: &mut Counts = kinds.entry(event.kind).or_default();
        counts.all += 1;
        if event.outcome == RequestOutcome::Served {
            continue;
        }
        *codes.entry(code(&event.outcome)).or_insert(0_u64) += 1;
        let excusing = || episodes.iter().filter(|episode| episode.excuses(event));
        // The system closes the callers' connections of a killed process without a reset.
        let is_killed = excusing().any(|episode| {
            episode.fault == Fault::ServerKilled && episode.listener == event.endpoint
        });
        match &event.outcome {
            RequestOutcome::Unequal(_) => counts.wrong += 1,
            RequestOutcome::Truncated(_) if !is_killed => counts.silent += 1,
            _ if excusing().next().is_some() => counts.excused += 1,
            outcome => {
                counts.unexcused += 1;
                run.report(format_args!("not excused: {:?} {outcome}", event.kind));
            }
        }
    }
    run.report("kind, all, failed in a window, failed outside, wrong bytes, silent cuts");
    for (kind, counts) in &kinds {
        let Counts {
            all,
            excused,
            unexcused,
            wrong,
            silent,
        } = counts;
        run.report(format_args!(
            "{kind:?}, {all}, {excused}, {unexcused}, {wrong}, {silent}"
        ));
    }
    for (code, count) in &codes {
        run.report(format_args!("failed with {code}: {count}"));
    }
    for fault in Fault::ALL {
        let of_fault = || episodes.iter().filter(|episode| episode.fault == fault);
        let slowest = of_fault().filter_map(|episode| episode.recovered).max();
        let count = of_fault().count();
        run.report(format_args!(
            "{fault:?}: {count} times, slowest recovery {slowest:.1?}"
        ));
    }
    let unreachable = episodes
        .iter()
        .filter(|episode| episode.recovered.is_none());
    let unreachable = unreachable.count();
    run.report(format_args!(
        "faults after which a node was not served: {unreachable}"
    ));
    let mut grown = 0;
    for (number, (before, after)) in before.iter().zip(after).enumerate() {
        run.report(format_args!(
            "process {number}: {} then {} KiB, {} then {} descriptors",
            before.memory_kib, after.memory_kib, before.descriptors, after.descriptors
        ));
        let has_grown = after.memory_kib > before.memory_kib + MEMORY_GROWTH_KIB
            || after.descriptors > before.descriptors + DESCRIPTOR_GROWTH;
        grown += u64::from(has_grown);
    }
    let sum = |count: fn(&Counts) -> u64| kinds.values().map(count).sum::<u64>();
    ensure!(sum(|counts| counts.all) > 0, "no requests");
    ensure!(sum(|counts| counts.wrong) == 0, "wrong bytes");
    ensure!(sum(|counts| counts.silent) == 0, "silent cuts");
    ensure!(
        sum(|counts| counts.unexcused) == 0,
        "failures without a fault"
    );
    ensure!(unreachable == 0, "nodes were not served after a fault");
    ensure!(grown == 0, "{grown} processes have grown");
    Ok(())
}

/// Returns a failure without its details.
fn code(outcome: &RequestOutcome) -> String {
    match outcome {
        RequestOutcome::Cut(_) => "cut".to_owned(),
        RequestOutcome::Truncated(_) => "truncated".to_owned(),
        RequestOutcome::Unequal(_) => "false bytes".to_owned(),
        RequestOutcome::Served | RequestOutcome::Refused(..) | RequestOutcome::Silence => {
            outcome.to_string()
        }
    }
}

fn node(number: usize) -> String {
    format!("worker-{number}")
}

const MINUTES: &str = "CULVERT_SOAK_MINUTES";
const AGENTS: usize = 8;
/// `auto` begins with QUIC.
const TRANSPORTS: [&str; 4] = ["auto", "h2", "quic", "h2"];
/// Longest time of a fault.
const LENGTH: Duration = Duration::from_secs(10);
/// Longest time between two faults, in which nothing may fail.
const GAP: Duration = Duration::from_secs(15);
/// Time after a fault in which failures are excused, and all nodes must be served again. Servers
/// close a connection to a silent server after at most 12.5 s.
const RECOVERY: Duration = Duration::from_secs(20);
/// Time after the load for buffers and connections to go.
const SETTLE: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(30);
const BULK: usize = 4 << 20;
const BULK_LIMIT: Duration = Duration::from_secs(120);
/// Time for which an answer is followed.
const FOLLOWED: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
const END: Duration = Duration::from_secs(5);
/// Longer than drain delay and drain timeout.
const STOP: Duration = Duration::from_secs(45);
/// Sessions may be at other servers than before, and allocators retain memory.
const DESCRIPTOR_GROWTH: u64 = 32;
const MEMORY_GROWTH_KIB: u64 = 64 * 1024;
