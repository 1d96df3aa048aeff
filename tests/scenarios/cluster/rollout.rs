//! The cost of a rollout for callers: failed calls, second by second, while one server takes over
//! from another behind a Service.
//!
//! Two servers of one cluster stand for the Pods, a [`Link`] for the Service that agents dial, and
//! a list of endpoints for the Service that callers dial. kube-proxy lags by [`PROXY_LAG`].

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_server::config::RawConfig;
use tunnel_tests::checks::get_ok;
use tunnel_tests::client::{Exchange, RawRequest, request};
use tunnel_tests::cluster::{Cluster, edge};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::link::Link;
use tunnel_tests::targets::Exporter;

use super::authority::{cluster, server};

/// Number of followed logs.
const STREAMS: usize = 20;
/// Time from a change of a Pod until kube-proxy has updated its rules.
const PROXY_LAG: Duration = Duration::from_millis(500);
/// Time from the readiness of the new Pod to the SIGTERM of the old one.
const KUBELET_LAG: Duration = Duration::from_millis(200);
/// Time between two calls.
const CALL_EVERY: Duration = Duration::from_millis(20);
/// Time after which a call counts as failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest time for which new calls may fail while agents move from one server to another.
const MOVE: Duration = Duration::from_secs(3);
/// `--drain-timeout` of a server that must stop before the next one starts.
const SHORT_DRAIN: Duration = Duration::from_secs(5);
/// Time for which calls go on after the agent has connected to the new server.
const AFTERWARDS: Duration = Duration::from_secs(2);

tests_of! {
    fn rollout_restart_that_surges_fails_calls_for_3_s_at_most() = restart_with_surge(0);
    fn rollout_restart_that_surges_with_20_followed_logs_fails_calls_for_3_s_at_most() =
        restart_with_surge(STREAMS);
    fn deleted_pod_costs_the_next_ones_start_and_3_s_at_most() = delete(0);
    fn deleted_pod_with_20_followed_logs_costs_the_next_ones_start_and_3_s_at_most() =
        delete(STREAMS);
}

#[tokio::test(flavor = "multi_thread")]
async fn recreated_pod_with_20_followed_logs_costs_5_s_and_the_next_ones_start() -> Result<()> {
    let mut site = Site::start(STREAMS, |settings| {
        settings.drain_timeout = Some("5s".into());
    })
    .await?;
    let began = Instant::now();
    let (stopped, ()) = tokio::join!(site.old.stop_server(), site.service.lead_late(None));
    stopped?;
    let drained = began.elapsed();
    ensure!(
        drained <= scaled(SHORT_DRAIN + Duration::from_secs(2)),
        "{drained:?}"
    );
    let started = Instant::now();
    let new = server(&site.cluster, |_| {}).await?;
    let ready = started.elapsed();
    site.service.lead(Some(&new));
    let calls = site.taken_over(&new).await?;
    calls.print("Recreate, 20 streams", (drained, ready));
    calls.check(drained + ready + MOVE)
}

/// Restarts with `maxSurge: 1` and `maxUnavailable: 0`: the new Pod is ready before the old one
/// gets its signal.
async fn restart_with_surge(streams: usize) -> Result<()> {
    let mut site = Site::start(streams, |_| {}).await?;
    let started = Instant::now();
    let new = server(&site.cluster, |_| {}).await?;
    let ready = started.elapsed();
    site.service.share(&site.old, &new);
    sleep(KUBELET_LAG).await;
    site.old.drain_server();
    site.service.lead_late(Some(&new)).await;
    let calls = site.taken_over(&new).await?;
    let what = format!("rollout restart with a surge, {streams} streams");
    calls.print(&what, (Duration::ZERO, ready));
    calls.check(MOVE)?;
    site.streams_go_on().await
}

