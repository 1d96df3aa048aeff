//! Rotations of the CA among three servers, one of which is silent, stopped, new or partitioned in
//! every stage, with agents that hold sessions with two of them, and the counts of agents over all
//! servers. Nobody uses `--force`, so no agent is cut off. The simulation of `ca/rotation` has many more orders of events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use futures_util::future::try_join_all;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;
use tokio::time::sleep;
use tunnel_store::data_dir::rfc3339;
use tunnel_tests::apiserver::{Fault as ApiFault, Status};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, ScratchDir, Server, Signal, next_loopback,
};

use super::revocations::Three;
use super::{ClusterEnv, FIRST};
use crate::credentials::ca_rotation::{STAGES, is_of, rotation_status};

/// What happens to a server in a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// The process stands still.
    Silent,
    /// It is stopped, and started again later.
    Stopped,
    /// It is killed, and another one with an empty data directory takes its place.
    New,
    /// It reaches neither the API server nor other servers.
    Partitioned,
}

const FAULTS: [Fault; 4] = [
    Fault::Silent,
    Fault::Stopped,
    Fault::New,
    Fault::Partitioned,
];

#[tokio::test(flavor = "multi_thread")]
async fn no_agent_is_cut_off_whatever_happens_to_a_server_in_each_stage() -> Result<()> {
    let seeds = 0..Gear::current().pick(1, 5);
    let rotations = seeds.map(async |seed| {
        let rotated = rotate(seed).await;
        rotated.with_context(|| format!("seed {seed}"))
    });
    try_join_all(rotations).await.map(drop)
}

