//! S10: requests that callers cancel at random moments leak no resources, however many there are.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tunnel_tests::checks::ensure_status;
use tunnel_tests::client::RawRequest;
use tunnel_tests::env::NodeEnv;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::SilentTarget;

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
    let site = NodeEnv::start().await?;
    let silent = SilentTarget::start().await?;
    let unread = format!("worker-1:{}", silent.addr().port());
    // No process listens on the last port.
    let hosts = [site.host.clone(), unread, "worker-1:1024".to_owned()];
    for _ in 0..10 {
        ensure_status(&site.get("/metrics").await?, 200)?;
    }
    sleep(scaled(Duration::from_millis(500))).await;
    let before = resource_usage()?;
    let seed: u64 = rand::random();
    let env = &site.env;
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
        let open = env.metric("tunnel_server_streams_open").await?;
        let bytes = env.metric("tunnel_server_buffer_bytes").await?;
        ensure!(
            (open, bytes) == (0, 0),
            "seed {seed}: {open}, {bytes} bytes"
        );
        let agents = env.registry().all();
        let streams = agents.iter().map(|agent| agent.session.stats().streams);
        let streams = streams.sum::<usize>();
        ensure!(streams <= 1, "seed {seed}: {streams} streams");
        let after = resource_usage()?;
        let has_room = after.0 <= before.0 + TASKS_SLACK && after.1 <= before.1 + DESCRIPTORS_SLACK;
        ensure!(has_room, "seed {seed}: {before:?} before, {after:?}");
        Ok(())
    })
    .await;
    report_figure(&format!(
        "S10: {dials} dials, before {before:?}, after {:?}",
        resource_usage()?
    ));
    ensure_status(&site.get("/metrics").await?, 200)
}
