//! A server that loses its disk with its container restarts with its identity: agents need no new
//! token, and notice the restart at once.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::apiserver::Presence;
use tunnel_tests::client::{Exchange, RawRequest};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{AgentSetup, Listener, Process, Server, ServerSetup, Signal};

use super::super::{ClusterEnv, FIRST, Site};
use super::state_secret;

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

/// Returns the file with the QUIC keys of the server `name`.
fn replica(cluster_env: &ClusterEnv, name: &str) -> Result<Value> {
    let file = cluster_env.scratch.path().join(name).join("replica.json");
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

/// Ends a server at once and returns the setup for its restart.
pub(super) async fn kill(mut server: Server) -> Result<ServerSetup> {
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

#[tokio::test(flavor = "multi_thread")]
async fn s03_two_servers_never_have_the_same_quic_keys_and_a_stopped_one_leaves_its_own()
-> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let (mut one, other) = (
        cluster_env.server("a").await?,
        cluster_env.server("b").await?,
    );
    let entry = |name: &str| -> Result<(u64, String)> {
        let persisted = replica(&cluster_env, name)?;
        let entry = persisted["claim"]["entry"].as_u64().context("no entry")?;
        let keys = persisted["keys"].as_str().context("no keys")?;
        Ok((entry, keys.to_owned()))
    };
    let (first, second) = (entry("a")?, entry("b")?);
    ensure!(first.0 != second.0 && first.1 != second.1);
    let third = cluster_env.server("c").await?;
    ensure!(![first.0, second.0].contains(&entry("c")?.0));

    one.process().signal(Signal::Term)?;
    one.process().end(FIRST).await?;
    // Another Pod with an empty disk replaces the server. The keys are free, and no server creates
    // further ones.
    let replacement = cluster_env.server("d").await?;
    ensure!(entry("d")? == first, "not the entry that was given back");
    let state = cluster_env.objects().secret(&state_secret()).await?;
    let replicas: Value = serde_json::from_str(&state["replicas.json"])?;
    let all = replicas["replicas"].as_object();
    ensure!(all.is_some_and(|all| all.len() == 3), "{replicas}");
    drop((other, third, replacement));
    Ok(())
}

/// Tests a rollout: the next server starts while the previous one still serves its last streams.
#[tokio::test(flavor = "multi_thread")]
async fn s03_a_draining_server_leaves_its_quic_keys_to_the_next_one_at_once() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let mut one = cluster_env.server("a").await?;
    let site = Site::serving(&cluster_env, &one).await?;
    let follow = RawRequest::get(&site.host(), "/follow?interval_ms=50");
    let mut following = Exchange::start(one.address(Listener::Http), &follow).await?;
    one.process().signal(Signal::Term)?;
    let lease =
        "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/tunnel-server-replica-0";
    eventually("the Lease of the keys to be free", FIRST, async || {
        let lease = cluster_env.admin().get(lease).await?;
        let lease = lease.context("no Lease")?;
        let holder = &lease["spec"]["holderIdentity"];
        ensure!(holder.as_str().unwrap_or_default().is_empty(), "{holder}");
        anyhow::Ok(())
    })
    .await;
    let _next = cluster_env.server("b").await?;
    let (old, new) = (replica(&cluster_env, "a")?, replica(&cluster_env, "b")?);
    ensure!(old["keys"] == new["keys"], "other keys");
    ensure!(following.line().await.is_some(), "the stream was cut");
    Ok(())
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
    let persisted = cluster_env.scratch.path().join("a").join("authority.json");
    eventually("the revocation on disk", FIRST, async || {
        let text = std::fs::read_to_string(&persisted)?;
        ensure!(text.contains("worker-1") && text.contains("revoked"));
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
