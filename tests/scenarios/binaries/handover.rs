//! An agent that stops hands over to the next one of its node on the same host. Without a next one,
//! its listeners accept until the drain is over.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, interval, timeout};
use tunnel_tests::checks::get_ok;
use tunnel_tests::client::{Exchange, RawRequest};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Program, ScratchDir, Server, ServerSetup, Signal, next_loopback,
};
use tunnel_tests::targets::Exporter;

use super::{ATTEMPT, CONNECT, NODE};

tests_of! {
    fn agent_hands_over_to_the_next_one_on_its_host_over_quic() = hand_over("quic");
    fn agent_hands_over_to_the_next_one_on_its_host_over_h2() = hand_over("h2");
    fn listeners_accept_until_the_drain_of_the_only_agent_is_over_quic() = restart("quic");
    fn listeners_accept_until_the_drain_of_the_only_agent_is_over_h2() = restart("h2");
    fn next_agent_takes_over_from_one_that_was_killed_over_quic() = killed("quic");
    fn next_agent_takes_over_from_one_that_was_killed_over_h2() = killed("h2");
}

async fn hand_over(transport: &str) -> Result<()> {
    let mut site = Site::start(transport).await?;
    let mut log = site.follow_node().await?;
    let watch = site.follow_apiserver().await?;
    let next = site.start_next()?;
    site.wait_until_ready(&next).await;
    ensure!(next.log().contains("standby: another agent"), "{next}");
    ensure!(!next.log().contains("listening"), "{next}");

    let (mut node, mut apiserver) = (site.probe_node(), site.probe_apiserver());
    let signaled = Instant::now();
    site.agent.signal(Signal::Term)?;
    let cut_after = async {
        let _cut = watch.into_reply().await;
        signaled.elapsed()
    };
    let (serving, cut_after) = tokio::join!(site.wait_for_session(&next), cut_after);
    serving?;
    site.answers().await;
    // The first agent still carries its streams, and no connection to the cloud.
    eventually("the reason of the cut", CONNECT, async || {
        let log = site.agent.log();
        log.contains("agent_stopping").then_some(())
    })
    .await;
    site.exporter.emit("after the handover");
    while log.line().await.context("the followed log has ended")? != "after the handover" {}
    ensure!(
        site.agent.end(Duration::ZERO).await.is_err(),
        "{}",
        site.agent
    );
    drop(log);
    let ended = site.agent.end(DRAIN).await?;
    ensure!(ended.success(), "{ended}; {}", site.agent);
    site.answers().await;
    crate::abuse::report_figure(&format!(
        "{transport}: handover: node {}; API server {}; watch cut after {cut_after:?}",
        node.outage(signaled).await?,
        apiserver.outage(signaled).await?,
    ));
    Ok(())
}

async fn restart(transport: &str) -> Result<()> {
    let mut site = Site::start(transport).await?;
    let watch = site.follow_apiserver().await?;
    let log = site.follow_node().await?;
    site.agent.signal(Signal::Term)?;
    site.agent
        .log()
        .find(|line| line.contains("draining").then_some(()))
        .await;
    eventually("the node's withdrawal", CONNECT, async || {
        let asked = site.server.get_ok(&site.host(), "/metrics").await;
        ensure!(asked.is_err());
        Ok(())
    })
    .await;
    // The drain goes on because of the log, and the node reaches the API server.
    get_ok(site.apiserver_at, APISERVER, "/metrics").await?;
    drop(log);
    let ended = site.agent.end(DRAIN).await?;
    ensure!(ended.success(), "{ended}; {}", site.agent);
    let watch = watch.into_reply().await;
    ensure!(site.agent.log().contains("agent_stopping"), "{watch:?}");

    // A watch alone never ends: five seconds.
    site.agent = site.setup.start()?;
    site.answers().await;
    let _watch = site.follow_apiserver().await?;
    let (mut node, mut apiserver) = (site.probe_node(), site.probe_apiserver());
    let signaled = Instant::now();
    site.agent.signal(Signal::Term)?;
    let ended = site.agent.end(DRAIN).await?;
    ensure!(ended.success(), "{ended}; {}", site.agent);
    let drained = signaled.elapsed();
    site.agent = site.setup.start()?;
    site.answers().await;
    crate::abuse::report_figure(&format!(
        "{transport}: restart: drained in {drained:?}; node {}; API server {}",
        node.outage(signaled).await?,
        apiserver.outage(signaled).await?,
    ));
    Ok(())
}

