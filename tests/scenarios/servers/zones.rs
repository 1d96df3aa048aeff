//! Servers in several zones, of which one is lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_agent::assignment::wanted_replicas;
use tunnel_agent::distance::ZoneDistances;
use tunnel_proto::wire::control::Member;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Peering, Process, Signal};

use super::{AGENTS, CONNECT, Servers, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn loss_of_a_zone_fails_no_call_to_nodes_with_a_session_in_another_one() -> Result<()> {
    let mut servers =
        Servers::start_each(&["a", "a", "b"].map(|zone| vec!["--zone", zone])).await?;
    let nodes = nodes_of_the_first_two_servers(3)?;
    let mut agents = Vec::new();
    for node in &nodes {
        agents.push(agent(&servers, node).await?);
    }
    // Each agent has a session in the zone of the third server, and one in that of the others.
    wait_for(&servers.servers[2], AGENTS, 3).await;
    eventually("sessions in the other zone", CONNECT, async || {
        let [first, second] = [
            servers.servers[0].metric(AGENTS).await?,
            servers.servers[1].metric(AGENTS).await?,
        ];
        ensure!(first + second == 3, "{first} and {second}");
        Ok(())
    })
    .await;
    for server in &mut servers.servers[..2] {
        server.process().signal(Signal::Kill)?;
    }
    let until = Instant::now() + Duration::from_secs(3);
    let (mut requests, port) = (0, servers.kubelet.addr().port());
    while Instant::now() < until || requests <= 10 {
        for node in &nodes {
            let host = format!("{node}:{port}");
            servers.servers[2].get_ok(&host, "/metrics").await?;
            requests += 1;
        }
    }
    Ok(())
}

/// Starts an agent, which dials the first server.
async fn agent(servers: &Servers, node: &str) -> Result<Process> {
    let folder = servers.scratch.path().join(node);
    servers.servers[0].agent_setup(node, &folder).await?.start()
}

/// Returns nodes whose agents would hold sessions with the first two of three servers if those were
/// not in one zone.
fn nodes_of_the_first_two_servers(count: usize) -> Result<Vec<String>> {
    let mut members = Vec::new();
    for number in 0..3 {
        members.push(Member {
            id: Peering::name(number).parse()?,
            addresses: Vec::new(),
            is_leaving: false,
            zone: None,
        });
    }
    let third = members[2].id.clone();
    let mut nodes = Vec::new();
    for number in 0.. {
        let node = format!("zoned-{number}");
        if !wanted_replicas(&node.parse()?, &members, &ZoneDistances::default(), 2).contains(&third)
        {
            nodes.push(node);
        }
        if nodes.len() == count {
            break;
        }
    }
    Ok(nodes)
}
