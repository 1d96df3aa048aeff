//! Admission of agents, and the names that they get.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustls::client::Resumption;
use rustls::{ClientConfig, HandshakeKind, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_agent::config::{Config, TokenSource};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Hello;
use tunnel_tests::checks::{ensure_contains, ensure_status};
use tunnel_tests::client::RawRequest;
use tunnel_tests::env::{Agent, NodeEnv, TestEnv, WAIT_TIMEOUT, server_address};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::FakeKubelet;

use super::scripted::{Admission, ScriptedAgent, agent_key, dial, hello};

#[tokio::test(flavor = "multi_thread")]
async fn claim_of_another_nodes_name_is_refused_and_its_traffic_goes_on() -> Result<()> {
    let site = NodeEnv::start().await?;
    let env = &site.env;
    let impostor = agent_key(env, "worker-2")?;
    let answer = ScriptedAgent::handshake(env, impostor, "worker-1", [9; 16]).await?;
    let (code, detail) = refusal(answer)?;
    assert_eq!(code, CloseCode::NameNotInCredential);
    ensure_contains(&detail, &["worker-1", "worker-2"])?;
    ensure_status(&site.get("/metrics").await?, 200)?;
    let series = "tunnel_server_handshakes_total{result=\"name_not_in_credential\"}";
    eventually("the refusal is counted", WAIT_TIMEOUT, async || {
        let counted = env.metric(series).await?;
        ensure!(counted == 1, "{counted}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_another_ca_get_no_session() -> Result<()> {
    let (env, other) = (TestEnv::start().await?, TestEnv::start().await?);
    let foreign = agent_key(&other, "worker-1")?;
    // In TLS 1.3 the client's handshake can finish before the server verifies the certificate. The
    // session then gets no stream.
    match dial(&env, foreign).await {
        Ok((session, _dialer)) => assert!(session.accept().await.is_err()),
        Err(error) => assert!(error.to_string().contains("handshake"), "{error:#}"),
    }
    assert!(env.registry().all().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn second_instance_waits_while_the_first_is_live() -> Result<()> {
    let env = TestEnv::start().await?;
    let key = agent_key(&env, "worker-1")?;
    let connect = async |instance: u8| {
        ScriptedAgent::handshake(&env, key.clone(), "worker-1", [instance; 16]).await
    };
    let first = admitted(connect(1).await?)?;
    let (code, _) = refusal(connect(2).await?).context("next to the live agent")?;
    assert_eq!(code, CloseCode::NameInUse);
    // One process may open a second session, for make before break.
    admitted(connect(1).await?)?;
    first.close().await;
    let what = "another instance gets in after the first has gone";
    eventually(what, WAIT_TIMEOUT, async || admitted(connect(3).await?)).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn incompatible_version_is_refused_with_a_readable_line() -> Result<()> {
    let env = TestEnv::start().await?;
    let hello = Hello {
        versions: (7, 9),
        ..hello("worker-1", [1; 16])?
    };
    let key = agent_key(&env, "worker-1")?;
    let (code, detail) = refusal(ScriptedAgent::handshake_with(&env, key, hello).await?)?;
    assert_eq!(code, CloseCode::Version);
    ensure_contains(&detail, &["7 to 9", "upgrade"])
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_another_ca_never_sees_the_token() -> Result<()> {
    let (env, imposter) = (TestEnv::start().await?, TestEnv::start().await?);
    let token = env.token("worker-1", &[])?;
    // The tap relays all bytes from the agent to the imposter's enrollment port.
    let tap = TcpListener::bind("127.0.0.1:0").await?;
    let mut config = env.agent_config("worker-1")?;
    config.token = Some(TokenSource::Inline(token.clone()));
    config.servers = vec![server_address(tap.local_addr()?)];
    let agent = Agent::start(config).await;
    let (mut from_agent, _) = timeout(scaled(Duration::from_secs(30)), tap.accept()).await??;
    let mut to_imposter = TcpStream::connect(imposter.bound().agents).await?;
    let (mut agent_reads, mut agent_writes) = from_agent.split();
    let (mut server_reads, mut server_writes) = to_imposter.split();
    let mut received = 0;
    let tapped = async {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = agent_reads.read(&mut chunk).await {
            received += count;
            server_writes.write_all(&chunk[..count]).await?;
        }
        anyhow::Ok(())
    };
    let back = async {
        let _until_the_agent_hangs_up = tokio::io::copy(&mut server_reads, &mut agent_writes).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = tapped => done?,
        () = back => {}
    }
    // The imposter counts the results of its enrollment connections. A request with any token would
    // count as refused, and not as a handshake that the agent gave up.
    let all = "tunnel_server_enrollments_total";
    let failed = "tunnel_server_enrollments_total{result=\"handshake_failed\"}";
    eventually("the imposter's count", WAIT_TIMEOUT, async || {
        let counts = (imposter.metric(all).await?, imposter.metric(failed).await?);
        ensure!(counts == (1, 1), "{counts:?}");
        anyhow::Ok(())
    })
    .await;
    assert!(received > 0, "the agent never spoke to the imposter");
    assert!(imposter.nodes().snapshot().is_empty());
    drop(agent);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_for_one_node_and_one_key() -> Result<()> {
    let env = TestEnv::start().await?;
    let token = env.token("worker-1", &[])?;
    let config = |node: &str| -> Result<Config> {
        let mut config = env.agent_config(node)?;
        config.token = Some(TokenSource::Inline(token.clone()));
        Ok(config)
    };
    // Another node uses the token.
    let error = end_of(config("worker-2")?).await?;
    let is_named = error.contains("worker-1") || error.contains("another node");
    assert!(is_named, "{error}");
    // The node uses the token, and then a second host does.
    let first = Agent::start(config("worker-1")?).await?;
    env.connected("worker-1").await;
    first.stop().await?;
    let mut second = config("worker-1")?;
    second.data_dir = env.path().join("stolen");
    ensure_contains(&end_of(second).await?, &["used"])
}

/// Returns the error that ends an agent that cannot enroll.
async fn end_of(config: Config) -> Result<String> {
    let ended = async { Agent::start(config).await?.ended().await };
    let ended = timeout(scaled(Duration::from_secs(60)), ended).await;
    let ended = ended.context("the agent does not give up")?;
    Ok(format!(
        "{:#}",
        ended.err().context("the agent ended well")?
    ))
}

fn admitted(answer: Admission) -> Result<ScriptedAgent> {
    match answer {
        Admission::Admitted(agent) => Ok(agent),
        Admission::Refused(code, detail) => bail!("refused: {code} {detail}"),
    }
}

fn refusal(answer: Admission) -> Result<(CloseCode, String)> {
    match answer {
        Admission::Refused(code, detail) => Ok((code, detail)),
        Admission::Admitted(_) => bail!("admitted"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_certificate_is_used_again_and_the_token_ignored() -> Result<()> {
    let env = TestEnv::start().await?;
    env.agent("worker-1").await?.stop().await?;
    let gone = async || env.registry().all().is_empty().then_some(());
    eventually("the agent has left", WAIT_TIMEOUT, gone).await;
    let again = env.agent_with("worker-1", |config| config.token = None);
    again.await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn listeners_certificate_is_not_resumed() -> Result<()> {
    let env = TestEnv::start().await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let get = RawRequest::get(&host, "/metrics").bytes();
    #[expect(clippy::disallowed_methods, reason = "a caller that would resume")]
    let mut config = ClientConfig::builder_with_provider(tunnel_proto::tls::provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(RootCertStore::clone(&*env.roots()?))
        .with_no_client_auth();
    config.resumption = Resumption::in_memory_sessions(8);
    let config = Arc::new(config);
    for _ in 0..2 {
        let connector = TlsConnector::from(config.clone());
        let tcp = TcpStream::connect(env.bound().https.unwrap()).await?;
        let mut stream = connector.connect("worker-1".try_into()?, tcp).await?;
        stream.write_all(&get).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        assert!(answer.starts_with(b"HTTP/1.1 200"));
        let kind = stream.get_ref().1.handshake_kind();
        assert_eq!(kind, Some(HandshakeKind::Full));
    }
    Ok(())
}
