//! Upgraded streams and refused upgrades: half-closes, exchanged answers, and connections that must
//! not stay open.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tunnel_agent::config::TransportChoice;
use tunnel_tests::client::{BodyEnd, ByteStream, RawRequest, UpgradeClient, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::rounds;
use tunnel_tests::targets::{
    FakeKubelet, HostileAction, HostileTarget, RecordingTarget, deterministic_bytes, refusal,
    sha256_hex,
};

const BULK: usize = 16 << 20;

/// The end that closes its half of the stream first.
#[derive(Clone, Copy, PartialEq)]
enum EndsFirst {
    Caller,
    Target,
}

tests_of! {
    fn r05_16_mib_arrive_behind_the_callers_fin_each_time_over_quic() =
        half_closes(TransportChoice::Quic, EndsFirst::Caller);
    fn r05_16_mib_arrive_behind_the_callers_fin_each_time_over_h2() =
        half_closes(TransportChoice::H2, EndsFirst::Caller);
    fn r05_16_mib_arrive_behind_the_targets_fin_each_time_over_quic() =
        half_closes(TransportChoice::Quic, EndsFirst::Target);
    fn r05_16_mib_arrive_behind_the_targets_fin_each_time_over_h2() =
        half_closes(TransportChoice::H2, EndsFirst::Target);
}

/// Runs the rounds by turns through the HTTP and the HTTPS listener, and as SPDY and WebSocket.
async fn half_closes(transport: TransportChoice, first: EndsFirst) -> Result<()> {
    let env = TestEnv::start().await?;
    let plain = FakeKubelet::plain("worker-1").await?;
    let tls = FakeKubelet::start("worker-1").await?;
    let _agent = env
        .agent_with("worker-1", |config| config.transport = transport)
        .await?;
    let bulk = deterministic_bytes(0, BULK);
    let digest = sha256_hex(&bulk);
    for round in 0..rounds() {
        let (endpoint, kubelet) = if round % 2 == 0 {
            (env.http(), &plain)
        } else {
            (env.https("worker-1")?, &tls)
        };
        let host = format!("worker-1:{}", kubelet.addr().port());
        let (script, bytes) = match first {
            EndsFirst::Caller => ("sink-then-send", BULK),
            EndsFirst::Target => ("send-then-sink", 1000),
        };
        let path = format!("/exec/default/pod/c?script={script}&bytes={bytes}");
        let client = if round % 4 < 2 {
            UpgradeClient::spdy(&host, &path)
        } else {
            UpgradeClient::websocket(&host, &path)
        };
        let mut stream = client.connect(endpoint).await?.switched()?;
        match first {
            EndsFirst::Caller => {
                let stdin = deterministic_bytes(3, 100_000);
                let reading = stream.talk(&stdin).await?;
                assert_eq!(reading.ended, BodyEnd::CleanClose, "round {round}");
                let (line, answer) = reading.bytes.split_at(65);
                assert_eq!(line[..64], *sha256_hex(&stdin).as_bytes(), "round {round}");
                assert_eq!(sha256_hex(answer), digest, "round {round}");
            }
            EndsFirst::Target => {
                let before = kubelet.received().len();
                let reading = stream.read_to_end().await;
                assert_eq!(reading.ended, BodyEnd::CleanClose, "round {round}");
                assert_eq!(reading.bytes, deterministic_bytes(0, 1000), "round {round}");
                stream.send(&bulk).await?;
                stream.finish().await?;
                let received = eventually("the target has all of it", WAIT_TIMEOUT, async || {
                    kubelet.received().into_iter().nth(before)
                });
                assert_eq!(received.await.sha256, digest, "round {round}");
            }
        }
    }
    Ok(())
}

/// Runs as many upgrades concurrently as the limit of open files and the kernel's queues of connections
/// that are not yet accepted allow. A connection that finds a queue full is reset after a minute.
#[tokio::test(flavor = "multi_thread")]
async fn r15_10_000_refused_upgrades_have_each_their_own_body() -> Result<()> {
    let env = TestEnv::start_with(|settings| {
        let loaded = scaled(LOADED).as_secs();
        settings.limits = TestEnv::limits(&format!(
            "{{openTimeout: {loaded}s, requestHeadTimeout: {loaded}s, suspectAfterBusy: {loaded}s, suspectAfterIdle: {loaded}s, deadAfter: {loaded}s, streamsPerAgent: 24000, bufferPool: 64GiB, callersTotal: 40000, callersPerSource: 40000}}",
        ));
    })
    .await?;
    let kubelet = FakeKubelet::plain("worker-1").await?;
    let _agent = env
        .agent_with("worker-1", |config| {
            // The test must not reach the limits of the tunnel.
            config.limits.streams_per_agent = 12_000;
            let limits = &mut config.limits;
            for limit in [
                &mut limits.target_dial_timeout,
                &mut limits.suspect_after_busy,
                &mut limits.suspect_after_idle,
                &mut limits.dead_after,
            ] {
                *limit = scaled(LOADED);
            }
            config.limits.buffer_pool = Some(64 << 30);
        })
        .await?;
    let host = format!("worker-1:{}", kubelet.addr().port());
    let at_once = open_files()?.saturating_sub(500).max(400) / FILES_EACH;
    let refused = (0..10_000).map(|id| {
        let path = format!("/exec/a/b/c?refuse=403&id={id}");
        let (client, endpoint) = (UpgradeClient::spdy(&host, &path), env.http());
        async move {
            let reply = client.connect(endpoint).await?.refused()?;
            let (status, text) = (reply.status, reply.text());
            let is_whole = reply.ended.is_clean();
            ensure!(status == 403 && is_whole, "{id}: {status} {text}");
            ensure!(text == refusal(id), "{id} got {text}");
            anyhow::Ok(())
        }
    });
    stream::iter(refused)
        .buffer_unordered(at_once.min(ACCEPT_QUEUE))
        .try_collect::<()>()
        .await?;
    assert_eq!(kubelet.traffic().requests(), 10_000);
    eventually("no connection is left", WAIT_TIMEOUT, async || {
        let open = kubelet.traffic().open();
        (open == 0).then_some(()).ok_or(open)
    })
    .await;
    Ok(())
}

/// Time in which a thousand upgrades at once open their streams and dial.
const LOADED: Duration = Duration::from_secs(60);
/// Number of open files per upgrade. Both ends of the caller's connection and of the target's are
/// in this process.
const FILES_EACH: usize = 4;
/// Connections that a listener's queue has room for.
const ACCEPT_QUEUE: usize = 1000;

fn open_files() -> Result<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits")?;
    let mut lines = limits.lines();
    let line = lines.find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.and_then(|line| line.split_whitespace().next());
    Ok(soft.context("limit of open files")?.parse()?)
}

