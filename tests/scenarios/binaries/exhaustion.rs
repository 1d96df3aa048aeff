//! F25: a server without free descriptors. New callers wait, running requests go on, and the
//! processor does not spin.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tunnel_tests::checks::ensure_status;
use tunnel_tests::client::{KeepAliveClient, RawRequest};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Program;
use tunnel_tests::tools::{Tool, or_skip};

use super::{CONNECT, Stack};

#[tokio::test(flavor = "multi_thread")]
async fn f25_server_without_descriptors_pauses_its_listeners_and_recovers() -> Result<()> {
    let Some(prlimit) = or_skip(Program::tool(Tool::Prlimit)) else {
        return Ok(());
    };
    let mut stack = Stack::start(&[], &[]).await?;
    let endpoint = stack.http();
    let get = RawRequest::new("GET", "/metrics", &stack.host());
    let mut running = KeepAliveClient::connect(endpoint).await?;
    ensure_status(&running.request(&get).await?, 200)?;
    let id = stack.server.process().id().context("server's id")?;
    let folder = format!("/proc/{id}");
    let most = fs::read_dir(format!("{folder}/fd"))?.count() + SPARE;
    let limit = [format!("--pid={id}"), format!("--nofile={most}:{most}")];
    prlimit.args(limit).run().await?.ok()?;

    let mut crowd = Vec::new();
    for _ in 0..2 * SPARE {
        crowd.push(TcpStream::connect(endpoint).await?);
    }
    let log = stack.server.process().log().clone();
    let pauses_logged = || {
        let lines = log.lines();
        let of_listener = |line: &&String| {
            line.contains("cannot accept connections") && line.contains("\"http\"")
        };
        lines.iter().filter(of_listener).count()
    };
    eventually("the listener logs that it pauses", CONNECT, async || {
        ensure!(pauses_logged() > 0, "{:#?}", log.lines());
        anyhow::Ok(())
    })
    .await;
    for _ in 0..10 {
        ensure_status(&running.request(&get).await?, 200)?;
    }
    let (before, began) = (ticks(&folder)?, Instant::now());
    sleep(WINDOW).await;
    let busy = (ticks(&folder)? - before) / TICKS_PER_SECOND / began.elapsed().as_secs_f64();
    ensure!(busy < 0.2, "the server takes {busy:.2} of a processor");
    assert_eq!(pauses_logged(), 1, "the pause is logged once");
    drop(crowd);
    stack
        .wait_for_traffic("new callers are served again", Duration::from_secs(1))
        .await;
    Ok(())
}

/// Returns the processor time of a process so far, in clock ticks (proc(5): utime and stime).
fn ticks(folder: &str) -> Result<f64> {
    let stat = fs::read_to_string(format!("{folder}/stat"))?;
    // The process name in parentheses may contain spaces. The first field after it is number 3.
    let (_, fields) = stat.rsplit_once(") ").context("proc stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |number: usize| -> Result<f64> {
        Ok(fields.get(number - 3).context("proc stat")?.parse()?)
    };
    Ok(field(14)? + field(15)?)
}

/// Number of descriptors left to the server for callers.
const SPARE: usize = 50;
const WINDOW: Duration = Duration::from_secs(1);
/// USER_HZ, which is 100 on every Linux that Rust supports.
const TICKS_PER_SECOND: f64 = 100.0;
