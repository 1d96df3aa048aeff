//! R01, R09, R14, S12, S25, T01, T16, T17, T20: peers that the server refuses, over each transport.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rustls::client::Resumption;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::Dialer as _;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Hello;
use tunnel_proto::wire::{ALPN_SESSION, ALPN_SESSION_TCP};
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::FakeKubelet;

use super::super::scripted::{Admission, ScriptedAgent, agent_key, dial, hello, remote, settings};
use super::credential_files::Files;
use super::{metric, metric_reaches};

/// Returns certificates that every listener must refuse, each with the reason.
fn intruders(files: &Files) -> Result<Vec<(&'static str, Arc<CertifiedKey>)>> {
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let other = TestCa::new("ours")?;
    let agent = || Leaf::agent("worker-1");
    let expired = Leaf {
        from: now - 2 * hour,
        until: now - hour,
        ..agent()
    };
    let future = Leaf {
        from: now + hour,
        until: now + 2 * hour,
        ..agent()
    };
    // The CA and the URI are right, but the extended key usage is for servers.
    let usage = Leaf {
        server: true,
        ..agent()
    };
    // The extended key usage is for clients, but the role is the server's, missing or invalid.
    let role = |uri: Option<&str>| Leaf {
        uri: uri.map(str::to_owned),
        ..agent()
    };
    let ours = |leaf: &Leaf| files.ca.issue(leaf).map(|issued| issued.own);
    Ok(vec![
        ("another CA of the same name", other.issue(&agent())?.own),
        ("expired", ours(&expired)?),
        ("not yet valid", ours(&future)?),
        ("extended key usage of a server", ours(&usage)?),
        ("a server's own certificate", ours(&Leaf::server())?),
        ("role of a server", ours(&role(Some("culvert://server")))?),
        ("no role", ours(&role(None))?),
        ("role of nobody", ours(&role(Some("culvert://agent/")))?),
        ("capitals", ours(&role(Some("culvert://agent/Worker-1")))?),
        ("another server", ours(&role(Some("culvert://peer/a")))?),
        ("an unknown role", ours(&role(Some("culvert://replica/a")))?),
    ])
}

/// R14, S12, T20: connects to the agents' port with each wrong certificate, over TCP and QUIC. Each
/// handshake fails, and none reaches a handler.
#[tokio::test(flavor = "multi_thread")]
async fn r14_s12_t20_wrong_certificates_fail_in_the_handshake() -> Result<()> {
    let files = Files::new()?;
    let env = files.env().await?;
    let trust = || Ok::<_, anyhow::Error>(Trust::Roots(tls::roots([files.ca.root().clone()])?));
    let good = files.ca.issue(&Leaf::agent("worker-1"))?.own;
    let admitted = over_tcp(&env, Some(good), trust()?).await;
    admitted.context("the good one over TCP")?;
    let mut count = 0.0;
    for (what, key) in intruders(&files)? {
        let error = over_tcp(&env, Some(key.clone()), trust()?).await;
        ensure!(error.is_err(), "{what} was let in over TCP");
        let error = over_quic(&env, key, trust()?).await;
        ensure!(error.is_err(), "{what} was let in over QUIC");
        count += 2.0;
    }
    let anonymous = over_tcp(&env, None, trust()?).await;
    ensure!(anonymous.is_err(), "let in without a certificate");
    count += 1.0;
    let failed = "tunnel_server_handshakes_total{result=\"handshake_failed\"}";
    metric_reaches(&env, failed, count, WAIT_TIMEOUT).await;
    // No connection with a wrong certificate reached the Hello.
    let shown = request(env.meta(), &RawRequest::get("meta", "/metrics")).await?;
    let shown = shown.text();
    let handshakes = "tunnel_server_handshakes_total";
    for line in shown.lines().filter(|line| line.starts_with(handshakes)) {
        // The connection with the valid certificate ended without a Hello.
        let good = "tunnel_server_handshakes_total{result=\"protocol\"} 1";
        let is_expected = line.contains("handshake_failed") || line == good || line.ends_with(" 0");
        ensure!(is_expected, "{line}");
    }
    ensure!(env.registry().all().is_empty());
    Ok(())
}

