//! Shutdown loses no data: an answer that ends at the moment of the signal arrives complete.

use anyhow::Result;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
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
