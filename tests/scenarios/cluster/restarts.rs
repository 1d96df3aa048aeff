//! Several servers of a cluster: they find each other by EndpointSlices, forward streams for each
//! other, and restart one after the other while callers send requests.
//!
//! The test writes the slices, as the cluster's controller does for the Pods. A list of endpoints
//! stands for the Service that callers dial. kube-proxy lags by [`Timing::proxy_lag`].

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tunnel_server::config::ObjectNames;
use tunnel_tests::checks::ensure_reset;
use tunnel_tests::client::{HttpReply, KeepAliveClient, RawRequest, request};
use tunnel_tests::cluster::edge;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, Process, Server, Signal};
use tunnel_tests::targets::FakeKubelet;

use super::authority::Exec;
use super::{ClusterEnv, FIRST};

#[tokio::test(flavor = "multi_thread")]
async fn servers_find_each_other_by_their_endpoints_and_forward() -> Result<()> {
    let mut site = Site::start(2, 0).await?;
    // One session of the agent is enough to reach its node over each server.
    let _agent = site.agent("worker-1", &["--replicas", "1"]).await?;
    site.wait_for_sessions(1).await;
    site.wait_until_served("worker-1").await;
    let forwarded = "tunnel_server_forwarded_streams_total{direction=\"out\",result=\"ok\"}";
    ensure!(site.sum_of(forwarded).await? > 0, "nothing was forwarded");
    // A server whose endpoint has gone is no server of the cluster.
    let gone = site.replicas.pop_back().context("two servers")?;
    gone.server.into_process().kill().await?;
    site.delete_slice(&gone.name).await?;
    eventually("one server", FIRST, async || {
        let others = site.sum_of("tunnel_server_peers").await?;
        ensure!(others == 0, "{others} other servers");
        Ok(())
    })
    .await;
    Ok(())
}

/// Restarts each of three servers as a Deployment with `maxSurge: 1` and `maxUnavailable: 0` does,
/// while callers send requests, on new and on reused connections.
#[tokio::test(flavor = "multi_thread")]
async fn rolling_restart_of_three_servers_fails_no_request() -> Result<()> {
    let timing = Timing::current();
    let agents = Gear::current().pick(3, 20);
    let mut site = Site::start(3, agents).await?;
    site.wait_for_sessions(2 * agents as u64).await;
    for node in &site.nodes {
        site.wait_until_served(node).await;
    }
    let calling = Calling::start(&site);
    let mut execs = Vec::new();
    for _ in 0..Gear::current().pick(2, 20) {
        let endpoint = site.replicas[0].server.address(Listener::Http);
        let mut exec = Exec::start(endpoint.into(), site.kubelet.addr().port()).await?;
        exec.goes_on().await?;
        execs.push(exec);
    }
    for round in 0..3 {
        let mut old = site.surge(&timing).await?;
        old.server.process().signal(Signal::Term)?;
        for exec in &mut execs {
            exec.goes_on()
                .await
                .context("an exec on a stopping server")?;
        }
        sleep(timing.proxy_lag).await;
        site.publish_endpoints();
        let status = old.server.process().end(timing.end()).await?;
        ensure!(status.success(), "{status}; {}", old.server.log());
        site.delete_slice(&old.name).await?;
        // The execs of the first server end with the drain, and its log has the reason.
        let is_over = old.server.log().contains("drain timeout is over");
        ensure!(is_over || round > 0, "{}", old.server.log());
        for mut exec in execs.drain(..) {
            ensure_reset(&exec.ended().await)?;
        }
    }
    site.wait_for_sessions(2 * agents as u64).await;
    calling.end().await?.check()
}

/// Times of a rolling restart.
struct Timing {
    drain_delay: Duration,
    drain_timeout: Duration,
    /// Time from a change of a Pod until kube-proxy has updated its rules.
    proxy_lag: Duration,
}

impl Timing {
    fn current() -> Self {
        let pick = |quick, full| Duration::from_secs(Gear::current().pick(quick, full));
        Self {
            drain_delay: pick(2, 5),
            drain_timeout: pick(3, 30),
            proxy_lag: pick(1, 3),
        }
    }

    /// Returns the longest time from SIGTERM to the end of a server.
    fn end(&self) -> Duration {
        self.drain_delay + self.drain_timeout + FIRST
    }
}

/// Servers of a cluster, agents, and a kubelet that all agents reach.
struct Site {
    agents: Vec<Process>,
    /// The servers, the oldest one first.
    replicas: VecDeque<Replica>,
    /// Number of servers that were started.
    started: usize,
    nodes: Vec<String>,
    /// HTTP listeners to which callers are sent.
    endpoints: watch::Sender<Vec<SocketAddr>>,
    kubelet: FakeKubelet,
    cluster_env: ClusterEnv,
}

struct Replica {
    name: String,
    server: Server,
}