/// Deletes a Pod. The controller creates another one as soon as the deletion begins, whatever the
/// strategy.
async fn delete(streams: usize) -> Result<()> {
    let mut site = Site::start(streams, |_| {}).await?;
    let started = Instant::now();
    site.old.drain_server();
    let (new, ()) = tokio::join!(server(&site.cluster, |_| {}), site.service.lead_late(None));
    let (new, ready) = (new?, started.elapsed());
    site.service.lead(Some(&new));
    let calls = site.taken_over(&new).await?;
    let what = format!("pod deleted, {streams} streams");
    calls.print(&what, (Duration::ZERO, ready));
    calls.check(ready + MOVE)?;
    site.streams_go_on().await
}

/// An edge node with an agent and an exporter, and a server behind both Services. Calls go on all
/// the time.
struct Site {
    cluster: Cluster,
    old: TestEnv,
    service: Service,
    streams: Vec<Exchange>,
    calling: Calling,
    _agent: Agent,
    _exporter: Exporter,
}

impl Site {
    async fn start(streams: usize, change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let cluster = cluster().await?;
        cluster.objects().add(&edge("worker-1")).await?;
        let old = server(&cluster, change).await?;
        let service = Service::of(&old)?;
        let config = old.agent_config_with("worker-1", |settings| {
            settings.server = vec![service.link.addr().to_string()];
        })?;
        let agent = Agent::start(config).await?;
        old.connected("worker-1").await;
        let exporter = Exporter::start("worker-1").await?;
        let host = format!("worker-1:{}", exporter.addr().port());
        eventually("the nodes are known", WAIT_TIMEOUT, async || {
            get_ok(old.http(), &host, "/metrics").await
        })
        .await;
        let follow = RawRequest::get(&host, "/follow?interval_ms=50");
        let mut followed = Vec::new();
        for _ in 0..streams {
            let mut stream = Exchange::start(old.http(), &follow).await?;
            if stream.status() != 200 {
                bail!("not followed: {}", stream.into_reply().await.text());
            }
            stream.line().await.context("a line")?;
            followed.push(stream);
        }
        let calling = Calling::start(service.endpoints.clone(), &host);
        Ok(Self {
            cluster,
            old,
            service,
            streams: followed,
            calling,
            _agent: agent,
            _exporter: exporter,
        })
    }

    /// Waits until the agent has connected to the new server and [`AFTERWARDS`] has passed, then
    /// ends the calls.
    async fn taken_over(&mut self, new: &TestEnv) -> Result<Calls> {
        new.connected("worker-1").await;
        sleep(AFTERWARDS).await;
        self.calling.end().await
    }

    /// Checks that the draining server still serves the streams that were open before.
    async fn streams_go_on(&mut self) -> Result<()> {
        for stream in &mut self.streams {
            let line = timeout(scaled(WAIT_TIMEOUT), stream.line()).await?;
            ensure!(line.is_some(), "cut: {:?}", stream.ended());
        }
        Ok(())
    }
}

/// The Services that agents and callers dial.
struct Service {
    link: Link,
    endpoints: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Service {
    fn of(server: &TestEnv) -> Result<Self> {
        let service = Self {
            link: Link::start(server.bound().agents, 7)?,
            endpoints: Arc::default(),
        };
        service.lead(Some(server));
        Ok(service)
    }

    fn lead(&self, server: Option<&TestEnv>) {
        self.link.lead_to(server.map(|env| env.bound().agents));
        *self
            .endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner) =
            server.map(plain_listener).into_iter().collect();
    }

    /// Calls [`Service::lead`] after the delay of kube-proxy.
    async fn lead_late(&self, server: Option<&TestEnv>) {
        sleep(PROXY_LAG).await;
        self.lead(server);
    }

    /// Distributes callers over both servers.
    fn share(&self, one: &TestEnv, other: &TestEnv) {
        *self
            .endpoints
            .lock()
            .unwrap_or_else(PoisonError::into_inner) =
            vec![plain_listener(one), plain_listener(other)];
    }
}

#[expect(
    clippy::expect_used,
    reason = "all servers of these tests have an HTTP listener"
)]
fn plain_listener(env: &TestEnv) -> SocketAddr {
    env.bound().http.expect("an HTTP listener")
}

