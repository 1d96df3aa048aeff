//! Answers to callers: status, code and text of each row of the answers table.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tunnel_tests::client::{HttpReply, RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{EchoTarget, Exporter, FakeKubelet, SilentTarget};

/// Checks the status, the code, and that the text is one line that contains each of `names`.
#[track_caller]
fn check(reply: &HttpReply, status: u16, code: &str, names: &[&str]) {
    let text = reply.text();
    assert_eq!(
        (reply.status, reply.header("x-tunnel-error")),
        (status, Some(code)),
        "{text}"
    );
    assert_eq!(text.trim_end().lines().count(), 1, "{text:?}");
    for name in names {
        assert!(text.contains(name), "{name} is missing in {text:?}");
    }
    assert!(reply.ended.is_clean());
}

async fn get(env: &TestEnv, host: &str, path: &str) -> Result<HttpReply> {
    request(env.http(), &RawRequest::get(host, path)).await
}

/// Returns a port that was bound once and is free again, so that nothing listens on it.
async fn closed_port() -> Result<u16> {
    let target = EchoTarget::start().await?;
    let port = target.addr().port();
    target.stop().await;
    Ok(port)
}

#[tokio::test(flavor = "multi_thread")]
async fn addressing_answers() -> Result<()> {
    let env = TestEnv::start().await?;
    let shared = "192.168.33.221".parse()?;
    env.token("worker-1", &[shared])?;
    env.token("worker-2", &[shared])?;
    check(
        &get(&env, "nobody:9100", "/").await?,
        400,
        "unknown_node",
        &["nobody"],
    );
    check(
        &get(&env, "10.1.2.3:9100", "/").await?,
        400,
        "unknown_node",
        &["10.1.2.3"],
    );
    let ambiguous = get(&env, "192.168.33.221:9100", "/").await?;
    check(
        &ambiguous,
        400,
        "ambiguous_address",
        &["192.168.33.221", "worker-1", "worker-2"],
    );
    check(
        &get(&env, "worker-1:9100", "/").await?,
        503,
        "no_agent",
        &["worker-1", "9100"],
    );
    check(
        &get(&env, "worker-1:22", "/").await?,
        403,
        "refused_by_policy",
        &["worker-1", "22", "--http-proxy-ports"],
    );
    check(&get(&env, "a b", "/").await?, 400, "bad_request", &["Host"]);
    let twice = RawRequest::get("worker-1:9100", "/").header("Host", "worker-2:9100");
    check(
        &request(env.http(), &twice).await?,
        400,
        "bad_request",
        &["host"],
    );
    let absolute = RawRequest::new("GET", "http://worker-1:9100/", "worker-1:9100")
        .header("Connection", "close");
    check(
        &request(env.http(), &absolute).await?,
        400,
        "bad_request",
        &["absolute-form"],
    );
    let connect =
        RawRequest::new("CONNECT", "worker-1:9100", "worker-1:9100").header("Connection", "close");
    check(
        &request(env.http(), &connect).await?,
        400,
        "bad_request",
        &["CONNECT"],
    );
    let long = format!("/{}", "x".repeat(8192));
    check(
        &get(&env, "worker-1:9100", &long).await?,
        414,
        "uri_too_long",
        &["8192"],
    );
    // hyper rejects an oversized or malformed head itself and answers with a bare status.
    let big = RawRequest::get("worker-1:9100", "/").header("X-Big", &"x".repeat(70 << 10));
    assert_eq!(request(env.http(), &big).await?.status, 431);
    let fits = RawRequest::get("nobody:9100", "/").header("X-Big", &"x".repeat(60 << 10));
    assert_eq!(request(env.http(), &fits).await?.status, 400);
    let garbage = RawRequest::raw("GARBAGE\r\n\r\n");
    assert_eq!(request(env.http(), &garbage).await?.status, 400);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn own_port_is_explained_unless_a_list_has_it() -> Result<()> {
    let env = TestEnv::start_with(|settings| settings.http_proxy_ports = None).await?;
    env.token("worker-1", &[])?;
    for address in [
        env.bound().agents,
        env.bound().http.unwrap(),
        env.bound().https.unwrap(),
        env.bound().meta,
    ] {
        let reply = get(&env, &format!("worker-1:{}", address.port()), "/").await?;
        let hint = format!("{} is the tunnel's own port", address.port());
        check(
            &reply,
            403,
            "refused_by_policy",
            &[&hint, "put the target's port in Host"],
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn target_answers() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let at = |addr: SocketAddr| format!("worker-1:{}", addr.port());

    let closed = closed_port().await?;
    let refused = get(&env, &format!("worker-1:{closed}"), "/").await?;
    check(
        &refused,
        502,
        "target_refused",
        &["worker-1", &closed.to_string(), "refused"],
    );

    let exporter = Exporter::start("worker-1").await?;
    check(
        &get(&env, &at(exporter.addr()), "/garbage").await?,
        502,
        "target_bad_response",
        &["worker-1"],
    );

    let no_tls = EchoTarget::start().await?;
    let https = request(
        env.https("worker-1")?,
        &RawRequest::get(&at(no_tls.addr()), "/"),
    )
    .await?;
    check(&https, 502, "target_tls", &["worker-1", "TLS"]);

    let kubelet = FakeKubelet::plain("worker-1").await?;
    let upgrade = |path: &str| {
        RawRequest::new("POST", path, &at(kubelet.addr()))
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1")
    };
    for path in [
        "/exec/a/b/c?refuse=200",
        "/exec/a/b/c?refuse=302",
        "/exec/a/b/c?mismatch=true",
    ] {
        let reply = request(env.http(), &upgrade(path)).await?;
        check(&reply, 502, "target_bad_response", &["worker-1"]);
        let closed = async || (kubelet.traffic().open() == 0).then_some(());
        eventually("the target's connection is closed", WAIT_TIMEOUT, closed).await;
    }
    let refused = request(env.http(), &upgrade("/exec/a/b/c?refuse=403")).await?;
    assert_eq!(
        (refused.status, refused.header("x-tunnel-error")),
        (403, None),
        "the target's own refusal is passed"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_dial_policy_answers_with_its_flag() -> Result<()> {
    let env = TestEnv::start_with(|settings| settings.localhost_proxy_ports = Some("9999".into()))
        .await?;
    let _agent = env.agent("worker-1").await?;
    check(
        &get(&env, "worker-1:9999", "/").await?,
        403,
        "refused_by_policy",
        &["worker-1", "--localhost-ports"],
    );
    check(
        &get(&env, "worker-1:2379", "/").await?,
        403,
        "refused_by_policy",
        &["worker-1", "--deny-ports"],
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn address_that_an_agent_claims_never_counts() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    check(
        &get(&env, "127.0.0.1:9100", "/").await?,
        400,
        "unknown_node",
        &["127.0.0.1"],
    );
    let status = tunnel_server::admin::status::list(env.nodes(), &[], env.registry());
    assert_eq!(status[0].claimed_address.as_deref(), Some("127.0.0.1"));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn full_agent_answers_503_and_recovers() -> Result<()> {
    let env =
        TestEnv::start_with(|settings| settings.limits = TestEnv::limits("streamsPerAgent: 6"))
            .await?;
    let _agent = env.agent("worker-1").await?;
    let silent = SilentTarget::start().await?;
    let host = format!("worker-1:{}", silent.addr().port());
    let mut open_conns = Vec::new();
    for _ in 0..3 {
        let mut stream = tunnel_tests::client::ByteStream::connect(env.http()).await?;
        stream
            .send(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes())
            .await?;
        open_conns.push(stream);
    }
    eventually("three streams are open", WAIT_TIMEOUT, async || {
        (silent.traffic().open() == 3).then_some(())
    })
    .await;
    let full = get(&env, &host, "/").await?;
    // One source address may use half of `limits.streamsPerAgent`.
    let hints = ["worker-1", "3 streams", "half of limits.streamsPerAgent"];
    check(&full, 503, "too_many_streams", &hints);
    assert!(full.header("retry-after").is_some());
    drop(open_conns);
    let exporter = Exporter::start("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    eventually("the agent takes streams again", WAIT_TIMEOUT, async || {
        let status = get(&env, &host, "/metrics").await?.status;
        anyhow::ensure!(status == 200, "{status}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_agent_answers_503_and_keeps_its_streams() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let follow = RawRequest::get(&host, "/follow");
    let mut follow = tunnel_tests::client::Exchange::start(env.http(), &follow).await?;
    eventually("the follower is there", WAIT_TIMEOUT, async || {
        (exporter.followers() == 1).then_some(())
    })
    .await;
    agent.drain();
    eventually("new requests are refused", WAIT_TIMEOUT, async || {
        let reply = get(&env, &host, "/metrics").await?;
        anyhow::ensure!(
            reply.header("x-tunnel-error") == Some("draining"),
            "{} {}",
            reply.status,
            reply.text()
        );
        anyhow::Ok(reply)
    })
    .await;
    exporter.emit("last");
    loop {
        if follow.line().await.expect("still followed").trim() == "last" {
            break;
        }
    }
    exporter.end_follows();
    while follow.line().await.is_some() {}
    assert!(follow.ended().unwrap().is_clean());
    agent.ended().await
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_ends_answer_504() -> Result<()> {
    let env = TestEnv::start_with(|settings| {
        settings.limits = TestEnv::limits("targetDialTimeout: 500ms")
    })
    .await?;
    let _agent = env.agent("worker-1").await?;
    let silent = Unanswering::start().await?;
    let host = format!("worker-1:{}", silent.port);
    check(
        &get(&env, &host, "/").await?,
        504,
        "target_timeout",
        &["worker-1", &silent.port.to_string()],
    );

    let env =
        TestEnv::start_with(|settings| settings.limits = TestEnv::limits("openTimeout: 300ms"))
            .await?;
    let frozen = super::scripted::ScriptedAgent::connect(&env, "worker-2").await?;
    check(
        &get(&env, "worker-2:9100", "/").await?,
        504,
        "agent_timeout",
        &["worker-2", "9100"],
    );
    drop(frozen);
    Ok(())
}

/// A port whose accept queue is full. Linux leaves further connection attempts without an answer.
struct Unanswering {
    port: u16,
    _listener: TcpListener,
    _queued: Vec<TcpStream>,
}

impl Unanswering {
    async fn start() -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(([127, 0, 0, 1], 0).into())?;
        let listener = socket.listen(0)?;
        let address = listener.local_addr()?;
        let mut queued = Vec::new();
        while let Ok(connected) =
            tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(address)).await
        {
            queued.push(connected?);
        }
        Ok(Self {
            port: address.port(),
            _listener: listener,
            _queued: queued,
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_agent_answers_502() -> Result<()> {
    let env = TestEnv::start().await?;
    let agent = super::scripted::ScriptedAgent::connect(&env, "worker-1").await?;
    let asked = async { get(&env, "worker-1:9100", "/").await };
    let lost = async {
        let _stream = agent.next_stream().await?;
        agent.close().await;
        anyhow::Ok(())
    };
    let (reply, lost) =
        tokio::time::timeout(Duration::from_secs(60), async { tokio::join!(asked, lost) }).await?;
    lost?;
    check(&reply?, 502, "agent_lost", &["worker-1", "9100"]);
    Ok(())
}
