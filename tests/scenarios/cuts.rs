//! A truncated answer never looks like a clean end, and a refusal arrives with its reason. The
//! tests cover both HTTP listeners and TCP services.

use anyhow::Result;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_server::config::RawService;
use tunnel_tests::client::{BodyEnd, ByteStream, Endpoint, RawRequest, UpgradeClient, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::targets::{
    EchoTarget, Exporter, FakeKubelet, HalfCloseTarget, ResetTarget, deterministic_bytes,
};

use super::scripted::ScriptedAgent;

const MIB: usize = 1 << 20;

/// Starts an environment with one TCP service that leads to a port of worker-1.
async fn env_with_service(port: u16) -> Result<(TestEnv, Endpoint)> {
    let env = TestEnv::start_with(|settings| {
        settings.services = vec![RawService {
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
            let reply = match request(endpoint, &get).await {
                Ok(reply) => reply,
                // The reset may reach the caller before the head does.
                Err(error) => {
                    assert!(is_reset(&error), "{path}: {error:#}");
                    continue;
                }
            };
            // The reset may also reach the server before the head. The server then answers with its
            // own 502.
            let is_502 = reply.status == 502 && reply.header("x-tunnel-error").is_some();
            assert!(
                is_502 || matches!(reply.ended, BodyEnd::Reset(_)),
                "{path}: {} {:?}",
                reply.status,
                reply.ended
            );
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
        assert!(
            matches!(reading.ended, BodyEnd::Reset(_)),
            "{:?}",
            reading.ended
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn service_passes_bytes_half_closes_and_cuts() -> Result<()> {
    let echo = EchoTarget::start().await?;
    let (env, endpoint) = env_with_service(echo.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    let sent = deterministic_bytes(1, 3 * MIB);
    let reading = ByteStream::connect(endpoint.clone())
        .await?
        .talk(&sent)
        .await?;
    assert!(
        reading.bytes == sent && reading.ended == BodyEnd::CleanClose,
        "{:?}",
        reading.ended
    );

    let answer = HalfCloseTarget::start(16 * MIB as u64).await?;
    let (env, endpoint) = env_with_service(answer.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    let reading = ByteStream::connect(endpoint)
        .await?
        .talk(b"question")
        .await?;
    assert_eq!(reading.bytes.len(), 16 * MIB);
    assert_eq!(reading.ended, BodyEnd::CleanClose);

    let reset = ResetTarget::start_waiting(64 << 10).await?;
    let (env, endpoint) = env_with_service(reset.addr().port()).await?;
    let _agent = env.agent("worker-1").await?;
    for _ in 0..20 {
        let mut stream = ByteStream::connect(endpoint.clone()).await?;
        stream.send(b"x").await?;
        let reading = stream.read_to_end().await;
        assert!(
            matches!(reading.ended, BodyEnd::Reset(_)),
            "{:?}",
            reading.ended
        );
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
            assert!(
                matches!(reading.ended, BodyEnd::Reset(_)),
                "{:?}",
                reading.ended
            );
        }
        Err(error) => assert!(is_reset(&error), "{error:#}"),
    }
    Ok(())
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
        assert_eq!(
            (reply.status, reply.header("x-tunnel-error")),
            (403, Some("refused_by_policy")),
            "{}",
            reply.text()
        );
        assert!(
            reply.text().contains("agent's --deny-ports lists 9100"),
            "{}",
            reply.text()
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_that_the_agent_drops_is_a_cut() -> Result<()> {
    let env = TestEnv::start().await?;
    let agent = ScriptedAgent::connect(&env, "worker-1").await?;
    let get = RawRequest::get("worker-1:9100", "/");
    for _ in 0..10 {
        let (reply, dropped) = tokio::join!(request(env.http(), &get), async {
            let mut stream = agent.next_stream().await?;
            stream.accept("").await?;
            stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf an answer")
                .await?;
            stream.flush().await?;
            // The body is close-delimited. Only the reset shows that the body is incomplete.
            drop(stream);
            anyhow::Ok(())
        });
        dropped?;
        let reply = match reply {
            Ok(reply) => reply,
            Err(error) => {
                assert!(is_reset(&error), "{error:#}");
                continue;
            }
        };
        let is_502 = reply.status == 502;
        assert!(
            is_502 || matches!(reply.ended, BodyEnd::Reset(_)),
            "{} {:?}",
            reply.status,
            reply.ended
        );
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
        assert!(
            reply.body == answer,
            "{} of {} bytes, {:?}",
            reply.body.len(),
            answer.len(),
            reply.ended
        );
    }
    // The requests whose bodies were not read to their end leave no stream behind.
    let session = env.registry().of_node(&"worker-1".parse()?).remove(0);
    eventually("all streams are gone", WAIT_TIMEOUT, async || {
        let streams = session.session.health().streams;
        (streams == 0).then_some(()).ok_or(streams)
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_a_stopping_server_cannot_finish_is_a_reset() -> Result<()> {
    let env = TestEnv::start_with(|settings| settings.drain_timeout = Some("1ms".into())).await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    // For this HTTP/1.0 caller the end of the connection delimits the body. The caller does not
    // read until the server has stopped.
    let raw = RawRequest::raw(format!(
        "GET /close-delimited/{} HTTP/1.0\r\nHost: {host}\r\n\r\n",
        64 * MIB
    ));
    let exchange = tunnel_tests::client::Exchange::start(env.http(), &raw).await?;
    let mut env = env;
    env.stop_server().await?;
    let reply = exchange.into_reply().await;
    assert!(
        matches!(reply.ended, BodyEnd::Reset(_)),
        "{} bytes, {:?}",
        reply.body.len(),
        reply.ended
    );
    Ok(())
}

fn is_reset(error: &anyhow::Error) -> bool {
    let kind = error
        .downcast_ref::<std::io::Error>()
        .map(std::io::Error::kind);
    kind == Some(std::io::ErrorKind::ConnectionReset)
}