impl Site {
    /// Starts `servers` servers that are connected to each other, and `agents` agents.
    async fn start(servers: usize, agents: usize) -> Result<Self> {
        let cluster_env = ClusterEnv::fake().await?;
        let kubelet = FakeKubelet::plain("worker").await?;
        let port = kubelet.addr().port().to_string();
        let ports = [("http-proxy-ports", port.as_str())];
        cluster_env.objects().set_ports(&ports).await?;
        let mut site = Self {
            agents: Vec::new(),
            replicas: VecDeque::new(),
            started: 0,
            nodes: Vec::new(),
            endpoints: watch::Sender::new(Vec::new()),
            kubelet,
            cluster_env,
        };
        for _ in 0..servers {
            let replica = site.start_replica().await?;
            site.replicas.push_back(replica);
        }
        let links = u64::try_from(servers * (servers - 1))?;
        eventually("the servers' connections", FIRST, async || {
            let connected = "tunnel_server_peers{state=\"connected\"}";
            let connected = site.sum_of(connected).await?;
            ensure!(connected == links, "{connected} of {links}");
            Ok(())
        })
        .await;
        site.publish_endpoints();
        for number in 1..=agents {
            let agent = site.agent(&format!("worker-{number}"), &[]).await?;
            site.agents.push(agent);
        }
        Ok(site)
    }

    /// Starts the next server, with an endpoint once its listeners are open.
    async fn start_replica(&mut self) -> Result<Replica> {
        let timing = Timing::current();
        let name = format!("server-{}", self.started);
        self.started += 1;
        let drain_delay = humantime::format_duration(timing.drain_delay).to_string();
        let drain_timeout = humantime::format_duration(timing.drain_timeout).to_string();
        let server = (self.cluster_env.setup(&name)?)
            .args(&["--replica-name", &name, "--peer-listen", "127.0.0.1:0"])
            .args(&["--drain-delay", &drain_delay])
            .args(&["--drain-timeout", &drain_timeout])
            .start()
            .await?;
        let opened = server.log().find(|line| Listener::Peers.opened(line));
        let opened = timeout(scaled(FIRST), opened).await;
        let address = opened.context("no listener for other servers")?;
        let slice = endpoint_slice(&name, address);
        self.cluster_env.admin().create(SLICES, &slice).await?;
        Ok(Replica { name, server })
    }

    /// Starts an agent of a new node, and returns it before it is connected.
    async fn agent(&mut self, node: &str, arguments: &[&str]) -> Result<Process> {
        self.cluster_env.objects().add(&edge(node)).await?;
        self.nodes.push(node.to_owned());
        let server = &self.replicas[self.agents.len() % self.replicas.len()].server;
        let folder = self
            .cluster_env
            .scratch
            .path()
            .join(format!("agent-{node}"));
        let setup = server.agent_setup(node, &folder).await?;
        setup.args(arguments).start()
    }

    /// Adds a server that is ready, and removes the oldest one, to which callers are still sent.
    async fn surge(&mut self, timing: &Timing) -> Result<Replica> {
        let new = self.start_replica().await?;
        let meta = new.server.address(Listener::Meta);
        eventually("the new server is ready", FIRST, async || {
            meta_page(meta, "/readyz").await
        })
        .await;
        sleep(timing.proxy_lag).await;
        self.replicas.push_back(new);
        self.publish_endpoints();
        self.replicas.pop_front().context("no server")
    }

    /// Sends callers to the current servers.
    fn publish_endpoints(&self) {
        let replicas = self.replicas.iter();
        let endpoints = replicas.map(|replica| replica.server.address(Listener::Http));
        self.endpoints.send_replace(endpoints.collect());
    }

    async fn delete_slice(&self, name: &str) -> Result<()> {
        let slice = format!("{SLICES}/{}", slice_name(name));
        self.cluster_env.admin().delete(&slice).await
    }

    /// Returns the sum of a metric over all servers.
    async fn sum_of(&self, series: &str) -> Result<u64> {
        let mut sum = 0;
        for replica in &self.replicas {
            sum += replica.server.metric(series).await?;
        }
        Ok(sum)
    }

    /// Waits until the agents have this many sessions in all.
    async fn wait_for_sessions(&self, sessions: u64) {
        eventually("the agents' sessions", SESSIONS, async || {
            let connected = self.sum_of("tunnel_server_agents").await?;
            ensure!(connected == sessions, "{connected} of {sessions}");
            Ok(())
        })
        .await;
    }

    /// Waits until every server answers for the node.
    async fn wait_until_served(&self, node: &str) {
        let host = format!("{node}:{}", self.kubelet.addr().port());
        eventually(&format!("answers of {node}"), FIRST, async || {
            for replica in &self.replicas {
                replica.server.get_ok(&host, "/metrics").await?;
            }
            anyhow::Ok(())
        })
        .await;
    }
}

