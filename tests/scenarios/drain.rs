//! New calls are answered until the drain delay is over. Shutdown under requests, with processes, is
//! in `binaries/drain.rs`.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{NodeEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_not_ready_answers_new_calls_until_the_drain_delay_is_over() -> Result<()> {
    let delay = scaled(DELAY);
    let setting = format!("{}ms", delay.as_millis());
    let site = NodeEnv::start_with(|settings| settings.drain_delay = Some(setting)).await?;
    let readyz = RawRequest::get("localhost", "/readyz");
    let began = Instant::now();
    site.env.drain_server();
    eventually("the server is not ready", WAIT_TIMEOUT, async || {
        let status = request(site.env.meta(), &readyz).await?.status;
        ensure!(status == 503, "{status}");
        anyhow::Ok(())
    })
    .await;
    while began.elapsed() < delay / 2 {
        let reply = site.get("/metrics").await?;
        ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    }
    eventually("the listener is closed", WAIT_TIMEOUT, async || {
        site.get("/metrics").await.is_err().then_some(())
    })
    .await;
    ensure!(began.elapsed() >= delay, "{:?}", began.elapsed());
    Ok(())
}

/// The drain delay of the server.
const DELAY: Duration = Duration::from_secs(2);
