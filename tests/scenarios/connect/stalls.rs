//! Tunnels whose callers never read do not harm other callers.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use tunnel_tests::client::Tunnel;
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::scaled;
use tunnel_tests::targets::{EchoTarget, HalfCloseTarget};

use super::{ConnectFixture, NODE};

/// More bytes than all windows on the path together.
const ENDLESS: u64 = 1 << 30;

#[tokio::test(flavor = "multi_thread")]
async fn stalled_readers_1_8_and_64_do_not_harm_others() -> Result<()> {
    let fixture = ConnectFixture::start().await?;
    let _agent = fixture.env.agent(NODE).await?;
    let flood = HalfCloseTarget::start(ENDLESS).await?;
    let echo = EchoTarget::start().await?;
    let (flood, echo) = (
        format!("{NODE}:{}", flood.addr().port()),
        format!("{NODE}:{}", echo.addr().port()),
    );
    let dialer = fixture.dialer();
    let mut before = dialer.dial(&echo).await?;
    let quiet = round_trip(&mut before).await?;
    let mut stalled = Vec::new();
    for count in [1, 8, 64] {
        while stalled.len() < count {
            let mut reader = dialer.dial(&flood).await?;
            // The target begins to send after the caller's half-close. The caller reads only the
            // first byte.
            reader.shutdown().await?;
            let mut first = [0; 1];
            reader.read_exact(&mut first).await?;
            stalled.push(reader);
        }
        let mut slowest = Duration::ZERO;
        for _ in 0..10 {
            slowest = slowest.max(round_trip(&mut before).await?);
            let fresh = timeout(scaled(WAIT_TIMEOUT), dialer.dial(&echo)).await;
            let mut fresh = fresh.context("no new tunnel")??;
            slowest = slowest.max(round_trip(&mut fresh).await?);
        }
        let bound = scaled(Duration::from_secs(1)) + quiet;
        ensure!(slowest < bound, "{count} stalled: {slowest:?}");
    }
    Ok(())
}

async fn round_trip(tunnel: &mut Tunnel) -> Result<Duration> {
    let began = Instant::now();
    tunnel.write_all(b"ping").await?;
    let mut received = [0; 4];
    timeout(scaled(WAIT_TIMEOUT), tunnel.read_exact(&mut received)).await??;
    ensure!(&received == b"ping");
    Ok(began.elapsed())
}
