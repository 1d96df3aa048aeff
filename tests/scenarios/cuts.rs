//! A truncated answer never looks like a clean end, and a refusal arrives with its reason. The
//! tests cover both HTTP listeners and TCP services.

mod early;
mod matrix;

use std::io;

use anyhow::{Context, Error, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_server::config::{RawConfig, RawTcpService};
use tunnel_tests::checks::{ensure_contains, ensure_refused, ensure_reset};
use tunnel_tests::client::{
    BodyEnd, ByteStream, Endpoint, Exchange, HttpReply, RawRequest, UpgradeClient, request,
};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{
    EchoTarget, Exporter, FakeKubelet, HalfCloseTarget, ResetTarget, deterministic_bytes,
};

use super::scripted::ScriptedAgent;

const MIB: usize = 1 << 20;

/// Starts an environment with one TCP service that leads to a port of worker-1.
async fn env_with_service(port: u16) -> Result<(TestEnv, Endpoint)> {
    let env = TestEnv::start_with(|settings| {
        settings.services = vec![RawTcpService {
            name: "raw".into(),
            listen: "127.0.0.1:0".into(),
            node: "worker-1".into(),
            target: port.to_string(),
            protocol: None,
        }];
    })
    .await?;
    let endpoint = Endpoint::plain(env.bound().services[0].1);
    Ok((env, endpoint))
}

#[tokio::test(flavor = "multi_thread")]
async fn body_that_a_target_cuts_is_cut_for_the_caller() -> Result<()> {
    let env = TestEnv::start().await?;
    let (plain, tls) = (
        Exporter::start("worker-1").await?,
        FakeKubelet::start("worker-1").await?,
    );
    let _agent = env.agent("worker-1").await?;
    for path in [
        "/reset-mid-body",
        "/reset-chunked",
        "/reset-close-delimited",
        "/short",
    ] {
        for (endpoint, port) in [
            (env.http(), plain.addr().port()),
            (env.https("worker-1")?, tls.addr().port()),
        ] {
            let get = RawRequest::get(&format!("worker-1:{port}"), path);
            ensure_cut(request(endpoint, &get).await).context(path)?;
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn upgraded_stream_that_a_target_cuts_is_cut_for_the_caller() -> Result<()> {
    let env = TestEnv::start().await?;
    let kubelet = FakeKubelet::plain("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    for _ in 0..20 {
        let upgraded = UpgradeClient::spdy(&host, "/exec/a/b/c?script=reset")
            .connect(env.http())
            .await?;
        let mut stream = upgraded.switched()?;
        stream.send(b"x").await?;
        let reading = stream.read_to_end().await;
        ensure_reset(&reading.ended)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn service_passes_bytes_half_closes_and_cuts() -> Result<()> {
    let echo = EchoTarget::start().await?;
    let (env, endpoint) = env_with_service(echo.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    let sent = deterministic_bytes(1, 3 * MIB);
    let caller = ByteStream::connect(endpoint).await?;
    let reading = caller.talk(&sent).await?;
    assert!(reading.bytes == sent, "{} bytes", reading.bytes.len());
    assert_eq!(reading.ended, BodyEnd::CleanClose);

    let answer = HalfCloseTarget::start(16 * MIB as u64).await?;
    let (env, endpoint) = env_with_service(answer.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    let caller = ByteStream::connect(endpoint).await?;
    let reading = caller.talk(b"question").await?;
    assert_eq!(reading.bytes.len(), 16 * MIB);
    assert_eq!(reading.ended, BodyEnd::CleanClose);

    let reset = ResetTarget::start_waiting(64 << 10).await?;
    let (env, endpoint) = env_with_service(reset.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    for _ in 0..20 {
        let mut stream = ByteStream::connect(endpoint.clone()).await?;
        stream.send(b"x").await?;
        let reading = stream.read_to_end().await;
        ensure_reset(&reading.ended)?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn service_without_an_agent_is_a_reset() -> Result<()> {
    let (_env, endpoint) = env_with_service(9100).await?;
    // The reset may arrive before the client has finished connecting.
    match ByteStream::connect(endpoint).await {
        Ok(mut stream) => {
            let reading = stream.read_to_end().await;
            ensure_reset(&reading.ended)
        }
        Err(error) => ensure_reset_error(&error),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_after_64_kib_of_optimistic_data_keeps_code_and_detail() -> Result<()> {
    let env = TestEnv::start().await?;
    let agent = ScriptedAgent::connect(&env, "worker-1").await?;
    let upload = RawRequest::new("POST", "/upload", "worker-1:9100")
        .header("Connection", "close")
        .body(vec![7; 64 << 10]);
    for _ in 0..20 {
        let (reply, refused) = tokio::join!(request(env.http(), &upload), async {
            let stream = agent.next_stream().await?;
            stream
                .refuse(RefusalCode::Policy, "agent's --deny-ports lists 9100")
                .await;
            anyhow::Ok(())
        });
        refused?;
        let reply = reply?;
        ensure_refused(&reply, 403, "refused_by_policy")?;
        ensure_contains(&reply.text(), &["agent's --deny-ports lists 9100"])?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_before_the_request_has_ended_arrives_whole() -> Result<()> {
    let env = TestEnv::start().await?;
    let agent = ScriptedAgent::connect(&env, "worker-1").await?;
    let answer = deterministic_bytes(5, MIB);
    let upload = RawRequest::new("POST", "/upload", "worker-1:9100")
        .header("Connection", "close")
        .body(vec![7; 8 * MIB]);
    for _ in 0..10 {
        let (reply, answered) = tokio::join!(request(env.http(), &upload), async {
            let mut stream = agent.next_stream().await?;
            stream.accept("").await?;
            let mut first = [0; 64];
            stream.read_exact(&mut first).await?;
            let head = format!(
                "HTTP/1.1 413 Too Large\r\nContent-Length: {}\r\n\r\n",
                answer.len()
            );
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&answer).await?;
            // The agent reads nothing more. A target that answers early and closes behaves like
            // this.
            stream.shutdown().await?;
            drop(stream);
            anyhow::Ok(())
        });
        answered?;
        let reply = reply?;
        assert_eq!(reply.status, 413);
        let (arrived, ended) = (reply.body.len(), &reply.ended);
        assert!(reply.body == answer, "{arrived} bytes, {ended:?}");
    }
    // The requests whose bodies were not read to their end leave no stream behind.
    let session = env.registry().of_node(&"worker-1".parse()?).remove(0);
    eventually("all streams are gone", WAIT_TIMEOUT, async || {
        let streams = session.session.stats().streams;
        (streams == 0).then_some(()).ok_or(streams)
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_a_stopping_server_cannot_finish_is_a_reset() -> Result<()> {
    let short = |settings: &mut RawConfig| settings.drain_timeout = Some("1ms".into());
    let mut site = NodeEnv::start_with(short).await?;
    // For this HTTP/1.0 caller the end of the connection delimits the body. The caller does not
    // read until the server has stopped.
    let raw = RawRequest::raw(format!(
        "GET /close-delimited/{} HTTP/1.0\r\nHost: {}\r\n\r\n",
        64 * MIB,
        site.host
    ));
    let exchange = Exchange::start(site.env.http(), &raw).await?;
    site.env.stop_server().await?;
    ensure_reset(&exchange.into_reply().await.ended)
}

/// Fails unless a request whose target was cut ended in a reset. The reset may reach the caller
/// before the head does. It may also reach the server before the head, which then answers with its
/// own 502.
fn ensure_cut(asked: Result<HttpReply>) -> Result<()> {
    match asked {
        Ok(reply) if reply.status == 502 => {
            let code = reply.header("x-tunnel-error");
            ensure!(code.is_some(), "{}", reply.text());
            Ok(())
        }
        Ok(reply) => ensure_reset(&reply.ended),
        Err(error) => ensure_reset_error(&error),
    }
}

fn ensure_reset_error(error: &Error) -> Result<()> {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    ensure!(kind == Some(io::ErrorKind::ConnectionReset), "{error:#}");
    Ok(())
}
