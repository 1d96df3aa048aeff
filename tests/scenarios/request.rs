//! Requests by node name through the listeners: what arrives at the target, and what the caller
//! receives.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use tokio::net::TcpListener;
use tunnel_agent::config::{NodeIpSetting, RawConfig as AgentRawConfig};
use tunnel_tests::checks::{ensure_contains, ensure_status, get_ok};
use tunnel_tests::client::{BodyEnd, Endpoint, KeepAliveClient, RawRequest, request};
use tunnel_tests::env::{Agent, NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Program;
use tunnel_tests::targets::{Exporter, FakeKubelet};

#[tokio::test(flavor = "multi_thread")]
async fn https_listener_serves_a_certificate_for_the_node_and_speaks_tls_to_the_target()
-> Result<()> {
    let env = TestEnv::start().await?;
    let kubelet = FakeKubelet::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let reply = get_ok(env.https("worker-1")?, &host, "/metrics").await?;
    ensure_contains(&reply.text(), &["worker-1"])?;
    assert_eq!(reply.ended, BodyEnd::CleanLength);
    // The certificate is valid for the requested name only.
    let other = get_ok(env.https("worker-2")?, &host, "/metrics").await;
    assert!(other.unwrap_err().to_string().contains("TLS handshake"));
    // The server does not delegate its client certificate to a caller without a certificate.
    let reply = get_ok(env.https("worker-1")?, &host, "/client-certificate").await?;
    assert_eq!(reply.text().trim(), "none");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_arrive_whole_in_every_framing() -> Result<()> {
    let site = NodeEnv::start().await?;
    for path in [
        "/size/0",
        "/size/1",
        "/size/5000000",
        "/chunked/5000000",
        "/close-delimited/5000000",
    ] {
        let through = site.get(path).await?;
        let direct = get_ok(site.exporter.addr(), &site.host, path).await?;
        assert_eq!(through.status, 200);
        assert!(through.ended.is_clean(), "{path}: {:?}", through.ended);
        assert_eq!(through.sha256(), direct.sha256(), "{path}");
    }
    let upload = RawRequest::new("POST", "/upload", &site.host)
        .header("Connection", "close")
        .body(vec![7; 3_000_000]);
    let through = request(site.env.http(), &upload).await?;
    let direct = request(site.exporter.addr(), &upload).await?;
    assert_eq!(through.text(), direct.text());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn target_sees_its_own_host_and_no_routing_or_hop_by_hop_fields() -> Result<()> {
    let site = NodeEnv::start().await?;
    let port = site.exporter.addr().port();
    let asked = RawRequest::new("GET", "/headers", &format!("WORKER-1.:{port}"))
        .header("X-Tunnel-Proxy-Host", "worker-1")
        .header("X-Tunnel-Proxy-Dest", &format!("worker-1:{port}"))
        .header("Connection", "close, X-Hop")
        .header("X-Hop", "1")
        .header("Keep-Alive", "timeout=5")
        .header("Authorization", "Bearer secret")
        .header("X-Kept", "yes");
    let head = request(site.env.http(), &asked).await?.text();
    let own = format!("Host: worker-1:{port}\r\n");
    let kept = [&*own, "Authorization: Bearer secret", "X-Kept: yes"];
    ensure_contains(&head, &kept)?;
    let lower = head.to_lowercase();
    for gone in ["x-tunnel", "x-hop", "keep-alive", "x-forwarded", "via:"] {
        assert!(!lower.contains(gone), "{gone} arrived in {head}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn loopback_class_reaches_what_listens_on_loopback_only() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let env = TestEnv::start_with(|settings| {
        settings.localhost_proxy_ports = Some(port.to_string());
    })
    .await?;
    // The agent's node address is one where nothing listens. Only the loopback class can reach the
    // exporter.
    let _agent = env
        .agent_with("worker-1", |config| {
            config.node_ip = NodeIpSetting::Fixed([127, 0, 0, 77].into());
            config.dial_policy.localhost_ports = port.to_string().parse().unwrap();
        })
        .await?;
    let host = format!("worker-1:{port}");
    let reply = get_ok(env.http(), &host, "/headers").await?;
    ensure_contains(&reply.text(), &[&format!("Host: 127.0.0.1:{port}")])
}

#[tokio::test(flavor = "multi_thread")]
async fn extra_proxy_port_implies_the_targets_port() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    // The listener of the extra port has the target's port number on another loopback address, as a
    // Service would.
    let env = TestEnv::start_with(|settings| {
        settings.http_proxy_ports = Some(port.to_string());
        settings.proxy_port_listen = Some("127.0.0.5".into());
    })
    .await?;
    let _agent = env.agent("worker-1").await?;
    let endpoint = Endpoint::plain(env.bound().proxy[0]);
    assert_eq!(env.bound().proxy[0].port(), port);
    for host in ["worker-1".to_owned(), format!("worker-1:{port}")] {
        let reply = get_ok(endpoint.clone(), &host, "/metrics").await?;
        ensure_contains(&reply.text(), &["node=\"worker-1\""])?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn extra_port_of_another_program_is_a_condition_until_it_is_free() -> Result<()> {
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let address = SocketAddr::from(([127, 0, 0, 6], port));
    let other_program = TcpListener::bind(address).await?;
    let env = TestEnv::start_with(|settings| {
        settings.http_proxy_ports = Some(port.to_string());
        settings.proxy_port_listen = Some(address.ip().to_string());
        settings.limits = TestEnv::limits("{ reloadEvery: 100ms }");
    })
    .await?;
    let _agent = env.agent("worker-1").await?;
    ensure!(env.bound().proxy.is_empty());
    let conditions = async || {
        let get = RawRequest::get("localhost", "/readyz?verbose");
        let reply = request(Endpoint::plain(env.meta()), &get).await?;
        ensure_status(&reply, 200)?;
        anyhow::Ok(reply.text())
    };
    let hint = format!("cannot listen on {address}");
    ensure_contains(&conditions().await?, &["[!] proxy ports", &hint])?;
    get_ok(env.http(), &format!("worker-1:{port}"), "/metrics").await?;

    drop(other_program);
    eventually("the extra port is served", WAIT_TIMEOUT, async || {
        get_ok(Endpoint::plain(address), "worker-1", "/metrics").await
    })
    .await;
    eventually("the condition is cleared", WAIT_TIMEOUT, async || {
        let text = conditions().await?;
        ensure!(!text.contains("proxy ports"), "{text}");
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn chunked_body_of_any_method_arrives() -> Result<()> {
    let site = NodeEnv::start().await?;
    for method in ["POST", "GET"] {
        let upload = RawRequest::new(method, "/upload", &site.host)
            .header("Connection", "close")
            .header("Transfer-Encoding", "chunked")
            .followed_by("5\r\nhello\r\n0\r\n\r\n");
        let through = request(site.env.http(), &upload).await?;
        let direct = request(site.exporter.addr(), &upload).await?;
        assert_eq!(through.status, direct.status, "{method}");
        assert_eq!(through.text(), direct.text(), "{method}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn node_whose_name_is_a_number_is_reached_over_tls() -> Result<()> {
    let env = TestEnv::start().await?;
    let kubelet = FakeKubelet::start("00012345").await?;
    let _agent = env.agent("00012345").await?;
    let host = format!("00012345:{}", kubelet.addr().port());
    // A client cannot send such a name in SNI, so the caller verifies the certificate under another
    // name.
    get_ok(env.https("localhost")?, &host, "/metrics").await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connection_ends_without_a_reset() -> Result<()> {
    let limits = TestEnv::limits("callerIdleTimeout: 300ms");
    let site = NodeEnv::start_with(|settings| settings.limits = limits).await?;
    let mut client = KeepAliveClient::connect(site.env.http()).await?;
    let get = RawRequest::new("GET", "/metrics", &site.host);
    client.request(&get).await?;
    assert_eq!(client.closed().await, BodyEnd::CleanClose);
    Ok(())
}

/// `off` is a value of every listener.
#[tokio::test(flavor = "multi_thread")]
async fn server_without_meta_port_and_agent_without_cloud_listeners_carry_requests() -> Result<()> {
    let node = NodeEnv::start_with(|settings| settings.meta_listen = Some("off".into())).await?;
    ensure!(node.env.bound().meta.is_none());
    ensure!(node.get("/metrics").await?.status == 200);
    let no_listener = |settings: &mut AgentRawConfig| settings.cloud_listen = vec!["off".into()];
    let config = node.env.agent_config_with("worker-2", no_listener)?;
    ensure!(config.cloud_listeners.is_empty());
    let _agent = Agent::start(config).await?;
    node.env.connected("worker-2").await;
    let asked = Program::ours("tunnel-server")?.args(["healthcheck", "--meta-listen", "off"]);
    asked
        .run()
        .await?
        .ensure_failed(1, &["the meta port is off"])?;
    Ok(())
}
