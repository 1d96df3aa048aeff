//! The console of a real server with a real agent.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use rustls::RootCertStore;
use serde_json::Value;
use tunnel_server::config::RawConfig;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{ClientTls, Endpoint, HttpReply, RawRequest, request};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::ScratchDir;

mod browser;
mod processor;

#[tokio::test(flavor = "multi_thread")]
async fn page_shows_a_node_its_requests_and_the_end_of_its_session() -> Result<()> {
    let env = NodeEnv::start_with(on_loopback).await?;
    let scrape = RawRequest::get(&env.host, "/metrics");
    let reply = request(env.env.http(), &scrape).await?;
    ensure!(reply.status == 200, "{reply:?}");

    let html = get(&env, "/", "text/html").await?;
    let policy = html.header("content-security-policy").unwrap_or_default();
    ensure!(policy.starts_with("default-src 'none'"), "{html:?}");
    ensure!(html.header("set-cookie").is_none(), "{html:?}");
    let has_row = html.text().contains("<a href=\"/node/worker-1\">");
    ensure!(
        has_row && html.text().matches("<script").count() == 1,
        "{html:?}"
    );
    for file in ["/style.css", "/script.js"] {
        ensure!(get(&env, file, "*/*").await?.status == 200);
    }

    eventually("the request on the page", SAMPLED, async || {
        let node = document(&env, "/node/worker-1").await?;
        ensure!(node["node"]["state"] == "live", "{node}");
        ensure!(node["node"]["certificateNotAfter"].is_string(), "{node}");
        ensure!(node["node"]["traffic"].is_object(), "{node}");
        let path = node["requests"][0]["request"].as_str();
        ensure!(path.is_some_and(|path| path.contains("/metrics")), "{node}");
        Ok(())
    })
    .await;
    let servers = document(&env, "/servers").await?;
    let alone = &servers["servers"];
    ensure!(
        alone[0]["state"] == "this" && alone[0]["nodes"] == 1 && alone[1].is_null(),
        "{servers}"
    );
    let NodeEnv {
        agent,
        exporter: _exporter,
        host: _host,
        env,
    } = env;
    agent.stop().await?;
    let page = env.bound().status.context("no status page")?;
    eventually("the node to be away", WAIT_TIMEOUT, async || {
        let away = request(page, &RawRequest::get("localhost", "/node/worker-1")).await?;
        let has_reason = away.text().contains("away") && away.text().contains("the peer");
        ensure!(has_reason, "{away:?}");
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn wide_page_serves_only_callers_with_a_certificate() -> Result<()> {
    let ca = TestCa::new("callers")?;
    let scratch = ScratchDir::new()?;
    let callers = scratch.file("callers.crt", ca.pem())?;
    let serving = ca.issue(&Leaf::target(SERVER_NAME))?;
    let (certificate, key) = serving.write(scratch.path(), "https")?;
    let text = |path: &Path| Some(path.to_string_lossy().into_owned());
    let env = TestEnv::start_with(|settings| {
        settings.status_listen = Some("0.0.0.0:0".into());
        settings.client_ca = text(&callers);
        settings.https_cert_file = text(&certificate);
        settings.https_key_file = text(&key);
    })
    .await?;
    let port = env.bound().status.context("no status page")?.port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let get = async |certificate: Option<&Issued>| -> Result<HttpReply> {
        let mut roots = RootCertStore::empty();
        roots.add(ca.root().clone())?;
        let presented = certificate.map(Issued::presented).transpose()?;
        let tls = ClientTls::verifying(SERVER_NAME, roots, presented)?;
        let page = RawRequest::get(SERVER_NAME, "/");
        request(Endpoint::tls(address, tls), &page).await
    };
    let reply = get(Some(&ca.issue(&Leaf::caller("operator"))?)).await?;
    ensure!(reply.status == 200, "{reply:?}");
    let reply = get(Some(&ca.issue(&Leaf::kubelet("worker-1"))?)).await?;
    ensure!(reply.status == 403, "{reply:?}");
    ensure!(get(None).await.is_err(), "a caller without a certificate");
    ensure!(
        request(address, &RawRequest::get(SERVER_NAME, "/"))
            .await
            .is_err()
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn wide_page_serves_callers_with_a_password_and_limits_guesses() -> Result<()> {
    let ca = TestCa::new("callers")?;
    let scratch = ScratchDir::new()?;
    let passwords = scratch.file("passwords", "operator:0123456789abcdef\n")?;
    let (certificate, key) = ca
        .issue(&Leaf::target(SERVER_NAME))?
        .write(scratch.path(), "https")?;
    let text = |path: &Path| Some(path.to_string_lossy().into_owned());
    let env = TestEnv::start_with(|settings| {
        settings.status_listen = Some("0.0.0.0:0".into());
        settings.status_auth = text(&passwords);
        settings.https_cert_file = text(&certificate);
        settings.https_key_file = text(&key);
    })
    .await?;
    let port = env.bound().status.context("no status page")?.port();
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let get = async |credentials: Option<&str>| -> Result<HttpReply> {
        let mut roots = RootCertStore::empty();
        roots.add(ca.root().clone())?;
        let tls = ClientTls::verifying(SERVER_NAME, roots, None)?;
        let mut page = RawRequest::get(SERVER_NAME, "/");
        if let Some(credentials) = credentials {
            let encoded = BASE64_STANDARD.encode(credentials);
            page = page.header("Authorization", &format!("Basic {encoded}"));
        }
        request(Endpoint::tls(address, tls), &page).await
    };
    let reply = get(None).await?;
    let challenge = reply.header("www-authenticate").unwrap_or_default();
    let is_asked = reply.status == 401 && challenge.starts_with("Basic ");
    ensure!(is_asked && !reply.text().contains("Nodes"), "{reply:?}");
    let reply = get(Some("operator:0123456789abcdef")).await?;
    ensure!(
        reply.status == 200 && reply.text().contains("Nodes"),
        "{reply:?}"
    );
    let mut guesses = 0;
    // A slow machine needs more of them: each further one extends the time.
    let reply = loop {
        let reply = get(Some("operator:guess")).await?;
        if reply.status != 401 {
            break reply;
        }
        guesses += 1;
        ensure!(guesses < 20, "{reply:?}");
    };
    let is_limited = reply.status == 429 && reply.header("retry-after").is_some();
    ensure!(is_limited && guesses >= 5, "{guesses}: {reply:?}");
    Ok(())
}

/// A node has figures after its first sample, up to 10 s after it has connected.
const SAMPLED: Duration = Duration::from_secs(30);
const SERVER_NAME: &str = "tunnel.example";

fn on_loopback(settings: &mut RawConfig) {
    settings.status_listen = Some("127.0.0.1:0".into());
}

async fn get(env: &NodeEnv, path: &str, accept: &str) -> Result<HttpReply> {
    let page = env.env.bound().status.context("no status page")?;
    let wanted = RawRequest::get("127.0.0.1", path).header("Accept", accept);
    request(page, &wanted).await
}

async fn document(env: &NodeEnv, path: &str) -> Result<Value> {
    let reply = get(env, path, "application/json").await?;
    Ok(serde_json::from_str(&reply.text())?)
}