/// Tests S40 (see CVE-2018-1002105): a connection whose upgrade failed carries no further request.
#[tokio::test(flavor = "multi_thread")]
async fn s40_request_behind_an_upgrade_that_was_not_granted_reaches_nobody() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    for status in [204, 403] {
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 3\r\n\r\nabc");
        let steps = vec![
            HostileAction::ReadHead,
            HostileAction::Send(answer.into()),
            HostileAction::Hold,
        ];
        let target = HostileTarget::start(steps).await?;
        let mut stream = ByteStream::connect(env.http()).await?;
        stream.send(&upgrade_with_another_behind(&target)).await?;
        let reading = stream.read_to_end().await;
        let text = String::from_utf8_lossy(&reading.bytes);
        let line = format!("HTTP/1.1 {status} ");
        assert!(text.starts_with(&line), "{text}");
        assert_eq!(text.matches("HTTP/1.1 ").count(), 1, "{text}");
        is_closed_untouched(&target).await;
    }
    // The target sends no answer. The target's connection closes with the caller's.
    let target = HostileTarget::start(vec![HostileAction::ReadHead, HostileAction::Hold]).await?;
    let mut stream = ByteStream::connect(env.http()).await?;
    stream.send(&upgrade_with_another_behind(&target)).await?;
    eventually("the target is reached", WAIT_TIMEOUT, async || {
        (target.traffic().requests() == 1).then_some(())
    })
    .await;
    drop(stream);
    is_closed_untouched(&target).await;
    Ok(())
}

fn upgrade_with_another_behind(target: &HostileTarget) -> Vec<u8> {
    let host = format!("Host: worker-1:{}", target.addr().port());
    let upgrade = format!("POST /exec/a/b/c HTTP/1.1\r\n{host}\r\nContent-Length: 0\r\n");
    let wanted = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    format!("{upgrade}{wanted}GET /secrets HTTP/1.1\r\n{host}\r\n\r\n").into_bytes()
}

/// Waits up to a second until the target's only connection is closed, and checks that no byte
/// followed the first head.
async fn is_closed_untouched(target: &HostileTarget) {
    let traffic = target.traffic();
    let closed = async || (traffic.open() == 0).then_some(());
    eventually("the connection is closed", Duration::from_secs(1), closed).await;
    let counts = (traffic.accepted(), traffic.requests(), traffic.bytes_in());
    assert_eq!(counts, (1, 1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn s41_redirects_are_passed_and_never_followed() -> Result<()> {
    let env = TestEnv::start().await?;
    let _agent = env.agent("worker-1").await?;
    let elsewhere = RecordingTarget::start("elsewhere").await?;
    let location = format!("http://127.0.0.1:{}/stolen", elsewhere.addr().port());
    for status in [300, 301, 302, 303, 307, 308] {
        let answer =
            format!("HTTP/1.1 {status} X\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n");
        let answer = HostileAction::Send(answer.into());
        let target = HostileTarget::start(vec![HostileAction::ReadHead, answer]).await?;
        let host = format!("worker-1:{}", target.addr().port());
        for method in ["GET", "POST"] {
            let plain = RawRequest::new(method, "/", &host)
                .header("Authorization", "Bearer secret")
                .header("Connection", "close");
            let reply = request(env.http(), &plain).await?;
            assert_eq!(reply.status, status);
            assert_eq!(reply.header("location"), Some(location.as_str()));
        }
        let upgrade =
            UpgradeClient::spdy(&host, "/exec/a/b/c").header("Authorization", "Bearer secret");
        let reply = upgrade.connect(env.http()).await?.refused()?;
        assert_eq!(reply.status, status);
        assert_eq!(reply.header("location"), Some(location.as_str()));
    }
    assert_eq!(elsewhere.traffic().accepted(), 0);
    Ok(())
}
