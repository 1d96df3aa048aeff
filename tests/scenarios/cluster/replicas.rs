//! Several servers of a cluster with their agents. The test plays the controllers: it starts and
//! stops the servers, writes their EndpointSlices, and sends callers to them.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tunnel_server::config::ObjectNames;
use tunnel_tests::cluster::edge;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::faults::{CallerOptions, Callers};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::netns::{IpProtocol, Route, publish_routes, service_address};
use tunnel_tests::process::{AgentSetup, Listener, Process, Server, ServerSetup, Signal};
use tunnel_tests::targets::FakeKubelet;

use super::{ClusterEnv, FIRST};

/// Times of a server that is replaced.
pub(super) struct Timing {
    pub(super) drain_delay: Duration,
    pub(super) drain_timeout: Duration,
    /// Time from a change of a Pod until kube-proxy has updated its rules.
    pub(super) proxy_lag: Duration,
}

impl Timing {
    pub(super) fn current() -> Self {
        let pick = |quick, full| Duration::from_secs(Gear::current().pick(quick, full));
        Self {
            drain_delay: pick(2, 5),
            drain_timeout: pick(3, 30),
            proxy_lag: pick(1, 3),
        }
    }

    /// Returns the longest time from SIGTERM to the end of a server.
    pub(super) fn end(&self) -> Duration {
        self.drain_delay + self.drain_timeout + FIRST
    }
}

/// What an [`Installation`] starts with.
pub(super) struct Plan {
    pub(super) cluster_env: ClusterEnv,
    pub(super) servers: usize,
    pub(super) agents: usize,
    /// Ports of the virtual address that callers and agents dial. Without them, callers have a list
    /// of the servers, and agents dial what the servers advertise.
    pub(super) virtual_ports: Option<VirtualPorts>,
    /// Returns the command line of a server with this number and name.
    pub(super) launch: Launch,
}

pub(super) type Launch = Box<dyn Fn(&ClusterEnv, usize, &str) -> Result<ServerSetup> + Send + Sync>;

/// The ports of the virtual address. Agents use theirs over UDP and TCP.
#[derive(Debug, Clone, Copy)]
pub(super) struct VirtualPorts {
    pub(super) http: u16,
    pub(super) agents: u16,
}

/// Servers of a cluster, agents, and a kubelet that all agents reach.
pub(super) struct Installation {
    agents: Vec<Process>,
    /// The servers, the oldest one first.
    pub(super) replicas: VecDeque<Replica>,
    /// Number of servers that were started.
    started: usize,
    pub(super) nodes: Vec<String>,
    /// The servers to which callers are sent.
    pub(super) backends: watch::Sender<Vec<Backend>>,
    /// The addresses of `backends`.
    endpoints: watch::Sender<Vec<SocketAddr>>,
    pub(super) kubelet: FakeKubelet,
    virtual_ports: Option<VirtualPorts>,
    launch: Launch,
    pub(super) cluster_env: ClusterEnv,
}

pub(super) struct Replica {
    pub(super) name: String,
    pub(super) server: Server,
}

/// A moment in the replacement of a server.
pub(super) enum Moment<'a> {
    /// The server got SIGTERM.
    Stopping,
    /// The server has ended after its drain.
    Ended(&'a Replica),
}

/// A server for callers, or the virtual address.
#[derive(Debug, Clone)]
pub(super) struct Backend {
    pub(super) name: String,
    pub(super) http: SocketAddr,
}

/// Returns the command line of a server on a loopback address of its own with the current [`Timing`].
pub(super) fn on_own_address(cluster_env: &ClusterEnv, name: &str) -> Result<ServerSetup> {
    let timing = Timing::current();
    let drain_delay = humantime::format_duration(timing.drain_delay).to_string();
    let drain_timeout = humantime::format_duration(timing.drain_timeout).to_string();
    let setup = cluster_env.setup(name)?;
    Ok(setup
        // The scenarios hold upgraded streams of callers without a certificate.
        .args(&["--compat", "yurt-tunnel"])
        .args(&["--drain-delay", &drain_delay])
        .args(&["--drain-timeout", &drain_timeout]))
}

impl Installation {
    /// Starts servers that are connected to each other, and the agents.
    pub(super) async fn start(plan: Plan) -> Result<Self> {
        let kubelet = FakeKubelet::plain("worker").await?;
        let port = kubelet.addr().port().to_string();
        let ports = [("http-proxy-ports", port.as_str())];
        plan.cluster_env.objects().set_ports(&ports).await?;
        let mut site = Self {
            agents: Vec::new(),
            replicas: VecDeque::new(),
            started: 0,
            nodes: Vec::new(),
            backends: watch::Sender::new(Vec::new()),
            endpoints: watch::Sender::new(Vec::new()),
            kubelet,
            virtual_ports: plan.virtual_ports,
            launch: plan.launch,
            cluster_env: plan.cluster_env,
        };
        for _ in 0..plan.servers {
            let replica = site.start_replica().await?;
            site.replicas.push_back(replica);
        }
        site.wait_for_links().await?;
        site.publish_endpoints().await?;
        for number in 1..=plan.agents {
            let agent = site.agent(&format!("worker-{number}"), &[]).await?;
            site.agents.push(agent);
        }
        Ok(site)
    }

