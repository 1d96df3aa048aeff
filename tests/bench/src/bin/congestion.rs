//! Measures QUIC's congestion controls through the whole product over a long path: `cargo run
//! --release -p tunnel-bench --bin congestion`. The results determine the default of
//! `--quic-congestion`.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::time::timeout;
use tunnel_proto::transport::CongestionControl;
use tunnel_tests::client::{Exchange, KeepAliveClient, RawRequest};
use tunnel_tests::env::{TestEnv, server_address};
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::stats::{millis, percentile};
use tunnel_tests::targets::Exporter;

/// One-way delay; the round trip is 50 ms.
const DELAY: Duration = Duration::from_millis(25);
/// 200 Mbit/s, with a buffer of two bandwidth-delay products.
const RATE: u64 = 25_000_000;
const QUEUE: usize = 2_500_000;
/// Duration of a bulk stream for one measurement.
const MEASURED: Duration = Duration::from_secs(8);
const ROUNDS: u64 = 3;

#[tokio::main]
async fn main() -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| control | loss each way | bulk, Mbit/s (of {ROUNDS} runs) | small request next to it, ms p50 / p99 | lost sessions |"
    )?;
    writeln!(out, "| --- | --- | --- | --- | --- |")?;
    for loss in [0.0, 0.01] {
        for control in [CongestionControl::Cubic, CongestionControl::Bbr] {
            let mut rates = Vec::new();
            let mut waits = Vec::new();
            let mut lost = 0;
            for seed in 0..ROUNDS {
                match measure(control, loss, seed).await {
                    Ok(run) => {
                        rates.push(run.megabits);
                        waits.extend(run.waits);
                        lost += usize::from(run.sessions_lost);
                    }
                    Err(error) => {
                        lost += 1;
                        writeln!(std::io::stderr(), "{control:?} {loss}: {error:#}")?;
                    }
                }
            }
            rates.sort_by(f64::total_cmp);
            waits.sort();
            let rates: Vec<_> = rates.iter().map(|rate| format!("{rate:.1}")).collect();
            writeln!(
                out,
                "| {control:?} | {:.0} % | {} | {} / {} | {lost} |",
                loss * 100.0,
                rates.join(", "),
                millis(percentile(&waits, 0.5)),
                millis(percentile(&waits, 0.99)),
            )?;
        }
    }
    Ok(())
}

struct Run {
    megabits: f64,
    waits: Vec<Duration>,
    sessions_lost: bool,
}

/// Measures one bulk answer from the edge for some seconds, in parallel with small requests.
async fn measure(control: CongestionControl, loss: f64, seed: u64) -> Result<Run> {
    let env = TestEnv::start_with(|settings| {
        settings.quic_congestion = Some(format!("{control:?}").to_lowercase());
    })
    .await?;
    let link = Link::start(env.bound().agents, seed)?;
    // Set before the session: BBR uses the shortest round trip of the last 10 s.
    let path = Impairment::delayed(DELAY)
        .with_loss(loss)
        .with_rate(RATE)
        .with_queue(QUEUE);
    link.set(TrafficClass::UDP, path);
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env
        .agent_with("worker-1", |config| {
            config.servers = vec![server_address(link.addr())];
            config.transport = tunnel_agent::config::TransportChoice::Quic;
            config.quic_congestion = control;
        })
        .await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let session = session(&env)?;
    let get = RawRequest::get(&host, "/size/4294967296");
    let mut bulk = Exchange::start(env.http(), &get).await?;
    let mut small = KeepAliveClient::connect(env.http()).await?;
    let began = Instant::now();
    let reading = async {
        let mut bytes = 0_usize;
        while began.elapsed() < MEASURED {
            match timeout(MEASURED, bulk.data()).await {
                Ok(Some(data)) => bytes += data.len(),
                Ok(None) | Err(_) => break,
            }
        }
        (bytes, began.elapsed())
    };
    let asking = async {
        let mut waits = Vec::new();
        let get = RawRequest::new("GET", "/size/1024", &host);
        while began.elapsed() < MEASURED {
            let asked = Instant::now();
            match timeout(MEASURED, small.request(&get)).await {
                Ok(Ok(reply)) if reply.status == 200 => waits.push(asked.elapsed()),
                Ok(_) | Err(_) => break,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        waits
    };
    let ((bytes, elapsed), waits) = tokio::join!(reading, asking);
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let megabits = bytes as f64 * 8.0 / elapsed.as_secs_f64() / 1e6;
    Ok(Run {
        megabits,
        waits,
        sessions_lost: self::session(&env).ok() != Some(session),
    })
}

fn session(env: &TestEnv) -> Result<String> {
    let sessions = env.registry().of_node(&"worker-1".parse()?);
    let session = sessions.first().context("no session")?;
    Ok(session.id.to_string())
}
