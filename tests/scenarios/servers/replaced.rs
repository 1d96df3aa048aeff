//! Servers behind one address that are all replaced.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::eventually::eventually;
use tunnel_tests::link::Link;
use tunnel_tests::metrics::metric;
use tunnel_tests::process::{AgentSetup, Listener, Peering, ScratchDir, Server, next_loopback};

use super::wait_for;

/// The address leads to one of the new servers while the rollout ends, so that the agent's dials for a
/// second session become rare. Another new server is reached soon after it is known.
#[tokio::test(flavor = "multi_thread")]
async fn agent_behind_one_address_has_two_sessions_soon_after_all_servers_were_replaced()
-> Result<()> {
    let scratch = ScratchDir::new()?;
    let peering = Peering::new(5, scratch.path());
    let agents = |number| peering.address(number, Listener::Agents);
    let link = Link::start(agents(0), 1)?;
    let address = link.addr().to_string();
    let start = async |number: usize| -> Result<Server> {
        let setup = peering.setup(number)?.args(&["--advertise", &address]);
        setup.start().await
    };
    let mut servers = vec![start(0).await?, start(1).await?];
    Peering::wait_until_connected(&servers).await;
    let meta = next_loopback();
    let folder = scratch.path().join("agent");
    let token = servers[0].token("worker-1", None).await?;
    let setup = AgentSetup::on_address("worker-1", link.addr(), &folder, meta);
    let _agent = setup.args(&["--token", &token]).start()?;
    let sessions = "tunnel_server_agents{transport=\"quic\"}";
    wait_for(&servers[0], sessions, 1).await;
    link.lead_to(Some(agents(1)));
    wait_for(&servers[1], sessions, 1).await;

    servers.extend([start(2).await?, start(3).await?]);
    Peering::wait_until_connected(&servers).await;
    link.lead_to(Some(agents(2)));
    let mut new = servers.split_off(2);
    for server in servers {
        server.into_process().stop(STOP).await?;
    }
    let meta = Listener::Meta.on(meta);
    eventually("rare dials for a second session", RARE, async || {
        let duplicates =
            "tunnel_agent_connect_attempts_total{transport=\"quic\",result=\"duplicate\"}";
        let duplicates = metric(meta, duplicates).await?;
        ensure!(duplicates >= 5, "{duplicates}");
        anyhow::Ok(())
    })
    .await;
    link.lead_to(Some(agents(3)));
    new.push(start(4).await?);
    eventually("two sessions", SOON, async || {
        ensure!(new[0].metric(sessions).await? == 1);
        ensure!(new[1].metric(sessions).await? == 1);
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// Longer than the drain of a server.
const STOP: Duration = Duration::from_secs(45);
/// Longer than 1 + 2 + 4 + 8 s, the waits between five dials.
const RARE: Duration = Duration::from_secs(40);
/// Longer than the wait for a dial after a change of the servers. The wait that it ends is 16 s.
const SOON: Duration = Duration::from_secs(8);
