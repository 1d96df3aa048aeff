//! Several servers of a cluster: they find each other by EndpointSlices, forward streams for each
//! other, and restart one after the other while callers send requests.
//!
//! A list of servers or a virtual address stands for the Services that callers and agents dial.
//! kube-proxy lags by [`Timing::proxy_lag`](super::replicas::Timing::proxy_lag).

mod real;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, timeout};
use tunnel_tests::apiserver::Presence;
use tunnel_tests::checks::{ensure_contains, ensure_reset};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::link::Link;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::netns::{CLOUD_ADDRESS, in_service_namespace, service_address};
use tunnel_tests::process::{AgentSetup, Listener, Signal, next_loopback};

use super::authority::Exec;
use super::replicas::{Installation, Moment, Plan, Replica, VirtualPorts, on_own_address};
use super::{ClusterEnv, FIRST};

#[tokio::test(flavor = "multi_thread")]
async fn servers_find_each_other_by_their_endpoints_and_forward() -> Result<()> {
    let mut site = Installation::start(on_loopback(2, 0).await?).await?;
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

#[tokio::test(flavor = "multi_thread")]
async fn node_without_a_node_object_is_reached_at_every_server() -> Result<()> {
    let site = Installation::start(on_loopback(2, 0).await?).await?;
    let first = &site.replicas[0].server;
    let token = first.token("g1", None).await?;
    let folder = site.cluster_env.scratch.path().join("agent-g1");
    let agents = first.address(Listener::Agents);
    let setup = AgentSetup::on_loopback("g1", agents, &folder);
    let _agent = setup
        .args(&["--token", &token, "--replicas", "1"])
        .start()?;
    site.wait_until_served("g1").await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_whose_endpoints_are_deleted_serve_on_and_say_so() -> Result<()> {
    let mut site = Installation::start(on_loopback(2, 0).await?).await?;
    let _agent = site.agent("worker-1", &["--replicas", "1"]).await?;
    site.wait_until_served("worker-1").await;
    for replica in &site.replicas {
        site.delete_slice(&replica.name).await?;
    }
    for replica in &site.replicas {
        let meta = replica.server.address(Listener::Meta);
        eventually("the condition", FIRST, async || {
            let page = meta_page(meta, "/readyz?verbose").await?;
            ensure_contains(
                &page,
                &["[!] peer endpoints: no server is in the EndpointSlices of"],
            )
        })
        .await;
    }
    site.wait_for_links().await?;
    site.wait_until_served("worker-1").await;
    Ok(())
}

/// Returns a path to the API server, and a kubeconfig that leads over it, for the server `name`.
pub(super) fn own_path(cluster_env: &ClusterEnv, name: &str) -> Result<(Link, PathBuf)> {
    let kubeconfig = std::fs::read_to_string(cluster_env.cluster.server_kubeconfig()?)?;
    let address = cluster_env.api_address()?;
    let link = Link::start(address, 0)?;
    let path = cluster_env
        .scratch
        .path()
        .join(format!("{name}.kubeconfig"));
    let (direct, own) = (address.to_string(), link.addr().to_string());
    std::fs::write(&path, kubeconfig.replace(&direct, &own))?;
    Ok((link, path))
}

/// Restarts each of three servers behind one virtual address, which nft spreads over them for
/// callers and agents, while callers send requests on new and on reused connections. Agents reach
/// their second server by chance.
#[tokio::test(flavor = "multi_thread")]
async fn rolling_restart_behind_a_virtual_address_fails_no_request() -> Result<()> {
    let test = "cluster::restarts::rolling_restart_behind_a_virtual_address_fails_no_request";
    in_service_namespace(test, LIMIT, restart_behind_a_virtual_address).await
}

async fn restart_behind_a_virtual_address() -> Result<()> {
    let plan = Plan {
        virtual_ports: Some(PORTS),
        launch: Box::new(|cluster_env: &ClusterEnv, _: usize, name: &str| {
            let advertised = service_address(PORTS.agents).to_string();
            let peers = format!("{CLOUD_ADDRESS}:0");
            let setup = on_own_address(cluster_env, name)?.args(&["--peer-listen", &peers]);
            Ok(setup.args(&["--advertise", &advertised]))
        }),
        ..on_loopback(3, agents()).await?
    };
    let mut site = Installation::start(plan).await?;
    site.settle().await;
    let callers = site.start_callers();
    let mut execs = Vec::new();
    for _ in 0..Gear::current().pick(4, 20) {
        let endpoint = service_address(PORTS.http);
        let mut exec = Exec::start(endpoint.into(), site.kubelet.addr().port()).await?;
        exec.goes_on().await?;
        execs.push(exec);
    }
    site.restart_all(async |_, moment| match moment {
        Moment::Stopping => all_go_on(&mut execs).await,
        Moment::Ended(old) => {
            let before = execs.len();
            let mut running = Vec::new();
            for mut exec in execs.drain(..) {
                match timeout(QUIET, exec.ended()).await {
                    Ok(ended) => ensure_reset(&ended)?,
                    Err(_elapsed) => running.push(exec),
                }
            }
            execs = running;
            // Execs through another server end, too, if this one had the session.
            let is_over = old.server.log().contains(DRAIN_IS_OVER);
            ensure!(is_over || execs.len() == before, "{}", old.server.log());
            all_go_on(&mut execs).await
        }
    })
    .await?;
    ensure!(execs.is_empty(), "{} execs on new servers", execs.len());
    site.wait_for_sessions(2 * agents() as u64).await;
    callers.end(100).await?.ensure_served()
}

/// Two of three servers have each agent. A killed server is started again at its addresses, with
/// its data directory, from which agents learn the restart at once, and without it.
#[tokio::test(flavor = "multi_thread")]
async fn killed_server_costs_callers_of_the_others_no_request_also_without_its_disk() -> Result<()>
{
    for has_disk in [true, false] {
        let plan = Plan {
            launch: Box::new(|cluster_env: &ClusterEnv, _: usize, name: &str| {
                let peers = Listener::Peers.on(next_loopback()).to_string();
                Ok(cluster_env.setup(name)?.args(&["--peer-listen", &peers]))
            }),
            ..on_loopback(3, 3).await?
        };
        let mut site = Installation::start(plan).await?;
        site.settle().await;
        let Replica { name, mut server } = site.replicas.pop_front().context("a server")?;
        site.publish_endpoints().await?;
        let callers = site.start_callers();
        let (setup, folder) = (server.setup_for_restart(), server.data_dir().to_owned());
        server.process().signal(Signal::Kill)?;
        server.process().end(FIRST).await?;
        if !has_disk {
            std::fs::remove_dir_all(folder)?;
        }
        let server = setup.start().await?;
        let started = Instant::now();
        site.replicas.push_back(Replica { name, server });
        site.wait_for_sessions(2 * site.nodes.len() as u64).await;
        let took = started.elapsed();
        ensure!(!has_disk || took <= scaled(BY_RESET), "{took:?}");
        callers.end(100).await?.ensure_served()?;
    }
    Ok(())
}

/// Each agent has one session, so most servers reach its node by forwarding.
#[tokio::test(flavor = "multi_thread")]
async fn f21_agents_that_reconnect_while_the_api_server_is_away_are_reached() -> Result<()> {
    let away = Duration::from_secs(Gear::current().pick(10, 600));
    let mut site = Installation::start(on_loopback(3, 0).await?).await?;
    let mut agents = Vec::new();
    for number in 1..=4 {
        let setup = site.agent_setup(&format!("worker-{number}")).await?;
        let setup = setup.args(&["--replicas", "1"]);
        let agent = setup.start()?;
        agents.push((setup, agent));
    }
    for node in &site.nodes {
        site.wait_until_served(node).await;
    }
    let fake_api = site.cluster_env.fake_api()?;
    fake_api.be(Presence::Refusing).await?;
    let back = Instant::now() + away;
    while Instant::now() < back {
        for (setup, agent) in &mut agents {
            agent.signal(Signal::Term)?;
            agent.end(FIRST).await?;
            *agent = setup.start()?;
        }
        for node in &site.nodes {
            site.wait_until_served(node).await;
        }
    }
    let forwarded = "tunnel_server_forwarded_streams_total{direction=\"out\",result=\"ok\"}";
    ensure!(site.sum_of(forwarded).await? > 0, "nothing was forwarded");
    fake_api.be(Presence::Here).await?;
    for node in &site.nodes {
        site.wait_until_served(node).await;
    }
    Ok(())
}

/// Returns a plan of servers on loopback addresses of their own in a cluster of their own.
async fn on_loopback(servers: usize, agents: usize) -> Result<Plan> {
    Ok(Plan {
        cluster_env: ClusterEnv::fake().await?,
        servers,
        agents,
        virtual_ports: None,
        launch: Box::new(|cluster_env: &ClusterEnv, _: usize, name: &str| {
            let setup = on_own_address(cluster_env, name)?;
            Ok(setup.args(&["--peer-listen", "127.0.0.1:0"]))
        }),
    })
}

/// Fails unless every exec echoes.
async fn all_go_on(execs: &mut [Exec]) -> Result<()> {
    for exec in execs {
        exec.goes_on()
            .await
            .context("an exec on a stopping server")?;
    }
    Ok(())
}

fn agents() -> usize {
    Gear::current().pick(2, 20)
}

const PORTS: VirtualPorts = VirtualPorts {
    http: 10255,
    agents: 31008,
};
/// Time until agents are back by stateless resets: at their next keep-alive, and a dial.
const BY_RESET: Duration = Duration::from_secs(8);
/// The log line of a server that resets streams at the end of its drain.
const DRAIN_IS_OVER: &str = "drain timeout is over";
/// Time in which the reset of a stream that has ended was received.
const QUIET: Duration = Duration::from_millis(200);
/// Time limit of a test in its namespace, with 3 drains of 35 s in the full gear.
const LIMIT: Duration = Duration::from_secs(1200);
