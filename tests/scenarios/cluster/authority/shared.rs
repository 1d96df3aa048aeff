//! Tokens and revocations of one server apply at all other servers, and none is lost when several
//! servers write.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Result, ensure};
use tunnel_ca::revocation::OrderAction;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_tests::apiserver::Fault;
use tunnel_tests::cluster::Cluster;
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};

use super::{cluster, server};

/// Starts an agent of `node` that connects to `server`, with a token that `token_of` created.
pub(super) async fn agent(node: &str, server: &TestEnv, token_of: &TestEnv) -> Result<Agent> {
    let token = token_of.token(node, &[])?;
    let made = Instant::now();
    let agent = server
        .agent_with(node, |config| {
            config.token = Some(tunnel_agent::config::TokenSource::Inline(token));
        })
        .await?;
    // The first attempt may come before the token arrives. The agent's next attempt does not.
    ensure!(
        made.elapsed() <= scaled(Duration::from_secs(5)),
        "{:?}",
        made.elapsed()
    );
    Ok(agent)
}

/// Waits until a server knows a token.
async fn wait_for_token(server: &TestEnv, id: &str) {
    eventually("the token at the other", WAIT_TIMEOUT, async || {
        let listed = server.tokens().list(SystemTime::now())?;
        let mut ids = listed.iter().map(|known| &known.id);
        ensure!(ids.any(|known| known == id), "{listed:?}");
        Ok(())
    })
    .await;
}

/// Starts two servers of one cluster.
pub(super) async fn pair(cluster: &Cluster) -> Result<(TestEnv, TestEnv)> {
    Ok((
        server(cluster, |_| {}).await?,
        server(cluster, |_| {}).await?,
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_one_server_is_good_at_another_within_a_second() -> Result<()> {
    let cluster = cluster().await?;
    let (one, other) = pair(&cluster).await?;
    let token = one.token("worker-1", &[])?;
    let made = Instant::now();
    wait_for_token(&other, token.id()).await;
    ensure!(
        made.elapsed() <= scaled(Duration::from_secs(1)),
        "{:?}",
        made.elapsed()
    );
    let _agent = agent("worker-2", &other, &one).await?;
    // A token that is revoked at the other server is of no use at the first.
    ensure!(other.tokens().revoke(token.id())?);
    let node = "worker-1".parse()?;
    eventually("the first to refuse it", WAIT_TIMEOUT, async || {
        let refused = one.tokens().redeem(
            &token.reveal(),
            &node,
            [1; 32],
            &|_| Some(false),
            SystemTime::now(),
        );
        ensure!(refused.is_err_and(|(code, _)| code == EnrollCode::Revoked));
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn r09_of_two_keys_that_use_a_token_at_two_servers_at_once_one_is_refused() -> Result<()> {
    let cluster = cluster().await?;
    let (one, other) = pair(&cluster).await?;
    let node = "worker-1".parse()?;
    for _ in 0..20 {
        let token = one.token("worker-1", &[])?;
        wait_for_token(&other, token.id()).await;
        let text = token.reveal();
        let redeem = |env: &TestEnv, key: u8| {
            env.tokens()
                .redeem(&text, &node, [key; 32], &|_| Some(false), SystemTime::now())
        };
        let results = std::thread::scope(|threads| {
            let first = threads.spawn(|| redeem(&one, 1));
            let second = threads.spawn(|| redeem(&other, 2));
            [first.join(), second.join()]
        });
        let mut granted = 0;
        for result in results {
            match result.map_err(|_again| anyhow::anyhow!("a panic"))? {
                Ok(_) => granted += 1,
                Err((code, detail)) => ensure!(code == EnrollCode::TokenUsed, "{detail}"),
            }
        }
        ensure!(granted == 1, "{granted} keys got the token");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t03_a_revocation_at_one_server_ends_the_session_at_another_within_10_s() -> Result<()> {
    let cluster = cluster().await?;
    let (one, other) = pair(&cluster).await?;
    let _agent = agent("worker-1", &other, &one).await?;
    let node = "worker-1".parse()?;
    let nodes = std::slice::from_ref(&node);
    one.revocations()
        .order(OrderAction::Revoke, nodes, SystemTime::now());
    let revoked = Instant::now();
    eventually("the session to end", Duration::from_secs(15), async || {
        let live = other.registry().of_node(&node);
        ensure!(
            live.iter().all(|session| session.is_closing()),
            "{} live",
            live.len()
        );
        Ok(())
    })
    .await;
    ensure!(
        revoked.elapsed() <= scaled(Duration::from_secs(10)),
        "{:?}",
        revoked.elapsed()
    );
    eventually("the revocation in the cluster", WAIT_TIMEOUT, async || {
        let unwritten = one.revocations().unwritten();
        ensure!(unwritten.is_empty(), "{unwritten:?}");
        Ok(())
    })
    .await;
    // A server that starts later knows the revocation before it serves any agent.
    let late = server(&cluster, |_| {}).await?;
    ensure!(late.revocations().of_node(&node).is_revoked);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_several_servers_make_under_conflicts_are_all_persisted() -> Result<()> {
    let cluster = cluster().await?;
    let servers = [
        server(&cluster, |_| {}).await?,
        server(&cluster, |_| {}).await?,
        server(&cluster, |_| {}).await?,
    ];
    let conflicts = Fault::conflict().of("secrets").times(5);
    cluster.fake_api()?.fault(conflicts);
    let made: Vec<String> = std::thread::scope(|threads| {
        let makers: Vec<_> = servers
            .iter()
            .map(|server| {
                threads.spawn(move || {
                    let tokens = (0..10).map(|count| server.token(&format!("worker-{count}"), &[]));
                    let ids = tokens.map(|token| Ok(token?.id().to_owned()));
                    ids.collect::<Result<Vec<_>>>()
                })
            })
            .collect();
        let ids = makers
            .into_iter()
            .map(|maker| maker.join().map_err(|_again| anyhow::anyhow!("a panic"))?);
        ids.collect::<Result<Vec<_>>>()
    })?
    .concat();
    ensure!(made.len() == 30);
    let persisted = servers[0].tokens().list(SystemTime::now())?;
    let is_persisted = |id: &String| persisted.iter().any(|token| token.id == *id);
    ensure!(made.iter().all(is_persisted), "{} of 30", persisted.len());
    Ok(())
}