    /// Waits until every agent has a session with each of two servers, and every server knows of
    /// the sessions of the others and answers for every node.
    pub(super) async fn settle(&self) {
        self.wait_for_sessions(2 * self.nodes.len() as u64).await;
        self.wait_for_announcements().await;
        for node in &self.nodes {
            self.wait_until_served(node).await;
        }
    }

    /// Starts the next server, with an endpoint once its listeners are open.
    pub(super) async fn start_replica(&mut self) -> Result<Replica> {
        let number = self.started;
        let name = format!("server-{number}");
        self.started += 1;
        let setup = (self.launch)(&self.cluster_env, number, &name)?;
        let setup = setup.args(&["--replica-name", &name]);
        let setup = setup.args(&["--status-listen", "127.0.0.1:0"]);
        let server = setup.start().await?;
        let opened = server.log().find(|line| Listener::Peers.opened(line));
        let opened = timeout(scaled(FIRST), opened).await;
        let address = opened.context("no listener for other servers")?;
        let slice = endpoint_slice(&name, address);
        self.cluster_env.admin().create(SLICES, &slice).await?;
        Ok(Replica { name, server })
    }

    /// Waits until a server is ready, and kube-proxy's lag after that.
    pub(super) async fn wait_until_ready(&self, replica: &Replica) {
        let meta = replica.server.address(Listener::Meta);
        eventually("the new server is ready", FIRST, async || {
            meta_page(meta, "/readyz").await
        })
        .await;
        sleep(Timing::current().proxy_lag).await;
    }

    /// Starts an agent of a new node, and returns it before it is connected.
    pub(super) async fn agent(&mut self, node: &str, arguments: &[&str]) -> Result<Process> {
        self.agent_setup(node).await?.args(arguments).start()
    }

    pub(super) async fn agent_setup(&mut self, node: &str) -> Result<AgentSetup> {
        let object = edge(node).addressed("Hostname", node);
        self.cluster_env.objects().add(&object).await?;
        self.nodes.push(node.to_owned());
        let server = &self.replicas[self.nodes.len() % self.replicas.len()].server;
        let address = match self.virtual_ports {
            Some(ports) => service_address(ports.agents),
            None => server.address(Listener::Agents),
        };
        let token = server.token(node, None).await?;
        let folder = self.cluster_env.scratch.path();
        let folder = folder.join(format!("agent-{node}"));
        let setup = AgentSetup::on_loopback(node, address, &folder);
        Ok(setup.args(&["--token", &token]))
    }