/// Calls at a steady pace, each on a connection of its own, to the endpoints in turn.
struct Calling {
    stop: CancellationToken,
    calls: JoinSet<Calls>,
}

impl Calling {
    fn start(endpoints: Arc<Mutex<Vec<SocketAddr>>>, host: &str) -> Self {
        let (stop, mut calls) = (CancellationToken::new(), JoinSet::new());
        let wanted = RawRequest::get(host, "/metrics");
        calls.spawn(call(endpoints, wanted, stop.clone()));
        Self { stop, calls }
    }

    async fn end(&mut self) -> Result<Calls> {
        self.stop.cancel();
        Ok(self.calls.join_next().await.context("ended already")??)
    }
}

async fn call(
    endpoints: Arc<Mutex<Vec<SocketAddr>>>,
    wanted: RawRequest,
    stop: CancellationToken,
) -> Calls {
    let began = Instant::now();
    let mut under_way = JoinSet::new();
    let mut pace = interval(CALL_EVERY);
    pace.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut turn = 0;
    while !stop.is_cancelled() {
        pace.tick().await;
        let at = began.elapsed();
        let endpoint = {
            let endpoints = endpoints.lock().unwrap_or_else(PoisonError::into_inner);
            endpoints.get(turn % endpoints.len().max(1)).copied()
        };
        turn += 1;
        let wanted = wanted.clone();
        under_way.spawn(async move { (at, fails(endpoint, &wanted).await) });
    }
    let mut calls = under_way.join_all().await;
    calls.sort();
    Calls(calls)
}

/// Returns the reason why a call fails, or `None` if it succeeds.
async fn fails(endpoint: Option<SocketAddr>, wanted: &RawRequest) -> Option<String> {
    let Some(endpoint) = endpoint else {
        return Some("no endpoint".into());
    };
    match timeout(scaled(CALL_TIMEOUT), request(endpoint, wanted)).await {
        Ok(Ok(reply)) if reply.status == 200 => None,
        Ok(Ok(reply)) => Some(format!("{}: {}", reply.status, reply.text())),
        Ok(Err(error)) => Some(format!("{error:#}")),
        Err(_elapsed) => Some("no answer".into()),
    }
}

/// The start time of each call, and the reason of its failure, if it failed.
struct Calls(Vec<(Duration, Option<String>)>);

impl Calls {
    /// Returns the time from the first failed call to the end of the interval of the last failed
    /// call.
    fn outage(&self) -> Duration {
        let mut failed = self.0.iter().filter(|(_, failure)| failure.is_some());
        let first = failed.next().map(|(at, _)| *at);
        let last = failed.next_back().map(|(at, _)| *at).or(first);
        match (first, last) {
            (Some(first), Some(last)) => last - first + CALL_EVERY,
            (_, _) => Duration::ZERO,
        }
    }

    fn print(&self, what: &str, (drained, ready): (Duration, Duration)) {
        use std::io::Write as _;

        let seconds = self.0.last().map_or(0, |(at, _)| at.as_secs());
        let each: Vec<_> = (0..=seconds)
            .map(|second| {
                let calls = self.0.iter().filter(|(at, _)| at.as_secs() == second);
                let failed = calls.clone().filter(|(_, failure)| failure.is_some());
                format!("{}/{}", failed.count(), calls.count())
            })
            .collect();
        let _shown = writeln!(
            std::io::stderr(),
            "{what}: calls failed for {:?} (drained in {drained:?}, next one ready in {ready:?}); failed of all, by second: {}",
            self.outage(),
            each.join(" "),
        );
    }

    fn check(&self, most: Duration) -> Result<()> {
        let outage = self.outage();
        let failures = self.0.iter().filter_map(|(_, failure)| failure.clone());
        let kinds: std::collections::BTreeSet<_> = failures.collect();
        ensure!(
            outage <= scaled(most),
            "calls failed for {outage:?}, more than {most:?}: {kinds:?}"
        );
        let last = self.0.last().context("no calls")?;
        ensure!(last.1.is_none(), "calls still fail: {:?}", last.1);
        Ok(())
    }
}