async fn killed(transport: &str) -> Result<()> {
    let site = Site::start(transport).await?;
    let next = site.start_next()?;
    site.wait_until_ready(&next).await;
    let (mut node, mut apiserver) = (site.probe_node(), site.probe_apiserver());
    let signaled = Instant::now();
    site.agent.signal(Signal::Kill)?;
    site.wait_for_session(&next).await?;
    site.answers().await;
    crate::abuse::report_figure(&format!(
        "{transport}: killed: node {}; API server {}",
        node.outage(signaled).await?,
        apiserver.outage(signaled).await?,
    ));
    Ok(())
}

/// A server, an agent with a listener for the API server, and both targets.
struct Site {
    setup: AgentSetup,
    agent: Process,
    server: Server,
    exporter: Exporter,
    apiserver: Exporter,
    /// The agent's listener.
    apiserver_at: SocketAddr,
    scratch: ScratchDir,
}

impl Site {
    async fn start(transport: &str) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let (exporter, apiserver) = (
            Exporter::start(NODE).await?,
            Exporter::start(APISERVER).await?,
        );
        let port = exporter.addr().port().to_string();
        let server = ServerSetup::on_loopback(&scratch.path().join("server"))
            .args(&["--http-proxy-ports", &port, "--proxy-port-listen", "off"])
            .args(&["--cloud-apiserver", &apiserver.addr().to_string()])
            .start()
            .await?;
        let address = next_loopback();
        let apiserver_at = Listener::Cloud.on(address);
        let agents = server.address(Listener::Agents);
        let folder = scratch.path().join("agent");
        let setup = AgentSetup::on_address(NODE, agents, &folder, address)
            .args(&["--token", &server.token(NODE, None).await?])
            .args(&["--transport", transport])
            .args(&["--cloud-listen", &format!("apiserver={apiserver_at}")]);
        let site = Self {
            agent: setup.start()?,
            setup,
            server,
            exporter,
            apiserver,
            apiserver_at,
            scratch,
        };
        site.answers().await;
        Ok(site)
    }

    fn host(&self) -> String {
        format!("{NODE}:{}", self.exporter.addr().port())
    }

    /// Waits until the cloud reaches the node, and the node the API server.
    async fn answers(&self) {
        eventually("answers of both targets", CONNECT, async || {
            self.server.get_ok(&self.host(), "/metrics").await?;
            get_ok(self.apiserver_at, APISERVER, "/metrics").await
        })
        .await;
    }

    /// Starts the next agent of the node, with the addresses of the first one.
    fn start_next(&self) -> Result<Process> {
        let socket = self.socket();
        self.setup.clone().args(&["--meta-socket", &socket]).start()
    }

    fn socket(&self) -> String {
        self.scratch
            .path()
            .join("next.sock")
            .to_string_lossy()
            .into_owned()
    }

    /// Waits until the next agent is ready, as its probe in a cluster sees it.
    async fn wait_until_ready(&self, next: &Process) {
        eventually("a ready standby", CONNECT, async || {
            let probe = ["healthcheck", "--meta-socket", &self.socket()];
            let probed = Program::ours("tunnel-agent")?.args(probe).run().await?;
            probed.ok().with_context(|| next.to_string())
        })
        .await;
    }

    async fn wait_for_session(&self, next: &Process) -> Result<()> {
        let ready = next
            .log()
            .find(|line| line.contains("session ready").then_some(()));
        timeout(scaled(CONNECT), ready)
            .await
            .with_context(|| next.to_string())
    }

    async fn follow_node(&self) -> Result<Exchange> {
        let get = RawRequest::get(&self.host(), "/follow");
        let exchange = Exchange::start(self.server.address(Listener::Http), &get).await?;
        self.exporter.emit("first line");
        Ok(exchange)
    }

    async fn follow_apiserver(&self) -> Result<Exchange> {
        let get = RawRequest::get(APISERVER, "/follow");
        let exchange = Exchange::start(self.apiserver_at, &get).await?;
        self.apiserver.emit("first line");
        Ok(exchange)
    }

    fn probe_node(&self) -> Probe {
        Probe::start(self.server.address(Listener::Http), self.host())
    }

    fn probe_apiserver(&self) -> Probe {
        Probe::start(self.apiserver_at, APISERVER.to_owned())
    }
}

