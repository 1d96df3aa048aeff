//! Shutdown loses no data: an answer that ends at the moment of the signal arrives complete, and
//! new calls are answered until the drain delay is over.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::rounds;
use tunnel_tests::targets::Exporter;

const MIB: usize = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn agent_that_stops_as_an_answer_ends_loses_none_of_it_each_time() -> Result<()> {
    let env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let path = format!("/size/{MIB}");
    for round in 0..rounds() {
        let agent = env.agent("worker-1").await?;
        let served = exporter.traffic().requests();
        let get = RawRequest::get(&host, &path);
        let (reply, ()) = tokio::join!(request(env.http(), &get), async {
            // The target has received the request, and its answer is on the wire.
            while exporter.traffic().requests() == served {
                tokio::task::yield_now().await;
            }
            agent.drain();
        });
        let reply = reply?;
        assert_eq!(reply.status, 200, "round {round}: {}", reply.text());
        assert_eq!(
            reply.header("x-sha256"),
            Some(reply.sha256().as_str()),
            "round {round}"
        );
        agent.ended().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_stops_as_an_answer_ends_loses_none_of_it_each_time() -> Result<()> {
    let mut env = TestEnv::start().await?;
    let exporter = Exporter::start("worker-1").await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let path = format!("/size/{MIB}");
    let _agent = env.agent("worker-1").await?;
    for round in 0..rounds() {
        env.connected("worker-1").await;
        let served = exporter.traffic().requests();
        let get = RawRequest::get(&host, &path);
        let (reply, ()) = tokio::join!(request(env.http(), &get), async {
            while exporter.traffic().requests() == served {
                tokio::task::yield_now().await;
            }
            env.drain_server();
        });
        let reply = reply?;
        assert_eq!(reply.status, 200, "round {round}: {}", reply.text());
        assert_eq!(
            reply.header("x-sha256"),
            Some(reply.sha256().as_str()),
            "round {round}"
        );
        env.restart_server().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_not_ready_answers_new_calls_until_the_drain_delay_is_over() -> Result<()> {
    let delay = scaled(DELAY);
    let setting = format!("{}ms", delay.as_millis());
    let site = NodeEnv::start_with(|settings| settings.drain_delay = Some(setting)).await?;
    let readyz = RawRequest::get("localhost", "/readyz");
    let began = Instant::now();
    site.env.drain_server();
    eventually("the server is not ready", WAIT_TIMEOUT, async || {
        let status = request(site.env.bound().meta, &readyz).await?.status;
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