/// Returns the slice of one server, as the cluster's controller writes it. Servers on one host have
/// different ports, so each has a slice of its own.
fn endpoint_slice(name: &str, address: SocketAddr) -> Value {
    let service = ObjectNames::default().peer_service;
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": slice_name(name), "labels": { "kubernetes.io/service-name": service },
        },
        "endpoints": [{
            "addresses": [address.ip().to_string()], "conditions": { "ready": true },
            "targetRef": { "kind": "Pod", "name": name, "namespace": "kube-system" },
        }],
        "ports": [{ "name": "peers", "port": address.port(), "protocol": "TCP" }],
    })
}

fn slice_name(server: &str) -> String {
    format!("tunnel-server-peers-{server}")
}

/// Callers that send requests in a row, half of them on new connections.
struct Calling {
    stop: CancellationToken,
    callers: JoinSet<Calls>,
}

/// The requests of a caller.
#[derive(Default)]
struct Calls {
    answered: usize,
    failures: Vec<String>,
}

impl Calling {
    fn start(site: &Site) -> Self {
        let (stop, mut callers) = (CancellationToken::new(), JoinSet::new());
        let port = site.kubelet.addr().port();
        for number in 0..CALLERS {
            let node = &site.nodes[number % site.nodes.len()];
            let caller = Caller {
                endpoints: site.endpoints.subscribe(),
                host: format!("{node}:{port}"),
                sent: number,
            };
            let is_new = number.is_multiple_of(2);
            callers.spawn(caller.run(is_new, stop.clone()));
        }
        Self { stop, callers }
    }

    async fn end(self) -> Result<Calls> {
        self.stop.cancel();
        let mut all = Calls::default();
        for calls in self.callers.join_all().await {
            all.answered += calls.answered;
            all.failures.extend(calls.failures);
        }
        Ok(all)
    }
}

impl Calls {
    fn check(&self) -> Result<()> {
        let (count, first) = (self.failures.len(), self.failures.first());
        ensure!(
            count == 0,
            "{count} failed and {} succeeded; the first: {first:?}",
            self.answered
        );
        ensure!(self.answered > 100, "{} requests", self.answered);
        Ok(())
    }
}

struct Caller {
    endpoints: watch::Receiver<Vec<SocketAddr>>,
    host: String,
    /// Number of requests so far, from a different start for each caller.
    sent: usize,
}

impl Caller {
    async fn run(mut self, is_new: bool, stop: CancellationToken) -> Calls {
        let mut calls = Calls::default();
        let mut connection = None;
        while !stop.is_cancelled() {
            let asked = async {
                if is_new {
                    self.ask_once().await
                } else {
                    self.ask_on(&mut connection).await
                }
            };
            let answer = timeout(scaled(CALL_TIMEOUT), asked).await;
            match answer.context("no answer").flatten().and_then(check) {
                Ok(()) => calls.answered += 1,
                Err(error) => calls.failures.push(format!("{error:#}")),
            }
            sleep(CALL_PAUSE).await;
        }
        calls
    }

    /// Sends a request on a new connection to the next endpoint.
    async fn ask_once(&mut self) -> Result<HttpReply> {
        let (endpoint, page) = self.next_request()?;
        request(endpoint, &page.header("Connection", "close")).await
    }

    /// Sends a request on the connection, or on a new one if the last answer asked to close it.
    async fn ask_on(&mut self, connection: &mut Option<KeepAliveClient>) -> Result<HttpReply> {
        let (endpoint, page) = self.next_request()?;
        let mut client = match connection.take() {
            Some(client) => client,
            None => KeepAliveClient::connect(endpoint).await?,
        };
        let reply = client.request(&page).await?;
        let is_closing =
            (reply.header("connection")).is_some_and(|value| value.eq_ignore_ascii_case("close"));
        if !is_closing {
            *connection = Some(client);
        }
        Ok(reply)
    }

    /// Returns the next request and its endpoint.
    fn next_request(&mut self) -> Result<(SocketAddr, RawRequest)> {
        self.sent += 1;
        let endpoint = {
            let endpoints = self.endpoints.borrow();
            endpoints.get(self.sent % endpoints.len().max(1)).copied()
        };
        let path = format!("/size/2000?seed={}", self.sent);
        let page = RawRequest::new("GET", &path, &self.host);
        Ok((endpoint.context("no endpoint")?, page))
    }
}

/// Fails unless the answer is a whole page.
fn check(reply: HttpReply) -> Result<()> {
    ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    let expected = reply.header("x-sha256");
    ensure!(expected == Some(reply.sha256().as_str()), "wrong bytes");
    Ok(())
}

const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";
/// With a pause of 80 ms, these send about 100 requests a second.
const CALLERS: usize = 8;
const CALL_PAUSE: Duration = Duration::from_millis(80);
/// Time after which a call counts as failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time in which agents find a second server, and give up the one that has gone.
const SESSIONS: Duration = Duration::from_secs(20);
