//! Several standalone servers of one installation, as processes: they share a CA and are peers.

mod alerts;
mod alone;
mod console;
mod crossed;
mod forwarded;
mod intruders;
mod lost;
mod one_socket;
mod replaced;
mod resent;
mod rotation;
mod short;
mod standalone;
mod stopping;
mod zones;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::client::{Endpoint, Exchange, RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{AgentSetup, Listener, Peering, Process, ScratchDir, Server, Signal};
use tunnel_tests::targets::FakeKubelet;

/// Servers that are connected to each other, with a kubelet that agents can reach.
struct Servers {
    servers: Vec<Server>,
    peering: Peering,
    kubelet: FakeKubelet,
    scratch: ScratchDir,
}

impl Servers {
    /// Starts `count` servers with the names `s0`, `s1` and so on.
    async fn start(count: usize, arguments: &[&str]) -> Result<Self> {
        Self::start_each(&vec![arguments.to_vec(); count]).await
    }

    /// Starts a server for each of these lists of ports that callers may reach.
    async fn start_with_ports(ports: &[&str]) -> Result<Self> {
        let arguments = ports.iter().map(|ports| vec!["--http-proxy-ports", *ports]);
        Self::start_each(&arguments.collect::<Vec<_>>()).await
    }

    /// Starts a server for each of these lists of arguments.
    async fn start_each(arguments: &[Vec<&str>]) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let kubelet = FakeKubelet::plain(NODE).await?;
        let peering = Peering::new(arguments.len(), scratch.path());
        let mut servers = Vec::new();
        for (number, arguments) in arguments.iter().enumerate() {
            let status = peering.address(number, Listener::Status).to_string();
            let mut setup = (peering.setup(number)?)
                .audited()
                .args(&["--status-listen", &status])
                .args(&["--proxy-port-listen", "off", "--compat", "yurt-tunnel"])
                .args(arguments);
            if !arguments.contains(&"--http-proxy-ports") {
                setup = setup.args(&["--http-proxy-ports", "1024-65535"]);
            }
            servers.push(setup.start().await?);
        }
        Peering::wait_until_connected(&servers).await;
        Ok(Self {
            servers,
            peering,
            kubelet,
            scratch,
        })
    }

    fn http(&self, server: usize) -> SocketAddr {
        self.servers[server].address(Listener::Http)
    }

    fn host(&self) -> String {
        format!("{NODE}:{}", self.kubelet.addr().port())
    }

    /// Returns the setup of the node's agent, which dials `server` first.
    async fn agent(&self, server: usize) -> Result<AgentSetup> {
        let folder = self.scratch.path().join("agent");
        self.servers[server].agent_setup(NODE, &folder).await
    }

    /// Starts the node's agent with one session, at `server`, and waits until the others know it.
    async fn agent_at(&self, server: usize) -> Result<Process> {
        self.agent_with(server, &[]).await
    }

    /// Like [`Servers::agent_at`], with further arguments of the agent.
    async fn agent_with(&self, server: usize, arguments: &[&str]) -> Result<Process> {
        let agent = self.agent(server).await?.audited();
        let agent = agent.args(&["--replicas", "1"]);
        let agent = agent.args(arguments).start()?;
        for (number, other) in self.servers.iter().enumerate() {
            if number != server {
                wait_for(other, "tunnel_server_directory_nodes", 1).await;
                wait_for(other, AGENTS, 0).await;
                wait_for_route(self.http(number).into()).await;
            }
        }
        Ok(agent)
    }

    /// Starts the node's agent and waits until it has a session with each of two servers.
    async fn agent_at_both(&self) -> Result<Process> {
        let agent = self.agent(0).await?.start()?;
        for server in &self.servers {
            server.wait_until_connected(&[NODE]).await;
            wait_for(server, "tunnel_server_directory_nodes", 1).await;
            wait_for(server, AGENTS, 1).await;
        }
        Ok(agent)
    }

    /// Requests a page that must be answered with 200.
    async fn get_ok(&self, server: usize) -> Result<()> {
        let server = &self.servers[server];
        server.get_ok(&self.host(), "/metrics").await.map(drop)
    }
}

async fn wait_for(server: &Server, series: &str, value: u64) {
    eventually(series, CONNECT, async || {
        let found = server.metric(series).await?;
        ensure!(
            found == value,
            "{found} instead of {value}; {}",
            server.log()
        );
        Ok(())
    })
    .await;
}