/// R14: sends requests to an HTTPS listener that requires certificates of a CA. Callers without
/// such a certificate fail in the handshake, and the kubelet receives no request.
#[tokio::test(flavor = "multi_thread")]
async fn r14_listener_that_requires_certificates_lets_no_other_request_through() -> Result<()> {
    let files = Files::new()?;
    let callers = TestCa::new("callers")?;
    let ca_file = files.path("callers.pem");
    std::fs::write(&ca_file, callers.pem())?;
    let env = TestEnv::start_with(|settings| {
        settings.client_ca = Some(ca_file.to_string_lossy().into_owned());
        settings.https_client_auth = Some("require".into());
    })
    .await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let address = env.bound().https.unwrap();
    let ask = async |key: Option<Arc<CertifiedKey>>| -> Result<u16> {
        let roots = rustls::RootCertStore::clone(&*env.roots()?);
        #[expect(clippy::disallowed_methods, reason = "a caller of the listener")]
        let config = rustls::ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let config = match key {
            Some(key) => config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(key))),
            None => config.with_no_client_auth(),
        };
        let tls = ClientTls::from_config("worker-1", Arc::new(config))?;
        let get = RawRequest::get(&host, "/metrics");
        Ok(request(Endpoint::tls(address, tls), &get).await?.status)
    };
    let streams = "tunnel_server_streams_total{result=\"ok\"}";
    let before = metric(&env, streams).await?;
    ensure!(ask(None).await.is_err(), "let in without a certificate");
    for (what, key) in intruders(&files)? {
        ensure!(ask(Some(key)).await.is_err(), "{what} was let in");
    }
    ensure!(metric(&env, streams).await? == before);
    let caller = callers.issue(&Leaf {
        uri: None,
        ..Leaf::agent("caller")
    })?;
    ensure!(ask(Some(caller.own)).await? == 200);
    Ok(())
}

/// Opens a session's TLS connection over TCP and waits for the server's first byte. The server
/// sends that byte after it has verified the certificate.
pub(crate) async fn over_tcp(
    env: &TestEnv,
    key: Option<Arc<CertifiedKey>>,
    trust: Trust,
) -> Result<()> {
    let config = match key {
        Some(key) => tls::session_client(key, trust, ALPN_SESSION_TCP)?,
        None => {
            let mut config = rustls::ClientConfig::clone(&*tls::enroll_client(trust)?);
            config.alpn_protocols = vec![ALPN_SESSION_TCP.to_vec()];
            Arc::new(config)
        }
    };
    connect(env, config).await.map(drop)
}

/// Returns the connection after its first byte from the server.
pub(super) async fn connect(
    env: &TestEnv,
    config: Arc<rustls::ClientConfig>,
) -> Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(env.bound().agents).await?;
    let name = "tunnel-server.culvert".try_into()?;
    let mut stream = TlsConnector::from(config).connect(name, tcp).await?;
    timeout(scaled(WAIT_TIMEOUT), stream.read_u8()).await??;
    Ok(stream)
}

/// Returns the configuration of a client that resumes sessions and sends early data if it can.
pub(super) fn resuming(env: &TestEnv, key: Arc<CertifiedKey>) -> Result<Arc<rustls::ClientConfig>> {
    let config = tls::session_client(key, Trust::Roots(env.roots()?), ALPN_SESSION_TCP)?;
    let mut config = rustls::ClientConfig::clone(&config);
    config.resumption = Resumption::in_memory_sessions(64);
    config.enable_early_data = true;
    Ok(Arc::new(config))
}

/// Opens a session over QUIC and accepts its first stream.
pub(crate) async fn over_quic(env: &TestEnv, key: Arc<CertifiedKey>, trust: Trust) -> Result<()> {
    let tls = tls::session_client(key, trust, ALPN_SESSION)?;
    let dialer = QuicDialer::new(tls, settings())?;
    let session = dialer.dial(&remote(env.bound().agents)).await?;
    session.accept().await?;
    Ok(())
}

/// R01: an agent sends a Hello with the name of another node than its certificate's. The server
/// refuses it, and the named node keeps its traffic.
#[tokio::test(flavor = "multi_thread")]
async fn r01_certificate_of_one_node_serves_no_other() -> Result<()> {
    let site = NodeEnv::start().await?;
    let env = &site.env;
    let impostor = agent_key(env, "worker-2")?;
    for _ in 0..20 {
        let answer = ScriptedAgent::handshake(env, impostor.clone(), "worker-1", [9; 16]).await?;
        let Admission::Refused(code, detail) = answer else {
            anyhow::bail!("admitted under another's name");
        };
        ensure!(code == CloseCode::NameNotInCredential);
        ensure_contains(&detail, &["worker-1", "worker-2"])?;
        let reply = site.get("/metrics").await?;
        ensure!(reply.status == 200 && reply.text().contains("worker-1"));
    }
    let refused = "tunnel_server_handshakes_total{result=\"name_not_in_credential\"}";
    metric_reaches(env, refused, 20.0, WAIT_TIMEOUT).await;
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
    let answer = ScriptedAgent::handshake_with(&env, key, hello).await?;
    let Admission::Refused(CloseCode::Version, detail) = answer else {
        anyhow::bail!("{answer:?}");
    };
    ensure_contains(&detail, &["7 to 9", "upgrade"])
}