/// Requests, one after the other, and which of them failed.
struct Probe {
    samples: mpsc::Receiver<Sample>,
    _task: JoinSet<()>,
}

/// The end of one request.
struct Sample {
    at: Instant,
    error: Option<String>,
}

impl Probe {
    fn start(address: SocketAddr, host: String) -> Self {
        let (results, samples) = mpsc::channel(SAMPLES_MAX);
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut ticks = interval(PROBE_INTERVAL);
            loop {
                ticks.tick().await;
                let asked = timeout(scaled(ATTEMPT), get_ok(address, &host, "/metrics")).await;
                let error = asked.map_or_else(
                    |_elapsed| Some("no answer".to_owned()),
                    |reply| reply.err().map(|error| format!("{error:#}")),
                );
                let at = Instant::now();
                if results.try_send(Sample { at, error }).is_err() {
                    return;
                }
            }
        });
        Self {
            samples,
            _task: task,
        }
    }

    /// Describes the time from `since` to the first answer behind the last failure.
    async fn outage(&mut self, since: Instant) -> Result<String> {
        let mut samples = Vec::new();
        let asked = Instant::now();
        let answered = async {
            while let Some(sample) = self.samples.recv().await {
                let is_last = sample.at > asked && sample.error.is_none();
                samples.push(sample);
                if is_last {
                    return;
                }
            }
        };
        timeout(scaled(CONNECT), answered)
            .await
            .context("no answer")?;
        let failed = || samples.iter().filter(|sample| sample.error.is_some());
        let Some(last) = failed().next_back() else {
            return Ok(format!("0 of {} failed", samples.len()));
        };
        let Some(back) = samples.iter().find(|sample| sample.at > last.at) else {
            bail!("no answer behind {:?}", last.error);
        };
        let first = failed().next().map_or(back.at, |sample| sample.at);
        let refused = failed().filter(|sample| {
            sample
                .error
                .as_deref()
                .is_some_and(|text| text.contains("refused"))
        });
        let refused: Vec<_> = refused.map(|sample| sample.at).collect();
        let refused_for = refused
            .last()
            .zip(refused.first())
            .map(|(last, first)| *last - *first);
        Ok(format!(
            "away for {:?} ({:?} to {:?} after the signal), {} of {} failed, {} refused within {:?}",
            back.at - first,
            first - since,
            back.at - since,
            failed().count(),
            samples.len(),
            refused.len(),
            refused_for.unwrap_or_default(),
        ))
    }
}

/// Name of the target in the host fields of requests.
const APISERVER: &str = "apiserver";
/// More than a test sends.
const SAMPLES_MAX: usize = 100_000;
const PROBE_INTERVAL: Duration = Duration::from_millis(10);
/// Longer than the time of connections to targets of the cloud, and far below that of streams.
const DRAIN: Duration = Duration::from_secs(10);
