//! S10: requests that callers cancel at random moments leak no resources, however many there are.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::{Exporter, SilentTarget};

use super::report_figure;

/// Number of canceled dials by default; `CULVERT_CANCELLED_DIALS` sets another one. Long runs use
/// 100,000.
const DIALS: u64 = 3000;
/// Number of concurrent callers, below the limit of one agent's streams.
const CALLERS: u64 = 50;
/// Tolerance for tasks and descriptors that the runtime and its clients open and close at any time.
const TASKS_SLACK: usize = 8;
const DESCRIPTORS_SLACK: usize = 12;

/// Returns the number of tasks and of open descriptors of the process.
fn resource_usage() -> Result<(usize, usize)> {
    let tasks = tokio::runtime::Handle::current()
        .metrics()
        .num_alive_tasks();
    Ok((tasks, std::fs::read_dir("/proc/self/fd")?.count()))
}

/// Sends one request and closes the connection at a random moment: with FIN or reset; before, in or
/// after the request head, or during the answer.
async fn give_up(endpoint: std::net::SocketAddr, hosts: &[String; 3], seed: u64) -> Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let host = &hosts[random.random_range(0..3)];
    let path = if random.random_bool(0.5) {
        "/metrics"
    } else {
        "/follow"
    };
    let bytes = RawRequest::get(host, path).bytes();
    let mut caller = TcpStream::connect(endpoint).await?;
    let sent = if random.random_bool(0.2) {
        random.random_range(0..bytes.len())
    } else {
        bytes.len()
    };
    caller.write_all(&bytes[..sent]).await?;
    sleep(Duration::from_micros(random.random_range(0..8000))).await;
    if random.random_bool(0.5) {
        caller.set_zero_linger()?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn s10_dials_given_up_at_any_moment_leave_nothing_behind() -> Result<()> {
    let dials = std::env::var("CULVERT_CANCELLED_DIALS").ok();
    let dials = dials.and_then(|text| text.parse().ok()).unwrap_or(DIALS);
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let silent = SilentTarget::start().await?;
    let _agent = env.agent("worker-1").await?;
    let host = |port: u16| format!("worker-1:{port}");
    let good = host(exporter.addr().port());
    // No process listens on the last port.
    let hosts = [good.clone(), host(silent.addr().port()), host(1024)];
    for _ in 0..10 {
        ensure!(
            request(env.http(), &RawRequest::get(&good, "/metrics"))
                .await?
                .status
                == 200
        );
    }
    sleep(scaled(Duration::from_millis(500))).await;
    let before = resource_usage()?;
    let seed: u64 = rand::random();
    let endpoint = env.bound().http.context("no HTTP listener")?;
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let hosts = hosts.clone();
        callers.spawn(async move {
            for dial in (caller..dials).step_by(usize::try_from(CALLERS)?) {
                give_up(endpoint, &hosts, seed.wrapping_add(dial)).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = callers.join_next().await {
        done??;
    }
    eventually("all is released", Duration::from_secs(5), async || {
        let metrics = request(env.bound().meta, &RawRequest::get("meta", "/metrics")).await?;
        let text = metrics.text();
        for line in [
            "tunnel_server_streams_open 0",
            "tunnel_server_buffer_bytes 0",
        ] {
            ensure!(
                text.lines().any(|shown| shown == line),
                "seed {seed}: not {line}"
            );
        }
        let streams: usize = env
            .registry()
            .all()
            .iter()
            .map(|agent| agent.session.health().streams)
            .sum();
        ensure!(streams <= 1, "seed {seed}: {streams} streams");
        let (tasks, descriptors) = resource_usage()?;
        ensure!(
            tasks <= before.0 + TASKS_SLACK && descriptors <= before.1 + DESCRIPTORS_SLACK,
            "seed {seed}: {tasks} tasks and {descriptors} descriptors, {before:?} before"
        );
        Ok(())
    })
    .await;
    report_figure(&format!(
        "S10: {dials} dials, before {before:?}, after {:?}",
        resource_usage()?
    ));
    let last = request(env.http(), &RawRequest::get(&good, "/metrics")).await?;
    ensure!(last.status == 200, "seed {seed}: {}", last.text());
    Ok(())
}