/// A server that may not list the servers does not take their absence for none.
#[tokio::test(flavor = "multi_thread")]
async fn stage_is_refused_while_the_servers_cannot_be_listed() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let forbidden = Status::new(403, "Forbidden", "endpointslices is forbidden");
    let fault = ApiFault::answer(forbidden).of("endpointslices");
    cluster_env.fake_api()?.fault(fault);
    let peers = Listener::Peers.on(next_loopback()).to_string();
    let setup = cluster_env.setup("a")?.args(&["--peer-listen", &peers]);
    let server = setup.start().await?;
    cluster_env.wait_for_bundle().await;
    server.verb(&["ca", "rotate"])?.run().await?.ok()?;
    let [_, (next, stage), _] = STAGES;
    eventually("the reason", STAGE, async || {
        let refused = server.verb(next)?.run().await?;
        refused.ensure_failed(1, &["endpointslices is forbidden", "--force"])
    })
    .await;
    cluster_env.fake_api()?.clear_faults();
    eventually("the next stage", STAGE, async || {
        let entering = server.verb(next)?.run().await?;
        ensure!(entering.out.contains(stage), "{entering}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Each agent has one session, with the server that it prefers.
#[tokio::test(flavor = "multi_thread")]
async fn next_stage_counts_the_agents_of_all_servers_once_and_names_a_server_that_is_silent()
-> Result<()> {
    let mut three = Three::start_with(true, &[]).await?;
    three.introduce(|_| true).await?;
    let mut agents = Vec::new();
    for (node, server) in [("worker-1", 1), ("worker-2", 2)] {
        agents.push(agent_at(&three, node, server).await?);
    }
    let [(rotate, _), (next, stage), _] = STAGES;
    three.servers[0].verb(rotate)?.run().await?.ok()?;
    let counted = "0 renewed since then, 2 pending";
    wait_for_counts(
        &three,
        &["all are counted", counted, "pending: worker-1, worker-2"],
    )
    .await;
    let refused = three.servers[0].verb(next)?.run().await?;
    refused.ensure_failed(1, &["would be refused: 2;"])?;
    wait_until_begun(&three.servers[0]).await?;
    // Both come back by another server, with a certificate of the stage. Servers that they have left
    // remember the previous one.
    for agent in agents.drain(..) {
        agent.kill().await?;
    }
    for (node, server) in [("worker-1", 2), ("worker-2", 1)] {
        std::fs::remove_dir_all(three.cluster_env.scratch.path().join(node))?;
        agents.push(agent_at(&three, node, server).await?);
    }
    wait_for_counts(
        &three,
        &["all are counted", "2 renewed since then, 0 pending"],
    )
    .await;
    three.servers[1].process().signal(Signal::Stop)?;
    let refused = three.servers[0].verb(next)?.run().await?;
    refused.ensure_failed(1, &["server-1", "--force"])?;
    three.servers[1].process().signal(Signal::Cont)?;
    eventually("the next stage", STAGE, async || {
        let entering = three.servers[0].verb(next)?.run().await?;
        ensure!(entering.out.contains(stage), "{entering}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Starts an agent that enrolls at this server and has one session.
async fn agent_at(three: &Three, node: &str, server: usize) -> Result<Process> {
    let server = &three.servers[server];
    let files = three.cluster_env.scratch.path().join(node);
    let setup = server.agent_setup(node, &files).await?;
    let agent = setup.args(&["--replicas", "1"]).start()?;
    eventually("the session", STAGE, async || {
        let listed = server.nodes().await?;
        let mut of_node = listed.iter().filter(|listed| listed["node"] == *node);
        let is_connected = of_node.any(|listed| listed["connected"] == true);
        ensure!(is_connected, "{node}: {}", agent.log());
        anyhow::Ok(())
    })
    .await;
    Ok(agent)
}

/// Waits until every server shows the same counts.
async fn wait_for_counts(three: &Three, parts: &[&str]) {
    for server in &three.servers {
        eventually("the counts", STAGE, async || {
            ensure_contains(&rotation_status(server).await?, parts)
        })
        .await;
    }
}

/// Waits until certificates that are issued count as those of the stage.
async fn wait_until_begun(server: &Server) -> Result<()> {
    let status = ["ca", "rotate", "--status", "-o", "json"];
    let status = server.verb(&status)?.run().await?.ok()?;
    let status: Value = serde_json::from_str(&status)?;
    let since = status["inProgress"]["since"].as_str().context("since")?;
    eventually("the begin of the stage", STAGE, async || {
        let now = rfc3339(SystemTime::now());
        ensure!(*now > *since, "{now}, {since}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

async fn rotate(seed: u64) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let limits = ScratchDir::new()?;
    let config = limits.file("limits.yaml", "limits: { certificateLife: 12s }\n")?;
    let config = config.to_string_lossy();
    let mut three = Three::start_with(true, &["--config", &config]).await?;
    three.introduce(|_| true).await?;
    let agents = start_agents(&three).await?;
    let old = ca(&three).await?;
    for (command, stage) in STAGES {
        let (victim, fault) = (random.random_range(0..3), random.random_range(0..4));
        let fault = FAULTS[fault];
        let operator = (victim + random.random_range(1..3)) % 3;
        begin(&mut three, victim, fault).await?;
        // It may be refused, or succeed before anybody notices.
        let tried = three.servers[operator].verb(command)?;
        let is_entered = AtomicBool::new(tried.run().await?.out.contains(stage));
        sleep(Duration::from_millis(random.random_range(0..8_000))).await;
        end(&mut three, victim, fault).await?;
        let what = format!("{stage:?} after {victim} was {fault:?}");
        eventually(&what, STAGE, async || {
            if !is_entered.load(Ordering::Relaxed) {
                let entering = three.servers[operator].verb(command)?.run().await?;
                ensure!(entering.out.contains(stage), "{entering}");
                is_entered.store(true, Ordering::Relaxed);
            }
            anyhow::Ok(())
        })
        .await;
        eventually("all servers to follow", STAGE, async || {
            for server in &three.servers {
                let status = rotation_status(server).await?;
                ensure!(status.contains(stage), "{status}");
            }
            anyhow::Ok(())
        })
        .await;
        all_connected(&three, &agents).await;
    }
    let new = ca(&three).await?;
    ensure!(new != old, "the CA is not another one");
    eventually("certificates of the new CA", STAGE, async || {
        for (node, _agent) in &agents {
            let leaf = three
                .cluster_env
                .scratch
                .path()
                .join(node)
                .join("agent.crt");
            ensure!(is_of(&std::fs::read(leaf)?, &new)?, "{node}");
        }
        anyhow::Ok(())
    })
    .await;
    all_connected(&three, &agents).await;
    Ok(())
}

async fn start_agents(three: &Three) -> Result<Vec<(String, Process)>> {
    let mut agents = Vec::new();
    let addresses = three.servers.iter();
    let addresses: Vec<_> = addresses
        .map(|server| server.address(Listener::Agents))
        .collect();
    for number in 0..AGENTS {
        let node = format!("worker-{number}");
        let token = three.servers[0].token(&node, None).await?;
        let data = three.cluster_env.scratch.path().join(&node);
        let mut setup = AgentSetup::on_loopback(&node, addresses[0], &data);
        for address in &addresses[1..] {
            setup = setup.args(&["--server", &address.to_string()]);
        }
        agents.push((node, setup.args(&["--token", &token]).start()?));
    }
    all_connected(three, &agents).await;
    Ok(agents)
}

/// Waits until each agent is connected, as every server lists it.
async fn all_connected(three: &Three, agents: &[(String, Process)]) {
    for server in &three.servers {
        eventually("the agents' sessions", STAGE, async || {
            let listed = server.nodes().await?;
            for (node, agent) in agents {
                let mut of_node = listed.iter().filter(|listed| listed["node"] == **node);
                let is_connected = of_node.any(|listed| listed["connected"] == true);
                ensure!(is_connected, "{node}: {}", agent.log());
            }
            anyhow::Ok(())
        })
        .await;
    }
}

async fn begin(three: &mut Three, victim: usize, fault: Fault) -> Result<()> {
    let server = &mut three.servers[victim];
    match fault {
        Fault::Silent => server.process().signal(Signal::Stop),
        Fault::Stopped => {
            server.process().signal(Signal::Term)?;
            server.process().end(STOP).await.map(drop)
        }
        Fault::New => server.process().signal(Signal::Kill),
        Fault::Partitioned => {
            three.silence_api(victim);
            three.silence_links();
            Ok(())
        }
    }
}

async fn end(three: &mut Three, victim: usize, fault: Fault) -> Result<()> {
    match fault {
        Fault::Silent => three.servers[victim].process().signal(Signal::Cont),
        Fault::Stopped => restart(three, victim, false).await,
        Fault::New => restart(three, victim, true).await,
        Fault::Partitioned => {
            three.heal();
            Ok(())
        }
    }
}

async fn restart(three: &mut Three, victim: usize, is_new: bool) -> Result<()> {
    let setup = three.servers[victim].setup_for_restart();
    if is_new {
        let server = &mut three.servers[victim];
        server.process().end(FIRST).await?;
        std::fs::remove_dir_all(server.data_dir())?;
    }
    three.servers[victim] = setup.start().await?;
    Ok(())
}

async fn ca(three: &Three) -> Result<Vec<u8>> {
    let printed = three.servers[0].verb(&["ca"])?.run().await?.ok()?;
    Ok(printed.into_bytes())
}

const AGENTS: usize = 3;
/// Agents renew certificates of 12 s after about 6 s. A stage counts from 10 s after its begin, and
/// begins again while a server does not follow.
const STAGE: Duration = Duration::from_secs(90);
const STOP: Duration = Duration::from_secs(60);