    /// Replaces the servers one after the other, as a Deployment with `maxSurge: 1` and
    /// `maxUnavailable: 0` does. `observe` runs at the SIGTERM of each server and at its end.
    pub(super) async fn restart_all(
        &mut self,
        mut observe: impl AsyncFnMut(&Self, Moment<'_>) -> Result<()>,
    ) -> Result<()> {
        let timing = Timing::current();
        for _ in 0..self.replicas.len() {
            let new = self.start_replica().await?;
            self.wait_until_ready(&new).await;
            self.replicas.push_back(new);
            // Callers are still sent to the oldest server.
            self.publish_endpoints().await?;
            let mut old = self.replicas.pop_front().context("no server")?;
            old.server.process().signal(Signal::Term)?;
            let site = &*self;
            let publish = async {
                sleep(timing.proxy_lag).await;
                site.publish_endpoints().await
            };
            let (observed, published) = tokio::join!(observe(site, Moment::Stopping), publish);
            observed?;
            published?;
            site.wait_for_end(&mut old).await?;
            observe(site, Moment::Ended(&old)).await?;
        }
        Ok(())
    }

    /// Waits for the end of a server that got SIGTERM, and deletes its endpoint.
    pub(super) async fn wait_for_end(&self, replica: &mut Replica) -> Result<()> {
        let end = Timing::current().end();
        let status = replica.server.process().end(end).await?;
        ensure!(status.success(), "{status}; {}", replica.server.log());
        self.delete_slice(&replica.name).await
    }

    /// Sends callers and agents to the current servers.
    pub(super) async fn publish_endpoints(&self) -> Result<()> {
        let Some(ports) = self.virtual_ports else {
            let backends = self.replicas.iter().map(|replica| Backend {
                name: replica.name.clone(),
                http: replica.server.address(Listener::Http),
            });
            self.send_callers_to(backends.collect());
            return Ok(());
        };
        let route = |protocol, port, listener| Route {
            protocol,
            port,
            backends: (self.replicas.iter())
                .map(|replica| replica.server.address(listener))
                .collect(),
        };
        publish_routes(&[
            route(IpProtocol::Tcp, ports.http, Listener::Http),
            route(IpProtocol::Tcp, ports.agents, Listener::Agents),
            route(IpProtocol::Udp, ports.agents, Listener::Agents),
        ])
        .await?;
        self.send_callers_to(vec![Backend {
            name: "service".to_owned(),
            http: service_address(ports.http),
        }]);
        Ok(())
    }

    fn send_callers_to(&self, backends: Vec<Backend>) {
        let endpoints = backends.iter().map(|backend| backend.http);
        self.endpoints.send_replace(endpoints.collect());
        self.backends.send_replace(backends);
    }

    /// Starts callers of all nodes, which send about 100 requests a second to the current servers.
    pub(super) fn start_callers(&self) -> Callers {
        let port = self.kubelet.addr().port();
        let hosts = self.nodes.iter().map(|node| format!("{node}:{port}"));
        let hosts: Vec<_> = hosts.collect();
        // Each node has callers on new and on reused connections.
        let callers = (2 * hosts.len()).max(8);
        let options = CallerOptions {
            callers,
            pause: Duration::from_millis(10 * callers as u64),
            limit: scaled(CALL_TIMEOUT),
            seed: 0,
        };
        Callers::start(&self.endpoints, &hosts, options)
    }

    pub(super) async fn delete_slice(&self, name: &str) -> Result<()> {
        let slice = format!("{SLICES}/{}", slice_name(name));
        self.cluster_env.admin().delete(&slice).await
    }

    /// Returns the sum of a metric over all servers.
    pub(super) async fn sum_of(&self, series: &str) -> Result<u64> {
        let mut sum = 0;
        for replica in &self.replicas {
            sum += replica.server.metric(series).await?;
        }
        Ok(sum)
    }

    /// Waits until every server is connected to every other.
    pub(super) async fn wait_for_links(&self) -> Result<()> {
        let servers = self.replicas.len();
        let links = u64::try_from(servers * (servers - 1))?;
        eventually("the servers' connections", FIRST, async || {
            let connected = "tunnel_server_peers{state=\"connected\"}";
            let connected = self.sum_of(connected).await?;
            ensure!(connected == links, "{connected} of {links}");
            Ok(())
        })
        .await;
        Ok(())
    }

    /// Waits until the agents have this many sessions in all, without those of agents whose search
    /// behind the virtual address is over.
    pub(super) async fn wait_for_sessions(&self, sessions: u64) {
        let limit = match self.virtual_ports {
            Some(_) => SESSIONS_BY_CHANCE,
            None => SESSIONS,
        };
        eventually("the agents' sessions", limit, async || {
            let connected = self.sum_of(AGENTS).await?;
            let is_over = |agent: &&Process| agent.log().contains(SEARCH_IS_OVER);
            let missing = self.agents.iter().filter(is_over).count() as u64;
            let is_enough = (sessions - missing..=sessions).contains(&connected);
            ensure!(is_enough, "{connected} of {sessions}");
            Ok(())
        })
        .await;
    }

    /// Waits until every server knows all sessions of the others. A server that knows one of the two
    /// holders of a node answers for it, too, until that one is killed.
    async fn wait_for_announcements(&self) {
        eventually("the servers' announcements", FIRST, async || {
            let mut known = 0;
            for replica in &self.replicas {
                known += replica.server.known_sessions().await?;
            }
            let others = self.replicas.len() as u64 - 1;
            let announced = others * self.sum_of(AGENTS).await?;
            ensure!(known == announced, "{known} of {announced}");
            Ok(())
        })
        .await;
    }

    /// Waits until every server answers for the node.
    pub(super) async fn wait_until_served(&self, node: &str) {
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
pub(super) fn endpoint_slice(name: &str, address: SocketAddr) -> Value {
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

pub(super) const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices";
/// Time after which a call counts as failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Sessions of agents with a server itself.
pub(super) const AGENTS: &str = "tunnel_server_agents";
/// Time in which agents find a second server, and give up the one that has gone.
const SESSIONS: Duration = Duration::from_secs(20);
/// The same behind a virtual address, where an agent dials again, after 1, 2, 4 and more seconds,
/// until a connection happens to lead to another server.
const SESSIONS_BY_CHANCE: Duration = Duration::from_secs(360);
/// The log line of an agent that goes on with one session.
const SEARCH_IS_OVER: &str = "going on with fewer sessions";
