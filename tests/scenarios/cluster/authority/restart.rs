//! A server that loses its disk with its container restarts with its identity: agents need no new
//! token, and notice the restart of a single server at once.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::apiserver::Presence;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Server, ServerSetup, Signal, stored_text,
};
use tunnel_tests::tools::or_skip;

use super::super::{ClusterEnv, FIRST};
use crate::credentials::disk::SmallDisk;

/// Keep-alive interval of the agent. The agent notices a restart within 1.2 times this interval,
/// plus a margin.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// Starts an agent on its own disk and waits until it has enrolled.
async fn enrolled(cluster_env: &ClusterEnv, server: &Server) -> Result<Process> {
    let token = server.token("worker-1", None).await?;
    let setup = agent(cluster_env, server)?;
    let agent = setup.args(&["--token", &token]).start()?;
    server.wait_until_connected(&["worker-1"]).await;
    Ok(agent)
}

/// Returns the setup of the same agent without a token, for use when it has a certificate.
fn agent(cluster_env: &ClusterEnv, server: &Server) -> Result<AgentSetup> {
    let file = "limits:\n  keepAlive: 1s\n";
    let file = cluster_env.scratch.file("agent.yaml", file)?;
    let folder = cluster_env.scratch.path().join("agent");
    let setup = AgentSetup::on_loopback("worker-1", server.address(Listener::Agents), &folder);
    Ok(setup.args(&["--config", &file.to_string_lossy()]))
}

/// Ends a server at once and returns the setup for its restart.
pub(in super::super) async fn kill(mut server: Server) -> Result<ServerSetup> {
    let setup = server.setup_for_restart();
    server.process().signal(Signal::Kill)?;
    server.process().end(FIRST).await?;
    Ok(setup)
}

#[tokio::test(flavor = "multi_thread")]
async fn s03_killed_server_without_its_disk_is_the_same_and_agents_notice_by_a_stateless_reset()
-> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let mut server = setup.start().await?;
    let _agent = enrolled(&cluster_env, &server).await?;
    let ca = server.verb(&["ca"])?.run().await?.ok()?;
    for _ in 0..2 {
        let setup = kill(server).await?;
        std::fs::remove_dir_all(cluster_env.scratch.path().join("a"))?;
        server = setup.start().await?;
        let started = std::time::Instant::now();
        // Without the stateless reset, an idle agent would suspect its session only after 15 s.
        server.wait_until_connected(&["worker-1"]).await;
        let bound = KEEP_ALIVE.mul_f64(1.2) + Duration::from_secs(2);
        ensure!(
            started.elapsed() <= scaled(bound),
            "only after {:?}",
            started.elapsed()
        );
        ensure!(server.verb(&["ca"])?.run().await?.ok()? == ca, "another CA");
    }
    Ok(())
}

/// Tests that nothing has to happen for a snapshot to catch up after a full disk: a server that is
/// killed then refuses who was revoked while it was full.
#[tokio::test(flavor = "multi_thread")]
async fn f24_revocation_on_a_full_disk_is_saved_by_itself_when_the_disk_has_room() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let data_dir = cluster_env.scratch.path().join("a");
    let Some(disk) = or_skip(SmallDisk::new(&data_dir, 512)) else {
        return Ok(());
    };
    let server = cluster_env.server("a").await?;
    let _enrolled = enrolled(&cluster_env, &server).await?;
    let meta = server.address(Listener::Meta);
    let has_condition = async || -> Result<bool> {
        let page = meta_page(meta, "/readyz?verbose").await?;
        Ok(page.contains("[!] saved state: ") && page.contains("No space left"))
    };
    let filler = disk.fill();
    // The store has some room of its own, which these do not fit into.
    let others: Vec<_> = (0..900).map(|number| format!("stolen-{number}")).collect();
    let names = others.iter().map(String::as_str).chain(["worker-1"]);
    let revoke: Vec<_> = ["nodes", "revoke"].into_iter().chain(names).collect();
    server.verb(&revoke)?.run().await?.ok()?;
    server.wait_until_connected(&[]).await;
    eventually("the condition", FIRST, async || {
        ensure!(has_condition().await?);
        anyhow::Ok(())
    })
    .await;
    std::fs::remove_file(filler)?;
    eventually("the end of the condition", FIRST, async || {
        ensure!(!has_condition().await?);
        anyhow::Ok(())
    })
    .await;
    cluster_env.fake_api()?.be(Presence::Refusing).await?;
    let server = kill(server).await?.start().await?;
    let mut again = agent(&cluster_env, &server)?.start()?;
    let refusal = again.wait_for_line("the refusal", FIRST, |line| {
        line.contains("revoked").then_some(())
    });
    refusal.await
}

/// Tests a start with the disk but without the Secrets and the API server. The server has the same
/// identity, and refuses the revoked agent.
#[tokio::test(flavor = "multi_thread")]
async fn p06_a_server_with_its_disk_starts_without_the_api_server_and_refuses_who_was_revoked()
-> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let server = cluster_env.server("a").await?;
    let enrolled = enrolled(&cluster_env, &server).await?;
    let revoke = server.verb(&["nodes", "revoke", "worker-1"])?;
    revoke.run().await?.ok()?;
    server.wait_until_connected(&[]).await;
    let data_dir = cluster_env.scratch.path().join("a");
    eventually("the revocation on disk", FIRST, async || {
        let text = stored_text(&data_dir)?;
        ensure!(text.contains("\"revoked\":true") && text.contains("\"isWhole\":true"));
        Ok(())
    })
    .await;
    cluster_env.fake_api()?.be(Presence::Refusing).await?;
    let setup = kill(server).await?;
    drop(enrolled);
    let server = setup.start().await?;
    let mut agent = agent(&cluster_env, &server)?.start()?;
    let refusal = agent.wait_for_line("the refusal", FIRST, |line| {
        line.contains("revoked").then_some(())
    });
    refusal.await?;
    let nodes = server.nodes().await?;
    ensure!(
        nodes.iter().all(|node| node["connected"] == false),
        "{nodes:?}"
    );
    Ok(())
}