/// R09: opens sessions of one node one after another, and ends each old one after the next is
/// admitted. The end of an old session removes only that session.
#[tokio::test(flavor = "multi_thread")]
async fn r09_late_end_of_an_old_session_never_takes_the_new_one_away() -> Result<()> {
    let env = TestEnv::start_with(many_admissions).await?;
    let key = agent_key(&env, "worker-1")?;
    let node = "worker-1".parse()?;
    let mut old: Option<ScriptedAgent> = None;
    for _ in 0..200 {
        let answer = ScriptedAgent::handshake(&env, key.clone(), "worker-1", [1; 16]).await?;
        let Admission::Admitted(new) = answer else {
            anyhow::bail!("not admitted");
        };
        if let Some(old) = old.replace(new) {
            old.close().await;
        }
        let sessions = env.registry().of_node(&node);
        ensure!(sessions.iter().any(|session| session.is_routable()));
    }
    eventually("only the last is left", WAIT_TIMEOUT, async || {
        (env.registry().of_node(&node).len() == 1).then_some(())
    })
    .await;
    Ok(())
}

fn many_admissions(settings: &mut tunnel_server::config::RawConfig) {
    settings.limits = TestEnv::limits("admissionsPerNode: 1000");
}

/// T01: three processes compete for one node name in each of 100 rounds. At no moment are sessions
/// of two of them routable.
#[tokio::test(flavor = "multi_thread")]
async fn t01_takeover_race_never_has_two_owners() -> Result<()> {
    let env = Arc::new(TestEnv::start_with(many_admissions).await?);
    let key = agent_key(&env, "worker-1")?;
    let node: tunnel_proto::wire::name::NodeName = "worker-1".parse()?;
    let rounds = Arc::new(AtomicUsize::new(0));
    let watched = {
        let (env, node) = (env.clone(), node.clone());
        async move {
            loop {
                let sessions = env.registry().of_node(&node);
                let mut owners: Vec<_> = sessions
                    .iter()
                    .filter(|session| !session.is_withdrawn())
                    .map(|session| session.instance)
                    .collect();
                owners.dedup();
                if owners.len() > 1 {
                    return format!("{owners:?}");
                }
                tokio::task::yield_now().await;
            }
        }
    };
    let race = async {
        for seed in 0..100u8 {
            let mut contenders = JoinSet::new();
            for which in 0..3u8 {
                let (env, key) = (env.clone(), key.clone());
                contenders.spawn(async move {
                    // Admitted contenders leave soon, so sessions end during the admission of the
                    // others.
                    let instance = [seed.wrapping_mul(3).wrapping_add(which); 16];
                    let answer = ScriptedAgent::handshake(&env, key, "worker-1", instance).await?;
                    if let Admission::Admitted(agent) = answer {
                        if (seed + which) % 2 == 0 {
                            tokio::time::sleep(Duration::from_millis(u64::from(seed) / 8)).await;
                        }
                        agent.leave().await;
                        return anyhow::Ok(1);
                    }
                    Ok(0)
                });
            }
            let mut admitted = 0;
            while let Some(contender) = contenders.join_next().await {
                admitted += contender?.unwrap_or(0);
            }
            ensure!(admitted > 0, "seed {seed}: no contender was admitted");
            rounds.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    };
    tokio::select! {
        two = watched => anyhow::bail!("two owners in round {}: {two}", rounds.load(Ordering::Relaxed)),
        raced = race => raced?,
    }
    ensure!(rounds.load(Ordering::Relaxed) == 100);
    Ok(())
}

/// S25, T16: the server issues no session tickets, so clients cannot send early data. A captured
/// session that is sent again opens nothing.
#[tokio::test(flavor = "multi_thread")]
async fn s25_t16_replayed_flight_opens_nothing_a_thousand_times() -> Result<()> {
    let env = TestEnv::start().await?;
    let key = agent_key(&env, "worker-1")?;
    // Over TCP the client enables early data. Without a ticket the client cannot send any.
    let config = resuming(&env, key.clone())?;
    for _ in 0..3 {
        let stream = connect(&env, config.clone()).await?;
        ensure!(!stream.get_ref().1.is_early_data_accepted());
    }
    // A relay records all datagrams that the client of a session sends. The test sends them again.
    let tap = UdpSocket::bind("127.0.0.1:0").await?;
    let server = env.bound().agents;
    let tapped = tap.local_addr()?;
    let upstream = UdpSocket::bind("127.0.0.1:0").await?;
    upstream.connect(server).await?;
    let mut flight: Vec<Vec<u8>> = Vec::new();
    let talk = async {
        let tls = tls::session_client(key.clone(), Trust::Roots(env.roots()?), ALPN_SESSION)?;
        let dialer = QuicDialer::new(tls, settings())?;
        let session = dialer.dial(&remote(tapped)).await?;
        session.accept().await?;
        session.close(CloseCode::Normal, "done").await;
        dialer.wait_idle().await;
        anyhow::Ok(())
    };
    let relay = async {
        let (mut up, mut down) = ([0; 2048], [0; 2048]);
        let mut client = None;
        loop {
            tokio::select! {
                got = tap.recv_from(&mut up) => {
                    let (count, from) = got?;
                    client = Some(from);
                    flight.push(up[..count].to_vec());
                    upstream.send(&up[..count]).await?;
                }
                got = upstream.recv(&mut down) => {
                    if let Some(client) = client {
                        tap.send_to(&down[..got?], client).await?;
                    }
                }
            }
        }
        #[expect(unreachable_code, reason = "declares the error type")]
        anyhow::Ok(())
    };
    tokio::select! {
        talked = talk => talked?,
        relayed = relay => relayed?,
    }
    ensure!(flight.len() > 3, "{} datagrams", flight.len());
    let admitted = "tunnel_server_handshakes_total{result=\"ok\"}";
    let before = metric(&env, admitted).await?;
    for _ in 0..1000 {
        for datagram in &flight {
            upstream.send(datagram).await?;
        }
        tokio::task::yield_now().await;
    }
    // Meanwhile a valid agent connects. The replayed datagrams open no session.
    let _agent = ScriptedAgent::connect(&env, "worker-2").await?;
    ensure!(metric(&env, admitted).await? == before + 1.0);
    ensure!(env.registry().of_node(&"worker-1".parse()?).is_empty());
    Ok(())
}

/// T17: a connection with an older TLS version, with another protocol, or through an attacker in
/// the middle fails.
#[tokio::test(flavor = "multi_thread")]
async fn t17_downgrade_and_wrong_protocol_get_no_connection() -> Result<()> {
    let env = TestEnv::start().await?;
    let key = agent_key(&env, "worker-1")?;
    let trust = || Ok::<_, anyhow::Error>(Trust::Roots(env.roots()?));
    let good = tls::session_client(key.clone(), trust()?, ALPN_SESSION_TCP)?;
    connect(&env, good.clone()).await?;
    for protocols in [
        &[&b"http/1.1"[..]][..],
        &[ALPN_SESSION],
        &[],
        &[tunnel_proto::wire::ALPN_ENROLL, ALPN_SESSION_TCP],
    ] {
        let mut config = rustls::ClientConfig::clone(&good);
        config.alpn_protocols = protocols.iter().map(|id| id.to_vec()).collect();
        let connected = connect(&env, Arc::new(config)).await;
        ensure!(connected.is_err(), "{protocols:?}");
    }
    // TLS 1.2 only.
    #[expect(clippy::disallowed_methods, reason = "an older client")]
    let mut older = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS12])?
        .with_root_certificates(rustls::RootCertStore::clone(&*env.roots()?))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(key.clone())));
    older.alpn_protocols = vec![ALPN_SESSION_TCP.to_vec()];
    ensure!(connect(&env, Arc::new(older)).await.is_err(), "TLS 1.2");
    // The attacker in the middle has another CA of the same name.
    let middle = TestEnv::start().await?;
    if let Ok((session, _dialer)) = dial(&middle, key).await {
        let accepted = session.accept().await;
        ensure!(accepted.is_err(), "the other server took the certificate");
    }
    ensure!(middle.registry().all().is_empty());
    let fooled = tls::session_client(agent_key(&env, "worker-3")?, trust()?, ALPN_SESSION_TCP)?;
    let connected = connect(&middle, fooled).await;
    ensure!(connected.is_err(), "the agent took another CA");
    Ok(())
}
