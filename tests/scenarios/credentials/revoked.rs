//! T03: the sessions of a revoked node end within 10 s, and the node cannot return.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, timeout};
use tunnel_agent::config::TokenSource;
use tunnel_ca::revocation::OrderAction::{self, Reissue, Revoke, Unrevoke};
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::wire::ALPN_SESSION_TCP;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};

use super::super::scripted::{Admission, ScriptedAgent, agent_key, dial};
use super::attacks::{connect, resuming};

const SECONDS_10: Duration = Duration::from_secs(10);

fn order(env: &TestEnv, action: OrderAction, node: &str) -> Result<()> {
    let revocations = env.revocations();
    let changed = revocations.order(action, &[node.parse()?], SystemTime::now());
    ensure!(changed.len() == 1, "nothing changed");
    Ok(revocations.flush()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn t03_revoked_node_is_out_within_10_s_and_after_a_restart() -> Result<()> {
    let mut env = TestEnv::start().await?;
    let (stolen, good) = (agent_key(&env, "worker-1")?, agent_key(&env, "worker-2")?);
    let answer = ScriptedAgent::handshake(&env, stolen.clone(), "worker-1", [1; 16]).await?;
    let Admission::Admitted(live) = answer else {
        anyhow::bail!("not admitted");
    };
    let other = ScriptedAgent::connect(&env, "worker-2").await?;
    let began = Instant::now();
    order(&env, Revoke, "worker-1")?;
    let reason = timeout(scaled(SECONDS_10), live.closed()).await?;
    ensure!(reason.code == CloseCode::CredentialRevoked, "{reason:?}");
    ensure!(
        began.elapsed() < scaled(SECONDS_10),
        "{:?}",
        began.elapsed()
    );
    for restarted in [false, true] {
        if restarted {
            env.restart_server().await?;
        }
        ensure!(refused(&env, stolen.clone()).await?, "let in again");
        dial(&env, good.clone()).await?.0.accept().await?;
    }
    drop(other);
    Ok(())
}

/// Returns whether the server refuses the handshake as revoked, on both transports.
async fn refused(env: &TestEnv, key: Arc<rustls::sign::CertifiedKey>) -> Result<bool> {
    let over_quic = match dial(env, key.clone()).await {
        Ok((session, _dialer)) => match session.accept().await {
            Ok(_) => return Ok(false),
            Err(_) => session.closed().await.code,
        },
        Err(error) => anyhow::bail!("{error:#}"),
    };
    let config = tls::session_client(key, Trust::Roots(env.roots()?), ALPN_SESSION_TCP)?;
    let error = connect(env, config).await.err();
    let words = error.context("let in over TCP")?.to_string();
    Ok(over_quic == CloseCode::CredentialRevoked && words.contains("Revoked"))
}

#[tokio::test(flavor = "multi_thread")]
async fn t03_old_session_cache_of_a_revoked_client_is_of_no_use() -> Result<()> {
    let env = TestEnv::start().await?;
    let key = agent_key(&env, "worker-1")?;
    let config = resuming(&env, key)?;
    for _ in 0..3 {
        // The server resumes no session, although the client could.
        let stream = connect(&env, config.clone()).await?;
        let kind = stream.get_ref().1.handshake_kind();
        ensure!(kind == Some(rustls::HandshakeKind::Full), "{kind:?}");
    }
    order(&env, Revoke, "worker-1")?;
    for _ in 0..3 {
        let error = connect(&env, config.clone()).await.err();
        let error = error.context("let in")?;
        ensure!(error.to_string().contains("Revoked"), "{error:#}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t03_reissued_agent_cannot_enroll_again_but_its_operator_can() -> Result<()> {
    let env = TestEnv::start().await?;
    let token = env.token("worker-1", &[])?;
    let mut config = env.agent_config("worker-1")?;
    config.token = Some(TokenSource::Inline(token.clone()));
    let agent = Agent::start(config).await?;
    env.connected("worker-1").await;
    order(&env, Reissue, "worker-1")?;
    let gone = async || {
        let sessions = env.registry().of_node(&"worker-1".parse().ok()?);
        sessions.is_empty().then_some(())
    };
    eventually("the session ends", SECONDS_10, gone).await;
    // The agent tries again with the key and the token that is bound to it.
    std::fs::remove_file(env.path().join("agent-worker-1").join("agent.crt"))?;
    agent.stop().await?;
    let mut config = env.agent_config("worker-1")?;
    config.token = Some(TokenSource::Inline(token));
    let ended = async { Agent::start(config).await?.ended().await };
    let ended = timeout(scaled(WAIT_TIMEOUT), ended).await?;
    let error = format!("{:#}", ended.err().context("enrolled")?);
    ensure!(error.contains("revoked"), "{error}");
    // A new token of the operator works at once, until the node is revoked.
    let unused = env.token("worker-1", &[])?;
    let back = env.agent("worker-1").await?;
    back.stop().await?;
    let agent = async |token: &JoinToken| {
        let directory = env.path().join("agent-worker-1");
        for file in ["agent.crt", "agent.key"] {
            let _absent = std::fs::remove_file(directory.join(file));
        }
        let mut config = env.agent_config("worker-1")?;
        config.token = Some(TokenSource::Inline(token.clone()));
        Agent::start(config).await?.ended().await
    };
    let token = env.token("worker-1", &[])?;
    order(&env, Revoke, "worker-1")?;
    let refused = async |token: &JoinToken| {
        let ended = timeout(scaled(WAIT_TIMEOUT), agent(token)).await?;
        let error = format!("{:#}", ended.err().context("enrolled")?);
        ensure!(error.contains("revoked"), "{error}");
        Ok(())
    };
    refused(&token).await?;
    order(&env, Unrevoke, "worker-1")?;
    // Tokens of before the revocation stay void.
    for token in [token, unused] {
        refused(&token).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_token_misuse_are_distinct() -> Result<()> {
    let env = TestEnv::start().await?;
    let node = "worker-1".parse()?;
    let now = SystemTime::now();
    let key = |byte| [byte; 32];
    let redeem = |token: &JoinToken, name: &str, byte, at| {
        let name = name.parse().unwrap();
        let answer = env
            .tokens()
            .redeem(&token.reveal(), &name, key(byte), &|_| Some(false), at);
        answer.map(drop).unwrap_err()
    };
    let [used, other, ended, revoked] = [(); 4].map(|()| env.token("worker-1", &[]).unwrap());
    let redeemed = env
        .tokens()
        .redeem(&used.reveal(), &node, key(1), &|_| Some(false), now);
    redeemed.unwrap();
    env.tokens().revoke(revoked.id())?;
    let answers = [
        redeem(&used, "worker-1", 2, now),
        redeem(&other, "worker-2", 1, now),
        redeem(&ended, "worker-1", 1, now + Duration::from_secs(7200)),
        redeem(&revoked, "worker-1", 1, now),
    ];
    let labels: Vec<_> = answers.iter().map(|(code, _)| code.label()).collect();
    ensure!(
        labels == ["token_used", "wrong_node", "token_expired", "revoked"],
        "{labels:?}"
    );
    for (_, detail) in &answers {
        ensure!(answers.iter().filter(|(_, other)| other == detail).count() == 1);
    }
    Ok(())
}
