//! Admission of agents, and the names that they get.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use tunnel_agent::config::TokenSource;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Hello;
use tunnel_proto::wire::name::InstanceId;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT, server_address};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::Exporter;

use super::scripted::{Admission, ScriptedAgent, agent_key, dial};

#[tokio::test(flavor = "multi_thread")]
async fn claim_of_another_nodes_name_is_refused_and_its_traffic_goes_on() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let impostor = agent_key(&env, "worker-2")?;
    match ScriptedAgent::handshake(&env, impostor, "worker-1", [9; 16]).await? {
        Admission::Refused(code, detail) => {
            assert_eq!(code, CloseCode::NameNotInCredential);
            assert!(
                detail.contains("worker-1") && detail.contains("worker-2"),
                "{detail}"
            );
        }
        Admission::Admitted(_) => panic!("admitted under another's name"),
    }
    let host = format!("worker-1:{}", exporter.addr().port());
    assert_eq!(
        request(env.http(), &RawRequest::get(&host, "/metrics"))
            .await?
            .status,
        200
    );
    let counted = "tunnel_server_handshakes_total{result=\"name_not_in_credential\"} 1";
    eventually("the refusal is counted", WAIT_TIMEOUT, async || {
        let metrics = request(env.bound().meta, &RawRequest::get("meta", "/metrics")).await?;
        anyhow::ensure!(metrics.text().contains(counted), "{}", metrics.text());
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
    let Admission::Admitted(first) =
        ScriptedAgent::handshake(&env, key.clone(), "worker-1", [1; 16]).await?
    else {
        panic!("first not admitted");
    };
    match ScriptedAgent::handshake(&env, key.clone(), "worker-1", [2; 16]).await? {
        Admission::Refused(code, _) => assert_eq!(code, CloseCode::NameInUse),
        Admission::Admitted(_) => panic!("a clone was admitted next to the live agent"),
    }
    // One process may open a second session, for make before break.
    assert!(matches!(
        ScriptedAgent::handshake(&env, key.clone(), "worker-1", [1; 16]).await?,
        Admission::Admitted(_)
    ));
    first.close().await;
    let next =
        async || match ScriptedAgent::handshake(&env, key.clone(), "worker-1", [3; 16]).await? {
            Admission::Admitted(_) => anyhow::Ok(()),
            Admission::Refused(code, _) => anyhow::bail!("{code}"),
        };
    eventually(
        "another instance gets in after the first has gone",
        WAIT_TIMEOUT,
        next,
    )
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn incompatible_version_is_refused_with_a_readable_line() -> Result<()> {
    let env = TestEnv::start().await?;
    let hello = Hello {
        versions: (7, 9),
        capabilities: vec![],
        node_name: "worker-1".parse()?,
        instance: InstanceId::new([1; 16]),
        software: "from-the-future".into(),
        node_ip: String::new(),
    };
    match ScriptedAgent::handshake_with(&env, agent_key(&env, "worker-1")?, hello).await? {
        Admission::Refused(code, detail) => {
            assert_eq!(code, CloseCode::Version);
            assert!(
                detail.contains("7 to 9") && detail.contains("upgrade"),
                "{detail}"
            );
        }
        Admission::Admitted(_) => panic!("admitted"),
    }
    Ok(())
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
    let (mut from_agent, _) = tokio::time::timeout(Duration::from_secs(30), tap.accept()).await??;
    let mut to_imposter = tokio::net::TcpStream::connect(imposter.bound().agents).await?;
    let (mut agent_reads, mut agent_writes) = from_agent.split();
    let (mut server_reads, mut server_writes) = to_imposter.split();
    let mut received = Vec::new();
    let tapped = async {
        let mut chunk = [0; 4096];
        loop {
            let count = agent_reads.read(&mut chunk).await.unwrap_or(0);
            if count == 0 {
                break;
            }
            received.extend_from_slice(&chunk[..count]);
            tokio::io::AsyncWriteExt::write_all(&mut server_writes, &chunk[..count]).await?;
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
    let given_up = "tunnel_server_enrollments_total{result=\"handshake_failed\"} 1";
    eventually(
        "the imposter has counted the connection",
        WAIT_TIMEOUT,
        async || {
            let metrics = request(imposter.bound().meta, &RawRequest::get("meta", "/metrics"))
                .await?
                .text();
            let counts: Vec<_> = metrics
                .lines()
                .filter(|line| line.starts_with("tunnel_server_enrollments_total"))
                .collect();
            anyhow::ensure!(counts == [given_up], "{counts:?}");
            anyhow::Ok(())
        },
    )
    .await;
    assert!(
        !received.is_empty(),
        "the agent never spoke to the imposter"
    );
    assert!(imposter.nodes().snapshot().is_empty());
    drop(agent);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn token_is_for_one_node_and_one_key() -> Result<()> {
    let env = TestEnv::start().await?;
    let token = env.token("worker-1", &[])?;
    // Another node uses the token.
    let mut config = env.agent_config("worker-2")?;
    config.token = Some(TokenSource::Inline(token.clone()));
    let error = format!("{:#}", end_of(config).await);
    assert!(
        error.contains("worker-1") || error.contains("another node"),
        "{error}"
    );
    // The node uses the token, and then a second host does.
    let mut config = env.agent_config("worker-1")?;
    config.token = Some(TokenSource::Inline(token.clone()));
    let first = Agent::start(config).await?;
    env.connected("worker-1").await;
    first.stop().await?;
    let mut config = env.agent_config("worker-1")?;
    config.token = Some(TokenSource::Inline(token));
    config.data_dir = env.path().join("stolen");
    let error = format!("{:#}", end_of(config).await);
    assert!(error.contains("used"), "{error}");
    Ok(())
}

/// Returns the error that ends an agent that cannot enroll.
async fn end_of(config: tunnel_agent::config::Config) -> anyhow::Error {
    let ended = async { Agent::start(config).await?.ended().await };
    match tokio::time::timeout(Duration::from_secs(60), ended).await {
        Ok(Err(error)) => error,
        Ok(Ok(())) => anyhow::anyhow!("the agent ended well"),
        Err(_elapsed) => anyhow::anyhow!("the agent does not give up"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_certificate_is_used_again_and_the_token_ignored() -> Result<()> {
    let env = TestEnv::start().await?;
    env.agent("worker-1").await?.stop().await?;
    let gone = async || env.registry().all().is_empty().then_some(());
    eventually("the agent has left", WAIT_TIMEOUT, gone).await;
    let _again = env
        .agent_with("worker-1", |config| config.token = None)
        .await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn listeners_certificate_is_not_resumed() -> Result<()> {
    use rustls::client::Resumption;
    let env = TestEnv::start().await?;
    let exporter = tunnel_tests::targets::FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    #[expect(clippy::disallowed_methods, reason = "a caller that would resume")]
    let mut config = rustls::ClientConfig::builder_with_provider(tunnel_proto::tls::provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(rustls::RootCertStore::clone(&*env.roots()?))
        .with_no_client_auth();
    config.resumption = Resumption::in_memory_sessions(8);
    let config = Arc::new(config);
    for _ in 0..2 {
        let connector = tokio_rustls::TlsConnector::from(config.clone());
        let tcp = tokio::net::TcpStream::connect(env.bound().https.unwrap()).await?;
        let mut stream = connector.connect("worker-1".try_into()?, tcp).await?;
        let head = format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        assert!(answer.starts_with(b"HTTP/1.1 200"));
        assert_eq!(
            stream.get_ref().1.handshake_kind(),
            Some(rustls::HandshakeKind::Full)
        );
    }
    Ok(())
}