/// Waits until a server knows the node. The server refuses the port of such a request.
async fn wait_for_route(endpoint: Endpoint) {
    let refused = RawRequest::get(NODE, "/");
    eventually("a route to the node", CONNECT, async || {
        let reply = request(endpoint.clone(), &refused).await?;
        ensure!(reply.status == 403, "{}: {}", reply.status, reply.text());
        Ok(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn request_reaches_an_agent_of_another_server() -> Result<()> {
    let servers = Servers::start(2, &[]).await?;
    let _agent = servers.agent_at(0).await?;
    servers.get_ok(0).await?;
    servers.get_ok(1).await?;
    // The line follows the answer.
    eventually("the access log", CONNECT, async || {
        let log = servers.servers[1].log();
        ensure!(log.contains("\"via\":\"s0\""), "{log}");
        Ok(())
    })
    .await;
    let forwarded = "tunnel_server_forwarded_streams_total{direction=\"out\",result=\"ok\"}";
    ensure!(servers.servers[1].metric(forwarded).await? == 1);
    // The agent's refusal arrives with its text.
    let refused = RawRequest::get(&format!("{NODE}:10250"), "/healthz");
    let reply = request(servers.http(1), &refused).await?;
    ensure!(reply.status == 502, "{}", reply.text());
    ensure!(reply.text().contains("refused"), "{}", reply.text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_holds_a_session_with_each_of_two_servers_and_survives_one() -> Result<()> {
    let mut servers = Servers::start(2, &[]).await?;
    let _agent = servers.agent_at_both().await?;
    for (number, server) in servers.servers.iter().enumerate() {
        let listed = server.nodes().await?;
        ensure!(listed[0]["server"] == Peering::name(number), "{listed:?}");
    }
    servers.servers[0].process().signal(Signal::Kill)?;
    let until = Instant::now() + Duration::from_secs(3);
    let mut requests = 0;
    while Instant::now() < until || requests <= 10 {
        servers.get_ok(1).await?;
        requests += 1;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_stops_fails_no_request() -> Result<()> {
    let delay = scaled(Duration::from_secs(1));
    let setting = format!("{}ms", delay.as_millis());
    let mut servers = Servers::start(2, &["--drain-delay", &setting]).await?;
    let _agent = servers.agent_at_both().await?;
    let mut followed = follow(&servers, 0).await?;
    servers.servers[0].process().signal(Signal::Term)?;
    let stopping = Instant::now();
    while stopping.elapsed() < 3 * delay {
        if stopping.elapsed() < delay / 2 {
            servers.get_ok(0).await?;
        }
        servers.get_ok(1).await?;
    }
    // A stream that was open goes on until its own end.
    servers.kubelet.emit("last");
    ensure!(followed.line().await.as_deref() == Some("last"));
    servers.kubelet.end_follows();
    followed.finish().await?;
    servers.servers[0].process().end(CONNECT).await?;
    Ok(())
}

async fn follow(servers: &Servers, server: usize) -> Result<Exchange> {
    let page = RawRequest::get(&servers.host(), "/follow");
    let followed = Exchange::start(servers.http(server), &page).await?;
    eventually("the follower", CONNECT, async || {
        ensure!(servers.kubelet.followers() == 1);
        Ok(())
    })
    .await;
    Ok(followed)
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_of_one_name_at_two_servers_have_one_owner() -> Result<()> {
    let servers = Servers::start(2, &[]).await?;
    let first = servers.agent(0).await?.args(&["--replicas", "1"]);
    let first_agent = first.start()?;
    wait_for(&servers.servers[1], "tunnel_server_directory_nodes", 1).await;
    let folder = servers.scratch.path().join("clone");
    let second = servers.servers[1].agent_setup(NODE, &folder).await?;
    let mut second_agent = second.args(&["--replicas", "1"]).start()?;
    let refused = |line: &str| line.contains("name_in_use").then_some(());
    second_agent
        .wait_for_line("the refusal", CONNECT, refused)
        .await?;
    ensure!(!first_agent.log().contains("name_in_use"), "{first_agent}");
    servers.get_ok(1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_between_servers_hold_for_one_at_and_above_their_limit() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("server.yaml", "limits:\n  peerStreams: 2\n")?;
    let file = file.to_string_lossy();
    let servers = Servers::start(2, &["--config", &file]).await?;
    let _agent = servers.agent_at(0).await?;
    let mut open = Vec::new();
    for number in 1..=2 {
        let page = RawRequest::get(&servers.host(), "/follow");
        open.push(Exchange::start(servers.http(1), &page).await?);
        eventually("the follower", CONNECT, async || {
            ensure!(servers.kubelet.followers() == number);
            Ok(())
        })
        .await;
    }
    let page = RawRequest::get(&servers.host(), "/metrics");
    let reply = request(servers.http(1), &page).await?;
    ensure!(reply.status == 503, "{}", reply.status);
    ensure!(
        reply.text().contains("limits.peerStreams"),
        "{}",
        reply.text()
    );
    let reached = "tunnel_server_limits_reached_total{limit=\"peerStreams\"}";
    ensure!(servers.servers[1].metric(reached).await? == 1);
    // The other direction is not affected, and neither is the server with the session.
    servers.get_ok(0).await?;
    servers.kubelet.end_follows();
    for mut followed in open {
        followed.finish().await?;
    }
    let again = async || servers.get_ok(1).await;
    eventually("room for another stream", CONNECT, again).await;
    Ok(())
}

const NODE: &str = "worker-1";
/// Sessions of agents with a server itself.
const AGENTS: &str = "tunnel_server_agents";
/// Time limit for connections between servers, and for agents that move.
const CONNECT: Duration = Duration::from_secs(15);
