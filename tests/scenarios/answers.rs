//! Answers to callers: status, code and text of each row of the answers table.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tunnel_tests::checks::{ensure_refused, ensure_status};
use tunnel_tests::client::{Endpoint, Exchange, HttpReply, RawRequest, request};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::{EchoTarget, Exporter, FakeKubelet, HostileAction, HostileTarget};

use super::scripted::ScriptedAgent;

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
    let at = |host: &str| RawRequest::get(host, "/");
    let closing = |request: RawRequest| request.header("Connection", "close");
    let node = "worker-1:9100";
    let absolute = closing(RawRequest::new("GET", "http://worker-1:9100/", "nobody"));
    let other_scheme = closing(RawRequest::new("GET", "https://worker-1:9100/", node));
    let connect = closing(RawRequest::new("CONNECT", node, node));
    let twice = at(node).header("Host", "worker-2:9100");
    let long = RawRequest::get(node, &format!("/{}", "x".repeat(65_000)));
    let big = at(node).header("X-Big", &"x".repeat(1 << 20));
    let both = ["192.168.33.221", "worker-1", "worker-2"];
    let no_list = ["worker-1", "22", "--http-proxy-ports"];
    for (asked, status, code, names) in [
        (at("nobody:9100"), 400, "unknown_node", &["nobody"][..]),
        (at("10.1.2.3:9100"), 400, "unknown_node", &["10.1.2.3"]),
        (at("192.168.33.221:9100"), 400, "ambiguous_address", &both),
        (at(node), 503, "no_agent", &["worker-1", "9100"]),
        (at("worker-1:22"), 403, "refused_by_policy", &no_list),
        (at("a b"), 400, "bad_request", &["Host"]),
        (twice, 400, "bad_request", &["host"]),
        (absolute, 503, "no_agent", &["worker-1", "9100"]),
        (other_scheme, 400, "bad_request", &["request target"]),
        (connect, 400, "bad_request", &["CONNECT"]),
        (long, 414, "uri_too_long", &["65000", "kubectl exec"]),
        (
            big,
            431,
            "head_too_large",
            &["1048576", "limits.requestHeadBytes"],
        ),
    ] {
        check(&request(env.http(), &asked).await?, status, code, names);
    }
    // hyper rejects a malformed head itself and answers with a bare status.
    let fits = at("nobody:9100").header("X-Big", &"x".repeat(60 << 10));
    let garbage = RawRequest::raw("GARBAGE\r\n\r\n");
    for asked in [fits, garbage] {
        ensure_status(&request(env.http(), &asked).await?, 400)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_on_the_https_port_is_answered_in_plain_http() -> Result<()> {
    let env = TestEnv::start().await?;
    let https = Endpoint::plain(env.bound().https.expect("HTTPS listener"));
    let large = "x".repeat(100 << 10);
    let small = RawRequest::get("worker-1:9100", "/");
    let posted = RawRequest::new("POST", "/", "worker-1:9100").header("X-Large", &large);
    for asked in [small, posted] {
        let reply = request(https.clone(), &asked).await?;
        check(
            &reply,
            400,
            "bad_request",
            &["this port speaks HTTPS", "https://"],
        );
    }
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
        env.meta(),
    ] {
        let reply = get(&env, &format!("worker-1:{}", address.port()), "/").await?;
        let hint = format!("{} is the tunnel's own port", address.port());
        let hints = [&*hint, "put the target's port in Host"];
        check(&reply, 403, "refused_by_policy", &hints);
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
    let names = ["worker-1", &closed.to_string(), "refused"];
    check(&refused, 502, "target_refused", &names);

    let exporter = Exporter::start("worker-1").await?;
    let garbage = get(&env, &at(exporter.addr()), "/garbage").await?;
    check(&garbage, 502, "target_bad_response", &["worker-1"]);

    let no_tls = EchoTarget::start().await?;
    let asked = RawRequest::get(&at(no_tls.addr()), "/");
    let https = request(env.https("worker-1")?, &asked).await?;
    check(&https, 502, "target_tls", &["worker-1", "TLS"]);

    // The targets speak the other scheme than the listener.
    let plain = b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec();
    let plain = HostileTarget::start(vec![HostileAction::Send(plain), HostileAction::Hold]).await?;
    let asked = RawRequest::get(&at(plain.addr()), "/");
    let https = request(env.https("worker-1")?, &asked).await?;
    let lists = ["plain HTTP", "--http-proxy-ports"];
    check(&https, 502, "target_tls", &lists);
    let alert = HostileAction::Send(vec![21, 3, 1, 0, 2, 2, 50]);
    let alert = [HostileAction::ReadHead, alert, HostileAction::Hold];
    let tls = HostileTarget::start(alert.to_vec()).await?;
    let http = get(&env, &at(tls.addr()), "/").await?;
    let lists = ["speaks TLS", "--https-proxy-ports"];
    check(&http, 502, "target_bad_response", &lists);

    let kubelet = FakeKubelet::plain("worker-1").await?;
    let upgrade = |path: &str| {
        RawRequest::new("POST", path, &at(kubelet.addr()))
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1")
    };
    let mismatch = upgrade("/exec/a/b/c?mismatch=true");
    let mismatch = request(env.http(), &mismatch).await?;
    check(&mismatch, 502, "target_bad_response", &["worker-1"]);
    for status in [200, 302, 403] {
        let path = format!("/exec/a/b/c?refuse={status}");
        let refused = request(env.http(), &upgrade(&path)).await?;
        assert_eq!(
            (refused.status, refused.header("x-tunnel-error")),
            (status, None),
            "the target's own answer is passed"
        );
        let closed = async || (kubelet.traffic().open() == 0).then_some(());
        eventually("the target's connection is closed", WAIT_TIMEOUT, closed).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_dial_policy_answers_with_its_flag() -> Result<()> {
    let env = TestEnv::start_with(|settings| settings.localhost_proxy_ports = Some("9999".into()))
        .await?;
    let _agent = env.agent("worker-1").await?;
    for (host, flag) in [
        ("worker-1:9999", "--localhost-ports"),
        ("worker-1:2379", "--deny-ports"),
    ] {
        let reply = get(&env, host, "/").await?;
        check(&reply, 403, "refused_by_policy", &["worker-1", flag]);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn address_that_an_agent_claims_never_counts() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let reply = get(&env, "127.0.0.1:9100", "/").await?;
    check(&reply, 400, "unknown_node", &["127.0.0.1"]);
    let listed = request(env.meta(), &RawRequest::get("meta", "/nodes")).await?;
    let nodes: serde_json::Value = serde_json::from_slice(&listed.body)?;
    assert_eq!(nodes[0]["claimedAddress"], "127.0.0.1");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_agent_answers_503_and_keeps_its_streams() -> Result<()> {
    let site = NodeEnv::start().await?;
    let follow = RawRequest::get(&site.host, "/follow");
    let mut follow = Exchange::start(site.env.http(), &follow).await?;
    let exporter = &site.exporter;
    eventually("the follower is there", WAIT_TIMEOUT, async || {
        (exporter.followers() == 1).then_some(())
    })
    .await;
    site.agent.drain();
    eventually("new requests are refused", WAIT_TIMEOUT, async || {
        ensure_refused(&site.get("/metrics").await?, 503, "draining")
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
    site.agent.ended().await
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_ends_answer_504() -> Result<()> {
    let limits = TestEnv::limits("targetDialTimeout: 500ms");
    let env = TestEnv::start_with(|settings| settings.limits = limits).await?;
    let _agent = env.agent("worker-1").await?;
    // The accept queue is full. Linux leaves further connection attempts without an answer.
    let socket = TcpSocket::new_v4()?;
    socket.bind(([127, 0, 0, 1], 0).into())?;
    let listener = socket.listen(0)?;
    let address = listener.local_addr()?;
    let patience = scaled(Duration::from_millis(500));
    let mut queued = Vec::new();
    while let Ok(connected) = timeout(patience, TcpStream::connect(address)).await {
        queued.push(connected?);
    }
    let port = address.port().to_string();
    let reply = get(&env, &format!("worker-1:{port}"), "/").await?;
    check(&reply, 504, "target_timeout", &["worker-1", &port]);

    let limits = TestEnv::limits("openTimeout: 300ms");
    let env = TestEnv::start_with(|settings| settings.limits = limits).await?;
    let _frozen = ScriptedAgent::connect(&env, "worker-2").await?;
    let reply = get(&env, "worker-2:9100", "/").await?;
    check(&reply, 504, "agent_timeout", &["worker-2", "9100"]);
    Ok(())
}
