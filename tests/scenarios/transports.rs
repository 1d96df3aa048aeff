//! Both transports behave the same: a shutdown or an upgrade to QUIC loses no byte, even with
//! packet loss.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tunnel_agent::config::{Config, TransportChoice};
use tunnel_proto::transport::TransportKind;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT, server_address};
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::rounds;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::targets::Exporter;

tests_of! {
    fn agent_that_stops_under_loss_loses_no_byte_each_time_over_quic() =
        in_parallel(|rounds| agent_stops(TransportChoice::Quic, rounds));
    fn agent_that_stops_under_loss_loses_no_byte_each_time_over_h2() =
        in_parallel(|rounds| agent_stops(TransportChoice::H2, rounds));
    fn server_that_stops_under_loss_loses_no_byte_each_time_over_quic() =
        in_parallel(|rounds| server_stops(TransportChoice::Quic, rounds));
    fn server_that_stops_under_loss_loses_no_byte_each_time_over_h2() =
        in_parallel(|rounds| server_stops(TransportChoice::H2, rounds));
    /// Upgrades from h2 to QUIC while answers are in progress. These answers end on the old
    /// session, complete.
    fn promotion_under_loss_loses_no_byte_each_time() = in_parallel(promotions);
}

async fn agent_stops(transport: TransportChoice, rounds: Range<usize>) -> Result<()> {
    let site = Site::start(rounds.start).await?;
    for round in rounds {
        let agent = site.agent(transport, |_| {}).await?;
        let served = site.exporter.traffic().requests();
        let (whole, ()) = tokio::join!(site.whole_answer(round), async {
            // The target has received the request, so its answer is on the way.
            while site.exporter.traffic().requests() == served {
                tokio::task::yield_now().await;
            }
            agent.drain();
        });
        whole?;
        agent.ended().await?;
    }
    Ok(())
}

async fn server_stops(transport: TransportChoice, rounds: Range<usize>) -> Result<()> {
    let mut site = Site::start(rounds.start).await?;
    let _agent = site.agent(transport, |_| {}).await?;
    for round in rounds {
        site.env.connected(NODE).await;
        let served = site.exporter.traffic().requests();
        let (whole, ()) = tokio::join!(site.whole_answer(round), async {
            while site.exporter.traffic().requests() == served {
                tokio::task::yield_now().await;
            }
            site.env.drain_server();
        });
        whole?;
        site.env.restart_server().await?;
    }
    Ok(())
}

async fn promotions(rounds: Range<usize>) -> Result<()> {
    let site = Site::start(rounds.start).await?;
    for round in rounds {
        site.link.set(TrafficClass::UDP, Impairment::black_hole());
        let agent = site
            .agent(TransportChoice::Auto, |config| {
                config.limits.quic_head_start = Duration::from_millis(50);
                config.limits.quic_probe_every = Duration::from_millis(200);
                config.limits.handshake_timeout = Duration::from_secs(2);
            })
            .await?;
        ensure!(site.transport()? == TransportKind::H2, "UDP is blocked");
        site.link.set(TrafficClass::UDP, Impairment::lossy(LOSS));
        // Answers follow each other without a pause, so that one is in progress when the agent
        // upgrades.
        let upgraded = eventually("the agent upgrades to QUIC", WAIT_TIMEOUT, async || {
            site.whole_answer(round).await?;
            ensure!(site.transport()? == TransportKind::Quic, "still on h2");
            Ok(())
        });
        upgraded.await;
        agent.stop().await?;
    }
    Ok(())
}

/// A server, a lossy link to it, and a target.
struct Site {
    env: TestEnv,
    link: Link,
    exporter: Exporter,
}

impl Site {
    async fn start(seed: usize) -> Result<Self> {
        let env = TestEnv::start().await?;
        let link = Link::start(env.bound().agents, seed as u64)?;
        link.set(TrafficClass::ALL, Impairment::lossy(LOSS));
        let exporter = Exporter::start(NODE).await?;
        Ok(Self {
            env,
            link,
            exporter,
        })
    }

    async fn agent(
        &self,
        transport: TransportChoice,
        change: impl FnOnce(&mut Config),
    ) -> Result<Agent> {
        self.env
            .agent_with(NODE, |config| {
                config.servers = vec![server_address(self.link.addr())];
                config.transport = transport;
                change(config);
            })
            .await
    }

    /// Returns the transport of the session that gets new streams.
    fn transport(&self) -> Result<TransportKind> {
        let sessions = self.env.registry().of_node(&NODE.parse()?);
        let taking = sessions.iter().find(|session| !session.is_withdrawn());
        Ok(taking.context("no session")?.session.transport())
    }

    async fn whole_answer(&self, round: usize) -> Result<()> {
        let host = format!("{NODE}:{}", self.exporter.addr().port());
        let get = RawRequest::get(&host, &format!("/size/{BYTES}?seed={round}"));
        let reply = request(self.env.http(), &get).await?;
        ensure!(reply.status == 200, "round {round}: {}", reply.text());
        let digest = reply.header("x-sha256").context("no digest")?;
        ensure!(
            digest == reply.sha256(),
            "round {round}: {} bytes",
            reply.body.len()
        );
        Ok(())
    }
}

/// Runs all rounds, divided among several sites that run in parallel.
async fn in_parallel<Fut>(run: impl Fn(Range<usize>) -> Fut) -> Result<()>
where
    Fut: Future<Output = Result<()>> + Send + 'static,
{
    let share = rounds() / SITES;
    let mut runs = JoinSet::new();
    for site in 0..SITES {
        runs.spawn(run(site * share..(site + 1) * share));
    }
    while let Some(run) = runs.join_next().await {
        run??;
    }
    Ok(())
}

const NODE: &str = "worker-1";
const LOSS: f64 = 0.01;
const BYTES: usize = 256 * 1024;
const SITES: usize = 5;
