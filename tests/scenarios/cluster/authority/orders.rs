//! Orders about nodes without the API server: in force at once, and written as soon as it answers.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_server::config::ObjectNames;
use tunnel_tests::apiserver::Presence;
use tunnel_tests::cluster::Objects;
use tunnel_tests::eventually::eventually;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, Server};

use super::super::{ClusterEnv, FIRST};
use super::restart::kill;

/// Returns the entry of a node in the Secret.
async fn stored(cluster_env: &ClusterEnv, node: &str) -> Result<Value> {
    let secret = ObjectNames::default().revocations_secret;
    let secret = cluster_env.objects().secret(&secret).await?;
    let text = secret.get("revoked.json").context("no orders")?;
    let orders: Value = serde_json::from_str(text)?;
    Ok(orders["nodes"][node].clone())
}

async fn is_refused(server: &Server, node: &str) -> Result<bool> {
    let listed = server.verb(&["nodes", "revocations"])?.run().await?.ok()?;
    Ok(listed.contains(node))
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_that_the_api_server_does_not_answer_is_in_force_and_written_when_it_does()
-> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let server = cluster_env.server("a").await?;
    let revoke = server.verb(&["nodes", "revoke", "worker-1"])?.run().await?;
    ensure!(!revoke.err.contains("pending"), "{revoke}");
    ensure!(stored(&cluster_env, "worker-1").await?["revoked"] == true);
    let api = cluster_env.fake_api()?;
    api.be(Presence::Silent).await?;
    let unrevoke = server.verb(&["nodes", "unrevoke", "worker-1"])?;
    let revoke = server.verb(&["nodes", "revoke", "worker-2", "worker-3"])?;
    for (verb, words) in [
        (unrevoke, "no longer revoked"),
        (revoke, "worker-3 revoked"),
    ] {
        let said = verb.run().await?;
        ensure!(
            said.out.contains(words) && said.out.contains("in force at"),
            "{said}"
        );
        ensure!(
            said.err.contains("pending") && said.err.contains("Secret"),
            "{said}"
        );
        said.ok()?;
    }
    eventually("the condition", FIRST * 2, async || {
        let page = meta_page(server.address(Listener::Meta), "/readyz?verbose").await?;
        ensure!(page.contains("unsaved orders"), "{page}");
        Ok(())
    })
    .await;
    // Killed and started again, the server has its orders, and they are pending still.
    let server = kill(server).await?.start().await?;
    ensure!(is_refused(&server, "worker-2").await? && !is_refused(&server, "worker-1").await?);
    api.be(Presence::Here).await?;
    eventually("the orders in the Secret", FIRST * 2, async || {
        let lifted = stored(&cluster_env, "worker-1").await?;
        ensure!(
            lifted["counter"].as_u64() > Some(1) && lifted["revoked"].is_null(),
            "{lifted}"
        );
        for node in ["worker-2", "worker-3"] {
            ensure!(
                stored(&cluster_env, node).await?["revoked"] == true,
                "{node}"
            );
        }
        Ok(())
    })
    .await;
    // A server with an empty disk refuses them, too.
    let other = cluster_env.server("b").await?;
    ensure!(is_refused(&other, "worker-3").await? && !is_refused(&other, "worker-1").await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_return_to_an_emptied_secret_and_survive_a_damaged_one() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    let server = cluster_env.server("a").await?;
    server
        .verb(&["nodes", "revoke", "worker-1"])?
        .run()
        .await?
        .ok()?;
    let path = Objects::path("secrets", &ObjectNames::default().revocations_secret);
    let admin = cluster_env.admin();
    let returned = async || {
        eventually("the orders in the Secret", FIRST * 2, async || {
            let entry = stored(&cluster_env, "worker-1").await?;
            ensure!(entry["revoked"] == true, "{entry}");
            Ok(())
        })
        .await;
    };
    let emptied = json!({ "data": { "revoked.json": null } });
    admin.merge(&path, &emptied).await?;
    returned().await;
    let damaged = json!({ "data": { "revoked.json": "W10=" } });
    admin.merge(&path, &damaged).await?;
    let reported = async |server: &Server| {
        eventually("the condition", FIRST * 2, async || {
            let page = meta_page(server.address(Listener::Meta), "/readyz?verbose").await?;
            ensure!(
                page.contains("patch secret tunnel-server-revocations"),
                "{page}"
            );
            Ok(())
        })
        .await;
    };
    reported(&server).await;
    let server = kill(server).await?.start().await?;
    reported(&server).await;
    ensure!(is_refused(&server, "worker-1").await?);
    admin.merge(&path, &emptied).await?;
    returned().await;
    Ok(())
}
